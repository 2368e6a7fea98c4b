"""Presets of ``--algo``: the settings under *Tree and credit* that each algorithm fills in.

`CORE` holds published algorithms, and `bpo-split`, on which `bpo` is built; `RESEARCH` holds variants for comparison.
Every setting of a preset can be overridden; `docs/recipes.md` has the command lines of published recipes.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, Any]

DEFAULTS: Preset = dict(  # for settings that a preset does not name: independent rollouts, plain RLOO
    width=4, points=2.0, schedule="none", forks="backbone", root_branch="never", credit="tree", baseline="none",
    fork_baseline=None, step_weight_power=1.0, roulette=1.0, advantage_norm="none", epochs=1, minibatches=1, kl=0.0,
)  # fmt: skip

CORE: dict[str, Preset] = {
    "sft": {},
    "ppo": dict(credit="gae", advantage_norm="batch", epochs=4, minibatches=4),  # else its clip would never be active
    "grpo": dict(credit="group"),
    "gigpo": dict(credit="gigpo"),
    "rloo": {},
    "rloo-pooled": dict(baseline="pooled"),
    "vineppo": dict(schedule="mc", credit="mc", roots=8),
    "bpo-paper": dict(schedule="entropy", credit="paper", step_weight_power=0.0, root_branch="free", kl=0.05),
    "bpo-forest": dict(
        roots=8, width=2, points=1.0, schedule="explained", forks="roots", baseline="turn", fork_baseline="shrunk"
    ),
    "bpo-split": dict(roots=4, width=2, points=3.0, schedule="split", forks="all", baseline="value"),
}
CORE["bpo"] = CORE["bpo-split"] | dict(baseline="pooled", roulette=0.5)

RESEARCH: dict[str, Preset] = {
    "rloo-turn": dict(baseline="turn"),
    "rloo-key": dict(baseline="key"),
    "rloo-value": dict(baseline="value"),
    "bpo-sibling": dict(schedule="entropy-online", credit="sibling", step_weight_power=0.0, root_branch="always"),
    "bpo-tree": dict(schedule="entropy-online", step_weight_power=0.0, root_branch="always"),
    "bpo-key": dict(schedule="entropy-online", baseline="key", step_weight_power=0.75, root_branch="always"),
}

PRESETS = CORE | RESEARCH
