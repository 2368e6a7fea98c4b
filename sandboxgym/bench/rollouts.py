"""Benchmark of rollout drivers: asynchronous against lockstep, where answers and steps take long and unequally long.

sandboxgym bench rollouts [--scale 0.05] [--tasks 8] [--max-live 16] [--updates 2] [--learning 20]

The inference server is simulated: an answer takes 50 ms, 5 ms for each of its tokens (30 on average, at most 128) and
0.1 ms for each token of the conversation that is not in its prefix cache: 0.2 s on average, however many are asked for
at once; a batch takes as long as its slowest answer. The cache has blocks of 16 tokens. A step of the environment takes
50 ms to 5 s (a Pareto distribution of index 1, cut off: 0.23 s on average), an episode 16 steps at most. After each
rollout an update is learned, which takes a fixed time; "one off" grows the next trees meanwhile, with weights that are
one update old.

All durations are multiplied by the scale; the table shows what they stand for. They are drawn from the paths' own
streams, so that all drivers wait for the same trees, of eight paths per task. All live environments work at the same
time, in threads.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandboxgym.core import SnapshotEnv
from sandboxgym.spaces import Unicode
from sandboxgym.tree import (
    Action,
    Clock,
    Context,
    Envs,
    ForkAt,
    RolloutTree,
    Schedule,
    TopEntropy,
    rollout,
    rollout_async,
)

OVERHEAD, PER_TOKEN, PER_UNREAD = 0.05, 0.005, 1e-4
"""Seconds of an answer: for itself, for each of its tokens, for each token of its conversation that is not cached."""
BLOCK = 16
"""Tokens of a block of the prefix cache."""
SYSTEM, TASK, OBSERVATION = 500, 100, 40
"""Tokens of the system prompt, of the first observation and of a later one."""
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
        """Wait as long as a simulated step takes."""
        low, high = STEP
        seconds = low / (1.0 - self.np_random.random() * (1.0 - low / high))
        ends = self.np_random.random() < 0.05
        time.sleep(self._scale * seconds)
        self._steps += 1
        return f"{seconds}", 0.0, bool(ends and self._steps > 3), self._steps >= TURNS, {}

    def _capture(self) -> int:
        return self._steps

    def _apply(self, state: int) -> None:
        self._steps = state


@dataclass(frozen=True)
class Conversation:
    """Stand-in for a list of token ids."""

    length: int = 0
    blocks: tuple[int, ...] = ()
    """Hashes of its beginnings: up to the end of the first block, of the second and so on."""

    def extended(self, content: int, tokens: int) -> Conversation:
        """A conversation with so many more tokens, which are a function of ``content``."""
        length, blocks = self.length + tokens, list(self.blocks)
        while BLOCK * (len(blocks) + 1) <= length:
            blocks.append(hash((blocks[-1] if blocks else 0, content, self.length, len(blocks))))
        return Conversation(length, tuple(blocks))


@dataclass
class SlowServer:
    """Stand-in for an inference server with a prefix cache."""

    scale: float
    cached: set[int] = field(default_factory=set)
    """Hashes of the beginnings of conversations, block by block."""
    read: int = 0
    """Tokens of all conversations that were sent."""
    reused: int = 0
    """Those of them that were in the cache."""

    def begin(self, context: Context) -> tuple[Action, float]:
        """Decide for one path; the action, and the seconds that the answer takes."""
        rng = context.rng
        if context.memory is None:
            asked = Conversation().extended(0, SYSTEM).extended(context.path[0] + 1, TASK)
        else:
            asked = context.memory.extended(int(rng.integers(2**62)), OBSERVATION)
        hit = 0
        while hit < len(asked.blocks) and asked.blocks[hit] in self.cached:
            hit += 1
        self.read += asked.length
        self.reused += BLOCK * hit
        tokens = min(128, max(1, round(math.exp(rng.normal(math.log(25), 0.6)))))
        said = asked.extended(int(rng.integers(2**62)), tokens)
        seconds = OVERHEAD + PER_TOKEN * tokens + PER_UNREAD * (asked.length - BLOCK * hit)
        return Action("go", entropy=float(rng.random()), tokens=tokens, memory=said), self.scale * seconds

    def end(self, action: Action) -> Action:
        """Keep what an answer has computed."""
        self.cached.update(action.memory.blocks)
        return action

    def at_once(self, contexts: Sequence[Context]) -> list[Action]:
        """Decide for a batch (`sandboxgym.tree.Policy`)."""
        answers = [self.begin(context) for context in contexts]
        time.sleep(max(seconds for _, seconds in answers))
        return [self.end(action) for action, _ in answers]

    async def each(self, context: Context) -> Action:
        """Decide for one path (`sandboxgym.tree.AsyncPolicy`)."""
        action, seconds = self.begin(context)
        await asyncio.sleep(seconds)
        return self.end(action)


@dataclass
class FoundPaths:
    """Trees, tokens and seconds of one driver's rollouts."""

    name: str
    trees: list[RolloutTree] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    read: int = 0
    """Tokens of all conversations that were sent."""
    reused: int = 0
    """Those of them that were in the prefix cache."""
    rollouts: float = 0.0
    """Seconds of the rollouts."""
    seconds: float = 0.0
    """Seconds of all, learning included."""

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(tree.tokens for tree in self.trees)


def seen(trees: Sequence[RolloutTree]) -> list[Any]:
    """List what happened on every path, in order."""
    return [
        (tree.index, path.key, [edge.child.observation for edge in path.edges]) for tree in trees for path in tree.paths
    ]


def measure(
    schedule: Schedule, *, scale: float, tasks: int, max_live: int, updates: int = 1, learning: float = 0.0
) -> list[FoundPaths]:
    """Measure every driver; raises `RuntimeError` where trees differ.

    Args:
        schedule: where trees fork.
        scale: factor of all durations.
        tasks: number of trees of an update.
        max_live: most environments live at once.
        updates: rollouts, each followed by learning.
        learning: seconds that an update takes to learn, before scaling.
    """
    some: list[Any] = [None] * tasks

    async def grow(envs: Envs, found: FoundPaths, update: int) -> None:
        server, began = SlowServer(scale), time.perf_counter()  # new weights find nothing in the cache
        shared: dict[str, Any] = {"tasks": some, "seed": (update,), "max_live": max_live, "clock": found.clock}
        if found.name == "lockstep":
            found.trees += rollout(envs, server.at_once, schedule, **shared)
        else:
            found.trees += await rollout_async(envs, server.each, schedule, **shared)
        found.rollouts += time.perf_counter() - began
        found.read, found.reused = found.read + server.read, found.reused + server.reused

    async def in_turn(envs: Envs, found: FoundPaths) -> None:
        for update in range(updates):
            await grow(envs, found, update)
            await asyncio.sleep(scale * learning)

    async def one_off(envs: Envs, found: FoundPaths) -> None:
        await grow(envs, found, 0)
        for update in range(1, updates):
            await asyncio.gather(grow(envs, found, update), asyncio.sleep(scale * learning))
        await asyncio.sleep(scale * learning)

    ways: dict[str, Callable[[Envs, FoundPaths], Awaitable[None]]] = {
        "lockstep": in_turn, "asynchronous": in_turn, "asynchronous, one off": one_off,
    }  # fmt: skip
    all_found: list[FoundPaths] = []
    with Envs(lambda: Uneven(scale), threads=max_live) as envs:
        for name, way in ways.items():
            found = FoundPaths(name)
            began = time.perf_counter()

            async def run(way: Any = way, found: FoundPaths = found) -> None:
                await way(envs, found)

            asyncio.run(run())
            found.seconds = time.perf_counter() - began
            all_found.append(found)
            if seen(found.trees) != seen(all_found[0].trees):
                raise RuntimeError(f"the trees of {name} are not those of {all_found[0].name}")
    return all_found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints a Markdown table.

    Args:
        argv: the arguments, by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench rollouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=0.05, help="factor of all durations")
    parser.add_argument("--tasks", type=int, default=8, help="number of trees of an update")
    parser.add_argument("--max-live", type=int, default=16, help="most environments live at once")
    parser.add_argument("--updates", type=int, default=2, help="rollouts, each followed by learning")
    parser.add_argument("--learning", type=float, default=20.0, help="seconds to learn an update, before scaling")
    arguments = parser.parse_args(argv)
    place = f"{platform.machine()}, Python {platform.python_version()}"
    print(
        f"All durations are multiplied by {arguments.scale:g}, and divided by it again for this table. "
        f"{arguments.updates} updates of {arguments.tasks} trees, {arguments.max_live} environments, "
        f"{arguments.learning:g} s of learning; {place}, one run each.\n"
    )
    columns: tuple[str, ...] = (
        "schedule",
        "driver",
        "paths",
        "steps",
        "tokens per second",
        "x lockstep",
        "prefix hits",
    )
    columns += ("waited for answers, s", "for steps, s", "an update, s", "x lockstep")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    schedules = {
        "independent": Schedule(8),
        "ForkAt": ForkAt([2, 4], width=4, roots=2),
        "TopEntropy": TopEntropy(2, width=4, roots=2),
    }
    for title, schedule in schedules.items():
        options = {name: value for name, value in vars(arguments).items() if name != "scale"}
        every = measure(schedule, scale=arguments.scale, **options)
        for found in every:
            scale, first = arguments.scale, every[0]
            cells = (
                title,
                found.name,
                sum(len(tree.paths) for tree in found.trees),
                sum(tree.env_steps for tree in found.trees),
                f"{scale * found.tokens / found.rollouts:,.0f}",
                f"{first.rollouts / found.rollouts:.2f}",
                f"{found.reused / found.read:.0%}",
                f"{found.clock.policy / scale / arguments.updates:.0f}",
                f"{found.clock.steps / scale / arguments.updates:.0f}",
                f"{found.seconds / scale / arguments.updates:.0f}",
                f"{first.seconds / found.seconds:.2f}",
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
