"""Workers in Ray actors, on the nodes of a cluster."""

from __future__ import annotations

import contextlib
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

from sandboxgym.workers.env_host import Call, CallOutcome, FleetError, Host, HostCounts, WorkerDied
from sandboxgym.workers.meters import WorkerMeters
from sandboxgym.workers.nodes.cluster import connect
from sandboxgym.workers.process import GRACE, Answer, answer_of, packed_answers
from sandboxgym.workers.worker import PackedCall, Worker, outcome_of, packed

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

logger = logging.getLogger("sandboxgym")

CPUS = 0.1
"""Share of a core that Ray sets aside for a worker by default: environments wait for their policy most of the time."""

ASK_AGAIN = 60.0
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
        """Close the environments, and end this process in order: a sandbox leaves folders and groups to its exit."""
        self.host.close_all()
        late = threading.Timer(GRACE, os._exit, (1,))
        late.daemon = True
        late.start()
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class RayWorker(Worker):
    """A worker in a Ray actor.

    Args:
        keep: number of snapshots that it keeps.
        cpus: cores that Ray sets aside for it. Its ``OMP_NUM_THREADS`` is that number, rounded down and at least 1,
            unless its node sets another.
        resources: custom resources of Ray that it needs, such as ``{"sandbox": 1}`` of nodes that have them.
        memory: bytes that Ray sets aside for it.
        labels: of the nodes that may hold it, by Ray's label selectors, such as ``{"images": "swebench"}``.
        node: id of a node to be on. Where it is gone or to be avoided, Ray chooses another.
        spill: Ray does so, too, where the node has no room now.
        avoid: gives the ids of nodes that it must not be on, when it is asked for.
        suspect: is given the id of its node where a call took too long: the node may be frozen or cut off.
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
        spill: bool = False,
        avoid: Callable[[], Collection[str]] = tuple,
        suspect: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(keep=keep)
        connect()
        self._labels, self._avoid, self._wanted, self._suspect = dict(labels or {}), avoid, node, suspect
        self._options: dict[str, Any] = {
            "num_cpus": cpus,
            "resources": dict(resources or {}),
            "memory": memory,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            there = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=spill)
            self._options["scheduling_strategy"] = there
        self._actor: Any = None
        self._ready: Any = None
        self._ending: Any = None
        """Reference to the end of the actor, once it was asked for."""
        self._end_by = 0.0
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

    def asked_whether_it_answers(self) -> Any:
        """Reference to an answer that comes at once if the actor can be reached; None if there is no idle one."""
        return None if self._pending or not self.ready else self._actor.ready.remote()

    def restart(self) -> None:
        """Ask for an actor, if there is none; some time after one whose node could not serve, for it will not soon."""
        if not self.alive and not (self.unfit and time.monotonic() < self._again):
            self.start()

    def refuse(self, reason: str) -> None:
        """End the actor, because its node cannot serve."""
        logger.warning("%s", reason)
        self.kill()
        self.unfit, self._again = reason, time.monotonic() + ASK_AGAIN

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
        if (actor := self._let_go()) is not None and ray.is_initialized():
            ray.kill(actor)

    def _let_go(self) -> Any:
        """Have no actor any more; the one that there was."""
        actor, self._actor, self._ready, self._ending, self.node, self._pid = self._actor, None, None, None, None, None
        self._ended, self._counts = self.counts.ended(), HostCounts()
        self._posted.clear()
        self._answers.clear()
        return actor

    def interrupt(self) -> None:
        """End the actor; the thread waiting for it cleans up."""
        actor = self._actor
        if actor is not None:
            ray.kill(actor)

    def ask_to_close(self) -> None:
        """Ask the actor to close its environments, and to end; one that does not run has none."""
        if self._ending is None and ray.is_initialized() and self.ready:
            self._ending, self._end_by = self._actor.end.remote(), time.monotonic() + GRACE

    def close(self) -> None:
        """End the actor, some seconds after it was asked to close its environments at the latest."""
        self.ask_to_close()
        if self._ending is not None and ray.is_initialized():
            try:
                ray.get(self._ending, timeout=max(0.0, self._end_by - time.monotonic()))
            except ray.exceptions.ActorDiedError:  # or it is about to, which must not be cut short
                self._let_go()
            except ray.exceptions.GetTimeoutError:
                logger.warning("a worker%s is killed: it did not end within %g s", self._where(), GRACE)
            except ray.exceptions.RayError as error:
                logger.warning("a worker%s is killed: it could not end: %s", self._where(), _last_line(error))
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

    def _take(self, timeout: float | None) -> CallOutcome:
        if not self._answers:
            if self._actor is None or not self._posted:
                raise WorkerDied("the worker on the cluster was ended by an earlier call")
            try:
                answers, counts = self._got(self._posted.popleft(), timeout)
            except TimeoutError:
                if self._suspect is not None and self.node is not None:
                    self._suspect(self.node)
                raise
            self._answers.extend(pickle.loads(answers))
            self._counts = HostCounts(*counts)
        return outcome_of(self._answers.popleft())

    def _where(self) -> str:
        return f" on node {self.node[:8]}" if self.node else ""

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
            where = self._where()
            if "creation task" in str(error):  # it never ran
                place = re.search(r"ip=([^,)]+)", str(error))
                on = f"node {place[1]}" if place else "a node"
                self.refuse(f"{on} cannot run workers: {_last_line(error)} (expected sandboxgym[ray] there, as here)")
                raise WorkerDied(self.unfit) from error
            self.kill()
            raise WorkerDied(f"a worker{where} was lost: {str(error).partition(chr(10))[0]}") from error


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]
