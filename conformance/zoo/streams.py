"""Random streams of an environment and its spaces as JSON values, for environments with handles of their own."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

_SEQUENCE = ("entropy", "spawn_key", "pool_size", "n_children_spawned")


def captured(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """The streams of ``env`` and of its two spaces, made now if nothing was drawn yet."""
    base = env.unwrapped
    generators = [base.np_random, env.action_space.np_random, env.observation_space.np_random]
    return {"generators": [_captured(generator) for generator in generators], "seed": base._np_random_seed}


def put(env: gym.Env[Any, Any], streams: dict[str, Any]) -> None:
    """Give ``env`` and its spaces the captured streams."""
    base = env.unwrapped
    first, second, third = (_generator(state) for state in streams["generators"])
    base._np_random, base._np_random_seed = first, streams["seed"]
    env.action_space._np_random, env.observation_space._np_random = second, third


def seeded(env: gym.Env[Any, Any], seed: int) -> None:
    """Give ``env`` and its spaces new streams."""
    base = env.unwrapped
    base._np_random, base._np_random_seed = seeding.np_random(seed)
    env.action_space.seed(seed)
    env.observation_space.seed(seed + 1)


def sibling(seed: int | None, index: int) -> int | None:
    """The seed of one child of a fork."""
    return None if seed is None else int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1)[0])


def _captured(generator: np.random.Generator) -> list[Any]:
    bits: Any = generator.bit_generator
    return [bits.state, {name: getattr(bits.seed_seq, name) for name in _SEQUENCE}]


def _generator(captured: list[Any]) -> np.random.Generator:
    state, sequence = captured
    bits = np.random.PCG64(np.random.SeedSequence(**{**sequence, "spawn_key": tuple(sequence["spawn_key"])}))
    bits.state = state
    return np.random.Generator(bits)
