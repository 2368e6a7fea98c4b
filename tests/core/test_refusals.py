"""Refused requests are logged by default, and no client can fill a disk with the lines."""

from __future__ import annotations

import logging

import pytest

from sandboxgym.system import refusals
from sandboxgym.system.refusals import Refusals, tell


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_first_of_a_kind_from_a_client_is_a_warning_and_again_after_an_hour(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now)
    made = Refusals()
    caplog.set_level(logging.INFO, "sandboxgym")
    for client, kind in [("1.1.1.1", "401"), ("1.1.1.1", "401"), ("1.1.1.1", "429"), ("2.2.2.2", "401")]:
        made.tell(client, kind, "no key")
    assert warnings(caplog) == [
        "refused 1.1.1.1: 401: no key",
        "refused 1.1.1.1: 429: no key",
        "refused 2.2.2.2: 401: no key",
    ]
    assert len(caplog.records) == 4  # the repeated one is there for those who want to see all
    now = refusals.AGAIN + 1
    made.tell("1.1.1.1", "401", "no key")
    assert len(warnings(caplog)) == 4


def test_many_clients_bring_about_a_bounded_number_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    made = Refusals()
    for number in range(refusals.MOST + 100):
        made.tell(str(number), "401", "x" * 10**6)
    lines = warnings(caplog)
    assert len(lines) == refusals.MOST and max(map(len, lines)) < 500
    assert lines[-1].endswith("further warnings are left out for an hour")


def test_a_client_writes_no_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    tell(("::1", 7), "test_a_client_writes_no_lines", "no\nERROR root: the disk is broken\x1b[2J")
    assert warnings(caplog) == [
        "refused ::1: test_a_client_writes_no_lines: 'no\\nERROR root: the disk is broken\\x1b[2J'"
    ]
