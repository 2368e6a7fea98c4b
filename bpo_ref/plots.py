"""Learning curves from the logs of runs.

python -m bpo_ref.plots --out curve.png runs/alfworld-bpo-* runs/alfworld-rloo-*
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter

Metric = Literal["success", "reward"]
"""Of an evaluation: share of successes, or mean total reward of an episode."""


def read_scores(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run: the start of reinforcement learning, then each one after."""
    records = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    start = [record for record in records if record["name"] in ("sft", "start", "untrained")][-1:]
    return [{**record, "update": 0} for record in start] + [
        {**record, "update": int(record["name"].partition("@")[2])} for record in records if "@" in record["name"]
    ]


def label_of(run: Path) -> str:
    """What a run is shown as: LABEL of a folder named LABEL-seedN, else its algorithm."""
    named = re.fullmatch(r"(.+)-seed\d+", run.name)
    if named:
        return named[1]
    algorithms = [record["name"].partition("@")[0] for record in read_scores(run) if "@" in record["name"]]
    return algorithms[0] if algorithms else "sft"


def learning_curve(runs: Sequence[Path], path: Path, metric: Metric = "success") -> None:
    """A metric against updates and against generated tokens; runs of one label as mean ± standard deviation."""
    by_algo: dict[str, list[list[dict[str, Any]]]] = {}
    for run in runs:
        by_algo.setdefault(label_of(run), []).append(read_scores(run))
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4), sharey=True)

    def final(named: tuple[str, list[list[dict[str, Any]]]]) -> float:
        return -float(np.mean([curve[-1][metric] for curve in named[1]]))

    for colour, (algo, curves) in enumerate(sorted(by_algo.items(), key=final)):
        length = min(map(len, curves))
        heights = np.array([[record[metric] for record in curve[:length]] for curve in curves])
        for axis, x in zip(axes, ("update", "tokens")):
            at = np.mean([[record[x] for record in curve[:length]] for curve in curves], axis=0)
            label = f"{algo} ({len(curves)} seeds)" if len(curves) > 1 else algo
            axis.plot(at, heights.mean(axis=0), marker="o", markersize=3, color=f"C{colour}", label=label)
            if len(curves) > 1:
                spread = heights.std(axis=0, ddof=1)
                low, high = heights.mean(axis=0) - spread, heights.mean(axis=0) + spread
                axis.fill_between(at, low, high, color=f"C{colour}", alpha=0.15, linewidth=0)
    axes[0].set_xlabel("update")
    axes[0].set_ylabel(f"{metric} on the evaluation panel")
    axes[1].set_xlabel("generated tokens")
    axes[1].xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, min(1.0, 1.1 * axes[0].get_ylim()[1]))
    axes[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)  # the best at the top
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Command line."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    arguments = parser.parse_args()
    learning_curve(arguments.runs, arguments.out)


if __name__ == "__main__":
    main()
