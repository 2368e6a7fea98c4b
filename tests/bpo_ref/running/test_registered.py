"""The registered study's queue, tuning rule and tests, on invented results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import permutation_test

from bpo_ref.args import command_line
from bpo_ref.experiments import pages, registered
from bpo_ref.experiments.registered import (
    DOMAINS,
    METHODS,
    StudyEnvironment,
    areas,
    best,
    by_start,
    chosen,
    interval,
    label_of,
    p_value,
    parsed,
    queue,
    table,
    tuning_labels,
    words_of,
)

DOMAIN = StudyEnvironment(
    config="alfworld-tiny",
    metric="success",
    start="--sft-steps 7",
    words="",
    tuning="--budget 1",
    final="--budget 2",
    tuning_starts=(100, 101),
    starts=(200, 201, 202),
    methods=("grpo", "bpo"),
    comparisons=[("bpo", "grpo")],
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "DOMAINS", {"alfworld": DOMAIN})


def write(data: Path, stage: str, label: str, seed: int, area: float) -> None:
    data.mkdir(exist_ok=True)
    with (data / f"alfworld-{stage}.jsonl").open("a") as file:
        scores = [{"success": value, "tokens": 50 * i} for i, value in enumerate((0.0, area - 0.1, area + 0.1))]
        counters = {"returns": 64, "env_steps": 640, "tokens": 100, "seconds": float(seed)}
        file.write(json.dumps({"setting": label, "seed": seed, "counters": counters, "scores": scores}) + "\n")


def played(out: Path, data: Path, area: dict[str, float], most: int = 10_000) -> list[tuple[str, str, int]]:
    """Work through the queue with invented results; returns what was run."""
    done = []
    for (stage, label, seed, command), _ in zip(queue("alfworld", out, data), range(most)):
        assert ("--sft-steps 7" if stage == "start" else "--sft-steps 0") in " ".join(command)
        done.append((stage, label, seed))
        if stage == "start":
            folder = out / ("tuning" if seed in DOMAIN.tuning_starts else "final") / f"start-seed{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "results.json").write_text("{}")
        else:
            write(data, stage, label, seed, area.get(label, 0.3) + 0.01 * (seed % 3))
    return done


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_every_setting_of_every_method_is_accepted_by_the_trainer(method: str, size: int, tmp_path: Path) -> None:
    name = list(METHODS[method].sizes)[size]
    for design in DOMAINS.values():
        words = [
            *words_of(method, name, 3e-4).split(),
            *design.words.split(),
            *design.final.split(),
            "--out",
            str(tmp_path),
        ]
        args = command_line(["--config", design.config, *words])
        assert args.lr == 3e-4 and args.lr_decay == "constant" and not args.trackers and args.budget


def test_names_of_settings_say_what_they_are() -> None:
    for method, rate in (("bpo-lookahead", 1e-4), ("grpo", 3e-4), ("ppo", 3e-5), ("ppo", 10e-4)):
        size = list(METHODS[method].sizes)[1]
        assert parsed(label_of(method, size, rate)) == (method, size, rate)
    for design in DOMAINS.values():
        assert {name for pair in design.comparisons for name in pair} <= set(design.methods) <= set(METHODS)
        assert not set(design.tuning_starts) & set(design.starts)


def test_tuning_looks_at_rates_then_beyond_the_grid_then_at_group_sizes() -> None:
    seeds = (100, 101)
    rates = [label_of("grpo", "8", rate) for rate in (1e-4, 3e-4, 1e-3)]
    assert tuning_labels("grpo", {}, seeds) == rates
    middle = {(label, seed): value for label, value in zip(rates, (0.1, 0.3, 0.2)) for seed in seeds}
    assert tuning_labels("grpo", middle, seeds) == [*rates, "grpo.g4.lr3e-4", "grpo.g16.lr3e-4"]
    low = {(label, seed): value for label, value in zip(rates, (0.3, 0.2, 0.1)) for seed in seeds}
    assert tuning_labels("grpo", low, seeds) == [*rates, "grpo.g8.lr3e-5"]
    lower = low | {("grpo.g8.lr3e-5", seed): 0.4 for seed in seeds}
    assert tuning_labels("grpo", lower, seeds)[-2:] == ["grpo.g4.lr3e-5", "grpo.g16.lr3e-5"]
    higher = low | {("grpo.g8.lr3e-5", seed): 0.2 for seed in seeds}
    assert tuning_labels("grpo", higher, seeds)[-2:] == ["grpo.g4.lr1e-4", "grpo.g16.lr1e-4"]


def test_the_best_setting_is_that_of_the_mean_over_starts_and_needs_all_of_them() -> None:
    found = {("a", 1): 0.5, ("a", 2): 0.1, ("b", 1): 0.35, ("b", 2): 0.35}
    assert best(found, ["a", "b"], (1, 2)) == "b"
    assert best(found, ["a", "b"], (1, 2, 3)) is None


@pytest.mark.usefixtures("small")
def test_the_queue_tunes_every_method_before_the_first_run_that_counts(tmp_path: Path) -> None:
    out, data = tmp_path / "out", tmp_path / "data"
    done = played(out, data, {"grpo.g8.lr1e-3": 0.5, "grpo.g8.lr3e-3": 0.4, "bpo.g4.lr3e-4": 0.6})
    runs = [each for each in done if each[0] != "start"]
    assert len(runs) == len(set(runs))
    stages = [stage for stage, _, _ in runs]
    assert stages == sorted(stages, reverse=True) and stages.count("final") == 2 * 3
    assert chosen(data, "alfworld") == {"grpo": "grpo.g8.lr1e-3", "bpo": "bpo.g4.lr3e-4"}
    assert {label for stage, label, _ in runs if stage == "final"} == {"grpo.g8.lr1e-3", "bpo.g4.lr3e-4"}
    assert [seed for stage, _, seed in runs if stage == "final"] == [200, 200, 201, 201, 202, 202]
    starts = [seed for stage, _, seed in done if stage == "start"]
    assert starts == [100, 101, 200, 201, 202]
    assert "bpo - grpo | +0.100" in table(data, "alfworld", "comparisons")


@pytest.mark.usefixtures("small")
def test_an_interrupted_queue_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = played(tmp_path / "a", tmp_path / "a-data", {})
    first = played(tmp_path / "b", tmp_path / "b-data", {}, most=9)
    assert first + played(tmp_path / "b", tmp_path / "b-data", {}) == whole


@pytest.mark.usefixtures("small")
def test_every_comparison_has_its_own_p_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = [("grpo", "grpo"), ("bpo", "grpo")]  # the second is significant
    monkeypatch.setattr(registered, "DOMAINS", {"alfworld": replace(DOMAIN, comparisons=comparisons)})
    out, data = tmp_path / "out", tmp_path / "data"
    played(out, data, {"bpo.g4.lr3e-4": 0.6})
    rows = [line for line in table(data, "alfworld", "comparisons").splitlines() if " - " in line]
    assert rows[0].endswith("| 1.0000 | 1.0000 |") and rows[1].endswith("| 0.2500 | 0.5000 |")


@pytest.mark.usefixtures("small")
def test_nothing_is_tested_while_runs_are_missing(tmp_path: Path) -> None:
    out, data = tmp_path / "out", tmp_path / "data"
    played(out, data, {})
    lines = (data / "alfworld-final.jsonl").read_text().splitlines(keepends=True)
    (data / "alfworld-final.jsonl").write_text("".join(lines[:-1]))
    assert not by_start(data, "alfworld")
    assert "5 of 6 runs that count. Nothing is tested" in table(data, "alfworld", "comparisons")


@pytest.mark.usefixtures("small")
def test_the_page_of_a_finished_study_is_made_by_one_command(tmp_path: Path) -> None:
    """Tables between the page's marks, ends and costs beside what is tested, and a picture."""
    docs = tmp_path / "docs"
    data = docs / pages.STUDY
    data.parent.mkdir(parents=True)
    marks = "".join(f"<!-- table: study alfworld {kind} -->\n<!-- end of table -->\n" for kind in registered.TABLES)
    played(tmp_path / "out", data, {"bpo.g4.lr3e-4": 0.6})
    page = pages.filled(marks, docs)
    assert "| bpo - grpo | +0.300 [" in page and "| bpo | bpo.g4.lr3e-4 | 0.610 ± 0.006 |" in page
    assert "| bpo | 0.000 | 0.710 ± 0.006 | 64 | 640 | 100 | 201 |" in page
    pages.draw(docs)
    with Image.open(docs / "results" / "study-alfworld.png") as picture:
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 100
    lines = (data / "alfworld-final.jsonl").read_text().splitlines(keepends=True)
    (data / "alfworld-final.jsonl").write_text("".join(lines[:-1]))
    assert not registered.draw(data, "alfworld", tmp_path / "none.png") and not (tmp_path / "none.png").exists()
    assert "+0.300" not in pages.filled(marks, docs)


def test_the_exact_test_is_scipys_and_its_interval_is_what_it_does_not_reject() -> None:
    rng = np.random.default_rng(0)
    for shift in (0.0, 0.3, 1.0):
        differences = rng.normal(shift, 1.0, size=9)
        theirs = permutation_test(
            (differences, np.zeros(9)), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples",
            vectorized=True, n_resamples=np.inf,
        )  # fmt: skip
        assert p_value(differences) == pytest.approx(theirs.pvalue)
        low, high = interval(differences)
        assert low < differences.mean() < high
        assert p_value(differences - low) > 0.05 and p_value(differences - high) > 0.05
        step = np.ptp(differences) / 500
        assert p_value(differences - (low - step)) <= 0.05 and p_value(differences - (high + step)) <= 0.05


def test_the_interval_contains_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        low, high = interval(rng.normal(0.5, 1.0, size=6))
        inside += low <= 0.5 <= high
    assert 180 <= inside <= 199


PROGRAM = """
import sys
from pathlib import Path
from bpo_ref.experiments import registered, sweep
from bpo_ref.experiments.registered import StudyEnvironment
sweep.TRAIN = Path({script!r})
tiny = StudyEnvironment("alfworld-tiny", "success", "", "", "", "", (100,), (200,), ("grpo",), ())
registered.DOMAINS = {{"alfworld": tiny}}
registered.main(["run", "alfworld", "--out", {out!r}, "--data", {data!r}])
"""
FAKE = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
print("begun", out.name, flush=True)
time.sleep({seconds} if "seed200" in out.name and "grpo" in out.name else 0)
score = {{"step": 0, "name": "start", "success": 0.1, "tokens": 0, "n": 1}}
lines = [json.dumps(score | {{"name": f"grpo@{{i}}" if i else "start", "step": i}}) + chr(10) for i in range(3)]
(out / "scores.jsonl").write_text("".join(lines))
(out / "results.json").write_text(json.dumps({{"counters": {{"tokens": 5}}}}))
"""


def test_a_stopped_study_ends_its_run_and_is_continued_by_the_same_command(tmp_path: Path) -> None:
    script, out, data = tmp_path / "fake.py", tmp_path / "out", tmp_path / "data"
    program = [sys.executable, "-c", PROGRAM.format(script=str(script), out=str(out), data=str(data))]
    script.write_text(FAKE.format(seconds=600))
    first = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if " final " in line:
            break
    log = out / "alfworld" / "alfworld.log"
    while "begun grpo" not in log.read_text() or "seed200" not in log.read_text().split("begun grpo")[-1]:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == 130
    assert not [name for name in os.listdir("/proc") if name.isdecimal() and str(script) in command_of(name)]
    assert len(areas(data, "alfworld", "tuning")) == 6 and not areas(data, "alfworld", "final")
    script.write_text(FAKE.format(seconds=0))
    subprocess.run(program, check=True, capture_output=True, timeout=120)
    assert len(areas(data, "alfworld", "tuning")) == 6 and len(areas(data, "alfworld", "final")) == 1
    runs = [run for stage in ("tuning", "final") for run in registered.finished(data, "alfworld", stage)]
    assert all(0 < run["processor_seconds"] < 60 for run in runs)


def command_of(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text()
    except OSError:
        return ""
