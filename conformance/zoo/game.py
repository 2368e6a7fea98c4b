"""Game whose state is a dict, from which the specimens after reports of real projects are made."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from sandboxgym import SnapshotEnv

Output = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]
State = dict[str, Any]


class Game(SnapshotEnv[Any, int]):
    """State in a dict, actions that are numbers."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    actions = 4
    width = 4

    def __init__(self, render_mode: str | None = "ansi") -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1e6, 1e6, (self.width,), np.float64)
        self.action_space = spaces.Discrete(self.actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.state = self.begun()
        return self.observation(), self.info()

    def begun(self) -> State:
        """The state at the start."""
        raise NotImplementedError

    def observation(self) -> Any:
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        return {}

    def render(self) -> str:
        return str(self.observation())

    def _capture(self) -> State:
        return self.state

    def _apply(self, state: State) -> None:
        self.state = state

    def staying(self, state: State, *names: str) -> State:
        """A captured state with entries as they are in this environment, if it has any."""
        return {**state, **{name: self.state[name] for name in names}} if self._was_reset else state
