"""Bounds on encoded plain data, checked in one pass over the bytes before anything of them is built.

1. What is decoded takes memory and time in proportion to the bytes: the containers that they make, the elements that
   they announce, the bytes that nested extension types copy and the nesting are counted first (`check`).
2. A map or a set whose keys were made to collide is refused before it is built (`check_keys`): the hashes of numbers
   and of tuples of them are not secret.
3. The encoder keeps the same bounds, so that nothing is saved that cannot be loaded.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from operator import eq, lt
from typing import Any

from sandboxgym.errors import SnapshotCorrupt

INT, TUPLE, ARRAY, SCALAR, SET, FROZENSET = range(1, 7)
"""Extension types."""

MAX_NESTING = 32
"""Levels of extension types; each takes about 40 KB of the C stack, which hostile bytes could exhaust."""
MAX_DEPTH = 512
"""Levels of lists, maps and extension types together; msgpack encodes 511 lists, and decodes twice as many."""
MAX_INT = 2**16
"""Largest integer, in bytes."""
ALWAYS = MAX_DEPTH
"""Bytes up to which what the encoder made is within all bounds: there are no more levels than bytes, a byte makes less
than 300 bytes of containers, and is copied once per level of extension types."""

_FLOOR, _PER_BYTE = 4 * 2**20, 28
"""Bytes of memory for containers: whatever the encoding's size, and for each byte of it.

One byte makes an empty map of 72 bytes, four make a map of one letter, of 184: many of these are refused. A list of
pairs takes 27 bytes for each of its encoding.
"""
_LIST, _SLOT, _EMPTY, _MAP, _OTHER_KEYS, _ENTRY = 64, 8, 72, 184, 56, 112
_EXTENSION, _OF_NUMPY, _OF_SET = 80, 100, 160  # not memory only: each is a call of a function, or of several
_COPIES = 8
"""Copies allowed per byte on the way through extension types around it."""
_COPIED_FLOOR = 2**20

FEW = 64
"""Keys whose collisions cost nothing, if comparing two of them does not."""
_COMPARED = 64
"""Comparisons of numbers and texts allowed for each one within the keys."""
_PROBES = 64
"""Average probes of occupied slots per key; ordinary keys take one or two, multiples of a large power of 2 thirty."""
_LINEAR = 9  # places that a set tries next to each other
_SHIFT = 5
_HASH = 2**64 - 1


def _table() -> list[int]:
    """Table from the first byte of a value to its length in bytes; 0 where more bytes must be read."""
    steps = [0] * 256
    for first in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):
        steps[first] = 1
    for first in range(0xA0, 0xC0):  # short text
        steps[first] = 1 + first - 0xA0
    numbers = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    for first, size in numbers.items():
        steps[first] = 1 + size
    return steps


_STEPS = _table()
_TEXTS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LISTS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def check(data: bytes) -> None:
    """Refuse an encoding that is truncated, of no known type, or out of proportion; text is not looked at.

    Raises:
        SnapshotCorrupt: saying which bound it breaks.
    """
    try:
        _check(data)
    except (IndexError, struct.error):
        raise SnapshotCorrupt(f"the encoding of {len(data)} bytes is truncated") from None


def _check(data: bytes) -> None:
    size = len(data)
    memory = _FLOOR + _PER_BYTE * size
    copies = _COPIED_FLOOR + _COPIES * size
    at = nesting = 0
    owed, outside = 1, 0  # values still to come: in this container, and in those around it
    around: list[tuple[int, int]] = []  # of each: what it is owed, and where it ends if it is an extension
    steps = _STEPS
    while True:
        while owed:
            owed -= 1
            step = steps[first := data[at]]
            if step:
                at += step
                continue
            ends = 0
            if first in _TEXTS:
                length, at = _number(data, at, _TEXTS[first])
                at += length
                continue
            if 0x90 <= first < 0xA0 or first in _LISTS:
                count, at = (first - 0x90, at + 1) if first < 0xA0 else _number(data, at, _LISTS[first])
                memory -= _LIST + _SLOT * count
            elif first < 0x90 or first in _MAPS:
                pairs, at = (first - 0x80, at + 1) if first < 0x90 else _number(data, at, _MAPS[first])
                memory -= _MAP + _ENTRY * max(0, pairs - 5) if pairs else _EMPTY
                if pairs and not (0xA0 <= data[at] < 0xC0 or data[at] in _TEXTS):
                    memory -= _OTHER_KEYS
                count = 2 * pairs
            else:
                length, at = _extension(data, at)
                code = data[at - 1]
                if code == INT:
                    if not 0 < length <= MAX_INT:
                        raise SnapshotCorrupt(f"expected an integer of at most {MAX_INT} bytes, found {length}")
                    at += length
                    memory -= _EXTENSION
                    continue
                if code not in (TUPLE, ARRAY, SCALAR, SET, FROZENSET):
                    raise SnapshotCorrupt(f"unknown extension type {code}")
                memory -= _EXTENSION + (0 if code == TUPLE else _OF_NUMPY if code in (ARRAY, SCALAR) else _OF_SET)
                copies -= length
                nesting += 1
                count, ends = 1, at + length
                if copies < 0 or nesting > MAX_NESTING or ends > size:
                    raise SnapshotCorrupt(
                        f"expected extension types nested at most {MAX_NESTING} deep, and not many around many bytes"
                    )
            if count + owed + outside > size - at:
                raise SnapshotCorrupt(f"{count} values are announced where {size - at} bytes are left")
            if memory < 0:
                raise SnapshotCorrupt(
                    f"{size} bytes encode more lists, maps, tuples and arrays than fit {_PER_BYTE} bytes of memory each"
                )
            if count:
                around.append((owed, ends))
                outside += owed
                owed = count
                if len(around) > MAX_DEPTH:
                    raise SnapshotCorrupt(f"expected values nested at most {MAX_DEPTH} deep")
        if not around:
            break
        owed, ends = around.pop()
        outside -= owed
        if ends:
            nesting -= 1
            if at != ends:
                raise SnapshotCorrupt("the content of an extension type does not fit its length")
    if at != size:
        raise SnapshotCorrupt(f"expected an encoding of {at} bytes, found {size}")


def _number(data: bytes, at: int, form: str) -> tuple[int, int]:
    """The number that follows a first byte, and the offset after it."""
    (number,) = struct.unpack_from(form, data, at + 1)
    return number, at + 1 + struct.calcsize(form)


def _extension(data: bytes, at: int) -> tuple[int, int]:
    """Length and offset of an extension's content."""
    first = data[at]
    if first in _FIXED_EXTENSIONS:
        return _FIXED_EXTENSIONS[first], at + 2
    if first in _EXTENSIONS:
        length, after = _number(data, at, _EXTENSIONS[first])
        return length, after + 1
    raise SnapshotCorrupt(f"no value begins with the byte {first:#x}")


def check_keys(keys: Sequence[Any], *, of_set: bool = False) -> None:
    """Refuse keys that would make building a dict or a set take time quadratic in their number.

    Their places in the table are followed as CPython looks for them, at each size that the table grows through. Keys
    of one hash are compared, too, with what is in them: in frozen sets of frozen sets whose hashes are equal, each
    level multiplies the comparisons.

    Raises:
        SnapshotCorrupt: they were made to collide.
    """
    if sys.flags.hash_randomization and _TEXT.issuperset(map(type, keys)):
        return
    compared = not _COMPOUND.isdisjoint(map(type, keys))
    if len(keys) <= FEW and not compared:
        return
    hashes = list(map(hash, keys))
    if compared and not _are_compared_quickly(keys, hashes):
        raise SnapshotCorrupt(f"{len(keys)} keys of a map or a set collide, and take long to compare")
    ordered = len(keys) > FEW and _are_ordered_numbers(keys)
    size = FEW
    while len(keys) > size * 2 // 3:
        size *= 2
        last = min(len(keys), size * 2 // 3) - 1
        if ordered and keys[last] - keys[0] < size:
            continue  # each has a place of its own
        if not _is_quick([value & _HASH for value in hashes[: last + 1]], size, _LINEAR if of_set else 0):
            raise SnapshotCorrupt(f"{len(keys)} keys of a map or a set collide")


_TEXT = frozenset({str, bytes})
_COMPOUND = frozenset({tuple, frozenset})


def _are_ordered_numbers(keys: Sequence[Any]) -> bool:
    """True of ascending numbers that are their own hashes."""
    if not {int}.issuperset(map(type, keys)) or not -(2**60) < keys[0] <= keys[-1] < 2**60:
        return False
    return all(map(lt, keys, islice(keys, 1, None)))


def _are_compared_quickly(keys: Sequence[Any], hashes: Sequence[int]) -> bool:
    """True if comparing each key with all others of its hash takes few enough comparisons of what is in them."""
    if not _has_equal(hashes):
        return True
    values = comparisons = 0
    order = sorted(range(len(keys)), key=hashes.__getitem__)
    for _, alike in groupby(order, hashes.__getitem__):
        group = [_comparisons(keys[at]) for at in alike]
        values += sum(inside for inside, _ in group)
        comparisons += sum(most for _, most in group) * (len(group) - 1)
    return comparisons <= 2 * _COMPARED * values


def _has_equal(hashes: Iterable[int]) -> bool:
    """True if two of these are equal. Hashes may have been chosen to collide: they are sorted, and in no table."""
    order = sorted(hashes)
    return any(map(eq, order, islice(order, 1, None)))


def _comparisons(key: Any) -> tuple[int, int]:
    """Number of simple values in a key, and of comparisons of such that tell it from a key with its hash, at most."""
    if type(key) not in _COMPOUND:
        return 1, 1
    each = [_comparisons(value) for value in key]
    alike = 1
    if type(key) is frozenset and _has_equal(map(hash, key)):
        alike = max(sum(1 for _ in group) for _, group in groupby(sorted(map(hash, key))))
    return 1 + sum(inside for inside, _ in each), 1 + alike * sum(most for _, most in each)


def _is_quick(hashes: Sequence[int], size: int, linear: int) -> bool:
    """True if inserting these keys into a table of this size meets few enough occupied slots (`_PROBES`)."""
    taken = bytearray(size)
    mask, allowed = size - 1, _PROBES * len(hashes)
    for value in hashes:
        at = value & mask
        while taken[at]:
            allowed -= 1
            if allowed < 0:
                return False
            if linear and at + linear <= mask:
                free = taken.find(0, at, at + linear + 1)
                if free >= 0:
                    at = free
                    break
            value >>= _SHIFT
            at = (5 * at + value + 1) & mask
        taken[at] = 1
    return True
