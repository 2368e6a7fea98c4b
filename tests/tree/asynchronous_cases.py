"""Policies, schedules and fixtures of the tests of asynchronous rollouts."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import pytest
from test_tree import ForkEveryPath, Forks, Wanderer

import sandboxgym.wrappers.jobs as jobs
from sandboxgym import snapshot
from sandboxgym.tree import (
    Action,
    Context,
    Envs,
    ForkAt,
    Node,
    Path,
    PathKey,
    RolloutTree,
    Schedule,
    TopEntropy,
    rollout_async,
)


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
def perhaps_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every snapshot taken; all have been released by the end of the test."""
    taken: list[Any] = []
    monkeypatch.setattr(jobs, "snapshot", lambda env: taken.append(snapshot(env)) or taken[-1])
    yield taken
    assert all(snap.released for snap in taken)


@pytest.fixture
def held(perhaps_held: list[Any]) -> Iterator[list[Any]]:
    """Every snapshot taken, which must be some; all have been released by the end of the test."""
    yield perhaps_held
    assert perhaps_held


def paths(trees: Iterable[RolloutTree]) -> dict[Any, Any]:
    """Events on every path."""
    return {
        (tree.index, path.key): [(edge.action.text, edge.child.observation) for edge in path.edges]
        for tree in trees
        for path in tree.paths
    }


async def forward(context: Context) -> Action:
    return Action(0)


def counted(made: list[Any], wrapper: Callable[[Any], Any] = lambda env: env) -> Callable[[], gym.Env[Any, Any]]:
    return lambda: made.append(wrapper(gym.make("toys/Dice-v0"))) or made[-1]


def given_back(envs: Envs, made: list[Any]) -> bool:
    return {id(envs.take()) for _ in made} == set(map(id, made))
