"""The infos of many environments as one, in Gymnasium's vector format."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Infos = dict[str, Any]


def batch_infos(infos: Mapping[int, Infos], n: int) -> Infos:
    """Infos in Gymnasium's vector format: an array per key, and under ``_key`` the mask of environments that have it.

    Numbers, bools and arrays of one type and shape become an array of that type, nested dicts are batched recursively,
    anything else becomes an array of objects. (In Gymnasium the first value decides, and later ones are cast or fail.)
    """
    if [*infos] == [*range(n)] and (whole := _equal_batch([*infos.values()])) is not None:
        return whole
    return _any_batch(infos, n)


def batch_all(infos: Sequence[Infos]) -> Infos:
    """`batch_infos` of every environment's info."""
    whole = _equal_batch(infos)
    return _any_batch(dict(enumerate(infos)), len(infos)) if whole is None else whole


def _any_batch(infos: Mapping[int, Infos], n: int) -> Infos:
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
    """Columns of a batch in the order in which they are made: those of one type together."""

    values_of: Callable[[Infos], tuple[Any, ...]]
    """Maps an info to its values in this order.

    Raises:
        KeyError: one is not there.
    """
    types: tuple[type, ...]
    """Types of the first values, which stand column by column: of those in `_AT_ONCE`."""
    empty: dict[str, None]
    """All keys of the batch, in the order of the infos'."""
    names: list[str]
    """Those of the columns that are made together, and of the masks."""
    present: NDArray[np.bool_]
    """(keys, n): the masks."""
    at_once: list[tuple[Any, slice, int]]
    """Dtypes of the columns that are made together, their parts of the values, and how many these are."""
    others: list[tuple[slice, str]]
    """Parts and names of the other columns."""


@functools.lru_cache(64)
def _layout(names: tuple[str, ...], kinds: tuple[type, ...], n: int) -> _Layout:
    groups: dict[Any, list[str]] = {kind: [] for kind in (*_AT_ONCE, object, None)}
    for name, kind in zip(names, kinds):
        if name == "final_obs" or kind in (str, list):
            groups[object].append(name)
        else:
            groups[kind if kind in _AT_ONCE else None].append(name)
    parts: dict[Any, slice] = {}
    end = 0
    for group, found in groups.items():
        parts[group] = slice(end, end := end + n * len(found))
    order = [name for found in groups.values() for name in found]
    masks = [f"_{name}" for name in names]
    arrays = [kind for kind in (*_AT_ONCE, object) if groups[kind]]
    first = parts[None].start
    return _Layout(
        itemgetter(*order) if len(order) > 1 else lambda info: (info[order[0]],),
        tuple(kind for kind in _AT_ONCE for _ in range(n * len(groups[kind]))),
        dict.fromkeys(key for pair in zip(names, masks) for key in pair),
        [*chain.from_iterable(groups[kind] for kind in arrays), *masks],
        np.ones((len(names), n), np.bool_),
        [(_AT_ONCE.get(kind, object), parts[kind], n * len(groups[kind])) for kind in arrays],
        [(slice(first + n * i, first + n * i + n), name) for i, name in enumerate(groups[None])],
    )


def _equal_batch(infos: Sequence[Infos]) -> Infos | None:
    """`batch_infos` of all environments, as it is with most steps; None if they differ in their keys or types."""
    first, n = infos[0], len(infos)
    if not first or len({*map(len, infos)}) > 1:
        return None
    layout = _layout(tuple(first), (*map(type, first.values()),), n)
    try:
        values = [*chain.from_iterable(zip(*[layout.values_of(info) for info in infos]))]
    except KeyError:
        return None
    if (*map(type, values[: len(layout.types)]),) != layout.types:
        return None
    try:
        made = [np.fromiter(values[part], dtype, size).reshape(-1, n) for dtype, part, size in layout.at_once]
    except OverflowError:  # an integer of more than 64 bits
        return None
    batch: Infos = {**layout.empty}
    batch.update(zip(layout.names, chain.from_iterable((*made, layout.present.copy()))))
    for part, name in layout.others:
        batch[name] = _column(dict(enumerate(values[part])), n)
    return batch


def _column(values: Mapping[int, Any], n: int) -> Any:
    first = next(iter(values.values()))
    kind = type(first)
    if any([type(value) is not kind for value in values.values()]):
        return _objects(values, n)
    if kind is dict:
        return batch_infos(values, n)
    if kind is int and any([not -(2**63) <= value < 2**63 for value in values.values()]):
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
