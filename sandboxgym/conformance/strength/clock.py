"""The time that trials may take: processor time, or half of the wall time if an environment waits."""

from __future__ import annotations

import time


class Clock:
    """A time limit in seconds from its creation, in processor time or, if that is more, half of the wall time."""

    def __init__(self, limit: float, *, waits: bool) -> None:
        self.limit, self.waits = limit, waits
        self.busy, self.start = time.process_time(), time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds that count so far."""
        waited = (time.perf_counter() - self.start) / 2 if self.waits else 0.0
        return max(time.process_time() - self.busy, waited)

    @property
    def over(self) -> bool:
        """True once more than the limit has passed."""
        return self.spent > self.limit
