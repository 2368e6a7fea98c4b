"""CRIU in the namespaces of a container, except the mount namespace. Standard library only.

Namespaces that CRIU shares with the processes it captures are neither captured nor made by it: process ids, network,
host name and control group are those of the container, which exist already. Mounts and System V IPC are captured. CRIU
itself sees the host's files, in a mount namespace of its own, so that no privileged process executes a file of the
container.

1. `capture` and `bring_pages` run in forks of the zygote, outside the container. The captured processes are frozen
   before.
2. In their mount namespace little of the host is mounted: a process inside can read its table of mounts while restored
   processes run already and CRIU has not exited.
3. A CRIU that restores is started by the container's own init (``init.py``), which is in the container's
   control groups already: moving a process there takes the kernel 10 to 30 ms.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import errno
import os
import resource
import traceback

from sandboxgym.sandbox.overlay import kernel
from sandboxgym.system import userfaults

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

DONE = b"+"
"""Message that all pages are restored."""
_TRIES = 64
_NEEDED = ["/bin", "/lib", "/lib64", "/usr/lib", "/usr/bin", "/etc", "/dev/null", "/dev/pts", "/proc", "/tmp"]
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))  # of a table of mounts


def keep_features(needed: list[str]) -> int:
    """Make a mount namespace that caches the kernel features CRIU detects in 0.1 s; returns its descriptor.

    It keeps that in /run. Of the host nothing is mounted but what ``needed`` and programs lie on, and freezers.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kernel.unshare(kernel.NEWNS)
            kernel.make_private()
            _leave_only([*_NEEDED, *needed])
            # CRIU keeps its cache of the kernel's features in /run, and only on a tmpfs.
            kernel.mount("tmpfs", "/run", options=[("mode", "0755")])
            os.write(write, b"+")
            os.close(write)
            kernel.die_with_parent()
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    made = os.read(read, 1)
    os.close(read)
    try:
        if not made:
            raise OSError(errno.EPERM, "no mount namespace can be made")
        return os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _leave_only(needed: list[str]) -> None:
    """Unmount every mount point that is neither above, at nor below one of these paths."""
    kept = [os.path.realpath(path) for path in needed]
    points = []
    descriptor = os.open("/proc/self/mountinfo", os.O_RDONLY)
    with os.fdopen(descriptor, errors="surrogateescape") as table:
        for line in table:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            point = before.split()[4]
            for code, character in _ESCAPES:
                point = point.replace(code, character)
            if kind == "cgroup2" or (kind == "cgroup" and "freezer" in options.split(",")):
                kept.append(point)
            points.append(point)
    for point in reversed(points):
        if point != "/" and not any(path == point or path.startswith(f"{point}/") for path in kept):
            try:
                kernel.unmount(point)
            except OSError:  # went with what it was mounted upon
                continue


def copy_mounts(namespace: int) -> None:
    """Enter a copy of the mount namespace of `keep_features`."""
    kernel.set_namespace(namespace, kernel.NEWNS)
    kernel.unshare(kernel.NEWNS)
    kernel.make_private()


def fork_far() -> int:
    """Fork with a process id that no captured process is likely to have: CRIU must not occupy one that it restores."""
    last = int(kernel.read_text("/proc/sys/kernel/pid_max")) - 1
    for number in range(min(last, 32767), 0, -1)[:_TRIES]:
        try:
            return kernel.clone_as(number)
        except FileExistsError:
            continue
    raise OSError(errno.EEXIST, "no process id is free")


def execute(program: list[str], descriptor: int) -> NoReturn:
    """Execute CRIU, with ``descriptor`` as its third one and nothing else to read, write or inherit."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(descriptor, 3)
    for number in range(3):  # what it has to say is in its log
        os.dup2(null, number)
    kernel.close_from(4)
    os.execv(program[0], program)


def capture(channel: int, namespace: int, spec: dict[str, Any]) -> NoReturn:
    """Become the parent of a CRIU that captures a container, until it exits.

    Args:
        channel: the end of the socket that CRIU is talked to through.
        namespace: of `keep_features`.
        spec: ``program``; ``init``, the id of the container's.
    """
    try:
        kernel.die_with_parent()
        init = os.pidfd_open(spec["init"])
        copy_mounts(namespace)
        # CRIU leaves out the namespaces that it is in itself: capturing a network's would run ip and iptables.
        kernel.set_namespace(init, kernel.NEWNET | kernel.NEWUTS | kernel.NEWPID | kernel.NEWCGROUP)
        os.close(init)
        pid = fork_far()
        if pid == 0:
            kernel.die_with_parent()
            kernel.mount("proc", "/proc")  # the one that is there shows the process ids of the host
            execute([spec["program"], "swrk", "3"], channel)
        os.close(channel)
        os.waitpid(pid, 0)
    finally:
        os._exit(0)


def bring_pages(ready: int, done: int, spec: dict[str, Any]) -> NoReturn:
    """Serve restored processes their memory as they touch it, until all is there or the container has ended.

    Ends with an error if pages are missing: they would be read as zeros, so the container must be killed then. The
    zygote does that, for this process may be killed too.

    Args:
        ready: a byte is written to it when the processes may be restored.
        done: `DONE` is written to it at the end, if all went well; a byte from it asks for all memory now.
        spec: ``init``, the process id of the container's init; ``images``, the directory of the pages; ``work``, the
            working directory of the restoring CRIU.
    """
    complete = False
    try:
        kernel.die_with_parent()
        kernel.show_command_line(b"lazy-pages")
        init = os.pidfd_open(spec["init"])
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each forked process takes a descriptor
        server = userfaults.MemoryServer(spec["images"], spec["work"])
        os.write(ready, b"+")
        os.close(ready)
        complete = server.serve(done, init)
        if complete:
            os.write(done, DONE)
        # Else its container has ended, and needs nothing any more.
        complete = True
    except BaseException:
        with open(os.path.join(spec["work"], "pages.log"), "w") as log:
            log.write(f"Error ({traceback.format_exc()})".replace("\n", " "))
    finally:
        os._exit(0 if complete else 1)
