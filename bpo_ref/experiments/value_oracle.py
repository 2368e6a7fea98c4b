"""Oracle of the best branch points: variance of the value over fresh actions, by brute force. For analysis only.

At every step of the first path some fresh actions are taken, and many rollouts start from the state that each leads
to. These probes are not trained on and not counted, and have random streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bpo_ref.sampling.masks import without_masked
from sandboxgym.tree import Action, EnvSource, Node, Path, Policy, RolloutTree, Schedule, rollout

FIRST = 1000  # number of the first probe among a node's siblings: those of the real rollout come before


class _Probes(Schedule):
    def __init__(self, width: int, rollouts: int) -> None:
        super().__init__(1)
        self._width, self._rollouts = width, rollouts

    def watches(self, path: Path) -> bool:
        return path.key == (0, 0)

    def after(self, tree: RolloutTree, path: Path) -> Iterable[tuple[Node, int]]:
        for edge in path.edges:
            edge.parent.width = FIRST
            yield edge.parent, self._width

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        return self._rollouts - 1 if path.key[-1] >= FIRST and len(path.edges) == 1 else 0


def value_scores(
    envs: EnvSource,
    policy: Policy,
    tasks: Sequence[Any],
    *,
    seed: Sequence[int],
    indices: Sequence[int] | None = None,
    width: int = 4,
    rollouts: int = 16,
    **options: Any,
) -> dict[tuple[int, int], float]:
    """Map (task index, depth) to the variance of the value over ``width`` fresh actions, with ``rollouts`` after each.

    With two rollouts and more it is without bias, so it may be negative: the variance of the means less what the
    rollouts' own noise adds.
    The first path of every task is that of a `rollout` with the same seed and indices; it takes the other ``options``.
    """
    trees = rollout(envs, policy, _Probes(width, rollouts), tasks=tasks, seed=seed, indices=indices, **options)
    scores = {}
    for tree in without_masked(trees):
        for edge in tree.paths[0].edges:
            probes = (probe for probe in edge.parent.children if probe.path != (0, 0))
            returns = [[probe.reward + after for after in _returns(probe.child)] for probe in probes]
            scores[tree.index, edge.parent.depth] = _variance_between(returns)
    return scores


def _returns(node: Node) -> list[float]:
    """Returns after a node, of the paths through it, whose forks are all at that node."""
    totals = []
    for edge in node.children:
        total, at = edge.reward, edge.child
        while at.children:
            total, at = total + at.children[0].reward, at.children[0].child
        totals.append(total)
    return totals or [0.0]


def _variance_between(groups: Sequence[Sequence[float]]) -> float:
    """Variance of the groups' true means, by analysis of variance; 0 for fewer than two groups."""
    if len(groups) < 2:
        return 0.0
    noise = [np.var(group, ddof=1) / len(group) for group in groups if len(group) > 1]
    between = np.var([np.mean(group) for group in groups], ddof=1)
    return float(between - (np.sum(noise) / len(groups) if noise else 0.0))
