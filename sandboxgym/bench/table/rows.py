"""Rows of the environments, sandboxes and workers; those of the trainer are in `bpo_ref.experiments.bench`."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym

import sandboxgym
from sandboxgym.bench.table.row import Options, Pair, RowUnavailable, TableRow, in_turns
from sandboxgym.system import interpreter

STEPS = 25
"""Steps that a snapshot saves to replay."""
WALL = time.perf_counter


def _alfworld(options: Options) -> tuple[Any, list[str]]:
    from sandboxgym.bench.snapshots import play

    env = gym.make("sandboxgym/ALFWorld-v0", games=options.games, max_episode_steps=1_000_000, stop_when_won=False)
    env.reset(options={"task": 0})
    return env, play(env, 0, STEPS)


def _webshop(steps: int = 10) -> tuple[Any, list[str]]:
    """WebShop's environment, and admissible actions which lead from its first page to a later one of the episode."""
    env = gym.make("sandboxgym/WebShop-v0", max_episode_steps=1_000_000)
    _, info = env.reset(seed=0, options={"goal": 0})
    actions: list[str] = []
    while len(actions) < steps:
        able = [each for each in info["admissible_commands"] if each not in ("click[buy now]", "click[back to search]")]
        actions.append(able[(7 * len(actions)) % len(able)])
        *_, info = env.step(actions[-1])
    return env, actions


def _replay(env: Any, options: dict[str, Any], actions: list[str]) -> Callable[[], None]:
    def again() -> None:
        env.reset(seed=0, options=dict(options))
        for action in actions:
            env.step(action)

    return again


def _forked(env: Any, task: dict[str, Any], actions: list[str], way: str) -> Iterator[Pair]:
    replay = _replay(env, task, actions)
    replay()
    snap = sandboxgym.snapshot(env)
    ways: dict[str, Callable[[], Any]] = {
        "snapshot": lambda: sandboxgym.snapshot(env),
        "restore": lambda: sandboxgym.restore(env, snap),
        "fork": lambda: sandboxgym.fork(env, 8),
    }
    share = 8 if way == "fork" else 1
    for first, second in in_turns(ways[way], replay, calls=(8 if way == "fork" else 64, 1)):
        yield first / share, second


def _alfworld_forked(options: Options, way: str) -> Iterator[Pair]:
    env, commands = _alfworld(options)
    yield from _forked(env, {"task": 0}, commands, way)


def _webshop_forked(options: Options, way: str) -> Iterator[Pair]:
    env, actions = _webshop()
    yield from _forked(env, {"goal": 0}, actions, way)


def _durable(make: Callable[[], tuple[Any, list[str]]]) -> Iterator[Pair]:
    """Bytes of a snapshot on disk, against those of the pickled actions that lead to it with their observations."""
    env, actions = make()
    task = {"task": 0} if "ALFWorld" in env.spec.id else {"goal": 0}
    seen = [env.reset(seed=0, options=task)[0], *(env.step(action)[0] for action in actions)]
    record = json.dumps({"actions": actions, "observations": seen}).encode()
    for _ in range(5):
        yield float(len(sandboxgym.snapshot(env).to_bytes())), float(len(record))


def _alfworld_steps(options: Options, *, fresh: bool) -> Iterator[Pair]:
    """Twelve steps of one game after another, whose operators are on disk: new to this process, or played before."""
    if not (importlib.util.find_spec("textworld") and importlib.util.find_spec("alfworld")):
        raise RowUnavailable("TextWorld and alfworld are not installed: pip install 'sandboxgym[alfworld-reference]'")
    from sandboxgym.bench.alfworld import GameTimes, _original, _walk
    from sandboxgym.envs.alfworld.game import Game
    from sandboxgym.envs.alfworld.games.library import GameLibrary, content_of
    from sandboxgym.envs.alfworld.grounding_cache import GroundingCache

    steps, GameTimes.cpu = 12, True
    env = gym.make("sandboxgym/ALFWorld-v0", games=options.games, max_episode_steps=1_000_000, stop_when_won=False)
    library: GameLibrary = env.unwrapped.library  # type: ignore[attr-defined]
    for task in range(1, len(library)):
        times = GameTimes()
        for _ in range(2):  # from the second time on, operators are kept
            Game.from_json(content_of(library[task]), cache=GroundingCache())
        if not fresh:
            _walk(env, task, steps, seed=0, times=GameTimes())
        _walk(env, task, steps, seed=0, times=times)
        theirs = _original(library, [task], steps, seed=0)["step"]
        yield times.mean, theirs.mean


def _reset_by_path(options: Options) -> Iterator[Pair]:
    env, _ = _alfworld(options)
    path = env.unwrapped.library[0].gamefile
    yield from in_turns(
        lambda: env.reset(options={"task": path}), lambda: env.reset(options={"task": 0}), calls=(50, 50)
    )


def _vector(options: Options, *, theirs: bool) -> Iterator[Pair]:
    """Measure a step of each of eight environments."""
    from sandboxgym.workers.vector import SnapshotVectorEnv

    make = functools.partial(gym.make, "sandboxgym/ALFWorld-v0", games=options.games, max_episode_steps=1_000_000)
    vec = SnapshotVectorEnv([make] * 8)
    vec.reset(seed=0, options={"task": 0})
    other: Callable[[], Any]
    if theirs:
        sync = gym.vector.SyncVectorEnv([make] * 8)
        sync.reset(seed=0, options={"task": 0})
        other = functools.partial(sync.step, ["look"] * 8)
    else:
        singles = [make() for _ in range(8)]
        for env in singles:
            env.reset(seed=0, options={"task": 0})

        def other() -> None:
            for env in singles:
                env.step("look")

    yield from in_turns(functools.partial(vec.step, ["look"] * 8), other, calls=(50, 50))


def _webshop_steps(options: Options) -> Iterator[Pair]:
    """Random episodes, searches remembered by both, against the original's text environment without Lucene."""
    from sandboxgym.bench import webshop
    from sandboxgym.bench.alfworld import GameTimes

    if options.webshop is None or options.catalogue is None:
        raise RowUnavailable("no checkout of princeton-nlp/WebShop and its products: --webshop DIR --catalogue DIR")
    setting = webshop.Setting(str(options.catalogue), options.nouns, (), options.webshop, seed=0)
    env = webshop._make(setting, compat="upstream")
    shop = env.unwrapped.shop  # type: ignore[attr-defined]
    plays = webshop.random_plays(env, 100, seed=0)
    webshop._forget(shop)
    GameTimes.cpu = True
    with webshop.original(options.webshop, options.catalogue, shop) as reference:
        for each in plays:
            ours, _ = webshop.play([each], lambda goal: env.reset(options={"goal": goal}), env.step)
            theirs, _ = webshop.play([each], lambda goal: reference.reset(session=goal), reference.step)
            yield webshop._all_steps(ours).mean, webshop._all_steps(theirs).mean


def _opened(options: Options) -> Iterator[Pair]:
    """``gym.make`` of the embedded catalogue, its files built, against the import of the package alone."""
    command = interpreter.module_command("sandboxgym.bench.webshop", "--opening")
    bare = [*interpreter.command("import time, sandboxgym; print(time.process_time())")]
    for _ in range(20):
        done = [
            subprocess.run(each, env=interpreter.environment(), capture_output=True, text=True, check=True)
            for each in (command, bare)
        ]
        yield float(done[0].stdout), float(done[1].stdout)


def _goals(options: Options) -> Iterator[Pair]:
    """Goals of a stored catalogue, whose draws of prices and price caps are kept, against the draws made again."""
    from sandboxgym.envs.webshop.catalogues.generated import write_files
    from sandboxgym.envs.webshop.catalogues.memory_mapped import open_store
    from sandboxgym.envs.webshop.catalogues.official_data import find_files
    from sandboxgym.envs.webshop.goals import SyntheticGoals

    with tempfile.TemporaryDirectory(prefix="sandboxgym-bench-") as folder:
        write_files(Path(folder, "data"), 10_000)
        stored = open_store(find_files(Path(folder, "data")), Path(folder))
        bare = copy.copy(stored)
        bare.directory = None  # type: ignore[assignment]
        yield from in_turns(lambda: SyntheticGoals(stored, 0), lambda: SyntheticGoals(bare, 0))


def _searched(options: Options) -> Iterator[Pair]:
    """Instructions searched among generated products with their ranking, against every product scored."""
    from sandboxgym.bench.search import QueryGenerator
    from sandboxgym.envs.webshop.retrieval.analysis import terms
    from sandboxgym.envs.webshop.retrieval.index_build import build

    shop = gym.make("sandboxgym/WebShop-v0").unwrapped.shop  # type: ignore[attr-defined]
    index = build(QueryGenerator(shop.catalogue, seed=0).documents(100_000))
    for number in itertools.count():
        query = terms(shop.goals[number * 7 % len(shop.goals)].instruction)
        pairs = in_turns(functools.partial(index.search, query), functools.partial(index.exhaustive, query))
        yield from itertools.islice(pairs, 2)


# Sandboxes. Their work is done by other processes: wall-clock time.


@contextlib.contextmanager
def _sandbox(**arguments: Any) -> Iterator[Any]:
    from sandboxgym.sandbox.base import SandboxUnavailable
    from sandboxgym.sandbox.sandbox import make_sandbox

    last: Exception | None = None
    for backend in ("overlay",) if arguments else ("overlay", "overlay-rootless"):
        try:
            with make_sandbox(backend, **arguments) as sandbox:
                sandbox.execute("true")
                yield sandbox
                return
        except SandboxUnavailable as error:
            last = error
    raise RowUnavailable(f"no overlay sandboxes: {last}")


def _execute(options: Options) -> Iterator[Pair]:
    with _sandbox() as sandbox, _container(options) as container:
        yield from in_turns(lambda: sandbox.execute("true"), lambda: container.exec_run(["true"]), clock=WALL)


def _shell(options: Options) -> Iterator[Pair]:
    bare = functools.partial(subprocess.run, ["bash", "-c", "true"], check=True)
    with _sandbox() as sandbox:
        yield from in_turns(lambda: sandbox.execute("true"), bare, clock=WALL)


@contextlib.contextmanager
def _container(options: Options) -> Iterator[Any]:
    from sandboxgym.bench.sandbox import _docker, running, why_no_docker

    if reason := why_no_docker(options.image):
        raise RowUnavailable(f"no Docker: {reason} (--image IMAGE)")
    assert options.image is not None
    with running(_docker(), options.image) as container:
        yield container


_FILES = "rm -rf /tmp/d; mkdir -p /tmp/d; for i in {1..300}; do echo $i > /tmp/d/$i; done"


def _files(options: Options) -> Iterator[Pair]:
    """Snapshot and restore after 300 files were written, against a copy of these files there and back."""
    with _sandbox() as sandbox, tempfile.TemporaryDirectory() as folder:
        for number in range(300):
            Path(folder, "d").mkdir(exist_ok=True)
            Path(folder, "d", str(number)).write_text(f"{number}\n")
        sandbox.execute(_FILES)

        def ours() -> None:
            snap = sandbox.snapshot()
            sandbox.restore(snap)
            sandbox.execute("true")
            snap.release()

        def copies() -> None:
            for source, target in (("d", "copy"), ("copy", "back")):
                subprocess.run(["cp", "-a", f"{folder}/{source}", f"{folder}/{target}"], check=True)
            subprocess.run(["rm", "-rf", f"{folder}/copy", f"{folder}/back"], check=True)

        yield from in_turns(ours, copies, clock=WALL)


def _committed(options: Options) -> Iterator[Pair]:
    """Snapshot, restore and a command after files were written, against Docker: commit and a container of the image."""
    from sandboxgym.bench.sandbox import docker

    with _container(options), _sandbox() as sandbox:
        while True:
            sandbox.execute(_FILES)
            began = WALL()
            snap = sandbox.snapshot()
            sandbox.restore(snap)
            sandbox.execute("true")
            ours = WALL() - began
            snap.release()
            assert options.image is not None
            times = docker(options.image, _FILES, 1)
            yield ours, times["commit"].median + times["run"].median


def _full(options: Options, *, work: str) -> Iterator[Pair]:
    """Snapshot with processes until the sandbox answers again, against a fresh sandbox and the command again."""
    from sandboxgym.bench.full import WORKS, do
    from sandboxgym.sandbox.sandbox import make_sandbox

    command = WORKS[work]
    with _full_sandbox() as sandbox:
        do(sandbox, command)

        def ours() -> None:
            snap = sandbox.snapshot(strict=True)
            do(sandbox, "true")
            snap.release()

        def again() -> None:
            with make_sandbox("overlay") as other:
                do(other, command)

        yield from in_turns(ours, again, clock=WALL)


def _full_sandbox() -> contextlib.AbstractContextManager[Any]:
    from sandboxgym.sandbox.overlay.backend import criu_checkpointer

    checkpointer = criu_checkpointer()
    if reason := checkpointer.why_unavailable() or checkpointer.why_not_lazy():
        raise RowUnavailable(f"no full snapshots: {reason}")
    return _sandbox(snapshot="full")


def _twenty(options: Options) -> Iterator[Pair]:
    """Twenty live forks of a sandbox with a process of 64 MiB, against twenty new sandboxes that start it."""
    from sandboxgym.bench.full import _HOLD, do
    from sandboxgym.sandbox.sandbox import make_sandbox

    command = _HOLD.format(size=64)
    threads = os.cpu_count() or 1
    with _full_sandbox() as sandbox, ThreadPoolExecutor(threads) as pool:
        do(sandbox, command)

        def ours() -> None:
            with contextlib.ExitStack() as opened:
                children = [opened.enter_context(child) for child in sandbox.fork(20, strict=True)]
                list(pool.map(do, children, ["true"] * 20))

        def again() -> None:
            with contextlib.ExitStack() as opened:
                others = [opened.enter_context(make_sandbox("overlay")) for _ in range(20)]
                list(pool.map(do, others, [command] * 20))

        yield from in_turns(ours, again, clock=WALL)


def _stored(options: Options) -> Iterator[Pair]:
    """Bytes that a store writes for a sandbox whose file was edited, against the whole snapshot."""
    from sandboxgym.sandbox import backends
    from sandboxgym.sandbox.base import SandboxUnavailable
    from sandboxgym.workers.store import SnapshotStore

    name = "overlay" if os.geteuid() == 0 else "overlay-rootless"
    try:
        backends.check(name)
    except SandboxUnavailable as error:
        raise RowUnavailable(f"no overlay sandboxes: {error}") from None
    env = gym.make("sandboxgym/SWEBench-v0", dataset="mini", backend=name, max_episode_steps=100)
    with contextlib.closing(env), tempfile.TemporaryDirectory(prefix="sandboxgym-bench-") as folder:
        store = SnapshotStore(folder)
        env.reset(options={"task": 0})
        env.step("for i in 1 2 3 4 5; do head -c 1000000 /dev/urandom > $i.bin; done")
        store.put(sandboxgym.snapshot(env))
        for _ in range(5):
            env.step("echo edited >> README.md")
            snap = sandboxgym.snapshot(env)
            yield float(store.put(snap).written), float(len(snap.to_bytes()))


# Many environments.


def _live_paths(options: Options) -> Iterator[Pair]:
    """A step of each live path of a batch of the trainer, 16 tasks with 8 paths, in two worker processes."""
    from sandboxgym.workers.env_host import env_maker
    from sandboxgym.workers.pool import PooledEnvs
    from sandboxgym.wrappers.jobs import EnvJob, execute

    make = env_maker("sandboxgym/ALFWorld-v0", games=options.games, max_episode_steps=100_000)
    with contextlib.closing(PooledEnvs(make, 2)) as source:
        envs = [source.take() for _ in range(128)]
        source.execute_all([EnvJob(env, reset=(0, {"task": 0})) for env in envs])
        jobs = [EnvJob(env, step=("look",)) for env in envs]
        one_by_one = lambda: [execute(job) for job in jobs]  # noqa: E731
        yield from in_turns(lambda: source.execute_all(jobs), one_by_one, clock=WALL, calls=(5, 5))


def _asynchronous(options: Options) -> Iterator[Pair]:
    from sandboxgym.bench.rollouts import measure
    from sandboxgym.tree import Schedule

    while True:
        lockstep, alone = measure(Schedule(8), scale=0.01, tasks=4, max_live=16)[:2]
        yield alone.rollouts, lockstep.rollouts


def _started(options: Options) -> Iterator[Pair]:
    """``sandboxgym list`` from nothing to its answer, against the import of Gymnasium."""
    command = interpreter.module_command("sandboxgym", "list")
    bare = interpreter.command("import gymnasium")

    def run(each: list[str]) -> None:
        subprocess.run(each, env=interpreter.environment(), capture_output=True, check=True)

    yield from in_turns(lambda: run(command), lambda: run(bare), clock=_children)


def _children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


_REPLAY = f"reset and replay of {STEPS} steps"
ROWS = (
    TableRow(
        "alfworld.step",
        "ALFWorld, a step of a game that was played before",
        "TextWorld by itself",
        functools.partial(_alfworld_steps, fresh=False),
    ),
    TableRow(
        "alfworld.fresh",
        "ALFWorld, each of the first twelve steps of a game that this machine knows",
        "TextWorld by itself",
        functools.partial(_alfworld_steps, fresh=True),
    ),
    TableRow("alfworld.reset_by_path", "ALFWorld, reset by a game's path", "reset by its number", _reset_by_path),
    *(
        TableRow(f"alfworld.{way}", f"ALFWorld, {way}", _REPLAY, functools.partial(_alfworld_forked, way=way))
        for way in ("snapshot", "restore", "fork")
    ),
    TableRow(
        "alfworld.durable",
        "ALFWorld, a snapshot on disk",
        f"the record of {STEPS} steps",
        lambda options: _durable(lambda: _alfworld(options)),
        "bytes",
    ),
    TableRow(
        "alfworld.vector",
        "`SnapshotVectorEnv` in one thread, a step of 8 environments",
        "one by one",
        functools.partial(_vector, theirs=False),
    ),
    TableRow(
        "alfworld.vector_gymnasium",
        "`SnapshotVectorEnv` in one thread, a step of 8 environments",
        "Gymnasium's SyncVectorEnv",
        functools.partial(_vector, theirs=True),
    ),
    *(
        TableRow(
            f"webshop.{way}",
            f"WebShop, {way}",
            "reset and replay of 10 steps",
            functools.partial(_webshop_forked, way=way),
        )
        for way in ("snapshot", "restore", "fork")
    ),
    TableRow(
        "webshop.durable",
        "WebShop, a snapshot on disk",
        "the record of 10 steps",
        lambda options: _durable(_webshop),
        "bytes",
    ),
    TableRow(
        "webshop.step",
        "WebShop, a step, searches remembered, its first pages",
        "the original without Lucene",
        _webshop_steps,
    ),
    TableRow("webshop.goals", "WebShop, goals of 10,000 stored products", "prices and price caps drawn again", _goals),
    TableRow("webshop.search", "WebShop, a search among 100,000 products", "every product scored", _searched),
    TableRow("webshop.open", "WebShop, `gym.make` in a new process", "`import sandboxgym` there", _opened),
    TableRow("sandbox.execute", "sandbox, `true` in its shell", "`docker exec`", _execute, clock="wall"),
    TableRow("sandbox.execute_bash", "sandbox, `true` in its shell", "`bash -c true` outside", _shell, clock="wall"),
    TableRow(
        "sandbox.snapshot",
        "sandbox with 300 new files, snapshot, restore and `true`",
        "`cp -a` of them, there and back",
        _files,
        clock="wall",
    ),
    TableRow(
        "sandbox.snapshot_docker",
        "sandbox with 300 new files, snapshot, restore and `true`",
        "`docker commit`, `docker run`, `true`",
        _committed,
        clock="wall",
    ),
    TableRow(
        "full.tree",
        "full snapshot of a tree of 7 processes, live again",
        "a new sandbox, the processes started again",
        functools.partial(_full, work="a tree of 7 processes"),
        clock="wall",
    ),
    TableRow(
        "full.large",
        "full snapshot of a process of 200 MB, live again",
        "a new sandbox, the process started again",
        functools.partial(_full, work="a process of 200 MB"),
        clock="wall",
    ),
    TableRow(
        "full.forks",
        "20 live forks of a sandbox with a process of 64 MiB",
        "20 new sandboxes that start it",
        _twenty,
        clock="wall",
    ),
    TableRow(
        "store.edited",
        "store, snapshot of an edited file after 5 MB of others",
        "the whole snapshot",
        _stored,
        "bytes",
        "wall",
    ),
    TableRow(
        "workers.live_paths",
        "128 live paths in 2 worker processes, a message per worker",
        "a message per environment",
        _live_paths,
        clock="wall",
    ),
    TableRow(
        "rollouts.asynchronous",
        "rollouts with slow answers and uneven steps, asynchronous",
        "in lockstep",
        _asynchronous,
        clock="wall",
    ),
    TableRow("cli.list", "`sandboxgym list`", "`import gymnasium`", _started),
)
"""Every row of this package, in the table's order."""
