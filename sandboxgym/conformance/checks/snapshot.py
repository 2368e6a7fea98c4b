"""Level 1: taking a snapshot changes nothing, and nothing changes a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.checks.restore.runs import controls, in_time, perturbed, points_of
from sandboxgym.conformance.harness import process_globals
from sandboxgym.conformance.harness.branching import branches
from sandboxgym.conformance.harness.canonical import canonical, difference
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import Scene, opened, release, streams, written
from sandboxgym.conformance.subject import Control, Subject, layers, snapshot


@check(
    "snapshot.noninterference",
    level=1,
    after=("api.protocol",),
    hazard="The backbone is disturbed by the snapshots taken along it: the trained policy sees another environment.",
    blind="Effects later than the recorded calls.",
)
def noninterference(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Plays control runs again with one, two or three snapshots after every call, kept or released, and compares each
    outcome, and the whole of another episode after them, with the same calls without snapshots.
    """
    taken = 0
    pool = [*controls(subject, budget), *coverage(subject, budget).controls]
    repeatable = [control for control in pool if control.repeatable]
    if not repeatable:
        raise Skipped("no run repeats itself without snapshots: " + subject.control(0, budget.steps).differs)
    for number, control in enumerate(in_time(budget, repeatable)):
        with Scene(subject) as scene:
            walk = scene.followed(control, repeatable[(number + 1) % len(repeatable)])
            env = scene.start(control)
            for index, op in enumerate(walk.control.ops):
                found = scene.call(env, op)
                if found != walk.expected[index]:
                    scene.differ(walk, env, index, found, f"with {taken} snapshots taken before it")
                for again in range(1 + index % 3 if index < len(control.ops) else 0):
                    snap = scene.snapshot(env)
                    taken += 1
                    if (index + again) % 2:
                        scene.drop(snap)
    return {"snapshots": taken}


@check(
    "snapshot.rng_untouched",
    level=1,
    after=("api.protocol",),
    hazard="A snapshot draws random numbers: runs with and without snapshots are two experiments.",
    blind="Streams that are neither np_random, nor a space's, nor Python's and NumPy's global ones.",
)
def rng_untouched(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the bit state of every random stream (all layers, their spaces, the global ones) before and after
    snapshot, restore of it, and fork.
    """
    seen: set[str] = set()
    for control in in_time(budget, controls(subject, budget)):
        with Scene(subject) as scene:
            env = scene.start(control)
            scene.play(env, control.ops[:1])
            for op in control.ops[1 : 1 + min(8, control.last)]:
                before, shared = streams(env), _global_streams()
                snap = scene.snapshot(env)
                for doing in ("snapshot()", "fork(2)", "fork(2, seed=3)"):
                    if doing != "snapshot()":
                        for child in scene.fork(env, 2, seed=3 if "seed" in doing else None):
                            scene.forget(child)
                    after = streams(env)
                    for name, bits in before.items():
                        if bits is not None and after.get(name) != bits:
                            scene.fail(f"{doing} changed the random stream {name}", {"stream": name})
                    if doing == "snapshot()" and (text := difference(shared, _global_streams())):
                        scene.fail(f"{doing} drew from a global random stream: {text[:200]}")
                scene.drop(snap)
                scene.call(env, op)
                seen |= {name for name, bits in before.items() if bits is not None}
    return {"streams": sorted(seen)}


def _global_streams() -> Any:
    return canonical(process_globals.global_streams())


@check(
    "snapshot.immutable",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A snapshot shares objects with the environment or the agent: what happens later rewrites the past.",
    blind="Objects that neither the environment nor what it returned leads to.",
)
def immutable(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """A snapshot is unchanged when everything that reset, step and restore returned is overwritten in place and the
    episode continues: in a new environment its future is the same every time, and so are its bytes and digest.
    """
    overwritten = 0
    handles = "no digest or bytes to compare"
    for control in in_time(budget, controls(subject, budget)):
        for point in points_of(control, rng, 1):
            with Scene(subject) as scene:
                env = scene.start(control)
                returned: list[Any] = []
                scene.note(f"from {__name__} import scribble")
                scene.note("returned = []")
                expected = []
                for op in control.ops[:point]:
                    outcome, raw = subject.call(env, op)
                    scene.note(f"returned.append({written(scene.name(env), op)})")
                    expected.append(outcome)
                    returned.append(raw)
                snap = scene.snapshot(env)
                before = identity(snap)
                if control.repeatable:
                    walk = scene.walk(control, ())
                else:  # the rest of this very run is the truth
                    twin = scene.start(control)
                    scene.restore(twin, snap)
                    expected += scene.play(twin, control.ops[point:])
                    walk = scene.walk(control, ())
                    walk.expected = expected
                overwritten += sum(map(scribble, returned))
                scene.note("scribble(returned)  # every list, dict, set and array in it is overwritten in place")
                for op in control.ops[point:]:
                    scene.note(f"scribble({written(scene.name(env), op)})")
                    overwritten += scribble(subject.call(env, op)[1])
                for number in range(3):
                    other = scene.start(control)
                    result = scene.restore(other, snap)
                    what = "restored after what the environment had returned was overwritten"
                    if number:
                        what = "restored after what an earlier restore() had returned was overwritten"
                    scene.expect_returned(other, walk, point, result, what)
                    overwritten += scribble(result)
                    scene.lines[-1] = f"scribble({scene.lines[-1]})"
                    if number == 2:
                        scene.restore(other, snap)
                    again = scene.start(control)
                    scene.restore(again, snap)
                    scene.expect(again, walk, point, what)
                after = identity(snap)
                for name, value in before.items():
                    handles = ", ".join(before)
                    if after.get(name) != value:
                        scene.fail(f"the snapshot's {name} changed after it was taken")
    return {"objects overwritten": overwritten, "handles compared by": handles}


@check(
    "snapshot.digest",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A search that merges equal states by their digest merges none, or states that are not equal.",
    blind="Snapshots of files and processes, whose digests name an image; handles without a digest.",
)
def digests(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Snapshots of one state have one digest: taken twice, days later by the clock, after a restore, in another
    environment that made the same calls. Where nothing is random, states that answer the same actions differently have
    different ones.
    """
    kind = subject.capabilities.kind
    if kind not in ("memory", "logical", "replay"):
        raise Skipped(f"snapshots of kind {kind} have digests of what holds the state, not of the state")
    with opened(subject) as env:
        env.reset(seed=1, options=subject.options(0))
        snap = snapshot(env)
        if not isinstance(getattr(snap, "digest", None), str):
            raise Skipped(f"snapshots ({type(snap).__qualname__}) have no digest")
        release(snap)
        clocks = [layer for layer in layers(env) if isinstance(layer, gym.wrappers.RecordEpisodeStatistics)]
        if clocks:
            raise Skipped("RecordEpisodeStatistics keeps the time, so that no two states are equal")
    pool = [each for each in controls(subject, budget) if each.repeatable]
    if not pool:
        raise Skipped("no run repeats itself without snapshots: " + subject.control(0, budget.steps).differs)
    equal = different = 0
    for control in in_time(budget, pool):
        with Scene(subject) as scene:
            points = points_of(control, rng, 1)
            # Spaces that the environment has made on the way draw from entropy: seeded, the states are equal.
            walk, again = (scene.walk(control, points, seed_spaces=True) for _ in range(2))
            for point in points:
                one = walk.snaps[point].digest
                found = {"of another environment that made the same calls": again.snaps[point].digest}
                with perturbed(scene, rng):
                    scene.restore(walk.env, walk.snaps[point])
                    found["taken right after a restore"] = scene.snapshot(walk.env).digest
                    scene.restore(again.env, walk.snaps[point])
                    found["taken after a restore in another environment"] = scene.snapshot(again.env).digest
                    found["of the same moment, taken twice"] = scene.snapshot(again.env).digest
                for what, digest in found.items():
                    if digest != one:
                        scene.fail(f"equal states have different digests: that of a snapshot {what} is another one")
                    equal += 1
            if not subject.noise and control.last > 1:
                different += _distinct(scene, control, rng, coverage(subject, budget).palette)
    return {"equal digests": equal, "states told apart": different}


def _distinct(scene: Scene, control: Control, rng: np.random.Generator, palette: Sequence[Any]) -> int:
    """Compare the digests of states that answer the same actions differently."""
    point = int(rng.integers(1, control.last))
    states: dict[tuple[Any, ...], str] = {}
    probes = [op for op in control.ops[point : control.last] if op.kind == "step"][:4]
    for branch in branches(scene, control, point, rng, palette, width=4, length=3):
        env = scene.start(control)
        scene.play(env, branch.control.ops)
        digest = scene.snapshot(env).digest
        future = tuple(outcome._replace(state=None) for outcome in scene.play(env, probes))
        for other, known in states.items():
            if known == digest and other != future:
                scene.fail("two states that answer the same actions differently have one digest")
        states[future] = digest
    return len(states)


def identity(snap: Any) -> dict[str, Any]:
    """Digest and bytes of a handle, where it has them and gives them equal twice."""
    found: dict[str, Any] = {}
    for name in ("digest", "nbytes", "to_bytes"):
        try:
            one, two = getattr(snap, name), getattr(snap, name)
            if name == "to_bytes":
                one, two = one(), two()
        except Exception:
            continue
        if isinstance(one, (str, bytes, int)) and one == two:
            found[name] = one
    return found


def scribble(value: Any, seen: set[int] | None = None) -> int:
    """Overwrite, in place, all containers within ``value``; their number."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    count = 0
    if isinstance(value, (list, tuple)):
        count += sum(scribble(item, seen) for item in value)
        if isinstance(value, list):
            value[:] = ["overwritten", *value[:0]]
            count += 1
    elif isinstance(value, dict):
        count += sum(scribble(item, seen) for item in list(value.values()))
        value.clear()
        value["overwritten"] = True
        count += 1
    elif isinstance(value, set):
        value.clear()
        value.add("overwritten")
        count += 1
    elif isinstance(value, bytearray):
        value[:] = b"overwritten"
        count += 1
    elif isinstance(value, np.ndarray) and value.flags.writeable and value.size:
        if value.dtype.kind in "biufc":
            value[...] = value.dtype.type(1) if not value.any() else value.dtype.type(0)
            count += 1
        elif value.dtype.hasobject:
            count += sum(scribble(item, seen) for item in value.ravel())
            value[...] = "overwritten"
            count += 1
    elif hasattr(value, "__dict__") and not isinstance(value, (type, np.generic)) and not callable(value):
        count += sum(scribble(item, seen) for item in list(vars(value).values()))
    return count
