"""DeepSpeed's ZeRO-3 in two processes, with the launch file: it learns like one process and resumes bitwise."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import small_checkpoint
from components import missing
from safetensors.torch import load_file
from test_real_models import (
    FSDP2,
    RECORDER,
    assert_same_gradients,
    batches_of,
    config_file,
    launch_sharded,
    trainer_of,
)
from tiny_runs import (
    ENVIRONMENT,
    TRAIN,
    _signals,  # noqa: F401 - a fixture
    assert_same_weights,
    launch,
    metrics,
    results_of,
)

from bpo_ref.config import ConfigError
from bpo_ref.learning.checkpoint import load_checkpoint

ZERO3 = FSDP2.with_name("zero3.yaml")
SETTINGS: dict[str, Any] = {
    "algo": "bpo",
    "kl": 0.1,
    "sft_steps": 2,
    "sft_episodes": 4,
    "sft_batch": 3,
    "micro_tokens": 150,
    "long_rows": "whole",
    "gradient_checkpointing": True,
}
SMALL = {"prompts": 2, "updates": 2, "eval_episodes": 2, "max_turns": 2, "max_new_tokens": 8, "env_threads": 1}
LIVELY = {"lr": 1e-3, "lr_decay": "constant", "kl_in": "reward"}


@pytest.fixture
def deepspeed() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        missing("deepspeed", "the package deepspeed is not installed: pip install 'sandboxgym[deepspeed]'")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With matrices that are large enough for DeepSpeed to spread them."""
    return small_checkpoint("qwen2", tmp_path_factory.mktemp("model"), hidden=320)


def launch_zero3(script: Path, out: Path, config: Path, *more: str) -> None:
    done = launch_sharded(script, out, config, *more, file=ZERO3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert results_of(out)["processes"] == 2


def weights_of(folder: Path) -> torch.Tensor:
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    return torch.cat([weight.flatten() for _, weight in sorted(weights.items())])


def assert_near(mine: Path, theirs: Path, start: Path, *, bound: float = 1e-3) -> None:
    """Apart by less than this part of what they have moved: AdamW makes steps out of rounding, too."""
    moved = (weights_of(theirs) - weights_of(start)).norm()
    assert moved > 1e-2
    assert (weights_of(mine) - weights_of(theirs)).norm() < bound * moved


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed")
def test_both_stages_move_the_weights_as_one_process_does(model: Path, tmp_path: Path) -> None:
    """Two steps each, with a reference and unlike numbers of batches."""
    config = config_file(tmp_path, model, **SETTINGS)
    one, two = tmp_path / "one", tmp_path / "two"
    launch(RECORDER, one, 1, config)
    launch_zero3(RECORDER, two, config)  # which asserts that weights are shards
    assert len(list(one.glob("gradients-*.pt"))) == 4
    assert_same_gradients(one, two)
    for step in ("sft-0", "sft-1", "rl-0"):
        mine, theirs = batches_of(two, step)
        assert mine != theirs, step
    for stage in ("sft", "checkpoint"):
        assert_near(two / stage, one / stage, model)
    lines, others = metrics(two), metrics(one)
    assert [sorted(line) for line in lines] == [sorted(line) for line in others]
    for line, other in zip(lines, others):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed")
def test_the_settings_of_large_models_go_on_bitwise_after_a_stop_and_with_fsdp2(tmp_path: Path) -> None:
    """In bfloat16, with weights and moments saved in fp32; the reference is asked while weights are gathered."""
    model = small_checkpoint("llama", tmp_path / "model", positions=8192, hidden=320)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, "model": model, **LIVELY}.items()]
    options += ["--env-kwargs", "games=embedded", "--eval-kwargs", "games=embedded"]
    config = FSDP2.parents[1] / "alfworld-llama-3.1-8b.yaml"
    launch_zero3(TRAIN, tmp_path / "whole", config, *options)
    launch_zero3(TRAIN, tmp_path / "parts", config, *options, "--updates=1")
    weights = weights_of(tmp_path / "parts" / "checkpoint")
    assert (weights != weights.bfloat16().float()).any()
    shutil.copytree(tmp_path / "parts", tmp_path / "mixed")
    launch_zero3(TRAIN, tmp_path / "parts", config, *options, "--resume=True")
    mine, theirs = ([line for line in metrics(tmp_path / n) if "update/loss" in line] for n in ("parts", "whole"))
    assert mine == theirs and len(mine) == 2
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")
    state, other = (load_checkpoint(tmp_path / n / "checkpoint")["optimizer"]["state"] for n in ("parts", "whole"))
    assert state.keys() == other.keys() and len(state) > 10
    assert all(torch.equal(state[name][key], other[name][key]) for name in state for key in state[name])

    done = launch_sharded(TRAIN, tmp_path / "mixed", config, *options, "--resume=True")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_near(tmp_path / "mixed" / "checkpoint", tmp_path / "whole" / "checkpoint", model, bound=0.2)
    state = load_checkpoint(tmp_path / "mixed" / "checkpoint")["optimizer"]["state"]
    assert {float(moments["step"]) for moments in state.values()} == {2.0}


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed")
def test_a_gradient_that_is_no_number_ends_the_run(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "from bpo_ref import train\n"
        "original = train.aggregate\n"
        "train.aggregate = lambda *given: original(*given) * float('nan')\n"
        "train.main()\n"
    )
    done = launch_sharded(script, tmp_path / "run", config_file(tmp_path, model, algo="rloo"), file=ZERO3)
    assert done.returncode != 0
    assert "the gradient of rl step 1 has the norm inf" in done.stderr
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ({"lora_r": 4}, {}, r"lora_r: adapters cannot be trained with DeepSpeed; .*fsdp2.yaml can"),
        ({"algo": "ppo"}, {}, r"baseline, credit: a value head cannot be trained with DeepSpeed"),
        ({}, {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, r"zero_stage 2: expected 3"),
        ({}, {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, r"offload_optimizer_device cpu: expected none"),
        ({}, {}, r'not installed: pip install "sandboxgym\[deepspeed\]"'),
    ],
    ids=["adapters", "critic", "stage", "offloading", "package"],
)
def test_what_deepspeed_cannot_do_here_is_refused(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    variables: dict[str, str],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    launcher = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", **variables}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, model, **options)


@pytest.mark.slow
def test_other_runs_do_not_import_deepspeed(model: Path, tmp_path: Path) -> None:
    """Up to the first checkpoint, for transformers looks for DeepSpeed's models when it saves one."""
    code = (
        "import sys; from bpo_ref.args import parse_args; from bpo_ref.train import Trainer;"
        "trainer = Trainer(parse_args());"
        "trainer._optimize(trainer._rollouts((0, 1))); assert 'deepspeed' not in sys.modules"
    )
    config = config_file(tmp_path, model)
    command = [sys.executable, "-c", code, "--config", str(config), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
