"""Short runs of the trainer that have to give the same on every device."""

from __future__ import annotations

from typing import Any

import wordgame

SETTINGS: dict[str, Any] = {
    "env_id": wordgame.ENV_ID, "max_turns": 4, "context": 160, "max_new_tokens": 3, "prompts": 2, "width": 2,
    "eval_episodes": 2, "eval_every": 9, "save_every": 1, "lr": 1e-3, "adam_eps": 1e-3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "packed, value head": {"algo": "ppo", "pack": "tree", "epochs": 1, "minibatches": 1},
    "flat, value head": {"algo": "ppo", "pack": "flat"},
    "packed, step ratios": {"pack": "tree", "ratio": "step", "kl": 0.1, "kl_in": "reward"},
    "flat, sequence ratios": {"algo": "grpo", "pack": "flat", "ratio": "sequence", "advantage_norm": "batch"},
    "bf16": {"dtype": "bfloat16", "kl": 0.1},
    "adapters": {"lora_r": 4, "lora_alpha": 8, "dtype": "bfloat16", "gradient_checkpointing": True, "kl": 0.1},
    "supervised stage": {"sft_steps": 2, "sft_episodes": 6, "lora_r": 4, "kl": 0.1},
    "window": {"algo": "grpo", "history": 2},
    "continuous batching": {"algo": "grpo", "backend": "transformers-continuous", "tis": 2.0},
}
