"""Random streams as plain data: capture, exact restore, and independent streams for siblings.

A stream is a NumPy `Generator`; its state includes the seed sequence, so that a later ``spawn`` is exact too.

What was captured of streams or put into them last is `KnownStreams`. Streams that nobody used in between have that very
object as their content again, so that snapshots share it, and no seed sequence is read or checked a second time.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt, SnapshotNotSupported, from_outside
from sandboxgym.spaces import Unicode

_BIT_GENERATORS = {name: getattr(np.random, name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")}
_NAMES = {kind: name for name, kind in _BIT_GENERATORS.items()}

_WORDS = 128
"""Words of a seed sequence's entropy, and of its spawn key."""

_LEAVES = frozenset(
    {gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiBinary, gym.spaces.MultiDiscrete, gym.spaces.Text, Unicode}
)  # without spaces inside

State = dict[str, Any]
"""Captured state of a stream; never mutated, for snapshots share it."""
Content = dict[str, Any]
"""Captured state of an environment's streams: ``np_random``, ``np_random_seed``, ``spaces``; never mutated either.

Streams that are one and the same have the very same state; others never do.
"""
Space = gym.Space[Any]


def sibling_seed(seed: int, index: int) -> int:
    """Seed of one sibling: ``fork(k, seed=S)[i]`` equals ``restore(snap, seed=sibling_seed(S, i))``."""
    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])


def seeded(seed: int) -> tuple[np.random.Generator, int]:
    """A new stream, and its seed, as Gymnasium makes them.

    Raises:
        gymnasium.error.Error: not a seed, or one so long that the stream could not be captured.
    """
    if isinstance(seed, int) and seed.bit_length() > 32 * _WORDS:
        raise gym.error.Error(f"expected a seed of at most {32 * _WORDS} bits, found one of {seed.bit_length()}")
    return seeding.np_random(seed)


class _Known:
    """A stream with the state that was captured of it, or put into it, last.

    Only of streams that can be compared quickly: of the other kinds of bit generators the states hold arrays. Of a seed
    sequence with a number as its entropy, nothing changes but the number of its children.
    """

    __slots__ = ("_bits", "_children", "_sequence", "_space", "generator", "state")

    def __init__(self, generator: np.random.Generator, state: State, space: Space | None = None) -> None:
        self.generator = generator
        self.state = state
        self._space = space if isinstance(space, Unicode) else None
        self._bits = generator.bit_generator
        self._sequence: Any = self._bits.seed_seq
        self._children: int = state["seed_sequence"]["n_children_spawned"]

    def captured(self) -> State:
        """State of the stream now: the known one again if it was not used."""
        space = self._space
        if space is not None and space.unseen is self.generator:
            return self.state
        if self._sequence.n_children_spawned != self._children:
            self.state = _captured(self._bits)
            self._children = self.state["seed_sequence"]["n_children_spawned"]
            return self.state
        now, known = self._bits.state, self.state
        if now != known["state"]:
            self.state = {"bit_generator": "PCG64", "state": now, "seed_sequence": known["seed_sequence"]}
        return self.state

    def put(self, state: State | None) -> bool:
        """Set the stream to a state of its very sequence, which was captured of it or checked when it was put in.

        Returns:
            False for any other state; nothing is set then.
        """
        space, known = self._space, self.state
        if state is known and space is not None and space.unseen is self.generator:
            return True
        if state is None or state["seed_sequence"] is not known["seed_sequence"]:
            return False
        if self._sequence.n_children_spawned != self._children:
            return False
        self._bits.state = state["state"]
        self.state = state
        return True


class KnownStreams:
    """The streams of an environment with the content that was captured of them, or put into them, last."""

    __slots__ = ("_content", "_generators", "_states", "_streams")

    def __init__(self, streams: Sequence[_Known], content: Content) -> None:
        self._streams = streams
        self._generators = [stream.generator for stream in streams]
        self._states = [stream.state for stream in streams]
        self._content = content

    def are_of(self, generator: np.random.Generator | None, spaces: Sequence[Space]) -> bool:
        """Tell whether they are this stream and those of these spaces."""
        return self._generators == [generator, *[space._np_random for space in spaces]]

    def are_at(self, content: Content) -> bool:
        """Tell whether a content is what was captured of them, or put into them, last."""
        return self._content is content

    def captured(self, seed: int | None) -> Content:
        """Content of the streams now: the known one again if none was used and the seed is the same."""
        states = [stream.captured() for stream in self._streams]
        if states != self._states or seed != self._content["np_random_seed"]:
            self._content = {"np_random": states[0], "np_random_seed": seed, "spaces": states[1:]}
            self._states = states  # last: whatever comes between, these streams count as used
        return self._content

    def put(self, content: Content) -> bool:
        """Set the streams to a content; False at the first that does not take its state, with those before it set."""
        states = [content["np_random"], *content["spaces"]]
        if not all(map(_Known.put, self._streams, states)):
            return False
        self._content, self._states = content, states
        return True


def known(generator: np.random.Generator | None, spaces: Sequence[Space], content: Content) -> KnownStreams | None:
    """Make `KnownStreams` of a stream and those of spaces, of which this is the content.

    Returns:
        None if there is one that has to be captured anew each time, or that belongs to two of them.
    """
    found = []
    owners = [(generator, None), *[(space._np_random, space) for space in spaces]]
    if len({id(stream) for stream, _ in owners}) < len(owners):
        return None
    for (stream, space), state in zip(owners, [content["np_random"], *content["spaces"]], strict=True):
        if stream is None or state is None or type(stream.bit_generator) is not np.random.PCG64:
            return None
        if state["seed_sequence"] is None or type(state["seed_sequence"]["entropy"]) is not int:
            return None
        found.append(_Known(stream, state, space))
    return KnownStreams(found, content)


def capture(generator: np.random.Generator | None) -> State | None:
    """Complete state of a random stream, or None for a stream not made yet."""
    return None if generator is None else _captured(generator.bit_generator)


def capture_all(generators: Sequence[np.random.Generator | None]) -> list[State | None]:
    """Complete states of random streams: the very same one of streams that are."""
    found = {id(generator): capture(generator) for generator in generators}
    return [found[id(generator)] for generator in generators]


def _captured(bits: Any) -> State:
    name = _NAMES.get(type(bits))
    if name is None:
        raise SnapshotNotSupported(f"expected a NumPy bit generator ({', '.join(_BIT_GENERATORS)}), found {type(bits)}")
    sequence = _sequence(bits)
    try:
        _check_sequence(sequence)
    except (TypeError, ValueError) as error:
        raise SnapshotNotSupported(f"cannot capture a random stream: {error}") from error
    return {"bit_generator": name, "state": bits.state, "seed_sequence": sequence}


def restored(state: State | None, current: np.random.Generator | None) -> np.random.Generator | None:
    """A stream in ``state``: ``current`` is set in place where possible, so that other references to it follow."""
    if state is None:
        return None
    try:
        kind, sequence = _BIT_GENERATORS[state["bit_generator"]], state["seed_sequence"]
        _check_position(state["state"])
        _check_sequence(sequence)
        bits = None if current is None else current.bit_generator
        if current is None or type(bits) is not kind or _sequence(bits) != sequence:
            seeds = np.random.SeedSequence(**{**sequence, "spawn_key": tuple(sequence["spawn_key"])}) if sequence else 0
            current = np.random.Generator(kind(seeds))
        current.bit_generator.state = state["state"]
    except Exception as error:  # NumPy raises many types on content that lies
        if from_outside(error):
            raise
        raise SnapshotCorrupt(f"not the state of a random stream: {brief(error)}") from error
    return current


def _check_sequence(sequence: State | None) -> None:
    """Refuse a long seed sequence, for NumPy takes time quadratic in its words, those of its pool included."""
    if sequence is None:
        return
    if not 4 <= sequence["pool_size"] <= 256:
        raise ValueError(f"expected a pool of 4 to 256 words, found {brief(sequence['pool_size'])}")
    entropy, key = sequence["entropy"], sequence["spawn_key"]
    if not isinstance(key, (list, tuple)) or (_words(entropy) > _WORDS or _words(key) > _WORDS):
        raise ValueError(f"expected entropy and a spawn key of at most {_WORDS} words, found {brief(entropy)}")


def _words(value: Any) -> int:
    """Number of 32-bit words in an integer or in a sequence of integers."""
    if value is None:
        return 0
    if isinstance(value, (list, tuple)):
        return len(value) if len(value) > _WORDS else sum(map(_words, value))
    if not isinstance(value, (int, np.integer)) or value < 0:
        raise TypeError(f"expected integers from 0 in a seed sequence, found {brief(value)}")
    return max(1, -(-int(value).bit_length() // 32))


def _check_position(state: State) -> None:
    """Refuse a position outside the buffer of draws: NumPy trusts it and would read memory out of bounds."""
    if state["bit_generator"] == "MT19937":
        position, size = state["state"]["pos"], 624
    elif state["bit_generator"] == "Philox":
        position, size = state["buffer_pos"], 4
    else:
        return
    if not 0 <= position <= size:
        raise ValueError(f"expected a position from 0 to {size}, found {position}")


def _sequence(bits: Any) -> dict[str, Any] | None:
    sequence = bits.seed_seq
    if not isinstance(sequence, np.random.SeedSequence):
        return None
    state = dict(sequence.state)
    if isinstance(state["entropy"], np.ndarray):  # does not compare with ==
        state["entropy"] = state["entropy"].tolist()
    return state


def compact(streams: dict[str, Any]) -> list[Any]:
    """Streams of an environment in few bytes, once they are encoded: equal ones in equal form.

    Of a usual stream only its 40 bytes and the entropy of its seed sequence, and of one that nobody used not even those
    bytes. One that came before is its number, from 0, which is that of ``np_random``. Any other is as it was captured.
    """
    states = [streams["np_random"], *streams["spaces"]]
    first = {id(state): number for number, state in reversed(list(enumerate(states))) if state is not None}
    own, *spaces = [
        _compact(state) if first.get(id(state), number) == number else first[id(state)]
        for number, state in enumerate(states)
    ]
    return [own, streams["np_random_seed"], spaces]


def expanded(streams: Any) -> dict[str, Any]:
    """The streams of which `compact` made this.

    Raises:
        SnapshotCorrupt: it made nothing like this.
    """
    if isinstance(streams, dict):  # as in files of format 1
        found = streams
    else:
        try:
            own, seed, spaces = streams
            states: list[Any] = []
            for state in (own, *spaces):
                states.append(states[state] if type(state) is int and state >= 0 else _expanded(state))
            found = {"np_random": states[0], "np_random_seed": seed, "spaces": states[1:]}
        except (TypeError, ValueError, IndexError) as error:
            raise SnapshotCorrupt(f"expected the state of random streams, found {brief(streams)}") from error
    if not found.keys() >= {"np_random", "np_random_seed", "spaces"}:
        raise SnapshotCorrupt(f"expected the state of random streams, found {brief(streams)}")
    return found


_USUAL = {"spawn_key": (), "pool_size": 4, "n_children_spawned": 0}
"""Attributes of a usual seed sequence, besides its entropy."""
_PCG64 = struct.Struct("<16s16sII")


def _compact(state: State | None) -> Any:
    if state is None or state["bit_generator"] != "PCG64":
        return state
    sequence = state["seed_sequence"]
    if sequence is None or type(sequence["entropy"]) is not int or sequence != {**_USUAL, **sequence, **_USUAL}:
        return state
    entropy = sequence["entropy"]
    position = state["state"]
    if position == _fresh(entropy):
        return [entropy]
    numbers = [position["state"][name].to_bytes(16, "little") for name in ("state", "inc")]
    return [entropy, _PCG64.pack(*numbers, position["has_uint32"], position["uinteger"])]


def _expanded(state: Any) -> Any:
    if not isinstance(state, list):
        return state
    entropy, *packed = state
    sequence = {"entropy": entropy, **_USUAL}
    if type(entropy) is not int:
        raise TypeError(f"expected a number as the entropy of a stream, found {brief(entropy)}")
    _check_sequence(sequence)
    position = _fresh(entropy)
    if packed:
        (content,) = packed
        if not isinstance(content, bytes) or len(content) != _PCG64.size:
            raise ValueError(f"expected the {_PCG64.size} bytes of a stream, found {brief(content)}")
        now, inc, has_uint32, uinteger = _PCG64.unpack(content)
        numbers = {"state": int.from_bytes(now, "little"), "inc": int.from_bytes(inc, "little")}
        position = {**position, "state": numbers, "has_uint32": has_uint32, "uinteger": uinteger}
    return {"bit_generator": "PCG64", "state": position, "seed_sequence": sequence}


@functools.lru_cache(256)
def _fresh(entropy: int) -> State:
    """State of a usual stream that nobody used."""
    return np.random.PCG64(np.random.SeedSequence(entropy)).state  # type: ignore[return-value]


def spaces_in(*spaces: Space | None, but: Collection[int] = ()) -> Iterator[Space]:
    """These spaces and all spaces nested in them, in a fixed order; ``but`` holds the ids of those to leave out."""
    for space in spaces:
        if space is None or id(space) in but:
            continue
        yield space
        if type(space) in _LEAVES:
            continue
        for value in vars(space).values():
            if isinstance(value, dict):
                value = list(value.values())
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(inner, gym.Space):
                    yield from spaces_in(inner, but=but)


def all_spaces(action: Space | None, observation: Space | None) -> Sequence[Space]:
    """The spaces that `spaces_in` finds, without a search where none has spaces inside."""
    if type(action) in _LEAVES and type(observation) in _LEAVES:
        return action, observation  # type: ignore[return-value]  # None is of no such type
    return list(spaces_in(action, observation))


def materialise(*spaces: Space | None, but: Collection[int] = ()) -> None:
    """Create the streams that Gymnasium would create, from fresh entropy, at the first draw."""
    for space in spaces_in(*spaces, but=but):
        if space._np_random is None:
            _give(space, seeding.np_random()[0])


def capture_spaces(*spaces: Space | None, but: Collection[int] = ()) -> list[State | None]:
    """Capture the streams of the spaces that `spaces_in` finds."""
    return capture_all([space._np_random for space in spaces_in(*spaces, but=but)])


def restore_spaces(
    states: list[State | None],
    *spaces: Space | None,
    but: Collection[int] = (),
    own: tuple[State | None, np.random.Generator | None] = (None, None),
) -> None:
    """Restore the streams captured by `capture_spaces`; ``own``: one that was restored before, with its state."""
    found = list(spaces_in(*spaces, but=but))
    if not isinstance(states, list) or len(found) != len(states):
        raise SnapshotCorrupt(f"expected the streams of {len(found)} spaces, found {brief(states)}")
    done = [own]
    for space, state in zip(found, states, strict=True):
        current = space._np_random
        shared = next((stream for known, stream in done if known is state is not None), None)
        if shared is not None:
            _share(space, shared)
        elif any(stream is current and not _are_equal(known, state) for known, stream in done):
            _give(space, restored(state, None))  # they were not the same when this was captured
        else:
            _give(space, restored(state, current))
        done.append((state, space._np_random))


def _are_equal(one: State | None, other: State | None) -> bool:
    try:
        return one == other
    except ValueError:  # they hold arrays
        return False


def reseed_spaces(seed: int, *spaces: Space | None, but: Collection[int] = ()) -> None:
    """Give every space its own stream drawn from ``seed``."""
    for index, space in enumerate(spaces_in(*spaces, but=but)):
        _give(space, seeding.np_random(sibling_seed(seed, index + 1))[0])


def _give(space: Space, generator: np.random.Generator | None) -> None:
    """Give a space its stream: the one that it has, or one that was just made; None if it has none yet."""
    if generator is not space._np_random:
        space._np_random = generator  # type: ignore[assignment]  # not the property: it seeds the spaces inside anew
        if isinstance(space, Unicode):
            space.unseen = generator


def _share(space: Space, generator: np.random.Generator) -> None:
    """Give a space a stream that others have too."""
    space._np_random = generator
    if isinstance(space, Unicode):
        space.unseen = None
