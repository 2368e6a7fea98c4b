"""Trackers: the numbers that accelerate's trackers receive."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator, tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import TINY, metrics, trained
from torch.utils.tensorboard import SummaryWriter

from bpo_ref import run_log
from bpo_ref.args import Args
from bpo_ref.config import ConfigError
from bpo_ref.train import Trainer

Curves = dict[str, list[tuple[int, float]]]


def board(folder: Path) -> dict[str, Curves]:
    """Curves in TensorBoard: stage -> name -> (step, value)."""
    shown = {}
    for events in sorted({path.parent for path in (folder / "tensorboard").rglob("events.*")}):
        reader = EventAccumulator(str(events), size_guidance={"scalars": 0})
        reader.Reload()
        names = reader.Tags()["scalars"]
        shown[events.name] = {name: [(at.step, at.value) for at in reader.Scalars(name)] for name in names}
    return shown


def logged(folder: Path) -> dict[str, Curves]:
    found: dict[str, Curves] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for name in line.keys() - {"stage", "step"}:
            found.setdefault(line["stage"], {}).setdefault(name, []).append((line["step"], line[name]))
    return found


def assert_shown(folder: Path) -> None:
    """TensorBoard shows every number of the file once, and no other."""
    shown, expected = board(folder), logged(folder)
    assert shown.keys() == expected.keys()
    for stage, curves in expected.items():
        assert shown[stage].keys() == curves.keys()
        for name, points in curves.items():
            assert [step for step, _ in shown[stage][name]] == [step for step, _ in points], name
            values = [value for _, value in points]
            assert [value for _, value in shown[stage][name]] == pytest.approx(values, rel=1e-6, nan_ok=True)


def test_tensorboard_shows_every_number_once_where_a_resumed_run_repeats_updates_too(tmp_path: Path) -> None:
    trained(tmp_path, updates=2)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "earlier")
    trained(tmp_path, updates=4, resume=True)
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "earlier").rename(tmp_path / "checkpoint")  # as if killed before the next checkpoint was written
    trained(tmp_path, updates=4, resume=True)
    assert_shown(tmp_path)


def test_each_stage_has_steps_of_its_own_from_zero(tmp_path: Path) -> None:
    trained(tmp_path, updates=3)  # evaluated every 2
    steps = {
        stage: {name: [step for step, _ in points] for name, points in curves.items()}
        for stage, curves in board(tmp_path).items()
    }
    assert steps["sft"]["sft/loss"] == [1, 2, 3] and steps["sft"]["eval/success"] == [0, 3]
    assert steps["rl"]["update/loss"] == [1, 2, 3] and steps["rl"]["eval/success"] == [0, 2, 3]
    curves = logged(tmp_path)
    assert curves["rl"]["eval/success"][0][1] == curves["sft"]["eval/success"][-1][1], "one ends where the other begins"
    points = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    told = [(point["stage"], point["step"], point["name"]) for point in points]
    assert told == [("sft", 0, "untrained"), ("sft", 3, "sft"), ("rl", 2, "bpo@2"), ("rl", 3, "bpo@3")]


def test_a_run_that_starts_from_weights_has_one_stage(tmp_path: Path) -> None:
    trained(tmp_path / "start", algo="sft")
    assert board(tmp_path / "start").keys() == {"sft"}
    trained(tmp_path / "run", updates=1, init_from=str(tmp_path / "start" / "checkpoint"))
    assert [step for step, _ in board(tmp_path / "run")["rl"]["eval/success"]] == [0, 1]
    assert board(tmp_path / "run").keys() == {"rl"}


def test_learning_rates_and_speeds_are_logged(tmp_path: Path) -> None:
    trained(tmp_path, updates=4, warmup=1, lr_decay="linear")
    curves = logged(tmp_path)
    rates = [rate for _, rate in curves["rl"]["update/lr"]]
    assert rates == pytest.approx([TINY["lr"] * factor for factor in (1.0, 1.0, 2 / 3, 1 / 3)])
    assert 0 < curves["sft"]["sft/lr"][0][1] < curves["sft"]["sft/lr"][-1][1] * 10
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    spent = 0.0
    for line in (line for line in lines if "update/lr" in line):
        seconds = line["time/rollout"] + line["time/update"]
        assert line["time/tokens_per_second"] == pytest.approx((line["total/tokens"] - spent) / seconds)
        spent = line["total/tokens"]
    assert all(line["time/sft_tokens_per_second"] > 0 for line in lines if "sft/loss" in line)


def as_before(folder: Path, sft_steps: int) -> None:
    """The logs as versions wrote them that counted both stages on one axis."""
    for name in ("metrics.jsonl", "scores.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        both = [line for line in lines if (line["stage"], line["step"]) != ("rl", 0)]
        for line in both:
            line["step"] += sft_steps * (line.pop("stage") == "rl")
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in both))
    shutil.rmtree(folder / "tensorboard")
    with SummaryWriter(str(folder / "tensorboard" / "bpo_ref")) as writer:
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            for name in line.keys() - {"step"}:
                writer.add_scalar(name, line[name], line["step"])


def test_a_run_that_counted_both_stages_on_one_axis_is_continued_on_two(tmp_path: Path) -> None:
    trained(tmp_path / "whole", updates=4)
    trained(tmp_path / "run", updates=2)
    as_before(tmp_path / "run", TINY["sft_steps"])
    trained(tmp_path / "run", updates=4, resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert_shown(tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard" / "bpo_ref").exists()
    mine, theirs = (
        [(point["stage"], point["step"], point["name"]) for point in map(json.loads, path.read_text().splitlines())]
        for path in (tmp_path / name / "scores.jsonl" for name in ("run", "whole"))
    )
    assert mine == theirs


def test_a_line_that_was_being_written_when_the_run_was_killed_is_dropped(tmp_path: Path) -> None:
    trained(tmp_path / "whole", updates=4)
    trained(tmp_path / "run", updates=2)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"stage": "rl", "step": 3, "update/ra')
    trained(tmp_path / "run", updates=4, resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_supervised_stage_that_is_continued_is_evaluated_once_in_the_logs(tmp_path: Path) -> None:
    record = {"stage": "sft", "step": 3, "sft/loss": 1.0}
    score = {"stage": "sft", "step": 3, "eval/success": 0.5}
    start = {"stage": "sft", "step": 0, "eval/success": 0.0}
    trained(tmp_path, updates=0)
    lines = [start, record, score, {"stage": "rl", "step": 0, "eval/success": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = Args(**{**TINY, "out": str(tmp_path)})
    run_log.RunLog(args, "sft", 3, Accelerator(cpu=True), resumed=True).close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [start, record]


class Recorder(GeneralTracker):
    """Keeps what it is told."""

    name = "recorder"
    requires_logging_directory = False
    made: list[Recorder] = []

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name, self.finished = run_name, False
        self.points: list[tuple[int | None, dict[str, Any]]] = []
        self.made.append(self)

    @property
    def tracker(self) -> Recorder:
        return self

    def start(self) -> None:
        pass

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.points.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_other_trackers_get_the_settings_and_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    Recorder.made.clear()
    trained(tmp_path, updates=1, trackers=("recorder",)).session.close()
    (recorder,) = Recorder.made
    assert recorder.run_name == "bpo_ref" and recorder.finished
    assert recorder.settings["algo"] == "bpo" and recorder.settings["lr"] == TINY["lr"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = []
    for line in lines:
        stage, step = line.pop("stage"), line.pop("step")
        axis = {"sft": "sft/step", "rl": "update/step"}[stage]
        expected.append((step + TINY["sft_steps"] * (stage == "rl"), {axis: step, **line}))
    assert recorder.points == expected
    assert [step for step, _ in recorder.points] == sorted(step for step, _ in recorder.points)
    assert not (tmp_path / "tensorboard").exists()


def test_a_tracker_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**TINY, "out": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"trackers: expected some of .*tensorboard, wandb.*, found 'tensorbord'"):
        Trainer(Args(**options, trackers=("tensorbord",)))
    monkeypatch.setattr(run_log, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    with pytest.raises(ConfigError, match="trackers: wandb is not installed"):
        Trainer(Args(**options, trackers=("tensorboard", "wandb")))
    assert not (tmp_path / "run").exists()
