"""A program that is hard to capture: a traced child, a connection that leads outside. Runs in a sandbox.

    cd EMPTY_FOLDER; python3 -q -i ../snags.py KIND ARGUMENT…     # its input is a FIFO

1. It shares nothing with the rest of the package, and needs Python 3.8 on Linux. In the sandbox its file is called
   ``snags.py``.
2. It writes its process id to the file ``pid``, and ``there`` to the file ``ready``; where the sandbox forbids the
   setup, the reason. ``report()``, typed into the running Python, writes to the file ``answers`` whether the state
   still exists and works.
3. It ends by itself after ten minutes or when its folder is gone, with the processes that it started.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Alive = Callable[[], bool]

SECONDS = 600
NOBODY = 65534
HELLO, ASK, ANSWER = 16, b"?", b"!"
"""Protocol of a connection with the outside: length of the greeting, question, answer."""
_IO_URING_SETUP, _TRACE_ME, _SET_DEATH_SIGNAL = 425, 0, 1
_NAMESPACES = {"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000}


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _io_uring() -> Alive:
    file = _checked(_libc().syscall(_IO_URING_SETUP, 8, ctypes.create_string_buffer(120)))
    return lambda: "io_uring" in os.readlink(f"/proc/self/fd/{file}")


def _child(prepare: Callable[[], None]) -> int:
    """Start a child that runs something, then waits, and dies with this process.

    Raises:
        OSError: its task failed.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            _libc().prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            os.write(write, b"0")
            while True:
                time.sleep(SECONDS)
        except OSError as error:
            os.write(write, str(error.errno or 1).encode())
        finally:
            os._exit(1)
    os.close(write)
    number = int(os.read(read, 9) or 1)
    os.close(read)
    if number:
        os.waitpid(pid, 0)
        raise OSError(number, os.strerror(number))
    return pid


def _traced() -> Alive:
    pid = _child(lambda: None)
    libc = _libc()
    # PTRACE_SEIZE, because PTRACE_TRACEME in the child would tie it to the thread that started it.
    _checked(libc.ptrace(0x4206, pid, None, None))
    return lambda: f"TracerPid:\t{os.getpid()}" in _status(pid)


def _status(pid: int) -> list[str]:
    with open(f"/proc/{pid}/status") as file:
        return file.read().splitlines()


def _namespace(kind: str) -> Alive:
    read, write = os.pipe()

    def prepare() -> None:
        _checked(_libc().unshare(_NAMESPACES[kind]))
        # Only its children are in a new namespace of process ids.
        os.write(write, f"{_child(lambda: None)} ".encode())

    _child(prepare)
    pid = int(os.read(read, 20))
    return lambda: os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


def _other_user() -> Alive:
    def prepare() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    if os.geteuid() != 0:
        raise PermissionError(1, "the sandbox has one user only")
    pid = _child(prepare)
    return lambda: any(line.startswith(f"Uid:\t{NOBODY}\t") for line in _status(pid))


def _detached() -> Alive:
    """Start a process in a session of its own whose parent is gone."""
    if os.fork():
        os._exit(0)
    os.setsid()
    return lambda: True


def _connected(end: socket.socket, greeting: str) -> Alive:
    end.settimeout(20)
    if end.recv(HELLO, socket.MSG_WAITALL) != greeting.encode():
        raise ConnectionRefusedError(111, "something else listens there")

    def ask() -> bool:
        end.sendall(ASK)
        return end.recv(1) == ANSWER

    return ask


def _outer_tcp(port: str, greeting: str) -> Alive:
    return _first([functools.partial(_tcp, host, int(port), greeting) for host in ("127.0.0.1", *_gateways())])


def _tcp(host: str, port: int, greeting: str) -> Alive:
    return _connected(socket.create_connection((host, port), timeout=5), greeting)


def _gateways() -> list[str]:
    """Addresses of the machine that a container's network leads to."""
    with open("/proc/net/route") as file:
        rows = [line.split() for line in file.read().splitlines()[1:]]
    return [socket.inet_ntoa(int(row[2], 16).to_bytes(4, sys.byteorder)) for row in rows if row[1] == "0" * 8]


def _outer_unix(path: str, name: str, greeting: str) -> Alive:
    return _first([functools.partial(_unix, to, greeting) for to in (path, f"\0{name}")])


def _unix(to: str, greeting: str) -> Alive:
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(5)
    end.connect(to)
    return _connected(end, greeting)


def _first(ways: Sequence[Callable[[], Alive]]) -> Alive:
    """Try several ways: result of the first that works, else the last one's error."""
    for way in ways[:-1]:
        try:
            return way()
        except OSError:
            continue
    return ways[-1]()


def _outer_fifo(path: str) -> Alive:
    file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    return lambda: os.write(file, ASK) == 1


MAKERS: dict[str, Callable[..., Alive]] = {
    "io_uring": _io_uring,
    "traced": _traced,
    "user_namespace": lambda: _namespace("user"),
    "pid_namespace": lambda: _namespace("pid"),
    "net_namespace": lambda: _namespace("net"),
    "other_user": _other_user,
    "detached": _detached,
    "outer_tcp": _outer_tcp,
    "outer_unix": _outer_unix,
    "outer_fifo": _outer_fifo,
}
"""Makers by kind; their arguments come from the command line."""


def _write(name: str, text: str) -> None:
    with open(f"{name}.new", "w") as file:
        file.write(text + "\n")
    os.rename(f"{name}.new", name)


def report() -> None:
    """Write whether the state exists."""
    try:
        _write("answers", "there" if alive() else "gone")
    except Exception as error:  # it is not as it was
        _write("answers", f"gone: {error}")


def _end_in_time() -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and os.path.exists("ready"):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    try:
        alive = MAKERS[sys.argv[1]](*sys.argv[2:])
        outcome = "there"
    except (OSError, AttributeError) as error:
        outcome = str(error)
    _write("pid", str(os.getpid()))
    _write("ready", outcome)
    if outcome != "there":
        os._exit(0)
    threading.Thread(target=_end_in_time, daemon=True).start()
