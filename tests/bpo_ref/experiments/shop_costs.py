"""Noise of gradient estimators with look-ahead on WebShop's real pages, for a policy that is a formula.

    python tests/bpo_ref/experiments/shop_costs.py --progress worth --out docs/results/details/variance-lookahead-shop
    python tests/bpo_ref/experiments/shop_costs.py --progress worth --place      # for docs/results/phase-diagram.md

The policy weighs the listed actions of a page by 12 features of their words, so that goals at large cost no network.
Environment, rollouts, look-ahead, credit and table are those of `bpo_ref.variance`; an action counts as one token.
Gradients are of the 12 weights. Beside the table: look-ahead relative to the same estimator without, paired by task.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import sandboxgym  # noqa: F401  registers the environments
from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.experiments.phase.placing import FORKED, PLAIN, POOLED, DiagramPlace, forked, placed
from bpo_ref.experiments.variance import Samples, VarianceStudy, compare, read_method, table
from bpo_ref.lookahead import Ids, LookAhead
from bpo_ref.sampling.generate import Generation
from bpo_ref.sampling.selection import draw_tasks
from bpo_ref.schedules import make_schedule
from bpo_ref.train import assign_credit
from sandboxgym.adapters.prompts import Prompt
from sandboxgym.tree import Action, Context, Edge, Envs, RolloutTree, rollout

WEIGHTS = np.array([3.0, -2.5, -1.5, -2.0, -1.5, 0.0, 6.0, 1.0, -1.0, 4.0, -1.0, 3.5])
KINDS = ("search", "click[back to search]", "click[next >]", "click[description]", "click[< prev]")
TURNS = 8
METHODS = (
    "rloo:roots=8", "rloo:roots=8,lookahead=true", "rloo-pooled:roots=8", "rloo-pooled:roots=8,lookahead=true",
    "rloo-pooled:roots=8,lookahead=true,network=lookahead", "rloo-pooled:roots=8,lookahead=true,network=both",
    "bpo", "bpo:lookahead=true", "bpo:lookahead=true,network=both",
)  # fmt: skip
REFERENCE = "rloo-turn:roots=16"


@dataclass(frozen=True)
class Page:
    """A page of the shop, as the policy knows it."""

    commands: list[str]
    told: np.ndarray  # [actions, 12]
    chances: np.ndarray  # [actions]
    entropy: float


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def features(command: str, observation: str, instruction: str) -> list[float]:
    """The 12 numbers of an action: its kind, what a product's title or an option has of the instruction, and whether
    all options that the instruction names are chosen."""
    told, wanted = [0.0] * len(WEIGHTS), words(instruction)
    kind = "click[description]" if command in ("click[features]", "click[reviews]", "click[attributes]") else command
    named = "search" if kind.startswith("search[") else kind
    pieces = observation.split(" [SEP] ")
    if named in KINDS:
        told[KINDS.index(named)] = 1.0
    elif command == "click[buy now]":
        buttons = pieces[pieces.index("< Prev") + 1 :] if "< Prev" in pieces else []
        told[10], told[11] = 1.0, float(not any(asked(piece, instruction) for piece in buttons))
    elif (name := command[6:-1].upper()) in pieces:
        at = pieces.index(name)
        title, price = pieces[at + 1], re.search(r"[\d.]+", pieces[at + 2])
        limit = re.search(r"lower than ([\d.]+)", instruction)
        dear = bool(price and limit and float(price[0]) > float(limit[1].rstrip(".")))
        told[5], told[6], told[7] = 1.0, len(words(title) & wanted) / max(1, len(words(title))), float(not dear)
    else:
        told[8], told[9] = 1.0, float(asked(command[6:-1], instruction) and f"{command[6:-1]} (selected)" not in pieces)
    return told


def asked(option: str, instruction: str) -> bool:
    """True if the instruction names an option (as ``group: option``)."""
    return f": {option.lower()}" in instruction.lower()


class Shopper:
    """Policy: softmax of WEIGHTS times features over the listed actions."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}

    def page(self, info: dict[str, Any], observation: str) -> Page:
        found = self.pages.get(info["state_hash"])
        if found is None:
            commands = list(info["admissible_commands"])
            told = np.array([features(command, observation, info["instruction"]) for command in commands])
            logits = told @ WEIGHTS
            chances = np.exp(logits - logits.max())
            chances /= chances.sum()
            found = Page(commands, told, chances, float(-(chances * np.log(chances)).sum()))
            self.pages[info["state_hash"]] = found
        return found

    def __call__(self, contexts: Sequence[Context]) -> list[Action]:
        return [self._act(context) for context in contexts]

    def _act(self, context: Context) -> Action:
        state = context.info["state_hash"]
        page = self.page(context.info, context.observation)
        drawn = int(np.searchsorted(page.chances.cumsum(), context.rng.random() * (1 - 1e-12), side="right"))
        command = page.commands[min(drawn, len(page.commands) - 1)]
        action = Action(command, entropy=page.entropy, position=context.depth, tokens=1)
        action.data = Generation([command], [], [], False)  # type: ignore[list-item]
        action.memory = Said((state, command))
        return action

    def score(self, asked: Sequence[tuple[Ids, Ids]]) -> list[float]:
        told = []
        for context, answer in asked:
            page = self.pages[context[-1]]  # type: ignore[index]
            told.append(math.log(page.chances[page.commands.index(answer[0])]))  # type: ignore[arg-type]
        return told


@dataclass(frozen=True)
class Said:
    """A page and the action taken there, as if each was a token."""

    said: tuple[str, str]

    def ids(self) -> list[str]:
        return list(self.said)


class Words:
    """A tokenizer with one token per action."""

    stop_ids: Sequence[int] = ()
    thinks = False

    def answer_ids(self, text: str) -> list[Any]:
        return [text]

    def text(self, ids: Sequence[Any]) -> str:
        return str(list(ids))


class Listed(LookAhead):
    """Whose answers have no stop token."""

    def _writings(self, answer: Any, thought: Ids, room: int) -> list[Ids]:
        return [(answer,)]


def settings(method: str, tasks: int) -> Args:
    algo, given = read_method(method)
    fixed: dict[str, Any] = {"prompts": tasks, "max_turns": TURNS, "aggregation": "constant", "value_decay": 1.0}
    return resolved(replace(Args(algo=algo), **{**fixed, **given}))  # type: ignore[arg-type]


def gradient(tree: RolloutTree, shopper: Shopper) -> np.ndarray:
    """Gradient of one tree [12]."""
    g = np.zeros(len(WEIGHTS))
    for edge in tree.edges():
        state, command = edge.action.memory.said
        page = shopper.pages[state]
        g += edge.weight * edge.advantage * (page.told[page.commands.index(command)] - page.chances @ page.told)
    return g


def squared(tree: RolloutTree, shopper: Shopper, errors: Sequence[tuple[Edge, float]]) -> float:
    """Σ error² |score|² of these edges."""
    total = 0.0
    for edge, error in errors:
        state, command = edge.action.memory.said
        page = shopper.pages[state]
        score = page.told[page.commands.index(command)] - page.chances @ page.told
        total += error**2 * float(score @ score)
    return total


class Shop:
    """The methods' samples, batch by batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.shopper = options, Shopper()
        kwargs = {"split": "product-train", "progress": options.progress, "features": True}
        self.envs = Envs(lambda: gym.make("sandboxgym/WebShop-v0", max_episode_steps=TURNS, **kwargs))
        self.tasks = self.draw(0)
        self.args = {method: settings(method, options.tasks) for method in (*METHODS, REFERENCE)}
        self.memory = {method: Memory.of(args) for method, args in self.args.items()}
        self.look = Listed(self.args[METHODS[1]], Prompt(), Words(), self.memory[METHODS[1]].values)  # type: ignore
        self.gradients: dict[str, list[Any]] = {method: [] for method in self.args}
        self.spent: dict[str, list[Any]] = {method: [] for method in self.args}
        self.rewards: list[float] = []

    def draw(self, batch: int) -> list[Any]:
        env = self.envs.take()
        drawn = draw_tasks(env, self.options.tasks, (self.options.seed, 91, batch))
        self.envs.give(env)
        return drawn

    def sample(self, method: str, tasks: list[Any], seed: tuple[int, ...], look: bool) -> list[RolloutTree]:
        schedule = make_schedule(self.args[method], seed, self.memory[method], tasks=tasks)
        return rollout(self.envs, self.shopper, schedule, tasks=tasks, seed=seed, look=self.look if look else None)

    def groups(self) -> list[list[str]]:
        """Methods that share their trees."""
        forked = [method for method in METHODS if self.args[method].schedule != "none"]
        return [[method for method in METHODS if method not in forked], forked]

    def teach(self) -> None:
        for batch in range(self.options.pilot):
            for number, group in enumerate(self.groups()):
                seed = (self.options.seed, 1 + number, 0, batch)
                trees = self.sample(group[0], self.draw(1 + batch), seed, look=False)
                for method in group:
                    args, memory = self.args[method], self.memory[method]
                    memory.observe(trees, assign_credit(trees, args, memory), args)

    def measure(self, repeat: int) -> None:
        for number, group in enumerate((*self.groups(), [REFERENCE])):
            trees = self.sample(group[0], self.tasks, (self.options.seed, 1 + number, 1, repeat), look=number < 2)
            for method in group:
                args, memory = self.args[method], self.memory[method]
                for edge in (edge for tree in trees for edge in tree.edges()):
                    edge.control = 0.0
                if args.lookahead:
                    Listed(args, Prompt(), Words(), memory.values, memory.network).set_controls(  # type: ignore
                        trees, self.shopper.score
                    )
                assign_credit(trees, args, memory)
                self.gradients[method].append([gradient(tree, self.shopper) for tree in trees])
                self.spent[method].append([[len(t.paths), t.env_steps, t.tokens] for t in trees])
            if number == 0:
                self.rewards += [path.total_reward for tree in trees for path in tree.paths]

    def place(self) -> DiagramPlace:
        """L and ρ of the policy, as `bpo_ref.experiments.phase.placing` defines them."""
        seed, plain, pooled = self.options.seed, self.args[PLAIN], self.args[POOLED]
        vine, memory = settings(FORKED, self.options.tasks), self.memory[POOLED]
        for batch in range(self.options.pilot):
            trees = self.sample(POOLED, self.draw(1 + batch), (seed, 1, 0, batch), look=False)
            memory.observe(trees, assign_credit(trees, pooled, memory), pooled)
        a, c, d = (np.zeros((self.options.repeats, self.options.tasks)) for _ in range(3))
        turns: list[int] = []
        for repeat in range(self.options.repeats):
            trees = self.sample(POOLED, self.tasks, (seed, 1, 1, repeat), look=False)
            for into, args in ((a, plain), (c, pooled)):
                assign_credit(trees, args, memory)
                for task, tree in enumerate(trees):
                    errors = [(edge, edge.advantage) for edge in tree.edges()]
                    into[repeat, task] = squared(tree, self.shopper, errors) / len(tree.paths)
            self.rewards += [path.total_reward for tree in trees for path in tree.paths]
            turns += [len(path.edges) for tree in trees for path in tree.paths]
            schedule = make_schedule(vine, (seed, 4, 1, repeat), memory, tasks=self.tasks)
            trees = rollout(self.envs, self.shopper, schedule, tasks=self.tasks, seed=(seed, 4, 1, repeat))
            assign_credit(trees, vine, memory)
            for task, tree in enumerate(trees):
                d[repeat, task] = squared(tree, self.shopper, forked(tree, vine)) / (vine.roots or 1)
        study = VarianceStudy("", "", seed=seed)
        return placed(a, c, d, float(np.mean(self.rewards)), float(np.mean(turns)), rollouts=8, study=study)

    def write(self) -> str:
        samples = {}
        for method, found in self.gradients.items():
            samples[method] = Samples(method, np.array(found), np.array(self.spent[method], dtype=float), 0.0, 0.0)
        compared = partial(compare, reference=samples[REFERENCE], bootstrap=2000, minibatch=4, seed=self.options.seed)
        lines = compared([samples[method] for method in METHODS])
        Path(f"{self.options.out}.json").write_text(json.dumps([asdict(line) for line in lines], indent=1))
        text = [table(lines)]
        for base, others in (
            ("rloo:roots=8", METHODS[1:2]),
            ("rloo-pooled:roots=8", METHODS[3:6]),
            ("bpo", METHODS[7:]),
        ):
            for line in compared([samples[base], *(samples[method] for method in others)])[1:]:
                text.append(f"{line.name} relative to {base}: {line.cost['tokens']}")
        won = np.array(self.rewards)
        text.append(f"mean reward {won.mean():.3f}, all of it {(won == 1.0).mean():.3f}, {len(won)} episodes")
        return "\n".join(text)


def main() -> None:
    """Print tables after every batch from the third."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--progress", choices=("options", "worth"), default="worth")
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--pilot", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/shop-costs")
    parser.add_argument("--place", action="store_true", help="measure lateness and quality instead")
    shop = Shop(parser.parse_args())
    if shop.options.place:
        print(shop.place(), f"{time.process_time():.0f} s of processor time")
        shop.envs.close()
        return
    Path(shop.options.out).parent.mkdir(parents=True, exist_ok=True)
    shop.teach()
    print(f"taught, {time.process_time():.0f} s of processor time", flush=True)
    for repeat in range(shop.options.repeats):
        shop.measure(repeat)
        if repeat > 1:
            print(f"{repeat + 1} batches, {time.process_time():.0f} s of processor time\n{shop.write()}", flush=True)
    shop.envs.close()


if __name__ == "__main__":
    main()
