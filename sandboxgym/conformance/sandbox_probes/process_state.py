"""A program with process state that snapshots must keep, and a report of it. Runs in a sandbox.

    cd EMPTY_FOLDER; python3 -q -i ../holder.py VALUE     # its input is a FIFO

1. It shares nothing with the rest of the package, and needs Python 3.8 on Linux. In the sandbox its file is called
   ``holder.py``. State that cannot be made there is missing from its answers.
2. ``report()``, typed into the running Python, writes the answers to the file ``answers``, one line each. Reading
   changes nothing: items taken out of a queue are put back.
3. It ends by itself after ten minutes, when ``../stopped`` appears, or when its folder is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import queue
import random
import select
import signal
import socket
import sys
import threading
import time
import tty

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 600
MEMORY = 16 * 2**20
"""Bytes of memory whose hash is reported."""
_IN_CREATE = 0x100

value = sys.argv[1].encode() if __name__ == "__main__" else b""
asks: dict[str, Callable[[], object]] = {}
"""Questions, by the name of the probe after the dot."""


def _until(condition: Callable[[], bool]) -> None:
    """Wait, up to ten seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def _memory() -> Callable[[], object]:
    content = os.urandom(MEMORY)
    return lambda: hashlib.sha256(content).hexdigest()[:16]


def _random() -> Callable[[], object]:
    stream = random.Random(os.urandom(8))
    return lambda: hashlib.sha256(repr(stream.getstate()).encode()).hexdigest()[:16]


def _threads() -> Callable[[], object]:
    asked: queue.Queue[int] = queue.Queue()
    told: queue.Queue[bytes] = queue.Queue()

    def work() -> None:
        while asked.get() >= 0:
            told.put(value)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()

    def ask() -> object:
        for number in range(8):
            asked.put(number)
        answers = {told.get(timeout=10) for _ in range(8)}
        return sum(worker.is_alive() for worker in workers), answers

    return ask


def _talk(one: socket.socket, other: socket.socket) -> object:
    """Bytes waiting at one end of a connection, left there, and True if the other direction works."""
    one.sendall(b"?")
    return one.recv(100, socket.MSG_PEEK), other.recv(1)


def _tcp() -> Callable[[], object]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
    for end in (one, other):
        end.settimeout(10)
    other.sendall(b"queued " + value)
    return lambda: (_talk(one, other), one.getpeername() == other.getsockname())


def _unix() -> Callable[[], object]:
    one, other = socket.socketpair()
    for end in (one, other):
        end.settimeout(10)
    other.sendall(b"queued " + value)
    return lambda: _talk(one, other)


def _circulating(read: int, write: int) -> Callable[[], object]:
    """Bytes waiting in a pipe, which are put back."""
    os.write(write, b"queued " + value)

    def ask() -> object:
        if not select.select([read], [], [], 0)[0]:
            return "empty"
        content = os.read(read, 100)
        os.write(write, content)
        return content

    return ask


def _fifo() -> Callable[[], object]:
    os.mkfifo("fifo")
    end = os.open("fifo", os.O_RDWR)
    return _circulating(end, end)


def _pty() -> Callable[[], object]:
    outer, inner = os.openpty()
    tty.setraw(inner)
    ask = _circulating(inner, outer)

    def settled() -> object:
        _until(lambda: bool(select.select([inner], [], [], 0)[0]))  # it takes the kernel a moment to pass it on
        return ask(), os.isatty(inner)

    return settled


def _deleted(other_name: str | None) -> Callable[[], object]:
    name = f"deleted{bool(other_name):d}"
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(file, value * 1000)
    if other_name is not None:
        os.link(name, other_name)
    os.unlink(name)

    def ask() -> object:
        found = os.pread(file, 9, 1000), os.fstat(file).st_size, os.path.exists(name)
        if other_name is None:
            return found
        with open(other_name, "rb") as other:
            return found, other.read(9)

    return ask


def _lock() -> Callable[[], object]:
    files = [os.open(f"lock{number}", os.O_RDWR | os.O_CREAT) for number in range(2)]
    fcntl.flock(files[0], fcntl.LOCK_EX)
    fcntl.lockf(files[1], fcntl.LOCK_EX)
    return lambda: [value, _in_child(_refused_flock), _in_child(_refused_lockf)]


def _in_child(function: Callable[[], bool]) -> bool:
    """Answer of a child process."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def _refused_flock() -> bool:
    return _refused(lambda: fcntl.flock(os.open("lock0", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB))


def _refused_lockf() -> bool:
    return _refused(lambda: fcntl.lockf(os.open("lock1", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB))


def _refused(call: Callable[[], None]) -> bool:
    try:
        call()
    except OSError:
        return True
    return False


def _shared_memory() -> Callable[[], object]:
    memory = mmap.mmap(-1, 4096)
    memory[:3] = b"\0\0" + value[:1]
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        while os.getppid() == parent:  # answers whoever shares the memory
            memory[1] = memory[0]
            time.sleep(0.005)
        os._exit(0)

    def ask() -> object:
        memory[0] = (memory[0] + 1) % 256
        _until(lambda: memory[1] == memory[0] or os.waitpid(pid, os.WNOHANG) != (0, 0))
        return memory[1] == memory[0], memory[2:3]

    return ask


def _memfd() -> Callable[[], object]:
    file = os.memfd_create("held")
    os.write(file, value)
    return lambda: os.pread(file, 100, 0)


def _inotify() -> Callable[[], object]:
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK)
    os.mkdir("watched")
    if libc.inotify_add_watch(watcher, b"watched", _IN_CREATE) < 0:
        raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def ask() -> object:
        path = os.path.join("watched", value.decode())
        open(path, "w").close()
        os.unlink(path)
        return os.read(watcher, 4096)[16:].rstrip(b"\0")

    return ask


def _epoll() -> Callable[[], object]:
    read, write = os.pipe()
    os.write(write, value)
    poll = select.epoll()
    poll.register(read, select.EPOLLIN)
    return lambda: (value, poll.poll(0) == [(read, select.EPOLLIN)])


def _pid() -> Callable[[], object]:
    return lambda: (os.getpid(), os.getsid(0))


MAKERS: dict[str, Callable[[], Callable[[], object]]] = {
    "memory": _memory,
    "random": _random,
    "tcp": _tcp,
    "unix": _unix,
    "pipe": lambda: _circulating(*os.pipe()),
    "fifo": _fifo,
    "pty": _pty,
    "deleted_file": lambda: _deleted(None),
    "deleted_link": lambda: _deleted("left"),
    "lock": _lock,
    "shared_memory": _shared_memory,
    "memfd": _memfd,
    "inotify": _inotify,
    "epoll": _epoll,
    "pid": _pid,
    "threads": _threads,  # last, for others fork
}


def _answers() -> Iterator[str]:
    for name, ask in asks.items():
        try:
            yield f"{name} {ask()!r}"
        except Exception as error:  # it is not as it was
            yield f"{name} {error!r}"


def report() -> None:
    """Write all answers, at once; text typed into this Python is included first."""
    typed = globals().get("typed")
    with open("new", "w") as file:
        file.write("\n".join([f"repl {typed!r}", *_answers(), ""]))
    os.rename("new", "answers")


def _end_in_time() -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and os.path.exists("ready") and not os.path.exists("../stopped"):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for _name, _make in MAKERS.items():
        try:
            asks[_name] = _make()
        except (OSError, AttributeError):  # there is no such thing here
            continue
    open("ready", "w").close()
    threading.Thread(target=_end_in_time, daemon=True).start()
