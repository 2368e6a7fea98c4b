"""Canonical form of outputs: values that compare with ``==``, exactly, types and dtypes included.

NaN equals NaN, 0.0 is not -0.0, ``np.float32(1)`` is not ``1.0``; the order of a dict or a set does not matter.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np


class Items(tuple[Any, ...]):
    """The items of a mapping, or the fields of an object: pairs in a fixed order."""

    __slots__ = ()


LINKED = 6
"""Depth to which objects with slots are followed: objects of a grid refer to each other on exponentially many paths."""
Canonical = Any
"""Nested tuples of strings, bytes and numbers; equal if and only if the originals are the same values."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def canonical(value: Any) -> Canonical:
    """The canonical form of any value that an environment may return."""
    return _canonical(value, ())


def mark(value: Any) -> int:
    """A hash of a canonical form, where thousands are compared; plain ``hash`` gives -1 and -2 the same value."""
    return hash(repr(value))


def _canonical(value: Any, path: tuple[int, ...]) -> Canonical:
    kind = type(value)
    if value is None or kind is str or kind is bytes:
        return value
    if kind is bool or kind is int:
        return (kind.__name__, value)
    if kind is float:
        return ("float", value.hex())
    if id(value) in path:
        return ("cycle", len(path) - path.index(id(value)))
    if len(path) > 60:
        return ("deep", kind.__qualname__)
    inside = (*path, id(value))
    if isinstance(value, (dict, types.MappingProxyType)):
        items = [(_canonical(key, inside), _canonical(item, inside)) for key, item in value.items()]
        return (_name(kind), Items(sorted(items, key=_key)))
    if isinstance(value, (list, tuple)):
        return (_name(kind), tuple([_canonical(item, inside) for item in value]))
    if isinstance(value, collections.deque):
        return (f"{_name(kind)} of {value.maxlen}", tuple([_canonical(item, inside) for item in value]))
    if isinstance(value, (set, frozenset)):
        return (_name(kind), tuple(sorted((_canonical(item, inside) for item in value), key=repr)))
    if isinstance(value, np.generic):
        return ("numpy", value.dtype.str, "nan" if value != value else value.tobytes(), _shown(value))
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return ("array", value.dtype.str, value.shape, tuple([_canonical(item, inside) for item in value.ravel()]))
        if value.dtype.kind in "fc" and np.isnan(value).any():
            missing = np.isnan(value)
            return ("array", value.dtype.str, value.shape, missing.tobytes() + np.where(missing, 0, value).tobytes())
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, (str, bytes, int, float, complex)):  # subclasses, enumerations
        return (_name(kind), repr(value))
    if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)):
        return (_name(kind), getattr(value, "__qualname__", getattr(value, "__name__", "")))
    if isinstance(value, np.random.Generator):
        return ("generator", _canonical(value.bit_generator.state, inside))
    if dataclasses.is_dataclass(value):
        fields = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
        return (_name(kind), Items([(name, _canonical(item, inside)) for name, item in fields]))
    content = getattr(value, "__dict__", None)
    if content:
        return (_name(kind), _canonical(dict(content), inside))
    if hasattr(value, "__array__"):  # tensors
        return (_name(kind), _canonical(np.asarray(value), inside))
    told: Any = kind.__repr__
    if told is object.__repr__ and len(path) < LINKED and (slots := _slots(value)):
        return (_name(kind), Items([(name, _canonical(item, inside)) for name, item in slots]))
    return (_name(kind), _ADDRESS.sub("", repr(value)))


def _slots(value: Any) -> list[tuple[str, Any]]:
    """Contents of the slots of an object whose ``repr`` does not show them."""
    found = {}
    for base in reversed(type(value).__mro__):
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it was never set
                    found[name] = member.__get__(value)
    return sorted(found.items())


def _name(kind: type[Any]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _key(item: tuple[Any, Any]) -> str:
    return repr(item[0])


def _shown(value: np.generic) -> str:
    return repr(value)


def difference(expected: Canonical, found: Canonical, path: str = "") -> str | None:
    """First difference of two canonical values, in words; None if they are equal."""
    if expected == found:
        return None
    both = isinstance(expected, tuple) and isinstance(found, tuple) and len(expected) == len(found) == 2
    if both and expected[0] == found[0] and isinstance(expected[1], tuple) and isinstance(found[1], tuple):
        mine, theirs = expected[1], found[1]
        if isinstance(mine, Items) and isinstance(theirs, Items):
            left, right = dict(mine), dict(theirs)
            for key in left.keys() | right.keys():
                if key not in left:
                    return f"{path}[{show(key)}]: unexpected, {show(right[key])}"
                if key not in right:
                    return f"{path}[{show(key)}]: missing, expected {show(left[key])}"
            for key, item in left.items():
                if item != right[key]:
                    return difference(item, right[key], f"{path}[{show(key)}]")
        if len(mine) != len(theirs):
            return f"{path}: expected {len(mine)} items, found {len(theirs)} ({show(expected)} and {show(found)})"
        for index, (item, other) in enumerate(zip(mine, theirs)):
            if item != other:
                return difference(item, other, f"{path}[{index}]")
    if both_arrays(expected, found):
        return f"{path}: {_arrays(expected, found)}"
    return f"{path}: expected {show(expected)}, found {show(found)}"


def both_arrays(expected: Canonical, found: Canonical) -> bool:
    """True if both values are arrays without objects."""
    return all(
        isinstance(v, tuple) and len(v) == 4 and v[0] == "array" and isinstance(v[3], bytes) for v in (expected, found)
    )


def _arrays(expected: Canonical, found: Canonical) -> str:
    if expected[1:3] != found[1:3]:
        return f"expected an array of {expected[1]} {expected[2]}, found {found[1]} {found[2]}"
    try:
        left, right = (np.frombuffer(v[3], dtype=v[1]).reshape(v[2]) for v in (expected, found))
        index = tuple(int(i) for i in np.argwhere(left != right)[0])
        differing = int((left != right).sum())
        where = f"{differing} of {left.size} elements differ, first at {index}"
        return f"{where}: expected {left[index]}, found {right[index]}"
    except (ValueError, IndexError):
        return "arrays differ"


def rows(expected: Mapping[str, Canonical], found: Mapping[str, Canonical]) -> list[dict[str, Any]]:
    """Table of two sets of canonical values field by field; entries of dicts that differ have rows of their own.

    Returns:
        Rows with the strings ``field``, ``expected``, ``found`` and the flag ``differs``.
    """
    table = []
    for name, one in expected.items():
        other = found.get(name)
        left, right = _entries(one), _entries(other)
        if one != other and left is not None and right is not None:
            keys = [key for key in {**left, **right} if left.get(key, ...) != right.get(key, ...)]
            table += rows(
                {f"{name}[{key}]": left.get(key, _MISSING) for key in keys},
                {f"{name}[{key}]": right.get(key, _MISSING) for key in keys},
            )
        elif one is not None or other is not None:
            table.append({"field": name, "expected": show(one), "found": show(other), "differs": one != other})
    return table


_MISSING: Canonical = ("missing", "nothing")


def _entries(value: Canonical) -> dict[str, Canonical] | None:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Items):
        return {show(key): item for key, item in value[1]}
    return None


def literal(value: Any) -> str:
    """Python source of a value, types and dtypes included; the only name it may need is NumPy as ``np``."""
    kind = type(value)
    if kind is float and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return repr(value)
    if kind is dict:
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if kind is list:
        return f"[{', '.join(map(literal, value))}]"
    if kind is tuple:
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if kind is set and value:
        return "{" + ", ".join(map(literal, value)) + "}"
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return f"np.{kind.__name__}({literal(value.item())})"
    if kind is np.ndarray and value.dtype.kind in "biufcSU":
        made = f"np.array({literal(value.tolist())}, dtype={value.dtype.str!r})"
        return made if value.size else f"np.zeros({value.shape!r}, dtype={value.dtype.str!r})"
    return f"__import__('pickle').loads({pickle.dumps(value, protocol=4)!r})"


def show(value: Canonical, limit: int = 160) -> str:
    """A canonical value as readable text."""
    text = repr(_plain(value))
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _plain(value: Canonical) -> Any:
    if not isinstance(value, tuple) or not value:
        return value
    head = value[0]
    if head in ("bool", "int") and len(value) == 2:
        return value[1]
    if head == "float" and len(value) == 2:
        return float.fromhex(value[1])
    if head == "numpy" and len(value) == 4:
        return _Text(value[3])
    if head == "array" and len(value) == 4:
        if isinstance(value[3], bytes):
            try:
                return np.frombuffer(value[3], dtype=value[1]).reshape(value[2])
            except ValueError:
                return _Text(f"array of {value[1]} {value[2]} with NaN")
        return [_plain(item) for item in value[3]]
    if head in ("list", "tuple", "set", "frozenset") and len(value) == 2:
        items = [_plain(item) for item in value[1]]
        return tuple(items) if head == "tuple" else items
    if len(value) == 2 and isinstance(value[1], Items):
        return {_Text(repr(_plain(key))): _plain(item) for key, item in value[1]}
    return tuple(_plain(item) for item in value)


class _Text(str):
    """Text shown without quotes."""

    def __repr__(self) -> str:
        return str(self)
