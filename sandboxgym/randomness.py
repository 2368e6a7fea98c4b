"""Random streams as plain data: capture, exact restore, and independent streams for siblings.

A stream is a NumPy `Generator`; its state includes the seed sequence, so that a later ``spawn`` is exact too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

from sandboxgym.errors import SnapshotCorrupt, SnapshotNotSupported

_BIT_GENERATORS = {name: getattr(np.random, name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")}

State = dict[str, Any]


def sibling_seed(seed: int, index: int) -> int:
    """The seed of one sibling: ``fork(k, seed=S)[i]`` is what ``restore(snap, seed=sibling_seed(S, i))`` gives."""
    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])


def capture(generator: np.random.Generator | None) -> State | None:
    """The whole state of a stream, or None for one not yet made."""
    if generator is None:
        return None
    bits = generator.bit_generator
    name = type(bits).__name__
    if _BIT_GENERATORS.get(name) is not type(bits):
        raise SnapshotNotSupported(f"expected a NumPy bit generator ({', '.join(_BIT_GENERATORS)}), found {type(bits)}")
    return {"bit_generator": name, "state": bits.state, "seed_sequence": _sequence(bits)}


def restored(state: State | None, current: np.random.Generator | None) -> np.random.Generator | None:
    """A stream in ``state``: ``current`` set in place where possible, so that what holds it sees the restore."""
    if state is None:
        return None
    try:
        kind, sequence = _BIT_GENERATORS[state["bit_generator"]], state["seed_sequence"]
        _check_position(state["state"])
        bits = None if current is None else current.bit_generator
        if current is None or type(bits) is not kind or _sequence(bits) != sequence:
            seeds = np.random.SeedSequence(**{**sequence, "spawn_key": tuple(sequence["spawn_key"])}) if sequence else 0
            current = np.random.Generator(kind(seeds))
        current.bit_generator.state = state["state"]
    except Exception as error:  # NumPy raises many types on content that lies
        raise SnapshotCorrupt(f"not the state of a random stream: {error!r}") from error
    return current


def _check_position(state: State) -> None:
    """NumPy trusts the position in a buffer of draws; a wrong one reads memory outside of it."""
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


def capture_spaces(*spaces: gym.Space[Any] | None) -> list[State | None]:
    """The streams of some spaces and of all spaces inside them, in a fixed order."""
    return [capture(space._np_random) for root in spaces for space in _walk(root)]


def restore_spaces(states: list[State | None], *spaces: gym.Space[Any] | None) -> None:
    """Give the spaces the streams of `capture_spaces`."""
    found = [space for root in spaces for space in _walk(root)]
    if not isinstance(states, list) or len(found) != len(states):
        raise SnapshotCorrupt(f"expected the streams of {len(found)} spaces, found {states!r:.100}")
    for space, state in zip(found, states, strict=True):
        space._np_random = restored(state, space._np_random)  # type: ignore[assignment]  # None until first used


def reseed_spaces(seed: int, *spaces: gym.Space[Any] | None) -> None:
    """Give every space its own stream drawn from ``seed``."""
    for index, space in enumerate(space for root in spaces for space in _walk(root)):
        space._np_random = seeding.np_random(sibling_seed(seed, index + 1))[0]


def _walk(space: gym.Space[Any] | None) -> Iterator[gym.Space[Any]]:
    if space is None:
        return
    yield space
    for value in vars(space).values():
        if isinstance(value, dict):
            value = list(value.values())
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(inner, gym.Space):
                yield from _walk(inner)
