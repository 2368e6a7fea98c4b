"""`sandboxgym bench fleet` with small numbers: every table has the rows that it promises."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from components import missing

# Two minutes of processor time, and nine of wall clock beside four busy programs.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1800)]


def test_small_numbers_fill_every_table() -> None:
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        missing("ray", "Ray is not installed")
    small = ["--envs", "8", "--many", "40", "--repeats", "1", "--state", "100000"]
    done = subprocess.run(
        [sys.executable, "-m", "sandboxgym", "bench", "fleet", *small], capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)  # shown if it fails
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line[:1] == "|"
    ]
    first = {row[0] for row in rows}
    assert {"in this process", "killed", "frozen"} <= first
    for name in ("killed", "frozen"):
        (row,) = [row for row in rows if row[0] == name]
        paths, lost, _, _, dropped = row[1:6]
        assert int(paths) == 8 and int(lost) > 0 and int(dropped) == 0
    simulated = {(row[0], row[1]) for row in rows if len(row) > 5 and row[1] in ("10", "100", "1,000")}
    assert len(simulated) == 9
    assert re.search(r"^40 environments of ALFWorld live in 2 actors", done.stdout, re.M)
    assert re.search(r"^From the death of a worker to a step of its path on another: \d+ to \d+ ms", done.stdout, re.M)
    assert ["kept in their worker", "0"] in rows
