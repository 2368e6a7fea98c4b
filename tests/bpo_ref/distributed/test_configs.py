"""The committed configurations: each trains a small model of its family, and needs the calculated memory."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import several
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from checkpoints import small_checkpoint
from components import missing
from test_real_models import launch_sharded
from tiny_runs import metrics, results_of
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bpo_ref.args import Args, parse_args, resolved
from bpo_ref.config import ConfigError
from bpo_ref.experiments import gpu_memory
from bpo_ref.experiments.gpu_memory import SHAPES, Shape, memory, shape_of
from bpo_ref.learning.models import add_adapter, load_policy

CONFIGS = Path(gpu_memory.__file__).parents[1] / "configs"
LARGE = sorted(path for path in CONFIGS.glob("*.yaml") if "qwen" in path.stem or "llama" in path.stem)
ENVS = {
    "alfworld": {"games": "embedded"},
    "webshop": {"split": "product-train"},
    "swebench": {"dataset": "mini", "instances": '["northpine__slugline-4"]', "backend": "copy", "allow_unsafe": True},
}
LAUNCHERS = {"ddp": True, "fsdp2": False, "zero3": False}
"""Accelerate's launch files, and for each True if adapters are trained with it here."""
SMALL = {"prompts": 2, "updates": 2, "eval_episodes": 2, "max_turns": 2, "max_new_tokens": 8, "env_threads": 1}
SMALL |= {"eval_untrained": False}


def test_there_is_a_configuration_for_each_environment_and_model() -> None:
    assert {path.stem for path in LARGE} == {f"{e}-{m}" for e in ENVS for m in ("qwen2.5-7b", "llama-3.1-8b")}


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: small_checkpoint(kind, root / kind, positions=32768) for kind in ("qwen2", "llama")}


def chosen(launcher: str) -> list[Path]:
    """Configurations that a launcher trains here: of each environment one, and of both families.

    Another launcher takes the others. SANDBOXGYM_ALL_CONFIGS=1 has every launcher train them all.
    """
    if os.environ.get("SANDBOXGYM_ALL_CONFIGS"):
        return LARGE
    families = ("llama", "qwen") if launcher == "fsdp2" else ("qwen", "llama")
    return [p for p in LARGE if families[list(ENVS).index(p.stem.partition("-")[0]) % 2] in p.stem]


def test_every_configuration_is_trained_by_a_launcher_and_every_launcher_meets_all_there_is() -> None:
    assert {path for launcher in LAUNCHERS for path in chosen(launcher)} == set(LARGE)
    for launcher in LAUNCHERS:
        names = [path.stem for path in chosen(launcher)]
        assert {name.partition("-")[0] for name in names} == set(ENVS)
        assert {family for family in ("qwen", "llama") if any(family in name for name in names)} == {"qwen", "llama"}


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "adapters"), LAUNCHERS.items())
def test_configurations_train_a_small_model_of_their_family_with_every_launcher(
    small_models: dict[str, Path], tmp_path: Path, launcher: str, adapters: bool
) -> None:
    """The files as they are, but for the checkpoint, the data and the sizes: two updates in two processes each.

    Weights are too small for ZeRO-3 to spread them; those of tests/bpo_ref/distributed/test_zero3.py are not.
    """
    module = {"ddp": "peft", "zero3": "deepspeed"}.get(launcher)
    if module and importlib.util.find_spec(module) is None:
        missing(module, f"the package {module} is not installed")

    def start_of(path: Path) -> Path:
        return small_models["llama" if "llama" in path.stem else "qwen2"]

    lists = {}
    for path in chosen(launcher):
        kwargs = [f"{name}={value}" for name, value in ENVS[path.stem.partition("-")[0]].items()]
        given = ["--config", str(path), "--model", str(start_of(path)), *(["--lora-r", "4"] if adapters else [])]
        given += ["--env-kwargs", *kwargs, "--eval-kwargs", *kwargs]
        sizes = SMALL | ({"roots": 2} if "swebench" in path.stem else {})  # its sandboxes are what takes long
        lists[path.stem] = given + [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    script = Path(__file__).with_name("train_several.py")
    file = CONFIGS / "accelerate" / f"{launcher}.yaml"
    listed = several.write(tmp_path / "runs.json", lists)
    done = launch_sharded(script, tmp_path, listed, file=file, forks=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for path in chosen(launcher):
        out = tmp_path / path.stem
        told = json.loads((out / "told.json").read_text())
        assert told["kind"] == launcher and "<action>one action</action>" in told["start"]
        assert results_of(out)["processes"] == 2 and results_of(out)["counters"]["returns"] >= 8, path.stem
        updates = [line for line in metrics(out) if "update/loss" in line]
        assert len(updates) == 2
        assert all(0 < line["update/grad_norm"] < math.inf for line in updates)
        assert (out / "checkpoint" / "adapter_model.safetensors").exists() == adapters
        before, after = (load_policy(folder)[0] for folder in (start_of(path), out / "checkpoint"))
        moved = [(a - b).abs().max() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
        assert 0 < max(moved) < 1e-3, path.stem


@pytest.mark.parametrize("path", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configurations(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.num_processes == 8 and config.num_machines == 1
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
        assert yaml.safe_load(path.read_text())["distributed_type"] == "FSDP"
    if path.stem == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3 and not config.deepspeed_config["zero3_init_flag"]
        assert config.distributed_type == "DEEPSPEED"


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_configuration_goes_with_servers(path: Path) -> None:
    given = ["--config", str(path), "--backend", "vllm", "--server", "http://a:8000", "http://a:8001"]
    assert resolved(parse_args(given)).server_sends == "weights"
    assert resolved(parse_args([*given, "--lora-r", "32", "--server-sends", "adapters"])).lora_r == 32
    for wrong, message in [
        (["--server-sends", "adapters"], "server_sends: adapters go with backend=vllm and lora_r, found .*lora_r=0"),
        (["--lora-r", "32", "--server-sends", "adapters", "--sft-steps", "9"], "server_sends: .*which SFT changes"),
    ]:
        with pytest.raises(ConfigError, match=message):
            resolved(parse_args([*given, *wrong]))


# Memory.


@pytest.mark.parametrize(
    ("name", "config", "build", "parameters"),
    [
        (
            "Qwen/Qwen2.5-7B-Instruct",
            Qwen2Config(
                hidden_size=3584,
                num_hidden_layers=28,
                num_attention_heads=28,
                num_key_value_heads=4,
                intermediate_size=18944,
                vocab_size=152064,
                tie_word_embeddings=False,
            ),
            Qwen2ForCausalLM,
            7_615_616_512,
        ),
        (
            "meta-llama/Llama-3.1-8B-Instruct",
            LlamaConfig(
                hidden_size=4096,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                intermediate_size=14336,
                vocab_size=128256,
                tie_word_embeddings=False,
            ),
            LlamaForCausalLM,
            8_030_261_248,
        ),
    ],
)
def test_weights_are_counted_as_transformers_makes_them(name: str, config: Any, build: Any, parameters: int) -> None:
    with torch.device("meta"):
        model = build(config)
    assert SHAPES[name] == shape_of(config)
    assert SHAPES[name].parameters == parameters == sum(p.numel() for p in model.parameters())


def test_adapters_are_counted_as_peft_makes_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, _ = load_policy(small_checkpoint("qwen2", tmp_path))
    shape = shape_of(AutoConfig.from_pretrained(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    adapted = add_adapter(model, r=4, alpha=8, seed=0)
    assert shape.adapters(4) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def kept_for_backward(model: Any, tokens: int) -> int:
    """Numbers that the blocks of a model save in a forward pass, weights apart, shared storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes() // 4
            alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_decoder()(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(seen.values())


def test_what_a_block_keeps_is_counted_to_a_third() -> None:
    shape = Shape(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, ffn=192, vocabulary=50, tied=True)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
    kept = []
    for layers in (2, 3):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=50, **sizes))
        kept.append(kept_for_backward(model, 100))
    assert kept[1] - kept[0] == pytest.approx(100 * (shape.kept + shape.hidden), rel=0.34)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
@pytest.mark.parametrize(("layout", "r"), [("ddp", 32), ("fsdp2", 32), ("fsdp2", 0), ("zero3", 0)])
def test_what_is_counted_fits_a_gpu_of_80_gb(path: Path, layout: Any, r: int) -> None:
    args = resolved(parse_args(["--config", str(path), "--lora-r", str(r)]))
    parts = memory(args, SHAPES[args.model], layout=layout, gpus=8)
    assert gpu_memory.peak(parts) < 75e9


def test_sharding_divides_what_is_held_and_not_what_is_computed_with() -> None:
    args = resolved(Args(model="x", prompts=8, dtype="bfloat16", kl=0.1))
    shape = SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    one, eight = (memory(args, shape, layout=layout, gpus=8) for layout in ("ddp", "fsdp2"))
    assert one["optimizer"] == 8 * shape.parameters == 8 * eight["optimizer"]
    assert one["update: logits"] == eight["update: logits"]
    assert eight["rollout: gathered"] == 2 * shape.parameters


@pytest.mark.parametrize(
    ("algo", "rows"),
    [("rloo", 7), ("vineppo", 8 * 24 * 4), ("bpo-paper", 6), ("bpo-tree", 6), ("bpo-forest", 8), ("bpo-split", 12)],
)
def test_paths_at_the_same_time(algo: Any, rows: int) -> None:
    """bpo-split: 4 root paths fork three times, 12 paths; these can fork on twice, once and not at all, 12 more."""
    assert gpu_memory.most_rows(resolved(Args(algo=algo))) == rows


def test_a_task_may_have_four_times_the_root_paths_where_they_are_shared_out() -> None:
    assert gpu_memory.most_rows(resolved(Args(algo="rloo", allocation="spread"))) == 4 * 7


def test_the_documented_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_memory.main([])
    printed = capsys.readouterr().out
    page = (CONFIGS.parents[1] / "docs" / "training.md").read_text()
    assert printed in page, f"docs/training.md lacks what python -m bpo_ref.experiments.gpu_memory prints:\n{printed}"


LONG = ("--config", str(CONFIGS / "swebench-qwen2.5-7b.yaml"), "--context", "32768", "--micro-tokens", "16384")


def test_the_documented_memory_of_long_contexts_is_what_is_counted() -> None:
    args = resolved(parse_args(LONG))
    lines = gpu_memory.long_contexts(args, SHAPES[args.model], leaves=13)
    assert len(lines) == 4
    page = (CONFIGS.parents[1] / "docs" / "generation.md").read_text()
    assert "\n".join(lines) in page, "docs/generation.md lacks:\n" + "\n".join(lines)


def test_a_row_in_parts_needs_the_activations_of_a_part_and_the_keys_of_the_tree() -> None:
    shape = SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    split, whole, short = (
        memory(resolved(parse_args([*LONG, *more])), shape, layout="ddp", gpus=8)["update: blocks"]
        for more in ((), ("--long-rows", "whole"), ("--context", "16384"))
    )
    assert whole == 2 * short
    tokens = gpu_memory.tree_tokens(32768, gpu_memory.most_rows(resolved(parse_args(LONG))), shared=0.5)
    assert split == short + 2 * tokens * 28 * 2 * 4 * 128 * 2


@pytest.mark.parametrize(("r", "layout", "fits"), [(0, "ddp", False), (32, "ddp", True), (0, "fsdp2", True)])
def test_a_gpu_that_cannot_hold_the_weights_is_refused_with_bytes(r: int, layout: Any, fits: bool) -> None:
    config = Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, vocab_size=152064, tie_word_embeddings=False,
    )  # fmt: skip
    args = resolved(parse_args([*LONG, "--lora-r", str(r)]))
    told = gpu_memory.shortage(args, config, layout=layout, gpus=8, available=80 * 2**30)
    assert (told is None) is fits
    if told:
        held = memory(args, SHAPES[args.model], layout="ddp", gpus=8)
        needed = sum(size for name, size in held.items() if ":" not in name)
        assert told.startswith(f"model: {needed / 2**30:.1f} GiB are needed on each of 8 GPUs")
        assert "80.0 GiB are available" in told
    assert gpu_memory.shortage(args, object(), layout="ddp", gpus=1, available=0) is None
    fewer = SHAPES[args.model].parameters - 1  # such as a model without gates
    assert gpu_memory.shortage(args, config, layout=layout, gpus=8, available=0, weights=fewer) is None


def test_weights_are_cast_for_the_sampler_in_the_process_alone() -> None:
    shape = SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    here = resolved(parse_args([*LONG, "--lora-r", "0", "--dtype", "bfloat16"]))
    served = replace(here, backend="vllm", server=("http://x",))
    apart = [memory(args, shape, layout="ddp", gpus=8)["weights"] for args in (here, served)]
    assert apart == [4 * shape.parameters + 2 * (shape.parameters - shape.embeddings), 4 * shape.parameters]


def test_contexts_beyond_a_pass_are_refused_where_that_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"long_rows: rows of up to 32768 tokens .* and 16384 are available"):
        resolved(parse_args([*LONG, "--long-rows", "refuse"]))
