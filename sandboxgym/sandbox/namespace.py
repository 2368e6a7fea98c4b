"""Sandboxes of Linux namespaces over an overlay file system: `OverlayBackend`, as root or as an ordinary user.

1. A box has mount, process, IPC, host name and (unless ``network=True``) network namespaces of its own, a private
   ``/proc`` and a minimal ``/dev``. It sees its root file system and what it wrote, nothing else of the host.
2. What runs inside is root without the capabilities that reach out, cannot gain privileges, and is held to a filter of
   system calls and to a control group, where this process may make them.
3. `freeze` ends the processes and keeps the layer they wrote: nothing is copied, whatever its size.
4. Boxes are made by a small process beside this one (``zygote.py``), a little ahead of demand. Every process ends when
   its owner does.
5. A live box's own process is a small program that is compiled once, where there is a C compiler; else it is a fork of
   Python, which takes 1.4 MB more. ``SANDBOXGYM_INIT=python`` asks for that.
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
from dataclasses import dataclass
from pathlib import Path

from sandboxgym.errors import SnapshotMismatch
from sandboxgym.sandbox import archive, kernel, zygote
from sandboxgym.sandbox.base import (
    CONTROL,
    Capabilities,
    Limits,
    ProcessInfo,
    RootFS,
    SandboxClosed,
    SandboxError,
    SandboxFull,
    SandboxUnavailable,
    check_inside,
    clean_environment,
)
from sandboxgym.sandbox.boxes import Box, Runtime, advice, runtime
from sandboxgym.sandbox.layers import OverlayTree
from sandboxgym.sandbox.limits import Groups, rlimits
from sandboxgym.sandbox.processes import NamespaceProcess, offspring, readable, send, state
from sandboxgym.sandbox.squash import copy_layer, squash

_DEFAULT_LIMITS = Limits()


class OverlayBackend:
    """Files and processes of one box; see `base.Backend`.

    Args:
        rootfs: what lies below all that is written.
        limits: of the box.
        network: share the host's network; else there is only a loopback device.
        rootless: make a user namespace, as an ordinary user can; default: unless this process is root.
        env: added to the environment that `spawn` is given by nobody else; kept for those who start shells.
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
        self.control = self.runtime.control()
        self.control_inside = CONTROL
        self.capabilities = _capabilities(self.rootless, self.runtime.groups)
        self._extra_env = env
        self.box: Box | None = None
        """The live box, or one that was killed; for those who measure."""
        self.adopts = False
        """What processes on a terminal leave behind becomes theirs again, so that they can be captured as a whole."""
        self.lazy_pages: int | None = None
        """Bytes of memory from which on restored processes get it bit by bit, see ``revive.py``; None: never."""
        self.below: OverlayTree | None = None
        """What the live box stands on."""
        self._closed = False
        self._cleaner = weakref.finalize(self, _clean, self.runtime, str(self.control), held := _Held(self.runtime))
        self._cleaner.atexit = False
        self._held = held

    def __repr__(self) -> str:
        return f"OverlayBackend({self.rootfs.id}, {'live' if self.live else 'not live'})"

    def base(self) -> OverlayTree:
        """The root file system with nothing written. Starts nothing."""
        return OverlayTree(self.runtime.store, self.rootfs, (), rootless=self.rootless, identity=self.rootfs.id)

    @property
    def live(self) -> bool:
        """Whether there is a box and its init runs."""
        return self.box is not None and not self.box.ended

    def start(self, tree: OverlayTree | None = None) -> None:
        """Become live on ``tree``; see `base.Backend.start`."""
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
        if left.box is not None:
            left.box.kill()  # it dies while the next one is made
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
        flavour = (self.rootless, self.network)
        try:
            box = shared.box(flavour)
            try:
                self._become(box, below)
            except BaseException:
                shared.discard(box)
                raise
        except BaseException:
            below.release()
            raise
        self.settle(box, below)
        shared.watch(box, self.limits.disk)
        shared.prepare(flavour)

    def settle(self, box: Box, below: OverlayTree) -> None:
        """Be live in ``box``, which stands on ``below``; both are held from here on."""
        self.box = self._held.box = box
        self.below = self._held.below = below

    def _become(self, box: Box, below: OverlayTree) -> None:
        if box.group:
            box.group.limit(self.limits)
        lowers = [*(layer.files for layer in below.layers), *self.rootfs.lowers, self.runtime.skeleton(self.rootfs)]
        grouped = frozenset(box.group.folders) if box.group else frozenset()
        request = {
            "lowers": [os.fspath(path) for path in lowers],
            "upper": os.fspath(box.layer.files),
            "work": os.fspath(box.layer.work),
            "binds": [(os.fspath(path), inside) for path, inside in self.rootfs.binds],
            "control": os.fspath(self.control),
            "control_inside": CONTROL,
            "rlimits": rlimits(self.limits, grouped=grouped),
        }
        try:
            box.layer.dress(lowers[0])
            (box.root,) = box.ask("become", request)
        except OSError as error:
            raise SandboxUnavailable(advice(error, rootless=self.rootless)) from error
        except EOFError as error:
            raise SandboxUnavailable(f"the init of a sandbox ended while it was made: {error}") from error

    def _revive(self) -> None:
        """Where the zygote was killed, go on with another; trees live in the directory of the first."""
        self.runtime = self._held.runtime = runtime()

    def _live_box(self) -> Box:
        if os.getpid() != self.runtime.pid:
            raise SandboxClosed("the sandbox belongs to the process that this one was forked from")
        if self.box is None:
            raise SandboxClosed("the sandbox is not live: it was not started, or frozen, or closed")
        if self.box.ended:
            self._check_full(self.box)
            raise SandboxClosed("the processes of the sandbox were killed from outside")
        return self.box

    def _check_full(self, box: Box) -> None:
        note = box.layer.path / zygote.FULL
        if note.exists():
            raise SandboxFull(f"the sandbox was ended by its limit of disk space: {note.read_text()}")

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = "/",
        terminal: bool = False,
        stdin: int | None = None,
    ) -> NamespaceProcess:
        """Start a process in the box; see `base.Backend.spawn`.

        Raises:
            OSError: the program or directory is not there, or there is no room for another process.
            SandboxClosed, SandboxFull: there is no live box.
        """
        box = self._live_box()
        status, report = os.pipe()
        descriptors, output, opened = [report], None, [report]
        try:
            if not terminal:
                output, sink = os.pipe()
                source = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
                opened += [sink, source] if stdin is None else [sink]
                descriptors += [source, sink]
            kept = box.spawn(
                argv, env, cwd=check_inside(cwd), terminal=terminal, adopts=self.adopts, descriptors=descriptors
            )
        except (OSError, EOFError) as error:
            for descriptor in (status, *(() if output is None else (output,))):
                os.close(descriptor)
            if isinstance(error, EOFError):
                if not box.ended:
                    readable(box.pidfd, 1.0)
                self._live_box()
                raise SandboxClosed(f"the sandbox ended: {error}") from error
            raise
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return NamespaceProcess(kept[0], status, kept[1] if terminal else None, output)

    def processes(self) -> list[ProcessInfo]:
        """What runs inside, without the init."""
        return offspring(self._live_box().pid)

    def kill(self, pids: Iterable[int]) -> None:
        """Kill processes of this box by the numbers of the host; others are left alone."""
        mine = {info.pid for info in self.processes()}
        for pid in mine.intersection(pids):
            send(pid, signal.SIGKILL)

    def freeze(self, *, keep_processes: bool = False) -> OverlayTree:
        """The files as they stand; see `base.Backend.freeze`."""
        box = self._live_box()
        below = self.below
        assert below is not None
        if keep_processes:
            return self._copy(box, below)
        box.end()
        self._check_full(box)
        store = self.runtime.store
        layers = below.layers if box.layer.untouched() else (box.layer, *below.layers)
        tree = OverlayTree(store, self.rootfs, layers, rootless=self.rootless)
        self.part().give_back()
        return tree

    def _copy(self, box: Box, below: OverlayTree) -> OverlayTree:
        store = self.runtime.store
        store.check_room()
        layer = store.new()
        try:
            with self._stopped(box):
                copy_layer(box.layer, layer, rootless=self.rootless)
            return OverlayTree(store, self.rootfs, (layer, *below.layers), rootless=self.rootless)
        finally:
            store.drop([layer])

    @contextlib.contextmanager
    def _stopped(self, box: Box) -> Iterator[None]:
        """Nothing inside runs meanwhile."""
        if box.group and box.group.freeze():
            try:
                yield
            finally:
                box.group.thaw()
            return
        stopped: set[int] = set()
        try:
            while found := {info.pid for info in offspring(box.pid) if state(info.pid) not in "Tt"} - stopped:
                for pid in found:
                    send(pid, signal.SIGSTOP)
                stopped |= found
            deadline = time.monotonic() + 1.0
            while any(state(pid) not in "TtZX" for pid in stopped) and time.monotonic() < deadline:
                time.sleep(0.001)
            yield
        finally:
            for pid in stopped:
                send(pid, signal.SIGCONT)

    def unpack(self, data: bytes) -> OverlayTree:
        """The inverse of `OverlayTree.pack`; see `base.Backend.unpack`."""
        self.runtime.store.check_room()
        return archive.unpack(data, self.runtime.store, self.rootfs, rootless=self.rootless)

    def read_file(self, path: str) -> bytes:
        """Content of a regular file; see `base.Backend.read_file`."""
        root = self._live_box().root
        descriptor = kernel.open_beneath(root, check_inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            return file.read()

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file as root of the box, making missing parents; see `base.Backend.write_file`."""
        root = self._live_box().root
        path = check_inside(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
        try:
            descriptor = kernel.open_beneath(root, path, flags, 0o600)
        except FileNotFoundError:
            _make_parents(root, path)
            descriptor = kernel.open_beneath(root, path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            os.ftruncate(file.fileno(), 0)
            file.write(data)
            os.fchmod(file.fileno(), mode)

    def discard(self, path: Path) -> None:
        """Take a directory out of `control`, to be deleted in the background; see `base.Backend.discard`."""
        self.runtime.discard_directory(path)

    def twin(self) -> OverlayBackend:
        """Another backend of the same kind, not started."""
        twin = OverlayBackend(
            self.rootfs, limits=self.limits, network=self.network, rootless=self.rootless, env=self._extra_env
        )
        twin.adopts, twin.lazy_pages = self.adopts, self.lazy_pages
        return twin

    def part(self) -> _Held:
        """What must be given back of the box that there was, if there was one; from here on there is none."""
        left = _Held(self.runtime, self.box, self.below)
        self.box = self.below = self._held.box = self._held.below = None
        return left

    def close(self) -> None:
        """End every process and delete what no tree holds. Idempotent."""
        self._closed = True
        self.part().give_back()
        self._cleaner()


@dataclass(slots=True)
class _Held:
    """What a backend that was forgotten must give up."""

    runtime: Runtime
    box: Box | None = None
    below: OverlayTree | None = None

    def give_back(self) -> None:
        """End the box and give up what it held. Does nothing in a fork of the owner."""
        if os.getpid() != self.runtime.pid:
            return
        if self.box is not None:
            self.runtime.discard(self.box)
        if self.below is not None:
            self.below.release()


def _clean(shared: Runtime, control: str, held: _Held) -> None:
    held.give_back()
    if shared.pid == os.getpid():
        shared.remove([control])


def _make_parents(root: int, path: str) -> None:
    """Directories on the way to a path inside."""
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


def _capabilities(rootless: bool, groups: Groups | None) -> Capabilities:
    grouped = frozenset(groups.parents) if groups else frozenset()
    limits = {"disk", "seconds"}
    notes = [
        "A file with several names that is older than the last snapshot becomes one of its own when it is written to.",
        "The disk limit holds for each file at once, and for all of them four times a second: then the box is ended.",
    ]
    if "memory" in grouped:
        limits.add("memory")
    else:
        notes.append("No control group for memory can be made here: the limit holds for each process.")
    if "freezer" not in grouped:
        notes.append("No control group can freeze processes here: they are stopped by signals, which shells notice.")
    if "pids" in grouped or rootless:
        limits.add("processes")
    else:
        notes.append("No control group for processes can be made here: their number is not limited.")
    keeps = {"modes", "xattrs", "hardlinks", "sparse", "mtimes", "tmp", "shm"}
    if rootless:
        notes.append("There is one user, root: files cannot be given to others.")
        notes.append(
            "Renaming a directory that is older than the last snapshot fails with EXDEV; mv copies it instead."
        )
    else:
        keeps.add("owners")
    return Capabilities(
        name="overlay-rootless" if rootless else "overlay",
        isolated=True,
        network_off=True,
        owners=not rootless,
        snapshot_cost="constant",
        limits=frozenset(limits),
        keeps=frozenset(keeps),
        notes=tuple(notes),
    )


def why_unavailable(*, rootless: bool | None = None) -> str | None:
    """Why no overlay sandbox can be made on this machine by this process; None if it can, which was tried."""
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
