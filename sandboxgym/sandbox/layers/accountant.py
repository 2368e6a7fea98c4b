"""Disk usage of containers, and the end of those over their limits. Runs in forks of the zygote.

1. All disk space of a container counts: files that its names lead to at any depth, with directories, links and reserved
   blocks; files without a name that one of its processes or threads has open, runs or has mapped; and those whose
   descriptors are in transit through its sockets, as far as these can be inspected.
2. Where sockets cannot be inspected (several messages wait, a connection was not accepted yet), disk growth that no
   container's count explains, since the descriptors are in transit, counts too, if they still are at a second look.
3. A container is ended for its own limits only. Where the disk is nearly full and none is over, only a container
   without a limit, or one for which growth is unexplained, can be ended; new ones are refused long before
   (`LayerStore.check_room`).
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import contextlib
import marshal
import os
import stat
import time

from sandboxgym.sandbox.layers.disk import BLOCK
from sandboxgym.sandbox.overlay import kernel
from sandboxgym.system import directories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = "full"
"""File beside a killed container's upper directory, which says why."""
FLOOR = 256 * 2**20
"""Free bytes of the store's file system below which it counts as nearly full."""
NOTICED = 64 * 2**20
"""Bytes of unexplained growth from which on a container is ended for it where the disk is nearly full."""
NONE = 1 << 62
"""Value in place of a limit, where there is none."""

_SECONDS = 5.0
"""Seconds for inspecting the processes of one container; descriptors not seen then count as hidden."""
_MOST = 253
"""Descriptors that one message can hold."""


class Watch:
    """A container that is held to its limits."""

    __slots__ = ("directory", "files", "groups", "nbytes", "pidfd")

    def __init__(self, directory: str, *, nbytes: int, files: int, pidfd: int, groups: list[str]) -> None:
        self.directory = directory
        """Directory of its writes."""
        self.nbytes = nbytes
        self.files = files
        self.pidfd = pidfd
        self.groups = groups


class DiskUsage:
    """Disk usage of one container."""

    __slots__ = ("files", "nameless", "nbytes", "unseen")

    def __init__(self) -> None:
        self.nbytes = 0
        self.files = 0
        self.nameless = 0
        """Bytes in files without a name."""
        self.unseen = 0
        """Descriptors in transit that cannot be inspected, and processes that could not be."""


def hold_to_limits(
    watched: dict[int, Watch],
    free: int,
    counted: dict[str, int],
    bases: dict[int, int],
    suspects: list[int],
    report: int,
) -> None:
    """End the containers that exceed their limits.

    Args:
        watched: the containers, by the id of the init.
        free: bytes of the store's file system.
        counted: bytes by directory, of all containers at the last look, also of those that ended and were kept.
        bases: what `unexplained` said when a container last had nothing out of sight, by the id of the init.
        suspects: containers for which growth was unexplained at the last look.
        report: a file for ``counted``, ``bases`` and ``suspects`` as they are now.
    """
    taken = {pid: nameless(pid, watch.groups) for pid, watch in watched.items()}
    _read_everything()
    over = set()
    for pid, watch in watched.items():
        named(watch, taken[pid])
        counted[watch.directory] = taken[pid].nbytes
        if reason := _excess(taken[pid], watch, free):
            over.add(pid)
            _end(watch, reason)
    rest = unexplained(free, counted)
    for pid, one in taken.items():
        if not one.unseen:
            bases[pid] = rest
    grown = {pid: rest - bases.get(pid, rest) for pid in watched}
    found = _suspects(watched, taken, grown, free=free)
    if not over:
        _end_one(watched, taken, grown, [pid for pid in found if pid in suspects], free=free)
    with open(report, "wb", closefd=False) as file:
        file.write(marshal.dumps((counted, bases, found)))


def unexplained(free: int, counted: dict[str, int]) -> int:
    """Bytes of disk usage that no container's count explains, up to a constant."""
    return -free - sum(counted.values())


def _excess(taken: DiskUsage, watch: Watch, free: int) -> str:
    """The limit for which a container is to be ended; empty if none."""
    if taken.nbytes > watch.nbytes:
        hidden = f" ({taken.nameless:,} in files without a name)" if taken.nameless else ""
        return (
            f"disk space (Limits.disk): {taken.nbytes:,} bytes were written{hidden}, {watch.nbytes:,} are allowed, "
            f"{free:,} are free on the disk"
        )
    if taken.files > watch.files:
        return f"files (Limits.files): {taken.files:,} were made, {watch.files:,} are allowed"
    return ""


def _suspects(watched: dict[int, Watch], taken: dict[int, DiskUsage], grown: dict[int, int], *, free: int) -> list[int]:
    """Containers with hidden files that may explain by how much the disk has ``grown``."""
    return [
        pid
        for pid, watch in watched.items()
        if taken[pid].unseen
        and (taken[pid].nbytes + grown[pid] > watch.nbytes or (free < FLOOR and grown[pid] > NOTICED))
    ]


def _end_one(
    watched: dict[int, Watch], taken: dict[int, DiskUsage], grown: dict[int, int], suspects: list[int], *, free: int
) -> None:
    """End a container for growth that nothing else explains, or because the disk is nearly full and it has no limit."""
    unlimited = [pid for pid, watch in watched.items() if free < FLOOR and watch.nbytes >= NONE]
    if suspects:
        pid = max(suspects, key=lambda pid: taken[pid].unseen)
        _end(
            watched[pid],
            f"disk space (Limits.disk): {taken[pid].nbytes:,} bytes were written, and the disk lost {grown[pid]:,} "
            f"that nothing else explains while {taken[pid].unseen:,} descriptors of the sandbox were out of sight; "
            f"{watched[pid].nbytes:,} are allowed, {free:,} are free on the disk",
        )
    elif unlimited:
        pid = max(unlimited, key=lambda pid: taken[pid].nbytes)
        _end(
            watched[pid],
            f"disk space: it has none of its own (Limits.disk=None), took {taken[pid].nbytes:,} bytes, and only "
            f"{free:,} are free on the disk",
        )


def _end(watch: Watch, reason: str) -> None:
    """Kill a container, and report why."""
    note = os.path.join(os.path.dirname(watch.directory), FULL)
    with open(f"{note}.new", "w") as file:
        file.write(reason)
    os.rename(f"{note}.new", note)  # complete, or as the last look wrote it, while the container is on its way out
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(watch.pidfd, signal.SIGKILL)


# By name


def named(watch: Watch, taken: DiskUsage) -> None:
    """Count files that names lead to; stops once they exceed the limit."""
    seen: set[int] = set()
    above = os.path.dirname(watch.directory)
    for folder in (watch.directory, os.path.join(above, "work")):  # overlayfs puts copies together in the second
        for entry in directories.walk(folder):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # deleted meanwhile
                continue
            if status.st_ino in seen or (folder != watch.directory and stat.S_ISDIR(status.st_mode)):
                continue  # a directory that overlayfs itself made is nobody's doing
            seen.add(status.st_ino)
            taken.nbytes += status.st_blocks * BLOCK
            taken.files += 1
            if taken.nbytes > watch.nbytes or taken.files > watch.files:
                return


def _read_everything() -> None:
    """Let an ordinary user read files that containers, in which it is root, have locked.

    In a user namespace of its own in which it is root, too; it then can no longer look at processes.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        return
    try:
        kernel.unshare(kernel.NEWUSER)
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            kernel.write_text(f"/proc/self/{name}", content)
    except OSError:
        pass


# Without a name


def nameless(init: int, groups: list[str]) -> DiskUsage:
    """Count files that the processes of a container hold without a name.

    Args:
        init: of the container.
        groups: its control groups.
    """
    taken, until = DiskUsage(), time.monotonic() + _SECONDS
    looks = _Looks(taken)
    processes = [pid for pid in _processes(init, groups) if pid != init]  # whose own program may be gone from the disk
    for pid in (init, *processes):
        if looks.learn_mounts(pid):
            break
    for at, pid in enumerate(processes):
        if time.monotonic() > until:
            taken.unseen += len(processes) - at
            break
        looks.process(pid)
    return taken


def _processes(init: int, groups: list[str]) -> list[int]:
    """Processes of a container; with its init where there is a control group."""
    for path in groups:
        try:
            with open(os.path.join(path, "cgroup.procs")) as file:
                if found := [int(line) for line in file]:
                    return found
        except OSError:
            continue
    found, pending = [], [init]
    while pending:
        pid = pending.pop()
        for thread in _names(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    children = [int(word) for word in file.read().split()]
            except OSError:
                continue
            found += children
            pending += children
    return found


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


class _Looks:
    """Inspection of the processes of one container."""

    def __init__(self, taken: DiskUsage) -> None:
        self.taken = taken
        self.seen: set[tuple[int, int]] = set()
        memory = os.memfd_create("", os.MFD_CLOEXEC)
        self.elsewhere = {os.fstat(memory).st_dev}
        """Devices that are not the store: files in memory, and all mounts of a container but its layers."""
        os.close(memory)

    def learn_mounts(self, pid: int) -> bool:
        """Learn which mounts of a container are not its layers; False if this process does not show them."""
        try:
            with open(f"/proc/{pid}/mountinfo", "rb") as file:
                for line in file:
                    before, _, after = line.partition(b" - ")
                    if not after.startswith(b"overlay "):
                        major, _, minor = before.split()[2].partition(b":")
                        self.elsewhere.add(os.makedev(int(major), int(minor)))
        except OSError:
            return False
        return True

    def process(self, pid: int) -> None:
        """Inspect a process with all its threads, each of which may have descriptors of its own."""
        threads = _names(f"/proc/{pid}/task")
        for thread in threads:
            self.descriptors(pid, f"/proc/{pid}/task/{thread}")
        for thread in threads:
            if self.mapped(f"/proc/{thread}"):  # the first may have ended before the others
                break

    def descriptors(self, pid: int, folder: str) -> None:
        try:
            opened = os.open(f"{folder}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            for name in os.listdir(opened):
                try:
                    status = os.stat(name, dir_fd=opened)
                except OSError:
                    continue
                if stat.S_ISSOCK(status.st_mode):
                    self.socket(pid, int(name), status, f"{folder}/fdinfo/{name}")
                else:
                    self.file(status)
        finally:
            os.close(opened)

    def file(self, status: os.stat_result) -> None:
        """Count a file if it has no name."""
        key = status.st_dev, status.st_ino
        if status.st_nlink or status.st_dev in self.elsewhere or key in self.seen:
            return
        self.seen.add(key)
        self.taken.files += 1
        self.taken.nbytes += status.st_blocks * BLOCK
        self.taken.nameless += status.st_blocks * BLOCK

    def mapped(self, folder: str) -> bool:
        """Inspect the executable and the mappings of a process; False if it has no memory."""
        some = False
        try:
            with open(f"{folder}/maps", "rb") as file:
                for line in file:
                    some = True
                    if line.endswith(b" (deleted)\n"):
                        self.mapping(folder, line)
        except OSError:
            return some
        with contextlib.suppress(OSError):
            self.file(os.stat(f"{folder}/exe"))
        return some

    def mapping(self, folder: str, line: bytes) -> None:
        place, _, _, device, number, _ = line.split(None, 5)
        major, _, minor = device.partition(b":")
        key = os.makedev(int(major, 16), int(minor, 16)), int(number)
        if key in self.seen or key[0] in self.elsewhere:
            return
        try:
            self.file(os.stat(f"{folder}/map_files/{place.decode()}"))
        except FileNotFoundError:
            pass
        except OSError:  # an ordinary user is only told how much of it is mapped
            start, _, end = place.partition(b"-")
            self.taken.nbytes += int(end, 16) - int(start, 16)
            self.taken.nameless += int(end, 16) - int(start, 16)
            self.taken.files += 1
        self.seen.add(key)

    def socket(self, pid: int, number: int, status: os.stat_result, information: str) -> None:
        """Inspect the descriptors waiting in a socket, and recursively those in sockets among them."""
        key = status.st_dev, status.st_ino
        if key in self.seen:
            return
        self.seen.add(key)
        waiting = _waiting(information)
        if not waiting:
            return
        received = self.peek(pid, number)
        self.taken.unseen += max(0, waiting - len(received))
        while received:
            descriptor = received.pop()
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            if not stat.S_ISSOCK(status.st_mode):
                self.file(status)
            elif key not in self.seen:
                self.seen.add(key)
                more = _peek(descriptor)
                self.taken.unseen += max(0, _waiting(f"/proc/self/fdinfo/{descriptor}") - len(more))
                received += more
            os.close(descriptor)

    def peek(self, pid: int, number: int) -> list[int]:
        """Copies of the descriptors in the first message of a socket of another process."""
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return []
        try:
            copy = kernel.get_descriptor(process, number)
        except OSError:
            return []
        finally:
            os.close(process)
        try:
            return _peek(copy)
        finally:
            os.close(copy)


def _waiting(information: str) -> int:
    """Number of descriptors waiting in a socket, and in the connections that it has not accepted."""
    try:
        with open(information, "rb") as file:
            for line in file:
                if line.startswith(b"scm_fds:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0


def _peek(descriptor: int) -> list[int]:
    """Copies of the descriptors in the first message waiting in a socket, where it stays."""
    channel = _socket.socket(fileno=os.dup(descriptor))
    flags = _socket.MSG_PEEK | _socket.MSG_DONTWAIT | _socket.MSG_CMSG_CLOEXEC
    try:
        _, extra, _, _ = channel.recvmsg(1, _socket.CMSG_SPACE(_MOST * 4), flags)
    except OSError:
        return []
    finally:
        channel.close()
    return list(_numbers(extra))


def _numbers(extra: list[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in extra:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            yield from memoryview(data[: len(data) // 4 * 4]).cast("i")
