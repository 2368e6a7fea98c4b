"""Benchmark of ALFWorld's engine: against the original in one run, and against its design limits.

sandboxgym bench alfworld [--games valid_seen] [--number 12] [--steps 30] [--seed 0] [--cpu]

Both engines play the same games with the same random admissible commands through ``gym.make``; TextWorld with
alfworld's names is also driven by itself, without anything of this package around it, and ratios are to that. Without
TextWorld the rest is measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym

from sandboxgym.envs.alfworld.game import Game
from sandboxgym.envs.alfworld.games.library import GameLibrary, content_of
from sandboxgym.envs.alfworld.grounding_cache import GroundingCache
from sandboxgym.envs.alfworld.solver import shortest_plan
from sandboxgym.system import proc

LENGTHS = (1, 10, 40, 400)
"""Episode lengths in steps at which snapshots are taken."""
LIVE_FORKS = 10_000


@dataclass
class GameTimes:
    """Seconds of the calls of one kind."""

    cpu: ClassVar[bool] = False
    """True to measure the process's CPU time rather than wall-clock time."""
    seconds: list[float] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Measure the block as one call."""
        clock = time.process_time if self.cpu else time.perf_counter
        began = clock()
        yield
        self.seconds.append(clock() - began)

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.seconds)

    @property
    def mean(self) -> float:
        """Mean in seconds."""
        return statistics.mean(self.seconds)

    @property
    def late(self) -> float:
        """95th percentile in seconds."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(0.95 * len(self.seconds)))]


def _walk(env: Any, task: int, steps: int, *, seed: int, times: GameTimes) -> None:
    """Play random admissible commands, the same for engines with the same answers."""
    rng = random.Random(f"{seed} {task}")
    _, info = env.reset(options={"task": task})
    for _ in range(steps):
        command = rng.choice(info["admissible_commands"])
        with times.one():
            *_, info = env.step(command)


def _make(games: str, **arguments: Any) -> gym.Env[Any, Any]:
    return gym.make(
        "sandboxgym/ALFWorld-v0", games=games, stop_when_won=False, max_episode_steps=1_000_000, **arguments
    )


def _original(library: GameLibrary, tasks: Sequence[int], steps: int, *, seed: int) -> dict[str, GameTimes]:
    """Drive TextWorld by itself: loading, ``reset`` and ``step``."""
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld import EnvInfos
    from textworld.envs.pddl.pddl import PddlEnv

    times = {what: GameTimes() for what in ("load", "reset", "step")}
    arguments = sys.argv
    for task in tasks:
        content = json.loads(content_of(library[task]))
        with times["load"].one():
            env = AlfredDemangler(PddlEnv(EnvInfos(feedback=True, won=True, admissible_commands=True)))
            env.load(content)
        with times["reset"].one():
            state = env.reset()
        rng = random.Random(f"{seed} {task}")
        for _ in range(steps):
            command = rng.choice(state.admissible_commands)
            with times["step"].one():
                state, _, _ = env.step(command)
    sys.argv = arguments  # the translator of Fast Downward puts its own there
    return times


def _each(calls: Sequence[Callable[[], Any]]) -> GameTimes:
    times = GameTimes()
    for call in calls:
        with times.one():
            call()
    return times


def compare(games: str, *, number: int, steps: int, seed: int) -> list[str]:
    """Measure; returns lines of Markdown."""
    native = _make(games)
    library: GameLibrary = native.unwrapped.library  # type: ignore[attr-defined]
    tasks = random.Random(seed).sample(range(len(library)), min(number, len(library)))
    lines = [
        f"games={Path(games).name}, {len(tasks)} of them, {steps} steps each, seed {seed}; {platform.machine()}, "
        f"Python {platform.python_version()}; {'CPU' if GameTimes.cpu else 'wall'} time, medians "
        "unless said otherwise",
        "",
    ]
    library.compile(tasks[0])  # what depends on the domain alone
    native.reset(options={"task": tasks[0]})
    compiling = _each([lambda task=task: library.compile(task) for task in tasks])  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as directory:
        cache = GroundingCache(directory)

        def cached(task: int) -> Game:
            return Game.from_json(content_of(library[task]), name=library[task].gamefile, cache=cache)

        writing = _each([lambda task=task: cached(task) for task in tasks])  # type: ignore[misc]
        reading = _each([lambda task=task: cached(task) for task in tasks])  # type: ignore[misc]
        entry = statistics.mean(path.stat().st_size for path in Path(directory).iterdir())
    first, later, resets, by_path = GameTimes(), GameTimes(), GameTimes(), GameTimes()
    for task in tasks:
        _walk(native, task, steps, seed=seed, times=first)
    for task in tasks:
        for again in range(5):
            _walk(native, task, steps, seed=seed + again, times=later)
        for _ in range(20):
            with resets.one():
                native.reset(options={"task": task})
            with by_path.one():
                native.reset(options={"task": library[task].gamefile})
    solving = _each([lambda task=task: shortest_plan(library.load(task)) for task in tasks])  # type: ignore[misc]

    if importlib.util.find_spec("textworld") and importlib.util.find_spec("alfworld"):
        alone = _original(library, tasks, steps, seed=seed)
        reference = _make(games, engine="textworld")
        loads, walked, again_reset = GameTimes(), GameTimes(), GameTimes()
        for task in tasks:
            with loads.one():
                reference.reset(options={"task": task})
            _walk(reference, task, steps, seed=seed, times=walked)
            with again_reset.one():
                reference.reset(options={"task": task})
        lines += [
            '| ms | native | `engine="textworld"` | TextWorld by itself | native is faster by | at least |',
            "|---|---|---|---|---|---|",
        ]

        def row(what: str, ours: float, theirs: float | None, original: float, least: str = "") -> None:
            between = "" if theirs is None else f"{theirs * 1e3:,.1f}"
            ratio = f"{original / ours:,.0f} x"
            lines.append(f"| {what} | {ours * 1e3:.3f} | {between} | {original * 1e3:,.1f} | {ratio} | {least} |")

        row("step with admissible commands", later.median, walked.median, alone["step"].median, "300 x")
        row("the same, mean", later.mean, walked.mean, alone["step"].mean)
        row("the same, first episode of a game, mean", first.mean, walked.mean, alone["step"].mean)
        row("reset of a loaded game", resets.median, again_reset.median, alone["reset"].median, "1,000 x")
        row("load a game", compiling.median, loads.median, alone["load"].median)
        lines.append("")
    else:
        lines += ["TextWorld and alfworld are not installed: nothing to compare with.", ""]

    lines += ["| native | found | bound |", "|---|---|---|"]
    lines.append(
        f"| step, median (first episode of a game) | {later.median * 1e6:.0f} ({first.median * 1e6:.0f}) µs | |"
    )
    lines.append(
        f"| reset of a loaded game out of {len(library):,}, by its path (by its number) "
        f"| {by_path.median * 1e6:.0f} ({resets.median * 1e6:.0f}) µs | |"
    )
    lines.append(f"| compile a game, median (largest) | {_ms(compiling)} | 60 ms |")
    lines.append(f"| the same, and write the cache on disk | {_ms(writing)} | |")
    lines.append(
        f"| load it with the cache on disk ({entry / 1e3:.1f} kB each) | {_ms(reading)} | less than compiling |"
    )
    lines.append(f"| shortest plan from the start, median (largest) | {_ms(solving)} | |")
    for length in LENGTHS:
        native.reset(seed=seed, options={"task": tasks[0]})
        _walk(native, tasks[0], length, seed=seed, times=GameTimes())
        snap = native.snapshot()  # type: ignore[attr-defined]
        native.restore(snap)  # type: ignore[attr-defined]
        taking = _each([native.snapshot] * 2000)  # type: ignore[attr-defined]
        restoring = _each([lambda snap=snap: native.restore(snap)] * 2000)  # type: ignore[attr-defined,misc]
        lines.append(f"| snapshot after {length} steps | {taking.median * 1e6:.0f} µs | 30 µs |")
        lines.append(f"| restore after {length} steps | {restoring.median * 1e6:.0f} µs | 60 µs |")
        lines.append(f"| snapshot on disk after {length} steps | {len(snap.to_bytes())} bytes | 2,048 bytes |")
    if sys.platform == "linux":
        gc.collect()
        before = proc.memory()[1]
        forks = native.fork(LIVE_FORKS, seed=seed)  # type: ignore[attr-defined]
        for fork in forks:
            fork.step("inventory")
        taken = (proc.memory()[1] - before) / 1e6
        lines.append(f"| {LIVE_FORKS:,} live forks, each stepped once | {taken:.0f} MB | 200 MB |")
    return lines


def _ms(times: GameTimes) -> str:
    return f"{times.median * 1e3:.1f} ({max(times.seconds) * 1e3:.1f}) ms"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints Markdown tables."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench alfworld",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--games", default="embedded", help="argument of gym.make: a split, a directory…")
    parser.add_argument("--number", type=int, default=12, help="number of games, drawn by the seed")
    parser.add_argument("--steps", type=int, default=30, help="steps per episode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time, not wall-clock time, on a busy machine")
    arguments = parser.parse_args(argv)
    GameTimes.cpu = arguments.cpu
    print("\n".join(compare(arguments.games, number=arguments.number, steps=arguments.steps, seed=arguments.seed)))
