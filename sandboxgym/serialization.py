"""The durable snapshot format: a self-describing header and payload sections under one digest, all plain data.

Layout of a file of format 2::

    magic (8 bytes) | packed length (4, big endian) | sha256 of all that follows (32) | packed | large sections …

``packed`` is a raw deflate stream with a preset dictionary, of the header (JSON), a line feed, and the small sections
one after the other. The header lists every section with its length. Format 1 is read as well: its header is not packed,
has a checksum of its own, and holds a digest of all the sections.

So truncation and corruption are found before anything is used. Values are msgpack with a closed set of extension types
(big integers, tuples, sets, NumPy arrays and scalars); reading never imports, calls or unpickles anything, so untrusted
bytes cannot execute code. Reading takes time and memory proportional to the bytes (``bounds.py``), and a value that
could not be read within those bounds is not written.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgpack
import numpy as np

from sandboxgym import bounds
from sandboxgym.bounds import ARRAY, FROZENSET, INT, MAX_NESTING, SCALAR, SET, TUPLE
from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt, SnapshotNotSupported, from_outside

_NAME = b"SBXGYM\x00"
MAGIC, MAGIC_1 = _NAME + b"\x02", _NAME + b"\x01"
FORMAT_VERSION = 2
_PREFIX = struct.Struct(">8sI32s")
_MAX_HEADER = 2**20
_MAX_SECTIONS = 64
_SMALL = 2**12
"""Size in bytes up to which a section is packed."""
_UNPACKED_FLOOR, _UNPACKED_PER_BYTE = 2**16, 32
"""Bytes that packed ones may unpack to: whatever their number, and for each of them."""
_USUAL = b"""{"env_id":null,"env_class":"sandboxgym.envs.","state_version":1,"config":{"":false,"":true,"":0},"kind":\
"filesystem","kind":"full","kind":"logical","kind":"replay","kind":"memory","id":"0123456789abcdef","parent":null,\
"format":2,"sections":{"state":,"rng":,"transition":,"layers":}}
\x90\x93\xd9&gymnasium.wrappers.common.Autoreset\x81\xa9autoreset\xc2\x90\x93\xd91gymnasium.wrappers.common.\
RecordEpisodeStatistics\xafepisode_returns\xafepisode_lengths\xb2episode_start_time\x93\x93\xd9#gymnasium.wrappers.common.\
TimeLimit\x81\xb2_max_episode_steps2\x92\x81\xae_elapsed_steps\x00\x90\x93\xd9(gymnasium.wrappers.common.OrderEnforcing\
\x81\xbf_disable_render_order_enforcing\xc2\x92\x81\xaa_has_reset\xc3\x90\x93\xd9+gymnasium.wrappers.common.PassiveEnvChecker\
\x80\x92\x84\xadchecked_reset\xc3\xacchecked_step\xc3\xaechecked_render\xc2\xb2checked_data_reuse\xc3\x90"""
"""Preset dictionary of the packed bytes; part of the format."""

_KINDS = "biufcSUmM"  # NumPy kinds that are plain memory; never "O" (objects) or "V" (structured)
_MAX_DTYPE = 32  # characters of its name; NumPy's parser of long ones is slow
_MAX_DIMENSIONS = 64
_SIMPLE = frozenset({type(None), bool, int, float, str, bytes})
_ATOMS = _SIMPLE | {tuple}  # tuples have been looked into before
_LOSSY = (bytearray, memoryview, msgpack.Timestamp, msgpack.ExtType)  # msgpack takes these and returns something else


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of an encoding, named by their digest and read when they are needed.

    A store that has bytes of this digest need not read them.
    """

    digest: str
    """sha256, in hexadecimal digits."""
    nbytes: int
    read: Callable[[], bytes]
    """Return the bytes."""
    alone: bool = False
    """No other encoding is likely to have it: what is small need not be stored by itself."""

    @classmethod
    def of(cls, data: bytes, *, alone: bool = False) -> Self:
        """The piece of bytes that are at hand."""
        return cls(hashlib.sha256(data).hexdigest(), len(data), lambda: data, alone)


def pack_around(value: Callable[[bytes], Any], inside: Sequence[Piece]) -> list[Piece]:
    """Encode plain data with bytes in it that are not at hand: pieces whose concatenation is what `pack` returns.

    Args:
        value: called with bytes, once; returns the data with these in place of those of ``inside``, within lists and
            maps only.
        inside: pieces of the bytes in that place.

    Raises:
        SnapshotNotSupported: as by `pack`.
    """
    mark = os.urandom(16)
    before, _, after = pack(value(mark)).partition(msgpack.packb(mark))
    total = sum(piece.nbytes for piece in inside)
    before += _bytes_header(total)
    return [Piece.of(before, alone=True), *inside, Piece.of(after, alone=True)]


def _bytes_header(nbytes: int) -> bytes:
    """Header that msgpack writes before bytes."""
    for code, form, most in ((0xC4, ">BB", 2**8), (0xC5, ">BH", 2**16), (0xC6, ">BI", 2**32)):
        if nbytes < most:
            return struct.pack(form, code, nbytes)
    raise SnapshotNotSupported(f"cannot encode {nbytes:,} bytes in one value, expected less than {2**32:,}")


def join(pieces: Iterable[Piece]) -> bytes:
    """Read and concatenate pieces."""
    return b"".join([piece.read() for piece in pieces])


def pack(value: Any) -> bytes:
    """Encode plain data. Of NumPy's types that are the same number, such as ``longlong``, the usual one comes back.

    Raises:
        SnapshotNotSupported: naming the type that is not plain data, or the bound that `unpack` would refuse it by.
    """
    packed = _pack(value, 0)
    if len(packed) > bounds.ALWAYS:
        try:
            bounds.check(packed)
        except SnapshotCorrupt as error:
            raise SnapshotNotSupported(f"cannot encode this state: {error}") from None
    return packed


def unpack(data: bytes) -> Any:
    """Decode the bytes of `pack`, in time and memory proportional to their number.

    Raises:
        SnapshotCorrupt: the bytes are not such an encoding, or one out of proportion.
    """
    try:
        bounds.check(data)
        return _unpacked(data)
    except SnapshotCorrupt:
        raise
    except Exception as error:  # msgpack and NumPy raise many types on hostile bytes; all mean the same
        if from_outside(error):
            raise
        raise SnapshotCorrupt(f"expected msgpack data of this format: {brief(error)}") from error


def _pack(value: Any, depth: int) -> bytes:
    if depth > MAX_NESTING:
        raise SnapshotNotSupported(f"cannot encode tuples or sets nested more than {MAX_NESTING} deep")
    try:
        packed: bytes = msgpack.packb(value, default=functools.partial(_extend, depth), strict_types=True)
        _refuse_lossy(value)
    except (OverflowError, ValueError, BufferError, SnapshotCorrupt) as error:
        raise SnapshotNotSupported(f"cannot encode this state: {error}") from error
    return packed


def _refuse_lossy(value: Any) -> None:
    """Refuse values that msgpack would encode as another type; circular values were refused before.

    Raises:
        SnapshotCorrupt: the keys of a map collide, so that `unpack` would refuse them.
    """
    pending: list[Collection[Any]] = [(value,)]
    while pending:
        for item in pending.pop():
            kind = type(item)
            if kind in _ATOMS:
                continue
            if kind is list:
                pending.append(item)
            elif kind is dict:
                pending.append(item.values())
                if len(item) > bounds.FEW or not _SIMPLE.issuperset(map(type, item)):
                    bounds.check_keys(list(item))
                    pending.append(item.keys())
            elif isinstance(item, _LOSSY):
                raise _not_plain(item)


def _not_plain(value: Any) -> SnapshotNotSupported:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return SnapshotNotSupported(f"cannot encode a value of type {name}: it is not plain data")


def _extend(depth: int, value: Any) -> Any:
    kind = type(value)  # subclasses (enums, named tuples, masked arrays) would lose their type, so they are refused
    if kind is int:  # outside 64 bits
        length = value.bit_length() // 8 + 1
        return msgpack.ExtType(INT, value.to_bytes(length, "big", signed=True))
    if kind is tuple:
        return msgpack.ExtType(TUPLE, _pack(list(value), depth + 1))
    if kind in (set, frozenset):
        members = sorted(value, key=functools.partial(_pack, depth=depth + 1))
        bounds.check_keys(members, of_set=True)
        return msgpack.ExtType(SET if kind is set else FROZENSET, _pack(members, depth + 1))
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in _KINDS or len(array.dtype.str) > _MAX_DTYPE or not array.itemsize:
            raise SnapshotNotSupported(f"cannot encode a NumPy value of dtype {array.dtype}")
        if kind is not np.ndarray and (kind is not array.dtype.type or _loses_zeros(array, value)):
            raise _not_plain(value)
        axes = _axes(array)
        content = [array.dtype.str, list(array.shape), _memory(array.transpose(axes) if axes else array)]
        if axes:
            content.append(axes)
        return msgpack.ExtType(ARRAY if kind is np.ndarray else SCALAR, _pack(content, depth + 1))
    raise _not_plain(value)


def _axes(array: Any) -> list[int]:
    """Axes of an array as they lie in memory, outermost first; none if in their own order.

    Sums of floats depend on that order, and `copy.deepcopy` keeps it.
    """
    if array.flags.c_contiguous:
        return []
    strides = array.copy(order="K").strides
    axes = sorted(range(array.ndim), key=lambda axis: -strides[axis])
    return [] if axes == sorted(axes) else axes


def _loses_zeros(array: Any, scalar: Any) -> bool:
    """True of a text or bytes that NumPy shortens: it takes zeros at their end for padding."""
    return array.dtype.kind in "SU" and len(array[()]) != len(scalar)


def _memory(array: Any) -> bytes:
    """Memory of an array, the same of equal ones: what nobody wrote is no truth value and has no padding.

    Raises:
        SnapshotCorrupt, UnicodeDecodeError: it holds what `unpack` would refuse.
    """
    kind = array.dtype
    if kind.kind == "b":
        array = array.view(np.uint8) != 0
    memory: bytes = array.tobytes()
    if kind.kind == "U":
        _check_text(memory, kind)
    if kind.char in "gG" and np.finfo(np.longdouble).nmant == 63:  # ten bytes of each number are used
        numbers = np.frombuffer(bytearray(memory), np.uint8).reshape(-1, np.dtype("g").itemsize)
        (numbers[:, 10:] if kind.isnative else numbers[:, :-10])[:] = 0
        memory = numbers.tobytes()
    return memory


def _check_text(memory: bytes, kind: Any) -> None:
    """Refuse memory that is no text: NumPy takes any number for a code point, and fails when it is looked at."""
    # Not by the encoding's name, for Python would import a module for it.
    decode = codecs.utf_32_be_decode if kind.str[0] == ">" else codecs.utf_32_le_decode
    decode(memory, "surrogatepass", True)


def _unpacked(data: bytes) -> Any:
    """Decode bytes that passed `bounds.check`, extension types inside included."""
    return msgpack.unpackb(data, ext_hook=_extension, object_pairs_hook=_mapping, strict_map_key=False)


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    keys = [key for key, _ in pairs]
    if len(pairs) > bounds.FEW or not _SIMPLE.issuperset(map(type, keys)):
        bounds.check_keys(keys)
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise SnapshotCorrupt("a map has a key twice")
    return mapping


def _extension(code: int, data: bytes) -> Any:
    if code == INT:
        number = int.from_bytes(data, "big", signed=True)
        if -(2**63) <= number < 2**64:
            raise SnapshotCorrupt("expected an integer outside 64 bits in an extension type")
        return number
    content = _unpacked(data)
    if type(content) is not list:
        raise SnapshotCorrupt(f"expected a list in the extension type {code}, found {brief(content, 40)}")
    if code == TUPLE:
        return tuple(content)
    if code in (SET, FROZENSET):
        bounds.check_keys(content, of_set=True)
        members = set(content) if code == SET else frozenset(content)
        if len(members) != len(content):
            raise SnapshotCorrupt("a set has a member twice")
        return members
    name, shape, buffer, *placed = content
    kind = _dtype(name)
    if shape and (len(shape) > _MAX_DIMENSIONS or not all(type(side) is int and side >= 0 for side in shape)):
        raise SnapshotCorrupt(f"expected the shape of an array, found {brief(shape, 40)}")
    if kind.kind == "U":
        _check_text(buffer, kind)
    elif kind.kind == "b" and buffer.translate(None, b"\0\1"):
        raise SnapshotCorrupt("expected an array of truth values, found other numbers")
    array: Any = np.frombuffer(buffer, dtype=kind)
    if code == ARRAY and placed:
        (axes,) = placed
        own = list(range(len(shape)))
        if type(axes) is not list or set(map(type, axes)) != {int} or sorted(axes) != own or axes == own:
            raise SnapshotCorrupt(f"expected the order of {len(shape)} axes, found {brief(axes, 40)}")
        return array.reshape([shape[axis] for axis in axes]).copy().transpose(np.argsort(axes))
    if code == ARRAY:
        return array.reshape(shape).copy()
    if placed:
        raise SnapshotCorrupt("expected a NumPy scalar, found one with an order of axes")
    if shape or len(array) != 1:
        raise SnapshotCorrupt(f"expected a NumPy scalar, found one with shape {brief(shape, 40)}")
    return array[0]


@functools.lru_cache(maxsize=256)
def _dtype(name: str) -> Any:
    """The dtype with a name written by the encoder."""
    if type(name) is not str or len(name) > _MAX_DTYPE:
        raise SnapshotCorrupt(f"expected the name of a dtype, found {brief(name, 40)}")
    kind = np.dtype(name)
    if kind.kind not in _KINDS or kind.str != name:
        raise SnapshotCorrupt(f"expected an array of plain memory, found dtype {brief(name, 40)}")
    return kind


def content_digest(sections: Mapping[str, bytes]) -> str:
    """sha256 over named sections: equal content has an equal digest, whatever its id, parent or time."""
    digest = hashlib.sha256()
    for name in sorted(sections):
        digest.update(f"{name}:{len(sections[name])}:".encode())
        digest.update(sections[name])
    return digest.hexdigest()


def dumps(header: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """Header fields (JSON values) and sections as one self-describing byte string."""
    table = {name: len(content) for name, content in sections.items()}
    fields = {**header, "format": FORMAT_VERSION, "sections": table}
    fields.pop("digest", None)  # of a header of format 1
    head = json.dumps(fields, separators=(",", ":")).encode()
    if len(head) > _MAX_HEADER:
        raise SnapshotNotSupported(
            f"cannot encode a header of {len(head)} bytes, expected at most {_MAX_HEADER}: a smaller configuration"
        )
    small = [content for content in sections.values() if len(content) <= _SMALL]
    packed = _packed(b"".join((head, b"\n", *small)))
    rest = b"".join((packed, *(content for content in sections.values() if len(content) > _SMALL)))
    return _PREFIX.pack(MAGIC, len(packed), hashlib.sha256(rest).digest()) + rest


def _packed(plain: bytes) -> bytes:
    for level in (9, 0):  # what `_unpacked_head` would refuse is not compressed
        deflate = zlib.compressobj(level, zlib.DEFLATED, -15, zdict=_USUAL)
        packed = deflate.compress(plain) + deflate.flush()
        if len(plain) <= _UNPACKED_FLOOR + _UNPACKED_PER_BYTE * len(packed):
            break
    return packed


def loads(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Verified header and sections of the byte string of `dumps`, or of one of format 1.

    Raises:
        SnapshotCorrupt: saying what was expected and what was found.
    """
    if len(data) < _PREFIX.size:
        raise SnapshotCorrupt(f"expected at least {_PREFIX.size} bytes of a snapshot, found {len(data)}")
    magic, length, checksum = _PREFIX.unpack_from(data)
    if magic == MAGIC_1:
        return _loads_1(data, length, checksum)
    if magic != MAGIC:
        if magic.startswith(_NAME):
            raise SnapshotCorrupt(f"expected snapshot format {FORMAT_VERSION} or 1, found {magic[-1]}")
        raise SnapshotCorrupt(f"expected a snapshot (magic {MAGIC!r}), found {magic!r}")
    rest = memoryview(data)[_PREFIX.size :]
    if hashlib.sha256(rest).digest() != checksum:
        raise SnapshotCorrupt("the snapshot is truncated, or does not match its checksum")
    head, feed, small = _unpacked_head(rest[:length]).partition(b"\n")
    if not feed or len(head) > _MAX_HEADER:
        raise SnapshotCorrupt(f"expected a header of at most {_MAX_HEADER} bytes, found one of {len(head)}")
    header, table = _header(head, FORMAT_VERSION)
    sections: dict[str, bytes] = {}
    offsets = {True: 0, False: length}  # of small and large ones
    sources = {True: memoryview(small), False: rest}
    for name, nbytes in table:
        is_small = nbytes <= _SMALL
        source, offset = sources[is_small], offsets[is_small]
        section = bytes(source[offset : offset + nbytes])
        if len(section) != nbytes:
            raise SnapshotCorrupt(f"section {brief(name, 40)} of {brief(nbytes)} bytes is truncated")
        sections[name] = section
        offsets[is_small] = offset + nbytes
    if offsets[True] != len(small) or offsets[False] != len(rest):
        raise SnapshotCorrupt(f"expected {offsets[True]} and {offsets[False]} bytes, found {len(small)}, {len(rest)}")
    return header, sections


def _unpacked_head(packed: memoryview) -> bytes:
    most = _UNPACKED_FLOOR + _UNPACKED_PER_BYTE * len(packed)
    inflate = zlib.decompressobj(-15, zdict=_USUAL)
    try:
        plain = inflate.decompress(packed, most + 1)
    except zlib.error as error:
        raise SnapshotCorrupt(f"expected a packed header, found {len(packed)} other bytes: {error}") from error
    if not inflate.eof or inflate.unused_data or len(plain) > most:
        raise SnapshotCorrupt(f"expected a packed header of {len(packed)} bytes that holds at most {most}")
    return plain


def _header(head: bytes, version: int) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """The fields of a header, and its table of sections."""
    try:
        header = json.loads(head.decode())  # of bytes, json would guess the encoding and import it
        if header["format"] != version:  # before anything that another version may have otherwise
            raise SnapshotCorrupt(f"expected snapshot format {version}, found {brief(header['format'], 40)}")
        table = list(header["sections"].items())
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SnapshotCorrupt(f"the header is not readable: {brief(error)}") from error
    if len(table) > _MAX_SECTIONS or not all(type(nbytes) is int and nbytes >= 0 for _, nbytes in table):
        raise SnapshotCorrupt(f"expected the sizes of sections, found {brief(header['sections'])}")
    return header, table


def _loads_1(data: bytes, length: int, checksum: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """`loads` of format 1."""
    if length > _MAX_HEADER:
        raise SnapshotCorrupt(f"expected a header of at most {_MAX_HEADER} bytes, found one of {length}")
    head = data[_PREFIX.size : _PREFIX.size + length]
    if len(head) != length or hashlib.sha256(head).digest() != checksum:
        raise SnapshotCorrupt(f"the header of {length} bytes is truncated or does not match its checksum")
    header, table = _header(head, 1)
    sections: dict[str, bytes] = {}
    offset = _PREFIX.size + length
    for name, nbytes in table:
        section = data[offset : offset + nbytes]
        if len(section) != nbytes:
            raise SnapshotCorrupt(f"section {brief(name, 40)} of {brief(nbytes)} bytes is truncated")
        sections[name] = section
        offset += nbytes
    if offset != len(data):
        raise SnapshotCorrupt(f"expected {offset} bytes, found {len(data)}")
    if content_digest(sections) != header.get("digest"):
        raise SnapshotCorrupt("the sections do not match the digest in the header")
    return header, sections
