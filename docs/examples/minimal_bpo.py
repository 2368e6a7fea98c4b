"""Branching Policy Optimization in one file, to copy: fork the environment, credit the branches, learn.

An agent learns to shop. Its policy is a network that scores the commands which a page offers, so all of it runs in a
few seconds on one core; with a language model in its place only `Policy` changes. The algorithm is `explore` (forks),
`credit` (advantages) and `learn` (the loss); bpo_ref does the same with models that generate text, batched over trees,
with better baselines and on many GPUs.

    pip install "sandboxgym[train]"
    python minimal_bpo.py --updates 40

Why it is unbiased: whether a state is forked is drawn before anything is known of what follows, a fork's children are
independent draws of the policy, each with half of the weight, and no action is compared with returns that it had a part
in. docs/theory.md has the proof, and says what is lost where one of these is not so.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import gymnasium as gym
import torch

import sandboxgym

WORDS = 2048
"""Weights of the policy: words are hashed to so many."""


# The policy: what a command is, what page it is on, and whether the instruction asks for it.


def features(info: dict, command: str, seen: set[str]) -> list[int]:
    """The words that a command is scored by, hashed."""
    page, (kind, _, rest) = info["page_type"], command.rstrip("]").partition("[")
    asked = set(re.findall(r"\w+", info["instruction"].lower()))
    words = re.findall(r"\w+", rest.lower())
    fixed = rest in ("back to search", "< prev", "next >", "description", "features", "reviews", "buy now")
    name = rest if fixed else kind
    share = round(4 * sum(word in asked for word in words) / max(1, len(words)))
    whole = bool(words) and rest.lower() in info["instruction"].lower()
    told = [name, f"{page} {name}", f"{page} {name} {share} {whole}", f"{page} {name} again {command in seen}"]
    return [stable_hash(word) for word in told]


def stable_hash(word: str) -> int:
    """Not Python's own, which is another one in each process."""
    value = 0
    for byte in word.encode():
        value = (value * 31 + byte) % 1_000_003
    return value % WORDS


class Policy(torch.nn.Module):
    """A softmax over the scores of the commands that a state offers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(WORDS, 1)
        torch.nn.init.zeros_(self.weights.weight)

    def log_probabilities(self, options: list[list[int]]) -> torch.Tensor:
        """Log-probability of each of the commands, (commands,)."""
        return torch.log_softmax(self.weights(torch.tensor(options)).sum((1, 2)), 0)


# The tree.


@dataclass
class Edge:
    """An action, with what came after it."""

    options: list[list[int]]
    """Features of the commands to choose from."""
    chosen: int
    weight: float
    """Its path's share: 1 at the root, half of it below every fork."""
    key: str
    """Progress of the task in the state where it was chosen, by which its baseline is looked up."""
    reward: float = 0.0
    children: list[Edge] = field(default_factory=list)
    value: float = 0.0
    """Mean return from here on, over the leaves below."""
    advantage: float = 0.0


def explore(env: gym.Env, policy: Policy, task: int, rng: random.Random, split: float) -> list[Edge]:
    """Play a task once, forking now and then; the edges that leave the root (one, or two if it forked)."""
    _, info = env.reset(seed=rng.randrange(2**31), options={"task": task})
    return grow(env, policy, info, frozenset(), 1.0, rng, split, forks=3)


def grow(env, policy, info, seen, weight, rng, split, forks) -> list[Edge]:
    """The edges that leave the present state, each with all that comes after it."""
    width = 2 if forks and rng.random() < split else 1  # drawn before the action: the choice must not know the outcome
    snap = sandboxgym.snapshot(env) if width > 1 else None
    edges = []
    for number in range(width):
        if number:
            _, info = sandboxgym.restore(env, snap)  # the sibling starts in the very same state
        commands = info["admissible_commands"]
        options = [features(info, command, seen) for command in commands]
        with torch.no_grad():
            chances = policy.log_probabilities(options).exp().tolist()
        chosen = rng.choices(range(len(commands)), chances)[0]
        edge = Edge(options, chosen, weight / width, info["progress_key"])
        _, reward, terminated, truncated, after = env.step(commands[chosen])
        edge.reward = float(reward)
        if not (terminated or truncated):
            below = forks - (width > 1)
            edge.children = grow(env, policy, after, seen | {commands[chosen]}, edge.weight, rng, split, below)
        edges.append(edge)
    if snap is not None:
        snap.release()
    return edges


def walk(edges: list[Edge]) -> Iterator[tuple[Edge, list[Edge]]]:
    """Every edge below, with its siblings."""
    for edge in edges:
        yield edge, [other for other in edges if other is not edge]
        yield from walk(edge.children)


# Credit.


def evaluate(edges: list[Edge]) -> None:
    """Set each edge's value: its reward and the mean over what follows, an unbiased estimate of Q."""
    for edge in edges:
        evaluate(edge.children)
        edge.value = edge.reward
        if edge.children:
            edge.value += sum(child.value for child in edge.children) / len(edge.children)


def credit(trees: list[list[Edge]], means: dict[str, tuple[float, int]]) -> None:
    """Set advantages: a value minus that of the siblings, or of earlier batches' states that had come as far.

    A sibling is the sharper comparison, for it began in the same state; it is independent given that state, and so is
    what earlier batches have found: neither changes what the gradient is on average.
    """
    found: list[tuple[str, float]] = []
    for tree in trees:
        evaluate(tree)
        for edge, siblings in walk(tree):
            mean = means.get(edge.key, (0.0, 0))[0]
            others = [sibling.value for sibling in siblings]
            edge.advantage = edge.value - (sum(others) + mean) / (len(others) + 1)
            found.append((edge.key, edge.value))
    for key, value in found:  # after all of the batch is credited
        mean, count = means.get(key, (0.0, 0))
        rate = max(1 / (count + 1), 0.01)
        means[key] = mean + rate * (value - mean), count + 1


# Learning.


def learn(policy: Policy, optimizer: torch.optim.Optimizer, trees: list[list[Edge]]) -> None:
    """One step up the policy gradient: Σ weight · advantage · ∇ log π, per task."""
    loss = torch.zeros(())
    for tree in trees:
        for edge, _ in walk(tree):
            loss = loss - edge.weight * edge.advantage * policy.log_probabilities(edge.options)[edge.chosen]
    optimizer.zero_grad()
    (loss / len(trees)).backward()
    optimizer.step()


def score(env: gym.Env, policy: Policy, tasks: range, seed: int) -> float:
    """Mean return of one episode per task, without forks."""
    rng, total = random.Random(seed), 0.0
    for task in tasks:
        edges = explore(env, policy, task, rng, split=0.0)
        evaluate(edges)
        total += edges[0].value
    return total / len(tasks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=16, help="per update")
    parser.add_argument("--split", type=float, default=0.3, help="chance that a state is forked; 0 is REINFORCE")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    env = gym.make("sandboxgym/WebShop-v0", max_episode_steps=8)
    goals = env.unwrapped.num_tasks
    held_out = range(goals - 64, goals)
    policy, rng, means = Policy(), random.Random(args.seed), {}
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    print(f"{goals} goals, of which the last 64 are kept to evaluate on")
    print(f"before  return {score(env, policy, held_out, seed=1):.3f}")
    for update in range(args.updates):
        tasks = rng.sample(range(goals - 64), args.tasks)
        trees = [explore(env, policy, task, rng, args.split) for task in tasks]
        credit(trees, means)
        learn(policy, optimizer, trees)
        edges = [edge for tree in trees for edge, _ in walk(tree)]
        leaves = sum(not edge.children for edge in edges)
        mean = sum(edge.value for tree in trees for edge in tree) / sum(len(tree) for tree in trees)
        if update % 5 == 4:
            print(
                f"update {update + 1:3}  return {mean:.3f}  {len(edges)} steps, {leaves} leaves of {len(trees)} trees"
            )
    print(f"after   return {score(env, policy, held_out, seed=1):.3f}")
    env.close()
