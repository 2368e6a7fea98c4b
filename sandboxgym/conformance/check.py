"""Checks: documented functions with a stable id that pass, fail, skip or stay inconclusive.

1. A check returns a dict of measurements (PASS) or raises `Failed`, `Skipped` or `Inconclusive`. Any other exception
   of the environment under test is a FAIL with the traceback.
2. `REGISTRY` holds all checks in the order of their definition; ids never change their meaning.
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
    """Verdict of a check."""

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
    """Levels by number or by name (``"exact"``), in order.

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
    """The check saw its hazard.

    Attributes:
        evidence: measurements, as JSON values.
        counterexample: a runnable Python script that shows it, or None.
    """

    def __init__(self, message: str, evidence: dict[str, Any] | None = None, counterexample: str | None = None) -> None:
        super().__init__(message)
        self.evidence = evidence or {}
        self.counterexample = counterexample


class Skipped(Exception):
    """The check does not apply; the message is the reason."""


class Inconclusive(Exception):
    """The check ran without a decision; the message is the reason."""

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
    """Limits on the effort of a run. Loops end at their count or at the time, whichever is first."""

    name: str
    traces: int
    """Recorded control runs (each its own seed and task), on-policy and off-policy alternately."""
    steps: int
    """Longest control episode, in steps."""
    repeats: int
    """Repetitions against rare faults: one in 50 is missed with probability < 0.001 from 342 on."""
    forks: int
    """Siblings that are alive at once."""
    cycles: int
    """Cycles of snapshot, restore, fork, close before resources are counted."""
    depth: int
    """Length of a chain in which each snapshot is taken from a restored one."""
    samples: int
    """Draws on each side of a test of distributions."""
    seconds: float
    """Soft limit of one check in seconds."""
    share: float = 1.0
    """Share of the least counts of loops, which are reached whatever the time, that a slow environment must reach."""
    total: float = math.inf
    """Processor seconds that a run of all checks aims at."""
    waits: bool = False
    """Half of the wall time counts towards the budget too: other processes do the environment's work."""

    @classmethod
    def named(cls, name: str) -> Budget:
        """The budget ``quick`` or ``full``.

        Raises:
            ValueError: another name.
        """
        try:
            return BUDGETS[name]
        except KeyError:
            raise ValueError(f"expected a budget of {', '.join(BUDGETS)}, found {name!r}") from None

    def paced(self, seconds: float) -> Budget:
        """The budget for an environment whose calls, or snapshots, take that long.

        Where a control run would take more than a quarter of the soft limit, it is halved until it does not; where
        even the shortest does, loops may also end after fewer rounds. Both are coarse, so that the same environment
        gets the same checks. With a call of `SLOW` and more there are at most four control runs, and a run of all
        checks aims at `PATIENCE` at most.
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
        """The budget for the next check, ``spent`` seconds after the start, with so many checks left.

        A check may take three times its share of what is left, a quarter of the soft limit at least, all at most.
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
        """``range(count)``, cut short when the time is up, but not before ``at_least``.

        Time is that of the processor, so that a busy machine checks no less; waiting counts half, and none of the wait
        for a processor (`clock`).
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
"""Steps of a control run below which the checks see too little."""
SLOW = 0.01
"""Seconds per call above which an environment counts as one of processes or containers, not of memory."""
PATIENCE = 300.0
"""`Budget.total` of these at most; half of the wall time counts, so that it is ten minutes."""
LEAST = 0.25
"""The smallest share of the least counts."""

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
    """Checks that must not have failed."""
    hazard: str
    """The harm to training if the check fails."""
    blind: str
    """Faults that the check cannot see."""

    @property
    def summary(self) -> str:
        """Description of the check: the function's docstring."""
        return (self.function.__doc__ or "").strip()


NEEDS = ("exact", "rng", "processes", "clock", "cross_process", "cross_host", "save")
"""Capabilities by name: the flags of `SnapshotSpec`; ``exact`` (futures repeat after a restore: the streams are
captured, or there are none); ``save`` (handles can be saved and loaded)."""

REGISTRY: dict[str, Check] = {}


def check(
    id: str, *, level: int, hazard: str, blind: str, needs: tuple[str, ...] = (), after: tuple[str, ...] = ()
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check under its id; the function's docstring describes it."""
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
