"""Connection to the program inside: one request per attempt, one answer, and time for a witness in between."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import shlex
import time
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sandboxgym.attack.attempt import NotApplicable, Observed, blocked, passed
from sandboxgym.attack.inside.answers import ABSENT, MARK, SECONDS, WORKED
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.sandbox import Sandbox

FOLDER = "/tmp/.attack"
"""Directory of the program inside."""
SOURCES = Path(__file__).parent / "inside"
ARCHIVE = f"{FOLDER}/inside.zip"
_START_SECONDS = 20.0


@cache
def archive() -> bytes:
    """Pack the program as one file, which Python imports from directly: some backends need long for each file."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as packed:
        for source in sorted(SOURCES.glob("*.py")):
            packed.write(source, f"inside/{source.name}")
    return content.getvalue()


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the program inside."""

    verdict: str
    detail: str
    facts: dict[str, Any]

    @property
    def worked(self) -> bool:
        """True if the attempt succeeded, as seen from inside."""
        return self.verdict == WORKED

    def seen(self) -> Observed:
        """Observation from inside, for attempts without an effect outside.

        Raises:
            NotApplicable: it was not made.
        """
        self.need()
        return passed(self.detail) if self.worked else blocked(self.detail)

    def need(self) -> None:
        """Check that the attempt was made.

        Raises:
            NotApplicable: it was not.
        """
        if self.verdict in (ABSENT, "late"):
            raise NotApplicable(self.detail)


class ProberLost(Exception):
    """Raised if the program inside ended; perhaps its sandbox did."""


class Prober:
    """Handle of the program inside a live sandbox.

    Args:
        sandbox: is started, if it was not.
        restored: start the program from the sandbox's shell, whose processes came back from a snapshot, so that it has
            what they have: the filter, the capabilities, the groups.

    Raises:
        NotApplicable: the sandbox has no Python.
    """

    def __init__(self, sandbox: Sandbox, *, restored: bool = False) -> None:
        self.sandbox = sandbox
        found = sandbox.run('command -v python3 >/dev/null && python3 -c "import ctypes" && printf "PATH:%s" "$PATH"')
        if "PATH:" not in found.output:
            raise NotApplicable("there is no Python 3 with ctypes inside")
        sandbox.write_file(ARCHIVE, archive())
        self._pending = b""
        self._process: Any = None
        if restored:
            self._start_in_shell()
        else:
            self._start(found.output.rpartition("PATH:")[2])
        ready = self._answer(_START_SECONDS)
        if ready.verdict != "ready":
            raise ProberLost(f"expected the program inside to be ready, found {ready}")

    def _start(self, path: str) -> None:
        read, self._requests = os.pipe()
        try:
            self._process = self.sandbox.backend.spawn(
                ["python3", "-m", "inside"],
                env={"PATH": path, "LANG": "C.UTF-8", "PYTHONPATH": ARCHIVE},
                cwd=FOLDER,
                stdin=read,
            )
        except BaseException:
            os.close(self._requests)
            raise
        finally:
            os.close(read)
        self._answers: int = self._process.output

    def _start_in_shell(self) -> None:
        box = getattr(self.sandbox.backend, "container", None)
        command = f"mkfifo in out && (PYTHONPATH={ARCHIVE} setsid python3 -m inside <>in >out 2>&1 &)"
        done = self.sandbox.execute(f"(cd {shlex.quote(FOLDER)} && rm -f in out && {command})", timeout=10)
        if box is None or done.exit_code:
            raise NotApplicable(f"the program could not be started from the shell: {done.output.strip()[:200]}")
        root = f"/proc/{box.pid}/root{FOLDER}"
        self._requests = os.open(f"{root}/in", os.O_RDWR)
        self._answers = os.open(f"{root}/out", os.O_RDONLY | os.O_NONBLOCK)

    def ask(self, do: str, *, seconds: float = SECONDS, **arguments: Any) -> Reply:
        """Request an attempt.

        Raises:
            ProberLost: the program inside is gone.
        """
        request = {"do": do, "with": arguments, "seconds": seconds}
        try:
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise ProberLost(str(error)) from error
        return self._answer(seconds + 5)

    def let_go(self) -> None:
        """End the processes of attempts that hold something."""
        self.ask("let_go")

    def _answer(self, seconds: float) -> Reply:
        deadline = time.monotonic() + seconds
        while True:
            line, newline, rest = self._pending.partition(b"\n")
            if newline:
                self._pending = rest
                if line.startswith(MARK.encode()):
                    plain = json.loads(line[len(MARK) :])
                    return Reply(str(plain["verdict"]), _plain(str(plain["detail"])), dict(plain["facts"]))
                continue
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._answers, 65536) if ready else b""
            if not chunk:
                why = "it ended" if ready else "it does not answer"
                raise ProberLost(f"the program inside: {why} {self._pending[-200:].decode(errors='replace')}".strip())
            self._pending += chunk

    def close(self) -> None:
        """End the program. Idempotent."""
        if self._requests < 0:
            return
        os.close(self._requests)
        if self._process is None:
            os.close(self._answers)
        else:
            with contextlib.suppress(SandboxError, OSError):
                self._process.kill()
            with contextlib.suppress(SandboxError, OSError):
                self._process.close()
        self._requests = -1


def _plain(text: str) -> str:
    """Escape a hostile program's text for a terminal and a table."""
    return re.sub(r"[^ -~]|\|", "?", text)
