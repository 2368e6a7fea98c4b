"""The processes of this machine: who started whom, in which session, and what they hold open.

Read from /proc; where there is none from ``ps``, which tells process groups in place of sessions.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from sandboxgym.sandbox.base import ProcessInfo, SandboxError

_PATIENCE = 10.0
"""Seconds after which processes that do not die are an error."""


@dataclass(frozen=True, slots=True)
class Row:
    """A process."""

    pid: int
    parent: int
    session: int
    """Its process group where sessions cannot be known."""
    state: str
    started: str
    """As the kernel gives it: compared, never computed with."""
    command: str

    @property
    def runs(self) -> bool:
        """Whether it is more than what its parent has not collected yet."""
        return self.state not in "ZX"

    def info(self) -> ProcessInfo:
        """As a backend hands it out."""
        return ProcessInfo(self.pid, self.parent, self.command, _descriptors(self.pid))


def table(*, only: Callable[[int], bool] = lambda pid: True) -> list[Row]:
    """All processes, or those that are asked for by number."""
    if sys.platform != "linux":
        return [row for row in _table_by_ps() if only(row.pid)]
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [row for pid in numbers if only(pid) and (row := _row(pid))]


def descendants(rows: Collection[Row], roots: Collection[int]) -> set[int]:
    """The numbers of some processes and of all that descend from them."""
    found = {row.pid for row in rows if row.pid in roots}
    while more := {row.pid for row in rows if row.parent in found} - found:
        found |= more
    return found


def start_times(pids: Collection[int]) -> dict[int, str]:
    """When processes started; those that are gone are left out."""
    return {row.pid: row.started for row in table(only=pids.__contains__)}


def kill_until_none(left: Callable[[], list[Row]], *, kill: Callable[[list[int]], None] | None = None) -> None:
    """Kill until nothing is left, since processes may start others meanwhile, and wait until all found are gone.

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
            raise SandboxError(f"these processes do not end: {', '.join(f'{r.pid} ({r.command})' for r in rows)}")
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


def _row(pid: int) -> Row | None:
    try:
        # The second field is the program's name in parentheses and may hold anything.
        head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # gone meanwhile
        return None
    fields = tail.split()
    return Row(pid, int(fields[1]), int(fields[3]), fields[0], fields[19], command or head.partition("(")[2])


def _table_by_ps() -> list[Row]:
    columns = "pid=,ppid=,pgid=,state=,lstart=,command="
    listed = subprocess.run(["ps", "-axo", columns], capture_output=True, text=True, errors="replace").stdout
    pattern = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(\S)\S*\s+(\S+\s+\S+\s+\S+\s+\S+\s+\d{4})\s+(.*)")
    found = [match for line in listed.splitlines() if (match := pattern.match(line))]
    return [Row(int(m[1]), int(m[2]), int(m[3]), m[4], m[5], m[6]) for m in found]


def _descriptors(pid: int) -> tuple[str, ...]:
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
            with contextlib.suppress(OSError):
                if int(name) > 2:
                    found.append(f"{name} -> {os.readlink(f'/proc/{pid}/fd/{name}')}")
    return tuple(found)
