"""Benchmark of WebShop's steps, snapshots and memory, with the original's steps in the same run.

sandboxgym bench webshop [--catalogue DIR] [--episodes FILE …] [--original CHECKOUT] [--cpu]

Episodes are recordings of the original, one JSON object per line: ``session`` (index of the goal) and ``steps`` with an
``action`` each. Without them random admissible commands are played. ``--original`` names a checkout of
princeton-nlp/WebShop, whose text environment then plays the same actions, with our search and nouns in place of Lucene
and spaCy, so that it needs neither Java nor models and its time does not include theirs
(``pip install flask beautifulsoup4 thefuzz==0.19.0``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym

from sandboxgym.bench.alfworld import GameTimes
from sandboxgym.envs.webshop.shop import Shop
from sandboxgym.system import interpreter, proc

ORIGINAL_STEP = 15.1e-3
"""CPU seconds of a step of the original with Lucene on the 1,000 products, measured separately."""
LENGTHS = (1, 10, 40)
"""Episode lengths in steps at which snapshots are taken."""
LIVE_FORKS = 1_000
_LEAVING = ("click[buy now]", "click[back to search]")
Play = tuple[int, tuple[str, ...]]
"""Index of the goal, with the actions."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of the measurement."""

    catalogue: str
    nouns: str | None
    episodes: Sequence[Path]
    original: Path | None
    seed: int


def _make(setting: Setting, **arguments: Any) -> gym.Env[Any, Any]:
    return gym.make(
        "sandboxgym/WebShop-v0",
        catalogue=setting.catalogue,
        nouns=setting.nouns,
        max_episode_steps=1_000_000,
        **arguments,
    )


def recorded(paths: Sequence[Path]) -> list[Play]:
    """Read episodes from files of recordings."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [(line["session"], tuple(step["action"] for step in line["steps"])) for line in lines]


def random_plays(env: gym.Env[Any, Any], number: int, *, seed: int) -> list[Play]:
    """Draw episodes of random admissible commands, at most 30 in each."""
    rng = random.Random(seed)
    plays = []
    for _ in range(number):
        goal = rng.randrange(len(env.unwrapped.shop.goals))  # type: ignore[attr-defined]
        actions: list[str] = []
        _, info = env.reset(options={"goal": goal})
        while info["admissible_commands"] and len(actions) < 30:
            actions.append(rng.choice(info["admissible_commands"]))
            *_, info = env.step(actions[-1])
        plays.append((goal, tuple(actions)))
    return plays


def kind_of(action: str) -> str:
    """Kind of an action: a search, a button by its name, a product, an option."""
    verb, _, argument = action.partition("[")
    name = argument.rstrip("]")
    if verb != "click":
        return verb if verb == "search" else "other"
    if name in ("back to search", "next >", "< prev", "description", "features", "reviews", "buy now"):
        return name
    return "product" if len(name) == 10 and name.startswith("b0") else "option"


def play(
    plays: Sequence[Play], reset: Callable[[int], Any], step: Callable[[str], Any]
) -> tuple[dict[str, GameTimes], list[Any]]:
    """Play actions; returns times by kind of action, and the results of ``reset`` and ``step``."""
    times: dict[str, GameTimes] = defaultdict(GameTimes)
    returned = []
    for goal, actions in plays:
        with times["reset"].one():
            first = reset(goal)
        returned.append(first)
        for action in actions:
            with times[kind_of(action)].one():
                result = step(action)
            returned.append(result)
    return times, returned


def _all_steps(times: dict[str, GameTimes]) -> GameTimes:
    return GameTimes([seconds for kind, each in times.items() if kind != "reset" for seconds in each.seconds])


def _forget(shop: Shop) -> None:
    """Empty the shop's cache of pages; searches stay cached, in the original's run as well."""
    for cache in (shop._page, shop.worth):
        cache.cache_clear()


@contextlib.contextmanager
def original(checkout: Path, directory: Path, shop: Shop) -> Iterator[Any]:
    """Make the original's text environment, for comparison. There can be only one at a time.

    Args:
        checkout: of princeton-nlp/WebShop.
        directory: its catalogue.
        shop: the same catalogue here, whose search, nouns and kind of goals it takes.

    Raises:
        ModuleNotFoundError: a package that it needs is not installed.
    """

    class Searcher:
        def __init__(self, _: str) -> None: ...

        def search(self, keywords: str, k: int) -> list[SimpleNamespace]:
            return [SimpleNamespace(docid=asin) for asin in shop.search(keywords)]

        def doc(self, asin: str) -> SimpleNamespace:
            return SimpleNamespace(raw=lambda: json.dumps({"id": asin}))

    def tagged(title: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(text=noun, pos_="NOUN") for noun in shop.nouns(title)]

    package = "web_agent_site"
    replaced: dict[str, dict[str, Any]] = {
        "gym": {"Env": object},
        "torch": {},
        "cleantext": {},
        "rank_bm25": {"BM25Okapi": None},
        "pyserini": {},
        "pyserini.search": {},
        "pyserini.search.lucene": {"LuceneSearcher": Searcher},
        "spacy": {"load": lambda _: tagged},
        "rich": {"print": print},
        "tqdm": {"tqdm": lambda items, **_: items},
        f"{package}.envs": {"__path__": [str(checkout / package / "envs")]},  # its __init__ wants a browser
    }
    before = {name: sys.modules.get(name) for name in replaced}
    for name, content in replaced.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    sys.path.insert(0, str(checkout))
    try:
        where = importlib.import_module(f"{package}.utils")
        where.DEFAULT_ATTR_PATH = str(next(directory.glob("items_ins_v2*.json")))  # type: ignore[attr-defined]
        where.HUMAN_ATTR_PATH = str(directory / "items_human_ins.json")  # type: ignore[attr-defined]
        envs = importlib.import_module(f"{package}.envs.web_agent_text_env")
        random.seed(shop.goals.price_seed)
        with contextlib.redirect_stdout(io.StringIO()):
            env = envs.WebAgentTextEnv(
                observation_mode="text",
                file_path=str(next(directory.glob("items_shuffle*.json"))),
                human_goals=shop.goals.kind == "human",
                show_attrs=shop.show_attributes,
            )
        yield env
    finally:
        sys.path.remove(str(checkout))
        for name in [name for name in sys.modules if name.split(".")[0] == package or name in before]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if module is not None})


def measure(setting: Setting) -> list[str]:
    """Measure everything; returns lines of Markdown."""
    opening = GameTimes()
    with opening.one():
        env = _make(setting, compat="upstream")
    shop: Shop = env.unwrapped.shop  # type: ignore[attr-defined]
    plays = recorded(setting.episodes) or random_plays(env, 60, seed=setting.seed)
    number = sum(len(actions) for _, actions in plays)
    lines = [
        f"{len(shop.catalogue):,} products, {len(plays)} {'recorded' if setting.episodes else 'random'} episodes of "
        f"{number:,} steps, seed {setting.seed}; {platform.machine()}, Python {platform.python_version()}; "
        f"{'CPU' if GameTimes.cpu else 'wall'} time; snapshot and restore: median of the quietest of 10 batches",
        "",
    ]

    def reset(goal: int) -> Any:
        return env.reset(options={"goal": goal})

    cold = _all_steps(play(plays, reset, env.step)[0])  # searches are remembered from here on
    _forget(shop)
    forks = [_forks(env, plays)] if sys.platform == "linux" else []
    _forget(shop)
    first, answers = play(plays, reset, env.step)
    again, _ = play(plays, reset, env.step)
    ours = _all_steps(first)
    if setting.original is None:
        theirs = None
        lines += ["Without the original (--original) in the same run.", ""]
    else:
        with original(setting.original, Path(setting.catalogue), shop) as reference:
            slow, expected = play(plays, lambda goal: reference.reset(session=goal), reference.step)
        theirs = _all_steps(slow)
        differing = sum(answer[0] != wanted[0] for answer, wanted in zip(answers, expected, strict=True))
        lines += [f"Observations that differ from the original's: {differing} of {len(answers):,}.", ""]
        lines += ["| µs a step, mean | original, without Lucene | searches remembered | pages, too | faster by |"]
        lines += ["|---|---|---|---|---|"]
        for kind in sorted(first, key=lambda kind: -len(first[kind].seconds)):
            values = [each[kind].mean * 1e6 for each in (slow, first, again)]
            row = f"| {kind} ({len(first[kind].seconds)}) | {values[0]:,.0f} | {values[1]:.0f} | {values[2]:.0f} |"
            lines.append(f"{row} {values[0] / values[1]:,.0f} x |")
        lines.append("")

    lines += ["| | found | bound |", "|---|---|---|"]
    lines.append(f"| open the shop (catalogue, goals, index) | {opening.mean * 1e3:,.0f} ms | 1,000 ms |")
    again_opened = statistics.median([_opening(setting) for _ in range(5)])
    lines.append(f"| open it in another process: CPU time, median of 5 | {again_opened * 1e3:,.0f} ms | 300 ms |")
    if setting.episodes:  # random ones were played before, to make them
        lines.append(f"| steps per second, nothing remembered | {1 / cold.mean:,.0f} | |")
        anchor = f"{ORIGINAL_STEP * 1e3:.1f} ms, the original's step with Lucene"
        lines.append(f"| the same against {anchor} | {ORIGINAL_STEP / cold.mean:,.0f} x | 50 x |")
    lines.append(f"| steps per second, searches remembered | {1 / ours.mean:,.0f} | |")
    if theirs is not None:
        lines.append(f"| the same against the original without Lucene | {theirs.mean / ours.mean:,.0f} x | 50 x |")
    lines.append(f"| steps per second, searches and pages remembered | {1 / _all_steps(again).mean:,.0f} | |")
    return [*lines, *_snapshots(setting), *forks]


def _opening(setting: Setting) -> float:
    """CPU seconds of ``gym.make`` in a fresh process, when all files are built; its imports do not count."""
    arguments = ["--opening", "--catalogue", setting.catalogue, *(("--nouns", setting.nouns) if setting.nouns else ())]
    command = interpreter.module_command("sandboxgym.bench.webshop", *arguments)
    done = subprocess.run(command, env=interpreter.environment(), capture_output=True, text=True, check=True)
    return float(done.stdout)


def _open(setting: Setting) -> float:
    importlib.import_module("sandboxgym.envs.webshop.env")
    began = time.process_time()
    _make(setting)
    return time.process_time() - began


def _quietest_median(call: Callable[[], Any], *, batches: int = 10, calls: int = 500) -> float:
    """Median seconds of the batch in which the machine was least disturbed."""
    medians = []
    for _ in range(batches):
        times = GameTimes()
        for _ in range(calls):
            with times.one():
                call()
        medians.append(times.median)
    return min(medians)


def _snapshots(setting: Setting) -> list[str]:
    env, lines = _make(setting), []
    rng = random.Random(setting.seed)
    for length in LENGTHS:
        _, info = env.reset(seed=setting.seed, options={"goal": 0})
        for _ in range(length):
            commands = [command for command in info["admissible_commands"] if command not in _LEAVING]
            *_, info = env.step(rng.choice(commands))
        snap = env.snapshot()  # type: ignore[attr-defined]
        env.restore(snap)  # type: ignore[attr-defined]
        for what, call, bound in (
            ("snapshot", env.snapshot, "30 µs"),  # type: ignore[attr-defined]
            ("restore", lambda snap=snap: env.restore(snap), "60 µs"),  # type: ignore[attr-defined,misc]
        ):
            lines.append(f"| {what} after {length} steps | {_quietest_median(call) * 1e6:.0f} µs | {bound} |")
        state = len(env.unwrapped.session.encode())  # type: ignore[attr-defined]
        size = len(snap.to_bytes())
        lines.append(f"| snapshot on disk after {length} steps (its state) | {size:,} ({state}) bytes | 4,096 bytes |")
    return lines


def _forks(env: gym.Env[Any, Any], plays: Sequence[Play]) -> str:
    """Measure the memory of live forks, with the shop's cache of their pages."""
    env.reset(seed=0)
    gc.collect()
    before = proc.memory()[1]
    forks = env.fork(LIVE_FORKS, seed=0)  # type: ignore[attr-defined]
    for index, fork in enumerate(forks):
        for action in plays[index % len(plays)][1]:
            fork.step(action)
    taken = (proc.memory()[1] - before) / 1e6
    return f"| {LIVE_FORKS:,} live forks, each after an episode | {taken:.0f} MB | 100 MB |"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints Markdown tables."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench webshop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--catalogue", default="embedded", help="argument of gym.make")
    parser.add_argument("--nouns", help="argument of gym.make")
    parser.add_argument("--episodes", type=Path, nargs="*", default=(), help="files of recorded episodes")
    parser.add_argument("--original", type=Path, help="a checkout of princeton-nlp/WebShop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time, not wall-clock time, on a busy machine")
    parser.add_argument("--opening", action="store_true", help=argparse.SUPPRESS)  # what `_opening` runs
    arguments = vars(parser.parse_args(argv))
    GameTimes.cpu = arguments.pop("cpu")
    if arguments.pop("opening"):
        print(_open(Setting(**arguments)))
        return
    print("\n".join(measure(Setting(**arguments))))


if __name__ == "__main__":
    main()
