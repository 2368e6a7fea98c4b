"""Resources shared by the overlay backends of a process: the zygote, the store of layers, warm containers."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import itertools
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandboxgym.sandbox.base import CONTROL, Limits, RootFS, SandboxError, SandboxUnavailable
from sandboxgym.sandbox.files import name_files as names
from sandboxgym.sandbox.layers import accountant
from sandboxgym.sandbox.layers.store import FILES, WORK, LayerStore, StoredLayer
from sandboxgym.sandbox.overlay import init_binary, ipc, kernel, mounts, seccomp, zygote
from sandboxgym.sandbox.overlay.cgroups import RECORD, ControlGroup, Groups
from sandboxgym.sandbox.overlay.processes import readable
from sandboxgym.sandbox.overlay.reaper import record_zygote
from sandboxgym.system import run_directories

AHEAD = 2
"""Warm containers kept ready for each kind."""
KIND = "sandbox"
"""Kind of the run directory."""
run_directories.register_reaper(KIND, "sandboxgym.sandbox.overlay.reaper:clear")

_SKELETON = ("proc", "sys", "dev/shm", "tmp", "run", "root", CONTROL.strip("/"))
_STOP_SECONDS = 10.0

Flavour = tuple[bool, bool, bool]
"""Kind of a container: rootless, network, private ids."""

VARIABLE = "SANDBOXGYM_PRIVATE_IDS"
"""Environment variable; ``0`` disables private ids, for root file systems with ids above 65,535."""


class Container:
    """Connection to the init of a container."""

    def __init__(
        self,
        channel: socket.socket,
        pidfd: int,
        pid: int,
        group: ControlGroup | None,
        layer: StoredLayer,
        base: int = 0,
    ) -> None:
        self.channel = channel
        self.pidfd = pidfd
        self.pid = pid
        self.group = group
        self.layer = layer
        self.base = base
        """First id outside of the files inside; 0 where ids are equal."""
        self.root = -1
        """Descriptor of the root directory."""
        self.control = -1
        """Descriptor of the control directory."""
        self.frozen = False
        """True if its control group was frozen."""
        self.pages = -1
        """Descriptor that reports all restored memory in place: by `criu_process.DONE`, or by its end on failure."""
        self._waiting = False

    def ask(self, what: str, request: dict[str, Any], descriptors: Sequence[int] = ()) -> list[int]:
        """Send a request; the descriptors of the answer.

        Raises:
            OSError: it failed inside.
            EOFError: the init is gone.
        """
        self.tell(what, request, descriptors)
        return self.answer()

    def tell(self, what: str, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a request without waiting for the `answer`, which must be taken before the next request.

        Raises:
            EOFError: the init is gone.
        """
        self._send(marshal.dumps((what, request)), descriptors)

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: str,
        terminal: bool,
        adopts: bool,
        descriptors: Sequence[int],
    ) -> list[int]:
        """Start a process; its pidfd, and the master side of its terminal if it has one.

        Args:
            argv: program and arguments.
            env: the whole environment.
            cwd: directory inside.
            terminal: True for a terminal.
            adopts: True to make its orphaned descendants its children; with a terminal only.
            descriptors: for its exit status; without a terminal, also for its input and output.

        Raises:
            OSError: it cannot be started.
            EOFError: the init is gone.
            ValueError: null bytes.
        """
        self._send(ipc.pack_spawn(argv, env, cwd=cwd, terminal=terminal, adopts=adopts), descriptors)
        return self.answer()

    def _send(self, payload: bytes, descriptors: Sequence[int]) -> None:
        if self._waiting:
            self.end()
            raise EOFError("an earlier request was interrupted before its answer came")
        self._waiting = True
        try:
            ipc.send(self.channel, payload, descriptors)
        except OSError as error:
            raise EOFError(str(error)) from error

    def answer(self) -> list[int]:
        """Wait for the next answer; see `ask`."""
        payload, descriptors = ipc.receive(self.channel)
        self._waiting = False
        if payload.startswith(b"error "):
            reason, _, message = payload.decode(errors="backslashreplace").partition("\0")
            _, code, path = reason.split(" ", 2)
            raise OSError(int(code), message or os.strerror(int(code)), path or None)
        return descriptors

    @property
    def ended(self) -> bool:
        """True if every process is gone."""
        return self.pidfd < 0 or readable(self.pidfd, 0)

    def freeze(self) -> bool:
        """Stop every process until `thaw`; False if that cannot be done here."""
        self.frozen = self.group is not None and self.group.freeze()
        return self.frozen

    def thaw(self) -> None:
        """Continue stopped processes. Idempotent."""
        if self.frozen and self.group is not None:
            self.frozen = False
            with contextlib.suppress(OSError):  # they have ended, and the group with them
                self.group.thaw()

    def kill(self) -> None:
        """Kill every process, without waiting for their end. Idempotent."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.thaw()  # what is frozen does not even die

    def end(self) -> None:
        """Kill every process and wait for the last. Idempotent.

        Raises:
            SandboxError: they do not end.
        """
        if self.pidfd < 0:
            return
        for descriptor in (self.root, self.control, self.pages):
            if descriptor >= 0:
                os.close(descriptor)
        self.root = self.control = self.pages = -1
        self.kill()
        gone = readable(self.pidfd, _STOP_SECONDS)
        self.channel.close()
        os.close(self.pidfd)
        self.pidfd = -1
        if not gone:
            raise SandboxError(f"the processes of a sandbox did not end within {_STOP_SECONDS:.0f} s of being killed")


class Runtime:
    """Resources shared by all overlay backends of one process: the store, the zygote, and the control groups."""

    def __init__(self) -> None:
        run_directories.reap()
        self.pid = os.getpid()
        self.directory = run_directories.claim(KIND)
        self.lock = threading.RLock()
        self.groups = Groups.make(f"sandboxgym-{self.directory.name}")
        if self.groups is not None:
            (self.directory / RECORD).write_text("\n".join(self.groups.paths))
        for name in ("stage", "root"):
            (self.directory / name).mkdir()
        self.store = LayerStore(self.directory, remove=self.remove)
        self._private: dict[tuple[Path, ...], str] = {}
        self._shown: dict[str, list[tuple[str, str, str]]] = {}
        self._features = -1
        self._ready: dict[Flavour, deque[Container]] = {}
        self._asked: deque[tuple[Flavour, ControlGroup | None, Path]] = deque()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                zygote.command(sys.executable),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )
        self.channel = ours
        record_zygote(self.directory, self.process.pid)
        settings = {
            "pid": self.pid,
            "store": str(self.directory),
            "stage": str(self.directory / "stage"),
            "root": str(self.directory / "root"),
            "filter": seccomp.program(),
            "init": str(init_binary.program() or ""),
            "user": os.geteuid(),
            "group": os.getegid(),
        }
        ipc.send(self.channel, marshal.dumps(settings))

    @property
    def live(self) -> bool:
        """True if the zygote runs."""
        return self.process.poll() is None

    def container(self, flavour: Flavour) -> Container:
        """Take a warm container, made ahead or now.

        Raises:
            SandboxUnavailable: the kernel refuses.
        """
        with self.lock:
            ready = self._ready.setdefault(flavour, deque())
            if not ready and all(kind != flavour for kind, _, _ in self._asked):
                self._ask(flavour)
            if not ready:
                self._tell("hurry")
            while not ready:
                self._receive(flavour)
            container = ready.popleft()
            if not ready and self._asked:  # many are wanted, one after the other
                self._tell("hurry")
        try:
            container.answer()
        except (OSError, EOFError) as error:
            self.discard(container)
            raise SandboxUnavailable(advice(error, rootless=flavour[0])) from error
        return container

    def prepare(self, flavour: Flavour) -> None:
        """Have warm containers made for later requests."""
        with self.lock:
            coming = sum(kind == flavour for kind, _, _ in self._asked) + len(self._ready.get(flavour, ()))
            for _ in range(AHEAD - coming):
                self._ask(flavour)

    def _ask(self, flavour: Flavour) -> None:
        rootless, network, private = flavour
        namespaces = kernel.NEWNS | kernel.NEWPID | kernel.NEWIPC | kernel.NEWUTS
        namespaces |= (0 if network else kernel.NEWNET) | (kernel.NEWUSER if rootless else 0)
        group = self.groups.new() if self.groups else None
        path = self.store.name()
        spec = {
            "namespaces": namespaces,
            "rootless": rootless,
            "private": private,
            "cgroups": group.paths if group else [],
            "directories": [str(path), str(path / FILES), str(path / WORK)],
        }
        self._asked.append((flavour, group, path))
        self._tell("embryo", spec)

    def _receive(self, wanted: Flavour) -> None:
        """Receive the next warm container that was requested; one of another kind than wanted may have failed."""
        try:
            payload, descriptors = ipc.receive(self.channel)
        except (EOFError, OSError) as error:
            raise SandboxUnavailable(f"the process that makes sandboxes ended: {error}") from error
        flavour, group, path = self._asked.popleft()
        pid, code, message, base = marshal.loads(payload)
        layer = self.store.adopt(path)
        if pid:
            channel, pidfd = descriptors
            container = Container(socket.socket(fileno=channel), pidfd, pid, group, layer, base)
            self._ready.setdefault(flavour, deque()).append(container)
            return
        self.store.drop([layer])
        for group_path in group.paths if group else ():
            os.rmdir(group_path)
        if flavour == wanted:
            raise SandboxUnavailable(advice(OSError(code, message), rootless=flavour[0]))

    def _tell(self, *request: Any, descriptors: Sequence[int] = ()) -> None:
        with self.lock:
            try:
                ipc.send(self.channel, marshal.dumps(request), descriptors)
            except OSError as error:
                raise SandboxUnavailable(f"the process that makes sandboxes ended: {error}") from error

    def discard(self, container: Container) -> None:
        """End a container and give up its layer."""
        with contextlib.suppress(SandboxError):
            container.end()
        self.store.drop([container.layer])

    def capturer(self, program: str, container: Container) -> socket.socket:
        """Start a CRIU that can capture a live container; the socket to it.

        Args:
            program: CRIU.
            container: live.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                spec = {"program": program, "init": container.pid}
                self._tell("capture", spec, descriptors=[theirs.fileno(), self.features(program)])
            except BaseException:
                ours.close()
                raise
        return ours

    def restorer(self, program: str, container: Container, work: Path) -> socket.socket:
        """Start a CRIU that will restore into a warm container, which has not answered yet; the socket to it.

        Args:
            program: CRIU.
            container: the warm container.
            work: directory for CRIU to work in.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                request = {"program": program, "work": os.fspath(work)}
                container.tell("restorer", request, [theirs.fileno(), self.features(program)])
            except BaseException:
                ours.close()
                raise
        return ours

    def bring_pages(self, container: Container, *, layer: Path, images: Path, work: Path) -> int:
        """Have memory restored lazily into a container whose processes are about to be restored.

        Args:
            container: the warm container; gets `Container.pages`.
            layer: which is not deleted meanwhile, with the pages in it.
            images: in ``layer``.
            work: the directory of the restoring CRIU.

        Returns:
            A descriptor that a byte comes from when restoring may begin; it ends without one if that cannot be done.
        """
        ready, told = os.pipe()
        ours, theirs = socket.socketpair()
        container.pages, done = ours.detach(), theirs.detach()
        places = {"layer": layer, "images": images, "work": work}
        spec = {"init": container.pid, **{name: os.fspath(path) for name, path in places.items()}}
        try:
            self._tell("pages", spec, descriptors=[told, done])
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(told)
            os.close(done)
        return ready

    def features(self, program: str) -> int:
        """The mount namespace for every CRIU, see `criu_process.keep_features`; made at the first call."""
        with self.lock:
            if self._features < 0:
                ours, theirs = socket.socketpair()
                with ours:
                    with theirs:
                        self._tell("features", str(self.directory), program, descriptors=[theirs.fileno()])
                    try:
                        _, (self._features,) = ipc.receive(ours)
                    except EOFError as error:
                        raise SandboxUnavailable("no mount namespace for CRIU can be made") from error
            return self._features

    def watch(self, container: Container, limits: Limits) -> None:
        """Hold a container to its limits of disk usage."""
        most = [accountant.NONE if limit is None else limit for limit in (limits.disk, limits.files)]
        self._tell("watch", container.pid, str(container.layer.files), *most)

    def remove(self, paths: Sequence[str]) -> None:
        """Delete directories in the background."""
        with contextlib.suppress(SandboxUnavailable):  # then they go with the run directory
            self._tell("remove", list(paths))

    def forget(self) -> None:
        """Close the connections to a zygote that was killed, and to the warm containers that ended with it."""
        self.channel.close()
        for container in itertools.chain(*self._ready.values()):
            container.channel.close()
            os.close(container.pidfd)
        self._ready.clear()

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until all requested removals are done."""
        read, write = os.pipe()
        try:
            self._tell("settle", descriptors=[write])
        finally:
            os.close(write)
        readable(read, seconds)
        os.close(read)

    def why_not_private(self, rootfs: RootFS) -> str:
        """Reason why containers over a root file system cannot have private ids; empty if they can, tested once."""
        if os.environ.get(VARIABLE) == "0":
            return f"{VARIABLE}=0 is set"
        with self.lock:
            if rootfs.lowers not in self._private:
                read, write = os.pipe()
                try:
                    self._tell("private", [str(self.directory), *map(str, rootfs.lowers)], descriptors=[write])
                finally:
                    os.close(write)
                with os.fdopen(read, "rb") as answer:
                    self._private[rootfs.lowers] = answer.read().decode(errors="backslashreplace")
            return self._private[rootfs.lowers]

    def shown(self, rootfs: RootFS) -> list[tuple[str, str, str]]:
        """Files of the host to show: path, kind of mount (see ``mounts.py``), path inside."""
        key = _digest(rootfs)
        with self.lock:
            if key not in self._shown:
                points = run_directories.mount_points() if rootfs.binds else []
                self._shown[key] = [(str(path), _how(path, points), inside) for path, inside in rootfs.binds]
            return self._shown[key]

    def skeleton(self, rootfs: RootFS) -> Path:
        """Lowest layer, with the mount points that every container needs."""
        path = self.directory / f"skeleton-{_digest(rootfs)}"
        with self.lock:
            if not path.exists():
                path.mkdir(mode=0o755)
                for name in _SKELETON:
                    (path / name).mkdir(parents=True, exist_ok=True)
                for name in ("tmp", "dev/shm"):
                    (path / name).chmod(0o1777)
                for source, inside in rootfs.binds:
                    target = path / inside.strip("/")
                    if source.is_dir():
                        target.mkdir(parents=True, exist_ok=True)
                    else:
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.touch()
        return path

    def names(self, rootfs: RootFS, *, network: bool) -> Path:
        """Layer with the files of name resolution, above a root file system; see ``files/name_files.py``."""
        with self.lock:
            return names.layer(self.directory, rootfs.lowers, names.contents(network=network))

    def close(self) -> None:
        """End the zygote, which ends every container, and give the run directory back."""
        with contextlib.suppress(SandboxUnavailable):
            self._tell("end")  # forks of this process may hold the channel open
        self.channel.close()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        run_directories.give_back(self.directory)


def _digest(rootfs: RootFS) -> str:
    return hashlib.sha256(repr([(str(path), inside) for path, inside in rootfs.binds]).encode()).hexdigest()[:16]


def _how(path: Path, mount_points: Sequence[str]) -> str:
    if not path.is_dir():
        return mounts.BIND
    if next(path.iterdir(), None) is None:
        return mounts.EMPTY
    whole = str(path.resolve())
    below = (point != whole and run_directories.is_within(point, whole) for point in mount_points)
    return mounts.BIND if any(below) else mounts.OVERLAY


_runtime: Runtime | None = None
_runtime_lock = threading.RLock()  # a signal may end the process in the thread that makes a runtime


def runtime() -> Runtime:
    """The runtime of this process; made at the first call, and again where it died.

    Raises:
        SandboxUnavailable: there can be none here, or another thread is ending the process.
    """
    global _runtime
    with _runtime_lock:
        if run_directories.ending():  # else a thread whose call goes on would make another one
            raise SandboxUnavailable("this process is ending: a sandbox that started now would outlive it")
        if _runtime is not None and (_runtime.pid != os.getpid() or not _runtime.live):
            _runtime.forget()
            _runtime = None
        if _runtime is None:
            if not kernel.supported():
                raise SandboxUnavailable("overlay sandboxes need Linux on x86-64 or aarch64")
            _runtime = Runtime()
        return _runtime


@atexit.register
def _close_runtime() -> None:
    run_directories.begin_end()
    if _runtime_lock.acquire(timeout=_STOP_SECONDS):  # a thread may be making one
        _runtime_lock.release()
    if _runtime is not None and _runtime.pid == os.getpid():
        _runtime.close()


def _unlock() -> None:
    """Forget in a fork that a thread of its parent held the lock."""
    global _runtime_lock
    _runtime_lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def advice(error: Exception, *, rootless: bool) -> str:
    """Likely reason why the kernel refused to make a container, and the remedy."""
    code = error.errno if isinstance(error, OSError) else None
    what = "without root" if rootless else "as root"
    hint = ""
    if code in (errno.EPERM, errno.EACCES):
        hint = (
            ": user namespaces are switched off (sysctl kernel.unprivileged_userns_clone or "
            "kernel.apparmor_restrict_unprivileged_userns), or this is a container that forbids them"
            if rootless
            else ": it needs CAP_SYS_ADMIN, which containers lack unless they are started with --privileged"
        )
    elif code == errno.ENOSPC:
        hint = ": sysctl user.max_user_namespaces or user.max_mnt_namespaces is reached"
    elif code in (errno.EINVAL, errno.ENOSYS, errno.ENODEV):
        hint = (
            ": it needs Linux 6.8 with overlayfs, and a store on a file system that can hold an upper layer (ext4, xfs,"
            " btrfs, tmpfs; not another overlay): set SANDBOXGYM_RUNTIME to a directory on one"
        )
    return f"an overlay sandbox cannot run here {what}{hint} [{error}]"
