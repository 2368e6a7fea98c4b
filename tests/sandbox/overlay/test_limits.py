"""Limits of a container: memory, processes, disk; reaching a limit does not affect others."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import pytest
from components import missing
from sandbox.overlay_boxes import Maker, box, make, python, rootless, run, runtime_folder, sh  # noqa: F401 - fixtures

from sandboxgym.sandbox.base import Limits, SandboxFull
from sandboxgym.sandbox.layers import disk
from sandboxgym.sandbox.layers.store import LayerStore
from sandboxgym.sandbox.overlay import cgroups
from sandboxgym.sandbox.overlay.cgroups import Groups, remove_groups, rlimits
from sandboxgym.sandbox.overlay.runtime import runtime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
# ruff: noqa: F811

MIB = 2**20


def _grouped(*controllers: str) -> None:
    groups = runtime().groups
    if groups is None or not groups.parents.keys() >= set(controllers):
        missing("overlay", f"no control groups for {', '.join(controllers)} can be made here")


@pytest.mark.slow
def test_a_memory_bomb_ends_inside(make: Maker) -> None:
    _grouped("memory")
    backend = make(limits=Limits(memory=64 * MIB))
    backend.start()
    assert run(backend, "head -c 500M /dev/zero | tail -c 400M | wc -c")[1].endswith("0")
    code, _ = run(backend, "python3 -c 'x = bytearray(500 * 2**20)'")
    assert code in (1, 137)
    # many small ones, each of which is within any limit of its own
    run(backend, "for i in {1..40}; do python3 -c 'x = b\"x\" * (8 * 2**20); import time; time.sleep(1)' & done; wait")
    assert backend.live
    assert sh(backend, "echo fine") == "fine"


def test_memory_is_limited_for_each_process_where_there_are_no_groups(runtime_folder: Path) -> None:
    program = """
from pathlib import Path
import os
from sandbox.overlay_boxes import make_rootfs, run
from sandboxgym.sandbox.base import Limits
from sandboxgym.sandbox.overlay.backend import OverlayBackend
backend = OverlayBackend(make_rootfs(Path(os.environ["HOME"], "lower")), limits=Limits(memory=200 * 2**20))
backend.start()
print("memory" in backend.capabilities.limits, run(backend, "python3 -c 'x = bytearray(500 * 2**20)' 2>/dev/null")[0])
print(run(backend, "echo fine"))
backend.close()
"""
    if os.geteuid() != 0:
        pytest.skip("takes root to become nobody")
    output, _ = python(runtime_folder, program, nobody=True).communicate(timeout=300)
    assert output == "False 1\n(0, 'fine')\n"


def test_a_fork_bomb_ends_inside(make: Maker) -> None:
    _grouped("pids")
    backend, other = make(limits=Limits(processes=50)), make()
    backend.start()
    other.start()
    bomb = backend.spawn(
        ["bash", "-c", "bomb() { bomb | bomb & }; while :; do bomb; done 2>/dev/null"], env=backend.env
    )
    time.sleep(0.5)
    assert len(backend.processes()) <= 50
    assert sh(other, "echo fine") == "fine"
    with pytest.raises(OSError):
        for _ in range(60):
            backend.spawn(["sleep", "100"], env=backend.env).close()
    tree = backend.commit()
    bomb.close()
    backend.start(tree)
    assert sh(backend, "echo again") == "again"


def test_a_fork_bomb_can_be_killed_and_the_box_goes_on(make: Maker) -> None:
    _grouped("pids")
    backend = make(limits=Limits(processes=50))
    backend.start()
    bomb = backend.spawn(
        ["bash", "-c", "bomb() { bomb | bomb & }; while :; do bomb; done 2>/dev/null"], env=backend.env
    )
    time.sleep(0.3)
    bomb.kill()
    assert bomb.wait(300) == 137
    for _ in range(100):
        backend.kill(info.pid for info in backend.processes())
        if not backend.processes():
            break
    assert sh(backend, "echo fine") == "fine"
    bomb.close()


def test_one_file_never_exceeds_the_disk_limit(make: Maker) -> None:
    backend = make(limits=Limits(disk=4 * MIB))
    backend.start()
    assert run(backend, "head -c 5M /dev/zero > /f")[0] != 0
    assert sh(backend, "stat -c %s /f") == str(4 * MIB)


def test_a_box_that_fills_the_disk_is_ended_and_says_why(make: Maker) -> None:
    backend, other = make(limits=Limits(disk=8 * MIB)), make(limits=Limits(disk=8 * MIB))
    backend.start()
    other.start()
    sh(other, "head -c 1M /dev/zero > /f")
    tree = backend.base()
    run(backend, "for i in {1..10000}; do head -c 1M /dev/zero > /f$i; sleep 0.02; done")
    deadline = time.monotonic() + 300
    while backend.live and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(SandboxFull, match="8,388,608 are allowed"):
        backend.spawn(["true"], env=backend.env)
    with pytest.raises(SandboxFull):
        backend.commit()
    assert sh(other, "stat -c %s /f") == str(MIB)
    backend.start(tree)
    assert sh(backend, "ls / | grep -c f1") == "0"


def test_no_box_is_started_on_a_full_disk(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    monkeypatch.setattr("sandboxgym.sandbox.layers.store.FLOOR", 1 << 62)
    with pytest.raises(SandboxFull, match="SANDBOXGYM_RUNTIME"):
        backend.start()
    assert not backend.live
    monkeypatch.undo()
    monkeypatch.setattr("sandboxgym.sandbox.layers.store.FLOOR_FILES", 1 << 61)
    with pytest.raises(SandboxFull, match="inodes"):
        backend.start()
    monkeypatch.undo()
    backend.start()


def test_groups_go_with_their_boxes(make: Maker) -> None:
    groups = runtime().groups
    if groups is None:
        missing("overlay", "no control groups can be made here")
    made = [make() for _ in range(5)]
    for backend in made:
        backend.start()
    used = [path for backend in made for path in backend.container.group.paths]  # type: ignore[union-attr]
    assert all(os.path.isdir(path) for path in used)
    for backend in made:
        backend.close()
    runtime().settle()
    deadline = time.monotonic() + 300
    while any(os.path.exists(path) for path in used) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(os.path.exists(path) for path in used)


def test_groups_with_processes_are_removed_too(tmp_path: Path) -> None:
    groups = Groups.make(f"sandboxgym-test-{os.getpid()}")
    if groups is None:
        missing("overlay", "no control groups can be made here")
    group = groups.new()
    pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {})
    for path in group.paths:
        Path(path, "cgroup.procs").write_text(str(pid))
    if group.freeze():
        pass  # a frozen process dies only when it is thawed
    remove_groups(groups.paths)
    assert os.waitpid(pid, 0)[1] == 9
    remove_groups(groups.paths)
    assert not any(os.path.exists(path) for path in groups.paths)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "expected"),
    [
        ("0::/\n", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", [(["memory", "pids", "freezer"], "", True)]),
        (
            "0::/user.slice/a.scope\n",
            "30 1 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 none rw,nsdelegate",
            [(["memory", "pids", "freezer"], "user.slice/a.scope", True)],
        ),
        (
            "4:memory:/docker/1\n2:cpu,pids:/docker/1\n0::/\n",
            "30 1 0:26 /docker/1 /sys/fs/cgroup/memory rw - cgroup none rw,memory\n"
            "31 1 0:27 /docker/1 /sys/fs/cgroup/pids rw - cgroup none rw,cpu,pids\n"
            "32 1 0:28 / /sys/fs/cgroup/unified rw - cgroup2 none rw",
            [(["memory"], "memory", False), (["pids"], "pids", False), (["freezer"], "unified", True)],
        ),
    ],
)
def test_the_groups_of_this_process_are_found(
    cgroup: str, mounts: str, expected: list[tuple[list[str], str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"/proc/self/cgroup": cgroup, "/proc/self/mountinfo": mounts}
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files[str(path)])
    found = cgroups._hierarchies()
    assert found == [(names, Path("/sys/fs/cgroup", place), unified) for names, place, unified in expected]


def test_what_no_group_holds_is_limited_per_process() -> None:
    wanted = Limits(memory=100, processes=10, disk=1000)
    counted = dict(cgroups._COUNTED_BY_USER)
    assert dict(rlimits(wanted, grouped=frozenset())) == {
        **counted,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 1000,
        resource.RLIMIT_AS: 100,
        resource.RLIMIT_NPROC: 11,
    }
    grouped = dict(rlimits(wanted, grouped=frozenset({"memory", "pids", "freezer"})))
    assert grouped == {**counted, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 1000}


@pytest.mark.slow
def test_hostile_directories_are_counted_and_deleted(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (top / "file").write_bytes(bytes(100_000))
    os.link(top / "file", top / "again")
    (top / "link").symlink_to("/usr")
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(3000):  # a path of 30,000 characters
        os.mkdir("directory", dir_fd=descriptor)
        deeper = os.open("directory", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = deeper
    os.close(descriptor)
    closed = top / "closed"
    closed.mkdir()
    (closed / "inside").touch()
    closed.chmod(0)
    assert 100_000 <= disk.usage(str(top)) < 200_000 + 4096 * 3010  # all of the directories, at any depth
    disk.remove_directories([str(top), str(tmp_path / "not there")])
    assert not top.exists()
    assert os.path.isdir("/usr/bin")


def test_a_hostile_layer_is_deleted_without_privileges(runtime_folder: Path) -> None:
    program = """
import os
from pathlib import Path
from sandboxgym.sandbox.layers import disk
top = Path(os.environ["HOME"], "top")
(top / "a/b").mkdir(parents=True)
(top / "a/b/c").touch()
(top / "a/b").chmod(0)
(top / "work").mkdir(mode=0)
disk.remove_directories([str(top)])
print(top.exists())
"""
    if os.geteuid() != 0:
        pytest.skip("takes root to become nobody")
    output, _ = python(runtime_folder, program, nobody=True).communicate(timeout=300)
    assert output == "False\n"


def test_the_store_has_a_floor(tmp_path: Path) -> None:
    store = LayerStore(tmp_path, remove=lambda paths: None)
    store.check_room()
