"""The counts in the fault table are correct, and nothing is left after a fault."""

from __future__ import annotations

import subprocess
import sys
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


LEAVING = """
import sys, threading, time
from sandboxgym.sandbox import make_sandbox
from sandboxgym.system.serving import leave

def work():
    while True:
        try:
            with make_sandbox(sys.argv[1], allow_unsafe=True) as sandbox:
                sandbox.execute("true")
                begun.set()
        except Exception:
            time.sleep(0.001)

begun = threading.Event()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
time.sleep(float(sys.argv[2]))
leave(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "copy"])
def test_threads_that_go_on_while_a_process_ends_leave_nothing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose client still waits for a call ends like this."""
    check(backend)
    for n in range(6):
        folder = tmp_path / str(n)
        monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(folder))
        command = [sys.executable, "-c", LEAVING, backend, str(n / 20)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        assert not [path.name for path in folder.iterdir() if path.name != ".lock"]


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
