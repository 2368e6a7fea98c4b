"""Attempts to exceed the limits of memory, processes and time."""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
import time

from .answers import ABSENT, AttemptAnswer, absent, attempt, held, name_of, refused
from .libc import check

MIB = 2**20
_kept = []  # type: list[object]


def _touch(memory: mmap.mmap) -> None:
    for at in range(0, len(memory), 4096):
        memory[at] = 1


def _heap() -> None:
    _kept.append(bytearray(b"x") * MIB)


def _anonymous() -> None:
    memory = mmap.mmap(-1, MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    _touch(memory)
    _kept.append(memory)


def _memfd() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.memfd_create(b"attack", 0)
    if descriptor < 0:
        raise refused(f"memfd_create: {name_of(ctypes.get_errno())}")
    os.write(descriptor, b"x" * MIB)
    _kept.append(descriptor)


def _in_memory(folder: str) -> bool:
    """Tell whether a directory is on a file system in memory."""
    best, found = -1, ""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            point, kind = line.split()[4], line.partition(" - ")[2].split()[0]
            if (folder + "/").startswith(point.rstrip("/") + "/") and len(point) >= best:
                best, found = len(point), kind
    return found in ("tmpfs", "ramfs", "mqueue")


def _file_in(folder: str) -> "object":
    def more() -> None:
        if not os.path.isdir(folder) or not _in_memory(folder):
            raise absent(f"{folder} is not kept in memory")
        with open(f"{folder}/attack-{os.getpid()}", "ab") as file:
            file.write(b"x" * MIB)

    return more


def _system_v() -> None:
    identity = check("shmget", 0, MIB, 0o1600)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(identity, None, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise refused(f"shmat: {name_of(ctypes.get_errno())}")
    ctypes.memset(address, 1, MIB)
    check("shmctl", identity, 0, 0)  # goes with the last process that has it


def _pipe() -> None:
    import fcntl

    read, write = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(write, 1031, MIB)
    os.set_blocking(write, False)
    _kept.extend((read, write))
    filled = 0
    while filled < MIB:
        try:
            filled += os.write(write, b"x" * 65536)
        except BlockingIOError:
            break
    if not filled:
        raise refused("a pipe takes nothing")


def _sockets() -> None:
    left, right = socket.socketpair()
    left.setblocking(False)
    _kept.extend((left, right))
    filled = 0
    while filled < MIB:
        try:
            filled += left.send(b"x" * 65536)
        except BlockingIOError:
            break
    if filled < MIB:
        _sockets_more(MIB - filled)


def _sockets_more(left_over: int) -> None:
    while left_over > 0:
        left, right = socket.socketpair()
        left.setblocking(False)
        _kept.extend((left, right))
        try:
            left_over -= left.send(b"x" * 65536)
        except BlockingIOError:
            raise refused("a socket takes nothing") from None


def _page_tables() -> None:
    """Fill page tables: one page touched in each of 256 areas of 2 MiB takes a megabyte of tables and one of pages."""
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        raise absent("this Python cannot ask for small pages")
    memory = mmap.mmap(-1, 256 * 2 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(memory), 2 * MIB):
        memory[at] = 1
    _kept.append(memory)


def _processes() -> None:
    """Hold a megabyte in a process of its own."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 0)
        os.closerange(1, 256)  # the pipe of the answer must end with the process that was asked
        keep = bytearray(b"x") * MIB
        os.write(0, b"x")
        while keep:
            time.sleep(60)
    os.close(write)
    if not os.read(read, 1):
        raise refused("a process was killed")
    os.close(read)


MEANS = {
    "heap": _heap,
    "shared": _anonymous,
    "memfd": _memfd,
    "system-v": _system_v,
    "pipes": _pipe,
    "sockets": _sockets,
    "page-tables": _page_tables,
    "processes": _processes,
    "file:/dev/shm": _file_in("/dev/shm"),
    "file:/dev": _file_in("/dev"),
    "file:/run": _file_in("/run"),
    "file:/run/.sandboxgym": _file_in("/run/.sandboxgym"),
    "file:/dev/mqueue": _file_in("/dev/mqueue"),
}


@attempt
def _take_memory(how: str, megabytes: int) -> AttemptAnswer:
    """Take and keep memory, a megabyte at a time; the largest amount held is written to a file as it grows."""
    descriptor = os.open("/tmp/attack-had", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    more = MEANS[how]
    had = 0
    try:
        while had < megabytes:
            more()  # type: ignore[operator]
            had += 1
            os.pwrite(descriptor, b"%08d" % had, 0)
    except AttemptAnswer as answer:
        if answer.verdict == ABSENT:
            return answer
        return refused(f"{answer.detail} after {had} MiB", had=had)
    except (OSError, MemoryError, ValueError) as error:
        return refused("{} after {} MiB".format(getattr(error, "strerror", None) or type(error).__name__, had), had=had)
    return held(f"{had} MiB were had at one time", had=had)


# Processes


@attempt
def _take_processes(how: str, at_most: int) -> AttemptAnswer:
    made, why = 0, "no limit met"
    if how == "threads":
        stop = threading.Event()
        threading.stack_size(65536)
        try:
            for _ in range(at_most):
                threading.Thread(target=stop.wait, daemon=True).start()
                made += 1
        except (RuntimeError, MemoryError):
            why = "no more threads"
        return held(f"{made} threads at one time ({why})", had=made)
    if how == "bomb":
        for _ in range(9):  # doubles each time: at most 512
            try:
                os.fork()
            except OSError:
                break
        time.sleep(0.3)
        if os.getpgid(0) == os.getpid():
            made = len([pid for pid in os.listdir("/proc") if pid.isdigit()])
            return held(f"{made} processes at one time", had=made)
        while True:
            time.sleep(60)
    try:
        for _ in range(at_most):
            if os.fork() == 0:
                if how == "sessions":
                    os.setsid()
                if how == "zombies":
                    os._exit(0)
                while True:
                    time.sleep(60)
            made += 1
    except OSError as error:
        why = name_of(error.errno or 0)
    return held(f"{made} processes at one time ({why})", had=made)


# Time


def _marked(word: str) -> None:
    """Run a program with a word in its command line, for a minute."""
    os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", word])


def chain(word: str, links: int, pause: float, session: bool) -> None:
    """Fork and let the parent end, repeatedly, faster than an observer can follow; the last process stays."""
    for _ in range(links):
        if os.fork():
            os._exit(0)
        if session:
            os.setsid()
        time.sleep(pause)
    _marked(word)


def outlive(how: str, word: str) -> None:
    """Survive the end of a command, in one of several ways."""
    if how == "chain":
        chain(word, 3000, 0.0005, True)
    elif how == "wide-chain":
        for _ in range(4):
            if os.fork() == 0:
                chain(word, 1500, 0.001, True)
        time.sleep(60)
    elif how == "session":
        os.setsid() if os.getpgid(0) != os.getpid() else None
        if os.fork() == 0:
            os.setsid()
            _marked(word)
    elif how == "double-fork":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                _marked(word)
            os._exit(0)
    elif how == "stopped":
        pid = os.fork()
        if pid == 0:
            _marked(word)
        os.kill(pid, signal.SIGSTOP)
    elif how == "deaf":
        if os.fork() == 0:
            code = "import signal as s,time;[s.signal(n, s.SIG_IGN) for n in (1,2,3,13,15,18,20,21,22)];time.sleep(60)"
            os.execv(sys.executable, [sys.executable, "-S", "-c", code, word])
    elif how == "clean-environment":
        if os.fork() == 0:
            os.setsid()
            os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", word], {})
    elif how == "thread-leader":
        threading.Thread(target=_marked, args=(word,)).start()
    elif how == "many":
        for _ in range(30):
            if os.fork() == 0:
                os.setsid()
                _marked(word)
    time.sleep(60)


if __name__ == "__main__":
    outlive(sys.argv[1], sys.argv[2])
