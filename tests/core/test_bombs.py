"""Small files that would need minutes or gigabytes, and files with content that no environment can restore.

Each is refused with a typed error, or read in time and memory proportional to its size; nothing is half restored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
import struct
import time
import tracemalloc
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest
import toy_envs
from gymnasium import wrappers as w

import sandboxgym
from sandboxgym import Snapshot, SnapshotCorrupt, SnapshotError, SnapshotNotSupported, serialization
from sandboxgym.bounds import check_keys
from sandboxgym.brief import brief
from sandboxgym.errors import from_outside
from sandboxgym.randomness import capture, restored

SIZE = 2**16
PRIME = 2**61 - 1
"""Numbers that differ by it have one hash."""
EXTRA = 5 * 2**20
PER_BYTE = 64
SECONDS = 5.0
"""Processor time allowed where some hundredths are needed; without the bounds, it takes minutes, or never ends."""


def extension(code: int, content: bytes) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, content)))


def many(number: int, one: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", number) + one * number


def mapping(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return b"\xdf" + struct.pack(">I", len(pairs)) + b"".join(key + value for key, value in pairs)


def around(depth: int, wrap: Callable[[bytes], bytes], inner: bytes) -> bytes:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def large(number: int) -> bytes:
    return extension(1, (number * PRIME * 8).to_bytes(16, "big"))


def array(dtype: Any, shape: Any, data: Any, code: int = 3) -> bytes:
    return extension(code, msgpack.packb([dtype, shape, data]))


def alike(number: int) -> list[tuple[int, ...]]:
    """Different tuples of ordinary integers with one hash."""
    same = [factor * PRIME + 5 for factor in range(8)]
    return list(itertools.islice(itertools.product(same, repeat=6), number))


LARGE = b"\xdd" + struct.pack(">I", 8991) + b"".join(map(large, range(9, 9000)))


def sets_of_sets(number: int, *numbers: int, last: int = 0) -> bytes:
    """A frozen set of frozen sets, and so on: those of one level have one hash, and differ in the last member only."""

    def member(place: int) -> bytes:
        return sets_of_sets(*numbers, last=place) if numbers else large(place + 2)

    members = [member(place) for place in (*range(number - 1), number + last)]
    return extension(6, b"\xdc" + struct.pack(">H", number) + b"".join(members))


FORMAT_BOMBS: dict[str, bytes] = {
    "empty maps": many(SIZE, b"\x80"),
    "empty lists": many(SIZE, b"\x90"),
    "lists of one": many(SIZE // 2, b"\x91\x01"),
    "maps of one number": many(SIZE // 3, b"\x81\x01\x01"),
    "maps of one letter": many(SIZE // 4, b"\x81\xa1a\x01"),
    "empty tuples": many(SIZE // 3, b"\xd4\x02\x90"),
    "tuples of one": many(SIZE // 4, b"\xd5\x02\x91\x01"),
    "pairs": many(SIZE // 6, b"\xc7\x03\x02\x92\x01\x02"),
    "sets of one": many(SIZE // 4, b"\xd5\x05\x91\x01"),
    "frozen sets of one": many(SIZE // 4, b"\xd5\x06\x91\x01"),
    "NumPy scalars": many(SIZE // 14, array("|b1", [], b"\1", 4)),
    "empty arrays": many(SIZE // 14, array("|b1", [0], b"")),
    "numbers": many(SIZE, b"\x01"),
    "short texts": many(SIZE // 3, b"\xa2ab"),
    "an announced list in an announced list": around(
        900, lambda inner: b"\xdd" + struct.pack(">I", SIZE - 9000) + inner, b"\xc0" * SIZE
    ),
    "an announced map": b"\xdf\xff\xff\xff\xff" + b"\xc0" * SIZE,
    "an announced text": b"\xdb\xff\xff\xff\xff" + b"a" * 100,
    "an announced extension": b"\xc9\xff\xff\xff\xff\x02" + b"\x90" * 100,
    "an extension beyond the one around it": extension(2, b"\x91\xc9\x00\x00\xff\xff\x02\x90") + b"\x90" * 2**16,
    "tuples around much": around(31, lambda inner: extension(2, b"\x91" + inner), msgpack.packb(b"x" * SIZE * 4)),
    "sets around much": around(31, lambda inner: extension(6, b"\x91" + inner), msgpack.packb(b"x" * SIZE * 4)),
    "deep lists": b"\x91" * 1000 + b"\xc0",
    "deep maps": b"\x81\xa1a" * 1000 + b"\xc0",
    "deep lists in deep tuples": around(20, lambda inner: extension(2, b"\x91" * 400 + inner), b"\xc0"),
    "a large integer": extension(1, b"\x7f" * (SIZE + 1)),
    "an empty integer": extension(1, b""),
    "a small integer made long": extension(1, b"\0" * 1000 + b"\1"),
    "large integers as keys": mapping([(large(number), b"\xc0") for number in range(9, 9000)]),
    "large integers in a set": extension(5, LARGE),
    "large integers in a frozen set": extension(6, LARGE),
    "tuples of numbers as keys": mapping([(serialization.pack(key), b"\xc0") for key in alike(6000)]),
    "tuples of numbers in a set": extension(
        5, b"\xdd" + struct.pack(">I", 6000) + b"".join(serialization.pack(key) for key in alike(6000))
    ),
    "frozen sets as keys": mapping([(serialization.pack(frozenset({key, 1})), b"\xc0") for key in alike(3000)]),
    "frozen sets of frozen sets": sets_of_sets(16, 64, 64),
    "frozen sets of frozen sets, of few each": sets_of_sets(4, 4, 4, 4, 4, 4, 4),
    "tuples of frozen sets of frozen sets as keys": mapping(
        [(extension(2, b"\x92\x01" + sets_of_sets(48, 48, last=place)), b"\xc0") for place in range(48)]
    ),
    "NumPy floats as keys": mapping(
        [(array("<f8", [], struct.pack("<d", 2.0 ** (61 * power)), 4), b"\xc0") for power in range(-16, 16)] * 40
    ),
    "one key many times": mapping([(b"\x01", b"\xc0")] * 50_000),
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "a member twice": extension(5, b"\x92\x01\x01"),
    "a list as a key": b"\x81\x90\x01",
    "a tuple of a map": extension(2, b"\x81\x01\x01"),
    "a set of text": extension(5, msgpack.packb("ab")),
    "a time stamp": b"\xd6\xff\0\0\0\0",
    "an unknown extension": extension(99, b"\x90"),
    "a dtype of many fields": array("i4," * 50_000, [0], b""),
    "a dtype as a list": array([["a", "i4"]] * 1000, [0], b""),
    "an array of objects": array("|O", [1], b"\0" * 8),
    "a dtype in other words": array("float64", [1], b"\0" * 8),
    "text outside Unicode": array("<U1", [1], b"\xff\xff\xff\xff"),
    "text outside Unicode, the other way round": array(">U1", [1], b"\x00\x11\x00\x00"),
    "text outside Unicode in a scalar": array("<U2", [], b"a\0\0\0\0\0\x11\0", 4),
    "truth values that are none": array("|b1", [2], b"\1\2"),
    "many dimensions": array("|u1", [1] * 1000, b"x"),
    "a negative dimension": array("|u1", [-1], b"x"),
    "a large dimension": array("|u1", [2**62, 2**62], b"x"),
    "a dimension that is no number": array("|u1", [True], b"x"),
    "a scalar with a shape": array("|u1", [2], b"xy", 4),
    "an array of text for bytes": array("|u1", [1], "x"),
    "an array with more in it": extension(3, msgpack.packb(["|u1", [1], b"x", 1])),
    "text that is none": b"\xa1\xff",
    "more behind it": b"\x01\x01",
}


def measured(read: Callable[[], Any], size: int) -> None:
    """Check that reading takes no more time and memory than it may, whatever comes out."""
    tracemalloc.start()
    began = time.thread_time()
    try:
        read()
    finally:
        taken, (_, peak) = time.thread_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert taken < SECONDS
    assert peak < EXTRA + PER_BYTE * size


@pytest.mark.parametrize("name", FORMAT_BOMBS)
def test_encoded_bombs_are_refused_or_cost_what_they_weigh(name: str) -> None:
    data = FORMAT_BOMBS[name]

    def read() -> None:
        try:
            value = serialization.unpack(data)
        except SnapshotCorrupt as error:
            assert len(str(error)) < 1000
        else:
            assert isinstance(value, (list, dict))

    measured(read, len(data))


def crowded(number: int = 20_000, bits: int = 15) -> list[int]:
    """Numbers of different hashes, half of which a map of all finds a place for after thousands of others."""
    size, rng = 1 << bits, np.random.default_rng(0)
    orbit = [0]  # places in the order in which a map tries them, from the first on
    while len(orbit) < size:
        orbit.append((5 * orbit[-1] + 1) % size)
    turn = np.argsort(orbit)
    keys = orbit[: number // 2]
    taken = np.zeros(size, bool)
    taken[keys] = True
    while len(keys) < number:
        drawn = rng.integers(size, 1 << 30, 1 << 18)
        at, rest, crowd = drawn & (size - 1), drawn.copy(), np.ones(len(drawn), bool)
        while rest.any():
            crowd &= taken[at]
            rest >>= 5
            at = (5 * at + rest + 1) & (size - 1)
        crowding = drawn[crowd & (turn[at] < len(keys) // 4)]
        more = np.setdiff1d(crowding, keys)[: number - len(keys)].tolist()
        taken[orbit[len(keys) : len(keys) + len(more)]] = True
        keys += more
    return keys


def test_numbers_that_crowd_a_map_are_read_in_a_set_like_others() -> None:
    """A set tries other places. That two tuples have one hash makes the reader look for equal hashes."""
    keys = [serialization.pack(key) for key in (*crowded(), (-1,), (-2,))]
    sets = many(10, extension(5, b"\xdd" + struct.pack(">I", len(keys)) + b"".join(keys)))
    began = time.thread_time()
    serialization.unpack(sets)
    assert time.thread_time() - began < SECONDS


ACCEPTED = {"pairs", "NumPy scalars", "empty arrays", "numbers", "short texts"}
MAYBE = {"empty maps", "empty lists", "maps of one number", "empty tuples", "sets of one"}
MAYBE |= {"frozen sets of one", "tuples of one", "lists of one", "maps of one letter"}


@pytest.mark.parametrize("name", sorted(FORMAT_BOMBS.keys() - ACCEPTED - MAYBE))
def test_encodings_that_lie_are_corrupt(name: str) -> None:
    with pytest.raises(SnapshotCorrupt):
        serialization.unpack(FORMAT_BOMBS[name])


@pytest.mark.parametrize("name", sorted(MAYBE))
def test_out_of_proportion_a_larger_file_is_corrupt(name: str) -> None:
    head, one = FORMAT_BOMBS[name][:5], FORMAT_BOMBS[name][5:]
    number = struct.unpack(">I", head[1:])[0]
    with pytest.raises(SnapshotCorrupt, match="bytes of memory each"):
        serialization.unpack(b"\xdd" + struct.pack(">I", 16 * number) + one * 16)


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_what_an_honest_file_may_hold_is_read_at_any_size(name: str) -> None:
    head, one = FORMAT_BOMBS[name][:5], FORMAT_BOMBS[name][5:]
    number = struct.unpack(">I", head[1:])[0]
    assert len(serialization.unpack(b"\xdd" + struct.pack(">I", 4 * number) + one * 4)) == 4 * number


@pytest.mark.parametrize(
    "value",
    [
        [[] for _ in range(400_000)],
        2 ** (8 * 2**16),
        [[{} for _ in range(400_000)]],
        dict.fromkeys(itertools.product((-1, -2), repeat=8)),  # the hashes of these two are one
        {number * PRIME for number in range(20_000)},
        {"state": dict.fromkeys(number * PRIME for number in range(200))},
        np.array([0x110000], "u4").view("U1"),
        np.ndarray((2,), "U0"),
    ],
    ids=["lists", "an integer", "maps", "keys", "members", "more keys", "code points", "no code points"],
)
def test_what_could_not_be_read_is_not_written(value: Any) -> None:
    with pytest.raises(SnapshotNotSupported, match="cannot encode"):
        serialization.pack(value)


@pytest.mark.parametrize(
    "keys",
    [
        list(range(50_000)),
        [number << 32 for number in range(50_000)],
        [number * 0.1 for number in range(50_000)],
        [-number for number in range(50_000)],
        [(x, y) for x in range(220) for y in range(220)],
        [(x * 0.5, str(x)) for x in range(50_000)],
        [hash(str(number)) for number in range(50_000)],
        [2**number for number in range(60)],
        [f"key {number}" for number in range(50_000)],
        [frozenset({number, "a"}) for number in range(50_000)],
        [frozenset({(x, y), (-1, -2), (-2, -1)}) for x in range(-99, 99) for y in range(-99, 99)],
    ],
    ids=["numbers", "shifted", "floats", "negative", "places", "mixed", "hashes", "powers", "texts", "sets", "areas"],
)
@pytest.mark.parametrize("of_set", [False, True])
def test_keys_of_honest_maps_do_not_collide(keys: list[Any], of_set: bool) -> None:
    check_keys(keys, of_set=of_set)


# Containers.


def container(head: bytes, length: int | None = None) -> bytes:
    """A file of format 1."""
    announced = len(head) if length is None else length
    return struct.pack(">8sI32s", serialization.MAGIC_1, announced, hashlib.sha256(head).digest()) + head


def packed(head: bytes, *, honestly: bool = True) -> bytes:
    """A file of the present format; or one whose header unpacks to far more than it may."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=serialization._USUAL)
    content = deflate.compress(head + b"\n") + deflate.flush()
    if honestly:
        content = serialization._packed(head + b"\n")
    return struct.pack(">8sI32s", serialization.MAGIC, len(content), hashlib.sha256(content).digest()) + content


def headed(**fields: Any) -> bytes:
    header, sections = serialization.loads(sandboxgym.snapshot(corridor()).to_bytes())
    return serialization.dumps({**header, **fields}, sections)


def corridor() -> gym.Env[Any, Any]:
    env = gym.make("toys/Corridor-v0").unwrapped
    env.reset(seed=1)
    return env


HEADER_BOMBS: dict[str, Callable[[], bytes]] = {
    "a large one": lambda: container(b"[" + b"{}," * 500_000 + b"0]"),
    "a long list": lambda: container(b"[" + b"[]," * 300_000 + b"0]"),
    "a deep one": lambda: container(b'{"format":' + b"[" * 100_000),
    "a long number": lambda: container(b'{"format":1,"sections":{},"digest":' + b"9" * 5000 + b"}"),
    "an announced one": lambda: container(b"{}", 2**32 - 1),
    "many sections": lambda: container(
        json.dumps({"format": 1, "digest": "", "sections": {str(n): 0 for n in range(50_000)}}).encode()
    ),
    "a negative section": lambda: container(b'{"format":1,"digest":"","sections":{"a":-1}}'),
    "a section of a fraction": lambda: container(b'{"format":1,"digest":"","sections":{"a":1e400}}'),
    "a section in words": lambda: container(b'{"format":1,"digest":"","sections":{"a":"' + b"9" * 4000 + b'"}}'),
    "a large one, packed": lambda: packed(b"[" + b"{}," * 300_000 + b"0]"),
    "a deep one, packed": lambda: packed(b'{"format":' + b"[" * 100_000),
    "many sections, packed": lambda: packed(
        json.dumps({"format": 2, "sections": {str(n): 0 for n in range(50_000)}}).encode()
    ),
    "a negative section, packed": lambda: packed(b'{"format":2,"sections":{"a":-1}}'),
    "one that unpacks to a hundred megabytes": lambda: packed(b" " * 10**8, honestly=False),
    "a deep configuration": lambda: headed(config=json.loads('{"a":' * 900 + "0" + "}" * 900)),
    "a configuration that is none": lambda: headed(config=[1]),
    "a list for an id": lambda: headed(id=json.loads("[" * 800 + "]" * 800)),
    "a long id": lambda: headed(id="x" * 500_000),
    "a parent that is none": lambda: headed(parent=3),
    "a version in words": lambda: headed(state_version="1"),
}


@pytest.mark.parametrize("name", HEADER_BOMBS)
def test_headers_that_are_bombs_are_refused(name: str) -> None:
    data = HEADER_BOMBS[name]()
    env = corridor()
    before = sandboxgym.snapshot(env).digest

    def read() -> None:
        with pytest.raises(SnapshotError) as refusal:
            sandboxgym.restore(env, Snapshot.from_bytes(data))
        assert len(str(refusal.value)) < 2000

    measured(read, len(data))
    assert sandboxgym.snapshot(env).digest == before


# Random streams.

STREAM = capture(np.random.default_rng(1))
assert STREAM is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy": 2**4097},
        {"entropy": 2 ** (8 * 60_000)},
        {"entropy": [2**32 - 1] * 200_000},
        {"entropy": [2**4000] * 3},
        {"entropy": -1},
        {"entropy": "seed"},
        {"entropy": [[1, [2]]] * 100},
        {"spawn_key": [1] * 129},
        {"spawn_key": [2 ** (8 * 60_000)]},
        {"spawn_key": 5},
        {"pool_size": 2**20},
        {"pool_size": -4},
        {"pool_size": "4"},
        {"n_children_spawned": 2**70},
    ],
    ids=lambda changes: f"{next(iter(changes))} {brief(next(iter(changes.values())), 30)}",
)
def test_seed_sequences_that_take_minutes_are_corrupt(changes: dict[str, Any]) -> None:
    state = {**STREAM, "seed_sequence": {**STREAM["seed_sequence"], **changes}}

    def read() -> None:
        with pytest.raises(SnapshotCorrupt):
            restored(state, np.random.default_rng(2))

    measured(read, 2**20)


def test_a_seed_sequence_that_could_not_be_restored_is_not_captured() -> None:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(2**4097)))
    with pytest.raises(SnapshotNotSupported, match="128 words"):
        capture(generator)
    words = np.random.Generator(np.random.PCG64(np.random.SeedSequence(2**4096 - 1, spawn_key=(3, 2**64))))
    again = restored(serialization.unpack(serialization.pack(capture(words))), None)
    assert again is not None and again.integers(2**60) == words.integers(2**60)


# Sections of a snapshot.


def with_section(data: bytes, name: str, content: bytes) -> bytes:
    header, sections = serialization.loads(data)
    return serialization.dumps(header, {**sections, name: content})


@pytest.mark.parametrize("section", ["state", "rng", "transition", "layers"])
@pytest.mark.parametrize("name", ["deep lists in deep tuples", "large integers as keys", "text outside Unicode"])
def test_a_bomb_in_any_section_is_refused_and_changes_nothing(section: str, name: str) -> None:
    env = corridor()
    before = sandboxgym.snapshot(env)
    with pytest.raises(SnapshotCorrupt):
        sandboxgym.restore(env, Snapshot.from_bytes(with_section(before.to_bytes(), section, FORMAT_BOMBS[name])))
    assert sandboxgym.snapshot(env).digest == before.digest


@pytest.mark.parametrize(
    "reward",
    [2**5000, np.zeros(3), np.array("x"), "1", None, [1]],
    ids=["huge", "array", "text", "str", "None", "list"],
)
def test_rewards_that_are_no_numbers_are_corrupt(reward: Any) -> None:
    env = gym.make("toys/Corridor-v0").unwrapped
    env.reset(seed=1)
    data = sandboxgym.snapshot(env).to_bytes()
    transition = serialization.unpack(serialization.loads(data)[1]["transition"])
    if transition is None:
        pytest.skip("this environment recomputes its transition")
    transition[1] = reward
    with pytest.raises(SnapshotCorrupt):
        sandboxgym.restore(env, Snapshot.from_bytes(with_section(data, "transition", serialization.pack(transition))))


# States of wrappers.

JUNK: list[Any] = [
    None,
    True,
    -1,
    2**40,
    2**200,
    1.5,
    float("nan"),
    "x",
    b"x",
    [],
    [None],
    ["x", 1],
    {},
    {"mean": 0},
    (),
    np.zeros(3),
    np.array("x"),
    np.array(["a", "b"]),
    np.float32("inf"),
    np.zeros((0, 2), "M8[s]"),
    [np.zeros(2, np.float32), "x"],
    [1.0, 1.0, 2**200],
    [0.0, 0.0, -1.0],
]

WRAPPED: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "TimeLimit": lambda: gym.make("toys/Corridor-v0", max_episode_steps=30),
    "OrderEnforcing": lambda: w.OrderEnforcing(bare()),
    "PassiveEnvChecker": lambda: w.PassiveEnvChecker(bare()),
    "Autoreset": lambda: w.Autoreset(bare()),
    "RecordEpisodeStatistics": lambda: w.RecordEpisodeStatistics(bare()),
    "FrameStackObservation": lambda: w.FrameStackObservation(drift(), 3),
    "FrameStackObservation, reset": lambda: w.FrameStackObservation(drift(), 3, padding_type="reset"),
    "DelayObservation": lambda: w.DelayObservation(drift(), 2),
    "Delay below Normalize": lambda: w.NormalizeObservation(w.DelayObservation(drift(), 2)),
    "TimeAwareObservation": lambda: w.TimeAwareObservation(gym.make("toys/Drift-v0", max_episode_steps=30)),
    "NormalizeObservation": lambda: w.NormalizeObservation(drift()),
    "NormalizeReward": lambda: w.NormalizeReward(drift()),
    "StickyAction": lambda: w.StickyAction(drift(), 0.5, (1, 3)),
    "MaxAndSkipObservation": lambda: w.MaxAndSkipObservation(drift(), 2),
}


def bare() -> gym.Env[Any, Any]:
    return gym.make("toys/Corridor-v0").unwrapped


def drift() -> gym.Env[Any, Any]:
    return gym.make("toys/Drift-v0").unwrapped


def places(layers: list[Any]) -> Iterator[tuple[int, str | None]]:
    """Places to damage: number of a layer, and name of an attribute in it; None is the whole state."""
    for number, (_, _, state) in enumerate(layers):
        yield number, None
        for attribute in state[0]:
            yield number, attribute


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRAPPED)
def test_after_a_wrappers_state_is_accepted_the_next_steps_work(name: str) -> None:
    env = WRAPPED[name]()
    env.reset(seed=3)
    for _ in range(3):
        env.step(1)
    good = sandboxgym.snapshot(env)
    data = good.to_bytes()
    layers = serialization.unpack(serialization.loads(data)[1]["layers"])
    refused = 0
    for number, attribute in places(layers):
        for junk in JUNK:
            changed = serialization.unpack(serialization.pack(layers))
            if attribute is None:
                changed[number][2] = junk
            else:
                changed[number][2][0][attribute] = junk
            try:
                sandboxgym.restore(env, Snapshot.from_bytes(with_section(data, "layers", serialization.pack(changed))))
            except SnapshotError:
                refused += 1
                if name != "RecordEpisodeStatistics":  # it measures times
                    assert sandboxgym.snapshot(env).digest == good.digest
            else:
                try:
                    for _ in range(3):
                        env.step(1)
                    env.reset(seed=3)
                except gym.error.ResetNeeded:
                    assert attribute == "_has_reset"
            sandboxgym.restore(env, good)
    assert refused > len(JUNK) // 2


# What does not come from the file.


class Told(Exception):
    """Exception of a user's alarm: an ordinary one, as many libraries raise."""


def late(*_: object) -> None:
    raise Told("time is over")


class Later:
    def __call__(self, number: int, frame: object) -> None:
        late()

    def method(self, number: int, frame: object) -> None:
        late()


class Cancelled(BaseException):
    pass


class Slow(toy_envs.Corridor):
    """Something happens while a state is applied, and once it was."""

    during: Callable[[], None] | None = None
    decoding: Callable[[], None] | None = None

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        what, self.during = self.during, None
        if what is not None:
            what()

    @classmethod
    def _decode(cls, data: bytes) -> Any:
        what, cls.decoding = cls.decoding, None
        if what is not None:
            what()
        return super()._decode(data)


def thrown(error: BaseException) -> Callable[[], None]:
    def throw() -> None:
        raise error

    return throw


@pytest.fixture
def slow() -> Iterator[tuple[Slow, Snapshot]]:
    env = Slow()
    env.reset(seed=1)
    other = Slow()
    other.reset(seed=2)
    other.step(1)
    yield env, Snapshot.from_bytes(sandboxgym.snapshot(other).to_bytes())
    Slow.decoding = None


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        Cancelled(),
        GeneratorExit(),
        MemoryError(),
        TimeoutError(),
        OSError(28, "full"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["during", "decoding"])
def test_what_does_not_come_from_the_file_passes_and_rolls_back(
    slow: tuple[Slow, Snapshot], error: BaseException, where: str
) -> None:
    env, snap = slow
    before = sandboxgym.snapshot(env).digest
    if where == "during":
        env.during = thrown(error)
    else:
        Slow.decoding = staticmethod(thrown(error))
    with pytest.raises(type(error)) as raised:
        sandboxgym.restore(env, snap)
    assert raised.value is error
    assert sandboxgym.snapshot(env).digest == before


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="this system has no alarms")
@pytest.mark.parametrize("handler", [late, Later(), Later().method], ids=["function", "object", "method"])
@pytest.mark.parametrize("where", ["during", "decoding"])
def test_an_alarm_reaches_whoever_set_it_whatever_it_raises(
    slow: tuple[Slow, Snapshot], handler: Any, where: str
) -> None:
    env, snap = slow
    before = sandboxgym.snapshot(env).digest
    what = types.FunctionType((lambda: signal.raise_signal(signal.SIGALRM)).__code__, {"signal": signal})
    if where == "during":
        env.during = what
    else:
        Slow.decoding = staticmethod(what)
    old = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Told):
            sandboxgym.restore(env, snap)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert sandboxgym.snapshot(env).digest == before


def test_other_errors_of_a_decoder_are_of_the_content(slow: tuple[Slow, Snapshot]) -> None:
    env, snap = slow
    for error in (Told(), ValueError(), RecursionError(), OSError(2, "no such file"), SystemError()):
        env.during = thrown(error)
        with pytest.raises(SnapshotCorrupt):
            sandboxgym.restore(env, snap)
        assert not from_outside(error)


# Messages.


class Nasty:
    def __repr__(self) -> str:
        raise SystemExit("never asked")


def test_descriptions_are_short_and_never_fail() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with_text = np.frombuffer(b"\xff\xff\xff\xff", "<U1")
    error = KeyError(2**100_000, deep)
    for value in (2**1_000_000, deep, with_text, Nasty(), [Nasty()], error, "x" * 10**6, {1: deep}):
        assert len(brief(value)) <= 200
    assert brief([1, "a", None, (2.5,)]) == "[1, 'a', None, (2.5,)]"
    assert brief(ValueError("no")) == "ValueError('no')"
    assert (brief(set()), brief(()), brief({}), brief(frozenset())) == ("set()", "()", "{}", "frozenset()")
    while deep:  # else its deallocation is what recurses
        deep = deep[0]
