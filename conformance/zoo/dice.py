"""A stochastic environment that draws from ``np_random``, and faults in randomness.

Each step adds a roll of dice to a total; `Entropy` is the same game with the operating system's random numbers, which
cannot be captured, as it declares.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding

from sandboxgym import SnapshotEnv, SnapshotSpec
from zoo.mutant import good, mutant

Output = tuple[int, dict[str, Any]]
ONE, TWO, SPAWNED = range(3)
END = 60


@good()
class Dice(SnapshotEnv[int, int]):
    """Stochastic through ``np_random``, whose ``spawn`` it uses too; ends early, at a random time."""

    metadata = {"render_modes": []}

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Discrete(END + 12)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.total = 0
        self.rolls = 0
        self.begin()
        return self.total, self.info(0)

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self.total >= END:
            return self.total, 0.0, True, False, self.info(0)
        roll = sum(self.roll() for _ in range(2 if action == TWO else 1)) if action != SPAWNED else self.spawned()
        self.total += roll
        self.rolls += 1
        done = self.total >= END
        return self.total, self.reward(done), done, False, self.info(roll)

    def begin(self) -> None:
        """Hook at the end of a reset, which mutants override."""

    def roll(self) -> int:
        return int(self.np_random.integers(1, 7))

    def spawned(self) -> int:
        return int(self.np_random.spawn(1)[0].integers(1, 7))

    def reward(self, done: bool) -> float:
        return float(done and self.total % 2 == 0)

    def info(self, roll: int) -> dict[str, Any]:
        return {"roll": roll, "rolls": self.rolls, "success": self.total >= END}

    def _capture(self) -> Any:
        return [self.total, self.rolls]

    def _apply(self, state: Any) -> None:
        self.total, self.rolls = state


# The stream is not what it was.


@mutant("the random stream is not captured", "restore.trace_equality", "stochastic.coupled", "restore.many")
class RngDropped(Dice):
    """``np_random`` goes on where it is."""

    def _put_streams(self, streams: dict[str, Any]) -> None:
        current = self._streams()
        super()._put_streams({**current, "spaces": streams["spaces"]})


@mutant("the seed sequence is lost", "restore.random_streams", "restore.trace_equality")
class SeedSequenceLost(Dice):
    """The bit generator's state is restored but not how many streams were spawned from it."""

    def _put_streams(self, streams: dict[str, Any]) -> None:
        mine = self.np_random
        super()._put_streams(streams)
        mine.bit_generator.state = self.np_random.bit_generator.state
        self._np_random = mine


@good()
class Noisy(Dice):
    """Draws from a generator of PyTorch, whose state the snapshot holds."""

    def __init__(self, render_mode: str | None = None) -> None:
        import torch  # here: other specimens are not to wait for it

        self.torch, self.noise = torch, torch.Generator()
        super().__init__(render_mode)

    def begin(self) -> None:
        self.noise.manual_seed(int(self.np_random.integers(2**31)))

    def roll(self) -> int:
        return int(self.torch.randint(1, 7, (1,), generator=self.noise))

    def _capture(self) -> Any:
        return [*super()._capture(), self.noise.get_state().numpy().tobytes()]

    def _apply(self, state: Any) -> None:
        super()._apply(state[:2])
        self.noise.set_state(self.torch.frombuffer(bytearray(state[2]), dtype=self.torch.uint8))

    def _reseed(self, seed: int) -> None:
        self.noise.manual_seed(seed)


@mutant("a stream of PyTorch is not captured", "streams.exact", "restore.trace_equality")
class NoiseDropped(Noisy):
    """The generator goes on where it is."""

    def _apply(self, state: Any) -> None:
        super()._apply([*state[:2], self.noise.get_state().numpy().tobytes()])


@mutant("a stream of PyTorch keeps its bits after a seeded restore", "streams.seeded")
class NoiseNotSeeded(Noisy):
    """A seed reaches ``np_random`` alone."""

    def _reseed(self, seed: int) -> None:
        return


@mutant("forks share a stream of PyTorch", "streams.unshared", "fork.isolation")
class NoiseShared(Noisy):
    """A child gets the generator of its source, not a copy."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.noise = self.noise
        return children


_shared = np.random.default_rng(0)


@mutant("randomness comes from a generator of the module", "restore.trace_equality", "isolation.globals")
class ModuleGenerator(Dice):
    """All instances draw from one generator, seeded at a reset."""

    def begin(self) -> None:
        _shared.bit_generator.state = np.random.default_rng(int(self.np_random.integers(1 << 31))).bit_generator.state

    def roll(self) -> int:
        return int(_shared.integers(1, 7))


@mutant("randomness comes from Python's global stream", "restore.trace_equality", "isolation.globals")
class PythonRandom(Dice):
    """Rolls with ``random``, seeded at a reset."""

    def begin(self) -> None:
        random.seed(int(self.np_random.integers(1 << 31)))

    def roll(self) -> int:
        return random.randint(1, 6)


@mutant("randomness comes from NumPy's global stream", "restore.trace_equality", "isolation.globals")
class NumpyRandom(Dice):
    """Rolls with ``np.random``, seeded at a reset."""

    def begin(self) -> None:
        np.random.seed(int(self.np_random.integers(1 << 31)))

    def roll(self) -> int:
        return int(np.random.randint(1, 7))


@mutant("forks share the global stream", "fork.isolation", "isolation.globals")
class GlobalStreamCaptured(Dice):
    """Captures and restores the global stream with its own state: right for one environment at a time."""

    def begin(self) -> None:
        random.seed(int(self.np_random.integers(1 << 31)))

    def roll(self) -> int:
        return random.randint(1, 6)

    def _capture(self) -> Any:
        return [super()._capture(), random.getstate()]

    def _apply(self, state: Any) -> None:
        super()._apply(state[0])
        random.setstate(state[1])

    def _reseed(self, seed: int) -> None:
        random.seed(seed)


@mutant("a snapshot draws from the random stream", "snapshot.rng_untouched", "snapshot.noninterference")
class SnapshotDraws(Dice):
    """A snapshot takes its id from ``np_random`` after it was captured."""

    def snapshot(self) -> Any:
        snap = super().snapshot()
        snap.id = self.np_random.bytes(16).hex()
        return snap


@mutant("a snapshot draws from a space's random stream", "snapshot.rng_untouched")
class SnapshotSamples(Dice):
    """A snapshot tries an action of the live space."""

    def snapshot(self) -> Any:
        snap = super().snapshot()
        self.action_space.sample()
        return snap


@mutant("the seed of np_random is lost", "restore.trace_equality", "restore.seeded", "restore.other_env")
class SeedForgotten(Dice):
    """Loaded dice: the seed that ``np_random_seed`` reports decides who wins, and it isn't restored."""

    def reward(self, done: bool) -> float:
        return float(done and (self.total + (self._np_random_seed or 0)) % 2 == 0)

    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams({**streams, "np_random_seed": self._np_random_seed})


# Seeds of forks and restores.


@mutant("seeded siblings are equal", "fork.seeded_independent", "stochastic.siblings_independent")
class SiblingsEqual(Dice):
    """``fork(k, seed=S)`` gives every child the seed S itself."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        if seed is not None:
            for child in children:
                child._np_random, child._np_random_seed = seeding.np_random(seed)
        return children


@mutant("seeded siblings come in pairs", "fork.seeded_independent", "stochastic.siblings_independent")
class SiblingsInPairs(Dice):
    """Children 0 and 1 have one stream, 2 and 3 another."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        if seed is not None:
            for even, odd in zip(children[::2], children[1::2]):
                odd.np_random.bit_generator.state = even.np_random.bit_generator.state
        return children


@mutant("siblings are correlated", "stochastic.siblings_independent")
class SiblingsCorrelated(Dice):
    """After a seeded fork, half of the rolls of a child repeat those of its elder sibling; streams differ."""

    common: np.random.Generator | None = None

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        if seed is not None:
            for child in children:
                child.common = np.random.default_rng(seed)
        return children

    def roll(self) -> int:
        own = super().roll()
        if self.common is None:
            return own
        shared = int(self.common.integers(1, 7))
        return shared if self.np_random.random() < 0.5 else own


@mutant("a seeded fork changes its source", "fork.source_untouched")
class ForkChangesSource(Dice):
    """Seeds come from the source's own stream, which therefore moves on."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        if seed is not None:
            self.np_random.spawn(k)
        return children


@mutant("an unseeded fork gives other streams", "fork.unseeded_exact", "fork.trace_equality")
class UnseededDiffers(Dice):
    """``fork(k)`` spawns a stream for each child."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        if seed is None:
            for index, child in enumerate(children):
                child._np_random = np.random.default_rng([index, int(self.np_random.bit_generator.state["uinteger"])])
        return children


@mutant("restore ignores its seed", "restore.seeded", "stochastic.siblings_independent")
class RestoreIgnoresSeed(Dice):
    """``restore(snap, seed=S)`` is exact, so that the siblings of a pool are copies."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        return super().restore(snap)


@mutant("a seeded restore is not repeatable", "restore.seeded")
class RestoreSeedsAfresh(Dice):
    """``restore(snap, seed=S)`` draws fresh entropy whatever S is."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        return super().restore(snap, seed=None if seed is None else int.from_bytes(os.urandom(4), "big"))


# Distributions.


@mutant("the distribution is shifted after a restore", "restore.trace_equality", "stochastic.coupled")
class ShiftedCoupled(Dice):
    """After a restore, one roll in ten becomes a six, by the stream's own bits; the stream itself is honest."""

    restored = False

    def begin(self) -> None:
        self.restored = False

    def roll(self) -> int:
        roll = super().roll()
        position = self.np_random.bit_generator.state["state"]["state"]
        return 6 if self.restored and position % 10 == 0 else roll

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.restored = True


@mutant(
    "the distribution is shifted after a seeded restore",
    "stochastic.transition_distribution",
    "stochastic.return_distribution",
    "restore.seeded",
)
class ShiftedSeeded(Dice):
    """Exact without a seed; with one, one roll in five becomes a six."""

    shifted = False

    def begin(self) -> None:
        self.shifted = False

    def roll(self) -> int:
        roll = super().roll()
        return 6 if self.shifted and self.np_random.random() < 0.2 else roll

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.shifted = False

    def _reseed(self, seed: int) -> None:
        self.shifted = True


@good()
class Entropy(Dice):
    """Randomness that cannot be captured, declared so: a coin of the operating system moves the total."""

    snapshot_spec = SnapshotSpec(rng=False)

    def roll(self) -> int:
        return 1 + 5 * (random.SystemRandom().random() < self.chance())

    def spawned(self) -> int:
        return self.roll()

    def chance(self) -> float:
        return 0.5


@mutant("the distribution is shifted by 0.1 after a restore", "stochastic.transition_distribution", budget="full")
class ShiftedByTenth(Entropy):
    """The chance of a six is 0.6 instead of 0.5 after a restore; no random stream is captured."""

    restored = False

    def begin(self) -> None:
        self.restored = False

    def chance(self) -> float:
        return 0.6 if self.restored else 0.5

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.restored = True


@mutant("the distribution is shifted by 0.4 after a restore", "stochastic.transition_distribution")
class ShiftedByFourTenths(ShiftedByTenth):
    """Like the shift by 0.1, but large enough for a small budget."""

    def chance(self) -> float:
        return 0.9 if self.restored else 0.5


@mutant("only the returns are shifted after a restore", "stochastic.return_distribution", budget="full")
class ReturnsShifted(Entropy):
    """Transitions are right up to the last one: after a restore, the final reward is 1 more often."""

    restored = False

    def begin(self) -> None:
        self.restored = False

    def reward(self, done: bool) -> float:
        won = random.SystemRandom().random() < (0.75 if self.restored else 0.25)
        return float(done and won)

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.restored = True


@mutant("an undeclared source of randomness", "restore.trace_equality", "stochastic.coupled", "restore.many")
class UndeclaredEntropy(Dice):
    """One roll in ten comes from the operating system, though the spec says that randomness is captured."""

    def roll(self) -> int:
        roll = super().roll()
        return random.SystemRandom().randint(1, 6) if random.SystemRandom().random() < 0.1 else roll
