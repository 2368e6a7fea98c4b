"""Tests that a third party writes to certify its snapshots."""

from __future__ import annotations

import pytest
from lantern import ForgetfulLantern, Lantern

from sandboxgym.conformance import check_snapshot


def test_snapshots() -> None:
    check_snapshot(Lantern)


def test_a_forgotten_stream_is_found() -> None:
    with pytest.raises(AssertionError, match=r"restore\.trace_equality"):
        check_snapshot(ForgetfulLantern, only=["restore.trace_equality"])
