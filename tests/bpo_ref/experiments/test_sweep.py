"""Studies: their commands and their tables."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_runs import ENVIRONMENT, TINY

from bpo_ref.args import parse_args, resolved
from bpo_ref.experiments import sweep, tables
from bpo_ref.experiments.study_archive import ArchiveError, pack, unpack
from bpo_ref.experiments.sweep import STUDIES, commands, main
from bpo_ref.experiments.tables import Finished, beside, efficiency, grouped, overhead, summary

CONFIGS = Path(__file__).parents[3] / "bpo_ref" / "configs"


@pytest.mark.parametrize(
    ("label", "words"), [pair for study in STUDIES.values() for pair in study.items()], ids=lambda word: str(word)
)
def test_every_variant_is_a_valid_setting_at_both_scales(label: str, words: str) -> None:
    for config in CONFIGS.glob("*.yaml"):
        resolved(parse_args(["--config", str(config), *words.split()]))


def test_the_k_sweep_spends_thirteen_returns_on_average() -> None:
    for label, words in STUDIES["k-sweep"].items():
        args = resolved(parse_args(words.split()))
        forks = args.points * (args.width - 1) if args.schedule != "none" else 0
        unrooted = args.root_branch != "always"
        assert args.roots + forks - (0 if unrooted else args.width - 1) == pytest.approx(13, abs=0.11), label


def test_finished_runs_are_not_repeated_and_interrupted_ones_go_on(tmp_path: Path) -> None:
    (tmp_path / "start-seed0").mkdir()
    (tmp_path / "start-seed0" / "results.json").write_text("{}")
    (tmp_path / "rloo-seed0" / "checkpoint").mkdir(parents=True)
    variants = {"rloo": "--algo rloo", "grpo": "--algo grpo"}
    starts, runs = commands(
        variants, tmp_path, config="c.yaml", seeds=[0, 1], launch="python -u", extra=["--lr", "0.1"]
    )
    assert [command[command.index("--seed") + 1] for command in starts] == ["1"]
    assert len(runs) == 4
    assert runs[0][-2:] == ["--resume", "True"] and "--resume" not in runs[1]
    assert runs[0][:2] == ["python", "-u"] and runs[0][runs[0].index("--lr") + 1] == "0.1"
    assert f"--init-from {tmp_path}/start-seed1/checkpoint --sft-steps 0 --seed 1" in shlex.join(runs[2])
    starts, runs = commands(
        {"rloo": "--algo rloo"}, tmp_path, config="c.yaml", seeds=range(3, 8), launch="python", extra=[], starts=2
    )
    assert [command[command.index("--seed") + 1] for command in starts] == ["1"]  # 0 has finished
    (tmp_path / "grpo-seed0").mkdir()
    (tmp_path / "grpo-seed0" / "metrics.jsonl").write_text("{}")  # stopped before its first checkpoint
    (tmp_path / "grpo-seed1" / "checkpoint.old").mkdir(parents=True)  # between the two renames of a save
    _, again = commands(variants, tmp_path, config="c.yaml", seeds=[0, 1], launch="python", extra=[])
    ends = {sweep.folder_of(command).name: command[-2:] for command in again}
    assert ends["grpo-seed0"] == ["--overwrite", "True"] and ends["grpo-seed1"] == ["--resume", "True"]
    assert "--overwrite" not in shlex.join([*again[0], *again[2]])
    begun = [command[command.index("--init-from") + 1][-len("seedN/checkpoint") :] for command in runs]
    assert begun == [f"seed{seed % 2}/checkpoint" for seed in range(3, 8)]


def fake_run(folder: Path, algo: str, success: list[float], *, norm: float) -> Path:
    """Logs of a run: evaluations every 10 updates, 1,000 tokens and 5 seconds each."""
    folder.mkdir(parents=True)
    scores = [
        {"step": 10 * i, "name": f"{algo}@{10 * i}" if i else "start", "tokens": 1000 * i, "seconds": 5.0 * i,
         "success": value, "reward": value / 2, "outcomes": [1, 0, 1, int(value > 0.5)]}
        for i, value in enumerate(success)
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    updates = [
        {"step": i, "update/grad_norm": norm * float(1 + rng.normal()), "rollout/degenerate_tasks": 0.25,
         "time/snapshot": 0.001, "rollout/snapshots": 3.0, "time/rollout": 0.8, "time/snapshots": 0.04,
         "total/returns": 8 * (i + 1), "rollout/turns": 10.0, "total/env_steps": 60 * (i + 1), "time/env": 0.12}
        for i in range(120)
    ]  # fmt: skip
    args = {"algo": algo, "prompts": 8, "seed": int(folder.name[-1])}
    counters = {"returns": 70, "env_steps": 800, "tokens": 1000 * (len(success) - 1), "seconds": 9.0}
    (folder / "scores.jsonl").write_text("".join(json.dumps(record) + "\n" for record in scores))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in updates))
    (folder / "results.json").write_text(json.dumps({"args": args, "counters": counters}))
    return folder


def test_tables_of_made_up_runs(tmp_path: Path) -> None:
    runs = [
        fake_run(tmp_path / "grpo-seed0", "grpo", [0.2, 0.4, 0.6], norm=1.0),
        fake_run(tmp_path / "grpo-seed1", "grpo", [0.2, 0.6, 0.8], norm=1.0),
        fake_run(tmp_path / "ours-seed0", "bpo", [0.2, 0.8, 0.9], norm=0.5),
    ]
    first, ours = Finished(runs[0]), Finished(runs[2])
    assert (first.final, first.area) == (0.6, 0.5)
    assert first.spent_until(0.5, "update") == pytest.approx(15)
    assert first.spent_until(0.5, "tokens") == pytest.approx(1500)
    assert np.isnan(first.spent_until(0.7, "update"))
    assert ours.spent_until(0.1, "seconds") == 0
    assert ours.norm_variance == pytest.approx(first.norm_variance / 4)
    assert ours.nondegenerate == 0.75
    assert (ours.success_where(True), ours.success_where(False)) == (1.0, 0.5)
    groups = grouped(runs)
    lines = summary(groups).splitlines()
    assert lines[2].startswith("| grpo | 2 | 0.200 | 0.700 ± 0.141 (0.600 0.800) | +0.500 ± 0.100 | 70 |")
    paper = efficiency(groups).splitlines()
    assert "to 0.810" in paper[0]  # "ours" is not named bpo-…: 90 % of .9
    assert paper[2].startswith("| grpo | 0.600 ± 0.141 |")
    assert "(0.25)" in paper[3] and "| 0.75 | 1.000 | 0.500 |" in paper[3]
    more = [*runs, fake_run(tmp_path / "ours-seed1", "bpo", [0.2, 0.5, 0.9], norm=0.5)]
    pairs = beside(grouped(more)).splitlines()
    # ours ends .3 and .1 above grpo; its mean curve 0.2, 0.65, 0.9 reaches 0.7 after 1,200 of the 2,000 tokens
    # (of seed 0 alone 0.2, 0.8 reaches 0.6 after 667; seed 1 alone 0.8 after 1,750)
    assert pairs[2] == "| ours | 2 (2) | +0.200 ± 0.100 | +0.175 ± 0.175 | 0.60 [0.33, 0.88] |" and len(pairs) == 3
    assert beside(groups, "ppo") == ""
    # a reward of half the success, where it is not all or nothing
    rewards = grouped(runs, "reward")
    assert summary(rewards).splitlines()[2].startswith("| grpo | 2 | 0.100 | 0.350 ± 0.071 (0.300 0.400) |")
    assert beside(rewards).splitlines()[2].startswith("| ours | 1 (1) | +0.150 |")
    # of 80 steps of a batch's returns 20 are shared, 2.5 a task; at 2 ms a step
    assert "| ours | 1.000 | 3.0 | 100.0 | 3.00 | 5.00 | 2.5 | 5.00 |" in overhead(groups)


def test_tables_are_made_again_from_a_file_of_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        fake_run(tmp_path / "runs" / "grpo-seed0", "grpo", [0.2, 0.4, 0.6], norm=1.0),
        fake_run(tmp_path / "runs" / "grpo-seed1", "grpo", [0.2, 0.6, 0.8], norm=1.0),
        fake_run(tmp_path / "runs" / "ours-seed1", "bpo", [0.2, 0.5, 0.9], norm=0.5),
    ]
    for run in runs:  # a line of the supervised stage, which no table is made of, and a folder of the machine
        with (run / "metrics.jsonl").open("a") as log:
            log.write('{"step": 0, "sft/loss": 1.0}\n')
        results = json.loads((run / "results.json").read_text())
        (run / "results.json").write_text(json.dumps({**results, "args": {**results["args"], "out": "/home/me"}}))
    data = tmp_path / "data" / "page" / "scores.jsonl"
    words = ["--overhead", "--plot", "gains"]
    tables.main([*map(str, runs), "--out", str(tmp_path / "one"), "--data", str(data), *words])
    tables.main([str(data), "--out", str(tmp_path / "two"), *words])
    made = [(tmp_path / f"{name}-table.md").read_text() for name in ("one", "two")]
    assert made[0] == made[1] and "c_snap" in made[0]
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert "/home/me" not in data.read_text() and "sft" not in data.read_text()
    again = tmp_path / "again.jsonl"
    pack(unpack(data, tmp_path / "unpacked"), again)
    assert again.read_bytes() == data.read_bytes()
    for line in ('{"run": "a"}', '{"run": "../a", "score": {}}', '{"score": {}}', "[]", "nonsense"):
        data.write_text(f'{{"run": "a-seed0", "score": {{}}}}\n{line}\n')
        with pytest.raises(ArchiveError, match=rf"{data}:2: expected a run and its results, score or update"):
            unpack(data, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_runs_from_one_start_are_one_sample(tmp_path: Path) -> None:
    ends = {("grpo", 0): 0.5, ("grpo", 1): 0.5, ("grpo", 2): 0.5, ("ours", 0): 0.6, ("ours", 1): 0.8, ("ours", 2): 0.9}
    runs = [fake_run(tmp_path / f"{name}-seed{n}", name, [0.2, end], norm=1.0) for (name, n), end in ends.items()]
    for run in runs:  # seeds 0 and 1 begin at the same weights
        results = json.loads((run / "results.json").read_text())
        results["args"]["init_from"] = f"/home/me/start-seed{max(1, results['args']['seed'])}/checkpoint"
        (run / "results.json").write_text(json.dumps(results))
    data = tmp_path / "scores.jsonl"
    pack(runs, data)
    assert "/home/me" not in data.read_text() and '"start":"start-seed2"' in data.read_text()
    for given in (runs, unpack(data, tmp_path / "unpacked")):
        (row,) = beside(grouped(given)).splitlines()[2:]
        assert row.startswith("| ours | 3 (2) | +0.300 ± 0.100 |")  # 0.2 and 0.4
        assert "| +0.600 ± 0.100 |" in summary(grouped(given)).splitlines()[3]


def test_unfinished_runs_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_run(tmp_path / "grpo-seed0", "grpo", [0.2, 0.4], norm=1.0)
    (tmp_path / "grpo-seed1").mkdir()
    start = fake_run(tmp_path / "start-seed0", "sft", [0.2], norm=1.0)
    (start / "metrics.jsonl").write_text("")
    tables.main([str(run), str(tmp_path / "grpo-seed1"), str(start), "--out", str(tmp_path / "table")])
    printed = capsys.readouterr()
    assert "| grpo | 1 |" in printed.out and "start-seed0" not in printed.out
    assert "grpo-seed1" in printed.err and "start-seed0" in printed.err
    with pytest.raises(SystemExit):
        tables.main([str(tmp_path / "grpo-seed1"), "--out", str(tmp_path / "table")])
    assert "expected finished runs" in capsys.readouterr().err


def test_runs_of_one_update_and_runs_whose_start_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [fake_run(tmp_path / f"{name}-seed0", name, [0.2, 0.4], norm=1.0) for name in ("grpo", "rloo", "late")]
    for run in runs[:2]:
        (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().partition("\n")[0])
    scores = (runs[2] / "scores.jsonl").read_text().splitlines()
    (runs[2] / "scores.jsonl").write_text(scores[1] + "\n")
    tables.main([*map(str, runs), "--out", str(tmp_path / "new" / "folder" / "table"), "--plot", "gains"])
    printed = capsys.readouterr()
    assert "| rloo | 1 | 0.200 | 0.400 (0.400)" in printed.out and "| 0 |" in printed.out
    assert "late-seed0" in printed.err and "late" not in printed.out
    assert (tmp_path / "new" / "folder" / "table.png").exists()


def test_a_rollout_of_several_processes_costs_their_time_together(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "ours-seed0", "bpo", [0.2, 0.8], norm=0.5)
    alone = overhead(grouped([run])).splitlines()[2]
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, "processes": 4}))
    assert "| ours | 1.000 | 3.0 | 100.0 | 3.00 | 5.00 |" in alone
    assert "| ours | 1.000 | 3.0 | 400.0 | 0.75 | 5.00 |" in overhead(grouped([run])).splitlines()[2]


def test_a_run_that_was_stopped_does_not_count_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a start that was asked to stop no variant may begin."""
    begun: list[Path] = []

    def stopping(commands: Sequence[Sequence[str]], log: Path, jobs: int) -> None:
        begun.extend(map(sweep.folder_of, commands))

    monkeypatch.setattr(sweep, "run_all", stopping)
    with pytest.raises(SystemExit, match=r"stopped early: .*start-seed0.*; run the same command to continue"):
        main(["lambda", "--config", "c.yaml", "--seeds", "0", "--only", "bpo-paper-0.0", "--out", str(tmp_path)])
    assert begun == [tmp_path / "start-seed0"]
    (tmp_path / "start-seed0").mkdir()
    (tmp_path / "start-seed0" / "results.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"stopped early: .*bpo-paper-0\.0-seed0"):
        main(["lambda", "--config", "c.yaml", "--seeds", "0", "--only", "bpo-paper-0.0", "--out", str(tmp_path)])


@pytest.mark.parametrize(("status", "failed"), [(0, False), (130, False), (143, False), (1, True)])
def test_a_run_that_was_asked_to_stop_has_not_failed(tmp_path: Path, status: int, failed: bool) -> None:
    command = [sys.executable, "-c", f"raise SystemExit({status})"]
    with pytest.raises(SystemExit, match="failed") if failed else nullcontext():
        sweep.run_all([command], tmp_path / "log.txt", 1)


@pytest.mark.slow
def test_a_whole_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    config = tmp_path / "config.yaml"
    values: dict[str, Any] = {**TINY, "eval_kwargs": [], "updates": 2}
    config.write_text(yaml.safe_dump({name: v for name, v in values.items() if name != "width"}))
    out = tmp_path / "runs"
    words = ["overhead", "--config", str(config), "--seeds", "0", "--only", "grpo", "bpo", "--out", str(out)]
    main([*words, "--", "--match", "tokens", "--budget", "1500"])
    printed = capsys.readouterr().out
    assert "| grpo | 1 |" in printed and "c_snap" in printed
    spent = [
        json.loads((out / f"{x}-seed0" / "results.json").read_text())["counters"]["tokens"] for x in ("grpo", "bpo")
    ]
    assert all(1500 <= tokens < 4000 for tokens in spent)
    assert (tmp_path / "runs.png").exists() and (tmp_path / "runs-table.md").exists()
    before = os.stat(out / "grpo-seed0" / "results.json").st_mtime_ns
    main([*words, "--", "--match", "tokens", "--budget", "1500"])
    assert os.stat(out / "grpo-seed0" / "results.json").st_mtime_ns == before
    with pytest.raises(SystemExit, match=r"was begun with extra .*1500.*, now it is \[\]: choose another --out"):
        main(words)
