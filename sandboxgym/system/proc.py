"""Processes as /proc shows them: their state, parents and memory (proc_pid_stat(5)). Standard library only."""

from __future__ import annotations

import os
from typing import NamedTuple

_NBYTES = 4096


class Stat(NamedTuple):
    """Fields of a process or of one of its threads."""

    name: str
    """Name of the program, which a process may choose: it may hold blanks, parentheses and bytes that are no text."""
    state: str
    """The kernel's letter: R, S, D, T, t, Z, X, …"""
    parent: int
    session: int
    flags: int
    """The kernel's PF_ flags."""
    ticks: int
    """Processor time in clock ticks, of the program and of the kernel for it."""
    threads: int
    started: str
    """Start time in clock ticks since boot: it tells a process from a later one of the same number."""


def head(path: str, nbytes: int) -> bytes:
    """Read the first bytes of a file of /proc in one call of the kernel, which makes them consistent.

    Raises:
        OSError: it is gone.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, nbytes)
    finally:
        os.close(descriptor)


def stat(pid: int, thread: int | None = None) -> Stat:
    """Read the fields of a process; with ``thread``, those of one of its threads.

    Raises:
        OSError: it is gone, or there is no /proc.
    """
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    # The name stands in parentheses and may hold some itself: it ends at the last one.
    before, _, after = head(path, _NBYTES).rpartition(b")")
    fields = after.decode("ascii").split()
    if len(fields) < 20:
        raise ProcessLookupError(f"{path} is empty")
    name = before.partition(b"(")[2].decode(errors="backslashreplace")
    state, parent, session, started = fields[0], int(fields[1]), int(fields[3]), fields[19]
    ticks = int(fields[11]) + int(fields[12])
    return Stat(name, state, parent, session, int(fields[6]), ticks, int(fields[17]), started)


def started(pid: int) -> str:
    """Return the start time of a process (`Stat.started`); empty if it is gone."""
    try:
        return stat(pid).started
    except OSError:
        return ""


def parents() -> dict[int, int]:
    """Find the parent of every process, by process id; empty where there is no /proc."""
    found = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return {}
    for pid in numbers:
        try:
            found[pid] = stat(pid).parent
        except OSError:  # it ended meanwhile
            continue
    return found


def descendants(pid: int) -> set[int]:
    """Children of a process and their descendants, zombies too."""
    above = parents()
    found: set[int] = set()
    newest = {pid}
    while newest:
        newest = {child for child, parent in above.items() if parent in newest} - found
        found |= newest
    return found


def nbytes(path: str, *names: str) -> int:
    """Sum of a file's lines ``NAME: NUMBER kB`` with these names, in bytes, such as ``Pss`` of ``smaps_rollup``.

    Raises:
        OSError: it is gone, or may not be read.
    """
    with open(path, encoding="ascii", errors="replace") as file:
        lines = [line.partition(":") for line in file]
    return sum(int(rest.split()[0]) * 1024 for name, _, rest in lines if name in names)


def memory() -> tuple[int, int]:
    """Virtual and resident memory of this process in bytes.

    Raises:
        OSError: there is no /proc.
    """
    virtual, resident = head("/proc/self/statm", _NBYTES).split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(virtual) * page, int(resident) * page
