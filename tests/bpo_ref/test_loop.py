"""The trainer's loop, from the rollout to the weights: what an optimizer step does is what the algorithm says.

Updates of a tabular policy against exact gradients: the mean change of the weights is the learning rate times the
gradient. Every comparison has a false-alarm rate of at most 1e-3 over the draw of the seeds, which are fixed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tabular import MDP, Comparison, compare, random_mdp
from tabular_loop import LR, LoopTrainer, penalised

from bpo_ref import train
from bpo_ref.train import Args

SPARSE, DENSE = random_mdp(seed=244), random_mdp(seed=244, dense=True)
REFERENCE = SPARSE.logits[::-1] * 0.7
VALUES = np.sin(np.arange(5.0))

COMMON: dict[str, Any] = {
    "prompts": 8, "max_turns": 5, "context": 64, "spacing": 1, "lr": LR, "max_grad_norm": 1e9,
    "aggregation": "constant", "eval_every": 10**9,
}  # fmt: skip
KL: dict[str, Any] = {"kl": 0.3, "kl_in": "reward"}
SPLIT: dict[str, Any] = {"algo": "bpo", "roulette_below": 0.4, "width": 2, "points": 3}
PPO: dict[str, Any] = {"algo": "ppo", "advantage_norm": "none", "gae_lam": 1.0, "roots": 3, "value_lr": LR}

# name -> settings, MDP, what the mean change is in gradients of the return
LOOPS: dict[str, tuple[dict[str, Any], MDP, float]] = {
    "grpo, two minibatches": ({"algo": "grpo", "group_std": False, "roots": 4, "minibatches": 2}, SPARSE, 2 * 3 / 4),
    "rloo-value, kl": ({"algo": "rloo-value", "roots": 4, "value_decay": 0.5, **KL}, SPARSE, 1.0),
    "bpo": (SPLIT, SPARSE, 1.0),
    "ppo": (PPO, SPARSE, 1.0),
}
MORE: dict[str, tuple[dict[str, Any], MDP, float]] = {
    "rloo-value": ({"algo": "rloo-value", "roots": 4, "value_decay": 0.5}, DENSE, 1.0),
    "bpo, kl, two minibatches": ({**SPLIT, **KL, "minibatches": 2}, SPARSE, 2.0),
    "bpo, flat": ({**SPLIT, "pack": "flat"}, DENSE, 1.0),
    "ppo, kl, two minibatches": ({**PPO, **KL, "minibatches": 2}, SPARSE, 2.0),
    "ppo over tokens, two epochs": ({**PPO, "gae_steps": "token", "epochs": 2}, DENSE, 2.0),
    "rloo by steps": ({"algo": "rloo", "roots": 3, "ratio": "step"}, DENSE, 1.0),
    "vineppo, kl": ({"algo": "vineppo", "roots": 3, "mc_rollouts": 2, **KL}, SPARSE, 1.0),
    "bpo-tree": ({"algo": "bpo-tree", "width": 3, "step_weight_power": 1.0}, SPARSE, 1.0),
}


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of numbers are not written as text."""
    monkeypatch.setattr(train, "write_samples", lambda *_, **__: None)


def looped(name: str, tmp_path: Path, *, updates: int, **options: Any) -> Comparison:
    """Changes of the weights in so many updates against the exact gradient."""
    chosen, mdp, times = (LOOPS | MORE)[name]
    args = Args(**{**COMMON, "out": str(tmp_path), **chosen, "updates": updates, **options})
    penalty = args.kl > 0
    trainer = LoopTrainer(
        args,
        mdp,
        reference=REFERENCE if penalty else None,
        values=VALUES if args.algo == "ppo" else None,
        silent=args.algo == "ppo",
    )
    changes = trainer.sampled()
    (policy,) = (change for key, change in changes.items() if key.endswith("logits"))
    exact = (penalised(mdp, REFERENCE, args.kl) if penalty else mdp).gradient(args.gamma)
    found = compare(policy, times * exact)
    print(f"{name}: max|z| {found.z:.1f} of {found.critical:.1f}, off by {found.bias:.3f}")
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_the_mean_change_of_the_weights_is_the_gradient(name: str, tmp_path: Path) -> None:
    found = looped(name, tmp_path, updates=120)
    assert not found.biased, found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOOPS, *MORE])
def test_the_mean_change_of_the_weights_is_the_gradient_over_many_updates(name: str, tmp_path: Path) -> None:
    found = looped(name, tmp_path, updates=1500, seed=1)
    assert not found.biased, found
