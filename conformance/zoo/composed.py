"""Correct environments that share no base class with this package, and faults in the state that they hold.

They keep their state in other objects: another environment, several generators, a database, a child process, a
coroutine. All satisfy the protocol with a handle in memory.
"""

from __future__ import annotations

import copy
import random
import sqlite3
import tempfile
from collections.abc import Generator
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sandboxgym import ResetNeeded, SnapshotSpec
from sandboxgym.conformance.baselines import DeepCopySnapshots, deep_copied
from zoo import streams
from zoo.known_good import Handle, forked, opened
from zoo.mutant import good, mutant

Output = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Kept(gym.Env[Any, Any]):
    """The protocol on top of ``capture`` and ``apply``, which subclasses write."""

    metadata = {"render_modes": []}
    snapshot_spec: ClassVar[SnapshotSpec] = SnapshotSpec(cross_process=False, cross_host=False)
    observation_space: spaces.Space[Any] = spaces.Discrete(1000)
    action_space: spaces.Space[Any] = spaces.Discrete(3)
    started = False

    def __init__(self) -> None:
        self.observation_space = copy.deepcopy(self.observation_space)
        self.action_space = copy.deepcopy(self.action_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.begin()
        self.started = True
        return self.seen()

    def begin(self) -> None:
        """Start an episode."""
        raise NotImplementedError

    def seen(self) -> Output:
        """Observation and info of now."""
        raise NotImplementedError

    def capture(self) -> Any:
        """All but the streams of Gymnasium."""
        raise NotImplementedError

    def apply(self, state: Any) -> None:
        """Go to what ``capture`` gave; it is the environment's own."""
        raise NotImplementedError

    def reseed(self, seed: int) -> None:
        """Fresh bits for generators of its own."""

    def snapshot(self) -> Handle:
        if not self.started:
            raise ResetNeeded("there is no state yet: call reset() first")
        return Handle(copy.deepcopy((self.capture(), streams.captured(self))), type(self).__name__)

    def restore(self, snap: Handle, *, seed: int | None = None) -> Output:
        state, drawn = copy.deepcopy(opened(snap, type(self).__name__, seed))
        self.apply(state)
        streams.put(self, drawn)
        self.started = True
        if seed is not None:
            streams.seeded(self, seed)
            self.reseed(seed)
        return self.seen()

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        return forked(self, type(self), k, seed)


class _Cloud:
    """A generator in a slot of an object in a list."""

    __slots__ = ("drops",)

    def __init__(self, seed: int) -> None:
        self.drops = np.random.RandomState(seed)


@good()
class Weather(Kept):
    """Three generators beside ``np_random``: Python's, an old one of NumPy in a slot, a new one in a closure."""

    def begin(self) -> None:
        first, second, third = (int(seed) for seed in self.np_random.integers(2**31, size=3))
        self.wind = random.Random(first)
        self.clouds = [_Cloud(second)]
        self.sun = self.shining(np.random.default_rng(third))
        self.water, self.days = 20, 0

    @staticmethod
    def shining(generator: np.random.Generator) -> Any:
        def shine() -> int:
            return int(generator.integers(3))

        return shine

    def light(self) -> np.random.Generator:
        """The generator in the closure."""
        return self.sun.__closure__[0].cell_contents  # type: ignore[no-any-return]

    def step(self, action: int) -> Step:
        drawn = self.wind.randrange(3), int(self.clouds[0].drops.randint(4)), self.sun()
        self.water = max(0, min(999, self.water + drawn[1] * int(action) - drawn[0] - drawn[2]))
        self.days += 1
        return self.water, float(drawn[1]), self.water == 0, self.days >= 25, self.seen()[1]

    def seen(self) -> Output:
        return self.water, {"days": self.days}

    def capture(self) -> Any:
        drops, light = self.clouds[0].drops.get_state(), self.light().bit_generator.state
        return self.water, self.days, self.wind.getstate(), drops, light

    def apply(self, state: Any) -> None:
        self.water, self.days, wind, drops, light = state
        self.wind, self.clouds = random.Random(), [_Cloud(0)]
        self.wind.setstate(wind)
        self.clouds[0].drops.set_state(drops)
        generator = np.random.default_rng()
        generator.bit_generator.state = light
        self.sun = self.shining(generator)

    def reseed(self, seed: int) -> None:
        words = np.random.SeedSequence(seed, spawn_key=(9,)).generate_state(3)
        self.wind = random.Random(int(words[0]))
        self.clouds = [_Cloud(int(words[1]))]
        self.sun = self.shining(np.random.default_rng(int(words[2])))


@good()
class Guarded(Kept):
    """Holds another environment, whose ``np_random`` it shows as a property; copies all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: gym.Env[Any, Any] = gym.make("FrozenLake-v1", disable_env_checker=True).unwrapped
        self.steps = 0

    @property
    def np_random(self) -> np.random.Generator:
        return self.held.np_random

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        self.held.np_random = value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.place, info = self.held.reset(seed=seed)
        self.chance, self.steps, self.started = info["prob"], 0, True
        return self.seen()

    def step(self, action: int) -> Step:
        self.place, reward, terminated, _, info = self.held.step(action)
        self.steps += 1
        self.chance = info["prob"]
        return int(self.place), float(reward), terminated, self.steps >= 15, self.seen()[1]

    def seen(self) -> Output:
        return int(self.place), {"chance": float(self.chance), "steps": self.steps}

    def snapshot(self) -> Handle:
        if not self.started:
            raise ResetNeeded("there is no state yet: call reset() first")
        spaces_of_its_own = (self.action_space, self.observation_space)
        held = copy.deepcopy((self.held, self.place, self.chance, self.steps, spaces_of_its_own))
        return Handle(held, type(self).__name__)

    def restore(self, snap: Handle, *, seed: int | None = None) -> Output:
        found = copy.deepcopy(opened(snap, type(self).__name__, seed))
        self.held, self.place, self.chance, self.steps, (self.action_space, self.observation_space) = found
        self.started = True
        if seed is not None:
            self.held.np_random, _ = gym.utils.seeding.np_random(seed)
            self.action_space.seed(seed)
            self.observation_space.seed(seed + 1)
        return self.seen()


@good()
class Accounts(Kept):
    """The state is a data base in memory and a file without a name; both are copied whole."""

    def __init__(self) -> None:
        super().__init__()
        self.base = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)

    def begin(self) -> None:
        self.base.executescript("drop table if exists entry; create table entry (id integer primary key, sum integer)")
        self.log.seek(0)
        self.log.truncate()

    def step(self, action: int) -> Step:
        amount = int(action) * int(self.np_random.integers(1, 9))
        self.base.execute("insert into entry (sum) values (?)", (amount,))
        self.log.write(b"%d\n" % amount)
        total, info = self.seen()
        return total, float(amount), total > 90, info["entries"] >= 30, info

    def seen(self) -> Output:
        total, entries = self.base.execute("select coalesce(sum(sum), 0), count(*) from entry").fetchone()
        place = self.log.seek(0, 2)
        self.log.seek(max(0, place - 4))
        tail = self.log.read().decode()
        return min(999, total), {"entries": entries, "tail": tail}

    def capture(self) -> Any:
        self.log.seek(0)
        return self.base.serialize(), self.log.read()

    def apply(self, state: Any) -> None:
        self.base.deserialize(state[0])
        self.log.seek(0)
        self.log.truncate()
        self.log.write(state[1])

    def close(self) -> None:
        self.base.close()
        self.log.close()


@good()
class Story(Kept):
    """The state is where a coroutine is; a restore tells the story again with the same choices."""

    def begin(self) -> None:
        self.follow(int(self.np_random.integers(2**31)), [], {})

    def follow(self, plot: int, choices: list[int], twists: dict[int, int]) -> None:
        self.plot, self.choices, self.twists = plot, [], {}
        self.muse = random.Random(plot)
        self.teller = self.told(self.muse)
        self.word, self.over = next(self.teller)
        for number, choice in enumerate([*choices, None]):
            if number in twists:
                self.reseed(twists[number])
            if choice is not None:
                self.choose(choice)

    def choose(self, choice: int) -> None:
        self.choices.append(choice)
        self.word, self.over = self.teller.send(choice)

    def reseed(self, seed: int) -> None:
        """From here on another muse: what was told so far stays as it was."""
        self.twists[len(self.choices)] = seed
        self.muse.seed(seed)

    @staticmethod
    def told(muse: random.Random) -> Generator[tuple[int, bool], int]:
        tension = 0
        while True:
            choice = yield min(999, 10 * tension + muse.randrange(10)), tension > 20
            tension += choice * muse.randrange(3)

    def step(self, action: int) -> Step:
        if not self.over:
            self.choose(int(action))
        return self.word, float(self.over), self.over, len(self.choices) >= 30, {}

    def seen(self) -> Output:
        return self.word, {}

    def capture(self) -> Any:
        return self.plot, self.choices, self.twists

    def apply(self, state: Any) -> None:
        self.follow(*state)


Story.snapshot_spec = SnapshotSpec(kind="replay", cost="steps", cross_process=False, cross_host=False)


@good()
class Locked(Kept):
    """Actions are a dict of a MultiDiscrete, a tuple and bits, all under masks; a masked action is refused."""

    action_space = spaces.Dict(
        {
            "doors": spaces.MultiDiscrete([3, 2]),
            "pair": spaces.Tuple((spaces.Discrete(4), spaces.Discrete(2))),
            "tools": spaces.MultiBinary(2),
        }
    )

    def begin(self) -> None:
        self.sum, self.turn = 0, 0

    def mask(self) -> dict[str, Any]:
        """Mask of the actions that are possible now."""
        odd = self.turn % 2
        doors = (np.array([1, odd, 0], np.int8), np.array([odd, 1], np.int8))
        pair = (np.array([0, 1, odd, 1 - odd], np.int8), np.array([1, 0], np.int8))
        return {"doors": doors, "pair": pair, "tools": np.array([odd, 2], np.int8)}

    def step(self, action: Any) -> Step:
        mask = self.mask()
        for part in ("doors", "pair"):
            for bits, chosen in zip(mask[part], action[part]):
                if not bits[int(chosen)]:
                    raise ValueError(f"{part}: {chosen} is not allowed")
        self.sum += int(sum(action["doors"])) + int(sum(action["pair"])) + int(action["tools"][1])
        self.sum = min(999, self.sum + int(self.np_random.integers(3)))
        self.turn += 1
        return self.sum, 1.0, False, self.turn >= 20, self.seen()[1]

    def seen(self) -> Output:
        return self.sum, {"turn": self.turn, "action_mask": self.mask()}

    def capture(self) -> Any:
        return self.sum, self.turn, self.action_space  # with the streams of the spaces inside

    def apply(self, state: Any) -> None:
        self.sum, self.turn, self.action_space = state


@good()
class Chatty(Weather):
    """Has a generator of its own for names, which nothing depends on and no snapshot holds."""

    def __init__(self) -> None:
        super().__init__()
        self.names = random.Random()

    def step(self, action: int) -> Step:
        self.name = self.names.getrandbits(64)
        return super().step(action)


@good()
class Uncaptured(Kept):
    """Draws from ``np_random``, does not capture it, and says so: without a seed every restore begins a new stream."""

    snapshot_spec = SnapshotSpec(rng=False, cross_process=False, cross_host=False)

    def begin(self) -> None:
        self.height, self.turns = 500, 0

    def step(self, action: int) -> Step:
        self.height = min(999, max(0, self.height + (1 if self.np_random.random() < 0.5 else -1) * (1 + int(action))))
        self.turns += 1
        return self.height, float(self.height > 500), False, self.turns >= 12, {}

    def seen(self) -> Output:
        return self.height, {}

    def capture(self) -> Any:
        return self.height, self.turns

    def apply(self, state: Any) -> None:
        self.height, self.turns = state

    def restore(self, snap: Handle, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        if seed is None:
            self.np_random = self.fresh()
        return result

    def fresh(self) -> np.random.Generator:
        """The stream of a restore without a seed."""
        return np.random.default_rng()


@good()
def mountain_car(**kwargs: Any) -> DeepCopySnapshots:
    """Continuous observations, nothing random after the reset."""
    return deep_copied("MountainCar-v0", **kwargs)


@good()
def cliff_walking(**kwargs: Any) -> DeepCopySnapshots:
    """One state of many, in a table; slippery."""
    return deep_copied("CliffWalking-v1", is_slippery=True, **kwargs)


# Streams by composition.


@mutant("the seed 0 counts as none, in a generator that is held by another object", "streams.seeded", "restore.seeded")
class HeldSeedZero(Guarded):
    """``seed or None``, where ``np_random`` is a property."""

    def restore(self, snap: Handle, *, seed: int | None = None) -> Output:
        return super().restore(snap, seed=seed or None)


@mutant("one of several generators is not captured", "streams.exact", "restore.trace_equality")
class WindLost(Weather):
    """A restore leaves the wind where it is."""

    def apply(self, state: Any) -> None:
        wind = getattr(self, "wind", None)
        super().apply(state)
        self.wind = wind or self.wind


@mutant("a generator in a slot is not reseeded", "streams.seeded")
class CloudsUnseeded(Weather):
    """Siblings with seeds have one and the same rain."""

    def reseed(self, seed: int) -> None:
        clouds = self.clouds
        super().reseed(seed)
        self.clouds = clouds


@mutant("a generator in a closure is not reseeded", "streams.seeded")
class SunUnseeded(Weather):
    """Siblings with seeds have one and the same sun."""

    def reseed(self, seed: int) -> None:
        sun = self.sun
        super().reseed(seed)
        self.sun = sun


@mutant("forks share a generator in a slot", "streams.unshared", "fork.isolation")
class CloudsShared(Weather):
    """The clouds of a fork are those of its source."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.clouds[0].drops = self.clouds[0].drops
        return children


@mutant("seeds repeat after a thousand", "streams.seeded")
class SeedModulo(Weather):
    """Seeds are taken modulo 997."""

    def reseed(self, seed: int) -> None:
        super().reseed(seed % 997)


@mutant("the high bits of a seed are lost", "streams.seeded")
class SeedBytes(Weather):
    """Only the last two bytes of a seed have an effect on the wind."""

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self.wind = random.Random(seed & 0xFFFF)


@mutant("a seed is not the same twice", "streams.seeded", "restore.seeded")
class WindFromHash(Weather):
    """The wind is seeded with the address of the environment too."""

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self.wind = random.Random(seed ^ id(self))


@mutant("every restore without a seed begins one and the same stream", "stochastic.transition_distribution")
class OneStream(Uncaptured):
    """The new stream of a restore is always the same."""

    def fresh(self) -> np.random.Generator:
        return np.random.default_rng(0)


@mutant("restores without a seed have two streams in turn", "stochastic.transition_distribution")
class TwoStreams(Uncaptured):
    """The new stream of a restore is one of two."""

    turn: ClassVar[int] = 0

    def fresh(self) -> np.random.Generator:
        type(self).turn += 1
        return np.random.default_rng(type(self).turn % 2)


@mutant("the streams of the two spaces are swapped", "restore.random_streams", "restore.trace_equality")
class ComposedSpacesSwapped(Weather):
    """Restore that gives each space's stream to the other: actions' to observations', and the reverse."""

    def restore(self, snap: Handle, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        one, other = self.action_space.np_random, self.observation_space.np_random
        self.action_space._np_random, self.observation_space._np_random = other, one
        return result


SHELVES: list[list[int]] = [[number] for number in range(25_000)]
"""A stock that all environments share and nobody changes."""


@mutant("a generator behind 25,000 other objects is not captured", "streams.exact")
class LeakBehindStock(Weather):
    """The last item of a long list draws the leak of the day; restored environments get a new one."""

    def begin(self) -> None:
        super().begin()
        self.stock: list[list[Any]] = [*SHELVES, [random.Random(int(self.np_random.integers(2**31)))]]

    def apply(self, state: Any) -> None:
        super().apply(state)
        self.stock = [*SHELVES, [random.Random()]]

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self.stock = [*SHELVES, [random.Random(seed)]]

    def step(self, action: int) -> Step:
        self.water = min(999, self.water + self.stock[-1][0].randrange(2))
        return super().step(action)


@mutant("forks share a generator behind 25,000 other objects", "streams.unshared")
class StockShared(LeakBehindStock):
    """Captured and seeded as it should be; only the children draw from the generator of their source."""

    def capture(self) -> Any:
        return super().capture(), self.stock[-1][0].getstate()

    def apply(self, state: Any) -> None:
        super().apply(state[0])
        self.stock[-1][0].setstate(state[1])

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.stock = self.stock
        return children
