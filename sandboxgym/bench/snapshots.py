"""Benchmark of snapshots against replaying the prefix, as ratios within one run.

sandboxgym bench snapshots [--games embedded] [--repeats 200]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

import sandboxgym


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
    arguments = parser.parse_args(argv)
    rows = measure(arguments.games, repeats=arguments.repeats)
    snapshot = dict(rows)["snapshot"]
    print(f"games={arguments.games}, {platform.machine()}, Python {platform.python_version()}, medians\n")
    print("| what | µs | x snapshot |\n|---|---|---|")
    for what, value in rows:
        ratio = "" if "bytes" in what else f"{value / snapshot:,.1f}"
        print(f"| {what} | {value:,.0f} | {ratio} |")


if __name__ == "__main__":
    main()
