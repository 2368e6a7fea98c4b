"""Runs of a tiny policy on a text game of four turns, for several files: settings, fixtures, what runs leave."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import wordgame
import yaml
from safetensors.torch import load_file

from bpo_ref import supervised, train
from bpo_ref.args import Args
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer

TINY: dict[str, Any] = {
    "env_id": wordgame.ENV_ID,
    "eval_kwargs": (),
    "max_turns": 6,
    "context": 160,
    "max_new_tokens": 4,
    "sft_steps": 3,
    "sft_episodes": 12,
    "sft_batch": 4,
    "updates": 5,
    "prompts": 4,
    "width": 2,
    "eval_episodes": 6,
    "eval_every": 2,
    "save_every": 2,
    "lr": 1e-2,
}


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A trainer takes over SIGINT and SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def trained(out: Path, **options: Any) -> Trainer:
    trainer = Trainer(Args(**{**TINY, "out": str(out), **options}))
    trainer.run()
    return trainer


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (folder / "checkpoint").glob("*.safetensors")
    return load_file(file)


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def metrics(folder: Path) -> list[dict[str, float]]:
    """The log without what the clock says; ``stage`` is 0 for the supervised one, else 1."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in line.items() if not k.startswith("time/") and "seconds" not in k}
        | {"stage": float(line["stage"] == "rl")}
        for line in lines
    ]


def assert_same_weights(one: Path, other: Path) -> None:
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("finished")
    trained(out)
    return out


def interrupt(monkeypatch: pytest.MonkeyPatch, method: str, times: int, act: Any) -> None:
    """Do something after a method of the trainer has been called so many times."""
    owner = {"save": TrainingSession, "supervised_step": supervised}.get(method, Trainer)
    original, calls = getattr(owner, method), []

    def wrapped(*args: Any) -> Any:
        result = original(*args)
        calls.append(method)
        if len(calls) == times:
            act()
        return result

    monkeypatch.setattr(owner, method, wrapped)


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


TRAIN = Path(train.__file__)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(TRAIN.parents[1])]),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


def config_file(folder: Path, **options: Any) -> Path:
    path = folder / "config.yaml"
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in {**TINY, **options}.items()}
    path.write_text(yaml.safe_dump(values))
    return path


def launcher(script: Path, processes: int) -> list[str]:
    """Starts a script in several processes: on a CPU only ``--multi_gpu`` makes accelerate do so."""
    options = ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--main_process_port", "0", *(["--multi_gpu"] if processes > 1 else [])]
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *options, str(script)]


def launch(script: Path, out: Path, processes: int, config: Path, *more: str) -> None:
    """Run a script in processes of its own; one needs no launcher."""
    start = launcher(script, processes)[1:] if processes > 1 else [str(script)]
    done = forked.run([*start, "--config", str(config), "--out", str(out), *more], ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
