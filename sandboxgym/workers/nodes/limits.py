"""Limits of what owners put on one node, and the gate at which an environment waits until there is room."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sandboxgym.workers.env_host import FleetError
from sandboxgym.workers.fleet_status import Usage

logger = logging.getLogger("sandboxgym")

_PAUSE = 0.05
"""Seconds between two looks for room."""


class FleetFull(FleetError):
    """Raised if no node of a fleet had room within the deadline; the message says which limit was reached."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per node; None: no limit.

    Raises:
        ValueError: one is not above 0.
    """

    creations_per_second: float | None = None
    """Environments that one owner makes there per second, after as many at once (at least one)."""
    environments: int | None = None
    """Environments of all owners that live there at a time."""
    snapshot_bytes: int | None = None
    """Bytes of the snapshots that the workers of all owners keep there, above which no environment is made."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} to be above 0, or None, found {value}")


class Gate:
    """Admission of environments to nodes within their limits.

    Args:
        limits: per node.
        usage: gives what there is on each node, by its id.
        deadline: seconds that a caller waits for room; None: as long as it takes.
        clock: seconds now.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        limits: Limits,
        usage: Callable[[], Mapping[str, Usage]],
        *,
        deadline: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.limits = limits
        self._usage, self._deadline, self._clock, self._sleep = usage, deadline, clock, sleep
        self._free_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self.waited = 0.0
        """Seconds that callers have waited for room."""

    def refusal(self, node: str, usage: Mapping[str, Usage]) -> str:
        """Reason for which no environment may be made on a node now; empty where one may."""
        here, limits = usage.get(node, Usage()), self.limits
        if limits.environments is not None and here.environments >= limits.environments:
            return f"node {node[:8]} has {here.environments} of {limits.environments} environments"
        if limits.snapshot_bytes is not None and here.snapshot_bytes >= limits.snapshot_bytes:
            return f"node {node[:8]} keeps {here.snapshot_bytes:,} of {limits.snapshot_bytes:,} bytes of snapshots"
        rate = limits.creations_per_second
        if rate is not None and self._free_at.get(node, 0.0) > self._clock() + max(0.0, 1.0 - 1.0 / rate):
            return f"node {node[:8]} makes {rate:g} environments per second"
        return ""

    def created(self, node: str) -> None:
        """Count an environment that is about to be made on a node."""
        rate = self.limits.creations_per_second
        if rate is not None:
            with self._lock:
                self._free_at[node] = max(self._free_at.get(node, 0.0), self._clock()) + 1.0 / rate

    def admitted(self, places: Callable[[], Sequence[tuple[int, str, bool]]]) -> list[int]:
        """Places where the next environment may be; waits until there is one, and says in the log for what.

        Args:
            places: gives the number of each place, its node, and whether an idle environment is there.

        Raises:
            FleetFull: there is none within the deadline.
        """
        began, told = self._clock(), False
        while True:
            offered, usage = places(), self._usage()
            refusals = {at: "" if idle else self.refusal(node, usage) for at, node, idle in offered}
            found = [at for at, reason in refusals.items() if not reason]
            waited = self._clock() - began
            if found:
                self.waited += waited
                return found
            reasons = "; ".join(sorted(set(refusals.values())))
            if self._deadline is not None and waited >= self._deadline:
                raise FleetFull(
                    f"expected room for an environment within {self._deadline:g} s, found none: {reasons}. "
                    "Raise the limits, add nodes, or let fewer paths live at a time"
                )
            if not told:
                logger.warning("an environment waits for room: %s", reasons)
                told = True
            self._sleep(_PAUSE)
