"""Short descriptions of untrusted values for error messages.

``repr`` of such a value may take minutes and gigabytes, recurse too deep, or raise: an integer of more than 4,300
digits, a NumPy text outside Unicode. `brief` looks at a bounded part of the value, runs no code of its type but for
exceptions, and never raises.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

_DEPTH = 3
_ITEMS = 6
_BITS = 256
_BRACKETS: dict[type[Any], str] = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", dict: "{}"}


def brief(value: Any, length: int = 200) -> str:
    """A description of a value in at most ``length`` characters.

    Example:
        >>> brief({"a": [1, 2.5, None]})
        "{'a': [1, 2.5, None]}"
        >>> brief(2**100_000), brief("x" * 10**6, 12)
        ('an integer of 100001 bits', "'xxxxxxxx...")
    """
    try:
        text = _described(value, length, _DEPTH)
    except Exception as error:  # a type of somebody else's
        text = f"{type(value).__qualname__} (not printable: {type(error).__name__})"
    return text if len(text) <= length else text[: max(0, length - 3)] + "..."


def _described(value: Any, length: int, depth: int) -> str:
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() <= _BITS else f"an integer of {value.bit_length()} bits"
    if kind in (str, bytes):
        return repr(value[:length])
    if kind in _BRACKETS:
        return _listed(value, length, depth)
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {list(value.shape)}"
    if isinstance(value, np.generic):
        return f"a NumPy {value.dtype}"
    if isinstance(value, BaseException):
        said = ", ".join(_described(part, length, depth - 1) for part in value.args[:2]) if depth else "..."
        return f"{kind.__qualname__}({said})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and depth:
        parts = (
            f"{field.name}={_described(getattr(value, field.name), length, depth - 1)}"
            for field in dataclasses.fields(value)
        )
        return f"{kind.__qualname__}({', '.join(parts)})"
    return f"<{kind.__qualname__}>"


def _listed(value: Any, length: int, depth: int) -> str:
    left, right = tuple(_BRACKETS[type(value)])
    if not value:
        return f"{type(value).__qualname__}()" if type(value) in (set, frozenset) else left + right
    if depth == 0:
        return f"{left}...{right}"
    some = list(itertools.islice(value.items() if type(value) is dict else value, _ITEMS))
    if type(value) is dict:
        parts = [f"{_described(key, length, depth - 1)}: {_described(item, length, depth - 1)}" for key, item in some]
    else:
        parts = [_described(item, length, depth - 1) for item in some]
    more = [f"... {len(value)} in all"] if len(value) > len(some) else []
    comma = "," if type(value) is tuple and len(value) == 1 else ""
    return left + ", ".join([*parts, *more]) + comma + right
