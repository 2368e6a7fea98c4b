"""Store of layers: immutable directories shared by trees, and one writable directory per container.

1. A layer is the writes of one container, as overlayfs keeps them: deletions are whiteouts, a replaced directory is
   opaque. Once frozen it never changes, and a container that continues writes to a layer of its own.
2. A tree is a stack of frozen layers over a root file system. It holds its layers; a layer that nobody holds is
   deleted in the background.
3. A directory is never the upper layer of two mounts, nor the upper layer of one and a lower layer of another:
   overlayfs does not define the result.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxgym.sandbox.base import RootFS, SandboxClosed, SandboxFull
from sandboxgym.sandbox.layers.disk import extent, usage
from sandboxgym.system import directories

FILES, WORK = "files", "work"
"""Parts of a layer's directory: the written files, and overlayfs's scratch directory."""
FLOOR = 512 * 2**20
"""Free bytes that a store's file system must have for a new container."""
FLOOR_FILES = 10_000
"""Free files that a store's file system must have, if it counts them."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Facts about a frozen layer's part of an archive."""

    pieces: tuple[tuple[str, int], ...]
    """Digest and length of each piece, in order."""
    members: int


class StoredLayer:
    """One directory of a store, with the number of its holds.

    Args:
        store: whose trees it is in.
        path: of the directory.
        borrowed: it lies elsewhere, others use it too, and it stays when nobody here holds it any more.
    """

    def __init__(self, store: LayerStore, path: Path, *, borrowed: bool = False) -> None:
        self.store = store
        self.path = path
        self.borrowed = borrowed
        self.holds = 1
        self.redirects: bool | None = None
        """True if a directory in it was renamed; None until that is known."""
        self.packed: Packed | None = None
        """Part of an archive that holds the layer, once it was packed."""
        self._nbytes: int | None = None
        self._dress: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"StoredLayer({self.path.name!r}, holds={self.holds})"

    @property
    def files(self) -> Path:
        """Directory of the written files."""
        return self.path / FILES

    @property
    def work(self) -> Path:
        """Scratch directory of overlayfs."""
        return self.path / WORK

    @property
    def nbytes(self) -> int:
        """Bytes on disk; counted once, for a frozen layer."""
        if self._nbytes is None:
            self._nbytes = usage(str(self.files))
        return self._nbytes

    def extent(self, files: int, nbytes: int) -> int | None:
        """Bytes on disk of a layer that is written to; None if it has more than so many entries or bytes."""
        return extent(str(self.files), files, nbytes)

    def dress(self, below: Path) -> None:
        """Give the root directory the owner, mode and time of the one that it will hide."""
        status = below.stat()
        with contextlib.suppress(PermissionError):  # without privileges there is one owner
            os.chown(self.files, status.st_uid, status.st_gid)
        self.files.chmod(stat.S_IMODE(status.st_mode))
        os.utime(self.files, ns=(status.st_atime_ns, status.st_mtime_ns))
        self._dress = _dress(self.files)

    def untouched(self) -> bool:
        """True if nothing was written since `dress`."""
        with os.scandir(self.files) as entries:
            return next(entries, None) is None and _dress(self.files) == self._dress


def _dress(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns


class LayerStore:
    """The layers under one directory.

    Args:
        directory: on a file system that overlayfs can write to; nobody else's.
        remove: called with paths to delete, now or later.
    """

    def __init__(self, directory: Path, *, remove: Callable[[Sequence[str]], None]) -> None:
        self.directory = directory
        self.pid = os.getpid()
        self._remove = remove
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.merged: weakref.WeakValueDictionary[tuple[Path, ...], StoredLayer] = weakref.WeakValueDictionary()
        (directory / "layers").mkdir()
        directories.spread(str(directory / "layers"))

    def check_room(self, nbytes: int = 0) -> None:
        """Raise `SandboxFull` while the disk is nearly full.

        Args:
            nbytes: that will be written at once.

        Raises:
            SandboxFull: less than `FLOOR` bytes are free beside these, or there is room for less than `FLOOR_FILES`.
        """
        status = os.statvfs(self.directory)
        free = status.f_bavail * status.f_frsize
        if free < FLOOR + nbytes:
            raise SandboxFull(
                f"{free / 2**20:,.0f} MiB are free where sandboxes write ({self.directory}), expected at least "
                f"{(FLOOR + nbytes) / 2**20:,.0f}: release snapshots, or set SANDBOXGYM_RUNTIME to a directory on a "
                "larger disk"
            )
        if status.f_files and status.f_favail < FLOOR_FILES:
            raise SandboxFull(
                f"there is room for {status.f_favail:,} files where sandboxes write ({self.directory}), expected at "
                f"least {FLOOR_FILES:,}: release snapshots, or set SANDBOXGYM_RUNTIME to a directory on a disk with "
                "more inodes"
            )

    def name(self) -> Path:
        """Path for a new layer."""
        return self.directory / "layers" / str(next(self._numbers))

    def adopt(self, path: Path) -> StoredLayer:
        """Take over the layer at a path of `name`, whose directories exist; held once."""
        return StoredLayer(self, path)

    def borrow(self, path: Path) -> StoredLayer:
        """A frozen layer at another path, in the form of the layers here; held once and never deleted.

        Whoever lends it keeps it as it is for as long as the object lives.
        """
        return StoredLayer(self, path, borrowed=True)

    def new(self) -> StoredLayer:
        """An empty layer, held once."""
        path = self.name()
        make_layer_directories(path)
        return self.adopt(path)

    def hold(self, layers: Sequence[StoredLayer]) -> None:
        """Add a hold to each layer.

        Raises:
            SandboxClosed: one of them is gone.
        """
        with self._lock:
            if any(layer.holds == 0 for layer in layers):
                raise SandboxClosed("the tree was released, and its files are gone")
            for layer in layers:
                layer.holds += 1

    def drop(self, layers: Sequence[StoredLayer]) -> None:
        """Give up a hold on each layer; those without holds are deleted. Does nothing in a fork of the owner."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            gone = []
            for layer in layers:
                layer.holds -= 1
                if layer.holds == 0 and not layer.borrowed:
                    gone.append(str(layer.path))
        if gone:
            self._remove(gone)


def make_layer_directories(path: Path) -> None:
    """Make the directories of an empty layer."""
    path.mkdir()
    (path / FILES).mkdir()
    (path / WORK).mkdir()


class _Hold:
    """Hold on the layers of a tree; squashing replaces them by fewer."""

    def __init__(self, store: LayerStore, layers: tuple[StoredLayer, ...]) -> None:
        self.store = store
        self.layers = layers

    def replace(self, layers: tuple[StoredLayer, ...]) -> None:
        self.store.hold(layers)
        old, self.layers = self.layers, layers
        self.store.drop(old)

    def drop(self) -> None:
        layers, self.layers = self.layers, ()
        self.store.drop(layers)


class OverlayTree:
    """A stack of frozen layers over a root file system.

    Args:
        store: of the layers.
        rootfs: below them.
        layers: topmost first; the tree takes a hold of its own.
        rootless: True if they were written without privileges, which overlayfs marks in another way.
        identity: of the tree; default: a new one.
    """

    def __init__(
        self,
        store: LayerStore,
        rootfs: RootFS,
        layers: Sequence[StoredLayer],
        *,
        rootless: bool,
        identity: str | None = None,
    ) -> None:
        store.hold(layers)
        self.id = identity or uuid.uuid4().hex
        self.base = rootfs.id
        self.rootfs = rootfs
        self.rootless = rootless
        self._hold = _Hold(store, tuple(layers))
        self._finalizer = weakref.finalize(self, self._hold.drop)
        self._finalizer.atexit = False  # the whole store goes then

    def __repr__(self) -> str:
        return f"OverlayTree({self.id[:8]}, {len(self._hold.layers)} layers over {self.base})"

    @property
    def layers(self) -> tuple[StoredLayer, ...]:
        """Layers, topmost first.

        Raises:
            SandboxClosed: the tree was released.
        """
        if not self._finalizer.alive:
            raise SandboxClosed("the tree was released, and its files are gone")
        return self._hold.layers

    @property
    def store(self) -> LayerStore:
        """Store that holds its layers."""
        return self._hold.store

    @property
    def nbytes(self) -> int:
        """Bytes on disk of its layers; those that other trees share count too."""
        return sum(layer.nbytes for layer in self.layers)

    def replace_layers(self, layers: Sequence[StoredLayer]) -> None:
        """Replace the layers by others with the same files."""
        self._hold.replace(tuple(layers))

    def pack(self) -> bytes:
        """Everything written since the base, as `archive.pack` gives it."""
        from sandboxgym.sandbox.files import archive

        return archive.pack(self)

    def retain(self) -> OverlayTree:
        """Another hold on the same files, released independently."""
        return OverlayTree(self.store, self.rootfs, self.layers, rootless=self.rootless, identity=self.id)

    def release(self) -> None:
        """Give up this hold. Idempotent."""
        self._finalizer()
