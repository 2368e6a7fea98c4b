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
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import DependencyNotInstalled

from sandboxgym.tree import Envs, Failure, Recovery
from sandboxgym.workers.env_host import (
    FleetError,
    HostCounts,
    MakeEnv,
    WorkerDied,
    snapshot_key,
)
from sandboxgym.workers.fleet_status import Events, Owner, Usage, draining, reporter_of, reports
from sandboxgym.workers.kept import KeptSnapshot
from sandboxgym.workers.nodes.cluster import connect
from sandboxgym.workers.nodes.limits import Gate, Limits
from sandboxgym.workers.nodes.placement import best_of, eligible, moves
from sandboxgym.workers.nodes.worker import ASK_AGAIN, CPUS, RayWorker
from sandboxgym.workers.pool import NEAR, PooledEnvs
from sandboxgym.workers.process import GRACE
from sandboxgym.workers.remote import RemoteEnv, WorkerSlots
from sandboxgym.workers.worker import Worker
from sandboxgym.wrappers.jobs import EnvJob, EnvResult

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

logger = logging.getLogger("sandboxgym")

MOVES = 4
"""Environments that move to nodes that joined with each message of a rollout, so that no step waits for many."""

_ANSWER = 10.0
"""Seconds in which an idle worker answers that can be reached."""


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
        self._suspects: set[str] = set()
        """Nodes on which a call took too long."""
        self._lacking: dict[str, float] = {}
        """Nodes that lacked what an environment needs to begin, with the times until which others are preferred."""
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
        # Of any kind: what it has no room for now may be free soon, and what no node has may join.
        if not eligible(ray.nodes(), self._needs, self._draining, labels):  # type: ignore[no-untyped-call]
            logger.warning("no node of the cluster has what a worker needs yet: %s", self._wanted())
        self._gate = Gate(limits, self._usage, deadline=create_timeout) if limits is not None else None
        self._events = Events()
        self._reporter = reporter_of(self, spec_id(env))

    def new_worker(self) -> Worker:
        """Start a worker on the cluster."""
        return self._asked_for(next(self._preferred, None), spill=True)

    def _asked_for(self, node: str | None, *, spill: bool = False) -> RayWorker:
        options: dict[str, Any] = {**self._worker_options, "node": node, "spill": spill}
        worker = RayWorker(**options, avoid=lambda: self._draining, suspect=self._suspects.add)
        worker.told = lambda error: self._pass_over(worker, error)
        return worker

    def _pass_over(self, worker: RayWorker, error: BaseException) -> None:
        """Prefer other nodes for some time, if an error says that a worker's lacks what an environment needs."""
        node, now = worker.node, time.monotonic()
        if node is not None and _is_missing(error):
            if self._lacking.get(node, now) <= now:
                logger.warning("node %s is passed over for %g s: %s", worker.address, ASK_AGAIN, error)
            self._lacking[node] = now + ASK_AGAIN

    def take_near(self, snap: Any) -> gym.Env[Any, Any]:
        """A live environment as `take` gives it, on the worker or at least the node that has a snapshot.

        A worker that has at least `NEAR` more environments in use than the least used one is passed over.
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
        try:
            return self._fitting_at(place)
        except BaseException:
            with self._moving:
                self._taken[place] -= 1
            raise

    def _fitting_at(self, place: int) -> RemoteEnv:
        worker = self._worker(place)
        try:
            if self._gate is not None and worker.node is not None:
                self._gate.created(worker.node)
            return self._new_at(place)
        except Exception as error:  # the constructor may raise anything: only what is missing here sends it elsewhere
            if not _is_missing(error) or worker.node is None:
                raise
            reason = f"node {worker.address} cannot make the environment: {error}"
            for other in range(len(self._slots)):
                if self._worker(other).node == worker.node and not self._taken[other] and other != place:
                    self._worker(other).refuse(reason)
            worker.refuse(reason)
            raise WorkerDied(reason) from error

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
                new = {node for _, node in found if now - self._asked.get(node, -ASK_AGAIN) >= ASK_AGAIN}
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
        self._discard_free(place)
        if self._taken[place]:
            return False
        del self._leaving[place]
        self._left.add(place)
        return True

    def _discard_free(self, place: int) -> None:
        """Close the idle environments of a worker."""
        with self._moving:  # before the lock of a worker, as everywhere
            free, self._free[place] = self._free[place], []
            for env in free:
                del self._at[id(env)]
                Envs.discard(self, env)

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
            return self._fit()
        return self._gate.admitted(
            lambda: [(place, self._worker(place).node or "", bool(self._free[place])) for place in self._fit()]
        )

    def _fit(self) -> list[int]:
        """Numbers of the workers that run; those of nodes that are passed over only if there are no others."""
        running, now = self._running(), time.monotonic()
        return [p for p in running if self._lacking.get(self._worker(p).node or "", now) <= now] or running

    def _running(self) -> list[int]:
        """Numbers of the workers that run; waits until there is one. Lost ones are asked for anew here.

        Raises:
            FleetError: none runs within ``create_timeout``, or none of their nodes can serve.
        """
        deadline = None if self._patience is None else time.monotonic() + self._patience
        while True:
            if self._suspects:
                self._end_silent()
            running, leaving = [], []
            for place in self._present():
                worker = self._worker(place)
                if place in self._leaving:
                    leaving += [place] if worker.ready else []
                    continue
                if not worker.alive:
                    self._discard_free(place)  # they were lost with it
                with worker.lock:
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
                    f"see `ray status` for what the cluster has room for (a worker needs {self._wanted()})"
                )
            time.sleep(0.05)

    def _wanted(self) -> str:
        """Needs of a worker, for messages."""
        labels = self._worker_options["labels"] or {}
        return ", ".join(f"{name}={value}" for name, value in {**self._needs, **labels}.items())

    def _end_silent(self) -> None:
        """End the idle workers of suspect nodes that do not answer: Ray notices a node that was cut off much later."""
        suspects = set(self._suspects)
        self._suspects -= suspects
        asked: dict[Any, RayWorker] = {}
        for worker in map(self._worker, self._present()):
            if worker.node in suspects and worker.lock.acquire(blocking=False):  # else it is in use, and will be found
                try:
                    if (answer := worker.asked_whether_it_answers()) is not None:
                        asked[answer] = worker
                finally:
                    worker.lock.release()
        if not asked:
            return
        _, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER)
        for worker in map(asked.__getitem__, silent):
            with worker.lock:
                logger.warning("a worker on node %s did not answer within %g s", (worker.node or "")[:8], _ANSWER)
                worker.kill()


def _is_missing(error: BaseException) -> bool:
    """True if an error says that a package or a sandbox is missing where the environment is."""
    from sandboxgym.sandbox.base import SandboxUnavailable

    return isinstance(error, (DependencyNotInstalled, ImportError, SandboxUnavailable))


def spec_id(env: str | EnvSpec | MakeEnv) -> str:
    """Id of the environment that is made; empty where a function makes it that does not name one."""
    named = getattr(env, "args", (env,))[:1]  # of `env_maker`, whose first argument it is
    found = named[0] if named else env
    return found.id if isinstance(found, EnvSpec) else found if isinstance(found, str) else ""
