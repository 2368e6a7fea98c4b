"""``sandboxgym webshop build``: everything that is kept on disk is made, shown once, and used by environments."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import pytest

from sandboxgym.cli import CommandError
from sandboxgym.cli.support.webshop_build import main
from sandboxgym.envs.webshop.catalogues import catalogue as catalogues
from sandboxgym.envs.webshop.catalogues import memory_mapped
from sandboxgym.envs.webshop.catalogues.generated import write_files
from sandboxgym.envs.webshop.retrieval import index_build, search


def test_what_a_large_catalogue_needs_is_built_and_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalogues, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(search, "IN_MEMORY", 0)
    write_files(tmp_path / "data", 60)
    assert main(["build", str(tmp_path / "data")]) == 0
    first = capsys.readouterr()
    assert "products: " in first.err and "index: 60 of 60 products (100%)" in first.err
    assert "60 products" in first.out and "synthetic goals" in first.out and "cache" in first.out
    assert main(["build", str(tmp_path / "data")]) == 0
    assert capsys.readouterr().err == ""
    for module in (memory_mapped, index_build):
        monkeypatch.setattr(module, "made_once", lambda path, make, *, look, **_: look())  # all is there
    env = gym.make("sandboxgym/WebShop-v0", catalogue=str(tmp_path / "data"))
    env.reset(seed=0)


@pytest.mark.parametrize("words", [["build", "nowhere"], ["build", "nowhere", "--goals", "human"]])
def test_what_is_missing_is_said(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=r"no such catalogue: .*nowhere"):
        main(words)


def test_a_small_catalogue_is_kept_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path / "data", 30)
    assert main(["build", str(tmp_path / "data")]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "30 products" in said.out and "kept in memory" in said.out
