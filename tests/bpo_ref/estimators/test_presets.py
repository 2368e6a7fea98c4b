"""The presets of ``--algo`` beyond plain trees: splitting, roulette, forests, Monte-Carlo values, a value head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tabular import MDP, TabularEnv, TabularPolicy, batches_of, compare, gradients, random_mdp
from test_estimators import (
    CASES,
    DENSE,
    FOREST,
    ROULETTE,
    SPARSE,
    SPLIT,
    ForkAt,
    blank,
    case_of,
    credit,
    edges_of,
    fingerprint,
    grow,
    scheduled,
    settings,
    taught,
)

from bpo_ref.baselines import (
    ForkDepth,
    ForkSample,
    Memory,
    Shrinkage,
    TaskSpread,
    TreeSummary,
    ValueTable,
    state_key,
    summarize,
)
from bpo_ref.config import ConfigError
from bpo_ref.experiments import value_oracle
from bpo_ref.experiments.value_oracle import FIRST, value_scores
from bpo_ref.learning.batch import Critique
from bpo_ref.schedules import make_schedule
from bpo_ref.train import assign_credit, back_up
from sandboxgym.tree import Envs, Node, RolloutTree, rollout

# Splitting and roulette.


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("baseline", ["value", "pooled"])
def test_splitting_that_never_splits_is_rloo_with_the_same_baseline_bitwise(baseline: str, known: bool) -> None:
    never = settings("bpo-split", **{**SPLIT, "points": 1e-9}, baseline=baseline)
    plain = settings(f"rloo-{baseline}", roots=4)
    memory = taught(DENSE, plain, batches=5) if known else blank(plain)
    prints = []
    for args in (never, plain):
        (trees,) = batches_of(DENSE, scheduled(args, memory), batches=1)
        assign_credit(trees, args, memory)
        prints.append(fingerprint(trees))
    assert prints[0] == prints[1]
    assert any(entry[-2] for entry in prints[0])


def test_the_tested_cases_do_split_and_stop() -> None:
    for name in ("split", "split with roulette"):
        mdp, schedule, _, _ = case_of(name)
        trees = [tree for batch in batches_of(mdp, schedule, batches=30) for tree in batch]
        forks = [len(path.key) // 2 - 1 for tree in trees for path in tree.paths]
        assert max(forks) >= 2  # forks off forks
        stopped = [edge for edge in edges_of(trees) if edge.child.stopped]
        survived = [edge for edge in edges_of(trees) if edge.child.survival < 1 and not edge.child.stopped]
        assert bool(stopped) == bool(survived) == (name != "split")
        assert all(edge.truncated and not edge.child.children for edge in stopped)
        assert len(stopped) == pytest.approx(len(survived), abs=4 * np.sqrt(len(stopped) + len(survived)))


def test_splits_come_where_the_importance_has_quadrupled() -> None:
    args = settings("bpo-split", **SPLIT)
    memory = taught(SPARSE, args, batches=20)
    (trees,) = batches_of(SPARSE, scheduled(args, memory), batches=1, prompts=40)
    table, limit = memory.values, args.max_turns

    def walk(node: Node, splits: int) -> None:
        if not node.children:
            return
        importance = table.variance(state_key(node, "key")) * (node.depth + 1) / (limit - node.depth)
        wanted = node.depth > 0 and splits < 3 and importance >= 4 ** (splits + 1) * table.spread / limit
        if node.depth:
            assert len(node.children) == (2 if wanted else 1)
        for edge in node.children:
            walk(edge.child, splits + wanted)

    for tree in trees:
        walk(tree.root, 0)


def test_what_roulette_hands_up_and_how_survivors_count() -> None:
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    for number in range(2):
        path = grow(tree, tree.root, (0, number), 0, 0, 1)
        path.edges[1].child.survival = 0.25
    killed = grow(tree, tree.root, (0, 2), 0, 0)
    killed.edges[1].child.survival, killed.edges[1].child.stopped = 0.25, True
    back_up(tree, 1.0, lambda node: 0.1)
    assert [edge.value for edge in tree.paths[0].edges] == pytest.approx([3.7, 3.7, 1.0])  # .1 + (1 - .1) / .25
    assert [edge.value for edge in killed.edges] == pytest.approx([0.1, 0.1])
    credit(settings("rloo-value", roots=3))([tree])
    assert [edge.weight for edge in tree.paths[0].edges] == pytest.approx([1 / 3, 1 / 3, 4 / 3])
    assert [edge.weight for edge in killed.edges] == pytest.approx([1 / 3, 1 / 3])


def test_roulette_waits_until_low_values_have_proved_low() -> None:
    args = settings("bpo-split", **SPLIT, **ROULETTE)
    memory = taught(SPARSE, args, batches=20)
    assert memory.values.trusts(0.4)
    memory.values._low = [100.0, 100.0]  # they have turned out to be worth 1 each
    (trees,) = batches_of(SPARSE, scheduled(args, memory), batches=1, prompts=20)
    assert not any(edge.child.survival < 1 for edge in edges_of(trees))


def test_low_values_are_trusted_after_ten_states_that_brought_at_most_twice_as_much() -> None:
    def trusts(states: float, total: float) -> bool:
        return ValueTable(state={"low": [states, total]}).trusts(0.4)

    assert not trusts(0, 0) and not trusts(9, 0)
    assert trusts(10, 7.9) and not trusts(10, 8.1)


@pytest.mark.parametrize(("forks", "remembered"), [("backbone", 1), ("roots", 2), ("all", 2)])
def test_entropies_are_remembered_of_the_paths_that_are_forked(forks: Any, remembered: int) -> None:
    args = settings("bpo-tree", roots=2, forks=forks)
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    for number in range(2):
        grow(tree, tree.root, (0, number), 0, 1)
    memory = Memory.of(args)
    memory.observe([tree], assign_credit([tree], args, memory), args)
    assert len(memory.entropies.history) == remembered


# Planted errors.


def survivors_count_once(trees: Sequence[RolloutTree], args: Any, memory: Any) -> None:
    assign_credit(trees, args, memory)
    for tree in trees:
        for path in tree.paths:
            for edge in path.edges:
                above = [edge.parent, *(e.parent for e in path.edges if e.parent.depth < edge.parent.depth)]
                edge.weight *= min(node.survival for node in above)


def stopped_paths_are_worth_nothing(trees: Sequence[RolloutTree], args: Any, memory: Any) -> None:
    for tree in trees:
        for edge in tree.edges():
            if not edge.child.stopped:
                edge.child.survival = 1.0
    assign_credit(trees, args, memory)


def split_steps_count_alike(trees: Sequence[RolloutTree], args: Any, memory: Any) -> None:
    assign_credit(trees, args, memory)
    for edge in edges_of(trees):
        edge.weight = 0.25


def values_of_the_batch_itself(trees: Sequence[RolloutTree], args: Any, memory: Any) -> None:
    for tree in trees:
        back_up(tree, args.gamma)
    table = ValueTable()
    table.observe([summarize(tree, "key") for tree in trees], low=0.0)
    assign_credit(trees, args, replace(memory, values=table))


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("split with roulette", survivors_count_once),
        ("split with roulette", stopped_paths_are_worth_nothing),
        ("split", split_steps_count_alike),
        ("earlier batches", values_of_the_batch_itself),
    ],
)
def test_planted_error_is_caught(case: str, error: Callable[..., None]) -> None:
    mdp, schedule, _, credits = case_of(case)
    args, memory = next(iter(credits.values()))

    def wrong(trees: Sequence[RolloutTree]) -> None:
        error(trees, args, memory)

    found = compare(gradients(mdp, batches_of(mdp, schedule, batches=300), {"": wrong})[""], mdp.gradient())
    print(f"{error.__name__}: max|z| {found.z:.1f}, relative bias {found.bias:.2f}")
    assert found.biased, found


# What earlier batches teach.


def test_value_table_is_the_formula() -> None:
    args = settings("rloo-key", roots=3)
    batches = list(batches_of(SPARSE, scheduled(args), batches=2))
    table = ValueTable(decay=0.5)
    seen: list[dict[Any, list[float]]] = []
    for trees in batches:
        credit(args)(trees)
        table.observe([summarize(tree, "key") for tree in trees], low=0.0)
        places: dict[Any, list[float]] = {}
        for path in (path for tree in trees for path in tree.paths):
            for key in {state_key(edge.parent, "key") for edge in path.edges}:
                places.setdefault(key, []).append(path.total_reward)
        seen.append(places)
    returns = [[path.total_reward for tree in trees for path in tree.paths] for trees in batches]
    n = 0.5 * len(returns[0]) + len(returns[1])
    mean = (0.5 * sum(returns[0]) + sum(returns[1])) / n
    assert table.mean == pytest.approx(mean)
    assert table.spread == pytest.approx(mean * (1 - mean))
    for key in seen[0].keys() | seen[1].keys():
        old, new = seen[0].get(key, []), seen[1].get(key, [])
        value = (0.5 * sum(old) + sum(new) + 2 * mean) / (0.5 * len(old) + len(new) + 2)
        assert table.value(key) == pytest.approx(value)
        assert table.variance(key) == pytest.approx(value * (1 - value))  # returns are 0 or 1
    again = ValueTable(decay=0.5, state=table.state())
    assert again.state() == table.state()


def test_states_that_are_not_met_any_more_are_forgotten() -> None:
    """Keys of tasks that never come again would else be walked through, and saved, for ever."""

    def batch(key: str) -> list[Any]:
        return [SimpleNamespace(kind="", roots=[{key: (1.0, 0.5, 0.25)}], returns=[(0.5, 0.25)])]

    table = ValueTable(decay=0.5)
    sizes = []
    for number in range(40):
        table.observe(batch(f"task {number}"), low=0.0)
        sizes.append(len(table.state()["sums"]))
    assert sizes[:3] == [1, 2, 3] and max(sizes) == sizes[-1] == 10  # a half to the power of nine is above 0.001
    assert table.state()["sums"][-1][0] == "task 39"


def tree_of(kind: str, returns: Sequence[float], index: int = 0) -> RolloutTree:
    """Root paths of one step, all from one state."""
    tree = RolloutTree(None, index, Node(0, None, "a", owner=()), kind=kind)
    for number, value in enumerate(returns):
        grow(tree, tree.root, (0, number), value)
    back_up(tree, 1.0)
    return tree


def test_values_of_a_type_of_task_are_shrunk_to_those_of_all() -> None:
    table = ValueTable()
    trees = [tree_of("easy", [1.0, 1.0, 1.0]), tree_of("hard", [0.0, 0.0, 1.0], index=1)]
    table.observe([summarize(tree, "key") for tree in trees], low=0.0)
    place = state_key(trees[0].root, "key")
    mean = 4 / 6
    shared = (4 + 2 * mean) / (6 + 2)
    easy = (3 + 4 * shared) / (3 + 4)
    assert table.value(place) == pytest.approx(shared)
    assert table.value(place, "easy") == pytest.approx(easy)
    assert table.value(place, "hard") == pytest.approx((1 + 4 * shared) / (3 + 4))
    assert table.value(place, "never seen") == pytest.approx(shared)
    assert table.variance(place, "easy") == pytest.approx(easy * (1 - easy))  # returns are 0 or 1


def test_the_pooled_baseline_is_the_formula() -> None:
    args = settings("rloo-pooled", roots=3)
    memory = blank(args)
    memory.values.observe([summarize(tree_of("easy", [1.0, 0.0]), "key")], low=0.0)
    tree, other = tree_of("easy", [1.0, 0.0, 0.0]), tree_of("hard", [1.0, 1.0, 1.0], index=1)
    assign_credit([tree, other], args, memory)
    value = memory.values.value(state_key(tree.root, "key"), "easy")
    rest = [0.0, 1.0, 1.0]  # summed return of the other two
    expected = [own - (others + 6 * value) / (2 + 6) for own, others in zip([1.0, 0.0, 0.0], rest)]
    assert [edge.advantage for edge in tree.root.children] == pytest.approx(expected)


def test_variance_of_rewards_that_are_not_0_or_1() -> None:
    tree = RolloutTree(None, 0, Node(0, None, "a", owner=()))
    grow(tree, tree.root, (0, 0), 1, 2)
    grow(tree, tree.root, (0, 1), 0, 5)
    back_up(tree, 1.0)
    table = ValueTable()
    table.observe([summarize(tree, "key")], low=0.0)
    assert (table.mean, table.spread) == (4.0, 1.0)  # returns 3 and 5


@pytest.mark.parametrize("width", [2, 4])
def test_shrinkage_finds_the_variances(width: int) -> None:
    """Forks with noise of variance 3 within, whose states' values differ from the baseline with variance 1.5."""
    rng = np.random.default_rng(0)
    found = Shrinkage()
    assert found.weight(width) == (width - 1) / (width + 1)
    for _ in range(40):
        states = rng.normal(scale=np.sqrt(1.5), size=100)
        children = states[:, None] + rng.normal(scale=np.sqrt(3.0), size=(100, width))
        samples = zip(children.var(axis=1, ddof=1), children.mean(axis=1))
        found.observe(ForkSample(0, width, float(within), float(apart)) for within, apart in samples)
    assert found.kappa == pytest.approx(2.0, rel=0.2)


def test_forests_fork_where_three_tenths_are_explained() -> None:
    """Returns are sums of ten equal random steps: the first three explain .3 of the variance."""
    rng = np.random.default_rng(0)
    depth = ForkDepth(8.0, limit=10)
    found = []
    for _ in range(200):
        samples = []
        for _ in range(16):
            at = int(np.floor(depth.depth + rng.random()))
            steps = rng.normal(size=(8, 10))
            twins = steps.copy()
            twins[:, at:] = rng.normal(size=(8, 10 - at))
            within = (steps.sum(axis=1) - twins.sum(axis=1)) ** 2 / 2
            samples.append((float(within.mean()), float(steps.sum(axis=1).var(ddof=1))))
        depth.observe(samples)
        found.append(depth.depth)
    assert np.mean(found[50:]) == pytest.approx(3.0, abs=0.35)


# Monte-Carlo values (VinePPO).


def test_monte_carlo_credit_of_a_small_tree() -> None:
    """One root path of rewards 0, 0, 1; rollouts for values from the root (0, 1), step 1 (1, 1) and step 2 (0)."""
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    path = grow(tree, tree.root, (0, 0), 0, 0, 1)
    for number, rewards in ((1, (0, 0)), (2, (0, 1))):
        grow(tree, tree.root, (0, number), *rewards)
    for number in (1, 2):
        grow(tree, path.edges[1].parent, (0, 0, 1, number), 1)
    grow(tree, path.edges[2].parent, (0, 0, 2, 1), 0)
    credit(settings("vineppo", roots=1))([tree])
    assert [edge.advantage for edge in path.edges] == [0.5, -1.0, 1.0]  # 1 - .5, 0 - 1, 1 - 0
    assert [edge.weight for edge in path.edges] == [1.0] * 3
    assert all(edge.weight == edge.advantage == 0 for other in tree.paths[1:] for edge in other.edges)


def test_every_state_of_the_root_paths_is_valued_and_nothing_else() -> None:
    args = settings("vineppo", roots=2, mc_rollouts=3)
    (trees,) = batches_of(SPARSE, scheduled(args), batches=1)
    for tree in trees:
        own = [path for path in tree.paths if path.key in ((0, 0), (0, 1))]
        assert len(tree.root.children) == 2 + 3
        assert len(tree.paths) == 2 + 3 + 3 * sum(len(path.edges) - 1 for path in own)
        assert all(len(edge.parent.children) == 4 for path in own for edge in path.edges[1:])


# A value head.


def criticised(value: Callable[[Node], float], args: Any) -> Callable[[Sequence[RolloutTree]], None]:
    def assign(trees: Sequence[RolloutTree]) -> None:
        for edge in edges_of(trees):
            edge.data = Critique([value(edge.parent)])
        assign_credit(trees, args, blank(args))

    return assign


@functools.cache
def exact_values() -> np.ndarray:
    return np.asarray((SPARSE.policy * SPARSE.action_values()).sum(axis=2))


def right(node: Node) -> float:
    return float(exact_values()[node.depth, node.observation])


def anything(node: Node) -> float:
    return float(np.sin(7 * node.depth + 3 * node.observation))


@pytest.mark.parametrize(
    ("options", "value", "biased"),
    [
        ({"algo": "rloo", "baseline": "critic"}, anything, False),
        ({"algo": "bpo-tree", "baseline": "critic"}, anything, False),
        ({"algo": "ppo", "advantage_norm": "none", "gae_lam": 1.0}, anything, False),
        ({"algo": "ppo", "advantage_norm": "none", "gae_lam": 0.6}, right, False),
        ({"algo": "ppo", "advantage_norm": "none", "gae_lam": 0.6}, anything, True),
    ],
)
def test_a_value_head_biases_through_bootstrapping_alone(
    options: dict[str, Any], value: Callable[[Node], float], biased: bool
) -> None:
    args = settings(**options)
    samples = gradients(SPARSE, batches_of(SPARSE, scheduled(args), batches=400), {"": criticised(value, args)})[""]
    found = compare(samples, SPARSE.gradient())
    print(f"{options}, {value.__name__}: max|z| {found.z:.1f}")
    assert found.biased == biased, found


def with_tokens(rewards: Sequence[float], values: Sequence[Sequence[float]]) -> RolloutTree:
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    path = grow(tree, tree.root, (0, 0), *rewards)
    for edge, row in zip(path.edges, values):
        edge.action.tokens, edge.data = len(row), Critique(list(row))
    return tree


def test_advantage_estimation_over_turns() -> None:
    tree = with_tokens([1, 2], [[0.5, 9.0], [0.25]])
    credit(settings("ppo", advantage_norm="none", gamma=0.5, gae_lam=0.5))([tree])
    last = 2 - 0.25
    first = 1 + 0.5 * 0.25 - 0.5 + 0.25 * last
    assert [edge.advantage for edge in tree.edges()] == [first, last]
    one, two = (edge.data.targets for edge in tree.edges())
    assert one[0] == first + 0.5 and np.isnan(one[1]) and two == [2.0]


def test_advantage_estimation_over_tokens() -> None:
    tree = with_tokens([1, 2], [[0.5, 0.75], [0.25]])
    credit(settings("ppo", advantage_norm="none", gae_steps="token", gamma=0.5, gae_lam=0.5))([tree])
    last = 2 - 0.25
    second = 1 + 0.5 * 0.25 - 0.75 + 0.25 * last
    first = 0.75 - 0.5 + 0.5 * second  # no discount within an action
    assert [edge.data.advantages for edge in tree.edges()] == [[first, second], [last]]
    assert [edge.data.targets for edge in tree.edges()] == [[first + 0.5, second + 0.75], [last + 0.25]]


@pytest.mark.parametrize("steps", ["turn", "token"])
def test_normalised_advantages_have_mean_0_and_variance_1_over_tokens(steps: str) -> None:
    tree = with_tokens([1, 0, 3], [[0.5, 0.1], [0.25], [0.3, 0.2, 0.1]])
    credit(settings("ppo", gae_steps=steps))([tree])
    every = [a for e in tree.edges() for a in e.data.advantages or [e.advantage] * e.action.tokens]
    assert len(every) == 6
    assert np.mean(every) == pytest.approx(0.0, abs=1e-9) and np.std(every) == pytest.approx(1.0, rel=1e-6)


# The oracle.


def deciding_mdp(step: int, horizon: int = 4) -> MDP:
    """States are steps, but one action decides: taken at ``step``, it leads to the winning copy of what follows."""
    states = 2 * horizon
    transitions, rewards = np.zeros((states, 2, states + 1)), np.zeros((states, 2, states + 1))
    for lane in (0, 1):
        for t in range(horizon):
            here, after = lane * horizon + t, t + 1
            for action in (0, 1):
                to = action if t == step else lane
                target = states if after == horizon else to * horizon + after
                transitions[here, action, target] = 1.0
                rewards[here, action, states] = float(to) if after == horizon else 0.0
    return MDP(transitions, rewards, np.zeros((states, 2)), horizon)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_the_oracle_finds_the_step_that_decides(step: int) -> None:
    mdp = deciding_mdp(step)
    envs, policy = Envs(lambda: TabularEnv(mdp)), TabularPolicy(mdp)
    args = settings("bpo-tree", schedule="value-oracle", root_branch="free", points=1, width=6)
    scores = value_scores(envs, policy, [0] * 4, seed=(3,), width=6, rollouts=8)
    trees = rollout(envs, policy, make_schedule(args, (3,), blank(args), scores), tasks=[0] * 4, seed=(3,))
    best = [max((d for i, d in scores if i == index), key=lambda d: scores[index, d]) for index in range(4)]
    found = [[node.depth for node in tree.branch_nodes] for tree in trees]
    assert found == [[depth] for depth in best]
    assert best.count(step) >= 3  # six equal fair coins are possible
    assert all(number < FIRST for tree in trees for path in tree.paths for number in path.key[1::2])
    envs.close()


def noted(trees: list[RolloutTree], counted: list[int]) -> list[RolloutTree]:
    counted.append(sum(len(tree.paths) for tree in trees))
    return trees


@pytest.mark.parametrize("rollouts", [2, 4])
def test_the_oracle_is_not_drawn_to_where_chance_is_largest(rollouts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 decides, others decide nothing: their scores are 0 in the mean, however few the rollouts."""
    mdp = deciding_mdp(2)
    envs, policy = Envs(lambda: TabularEnv(mdp)), TabularPolicy(mdp)
    counted: list[int] = []
    monkeypatch.setattr(value_oracle, "rollout", lambda *args, **kwargs: noted(rollout(*args, **kwargs), counted))
    scores = value_scores(envs, policy, [0] * 200, seed=(5,), width=4, rollouts=rollouts)
    # four actions at four steps, the last of which end the episode; nothing forks again
    assert counted == [200 * (1 + 4 * (3 * rollouts + 1))]
    for depth, expected in enumerate((0.0, 0.0, 0.25, 0.0)):
        found = np.array([scores[index, depth] for index in range(200)])
        assert abs(found.mean() - expected) < 4 * found.std() / len(found) ** 0.5 + 1e-9, depth
    assert np.std([scores[index, 0] for index in range(200)]) > 0.01
    envs.close()


# The formula of the variance.


def chain_mdp(steps: int, chance: float, need: int) -> MDP:
    """The first action succeeds; won with ``need`` successes of ``steps``. A state is (step, successes)."""
    number = {(t, c): i for i, (t, c) in enumerate((t, c) for t in range(steps) for c in range(t + 1))}
    states = len(number)
    transitions, rewards = np.zeros((states, 2, states + 1)), np.zeros((states, 2, states + 1))
    for (t, c), here in number.items():
        for action, gained in ((0, 1), (1, 0)):
            transitions[here, action, number.get((t + 1, c + gained), states)] = 1.0
            if t + 1 == steps:
                rewards[here, action, states] = float(c + gained >= need)
    logits = np.tile([np.log(chance / (1 - chance)), 0.0], (states, 1))
    return MDP(transitions, rewards, logits, steps)


def decided(mdp: MDP) -> tuple[np.ndarray, np.ndarray]:
    """(s_u, e_t): variance of the return that is decided at each step, and the mean squared score."""
    q = mdp.action_values()
    v = (mdp.policy * q).sum(axis=2)
    s = np.einsum("ts,sa,tsa->t", mdp.occupancy(), mdp.policy, (q - v[:, :, None]) ** 2)
    squared = (mdp.policy * (1 - 2 * mdp.policy + (mdp.policy**2).sum(axis=1, keepdims=True))).sum(axis=1)
    return s, mdp.occupancy() @ squared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roots", "fork", "width", "critic"),
    [(8, None, 1, False), (8, None, 1, True), (4, 6, 2, False), (4, 6, 4, False), (4, 6, 2, True), (8, 8, 2, False)],
)
def test_the_variance_formula_holds_on_a_chain(roots: int, fork: int | None, width: int, critic: bool) -> None:
    """tr Cov = Σ e_t P_t / n_t + Σ s_u E_≤u / n_u: n distinct nodes, P the squared error of the baseline."""
    steps = 12
    mdp = chain_mdp(steps, 0.5, 7)
    s, e = decided(mdp)
    n = np.array([roots * (width if fork is not None and t >= fork else 1) for t in range(steps)], dtype=float)
    leaf = s / (n / roots)  # what a root path's backed-up value is uncertain by, at each step
    p = np.zeros(steps)
    if not critic:
        for t in range(steps):
            if fork is None or t < fork:
                p[t] = s[:t].sum() + leaf.sum() / (roots - 1)
            else:
                p[t] = s[fork:t].sum() + s[fork:].sum() / (width - 1)
    expected = (e * p / n).sum() + (s * e.cumsum() / n).sum()

    baseline = "critic" if critic else "none"
    args = settings("bpo-tree", roots=roots, width=max(2, width), max_turns=steps, baseline=baseline)
    values = (mdp.policy * mdp.action_values()).sum(axis=2)
    assign = criticised(lambda node: float(values[node.depth, node.observation]), args) if critic else credit(args)

    class EveryRoot(ForkAt):
        def now(self, tree: Any, path: Any, node: Any, action: Any) -> int:
            return self._siblings.get(node.depth, 0) if len(path.key) == 2 else 0

    forks = {} if fork is None else {fork: width - 1}
    batches = batches_of(mdp, lambda batch: EveryRoot(forks, roots=roots), batches=1000, prompts=1)
    samples = gradients(mdp, batches, {"": assign})[""]
    measured = samples.reshape(len(samples), -1).var(axis=0, ddof=1).sum()
    print(f"W={roots} fork at {fork} K={width} critic={critic}: measured {measured:.4f}, formula {expected:.4f}")
    assert measured == pytest.approx(expected, rel=0.1)


# Root paths shared out by what earlier batches tell of the tasks.


def spread_of(**shares: float) -> TaskSpread:
    """Tasks that were met a million times, with returns of 0 or 1: name -> share of 1."""
    return TaskSpread(1.0, [(name, (1e6, 1e6 * p, 1e6 * p)) for name, p in shares.items()])


def test_root_paths_are_allotted_by_standard_deviation() -> None:
    spread = spread_of(even=0.5, rare=0.1, certain=1.0)  # standard deviations .5, .3 and nearly 0
    assert spread.allot(["even", "rare"], mean=8, least=1) == [10, 6]
    assert spread.allot(["rare", "even", "even"], mean=13, least=1) == [9, 15, 15]
    assert spread.allot(["even", "certain"], mean=4, least=1) == [7, 1]
    assert spread.allot(["even", "certain"], mean=4, least=2) == [6, 2]
    assert spread.allot(["even", *["certain"] * 7], mean=4, least=1) == [16, 3, 3, 2, 2, 2, 2, 2]
    assert spread.allot(["certain", "certain"], mean=4, least=1) == [4, 4]


def test_tasks_never_met_are_taken_for_the_average_one() -> None:
    assert TaskSpread().allot([3, 4, 5], mean=4, least=1) == [4, 4, 4]
    spread = TaskSpread(1.0, [(0, (8, 8, 8)), (1, (8, 0, 0)), (2, (8, 4, 4))])
    all_right, all_wrong, mixed, new = spread.allot([0, 1, 2, 3], mean=8, least=1)
    assert all_right == all_wrong < mixed == new
    assert all_right > 1  # eight of eight may be luck


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(2, 12),
    st.integers(1, 2),
)
def test_no_more_is_allotted_than_there_is(known: list[tuple[int, float]], mean: int, least: int) -> None:
    spread = TaskSpread(1.0, [(i, (n, n * p, n * p)) for i, (n, p) in enumerate(known)])
    tasks = [*range(len(known)), "unknown"]
    numbers = spread.allot(tasks, mean=mean, least=least)
    assert sum(numbers) <= mean * len(tasks)
    assert min(numbers) >= least and max(numbers) <= 4 * mean
    assert sum(numbers) == mean * len(tasks) or 4 * mean in numbers


def test_what_was_met_long_ago_fades_and_a_checkpoint_keeps_it() -> None:
    args = settings("rloo-pooled", roots=4, allocation="spread", value_decay=0.5)
    memory = Memory.of(args)
    for returns in ([(1.0, 1.0), (0.0, 0.0)], [(0.5, 0.3)]):
        memory.spread.observe([TreeSummary("task", 0, "", 0.0, [], returns)])
    memory.spread.observe([TreeSummary("other", 0, "", 0.0, [], [(1.0, 1.0)])])
    kept = {task: entry.tolist() for task, entry in memory.spread.sums.items()}
    assert kept == {"task": pytest.approx([1.0, 0.5, 0.4]), "other": [1.0, 1.0, 1.0]}
    again = Memory.of(args, memory.state()).spread.sums
    assert {task: entry.tolist() for task, entry in again.items()} == kept


def test_uneven_root_paths_need_tasks_that_come_again() -> None:
    args = settings("rloo-pooled", roots=4, allocation="spread")
    for tasks in ((), (None, None)):
        with pytest.raises(ConfigError, match=r"allocation: spread needs tasks that recur; .* has no num_tasks"):
            make_schedule(args, (0,), Memory.of(args), tasks=tasks)


def test_a_task_of_one_root_path_says_nothing_of_the_depth_to_fork_at() -> None:
    args = settings("bpo-forest", **FOREST)
    trees = [tree for batch in batches_of(SPARSE, scheduled(args), batches=5) for tree in batch]
    for tree in trees:
        back_up(tree, 1.0)
    assert any(ForkDepth.sample(tree, [0.0, 1.0])[0] for tree in trees)
    assert {ForkDepth.sample(tree, [1.0]) for tree in trees} == {(0.0, 0.0)}


def test_uneven_root_paths_lower_the_variance() -> None:
    """One of two tasks is decided beforehand: all but the least number of independent rollouts goes to the other."""
    transitions, rewards = np.zeros((2, 2, 3)), np.zeros((2, 2, 3))
    transitions[:, :, 2] = 1.0
    rewards[0], rewards[1, 1] = 1.0, 1.0
    mdp = MDP(transitions, rewards, np.zeros((2, 2)), 1, starts=(0, 1))
    variances = {}
    for allocation in ("equal", "spread"):
        args = settings("rloo", roots=4, value_decay=1.0, allocation=allocation)
        memory = taught(mdp, args)
        samples = gradients(mdp, batches_of(mdp, scheduled(args, memory), batches=4000), {"": credit(args, memory)})[""]
        assert samples.mean(axis=0) == pytest.approx(mdp.gradient(), abs=4e-3)
        variances[allocation] = samples.reshape(len(samples), -1).var(axis=0, ddof=1).sum()
    print(variances)
    # g is a sample variance of n fair coins, whose own variance goes as 1 / (n (n - 1)); 4 and 4 paths become 2 and 6
    assert variances["spread"] / variances["equal"] == pytest.approx(4 * 3 / (6 * 5), rel=0.1)


def test_cases_cover_every_unbiased_preset() -> None:
    named = {name for *_, credits in map(case_of, CASES) for name in credits}
    assert {"rloo", "rloo-turn", "rloo-key", "rloo-value", "vineppo", "bpo-tree", "bpo-forest", "bpo-split"} <= named
    assert random_mdp(seed=244).horizon == SPARSE.horizon


def test_gae_has_a_lambda_of_its_own() -> None:
    assert settings("ppo", lam=0.3).gae_lam == 0.95
    assert settings("ppo", gae_steps="token").gae_lam == 1.0
    tree = with_tokens([1, 2], [[0.5], [0.25]])
    credit(settings("ppo", advantage_norm="none", lam=0.0))([tree])
    assert next(iter(tree.edges())).advantage == pytest.approx(1 + 0.25 - 0.5 + 0.95 * (2 - 0.25))
