"""The sandbox of an episode: live where it is used, captured where it only has to be kept.

1. `Workspace.stand_on` says where the next use begins; nothing is started for it. `Workspace.live` is the sandbox at
   the present state.
2. `Workspace.frozen` captures the present state once: until `Workspace.change` it is the same capture.
3. A sandbox that cannot be restored any more is replaced by a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from sandboxgym.errors import SnapshotError, from_handler
from sandboxgym.sandbox.agent.box import AgentBox
from sandboxgym.sandbox.base import SandboxClosed, SandboxError
from sandboxgym.sandbox.snapshot import SandboxSnapshot

log = logging.getLogger("sandboxgym")

BoxT = TypeVar("BoxT", bound=AgentBox)


class Workspace(Generic[BoxT]):
    """The sandbox of an episode; closed, and usable again, at first."""

    def __init__(self) -> None:
        self.box: BoxT | None = None
        """The sandbox, in any state; None before its first use."""
        self.gone = ""
        """Reason why there is no sandbox at the present state: it ended by itself."""
        self.digest: tuple[str, str] | None = None
        """`AgentBox.digest` of the present state, if it is known."""
        self._kind: object = None
        self._make: Callable[[], BoxT] | None = None
        self._current: SandboxSnapshot | None = None  # of the present state, until it changes
        self._stale = True  # the live sandbox is in another state
        self._seed: int | None = None

    def enter(self, kind: object, make: Callable[[], BoxT]) -> None:
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

    def opened(self) -> BoxT:
        """The sandbox in any state, for what does not depend on it."""
        if self.box is None:
            assert self._make is not None
            self.box = self._make()
        return self.box

    def live(self) -> BoxT:
        """The sandbox at the present state.

        Raises:
            SandboxError: there is none, and another one cannot be had.
        """
        if self.gone:
            raise SandboxClosed(self.gone)
        older = self.box is not None
        box = self.opened()
        if not self._stale:
            return box
        assert self._current is not None
        try:
            box.restore(self._current)
        except Exception as error:
            if not older or isinstance(error, SnapshotError) or from_handler(error):
                raise
            log.warning("a sandbox cannot be restored, and is replaced: %s", error)
            self.discard()
            box = self.opened()
            box.restore(self._current)
        self._stale = False
        if self._current.checkpoint is not None:  # its processes continue from here
            self.change()
        if self._seed is not None:
            box.sandbox.reseed(self._seed)
            self._seed = None
        return box

    def change(self) -> None:
        """Note that the state changes: capture and hash are no longer of the present one."""
        self.digest = None
        if self._current is not None:
            self._current.release()
            self._current = None

    def frozen(self, *, strict: bool, processes: bool = True) -> SandboxSnapshot:
        """A capture of the present state, which the caller owns.

        Args:
            strict: refuse to lose anything; see `Sandbox.snapshot`.
            processes: whether those that run are to be in it, where the sandbox can capture them.
        """
        if self._current is not None:
            return self._current.retain()
        assert self.box is not None
        snapshot = self.box.snapshot(strict=strict, mode=None if processes else "filesystem")
        idle = not snapshot.lossy and snapshot.checkpoint is None  # else running processes may change files
        if idle and (processes or self.box.sandbox.mode != "full"):
            self._current = snapshot.retain()
        return snapshot

    def is_gone(self) -> bool:
        """True if the live sandbox has ended."""
        try:
            if self.box is not None:
                self.box.sandbox.backend.processes()
        except SandboxError:
            return True
        return self.box is None

    def discard(self) -> None:
        """Close the sandbox, whatever state it is in; the next use makes another."""
        box, self.box, self._stale = self.box, None, True
        if box is not None:
            try:
                box.close()
            except Exception as error:
                if from_handler(error):
                    raise
                log.warning("a sandbox could not be closed: %s", error)

    def close(self) -> None:
        """Close the sandbox and give up the capture."""
        self.discard()
        self.change()
