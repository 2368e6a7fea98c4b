"""What came up in a sandbox since a moment, found and ended as a whole.

1. Nothing inside runs while it is looked for and killed (`base.Backend.paused`): a chain of processes, each of which
   ends as soon as it has started the next, has nowhere to go; nor has what left its session and its parents, or was
   stopped.
2. What is older than the moment is spared, and so is what descends from it: the background jobs of earlier commands. A
   process that came up since and has lost its parents is nobody's, and goes.
3. When `end_started` returns, what it found has ended; it looks again until there is nothing to find.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from sandboxgym.sandbox.base import Backend, ProcessInfo, SandboxClosed
from sandboxgym.sandbox.files.reading import start_of
from sandboxgym.sandbox.process_table import state

log = logging.getLogger("sandboxgym")

PATIENCE = 10.0
"""Seconds in which all must have ended."""

_GLANCE = 0.002  # seconds between two looks at what is about to end
_ROUNDS = 20  # in which something was found; more are a backend that cannot stop what runs
_STARTED = 19  # which of the fields after its name tells when a process started


@dataclass(frozen=True, slots=True)
class Moment:
    """A time as the kernel gives the beginnings of processes: in hundredths of a second since the machine started."""

    ticks: int

    @classmethod
    def now(cls) -> Self:
        """The present; before the beginning of everything where the kernel tells no beginnings."""
        if not hasattr(time, "CLOCK_BOOTTIME"):
            return cls(0)
        return cls(int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")))

    def follows(self, birth: str) -> bool:
        """Whether it is known to be later than the beginning of a process."""
        return birth.isdigit() and int(birth) < self.ticks


def birth_of(pid: int) -> str:
    """When a process started, to tell it from another of its number; empty if it is gone, or that cannot be known."""
    try:
        return start_of(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()[_STARTED].decode()
    except (OSError, IndexError):
        return ""


def births_of(pids: Iterable[int]) -> dict[int, str]:
    """`birth_of` each."""
    return {pid: birth_of(pid) for pid in pids}


def started_since(
    infos: Collection[ProcessInfo], since: Moment, *, older: Mapping[int, str], shell: int | None
) -> dict[int, str]:
    """Which of some processes came up since a moment, and their births.

    Args:
        infos: all of a sandbox.
        since: the moment.
        older: births of processes that were there, whatever the clock says of them.
        shell: the number of a process that is spared without its offspring; those in ``older`` are spared with it.
    """
    births = births_of(info.pid for info in infos)
    kept = {
        pid
        for pid, birth in births.items()
        if pid != shell and (since.follows(birth) or (pid in older and older[pid] == birth))
    }
    children: dict[int, list[int]] = {}
    for info in infos:
        children.setdefault(info.parent, []).append(info.pid)
    pending = list(kept)
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in kept and child != shell:
                kept.add(child)
                pending.append(child)
    return {pid: birth for pid, birth in births.items() if pid not in kept and pid != shell}


def kill_started(
    backend: Backend, since: Moment, *, older: Mapping[int, str] | None = None, shell: int | None = None
) -> dict[int, str]:
    """Kill what came up since a moment, once; which processes these are, by their births.

    Args:
        backend: whose processes.
        since: the moment.
        older: see `started_since`.
        shell: see there.

    Raises:
        SandboxClosed: the sandbox is gone, and all of them with it.
    """
    with backend.paused():
        doomed = started_since(backend.processes(), since, older=older or {}, shell=shell)
        backend.kill(doomed)
    return doomed


def end_started(
    backend: Backend, since: Moment, *, older: Mapping[int, str] | None = None, shell: int | None = None
) -> None:
    """Kill what came up since a moment until there is no more of it, and it is gone; arguments as of `kill_started`."""
    deadline = time.monotonic() + PATIENCE
    try:
        for _ in range(_ROUNDS):
            doomed = kill_started(backend, since, older=older, shell=shell)
            if not doomed or time.monotonic() > deadline:
                break
            await_end(doomed, deadline)
        else:
            log.warning("a sandbox starts processes faster than %r can end them", backend)
    except SandboxClosed:
        return


def await_end(doomed: Mapping[int, str], deadline: float) -> None:
    """Wait until processes that were killed have ended: a signal is sent long before it has been obeyed."""
    left = dict(doomed)
    while time.monotonic() < deadline:
        left = {pid: birth for pid, birth in left.items() if state(pid) not in "ZX" and birth_of(pid) == birth}
        if not left:
            return
        time.sleep(_GLANCE)
