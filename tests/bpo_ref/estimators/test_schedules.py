"""Branch points of the schedules: scripted entropies on a corridor of known length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from toy_envs import Corridor

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import EntropyThreshold, Memory
from bpo_ref.schedules import Online, make_schedule
from sandboxgym.tree import Action, Context, Envs, RolloutTree, Schedule, rollout


class Scripted:
    """Walks to the end; the entropy at a depth is given, a step is ``stride`` tokens."""

    def __init__(self, entropies: Sequence[float], stride: int) -> None:
        self.entropies, self.stride = entropies, stride

    def __call__(self, contexts: Sequence[Context]) -> list[Action]:
        return [
            Action(1, entropy=self.entropies[c.depth], position=self.stride * c.depth, tokens=1, memory=c.depth)
            for c in contexts
        ]


def settings(schedule: str, **options: Any) -> Args:
    chosen = {"prompts": 4, "spacing": 1, "points": 2, "width": 3, "root_branch": "free", **options}
    return resolved(Args(algo="bpo-tree", schedule=schedule, **chosen))


class Fixed(EntropyThreshold):
    """A threshold that was found before."""

    def __init__(self, threshold: float | None) -> None:
        super().__init__(1, first=0, keep=1)
        self._fixed = threshold

    def value(self) -> float | None:
        return self._fixed


def schedule_of(args: Args, threshold: float | None) -> Schedule:
    memory = Memory.of(args)
    memory.entropies = Fixed(threshold)
    return make_schedule(args, (5,), memory)


def grown(
    args: Args, entropies: Sequence[float], *, stride: int = 1, threshold: float | None = None, trees: int = 1
) -> list[RolloutTree]:
    envs = Envs(lambda: Corridor(length=len(entropies) + 1))
    schedule = schedule_of(args, threshold)
    return rollout(envs, Scripted(entropies, stride), schedule, tasks=[None] * trees)


def forked(args: Args, entropies: Sequence[float], **options: Any) -> list[int]:
    """Depths of the branch nodes."""
    (tree,) = grown(args, entropies, **options)
    return sorted(node.depth for node in tree.branch_nodes)


BUMPY = [0.1, 0.9, 0.3, 0.8, 0.2, 0.7]


@pytest.mark.parametrize(
    ("schedule", "depths"), [("entropy", [1, 3]), ("lowest", [0, 4]), ("root", [0, 1]), ("spaced", [2, 4])]
)
def test_ranking_of_the_finished_backbone(schedule: str, depths: list[int]) -> None:
    assert forked(settings(schedule), BUMPY) == depths


@pytest.mark.parametrize(("steps", "depths"), [(8, [2, 4, 6]), (6, [2, 3, 5]), (4, [1, 2, 3])])
def test_spaced_points_divide_the_backbone_evenly(steps: int, depths: list[int]) -> None:
    assert forked(settings("spaced", points=3), [0.5] * steps) == depths


@pytest.mark.parametrize("schedule", ["entropy", "lowest"])
def test_ties_go_to_the_earlier_step(schedule: str) -> None:
    assert forked(settings(schedule), [0.5] * 6) == [0, 1]


def test_points_keep_their_distance_in_tokens() -> None:
    falling = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    assert forked(settings("entropy", spacing=25), falling, stride=10) == [0, 3]
    assert forked(settings("entropy", spacing=20), falling, stride=10) == [0, 2]
    assert forked(settings("entropy-online", spacing=25), falling, stride=10, threshold=0.0) == [0, 3]


def test_the_root_counts_for_the_distance_when_it_always_branches() -> None:
    args = settings("entropy", spacing=25, root_branch="always")
    assert forked(args, [0.1, 0.9, 0.8, 0.2, 0.1], stride=10) == [0, 3]


@pytest.mark.parametrize("schedule", ["entropy", "entropy-online", "root"])
@pytest.mark.parametrize(("root_branch", "depths"), [("always", [0, 1]), ("free", [0, 1]), ("never", [1, 2])])
def test_the_root_branches_always_freely_or_never(schedule: str, root_branch: str, depths: list[int]) -> None:
    falling = [0.9, 0.8, 0.7, 0.6, 0.5]
    assert forked(settings(schedule, root_branch=root_branch), falling, threshold=0.0) == depths
    assert (0 in forked(settings(schedule, root_branch=root_branch), falling[::-1], threshold=0.75)) == (
        root_branch == "always" or (root_branch == "free" and schedule == "root")
    )


@pytest.mark.parametrize("schedule", ["entropy", "entropy-online", "random", "spaced", "lowest", "root"])
@pytest.mark.parametrize("root_branch", ["always", "free", "never"])
@pytest.mark.parametrize(("points", "width"), [(1, 4), (3, 2), (2, 5)])
def test_number_of_returns_is_one_plus_m_times_k_minus_one(
    schedule: str, root_branch: str, points: int, width: int
) -> None:
    args = settings(schedule, root_branch=root_branch, points=points, width=width)
    (tree,) = grown(args, [0.5] * 12, threshold=0.0)
    assert len(tree.paths) == 1 + points * (width - 1)
    assert [len(node.children) for node in tree.branch_nodes] == [width] * points


def test_extra_roots_come_on_top() -> None:
    (tree,) = grown(settings("entropy", root_branch="always", roots=6, points=2, width=3), BUMPY)
    assert len(tree.paths) == 6 + 2
    assert [path.key[:2] for path in tree.paths if len(path.key) > 2] == [(0, 0)] * 2


@pytest.mark.parametrize("schedule", ["entropy", "entropy-online"])
@pytest.mark.parametrize("root_branch", ["always", "free"])
def test_a_fraction_of_a_point_is_drawn_per_tree(schedule: str, root_branch: str) -> None:
    args = settings(schedule, points=1.7, width=2, root_branch=root_branch)
    counts = [len(tree.branch_nodes) for tree in grown(args, [0.5] * 3, threshold=0.0, trees=200)]
    assert set(counts) == {1, 2}
    assert np.mean(counts) == pytest.approx(1.7, abs=4 * np.sqrt(0.7 * 0.3 / 200))


def test_the_drawn_budget_does_not_depend_on_the_process() -> None:
    args = settings("random", points=1.5, width=2)
    envs, policy = Envs(lambda: Corridor(length=7)), Scripted([0.5] * 6, 1)

    def depths(indices: Sequence[int]) -> dict[int, list[int]]:
        trees = rollout(envs, policy, schedule_of(args, None), tasks=[None] * len(indices), indices=indices)
        return {tree.index: sorted(node.depth for node in tree.branch_nodes) for tree in trees}

    whole = depths(range(8))
    assert len({tuple(depth) for depth in whole.values()}) > 3
    assert whole == depths(range(0, 8, 2)) | depths(range(1, 8, 2))


def test_budget_that_a_short_backbone_cannot_spend_stays_unspent() -> None:
    assert forked(settings("entropy", points=5), [0.5, 0.4, 0.3]) == [0, 1, 2]
    assert forked(settings("entropy", spacing=100), BUMPY) == [1]


def test_online_forks_at_the_first_steps_above_the_threshold() -> None:
    assert forked(settings("entropy-online"), BUMPY, threshold=0.65) == [1, 3]
    assert forked(settings("entropy-online"), BUMPY, threshold=0.85) == [1]
    assert forked(settings("entropy-online"), BUMPY, threshold=0.95) == []


@pytest.mark.parametrize("seen", range(1, 6))
def test_online_decides_by_what_it_has_seen(seen: int) -> None:
    other_future = BUMPY[:seen] + [1.0 - e for e in BUMPY[seen:]]
    before, after = (forked(settings("entropy-online"), e, threshold=0.65) for e in (BUMPY, other_future))
    assert [d for d in before if d < seen] == [d for d in after if d < seen]


def test_ranking_afterwards_looks_at_the_future() -> None:
    assert 1 in forked(settings("entropy", points=1), BUMPY)
    assert 1 not in forked(settings("entropy", points=1), [*BUMPY[:5], 1.0])


@pytest.mark.parametrize(("root_branch", "depths"), [("free", [2, 4]), ("always", [0, 3])])
def test_the_first_batch_is_forked_at_even_distances(root_branch: str, depths: list[int]) -> None:
    args = settings("entropy-online", root_branch=root_branch, max_turns=12)
    assert forked(args, [0.5] * 8) == depths


@pytest.mark.parametrize(("root_branch", "expected"), [("free", 2.0), ("never", 2.0), ("always", 1.0)])
def test_the_threshold_spends_nine_tenths_of_the_budget(root_branch: str, expected: float) -> None:
    args = settings("entropy-online", root_branch=root_branch, prompts=50)
    rng = np.random.default_rng(0)
    backbones = [[5.0, *rng.random(rng.integers(4, 12))] for _ in range(400)]  # the root's entropy is the highest
    threshold = Memory.of(args).entropies
    assert threshold.value() is None
    threshold.observe(backbones)
    value = threshold.value()
    assert value is not None
    choosable = [b if root_branch == "free" else b[1:] for b in backbones]
    spent = np.mean([min(expected, sum(e > value for e in b)) for b in choosable])
    assert spent == pytest.approx(0.9 * expected, abs=0.01)


def test_the_threshold_forgets_old_batches_and_survives_a_checkpoint() -> None:
    args = settings("entropy-online", prompts=2)
    threshold = Memory.of(args).entropies
    for batch in range(20):
        threshold.observe([[float(batch)] * 5] * 2)
    assert min(min(backbone) for backbone in threshold.history) == 12.0
    assert Memory.of(args, {"entropies": list(threshold.history)}).entropies.value() == threshold.value()


def test_more_points_than_steps_lower_the_threshold_to_the_bottom() -> None:
    threshold = Memory.of(settings("entropy-online", points=4)).entropies
    threshold.observe([[0.3, 0.2], [0.5, 0.1]])
    assert threshold.value() == 0.1


def test_online_siblings_are_not_forked_again() -> None:
    (tree,) = grown(settings("entropy-online", points=3, width=2), [0.9] * 5, threshold=0.5)
    assert {len(path.key) for path in tree.paths} == {2, 4}
    assert isinstance(schedule_of(settings("entropy-online"), 0.5), Online)


# Several roots, forks of forks, unspent budget.


@pytest.mark.parametrize("schedule", ["entropy", "entropy-online", "random", "spaced", "root"])
def test_every_root_path_forks_or_every_path(schedule: str) -> None:
    common: dict[str, Any] = {"roots": 3, "points": 2, "width": 2, "root_branch": "never"}
    (tree,) = grown(settings(schedule, forks="roots", **common), [0.5] * 8, threshold=0.0)
    assert sorted(path.key[1] for path in tree.paths if len(path.key) == 4) == [0, 0, 1, 1, 2, 2]
    (tree,) = grown(settings(schedule, forks="all", **common), [0.5] * 8, threshold=0.0)
    assert len(tree.paths) == 3 * 2**2  # each way down passes two forks
    assert {len(path.key) // 2 - 1 for path in tree.paths} == {0, 1, 2}


def test_no_path_passes_more_than_m_forks() -> None:
    args = settings("random", forks="all", points=2, width=3, root_branch="never")
    for tree in grown(args, [0.5] * 9, trees=20):
        for path in tree.paths:
            passed = [edge.parent for edge in path.from_root() if len(edge.parent.children) > 1]
            assert len(passed) <= 2


def test_unspent_points_widen_the_chosen_ones() -> None:
    args = settings("entropy", points=5, width=3, fill="widen")
    (tree,) = grown(args, [0.5, 0.4])
    assert [len(node.children) for node in tree.branch_nodes] == [6, 6]  # 5 x 2 siblings on two nodes
    assert len(tree.paths) == 1 + 5 * 2


def test_explained_rounds_its_depth_at_random() -> None:
    args = settings("explained", roots=1, points=1, width=2, forks="roots", root_branch="never")
    memory = Memory.of(args)
    memory.depth.depth = 2.25
    envs = Envs(lambda: Corridor(length=9))
    trees = rollout(envs, Scripted([0.5] * 8, 1), make_schedule(args, (5,), memory), tasks=[None] * 200)
    depths = [node.depth for tree in trees for node in tree.branch_nodes]
    assert set(depths) == {2, 3} and len(depths) == 200
    assert np.mean(depths) == pytest.approx(2.25, abs=4 * np.sqrt(0.25 * 0.75 / 200))
