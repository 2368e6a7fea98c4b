"""Comparison of runs: mean and standard deviation over seeds of every variant, as Markdown tables and a plot.

    python -m bpo_ref.compare --out runs/study-tables runs/study/*-seed*

Runs in folders named LABEL-seedN belong to the variant LABEL, other runs to one named after their algorithm.
``--data FILE`` writes the numbers behind the tables to one file (`experiments/study_archive.py`). It can replace the
folders, and is small enough to be committed beside a table. Metrics, as the BPO paper defines them:

- updates, tokens and seconds until a run reaches 90 % of the best baseline's final success, and updates until it
  reaches GRPO's final success, counted from the start and interpolated linearly between evaluations;
- gradient-norm variance: running variance of ‖∇L‖₂ over 50 mini-batches, mean over the run, and its ratio to GRPO's.
  It mixes in the scale of the estimator (docs/theory.md);
- non-degenerate share: the share of tasks that have an advantage with an absolute value above 0.1;
- success on easy and hard tasks of the evaluation set: those that the start solved, and those that it did not.

A standard error (s.e.) counts supervised starts: runs that began at the same weights are not independent, so they are
averaged first.

With ``--metric reward`` the mean reward of an episode (WebShop's score) takes the place of success everywhere except in
the success on easy and hard tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np

from bpo_ref.experiments.plots import PLOTS, Metric, Plot, by_label, read_scores
from bpo_ref.experiments.study_archive import pack, start_of, unpacked

Groups = Mapping[str, Sequence["Finished"]]  # runs by label

WINDOW = 50  # mini-batches of the running variance


@dataclass(frozen=True)
class Finished:
    """A finished run, read from its logs."""

    folder: Path
    metric: Metric = "success"

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.results["args"]["seed"])

    @property
    def begun_at(self) -> str:
        """The supervised start that it began at: runs that share it are not independent."""
        return start_of(self.results) or f"seed{self.seed}"

    @cached_property
    def scores(self) -> list[dict[str, Any]]:
        """Evaluations from the start of reinforcement learning on."""
        return read_scores(self.folder)

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """The log's entries of updates."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "update/grad_norm" in line]

    @property
    def comparable(self) -> bool:
        """Tell whether anything was trained, and whether the score at the start is known."""
        return bool(self.updates) and bool(self.scores) and self.scores[0]["update"] == 0

    @cached_property
    def results(self) -> dict[str, Any]:
        """Settings and totals of the run."""
        return dict(json.loads((self.folder / "results.json").read_text()))

    @property
    def start(self) -> float:
        """The metric before the first update."""
        return float(self.scores[0][self.metric])

    @property
    def final(self) -> float:
        """The metric at the end."""
        return float(self.scores[-1][self.metric])

    @property
    def area(self) -> float:
        """Mean of the metric over the evaluations after the start, the area under the curve."""
        return float(np.mean([record[self.metric] for record in self.scores[1:]]))

    def spent_until(self, level: float, unit: str) -> float:
        """Updates, tokens or seconds until an evaluation reached a level, interpolated linearly; NaN: never."""
        return spent_until([(record[unit], record[self.metric]) for record in self.scores], level)

    @property
    def norm_variance(self) -> float:
        """Mean running variance of the gradient's norm."""
        norms = [line["update/grad_norm"] for line in self.updates]
        window = min(WINDOW, len(norms))
        return float(np.mean([np.var(norms[i : i + window]) for i in range(len(norms) - window + 1)]))

    @property
    def shared_steps(self) -> float:
        """Environment steps that forks saved by starting at a snapshot."""
        returns = np.diff([line["total/returns"] for line in self.updates], prepend=0.0)
        turns = np.array([line["rollout/turns"] for line in self.updates])
        return float(returns @ turns - self.updates[-1]["total/env_steps"])

    @property
    def nondegenerate(self) -> float:
        """Share of tasks with an advantage to learn from."""
        return float(1.0 - np.mean([line["rollout/degenerate_tasks"] for line in self.updates]))

    def success_where(self, solved_at_start: bool) -> float:
        """Final success on the tasks that the start solved, or did not; NaN without a record."""
        start, end = (self.scores[i].get("outcomes", []) for i in (0, -1))
        chosen = [after for before, after in zip(start, end) if bool(before) == solved_at_start]
        return float(np.mean(chosen)) if chosen else float("nan")


def spent_until(points: Sequence[Sequence[float]], level: float) -> float:
    """Position where a curve of (spent, metric) reaches a level, interpolated linearly; NaN: never."""
    if points[0][1] >= level:
        return float(points[0][0])
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= level:
            return float(x0 + (x1 - x0) * (level - y0) / (y1 - y0))
    return float("nan")


def grouped(runs: Sequence[Path], metric: Metric = "success") -> dict[str, list[Finished]]:
    """Group finished runs by their label."""
    return {label: [Finished(run, metric) for run in found] for label, found in by_label(runs).items()}


def summary(groups: Groups) -> str:
    """One line per variant: ± sd is over seeds, ± s.e. over starts; budget columns are means per run."""
    lines = [
        "| variant | seeds | start | end, mean ± sd (each) | end minus start ± s.e. | rollouts | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, group in groups.items():
        ends = np.array([run.final for run in group])
        gained = _over_starts(group, [run.final - run.start for run in group])
        start = np.mean([run.start for run in group])
        counters = [run.results["counters"] for run in group]
        budget = {name: np.mean([spent[name] for spent in counters]) for name in counters[0]}
        each = " ".join(f"{end:.3f}" for end in ends)
        lines.append(
            f"| {label} | {len(group)} | {start:.3f} | {_mean_sd(ends)} ({each}) | {_mean_error(gained)} "
            f"| {budget['returns']:,.0f} | {budget['tokens'] / 1e3:,.0f}k |"
        )
    return "\n".join(lines)


def efficiency(groups: Groups) -> str:
    """The paper's metrics, one line per variant. Baselines are the variants whose labels do not begin with bpo."""
    finals = {label: float(np.mean([run.final for run in group])) for label, group in groups.items()}
    baselines = [final for label, final in finals.items() if not label.startswith("bpo")] or list(finals.values())
    target, grpo = 0.9 * max(baselines), groups.get("grpo")
    noise = float(np.mean([run.norm_variance for run in grpo])) if grpo else 0.0
    lines = [
        f"| variant | AUC | updates, tokens, seconds to {target:.3f} | updates to GRPO's final "
        "| Var of grad norm (/ GRPO's) | non-degenerate | easy | hard |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, group in groups.items():
        to = [_mean([run.spent_until(target, unit) for run in group]) for unit in ("update", "tokens", "seconds")]
        to_grpo = _mean([run.spent_until(finals["grpo"], "update") for run in group]) if grpo else "-"
        areas = _mean_sd(np.array([run.area for run in group]))
        variance = float(np.mean([run.norm_variance for run in group]))
        ratio = f" ({variance / noise:.2f})" if noise else ""
        easy, hard = (_mean([run.success_where(solved) for run in group], "{:.3f}") for solved in (True, False))
        lines.append(
            f"| {label} | {areas} | {', '.join(to)} | {to_grpo} | {variance:.3g}{ratio} "
            f"| {np.mean([run.nondegenerate for run in group]):.2f} | {easy} | {hard} |"
        )
    return "\n".join(lines)


def beside(groups: Groups, baseline: str = "grpo") -> str:
    """Paired differences to another variant's runs of the same seeds: mean ± standard error; empty without any.

    Seeds that share a supervised start are averaged first: the standard error is over starts. If every run has more
    than two evaluations, the last column is the number of tokens after which the mean curve reaches the baseline's mean
    final value, as a share of the tokens that the baseline spent. Its 90 % interval resamples the starts, the same ones
    for both.
    """
    if baseline not in groups:
        return ""
    others = {run.seed: run for run in groups[baseline]}
    curves = all(len(run.scores) > 2 for group in groups.values() for run in group)
    heads = ["variant", "seeds (starts)", f"end minus {baseline}'s ± s.e."]
    heads += [f"AUC minus {baseline}'s ± s.e.", f"tokens to {baseline}'s final"] if curves else []
    rows = []
    for label, group in groups.items():
        pairs = [(run, others[run.seed]) for run in group if run.seed in others]
        if label == baseline or not pairs:
            continue
        runs = [run for run, _ in pairs]
        ends, areas = (
            _over_starts(runs, [getattr(run, name) - getattr(other, name) for run, other in pairs])
            for name in ("final", "area")
        )
        row = [label, f"{len(pairs)} ({len(ends)})", _mean_error(ends)]
        rows.append([*row, _mean_error(areas), _reached(pairs)] if curves else row)
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]]) if rows else ""


def _over_starts(runs: Sequence[Finished], values: Sequence[Any]) -> np.ndarray:
    """The mean value of the runs of each supervised start: [starts, …]."""
    starts: dict[str, list[Any]] = {}
    for run, value in zip(runs, values):
        starts.setdefault(run.begun_at, []).append(value)
    return np.array([np.mean(found, axis=0) for found in starts.values()])


def _reached(pairs: Sequence[tuple[Finished, Finished]]) -> str:
    """Budget at which the first runs' mean curve reaches the second's mean end, as a share of what these spent."""
    shared = range(min(len(run.scores) for run, _ in pairs))
    runs = [run for run, _ in pairs]
    curves = _over_starts(
        runs, [[[run.scores[i][x] for x in ("tokens", run.metric)] for i in shared] for run, _ in pairs]
    )
    others = _over_starts(runs, [[other.scores[-1]["tokens"], other.final] for _, other in pairs])

    def part(chosen: np.ndarray) -> float:
        spent, final = map(float, others[chosen].mean(axis=0))
        return spent_until(curves[chosen].mean(axis=0), final) / spent

    every = np.arange(len(curves))
    parts = [part(chosen) for chosen in np.random.default_rng(0).choice(every, (2000, len(every)))]
    low, high = np.quantile(np.nan_to_num(parts, nan=np.inf), [0.05, 0.95], method="lower")
    interval = f" [{_part(low)}, {_part(high)}]" if len(every) > 1 else ""
    return _part(part(every)) + interval


def _part(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "never"


def overhead(groups: Groups) -> str:
    """Cost of branching: c_snap, the time of a task's rollout, and the snapshots' share of it.

    The time of a task's rollout is the time of the whole rollout times the number of processes, divided by the number
    of tasks. "With restores" is the share of the rollout that waited for snapshots and restores. "Replayed instead" is
    what replaying the prefixes of the forks would have added: the shared steps at the run's mean time per step, resets
    included, because a replay begins with one. With ``env_threads`` above 1 snapshots are taken in parallel, so c_snap
    overstates their cost.
    """
    lines = [
        "| variant | c_snap, ms | snapshots per task | rollout, ms per task | overhead, % | with restores, % "
        "| steps shared a task | replayed instead, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, group in groups.items():
        updates = [line for run in group for line in run.updates]
        tasks = group[0].results["args"]["prompts"]
        snap = 1e3 * float(np.mean([line["time/snapshot"] for line in updates]))
        count = float(np.mean([line["rollout/snapshots"] for line in updates]))
        seconds = sum(line["time/rollout"] for line in updates)
        processes = group[0].results.get("processes", 1)
        rollout = 1e3 * seconds * processes / len(updates) / tasks
        waited = sum(line["time/snapshots"] for line in updates) / seconds
        shared = sum(run.shared_steps for run in group)
        step = sum(line["time/env"] for line in updates) / sum(run.updates[-1]["total/env_steps"] for run in group)
        lines.append(
            f"| {label} | {snap:.3f} | {count:.1f} | {rollout:.1f} | {100 * snap * count / rollout:.2f} "
            f"| {100 * waited:.2f} | {shared / len(updates) / tasks:.1f} | {100 * shared * step / seconds:.2f} |"
        )
    return "\n".join(lines)


def write(
    runs: Sequence[Path], out: Path, metric: Metric = "success", *, costs: bool = False, plot: Plot = "curves"
) -> str:
    """Write OUT-table.md, with `overhead` if ``costs``, and OUT.png; returns the tables."""
    groups = grouped(runs, metric)
    tables = [summary(groups), efficiency(groups), beside(groups), overhead(groups) if costs else ""]
    text = "\n\n".join(filter(None, tables)) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + "-table.md").write_text(text)
    PLOTS[plot](runs, out.with_name(out.name + ".png"), metric)
    return text


def _mean_sd(values: np.ndarray) -> str:
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")


def _mean_error(values: np.ndarray) -> str:
    return f"{values.mean():+.3f}" + (f" ± {values.std(ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else "")


def _mean(values: Sequence[float], form: str = "{:,.0f}") -> str:
    """Mean of the values that are numbers, with the count of those that are not."""
    found = [value for value in values if value == value]
    missing = len(values) - len(found)
    return (form.format(np.mean(found)) if found else "never") + (f" ({missing} never)" if found and missing else "")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``python -m bpo_ref.compare``: finished runs side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs, or files written by --data")
    parser.add_argument("--out", type=Path, required=True, help="write OUT-table.md and OUT.png")
    parser.add_argument("--metric", choices=get_args(Metric), default="success", help="metric to compare runs by")
    parser.add_argument("--plot", choices=get_args(Plot), default="curves", help="learning curves, or end minus start")
    parser.add_argument("--overhead", action="store_true", help="add a table of the cost of branching")
    parser.add_argument("--data", type=Path, help="write the numbers behind the tables to this file")
    arguments = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        arguments.runs = unpacked(arguments.runs, Path(folder))
        _compare(arguments, parser)


def _compare(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    finished = [run for run in arguments.runs if (run / "results.json").exists() and Finished(run).comparable]
    if not finished:
        given = ", ".join(map(str, arguments.runs))
        parser.error(f"expected finished runs, with results.json, updates and a score of their start, found {given}")
    if left_out := [str(run) for run in arguments.runs if run not in finished]:
        why = "they have not finished, or hold no updates or no score of their start"
        print(f"left out because {why}: {', '.join(left_out)}", file=sys.stderr)
    if arguments.data:
        pack(finished, arguments.data)
    print(write(finished, arguments.out, arguments.metric, costs=arguments.overhead, plot=arguments.plot))


if __name__ == "__main__":
    main()
