"""Cost of splits with look-ahead on random tabular MDPs: gradient noise times environment steps.

    python tests/bpo_ref/estimators/split_costs.py --mdps 8 --batches 400

Prints each variant's cost relative to `bpo` with look-ahead: the geometric mean over MDPs and its standard error.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402
from lookahead_cases import batches_of, settings, taught  # noqa: E402
from tabular import MDP, gradients, random_mdp  # noqa: E402

from bpo_ref.args import Args  # noqa: E402
from bpo_ref.train import assign_credit  # noqa: E402
from sandboxgym.tree import RolloutTree  # noqa: E402

TURNS = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "bpo": {},
    "without look-ahead": {"lookahead": False},
    "no splits (rloo-pooled, 8)": {"algo": "rloo-pooled", "roots": 8},
    "splits by the fair variance": {"split_variance": "fair"},
    "1 split": {"points": 1},
    "1 split, fair": {"points": 1, "split_variance": "fair"},
    "2 splits": {"points": 2},
    "5 splits": {"points": 5},
    "3 roots": {"roots": 3},
    "6 roots": {"roots": 6},
    "6 roots, 1 split": {"roots": 6, "points": 1},
    "no roulette": {"roulette": 1.0},
    "roulette of 0.25": {"roulette": 0.25},
    "roulette below 0.1": {"roulette_below": 0.1},
}


def cost(mdp: MDP, args: Args, batches: int) -> float:
    """Noise of a batch's gradient times its environment steps."""
    memory, steps = taught(mdp, args), []

    def sampled() -> Iterator[list[RolloutTree]]:
        for trees, *_ in batches_of(mdp, args, memory, batches=batches, listed=(0, 1, 2)):
            if not args.lookahead:
                for edge in (edge for tree in trees for edge in tree.edges()):
                    edge.control = 0.0
            steps.append(sum(tree.env_steps for tree in trees))
            yield trees

    samples = gradients(mdp, sampled(), {"": lambda trees: assign_credit(trees, args, memory) and None})[""]
    return float(samples.var(axis=0).sum() * np.mean(steps))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mdps", type=int, default=8)
    parser.add_argument("--batches", type=int, default=400)
    given = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for seed in range(given.mdps):
        mdp = random_mdp(seed=seed, states=10, actions=3, horizon=TURNS)
        for name, options in VARIANTS.items():
            args = settings(**{"algo": "bpo", "max_turns": TURNS, **options})
            found[name].append(cost(mdp, args, given.batches))
    print("| | cost |\n|---|---|")
    for name, costs in found.items():
        logs = [math.log(mine / usual) for mine, usual in zip(costs, found["bpo"], strict=True)]
        error = np.std(logs, ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        mean = math.exp(np.mean(logs))
        print(f"| {name} | {mean:.2f} [{mean * math.exp(-1.96 * error):.2f}, {mean * math.exp(1.96 * error):.2f}] |")


if __name__ == "__main__":
    main()
