"""`Expert`: the effect of noise. The environment's tests check that it wins every embedded task without noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.expert import Expert, slips
from sandboxgym.envs.swebench.rows.tasks import Task

TASKS = list(mini.tasks())


def plan(task: Task, seed: int, **options: Any) -> tuple[str, ...]:
    """The commands of an episode in which nothing surprises."""
    expert = Expert(lambda: task, tools="bash", rng=random.Random(seed), **options)
    expert.reset("")
    actions = [expert.act("")]
    while actions[-1] != "submit":
        actions.append(expert.act(""))
    return tuple(actions)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.instance_id)
def test_a_careless_expert_errs_in_few_ways(task: Task) -> None:
    right = {plan(task, seed, direct=True) for seed in range(8)}
    wrong = {plan(task, seed, direct=True, careless=1.0) for seed in range(16)}
    half = [plan(task, seed, direct=True, careless=0.5) for seed in range(32)]
    assert len(right) == 1 and not right & wrong
    assert len(wrong) == (1 if task.demonstration else 2)
    assert set(half) == right | wrong
    assert 8 <= sum(actions in right for actions in half) <= 24
    assert half == [plan(task, seed, direct=True, careless=0.5) for seed in range(32)]


def test_without_carelessness_nothing_else_is_drawn() -> None:
    for seed in range(8):
        assert plan(TASKS[0], seed) == plan(TASKS[0], seed, careless=0.0)


def test_slips_are_of_the_solution_given() -> None:
    assert slips([], by_lines=True) == [[]]


def play(env: Any, task: Task, actions: Iterable[str]) -> dict[str, Any]:
    """The last info of an episode."""
    env.reset(options={"instance_id": task.instance_id})
    info = [env.step(action) for action in actions][-1][4]
    assert isinstance(info, dict) and info["verdict"] is not None
    return info


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.instance_id)
def test_a_slip_never_resolves_a_task(task: Task, make_env: Callable[..., Any]) -> None:
    env = make_env(max_episode_steps=50)
    for actions in sorted({plan(task, seed, direct=True, careless=1.0) for seed in range(16)}):
        assert not play(env, task, actions)["resolved"], actions
    assert not play(env, task, plan(task, 0, careless=1.0))["resolved"]


@pytest.mark.slow
def test_carelessness_with_an_editor(make_env: Callable[..., Any]) -> None:
    env, task = make_env(tools="swe-agent", max_episode_steps=50), TASKS[2]
    patches = set()
    for seed in range(8):
        expert = env.unwrapped.expert(rng=random.Random(seed), careless=1.0)
        observation, info = env.reset(options={"instance_id": task.instance_id})
        expert.reset(observation)
        while info["verdict"] is None:
            observation, *_, info = env.step(expert.act(observation))
        assert not info["resolved"]
        patches.add(info["patch"])
    assert len(patches) == 2 and "" in patches
