"""Small runs that sample on servers, and what they are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import wordgame
from fake_engine import FakeServer

from bpo_ref.args import Args
from bpo_ref.learning.models import build_tiny, load_policy
from bpo_ref.sampling.generate import SamplingSession
from bpo_ref.sampling.served import ServedSession
from bpo_ref.train import Trainer
from sandboxgym.tree import RolloutTree

SMALL: dict[str, Any] = {
    "algo": "bpo-forest", "env_id": wordgame.ENV_ID, "max_turns": 5, "context": 160, "max_new_tokens": 4, "prompts": 2,
    "width": 2, "roots": 2, "updates": 2, "eval_episodes": 2, "eval_untrained": False, "trackers": (), "lr": 1e-2,
    "backend": "vllm", "server_retries": 1, "server_timeout": 60.0,
}  # fmt: skip


def pretrained(folder: Path, *, size: str) -> None:
    """Write a model with tied embeddings, none of whose weights are all alike."""
    texts = [f"task {task} turn {turn} say a word" for task in range(6) for turn in range(4)]
    model, tokenizer = build_tiny(size, texts, vocabulary=0, context=160, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1 + 0.2 * torch.rand(weight.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def server_of(folder: Path, **options: Any) -> FakeServer:
    model, tokenizer = load_policy(folder)
    return FakeServer(model, tokenizer, **options)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.session.policy.state_dict().items()}


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert mine.keys() == theirs.keys()
    return all(weight.equal(theirs[name]) for name, weight in mine.items())


def trainer_of(folder: Path, out: Path, *servers: Any, **options: Any) -> Trainer:
    urls = tuple(server.url for server in servers)
    return Trainer(Args(**{**SMALL, "model": str(folder), "out": str(out), "server": urls, **options}))


def greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    """All samplers take the most probable token."""
    for kind in (SamplingSession, ServedSession):
        generate = kind.generate
        monkeypatch.setattr(kind, "generate", lambda self, rows, rngs=None, generate=generate: generate(self, rows))
    asked = ServedSession._requests
    monkeypatch.setattr(ServedSession, "_requests", lambda self, rows, rngs: asked(self, rows, None))


def told(trees: list[RolloutTree]) -> list[Any]:
    return [(tree.task, edge.action.text, edge.action.data.ids, edge.reward) for tree in trees for edge in tree.edges()]


def moved(trainer: Trainer, seed: int, *, adapters: bool = False) -> None:
    """Change all weights, or those of the adapters, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (w for w in trainer.session.policy.parameters() if w.requires_grad or not adapters):
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


def assert_greedy_trees_are_equal(here: Trainer, there: Trainer, *, adapters: bool = False) -> None:
    """Trees of the sampler in the process and of servers are equal, with the same log-probabilities, thrice.

    Adapters that were changed three times are so large that they amplify rounding.
    """
    apart = 2e-4 if adapters else 1e-4
    for update in range(3):
        for trainer in (here, there):
            moved(trainer, update, adapters=adapters)
        mine, theirs = (trainer._rollouts((update,)) for trainer in (here, there))
        assert told(mine) == told(theirs)
        for a, b in zip((e for t in mine for e in t.edges()), (e for t in theirs for e in t.edges()), strict=True):
            assert a.action.data.logps == pytest.approx(b.action.data.logps, abs=1e-4)
            assert a.action.data.logps == pytest.approx(b.action.data.sampler_logps, abs=apart)
            assert a.action.data.entropies == pytest.approx(b.action.data.entropies, abs=1e-4)
    for trainer in (here, there):
        trainer.session.close()
