"""Prometheus metrics of a fleet, through the endpoint that Ray has on every node.

A worker counts what it executes and holds, the owner of environments what it lost and recovered. Ray exports a name as
``ray_NAME``, a counter as ``ray_NAME_total``, with the node, the process and the job as labels.
"""

from __future__ import annotations

import logging
from typing import Any

from sandboxgym.workers.failures import HostCounts

logger = logging.getLogger("sandboxgym")

COUNTERS = {
    "created": ("sandboxgym_environments_created", "Environments made in a worker"),
    "resets": ("sandboxgym_resets", "Resets of environments"),
    "steps": ("sandboxgym_steps", "Steps of environments"),
    "snapshots": ("sandboxgym_snapshots", "Snapshots taken"),
    "restores": ("sandboxgym_restores", "Snapshots restored"),
    "written": ("sandboxgym_store_bytes", "Bytes written to the store of snapshots"),
}
"""Counters of a worker: fields of `HostCounts`, with names and descriptions."""
GAUGES = {
    "environments": ("sandboxgym_environments", "Environments that live in a worker"),
    "kept": ("sandboxgym_snapshots_kept", "Snapshots that a worker keeps"),
    "kept_bytes": ("sandboxgym_snapshots_kept_bytes", "Bytes of the durable forms of snapshots that a worker keeps"),
}
"""Gauges of a worker, likewise."""
SECONDS = ("sandboxgym_message_seconds", "Seconds in which a worker executed the calls of one message")
"""Histogram of a worker."""
BOUNDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
"""Upper bounds of its buckets."""
EVENTS = {
    "failures": ("sandboxgym_failures", "Environments lost in rollouts, by exception"),
    "recoveries": ("sandboxgym_recoveries", "Paths continued with another environment, by where the replay began"),
    "dropped": ("sandboxgym_paths_dropped", "Paths dropped because no environment could continue them"),
}
"""Counters of an owner, with the label ``kind``."""


class WorkerMeters:
    """The metrics of one worker, in its process."""

    def __init__(self) -> None:
        from ray.util import metrics

        self._before = HostCounts()
        self._counters = {field: metrics.Counter(*told) for field, told in COUNTERS.items()}
        self._gauges = {field: metrics.Gauge(*told) for field, told in GAUGES.items()}
        self._seconds = metrics.Histogram(*SECONDS, boundaries=BOUNDS)

    def update(self, counts: HostCounts, seconds: float) -> None:
        """Record the counts after a message that took some seconds."""
        for field, counter in self._counters.items():
            more = getattr(counts, field) - getattr(self._before, field)
            if more:
                counter.inc(more)
        for field, gauge in self._gauges.items():
            gauge.set(getattr(counts, field))
        self._seconds.observe(seconds)
        self._before = counts


class OwnerMeters:
    """The metrics of one owner of environments. There are none in a client of ``ray://``, which has no endpoint."""

    def __init__(self) -> None:
        import ray
        from ray.util import metrics

        self._counters: dict[str, Any] = {}
        if not ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call]
            self._counters = {event: metrics.Counter(*told, tag_keys=("kind",)) for event, told in EVENTS.items()}

    def count(self, event: str, kind: str, number: int = 1) -> None:
        """Count an event of `EVENTS`."""
        if event in self._counters and number:
            self._counters[event].inc(number, tags={"kind": kind})
