"""State of a fleet: its nodes, and what the owners of environments report of themselves.

1. Each `RayEnvs` writes a row of about a kilobyte into the key-value table of the cluster's head every two seconds.
   There is no process for it, and nothing to lose with a node. (Ray calls the table internal; Ray Serve and others
   keep theirs there since Ray 1.)
2. A row is deleted with its source of environments. One that has not been renewed is of an owner that was killed: it
   is not shown, and whoever reads or reports next deletes it. Clocks of machines differ, so what looks old is waited
   for: an owner that lives reports.
3. Reporting costs an owner no call to a worker: workers send their counts with their answers. No failure of it reaches
   a rollout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from sandboxgym.tree import Failure, Recovery
from sandboxgym.workers.failures import HostCounts
from sandboxgym.workers.meters import OwnerMeters

try:
    import ray
    from ray.experimental import internal_kv
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

logger = logging.getLogger("sandboxgym")

PERIOD = 2.0
"""Seconds between the reports of an owner."""
STALE = 20.0
"""Seconds after which an owner that does not report counts as gone."""
WINDOW = 10.0
"""Seconds over which the rate of steps is measured."""
_NAMESPACE = "sandboxgym"
_PREFIX = "fleet/"
_DRAINS = "drain/"
_HEAD = "node:__internal_head__"


@dataclass(frozen=True, slots=True)
class Usage:
    """Share of one node that an owner, or several, have in use."""

    workers: int = 0
    environments: int = 0
    in_use: int = 0
    """Environments that paths are using."""
    snapshots: int = 0
    """Snapshots that its workers keep there."""
    snapshot_bytes: int = 0
    """Bytes of their durable forms, of those that have been encoded."""

    def plus(self, other: Usage) -> Usage:
        """The sum of two."""
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Owner:
    """A source of environments in a process somewhere, as it reports itself."""

    name: str
    """Host and process id."""
    env: str
    """Id of its environments; empty where a function makes them."""
    at: float
    """Time of the report, in seconds since 1970."""
    seconds: float
    """Age of the source."""
    starting: int = 0
    """Workers that were asked for and do not run yet."""
    replaced: int = 0
    """Workers that were lost, and asked for anew."""
    nodes: dict[str, Usage] = field(default_factory=dict)
    """Share of each node, by the node's id."""
    created: int = 0
    """Environments made so far."""
    steps: int = 0
    steps_per_second: float = 0.0
    """Mean of the last seconds."""
    store_bytes: int = 0
    """Bytes that its workers wrote to the store of snapshots."""
    failures: dict[str, int] = field(default_factory=dict)
    """Environments lost in rollouts, by exception."""
    recoveries: dict[str, int] = field(default_factory=dict)
    """Paths continued with another environment, by where the replay began; see `sandboxgym.tree.Recovery`."""
    dropped: int = 0
    """Paths for which that was in vain."""

    def to_json(self) -> bytes:
        """The report as it is stored."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, row: bytes) -> Owner:
        """Read a report; fields that this version does not know are left out."""
        values = json.loads(row)
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        usage = Usage.__dataclass_fields__
        known["nodes"] = {
            node: Usage(**{name: value for name, value in there.items() if name in usage})
            for node, there in known.get("nodes", {}).items()
        }
        return cls(**known)


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node of the cluster, with what all owners have there."""

    id: str
    address: str
    head: bool
    alive: bool
    cores: float
    memory: int
    """Bytes that Ray gives to workers there."""
    resources: dict[str, float]
    """Custom resources."""
    usage: Usage
    draining: bool = False
    """True if it gets no new work and owners leave it."""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The nodes of a cluster and the owners that use them."""

    nodes: list[FleetNode]
    owners: list[Owner]

    @property
    def usage(self) -> Usage:
        """The sum over the nodes that live."""
        total = Usage()
        for node in self.nodes:
            total = total.plus(node.usage)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def fleet_status() -> FleetStatus:
    """State of the cluster that this process is connected to.

    Reports of owners that are gone are deleted.
    """
    owners = sorted((owner for _, owner in reports()), key=lambda owner: owner.name)
    nodes, leaving = [], draining()
    for found in ray.nodes():  # type: ignore[no-untyped-call]
        resources, alive = found["Resources"], bool(found["Alive"])
        usage = Usage()
        for owner in owners if alive else ():
            usage = usage.plus(owner.nodes.get(found["NodeID"], Usage()))
        own = {
            name: number
            for name, number in resources.items()
            if ":" not in name and name not in ("CPU", "GPU", "memory", "object_store_memory")
        }
        nodes.append(
            FleetNode(
                id=found["NodeID"],
                address=found["NodeManagerAddress"],
                head=_HEAD in resources,
                alive=alive,
                cores=resources.get("CPU", 0.0),
                memory=int(resources.get("memory", 0)),
                resources=own,
                usage=usage,
                draining=alive and found["NodeID"] in leaving,
            )
        )
    nodes.sort(key=lambda node: (not node.alive, not node.head, node.address, node.id))
    return FleetStatus(nodes, owners)


def drain(node: str, *, undo: bool = False) -> None:
    """Mark a node, by its id: it gets no new work, and every owner moves what it has there to other nodes."""
    if undo:
        internal_kv._internal_kv_del(f"{_DRAINS}{node}", namespace=_NAMESPACE)
    else:
        internal_kv._internal_kv_put(f"{_DRAINS}{node}", b"1", namespace=_NAMESPACE)


def draining() -> set[str]:
    """Ids of the nodes that are being drained, by `drain` or by Ray itself, which learns of preemptions.

    Marks of nodes that are gone are deleted.
    """
    keys = internal_kv._internal_kv_list(_DRAINS, namespace=_NAMESPACE)
    found = {key.decode().removeprefix(_DRAINS) for key in keys}
    if found:
        gone = found - {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        for node in gone:
            drain(node, undo=True)
        found -= gone
    with contextlib.suppress(Exception):  # a client of ray:// has no access to it
        found |= set(ray._private.state.state.get_draining_nodes())
    return found


def reports() -> list[tuple[str, Owner]]:
    """Reports of owners that live, each with the key of its row; the rows of others are deleted.

    One that looks old, and that this process has not seen change, is looked at again after two periods.
    """
    found = _rows()
    if wait := max((_patience(*row) for row in found.values()), default=0.0):
        time.sleep(wait)
        found = _rows()
    live = []
    for key, (owner, seen) in found.items():
        if _looks_old(owner) and time.monotonic() - seen.since >= (STALE if seen.moved else 2 * PERIOD):
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
        else:
            live.append((key, owner))
    return live


class _Sight(NamedTuple):
    """A report as this process saw it."""

    at: float
    """Time that it bears."""
    since: float
    """Time when it was first seen, by this process's own clock."""
    moved: bool
    """True if an earlier one of its owner was seen, which therefore lived then."""


_seen: dict[str, _Sight] = {}
"""Reports that were seen last, by their keys."""


def _rows() -> dict[str, tuple[Owner, _Sight]]:
    """All reports that can be read, by their keys, as this process sees them."""
    global _seen
    found = {}
    for row_key in internal_kv._internal_kv_list(_PREFIX, namespace=_NAMESPACE):
        row, key = internal_kv._internal_kv_get(row_key, namespace=_NAMESPACE), row_key.decode()
        if row is None:  # it was closed a moment ago
            continue
        try:
            owner = Owner.from_json(row)
        except (ValueError, TypeError, AttributeError):  # of another version, say: it must not end a rollout here
            continue
        seen = _seen.get(key)
        if seen is None or seen.at != owner.at:
            seen = _Sight(owner.at, time.monotonic(), moved=seen is not None)
        found[key] = owner, seen
    _seen = {key: seen for key, (_, seen) in found.items()}
    return found


def _looks_old(owner: Owner) -> bool:
    return abs(time.time() - owner.at) > STALE


def _patience(owner: Owner, seen: _Sight) -> float:
    """Seconds to wait before a report counts as that of an owner that is gone; 0 where that is known."""
    if seen.moved or not _looks_old(owner):
        return 0.0
    return max(0.0, 2 * PERIOD + seen.since - time.monotonic())


class Events:
    """Failures and recoveries of an owner's rollouts, counted by kind; told by any thread."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.recoveries: Counter[str] = Counter()
        self.dropped = 0
        self._lock = threading.Lock()
        self._meters = OwnerMeters()

    def note(self, event: Failure | Recovery) -> None:
        """Count an environment that was lost, or a path that continues with another."""
        lost = event.error.partition(":")[0]
        with self._lock:
            if isinstance(event, Recovery):
                self.recoveries[event.kind] += 1
                self._meters.count("recoveries", event.kind)
                return
            self.failures[lost] += 1
            self.dropped += event.dropped
            self._meters.count("failures", lost)
            self._meters.count("dropped", lost, event.dropped)


class Reporter:
    """The thread in which an owner reports itself, until it is closed.

    Args:
        env: id of the environments.
        measure: gives what there is now: a report without name, rate and times, and the counts of all workers. It must
            not refer to the owner, which is to be collected as garbage when nothing else does.
    """

    def __init__(self, env: str, measure: Callable[[], tuple[Owner, HostCounts] | None]) -> None:
        self.key = f"{_PREFIX}{os.urandom(8).hex()}"
        """Key of its row."""
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._env, self._measure = env, measure
        self._began = time.monotonic()
        self._past: deque[tuple[float, int]] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="sandboxgym-fleet-status")
        self._thread.start()

    def report(self) -> bool:
        """Write the present state to the cluster; False if there is nothing to report of any more."""
        measured = self._measure()
        if measured is None or not ray.is_initialized():
            return False
        owner, counts = measured
        now = time.monotonic()
        self._past.append((now, counts.steps))
        while len(self._past) > 2 and now - self._past[1][0] >= WINDOW:
            self._past.popleft()
        since, before = self._past[0]
        rate = (counts.steps - before) / (now - since) if now > since else 0.0
        owner = replace(
            owner,
            name=self._name,
            env=self._env,
            at=time.time(),
            seconds=now - self._began,
            created=counts.created,
            steps=counts.steps,
            steps_per_second=rate,
            store_bytes=counts.written,
        )
        internal_kv._internal_kv_put(self.key, owner.to_json(), namespace=_NAMESPACE)
        return True

    def close(self) -> None:
        """End the thread and delete the report. Idempotent."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(PERIOD)
        self._delete()

    def _delete(self) -> None:
        if ray.is_initialized():
            with contextlib.suppress(Exception):  # the cluster is gone, and the report with it
                internal_kv._internal_kv_del(self.key, namespace=_NAMESPACE)

    def _work(self) -> None:
        failed = False
        while True:
            try:
                if not self.report():
                    break
            except Exception as error:  # the head is away, say; the next time may do
                if not failed:
                    logger.warning("the state of the fleet could not be reported: %s", error)
                failed = True
            if self._ended.wait(PERIOD):
                break
        self._delete()


def reporter_of(owner: Any, env: str) -> Reporter:
    """A reporter of a `RayEnvs`, which ends with it.

    The nodes are looked at beside it: while a worker that is left writes its snapshots, its owner still reports it.
    """
    reference = weakref.ref(owner)
    tending: list[threading.Thread] = []
    told: list[str] = []

    def tend() -> None:
        envs = reference()
        try:
            if envs is not None:
                envs.tend()
        except Exception as error:  # the next time may do
            if ray.is_initialized() and str(error) not in told:  # else the program ends, and the connection has before
                told[:] = [str(error)]
                logger.warning("the nodes of the fleet could not be looked at: %s", error)

    def measure() -> tuple[Owner, HostCounts] | None:
        envs = reference()
        if envs is None:
            return None
        if not any(thread.is_alive() for thread in tending):
            tending[:] = [threading.Thread(target=tend, daemon=True, name="sandboxgym-fleet-nodes")]
            tending[0].start()
        return envs.measured()  # type: ignore[no-any-return]

    return Reporter(env, measure)
