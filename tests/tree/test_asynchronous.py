"""Asynchronous rollouts: the trees of lockstep, whatever takes how long, and nothing left over."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable
from typing import Any

import gymnasium as gym
import pytest
from asynchronous_cases import (  # noqa: F401 - fixtures
    SCHEDULES,
    AtStarts,
    Both,
    Slow,
    Thinking,
    counted,
    envs,
    forward,
    held,
    perhaps_held,
    rolled,
    whole,
)
from test_tree import ForkEveryPath, Forks, Irregular, Picky, Tired, Wanderer

from sandboxgym import SnapshotEnv, register_wrapper
from sandboxgym.tree import (
    Action,
    AsyncPolicy,
    Clock,
    Context,
    Envs,
    Failure,
    ForkAt,
    PathKey,
    RolloutTree,
    Schedule,
    TopEntropy,
    rollout,
    rollout_async,
)
from sandboxgym.workers.pool import PooledEnvs

# ruff: noqa: F811


register_wrapper(Irregular)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("max_live", [1, 3, 1024])
def test_the_trees_are_those_of_lockstep(envs: Envs, held: list[Any], name: str, max_live: int) -> None:
    """To the order of the paths and of the children of every node, whichever answer and environment comes first."""
    kwargs: dict[str, Any] = {"tasks": [None] * 3, "seed": (3,), "max_live": max_live}
    expected = whole(rollout(envs, Thinking(), SCHEDULES[name], **kwargs))
    with Envs(lambda: Irregular(gym.make("toys/Dice-v0")), threads=4) as irregular:
        for shuffle in range(1 if max_live == 1 else 2):
            policy = Slow(Thinking(), shuffle)
            assert whole(rolled(irregular, policy, SCHEDULES[name], **kwargs)) == expected
            policy.check()
            assert policy.most <= max_live
            assert max_live == 1 or policy.most > 1


def test_the_schedules_of_these_tests_fork_and_stop_paths(envs: Envs) -> None:
    trees = {name: rollout(envs, Thinking(), schedule, tasks=[None] * 3) for name, schedule in SCHEDULES.items()}
    counts = {name: sum(len(tree.paths) for tree in found) for name, found in trees.items()}
    assert all(count > (12 if name == "independent" else 9) - (name == "independent") for name, count in counts.items())
    stopped = [path for tree in trees["roulette"] for path in tree.paths if path.edges[-1].child.stopped]
    assert 0 < len(stopped) < counts["roulette"]


def test_forks_that_several_siblings_request_at_one_state_have_the_numbers_of_lockstep(envs: Envs) -> None:
    for max_live in (1, 2, 3, 100):
        expected = whole(rollout(envs, Thinking(), AtStarts(3), max_live=max_live))
        assert len(expected[0][1]) > 5
        assert whole(rolled(envs, Slow(Thinking()), AtStarts(3), max_live=max_live)) == expected


def test_parts_of_a_batch_with_their_own_numbers_of_roots(envs: Envs) -> None:
    kwargs: dict[str, Any] = {"tasks": ["a", "b"], "indices": [4, 1], "seed": (1, 5)}
    schedule = Schedule({1: 3, 4: 2})
    assert whole(rolled(envs, Slow(Wanderer()), schedule, **kwargs)) == whole(
        rollout(envs, Wanderer(), schedule, **kwargs)
    )


def test_looking_ahead_is_that_of_lockstep(envs: Envs) -> None:
    """Also where it depends on the random stream of the first path that acts in a state."""

    def look(env: gym.Env[Any, Any], info: dict[str, Any]) -> Any:
        return (info["total"], str(env.unwrapped.np_random.bit_generator.state["state"]))

    for schedule in (SCHEDULES["causal"], SCHEDULES["both"], SCHEDULES["at the root"]):
        expected = whole(rollout(envs, Thinking(), schedule, seed=(2,), look=look))
        assert whole(rolled(envs, Slow(Thinking()), schedule, seed=(2,), look=look)) == expected


@pytest.mark.parametrize("policy", [Tired(3), Picky(), Tired(0)])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("max_live", [2, 1024])
def test_policies_without_room_end_paths_as_in_lockstep(
    envs: Envs, held: list[Any], policy: Wanderer, late: bool, max_live: int
) -> None:
    lost: tuple[list[Failure], list[Failure]] = [], []
    kwargs: dict[str, Any] = {"tasks": [None] * 3, "max_live": max_live}
    expected = rollout(envs, policy, Forks(2, 1, late=late), failures=lost[0], **kwargs)
    slow = Slow(policy)
    assert whole(rolled(envs, slow, Forks(2, 1, late=late), failures=lost[1], **kwargs)) == whole(expected)
    assert lost[0] == lost[1]
    slow.check()


def test_nobody_waits_for_a_slow_path_or_a_slow_environment() -> None:
    """Every other path ends, forks of its own included, while one is still at its first step."""
    others = threading.Event()

    class Waiting(gym.Wrapper):
        def step(self, action: Any):
            if action == "wait":
                assert others.wait(timeout=300)
                action = 0
            return super().step(action)

    class Watching(Slow):
        def release(self, path: tuple[int, PathKey]) -> None:
            super().release(path)
            if len(self.released) == 3 + 4 + 1:  # 8 paths but one, and the root of the other task
                others.set()

    class Late(Wanderer):
        def _act(self, context: Context) -> Action | None:
            action = super()._act(context)
            assert action is not None
            if context.path == (1, (0, 1)) and context.depth == 0:
                action.text = "wait"
            return action

    register_wrapper(Waiting)
    with Envs(lambda: Waiting(gym.make("toys/Dice-v0")), threads=8) as envs:
        policy = Watching(Late())
        trees = rolled(envs, policy, ForkAt([1], width=3, roots=2), tasks=[None] * 2)
    assert [len(tree.paths) for tree in trees] == [4, 4] and others.is_set()


def test_a_watched_path_is_captured_while_the_policy_decides() -> None:
    captured = threading.Event()

    class Dice(SnapshotEnv[int, int]):
        observation_space = action_space = gym.spaces.Discrete(100)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
            super().reset(seed=seed)
            self.count = 0
            return 0, {}

        def step(self, action: int):
            self.count += 1
            return self.count, 0.0, self.count > 3, False, {}

        def _capture(self) -> int:
            captured.set()
            return self.count

        def _apply(self, state: int) -> None:
            self.count = state

    async def policy(context: Context) -> Action:
        captured.clear()
        for _ in range(100_000):
            if captured.is_set():
                break
            await asyncio.sleep(0.001)
        else:
            raise AssertionError("not captured")
        return Action(0, entropy=1.0)

    with Envs(Dice) as envs:
        (tree,) = rolled(envs, lambda context: answer(policy, context), TopEntropy(1, width=2))
    assert tree.snapshots == 1 + 4


def answer(policy: AsyncPolicy, context: Context) -> Awaitable[Action | None]:
    """Only the first path waits for its snapshot: a fork is not captured."""
    return policy(context) if context.path[1] == (0, 0) else forward(context)


def test_no_more_environments_are_made_than_are_live_and_one_call_at_a_time_is_under_way_on_each() -> None:
    made: list[Any] = []

    class Alone(gym.Wrapper):
        at_work = 0

        def step(self, action: Any):
            self.at_work += 1
            assert self.at_work == 1
            time.sleep(0.0005)
            self.at_work -= 1
            return super().step(action)

    register_wrapper(Alone)
    with Envs(counted(made, Alone), threads=8) as envs:
        rolled(envs, Slow(Thinking()), Both(3), tasks=[None] * 4, max_live=5)
    assert len(made) == 5


def test_the_clock_tells_what_was_waited_for_and_counts_no_moment_twice(envs: Envs) -> None:
    clock, began = Clock(), time.perf_counter()
    rolled(envs, Slow(Thinking()), Both(2), tasks=[None] * 2, clock=clock)
    assert min(clock.policy, clock.steps, clock.snapshots) > 0
    assert clock.policy + clock.steps + clock.snapshots <= time.perf_counter() - began


def test_worker_processes_that_are_killed_change_nothing(envs: Envs) -> None:
    kwargs: dict[str, Any] = {"tasks": [None] * 2, "seed": (3,)}
    expected = whole(rollout(envs, Thinking(), SCHEDULES["causal"], **kwargs))
    failures: list[Failure] = []
    with PooledEnvs("toys/Dice-v0", 2) as pooled:

        class Killing(Thinking):
            calls = 0

            def _act(self, context: Context) -> Action:
                Killing.calls += 1
                if Killing.calls == 9:
                    pid = pooled._slots[0].worker.pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                return super()._act(context)

        policy, schedule = Slow(Killing()), SCHEDULES["causal"]
        assert whole(rolled(pooled, policy, schedule, retries=3, failures=failures, **kwargs)) == expected
    assert failures and not any(failure.dropped for failure in failures)


def test_what_a_task_returned_can_be_shown(envs: Envs) -> None:
    """`asyncio.run` asks for it at its end: all of a tree, written out, would take for ever."""
    (tree,) = rolled(envs, forward, ForkEveryPath(3))
    for shown in (tree, tree.root, tree.paths[-1], tree.paths[-1].edges[-1]):
        assert len(repr(shown)) < 500


@pytest.mark.parametrize("retries", [0, 1])
def test_an_environment_that_cannot_be_made_is_asked_for_again(envs: Envs, retries: int) -> None:
    """A worker may die at any moment, also while it makes an environment for a path that has yet to start."""
    made: list[Any] = []

    def make() -> gym.Env[Any, Any]:
        made.append(None)
        if len(made) == 3:
            raise ConnectionError("gone at make")
        return gym.make("toys/Dice-v0")

    with Envs(make, threads=3) as unlucky:
        if not retries:
            with pytest.raises(ConnectionError, match="gone at make"):
                rolled(unlucky, Slow(Thinking()), Schedule(5))
            return
        trees = rolled(unlucky, Slow(Thinking()), Schedule(5), retries=retries)
    assert whole(trees) == whole(rollout(envs, Thinking(), Schedule(5)))


def test_two_rollouts_share_an_event_loop(envs: Envs) -> None:
    async def main() -> list[list[RolloutTree]]:
        with Envs(lambda: gym.make("toys/Dice-v0")) as other:
            return await asyncio.gather(
                rollout_async(envs, Slow(Thinking()), Both(2), seed=(1,)),
                rollout_async(other, Slow(Thinking()), Both(2), seed=(2,)),
            )

    for seed, trees in zip((1, 2), asyncio.run(main()), strict=True):
        assert whole(trees) == whole(rollout(envs, Thinking(), Both(2), seed=(seed,)))
