"""Tests that fail are run again alone and named at the end of `.ci/run`, which fails even if they pass then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import failed
import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("apt-get", "gcc", "g++", "cmake", "chromium", "dockerd", "docker", "docker-registry", "ip", "sbatch")
"""Programs that the script looks for, none of which this test needs."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    failed.CACHE.parent.mkdir(parents=True)
    return tmp_path


def test_few_failures_are_prepared_without_their_groups_and_noted(here: Path) -> None:
    failed.CACHE.write_text(json.dumps({"a.py::test_x[1]@group": True, "a.py::test_y": True}))
    assert failed.main() is None
    assert json.loads(failed.CACHE.read_text()) == {"a.py::test_x[1]": True, "a.py::test_y": True}
    assert failed.NAMED.read_text() == "a.py::test_x[1]\na.py::test_y\n"


@pytest.mark.parametrize("count", [0, failed.MOST + 1])
def test_none_or_many_failures_are_not_run_again(here: Path, count: int) -> None:
    failed.CACHE.write_text(json.dumps({f"a.py::test_{number}": True for number in range(count)}))
    assert failed.main() == f"{count} tests failed"
    assert not failed.NAMED.exists()


@pytest.mark.parametrize(("all_pass", "alone_pass", "status"), [(True, True, 0), (False, True, 1), (False, False, 1)])
def test_the_last_paragraph_names_what_was_run_again(
    tmp_path: Path, all_pass: bool, alone_pass: bool, status: int
) -> None:
    """In a run of the script whose ``make`` only plays the two targets that matter here."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    cache = tmp_path / ".pytest_cache"
    cache.mkdir()
    (cache / failed.NAMED.name).write_text("of an earlier run\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    make = f"""#!/bin/sh
case "$1" in
    test-all) exit {int(not all_pass)} ;;
    test-failed) echo "a.py::test_x[1]" > {failed.NAMED}; exit {int(not alone_pass)} ;;
esac
"""
    for name, text in {"make": make, **dict.fromkeys(PROGRAMS, "#!/bin/sh\n")}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    environment |= {"SANDBOXGYM_CRIU": "criu", "SANDBOXGYM_VLLM": "python", "SANDBOXGYM_PARITY_DATA": ""}
    done = subprocess.run(
        [tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    last = "depends on what else runs:\n  a.py::test_x[1]\n"
    assert done.stderr.endswith(last) is not all_pass
    assert "of an earlier run" not in done.stderr
