"""What each number among the settings may be, and combinations that would not compute what their names say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bpo_ref.config import ConfigError

if TYPE_CHECKING:
    from bpo_ref.args import Args

LEAST: dict[str, float] = {
    **dict.fromkeys(("seed", "env_retries", "tiny_vocabulary", "lora_r", "history", "observation_tokens"), 0),
    **dict.fromkeys(("entropy_skip", "threads", "sft_noise", "sft_observation_weight", "warmup", "weight_decay"), 0),
    **dict.fromkeys(("adam_eps", "spacing", "step_weight_power", "roulette_below", "value_decay", "lam", "gae_lam"), 0),
    **dict.fromkeys(("invalid_penalty", "value_weight", "value_clip", "clip_low", "clip_high", "kl", "roulette"), 0),
    **dict.fromkeys(("width", "points", "tis", "dynamic_sampling", "omega", "omega_gamma"), 0),
    **dict.fromkeys(("lookahead_least", "updates", "sft_steps", "budget", "mc_turns", "subsample_returns"), 0),
    **dict.fromkeys(("lora_alpha", "context", "max_new_tokens", "sft_episodes", "sft_batch", "micro_tokens"), 1),
    **dict.fromkeys(("prompts", "roots", "max_turns", "epochs", "minibatches", "mc_rollouts", "env_threads"), 1),
    **dict.fromkeys(("max_live", "eval_episodes", "eval_every", "save_every"), 1),
}
"""The least that a setting may be."""
MOST: dict[str, float] = dict.fromkeys(("sft_noise", "value_decay", "lam", "gae_lam", "gamma", "omega_gamma"), 1)
"""The most."""
POSITIVE = ("lr", "sft_lr", "value_lr", "max_grad_norm", "gamma", "temperature", "eval_temperature", "process_timeout")
"""Settings of which 0 would learn nothing, or divide by it."""


def check_ranges(args: Args) -> None:
    """Refuse numbers that mean nothing; those that are None are left to the preset.

    Raises:
        ConfigError: naming the field.
    """
    for name in LEAST | MOST | dict.fromkeys(POSITIVE):
        value = getattr(args, name)
        if value is None:
            continue
        least, most = LEAST.get(name, 0.0), MOST.get(name, math.inf)
        if not least <= value <= most or math.isinf(value) or (name in POSITIVE and value == 0):
            bounds = "more than 0" if name in POSITIVE else f"{least:g} to {most:g}" if most < math.inf else None
            unbounded = f"at least {least:g}" if least else "0 or more"
            raise ConfigError(f"{name}: expected {bounds or unbounded}, found {value}")
    if not all(0 <= beta < 1 for beta in args.betas):
        raise ConfigError(f"betas: expected two numbers from 0 to below 1, found {args.betas}")
    if args.dual_clip and not 1 < args.dual_clip < math.inf:
        raise ConfigError(f"dual_clip: expected 0, or more than the ratio on-policy, 1; found {args.dual_clip}")
    if args.sft_reward is not None and math.isnan(args.sft_reward):
        raise ConfigError(f"sft_reward: expected a number, found {args.sft_reward}")


def check_combinations(args: Args) -> None:
    """Refuse settings that would silently make another estimator of the one that is named.

    Args:
        args: with the preset filled in.

    Raises:
        ConfigError: naming the field.
    """
    if args.subsample_returns and args.credit == "mc":
        raise ConfigError(
            "subsample_returns: does not go with credit=mc: it would draw from the rollouts for values, too"
        )
    if args.aggregation == "path" and (args.roulette or 1.0) < 1.0:
        raise ConfigError(
            f"aggregation: path counts all paths alike, those that survived roulette={args.roulette} must count more"
        )
