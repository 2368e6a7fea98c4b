"""Processes that cannot be captured while they run, and what is refused, kept or left behind."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from full_sandboxes import COUNTER, GAPS, LONG, REAP, WAIT, Everywhere, Maker, said, typed
from sandbox.overlay_boxes import python

from sandboxgym.errors import SnapshotMismatch, SnapshotNotSupported
from sandboxgym.sandbox.base import CONTROL, SandboxFull, SandboxUnavailable, SnapshotLossy
from sandboxgym.sandbox.checkpoint import capture, criu
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    pytest.mark.usefixtures("criu_found"),
]


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
