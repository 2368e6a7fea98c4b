"""A long episode of floating-point dynamics with a picture, and faults that show late, slightly, or only in a fork.

A ball rolls in a bowl for 150 steps. Its state has 64 bits, its observation 32, so lost state only shows after a while.
Every mutant has one method changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sandboxgym import SnapshotEnv
from zoo.mutant import good, mutant

Vector = npt.NDArray[np.float32]
Output = tuple[Vector, dict[str, Any]]
STEPS = 150
LATE = 100


@good()
class Drift(SnapshotEnv[Vector, Vector]):
    """Deterministic, 150 steps long, a state of 64 bits behind observations of 32; continuous actions; draws itself."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = "rgb_array") -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.place, self.speed = self.np_random.uniform(-1.0, 1.0, size=2).tolist()
        self.clock = 0
        return self.observation(), self.info()

    def step(self, action: Vector) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        self.speed += 0.1 * float(action[0]) - 0.4 * np.sin(3.0 * self.place)
        self.speed *= 0.999
        self.place = float(np.clip(self.place + 0.2 * self.speed, -10.0, 10.0))
        self.speed = float(self.speed)
        self.clock += 1
        return self.observation(), -abs(self.place), False, self.clock >= STEPS, self.info()

    def observation(self) -> Vector:
        return np.array([self.place, self.speed], np.float32)

    def info(self) -> dict[str, Any]:
        return {"clock": self.clock}

    def render(self) -> Any:
        picture = np.zeros((4, 64, 3), np.uint8)
        picture[:, int(np.clip(32 + 8 * self.place, 0, 63))] = 255
        picture[0, self.clock % 64] = (255, 0, 0)
        return picture

    def _capture(self) -> Any:
        return [self.place, self.speed, self.clock]

    def _apply(self, state: Any) -> None:
        self.place, self.speed, self.clock = state


@mutant("the state is rounded to 32 bits", "restore.trace_equality")
class SinglePrecision(Drift):
    """Observations right after a restore are the same to the last bit; those some twenty steps later are not."""

    def _apply(self, state: Any) -> None:
        super()._apply([float(np.float32(state[0])), float(np.float32(state[1])), state[2]])


@mutant("a restore late in a long episode is wrong", "restore.trace_equality")
class LateFault(Drift):
    """The clock is kept in seven bits' worth of steps less than it can count: right until step 100."""

    def _apply(self, state: Any) -> None:
        place, speed, clock = state
        super()._apply([place, speed, min(clock, LATE)])


@mutant("what restore returns cannot be written to", "freshness.observation")
class ReadOnlyObservation(Drift):
    """``restore`` returns a view of bytes: equal to what was captured, and an agent that scales it in place crashes."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        observation, info = super().restore(snap, seed=seed)
        return np.frombuffer(observation.tobytes(), observation.dtype), info


@mutant("a fork's picture is stale", "freshness.render")
class StaleForkPicture(Drift):
    """Pictures are drawn by steps and restores; a fork shows the first one of its source until it steps."""

    picture: Any = None
    first: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        result = super().reset(seed=seed, options=options)
        self.first = self.picture = super().render()
        return result

    def step(self, action: Vector) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.picture = super().render()
        return result

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.picture = super().render()

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.first = child.picture = self.first
        return children

    def render(self) -> Any:
        return self.picture


@mutant("pictures of all environments are one array", "freshness.render")
class SharedPicture(Drift):
    """A picture that one environment returned shows what another one draws later."""

    picture = np.zeros((4, 64, 3), np.uint8)

    def render(self) -> Any:
        self.picture[:] = super().render()
        return self.picture


@mutant("the truncation is forgotten", "restore.trace_equality", "restore.after_done")
class TruncationForgotten(Drift):
    """A finished episode that is restored has one step left."""

    def _apply(self, state: Any) -> None:
        place, speed, clock = state
        super()._apply([place, speed, min(clock, STEPS - 1)])


@mutant("steps before the last hundred are not kept", "resources.depth", "restore.any_order")
class OnlyNewest64(Drift):
    """Handles refer to a ring of 64 entries of the class: the 65th snapshot overwrites the first."""

    ring: list[Any] = [None] * 64
    written = 0

    def _capture(self) -> Any:
        place = OnlyNewest64.written % 64
        OnlyNewest64.written += 1
        self.ring[place] = super()._capture()
        return place

    def _apply(self, state: Any) -> None:
        super()._apply(self.ring[state])
