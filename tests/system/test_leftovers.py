"""Leftovers, counted while they change."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxgym.system import directories, run_directories


def test_what_goes_away_while_it_is_counted_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of an owner that was just killed still write and delete."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "stays").write_bytes(b"four")
    (tmp_path / "goes").write_bytes(b"three")
    (tmp_path / "empty").mkdir()
    walk = directories.walk

    def late(path: str) -> Iterator[os.DirEntry[str]]:
        for entry in walk(path):
            (tmp_path / "goes").unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (tmp_path / "empty").rmdir()
            yield entry
        yield from walk(os.path.join(path, "gone"))

    monkeypatch.setattr(directories, "walk", late)
    assert run_directories.tree_nbytes(tmp_path) == 4


_CLAIMING = """
import os, sys
from sandboxgym.system import directories, run_directories
where = sys.argv[1]

def rename(*_):
    print("here", flush=True)
    if where == "killed":
        os.kill(os.getpid(), 9)
    sys.stdin.readline()

os.rename = rename
run_directories.claim("copy")
"""


@pytest.mark.parametrize("where", ["killed", "alive"])
def test_a_directory_that_its_owner_could_not_complete(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _CLAIMING, where], stdin=pipe, stdout=pipe) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"here\n"
        if where == "killed":
            owner.wait()
        (path,) = (path for path in tmp_path.iterdir() if path.is_dir())
        assert path.name.startswith(".claim-")
        assert [left.path for left in run_directories.reap()] == ([path] if where == "killed" else [])
        assert path.exists() == (where == "alive")
        owner.kill()
    assert [left.removed for left in run_directories.reap()] == ([] if where == "killed" else [True])
    assert not path.exists()


_MAKING = """
import os, sys
from sandboxgym.system import directories, run_directories
print(run_directories.claim(sys.argv[1]), flush=True)
if sys.argv[2:]:
    os.kill(os.getpid(), 9)
"""


def test_the_first_claim_of_a_process_clears_what_others_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path))

    def run(*words: str) -> Path:
        command = [sys.executable, "-c", _MAKING, *words]
        return Path(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())

    left = run("browser", "and die")
    assert left.is_dir() and left.parent == tmp_path
    run("copy")
    assert not left.exists()


def test_what_another_machine_has_not_completed_waits_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path))
    owner = run_directories.ProcessIdentity(pid=1, started="1", boot="another", namespace="pid:[1]", host="elsewhere")
    path = tmp_path / f".claim-{run_directories._name(owner)}-abcdefgh"
    path.mkdir()
    assert run_directories.reap() == []
    yesterday = time.time() - run_directories.STALE_SECONDS - 60
    os.utime(path, (yesterday, yesterday))
    assert [left.path for left in run_directories.reap()] == [path]
    assert not path.exists()


def test_a_lock_is_seen_while_it_is_held_and_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not run_directories.is_locked(path), "there is no file"
    path.touch()
    assert not run_directories.is_locked(path)
    assert not run_directories.is_locked(path / "below"), "a file has nothing below it"
    with open(path, "rb") as held:
        assert run_directories.try_lock(held)
        assert run_directories.is_locked(path)
    assert not run_directories.is_locked(path)


def test_a_lock_that_cannot_be_judged_counts_as_held(tmp_path: Path) -> None:
    assert run_directories.is_locked(tmp_path), "a directory cannot be opened as a file"


_WRITING = """
import sys, threading
from sandboxgym.system import run_directories
from sandboxgym.system.serving import leave

def write(number):
    n = 0
    while True:
        n += 1
        try:
            (path / f"{number}-{n}").touch()
        except OSError:
            pass
        if n > 50:
            begun.set()

path, begun = run_directories.claim("copy"), threading.Event()
for number in range(4):
    threading.Thread(target=write, args=(number,), daemon=True).start()
begun.wait()
leave(0)
"""


def test_what_threads_write_while_their_process_ends_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the latest with the next claim: a directory without its owner's record would stay for good."""
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path))
    subprocess.run([sys.executable, "-c", _WRITING], check=True)
    assert not list(tmp_path.glob("copy-*"))
    subprocess.run(
        [sys.executable, "-c", "from sandboxgym.system.run_directories import claim; claim('copy')"], check=True
    )
    assert [path.name for path in tmp_path.iterdir()] in ([".lock"], [])


_LAST = """
import atexit, os, threading

def last():
    pid = os.fork()
    if not pid:
        print("fork:", run_directories.claim("copy").name.split("-")[0], flush=True)
        run_directories._give_back_all()
        os._exit(0)
    os.waitpid(pid, 0)
    print("same thread:", run_directories.claim("copy").name.split("-")[0])
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()

def other():
    try:
        run_directories.claim("copy")
    except RuntimeError as error:
        print("other thread:", error)

atexit.register(last)  # runs after those that are registered later
from sandboxgym.system import run_directories
run_directories.claim("copy")
"""


def test_who_may_claim_while_a_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path))
    said = subprocess.run([sys.executable, "-c", _LAST], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == [
        "fork: copy",
        "same thread: copy",
        "other thread: this process is ending: what it claims now would be left behind",
    ]
