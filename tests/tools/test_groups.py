"""Groups of tests that one worker runs, one after the other; and tests that failed, run again without workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import failed
import pytest


@pytest.mark.xdist_group("a group")
def test_workers_know_the_groups(request: pytest.FixtureRequest) -> None:
    """Versions of pytest and pytest-xdist that do not fit forget them in silence."""
    grouped = bool(request.config.getoption("loadgroup", False))
    assert request.node.nodeid.endswith("@a group") == grouped


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.py::b[c@d]@e, f", "a.py::b[c@d]", "a.py::g@h"], None),
        ([], "0 tests failed"),
        ([f"a.py::b[{number}]" for number in range(4)], "4 tests failed"),
    ],
)
def test_failed_tests_are_named_as_without_workers(
    names: list[str], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "lastfailed"
    cache.write_text(json.dumps(dict.fromkeys(names, True)))
    named = tmp_path / "named"
    monkeypatch.setattr(failed, "CACHE", cache)
    monkeypatch.setattr(failed, "NAMED", named)
    assert failed.main() == told
    assert named.exists() == (told is None)
    assert set(json.loads(cache.read_text())) <= {"a.py::b[c@d]", "a.py::g", *(f"a.py::b[{n}]" for n in range(4))}


def test_tests_that_were_stopped_have_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed, "CACHE", tmp_path / "lastfailed")
    assert failed.main() == "pytest has not said which tests failed: it was stopped before its end"


@pytest.mark.parametrize("value", ["x" * 300_000, b"\xff" * 300_000, "\ud800" * 300_000])
def test_processes_start_whatever_the_name_of_the_test(value: str | bytes) -> None:
    """Pytest exports the name, with the parameters in it; a variable may have 128 KiB."""
    assert subprocess.run([sys.executable, "-S", "-c", ""], check=True).returncode == 0
    assert len(os.environ["PYTEST_CURRENT_TEST"]) < 1000 < len(value)
