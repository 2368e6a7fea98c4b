"""Fixtures of the SWE-bench tests: backends that work here, and the recorded rows."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from components import missing
from docker_image import docker_image as docker_image

import sandboxgym  # noqa: F401  registers the ids
from sandboxgym.envs.swebench.rows.tasks import TaskSet, open_tasks


@pytest.fixture(scope="session")
def official_code() -> None:
    """Skip where swebench is not installed."""
    if importlib.util.find_spec("swebench") is None:
        missing("swebench", "swebench is not installed")


def check_backend(name: str) -> None:
    """Skip backends that cannot run here."""
    if name == "overlay" and os.geteuid() != 0:
        missing("overlay", "this process is not root")
    if name.startswith("overlay"):
        from sandboxgym.sandbox.overlay.backend import why_unavailable

        if reason := why_unavailable(rootless=name == "overlay-rootless"):
            missing("overlay", reason)


@pytest.fixture
def backend_of(request: pytest.FixtureRequest, official_code: None) -> Callable[[str], dict[str, Any]]:
    """Arguments of an environment with a backend of this name."""

    def arguments(name: str) -> dict[str, Any]:
        check_backend(name)
        if name == "docker":
            return {"backend": name, "image": request.getfixturevalue("docker_image")}
        return {"backend": name, "allow_unsafe": name == "copy"}

    return arguments


@pytest.fixture(scope="session")
def quick_backend(official_code: None) -> dict[str, Any]:
    """Arguments for the best backend of this machine."""
    return {"backend": "auto", "allow_unsafe": True}


@pytest.fixture
def make_env(quick_backend: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Make environments, and close them afterwards."""
    made: list[Any] = []

    def make(**arguments: Any) -> Any:
        made.append(gym.make("sandboxgym/SWEBench-v0", **{**quick_backend, **arguments}))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture(scope="session", autouse=True)
def prepared_tasks_are_given_back() -> Iterator[None]:
    yield
    module = sys.modules.get("sandboxgym.envs.swebench.workspaces.workspace")
    if module is not None:
        module.forget_prepared()
        gc.collect()  # what is in use would not be removed
        module.prepared.clear()


@pytest.fixture(scope="session")
def verified_file(parity_data: Path) -> Path:
    path = parity_data / "swebench" / "verified_rows.jsonl"
    if not path.is_file():
        missing("data", f"{path} is not there")
    return path


@pytest.fixture(scope="session")
def verified(verified_file: Path) -> TaskSet:
    return open_tasks(verified_file)
