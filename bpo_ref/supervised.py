"""SFT: cross entropy on expert episodes, before reinforcement learning."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from bpo_ref.config import ConfigError
from bpo_ref.learning.batch import by_length
from bpo_ref.sampling.generate import forward
from bpo_ref.session import TrainingSession


def supervised(session: TrainingSession) -> None:
    """Train with cross entropy on expert episodes; observation tokens have the weight ``sft_observation_weight``."""
    args = session.args
    weight = args.sft_observation_weight
    encoded = [session.chat.demonstration(**episode, observation_weight=weight) for episode in session.demonstrations]
    encoded = [(ids, weights) for ids, weights in encoded if len(ids) <= args.context]
    if not encoded:
        raise ConfigError(f"context: none of {len(session.demonstrations)} expert episodes fits {args.context} tokens")
    bar = session.bar("SFT", args.sft_steps, done=session.step, lines=20)
    smooth = None
    for step in range(session.step, args.sft_steps):
        began = time.perf_counter()
        warm, rest = min(1.0, (step + 1) / 50), step / args.sft_steps
        session.set_lr(args.sft_lr * warm * 0.5 * (1 + math.cos(math.pi * rest)))
        picks = np.random.default_rng([args.seed, 1, step]).choice(len(encoded), args.sft_batch)
        mine = [encoded[i] for i in picks[session.accelerator.process_index :: session.accelerator.num_processes]]
        loss = supervised_step(session, mine)
        smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
        session.step = step + 1
        speed = sum(len(encoded[i][0]) for i in picks) / (time.perf_counter() - began)
        values = {"sft/loss": loss, "sft/grad_norm": session.grad_norm, "sft/lr": session.lr}
        session.log.scalars({**values, "time/sft_tokens_per_second": speed}, "sft", session.step)
        bar.advance(session.step, loss=f"{smooth:.3f}")
        session.maybe_save(20 * args.save_every)
    bar.close()


def supervised_step(session: TrainingSession, episodes: Sequence[tuple[list[int], list[float]]]) -> float:
    """Make one optimizer step; returns the weighted mean loss per token."""
    total = session.sum(sum(sum(weights) for _, weights in episodes))
    losses: list[float] = []

    def backward(part: Sequence[tuple[list[int], list[float]]]) -> None:
        padded = (pad_sequence([torch.tensor(row[i]) for row in part], batch_first=True) for i in (0, 1))
        ids, weights = (tensor.to(session.accelerator.device) for tensor in padded)
        lengths = torch.tensor([len(row) for row, _ in part], device=ids.device)
        logps, _, values = forward(session.model, ids, lengths, where=weights[:, 1:] > 0)
        loss = -(logps * weights[:, 1:]).sum() / total
        if values is not None:
            loss = loss + 0.0 * values.sum()  # every parameter takes part in the reduction over processes
        session.strategy.backward(loss)
        losses.append(float(loss.detach()))

    batches = by_length(episodes, lambda row: len(row[0]), session.args.micro_tokens)
    session.accumulate(batches, backward, idle=(episodes[0][0][:2], [0.0, 0.0]))
    session.optimizer_step()
    return session.sum(sum(losses))
