"""Named bytes in the memory of a Ray cluster's nodes, each on two of them: a store of snapshots without a disk.

1. A node has a keeper, an actor that ends with no owner. Its larger bytes are in the object store of Ray, which moves
   them to the node's disk where memory is short.
2. Which two nodes have a name follows from the name and the nodes that live (highest random weight), so that no table
   can be lost. If a node is lost, drained or joins, keepers copy what then belongs elsewhere, within seconds; within a
   minute if a keeper ended alone.
3. Two nodes that are lost at the same time take what was on both. A rollout then replays from further back.
4. Keepers end when the last lease is released, or a minute after the last one ended. A write starts the next.
5. A node that does not answer is left alone for a while. Meanwhile nothing is collected, and no keeper ends: what it
   has would be taken for missing.

There are no locks: collections rely on the grace of `SnapshotStore.collect`. Keepers store bytes and execute nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from gymnasium.error import DependencyNotInstalled

from sandboxgym.errors import StoreFull
from sandboxgym.workers.blobs import Blobs, FoundBlob
from sandboxgym.workers.failures import FleetError
from sandboxgym.workers.fleet_status import draining

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

logger = logging.getLogger("sandboxgym")

COPIES = 2
"""Nodes that have each name, if the cluster has as many."""
_NAMESPACE = "sandboxgym-objects"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SMALL = 50_000
"""Bytes up to which a keeper holds them itself."""
_BATCH = 32_000_000
"""Bytes that are sent together."""
_PATIENCE = 10.0
"""Seconds that a keeper has to answer; a node whose keeper does not is left alone for `_AWAY`."""
_RATE = 10_000_000
"""Bytes for which it has a second more, where it is given some."""
_START = 30.0
"""Seconds that a keeper has to start and take the first bytes."""
_AWAY = 60.0
_PERIOD = 2.0
"""Seconds between a keeper's looks at the nodes, and for which others use what they saw."""
_IDLE = 60.0
"""Seconds without a lease after which a keeper ends."""
_CHECK = 60.0
"""Seconds after which keepers compare what they have although no node came or went: one may end without its node."""


def ranked(name: str, nodes: Collection[str]) -> list[str]:
    """Nodes in the order in which they have a name: the first `COPIES` of those that live."""
    return sorted(nodes, key=lambda node: hashlib.sha256(f"{node}/{name}".encode()).digest())


def _nodes_now() -> tuple[list[str], list[str]]:
    """Ids of the nodes that take names, and of all that live."""
    drained = draining()
    alive = [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [node for node in alive if node not in drained] or alive, alive


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Keeper:
    """The process on a node: bytes by name, until they are deleted or belong elsewhere."""

    def __init__(self, store: str, node: str) -> None:
        self._store, self._node = store, node
        self._held: dict[str, tuple[Any, int, float]] = {}
        """Bytes or a reference to them, their number, and when they were written, by this process's clock."""
        self._lock = threading.Lock()
        self._others = RayObjects(store)
        self._leased = time.monotonic()
        self._settled: list[str] = []
        """Nodes among which everything was where it belongs, at this time:"""
        self._checked = 0.0
        self._ended = False
        threading.Thread(target=self._tend, daemon=True, name="sandboxgym-keeper").start()

    def write(self, items: Sequence[tuple[str, bytes]], replace: bool = True) -> str:
        """Hold bytes, or with ``replace=False`` those that are not here; what there is no room for: a sentence."""
        try:
            for name, data in items:
                if not replace and name in self._held:
                    continue
                held = data if len(data) <= _SMALL else ray.put(data)
                with self._lock:
                    if self._ended:  # another keeper takes it
                        raise RuntimeError("this keeper of snapshots has ended")
                    self._leased = time.monotonic()
                    if replace or name not in self._held:
                        self._held[name] = held, len(data), time.monotonic()
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            return _first_line(error)
        return ""

    def read(self, name: str) -> bytes | None:
        held = self._held.get(name)
        if held is None:
            return None
        try:
            data: bytes = held[0] if isinstance(held[0], bytes) else ray.get(held[0])
        except ray.exceptions.ObjectLostError as error:  # with the file to which Ray had moved it, say
            logger.warning("a keeper of snapshots has lost %s: %s", name, _first_line(error))
            with self._lock:
                if self._held.get(name) is held:
                    del self._held[name]
            return None
        return data

    def find(self, name: str) -> tuple[int, float] | None:
        """Number of bytes and seconds since they were written."""
        held = self._held.get(name)
        return None if held is None else (held[1], time.monotonic() - held[2])

    def lacks(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self._held]

    def list(self, folder: str) -> list[tuple[str, int, float]]:
        with self._lock:
            return [
                (name, nbytes, time.monotonic() - at)
                for name, (_, nbytes, at) in self._held.items()
                if name.startswith(f"{folder}/")
            ]

    def delete(self, name: str) -> None:
        with self._lock:
            self._held.pop(name, None)

    def renew(self, name: str) -> bool:
        """Make a name young again; False if it is not here."""
        with self._lock:
            if name in self._held:
                self._held[name] = *self._held[name][:2], time.monotonic()
                return True
        return False

    def live(self) -> bool:
        """True if a lease is here that has not ended."""
        with self._lock:
            names = [name for name in self._held if name.startswith("leases/")]
        ends = [name for name in names if name.endswith("/until")]
        return any(name.startswith("leases/kept/") for name in names) or any(
            float(data) > time.time() for name in ends if (data := self.read(name)) is not None
        )

    def _tend(self) -> None:
        while not self._ended:
            time.sleep(_PERIOD)
            try:
                self.look()
            except Exception as error:  # the next time may do
                logger.warning("a keeper of snapshots could not look at its nodes: %s", error)

    def look(self) -> None:
        """Look at the nodes and the leases, and end where there has been none for long."""
        if self.live():
            self._leased = time.monotonic()
        elif time.monotonic() - self._leased > _IDLE:
            if self._others.leased(besides=self._node):
                self._leased = time.monotonic()
            else:
                with self._lock:  # unless something was written meanwhile
                    self._ended = time.monotonic() - self._leased > _IDLE
                if self._ended:  # and nothing is copied any more, which would start others
                    ray.kill(ray.get_actor(f"{self._store}/{self._node}", namespace=_NAMESPACE))
                    return
        nodes, now = sorted(self._others.nodes()), time.monotonic()
        if nodes and (nodes != self._settled or now - self._checked > _CHECK) and self._spread(nodes):
            self._settled, self._checked = nodes, now

    def _spread(self, nodes: Collection[str]) -> bool:
        """Copy to others what they should have; True once they do, and what belongs elsewhere is not here any more."""
        with self._lock:
            held = dict(self._held)
        homes = {name: ranked(name, nodes)[:COPIES] for name in held}
        done = True
        for node in nodes:
            names = [name for name, home in homes.items() if node in home and node != self._node]
            done = (not names or self._copy(node, names)) and done  # a node that takes nothing keeps none from the rest
        for name in held:
            if done and self._node not in homes[name]:
                with self._lock:
                    if self._held.get(name) is held[name]:
                        del self._held[name]
        return done

    def _copy(self, node: str, names: Sequence[str]) -> bool:
        """Give a node those of these names that it lacks; False if it does not take them."""
        (lacking,) = self._others.ask([node], "lacks", names)
        if node in self._others.silent():
            return False
        try:
            for name in names if lacking is None else lacking:
                data = self.read(name)
                if data is not None and not self._others.hand(node, [(name, data)], replace=False):
                    return False
        except StoreFull as error:
            logger.warning("a snapshot has fewer than %d copies: %s", COPIES, error)
            return False
        return True


class RayObjects(Blobs):
    """Bytes on the nodes of the Ray cluster that this process is connected to.

    Args:
        name: of the store; all processes of the cluster with this name share it.

    Raises:
        DependencyNotInstalled: Ray is not installed.
        FleetError: this process is not connected to a cluster.
        ValueError: the name has other than letters, digits and ``._-``.
    """

    def __init__(self, name: str) -> None:
        self.place = f"{SCHEME}://{name}"
        if ray is None:
            raise DependencyNotInstalled(f"a store at {self.place} needs Ray: pip install 'sandboxgym[ray]'")
        if not _NAME.fullmatch(name):
            raise ValueError(f"expected {SCHEME}://NAME with letters, digits and ._- in it, found {self.place}")
        if not ray.is_initialized():
            raise FleetError(f"expected a process that is connected to a Ray cluster, for a store at {self.place}")
        self._name = name
        self._keepers: dict[str, Any] = {}
        self._away: dict[str, float] = {}
        self._seen: tuple[float, list[str], list[str]] = (-math.inf, [], [])
        self._losses = 0
        """Keepers that were found to have ended."""
        self._collecting = threading.local()

    def write(self, items: Iterable[tuple[str, bytes]]) -> int:
        """Write bytes to two nodes each; see `Blobs.write`.

        Raises:
            FleetError: no node takes them.
        """
        total = waiting = 0
        batch: list[tuple[str, bytes]] = []
        for name, data in items:
            batch.append((name, data))
            waiting += len(data)
            if waiting > _BATCH:
                self._write(batch)
                total, waiting, batch = total + waiting, 0, []
        self._write(batch)
        return total + waiting

    def _write(self, batch: Sequence[tuple[str, bytes]]) -> None:
        done: dict[str, set[str]] = {name: set() for name, _ in batch}
        while True:
            nodes = self.nodes()
            if not nodes:
                raise FleetError(f"expected a node of the cluster that takes snapshots for {self.place}, found none")
            shares: dict[str, list[tuple[str, bytes]]] = {}
            for name, data in batch:
                for node in ranked(name, nodes)[:COPIES]:
                    if node not in done[name]:
                        shares.setdefault(node, []).append((name, data))
            if not shares:
                return
            for node, share in shares.items():
                if self.hand(node, share):
                    for name, _ in share:
                        done[name].add(node)

    def hand(self, node: str, share: Sequence[tuple[str, bytes]], *, replace: bool = True) -> bool:
        """Give bytes to a node, whose keeper is started if there is none; False if it does not take them.

        Raises:
            StoreFull: it has no room.
        """
        for again in (True, False):
            known = node in self._keepers
            patience = (_PATIENCE if known else _START) + sum(len(data) for _, data in share) / _RATE
            try:
                reason = ray.get(self._keeper(node, make=True).write.remote(share, replace), timeout=patience)
            except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:  # of this node
                reason = _first_line(error)
            except ray.exceptions.RayError as error:
                if again and known and not isinstance(error, ray.exceptions.GetTimeoutError):
                    self._forget(node)
                    if node in self.everywhere():  # its keeper ended, and another may start there
                        continue
                self._leave(node, error)
                return False
            break
        if reason:
            raise StoreFull(f"{self.place} has no room for a snapshot on node {node[:8]}: {reason}")
        return True

    def read(self, name: str) -> bytes:
        """Read bytes from the first node that has them; see `Blobs.read`."""
        found = self._first(name, "read")
        if found is None:
            raise FileNotFoundError(f"{self.place} has no {name}")
        data: bytes = found
        return data

    def find(self, name: str) -> FoundBlob | None:
        """Length and age of a name; see `Blobs.find`."""
        found = self._first(name, "find")
        return None if found is None else FoundBlob(name, *found)

    def list(self, folder: str) -> list[FoundBlob]:
        """All names below a folder, on any node; see `Blobs.list`."""
        found: dict[str, FoundBlob] = {}
        for rows in self.ask(self.everywhere(), "list", folder):
            for row in rows or ():
                if row[0] not in found or row[2] < found[row[0]].age:
                    found[row[0]] = FoundBlob(*row)
        return [found[name] for name in sorted(found)]

    def delete(self, name: str) -> None:
        """Delete a name on all nodes, on one that does not answer when it does again; see `Blobs.delete`."""
        for node in self.silent():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has no keeper
                self._keeper(node, make=False).delete.remote(name)
        self.ask(self.everywhere(), "delete", name)

    def renew(self, found: FoundBlob, *, within: float) -> bool:
        """Make a name young again; False if one of its nodes does not have it."""
        return all(self.ask(ranked(found.name, self.nodes())[:COPIES], "renew", found.name))

    def epoch(self) -> object:
        """The nodes, and how many keepers have ended: what was there is gone."""
        return tuple(self.nodes()), self._losses

    @contextlib.contextmanager
    def lock(self, *, exclusive: bool) -> Iterator[None]:
        """Context; an exclusive one needs all nodes, for a collection would take what a silent one has for missing.

        Raises:
            FleetError: a node does not answer.
        """
        self._collecting.now = exclusive
        try:
            if exclusive:
                self.ask(self._look()[1], "live")
            yield
        finally:
            self._collecting.now = False

    def close(self) -> None:
        """End the keepers, unless a lease lives, or may live on a node that does not answer."""
        if not self.leased():
            for node in self._look()[1]:
                if (keeper := self._keepers.pop(node, None)) is not None:
                    ray.kill(keeper)

    def leased(self, *, besides: str = "") -> bool:
        """True if a lease lives on one of the other nodes, or may, because one does not answer."""
        nodes = [node for node in self._look()[1] if node != besides]
        return any(self.ask(nodes, "live")) or bool(self.silent())

    def nodes(self) -> Sequence[str]:
        """Ids of the nodes that take names: that live, are not drained and answer."""
        return self._answering(self._look()[0])

    def everywhere(self) -> Sequence[str]:
        """Ids of the nodes that may have names: that live and answer."""
        return self._answering(self._look()[1])

    def silent(self) -> Sequence[str]:
        """Ids of the nodes that live, and did not answer lately."""
        alive = self._look()[1]
        answering = self._answering(alive)
        return [node for node in alive if node not in answering]

    def _look(self) -> tuple[Sequence[str], Sequence[str]]:
        """Ids of the nodes that take names, and of all that live; none without a connection."""
        if not ray.is_initialized():
            return [], []
        now = time.monotonic()
        if now - self._seen[0] >= _PERIOD:
            self._seen = now, *_nodes_now()
        return self._seen[1:]

    def _answering(self, nodes: Iterable[str]) -> Sequence[str]:
        now = time.monotonic()
        return [node for node in nodes if now - self._away.get(node, -math.inf) >= _AWAY]

    def ask(self, nodes: Iterable[str], method: str, *arguments: Any) -> Sequence[Any]:
        """Answers of the nodes' keepers, in order; None of those that have none, or do not answer.

        Raises:
            FleetError: one does not answer, within an exclusive `lock`.
        """
        answers: dict[str, Any] = dict.fromkeys(nodes)
        ended = self._ask(answers, list(answers), method, arguments)
        self._ask(answers, ended, method, arguments)  # those that took their places
        return list(answers.values())

    def _ask(
        self, answers: dict[str, Any], nodes: Iterable[str], method: str, arguments: Sequence[Any]
    ) -> Sequence[str]:
        """Fill in the answers of some nodes; returns those whose keepers, known before, have ended."""
        calls, ended = {}, []
        for node in nodes:
            known = node in self._keepers
            try:
                calls[node] = known, getattr(self._keeper(node, make=False), method).remote(*arguments)
            except (ray.exceptions.RayError, ValueError):  # there is none
                self._keepers.pop(node, None)
                self._away.pop(node, None)
        for node, (known, call) in calls.items():
            try:
                answers[node] = ray.get(call, timeout=_PATIENCE)
                self._away.pop(node, None)
            except ray.exceptions.GetTimeoutError as error:
                self._leave(node, error)
                if getattr(self._collecting, "now", False):
                    raise FleetError(f"node {node[:8]} does not answer during a collection of {self.place}") from error
            except ray.exceptions.RayError:  # it ended, with its node or by itself
                self._forget(node)
                ended += [node] * known
        return ended

    def _first(self, name: str, method: str) -> Any:
        """The first answer: of the nodes that should have a name, one after the other, then of all others."""
        homes = ranked(name, self.nodes())[:COPIES]
        for node in homes:
            if (found := self.ask([node], method, name)[0]) is not None:
                return found
        others = [node for node in self.everywhere() if node not in homes]
        return next((found for found in self.ask(others, method, name) if found is not None), None)

    def _forget(self, node: str) -> None:
        """Note that the keeper of a node has ended."""
        self._keepers.pop(node, None)
        self._losses += 1
        self._seen = (-math.inf, *self._seen[1:])

    def _leave(self, node: str, error: Exception) -> None:
        logger.warning("node %s keeps no snapshots for %g s: %s", node[:8], _AWAY, type(error).__name__)
        self._keepers.pop(node, None)
        self._away[node] = time.monotonic()

    def _keeper(self, node: str, *, make: bool) -> Any:
        """The actor of a node.

        Raises:
            ValueError: there is none, and none is to be made.
        """
        # Threads share the handles: one may be forgotten at any moment.
        keeper = self._keepers.get(node)
        if keeper is None:
            name = f"{self._name}/{node}"
            if make:
                from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

                options: dict[str, Any] = {
                    "name": name,
                    "namespace": _NAMESPACE,
                    "get_if_exists": True,
                    "lifetime": "detached",
                    "num_cpus": 0,
                    "max_restarts": 0,
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
                }
                keeper = ray.remote(_Keeper).options(**options).remote(self._name, node)
            else:
                keeper = ray.get_actor(name, namespace=_NAMESPACE)
            self._keepers[node] = keeper
        return keeper


SCHEME = "ray-objects"
"""Scheme of the places of such stores, ``ray-objects://NAME``."""
