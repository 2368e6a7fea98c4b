"""Run directories, and `gc`: it removes everything that dead owners left, and nothing of a living one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from components import missing

from sandboxgym import data
from sandboxgym.registration import data_set
from sandboxgym.system import run_directories
from sandboxgym.system.run_directories import claim, give_back, reap, register_reaper, runtime_dir

ROOT = Path(__file__).parents[2]
CLAIM = """
import sys, os
from sandboxgym.system.run_directories import claim
path = claim("test")
(path / "scratch").mkdir()
(path / "scratch" / "file").write_bytes(bytes(1000))
print(path, flush=True)
if "exit" not in sys.argv:
    sys.stdin.read()
"""


@contextlib.contextmanager
def owner(*arguments):
    """A process that has claimed a run directory; yields it and the directory."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CLAIM, *arguments]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def old(path: Path) -> Path:
    before = time.time() - run_directories.STALE_SECONDS - 60
    os.utime(path, (before, before))
    return path


def test_a_living_owners_directory_stays_and_a_killed_ones_goes():
    with owner() as (process, path):
        assert reap() == [] and (path / "scratch/file").exists()
        process.kill()
        process.wait()
        (gone,) = reap(dry_run=True)
        assert (gone.path, gone.removed, path.exists()) == (path, False, True)
        (gone,) = reap()
        assert (gone.path, gone.removed, gone.nbytes > 1000) == (path, True, True)
        assert not path.exists() and reap() == []


def test_a_killed_process_that_nobody_has_collected_is_dead():
    with owner() as (process, path):
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table
        assert [item.path for item in reap()] == [path]


def test_a_process_that_ends_takes_its_directory_with_it():
    with owner("exit") as (process, path):
        process.wait()
        assert str(path).startswith(str(runtime_dir())) and not path.exists()


def test_a_forked_child_does_not_take_its_parents_directory_with_it():
    path = claim("test")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            run_directories._give_back_all()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.exists()
    give_back(path)
    assert not path.exists()
    give_back(path)


@pytest.mark.parametrize(
    ("change", "reaped"),
    [
        ({}, False),
        ({"started": "1"}, True),  # the id was given to another process
        ({"pid": 2**22 + 1}, True),
        ({"boot": "before"}, True),
        ({"host": "another machine, the same home directory"}, False),
        ({"host": "another machine", "boot": "another"}, False),
        ({"namespace": "pid:[1]", "pid": 2**22 + 1}, False),  # a container's process, which cannot be seen from here
    ],
)
def test_who_counts_as_gone(change, reaped):
    path = claim("test")
    record = path / run_directories.OWNER
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    assert [item.path for item in reap()] == ([path] if reaped else [])
    assert path.exists() is not reaped
    give_back(path)


@pytest.mark.parametrize("content", [b"", b"not json", b"[]", b'{"pid": 1}'])
def test_a_directory_without_an_intact_owner_is_not_touched(content):
    path = runtime_dir() / "something-of-yours"
    path.mkdir()
    (path / run_directories.OWNER).write_bytes(content)
    assert reap() == [] and path.exists()


def test_a_reaper_sees_the_directory_first_and_its_failure_keeps_it(monkeypatch):
    monkeypatch.setattr(run_directories, "_reapers", {})
    seen = []

    def reaper(path):
        seen.append((path / run_directories.OWNER).exists())
        if len(seen) == 1:
            raise RuntimeError("still busy")

    register_reaper("test", reaper)
    path = claim("test")
    record = path / run_directories.OWNER
    record.write_text(json.dumps({**json.loads(record.read_text()), "started": "1"}))
    (kept,) = reap()
    assert (kept.removed, kept.note) == (False, "still busy") and path.exists()
    (gone,) = reap()
    assert gone.removed and seen == [True, True] and not path.exists()


def test_nothing_is_deleted_through_a_mount(monkeypatch):
    path = claim("test")
    (path / "mounted").mkdir()
    monkeypatch.setattr(run_directories, "mount_points", lambda: ["/", str(path / "mounted")])
    with pytest.raises(OSError, match="still mounted"):
        run_directories.remove_tree(path)
    assert (path / "mounted").exists()
    monkeypatch.undo()


MOUNTED = """
import os, subprocess, sys
from pathlib import Path
from sandboxgym.system import run_directories

for name in (b"plain", b"of two words", b"of two\\nlines", b"back\\\\slash", b"\\xff", "\u1e9e".encode()):
    beside = Path(os.fsdecode(os.path.join(os.fsencode(sys.argv[1]), name)))
    path = beside.with_name(beside.name + "x")
    inside = path / "inside"
    inside.mkdir(parents=True)
    beside.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", inside], check=True)
    (inside / "kept").touch()
    run_directories.remove_tree(beside)
    for where in (path, inside):
        try:
            run_directories.remove_tree(where)
        except OSError as error:
            assert str(error) == f"{inside} is still mounted", error
        else:
            raise AssertionError(f"{where} was removed")
    assert (inside / "kept").exists() and not beside.exists()
    subprocess.run(["umount", inside], check=True)
    run_directories.remove_tree(path)
    assert not path.exists()
"""


def test_mounts_are_found_whatever_their_names_are(tmp_path):
    alone = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        missing("namespaces", "no mount namespace can be made here")
    done = subprocess.run([*alone, sys.executable, "-c", MOUNTED, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_removal_that_is_interrupted_anywhere_is_finished_by_the_next(monkeypatch):
    for steps in range(20):
        path = claim("test")
        for name in ("a", "b/c", "z"):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(b"x")
        record = json.loads((path / run_directories.OWNER).read_text())
        (path / run_directories.OWNER).write_text(json.dumps({**record, "started": "1"}))
        left = iter(range(steps))

        def dying(call, left=left):
            def act(*arguments, **options):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return call(*arguments, **options)

            return act

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("unlink", "rmdir"):
                patch.setattr(os, name, dying(getattr(os, name)))
            reap()
            patch.undo()
            assert steps > 4 and not path.exists()
            return
        reap()
        assert not path.exists()
    raise AssertionError("a removal took more than 20 system calls")


def test_two_do_not_reap_at_once():
    with owner() as (process, path):
        process.kill()
        process.wait()
        with open(runtime_dir() / ".lock", "ab") as lock:
            assert run_directories.try_lock(lock)
            assert reap() == [] and path.exists()
        assert len(reap()) == 1


def test_a_runtime_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path / "link"))
    with pytest.raises(PermissionError, match="SANDBOXGYM_RUNTIME"):
        claim("test")
    assert reap() == []


@pytest.mark.parametrize("kind", ["", "Two-Words", "../up"])
def test_kinds_are_plain_names(kind):
    with pytest.raises(ValueError, match="kind"):
        claim(kind)


@pytest.fixture
def litter():
    """(what is left behind, what must stay)."""
    downloads = data.directory(data_set("webshop")) / ".downloads"
    cache = data.cache_dir() / "alfworld"
    for folder in (downloads, cache, runtime_dir()):
        folder.mkdir(parents=True, exist_ok=True)
    left = [downloads / "items.json.part", cache / ".abcd1234.grounding", data.data_dir() / ".x.json.00_zz__9"]
    kept = [
        downloads / "fresh.json.part",
        cache / ".game.bin.fresh123",
        cache / "game.bin",
        data.cache_dir() / ".hidden",
        data.data_dir() / ".x.json.00_zz__9.mine",
    ]
    for path in left + kept:
        path.write_bytes(bytes(10))
    for path in [*left, kept[2], kept[3], kept[4]]:
        old(path)
    return left, kept


def test_gc_says_first_and_then_removes_what_is_stale(run, litter):
    left, kept = litter
    status, out, _ = run("gc", "--dry-run")
    assert status == 0 and out.count("would remove ") == 4 and "would remove 3, 30 B" in out
    assert all(path.exists() for path in left + kept)
    status, out, _ = run("gc")
    assert status == 0 and "removed 3, 30 B" in out
    assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


def test_a_running_download_is_left_alone(run, litter):
    left, _ = litter
    with open(left[0].parent / "lock", "ab") as lock:
        assert run_directories.try_lock(lock)
        run("gc")
        assert left[0].exists() and not left[1].exists()
    run("gc")
    assert not left[0].exists()


def test_all_takes_the_caches_and_nothing_else_in_their_directory(run, litter):
    mine = data.cache_dir() / "thesis"
    mine.mkdir()
    assert run("gc", "--all")[0] == 0
    assert not (data.cache_dir() / "alfworld").exists() and mine.exists()


def test_many_claims_at_once_are_all_different():
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(claim("test"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 16
    for path in paths:
        give_back(path)
    assert [p.name for p in runtime_dir().iterdir() if p.name != ".lock"] == []
