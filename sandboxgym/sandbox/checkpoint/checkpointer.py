"""`CriuCheckpointer`: the running processes of an overlay sandbox, captured and restored with CRIU.

The rest of the package reaches this room through this class only, by `overlay.backend.criu_checkpointer`. As a program,
``python -m sandboxgym.sandbox.checkpoint.checkpointer``, it tests CRIU on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from sandboxgym.errors import SnapshotMismatch
from sandboxgym.sandbox import base
from sandboxgym.sandbox.base import NotCaptured, SandboxError, SandboxUnavailable
from sandboxgym.sandbox.checkpoint import capture, criu, preflight, restore
from sandboxgym.sandbox.checkpoint.criu import CriuError
from sandboxgym.sandbox.checkpoint.image import CriuCheckpoint
from sandboxgym.sandbox.layers.store import OverlayTree
from sandboxgym.sandbox.shell.bash_session import Shell

if TYPE_CHECKING:
    from sandboxgym.sandbox.overlay.backend import OverlayBackend


class CriuCheckpointer(base.Checkpointer):
    """Checkpointer of one overlay backend as root; see `base.Checkpointer`.

    Args:
        backend: whose processes it captures.
    """

    HOW_TO_GET = criu.HOW_TO_GET
    """Advice for where there is no CRIU."""
    SECONDS = criu.SECONDS
    """Seconds in which the program of this module must answer."""

    candidates = staticmethod(criu.candidates)
    why_unavailable = staticmethod(criu.why_unavailable)

    def __init__(self, backend: OverlayBackend) -> None:
        self._backend = backend
        self._program: str | None = None

    @staticmethod
    def version() -> str | None:
        """Version of the CRIU that works here; None if there is none."""
        program = criu.find()
        return None if program is None else criu.version(program)

    @staticmethod
    def why_not_lazy() -> str | None:
        """Reason why captured memory can only be restored as a whole here; None if also as it is touched."""
        program = criu.find()
        return None if program is not None and criu.brings_pages(program) else criu.NO_PAGES

    def prepare(self, lazy_pages: int | None) -> None:
        """Find the CRIU that works here, and have containers made that it can capture.

        Raises:
            SandboxUnavailable: there is none; the message says why and how to get it.
        """
        if reason := criu.why_unavailable():
            raise SandboxUnavailable(reason)
        program = criu.find()
        assert program is not None
        backend = self._backend
        backend.keep_processes(lazy_pages=lazy_pages)
        if lazy_pages is not None and not criu.brings_pages(program):
            note = f"Captured memory is restored as a whole, for {criu.NO_PAGES}."
            backend.capabilities = replace(backend.capabilities, notes=(*backend.capabilities.notes, note))
        self._program = program

    def obstacles(self, shell: Shell) -> tuple[str, ...]:
        """Known obstacles to capturing the live container; see `preflight.obstacles`."""
        if shell.pid is None:
            return ("no shell was started",)
        backend = self._backend
        assert backend.container is not None
        return preflight.obstacles(backend.container.pid, shell.pid, network=backend.network)

    def capture(self, shell: Shell) -> tuple[OverlayTree, CriuCheckpoint]:
        """Capture the live container, which continues, or a copy in its place; see `capture.snapshot`."""
        try:
            return capture.snapshot(self._backend, shell, self._prepared(), obstacles=lambda: self.obstacles(shell))
        except CriuError as error:
            raise NotCaptured((f"not captured: {error}",)) from error

    def restore(
        self,
        tree: base.FileTree,
        checkpoint: base.Checkpoint,
        *,
        env: Mapping[str, str],
        cwd: str,
        output: int,
    ) -> Shell:
        """Start a container on the tree with copies of the captured processes; see `restore.fork`."""
        if not (isinstance(tree, OverlayTree) and isinstance(checkpoint, CriuCheckpoint)):
            raise SnapshotMismatch(f"expected processes captured by CRIU, found {checkpoint!r} with {tree!r}")
        backend, program = self._backend, self._prepared()
        backend.part().give_back()
        process = restore.fork(backend, tree, checkpoint.image, program)
        return Shell.restored(backend, process, checkpoint.session, env=env, cwd=cwd, output=output)

    def _prepared(self) -> str:
        if self._program is None:
            raise SandboxError(
                f"expected a checkpointer that was prepared, found one of {self._backend!r} that was not"
            )
        return self._program


def _main() -> int:
    """Print, for ``sandboxgym doctor``, the CRIU that works, or why none does."""
    program = criu.find()
    if program is None:
        print("; ".join(criu.failures()))
        return 1
    memory = "as it is touched" if criu.brings_pages(program) else f"as a whole, for {criu.NO_PAGES}"
    print(f"version {criu.version(program)} at {program}; much memory is restored {memory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
