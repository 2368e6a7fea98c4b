"""`rollout/success` and `rollout/reward` estimate the policy without bias, whatever was forked and stopped."""

from __future__ import annotations

import json
from pathlib import Path as FilePath

import numpy as np
import pytest
from tabular import batches_of
from test_estimators import CASES, SPARSE, SPLIT, Case, errors_away, estimated_return, grow, scheduled, settings
from tiny_runs import metrics, trained

from bpo_ref.run_log import batch_metrics, batch_totals, root_weights, success_of
from bpo_ref.sampling.generate import Generation
from sandboxgym.tree import Node, RolloutTree
from sandboxgym.tree.files import load_trees

POST_HOC = {
    f"{algo}, {schedule}": (SPARSE, scheduled(args), 1.0, {"": args})
    for algo in ("bpo-paper", "bpo-tree")
    for schedule in ("entropy", "lowest", "random", "spaced", "root")
    if (args := settings(algo, schedule=schedule, width=2, points=2))
}


def estimates(case: Case, batches: int) -> tuple[list[float], list[float]]:
    """The estimate of every batch, and what counting every path once says."""
    mdp, schedule, _, credits = case
    found = next(iter(credits.values()))
    args = found[0] if isinstance(found, tuple) else found
    fair, once = [], []
    for trees in batches_of(mdp, schedule, batches=batches):
        fair.append(estimated_return(trees, args))
        once.append(float(np.mean([path.total_reward for tree in trees for path in tree.paths])))
    return fair, once


FEW = ("independent", "forks off forks", "Monte-Carlo values", "uneven roots, split", "bpo-paper, entropy")


def made(name: str) -> Case:
    case = {**CASES, **POST_HOC}[name]
    return case() if callable(case) else case


@pytest.mark.parametrize("name", FEW)
def test_the_mean_over_batches_is_the_expected_return(name: str) -> None:
    case = made(name)
    fair, _ = estimates(case, 80)
    assert errors_away(fair, case[0]) < 3.9


# The cases of estimators are in test_estimators.py, which has their trees.
@pytest.mark.slow
@pytest.mark.parametrize("name", POST_HOC)
def test_the_mean_over_many_batches_is_the_expected_return(name: str) -> None:
    case = made(name)
    fair, _ = estimates(case, 400)
    assert errors_away(fair, case[0]) < 3.9  # false alarms of all cases together: 0.1 %


def test_counting_every_path_once_would_be_caught() -> None:
    case = made("split with roulette")
    fair, once = estimates(case, 100)
    assert errors_away(fair, case[0]) < 3.9 < errors_away(once, case[0])


def small_tree(*, survived: bool) -> RolloutTree:
    """Two root paths: one succeeds; the other forks after a step, and a child of that plays roulette with q = 0.5."""
    tree = RolloutTree(None, 0, Node(0, None, None, owner=()))
    won = grow(tree, tree.root, (0, 0), 0, 1)
    lost = grow(tree, tree.root, (0, 1), 0, 0)
    gambler = grow(tree, lost.edges[1].parent, (0, 1, 1, 1), 0, *((1,) if survived else ()))
    won.edges[-1].success = True
    coin = gambler.edges[0].child
    coin.survival, coin.stopped = 0.5, not survived
    gambler.edges[-1].success = survived
    gambler.edges[-1].truncated = not survived
    for edge in tree.edges():
        edge.action.tokens, edge.action.data = 1, Generation([0], [0.0], [0.0], truncated=False)
    tree.snapshots = 1
    return tree


def test_success_of_a_tree_computed_by_hand() -> None:
    args = settings("bpo-split", **SPLIT, roulette=0.5)
    stopped, survived = small_tree(survived=False), small_tree(survived=True)
    # 1/2 for the root path that won; 1/2 x 1/2 for the fork's child, twice that where it survived
    assert success_of(stopped, args) == 0.5 and success_of(survived, args) == 0.5 + 0.25 * 2
    assert (success_of(stopped, args) + success_of(survived, args)) / 2 == (1 + (0 + 1) / 2) / 2, "without roulette"
    weights = root_weights(survived, args)
    assert [weights[id(path.edges[-1])] for path in survived.paths] == [0.5, 0.25, 0.5]
    logged = batch_metrics(batch_totals([stopped, survived], args))
    assert logged["rollout/success"] == logged["rollout/reward"] == 0.75
    assert logged["rollout/stopped"] == 1 / 6 and logged["rollout/truncated_episodes"] == 0


def test_where_forks_were_chosen_by_the_future_only_the_independent_paths_count() -> None:
    args = settings("bpo-paper", roots=2)
    tree = small_tree(survived=True)
    assert success_of(tree, args) == 0.5
    at_root = grow(tree, tree.root, (0, 2), 1)  # a fork at the root, numbered after the root paths
    at_root.edges[-1].success = True
    assert success_of(tree, args) == 0.5


def test_a_task_counts_once_however_many_paths_it_has(tmp_path: FilePath) -> None:
    args = settings("rloo")
    won = RolloutTree(None, 0, Node(0, None, None, owner=()))
    grow(won, won.root, (0, 0), 1).edges[-1].success = True
    lost = RolloutTree(None, 1, Node(0, None, None, owner=()))
    for number in range(9):
        grow(lost, lost.root, (0, number), 0)
    assert np.mean([success_of(tree, args) for tree in (won, lost)]) == 0.5


def test_trees_are_saved_with_what_was_stopped_and_with_weights_and_values_of_steps(tmp_path: FilePath) -> None:
    trained(tmp_path, updates=5, algo="bpo-split", roulette=0.5, roulette_below=0.6, prompts=8)
    trees = load_trees(tmp_path / "trees.json")
    content = json.loads((tmp_path / "trees.json").read_text())["trees"]
    nodes = [node for tree in content for node in tree["nodes"]]
    edges = [edge for tree in content for path in tree["paths"] for edge in path["edges"]]
    assert all({"value", "stopped", "survival"} <= node.keys() for node in nodes)
    assert all({"value", "weight", "advantage"} <= edge.keys() for edge in edges)
    ends = [path.edges[-1].child for tree in trees for path in tree.paths]
    stopped = [end for end in ends if end.stopped]
    (*_, last) = (line for line in metrics(tmp_path) if "rollout/stopped" in line)
    assert stopped and len(stopped) / len(ends) == pytest.approx(last["rollout/stopped"])
    assert all(end.survival == 0.5 and not end.children for end in stopped)
    assert any(edge.weight > 0.25 for tree in trees for edge in tree.edges()), "survivors count more"
