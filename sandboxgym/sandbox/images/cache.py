"""Parts of images on one node, by digest, within a quota; shared by all processes there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from sandboxgym.errors import StoreFull
from sandboxgym.sandbox.images.registry import Blob, Image, ImageError, check_digest
from sandboxgym.system.atomic import atomic_file, is_temporary, write_atomic

_ABANDONED = 3600.0
"""Seconds without a byte after which an unfinished part is one that a killed process left."""


class LayerCache:
    """Files named by the digests of their content.

    A file is there as a whole or not at all, and its content was compared with its digest when it was written.

    Args:
        path: of the directory; made if it is missing.
        max_bytes: quota. Before it is exceeded, the parts that were used longest ago are deleted; None: no quota.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"expected a quota of at least one byte, or None, found {max_bytes}")
        self.path, self.max_bytes = Path(path), max_bytes
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}

    def digests(self) -> set[str]:
        """Digests of what is there."""
        return {f"sha256:{name}" for name in os.listdir(self.path) if len(name) == 64}

    def note(self, image: Image) -> None:
        """Write down which parts an image has, so that `nbytes_of` needs no registry."""
        parts = {blob.digest: blob.nbytes for blob in image.blobs}
        write_atomic(self._note(image.name), json.dumps(parts).encode())

    def nbytes_of(self, names: Iterable[str]) -> int:
        """Bytes of the parts that are here of images that were noted, what they share counted once."""
        parts: dict[str, int] = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                parts |= json.loads(self._note(name).read_bytes())
        there = self.digests()
        return sum(nbytes for digest, nbytes in parts.items() if digest in there)

    def use(self, digest: str) -> Path | None:
        """File of a part, which counts as used now; None if it is not there."""
        path = self._file(digest)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    @contextlib.contextmanager
    def holding(self, digests: Collection[str]) -> Iterator[None]:
        """Context in which parts are not deleted for the quota by this process."""
        with self._lock:
            for digest in digests:
                self._held[digest] = self._held.get(digest, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                for digest in digests:
                    self._held[digest] -= 1
                    if not self._held[digest]:
                        del self._held[digest]

    def put(self, blob: Blob, blocks: Iterable[bytes]) -> Path:
        """Write a part, after making room for it.

        Raises:
            ImageError: the content is not that of its digest, or longer than was said.
            StoreFull: the quota has no room for it, whatever is deleted.
        """
        self.path.mkdir(parents=True, exist_ok=True)  # a cache may be removed at any time
        self._make_room(blob.nbytes)
        path, known, total = self._file(blob.digest), hashlib.sha256(), 0
        with atomic_file(path, durable=False) as temporary, open(temporary, "wb") as file:
            for block in blocks:
                total += len(block)
                if total > blob.nbytes:
                    break
                known.update(block)
                file.write(block)
            if total != blob.nbytes or f"sha256:{known.hexdigest()}" != blob.digest:
                raise ImageError(f"expected {blob.nbytes:,} bytes of {blob.digest}, found {total:,} of other content")
        return path

    def read(self, digest: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of a part, for another node; None if it is not there (any more)."""
        try:
            with open(self._file(digest), "rb") as file:
                file.seek(start)
                return file.read(nbytes)
        except FileNotFoundError:
            return None

    def _make_room(self, nbytes: int) -> None:
        with self._lock, os.scandir(self.path) as entries:
            there = []
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    status = entry.stat()
                    if is_temporary(entry.name) and time.time() - status.st_mtime > _ABANDONED:
                        os.unlink(entry.path)
                    else:
                        there.append((entry, status))
            total = sum(status.st_size for _, status in there)
            if self.max_bytes is None:
                return
            for entry, status in sorted(there, key=lambda one: one[1].st_mtime_ns):
                if total + nbytes <= self.max_bytes:
                    return
                if f"sha256:{entry.name}" not in self._held and not is_temporary(entry.name):
                    Path(entry.path).unlink(missing_ok=True)
                    total -= status.st_size
        if total + nbytes > self.max_bytes:
            raise StoreFull(
                f"{self.path} has no room for {nbytes:,} bytes of an image: {total:,} of {self.max_bytes:,} are in use"
            )

    def _note(self, name: str) -> Path:
        return self.path / f"{hashlib.sha256(name.encode()).hexdigest()}.image"

    def _file(self, digest: str) -> Path:
        check_digest(digest)
        return self.path / digest.removeprefix("sha256:")
