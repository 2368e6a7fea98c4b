"""Attempts on objects that sandboxes share: System V objects, processes, and the kernel's counts per user."""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import time

from .answers import AttemptAnswer, absent, attempt, held, name_of, refused, worked
from .libc import check


@attempt
def _system_v(kind: str, key: int) -> AttemptAnswer:
    """Find a shared object of the host or a neighbour by its key."""
    identity = check("msgget", key, 0) if kind == "msg" else check(kind + "get", key, 0, 0)
    return worked(f"the {kind} object {identity} of another was found")


@attempt
def _system_v_number(kind: str, identity: int) -> AttemptAnswer:
    buffer = ctypes.create_string_buffer(512)
    name = {"shm": "shmctl", "msg": "msgctl"}[kind]
    check(name, identity, 2, buffer)  # IPC_STAT
    return worked(f"the {kind} object {identity} of another was found")


@attempt
def _make_system_v(key: int, token: str) -> AttemptAnswer:
    identity = check("shmget", key, 4096, 0o1000 | 0o666)
    check("msgget", key, 0o1000 | 0o666)
    check("semget", key, 1, 0o1000 | 0o666)
    with open("/dev/shm/" + token, "w") as file:
        file.write(token)
    return held("made", identity=identity)


@attempt
def _process_named(word: str) -> AttemptAnswer:
    """Find a foreign process by its command line."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    if word.encode() in file.read():
                        found.append(pid)
            except OSError:
                continue
    return worked("process {} is visible".format(", ".join(found))) if found else refused("it is not visible")


@attempt
def _signal(pid: int, how: str) -> AttemptAnswer:
    """Send signal 0, which tests whether a process of the host could be signalled and does nothing to it."""
    if how == "kill":
        os.kill(pid, 0)
    elif how == "group":
        os.killpg(pid, 0)
    elif how == "pidfd":
        check("pidfd_open", pid, 0)
    else:
        buffer = ctypes.create_string_buffer(128)
        check("rt_sigqueueinfo", pid, 0, buffer)
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        name = file.read(100).decode(errors="replace")
    return worked(f"process {pid} answers to signals: {name}")


@attempt
def _kill_everything() -> AttemptAnswer:
    """Send SIGKILL to every visible process except this program."""
    mine = {os.getpid(), os.getppid(), 1}
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in mine:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"inside" in file.read():
                    continue
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(1, signal.SIGTERM)
    return worked("every visible process was killed")


# What is counted for each user, or for the machine


def _inotify() -> int:
    return check("inotify_init1", 0)


def _aio() -> int:
    context = ctypes.c_ulong(0)
    return check("io_setup", 512, ctypes.byref(context))


def _aio_small() -> int:
    context = ctypes.c_ulong(0)
    return check("io_setup", 1, ctypes.byref(context))


def _terminal() -> int:
    return os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)


def _queued_signal() -> int:
    buffer = ctypes.create_string_buffer(struct.pack("iii", 40, 0, -1).ljust(128, b"\0"), 128)
    return check("rt_sigqueueinfo", os.getpid(), 40, buffer)


def _timer() -> int:
    identity = ctypes.c_int(0)
    return check("timer_create", 1, 0, ctypes.byref(identity))


_queues = 0


def _queue() -> int:
    """Make the largest queue within an ordinary limit; it is counted, and freed, with its descriptor."""
    global _queues
    _queues += 1
    name = ctypes.create_string_buffer(b"attack-%d-%d" % (os.getpid(), _queues))
    attributes = ctypes.create_string_buffer(struct.pack("8q", 0, 10, 8192, 0, 0, 0, 0, 0), 64)
    descriptor = check("mq_open", name, os.O_RDWR | os.O_CREAT, 0o600, attributes)
    check("mq_unlink", name)
    return descriptor


_kept = []  # type: list[socket.socket]


def _in_flight() -> int:
    """Send a descriptor into a socket and leave it there."""
    if not _kept or len(_kept) % 200 == 0:
        _kept.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
    ours = _kept[-2]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0) * 200)]
    try:
        ours.setblocking(False)
        ours.sendmsg([b"x"], ancillary)
    except BlockingIOError:
        _kept.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        _kept[-2].sendmsg([b"x"], ancillary)
    return 0


def _shm_segment() -> int:
    """Make a segment that is counted, and freed, with this process."""
    identity = check("shmget", 0, 4096, 0o600)
    attach = ctypes.CDLL(None, use_errno=True).shmat
    attach.restype = ctypes.c_void_p
    attached = attach(identity, None, 0) != ctypes.c_void_p(-1).value
    check("shmctl", identity, 0, 0)
    if not attached:
        raise refused("shmat: " + name_of(ctypes.get_errno()))
    return identity


def _lease() -> int:
    import fcntl

    descriptor = os.open("/tmp/attack-lease-{}".format(len(os.listdir("/proc/self/fd"))), os.O_CREAT | os.O_RDONLY)
    fcntl.fcntl(descriptor, 1024, fcntl.F_RDLCK)
    return descriptor


def _big_pipe() -> int:
    """Make a pipe of a megabyte; the smallest size counts as failure: the user has too many pages in pipes."""
    import fcntl

    read, write = os.pipe()
    size = fcntl.fcntl(write, 1032)
    if size < 65536:
        raise refused(f"a new pipe has {size} bytes only")
    fcntl.fcntl(write, 1031, 1 << 20)
    return read


THINGS = {
    "inotify instances": _inotify,
    "asynchronous I/O contexts": _aio,
    "one asynchronous I/O context": _aio_small,
    "pseudo-terminals": _terminal,
    "queued signals": _queued_signal,
    "timers": _timer,
    "message queues": _queue,
    "descriptors in flight": _in_flight,
    "shared memory segments": _shm_segment,
    "leases": _lease,
    "pages in pipes": _big_pipe,
}


@attempt
def _exhaust(what: str, at_most: int, processes: int) -> AttemptAnswer:
    """Take as many as there are, in several processes, and keep them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
    pipes = []
    for _ in range(processes):
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            taken, why = 0, ""
            try:
                while taken < at_most:
                    THINGS[what]()
                    taken += 1
            except AttemptAnswer as answer:
                why = answer.detail
            except OSError as error:
                why = name_of(error.errno or 0)
            except MemoryError:
                why = "no memory"
            os.write(write, (f"{taken} {why}").encode())
            os.close(write)
            while True:
                time.sleep(60)
        os.close(write)
        pipes.append(read)
    total, reasons = 0, set()
    for read in pipes:
        number, _, why = os.read(read, 200).decode().partition(" ")
        total += int(number or 0)
        reasons.add(why)
        os.close(read)
    if not total:
        return refused("not one: {}".format(", ".join(sorted(reasons))))
    return held("{} {} were taken ({})".format(total, what, ", ".join(sorted(reasons)) or "no limit met"), taken=total)


@attempt
def _one_more(what: str) -> AttemptAnswer:
    """Take one, as an innocent neighbour would."""
    signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
    if what == "descriptors in flight":
        left, _right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))])
        return worked("one is to be had")
    THINGS[what]()
    return worked("one is to be had")


@attempt
def _clock_of(pid: int) -> AttemptAnswer:
    """Read the CPU clock of a process of the host."""
    try:
        time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        return refused(name_of(error.errno or 0))
    if not os.path.exists(f"/proc/{pid}"):
        return worked(f"the CPU time of process {pid} of the host is told")
    return absent(f"there is a process {pid} inside")
