"""Limits of an API key at ``serve e2b``: how many sandboxes and snapshots, and how many requests in a second."""

from __future__ import annotations

import time
from dataclasses import dataclass


class RequestRefused(Exception):
    """A request that cannot be done, with the HTTP status and message of the answer."""

    def __init__(self, status: int, message: str, *, retry: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry = retry
        """Seconds after which it may be tried again; None: that is of no use."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of one API key."""

    sandboxes: int = 20
    """Live at one time, those that are being made among them."""
    kept: int = 100
    """Snapshots and paused sandboxes."""
    requests: float = 100.0
    """Requests of the control plane per second."""
    creations: float = 20.0
    """Sandboxes made per second; a fork of twenty counts as twenty."""
    longest: int = 86_400
    """Seconds of a sandbox's time limit at most."""


class Rate:
    """A token bucket that holds what ten seconds bring, and at least one request."""

    def __init__(self, each_second: float) -> None:
        self._rate, self._most = each_second, max(1.0, 10 * each_second)
        self._left, self._at = self._most, time.monotonic()

    def take(self, number: int = 1) -> None:
        """Count requests of a client against its rate.

        Raises:
            RequestRefused: they are too many.
        """
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < number:
            missing = (min(number, self._most) - self._left) / self._rate
            raise RequestRefused(429, f"rate limit of {self._rate:g} per second exceeded", retry=max(1.0, missing))
        self._left -= number
