"""Sweeps over variants and seeds: each table of the BPO paper, and each of ours, by one command.

    python -m bpo_ref.study main --config bpo_ref/configs/alfworld-tiny.yaml --seeds 0 1 2 --jobs 2 --out runs/main
    python -m bpo_ref.study k-sweep --config bpo_ref/configs/alfworld-qwen2.5-7b.yaml --out runs/k \
        --launch "accelerate launch --config_file bpo_ref/configs/accelerate/fsdp2.yaml"

All variants of a seed start from the same SFT checkpoint. Finished runs are skipped and interrupted ones continued, so
the same command continues a study or adds seeds and variants to it; other settings need another folder.
Options after ``--`` go to every run: with ``-- --match tokens --budget N`` all variants spend equal numbers of tokens.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

from bpo_ref.experiments.plots import Metric, Plot
from bpo_ref.experiments.study_archive import pack
from bpo_ref.experiments.tables import write
from bpo_ref.running.folder import holds_run, resumable

CURVES = ("main", "overhead")  # studies whose picture is learning curves; of ablations it is what each gained
STOPPED = (130, 143)
"""Exit status of a run that SIGINT or SIGTERM has stopped."""
TRAIN = Path(__file__).parents[1] / "train.py"

Variants = Mapping[str, str]  # label -> words of the command line


def _schedules(algo: str) -> Variants:
    names = ("entropy", "entropy-online", "random", "spaced", "lowest", "root", "value-oracle")
    return {f"{algo}-{name}": f"--algo {algo} --schedule {name}" for name in names}


STUDIES: dict[str, Variants] = {
    # "Main results": the paper's rows, then the same budget with state baselines, then trees that use them
    "main": {
        name: f"--algo {name}"
        for name in (
            *("ppo", "grpo", "gigpo", "rloo", "vineppo", "bpo-paper", "bpo-sibling", "bpo-tree"),
            *("rloo-turn", "rloo-key", "rloo-value", "rloo-pooled"),
            *("bpo-key", "bpo-forest", "bpo-split", "bpo"),
        )
    }
    # every turn valued by four rollouts would leave it two updates of such a budget
    | {"vineppo": "--algo vineppo --mc-turns 2 --mc-rollouts 2"},
    # K at 13 returns per task; M is an average where it is not whole
    "k-sweep": {
        f"bpo-paper-K{k}": f"--algo bpo-paper --width {k} --points {m}"
        for k, m in ((2, 12), (4, 4), (8, 1.7), (16, 0.8))
    }
    | {"rloo-13": "--algo rloo --roots 13", "bpo-tree-K4": "--algo bpo-tree --width 4 --points 4"},
    "schedule": {**_schedules("bpo-paper"), **_schedules("bpo-tree")},
    "lambda": {f"bpo-paper-{lam}": f"--algo bpo-paper --lam {lam}" for lam in (0.0, 0.5, 0.9, 0.95, 1.0)},
    "overhead": {
        "grpo": "--algo grpo",
        "bpo-paper": "--algo bpo-paper",  # snapshots at every step: the choice comes after the end
        "bpo-tree": "--algo bpo-tree",  # at the branch points only
        "bpo": "--algo bpo",  # at the splits, as the path goes
    },
    # the gain of each part of bpo-split
    "split": {
        "rloo": "--algo rloo --roots 8",
        "rloo-value": "--algo rloo-value --roots 8",
        "bpo-split": "--algo bpo-split",
        "bpo-split-roulette": "--algo bpo-split --roulette 0.5",
        "bpo-split-p75": "--algo bpo-split --step-weight-power 0.75",
        "rloo-pooled": "--algo rloo-pooled --roots 8",
        "bpo": "--algo bpo",  # with both: the pooled baseline and roulette
    },
    # candidates to beat bpo: learned values, independent rollouts allocated by the variance of a task's returns
    "beyond": {
        "rloo-pooled": "--algo rloo-pooled",
        "rloo-critic": "--algo rloo --baseline critic",
        "rloo-pooled-spread": "--algo rloo-pooled --allocation spread",
        "bpo": "--algo bpo",
        "bpo-critic": "--algo bpo --baseline critic",
        "bpo-spread": "--algo bpo --allocation spread",
    },
}


def commands(
    variants: Variants,
    out: Path,
    *,
    config: str,
    seeds: Sequence[int],
    launch: str,
    extra: Sequence[str],
    starts: int | None = None,
) -> tuple[list[list[str]], list[list[str]]]:
    """Commands of the SFT starts, and of the runs from them; finished ones are left out.

    Args:
        variants: arguments of each variant, by label.
        out: folder of the runs.
        config: file of settings.
        seeds: of every variant.
        launch: command that starts a run.
        extra: words that go to every run.
        starts: number of SFT starts; seed s begins at start s modulo this. Default: one per seed.
    """

    def command(folder: Path, *words: str) -> list[list[str]]:
        if (folder / "results.json").exists():
            return []
        again = ["--resume", "True"] if resumable(folder) else []
        if not again and holds_run(folder) and "--resume-if-saved" not in extra:  # stopped before its first checkpoint
            again = ["--overwrite", "True"]
        return [[*shlex.split(launch), str(TRAIN), "--config", config, "--out", str(folder), *words, *extra, *again]]

    def start_of(seed: int) -> int:
        return seed if starts is None else seed % starts

    def folder(seed: int) -> Path:
        return out / f"start-seed{seed}"

    before = [
        line
        for seed in sorted(set(map(start_of, seeds)))
        for line in command(folder(seed), "--algo", "sft", "--seed", str(seed))
    ]
    runs = []
    for seed in seeds:
        begun = ["--init-from", str(folder(start_of(seed)) / "checkpoint"), "--sft-steps", "0", "--seed", str(seed)]
        for label, words in variants.items():
            runs += command(out / f"{label}-seed{seed}", *words.split(), *begun)
    return before, runs


def folder_of(command: Sequence[str]) -> Path:
    """Folder of a run's results."""
    return Path(command[command.index("--out") + 1])


def begin(record: Path, settings: Mapping[str, object]) -> None:
    """Record the settings that all runs of a folder share, or check that they still do.

    Raises:
        SystemExit: they were begun with other settings.
    """
    if record.exists():
        before = json.loads(record.read_text())
        for name, mine in settings.items():
            if before.get(name, mine) != mine:
                theirs = before[name]
                raise SystemExit(
                    f"error: {record.parent} was begun with {name} {theirs}, now it is {mine}: choose another --out"
                )
    record.write_text(json.dumps(settings, indent=1))


def run_all(commands: Sequence[Sequence[str]], log: Path, jobs: int) -> None:
    """Run the commands, ``jobs`` at a time; their output goes to a file.

    One that was asked to stop has not failed: it has saved its state.

    Raises:
        SystemExit: one failed; the rest has been run.
    """

    def one(command: Sequence[str]) -> int:
        with log.open("a") as file:
            return subprocess.run(command, stdout=file, stderr=file, check=False).returncode

    with ThreadPoolExecutor(jobs) as executor:
        failed = [shlex.join(c) for c, code in zip(commands, executor.map(one, commands)) if code not in (0, *STOPPED)]
    if failed:
        raise SystemExit(f"error: failed (see {log}):\n" + "\n".join(failed))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``python -m bpo_ref.study``: one training run per setting and seed."""
    given = list(sys.argv[1:] if argv is None else argv)
    extra = given[given.index("--") + 1 :] if "--" in given else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--config", required=True, help="YAML file of the settings that all runs share")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--starts", type=int, help="SFT starts that the seeds share in turn (default: one each)")
    parser.add_argument("--only", nargs="+", help="labels of the variants to run (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--launch", default=sys.executable, help="command that starts a run, such as accelerate launch")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; writes OUT-table.md and OUT.png")
    parser.add_argument("--metric", choices=get_args(Metric), default="success", help="metric to compare variants by")
    parser.add_argument(
        "--data", type=Path, help="write the numbers behind the tables to this file (bpo_ref.experiments.study_archive)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and do nothing")
    arguments = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    if arguments.starts is not None and arguments.starts < 1:
        parser.error(f"--starts: expected at least 1, found {arguments.starts}")
    variants = STUDIES[arguments.study]
    if arguments.only:
        if unknown := set(arguments.only) - set(variants):
            parser.error(f"--only: expected some of {', '.join(variants)}, found {', '.join(sorted(unknown))}")
        variants = {label: variants[label] for label in arguments.only}
    starts, runs = commands(
        variants,
        arguments.out,
        config=arguments.config,
        seeds=arguments.seeds,
        launch=arguments.launch,
        extra=extra,
        starts=arguments.starts,
    )
    if arguments.dry_run:
        print("\n".join(shlex.join(command) for command in [*starts, *runs]))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin(arguments.out / "study.json", {"config": arguments.config, "starts": arguments.starts, "extra": extra})
    for stage in (starts, runs):
        run_all(stage, arguments.out / "log.txt", arguments.jobs)
        if stopped := [folder for folder in map(folder_of, stage) if not (folder / "results.json").exists()]:
            raise SystemExit(f"error: stopped early: {', '.join(map(str, stopped))}; run the same command to continue")
    folders = [arguments.out / f"{label}-seed{seed}" for label in variants for seed in arguments.seeds]
    if arguments.data:
        pack(folders, arguments.data)
    plot: Plot = "curves" if arguments.study in CURVES else "gains"
    print(write(folders, arguments.out, arguments.metric, costs=arguments.study == "overhead", plot=plot))


if __name__ == "__main__":
    main()
