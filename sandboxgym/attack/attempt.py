"""An attempt to break a promise of a sandbox, and its possible outcomes.

1. ``blocked`` is observed: the attempt was made, and nothing had changed outside. One that could not be made is
   ``not applicable``, with the reason.
2. ``declared`` means that the backend's `Capabilities` do not promise protection; every other success is ``passed``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from sandboxgym.sandbox.base import Capabilities

if TYPE_CHECKING:
    from sandboxgym.attack.stage import Stage

Group = Literal["escape", "limits", "starvation", "leftovers"]
GROUPS: tuple[Group, ...] = get_args(Group)
Verdict = Literal["blocked", "declared", "passed", "not applicable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class NotApplicable(Exception):
    """Raised if the attempt cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Observation of an attempt, before it is compared with the declarations."""

    passed: bool
    detail: str


def blocked(detail: str) -> Observed:
    """Observation of an attempt that was made and failed."""
    return Observed(False, detail)


def passed(detail: str) -> Observed:
    """Observation of an attempt that succeeded."""
    return Observed(True, detail)


def never(_: Capabilities) -> bool:
    """Condition that no backend fulfils: success is never declared."""
    return False


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt with its description and the declarations that excuse it."""

    name: str
    """Unique, ``"group/words"``."""
    about: str
    """An attacker's gain if it passes, as a clause with a verb: "changes the mode of the host's /dev/full"."""
    run: Callable[[Stage], Observed]
    """Function that makes the attempt.

    Raises:
        NotApplicable: it cannot be made here.
    """
    declared: Callable[[Capabilities], bool] = never
    """Condition under which a backend declares that the attempt succeeds."""
    tried_if_declared: bool = True
    """False for an attempt that costs seconds and is known to succeed if declared."""

    not_on: frozenset[str] = frozenset()
    """Backends on which it would be the same attempt as on another."""

    def made_on(self, backend: str) -> bool:
        """Tell whether the attempt is made on a backend."""
        return backend not in self.not_on

    @property
    def group(self) -> Group:
        """Class of attempts that the attempt belongs to."""
        for group in GROUPS:
            if self.name.startswith(f"{group}/"):
                return group
        raise ValueError(f"expected a name that begins with one of {', '.join(GROUPS)}, found {self.name!r}")


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """Outcome of an attempt on one backend."""

    backend: str
    name: str
    group: Group
    verdict: Verdict
    about: str
    detail: str
    """Detail of the observation: an error's name, a path, a number."""
    seconds: float = 0.0


def leaves_open(what: str) -> Callable[[Capabilities], bool]:
    """Condition: declared by `Capabilities.leaves_open`."""
    return lambda capabilities: what in getattr(capabilities, "leaves_open", ())


def unlimited(what: str) -> Callable[[Capabilities], bool]:
    """Condition: declared by the absence of a limit from `Capabilities.limits`."""
    return lambda capabilities: what not in capabilities.limits


def either(*predicates: Callable[[Capabilities], bool]) -> Callable[[Capabilities], bool]:
    """Condition: declared by any of these."""
    return lambda capabilities: any(predicate(capabilities) for predicate in predicates)
