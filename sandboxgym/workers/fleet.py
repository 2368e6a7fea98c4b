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
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import DependencyNotInstalled

from sandboxgym.tree import Envs
from sandboxgym.workers.env_host import Call, FleetError, Host, MakeEnv, Outcome, WorkerDied
from sandboxgym.workers.pool import PooledEnvs
from sandboxgym.workers.process import GRACE, answer_of
from sandboxgym.workers.remote import RemoteEnv
from sandboxgym.workers.worker import Worker, outcome_of, packed

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

logger = logging.getLogger("sandboxgym")

CPUS = 0.1
"""Share of a core that Ray sets aside for a worker by default: environments wait for their policy most of the time."""


_PATIENCE = 10.0
"""Seconds that the head of a cluster has to accept a connection."""


class _Actor:
    """The process on a node: a `Host`, whose calls are executed one after the other."""

    def __init__(self, keep: int, path: Sequence[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self.host = Host(keep=keep, ships=True)

    def ready(self) -> tuple[str, int]:
        """Id of the node, and process id there: the actor runs."""
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def perform(self, calls: Sequence[tuple[int, str, bytes]]) -> list[bytes]:
        """Execute calls: their answers, in order."""
        return [answer_of(self.host, *call) for call in calls]

    def end(self) -> None:
        """Close the environments."""
        self.host.close_all()


def connect(address: str | None = None) -> None:
    """Connect this process to a Ray cluster, unless it is connected.

    Args:
        address: of the cluster: ``host:port``, ``ray://host:port``, ``"auto"`` for one that runs on this machine, or
            ``"local"`` for one of this machine's cores, which ends with this process. Default: ``$RAY_ADDRESS``, else
            as ``"local"``.

    Raises:
        DependencyNotInstalled: Ray is not installed.
        FleetError: the cluster cannot be reached, or runs another version of Ray or Python.
    """
    if ray is None:
        raise DependencyNotInstalled("environments on a Ray cluster need Ray: pip install 'sandboxgym[ray]'")
    if ray.is_initialized():
        return
    # Without an address Ray would join any cluster that was started on this machine, whoever's it is.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        _look_for(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FleetError(
            f"expected a Ray cluster at {address} (ray start --head, or ray://HOST:10001): {reason}"
        ) from error


def _look_for(address: str) -> None:
    """Raise OSError where nothing listens at ``host:port`` or ``ray://host:port``: Ray itself tries for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()


class RayWorker(Worker):
    """A worker in a Ray actor.

    Args:
        keep: number of snapshots that it keeps.
        cpus: share of a core that Ray sets aside for it.
        resources: custom resources of Ray that it needs, such as ``{"sandbox": 1}`` of nodes that have them.
        node: id of a node to be on. Where it is gone, Ray chooses another.
    """

    ships = True

    def __init__(
        self,
        *,
        keep: int = 64,
        cpus: float = CPUS,
        resources: Mapping[str, float] | None = None,
        node: str | None = None,
    ) -> None:
        super().__init__(keep=keep)
        connect()
        self._options: dict[str, Any] = {
            "num_cpus": cpus,
            "resources": dict(resources or {}),
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
        self._answers: deque[bytes] = deque()
        self.node: str | None = None
        """Id of its node, once it runs."""
        self._pid: int | None = None

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
        self._actor = ray.remote(_Actor).options(**self._options).remote(self._keep, path)
        self._ready = self._actor.ready.remote()

    def _post(self, calls: Sequence[Call]) -> None:
        self._posted.append(self._actor.perform.remote(packed(calls)))

    def _take(self, timeout: float | None) -> Outcome:
        if not self._answers:
            if self._actor is None or not self._posted:
                raise WorkerDied("the worker on the cluster was ended by an earlier call")
            self._answers.extend(self._got(self._posted.popleft(), timeout))
        return outcome_of(self._answers.popleft())

    def _settle_on_node(self) -> None:
        self.node, self._pid = self._got(self._ready, None)

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

    def new_worker(self) -> Worker:
        """A worker on the cluster."""
        return RayWorker(**self._worker_options)

    def take(self) -> gym.Env[Any, Any]:
        """A live environment in any state, on the running worker with the fewest in use, to be reset or restored.

        Lost workers are asked for anew here, and serve once they run.

        Raises:
            FleetError: no worker runs within ``create_timeout``.
            WorkerDied: every worker in turn died while it made the environment.
        """
        for tries_left in reversed(range(len(self._slots) + 1)):
            try:
                return self.take_at(min(self._running(), key=self._taken.__getitem__))
            except WorkerDied as error:  # its node was lost a moment ago, say
                if not tries_left:
                    raise
                logger.warning("an environment is made on another worker: %s", error)
        raise AssertionError

    def give(self, env: gym.Env[Any, Any]) -> None:
        """Return an environment, for use by the next path; one whose worker was lost is closed."""
        assert isinstance(env, RemoteEnv)
        if env.lost:
            self.discard(env)
        else:
            super().give(env)

    def _running(self) -> list[int]:
        """Places of the workers that run; waits until there is one."""
        deadline = None if self._patience is None else time.monotonic() + self._patience
        while True:
            running = []
            for place, shared in enumerate(self._slots):
                worker = shared.worker
                assert isinstance(worker, RayWorker)
                with worker.lock:
                    if not worker.alive:
                        free, self._free[place] = self._free[place], []
                        for env in free:  # they were lost with it
                            del self._at[id(env)]
                            Envs.discard(self, env)
                        worker.start()
                    if worker.ready:
                        running.append(place)
            if running:
                return running
            if deadline is not None and time.monotonic() > deadline:
                raise FleetError(
                    f"expected one of {len(self._slots)} workers to run within {self._patience:g} s, found none: "
                    f"see `ray status` for what the cluster has room for ({self._worker_options})"
                )
            time.sleep(0.05)


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]
