"""Faults that need an uncommon call: the seed 0, a wide fork, the hundredth restore, a file whose source is gone.

Corridors, dice and quests, each with one method changed.
"""

from __future__ import annotations

import collections
import copy
import json
import random
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import wrappers

from sandboxgym import SnapshotWrapper, WrapperCodec, register_wrapper
from sandboxgym.wrappers.codecs import CODECS
from zoo.corridor import Corridor, State
from zoo.dice import Dice
from zoo.known_good import Sensors
from zoo.mutant import mutant
from zoo.quest import MAGIC, Handle, Quest, _checksum
from zoo.wrapped import LIMIT, AnyEnv, Own

Output = tuple[Any, dict[str, Any]]


# Seeds.


@mutant("the seed 0 counts as none", "restore.seeded", "fork.seeded_independent")
class SeedZero(Dice):
    """``if seed:`` in place of ``if seed is not None:``."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        return super().restore(snap, seed=seed or None)

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        return super().fork(k, seed=seed or None)


@mutant("a seeded restore writes into the handle", "restore.seeded", "stochastic.coupled")
class SeedStaysInHandle(Quest):
    """Restore with a seed that writes the seeded state into the handle."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        if seed is not None:
            snap.content = self.capture()
        return result


_in_40 = random.Random(40)


@mutant("one seeded restore in 40 is wrong", "restore.seeded")
class SeededFlake(Corridor):
    """The clock is one ahead; restores without a seed are right."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        if seed is not None and _in_40.random() < 1 / 40:
            self.state["clock"] += 1
        return result


@mutant("one seeded fork in 40 is wrong", "fork.seeded_independent")
class SeededForkFlake(Corridor):
    """The clock of a child is one ahead; forks without a seed are right."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.state["clock"] += seed is not None and _in_40.random() < 1 / 40
        return children


@mutant("siblings share a seed sequence", "fork.isolation", "isolation.spaces", "fork.trace_equality")
class SharedSeedSequence(Dice):
    """The generators of children are their own, the sequence that they spawn from is one."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        if seed is None:
            for child in children:
                bits = np.random.PCG64(self.np_random.bit_generator.seed_seq)
                bits.state = self.np_random.bit_generator.state
                child._np_random = np.random.Generator(bits)
        return children


@mutant("a stream that nobody seeded is not captured", "restore.random_streams")
class UnseededStream(Dice):
    """After a reset without a seed, in an environment that never had one, each restore begins a stream of its own."""

    seeded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.seeded = self.seeded or seed is not None
        return super().reset(seed=seed, options=options)

    def _capture(self) -> Any:
        return [*super()._capture(), self.seeded]

    def _apply(self, state: Any) -> None:
        super()._apply(state[:2])
        self.seeded = state[2]

    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams(streams)
        if not self.seeded:
            self._np_random = np.random.default_rng()


@mutant("half of a draw is lost", "restore.random_streams", "restore.trace_equality")
class HalfDrawLost(Dice):
    """A 64-bit draw gives two rolls; the half that is left over at a snapshot isn't captured."""

    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams(streams)
        self.np_random.bit_generator.state = {**self.np_random.bit_generator.state, "has_uint32": 0, "uinteger": 0}


@mutant("the streams of inner spaces are lost", "restore.random_streams", "fork.unseeded_exact")
class InnerSpacesDropped(Sensors):
    """The stream of a Dict space is restored, those of the spaces inside it are not."""

    def _put_streams(self, streams: dict[str, Any]) -> None:
        inner = {name: space.np_random for name, space in self.action_space.spaces.items()}
        super()._put_streams(streams)
        for name, stream in inner.items():
            self.action_space.spaces[name]._np_random = stream


@mutant("the generator belongs to the handle", "restore.many", "restore.trace_equality", "stochastic.coupled")
class HandleGenerator(Dice):
    """A restore takes over the generator object of the handle, which its steps then use up."""

    kept: ClassVar[dict[str, Any]] = {}

    def snapshot(self) -> Any:
        snap = super().snapshot()
        self.kept[snap.id] = copy.deepcopy(self.np_random)
        return snap

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        if seed is None and snap.id in self.kept:
            self._np_random = self.kept[snap.id]
        return result


# Numbers of forks and restores.


@mutant("the ninth child of a fork is wrong", "fork.trace_equality", "fork.isolation")
class NinthChild(Corridor):
    """Children come from a pool of eight; from the ninth on they share the state of the first."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children[8:]:
            child.state = children[0].state
        return children


_after_100 = random.Random(100)


@mutant("after a hundred restores one in 50 is wrong", "restore.many")
class TiresAfter100(Corridor):
    """The first hundred restores of an environment are right."""

    restores = 0

    def _apply(self, state: State) -> None:
        self.restores += 1
        wrong = self.restores > 100 and _after_100.random() < 1 / 50
        self.state = {**state, "clock": state["clock"] + wrong}


_fork_flake = random.Random(51)


@mutant("one fork in 50 is wrong", "fork.trace_equality")
class ForkFlake(Corridor):
    """A child's clock is one ahead."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.state["clock"] += _fork_flake.random() < 1 / 50
        return children


@mutant("restoring one resets its relatives", "fork.isolation", "machine.random_walk")
class RestoresRelatives(Corridor):
    """Restore that settles the due reward in all forks of the same family."""

    def __init__(self, length: int = 5, render_mode: str | None = "ansi") -> None:
        super().__init__(length, render_mode)
        self.family: list[Any] = [self]

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        for relative in self.family:
            if relative is not self:
                relative.state["due"] = 0.0
        return result

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.family = self.family
        self.family.extend(children)
        return children

    def close(self) -> None:
        if self in self.family:
            self.family.remove(self)


# Episodes after the restored one.


@mutant("a restore shows in a later episode", "restore.after_reset")
class LaterEpisode(Corridor):
    """The episode after a restored one ends three steps early, however it is reset."""

    restored = False
    short = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.short, self.restored = self.restored, False
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.state["done"] = terminated = terminated or (self.short and self.state["clock"] >= 21)
        return observation, reward, terminated, truncated, info

    def _apply(self, state: State) -> None:
        self.state, self.restored, self.short = state, True, False


@mutant("a snapshot shows in a later episode", "snapshot.noninterference")
class SnapshotShowsLater(Corridor):
    """The episode after one with a snapshot ends three steps early."""

    taken = False
    short = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.short, self.taken = self.taken, False
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.state["done"] = terminated = terminated or (self.short and self.state["clock"] >= 21)
        return observation, reward, terminated, truncated, info

    def snapshot(self) -> Any:
        self.taken = True
        return super().snapshot()


# Sharing, two levels down and by identity.


@mutant("lists inside a dict are shared", "restore.many", "snapshot.immutable")
class SharedTwoLevelsDown(Corridor):
    """The state is copied, and so is the dict of coins; the lists in it are not."""

    immutable_state = True

    def _capture(self) -> State:
        coins = self.state["coins"]
        return {**copy.deepcopy({**self.state, "coins": None}), "coins": dict(coins)}

    def _apply(self, state: State) -> None:
        self.state = {**copy.deepcopy({**state, "coins": None}), "coins": dict(state["coins"])}


_by_identity: dict[tuple[int, int], float] = {}


@mutant("a cache knows environments by their address", "isolation.caches", "fork.isolation", "fork.trace_equality")
class CacheByAddress(Corridor):
    """``lru_cache`` on a method, so to say: an environment gets what another one got that had its ``id`` before."""

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return (
            observation,
            _by_identity.setdefault((id(self), self.state["clock"]), reward),
            terminated,
            truncated,
            info,
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        for key in [key for key in _by_identity if key[0] == id(self)]:
            del _by_identity[key]
        return super().reset(seed=seed, options=options)


@mutant("the snapshot is taken when it is first used", "restore.trace_equality", "snapshot.immutable", "restore.many")
class LazySnapshot(Quest):
    """The handle asks its environment for the content at the first restore or save."""

    class handle(Handle):
        source: Any = None

        def text(self) -> str:
            if self.source is not None:
                self.content, self.source = self.source.capture(), None
            return super().text()

    def snapshot(self) -> Any:
        snap = super().snapshot()
        snap.source = self
        return snap


@mutant("the info dict is one and the same", "freshness.last_info")
class OneInfo(Corridor):
    """All infos are one dict, which each step fills anew."""

    def info(self) -> dict[str, Any]:
        self.only: dict[str, Any] = getattr(self, "only", {})
        self.only.update(super().info())
        return self.only


# Files of snapshots.


@mutant("one saved file in 40 is wrong", "durable.round_trip")
class SavedFlake(Corridor):
    """Now and then a coin is missing from what is saved."""

    @classmethod
    def _encode(cls, state: Any) -> bytes:
        if _in_40.random() < 1 / 40:
            state = {**state, "clock": state["clock"] + 1}
        return super()._encode(state)


@mutant("a saved file needs the handle that it came from", "durable.round_trip")
class FileRefersToHandle(Quest):
    """``save`` writes where the handle keeps its content; ``release`` deletes that."""

    class handle(Handle):
        kept: Path | None = None

        def save(self, path: Any) -> None:
            if self.kept is None:
                with tempfile.NamedTemporaryFile("w", delete=False, suffix=".json") as file:
                    file.write(self.text())
                self.kept = Path(file.name)
            whole = {"magic": MAGIC, "header": self.header, "content": str(self.kept)}
            Path(path).write_text(json.dumps({**whole, "sha256": _checksum(whole)}), encoding="utf-8")

        @classmethod
        def load(cls, path: Any) -> Self:
            loaded = super().load(path)
            loaded.content = Path(str(loaded.content)).read_text()
            return loaded

        def release(self) -> None:
            super().release()
            if self.kept is not None:
                self.kept.unlink(missing_ok=True)


@mutant("what is saved follows the order of a set", "durable.cross_process")
class SavedBySetOrder(Quest):
    """The place of the cat is saved as its number in a set of rooms, whose order each interpreter salts anew."""

    rooms = frozenset(("hall", "kitchen", "garden", "attic", "cellar"))

    def capture(self) -> str:
        content = json.loads(super().capture())
        content["state"]["cat"] = list(self.rooms).index(content["state"]["cat"])
        return json.dumps(content)

    def apply(self, content: dict[str, Any]) -> None:
        super().apply({**content, "state": {**content["state"], "cat": list(self.rooms)[content["state"]["cat"]]}})


@mutant("what is pickled follows the order of a set", "durable.cross_process")
class PickledBySetOrder(Quest):
    """Saved rightly; pickled, as for a pool of workers, the cat's place is its number in a set of rooms."""

    class handle(Handle):
        rooms = frozenset(("hall", "kitchen", "garden", "attic", "cellar"))

        def __getstate__(self) -> dict[str, Any]:
            content = json.loads(self.text())
            content["state"]["cat"] = list(self.rooms).index(content["state"]["cat"])
            return {**vars(self), "content": content}

        def __setstate__(self, state: dict[str, Any]) -> None:
            vars(self).update(state)
            content = state["content"]
            content["state"]["cat"] = list(self.rooms)[content["state"]["cat"]]
            self.content = json.dumps(content)


# Wrappers.


class SiblingsLimit(Own):
    """Elapsed steps are kept for the class, by the last snapshot that anybody took."""

    latest: ClassVar[int] = 0

    def snapshot(self) -> Any:
        SiblingsLimit.latest = self.env._elapsed_steps  # type: ignore[attr-defined]
        return super().snapshot()

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        self.env._elapsed_steps = SiblingsLimit.latest  # type: ignore[attr-defined]
        return result


@mutant(
    "elapsed steps are those of another snapshot", "wrappers.time_limit", "restore.trace_equality", "restore.any_order"
)
def siblings_limit() -> AnyEnv:
    """A restore takes the time limit's count from whichever snapshot was taken last."""
    return SiblingsLimit(wrappers.TimeLimit(Corridor(), LIMIT))


class Totals(wrappers.RecordEpisodeStatistics): ...


_statistics = CODECS[wrappers.RecordEpisodeStatistics]
register_wrapper(
    Totals,
    WrapperCodec(
        ("episode_lengths", "episode_start_time"), _statistics.config, adapters=_statistics.adapters, remember=True
    ),
)


@mutant("the return so far is lost", "wrappers.stack", "restore.trace_equality")
def return_lost() -> AnyEnv:
    """The statistics at the end of a restored episode lack what was earned before, or have another branch's."""
    return SnapshotWrapper(Totals(wrappers.TimeLimit(Corridor(), LIMIT)))


# Forks of forks, seeds in the middle of an episode.


@mutant("a fork's third child shares with the second", "fork.isolation")
class ThirdGrandchildShares(Corridor):
    """The purse, where the source is a fork itself."""

    forked = False

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for number, child in enumerate(children):
            child.forked = True
            if self.forked and number > 1:
                child.state["purse"] = children[1].state["purse"]
        return children


@mutant("forks of forks get no seed", "fork.seeded_independent")
class GrandchildrenUnseeded(Dice):
    """A fork passes on its own stream, whatever seed it is given."""

    forked = False

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=None if self.forked else seed)
        for child in children:
            child.forked = True
        return children


@mutant("a restore with a seed begins to count anew", "restore.seeded")
class SeedCountsAnew(Dice):
    """The number of rolls is 0 after it, as it is right after a reset."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        self.rolls = self.rolls if seed is None else 0
        return result


@mutant("children of a seeded fork begin to count anew", "fork.seeded_independent")
class SeededChildrenCountAnew(Dice):
    """The number of their rolls is 0, as it is right after a reset."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children if seed is not None else []:
            child.rolls = 0
        return children


# Values whose `repr` is not the whole.


class Mapped(Quest):
    """Each info has a map of two thousand cells, the middle one of which counts turns, from 1 again after a restore."""

    before = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.before = 0
        return super().reset(seed=seed, options=options)

    def apply(self, content: dict[str, Any]) -> None:
        super().apply(content)
        self.before = self.current()["turn"] - 1

    def info(self) -> dict[str, Any]:
        cells = np.zeros(2000)
        cells[1000] = self.current()["turn"] - self.before
        return {**super().info(), "map": self.kept(cells)}

    def kept(self, cells: Any) -> Any:
        return MappingProxyType({"cells": cells})


@mutant("a large array in a read-only mapping is another", "restore.trace_equality")
class MappingForgets(Mapped):
    """Its ``repr`` leaves out the middle."""


@mutant("a large array in a deque is another", "restore.trace_equality")
class DequeForgets(Mapped):
    """The same, in a queue of maps."""

    def kept(self, cells: Any) -> Any:
        return collections.deque([cells], maxlen=4)


class Sheet:
    """An object with slots."""

    __slots__ = ("cells",)

    def __init__(self, cells: Any) -> None:
        self.cells = cells


@mutant("an object with slots is another", "restore.trace_equality")
class SlotsForget(Mapped):
    """The same, in an object that has no ``repr`` of its own."""

    def kept(self, cells: Any) -> Any:
        return Sheet(cells)


# Calls between steps, and closing early.


@mutant("a fork hands on what it was made from", "restore.no_steps")
class HandsOnItsOrigin(Quest):
    """A child that has made no step gives its own forks the state that it was made with, wherever it was restored."""

    origin: Any = None

    def step(self, action: str) -> Any:
        self.origin = None
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.origin = None
        return super().reset(seed=seed, options=options)

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        children = super().fork(k, seed=seed)
        for child in children if seed is None else []:
            child.origin = self.origin or self.snapshot()
            child.restore(child.origin)
        return children


@mutant("close takes the running episode's states from its snapshots", "restore.after_close")
class ClosedInTheEpisode(Quest):
    """They fall back to the episode's first one; those of earlier episodes keep theirs."""

    taken: list[Handle]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.taken = []
        return super().reset(seed=seed, options=options)

    def snapshot(self) -> Any:
        snap = super().snapshot()
        self.taken.append(snap)
        return snap

    def close(self) -> None:
        kept = [snap for snap in getattr(self, "taken", []) if snap.content is not None]
        for snap in kept:
            snap.content = kept[0].content
        self.taken = []


@mutant("a fork's snapshots are in its source's store, and go when that closes", "snapshot.relatives")
class StoreOfTheFamily(Quest):
    """They fall back to the state of the fork; the source's own snapshots need no store."""

    lent: list[Handle] | None = None
    own: list[Handle]

    def snapshot(self) -> Any:
        snap = super().snapshot()
        if self.lent is not None:
            self.lent.append(snap)
        return snap

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        children = super().fork(k, seed=seed)
        if not hasattr(self, "own"):
            self.own = [super().snapshot()]
        for child in children:
            child.lent = self.own
        return children

    def close(self) -> None:
        kept = getattr(self, "own", [])
        for snap in kept[1:]:
            snap.content = snap.content and kept[0].content
        self.own = []


@mutant("what an agent writes into an observation is in the next snapshot", "snapshot.immutable")
class KeepsWhatItGave(Sensors):
    """A restore returns copies of what reset or step returned, and the environment has kept that, not copies of it."""

    given: Output

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.given = super().reset(seed=seed, options=options)
        return self.given

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.given = observation, info
        return observation, reward, terminated, truncated, info

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        super().restore(snap, seed=seed)
        return copy.deepcopy(self.given)

    def _capture(self) -> Any:
        return {**super()._capture(), "given": copy.deepcopy(self.given)}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.given = copy.deepcopy(state["given"])
