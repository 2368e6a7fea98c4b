"""Errors of environments in workers and of fleets, and the counts of a worker."""

from __future__ import annotations

import operator
from typing import NamedTuple


class EnvFailure(Exception):
    """Raised if an environment in a worker failed.

    Attributes:
        index: which environment of a vector environment; None elsewhere.
        during: the call it happened in (``"step"``, ``"reset"``, ``"restore"`` …).
        remote_traceback: the traceback in the worker; empty where there is none.
    """

    index: int | None = None
    during: str = ""
    remote_traceback: str = ""


class WorkerDied(EnvFailure):
    """The worker process of an environment ended; its state is lost except for snapshots."""


class CallTimedOut(EnvFailure, TimeoutError):
    """An environment took longer than allowed; its worker was ended."""


class FleetError(RuntimeError):
    """The cluster of a fleet cannot be reached, or has no room for workers; the message says what was expected."""


class HostCounts(NamedTuple):
    """Counts of a worker: what it did since it started, and what it holds now."""

    created: int = 0
    """Environments made in it, forks included."""
    resets: int = 0
    restores: int = 0
    snapshots: int = 0
    steps: int = 0
    written: int = 0
    """Bytes that it wrote to the store of its snapshots."""
    environments: int = 0
    """Environments that live in it now."""
    kept: int = 0
    """Snapshots that it keeps now."""
    kept_bytes: int = 0
    """Bytes of their durable forms, of those that have been encoded."""

    def plus(self, other: HostCounts) -> HostCounts:
        """The sum of two workers' counts."""
        return HostCounts(*map(operator.add, self, other))

    def ended(self) -> HostCounts:
        """The counts once the worker has ended: it did as much, and holds nothing."""
        return self._replace(environments=0, kept=0, kept_bytes=0)
