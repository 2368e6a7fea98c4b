"""Nothing of the host can be changed or locked from inside, and nothing outlives its sandbox."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from components import missing
from sandbox.overlay_boxes import Maker, make, rootless, run, runtime_folder, sh  # noqa: F401

from sandboxgym.sandbox.base import CONTROL, Limits, RootFS, SandboxFull, SnapshotLossy
from sandboxgym.sandbox.overlay import ids, kernel, seccomp
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.overlay.mounts import CONTROL_BYTES, NODES, SHELL, WRITABLE
from sandboxgym.sandbox.overlay.runtime import VARIABLE, runtime
from sandboxgym.sandbox.sandbox import make_sandbox

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811

NODE = "/dev/full"


def private(backend: OverlayBackend) -> OverlayBackend:
    if not backend.private:
        missing("overlay", backend.runtime.why_not_private(backend.rootfs) or "these boxes have no ids of their own")
    return backend


def facts(path: str) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_mode, status.st_uid, status.st_gid, status.st_atime_ns, status.st_mtime_ns


@pytest.mark.parametrize(
    "attempt",
    [
        f"chmod 640 {NODE}",
        f"chown 12:34 {NODE}",
        f"touch -d 1999-01-01 {NODE}",
        f'setfattr -n user.mark -v x {NODE} || python3 -c \'import os; os.setxattr("{NODE}", "user.mark", b"")\'',
        f"rm -f {NODE}",
        f"mv {NODE} /dev/other",
        "touch /dev/new",
    ],
)
def test_device_nodes_cannot_be_changed(make: Maker, attempt: str) -> None:
    before = facts(NODE)
    backend = make()
    backend.start()
    code, output = run(backend, attempt)
    assert code != 0 and ("Read-only" in output or "not permitted" in output or "Permission" in output), output
    assert facts(NODE) == before and os.path.exists(NODE) and not os.path.exists("/dev/new")
    assert run(backend, "echo x >/dev/null; head -c 3 /dev/zero | wc -c; head -c 1 /dev/urandom | wc -c") == (0, "3\n1")


def test_locks_inside_are_not_the_hosts(make: Maker) -> None:
    backend = make()
    backend.start()
    holder = backend.spawn(["bash", "-c", "exec 9</usr/bin/env; flock -x 9; echo held; sleep 100"], env=backend.env)
    assert holder.output is not None
    try:
        assert os.read(holder.output, 10) == b"held\n"
        with open("/usr/bin/env", "rb") as file:
            for _ in range(300):  # another process of these tests may have it for a moment; the holder has it for 100 s
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
            else:
                pytest.fail("the lock taken inside is the host's")
            other = make()
            other.start()
            assert run(other, "exec 9</usr/bin/env; flock -xn 9 && echo free") == (0, "free")
    finally:
        holder.kill()
        holder.close()


def test_a_file_of_the_host_cannot_be_written_to(make: Maker) -> None:
    backend = make()
    backend.start()
    for attempt in ("echo x >>/usr/bin/env", "chmod 777 /usr/bin/env", "touch /usr/bin/env", "touch /usr/new"):
        code, output = run(backend, attempt)
        assert code != 0 and "Read-only" in output
    assert sh(backend, "cmp /usr/bin/env /usr/bin/env && stat -c %u /usr/bin/env") == "0"


def test_root_inside_is_nobody_outside(make: Maker, rootless: bool) -> None:
    if rootless:
        pytest.skip("without root there is one id")
    backend, other = private(make()), make()
    backend.start()
    other.start()
    assert backend.capabilities.private_ids
    bases = []
    for one in (backend, other):
        process = one.spawn(["sleep", "100"], env=one.env)
        uids = Path(f"/proc/{process.pid}/status").read_text().partition("Uid:\t")[2].split()[:4]
        assert len(set(uids)) == 1
        bases.append(int(uids[0]))
        process.kill()
        process.close()
    assert len(set(bases)) == 2
    assert all(base >= ids.FIRST and (base - ids.FIRST) % ids.SIZE == 0 for base in bases)
    assert sh(backend, "id -u; touch /old/own; chown 1000:7 /old/own; stat -c %u:%g /old/own; cat /old/file") == (
        "0\n1000:7\nfrom below"
    )
    assert backend.container is not None
    on_disk = os.stat(backend.container.layer.files / "old/own")
    assert (on_disk.st_uid, on_disk.st_gid) == (1000, 7)


def test_what_the_owner_writes_belongs_to_root_inside(make: Maker) -> None:
    backend = make()
    backend.start()
    backend.write_file("/new/place/file", b"text", mode=0o640)
    assert sh(backend, "stat -c '%u %g %a' /new /new/place/file") == "0 0 755\n0 0 640"
    after = Path("/proc/thread-self/status").read_text()
    assert set(after.partition("Uid:\t")[2].split()[:4]) == {str(os.geteuid())}


def test_low_ports_can_be_bound(make: Maker) -> None:
    backend = make()
    backend.start()
    program = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 80)); print('bound')"
    assert sh(backend, f'python3 -c "{program}"') == "bound"


def test_ids_are_claimed_by_one_at_a_time() -> None:
    if os.geteuid() != 0:
        missing("overlay", "root alone gives out ids")
    for _ in range(100):
        first, holder = ids.claim(17)
        second, other = ids.claim((first - ids.FIRST) // ids.SIZE)
        assert first != second
        holder.close()
        other.close()
        third, again = ids.claim((first - ids.FIRST) // ids.SIZE)
        again.close()
        if third == first:
            break
    else:  # another process may claim them once in between
        pytest.fail("what was given back is not given out again")


def test_without_ids_of_its_own_a_sandbox_says_so(make: Maker, rootless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rootless:
        pytest.skip("without root there is one id")
    monkeypatch.setenv(VARIABLE, "0")
    backend = make()
    backend.start()
    assert not backend.capabilities.private_ids
    assert any(VARIABLE in note for note in backend.capabilities.notes)
    assert sh(backend, "id -u; xargs </proc/self/uid_map") == "0\n0 0 4294967295"
    assert "Read-only" in run(backend, f"chmod 600 {NODE}")[1]


def test_a_root_file_system_whose_ids_cannot_be_mapped_goes_without(
    tmp_path: Path, make: Maker, rootless: bool
) -> None:
    if rootless:
        pytest.skip("without root there is one id")
    private(make())
    reason = runtime().why_not_private(RootFS("odd", (Path("/proc/sys"),)))
    assert "/proc/sys" in reason and "mapped" in reason


# The control directory


def test_the_control_directory_can_only_be_written_to_by_the_shell(make: Maker) -> None:
    backend = make()
    backend.start()
    names = [f"{CONTROL}/mark", f"{CONTROL}/{SHELL}/mark"]
    for attempt in [*(f"touch {name}" for name in names), f"mkdir {CONTROL}/d", f"rm -r {CONTROL}/{SHELL}"]:
        code, output = run(backend, attempt)
        assert code != 0 and ("Read-only" in output or "Permission" in output), output
    for name in WRITABLE:
        assert run(backend, f"rm -f {CONTROL}/{SHELL}/{name}; mv {CONTROL}/{SHELL}/{name} /tmp")[0] != 0
        assert run(backend, f"echo x >{CONTROL}/{SHELL}/{name}")[0] == 0


def test_nothing_in_the_control_directory_outlives_a_start(make: Maker) -> None:
    backend = make()
    backend.start()
    (backend.control / "mark").write_text("of another life")
    run(backend, f"echo mark >{CONTROL}/{SHELL}/state.0")
    tree = backend.commit()
    backend.start(tree)
    assert sh(backend, f"ls {CONTROL}; cat {CONTROL}/{SHELL}/state.0") == SHELL
    tree.release()


def test_the_control_directory_holds_little(make: Maker) -> None:
    backend = make()
    backend.start()
    code, output = run(backend, f"head -c {CONTROL_BYTES * 2} /dev/zero >{CONTROL}/{SHELL}/state.0")
    assert code != 0 and "No space" in output
    assert (backend.control / SHELL / "state.0").stat().st_size <= CONTROL_BYTES


@pytest.mark.parametrize("name", ["overlay", "overlay-rootless", "copy"])
def test_marks_do_not_survive_a_restore(name: str) -> None:
    if name == "overlay" and os.geteuid() != 0:
        missing("overlay", "this backend needs root")
    with make_sandbox(name, allow_unsafe=True) as box:
        clean = box.execute("true") and box.snapshot()
        box.execute(
            f"for d in {box.backend.control_inside} {box.backend.control_inside}/shell.*; do touch $d/mark; done"
        )
        box.restore(clean)
        found = box.execute(f"find {box.backend.control_inside} -name mark")
        assert found.output == ""


# What the kernel counts by user, or for the machine


PROBE = """
import ctypes, errno, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    done = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return "done" if done >= 0 else os.strerror(ctypes.get_errno()).replace(" ", "-")
x86 = os.uname().machine == "x86_64"
file = os.open("/tmp/file", os.O_RDWR | os.O_CREAT)
os.write(file, bytes(100000))
allocate = 285 if x86 else 47
print(*(call(allocate, file, mode, 0, 65536) for mode in (0, 1, 0x10, 0x20, 0x40, 3, 8)))
print(call(206 if x86 else 0, 128, 0), call(%d), call(1000))
print(*(resource.getrlimit(which)[1] for which in (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE)))
os.posix_fallocate(file, 0, 200000)
print(os.stat(file).st_size)
"""


def test_what_passes_a_limit_at_once_is_closed(make: Maker) -> None:
    backend = make()
    backend.start()
    backend.write_file("/tmp/probe.py", (PROBE % (seccomp.NEWEST + 1)).encode())
    allocated, others, limits, size = sh(backend, "python3 /tmp/probe.py").splitlines()
    assert allocated.split()[:5] == ["Operation-not-supported"] * 5
    assert allocated.split()[5] == "done"  # holes; the last, taking a piece out, is up to the file system
    assert others.split() == ["Function-not-implemented"] * 3
    assert all(int(value) <= limit for value, limit in zip(limits.split(), (4096, 1 << 20), strict=True))
    assert size == "200000"


INSTANCES = """
import ctypes
libc = ctypes.CDLL(None)
found = 0
while found < 200 and libc.inotify_init1(0) >= 0:
    found += 1
print(found, flush=True)
input()
"""


def test_watches_of_one_sandbox_are_no_others(make: Maker, rootless: bool) -> None:
    if rootless:
        pytest.skip("without root there is one id")
    backend = private(make())
    backend.start()
    backend.write_file("/tmp/watch.py", INSTANCES.encode())
    read, write = os.pipe()
    greedy = backend.spawn(["python3", "/tmp/watch.py"], env=backend.env, stdin=read)
    os.close(read)
    assert greedy.output is not None
    try:
        taken = int(os.read(greedy.output, 10))
        assert 0 < taken < 200
        program = "import ctypes; print(ctypes.CDLL(None).inotify_init1(0) >= 0)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout == "True\n"
        other = make()
        other.start()
        assert sh(other, f'python3 -c "{program}"') == "True"
    finally:
        os.close(write)
        greedy.kill()
        greedy.close()


def test_all_of_a_threads_files_are_its_own_again(make: Maker, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        missing("overlay", "files of others are made by root only")
    with pytest.raises(RuntimeError):
        kernel.act_on_files_as(ids.FIRST)
        try:
            (tmp_path / "theirs").touch()
            raise RuntimeError
        finally:
            kernel.act_on_files_as(0)
    (tmp_path / "mine").touch()
    assert ((tmp_path / "theirs").stat().st_uid, (tmp_path / "mine").stat().st_uid) == (ids.FIRST, 0)
    assert NODES["full"] == (os.major(os.stat(NODE).st_rdev), os.minor(os.stat(NODE).st_rdev))


def test_the_control_directory_cannot_be_moved_away(make: Maker, rootless: bool) -> None:
    backend = make()
    backend.start()
    assert run(backend, "mv /run /run2")[0] != 0
    assert sh(backend, f"ls {CONTROL}") == SHELL


def test_other_users_inside_cannot_reach_the_shells_files(make: Maker, rootless: bool) -> None:
    if rootless:
        pytest.skip("without root there is one user")
    backend = make()
    backend.start()
    program = f"import os; os.setgroups([]); os.setuid(1000); open('{CONTROL}/{SHELL}/state.0', 'r+')"
    assert "PermissionError" in run(backend, f'python3 -c "{program}"')[1]


@pytest.mark.parametrize("name", ["overlay", "overlay-rootless"])
def test_an_unreadable_state_of_the_shell_prevents_no_snapshot(name: str) -> None:
    if name == "overlay" and os.geteuid() != 0:
        missing("overlay", "this backend needs root")
    with make_sandbox(name) as box:
        box.execute("kept=1; echo file >/tmp/file")
        box.shell_state()
        box.execute("for i in {1..300000}; do a[i]=$i; done")
        with pytest.raises(SnapshotLossy, match="what changed in the shell"):
            box.snapshot(strict=True)
        snap = box.snapshot()
        assert any("what changed in the shell" in item for item in snap.lossy)
        box.restore(snap)
        assert box.execute("cat /tmp/file; echo $kept").output == "file\n1\n"
        snap.release()


def test_what_the_owner_writes_is_held_to_the_disk_limit(make: Maker) -> None:
    backend = make(limits=Limits(disk=1 << 20))
    backend.start()
    with pytest.raises(SandboxFull, match=r"Limits\.disk"):
        backend.write_file("/tmp/big", bytes(2 << 20))
    assert run(backend, "ls /tmp/big")[0] != 0
