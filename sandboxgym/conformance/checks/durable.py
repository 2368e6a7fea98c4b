"""Level 5: snapshots outlive the process, fit only their own environment, and are safe to load."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.runs import SHORT, controls, finds, own_future, points_of
from sandboxgym.conformance.checks.snapshot import identity
from sandboxgym.conformance.harness import other_process
from sandboxgym.conformance.harness.arguments import reconfigured
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    first_difference,
    opened,
    outcome_difference,
    release,
    show_outcome,
)
from sandboxgym.conformance.subject import Control, Outcome, Subject, methods, restore, snapshot
from sandboxgym.conformance.supervision import pulse, scratch
from sandboxgym.core import SnapshotEnv, SnapshotSpec
from sandboxgym.errors import SnapshotError, SnapshotNotSupported

_TYPED = (SnapshotError, ValueError, TypeError, EOFError, OSError, pickle.UnpicklingError)
"""Exceptions that a loader may raise on bytes that are not a snapshot; other types show that a test is missing."""


def savable(subject: Subject) -> str | None:
    """Reason why an environment's snapshots cannot be saved and loaded; None if they can."""
    with opened(subject) as env:
        env.reset(seed=1, options=subject.options(0))
        snap = snapshot(env)
        try:
            if not callable(getattr(snap, "save", None)) or not callable(getattr(type(snap), "load", None)):
                return f"snapshots ({type(snap).__qualname__}) have no save() and load()"
            with folder() as path:
                try:
                    snap.save(path / "snapshot")
                except SnapshotNotSupported as error:
                    return f"snapshots cannot be saved: {error}"
        finally:
            release(snap)
    return None


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder."""
    with scratch.folder() as name:
        yield Path(name)


@check(
    "durable.round_trip",
    level=5,
    needs=("save", "exact"),
    after=("api.protocol",),
    hazard="A loaded snapshot differs from the one saved: resumed searches continue from other states.",
    blind="Other processes (see durable.cross_process); other machines.",
)
def round_trip(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Saves and loads snapshots and compares what follows their restore with an uninterrupted run.
    They are of several moments, including finished episodes and rare events that a search has found; some are saved and
    loaded twice. Saving must not change the snapshot, nor loading its digest. Then hundreds of snapshots of two moments
    are saved to one file and loaded from it in turn, and a file is loaded after its snapshot was released and its
    environment closed.
    """
    restores = size = 0
    found = coverage(subject, budget)
    rare = list(zip(found.controls, found.events))[: 0 if budget.waits else 3]
    for control, events in [*((each, ()) for each in controls(subject, budget)[:2]), *rare]:
        with Scene(subject) as scene, folder() as path:
            walk = scene.walk(control, {*points_of(control, rng, 2), *rng.permutation(events)[:3].astype(int).tolist()})
            for number, point in enumerate(walk.points):
                snap, file = walk.snaps[point], path / f"snapshot-{number}"
                before = identity(snap)
                scene.note(f"{scene.snap_name(snap)}.save('/tmp/snapshot')")
                snap.save(file)
                size = file.stat().st_size if file.is_file() else 0
                loaded = scene.adopt(type(snap).load(file), f"type({scene.snap_name(snap)}).load('/tmp/snapshot')")
                if number % 2:
                    loaded.save(path / f"again-{number}")
                    loaded = scene.adopt(type(snap).load(path / f"again-{number}"), "the same, saved and loaded again")
                after = identity(loaded)
                for name in ("digest",):
                    if name in before and after.get(name) != before[name]:
                        scene.fail(f"a loaded snapshot has another {name} than the one that was saved")
                for handle, what in ((loaded, "restored from a file"), (snap, "restored after its snapshot was saved")):
                    env = scene.start(control)
                    result = scene.restore(env, handle)
                    scene.expect_returned(env, walk, point, result, what)
                    scene.expect(env, walk, point, what)
                    restores += 1
                    scene.forget(env)
    control = subject.control(0, budget.steps)
    point = max(1, control.last // 2)
    with Scene(subject) as scene, folder() as path:
        walk = scene.walk(control, {1, point})
        snap, env = walk.snaps[point], scene.start(control)
        saved = 0
        for index in budget.spending(budget.repeats // 2, at_least=5):
            with scene.iteration(index):
                for moment in walk.points:
                    scene.restore(env, walk.snaps[moment])
                    fresh = scene.snapshot(env)  # a handle may cache its encoding
                    loaded = _reloaded(scene, fresh, path / "snapshot")
                    scene.restore(env, loaded)
                    scene.expect(env, walk, moment, f"snapshot, save, load and restore number {saved + 1}", calls=SHORT)
                    scene.drop(loaded)
                    scene.drop(fresh)
                    saved += 1
        snap.save(path / "snapshot")
        scene.release(snap)
        scene.close(walk.env)
        scene.restore(env, scene.adopt(type(snap).load(path / "snapshot"), "type(snap0).load('/tmp/snapshot')"))
        scene.expect(env, walk, point, "restored from a file after its snapshot was released")
    return {"restores": restores, "bytes of the last file": size, "saved and loaded": saved, **finds(saved)}


def _reloaded(scene: Scene, snap: Any, file: Path) -> Any:
    name = scene.snap_name(snap)
    scene.note(f"{name}.save('/tmp/snapshot')")
    snap.save(file)
    return scene.adopt(type(snap).load(file), f"type({name}).load('/tmp/snapshot')")


FIRST = 6
"""Number of snapshots that are each restored first in a new process."""


@check(
    "durable.cross_process",
    level=5,
    needs=("cross_process", "exact"),
    after=("api.protocol",),
    hazard="A snapshot works only in the process that took it: workers and resumed runs continue from other states, or "
    "not at all.",
    blind="Other machines; other versions of the code.",
)
def cross_process(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Carries snapshots to new interpreters, restores them there and compares all that follows.
    The interpreters have other hash seeds and environment variables. Snapshots are carried by save and load or by their
    bytes, two of five pickled if they allow it. Two interpreters, in another working directory, restore all of them in
    different orders; some snapshots are also restored in interpreters of their own, where nothing came before.
    """
    compared = 0
    with Scene(subject) as scene, folder() as path:
        parcels: list[tuple[Walk, int]] = []
        jobs: list[other_process.Job] = []
        for index in budget.spending(6 * budget.traces, seconds=budget.seconds / 4, at_least=budget.traces):
            control = subject.control(index, budget.steps)
            walk = scene.walk(control, points_of(control, rng, 2))
            for point in walk.points:
                try:
                    parcel = other_process.carried(walk.snaps[point], path, f"snapshot-{len(jobs)}")
                except other_process.Unreachable as error:
                    raise Failed(f"cross_process is declared, but a snapshot cannot be carried over: {error}") from None
                if rng.random() < 0.4:
                    parcel = other_process.pickled(walk.snaps[point]) or parcel
                jobs.append(other_process.Job(control.seed + 1, control.ops[point : walk.end], parcel))
                parcels.append((walk, point))
        alone = other_process.Job(control.seed, control.ops[: walk.end])
        other = {"SANDBOXGYM_CONFORMANCE": "1", "TZ": "Pacific/Chatham", "LC_ALL": "C"}
        here = os.environ.get("PYTHONHASHSEED")
        seeds = [seed for seed in ("0", "1", "2", "3", "4") if seed != here][:3]
        children = [
            other_process.Child(seed, str(path) if number else None, other) for number, seed in enumerate(seeds)
        ]
        # Earlier restores and plays may affect later ones in the same process: several orders are tried.
        first, *orders = (rng.permutation(len(jobs)).tolist() for _ in children)
        tasks = [(child, order, [*(jobs[at] for at in order), alone]) for child, order in zip(children[1:], orders)]
        tasks[-1][2].insert(0, alone)  # after an episode of its own
        tasks += [(children[0], [at], [jobs[at], alone]) for at in first[: 2 if budget.waits else FIRST]]
        try:
            started = [other_process.start(subject, batch, child) for child, _, batch in tasks[: len(orders)]]
        except other_process.Unreachable as error:
            raise Skipped(f"another process cannot make the environment: {error}") from None
        for number, (child, order, batch) in enumerate(tasks):
            try:
                process = started[number] if number < len(started) else other_process.start(subject, batch, child)
                answers = other_process.finish(process)
            except other_process.Unreachable as error:
                raise Skipped(f"another process cannot make the environment: {error}") from None
            except other_process.Broken as error:
                if child.folder and _relative(subject, alone, child):
                    continue  # it is made from relative paths; snapshots are not to blame
                message = str(error).strip()
                raise Failed(
                    f"another process cannot restore the snapshot: {message.splitlines()[-1]}", {"there": message}
                ) from None
            pulse.beat()
            unlike = walk.control.repeatable and first_difference(
                other_process.stateless(walk.expected[: walk.end]), other_process.stateless(answers[-1])
            )
            for at, outcomes in zip(order, answers[-1 - len(order) : -1]):
                origin, point = parcels[at]
                compared += _same_there(scene, origin, point, outcomes, child, bool(unlike))
    return {
        "processes": len(tasks),
        "calls compared": compared,
        "carried by": jobs[0].restored[0],
        "pickled": sum(job.restored[0] == "pickle" for job in jobs),
    }


@check(
    "durable.saver_gone",
    level=5,
    needs=("save", "cross_process", "exact"),
    after=("api.protocol",),
    hazard="A file depends on a cache, folder or process that ends with the process that saved it: a run cannot be "
    "resumed later.",
    blind="Restarts of the machine; files that others delete later.",
)
def saver_gone(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores snapshots that another process has saved while it played recorded runs.
    They are restored here while that process is alive and has played on, after it was killed (SIGKILL), after one ended
    without closing its environments, and after one closed them (and, if cross_host is declared, its temporary folder
    was deleted). After each such end, a newly started process restores them too. All that follows is compared.
    """
    pool = [subject.control(index, budget.steps) for index in range(2)]
    pool += sorted(coverage(subject, budget).controls, key=lambda each: -each.last)[:1]
    pool = [each for each in pool if each.repeatable]
    if not pool:
        raise Skipped("no run repeats itself: " + subject.control(0, budget.steps).differs)
    pool = pool[:1] if budget.waits else pool
    wanted = [{max(1, each.last // 2)} | (set() if budget.waits else {1, max(1, each.last - 1)}) for each in pool]
    jobs = [other_process.Job(each.seed, each.ops, points=tuple(sorted(points))) for each, points in zip(pool, wanted)]
    compared = 0
    ways = (("killed", False, True), ("ended without closing its environments", False, False))
    for how, closes, stays in (*ways, ("closed its environments and ended", True, False)):
        with folder() as path, scratch.folder() as temporary:
            own = {"TMPDIR": temporary} if closes and subject.capabilities.cross_host else {}
            try:
                with other_process.saver(subject, jobs, path, closes=closes, stays=stays, variables=own) as (
                    saved,
                    end,
                ):
                    if stays:
                        compared += _loaded(subject, pool, jobs, saved, "the process that saved it is further on")
                    end()
            except other_process.Unreachable as error:
                raise Skipped(f"another process cannot make the environment or save it: {error}") from None
            except other_process.Broken as error:
                message = str(error).strip()
                raise Failed(
                    f"another process cannot save a snapshot: {message.splitlines()[-1]}", {"there": message}
                ) from None
            if own:
                for entry in Path(temporary).iterdir():
                    shutil.rmtree(entry, ignore_errors=True)
                    entry.unlink(missing_ok=True) if not entry.is_dir() else None
            when = f"the process that saved it {how}"
            compared += _loaded(subject, pool, jobs, saved, when)
            compared += _loaded_there(subject, pool, jobs, saved, when)
    if not compared:
        raise Skipped("even without snapshots, another process plays something else than this one")
    return {"calls compared": compared, "files": 3 * sum(len(job.points) for job in jobs)}


Saved = list[tuple[list[tuple[str, str, Any]], list[Outcome]]]
"""Snapshots that another process saved, in transit, and the outcomes of its calls, by job."""


def _comparable(pool: list[Control], jobs: list[other_process.Job], saved: Saved) -> Iterator[tuple[Control, Any, Any]]:
    """Controls with their jobs and snapshots, if the other process saw the same outcomes in the run as this one."""
    for control, job, (parcels, outcomes) in zip(pool, jobs, saved):
        there = other_process.stateless(outcomes)
        if not first_difference(other_process.stateless(control.outcomes[: len(outcomes)]), there):
            yield control, job, parcels


def _loaded(subject: Subject, pool: list[Control], jobs: list[other_process.Job], saved: Saved, when: str) -> int:
    """Restore the snapshots of another process here, and compare."""
    compared = 0
    for control, job, parcels in _comparable(pool, jobs, saved):
        with Scene(subject) as scene:
            scene.note("# snapshots of this run were saved by another process")
            walk = own_future(scene, scene.start(control), control)
            for point, parcel in zip(job.points, parcels):
                env = scene.start(control)
                what = f"loaded after {when}" if "further" not in when else f"loaded while {when}"
                try:
                    result = scene.restore(env, scene.adopt(other_process.arrived(parcel), "load('/tmp/snapshot')"))
                except (SnapshotError, OSError, ValueError, KeyError, RuntimeError) as error:
                    scene.fail(f"a snapshot cannot be {what}: {error!r:.300}")
                scene.expect_returned(env, walk, point, result, what)
                compared += scene.expect(env, walk, point, what)
                scene.forget(env)
    return compared


def _loaded_there(subject: Subject, pool: list[Control], jobs: list[other_process.Job], saved: Saved, when: str) -> int:
    """Restore the snapshots of another process, which has ended, in a process that starts now; and compare."""
    kept = [
        (control, point, other_process.Job(control.seed + 1, control.ops[point : control.last], parcel))
        for control, job, parcels in _comparable(pool, jobs, saved)
        for point, parcel in zip(job.points, parcels)
    ]
    compared = 0
    try:
        answers = other_process.run(subject, [job for _, _, job in kept]) if kept else []
    except other_process.Unreachable as error:
        raise Skipped(f"a second process cannot make the environment: {error}") from None
    except other_process.Broken as error:
        message = str(error).strip()
        raise Failed(
            f"a snapshot cannot be loaded in a new process after {when}: {message.splitlines()[-1]}", {"there": message}
        ) from None
    for (control, point, job), outcomes in zip(kept, answers):
        expected = other_process.stateless(control.outcomes[point : control.last])
        if differs := first_difference(expected, other_process.stateless(outcomes[1:])):
            raise Failed(
                f"loaded in a new process after {when}, {differs}",
                {"control run": control.name, "snapshot after calls": point, "call of": "after the restored moment"},
            )
        compared += len(job.ops)
    return compared


def _same_there(
    scene: Scene, walk: Walk, point: int, outcomes: list[Outcome], child: other_process.Child, unlike: bool
) -> int:
    """Compare the outcomes of another process after a restore; ``unlike``: they differ even without snapshots."""
    returned, last = outcomes[0], walk.expected[point - 1]
    pairs = list(zip(walk.expected[point : walk.end], outcomes[1:], range(point, walk.end)))
    if scene.subject.normalize is None and last.raised is None:
        returned = returned._replace(reward=last.reward, terminated=last.terminated, truncated=last.truncated)
        pairs.insert(0, (last, returned, point - 1))
    for expected, found, index in pairs:
        expected, found = expected._replace(state=None), found._replace(state=None)
        if expected != found:
            also = "; there, even an environment without snapshots gives something else than here" if unlike else ""
            what = "restore() itself" if index < point else f"call {index}"
            raise Failed(
                f"restored in another process (PYTHONHASHSEED={child.hash_seed}), {what} differs: "
                f"{outcome_difference(expected, found)}{also}",
                {
                    "control run": walk.control.name,
                    "snapshot after calls": point,
                    "expected": show_outcome(expected),
                    "found": show_outcome(found),
                    "hash seed": child.hash_seed,
                    "other folder": child.folder is not None,
                    "differs there without snapshots": unlike,
                },
                scene.script(),
            )
    return len(pairs)


def _relative(subject: Subject, job: other_process.Job, child: other_process.Child) -> bool:
    """True if the environment cannot be made and played in another working directory."""
    try:
        other_process.run(subject, [job], child)
    except (other_process.Broken, other_process.Unreachable):
        return True
    return False


class _Foreign(SnapshotEnv[Any, Any]):
    """An environment with nothing in common with any other."""

    def __init__(self) -> None:
        self.observation_space: gym.Space[Any] = gym.spaces.Discrete(1000)
        self.action_space: gym.Space[Any] = gym.spaces.Discrete(1000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return 999, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 999, 0.0, False, False, {}

    def _capture(self) -> dict[str, int]:
        return {"foreign": 999}

    def _apply(self, state: dict[str, int]) -> None:
        assert state == {"foreign": 999}


class _ForeignHandle:
    """A snapshot handle of another package."""

    id, parent, kind, env_id, digest, nbytes = "0", None, "memory", "Foreign-v0", "0", 1
    state: dict[str, Any] = {}  # noqa: RUF012
    snapshot_spec = SnapshotSpec()


@check(
    "durable.mismatch",
    level=5,
    after=("api.protocol",),
    hazard="A snapshot of another environment or wrapper stack is applied in part: the episode continues from a mixed "
    "state.",
    blind="Other versions of the same environment.",
)
def mismatch(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores a snapshot of another environment, one of a foreign type, and one taken through one more wrapper.
    Each must be refused, and the environment must continue as if nothing had happened. Snapshots of an environment made
    with other arguments (numbers and flags of the factory or class, changed one at a time) must be refused too, or
    continue exactly as there.
    """
    control = subject.control(0, budget.steps)
    point = max(1, control.last // 2)
    raised = {}
    foreign = _Foreign()
    foreign.reset(seed=0)
    wrong: dict[str, Any] = {"another environment": foreign.snapshot(), "another package": _ForeignHandle()}
    limited = Subject(
        lambda: gym.wrappers.TimeLimit(subject.make_env(), 7), declared=subject.capabilities, name="TimeLimit(7)"
    )
    with Scene(limited) as outer:
        try:
            env = outer.make()
            outer.reset(env, seed=1, options=subject.options(0))
            if not methods(env):
                wrong["one more wrapper"] = outer.snapshot(env)
        except SnapshotNotSupported:
            pass
        with Scene(subject) as scene:
            walk = scene.walk(control, [])
            twin = scene.start(control)
            scene.play(twin, control.ops[:point])
            for name, handle in wrong.items():
                scene.note(f"# restore of a snapshot of {name}, which raises")
                try:
                    restore(twin, handle)
                except Exception as error:
                    raised[name] = type(error).__qualname__
                    if not isinstance(error, SnapshotError) and isinstance(error, (AssertionError, NameError)):
                        scene.fail(f"a snapshot of {name} was refused by accident: {error!r}")
                else:
                    scene.fail(f"a snapshot of {name} was restored")
            if control.repeatable:
                scene.expect(twin, walk, point, "after a snapshot that does not fit was refused")
    for name, other in reconfigured(subject, min(30, budget.steps), numbers=1 if budget.waits else 3):
        raised[name] = _from_elsewhere(subject, other, name, budget)
    return raised


def _from_elsewhere(subject: Subject, other: Subject, name: str, budget: Budget) -> str:
    refused = ""
    for number in budget.spending(4):
        control = other.control(number, min(30, budget.steps))
        point = max(1, control.last // 4)
        mine = subject.control(number, budget.steps)
        half = max(1, mine.last // 2)
        with Scene(other) as there, Scene(subject) as scene:
            foreign = there.walk(control, [point])
            own = scene.walk(mine, ())
            env = scene.start(mine)
            scene.play(env, mine.ops[:half])
            scene.note(f"# restore of a snapshot of an environment with {name}")
            try:
                restore(env, foreign.snaps[point])
            except Exception as error:
                if mine.repeatable:
                    scene.expect(env, own, half, f"after a snapshot of an environment with {name} was refused")
                refused = type(error).__qualname__
                continue
            if other.noise and not other.capabilities.rng:
                return "accepted"
            for index in range(point, control.last):
                found = subject.call(env, control.ops[index])[0]._replace(state=None)
                expected = foreign.expected[index]._replace(state=None)
                if found != expected:
                    text = outcome_difference(expected, found)
                    there.fail(f"a snapshot of an environment with {name} was restored, and goes on wrong: {text}")
    if refused:
        return refused
    return "accepted, and right"


@check(
    "durable.corrupt",
    level=5,
    needs=("save", "exact"),
    after=("api.protocol",),
    hazard="A damaged file gives a wrong state, or a hostile one runs code, instead of an error.",
    blind="Kinds of damage that were not drawn; hostile content in a valid file.",
)
def corrupt(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Cuts, extends and changes the bytes of a saved snapshot, over a hundred times if time allows.
    Each file must be refused by an error that loading may raise (a snapshot error, ValueError, OSError and the like),
    or restore the very same state; the environment must continue unharmed. A pickle in place of the file must not run
    its payload.
    """
    control = subject.control(0, budget.steps)
    point = max(1, control.last // 2)
    refused: dict[str, int] = {}
    accepted = 0
    with Scene(subject) as scene, folder() as path:
        walk = scene.walk(control, [point])
        snap = walk.snaps[point]
        file = path / "snapshot"
        snap.save(file)
        if not file.is_file():
            raise Skipped("a saved snapshot is not one file")
        good = file.read_bytes()
        env = scene.start(control)
        scene.play(env, control.ops[:point])
        mutants = list(_mutants(good, rng, 150 if budget.name == "quick" else 1000))
        for index in budget.spending(len(mutants), at_least=40):
            name, data = mutants[index]
            file.write_bytes(data)
            try:
                loaded = type(snap).load(file)
                result = restore(env, loaded)
            except _TYPED as error:
                kind = type(error).__qualname__
                refused[kind] = refused.get(kind, 0) + 1
                continue
            except Exception as error:
                raise Failed(
                    f"a saved snapshot with {name} raised {error!r:.200}, which is no typed error of loading",
                    {"mutation": name, "bytes": len(data)},
                ) from error
            accepted += 1
            scene.note(f"# a file with {name} was accepted")
            scene.expect_returned(env, walk, point, result, f"restored from a file with {name}, which was accepted,")
            scene.expect(env, walk, point, f"restored from a file with {name}, which was accepted,")
            scene.restore(env, snap)
        _bomb(type(snap), file, path / "ran")
        if walk.control.repeatable:
            scene.expect(env, walk, point, "after damaged files were refused")
    return {"refused with": refused, "accepted, and right": accepted, "bytes": len(good)}


def _mutants(good: bytes, rng: np.random.Generator, count: int) -> Iterator[tuple[str, bytes]]:
    yield "no bytes", b""
    yield "one byte too many", good + b"\0"
    yield "its last byte missing", good[:-1]
    yield "its first byte missing", good[1:]
    for number in range(count):
        place = int(rng.integers(len(good)))
        if number % 3 == 0:
            yield f"only its first {place} bytes", good[:place]
        elif number % 3 == 1:
            flipped = bytearray(good)
            flipped[place] ^= 1 << int(rng.integers(8))
            yield f"a bit flipped at {place}", bytes(flipped)
        else:
            length = int(rng.integers(1, 9))
            noise = random.Random(int(rng.integers(2**31))).randbytes(length)
            if good[place : place + length] != noise[: len(good) - place]:
                yield f"{length} other bytes at {place}", good[:place] + noise + good[place + length :]


class _Payload:
    """A pickle payload that makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def _bomb(kind: Any, file: Path, proof: Path) -> None:
    file.write_bytes(pickle.dumps(_Payload(proof)))
    with contextlib.suppress(Exception):
        kind.load(file)
    if proof.exists():
        raise Failed(
            f"{kind.__qualname__}.load ran code from the file: it unpickles what it is given",
            counterexample=(
                "import os, pickle\n\nclass Payload:\n    def __reduce__(self):\n"
                "        return (os.system, ('echo code from the file ran',))\n\n"
                "open('/tmp/snapshot', 'wb').write(pickle.dumps(Payload()))\n"
                f"from {kind.__module__} import {kind.__qualname__.partition('.')[0]}\n"
                f"{kind.__qualname__}.load('/tmp/snapshot')\n"
            ),
        )


@check(
    "durable.released",
    level=5,
    after=("api.protocol",),
    hazard="A released snapshot can still be used, although its data is gone or belongs to another one by then.",
    blind="Handles without release().",
)
def released(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Releases a snapshot twice: restore and save must then raise, and the second release must be harmless.
    The environment restored from it, a fork of that, and other snapshots (of the same state, and of an earlier one)
    must continue to work.
    """
    control = subject.control(0, budget.steps)
    point = max(1, control.last // 2)
    exact = subject.capabilities.rng or not subject.noise
    with Scene(subject) as scene:
        walk = scene.walk(control, [1, point])
        snap = walk.snaps[point]
        if not callable(getattr(snap, "release", None)):
            raise Skipped(f"snapshots ({type(snap).__qualname__}) have no release()")
        env = walk.env
        scene.restore(env, snap)
        child = scene.snapshot(env)
        (fork,) = scene.fork(env, 1)
        scene.release(snap)
        snap.release()
        for name, use in (("restore", lambda: restore(env, snap)), ("save", lambda: snap.save(os.devnull))):
            if name == "save" and not callable(getattr(snap, "save", None)):
                continue
            scene.note(f"# {name} of the released snapshot, which raises")
            try:
                use()
            except Exception as error:
                raised = type(error).__qualname__
            else:
                scene.fail(f"{name} of a released snapshot worked as if it were not")
        if exact:
            scene.expect(env, walk, point, "an environment after the snapshot it was restored from was released")
            scene.expect(fork, walk, point, "a fork after the snapshot of its source was released")
            for handle, place in ((child, point), *([(walk.snaps[1], 1)] if point > 1 else [])):
                scene.restore(env, handle)
                scene.expect(env, walk, place, "restored from a snapshot after another one was released")
    return {"raised": raised}
