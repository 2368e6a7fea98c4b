"""A run that may not take longer leaves out slow tests, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import in_time
import pytest

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(in_time.__file__).parent)!r})
from in_time import pytest_collection_modifyitems, pytest_configure, pytest_runtest_setup, pytest_terminal_summary
"""
TESTS = """
import os, pytest
@pytest.mark.slow
def test_long(): pass
def test_short(): assert "SANDBOXGYM_UNTIL" not in os.environ
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_longest(): pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    return tmp_path


def run(project: Path, until: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:sandboxgym", *options]
    environment = {**os.environ, in_time.VARIABLE: until, "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_slow_tests_do_not_begin_after_the_moment_and_are_named(project: Path, workers: str) -> None:
    done = run(project, str(time.time() - 1), "-n", workers, "--dist", "loadgroup")
    assert done.returncode == 0, done.stdout
    assert "8 slow tests were NOT RUN" in done.stdout and "4 passed, 8 skipped" in done.stdout
    names = (project / in_time.LEFT_OUT).read_text().splitlines()
    assert len(names) == 8 and all("test_long" in name for name in names)


def test_all_are_run_before_it_in_an_order_that_changes(project: Path) -> None:
    orders = []
    for more in (0, 1):
        done = run(project, str(int(time.time()) // 4 * 4 + 4000 + more))
        assert "12 passed" in done.stdout and "NOT RUN" not in done.stdout
        assert (project / in_time.LEFT_OUT).read_text() == ""
        orders.append([line.split()[0] for line in done.stdout.splitlines() if "PASSED" in line])
    for order in orders:
        assert all("longest" in name for name in order[:4])
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_no_moment_changes_nothing(project: Path) -> None:
    done = run(project, "")
    assert "12 passed" in done.stdout
    assert "test_a.py::test_long " in next(line for line in done.stdout.splitlines() if "PASSED" in line)
    assert not (project / in_time.LEFT_OUT).exists()


def test_a_moment_that_is_none_is_refused(project: Path) -> None:
    done = run(project, "soon")
    assert done.returncode == 4 and "expected seconds since 1970, found 'soon'" in done.stderr
