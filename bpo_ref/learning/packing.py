"""Packing of rows that share prefixes into one row with every shared prefix once: the trainer's ``--pack tree``.

What this module promises:

1. Log-probabilities, entropies, values and gradients are those of the rows one by one, up to rounding.
2. A token attends to itself and to the tokens before it in its own rows, at its position there.
3. Attention costs as much as for the rows one by one, minus the shared prefixes; no mask of N x N elements is made.
4. `enable` tests a model and refuses one that cannot keep 1. `check` tests it again, with a gradient, on the device
   that trains it, because attention is implemented differently there.

Sorted rows are a depth-first walk over the tree of their tokens. Of each row only the *segment* behind the prefix that
it shares with the row before is laid out, so that the tokens below a token follow it without a gap: token k is an
ancestor of token q if k <= q < end(k). FlexAttention is given these intervals (CUDA); elsewhere each segment is one
call of SDPA over the keys of its own path.

Left out: sliding windows, recurrent layers, positions that are not given as ``position_ids``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from bpo_ref.config import ConfigError

CausalLM: TypeAlias = Any  # of transformers, bare or wrapped by PEFT: they share no base class
Item = TypeVar("Item")

ATTENTION = "bpo_tree"
"""Name of the attention function: SDPA, and packed rows where the mask says so."""
BLOCK = 128
"""Tokens of a block of FlexAttention."""
VARIANTS = 64
"""Number of compiled variants of FlexAttention that a process may have: with and without gradients, autocast or parts,
and at first one for each length. Beyond PyTorch's default of 8, it would fall back to the scores of all token pairs."""


class Unpackable(ConfigError):
    """Raised if a model's attention cannot process packed rows."""


@dataclass(frozen=True)
class Packing:
    """Rows [B, T] laid out in one row of N tokens; the last token of a row predicts nothing and is left out."""

    ids: Tensor
    """Token ids [1, N]."""
    positions: Tensor
    """Position [1, N] of each token in its own rows."""
    segments: Tensor
    """Segments [S, 2]: number of tokens, and length of their prefix on the path before them."""
    source: Tensor
    """Index [B, T-1] of the token that predicts ids[:, 1:]; 0 in padding."""

    @property
    def tokens(self) -> int:
        """Number of tokens, without the padding on CUDA."""
        return int(self.segments.view(-1, 2)[:, 0].sum())

    def mask(self) -> Tensor | BlockMask:
        """The packing as an ``attention_mask``, 4-dimensional so that transformers passes it on unchanged.

        Without a mask, transformers would take positions that start again for packed sequences, and cut forks off
        their prefixes.
        """
        return self.part_mask(0, self.ids.shape[1], None)

    def part_mask(self, first: int, last: int, past: Past | None) -> Tensor | BlockMask:
        """Mask of a part of the row, the tokens from ``first`` to before ``last``, which also see those of ``past``.

        On CUDA ``first`` is a multiple of `BLOCK`, and ``last`` too.
        """
        mask: Tensor | BlockMask
        if self.ids.device.type == "cuda":
            ends = interval_ends(self.segments, self.ids.shape[1]).to(self.ids.device)
            mask = block_mask(ends, first, last)
        else:
            mask = self.segments[None, None].clone()
            _plans[mask] = _plan(self.segments.tolist(), first, last, self.ids.device)
        if past is not None:
            _pasts[mask] = past
        return mask


def pack(ids: Tensor, lengths: Tensor) -> Packing:
    """Pack right-padded ``ids`` [B, T] with ``lengths`` [B], on their device."""
    rows = [row[: length - 1] for row, length in zip(ids.cpu().numpy(), lengths.tolist())]
    laid: list[np.ndarray] = []
    places: list[np.ndarray] = []
    segments: list[tuple[int, int]] = []
    source = np.zeros((ids.shape[0], ids.shape[1] - 1), dtype=np.int64)
    path, before, n = source[0, :0], rows[0][:0], 0
    for i in sorted(range(len(rows)), key=lambda i: rows[i].tolist()):
        row = rows[i]
        shared = common_prefix(before, row)
        if len(row) > shared:
            segments.append((len(row) - shared, shared))
            laid.append(row[shared:])
            places.append(np.arange(shared, len(row)))
            path = np.concatenate([path[:shared], np.arange(n, n + len(row) - shared)])
            n += len(row) - shared
        source[i, : len(row)] = path[: len(row)]
        before = row
    padding = -n % BLOCK if ids.device.type == "cuda" else 0  # few lengths: FlexAttention is compiled for each
    laid.append(np.zeros(padding, dtype=np.int64))
    places.append(np.zeros(padding, dtype=np.int64))
    tokens, positions = (torch.from_numpy(np.concatenate(part))[None].to(ids.device) for part in (laid, places))
    walk = torch.tensor(segments, device=ids.device)
    return Packing(tokens, positions, walk, torch.from_numpy(source).to(ids.device))


def common_prefix(one: Any, other: Any) -> int:
    """Length of the longest common prefix of two sequences of ids."""
    shortest = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:shortest]) != np.asarray(other[:shortest]))
    return int(differ[0]) if len(differ) else shortest


def by_prefix(
    items: Iterable[Item], ids: Callable[[Item], Sequence[int]], most: int, *, joined: bool = False
) -> list[list[Item]]:
    """Batch items whose ids share prefixes: at most ``most`` tokens per batch once packed, or one item.

    With ``joined``, longer items stay together as long as the next one has most of its tokens in common with the one
    before: their batch is meant to be computed in parts.
    """
    batches: list[list[Item]] = []
    room = 0
    before: Sequence[int] = ()
    for item in sorted(items, key=lambda item: list(ids(item))):
        row = ids(item)
        more = len(row) - common_prefix(before, row)
        if batches and (more <= room or (joined and room < 0 and 2 * more < len(row) > most)):
            batches[-1].append(item)
            room -= more
        else:
            batches.append([item])
            room = most - len(row)
        before = row
    return batches


# ----------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class _Plan:
    """Calls of SDPA, one for each segment."""

    queries: list[int]
    """Number of tokens of each segment."""
    keys: list[int]
    """Number of tokens of the path that ends with each segment."""
    paths: Tensor
    """Indices [Σ keys] of the tokens of those paths."""
    masks: list[Tensor | None]
    """Masks [1, 1, queries, keys] of the segments; None: plain causal."""


@dataclass(frozen=True)
class Past:
    """Keys and values of the tokens of a packed row before a part of it, and those of the part, by layer."""

    before: Mapping[int, tuple[Tensor, Tensor]]
    """[1, key-value heads, tokens, head_dim] each; without a layer where nothing is before."""
    taken: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Those of the part, once it was computed; gradient checkpointing computes them again, which changes nothing."""

    def join(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer up to the end of the part."""
        self.taken.setdefault(layer, (key, value))
        if layer not in self.before:
            return key, value
        keys, values = self.before[layer]
        return torch.cat([keys.to(key.dtype), key], dim=2), torch.cat([values.to(value.dtype), value], dim=2)


# Of the masks of forward passes whose graphs are alive: planned once per pass rather than once per layer.
_plans: MutableMapping[Tensor, _Plan] = WeakIdKeyDictionary()
_pasts: MutableMapping[Tensor | BlockMask, Past] = WeakIdKeyDictionary()


def _plan(segments: Sequence[Sequence[int]], first: int, last: int, device: torch.device) -> _Plan:
    """Plan what there is of each segment from token ``first`` to before ``last`` of the packed row."""
    queries, keys, paths, masks, start = [], [], [], [], 0
    path = torch.empty(0, dtype=torch.long)
    for length, shared in segments:
        path = torch.cat([path[:shared], torch.arange(start, start + length)])
        begin, end = max(first, start), min(last, start + length)
        if begin < end:
            before, upto = shared + begin - start, shared + end - start
            queries.append(end - begin)
            keys.append(upto)
            paths.append(path[:upto])
            causal = None if not before else torch.ones(end - begin, upto, dtype=torch.bool).tril(before)[None, None]
            masks.append(causal if causal is None else causal.to(device))
        start += length
    return _Plan(queries, keys, torch.cat(paths).to(device), masks)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers: SDPA, unless the mask is that of a `Packing`.

    Args:
        module: the attention layer.
        query: [1, heads, N, head_dim]
        key: [1, key-value heads, N, head_dim]
        value: [1, key-value heads, N, head_dim]
        attention_mask: see `Packing.mask`.
        options: dropout, scale and others of the layer.
    """
    if attention_mask is not None and (past := _pasts.get(attention_mask)) is not None:
        layer: Any = module.layer_idx
        key, value = past.join(layer, key, value)
    if isinstance(attention_mask, BlockMask):
        # Under autocast, rotary positions leave queries and keys in fp32; FlexAttention wants one type, or casts later.
        query, key = query.to(value.dtype), key.to(value.dtype)
        return flex_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if attention_mask is None or attention_mask.dtype != torch.long:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if attention_mask not in _plans:  # a copy of the mask, made on its way through a wrapper of the model
        _plans[attention_mask] = _plan(attention_mask[0, 0].tolist(), 0, query.shape[2], attention_mask.device)
    plan = _plans[attention_mask]
    keys, values = (torch.split(part.index_select(2, plan.paths), plan.keys, dim=2) for part in (key, value))
    parts = zip(torch.split(query, plan.queries, dim=2), keys, values, plan.masks)
    return torch.cat([sdpa_attention_forward(module, *part, **options)[0] for part in parts], dim=1), None


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def interval_ends(segments: Tensor, n: int) -> Tensor:
    """Index, for each token [n], of the first later one that is not its descendant; padding stands alone."""
    ends = torch.arange(1, n + 1)
    path, start = torch.empty(0, dtype=torch.long), 0
    for length, shared in segments.tolist():
        ends[path[shared:]] = start
        path = torch.cat([path[:shared], torch.arange(start, start + length)])
        start += length
    ends[path] = start
    return ends


def block_mask(ends: Tensor, begin: int = 0, end: int | None = None) -> BlockMask:
    """Build FlexAttention's mask of ``k <= q < ends[k]`` from the smallest and largest end of each block of keys.

    Args:
        ends: [N], N a multiple of `BLOCK`.
        begin: first of the queries, a multiple of `BLOCK`.
        end: one behind the last of them, and of the keys. Default: N.
    """
    n = len(ends) if end is None else end
    blocks, starts = ends[:n].view(-1, BLOCK), torch.arange(0, n, BLOCK, device=ends.device)
    first = starts[begin // BLOCK :, None]  # of each block of queries
    earlier = starts < first  # [query blocks, key blocks]
    full = earlier & (blocks.amin(dim=1) >= first + BLOCK)
    partial = (earlier & (blocks.amax(dim=1) > first) & ~full) | (starts == first)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Count and list the key blocks of each query block, the chosen ones first."""
        order = chosen.int().argsort(dim=1, descending=True, stable=True).int()
        return chosen.sum(dim=1, dtype=torch.int32)[None, None], order[None, None]

    def allowed(_: Tensor, __: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q + begin) & (q + begin < ends[k])

    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(n - begin, n)
    )


# ------------------------------------------------------------------------------------------------------------ checking


def enable(model: CausalLM) -> None:
    """Install this module's attention in a model, which then accepts packed rows in addition to other input.

    Raises:
        Unpackable: a layer's attention is not full, cannot be replaced, or does not keep to the mask.
    """
    layers = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if layers != {DynamicLayer.__name__}:
        raise Unpackable(f"pack: tree needs full attention in every layer, found {sorted(layers)}; set pack=flat")
    if torch.cuda.is_available():
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION)
    except (ValueError, AttributeError) as error:
        raise Unpackable(f"pack: tree: the attention cannot be replaced: {error}; set pack=flat") from error
    if model.config._attn_implementation != ATTENTION:
        raise Unpackable(f"pack: tree: the attention of {type(model).__name__} cannot be replaced; set pack=flat")
    try:
        _refuse(model, "output", *packing_error(model))
    except Unpackable:
        model.set_attn_implementation(before)
        raise


def check(model: CausalLM) -> None:
    """Test an enabled model with a gradient, on its present device and with its present weights.

    All processes have to call it where the weights are sharded over them.

    Raises:
        Unpackable: packed rows have another output or another gradient than flat ones.
    """
    _refuse(model, "output", *packing_error(model))
    _refuse(model, "gradient", *gradient_error(model))


def _refuse(model: CausalLM, what: str, apart: float, dtype: torch.dtype) -> None:
    bound = {"output": 1e-3, "gradient": 3e-3} if dtype == torch.float32 else {"output": 0.05, "gradient": 0.2}
    if apart < bound[what]:
        return
    scale = "what the context changes" if what == "output" else "its norm"
    raise Unpackable(
        f"pack: tree: expected of {type(model).__name__} on {model.device.type} the same {what} packed as flat, found "
        f"them apart by {apart:.2g} of {scale}; set pack=flat"
    )


@torch.no_grad()
def packing_error(model: CausalLM) -> tuple[float, torch.dtype]:
    """Difference of packed and flat logits of a small tree, relative to the change that losing the prefix would make.

    It is below 1e-6 in fp32 and below 0.01 in bf16. A model that ignores the mask gives about 1; one that ignores the
    positions gives 0.002 or more.

    Returns:
        The difference, and the dtype of the logits.
    """
    with _tried(model) as (ids, packing):
        flat = _flat(model, ids)
        cut = _flat(model, ids[:, 8:])
        logits = _packed(model, packing)
    apart = (logits[packing.source].float() - flat.float()).square().mean().sqrt()
    effect = (cut.float() - flat[:, 8:].float()).square().mean().sqrt()
    return float(apart / effect), logits.dtype


@torch.enable_grad()
def gradient_error(model: CausalLM) -> tuple[float, torch.dtype]:
    """Difference of packed and flat gradients of the embeddings of a small tree, relative to their norm.

    The weights' own gradients are left alone: where weights are sharded over processes, they would be reduced.
    """
    with _tried(model) as (ids, packing), _embeddings(model) as embedded:
        flat, packed = _flat(model, ids), _packed(model, packing)[packing.source]
        weights = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat.device)
        whole, mine = (
            torch.autograd.grad((logits.float() * weights).sum(), leaf)[0].float()
            for logits, leaf in zip((flat, packed), embedded, strict=True)
        )
    expected = torch.zeros_like(mine[0]).index_add_(0, packing.source.flatten(), whole[:, :-1].flatten(0, 1))
    return float((mine[0] - expected).norm() / expected.norm()), flat.dtype


@contextmanager
def _tried(model: CausalLM) -> Iterator[tuple[Tensor, Packing]]:
    """Pack a small tree of rows for a test of the model; a model that fails on it cannot be packed."""
    stream = np.random.default_rng(0)
    trunk, *ends = stream.integers(0, model.config.get_text_config().vocab_size, (6, 8)).tolist()
    rows = [trunk + ends[0], trunk + ends[1], trunk[:4] + ends[2] + ends[3][:4], ends[4] + trunk]
    device, training = model.device, model.training
    ids, lengths = torch.tensor(rows, device=device), torch.full((len(rows),), len(rows[0]), device=device)
    model.eval()
    try:
        yield ids, pack(ids, lengths)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise Unpackable(f"pack: tree: {type(model).__name__} fails on a packed row: {error}; set pack=flat") from error
    finally:
        model.train(training)


def _flat(model: CausalLM, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1]
    return logits


def _packed(model: CausalLM, packing: Packing) -> Tensor:
    logits: Tensor = model(
        input_ids=packing.ids, position_ids=packing.positions, attention_mask=packing.mask(), use_cache=False
    ).logits[0]
    return logits


@contextmanager
def _embeddings(model: CausalLM) -> Iterator[list[Tensor]]:
    """Capture the embeddings of the model's forward passes as leaves of their graphs."""
    leaves: list[Tensor] = []

    def cut(_: Any, __: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hook = model.get_input_embeddings().register_forward_hook(cut)
    try:
        yield leaves
    finally:
        hook.remove()
