"""Progress of a run in updates, and the learning rate at that point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bpo_ref.args import Args


def position(args: Args, step: int, counters: Mapping[str, float]) -> float:
    """Progress of a run in updates: of its ``updates``, or the same fraction of its budget."""
    if not args.budget:
        return step
    return min(1.0, counters[args.match.replace("-", "_")] / args.budget) * args.updates


def learning_rate_factor(position: float, args: Args) -> float:
    """Warm-up, then constant, linear or cosine; ``position`` in updates."""
    if position < args.warmup:
        return (position + 1) / args.warmup
    rest = (position - args.warmup) / max(1, args.updates - args.warmup)
    return {"constant": 1.0, "linear": 1.0 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}[args.lr_decay]
