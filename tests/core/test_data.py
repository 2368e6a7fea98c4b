"""Locations of data sets and caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxgym import data
from sandboxgym.registration import data_set


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)


def test_directories_follow_the_environment_and_have_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("SANDBOXGYM_CACHE", "/elsewhere")
    assert (data.data_dir(), data.cache_dir()) == (tmp_path, Path("/elsewhere"))
    for name in ("SANDBOXGYM_DATA", "SANDBOXGYM_CACHE"):
        monkeypatch.setenv(name, "")
    assert data.data_dir().name == data.cache_dir().name == "sandboxgym"
    assert data.data_dir() != data.cache_dir()


def test_a_data_set_is_found_once_it_is_there(tmp_path):
    assert data.find(data_set("alfworld")) is None
    (tmp_path / "alfworld" / ".downloads").mkdir(parents=True)
    assert data.find(data_set("alfworld")) is None
    (tmp_path / "alfworld" / "train").mkdir()
    assert data.find(data_set("alfworld")) == tmp_path / "alfworld"


def test_the_fields_own_variable_comes_first_even_if_it_names_nothing(tmp_path, monkeypatch):
    (tmp_path / "alfworld").mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "typo"))
    assert data.find(data_set("alfworld")) == data.directory(data_set("alfworld")) == tmp_path / "typo"


@pytest.mark.parametrize("split", ["json_2.1.1/valid_seen", "valid_seen"])
def test_parts_are_told_apart_in_both_layouts(tmp_path, split):
    trial = tmp_path / "alfworld" / split / "task" / "trial"
    trial.mkdir(parents=True)
    assert data.parts_found(data_set("alfworld")) == []
    (trial / "traj_data.json").write_text("{}")
    assert data.parts_found(data_set("alfworld")) == ["annotations"]
    (trial / "game.tw-pddl").write_text("{}")
    assert data.parts_found(data_set("alfworld")) == ["games", "annotations"]


def test_a_part_is_there_when_all_its_files_are(tmp_path):
    root = tmp_path / "webshop"
    root.mkdir()
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json"):
        (root / name).write_text("[]")
    assert data.parts_found(data_set("webshop")) == []
    (root / "items_human_ins.json").write_text("{}")
    assert data.parts_found(data_set("webshop")) == ["1000"]


def test_the_same_rows_in_another_format_count(tmp_path):
    (tmp_path / "swebench").mkdir()
    (tmp_path / "swebench" / "verified.jsonl").write_text("{}")
    assert data.parts_found(data_set("swebench")) == ["verified"]
