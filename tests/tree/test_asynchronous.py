"""Asynchronous rollouts: the trees of lockstep, whatever takes how long, and nothing left over."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import pytest
from test_rollout_failures import Fragile, Mortal
from test_tree import ForkEveryPath, Forks, Irregular, Picky, Tired, Wanderer

import sandboxgym.wrappers.jobs as jobs
from sandboxgym import SnapshotEnv, register_wrapper, snapshot
from sandboxgym.tree import (
    Action,
    AsyncPolicy,
    Clock,
    Context,
    Envs,
    Failure,
    ForkAt,
    Node,
    Path,
    PathKey,
    RolloutTree,
    Schedule,
    TopEntropy,
    asynchronous,
    rollout,
    rollout_async,
)
from sandboxgym.workers.pool import PooledEnvs

register_wrapper(Irregular)


class Thinking(Wanderer):
    """A policy whose actions have entropies."""

    def _act(self, context: Context) -> Action:
        action = super()._act(context)
        assert action is not None
        action.entropy = float(context.rng.random())
        return action


class Slow:
    """A policy of one path at a time, its answers after random times; counts what it is told of paths."""

    def __init__(self, policy: Callable[[Sequence[Context]], Sequence[Action | None]], shuffle: int = 0) -> None:
        self.policy, self.pauses = policy, random.Random(shuffle)
        self.asked: set[tuple[int, PathKey]] = set()
        self.released: Counter[tuple[int, PathKey]] = Counter()
        self.at_work = self.most = 0

    async def __call__(self, context: Context) -> Action | None:
        parent = (context.path[0], context.path[1][:-2])
        assert context.path not in self.released
        assert context.path in self.asked or parent not in self.released
        self.asked.add(context.path)
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        try:
            await asyncio.sleep(self.pauses.choice([0, 0, self.pauses.random() / 300]))
            assert parent not in self.released or context.depth > context.path[1][-2]
        finally:
            self.at_work -= 1
        return self.policy([context])[0]

    def release(self, path: tuple[int, PathKey]) -> None:
        self.released[path] += 1

    def check(self) -> None:
        assert set(self.released.values()) <= {1}
        assert self.asked <= set(self.released)


class Online(Schedule):
    """Causal: a path forks where its entropy exceeds a threshold, at most twice from the root to a leaf."""

    def __init__(self, roots: int) -> None:
        super().__init__(roots)
        self.forked: set[Node] = set()

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        above = [edge.parent for edge in path.from_root()]
        used = len(self.forked.intersection(above))
        if node.depth == 0 or node in self.forked or used >= 2 or action.entropy < 0.6:
            return 0
        self.forked.add(node)
        return 2


class Roulette(Forks):
    """Paths that have gone far go on with probability 0.7."""

    def survival(self, tree: RolloutTree, path: Path, node: Node) -> float:
        return 0.7 if node.depth > 2 else 1.0


class Both(ForkEveryPath):
    """Forks before actions are executed and, of paths that have ended, at the highest entropies as well."""

    def watches(self, path: Path) -> bool:
        return path.key in ((0, 0), (0, 1))

    def after(self, tree: RolloutTree, path: Path) -> Iterable[tuple[Node, int]]:
        return TopEntropy(2, width=3).after(tree, path)


class Watched(Forks):
    """Forks before actions are executed, while every path is captured at every step."""

    def watches(self, path: Path) -> bool:
        return True

    def after(self, tree: RolloutTree, path: Path) -> Iterable[tuple[Node, int]]:
        return ()


class AtStarts(Schedule):
    """Forks at the state that a path starts from, which several paths leave."""

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        return int(not path.edges and path.key in ((0, 1), (0, 2), (0, 1, 2, 1))) + int(
            path.key == (0, 1) and node.depth == 2
        )


SCHEDULES = {
    "independent": Schedule(4),
    "causal": ForkAt([1, 3], width=3, roots=2),
    "at the root": ForkAt([0, 2], width=3, roots=2),
    "entropy": TopEntropy(3, width=2, roots=2),
    "online": Online(3),
    "roulette": Roulette(3, 1, 3),
    "roulette, late": Roulette(3, 1, 3, late=True),
    "nested": ForkEveryPath(2),
    "both": Both(2),
    "watched": Watched(2, 1, 3),
    "at starts": AtStarts(3),
}


def whole(trees: Iterable[RolloutTree]) -> list[Any]:
    """Everything about trees but the seconds, in order."""

    def of_node(node: Node) -> tuple[Any, ...]:
        children = [edge.path for edge in node.children]
        place = (node.depth, node.observation, node.owner, node.width, node.survival, node.stopped, node.ahead)
        return (*place, children)

    return [
        (
            (tree.task, tree.index, tree.snapshots, of_node(tree.root)),
            [
                (
                    path.key,
                    path.start.owner,
                    path.start.depth,
                    [
                        (edge.action.text, edge.action.memory, edge.reward, edge.terminated, of_node(edge.child))
                        for edge in path.edges
                    ],
                )
                for path in tree.paths
            ],
        )
        for tree in trees
    ]


def rolled(envs: Any, policy: Any, schedule: Schedule, **kwargs: Any) -> list[RolloutTree]:
    """Trees of an asynchronous rollout, after which no task and no thread of it is left."""

    async def main() -> list[RolloutTree]:
        try:
            return await rollout_async(envs, policy, schedule, **kwargs)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    try:
        return asyncio.run(main())
    finally:
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("sandboxgym-rollout")]


@pytest.fixture
def envs() -> Iterator[Envs]:
    with Envs(lambda: gym.make("toys/Dice-v0")) as made:
        yield made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every snapshot taken; all have been released by the end of the test."""
    taken: list[Any] = []
    monkeypatch.setattr(jobs, "snapshot", lambda env: taken.append(snapshot(env)) or taken[-1])
    yield taken
    assert taken and all(snap.released for snap in taken)


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


@pytest.fixture
def fates(monkeypatch: pytest.MonkeyPatch, held: list[Any]) -> None:
    """Environments whose calls may fail, to take a snapshot and to restore one included."""
    capture, restore = jobs.snapshot, jobs.restore

    def taking(env: Any) -> Any:
        env.meet("snapshot")
        return capture(env)

    def bringing_back(env: Any, snap: Any, *, seed: int | None) -> Any:
        env.meet("restore")
        return restore(env, snap, seed=seed)

    monkeypatch.setattr(jobs, "snapshot", taking)
    monkeypatch.setattr(jobs, "restore", bringing_back)
    monkeypatch.setattr(Mortal, "fate", staticmethod(lambda call, before: False), raising=False)
    monkeypatch.setattr(Mortal, "calls", Counter(), raising=False)
    monkeypatch.setattr(Mortal, "closed", [], raising=False)


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


def paths(trees: Iterable[RolloutTree]) -> dict[Any, Any]:
    """What happened on every path."""
    return {
        (tree.index, path.key): [(edge.action.text, edge.child.observation) for edge in path.edges]
        for tree in trees
        for path in tree.paths
    }


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
    class Refusing(gym.Wrapper):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
            if options == {"task": 1}:
                raise ConnectionError("no such image")
            return super().reset(seed=seed, options=options)

    register_wrapper(Refusing)
    lost: tuple[list[Failure], list[Failure]] = [], []
    with Envs(lambda: Mortal(Refusing(gym.make("toys/Dice-v0")))) as envs:
        kwargs: dict[str, Any] = {"tasks": [0, 1, 2], "retries": 1}
        schedule = Schedule({0: 2, 1: 3, 2: 1})
        expected = rollout(envs, Wanderer(), schedule, failures=lost[0], **kwargs)
        assert whole(rolled(envs, Slow(Wanderer()), schedule, failures=lost[1], **kwargs)) == whole(expected)
    assert lost[0] == lost[1] and [failure.dropped for failure in lost[0]] == [0, 3]


async def forward(context: Context) -> Action:
    return Action(0)


def counted(made: list[Any], wrapper: Callable[[Any], Any] = lambda env: env) -> Callable[[], gym.Env[Any, Any]]:
    return lambda: made.append(wrapper(gym.make("toys/Dice-v0"))) or made[-1]


def given_back(envs: Envs, made: list[Any]) -> bool:
    return {id(envs.take()) for _ in made} == set(map(id, made))


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
    held: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way ends: here the first step of the first path, while others wait for an environment."""
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
    assert len(made) == 2 and len(held) <= 1
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
