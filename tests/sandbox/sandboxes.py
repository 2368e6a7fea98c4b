"""Sandboxes for the tests of shells and snapshots: each kind that works on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from components import missing

from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

Maker = Callable[..., Sandbox]
KINDS = [
    "overlay",
    "overlay-rootless",
    "copy",
]
"""Backends on which the tests of sandboxes run."""


def check(kind: str) -> None:
    """Skip backends that cannot run here."""
    if kind == "overlay" and os.geteuid() != 0:
        missing("overlay", "this process is not root")
    if kind.startswith("overlay"):
        from sandboxgym.sandbox.overlay.backend import why_unavailable

        if reason := why_unavailable(rootless=kind == "overlay-rootless"):
            missing("overlay", reason)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Name of a backend."""
    check(request.param)
    return str(request.param)


@pytest.fixture
def make(kind: str) -> Iterator[Maker]:
    """Make sandboxes, and close them afterwards."""
    made: list[Sandbox] = []

    def maker(**arguments: Any) -> Sandbox:
        made.append(make_sandbox(kind, allow_unsafe=True, **arguments))
        return made[-1]

    yield maker
    for sandbox in made:
        sandbox.close()


@pytest.fixture
def box(make: Maker) -> Sandbox:
    """A sandbox with nothing in it."""
    return make()


@pytest.fixture(scope="module")
def any_box() -> Iterator[Sandbox]:
    """Sandbox of any kind, one per module, for tests that do not depend on the backend."""
    with make_sandbox(allow_unsafe=True) as sandbox:
        yield sandbox
