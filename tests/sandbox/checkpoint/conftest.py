"""Sandboxes with full snapshots, for all tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from components import missing
from full_sandboxes import Maker
from sandbox.overlay_boxes import runtime_folder as runtime_folder

from sandboxgym.sandbox.checkpoint import criu
from sandboxgym.sandbox.overlay.backend import REPLACED
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox


@pytest.fixture(scope="module")
def criu_found() -> None:
    """Skip tests where no CRIU can capture processes."""
    if reason := criu.why_unavailable():
        missing("criu", reason)


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes sandboxes with full snapshots, and closes them."""
    made: list[Sandbox] = []

    def maker(snapshot: Any = "full", **arguments: Any) -> Sandbox:
        made.append(make_sandbox("overlay", snapshot=snapshot, **arguments))
        return made[-1]

    yield maker
    for sandbox in made:
        sandbox.close()


@pytest.fixture
def box(make: Maker) -> Sandbox:
    """A sandbox whose snapshots are always full."""
    return make()


@pytest.fixture
def everywhere() -> Iterator[Callable[[Sandbox], list[Sandbox]]]:
    """A sandbox with two forks of it, the forks first."""
    made: list[Sandbox] = []

    def fork(sandbox: Sandbox) -> list[Sandbox]:
        children = sandbox.fork(2, strict=True)
        made.extend(children)
        return [*children, sandbox]

    yield fork
    for child in made:
        child.close()


@pytest.fixture(params=["left running", "replaced"])
def both(request: pytest.FixtureRequest, box: Sandbox) -> Sandbox:
    """The sandbox, in both ways of capturing its processes."""
    if request.param == "replaced":
        backend: Any = box.backend
        backend.copied = REPLACED
    return box
