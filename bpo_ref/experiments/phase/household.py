"""Embedded ALFWorld games in which one decision, moved to an earlier or later turn, wins or loses.

The policy is a script over the game's own commands. It goes to the object, takes either it or another one beside it
(the decision: the right one with probability 0.3), carries that to the goal and puts it there. In the other eight of
its twelve turns it chooses ``inventory`` with probability 0.3, else ``look``, which decides nothing. So an episode is a
`Chain` with one decision, and the turn of the decision and the quality of the progress key can be varied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bpo_ref.args import Args
from bpo_ref.baselines import Memory
from bpo_ref.experiments.phase.chain import Chain, memory_of
from sandboxgym.envs.alfworld.env import HARMLESS, ALFWorldEnv
from sandboxgym.tree import Action, Context, RolloutTree

TURNS, CHANCE = 12, 0.3
HELD, NOTHING = "0/1 held", "0/1"
"""Progress keys after the decision: of those who win, and of those who lose."""


@dataclass(frozen=True)
class Script:
    """Commands of a game: to the object, take it or another, to the goal, put either."""

    game: int
    go: str
    take: tuple[str, str]
    carry: str
    put: tuple[str, str]


def scripts(env: ALFWorldEnv, count: int) -> list[Script]:
    """The first games that four commands win and in which another object lies beside the right one.

    Raises:
        ValueError: there are fewer such games.
    """
    found: list[Script] = []
    for game in range(len(env.library)):
        env.reset(options={"task": game})
        plan = env.solve()
        if len(plan) == 4 and plan[1].startswith("take "):
            go, take, carry, put = plan
            *_, info = env.step(go)
            right, _, place = take.removeprefix("take ").partition(" from ")
            for other in info["admissible_commands"]:
                wrong, _, at = other.removeprefix("take ").partition(" from ")
                if other.startswith("take ") and at == place and wrong.split()[0] != right.split()[0]:
                    puts = (put.replace(right, wrong), put)
                    found.append(Script(game, go, (other, take), carry, puts))
                    break
        if len(found) == count:
            return found
    raise ValueError(f"expected {count} games with a choice of objects, found {len(found)}")


def chain_of(decision: int) -> Chain:
    """The chain that these games are, when the object is taken at turn ``decision``."""
    return Chain(decision, length=1, need=1, steps=TURNS, chance=CHANCE, forced=(decision - 1, TURNS - 2, TURNS - 1))


class VagueKeys(ALFWorldEnv):
    """ALFWorld whose steps show a key that is wrong as often as ``quality`` says; an episode ends after 12 turns."""

    def __init__(self, decision: int, quality: float, **options: Any) -> None:
        super().__init__("embedded:train", task_types=["pick_and_place_simple"], **options)
        self._decision, self._right = decision, math.sqrt(quality)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send a command; after the decision the key may be another path's."""
        observation, reward, ended, _, info = super().step(action)
        if info["moves"] > self._decision and self.np_random.random() >= self._right:
            info["progress_key"] = (NOTHING, HELD)[int(self.np_random.random() < CHANCE)]
        return observation, reward, ended, not ended and info["moves"] >= TURNS, info


class Actor:
    """The script as a policy; `Action.memory` has the turn and the coin."""

    def __init__(self, scripts: Sequence[Script], decision: int) -> None:
        self._scripts, self._decision = scripts, decision

    def __call__(self, contexts: Sequence[Context]) -> list[Action]:
        """The next command of every path."""
        return [self._act(context) for context in contexts]

    def _act(self, context: Context) -> Action:
        script, turn = self._scripts[context.path[0]], context.depth
        coin = int(context.rng.random() < CHANCE)
        right = int(script.put[1] in context.info["admissible_commands"])
        fixed = {self._decision - 1: script.go, self._decision: script.take[coin]}
        fixed |= {TURNS - 2: script.carry, TURNS - 1: script.put[right]}
        text = fixed.get(turn, HARMLESS[coin])
        return Action(text, position=turn, tokens=1, memory=(turn, coin))


def memory_for(decision: int, args: Args, quality: float) -> Memory:
    """Memory with V̂ exact for the games' keys: that of the chain, whose keys are renamed."""
    memory = memory_of(chain_of(decision), args, quality)
    state = memory.values.state()
    names = (NOTHING, HELD)
    sums: dict[Any, list[float]] = {}
    for ((_, won), half), entry in state["sums"]:
        into = sums.setdefault((names[won], half), [0.0] * 3)
        into[:] = [a + b for a, b in zip(into, entry, strict=True)]
    return replace(memory, values=type(memory.values)(1.0, state={**state, "sums": list(sums.items())}))


def gradient(tree: RolloutTree, chain: Chain) -> NDArray[np.float64]:
    """Gradient of one tree with credit assigned, by two logits per turn, flattened."""
    found = np.zeros(TURNS)
    for edge in tree.edges():
        turn, coin = edge.action.memory
        if turn not in chain.forced:
            found[turn] += edge.weight * edge.advantage * (coin - CHANCE)
    return np.concatenate([found, -found])
