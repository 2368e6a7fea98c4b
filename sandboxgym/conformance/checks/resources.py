"""Level 5: resources of snapshots and forks are released, also after a crash."""

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

from sandboxgym.conformance.check import Budget, Failed, Inconclusive, Skipped, check
from sandboxgym.conformance.checks.durable import folder
from sandboxgym.conformance.harness import other_process, process_globals
from sandboxgym.conformance.harness.scenario import Scene, opened, release
from sandboxgym.conformance.subject import Control, Subject, fork, restore, snapshot
from sandboxgym.conformance.supervision import processes, watching
from sandboxgym.conformance.supervision.clock import Stopwatch, timed

_OTHERS = "files of child processes in /tmp, /dev/shm and the working directory"
_MACHINE = frozenset({"mounts", "containers", _OTHERS})
"""Resources that other programs change too."""
_MEMORY = "bytes of Python objects"
_SECONDS = 3.0
"""Seconds to wait for resources that vanish without a call, and longest pause in which only other programs run."""
_DEEP = 8192
"""Bytes by which a snapshot at the end of a chain may exceed twice the size of an ordinary one at that moment."""
_PATIENCE = 8.0
"""Seconds that a chain may take in any budget, even if little of the run's time is left."""
_SLACK = 1024
"""Bytes of Python memory that a cycle may keep: lists of a run's statistics grow by less."""
_NOISE = 16_384
"""Bytes by which a round of few cycles may grow because of caches and interned values."""
_NATIVE_SLACK = 128 * 1024
"""Bytes of resident memory that a cycle may keep, in each of three rounds; allocators are not exact."""


@check(
    "resources.baseline",
    level=5,
    after=("api.protocol",),
    hazard="Every branch leaves something behind: a night of training ends with a full disk or no processes left.",
    blind="What an environment leaves once rather than in every cycle; files that child processes make outside TMPDIR, "
    "/tmp, /dev/shm and the working directory; small leaks of mounts, containers or files of child processes (outside "
    "TMPDIR) while other programs make or remove some.",
)
def baseline(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Repeats make, reset, step, snapshot, restore, fork, close and release; fails if a resource grows in every round.
    Resources are threads, descriptors, child processes, files that this process made anywhere (seen in audit events),
    temporary files, mounts, containers and memory. What another program may have made must grow again in three more
    rounds, and not in the pauses between them.
    """
    control = subject.control(0, min(budget.steps, 12))
    script = "\n".join(["# each cycle of this leaves something behind:", *_CYCLE])
    spec = subject.make_spec
    head = f"import gymnasium as gym\nimport sandboxgym\n\n{spec.source() if spec else 'make_env = ...'}\n\n"

    def cycle() -> None:
        _cycle(subject, control)

    return _steady(budget, 4, cycle, "cycles of make, snapshot, restore, fork, close", f"{head}{script}\n")


_CYCLE = [
    "env = make_env()",
    "env.reset(seed=0)",
    "snap = sandboxgym.snapshot(env)",
    "first, second = sandboxgym.fork(env, 2)",
    "sandboxgym.restore(first, snap), sandboxgym.restore(second, snap, seed=1)",
    "(third,) = sandboxgym.fork(second, 1, seed=1)",
    "env.close(), third.close(), second.close(), first.close()",
    "snap.release()",
]


def _cycle(subject: Subject, control: Control) -> None:
    with opened(subject) as env:
        for op in control.ops[:2]:
            subject.call(env, op)
        snap = snapshot(env)
        children = fork(env, 2)
        for op in control.ops[2:4]:
            subject.call(children[0], op)
        inner = snapshot(children[0])
        restore(env, inner)
        restore(children[1], snap, 1)
        grand = fork(children[1], 1, 1)
        for child in (children[1], *grand, children[0]):
            child.close()
        release(snap)
        release(inner)


@check(
    "resources.long_lived",
    level=5,
    after=("api.protocol",),
    hazard="An environment that a worker restores for days, or a snapshot restored in thousands of environments, uses "
    "more memory or other resources with every restore.",
    blind="Growth of less than 1 KiB of Python objects (or 16 KiB per round of cycles), or 128 KiB of resident memory, "
    "per cycle; of any other resource, growth of less than one in two cycles.",
)
def long_lived(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Counts the same resources as resources.baseline while one environment and one snapshot are kept.
    The environment is restored and snapshotted again and again, and the snapshot is restored in new environments, which
    are closed.
    """
    control = subject.control(0, min(budget.steps, 12))
    with opened(subject) as env:
        for op in control.ops[:2]:
            subject.call(env, op)
        snap = snapshot(env)

        def cycle() -> None:
            restore(env, snap)
            for op in control.ops[2:4]:
                subject.call(env, op)
            release(snapshot(env))
            with opened(subject) as other:
                restore(other, snap)

        try:
            return _steady(budget, 8, cycle, "snapshots and restores in one environment, and of one in new ones")
        finally:
            release(snap)


@check(
    "resources.dropped",
    level=5,
    after=("api.protocol",),
    hazard="A search drops thousands of snapshots without releasing them, and what they held is never freed.",
    blind="Growth of less than 1 KiB of Python objects (or 16 KiB per round of snapshots), or 128 KiB of resident "
    "memory, per snapshot; of any other resource, growth of less than one in two snapshots.",
)
def dropped(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Counts the same resources as resources.baseline while snapshots are dropped without ``release()``.
    Garbage collection must free what they held.
    """
    control = subject.control(0, min(budget.steps, 12))
    with opened(subject) as env:
        for op in control.ops[:2]:
            subject.call(env, op)

        def cycle() -> None:
            snapshot(env)

        return _steady(budget, 8, cycle, "snapshots that were dropped without release()")


def _steady(
    budget: Budget, part: int, cycle: Callable[[], None], what: str, script: str | None = None
) -> dict[str, Any]:
    """Fail if a resource owned by this process grows in each of three rounds of cycles.

    A round takes ``1 / part`` of a check's time. Resources of the whole machine (mounts, containers, entries that a
    child process may have made) may belong to other programs. If one grows, three more rounds follow, each after a
    pause, and the check fails only if it grows in each of these rounds and in no pause.
    """
    rounds: list[dict[str, int]] = []
    with process_globals.private_temporary() as path, watching.watched(path) as doings:
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        try:
            cycle()
            cost = max(1e-6, timed(cycle))
            cycles = int(np.clip(budget.seconds / part / cost, 3, budget.cycles))
            wall = 0.0
            for _ in range(4):
                begin = time.perf_counter()
                for _ in range(cycles):
                    cycle()
                wall = time.perf_counter() - begin
                rounds.append(_count(path, doings))
            growing = {name: steps for name in rounds[0] if (steps := _growth(rounds, name, cycles))}
            _settle(growing, rounds, path, doings, cycles)
            doubtful = {name: growing.pop(name) for name in _MACHINE & growing.keys()}
            found = _alternating(cycle, cycles, wall, path, doings, set(doubtful))
            growing |= {name: doubtful[name] for name, (mine, others) in found.items() if mine and not any(others)}
            untold = {
                name: {"in cycles": doubtful[name], "in pauses": found[name][1]}
                for name in found
                if any(found[name][1])
            }
        finally:
            if not tracing:
                tracemalloc.stop()
        left = [str(entry.relative_to(path)) for entry in processes.entries(path)][:10]
        left += sorted(doings.remaining())[:10]
    if growing:
        grown = "; ".join(f"{name} grew by {', '.join(map(str, steps))}" for name, steps in growing.items())
        evidence = {"cycles a round": cycles, "growth a round": growing, "left behind": left}
        raise Failed(f"in rounds of {cycles} {what}: {grown}", evidence, script)
    if untold and all(min(each["in cycles"]) > cycles + 5 * max(each["in pauses"]) for each in untold.values()):
        raise Inconclusive(
            f"{', '.join(untold)} grew in rounds of {cycles} {what}, and, less, in the pauses between them: other "
            "programs are at work",
            {"cycles a round": cycles, "growth a round": untold},
        )
    memory = [counts[_MEMORY] for counts in rounds]
    return {
        "cycles": 4 * cycles,
        "bytes of Python objects kept a cycle": round((memory[-1] - memory[0]) / (3 * cycles), 1),
        "counted": sorted(rounds[0]),
        **({"of other programs": untold or sorted(doubtful)} if doubtful else {}),
    }


def _count(path: Path, doings: watching.Doings) -> dict[str, int]:
    """Count the resources of this process and of the machine."""
    made = doings.remaining()
    counts = processes.held(path)  # collects garbage first
    counts["files made elsewhere than in TMPDIR"] = len(made)
    counts["mounts"] = len(processes.mounts())
    counts[_OTHERS] = counts["containers"] = 0
    if started := doings.children:
        counts[_OTHERS] = len(
            process_globals.names([Path("/tmp"), Path("/dev/shm"), Path.cwd()]) - set(map(Path, made))
        )
    if started or doings.containers:
        counts["containers"] = len(processes.containers() or ())
        doings.children = started  # the docker client just started does not belong to the environment
    counts[_MEMORY] = tracemalloc.get_traced_memory()[0]
    counts["bytes of resident memory"] = processes.resident()
    return counts


def _least(name: str, cycles: int) -> float:
    """Smallest growth per round that counts."""
    if name == _MEMORY:
        return max(_SLACK * cycles, _NOISE)
    if name == "bytes of resident memory":
        return _NATIVE_SLACK * cycles
    return max(1, cycles if name == _OTHERS else cycles / 2)


def _growth(rounds: list[dict[str, int]], name: str, cycles: int) -> list[int]:
    """Growth of each resource per round; nothing unless it grew in all of them."""
    steps = [after[name] - before[name] for before, after in itertools.pairwise(rounds)]
    return steps if min(steps) >= _least(name, cycles) else []


def _settle(
    growing: dict[str, list[int]], rounds: list[dict[str, int]], path: Path, doings: watching.Doings, cycles: int
) -> None:
    """Exclude resources that vanish without a call: threads and processes that end late on a busy machine."""
    late = [name for name in ("threads", "child processes", "open descriptors") if name in growing]

    def gone() -> bool:
        counts = _count(path, doings)
        return all(counts[name] - rounds[0][name] < _least(name, cycles) for name in late)

    if late and processes.until(gone, _SECONDS):
        for name in late:
            del growing[name]


def _alternating(
    cycle: Callable[[], None], cycles: int, wall: float, path: Path, doings: watching.Doings, names: set[str]
) -> dict[str, tuple[list[int], list[int]]]:
    """Growth of machine-wide resources, by name: in three more rounds, and in an equally long pause before each.

    A name that changes in a pause, or doesn't grow enough in a round (no rounds are told then), is not looked at again.
    """
    found: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in names}
    left = set(names)
    before = _count(path, doings) if names else {}
    for number in range(6):
        if not left:
            break
        if number % 2:
            for _ in range(cycles):
                cycle()
        else:
            time.sleep(min(max(wall, 0.2), _SECONDS))
        after = _count(path, doings)
        for name in sorted(left):
            grown = after[name] - before[name]
            found[name][0 if number % 2 else 1].append(grown)
            if number % 2 and grown < _least(name, cycles):
                found[name][0].clear()
                left.remove(name)
            elif not number % 2 and grown:
                left.remove(name)
        before = after
    return found


@check(
    "resources.depth",
    level=5,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Deep trees hit a limit (layers, mounts, recursion), or slow down with every level.",
    blind="Limits beyond the depth tried.",
)
def depth(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Takes a chain of 200 snapshots, each after restoring the one before, in two environments in turn.
    What follows the first, the last and others must be as in an uninterrupted run, and the last must not be much larger
    than a snapshot of the same moment without a chain. If time runs out before the chain is complete, the check fails
    if levels have become more than five times slower, and is skipped otherwise.
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
            watch = Stopwatch()
            scene.restore(env, snap)
            if point < control.last and number % max(1, budget.depth // control.last) == 0:
                scene.expect(env, walk, point, f"restored from snapshot {number} of a chain", calls=1)
                point += 1
            chain.append((point, scene.snapshot(env)))
            seconds.append(watch.elapsed)
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
    hazard="After a crash, processes, mounts and files of a run that has ended fill the machine.",
    blind="Processes and containers that do not inherit the environment variables of their owner; files and mounts "
    "outside TMPDIR.",
)
def killed_owner(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Kills (SIGKILL) a process that has an environment, snapshots and forks, and lets another make one and end.
    This is done twice: no process of a killed one may live on, no mount remain, no temporary file be added the second
    time.
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
        job = other_process.Job(0, control.ops[:3])
        content: Any = (subject.make_spec, other_process.registered(subject.make_spec), [job], {}, False)
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
            processes.until(lambda: not processes.marked("SANDBOXGYM_CONFORMANCE_MARK", mark), 15)
            usual = set(_left(temporary))  # what does not grow with the next crash: a lock, say
            (work / "ready").unlink()
            (work / "brief").unlink()
            _held(work, variables, kill=True)
            alive = processes.until(lambda: not processes.marked("SANDBOXGYM_CONFORMANCE_MARK", mark), 15)
            before = _left(temporary)
            (work / "ready").unlink()
            (work / "brief").write_text("")
            _held(work, variables, kill=False)
            processes.until(lambda: not processes.marked("SANDBOXGYM_CONFORMANCE_MARK", mark), 15)
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
    process = other_process.popen([str(work), "hold"], "0", None, variables)
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
    below = processes.entries(path)
    return sorted(str(entry.relative_to(path)) for entry in below if "__pycache__" not in entry.parts)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    except OSError:
        return str(pid)
