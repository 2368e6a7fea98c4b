"""Environments on the nodes of a Ray cluster: workers as Ray actors, in any place where worker processes serve.

1. A `RayWorker` is one more kind of `Worker`: `RemoteEnv`, `PooledEnvs` and `rollout` use it as they use a worker
   process, with the same messages. Ray gives nodes, transport and the start of processes; which snapshot is where,
   what is replayed after a loss, and that a tree does not depend on it, is decided here.
2. An actor is never restarted by Ray: a restarted one would answer without its environments. Its loss is `WorkerDied`.
   In a rollout with ``retries`` another worker continues from the path's last snapshot, which its owner holds.
3. For some seconds after a node was lost Ray places new actors on it, where they never run. So whatever was lost goes
   to workers that live, at once, and lost workers are replaced in the background.
4. A node that freezes is noticed by the deadline of a call (``timeout``), not by Ray's health check, which takes up to
   a minute.

An owner and its workers trust each other, as do all programs of a Ray cluster: calls are pickled. Who may submit work
to the cluster is Ray's to check (token authentication).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import DependencyNotInstalled

from sandboxgym.tree import Envs, Failure, Recovery
from sandboxgym.workers.env_host import (
    Call,
    FleetError,
    Host,
    HostCounts,
    MakeEnv,
    Outcome,
    WorkerDied,
    snapshot_key,
)
from sandboxgym.workers.fleet_status import Events, Owner, Usage, draining, reporter_of, reports
from sandboxgym.workers.kept import KeptSnapshot
from sandboxgym.workers.meters import WorkerMeters
from sandboxgym.workers.nodes.cluster import connect
from sandboxgym.workers.nodes.limits import Gate, Limits
from sandboxgym.workers.nodes.placement import best_of, eligible, moves
from sandboxgym.workers.pool import NEAR, PooledEnvs
from sandboxgym.workers.process import GRACE, Answer, answer_of, packed_answers
from sandboxgym.workers.remote import RemoteEnv, WorkerSlots
from sandboxgym.workers.worker import PackedCall, Worker, outcome_of, packed
from sandboxgym.wrappers.jobs import EnvJob, EnvResult

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

logger = logging.getLogger("sandboxgym")

CPUS = 0.1
"""Share of a core that Ray sets aside for a worker by default: environments wait for their policy most of the time."""


MOVES = 4
"""Environments that move to nodes that joined with each message of a rollout, so that no step waits for many."""

_ASK_AGAIN = 60.0
"""Seconds for which a worker is not asked for anew after its node turned out to lack something."""


class _Actor:
    """The process on a node: a `Host`, whose calls are executed one after the other."""

    def __init__(self, keep: int, path: Sequence[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self.host = Host(keep=keep, ships=True)
        self.meters = WorkerMeters()

    def ready(self) -> tuple[str, str, int, str]:
        """Id and address of the node, process id there, version of this package there: the actor runs."""
        from sandboxgym import __version__

        node = str(ray.get_runtime_context().get_node_id())
        return node, str(ray.util.get_node_ip_address()), os.getpid(), __version__  # type: ignore[no-untyped-call]

    def perform(self, calls: Sequence[PackedCall]) -> tuple[bytes, tuple[int, ...]]:
        """Execute calls: their answers, in order and packed, and the counts of the worker after that (`HostCounts`)."""
        began = time.perf_counter()
        answers = [answer_of(self.host, *call) for call in calls]
        counts = self.host.counts()
        self.meters.update(counts, time.perf_counter() - began)
        return packed_answers(answers), tuple(counts)

    def end(self) -> None:
        """Close the environments."""
        self.host.close_all()


class RayWorker(Worker):
    """A worker in a Ray actor.

    Args:
        keep: number of snapshots that it keeps.
        cpus: share of a core that Ray sets aside for it.
        resources: custom resources of Ray that it needs, such as ``{"sandbox": 1}`` of nodes that have them.
        memory: bytes that Ray sets aside for it.
        labels: of the nodes that may hold it, by Ray's label selectors, such as ``{"images": "swebench"}``.
        node: id of a node to be on. Where it is gone or to be avoided, Ray chooses another.
        avoid: gives the ids of nodes that it must not be on, when it is asked for.
    """

    ships = True

    def __init__(
        self,
        *,
        keep: int = 64,
        cpus: float = CPUS,
        resources: Mapping[str, float] | None = None,
        memory: int | None = None,
        labels: Mapping[str, str] | None = None,
        node: str | None = None,
        avoid: Callable[[], Collection[str]] = tuple,
    ) -> None:
        super().__init__(keep=keep)
        connect()
        self._labels, self._avoid, self._wanted = dict(labels or {}), avoid, node
        self._options: dict[str, Any] = {
            "num_cpus": cpus,
            "resources": dict(resources or {}),
            "memory": memory,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "max_task_retries": 0,
            # As in a worker process: many workers share a machine.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}},
        }
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            self._options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        self._actor: Any = None
        self._ready: Any = None
        self._posted: deque[Any] = deque()
        self._answers: deque[Answer] = deque()
        self.node: str | None = None
        """Id of its node, once it runs."""
        self.address = ""
        """Address of its node, once it runs."""
        self.unfit = ""
        """Reason for which the node that it was on last cannot serve; empty where it does."""
        self._again = 0.0
        self._pid: int | None = None
        self._counts = HostCounts()
        self._ended = HostCounts()

    @property
    def counts(self) -> HostCounts:
        """Counts of what it holds, as of its last answer, and of what it and the actors before it did."""
        return self._ended.plus(self._counts)

    @property
    def pid(self) -> int | None:
        """Process id on its node, once it runs."""
        return self._pid

    @property
    def alive(self) -> bool:
        """True if an actor was asked for and not found dead."""
        return self._actor is not None

    @property
    def ready(self) -> bool:
        """True if the actor runs; one that was found dead before it ever ran is not `alive` afterwards."""
        if self._actor is None:
            return False
        if self.node is None and ray.wait([self._ready], timeout=0)[0]:
            with contextlib.suppress(WorkerDied):
                self._settle_on_node()
        return self.node is not None

    def restart(self) -> None:
        """Ask for an actor, if there is none; some time after one whose node could not serve, for it will not soon."""
        if not self.alive and not (self.unfit and time.monotonic() < self._again):
            self.start()

    def refuse(self, reason: str) -> None:
        """End the actor, because its node cannot serve."""
        logger.warning("%s", reason)
        self.kill()
        self.unfit, self._again = reason, time.monotonic() + _ASK_AGAIN

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the actor runs.

        Raises:
            WorkerDied: it never will.
            FleetError: it does not within the timeout: no node has room for it.
        """
        if self.node is None and self._actor is not None:
            if not ray.wait([self._ready], timeout=timeout)[0]:
                asked = {"num_cpus": self._options["num_cpus"], **self._options["resources"]}
                raise FleetError(f"expected a node with room for a worker ({asked}) within {timeout:g} s, found none")
            self._settle_on_node()

    def kill(self) -> None:
        """End the actor at once."""
        actor, self._actor, self._ready, self.node, self._pid = self._actor, None, None, None, None
        self._ended, self._counts = self.counts.ended(), HostCounts()
        self._posted.clear()
        self._answers.clear()
        if actor is not None and ray.is_initialized():
            ray.kill(actor)

    def interrupt(self) -> None:
        """End the actor; the thread waiting for it cleans up."""
        actor = self._actor
        if actor is not None:
            ray.kill(actor)

    def ask_to_close(self) -> None:
        """Ask the actor to close its environments."""
        if self._actor is not None and ray.is_initialized():
            self._posted.append(self._actor.end.remote())

    def close(self) -> None:
        """Wait, for some seconds, until the environments are closed, and end the actor."""
        if self._actor is not None and ray.is_initialized():
            self.ask_to_close()
            ray.wait([self._posted[-1]], timeout=GRACE)
        self.kill()

    def _start(self) -> None:
        self.node = self._pid = None
        path = [os.path.abspath(entry) for entry in sys.path if entry]
        options, labels, avoided = dict(self._options), dict(self._labels), sorted(self._avoid())
        if self._wanted in avoided:
            options["scheduling_strategy"] = "SPREAD"
        if avoided and options["scheduling_strategy"] == "SPREAD":
            labels["ray.io/node-id"] = f"!in({','.join(avoided)})"
        if labels:
            options["label_selector"] = labels
        self._actor = ray.remote(_Actor).options(**options).remote(self._keep, path)
        self._ready = self._actor.ready.remote()

    def _post(self, calls: Sequence[Call]) -> None:
        self._posted.append(self._actor.perform.remote(packed(calls)))

    def _take(self, timeout: float | None) -> Outcome:
        if not self._answers:
            if self._actor is None or not self._posted:
                raise WorkerDied("the worker on the cluster was ended by an earlier call")
            answers, counts = self._got(self._posted.popleft(), timeout)
            self._answers.extend(pickle.loads(answers))
            self._counts = HostCounts(*counts)
        return outcome_of(self._answers.popleft())

    def _settle_on_node(self) -> None:
        from sandboxgym import __version__

        self.node, self.address, self._pid, there = self._got(self._ready, None)
        if there != __version__:
            self.refuse(f"node {self.address} has sandboxgym {there}, expected {__version__} as here")
            raise WorkerDied(self.unfit)
        self.unfit = ""

    def _got(self, reference: Any, timeout: float | None) -> Any:
        try:
            return ray.get(reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError from None
        except ray.exceptions.RayTaskError as error:  # the actor cannot be made: sandboxgym is missing there, say
            self.kill()
            raise WorkerDied(f"a worker on the cluster failed: {_last_line(error)}") from error
        except ray.exceptions.RayError as error:
            # One that is only unreachable may have executed the calls, so it must not execute them again.
            where = f" on node {self.node[:8]}" if self.node else ""
            if "creation task" in str(error):  # it never ran
                place = re.search(r"ip=([^,)]+)", str(error))
                on = f"node {place[1]}" if place else "a node"
                self.refuse(f"{on} cannot run workers: {_last_line(error)} (expected sandboxgym[ray] there, as here)")
                raise WorkerDied(self.unfit) from error
            self.kill()
            raise WorkerDied(f"a worker{where} was lost: {str(error).partition(chr(10))[0]}") from error


class RayEnvs(PooledEnvs):
    """Live environments for `sandboxgym.tree.rollout` in actors on the nodes of a Ray cluster.

    Used like `PooledEnvs`; the trees of a rollout are those of local environments, also with nodes lost on the way
    (``retries``).

    Args:
        env: an id, an ``EnvSpec`` or a function that makes an environment.
        workers: actors, spread over the nodes (default: one per core of the cluster).
        address: of the cluster; see `connect`.
        cpus: of `RayWorker`, as are ``resources``.
        resources: see there.
        memory: see there.
        labels: see there.
        prefer: weights of nodes by their ids, such as the bytes of images that they have (`FleetImages.holders`):
            workers are asked for on those with the largest, in turn, as long as they have room.
        limits: of each node. An environment waits for room up to ``create_timeout``, then `FleetFull` is raised.
        timeout: of `RemoteEnv`; the deadline by which a frozen node counts as lost.
        reset_timeout: see there.
        create_timeout: see there; also the time that a cluster without room is given.
        threads: of `PooledEnvs`, as are ``store``, which all nodes have to reach, ``every_k_steps`` and ``bandwidth``.
        store: see there.
        every_k_steps: see there.
        bandwidth: see there.
        **kwargs: of ``gym.make`` or of the function.

    Raises:
        FleetError: the cluster cannot be reached, or has no room for a worker.
    """

    def __init__(
        self,
        env: str | EnvSpec | MakeEnv,
        workers: int | None = None,
        *,
        address: str | None = None,
        cpus: float = CPUS,
        resources: Mapping[str, float] | None = None,
        memory: int | None = None,
        labels: Mapping[str, str] | None = None,
        prefer: Mapping[str, float] | None = None,
        limits: Limits | None = None,
        timeout: float | None = None,
        reset_timeout: float | None = None,
        create_timeout: float | None = 300.0,
        threads: int | None = None,
        store: str | os.PathLike[str] | None = None,
        every_k_steps: int = 1,
        bandwidth: float | None = None,
        **kwargs: Any,
    ) -> None:
        connect(address)
        self._worker_options: dict[str, Any] = {"cpus": cpus, "resources": resources}
        self._worker_options |= {"memory": memory, "labels": labels}
        self._best = best_of(prefer or {})
        self._preferred = itertools.cycle(self._best)
        self._needs = {"CPU": cpus, **({"memory": memory} if memory else {}), **(resources or {})}
        self._draining = draining()
        self._leaving: dict[int, bool] = {}
        """Workers that environments are moved away from; True where all are at once, because the node is drained."""
        self._left: set[int] = set()
        """Workers that were left and have ended."""
        self._instead: dict[int, int] = {}
        """Workers that were asked for in place of others, by the numbers of those."""
        self._asked: dict[str, float] = {}
        """Times at which nodes that joined were last given workers."""
        self._closing = False
        self.moved = 0
        """Environments that were moved to another node while a path used them."""
        self._moving = threading.RLock()
        self._reported: tuple[float, dict[str, Usage]] = (-1.0, {})
        cores = ray.cluster_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
        count = workers if workers is not None else max(1, int(cores))
        super().__init__(
            env,
            count,
            threads=threads,
            timeout=timeout,
            reset_timeout=reset_timeout,
            create_timeout=create_timeout,
            store=store,
            every_k_steps=every_k_steps,
            bandwidth=bandwidth,
            **kwargs,
        )
        self._patience = create_timeout
        self._gate = Gate(limits, self._usage, deadline=create_timeout) if limits is not None else None
        self._events = Events()
        self._reporter = reporter_of(self, spec_id(env))

    def new_worker(self) -> Worker:
        """Start a worker on the cluster."""
        return self._asked_for(next(self._preferred, None))

    def _asked_for(self, node: str | None) -> RayWorker:
        return RayWorker(**self._worker_options, node=node, avoid=lambda: self._draining)

    def take_near(self, snap: Any) -> gym.Env[Any, Any]:
        """A live environment as `take` gives it, on the worker or at least the node that has a snapshot.

        Unless that has `NEAR` more in use than another.
        """
        places, key = self._places(), snapshot_key(snap)
        kept = snap.kept if isinstance(snap, KeptSnapshot) else None
        holders = [
            place
            for place in places
            if (kept.at(self._worker(place)) if kept is not None else self._worker(place).holds(key))
        ]
        nodes = {self._worker(place).node for place in holders}
        beside = [place for place in places if self._worker(place).node in nodes]
        fewest = min(self._taken[place] for place in places)
        for group in (holders, beside):
            if group:
                place = min(group, key=self._taken.__getitem__)
                if self._taken[place] < fewest + NEAR:
                    with contextlib.suppress(WorkerDied):  # it was lost, and nobody knew
                        return self.take_at(place)
        return self.take()

    def take_at(self, place: int) -> gym.Env[Any, Any]:
        """A live environment on the worker with a number.

        Raises:
            WorkerDied: it was lost; or its node lacks what the environment needs, and is left alone for some time.
        """
        with self._moving:
            if place in self._left:
                raise WorkerDied("the worker was left for another node")
            self._taken[place] += 1  # so that it is not left meanwhile
            if self._free[place]:
                return self._free[place].pop()
        node = self._worker(place).node
        try:
            if self._gate is not None and node is not None:
                self._gate.created(node)
            return super().take_at(place)
        except Exception as error:  # the constructor may raise anything: only what is missing here sends it elsewhere
            worker = self._worker(place)
            if not _is_missing(error) or worker.node is None:
                raise
            reason = f"node {worker.address} cannot make the environment: {error}"
            for other in range(len(self._slots)):
                if self._worker(other).node == worker.node and not self._taken[other] and other != place:
                    self._worker(other).refuse(reason)
            worker.refuse(reason)
            raise WorkerDied(reason) from error
        finally:
            self._taken[place] -= 1

    def _worker(self, place: int) -> RayWorker:
        worker = self._slots[place].worker
        assert isinstance(worker, RayWorker)
        return worker

    def give(self, env: gym.Env[Any, Any]) -> None:
        """Return an environment, for use by the next path; one whose worker was lost is closed."""
        assert isinstance(env, RemoteEnv)
        with self._moving:
            if env.lost or self._at[id(env)] in self._leaving:
                self.discard(env)
            else:
                super().give(env)

    def execute_all(self, jobs: Sequence[EnvJob]) -> list[EnvResult | Exception]:
        """Execute jobs as `PooledEnvs` does, after environments have moved whose worker is being left."""
        if self._leaving:
            self._move(jobs)
        return super().execute_all(jobs)

    def _move(self, jobs: Sequence[EnvJob]) -> None:
        """Move environments of jobs, which are at rest: all of a drained node, some where nodes joined."""
        some, targets = MOVES, self._targets()
        for job in jobs:
            env = job.env
            assert isinstance(env, RemoteEnv)
            place = self._at.get(id(env))
            if not targets or place not in self._leaving or env.lost or not (self._leaving[place] or some):
                continue
            some -= not self._leaving[place]
            target = min(targets, key=self._taken.__getitem__)
            try:
                env.move_to(self._slots[target], blank=job.reset is not None or job.restore is not None)
            except Exception as error:  # of any type: the other node may lack something; it stays where it is
                logger.warning("an environment could not be moved: %s: %s", type(error).__name__, error)
                continue
            with self._moving:
                self._taken[place] -= 1
                self._taken[target] += 1
                self._at[id(env)] = target
            self.moved += 1

    def tend(self) -> None:
        """Look at the nodes: begin to leave those that are drained, use those that joined, end workers that are left.

        Called every two seconds, in a thread of its own, which may take its time.
        """
        with self._moving:
            if self._closing:
                return
            self._draining = draining()
            for place in [place for place in self._leaving if self._may_stay(place)]:
                del self._leaving[place]
                self._left.add(self._instead[place])
                self._worker(self._instead[place]).kill()
            for place in self._present():
                if self._worker(place).node in self._draining and not self._leaving.get(place):
                    known = place in self._leaving
                    self._leaving[place] = True
                    if not known:
                        self._replace(place, None)
            if not self._leaving:
                there: dict[str, list[int]] = {}
                starting = False
                for place in sorted(self._present(), key=self._taken.__getitem__):
                    node = self._worker(place).node
                    starting = starting or node is None
                    there.setdefault(node or "", []).append(place)
                labels = self._worker_options["labels"]
                nodes = eligible(ray.nodes(), self._needs, self._draining, labels)  # type: ignore[no-untyped-call]
                nodes = [node for node in nodes if node in self._best or not self._best]
                now = time.monotonic()
                found = [] if starting else moves(there, nodes)
                # One that has no room for its share, because others use it, is not tried all the time.
                new = {node for _, node in found if now - self._asked.get(node, -_ASK_AGAIN) >= _ASK_AGAIN}
                for place, node in found:
                    if node in new:
                        self._asked[node] = now
                        self._leaving[place] = False
                        self._replace(place, node)
            ended = [place for place in list(self._leaving) if self._is_left(place)]
        for place in ended:
            worker = self._worker(place)
            try:
                if worker.keeping is not None and worker.alive:
                    worker.call(0, "store_all", timeout=self._patience)
            except Exception as error:  # the worker leaves either way
                where = f" on node {worker.node[:8]}" if worker.node else ""
                logger.warning("snapshots kept by a worker%s may have no durable copy: %s", where, error)
            finally:
                worker.close()

    def _may_stay(self, place: int) -> bool:
        """True for a worker of a node that is not drained any more, unless there is another in its place already."""
        node = self._worker(place).node
        there = self._leaving[place] and node is not None and node not in self._draining
        return there and not self._worker(self._instead[place]).ready

    def _targets(self) -> list[int]:
        """Numbers of the workers that run and stay, without waiting for one."""
        return [place for place in self._present() if place not in self._leaving and self._worker(place).ready]

    def _present(self) -> list[int]:
        """Numbers of the workers that were not left for good."""
        return [place for place in range(len(self._slots)) if place not in self._left]

    def _replace(self, place: int, node: str | None) -> None:
        worker = self._asked_for(node)
        worker.keeping = self._slots[place].worker.keeping
        worker.start()
        self._instead[place] = len(self._slots)
        self._taken.append(0)
        self._free.append([])
        self._slots.append(WorkerSlots(worker, keep_on=True))

    def _is_left(self, place: int) -> bool:
        """True, once, if no path uses a worker any more that is being left, and others run."""
        if not self._targets():
            return False
        free, self._free[place] = self._free[place], []
        for env in free:
            del self._at[id(env)]
            Envs.discard(self, env)
        if self._taken[place]:
            return False
        del self._leaving[place]
        self._left.add(place)
        return True

    def _usage(self) -> dict[str, Usage]:
        """Usage of each node by all owners: this one's now, that of others as they reported last."""
        at, others = self._reported
        if time.monotonic() - at > 1.0:
            others = {}
            for key, owner in reports():
                if key != self._reporter.key:
                    for node, there in owner.nodes.items():
                        others[node] = others.get(node, Usage()).plus(there)
            self._reported = time.monotonic(), others
        found = dict(others)
        for place in self._present():
            worker = self._worker(place)
            if worker.node is not None:
                live = sum(at == place for at in list(self._at.values()))
                own = Usage(1, live, self._taken[place], worker.counts.kept, worker.counts.kept_bytes)
                found[worker.node] = found.get(worker.node, Usage()).plus(own)
        return found

    def note(self, event: Failure | Recovery) -> None:
        """Count what a rollout lost and recovered, for the state of the fleet."""
        self._events.note(event)

    def measured(self) -> tuple[Owner, HostCounts]:
        """Report of the present, for the state of the fleet, and the sum of the workers' counts."""
        counts, starting, replaced = HostCounts(), 0, 0
        nodes: dict[str, Usage] = {}
        for place in range(len(self._slots)):
            worker = self._worker(place)
            counts = counts.plus(worker.counts)
            replaced += max(0, worker.generation - 1)
            if place in self._left and not worker.alive:
                continue
            if (node := worker.node) is None:
                starting += 1
                continue
            own = worker.counts
            here = Usage(1, own.environments, self._taken[place], own.kept, own.kept_bytes)
            nodes[node] = nodes.get(node, Usage()).plus(here)
        owner = Owner(
            name="",
            env="",
            at=0.0,
            seconds=0.0,
            starting=starting,
            replaced=replaced,
            nodes=nodes,
            failures=dict(self._events.failures),
            recoveries=dict(self._events.recoveries),
            dropped=self._events.dropped,
        )
        return owner, counts

    def close(self) -> None:
        """Close the environments, end the workers, and withdraw the report of them. Idempotent."""
        self._closing = True
        if self._moving.acquire(timeout=GRACE):  # whoever asks for workers now has done so
            self._moving.release()
        self._reporter.close()
        super().close()

    def _places(self) -> Sequence[int]:
        if self._gate is None:
            return self._running()
        return self._gate.admitted(
            lambda: [(place, self._worker(place).node or "", bool(self._free[place])) for place in self._running()]
        )

    def _running(self) -> list[int]:
        """Numbers of the workers that run; waits until there is one. Lost ones are asked for anew here.

        Raises:
            FleetError: none runs within ``create_timeout``, or none of their nodes can serve.
        """
        deadline = None if self._patience is None else time.monotonic() + self._patience
        while True:
            running, leaving = [], []
            for place in self._present():
                worker = self._worker(place)
                if place in self._leaving:
                    leaving += [place] if worker.ready else []
                    continue
                with worker.lock:
                    if not worker.alive:
                        free, self._free[place] = self._free[place], []
                        for env in free:  # they were lost with it
                            del self._at[id(env)]
                            Envs.discard(self, env)
                        worker.restart()
                    if worker.ready:
                        running.append(place)
            # Until another runs, a worker that is left for a node that joined serves; one of a drained node does not.
            if running or (leaving := [place for place in leaving if not self._leaving.get(place, True)]):
                return running or leaving
            unfit = {worker.unfit for worker in map(self._worker, self._present()) if not worker.alive}
            if "" not in unfit and not any(self._worker(place).alive for place in self._present()):
                raise FleetError("; ".join(sorted(unfit)))
            if deadline is not None and time.monotonic() > deadline:
                raise FleetError(
                    f"expected one of {len(self._slots)} workers to run within {self._patience:g} s, found none: "
                    f"see `ray status` for what the cluster has room for ({self._worker_options})"
                )
            time.sleep(0.05)


def _is_missing(error: Exception) -> bool:
    """True if an error says that a package or a sandbox is missing where the environment was to be made."""
    from sandboxgym.sandbox.base import SandboxUnavailable

    return isinstance(error, (DependencyNotInstalled, ImportError, SandboxUnavailable))


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]


def spec_id(env: str | EnvSpec | MakeEnv) -> str:
    """Id of the environment that is made; empty where a function makes it that does not name one."""
    named = getattr(env, "args", (env,))[:1]  # of `env_maker`, whose first argument it is
    found = named[0] if named else env
    return found.id if isinstance(found, EnvSpec) else found if isinstance(found, str) else ""
