"""A small process beside the owner that forks containers, at a cost independent of the owner's size.

It is started by `command`, which imports this module without the package around it: standard library only, and little
of that, for each container's init is a fork of it. The owner sends requests over a socket (`ipc`, payloads by
``marshal``):

- ``("embryo", spec)``: a warm container process in new namespaces, answered with its socket, a pidfd and its id; see
  ``init.py``. It is made a moment later, for the container that was just started needs the kernel's locks itself, or at
  once after:
- ``("hurry",)``;
- ``("private", directories)`` with a pipe: why files there cannot have private ids (``ids.py``), nothing if they can;
- ``("features", path, …)`` with a socket: the mount namespace for every CRIU, with what it needs of the host, is sent
  through it; see ``criu_process.py``, as for:
- ``("capture", spec)`` with a socket and that namespace: a CRIU in a container's namespaces, which answers at the
  socket;
- ``("pages", spec)`` with a pipe and a socket: a process that lazily restores a container's memory; removals
  requested meanwhile of ``spec["layer"]``, from which it reads, wait until it is done;
- ``("watch", id, directory, nbytes, files)``: kill the container when it exceeds its limits of disk usage; see
  ``layers/accountant.py``;
- ``("remove", paths)``: delete directories in the background;
- ``("settle",)`` with a descriptor: closed once all earlier requests are done;
- ``("end",)``.

When the owner ends, however it does, every container is killed and the zygote with it. When the zygote ends, so do the
containers.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import gc
import marshal
import os
import select
import sys
import time

from sandboxgym.sandbox.layers import accountant
from sandboxgym.sandbox.layers.accountant import FLOOR, Watch
from sandboxgym.sandbox.layers.disk import remove_directories
from sandboxgym.sandbox.overlay import criu_process, ids, init, ipc, kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

ROOMS = ((), ("sandbox",), ("sandbox", "overlay"), ("sandbox", "layers"))
"""Packages that this program and its forks import from, with their own ``__init__`` modules left out."""
LATER = 0.02
"""Seconds until a warm container is made that no request waits for."""
TICK = 0.25
"""Seconds between two looks at the disk while a container is watched."""
PAUSE = 0.1
"""Seconds that a deletion waits for others, to share one process; none if a request waits for it."""
RECOUNT = 10.0
"""Fewest seconds between two counts of the containers' writes."""
PATIENCE = 300.0
"""Seconds after which an unfinished count is abandoned and another one started."""


def command(python: str) -> list[str]:
    """Command line of a zygote whose socket to the owner is its standard input."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    program = (
        "import sys\n"
        f"for room in {ROOMS!r}:\n"
        "    name = '.'.join(['sandboxgym', *room])\n"
        "    sys.modules[name] = type(sys)(name)\n"
        "    sys.modules[name].__path__ = ['/'.join([sys.argv[1], *room])]\n"
        "from sandboxgym.sandbox.overlay.zygote import main\n"
        "main()\n"
    )
    return [python, "-I", "-S", "-B", "-c", program, package]


def main() -> NoReturn:
    """Serve the owner at the other end of standard input until it ends."""
    kernel.show_command_line(b"sandboxgym-zygote")
    owner = _socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    gc.disable()
    gc.freeze()
    try:
        payload, _ = ipc.receive(owner)
    except EOFError:  # the owner was killed just now
        os._exit(0)
    zygote = Zygote(owner, marshal.loads(payload))
    try:
        zygote.serve()
    except (EOFError, ConnectionError):
        pass  # the owner ended, perhaps before it read an answer
    finally:
        zygote.end()
    os._exit(0)


class Zygote:
    """State of the zygote, on which requests act."""

    def __init__(self, owner: _socket.socket, settings: dict[str, Any]) -> None:
        self.owner = owner
        self.settings = settings
        """Settings for `init.Init`; and ``pid`` of the owner, ``store``, its directory."""
        self.pending: list[dict[str, Any]] = []
        """Specs of the warm containers to be made."""
        self.quiet = 0.0
        """Time (monotonic) before which none of them is made, unless one is waited for."""
        self.containers: dict[int, list[str]] = {}
        """Control groups by the id of the init."""
        self.ranges: dict[int, _socket.socket] = {}
        """Claims of containers' private ids, by the id of the init."""
        self.next_range = int.from_bytes(os.urandom(2), "big")
        self.watched: dict[int, Watch] = {}
        """Watched containers, by the id of the init."""
        self.to_remove: list[str] = []
        self.due = 0.0
        """Time (monotonic) from which `to_remove` is deleted."""
        self.waiting: list[int] = []
        self.remover = 0
        self.accountant = 0
        self.report = os.memfd_create("report", os.MFD_CLOEXEC)
        """Memory file in which the accountant leaves `sizes`, `bases` and `suspects` for its successor."""
        self.sizes: dict[str, int] = {}
        """Bytes by directory."""
        self.bases: dict[int, int] = {}
        """Unexplained bytes of the disk while no descriptor was hidden, by the id of the init."""
        self.suspects: list[int] = []
        """Ids of the inits of containers that may explain the growth of the disk; see ``layers/accountant.py``."""
        self.free = 0
        self.free_files = 0
        self.features = -1
        """Mount namespace of `criu_process.keep_features`."""
        self.bringing: dict[int, tuple[str, int]] = {}
        """Source of lazily restored memory and the container's init, by the id of the restoring process."""
        self.counted = 0.0
        self.wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> NoReturn:
        """Answer requests; raises ``EOFError`` when the owner is gone."""
        poll = select.poll()
        poll.register(self.owner, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        # A fork of the owner may hold the other end of the socket open: the end of the owner itself counts.
        alive = os.pidfd_open(self.settings["pid"])
        poll.register(alive, select.POLLIN)
        while True:
            pause = PAUSE if self.to_remove else TICK if self.watched else None
            if self.pending:
                pause = max(0.0, self.quiet - time.monotonic())
            ready = {fd for fd, _ in poll.poll(pause and pause * 1e3)}
            if alive in ready:
                raise EOFError("the owner ended")
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.collect()
            if self.owner.fileno() in ready:
                payload, descriptors = ipc.receive(self.owner)
                self.answer(marshal.loads(payload), descriptors)
            if self.pending and time.monotonic() >= self.quiet:
                self.make_container(self.pending.pop(0))
            if self.watched:
                self.look_at_disk()
            self.work()

    def answer(self, request: tuple[Any, ...], descriptors: list[int]) -> None:
        """Execute a request of the owner."""
        what, *rest = request
        if what == "embryo":
            self.pending.append(rest[0])
            self.quiet = time.monotonic() + LATER
        elif what == "hurry":
            self.quiet = 0.0
        elif what == "watch":
            pid, directory, nbytes, files = rest
            if pid in self.containers and pid not in self.watched:  # not collected, so the id is still its own
                pidfd, groups = os.pidfd_open(pid), self.containers[pid]
                self.watched[pid] = Watch(directory, nbytes=nbytes, files=files, pidfd=pidfd, groups=groups)
                self.bases[pid] = accountant.unexplained(_free(self.settings["store"])[0], self.sizes)
        elif what == "private":
            self.tell_private(rest[0], descriptors)
        elif what == "features":
            self.tell_features(rest, descriptors)
        elif what == "capture":
            self.beside(criu_process.capture, rest[0], descriptors)
        elif what == "pages":
            if pid := self.beside(criu_process.bring_pages, rest[0], descriptors):
                self.bringing[pid] = (rest[0]["layer"], rest[0]["init"])
        elif what == "remove":
            if not self.to_remove:
                self.due = time.monotonic() + PAUSE
            self.to_remove += rest[0]
        elif what == "settle":
            self.waiting += descriptors
        elif what == "end":
            raise EOFError("the owner ended")
        else:
            raise ValueError(f"unknown request {what!r}")

    def make_container(self, spec: dict[str, Any]) -> None:
        """Fork the init of a warm container and send its socket to the owner."""
        for path in spec["directories"]:
            os.mkdir(path, 0o755)
        opened: list[Any] = []
        base, namespace = 0, -1
        try:
            if spec["private"]:
                base, holder = ids.claim(self.next_range)
                opened.append(holder)
                self.next_range += 1
                namespace = ids.namespace(base)
            mine, theirs = _socket.socketpair()
            opened += [mine, theirs]
            pid = kernel.clone(spec["namespaces"])
            if pid == 0:
                signal.set_wakeup_fd(-1)
                init.main(theirs, {**self.settings, **spec, "base": base, "ids": namespace})
            if base:
                self.ranges[pid] = opened.pop(0)
            self.containers[pid] = spec["cgroups"]
            pidfd = os.pidfd_open(pid)
            ipc.send(self.owner, marshal.dumps((pid, 0, "", base)), [mine.fileno(), pidfd])
            os.close(pidfd)
        except OSError as error:
            ipc.send(self.owner, marshal.dumps((0, error.errno, str(error), 0)))
        finally:
            if namespace >= 0:
                os.close(namespace)
            for one in opened:
                one.close()

    def tell_private(self, directories: list[str], descriptors: list[int]) -> None:
        """Write to a pipe why files in these directories cannot have private ids; nothing if they can."""
        (answer,) = descriptors
        pid = os.fork()
        if pid == 0:
            try:
                ids.probe(directories)
            except OSError as error:
                os.write(answer, (str(error) or "unknown").encode(errors="backslashreplace"))
            finally:
                os._exit(0)
        os.close(answer)
        os.waitpid(pid, 0)

    def tell_features(self, needed: list[str], descriptors: list[int]) -> None:
        """Make the mount namespace for every CRIU, once; the socket is closed where that fails."""
        answer = _socket.socket(fileno=descriptors[0])
        try:
            if self.features < 0:
                self.features = criu_process.keep_features(needed)
            ipc.send(answer, b"", [self.features])
        except OSError as error:
            print(f"sandboxgym: no mount namespace can be made for CRIU: {error}", file=sys.stderr)
        finally:
            answer.close()

    def beside(self, work: Any, spec: dict[str, Any], descriptors: list[int]) -> int:
        """Fork a process of ``criu_process.py``; its id, or 0, with all closed, on failure."""
        try:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                work(*descriptors, {**self.settings, **spec})
            return pid
        except OSError as error:
            print(f"sandboxgym: CRIU could not be started: {error}", file=sys.stderr)
            return 0
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def collect(self) -> None:
        """Collect ended children, and remove the control groups of containers."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.watched:
                os.close(self.watched.pop(pid).pidfd)
                self.bases.pop(pid)
            for path in self.containers.pop(pid, ()):
                _remove_group(path)
            if pid in self.ranges:
                self.ranges.pop(pid).close()
            _, starving = self.bringing.pop(pid, ("", 0))
            if status and starving in self.containers:  # not collected, so the id is still its own
                os.kill(starving, signal.SIGKILL)
            if pid == self.remover:
                self.remover = 0
            if pid == self.accountant:
                self.accountant = 0
                self.read_report()

    def work(self) -> None:
        """Start background work, and notify those who wait for it."""
        if not self.remover and (self.waiting or time.monotonic() >= self.due):
            used = {path for path, _ in self.bringing.values()}
            if removable := [path for path in self.to_remove if path not in used]:
                self.remover = _aside(remove_directories, removable)
                self.to_remove = [path for path in self.to_remove if path in used]
        if self.waiting and not self.to_remove and not self.remover and not self.accountant:
            for descriptor in self.waiting:
                os.close(descriptor)
            self.waiting.clear()

    def look_at_disk(self) -> None:
        """Count the writes of containers, if the disk lost enough since the last count that a limit may be reached.

        And once in a while, for what one process frees hides what another one writes.
        """
        now = time.monotonic()
        free, free_files = _free(self.settings["store"])
        self.free, self.free_files = max(self.free, free), max(self.free_files, free_files)
        watched = self.watched.values()
        due = self.free - free >= min(watch.nbytes for watch in watched) / 8
        due |= self.free_files - free_files >= min(watch.files for watch in watched) / 8
        if self.accountant:
            if now > self.counted + PATIENCE:
                os.kill(self.accountant, signal.SIGKILL)
        elif due or self.suspects or free < FLOOR or now > self.counted + RECOUNT:
            self.free, self.free_files, self.counted = free, free_files, now
            os.ftruncate(self.report, 0)
            os.lseek(self.report, 0, os.SEEK_SET)
            known = self.sizes, self.bases, self.suspects
            self.accountant = _aside(accountant.hold_to_limits, dict(self.watched), free, *known, self.report)

    def read_report(self) -> None:
        """Take over the accountant's report; nothing if it was killed."""
        with open(self.report, "rb", closefd=False) as file:
            file.seek(0)
            try:
                sizes, bases, self.suspects = marshal.loads(file.read())
            except (EOFError, ValueError, TypeError):
                return
        self.sizes = {path: nbytes for path, nbytes in sizes.items() if os.path.exists(path)}
        self.bases |= {pid: base for pid, base in bases.items() if pid in self.watched}

    def end(self) -> None:
        """End every container and collect it, with the process that restores its memory."""
        for pid, groups in self.containers.items():
            os.kill(pid, signal.SIGKILL)
            for path in groups:  # the owner may have ended while it copied the files of stopped processes
                _thaw(path)
        deadline = time.monotonic() + 10
        while (self.containers or self.bringing) and time.monotonic() < deadline:
            if select.select([self.wake], [], [], 0.05)[0]:
                os.read(self.wake, 4096)
            self.collect()


def _free(path: str) -> tuple[int, int]:
    """Free bytes and free files; a file system that does not count files has room for many."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_favail if status.f_files else 1 << 62


def _aside(work: Any, *arguments: Any) -> int:
    """Fork a process that does ``work``; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            kernel.die_with_parent()
            work(*arguments)
        finally:
            os._exit(0)
    return pid


def _thaw(path: str) -> None:
    """Thaw a frozen group of version 1, in which not even a kill takes effect."""
    state = os.path.join(path, "freezer.state")
    if os.path.exists(state):
        kernel.write_text(state, "THAWED")


def _remove_group(path: str) -> None:
    """Remove the control group of a container that ended; the exit of its last process may take a moment."""
    for _ in range(50):
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.002)
        else:
            return
    print(f"sandboxgym: could not remove the control group {path}", file=sys.stderr)
