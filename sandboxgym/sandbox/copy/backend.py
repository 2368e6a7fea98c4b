"""The ``copy`` backend: copies of a directory and plain processes, for machines without namespaces or Docker.

1. There is no isolation. Commands run as this user, on this machine's files, with its network; only their working
   directory, HOME and TMPDIR lie in a private directory (`CopyBackend.root`), the one part of the files that is
   snapshotted. It is made only with ``allow_unsafe=True``.
2. Paths are not remapped: they are equal inside and outside, and a file that another backend has at ``/testbed`` is at
   ``{root}/testbed`` here (`CopyBackend.inside`). Files are written under the root only.
3. A restored sandbox keeps its root's path, so that its programs notice nothing. A fork has another root: absolute
   links into the old root are redirected, text in files and in the shell's state is not (`CopyBackend.relocate` does it
   for text).
4. Processes are found by a mark in their environment, their session and their parents, and killed at the end. One that
   clears its environment, leaves its session and outlives its parents is not found.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, Unpack

from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt
from sandboxgym.sandbox.base import (
    READ_LIMIT,
    Backend,
    Capabilities,
    FileTree,
    Limits,
    ProcessInfo,
    RootFS,
    SandboxClosed,
    SandboxError,
    SandboxUnavailable,
    Streams,
    check_inside,
    new_shell_directory,
)
from sandboxgym.sandbox.copy.processes import (
    MARK,
    SESSIONS,
    end_all,
    end_session,
    exit_status,
    go_on,
    has_ended,
    processes_of,
    stop_all,
)
from sandboxgym.sandbox.files.copy import copy_tree
from sandboxgym.sandbox.files.members import LONGEST_NAME, check_fits
from sandboxgym.sandbox.files.portable import ArchiveHeader, ArchiveWriter, Reader, changes
from sandboxgym.sandbox.files.reading import FLAGS, check_regular, regular_file
from sandboxgym.sandbox.layers.written import Written, look
from sandboxgym.sandbox.process_table import start_times
from sandboxgym.system import run_directories

log = logging.getLogger("sandboxgym")

KIND = "copy"
run_directories.register_reaper(KIND, "sandboxgym.sandbox.copy.processes:reap")

_FOLDERS = ("root", "home", "tmp")
_KEYS = (signal.SIGINT, signal.SIGQUIT)  # what Ctrl-C and Ctrl-\\ send
# A session's first process takes the terminal it opens as the controlling one.
_LAUNCH = """ulimit -c 0; {limits}
tty=$1; shift
if [ -n "$tty" ]; then exec "$@" <"$tty" >"$tty" 2>&1; fi
exec "$@"
"""
_NOTES = (
    "Nothing is isolated: commands act on the host's files, processes and network as this user.",
    "Only files under the private root are snapshotted; paths are not remapped, /testbed is {root}/testbed.",
    "A fork has another root: absolute paths that files mention still name the root they were written in.",
    "A process that clears its environment, leaves its session and outlives its parents is neither seen nor killed.",
    "Processes are stopped one by one: a chain of them, each ending as soon as it started the next, may outrun that.",
    "Memory is limited for each process, the size of each file by the disk limit; all files together, their number and "
    "that of processes are not limited.",
)
_warned = False


class CopyTree:
    """The files of a sandbox as a directory that is no longer written to."""

    def __init__(self, held: _Held) -> None:
        self._held = held
        self.id = held.path.name
        self.base = held.base
        self.root = held.root
        """The private root in which it was taken: the beginning of absolute paths in it."""
        self._finalizer = weakref.finalize(self, held.release)
        held.retain()

    @property
    def nbytes(self) -> int:
        """Bytes of all files, the root file system's included: nothing is shared with it."""
        return run_directories.tree_nbytes(self._held.files())

    @property
    def path(self) -> Path:
        """Directory of the files; not to be written to.

        Raises:
            SandboxClosed: it was released.
        """
        if not self._finalizer.alive:
            raise SandboxClosed("this tree was released")
        return self._held.files()

    def pack(self) -> bytes:
        """The differences from the root file system, as an archive for `CopyBackend.unpack`.

        Raises:
            SandboxError: it cannot be read as a whole, or is nested deeper than a path can be long.
        """
        path = self.path
        try:
            changed, deleted = changes(self._held.origin, path)
            writer = ArchiveWriter(ArchiveHeader(self.base, tuple(deleted), {"root": self.root}))
            for name in changed:
                writer.file(path, name)
        except OSError as error:
            raise SandboxError(f"what was written cannot be packed: {os.strerror(error.errno or 0)}") from error
        return writer.finish()

    def retain(self) -> CopyTree:
        """Another hold on the same tree, released independently."""
        if not self._finalizer.alive:
            raise SandboxClosed("this tree was released")
        return CopyTree(self._held)

    def release(self) -> None:
        """Give up this hold; the directory is deleted with the last one. Idempotent."""
        self._finalizer()


class _Held:
    """A run directory with a tree in it, deleted with the last hold."""

    def __init__(self, base: str, origin: Path | None, root: str) -> None:
        self.base, self.origin, self.root = base, origin, root
        self.path = run_directories.claim(KIND)
        self._holds = 0

    def files(self) -> Path:
        return self.path / "tree"

    def retain(self) -> None:
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        if self._holds <= 0:
            run_directories.give_back(self.path)


class PlainProcess:
    """A process in a session of its own."""

    relayed = False

    def __init__(self, child: subprocess.Popen[bytes], terminal: int | None, output: int | None) -> None:
        self._child = child
        self.pid: int | None = child.pid
        self.terminal = terminal
        self.output = output

    @property
    def collected(self) -> bool:
        """True if it has ended and everything of its session with it."""
        return self._child.returncode is not None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end: the exit status (128 + signal if killed), or None after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while not self.collected:
            # Not collected until its session is empty: as long as it is a zombie nobody else gets the session's number.
            if has_ended(self._child.pid):
                self._collect()
            elif end is not None and time.monotonic() >= end:
                return None
            else:
                time.sleep(pause if end is None else max(0.0, min(pause, end - time.monotonic())))
                pause = min(pause * 2, 0.02)
        return exit_status(self._child.returncode)

    def kill(self) -> None:
        """Kill the process and its session. Idempotent."""
        if not self.collected:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)
            self._collect()

    def _collect(self) -> None:
        end_session(self._child.pid)
        self._child.wait()

    def close(self) -> None:
        """Close the descriptors held by this process. Idempotent."""
        for descriptor in (self.terminal, self.output):
            if descriptor is not None:
                os.close(descriptor)
        self.terminal = self.output = None


class CopyBackend(Backend):
    """Backend of plain processes in a private directory.

    Args:
        rootfs: None or the host's root file system for an empty root, else an unpacked directory, which is copied.
        limits: ``memory`` holds for each process, ``disk`` for each file and for what is unpacked; ``processes`` and
            ``files`` are not enforced.
        allow_unsafe: must be true: commands can do whatever this user can.
        env: added to the environment of `spawn`'s processes where it does not name them.

    Raises:
        SandboxUnavailable: without ``allow_unsafe``; or the root file system is an image of several layers.
    """

    def __init__(
        self,
        rootfs: RootFS | None = None,
        *,
        limits: Limits | None = None,
        allow_unsafe: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if not allow_unsafe:
            raise SandboxUnavailable(
                "the copy backend isolates nothing: commands can read and change whatever this user can. If whoever "
                "chooses the commands is trusted, or the whole machine is disposable, pass allow_unsafe=True"
            )
        _warn_once()
        host = rootfs is None or bool(rootfs.binds)
        if rootfs is not None and not host and len(rootfs.lowers) != 1:
            raise SandboxUnavailable(
                f"the copy backend takes an unpacked directory, found a root file system of {len(rootfs.lowers)} layers"
            )
        self._rootfs = rootfs
        self._origin = None if host or rootfs is None else rootfs.lowers[0]
        self._base = "empty" if host or rootfs is None else rootfs.id
        self._limits = limits or Limits()
        self._env = dict(env or {})
        root = os.geteuid() == 0
        self.capabilities = Capabilities(
            name="copy",
            isolated=False,
            network_off=False,
            owners=root,
            snapshot_cost="written",
            limits=frozenset({"seconds"}),
            keeps=frozenset({"modes", "hardlinks", "sparse", "mtimes", "tmp"})
            | ({"xattrs"} if hasattr(os, "setxattr") else set())
            | ({"owners"} if root else set()),
            notes=_NOTES,
        )
        self._run: Path | None = run_directories.claim(KIND)
        self._mark = self._run.name
        self.root = self._run / "root"
        """The private directory: HOME is ``root/root``, TMPDIR ``root/tmp``."""
        self._control = self._run / "control"
        self.control_inside = str(self._control)
        self._control.mkdir()
        self._processes: list[PlainProcess] = []
        self._live = False

    @property
    def control(self) -> Path:
        """The control directory; see `base.Backend.control`."""
        return self._control

    @property
    def live(self) -> bool:
        """True if started and neither closed nor committed."""
        return self._live

    def inside(self, path: str) -> str:
        """Path here of a path in an isolated sandbox: ``/testbed`` is ``{root}/testbed``; one below the root stays."""
        path = check_inside(path)
        return path if Path(path).is_relative_to(self.root) else str(self.root) + ("" if path == "/" else path)

    def relocate(self, text: str, tree: CopyTree) -> str:  # type: ignore[override]
        """Text with each mention of the root in which a tree was taken replaced by this root."""
        return text.replace(tree.root, str(self.root))

    def base(self) -> CopyTree:
        """The root file system before anything is written."""
        held = _Held(self._base, self._origin, str(self.root))
        try:
            self._fill(held.files())
        except BaseException:
            run_directories.give_back(held.path)
            raise
        return CopyTree(held)

    def start(self, tree: CopyTree | None = None) -> None:  # type: ignore[override]
        """Fill the root with a copy of ``tree``; ends what ran before."""
        self._check_open()
        self._end_processes()
        self._live = False
        for folder in (self.root, self.control):
            run_directories.remove_tree(folder)
        self._control.mkdir()
        if tree is not None and tree.base != self._base:
            raise SandboxUnavailable(f"expected a tree of {self._base}, found one of {tree.base}")
        try:
            if tree is None:
                self._fill(self.root)
            else:
                copy_tree(tree.path, self.root, moved=(tree.root, str(self.root)))
        except BaseException:
            run_directories.remove_tree(self.root)
            raise
        self._live = True

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = "/", **streams: Unpack[Streams]
    ) -> PlainProcess:
        """Start a process; ``cwd`` is taken under the root, HOME and TMPDIR are set there, PATH is the host's.

        Raises:
            OSError: no such program or directory.
        """
        self._check_live()
        terminal, stdin = streams.get("terminal", False), streams.get("stdin")
        whole = {**self._env, **env, **self._places(), MARK: self._mark}
        folder = self.inside(cwd)
        if terminal:
            master, slave = pty.openpty()
            _quiet(slave)
            ends = (slave, slave, slave)
            mine = master
        else:
            mine, output = os.pipe()
            source = os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(stdin)
            ends = (source, output, output)
        try:
            name = os.ttyname(slave) if terminal else ""
            child = subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCH.format(limits=self._ulimits()), "sh", name, *argv],
                stdin=ends[0],
                stdout=ends[1],
                stderr=ends[2],
                env=whole,
                cwd=folder,
                start_new_session=True,
                preexec_fn=_heed if any(signal.getsignal(number) is signal.SIG_IGN for number in _KEYS) else None,
            )
        except BaseException:
            os.close(mine)
            raise
        finally:
            for descriptor in set(ends):
                os.close(descriptor)
        self._processes = [process for process in self._processes if not process.collected]
        process = PlainProcess(child, mine if terminal else None, None if terminal else mine)
        self._processes.append(process)
        self._record()
        return process

    def processes(self) -> list[ProcessInfo]:
        """Processes started here that still run."""
        self._check_live()
        return processes_of(self._mark, self._leaders())

    def kill(self, pids: Iterable[int]) -> None:
        """Kill processes by number; those that are not of this sandbox are ignored."""
        ours = {info.pid for info in self.processes()}
        for pid in ours.intersection(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def written(self) -> Written | None:
        """Status of the whole root, for nothing below it is shared; see `written.look`."""
        self._check_live()
        return look(self.root, self._mark)

    def layers_above(self, tree: FileTree) -> list[Path] | None:
        """None: there are no layers; see `base.Backend.layers_above`."""
        return None

    def losses(self) -> tuple[str, ...]:
        """No losses; see `base.Backend.losses`."""
        return ()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop, for the context, the processes started here that can be found; see `base.Backend.paused`."""
        self._check_live()
        stopped = stop_all(self._mark, self._leaders())
        try:
            yield
        finally:
            go_on(stopped)

    def commit(self, *, keep_processes: bool = False) -> CopyTree:
        """Make a tree of the files under the root: moved, or copied while the processes are stopped."""
        self._check_live()
        held = _Held(self._base, self._origin, str(self.root))
        try:
            if keep_processes:
                with self.paused():
                    copy_tree(self.root, held.files())
            else:
                self._end_processes()
                self._live = False
                os.rename(self.root, held.files())
        except BaseException:
            run_directories.give_back(held.path)
            raise
        return CopyTree(held)

    def unpack(self, archive: bytes) -> CopyTree:
        """Make a tree from the archive of `CopyTree.pack`."""
        reader = Reader(archive, base=self._base)
        check_fits(reader.nbytes, self._limits.disk, directory=self.root.parent)
        origin = reader.header.facts.get("root", str(self.root))
        if not os.path.isabs(origin) or origin == "/" or len(origin) >= LONGEST_NAME:
            raise SnapshotCorrupt(f"expected the path that the files were packed from, found {brief(origin)}")
        held = _Held(self._base, self._origin, origin)
        try:
            if self._origin is not None:
                copy_tree(self._origin, held.files())
            else:
                held.files().mkdir()
            reader.extract(held.files())
        except BaseException:
            run_directories.give_back(held.path)
            raise
        return CopyTree(held)

    def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """Read a regular file under the root (see `inside`).

        Raises:
            PermissionError: a link leads out of the root.
        """
        self._check_live()
        descriptor = os.open(self._within(path), FLAGS)
        try:
            return regular_file(descriptor, path, limit=limit)
        finally:
            os.close(descriptor)

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file under the root, making missing parent directories.

        Raises:
            PermissionError: a link leads out of the root.
        """
        self._check_live()
        where = self._within(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            check_regular(descriptor, path)
            os.ftruncate(descriptor, 0)
            file.write(data)
            os.fchmod(descriptor, mode)

    def _within(self, path: str) -> Path:
        where = Path(self.inside(path))
        try:
            inside = where.resolve().is_relative_to(self.root.resolve())
        except RuntimeError:  # a circle of links
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
        if not inside:
            raise PermissionError(errno.EPERM, "a link leads outside of the root of the sandbox", path)
        return where

    def shell_directory(self) -> Path:
        """Make a new directory for a shell, and remove earlier ones. See `base.Backend.shell_directory`."""
        return new_shell_directory(self.control)

    def sibling(self) -> Self:
        """Another backend with the same settings and a root of its own."""
        return type(self)(self._rootfs, limits=self._limits, allow_unsafe=True, env=self._env)

    def close(self) -> None:
        """End every process and delete the root. Idempotent."""
        if self._run is None:
            return
        self._end_processes()
        self._live = False
        run_directories.give_back(self._run)
        self._run = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _places(self) -> dict[str, str]:
        interpreter = os.path.dirname(sys.executable)
        return {
            "HOME": str(self.root / "root"),
            "TMPDIR": str(self.root / "tmp"),
            "SANDBOX_ROOT": str(self.root),
            "PATH": os.pathsep.join([interpreter, os.environ.get("PATH", os.defpath)]),
        }

    def _ulimits(self) -> str:
        commands = []
        if self._limits.memory is not None and sys.platform == "linux":
            commands.append(f"ulimit -v {self._limits.memory // 1024}")
        if self._limits.disk is not None:
            commands.append(f"ulimit -f {self._limits.disk // 512}")
        return "; ".join(commands)

    def _leaders(self) -> set[int]:
        return {process.pid for process in self._processes if process.pid is not None and not process.collected}

    def _record(self) -> None:
        """Record the processes for the reaper, which cannot see this process's memory."""
        assert self._run is not None
        staging = self._run / ".sessions"
        staging.write_text(json.dumps(start_times(self._leaders())), encoding="utf-8")
        staging.replace(self._run / SESSIONS)

    def _end_processes(self) -> None:
        end_all(self._mark, self._leaders())
        for process in self._processes:
            process.kill()
        self._processes = []

    def _fill(self, target: Path) -> None:
        if self._origin is not None:
            copy_tree(self._origin, target)
        else:
            target.mkdir()
        for name in _FOLDERS:
            (target / name).mkdir(exist_ok=True)

    def _check_open(self) -> None:
        if self._run is None:
            raise SandboxClosed("this sandbox was closed")

    def _check_live(self) -> None:
        self._check_open()
        if not self._live:
            raise SandboxClosed("this sandbox was not started, or was committed: start it first")


def _heed() -> None:
    """Reset ignored signals in the child (a background program of a script ignores some), so that they end commands."""
    for number in _KEYS:
        signal.signal(number, signal.SIG_DFL)


def _quiet(terminal: int) -> None:
    """Set the terminal to 200 columns without echo."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    settings = termios.tcgetattr(terminal)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, settings)


def _warn_once() -> None:
    global _warned
    if not _warned:
        log.warning("the copy backend isolates nothing: commands can read and change whatever this user can")
        _warned = True
