"""Attributes of a `SnapshotEnv` that change during play and that a restore does not bring back.

Such a difference alone is no fault: it may be a cache, or a record that nothing depends on. It therefore decides no
verdict. The report names it, because the trials of `strength` do not reach state outside the capture.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.harness.canonical import canonical
from sandboxgym.conformance.harness.scenario import opened, release, seed_spaces
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Subject, restore, snapshot
from sandboxgym.core import SnapshotEnv

Path = tuple[str, ...]

DEPTH, WIDTH, ELEMENTS = 4, 64, 20_000
"""Limits of the search: depth of attributes, keys or attributes of a value, elements of a compared container."""
SAMPLES = 12
"""Moments of a run at which attributes are read."""

_INERT = {"spec", "metadata", "render_mode", "_metadata", "_cached_spec", "np_random", "_np_random", "_np_random_seed"}
_OWN = {"_last", "_was_reset", "_lineage", "_fits", "_arguments"}
"""Attributes of `SnapshotEnv` itself."""
_FOREIGN = ("logging", "threading", "subprocess", "concurrent", "multiprocessing", "asyncio", "numpy.random", "random")
"""Modules whose objects have attributes that do not count as state."""
_SCALARS = (bool, int, float, complex, str, bytes, bytearray, np.generic, enum.Enum)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_ABSENT = object()


def unrestored(subject: Subject, runs: Sequence[Control], over: Callable[[], bool] = lambda: False) -> dict[Path, str]:
    """Attributes that change during play, differ after a restore and are not captured: path to place of the difference.

    Args:
        subject: the subject.
        runs: control runs to follow; the first is followed even if the time is up.
        over: True once the time is up.
    """
    found: dict[Path, str] = {}
    for number, control in enumerate(runs):
        if number and over():
            break
        with opened(subject) as env, opened(subject) as other:
            if not isinstance(env.unwrapped, SnapshotEnv):
                return {}
            for path, where in _differing(subject, env, other, control):
                found.setdefault(path, where)
    return found


def _differing(subject: Subject, env: AnyEnv, other: AnyEnv, control: Control) -> Iterator[tuple[Path, str]]:
    point = max(1, control.last // 2)
    seed_spaces(env, control.seed)
    looks: list[dict[Path, Any]] = []
    every = max(1, len(control.ops) // SAMPLES)
    snap: Any = None
    for number, op in enumerate(control.ops, 1):
        subject.call(env, op)
        if number == point:
            then = attributes(env.unwrapped)
            state = env.unwrapped._capture()  # type: ignore[attr-defined]
            captured = set(_names(state))
            release(state)
            snap = snapshot(env)
        if number % every == 0 or number == len(control.ops):
            looks.append(attributes(env.unwrapped))
    try:
        restore(env, snap)
        here = attributes(env.unwrapped)
        seed_spaces(other, control.seed + 1)
        start = control.ops[0]._replace(value=(control.seed + 1, control.ops[0].value[1]))
        for op in (start, *(op for op in control.ops[1:3] if op.kind == "step")):
            subject.call(other, Op(*op))
        restore(other, snap)
        there = attributes(other.unwrapped)
    finally:
        release(snap)
    for path, value in then.items():
        if path[-1] in captured or path[0] in captured or all(look.get(path, _ABSENT) == value for look in looks):
            continue
        for after, where in ((there, "in another environment"), (here, "in the environment that went on")):
            if after.get(path, _ABSENT) != value:
                yield path, where
                break


def attributes(env: AnyEnv) -> dict[Path, Any]:
    """The plain data that an environment's attributes lead to, in canonical form."""
    found: dict[Path, Any] = {}
    _look(env, (), found, set())
    return found


def _look(value: Any, path: Path, found: dict[Path, Any], seen: set[int]) -> None:
    if isinstance(value, (gym.Space, type)) or (callable(value) and path) or id(value) in seen:
        return
    if value is None or isinstance(value, _SCALARS) or (isinstance(value, np.ndarray) and value.dtype != object):
        found[path] = canonical(value)
        return
    if isinstance(value, dict) and 0 < len(value) <= WIDTH and all(isinstance(key, str) for key in value):
        inner = value
    elif isinstance(value, _CONTAINERS):
        if _elements(value) <= ELEMENTS:
            found[path] = canonical(list(value) if isinstance(value, collections.deque) else value)
        return
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith(_FOREIGN):
        inner = vars(value)
        if isinstance(value, gym.Env):
            inner = {key: item for key, item in inner.items() if key not in _INERT | _OWN}
    else:
        return
    if len(path) < DEPTH and len(inner) <= WIDTH:
        seen.add(id(value))
        for key, item in list(inner.items()):
            _look(item, (*path, str(key)), found, seen)


def _elements(value: Any) -> float:
    """Number of elements in nested plain containers; infinite where they hold another type."""
    if value is None or isinstance(value, _SCALARS):
        return 1
    if isinstance(value, np.ndarray):
        return float("inf") if value.dtype == object else value.size
    if not isinstance(value, _CONTAINERS) or len(value) > ELEMENTS:
        return float("inf")
    total = 1.0
    for item in [*value, *value.values()] if isinstance(value, dict) else value:
        total += _elements(item)
        if total > ELEMENTS:
            break
    return total


def _names(state: Any, depth: int = 3) -> Iterator[str]:
    """Names in a captured state."""
    if isinstance(state, dict):
        items = [(key, item) for key, item in state.items() if isinstance(key, str)]
    elif dataclasses.is_dataclass(state) and not isinstance(state, type):
        items = [(field.name, getattr(state, field.name)) for field in dataclasses.fields(state)]
    elif hasattr(state, "_fields"):
        items = list(zip(state._fields, state))
    else:
        return
    for key, item in items:
        yield key
        if depth:
            yield from _names(item, depth - 1)
