"""The algorithms of this package for trees of other trainers: where they fork, and the credit of their actions.

    algorithm = TreeAlgorithm(Args(algo="bpo", env_id="sandboxgym/ALFWorld-v0", max_turns=30))

It is what `sandboxgym.adapters.verl` and `sandboxgym.adapters.skyrl` ask for (`sandboxgym.adapters.tokens.trees`).
Settings of trees, credit and baselines apply; loss, optimizer, sampling and model are the other trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.config import ConfigError
from bpo_ref.sampling.masks import without_masked
from bpo_ref.schedules import make_schedule
from bpo_ref.train import assign_credit
from sandboxgym.brief import brief
from sandboxgym.tree import RolloutTree, Schedule


class TreeAlgorithm:
    """One algorithm with its memory of earlier batches (`sandboxgym.adapters.tokens.trees.Algorithm`).

    Args:
        args: settings; ``algo`` is the preset, ``max_turns`` the step limit of the environment.
        keyed: whether the environment gives a ``progress_key``; without one ``bpo`` is ``bpo-forest``.
        state: of `state`, to continue with the memory of an earlier run.

    Raises:
        ConfigError: a setting is invalid, or needs what only this package's trainer has.
    """

    def __init__(self, args: Args, *, keyed: bool = True, state: Mapping[str, Any] | None = None) -> None:
        self.args = args = resolved(args, keyed=keyed)
        for field, wrong, expected in (
            ("algo", args.algo == "sft", "an algorithm of reinforcement learning"),
            ("credit", args.credit == "gae", "credit without a value head"),
            ("baseline", args.baseline == "critic", "a baseline without a value head"),
            ("schedule", args.schedule == "value-oracle", "a schedule without rollouts of its own"),
            (
                "schedule",
                args.schedule in ("entropy", "entropy-online", "lowest"),
                "a schedule without entropies, which engines do not report",
            ),
            ("kl_in", args.kl_in == "reward" and (args.kl or 0.0) > 0, "loss, and that of the other trainer"),
            ("lookahead", args.lookahead, "no look-ahead"),
            ("dynamic_sampling", args.dynamic_sampling > 0, "0: the other trainer draws the tasks"),
            ("subsample_returns", args.subsample_returns > 0, "0"),
            ("mask_truncated", args.mask_truncated, "False"),
            ("aggregation", args.aggregation != "token", "token"),
        ):
            if wrong:
                raise ConfigError(f"{field}: in another trainer expected {expected}, found {getattr(args, field)}")
        self.memory = Memory.of(args, state)

    def schedule(self, seed: Sequence[int], tasks: Sequence[Any]) -> Schedule:
        """Schedule of the next batch."""
        return make_schedule(self.args, seed, self.memory, tasks=tasks)

    def credit(self, trees: Sequence[RolloutTree]) -> list[RolloutTree]:
        """Set every edge's advantage and weight, and remember the batch for the next; masked episodes are dropped.

        Raises:
            ValueError: a reward is not a finite number. Nothing is remembered: the next batch is as if this one had not
                been.
        """
        kept = without_masked(trees)
        for tree in kept:
            for edge in tree.edges():
                if not math.isfinite(edge.reward):
                    raise ValueError(
                        f"expected finite rewards, found {edge.reward} in tree {tree.index} after the action "
                        f"{brief(edge.action.text, 80)}"
                    )
        for edge in (edge for tree in kept for edge in tree.edges()):
            edge.reward -= self.args.invalid_penalty * (not edge.valid)
        if kept:
            forks = assign_credit(kept, self.args, self.memory)
            self.memory.observe(kept, forks, self.args)
        return kept

    def state(self) -> dict[str, Any]:
        """Memory of earlier batches, for a checkpoint."""
        return self.memory.state()
