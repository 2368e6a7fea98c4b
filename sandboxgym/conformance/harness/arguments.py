"""The environment of a subject, made with one argument changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from sandboxgym.conformance.harness.scenario import opened
from sandboxgym.conformance.subject import Subject, layers
from sandboxgym.core import constructor_signature


def reconfigured(subject: Subject, steps: int, *, numbers: int) -> Iterator[tuple[str, Subject]]:
    """The environment made with one argument changed, if it can be played.

    Args:
        subject: as it is made else.
        steps: of its control runs.
        numbers: alternatives tried per number.
    """
    make: Any = subject.make_env
    given: dict[str, Any] = {}
    while isinstance(make, functools.partial):
        given = {**make.keywords, **given}
        make = make.func
    with opened(subject) as env:
        made: Any = type(list(layers(env))[-1]) if make is gym.make else make
    try:
        signature = constructor_signature(made) if isinstance(made, type) else inspect.signature(made)
    except (TypeError, ValueError):
        return
    for parameter in signature.parameters.values():
        value = given.get(parameter.name, parameter.default)
        if parameter.name in ("render_mode", "self") or type(value) not in (bool, int, float):
            continue
        others: list[Any] = [not value] if type(value) is bool else [value + 1, value // 2, 2 * value + 3][:numbers]
        for changed in others:
            other = Subject(
                functools.partial(subject.make_env, **{parameter.name: changed}),
                name=f"{subject.name} with {parameter.name}={changed}",
                actions=subject.actions,
                normalize=subject.normalize,
                reset_options=subject.reset_options,
                declared=subject.capabilities,
                seed=subject.seed,
            )
            try:
                other.make_env().close()
                if changed == value or other.control(0, steps).outcomes[0].raised:
                    continue
            except Exception:  # not a value that it takes
                continue
            yield f"{parameter.name}={changed} instead of {value}", other
