"""Features of a terminal: tab completion, Ctrl-C, colour, progress bars."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from sandboxgym.cli.support.progress import BarProgress, PlainProgress, progress

ROOT = Path(__file__).parents[2]


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        env.pop("NO_COLOR", None)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job of a script ignores it, and so its children
            try:
                os.execve(command[0], command, env)
            finally:
                os._exit(127)
        self.seen = ""

    def expect(self, text: str, *, seconds: float = 120.0) -> str:
        """Read until the text appears; returns what came up to it, without colours."""
        deadline = time.monotonic() + seconds
        while text not in (plain := re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.seen)):
            assert select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0], f"no {text!r} in {plain!r}"
            self.seen += os.read(self.fd, 65536).decode(errors="replace")
        self.seen = plain.partition(text)[2]
        return plain.partition(text)[0]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self, text: str) -> None:
        """Ctrl-C until the text appears.

        One that comes just before readline waits is only seen with the next. One that takes away what readline was
        told it could read leaves it waiting for a key, deaf to further ones: so a key comes in between.
        """
        for key in ("\x03", "\x03", " ") * 10:
            self.type(key)
            with contextlib.suppress(AssertionError):
                self.expect(text, seconds=3.0)
                return
        raise AssertionError(f"no {text!r} after 20 interrupts")

    def interrupt_to_the_end(self) -> int:
        """Ctrl-C until the program has ended; its status."""
        for _ in range(10):
            self.type("\x03")
            deadline = time.monotonic() + 3.0
            while time.monotonic() < deadline:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.02)
        raise AssertionError("still running after 10 interrupts")

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self.fd)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.fixture
def game():
    terminal = Terminal(sys.executable, "-m", "sandboxgym", "play", "ALFWorld-v0", "--task", "0", "--no-list")
    yield terminal
    terminal.close()


def test_the_tab_key_completes_whole_commands_and_the_end_of_input_leaves(game):
    pytest.importorskip("readline")
    game.expect("#0]")
    game.expect("> ")
    game.type("GO TO DE\t\n")
    game.expect("#1]")
    game.type(":und\t\n")
    game.expect("#0]")
    game.expect("> ")
    game.type("\x04")
    assert game.status() == 0


def test_one_interrupt_drops_the_line_and_two_leave(game):
    game.expect("> ")
    game.type("look")
    game.interrupt("once more to leave")
    game.expect("> ")
    game.type("look\n")
    game.expect("#1]")
    game.expect("> ")
    game.interrupt("once more to leave")
    game.expect("> ")
    assert game.interrupt_to_the_end() == 130


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    class Out(io.StringIO):
        def isatty(self):
            return True

    assert isinstance(progress(Out()), BarProgress)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert isinstance(progress(Out()), PlainProgress)
    lines = io.StringIO()
    plain = progress(lines)
    plain.start("games.zip", 1_000_000, 4_000_000)
    plain.advance(3_000_000)
    plain.finish()
    plain.finish()
    assert lines.getvalue() == "  games.zip: 1.0 MB of 4.0 MB (25%)\n  games.zip: 4.0 MB of 4.0 MB (100%)\n"
    plain.start("unknown", 0, None)
    assert lines.getvalue().endswith("  unknown: 0 B\n")
