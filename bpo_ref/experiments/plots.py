"""Learning curves, and the gains of variants, from the logs of runs.

python -m bpo_ref.experiments.plots --out curve.png runs/alfworld-bpo-* runs/alfworld-rloo-*
python -m bpo_ref.experiments.plots --out ablation.png --plot gains runs/k-sweep/*-seed*

An algorithm has the same colour in every plot (`COLOURS`); each plot says what its error bars are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

Metric = Literal["success", "reward"]
"""Metric of an evaluation: success rate, or mean total reward per episode."""

Plot = Literal["curves", "gains"]
"""Kind of plot: `learning_curve`, or `gains`, which compares the final results of many variants (ablations)."""

COLOURS: dict[str, str] = {
    "sft": "#000000",
    "ppo": "#6a3d9a",
    "grpo": "#1f77b4",
    "gigpo": "#17becf",
    "rloo": "#ff7f0e",
    "rloo-turn": "#b15928",
    "rloo-key": "#8c6d31",
    "rloo-value": "#e7ba52",
    "rloo-pooled": "#d62728",
    "vineppo": "#7f7f7f",
    "bpo": "#2ca02c",
    "bpo-split": "#98df8a",
    "bpo-forest": "#637939",
    "bpo-tree": "#bcbd22",
    "bpo-key": "#006d5b",
    "bpo-sibling": "#9edae5",
    "bpo-paper": "#e377c2",
}
"""Colour of every algorithm (`presets.PRESETS`), the same in every plot."""

ALIASES = {"bpo-split:baseline=pooled,roulette=0.5": "bpo"}
"""Presets that are shown as another preset."""

_OTHERS = ("#393b79", "#843c39", "#7b4173", "#5254a3", "#ad494a", "#a55194")  # for labels that name no algorithm
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = "osD^vPX*<>"


def algorithm_of(label: str) -> str:
    """The algorithm that a label begins with, such as bpo-paper of bpo-paper-K4 or of bpo-paper:roots=8; else ""."""
    label = ALIASES.get(label, label)
    named = [name for name in COLOURS if re.match(re.escape(name) + r"($|[-:_ @])", label)]
    return max(named, key=len, default="")


def colours_of(labels: Sequence[str]) -> dict[str, str]:
    """Colour of each label: that of its algorithm, or one that no algorithm has."""
    others = cycle(_OTHERS)
    return {label: COLOURS.get(algorithm_of(label)) or next(others) for label in dict.fromkeys(labels)}


def read_scores(run: Path) -> list[dict[str, Any]]:
    """Evaluations of a run: at the start of reinforcement learning, then all later ones."""
    records = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    start = [record for record in records if record["name"] in ("sft", "start", "untrained")][-1:]
    return [{**record, "update": 0} for record in start] + [
        {**record, "update": int(record["name"].partition("@")[2])} for record in records if "@" in record["name"]
    ]


def label_of(run: Path) -> str:
    """Label of a run: LABEL of a folder named LABEL-seedN, else its algorithm."""
    named = re.fullmatch(r"(.+)-seed\d+", run.name)
    if named:
        return named[1]
    algorithms = [record["name"].partition("@")[0] for record in read_scores(run) if "@" in record["name"]]
    return algorithms[0] if algorithms else "sft"


def by_label(runs: Sequence[Path]) -> dict[str, list[Path]]:
    """Group runs by variant, as `label_of` names it."""
    groups: dict[str, list[Path]] = {}
    for run in runs:
        groups.setdefault(label_of(run), []).append(run)
    return groups


def evaluated_on(run: Path) -> str:
    """Description of a run's evaluation set, from its settings if they are there."""
    try:
        args = json.loads((run / "results.json").read_text())["args"]
        held_out, env = args["eval_kwargs"] not in ([], args["env_kwargs"]), str(args["env_id"])
    except (OSError, KeyError, ValueError):
        return "the evaluation set"
    things = "games" if "ALFWorld" in env else "tasks"
    return f"the held-out {things}" if held_out else f"the training {things}"


def learning_curve(runs: Sequence[Path], path: Path, metric: Metric = "success") -> None:
    """Plot a metric against generated tokens, averaged over the runs of a label; for several runs also the end values.

    A single run is shown with the 95 % interval of each evaluation. For several runs a second panel has a dot for the
    final value of each run, and the mean of each label with its standard error. Runs without an evaluation are left
    out.

    Raises:
        ValueError: no run has an evaluation.
    """
    runs = [run for run in runs if read_scores(run)]
    if not runs:
        raise ValueError("expected a run with at least one evaluation, found none")
    groups = {label: [read_scores(run) for run in found] for label, found in by_label(runs).items()}
    names = sorted(groups, key=lambda name: -float(np.mean([curve[-1][metric] for curve in groups[name]])))
    colours, dashes = colours_of(names), _dashes(names)
    several = len(runs) > 1
    if several:
        figure, (axis, ends) = plt.subplots(1, 2, figsize=(11.5, max(4.0, 0.32 * len(names) + 1.4)))
    else:
        figure, axis = plt.subplots(figsize=(8, 4))
    for name in names:
        curves = groups[name]
        length = min(map(len, curves))
        heights = np.array([[record[metric] for record in curve[:length]] for curve in curves])
        at = np.mean([[record["tokens"] for record in curve[:length]] for curve in curves], axis=0)
        look = {"color": colours[name], "linestyle": dashes[name], "marker": "o", "markersize": 3}
        axis.plot(at, heights.mean(axis=0), label=name, **look)
        if not several and metric == "success" and all("outcomes" in record for record in curves[0]):
            low, high = np.array([_wilson(record[metric], len(record["outcomes"])) for record in curves[0]]).T
            bars = [heights[0] - low, high - heights[0]]
            axis.errorbar(at, heights[0], yerr=bars, fmt="none", color=colours[name], capsize=3, linewidth=1)
            axis.plot([], [], color=colours[name], marker="|", linestyle="none", label="95 % interval of an evaluation")
    axis.set_xlabel("generated tokens since the supervised start" + (" (mean over seeds)" if several else ""))
    axis.set_ylabel(f"{metric} on {evaluated_on(runs[0])}")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(alpha=0.3)
    low, high = axis.get_ylim()
    axis.set_ylim(min(0.0, low), min(1.0, 1.1 * high) if metric == "success" else 1.1 * high)
    if several:
        for line, name in enumerate(names):
            values = np.array([curve[-1][metric] for curve in groups[name]])
            ends.plot(values, [line] * len(values), "o", markersize=4, alpha=0.5, color=colours[name])
            error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
            look = {"color": colours[name], "markeredgecolor": "black", "markersize": 6, "capsize": 3}
            bars = ends.errorbar(values.mean(), line, xerr=error, fmt="D", **look)
            bars.lines[2][0].set_linestyle(dashes[name])
        ends.set_yticks(range(len(names)), [f"{name} ({len(groups[name])})" for name in names])
        ends.invert_yaxis()
        ends.grid(alpha=0.3, axis="x")
        ends.set_xlabel(f"{metric} at the end (number of runs)\ndot: a run; diamond and bar: mean ± standard error")
    else:
        axis.legend(loc="best", frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def gains(runs: Sequence[Path], path: Path, metric: Metric = "success") -> None:
    """Plot the final minus the initial metric: a marker per run, shaped by seed; mean and standard error per label.

    Variants of a study start from the same weights for each seed, so a shape can be followed from line to line. Runs
    without updates (a study's starting points) are left out.

    Raises:
        ValueError: no run has an evaluation after updates.
    """
    read = {run: read_scores(run) for run in runs}
    learnt = [run for run, curve in read.items() if len(curve) > 1]
    if not learnt:
        raise ValueError("expected a run that was evaluated before and after updates, found none")

    def gain(run: Path) -> tuple[int, float]:
        curve, numbered = read[run], re.search(r"-seed(\d+)$", run.name)
        return int(numbered[1]) if numbered else 0, curve[-1][metric] - curve[0][metric]

    groups = {label: list(map(gain, found)) for label, found in by_label(learnt).items()}
    colours = colours_of(list(groups))
    seeds = sorted({seed for found in groups.values() for seed, _ in found})
    shapes = {seed: _MARKERS[place % len(_MARKERS)] for place, seed in enumerate(seeds)}
    figure, axis = plt.subplots(figsize=(9.5, 0.34 * len(groups) + 1.3))
    for line, (name, found) in enumerate(groups.items()):
        for seed, gained in found:
            axis.plot(gained, line, shapes[seed], markersize=5, alpha=0.6, color=colours[name], label="_run")
        values = np.array([gained for _, gained in found])
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        axis.errorbar(values.mean(), line, xerr=error, fmt="|", color="black", markersize=12, capsize=3, label="_mean")
    for seed in seeds:
        axis.plot([], [], shapes[seed], markersize=5, alpha=0.6, color="grey", label=f"seed {seed}")
    axis.errorbar([], [], xerr=[], fmt="|", color="black", markersize=12, capsize=3, label="mean ± standard error")
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    axis.set_xlabel(f"final minus initial {_rate(metric)} on {evaluated_on(runs[0])}")
    axis.xaxis.set_major_locator(MaxNLocator(5))  # labels such as -0.075 are wide, and long names leave little room
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def study_figure(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    differences: Mapping[str, NDArray[np.float64]],
    intervals: Mapping[str, tuple[float, float]],
    path: Path,
    metric: Metric = "success",
) -> None:
    """Plot the registered study: mean learning curves, and the differences of areas under the curve by start.

    Args:
        curves: for each method the scores of its runs, one run per start.
        differences: for each comparison the difference at every start.
        intervals: 95 % interval of each comparison.
        path: file to write.
        metric: of the curves.
    """
    figure, (axis, beside) = plt.subplots(1, 2, figsize=(11.5, 4.6), width_ratios=(1.2, 1))
    names = list(curves)
    colours, dashes = colours_of(names), _dashes(names)
    starts = len(next(iter(curves.values())))
    for name, runs in curves.items():
        length = min(map(len, runs))
        heights = np.array([[score[metric] for score in run[:length]] for run in runs])
        at = np.mean([[score["tokens"] for score in run[:length]] for run in runs], axis=0)
        axis.plot(at, heights.mean(axis=0), label=name, color=colours[name], linestyle=dashes[name])
    axis.set_xlabel("generated tokens since the supervised start")
    axis.set_ylabel(f"{metric}, mean of {starts} starts")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    for line, (name, each) in enumerate(differences.items()):
        beside.plot(each, [line] * len(each), "o", markersize=4, alpha=0.5, color="grey")
        low, high = intervals[name]
        beside.plot([low, high], [line, line], color="black", linewidth=1.5)
        beside.plot(each.mean(), line, "D", color="black", markersize=6)
    beside.axvline(0, color="grey", linewidth=0.8)
    beside.set_yticks(range(len(differences)), list(differences))
    beside.invert_yaxis()
    beside.grid(alpha=0.3, axis="x")
    beside.set_xlabel("difference of areas under the curve\ndot: a start; bar: exact 95 % interval")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _rate(metric: Metric) -> str:
    return "success rate" if metric == "success" else metric


def _dashes(names: Sequence[str]) -> dict[str, Any]:
    """A line style for each label, to distinguish labels of one algorithm."""
    kinds: dict[str, Iterator[Any]] = {}
    return {name: next(kinds.setdefault(algorithm_of(name) or name, cycle(_DASHES))) for name in sorted(names)}


def _wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson interval of a success rate over n episodes."""
    centre, half = share + z * z / (2 * n), z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


PLOTS = {"curves": learning_curve, "gains": gains}


def main() -> None:
    """Draw learning curves, or gains of variants, from the logs of runs."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--plot", choices=get_args(Plot), default="curves", help="kind of figure")
    parser.add_argument("--metric", choices=get_args(Metric), default="success", help="metric of the evaluations")
    arguments = parser.parse_args()
    try:
        PLOTS[arguments.plot](arguments.runs, arguments.out, arguments.metric)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
