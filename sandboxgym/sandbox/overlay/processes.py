"""Processes of containers as their owner observes and ends them, by the host's process ids and /proc."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass

from sandboxgym.sandbox.base import ProcessInfo, SandboxError
from sandboxgym.sandbox.process_table import command_line, descriptors
from sandboxgym.sandbox.process_table import state as state

_PATIENCE = 10.0
"""Seconds after which processes that do not die are an error."""


@dataclass(eq=False)
class NamespaceProcess:
    """A process in a container; see `base.Process`."""

    pidfd: int
    status: int
    terminal: int | None = None
    output: int | None = None
    code: int | None = None
    relayed: bool = False
    _pid: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id on the host; None once it ended."""
        if self._pid is None and self.pidfd >= 0:
            self._pid = _pid_of(self.pidfd)
        return self._pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end: the exit status (128 + signal if killed), or None after ``timeout`` seconds."""
        if self.code is None and self.status >= 0 and readable(self.status, timeout):
            # The init writes it; without an init, all were killed.
            self.code = int(os.read(self.status, 16) or 128 + signal.SIGKILL)
        return self.code

    def kill(self) -> None:
        """Kill the process and all that it started, as far as it is still its offspring or in its session. Idempotent.

        Raises:
            SandboxError: some do not die.
        """
        pid = self.pid
        if self.code is not None or pid is None:
            return
        # Stopped first, for what is being killed one by one can continue forking meanwhile.
        stopped: set[int] = set()
        for _ in range(50):
            found = {pid, *(info.pid for info in offspring(pid))} - stopped
            if not found:
                break
            for one in found:
                send(one, signal.SIGSTOP)
            stopped |= found
        for one in stopped - {pid}:
            send(one, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        # A signal is sent long before it has been obeyed on a busy machine.
        end = time.monotonic() + _PATIENCE
        while left := [one for one in stopped if state(one) not in "ZX"]:
            if time.monotonic() > end:
                raise SandboxError(f"these {len(left)} processes do not end: {', '.join(map(str, left[:10]))}")
            time.sleep(0.0005)

    def close(self) -> None:
        """Close the descriptors held by this process. Idempotent."""
        for name in ("pidfd", "status", "terminal", "output"):
            descriptor = getattr(self, name)
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
            setattr(self, name, None if name in ("terminal", "output") else -1)


def readable(descriptor: int, seconds: float | None) -> bool:
    """True if a descriptor becomes readable or ends in that time; `select` is limited to descriptors up to 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1e3))


def send(pid: int, which: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, which)


def _pid_of(pidfd: int) -> int | None:
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        for line in file:
            if line.startswith("Pid:"):
                pid = int(line.split()[1])
                return pid if pid > 0 else None
    return None


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of a process."""
    found = []
    pending = [pid]
    while pending:
        children = _children(pending.pop())
        found += children
        pending += children
    return found


def offspring(pid: int) -> list[ProcessInfo]:
    """All descendants of a process that have not ended."""
    found = {}
    pending = [(child, pid) for child in _children(pid)]
    while pending:
        one, parent = pending.pop()
        if one in found:  # it was given to another parent meanwhile
            continue
        pending += [(child, one) for child in _children(one)]
        with contextlib.suppress(OSError):
            if state(one) not in "ZX":
                found[one] = ProcessInfo(one, parent, command_line(one), descriptors(one))
    return sorted(found.values(), key=lambda info: info.pid)
