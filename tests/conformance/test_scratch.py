"""Folders of the suite can be found for cleanup after a killed run."""

from __future__ import annotations

import logging
import tempfile

import pytest

from sandboxgym.conformance.harness import process_globals
from sandboxgym.conformance.sandbox_probes import places as place_probes
from sandboxgym.conformance.supervision import scratch
from sandboxgym.system import run_directories


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory of this process, and temporary files at a place of the test's own."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path / "runs"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(scratch, "_run", None)
    claimed = run_directories.claim(scratch.KIND)
    scratch.use(claimed)
    yield claimed
    run_directories.give_back(claimed)


def test_all_folders_of_a_run_go_and_no_others(run, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made = [scratch.folder(), scratch.folder(str(elsewhere)), scratch.folder(str(elsewhere), hidden=True)]
    mine = [path for place in (tmp_path / "tmp", elsewhere) for path in place.iterdir()]
    assert len(mine) == 3 and any(path.name.startswith(".") for path in mine)
    (mine[0] / "file").write_text("content")
    (elsewhere / "sandboxgym-conformance-other-1").mkdir()
    scratch.clear(run)
    assert [path.name for path in elsewhere.iterdir()] == ["sandboxgym-conformance-other-1"]
    assert not any(path.exists() for path in mine)
    for folder in made:
        folder.cleanup()


def test_folders_of_every_use_are_recorded_and_go_by_themselves(run, tmp_path):
    with place_probes.own_folders() as folders, process_globals.private_temporary() as temporary:
        inner = scratch.folder()
        assert all(run.name.rpartition("-")[2] in path.name for path in (*folders, temporary))
        recorded = {record.read_text() for record in run.glob("in-*")}
        assert recorded == {str(path.parent) for path in (*folders, temporary)}, "a folder in a folder goes with it"
        inner.cleanup()
    assert not any(path.exists() for path in (*folders, temporary))


def test_a_link_in_the_name_of_a_folder_is_not_followed(run, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("content")
    folder = scratch.folder()
    (tmp_path / "tmp" / f"{scratch._prefix(run)}link").symlink_to(kept)
    scratch.clear(run)
    assert (kept / "file").exists() and not list((tmp_path / "tmp").iterdir())
    folder.cleanup()


def test_without_a_place_for_records_there_are_folders_all_the_same(run, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path / "file"))
    monkeypatch.setattr(scratch, "_run", None)
    with caplog.at_level(logging.WARNING), scratch.folder() as name:
        assert name.startswith(str(tmp_path / "tmp"))
    assert "its temporary folders stay" in caplog.text
