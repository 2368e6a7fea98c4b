"""Find and end plain processes, without a namespace to contain them.

A sandbox's processes carry a mark in their environment, belong to a session that was started for it, or descend from
one that does. Linux shows all three; elsewhere only process groups and parents are known.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from sandboxgym.sandbox.base import ProcessInfo
from sandboxgym.sandbox.process_table import ProcessRow, descendants, kill_until_none, send_signal, start_times, table
from sandboxgym.system import proc

MARK = "SANDBOXGYM_BOX"
"""Environment variable that every process of a sandbox inherits."""

SESSIONS = "sessions.json"
"""File in a run directory: the leaders of its sessions and when they started."""

_ENVIRONMENT = 8 * 2**20
"""Bytes of a process's environment searched for the mark; the kernel allows 6 MiB."""
_PATIENCE = 10.0
"""Seconds to wait for processes to stop; one in an uninterruptible call writes nothing either."""


def processes_of(mark: str, leaders: Collection[int]) -> list[ProcessInfo]:
    """The live processes of a sandbox.

    Args:
        mark: value of `MARK` in their environment.
        leaders: numbers of sessions, each of which is known not to be somebody else's by now.
    """
    return [row.info() for row in _rows_of(mark, leaders)]


def end_all(mark: str, leaders: Collection[int]) -> None:
    """Kill every process of a sandbox, and those that start meanwhile.

    Raises:
        SandboxError: some do not die.
    """
    kill_until_none(lambda: _rows_of(mark, leaders))


def end_session(leader: int) -> None:
    """Kill the rest of a session whose leader was not collected yet.

    Raises:
        SandboxError: some do not die.
    """
    kill_until_none(lambda: [row for row in table() if row.session == leader and row.runs])


def stop_all(mark: str, leaders: Collection[int]) -> list[int]:
    """Stop every process of a sandbox, and those that start meanwhile.

    Returns:
        The numbers of those that ran, for `go_on`.
    """
    stopped: dict[int, None] = {}
    end = time.monotonic() + _PATIENCE
    while running := [row.pid for row in _rows_of(mark, leaders) if row.state not in "Tt"]:
        for pid in running:
            send_signal(pid, signal.SIGSTOP)  # again too: another may have let it continue
            stopped[pid] = None
        if time.monotonic() > end:
            break
        time.sleep(0.0005)
    return list(stopped)


def go_on(pids: Collection[int]) -> None:
    """Continue stopped processes."""
    for pid in pids:
        send_signal(pid, signal.SIGCONT)


def has_ended(pid: int) -> bool:
    """True if a child has ended. It is not collected."""
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return not any(row.runs for row in table(only=pid.__eq__))


def exit_status(returncode: int) -> int:
    """Exit status of a process as a shell reports it, from that of `subprocess`."""
    return returncode if returncode >= 0 else 128 - returncode


def reap(run: Path) -> None:
    """Kill the processes that the owner of a run directory left running."""
    try:
        recorded = {int(pid): str(started) for pid, started in json.loads((run / SESSIONS).read_bytes()).items()}
    except (OSError, ValueError):
        recorded = {}
    now = start_times(recorded)
    end_all(run.name, {pid for pid, started in recorded.items() if now.get(pid) == started})


def _rows_of(mark: str, leaders: Collection[int]) -> list[ProcessRow]:
    rows = [row for row in table() if row.runs and row.pid != os.getpid()]
    wanted = f"\0{MARK}={mark}\0".encode()
    roots = {row.pid for row in rows if row.session in leaders or wanted in _environment(row.pid)}
    ours = descendants(rows, roots)
    return [row for row in rows if row.pid in ours]


def _environment(pid: int) -> bytes:
    """Environment of a process, each variable between two null bytes."""
    try:
        return b"\0%b\0" % proc.head(f"/proc/{pid}/environ", _ENVIRONMENT)
    except OSError:
        return b""
