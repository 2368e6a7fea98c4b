"""Snapshots that stay in the worker that took them, with durable copies in a store, written in the background.

1. The owner of a worker gets a `KeptSnapshot`, a few hundred bytes. A restore in the same worker takes no more; for
   one in another worker the first writes it to the store, what is new, and the second reads it there.
2. A worker writes its snapshots to the store in a thread (`Keeper`) beside its calls, the latest first. One that is
   dropped before its turn is not written. Within a bandwidth (`Pace`) it waits between pieces, not where another
   worker waits for a snapshot.
3. Of a worker that was lost there is what the store has; of a snapshot that it has not, `SnapshotMissing` is raised.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sandboxgym.core import Header, Layer, Snapshot
from sandboxgym.errors import SnapshotMissing, StoreFull
from sandboxgym.workers.failures import EnvFailure
from sandboxgym.workers.store import Lease, SnapshotStore

if TYPE_CHECKING:
    from sandboxgym.workers.worker import Worker

logger = logging.getLogger("sandboxgym")

LEASE = 3600.0
"""Seconds for which durable copies outlive an owner that was killed."""

SnapKey = tuple[str, int]
"""Key of a snapshot kept by a worker: (id, number of wrappers' states)."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Settings by which workers keep snapshots."""

    place: str
    """Directory or URL of the store; all workers and their owner can reach it."""
    lease: str
    """Name of the lease that holds the durable copies; its owner renews it."""
    every: int = 1
    """Steps of an environment between snapshots that are written to the store without being asked for."""
    bandwidth: float | None = None
    """Bytes per second that a worker writes in the background, on average between two pieces; None: no limit."""

    def opened(self) -> tuple[SnapshotStore, Lease]:
        """The store and the lease."""
        store = SnapshotStore(self.place)
        return store, store.existing_lease(self.lease)


class KeptLease:
    """The owner's side of `Keeping`: a lease of its own, renewed in a thread until it is closed.

    Args:
        store: directory or URL.
        every: of `Keeping`, as is ``bandwidth``.
        bandwidth: see there.
    """

    def __init__(self, store: str | os.PathLike[str], *, every: int, bandwidth: float | None) -> None:
        name = f"workers-{os.urandom(8).hex()}"
        place = os.fspath(store)
        if "://" not in place:
            place = os.path.abspath(place)  # workers may have another working directory
        self.keeping = Keeping(place, name, every, bandwidth)
        self._store = SnapshotStore(place)
        self._lease = self._store.lease(name, seconds=LEASE)
        self._others: dict[str, Lease] = {}
        self._ended = threading.Event()
        arguments = (self._ended, self._store, self._lease, self._others)
        self._thread = threading.Thread(target=_renew, args=arguments, daemon=True, name="sandboxgym-lease")
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._ended.set)

    def reference(self, snap: Any) -> tuple[str, ...] | None:
        """Name of a kept snapshot in the store, whether or not it has been written; None of other snapshots."""
        return (self.keeping.lease, name_of(snap.kept.key)) if isinstance(snap, KeptSnapshot) else None

    def durable(self, reference: tuple[str, ...]) -> Snapshot:
        """The snapshot of a name, also of an owner that was killed: what its lease holds is held until `close`.

        Raises:
            SnapshotMissing, SnapshotCorrupt: it is not in the store, or damaged.
        """
        lease, name = reference
        if lease not in self._others:
            self._others[lease] = self._store.lease(lease, seconds=LEASE)
        key = self._others[lease].named(name)
        if key is None:
            raise SnapshotMissing(f"{self._store.place} has no snapshot {name}")
        return self._store.get(key)

    def close(self) -> None:
        """End the lease, and those taken over. Idempotent."""
        if not self._ended.is_set():
            self._finalizer()
            self._thread.join()
            for lease in (self._lease, *self._others.values()):
                lease.release()
            self._store.close()


def _renew(ended: threading.Event, store: SnapshotStore, lease: Lease, others: dict[str, Lease]) -> None:
    while not ended.wait(LEASE / 4):
        try:
            for one in (lease, *list(others.values())):
                one.renew()
            store.collect()
        except Exception as error:  # the next time may do
            logger.warning("the lease of snapshots in %s could not be renewed: %s", store.place, error)


class Facts(NamedTuple):
    """Facts that an owner knows about a snapshot that a worker keeps."""

    header: Header
    layers: tuple[Layer, ...]
    id: str
    parent: str | None


def name_of(key: SnapKey) -> str:
    """Name of a snapshot in the store."""
    return f"{key[0]}-{key[1]}"


class Pace:
    """A budget of bytes per second: a write is due once those before it have used up their time.

    From the start of a write to the start of any later one, no more than ``bandwidth`` bytes per second are written.

    Args:
        bandwidth: bytes per second, more than 0.
        clock: seconds now.
    """

    def __init__(self, bandwidth: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bandwidth, self._clock = bandwidth, clock
        self._due = clock()

    def seconds(self) -> float:
        """Seconds until the next write is due; 0 or less: it is."""
        return self._due - self._clock()

    def spend(self, nbytes: int) -> None:
        """Count bytes that are written now."""
        self._due = max(self._due, self._clock()) + nbytes / self._bandwidth


class _Needless(Exception):
    """Raised to end the write of a snapshot that nobody needs any more."""


class Keeper:
    """The worker's side: snapshots until their owner drops them, and the thread that writes them to the store.

    Args:
        keeping: the settings.
        clock: of the bandwidth.
    """

    def __init__(self, keeping: Keeping, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.keeping = keeping
        self._pace = None if keeping.bandwidth is None else Pace(keeping.bandwidth, clock)
        self._hurry = 0
        """Callers that wait for a snapshot to be written."""
        self._store, self._lease = keeping.opened()
        self._kept: dict[SnapKey, Snapshot] = {}
        self._waiting: OrderedDict[SnapKey, Snapshot] = OrderedDict()
        self._stored: dict[SnapKey, str] = {}
        self._sizes: dict[SnapKey, int] = {}
        self._total = 0
        self._writing: SnapKey | None = None
        self._doomed = False
        """True if the snapshot that is being written was dropped meanwhile."""
        self._unwanted: list[tuple[SnapKey, str]] = []
        """Dropped snapshots that the lease holds, with their keys in the store."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(self, key: SnapKey, snap: Snapshot, *, durable: bool) -> None:
        """Keep a snapshot until it is dropped; ``durable``: write it to the store in the background."""
        with self._changed:
            self._kept[key] = snap
            if durable:
                self._waiting[key] = snap
                self._wake()

    def get(self, key: SnapKey) -> Snapshot | None:
        """The snapshot of a key; None if it is not kept."""
        return self._kept.get(key)

    def counts(self) -> tuple[int, int, int]:
        """Snapshots that are kept, bytes of those that were written, bytes that were new to the store."""
        with self._changed:
            return len(self._kept), sum(self._sizes.values()), self._total

    def load(self, key: SnapKey) -> Snapshot:
        """Read a snapshot from the store, as another worker wrote it.

        Raises:
            SnapshotMissing, SnapshotCorrupt: it is not there, or damaged.
        """
        found = self._lease.named(name_of(key))
        if found is None:
            raise SnapshotMissing(f"{self._store.place} has no snapshot {name_of(key)}")
        return self._store.get(found)

    def store_now(self, key: SnapKey) -> None:
        """Write a kept snapshot to the store, unless that has been done.

        It waits for no bandwidth, since a path waits for it: what is written later makes up for it.
        """
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            while self._writing is not None:
                self._changed.wait()
            self._hurry -= 1
            self._waiting.pop(key, None)
            if key in self._stored:
                return
            snap = self._kept.get(key)
            if snap is None:
                raise SnapshotMissing(f"this worker does not keep the snapshot {name_of(key)}")
            self._writing = key
        try:
            written = self._write(key, snap, None)
            if self._pace is not None:
                self._pace.spend(written)
        finally:
            self._written()

    def store_all(self) -> None:
        """Write every kept snapshot to the store, as `store_now` does, unless it is dropped meanwhile.

        One that cannot be written, because it has no durable form, say, keeps no other from it.
        """
        for key in list(self._kept):
            try:
                self.store_now(key)
            except SnapshotMissing:
                pass
            except Exception as error:  # of any type: environments say what they like
                logger.warning("a snapshot has no durable copy: %s: %s", type(error).__name__, error)

    def drop(self, keys: list[SnapKey]) -> None:
        """Keep snapshots no longer; what the store has of them is not held any more."""
        with self._changed:
            for key in keys:
                self._waiting.pop(key, None)
                if self._writing == key:
                    self._doomed = True
                    self._changed.notify_all()
                else:
                    self._forget(key)

    def close(self) -> None:
        """End the thread after the piece that it is writing, and release all snapshots."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5.0)
        self._kept.clear()

    def _wake(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, daemon=True, name="sandboxgym-keeper")
            self._thread.start()
        self._changed.notify_all()

    def _forget(self, key: SnapKey) -> None:
        """Release a snapshot that is not being written."""
        snap, stored = self._kept.pop(key, None), self._stored.pop(key, None)
        self._sizes.pop(key, None)
        if snap is not None:
            try:
                snap.release()
            except Exception as error:  # of any type: environments say what they like
                logger.warning("a dropped snapshot could not be released: %s: %s", type(error).__name__, error)
        if stored is not None:
            self._unwanted.append((key, stored))
            self._wake()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._unwanted and (not self._waiting or self._writing is not None):
                    self._changed.wait()
                if self._closed:
                    return
                unwanted, self._unwanted = self._unwanted, []
            for dropped, stored in unwanted:
                with contextlib.suppress(Exception):  # of any type, by the kind of store: its lease ends some day
                    self._lease.drop(stored, name=name_of(dropped))
            with self._changed:
                if not self._waiting or self._writing is not None:
                    continue
                key, snap = self._waiting.popitem()
                self._writing = key
            try:
                self._write(key, snap, None if self._pace is None else self._paced)
            except _Needless:
                pass
            except StoreFull as error:
                logger.warning("a snapshot has no durable copy: %s", error)
            except Exception as error:  # it may have no durable form
                logger.warning("a snapshot has no durable copy: %s: %s", type(error).__name__, error)
            finally:
                self._written()

    def _paced(self, nbytes: int) -> None:
        """Wait until so many bytes are due, or somebody waits for the writing to end."""
        assert self._pace is not None
        with self._changed:
            while not (self._closed or self._doomed or self._hurry) and (seconds := self._pace.seconds()) > 0:
                self._changed.wait(seconds)
            if self._closed or self._doomed:
                raise _Needless
            self._pace.spend(nbytes)

    def _write(self, key: SnapKey, snap: Snapshot, pace: Callable[[int], object] | None) -> int:
        stored = self._store.put(snap, lease=self._lease, name=name_of(key), pace=pace)
        with self._changed:
            self._stored[key] = stored.key
            self._sizes[key] = stored.nbytes
            self._total += stored.written
        return stored.written

    def _written(self) -> None:
        with self._changed:
            key, self._writing = self._writing, None
            if self._doomed and key is not None:
                self._doomed = False
                self._forget(key)
            self._changed.notify_all()


class Kept:
    """The owner's side of one kept snapshot, shared by all `KeptSnapshot`s of it.

    Args:
        worker: that keeps it.
        key: there.
        store: and ``lease``, of its durable copy.
    """

    def __init__(self, worker: Worker, key: SnapKey, store: SnapshotStore, lease: Lease) -> None:
        self.worker, self.generation, self.key = worker, worker.generation, key
        self._store, self._lease = store, lease
        self._stored: str | None = None
        self._finalizer = weakref.finalize(self, _drop, worker, worker.generation, key)
        self._finalizer.atexit = False

    @property
    def released(self) -> bool:
        """True after `release`."""
        return not self._finalizer.alive

    def release(self) -> None:
        """Let the worker drop it. Idempotent; also happens at garbage collection."""
        self._finalizer()

    def at(self, worker: Worker) -> bool:
        """True if a worker keeps the snapshot."""
        return worker is self.worker and worker.alive and worker.generation == self.generation

    def prepare(self, timeout: float | None = None) -> str:
        """See to it that the store has it; returns its key there. Not to be called while calls are under way.

        Args:
            timeout: seconds that the worker has for writing it, before it is ended.

        Raises:
            SnapshotMissing: the worker that kept it is gone, and the store has nothing of it.
        """
        if self._stored is None:
            self._stored = self._lease.named(name_of(self.key))
        if self._stored is None and self.at(self.worker):
            try:
                self.worker.call(0, "store_now", self.key, timeout=timeout)
            except EnvFailure as error:
                logger.warning("a worker was lost that kept a snapshot: %s", error)
            self._stored = self._lease.named(name_of(self.key))
        if self._stored is None:
            raise SnapshotMissing(
                f"the snapshot {self.key[0]} was kept by a worker that has ended, and has no durable copy in "
                f"{self._store.place}"
            )
        return self._stored

    def whole(self) -> Snapshot:
        """The snapshot itself, read from the store."""
        return self._store.get(self.prepare())


def _drop(worker: Worker, generation: int, key: SnapKey) -> None:
    if worker.generation == generation:
        worker.dropped.append(key)


class KeptSnapshot(Snapshot):
    """A snapshot that is in the worker which took it, and in a store where that was asked for.

    It is used like any other. Its content is only read, from the store, where something other than a restore in a
    worker needs it.
    """

    __slots__ = ("_whole", "kept")

    def __init__(self, kept: Kept, facts: Facts, *, layers: tuple[Layer, ...] | None = None) -> None:
        super().__init__(
            facts.header, None, layers=facts.layers if layers is None else layers, id=facts.id, parent=facts.parent
        )
        self.kept = kept
        self._whole: Snapshot | None = None

    def layered(self, layers: tuple[Layer, ...]) -> Snapshot:
        """A copy of this capture with other wrapper states around it."""
        return KeptSnapshot(self.kept, Facts(self.header, self.layers, self.id, self.parent), layers=layers)

    @property
    def released(self) -> bool:
        """True after `release` was called."""
        return self.kept.released

    def release(self) -> None:
        """Let the worker drop it. Idempotent."""
        self._whole = None
        self.kept.release()

    def _sections(self) -> dict[str, bytes]:
        return self._read()._sections()

    def _open(self, decode: Callable[[bytes], Any]) -> Any:
        return self._read()._open(decode)

    def _read(self) -> Snapshot:
        self._check_held()
        if self._whole is None:
            self._whole = self.kept.whole().layered(self.layers)
        return self._whole
