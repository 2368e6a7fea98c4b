"""Masks of actions, from ``info`` or the observation, converted to the form that Gymnasium samples by.

`gymnasium.Space.sample` takes an int8 array for a Discrete or MultiBinary space, a tuple of int8 arrays for a
MultiDiscrete one, and a dict or tuple of masks for Dict and Tuple spaces. Booleans, other integers, lists and, for
MultiDiscrete, all choices in one flat array are converted too.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def given(observation: Any, info: Any) -> Any:
    """The ``action_mask`` in ``info``, else in an observation that is a dict; None where there is none."""
    for place in (info, observation):
        if isinstance(place, dict) and place.get("action_mask") is not None:
            return place["action_mask"]
    return None


def sample(space: gym.Space[Any], mask: Any) -> Any:
    """Sample an action that a mask allows; any action where the mask does not fit this space or allows nothing."""
    try:
        return space.sample(mask=understood(space, mask))
    except ValueError:
        return space.sample()


def understood(space: gym.Space[Any], mask: Any) -> Any:
    """A mask in Gymnasium's form; None where it allows everything.

    Raises:
        ValueError: it doesn't fit the space, or leaves no action.
    """
    if mask is None:
        return None
    if isinstance(space, spaces.Dict):
        if not isinstance(mask, dict) or not mask.keys() <= space.spaces.keys():
            raise ValueError(f"expected masks of {', '.join(space.spaces)}, found {mask!r:.200}")
        return {name: understood(inner, mask.get(name)) for name, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(mask, (tuple, list)) or len(mask) != len(space.spaces):
            raise ValueError(f"expected {len(space.spaces)} masks, found {mask!r:.200}")
        return tuple(understood(inner, item) for inner, item in zip(space.spaces, mask))
    if isinstance(space, spaces.Discrete):
        return _bits(mask, int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim != 1:
            raise ValueError("masks of nested MultiDiscrete spaces are not supported")
        sizes = [int(size) for size in space.nvec]
        if isinstance(mask, (tuple, list)) and len(mask) == len(sizes) and not np.isscalar(mask[0]):
            return tuple(_bits(item, size) for item, size in zip(mask, sizes))
        flat = np.asarray(mask)
        if flat.shape == (sum(sizes),):
            parts = np.split(flat, np.cumsum(sizes)[:-1])
            return tuple(_bits(item, size) for item, size in zip(parts, sizes))
        raise ValueError(f"expected {len(sizes)} masks, or one of {sum(sizes)} choices, found {mask!r:.200}")
    if isinstance(space, spaces.MultiBinary):
        found = np.asarray(mask)
        if found.shape != tuple(space.shape):
            raise ValueError(f"expected a mask of shape {space.shape}, found {found.shape}")
        return found.astype(np.int8)
    raise ValueError(f"spaces of type {type(space).__name__} have no masks")


def _bits(mask: Any, size: int) -> Any:
    found = np.asarray(mask)
    if found.shape != (size,) or found.dtype.kind not in "biu" or not np.isin(found, (0, 1)).all() or not found.any():
        raise ValueError(f"expected {size} zeros and ones, some of them ones, found {mask!r:.200}")
    return found.astype(np.int8)
