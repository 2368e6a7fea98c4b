"""Benchmark of rollout drivers: asynchronous against lockstep, where answers and steps take long and unequally long.

sandboxgym bench rollouts [--scale 0.02] [--tasks 8] [--max-live 16]

The endpoint is simulated: an answer takes 100 to 300 ms, however many are asked for at once, and a batch as long as its
slowest answer. A step of the environment takes 50 ms to 5 s (log-uniform), an episode 16 steps at most. All of these
are multiplied by the scale; they are drawn from the paths' own streams, so both drivers wait for the same trees, of
eight paths per task. All live environments work at the same time, in threads.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

from sandboxgym.core import SnapshotEnv
from sandboxgym.spaces import Unicode
from sandboxgym.tree import (
    Action,
    Context,
    Envs,
    ForkAt,
    RolloutTree,
    Schedule,
    TopEntropy,
    rollout,
    rollout_async,
)

LATENCY = (0.1, 0.3)
"""Shortest and longest answer of the endpoint, in seconds."""
STEP = (0.05, 5.0)
"""Shortest and longest step of the environment, in seconds."""
TURNS = 16
"""Most steps of an episode."""


class Uneven(SnapshotEnv[str, str]):
    """Stand-in for a sandbox: steps take unequally long, and every step but the first three may be the last.

    Args:
        scale: factor of all durations.
    """

    def __init__(self, scale: float) -> None:
        self.observation_space = self.action_space = Unicode()
        self._scale = scale

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return at once."""
        super().reset(seed=seed)
        self._steps = 0
        return "0", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Wait."""
        low, high = map(math.log, STEP)
        seconds, ends = math.exp(self.np_random.uniform(low, high)), self.np_random.random() < 0.05
        time.sleep(self._scale * seconds)
        self._steps += 1
        return f"{seconds}", 0.0, bool(ends and self._steps > 3), self._steps >= TURNS, {}

    def _capture(self) -> int:
        return self._steps

    def _apply(self, state: int) -> None:
        self._steps = state


def answer(context: Context, scale: float) -> tuple[Action, float]:
    """Decide for one path; the action, and the seconds that the endpoint takes."""
    return Action("go", entropy=float(context.rng.random())), scale * float(context.rng.uniform(*LATENCY))


def seen(trees: Sequence[RolloutTree]) -> list[Any]:
    """List what happened on every path, in order."""
    return [
        (tree.index, path.key, [edge.child.observation for edge in path.edges]) for tree in trees for path in tree.paths
    ]


def measure(
    schedule: Schedule, *, scale: float, tasks: int, max_live: int
) -> list[tuple[str, list[RolloutTree], float]]:
    """Measure (driver, trees, seconds) of one rollout each; raises `RuntimeError` where trees differ."""

    def in_turn(contexts: Sequence[Context]) -> list[Action]:
        answers = [answer(context, scale) for context in contexts]
        time.sleep(max(seconds for _, seconds in answers))
        return [action for action, _ in answers]

    async def by_itself(context: Context) -> Action:
        action, seconds = answer(context, scale)
        await asyncio.sleep(seconds)
        return action

    some: list[Any] = [None] * tasks
    found: list[tuple[str, list[RolloutTree], float]] = []
    with Envs(lambda: Uneven(scale), threads=max_live) as envs:
        ways: dict[str, Callable[[], list[RolloutTree]]] = {
            "lockstep": lambda: rollout(envs, in_turn, schedule, tasks=some, max_live=max_live),
            "asynchronous": lambda: asyncio.run(
                rollout_async(envs, by_itself, schedule, tasks=some, max_live=max_live)
            ),
        }
        for name, way in ways.items():
            began = time.perf_counter()
            trees = way()
            found.append((name, trees, time.perf_counter() - began))
            if seen(trees) != seen(found[0][1]):
                raise RuntimeError(f"the trees of {name} are not those of {found[0][0]}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints a Markdown table.

    Args:
        argv: the arguments, by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench rollouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=0.02, help="factor of all durations")
    parser.add_argument("--tasks", type=int, default=8, help="number of trees")
    parser.add_argument("--max-live", type=int, default=16, help="most environments live at once")
    arguments = parser.parse_args(argv)
    place = f"{platform.machine()}, Python {platform.python_version()}"
    print(f"scale={arguments.scale:g}, {arguments.max_live} environments, {place}, one run each\n")
    print(
        "| schedule | driver | paths | steps | seconds | steps per second | x lockstep |\n|---|---|---|---|---|---|---|"
    )
    schedules = {
        "independent": Schedule(8),
        "ForkAt": ForkAt([2, 4], width=4, roots=2),
        "TopEntropy": TopEntropy(2, width=4, roots=2),
    }
    for title, schedule in schedules.items():
        rates: list[float] = []
        found = measure(schedule, scale=arguments.scale, tasks=arguments.tasks, max_live=arguments.max_live)
        for name, trees, seconds in found:
            paths, steps = sum(len(tree.paths) for tree in trees), sum(tree.env_steps for tree in trees)
            rates.append(steps / seconds)
            row = (title, name, paths, steps, f"{seconds:.2f}", f"{rates[-1]:,.0f}", f"{rates[-1] / rates[0]:.2f}")
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
