"""Control runs, moments of snapshots, and comparisons that several checks share."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sandboxgym.conformance.check import BUDGETS, Budget
from sandboxgym.conformance.harness.canonical import difference
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    comparable,
)
from sandboxgym.conformance.subject import AnyEnv, Control, Subject

SHORT = 4
"""Calls compared after each of hundreds of restores."""


def points_of(control: Control, rng: np.random.Generator, middle: int = 2) -> list[int]:
    """Moments of snapshots: after the reset, in the middle, before the last step, after the end of the episode."""
    last = control.last
    inside = rng.integers(1, last, size=middle).tolist() if last > 1 else []
    points = {1, *inside, max(1, last - 1), last}
    if control.ended is not None:
        points.add(min(last + 1, len(control.ops)))  # after a step past the end
    return sorted(int(point) for point in points)


def controls(subject: Subject, budget: Budget) -> list[Control]:
    """The control runs of a budget."""
    return [subject.control(index, budget.steps) for index in range(budget.traces)]


def in_time(budget: Budget, pool: Sequence[Control]) -> Iterator[Control]:
    """Iterate over control runs: the first two (one on-policy, one not), the others while time remains."""
    return (pool[index] for index in budget.spending(len(pool), at_least=2))


def longer(subject: Subject, budget: Budget) -> list[Control]:
    """One run four times as long, where the usual one stopped before its episode's end and calls are fast."""
    slow = budget.steps < BUDGETS.get(budget.name, budget).steps
    if slow or subject.control(0, budget.steps).ended is not None:
        return []
    return [subject.control(0, 4 * budget.steps)]


@contextmanager
def perturbed(scene: Scene, rng: np.random.Generator) -> Iterator[None]:
    """Change global random streams, an environment variable and the time: a restore must not depend on them."""
    seed = int(rng.integers(2**31))
    states = random.getstate(), np.random.get_state()
    name = f"SANDBOXGYM_CONFORMANCE_{seed}"
    clocks = {clock: getattr(time, clock) for clock in ("time", "monotonic", "perf_counter")}
    clocks |= {f"{clock}_ns": getattr(time, f"{clock}_ns") for clock in clocks}
    shift = int(rng.integers(3600, 3600 * 24 * 100))  # drawn: one of whole days would be none to the time of day
    scene.note(f"import os, random, time; import numpy as np; random.seed({seed}); np.random.seed({seed})")
    scene.note(f"# for the calls that follow, the clocks of the module time are {shift} seconds ahead")
    try:
        random.seed(seed)
        np.random.seed(seed)
        os.environ[name] = "1"
        for clock, real in clocks.items():
            later = shift * 10**9 if clock.endswith("_ns") else shift
            setattr(time, clock, lambda real=real, later=later: real() + later)
        yield
    finally:
        for clock, real in clocks.items():
            setattr(time, clock, real)
        os.environ.pop(name, None)
        random.setstate(states[0])
        np.random.set_state(states[1])


def finds(trials: int) -> dict[str, Any]:
    """Smallest rate of faults that ``trials`` trials find with probability 0.999, for the evidence."""
    return {"would find (99.9 %) a fault in": f"1 of {max(1, int(1 / (1 - 0.001 ** (1 / max(1, trials)))))}"}


def own_future(scene: Scene, env: AnyEnv, control: Control) -> Walk:
    """The control run itself, as the expected future of an environment."""
    return Walk(env, control, {}, [], control.outcomes, comparable(scene.subject, control))


def same_streams(scene: Scene, expected: dict[str, Any], found: dict[str, Any], when: str) -> None:
    """Fail if a random stream differs from the expected one."""
    for name, bits in expected.items():
        if bits is not None and found.get(name) != bits:
            text = difference(bits, found.get(name)) or ""
            scene.fail(f"the random stream {name} is another {when}", {"stream": name, "differs": text[:300]})
