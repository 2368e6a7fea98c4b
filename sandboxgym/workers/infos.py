"""The infos of many environments as one, in Gymnasium's vector format."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Infos = dict[str, Any]


def batch_infos(infos: Mapping[int, Infos], n: int) -> Infos:
    """Infos in Gymnasium's vector format: an array per key, and under ``_key`` the mask of environments that have it.

    Numbers, bools and arrays of one type and shape become an array of that type, nested dicts are batched recursively,
    anything else becomes an array of objects. (In Gymnasium the first value decides, and later ones are cast or fail.)
    """
    if len(infos) == n and (whole := _whole_batch(infos)) is not None:
        return whole
    batch: Infos = {}
    for key in dict.fromkeys(key for info in infos.values() for key in info):
        values = {index: info[key] for index, info in infos.items() if key in info}
        mask = np.zeros(n, np.bool_)
        mask[list(values)] = True
        batch[key] = _objects(values, n) if key == "final_obs" else _column(values, n)
        batch[f"_{key}"] = mask
    return batch


_AT_ONCE: dict[type, Any] = {bool: np.bool_, int: int, float: np.float64}
"""Types whose columns are made together, with their dtypes: most of the time of a batch is that of making arrays."""


class _Layout(NamedTuple):
    """Columns of a batch by what they are made from; their parts of the values, which stand column by column."""

    types: tuple[type, ...]
    """Types of all values."""
    masks: list[str]
    present: NDArray[np.bool_]
    empty: dict[str, None]
    """All keys of the batch, in order."""
    at_once: list[tuple[Any, list[slice], list[str]]]
    """Dtypes with the parts and names of their columns."""
    objects: list[tuple[int, str]]
    """Numbers and names of the columns of objects."""
    others: list[tuple[slice, str]]
    """Parts and names of the other columns."""


@functools.lru_cache(64)
def _layout(names: tuple[str, ...], kinds: tuple[type, ...], n: int) -> _Layout:
    at_once: dict[type, list[tuple[slice, str]]] = {}
    objects: list[tuple[int, str]] = []
    others: list[tuple[slice, str]] = []
    for number, (name, kind) in enumerate(zip(names, kinds)):
        part = slice(number * n, number * n + n)
        if name == "final_obs" or kind in (str, list):
            objects.append((number, name))
        elif kind in _AT_ONCE:
            at_once.setdefault(kind, []).append((part, name))
        else:
            others.append((part, name))
    masks = [f"_{name}" for name in names]
    empty = dict.fromkeys(key for pair in zip(names, masks) for key in pair)
    groups = [
        (_AT_ONCE[kind], [part for part, _ in found], [name for _, name in found]) for kind, found in at_once.items()
    ]
    types = tuple(kind for kind in kinds for _ in range(n))
    return _Layout(types, masks, np.ones((len(names), n), np.bool_), empty, groups, objects, others)


def _whole_batch(infos: Mapping[int, Infos]) -> Infos | None:
    """`batch_infos` of all environments, as it is with most steps; None if they differ in their keys or types."""
    rows = list(infos.values())
    n, names = len(rows), tuple(rows[0])
    if [*infos] != [*range(n)] or [*map(tuple, rows)] != [names] * n:
        return None
    values = [*chain.from_iterable(zip(*[row.values() for row in rows], strict=True))]
    types = (*map(type, values),)
    layout = _layout(names, types[::n], n)
    if types != layout.types:
        return None
    batch: Infos = {**layout.empty}
    for dtype, parts, keys in layout.at_once:
        try:
            batch.update(zip(keys, np.array([values[part] for part in parts], dtype=dtype)))
        except OverflowError:  # an integer of more than 64 bits
            return None
    table = np.fromiter(values, object, len(values)).reshape(len(names), n)
    for number, name in layout.objects:
        batch[name] = table[number]
    for part, name in layout.others:
        batch[name] = _column(dict(enumerate(values[part])), n)
    batch.update(zip(layout.masks, layout.present.copy()))
    return batch


def _column(values: Mapping[int, Any], n: int) -> Any:
    first = next(iter(values.values()))
    kind = type(first)
    if any([type(value) is not kind for value in values.values()]):
        return _objects(values, n)
    if kind is dict:
        return batch_infos(values, n)
    if kind is int and any([abs(value) >= 2**63 for value in values.values()]):
        return _objects(values, n)
    if kind in (bool, int, float) or issubclass(kind, (np.number, np.bool_)):
        column = np.zeros(n, kind)
    elif kind is np.ndarray and all((v.dtype, v.shape) == (first.dtype, first.shape) for v in values.values()):
        column = np.zeros((n, *first.shape), first.dtype)
    else:
        return _objects(values, n)
    column[list(values)] = list(values.values())
    return column


def _objects(values: Mapping[int, Any], n: int) -> NDArray[np.object_]:
    column = np.empty(n, dtype=object)  # of None
    for index, value in values.items():
        column[index] = value
    return column
