"""Search for a working CRIU."""

from __future__ import annotations

import os

import pytest

from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.checkpoint import criu, selftest


@pytest.mark.skipif(os.geteuid() != 0, reason="without root no CRIU is tried")
def test_a_program_is_given_up_after_two_failed_round_trips_and_not_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer holds for the life of a process, and a sandbox that was killed for want of memory proves nothing."""
    tried: list[str] = []

    def round_trip(program: str) -> None:
        tried.append(program)
        if program == "/never" or len(tried) == 3:
            raise SandboxError(f"failure {len(tried)}")

    monkeypatch.setattr(selftest, "round_trip", round_trip)
    found, reasons = criu._tried.__wrapped__(("/never", "/once"))
    assert (found, tried) == ("/once", ["/never", "/never", "/once", "/once"])
    assert len(reasons) == 1 and "/never" in reasons[0] and reasons[0].endswith("does not work here: failure 2")
