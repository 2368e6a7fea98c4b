"""Level 1: taking a snapshot changes nothing, and nothing changes a snapshot."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.checks.restore.runs import controls, in_time, own_future, perturbed, points_of
from sandboxgym.conformance.harness import process_globals
from sandboxgym.conformance.harness.branching import branches
from sandboxgym.conformance.harness.canonical import canonical, difference
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import Scene, comparable, opened, release, streams, written
from sandboxgym.conformance.subject import AnyEnv, Control, Subject, layers, snapshot
from sandboxgym.conformance.supervision import scratch
from sandboxgym.errors import SnapshotNotSupported

FAMILY = 4
"""Number of snapshots in a trial of `snapshot.relatives`, each taken by another environment."""


@check(
    "snapshot.noninterference",
    level=1,
    after=("api.protocol",),
    hazard="Taking snapshots changes the trajectory along which they are taken: the policy is trained on another "
    "environment.",
    blind="Effects that show only after the recorded calls.",
)
def noninterference(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Replays recorded runs with one to three snapshots after every call, some kept and some released.
    Each outcome, and each of a further whole episode, must be that of the same call without snapshots.
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
    hazard="Snapshots or forks draw random numbers: a run with them differs from the same run without them.",
    blind="Streams other than np_random, those of spaces, and the global ones of Python, NumPy and PyTorch; what forks "
    "draw from global streams (see isolation.environment).",
)
def rng_untouched(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the random streams of all layers and their spaces before and after ``snapshot`` and ``fork``.
    For ``snapshot``, the global streams are compared too.
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


_COPIED: dict[type[Any], Callable[[Any], Any]] = {
    list: list,
    dict: dict,
    set: set,
    bytearray: bytes,
    np.ndarray: np.array,
}
_kept: list[tuple[Any, Any]] = []  # containers that were overwritten, with a copy of each


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Restore what `scribble` overwrites: each call may return the same object, such as a list of all commands."""
    try:
        yield
    finally:
        while _kept:
            value, before = _kept.pop()
            if isinstance(value, (list, bytearray)):
                value[:] = before
            elif isinstance(value, np.ndarray):
                value[...] = before
            else:
                value.clear()
                value.update(before)


@check(
    "snapshot.immutable",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A snapshot shares objects with the environment or the agent: what happens later changes the state that it "
    "restores.",
    blind="Shared objects that the rest of the episode does not change and that no returned value refers to.",
)
@put_back()
def immutable(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Overwrites in place all that reset, step and restore return, while the episode continues.
    A snapshot taken before must restore the same state in new environments each time, and keep its bytes and digest.
    One taken after the agent has overwritten what it was given must hold the true state too, unless overwriting changes
    the run itself.
    """
    overwritten = early = 0
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
            early += _overwritten_before(subject, control, point)
    return {"objects overwritten": overwritten, "before a snapshot": early, "handles compared by": handles}


def _overwritten_before(subject: Subject, control: Control, point: int) -> int:
    """Overwrite what each call returned before the snapshot is taken; return the number of objects.

    If this changes the run, the environment keeps its state in what it returns, and there is nothing to compare.
    """
    overwritten = 0
    with Scene(subject) as scene:
        env = scene.start(control)
        scene.note(f"from {__name__} import scribble")
        for expected, op in zip(control.outcomes[:point], control.ops):
            found, raw = subject.call(env, op)
            if found != expected:
                return 0
            scene.note(f"scribble({written(scene.name(env), op)})")
            overwritten += scribble(raw)
        snap = scene.snapshot(env)
        later = [subject.call(env, op)[0] for op in control.ops[point : comparable(subject, control)]]
        if overwritten and later == list(control.outcomes[point : point + len(later)]):
            what = "restored from a snapshot taken after the agent had overwritten what it was given"
            _alone(scene, control, snap, point, what)
    return overwritten


@check(
    "snapshot.digest",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A search that merges states with equal digests merges too few, or states that differ.",
    blind="Snapshots of files and processes, whose digest is that of an image, not of the state; handles without a "
    "digest.",
)
def digests(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the digests of snapshots of one state, which must be equal.
    They are taken twice, after a restore, with the clock set ahead, and in another environment after the same calls. If
    nothing is random, states that answer the same actions differently must have different digests.
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


@check(
    "snapshot.relatives",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Snapshots of a search tree share data: pruning a branch or ending a worker destroys states that others "
    "need.",
    blind="Longer chains of snapshots; chains across processes (see durable.saver_gone).",
)
def relatives(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Takes four snapshots in a chain of environments, each forked from the one before or restored from its snapshot.
    Then, in random order, releases or drops all snapshots but one and closes all environments, some after a reset. Some
    remaining snapshots are restored in between, and the one left at the end, also from a file if it can be saved. What
    follows each restore must be as in an uninterrupted run.
    """
    control = subject.control(0, budget.steps)
    if not control.repeatable:
        raise Skipped(f"no run repeats itself without snapshots: {control.differs}")
    restores = saved = 0
    for trial in budget.spending(2 * FAMILY, at_least=FAMILY):
        with Scene(subject) as scene, scratch.folder() as path:
            points = sorted(rng.integers(1, control.last + 1, size=FAMILY).tolist())
            env, at = scene.start(control), 0
            envs: dict[int, AnyEnv] = {0: env}
            snaps: dict[int, Any] = {}
            for number, point in enumerate(points):
                scene.play(env, control.ops[at:point])
                at, snaps[number] = point, scene.snapshot(env)
                if number < FAMILY - 1:
                    envs[number + 1] = scene.fork(env, 1)[0] if (number + trial) % 2 else scene.make()
                    env = envs[number + 1]
                    if (number + trial) % 2 == 0:
                        scene.restore(env, snaps[number])
            kept = (trial + 1) % FAMILY  # last of all the first one, which least depends on others
            losses = [("env", key) for key in envs] + [("snap", key) for key in snaps if key != kept]
            for place in rng.permutation(len(losses)).tolist():
                kind, key = losses[place]
                how = int(rng.integers(2))
                if kind == "env":
                    if how:
                        scene.reset(envs[key], control.seed + 1, subject.options(1))
                    scene.forget(envs.pop(key))
                else:
                    scene.drop(snaps.pop(key), released=bool(how))
                if place % 2:
                    some = list(snaps)[int(rng.integers(len(snaps)))]
                    _alone(scene, control, snaps[some], points[some], "restored after losses of relatives", 2)
                    restores += 1
            del env
            gc.collect()
            what = "restored after all its relatives were closed and released"
            _alone(scene, control, snaps[kept], points[kept], what)
            if callable(getattr(snaps[kept], "save", None)) and callable(getattr(type(snaps[kept]), "load", None)):
                with contextlib.suppress(SnapshotNotSupported):
                    file = os.path.join(path, "snapshot")
                    snaps[kept].save(file)
                    scene.note(f"{scene.snap_name(snaps[kept])}.save('/tmp/snapshot')")
                    name, load = scene.snap_name(snaps[kept]), type(snaps[kept]).load
                    scene.drop(snaps.pop(kept))
                    loaded = scene.adopt(load(file), f"type({name}).load('/tmp/snapshot')")
                    _alone(scene, control, loaded, points[kept], f"saved and {what}")
                    saved += 1
    return {"restores": restores + trial + 1 + saved, "of them from files": saved}


def _alone(scene: Scene, control: Control, snap: Any, point: int, what: str, calls: int | None = None) -> None:
    """Restore a snapshot in a new environment, compare what follows, and close that."""
    env = scene.start(control)
    walk = own_future(scene, env, control)
    scene.expect_returned(env, walk, point, scene.restore(env, snap), what)
    scene.expect(env, walk, point, what, calls=calls)
    scene.forget(env)


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
    """Overwrite all containers within ``value`` in place; return their number."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    count = 0
    for kind, copied in _COPIED.items():
        if isinstance(value, kind) and (kind is not np.ndarray or value.flags.writeable):
            _kept.append((value, copied(value)))
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
