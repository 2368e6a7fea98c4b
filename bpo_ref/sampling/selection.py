"""Selection of training data: the tasks of a batch, their mini-batches, and the episodes and actions that count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from bpo_ref.learning.batch import Critique
from sandboxgym.task_env import task_count
from sandboxgym.tree import Edge, RolloutTree

if TYPE_CHECKING:
    from bpo_ref.args import Args


def returns_differ(tree: RolloutTree) -> bool:
    """True if any two episodes of a task had different total rewards."""
    totals = [path.total_reward for path in tree.paths]
    return max(totals) > min(totals)


def differing(
    trees: Sequence[RolloutTree], most: int, gather: Callable[[list[Any]], list[Any]]
) -> tuple[list[RolloutTree], list[RolloutTree], dict[str, float]]:
    """Dynamic sampling: the trees whose returns differ, the first ``most`` of all processes, renumbered.

    If no task's returns differ, they are the first trees.

    Returns:
        These trees, the others, and the numbers of tasks to log.
    """
    every = sorted(gather([(tree.index, returns_differ(tree)) for tree in trees]))
    differ = [index for index, differs in every if differs]
    places = {index: place for place, index in enumerate((differ or [i for i, _ in every])[:most])}
    kept, left = ([tree for tree in trees if (tree.index in places) is inside] for inside in (True, False))
    for tree in kept:
        tree.index = places[tree.index]
    return kept, left, {"rollout/drawn_tasks": float(len(every)), "rollout/differing_tasks": float(len(differ))}


def leave_out(trees: Sequence[RolloutTree], args: Args, seed: Sequence[int]) -> int:
    """Set weight 0 on the actions that settings leave out of the loss; returns how many `mask_truncated` left out.

    With ``subsample_returns`` these are all but that many random paths of each task; with ``mask_truncated``, the
    actions of `cut_actions`.

    Args:
        trees: changed in place, with credit assigned.
        args: ``subsample_returns`` and ``mask_truncated`` are used.
        seed: key of the random draws.
    """
    for tree in trees if args.subsample_returns else ():
        paths = sorted(tree.paths, key=lambda path: path.key)  # they come in the order in which they ended
        for place in np.random.default_rng([*seed, tree.index]).permutation(len(paths))[args.subsample_returns :]:
            for edge in paths[place].edges:
                edge.weight = 0.0
    cut = [edge for tree in trees for edge in cut_actions(tree) if edge.weight] if args.mask_truncated else []
    for edge in cut:
        edge.weight = 0.0
        if isinstance(edge.data, Critique):
            edge.data.targets = [math.nan] * edge.action.tokens
    return len(cut)


def cut_actions(tree: RolloutTree) -> list[Edge]:
    """Find actions whose answer was cut, and actions after which every episode was cut.

    An episode that Russian roulette has stopped counts as one that did: what it would have brought is accounted for.
    """
    ended: set[int] = set()
    for path in tree.paths:
        last = path.edges[-1]
        if last.child.stopped or not last.truncated:
            ended.update(map(id, path.from_root()))
    return [edge for edge in tree.edges() if edge.action.data.truncated or id(edge) not in ended]


def shuffled_parts(args: Args, seed: Sequence[int]) -> NDArray[np.int64]:
    """Draw the mini-batch of each task of a batch, [prompts].

    Drawn such that N processes, of which each has every N-th task, have equally many in each minibatch.
    """
    assert args.minibatches is not None
    rng, size = np.random.default_rng([*seed]), args.prompts // args.minibatches
    order = rng.permuted(np.tile(np.arange(args.minibatches), (size, 1)), axis=1)  # of the tasks i, i + size, …
    return np.concatenate([order.T.reshape(-1), rng.integers(args.minibatches, size=args.prompts % args.minibatches)])


def draw_tasks(env: gym.Env[Any, Any], count: int, seed: Sequence[int]) -> list[Any]:
    """Draw the tasks of a batch, without replacement if there are enough; a list of None if the environment draws."""
    available = task_count(env)
    if available is None:
        return [None] * count
    rng = np.random.default_rng([*seed, 7])
    return [int(i) for i in rng.choice(available, count, replace=available < count)]
