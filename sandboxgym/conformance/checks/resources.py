"""Level 5: what snapshots and forks take is given back, also after a crash."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import statistics
import time
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance import ambient, elsewhere, processes
from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.durable import folder
from sandboxgym.conformance.recording import Scene, opened, release
from sandboxgym.conformance.subject import Control, Subject, branch, put, take

_OTHERS = "files in /tmp, /dev/shm and the working directory"
_DEEP = 8192
"""Bytes by which a snapshot at the end of a chain may be larger, beside twice its size."""
_PATIENCE = 8.0
"""Seconds that a chain may take in every budget, however little time is left of a run's."""
_SLACK = 1024
"""Bytes of Python memory that a cycle may keep: lists of a run's statistics grow by less."""
_NOISE = 16_384
"""Growth of a round (bytes) that caches and interned values explain where a round has few cycles."""
_NATIVE_SLACK = 128 * 1024
"""Bytes of resident memory that a cycle may keep, in each of three rounds; allocators are not exact."""


@check(
    "resources.baseline",
    level=5,
    after=("api.protocol",),
    hazard="Every branch leaves something behind: a night of training ends in a full disk or no processes left.",
    blind="What an environment leaves once, not with every cycle; folders other than TMPDIR, /tmp, /dev/shm and the "
    "working directory.",
)
def baseline(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Counts threads, descriptors, child processes, mounts, temporary files, containers and memory after rounds of
    make, reset, step, snapshot, restore, fork, close and release; whatever grows with every round is a leak.
    """
    control = subject.control(0, min(budget.steps, 12))
    growing: dict[str, list[int]] = {}
    with ambient.private_temporary() as path:
        others = [Path("/tmp"), Path("/dev/shm"), Path.cwd()]
        mine = uuid.uuid4().hex  # processes of other programs come and go; ours carry this
        os.environ["SANDBOXGYM_CONFORMANCE_MARK"] = mine
        rounds = []
        containers = processes.containers()
        tracemalloc_was = tracemalloc.is_tracing()
        if not tracemalloc_was:
            tracemalloc.start()
        try:
            _cycle(subject, control)
            begin = time.perf_counter()
            _cycle(subject, control)
            cost = time.perf_counter() - begin
            cycles = int(np.clip(budget.seconds / 4 / max(cost, 1e-6), 3, budget.cycles))
            for _ in range(4):
                for _ in range(cycles):
                    _cycle(subject, control)
                counts = processes.held(path)
                counts[_OTHERS] = sum(_entries(other) for other in others)
                counts["bytes of Python objects"] = tracemalloc.get_traced_memory()[0]
                counts["bytes of resident memory"] = processes.resident()
                rounds.append(counts)
        finally:
            if not tracemalloc_was:
                tracemalloc.stop()
            os.environ.pop("SANDBOXGYM_CONFORMANCE_MARK", None)
        for name in rounds[0]:
            steps = [after[name] - before[name] for before, after in itertools.pairwise(rounds)]
            least = cycles / 2
            if name == "bytes of Python objects":
                least = max(_SLACK * cycles, _NOISE)
            elif name == "bytes of resident memory":
                least = _NATIVE_SLACK * cycles
            elif name == _OTHERS:
                least = cycles
            if min(steps) >= max(1, least):
                growing[name] = steps
        left = [str(entry.relative_to(path)) for entry in path.rglob("*")][:10]
        now = processes.containers()
    if containers is not None and now is not None and len(now - containers) >= 3 * cycles:
        growing["containers"] = [len(now - containers)]
    if growing:
        script = "\n".join(["# each cycle of this leaves something behind:", *_CYCLE])
        spec = subject.make_spec
        head = f"import gymnasium as gym\nimport sandboxgym\n\n{spec.source() if spec else 'make_env = ...'}\n\n"
        grown = "; ".join(f"{name} grew by {', '.join(map(str, steps))}" for name, steps in growing.items())
        raise Failed(
            f"in rounds of {cycles} cycles of make, snapshot, restore, fork, close: {grown}",
            {"cycles a round": cycles, "growth a round": growing, "left behind": left},
            head + script + "\n",
        )
    memory = [counts["bytes of Python objects"] for counts in rounds]
    return {
        "cycles": 4 * cycles,
        "bytes of Python objects kept a cycle": round((memory[-1] - memory[0]) / (3 * cycles), 1),
        "counted": sorted(rounds[0]),
    }


_CYCLE = [
    "env = make_env()",
    "env.reset(seed=0)",
    "snap = sandboxgym.snapshot(env)",
    "first, second = sandboxgym.fork(env, 2)",
    "sandboxgym.restore(first, snap)",
    "env.close(), second.close(), first.close()",
    "snap.release()",
]


def _cycle(subject: Subject, control: Control) -> None:
    with opened(subject) as env:
        for op in control.ops[:2]:
            subject.call(env, op)
        snap = take(env)
        children = branch(env, 2)
        for op in control.ops[2:4]:
            subject.call(children[0], op)
        inner = take(children[0])
        put(env, inner)
        put(children[1], snap)
        grand = branch(children[1], 1)
        for child in (children[1], *grand, children[0]):
            child.close()
        release(snap)
        release(inner)


def _entries(path: Path) -> int:
    try:
        return len(os.listdir(path))
    except OSError:
        return 0


@check(
    "resources.long_lived",
    level=5,
    after=("api.protocol",),
    hazard="A worker's environment that is restored for days, or a snapshot that is restored in thousands of "
    "environments, holds more with every restore.",
    blind="Growth of less than a kilobyte of Python objects a cycle; what is given back at the end, if it ever comes.",
)
def long_lived(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Counts the same things as resources.baseline while one environment and one snapshot live: it is restored and
    snapshotted again and again, and the snapshot restored in new environments, which are closed.
    """
    control = subject.control(0, min(budget.steps, 12))
    with opened(subject) as env:
        for op in control.ops[:2]:
            subject.call(env, op)
        snap = take(env)

        def cycle() -> None:
            put(env, snap)
            for op in control.ops[2:4]:
                subject.call(env, op)
            release(take(env))
            with opened(subject) as other:
                put(other, snap)

        try:
            return _steady(budget, cycle, "snapshots and restores in one environment, and of one snapshot in new ones")
        finally:
            release(snap)


@check(
    "resources.dropped",
    level=5,
    after=("api.protocol",),
    hazard="A search drops thousands of snapshots without a word, and what they held is never given back.",
    blind="What is given back when the interpreter ends.",
)
def dropped(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Counts the same things as resources.baseline while snapshots are taken and dropped without ``release()``, which
    is garbage collection's business then.
    """
    control = subject.control(0, min(budget.steps, 12))
    with opened(subject) as env:
        for op in control.ops[:2]:
            subject.call(env, op)

        def cycle() -> None:
            take(env)

        return _steady(budget, cycle, "snapshots that were dropped without release()")


def _steady(budget: Budget, cycle: Callable[[], None], what: str) -> dict[str, Any]:
    """Fail if anything that a process holds grows in each of three rounds of cycles."""
    rounds: list[dict[str, int]] = []
    with ambient.private_temporary() as path:
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        try:
            cycle()
            begin = time.perf_counter()
            cycle()
            cost = time.perf_counter() - begin
            cycles = int(np.clip(budget.seconds / 8 / max(cost, 1e-6), 3, budget.cycles))
            for _ in range(4):
                for _ in range(cycles):
                    cycle()
                counts = processes.held(path)  # collects garbage first
                counts["bytes of Python objects"] = tracemalloc.get_traced_memory()[0]
                rounds.append(counts)
        finally:
            if not tracing:
                tracemalloc.stop()
    growing = {}
    for name in rounds[0]:
        steps = [after[name] - before[name] for before, after in itertools.pairwise(rounds)]
        least = max(_SLACK * cycles, _NOISE) if name == "bytes of Python objects" else cycles / 2
        if min(steps) >= max(1, least):
            growing[name] = steps
    if growing:
        grown = "; ".join(f"{name} grew by {', '.join(map(str, steps))}" for name, steps in growing.items())
        raise Failed(f"in rounds of {cycles} {what}: {grown}", {"cycles a round": cycles, "growth a round": growing})
    return {"cycles": 4 * cycles, "counted": sorted(rounds[0])}


@check(
    "resources.depth",
    level=5,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Deep trees hit a limit (layers, mounts, recursion), or slow down with every level.",
    blind="Limits beyond the depth tried.",
)
def depth(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """A chain of 200 snapshots, each taken from an environment restored from the one before, turn by turn in two
    environments; then compares futures from all over it, the first and the last included, and the bytes of the last
    with those of a snapshot taken at the same moment of an uninterrupted run.
    """
    control = subject.control(0, budget.steps)
    seconds: list[float] = []
    with Scene(subject) as scene:
        walk = scene.walk(control, [1])
        envs = [walk.env, scene.start(control)]
        chain = [(1, walk.snaps[1])]
        slow = max(4 * budget.seconds, _PATIENCE)
        for number in range(budget.depth):
            point, snap = chain[-1]
            env = envs[number % 2]
            start = time.perf_counter()
            scene.restore(env, snap)
            if point < control.last and number % max(1, budget.depth // control.last) == 0:
                scene.expect(env, walk, point, f"restored from snapshot {number} of a chain", calls=1)
                point += 1
            chain.append((point, scene.snapshot(env)))
            seconds.append(time.perf_counter() - start)
            if sum(seconds) > slow and number >= 20:
                break
        length = len(chain) - 1
        chosen = sorted({0, length // 2, length, *rng.integers(0, length + 1, size=5).tolist()})
        for number in (*chosen, *reversed(chosen)):
            point, snap = chain[number]
            result = scene.restore(envs[0], snap)
            what = f"restored from snapshot {number} of a chain of {length}"
            scene.expect_returned(envs[0], walk, point, result, what)
            scene.expect(envs[0], walk, point, what)
        first, last = (statistics.median(part) for part in (seconds[5:25], seconds[-20:]))
        point, snap = chain[-1]
        direct, deep = (getattr(each, "nbytes", 0) for each in (scene.walk(control, [point]).snaps[point], snap))
        if deep > 2 * direct + _DEEP:
            scene.fail(
                f"the last snapshot of a chain of {length} has {deep} bytes; taken at the same moment of an "
                f"uninterrupted run it has {direct}",
                {"bytes": [direct, deep], "depth": length},
            )
    if length < budget.depth:
        raise (
            Failed(f"a chain of {length} took {sum(seconds):.1f} s: each snapshot is dearer than the one before")
            if last > 5 * first
            else Skipped(f"too slow for a chain of {budget.depth}: {length} took {sum(seconds):.1f} s")
        )
    return {"depth": length, "seconds a level, first": round(first, 6), "seconds a level, last": round(last, 6)}


@check(
    "resources.killed_owner",
    level=5,
    after=("api.protocol",),
    hazard="After a crash processes, mounts and files of a run that is gone fill the machine.",
    blind="Containers that do not inherit the environment of their owner; folders not taken from TMPDIR.",
)
def killed_owner(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Twice, a process makes an environment, snapshots and forks, and is killed (SIGKILL), and another makes one and
    ends. No process of the killed one may live on, no mount remain, no temporary file be added by the second time.
    """
    if not Path("/proc/self/environ").exists() or not hasattr(signal, "SIGKILL"):
        raise Skipped("this platform has no /proc to look for what is left")
    if subject.make_spec is None:
        raise Skipped(
            "another process cannot make the environment: its factory has no importable name (give make_spec)"
        )
    mark = uuid.uuid4().hex
    control = subject.control(0, min(budget.steps, 6))
    with folder() as path:
        work, temporary = path / "job", path / "tmp"
        work.mkdir()
        temporary.mkdir()
        job = elsewhere.Job(0, control.ops[:3])
        content: Any = (subject.make_spec, elsewhere.registered(subject.make_spec), [job], {}, False)
        try:
            (work / "job").write_bytes(pickle.dumps(content))
        except Exception as error:
            raise Skipped(f"another process cannot be told what to do: {error}") from error
        variables = {"TMPDIR": str(temporary), "SANDBOXGYM_CONFORMANCE_MARK": mark}
        try:
            _held(work, variables, kill=True)
            (work / "ready").unlink()
            (work / "brief").write_text("")
            _held(work, variables, kill=False)
            usual = set(_left(temporary))  # what does not grow with the next crash: a lock, say
            (work / "ready").unlink()
            (work / "brief").unlink()
            _held(work, variables, kill=True)
            alive = processes.until(lambda: not processes.marked("SANDBOXGYM_CONFORMANCE_MARK", mark), 5)
            before = _left(temporary)
            (work / "ready").unlink()
            (work / "brief").write_text("")
            _held(work, variables, kill=False)
            processes.until(lambda: not processes.marked("SANDBOXGYM_CONFORMANCE_MARK", mark), 3)
            survivors = processes.marked("SANDBOXGYM_CONFORMANCE_MARK", mark)
            commands = [_command(pid) for pid in sorted(survivors)]
            left = [name for name in _left(temporary) if name not in usual]
            mounts = processes.mounts_under(temporary)
        finally:
            for pid in processes.marked("SANDBOXGYM_CONFORMANCE_MARK", mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    problems = []
    if survivors:
        problems.append(f"{len(survivors)} processes live on ({', '.join(commands)[:200]})")
    if mounts:
        problems.append(f"{len(mounts)} mounts remain ({', '.join(mounts)[:200]})")
    if left:
        problems.append(f"{len(left)} temporary files or folders remain ({', '.join(left)[:200]})")
    if problems:
        raise Failed(
            "after the owner was killed, and another environment was made and closed: " + "; ".join(problems),
            {"processes": commands, "mounts": mounts, "files": left[:20]},
        )
    return {"ended by themselves": alive, "files reaped by the next owner": len(before)}


def _held(work: Path, variables: dict[str, str], *, kill: bool) -> None:
    process = elsewhere.popen([str(work), "hold"], "0", None, variables)
    try:
        done = processes.until(
            lambda: (work / "ready").exists() or (work / "failed").exists() or process.poll() is not None, 60
        )
        if (work / "failed").exists():
            text = (work / "failed").read_text().strip()
            raise Skipped(f"another process cannot make the environment: {text.splitlines()[-1]}")
        if not done or not (work / "ready").exists():
            raise Skipped("another process did not make the environment within 60 s")
        if not kill:
            process.wait(30)
    finally:
        process.kill()
        process.wait()


def _left(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if "__pycache__" not in entry.parts)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    except OSError:
        return str(pid)
