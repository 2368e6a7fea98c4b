"""Search queries learned from the reward alone: one number per word, forks at the search page, no neural network.

python -m bpo_ref.experiments.queries [--seeds 0 1 2] [--tasks 2000] [--forks 4] [--panel 500]

The policy of a WebShop episode has one decision: which words of the instruction to search for. Each word is chosen with
a probability of its own, the same wherever the word occurs; the rule-based shopper does the rest, and buys the first
product that the search brings and that is not too dear. At the search page the environment is forked, every fork draws
its query, and leave-one-out advantages of the final rewards move the words' logits (REINFORCE): this package's
algorithm at its smallest. That it learns, and generalises to unseen products, shows that a search policy can be
learned on the generated catalogue.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

import sandboxgym
from sandboxgym.envs.webshop.expert import WORD

TURNS = 12
"""Step limit of an episode; the shopper needs about five."""

Query = Callable[[list[str], random.Random], list[str]]
"""A rule that picks the words to search for from those of an instruction."""


@dataclass
class QueryPolicy:
    """Policy that chooses word w of an instruction with probability σ(any + own[w]).

    Args:
        any: logit that all words share; -1.4 takes one in five.
        own: logit added for a word, 0 at first.
    """

    any: float = -1.4
    own: dict[str, float] = field(default_factory=dict)

    def probability(self, word: str) -> float:
        """Probability of choosing a word."""
        return 1.0 / (1.0 + math.exp(-self.any - self.own.get(word, 0.0)))

    def draw(self, words: Sequence[str], rng: random.Random) -> list[bool]:
        """Draw the words to search for."""
        return [rng.random() < self.probability(word) for word in words]

    def __call__(self, words: list[str], rng: random.Random) -> list[str]:
        """Sample a query."""
        return [word for word, taken in zip(words, self.draw(words, rng)) if taken]

    def learn(self, words: Sequence[str], taken: Sequence[bool], step: float) -> None:
        """Move the logits along the gradient of the log-probability of this draw (the shared logit, along its mean)."""
        slopes = [taken_one - self.probability(word) for word, taken_one in zip(words, taken)]
        self.any += step * statistics.fmean(slopes)
        for word, slope in zip(words, slopes):
            self.own[word] = self.own.get(word, 0.0) + step * slope


def shop(split: str) -> gym.Env[Any, Any]:
    """Make the generated catalogue with the goals of some products."""
    return gym.make("sandboxgym/WebShop-v0", split=split, max_episode_steps=TURNS)


def words_of(observation: str) -> list[str]:
    """Words of the instruction on a page."""
    pieces = [piece.strip() for piece in observation.split("[SEP]")]
    return WORD.findall(pieces[pieces.index("Instruction:") + 1].lower())


def bought(env: gym.Env[Any, Any], observation: str, query: Sequence[str]) -> tuple[float, bool]:
    """Search and leave the rest to the rule-based shopper; returns reward and success of the purchase.

    An empty query cannot be typed: "x" stands for it.
    """
    base: Any = env.unwrapped
    shopper = base.expert(candidates=1, reads=False, listed=True)
    shopper.reset(observation)
    observation, reward, terminated, truncated, info = env.step(f"search[{' '.join(query) or 'x'}]")
    total = float(reward)
    while not (terminated or truncated):
        observation, reward, terminated, truncated, info = env.step(shopper.act(observation))
        total += float(reward)
    return total, bool(info["success"])


def train(policy: QueryPolicy, *, tasks: int, forks: int, rate: float = 2.0, seed: int = 0) -> None:
    """Train by REINFORCE with leave-one-out baselines among forks of the same search page.

    Args:
        policy: changed in place.
        tasks: instructions to learn from, drawn from those of the training products.
        forks: queries for each, at least 2.
        rate: learning rate at the start; it falls to 0.
        seed: seed of what is drawn.
    """
    rng = random.Random(f"train/{seed}")
    env = shop("product-train")
    base: Any = env.unwrapped
    for at in range(tasks):
        observation, _ = env.reset(seed=at, options={"task": rng.randrange(base.num_tasks)})
        words = words_of(observation)
        snap = sandboxgym.snapshot(env)
        draws, rewards = [], []
        for _ in range(forks):
            sandboxgym.restore(env, snap)
            draws.append(policy.draw(words, rng))
            query = [word for word, taken in zip(words, draws[-1]) if taken]
            rewards.append(bought(env, observation, query)[0])
        snap.release()
        step = rate * (1 - at / tasks) / forks
        for taken, reward in zip(draws, rewards):
            advantage = reward - (sum(rewards) - reward) / (forks - 1)
            if advantage:
                policy.learn(words, taken, step * advantage)
    env.close()


def score(query: Query, *, panel: int, seed: int = 0) -> tuple[float, float]:
    """Mean reward and success rate on the first goals of products without any training goal."""
    env = shop("product-test")
    results = []
    for task in range(panel):
        observation, _ = env.reset(seed=task, options={"task": task})
        words = words_of(observation)
        results.append(bought(env, observation, query(words, random.Random(f"score/{seed}/{task}"))))
    env.close()
    return statistics.fmean(reward for reward, _ in results), statistics.fmean(success for _, success in results)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; prints Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m bpo_ref.experiments.queries", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=2000, help="instructions to learn from")
    parser.add_argument("--forks", type=int, default=4, help="queries per instruction")
    parser.add_argument("--panel", type=int, default=500, help="goals in the evaluation set")
    args = parser.parse_args(argv)
    print("| words searched for | score | success |\n|---|---|---|")

    def row(name: str, query: Query, seed: int = 0) -> None:
        mean, success = score(query, panel=args.panel, seed=seed)
        print(f"| {name} | {mean:.3f} | {success:.1%} |", flush=True)

    row("one, at random", lambda words, rng: [rng.choice(words)])
    row("each with probability 0.2 (where learning starts)", QueryPolicy())
    row("each with probability 0.5", QueryPolicy(any=0.0))
    policy = QueryPolicy()
    for seed in args.seeds:
        policy = QueryPolicy()
        train(policy, tasks=args.tasks, forks=args.forks, seed=seed)
        row(f"learned, seed {seed} ({args.tasks * args.forks:,} episodes)", policy, seed)
    row("the whole instruction", lambda words, rng: words)
    ranked = sorted(policy.own, key=policy.own.__getitem__)
    print(f"\nLast seed: most wanted {', '.join(ranked[:-16:-1])}; least wanted {', '.join(ranked[:15])}.")


if __name__ == "__main__":
    main()
