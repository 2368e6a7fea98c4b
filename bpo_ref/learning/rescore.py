"""Rescoring of finished rollouts by the trainer's own forward pass: values, log-probabilities and KL, before credit."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

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
    log-probabilities are measured in any case, and the backend's are kept too (`Generation.sampler_logps`); at the
    level of episodes their ratio is also set on every edge (`Edge.ratio`).

    Args:
        trees: changed in place.
        args: ``critic``, ``kl``, ``kl_in``, ``tis``, ``tis_level``, ``staleness``, ``pack``, ``micro_tokens`` and
            ``long_rows`` are used.
        policy: the policy to be trained; with ``staleness`` an earlier one has sampled.
        reference: used only where the divergence is subtracted from the rewards.
        device: device of the tensors that both are given.

    Raises:
        ValueError: with ``staleness``, an action has no log-probabilities of the sampler.
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
                    if args.staleness and not told:
                        raise ValueError("staleness: expected log-probabilities of the sampler, found none")
                    action.data, action.logp = (
                        replace(action.data, **found, sampler_logps=told),
                        float(logps[i, span].sum()),
                    )
                    if args.tis and args.tis_level == "episode" and told:
                        edge.ratio = min(args.tis, _ratio(action.logp - sum(told)))


def _ratio(apart: float) -> float:
    """Ratio of two probabilities whose logarithms are that far apart; the largest float stays finite."""
    return math.exp(min(apart, 700.0))


def importance_weights(trees: Sequence[RolloutTree], args: Args) -> list[float]:
    """Weights by which `tis` multiplies the loss: of every token, or with ``tis_level=episode`` of every action."""
    if args.tis_level == "token":
        data = [edge.action.data for tree in trees for edge in tree.edges()]
        pairs = [pair for one in data for pair in zip(one.logps, one.sampler_logps)]
        return [min(args.tis, _ratio(old - sampler)) for old, sampler in pairs]
    weights = []
    for path in (path for tree in trees for path in tree.paths):
        along = list(accumulate((edge.ratio for edge in path.from_root()), operator.mul))
        weights += along[-len(path.edges) :]  # each action once: of what it was forked off, the other path has them
    return weights


def mismatch_metrics(
    trees: Sequence[RolloutTree], args: Args, gather: Callable[[list[Any]], list[Any]]
) -> dict[str, float]:
    """Numbers to log about sampler and trainer, over all processes: their difference, and what the correction costs.

    The effective sample size is (Σw)² / (n Σw²) of the weights that the loss is multiplied by: 1 if they are equal.
    """
    found = gather(sampler_mismatch(trees))
    weights = [(len(w), sum(w), sum(x * x for x in w)) for w in [importance_weights(trees, args)]] if args.tis else []
    if not found:
        return {}
    tokens, apart, largest = zip(*found)
    metrics = {
        "rollout/sampler_mismatch": sum(apart) / sum(tokens),
        "rollout/sampler_ratio_max": max(largest),
    }
    if weights:
        n, total, squares = (sum(part) for part in zip(*gather(weights)))
        metrics["rollout/sampler_effective"] = total**2 / (n * squares)
    return metrics


def sampler_mismatch(trees: Sequence[RolloutTree]) -> list[tuple[int, float, float]]:
    """Compare sampler and trainer on each tree: tokens with both log-probabilities, Σ |difference| in nats, and
    the largest π_old / π_sampler. Trees without any such token are left out.
    """
    found = []
    for tree in trees:
        data = [edge.action.data for edge in tree.edges() if edge.action.data.sampler_logps]
        apart = [old - sampler for one in data for old, sampler in zip(one.logps, one.sampler_logps, strict=True)]
        if apart:
            found.append((len(apart), sum(map(abs, apart)), _ratio(max(apart))))
    return found
