"""Runs that are stopped, killed or damaged, and resumed."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from tiny_runs import (  # noqa: F401 - fixtures
    ENVIRONMENT,
    TINY,
    TRAIN,
    Crash,
    _signals,
    assert_same_weights,
    config_file,
    crash,
    ctrl_c,
    finished,
    interrupt,
    metrics,
    results_of,
    trained,
)

from bpo_ref.args import Args, resolved
from bpo_ref.learning.checkpoint import CheckpointError, load_checkpoint
from bpo_ref.train import Trainer

# ruff: noqa: F811


@pytest.mark.parametrize(
    ("method", "times"),
    [("supervised_step", 2), ("_optimize", 1), ("_optimize", 2), ("_optimize", 3)],
    ids=["supervised", "between saves", "at a save", "after a save"],
)
def test_stopped_by_ctrl_c_and_resumed_is_uninterrupted(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, times: int
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, method, times, ctrl_c)
        stopped = trained(tmp_path)
    assert stopped.session.step == times
    assert not (tmp_path / "results.json").exists()
    trained(tmp_path, resume=True)
    assert metrics(tmp_path) == metrics(finished)
    assert_same_weights(tmp_path, finished)
    assert results_of(tmp_path)["scores"] == results_of(finished)["scores"]


@pytest.mark.parametrize(("method", "times"), [("_optimize", 4), ("_rollouts", 1), ("save", 3)])
def test_a_crash_goes_on_from_the_last_checkpoint(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, times: int
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Crash):
        interrupt(patch, method, times, crash)
        trained(tmp_path)
    trained(tmp_path, resume=True)
    assert metrics(tmp_path) == metrics(finished)
    assert_same_weights(tmp_path, finished)


@pytest.mark.parametrize(
    "options",
    [
        {"algo": "ppo", "epochs": 2},
        {"algo": "ppo", "gae_steps": "token", "kl": 0.1, "kl_in": "reward"},
        {"algo": "bpo-split", "roulette": 0.5, "roulette_below": 0.6},
        {"algo": "bpo-forest"},
        {"algo": "bpo-tree", "baseline": "critic"},
        {"algo": "bpo", "match": "tokens", "budget": 2500, "updates": 6, "lr_decay": "linear"},
        {"algo": "bpo", "allocation": "spread"},
    ],
    ids=["ppo", "ppo by token", "split", "forest", "critic", "budget", "uneven roots"],
)
def test_every_kind_of_memory_survives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    trained(tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        interrupt(patch, "_optimize", 2, ctrl_c)
        trained(tmp_path / "parts", **options)
    trained(tmp_path / "parts", resume=True, **options)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")
    mine, theirs = (load_checkpoint(tmp_path / name / "checkpoint") for name in ("parts", "whole"))
    assert mine["memory"] == theirs["memory"]
    if mine["value_head"] is not None:
        assert mine["value_head"]["weight"].any()
        assert all(torch.equal(value, theirs["value_head"][name]) for name, value in mine["value_head"].items())


def test_a_finished_run_resumes_to_itself_and_can_be_prolonged(finished: Path, tmp_path: Path) -> None:
    trained(tmp_path, updates=3)
    trained(tmp_path, updates=3, resume=True)
    assert load_checkpoint(tmp_path / "checkpoint")["step"] == 3
    trained(tmp_path, updates=5, resume=True)
    assert_same_weights(tmp_path, finished)


@pytest.mark.parametrize(
    ("options", "field"), [({"lr": 0.5}, "lr"), ({"model": "tiny:1M"}, "model"), ({"algo": "rloo"}, "algo")]
)
def test_a_checkpoint_of_other_settings_is_refused(finished: Path, options: dict[str, Any], field: str) -> None:
    args = resolved(Args(**{**TINY, "out": str(finished), "resume": True, **options}))
    with pytest.raises(CheckpointError, match=rf"{finished}/checkpoint: was made with {field}="):
        Trainer(args)


def test_a_checkpoint_may_be_older_than_a_setting(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoint" / "trainer_state.pt"
    state = torch.load(path, weights_only=True)
    del state["args"]["allocation"], state["memory"]["spread"]
    torch.save(state, path)
    assert trained(tmp_path, resume=True).session.step == TINY["updates"]
    with pytest.raises(CheckpointError, match="was made with allocation='equal', now it is 'spread'"):
        trained(tmp_path, resume=True, algo=results_of(finished)["args"]["algo"], allocation="spread")


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/checkpoint/trainer_state.pt: .*no such file"):
        Trainer(resolved(Args(**{**TINY, "out": str(tmp_path), "resume": True})))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "trainer_state.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"trainer_state.pt: cannot be read"):
        load_checkpoint(folder)
    torch.save({"args": {}, "step": 1}, folder / "trainer_state.pt")
    with pytest.raises(CheckpointError, match=r"trainer_state.pt: lacks .*optimizer"):
        load_checkpoint(folder)


def test_a_crash_between_the_renames_of_a_save_is_mended(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "checkpoint", tmp_path / "checkpoint.old")
    assert load_checkpoint(tmp_path / "checkpoint")["step"] == 5
    assert not (tmp_path / "checkpoint.old").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_resumes_bitwise(finished: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = forked.start([str(TRAIN), "--config", str(config_file(tmp_path)), "--out", str(tmp_path)], ENVIRONMENT)
    deadline = time.monotonic() + 300
    while not (tmp_path / "checkpoint").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(120) == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number)
    assert not (tmp_path / "results.json").exists()
    trained(tmp_path, resume=True)
    assert metrics(tmp_path) == metrics(finished)
    assert_same_weights(tmp_path, finished)
