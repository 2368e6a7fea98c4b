"""CRIU's images of the processes of a container at one instant, kept in the store of layers."""

from __future__ import annotations

import os
import shutil
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxgym.sandbox.base import SandboxClosed
from sandboxgym.sandbox.checkpoint.criu import Value
from sandboxgym.sandbox.layers.store import LayerStore, StoredLayer
from sandboxgym.sandbox.overlay.mounts import SHELL
from sandboxgym.sandbox.shell.bash_session import ShellSession

TIMEOUT = 60
"""Seconds that CRIU may take to stop processes."""
_IMAGES, _CONTROL = "images", "control"
_IGNORE_CGROUPS, _NO_NETWORK_LOCK = 0, 3
OPTIONS: Mapping[str, Value] = {
    "images_dir_fd": -1,
    "log_level": 2,
    # Restored processes stay in the control group of the CRIU that makes them, which is the container's already.
    "manage_cgroups_mode": _IGNORE_CGROUPS,
    # Locking would run iptables; no peer is outside, for `preflight` refuses such connections.
    "network_lock": _NO_NETWORK_LOCK,
    # Without these two CRIU refuses connected TCP sockets and held file locks.
    "tcp_established": True,
    "file_locks": True,
    # The master side of the shell's terminal is held outside: a restoring CRIU makes a new one and sends it.
    "orphan_pts_master": True,
    "timeout": TIMEOUT,
}
"""Options of every CRIU request."""


@dataclass(frozen=True, slots=True)
class Content:
    """Metadata of CRIU's image of a container's processes."""

    leader: int
    """Process id of the shell, inside."""
    last_pid: int
    mounts: Mapping[str, str]
    """Mounts that CRIU does not capture: mount point inside, and the mounted place of `mounts.for_criu`."""
    resident: int
    """Bytes of memory in the image."""
    seconds: float
    """Seconds from the request to the processes stopped and written."""


class ProcessImage:
    """CRIU's image of the processes of a container at one instant; immutable.

    Args:
        store: which keeps it.
        layer: whose directory holds it; the image takes a hold of its own.
        content: of it.
    """

    def __init__(self, store: LayerStore, layer: StoredLayer, content: Content) -> None:
        store.hold([layer])
        self._store, self._layer, self.content = store, layer, content
        self._finalizer = weakref.finalize(self, store.drop, [layer])
        self._finalizer.atexit = False  # the whole store goes then

    @property
    def path(self) -> Path:
        """Directory of the image.

        Raises:
            SandboxClosed: it was released.
        """
        if not self._finalizer.alive:
            raise SandboxClosed("the image was released, and its files are gone")
        return self._layer.path

    @property
    def files(self) -> Path:
        """Directory of the files that CRIU wrote."""
        return images_of(self.path)

    @property
    def control(self) -> Path:
        """Copy of the control directory at the instant of the capture."""
        return control_of(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(entry.stat().st_size for entry in os.scandir(self.files))

    def retain(self) -> ProcessImage:
        """Another hold on the same image, released independently."""
        assert self.path
        return ProcessImage(self._store, self._layer, self.content)

    def release(self) -> None:
        """Give up this hold. Idempotent."""
        self._finalizer()


@dataclass(frozen=True, slots=True)
class CriuCheckpoint:
    """The processes of a snapshot, beside its files: their image and the state of the shell. See `base.Checkpoint`."""

    image: ProcessImage
    session: ShellSession

    @property
    def nbytes(self) -> int:
        """Bytes of the image on disk."""
        return self.image.nbytes

    @property
    def seconds(self) -> float:
        """Seconds until the processes were captured, during most of which they are stopped."""
        return self.image.content.seconds

    def retain(self) -> CriuCheckpoint:
        """Another hold on the same checkpoint, released independently."""
        return CriuCheckpoint(self.image.retain(), self.session)

    def release(self) -> None:
        """Give up this hold. Idempotent."""
        self.image.release()


def images_of(layer: Path) -> Path:
    """Directory of CRIU's files in the directory of a layer."""
    return layer / _IMAGES


def control_of(layer: Path) -> Path:
    """Directory of the control directory's copy in the directory of a layer."""
    return layer / _CONTROL


def copy_control(source: Path, target: Path) -> None:
    """Copy the directory of a shell: small files, in place where they exist already, and new pipes."""
    for folder in (source / SHELL, target / SHELL):
        folder.mkdir(parents=True, exist_ok=True)
    for entry in os.scandir(source / SHELL):
        copy = target / SHELL / entry.name
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISFIFO(status.st_mode):
            os.mkfifo(copy)
        elif stat.S_ISREG(status.st_mode):
            shutil.copyfile(entry.path, copy, follow_symlinks=False)
        else:
            continue
        copy.chmod(stat.S_IMODE(status.st_mode))
