"""Benchmark of snapshots against replaying the prefix, as ratios within one run.

sandboxgym bench snapshots [--games embedded] [--repeats 200]
sandboxgym bench snapshots --store [--megabytes 20]     what a store writes for a sandbox's snapshots
"""

from __future__ import annotations

import argparse
import pickle
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

import sandboxgym
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.workers.kept import Facts
from sandboxgym.workers.pool import PooledEnvs
from sandboxgym.workers.store import SnapshotStore

SANDBOXES = ("overlay", "overlay-rootless", "copy")


def median_us(call: Callable[[], Any], repeats: int) -> float:
    """Median wall-clock time of a call in microseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def play(env: gym.Env[Any, Any], task: int, steps: int) -> list[str]:
    """Reset and play some admissible commands; returns them."""
    _, info = env.reset(options={"task": task})
    commands = []
    for step in range(steps):
        commands.append(info["admissible_commands"][(7 * step) % len(info["admissible_commands"])])
        _, _, terminated, truncated, info = env.step(commands[-1])
        if terminated or truncated:
            break
    return commands


def measure(games: str, *, repeats: int, steps: int = 25) -> list[tuple[str, float]]:
    """Measure (operation, microseconds) through ``gym.make``, on the first game after ``steps`` steps."""
    env = gym.make("sandboxgym/ALFWorld-v0", games=games, max_episode_steps=10_000)
    library = env.unwrapped.library  # type: ignore[attr-defined]
    rows = [("compile a game", median_us(lambda: library.compile(0), max(5, repeats // 20)))]
    env.reset(options={"task": 0})
    rows.append(("reset to a compiled game", median_us(lambda: env.reset(options={"task": 0}), repeats)))
    rows.append(("step", median_us(lambda: env.step("look"), repeats)))
    commands = play(env, 0, steps)
    sandboxgym.restore(env, sandboxgym.snapshot(env))
    rows.append(("snapshot", median_us(lambda: sandboxgym.snapshot(env), repeats)))
    snap = sandboxgym.snapshot(env)
    rows.append(("restore", median_us(lambda: sandboxgym.restore(env, snap), repeats)))
    rows.append(("fork(8), each", median_us(lambda: sandboxgym.fork(env, 8), max(5, repeats // 8)) / 8))

    def replay() -> None:
        env.reset(options={"task": 0})
        for command in commands:
            env.step(command)

    rows.append((f"replay of {len(commands)} steps", median_us(replay, max(5, repeats // 8))))
    rows.append(("snapshot on disk, bytes", float(len(snap.to_bytes()))))
    return rows


def stored(backend: str, megabytes: int, store: SnapshotStore) -> list[tuple[str, int, int, float, float]]:
    """Store snapshots of a SWE-bench sandbox after different changes.

    Returns:
        For each change: its name, bytes of the snapshot by itself and bytes that the store wrote, seconds of both.
    """
    changes = {
        f"{megabytes} MB written": (
            f"mkdir new; cd new; for i in $(seq {megabytes}); do head -c 1000000 /dev/urandom > $i.bin; done"
        ),
        "one file edited": "echo edited >> ../README.md",
        "200 small files added": "for i in $(seq 200); do echo $i > $i.txt; done",
        "one of these edited": "echo edited >> 100.txt",
        "a line added to a file of 1 MB": "echo edited >> 7.bin",
        "nothing": "true",
    }
    rows = []
    arguments: dict[str, Any] = {"dataset": "mini", "backend": backend, "allow_unsafe": backend == "copy"}
    env = gym.make("sandboxgym/SWEBench-v0", max_episode_steps=100, **arguments)
    try:
        env.reset(options={"task": 0})
        for change, command in changes.items():
            env.step(command)
            snap = sandboxgym.snapshot(env)
            began = time.perf_counter()
            written = store.put(snap).written
            between = time.perf_counter()
            whole = len(snap.to_bytes())
            rows.append((change, whole, written, time.perf_counter() - between, between - began))
            snap.release()
    finally:
        env.close()
    return rows


def print_stored(megabytes: int) -> None:
    """Print what a store writes for snapshots of sandboxes, beside their whole durable form."""
    print("| sandbox | change | to_bytes, B | store.put writes, B | less by | to_bytes, ms | store.put, ms |")
    print("|---|---|---|---|---|---|---|")
    for backend in SANDBOXES:
        try:
            backends.check(backend)
        except SandboxUnavailable as error:
            print(f"| {backend} | not here: {error} | | | | | |")
            continue
        with tempfile.TemporaryDirectory(prefix="sandboxgym-bench-") as folder:
            for change, whole, written, first, second in stored(backend, megabytes, SnapshotStore(folder)):
                sizes = f"{whole:,} | {written:,} | {whole / written:,.1f}x"
                print(f"| {backend} | {change} | {sizes} | {first * 1e3:,.0f} | {second * 1e3:,.0f} |", flush=True)


def forked(backend: str, megabytes: int, store: str | None, repeats: int = 5) -> tuple[int, float, float, float]:
    """Fork a SWE-bench sandbox in worker processes after a file was edited that is not the first.

    Args:
        backend: of the sandbox.
        megabytes: that were written before.
        store: of `PooledEnvs`.
        repeats: of each fork, with an edit before.

    Returns:
        Bytes of a snapshot that reach its owner, and median seconds of a snapshot, of a restore in the same worker and
        of one in another.
    """
    arguments: dict[str, Any] = {"dataset": "mini", "backend": backend, "allow_unsafe": backend == "copy"}
    times: list[tuple[float, float, float]] = []
    with PooledEnvs("sandboxgym/SWEBench-v0", 2, store=store, max_episode_steps=1000, **arguments) as pool:
        here, there = pool.take(), pool.take()
        for env in (here, there):
            env.reset(options={"task": 0})
        here.step(f"for i in $(seq {megabytes}); do head -c 1000000 /dev/urandom > $i.bin; done")
        there.restore(here.snapshot())  # type: ignore[attr-defined]
        for _ in range(repeats):
            here.step("echo edited >> README.md")
            began = time.perf_counter()
            snap = here.snapshot()  # type: ignore[attr-defined]
            taken = time.perf_counter()
            here.restore(snap)  # type: ignore[attr-defined]
            same = time.perf_counter()
            there.restore(snap)  # type: ignore[attr-defined]
            times.append((taken - began, same - taken, time.perf_counter() - same))
        facts = Facts(snap.header, snap.layers, snap.id, snap.parent)
        nbytes = len(pickle.dumps(facts)) if store else len(snap.to_bytes())
    first, second, third = (statistics.median(each) for each in zip(*times, strict=True))
    return nbytes, first, second, third


def print_forked(megabytes: int) -> None:
    """Print what a fork in worker processes moves and takes, with and without a store."""
    print("\n| sandbox | snapshots | bytes to the owner | snapshot, ms | restore there, ms | in another worker, ms |")
    print("|---|---|---|---|---|---|")
    for backend in SANDBOXES:
        try:
            backends.check(backend)
        except SandboxUnavailable:
            continue
        for way in ("as bytes", "kept"):
            with tempfile.TemporaryDirectory(prefix="sandboxgym-bench-") as folder:
                nbytes, *seconds = forked(backend, megabytes, folder if way == "kept" else None)
            each = " | ".join(f"{second * 1e3:,.0f}" for second in seconds)
            print(f"| {backend} | {way} | {nbytes:,} | {each} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints a Markdown table.

    Args:
        argv: the arguments, by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench snapshots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", default="embedded", help="argument of gym.make")
    parser.add_argument("--repeats", type=int, default=400, help="number of calls per median")
    parser.add_argument("--store", action="store_true", help="measure sandboxes and a store instead")
    parser.add_argument("--megabytes", type=int, default=20, help="written before the edits, with --store")
    arguments = parser.parse_args(argv)
    if arguments.store:
        print_stored(arguments.megabytes)
        print_forked(arguments.megabytes)
        return
    rows = measure(arguments.games, repeats=arguments.repeats)
    snapshot = dict(rows)["snapshot"]
    print(f"games={arguments.games}, {platform.machine()}, Python {platform.python_version()}, medians\n")
    print("| what | µs | x snapshot |\n|---|---|---|")
    for what, value in rows:
        ratio = "" if "bytes" in what else f"{value / snapshot:,.1f}"
        print(f"| {what} | {value:,.0f} | {ratio} |")


if __name__ == "__main__":
    main()
