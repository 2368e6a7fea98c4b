"""GiGPO's advantages: by hand, against the paper's definition, and in whole runs."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import wordgame
from test_estimators import credit, settings
from tiny_runs import TINY, _signals, metrics, trained  # noqa: F401 - a fixture

from bpo_ref.args import Args, resolved
from bpo_ref.config import ConfigError
from bpo_ref.train import Trainer
from sandboxgym.tree import Action, Edge, Envs, Node, RolloutTree, Schedule, rollout
from sandboxgym.tree import Path as TreePath

Steps = Sequence[tuple[str, float]]
"""(state in which an action was taken, reward) of each step of a rollout."""


def tree_of(rollouts: Sequence[Steps]) -> RolloutTree:
    """Independent rollouts, which all begin in the state of the first."""
    tree = RolloutTree(None, 0, Node(0, None, None, owner=(), state_hash=rollouts[0][0][0]))
    for number, steps in enumerate(rollouts):
        path, node = TreePath((0, number), tree.root), tree.root
        for t, (_, reward) in enumerate(steps):
            after = steps[t + 1][0] if t + 1 < len(steps) else "the end"
            edge = Edge(path.key, node, Action("a", tokens=1), reward=reward)
            edge.child = Node(t + 1, None, None, path.key, edge, state_hash=after)
            node.children.append(edge)
            path.edges.append(edge)
            node = edge.child
        tree.paths.append(path)
    return tree


def advantages(rollouts: Sequence[Steps], **options: Any) -> list[list[float]]:
    """Advantage of each step of each rollout."""
    tree = tree_of(rollouts)
    credit(settings("gigpo", roots=len(rollouts), **options))([tree])
    assert all(edge.weight == 1 / len(rollouts) for edge in tree.edges())
    return [[edge.advantage for edge in path.edges] for path in tree.paths]


def as_defined(rollouts: Sequence[Steps], *, gamma: float, omega: float, std: bool, small: float) -> list[list[float]]:
    """The paper's definition, term by term.

    A^E(τ_i) = (R(τ_i) - mean R) / F_norm(R), G^S(s̃) = {R_t^(i) : s_t^(i) = s̃, 1 ≤ i ≤ N, 1 ≤ t ≤ T},
    R_t^(i) = Σ_{k=t}^T γ^(k-t) r_k^(i), A^S = (R_t^(i) - mean G^S) / F_norm(G^S), A = A^E + ω A^S.
    """

    def standardised(value: float, group: Sequence[float]) -> float:
        return (value - statistics.fmean(group)) / (statistics.pstdev(group) + small if std else 1.0)

    def discounted(steps: Steps, t: int) -> float:
        return math.fsum(gamma ** (k - t) * steps[k][1] for k in range(t, len(steps)))

    totals = [math.fsum(reward for _, reward in steps) for steps in rollouts]
    result = []
    for steps, total in zip(rollouts, totals):
        row = []
        for t, (state, _) in enumerate(steps):
            group = [
                discounted(other, k)
                for other in rollouts
                for k, (elsewhere, _) in enumerate(other)
                if elsewhere == state
            ]
            row.append(standardised(total, totals) + omega * standardised(discounted(steps, t), group))
        result.append(row)
    return result


def test_two_rollouts_by_hand() -> None:
    """Returns 1 and 0; from "s" 1/4 and 0; "a" is met three times, from where 1/2, 0 and 0; "b" once."""
    rollouts = [[("s", 0.0), ("a", 0.0), ("b", 1.0)], [("s", 0.0), ("a", 0.0), ("a", 0.0)]]
    found = advantages(rollouts, omega_gamma=0.5, group_std=False)
    assert found[0] == pytest.approx([0.5 + 1 / 8, 0.5 + 1 / 3, 0.5])
    assert found[1] == pytest.approx([-0.5 - 1 / 8, -0.5 - 1 / 6, -0.5 - 1 / 6])
    halved = advantages(rollouts, omega_gamma=0.5, group_std=False, omega=0.5)
    assert halved[0] == pytest.approx([0.5 + 1 / 16, 0.5 + 1 / 6, 0.5])
    divided = advantages(rollouts, omega_gamma=0.5)
    assert divided[0] == pytest.approx([2.0, 1.0 + math.sqrt(2), 1.0], abs=3e-3)  # std ½, ⅛ and (½)(√2)/3


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_random_trees_have_the_advantages_of_the_definition(seed: int, std: bool) -> None:
    rng = random.Random(seed)
    gamma, omega = rng.choice([0.5, 0.95, 1.0]), rng.choice([0.3, 1.0, 2.0])
    rollouts = [
        [("s" if not t else rng.choice("sabcd"), rng.choice([0.0, 0.0, 1.0, -0.5])) for t in range(rng.randint(1, 7))]
        for _ in range(rng.randint(2, 6))
    ]
    expected = as_defined(rollouts, gamma=gamma, omega=omega, std=std, small=1e-4)
    found = advantages(rollouts, omega_gamma=gamma, omega=omega, group_std=std)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def test_without_omega_it_is_grpo_and_an_unknown_state_is_like_no_other() -> None:
    rollouts = [[("s", 0.0), ("", 1.0)], [("s", 0.0), ("", 0.0)], [("s", 0.0), ("", 0.0)]]
    tree = tree_of(rollouts)
    credit(settings("grpo", roots=3))([tree])
    plain = [[edge.advantage for edge in path.edges] for path in tree.paths]
    assert advantages(rollouts, omega=0.0) == plain
    assert [row[1] for row in advantages(rollouts)] == [row[1] for row in plain]


def test_rollouts_know_their_states() -> None:
    with Envs(wordgame.WordGame) as envs:
        (tree,) = rollout(
            envs, lambda contexts: [Action("ab" if c.rng.random() < 0.5 else "abcd") for c in contexts],
            Schedule(8), tasks=[2],
        )  # fmt: skip
    said: dict[tuple[int, int], set[str]] = {}
    for path in tree.paths:
        characters = 0
        for edge in path.edges:
            said.setdefault((edge.parent.depth, characters), set()).add(edge.parent.state_hash)
            characters += len(edge.action.text)
    assert all(len(states) == 1 for states in said.values())
    assert len(set.union(*said.values())) == len(said) > 4


def test_a_run_learns_and_its_gamma_and_omega_matter(tmp_path: Path) -> None:
    common: dict[str, Any] = {"algo": "gigpo", "updates": 1, "sft_steps": 0, "roots": 6, "eval_untrained": False}
    losses = []
    for name, options in (("one", {}), ("two", {"omega": 0.0}), ("three", {"omega_gamma": 0.5})):
        trained(tmp_path / name, **common, **options)
        (line,) = (line for line in metrics(tmp_path / name) if "update/loss" in line)
        losses.append(line["update/grad_norm"])
    assert len(set(losses)) == 3


def test_what_it_needs_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"credit: gigpo is for two or more independent rollouts, .*schedule=entropy"):
        resolved(Args(algo="gigpo", schedule="entropy"))
    free = {"env_id": wordgame.FREE_TEXT_ID, "tiny_vocabulary": 300, "algo": "gigpo"}
    with pytest.raises(ConfigError, match=r"credit: gigpo needs info\['state_hash'\], which .*FreeText"):
        Trainer(Args(**{**TINY, **free, "out": str(tmp_path)}))
