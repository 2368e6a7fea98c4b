"""Runs side by side: mean and spread over seeds of every algorithm, as a Markdown table and a plot.

python -m bpo_ref.compare --out docs/results/alfworld-tiny runs/study/*-seed*
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bpo_ref.plots import learning_curve, read_scores


def summary(runs: Sequence[Path]) -> str:
    """One line an algorithm. AUC is the mean success over the evaluations after the start; ± is the standard
    deviation over seeds; the budget columns are means a run.
    """
    by_algo: dict[str, list[tuple[list[dict[str, Any]], dict[str, Any]]]] = {}
    for run in runs:
        results = json.loads((run / "results.json").read_text())
        by_algo.setdefault(results["args"]["algo"], []).append((read_scores(run), results))
    lines = [
        "| algorithm | seeds | start | end, mean ± sd (each) | AUC | returns | env steps | tokens | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for algo, entries in by_algo.items():
        curves = [[point["success"] for point in scores] for scores, _ in entries]
        ends = np.array([curve[-1] for curve in curves])
        areas = np.array([np.mean(curve[1:]) for curve in curves])
        start = np.mean([curve[0] for curve in curves])
        budget = {name: np.mean([r["counters"][name] for _, r in entries]) for name in entries[0][1]["counters"]}
        each = " ".join(f"{end:.3f}" for end in ends)
        lines.append(
            f"| {algo} | {len(entries)} | {start:.3f} | {_mean_sd(ends)} ({each}) | {_mean_sd(areas)} "
            f"| {budget['returns']:,.0f} | {budget['env_steps'] / 1e3:,.0f}k | {budget['tokens'] / 1e3:,.0f}k "
            f"| {budget['seconds']:,.0f} |"
        )
    return "\n".join(lines)


def _mean_sd(values: np.ndarray) -> str:
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, required=True, help="write OUT-table.md and OUT.png")
    arguments = parser.parse_args()
    table = summary(arguments.runs)
    print(table)
    arguments.out.with_name(arguments.out.name + "-table.md").write_text(table + "\n")
    learning_curve(arguments.runs, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
