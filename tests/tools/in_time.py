"""Have a run end in time on a slow machine: after a moment that SANDBOXGYM_UNTIL names no slow test begins.

    SANDBOXGYM_UNTIL=$(($(date +%s) + 3600)) python -m pytest -n 3 --dist loadgroup

Tests without the mark ``slow`` run whatever the time is. Those that were left out are counted in the last paragraph and
named in a file, which `.ci/run` shows at its end. Every run begins with another module, so that it is not always the
same ones; the tests of the group that takes one worker longest come first.

Hooks of pytest, which `conftest.py` takes from here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "SANDBOXGYM_UNTIL"
LONGEST = "ray"
"""Group that one worker has for longer than another one has any."""
REASON = "not begun: the time of this run was over"
LEFT_OUT = Path(".pytest_cache/left_out.txt")
"""File with the names of the tests that were left out, one per line."""

_until: float | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Read the moment.

    Raises:
        pytest.UsageError: the variable is no number.
    """
    global _until
    given = os.environ.get(VARIABLE)
    try:
        _until = float(given) if given else None
    except ValueError:
        raise pytest.UsageError(f"{VARIABLE}: expected seconds since 1970, found {given!r}") from None
    if not getattr(config.option, "numprocesses", None):  # runs that tests start are no part of this one
        os.environ.pop(VARIABLE, None)


def ordered(items: Sequence[pytest.Item], until: float) -> list[pytest.Item]:
    """The tests, those of the longest group first, then from a module on that depends on the moment."""
    modules = list(dict.fromkeys(item.path for item in items))
    first = int(until) % max(len(modules), 1)
    place = {path: (number - first) % len(modules) for number, path in enumerate(modules)}
    return sorted(items, key=lambda item: (not _in_longest(item), place[item.path]))


def _in_longest(item: pytest.Item) -> bool:
    return any(LONGEST in (*mark.args, mark.kwargs.get("name")) for mark in item.iter_markers("xdist_group"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _until is not None:
        items[:] = ordered(items, _until)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _until is not None and time.time() > _until and item.get_closest_marker("slow"):
        pytest.skip(REASON)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _until is None:
        return
    reports = terminalreporter.stats.get("skipped", [])
    names = sorted(report.nodeid for report in reports if REASON in str(report.longrepr))
    LEFT_OUT.parent.mkdir(exist_ok=True)
    LEFT_OUT.write_text("".join(f"{name}\n" for name in names))
    if names:
        terminalreporter.write_line(f"{len(names)} slow tests were NOT RUN: the time of this run was over", red=True)
