"""Differences of outcomes, in words."""

from __future__ import annotations

from collections.abc import Sequence

from sandboxgym.conformance.harness.canonical import difference, show
from sandboxgym.conformance.subject import Outcome


def first_difference(expected: Sequence[Outcome], found: Sequence[Outcome]) -> str | None:
    """First difference of two runs, in words."""
    for index, (one, other) in enumerate(zip(expected, found)):
        if one != other:
            return f"call {index}: {outcome_difference(one, other)}"
    if len(expected) != len(found):
        return f"{len(expected)} calls expected, {len(found)} made"
    return None


def outcome_difference(expected: Outcome, found: Outcome) -> str:
    """Differences of two outcomes, field by field."""
    if expected.raised != found.raised:
        return f"expected {_kind(expected)}, {_kind(found)} was found"
    differing = [
        difference(getattr(expected, name), getattr(found, name), name)
        for name in Outcome._fields
        if getattr(expected, name) != getattr(found, name)
    ]
    return "; ".join(text for text in differing if text)


def _kind(outcome: Outcome) -> str:
    return f"{outcome.raised} raised" if outcome.raised else "a transition"


def show_outcome(outcome: Outcome) -> str:
    """An outcome as readable text."""
    if outcome.raised is not None:
        return f"{outcome.raised} raised"
    names = [name for name in Outcome._fields if name not in ("raised", "state")]
    text = ", ".join(f"{name}={show(getattr(outcome, name))}" for name in names)
    return text if outcome.state is None else f"{text}, state={show(outcome.state)}"
