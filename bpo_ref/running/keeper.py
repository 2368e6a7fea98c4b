"""Program that ends a server with whoever started it, however that process ended.

    python keeper.py OWNER FOLDER COMMAND ...

Standard library only, run by its path: it is there within a moment and stays small.

What it promises:

1. The command ends when the owner does, also where the owner was killed; so do all of its descendants, also those that
   left its process group, for orphans become this program's children.
2. The folder, which holds the server's socket and its temporary files, is removed afterwards.
3. This program is two processes, each of which can do that alone: either may be killed, also at the same moment as the
   owner. They have sessions of their own, so that the kill of one's process group does not reach the other.
4. If both are killed, the kernel kills the command. What that leaves is ended by the reaper of the owner's run
   directories: everything that the command starts has the folder's name in its environment (`colocated.OwnServer`).
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLITE = 10.0
"""Seconds in which a server that is asked to end may do so by itself."""


def main(argv: list[str]) -> int:
    """Run the command until it, the owner or this program is to end; returns the command's status, as shells do."""
    owner, folder, command = int(argv[0]), argv[1], argv[2:]
    told = _told_to_end()
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        return _cleared(folder, 1)
    if os.getppid() != owner:  # it ended before it was watched, and another process has its number
        return _cleared(folder, 1)
    first = os.pidfd_open(os.getpid())
    _adopt_orphans()
    second = os.fork()
    if not second:
        os.setsid()
        _adopt_orphans()  # a fork does not inherit it
        return _cleared(folder, _run(command, [watched, first, told]))
    ended = os.pidfd_open(second)
    select.select([watched, ended, told], [], [])
    if not select.select([ended], [], [], POLITE + 5.0)[0]:  # the second one was told as well
        os.kill(second, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
    _end_all()
    return _cleared(folder, status if status >= 0 else 128 - status)


def _run(command: list[str], until: list[int]) -> int:
    """Run the command until it ends or one of these descriptors can be read; returns its status, as shells do."""
    me = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def in_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != me:
            os._exit(1)

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    select.select([*until, os.pidfd_open(child.pid)], [], [])
    child.terminate()
    end = time.monotonic() + POLITE
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    _end_all()
    status = child.wait()
    return status if status >= 0 else 128 - status


def _adopt_orphans() -> None:
    """Have descendants whose parent has ended become this process's children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _told_to_end() -> int:
    """Descriptor that can be read once SIGTERM has come, to whichever of the two; Ctrl-C is for the owner.

    Nobody reads it, so a fork is told as well.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writing)
    return reading


def _end_all() -> None:
    """Kill this program's children until there are none: those of a killed one become its own."""
    me = os.getpid()
    while children := [pid for pid in _numbers() if _parent(pid) == me]:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def _numbers() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _cleared(folder: str, status: int) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
