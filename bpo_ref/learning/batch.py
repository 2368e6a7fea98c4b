"""Training data: the paths of trees as rows of token ids, and rows as padded tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from bpo_ref.learning.packing import by_prefix
from sandboxgym.tree import Edge, Path, RolloutTree

if TYPE_CHECKING:
    from bpo_ref.args import Args
    from bpo_ref.sampling.generate import Generation

Item = TypeVar("Item")


@dataclass(slots=True)
class Critique:
    """Values and targets of an action's tokens, one entry per token: `Edge.data` where there is a value head."""

    values: list[float]
    """V of the state in which each token was drawn, before the update."""
    targets: list[float] = field(default_factory=list)
    """Targets of V; NaN where it is not trained."""
    advantages: list[float] = field(default_factory=list)
    """Advantage of each token, where they differ within an action."""


@dataclass
class PathRow:
    """One path as training data: the ids of the whole episode, and the actions sampled on this path."""

    ids: list[int]
    edges: list[Edge]

    @property
    def mass(self) -> float:
        """Σ weight x tokens of the row's actions."""
        return sum(edge.weight * edge.action.tokens for edge in self.edges)

    @property
    def learnt(self) -> int:
        """Number of states whose value is trained."""
        return sum(not math.isnan(t) for edge in self.edges for t in getattr(edge.data, "targets", ()))


@dataclass
class Batch:
    """Rows padded on the right to the longest, T; position t of the [B, T-1] tensors belongs to token t + 1."""

    ids: Tensor  # [B, T]
    lengths: Tensor  # [B]
    step: Tensor  # [B, T-1] number of the action in the batch that the token belongs to, -1 where it was not sampled
    advantage: Tensor  # [B, T-1]
    weight: Tensor  # [B, T-1]
    old_logps: Tensor  # [B, T-1] before the update, by the trainer or, if not measured, the sampler; 0 if not known
    old_values: Tensor | None = None  # [B, T-1] of a value head before the update
    targets: Tensor | None = None  # [B, T-1] of the values, NaN where they are not trained
    sampler_logps: Tensor | None = None  # [B, T-1] by the sampler; None: as `old_logps`

    @property
    def mask(self) -> Tensor:
        """Mask [B, T-1] of exactly the sampled tokens."""
        return self.step >= 0


def rows_of(trees: Iterable[RolloutTree]) -> list[PathRow]:
    """Convert all paths to rows; those of weight 0 (for values only, and those left out) are not trained on."""
    rows = (row for tree in trees for path in tree.paths for row in rows_of_path(path))
    return [row for row in rows if any(edge.weight for edge in row.edges)]


def rows_of_path(path: Path) -> list[PathRow]:
    """Convert a path to one row per conversation: a single one, or one per turn where prompts show a window.

    The prefix that a path was forked from is context, so every action is trained on once.
    """
    talks: list[list[Edge]] = []
    for edge in path.edges:
        if not talks or edge.action.memory.before is None:
            talks.append([])
        talks[-1].append(edge)
    return [PathRow(edges[-1].action.memory.ids(), edges) for edges in talks]


def collate(rows: Sequence[PathRow], device: torch.device | str) -> Batch:
    """Pad rows to one length, and stack them to tensors."""
    longest = max(len(row.ids) for row in rows)
    shape = len(rows), longest - 1  # filled as arrays: an assignment costs a fraction of one to a tensor
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    step = np.full(shape, -1, dtype=np.int64)
    advantage, weight, old, values, sampler = (np.zeros(shape, dtype=np.float32) for _ in range(5))
    targets = np.full(shape, math.nan, dtype=np.float32)
    number = 0
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        for edge in row.edges:
            span = slice(edge.action.position - 1, edge.action.position - 1 + edge.action.tokens)
            step[i, span], advantage[i, span], weight[i, span] = number, edge.advantage, edge.weight
            data: Generation = edge.action.data
            if data.logps:
                old[i, span] = data.logps
                sampler[i, span] = data.sampler_logps or data.logps
            if isinstance(edge.data, Critique):
                values[i, span], targets[i, span] = edge.data.values, edge.data.targets
                if edge.data.advantages:
                    advantage[i, span] = edge.data.advantages
            number += 1
    lengths = np.array([len(row.ids) for row in rows])
    arrays = (ids, lengths, step, advantage, weight, old, values, targets, sampler)
    return Batch(*(torch.from_numpy(array).to(device) for array in arrays))


def micro_batches(rows: Sequence[PathRow], args: Args, idle: PathRow | None = None) -> list[list[PathRow]]:
    """Split rows into the batches of an update, as `token_batches` does; without any row, ``idle`` is one.

    The last batch is one that a single pass computes, if need be ``idle``: its gradients are reduced over processes,
    which a row in parts, bare of data parallelism, would not have done.

    Rows without any advantage are left out where neither a KL term nor a value head needs them. If no row has one, the
    first stays, because all data-parallel processes must take part in reducing the gradients.
    """
    matter = args.kl or args.critic
    moving = [row for row in rows if matter or any(edge.advantage for edge in row.edges)] or list(rows[:1])
    batches = token_batches(moving, args)
    batches.sort(key=lambda batch: len(batch[0].ids) <= args.micro_tokens)  # stable; a batch of long rows begins so
    if idle is not None and (not batches or len(batches[-1][0].ids) > args.micro_tokens):
        batches.append([idle])
    return batches


def token_batches(rows: Sequence[PathRow], args: Args) -> list[list[PathRow]]:
    """Split rows into batches of at most ``micro_tokens`` tokens, padded or packed as ``pack`` says, or one row.

    Where longer rows are computed in parts (``long_rows``), those of a tree are one batch.
    """
    if args.pack == "tree":
        return by_prefix(rows, lambda row: row.ids, args.micro_tokens, joined=args.long_rows == "split")
    return by_length(rows, lambda row: len(row.ids), args.micro_tokens)


def by_length(items: Iterable[Item], length: Callable[[Item], int], most: int) -> list[list[Item]]:
    """Batch items of similar length together, to pad little: at most ``most`` padded tokens per batch, or one item."""
    batches: list[list[Item]] = []
    for item in sorted(items, key=length, reverse=True):
        if batches and (len(batches[-1]) + 1) * length(batches[-1][0]) <= most:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches
