"""Files and directories that appear complete or not at all, and those made once between processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxgym.system import atomic, once, run_directories
from sandboxgym.system.atomic import atomic_file, atomic_folder, is_temporary, temporary_name, write_atomic
from sandboxgym.system.once import file_lock, made_once


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, b"new")
    with pytest.raises(OSError, match="no space"), atomic_file(path) as temporary:
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_flushed_before_it_gets_its_name_unless_it_need_not_last(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    flush, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (seen.append("flushed"), flush(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (seen.append("named"), replace(*paths)))
    write_atomic(tmp_path / "a", b"x", durable=durable)
    with atomic_file(tmp_path / "b", durable=durable) as temporary:
        temporary.write_bytes(b"y")
    assert seen == (["flushed", "named"] if durable else ["named"]) * 2
    assert (tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes() == b"xy"


def test_permissions_are_those_of_any_file_of_the_user(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", b"x")
    (tmp_path / "other").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_is_being_written_is_told_by_its_name(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a.snap") as file, atomic_folder(tmp_path / "folder") as folder:
        assert is_temporary(file.name) and is_temporary(file.name, of="a.snap")
        assert is_temporary(folder.name, of="folder") and not is_temporary(folder.name, of="a.snap")
        file.touch()
    assert not is_temporary("a.snap") and not is_temporary(".hidden") and not is_temporary("a.lock")
    assert not is_temporary(temporary_name("a-b"), of="a")


def test_a_directory_appears_when_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with pytest.raises(KeyboardInterrupt), atomic_folder(path) as folder:
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with atomic_folder(path) as folder:
        (folder / "whole").touch()
        assert not path.exists()
    assert [item.name for item in path.iterdir()] == ["whole"]
    with pytest.raises(OSError), atomic_folder(path) as folder:
        (folder / "late").touch()
    assert [item.name for item in path.iterdir()] == ["whole"] and list(tmp_path.iterdir()) == [path]


def test_a_part_of_a_directory_can_be_kept_alone(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "index", keep="made") as folder:
        (folder / "made").mkdir()
        (folder / "made" / "a").touch()
        (folder / "scratch").touch()
    assert [item.relative_to(tmp_path).as_posix() for item in sorted(tmp_path.rglob("*"))] == ["index", "index/a"]


def of(path: Path) -> Callable[[], str | None]:
    """Content of the file ``a`` in a directory, as `made_once` looks for it."""
    return lambda: (path / "a").read_text() if (path / "a").exists() else None


def test_many_threads_make_a_directory_once(tmp_path: Path) -> None:
    path, made, found = tmp_path / "deep" / "cache", [], []

    def make(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.05)
        (folder / "a").write_text("content")

    threads = [threading.Thread(target=lambda: found.append(made_once(path, make, look=of(path)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and found == ["content"] * 8
    assert {item.name for item in path.parent.iterdir()} == {"cache", "cache.lock"}


MAKER = """
import sys, time
from pathlib import Path
from sandboxgym.system.once import made_once

def make(folder):
    (folder / "half").touch()
    print("making", flush=True)
    time.sleep(60)

made_once(Path(sys.argv[1]), make, look=lambda: None)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_what_a_killed_process_was_making_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with subprocess.Popen([sys.executable, "-c", MAKER, path], stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == b"making\n"
        assert any(is_temporary(item.name, of="cache") for item in tmp_path.iterdir())
        assert run_directories.is_locked(tmp_path / "cache.lock")
        maker.send_signal(signal.SIGKILL)
    assert made_once(path, lambda folder: write_atomic(folder / "a", b"x"), look=of(path)) == "x"
    assert {item.name for item in tmp_path.iterdir()} == {"cache", "cache.lock"}


def test_a_directory_that_cannot_be_used_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    (path / "damaged").mkdir(parents=True)
    assert made_once(path, lambda folder: write_atomic(folder / "a", b"x"), look=of(path)) == "x"
    assert [item.name for item in path.iterdir()] == ["a"]
    with pytest.raises(RuntimeError, match="was made and cannot be used"):
        made_once(tmp_path / "never", lambda folder: None, look=lambda: None)


def test_a_failure_leaves_nothing_and_the_old_directory(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    (path / "damaged").mkdir(parents=True)
    with pytest.raises(OSError, match="no space"):
        made_once(path, full, look=of(path))
    assert [item.name for item in path.iterdir()] == ["damaged"]
    assert {item.name for item in tmp_path.iterdir()} == {"cache", "cache.lock"}


def test_without_locks_the_first_to_end_is_used_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(once.fcntl, "flock", none)
    path = tmp_path / "cache"

    def slower(folder: Path) -> None:
        assert made_once(path, lambda mine: write_atomic(mine / "a", b"first"), look=of(path)) == "first"
        assert folder.exists()  # of another process, which is at work
        write_atomic(folder / "a", b"second")

    assert made_once(path, slower, look=of(path)) == "first"
    with pytest.raises(OSError, match="no locks"), file_lock(tmp_path / "lock"):
        pass


def test_who_waits_for_a_lock_is_told(tmp_path: Path) -> None:
    told, order = threading.Event(), []

    def second() -> None:
        with file_lock(tmp_path / "lock", waiting=told.set):
            order.append("second")

    with file_lock(tmp_path / "lock", waiting=lambda: order.append("waited")):
        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(300)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_the_random_part_of_a_name_differs() -> None:
    assert len({atomic.temporary_name("a") for _ in range(100)}) == 100
