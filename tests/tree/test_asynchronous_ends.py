"""Ends of asynchronous rollouts: errors, cancellation, timeouts; nothing is left over."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import gymnasium as gym
import pytest
from asynchronous_cases import (  # noqa: F401 - fixtures
    SCHEDULES,
    Both,
    Slow,
    Thinking,
    counted,
    envs,
    forward,
    given_back,
    held,
    paths,
    perhaps_held,
    rolled,
)
from failing_envs import Fragile
from test_tree import Forks, Irregular, Wanderer

import sandboxgym.wrappers.jobs as jobs
from sandboxgym import register_wrapper
from sandboxgym.tree import (
    Action,
    Context,
    Envs,
    Failure,
    Node,
    Path,
    PathKey,
    RolloutTree,
    Schedule,
    asynchronous,
    rollout,
    rollout_async,
)

# ruff: noqa: F811


@pytest.mark.parametrize("failing", ["policy", "step", "snapshot", "schedule", "release"])
@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_left_over_after_an_error(
    held: list[Any], monkeypatch: pytest.MonkeyPatch, failing: str, late: bool
) -> None:
    class Failing(Slow):
        async def __call__(self, context: Context) -> Action | None:
            action = await super().__call__(context)
            if context.depth == 4 and failing == "policy":
                raise RuntimeError("broken")
            return Action("break") if context.depth == 4 and failing == "step" else action

        def release(self, path: tuple[int, PathKey]) -> None:
            if failing == "release":
                raise RuntimeError("broken")

    class Odd(Forks):
        def survival(self, tree: RolloutTree, path: Path, node: Node) -> float:
            if node.depth == 4 and failing == "schedule":
                raise RuntimeError("broken")
            return 1.0

    if failing == "snapshot":
        take = jobs.snapshot

        def taking(env: Any) -> Any:
            if len(held) >= 4:
                raise RuntimeError("broken")
            return take(env)

        monkeypatch.setattr(jobs, "snapshot", taking)
    made: list[Any] = []
    envs = Envs(counted(made, Fragile), threads=3)
    with pytest.raises((RuntimeError, ConnectionError), match="broken"):
        rolled(envs, Failing(Wanderer()), Odd(2, 1, 2, late=late), tasks=[None] * 4)
    assert given_back(envs, made)
    envs.close()


def test_the_error_keeps_its_cause(envs: Envs) -> None:
    async def policy(context: Context) -> Action:
        raise RuntimeError("later") from KeyError("first")

    with pytest.raises(RuntimeError, match="later") as caught:
        rolled(envs, policy, Schedule(2))
    assert isinstance(caught.value.__cause__, KeyError)


class Gated(gym.Wrapper):
    """Its third step waits until it is let go."""

    begun: threading.Event
    let_go: threading.Event
    steps: Counter[str]

    def step(self, action: Any):
        Gated.steps["begun"] += 1
        if Gated.steps["begun"] == 3:
            Gated.begun.set()
            assert Gated.let_go.wait(timeout=300)
        result = super().step(action)
        Gated.steps["ended"] += 1
        return result


register_wrapper(Gated)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cancel", ["once", "twice", "timeout"])
def test_a_cancelled_rollout_waits_for_calls_under_way_and_leaves_nothing(
    held: list[Any], monkeypatch: pytest.MonkeyPatch, late: bool, cancel: str
) -> None:
    for name, value in {"begun": threading.Event(), "let_go": threading.Event(), "steps": Counter()}.items():
        monkeypatch.setattr(Gated, name, value, raising=False)
    made: list[Any] = []
    envs = Envs(counted(made, Gated), threads=2)

    async def main() -> None:
        work = asyncio.create_task(rollout_async(envs, forward, Forks(3, 0, late=late), tasks=[None] * 2, max_live=4))
        while not Gated.begun.is_set():
            await asyncio.sleep(0.001)
        if cancel == "timeout":
            waiting = asyncio.create_task(asyncio.wait_for(work, 0.01))
        else:
            work.cancel()
            waiting = work
        await asyncio.sleep(0.05)
        if cancel == "twice":
            work.cancel()
            await asyncio.sleep(0.02)
        assert not work.done()
        Gated.let_go.set()
        with pytest.raises(TimeoutError if cancel == "timeout" else asyncio.CancelledError):
            await waiting
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert Gated.steps["begun"] == Gated.steps["ended"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sandboxgym-rollout")]
    assert given_back(envs, made)
    envs.close()


def test_a_rollout_cancelled_at_any_moment_leaves_nothing(held: list[Any]) -> None:
    made: list[Any] = []
    envs = Envs(counted(made, Irregular), threads=3)
    ended = Counter[str]()

    async def main(ticks: int) -> None:
        work = asyncio.create_task(
            rollout_async(envs, Slow(Thinking(), ticks), Both(2), tasks=[None] * 3, max_live=6, retries=ticks % 2)
        )
        for _ in range(ticks):
            await asyncio.sleep(0)
        work.cancel()
        try:
            await work
            ended["done"] += 1
        except asyncio.CancelledError:
            ended["cancelled"] += 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    for ticks in (0, 1, 2, 3, 4, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377):
        asyncio.run(main(ticks))
        assert all(snap.released for snap in held)
        assert given_back(envs, made)
        for env in made:
            envs.give(env)
    assert ended["cancelled"] > 5
    envs.close()


@pytest.mark.parametrize("name", ["at the root", "entropy", "nested", "watched", "at starts"])
def test_after_the_timeout_of_a_rollout_what_has_not_ended_is_dropped(
    held: list[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made: list[Any] = []
    envs = Envs(counted(made), threads=3)
    kwargs: dict[str, Any] = {"tasks": [None] * 3, "seed": (3,), "max_live": 5, "timeout": 10.0}
    intact = paths(rollout(envs, Thinking(), SCHEDULES[name], tasks=[None] * 3, seed=(3,)))
    passed: asyncio.Event

    class Late(Slow):
        def __init__(self, moment: int) -> None:
            super().__init__(Thinking(), moment)
            self.left = moment

        async def __call__(self, context: Context) -> Action | None:
            self.left -= 1
            if not self.left:
                passed.set()
            return await super().__call__(context)

    async def deadline(seconds: float) -> None:
        assert seconds == 10.0
        await passed.wait()

    monkeypatch.setattr(asynchronous, "_passed", deadline)
    kept = set[int]()
    for moment in (100_000, 1, 40, 60, 85, *range(20, 140, 7)):  # threads decide how much is done by when
        if len(kept) > 2 and moment not in (40, 60, 85):
            break
        passed, failures, policy = asyncio.Event(), list[Failure](), Late(moment)
        trees = rolled(envs, policy, SCHEDULES[name], retries=1, failures=failures, **kwargs)
        found = paths(trees)
        assert found.items() <= intact.items() and (len(found) < len(intact)) == bool(failures)
        assert all(tree.paths for tree in trees)
        assert all(each.dropped and "took longer than 10.0 s" in each.error for each in failures)
        assert all((index, key[:end]) in found for index, key in found for end in range(2, len(key), 2))
        policy.check()
        assert all(snap.released for snap in held) and given_back(envs, made)
        for env in made:
            envs.give(env)
        kept.add(len(found))
        if failures:
            passed, told = asyncio.Event(), list[Failure]()
            with pytest.raises(TimeoutError, match=r"the rollout took longer than 10.0 s"):
                rolled(envs, Late(moment), SCHEDULES[name], failures=told, **kwargs)
            assert told == []
    assert min(kept) == 0 and max(kept) == len(intact) and len(kept) > 2
    envs.close()


def test_after_the_timeout_no_environment_is_made_and_no_task_reset_to(
    perhaps_held: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work under way ends: here the first step of the first path, while others wait for an environment."""
    begun, let_go = threading.Event(), threading.Event()
    made: list[Any] = []

    def make() -> gym.Env[Any, Any]:
        if len(made) == 1:
            begun.set()
            assert let_go.wait(timeout=300)
        made.append(gym.make("toys/Dice-v0"))
        return made[-1]

    async def deadline(_: float) -> None:
        while not begun.is_set():
            await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_soon(let_go.set)

    monkeypatch.setattr(asynchronous, "_passed", deadline)
    envs, failures = Envs(make, threads=2), list[Failure]()
    assert (
        rolled(envs, forward, Schedule(2), tasks=range(9), max_live=4, retries=3, timeout=1.0, failures=failures) == []
    )
    assert len(made) == 2 and len(perhaps_held) <= 1
    assert sum(failure.dropped for failure in failures) == 2 * 9 and {failure.task for failure in failures} == set(
        range(9)
    )
    assert given_back(envs, made)
    envs.close()


def test_a_policy_that_keeps_a_cancellation_to_itself_does_not_go_on(envs: Envs) -> None:
    calls = Counter[str]()

    async def stubborn(context: Context) -> Action:
        calls["begun"] += 1
        try:
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            calls["cancelled"] += 1
        return Action(0)

    async def main() -> None:
        work = asyncio.create_task(rollout_async(envs, stubborn, Schedule(3)))
        while calls["begun"] < 3:
            assert not work.done()
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.01)

    asyncio.run(main())
    assert calls == {"begun": 3, "cancelled": 3}


def test_a_policy_that_cancels_its_own_call_is_an_error_and_no_missing_path(envs: Envs) -> None:
    async def cancelled(context: Context) -> Action:
        if context.path[1] == (0, 1) and context.depth == 2:
            raise asyncio.CancelledError
        return Action(0)

    with pytest.raises(RuntimeError, match=r"call for path \(0, \(0, 1\)\) was cancelled by the policy"):
        rolled(envs, cancelled, Schedule(3))


def test_what_is_no_asynchronous_policy_is_refused(envs: Envs) -> None:
    with pytest.raises(TypeError, match="expected the policy to be asynchronous"):
        rolled(envs, lambda context: Action(0), Schedule(1))
    with pytest.raises(ValueError, match="expected max_live to be at least 1, found 0"):
        rolled(envs, forward, Schedule(1), max_live=0)
    with pytest.raises(ValueError, match="at least 0, found -1"):
        rolled(envs, forward, Schedule(1), retries=-1)
    with pytest.raises(ValueError, match="expected a number of root paths for task 1 of the batch"):
        rolled(envs, forward, Schedule({0: 2}), tasks=[None, None])
    assert rolled(envs, forward, Schedule(1), tasks=[]) == []
