"""The examples of the documentation pass the suite that the documentation tells authors to run."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sandboxgym.conformance import check_snapshot

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The code of docs/own-env.md as a module that other processes can import."""
    folder = tmp_path_factory.mktemp("page")
    text = (ROOT / "docs/own-env.md").read_text(encoding="utf-8")
    (folder / "own_env_page.py").write_text("\n".join(BLOCK.findall(text)), encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("own_env_page")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("own_env_page", None)


def write_and_read(observation: Any, info: dict[str, Any], rng: np.random.Generator) -> str:
    """An agent for `Notes`: it hands in what it last read, at times."""
    word = str(observation) if str(observation).isdigit() else "nothing"
    name = ("draft.txt", "answer.txt", *(f"note{index}.txt" for index in range(5)))[int(rng.integers(7))]
    return ("list", f"read {name}", f"read {name}", f"write answer.txt {word}", f"write {name} {word}", "submit")[
        int(rng.choice(6, p=[0.1, 0.3, 0.2, 0.2, 0.1, 0.1]))
    ]


def test_a_documented_environment_cleans_up_after_a_killed_process(page: ModuleType) -> None:
    report = check_snapshot(page.Notes, only=["api.protocol", "resources.killed_owner"], actions=write_and_read)
    assert [str(result.verdict) for result in report.results] == ["PASS", "PASS"]


def test_the_documented_protocol_environment_is_faithful(page: ModuleType) -> None:
    report = check_snapshot(page.Counter, levels=["api", "exact"])
    assert report["api.snapshot_before_reset"].verdict == "PASS" and report["api.wrong_handle"].verdict == "PASS"


@pytest.mark.slow
def test_the_documented_environment_passes_the_whole_suite(page: ModuleType) -> None:
    report = check_snapshot(page.Notes, actions=write_and_read, strength=True)
    assert report["durable.cross_process"].verdict == "PASS"
    assert report.strength is not None and not report.strength.unexercised, str(report.strength)


@pytest.mark.slow
def test_the_documented_protocol_environment_passes_the_whole_suite(page: ModuleType) -> None:
    report = check_snapshot(page.Counter, strength=True)
    assert report.strength is not None and not report.strength.unexercised, str(report.strength)


@pytest.mark.slow
def test_the_example_package_passes_the_whole_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "conformance/example_package/src"))
    report = check_snapshot("lantern:Lantern", strength=True)
    assert report.strength is not None and not report.strength.unexercised, str(report.strength)
