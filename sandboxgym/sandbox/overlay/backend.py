"""Sandboxes of Linux namespaces over an overlay file system: `OverlayBackend`, as root or as an ordinary user.

1. A container has its own namespaces for mounts, processes, IPC, host name and (unless ``network=True``) network, a
   private ``/proc`` and a minimal ``/dev``. It sees its root file system and its own writes, nothing else of the host.
2. Processes inside are root without the capabilities that reach beyond the container, cannot gain privileges, and are
   held to a filter of system calls and to a control group, where this process may make them. With private ids (as root,
   where the kernel can map the ids of files) they are an unused user id outside.
3. `commit` ends the processes and keeps the layer they wrote: nothing is copied, whatever its size.
4. Containers are made by a small process beside this one (``zygote.py``), a few ahead of demand. Every process ends
   when its owner does.
5. A live container's init is a small program that is compiled once, where there is a C compiler; else it is a fork of
   Python, which takes 1.4 MB more. ``SANDBOXGYM_INIT=python`` requests that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sandboxgym.errors import SnapshotMismatch
from sandboxgym.sandbox.base import (
    CONTROL,
    READ_LIMIT,
    Backend,
    Capabilities,
    FileTree,
    Limits,
    ProcessInfo,
    RootFS,
    SandboxClosed,
    SandboxError,
    SandboxFull,
    SandboxUnavailable,
    Streams,
    check_inside,
    clean_environment,
)
from sandboxgym.sandbox.files import archive
from sandboxgym.sandbox.files.reading import FLAGS, check_not_of_proc, regular_file
from sandboxgym.sandbox.layers import accountant
from sandboxgym.sandbox.layers.squash import copy_layer, squash
from sandboxgym.sandbox.layers.store import OverlayTree
from sandboxgym.sandbox.layers.written import Written, look
from sandboxgym.sandbox.overlay import kernel, mounts
from sandboxgym.sandbox.overlay.cgroups import Groups, rlimits
from sandboxgym.sandbox.overlay.processes import NamespaceProcess, offspring, readable, send, state
from sandboxgym.sandbox.overlay.runtime import Container, Flavour, Runtime, advice, runtime

if TYPE_CHECKING:
    from sandboxgym.sandbox.checkpoint.checkpointer import CriuCheckpointer

COPIED = (250, 32 * 2**20)
"""By default: with more, starting a copy of the processes takes less time than copying what they wrote."""
REPLACED = (-1, 0)
"""Nothing is copied: for benchmarks and tests."""
_DEFAULT_LIMITS = Limits()
_STOPPING = 3.0  # seconds in which all processes must have stopped, where there is no group to freeze
_LOOKS = 3  # in a row that must find nothing running: a chain of short processes may slip through one


class OverlayBackend(Backend):
    """Files and processes of one container; see `base.Backend`.

    Args:
        rootfs: below all writes.
        limits: of the container.
        network: share the host's network; else there is only a loopback device.
        rootless: make a user namespace, as an ordinary user can; default: unless this process is root.
        env: added to the root file system's environment in the attribute ``env``, for callers that start shells;
            `spawn` itself adds nothing to the environment that it is given.
    """

    def __init__(
        self,
        rootfs: RootFS,
        *,
        limits: Limits = _DEFAULT_LIMITS,
        network: bool = False,
        rootless: bool | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.rootfs = rootfs
        self.limits = limits
        self.network = network
        self.rootless = os.geteuid() != 0 if rootless is None else rootless
        self.env = clean_environment(rootfs, env)
        self.runtime = runtime()
        self.control_inside = CONTROL
        shared_ids = "it is root of no more than its user" if self.rootless else self.runtime.why_not_private(rootfs)
        self.private = not shared_ids
        """True if the container has user ids of its own."""
        self.capabilities = _capabilities(self.rootless, self.runtime.groups, shared_ids)
        self._extra_env = env
        self.container: Container | None = None
        """The live container, or one that was killed; read by benchmarks."""
        self.adopts = False
        """True to make orphans of a process on a terminal its children, so that CRIU can capture them as one tree."""
        self.lazy_pages: int | None = None
        """Bytes of memory from which on it is restored lazily, see ``checkpoint/restore.py``; None: never."""
        self.copied = COPIED
        """Entries and bytes of the container's writes up to which capturing its processes copies them; see
        ``checkpoint/capture.py``."""
        self.below: OverlayTree | None = None
        """Tree below the live container."""
        self._closed = False
        self._held = _Held(self.runtime)
        weakref.finalize(self, self._held.give_back).atexit = False

    def __repr__(self) -> str:
        return f"OverlayBackend({self.rootfs.id}, {'live' if self.live else 'not live'})"

    def base(self) -> OverlayTree:
        """The root file system as a tree with nothing written. Starts nothing."""
        return OverlayTree(self.runtime.store, self.rootfs, (), rootless=self.rootless, identity=self.rootfs.id)

    @property
    def live(self) -> bool:
        """True if there is a container and its init runs."""
        return self.container is not None and not self.container.ended

    @property
    def flavour(self) -> Flavour:
        """Kind of the warm containers that this backend takes."""
        return self.rootless, self.network, self.private

    @property
    def control(self) -> Path:
        """The live container's control directory; see `base.Backend.control`.

        Raises:
            SandboxClosed: there is no live container.
        """
        return Path(f"/proc/self/fd/{self._live_container().control}")

    def shell_directory(self) -> Path:
        """Empty and return the one directory for a shell; see `base.Backend.shell_directory`."""
        folder = self.control / mounts.SHELL
        for entry in list(os.scandir(folder)):
            if entry.name in mounts.WRITABLE:
                os.truncate(entry.path, 0)
            else:
                os.unlink(entry.path)
        return folder

    @property
    def checkpointer(self) -> CriuCheckpointer | None:
        """A new checkpointer with CRIU; None if this backend is rootless, as CRIU must be root where processes are."""
        return None if self.rootless else criu_checkpointer()(self)

    def keep_processes(self, *, lazy_pages: int | None = None) -> None:
        """Make containers that CRIU can capture from now on: without private ids, among others.

        Args:
            lazy_pages: see the attribute.
        """
        self.adopts, self.lazy_pages, self.private = True, lazy_pages, False
        why = "processes are captured and restored by CRIU, which must be root where they are"
        found = _capabilities(self.rootless, self.runtime.groups, why)
        note = "With stopped processes it runs until CRIU has seized it, and can prevent that: files are captured then."
        self.capabilities = replace(found, notes=(*found.notes, note))

    def start(self, tree: OverlayTree | None = None) -> None:  # type: ignore[override]
        """Start on ``tree``; see `base.Backend.start`."""
        if self._closed:
            raise SandboxClosed("the backend was closed")
        if tree is None:
            tree = self.base()
        elif tree.base != self.rootfs.id or tree.rootless != self.rootless:
            raise SnapshotMismatch(
                f"expected a tree over {self.rootfs.id} ({'rootless' if self.rootless else 'as root'}), found one over "
                f"{tree.base} ({'rootless' if tree.rootless else 'as root'})"
            )
        left = self.part()
        if left.container is not None:
            left.container.kill()  # it dies while the next one is made
        try:
            self._revive()
            self._start_on(tree)
        finally:
            left.give_back()

    def _start_on(self, tree: OverlayTree) -> None:
        shared = self.runtime
        shared.store.check_room()
        squash(tree)
        below = tree.retain()
        try:
            container = shared.container(self.flavour)
            try:
                self._specialise(container, below)
            except BaseException:
                shared.discard(container)
                raise
        except BaseException:
            below.release()
            raise
        self.settle(container, below)
        shared.watch(container, self.limits)
        shared.prepare(self.flavour)

    def settle(self, container: Container, below: OverlayTree) -> None:
        """Become live in a container on ``below``, and take over the holds on both."""
        self.container = self._held.container = container
        self.below = self._held.below = below

    def _specialise(self, container: Container, below: OverlayTree) -> None:
        if container.group:
            container.group.limit(self.limits)
        grouped = frozenset(container.group.folders) if container.group else frozenset()
        request = {**self.mounts(container, below), "rlimits": rlimits(self.limits, grouped=grouped)}
        try:
            container.layer.dress(Path(request["lowers"][0]))
            container.root, container.control = container.ask("become", request)
        except OSError as error:
            raise SandboxUnavailable(advice(error, rootless=self.rootless)) from error
        except EOFError as error:
            raise SandboxUnavailable(f"the init of a sandbox ended while it was made: {error}") from error

    def mounts(self, container: Container, below: OverlayTree) -> dict[str, Any]:
        """Mounts of a container, as `mounts.Prepared` takes them."""
        rootfs = self.rootfs
        lowers = [*(layer.files for layer in below.layers), self.runtime.names(rootfs, network=self.network)]
        lowers += [*rootfs.lowers, self.runtime.skeleton(rootfs)]
        return {
            "store": os.fspath(self.runtime.directory),
            "lowers": [os.fspath(path) for path in lowers],
            "upper": os.fspath(container.layer.files),
            "work": os.fspath(container.layer.work),
            "shown": self.runtime.shown(self.rootfs),
            "control_inside": CONTROL,
        }

    def _revive(self) -> None:
        """Start a new zygote where the old one was killed; trees stay in the directory of the first."""
        self.runtime = self._held.runtime = runtime()

    def _live_container(self) -> Container:
        if os.getpid() != self.runtime.pid:
            raise SandboxClosed("the sandbox belongs to the process that this one was forked from")
        if self.container is None:
            raise SandboxClosed("the sandbox is not live: it was not started, or was committed, or closed")
        if self.container.ended:
            self._check_full(self.container)
            raise SandboxClosed("the processes of the sandbox were killed from outside")
        return self.container

    def _check_full(self, container: Container) -> None:
        note = container.layer.path / accountant.FULL
        if note.exists():
            raise SandboxFull(f"the sandbox was ended by its limit of {note.read_text()}")

    def written(self) -> Written | None:
        """Writes of the live container above the tree that it started on; see `written.look`.

        Raises:
            SandboxClosed, SandboxFull: there is no live container.
        """
        container, below = self._live_container(), self.below
        return None if below is None else look(container.layer.files, below.id)

    def layers_above(self, tree: FileTree) -> list[Path] | None:
        """The live container's layer and those between; see `base.Backend.layers_above`.

        Raises:
            SandboxClosed, SandboxFull: there is no live container.
        """
        container, below = self._live_container(), self.below
        if below is None or not isinstance(tree, OverlayTree):
            return None
        lower, here = tree.layers, below.layers
        between = len(here) - len(lower)
        if between < 0 or any(a is not b for a, b in zip(here[between:], lower, strict=True)):
            return None
        return [container.layer.files, *(layer.files for layer in here[:between])]

    def losses(self) -> tuple[str, ...]:
        """No losses; see `base.Backend.losses`."""
        return ()

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = "/", **streams: Unpack[Streams]
    ) -> NamespaceProcess:
        """Start a process in the container; see `base.Backend.spawn`.

        Raises:
            OSError: the program or directory is not there, or there is no room for another process.
            SandboxClosed, SandboxFull: there is no live container.
        """
        container = self._live_container()
        terminal, stdin = streams.get("terminal", False), streams.get("stdin")
        status, report = os.pipe()
        descriptors, output, opened = [report], None, [report]
        try:
            if not terminal:
                output, sink = os.pipe()
                source = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
                opened += [sink, source] if stdin is None else [sink]
                descriptors += [source, sink]
            kept = container.spawn(
                argv, env, cwd=check_inside(cwd), terminal=terminal, adopts=self.adopts, descriptors=descriptors
            )
        except (OSError, EOFError) as error:
            for descriptor in (status, *(() if output is None else (output,))):
                os.close(descriptor)
            if isinstance(error, EOFError):
                if not container.ended:
                    readable(container.pidfd, 1.0)
                self._live_container()
                raise SandboxClosed(f"the sandbox ended: {error}") from error
            raise
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return NamespaceProcess(kept[0], status, kept[1] if terminal else None, output)

    def processes(self) -> list[ProcessInfo]:
        """Processes inside, without the init."""
        return offspring(self._live_container().pid)

    def kill(self, pids: Iterable[int]) -> None:
        """Kill processes of this container by their numbers on the host; others are ignored."""
        mine = {info.pid for info in self.processes()}
        for pid in mine.intersection(pids):
            send(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop all processes inside for the context; see `base.Backend.paused`."""
        with self._stopped(self._live_container()):
            yield

    def commit(self, *, keep_processes: bool = False) -> OverlayTree:
        """Make a tree of the present files; see `base.Backend.commit`."""
        container = self._live_container()
        below = self.below
        assert below is not None
        if keep_processes:
            return self._copy(container, below)
        container.end()
        self._check_full(container)
        store = self.runtime.store
        layers = below.layers if container.layer.untouched() else (container.layer, *below.layers)
        tree = OverlayTree(store, self.rootfs, layers, rootless=self.rootless)
        self.part().give_back()
        return tree

    def _copy(self, container: Container, below: OverlayTree) -> OverlayTree:
        store = self.runtime.store
        store.check_room()
        layer = store.new()
        try:
            with self._stopped(container):
                copy_layer(container.layer, layer, rootless=self.rootless)
            return OverlayTree(store, self.rootfs, (layer, *below.layers), rootless=self.rootless)
        finally:
            store.drop([layer])

    @contextlib.contextmanager
    def _stopped(self, container: Container) -> Iterator[None]:
        """Stop all processes inside for the context."""
        if container.group and container.group.freeze():
            try:
                yield
            finally:
                container.group.thaw()
            return
        stopped: set[int] = set()
        try:
            deadline, calm = time.monotonic() + _STOPPING, 0
            # One that was stopped may be let continue by another before that is stopped too: each look counts anew.
            while calm < _LOOKS and time.monotonic() < deadline:
                running = {info.pid for info in offspring(container.pid) if state(info.pid) not in "TtZX"}
                for pid in running:
                    send(pid, signal.SIGSTOP)
                stopped |= running
                calm = 0 if running else calm + 1
            yield
        finally:
            for pid in stopped:
                send(pid, signal.SIGCONT)

    def unpack(self, data: bytes) -> OverlayTree:
        """Make a tree from the archive of `OverlayTree.pack`; see `base.Backend.unpack`."""
        self.runtime.store.check_room()
        return archive.unpack(data, self.runtime.store, self.rootfs, rootless=self.rootless, limit=self.limits.disk)

    def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """Read a regular file; see `base.Backend.read_file`."""
        container = self._live_container()
        descriptor = kernel.open_beneath(container.root, check_inside(path), FLAGS)
        try:
            _check_not_of_proc(container, descriptor, path)
            return regular_file(descriptor, path, limit=limit)
        finally:
            os.close(descriptor)

    def open_pipe(self, path: str, *, write: bool = False) -> int:
        """Open a named pipe inside, without waiting for its other end; returns a descriptor that does not block.

        Args:
            path: absolute, inside.
            write: open it for writing, else for reading.

        Raises:
            OSError: as `open` would (``ENXIO``: nobody reads what would be written); it is no pipe.
            SandboxClosed, SandboxFull: there is no live container.
        """
        container = self._live_container()
        flags = (os.O_WRONLY if write else os.O_RDONLY) | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = kernel.open_beneath(container.root, check_inside(path), flags)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a named pipe", path)
        return descriptor

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file as root of the container, making missing parents; see `base.Backend.write_file`."""
        container = self._live_container()
        path = check_inside(path)
        if self.limits.disk is not None and len(data) > self.limits.disk:
            raise SandboxFull(f"{len(data):,} bytes are to be written, {self.limits.disk:,} are allowed (Limits.disk)")
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
        with _acting_as(container.base):
            try:
                descriptor = kernel.open_beneath(container.root, path, flags, 0o600)
            except FileNotFoundError:
                _make_parents(container.root, path)
                descriptor = kernel.open_beneath(container.root, path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            _check_not_of_proc(container, file.fileno(), path)
            os.ftruncate(file.fileno(), 0)
            file.write(data)
            os.fchmod(file.fileno(), mode)

    def sibling(self) -> OverlayBackend:
        """Another backend of the same kind, not started."""
        sibling = OverlayBackend(
            self.rootfs, limits=self.limits, network=self.network, rootless=self.rootless, env=self._extra_env
        )
        sibling.adopts, sibling.lazy_pages, sibling.copied = self.adopts, self.lazy_pages, self.copied
        sibling.private, sibling.capabilities = self.private, self.capabilities
        return sibling

    def part(self) -> _Held:
        """Detach from the container, if there is one; returns the resources to give back."""
        left = _Held(self.runtime, self.container, self.below)
        self.container = self.below = self._held.container = self._held.below = None
        return left

    def close(self) -> None:
        """End every process and delete the files that no tree holds. Idempotent."""
        self._closed = True
        self.part().give_back()


@dataclass(slots=True)
class _Held:
    """Resources of a garbage-collected backend, to be given back."""

    runtime: Runtime
    container: Container | None = None
    below: OverlayTree | None = None

    def give_back(self) -> None:
        """End the container and give up its holds. Does nothing in a fork of the owner."""
        if os.getpid() != self.runtime.pid:
            return
        if self.container is not None:
            self.runtime.discard(self.container)
        if self.below is not None:
            self.below.release()


def _check_not_of_proc(container: Container, descriptor: int, path: str) -> None:
    proc = kernel.open_beneath(container.root, "/proc", os.O_PATH)
    try:
        check_not_of_proc(descriptor, proc, path)
    finally:
        os.close(proc)


@contextlib.contextmanager
def _acting_as(base: int) -> Iterator[None]:
    """Context in which files that this thread makes in a container belong to root of the container."""
    if not base:
        yield
        return
    kernel.act_on_files_as(base)
    try:
        yield
    finally:
        kernel.act_on_files_as(0)


def _make_parents(root: int, path: str) -> None:
    """Make the directories on a path inside."""
    folder = ""
    for part in path.strip("/").split("/")[:-1]:
        above = kernel.open_beneath(root, folder or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(part, 0o755, dir_fd=above)
        except FileExistsError:
            pass
        finally:
            os.close(above)
        folder += f"/{part}"


def _capabilities(rootless: bool, groups: Groups | None, shared_ids: str) -> Capabilities:
    grouped = frozenset(groups.parents) if groups else frozenset()
    limits = {"disk", "files", "seconds"}
    notes = [
        "A file with several names that is older than the last snapshot becomes one of its own when it is written to.",
        "Statistics of the kernel can be read in /proc.",
        "The disk limit holds for each file at once; for all that a container takes, and for the number of its files, "
        "four times a second: then the container is ended.",
    ]
    if "memory" in grouped:
        limits.add("memory")
    else:
        notes.append("No control group for memory can be made here: the limit holds for each process.")
    if "freezer" not in grouped:
        notes.append("No control group can freeze processes here: they are stopped by signals, which shells notice.")
    if "pids" in grouped or rootless or not shared_ids:
        limits.add("processes")
    else:
        notes.append("No control group for processes can be made here: their number is not limited.")
    leaves_open = {"statistics"}
    if shared_ids:
        leaves_open.add("quotas")
        notes.append(
            "What the kernel counts by user (watches of files, waiting signals, message queues, descriptors in flight "
            "between sockets) is counted together with all that this user runs."
        )
    keeps = {"modes", "xattrs", "hardlinks", "sparse", "mtimes", "tmp", "shm"}
    if rootless:
        notes.append("There is one user, root: files cannot be given to others.")
        leaves_open.add("locks")
        notes.append("Device nodes are the machine's, read-only: locks on them are shared with it.")
        if os.geteuid() == 0:
            notes.append(
                "Made by root, it has root's id outside, without any capability there: let an ordinary user make it."
            )
        notes.append(
            "Renaming a directory that is older than the last snapshot fails with EXDEV; mv copies it instead."
        )
    else:
        keeps.add("owners")
        notes.append(
            f"Root inside is root of the machine, held back by capabilities and a filter alone: {shared_ids}."
            if shared_ids
            else "Files of the root file system that belong to ids above 65,535 are nobody's inside."
        )
    return Capabilities(
        name="overlay-rootless" if rootless else "overlay",
        isolated=True,
        network_off=True,
        owners=not rootless,
        snapshot_cost="constant",
        limits=frozenset(limits),
        keeps=frozenset(keeps),
        private_ids=not shared_ids,
        notes=tuple(notes),
        leaves_open=frozenset(leaves_open),
    )


def criu_checkpointer() -> type[CriuCheckpointer]:
    """The class of the checkpointers, imported at its first use: few sandboxes capture processes."""
    from sandboxgym.sandbox.checkpoint.checkpointer import CriuCheckpointer

    return CriuCheckpointer


def why_unavailable(*, rootless: bool | None = None) -> str | None:
    """Reason why this process cannot make overlay sandboxes here; None if a try succeeded."""
    try:
        shared = runtime()
        folder = shared.directory / "probe"
        folder.mkdir(exist_ok=True)
        backend = OverlayBackend(RootFS("probe", (folder,)), rootless=rootless)
        try:
            backend.start()
        finally:
            backend.close()
    except (SandboxError, OSError) as error:
        return str(error)
    return None
