"""Fields of a state: paths to them, their values, and copies with another value."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sandboxgym.conformance.harness.canonical import canonical

Path = tuple[Any, ...]
"""Keys, indices and names of attributes that lead to a field."""
DEPTH, WIDTH, FIELDS = 4, 32, 64
"""Limits of the search for fields: depth, fields per value, fields in total."""


def name(path: Path) -> str:
    """A path as readable text: ``inventory.keys``, ``[2].name``."""
    text = "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in path).lstrip(".")
    return text or "the state"


def field_of(value: Any, path: Path) -> Any:
    """Value at a path.

    Raises:
        LookupError, AttributeError: there is no such field.
    """
    for part in path:
        value = value[part] if isinstance(value, (dict, list, tuple)) and not _named(value) else getattr(value, part)
    return value


def with_field(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at a path; only containers on the path are copied, nothing is changed.

    Raises:
        LookupError, AttributeError: there is no such field.
    """
    if not path:
        return new
    part, *rest = path
    inner = with_field(field_of(value, (part,)), tuple(rest), new)
    if _named(value):
        return value._replace(**{part: inner})
    if isinstance(value, dict):
        return type(value)({**value, part: inner}) if type(value) is dict else _set(copy.copy(value), part, inner)
    if isinstance(value, (list, tuple)):
        return type(value)([*value[:part], inner, *value[part + 1 :]])
    other = copy.copy(value)
    object.__setattr__(other, part, inner)
    return other


def _set(value: Any, part: Any, inner: Any) -> Any:
    value[part] = inner
    return value


def _named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def paths(values: Sequence[Any], *, depth: int = DEPTH, root: bool = True) -> list[Path]:
    """Fields common to these values: leaves of nested dicts, dataclasses, named tuples; items of the root."""
    first = values[0]
    parts: list[Any] = []
    if depth and all(type(value) is type(first) for value in values):
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            parts = [each.name for each in dataclasses.fields(first)]
        elif _named(first):
            parts = list(first._fields)
        elif isinstance(first, dict) and all(isinstance(key, str) for key in first):
            parts = list(first) if all(value.keys() == first.keys() for value in values) else []
        elif root and isinstance(first, (list, tuple)) and all(len(value) == len(first) for value in values):
            parts = list(range(len(first)))
    if not 0 < len(parts) <= WIDTH:
        return [()]
    inside = [paths([field_of(value, (part,)) for value in values], depth=depth - 1, root=False) for part in parts]
    return [(part, *path) for part, found in zip(parts, inside) for path in found]


def trace(value: Any) -> Any:
    """Fingerprint of a field; of an object that is not plain data, its identity."""
    if isinstance(value, (np.ndarray, np.generic, dict, list, tuple, set, frozenset, str, bytes, int, float)):
        return canonical(value)
    if value is None or dataclasses.is_dataclass(value):
        return canonical(value)
    return ("object", id(value))
