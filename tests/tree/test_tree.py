from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import pytest

import sandboxgym.wrappers.jobs as jobs
from sandboxgym import Snapshot, register_wrapper, snapshot
from sandboxgym.tree import (
    Action,
    Clock,
    Context,
    Envs,
    Failure,
    ForkAt,
    Node,
    Path,
    RolloutTree,
    Schedule,
    TopEntropy,
    rollout,
)


class Wanderer:
    """Draws an action in {0, 1} from the path's stream; its memory is the list of actions so far."""

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        return [self._act(context) for context in contexts]

    def _act(self, context: Context) -> Action:
        drawn = int(context.rng.integers(2))
        return Action(drawn, position=10 * context.depth, tokens=3, memory=[*(context.memory or []), drawn])


class Forks(Schedule):
    """Causal or, with ``late``, afterwards: two siblings at these depths of the first root path."""

    def __init__(self, roots: int, *depths: int, late: bool = False) -> None:
        super().__init__(roots)
        self.depths, self.late = depths, late

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        return 2 * (path.key == (0, 0) and node.depth in self.depths and not self.late)

    def watches(self, path: Path) -> bool:
        return self.late and path.key == (0, 0)

    def after(self, tree: RolloutTree, path: Path) -> Iterable[tuple[Node, int]]:
        return [(edge.parent, 2) for edge in path.edges if edge.parent.depth in self.depths]


class ForkEveryPath(Schedule):
    """One sibling two steps after every path's start, three forks deep at most."""

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        return int(len(path.edges) == 2 and len(path.key) <= 6)


@pytest.fixture
def envs() -> Iterable[Envs]:
    made = Envs(lambda: gym.make("toys/Dice-v0"))
    yield made
    made.close()


def sampled(trees: Iterable[RolloutTree]) -> dict[tuple[int, tuple[int, ...]], list[tuple[Any, ...]]]:
    """Events on every path."""
    return {
        (tree.index, path.key): [
            (e.parent.observation, e.action.text, e.reward, e.child.observation) for e in path.edges
        ]
        for tree in trees
        for path in tree.paths
    }


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """Every snapshot taken in the test, as it was handed out."""
    taken: list[Snapshot] = []
    monkeypatch.setattr(jobs, "snapshot", lambda env: taken.append(snapshot(env)) or taken[-1])
    return taken


def test_roots_are_independent_rollouts(envs: Envs) -> None:
    (tree,) = rollout(envs, Wanderer(), Schedule(roots=5))
    assert [path.key for path in tree.paths] == [(0, i) for i in range(5)]
    assert len({tuple(e.child.observation for e in path.edges) for path in tree.paths}) == 5
    assert tree.branch_nodes == [tree.root]
    assert len(tree.root.children) == 5


def test_every_task_can_have_its_own_number_of_roots(envs: Envs) -> None:
    trees = rollout(envs, Wanderer(), Schedule(roots={0: 3, 1: 1, 2: 2}), tasks=[None] * 3)
    assert [[path.key for path in tree.paths] for tree in trees] == [
        [(0, 0), (0, 1), (0, 2)],
        [(0, 0)],
        [(0, 0), (0, 1)],
    ]


@pytest.mark.parametrize("late", [False, True])
def test_forks_share_the_prefix_and_nothing_after(envs: Envs, late: bool) -> None:
    (tree,) = rollout(envs, Wanderer(), Forks(1, 2, 4, late=late))
    assert sorted(path.key for path in tree.paths) == [(0, 0), *((0, 0, d, k) for d in (2, 4) for k in (1, 2))]
    backbone = tree.paths[0]
    for path in tree.paths[1:]:
        depth = path.key[2]
        assert path.start is backbone.edges[depth].parent
        assert path.from_root()[:depth] == backbone.edges[:depth]
        assert path.from_root()[depth:] == path.edges
        assert path.edges[0].parent.observation == backbone.edges[depth].parent.observation
        assert path.edges[-1].action.memory == [edge.action.text for edge in path.from_root()]
        assert len({edge.child.depth for edge in path.from_root()}) == len(path.from_root())
    assert [len(node.children) for node in tree.branch_nodes] == [3, 3]


def test_forks_chosen_now_and_afterwards_are_the_same_rollouts(envs: Envs) -> None:
    causal = rollout(envs, Wanderer(), Forks(2, 0, 3), tasks=[None] * 3)
    late = rollout(envs, Wanderer(), Forks(2, 0, 3, late=True), tasks=[None] * 3)
    assert sampled(causal) == sampled(late)


def test_root_forks_are_numbered_after_the_roots(envs: Envs) -> None:
    (tree,) = rollout(envs, Wanderer(), Forks(3, 0))
    assert [path.key for path in tree.paths] == [(0, i) for i in range(5)]
    (independent,) = rollout(envs, Wanderer(), Schedule(5))
    assert sampled([tree]) == sampled([independent])


def test_forks_of_forks_nest(envs: Envs) -> None:
    (tree,) = rollout(envs, Wanderer(), ForkEveryPath(1))
    assert {(0, 0), (0, 0, 2, 1), (0, 0, 2, 1, 4, 1)} <= {path.key for path in tree.paths}
    for path in tree.paths:
        if path.start is not tree.root:
            assert path.start.parent is not None
            assert path.start.parent.path == path.key[:-2] == path.start.owner


def test_siblings_draw_their_own_environment_noise(envs: Envs) -> None:
    class Stubborn(Wanderer):
        def _act(self, context: Context) -> Action:
            return Action(0)

    (tree,) = rollout(envs, Stubborn(), Forks(1, 1))
    assert len({tuple(e.child.observation for e in path.from_root()[1:]) for path in tree.paths}) == 3


@pytest.mark.parametrize("schedule", [Forks(3, 1, 3), Forks(3, 1, 3, late=True), ForkEveryPath(2)])
@pytest.mark.parametrize("max_live", [1, 3])
def test_number_of_live_environments_changes_nothing(envs: Envs, schedule: Schedule, max_live: int) -> None:
    whole = rollout(envs, Wanderer(), schedule, tasks=[None] * 3, seed=(7,))
    chunked = rollout(envs, Wanderer(), schedule, tasks=[None] * 3, seed=(7,), max_live=max_live)
    assert sampled(whole) == sampled(chunked)


def test_at_most_max_live_environments_are_made() -> None:
    made: list[gym.Env[Any, Any]] = []
    envs = Envs(lambda: made.append(gym.make("toys/Dice-v0")) or made[-1])
    rollout(envs, Wanderer(), Forks(2, 1), tasks=[None] * 4, max_live=3)
    assert len(made) <= 3
    envs.close()


def test_parts_of_a_batch_are_the_batch(envs: Envs) -> None:
    whole = rollout(envs, Wanderer(), Forks(2, 2), tasks=[None] * 4, seed=(1, 5))
    parts = [
        rollout(envs, Wanderer(), Forks(2, 2), tasks=[None] * 2, seed=(1, 5), indices=range(r, 4, 2)) for r in (0, 1)
    ]
    assert sampled(whole) == sampled(parts[0]) | sampled(parts[1])


def test_a_path_does_not_depend_on_other_paths(envs: Envs) -> None:
    forked = sampled(rollout(envs, Wanderer(), Forks(4, 1, 2), tasks=[None] * 2))
    alone = sampled(rollout(envs, Wanderer(), Schedule(1)))
    assert alone[0, (0, 0)] == forked[0, (0, 0)]


def test_seed_changes_everything(envs: Envs) -> None:
    one, other = (rollout(envs, Wanderer(), Schedule(1), seed=(s,)) for s in (0, 1))
    assert sampled(one) != sampled(other)


@pytest.mark.parametrize(
    ("schedule", "taken"),
    [(Schedule(4), 1), (Forks(2, 1, 3), 3), (ForkEveryPath(1), None), (Forks(2, 1, late=True), None)],
)
@pytest.mark.parametrize("max_live", [2, 100])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_snapshot_is_released(
    envs: Envs, held: list[Snapshot], schedule: Schedule, taken: int | None, max_live: int, overlap: bool
) -> None:
    (tree,) = rollout(envs, Wanderer(), schedule, max_live=max_live, overlap=overlap)
    assert len(held) == tree.snapshots == (taken or tree.snapshots)
    assert all(snap.released for snap in held)


def test_only_watched_paths_are_captured_at_every_step(envs: Envs) -> None:
    (tree,) = rollout(envs, Wanderer(), Forks(3, 1, late=True))
    assert tree.snapshots == 1 + len(tree.paths[0].edges)


def test_counts_are_of_actions_taken_once(envs: Envs) -> None:
    (tree,) = rollout(envs, Wanderer(), Forks(2, 2))
    assert tree.env_steps == len(list(tree.edges())) == sum(len(path.edges) for path in tree.paths)
    assert tree.tokens == 3 * tree.env_steps
    assert tree.env_steps < sum(len(path.from_root()) for path in tree.paths)


def test_total_reward_includes_the_prefix() -> None:
    envs = Envs(lambda: gym.make("toys/Corridor-v0"))

    class Right(Wanderer):
        def _act(self, context: Context) -> Action:
            return Action(1)

    (tree,) = rollout(envs, Right(), Forks(1, 3))
    assert [path.total_reward for path in tree.paths] == [1.0, 1.0, 1.0]
    assert all(path.edges[-1].terminated and not path.edges[-1].truncated for path in tree.paths)
    envs.close()


def test_time_limit_counts_the_prefix() -> None:
    envs = Envs(lambda: gym.make("toys/Corridor-v0"))

    class Left(Wanderer):
        def _act(self, context: Context) -> Action:
            return Action(0)

    (tree,) = rollout(envs, Left(), Forks(1, 5))
    assert [len(path.from_root()) for path in tree.paths] == [12, 12, 12]
    assert all(path.edges[-1].truncated for path in tree.paths)
    envs.close()


def test_task_is_an_option_of_reset() -> None:
    seen: list[Any] = []

    class Tasks(gym.Wrapper):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
            seen.append(options)
            return super().reset(seed=seed, options=options)

    register_wrapper(Tasks)
    envs = Envs(lambda: Tasks(gym.make("toys/Corridor-v0")))
    rollout(envs, Wanderer(), Schedule(1), tasks=["kitchen", None])
    assert seen == [{"task": "kitchen"}, None]
    envs.close()


class Tired(Wanderer):
    """Has no room left from a depth on."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def _act(self, context: Context) -> Action | None:
        return super()._act(context) if context.depth < self.depth else None


@pytest.mark.parametrize("late", [False, True])
def test_a_policy_without_room_truncates_the_path(envs: Envs, held: list[Snapshot], late: bool) -> None:
    (tree,) = rollout(envs, Tired(3), Forks(2, 1, late=late))
    assert len(tree.paths) == 4
    assert all(len(path.from_root()) == 3 and path.edges[-1].truncated for path in tree.paths)
    assert all(snap.released for snap in held)


class Picky(Wanderer):
    """Has no room for some tasks."""

    def _act(self, context: Context) -> Action | None:
        return super()._act(context) if context.path[0] != 1 else None


@pytest.mark.parametrize("late", [False, True])
def test_a_task_that_a_policy_has_no_room_for_is_dropped(envs: Envs, held: list[Snapshot], late: bool) -> None:
    failures: list[Failure] = []
    trees = rollout(envs, Picky(), Forks(2, 1, late=late), tasks=[None] * 3, failures=failures)
    assert [tree.index for tree in trees] == [0, 2]
    assert {(failure.task, failure.too_long, failure.dropped) for failure in failures} == {(1, True, 1)}
    assert "no room to act" in failures[0].error
    assert all(snap.released for snap in held)
    assert rollout(envs, Tired(0), Schedule(1)) == []


def test_any_function_is_a_policy(envs: Envs) -> None:
    (tree,) = rollout(envs, lambda contexts: [Action(context.depth % 2) for context in contexts], Schedule(1))
    assert [edge.action.text for edge in tree.edges()][:4] == [0, 1, 0, 1]


@pytest.mark.parametrize("failing", ["policy", "step"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("overlap", "threads"), [(False, 1), (True, 1), (True, 3)])
def test_nothing_is_left_over_after_an_error(
    held: list[Snapshot], failing: str, late: bool, overlap: bool, threads: int
) -> None:
    class Breaking(gym.Wrapper):
        def step(self, action: Any):
            if action == "break":
                raise RuntimeError("broken")
            return super().step(action)

    class Failing(Wanderer):
        def _act(self, context: Context) -> Action:
            if context.depth == 4:
                if failing == "policy":
                    raise RuntimeError("broken")
                return Action("break")
            return super()._act(context)

    register_wrapper(Breaking)
    made: list[gym.Env[Any, Any]] = []
    envs = Envs(lambda: made.append(Breaking(gym.make("toys/Dice-v0"))) or made[-1], threads=threads)
    with pytest.raises(RuntimeError, match="broken"):
        rollout(envs, Failing(), Forks(2, 1, 2, late=late), tasks=[None] * 2, overlap=overlap)
    assert held and all(snap.released for snap in held)
    assert {id(envs.take()) for _ in made} == set(map(id, made))  # all were given back
    envs.close()


class Irregular(gym.Wrapper):
    """Its steps take now this long and now that."""

    durations = random.Random()

    def step(self, action: Any):
        time.sleep(self.durations.random() / 300)
        return super().step(action)


@pytest.mark.parametrize("schedule", [Forks(3, 1, 3), Forks(3, 1, 3, late=True), ForkEveryPath(2)])
@pytest.mark.parametrize(("overlap", "threads"), [(False, 4), (True, 1), (True, 4)])
@pytest.mark.parametrize("max_live", [4, 1024])
def test_what_works_at_the_same_time_changes_nothing(
    envs: Envs, schedule: Schedule, overlap: bool, threads: int, max_live: int
) -> None:
    """Not even the order of the paths, whichever environment is ready first."""
    register_wrapper(Irregular)
    with Envs(lambda: Irregular(gym.make("toys/Dice-v0")), threads=threads) as irregular:
        parallel = rollout(
            irregular, Wanderer(), schedule, tasks=[None] * 3, max_live=max_live, overlap=overlap, seed=(3,)
        )
    alone = rollout(envs, Wanderer(), schedule, tasks=[None] * 3, max_live=max_live, seed=(3,))
    assert list(sampled(parallel).items()) == list(sampled(alone).items())
    assert [tree.snapshots for tree in parallel] == [tree.snapshots for tree in alone]


def test_one_half_decides_while_the_other_steps() -> None:
    """Each waits for the other to have begun."""
    deciding, stepping = threading.Event(), threading.Event()

    class Stepping(gym.Wrapper):
        def step(self, action: Any):
            stepping.set()
            assert deciding.wait(timeout=300)
            return super().step(action)

    class Deciding(Wanderer):
        calls = 0

        def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
            assert len(contexts) == 1
            self.calls += 1
            if self.calls == 2:
                deciding.set()
                assert stepping.wait(timeout=300)
            return super().__call__(contexts)

    register_wrapper(Stepping)
    with Envs(lambda: Stepping(gym.make("toys/Dice-v0"))) as envs:
        assert len(rollout(envs, Deciding(), Schedule(1), tasks=[None] * 2, overlap=True)) == 2


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_errors_the_earlier_halfs_is_raised_whichever_comes_first(first: int) -> None:
    begun = [threading.Event(), threading.Event()]

    class Breaking(gym.Wrapper):
        def step(self, action: Any):
            begun[action].set()
            if action != first:
                assert begun[first].wait(timeout=300)
            raise RuntimeError(f"half {action}")

    def policy(contexts: Sequence[Context]) -> list[Action]:
        return [Action(context.path[0]) for context in contexts]

    register_wrapper(Breaking)
    with (
        Envs(lambda: Breaking(gym.make("toys/Dice-v0")), threads=2) as envs,
        pytest.raises(RuntimeError, match="half 0"),
    ):
        rollout(envs, policy, Schedule(1), tasks=[None] * 2, overlap=True)
    assert all(event.is_set() for event in begun)


def test_a_limit_of_one_environment_holds_for_both_halves() -> None:
    at_work: list[int] = []

    class Alone(gym.Wrapper):
        def step(self, action: Any):
            at_work.append(1)
            time.sleep(0.001)
            assert len(at_work) == 1
            at_work.pop()
            return super().step(action)

    register_wrapper(Alone)
    with Envs(lambda: Alone(gym.make("toys/Dice-v0"))) as envs:
        rollout(envs, Wanderer(), Schedule(2), tasks=[None] * 4, overlap=True)


def test_threads_work_at_the_same_time_and_all_end_before_an_error_is_raised() -> None:
    barrier, ended = threading.Barrier(3), []

    def job(index: int) -> None:
        barrier.wait(timeout=300)  # broken unless three run at once
        if index == 0:
            raise RuntimeError("first")
        time.sleep(0.05)
        ended.append(index)

    with Envs(lambda: gym.make("toys/Dice-v0"), threads=3) as envs, pytest.raises(RuntimeError, match="first"):
        envs.call([partial(job, i) for i in range(3)])
    assert sorted(ended) == [1, 2]


def test_fork_at_depths(envs: Envs) -> None:
    (tree,) = rollout(envs, Wanderer(), ForkAt([1, 3], width=3, roots=2))
    assert sorted(path.key for path in tree.paths) == [
        (0, 0),
        *((0, 0, d, k) for d in (1, 3) for k in (1, 2)),
        (0, 1),
    ]


def test_top_entropy_forks_the_first_path_at_its_highest_entropies(envs: Envs) -> None:
    entropies = [0.1, 0.9, 0.3, 0.9, 0.5, 0.2]

    def policy(contexts: Sequence[Context]) -> list[Action]:
        return [Action(0, entropy=entropies[min(context.depth, 5)]) for context in contexts]

    (tree,) = rollout(envs, policy, TopEntropy(points=3, width=2))
    assert sorted(path.key for path in tree.paths) == [(0, 0), (0, 0, 1, 1), (0, 0, 3, 1), (0, 0, 4, 1)]


def test_a_schedule_needs_a_root() -> None:
    for roots in (0, {0: 2, 1: 0}):
        with pytest.raises(ValueError, match="at least one root path, found roots="):
            Schedule(roots)


def test_a_schedule_without_a_number_for_a_task_is_refused_before_anything_begins(envs: Envs, held: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected a number of root paths for task 1 of the batch"):
        rollout(envs, Wanderer(), Schedule({0: 2}), tasks=[None, None])
    assert not held


def test_environments_are_used_again_and_closed() -> None:
    class Closing(gym.Wrapper):
        closed = 0

        def close(self) -> None:
            Closing.closed += 1
            super().close()

    envs = Envs(lambda: Closing(gym.make("toys/Dice-v0")))
    first = envs.take()
    envs.give(first)
    assert envs.take() is first
    other = envs.take()
    assert other is not first
    envs.close()
    assert Closing.closed == 2


class Keeper(Wanderer):
    """Notes when it decides for a path, and when it is told that a path is over."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.released: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        for context in contexts:
            parent = (context.path[0], context.path[1][:-2])
            assert context.path not in self.released
            if context.path not in self.seen:
                assert parent not in self.released
                self.seen.append(context.path)
        return list(super().__call__(contexts))

    def release(self, path: tuple[int, tuple[int, ...]]) -> None:
        self.released.append(path)


@pytest.mark.parametrize("schedule", [Forks(2, 1, 3), Forks(2, 0, 3, late=True), ForkEveryPath(2)])
@pytest.mark.parametrize("max_live", [1, 3, 1024])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_path_is_released_once_when_nothing_starts_from_it_any_more(
    envs: Envs, schedule: Schedule, max_live: int, overlap: bool
) -> None:
    keeper = Keeper()
    trees = rollout(envs, keeper, schedule, tasks=[None] * 2, max_live=max_live, overlap=overlap)
    paths = {(tree.index, path.key) for tree in trees for path in tree.paths}
    assert sorted(keeper.released) == sorted([*paths, (0, ()), (1, ())])  # roots leave no path, but the reset state


@pytest.mark.parametrize("overlap", [False, True])
def test_the_clock_tells_what_was_waited_for(envs: Envs, overlap: bool) -> None:
    clock, began = Clock(), time.perf_counter()
    rollout(envs, Wanderer(), Forks(2, 1), tasks=[None] * 2, overlap=overlap, clock=clock)
    assert min(clock.policy, clock.steps, clock.snapshots) > 0
    assert clock.policy + clock.steps + clock.snapshots <= time.perf_counter() - began
