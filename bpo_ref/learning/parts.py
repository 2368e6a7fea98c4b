"""A packed row that is too long for one pass, computed in parts: the same numbers and the same gradient.

What this module promises:

1. Activations are those of one part at a time. Of the whole row, keys and values are held in every layer, and in the
   backward pass their gradients.
2. Whatever the loss does with the results, its gradient is that of one pass over the whole row, up to rounding.
3. Every part is computed twice in training: once for the results, once, from the last to the first, for the gradient.

The parts are cut anywhere: a token attends to those before it on its own path, whichever part they are in
(`packing.Past`). The gradient of a part's keys and values is complete when all parts behind it are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bpo_ref.learning.packing import BLOCK, Packing, Past

Measure = Callable[[dict[str, Any], Tensor, Tensor], list[Tensor]]
"""Function from a model's inputs of N tokens, indices [n] of tokens and targets [n] to results [n]."""


@dataclass(frozen=True)
class _Part:
    """Tokens ``first`` to before ``last`` of a packed row, and the results [n] that they give."""

    first: int
    last: int
    results: Tensor
    """Indices [n] into the results of the whole row."""


def in_parts(packing: Packing, chosen: Tensor, targets: Tensor, measure: Measure, most: int) -> list[Tensor]:
    """Measure tokens of a packed row, at most ``most`` tokens in one pass of the model.

    Args:
        packing: the row.
        chosen: indices [n] of the tokens that predict the targets.
        targets: token ids [n].
        measure: one pass over a part, bare of data parallelism.
        most: rounded up to whole blocks of FlexAttention on CUDA.

    Returns:
        What ``measure`` returns, [n] each, differentiable with respect to the model's weights.
    """
    most = -(-most // BLOCK) * BLOCK if packing.ids.device.type == "cuda" else most
    edges = [*range(0, packing.ids.shape[1], most), packing.ids.shape[1]]
    parts = [
        _Part(first, last, ((chosen >= first) & (chosen < last)).nonzero()[:, 0]) for first, last in pairwise(edges)
    ]

    def run(part: _Part, past: Past) -> list[Tensor]:
        inside = slice(part.first, part.last)
        inputs = {
            "input_ids": packing.ids[:, inside],
            "position_ids": packing.positions[:, inside],
            "attention_mask": packing.part_mask(part.first, part.last, past),
        }
        return measure(inputs, chosen[part.results] - part.first, targets[part.results])

    anchor = torch.zeros((), device=targets.device, requires_grad=True)  # else there would be nothing to differentiate
    apply: Callable[..., tuple[Tensor, ...]] = _InParts.apply
    found = apply(anchor, parts, run, packing.ids.shape[1], len(targets))
    return list(found)


class _InParts(torch.autograd.Function):
    """Results of all parts; the backward pass computes each part again and adds to the weights' own gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        parts: list[_Part],
        run: Callable[[_Part, Past], list[Tensor]],
        tokens: int,
        count: int,
    ) -> tuple[Tensor, ...]:
        """Compute the parts in order; keys and values of all tokens are kept."""
        held: dict[int, tuple[Tensor, Tensor]] = {}
        results: list[Tensor] = []
        for part in parts:
            past = Past(_upto(held, part.first))
            for number, found in enumerate(run(part, past)):
                if number == len(results):
                    results.append(found.new_zeros(count))
                results[number][part.results] = found
            for layer, new in past.taken.items():
                if layer not in held:
                    held[layer] = tuple(state.new_zeros(*state.shape[:2], tokens, state.shape[3]) for state in new)  # type: ignore[assignment]
                for whole, state in zip(held[layer], new):
                    whole[:, :, part.first : part.last] = state
        ctx.parts, ctx.run, ctx.held = parts, run, held
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, ...]:
        """Compute the parts again, from the last to the first, with the gradients of their keys and values."""
        arriving = {layer: tuple(map(torch.zeros_like, states)) for layer, states in ctx.held.items()}
        for part in reversed(ctx.parts):
            inside = slice(part.first, part.last)
            before = {
                layer: tuple(state.detach().requires_grad_() for state in states)
                for layer, states in _upto(ctx.held, part.first).items()
            }
            for layer, leaves in before.items():
                for whole, state in zip(arriving[layer], leaves):
                    state.register_post_accumulate_grad_hook(partial(_hand_on, whole))  # type: ignore[no-untyped-call]
            past = Past(before)  # type: ignore[arg-type]
            with torch.enable_grad():
                found = ctx.run(part, past)
            pairs = [(result, gradient[part.results]) for result, gradient in zip(found, outer)]
            for layer, states in past.taken.items():
                pairs += [(state, whole[:, :, inside]) for state, whole in zip(states, arriving[layer])]
            moving = [(result, gradient.to(result.dtype)) for result, gradient in pairs if result.requires_grad]
            torch.autograd.backward([result for result, _ in moving], [gradient for _, gradient in moving])
        return (None,) * 5


def _hand_on(whole: Tensor, state: Tensor) -> None:
    """Add the gradient of the first tokens' keys or values to that of all, at once: a layer's at a time is held."""
    assert state.grad is not None
    whole[:, :, : state.shape[2]] += state.grad
    state.grad = None


def _upto(held: dict[int, tuple[Tensor, Tensor]], first: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of the tokens before ``first``."""
    if not first:
        return {}
    return {layer: (keys[:, :, :first], values[:, :, :first]) for layer, (keys, values) in held.items()}
