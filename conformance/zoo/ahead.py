"""Faults of look-ahead: actions that are tried, not taken.

`Lookout` is correct and computes its successors itself; every mutant has another ``tried`` or ``outcomes``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from sandboxgym import SnapshotEnv, Transition
from zoo.mutant import good, mutant

Output = tuple[int, dict[str, Any]]


@good()
class Lookout(SnapshotEnv[int, int]):
    """A walk with gusts that costs energy; the places passed are in info."""

    def __init__(self) -> None:
        self.observation_space = spaces.Discrete(97)
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.place, self.energy = int(self.np_random.integers(97)), 40
        self.passed: list[int] = []
        return self.place, self.info()

    def info(self) -> dict[str, Any]:
        return {"energy": self.energy, "passed": list(self.passed)}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return self.moved(action)

    def moved(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """The step itself."""
        self.passed.append(self.place)
        self.place = (3 * self.place + int(action) + int(self.np_random.integers(3))) % 97
        self.energy -= 1 + int(action)
        return self.place, self.place / 97 - int(action), self.energy <= 0, False, self.info()

    def successors(self, actions: Sequence[int]) -> list[Transition]:
        state, bits = copy.deepcopy(self._capture()), self.np_random.bit_generator.state
        found = [self.tried(action, state, bits) for action in actions]
        self.back(state, bits)
        return found

    def tried(self, action: int, state: Any, bits: Any) -> Transition:
        """Return the transition of an action from a state."""
        self.back(copy.deepcopy(state), bits)
        return Transition(*self.moved(action))

    def back(self, state: Any, bits: Any) -> None:
        """Return to the state from which actions are tried."""
        self._apply(state)
        self.np_random.bit_generator.state = bits

    def _capture(self) -> Any:
        return {"place": self.place, "energy": self.energy, "passed": self.passed}

    def _apply(self, state: Any) -> None:
        self.place, self.energy, self.passed = state["place"], state["energy"], state["passed"]


@mutant("a look-ahead draws from the episode's stream", "fork.look_ahead")
class AheadDraws(Lookout):
    """Look-ahead that takes back the tried actions, but not their draws."""

    def successors(self, actions: Sequence[int]) -> list[Transition]:
        found = super().successors(actions)
        self.np_random.integers(3, size=len(actions))
        return found


@mutant("a look-ahead takes its last action", "fork.look_ahead")
class AheadTakes(Lookout):
    """Nothing is taken back after the last action."""

    def successors(self, actions: Sequence[int]) -> list[Transition]:
        state, bits = copy.deepcopy(self._capture()), self.np_random.bit_generator.state
        return [self.tried(action, state, bits) for action in actions]


@mutant("actions that are tried share a list", "fork.look_ahead")
class AheadShares(Lookout):
    """The places passed are those of all actions tried before."""

    def tried(self, action: int, state: Any, bits: Any) -> Transition:
        self.back(dict(state), bits)
        return Transition(*self.moved(action))


@mutant("an action that is tried meets the draws after those of the one before", "fork.look_ahead")
class AheadDrawsOn(Lookout):
    """Each action has a gust of its own."""

    def tried(self, action: int, state: Any, bits: Any) -> Transition:
        self._apply(copy.deepcopy(state))
        return Transition(*self.moved(action))


@mutant("an outcome does not tell the end", "fork.look_ahead")
class AheadNeverEnds(Lookout):
    """Outcomes without observations, made for speed, are never final."""

    def outcomes(self, actions: Sequence[int]) -> list[Transition]:
        return [one._replace(observation=None, terminated=False, info={}) for one in self.successors(actions)]
