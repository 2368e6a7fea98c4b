"""Settings with look-ahead on tabular environments that list their actions, and batches of trees for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tabular import MDP, TabularEnv, TabularPolicy, random_mdp

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.lookahead import Ids, LookAhead
from bpo_ref.sampling.generate import Generation
from bpo_ref.sampling.policy import Turn
from bpo_ref.schedules import make_schedule
from bpo_ref.train import assign_credit
from sandboxgym.adapters.prompts import Prompt
from sandboxgym.core import Transition
from sandboxgym.tree import Action, Context, Edge, Envs, RolloutTree, rollout

SPARSE, DENSE = random_mdp(seed=244), random_mdp(seed=244, dense=True)
TASKS = (0, 1, 0, 1)
COMMON: dict[str, Any] = {"prompts": 4, "spacing": 1, "width": 2, "points": 3, "max_turns": 5, "value_decay": 1.0}


def settings(algo: str, **options: Any) -> Args:
    return resolved(Args(algo=algo, **{**COMMON, "lookahead": True, **options}))  # type: ignore[arg-type]


def edges_of(trees: Sequence[RolloutTree]) -> Iterator[Edge]:
    return (edge for tree in trees for edge in tree.edges())


class ListedEnv(TabularEnv):
    """Names its actions, or some of them."""

    def __init__(self, mdp: MDP, listed: Sequence[int]) -> None:
        super().__init__(mdp)
        self.listed = list(listed)

    def successors(self, actions: Sequence[int]) -> list[Transition]:
        before, stream, found = self.state, self.np_random.bit_generator.state, []
        for action in actions:
            found.append(Transition(*TabularEnv.step(self, action)))
            self.state, self.np_random.bit_generator.state = before, stream
        return found

    def _info(self) -> dict[str, Any]:
        t, state, _ = self.state
        told = [float(state == other) for other in range(len(self.mdp.logits))]
        return {**super()._info(), "admissible_commands": self.listed, "features": (*told, t / self.mdp.horizon)}


class TokenPolicy(TabularPolicy):
    """Says what it does in one token, behind a context that is the state."""

    def _act(self, context: Context) -> Action:
        action = super()._act(context)
        action.data = Generation([action.text], [], [], False)
        action.memory = Turn(None, [context.observation], [action.text], False)
        return action


class OneToken:
    """A tokenizer of numbers; nothing but the action ends a turn."""

    stop_ids: Sequence[int] = ()
    thinks = False

    def answer_ids(self, text: Any) -> list[int]:
        return [text]

    def text(self, ids: Sequence[int]) -> str:
        return str(list(ids))


class Bare(LookAhead):
    """Whose answers have no stop token."""

    def _writings(self, answer: Any, thought: Ids, room: int) -> list[Ids]:
        return [(answer,)]


def batches_of(
    mdp: MDP, args: Args, memory: Memory, *, batches: int, listed: Sequence[int], teach: bool = False
) -> Iterator[tuple[list[RolloutTree], LookAhead, Callable[[Any], list[float]]]]:
    envs, policy = Envs(lambda: ListedEnv(mdp, listed)), TokenPolicy(mdp)
    log = np.log(mdp.policy)

    def score(asked: Sequence[tuple[Ids, Ids]], log: np.ndarray = log) -> list[float]:
        return [float(log[context[-1], answer[0]]) for context, answer in asked]

    for batch in range(batches):
        number = batch + teach * 10**6
        ahead = Bare(args, Prompt(), OneToken(), memory.values, memory.network)
        schedule = make_schedule(args, (9, number), memory, tasks=TASKS)
        trees = rollout(envs, policy, schedule, tasks=TASKS, seed=(number,), look=ahead)
        ahead.set_controls(trees, score)
        yield trees, ahead, score
    envs.close()


def taught(mdp: MDP, args: Args) -> Memory:
    memory = Memory.of(args)
    for trees, *_ in batches_of(mdp, args, memory, batches=60, listed=(0, 1), teach=True):
        memory.observe(trees, assign_credit(trees, args, memory), args)
    return memory


def briefly(mdp: MDP, args: Args) -> Memory:
    """Taught a network, by fewer batches."""
    memory = Memory.of(args)
    for trees, *_ in batches_of(mdp, args, memory, batches=8, listed=(0, 1), teach=True):
        memory.observe(trees, assign_credit(trees, args, memory), args)
    assert memory.network is not None and memory.network.known
    return memory


def nonsense(mdp: MDP, args: Args) -> Memory:
    """V̂ of numbers that mean nothing."""
    memory, rng = taught(mdp, args), np.random.default_rng(3)
    for entry in memory.values._sums.values():
        entry[1] = entry[0] * rng.normal()
    return memory


ROULETTE: dict[str, Any] = {"roulette": 0.5, "roulette_below": 0.4}
CASES: dict[str, tuple[MDP, Args, Callable[[MDP, Args], Memory], Sequence[int]]] = {
    "rloo": (SPARSE, settings("rloo", roots=4), taught, (0, 1)),
    "rloo-pooled": (SPARSE, settings("rloo-pooled", roots=4), taught, (0, 1)),
    "rloo-pooled, V̂ of nonsense": (SPARSE, settings("rloo-pooled", roots=4), nonsense, (0, 1)),
    "rloo-pooled, one action listed": (SPARSE, settings("rloo-pooled", roots=4), taught, (1,)),
    "rloo-key, rewards on the way": (DENSE, settings("rloo-key", roots=4, gamma=0.8), taught, (0, 1)),
    "rloo-turn": (SPARSE, settings("rloo-turn", roots=4), taught, (0, 1)),
    "rloo-value": (SPARSE, settings("rloo-value", roots=4), taught, (0, 1)),
    "bpo-forest": (SPARSE, settings("bpo-forest", roots=4, points=1), taught, (0, 1)),
    "bpo-tree": (SPARSE, settings("bpo-tree", width=3, points=2, step_weight_power=1.0), taught, (0, 1)),
    "bpo-split": (SPARSE, settings("bpo-split"), taught, (0, 1)),
    "bpo-split, siblings": (SPARSE, settings("bpo-split", baseline="none", fork_baseline="siblings"), taught, (0, 1)),
    "bpo": (SPARSE, settings("bpo", **ROULETTE), taught, (0, 1)),
    "bpo, V̂ of nonsense": (SPARSE, settings("bpo", roulette=1.0), nonsense, (0, 1)),
    "bpo, rewards on the way": (DENSE, settings("bpo", gamma=0.8, roulette=0.5, roulette_below=0.3), taught, (0, 1)),
    "bpo, one action listed": (SPARSE, settings("bpo", **ROULETTE), taught, (0,)),
    "bpo, by refusals": (replace(SPARSE, refused=(2, 4)), settings("bpo", refusals=True, **ROULETTE), taught, (0, 1)),
    "rloo-pooled, network": (SPARSE, settings("rloo-pooled", roots=4, network="both"), briefly, (0, 1)),
    "rloo-value, network in the baseline": (
        SPARSE,
        settings("rloo-value", roots=4, network="baseline"),
        briefly,
        (0, 1),
    ),
    "bpo, network and splits by fair variance, rewards on the way": (
        DENSE,
        settings("bpo", gamma=0.8, network="both", split_variance="fair"),
        briefly,
        (0, 1),
    ),
    "bpo, splits by fair variance": (SPARSE, settings("bpo", split_variance="fair", **ROULETTE), taught, (0, 1)),
    "bpo, small differences left out": (SPARSE, settings("bpo", lookahead_least=0.1, **ROULETTE), taught, (0, 1)),
    "uneven roots": (SPARSE, settings("rloo-pooled", roots=4, allocation="spread"), taught, (0, 1)),
}
