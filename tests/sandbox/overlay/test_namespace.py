"""Overlay containers: what they hide, forbid and keep, and how they end."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox.overlay_boxes import (  # noqa: F401 - fixtures
    Maker,
    box,
    make,
    make_rootfs,
    python,
    rootless,
    run,
    runtime_folder,
    sh,
)

import sandboxgym
from sandboxgym.errors import SnapshotMismatch
from sandboxgym.sandbox.base import CONTROL, Backend, FileTree, Limits, SandboxClosed
from sandboxgym.sandbox.overlay import ipc, kernel, seccomp
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.overlay.runtime import runtime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811


def test_it_is_what_the_protocol_says(box: OverlayBackend) -> None:
    backend: Backend = box
    tree: FileTree = box.base()
    assert isinstance(tree, FileTree)
    assert backend.live
    assert box.capabilities.isolated
    assert box.capabilities.snapshot_cost == "constant"


# What a box sees


def test_nothing_of_the_host_is_visible(box: OverlayBackend, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    hidden = [tmp_path, tmp_path / "secret", runtime().directory, Path(sandboxgym.__file__).parent]
    hidden += [Path(path) for path in ("/var/run/docker.sock", "/run/docker.sock", "/sys/fs", "/home", "/boot", "/mnt")]
    for path in hidden:
        assert run(box, f"test -e {path}")[0] == 1, path
    assert sh(box, "ls /").split() == sorted(
        ["bin", "dev", "etc", "lib", "lib64", "old", "proc", "root", "run", "sbin", "sys", "tmp", "usr"]
        + [name for name in ("lib32",) if os.path.islink(f"/{name}")]
    )
    for empty in ("/sys", "/root", "/tmp", "/dev/shm"):
        assert sh(box, f"ls -A {empty}") == ""
    assert sh(box, "ls -A /run") == CONTROL.rpartition("/")[2]
    assert "secret" not in sh(box, "env; cat /proc/1/cmdline | tr '\\0' ' '")


def test_the_host_s_processes_are_out_of_sight_and_reach(box: OverlayBackend, make: Maker) -> None:
    other = make()
    other.start()
    victim = other.spawn(["sleep", "100"], env=other.env)
    host = subprocess.Popen(["sleep", "100"])
    assert set(sh(box, "echo /proc/[0-9]*; true").split()) <= {f"/proc/{pid}" for pid in range(1, 10)}
    for pid in (host.pid, victim.pid, os.getpid()):
        assert run(box, f"kill -9 {pid}")[0] == 1
    run(box, "kill -9 -1")
    assert host.poll() is None
    assert victim.wait(0.1) is None
    host.kill()
    host.wait()
    victim.close()
    assert sh(box, "ls /proc/*/fd/ >/dev/null 2>&1; echo still here") == "still here"


def test_the_init_cannot_be_killed_looked_into_or_traced(box: OverlayBackend) -> None:
    for command in (
        "cat /proc/1/environ",
        "cat /proc/1/maps",
        "cat /proc/1/mem",
        "ls /proc/1/root/",
        "ls /proc/1/cwd/",
        "readlink /proc/1/fd/3",
        "readlink /proc/1/exe",
        "cat /proc/1/fd/3",
        "exec 9<>/proc/1/fd/3",
        python_inside("ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 or exit(1)"),
    ):
        assert run(box, command)[0] != 0, command
    run(box, "kill -9 1; kill -TERM 1; kill -STOP 1")
    assert box.live
    assert sh(box, "echo here") == "here"


def python_inside(code: str) -> str:
    return f"python3 -c 'import ctypes, os, socket, errno, sys\n{code}'"


def test_privileges_cannot_be_raised(box: OverlayBackend) -> None:
    status = dict(line.split(":\t", 1) for line in sh(box, "cat /proc/self/status").splitlines() if ":\t" in line)
    allowed = sum(1 << number for number in kernel.CAPABILITIES.values())
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert int(status[name], 16) == allowed
    for name in ("CapInh", "CapAmb"):
        assert int(status[name], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for command in (
        "mount -t tmpfs none /tmp",
        "mount --bind /tmp /root",
        "umount /proc",
        "umount /usr",
        "umount /proc/sys",
        "unshare -m true",
        "unshare -U true",
        "unshare -r true",
        "nsenter -t 1 -m true",
        "hostname other",
        "mknod /tmp/disk b 254 0",
        "mknod /tmp/memory c 1 1",
        "chroot / mount -t tmpfs none /tmp",
        "touch /usr/new",
        "rm /usr/bin/true",
        "chattr +i /etc/passwd",
        "echo 1 > /proc/sys/kernel/panic",
        "echo b > /proc/sysrq-trigger",
        "echo 1 > /proc/sys/vm/drop_caches",
        "echo -1000 > /proc/self/oom_score_adj",
        "test -s /proc/kcore || test -s /proc/keys || test -s /proc/kmsg",
        "ls /sys/fs/cgroup",
        "dmesg",
        "ip link add dummy0 type dummy",
    ):
        assert run(box, command)[0] != 0, command


def test_calls_that_reach_past_a_container_are_refused(box: OverlayBackend) -> None:
    numbers = [pair[0] for pair in seccomp._REFUSED.values() if pair[0] is not None]
    if os.uname().machine == "aarch64":
        numbers = [pair[1] for pair in seccomp._REFUSED.values() if pair[1] is not None]
    code = f"""
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    assert libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM, number
assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS
for family in (socket.AF_VSOCK, socket.AF_PACKET, 38):
    try:
        socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        assert error.errno == errno.EAFNOSUPPORT, error
    else:
        raise SystemExit(family)
try:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
except PermissionError:
    pass
else:
    raise SystemExit("raw")
os.fork() or os._exit(0)
os.wait()
"""
    assert run(box, python_inside(code)) == (0, "")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_well_formed_for_both_machines(machine: str) -> None:
    code = seccomp.program(machine)
    number = len(code) // 8
    assert len(code) % 8 == 0 and number < 4096
    for at in range(number):
        operation, yes, no = int.from_bytes(code[8 * at : 8 * at + 2], "little"), code[8 * at + 2], code[8 * at + 3]
        if operation & 7 == 5:
            assert at + 1 + max(yes, no) < number


def test_the_network_is_a_loopback_device_unless_asked_for(make: Maker) -> None:
    alone, connected = make(), make(network=True)
    alone.start()
    connected.start()
    listing = "import socket; print(*(name for _, name in socket.if_nameindex()))"
    assert sh(alone, f"python3 -c '{listing}'") == "lo"
    assert sh(connected, "readlink /proc/self/ns/net") == os.readlink("/proc/self/ns/net")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run(alone, f"exec 3<>/dev/tcp/127.0.0.1/{port}")[0] == 1
        assert run(connected, f"exec 3<>/dev/tcp/127.0.0.1/{port}")[0] == 0
    answer = 'a = socket.create_server(("127.0.0.1", 0)); socket.create_connection(a.getsockname()); print(1)'
    assert sh(alone, python_inside(answer)) == "1"


# Processes


def test_a_process_gets_what_it_is_given_and_no_more(box: OverlayBackend) -> None:
    process = box.spawn(["env"], env={"PATH": "/usr/bin", "A": "b\nc"}, cwd="/old")
    assert process.output is not None and process.terminal is None
    assert os.read(process.output, 1000) == b"PATH=/usr/bin\nA=b\nc\n"
    assert process.wait(300) == 0
    process.close()
    assert sh(box, "pwd; umask; ls /proc/self/fd", cwd="/old").split() == ["/old", "0022", "0", "1", "2", "3"]
    assert sh(box, "trap", cwd="/") == ""
    read, write = os.pipe()
    os.write(write, b"typed")
    os.close(write)
    assert sh(box, "cat", stdin=read) == "typed"
    os.close(read)
    assert sh(box, "cat") == ""


def test_exit_statuses_are_those_of_a_shell(box: OverlayBackend) -> None:
    assert run(box, "exit 3")[0] == 3
    assert run(box, "kill -9 $$")[0] == 137
    assert run(box, "kill -TERM $$")[0] == 143
    with pytest.raises(FileNotFoundError, match="nosuch"):
        box.spawn(["nosuch"], env=box.env)
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        box.spawn(["true"], env=box.env, cwd="/nowhere")
    with pytest.raises(PermissionError):
        box.spawn(["/etc/passwd"], env=box.env)
    with pytest.raises(ValueError, match="absolute"):
        box.spawn(["true"], env=box.env, cwd="etc")
    assert sh(box, "echo fine") == "fine"


def test_large_arguments_environments_and_outputs(box: OverlayBackend) -> None:
    long = "x" * 100_000
    assert sh(box, f"echo {long} | wc -c; echo ${{#BIG}}").split() == ["100001", "0"]
    process = box.spawn(["bash", "-c", "echo ${#B1} ${#B7}"], env={**box.env, **{f"B{i}": long for i in range(8)}})
    assert process.output is not None
    assert os.read(process.output, 100) == b"100000 100000\n"
    process.close()
    assert len(sh(box, "head -c 3000000 /dev/zero | tr '\\0' y")) == 3_000_000


def test_a_terminal_controls_its_session(box: OverlayBackend) -> None:
    process = box.spawn(["bash", "--norc", "-i"], env={**box.env, "PS1": "> "}, terminal=True)
    assert process.terminal is not None and process.output is None

    def answer(text: bytes, expected: bytes) -> None:
        assert process.terminal is not None
        os.write(process.terminal, text)
        seen = b""
        deadline = time.monotonic() + 300
        while expected not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([process.terminal], [], [], 0.1)[0]:
                seen += os.read(process.terminal, 4096)

    answer(b"tty; stty size\n", b"/dev/pts/0\r\n50 200\r\n")
    os.write(process.terminal, b"sleep 100\n")
    _until(lambda: any(info.command == "sleep 100" for info in box.processes()))
    answer(b"\x03", b"> ")
    answer(b"echo $?\n", b"130\r\n")
    os.write(process.terminal, b"exit 4\n")
    assert process.wait(300) == 4
    process.close()


def test_what_a_process_started_ends_with_it(box: OverlayBackend) -> None:
    assert sh(box, "sleep 100 > /dev/null & echo started") == "started"
    _until(lambda: box.processes() == [])
    process = box.spawn(["bash", "-c", "sleep 100 & sleep 101 & (sleep 102; true)"], env=box.env)
    _until(lambda: len(box.processes()) == 5)
    assert process.wait(0) is None
    assert process.pid in {info.pid for info in box.processes()}
    process.kill()
    assert process.wait(300) == 137
    process.kill()
    process.close()
    process.close()
    _until(lambda: box.processes() == [])


def test_processes_are_listed_with_what_they_have_open_and_can_be_killed(box: OverlayBackend) -> None:
    process = box.spawn(["bash", "-c", "exec 7> /tmp/log; setsid sleep 100 & exec sleep 101"], env=box.env)
    # A program that has just been started may still be reading its locale.
    started = {("sleep 100", ("7 -> /tmp/log",)), ("sleep 101", ("7 -> /tmp/log",))}
    _until(lambda: {(info.command, info.descriptors) for info in box.processes()} == started)
    host = subprocess.Popen(["sleep", "100"])
    box.kill([host.pid, *(info.pid for info in box.processes() if info.command == "sleep 100")])
    _until(lambda: len(box.processes()) == 1)
    assert host.poll() is None
    host.kill()
    host.wait()
    assert process.wait(0) is None
    process.close()


def _until(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Trees


FILES = """
set -e
mkdir -p /d/'odd '$'\\n''näme' /d/empty /d/sgid
echo 1 > /d/a; ln /d/a /d/b; ln -s ../old /d/link; mkfifo /d/fifo
truncate -s 50M /d/sparse; echo end >> /d/sparse
chmod 640 /d/a; chmod 2775 /d/sgid; touch -d '2001-02-03 04:05:06.789' /d/empty
python3 -c 'import os; os.setxattr("/d/a", "user.note", b"kept\\0")'
rm /old/file; rmdir /old; mkdir /old; echo new > /old/other
echo shared > /dev/shm/s; echo temporary > /tmp/t
"""
LIST = """
cd /; find d old tmp dev/shm -printf '%p %y %m %U:%G %s %b %n %l %T@\\n' | sort
python3 -c 'import os; print(os.getxattr("/d/a", "user.note"))'
cat d/b old/other dev/shm/s tmp/t; tail -c 4 d/sparse; [ d/a -ef d/b ] && echo same
"""


def test_a_tree_keeps_everything_that_was_written(box: OverlayBackend) -> None:
    assert run(box, FILES) == (0, "")
    if box.capabilities.owners:
        run(box, "chown 1000:100 /d/empty")
    before = sh(box, LIST)
    assert "same" in before and "d/sparse f 644 0:0 52428804" in before
    tree = box.commit()
    assert not box.live
    box.start(tree)
    assert sh(box, LIST) == before
    assert tree.nbytes < 1 << 20


@pytest.mark.parametrize("stopped_by", ["group", "signals"])
def test_processes_go_on_while_they_are_copied(box: OverlayBackend, stopped_by: str) -> None:
    if stopped_by == "signals":
        box.container.group = None  # type: ignore[union-attr]
    run(box, FILES)
    before = sh(box, LIST)
    process = box.spawn(["bash", "-c", "for ((i = 0; ; i++)); do echo $i >> /n; sleep 0.001; done"], env=box.env)
    _until(lambda: run(box, "test -s /n")[0] == 0)
    tree = box.commit(keep_processes=True)
    count = sh(box, "wc -l < /n")
    _until(lambda: sh(box, "wc -l < /n") != count)
    assert process.wait(0) is None
    other = box.sibling()
    other.start(tree)
    assert sh(other, LIST) == before
    lines = sh(other, "cat /n").split("\n")
    assert lines == [str(number) for number in range(len(lines))]
    process.close()
    other.close()


def test_forks_of_a_tree_do_not_see_each_other(make: Maker) -> None:
    parent = make()
    parent.start()
    sh(parent, "mkdir /d; echo parent > /d/f; echo x > /dev/shm/x")
    tree = parent.commit()
    forks = [make() for _ in range(4)]
    for number, fork in enumerate(forks):
        fork.start(tree)
        sh(fork, f"echo {number} >> /d/f; rm -f /dev/shm/x; echo {number} > /tmp/mine-{number}")
    parent.start(tree)
    assert sh(parent, "cat /d/f /dev/shm/x; ls /tmp") == "parent\nx"
    for number, fork in reversed(list(enumerate(forks))):
        assert sh(fork, "cat /d/f; ls /dev/shm /tmp").split() == [
            "parent",
            str(number),
            "/dev/shm:",
            "/tmp:",
            f"mine-{number}",
        ]
        fork.close()
    assert sh(parent, "cat /d/f") == "parent"


def test_a_snapshot_changes_nothing_for_those_who_rename_directories(make: Maker, rootless: bool) -> None:
    backend = make()
    backend.start()
    sh(backend, "mkdir -p /d/e; echo 1 > /d/e/f; sync /d/e/f")
    number = sh(backend, "stat -c '%i %Z' /d/e/f")
    backend.start(backend.commit())
    assert sh(backend, "stat -c '%i %Z' /d/e/f") == number
    code = run(backend, python_inside('os.rename("/d", "/new")'))[0]
    if rootless:
        assert any("EXDEV" in note for note in backend.capabilities.notes)
        assert sh(backend, "mv /d /new; cat /new/e/f; ls -d /d 2>&1 | grep -c cannot") == "1\n1"
    else:
        assert code == 0
    backend.start(backend.commit())
    assert sh(backend, "cat /new/e/f; ls /").split()[0] == "1"
    assert run(backend, "test -e /d")[0] == 1


@pytest.mark.parametrize("steps", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_nested_snapshots_do_not_drift(box: OverlayBackend, steps: int) -> None:
    expected = []
    for step in range(steps):
        sh(box, f"mkdir -p /d/{step}; echo {step} >> /d/all; rm -rf /d/{step - 3}; mv /d/all /d/x; mv /d/x /d/all")
        expected.append(str(step))
        box.start(box.commit())
    assert sh(box, "cat /d/all").split() == expected
    assert set(sh(box, "ls /d").split()) == {"all", *(str(step) for step in range(steps - 3, steps))}


def test_restoring_an_earlier_tree_undoes_all(box: OverlayBackend) -> None:
    sh(box, "echo 1 > /f")
    first = box.commit()
    box.start(first)
    sh(box, "echo 2 > /f; rm -rf /old; echo > /g")
    second = box.commit()
    box.start(first)
    assert sh(box, "cat /f /old/file; ls /g 2>&1 | wc -l") == "1\nfrom below\n1"
    box.start(second)
    assert run(box, "test -e /old")[0] == 1
    box.start()
    assert run(box, "test -e /f")[0] == 1


@pytest.mark.parametrize(
    "damage",
    [
        "rm -rf /[b-t]* 2>/dev/null",
        "mv /run /elsewhere; ln -s /etc /run",
        "mv /run /elsewhere; ln -s loop /run; ln -s run /loop",
        "mv /run /elsewhere; echo > /run",
        "rm -rf /tmp; ln -s /etc /tmp",
        "mv /dev /d 2>/dev/null; rm -rf /tmp; echo > /tmp",
        "chmod 000 / /run /tmp; chown 1000 /run",
    ],
)
def test_a_box_starts_whatever_became_of_its_directories(make: Maker, damage: str, tmp_path: Path) -> None:
    etc = sorted(os.listdir("/etc"))
    backend = make()
    backend.start()
    run(backend, damage)
    tree = backend.commit()
    backend.start(tree)
    (backend.control / "here").write_text("control")
    assert backend.read_file(f"{CONTROL}/here") == b"control"
    with pytest.raises(PermissionError, match="of /proc"):  # it is there, and not what was put in its place
        backend.read_file("/proc/1/comm")
    backend.write_file("/dev/shm/there", b"shared")
    assert sorted(os.listdir("/etc")) == etc


def test_a_layer_is_written_only_once(box: OverlayBackend) -> None:
    sh(box, "echo 1 > /f")
    tree = box.commit()
    content = (tree.layers[0].files / "f").stat()
    box.start(tree)
    sh(box, "echo 2 >> /f; rm /f; echo 3 > /f")
    assert (tree.layers[0].files / "f").stat() == content
    assert (tree.layers[0].files / "f").read_text() == "1\n"
    untouched = box.sibling()
    untouched.start(tree)
    assert untouched.commit().layers == tree.layers  # nothing was written: no new layer


def test_trees_of_something_else_are_refused(make: Maker, tmp_path: Path, rootless: bool) -> None:
    backend, other = make(), make(rootfs=make_rootfs(tmp_path / "other", "other"))
    other.start()
    tree = other.commit()
    with pytest.raises(SnapshotMismatch, match="other"):
        backend.start(tree)
    assert not backend.live


# Files


def test_files_are_read_and_written_inside(box: OverlayBackend) -> None:
    box.write_file("/new/deep/script", b"#!/bin/sh\necho $0\n", mode=0o755)
    assert sh(box, "/new/deep/script; stat -c '%a %u' /new /new/deep/script").split() == [
        "/new/deep/script",
        "755",
        "0",
        "755",
        "0",
    ]
    assert box.read_file("/new/deep/script").startswith(b"#!")
    box.write_file("/new/deep/script", b"short", mode=0o600)
    assert box.read_file("/new/deep/script") == b"short"
    box.write_file("/tmp/bytes", bytes(range(256)) * 1000)
    assert box.read_file("/tmp/bytes") == bytes(range(256)) * 1000
    with pytest.raises(FileNotFoundError):
        box.read_file("/nowhere")
    with pytest.raises(IsADirectoryError):
        box.read_file("/etc")
    sh(box, "mkfifo /fifo")
    with pytest.raises(OSError, match="regular"):
        box.read_file("/fifo")
    with pytest.raises(ValueError, match="absolute"):
        box.read_file("etc/passwd")
    with pytest.raises(OSError):
        box.write_file("/usr/bin/true", b"")


def test_links_do_not_lead_out(box: OverlayBackend, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    sh(box, f"ln -s {secret} /link; ln -s / /top; ln -s ../../../../../../..{secret} /up; ln -s {tmp_path} /folder")
    for path in ("/link", "/up", f"/top{secret}", f"/top/../..{secret}", "/folder/secret"):
        with pytest.raises(OSError):
            box.read_file(path)
    for path in ("/link", "/up", f"/top{secret}", f"/top/../..{secret}", "/folder/secret"):
        with contextlib.suppress(OSError):
            box.write_file(path, b"overwritten")
    assert secret.read_text() == "secret"
    sh(box, "ln -s /etc/passwd /inside")
    assert box.read_file("/inside").startswith(b"root:")


# Ends


def test_an_answer_that_nobody_waited_for_is_not_taken_for_another(box: OverlayBackend) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "receive", lambda channel: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            box.spawn(["echo", "interrupted"], env=box.env)
    with pytest.raises(SandboxClosed):
        box.spawn(["echo", "next"], env=box.env)
    box.start()
    assert sh(box, "echo fine") == "fine"


def test_closing_ends_everything_and_can_be_repeated(make: Maker, rootless: bool) -> None:
    backend = make()
    backend.start()
    layer, groups = backend.container.layer.path, backend.container.group  # type: ignore[union-attr]
    control = backend.control
    process = backend.spawn(["sleep", "100"], env=backend.env)
    pid = process.pid
    backend.close()
    backend.close()
    assert process.wait(300) == 137
    assert not backend.live and not os.path.exists(f"/proc/{pid}")
    runtime().settle()
    assert not layer.exists() and not control.exists()
    assert not any(os.path.exists(path) for path in (groups.paths if groups else ()))
    for use in (lambda: backend.spawn(["true"], env={}), backend.commit, backend.processes, backend.start):
        with pytest.raises(SandboxClosed):
            use()
    process.close()


def test_what_is_forgotten_is_cleared_away(make: Maker, tmp_path: Path, rootless: bool) -> None:
    backend = OverlayBackend(make_rootfs(tmp_path / "forgotten"), rootless=rootless)
    backend.start()
    sh(backend, "echo > /f")
    tree = backend.commit()
    backend.start(tree)
    below, top, pid = tree.layers[0].path, backend.container.layer.path, backend.container.pid  # type: ignore[union-attr]
    del backend, tree
    gc.collect()
    runtime().settle()
    assert not below.exists() and not top.exists() and not os.path.exists(f"/proc/{pid}")


def test_a_box_that_was_killed_from_outside_says_so(box: OverlayBackend) -> None:
    tree = box.base()
    os.kill(box.container.pid, signal.SIGKILL)  # type: ignore[union-attr]
    _until(lambda: not box.live)
    with pytest.raises(SandboxClosed, match="killed from outside"):
        box.spawn(["true"], env=box.env)
    with pytest.raises(SandboxClosed):
        box.commit()
    box.start(tree)
    assert sh(box, "echo again") == "again"


def test_a_released_tree_is_gone_and_its_other_holds_are_not(box: OverlayBackend) -> None:
    sh(box, "echo 1 > /f")
    tree = box.commit()
    kept = tree.retain()
    assert kept.id == tree.id
    tree.release()
    tree.release()
    with pytest.raises(SandboxClosed, match="released"):
        box.start(tree)
    box.start(kept)
    kept.release()
    runtime().settle()
    assert sh(box, "cat /f") == "1"  # the live box holds it too


@pytest.mark.slow
def test_a_fork_of_the_owner_takes_nothing_away(box: OverlayBackend) -> None:
    sh(box, "echo 1 > /f")
    tree = box.commit()
    box.start(tree)
    pid = os.fork()
    if pid == 0:
        try:
            del tree
            box.close()
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.1)
    assert box.live
    assert sh(box, "cat /f") == "1"
    box.start(tree)


WITHOUT_PRIVILEGES = """
from pathlib import Path
from sandbox.overlay_boxes import make_rootfs, run, sh
from sandboxgym.sandbox.base import Limits
from sandboxgym.sandbox.overlay.backend import OverlayBackend
import os, sys
backend = OverlayBackend(make_rootfs(Path(os.environ["HOME"], "lower")), limits=Limits(processes=20))
backend.start()
print(backend.capabilities.name, sh(backend, "id -u; echo 1 > /f; rm -r /old; echo 2 > /tmp/t; echo 3 > /dev/shm/s"))
tree = backend.commit()
twin = backend.sibling()
twin.start(tree)
backend.start(backend.unpack(tree.pack()))
for one in (backend, twin):
    print(sh(one, "cat /f /tmp/t /dev/shm/s; ls / | grep -c old; echo x >> /f; rm /f; mkdir /old; ls /old"))
    print(run(one, "mount -t tmpfs none /tmp || unshare -r true || cat /proc/1/environ")[0] != 0, one.processes())
print(run(twin, "for i in {1..40}; do sleep 5 & done; wait")[1].count("Resource temporarily unavailable") > 0)
twin.close()
print(len(backend.commit(keep_processes=True).layers))
backend.close()
"""


@pytest.mark.slow
def test_an_ordinary_user_can_have_boxes(runtime_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests ran as an ordinary user")
    process = python(runtime_folder, WITHOUT_PRIVILEGES, nobody=True)
    output, _ = process.communicate(timeout=300)
    assert output.split("\n") == [
        "overlay-rootless 0",
        *["1", "2", "3", "0", "True []"] * 2,
        "True",
        "2",
        "",
    ], output
    left = {path.name for path in runtime_folder.iterdir()} - {".lock", ".cache"}  # which is its home directory too
    assert left == {"lower"}


def test_limits_of_a_box_can_be_lifted(make: Maker) -> None:
    backend = make(limits=Limits(memory=None, processes=None, disk=None))
    backend.start()
    assert sh(backend, "ulimit -f; ulimit -v; ulimit -c").split() == ["unlimited", "unlimited", "0"]
