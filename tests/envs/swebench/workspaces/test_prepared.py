"""Prepared tasks on disk: made once per machine, complete or absent, checked for damage, bounded, shared."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from envs.swebench.conftest import check_backend

from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.rows.tasks import Task, TaskError
from sandboxgym.envs.swebench.workspaces import prepared
from sandboxgym.envs.swebench.workspaces import workspace as boxes
from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings, pristine
from sandboxgym.sandbox.base import SandboxUnavailable

ROOT = Path(__file__).parents[4]
TASKS = list(mini.tasks())
CHILD = """
import sys
from sandboxgym.envs.swebench import mini; from sandboxgym.envs.swebench.workspaces import prepared, workspace as boxes
settings, tasks = boxes.WorkspaceSettings(backend={backend!r}, allow_unsafe=True), list(mini.tasks())
def refused(*_):
    raise SystemExit("it is prepared again")
def look(task):
    with settings.box(task) as box:
        box.restore(boxes.pristine(task, settings).snapshot)
        return box.run("cd /testbed && git status --short --branch && git rev-parse HEAD").output.split()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Entries of the test's own; root file systems stay where they are."""
    folder = tmp_path / "prepared"
    monkeypatch.setattr(prepared, "directory", lambda: folder)
    boxes.forget_prepared()
    yield folder
    forget()
    prepared.clear()


def forget() -> None:
    """Give back what this process uses."""
    boxes.forget_prepared()
    gc.collect()


def child(folder: Path, backend: str, code: str, **variables: str) -> subprocess.Popen[str]:
    """Another process with the same entries."""
    head = (
        CHILD.format(backend=backend)
        + f"from pathlib import Path\nprepared.directory = lambda: Path({str(folder)!r})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", head + code]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answered(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return out


def entries(folder: Path) -> list[str]:
    """Names in the cache beside its locks."""
    return sorted(path.name for path in folder.iterdir() if path.name != "locks") if folder.exists() else []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were prepared in this process."""
    names: list[str] = []
    prepare = boxes._prepare

    def counted(box: boxes.RepositoryBox, task: Task, settings: WorkspaceSettings) -> prepared.PreparedState:
        names.append(task.instance_id)
        return prepare(box, task, settings)

    monkeypatch.setattr(boxes, "_prepare", counted)
    return names


@pytest.fixture
def settings(quick_backend: dict[str, Any]) -> WorkspaceSettings:
    return WorkspaceSettings(**quick_backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "docker", "copy"])
def test_another_process_takes_what_was_prepared(
    backend: str, backend_of: Callable[[str], dict[str, Any]], own_cache: Path, made: list[str]
) -> None:
    check_backend(backend)
    settings = WorkspaceSettings(**backend_of(backend))
    code = "boxes._prepare = refused\n" + (f"settings = boxes.WorkspaceSettings(**{backend_of(backend)!r})\n")
    first = pristine(TASKS[0], settings)
    answer = answered(child(own_cache, backend, code + "print(*look(tasks[0]))"))
    assert answer.split() == ["##", "main", TASKS[0].base_commit]
    reference, digest = first.reference, first.digest
    forget()
    again = pristine(TASKS[0], settings)
    assert (again.reference, again.digest) == (reference, digest) and made == [TASKS[0].instance_id]
    with settings.box(TASKS[0]) as box:
        box.restore(again.snapshot)
        assert box.digest() == digest and box.execute("pwd").output.strip().endswith("/testbed")
        # What is written does not reach what others stand on.
        assert box.run("cd /testbed && stat -c %u README.md && rm -r * && echo x > README.md").output.strip() in "0 "
        box.restore(again.snapshot)
        assert box.digest() == digest
        packed = box.sandbox.snapshot().pack()
        taken = box.sandbox.unpack(packed)
        box.restore(taken)
        assert box.digest() == digest
    forget()
    pristine(TASKS[0], settings, verify=True)
    assert len(made) == 1


def test_other_settings_and_other_rows_are_other_entries(
    settings: WorkspaceSettings, own_cache: Path, made: list[str]
) -> None:
    pristine(TASKS[0], settings)
    pristine(TASKS[0], replace(settings, env=(("A", "b"),)))
    pristine(replace(TASKS[0], problem_statement="another"), settings)
    pristine(TASKS[0], replace(settings, limits=replace(settings.limits, seconds=50.0)))
    assert len(made) == 3 and len(entries(own_cache)) == 3


def test_two_processes_prepare_a_task_once(own_cache: Path, settings: WorkspaceSettings) -> None:
    code = """
prepare = boxes._prepare
def counted(*arguments):
    print("prepares", flush=True)
    return prepare(*arguments)
boxes._prepare = counted
settings.box(tasks[1]).close()
print("ready", flush=True)
sys.stdin.readline()
print(look(tasks[1])[-1], flush=True)
"""
    backend = "copy" if settings.backend == "auto" and os.geteuid() else "auto"
    both = [child(own_cache, backend, code) for _ in range(2)]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    words = [answered(process).split() for process in both]
    assert sorted(map(len, words)) == [1, 2] and all(found[-1] == TASKS[1].base_commit for found in words)
    assert len(entries(own_cache)) == 1


@pytest.mark.parametrize("moment", ["_prepare", "_save", "_read"])
def test_a_killed_preparer_leaves_nothing_half_made(
    moment: str, own_cache: Path, settings: WorkspaceSettings, made: list[str]
) -> None:
    code = f"""
import time
def stop(*arguments, **options):
    print("there", flush=True)
    time.sleep(1000)
if {moment!r} == "_prepare":
    boxes._prepare = stop
elif {moment!r} == "_save":
    prepared._listing = stop  # files are written, and not in their place
else:
    load = prepared._load
    prepared._load = lambda place, *rest, **more: stop() if place.exists() else load(place, *rest, **more)
look(tasks[0])
"""
    process = child(own_cache, "auto", code)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert any(name.startswith(".partial-") for name in entries(own_cache)) == (moment == "_save")
    pristine(TASKS[1], settings)  # another entry: what was begun is cleared all the same
    assert not any(name.startswith(".") for name in entries(own_cache))
    assert len(entries(own_cache)) == 1 + (moment == "_read")
    pristine(TASKS[0], settings)
    assert len(made) == 2 - (moment == "_read")


def damage_file(entry: Path, *, keep_times: bool) -> None:
    readme = next(entry.glob("layers/0/files/testbed/README.md"))
    status, content = readme.stat(), readme.read_bytes()
    readme.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    if keep_times:
        os.utime(readme, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a file is changed": lambda entry: damage_file(entry, keep_times=False),
    "a file is gone": lambda entry: next(entry.glob("layers/0/files/testbed/README.md")).unlink(),
    "its description is cut": lambda entry: os.truncate(entry / "about", 100),
    "its description is gone": lambda entry: (entry / "about").unlink(),
    "its layer is gone": lambda entry: (entry / "layers").rename(entry / "other"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(
    damage: str, settings: WorkspaceSettings, own_cache: Path, made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    check_backend("overlay" if os.geteuid() == 0 else "overlay-rootless")
    digest = pristine(TASKS[0], settings).digest
    (name,) = entries(own_cache)
    forget()
    DAMAGES[damage](own_cache / name)
    with caplog.at_level(logging.WARNING, "sandboxgym"):
        assert pristine(TASKS[0], settings).digest == digest
    assert len(made) == 2 and entries(own_cache) == [name]
    (said,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert name in said
    forget()
    caplog.clear()
    pristine(TASKS[0], settings, verify=True)
    assert len(made) == 2 and not caplog.records


def test_contents_are_compared_after_a_boot_and_when_asked(
    settings: WorkspaceSettings, own_cache: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_backend("overlay" if os.geteuid() == 0 else "overlay-rootless")
    pristine(TASKS[0], settings)
    (name,) = entries(own_cache)
    forget()
    damage_file(own_cache / name, keep_times=True)
    pristine(TASKS[0], settings, verify=True)
    assert len(made) == 2
    forget()
    damage_file(own_cache / name, keep_times=True)
    monkeypatch.setattr(prepared, "_boot", lambda: "another boot")
    pristine(TASKS[0], settings)
    assert len(made) == 3


def test_what_was_not_used_for_longest_goes_but_not_what_is_used(
    settings: WorkspaceSettings, own_cache: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [replace(TASKS[0], problem_statement=f"{number}") for number in range(4)]  # of one size
    names: list[str] = []
    for row in rows[:3]:
        pristine(row, settings)
        names += [name for name in entries(own_cache) if name not in names]
    kept = pristine(rows[0], settings).snapshot.retain()
    forget()
    for age, name in enumerate(names):
        os.utime(own_cache / name / "used", (1000 + age, 1000 + age))
    present = prepared.listed()
    assert [entry.path.name for entry in present] == names
    monkeypatch.setenv(prepared.VARIABLE, str(sum(entry.nbytes for entry in present) * 7 / 6 / 1e9))
    pristine(rows[3], settings)
    left = entries(own_cache)
    with settings.box(rows[0]) as box:
        box.restore(kept)
        assert box.run("cd /testbed && git rev-parse HEAD").output.strip() == rows[0].base_commit
        oldest = 1 if box.sandbox.backend.capabilities.name.startswith("overlay") else 0  # which are not used
    assert len(left) == 3 and set(names) - set(left) == {names[oldest]}
    kept.release()
    forget()
    pristine(rows[oldest], settings)
    assert len(made) == 5


def test_the_bound_is_a_number_and_none_keeps_nothing(
    settings: WorkspaceSettings, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prepared.VARIABLE, "much")
    with pytest.raises(ValueError, match="SANDBOXGYM_PREPARED_GB: expected a number of gigabytes, found 'much'"):
        pristine(TASKS[0], settings)
    monkeypatch.setenv(prepared.VARIABLE, "0")
    pristine(TASKS[0], settings)
    assert not own_cache.exists()
    monkeypatch.delenv(prepared.VARIABLE)
    assert 0 < prepared.limit() <= prepared.DEFAULT


def test_a_cache_that_cannot_be_written_is_done_without_and_said_once(
    settings: WorkspaceSettings, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(prepared, "directory", lambda: tmp_path / "file" / "prepared")
    with caplog.at_level(logging.WARNING, "sandboxgym"):
        for task in TASKS[:2]:
            assert len(pristine(task, settings).reference) == 40
    said = [record.getMessage() for record in caplog.records if "not kept on disk" in record.getMessage()]
    assert len(made) == 2 and len(said) == 1, said
    assert str(tmp_path / "file") in said[0]


def test_what_cannot_be_prepared_leaves_nothing(settings: WorkspaceSettings, own_cache: Path) -> None:
    with pytest.raises(TaskError, match="column 'base_commit': 'host' has no commit"):
        pristine(replace(TASKS[0], history="", base_commit="0" * 40), settings)
    for wrong in ({"base_commit": "0" * 40}, {"base_commit": "zzz"}, {"history": "zzz"}):
        with pytest.raises(TaskError, match=f"{TASKS[0].instance_id}, columns 'history' and 'base_commit': the repo"):
            pristine(replace(TASKS[0], **wrong), settings)
    with pytest.raises((SandboxUnavailable, TaskError), match="nowhere"):
        pristine(replace(TASKS[0], history="", image="dir:/nowhere/at/all"), settings)
    assert entries(own_cache) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second file system")
def test_a_cache_on_another_file_system(own_cache: Path, settings: WorkspaceSettings) -> None:
    """Layers cannot be linked there, and perhaps not be mounted with other ids."""
    check_backend("overlay" if os.geteuid() == 0 else "overlay-rootless")
    pristine(TASKS[0], settings)
    forget()
    code = """
boxes._prepare = refused
print(*look(tasks[0]))
with settings.box(tasks[0]) as box:
    box.restore(boxes.pristine(tasks[0], settings).snapshot)
    box.run("echo 1 > /testbed/more")
    taken = box.sandbox.unpack(box.sandbox.snapshot().pack())
    box.restore(taken)
    print(box.run("cd /testbed && git status --short").output)
"""
    runtime = Path("/dev/shm", f"sandboxgym-test-{os.getpid()}")
    try:
        words = answered(child(own_cache, "auto", code, SANDBOXGYM_RUNTIME=str(runtime))).split()
    finally:
        subprocess.run(["rm", "-rf", str(runtime)], check=True)
    assert words == ["##", "main", TASKS[0].base_commit, "??", "more"]
    assert pristine(TASKS[0], settings, verify=True)
