"""Faults with effects hundreds of steps later, or when thousands of snapshots are held.

`Orchard` is correct: what is planted in its first days is harvested near the end of a long episode. `Almanac` is, too:
it keeps a cache and a count of calls that no snapshot holds, and that change nothing.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from sandboxgym import SnapshotEnv
from zoo.corridor import Cells, Corridor, State
from zoo.mutant import good, mutant

Output = tuple[Any, dict[str, Any]]
WAIT, PLANT, WATER = range(3)


@good()
class Orchard(SnapshotEnv[Any, int]):
    """Trees planted in the first 20 of 700 days bear fruit on day 600."""

    metadata = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float64)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.day, self.water, self.trees = 0, 0.0, 0
        return self.observation(), {}

    def observation(self) -> Any:
        return np.array([float(self.day), self.water])

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.day += 1
        self.water += float(self.np_random.random()) * (2.0 if action == WATER else -0.5)
        self.trees += int(action == PLANT and self.day <= 20)
        return self.observation(), float(self.trees) if self.day == 600 else 0.0, False, self.day >= 700, {}

    def _capture(self) -> Any:
        return {"day": self.day, "water": self.water, "trees": self.trees}

    def _apply(self, state: Any) -> None:
        self.day, self.water, self.trees = state["day"], state["water"], state["trees"]


@mutant("what pays at the end of a long episode is not captured", "restore.whole_episode")
class TreesForgotten(Orchard):
    """A restored orchard has no trees, which shows on day 600."""

    def _capture(self) -> Any:
        return {"day": self.day, "water": self.water}

    def _apply(self, state: Any) -> None:
        self.day, self.water, self.trees = state["day"], state["water"], 0


@mutant("what pays at the end of a long episode stays as it is", "restore.whole_episode")
class TreesStay(Orchard):
    """A restored orchard has the trees that stood there before."""

    trees = 0

    def _capture(self) -> Any:
        return {"day": self.day, "water": self.water}

    def _apply(self, state: Any) -> None:
        self.day, self.water = state["day"], state["water"]


@good()
class Winch(SnapshotEnv[Any, int]):
    """A winch that one of three motors turns; one that has turned it for 60 days without a break leaves a notch."""

    metadata = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1000, (2,), np.int64)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.day, self.motor, self.turned = 0, -1, 0
        self.notches: list[int] = []
        return self.observation(), self.info()

    def observation(self) -> Any:
        return np.array([self.day, self.turned])

    def info(self) -> dict[str, Any]:
        return {"notches": list(self.notches)}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.day += 1
        self.turned = self.turned + 1 if action == self.motor else 1
        self.motor = int(action)
        if self.turned == 60:
            self.notches.append(self.day)
        return self.observation(), float(len(self.notches)), False, self.day >= 300, self.info()

    def _capture(self) -> Any:
        return {"day": self.day, "motor": self.motor, "turned": self.turned, "notches": self.notches}

    def _apply(self, state: Any) -> None:
        self.day, self.motor, self.turned = state["day"], state["motor"], state["turned"]
        self.notches = state["notches"]


@mutant("what comes of one action repeated for long is not captured", "restore.coverage")
class NotchesForgotten(Winch):
    """A restored winch has no notches."""

    def _capture(self) -> Any:
        return {**super()._capture(), "notches": []}


@mutant("the table of snapshots forgets the oldest", "restore.many_held")
class TableForgets(Corridor):
    """The captured states are in a table of the latest 800; a handle is a key, of the oldest where it is gone."""

    table: ClassVar[OrderedDict[int, Any]] = OrderedDict()
    count: ClassVar[int] = 0

    def _capture(self) -> Any:
        TableForgets.count += 1
        self.table[self.count] = super()._encode(self.state)
        while len(self.table) > 800:
            self.table.popitem(last=False)
        return {"key": self.count}

    def _apply(self, state: Any) -> None:
        oldest = next(iter(self.table))
        self.state = super()._decode(self.table.get(state["key"], self.table[oldest]))


@good()
class Almanac(Orchard):
    """Counts its calls and remembers the weekday that it last computed; nothing depends on either."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.calls, self.weekday = 0, (0, 0)
        return super().reset(seed=seed, options=options)

    def observation(self) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if getattr(self, "weekday", (-1, 0))[0] != self.day:
            self.weekday = (self.day, self.day % 7)
        return super().observation() + np.array([0.0, self.weekday[1]])


# Faults of a corridor that need a long episode, or a rare action.


@mutant("a restore forgets what is long ago", "restore.trace_equality")
class ForgetsLongAgo(Corridor):
    """A restore keeps the last eight entries of the log only, which an early snapshot doesn't show."""

    def _apply(self, state: State) -> None:
        self.state = {**state, "log": state["log"][-8:]}


@mutant("a fork of a fork is not exact", "fork.trace_equality", "fork.isolation", "machine.random_walk")
class GrandchildrenDiffer(Corridor):
    """The children of a child lose what is due; those of the first environment don't."""

    generation = 0

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.generation = self.generation + 1
            if self.generation:
                child.state["clock"] += 1
        return children


@mutant("a snapshot of a restored state is wrong", "restore.nested", "restore.idempotent", "machine.random_walk")
class NestedWrong(Corridor):
    """After a restore without a step, a snapshot captures the state of the previous capture."""

    previous: State | None = None
    restored = False

    def _capture(self) -> State:
        state = self.previous if self.restored and self.previous is not None else self.state
        self.previous = copy.deepcopy(self.state)
        return state

    def _apply(self, state: State) -> None:
        self.state = state
        self.restored = True

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        self.restored = False
        return super().step(action)
