"""Tests of the trainer on the `second_device`, run in a process of their own that `test_second_device` starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import second_device
import torch
from accelerate import Accelerator
from checkpoints import small_checkpoint
from device_cases import CASES, SETTINGS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bpo_ref import supervised, train
from bpo_ref.args import Args
from bpo_ref.learning import initial_models, packing
from bpo_ref.learning.models import CausalLM, compute_in, load_policy, lowered_twin
from bpo_ref.learning.rescore import rescore
from bpo_ref.sampling import generate
from bpo_ref.sampling.continuous import ContinuousSession
from bpo_ref.sampling.generate import Generator, forward
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer

DEVICE = second_device.register()
OTHER = "Expected all tensors to be on the same device|indices should be either on cpu or on the same device"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(autouse=True)
def _steps_of_attention() -> Iterator[None]:
    """Use the same steps of attention on both devices, so that they round alike."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Put new trainers on the second device; as on CUDA, one has bf16 weights to sample with."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: DEVICE))
    monkeypatch.setattr(TrainingSession, "lower_once", True)
    monkeypatch.setattr(ContinuousSession, "_batching", little_memory)
    monkeypatch.setattr(TrainingSession, "catch_signals", lambda _: None)
    return monkeypatch


def little_memory(session: ContinuousSession, rows: int, rngs: Any) -> ContinuousBatchingConfig:
    """Limit the paged cache, which by default takes most of the memory; graphs need CUDA."""
    pages = {"num_blocks": 16 * rows, "max_batch_tokens": 512, "page_size": 32}
    plain = dict.fromkeys(("use_cuda_graph", "use_async_batching", "auto_switch_to_flash"), False)
    seed = None if not rngs else int(rngs[0].integers(2**31))
    return ContinuousBatchingConfig(**pages, **plain, seed=seed, return_logprobs=session._generator.sampler_logps)


def trainer_of(out: Path, model: Path, **options: Any) -> Trainer:
    return Trainer(Args(**{**SETTINGS, "out": str(out), "model": str(model), **options}))


def strays(trainer: Trainer) -> list[str]:
    """Find state of the trainer, kept from step to step, that is not on its device."""
    network = trainer.session.network
    kept: dict[str, Any] = dict(network.named_parameters()) | dict(network.named_buffers())
    for i, state in enumerate(trainer.session.strategy.optimizer.state_dict()["state"].values()):
        kept |= {f"{name} {i}": value for name, value in state.items() if name != "step"}
    if isinstance(trainer.session.reference, torch.nn.Module):
        kept |= {f"reference {name}": value for name, value in trainer.session.reference.named_parameters()}
    return [name for name, value in kept.items() if value.device != DEVICE]


# Whole runs.


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_resumed_is_that_of_the_cpu(model: Path, tmp_path: Path, request: Any, case: str) -> None:
    options = CASES[case]
    drawn_alike = "backend" not in options  # kernels of continuous batching draw from a stream of the device
    if drawn_alike:
        expected = trainer_of(tmp_path / "cpu", model, updates=2, **options)
        expected.run()
        expected.session.accelerator.free_memory()
    request.getfixturevalue("on_device")
    for updates in (1, 2):
        found = trainer_of(tmp_path / "device", model, updates=updates, resume=updates > 1, **options)
        found.run()
        assert next(iter(found.session.network.parameters())).device == DEVICE and not strays(found)
        found.session.accelerator.free_memory()
    if not drawn_alike:
        return
    spent = ("returns", "env_steps", "tokens")
    assert [found.session.counters[name] for name in spent] == [expected.session.counters[name] for name in spent]
    start = load_policy(model)[0].state_dict()
    changes = [
        torch.cat([(weight.detach().cpu() - start.get(name, 0.0)).flatten() for name, weight in learnt(trainer)])
        for trainer in (found, expected)
    ]
    apart = float((changes[0] - changes[1]).norm() / changes[1].norm())
    assert apart < (0.1 if options.get("dtype") else 1e-4), apart


def learnt(trainer: Trainer) -> list[tuple[str, Tensor]]:
    """Trained weights, except the adapters' first halves, whose start is not 0."""
    every = trainer.session.policy.named_parameters()
    return [(name, weight) for name, weight in every if weight.requires_grad and "lora_A" not in name]


# Weights at the start.


class OnHost(TorchDispatchMode):
    """Counter of fp32 numbers made in the CPU's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and (made.device.type, made.dtype) == ("cpu", torch.float32):
            self.made += 0 if made._is_view() else made.numel()
        return made


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a checkpoint in bf16, like the hub's, without any weight that is large beside the total."""
    folder = small_checkpoint("qwen2", tmp_path / "deep")
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = 24, ["full_attention"] * 24
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what is counted is of one thread
    return folder


@pytest.mark.parametrize(
    "options", [{}, {"kl": 0.1}, {"kl": 0.1, "dtype": "bfloat16"}, {"algo": "ppo"}, {"lora_r": 2, "lora_alpha": 4}],
    ids=["weights", "reference", "bf16", "value head", "adapters"],
)  # fmt: skip
def test_the_cpu_never_holds_the_weights_of_a_trainer_in_fp32(
    deep: Path, tmp_path: Path, on_device: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Eight processes per machine would hold eight times as much: each moves its weights to its device one by one."""
    loaded: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        with OnHost() as host:
            found = load_policy(*args, **kwargs)
        loaded.append(host.made)
        assert {weight.device for weight in found[0].parameters()} == {DEVICE}
        return found

    on_device.setattr(initial_models, "load_policy", counted)
    trainer = trainer_of(tmp_path / "run", deep, **options)
    numbers = sum(weight.numel() for weight in trainer.session.policy.parameters())
    assert len(loaded) == 1 + ("kl" in options) and max(loaded) < numbers / 4
    if not options:  # a checkpoint is in fp32: it is mapped
        trainer.session.save(tmp_path / "run" / "checkpoint")
        trainer.session.accelerator.free_memory()
        trainer_of(tmp_path / "run", deep, resume=True).session.close()
        assert len(loaded) == 2
    trainer.session.close()


def test_a_model_that_passes_through_the_cpu_is_found(deep: Path) -> None:
    with OnHost() as host:
        policy = load_policy(deep)[0].to(DEVICE)
    assert host.made >= sum(weight.numel() for weight in policy.parameters())


# Waiting for the device.


def small(model: Path, *, dtype: torch.dtype | None = None) -> CausalLM:
    policy = load_policy(model)[0].to(DEVICE)
    if dtype is not None:
        compute_in(policy, dtype)
    return policy


def layered(model: Path, layers: int) -> CausalLM:
    """Repeat the model's layers several times."""
    policy = small(model)
    stack = policy.model.layers
    policy.config.layer_types = ["full_attention"] * layers
    for number in range(len(stack), layers):
        stack.append(type(stack[0])(policy.config, number).to(DEVICE))
    policy.config.num_hidden_layers = layers
    return policy


def contexts(rows: int) -> list[list[int]]:
    rng = np.random.default_rng(rows)
    return [rng.integers(5, 200, 6 + i % 5).tolist() for i in range(rows)]


def waits_of_a_turn(policy: CausalLM, *, rows: int, tokens: int) -> int:
    session = Generator(policy, stop_ids=[10**6], max_new_tokens=tokens).open(contexts(rows))
    with second_device.waits() as found:
        turns = session.generate(range(rows), [np.random.default_rng([7, i]) for i in range(rows)])
    assert [len(turn.ids) for turn in turns] == [tokens] * rows
    return len(found)


def test_sampling_waits_twice_for_each_token_whatever_the_rows_and_layers(model: Path) -> None:
    """Once for the tokens with all their data, and once in transformers, which looks for padding."""
    few = waits_of_a_turn(small(model), rows=2, tokens=4)
    assert waits_of_a_turn(small(model), rows=7, tokens=9) == few + 2 * 5
    assert waits_of_a_turn(layered(model, 5), rows=2, tokens=4) == few


def waits_of_a_pass(policy: CausalLM, *, rows: int, packed: bool) -> int:
    ids, inside = generate._pad(contexts(rows), side="right", device=DEVICE)
    if packed:
        packing.enable(policy)
    lengths = inside.sum(dim=1)
    with second_device.waits() as found:
        logps, *_ = forward(policy, ids, lengths, packed=packed)
        logps.sum().backward()
    return len(found)


@pytest.mark.parametrize("packed", [False, True])
def test_a_pass_waits_as_often_whatever_the_rows_and_layers(model: Path, packed: bool) -> None:
    few = waits_of_a_pass(small(model), rows=2, packed=packed)
    assert waits_of_a_pass(small(model), rows=9, packed=packed) == few
    assert waits_of_a_pass(layered(model, 5), rows=2, packed=packed) == few


def waits_of_annotate(trainer: Trainer, prompts: int) -> int:
    """Count waits until trees are fully rescored, all of them in one batch."""
    trees = trainer._rollouts((prompts,))[:prompts]
    args = replace(trainer.args, tis=1.0, kl=0.1, kl_in="reward", micro_tokens=10**6)
    measure = lambda batch: trainer._forward(trainer.session.network, batch)  # noqa: E731
    with second_device.waits() as found:
        rescore(trees, args, measure, measure, DEVICE)
    return len(found)


@pytest.mark.usefixtures("on_device")
def test_measuring_waits_as_often_whatever_the_actions(model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model, algo="ppo", pack="flat")
    assert waits_of_annotate(trainer, 1) == waits_of_annotate(trainer, 2) > 0
    trainer.session.close()


# Types.


def kept_in(policy: CausalLM) -> set[torch.dtype]:
    """Dtypes of keys and values."""
    session = Generator(policy, stop_ids=[10**6], max_new_tokens=2).open(contexts(2))
    session.generate([0, 1])
    return {part.dtype for layer in session._store.parts for part in layer}


def test_keys_and_values_are_kept_in_the_type_that_attention_computes_in(model: Path) -> None:
    """The models' rotary positions leave keys in fp32 under autocast."""
    policy = small(model, dtype=torch.bfloat16)
    assert kept_in(policy) == kept_in(lowered_twin(policy, torch.bfloat16)) == {torch.bfloat16}
    assert kept_in(small(model)) == {torch.float32}


def test_flex_attention_is_given_one_type(model: Path, on_device: pytest.MonkeyPatch) -> None:
    """Inputs that packed rows give FlexAttention on CUDA, as far as mask and tensors go."""
    given: list[tuple[torch.device, torch.dtype]] = []

    def flex(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        given.extend((part.device, part.dtype) for part in (query, key, value))
        assert mask.kv_indices.device == DEVICE
        return packing.sdpa_attention_forward(module, query, key, value, None, **options)

    def mask(packed: packing.Packing) -> Any:
        n = packed.ids.shape[1]
        ends = packing.interval_ends(packed.segments, n + -n % packing.BLOCK)
        return packing.block_mask(ends.to(DEVICE))

    policy = small(model)
    packing.enable(policy)
    compute_in(policy, torch.bfloat16)
    on_device.setattr(packing, "flex_attention_forward", flex)
    on_device.setattr(packing.Packing, "mask", mask)
    ids, inside = generate._pad(contexts(3), side="right", device=DEVICE)
    forward(policy, ids, inside.sum(dim=1), packed=True)[0].sum().backward()
    assert set(given) == {(DEVICE, torch.bfloat16)}


# Whether such faults would be found.


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("field", ["step", "advantage", "old_logps", "ids", "lengths", "old_values"])
def test_a_tensor_of_the_batch_that_stays_on_the_cpu_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    trainer = trainer_of(tmp_path, model, algo="ppo", pack="flat", epochs=1, minibatches=1)
    trees = trainer._rollouts((0,))
    train.assign_credit(trees, trainer.args, trainer.session.memory)
    whole = train.collate

    def stray(rows: Any, device: Any) -> Any:
        batch = whole(rows, device)
        return replace(batch, **{field: getattr(batch, field).cpu()})

    monkeypatch.setattr(train, "collate", stray)
    with pytest.raises(RuntimeError, match=OTHER):
        trainer._optimize(trees)
    trainer.session.close()


def test_an_index_of_the_other_device_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generate._Batch.feed

    def stray(batch: Any, fed: Any) -> Tensor:
        mask = whole(batch, fed)
        batch.listed = batch.listed.cpu()
        return mask

    monkeypatch.setattr(generate._Batch, "feed", stray)
    session = Generator(small(model), stop_ids=[10**6], max_new_tokens=2, joined=0).open(contexts(2))
    with pytest.raises(RuntimeError, match=OTHER):
        session.generate([0, 1])


def test_numbers_read_one_by_one_are_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: Any
) -> None:
    draw = generate._draw

    def reading(distribution: Tensor, drafts: Any) -> Tensor:
        tokens = draw(distribution, drafts)
        return tokens.new_tensor([[token.item()] for token in tokens])

    monkeypatch.setattr(generate, "_draw", reading)
    policy = small(model)
    assert waits_of_a_turn(policy, rows=7, tokens=9) - waits_of_a_turn(policy, rows=2, tokens=9) == 9 * 5


def test_a_bias_in_fp32_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that is added outside of the layer, in bf16 under autocast, turns everything after it to fp32."""
    policy = small(model)
    bias = torch.zeros(16, device=DEVICE)
    for layer in policy.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, output: output + bias)
    compute_in(policy, torch.bfloat16)
    assert torch.float32 in kept_in(policy)


@pytest.mark.slow
def test_optimizer_state_and_weights_left_behind_are_found(
    model: Path, tmp_path: Path, on_device: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, model, algo="grpo", updates=1)
    trainer.run()
    assert not strays(trainer)
    state = next(iter(trainer.session.strategy.optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].cpu()
    assert strays(trainer) == ["exp_avg 0"]
    with pytest.raises(RuntimeError, match=OTHER):
        supervised.supervised_step(trainer.session, [([1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0])])
    trainer.session.close()
