"""Sandboxes of a service that speaks E2B's API, by its official client library: `E2BBackend`.

1. A tree is a snapshot of the service, of files only; a fork is a sandbox that the service makes from one. Nothing is
   downloaded for it.
2. A snapshot is deleted at the service with its last hold, unless it was packed: what `pack` returns names it.
3. Every sandbox has a time limit at the service, which is moved while it is used. After it, or when this process was
   killed, the service ends the sandbox by itself.
4. There is no directory and no terminal in common: each command of the shell is a bash of its own, which finds the
   state that the last one left in a file (``shell.py``).

The service is chosen by the library's own environment variables, as ``E2B_API_KEY``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotReleased
from sandboxgym.sandbox.base import (
    READ_LIMIT,
    Backend,
    Capabilities,
    FileTooLarge,
    Limits,
    ProcessInfo,
    SandboxClosed,
    SandboxError,
    SandboxFull,
    SandboxUnavailable,
    Streams,
    check_inside,
)
from sandboxgym.sandbox.e2b.shell import RemoteShell
from sandboxgym.sandbox.layers.written import Written
from sandboxgym.sandbox.overlay.processes import readable

log = logging.getLogger("sandboxgym")

TEMPLATE = "base"
"""Template of a sandbox for ``rootfs="host"``, the service's own default."""
WORKDIR = "/home/user"
"""Directory in which E2B's sandboxes start commands."""
LIFETIME = 3600
"""Seconds after its last use after which the service ends a sandbox, at the earliest half of them."""
_PACKED = b"e2b-snapshot:"
_MARK = "SANDBOXGYM_COMMAND"
"""Environment variable of all commands that are started from here."""
_PROCESSES = f"""for folder in /proc/[0-9]*; do
    if grep -qsz '^{_MARK}=' $folder/environ && read -rd '' _ <$folder/cmdline; then
        echo "${{folder#/proc/}} $(tr '\\0\\n' '  ' <$folder/cmdline)"
    fi 2>/dev/null
done"""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,199}")


def library() -> Any:
    """E2B's client library.

    Raises:
        SandboxUnavailable: it is not installed.
    """
    try:
        import e2b
    except ImportError as error:
        raise SandboxUnavailable("the backend e2b needs E2B's library: pip install 'sandboxgym[e2b]'") from error
    return e2b


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Errors of the library as those of a sandbox."""
    e2b = library()
    try:
        yield
    except e2b.NotEnoughSpaceException as error:
        raise SandboxFull(f"{what}: {error}") from error
    except (e2b.SandboxNotFoundException, e2b.SandboxNotRunningException) as error:
        raise SandboxClosed(f"{what}: the service has ended the sandbox: {brief(str(error), 300)}") from error
    except e2b.AuthenticationException as error:
        raise SandboxUnavailable(f"{what}: {error}") from error
    except SandboxError:
        raise
    except (e2b.SandboxException, OSError, RuntimeError) as error:
        raise SandboxUnavailable(f"{what}: {type(error).__name__}: {brief(str(error), 300)}") from error
    except Exception as error:  # of the HTTP library below, which the service does not name
        if not type(error).__module__.startswith(("httpx", "httpcore", "pyqwest", "connectrpc")):
            raise
        raise SandboxUnavailable(f"{what}: {type(error).__name__}: {brief(str(error), 300)}") from error


class _Kept:
    """A snapshot at the service with the number of its holds."""

    def __init__(self, name: str, *, owned: bool) -> None:
        self.name = name
        self.owned = owned
        """True to delete it with the last hold."""
        self._holds = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Count one more hold."""
        with self._lock:
            self._holds += 1

    def drop(self) -> None:
        """Count one less."""
        with self._lock:
            self._holds -= 1
            last = self._holds == 0
        if last and self.owned:
            try:
                library().Sandbox.delete_snapshot(self.name)
            except Exception as error:  # at garbage collection, nobody could handle it
                log.warning("the snapshot %s stays at the E2B service: %s", self.name, error)


class SnapshotTree:
    """A snapshot at the service as a tree of files; see `base.FileTree`.

    Args:
        template: below it.
        kept: the snapshot; None: nothing was written since the template.
    """

    def __init__(self, template: str, kept: _Kept | None) -> None:
        self.template = template
        self.base = f"e2b:{template}"
        self.id = template if kept is None else kept.name
        self._kept = kept
        if kept is not None:
            kept.hold()
        self._end = weakref.finalize(self, _drop, kept)
        self._end.atexit = True

    @property
    def nbytes(self) -> int:
        """Bytes on this machine: none."""
        return 0

    def pack(self) -> bytes:
        """The snapshot's name, by which it can be found as long as the service keeps it: it is not deleted any more."""
        self._check()
        if self._kept is not None:
            self._kept.owned = False
        return _PACKED + (b"" if self._kept is None else self._kept.name.encode())

    def retain(self) -> SnapshotTree:
        """Add a hold on the snapshot."""
        self._check()
        return SnapshotTree(self.template, self._kept)

    def release(self) -> None:
        """Give up this hold. Idempotent."""
        self._end()

    def _check(self) -> None:
        if not self._end.alive:
            raise SnapshotReleased("this snapshot was released")


def _drop(kept: _Kept | None) -> None:
    if kept is not None:
        kept.drop()


class RemoteProcess:
    """A command of a remote sandbox; see `base.Process`."""

    terminal: int | None = None
    relayed = False

    def __init__(self, remote: Any, handle: Any) -> None:
        self.output: int | None
        self.output, sink = os.pipe()
        self._remote, self._handle = remote, handle
        self._code: int | None = None
        self._done, self._ended = os.pipe()
        self._thread = threading.Thread(target=self._copy, args=(sink, self._ended), name="e2b-output", daemon=True)
        self._thread.start()

    def _copy(self, sink: int, ended: int) -> None:
        """Copy the output into the pipe until the command ends, or nobody reads any more."""
        code = 255
        try:
            for stdout, stderr, _ in self._handle:
                data = (stdout or stderr or "").encode("utf-8", "replace")
                while data:
                    data = data[os.write(sink, data) :]
            code = self._handle.wait().exit_code
        except OSError:
            self._handle.disconnect()
        except Exception as error:
            code = getattr(error, "exit_code", 255)
        self._code = code
        os.close(sink)
        os.close(ended)

    @property
    def pid(self) -> int | None:
        """Process id on this machine: there is none."""
        return None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end: the exit status, or None after ``timeout`` seconds."""
        return self._code if self._code is not None or readable(self._done, timeout) else None

    def kill(self) -> None:
        """Kill the command with its process group. Idempotent."""
        if self._code is None:
            number = self._handle.pid
            with contextlib.suppress(Exception):  # it may have ended
                self._remote.commands.run(f"kill -9 -- -{number}; kill -9 {number}", timeout=10)
            with contextlib.suppress(Exception):
                self._handle.kill()
            self._thread.join(10)

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        if self.output is not None:
            os.close(self.output)
            os.close(self._done)
            self.output = None


class E2BBackend(Backend):
    """Files and processes of one sandbox of a service; see `base.Backend`.

    Args:
        template: name of a template of the service.
        limits: only wall time and output are enforced, here; the others are the service's affair.
        network: ask for access to the internet.
        env: environment variables of all commands.
    """

    control_inside = "/nonexistent"

    def __init__(
        self, template: str, *, limits: Limits, network: bool = False, env: Mapping[str, str] | None = None
    ) -> None:
        library()
        self.template, self.limits, self.network, self._env = template, limits, network, dict(env or {})
        self.capabilities = Capabilities(
            name="e2b",
            isolated=True,
            network_off=True,
            owners=True,
            snapshot_cost="written",
            limits=frozenset({"seconds"}),
            keeps=frozenset({"modes", "owners", "mtimes"}),
            notes=(
                "What a snapshot keeps of files is the service's affair; running processes are not part of it.",
                "Processes are not stopped while files are captured, unless the service does so.",
                "At the time limit of `run` all commands that were started from here are killed.",
                "Bytes of output that are not UTF-8 are replaced by the library.",
            ),
        )
        self.remote: Any = None
        """The library's sandbox, if live."""
        self._touched = 0.0
        self._closed = False
        self._end: Any = None

    def __repr__(self) -> str:
        return f"E2BBackend({self.template}, {'live' if self.live else 'not live'})"

    @property
    def control(self) -> Path:
        """No directory: there is none in common.

        Raises:
            SandboxUnavailable: always.
        """
        raise SandboxUnavailable("a sandbox of an E2B service has no directory in common with this machine")

    def shell_directory(self) -> Path:
        """No directory, see `control`."""
        return self.control

    def shell(self, *, env: Mapping[str, str], cwd: str, output: int) -> RemoteShell:
        """A shell without terminal; see `base.Backend.shell`."""
        return RemoteShell(self, env=env, cwd=cwd, output=output)

    def base(self) -> SnapshotTree:
        """The template."""
        return SnapshotTree(self.template, None)

    def start(self, tree: SnapshotTree | None = None) -> None:  # type: ignore[override]
        """Make a sandbox from the template, or from a snapshot; see `base.Backend.start`."""
        if self._closed:
            raise SandboxClosed("the backend was closed")
        if tree is not None and tree.base != f"e2b:{self.template}":
            raise SnapshotMismatch(f"expected a snapshot of the template {self.template}, found one of {tree.base}")
        self._kill()
        name = self.template if tree is None else tree.id
        with _translated(f"a sandbox of {name!r} at the E2B service"):
            self.remote = library().Sandbox.create(
                template=name, timeout=LIFETIME, envs=self._env, allow_internet_access=self.network
            )
        self._touched = time.monotonic()
        self._end = weakref.finalize(self, _killed, self.remote)

    @property
    def live(self) -> bool:
        """True if started and neither closed nor ended by a failed use."""
        return self.remote is not None

    def live_remote(self) -> Any:
        """The library's sandbox, with its time limit moved if half of it is over.

        Raises:
            SandboxClosed: there is none.
        """
        if self.remote is None:
            raise SandboxClosed("the sandbox is not live: it was not started, or closed")
        if time.monotonic() - self._touched > LIFETIME / 2:
            with _translated("the sandbox at the E2B service"):
                self.remote.set_timeout(LIFETIME)
            self._touched = time.monotonic()
        return self.remote

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = "/", **streams: Unpack[Streams]
    ) -> RemoteProcess:
        """Start a command; see `base.Backend.spawn`.

        Raises:
            SandboxUnavailable: with a terminal, or with input.
            SandboxClosed: there is no live sandbox.
        """
        if streams.get("terminal") or streams.get("stdin") is not None:
            raise SandboxUnavailable("commands of an E2B service are started without terminal and input here")
        remote = self.live_remote()
        with _translated("a command at the E2B service"):
            command = f"exec {shlex.join(argv)} 2>&1"
            handle = remote.commands.run(
                command, background=True, envs={**self._env, **env, _MARK: "1"}, cwd=cwd, timeout=0, stdin=False
            )
        return RemoteProcess(remote, handle)

    def processes(self) -> list[ProcessInfo]:
        """Processes of what was started from here; their numbers are negated, for they are none of this machine."""
        remote = self.live_remote()
        with _translated("the processes at the E2B service"):
            rows = remote.commands.run(_PROCESSES, timeout=30).stdout.splitlines()
        found = []
        for row in rows:
            pid, _, command = row.partition(" ")
            if pid.isdigit():
                found.append(ProcessInfo(-int(pid), 0, command.rstrip()[:1024]))
        return found

    def kill(self, pids: Iterable[int]) -> None:
        """Kill commands by the numbers of `processes`."""
        numbers = " ".join(str(-pid) for pid in pids if pid < 0)
        remote = self.live_remote()
        if numbers:
            with _translated("a process at the E2B service"):
                remote.commands.run(f"kill -9 {numbers} 2>/dev/null || true", timeout=30)

    def written(self) -> Written | None:
        """Files written since the start: unknown, because the service hides them."""
        self.live_remote()
        return None

    def layers_above(self, tree: object) -> list[Path] | None:
        """Directories of the files written: unknown, because the service hides them."""
        self.live_remote()
        return None

    def losses(self) -> tuple[str, ...]:
        """No losses beyond the notes of the capabilities."""
        self.live_remote()
        return ()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is paused, see the notes of the capabilities."""
        self.live_remote()
        yield

    def commit(self, *, keep_processes: bool = False) -> SnapshotTree:
        """Have the service take a snapshot of the files; see `base.Backend.commit`."""
        remote = self.live_remote()
        with _translated("a snapshot at the E2B service"):
            made = remote.create_snapshot(mode="filesystem")
        tree = SnapshotTree(self.template, _Kept(made.snapshot_id, owned=True))
        if not keep_processes:
            self._kill()
        return tree

    def unpack(self, archive: bytes) -> SnapshotTree:
        """A tree of what `SnapshotTree.pack` returned; whether the service still has it shows at the start."""
        name = archive.removeprefix(_PACKED).decode("ascii", "replace")
        if not archive.startswith(_PACKED) or (name and not _ID.fullmatch(name)):
            raise SnapshotCorrupt(f"expected the name of a snapshot of an E2B service, found {brief(archive, 80)}")
        return SnapshotTree(self.template, _Kept(name, owned=False) if name else None)

    def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """Read a regular file; see `base.Backend.read_file`."""
        path = check_inside(path)
        e2b, remote = library(), self.live_remote()
        try:
            with _translated(f"the file {path!r} at the E2B service"):
                data = bytearray()
                with remote.files.read(path, format="stream") as chunks:
                    for chunk in chunks:
                        data += chunk
                        if len(data) > limit:
                            raise FileTooLarge.of(path, size=None, limit=limit)
                return bytes(data)
        except SandboxUnavailable as error:
            if isinstance(error.__cause__, e2b.NotFoundException):
                raise FileNotFoundError(2, "no such file", path) from error
            if isinstance(error.__cause__, FileTooLarge):
                raise error.__cause__ from None
            raise OSError(5, str(error), path) from error

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making missing parent directories; see `base.Backend.write_file`."""
        path = check_inside(path)
        remote = self.live_remote()
        with _translated(f"the file {path!r} at the E2B service"):
            remote.files.write(path, data)
            if mode != 0o644:
                remote.commands.run(f"chmod {mode:o} -- {shlex.quote(path)}")

    def sibling(self) -> E2BBackend:
        """Another backend for the same template; see `base.Backend.sibling`."""
        return E2BBackend(self.template, limits=self.limits, network=self.network, env=self._env)

    def _kill(self) -> None:
        if self._end is not None:
            self._end()
        self.remote = self._end = None

    def close(self) -> None:
        """End the sandbox. Idempotent."""
        self._closed = True
        self._kill()


def _killed(remote: Any) -> None:
    try:
        remote.kill()
    except Exception as error:  # at garbage collection, nobody could handle it
        log.warning("the sandbox %s stays at the E2B service until its time limit: %s", remote.sandbox_id, error)
