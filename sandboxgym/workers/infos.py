"""The infos of many environments as one, in Gymnasium's vector format."""

from __future__ import annotations

import functools
from collections.abc import Mapping
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


_AT_ONCE: dict[type, Any] = {bool: np.bool_, int: int, float: np.float64, str: object}
"""Types whose columns are made together, with their dtypes: most of the time of a batch is that of making arrays."""


class _Layout(NamedTuple):
    """Columns of a batch by what they are made from."""

    names: list[str]
    masks: list[str]
    empty: dict[str, None]
    """All keys of the batch, in order."""
    at_once: list[tuple[type, list[int], list[str]]]
    """Types with the numbers and names of their columns."""
    others: list[int]
    """Numbers of the other columns."""


@functools.lru_cache(64)
def _layout(names: tuple[str, ...], kinds: tuple[type, ...]) -> _Layout:
    at_once: dict[type, list[int]] = {}
    others: list[int] = []
    for number, (name, kind) in enumerate(zip(names, kinds)):
        (at_once.setdefault(kind, []) if kind in _AT_ONCE and name != "final_obs" else others).append(number)
    masks = [f"_{name}" for name in names]
    empty = dict.fromkeys(key for pair in zip(names, masks) for key in pair)
    groups = [(kind, numbers, [names[number] for number in numbers]) for kind, numbers in at_once.items()]
    return _Layout(list(names), masks, empty, groups, others)


def _whole_batch(infos: Mapping[int, Infos]) -> Infos | None:
    """`batch_infos` of all environments, as it is with most steps; None if they differ in their keys or types."""
    rows = list(infos.values())
    n = len(rows)
    names, kinds = tuple(rows[0]), tuple(map(type, rows[0].values()))
    for number, (index, row) in enumerate(infos.items()):
        if index != number or tuple(row) != names or tuple(map(type, row.values())) != kinds:
            return None
    layout = _layout(names, kinds)
    columns = list(zip(*[row.values() for row in rows]))
    batch: Infos = {**layout.empty}
    for kind, numbers, keys in layout.at_once:
        try:
            batch.update(zip(keys, np.array([columns[number] for number in numbers], dtype=_AT_ONCE[kind])))
        except OverflowError:  # an integer of more than 64 bits
            return None
    for number in layout.others:
        name, values = names[number], dict(enumerate(columns[number]))
        batch[name] = _objects(values, n) if name == "final_obs" or kinds[number] is list else _column(values, n)
    batch.update(zip(layout.masks, np.ones((len(names), n), np.bool_)))
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
