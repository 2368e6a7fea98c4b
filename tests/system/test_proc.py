"""Processes as /proc shows them: names that lie, threads, processes that are gone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sandboxgym.system import proc

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")

NAMED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)  # PR_SET_NAME
print("named", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["plain", ") R 1 1 (", "a b) Z (", "((("])
def test_a_name_hides_no_field(name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NAMED, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "named\n"
        found = proc.stat(child.pid)
        assert (found.name, found.parent, found.session) == (name, os.getpid(), os.getsid(0))
        assert found.state in "RSD" and found.threads == 1 and found.ticks >= 0
        assert proc.started(child.pid) == found.started > ""
        child.stdin.close()
    assert proc.started(child.pid) == ""
    with pytest.raises(OSError):
        proc.stat(child.pid)


def test_a_thread_has_a_state_of_its_own() -> None:
    ready, end = threading.Event(), threading.Event()
    numbers: list[int] = []

    def work() -> None:
        numbers.append(threading.get_native_id())
        ctypes.CDLL(None).prctl(15, b"worker", 0, 0, 0)
        ready.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(300)
        assert proc.stat(os.getpid(), numbers[0]).name == "worker" != proc.stat(os.getpid()).name
        assert proc.stat(os.getpid()).threads >= 2
    finally:
        end.set()
        thread.join()


def test_a_zombie_is_told_from_a_process() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert proc.stat(pid).state == "Z"
    finally:
        os.waitpid(pid, 0)
