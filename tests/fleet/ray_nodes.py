"""A Ray cluster of simulated nodes for tests, and rollouts on it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sandboxgym.bench.fleet.losses import HEAD
from sandboxgym.bench.tools.traces import Folder
from sandboxgym.sandbox import process_table
from sandboxgym.tree import Action, Context, Failure, ForkAt, RolloutTree, rollout
from sandboxgym.tree.journal import Journal
from sandboxgym.workers.fleet import RayEnvs
from sandboxgym.workers.fleet_status import fleet_status
from sandboxgym.workers.nodes.worker import RayWorker
from sandboxgym.workers.store import SnapshotStore

try:
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address
    from ray.cluster_utils import Cluster
    from ray.experimental import internal_kv
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

TASKS, STEPS = list(range(4)), 12
WHERE = {"resources": {"env": 0.01}, "create_timeout": 120.0}
"""Arguments of workers that are placed on the nodes of environments, which may die, not on the head."""


class Nodes:
    """A cluster of a head, which has no room for workers, and nodes that come and go."""

    def __init__(self) -> None:
        self.sandboxes = Folder(Path(tempfile.mkdtemp(prefix="sandboxgym-nodes-")), docker=False)
        """Traces of the sandboxes on all nodes."""
        with self._elsewhere():
            self.cluster = self._begun() or self._begun() or self._begun(final=True)
        ray.init(address=self.address, log_to_driver=False, logging_level="error", configure_logging=False)
        self.nodes = [self.joined(), self.joined()]

    def _begun(self, *, final: bool = False) -> Any:
        """A cluster with its head; None if that took longer than the 30 s which Ray gives it on any machine."""
        try:
            return Cluster(initialize_head=True, head_node_args=HEAD)
        except Exception as error:  # of no narrower type
            if final or "timed out during startup" not in str(error):
                raise
            return None

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def joined(self, labels: dict[str, str] | None = None, **resources: float) -> Any:
        """A node that joins, once Ray places work on it: on a busy machine its scheduler knows it seconds later."""
        with self._elsewhere():
            resources |= {"env": 4}
            node = self.cluster.add_node(
                num_cpus=4, resources=resources, labels=labels or {}, object_store_memory=80_000_000
            )
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        ask = ray.remote(num_cpus=0, scheduling_strategy=there)(lambda: True)  # in no module that the node has to find

        def serves() -> bool:
            with contextlib.suppress(ray.exceptions.TaskUnschedulableError):
                return bool(ray.get(ask.remote()))
            return False

        until(serves)
        return node

    @contextlib.contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Context in which nodes are started, whose sandboxes are in a folder of their own."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SANDBOXGYM_RUNTIME", str(self.sandboxes.path))
            yield

    def with_two(self) -> list[Any]:
        """The nodes of environments, two of them."""
        while len(self.nodes) < 2:
            self.nodes.append(self.joined())
        return self.nodes

    def kill(self, node: Any, workers: Sequence[RayWorker]) -> None:
        """End a node and its workers at once, as a machine does that loses its power."""
        there = [worker.pid for worker in workers if worker.node == node.node_id and worker.pid]
        assert there
        for pid in there:
            with contextlib.suppress(ProcessLookupError):  # one that was left and has just ended
                os.kill(pid, signal.SIGKILL)  # else they serve on for a moment without their node
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def processes(self, node: Any) -> set[int]:
        """Process ids of a node and of all that runs on it."""
        root = node.all_processes["raylet"][0].process.pid
        return process_table.descendants(process_table.table(), {root}) | {root}

    @contextlib.contextmanager
    def freezing(self, node: Any) -> Iterator[Callable[[], None]]:
        """Context with a function that stops a node and all that runs on it, which is gone afterwards."""
        stopped: set[int] = set()

        def freeze() -> None:
            stopped.update(self.processes(node))
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)

        try:
            yield freeze
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):  # what the fleet ended
                    os.kill(pid, signal.SIGKILL)
            if stopped:
                self.nodes.remove(node)
                self.cluster.remove_node(node, allow_graceful=False)

    def actors(self) -> list[str]:
        """Actors of this package that run on any node."""
        below = set().union(*map(self.processes, (self.cluster.head_node, *self.nodes)))
        rows = process_table.table(only=below.__contains__)
        return [row.command for row in rows if row.runs and row.command.startswith("ray::_")]

    def settled_traces(self) -> dict[str, Any]:
        """Traces, once what was there before has come to rest: Ray forgets actors and objects some time later."""
        deadline, found = time.monotonic() + 300, self.traces()
        while True:
            time.sleep(1.0)
            if (now := self.traces()) == found:
                return now
            assert time.monotonic() < deadline
            found = now

    def traces(self) -> dict[str, Any]:
        """Traces of owners on the nodes, and what this process holds of them."""
        gc.collect()  # an exception keeps what its frames have, and is often part of a cycle
        alive = [row for row in ray._private.state.actors().values() if row["State"] != "DEAD"]
        groups = [row for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
        stores = get_memory_info_reply(get_state_from_address(self.address)).store_stats
        return {
            "actors": len(alive),
            "placement groups": len(groups),
            "left": self.left(),
            "references": len(ray._private.worker.global_worker.core_worker.get_all_reference_counts()),
            "objects": (stores.num_local_objects, stores.object_store_bytes_used),
            "sandboxes": self.sandboxes.count(),
        }

    def left(self) -> list[str]:
        """Actors, and rows in the table of the head, that no owner ended; those of killed ones go after a while."""
        fleet_status()  # deletes the reports of owners that were killed
        tables = ("sandboxgym", "sandboxgym-images")
        rows = [str(key) for table in tables for key in internal_kv._internal_kv_list("", namespace=table)]
        return self.actors() + rows

    def end(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()
        self.sandboxes.reap().wait(300)  # of what was killed
        shutil.rmtree(self.sandboxes.path, ignore_errors=True)


def policy(contexts: Sequence[Context]) -> list[Action]:
    return [Action(str(context.rng.choice(context.info["admissible_commands"]))) for context in contexts]


def plain(trees: Sequence[RolloutTree]) -> Any:
    return [
        [(path.key, [(e.action.text, e.reward, e.child.observation) for e in path.edges]) for path in tree.paths]
        for tree in trees
    ]


def grown(envs: Any, decide: Any = policy, failures: list[Failure] | None = None, **options: Any) -> Any:
    options = {"tasks": TASKS, "seed": (3,), "retries": 3, "failures": failures} | options
    return plain(rollout(envs, decide, ForkAt([2, 5], width=3), **options))


def fleet_of(workers: int, **options: Any) -> RayEnvs:
    return RayEnvs("sandboxgym/ALFWorld-v0", workers, max_episode_steps=STEPS, **{**WHERE, **options})


def workers_of(envs: RayEnvs) -> list[RayWorker]:
    found = [shared.worker for shared in envs._slots]
    assert all(isinstance(worker, RayWorker) for worker in found)
    return found  # type: ignore[return-value]


def staying(envs: RayEnvs) -> list[RayWorker]:
    """Workers that run and are not about to leave for another node."""
    return [envs._worker(place) for place in envs._targets()]


def used_node(nodes: Nodes, envs: RayEnvs) -> Any:
    """A node that holds environments which are in use."""
    used = {envs._worker(place).node for place in envs._present() if envs._taken[place]}
    return next(node for node in nodes.nodes if node.node_id in used)


def await_all(envs: RayEnvs) -> None:
    """Wait until every worker runs and no unused one is about to leave for another node.

    Those that were placed on a node that is gone are asked for anew. On a busy machine a node may be seen so late that
    all workers begin on another one: then some are moved, and one that is being left is not replaced if it dies.
    """
    deadline = time.monotonic() + 300
    while True:
        if len(envs._running()) >= len(set(envs._present()) - set(envs._leaving)):
            envs.tend()
            staying = set(envs._present()) - set(envs._leaving)
            if len(envs._running()) >= len(staying) and all(envs._taken[place] for place in list(envs._leaving)):
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


class At:
    """A policy that calls a function once, before a decision with a number."""

    def __init__(self, number: int, function: Any, decide: Any = policy) -> None:
        self.number, self.function, self.decide, self.calls = number, function, decide, 0

    def __call__(self, contexts: Sequence[Context]) -> list[Action]:
        self.calls += 1
        if self.calls == self.number:
            self.function()
        return self.decide(contexts)  # type: ignore[no-any-return]


def until(condition: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def stored_files(place: Path) -> list[Path]:
    """Files that owners left in a store, once the leases of those that were killed have ended."""
    store = SnapshotStore(place)
    for lease in (place / "leases").iterdir():
        store.lease(lease.name, seconds=-1.0)
    store.collect(grace=-1.0)
    return [path for path in place.glob("*/**/*") if path.is_file()]


def owner(address: str, folder: str) -> None:
    """Roll out with a journal, in a process that kills itself in the middle of it."""
    with fleet_of(2, address=address, store=f"{folder}/store") as envs:
        await_all(envs)
        journal = Journal(f"{folder}/journal", head=None)
        grown(envs, At(9, lambda: os.kill(os.getpid(), signal.SIGKILL)), journal=journal)


def client(address: str, path: str) -> None:
    """Roll out as a client of a cluster, and write what happened on every path to a file."""
    with fleet_of(2, address=address) as envs:
        await_all(envs)
        Path(path).write_bytes(pickle.dumps(grown(envs)))
        assert envs._reporter.report()
        assert [owner.steps > 0 for owner in fleet_status().owners] == [True]


WORDS = str(Path(__file__).parents[1] / "bpo_ref")
"""Folder of the module `wordgame`, of which workers learn from the path of their owner."""
TINY = {
    "env_id": "wordgame:toys/WordGame-v0", "eval_kwargs": (), "max_turns": 6, "context": 160, "max_new_tokens": 4,
    "sft_steps": 1, "sft_episodes": 6, "sft_batch": 4, "updates": 2, "prompts": 4, "width": 2, "lr": 1e-2,
    "eval_episodes": 4, "eval_every": 100, "eval_untrained": False, "save_every": 1, "env_retries": 3,
    "env_capture_every": 2, "trackers": (),
}  # fmt: skip
"""Settings of a run that takes seconds, in which half of the episodes are won, and no answer is without effect."""


def trainer(settings: str, decisions: str) -> None:
    """Train, in a process that kills itself after so many decisions of its second update."""
    sys.path.insert(0, WORDS)
    from bpo_ref.args import Args
    from bpo_ref.sampling.policy import ChatPolicy
    from bpo_ref.train import Trainer

    training = Trainer(Args(**TINY | json.loads(settings)))
    act, calls = ChatPolicy.__call__, 0

    def decide(policy: ChatPolicy, contexts: Sequence[Context]) -> Any:
        nonlocal calls
        calls += training.session.stage == "rl" and training.session.step == 1
        if calls > int(decisions):
            os.kill(os.getpid(), signal.SIGKILL)
        return act(policy, contexts)

    ChatPolicy.__call__ = decide  # type: ignore[method-assign]
    training.run()


def elsewhere(function: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that executes a function of `ray_nodes`."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ray_nodes; getattr(ray_nodes, sys.argv[2])(*sys.argv[3:])"
    )
    command = [sys.executable, "-c", code, os.path.dirname(__file__), function, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)
