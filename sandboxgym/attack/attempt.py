"""One attempt to break a promise of a sandbox, and what can come of it.

1. ``blocked`` is seen: the attempt was made, and outside nothing had changed. One that could not be made is
   ``not applicable``, with the reason.
2. ``declared`` is what a backend's `Capabilities` say does not hold; all else that gets through has ``passed``.
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
    """The attempt cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of an attempt, before anybody asks whether it was declared."""

    passed: bool
    detail: str


def blocked(detail: str) -> Seen:
    """It was made and got nowhere."""
    return Seen(False, detail)


def passed(detail: str) -> Seen:
    """It got through."""
    return Seen(True, detail)


def never(_: Capabilities) -> bool:
    """No backend says so."""
    return False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt."""

    name: str
    """Unique, ``"group/words"``."""
    about: str
    """What an attacker has if it passes: a clause with a verb, as in "changes the mode of the host's /dev/full"."""
    run: Callable[[Stage], Seen]
    """Makes it.

    Raises:
        NotApplicable: it cannot be made here.
    """
    declared: Callable[[Capabilities], bool] = never
    """Whether a backend says itself that this gets through."""
    tried_if_declared: bool = True
    """False for what costs seconds and is known to get through then."""

    not_on: frozenset[str] = frozenset()
    """Backends on which it would be the same attempt as on another."""

    def made_on(self, backend: str) -> bool:
        """Whether it is made on a backend."""
        return backend not in self.not_on

    @property
    def group(self) -> Group:
        """The class that it belongs to."""
        for group in GROUPS:
            if self.name.startswith(f"{group}/"):
                return group
        raise ValueError(f"expected a name that begins with one of {', '.join(GROUPS)}, found {self.name!r}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one attempt on one backend."""

    backend: str
    name: str
    group: Group
    verdict: Verdict
    about: str
    detail: str
    """What was seen: an error's name, a path, a number."""
    seconds: float = 0.0


def leaves_open(what: str) -> Callable[[Capabilities], bool]:
    """Declared by `Capabilities.leaves_open`."""
    return lambda capabilities: what in getattr(capabilities, "leaves_open", ())


def unlimited(what: str) -> Callable[[Capabilities], bool]:
    """Declared by the absence of a limit from `Capabilities.limits`."""
    return lambda capabilities: what not in capabilities.limits


def either(*predicates: Callable[[Capabilities], bool]) -> Callable[[Capabilities], bool]:
    """Declared by any of these."""
    return lambda capabilities: any(predicate(capabilities) for predicate in predicates)
