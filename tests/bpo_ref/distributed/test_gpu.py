"""The trainer on a CUDA GPU against the CPU: whole runs, packed rows, sampling, FSDP2. Skipped where there is no GPU.

``make test-gpu`` runs them with whatever Python has PyTorch for the GPU. What a simulated device can show is tested
everywhere, by `test_second_device`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from checkpoints import small_checkpoint
from components import missing
from device_cases import CASES, SETTINGS
from torch import Tensor

from bpo_ref.args import Args
from bpo_ref.experiments.bench import paths_of
from bpo_ref.learning import packing
from bpo_ref.learning.models import CausalLM, checkpoint_layers, compute_in, load_policy, lowered_twin
from bpo_ref.sampling.generate import Generator, forward
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda")
PATH = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        missing("gpu", "there is no CUDA GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of two layers, heads of 16 numbers: FlexAttention's smallest."""
    return small_checkpoint("qwen2", tmp_path_factory.mktemp("models") / "qwen2", hidden=64)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps the device of a process's first run for all that follow.

    FlexAttention that is compiled for too many kinds of calls would fall back to one that holds all scores.
    """
    monkeypatch.setattr(TrainingSession, "catch_signals", lambda _: None)
    monkeypatch.setattr("torch._dynamo.config.fail_on_recompile_limit_hit", True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trainer_of(out: Path, model: Path, **options: Any) -> Trainer:
    return Trainer(Args(**{**SETTINGS, "out": str(out), "model": str(model), **options}))


def moved(trainer: Trainer, model: Path) -> Tensor:
    """Change of the weights by training, as one vector; of adapters their second halves, which begin at 0."""
    start = load_policy(model)[0].state_dict()
    every = trainer.session.policy.named_parameters()
    learnt = [(name, weight) for name, weight in every if weight.requires_grad and "lora_A" not in name]
    return torch.cat([(weight.detach().cpu() - start[name].cpu() if name in start else weight.detach().cpu()).flatten()
                      for name, weight in learnt])  # fmt: skip


# Whole runs.


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_resumed_is_that_of_the_cpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    options = CASES[case]
    drawn_alike = "backend" not in options  # kernels of continuous batching draw from a stream of the device
    if drawn_alike:
        with monkeypatch.context() as without:
            without.setattr(torch.cuda, "is_available", lambda: False)
            expected = trainer_of(tmp_path / "cpu", model, updates=2, **options)
            expected.run()
        assert expected.session.accelerator.device.type == "cpu"
        AcceleratorState._reset_state(reset_partial_state=True)
    for updates in (1, 2):
        found = trainer_of(tmp_path / "gpu", model, updates=updates, resume=updates > 1, **options)
        found.run()
        assert {weight.device.type for weight in found.session.network.parameters()} == {"cuda"}
    lines = [json.loads(line) for line in (tmp_path / "gpu" / "metrics.jsonl").read_text().splitlines()]
    held = [(line["memory/rollout"], line["memory/update"]) for line in lines if "memory/rollout" in line]
    assert len(held) == 2 and all(part > 0 for line in held for part in line)
    if not drawn_alike:
        return
    here, there = (moved(trainer, model) for trainer in (found, expected))
    if options.get("dtype"):  # rounded otherwise, other tokens are drawn: what is learned is only as much
        assert 0.5 < float(here.norm() / there.norm()) < 2.0
        return
    spent = ("returns", "env_steps", "tokens")
    assert [found.session.counters[name] for name in spent] == [expected.session.counters[name] for name in spent]
    apart = float((here - there).norm() / there.norm())
    print(f"{case}: weights' changes differ by {apart:.1e}")
    assert apart < 1e-4, apart


def launched(out: Path, config: Path, *, sharded: bool) -> list[Tensor]:
    """Train in a process of its own, by itself or as the only process of an FSDP2 launch; returns the weights."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parents[1]), *PATH])}
    if sharded:
        environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    else:
        command = [sys.executable]
    command += [str(Path(__file__).with_name("shards_of_one.py")), "--config", str(config), "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((out / "told.json").read_text())
    assert told == {"kind": "Fsdp2" if sharded else "Replicated", "device": "cuda", "dtensors": sharded}
    return list(load_policy(out / "checkpoint")[0].parameters())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fsdp2_on_one_gpu_learns_what_one_process_learns(model: Path, tmp_path: Path, dtype: str) -> None:
    """Gathering, reducing with NCCL and saving are those of many GPUs; that there are parts is tested on CPUs."""
    import yaml

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**SETTINGS, "model": str(model), "updates": 2, "dtype": dtype, "kl": 0.1}))
    alone, sharded = (launched(tmp_path / str(kind), config, sharded=kind) for kind in (False, True))
    start = list(load_policy(model)[0].parameters())
    change = torch.cat([(a - b).flatten() for a, b in zip(alone, start, strict=True)]).norm()
    apart = torch.cat([(a - b).flatten() for a, b in zip(sharded, alone, strict=True)]).norm().item() / change.item()
    print(f"{dtype}: weights' changes differ by {apart:.1e}")
    assert change > 1e-3 and apart < (0.3 if dtype == "bfloat16" else 1e-3)  # gathered weights add up in bf16


# Packed rows.


def gradients(policy: CausalLM, ids: Tensor, where: Tensor, **options: Any) -> Tensor:
    policy.zero_grad()
    logps, *_ = forward(policy, ids, torch.full((len(ids),), ids.shape[1], device=GPU), where=where, **options)
    (logps.sum() / len(ids)).backward()
    return torch.cat([weight.grad.flatten().float() for weight in policy.parameters() if weight.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_have_the_gradients_of_flat_ones(model: Path, dtype: str, checkpointed: bool) -> None:
    """By FlexAttention, compiled: trees whose rows end on its blocks and beside them, whole and in parts."""
    policy = load_policy(model)[0].to(GPU)
    packing.enable(policy)
    packing.check(policy)
    if checkpointed:
        checkpoint_layers(policy)
    exact = None
    for prompt, turns, turn in ((28, 2, 50), (60, 5, 37), (300, 3, 101)):
        ids, where = (part.to(GPU) for part in paths_of(2, prompt=prompt, turns=turns, turn=turn, points=2, width=3))
        ids = ids % policy.config.vocab_size
        exact = gradients(policy, ids, where, packed=False)
        if dtype == "bfloat16":
            lowered = load_policy(model)[0].to(GPU)
            packing.enable(lowered)
            compute_in(lowered, torch.bfloat16)
        else:
            lowered = policy
        flat = gradients(lowered, ids, where, packed=False)
        for options in ({"packed": True}, {"packed": True, "most": 256}):
            apart = float((gradients(lowered, ids, where, **options) - exact).norm() / exact.norm())
            rounding = float((flat - exact).norm() / exact.norm())
            print(f"{dtype} {ids.shape} {options}: {apart:.1e}, flat {rounding:.1e}")
            assert apart < max(1e-4, 2 * rounding)


# Sampling.


def contexts(rows: int) -> list[list[int]]:
    rng = np.random.default_rng(rows)
    return [rng.integers(5, 200, 6 + i % 5).tolist() for i in range(rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_turns_have_the_probabilities_that_are_learned_from(model: Path, dtype: torch.dtype) -> None:
    policy = load_policy(model)[0].to(GPU)
    if dtype == torch.bfloat16:
        compute_in(policy, dtype)
    sampler = policy if dtype == torch.float32 else lowered_twin(policy, dtype)
    for joined in (0, 2**30):  # keys and values layer by layer, or side by side for a turn
        session = Generator(sampler, stop_ids=[10**6], max_new_tokens=20, joined=joined).open(contexts(8))
        rows = [*range(8), *(session.fork(row, length=5) for row in range(4))]
        for turn in range(2):
            said = session.generate(rows, [np.random.default_rng([turn, row]) for row in rows])
            for row, generation in zip(rows, said, strict=True):
                ids = torch.tensor([session.context(row)], device=GPU)
                logps, *_ = forward(policy, ids, torch.tensor([ids.shape[1]], device=GPU))
                there = logps[0, -len(generation.ids) :].detach().cpu().numpy()
                assert np.abs(there - np.asarray(generation.logps)).max() < (1e-4 if dtype == torch.float32 else 0.05)


def waits(policy: CausalLM, *, rows: int, tokens: int) -> int:
    """Number of times that sampling a turn makes the program wait for the GPU, as PyTorch counts it."""
    session = Generator(policy, stop_ids=[10**6], max_new_tokens=tokens).open(contexts(rows))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            session.generate(range(rows), [np.random.default_rng([7, i]) for i in range(rows)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in found)


def test_sampling_waits_a_few_times_for_each_token(model: Path) -> None:
    """On the simulated device, which counts reads, twice; six times on an H200, by PyTorch's own count."""
    policy = load_policy(model)[0].to(GPU)
    waits(policy, rows=2, tokens=4)  # libraries are loaded
    few, many = waits(policy, rows=2, tokens=4), waits(policy, rows=7, tokens=9)
    assert 0 < many - few <= 6 * 5, (few, many)
