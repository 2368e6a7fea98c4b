"""Checks: documented functions with a stable id that pass, fail, skip or stay inconclusive.

1. A check returns a dict of measurements (PASS) or raises `Failed`, `Skipped` or `Inconclusive`. Any other exception
   is a FAIL with its traceback.
2. `REGISTRY` holds the checks that have been imported, in the order of their definition; `runner.all_checks` imports
   all of them. An id never changes its meaning.
3. Each check states its hazard and its blind spots; reports print both.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sandboxgym.conformance.supervision import pulse
from sandboxgym.conformance.supervision.clock import Stopwatch

if TYPE_CHECKING:
    from sandboxgym.conformance.subject import Subject


class Verdict(enum.StrEnum):
    """Verdict of a check: PASS, FAIL, SKIP (it does not apply) or INCONCLUSIVE (it ran and could not decide)."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"
    INCONCLUSIVE = "INCONCLUSIVE"


class Level(enum.IntEnum):
    """Level of a check: the part of the contract that it tests."""

    API = 0
    """The methods exist, refuse what they must, and declare what they cover."""
    EXACT = 1
    """A restored environment continues exactly like one that was never interrupted."""
    ISOLATION = 2
    """Forks and everything else in the process are isolated from each other."""
    DISTRIBUTION = 3
    """Random futures have the right distribution."""
    PROBES = 4
    """Hidden state of a sandbox: kept, lost or leaked."""
    DURABLE = 5
    """Files, other processes, resources, crashes, threads."""
    COST = 6
    """Time and size, and their growth."""


def as_levels(values: Iterable[int | str]) -> tuple[int, ...]:
    """The numbers of levels given by number or by name (``"exact"``), sorted.

    Raises:
        ValueError: there is no such level.
    """
    names = {level.name.lower(): int(level) for level in Level}
    found = set()
    for value in values:
        number = names.get(value.lower(), value) if isinstance(value, str) else value
        try:
            found.add(int(Level(int(number))))
        except ValueError:
            known = ", ".join(f"{number} ({name})" for name, number in names.items())
            raise ValueError(f"expected levels among {known}, found {value!r}") from None
    return tuple(sorted(found))


class Failed(Exception):
    """The check found the fault that it looks for.

    Attributes:
        evidence: measurements, as JSON values.
        counterexample: a runnable Python script that shows it, or None.
    """

    def __init__(self, message: str, evidence: dict[str, Any] | None = None, counterexample: str | None = None) -> None:
        super().__init__(message)
        self.evidence = evidence or {}
        self.counterexample = counterexample


class Skipped(Exception):
    """The check does not apply; the message gives the reason."""


class Inconclusive(Exception):
    """The check ran but could not decide; the message gives the reason."""

    def __init__(self, message: str, evidence: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.evidence = evidence or {}


@dataclass(frozen=True, slots=True)
class Result:
    """The verdict of one check on one subject."""

    id: str
    verdict: Verdict
    message: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    counterexample: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the effort of a run; a loop ends at its count or when its time is up, whichever comes first."""

    name: str
    traces: int
    """Number of recorded control runs, each with its own seed and task; on-policy and off-policy ones alternate."""
    steps: int
    """Longest control episode, in steps."""
    repeats: int
    """Repetitions that find rare faults: 342 or more miss a fault of one in 50 with a probability below 0.001."""
    forks: int
    """Number of sibling forks that are alive at once."""
    cycles: int
    """Cycles of snapshot, restore, fork, close before resources are counted."""
    depth: int
    """Length of a chain in which each snapshot is taken from a restored one."""
    samples: int
    """Draws on each side of a test of distributions."""
    seconds: float
    """Soft limit of one check in seconds."""
    share: float = 1.0
    """Factor on the minimum counts of loops, which hold even when the time is up; below 1 for a slow environment."""
    total: float = math.inf
    """Processor seconds that a run shares out among its checks; a single check may exceed its share."""
    waits: bool = False
    """True if half of the wall time counts towards the budget, because other processes do the environment's work."""

    @classmethod
    def named(cls, name: str) -> Budget:
        """The budget named ``quick`` or ``full``.

        Raises:
            ValueError: there is no budget with this name.
        """
        try:
            return BUDGETS[name]
        except KeyError:
            raise ValueError(f"expected a budget of {', '.join(BUDGETS)}, found {name!r}") from None

    def paced(self, seconds: float) -> Budget:
        """The budget adapted to an environment whose calls or snapshots take ``seconds`` each.

        A control run that would take more than a quarter of the soft limit is halved until it does not, down to
        `SHORTEST` steps, of which there are at most two runs. If even these take too long, the minimum counts of loops
        are reduced as well. Both are coarse, so that the same environment gets the same checks. If a call takes `SLOW`
        or more, there are at most four control runs, and ``total`` is at most `PATIENCE`.
        """
        steps, share = self.steps, 1.0
        while steps > SHORTEST and steps * seconds > self.seconds / 4:
            steps = max(SHORTEST, steps // 2)
        while steps == SHORTEST and share > LEAST and steps * seconds > self.seconds / 4 / share:
            share /= 2
        traces, total, waits = self.traces, self.total, seconds >= SLOW
        if waits:
            traces, total = min(traces, 4), min(total, PATIENCE)
        if steps == SHORTEST:
            traces = min(traces, 2)
        return replace(self, steps=steps, traces=traces, share=share, total=total, waits=waits)

    def sharing(self, spent: float, checks: int) -> Budget:
        """The budget for the next check, when ``spent`` seconds are used and ``checks`` checks are left.

        A check may take three times its equal share of the seconds left, but no less than a quarter of the soft limit
        and no more than all of it.
        """
        share = (self.total - spent) / checks
        return replace(self, seconds=min(self.seconds, max(self.seconds / 4, 3 * share)))

    def __str__(self) -> str:
        usual = BUDGETS.get(self.name, self)
        if self.steps == usual.steps:
            return self.name
        fewer = f", least counts x {self.share:g}" if self.share < 1 else ""
        return f"{self.name} (slow: control runs of {self.steps} steps{fewer})"

    def spending(self, count: int, *, seconds: float | None = None, at_least: int = 1) -> Iterator[int]:
        """Iterate over ``range(count)`` until the time is up, but for a minimum number of rounds.

        Processor time counts, so that a busy machine checks no less. Waiting counts half, except that waiting for a
        processor does not count (`clock`).

        Args:
            count: number of rounds if the time suffices.
            seconds: the time limit; default: the soft limit of a check.
            at_least: minimum number of rounds, whatever the time. A number above 2 is multiplied by ``share``, but not
                below 2.
        """
        limit = self.seconds if seconds is None else seconds
        at_least = max(min(at_least, 2), round(at_least * self.share))
        watch = Stopwatch()
        for index in range(count):
            pulse.beat()
            if index >= at_least and watch.spent(limit):
                return
            yield index


SHORTEST = 8
"""Fewest steps of a control run; shorter runs show too little."""
SLOW = 0.01
"""Seconds per call from which an environment is taken to run processes or containers rather than in memory."""
PATIENCE = 300.0
"""Largest `Budget.total` of environments as slow as `SLOW`; half of the wall time counts, so that it is 10 minutes."""
LEAST = 0.25
"""Smallest `Budget.share`."""

BUDGETS = {
    "quick": Budget("quick", 4, 60, 400, 4, 100, 200, 1000, 2.0, total=45.0),
    "full": Budget("full", 12, 200, 1000, 4, 300, 200, 4000, 40.0),
}

CheckFunction = Callable[["Subject", Budget, np.random.Generator], "dict[str, Any] | None"]


@dataclass(frozen=True, slots=True)
class Check:
    """A registered check."""

    id: str
    level: Level
    function: CheckFunction
    needs: tuple[str, ...]
    """Capabilities without which the check is skipped; see `NEEDS`."""
    after: tuple[str, ...]
    """Ids of earlier checks; if one of them failed, this check is skipped."""
    hazard: str
    """The harm to training if the check fails."""
    blind: str
    """Faults that the check cannot see."""

    @property
    def summary(self) -> str:
        """Description of the check: the function's docstring."""
        return (self.function.__doc__ or "").strip()


NEEDS = ("exact", "rng", "processes", "clock", "cross_process", "cross_host", "save")
"""Names of capabilities: flags of `SnapshotSpec`; ``exact`` (futures repeat after a restore, because the random streams
are captured or there are none); ``save`` (snapshots can be saved and loaded)."""

REGISTRY: dict[str, Check] = {}


def check(
    id: str, *, level: int, hazard: str, blind: str, needs: tuple[str, ...] = (), after: tuple[str, ...] = ()
) -> Callable[[CheckFunction], CheckFunction]:
    """Decorator that registers a check under an id; the function's docstring describes the check in reports.

    Args:
        id: stable name, ``theme.check``.
        level: number of a `Level`.
        hazard: the harm to training if the check fails.
        blind: faults that the check cannot see.
        needs: capabilities without which the check is skipped; see `NEEDS`.
        after: ids of earlier checks; if one of them failed, this check is skipped.

    Raises:
        ValueError: a need is unknown, or another check has this id.
    """
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise ValueError(f"{id}: expected needs among {NEEDS}, found {sorted(unknown)}")

    def register(function: CheckFunction) -> CheckFunction:
        known = REGISTRY.get(id)
        if known is not None and known.function.__qualname__ != function.__qualname__:
            raise ValueError(f"two checks are called {id}")
        REGISTRY[id] = Check(id, Level(level), function, needs, after, hazard, blind)
        return function

    return register
