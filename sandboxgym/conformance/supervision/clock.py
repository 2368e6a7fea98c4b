"""Clocks that other programs' load does not change: processor time, and wall time without waits for a processor.

1. A thread that waited for a processor is no slow environment. The kernel counts that wait
   (``/proc/thread-self/schedstat``); it is subtracted from every time here.
2. Other waits (for a child, a container, a disk) include waits for processors as those of this thread do: they count
   with the share of the requested time that this thread got.
3. Where another process is waited for, time counts by the share that one process more gets (`fair_share`).
4. The functions are bound when this module is imported: checks that move the clocks of `time` do not move these.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

LEAST_SHARE = 0.05
"""The smallest share of its time that a thread is taken to have got, so that pure waiting ends too."""
_SETTLED = 0.02
"""Runnable seconds of a thread before its share is meaningful."""


def delayed() -> float:
    """Seconds that this thread was runnable without a processor; 0 where the kernel doesn't count them."""
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(os.read(descriptor, 64).split()[1]) * 1e-9
    except (IndexError, ValueError, OSError):
        return 0.0
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class Stopwatch:
    """Time since its creation, in seconds, by the clocks that budgets are counted in."""

    _wall: float = field(default_factory=perf_counter)
    _busy: float = field(default_factory=process_time)
    _own: float = field(default_factory=thread_time)
    _delayed: float = field(default_factory=delayed)

    @property
    def busy(self) -> float:
        """Processor time of this process, all its threads together."""
        return process_time() - self._busy

    @property
    def share(self) -> float:
        """Fraction of this thread's runnable time in which it ran: 1 on an otherwise idle machine."""
        own, lost = thread_time() - self._own, max(0.0, delayed() - self._delayed)
        return max(LEAST_SHARE, own / (own + lost)) if own + lost > _SETTLED else 1.0

    @property
    def elapsed(self) -> float:
        """Estimated wall time on an otherwise idle machine."""
        wall, own, lost = perf_counter() - self._wall, thread_time() - self._own, delayed() - self._delayed
        waited = max(0.0, wall - own - max(0.0, lost))
        return min(wall, own + waited * self.share)

    def spent(self, limit: float) -> bool:
        """True if a limit is used up, by the processor or, where waiting counts half, on the undisturbed wall clock."""
        if self.busy > limit:
            return True
        return perf_counter() - self._wall > 2 * limit and self.elapsed > 2 * limit


def fair_share() -> float:
    """Fraction of a processor that one more process gets now, by the number of those that want one; 1 if unknown."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 1.0
    return max(LEAST_SHARE, min(1.0, _processors() / max(1, running - 1)))  # without this thread


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def timed(action: Callable[[], Any]) -> float:
    """Seconds of a call, without the waits of this thread for a processor."""
    before = delayed()
    start = perf_counter()
    action()
    seconds = perf_counter() - start
    return max(1e-9, seconds - max(0.0, delayed() - before))
