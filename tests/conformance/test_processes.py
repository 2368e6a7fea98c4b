"""Counting what a process left while others still delete."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from sandboxgym.conformance.supervision import processes


def test_entries_are_those_of_every_level(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").touch()
    (tmp_path / "link").symlink_to("a")
    names = {str(entry.relative_to(tmp_path)) for entry in processes.entries(tmp_path)}
    assert names == {"a", "a/b", "a/b/file", "link"}
    counts = processes.held(tmp_path)
    assert (counts["temporary files"], counts["temporary folders"]) == (2, 3)  # a link to a folder is both
    assert processes.entries(tmp_path / "no such folder") == []


def test_folders_that_are_deleted_meanwhile_are_no_error(tmp_path):
    """A folder that was counted may be gone when it is looked into: a process that outlives its owner deletes files."""
    (tmp_path / "stays").mkdir()
    over = threading.Event()

    def make_and_delete(name: str) -> None:
        while not over.is_set():
            (tmp_path / name / "a/b/c/d").mkdir(parents=True)
            shutil.rmtree(tmp_path / name)

    makers = [threading.Thread(target=make_and_delete, args=(name,)) for name in "xyz"]
    for maker in makers:
        maker.start()
    seen: set[Path] = set()
    try:
        for _ in range(200):
            seen.update(processes.entries(tmp_path))
    finally:
        over.set()
        for maker in makers:
            maker.join()
    assert len(seen) > 1, "nothing was deleted while it was looked for"
    assert processes.entries(tmp_path) == [tmp_path / "stays"]
