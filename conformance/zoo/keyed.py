"""Randomness without a known kind of generator (an integer key, a private space), and faults in its seeds.

`Keyed` and `Private` are correct: the source of their draws is captured, and `_reseed` replaces it. A search for
generators finds none that affects the outcomes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from sandboxgym import Transition
from zoo.corridor import Cells, Corridor
from zoo.dice import Dice
from zoo.mutant import good, mutant
from zoo.quest import Quest

Output = tuple[Any, dict[str, Any]]


@good()
class Keyed(Dice):
    """Counter-based: each roll is a function of an integer key and of the number of rolls so far."""

    key = 0

    def begin(self) -> None:
        self.key = int(self.np_random.integers(1 << 31))

    def roll(self) -> int:
        return int(np.random.default_rng([self.key, self.rolls]).integers(1, 7))

    def spawned(self) -> int:
        return self.roll()

    def _capture(self) -> Any:
        return [super()._capture(), self.key]

    def _apply(self, state: Any) -> None:
        super()._apply(state[0])
        self.key = state[1]

    def _reseed(self, seed: int) -> None:
        self.key = seed


@good()
class Private(Dice):
    """Rolls are samples of a space of its own, which is neither of its two; after each third roll only."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.die = spaces.Discrete(6, start=1)

    def begin(self) -> None:
        self.die.seed(int(self.np_random.integers(1 << 31)))

    def roll(self) -> int:
        return int(self.die.sample()) if self.rolls % 3 == 2 else 1

    def spawned(self) -> int:
        return self.roll()

    def _capture(self) -> Any:
        return [super()._capture(), self.die.np_random.bit_generator.state]

    def _apply(self, state: Any) -> None:
        super()._apply(state[0])
        self.die.np_random.bit_generator.state = state[1]

    def _reseed(self, seed: int) -> None:
        self.die.seed(seed % (1 << 31))


@good()
class Congruent(Quest):
    """Only the protocol: the cat goes by a linear congruential generator, an integer in the state."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        result = super().reset(seed=seed, options=options)
        self.current()["bits"] = int(self.np_random.integers(1 << 62))
        return result

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        state = self.current()
        if not state["done"]:
            state["bits"] = (state["bits"] * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        self._np_random = np.random.default_rng(state["bits"])
        return super().step(action)

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        if seed is not None:
            self.current()["bits"] = seed * 2654435761 + 1
        return result


# What a seed must not change.


@mutant("a seed moves the clock", "restore.seeded")
class SeedMovesClock(Corridor):
    """Nothing is random; after a restore with a seed, whichever, the clock is one ahead."""

    def _reseed(self, seed: int) -> None:
        self.state["clock"] += 1


@mutant("a seed other than 0 moves the clock", "restore.seeded", "fork.seeded_independent")
class TrueSeedMovesClock(Corridor):
    """Nothing is random; 0 counts as no seed, all others give one and the same wrong future."""

    def _reseed(self, seed: int) -> None:
        self.state["clock"] += bool(seed)


@mutant("the younger children of a seeded fork are late", "fork.seeded_independent")
class YoungerLate(Corridor):
    """Nothing is random; the clock of each child but the first is ahead, for every seed alike."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for number, child in enumerate(children):
            child.state["clock"] += number if seed is not None else 0
        return children


@mutant("a seed gives another key each time", "restore.seeded", "fork.seeded_independent")
class KeyFromAddress(Keyed):
    """The key is mixed with the number of restores of this environment."""

    restores = 0

    def _reseed(self, seed: int) -> None:
        self.restores += 1
        self.key = seed + self.restores


@mutant("a key is not captured", "restore.trace_equality", "restore.other_env")
class KeyLost(Keyed):
    """A restore leaves the key where it is."""

    def _apply(self, state: Any) -> None:
        super()._apply([state[0], self.key])


@mutant("siblings have one key", "stochastic.siblings_independent")
class SiblingsOneKey(Keyed):
    """``fork(k, seed=S)`` gives every child the key S itself; their np_random differ."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children if seed is not None else ():
            child.key = seed
        return children


# The last transition.


@mutant("the last transition has no reward", "freshness.last_info")
class LastWithoutReward(Corridor):
    """``last`` is recomputed from the state, in which the reward is not."""

    def _transition(self) -> Transition:
        return Transition(self.observation(), 0.0, self.state["done"], False, self.info())


@mutant("the last transition of a finished episode goes on", "freshness.last_info")
class LastNeverDone(Corridor):
    """``last`` is recomputed with flags as if nothing ever ended."""

    paid = 0.0

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.paid = result[1]
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.paid = 0.0
        return super().reset(seed=seed, options=options)

    def _transition(self) -> Transition:
        return Transition(self.observation(), self.paid, False, False, self.info())

    def _capture(self) -> Any:
        return {**super()._capture(), "paid": self.paid}

    def _apply(self, state: Any) -> None:
        self.state = {name: value for name, value in state.items() if name != "paid"}
        self.paid = state["paid"]
