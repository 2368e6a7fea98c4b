"""Stacks of wrappers, and faults in them.

The correct stack is a corridor or dice under a `TimeLimit` and more, used through ``sandboxgym.snapshot`` and related
functions. A mutant either registers a wrong codec for a wrapper or has an outermost wrapper with its own methods.
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import wrappers

import sandboxgym
from sandboxgym import SnapshotWrapper, WrapperCodec, register_wrapper
from sandboxgym.core import Snapshot
from sandboxgym.wrappers.codecs import CODECS, Adapter
from zoo.corridor import Corridor
from zoo.dice import Dice
from zoo.mutant import good, mutant

AnyEnv = gym.Env[Any, Any]
Output = tuple[Any, dict[str, Any]]
LIMIT = 12


@good()
def limited() -> AnyEnv:
    """A time limit, order enforcing and the passive checker, as ``gym.make`` puts them around a corridor."""
    checked = wrappers.OrderEnforcing(wrappers.PassiveEnvChecker(Corridor()))
    return SnapshotWrapper(wrappers.TimeLimit(checked, LIMIT))


@good()
def stacked() -> AnyEnv:
    """A tall stack without methods of its own: time, frames, statistics, sticky actions."""
    env: AnyEnv = wrappers.TimeLimit(wrappers.StickyAction(Corridor(), 0.25), LIMIT)
    env = wrappers.TimeAwareObservation(env)
    return wrappers.RecordEpisodeStatistics(wrappers.FrameStackObservation(wrappers.NormalizeReward(env), 3))


@good()
def limited_dice() -> AnyEnv:
    """Stochastic, under a time limit."""
    return SnapshotWrapper(wrappers.TimeLimit(Dice(), 6))


# A wrapper taught wrongly.


class Limit(wrappers.TimeLimit):
    """A time limit whose codec is wrong: the subclass is another class than the one that the package knows."""


class LimitOffByOne(wrappers.TimeLimit): ...


class LimitReset(wrappers.TimeLimit): ...


def _plus_one() -> Adapter:
    return Adapter(read=lambda value: value, write=lambda _, value: value and value + 1, fits=lambda *_: True)


def _zero() -> Adapter:
    return Adapter(read=lambda value: value, write=lambda *_: 0, fits=lambda *_: True)


register_wrapper(Limit, WrapperCodec(config=("_max_episode_steps",), remember=False))
register_wrapper(
    LimitOffByOne, WrapperCodec(("_elapsed_steps",), adapters={"_elapsed_steps": _plus_one()}, remember=False)
)
register_wrapper(LimitReset, WrapperCodec(("_elapsed_steps",), adapters={"_elapsed_steps": _zero()}, remember=False))


@mutant("elapsed steps are lost", "wrappers.time_limit", "wrappers.stack", "restore.trace_equality")
def time_limit_lost() -> AnyEnv:
    """The time limit goes on counting from where it is."""
    return SnapshotWrapper(Limit(Corridor(), LIMIT))


@mutant("elapsed steps are off by one", "wrappers.time_limit", "wrappers.stack", "restore.trace_equality")
def time_limit_off_by_one() -> AnyEnv:
    """A restored episode ends one step early."""
    return SnapshotWrapper(LimitOffByOne(Corridor(), LIMIT))


@mutant("elapsed steps start anew", "wrappers.time_limit", "wrappers.stack", "restore.trace_equality")
def time_limit_reset() -> AnyEnv:
    """A restored episode has all its time again."""
    return SnapshotWrapper(LimitReset(Corridor(), LIMIT))


class Bonus(gym.Wrapper[Any, Any, Any, Any]):
    """Every third step of an episode is rewarded."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.count = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self.count += 1
        return observation, float(reward) + (self.count % 3 == 0), terminated, truncated, info


class KeptBonus(Bonus):
    """The same, taught rightly."""


register_wrapper(Bonus)
register_wrapper(KeptBonus, WrapperCodec(("count",), remember=False))


@good()
def bonus() -> AnyEnv:
    """A wrapper of the user's own that was taught rightly."""
    return wrappers.TimeLimit(KeptBonus(Corridor()), LIMIT)


@mutant("a stateful wrapper is declared stateless", "wrappers.stack", "restore.trace_equality")
def stateless_wrapper() -> AnyEnv:
    """``register_wrapper`` without the attribute that counts."""
    return wrappers.TimeLimit(Bonus(Corridor()), LIMIT)


class Frames(wrappers.FrameStackObservation): ...


register_wrapper(Frames, WrapperCodec(config=("stack_size", "padding_type"), remember=True))


@mutant("older frames are lost", "wrappers.stack", "restore.trace_equality")
def frames_lost() -> AnyEnv:
    """A restored frame stack shows the frames that were there before the restore."""
    return SnapshotWrapper(Frames(Corridor(), 3))


class Scaled(wrappers.NormalizeReward): ...


_scaling = CODECS[wrappers.NormalizeReward]
register_wrapper(
    Scaled,
    WrapperCodec(
        ("discounted_reward",), ("gamma",), adapters={"discounted_reward": _scaling.adapters["discounted_reward"]}
    ),
)


@mutant("running statistics are lost", "wrappers.stack", "restore.trace_equality")
def statistics_lost() -> AnyEnv:
    """Rewards are scaled by a variance that goes on from where it is."""
    return SnapshotWrapper(Scaled(Corridor()))


# An outermost wrapper with methods of its own.


class Own(gym.Wrapper[Any, Any, Any, Any]):
    """Hands on what the stack-walking functions do."""

    @property
    def snapshot_spec(self) -> Any:
        return self.unwrapped.snapshot_spec  # type: ignore[attr-defined]

    def snapshot(self) -> Any:
        return sandboxgym.snapshot(self.env)

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        return sandboxgym.restore(self.env, snap, seed=seed)

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        return [type(self)(child) for child in sandboxgym.fork(self.env, k, seed=seed)]


@good()
def own_methods() -> AnyEnv:
    """A third party's outermost wrapper with the protocol's methods."""
    return Own(wrappers.TimeLimit(Dice(), 6))


class LosesWrapper(Own):
    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        return [type(self)(child) for child in self.unwrapped.fork(k, seed=seed)]  # type: ignore[attr-defined]


@mutant("a fork loses its time limit", "fork.keeps_wrappers")
def fork_loses_wrapper() -> AnyEnv:
    """Children come in the outermost wrapper only."""
    return LosesWrapper(wrappers.TimeLimit(Corridor(), LIMIT))


class LosesItself(Own):
    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        return sandboxgym.fork(self.env, k, seed=seed)


@mutant("a fork loses its outermost wrapper", "fork.keeps_wrappers")
def fork_loses_outermost() -> AnyEnv:
    """Children have no methods any more, though they go on rightly."""
    return LosesItself(wrappers.TimeLimit(Corridor(), LIMIT))


class FreshLimit(Own):
    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.env._elapsed_steps = 0
        return children


@mutant("a fork's time limit starts anew", "fork.trace_equality", "fork.keeps_wrappers", "wrappers.time_limit")
def fork_fresh_limit() -> AnyEnv:
    """Children have all their time; a restore is right."""
    return FreshLimit(wrappers.TimeLimit(Corridor(), LIMIT))


class BaseOnly(Own):
    def snapshot(self) -> Any:
        return self.unwrapped.snapshot()  # type: ignore[attr-defined]

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        return self.unwrapped.restore(snap, seed=seed)  # type: ignore[attr-defined,no-any-return]


@mutant("only the base environment is captured", "wrappers.time_limit", "wrappers.stack", "restore.trace_equality")
def base_only() -> AnyEnv:
    """Snapshots and restores reach the base environment alone, as through ``get_wrapper_attr("snapshot")``."""
    return BaseOnly(wrappers.TimeLimit(Corridor(), LIMIT))


class Unobserved(Own):
    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        _, info = super().restore(snap, seed=seed)
        inner = self.unwrapped.last  # type: ignore[attr-defined]
        return inner.observation, info


@mutant("the observation past the wrappers is returned", "freshness.observation")
def unwrapped_observation() -> AnyEnv:
    """``restore`` returns the base environment's observation; steps return the wrappers'."""
    return Unobserved(wrappers.TransformObservation(Corridor(), lambda observation: observation * 2, None))


class SkipsStranger(Own):
    """Captures the wrappers that it knows and takes no notice of others."""

    def snapshot(self) -> Any:
        snap: Snapshot = self.unwrapped.snapshot()  # type: ignore[attr-defined]
        self.kept = getattr(self, "kept", {})
        self.kept[snap.id] = self.limit()._elapsed_steps
        return snap

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result: Output = self.unwrapped.restore(snap, seed=seed)  # type: ignore[attr-defined]
        if snap.id in getattr(self, "kept", {}):
            self.limit()._elapsed_steps = self.kept[snap.id]
        return result

    def limit(self) -> Any:
        env: Any = self.env
        while not isinstance(env, wrappers.TimeLimit):
            env = env.env
        return env


@mutant("a stateful wrapper is skipped", "wrappers.stack", "restore.trace_equality", "wrappers.unknown_refused")
def stranger_skipped() -> AnyEnv:
    """The time limit is captured, the bonus beside it isn't."""
    return SkipsStranger(wrappers.TimeLimit(KeptBonus(Corridor()), LIMIT))


# Streams of wrappers.


class Noise(gym.ObservationWrapper[Any, Any, Any]):
    """Adds noise from a stream of its own."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self.stream = np.random.default_rng(0)

    def observation(self, observation: Any) -> Any:
        return observation + self.stream.integers(3)


register_wrapper(Noise, WrapperCodec(remember=True))


@mutant("a wrapper's random stream is lost", "wrappers.stack", "restore.trace_equality", "restore.many")
def wrapper_stream_lost() -> AnyEnv:
    """Noise of a wrapper goes on from where its stream is."""
    return SnapshotWrapper(Noise(Corridor()))
