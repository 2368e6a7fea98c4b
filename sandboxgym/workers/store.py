"""Snapshots kept outside of the process that took them, in a directory, at a URL or on a cluster; equal parts once.

1. A stored snapshot is named by a key, the digest of its list of pieces. A piece is named by its own digest and
   written once, whoever writes it: of a sandbox, a new snapshot adds the layers that are new (`Snapshot.to_pieces`).
2. A snapshot is there as a whole or not at all, whenever its writer is killed: pieces are written first, the list of
   them last, each at one instant.
3. Nothing that comes out of a store was changed there: every piece is compared with its digest. What is damaged or
   missing is a typed error that names it.
4. A snapshot stays for as long as a `Lease` holds it. The leases of an owner that was killed end by themselves, and
   `SnapshotStore.collect` deletes what no lease holds.
5. Any number of processes may use a store at the same time.

Keys and bytes are plain data, and reading them executes nothing. The digests detect damage, not tampering: whoever can
write to a store can choose what is in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sandboxgym import serialization
from sandboxgym.brief import brief
from sandboxgym.core import Snapshot
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotMissing, StoreFull
from sandboxgym.serialization import Piece
from sandboxgym.workers.blobs import Blobs, Directory, Url

logger = logging.getLogger("sandboxgym")

FORMAT = 1
GRACE = 3600.0
"""Seconds for which what was just written stays, although no lease holds it yet."""
INLINE = 4096
"""Bytes up to which a piece that is one snapshot's alone is kept in its list of pieces."""
LARGEST = 2**34
"""Bytes of a snapshot that are read at most."""
KEPT = "kept"
"""Name of the lease without an end, of snapshots that were stored under no other."""

_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MARK = "format.json"
_UNTIL = "until"
_DIGEST = 32


class Stored(NamedTuple):
    """A snapshot in a store."""

    key: str
    nbytes: int
    """Bytes of its durable form."""
    written: int
    """Bytes that had to be written for it; the others were there."""


class Collected(NamedTuple):
    """Objects that a collection deleted."""

    snapshots: int
    blobs: int
    nbytes: int


class SnapshotStore:
    """A store of snapshots.

    Args:
        place: a directory, which is made if it is missing, a URL that fsspec knows (``s3://bucket/path``), or
            ``ray-objects://NAME`` for two nodes of the Ray cluster that this process is connected to.
        max_bytes: of all that it may hold; None: as much as there is room for.

    Raises:
        DependencyNotInstalled: the place is a URL, and fsspec or what it needs for it is not installed; or Ray is not.
        FleetError: the place is on a cluster, and this process is not connected to one.
        SnapshotMismatch: it is a store of another version, or not empty and no store.

    Example:
        >>> import tempfile
        >>> import sandboxgym
        >>> env = sandboxgym.make("ALFWorld-v0")
        >>> observation, info = env.reset(seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = SnapshotStore(folder)
        ...     key = store.put(env.snapshot()).key
        ...     again, info = env.restore(store.get(key))
        >>> again == observation
        True
    """

    def __init__(self, place: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (isinstance(max_bytes, bool) or max_bytes < 1):
            raise ValueError(f"expected max_bytes to be a positive number of bytes or None, found {max_bytes!r}")
        self.max_bytes = max_bytes
        self._blobs = _open(place)
        self._known: dict[str, float] = {}
        self._epoch: object = None
        self._used: int | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SnapshotStore({self.place!r})"

    @property
    def place(self) -> str:
        """Directory or URL of the store."""
        return self._blobs.place

    def put(
        self,
        snap: Snapshot,
        *,
        lease: Lease | None = None,
        name: str = "",
        pace: Callable[[int], object] | None = None,
    ) -> Stored:
        """Store a snapshot; what the store has already is not written again.

        Args:
            snap: held until this returns.
            lease: that holds it; by default it is held until `delete`.
            name: by which the lease shall know it, see `Lease.named`; empty: none.
            pace: is told of each write, with its bytes, before it begins, and may wait or raise; others may use the
                store meanwhile.

        Raises:
            StoreFull: there is no room for it; what is there stays usable.
            SnapshotReleased, SnapshotNotSupported: it was released, or has no durable form (running processes, say).
        """
        header, sections = snap.to_pieces()
        listed = {name: [_listed(piece) for piece in pieces] for name, pieces in sections.items()}
        listing = serialization.pack({"format": FORMAT, "header": json.dumps(header), "sections": listed})
        key = hashlib.sha256(listing).hexdigest()
        apart = {piece.digest: piece for pieces in sections.values() for piece in pieces if not _inline(piece)}
        if name:
            _check_name(name)
        lease = lease or self._kept()
        lease.hold(key)
        try:
            written = 0
            if pace is not None:
                written = self._add_in_turn(apart, pace)
                pace(len(listing))
            written += self._add(_snapshot(key), listing, apart)
        except BaseException:
            if key not in self:
                lease.drop(key)
            raise
        if name:
            lease.call(name, key)
        return Stored(key, sum(piece.nbytes for pieces in sections.values() for piece in pieces), written)

    def get(self, key: str) -> Snapshot:
        """Read a snapshot.

        Raises:
            SnapshotMissing: the store has no such snapshot, or not all of it.
            SnapshotCorrupt: what it has was damaged.
            ValueError: that is no key.
        """
        header, sections = self._listing(key)
        total = sum(
            len(entry) if isinstance(entry, bytes) else entry[1] for each in sections.values() for entry in each
        )
        if total > LARGEST:
            raise SnapshotCorrupt(f"expected a snapshot of at most {LARGEST:,} bytes, found one of {total:,}: {key}")
        contents = {name: b"".join(self._contents(key, entries)) for name, entries in sections.items()}
        try:
            return Snapshot.from_sections(header, contents)
        except SnapshotCorrupt as error:
            raise SnapshotCorrupt(f"the snapshot {key} in {self.place}: {error}") from error

    def __contains__(self, key: str) -> bool:
        return self._blobs.find(_snapshot(_checked(key))) is not None

    def keys(self) -> list[str]:
        """Keys of all snapshots."""
        return sorted(found.name.rpartition("/")[2] for found in self._blobs.list("snapshots"))

    def delete(self, key: str) -> None:
        """Hold a snapshot no longer, under whatever lease; `collect` frees its room."""
        _checked(key)
        for found in self._blobs.list("leases"):
            if found.name.rpartition("/")[2] == key:
                self._blobs.delete(found.name)

    def lease(self, name: str, *, seconds: float = 86_400.0) -> Lease:
        """Open a lease, or take over the one of this name with all that it holds.

        Args:
            name: letters, digits, dots, dashes and underscores; of a run, say.
            seconds: after which it ends unless it is renewed.
        """
        lease = self.existing_lease(name, seconds=seconds)
        lease.renew()
        return lease

    def existing_lease(self, name: str, *, seconds: float = 86_400.0) -> Lease:
        """Return a lease that another process renews; unlike `lease`, this does not renew it.

        Raises:
            ValueError: the name is `KEPT`, or is not one that `lease` accepts.
        """
        if name == KEPT:
            raise ValueError(f"expected a name for a lease other than {KEPT!r}, that of what has none")
        return Lease(self._blobs, _check_name(name), seconds)

    def leases(self) -> dict[str, float]:
        """Seconds until each lease ends, by its name, below 0 once it has; without that which has no end."""
        names = {found.name.split("/")[1] for found in self._blobs.list("leases")} - {KEPT}
        return {name: Lease(self._blobs, name, 0).left for name in sorted(names)}

    def nbytes(self) -> int:
        """Size in bytes of all snapshots in the store."""
        return sum(found.nbytes for folder in ("blobs", "snapshots") for found in self._blobs.list(folder))

    def collect(self, *, grace: float = GRACE) -> Collected:
        """Delete the leases that ended, the snapshots that no lease holds, and the pieces that no snapshot has.

        Args:
            grace: seconds for which whatever was written stays; longer than any `put` takes.
        """
        with self._blobs.lock(exclusive=True):
            held = self._held()
            snapshots = blobs = nbytes = 0
            needed: set[str] = set()
            for found in self._blobs.list("snapshots"):
                key = found.name.rpartition("/")[2]
                if key in held or found.age <= grace:
                    try:
                        _, sections = self._listing(key)
                    except (SnapshotCorrupt, SnapshotMissing, ValueError) as error:
                        logger.warning("a collection leaves %s in %s alone: %s", key, self.place, error)
                        continue
                    needed |= {
                        entry[0] for entries in sections.values() for entry in entries if type(entry) is not bytes
                    }
                else:
                    self._blobs.delete(found.name)
                    snapshots, nbytes = snapshots + 1, nbytes + found.nbytes
            for found in self._blobs.list("blobs"):
                if found.name.rpartition("/")[2] not in needed and found.age > grace:
                    self._blobs.delete(found.name)
                    blobs, nbytes = blobs + 1, nbytes + found.nbytes
            self._blobs.sweep(grace)
        self._used = None
        return Collected(snapshots, blobs, nbytes)

    def release(self, names: Iterable[str]) -> Collected:
        """End leases of owners that are gone, and delete what nothing holds.

        What was just written is deleted as well, unless others use the store: what they are writing looks the same.

        Args:
            names: of the leases.
        """
        for name in names:
            self.existing_lease(name).release()
        used = any(left > 0 for left in self.leases().values()) or self._blobs.list(f"leases/{KEPT}")
        return self.collect(grace=GRACE if used else -1.0)

    def close(self) -> None:
        """End what serves the store, if it is on a cluster and no lease lives; elsewhere there is nothing to end."""
        self._blobs.close()

    def _add(self, name: str, listing: bytes, pieces: dict[str, Piece]) -> int:
        """Write those pieces that are missing, then the list of them; returns the bytes written."""
        for last in (False, True):
            with self._blobs.lock(exclusive=False):
                new = self._missing(pieces)
                listed = [] if self._stays(name, len(listing)) else [(name, listing)]
                nbytes = sum(piece.nbytes for piece in new) + sum(len(data) for _, data in listed)
                if self._has_room(nbytes, exact=last):
                    written = self._write(new)
                    listed_bytes = self._blobs.write(listed)
                    with self._lock:
                        self._known |= dict.fromkeys(pieces, time.monotonic())
                        self._used = None if self._used is None else self._used + listed_bytes
                    return written + listed_bytes
            if not last:
                self.collect()
        limit = "" if self.max_bytes is None else f", of {self.max_bytes:,} that it may hold (max_bytes)"
        free = self._blobs.free()
        room = "" if free is None else f"; {free:,} are free on the disk"
        raise StoreFull(
            f"{self.place} has no room for {nbytes:,} more bytes of a snapshot: it holds {self.nbytes():,}"
            f"{limit}{room}. Delete snapshots or let leases end, and collect"
        )

    def _add_in_turn(self, pieces: dict[str, Piece], pace: Callable[[int], object]) -> int:
        """Write those pieces that are missing, one after the other, unless there is no room for all of them.

        Returns the bytes written. Nothing is locked while ``pace`` waits; `_add` writes what was deleted meanwhile.
        """
        new = self._missing(pieces)
        nbytes = sum(piece.nbytes for piece in new)
        if not self._has_room(nbytes, exact=False):
            self.collect()
            if not self._has_room(nbytes, exact=True):
                return 0
        written = 0
        for piece in new:
            pace(piece.nbytes)
            with self._blobs.lock(exclusive=False):
                written += self._write(self._missing({piece.digest: piece}))
        return written

    def _write(self, pieces: Sequence[Piece]) -> int:
        written = self._blobs.write((_blob(piece.digest), _read(piece)) for piece in pieces)
        with self._lock:
            self._known |= dict.fromkeys((piece.digest for piece in pieces), time.monotonic())
            self._used = None if self._used is None else self._used + written
        return written

    def _missing(self, pieces: dict[str, Piece]) -> list[Piece]:
        """Pieces to write: those that are not there, or may be deleted before anything lists them."""
        epoch = self._blobs.epoch()
        now = time.monotonic()
        with self._lock:
            if epoch != self._epoch:
                self._known.clear()
                self._epoch = epoch
            known = {digest for digest in pieces if now - self._known.get(digest, -GRACE) < GRACE / 4}
        others = (piece for digest, piece in pieces.items() if digest not in known)
        return [piece for piece in others if not self._stays(_blob(piece.digest), piece.nbytes)]

    def _stays(self, name: str, nbytes: int) -> bool:
        """True if a name is there as a whole, and for a while."""
        found = self._blobs.find(name)
        return found is not None and found.nbytes == nbytes and self._blobs.renew(found, within=GRACE / 2)

    def _has_room(self, nbytes: int, *, exact: bool) -> bool:
        free = self._blobs.free()
        if free is not None and nbytes > free:
            return False
        if self.max_bytes is None:
            return True
        if self._used is None or exact:
            self._used = self.nbytes()
        return self._used + nbytes <= self.max_bytes

    def _listing(self, key: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Header of a snapshot, and its sections: bytes, or digest and length of a piece that is by itself."""
        try:
            data = self._blobs.read(_snapshot(_checked(key)))
        except FileNotFoundError:
            raise SnapshotMissing(f"{self.place} has no snapshot {key}: it was deleted, or never finished") from None
        if hashlib.sha256(data).hexdigest() != key:
            raise SnapshotCorrupt(f"the snapshot {key} in {self.place} is damaged: its digest differs")
        match serialization.unpack(data):
            case {"format": int(version), "header": str(header), "sections": dict(sections)} if version == FORMAT:
                return _fields(header), {name: _entries(entries) for name, entries in sections.items()}
            case other:
                raise SnapshotCorrupt(f"expected a stored snapshot of format {FORMAT}, found {brief(other)}")

    def _contents(self, key: str, entries: Sequence[Any]) -> Iterator[bytes]:
        for entry in entries:
            if isinstance(entry, bytes):
                yield entry
                continue
            digest, nbytes = entry
            try:
                data = self._blobs.read(_blob(digest))
            except FileNotFoundError:
                raise SnapshotMissing(
                    f"{self.place} lacks a piece of the snapshot {key}: {digest}, of {nbytes:,} bytes"
                ) from None
            if len(data) != nbytes or hashlib.sha256(data).hexdigest() != digest:
                raise SnapshotCorrupt(
                    f"a piece of the snapshot {key} in {self.place} is damaged: expected {nbytes:,} bytes of digest "
                    f"{digest}, found {len(data):,}"
                )
            yield data

    def _held(self) -> set[str]:
        """Keys that leases hold; those that have ended are deleted."""
        by_lease: dict[str, set[str]] = {}
        for found in self._blobs.list("leases"):
            _, name, last = found.name.split("/")
            by_lease.setdefault(name, set()).add(last)
        held: set[str] = set()
        live = {name for name in by_lease if name == KEPT or Lease(self._blobs, name, 0).live}
        for name, entries in by_lease.items():
            if name in live:
                held |= entries
            else:
                for entry in entries:
                    self._blobs.delete(f"leases/{name}/{entry}")
        for found in self._blobs.list("names"):
            if found.name.split("/")[1] not in live:
                self._blobs.delete(found.name)
        return held

    def _kept(self) -> Lease:
        return Lease(self._blobs, KEPT, 0)


class Lease:
    """A hold on snapshots of a store, which ends by itself; made by `SnapshotStore.lease`."""

    def __init__(self, blobs: Blobs, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self._blobs = blobs

    def __repr__(self) -> str:
        return f"Lease({self.name!r})"

    @property
    def live(self) -> bool:
        """True if the lease has not ended."""
        return self.left > 0

    @property
    def left(self) -> float:
        """Seconds until the lease ends, unless it is renewed."""
        try:
            return float(self._blobs.read(self._path(_UNTIL)).decode()) - time.time()
        except (FileNotFoundError, ValueError):
            return -math.inf

    def renew(self) -> None:
        """Let the lease last for its ``seconds`` from now."""
        self._write(_UNTIL, str(time.time() + self.seconds).encode())

    def hold(self, key: str) -> None:
        """Hold a snapshot, which is there or will be at once."""
        self._write(_checked(key), b"")

    def drop(self, key: str, *, name: str = "") -> None:
        """Hold a snapshot no longer, and forget its name."""
        if name:
            self._blobs.delete(self._name_path(name))
        self._blobs.delete(self._path(_checked(key)))

    def call(self, name: str, key: str) -> None:
        """Give a snapshot a name."""
        with self._blobs.lock(exclusive=False):
            self._blobs.write([(self._name_path(name), _checked(key).encode())])

    def named(self, name: str) -> str | None:
        """Key of the snapshot with a name, which is there as a whole; None if there is none."""
        try:
            return self._blobs.read(self._name_path(name)).decode()
        except FileNotFoundError:
            return None

    def keys(self) -> list[str]:
        """Keys of the snapshots that the lease holds."""
        names = (found.name.rpartition("/")[2] for found in self._blobs.list(f"leases/{self.name}"))
        return sorted(name for name in names if name != _UNTIL)

    def release(self) -> None:
        """End the lease now."""
        for folder in ("leases", "names"):
            for found in self._blobs.list(f"{folder}/{self.name}"):
                self._blobs.delete(found.name)

    def _write(self, last: str, data: bytes) -> None:
        with self._blobs.lock(exclusive=False):
            self._blobs.write([(self._path(last), data)])

    def _path(self, last: str) -> str:
        return f"leases/{self.name}/{last}"

    def _name_path(self, name: str) -> str:
        return f"names/{self.name}/{_check_name(name)}"


def _open(place: str | os.PathLike[str]) -> Blobs:
    text = os.fspath(place)
    scheme, found, rest = text.partition("://")
    mark = json.dumps({"format": "sandboxgym-snapshots", "version": FORMAT}).encode()
    blobs: Blobs
    if found and scheme == "ray-objects":
        from sandboxgym.workers.nodes.objects import RayObjects  # imports Ray

        blobs = RayObjects(rest)
    elif found and scheme != "file":
        blobs = Url(text)
    else:
        path = Path(rest if found else text)
        if path.is_dir() and not (path / _MARK).exists() and any(not _ours(entry) for entry in path.iterdir()):
            raise SnapshotMismatch(f"expected an empty directory or a store of snapshots, found other files in {path}")
        blobs = Directory(path)
    try:
        there = blobs.read(_MARK)
    except FileNotFoundError:
        with blobs.lock(exclusive=False):
            blobs.write([(_MARK, mark)])
        return blobs
    if there != mark:
        raise SnapshotMismatch(f"expected a store of snapshots of version {FORMAT} in {text}, found {brief(there, 80)}")
    return blobs


def _ours(entry: Path) -> bool:
    """True for what another process that makes the same store at this moment may have made."""
    return entry.name in ("incoming", "lock")


def _snapshot(key: str) -> str:
    return f"snapshots/{key}"


def _blob(digest: str) -> str:
    return f"blobs/{digest[:2]}/{digest}"


def _checked(key: str) -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"expected the key of a stored snapshot, 64 hexadecimal digits, found {brief(key, 80)}")
    return key


def _check_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"expected a name of at most 100 letters, digits and ._-, found {name!r}")
    return name


def _read(piece: Piece) -> bytes:
    data = piece.read()
    if len(data) != piece.nbytes or hashlib.sha256(data).hexdigest() != piece.digest:
        raise SnapshotCorrupt("what a snapshot holds changed while it was stored")
    return data


def _listed(piece: Piece) -> bytes | list[Any]:
    return piece.read() if _inline(piece) else [bytes.fromhex(piece.digest), piece.nbytes]


def _inline(piece: Piece) -> bool:
    return piece.alone and piece.nbytes <= INLINE


def _entries(entries: Any) -> list[Any]:
    if not isinstance(entries, list):
        raise SnapshotCorrupt(f"expected the pieces of a stored snapshot, found {brief(entries)}")
    return list(map(_entry, entries))


def _entry(entry: Any) -> Any:
    match entry:
        case bytes():
            return entry
        case [bytes(digest), int(nbytes)] if len(digest) == _DIGEST and nbytes >= 0:
            return digest.hex(), nbytes
    raise SnapshotCorrupt(f"expected a piece of a stored snapshot, found {brief(entry)}")


def _fields(header: str) -> dict[str, Any]:
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise SnapshotCorrupt(f"the header of a stored snapshot is not readable: {brief(error)}") from error
    if not isinstance(fields, dict):
        raise SnapshotCorrupt(f"expected the header of a stored snapshot, found {brief(fields)}")
    return fields
