"""Fixtures of the tests of Harbor tasks."""

from __future__ import annotations

import pytest
from components import missing
from docker_image import docker_image as docker_image
from task_folders import why_not


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
