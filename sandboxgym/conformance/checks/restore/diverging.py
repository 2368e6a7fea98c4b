"""Level 1: after a restore, other actions than those of the run that took the snapshot, as in a tree search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sandboxgym.conformance.check import SHORTEST, Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.runs import (
    controls,
    own_future,
)
from sandboxgym.conformance.harness import other_process
from sandboxgym.conformance.harness.branching import LENGTH, WIDTH, branches, pictured
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    first_difference,
)
from sandboxgym.conformance.subject import Control, Subject


@check(
    "restore.diverge",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Results of one branch are remembered for another at the same depth: a tree search compares an action with "
    "itself.",
    blind="Results remembered under keys that no two of the branches share; render modes that do not work here.",
)
def diverge(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Plays several branches from each of many moments, in two environments in turn, with restores in between.
    Branches begin with different actions and then take the same ones at the same depths. Snapshots taken on the
    branches at equal depths are restored in random order. Each call, in every third round with the rendered picture, is
    compared with the same call in an environment that was never restored, and that of some branches with a new process.
    """
    told: list[Walk] = []
    found = diverging(subject, budget, rng, _by_restore, told)
    return {**found, **_in_new_process(subject, told)}


Grow = Callable[[Scene, Control, int, list[Walk], np.random.Generator], int]
"""Step of `diverging` from one branch to the next: (scene, control, point, branches, rng) to calls compared."""


def diverging(
    subject: Subject, budget: Budget, rng: np.random.Generator, grow: Grow, told: list[Walk]
) -> dict[str, Any]:
    """Compare branches from many points; see `diverge`. Some of the branches are added to ``told``."""
    found = coverage(subject, budget)
    pool = [each for each in (*found.controls, *controls(subject, budget)) if each.repeatable and each.last > 1]
    if not pool:
        raise Skipped("no run repeats itself without restores: " + subject.control(0, budget.steps).differs)
    drawings = pictured(subject)
    width, length = (2, 5) if budget.waits else (WIDTH, LENGTH)
    compared = points = frames = 0
    for number in budget.spending(24 * len(pool), at_least=2 * len(pool)):
        drawn = bool(drawings) and number % 3 == 2
        mine = drawings[number // 3 % len(drawings)] if drawn else subject
        control = mine.control(number % 4, min(30, budget.steps)) if drawn else pool[number % len(pool)]
        if not control.repeatable:
            continue
        point = int(rng.integers(1, max(2, control.last)))
        with Scene(mine) as scene:
            parted = branches(scene, control, point, rng, found.palette, width=width, length=length)
            calls = grow(scene, control, point, parted, rng)
        compared += calls
        frames += calls if drawn else 0
        points += 1
        if not drawn and len(told) < 8:
            told += parted[:2]
    return {"points": points, "calls compared": compared, "with pictures": frames}


def _by_restore(scene: Scene, control: Control, point: int, parted: list[Walk], rng: np.random.Generator) -> int:
    env, other = scene.start(control), scene.start(control)
    scene.play(env, control.ops[:point])
    snap = scene.snapshot(env)
    own = own_future(scene, env, control)
    middle = point + int(rng.integers(1, 6))
    inner: list[tuple[Any, Walk, int]] = []
    compared = 0
    for number, branch in enumerate((*parted, parted[0], own)):
        target = other if number % 3 == 1 else env
        what = "after a restore, an action that the control did not take" if branch is not own else "after branches"
        result = scene.restore(target, snap)
        scene.expect_returned(target, branch, point, result, what)
        stop = min(middle, branch.end)
        compared += scene.expect(target, branch, point, what, calls=stop - point)
        if stop < branch.end and stop < control.last:
            inner.append((scene.snapshot(target), branch, stop))
        compared += scene.expect(target, branch, stop, what, calls=40)
    for turn, place in enumerate(rng.permutation(len(inner)).tolist()):
        handle, branch, stop = inner[place]
        target = other if place % 2 else env
        if turn % 2:  # from the same depth of another branch
            sideways = parted[(place + 1) % len(parted)]
            scene.restore(target, snap)
            scene.expect(target, sideways, point, "after a restore", calls=stop - point)
        elif turn:
            scene.restore(target, inner[place - 1][0])
        what = f"restored from a snapshot taken on one of {len(inner)} branches at the same depth"
        result = scene.restore(target, handle)
        scene.expect_returned(target, branch, stop, result, what)
        compared += scene.expect(target, branch, stop, what, calls=12)
    return compared


def _in_new_process(subject: Subject, told: list[Walk]) -> dict[str, Any]:
    """True if branches give the same here and in a process of their own, provided that a control run does."""
    control = subject.control(0, SHORTEST)
    plain = other_process.Job(control.seed, control.ops[: control.last])
    jobs = [plain, *(other_process.Job(branch.control.seed, branch.control.ops) for branch in told)]
    try:
        answers = other_process.run(subject, jobs, separate=True)
    except (other_process.Unreachable, other_process.Broken) as error:
        return {"compared with a new process": f"no: {str(error).strip().splitlines()[-1][:200]}"}
    before = control.outcomes[: control.last]
    with Scene(subject) as scene:
        env = scene.start(control)
        now = [scene.call(env, op) for op in control.ops[: control.last]]
    if differs := first_difference(before, now):
        raise Failed(f"where branches were played, even an untouched run is not what it was before: {differs}")
    if first_difference(answers[0], other_process.stateless(before)):
        return {"compared with a new process": "no: even an untouched run gives something else there"}
    for branch, there in zip(told, answers[1:]):
        if differs := first_difference(other_process.stateless(there), other_process.stateless(branch.outcomes)):
            raise Failed(
                f"in a process where other branches were played, one gives something else than in a new one: {differs}",
                {"branch": branch.control.name, "calls": len(branch.control.ops)},
            )
    return {"compared with a new process": len(told)}
