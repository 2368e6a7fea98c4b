"""Small environments used throughout the tests: one deterministic with mutable state, two stochastic."""

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


class Drift(SnapshotEnv[Any, Any]):
    """A point that moves with noise; leaving the square ends the episode. For wrappers of arrays and frames.

    Args:
        observe: ``"vector"``, ``"dict"`` or ``"image"``.
        boxed: a push as a vector instead of one of four directions.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, observe: str = "vector", boxed: bool = False, render_mode: str | None = None) -> None:
        self.observe = observe
        self.render_mode = render_mode
        vector = spaces.Box(-9, 9, (2,), np.float32)
        self.observation_space = {
            "vector": vector,
            "dict": spaces.Dict(point=vector, steps=spaces.Discrete(99)),
            "image": spaces.Box(0, 255, (4, 6, 3), np.uint8),
        }[observe]
        self.action_space = spaces.Box(-1, 1, (2,), np.float32) if boxed else spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.point, self.steps = self.np_random.normal(size=2), 0
        return self._observation(), {"start": self.point.tolist()}

    def step(self, action: Any):
        push = [(1, 0), (0, 1), (-1, 0), (0, -1)][int(action)] if np.ndim(action) == 0 else action
        self.point = np.clip(self.point + push + self.np_random.normal(0, 0.3, 2), -8, 8)
        self.steps += 1
        distance = float(np.abs(self.point).max())
        return self._observation(), 1.0 - distance, distance > 3, False, {"steps": [self.steps]}

    def render(self) -> np.ndarray:
        frame = np.zeros((4, 6, 3), np.uint8)
        frame[int(abs(self.point[0])) % 4, int(abs(self.point[1])) % 6] = 200 + self.steps % 50
        return frame

    def _observation(self) -> Any:
        if self.observe == "image":
            return self.render()
        vector = self.point.astype(np.float32)
        return vector if self.observe == "vector" else {"point": vector, "steps": self.steps}

    def _capture(self) -> list[Any]:
        return [self.point, self.steps]

    def _apply(self, state: list[Any]) -> None:
        self.point, self.steps = state


def register() -> None:
    from sandboxgym import SnapshotWrapper

    for name, env in (("Corridor", Corridor), ("Dice", Dice), ("Drift", Drift)):
        if f"toys/{name}-v0" not in gym.registry:
            gym.register(
                f"toys/{name}-v0",
                entry_point=env,
                max_episode_steps=12,
                additional_wrappers=(SnapshotWrapper.wrapper_spec(),),
            )
