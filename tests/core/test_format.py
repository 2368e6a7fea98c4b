"""The durable format: plain data is restored exactly, anything else is refused, hostile bytes do nothing."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import hashlib
import json
import os
import struct
import sys
import zlib

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from sandboxgym import SnapshotCorrupt, SnapshotNotSupported, serialization

ARRAYS = hnp.arrays(
    hnp.scalar_dtypes().filter(lambda dtype: dtype.itemsize),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary())
HASHABLE = st.deferred(lambda: st.one_of(KEYS, st.tuples(HASHABLE, KEYS), st.frozensets(KEYS, max_size=3)))
LEAVES = st.one_of(HASHABLE, st.floats(), ARRAYS, st.sets(HASHABLE, max_size=3))
PLAIN = st.deferred(
    lambda: st.one_of(
        LEAVES,
        st.lists(PLAIN, max_size=3),
        st.dictionaries(HASHABLE, PLAIN, max_size=3),
        st.tuples(PLAIN, LEAVES),
    )
)


def typed(value):
    """Values with their types, comparable: NaN equals NaN, and 1, 1.0 and True differ."""
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value), value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return (dict, [(typed(key), typed(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [typed(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(repr(typed(item)) for item in value))
    return (type(value), repr(value))


@given(PLAIN)
@settings(deadline=None, max_examples=100)
def test_plain_data_comes_back_with_its_types(value):
    assert typed(serialization.unpack(serialization.pack(value))) == typed(value)


@pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1, 10**100, -(10**100)])
def test_integers_of_any_size(value):
    assert serialization.unpack(serialization.pack([value, {value: value}])) == [value, {value: value}]


LAID_OUT = [
    np.asfortranarray(np.random.default_rng(0).normal(size=(50, 70)).astype(np.float32)),
    np.moveaxis(np.random.default_rng(1).normal(size=(5, 6, 7)), 0, 1),
    np.zeros((3, 2, 4), bool).T,
    np.array([["a", "é"], ["", "c"]]).T,
    np.arange(24).reshape(4, 6)[::2, ::-3].T,
]


@pytest.mark.parametrize("array", LAID_OUT, ids=["fortran", "moved axis", "truth values", "texts", "strided"])
def test_arrays_keep_the_order_of_their_axes_in_memory(array):
    """The order in which floats are added up depends on it, and a deep copy keeps it."""
    back, copy = serialization.unpack(serialization.pack(array)), array.copy(order="K")
    np.testing.assert_array_equal(back, array)
    assert (back.strides, back.flags.writeable, back.dtype) == (copy.strides, True, copy.dtype)
    if array.dtype.kind == "f":
        assert back.sum() == array.sum()
    assert serialization.pack(back) == serialization.pack(array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.arange(6)[::2],
        np.zeros((0, 3)),
        np.array(7, ">i4"),
        np.array(["", "é"]),
        np.array(["2020-01-01", "NaT"], "M8[s]"),
    ],
    ids=["transposed", "strided", "empty", "big endian", "text", "dates"],
)
def test_arrays_of_every_layout_come_back_writable(array):
    back = serialization.unpack(serialization.pack(array))
    np.testing.assert_array_equal(back, array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.flags.writeable


def test_truth_values_that_nobody_wrote_come_back_as_numpy_takes_them():
    unwritten = np.array([0, 1, 2, 255], "u1").view("?")
    back = serialization.unpack(serialization.pack([unwritten, unwritten[2], unwritten[::-2]]))
    assert [value.tolist() for value in back] == [[False, True, True, True], True, [True, True]]
    assert serialization.pack(unwritten) == serialization.pack(np.array([False, True, True, True]))


@pytest.mark.parametrize("kind", ["g", "G", np.dtype("g").newbyteorder(), np.dtype("G").newbyteorder()], ids=str)
def test_equal_long_numbers_have_one_encoding(kind):
    """Some of their bytes are padding, which holds what was in that memory before."""
    if np.finfo(np.longdouble).nmant != 63:
        pytest.skip("long numbers have no padding on this machine")
    one = np.array([1, -2, 3], kind)
    dirty = one.copy()
    numbers = dirty.view("u1").reshape(-1, np.dtype("g").itemsize)
    (numbers[:, 10:] if one.dtype.isnative else numbers[:, :-10])[:] = 0xAB
    for value, other in ((one, dirty), (one[1], dirty[1])):
        assert serialization.pack(value) == serialization.pack(other)
        assert np.array_equal(serialization.unpack(serialization.pack(other)), value)


def test_sets_encode_equally_whatever_their_order():
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)  # 0 and 8 collide in a small table
    assert serialization.pack(one) == serialization.pack(other)


class Colour(enum.IntEnum):
    RED = 1


class Level(np.int64):
    pass


Point = collections.namedtuple("Point", "x y")
CIRCULAR: list = []
CIRCULAR.append((CIRCULAR,))


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        np.array([object()]),
        np.zeros(2, "i4,f4"),
        np.ma.masked_array([1, 2], [0, 1]),
        Colour.RED,
        Point(1, 2),
        collections.OrderedDict(a=1),
        collections.defaultdict(int),
        bytearray(b"x"),
        memoryview(b"x"),
        msgpack.ExtType(2, b""),
        msgpack.Timestamp(1),
        datetime.datetime(2020, 1, 1),
        1j,
        "\udc80",
        CIRCULAR,
        memoryview(b"abcd")[::2],
        Level(1),
        np.str_("a\0"),  # NumPy takes zeros at the end for padding
        np.bytes_(b"a\0"),
        np.str_("\0"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("inside", [lambda v: v, lambda v: [v], lambda v: {"a": (v,)}], ids=["alone", "list", "tuple"])
def test_what_would_not_come_back_as_it_was_is_refused(value, inside):
    with pytest.raises(SnapshotNotSupported, match="cannot encode"):
        serialization.pack(inside(value))


def nested(depth, wrap):
    value = None
    for _ in range(depth):
        value = wrap(value)
    return value


def test_nesting_is_kept_up_to_a_limit_and_refused_beyond():
    value = nested(32, lambda inner: (inner,))
    assert serialization.unpack(serialization.pack(value)) == value
    with pytest.raises(SnapshotNotSupported, match="nested"):
        serialization.pack((value,))
    lists = nested(400, lambda inner: [inner])
    assert serialization.unpack(serialization.pack(lists)) == lists


@pytest.mark.parametrize("seed", range(8))
def test_what_is_encoded_can_be_decoded_however_deep_and_small_it_is(seed):
    """Encodings up to a length are written without a look at the bounds, which all that is read has to keep."""
    rng = np.random.default_rng(seed)
    wraps = [lambda inner: [inner], lambda inner: {"": inner}, lambda inner: (inner,), lambda inner: [[], {}, inner]]
    few = [0.6, 0.3, 0.02, 0.08] if seed % 2 else [0.97, 0.01, 0.01, 0.01]
    value, refused, least = None, 0, 0
    for levels in range(1, 600):
        value = wraps[rng.choice(4, p=few)](value)
        if levels % 7:
            continue
        try:
            packed = serialization.pack(value)
        except SnapshotNotSupported:
            refused += 1
            continue
        assert not refused, "a deeper one is refused as well"
        assert serialization.unpack(packed) == value
        least = levels
    assert refused and least > 100


def hostile_arrays():
    for content in (
        ["O", [1], b"\0" * 8],
        ["i4,O", [1], b"\0" * 12],
        [[["f", "O"]], [1], b"\0" * 8],
        ["V8", [1], b"\0" * 8],
        ["<i8", [2**62, 2**62], b"\0" * 8],
        ["<i8", [3], b"\0" * 8],
        ["no such type", [1], b"\0"],
        ["<i8", "ab", b"\0" * 8],
        ["<i8", [1]],
        *(
            ["<i8", [1, 2], b"\0" * 16, axes]
            for axes in ([0, 1], [1], [1, 1], [0, 2], [1, -1], [1.0, 0], [True, 0], "10")
        ),
        ["<i8", [1, 2], b"\0" * 16, [1, 0], 1],
        {"dtype": "<i8"},
        7,
    ):
        yield msgpack.packb(msgpack.ExtType(3, msgpack.packb(content)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91",
        b"\xdd\xff\xff\xff\xff",
        b"\xc7\xff\x02",
        b"\x81\x90\x90",  # a list as a key
        nested(2000, lambda inner: b"\x91" + (inner or b"\xc0")),
        nested(900, lambda inner: msgpack.packb(msgpack.ExtType(2, b"\x91" + (inner or b"\xc0")))),
        msgpack.packb(msgpack.ExtType(77, b"")),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb([[1]]))),
        *hostile_arrays(),
    ],
    ids=repr,
)
def test_hostile_bytes_are_corrupt(data):
    with pytest.raises(SnapshotCorrupt):
        serialization.unpack(data)


def unpacks_or_is_corrupt(data):
    modules = set(sys.modules)
    with contextlib.suppress(SnapshotCorrupt):
        serialization.unpack(data)
    assert set(sys.modules) == modules


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_random_bytes_unpack_or_are_corrupt(data):
    unpacks_or_is_corrupt(data)


@given(PLAIN, st.data())
@settings(deadline=None, max_examples=100)
def test_mutated_encodings_unpack_or_are_corrupt(value, data):
    encoded = bytearray(serialization.pack(value))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    unpacks_or_is_corrupt(bytes(encoded))


def test_a_pickle_is_not_run():
    import pickle

    ran = []

    class Bomb:
        def __reduce__(self):
            return (ran.append, (1,))

    bomb = pickle.dumps(Bomb())
    for data in (bomb, serialization.MAGIC + bomb * 10):
        for read in (serialization.unpack, serialization.loads):
            with pytest.raises(SnapshotCorrupt):
                read(data)
    assert ran == []


SECTIONS = {"one": b"1" * 10, "none": b"", "two": b"22"}


def test_header_and_sections_come_back():
    header, sections = serialization.loads(serialization.dumps({"a": [1, None, "é"]}, SECTIONS))
    assert (header["a"], sections) == ([1, None, "é"], SECTIONS)


def of_format_1(header, sections=b""):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">8sI32s", serialization.MAGIC_1, len(head), hashlib.sha256(head).digest()) + head + sections


def sealed(packed, large=b"", magic=serialization.MAGIC):
    return struct.pack(">8sI32s", magic, len(packed), hashlib.sha256(packed + large).digest()) + packed + large


def of_format_2(header, sections=b""):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return sealed(serialization._packed(head + b"\n" + sections))


def squeezed(plain):
    """Packed without the bound that the writer keeps."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=serialization._USUAL)
    return deflate.compress(plain) + deflate.flush()


NOTHING = serialization.content_digest({})
FORMAT = "the format of the container"
DICTIONARY = "1ef5d5b3caf672fb78d731427f85bedcf0ab13343a31a61b8b3484083c80f8f0"


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 10_000,
        [],
        3,
        {},
        {"format": 99, "sections": {}, "digest": NOTHING},
        {"format": FORMAT, "sections": 3, "digest": NOTHING},
        {"format": FORMAT, "sections": ["x"], "digest": NOTHING},
        {"format": FORMAT, "sections": {"x": -1}, "digest": NOTHING},
        {"format": FORMAT, "sections": {"x": "many"}, "digest": NOTHING},
        {"format": FORMAT, "sections": {"x": []}, "digest": NOTHING},
        {"format": FORMAT, "sections": {"x": float("inf")}, "digest": NOTHING},
        {"format": FORMAT, "sections": {"x": 10**30}, "digest": NOTHING},
        {"format": FORMAT, "sections": {"x": 1}, "digest": NOTHING},
    ],
    ids=lambda header: repr(header)[:60],
)
@pytest.mark.parametrize(("version", "container"), [(1, of_format_1), (2, of_format_2)])
def test_a_header_that_lies_is_corrupt(header, version, container):
    if isinstance(header, dict) and header.get("format") == FORMAT:
        header = {**header, "format": version}
    with pytest.raises(SnapshotCorrupt):
        serialization.loads(container(header))


@pytest.mark.parametrize("header", [{"format": 1, "sections": {}}, {"format": 1, "sections": {}, "digest": None}])
def test_a_header_of_format_1_without_a_digest_is_corrupt(header):
    with pytest.raises(SnapshotCorrupt, match="digest"):
        serialization.loads(of_format_1(header))


def test_another_version_is_named():
    for container, version in ((of_format_1, 1), (of_format_2, 2)):
        with pytest.raises(SnapshotCorrupt, match=f"expected snapshot format {version}, found 99"):
            serialization.loads(container({"format": 99}))
    with pytest.raises(SnapshotCorrupt, match="expected snapshot format 2 or 1, found 7"):
        serialization.loads(sealed(b"", magic=b"SBXGYM\0\7"))


def test_format_1_is_read():
    header = {"format": 1, "a": 3, "sections": {name: len(content) for name, content in SECTIONS.items()}}
    header["digest"] = serialization.content_digest(SECTIONS)
    data = of_format_1(header, b"".join(SECTIONS.values()))
    assert serialization.loads(data) == (header, SECTIONS)
    again, sections = serialization.loads(serialization.dumps(header, SECTIONS))
    assert (again["format"], again["a"], sections) == (2, 3, SECTIONS)


def test_the_dictionary_of_format_2_never_changes():
    """Files were packed with it: another one is another format."""
    assert hashlib.sha256(serialization._USUAL).hexdigest() == DICTIONARY


@pytest.mark.parametrize("sizes", [(0, 1, 4096), (4097, 4096, 5000, 0), (70_000, 10), ()])
def test_small_and_large_sections_come_back_in_their_order(sizes):
    sections = {f"s{number}": os.urandom(size) for number, size in enumerate(sizes)}
    data = serialization.dumps({"a": 1}, sections)
    found = serialization.loads(data)[1]
    assert (found, list(found)) == (sections, list(sections))
    for length in range(0, len(data), max(1, len(data) // 50)):
        with pytest.raises(SnapshotCorrupt):
            serialization.loads(data[:length])
        changed = bytearray(data)
        changed[length] ^= 1
        with pytest.raises(SnapshotCorrupt):
            serialization.loads(bytes(changed))


def test_a_header_that_packs_too_well_comes_back_too():
    header = {"config": {"text": "a" * 900_000}}
    assert serialization.loads(serialization.dumps(header, SECTIONS))[0]["config"] == header["config"]


@pytest.mark.parametrize(
    "data",
    [
        sealed(b""),
        sealed(b"other bytes"),
        sealed(serialization._packed(b"{}\n")[:-1]),
        sealed(serialization._packed(b"{}\n") + b"more"),
        sealed(serialization._packed(b'{"format":2,"sections":{}}')),
        sealed(serialization._packed(b'{"format":2,"sections":{}}\n'), b"more"),
        sealed(serialization._packed(b'{"format":2,"sections":{}}\nmore')),
        sealed(serialization._packed(b'{"format":2,"sections":{"x":5000}}\n'), b"1" * 4999),
        sealed(zlib.compress(b'{"format":2,"sections":{}}\n')),
        sealed(squeezed(b'{"format":2,"sections":{},"a":"' + b"a" * 2**20 + b'"}\n')),
    ],
    ids=lambda data: repr(data[44:])[:30],
)
def test_packed_bytes_that_lie_are_corrupt(data):
    with pytest.raises(SnapshotCorrupt):
        serialization.loads(data)


def test_the_digest_depends_on_names_and_contents_alone():
    digest = serialization.content_digest(SECTIONS)
    assert serialization.content_digest(dict(reversed(SECTIONS.items()))) == digest
    for changed in ({**SECTIONS, "none": b"x"}, {"one": b"1" * 10, "two": b"22"}, {"o": b"ne" + b"1" * 10}):
        assert serialization.content_digest(changed) != digest
