"""Packed rows: the same logits, losses and gradients as the rows one by one, with each shared prefix computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bpo_ref.learning import packing, parts
from bpo_ref.learning.models import ActorCritic, checkpoint_layers
from bpo_ref.learning.packing import BLOCK, Unpackable, block_mask, by_prefix, interval_ends, pack
from bpo_ref.sampling import generate
from bpo_ref.sampling.generate import forward

VOCABULARY = 40
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, **SHAPE))


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, hidden_size=32, **SHAPE))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=128)).eval()


def built(build: Callable[[], Any]) -> Any:
    """Weights far enough from 0 for a wrong context to be noticed."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return model


def grown(seed: int, *, roots: int = 2, forks: int = 3) -> list[list[int]]:
    """Rows of trees with several roots, forks of forks, ends of all lengths, twins and a prefix of another."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(2):
        prompt = rng.integers(0, VOCABULARY, 7).tolist()
        tree = [prompt + rng.integers(0, VOCABULARY, rng.integers(8, 20)).tolist() for _ in range(roots)]
        for _ in range(forks):
            parent = tree[rng.integers(len(tree))]
            at = int(rng.integers(1, len(parent)))
            tree.append(parent[:at] + rng.integers(0, VOCABULARY, rng.integers(1, 15)).tolist())
        rows += tree
    return [*rows, rows[0], rows[1][:9]]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def measured(
    model: Any, ids: Tensor, lengths: Tensor, where: Tensor, *, packed: bool, most: int | None = None
) -> tuple[list[Tensor], Tensor]:
    """Outputs, and the gradient of a weighted sum of them over the tokens that count."""
    model.zero_grad()
    parts = forward(model, ids, lengths, where=where, temperature=0.7, packed=packed, most=most)
    found = [part for part in parts if part is not None]
    weights = torch.randn(len(found), *where.shape, generator=torch.Generator().manual_seed(1))
    sum((part * weight).sum() for part, weight in zip(found, weights)).backward()
    return found, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("build", [llama, qwen2, gpt2])
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_is_flat(build: Callable[[], Any], critic: bool, seed: int) -> None:
    model = built(build)
    ids, lengths = padded(grown(seed))
    where = torch.rand(len(ids), ids.shape[1] - 1, generator=torch.Generator().manual_seed(seed)) < 0.4
    whole = ActorCritic(model) if critic else model
    if critic:
        torch.nn.init.normal_(whole.value_head.weight)
    flat, flat_gradient = measured(whole, ids, lengths, where, packed=False)
    packing.enable(model)
    tree, tree_gradient = measured(whole, ids, lengths, where, packed=True)
    again, _ = measured(whole, ids, lengths, where, packed=False)  # it still takes padded rows
    assert len(flat) == 2 + critic and flat[0].abs().max() > 1
    for one, other, unpacked in zip(flat, tree, again):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(unpacked, one, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tree_gradient, flat_gradient, atol=1e-5 * float(flat_gradient.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("most", [1, 7, 50])
def test_a_row_in_parts_is_the_row(build: Callable[[], Any], most: int, checkpointed: bool) -> None:
    """Values and gradients of a tree that is cut into parts anywhere, within segments and between them."""
    model = built(build)
    ids, lengths = padded(grown(0))
    where = torch.rand(len(ids), ids.shape[1] - 1, generator=torch.Generator().manual_seed(0)) < 0.4
    whole = ActorCritic(model)
    torch.nn.init.normal_(whole.value_head.weight)
    packing.enable(model)
    if checkpointed:
        checkpoint_layers(model)
    one, one_gradient = measured(whole, ids, lengths, where, packed=True)
    split, split_gradient = measured(whole, ids, lengths, where, packed=True, most=most)
    for mine, theirs in zip(split, one, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(split_gradient, one_gradient, atol=1e-5 * float(one_gradient.abs().max()), rtol=1e-5)


def test_a_row_in_parts_needs_the_memory_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of the model is over more tokens than allowed, and of other passes no activations are held."""
    model = built(llama)
    packing.enable(model)
    trunk = np.random.default_rng(0).integers(0, VOCABULARY, 400).tolist()
    ids, lengths = padded([trunk, trunk[:350] + trunk[:50], trunk[:300] + trunk[100:200]])
    where = torch.ones(3, 399, dtype=torch.bool)
    passes: list[int] = []
    saved: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (saved.append(x.numel() * x.is_floating_point()), x)[1], lambda x: x
    ):
        forward(model, ids, lengths, where=where, packed=True, most=100)
    hook.remove()
    assert max(passes) <= 100 and sum(passes) == 399 + 49 + 99
    assert sum(saved) == 0  # the backward pass computes each part again


def test_gradients_of_keys_and_values_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's are added up as soon as they are known, not side by side for all layers."""
    model = built(llama)
    packing.enable(model)
    leaves: list[Tensor] = []
    beside: list[int] = []

    def watched(before: dict[int, tuple[Tensor, Tensor]]) -> packing.Past:
        leaves.extend(state for states in before.values() for state in states if state.requires_grad)
        return packing.Past(before)

    monkeypatch.setattr(parts, "Past", watched)
    ids, lengths = padded(grown(0))
    logps, *_ = forward(model, ids, lengths, packed=True, most=7)
    last = model.get_input_embeddings().weight
    last.register_post_accumulate_grad_hook(lambda _: beside.append(sum(leaf.grad is not None for leaf in leaves)))
    logps.sum().backward()
    assert leaves and len(beside) > 1 and max(beside) == 0


@pytest.mark.parametrize("begin", [0, 128, 384])
def test_blocks_of_a_part_are_rows_of_the_whole(begin: int) -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, VOCABULARY, 300).tolist()
    packed = pack(*padded([trunk, trunk[:130] + trunk[:280], [39, *trunk]]))
    n = -(-packed.ids.shape[1] // BLOCK) * BLOCK
    ends, end = interval_ends(packed.segments, n), begin + 2 * BLOCK
    whole, part = block_mask(ends), block_mask(ends, begin, end)
    rows = slice(begin // BLOCK, end // BLOCK)
    assert torch.equal(part.to_dense()[0, 0], whole.to_dense()[0, 0, rows, : end // BLOCK])
    query, key, value = torch.randn(3, 1, 2, n, 16)
    with torch.no_grad():
        found = flex_attention(query[:, :, begin:end], key[:, :, :end], value[:, :, :end], block_mask=part)
        expected = flex_attention(query, key, value, block_mask=whole)[:, :, begin:end]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_padding_does_not_make_a_row_too_long_for_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in parts is computed bare of data parallelism: the last batch of a step never is, `micro_batches` says."""
    called: list[int] = []

    def padded_as_on_cuda(ids: Tensor, lengths: Tensor) -> packing.Packing:
        found = pack(ids, lengths)
        more = (0, -found.ids.shape[1] % BLOCK)
        return replace(found, ids=pad(found.ids, more), positions=pad(found.positions, more))

    def noted(passes: int) -> Callable[..., list[Tensor]]:
        return lambda *_, **__: called.append(passes) or [torch.zeros(12), torch.zeros(12)]

    monkeypatch.setattr(generate, "pack", padded_as_on_cuda)
    monkeypatch.setattr(generate, "in_parts", noted(0))
    monkeypatch.setattr(generate, "_measured", noted(1))
    ids, lengths = torch.arange(13)[None], torch.tensor([13])
    for most in (11, 12, 13):
        forward(None, ids, lengths, packed=True, most=most)
    assert called == [0, 1, 1]


def test_long_rows_stay_together_where_they_share_most_of_their_tokens() -> None:
    trunk = list(range(100))
    tree = [trunk, [*trunk[:80], *range(200, 230)], [*trunk[:60], *range(300, 345)], [*trunk[:30], *range(400, 480)]]
    short = [[500, 501], [500, 502]]
    assert [len(batch) for batch in by_prefix([*tree, *short], list, 40)] == [1] * 4 + [2]
    batches = by_prefix([*tree, *short], list, 40, joined=True)
    assert sorted(map(len, batches)) == [1, 2, 3]
    assert sorted(row for batch in batches for row in batch) == sorted([*tree, *short])


def test_every_prefix_is_laid_out_once() -> None:
    rows = grown(3)
    ids, lengths = padded(rows)
    packed = pack(ids, lengths)
    prefixes = {tuple(row[:n]) for row in rows for n in range(1, len(row))}
    assert packed.ids.shape == (1, len(prefixes)) and len(prefixes) < sum(map(len, rows)) / 1.5
    for row, source in zip(rows, packed.source):
        inside = source[: len(row) - 1]
        assert packed.ids[0, inside].tolist() == row[:-1]
        assert packed.positions[0, inside].tolist() == list(range(len(row) - 1))


def test_a_token_sees_its_own_prefix_and_nothing_else() -> None:
    rows = grown(4)
    packed = pack(*padded(rows))
    n = packed.ids.shape[1]
    seen = torch.zeros(n, n, dtype=torch.bool)
    for row, source in zip(rows, packed.source.tolist()):
        for depth in range(len(row) - 1):
            seen[source[depth], source[: depth + 1]] = True
    ends, q = interval_ends(packed.segments, n), torch.arange(n)[:, None]
    assert torch.equal((torch.arange(n) <= q) & (q < ends), seen)


def test_flex_attentions_blocks_are_those_of_the_intervals() -> None:
    """Forward only: FlexAttention has no gradients on a CPU."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, VOCABULARY, 300).tolist()
    rows = [trunk, trunk[:130] + trunk[:280], trunk[:200] + trunk[:90], trunk[:7] + trunk[:40], [39, *trunk]]
    packed = pack(*padded(rows))
    n = -(-packed.ids.shape[1] // BLOCK) * BLOCK
    ends = interval_ends(packed.segments, n)
    mask = block_mask(ends)
    full = create_block_mask(lambda b, h, q, k: (k <= q) & (q < ends[k]), None, None, n, n, device="cpu")
    assert torch.equal(mask.to_dense(), full.to_dense())
    assert mask.full_kv_num_blocks is not None and full.full_kv_num_blocks is not None
    assert torch.equal(mask.full_kv_num_blocks, full.full_kv_num_blocks) and mask.full_kv_num_blocks.any()
    query, key, value = torch.randn(3, 1, 2, n, 16)
    with torch.no_grad():
        found = flex_attention(query, key, value, block_mask=mask)
        q = torch.arange(n)[:, None]
        dense = (torch.arange(n) <= q) & (q < ends)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_batches_hold_every_row_once_within_the_limit_and_prefixes_together() -> None:
    rows = [row for seed in range(4) for row in grown(seed)]
    for most in (1, 60, 200, 10**6):
        batches = by_prefix(rows, list, most)
        assert sorted(row for batch in batches for row in batch) == sorted(rows)
        for batch in batches:
            prefixes = {tuple(row[:n]) for row in batch for n in range(1, len(row) + 1)}
            assert len(batch) == 1 or len(prefixes) <= most
    assert len(by_prefix(rows, list, 10**6)) == 1
    assert len(by_prefix(rows, list, 60)) < len(rows) / 2


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = built(llama)
    ids, lengths = padded(grown(0))
    where = torch.ones(len(ids), ids.shape[1] - 1, dtype=torch.bool)
    packing.enable(model)
    _, plain = measured(model, ids, lengths, where, packed=True)
    model.gradient_checkpointing_enable()
    model.train()
    _, checkpointed = measured(model, ids, lengths, where, packed=True)
    torch.testing.assert_close(checkpointed, plain)


def test_adapters_and_their_reference_are_packed() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(built(llama), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids, lengths = padded(grown(0))
    where = torch.ones(len(ids), ids.shape[1] - 1, dtype=torch.bool)
    packing.enable(model)
    flat, flat_gradient = measured(model, ids, lengths, where, packed=False)
    tree, tree_gradient = measured(model, ids, lengths, where, packed=True)
    torch.testing.assert_close(tree[0], flat[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tree_gradient, flat_gradient, atol=1e-5 * float(flat_gradient.abs().max()), rtol=1e-5)
    with model.disable_adapter(), torch.no_grad():
        reference = [forward(model, ids, lengths, where=where, packed=packed)[0] for packed in (False, True)]
    torch.testing.assert_close(*reference, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(reference[0], tree[0], atol=0.1)


def test_half_precision_is_close() -> None:
    model = built(llama).bfloat16()
    ids, lengths = padded(grown(0))
    packing.enable(model)
    with torch.no_grad():
        flat, tree = (forward(model, ids, lengths, packed=packed)[0] for packed in (False, True))
    assert (flat - tree).abs().mean() < 0.02 * flat.abs().mean()


# Refusals.


@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: MistralForCausalLM(MistralConfig(vocab_size=40, hidden_size=32, sliding_window=4, **SHAPE)), "full"),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=2)), "replaced"),
    ],
)
def test_attention_that_cannot_be_packed_is_refused(model: Callable[[], Any], words: str) -> None:
    with pytest.raises(Unpackable, match=words):
        packing.enable(model())


def test_a_model_that_does_not_keep_to_positions_is_refused_by_trying_it_out() -> None:
    model = built(qwen2)
    before = model.config._attn_implementation
    whole = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: whole(x, torch.arange(x.shape[1])[None])
    with pytest.raises(Unpackable, match="apart by"):
        packing.enable(model)
    assert model.config._attn_implementation == before


def test_a_model_that_does_not_keep_to_the_mask_is_refused_by_trying_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(llama)
    monkeypatch.setattr(packing.Packing, "mask", lambda packed: torch.ones_like(packed.ids))  # plainly causal
    with pytest.raises(Unpackable, match="apart by"):
        packing.enable(model)


def test_attention_that_is_wrong_where_the_model_trains_is_refused_after_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a device with attention of its own: right while the model is tried out at first."""
    import wordgame

    from bpo_ref.distributed.replicated import Replicated
    from bpo_ref.train import Args, Trainer

    right, place = packing.sdpa_attention_forward, Replicated.place

    def blurred(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        output, _ = right(module, query, key, value, mask, **options)
        return (output if query.shape[0] > 1 else output * 0.9), None  # of packed rows, which are one

    def placed(strategy: Replicated, *given: Any) -> None:
        place(strategy, *given)
        monkeypatch.setattr(packing, "sdpa_attention_forward", blurred)

    monkeypatch.setattr(Replicated, "place", placed)
    with pytest.raises(Unpackable, match="same output packed as flat"):
        Trainer(Args(env_id=wordgame.ENV_ID, eval_kwargs=(), sft_episodes=4, context=160, out=str(tmp_path)))


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is not."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 0.9 * gradient


def test_a_gradient_that_is_wrong_where_the_output_is_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(llama)
    packing.enable(model)
    packing.check(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    right = packing.sdpa_attention_forward

    def bent(module: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        output, _ = right(module, query, key, *rest, **options)
        return (output if query.shape[0] > 1 else WrongGradient.apply(output)), None

    monkeypatch.setattr(packing, "sdpa_attention_forward", bent)
    with pytest.raises(Unpackable, match="same gradient packed as flat"):
        packing.check(model)


@pytest.mark.parametrize("build", [llama, qwen2, gpt2])
def test_a_model_in_half_precision_passes_the_check(build: Callable[[], Any]) -> None:
    model = build().bfloat16()
    packing.enable(model)
    packing.check(model)


# Whole updates.


@pytest.mark.parametrize(
    "options",
    [
        {"algo": "bpo-tree"},
        {"algo": "bpo-forest", "aggregation": "path", "ratio": "sequence"},
        {"algo": "bpo-split", "roots": 2, "ratio": "step", "kl": 0.1},
        {"algo": "grpo", "kl": 0.1, "kl_in": "reward"},
        {"algo": "ppo", "gae_steps": "token"},
        {"algo": "bpo-tree", "baseline": "critic", "aggregation": "constant"},
    ],
)
def test_an_update_packed_is_an_update_flat(tmp_path: Path, options: dict[str, Any]) -> None:
    """Rollouts of a text game, cut-off answers among them; the loss and gradient that they give."""
    found = [gradient_of(tmp_path / pack, {**options, "pack": pack}) for pack in ("flat", "tree")]
    (flat_loss, flat), (tree_loss, tree) = found
    assert flat.abs().max() > 1e-3
    assert tree_loss == pytest.approx(flat_loss, abs=1e-5)
    torch.testing.assert_close(tree, flat, atol=1e-5, rtol=1e-4)


def gradient_of(out: Path, options: dict[str, Any]) -> tuple[float, Tensor]:
    """Loss and gradient of the first update."""
    import wordgame

    from bpo_ref.train import Args, Trainer, assign_credit

    plain: dict[str, Any] = {"env_id": wordgame.ENV_ID, "max_turns": 6, "context": 160, "max_new_tokens": 4}
    sizes: dict[str, Any] = {"prompts": 3, "width": 2, "sft_episodes": 12, "lr": 1e-2}
    trainer = Trainer(Args(**{**plain, **sizes, "out": str(out), **options}))
    try:
        if trainer.args.kl:
            with torch.no_grad():
                for parameter in trainer.session.policy.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        if trainer.args.critic:
            torch.nn.init.normal_(trainer.session.model.value_head.weight, generator=torch.Generator().manual_seed(2))
        trees = trainer._rollouts((0,))
        assert any(edge.action.data.truncated for tree in trees for edge in tree.edges())
        for place, path in enumerate(path for tree in trees for path in tree.paths):
            path.edges[-1].reward += float(place % 3)
        assign_credit(trees, trainer.args, trainer.session.memory, trainer.session.gather)
        gradients: list[Tensor] = []
        trainer.session.optimizer_step = lambda: gradients.append(  # type: ignore[method-assign]
            torch.cat([p.grad.flatten() for p in trainer.session.model.parameters() if p.grad is not None])
        )
        trainer.session.grad_norm = 0.0
        return trainer._optimize(trees)["update/loss"], gradients[0].clone()
    finally:
        trainer.session.close()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
