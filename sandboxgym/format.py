"""The durable snapshot format: a self-describing header and payload sections under one digest, all plain data.

Layout of a file::

    magic (8 bytes) | header length (4, big endian) | sha256 of the header (32) | header (JSON) | sections …

The header lists every section with its length and holds the digest of them all, so truncation and corruption are
found before anything is used. Values are msgpack with a closed set of extension types (big integers, tuples, sets,
NumPy arrays and scalars); reading never imports, calls or unpickles anything, so untrusted bytes cannot execute code.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from sandboxgym.errors import SnapshotCorrupt, SnapshotNotSupported

MAGIC = b"SBXGYM\x00\x01"
FORMAT_VERSION = 1
_PREFIX = struct.Struct(">8sI32s")
_MAX_HEADER = 16 * 2**20

_INT, _TUPLE, _ARRAY, _SCALAR, _SET, _FROZENSET = range(1, 7)
_KINDS = "biufcSUmM"  # NumPy kinds that are plain memory; never "O" (objects) or "V" (structured)
_MAX_NESTING = 32  # of extension types; each level takes about 40 KB of the C stack, which hostile bytes could exhaust
_LOSSY = (bytearray, memoryview, msgpack.Timestamp, msgpack.ExtType)  # msgpack takes these and returns something else


def pack(value: Any) -> bytes:
    """Encode plain data.

    Raises:
        SnapshotNotSupported: naming the type that is not plain data.
    """
    return _pack(value, 0)


def unpack(data: bytes) -> Any:
    """Decode what `pack` wrote.

    Raises:
        SnapshotCorrupt: the bytes are not such an encoding.
    """
    return _unpack(data, 0)


def _pack(value: Any, depth: int) -> bytes:
    if depth > _MAX_NESTING:
        raise SnapshotNotSupported(f"cannot encode tuples or sets nested more than {_MAX_NESTING} deep")
    try:
        packed: bytes = msgpack.packb(value, default=functools.partial(_extend, depth), strict_types=True)
    except (OverflowError, ValueError) as error:
        raise SnapshotNotSupported(f"cannot encode this state: {error}") from error
    _refuse_lossy(value)
    return packed


def _unpack(data: bytes, depth: int) -> Any:
    if depth > _MAX_NESTING:
        raise SnapshotCorrupt(f"expected extension types nested at most {_MAX_NESTING} deep")
    try:
        return msgpack.unpackb(data, ext_hook=functools.partial(_restore, depth), strict_map_key=False)
    except SnapshotCorrupt:
        raise
    except Exception as error:  # msgpack and NumPy raise many types on hostile bytes; all mean the same
        raise SnapshotCorrupt(f"expected msgpack data of this format: {error}") from error


def _refuse_lossy(value: Any) -> None:
    """Find what msgpack encodes by itself as another type; ends, for msgpack has refused circular values before."""
    pending = [value]
    while pending:
        item = pending.pop()
        if type(item) is list:
            pending.extend(item)
        elif type(item) is dict:
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, _LOSSY):
            raise _not_plain(item)


def _not_plain(value: Any) -> SnapshotNotSupported:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return SnapshotNotSupported(f"cannot encode a value of type {name}: it is not plain data")


def _extend(depth: int, value: Any) -> Any:
    kind = type(value)  # subclasses (enums, named tuples, masked arrays) would lose their type, so they are refused
    if kind is int:  # outside 64 bits
        length = value.bit_length() // 8 + 1
        return msgpack.ExtType(_INT, value.to_bytes(length, "big", signed=True))
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value), depth + 1))
    if kind in (set, frozenset):
        members = sorted(value, key=functools.partial(_pack, depth=depth + 1))
        return msgpack.ExtType(_SET if kind is set else _FROZENSET, _pack(members, depth + 1))
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in _KINDS:
            raise SnapshotNotSupported(f"cannot encode a NumPy value of dtype {array.dtype}")
        content = [array.dtype.str, list(array.shape), array.tobytes()]
        return msgpack.ExtType(_ARRAY if kind is np.ndarray else _SCALAR, _pack(content, depth + 1))
    raise _not_plain(value)


def _restore(depth: int, code: int, data: bytes) -> Any:
    if code == _INT:
        return int.from_bytes(data, "big", signed=True)
    content = _unpack(data, depth + 1)
    if code in (_ARRAY, _SCALAR):
        dtype, shape, buffer = content
        kind = np.dtype(dtype)
        if kind.kind not in _KINDS:
            raise SnapshotCorrupt(f"expected an array of plain memory, found dtype {kind}")
        array = np.frombuffer(buffer, dtype=kind).reshape(shape).copy()
        return array if code == _ARRAY else array[()]
    if code in (_TUPLE, _SET, _FROZENSET):
        return {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}[code](content)
    raise SnapshotCorrupt(f"unknown extension type {code}")


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
    fields = {**header, "format": FORMAT_VERSION, "sections": table, "digest": content_digest(sections)}
    head = json.dumps(fields, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(MAGIC, len(head), hashlib.sha256(head).digest())
    return b"".join((prefix, head, *sections.values()))


def loads(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header and sections of `dumps`, verified.

    Raises:
        SnapshotCorrupt: saying what was expected and what was found.
    """
    if len(data) < _PREFIX.size:
        raise SnapshotCorrupt(f"expected at least {_PREFIX.size} bytes of a snapshot, found {len(data)}")
    magic, length, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotCorrupt(f"expected a snapshot (magic {MAGIC!r}), found {magic!r}")
    head = data[_PREFIX.size : _PREFIX.size + length]
    if length > _MAX_HEADER or len(head) != length or hashlib.sha256(head).digest() != checksum:
        raise SnapshotCorrupt(f"the header of {length} bytes is truncated or does not match its checksum")
    try:
        header = json.loads(head)
        if header["format"] != FORMAT_VERSION:  # before anything that another version may have otherwise
            raise SnapshotCorrupt(f"expected snapshot format {FORMAT_VERSION}, found {header['format']!r:.20}")
        digest, table = header["digest"], [(name, int(nbytes)) for name, nbytes in header["sections"].items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SnapshotCorrupt(f"the header is not readable: {error!r}") from error
    sections: dict[str, bytes] = {}
    offset = _PREFIX.size + length
    for name, nbytes in table:
        section = data[offset : offset + nbytes]
        if len(section) != nbytes:
            raise SnapshotCorrupt(f"section {name!r} of {nbytes} bytes is truncated")
        sections[name] = section
        offset += nbytes
    if offset != len(data):
        raise SnapshotCorrupt(f"expected {offset} bytes, found {len(data)}")
    if content_digest(sections) != digest:
        raise SnapshotCorrupt("the sections do not match the digest in the header")
    return header, sections


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write so that a reader, or a crash at any moment, finds the old file or the new one, never a part.

    The file's permissions are those of any file the user creates (the umask's).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
