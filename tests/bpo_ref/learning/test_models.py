"""Weights cast once for sampling give the same output as casting them at every token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wordgame
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bpo_ref.args import Args
from bpo_ref.learning.models import compute_in, lowered_twin, refresh
from bpo_ref.sampling.generate import Generation, Generator, StaleSession
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer

SMALL = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def llama(*, tied: bool = False) -> Any:
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, tie_word_embeddings=tied, **SMALL))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()


class Casts(TorchDispatchMode):
    """Counts weights, of more elements than anything that is computed here, that are cast to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy):
            self.count += made.dtype == torch.bfloat16 != args[0].dtype and args[0].ndim == 2 and made.numel() >= 512
        return made


def sampled(model: Any) -> tuple[list[Generation], int]:
    generator = Generator(model, stop_ids=(), max_new_tokens=5, context_limit=64)
    session = generator.open([[1, 2, 3], [4]])
    with Casts() as casts:
        turns = session.generate([0, 1], [np.random.default_rng(row) for row in range(2)])
    return turns, casts.count


@pytest.mark.parametrize("build", [llama, lambda: llama(tied=True), gpt2], ids=["llama", "tied", "gpt2"])
def test_a_twin_samples_the_same_without_casting(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = build()
    compute_in(model, torch.bfloat16)
    twin = lowered_twin(model, torch.bfloat16)
    for step in range(2):
        (turns, none), (plain, many) = sampled(twin), sampled(model)
        assert turns == plain
        assert none == 0 and many >= 5 * 8, step  # tokens, and matrices of two layers
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        refresh(twin, model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_session_of_a_twin_is_stale_after_a_refresh() -> None:
    model = llama()
    compute_in(model, torch.bfloat16)
    twin = lowered_twin(model, torch.bfloat16)
    session = Generator(twin, stop_ids=(), max_new_tokens=2, context_limit=9).open([[1]])
    refresh(twin, model)
    with pytest.raises(StaleSession):
        session.generate([0])


def test_runs_that_cast_once_are_those_that_cast_at_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = []
    for once in (False, True):
        monkeypatch.setattr(TrainingSession, "lower_once", once)
        trainer = Trainer(
            Args(
                env_id=wordgame.ENV_ID, eval_kwargs=(), max_turns=6, context=160, max_new_tokens=4, sft_steps=2,
                sft_episodes=8, sft_batch=4, updates=2, prompts=4, width=2, eval_episodes=4, lr=1e-2,
                dtype="bfloat16", out=str(tmp_path / str(once)),
            )
        )  # fmt: skip
        trainer.run()
        assert (trainer.session._twin is not None) == once
        assert (trainer.session.sampled() is trainer.session.policy) != once
        scores.append((trainer.session.scores, {k: v for k, v in trainer.session.counters.items() if k != "seconds"}))
    assert scores[0] == scores[1]
