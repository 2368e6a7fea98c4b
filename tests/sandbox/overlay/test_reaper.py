"""Nothing is left of sandboxes whose owner, zygote or init was killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox.overlay_boxes import Maker, box, make, python, rootless, runtime_folder, sh  # noqa: F401 - fixtures

from sandboxgym.sandbox.base import SandboxClosed, SandboxUnavailable
from sandboxgym.sandbox.overlay import reaper
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.overlay.runtime import runtime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
# ruff: noqa: F811

OWNER = """
import json, os, sys, time
from pathlib import Path
from sandbox.overlay_boxes import make_rootfs, sh
from sandboxgym.sandbox.overlay.runtime import runtime
from sandboxgym.sandbox.overlay.backend import OverlayBackend
rootfs = make_rootfs(Path(os.environ["HOME"], f"lower-{os.getpid()}"))
backends = [OverlayBackend(rootfs, rootless=sys.argv[1] == "rootless") for _ in range(3)]
for backend in backends:
    backend.start()
    command = "setsid sleep 1000 & sleep 1000 & mkdir -p " + "deep/" * 500 + "; sleep 1000"
    backend.spawn(["bash", "-c", command], env=backend.env)
groups = runtime().groups
pids = [runtime().process.pid, *(backend.container.pid for backend in backends)]
print(json.dumps({
    "processes": [(pid, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) for pid in pids],
    "zygote": runtime().process.pid,
    "run": str(runtime().directory),
    "groups": groups.paths if groups else [],
}), flush=True)
trees = []
while True:
    sh(backends[0], f"echo {len(trees)} > /f{len(trees) % 7}; head -c 100K /dev/zero > /z")
    trees = [*trees[-5:], backends[0].commit(keep_processes=len(trees) % 3 == 0)]
    backends[0].start(trees[-1])
"""
REAP = """
import sandboxgym.sandbox.overlay.runtime
from sandboxgym.system import run_directories
print(len(run_directories.reap()))
"""


def _owner(folder: Path, rootless: bool) -> tuple[subprocess.Popen[str], dict[str, object]]:
    process = python(folder, OWNER, "rootless" if rootless else "root")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("{"), line + process.stdout.read()
    return process, json.loads(line)


Known = tuple[int, bytes]
"""A process by number and start: on a busy machine the number alone soon is somebody else's."""


def _started(pid: int) -> bytes:
    """Time at which a process started, in clock ticks; nothing once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]
    except OSError:
        return b""


def _known(*pids: int) -> set[Known]:
    return {(pid, _started(pid)) for pid in pids}


def _processes_of(zygote: int) -> set[Known]:
    """The zygote and all below it."""
    found, pending = set(), [zygote]
    while pending:
        one = pending.pop()
        found |= _known(one)
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                pending += map(int, path.read_text().split())
            except OSError:
                continue
    return found


def _await_end(processes: set[Known], seconds: float = 300.0) -> None:
    """Wait until none of the processes is there any more; else tell what those that are left do."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid, started in processes if _started(pid) == started != b""]:
        assert time.monotonic() < deadline, [_described(pid) for pid in left]
        time.sleep(0.01)


def _described(pid: int) -> dict[str, str]:
    found = {}
    for name in ("cmdline", "status", "wchan", "stack", "cgroup"):
        try:
            found[name] = Path(f"/proc/{pid}", name).read_text(errors="replace").replace("\0", " ")
        except OSError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_left_of_a_killed_owner(runtime_folder: Path, rootless: bool, seed: int) -> None:
    process, record = _owner(runtime_folder, rootless)
    time.sleep(random.Random(seed).random())
    pids = _processes_of(int(str(record["zygote"])))
    assert len(pids) > 4
    process.kill()
    process.communicate()
    _await_end(pids)
    assert Path(str(record["run"])).exists()
    reaped, _ = python(runtime_folder, REAP).communicate(timeout=300)
    assert reaped == "1\n"
    assert not Path(str(record["run"])).exists()
    assert isinstance(record["groups"], list)
    assert not any(os.path.exists(path) for path in record["groups"])
    assert str(runtime_folder) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.slow
def test_the_next_start_reaps(runtime_folder: Path, rootless: bool) -> None:
    process, record = _owner(runtime_folder, rootless)
    process.kill()
    process.communicate()
    second, later = _owner(runtime_folder, rootless)
    assert not Path(str(record["run"])).exists()
    assert Path(str(later["run"])).exists()
    second.kill()
    second.communicate()
    python(runtime_folder, REAP).communicate(timeout=300)
    assert not Path(str(later["run"])).exists()


@pytest.mark.slow
def test_two_processes_reap_at_once_and_spare_a_living_owner(runtime_folder: Path, rootless: bool) -> None:
    living, kept = _owner(runtime_folder, rootless)
    dead = [_owner(runtime_folder, rootless) for _ in range(2)]
    for process, _ in dead:
        process.kill()
        process.communicate()
    racing = [python(runtime_folder, REAP) for _ in range(3)]
    outputs = [process.communicate(timeout=300)[0] for process in racing]
    assert all(output.strip().isdigit() for output in outputs), outputs
    python(runtime_folder, REAP).communicate(timeout=300)
    for _, record in dead:
        assert not Path(str(record["run"])).exists()
    assert living.poll() is None and Path(str(kept["run"])).exists()
    assert all(os.path.exists(f"/proc/{pid}") for pid in (kept["zygote"],))
    living.kill()
    living.communicate()
    python(runtime_folder, REAP).communicate(timeout=300)
    assert not Path(str(kept["run"])).exists()


def test_an_owner_that_exits_leaves_nothing(runtime_folder: Path, rootless: bool) -> None:
    program = OWNER.partition("trees = []")[0]
    process = python(runtime_folder, program, "rootless" if rootless else "root")
    output, _ = process.communicate(timeout=300)
    record = json.loads(output)
    assert not Path(record["run"]).exists()
    assert not any(os.path.exists(path) for path in record["groups"])
    _await_end({(pid, started.encode()) for pid, started in record["processes"]})


@pytest.mark.slow
def test_an_owner_whose_forks_live_on_takes_its_boxes_along(runtime_folder: Path, rootless: bool) -> None:
    program = OWNER.partition("trees = []")[0] + "\nos.fork() or sys.stdin.read()\nos.kill(os.getpid(), 9)"
    process = python(runtime_folder, program, "rootless" if rootless else "root")
    assert process.stdout is not None
    record = json.loads(process.stdout.readline())
    assert process.wait(300) == -signal.SIGKILL  # while the fork waits with copies of all its descriptors
    _await_end({(pid, started.encode()) for pid, started in record["processes"]})
    process.communicate()
    python(runtime_folder, REAP).communicate(timeout=300)
    assert not Path(record["run"]).exists()


def test_a_killed_zygote_takes_its_boxes_along_and_the_owner_goes_on(box: OverlayBackend, make: Maker) -> None:
    sh(box, "echo 1 > /f")
    box.start(box.commit())
    shared = runtime()
    pids = _processes_of(shared.process.pid)
    shared.process.kill()
    _await_end({(pid, started) for pid, started in pids if pid != shared.process.pid})
    shared.process.wait(300)
    with pytest.raises(SandboxClosed):
        sh(box, "true")
    assert not box.live
    box.start()
    assert runtime() is not shared
    assert sh(box, "echo again") == "again"
    fresh = make()
    fresh.start()
    assert sh(fresh, "echo fresh") == "fresh"


def test_trees_survive_a_killed_zygote(box: OverlayBackend) -> None:
    sh(box, "echo 1 > /f")
    tree = box.commit()
    shared = runtime()  # once: asked again after the kill it may be a new one, which never ends
    shared.process.kill()
    shared.process.wait(300)
    box.start(tree)
    assert sh(box, "cat /f") == "1"
    box.start(box.commit())
    assert sh(box, "cat /f") == "1"


def test_a_killed_init_ends_one_box_only(make: Maker) -> None:
    rng = random.Random(0)
    boxes = [make() for _ in range(3)]
    for backend in boxes:
        backend.start()
    for _ in range(20):
        victim = rng.choice(boxes)
        os.kill(victim.container.pid, signal.SIGKILL)  # type: ignore[union-attr]
        with pytest.raises((SandboxClosed, SandboxUnavailable)):
            for _ in range(1000):
                sh(victim, "true")
        assert all(backend.live for backend in boxes if backend is not victim)
        victim.start()
        assert sh(victim, "echo fine") == "fine"


def test_a_start_that_fails_leaves_nothing(make: Maker, tmp_path: Path) -> None:
    backend = make()
    backend.start()
    shared = runtime()
    shared.settle()
    broken = make(rootfs=type(backend.rootfs)("broken", (tmp_path / "not there",)))
    for _ in range(3):
        with pytest.raises(SandboxUnavailable):
            broken.start()
        assert not broken.live
    assert sh(backend, "echo fine") == "fine"
    broken.close()


def test_clearing_can_be_repeated_and_finds_half_done_work(tmp_path: Path) -> None:
    run = tmp_path / "sandbox-1-x"
    (run / "layers/0/files").mkdir(parents=True)
    sleeper = subprocess.Popen(["sleep", "100"])
    reaper.record_zygote(run, sleeper.pid)
    reaper.clear(run)
    assert sleeper.wait(300) == -signal.SIGKILL
    assert not (run / "layers").exists()
    reaper.clear(run)
    other = subprocess.Popen(["sleep", "100"])
    (run / reaper.ZYGOTE).write_text(f"{other.pid} 12345")  # the id was used again since
    (run / "groups").write_text("/sys/fs/cgroup/not/there\n")
    reaper.clear(run)
    assert other.poll() is None
    other.kill()
    other.wait()
