"""Credit, weights and schedules against exact gradients of small MDPs; planted errors show that the tests can fail.

Every comparison has a false-alarm rate of at most 1e-3 over the draw of the seeds, which are fixed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tabular import MDP, Credit, batches_of, compare, gradients, random_mdp, telling_mdp

from bpo_ref import train
from bpo_ref.args import Args, resolved
from bpo_ref.baselines import EntropyThreshold, Memory, StateBaseline, TaskSpread
from bpo_ref.run_log import root_weights
from bpo_ref.schedules import make_schedule
from bpo_ref.train import assign_credit
from sandboxgym.tree import Action, Edge, Node, Path, RolloutTree, Schedule

SPARSE, DENSE = random_mdp(seed=244), random_mdp(seed=244, dense=True)
REFUSING = replace(SPARSE, refused=(2, 4))
TASKS = (0, 1, 0, 1)  # of a batch
FAST = 400  # batches of 4 trees
MANY = int(os.environ.get("SANDBOXGYM_TREES", 0)) // 4
THRESHOLD = 0.615  # entropy; above it are three of the five states

COMMON: dict[str, Any] = {"prompts": 4, "spacing": 1, "width": 3, "points": 2, "step_weight_power": 1.0, "max_turns": 5}


def settings(algo: str, **options: Any) -> Args:
    return resolved(Args(algo=algo, **{**COMMON, **options}))


class Fixed(EntropyThreshold):
    def value(self) -> float:
        return THRESHOLD


def blank(args: Args) -> Memory:
    """Memory before the first batch, with the threshold."""
    memory = Memory.of(args)
    memory.entropies = Fixed(1, first=0, keep=1)
    return memory


def credit(args: Args, memory: Memory | None = None) -> Credit:
    return lambda trees: assign_credit(trees, args, memory or blank(args))


def scheduled(args: Args, memory: Memory | None = None) -> Callable[[int], Schedule]:
    return lambda batch: make_schedule(args, (9, batch), memory or blank(args), tasks=TASKS)


class ForkAt(Schedule):
    """Siblings at fixed depths of the first root path."""

    def __init__(self, siblings: dict[int, int], *, roots: int = 1) -> None:
        super().__init__(roots)
        self._siblings = siblings

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        return self._siblings.get(node.depth, 0) if path.key == (0, 0) else 0


class ForkAnywhere(Schedule):
    """Forks off forks: any path forks on entering state 2 (two siblings) or 3 (one), two deep at most."""

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        arrived = path.edges and len(path.key) <= 4
        return {2: 2, 3: 1}.get(node.observation, 0) if arrived else 0


def taught(mdp: MDP, args: Args, *, batches: int = 60, **options: Any) -> Memory:
    """Memory of earlier batches: independent rollouts, then the algorithm's own."""
    memory = blank(args)
    for own in (False, True):
        learner = args if own else settings("rloo-key", roots=4, gamma=args.gamma)

        def schedule(batch: int, learner: Args = learner, own: bool = own) -> Schedule:
            return make_schedule(learner, (8, own, batch), memory, tasks=TASKS)

        for trees in batches_of(mdp, schedule, batches=batches, first=10**6 + own * batches):
            forks = assign_credit(trees, learner, memory)
            memory.observe(trees, forks, learner if not own else args)
    return replace(memory, **options)


def one_sided() -> dict[str, Any]:
    """Task 0 is believed to be nearly certain, task 1 to be uncertain: one root path and seven, or two and six."""
    return {"spread": TaskSpread(1.0, [(0, (1000, 999, 999)), (1, (1000, 500, 500))])}


Case = tuple[MDP, Callable[[int], Schedule], float, dict[str, Any]]


def informed(mdp: MDP, *, known: Callable[[], dict[str, Any]] = dict, **credits: Args) -> Callable[[], Case]:
    """A case whose first setting rolls out and teaches; ``known`` takes the place of what was learnt."""

    def made() -> Case:
        args = next(iter(credits.values()))
        memory = taught(mdp, args, **known())
        return mdp, scheduled(args, memory), args.gamma, {name: (args, memory) for name, args in credits.items()}

    made.names = tuple(credits)  # type: ignore[attr-defined]
    return made


SPLIT: dict[str, Any] = {"width": 2, "points": 3, "value_decay": 1.0}
FOREST: dict[str, Any] = {"width": 2, "points": 1, "roots": 4}
ROULETTE: dict[str, Any] = {"roulette": 0.5, "roulette_below": 0.4}

FREE_ROOT = settings("bpo-tree", root_branch="free")
THREE_ROOTS = settings("bpo-tree", roots=3, width=2, points=3)

RECURSIVE = settings("bpo-tree", forks="all", width=2, points=3)
WIDENED = settings("bpo-tree", schedule="random", fill="widen", forks="roots")
UNEVEN: dict[str, Any] = {"roots": 4, "value_decay": 1.0, "allocation": "spread"}
VALUED, SOMETIMES = settings("vineppo", roots=3, mc_rollouts=2), settings("vineppo", roots=3, mc_turns=2)

# name -> the MDP, what rolls it out, the discount and the credits to test on those rollouts (with what they remember)
CASES: dict[str, Case | Callable[[], Case]] = {
    "independent": (
        SPARSE,
        scheduled(settings("rloo")),
        1.0,
        {algo: settings(algo) for algo in ("rloo", "rloo-turn", "rloo-key")},
    ),
    "online": (
        SPARSE,
        scheduled(settings("bpo-tree")),
        1.0,
        {algo: settings(algo) for algo in ("bpo-tree", "bpo-key")},
    ),
    "online, one root": (SPARSE, scheduled(FREE_ROOT), 1.0, {"tree": FREE_ROOT}),
    "online, three roots": (SPARSE, scheduled(THREE_ROOTS), 1.0, {"tree": THREE_ROOTS}),
    "forks off forks": (
        SPARSE,
        lambda batch: ForkAnywhere(roots=1),
        1.0,
        {"tree": settings("bpo-tree"), "tree, turn": settings("bpo-tree", baseline="turn")},
    ),
    "forks of every path": (SPARSE, scheduled(RECURSIVE), 1.0, {"tree": RECURSIVE}),
    "Monte-Carlo values": (SPARSE, scheduled(VALUED), 1.0, {"vineppo": VALUED}),
    "Monte-Carlo values of two turns": (SPARSE, scheduled(SOMETIMES), 1.0, {"vineppo": SOMETIMES}),
    "earlier batches": informed(
        SPARSE, **{algo: settings(algo, roots=4, value_decay=1.0) for algo in ("rloo-value", "rloo-pooled")}
    ),
    "earlier batches, by refusals": informed(
        REFUSING,
        **{
            algo: settings(algo, roots=4, value_decay=1.0, refusals=True)
            for algo in ("rloo-value", "rloo-pooled", "rloo-key")
        },
    ),
    "forest": informed(
        SPARSE,
        **{
            "bpo-forest": settings("bpo-forest", **FOREST),
            "forest, no baseline": settings("bpo-forest", baseline="none", **FOREST),
        },
    ),
    "split": informed(
        SPARSE,
        **{
            "bpo-split": settings("bpo-split", **SPLIT),
            "split, siblings": settings("bpo-split", baseline="none", fork_baseline="siblings", **SPLIT),
        },
    ),
    "split with roulette": informed(
        SPARSE,
        **{
            "bpo-split": settings("bpo-split", **SPLIT, **ROULETTE),
            "split, pooled": settings("bpo-split", baseline="pooled", **SPLIT, **ROULETTE),
        },
    ),
    "split with roulette, by refusals": informed(REFUSING, bpo=settings("bpo", refusals=True, **{**SPLIT, **ROULETTE})),
    "split, rewards on the way": informed(
        DENSE, **{"bpo-split": settings("bpo-split", gamma=0.8, **SPLIT, roulette=0.5, roulette_below=0.3)}
    ),
    "uneven roots": informed(
        SPARSE,
        known=one_sided,
        **{algo: settings(algo, **UNEVEN) for algo in ("rloo-pooled", "rloo-value", "rloo-turn", "rloo-key")},
    ),
    "uneven roots, siblings": informed(SPARSE, known=one_sided, rloo=settings("rloo", **UNEVEN)),
    "uneven roots, split": informed(
        SPARSE, known=one_sided, bpo=settings("bpo", **{**SPLIT, **UNEVEN}, roulette_below=0.4)
    ),
    "rewards on the way": (
        DENSE,
        scheduled(settings("bpo-tree")),
        0.8,
        {f"tree, {b}": settings("bpo-tree", baseline=b, gamma=0.8) for b in ("none", "turn", "key")},
    ),
}


@functools.cache
def case_of(name: str) -> Case:
    case = CASES[name]
    return case() if callable(case) else case


@functools.cache
def sampled(case: str, batches: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """Sample gradients of a case under its credits and the errors planted in it, and each batch's estimated return."""
    mdp, schedule, _, credits = case_of(case)
    planted = {name: error for name, (where, error) in PLANTED.items() if where == case}
    batches //= 4 if case.startswith("Monte-Carlo") else 1  # trees of very many paths
    correct = {name: credit(*args) if isinstance(args, tuple) else credit(args) for name, args in credits.items()}
    found = next(iter(credits.values()))
    args = found[0] if isinstance(found, tuple) else found
    returns: list[float] = []

    def noted() -> Iterator[list[RolloutTree]]:
        for trees in batches_of(mdp, schedule, batches=batches):
            returns.append(estimated_return(trees, args))
            yield trees

    return gradients(mdp, noted(), correct | planted), returns


def estimates(case: str, batches: int) -> dict[str, np.ndarray]:
    return sampled(case, batches)[0]


def estimated_return(trees: Sequence[RolloutTree], args: Args) -> float:
    """Estimate of the policy's expected return, as the trainer logs it, by the paths that no schedule has chosen."""
    return float(
        np.mean(
            [
                sum(weight * edge.reward for edge in tree.edges() if (weight := weights.get(id(edge), 0.0)))
                for tree in trees
                for weights in [root_weights(tree, args)]
            ]
        )
    )


def errors_away(samples: Sequence[float], mdp: MDP) -> float:
    """Standard errors between the mean of samples and the policy's expected return."""
    q = mdp.action_values()[0]
    exact = np.mean([(mdp.policy * q).sum(axis=1)[mdp.starts[task % len(mdp.starts)]] for task in TASKS])
    return float(abs(np.mean(samples) - exact) / (np.std(samples, ddof=1) / len(samples) ** 0.5))


def sampled_once(case: str) -> Any:
    """Mark of tests of one case, which one worker gets: `sampled` then samples it once."""
    return pytest.mark.xdist_group(f"estimates of {case}")


EVERY = [
    pytest.param(case, name, marks=sampled_once(case))
    for case, made in CASES.items()
    for name in (made.names if callable(made) else made[3])
]


@pytest.mark.parametrize(("case", "name"), EVERY)
def test_estimator_is_unbiased(case: str, name: str) -> None:
    mdp, _, gamma, _ = case_of(case)
    found = compare(estimates(case, FAST)[name], mdp.gradient(gamma))
    print(f"{case} / {name}: max|z| {found.z:.2f} of {found.critical:.2f}, relative error {found.bias:.3f}")
    assert not found.biased, found


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, marks=sampled_once(case)) for case in CASES])
def test_the_logged_return_is_the_expected_one(case: str) -> None:
    mdp, *_ = case_of(case)
    assert errors_away(sampled(case, FAST)[1], mdp) < 3.9  # false alarms of all cases together: 0.2 %


@pytest.mark.slow
@pytest.mark.skipif(not MANY, reason="a study of half an hour: SANDBOXGYM_TREES=20000 runs it")
@pytest.mark.parametrize(("case", "name"), EVERY)
def test_estimator_is_unbiased_over_many_trees(case: str, name: str) -> None:
    mdp, _, gamma, _ = case_of(case)
    found = compare(estimates(case, MANY)[name], mdp.gradient(gamma))
    print(f"{case} / {name}: max|z| {found.z:.2f} of {found.critical:.2f}, relative error {found.bias:.3f}")
    assert not found.biased, found
    assert found.bias < 0.05, found


# Planted errors.


def edges_of(trees: Iterable[RolloutTree]) -> Iterable[Edge]:
    return (edge for tree in trees for edge in tree.edges())


def weights_not_multiplied(trees: Sequence[RolloutTree]) -> None:
    credit(settings("bpo-tree"))(trees)
    for edge in edges_of(trees):
        edge.weight = 1 / len(edge.parent.children)


def mean_includes_oneself(trees: Sequence[RolloutTree]) -> None:
    credit(settings("bpo-tree"))(trees)
    for edge in edges_of(trees):
        n = len(edge.parent.children)
        edge.advantage *= (n - 1) / n if n > 1 else 1.0


def best_child_for_the_mean(trees: Sequence[RolloutTree]) -> None:
    def back_up(tree: RolloutTree, gamma: float, guess: Any) -> None:
        for edge in sorted(tree.edges(), key=lambda edge: -edge.parent.depth):
            edge.value = edge.reward + gamma * edge.child.value
            edge.parent.value = max(e.value for e in edge.parent.children)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "back_up", back_up)
        patch.setattr(train, "fair_mean", lambda node: max(edge.value for edge in node.children))
        credit(settings("bpo-tree"))(trees)


def baseline_includes_own_rollout(trees: Sequence[RolloutTree]) -> None:
    correct = StateBaseline.__call__

    def everyone(self: StateBaseline, index: int, root: int, key: Any, prior: float | None = None) -> float:
        n, mean, _ = self._by_index[index].roots[root].get(key, (0.0, 0.0, 0.0))
        return (6 * correct(self, index, root, key, prior) + n * mean) / (6 + n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateBaseline, "__call__", everyone)
        credit(settings("rloo-key"))(trees)


def paths_counted_alike(trees: Sequence[RolloutTree]) -> None:
    credit(settings("rloo", **UNEVEN))(trees)
    for tree in trees:
        for edge in tree.edges():
            edge.weight *= len(tree.root.children) / UNEVEN["roots"]


PLANTED: dict[str, tuple[str, Credit]] = {
    "paths counted alike": ("uneven roots, siblings", paths_counted_alike),
    "weights not multiplied": ("online", weights_not_multiplied),
    "mean includes oneself": ("online", mean_includes_oneself),
    "best child for the mean": ("online", best_child_for_the_mean),
    "unit weights": ("online", credit(settings("bpo-tree", step_weight_power=0.0))),
    "sibling credit": ("online", credit(settings("bpo-tree", credit="sibling"))),
    "baseline includes own rollout": ("independent", baseline_includes_own_rollout),
}


@pytest.mark.parametrize("error", [pytest.param(each, marks=sampled_once(PLANTED[each][0])) for each in PLANTED])
def test_planted_error_is_caught(error: str) -> None:
    case, _ = PLANTED[error]
    found = compare(estimates(case, FAST)[error], case_of(case)[0].gradient())
    print(f"{error}: max|z| {found.z:.1f}, relative bias {found.bias:.2f}")
    assert found.biased, found


# What does not estimate the gradient, as the documentation says.


def test_paper_credit_carries_nothing_above_the_first_branch_point() -> None:
    args = settings("bpo-paper")
    mdp = random_mdp(seed=493)  # its first action matters
    batches = batches_of(mdp, lambda batch: ForkAt({1: 2, 2: 2}), batches=FAST)
    first = gradients(mdp, batches, {"": credit(args)})[""][:, :2]  # states 0 and 1 are only seen at step 0
    nothing, exact = compare(first, np.zeros((2, 2))), compare(first, mdp.gradient()[:2])
    print(f"paper, first step: max|z| {nothing.z:.1f} against 0, {exact.z:.1f} against the gradient")
    assert np.abs(first).max() > 0
    assert not nothing.biased
    assert exact.biased


@pytest.mark.parametrize(("schedule", "biased"), [("entropy", True), ("entropy-online", False)])
def test_ranking_the_finished_path_by_entropy_biases_and_the_causal_rule_does_not(schedule: str, biased: bool) -> None:
    mdp = telling_mdp()
    args = settings("bpo-tree", schedule=schedule, root_branch="free", points=1, width=4)
    found = compare(
        gradients(mdp, batches_of(mdp, scheduled(args), batches=FAST), {"": credit(args)})[""], mdp.gradient()
    )
    print(f"{schedule}: max|z| {found.z:.1f}, relative bias {found.bias:.3f}")
    assert found.biased == biased, found


# Identities.


def fingerprint(trees: Iterable[RolloutTree]) -> list[tuple[Any, ...]]:
    """Every decision with what it is credited with."""
    return [
        (tree.index, e.path, e.parent.observation, e.action.text, e.reward, e.value, e.advantage, e.weight)
        for tree in trees
        for e in tree.edges()
    ]


@pytest.mark.parametrize("root_branch", ["always", "free"])
def test_branching_only_the_root_is_rloo_bitwise(root_branch: str) -> None:
    branched = settings("bpo-tree", schedule="root", points=1, width=5, root_branch=root_branch)
    independent = settings("rloo", roots=5)
    prints = []
    for args in (branched, independent):
        (trees,) = batches_of(DENSE, scheduled(args), batches=1)
        credit(args)(trees)
        prints.append(fingerprint(trees))
    assert prints[0] == prints[1]


def test_leave_one_out_advantages_of_a_node_sum_to_zero() -> None:
    args = settings("bpo-tree", gamma=0.9)
    for trees in batches_of(DENSE, lambda batch: ForkAnywhere(roots=3), batches=20):
        credit(args)(trees)
        for tree in trees:
            assert tree.branch_nodes
            for node in tree.branch_nodes:
                assert sum(edge.advantage for edge in node.children) == pytest.approx(0.0, abs=1e-12)


def test_weights_of_every_depth_sum_to_one_without_terminations() -> None:
    args = settings("bpo-tree")
    for trees in batches_of(SPARSE, lambda batch: ForkAnywhere(roots=2), batches=20):
        credit(args)(trees)
        for edge in edges_of(trees):
            if edge.child.children:
                assert sum(e.weight for e in edge.child.children) == pytest.approx(edge.weight)
        for tree in trees:
            assert sum(edge.weight for edge in tree.root.children) == pytest.approx(1.0)


# Hand-computed credit.


def grow(tree: RolloutTree, start: Node, key: tuple[int, ...], *rewards: float) -> Path:
    """A path from ``start`` with these rewards."""
    path, node = Path(key, start), start
    for reward in rewards:
        edge = Edge(key, node, Action("a"), reward=reward)
        edge.child = Node(node.depth + 1, None, None, owner=key, parent=edge)
        node.children.append(edge)
        path.edges.append(edge)
        node = edge.child
    tree.paths.append(path)
    return path


def nested_tree() -> RolloutTree:
    """A backbone of three steps that succeeds, a sibling at step 1 and one at step 2 that fail."""
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    backbone = grow(tree, tree.root, (0, 0), 0, 0, 1)
    grow(tree, backbone.edges[1].parent, (0, 0, 1, 1), 0, 0)
    grow(tree, backbone.edges[2].parent, (0, 0, 2, 1), 0)
    return tree


@pytest.mark.parametrize(
    ("options", "advantages", "weights"),  # of the backbone's three steps, the first sibling's two, the second's one
    [
        ({"credit": "paper", "lam": 0.5}, [0.75, 1.5, 1, -1, 0, -1], [1] * 6),
        ({"credit": "sibling"}, [0, 1, 1, -1, -1, -1], [1] * 6),
        ({"credit": "tree"}, [0.25, 0.5, 1, -0.5, -0.5, -1], [1, 1 / 2, 1 / 4, 1 / 2, 1 / 2, 1 / 4]),
        (
            {"credit": "tree", "step_weight_power": 2},
            [0.25, 0.5, 1, -0.5, -0.5, -1],
            [1, 1 / 4, 1 / 16, 1 / 4, 1 / 4, 1 / 16],
        ),
    ],
)
def test_credit_of_a_small_tree(options: dict[str, Any], advantages: list[float], weights: list[float]) -> None:
    tree = nested_tree()
    credit(settings("bpo-tree", **options))([tree])
    assert [edge.advantage for edge in tree.edges()] == advantages
    assert [edge.weight for edge in tree.edges()] == weights


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_root_paths_share_the_weight_of_their_task_whatever_forks_count(power: float) -> None:
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    first = grow(tree, tree.root, (0, 0), 0, 1)
    grow(tree, tree.root, (0, 1), 0)
    grow(tree, first.edges[1].parent, (0, 0, 1, 1), 0)
    credit(settings("bpo-tree", roots=2, step_weight_power=power))([tree])
    assert [edge.weight for edge in tree.edges()] == [1 / 2, 1 / 2 * 2**-power, 1 / 2, 1 / 2 * 2**-power]


def test_carried_baseline_is_reduced_by_rewards_and_undiscounted() -> None:
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    grow(tree, tree.root, (0, 0), 1, 2)  # returns 2 and 1 at γ = 1/2
    grow(tree, tree.root, (0, 1), 0, 2)
    credit(settings("rloo", roots=2, gamma=0.5))([tree])
    assert [edge.advantage for edge in tree.edges()] == [1, 2, -1, -2]


def test_single_rollouts_are_compared_with_the_other_tasks() -> None:
    trees = [RolloutTree(None, index, Node(0, None, None, owner=())) for index in range(3)]
    for tree, reward in zip(trees, (1.0, 0.0, 0.5)):
        grow(tree, tree.root, (0, 0), 0.0, reward)
    credit(settings("rloo", roots=1))(trees)
    assert [edge.advantage for edge in edges_of(trees)] == [0.75, 0.75, -0.75, -0.75, 0.0, 0.0]


@pytest.mark.parametrize(("std", "expected"), [(True, 0.75 / 0.4330127), (False, 0.75)])
def test_group_credit_is_the_standardised_return(std: bool, expected: float) -> None:
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    for i, reward in enumerate((1, 0, 0, 0)):
        grow(tree, tree.root, (0, i), 0, reward)
    credit(settings("grpo", roots=4, group_std=std))([tree])
    assert [edge.advantage for edge in tree.paths[0].edges] == pytest.approx([expected] * 2, rel=1e-3)
    assert sum(path.edges[0].advantage for path in tree.paths) == pytest.approx(0.0)


# State baselines against the published formulas, written out again.


@pytest.mark.parametrize("kind", ["turn", "key"])
def test_state_baseline_is_the_formula(kind: str) -> None:
    """b = (Σ_{other rollouts of the task there} R + 6 m) / (n + 6), m = (Σ_{other tasks'} R + 2 R̄) / (n' + 2)."""
    args = settings(f"rloo-{kind}", roots=4)
    (trees,) = batches_of(SPARSE, scheduled(args), batches=1, prompts=5)
    credit(args)(trees)

    def place(edge: Edge) -> Any:
        depth = edge.parent.depth
        return depth if kind == "turn" else (edge.parent.observation % 3, depth // 2)

    rollouts = [
        (tree.index, path, path.total_reward, {place(edge) for edge in path.edges})
        for tree in trees
        for path in tree.paths
    ]
    for task, path, outcome, _ in rollouts:
        overall = np.mean([r for other, _, r, _ in rollouts if other != task])
        for edge in path.edges:
            there = [(other, p, r) for other, p, r, places in rollouts if place(edge) in places]
            foreign = [r for other, _, r in there if other != task]
            own = [r for other, p, r in there if other == task and p is not path]
            m = (sum(foreign) + 2 * overall) / (len(foreign) + 2)
            b = (sum(own) + 6 * m) / (len(own) + 6)
            assert edge.advantage == pytest.approx(outcome - b)


def test_state_baseline_ignores_its_own_rollout_and_everything_forked_off_it() -> None:
    args = settings("bpo-key", roots=2)
    (trees,) = batches_of(SPARSE, lambda batch: ForkAnywhere(roots=2), batches=1)
    credit(args)(trees)
    before = {id(e): e.value - e.advantage for e in trees[0].edges()}
    mine = [edge for path in trees[0].paths if path.key[1] == 0 for edge in path.edges]
    for edge in mine:
        edge.reward += 10.0 if not edge.child.children else 0.0
    credit(args)(trees)
    assert [e.value - e.advantage for e in mine] == pytest.approx([before[id(e)] for e in mine])
