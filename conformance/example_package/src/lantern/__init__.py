"""A lantern on a windy path: an environment with snapshots that only depends on Gymnasium and NumPy.

The agent shields the lantern or hurries on; wind, drawn from ``np_random``, eats oil. A snapshot is a JSON text with a
checksum: immutable, portable, and safe to load from untrusted sources.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.utils import seeding

__all__ = ["BadSnapshot", "Declaration", "ForgetfulLantern", "Lantern", "LanternSnapshot"]

Output = tuple[npt.NDArray[np.float64], dict[str, Any]]
FORMAT = 1
SHIELD, WALK, RUN = range(3)


class BadSnapshot(ValueError):
    """The snapshot is damaged, released, or of another kind of lantern."""


@dataclass(frozen=True)
class Declaration:
    """Coverage of the snapshots, under the names that the protocol asks for."""

    kind: str = "memory"
    cost: str = "constant"
    rng: bool = True
    processes: bool = False
    clock: bool = False
    cross_process: bool = True
    cross_host: bool = True


class LanternSnapshot:
    """An immutable snapshot."""

    def __init__(self, text: str) -> None:
        self._text: str | None = text

    @property
    def text(self) -> str:
        """The content.

        Raises:
            BadSnapshot: it was released.
        """
        if self._text is None:
            raise BadSnapshot("this snapshot was released")
        return self._text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the content under its checksum."""
        Path(path).write_text(f"{hashlib.sha256(self.text.encode()).hexdigest()}\n{self.text}", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The inverse of `save`.

        Raises:
            BadSnapshot: the checksum differs.
        """
        try:
            checksum, _, text = Path(path).read_text(encoding="utf-8").partition("\n")
        except UnicodeDecodeError as error:
            raise BadSnapshot(f"expected text, found {error.object[:20]!r}") from error
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            raise BadSnapshot(f"expected content with the checksum {checksum[:80]!r}")
        return cls(text)

    def release(self) -> None:
        """Let go of the content."""
        self._text = None


class Lantern(gym.Env[npt.NDArray[np.float64], int]):
    """Carry a burning lantern to the end of the way. Reward 1 for arriving with light, scaled by the oil left."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    snapshot_spec = Declaration()

    def __init__(self, way: int = 9, render_mode: str | None = "ansi") -> None:
        self.way = way
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 100.0, (3,), np.float64)
        self.action_space = spaces.Discrete(3)
        self._state: dict[str, Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        """A new way; ``options={"task": n}`` chooses how much oil there is."""
        super().reset(seed=seed)
        task = (options or {}).get("task")
        oil = 4 + (int(self.np_random.integers(5)) if task is None else int(task) % 5)
        self._state = {"at": 0, "oil": float(oil), "lit": True, "gusts": []}
        return self._observe()

    def step(self, action: int) -> tuple[npt.NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        """Shield (0), walk (1) or run (2)."""
        state = self._current()
        if self._over():
            observation, info = self._observe()
            return observation, 0.0, True, False, info
        gust = float(self.np_random.exponential(0.25))
        state["gusts"] = [*state["gusts"][-2:], gust]
        state["at"] = min(self.way, state["at"] + int(action))
        state["oil"] = max(0.0, state["oil"] - gust * (0.5, 1.0, 2.0)[int(action)] - 0.1)
        state["lit"] = state["oil"] > 0
        observation, info = self._observe()
        arrived = state["at"] == self.way and state["lit"]
        return observation, 0.1 * state["oil"] if arrived else 0.0, self._over(), False, info

    def render(self) -> str:
        """The way, with the lantern on it."""
        state = self._current()
        return "".join("*o"[not state["lit"]] if i == state["at"] else "-" for i in range(self.way + 1))

    def snapshot(self) -> LanternSnapshot:
        """Capture without disturbing.

        Raises:
            gymnasium.error.ResetNeeded: before the first ``reset``.
        """
        self._current()
        content = {"format": FORMAT, "way": self.way, "state": self._state, "streams": self._streams()}
        return LanternSnapshot(json.dumps(content))

    def restore(self, snap: LanternSnapshot, *, seed: int | None = None) -> Output:
        """Go to the captured moment, with its random streams or, given a seed, with new ones.

        Raises:
            TypeError, BadSnapshot: and nothing has changed.
        """
        if not isinstance(snap, LanternSnapshot):
            raise TypeError(f"expected a LanternSnapshot, found {type(snap).__qualname__}")
        content = json.loads(snap.text)
        if (content["format"], content["way"]) != (FORMAT, self.way):
            raise BadSnapshot(f"expected a way of {self.way}, found one of {content['way']}")
        if seed is not None:
            seeding.np_random(seed)  # refuses what is no seed, before anything changes
        self._apply(content, seed)
        return self._observe()

    def _apply(self, content: dict[str, Any], seed: int | None) -> None:
        self._state = content["state"]
        if seed is None:
            self._put_streams(content["streams"])
        else:
            self._np_random, self._np_random_seed = seeding.np_random(seed)
            for space in (self.action_space, self.observation_space):
                space.seed(seed)

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        """``k`` new lanterns at this moment; with a seed, each with its own stream."""
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found {k}")
        snap = self.snapshot()
        children = [type(self)(self.way, self.render_mode) for _ in range(k)]
        seeds = [None] * k if seed is None else np.random.SeedSequence(seed).generate_state(k).tolist()
        for child, own in zip(children, seeds):
            child.spec = self.spec
            child.restore(snap, seed=own)
        return children

    def _current(self) -> dict[str, Any]:
        if self._state is None:
            raise gym.error.ResetNeeded("the lantern is not lit yet: call reset() first")
        return self._state

    def _over(self) -> bool:
        state = self._current()
        return not state["lit"] or state["at"] == self.way

    def _observe(self) -> Output:
        state = self._current()
        info = {"gusts": list(state["gusts"]), "success": state["lit"] and state["at"] == self.way}
        return np.array([state["at"], state["oil"], sum(state["gusts"])]), info

    def _generators(self) -> Iterator[np.random.Generator]:
        yield self.np_random
        yield self.action_space.np_random
        yield self.observation_space.np_random

    def _streams(self) -> list[Any]:
        streams = []
        for generator in self._generators():
            seeds: Any = generator.bit_generator.seed_seq
            sequence = {
                name: getattr(seeds, name) for name in ("entropy", "spawn_key", "pool_size", "n_children_spawned")
            }
            streams.append([generator.bit_generator.state, sequence])
        return [*streams, self._np_random_seed]

    def _put_streams(self, streams: list[Any]) -> None:
        *generators, self._np_random_seed = streams
        fresh = []
        for state, sequence in generators:
            bits = np.random.PCG64(np.random.SeedSequence(**{**sequence, "spawn_key": tuple(sequence["spawn_key"])}))
            bits.state = state
            fresh.append(np.random.Generator(bits))
        self._np_random, self.action_space._np_random, self.observation_space._np_random = fresh


class ForgetfulLantern(Lantern):
    """The same lantern with one fault: a restore doesn't bring back the wind's random stream."""

    def _put_streams(self, streams: list[Any]) -> None:
        wind = self.np_random
        super()._put_streams(streams)
        self._np_random = wind
