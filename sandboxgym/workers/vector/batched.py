"""Arguments and results of a vector environment: split into one per environment, and put together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate


def actions_of(actions: Any, single: gym.Space[Any], batch: gym.Space[Any], n: int) -> list[Any]:
    """The actions of ``n`` environments, one each.

    Args:
        actions: in the batched space, or any sequence of n actions.
        single: action space of one environment.
        batch: that of all.
        n: number of environments.

    Raises:
        TypeError: no sequence, or a text, which would be split into letters.
        ValueError: not n actions.
    """
    if isinstance(single, (spaces.Tuple, spaces.Dict)):
        each = list(iterate(batch, actions))
    elif isinstance(actions, (str, bytes)) or not hasattr(actions, "__len__"):
        raise TypeError(f"expected {n} actions, found {actions!r:.100}")
    else:
        each = list(actions)
    if len(each) != n:
        raise ValueError(f"expected {n} actions, found {len(each)}")
    return each


def chosen_by(mask: Any, n: int) -> list[int]:
    """Indices of the environments in a mask, (n,) bool; all without one.

    Raises:
        ValueError: the mask has another shape or type.
    """
    if mask is None:
        return list(range(n))
    mask = np.asarray(mask)
    if mask.shape != (n,) or mask.dtype != np.bool_:
        raise ValueError(f"expected a mask of {n} bools, found {mask.dtype} of shape {mask.shape}")
    return [int(index) for index in np.flatnonzero(mask)]


def per_env(values: Any, name: str, n: int, single: tuple[type, ...] = ()) -> list[Any] | None:
    """One value per environment; a value of a type in ``single`` is for each of them.

    Raises:
        ValueError: not n values.
    """
    if values is None:
        return None
    if isinstance(values, single):
        return [values] * n
    if len(values) != n:
        raise ValueError(f"expected {name} for {n} environments, found {len(values)}")
    return list(values)


def batched(observations: Sequence[Any], space: gym.Space[Any], *, text: bool) -> Any:
    """Observations in the batched space, as a copy; of ``text`` spaces a tuple of strings."""
    if text and all([type(observation) is str for observation in observations]):
        return tuple(observations)
    out: Any = create_empty_array(space, n=len(observations), fn=np.zeros)
    return copy.deepcopy(concatenate(space, observations, out))


def placeholder(space: gym.Space[Any]) -> Any:
    """Observation in place of an environment that was never reset: zeros, or the empty text."""
    if isinstance(space, spaces.Text) or (not space.is_np_flattenable and space.contains("")):
        return ""
    empty = create_empty_array(space, n=1, fn=np.zeros)
    if empty is None:
        return None
    try:
        return next(iter(iterate(batch_space(space, 1), empty)))
    except (TypeError, ValueError, StopIteration):
        return None
