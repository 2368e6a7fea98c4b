"""Turns of many conversations sampled at a time, and the trainer's forward pass over the same tokens.

What this module promises:

1. A row's context is one list of ids that only ever grows: sampled ids are kept as drawn, and a fork begins with
   an exact copy of its parent's.
2. `Generation.logps` are those that `token_logps` computes for the same ids and weights, up to rounding.
3. A row's tokens depend on its own context and its own random stream, not on the rest of the batch.
4. Padding is known by lengths, never by token ids, so a pad token equal to the eos token does no harm.

Left out: sliding-window and recurrent layers, images, inference servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from bpo_ref.models import Output
from bpo_ref.packing import pack

CausalLM: TypeAlias = Any  # of transformers, bare or wrapped by PEFT: they share no base class


MOST_PIECES = 8
"""Of the keys and values of a row: more of them are slow to put together."""


class ContextOverflow(RuntimeError):
    """A row has no position left for another token; `Session.room` tells so before it happens."""


class StaleSession(RuntimeError):
    """The weights changed while a session held keys and values computed with the old ones."""


@dataclass(frozen=True)
class Generation:
    """One sampled assistant turn. Log-probabilities and entropies (nats) are those of the tempered distribution
    over the full vocabulary; `entropies[0]` scores the decision as a branch point.
    """

    ids: list[int]  # with the stop token, if one was sampled
    logps: list[float]
    entropies: list[float]
    truncated: bool  # no stop token within `max_new_tokens` or the room left
    sampler_logps: list[float] = field(default_factory=list)  # as sampled, where `logps` are measured otherwise


class Generator:
    """Samples turns from a causal language model, at most `max_rows` rows in one forward pass.

    `context_limit` (tokens) defaults to the model's `max_position_embeddings`. Mixed precision is the caller's
    `torch.autocast`; the softmax is fp32 in any case. Raises `NotImplementedError` for other than full attention.
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
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}; for greedy turns pass no rngs")
        layers = DynamicCache(config=model.config).layers
        kinds = {type(layer) for layer in layers}
        if kinds != {DynamicLayer}:  # windows are counted in columns of the cache, and ragged rows leave holes
            raise NotImplementedError(f"every layer needs full attention, got {sorted(map(str, kinds))}")
        self.model = model
        self.layers = len(layers)
        self.stop_ids = frozenset(stop_ids)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.max_rows = max_rows
        self.context_limit: int = context_limit or model.config.max_position_embeddings

    def open(self, contexts: Sequence[Sequence[int]] = ()) -> Session:
        """A session whose rows 0, 1, ... begin with `contexts`, the full ids of each so far."""
        session = Session(self)
        for context in contexts:
            session.add(context)
        return session


class Session:
    """Conversations that go on turn by turn, each with the keys and values of what the model has read of it.

    Between turns every row has its part of the cache, forks what they share with their parents; batches are put
    together for each turn. That copies the cache once a turn, where `DynamicCache` copies itself at every token, and in
    return rows of any length come, go and fork at any time and padding never piles up. After an optimizer step, open a
    new session.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._weights = weights_version(generator.model)
        self._rows: dict[int, _Row] = {}
        self._opened = 0
        self.prefilled = 0
        """Tokens of context that the model has read."""
        self.reused = 0
        """Tokens of context that rows took over from others, read."""

    def add(self, context: Sequence[int]) -> int:
        """A new row that begins with `context`, which is fed with its first turn."""
        return self._insert(_Row(list(context)))

    def fork(self, row: int, *, length: int | None = None) -> int:
        """A new row that begins with the first `length` tokens of `row` (default: all), sharing the cache."""
        parent = self._rows[row]
        fork = _Row(parent.ids[:length])
        fork.pieces = parent.first(len(fork.ids) - 1)  # the last token is always fed, for the logits after it
        self.reused += fork.cached
        return self._insert(fork)

    def prefill(self, rows: Sequence[int]) -> None:
        """Have the model read all but the last token of those of these rows that have room for a turn."""
        self._check()
        most = self._generator.max_rows
        able = [self._rows[row] for row in rows if self.room(row) >= 1]
        pending = [row for row in able if row.cached < len(row.ids) - 1]
        with torch.inference_mode(), _evaluating(self._generator.model):
            for batch in (pending[i : i + most] for i in range(0, len(pending), most)):
                self.prefilled += sum(len(row.ids) - 1 - row.cached for row in batch)
                _read(self._generator, batch)

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens of the environment; they are fed with the row's next turn."""
        self._rows[row].ids.extend(ids)

    def drop(self, rows: Sequence[int]) -> None:
        """Forget finished rows and free their memory."""
        for row in rows:
            del self._rows[row]

    def context(self, row: int) -> list[int]:
        """The exact ids of a row so far."""
        return list(self._rows[row].ids)

    def room(self, row: int) -> int:
        """How many tokens still fit into a row's context; below 1 it cannot take another turn."""
        return self._generator.context_limit - len(self._rows[row].ids)

    def generate(self, rows: Sequence[int], rngs: Sequence[np.random.Generator] | None = None) -> list[Generation]:
        """One turn of each of `rows`, drawn with one uniform number a token from the row's own generator in
        `rngs`; without `rngs`, the most probable tokens. A turn also ends, truncated, when the row is full.

        Raises `ContextOverflow` for rows without room and `StaleSession` before anything is drawn.
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
        with torch.inference_mode(), _evaluating(generator.model):
            for i in range(0, len(drafts), generator.max_rows):
                _sample(generator, drafts[i : i + generator.max_rows])
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
    """A conversation, and the keys and values of its first tokens; the ids after those are still to be fed."""

    ids: list[int]
    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values [layers, heads, n, head_dim], one after another, without padding. They are never written to, so
    that forks share them."""

    @property
    def cached(self) -> int:
        return sum(keys.shape[2] for keys, _ in self.pieces)

    def first(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """What there is of so many tokens."""
        found = []
        for keys, values in self.pieces:
            found.append((keys[:, :, :tokens], values[:, :, :tokens]))
            tokens -= keys.shape[2]
            if tokens <= 0:
                break
        return found

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Of the tokens that follow. The first piece, which forks have in common, stays as it is."""
        self.pieces.append((keys, values))
        if len(self.pieces) > MOST_PIECES:
            keys, values = (torch.cat(part, dim=2) for part in zip(*self.pieces[1:]))
            self.pieces[1:] = [(keys, values)]


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
    """The caches of some rows as one, padded on the left: keys and values [layers, B, heads, room, head_dim], written
    in place.
    """

    def __init__(self, generator: Generator, rows: Sequence[_Row], *, room: int) -> None:
        """`room`: tokens that will be fed, padding included."""
        self.rows = rows
        self.width = width = max(row.cached for row in rows)
        self.shape = generator.layers, len(rows), width + room
        self.parts: list[Tensor] = []  # keys and values, made where the first layer tells their shape
        if width:
            self.parts = [self._joined([[piece[part] for piece in row.pieces] for row in rows]) for part in (0, 1)]
        device = generator.model.device
        padding = torch.tensor([[width - row.cached] for row in rows], device=device)
        self.mask = torch.arange(width, device=device) >= padding  # [B, used]
        self.cache = Cache(layers=[_Layer(self, number, width) for number in range(generator.layers)])

    def _joined(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        batch = self.made_for(next(piece for pieces in rows for piece in pieces))
        for i, pieces in enumerate(rows):
            end = self.width
            for piece in reversed(pieces):
                batch[:, i, :, end - piece.shape[2] : end] = piece
                end -= piece.shape[2]
            batch[:, i, :, :end] = 0  # hidden by the mask, but 0 times what was there may be no number
        return batch

    def made_for(self, like: Tensor) -> Tensor:
        """Memory for keys or values like these, [..., heads, n, head_dim]."""
        layers, rows, room = self.shape
        return like.new_empty(layers, rows, like.shape[1], room, like.shape[3])

    def split(self) -> None:
        """Hand every row what it was fed, without the columns that are padding."""
        for i, row in enumerate(self.rows):
            columns = self.width + self.mask[i, self.width :].nonzero()[:, 0]
            keys, values = (part[:, i].index_select(2, columns) for part in self.parts)
            row.add(keys, values)


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer of a `_Batch`; `DynamicLayer` itself copies all that it holds at every token."""

    def __init__(self, batch: _Batch, number: int, used: int) -> None:
        super().__init__()
        self._batch, self._number, self._used = batch, number, used

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write these [B, heads, n, head_dim] after what is there; returns all of it."""
        if not self._batch.parts:
            self._batch.parts = [self._batch.made_for(key_states), self._batch.made_for(value_states)]
        before, self._used = self._used, self._used + key_states.shape[2]
        for whole, states in zip(self._batch.parts, (key_states, value_states), strict=True):
            whole[self._number, :, :, before : self._used] = states
        keys, values = (whole[self._number, :, :, : self._used] for whole in self._batch.parts)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens that are there, padding included."""
        return self._used


def _read(generator: Generator, rows: Sequence[_Row]) -> None:
    """Feeds what is pending but for the last token of each row."""
    tokens, fed = _pad([row.ids[row.cached : -1] for row in rows], side="left", device=generator.model.device)
    batch = _Batch(generator, rows, room=tokens.shape[1])
    cached = torch.tensor([[row.cached] for row in rows], device=tokens.device)
    batch.mask = torch.cat([batch.mask, fed], dim=1)
    generator.model(
        input_ids=tokens,
        attention_mask=batch.mask.long(),
        position_ids=cached + (fed.cumsum(dim=1) - 1).clamp(min=0),
        past_key_values=batch.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    batch.split()


def _sample(generator: Generator, drafts: list[_Draft]) -> None:
    """Feeds what is pending and samples until every row has stopped, going on with the rest when half of them
    have. Fed tokens [B, n] are padded on the left, so the last column holds the newest token of every row; rows
    that have stopped are padding.
    """
    device = generator.model.device
    while drafts:
        rows = [draft.row for draft in drafts]
        tokens, fed = _pad([row.ids[row.cached :] for row in rows], side="left", device=device)
        most = max(draft.limit - len(draft.logps) for draft in drafts)
        batch = _Batch(generator, rows, room=tokens.shape[1] + most - 1)
        cached = torch.tensor([[row.cached] for row in rows], device=device)
        positions = cached + (fed.cumsum(dim=1) - 1).clamp(min=0)
        while 2 * sum(draft.live for draft in drafts) > len(drafts):
            batch.mask = torch.cat([batch.mask, fed], dim=1)
            logits = generator.model(
                input_ids=tokens,
                attention_mask=batch.mask.long(),
                position_ids=positions,
                past_key_values=batch.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            distribution = _log_distribution(logits, generator.temperature)  # [B, V]
            tokens = _draw(distribution, drafts)
            logps = distribution.gather(-1, tokens)[:, 0].tolist()
            entropies = _entropy(distribution).tolist()
            for draft, token, logp, entropy in zip(drafts, tokens[:, 0].tolist(), logps, entropies):
                if draft.live:
                    draft.append(token, logp, entropy)
                    draft.live = token not in generator.stop_ids and len(draft.logps) < draft.limit
            fed = torch.tensor([[draft.live] for draft in drafts], device=device)
            positions = positions[:, -1:] + fed
        batch.split()
        drafts = [draft for draft in drafts if draft.live]


def _draw(distribution: Tensor, drafts: Sequence[_Draft]) -> Tensor:
    """One token for each draft [B, 1], by inverting the cumulative distribution [B, V] in fp64."""
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
    """The trainer's forward pass over right-padded `ids` [B, T] with `lengths` [B]: log-probabilities of
    ids[:, 1:] and entropies of the distributions behind them, both [B, T-1], fp32, differentiable, 0 in padding.

    Of the tokens that `where` [B, T-1] names (default: all), 0 elsewhere. To bound memory, the fp32 softmax is taken
    `chunk` tokens at a time and again in the backward pass. The model stays in the mode it is in: where it has
    dropout, call `eval()` first, or the sampler's log-probabilities do not recur.
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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`token_logps` and, where the model has a value head, values of the states before these tokens, [B, T-1] as well.

    ``packed``: prefixes that rows share are computed once; the model is one that `packing.enable` has passed.
    """
    inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    where = inside[:, 1:] if where is None else where & inside[:, 1:]
    if packed:
        packing = pack(ids, lengths)
        chosen = packing.source[where]
        inputs = {"input_ids": packing.ids, "position_ids": packing.positions, "attention_mask": packing.mask()}
    else:
        chosen = pad(where, (0, 1)).flatten().nonzero()[:, 0]
        inputs = {"input_ids": ids, "attention_mask": inside.long()}
    with _head_at(model, chosen) as narrowed:
        output = model(**inputs, use_cache=False)
    logits = output.logits[0] if narrowed else output.logits.flatten(0, 1)[chosen]

    def measure(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        distribution = _log_distribution(logits, temperature)
        return distribution.gather(-1, targets[:, None])[:, 0], _entropy(distribution)

    parts = zip(torch.split(logits, chunk), torch.split(ids[:, 1:][where], chunk))
    measured = [torch.cat(part) for part in zip(*(checkpoint(measure, *part, use_reentrant=False) for part in parts))]
    if isinstance(output, Output):
        measured.append(output.values.flatten()[chosen])
    logps, entropies, *rest = (torch.zeros(where.shape, device=ids.device).masked_scatter(where, m) for m in measured)
    return logps, entropies, rest[0] if rest else None


@contextmanager
def _head_at(model: CausalLM, chosen: Tensor) -> Iterator[bool]:
    """Give the output layer only the chosen ones of the B x T hidden states, as [1, n, D]; False: there is none.

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
    """`token_logps` of conversations of different lengths, padded here."""
    ids, inside = _pad(rows, side="right", device=model.device)
    return token_logps(model, ids, inside.sum(dim=1), temperature=temperature, chunk=chunk)


def _pad(rows: Sequence[Sequence[int]], *, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows as one tensor [B, n], and which of its elements are theirs."""
    tensors = [torch.tensor(row) for row in rows]
    own = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    padded, inside = (pad_sequence(part, batch_first=True, padding_side=side) for part in (tensors, own))
    return padded.to(device), inside.to(device)


def _log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """The one definition of the policy, for sampling and for training."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def _entropy(distribution: Tensor) -> Tensor:
    return -(distribution.exp() * distribution).sum(dim=-1)


def weights_version(model: CausalLM) -> int:
    """A number that grows with every in-place change of a weight."""
    return sum(parameter._version for parameter in model.parameters())


@contextmanager
def _evaluating(model: CausalLM) -> Iterator[None]:
    """Evaluation mode: dropout would falsify log-probabilities, gradient checkpointing turns the cache off."""
    if not any(module.training for module in model.modules()):
        yield
        return
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
