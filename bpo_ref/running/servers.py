"""Servers that sample a run's turns: compared with what the run needs, and given its weights with proof."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from bpo_ref.sampling.chat import ChatFormat
from bpo_ref.sampling.engine import EngineError, Expected
from bpo_ref.sampling.served import Fleet
from bpo_ref.sampling.vllm import VllmEngine
from bpo_ref.sampling.weights import Proof, Publisher, prompts_of

if TYPE_CHECKING:
    from bpo_ref.args import Args

SAMPLE = "a task of many words: go to desk 1, search[red shoes], git diff"
"""Text on which tokenizers are compared."""


def publisher_of(args: Args, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, *, vocabulary: int) -> Publisher:
    """Make the publisher of the weights to the servers that the settings name; nothing is sent yet."""
    engines = [VllmEngine(url) for url in args.server]
    fleet = Fleet(engines, vocabulary=vocabulary, seconds=args.server_timeout, retries=args.server_retries)
    sampled = min(16, args.context // 2)
    proof = Proof(
        prompts_of(chat.start(SAMPLE), vocabulary=min(vocabulary, len(tokenizer)), room=args.context - sampled),
        temperature=args.temperature,
        tolerance=args.server_tolerance or (1e-3 if args.dtype == "float32" else 0.05),
        seconds=args.server_timeout,
        tokens=sampled,
    )
    folder = Path(args.server_weights) if args.server_weights else Path(args.out) / "served"
    how = {"adapters": args.server_sends == "adapters", "pinned": args.staleness > 0}
    return Publisher(fleet, folder, proof, dtype=getattr(torch, args.dtype), **how)


def difference(fleet: Fleet, args: Args, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> str | None:
    """Compare the servers with what a run needs.

    Returns:
        A sentence about one that is not there, or serves something else; None if there is none.
    """
    text = tokenizer.decode(chat.start(SAMPLE))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    try:
        rank = args.lora_r if args.server_sends == "adapters" else 0
        fleet.check(Expected(args.context, text, list(tokens), (args.temperature,), rank, args.server_sleeps))
    except EngineError as error:
        return f"server: {error}"
    return None
