"""The init of a container: process 1, from a warm container process to the end. Runs in a fork of the zygote.

A warm container process has its namespaces, control groups, ``/proc`` and ``/dev`` before a container is requested. The
owner then sends its specification: the layers, the bind mounts, the limits. From there on it is confined like all
processes it starts, starts processes at the owner's request, and collects orphans. It ends with its socket.

With private ids everything is mounted by root, who then enters a user namespace that owns none of the mounts: not even
a program that gained all capabilities in there could change a mount.

For that it executes the program ``init.c``, where there is one: every page that a fork of Python writes to, if only to
count references, takes memory of its own. A container with restored processes keeps its Python init, for a program that
was just executed can be traced for a moment, and the restored processes run already.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import errno
import fcntl
import marshal
import os
import resource
import select
import stat
import struct
import sys
import termios

from sandboxgym.sandbox.overlay import criu_process, ids, ipc, kernel, mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

READY = b"ready"
COLUMNS = 200
"""Width of terminals."""

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430
_SAFE = kernel.NOSUID | kernel.NODEV
_LOWEST_PORT = "/proc/sys/net/ipv4/ip_unprivileged_port_start"


def main(channel: _socket.socket, spec: dict[str, Any]) -> NoReturn:
    """Run as a container's init, in new namespaces, until the owner closes the other end of ``channel``."""
    try:
        try:
            init = Init(*_only(channel, spec["ids"]), spec)
        except OSError as error:
            ipc.send(channel, _failure(error))
        else:
            init.serve()
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)


def _only(channel: _socket.socket, namespace: int) -> tuple[_socket.socket, int]:
    """Keep the socket as the first descriptor after the standard ones, then a user namespace; close all others."""
    if namespace >= 0:
        namespace = fcntl.fcntl(namespace, fcntl.F_DUPFD_CLOEXEC, 5)
    if channel.fileno() != 3:
        os.dup2(channel.fileno(), 3, inheritable=False)
        channel.detach()
        channel = _socket.socket(fileno=3)
    if namespace < 0:
        kernel.close_from(4)
        return channel, -1
    os.dup2(namespace, 4, inheritable=False)
    kernel.close_from(5)
    return channel, 4


def _opened(path: str) -> int:
    """Descriptor of a program to execute later; -1 where there is none, or none any more."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else -1
    except OSError:
        return -1


def _failure(error: OSError) -> bytes:
    reason = f"error {error.errno or errno.EIO} {error.filename or ''}\0{error.strerror}"
    return reason.encode(errors="backslashreplace")


class Init:
    """Process 1 of a container."""

    def __init__(self, channel: _socket.socket, namespace: int, spec: dict[str, Any]) -> None:
        """Set up the warm container process; ``namespace`` is the user namespace that it enters in the end, or -1."""
        self.channel = channel
        self.spec = spec
        self.ids = None if namespace < 0 else mounts.Ids(namespace, spec["base"])
        self.statuses: dict[int, int] = {}
        """Descriptor for the exit status of a started process, by its id."""
        self.pts = -1
        self.program = _opened(spec["init"])
        self.requests = {
            "become": self.specialise,
            "restorer": self.restorer,
            "mount": self.mount,
            "enter": self.enter,
            "adopt": self.adopt,
            "spawn": self.spawn,
        }
        kernel.die_with_parent()
        self.wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write)
        for path in spec["cgroups"]:
            kernel.write_text(os.path.join(path, "cgroup.procs"), "0")
        if spec["rootless"]:
            _map_user(spec["user"], spec["group"])
        kernel.undumpable()
        kernel.make_private()
        kernel.unshare(kernel.NEWCGROUP)
        if spec["namespaces"] & kernel.NEWNET:
            _raise_loopback()
            if self.ids:  # the network is not of their user namespace, so that they had no right to any port below
                _quietly(kernel.write_text, _LOWEST_PORT, "0")
        kernel.set_hostname(b"sandbox")
        self.proc, self.dev = mounts.special(spec["stage"], rootless=spec["rootless"], owner=spec["base"])
        ipc.send(channel, READY)

    def serve(self) -> NoReturn:
        """Answer the owner's requests until it is gone."""
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.collect()
            if self.channel.fileno() in ready:
                payload, descriptors = ipc.receive(self.channel)
                if payload.startswith(b"spawn\0"):
                    what, request = "spawn", ipc.unpack_spawn(payload)
                else:
                    what, request = marshal.loads(payload)
                try:
                    kept = self.requests[what](request, descriptors)
                except OSError as error:
                    ipc.send(self.channel, _failure(error))
                else:
                    ipc.send(self.channel, READY, kept)
                    descriptors += kept
                for descriptor in descriptors:
                    os.close(descriptor)
                if what == "become" and self.pts >= 0 and self.program >= 0:
                    self.hand_over()

    def hand_over(self) -> None:
        """Execute the compiled init, if possible. No other process runs in the container yet."""
        for descriptor in (self.channel.fileno(), self.pts):
            os.set_inheritable(descriptor, True)
        try:
            os.execve(self.program, ["init", str(self.pts)], {})
        except OSError:  # from a cache on a file system without programs, say
            for descriptor in (self.channel.fileno(), self.pts):
                os.set_inheritable(descriptor, False)

    # From a warm container to a specialised one

    def specialise(self, request: dict[str, Any], _: list[int]) -> list[int]:
        """Mount the layers, go there, give up privileges; descriptors of the root and of the control directory."""
        sys.meta_path.clear()  # nothing is imported from in there
        prepared = mounts.Prepared(self.spec["stage"], request, rootless=self.spec["rootless"], ids=self.ids)
        prepared.close()
        kernel.attach(prepared.root, self.spec["root"])
        os.close(prepared.root)
        os.chdir(self.spec["root"])
        kernel.enter_root()
        os.umask(0o022)
        if self.ids:
            kernel.act_on_files_as(self.ids.base)
        _directory("/dev/shm", 0o1777)
        _directory("/tmp", 0o1777)
        _directory("/proc")
        _directory("/run")
        shared = kernel.copy_mount("/dev/shm", attributes=_SAFE)
        # What is mounted upon cannot be renamed: the control directory below stays where the shell looks for it.
        run = kernel.copy_mount("/run", attributes=_SAFE)
        own = ((self.proc, "/proc"), (self.dev, "/dev"), (shared, "/dev/shm"), (run, "/run"))
        for mounted, target in (*own, *prepared.binds):
            _target(target, mounted)
            kernel.attach(mounted, target)
            os.close(mounted)
        if self.ids:
            kernel.act_on_files_as(0)
        return [*self._settle(request), prepared.control]

    def restorer(self, request: dict[str, Any], descriptors: list[int]) -> list[int]:
        """Start a CRIU that will restore processes here, and enter its mount namespace, which has the host's files.

        Args:
            request: ``program``; ``work``, the directory that it works in.
            descriptors: the socket that it is talked to through; the namespace of `criu_process.keep_features`.
        """
        channel, namespace = descriptors
        criu_process.copy_mounts(namespace)
        kernel.mount("proc", "/proc")
        if criu_process.fork_far() == 0:
            try:
                signal.set_wakeup_fd(-1)
                kernel.die_with_parent()
                # What it starts itself shall have no such process id either; `enter` puts this right.
                kernel.write_text("/proc/sys/kernel/ns_last_pid", str(os.getpid()))
                criu_process.execute([request["program"], "-W", request["work"], "swrk", "3"], channel)
            finally:
                os._exit(1)
        return []

    def mount(self, request: dict[str, Any], _: list[int]) -> list[int]:
        """Mount what the processes are restored upon, see `mounts.for_criu`; returns the control directory's mount."""
        return [mounts.for_criu(self.spec["stage"], self.spec["root"], request)]

    def enter(self, request: dict[str, Any], descriptors: list[int]) -> list[int]:
        """Enter the restored processes' namespace, give up privileges; a descriptor of the root directory.

        Args:
            request: ``last_pid``, the highest process id that was given out there, so that the next is another one;
                and as for `specialise`.
            descriptors: of one of these processes.
        """
        sys.meta_path.clear()
        kernel.write_text("/proc/sys/kernel/ns_last_pid", str(request["last_pid"]))
        kernel.set_namespace(descriptors[0], kernel.NEWNS | kernel.NEWIPC)
        for descriptor in (self.proc, self.dev):
            os.close(descriptor)
        os.chdir("/")
        os.umask(0o022)
        return self._settle(request)

    def _settle(self, request: dict[str, Any]) -> list[int]:
        self.pts = os.open("/dev/pts", os.O_RDONLY | os.O_DIRECTORY)
        kernel.show_command_line(b"init")
        if not self.spec["rootless"]:
            os.setgroups([])
        for which, value in request["rlimits"]:
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        if self.ids:
            ids.enter(self.ids.descriptor)
            os.close(self.ids.descriptor)
        kernel.drop_privileges()
        kernel.install_filter(self.spec["filter"])
        kernel.undumpable()
        kernel.die_with_parent()  # both were forgotten with the old credentials
        return [os.open("/", os.O_PATH | os.O_DIRECTORY)]

    # A specialised container

    def adopt(self, request: dict[str, Any], descriptors: list[int]) -> list[int]:
        """Take over a restored process, to collect it like a child started here; its pidfd.

        Args:
            request: ``pid``, as it is numbered inside.
            descriptors: for its exit status.
        """
        kept = [os.pidfd_open(request["pid"])]
        self.statuses[request["pid"]] = os.dup(descriptors[0])
        return kept

    def spawn(self, request: dict[str, Any], descriptors: list[int]) -> list[int]:
        """Start a process; its pidfd, and the master side of its terminal if it has one.

        Args:
            request: as `ipc.unpack_spawn` gives it: argv, env, cwd, path, terminal; ``adopts``, whether what its
                descendants leave behind becomes its own.
            descriptors: for its exit status; without a terminal, also for its input and output.
        """
        status, *streams = descriptors
        environment = request["env"]
        program = _find(request["argv"][0], request["path"], request["cwd"])
        kept: list[int] = []
        actions: list[tuple[Any, ...]]
        if request["terminal"]:
            master, name = self.terminal()
            kept.append(master)
            actions = [(os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0)]
            actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
        else:
            source, sink = streams
            actions = [(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, sink, 1), (os.POSIX_SPAWN_DUP2, sink, 2)]
        try:
            os.chdir(request["cwd"])
            try:
                if request["adopts"]:
                    pid = _spawn_adopting(program, request["argv"], environment, name)
                else:
                    pid = os.posix_spawn(
                        program,
                        request["argv"],
                        environment,
                        file_actions=actions,
                        setsid=True,
                        setsigmask=[],
                        setsigdef=_ALL_SIGNALS,
                    )
            finally:
                os.chdir("/")
        except OSError:
            for descriptor in kept:
                os.close(descriptor)
            raise
        # Where memory runs out, the kernel shall choose among these and not this process.
        _quietly(kernel.write_text, f"/proc/{pid}/oom_score_adj", "500")
        kept.insert(0, os.pidfd_open(pid))
        self.statuses[pid] = os.dup(status)
        return kept

    def terminal(self) -> tuple[int, str]:
        """Make a terminal: its master side, and the path of the other."""
        master = os.open("ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=self.pts)
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        (number,) = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, bytes(4)))
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        attributes = termios.tcgetattr(master)
        attributes[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHONL)
        termios.tcsetattr(master, termios.TCSANOW, attributes)
        return master, f"/dev/pts/{number}"

    def collect(self) -> None:
        """Collect ended children; the rest of a started process's session ends with it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            report = self.statuses.pop(pid, None)
            if report is not None:
                _end_session(pid)
                code = os.waitstatus_to_exitcode(status)
                # Perhaps nobody wants to know any more.
                _quietly(os.write, report, str(code if code >= 0 else 128 - code).encode())
                os.close(report)


_ALL_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def _spawn_adopting(program: str, argv: list[str], environment: dict[str, str], terminal: str) -> int:
    """Start a process with a terminal that adopts orphans, which ``posix_spawn`` cannot express."""
    read, write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            descriptor = os.open(terminal, os.O_RDWR)
            for number in range(3):
                os.dup2(descriptor, number)
            kernel.adopt_orphans()
            for number in _ALL_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.execve(program, argv, environment)
        except OSError as error:
            os.write(write, (error.errno or errno.EIO).to_bytes(2, "big"))
        finally:
            os._exit(127)
    os.close(write)
    failed = os.read(read, 2)
    os.close(read)
    if failed:
        os.waitpid(pid, 0)
        raise OSError(int.from_bytes(failed, "big"), os.strerror(int.from_bytes(failed, "big")), program)
    return pid


def _quietly(call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except OSError:
        return


def _map_user(user: int, group: int) -> None:
    """Map root inside to the calling user outside; no other id is mapped."""
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        kernel.write_text(f"/proc/self/{name}", content)


def _raise_loopback() -> None:
    any_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    request = struct.pack("16sh14x", b"lo", 0)
    flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
    fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
    any_socket.close()


def _directory(path: str, mode: int = 0o755) -> None:
    """Make a directory that was deleted, or replaced by something else, in an earlier use of this root."""
    folder = ""
    for part in path.strip("/").split("/"):
        folder += f"/{part}"
        if not os.path.isdir(folder):
            _clear(folder)
            os.mkdir(folder)
            if folder == path:
                os.chmod(path, mode)


def _clear(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)


def _target(path: str, mounted: int) -> None:
    """Make an entry at ``path`` over which ``mounted`` can be attached."""
    if stat.S_ISDIR(os.fstat(mounted).st_mode):
        _directory(path)
    elif not os.path.exists(path) or os.path.isdir(path):
        _directory(os.path.dirname(path))
        _clear(path)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _find(name: str, path: str, cwd: str) -> str:
    """Find a program as a shell would."""
    if "/" in name:
        return name
    for folder in path.split(":"):
        candidate = os.path.join(cwd, folder, name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, f"no program {name} in PATH={path}", name)


def _end_session(leader: int) -> None:
    """Kill the rest of a session."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getsid(int(name)) == leader:
                    os.kill(int(name), signal.SIGKILL)
            except ProcessLookupError:
                continue
