"""Two small environments used throughout the tests: one deterministic with mutable state, one stochastic."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sandboxgym import SnapshotEnv


class Corridor(SnapshotEnv[np.ndarray, int]):
    """Walk left (0) or right (1) on a line of ``length`` cells; the last cell ends the episode with reward 1.

    Deterministic. Its state is a mutable dict with a log of visited cells, which a shallow capture would share.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(self, length: int = 5, render_mode: str | None = None) -> None:
        self.length = length
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, length, (2,), np.int64)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.state: dict[str, Any] = {"cell": (options or {}).get("cell", 0), "visited": [0]}
        return self._observation(), {"visited": list(self.state["visited"])}

    def step(self, action: int):
        cell = max(0, self.state["cell"] + (1 if action else -1))
        self.state["cell"] = cell
        self.state["visited"].append(cell)
        done = cell >= self.length - 1
        return self._observation(), float(done), done, False, {"visited": list(self.state["visited"])}

    def render(self) -> str:
        return "".join("A" if i == self.state["cell"] else "." for i in range(self.length))

    def _observation(self) -> np.ndarray:
        return np.array([self.state["cell"], len(set(self.state["visited"]))])

    def _capture(self) -> dict[str, Any]:
        return self.state

    def _apply(self, state: dict[str, Any]) -> None:
        self.state = state


class Dice(SnapshotEnv[int, int]):
    """Each step adds a die to the total; 30 ends the episode. Stochastic through ``np_random``."""

    metadata = {"render_modes": []}

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Discrete(64)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.total = 0
        return self.total, {"total": self.total}

    def step(self, action: int):
        self.total = min(self.total + int(self.np_random.integers(1, 7)) + int(action), 63)
        done = self.total >= 30
        return self.total, float(done and self.total % 2), done, False, {"total": self.total}

    def _capture(self) -> int:
        return self.total

    def _apply(self, state: int) -> None:
        self.total = state


def register() -> None:
    from sandboxgym import SnapshotWrapper

    for name, env in (("Corridor", Corridor), ("Dice", Dice)):
        if f"toys/{name}-v0" not in gym.registry:
            gym.register(
                f"toys/{name}-v0",
                entry_point=env,
                max_episode_steps=12,
                additional_wrappers=(SnapshotWrapper.wrapper_spec(),),
            )
