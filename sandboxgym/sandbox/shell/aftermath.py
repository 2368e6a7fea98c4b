"""Processes started in a sandbox since a moment, found and ended as a whole.

1. No process inside runs while they are found and killed (`base.Backend.paused`): a chain of processes, each of which
   ends as soon as it has started the next, cannot escape; nor can a process that left its session and its parents, or
   was stopped.
2. Older processes and their descendants are spared: the background jobs of earlier commands. A newer process that has
   lost its parents belongs to none of them, and is killed.
3. When `end_started` returns, the processes found have ended; it repeats until it finds none.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from sandboxgym.sandbox.base import Backend, ProcessInfo, SandboxClosed
from sandboxgym.sandbox.process_table import state
from sandboxgym.system import proc

log = logging.getLogger("sandboxgym")

PATIENCE = 10.0
"""Seconds in which all killed processes must have ended."""

_GLANCE = 0.002  # seconds between two looks at what is about to end
_ROUNDS = 20  # in which something was found; more are a backend that cannot stop what runs


@dataclass(frozen=True, slots=True)
class Moment:
    """A time on the kernel's clock of process starts: in hundredths of a second since boot."""

    ticks: int

    @classmethod
    def now(cls) -> Self:
        """The present; before every process start where the kernel shows no start times."""
        if not hasattr(time, "CLOCK_BOOTTIME"):
            return cls(0)
        return cls(int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")))

    def follows(self, birth: str) -> bool:
        """True if this moment is known to be later than the start of a process."""
        return birth.isdigit() and int(birth) < self.ticks


def birth_of(pid: int) -> str:
    """Start time of a process, which tells it from another of its number; empty if gone or unknown."""
    return proc.started(pid)


def births_of(pids: Iterable[int]) -> dict[int, str]:
    """Start times of several processes, see `birth_of`."""
    return {pid: birth_of(pid) for pid in pids}


def started_since(
    infos: Collection[ProcessInfo], since: Moment, *, older: Mapping[int, str], shell: int | None
) -> dict[int, str]:
    """Processes, of those given, that started since a moment, with their start times.

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
    """Kill the processes started since a moment, once; returns them with their start times.

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
    """Kill the processes started since a moment until none is left; arguments as of `kill_started`."""
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
    """Wait until killed processes have ended, which takes longer than sending the signal."""
    left = dict(doomed)
    while time.monotonic() < deadline:
        left = {pid: birth for pid, birth in left.items() if state(pid) not in "ZX" and birth_of(pid) == birth}
        if not left:
            return
        time.sleep(_GLANCE)
