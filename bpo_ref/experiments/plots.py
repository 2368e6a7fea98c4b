"""Learning curves, and what variants gained, from the logs of runs.

python -m bpo_ref.experiments.plots --out curve.png runs/alfworld-bpo-* runs/alfworld-rloo-*
python -m bpo_ref.experiments.plots --out ablation.png --plot gains runs/k-sweep/*-seed*
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter

Metric = Literal["success", "reward"]
"""Of an evaluation: share of successes, or mean total reward of an episode."""

Plot = Literal["curves", "gains"]
"""`learning_curve`, or `gains`: for ablations, where the ends of many variants are compared."""


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


def by_label(runs: Sequence[Path]) -> dict[str, list[Path]]:
    """Runs that are one variant, as `label_of` tells."""
    groups: dict[str, list[Path]] = {}
    for run in runs:
        groups.setdefault(label_of(run), []).append(run)
    return groups


def learning_curve(runs: Sequence[Path], path: Path, metric: Metric = "success") -> None:
    """A metric against updates and against generated tokens; runs of one label as mean ± standard deviation."""
    groups = {label: [read_scores(run) for run in found] for label, found in by_label(runs).items()}
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4), sharey=True)
    colours = _colours(len(groups))

    def final(named: tuple[str, list[list[dict[str, Any]]]]) -> float:
        return -float(np.mean([curve[-1][metric] for curve in named[1]]))

    for colour, (name, curves) in zip(colours, sorted(groups.items(), key=final)):
        length = min(map(len, curves))
        heights = np.array([[record[metric] for record in curve[:length]] for curve in curves])
        for axis, x in zip(axes, ("update", "tokens")):
            at = np.mean([[record[x] for record in curve[:length]] for curve in curves], axis=0)
            label = f"{name} ({len(curves)} seeds)" if len(curves) > 1 else name
            axis.plot(at, heights.mean(axis=0), marker="o", markersize=3, color=colour, label=label)
            if len(curves) > 1:
                spread = heights.std(axis=0, ddof=1)
                low, high = heights.mean(axis=0) - spread, heights.mean(axis=0) + spread
                axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    axes[0].set_xlabel("update")
    axes[0].set_ylabel(f"{metric} on the evaluation panel")
    axes[1].set_xlabel("generated tokens")
    axes[1].xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes:
        axis.grid(alpha=0.3)
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(min(0.0, low), min(1.0, 1.1 * high) if metric == "success" else 1.1 * high)
    axes[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)  # the best at the top
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def gains(runs: Sequence[Path], path: Path, metric: Metric = "success") -> None:
    """What learning added, end less start: a dot for each run, coloured by seed; mean and standard error of a label.

    Variants of a study begin at the same weights in each seed, so a colour can be followed from line to line. Runs
    without updates (a study's starts) are left out.
    """
    read = {run: read_scores(run) for run in runs}
    learnt = [run for run, curve in read.items() if len(curve) > 1]

    def gain(run: Path) -> tuple[int, float]:
        curve, numbered = read[run], re.search(r"-seed(\d+)$", run.name)
        return int(numbered[1]) if numbered else 0, curve[-1][metric] - curve[0][metric]

    groups = {label: list(map(gain, found)) for label, found in by_label(learnt).items()}
    seeds = sorted({seed for found in groups.values() for seed, _ in found})
    colours = dict(zip(seeds, _colours(len(seeds))))
    figure, axis = plt.subplots(figsize=(8, 0.34 * len(groups) + 1.3))
    for line, found in enumerate(groups.values()):
        for seed, gained in found:
            axis.plot(gained, line, "o", markersize=5, alpha=0.7, color=colours[seed])
        values = np.array([gained for _, gained in found])
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        axis.errorbar(values.mean(), line, xerr=error, fmt="D", color="black", markersize=5, capsize=3)
    for seed in seeds:
        axis.plot([], [], "o", markersize=5, alpha=0.7, color=colours[seed], label=f"seed {seed}")
    axis.errorbar([], [], xerr=[], fmt="D", color="black", markersize=5, capsize=3, label="mean ± standard error")
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    axis.set_xlabel(f"final minus initial {metric} on the evaluation set")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _colours(count: int) -> list[Any]:
    """So many that can be told apart."""
    palette = matplotlib.colormaps["tab10" if count <= 10 else "tab20"]
    return [palette(min(number, 19)) for number in range(count)]


PLOTS = {"curves": learning_curve, "gains": gains}


def main() -> None:
    """Command line."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--plot", choices=get_args(Plot), default="curves", help="what is drawn")
    parser.add_argument("--metric", choices=get_args(Metric), default="success", help="of the evaluations")
    arguments = parser.parse_args()
    PLOTS[arguments.plot](arguments.runs, arguments.out, arguments.metric)


if __name__ == "__main__":
    main()
