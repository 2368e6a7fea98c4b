"""The registered study: methods that are tuned alike, compared by independent starts (docs/results/study.md).

    python -m bpo_ref.experiments.registered run alfworld --out runs/study --data docs/results/data/study --hours 2
    python -m bpo_ref.experiments.registered report --data docs/results/data/study

``run`` works through a queue: supervised starts, tuning, and with the settings that tuning chose the runs that count.
It may be stopped and started at any time: finished runs are skipped, an interrupted one continues exactly, and what has
finished is in ``--data`` as one file per stage. ``report`` prints what these files say; while runs are missing it says
how many, and tests nothing.

The design is this module: methods, grids, starts, budgets and comparisons are its constants. A change to one of them
after the first run is a deviation from the registration and belongs on the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bpo_ref.experiments.plots import Metric, read_scores, study_figure
from bpo_ref.experiments.sweep import commands, folder_of
from sandboxgym.conformance.stats.tests import holm

RATES = (1e-4, 3e-4, 1e-3)
"""Learning rates, constant after a warm-up of three updates."""
EPISODES = 64
"""Independent rollouts of an update, whatever the group size: tasks x rollouts per task."""


@dataclass(frozen=True)
class Method:
    """An algorithm and its three group sizes, smallest first.

    Attributes:
        words: arguments of the trainer.
        sizes: for each group size, its name and its arguments.
    """

    words: str
    sizes: Mapping[str, str]


def _flat(words: str) -> Method:
    return Method(words, {str(n): f"--prompts {EPISODES // n} --roots {n}" for n in (4, 8, 16)})


def _tree(words: str) -> Method:  # of `bpo`: a path splits on its way, so that n roots end in about 2 n returns
    return Method(words, {str(n): f"--prompts {EPISODES // (2 * n)} --roots {n}" for n in (2, 4, 8)})


METHODS: Mapping[str, Method] = {
    "grpo": _flat("--algo grpo"),
    "rloo": _flat("--algo rloo"),
    "rloo-pooled": _flat("--algo rloo-pooled"),
    "rloo-pooled-lookahead": _flat("--algo rloo-pooled --lookahead True"),
    "gigpo": _flat("--algo gigpo"),
    "ppo": _flat("--algo ppo"),  # four passes of four minibatches
    "vineppo": _flat("--algo vineppo --mc-turns 2 --mc-rollouts 2"),  # two turns valued by two rollouts each
    # the paper's K = 4 with one, two and four branch points: 4, 7 and 13 returns
    "bpo-paper": Method(
        "--algo bpo-paper --width 4",
        {str(1 + 3 * m): f"--prompts {EPISODES // (4 * m)} --points {m}" for m in (1, 2, 4)},
    ),
    "bpo": _tree("--algo bpo"),
    "bpo-lookahead": _tree("--algo bpo --lookahead True"),
}


@dataclass(frozen=True)
class StudyEnvironment:
    """An environment of the study.

    Attributes:
        config: packaged configuration that all runs share.
        metric: what an evaluation counts: ``success`` or ``reward``.
        start: arguments of the supervised starts.
        words: arguments of all other runs.
        tuning: arguments of tuning runs: their budget and an evaluation set of their own.
        final: arguments of the runs that count.
        tuning_starts: seeds of the supervised starts for tuning, which serve for nothing else.
        starts: seeds of the supervised starts that count.
        methods: names out of `METHODS`.
        comparisons: first minus second; tested, with Holm's correction for their number. All others are described
            only.
    """

    config: str
    metric: Metric
    start: str
    words: str
    tuning: str
    final: str
    tuning_starts: Sequence[int]
    starts: Sequence[int]
    methods: Sequence[str]
    comparisons: Sequence[tuple[str, str]]


_SHARED = "--match tokens --lr-decay constant --updates 60 --warmup 3 --save-every 10 --trackers"  # no tracker

DOMAINS: Mapping[str, StudyEnvironment] = {
    "alfworld": StudyEnvironment(
        config="alfworld-tiny",
        metric="success",
        start="",
        words=f"{_SHARED} --eval-episodes 128",
        tuning="--budget 60000 --eval-every 15 --eval-kwargs games=embedded:seen",
        final="--budget 120000 --eval-every 6",
        tuning_starts=range(100, 103),
        starts=range(200, 212),
        methods=tuple(METHODS),
        comparisons=(
            ("rloo-pooled", "grpo"),
            ("bpo", "grpo"),
            ("bpo", "rloo-pooled"),
            ("bpo", "bpo-paper"),
            ("rloo-pooled-lookahead", "rloo-pooled"),
            ("bpo-lookahead", "bpo"),
        ),
    ),
    # Evaluated on goals of products that neither supervised starts nor runs have seen. A purchase's value is in
    # the state's key: without it neither trees nor the baseline were shown to pay (details/variance-webshop-choice.md).
    "webshop": StudyEnvironment(
        config="webshop-choice",
        metric="reward",
        start="--sft-steps 200",
        words=f"{_SHARED} --eval-episodes 128 --env-kwargs split=product-train progress=worth",
        tuning="--budget 6000 --eval-every 15 --eval-kwargs split=product-eval",
        final="--budget 12000 --eval-every 6 --eval-kwargs split=product-test",
        tuning_starts=range(300, 303),
        starts=range(400, 408),
        methods=("grpo", "rloo-pooled", "ppo", "bpo", "bpo-lookahead"),
        comparisons=(("bpo", "grpo"), ("bpo", "rloo-pooled"), ("bpo", "ppo"), ("bpo-lookahead", "bpo")),
    ),
}


# The queue.


def rate_label(rate: float) -> str:
    """A learning rate as it is written in names of runs."""
    return f"{rate:.0e}".replace("e-0", "e-")


def label_of(method: str, size: str, rate: float) -> str:
    """Name of a study's setting, of which its folders are made."""
    return f"{method}.g{size}.lr{rate_label(rate)}"


def words_of(method: str, size: str, rate: float) -> str:
    """Command-line arguments of a study's setting."""
    return f"{METHODS[method].words} {METHODS[method].sizes[size]} --lr {rate}"


def areas(data: Path, domain: str, stage: str) -> dict[tuple[str, int], float]:
    """Area under the curve of every finished run: the mean of its evaluations after the start, by setting and seed."""
    metric = DOMAINS[domain].metric
    return {
        (run["setting"], run["seed"]): float(np.mean([score[metric] for score in run["scores"][1:]]))
        for run in finished(data, domain, stage)
    }


def finished(data: Path, domain: str, stage: str) -> list[dict[str, Any]]:
    """The data of a stage: a `record` of each run."""
    file = data / f"{domain}-{stage}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def best(found: Mapping[tuple[str, int], float], labels: Sequence[str], seeds: Sequence[int]) -> str | None:
    """The setting with the highest mean area; of equal ones the first. None: runs are missing."""
    if any((label, seed) not in found for label in labels for seed in seeds):
        return None
    return max(labels, key=lambda label: np.mean([found[label, seed] for seed in seeds]))


def tuning_labels(method: str, found: Mapping[tuple[str, int], float], seeds: Sequence[int]) -> list[str]:
    """Settings of a method that tuning needs by now; the last ones depend on the results of the first.

    The rule: three learning rates at the middle group size; if the best is at an end of the grid, the next one beyond
    it in the same ratio, once; then the two other group sizes at the best rate.
    """
    small, middle, large = METHODS[method].sizes
    rates = list(RATES)
    labels = [label_of(method, middle, rate) for rate in rates]
    first = best(found, labels, seeds)
    if first is None:
        return labels
    at = labels.index(first)
    if at != 1:
        rates.append(rates[0] ** 2 / rates[1] if at == 0 else rates[-1] ** 2 / rates[-2])
        labels.append(label_of(method, middle, rates[-1]))
        if best(found, labels, seeds) is None:
            return labels
    rate = rates[labels.index(best(found, labels, seeds) or first)]
    return labels + [label_of(method, size, rate) for size in (small, large)]


def chosen(data: Path, domain: str) -> dict[str, str]:
    """The setting that tuning chose for each method; methods whose tuning is not finished are left out."""
    found, seeds = areas(data, domain, "tuning"), DOMAINS[domain].tuning_starts
    choices = {method: best(found, tuning_labels(method, found, seeds), seeds) for method in DOMAINS[domain].methods}
    return {method: label for method, label in choices.items() if label is not None}


def parsed(label: str) -> tuple[str, str, float]:
    """Method, group size and learning rate of a setting's name."""
    method, size, rate = label.split(".", 2)
    return method, size.removeprefix("g"), float(rate.removeprefix("lr"))


def queue(domain: str, out: Path, data: Path) -> Iterator[tuple[str, str, int, list[str]]]:
    """Stage, setting, seed and command of what is to be run next, until nothing is missing.

    Every start is finished for all methods before the next one begins, so that an unfinished study consists of whole
    starts.
    """
    design = DOMAINS[domain]
    while True:
        found = areas(data, domain, "tuning")
        wanted = [
            ("tuning", label, seed)
            for seed in design.tuning_starts
            for method in design.methods
            for label in tuning_labels(method, found, design.tuning_starts)
            if (label, seed) not in found
        ]
        if not wanted:
            done, choices = areas(data, domain, "final"), chosen(data, domain)
            wanted = [
                ("final", choices[method], seed)
                for seed in design.starts
                for method in design.methods
                if (choices[method], seed) not in done
            ]
        if not wanted:
            return
        stage, label, seed = wanted[0]
        extra = [*design.words.split(), *(design.tuning if stage == "tuning" else design.final).split()]
        starts, runs = commands(
            {label: words_of(*parsed(label))}, out / stage, config=design.config, seeds=[seed], launch=sys.executable,
            extra=[],
        )  # fmt: skip
        for command in starts:
            yield "start", "sft", seed, [*command, *design.start.split(), "--eval-untrained", "False", "--trackers"]
        folder = out / stage / f"{label}-seed{seed}"
        again = ["true", "--out", str(folder)]  # finished, but its results were not yet written down
        yield stage, label, seed, [*(runs[0] if runs else again), *extra]


def record(stage: str, label: str, seed: int, folder: Path) -> dict[str, Any]:
    """A finished run as a line of the data; the outcomes of tasks are kept of runs that count."""
    results = json.loads((folder / "results.json").read_text())
    scores = read_scores(folder)
    kept = ["update", "tokens", "returns", "env_steps", "seconds", "success", "reward", "n"]
    kept += ["outcomes"] * (stage == "final")
    return {
        "setting": label,
        "seed": seed,
        "commit": commit(),
        "counters": results["counters"],
        "processor_seconds": round(processor_seconds(folder), 3),
        "scores": [{name: score[name] for name in kept if name in score} for score in scores],
    }


_SPENT = "processor-seconds.txt"
"""File of a run: the processor time of every process that worked on it, a line each."""


def processor_seconds(folder: Path) -> float:
    """Processor time of a run, that of its interrupted beginnings included; 0 if it was not measured."""
    file = folder / _SPENT
    return sum(map(float, file.read_text().split())) if file.exists() else 0.0


def commit() -> str:
    """The commit that this file is of; empty outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def run(domain: str, out: Path, data: Path, *, hours: float, dry_run: bool = False) -> None:
    """Work through the queue until it is empty or the time is over.

    Raises:
        SystemExit: a run failed.
        KeyboardInterrupt: SIGINT or SIGTERM arrived; the run under way has been stopped and continues the next time.
    """
    until = time.monotonic() + 3600 * hours
    data.mkdir(parents=True, exist_ok=True)
    for stage in ("tuning", "final"):
        (out / stage).mkdir(parents=True, exist_ok=True)
    stop = _Stop()
    for stage, label, seed, command in queue(domain, out, data):
        if dry_run or time.monotonic() > until:
            print(f"next: {stage} {label} seed {seed}: {shlex.join(command)}")
            return
        print(time.strftime("%H:%M:%S"), stage, label, seed, flush=True)
        folder = folder_of(command)
        with (out / f"{domain}.log").open("a") as log:
            status = stop.run(command, log)
        if folder.exists():
            with (folder / _SPENT).open("a") as file:
                file.write(f"{stop.processor_seconds}\n")
        if stop.asked:
            raise KeyboardInterrupt
        if status or not (folder / "results.json").exists():
            raise SystemExit(f"error: {shlex.join(command)} ended with {status}: see {out / f'{domain}.log'}")
        if stage != "start":
            with (data / f"{domain}-{stage}.jsonl").open("a") as file:
                file.write(json.dumps(record(stage, label, seed, folder), separators=(",", ":")) + "\n")


class _Stop:
    """SIGINT and SIGTERM ask the run that is under way to save and end; no moment loses a child."""

    def __init__(self) -> None:
        self.asked = False
        self.processor_seconds = 0.0
        """Processor time of the last command and its children."""
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        if self._process is not None:
            self._process.terminate()

    def run(self, command: Sequence[str], log: IO[str]) -> int:
        """Run a command to its end; returns its status."""
        before = _children_seconds()
        self._process = process = subprocess.Popen(command, stdout=log, stderr=log)
        if self.asked:  # while it was started
            process.terminate()
        status = process.wait()
        self.processor_seconds = _children_seconds() - before
        self._process = None
        return status


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# What it says.


def p_value(differences: NDArray[np.float64]) -> float:
    """Two-sided exact permutation test of a mean difference of 0, by the signs of the starts' differences."""
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(differences))))
    means = signs @ differences / len(differences)
    return float(np.mean(np.abs(means) >= abs(differences.mean()) - 1e-12))


def interval(differences: NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """The mean differences that the permutation test does not reject, by bisection."""
    centre, reach = float(differences.mean()), float(np.ptp(differences)) or 1e-9

    def end(sign: float) -> float:
        kept, rejected = 0.0, 2 * reach
        for _ in range(30):
            middle = (kept + rejected) / 2
            if p_value(differences - (centre + sign * middle)) > 1 - level:
                kept = middle
            else:
                rejected = middle
        return centre + sign * kept

    return end(-1.0), end(1.0)


def counts(data: Path, domain: str) -> str:
    """Counts of the study's runs that are there."""
    design = DOMAINS[domain]
    found = {stage: len(areas(data, domain, stage)) for stage in ("tuning", "final")}
    wanted = len(design.methods) * len(design.starts)
    tuned = len(chosen(data, domain))
    return (
        f"{domain}: {found['tuning']} tuning runs, {tuned} of {len(design.methods)} methods tuned; "
        f"{found['final']} of {wanted} runs that count"
    )


def by_start(data: Path, domain: str) -> dict[str, NDArray[np.float64]]:
    """Areas of the chosen settings, [starts], by method; empty while runs are missing."""
    found, choices = areas(data, domain, "final"), chosen(data, domain)
    starts, methods = DOMAINS[domain].starts, DOMAINS[domain].methods
    if len(choices) < len(methods) or any((choices[m], seed) not in found for m in methods for seed in starts):
        return {}
    return {method: np.array([found[choices[method], seed] for seed in starts]) for method in methods}


TABLES = ("areas", "comparisons", "ends")
"""Tables of a domain: `areas_table`, `comparisons_table` and `ends_table`."""


def table(data: Path, domain: str, kind: str) -> str:
    """One of `TABLES` as Markdown; while runs are missing, how many there are."""
    found = by_start(data, domain)
    if not found:
        return f"{counts(data, domain)}. Nothing is tested before all of them are there."
    if kind == "ends":
        return ends_table(data, domain)
    return (
        comparisons_table(found, DOMAINS[domain].comparisons)
        if kind == "comparisons"
        else areas_table(found, chosen(data, domain))
    )


def areas_table(found: Mapping[str, NDArray[np.float64]], choices: Mapping[str, str]) -> str:
    """The setting that tuning chose for each method, and its area under the curve over the starts."""
    lines = ["| method | tuned setting | area under the curve, mean ± s.e. of starts |", "|---|---|---|"]
    lines += [f"| {method} | {choices[method]} | {_mean_error(area)} |" for method, area in found.items()]
    return "\n".join(lines)


def comparisons_table(found: Mapping[str, NDArray[np.float64]], comparisons: Sequence[tuple[str, str]]) -> str:
    """The registered comparisons with their intervals and exact p-values."""
    lines = ["| comparison | difference [95 % interval] | p, exact | p, corrected |", "|---|---|---|---|"]
    differences = [found[first] - found[second] for first, second in comparisons]
    values = [p_value(each) for each in differences]
    by_name = holm({str(index): value for index, value in enumerate(values)})
    adjusted = [by_name[str(index)] for index in range(len(values))]
    for (first, second), each, p, corrected in zip(comparisons, differences, values, adjusted):
        low, high = interval(each)
        lines.append(
            f"| {first} - {second} | {each.mean():+.3f} [{low:+.3f}, {high:+.3f}] | {p:.4f} | {corrected:.4f} |"
        )
    return "\n".join(lines)


def ends_table(data: Path, domain: str) -> str:
    """The end of the runs and what they cost, as means over the starts: described, not tested."""
    metric, choices = DOMAINS[domain].metric, chosen(data, domain)
    processor = all("processor_seconds" in run for run in finished(data, domain, "final"))
    lines = [
        f"| method | {metric} at the start | at the end, mean ± s.e. of starts | rollouts | environment steps | tokens "
        f"| seconds, median |{' processor seconds, median |' if processor else ''}",
        "|" + "---|" * (8 if processor else 7),
    ]
    for method, label in choices.items():
        runs = [run for run in finished(data, domain, "final") if run["setting"] == label]
        first, last = (np.array([run["scores"][at][metric] for run in runs]) for at in (0, -1))
        spent = [np.mean([run["counters"][name] for run in runs]) for name in ("returns", "env_steps", "tokens")]
        spent.append(np.median([run["counters"]["seconds"] for run in runs]))
        if processor:
            spent.append(np.median([run["processor_seconds"] for run in runs]))
        cells = " | ".join(f"{each:,.0f}" for each in spent)
        lines.append(f"| {method} | {first.mean():.3f} | {_mean_error(last)} | {cells} |")
    return "\n".join(lines)


def draw(data: Path, domain: str, picture: Path) -> bool:
    """Plot the methods' learning curves and the comparisons by start; False, and no picture, while runs are missing."""
    found = by_start(data, domain)
    if not found:
        return False
    choices = chosen(data, domain)
    runs = finished(data, domain, "final")
    curves = {method: [run["scores"] for run in runs if run["setting"] == label] for method, label in choices.items()}
    differences = {f"{first} - {second}": found[first] - found[second] for first, second in DOMAINS[domain].comparisons}
    intervals = {name: interval(each) for name, each in differences.items()}
    study_figure(curves, differences, intervals, picture, metric=DOMAINS[domain].metric)
    return True


def _mean_error(values: NDArray[np.float64]) -> str:
    return f"{values.mean():.3f} ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run, continue or show the registered study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    runs = actions.add_parser("run", help="work through the queue of a domain")
    runs.add_argument("domain", choices=sorted(DOMAINS))
    runs.add_argument("--out", type=Path, required=True, help="folder of the runs")
    runs.add_argument("--hours", type=float, default=float("inf"), help="begin no run after this time")
    runs.add_argument("--dry-run", action="store_true", help="print the next command and do nothing")
    report = actions.add_parser("report", help="print the tables")
    for each in (runs, report):
        each.add_argument("--data", type=Path, default=Path("docs/results/data/study"), help="folder of the results")
    given = parser.parse_args(argv)
    if given.action == "report":
        for domain in DOMAINS:
            print(f"## {domain}\n")
            print("\n\n".join(dict.fromkeys(table(given.data, domain, kind) for kind in TABLES)), end="\n\n")
        return
    try:
        run(given.domain, given.out / given.domain, given.data, hours=given.hours, dry_run=given.dry_run)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
