"""Benchmark of WebShop in a real browser against its text environment: steps, snapshots, forks and their memory.

sandboxgym bench browser [--plays 6] [--repeats 10] [--episodes FILE …]
    [--write docs/results/details/webshop-browser.md]

Both play the same actions, recorded ones (as for ``bench webshop``) or random admissible ones, and every answer is
compared. The text environment plays them five times, of which the fastest counts; searches and pages are cached on
both sides, so that only the browser differs. Times are wall-clock, median and 95th percentile; "shown" means that the
browser has loaded the state too, which it otherwise does before its next action.
"""

from __future__ import annotations

import argparse
import operator
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
from gymnasium.error import DependencyNotInstalled

from sandboxgym.bench.alfworld import GameTimes
from sandboxgym.bench.tools import result_page
from sandboxgym.bench.webshop import Play, play, random_plays, recorded
from sandboxgym.conformance.supervision.processes import descendants
from sandboxgym.core import Snapshot
from sandboxgym.envs.webshop.web.browser_page import BrowserMode
from sandboxgym.system import proc

FORKS = 8
ROUNDS = 5
"""Repetitions of the text environment's episodes, which take milliseconds; the fastest counts."""
DEEP = 8
"""Number of steps before the state that is snapshotted and forked."""
_POINT = """() => {
  const box = document.querySelector('[data-name]').getBoundingClientRect();
  return [Math.round(box.x + box.width / 2), Math.round(box.y + box.height / 2)];
}"""
Table = list[str]


@dataclass(frozen=True, slots=True)
class BrowserSetting:
    """Settings of the measurement."""

    catalogue: str
    nouns: str | None
    episodes: Sequence[Path]
    plays: int
    repeats: int
    seed: int

    def make(self, name: str, **arguments: Any) -> Any:
        """Make ``WebShop`` or ``WebShopBrowser`` through ``gym.make``."""
        limit = {"max_episode_steps": 1_000_000}
        return gym.make(f"sandboxgym/{name}-v0", catalogue=self.catalogue, nouns=self.nouns, **{**limit, **arguments})


def shown(times: GameTimes, unit: float = 1e3) -> str:
    """Format median and 95th percentile, in milliseconds or another part of a second."""
    return f"{times.median * unit:,.1f} / {times.late * unit:,.1f}"


def resetting(env: Any) -> Callable[[int], Any]:
    """Make a function that resets to a goal."""
    return lambda goal: env.reset(options={"goal": goal})


# Steps.


def steps(env: Any, text: Any, plays: Sequence[Play]) -> Table:
    """Measure every kind of action in both environments.

    Raises:
        RuntimeError: an answer of one is not that of the other.
    """
    rounds = [play(plays, resetting(text), text.step) for _ in range(ROUNDS)]
    theirs, expected = min(rounds, key=lambda each: sum(sum(times.seconds) for times in each[0].values()))
    ours, found = play(plays, resetting(env), env.step)
    if differing := sum(map(operator.ne, expected, found)):
        raise RuntimeError(f"{differing} of {len(found)} answers of the browser are not those of the text environment")
    lines = [
        f"{len(plays)} episodes; {len(found)} answers (observation, reward, flags, info), all equal in both.",
        "",
        "| p50 / p95 | browser, ms | text, µs | text is faster by |",
        "|---|---|---|---|",
    ]
    for kind in sorted(ours, key=lambda kind: -len(ours[kind].seconds)):
        mine, other = ours[kind], theirs[kind]
        ratio = mine.median / other.median
        lines.append(f"| {kind} ({len(mine.seconds)}) | {shown(mine)} | {shown(other, 1e6)} | {ratio:,.0f} x |")
    rates = []
    for times in (ours, theirs):
        taken = [seconds for kind, each in times.items() if kind != "reset" for seconds in each.seconds]
        rates.append(len(taken) / sum(taken))
    lines.append(f"| steps per second | {rates[0]:.1f} | {rates[1]:,.0f} | {rates[1] / rates[0]:,.0f} x |")
    return [*lines, ""]


def modes(setting: BrowserSetting, plays: Sequence[Play]) -> Table:
    """Measure the same episodes with other observations."""
    lines = ["| observation | steps per second | ms a step, p50 / p95 |", "|---|---|---|"]
    for mode in get_args(BrowserMode):
        env = setting.make("WebShopBrowser", observation_mode=mode)
        try:
            env.reset()
            times, _ = play(plays, resetting(env), env.step)
        finally:
            env.close()
        taken = GameTimes([seconds for kind, each in times.items() if kind != "reset" for seconds in each.seconds])
        lines.append(f"| {mode} | {1 / taken.mean:.1f} | {shown(taken)} |")
    return [*lines, ""]


def hands(env: Any, repeats: int) -> Table:
    """Measure mouse and keyboard, one action each.

    Raises:
        RuntimeError: an action had no effect.
    """
    times: dict[str, GameTimes] = defaultdict(GameTimes)

    def act(action: str) -> None:
        with times[action.partition("[")[0] + ("[Enter]" if "Enter" in action else "")].one():
            *_, info = env.step(action)
        if not info["valid_action"]:
            raise RuntimeError(f"{action} had no effect on {info['page_type']}")

    for _ in range(repeats):
        env.reset(options={"goal": 0})
        for action in ("type[shoes]", "press[Home]", "press[Enter]", "scroll[0, 200]", "scroll[0, -200]"):
            act(action)
        across, down = env.unwrapped.tab.run(_POINT)
        act(f"mouse_click[{across}, {down}]")
    lines = ["| by hand | ms, p50 / p95 |", "|---|---|"]
    return [*lines, *(f"| {name} | {shown(each)} |" for name, each in times.items()), ""]


# Snapshots.


def snapshots(env: Any, text: Any, goal: int, actions: Sequence[str], repeats: int) -> Table:
    """Measure snapshot, restore, fork, reset and replay of one state, in both environments."""
    starts: dict[Any, Snapshot] = {}
    snaps: dict[Any, Snapshot] = {}

    def reset(each: Any) -> None:
        each.reset(options={"goal": goal})

    def replay(each: Any) -> None:
        reset(each)
        for action in actions:
            each.step(action)

    def restore_shown(each: Any) -> None:
        each.restore(snaps[each])
        _ = each.unwrapped.tab

    def leave(each: Any) -> None:
        each.restore(starts[each])
        _ = each.unwrapped.tab

    def fork_shown(each: Any) -> Any:
        children = each.fork(1)
        _ = children[0].unwrapped.tab
        return children

    def times(each: Any, call: Callable[[Any], Any], before: Callable[[Any], Any] | None = None) -> GameTimes:
        taken = GameTimes()
        for _ in range(repeats):
            if before is not None:
                before(each)
            with taken.one():
                result = call(each)
            for child in result if isinstance(result, list) else ():
                child.close()
        return taken

    for each in (env, text):
        reset(each)
        starts[each] = each.snapshot()
        replay(each)
        snaps[each] = each.snapshot()
    lines = ["| ms, p50 / p95 | browser | text |", "|---|---|---|"]
    both: dict[str, Callable[[Any], Any]] = {
        "snapshot": lambda each: each.snapshot(),
        "restore": lambda each: each.restore(snaps[each]),
        "fork(1)": lambda each: each.fork(1),
    }
    lines += [f"| {what} | {_fine(times(env, call))} | {_fine(times(text, call))} |" for what, call in both.items()]
    there = times(env, restore_shown, leave)
    ways = {
        "reset": (times(env, reset, restore_shown), times(text, reset)),
        f"reset and replay of {len(actions)} steps": (times(env, replay), times(text, replay)),
    }
    child = times(env, fork_shown)
    lines += [f"| restore, shown | {_fine(there)} | |", f"| fork(1), shown | {_fine(child)} | |"]
    lines += [f"| {what} | {_fine(mine)} | {_fine(theirs)} |" for what, (mine, theirs) in ways.items()]
    sizes = [f"{len(snaps[each].to_bytes()):,}" for each in (env, text)]
    lines.append(f"| snapshot on disk, bytes | {sizes[0]} | {sizes[1]} |")
    compared = {what: mine for what, (mine, _) in ways.items()} | {"fork(1), shown": child}
    ratios = [f"{what} {mine.median / there.median:.1f} : 1" for what, mine in compared.items()]
    return [*lines, "", f"In the browser, against a restore that is shown (medians): {'; '.join(ratios)}.", ""]


def _fine(times: GameTimes) -> str:
    return f"{times.median * 1e3:,.3f} / {times.late * 1e3:,.3f}"


# Forks.


def memory() -> tuple[float, int]:
    """MiB of this process and all its descendants, shared pages counted by shares; and the number of descendants."""
    below = descendants(os.getpid())
    total = 0
    for pid in (os.getpid(), *below):
        try:
            total += proc.nbytes(f"/proc/{pid}/smaps_rollup", "Pss")
        except OSError:  # it ended meanwhile
            continue
    return total / 2**20, len(below)


def forks(env: Any, text: Any, goal: int, actions: Sequence[str]) -> Table:
    """Measure eight children of one state that live at once, each with its own next action, beside the same in text.

    Raises:
        RuntimeError: a child or the parent is not where it should be.
    """
    for each in (env, text):
        *_, info = each.reset(options={"goal": goal})
        for action in actions:
            *_, info = each.step(action)
    parent = env.unwrapped.tab.look()
    before = memory()
    opening, at_once, acting = GameTimes(), GameTimes(), GameTimes()
    children, twins = env.fork(FORKS), text.fork(FORKS)
    commands = info["admissible_commands"]
    ways = [commands[number % len(commands)] for number in range(FORKS)]
    try:
        for child in children:
            with opening.one():
                _ = child.unwrapped.tab
        alive = memory()
        with ThreadPoolExecutor(FORKS) as pool:
            with acting.one():
                found = list(pool.map(lambda child, way: child.step(way), children, ways))
            later = memory()
            expected = [twin.step(way) for twin, way in zip(twins, ways, strict=True)]
            there = [child.unwrapped.tab.look().observation for child in children]
            if found != expected or there != [each[0] for each in expected]:
                raise RuntimeError(
                    "forks that acted at the same time are in other states than the text environment's forks"
                )
            if env.unwrapped.tab.look() != parent:
                raise RuntimeError("forks moved their parent")
            for child in children:
                child.close()
            after = memory()
            children = env.fork(FORKS)
            with at_once.one():
                list(pool.map(lambda child: child.unwrapped.tab, children))
    finally:
        for child in children:
            child.close()
    return [
        f"{FORKS} forks of a state {len(actions)} steps deep took {len(set(ways))} different actions at the same time;",
        "each came where its twin in the text environment did, and the parent stayed where it was.",
        "",
        "| | |",
        "|---|---|",
        f"| ms until a fork is shown, one after another, p50 / p95 | {shown(opening)} |",
        f"| ms until {FORKS} are shown, together in threads | {at_once.median * 1e3:,.0f} |",
        f"| ms until {FORKS} have acted, together in threads | {acting.median * 1e3:,.0f} |",
        f"| MiB of Python, driver and browser with one environment | {before[0]:,.0f}, processes: {before[1] + 1} |",
        f"| MiB each of {FORKS} forks | {(alive[0] - before[0]) / FORKS:,.1f}, processes: +{alive[1] - before[1]} |",
        f"| MiB each after their action | {(later[0] - before[0]) / FORKS:,.1f} |",
        f"| MiB left of all, once closed | {after[0] - before[0]:,.1f}, processes: {after[1] - before[1]:+} |",
        "",
        "Memory is the proportional set size (`Pss`) of all these processes. A negative number is a browser that gave",
        "back more than these forks had taken.",
        "",
    ]


# The page.


def described(env: Any) -> str:
    """Program and version of the browser that an environment uses."""
    version = re.search(r"Chrome/([\d.]+)", env.unwrapped.tab.run("() => navigator.userAgent"))
    programs = set()
    for pid in descendants(os.getpid()):
        try:
            programs.add(Path(os.readlink(f"/proc/{pid}/exe")).name)
        except OSError:
            continue
    named = sorted(name for name in programs if "chrom" in name or "headless" in name)
    return f"{', '.join(named) or 'browser'} {version[1] if version else 'of unknown version'}"


def measure(setting: BrowserSetting, load: float) -> Table:
    """Measure everything; returns the page as lines of Markdown.

    Args:
        setting: settings of the measurement.
        load: load of the machine beforehand.
    """
    text, env = setting.make("WebShop"), setting.make("WebShopBrowser")
    text.reset()
    try:
        opening = GameTimes()
        with opening.one():
            env.reset(options={"goal": 0})
        plays = recorded(setting.episodes)[: setting.plays] or random_plays(text, setting.plays, seed=setting.seed)
        deep = [(goal, actions[:DEEP]) for goal, actions in plays if len(actions) > DEEP]
        if not deep:
            raise SystemExit(f"expected an episode of more than {DEEP} steps, found none; increase --plays")
        goal, actions = deep[0]
        lines = [
            f"{result_page.machine(described(env))}; load {load:.1f} at the start. "
            f"Catalogue {Path(setting.catalogue).name}, seed {setting.seed}. Compare within this page only.",
            "",
            f"From nothing to the first page, the browser's start included: {opening.mean:.1f} s.",
            "",
            "### Steps",
            "",
            *steps(env, text, plays),
            *modes(setting, plays[: max(1, len(plays) // 3)]),
            *hands(env, setting.repeats),
            "### Snapshots",
            "",
            *snapshots(env, text, goal, actions, setting.repeats),
            f"### {FORKS} forks at once",
            "",
            *(
                forks(env, text, goal, actions)
                if Path("/proc/self/smaps_rollup").exists()
                else ["Not measured: there is no `/proc/self/smaps_rollup`.", ""]
            ),
        ]
    finally:
        env.close()
        text.close()
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench browser", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--catalogue", default="embedded", help="argument of gym.make")
    parser.add_argument("--nouns", help="argument of gym.make")
    parser.add_argument("--episodes", type=Path, nargs="*", default=(), help="files of recorded episodes")
    parser.add_argument("--plays", type=int, default=6, help="number of episodes, recorded or random")
    parser.add_argument(
        "--repeats", type=int, default=10, help="repetitions of snapshots and of mouse and keyboard actions"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", metavar="FILE", help="file to write the page to")
    arguments = vars(parser.parse_args(argv))
    target = arguments.pop("write")
    try:
        measured = measure(BrowserSetting(**arguments), os.getloadavg()[0])
    except DependencyNotInstalled as error:
        raise SystemExit(f"the browser is not available here: {error}") from error
    result_page.publish([*result_page.head("WebShop in a real browser", "browser", argv), *measured], target)


if __name__ == "__main__":
    main()
