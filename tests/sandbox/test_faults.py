"""The counts in the fault table are correct, and nothing is left after a fault."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from sandbox.sandboxes import check

from sandboxgym.bench import faults
from sandboxgym.bench.tools.traces import Folder, Traces


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "copy"])
def test_nothing_is_left(backend: str, tmp_path: Path) -> None:
    check(backend)
    folder = Folder(tmp_path, docker=False)
    hung = faults.one_fault(folder, "hung command", backend, "host")
    killed = faults.killed_owner(folder, backend, "host", 0)
    for outcome in (hung, killed):
        assert outcome.survived and outcome.left.none, outcome
        assert outcome.most.processes > 2 and outcome.most.directories > 0, outcome


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    outcome = faults.one_fault(Folder(tmp_path, docker=False), "hung command", "docker", "no image")
    assert not outcome.survived
    assert "SandboxUnavailable" in outcome.seen


def test_counting(tmp_path: Path) -> None:
    folder = Folder(tmp_path, docker=False)
    assert folder.count() == Traces(0, 0, 0, 0, 0, 0)
    (tmp_path / "sandbox-1-x").mkdir()
    process = folder._python("-c", "import subprocess; subprocess.run(['sleep', '1000'])")
    try:
        while folder.count().processes < 1:
            assert process.poll() is None
        assert folder.count() == Traces(1, 0, 0, 0, 0, 1)
    finally:
        subprocess.run(["pkill", "-P", str(process.pid)])
        process.communicate()
    assert folder.count() == Traces(0, 0, 0, 0, 0, 1)
