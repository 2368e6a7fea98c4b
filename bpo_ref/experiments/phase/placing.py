"""The two knobs of a trained policy on a real environment: lateness L and quality ρ, from rollouts and forks.

Both are ratios of sums Σ_t E |score_t|² x (squared error of a baseline), measured with the policy, tasks, V̂ and
gradients of `bpo_ref.variance`. With A the sum for the mean return, C for the baseline of `rloo-pooled` and D for exact
values, L = D / A and ρ = (A - C) / (A - D). D is measured without exact values, as the variance of the returns from a
state: two more rollouts start at every state of a path. One backward pass with random signs gives the squared norms of
all scores of an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bpo_ref.args import Args
from bpo_ref.baselines import Memory, independent
from bpo_ref.experiments.laboratory import Laboratory
from bpo_ref.experiments.variance import Estimate, VarianceStudy, interval
from bpo_ref.train import assign_credit
from sandboxgym.tree import Edge, RolloutTree

POOLED, PLAIN, FORKED = "rloo-pooled:roots=8", "rloo:roots=8", "vineppo:roots=2,mc_rollouts=2"


@dataclass(frozen=True)
class DiagramPlace:
    """A setting's place on the diagram, with 90 % intervals over tasks.

    Attributes:
        lateness: L.
        quality: ρ.
        pooled: C / A', the cost of `rloo-pooled` relative to RLOO that follows from them; A' is A plus the noise of the
            mean of the other rollouts, which is RLOO's baseline.
        reward: mean return of the policy on the tasks.
        turns: mean number of turns.
    """

    lateness: Estimate
    quality: Estimate
    pooled: Estimate
    reward: float
    turns: float


def signed(
    laboratory: Laboratory, args: Args, tree: RolloutTree, errors: Sequence[tuple[Edge, float]], seed: int
) -> float:
    """Σ error² |score|² of these edges, without bias: the squared norm of a gradient with random signs."""
    rng = np.random.default_rng(seed)
    for edge in tree.edges():
        edge.weight = edge.advantage = 0.0
    for edge, error in errors:
        edge.weight, edge.advantage = 1.0, error * float(rng.choice((-1.0, 1.0)))
    g = laboratory._gradient(tree, args)
    return float(g @ g)


def forked(tree: RolloutTree, args: Args) -> list[tuple[Edge, float]]:
    """For each state of the independent rollouts the action taken and the standard deviation of three returns."""
    found = []
    alone = {path.key: path for path in tree.paths if independent(path, args)}
    for path in alone.values():
        rewards = [edge.reward for edge in path.edges]
        for turn, edge in enumerate(path.edges):
            others = [other.value for other in edge.parent.children if other.path not in alone]
            found.append((edge, float(np.std([sum(rewards[turn:]), *others], ddof=1))))
    return found


def place(study: VarianceStudy) -> DiagramPlace:
    """Measure where a setting lies on the phase diagram: lateness L and quality ρ of V̂.

    Args:
        study: policy, environment, tasks, batches for V̂ (``pilot``) and batches measured (``repeats``).
    """
    laboratory = Laboratory(study)
    plain, pooled, vine = (laboratory.settings(method) for method in (PLAIN, POOLED, FORKED))
    memory = Memory.of(pooled)
    for batch in range(study.pilot):
        trees = laboratory._batch(pooled, memory, partial(laboratory._draw, 1 + batch), (study.seed, 1, 0, batch))
        memory.observe(trees, assign_credit(trees, pooled, memory), pooled)
    a, c, d = (np.zeros((study.repeats, study.tasks)) for _ in range(3))
    returns, turns = [], []
    for repeat in range(study.repeats):
        trees = laboratory._batch(pooled, memory, lambda: laboratory.tasks, (study.seed, 1, 1, repeat))
        returns += [path.total_reward for tree in trees for path in tree.paths]
        turns += [len(path.edges) for tree in trees for path in tree.paths]
        for into, args in ((a, plain), (c, pooled)):
            assign_credit(trees, args, memory)
            for task, tree in enumerate(trees):
                errors = [(edge, edge.advantage) for edge in tree.edges()]
                into[repeat, task] = signed(laboratory, args, tree, errors, seed=repeat) / len(tree.paths)
        trees = laboratory._batch(vine, memory, lambda: laboratory.tasks, (study.seed, 4, 1, repeat))
        assign_credit(trees, vine, memory)
        for task, tree in enumerate(trees):
            assert vine.roots is not None
            d[repeat, task] = signed(laboratory, plain, tree, forked(tree, vine), seed=repeat) / vine.roots
    laboratory.envs.close()
    return placed(a, c, d, float(np.mean(returns)), float(np.mean(turns)), rollouts=plain.roots or 0, study=study)


def placed(
    a: NDArray[np.float64], c: NDArray[np.float64], d: NDArray[np.float64], reward: float, turns: float, *,
    rollouts: int, study: VarianceStudy,
) -> DiagramPlace:  # fmt: skip
    """L and ρ of sums of squared errors [repeats, tasks]: of the others' mean, the pooled baseline, exact values."""
    tasks = a.shape[1]
    weights = np.random.default_rng(study.seed).multinomial(tasks, np.full(tasks, 1 / tasks), size=study.bootstrap)
    weights = np.concatenate([np.ones((1, tasks)), weights]) / tasks
    others, base, exact = (weights @ part.mean(axis=0) for part in (a, c, d))
    mean = others * (rollouts - 1) / rollouts  # without the noise of the others' mean
    return DiagramPlace(
        interval(exact / mean),
        interval((mean - base) / (mean - exact)),
        interval(base / others),
        reward,
        turns,
    )
