"""Send signals to workers, nodes and owners of a fleet at random points, and compare the trees with local ones.

    python tests/bpo_ref/kills_on_ray.py --out ray.jsonl --seconds 200 --seed 1
    python tests/bpo_ref/kills.py --out ray.jsonl --table

One Ray cluster of a head and three simulated nodes serves all trials that begin within these seconds. A killed *node*
is its raylet and all below it, as when a machine loses its power; a stopped one is frozen during the trial, and goes on
after it. A *drained* node is left, and one that *joins* is used, while paths are under way. A killed *owner* is the
process of a rollout, which another continues from its journal. Nothing may be left of a trial on any node.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("support", "tree", "bpo_ref")]

import gymnasium as gym  # noqa: E402
import ray  # noqa: E402
from kills import MARK, Chooser, append, leftovers, strike  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.experimental import internal_kv  # noqa: E402
from test_tree import sampled  # noqa: E402

from sandboxgym.bench.fleet.losses import HEAD  # noqa: E402
from sandboxgym.bench.tools.traces import Folder  # noqa: E402
from sandboxgym.sandbox import process_table  # noqa: E402
from sandboxgym.tree import Action, Context, Envs, Failure, TopEntropy, rollout  # noqa: E402
from sandboxgym.tree.journal import Journal  # noqa: E402
from sandboxgym.workers.fleet import RayEnvs  # noqa: E402
from sandboxgym.workers.fleet_status import drain, reports  # noqa: E402
from sandboxgym.workers.nodes.worker import RayWorker  # noqa: E402
from sandboxgym.workers.store import SnapshotStore  # noqa: E402

SCHEDULE = TopEntropy(points=2, width=3)
NODES, WORKERS = 3, 3
FOLDERS = ("leases", "names", "snapshots", "blobs", "incoming")
SHELL = ("ls", "echo one >> notes; wc -l notes", "head -c 300000 /dev/zero > big; ls -l big | wc -c", "cat notes; pwd")


@dataclass(frozen=True)
class Kind:
    """Environments, and how their snapshots travel."""

    name: str
    env: str
    arguments: dict[str, Any]
    store: str = ""
    """A directory ("store") or the objects of the cluster ("objects") as a store; empty: snapshots come as bytes."""
    choices: Sequence[Any] = ()
    timeout: float = 2.0


ALFWORLD: tuple[str, dict[str, Any]] = ("sandboxgym/ALFWorld-v0", {"max_episode_steps": 12})
WEBSHOP: tuple[str, dict[str, Any]] = ("sandboxgym/WebShop-v0", {"max_episode_steps": 8})
MINI: tuple[str, dict[str, Any]] = ("sandboxgym/SWEBench-v0", {"dataset": "mini", "max_episode_steps": 6})
KINDS = [
    Kind("ALFWorld", *ALFWORLD),
    Kind("ALFWorld, store", *ALFWORLD, store="store"),
    Kind("ALFWorld, Ray's objects", *ALFWORLD, store="objects"),
    Kind("WebShop", *WEBSHOP),
    Kind("SWE-bench mini, store", *MINI, store="store", choices=SHELL, timeout=10.0),
]
SIGNALS = {"worker killed": 20, "worker stopped": 3, "node stopped": 1, "node drained": 1, "node killed": 1,
           "node joins": 1, "owner killed": 3}  # fmt: skip
"""Signals of one round of trials, by what is sent; a node that was killed is followed by one that joins."""


class Machines:
    """The cluster: a head, which has no room for workers, and nodes that come and go."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args=HEAD)
        self.nodes: list[Any] = []
        self.frozen: list[int] = []
        self.drained: list[str] = []
        self.mend()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error", configure_logging=False)

    def processes(self, node: Any) -> set[int]:
        """Numbers of the processes of a node."""
        root = node.all_processes["raylet"][0].process.pid
        return process_table.descendants(process_table.table(), {root}) | {root}

    def mend(self) -> bool:
        """Wake what is frozen, take drained nodes back, and have as many nodes as there were; True."""
        for pid in self.frozen:
            strike(pid, signal.SIGCONT)
        for node in self.drained:
            drain(node, undo=True)
        self.frozen, self.drained = [], []
        for node in list(self.nodes):
            if node.all_processes["raylet"][0].process.poll() is not None:
                self.nodes.remove(node)
                self.cluster.remove_node(node, allow_graceful=False)
        while len(self.nodes) < NODES:
            self.nodes.append(self.cluster.add_node(num_cpus=1, resources={"env": 4}, object_store_memory=80_000_000))
        return True

    def actors(self) -> list[str]:
        """Processes of actors on all nodes: what they are, and their states."""
        roots = [node.all_processes["raylet"][0].process.pid for node in (self.cluster.head_node, *self.nodes)]
        rows = process_table.table()
        below = process_table.descendants(rows, set(roots))
        there = [row for row in rows if row.pid in below and row.runs and row.command.startswith("ray::_")]
        return [f"{row.command} {row.state}" for row in there]

    def left(self, seconds: float = 60.0) -> int:
        """Actors that do not end by themselves, and rows that owners left in the table of the head."""
        deadline = time.monotonic() + seconds
        while True:
            reports()  # deletes those of owners that were killed
            found = self.actors() + internal_kv._internal_kv_list("", namespace="sandboxgym")
            if not found or time.monotonic() > deadline:
                if found:
                    print("left:", found, flush=True)
                return len(found)
            time.sleep(0.2)

    def end(self) -> None:
        self.mend()
        ray.shutdown()
        self.cluster.shutdown()


class Struck(Chooser):
    """Calls a function at random times, while steps are under way or between them."""

    def __init__(
        self, choices: Sequence[Any], once: Callable[[], bool], rng: random.Random, most: int, *, here: bool = False
    ) -> None:
        self.choices = choices or self.choices
        self.once, self.rng, self.most, self.here = once, rng, most, here
        self.timers: list[threading.Timer] = []
        self.struck = 0

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        if len(self.timers) < self.most and self.rng.random() < 0.4:
            self.timers.append(threading.Timer(self.rng.uniform(0, 0.03), self._strike))
            self.timers[-1].run() if self.here else self.timers[-1].start()
        return super().__call__(contexts)

    def _strike(self) -> None:
        self.struck += self.once()


def chooser(kind: Kind) -> Chooser:
    """The undisturbed player."""
    found = Chooser()
    found.choices = kind.choices or found.choices
    return found


def made(kind: Kind, folder: Path, workers: int = WORKERS, address: str | None = None) -> RayEnvs:
    """The fleet of a kind."""
    store = {"store": {"store": os.fspath(folder / "store"), "objects": "ray-objects://kills"}[kind.store],
             "every_k_steps": 2} if kind.store else {}  # fmt: skip
    limits = {"timeout": kind.timeout, "reset_timeout": 4 * kind.timeout, "create_timeout": 120.0}
    return RayEnvs(kind.env, workers, address=address, resources={"env": 0.01}, **limits, **store, **kind.arguments)  # type: ignore[arg-type]


def grown(kind: Kind, envs: Any, policy: Chooser, **options: Any) -> Any:
    """Events on every path of the trees."""
    tasks = [0, 1] if "SWE" in kind.env else [0, 1, 0, 1]
    return sampled(rollout(envs, policy, SCHEDULE, tasks=tasks, seed=(7,), **options))


def undisturbed(kind: Kind) -> Any:
    """Events on every path with environments of this process."""
    with Envs(lambda: gym.make(kind.env, **kind.arguments)) as envs:
        return grown(kind, envs, chooser(kind))


def strikes(machines: Machines, envs: RayEnvs, rng: random.Random) -> dict[str, Callable[[], bool]]:
    """Strikes by name: functions that return True if they struck."""

    def workers() -> list[RayWorker]:
        return [envs._worker(place) for place in envs._present() if envs._worker(place).pid]

    def send(number: int) -> bool:
        if pids := [pid for worker in workers() if (pid := worker.pid)]:
            strike(rng.choice(pids), number)
        return bool(pids)

    def node() -> Any:
        """One of the nodes with workers, unless it is the only one."""
        there = {worker.node for worker in workers()}
        found = [node for node in machines.nodes if node.node_id in there]
        return rng.choice(found) if len(found) > 1 else None

    def send_to_node(number: int) -> bool:
        if (found := node()) is None:
            return False
        pids = machines.processes(found)
        if number == signal.SIGSTOP:
            machines.frozen += pids
        for pid in pids:
            strike(pid, number)
        return True

    def leave() -> bool:
        if (found := node()) is None:
            return False
        machines.drained.append(found.node_id)
        drain(found.node_id)
        envs.tend()
        return True

    def join() -> bool:
        machines.mend()
        envs.tend()
        return True

    return {
        "worker killed": lambda: send(signal.SIGKILL),
        "worker stopped": lambda: send(signal.SIGSTOP),
        "node stopped": lambda: send_to_node(signal.SIGSTOP),
        "node drained": leave,
        "node killed": lambda: send_to_node(signal.SIGKILL),
        "node joins": join,
    }


def trials(machines: Machines, kind: Kind, whole: Any, rng: random.Random, late: Callable[[], bool]) -> Iterator[Any]:
    """One round of trials with a fleet that stays, and what is left of it in the end."""
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        with made(kind, Path(folder)) as envs:
            can = strikes(machines, envs, rng)
            for what, wanted in SIGNALS.items():
                for _ in range(5 if what in can else 0):  # one that found nothing to strike is tried again
                    if late():
                        break
                    if "node" in what:
                        await_true(lambda: len({envs._worker(place).node for place in envs._running()}) > 1)
                    policy = Struck(kind.choices, can[what], rng, wanted, here=what == "node joins")
                    lost: list[Failure] = []
                    differing = 0
                    while True:
                        differing += grown(kind, envs, policy, retries=500, failures=lost) != whole
                        if not any(timer.is_alive() for timer in policy.timers):
                            break
                    for timer in policy.timers:
                        if timer.ident:  # it was started
                            timer.join()
                    dropped = sum(failure.dropped for failure in lost)
                    yield {"kind": f"Ray: {what}: {kind.name}", "kills": policy.struck, "in_update": len(lost),
                           "differing": differing + dropped, "leftovers": 0}  # fmt: skip
                    wanted -= policy.struck
                    if what != "node killed":
                        machines.mend()
                    if wanted <= 0:
                        break
        yield {"kind": f"Ray: fleet closed: {kind.name}", "kills": 0, "in_update": 0, "differing": 0,
               "leftovers": machines.left() + kept_files(Path(folder))}  # fmt: skip


def await_true(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition; what does not become true in time is left to the trial."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def kept_files(folder: Path) -> int:
    """Files of a store that owners left, the leases of killed ones ended and collected."""
    if not (folder / "store").exists():
        return 0
    store = SnapshotStore(folder / "store")
    for lease in (folder / "store" / "leases").glob("*"):
        store.lease(lease.name, seconds=-1.0)
    store.collect(grace=-1.0)
    return sum(path.is_file() for name in FOLDERS for path in (folder / "store" / name).rglob("*"))


# Owners.


def own(kind: Kind, folder: Path, address: str) -> None:
    """Roll out in this process, with a journal."""
    journal = Journal(folder / "journal", head={"env": kind.env})
    with made(kind, folder, 2, address) as envs:
        paths = grown(kind, envs, chooser(kind), journal=journal, retries=3)
    (folder / "new").write_bytes(pickle.dumps(paths))
    (folder / "new").rename(folder / "result")


def kill_owner(machines: Machines, kind: Kind, whole: Any, rng: random.Random, most: int) -> dict[str, Any]:
    """A rollout whose process is killed at random points, and continued by another one."""
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder, kills = Path(name), 0
        journal = folder / "journal"
        start = multiprocessing.get_context("forkserver").Process
        while True:
            process = start(target=own, args=(kind, folder, machines.cluster.address))
            process.start()
            until = (journal.stat().st_size if journal.exists() else 0) + rng.expovariate(1 / 3000)
            while kills < most and process.is_alive() and (not journal.exists() or journal.stat().st_size < until):
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.01))
            if kills >= most or not process.is_alive():
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"an owner ended with {process.exitcode}")
                break
            process.kill()
            process.join()
            kills += 1
        differing = pickle.loads((folder / "result").read_bytes()) != whole
        left = machines.left() + kept_files(folder)
    return {"kind": f"Ray: owner killed: {kind.name}", "kills": kills, "in_update": kills,
            "differing": int(differing), "leftovers": left}  # fmt: skip


def main() -> None:
    """Run trials for some time, and one last look at what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--only", default="", help="part of the names of the kinds of environments")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    # Owners are copies of a process that begins before what is looked for in the end.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path[:3], os.environ.get("PYTHONPATH", "")]))
    multiprocessing.set_forkserver_preload(["kills", "sandboxgym.workers.fleet"])
    multiprocessing.forkserver.ensure_running()
    kinds = [kind for kind in KINDS if args.only in kind.name]
    whole = {kind.name: undisturbed(kind) for kind in kinds}
    mark = os.environ[MARK] = os.urandom(8).hex()
    with tempfile.TemporaryDirectory(prefix="kills-runtime-") as runtime:
        os.environ["SANDBOXGYM_RUNTIME"] = runtime  # of sandboxes, on all nodes
        machines = Machines()
        began = time.monotonic()
        late = lambda: time.monotonic() - began > args.seconds  # noqa: E731
        try:
            while not late():
                for kind in rng.sample(kinds, len(kinds)):
                    if late():
                        break
                    for entry in trials(machines, kind, whole[kind.name], rng, late):
                        append(args.out, entry)
                    machines.mend()
                    if (
                        kind.store != "objects" and not late()
                    ):  # there a killed owner's lease keeps processes for an hour
                        append(args.out, kill_owner(machines, kind, whole[kind.name], rng, SIGNALS["owner killed"]))
        finally:
            machines.end()
        processes = leftovers(mark)
        folder = Folder(Path(runtime), docker=False)
        folder.reap().wait(60)
        traces = folder.count()
    append(args.out, {"kind": "Ray: clusters ended", "kills": 0, "in_update": 0, "differing": 0,
                      "leftovers": processes + sum(astuple(traces))})  # fmt: skip


if __name__ == "__main__":
    main()
