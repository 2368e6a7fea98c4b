"""Errors and costs on another device than the CPU, as far as a simulated one shows them: see `second_device`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tabular import random_mdp
from tabular_loop import LR, LoopTrainer
from torch.utils._python_dispatch import TorchDispatchMode

from bpo_ref import train
from bpo_ref.args import Args

MDP = random_mdp(seed=244)


class Reads(TorchDispatchMode):
    """Counts numbers that are read out of tensors: on a GPU each waits until everything before it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_of_an_update(tmp_path: Path, *, prompts: int, **options: Any) -> int:
    """In one update of so many tasks, which is one micro-batch."""
    settings: dict[str, Any] = {
        "algo": "rloo", "roots": 3, "max_turns": 5, "context": 64, "lr": LR, "max_grad_norm": 1e9, **options,
    }  # fmt: skip
    args = Args(**settings, out=str(tmp_path), prompts=prompts, pack="flat")
    trainer = LoopTrainer(args, MDP, reference=MDP.logits[::-1].copy() if args.kl else None)
    trees = trainer._rollouts((0,))
    train.assign_credit(trees, trainer.args, trainer.session.memory)
    trainer.session.set_lr(LR)
    with Reads() as reads:
        trainer._optimize(trees)
    return reads.count


@pytest.mark.parametrize(
    "options", [{}, {"ratio": "step"}, {"kl": 0.1}, {"algo": "ppo", "epochs": 1, "minibatches": 1}]
)
def test_an_update_reads_no_more_numbers_for_more_tokens(tmp_path: Path, options: dict[str, Any]) -> None:
    few = reads_of_an_update(tmp_path, prompts=2, **options)
    many = reads_of_an_update(tmp_path, prompts=12, **options)
    assert 0 < many == few


def on_second_device(tmp_path: Path, chosen: str) -> None:
    """Run the tests of ``on_second_device.py``: a device is made before the first backward pass, and stays."""
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(tmp_path / "t"),
    ]
    path = os.pathsep.join([str(here.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "-m", chosen, str(here / "on_second_device.py")],
        cwd=here.parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    told = ran.stdout[-6000:] + ran.stderr[-2000:]
    assert ran.returncode == 0 and re.search(r"\d+ passed", ran.stdout) and " skipped" not in ran.stdout, told


@pytest.mark.slow
def test_the_trainer_runs_on_a_second_device(tmp_path: Path) -> None:
    on_second_device(tmp_path, "slow")


@pytest.mark.slow
def test_what_strays_from_the_second_device_or_waits_for_it_is_found(tmp_path: Path) -> None:
    on_second_device(tmp_path, "not slow")
