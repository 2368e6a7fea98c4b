"""A sandbox as the tools of an agent use it, and hashes of its state that are read only after something was written.

A subclass says which files count (`AgentBox._script`). What a script said is known for all boxes with equal files: a
state that a fork or a restore comes back to is not read again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Protocol, Self

from sandboxgym.sandbox.base import Result, SandboxClosed, SandboxError
from sandboxgym.sandbox.layers.store import OverlayTree
from sandboxgym.sandbox.layers.written import Written, look, untouched
from sandboxgym.sandbox.sandbox import Sandbox, SnapshotMode
from sandboxgym.sandbox.shell.state import ShellState
from sandboxgym.sandbox.snapshot import SandboxSnapshot

READ = 4 * 2**20
"""Default limit in bytes of `AgentBox.read_file`: the editor makes several copies of a file."""
HASHED = "hashed"
"""Last line that the script of a box prints, when all was read."""
_RESTLESS = (b"SECONDS", b"COMP_WORDBREAKS")
"""Variables of bash that change by themselves."""
# What a script said of files that `Sandbox.written` told of.
_known: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()
_KNOWN = 4096
_known_lock = threading.Lock()


class AgentStart(Protocol):
    """A task's files and shell before any action."""

    @property
    def snapshot(self) -> SandboxSnapshot:
        """The captured state."""

    @property
    def digest(self) -> tuple[str, str]:
        """`AgentBox.digest` of the captured state."""


class AgentBox:
    """A sandbox with the files of a task.

    Args:
        sandbox: owned by this object from now on.
        reads: which of the files count, as text: boxes with equal ones know what others read.
    """

    def __init__(self, sandbox: Sandbox, *, reads: str) -> None:
        self.sandbox = sandbox
        self._reads = reads
        self._written_out: tuple[ShellState, str] | None = None

    def execute(self, command: str, *, timeout: float | None = None, raw: int = 0) -> Result:
        """Run a command in the persistent shell; ``raw``: bytes of its output to keep unchanged."""
        return self.sandbox.execute(command, timeout=timeout, raw=raw)

    def run(
        self, command: str, *, timeout: float | None = None, output: int | None = None, most: int | None = None
    ) -> Result:
        """Run a command in a bash of its own, independent of the shell's state; see `Sandbox.run`."""
        return self.sandbox.run(command, timeout=timeout, output=output, most=most)

    def read_file(self, path: str, *, limit: int = READ) -> bytes:
        """Read a file; `FileTooLarge` if it has more than ``limit`` bytes."""
        return self.sandbox.read_file(path, limit=limit)

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file."""
        self.sandbox.write_file(path, data, mode=mode)

    def restore(self, snapshot: SandboxSnapshot) -> None:
        """Restore a captured state."""
        self.sandbox.restore(snapshot)

    def close(self) -> None:
        """Close the sandbox. Idempotent."""
        self.sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generalised(self, text: str) -> str:
        """Replace this backend's paths by those of the task, for text that is shown."""
        return text

    def digest(self, *, alone: bool = False, timeout: float | None = None) -> tuple[str, str]:
        """Hashes of everything that can change later steps: of all of it, and of the task's files alone.

        Equal states have equal hashes. Both are empty where the files cannot be read: no process can be started for it,
        or they are not read within the time limit; and where the shell's state is too large to be read as a whole. Of
        the shell's state all counts except ``$?`` and ``$_``.

        Reading is done only after something was written (`Sandbox.written`), else it costs a look at the files that
        were; while more than the idle shell runs, always.

        Args:
            alone: it is known that nothing but the idle shell runs.
            timeout: seconds that reading may take; by default as a command.
        """
        return self.digest_of(self.files(alone=alone, timeout=timeout))

    def digest_of(self, files: tuple[str, str]) -> tuple[str, str]:
        """Compute `digest` from files that were already read (`files`)."""
        own, beside = files
        if not own:
            return "", ""
        shell = self._shell()
        if shell is None:
            return "", ""
        whole = "\0".join((own, beside, self.generalised(shell)))
        return hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest(), own

    def snapshot(self, *, strict: bool, mode: SnapshotMode | None = None) -> SandboxSnapshot:
        """Take a `Sandbox.snapshot`; known hashes of files are kept for it."""
        before = self.sandbox.written() if _known else None
        snapshot = self.sandbox.snapshot(strict=strict, mode=mode)
        tree = snapshot.tree
        # The layer that was written to is frozen now: what is seen of it is what was captured.
        if before is not None and isinstance(tree, OverlayTree) and tree.layers:
            below, _, seen = before.key.partition("/")
            frozen = look(tree.layers[0].files, below) if seen else before
            if snapshot.checkpoint is not None and (frozen is None or frozen.key != before.key):
                # The layer is a copy, and the sandbox went on: what has not been written to by now was not before.
                frozen = self.sandbox.written()
            if frozen is not None and frozen.key == before.key and (known := self._recall(before.key)) is not None:
                self.know(snapshot, known)
        return snapshot

    def know(self, snapshot: SandboxSnapshot, files: tuple[str, str]) -> None:
        """Note what `files` is of a captured state."""
        if isinstance(snapshot.tree, OverlayTree):
            self._learn(untouched(snapshot.tree.id), files)

    def files(self, *, alone: bool = False, timeout: float | None = None) -> tuple[str, str]:
        """Hash the task's files, and those beside them that count; empty where they cannot be read."""
        written = self.sandbox.written(alone=alone)
        known = None if written is None else self._recall(written.key)
        if known is not None:
            return known
        try:
            done = self.run(self._script(written), timeout=timeout)
        except OSError:  # there is no room for one more process, or no bash any more
            return "", ""
        own, _, beside = done.output.partition("\n")
        if done.timed_out or done.elided or not beside.endswith(f"{HASHED}\n"):
            return "", ""
        found = own, beside
        # Only the idle shell runs: nothing wrote while the files were read, in the tick of the last change or
        # after it, and from now on nothing can without a trace.
        if written is not None and written.settle() and self.sandbox.written(alone=alone) == written:
            self._learn(written.key, found)
        return found

    def _script(self, written: Written | None) -> str:
        """Commands that print a line about the task's files, any lines about others, and `HASHED`.

        They write nothing, and print `HASHED` only if all was read: a process that could not be started leaves a part
        out.
        """
        raise NotImplementedError

    def _shell(self) -> str | None:
        """State of the shell as text; None if it is not fully known, because it is too large, say."""
        try:
            state = self.sandbox.shell_state()
        except SandboxClosed:
            raise
        except SandboxError:
            return None
        if state is None:
            return ""
        if state.omitted:
            return None
        kept = {name: variable for name, variable in state.variables.items() if name not in _RESTLESS}
        state = replace(state, variables=kept, status=0, last=b"")
        if self._written_out is None or self._written_out[0] != state:
            self._written_out = state, state.script().decode("utf-8", "surrogateescape")
        return self._written_out[1]

    def _recall(self, key: str) -> tuple[str, str] | None:
        with _known_lock:
            found = _known.get((self._reads, key))
            if found is not None:
                _known.move_to_end((self._reads, key))
            return found

    def _learn(self, key: str, found: tuple[str, str]) -> None:
        with _known_lock:
            _known[self._reads, key] = found
            while len(_known) > _KNOWN:
                _known.popitem(last=False)
