"""`Sandbox`: a backend's files and processes with a persistent shell, as users have it.

1. `Sandbox.execute` runs in the shell, which keeps its directory, variables and functions; `Sandbox.run` starts a new
   process with a pipe, which leaves the shell alone.
2. A snapshot is the files and the shell's state. What it does not hold (background processes, open descriptors) is
   named in its ``lossy``, or refused with ``strict=True``.
3. Taking a snapshot changes nothing observable. Where only the idle shell runs, the files are frozen as they are and
   the sandbox continues above them, in a new shell with the old one's state, at its next use; where more runs, or
   freezing would copy them anyway, the files are copied, and all processes continue.
4. `Sandbox.restore` is complete when it returns. The children of `Sandbox.fork` share the frozen files and start at
   their first use, so that an unused one costs no process; ``start=True`` shows at once whether the machine can carry
   them all. Either all children are made or none.
5. Every started process is ended: by `Sandbox.close`, by garbage collection, or when the interpreter exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args

from sandboxgym import serialization
from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.base import (
    LONGEST_COMMAND,
    READ_LIMIT,
    Backend,
    Checkpoint,
    Checkpointer,
    FileTree,
    Limits,
    NotCaptured,
    Result,
    RootFS,
    SandboxClosed,
    SandboxError,
    SandboxUnavailable,
    SnapshotLossy,
)
from sandboxgym.sandbox.layers.written import Written
from sandboxgym.sandbox.shell.aftermath import Moment, births_of, end_started, started_since
from sandboxgym.sandbox.shell.bash_session import Interaction, Shell, is_dying
from sandboxgym.sandbox.shell.exec import KEEPING, Stop, collect
from sandboxgym.sandbox.shell.state import ShellState
from sandboxgym.sandbox.snapshot import VERSION, SandboxSnapshot

log = logging.getLogger("sandboxgym")

SnapshotMode = Literal["filesystem", "auto", "full"]

LAZY_PAGES = 64 * 2**20
"""Bytes of captured memory from which on copies restore it lazily, by default."""


@dataclass(slots=True)
class _Parts:
    """Resources to be given back, kept apart from the sandbox so that its garbage collection can be noticed."""

    backend: Backend
    shell: Shell | None = None
    tree: FileTree | None = None
    checkpoint: Checkpoint | None = None

    def give_back(self) -> None:
        for part in (self.shell, self.backend):
            try:
                if part is not None:
                    part.close()
            except Exception as error:  # the others must still be given back
                log.warning("could not close %r: %s", part, error)
        for held in (self.tree, self.checkpoint):
            if held is not None:
                held.release()
        self.shell = self.tree = self.checkpoint = None


class Sandbox:
    """Files, processes and a shell. Not thread-safe; started at its first use.

    Args:
        backend: of the sandbox, which owns it.
        env: environment of its processes.
        workdir: directory that the shell and `run` start in.
        limits: as given to the backend; wall time and output are enforced here.
        snapshot: what snapshots hold beside files and the shell's state: nothing (``"filesystem"``); running processes
            with all that they have (``"full"``, for a backend with a `Checkpointer`); or these only where more runs
            than the idle shell (``"auto"``).
        lazy_pages: bytes of captured memory from which on a copy gets it as it touches it, so that it starts
            after the same short time whatever its size; None: never. Where the kernel cannot do that it is restored as
            a whole, which the backend's capabilities tell.

    Raises:
        SandboxUnavailable: processes cannot be captured here.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        env: Mapping[str, str],
        workdir: str = "/",
        limits: Limits | None = None,
        snapshot: SnapshotMode = "filesystem",
        lazy_pages: int | None = LAZY_PAGES,
    ) -> None:
        self.backend = backend
        self.mode: SnapshotMode = snapshot
        self._lazy_pages = lazy_pages
        self._checkpointer = _prepared(backend, snapshot, lazy_pages)
        self.limits = limits or Limits()
        self._env, self._workdir = dict(env), workdir
        self._parts = _Parts(backend)
        self._waiting = True  # for its next use, to start on `_parts.tree` (None: the root file system)
        self._state: ShellState | None = None  # of the shell, while there is none
        self.lost: tuple[str, ...] = ()
        """Losses of the snapshot that it was last restored or forked from."""
        self._end = weakref.finalize(self, self._parts.give_back)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "waiting" if self._waiting else "live" if self.backend.live else "ended"
        return f"<Sandbox {self.backend.capabilities.name}, {state}>"

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return not self._end.alive

    @property
    def workdir(self) -> str:
        """Directory that the shell and `run` start in."""
        return self._workdir

    def start(self) -> Self:
        """Start processes and shell now rather than at the first use. Idempotent.

        Raises:
            SandboxUnavailable, SandboxFull: nothing was started.
            SandboxClosed: it was closed, or its processes were ended from outside.
        """
        self._shell().start()
        return self

    def execute(self, command: str, *, timeout: float | None = None, raw: int = 0) -> Result:
        """Run a command in the shell. Its changes there persist, see `ShellState`.

        Args:
            command: text for bash, in any number of lines.
            timeout: seconds, by default the limit; then all that the command started is killed.
            raw: number of bytes from the start of its output to keep unchanged in `Result.raw`.

        Returns:
            The result. A command that does not parse or is too long is not run: `Result.syntax_error` is then true.

        Raises:
            SandboxError: a command of `interact` still runs.
            SandboxUnavailable, SandboxFull: the sandbox could not be started, or reached its disk limit.
            SandboxClosed: it was closed, or its processes were ended from outside.
        """
        return self._shell().execute(command, timeout=self.limits.seconds if timeout is None else timeout, raw=raw)

    def interact(self, text: str, *, timeout: float, until: str | None = None) -> Interaction:
        """Start a command that may wait for input, or answer the one that runs (see `Shell.interact`)."""
        return self._shell().interact(text, timeout=timeout, until=until)

    def interrupt(self) -> Interaction:
        """End the command that `interact` left running."""
        return self._shell().interrupt()

    def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        output: int | None = None,
        most: int | None = None,
        keep: bool = False,
        stop: Stop | None = None,
    ) -> Result:
        """Run a command in a bash of its own, without a terminal, its output in a pipe and no input.

        Args:
            command: text for bash.
            timeout: seconds, by default the limit; then it is killed with all that it started, even in other sessions.
                Processes that the shell and its jobs started meanwhile stay, unless they have lost their parents.
            env: added to the sandbox's environment; what the shell exported is not seen.
            cwd: directory, by default the one the sandbox was made with.
            output: bytes that are kept of what it prints, by default the limit.
            most: bytes that it may print before it is killed, as at the time limit; by default any number.
            keep: what it leaves in the background continues, as after ``docker exec``, where there is a program
                ``setsid``; by default only what has left its session does (with the backend ``"copy"``, all).
            stop: another thread sets it to have the command killed, as at the time limit.
        """
        self._live()
        if len(command) > LONGEST_COMMAND:
            message = f"bash: a command has at most {LONGEST_COMMAND:,} characters, found {len(command):,}\n"
            return Result(output=message, exit_code=2, seconds=0.0, syntax_error=True)
        shell = self._parts.shell
        older = births_of([] if shell is None or shell.pid is None else [shell.pid])
        since = Moment.now()
        process = self.backend.spawn(
            ["bash", "--norc", "--noprofile", "-c", *([KEEPING] if keep else []), command],
            env={**self._env, **(env or {})},
            cwd=self._workdir if cwd is None else cwd,
        )
        try:
            result = collect(
                process,
                self.limits.seconds if timeout is None else timeout,
                self.limits.output if output is None else output,
                most=most,
                keep=keep,
                end=lambda: end_started(self.backend, since, older=older),
                stop=stop,
            )
        finally:
            process.kill()
            process.close()
        if process.relayed and not keep and not result.timed_out:
            # The daemon tells of the end late: what left its parents by then is no longer known as their offspring.
            with contextlib.suppress(SandboxClosed):
                if started_since(self.backend.processes(), since, older=older, shell=None):
                    end_started(self.backend, since, older=older)
        return result

    def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """Read a regular file.

        Args:
            path: absolute, inside.
            limit: bytes that it may hold.

        Raises:
            FileTooLarge: it holds more.
            OSError: as `open` would; no regular file; not read in time.
        """
        self._live()
        return self.backend.read_file(path, limit=limit)

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making missing parent directories."""
        self._live()
        self.backend.write_file(path, data, mode=mode)

    def reseed(self, seed: int) -> None:
        """Seed the randomness of the shell, so that copies of one snapshot draw different numbers.

        This seeds bash's ``RANDOM`` and calls the shell function ``sandboxgym_reseed`` with the seed, if it exists, for
        other sources of randomness. It does nothing while a command of `interact` runs, because the shell is busy.
        """
        shell = self._shell()
        if not shell.running:
            number = seed % 2**31
            shell.execute(
                f"RANDOM={number}; if declare -F sandboxgym_reseed >/dev/null; then sandboxgym_reseed {number}; fi",
                timeout=self.limits.seconds,
            )

    def shell_state(self) -> ShellState | None:
        """The shell's state after the last command; None if no shell was started."""
        shell = self._parts.shell
        return self._state if shell is None else shell.state()

    def lossy(self) -> tuple[str, ...]:
        """Losses of a snapshot taken now: ``"background: sleep 100"``, ``"fd 7 -> /tmp/log"``.

        Where processes are captured, only if something is known to be in the way; that comes first. Asked for after
        each step, so without what only a search of all files would tell (`Backend.losses`).
        """
        if self._check_open() or self._waiting:
            return ()
        self._live()
        lost = (*self._readable_state()[1], *self._beside_files())
        if not lost or self.mode == "filesystem":
            return lost
        obstacles = self._obstacles()
        return (*obstacles, *lost) if obstacles else ()

    def _obstacles(self) -> tuple[str, ...]:
        """Known obstacles to capturing the processes."""
        shell, checkpointer = self._parts.shell, self._checkpointer
        assert checkpointer is not None
        return ("no shell was started",) if shell is None else checkpointer.obstacles(shell)

    def _beside_files(self) -> tuple[str, ...]:
        """State that a snapshot of files and shell would not hold."""
        if self._check_open() or self._waiting:
            return ()
        self._live()
        shell = self._parts.shell
        if shell is not None:
            shell.rest()
        lost = []
        for info in self.backend.processes():
            if shell is None or not shell.owns(info):
                if not is_dying(info.pid):
                    lost.append(f"background: {info.command}")
            else:
                # 255 is where bash keeps its terminal.
                lost.extend(f"fd {item}" for item in info.descriptors if not item.startswith("255 "))
                lost.extend(f"fd {item}" for item in shell.redirected())
        return tuple(lost)

    def written(self, *, alone: bool = False) -> Written | None:
        """Status of the files, to detect changes between two looks without reading them.

        None where only reading tells: the backend cannot see what was written, more than the idle shell runs, or a
        great deal was written.

        Args:
            alone: it is known that nothing but the idle shell runs.
        """
        self._live()
        if not alone and self._beside_files():
            return None
        return self.backend.written()

    def snapshot(self, *, strict: bool = False, mode: SnapshotMode | None = None) -> SandboxSnapshot:
        """Capture the files and the shell's state, and the processes if the sandbox was made to capture them.

        Nothing is disturbed. Where the processes cannot be captured, files and shell are, and ``lossy`` says why.

        Args:
            strict: refuse to lose anything.
            mode: for this snapshot; by default that of the sandbox.

        Raises:
            SnapshotLossy: with ``strict``, what would be lost; nothing was taken.
            ValueError: a ``mode`` that the sandbox was not made for.
        """
        mode = self.mode if mode is None else mode
        if mode != "filesystem" and self._checkpointer is None:
            raise ValueError(
                f"expected mode 'filesystem' for a sandbox made with snapshot={self.mode!r}, found {mode!r}"
            )
        if self._check_open() or self._waiting:
            tree, checkpoint = self._parts.tree, self._parts.checkpoint
            return SandboxSnapshot(
                self.backend.base() if tree is None else tree.retain(),
                self._state,
                ()
                if checkpoint is None or mode != "filesystem"
                else ("the processes of the snapshot it is restored from",),
                checkpoint=None if checkpoint is None or mode == "filesystem" else checkpoint.retain(),
            )
        self._live()
        state, lost = self._readable_state()
        lost += (*self._beside_files(), *self.backend.losses())
        # Where nothing but a `run` has been, files are all there is.
        whole_wanted = lost or (mode == "full" and self._parts.shell is not None)
        if self._checkpointer is not None and mode != "filesystem" and whole_wanted:
            shell = self._parts.shell
            try:
                if shell is None:  # a `run` left something behind
                    raise NotCaptured(self._obstacles())
                tree, checkpoint = self._checkpointer.capture(shell)
            except NotCaptured as error:
                lost = (*error.reasons, *lost)
            else:
                return SandboxSnapshot(tree, state, checkpoint=checkpoint)
        if lost and strict:
            raise SnapshotLossy(f"a snapshot would lose {'; '.join(lost)}")
        # In "full" mode the shell's history, say, must not be lost either; and where a tree is a copy, it may lack what
        # the live files have.
        if lost or self.mode == "full" or self.backend.capabilities.snapshot_cost != "constant":
            return SandboxSnapshot(self.backend.commit(keep_processes=True), state, lost)
        tree = self.backend.commit()
        self._start_from(tree.retain(), state)
        return SandboxSnapshot(tree, state)

    def _readable_state(self) -> tuple[ShellState | None, tuple[str, ...]]:
        """The shell's state, or the last readable one with its losses: no program may prevent a snapshot."""
        try:
            state = self.shell_state()
            if state is None or not state.omitted:
                return state, ()
            names = state.omitted.decode(errors="replace").split()
            return state, (f"what changed in the shell: its variables {brief(names)} are too large",)
        except SandboxClosed:
            raise
        except SandboxError as error:
            shell = self._parts.shell
            assert shell is not None
            return shell.known_state, (f"what changed in the shell: {error}",)

    def restore(self, snap: SandboxSnapshot) -> None:
        """Return to a captured state; all running processes are ended.

        Raises:
            SnapshotReleased: the snapshot is gone; the sandbox is as it was.
            SnapshotMismatch: it has another root file system, or processes, and this sandbox was not made for them; the
                sandbox is as it was.
            SandboxUnavailable, SandboxFull: the captured state could not be started; the next use tries again.
        """
        self._check_open()
        tree = snap.tree
        if tree.base != self._base():
            raise SnapshotMismatch(f"expected a snapshot on the root file system {self._base()}, found {tree.base}")
        if snap.checkpoint is not None and self._checkpointer is None:
            raise SnapshotMismatch(
                f"expected a snapshot of files for a sandbox made with snapshot={self.mode!r}, found one with running "
                "processes; its files() can be restored"
            )
        shell, self._parts.shell = self._parts.shell, None
        if shell is not None and snap.checkpoint is not None:  # the copy's may have the same directory
            shell.close()
            shell = None
        try:
            self._start_from(tree.retain(), snap.shell, snap.checkpoint)
            self.lost = snap.lossy
            self.start()
        finally:
            if shell is not None:
                shell.close()  # last, for by now its processes have ended

    def fork(self, k: int, *, strict: bool = False, start: bool = False) -> list[Sandbox]:
        """Make new sandboxes at this state, independent of each other and of this one. All or nothing.

        Args:
            k: number of sandboxes.
            strict: refuse to lose anything; else each child's ``lost`` tells.
            start: start them now, rather than when they are first used.

        Raises:
            SnapshotLossy: with ``strict``.
            SandboxUnavailable, SandboxFull: no child was made.
            SandboxClosed: this sandbox was closed, or its processes were ended from outside.
            ValueError: ``k`` is negative.
        """
        if k < 0:
            raise ValueError(f"expected a number of children, found {k}")
        snap = self.snapshot(strict=strict)
        children: list[Sandbox] = []
        try:
            for _ in range(k):
                sibling = self.backend.sibling()
                child = Sandbox(
                    sibling,
                    env=self._env,
                    workdir=self._workdir,
                    limits=self.limits,
                    snapshot=self.mode,
                    lazy_pages=self._lazy_pages,
                )
                children.append(child)
                child._start_from(snap.tree.retain(), snap.shell, snap.checkpoint)
                child.lost = snap.lossy
                if start:
                    child.start()
        except BaseException:
            for child in children:
                child.close()
            raise
        finally:
            snap.release()
        return children

    def unpack(self, data: bytes) -> SandboxSnapshot:
        """Decode the bytes of `SandboxSnapshot.pack`. Nothing of it runs before a `restore`, and then only inside.

        Raises:
            SnapshotCorrupt: not an intact packed snapshot.
            SnapshotMismatch: it has another root file system.
            SandboxFull: its files are more than the sandbox may write, or than the disk has room for.
        """
        self._check_open()
        content = serialization.unpack(data)
        match content:
            case {
                "version": int(version),
                "base": str(base),
                "tree": bytes(archive),
                "shell": None | dict() as plain,
                "lossy": list(lossy),
            } if version == VERSION and all(isinstance(item, str) for item in lossy):
                pass
            case _:
                raise SnapshotCorrupt(f"expected a packed snapshot of version {VERSION}, found {brief(content)}")
        if base != self._base():
            raise SnapshotMismatch(f"expected a snapshot on the root file system {self._base()}, found {brief(base)}")
        shell = None if plain is None else ShellState.from_plain(plain)
        return SandboxSnapshot(self.backend.unpack(archive), shell, tuple(lossy))

    def close(self) -> None:
        """End all processes and give up all resources; snapshots stay. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> bool:
        if self.closed:
            raise SandboxClosed("this sandbox was closed")
        return False

    def _base(self) -> str:
        if self._parts.tree is not None:
            return self._parts.tree.base
        tree = self.backend.base()
        try:
            return tree.base
        finally:
            tree.release()

    def _start_from(self, tree: FileTree, state: ShellState | None, checkpoint: Checkpoint | None = None) -> None:
        """Let the next use start on ``tree``, with copies of the processes of ``checkpoint``."""
        checkpoint = None if checkpoint is None else checkpoint.retain()
        parts = self._parts
        if parts.shell is not None:
            parts.shell.close()
            parts.shell = None
        for held in (parts.tree, parts.checkpoint):
            if held is not None:
                held.release()
        parts.tree, parts.checkpoint, self._state, self._waiting = tree, checkpoint, state, True

    def _live(self) -> None:
        self._check_open()
        if self._waiting:
            if self._parts.checkpoint is None:
                self.backend.start(self._parts.tree)
            else:
                self._revive(self._parts.checkpoint)
            self._waiting = False
        elif not self.backend.live:
            self.backend.processes()  # raises what the backend knows of its end
            raise SandboxClosed("the processes of the sandbox were ended from outside")

    def _revive(self, checkpoint: Checkpoint) -> None:
        parts = self._parts
        if self._checkpointer is None:
            raise SandboxUnavailable(f"a sandbox made with snapshot={self.mode!r} cannot restore running processes")
        assert parts.tree is not None
        parts.shell = self._checkpointer.restore(
            parts.tree, checkpoint, env=self._env, cwd=self._workdir, output=self.limits.output
        )
        parts.checkpoint = None
        checkpoint.release()

    def _shell(self) -> Shell:
        self._live()
        parts = self._parts
        if parts.shell is None:
            state, tree = self._state, parts.tree
            if state is not None and tree is not None:
                state = state.mapped(lambda text: _relocated(self.backend, text, tree))
            options: dict[str, Any] = {"env": self._env, "cwd": self._workdir, "output": self.limits.output}
            parts.shell = self.backend.shell(**options) or Shell(self.backend, state=state, **options)
        return parts.shell


def make_sandbox(
    backend: str = "auto",
    *,
    rootfs: str | os.PathLike[str] | RootFS = "host",
    limits: Limits | None = None,
    network: bool = False,
    allow_unsafe: bool = False,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    snapshot: SnapshotMode = "filesystem",
    lazy_pages: int | None = LAZY_PAGES,
) -> Sandbox:
    """Make a sandbox, not started yet.

    Args:
        backend: ``"overlay"`` (needs root), ``"overlay-rootless"``, ``"docker"``, ``"copy"`` (isolates nothing), or
            ``"auto"``: the first of them that works here, the last only with ``allow_unsafe``; ``"e2b"``: of a service
            with E2B's API; or one that was registered (`backends.register`, or an entry point of the group
            ``sandboxgym.sandbox_backends``).
        rootfs: ``"host"`` for this machine's tool chain, ``"docker:IMAGE"``, the path of an unpacked root file system.
        limits: on its resources.
        network: give it the machine's network.
        allow_unsafe: permit a backend without isolation.
        env: added to a clean environment; nothing is taken over from this process.
        workdir: starting directory of the shell and `Sandbox.run`; default: that of the root file system.
        snapshot: content of its snapshots, see `Sandbox`.
        lazy_pages: see there.

    Raises:
        SandboxUnavailable: no such sandbox can run here; the message says why.
        ValueError: ``backend``, ``rootfs`` or ``snapshot`` is unknown; the message names the accepted values.
    """
    limits = limits or Limits()
    request = backends.Request(rootfs, limits, network, allow_unsafe, env)
    reasons = []
    for name in backends.NAMES if backend == "auto" else (backend,):
        try:
            if backend == "auto":
                backends.check(name)
            made, environment, folder = backends.make_backend(name, request)
        except (SandboxUnavailable, ImportError) as error:
            if backend != "auto":
                raise
            reasons.append(f"{name}: {error}")
        else:
            folder = folder if workdir is None else workdir
            return Sandbox(
                made, env=environment, workdir=folder, limits=limits, snapshot=snapshot, lazy_pages=lazy_pages
            )
    raise SandboxUnavailable(f"no sandbox can run on this machine: {'; '.join(reasons)}")


def _prepared(backend: Backend, mode: SnapshotMode, lazy_pages: int | None) -> Checkpointer | None:
    """The checkpointer of a backend whose snapshots hold processes, which is made ready for it."""
    if mode not in get_args(SnapshotMode):
        raise ValueError(f"expected snapshots of {', '.join(get_args(SnapshotMode))}, found {mode!r}")
    if mode == "filesystem":
        return None
    checkpointer = backend.checkpointer
    if checkpointer is None:
        raise SandboxUnavailable(
            f"snapshot={mode!r} needs the overlay backend as root, or another with a checkpointer, found "
            f"{type(backend).__name__} ({backend.capabilities.name})"
        )
    try:
        checkpointer.prepare(lazy_pages)
    except SandboxUnavailable as error:
        raise SandboxUnavailable(f"snapshot={mode!r} is not available here: {error}") from error
    return checkpointer


def _relocated(backend: Backend, text: bytes, tree: FileTree) -> bytes:
    return backend.relocate(text.decode("utf-8", "surrogateescape"), tree).encode("utf-8", "surrogateescape")
