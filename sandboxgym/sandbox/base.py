"""The parts of every process sandbox: a `Backend` (files and processes) under a `Sandbox` (shell, snapshots).

1. A backend runs processes over a root file system and keeps their writes apart from it. It knows nothing of shells and
   tasks; ``sandbox.py`` builds those on top, the same for every backend.
2. A `FileTree` is the files of a sandbox at one instant: immutable, kept by its holders, given back by ``release`` or
   garbage collection. A sandbox starts on a tree and writes to a layer of its own.
3. A `Checkpointer` captures running processes beside the files, for the backends that have one.
4. State that a backend cannot keep, hide or limit is declared in its `Capabilities`, never left out in silence.
5. Nothing survives its owner: closing is idempotent, and the leftovers of a killed owner are cleared by
   ``run_directories.reap``.
"""

from __future__ import annotations

import contextlib
import errno
import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypedDict, Unpack, runtime_checkable

from sandboxgym.brief import brief
from sandboxgym.errors import OutsideError
from sandboxgym.sandbox.layers.written import Written
from sandboxgym.system import run_directories

if TYPE_CHECKING:
    from sandboxgym.sandbox.shell.bash_session import Shell

CONTROL = "/run/.sandboxgym"
"""Path of the control directory inside (`Backend.control`), except for backends without isolation."""
READ_LIMIT = 16 * 2**20
"""Bytes read of a file inside at most, by default."""
MOST_SECONDS = 1_000_000
"""Largest time limit in seconds: system calls that wait accept no more than some 25 days."""
LONGEST_COMMAND = 2 * 2**20
"""Characters of a command, or of text typed at one time, above which it is refused."""


class SandboxError(Exception):
    """Base class of all sandbox errors."""


class SandboxUnavailable(OutsideError, SandboxError):
    """The sandbox cannot run on this machine; the message names what is missing and how to get it."""


class SandboxClosed(OutsideError, SandboxError):
    """The sandbox was closed, or the owner of its processes died."""


class SandboxFull(OutsideError, SandboxError):
    """A disk limit named in the message was reached: that of the sandbox, or of the disk before it is full."""


class SnapshotLossy(SandboxError):
    """Raised with ``strict=True`` where a snapshot would lose the processes or descriptors listed in the message."""


class NotCaptured(SandboxError):
    """Running processes could not be captured; everything continues, as if nothing had been tried.

    Attributes:
        reasons: one sentence or obstacle each.
    """

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class FileTooLarge(OSError):
    """A file inside is larger than the limit of reading (``errno.EFBIG``); nothing of it was handed out."""

    @classmethod
    def of(cls, path: str, *, size: int | None, limit: int) -> Self:
        """The error for a file.

        Args:
            path: of it, inside.
            size: bytes that it holds; None if that is not known, for it has no size or grows.
            limit: bytes that would have been read.
        """
        holds = "more" if size is None else f"{size:,} bytes"
        return cls(errno.EFBIG, f"it holds {holds}, and at most {limit:,} bytes are read", path)


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandbox; None is no limit, except for ``seconds`` and ``output``.

    Raises:
        TypeError, ValueError: a field is no such number; the message names it.
    """

    seconds: float = 60.0
    """Wall time of one command, after which it is killed with all that it started."""
    memory: int | None = 4 * 2**30
    """Bytes of memory of all processes together; with rlimits only, of each."""
    processes: int | None = 512
    """Processes and threads at one time."""
    disk: int | None = 2 * 2**30
    """Bytes on the disk that the live sandbox wrote: files, directories, links, blocks that were only reserved, and
    files without a name that are open, mapped or under way through sockets."""
    output: int = 1_000_000
    """Bytes kept of one command's output: the first and the last half; the rest is counted and dropped."""
    files: int | None = 500_000
    """Files, directories and links that the live sandbox made, with or without a name."""

    def __post_init__(self) -> None:
        seconds: object = self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError(f"Limits.seconds: expected a number, found {brief(seconds, 80)}")
        if not 0 < seconds <= MOST_SECONDS:
            raise ValueError(
                f"Limits.seconds: expected more than 0 and at most {MOST_SECONDS:,}, found {brief(seconds, 80)}"
            )
        for name in ("memory", "processes", "disk", "output", "files"):
            value: object = getattr(self, name)
            if value is None and name != "output":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                or_none = "" if name == "output" else " or None"
                raise TypeError(f"Limits.{name}: expected a whole number{or_none}, found {brief(value, 80)}")
            if not 1 <= value < 2**63:
                raise ValueError(f"Limits.{name}: expected at least 1 and less than 2**63, found {brief(value, 80)}")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a backend on this machine."""

    name: str
    """``"overlay"``, ``"overlay-rootless"``, ``"docker"``, ``"copy"``, ``"e2b"``, or the name of a registered one."""
    isolated: bool
    """Processes see neither the host's files and processes nor other sandboxes."""
    network_off: bool
    """The network can be cut off."""
    owners: bool
    """Files may belong to several users, and their owners are kept."""
    snapshot_cost: Literal["constant", "written"]
    """Growth of a snapshot's cost."""
    limits: frozenset[str]
    """Names of `Limits` that hold for the sandbox as a whole: of ``memory``, ``processes``, ``disk``, ``files``,
    ``seconds``."""
    keeps: frozenset[str]
    """Properties of files that a tree keeps beside names and contents: of ``modes``, ``owners``, ``xattrs``,
    ``hardlinks``, ``sparse``, ``mtimes``, ``tmp`` (/tmp), ``shm`` (/dev/shm)."""
    private_ids: bool = False
    """Root inside is nobody outside: user ids that nothing else on the machine has, so that no right of the host's
    depends on system calls alone."""
    notes: tuple[str, ...] = ()
    """Notes for users of this backend, one sentence each."""
    leaves_open: frozenset[str] = frozenset()
    """Gaps of the isolation: ``locks`` (file locks, leases and notifications on files of the host that are
    shown inside), ``statistics`` (of the kernel, in /proc), ``quotas`` (what the kernel counts for each user or for the
    machine, as inotify instances), ``calls`` (system calls that somebody else's filter lets through), ``paths`` (of the
    host, in the table of mounts), ``burst`` (disk space beyond the limit, until somebody looks)."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a command: output, exit code, and the reason of an early end."""

    output: str
    """stdout and stderr in one stream, decoded as UTF-8 with backslash escapes for other bytes; bounded."""
    exit_code: int
    """Exit code as in a shell: 128 + signal for a killed process; 124 after a timeout."""
    seconds: float
    """Wall time."""
    timed_out: bool = False
    """The limit of wall time passed; ``output`` holds the text printed until then."""
    elided: int = 0
    """Bytes of output that were dropped from the middle."""
    syntax_error: bool = False
    """The command does not parse; it was not run, ``output`` is bash's message."""
    ended: bool = False
    """The command ended the shell (``exit``, ``exec``, ``set -e``); a new one with the last known state replaced it."""
    replaced: bool = False
    """The shell had ended since the command before, or could not continue; this one ran in a new one with the last
    known state."""
    raw: bytes = field(default=b"", repr=False)
    """The first bytes of the output as they were written, as many as were asked for; none by default."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A live process of a sandbox."""

    pid: int
    """Process id on the host (or for the container daemon)."""
    parent: int
    command: str
    """Command line, up to a kilobyte; bytes that are not text as backslash escapes."""
    descriptors: tuple[str, ...] = ()
    """Targets of its file descriptors above 2, as ``"7 -> /tmp/log"``; only the first, if there are many."""


class Process(Protocol):
    """A process that was started in a sandbox; its exit collects its whole session."""

    terminal: int | None
    """The master side of its terminal, if it was started with one."""
    output: int | None
    """The reading side of its stdout and stderr in one pipe, if it was started without a terminal."""
    relayed: bool
    """Another process copies its output into the pipe: the last of it may arrive after the process ended."""

    @property
    def pid(self) -> int | None:
        """Process id on the host; None where it cannot be known."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end: the exit status (128 + signal if killed), or None after ``timeout`` seconds."""

    def kill(self) -> None:
        """Kill the process and all that it started. Idempotent."""

    def close(self) -> None:
        """Close the descriptors held by this process. Idempotent."""


@runtime_checkable
class FileTree(Protocol):
    """The files of a sandbox at one instant, immutable."""

    id: str
    base: str
    """Identity of the root file system below all writes."""

    @property
    def nbytes(self) -> int:
        """Bytes on disk used by what was written (shared layers count)."""

    def pack(self) -> bytes:
        """Everything written since the base, as a tar archive for `Backend.unpack` (deletions included)."""

    def retain(self) -> FileTree:
        """Another hold on the same tree, released independently."""

    def release(self) -> None:
        """Give up this hold; the last one deletes the files. Idempotent; also happens at garbage collection."""


class Checkpoint(Protocol):
    """The running processes of a snapshot, beside its files; immutable."""

    @property
    def nbytes(self) -> int:
        """Bytes that they take, beside the files."""

    @property
    def seconds(self) -> float:
        """Seconds until they were captured, during most of which they are stopped."""

    def retain(self) -> Checkpoint:
        """Another hold on the same checkpoint, released independently."""

    def release(self) -> None:
        """Give up this hold; the last one deletes it. Idempotent."""


class Checkpointer(Protocol):
    """Capture and restore of the running processes of one backend; `prepare` is called first, and once."""

    @abstractmethod
    def prepare(self, lazy_pages: int | None) -> None:
        """Make the backend, which is not started, ready for its processes to be captured.

        Args:
            lazy_pages: bytes of memory from which on it is restored lazily, while the processes run, where that is
                possible; None: never.

        Raises:
            SandboxUnavailable: processes cannot be captured here; the message says why and how to get it.
        """

    @abstractmethod
    def obstacles(self, shell: Shell) -> tuple[str, ...]:
        """Known reasons why a capture would fail now, one sentence each; empty if there is none.

        Args:
            shell: of the live sandbox; all that can be captured descends from it.
        """

    @abstractmethod
    def capture(self, shell: Shell) -> tuple[FileTree, Checkpoint]:
        """Capture files and processes of the live sandbox at one instant; it continues as if nothing had happened.

        Args:
            shell: of the live sandbox.

        Raises:
            NotCaptured: it cannot be done.
            SandboxFull: there is no room for it; everything continues.
            SandboxClosed: the sandbox has ended.
        """

    @abstractmethod
    def restore(
        self, tree: FileTree, checkpoint: Checkpoint, *, env: Mapping[str, str], cwd: str, output: int
    ) -> Shell:
        """Start the backend with copies of captured processes, ending what ran before; returns their live shell.

        Args:
            tree: captured with the checkpoint, by a backend of the same kind.
            checkpoint: which stays as it is.
            env: of later shells, as for any `Shell`.
            cwd: see there.
            output: see there.

        Raises:
            SandboxUnavailable, SandboxFull: it could not be done, and the backend is not live.
        """


class Streams(TypedDict, total=False):
    """Ends of a process; see `Backend.spawn`."""

    terminal: bool
    stdin: int | None


class Backend(Protocol):
    """Files and processes of one live sandbox, to be derived from. Not thread-safe; several may share a store.

    Each takes the trees of its own kind only.
    """

    capabilities: Capabilities
    control_inside: str
    """Path of `control` inside: `CONTROL`, except for backends without isolation."""

    @property
    @abstractmethod
    def control(self) -> Path:
        """Directory of the live sandbox for the pipes and scripts of its shell, as this process can open it.

        It is fresh whenever the sandbox is started, and part of no tree: nothing in it outlives what is live.
        """

    @abstractmethod
    def shell_directory(self) -> Path:
        """A directory below `control` for one more shell: with the files that the shell may write to, or writable."""

    @abstractmethod
    def base(self) -> FileTree:
        """The root file system as a tree with nothing written. Starts nothing."""

    @abstractmethod
    def start(self, tree: FileTree | None = None) -> None:
        """Start on ``tree`` (default: `base`) with no process but the init; ends what ran before.

        Raises:
            SandboxUnavailable, SandboxFull: and nothing is left behind.
        """

    @property
    @abstractmethod
    def live(self) -> bool:
        """True if started and neither closed nor committed, and the processes were not killed from outside."""

    @abstractmethod
    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = "/", **streams: Unpack[Streams]
    ) -> Process:
        """Start a process in the live sandbox.

        Args:
            argv: program (looked up in ``env["PATH"]``) and arguments.
            env: the whole environment.
            cwd: directory inside.
            terminal: give it a terminal of its own (200 columns, no echo) as controlling terminal, else one pipe
                for stdout and stderr.
            stdin: a descriptor to read from (without a terminal only); default: ``/dev/null``.
        """

    @abstractmethod
    def processes(self) -> list[ProcessInfo]:
        """The processes inside, without the init of the sandbox."""

    @abstractmethod
    def kill(self, pids: Iterable[int]) -> None:
        """Kill processes by the numbers of `processes`; those gone already are ignored."""

    @abstractmethod
    def written(self) -> Written | None:
        """Status of the files written since the start, read without their content (`written.look`); None where hidden.

        Raises:
            SandboxClosed: nothing is live.
        """

    @abstractmethod
    def layers_above(self, tree: FileTree) -> list[Path] | None:
        """Directories of the files written since a tree was the present state, the last one first.

        They are in the format of overlayfs. None where they cannot be seen, or where it is unknown whether the present
        state comes from that tree.

        Raises:
            SandboxClosed: nothing is live.
        """

    @abstractmethod
    def losses(self) -> tuple[str, ...]:
        """Descriptions of the losses of a tree taken now, beyond those that the capabilities declare for every tree.

        Raises:
            SandboxClosed: nothing is live.
        """

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Context in which no process inside runs, except where the capabilities' notes say otherwise.

        What is killed meanwhile does not run again: it has ended soon after. Not to be nested; nothing can be started.

        Raises:
            SandboxClosed: there is nothing that runs.
        """

    @abstractmethod
    def commit(self, *, keep_processes: bool = False) -> FileTree:
        """Make a tree of the present files.

        Without ``keep_processes`` every process is ended first and the backend is no longer live: constant time where
        the capabilities say so. With it they are stopped, the files copied, and they continue: the cost grows with what
        was written, and the sandbox is not disturbed.
        """

    @abstractmethod
    def unpack(self, archive: bytes) -> FileTree:
        """Make a tree from the archive of `FileTree.pack`, on the same base.

        Raises:
            SnapshotCorrupt: not such an archive, or with a member that leaves the root, is a device or setuid; nothing
                was written outside.
            SnapshotMismatch: of another base.
        """

    @abstractmethod
    def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """Read a regular file, with links resolved inside the sandbox.

        Args:
            path: absolute, inside.
            limit: bytes that it may hold.

        Raises:
            FileTooLarge: it holds more; found out before it is read, where it has a size.
            OSError: as `open` would, with the path as seen inside; no regular file; not read in time.
        """

    @abstractmethod
    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file as the sandbox's user, making missing parent directories."""

    @property
    def checkpointer(self) -> Checkpointer | None:
        """A new checkpointer of this backend; None if its running processes cannot be captured: the default."""
        return None

    def shell(self, *, env: Mapping[str, str], cwd: str, output: int) -> Shell | None:
        """A shell of the backend's own making; by default None, for one on a terminal with files in `control`.

        Its state must be in the files of the sandbox, for nothing else is handed to the shell of a copy.

        Args:
            env: as for any `Shell`, and so the others.
            cwd: see there.
            output: see there.
        """
        return None

    def relocate(self, text: str, tree: FileTree) -> str:
        """Text with paths of the sandbox that a tree was taken in replaced by those of the live one.

        They differ only where sandboxes are not isolated: by default the text itself.
        """
        return text

    @abstractmethod
    def sibling(self) -> Backend:
        """Another backend of the same kind, root file system, limits and store, not started."""

    @abstractmethod
    def close(self) -> None:
        """End every process, unmount, delete the files that no tree holds. Idempotent."""


@dataclass(frozen=True, slots=True)
class RootFS:
    """A read-only root file system under sandboxes."""

    id: str
    """Identity of the content: an image's id, or a digest of a directory as far as it is known."""
    lowers: tuple[Path, ...]
    """Directories, topmost first, as overlayfs takes them; one for an unpacked directory."""
    binds: tuple[tuple[Path, str], ...] = ()
    """Directories and files of the host shown read-only at a path inside: (host path, inside path)."""
    env: Mapping[str, str] | None = None
    """Environment of its processes (an image's ENV, or PATH of the host's tool chain)."""
    workdir: str = "/"


def clean_environment(rootfs: RootFS, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a sandbox's processes, without any variable of the host's."""
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/bash",
    }
    return {**env, **(rootfs.env or {}), **(extra or {})}


def new_shell_directory(control: Path) -> Path:
    """A directory that the sandbox's user can write to, below a control directory on disk; earlier ones are removed."""
    for earlier in list(control.iterdir()):
        with contextlib.suppress(OSError):  # another user's, without root
            run_directories.remove_tree(earlier)
    folder = control / f"shell.{os.urandom(4).hex()}"
    folder.mkdir()
    folder.chmod(0o777)  # who may be another one
    return folder


def check_inside(path: str) -> str:
    """Return ``path`` if it is absolute and plain.

    Raises:
        ValueError: it is relative, or holds a null byte.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise ValueError(f"expected an absolute path inside the sandbox, found {path!r}")
    return os.path.normpath(path)
