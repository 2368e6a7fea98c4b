"""A tiny model behind the interface of engines, and trees grown with it, for the tests of other trainers' adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bpo_ref.adapters.algorithm import TreeAlgorithm
from bpo_ref.args import Args
from bpo_ref.eval import make_env
from bpo_ref.learning.tiny import tiny_model, tiny_tokenizer, words_of
from sandboxgym.adapters.prompts import Prompt
from sandboxgym.adapters.tokens.chat_format import ChatFormat
from sandboxgym.adapters.tokens.trees import Sample, TokenPolicy
from sandboxgym.tree import Envs, RolloutTree, rollout_async
from sandboxgym.tree.nodes import PathKey

WORDS = ["You are in the middle of a room. Looking quickly around you, you see a", "drawer cabinet shelf go to open"]
ENV = "sandboxgym/ALFWorld-v0"


@dataclass
class TinyEngine:
    """Samples from a tiny model, and remembers every request with its answer."""

    model: Any
    log: dict[tuple[int, PathKey], list[tuple[list[int], list[int], list[float]]]] = field(default_factory=dict)

    def sample(
        self, ids: Sequence[int], limit: int, stop_ids: Sequence[int], seed: int
    ) -> tuple[list[int], list[float]]:
        """Sampled ids and their log-probabilities."""
        generator, sampled, logps = torch.Generator().manual_seed(seed), [], []
        cache, following = None, list(ids)
        while len(sampled) < limit and not (sampled and sampled[-1] in stop_ids):
            with torch.no_grad():
                told = self.model(torch.tensor([following]), past_key_values=cache, use_cache=True)
            cache, logp = told.past_key_values, torch.log_softmax(told.logits[0, -1].float(), 0)
            sampled.append(int(torch.multinomial(logp.exp(), 1, generator=generator)))
            logps.append(float(logp[sampled[-1]]))
            following = sampled[-1:]
        return sampled, logps

    async def __call__(
        self, ids: list[int], /, *, limit: int, stop_ids: Sequence[int], seed: int, path: tuple[int, PathKey]
    ) -> Sample:
        """Answer after a moment that depends on the seed, so that paths overtake each other."""
        await asyncio.sleep(0.0001 * (seed % 7))
        sampled, logps = self.sample(ids, limit, stop_ids, seed)
        self.log.setdefault(path, []).append((list(ids), sampled, logps))
        return Sample(sampled, logps, (3, 3))


class Parity(TreeAlgorithm):
    """An algorithm in whose world the parity of an episode's tokens is its reward: ALFWorld's are all 0 here."""

    def credit(self, trees: Sequence[RolloutTree]) -> list[RolloutTree]:
        """Replace the rewards before credit is assigned."""
        for path in (path for tree in trees for path in tree.paths):
            path.edges[-1].reward = float(sum(edge.action.tokens for edge in path.from_root()) % 2)
        return super().credit(trees)


def algorithm(algo: str = "bpo-forest", **options: Any) -> Parity:
    """An algorithm for small trees."""
    chosen: dict[str, Any] = {"prompts": 3, "max_turns": 5, "context": 512}
    if algo == "bpo-forest":
        chosen |= {"roots": 2, "width": 3, "points": 2, "forks": "all", "spacing": 0}
    return Parity(Args(algo=algo, env_id=ENV, **{**chosen, **options}))


@dataclass
class Players:
    """A tiny model, its chat format and its environments."""

    model: Any
    tokenizer: Any
    chat: ChatFormat
    envs: Envs

    def grow(
        self, rule: TreeAlgorithm, *, tasks: int = 3, seed: int = 0, prompt: Prompt | None = None, context: int = 512
    ) -> tuple[list[RolloutTree], TinyEngine]:
        """Trees with credit, and the engine that was asked."""
        engine = TinyEngine(self.model)
        policy = TokenPolicy(engine, self.chat, prompt or Prompt(), context=context, max_new_tokens=6)
        schedule = rule.schedule((seed,), list(range(tasks)))
        trees = asyncio.run(
            rollout_async(self.envs, policy, schedule, tasks=list(range(tasks)), seed=(seed,), max_live=6)
        )
        return rule.credit(trees), engine


@contextmanager
def players() -> Iterator[Players]:
    """Make a `Players`, and close its environments at the end."""
    tokenizer = tiny_tokenizer(words_of(WORDS))
    torch.manual_seed(0)
    model = tiny_model(tokenizer, hidden=32, ffn=64, layers=1, max_position_embeddings=1024)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # far enough from uniform to notice a wrong context
    with Envs(lambda: make_env(ENV, ("games=embedded:train",), 5)) as envs:
        yield Players(model, tokenizer, ChatFormat(tokenizer), envs)
