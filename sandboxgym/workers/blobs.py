"""Named bytes in a directory or at any URL of fsspec, as a store of snapshots needs them.

1. A name has all of its bytes or none: they are written elsewhere, flushed to the disk and renamed. A process that is
   killed on the way leaves a file in ``incoming``, which a later `sweep` deletes. Two that write one name at the same
   time both succeed.
2. At a URL that depends on what is there: object stores write a name as a whole; where a killed writer can leave a part
   of it, its length is wrong, so that the next writer replaces it.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gymnasium.error import DependencyNotInstalled

from sandboxgym.errors import StoreFull

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BATCH = 64
"""Files that are open at once while they are flushed together."""


class FoundBlob(NamedTuple):
    """A name with what is known about its bytes."""

    name: str
    nbytes: int
    age: float
    """Seconds since it was written."""


class Blobs(ABC):
    """Bytes by name; names are relative paths with ``/``."""

    place: str
    """Name of the place in messages."""

    @abstractmethod
    def write(self, items: Iterable[tuple[str, bytes]]) -> int:
        """Write bytes, each as a whole; they are on the disk when this returns. Returns their number.

        Raises:
            StoreFull: the disk is full; those that were written before stay.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read bytes; raises FileNotFoundError."""

    @abstractmethod
    def find(self, name: str) -> FoundBlob | None:
        """Length and age of a name; None if it is not there."""

    @abstractmethod
    def list(self, folder: str) -> list[FoundBlob]:
        """All names below a folder."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete the bytes under a name, if there are any."""

    def renew(self, found: FoundBlob, *, within: float) -> bool:
        """Make a name young again; False if that takes writing it again, unless it is younger than so many seconds."""
        return found.age < within

    def free(self) -> int | None:
        """Bytes that can still be written; None if that is not known."""
        return None

    def epoch(self) -> object:
        """A value that changes whenever something may have been deleted; None if that is not known."""
        return None

    @contextlib.contextmanager
    def lock(self, *, exclusive: bool) -> Iterator[None]:
        """Context in which others may only add (shared), or do nothing (exclusive), where processes can agree on it."""
        yield

    def sweep(self, older: float) -> None:  # noqa: B027  # nothing to do where no parts can be left
        """Delete what killed writers left behind more than so many seconds ago, and note that something was deleted."""

    def close(self) -> None:  # noqa: B027  # a directory needs nobody
        """End what serves the bytes, unless somebody has a lease on them."""


class Directory(Blobs):
    """Bytes in files of a directory, which may be on a network file system.

    Args:
        path: of the directory; made if it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.place = os.fspath(path)
        self._incoming = self.path / "incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)

    def write(self, items: Iterable[tuple[str, bytes]]) -> int:
        """Write bytes; see `Blobs.write`."""
        total = 0
        batch: list[tuple[str, int, Path]] = []
        folders: set[Path] = set()
        try:
            for name, data in items:
                batch.append((name, *self._open()))
                _write_all(batch[-1][1], data)
                total += len(data)
                if len(batch) == _BATCH:
                    self._publish(batch, folders)
            self._publish(batch, folders)
            for folder in folders:
                _flush(folder)
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFull(f"{self.place} has no room for a snapshot: {os.strerror(error.errno)}") from error
            raise
        finally:
            for _, descriptor, path in batch:
                os.close(descriptor)
                path.unlink(missing_ok=True)
        return total

    def _open(self) -> tuple[int, Path]:
        path = self._incoming / os.urandom(12).hex()
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path

    def _publish(self, batch: list[tuple[str, int, Path]], folders: set[Path]) -> None:
        for _, descriptor, _ in batch:
            os.fsync(descriptor)
        while batch:
            name, descriptor, path = batch[-1]
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            os.close(descriptor)
            batch.pop()
            folders.add(target.parent)

    def read(self, name: str) -> bytes:
        """Read bytes; see `Blobs.read`."""
        return (self.path / name).read_bytes()

    def find(self, name: str) -> FoundBlob | None:
        """Length and age of a name; see `Blobs.find`."""
        try:
            status = (self.path / name).stat()
        except FileNotFoundError:
            return None
        return FoundBlob(name, status.st_size, time.time() - status.st_mtime)

    def list(self, folder: str) -> list[FoundBlob]:
        """All names below a folder; see `Blobs.list`."""
        found = []
        for above, _, names in os.walk(self.path / folder):
            within = Path(above).relative_to(self.path)
            for name in names:
                if one := self.find((within / name).as_posix()):
                    found.append(one)
        return found

    def delete(self, name: str) -> None:
        """Delete a name; see `Blobs.delete`."""
        (self.path / name).unlink(missing_ok=True)

    def renew(self, found: FoundBlob, *, within: float) -> bool:
        """Set the time of a file; False if it was deleted."""
        try:
            os.utime(self.path / found.name)
        except FileNotFoundError:
            return False
        return True

    def free(self) -> int | None:
        """Free bytes of the file system."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def epoch(self) -> object:
        """Time of the last `sweep`."""
        try:
            return (self.path / "swept").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def lock(self, *, exclusive: bool) -> Iterator[None]:
        """Lock the directory between processes; see `Blobs.lock`. A killed process leaves no lock behind."""
        with open(self.path / "lock", "ab") as file:
            with contextlib.suppress(OSError):  # a network file system without locks
                fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield

    def sweep(self, older: float) -> None:
        """Delete unfinished files; see `Blobs.sweep`."""
        for found in self.list("incoming"):
            if found.age > older:
                self.delete(found.name)
        (self.path / "swept").write_bytes(os.urandom(8))
        os.utime(self.path / "swept")


class Url(Blobs):
    """Bytes at a URL of fsspec: ``s3://bucket/path``, ``gs://…``, ``memory://…``.

    Raises:
        DependencyNotInstalled: fsspec is missing, or the package that it needs for this kind of URL.
        ValueError: fsspec knows no such kind.
    """

    def __init__(self, url: str) -> None:
        self.place = url
        try:
            import fsspec
        except ModuleNotFoundError:
            raise DependencyNotInstalled(f"a store at {url} needs fsspec: pip install fsspec") from None
        try:
            self._fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise DependencyNotInstalled(f"a store at {url} needs another package: {error}") from error
        except ValueError as error:
            raise ValueError(f"expected a directory or a URL that fsspec knows, found {url}: {error}") from error
        self._root: str = path.rstrip("/")

    def write(self, items: Iterable[tuple[str, bytes]]) -> int:
        """Write bytes; see `Blobs.write`."""
        total = 0
        for name, data in items:
            path = self._path(name)
            try:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(path, data)
            except OSError as error:
                if error.errno in _FULL:
                    raise StoreFull(f"{self.place} has no room for a snapshot: {error}") from error
                raise
            total += len(data)
        return total

    def read(self, name: str) -> bytes:
        """Read bytes; see `Blobs.read`."""
        data: bytes = self._fs.cat_file(self._path(name))
        return data

    def find(self, name: str) -> FoundBlob | None:
        """Length and age of a name; see `Blobs.find`."""
        try:
            return self._found(self._fs.info(self._path(name)))
        except FileNotFoundError:
            return None

    def list(self, folder: str) -> list[FoundBlob]:
        """All names below a folder; see `Blobs.list`."""
        try:
            entries = self._fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        return [self._found(entry) for entry in entries.values()]

    def delete(self, name: str) -> None:
        """Delete a name; see `Blobs.delete`."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _found(self, entry: dict[str, Any]) -> FoundBlob:
        name = str(entry["name"]).lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")
        return FoundBlob(name, int(entry["size"] or 0), _age(entry))


def _age(entry: dict[str, Any]) -> float:
    """Seconds since a file of fsspec was written; 0 where it does not say, so that nothing is deleted too early."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        when = entry.get(key)
        if isinstance(when, str):
            try:
                when = datetime.datetime.fromisoformat(when)
            except ValueError:
                continue
        if isinstance(when, datetime.datetime):
            when = (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()
        if isinstance(when, int | float):
            return max(0.0, time.time() - when)
    return 0.0


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
