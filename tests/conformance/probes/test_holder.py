"""The report of the program in the sandbox is constant while nothing happens, and changes otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxgym.conformance.sandbox_probes import process_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what it holds is Linux's")

LONG = 120.0
"""Seconds that anything may take on a busy machine."""


class Held:
    """A running holder."""

    def __init__(self, folder: Path, value: str) -> None:
        self.folder = folder / "held"
        self.folder.mkdir()
        (folder / "holder.py").write_text(Path(process_state.__file__).read_text())
        os.mkfifo(self.folder / "in")
        self.end = os.open(self.folder / "in", os.O_RDWR)
        command = [sys.executable, "-q", "-i", "../holder.py", value]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, cwd=self.folder, stdin=self.end, stdout=quiet, stderr=quiet)
        self.wait_for("ready")

    def wait_for(self, name: str) -> Path:
        end = time.monotonic() + LONG
        while not (self.folder / name).exists():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.01)
        return self.folder / name

    def type(self, line: str) -> None:
        os.write(self.end, f"{line}\n".encode())

    def answers(self) -> dict[str, str]:
        self.type("report()")
        path = self.wait_for("answers")
        pairs = [line.partition(" ") for line in path.read_text().splitlines()]
        path.unlink()
        return {name: answer for name, _, answer in pairs}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path, "one")
    yield made
    made.close()


def test_looking_changes_nothing(held: Held) -> None:
    held.type("typed = [1, 'two']")
    first = held.answers()
    assert first.keys() == {"repl", *process_state.MAKERS}
    assert first["repl"] == "[1, 'two']"
    assert first["tcp"] == "((b'queued one', b'?'), True)"
    assert first["lock"] == "[b'one', True, True]"
    assert not any("Error" in answer for answer in first.values()), first
    for _ in range(3):
        assert held.answers() == first


def test_what_is_lost_is_told(held: Held) -> None:
    before = held.answers()
    # What has no descriptor first.
    held.type("import gc; every = [one for one in gc.get_objects() if isinstance(one, random.Random)]")
    held.type("_ = [one.random() for one in every]")
    held.type("asks['memory'].__closure__[0].cell_contents = b'another'")
    changed = {name for name, answer in held.answers().items() if answer != before[name]}
    assert changed == {"random", "memory"}
    # Then all files, connections, queues; those who shared memory and worked.
    held.type("os.closerange(3, 500)")
    held.type("own = open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read().split()")
    held.type("_ = [os.kill(int(one), signal.SIGKILL) for one in own]")
    after = held.answers()
    assert {name for name in before if after[name] == before[name]} == {"repl", "threads", "pid"}


def test_it_ends_with_its_folder(held: Held) -> None:
    (held.folder / "ready").unlink()
    assert held.process.wait(LONG) < 0
