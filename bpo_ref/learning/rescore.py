"""Rescoring of finished rollouts by the trainer's own forward pass: values, log-probabilities and KL, before credit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from bpo_ref.learning.batch import Batch, Critique, collate, rows_of_path, token_batches
from sandboxgym.tree import RolloutTree

if TYPE_CHECKING:
    from bpo_ref.args import Args

Measure: TypeAlias = Callable[[Batch], tuple[Tensor, Tensor, Tensor | None]]
"""Log-probabilities, entropies and (of a value head) values of the sampled tokens, [B, T-1] each."""


def rescore(
    trees: Sequence[RolloutTree],
    args: Args,
    policy: Measure,
    reference: Measure,
    device: torch.device,
) -> None:
    """Compute the values, log-probabilities and KL that a run needs and rollouts do not have yet.

    Values of the states in which tokens were drawn (`Critique`), the divergence from the reference where it is
    subtracted from the rewards, and log-probabilities and entropies that the backend did not give. With ``tis``
    log-probabilities are measured in any case, and the backend's are kept too (`Generation.sampler_logps`).

    Args:
        trees: changed in place.
        args: ``critic``, ``kl``, ``kl_in``, ``tis``, ``pack`` and ``micro_tokens`` are used.
        policy: the policy that has sampled.
        reference: used only where the divergence is subtracted from the rewards.
        device: device of the tensors that they are given.
    """
    unknown = any(not edge.action.data.logps for tree in trees for edge in tree.edges())
    measured = unknown or args.tis > 0
    penalty = (args.kl or 0.0) if args.kl_in == "reward" else 0.0
    if not (measured or args.critic or penalty):
        return
    paths = [row for tree in trees for path in tree.paths for row in rows_of_path(path)]
    for rows in token_batches(paths, args):
        batch = collate(rows, device)
        sampled, values = batch.old_logps, None
        logps = entropies = apart = sampled  # of what is not measured, nothing is read
        with torch.no_grad():
            if measured or args.critic:
                logps, entropies, values = policy(batch)
                sampled = logps if measured else sampled
            if penalty:
                apart = (sampled - reference(batch)[0]) * batch.mask
        logps, entropies, apart = (part.cpu() for part in (logps, entropies, apart))  # not one wait for each action
        values = None if values is None else values.cpu()
        for i, row in enumerate(rows):
            for edge in row.edges:
                action = edge.action
                span = slice(action.position - 1, action.position - 1 + action.tokens)
                if penalty:
                    edge.reward -= penalty * float(apart[i, span].sum())
                if values is not None:
                    edge.data = Critique(values[i, span].tolist(), targets=[math.nan] * action.tokens)
                if measured:
                    found = {"logps": logps[i, span].tolist(), "entropies": entropies[i, span].tolist()}
                    told = action.data.sampler_logps or action.data.logps
                    action.data, action.logp = (
                        replace(action.data, **found, sampler_logps=told),
                        float(logps[i, span].sum()),
                    )


def sampler_mismatch(trees: Sequence[RolloutTree]) -> list[tuple[int, float, float]]:
    """Compare sampler and trainer on each tree: tokens with both log-probabilities, Σ |difference| in nats, and
    the largest π_old / π_sampler. Trees without any such token are left out.
    """
    found = []
    for tree in trees:
        data = [edge.action.data for edge in tree.edges() if edge.action.data.sampler_logps]
        apart = [old - sampler for one in data for old, sampler in zip(one.logps, one.sampler_logps, strict=True)]
        if apart:
            found.append((len(apart), sum(map(abs, apart)), math.exp(min(max(apart), 700.0))))
    return found
