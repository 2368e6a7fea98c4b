"""Share of the variance of returns that look-ahead removes at a fixed policy, and the share that remains.

    python -m bpo_ref.experiments.luck --checkpoint runs/alfworld/start-seed0/checkpoint \
        --config bpo_ref/configs/alfworld-tiny.yaml

The table has one row for each kind of V̂. Its columns are the variance of returns around their task's mean; that of
returns less the luck of all decisions but the first; the part of it that should remain, E δ² of the first decision;
and the rest. The rest is due to what V̂ does not know about later decisions and about the effects of the first one
beyond one step. With exact values, and without chance in the environment, it would be 0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import tyro

from bpo_ref.args import Args
from bpo_ref.baselines import Memory
from bpo_ref.experiments.laboratory import Laboratory
from bpo_ref.experiments.variance import VarianceStudy
from bpo_ref.train import assign_credit

METHODS = ("rloo-pooled:roots=8,lookahead=true", "rloo-pooled:roots=8,lookahead=true,network=both")


def parts(laboratory: Laboratory, args: Args) -> tuple[float, float, float]:
    """Variance of returns within a task, the same less the luck of later decisions, and E δ² of the first decision."""
    study, memory = laboratory.study, Memory.of(args)
    for batch in range(study.pilot):
        draw = partial(laboratory._draw, 1 + batch)
        trees = laboratory._batch(args, memory, draw, (study.seed, 3, 0, batch))
        memory.observe(trees, assign_credit(trees, args, memory), args)
    plain, fair, own = [], [], []
    for repeat in range(study.repeats):
        for tree in laboratory._batch(args, memory, lambda: laboratory.tasks, (study.seed, 3, 1, repeat)):
            returns = np.array([path.total_reward for path in tree.paths])
            later = np.array([sum(edge.control for edge in path.edges[1:]) for path in tree.paths])
            plain.append(returns.var(ddof=1))
            fair.append((returns - later).var(ddof=1))
            own += [path.edges[0].control ** 2 for path in tree.paths]
    return float(np.mean(plain)), float(np.mean(fair)), float(np.mean(own))


def run(study: VarianceStudy) -> str:
    """Make a table with one row for each of ``study.methods``: flat rollouts with look-ahead.

    Raises:
        ValueError: a method does not exist, has forks, has no look-ahead, or discounts (gamma other than 1).
    """
    laboratory = Laboratory(study)
    rows = ["| | variance of returns | less the luck of later decisions | of which the first decision | the rest |"]
    rows.append("|---|---|---|---|---|")
    for method in study.methods:
        args = laboratory.settings(method)
        if args.schedule != "none" or not args.lookahead or args.gamma != 1.0:
            raise ValueError(f"{method}: expected schedule=none, lookahead=true and gamma=1")
        plain, fair, own = parts(laboratory, args)
        rows.append(f"| `{method}` | {plain:.3f} | {fair:.3f} | {own:.3f} | {fair - own:.3f} |")
    laboratory.envs.close()
    return "\n".join(rows)


def main() -> None:
    """Print the variance of returns that remains without the luck of decisions."""
    study = tyro.cli(VarianceStudy, config=(tyro.conf.FlagConversionOff,))
    try:
        print(run(replace(study, methods=METHODS) if study.methods == VarianceStudy.methods else study))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
