"""Benchmark of throughput: environments one by one, in threads and in processes, as ratios within one run.

sandboxgym bench pool [--envs 8] [--repeats 15] [--ray]

Every number is the fastest of repeats that take turns with those of the other variants: other work of the machine can
only slow them down.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from sandboxgym.bench.snapshots import play
from sandboxgym.core import Snapshot, SnapshotEnv
from sandboxgym.randomness import sibling_seed
from sandboxgym.spaces import Unicode
from sandboxgym.tree import Envs
from sandboxgym.workers.env_host import Call, env_maker
from sandboxgym.workers.pool import EnvPool, PooledEnvs
from sandboxgym.workers.vector import SnapshotVectorEnv
from sandboxgym.workers.worker import ProcessWorker, close_workers
from sandboxgym.wrappers import restore, snapshot
from sandboxgym.wrappers.jobs import EnvJob, execute

ALFWORLD = env_maker("sandboxgym/ALFWorld-v0", max_episode_steps=100_000)
Way = tuple[str, Callable[[], int]]
"""A variant: its name, and a function that works through a batch and returns its number of units (steps, episodes)."""


class Waiting(SnapshotEnv[str, str]):
    """Stand-in for a sandbox: a step waits, as for a container's answer; the state has a given size.

    Args:
        pause: seconds a step takes.
        nbytes: size of the state.
    """

    def __init__(self, pause: float, nbytes: int = 0) -> None:
        self.observation_space = Unicode()
        self.action_space = Unicode()
        self._pause, self._nbytes = pause, nbytes

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return at once."""
        super().reset(seed=seed)
        self._state = os.urandom(self._nbytes)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Wait; the episode never ends."""
        time.sleep(self._pause)
        return action, 0.0, False, False, {}

    def _capture(self) -> bytes:
        return self._state

    def _apply(self, state: bytes) -> None:
        self._state = state


def rates(ways: Sequence[Way], repeats: int) -> list[tuple[str, float]]:
    """List (name, units per second): the fastest of repeats in turn, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name, _ in ways}
    for repeat in range(repeats + 1):
        for name, work in ways:
            began = time.perf_counter()
            units = work()
            if repeat:
                found[name].append(units / (time.perf_counter() - began))
    return [(name, max(values)) for name, values in found.items()]


def table(title: str, unit: str, rows: Sequence[tuple[str, float]]) -> None:
    """Format as Markdown, with ratios to the first row."""
    print(f"\n{title}\n\n| way | {unit} a second | x {rows[0][0]} |\n|---|---|---|")
    for name, value in rows:
        print(f"| {name} | {value:,.{0 if value >= 100 else 1}f} | {value / rows[0][1]:.2f} |", flush=True)


def start_up(count: int) -> float:
    """Seconds from nothing until ``count`` worker processes, started in parallel, have made an ALFWorld each."""
    workers = [ProcessWorker() for _ in range(count)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
        worker.post([Call(0, "make", (ALFWORLD,))])
    for worker in workers:
        worker.take().get()
    seconds = time.perf_counter() - began
    close_workers(workers)
    return seconds


def stepping(make: Callable[[], gym.Env[Any, Any]], commands: Sequence[str], n: int, repeats: int) -> None:
    """Play the commands in every environment."""
    singles = [make() for _ in range(n)]
    options = {"task": 0}

    def one_by_one() -> int:
        for env in singles:
            env.reset(seed=0, options=options)
        for command in commands:
            for env in singles:
                env.step(command)
        return n * len(commands)

    def together(vec: gym.vector.VectorEnv[Any, Any, Any]) -> int:
        vec.reset(seed=0, options=dict(options))
        for command in commands:
            vec.step([command] * n)
        return n * len(commands)

    few = min(2, n)
    vecs = {
        "vector, sync": SnapshotVectorEnv([make] * n),
        f"vector, {n} threads": SnapshotVectorEnv([make] * n, "thread"),
        f"vector, {few} processes": SnapshotVectorEnv([make] * n, "process", workers=few),
        f"vector, {n} processes": SnapshotVectorEnv([make] * n, "process"),
    }
    theirs = {
        "Gymnasium's SyncVectorEnv": gym.vector.SyncVectorEnv([make] * n),
        "Gymnasium's AsyncVectorEnv": gym.vector.AsyncVectorEnv([make] * n, shared_memory=False, context="spawn"),
    }
    ways: list[Way] = [("one by one", one_by_one)]
    ways += [(name, functools.partial(together, vec)) for name, vec in {**vecs, **theirs}.items()]
    rows = rates(ways, repeats)
    for env in singles:
        env.close()
    for vec in (*vecs.values(), *theirs.values()):
        vec.close()
    table(f"{n} environments, {len(commands)} steps each", "steps", rows)


def episodes(
    make: Callable[[], gym.Env[Any, Any]], commands: Sequence[str], pools: dict[str, EnvPool], k: int, repeats: int
) -> None:
    """Play the commands from ``k`` siblings of one snapshot, one episode per job."""

    def run(env: gym.Env[Any, Any], observation: Any, info: Any) -> int:
        for command in commands:
            env.step(command)
        return len(commands)

    env = make()
    env.reset(seed=0, options={"task": 0})
    snap = snapshot(env)

    def one_by_one() -> int:
        for index in range(k):
            run(env, *restore(env, snap, seed=sibling_seed(0, index)))
        return k

    def pooled(pool: EnvPool) -> int:
        for future in pool.fork(snap, k, run, seed=0):
            future.result()
        return k

    ways: list[Way] = [("one by one", one_by_one)]
    rows = rates([*ways, *((name, functools.partial(pooled, pool)) for name, pool in pools.items())], repeats)
    for pool in pools.values():
        pool.close()
    env.close()
    table(f"{k} siblings of {len(commands)} steps, an episode a job", "episodes", rows)


def locality(nbytes: int, repeats: int, *, snapshots: int = 16, k: int = 8, workers: int = 2) -> None:
    """Play siblings of many snapshots, submitted in turn, with and without regard to a snapshot's location."""
    make = functools.partial(Waiting, 0.0, nbytes)
    env = make()
    rows, shipped = [], {}

    def taken() -> list[Snapshot]:
        snaps = []
        for _ in range(snapshots):
            env.reset()
            snaps.append(env.snapshot())
            snaps[-1].to_bytes()  # encoded once, outside of what is measured
        return snaps

    def siblings(pool: EnvPool, snaps: list[Snapshot]) -> int:
        futures = [pool.submit(_step, snap=snap) for _ in range(k) for snap in snaps]
        for future in futures:
            future.result()
        return len(futures)

    pools = {
        "any worker, every job ships": EnvPool(make, workers, locality=False, keep=1),
        "any worker, kept snapshots": EnvPool(make, workers, locality=False),
        "by locality": EnvPool(make, workers),
    }
    found: dict[str, list[float]] = {name: [] for name in pools}
    for repeat in range(repeats + 1):
        for name, pool in pools.items():
            snaps = taken()
            before = pool.stats.snapshots_shipped
            began = time.perf_counter()
            units = siblings(pool, snaps)
            if repeat:
                found[name].append(units / (time.perf_counter() - began))
            shipped[name] = pool.stats.snapshots_shipped - before
    for name, pool in pools.items():
        pool.close()
        rows.append((f"{name} ({shipped[name]} shipped)", max(found[name])))
    table(f"{snapshots} snapshots of {nbytes:,} bytes, {k} siblings each, {workers} processes", "siblings", rows)


def live_paths(n: int, workers: int, repeats: int, *, cluster: bool) -> None:
    """Step the environments of a rollout's live paths: a message per environment, or one per worker."""
    sources: dict[str, Envs] = {"process": PooledEnvs(ALFWORLD, workers)}
    if cluster:
        from sandboxgym.workers.fleet import RayEnvs

        sources["Ray actor"] = RayEnvs(ALFWORLD, workers)
    here = Envs(ALFWORLD)

    def playing(source: Envs) -> list[EnvJob]:
        envs = [source.take() for _ in range(n)]
        source.execute_all([EnvJob(env, reset=(0, {"task": 0})) for env in envs])
        return [EnvJob(env, step=("look",)) for env in envs]

    def in_turn(jobs: list[EnvJob]) -> int:
        return len([execute(job) for job in jobs])

    def in_threads(source: Envs, jobs: list[EnvJob]) -> int:
        return len(Envs.execute_all(source, jobs))

    def together(source: Envs, jobs: list[EnvJob]) -> int:
        return len(source.execute_all(jobs))

    ways: list[Way] = []
    for name, source in sources.items():
        jobs = playing(source)
        ways += [
            (f"{workers} x {name}, a message per environment, in turn", functools.partial(in_turn, jobs)),
            (f"{workers} x {name}, a message per environment, in threads", functools.partial(in_threads, source, jobs)),
            (f"{workers} x {name}, a message per worker", functools.partial(together, source, jobs)),
        ]
    ways.append(("in this process", functools.partial(together, here, playing(here))))
    rows = rates(ways, repeats)
    for source in (*sources.values(), here):
        source.close()
    table(f"{n} live paths of a rollout", "steps", rows)


def _step(env: gym.Env[Any, Any], observation: Any, info: Any) -> None:
    env.step("")


def main() -> None:
    """Run the command line: prints Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=8, help="number of environments stepped together")
    parser.add_argument("--repeats", type=int, default=15, help="number of repetitions, of which the fastest counts")
    parser.add_argument(
        "--pause", type=float, default=0.05, help="seconds that a step of the waiting environment takes"
    )
    parser.add_argument("--live-paths", type=int, default=32, help="number of live paths of a rollout")
    parser.add_argument("--ray", action="store_true", help="also step them on a Ray cluster, which is started here")
    arguments = parser.parse_args()
    n, repeats = arguments.envs, arguments.repeats
    print(
        f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}, fastest of {repeats}"
    )

    seconds = {count: min(start_up(count) for _ in range(3)) for count in (1, 4)}
    print("\nStart of worker processes, until each has made its environment: ", end="")
    print(", ".join(f"{count} in {value:.2f} s" for count, value in seconds.items()))

    env = ALFWORLD()
    commands = play(env, 0, 25)
    print("\n## ALFWorld")
    stepping(ALFWORLD, commands, n, repeats)
    pools = {
        "pool, 2 threads": EnvPool(ALFWORLD, 2, mode="thread"),
        "pool, 2 processes": EnvPool(ALFWORLD, 2),
        "pool, 2 processes, batch=8": EnvPool(ALFWORLD, 2, batch=8),
    }
    episodes(ALFWORLD, commands, pools, 16, 2 * repeats)
    pools = {"pool, 2 processes": EnvPool(ALFWORLD, 2), "pool, 2 processes, batch=2": EnvPool(ALFWORLD, 2, batch=2)}
    episodes(ALFWORLD, commands * 8, pools, 4, 2 * repeats)

    live_paths(arguments.live_paths, 2, 2 * repeats, cluster=arguments.ray)

    waiting = functools.partial(Waiting, arguments.pause)
    print(f"\n## An environment whose steps wait for {1000 * arguments.pause:g} ms")
    stepping(waiting, ["wait"] * 5, n, max(2, repeats // 5))
    pools = {f"pool, {n} threads": EnvPool(waiting, n, mode="thread"), f"pool, {n} processes": EnvPool(waiting, n)}
    episodes(waiting, ["wait"] * 3, pools, 2 * n, max(2, repeats // 5))

    print("\n## Locality")
    for nbytes in (1_000, 1_000_000):
        locality(nbytes, repeats)


if __name__ == "__main__":
    main()
