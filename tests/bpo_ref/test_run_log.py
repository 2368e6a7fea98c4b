"""Trackers: what accelerate's get of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train import TINY, trained

from bpo_ref import run_log
from bpo_ref.args import Args
from bpo_ref.config import ConfigError
from bpo_ref.train import Trainer


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: name -> (step, value)."""
    (events,) = {path.parent for path in (folder / "tensorboard").rglob("events.*")}
    reader = EventAccumulator(str(events), size_guidance={"scalars": 0})
    reader.Reload()
    return {name: [(point.step, point.value) for point in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for name in line.keys() - {"step"}:
            found.setdefault(name, []).append((line["step"], line[name]))
    return found


def test_tensorboard_shows_every_number_once_where_a_resumed_run_repeats_updates_too(tmp_path: Path) -> None:
    trained(tmp_path, updates=2)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "earlier")
    trained(tmp_path, updates=4, resume=True)
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "earlier").rename(tmp_path / "checkpoint")  # as if killed before the next checkpoint was written
    trained(tmp_path, updates=4, resume=True)
    shown, expected = board(tmp_path), logged(tmp_path)
    assert shown.keys() == expected.keys() and "update/loss" in shown
    for name, points in expected.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in points], name
        assert [value for _, value in shown[name]] == pytest.approx(
            [value for _, value in points], rel=1e-6, nan_ok=True
        )


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
    assert [{"step": step, **values} for step, values in recorder.points] == lines
    assert not (tmp_path / "tensorboard").exists()


def test_a_tracker_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**TINY, "out": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"trackers: expected some of .*tensorboard, wandb.*, found 'tensorbord'"):
        Trainer(Args(**options, trackers=("tensorbord",)))
    monkeypatch.setattr(run_log, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    with pytest.raises(ConfigError, match="trackers: wandb is not installed"):
        Trainer(Args(**options, trackers=("tensorboard", "wandb")))
    assert not (tmp_path / "run").exists()
