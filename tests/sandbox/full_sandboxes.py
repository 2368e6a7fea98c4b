"""Sandboxes of full snapshots, and what is said and typed in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from components import missing
from sandbox.overlay_boxes import python, runtime_folder  # noqa: F401 - a fixture

from sandboxgym.sandbox.checkpoint import criu
from sandboxgym.sandbox.overlay.backend import REPLACED
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

LONG = 120.0
"""Seconds that anything may take on a busy machine."""
WAIT = "until %s; do sleep 0.02; done"
Maker = Callable[..., Sandbox]


@pytest.fixture(scope="module", autouse=True)
def _criu() -> None:
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


Everywhere = Callable[[Sandbox], list[Sandbox]]


def container(sandbox: Sandbox) -> Any:
    backend: Any = sandbox.backend
    return backend.container


@pytest.fixture(params=["left running", "replaced"])
def both(request: pytest.FixtureRequest, box: Sandbox) -> Sandbox:
    """The sandbox, in both ways of capturing its processes."""
    if request.param == "replaced":
        backend: Any = box.backend
        backend.copied = REPLACED
    return box


def said(sandbox: Sandbox, command: str) -> str:
    result = sandbox.execute(command, timeout=LONG)
    assert not result.timed_out, result
    return result.output


def typed(sandbox: Sandbox, text: str, until: str = r">>> $") -> str:
    """Answer of a program to a line that is typed to it."""
    answer = sandbox.interact(text, timeout=LONG, until=until)
    assert answer.running, answer
    return answer.output


# One instant


COUNTER = "i=0; while :; do i=$((i + 1)); echo $i >>/tmp/log; done &"
GAPS = "awk 'NR != $1' /tmp/log | head -3; tail -n 1 /tmp/log"
