"""Randomness under a seed is measured by futures, for any kind of generator, and every fault of a seed is detected."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from sandboxgym import SnapshotEnv, SnapshotSpec, Transition
from sandboxgym.conformance import Verdict
from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.runner import run
from sandboxgym.conformance.subject import Subject

SMALL = Budget("quick", 2, 16, 20, 2, 20, 40, 100, 0.3)


class Stream(SnapshotEnv[Any, Any]):
    """Correct: its only draws within an episode come from something of its own, which ``_reseed`` begins anew."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(3)
    every = 1

    def __init__(self) -> None:
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        self.start(int(self.np_random.integers(2**31)))
        return 0, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        drawn = self.draw() if self.t % self.every == 0 else 0
        return (int(action) + drawn) % 100, 0.0, False, self.t >= 12, {}

    def start(self, seed: int) -> None:
        self.key = seed

    def draw(self) -> int:
        return int(np.random.default_rng([self.key, self.t]).integers(90))

    def stream(self) -> Any:
        return self.key

    def put(self, stream: Any) -> None:
        self.key = stream

    def _capture(self) -> Any:
        return {"t": self.t, "stream": self.stream()}

    def _apply(self, state: Any) -> None:
        self.t = state["t"]
        self.put(state["stream"])

    def _reseed(self, seed: int) -> None:
        self.start(seed % 2**31)


class Congruential(Stream):
    def draw(self) -> int:
        self.key = (self.key * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.key >> 33) % 90


class Space(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.space = spaces.Discrete(90)

    def start(self, seed: int) -> None:
        self.space.seed(seed)

    def draw(self) -> int:
        return int(self.space.sample())

    def stream(self) -> Any:
        return self.space.np_random.bit_generator.state

    def put(self, stream: Any) -> None:
        self.space.np_random.bit_generator.state = stream


class Seldom(Space):
    every = 7


class Coin(Stream):
    """Futures are two, and most alike: what was found out beforehand may not have met the other one."""

    def draw(self) -> int:
        return int(self.t == 5 and super().draw() < 9)


class ByProtocol(gym.Env[Any, Any]):
    """The same without `SnapshotEnv`: nothing says that it draws."""

    snapshot_spec = SnapshotSpec(kind="memory", cross_process=False, cross_host=False)
    keeps_seed = True

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(100), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.seen, self.key = 0, 0, int(self.np_random.integers(2**31))
        return 0, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        drawn = int(np.random.default_rng([self.key, self.t]).integers(90))
        self.seen = (int(action) + drawn) % 100
        return self.seen, 0.0, False, self.t >= 12, {}

    def snapshot(self) -> Any:
        streams = copy.deepcopy((self.np_random, self.action_space.np_random, self.observation_space.np_random))
        return "snapshot", (self.t, self.seen, self.key), streams, self._np_random_seed

    def restore(self, snap: Any, *, seed: int | None = None) -> Any:
        _, (self.t, self.seen, self.key), streams, known = copy.deepcopy(snap)
        self._np_random, self.action_space._np_random, self.observation_space._np_random = streams
        if self.keeps_seed:
            self._np_random_seed = known
        if seed is not None:
            self._np_random, self._np_random_seed = gym.utils.seeding.np_random(seed)
            self.key = seed
        return self.seen, {}

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        snap, children = self.snapshot(), [type(self)() for _ in range(k)]
        for index, child in enumerate(children):
            child.restore(snap, seed=None if seed is None else 1000 * seed + index + 1)
        return children


def result(make: Any, check: str) -> Any:
    (found,) = run(Subject(make), only=[check], budget=SMALL).results
    return found


SEEDED = ["restore.seeded", "fork.seeded_independent"]


@pytest.mark.parametrize("check", SEEDED)
@pytest.mark.parametrize("make", [Stream, Congruential, Space, Seldom, Coin], ids=lambda make: make.__name__)
def test_draws_of_no_known_kind_are_draws(make: Any, check: str) -> None:
    found = result(make, check)
    assert found.verdict is Verdict.PASS, found.message
    assert found.evidence["random"]
    assert "no stream that was recognised does" in found.evidence["decided by"]


@pytest.mark.parametrize("check", SEEDED)
def test_a_protocol_that_draws_by_a_key(check: str) -> None:
    found = result(ByProtocol, check)
    assert found.verdict is Verdict.PASS and found.evidence["random"], found.message


@pytest.mark.slow
@pytest.mark.parametrize("make", [Stream, Coin])
def test_random_programs_with_seeds(make: Any) -> None:
    (found,) = run(Subject(make), only=["machine.random_walk"], budget=replace(SMALL, seconds=2.0)).results
    assert found.verdict is Verdict.PASS, found.message


class Still(Stream):
    """Nothing is drawn."""

    def draw(self) -> int:
        return 0


class Ahead(Still):
    def _reseed(self, seed: int) -> None:
        self.t += 1


class AheadButForZero(Still):
    def _reseed(self, seed: int) -> None:
        self.t += seed > 0


class Younger(Still):
    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for number, child in enumerate(children):
            child.t += number if seed is not None else 0
        return children


@pytest.mark.parametrize(
    "make, check",
    [(Ahead, SEEDED[0]), (Ahead, SEEDED[1]), (AheadButForZero, SEEDED[0]), (Younger, SEEDED[1])],
)
def test_what_every_seed_changes_alike_is_a_fault(make: Any, check: str) -> None:
    found = result(make, check)
    assert found.verdict is Verdict.FAIL, found.evidence
    assert "more seeds give one and the same future" in found.message
    assert f"{make.__name__}#0.np_random" in found.message and "_reseed" in found.message


class Counted(Stream):
    count = 0

    def _reseed(self, seed: int) -> None:
        self.count += 1
        self.start(seed + self.count)


def test_a_seed_that_does_not_repeat_itself_is_a_fault() -> None:
    found = result(Counted, "restore.seeded")
    assert found.verdict is Verdict.FAIL and "two futures" in found.message, found.evidence


def test_what_nothing_draws_is_not_called_random() -> None:
    assert not Subject(Still).noise
    assert not result(Still, "restore.seeded").evidence["random"]


# What else of a restored environment can be asked.


class Paid(Still):
    """Rewards are seldom, and ``last`` is recomputed."""

    flawless = True

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        self.seen = int(observation)
        return observation, self.reward(), *rest

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seen = 0
        return super().reset(seed=seed, options=options)

    def reward(self) -> float:
        return 0.1 if self.t % 5 == 4 else 0

    def _transition(self) -> Transition:
        return Transition(self.seen, self.reward() if self.flawless else 0.0, False, self.t >= 12, {})

    def _capture(self) -> Any:
        return {**super()._capture(), "seen": self.seen}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.seen = state["seen"]


class Unpaid(Paid):
    flawless = False


class Halved(Paid):
    """Right in the environment that went on, wrong in those that are restored."""

    restored = False

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.restored = True

    def step(self, action: Any) -> Any:
        self.restored = False
        return super().step(action)

    def _transition(self) -> Transition:
        last = super()._transition()
        return last._replace(reward=last.reward / 2) if self.restored else last


def wrapped(make: Any = Paid) -> Any:
    return gym.wrappers.TransformReward(gym.wrappers.TimeLimit(make(), 8), lambda reward: reward + 1)


@pytest.mark.parametrize("make", [Unpaid, Halved, lambda: wrapped(Unpaid), lambda: wrapped(Halved)])
def test_the_reward_of_the_last_transition_is_compared(make: Any) -> None:
    found = result(make, "freshness.last_info")
    assert found.verdict is Verdict.FAIL and "reward: expected 0.1" in found.message, found.evidence


@pytest.mark.parametrize("make", [Paid, wrapped, Stream])
def test_the_last_transition_is_that_of_the_base_environment(make: Any) -> None:
    found = result(make, "freshness.last_info")
    assert found.verdict is Verdict.PASS and found.evidence["last transitions"] > 10, found.message


class SeedLost(ByProtocol):
    keeps_seed = False


@pytest.mark.parametrize("check", ["restore.random_streams", "fork.unseeded_exact"])
def test_the_seed_that_an_environment_reports_is_restored(check: str) -> None:
    found = result(SeedLost, check)
    assert found.verdict is Verdict.FAIL and "np_random_seed" in found.message, found.evidence
    assert "np_random_seed" not in result(ByProtocol, check).message


class Buffered(Stream):
    """Correct: draws three numbers ahead; a seed drops those that are left."""

    def start(self, seed: int) -> None:
        self.ahead: list[int] = []

    def draw(self) -> int:
        self.ahead = self.ahead or self.np_random.integers(90, size=3).tolist()
        return self.ahead.pop()

    def stream(self) -> Any:
        return self.ahead

    def put(self, stream: Any) -> None:
        self.ahead = stream


class SetBack(Buffered):
    """A seed sets the clock back, which shows when the episode should end."""

    def _reseed(self, seed: int) -> None:
        super()._reseed(seed)
        self.t = min(self.t, 1)


@pytest.mark.parametrize("check", ["restore.seeded", "fork.seeded_independent"])
def test_a_seed_in_the_middle_of_an_episode_changes_draws_alone(check: str) -> None:
    found = result(SetBack, check)
    assert found.verdict is Verdict.FAIL and "no draw decides" in found.message, found.message
    assert result(Buffered, check).verdict is Verdict.PASS


@pytest.mark.parametrize("check", ["restore.seeded", "fork.seeded_independent"])
def test_numbers_that_are_drawn_ahead_are_a_seeds_own(check: str) -> None:
    """The number of those left is no draw, and a seed decides it all the same."""
    subject = Subject(Buffered, observe_state=lambda env: {"left": len(env.unwrapped.ahead)})
    (found,) = run(subject, only=[check], budget=SMALL).results
    assert found.verdict is Verdict.PASS, found.message


class Idle(gym.Env[Any, Any]):
    """Correct, and by protocol alone: what it draws decides nothing, and is not said to be captured."""

    snapshot_spec = SnapshotSpec(rng=False, cross_process=False, cross_host=False)

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(100), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self.np_random.random()
        self.place = (3 * self.place + int(action) + 1) % 100
        return self.place, self.reward(), self.place == 7, False, {}

    def reward(self) -> Any:
        return 1.0

    def snapshot(self) -> Any:
        return [self.place]

    def restore(self, snap: Any, *, seed: int | None = None) -> Any:
        (self.place,) = snap
        return self.place, {}

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = [type(self)() for _ in range(k)]
        for child in children:
            child.restore(self.snapshot())
        return children


class TwoAims(Idle):
    """Correct: a reward for each of two aims."""

    def reward(self) -> Any:
        return np.array([1.0, 2.0])


def test_look_ahead_of_unusual_environments() -> None:
    found = result(Idle, "fork.look_ahead")
    assert found.verdict is Verdict.PASS, found.message
    found = result(TwoAims, "fork.look_ahead")
    assert found.verdict is Verdict.SKIP and "rewards that are numbers" in found.message, found.message
