"""Process table of this machine: parents, sessions, open descriptors.

Read from /proc; where there is none from ``ps``, which shows process groups in place of sessions. Command lines and
lists of descriptors are cut, for processes inside choose their length.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sandboxgym.sandbox.base import ProcessInfo, SandboxError
from sandboxgym.system import proc

_PATIENCE = 10.0
"""Seconds after which processes that do not die are an error."""
# What a process shows of itself is its own choice, and there may be hundreds of them.
_COMMAND = 1024  # bytes of a command line
_DESCRIPTORS = 64  # of one process that are told
_TARGET = 256  # characters of what one points to
_NAMED = 10  # processes that an error lists


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process of the table."""

    pid: int
    parent: int
    session: int
    """Session; its process group where sessions cannot be known."""
    state: str
    started: str
    """Start time as the kernel gives it: compared, never computed with."""
    command: str

    @property
    def runs(self) -> bool:
        """True if it runs, rather than waits to be collected as a zombie."""
        return self.state not in "ZX"

    def info(self) -> ProcessInfo:
        """The process as a backend reports it."""
        return ProcessInfo(self.pid, self.parent, self.command, descriptors(self.pid))


def table(*, only: Callable[[int], bool] = lambda pid: True) -> list[ProcessRow]:
    """All processes, or those with the given numbers."""
    if sys.platform != "linux":
        return [row for row in _table_by_ps() if only(row.pid)]
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [row for pid in numbers if only(pid) and (row := _row(pid))]


def descendants(rows: Collection[ProcessRow], roots: Collection[int]) -> set[int]:
    """Process ids of these processes and all their descendants."""
    found = {row.pid for row in rows if row.pid in roots}
    while more := {row.pid for row in rows if row.parent in found} - found:
        found |= more
    return found


def start_times(pids: Collection[int]) -> dict[int, str]:
    """Start times of processes, without those that are gone."""
    return {row.pid: row.started for row in table(only=pids.__contains__)}


def kill_until_none(left: Callable[[], list[ProcessRow]], *, kill: Callable[[list[int]], None] | None = None) -> None:
    """Kill processes until none is left, since they may start others meanwhile, and wait for the end of all found.

    Raises:
        SandboxError: some do not die.
    """
    end = time.monotonic() + _PATIENCE
    found: set[tuple[int, str]] = set()
    while True:
        # One that was found may no longer be told from what it descends from, which died before it.
        found |= {(row.pid, row.started) for row in left()}
        pids = {pid for pid, _ in found}
        rows = [row for row in table(only=pids.__contains__) if (row.pid, row.started) in found and row.runs]
        if not rows:
            return
        if time.monotonic() > end:
            named = ", ".join(f"{row.pid} ({row.command:.80})" for row in rows[:_NAMED])
            raise SandboxError(f"these {len(rows)} processes do not end: {named}")
        (kill or kill_all)([row.pid for row in rows])
        time.sleep(0.001)


def kill_all(pids: Collection[int]) -> None:
    """Kill processes; those that are gone are ignored."""
    for pid in pids:
        send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that is gone is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _row(pid: int) -> ProcessRow | None:
    try:
        found, command = proc.stat(pid), command_line(pid)
    except OSError:  # gone meanwhile
        return None
    return ProcessRow(pid, found.parent, found.session, _state(pid, found), found.started, command or found.name)


def state(pid: int) -> str:
    """The kernel's state letter of a process; X if there is none."""
    try:
        return _state(pid, proc.stat(pid))
    except OSError:
        return "X"


def _state(pid: int, found: proc.Stat) -> str:
    """State among the fields after the name; that of another thread if only the first has ended."""
    if found.state != "Z" or found.threads <= 1:
        return found.state
    letters = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                letters.add(proc.stat(pid, int(thread)).state)
    return min(letters - {"Z", "X"}, key=lambda letter: letter in "Tt", default="Z")


def command_line(pid: int) -> str:
    """Beginning of a process's command line.

    Raises:
        OSError: it is gone.
    """
    shown = proc.head(f"/proc/{pid}/cmdline", _COMMAND)
    return shown.rstrip(b"\0").replace(b"\0", b" ").strip().decode(errors="backslashreplace")


def _table_by_ps() -> list[ProcessRow]:
    columns = "pid=,ppid=,pgid=,state=,lstart=,command="
    listed = subprocess.run(["ps", "-axo", columns], capture_output=True, text=True, errors="replace").stdout
    pattern = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(\S)\S*\s+(\S+\s+\S+\s+\S+\s+\S+\s+\d{4})\s+(.*)")
    found = [match for line in listed.splitlines() if (match := pattern.match(line))]
    return [ProcessRow(int(m[1]), int(m[2]), int(m[3]), m[4], m[5], m[6]) for m in found]


def descriptors(pid: int) -> tuple[str, ...]:
    """Targets of the first descriptors above 2 of a process; a last entry marks that there are more."""
    found: list[str] = []
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # in the order of their numbers
        for name in itertools.islice((entry.name for entry in entries if int(entry.name) > 2), _DESCRIPTORS + 1):
            if len(found) == _DESCRIPTORS:
                found.append(f"{name} -> and more")
                break
            if (target := descriptor_target(pid, name)) is not None:
                found.append(f"{name} -> {target}")
    return tuple(found)


def descriptor_target(pid: int | None, number: str | int) -> str | None:
    """Target of a process's descriptor as text, whatever its name; None if none may be seen."""
    try:
        target = os.readlink(b"/proc/%d/fd/%d" % (pid or 0, int(number))).decode(errors="backslashreplace")
    except OSError:
        return None
    return target if len(target) <= _TARGET else f"{target[:_TARGET]}..."
