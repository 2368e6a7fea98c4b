"""`SandboxSnapshot`: files, shell and, where they were captured, processes of a sandbox at one instant."""

from __future__ import annotations

from typing import Any

from sandboxgym import serialization
from sandboxgym.errors import SnapshotNotSupported, SnapshotReleased
from sandboxgym.sandbox.base import Checkpoint, FileTree
from sandboxgym.sandbox.files.pieces import pieces_of
from sandboxgym.sandbox.shell.state import ShellState
from sandboxgym.serialization import Piece

VERSION = 1
"""Version of the packed form of snapshots."""


class SandboxSnapshot:
    """Files and shell of a sandbox at one instant, immutable.

    Attributes:
        shell: the shell's state; None if no shell had been started.
        lossy: losses of a restored copy, one description each.
        checkpoint: the running processes, if they were captured too.
    """

    __slots__ = ("_tree", "checkpoint", "lossy", "shell")

    def __init__(
        self,
        tree: FileTree,
        shell: ShellState | None,
        lossy: tuple[str, ...] = (),
        *,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._tree: FileTree | None = tree
        self.shell = shell
        self.lossy = lossy
        self.checkpoint = checkpoint

    def __repr__(self) -> str:
        what = "released" if self._tree is None else f"{self._tree.id}, {self._tree.nbytes} bytes"
        return (
            f"<SandboxSnapshot {what}{', lossy' if self.lossy else ''}{', with processes' if self.checkpoint else ''}>"
        )

    @property
    def tree(self) -> FileTree:
        """The files of the snapshot.

        Raises:
            SnapshotReleased: they were given up.
        """
        if self._tree is None:
            raise SnapshotReleased("this snapshot was released: its files are gone")
        return self._tree

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the written files, and of the processes' memory."""
        return self.tree.nbytes + (self.checkpoint.nbytes if self.checkpoint else 0)

    def retain(self) -> SandboxSnapshot:
        """Another hold on the same snapshot, released independently."""
        checkpoint = None if self.checkpoint is None else self.checkpoint.retain()
        return SandboxSnapshot(self.tree.retain(), self.shell, self.lossy, checkpoint=checkpoint)

    def files(self) -> SandboxSnapshot:
        """Another hold on the same files and shell, without the processes."""
        return SandboxSnapshot(self.tree.retain(), self.shell, self.lossy)

    def release(self) -> None:
        """Give up this hold; the last one deletes the files. Idempotent; also happens at garbage collection."""
        if self._tree is not None:
            self._tree.release()
            self._tree = None
            if self.checkpoint is not None:
                self.checkpoint.release()

    def pack(self) -> bytes:
        """Encode as bytes for `Sandbox.unpack`, also on another machine with the same root file system.

        Raises:
            SnapshotNotSupported: it holds running processes, which belong to this machine.
        """
        return serialization.pack(self._content(self._portable().pack()))

    def pieces(self) -> list[Piece]:
        """`pack` for a store that keeps equal bytes once: joined, they are arguments of `Sandbox.unpack`.

        Files that did not change since an earlier snapshot are in pieces that are equal to its own. They can be read
        for as long as the snapshot is held.

        Raises:
            SnapshotNotSupported: it holds running processes, which belong to this machine.
        """
        return serialization.pack_around(self._content, pieces_of(self._portable()))

    def _portable(self) -> FileTree:
        if self.checkpoint is not None:
            raise SnapshotNotSupported(
                "a snapshot with running processes cannot leave this process: end them, or take the snapshot with "
                'snapshot(mode="filesystem")'
            )
        return self.tree

    def _content(self, tree: bytes) -> dict[str, Any]:
        return {
            "version": VERSION,
            "base": self.tree.base,
            "tree": tree,
            "shell": None if self.shell is None else self.shell.to_plain(),
            "lossy": list(self.lossy),
        }
