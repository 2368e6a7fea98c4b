"""Faults with effects hundreds of steps later, or when thousands of snapshots are held.

`Orchard` is correct: what is planted in its first days is harvested near the end of a long episode. `Almanac` is, too:
it keeps a cache and a count of calls that no snapshot holds, and that change nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from sandboxgym import SnapshotEnv
from zoo.corridor import Corridor
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
