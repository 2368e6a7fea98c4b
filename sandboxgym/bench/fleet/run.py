"""Benchmark of a fleet: steps against worker processes and bare Ray, forks, recovery, many environments, other sizes.

sandboxgym bench fleet [--envs 32] [--many 1000] [--repeats 10] [--timeout 1800]

It starts a Ray cluster of this machine's cores, and ends after the timeout at the latest, with one sentence. The last
table is of a simulation whose model is fitted to the measurements before it (`sandboxgym.bench.fleet.model`).
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import sandboxgym
from sandboxgym.bench.fleet.losses import losses
from sandboxgym.bench.fleet.model import Costs, OwnerCosts, fitted, owners_needed, simulate
from sandboxgym.bench.pool import ALFWORLD, Waiting, rates, table
from sandboxgym.system import proc
from sandboxgym.tree import Envs
from sandboxgym.workers.env_host import FleetError, WorkerDied
from sandboxgym.workers.fleet import RayEnvs
from sandboxgym.workers.nodes.cluster import connect
from sandboxgym.workers.pool import PooledEnvs
from sandboxgym.wrappers.jobs import EnvJob, EnvResult, execute


def playing(source: Envs, n: int) -> list[EnvJob]:
    """A step of each of ``n`` environments, in episodes that have begun."""
    envs = [source.take() for _ in range(n)]
    for answer in source.execute_all([EnvJob(env, reset=(0, {"task": 0})) for env in envs]):
        assert isinstance(answer, EnvResult), answer
    return [EnvJob(env, step=("look",)) for env in envs]


def owner_seconds(source: Envs, jobs: Sequence[EnvJob], rounds: int) -> float:
    """Processor seconds of this process in one step of all jobs: the least of rounds."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        source.execute_all(jobs)
        found.append(time.process_time() - began)
    return min(found)


_FEW = 20
"""Environments whose memory is not counted in that of many."""
_STEP = 120.0
"""Seconds that a step may take."""


def started(workers: int) -> RayEnvs:
    """Start ALFWorld in actors, until all run."""
    source = RayEnvs(ALFWORLD, workers, timeout=_STEP)
    while len(source._running()) < workers:
        time.sleep(0.1)
    return source


def compare(cluster: RayEnvs, pooled: PooledEnvs, here: Envs, n: int, repeats: int) -> list[EnvJob]:
    """Steps per second and the owner's processor time in several ways; returns the jobs on the cluster."""
    import ray

    jobs = {source: playing(source, n) for source in (pooled, cluster, here)}

    @ray.remote(num_cpus=0.1)
    class Bare:
        def ready(self) -> None: ...

    bare = [Bare.remote() for _ in range(2)]  # type: ignore[attr-defined]
    ray.get([actor.ready.remote() for actor in bare])

    def calls() -> int:
        ray.get([bare[index % 2].ready.remote() for index in range(n)])
        return n

    def in_turn(source: Envs) -> int:
        return len([execute(job) for job in jobs[source]])

    def together(source: Envs) -> int:
        return len(source.execute_all(jobs[source]))

    ways: list[tuple[str, Callable[[], int]]] = [
        ("2 worker processes, a message per environment", functools.partial(in_turn, pooled)),
        ("2 worker processes, a message per worker", functools.partial(together, pooled)),
        ("2 Ray actors, a message per environment", functools.partial(in_turn, cluster)),
        ("bare Ray, an empty call per environment, all sent at once", calls),
        ("2 Ray actors, a message per worker", functools.partial(together, cluster)),
        ("in this process", functools.partial(together, here)),
    ]
    table(f"{n} live environments of ALFWorld", "steps", rates(ways, repeats))
    print("\nProcessor time of the owner\n\n| way | microseconds per step | x in this process |\n|---|---|---|")
    own = owner_seconds(here, jobs[here], 3 * repeats) / n
    for name, source in (("in this process", here), ("worker processes", pooled), ("Ray actors", cluster)):
        each = owner_seconds(source, jobs[source], 3 * repeats) / n
        print(f"| {name} | {1e6 * each:.1f} | {each / own:.2f} |", flush=True)
    for actor in bare:
        ray.kill(actor)
    return jobs[cluster]


def steps(cluster: RayEnvs, n: int, repeats: int) -> Costs:
    """Steps per second, and processor time of the owner per step; returns the costs that are fitted to the latter."""
    with PooledEnvs(ALFWORLD, 2, timeout=_STEP) as pooled, Envs(ALFWORLD) as here:
        jobs = compare(cluster, pooled, here, n, repeats)
    measured = []
    more = jobs + playing(cluster, 3 * n)
    with started(4) as four:
        for workers, source, them in ((2, cluster, more), (4, four, playing(four, 4 * n))):
            for count in (workers, n, 4 * n):
                measured.append(
                    OwnerCosts(min(workers, count), count, owner_seconds(source, them[:count], 3 * repeats))
                )
    for job in more:
        cluster.give(job.env)
    costs = fitted(measured)
    print("\nFit of an owner's processor time\n\n| messages | steps | measured, us | fitted, us |\n|---|---|---|---|")
    for one in measured:
        fit = costs.per_message * one.messages + costs.per_step * one.steps
        print(f"| {one.messages} | {one.steps} | {1e6 * one.seconds:,.0f} | {1e6 * fit:,.0f} |")
    print(f"\n{1e6 * costs.per_message:.0f} us per message and {1e6 * costs.per_step:.1f} us per step.", flush=True)
    return costs


def forks(nbytes: int) -> None:
    """Bytes through the owner per fork of an environment with a large state."""
    print(f"\nBytes through the owner per fork of a state of {nbytes:,} bytes\n\n| snapshots | bytes |\n|---|---|")
    make = functools.partial(Waiting, 0.0, nbytes)
    with tempfile.TemporaryDirectory(prefix="sandboxgym-bench-") as folder:
        for name, options in (("as bytes", {}), ("kept in their worker", {"store": folder})):
            with RayEnvs(make, 2, **options) as source:  # type: ignore[arg-type]
                env: Any = source.take()
                env.reset(seed=0)
                snap = env.snapshot()
                before = sum(shared.worker.bytes_shipped for shared in source._slots)
                children: list[Any] = [source.take_near(snap) for _ in range(8)]
                for child in children:
                    child.restore(snap)
                moved = sum(shared.worker.bytes_shipped for shared in source._slots) - before
                taken = len(snap.to_bytes()) if not options else 0
                print(f"| {name} | {(moved + taken) / len(children):,.0f} |", flush=True)


def recovery(source: RayEnvs, repeats: int) -> None:
    """Seconds from the death of a worker to the first step after it."""
    found = []
    for _ in range(repeats):
        while len(source._running()) < 2:
            time.sleep(0.1)
        env: Any = source.take()
        env.reset(seed=0, options={"task": 0})
        snap, pid = env.snapshot(), env.worker.pid
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        while True:
            try:
                env.step("look")
            except WorkerDied:
                break
        source.discard(env)
        other: Any = source.take()
        other.restore(snap)
        other.step("look")
        found.append(time.perf_counter() - began)
        source.give(other)
    print(f"\nFrom the death of a worker to a step of its path on another: {1e3 * min(found):.0f} to ", end="")
    print(f"{1e3 * max(found):.0f} ms ({repeats} times)", flush=True)


def many(source: RayEnvs, count: int) -> None:
    """Measure memory and steps of live environments in two actors."""
    while len(source._running()) < 2:
        time.sleep(0.1)
    few = playing(source, _FEW)
    pids = [source._worker(place).pid for place in source._running()]
    before = sum(map(_resident, pids))
    jobs = few + playing(source, count - len(few))
    began = time.perf_counter()
    answers = source.execute_all(jobs)
    seconds = time.perf_counter() - began
    assert all(isinstance(answer, EnvResult) for answer in answers)
    each = (sum(map(_resident, pids)) - before) / (count - len(few))
    print(
        f"\n{len(answers):,} environments of ALFWorld live in 2 actors, {each / 1000:.0f} kB of memory each; "
        f"one step of all took {seconds:.2f} s",
        flush=True,
    )


def _resident(pid: int | None) -> int:
    return proc.nbytes(f"/proc/{pid}/status", "VmRSS")


SIZES = (10, 100, 1000)
"""Numbers of nodes."""
KINDS = (("ALFWorld", 0.00005, 32), ("a shell command", 0.05, 8), ("a test suite", 2.0, 8))
"""Environments: name, seconds of a step, environments per worker."""
PER_NODE = 16
"""Workers per node: one per core."""


def sizes(costs: Costs) -> None:
    """Simulate other numbers of nodes."""
    print(f"\nSimulated: {PER_NODE} workers per node, in lockstep\n")
    print(
        "| environment | nodes | environments | steps per second, one owner | owner busy | owners for half busy |",
        end="",
    )
    print(" steps per second with them, x |\n|---|---|---|---|---|---|---|")
    for name, step, envs in KINDS:
        for nodes in SIZES:
            workers = PER_NODE * nodes
            one = simulate(costs, workers=workers, envs=envs, step=step)
            owners = owners_needed(costs, workers=workers, envs=envs, step=step)
            more = simulate(costs, workers=workers, envs=envs, step=step, owners=owners)
            print(
                f"| {name}, {1000 * step:g} ms | {nodes:,} | {workers * envs:,} | {one.steps_per_second:,.0f} "
                f"| {one.owner:.0%} | {owners:,} | {more.steps_per_second / one.steps_per_second:.1f} |",
                flush=True,
            )


def main() -> None:
    """Run the command line: prints Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=32, help="number of environments stepped together")
    parser.add_argument("--many", type=int, default=1000, help="number of environments that live at once")
    parser.add_argument("--repeats", type=int, default=10, help="number of repetitions, of which the fastest counts")
    parser.add_argument("--state", type=int, default=10_000_000, help="bytes of the state whose forks are measured")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds after which it ends, whatever is missing")
    arguments = parser.parse_args()
    least = {"envs": 2, "many": _FEW + 1, "repeats": 1, "state": 1, "timeout": 1}
    for name, number in least.items():
        if getattr(arguments, name) < number:
            parser.error(f"expected --{name} of at least {number}, found {getattr(arguments, name)}")
    signal.signal(signal.SIGALRM, functools.partial(_late, arguments.timeout))
    signal.alarm(arguments.timeout)
    try:
        measure(arguments)
    except FleetError as error:
        raise SystemExit(f"sandboxgym bench fleet: {error}") from error
    finally:
        signal.alarm(0)


def _late(seconds: int, *_: object) -> None:
    raise SystemExit(f"sandboxgym bench fleet: not complete after {seconds} s: use --timeout, or smaller numbers")


def measure(arguments: argparse.Namespace) -> None:
    """Measure a fleet, and print all tables.

    Raises:
        FleetError: the cluster does not start, or has no room.
    """
    import ray

    connect()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} processors (load {load:.0f}), sandboxgym {sandboxgym.__version__}")
    with started(2) as cluster:
        costs = steps(cluster, arguments.envs, arguments.repeats)
        sizes(costs)
        many(cluster, arguments.many)
        recovery(cluster, 3)
    forks(arguments.state)
    ray.shutdown()  # type: ignore[no-untyped-call]  # the next clusters have nodes that can be lost
    losses(arguments.envs, min(3, arguments.repeats))


if __name__ == "__main__":
    main()
