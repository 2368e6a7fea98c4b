"""Batched sampling of turns with transformers, and the trainer's forward pass over the same tokens.

What this module promises:

1. A row's context is one list of ids that only ever grows: sampled ids are kept as drawn, and a fork begins with
   an exact copy of its parent's.
2. `Generation.logps` are those that `token_logps` computes for the same ids and weights, up to rounding.
3. A row's tokens depend on its own context and its own random stream, not on the rest of the batch.
4. Padding is known by lengths, never by token ids, so a pad token equal to the eos token does no harm.
5. Keys and values of a token are kept once per session, however many rows have the token, for as long as any row
   has it. Attention needs them side by side: for one layer at a time, and for whole turns only as far as `JOINED` goes.

Left out: sliding-window and recurrent layers, images, inference servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from bpo_ref.learning.models import Output
from bpo_ref.learning.packing import pack
from bpo_ref.learning.parts import in_parts

CausalLM: TypeAlias = Any  # of transformers, bare or wrapped by PEFT: they share no base class


JOINED = 2**30
"""Limit in bytes of the contiguous copy of keys and values per turn: the layers that fit are copied once per turn, the
others at every token."""
SLACK = 16
"""Memory for keys and values grows by 1/SLACK or more at a time, because growing copies a layer."""


class ContextOverflow(RuntimeError):
    """Raised if a row has no position left for another token; `SamplingSession.room` tells so before it happens."""


class StaleSession(RuntimeError):
    """Raised if the weights changed while a session held keys and values computed with the old ones."""


@dataclass(frozen=True)
class Generation:
    """One sampled assistant turn, with what is known about each of its tokens.

    Log-probabilities and entropies, in nats, are those of the tempered distribution over the full vocabulary. Both are
    empty where the backend does not measure them.
    """

    ids: list[int]  # with the stop token, if one was sampled
    logps: list[float]
    entropies: list[float]
    truncated: bool  # no stop token within `max_new_tokens` or the room left
    sampler_logps: list[float] = field(default_factory=list)  # as sampled, where `logps` are measured otherwise


class Generator:
    """Sampler of turns from a causal language model by a batched loop over transformers' forward pass.

    For mixed precision, call it under `torch.autocast`; the softmax is always computed in fp32.

    Args:
        model: to sample from.
        stop_ids: tokens that end a turn.
        max_new_tokens: largest number of tokens per turn.
        temperature: temperature of the sampling.
        max_rows: largest number of rows in one forward pass.
        context_limit: largest number of tokens per row; default: the model's ``max_position_embeddings``.
        joined: see `JOINED`.

    Raises:
        ValueError: the temperature is not positive.
        NotImplementedError: a layer of the model has other than full attention.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        max_rows: int = 256,
        context_limit: int | None = None,
        joined: int = JOINED,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}; for greedy turns pass no rngs")
        layers = DynamicCache(config=model.config).layers
        kinds = {type(layer) for layer in layers}
        if kinds != {DynamicLayer}:  # windows are counted in columns of the cache, and ragged rows leave holes
            raise NotImplementedError(f"every layer needs full attention, got {sorted(map(str, kinds))}")
        self.model = model
        self.cache_name = cache_name(model)
        self.layers = len(layers)
        self.stop_ids = frozenset(stop_ids)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.max_rows = max_rows
        self.context_limit: int = context_limit or model.config.max_position_embeddings
        self.joined = joined

    def open(self, contexts: Sequence[Sequence[int]] = ()) -> SamplingSession:
        """Open a session whose rows 0, 1, ... begin with `contexts`, the full ids of each so far."""
        session = SamplingSession(self)
        for context in contexts:
            session.add(context)
        return session


def cache_name(model: CausalLM) -> str:
    """Name of a model's argument for keys and values; transformers 5.24 renamed ``past_key_values`` to ``cache``."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT, whose forward takes any
    return "cache" if "cache" in signature(bare.forward).parameters else "past_key_values"


class SamplingSession:
    """Conversations continued turn by turn, with keys and values of the tokens that the model has read.

    Those are in one store for all rows; a row lists where in it its tokens are, and a fork lists the same places as its
    parent. So rows of any length come, go and fork at any time, what they share stays shared, and padding never piles
    up. After an optimizer step, open a new session.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._weights = weights_version(generator.model)
        self._store = _Store(generator.layers)
        self._rows: dict[int, _Row] = {}
        self._opened = 0
        self.prefilled = 0
        """Number of context tokens that the model has read."""
        self.reused = 0
        """Number of context tokens taken from other rows instead of being read."""

    def add(self, context: Sequence[int]) -> int:
        """Add a row that begins with `context`, which is fed with its first turn; returns its number."""
        return self._insert(_Row(list(context)))

    def fork(self, row: int, *, length: int | None = None) -> int:
        """Fork a row: a new one with the first `length` tokens of `row` (default: all), sharing the cache."""
        parent = self._rows[row]
        fork = _Row(parent.ids[:length])
        fork.places = parent.places[: max(0, len(fork.ids) - 1)]  # the last token is fed again for its logits
        self._store.share(fork.places)
        self.reused += fork.cached
        return self._insert(fork)

    def prefill(self, rows: Sequence[int]) -> None:
        """Read all but the last token of these rows, of those that have room for a turn."""
        self._check()
        most = self._generator.max_rows
        able = [self._rows[row] for row in rows if self.room(row) >= 1]
        pending = [row for row in able if row.cached < len(row.ids) - 1]
        with torch.inference_mode(), evaluating(self._generator.model):
            for batch in (pending[i : i + most] for i in range(0, len(pending), most)):
                self.prefilled += sum(len(row.ids) - 1 - row.cached for row in batch)
                _read(self._generator, self._store, batch)

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens of the environment to a row; they are fed with its next turn."""
        self._rows[row].ids.extend(ids)

    def drop(self, rows: Sequence[int]) -> None:
        """Forget finished rows; memory of tokens that no other row has becomes free."""
        for row in rows:
            self._store.release(self._rows.pop(row).places)
        if not self._rows:
            self._store = _Store(self._generator.layers)

    def context(self, row: int) -> list[int]:
        """Exact ids of a row so far."""
        return list(self._rows[row].ids)

    def room(self, row: int) -> int:
        """Number of tokens that still fit into a row's context; below 1 it cannot take another turn."""
        return self._generator.context_limit - len(self._rows[row].ids)

    def generate(self, rows: Sequence[int], rngs: Sequence[np.random.Generator] | None = None) -> list[Generation]:
        """Sample one turn of each row, truncated if the row becomes full.

        Args:
            rows: numbers of the rows.
            rngs: random generator of each row, which gives one uniform number per token. None: the most probable
                tokens.

        Raises:
            ContextOverflow: a row has no room left; nothing was drawn.
            StaleSession: the weights have changed since the session was opened; nothing was drawn.
        """
        generator = self._generator
        self._check()
        if full := [row for row in rows if self.room(row) < 1]:
            raise ContextOverflow(f"rows {full} have reached the limit of {generator.context_limit} tokens")
        streams = [None] * len(rows) if rngs is None else rngs
        drafts = [
            _Draft(self._rows[row], rng, min(generator.max_new_tokens, self.room(row)))
            for row, rng in zip(rows, streams, strict=True)
        ]
        self.prefilled += sum(len(draft.row.ids) - draft.row.cached for draft in drafts)
        with torch.inference_mode(), evaluating(generator.model):
            for i in range(0, len(drafts), generator.max_rows):
                _sample(generator, self._store, drafts[i : i + generator.max_rows])
        return [draft.finished(generator.stop_ids) for draft in drafts]

    def _check(self) -> None:
        if weights_version(self._generator.model) != self._weights:
            raise StaleSession("the weights changed after this session was opened; open a new one")

    def _insert(self, row: _Row) -> int:
        if not row.ids:
            raise ValueError("a row needs at least one token to begin with")
        self._rows[self._opened] = row
        self._opened += 1
        return self._opened - 1


@dataclass
class _Row:
    """A conversation and the places of its cached tokens; later tokens are still to be fed."""

    ids: list[int]
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Indices in the session's `_Store`, token by token."""

    @property
    def cached(self) -> int:
        return len(self.places)


class _Store:
    """Keys and values of the tokens of a session, [places, heads, head_dim] for each layer.

    Place 0 is that of padding, and holds zeros: it is masked, but 0 times what was there has to be a number.
    """

    def __init__(self, layers: int) -> None:
        self.parts: list[tuple[Tensor, ...]] = [()] * layers  # made where a layer first tells its shape
        self._owners = np.ones(1, dtype=np.int32)  # rows that have the token at a place
        self._free = np.zeros(0, dtype=np.int64)

    def take(self, count: int) -> np.ndarray:
        """Allocate this many places, of one owner each."""
        if count > len(self._free):
            size = len(self._owners)
            grown = max(size + count - len(self._free), size + size // SLACK)
            self._free = np.concatenate([self._free, np.arange(size, grown)])
            self._owners = np.concatenate([self._owners, np.zeros(grown - size, dtype=np.int32)])
        taken, self._free = self._free[:count], self._free[count:]
        self._owners[taken] = 1
        return taken

    def share(self, places: np.ndarray) -> None:
        """Add an owner to tokens that another row shares."""
        self._owners[places] += 1

    def release(self, places: np.ndarray) -> None:
        """Remove an owner from tokens, and free those without one."""
        self._owners[places] -= 1
        self._free = np.concatenate([places[self._owners[places] == 0], self._free])

    def layer(self, number: int, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a layer's memory for keys and values like these [B, heads, n, head_dim], of all places so far.

        Layer by layer, so that two copies of no more than one are held while it grows.
        """
        size, parts = len(self._owners), self.parts[number]
        if not parts or len(parts[0]) < size:
            grown = []
            for i, states in enumerate(like):
                part = states.new_zeros(size, states.shape[1], states.shape[3])
                if parts:
                    part[: len(parts[i])] = parts[i]
                grown.append(part)
            self.parts[number] = tuple(grown)
        return self.parts[number]


@dataclass
class _Draft:
    """The turn being sampled for a row: at most `limit` tokens, from the stream `rng` (None: greedy)."""

    row: _Row
    rng: np.random.Generator | None
    limit: int
    logps: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    live: bool = True

    def append(self, token: int, logp: float, entropy: float) -> None:
        self.row.ids.append(token)
        self.logps.append(logp)
        self.entropies.append(entropy)

    def finished(self, stop_ids: frozenset[int]) -> Generation:
        ids = self.row.ids[-len(self.logps) :]
        return Generation(ids, self.logps, self.entropies, truncated=ids[-1] not in stop_ids)


class _Batch:
    """Rows of one forward pass, padded on the left."""

    def __init__(self, generator: Generator, store: _Store, rows: Sequence[_Row], *, room: int, joined: int) -> None:
        """Begin a batch. `room`: tokens that will be fed, padding included; `joined`: see `JOINED`."""
        self.store, self.rows, self.joined = store, rows, joined
        self.device = generator.model.device
        self.width = self.used = max(row.cached for row in rows)
        places = np.zeros((len(rows), self.width + room), dtype=np.int64)
        for row, listed in zip(rows, places):
            listed[self.width - row.cached : self.width] = row.places
        self.places = places
        self.table = torch.from_numpy(places.copy()).to(self.device)
        self.layers = [_Layer(self, number) for number in range(generator.layers)]
        self.cache = Cache(layers=self.layers)

    def feed(self, fed: np.ndarray) -> Tensor:
        """Make room for tokens [B, n], of which those that are not `fed` are padding; returns the mask of all so far.

        They are there once the model has been called.
        """
        new = np.zeros(fed.shape, dtype=np.int64)
        new[fed] = self.store.take(int(fed.sum()))
        after = self.used + fed.shape[1]
        self.places[:, self.used : after] = new
        self.table[:, self.used : after] = torch.from_numpy(new).to(self.device)
        self.used = after
        self.listed = self.table[:, :after].flatten()
        self.new = torch.from_numpy(new[fed]).to(self.device)
        self.fed = None if fed.all() else torch.from_numpy(np.flatnonzero(fed)).to(self.device)
        return (self.table[:, :after] > 0).long()

    def end(self) -> None:
        """Store the keys and values fed for every row, without padding."""
        rows, columns = np.nonzero(self.places[:, self.width : self.used])
        at = torch.from_numpy(rows).to(self.device), torch.from_numpy(columns + self.width).to(self.device)
        for layer in self.layers:
            layer.keep(at, self.table[at])
        for row, listed in zip(self.rows, self.places):
            row.places = listed[: self.used][listed[: self.used] > 0]


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer of a `_Batch`: joins keys and values for attention, and frees the copy after the layer if it can."""

    def __init__(self, batch: _Batch, number: int) -> None:
        super().__init__()
        self._batch, self._number, self._used = batch, number, batch.width
        self._whole: list[Tensor] = []  # [B, heads, width + room, head_dim], if it is joined

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, n, head_dim]; returns all so far, contiguous."""
        batch = self._batch
        # Under autocast, rotary positions leave keys in fp32, which attention would cast: twice the memory till then.
        states = key_states, value_states = key_states.to(value_states.dtype), value_states
        before, self._used = self._used, batch.used
        parts = batch.store.layer(self._number, states)
        if self._whole or self._fits(states):
            if not self._whole:
                self._whole = [self._joined(part, before) for part in parts]
            for whole, new in zip(self._whole, states, strict=True):
                whole[:, :, before : self._used] = new
            keys, values = (whole[:, :, : self._used] for whole in self._whole)
            return keys, values
        for part, new in zip(parts, states, strict=True):
            tokens = new.transpose(1, 2).flatten(0, 1)
            part.index_copy_(0, batch.new, tokens if batch.fed is None else tokens.index_select(0, batch.fed))
        if not before:
            return key_states, value_states
        keys, values = (
            part.index_select(0, batch.listed).view(-1, self._used, *part.shape[1:]).transpose(1, 2) for part in parts
        )
        return keys, values

    def keep(self, at: tuple[Tensor, Tensor], places: Tensor) -> None:
        """Store the new tokens of the joined copy, given by rows and columns, in their places."""
        for part, whole in zip(self._batch.store.parts[self._number], self._whole):
            part.index_copy_(0, places, whole[at[0], :, at[1]])
        self._whole = []

    def get_seq_length(self) -> int:
        """Number of cached tokens, padding included."""
        return self._used

    def _fits(self, states: Sequence[Tensor]) -> bool:
        """True if this layer, after those before it, fits into the joined copy for the turn."""
        tokens = self._batch.places.size
        size = sum(part.shape[1] * part.shape[3] * part.element_size() for part in states) * tokens
        return (self._number + 1) * size <= self._batch.joined

    def _joined(self, part: Tensor, before: int) -> Tensor:
        rows, room = self._batch.places.shape
        whole = part.new_empty(rows, part.shape[1], room, part.shape[2])
        if before:
            listed = self._batch.table[:, :before].flatten()
            whole[:, :, :before] = part.index_select(0, listed).view(rows, before, *part.shape[1:]).transpose(1, 2)
        return whole


def _read(generator: Generator, store: _Store, rows: Sequence[_Row]) -> None:
    """Feed the pending tokens except the last of each row."""
    tokens, fed = _pad([row.ids[row.cached : -1] for row in rows], side="left", device=generator.model.device)
    batch = _Batch(generator, store, rows, room=tokens.shape[1], joined=0)
    generator.model(
        input_ids=tokens,
        attention_mask=batch.feed(fed.cpu().numpy()),
        position_ids=_positions(rows, fed),
        use_cache=True,
        logits_to_keep=1,
        **{generator.cache_name: batch.cache},
    )
    batch.end()


def _positions(rows: Sequence[_Row], fed: Tensor) -> Tensor:
    """Positions of tokens [B, n] that follow the cached ones."""
    cached = torch.tensor([[row.cached] for row in rows], device=fed.device)
    return cached + (fed.cumsum(dim=1) - 1).clamp(min=0)


def _sample(generator: Generator, store: _Store, drafts: list[_Draft]) -> None:
    """Feed the pending tokens and sample until every row has stopped; continue with a smaller batch when half have.
    Fed tokens [B, n] are padded on the left, so the last column holds the newest token of every row; rows that have
    stopped are padding.
    """
    device = generator.model.device
    while drafts:
        rows = [draft.row for draft in drafts]
        tokens, fed = _pad([row.ids[row.cached :] for row in rows], side="left", device=device)
        most = max(draft.limit - len(draft.logps) for draft in drafts)
        batch = _Batch(generator, store, rows, room=tokens.shape[1] + most - 1, joined=generator.joined)
        positions, live = _positions(rows, fed), fed.cpu().numpy()
        while 2 * sum(draft.live for draft in drafts) > len(drafts):
            mask = batch.feed(live)
            logits = generator.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{generator.cache_name: batch.cache},
            ).logits[:, -1]
            distribution = _log_distribution(logits, generator.temperature)  # [B, V]
            tokens = _draw(distribution, drafts)
            told = tokens[:, 0], distribution.gather(-1, tokens)[:, 0], _entropy(distribution)
            for draft, token, logp, entropy in zip(drafts, *torch.stack([part.double() for part in told]).tolist()):
                if draft.live:  # read at once, for every reading waits for the device; fp64 holds all of them exactly
                    draft.append(int(token), logp, entropy)
                    draft.live = token not in generator.stop_ids and len(draft.logps) < draft.limit
            live = np.array([[draft.live] for draft in drafts])
            positions = positions[:, -1:] + torch.from_numpy(live).to(device)
        batch.end()
        drafts = [draft for draft in drafts if draft.live]


def _draw(distribution: Tensor, drafts: Sequence[_Draft]) -> Tensor:
    """Draw one token for each draft [B, 1], by inverting the cumulative distribution [B, V] in fp64."""
    if any(draft.rng is None for draft in drafts):
        return distribution.argmax(dim=-1, keepdim=True)
    uniforms = [[draft.rng.random() if draft.rng and draft.live else 0.0] for draft in drafts]
    cumulative = distribution.double().exp().cumsum(dim=-1)
    thresholds = torch.tensor(uniforms, dtype=torch.float64, device=cumulative.device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True).clamp(max=cumulative.shape[-1] - 1)


def token_logps(
    model: CausalLM,
    ids: Tensor,
    lengths: Tensor,
    *,
    where: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies of given tokens with the trainer's forward pass.

    The model keeps its mode: if it has dropout, call `eval()` first, or the results differ from the sampler's.

    Args:
        model: a causal language model.
        ids: right-padded token ids [B, T].
        lengths: numbers of tokens [B].
        where: mask [B, T-1] of the tokens ids[:, 1:] to measure. Default: all.
        temperature: temperature of the distribution.
        chunk: tokens for which the fp32 softmax is computed at a time, which bounds memory; the backward pass computes
            it again.

    Returns:
        Log-probabilities of ids[:, 1:] and entropies of their distributions, both [B, T-1], fp32, differentiable, and 0
        in padding and outside ``where``.
    """
    return forward(model, ids, lengths, where=where, temperature=temperature, chunk=chunk)[:2]


def forward(
    model: CausalLM,
    ids: Tensor,
    lengths: Tensor,
    *,
    where: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 4096,
    packed: bool = False,
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run `token_logps` and, with a value head, give the values [B, T-1] of the states before these tokens too.

    ``packed``: prefixes that rows share are computed once; the model is one that `packing.enable` has passed. More than
    ``most`` packed tokens are computed in parts (`parts.in_parts`): the same numbers and gradients with less memory.
    """
    inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    where = inside[:, 1:] if where is None else where & inside[:, 1:]
    targets, measure = ids[:, 1:][where], partial(_measured, temperature=temperature, chunk=chunk)
    if packed:
        packing = pack(ids, lengths)
        chosen = packing.source[where]
        if most is not None and packing.tokens > most:  # padding does not count: see `micro_batches`
            measured = in_parts(packing, chosen, targets, partial(measure, getattr(model, "module", model)), most)
        else:
            inputs = {"input_ids": packing.ids, "position_ids": packing.positions, "attention_mask": packing.mask()}
            measured = measure(model, inputs, chosen, targets)
    else:
        chosen = pad(where, (0, 1)).flatten().nonzero()[:, 0]
        measured = measure(model, {"input_ids": ids, "attention_mask": inside.long()}, chosen, targets)
    logps, entropies, *rest = (torch.zeros(where.shape, device=ids.device).masked_scatter(where, m) for m in measured)
    return logps, entropies, rest[0] if rest else None


def _measured(
    model: CausalLM, inputs: dict[str, Any], chosen: Tensor, targets: Tensor, *, temperature: float, chunk: int
) -> list[Tensor]:
    """Log-probabilities of ``targets`` [n] behind the ``chosen`` [n] of the B x T inputs, entropies, maybe values."""
    with _head_at(model, chosen) as narrowed:
        output = model(**inputs, use_cache=False)
    logits = output.logits[0] if narrowed else output.logits.flatten(0, 1)[chosen]

    def measure(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        distribution = _log_distribution(logits, temperature)
        return distribution.gather(-1, targets[:, None])[:, 0], _entropy(distribution)

    parts = zip(torch.split(logits, chunk), torch.split(targets, chunk))
    measured = [torch.cat(part) for part in zip(*(checkpoint(measure, *part, use_reentrant=False) for part in parts))]
    if isinstance(output, Output):
        measured.append(output.values.flatten()[chosen])
    return measured


@contextmanager
def _head_at(model: CausalLM, chosen: Tensor) -> Iterator[bool]:
    """Apply the output layer to chosen ones of the B x T hidden states only, as [1, n, D]; False: there is none.

    The layer is often as large as the rest of the network, and most tokens are the environment's.
    """
    bare: Any = getattr(model, "module", model)  # data parallel
    head = getattr(bare, "policy", bare).get_output_embeddings()
    if head is None:
        yield False
        return

    def select(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1)[chosen][None],)

    hook = head.register_forward_pre_hook(select)
    try:
        yield True
    finally:
        hook.remove()


def score(
    model: CausalLM, rows: Sequence[Sequence[int]], *, temperature: float = 1.0, chunk: int = 4096
) -> tuple[Tensor, Tensor]:
    """Run `token_logps` on conversations of different lengths, padded here."""
    ids, inside = _pad(rows, side="right", device=model.device)
    return token_logps(model, ids, inside.sum(dim=1), temperature=temperature, chunk=chunk)


def _pad(rows: Sequence[Sequence[int]], *, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows to one tensor [B, n], with the mask of their elements."""
    tensors = [torch.tensor(row) for row in rows]
    own = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    padded, inside = (pad_sequence(part, batch_first=True, padding_side=side) for part in (tensors, own))
    return padded.to(device), inside.to(device)


def _log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the policy, the only definition of it, for sampling and for training."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def _entropy(distribution: Tensor) -> Tensor:
    return -(distribution.exp() * distribution).sum(dim=-1)


def weights_version(model: CausalLM) -> int:
    """A counter that grows with every in-place change of a weight."""
    return sum(parameter._version for parameter in model.parameters())


@contextmanager
def evaluating(model: CausalLM) -> Iterator[None]:
    """Set evaluation mode: dropout would falsify log-probabilities, and gradient checkpointing turns the cache off."""
    if not any(module.training for module in model.modules()):
        yield
        return
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
