"""Asynchronous rollouts in which environments fail: what is dropped, and what goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from asynchronous_cases import (  # noqa: F401 - fixtures
    SCHEDULES,
    Slow,
    Thinking,
    Watched,
    envs,
    held,
    paths,
    perhaps_held,
    rolled,
    whole,
)
from failing_envs import Fragile, Mortal, Refusing, let_fail
from test_tree import Forks, Wanderer

from sandboxgym.tree import (
    Action,
    Context,
    Envs,
    Failure,
    PathKey,
    Schedule,
    rollout,
)

# ruff: noqa: F811


@pytest.fixture
def fates(monkeypatch: pytest.MonkeyPatch, held: list[Any]) -> None:
    """Environments whose calls may fail, to take a snapshot and to restore one included."""
    let_fail(monkeypatch)


def doomed(fate: Callable[[str, int], bool], schedule: Schedule, **kwargs: Any) -> tuple[list[Any], list[Failure]]:
    """Trees of three tasks, and the failures."""
    Mortal.fate, Mortal.calls, Mortal.closed = staticmethod(fate), Counter(), []  # type: ignore[assignment]
    failures: list[Failure] = []
    policy = Slow(Thinking())
    with Envs(lambda: Mortal(gym.make("toys/Dice-v0")), threads=kwargs.pop("threads", 3)) as envs:
        trees = rolled(envs, policy, schedule, tasks=[None] * 3, seed=(3,), failures=failures, **kwargs)
        assert sum(env.dead for env in Mortal.closed) == len(failures)
    policy.check()
    return trees, failures


@pytest.mark.parametrize("name", ["causal", "entropy", "nested", "both"])
@pytest.mark.parametrize("call", ["reset", "snapshot", "restore", "step"])
@pytest.mark.parametrize("max_live", [3])
def test_an_environment_that_fails_changes_nothing(fates: None, name: str, call: str, max_live: int) -> None:
    intact, none = doomed(lambda *_: False, SCHEDULES[name], max_live=max_live)
    times = Mortal.calls[call]
    assert none == []
    for nth in {0, times // 2, times - 1}:
        trees, failures = doomed(
            lambda kind, before, nth=nth: (kind, before) == (call, nth), SCHEDULES[name], retries=1, max_live=max_live
        )
        assert [failure.dropped for failure in failures] == [0]
        assert f"gone at {call}" in failures[0].error
        assert whole(trees) == whole(intact)


@pytest.mark.parametrize("name", ["entropy", "nested", "both", "watched"])
@pytest.mark.parametrize("period", [5, 11])
def test_many_failures_change_nothing_but_what_they_drop(fates: None, name: str, period: int) -> None:
    intact = paths(doomed(lambda *_: False, SCHEDULES[name])[0])
    trees, failures = doomed(lambda call, before: before % period == 2, SCHEDULES[name], retries=2)
    found = paths(trees)
    assert found.items() <= intact.items()
    assert len(intact) - len(found) >= sum(failure.dropped > 0 for failure in failures)
    for index, key in found:  # nothing is left of what its prefix was dropped with
        assert all((index, key[:end]) in found for end in range(2, len(key), 2))
    for tree in trees:
        edges = {id(edge) for edge in tree.edges()}
        assert {id(edge) for edge in tree.root.children} <= edges
        assert all(id(child) in edges for edge in tree.edges() for child in edge.child.children)


class Breaking(Thinking):
    """Breaks the environment of some paths, every time."""

    def __init__(self, *victims: tuple[int, PathKey, int]) -> None:
        self.victims = victims

    def _act(self, context: Context) -> Action:
        action = super()._act(context)
        if (*context.path, context.depth) in self.victims:
            action.text = "break"
        return action


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("max_live", [1, 3, 100])
def test_what_is_dropped_and_what_is_told_of_it_are_those_of_lockstep(
    held: list[Any], late: bool, max_live: int
) -> None:
    """Failures in the same order, though forks of a dropped path may have ended before it is dropped."""
    victims = [(1, (0, 0), 5), (0, (0, 1), 0), (2, (0, 0, 1, 1), 3), (0, (0, 0, 3, 2), 4), (2, (0, 2), 4)]
    kwargs: dict[str, Any] = {"tasks": [None] * 3, "seed": (3,), "retries": 2, "max_live": max_live}
    lost: tuple[list[Failure], list[Failure]] = [], []
    with Envs(lambda: Fragile(gym.make("toys/Dice-v0")), threads=3) as envs:
        expected = rollout(envs, Breaking(*victims), Forks(3, 1, 3, late=late), failures=lost[0], **kwargs)
        policy = Slow(Breaking(*victims))
        trees = rolled(envs, policy, Forks(3, 1, 3, late=late), failures=lost[1], **kwargs)
    assert whole(trees) == whole(expected)
    policy.check()

    def told(failures: list[Failure]) -> list[Any]:
        return [(one.task, one.path, one.depth, one.error, one.dropped > 0) for one in failures]

    assert told(lost[1]) == told(lost[0])
    assert len(lost[0]) == 3 * len(victims)


@pytest.mark.parametrize("schedule", [Forks(2, 1), Watched(2, 1)])
def test_a_path_that_is_dropped_takes_the_forks_that_are_on_their_way_with_it(
    held: list[Any], schedule: Schedule
) -> None:
    """The policy's calls for them are cancelled."""
    cancelled: list[PathKey] = []
    forked = asyncio.Event()

    class Patient(Breaking):
        async def decide(self, context: Context) -> Action | None:
            if len(context.path[1]) > 2:
                forked.set()
                try:
                    await asyncio.sleep(300)
                except asyncio.CancelledError:
                    cancelled.append(context.path[1])
                    raise
            elif context.depth == 3:
                await forked.wait()
            return self._act(context)

    policy, failures = Patient((0, (0, 0), 3)), list[Failure]()
    with Envs(lambda: Fragile(gym.make("toys/Dice-v0")), threads=3) as envs:
        (tree,) = rolled(envs, policy.decide, schedule, retries=1, failures=failures)
    assert [path.key for path in tree.paths] == [(0, 1)]
    assert 1 <= len(cancelled) <= 2 and {key[:2] for key in cancelled} == {(0, 0)}
    assert failures[-1].dropped in (2, 3)  # itself, and the forks that had started


def test_a_task_that_cannot_be_reset_to_is_left_out(fates: None) -> None:
    lost: tuple[list[Failure], list[Failure]] = [], []
    with Envs(lambda: Mortal(Refusing(gym.make("toys/Dice-v0")))) as envs:
        kwargs: dict[str, Any] = {"tasks": [0, 1, 2], "retries": 1}
        schedule = Schedule({0: 2, 1: 3, 2: 1})
        expected = rollout(envs, Wanderer(), schedule, failures=lost[0], **kwargs)
        assert whole(rolled(envs, Slow(Wanderer()), schedule, failures=lost[1], **kwargs)) == whole(expected)
    assert lost[0] == lost[1] and [failure.dropped for failure in lost[0]] == [0, 3]
