"""Fixtures of the tests of Harbor tasks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from components import missing

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "sandbox")]

from docker_image import docker_image as docker_image  # noqa: E402


def why_not(rootless: bool) -> str | None:
    from sandboxgym.sandbox.overlay.backend import why_unavailable

    if not rootless and os.geteuid() != 0:
        return "this process is not root"
    return why_unavailable(rootless=rootless)


@pytest.fixture
def sandboxes() -> None:
    """Skip where no sandbox isolates."""
    if (reason := why_not(False)) and why_not(True):
        missing("overlay", reason)


@pytest.fixture
def with_criu(sandboxes: None) -> None:
    """Skip where running processes cannot be captured."""
    from sandboxgym.sandbox.base import SandboxUnavailable
    from sandboxgym.sandbox.sandbox import make_sandbox

    try:
        make_sandbox("overlay", snapshot="full").close()
    except SandboxUnavailable as error:
        missing("criu", str(error))
