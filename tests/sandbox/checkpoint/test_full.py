"""Full snapshots: sandboxes that fork with their running processes."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from components import missing
from sandbox.overlay_boxes import python, runtime_folder  # noqa: F401 - a fixture

from sandboxgym.errors import SnapshotMismatch, SnapshotNotSupported
from sandboxgym.sandbox.base import CONTROL, SandboxFull, SandboxUnavailable, SnapshotLossy
from sandboxgym.sandbox.checkpoint import capture, criu
from sandboxgym.sandbox.layers.store import OverlayTree
from sandboxgym.sandbox.overlay.backend import REPLACED
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
]
# ruff: noqa: F811

LONG = 120.0
"""Seconds that anything may take on a busy machine."""
WAIT = "until %s; do sleep 0.02; done"

Maker = Callable[..., Sandbox]


@pytest.fixture(scope="module", autouse=True)
def _criu() -> None:
    if reason := criu.why_unavailable():
        missing("criu", reason)


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes sandboxes with full snapshots, and closes them."""
    made: list[Sandbox] = []

    def maker(snapshot: Any = "full", **arguments: Any) -> Sandbox:
        made.append(make_sandbox("overlay", snapshot=snapshot, **arguments))
        return made[-1]

    yield maker
    for sandbox in made:
        sandbox.close()


@pytest.fixture
def box(make: Maker) -> Sandbox:
    """A sandbox whose snapshots are always full."""
    return make()


@pytest.fixture
def everywhere() -> Iterator[Callable[[Sandbox], list[Sandbox]]]:
    """A sandbox with two forks of it, the forks first."""
    made: list[Sandbox] = []

    def fork(sandbox: Sandbox) -> list[Sandbox]:
        children = sandbox.fork(2, strict=True)
        made.extend(children)
        return [*children, sandbox]

    yield fork
    for child in made:
        child.close()


Everywhere = Callable[[Sandbox], list[Sandbox]]


def container(sandbox: Sandbox) -> Any:
    backend: Any = sandbox.backend
    return backend.container


@pytest.fixture(params=["left running", "replaced"])
def both(request: pytest.FixtureRequest, box: Sandbox) -> Sandbox:
    """The sandbox, in both ways of capturing its processes."""
    if request.param == "replaced":
        backend: Any = box.backend
        backend.copied = REPLACED
    return box


def said(sandbox: Sandbox, command: str) -> str:
    result = sandbox.execute(command, timeout=LONG)
    assert not result.timed_out, result
    return result.output


def typed(sandbox: Sandbox, text: str, until: str = r">>> $") -> str:
    """What a program says to a line that is typed to it."""
    answer = sandbox.interact(text, timeout=LONG, until=until)
    assert answer.running, answer
    return answer.output


# What survives


SHELL = r"""
plain=1; declare -A table=([key]='a b'); list=(1 '2 3'); export EXPORTED=yes; declare -ri fixed=7
greet() { echo "hello $1"; }
trap 'echo bye' EXIT; trap 'echo usr1' USR1
umask 027; ulimit -Sn 200; shopt -s nullglob; set -o noclobber; alias ll='ls -l'
cd /tmp; pushd /usr >/dev/null; history -s first; history -s second
RANDOM=5
"""
ASK = r"""
echo $plain "${table[key]}" "${list[1]}" $EXPORTED $fixed $(greet you); trap -p EXIT USR1
umask; ulimit -Sn; shopt -p nullglob; set +o | grep noclobber; alias ll; dirs; history | grep -c -e first -e second
echo $RANDOM $RANDOM; kill -USR1 $$
"""


def test_the_state_of_the_shell(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, SHELL)
    answers = [said(one, ASK) for one in everywhere(box)]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].startswith("1 a b 2 3 yes 7 hello you\ntrap -- 'echo bye' EXIT\n")
    assert "\n/usr /tmp\n2\n" in answers[0]
    assert answers[0].endswith("usr1\n")


def test_jobs(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 & (sleep 1000; exit 3) & first=$!")
    for one in everywhere(box):
        assert said(one, "jobs -p | wc -l") == "2\n"
        assert said(one, "kill %1; wait %1; echo $?; kill -0 $first && echo alive") == "143\nalive\n"


def test_a_stopped_job_stays_stopped(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 & job=$!; kill -STOP $job; " + WAIT % "grep -q ') T' /proc/$job/stat")
    for one in everywhere(box):
        assert said(one, "grep -c ') T' /proc/$job/stat") == "1\n"


def test_process_ids(box: Sandbox, everywhere: Everywhere) -> None:
    pid = said(box, "sleep 1000 & echo $$ $!")
    copies = everywhere(box)
    assert [said(one, "echo $$ $!") for one in copies] == [pid] * 3
    following = {said(one, "true & echo $!; wait $!") for one in copies[:2]}
    assert len(following) == 1
    assert int(following.pop()) < 1000


def test_descriptors_keep_their_offsets(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "seq 5 >/tmp/in; exec 7</tmp/in 8>/tmp/out; read -r a <&7; read -r a <&7; echo $a >&8")
    for one in everywhere(box):
        assert said(one, "read -r a <&7; echo $a >&8; cat /tmp/out") == "2\n3\n"


def test_a_server_answers_in_every_copy(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "mkdir /tmp/site; cd /tmp/site; echo before >page; python3 -m http.server 8000 >/dev/null 2>&1 &")
    get = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:8000/page\").read().decode())'"
    assert said(box, WAIT % f"{get} 2>/dev/null") == "before\n\n"
    for number, one in enumerate(everywhere(box)):
        said(one, f"echo {number} >page")
        assert said(one, get) == f"{number}\n\n"


def test_data_in_a_fifo_and_in_a_pipe(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "mkfifo /tmp/queue; exec 7<>/tmp/queue; echo waiting >&7; exec 8< <(echo piped; sleep 1000)")
    for one in everywhere(box):
        assert said(one, "read -r a <&7; read -r b <&8; echo $a $b") == "waiting piped\n"


def test_orphans_belong_to_the_shell(box: Sandbox, everywhere: Everywhere) -> None:
    count = "pgrep -fc '^sleep 1234'"
    said(box, "(setsid -f sleep 1234); (sleep 1234 &); " + WAIT % f"[[ $({count}) == 2 ]]")
    assert [said(one, count) for one in everywhere(box)] == ["2\n"] * 3


def test_a_command_in_the_middle_of_a_loop(box: Sandbox, everywhere: Everywhere) -> None:
    loop = "for i in 1 2 3 4; do echo ask $i; read -r answer; echo got $answer; done; echo done"
    typed(box, loop, until="ask 1")
    typed(box, "a\n", until="ask 2")
    copies = everywhere(box)
    for name, one in zip("xyz", copies):
        assert f"got {name}\nask 3" in typed(one, f"{name}\n", until="ask 3")
    for one in copies:
        typed(one, "b\n", until="ask 4")
        last = one.interact("c\n", timeout=LONG)
        assert (last.exit_code, last.running, last.output) == (0, False, "got c\ndone\n")
        assert said(one, "echo $i $answer") == "4 c\n"


def test_what_a_command_printed_is_heard_once(box: Sandbox, everywhere: Everywhere) -> None:
    command = "echo shown; until [[ -e /tmp/go ]]; do sleep 0.05; done; echo later"
    typed(box, command, until="shown")
    for one in everywhere(box):
        one.write_file("/tmp/go", b"")
        rest = one.interact("", timeout=LONG)
        assert (rest.output, rest.exit_code) == ("later\n", 0)


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


# One instant


COUNTER = "i=0; while :; do i=$((i + 1)); echo $i >>/tmp/log; done &"
GAPS = "awk 'NR != $1' /tmp/log | head -3; tail -n 1 /tmp/log"


def test_files_and_processes_are_of_one_instant(both: Sandbox, everywhere: Everywhere) -> None:
    said(both, COUNTER)
    counts: list[list[int]] = []
    for _ in range(5):
        copies = everywhere(both)
        for one in copies:  # until each of them has written more
            said(one, "n=$(wc -l </tmp/log); until (( $(wc -l </tmp/log) > n + 10 )); do sleep 0.02; done")
        # Neither a number missing nor one twice, in the parent, whether it was replaced or not, and in the forks.
        counts.append([int(said(one, GAPS)) for one in copies])
    assert all(later[2] > sooner[2] for sooner, later in itertools.pairwise(counts))


def test_processes_that_come_and_go(box: Sandbox) -> None:
    # Half a look at a process that ends must not count as an obstacle, nor one that changes its parent.
    said(box, "(while :; do /bin/true; (/bin/true); done) &")
    for _ in range(100):
        assert box.lossy() == ()
    for _ in range(5):
        box.snapshot(strict=True).release()


def test_forks_and_parent_do_not_meet(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 & echo before >/tmp/file")
    copies = everywhere(box)
    for number, one in enumerate(copies):
        said(one, f"echo {number} >>/tmp/file; own={number}; touch /tmp/{number}")
    for number, one in enumerate(copies):
        assert said(one, "cat /tmp/file; ls -1 /tmp; echo $own") == f"before\n{number}\n{number}\nfile\n{number}\n"
    said(copies[0], "kill %1")
    copies[1].close()
    assert said(box, "jobs -p | wc -l") == "1\n"


def test_a_snapshot_is_restored_in_any_order(box: Sandbox) -> None:
    said(box, "sleep 1000 & x=1")
    first = box.snapshot(strict=True)
    said(box, "kill %1; wait; x=2")
    second = box.snapshot(strict=True)
    for snap, answer in ((first, "1 1\n"), (second, "2 0\n"), (first, "1 1\n")):
        box.restore(snap)
        assert said(box, "echo $x $(jobs -pr | wc -l)") == answer
    first.release()
    box.restore(second)
    assert said(box, "echo $x") == "2\n"
    second.release()


def test_a_chain_of_snapshots(box: Sandbox) -> None:
    said(box, "sleep 1000 & exec 7>>/tmp/log")
    backend: Any = box.backend
    counts = []
    for number in range(60):
        said(box, f"echo {number} >&7; echo {number} >/tmp/{number}")
        snap = box.snapshot(strict=True)
        assert isinstance(snap.tree, OverlayTree)
        depth = len(snap.tree.layers)
        snap.release()
        if number in (2, 59):
            gc.collect()  # what other tests left to it
            backend.runtime.settle()
            open_here, layers = len(os.listdir("/proc/self/fd")), len(os.listdir(backend.runtime.directory / "layers"))
            inside = said(box, "fds=(/proc/$$/fd/*) pids=(/proc/[0-9]*); echo ${#fds[@]} ${#pids[@]}")
            counts.append((depth, open_here, layers, inside))
    assert counts[0] == counts[1]
    assert said(box, "wc -l </tmp/log; ls /tmp | wc -l; jobs -pr | wc -l") == "60\n61\n1\n"


def test_a_sandbox_that_wrote_little_is_left_running(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 & echo 1 >/tmp/kept; git init -q /tmp/r; cd /tmp/r; touch f; git add f")
    before, status = container(box), said(box, "stat -c '%i %z' /tmp/kept")
    children = everywhere(box)[:2]
    assert container(box) is before
    assert said(box, "stat -c '%i %z' /tmp/kept; ls -a /tmp | grep -c link_remap") == f"{status}0\n"
    for child in children:
        # A copy has a later time of change, which git takes note of once.
        assert said(child, "git diff-files --name-only; git status --porcelain; git diff-files") == "f\nA  f\n"


@pytest.mark.parametrize("written", ["for i in {1..300}; do : >/tmp/$i; done", "head -c 40000000 /dev/zero >/tmp/1"])
def test_a_sandbox_that_wrote_much_is_replaced_once(box: Sandbox, everywhere: Everywhere, written: str) -> None:
    said(box, f"sleep 1000 & {written}; cksum /tmp/* >/tmp/sums")
    before = container(box)
    copies = everywhere(box)
    after = container(box)
    assert after is not before
    for one in copies:
        assert said(one, "cksum /tmp/[1-9]* | cmp - /tmp/sums; jobs -pr | wc -l") == "1\n"
    box.snapshot(strict=True).release()
    assert container(box) is after


def test_many_forks_at_once(box: Sandbox) -> None:
    said(box, "sleep 1000 &")
    children = box.fork(8, strict=True, start=True)
    try:
        assert [said(one, "jobs -pr | wc -l") for one in children] == ["1\n"] * 8
    finally:
        for child in children:
            child.close()


def test_each_fork_has_its_own_time_limit(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 4321 &")
    for one in everywhere(box):
        result = one.execute("sleep 1000", timeout=0.5)
        assert (result.timed_out, result.exit_code) == (True, 124)
        assert said(one, "jobs -pr | wc -l") == "1\n"


# What is done where it cannot be captured


@pytest.mark.parametrize("frozen", [True, False])
def test_if_the_copy_fails_the_sandbox_goes_on(both: Sandbox, monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    box = both
    stopped = "" if frozen else "kill -STOP $stopped; "  # then CRIU stops the others by itself
    said(box, f"sleep 1000 & sleep 2000 & stopped=$!; {stopped}x=1; " + COUNTER)

    def fails(*_: object, **__: object) -> None:
        raise SandboxUnavailable("made to fail")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(capture, "revive", fails)
        patch.setattr(capture, "copy_layer", full)
        snap = box.snapshot()
        assert "made to fail" in snap.lossy[0]
        assert snap.checkpoint is None
        with pytest.raises(SnapshotLossy, match="made to fail"):
            box.snapshot(strict=True)
    snap.release()
    assert said(box, "echo $x $(jobs -p | wc -l) $(grep -c ') T' /proc/$stopped/stat)") == f"1 3 {int(not frozen)}\n"
    said(box, "n=$(wc -l </tmp/log); until (( $(wc -l </tmp/log) > n + 10 )); do sleep 0.02; done")
    assert said(box, GAPS).count("\n") == 1
    box.snapshot(strict=True).release()


TRACED = """
import ctypes, os, signal, time
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(pid, os.WUNTRACED)
open('/tmp/ready', 'w').close()
time.sleep(1000)
"""


def test_a_traced_process_is_refused(box: Sandbox) -> None:
    box.write_file("/tmp/traced.py", TRACED.encode())
    said(box, "x=1; python3 /tmp/traced.py & " + WAIT % "[[ -e /tmp/ready ]]")
    assert any(reason.startswith("traced by") for reason in box.lossy())
    with pytest.raises(SnapshotLossy, match="traced by another process: python3"):
        box.snapshot(strict=True)
    (child,) = box.fork(1)
    assert any(reason.startswith("traced by") for reason in child.lost)
    assert said(child, "echo $x; jobs -p | wc -l") == "1\n0\n"
    child.close()
    assert said(box, "jobs -pr | wc -l") == "1\n"


def test_a_process_that_outlived_its_shell_is_refused(box: Sandbox) -> None:
    # Only in its own session does it outlive the shell's, and `setsid -f` returns before it has one.
    detach = "setsid -f bash -c 'touch /tmp/ready; exec sleep 3000'; " + WAIT % "[[ -e /tmp/ready ]]"
    assert box.execute(f"{detach}; exit", timeout=LONG).ended
    while "background: sleep 3000" not in box.lossy():  # it is bash for a moment
        assert box.lossy()
        time.sleep(0.02)
    with pytest.raises(SnapshotLossy, match="not a descendant of the shell: sleep 3000"):
        box.snapshot(strict=True)
    snap = box.snapshot()
    assert snap.checkpoint is None
    assert "background: sleep 3000" in snap.lossy
    snap.release()


def test_what_a_run_left_behind_is_lost_where_there_is_no_shell(box: Sandbox) -> None:
    left = "(setsid bash -c 'touch /tmp/ready; exec sleep 3000' >/dev/null 2>&1 &); "
    box.run(left + WAIT % "[[ -e /tmp/ready ]]")
    snap = box.snapshot()
    assert snap.checkpoint is None
    assert snap.lossy[0] == "no shell was started" and len(snap.lossy) == 2
    snap.release()
    with pytest.raises(SnapshotLossy, match="no shell was started; background: "):
        box.snapshot(strict=True)


def test_a_socket_of_the_host_is_refused(make: Maker) -> None:
    box = make(network=True)
    typed(box, "python3 -q -i")
    typed(box, "import socket; s = socket.create_server(('127.0.0.1', 0))\n")
    with pytest.raises(SnapshotLossy, match="a socket of the host's network"):
        box.snapshot(strict=True)
    assert typed(box, "1 + 1\n") == "2\n>>> "


CONNECT = "import socket; s = socket.socket(socket.AF_UNIX{kind}); s.connect({to!r})\n"


def test_a_unix_socket_to_outside_is_refused(make: Maker) -> None:
    box = make(network=True)
    name = f"\0sandboxgym-test-{os.getpid()}"
    typed(box, "python3 -q -i")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        assert typed(box, CONNECT.format(kind="", to=name)) == ">>> "
        with pytest.raises(SnapshotLossy, match="a unix socket is connected with one outside"):
            box.snapshot(strict=True)  # before it is accepted
        end, _ = listener.accept()
        with end:
            assert any(reason.startswith("a unix socket is connected with one outside") for reason in box.lossy())
            snap = box.snapshot()
            assert snap.checkpoint is None and any("one outside" in reason for reason in snap.lossy)
            snap.release()
            typed(box, "s.send(b'still here')\n")
            assert end.recv(100) == b"still here"
    typed(box, "s.close()\n")
    box.snapshot(strict=True).release()


def test_a_socket_that_outside_connects_to_is_refused(box: Sandbox) -> None:
    typed(box, "python3 -q -i")
    typed(box, "import socket; l = socket.socket(socket.AF_UNIX); l.bind('/tmp/socket'); l.listen()\n")
    box.snapshot(strict=True).release()
    backend: Any = box.backend
    typed(box, "import os; os.unlink('/tmp/socket'); l.close(); l = socket.socket(socket.AF_UNIX);"
          " l.bind('/tmp/socket'); l.listen()\n")  # fmt: skip
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"/proc/{backend.container.pid}/root/tmp/socket")
        typed(box, "s, _ = l.accept()\n")
        with pytest.raises(SnapshotLossy, match="a unix socket is connected with one outside"):
            box.snapshot(strict=True)
        typed(box, "s.send(b'still here')\n")
        assert client.recv(100) == b"still here"


def test_unix_sockets_that_are_all_inside_are_no_obstacle(box: Sandbox) -> None:
    typed(box, "python3 -q -i")
    typed(box, "import socket, os; u, v = socket.socketpair(); l = socket.socket(socket.AF_UNIX); l.bind('/tmp/l')\n")
    typed(box, "l.listen(); c = socket.socket(socket.AF_UNIX); c.connect('/tmp/l'); w, x = socket.socketpair()\n")
    typed(box, "x.close(); d, e = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n")
    assert box.lossy() == ()


def test_a_fifo_to_outside_is_refused(box: Sandbox) -> None:
    box.start()
    backend: Any = box.backend
    os.mkfifo(backend.control / "fifo")
    reader = os.open(backend.control / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        said(box, f"exec 7>{CONTROL}/fifo")
        with pytest.raises(SnapshotLossy, match=r"a pipe leads outside \(fd 7\)"):
            box.snapshot(strict=True)
        said(box, "echo still here >&7")
        assert os.read(reader, 100) == b"still here\n"
        said(box, "exec 7>&-; mkfifo /tmp/own; exec 7<>/tmp/own")
        box.snapshot(strict=True).release()
    finally:
        os.close(reader)


def test_another_user_is_captured_or_refused(box: Sandbox, everywhere: Everywhere) -> None:
    program = "import os, time; os.setgroups([]); os.setgid(65534); os.setuid(65534); time.sleep(1000)"
    said(box, f"python3 -c '{program}' & job=$!; " + WAIT % "grep -q '^Uid:.65534' /proc/$job/status")
    if box.lossy():
        assert "of another user" in box.lossy()[0]
        with pytest.raises(SnapshotLossy, match="of another user"):
            box.snapshot(strict=True)
    else:
        assert [said(one, "jobs -pr | wc -l") for one in everywhere(box)] == ["1\n"] * 3


@pytest.mark.parametrize("call", ["io_uring_setup", "unshare", "userfaultfd", "perf_event_open", "bpf"])
def test_what_the_filter_of_calls_keeps_out(box: Sandbox, call: str) -> None:
    # What could not be captured and is not even there: the sandbox's processes may not ask for it.
    numbers = {"io_uring_setup": 425, "unshare": 272, "userfaultfd": 323, "perf_event_open": 298, "bpf": 321}
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86-64")
    asked = f"c.syscall({numbers[call]}, 0x10000000, 0, 0, 0, 0)"
    program = f"import ctypes; c = ctypes.CDLL(None, use_errno=True); print({asked}, ctypes.get_errno())"
    assert said(box, f'python3 -c "{program}"') == "-1 1\n"


# Kinds


def test_auto_takes_the_cheaper_way_where_it_loses_nothing(make: Maker) -> None:
    box = make("auto")
    said(box, "x=1")
    idle = box.snapshot(strict=True)
    assert idle.checkpoint is None
    said(box, "sleep 1000 &")
    assert box.lossy() == ()
    busy = box.snapshot(strict=True)
    assert busy.checkpoint is not None
    assert busy.nbytes > idle.nbytes + 100_000
    files = box.snapshot(mode="filesystem")
    assert files.checkpoint is None
    assert files.lossy == ("background: sleep 1000",)
    for snap in (idle, busy, files):
        snap.release()


def test_it_must_be_asked_for() -> None:
    with make_sandbox("overlay") as box, pytest.raises(ValueError, match="expected mode 'filesystem'"):
        box.snapshot(mode="full")
    with pytest.raises(SandboxUnavailable, match="needs the overlay backend as root"):
        make_sandbox("overlay-rootless", snapshot="full")


def test_processes_do_not_leave_this_process(box: Sandbox) -> None:
    said(box, "sleep 1000 &")
    snap = box.snapshot(strict=True)
    with pytest.raises(SnapshotNotSupported, match="running processes"):
        snap.pack()
    snap.release()
    snap = box.snapshot(mode="filesystem")
    assert box.unpack(snap.pack()).lossy == ("background: sleep 1000",)
    snap.release()


def test_a_sandbox_that_was_not_made_for_processes(box: Sandbox) -> None:
    said(box, "sleep 1000 & x=1")
    snap = box.snapshot(strict=True)
    with make_sandbox("overlay") as other:
        said(other, "x=2")
        with pytest.raises(SnapshotMismatch, match="found one with running processes"):
            other.restore(snap)
        assert said(other, "echo $x") == "2\n"
        other.restore(snap.files())
        assert said(other, "echo $x $(jobs -p | wc -l)") == "1 0\n"
    snap.release()


def test_a_full_disk_is_noticed_before(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    said(box, "sleep 1000 &")
    with monkeypatch.context() as patch:
        patch.setattr("sandboxgym.sandbox.layers.store.FLOOR", 1 << 60)
        with pytest.raises(SandboxFull):
            box.snapshot(strict=True)
    assert said(box, "jobs -pr | wc -l") == "1\n"
    box.snapshot(strict=True).release()


# Nothing is left


def test_a_released_snapshot_leaves_nothing(box: Sandbox) -> None:
    said(box, "sleep 1000 &")
    snap = box.snapshot(strict=True)
    assert snap.checkpoint is not None
    place = snap.checkpoint.image.path
    other = snap.retain()
    snap.release()
    assert place.exists()
    other.release()
    backend: Any = box.backend
    backend.runtime.settle()
    assert not place.exists()


OWNER = """
import os, sys
os.environ["SANDBOXGYM_CRIU"] = sys.argv[1]
from sandboxgym.sandbox.overlay.runtime import runtime
from sandboxgym.sandbox.sandbox import make_sandbox
box = make_sandbox("overlay", snapshot="full")
box.execute("sleep 1000 & setsid -f sleep 1000", timeout=120)
children = box.fork(2, strict=True, start=True)
snap = box.snapshot(strict=True)
pids = [info.pid for one in (box, *children) for info in one.backend.processes()]
print(runtime().directory, runtime().process.pid, *pids, flush=True)
while True:
    box.snapshot(strict=True).release()
"""
REAP = """
import sandboxgym.sandbox.overlay.runtime
from sandboxgym.system import run_directories
print(len(run_directories.reap()))
"""


def test_nothing_outlives_a_killed_owner(runtime_folder: Path) -> None:
    owner = python(runtime_folder, OWNER, criu.find() or "")
    assert owner.stdout is not None
    line = owner.stdout.readline()
    assert re.match(r"/.* \d+ \d+", line), line + owner.stdout.read()
    directory, *rest = line.split()
    pids = [int(pid) for pid in rest]
    owner.send_signal(signal.SIGKILL)
    owner.wait(LONG)
    owner.stdout.close()
    deadline = time.monotonic() + LONG
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    reaped = python(runtime_folder, REAP)
    out, _ = reaped.communicate(timeout=LONG)
    assert out == "1\n"
    assert not Path(directory).exists()


# Ends whatever appears beside it, and notes what that shows of the machine.
_ENEMY = r"""
import os, sys
mine = {int(name) for name in os.listdir("/proc") if name.isdigit()}
seen = os.open("/tmp/seen", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
open("/tmp/ready", "w").close()
while True:
    for number in [*range(32700, 32768), *range(1, 300)]:
        if number not in mine:
            try:
                os.kill(number, 9)
            except ProcessLookupError:
                continue
            try:
                os.write(seen, open(f"/proc/{number}/mountinfo", "rb").read() or b"-\n")
            except OSError:
                os.write(seen, b"?\n")
"""


@pytest.mark.slow
def test_a_sandbox_can_neither_see_nor_end_what_captures_it(box: Sandbox) -> None:
    box.write_file("/tmp/enemy.py", _ENEMY.encode())
    said(box, "python3 /tmp/enemy.py & " + WAIT % "[ -e /tmp/ready ]")
    for _ in range(5):
        snap = box.snapshot(strict=True)
        assert snap.checkpoint is not None
        box.restore(snap)
        snap.release()
    shown = box.read_file("/tmp/seen").decode()
    host = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    points = {line.split()[4] for line in shown.splitlines() if len(line.split()) > 4}
    assert not {point for point in points & host if point.startswith(("/var", "/home", "/mnt", "/srv", "/sys/kernel"))}


def test_a_captured_sandbox_goes_on_with_read_only_mounts(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 &")
    for one in everywhere(box):
        for attempt in ("chmod 600 /dev/full", "touch /dev/new", f"touch {CONTROL}/mark", "touch /usr/mark"):
            assert "Read-only" in said(one, f"{attempt} 2>&1; true"), attempt
