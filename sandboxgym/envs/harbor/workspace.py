"""The sandbox of an episode: live where it is used, captured where it only has to be kept.

1. `Workspace.stand_on` says where the next use begins; nothing is started for it. `Workspace.live` is the sandbox at
   the present state.
2. `Workspace.frozen` captures the present state once: until `Workspace.change` it is the same capture.
3. A sandbox that cannot be restored any more is replaced by a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sandboxgym.errors import SnapshotError, from_handler
from sandboxgym.sandbox.base import READ_LIMIT, Result, SandboxClosed, SandboxError
from sandboxgym.sandbox.sandbox import Sandbox, SandboxSnapshot

log = logging.getLogger("sandboxgym")

READ = 4 * 2**20
"""Largest file in bytes that the editor reads: it makes several copies."""


class Workspace:
    """The sandbox of an episode; closed, and usable again, at first."""

    def __init__(self) -> None:
        self.gone = ""
        """Reason why there is no sandbox at the present state: it ended by itself."""
        self._sandbox: Sandbox | None = None
        self._kind: object = None
        self._make: Callable[[], Sandbox] | None = None
        self._current: SandboxSnapshot | None = None  # of the present state, until it changes
        self._stale = True  # the live sandbox is in another state
        self._seed: int | None = None

    def enter(self, kind: object, make: Callable[[], Sandbox]) -> None:
        """Use sandboxes of a kind; another's is closed."""
        if kind != self._kind:
            self.discard()
        self._kind, self._make = kind, make

    def stand_on(self, snapshot: SandboxSnapshot) -> None:
        """Make a captured state the present one."""
        held = snapshot.retain()
        self.change()
        self._current, self._stale, self._seed, self.gone = held, True, None, ""

    def reseed(self, seed: int) -> None:
        """Give the processes that are restored next other draws."""
        self._seed = seed

    def opened(self) -> Sandbox:
        """The sandbox in any state, for what does not depend on it."""
        if self._sandbox is None:
            assert self._make is not None
            self._sandbox = self._make()
        return self._sandbox

    def live(self) -> Sandbox:
        """The sandbox at the present state.

        Raises:
            SandboxError: there is none, and another one cannot be had.
        """
        if self.gone:
            raise SandboxClosed(self.gone)
        older = self._sandbox is not None
        sandbox = self.opened()
        if not self._stale:
            return sandbox
        assert self._current is not None
        try:
            sandbox.restore(self._current)
        except Exception as error:
            if not older or isinstance(error, SnapshotError) or from_handler(error):
                raise
            log.warning("a sandbox cannot be restored, and is replaced: %s", error)
            self.discard()
            sandbox = self.opened()
            sandbox.restore(self._current)
        self._stale = False
        if self._current.checkpoint is not None:  # its processes continue from here
            self.change()
        if self._seed is not None:
            sandbox.reseed(self._seed)
            self._seed = None
        return sandbox

    def change(self) -> None:
        """Note that the state changes: the capture is no longer of the present one."""
        if self._current is not None:
            self._current.release()
            self._current = None

    def frozen(self, *, strict: bool) -> SandboxSnapshot:
        """A capture of the present state, which the caller owns."""
        if self._current is not None:
            return self._current.retain()
        assert self._sandbox is not None
        snapshot = self._sandbox.snapshot(strict=strict)
        if not snapshot.lossy and snapshot.checkpoint is None:  # else running processes may change files
            self._current = snapshot.retain()
        return snapshot

    def is_gone(self) -> bool:
        """True if the live sandbox has ended."""
        try:
            if self._sandbox is not None:
                self._sandbox.backend.processes()
        except SandboxError:
            return True
        return self._sandbox is None

    def discard(self) -> None:
        """Close the sandbox, whatever state it is in; the next use makes another."""
        sandbox, self._sandbox, self._stale = self._sandbox, None, True
        if sandbox is not None:
            try:
                sandbox.close()
            except Exception as error:
                if from_handler(error):
                    raise
                log.warning("a sandbox could not be closed: %s", error)

    def close(self) -> None:
        """Close the sandbox and give up the capture."""
        self.discard()
        self.change()


class EditedFiles:
    """File operations of the editor in a sandbox, with a limit on what is read."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def read_file(self, path: str) -> bytes:
        """Read a file of at most `READ` bytes."""
        return self._sandbox.read_file(path, limit=min(READ, READ_LIMIT))

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file."""
        self._sandbox.write_file(path, data, mode=mode)

    def run(self, command: str) -> Result:
        """Run a command in a bash of its own, at the root: the agent may have removed the task's directory."""
        return self._sandbox.run(command, cwd="/")
