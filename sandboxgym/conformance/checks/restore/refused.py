"""Level 1: after a restore that raises, the environment continues as if it had not been tried."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.runs import controls, in_time, own_future, same_streams
from sandboxgym.conformance.harness.scenario import Scene, streams
from sandboxgym.conformance.subject import AnyEnv, Control, Subject, methods, restore

SEEDS: tuple[Any, ...] = (-1, "seven", 1.5, [], b"7")
"""Values that are not valid seeds."""
FOLLOWED = 2
"""Calls compared after each refusal."""


@check(
    "restore.refused",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A restore raises, and a program that catches the error continues from a state other than the one it was "
    "in.",
    blind="Refusals for other reasons (full disks, limits, signals); restores that do not raise. If an environment "
    "changes before it refuses a seed, this is only a caveat, because only calls with an invalid seed cause it.",
)
def refused(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Tries restores of other moments and episodes that should raise: with invalid seeds, or of a released snapshot.
    After each that raised, the random streams and the next two calls must be as in an uninterrupted run; after a
    refused seed, a difference is only a caveat. In the end the snapshots whose restores were refused are restored
    without a seed and followed for two calls.
    """
    raised: dict[str, str] = {}
    changed: dict[str, str] = {}
    pool = [each for each in controls(subject, budget) if each.repeatable and each.last > 1]
    if not pool:
        raise Skipped("no run repeats itself without restores: " + subject.control(0, budget.steps).differs)
    for number, control in enumerate(in_time(budget, pool[: 1 if budget.waits else None])):
        with Scene(subject) as scene:
            raised |= _tried(scene, control, pool[(number + 1) % len(pool)], changed, few=budget.waits)
    if not raised:
        raise Skipped("no restore raised: neither values that are no seeds nor released snapshots are refused")
    return {"raised": raised, "changed": changed}


def _tried(scene: Scene, control: Control, other: Control, changed: dict[str, str], *, few: bool) -> dict[str, str]:
    """Refused restores in one environment, with the types of what they raised; ``few`` of one episode alone.

    Seeds whose refusal came too late are added to ``changed``, with what differed.
    """
    raised: dict[str, str] = {}
    walk = scene.walk(control, {1, control.last})
    away = walk if few else scene.walk(other, {max(1, other.last // 2)})
    gone = scene.snapshot(away.env)
    scene.release(gone)
    env = scene.start(control)
    own = own_future(scene, env, control)
    first = point = max(1, control.last // 2)
    scene.play(env, control.ops[:point])
    here = scene.snapshot(env)
    attempts = [(walk.snaps[1], seed) for seed in SEEDS[: 2 if few else None]]
    if not few:
        attempts += [(snap, seed) for snap in away.snaps.values() for seed in SEEDS]
        attempts.append((walk.snaps[control.last], SEEDS[0]))
    for snap, seed in [*attempts, (gone, None)]:
        what = "of a released snapshot" if snap is gone else f"with seed={seed!r}"
        before = streams(env)
        error = _refusal(scene, env, snap, seed)
        if error is not None:
            raised[what] = type(error).__qualname__
            told = f"after restore() {what} raised {raised[what]}"
            try:
                same_streams(scene, before, streams(env), told)
                point += scene.expect(env, own, point, told, calls=FOLLOWED)
            except Failed as failure:
                if snap is gone:
                    raise
                changed.setdefault(what, str(failure))
                error = None
        if error is None or point + FOLLOWED > control.last:
            scene.restore(env, here)
            point = first
    for run in (walk, away)[: 1 if few else 2]:
        for start, snap in run.snaps.items():
            scene.restore(env, snap)
            scene.expect(env, run, start, "restored from a snapshot whose restore was refused before", calls=FOLLOWED)
    return raised


def _refusal(scene: Scene, env: AnyEnv, snap: Any, seed: Any) -> Exception | None:
    """The exception of a restore; None if it returned."""
    given = "" if seed is None else f", seed={seed!r}"
    name, handle = scene.name(env), scene.snap_name(snap)
    call = f"{name}.restore({handle}{given})" if methods(env) else f"sandboxgym.restore({name}, {handle}{given})"
    scene.note(f"try:\n    {call}\nexcept Exception as error:\n    print(repr(error))")
    try:
        restore(env, snap, seed)
    except Exception as error:
        return error
    return None
