"""Further environments without a fault: existing environments, and kinds that the other modules lack."""

from __future__ import annotations

import copy
import importlib
import sys
import uuid
from pathlib import Path
from typing import Any, Self

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding

from sandboxgym import ResetNeeded, SnapshotEnv, SnapshotMismatch, SnapshotReleased, SnapshotSpec
from sandboxgym.conformance.baselines import DeepCopySnapshots, deep_copied
from zoo import streams
from zoo.corridor import Corridor
from zoo.mutant import good

Output = tuple[Any, dict[str, Any]]


@good()
class Sensors(SnapshotEnv[Any, Any]):
    """Observations are a dict of an array, a number and a tuple; actions are a dict; NaN and infinity in info."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, render_mode: str | None = "rgb_array") -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {
                "field": spaces.Box(-100.0, 100.0, (2, 3), np.float32),
                "count": spaces.Discrete(100),
                "pair": spaces.Tuple((spaces.Discrete(100), spaces.MultiBinary(2))),
            }
        )
        self.action_space = spaces.Dict({"move": spaces.Discrete(3), "push": spaces.Box(-1.0, 1.0, (3,), np.float32)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.field = self.np_random.normal(size=(2, 3)).astype(np.float32)
        self.count = 0
        return self.observation(), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.field[self.count % 2] += action["push"] + self.np_random.normal(size=3).astype(np.float32)
        self.field.clip(-100.0, 100.0, out=self.field)
        self.count = min(99, self.count + int(action["move"]))
        terminated, truncated = bool(self.field.max() > 6), self.count >= 20
        return self.observation(), float(self.field[0, 0]), terminated, truncated, self.info()

    def observation(self) -> dict[str, Any]:
        parity = np.array([self.count % 2, self.count // 2 % 2], np.int8)
        return {"field": self.field.copy(), "count": self.count, "pair": (self.count // 3, parity)}

    def info(self) -> dict[str, Any]:
        return {"ratio": float("nan"), "array": np.array([np.nan, self.count]), "limit": float("inf"), "none": None}

    def render(self) -> Any:
        return np.full((4, 4, 3), self.count, np.uint8)

    def _capture(self) -> Any:
        return {"field": self.field, "count": self.count}

    def _apply(self, state: Any) -> None:
        self.field, self.count = state["field"], state["count"]


class Handle:
    """A handle in memory; what it holds is private to the environment that made it."""

    def __init__(self, held: Any, fits: str) -> None:
        self.id = uuid.uuid4().hex
        self.held = held
        self.fits = fits

    def release(self) -> None:
        self.held = None


class Replayed(gym.Env[Any, int]):
    """A snapshot is the seed and the actions so far; a restore resets and takes them again."""

    metadata = {"render_modes": ["ansi"]}
    snapshot_spec = SnapshotSpec(kind="replay", cost="steps", cross_process=False, cross_host=False)

    def __init__(self) -> None:
        self.env = Corridor()
        self.render_mode = self.env.render_mode
        self.action_space, self.observation_space = self.env.action_space, self.env.observation_space
        self.actions: list[int] | None = None
        self.begin: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.begin = (int(self.np_random.integers(1 << 31)), copy.deepcopy(options))
        self.actions = []
        return self.env.reset(seed=self.begin[0], options=options)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.actions is not None
        self.actions.append(int(action))
        return self.env.step(action)

    def render(self) -> str:
        return self.env.render()

    def snapshot(self) -> Handle:
        if self.actions is None:
            raise ResetNeeded("there is nothing to replay yet: call reset() first")
        held = self.begin, tuple(self.actions), copy.deepcopy(streams.captured(self))
        return Handle(held, type(self).__name__)

    def restore(self, snap: Handle, *, seed: int | None = None) -> Output:
        begin, actions, drawn = opened(snap, type(self).__name__, seed)
        observation, info = self.env.reset(seed=begin[0], options=copy.deepcopy(begin[1]))
        for action in actions:
            observation, _, _, _, info = self.env.step(action)
        self.begin, self.actions = begin, list(actions)
        streams.put(self, drawn)
        if seed is not None:
            streams.seeded(self, seed)
        return observation, info

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        return forked(self, type(self), k, seed)


def opened(snap: Any, fits: str, seed: Any) -> Any:
    """Content of a handle, checked: it is a snapshot, live and of this configuration; the seed is one."""
    if seed is not None:
        seeding.np_random(seed)
    if not isinstance(snap, Handle):
        raise TypeError(f"expected a snapshot, found {type(snap).__qualname__}")
    if snap.held is None:
        raise SnapshotReleased(f"snapshot {snap.id[:8]} cannot be used after release()")
    if snap.fits != fits:
        raise SnapshotMismatch(f"expected a snapshot of {fits}, found one of {snap.fits}")
    return snap.held


def forked(source: Any, make: Any, k: int, seed: int | None) -> list[Any]:
    """Forks through a snapshot."""
    if k < 1:
        raise ValueError(f"expected at least 1 fork, found k={k}")
    snap, children = source.snapshot(), []
    for index in range(k):
        child = make()
        child.spec = source.spec
        child.restore(snap, seed=streams.sibling(seed, index))
        children.append(child)
    return children


good()(Replayed)


@good()
def cart_pole(**kwargs: Any) -> DeepCopySnapshots:
    """Continuous observations, a time limit."""
    return deep_copied("CartPole-v1", **kwargs)


@good()
def taxi(render_mode: str | None = "ansi") -> DeepCopySnapshots:
    """Arrays and probabilities in info."""
    return deep_copied("Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3", render_mode=render_mode)


@good()
def blackjack(**kwargs: Any) -> DeepCopySnapshots:
    """Stochastic, with tuples for observations and very short episodes."""
    return deep_copied("Blackjack-v1", **kwargs)


@good()
def frozen_lake(render_mode: str | None = "ansi") -> DeepCopySnapshots:
    """Stochastic, renders as text."""
    return deep_copied("FrozenLake-v1", render_mode=render_mode)


@good()
def alfworld(**kwargs: Any) -> gym.Env[Any, Any]:
    """The embedded games of this package."""
    return gym.make("sandboxgym/ALFWorld-v0", **kwargs)


@good()
def third_party() -> gym.Env[Any, Any]:
    """The example of an environment that shares no code with this package."""
    source = str(Path(__file__).parents[1] / "example_package" / "src")
    if source not in sys.path:
        sys.path.append(source)
    return importlib.import_module("lantern").Lantern()  # type: ignore[no-any-return]
