"""Clocks that the load of other programs hardly changes: processor time, and wall time without waits for a processor.

1. A thread that waits for a processor does not make an environment slow. The kernel counts that wait
   (``/proc/thread-self/schedstat``), and `Stopwatch.elapsed` and `timed` subtract it.
2. Other waits (for a child, a container, a disk) include waits for a processor too. They are multiplied by the share of
   its runnable time in which this thread ran.
3. While another process is waited for, time is multiplied by the share of a processor that one more process gets
   (`fair_share`).
4. The clock functions are bound when this module is imported, so that checks that change the clocks of `time` do not
   change these.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

LEAST_SHARE = 0.05
"""Smallest value of a share, so that a limit also ends a thread that gets almost no processor time."""
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
        """True if ``limit`` seconds of processor time, or twice as many of `elapsed` time, have passed."""
        if self.busy > limit:
            return True
        return perf_counter() - self._wall > 2 * limit and self.elapsed > 2 * limit


def fair_share() -> float:
    """Fraction of a processor that one more process gets, by the number of runnable ones; 1 if that is unknown."""
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
