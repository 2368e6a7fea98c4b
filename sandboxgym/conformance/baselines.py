"""Baseline snapshots, by deep copy and by replay, for environments that have none; for comparison.

`DeepCopySnapshots` copies the environment: state that a deep copy does not reach (globals, files, processes, C
libraries) is not in the snapshot. `ReplaySnapshots` resets and repeats the same actions: its cost grows with the length
of the episode, and it is right only where a seed fixes the episode.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.subject import layers
from sandboxgym.core import SnapshotEnv, SnapshotSpec, copied
from sandboxgym.errors import ResetNeeded, SnapshotMismatch, SnapshotReleased
from sandboxgym.randomness import capture, materialise, restored, sibling_seed

AnyEnv = gym.Env[Any, Any]


class DeepCopy:
    """A deep copy of an environment, and its last output.

    Attributes:
        fits: text that names the environment and its arguments, wrappers included.
    """

    def __init__(self, env: AnyEnv, last: tuple[Any, dict[str, Any]], fits: str) -> None:
        self._held: tuple[AnyEnv, tuple[Any, dict[str, Any]]] | None = (env, last)
        self.fits = fits

    def copy(self) -> tuple[AnyEnv, tuple[Any, dict[str, Any]]]:
        """Another deep copy of the environment and its last output.

        Raises:
            SnapshotReleased: the copy was released.
        """
        if self._held is None:
            raise SnapshotReleased("this deep copy was released")
        env, last = self._held
        return copy.deepcopy(env), copied(last)

    def release(self) -> None:
        """Drop the copy."""
        self._held = None


class DeepCopySnapshots(gym.Env[Any, Any]):
    """An environment with its wrappers, snapshotted by ``copy.deepcopy``.

    It is a `gymnasium.Env`, not a wrapper, because a restore replaces the whole environment inside.

    Example:
        >>> env = DeepCopySnapshots(gym.make("FrozenLake-v1"))
        >>> observation, info = env.reset(seed=0)
        >>> snap = env.snapshot()
        >>> _ = env.step(2)
        >>> env.restore(snap)[0] == observation
        True
    """

    snapshot_spec: ClassVar[SnapshotSpec] = SnapshotSpec(kind="memory", cross_process=False, cross_host=False)

    def __init__(self, env: AnyEnv) -> None:
        self.inner = env
        self._returned: tuple[Any, dict[str, Any]] | None = None
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self.spec = env.spec
        self._fits = f"{env} {env.spec.kwargs if env.spec else ''}"

    # Spaces and streams are those of the environment that is inside now.

    @property
    def action_space(self) -> gym.Space[Any]:  # type: ignore[override]
        """The action space of the environment inside."""
        return self.inner.action_space

    @property
    def observation_space(self) -> gym.Space[Any]:  # type: ignore[override]
        """The observation space of the environment inside."""
        return self.inner.observation_space

    @property
    def np_random(self) -> Any:  # type: ignore[override]
        """The random stream of the environment inside."""
        return self.inner.np_random

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self.inner.unwrapped.np_random = value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        observation, info = self.inner.reset(seed=seed, options=options)
        self._returned = copied((observation, info))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        observation, reward, terminated, truncated, info = self.inner.step(action)
        self._returned = copied((observation, info))
        return observation, reward, terminated, truncated, info

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        return self.inner.render()

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        self.inner.close()

    def snapshot(self) -> DeepCopy:
        """Take a snapshot: a deep copy.

        Raises:
            ResetNeeded: ``reset`` was not called before.
        """
        if self._returned is None:
            raise ResetNeeded(f"{self.inner} has no state yet: call reset() before asking for a snapshot")
        for layer in layers(self.inner):  # streams not made before a first draw: each copy would make its own
            materialise(layer.action_space, layer.observation_space)
        _ = self.inner.np_random
        return DeepCopy(copy.deepcopy(self.inner), copied(self._returned), self._fits)

    def restore(self, snap: DeepCopy, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Replace the environment inside by a copy of the snapshot's; return the last observation and info.

        Raises:
            TypeError: ``snap`` is not a `DeepCopy`.
            SnapshotMismatch: it is of another environment, or of one with other arguments.
            SnapshotReleased: it was released.
        """
        if not isinstance(snap, DeepCopy):
            raise TypeError(f"expected a DeepCopy, found {type(snap).__qualname__}")
        if snap.fits != self._fits:
            raise SnapshotMismatch(f"this environment is {self._fits}, the snapshot is of {snap.fits}")
        if seed is not None:
            gym.utils.seeding.np_random(seed)  # refuses what is no seed, before anything changes
        self.inner, self._returned = snap.copy()
        if seed is not None:
            self._reseed(seed)
        return copied(self._returned)  # type: ignore[no-any-return]

    def fork(self, k: int, *, seed: int | None = None) -> list[DeepCopySnapshots]:
        """Make ``k`` environments, each with a deep copy of this one.

        Raises:
            ValueError: ``k`` is less than 1.
            ResetNeeded: ``reset`` was not called before.
        """
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found k={k}")
        snap = self.snapshot()
        children = []
        for index in range(k):
            child = DeepCopySnapshots(self.inner)
            child.restore(snap, seed=None if seed is None else sibling_seed(seed, index))
            children.append(child)
        return children

    def _reseed(self, seed: int) -> None:
        base = self.inner.unwrapped
        base._np_random, base._np_random_seed = gym.utils.seeding.np_random(seed)
        self.inner.action_space.seed(seed)
        self.inner.observation_space.seed(seed)


def deep_copied(id: str, **kwargs: Any) -> DeepCopySnapshots:
    """Make an environment by its Gymnasium id, snapshotted by deep copies: a factory for the command line.

    ``python -m sandboxgym.conformance sandboxgym.conformance.baselines:deep_copied --make-kwargs id=CartPole-v1``
    """
    return DeepCopySnapshots(gym.make(id, **kwargs))


class ReplaySnapshots(SnapshotEnv[Any, Any]):
    """An environment, made by its Gymnasium id, whose snapshots are the seed and the actions so far.

    Every episode begins with a seed drawn from ``np_random``, and its steps draw from the same stream. A restore with a
    seed therefore replays the past with its own draws and continues with others.

    ``python -m sandboxgym.conformance sandboxgym.conformance.baselines:ReplaySnapshots --make-kwargs id=CartPole-v1``

    Example:
        >>> env = ReplaySnapshots("FrozenLake-v1")
        >>> observation, info = env.reset(seed=0)
        >>> snap = env.snapshot()
        >>> _ = env.step(2)
        >>> env.restore(snap)[0] == observation
        True
    """

    snapshot_spec = SnapshotSpec(kind="replay", cost="steps")

    def __init__(self, id: str, **kwargs: Any) -> None:
        self.inner = gym.make(id, **kwargs)
        self.metadata, self.render_mode = self.inner.metadata, self.inner.render_mode
        self.action_space, self.observation_space = self.inner.action_space, self.inner.observation_space
        self.done: list[tuple[str, Any]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self.done = [("reset", {"seed": int(self.np_random.integers(2**31)), "options": copied(options)})]
        observation, info = self.inner.reset(**copied(self.done[0][1]))
        self._draw()
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        result = self.inner.step(action)
        self.done.append(("step", copied(action)))
        return result

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        return self.inner.render()

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        self.inner.close()

    @property
    def np_random(self) -> np.random.Generator:  # type: ignore[override]
        """The stream of the environment inside."""
        return super().np_random

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        self._np_random, self._np_random_seed = value, -1
        self._draw()

    def _capture(self) -> Any:
        return self.done

    def _apply(self, state: Any) -> None:
        for kind, value in copied(state):
            if kind == "reset":
                self.inner.reset(**value)
            elif kind == "step":
                self.inner.step(value)
            else:
                self._np_random = restored(value, None)
                self._share()
        self.done = state

    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams(streams)
        self._share()

    def _reseed(self, seed: int) -> None:
        self._draw()

    def _draw(self) -> None:
        """Make the environment inside draw from the present stream from now on, in replays too."""
        self.done.append(("stream", capture(self._np_random)))
        self._share()

    def _share(self) -> None:
        self.inner.unwrapped._np_random = self._np_random
