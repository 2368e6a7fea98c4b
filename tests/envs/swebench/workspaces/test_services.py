"""The embedded tasks with a running process: full forks solve them, forks of the files do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from components import missing

from sandboxgym.envs.swebench import mini
from sandboxgym.sandbox.checkpoint import criu

pytestmark = pytest.mark.slow

SERVICES = {
    "copperfield__letterbox-6": "python -m letterbox.serve",
    "brightwater__framelink-8": "python -q -i",
    "hollowell__pressroom-11": "python -m pressroom.watch site",
}
"""Service that runs half-way through each task, as commands and ``lossy`` name it."""
PATIENT = {"seconds": 600.0}
"""A slow machine must not end a command that waits for its service."""
Env = gym.Env[Any, Any]
Maker = Callable[..., Any]


@pytest.fixture
def whole(official_code: None) -> None:
    """Skips where processes cannot be captured."""
    if reason := criu.why_unavailable():
        missing("criu", reason)


def planned(env: Env, name: str) -> list[str]:
    """Begin a task: what the expert will do, whatever it sees."""
    env.reset(options={"instance_id": name})
    expert = env.unwrapped.expert(rng=random.Random(0))  # type: ignore[attr-defined]
    expert.reset("")
    actions: list[str] = []
    while "submit" not in actions:
        actions.append(expert.act(""))
    return actions


def played(env: Env, actions: list[str]) -> dict[str, Any]:
    """Act; the last info."""
    info: dict[str, Any] = {}
    for action in actions:
        *_, info = env.step(action)
    return info


def test_these_are_the_tasks_with_a_demonstration() -> None:
    assert [task.instance_id for task in mini.tasks() if task.demonstration] == list(SERVICES)


@pytest.mark.parametrize(("name", "backend"), [*zip(SERVICES, ("docker", "overlay-rootless", "copy"))])
def test_the_expert_solves_them_without_forks(
    name: str, backend: str, backend_of: Callable[[str], dict[str, Any]], make_env: Maker
) -> None:
    env = make_env(**backend_of(backend), limits=PATIENT)
    info = played(env, planned(env, name))
    assert info["verdict"] == "resolved", info["tests_status"]


@pytest.mark.parametrize("snapshot", ["auto", "full"])
@pytest.mark.parametrize("name", SERVICES)
def test_forks_with_the_service_solve_the_task(name: str, snapshot: str, whole: None, make_env: Maker) -> None:
    env = make_env(snapshot=snapshot, strict=True, limits=PATIENT)
    actions = planned(env, name)
    half = len(actions) // 2
    assert played(env, actions[:half])["lossy"] == []
    children = env.fork(2)
    for child in children:
        info = played(child, actions[half:])
        child.close()
        assert info["verdict"] == "resolved", info["tests_status"]


@pytest.mark.parametrize("name", SERVICES)
def test_forks_of_the_files_do_not(name: str, backend_of: Callable[[str], dict[str, Any]], make_env: Maker) -> None:
    """Nor do they if they start the service anew; where it still runs, the same actions solve the task."""
    env = make_env(**backend_of("overlay"), limits=PATIENT)
    actions = planned(env, name)
    first, rest = actions[: len(actions) // 2], actions[len(actions) // 2 :]
    lossy = played(env, first)["lossy"]
    assert any(SERVICES[name] in lost for lost in lossy), lossy
    (start,) = (action for action in first if SERVICES[name] in action)
    left, anew = env.fork(2)
    for child, its in ((left, rest), (anew, [start, *rest])):
        info = played(child, its)
        child.close()
        assert info["verdict"] == "tests fail"
    assert played(env, rest)["verdict"] == "resolved"
