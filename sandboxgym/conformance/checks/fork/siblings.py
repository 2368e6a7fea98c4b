"""Level 2: children that take other actions than their source and than each other."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from sandboxgym.conformance.check import SHORTEST, Budget, Skipped, check
from sandboxgym.conformance.checks.fork.alike import WIDE
from sandboxgym.conformance.checks.restore.diverging import diverging
from sandboxgym.conformance.checks.restore.runs import SHORT, controls, own_future
from sandboxgym.conformance.harness.branching import branches
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import Scene, Walk
from sandboxgym.conformance.subject import AnyEnv, Control, Subject
from sandboxgym.conformance.supervision.clock import Stopwatch

HELD = 2**30
"""Most bytes that the states and snapshots of a crowd may take together."""
CROWD = 64
"""Children that are alive at once and all act."""


@check(
    "fork.source_untouched",
    level=2,
    after=("api.protocol",),
    hazard="Forking changes the source: its trajectory differs from one that was never forked.",
    blind="Effects that show only after the recorded calls.",
)
def source_untouched(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Replays recorded runs and forks after about every second call, with and without a seed.
    Children step, some are reset to other episodes, and all are closed. Every outcome of the source must be that of the
    run without forks.
    """
    repeatable = [control for control in controls(subject, budget) if control.repeatable]
    if not repeatable:
        raise Skipped("no run repeats itself without forks: " + subject.control(0, budget.steps).differs)
    forks, watch = 0, Stopwatch()
    for control in repeatable:
        with Scene(subject) as scene:
            walk = scene.walk(control, ())
            env = scene.start(control)
            for index, op in enumerate(control.ops):
                found = scene.call(env, op)
                if found != walk.expected[index]:
                    scene.differ(walk, env, index, found, f"the source of {forks} forks differs")
                if rng.random() < 0.5 and (index < 6 or not watch.spent(budget.seconds)):
                    seed = None if rng.random() < 0.5 else int(rng.integers(2**31))
                    for number, child in enumerate(scene.fork(env, int(rng.integers(1, 4)), seed=seed)):
                        forks += 1
                        scene.play(child, control.ops[index + 1 : index + 3])
                        if number:
                            scene.reset(child, seed=int(rng.integers(2**31)), options=subject.options(number))
                            scene.play(child, control.ops[1:3])
                        scene.forget(child)
    return {"forks": forks}


@check(
    "fork.diverge",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A child that takes another action than its source or siblings gets the results of theirs.",
    blind="Results remembered under keys that no two of the branches share; render modes that do not work here.",
)
def diverge(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Plays branches in the children of one moment, one after the other, and compares them with unforked environments.
    Branches begin with different actions and then take the same ones at the same depths. A child of each child
    continues its branch after all others have acted; in the end the source takes its own actions. In every third round
    the rendered picture is compared too.
    """
    return diverging(subject, budget, rng, _by_fork, [])


def _by_fork(scene: Scene, control: Control, point: int, parted: list[Walk], rng: np.random.Generator) -> int:
    env = scene.start(control)
    scene.play(env, control.ops[:point])
    own = own_future(scene, env, control)
    wanted = [*parted, parted[0], own]
    children = scene.fork(env, len(wanted))
    middle = point + int(rng.integers(1, 6))
    later: list[tuple[AnyEnv, Walk, int]] = []
    compared = 0
    for child, branch in zip(children, wanted):
        what = "a child, after its siblings took other actions,"
        stop = min(middle, branch.end, control.last)
        compared += scene.expect(child, branch, point, what, calls=stop - point)
        later += [(each, branch, stop) for each in scene.fork(child, 1)]
        compared += scene.expect(child, branch, stop, what, calls=40)
    for place in rng.permutation(len(later)).tolist():
        grandchild, branch, stop = later[place]
        compared += scene.expect(grandchild, branch, stop, "a child's child, after all others acted,", calls=12)
    compared += scene.expect(env, own, point, "the source, after its children took other actions,", calls=40)
    return compared


@check(
    "fork.crowd",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Slots, ports or names run out: in a wide tree, later children share those of the first ones.",
    blind="More children than were alive at once (the number is in the evidence).",
)
def crowd(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Forks many children (64, fewer if the environment is slow or its state large) that are alive at once and all act.
    They step in random order, neighbours with different actions. A snapshot of each is taken in the middle, and
    restored in random order when all have continued. Each must give what it gives alone.
    """
    pool = [each for each in controls(subject, budget) if each.repeatable and each.last > 2]
    if not pool:
        differs = subject.control(0, budget.steps).differs
        raise Skipped(
            f"no run repeats itself without forks: {differs}"
            if differs
            else "no episode had more than two steps: too short for actions of one's own"
        )
    control = max(pool, key=lambda each: each.last)
    k = WIDE // 2 if budget.waits else CROWD
    if budget.steps <= SHORTEST:
        k = budget.forks + 1
    palette = coverage(subject, budget).palette
    with Scene(subject) as scene:
        point = max(1, control.last // 3)
        parted = branches(scene, control, point, rng, palette, width=7, length=6)
        env = scene.start(control)
        scene.play(env, control.ops[:point])
        own = own_future(scene, env, control)
        size = 0
        with contextlib.suppress(Exception):  # it may hold what cannot be written
            size = int(scene.snapshot(env).nbytes)
        k = max(budget.forks + 1, min(k, HELD // (2 * size))) if size > 0 else k
        players = [(child, parted[number % len(parted)]) for number, child in enumerate(scene.fork(env, k))]
        snaps: list[tuple[Any, Walk, int]] = []
        for turn in range(6):
            for place in rng.permutation(k).tolist():
                child, branch = players[place]
                if turn == 2 and point + turn < branch.end:
                    snaps.append((scene.snapshot(child), branch, point + turn))
                if point + turn < branch.end:
                    scene.expect_raw(child, branch, point + turn, f"child {place} of {k} that are alive and act")
        scene.expect(env, own, point, f"the source of {k} children that acted", calls=SHORT)
        for place in rng.permutation(len(snaps)).tolist():
            child = players[place % k][0]
            snap, branch, stop = snaps[place]
            what = f"restored from one of {len(snaps)} snapshots that are alive"
            scene.expect_returned(child, branch, stop, scene.restore(child, snap), what)
            scene.expect(child, branch, stop, what, calls=SHORT)
    return {"alive at once": k + 1, "snapshots alive": len(snaps)}
