"""Objects that one program holds, and what a full snapshot keeps of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from full_sandboxes import typed

from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    pytest.mark.usefixtures("criu_found"),
]


# Objects of one Python that goes on in two forks: what sets it up, what is asked afterwards, the answer. One line each.
OBJECTS = {
    "state": ("x = [1, 2]; x.append(x)", "len(x), x[2] is x", "(3, True)"),
    "tcp": (
        "import socket; l = socket.create_server(('127.0.0.1', 0)); a = socket.create_connection(l.getsockname());"
        " b, _ = l.accept(); _ = a.sendall(b'queued')",
        "b.recv(100), b.send(b'back'), a.recv(100)",
        "(b'queued', 4, b'back')",
    ),
    "unix": (
        "u, v = socket.socketpair(); _ = u.sendall(b'data'); d = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM);"
        " d.bind('/tmp/datagrams'); e = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM);"
        " _ = e.sendto(b'1', d.getsockname())",
        "v.recv(100), d.recv(100), v.send(b'x'), u.recv(1)",
        "(b'data', b'1', 1, b'x')",
    ),
    "deleted": (
        "import os; f = open('/tmp/gone', 'w+'); _ = f.write('kept' * 1000); f.flush(); os.unlink('/tmp/gone')",
        "f.seek(3996), f.read(), os.path.exists('/tmp/gone')",
        "(3996, 'kept', False)",
    ),
    "hard link deleted": (
        "g = open('/tmp/one', 'w+'); _ = g.write('both'); g.flush(); os.link('/tmp/one', '/tmp/two');"
        " os.unlink('/tmp/one')",
        "g.seek(0), g.read(), open('/tmp/two').read(), os.path.exists('/tmp/one')",
        "(0, 'both', 'both', False)",
    ),
    "locks": (
        "import fcntl; h = open('/tmp/lock', 'w'); fcntl.flock(h, fcntl.LOCK_EX); k = open('/tmp/lock2', 'w');"
        " fcntl.lockf(k, fcntl.LOCK_EX)",
        "[os.system(f'flock -n /tmp/lock true') != 0, os.system('grep -c POSIX /proc/locks >/dev/null')]",
        "[True, 0]",
    ),
    "threads": (
        "import threading, queue; ask, tell = queue.Queue(), queue.Queue();"
        " threads = [threading.Thread(target=lambda: [tell.put(ask.get() * 2) for _ in range(9)], daemon=True)"
        " for _ in range(8)]; _ = [t.start() for t in threads]",
        "[ask.put(i) for i in range(8)] and sorted(tell.get() for _ in range(8)), sum(t.is_alive() for t in threads)",
        "([0, 2, 4, 6, 8, 10, 12, 14], 8)",
    ),
    "shared memory": (
        "import mmap; from held import *; m = mmap.mmap(-1, 4096); n = os.memfd_create('n'); _ = os.write(n, b'mem');"
        " s = open('/dev/shm/s', 'w+b'); _ = s.truncate(4096); p = mmap.mmap(s.fileno(), 4096); p[0] = 9; counter(m)",
        "m.__setitem__(0, 1) or until(lambda: m[1] == 1), os.pread(n, 9, 0), p[0]",
        "(True, b'mem', 9)",
    ),
    "inotify": (
        "import ctypes; libc = ctypes.CDLL(None); i = libc.inotify_init1(os.O_NONBLOCK); os.makedirs('/tmp/watched');"
        " w = libc.inotify_add_watch(i, b'/tmp/watched', 0x100)",
        "[open('/tmp/watched/new', 'w').close()] and os.read(i, 4096)[16:19], w",
        "(b'new', 1)",
    ),
    "events": (
        "import select, time; q = os.eventfd(3); z = select.epoll(); z.register(q, select.EPOLLIN);"
        " began = time.monotonic()",
        "[n for n, _ in z.poll(0)] == [q], os.eventfd_read(q), time.monotonic() > began",
        "(True, 3, True)",
    ),
    "terminal": (
        "import pty; o, t = os.openpty(); _ = os.write(t, b'inner')",
        "os.read(o, 100), os.isatty(t), os.ttyname(0)",
        "(b'inner', True, '/dev/pts/0')",
    ),
    "directory deleted": (
        "os.makedirs('/tmp/left'); r = os.open('/tmp/left', os.O_RDONLY); os.rmdir('/tmp/left')",
        "os.listdir(r), os.fstat(r).st_nlink",
        "([], 0)",
    ),
}


HELD = """
import os, time
def until(condition):
    while not condition():
        time.sleep(0.01)
    return True
def counter(memory):
    if os.fork() == 0:
        until(lambda: memory[0])
        memory[1] += 1
        os._exit(0)
"""


@pytest.fixture(scope="module")
def copies() -> Iterator[list[Sandbox]]:
    """A Python with all these objects, and two forks of it, the forks first."""
    with make_sandbox("overlay", snapshot="full") as sandbox:
        sandbox.write_file("/tmp/held.py", HELD.encode())
        typed(sandbox, "cd /tmp; python3 -q -i")
        for name, (setup, _, _) in OBJECTS.items():
            assert typed(sandbox, f"{setup}\n") == ">>> ", name
        children = sandbox.fork(2, strict=True)
        try:
            yield [*children, sandbox]
        finally:
            for child in children:
                child.close()


@pytest.mark.parametrize("name", OBJECTS)
def test_what_a_program_holds(copies: list[Sandbox], name: str) -> None:
    _, question, answer = OBJECTS[name]
    for one in copies:
        assert typed(one, f"{question}\n") == f"{answer}\n>>> "
