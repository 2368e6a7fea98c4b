"""Correct environments built differently from the package's own, on which the suite must not raise an alarm."""

from __future__ import annotations

import copy
import os
import sqlite3
import weakref
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from sandboxgym.conformance import Verdict
from sandboxgym.conformance.runner import run
from sandboxgym.conformance.subject import Subject
from sandboxgym.core import SnapshotSpec


class Handle:
    def __init__(self, state: Any) -> None:
        self.state = state


class Protocol(gym.Env[Any, Any]):
    """Snapshots by protocol alone; a walk of 25 steps."""

    snapshot_spec = SnapshotSpec(kind="memory")
    observation_space: spaces.Space[Any] = spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space: spaces.Space[Any] = spaces.Discrete(3)
    alive: ClassVar[set[int]] = set()
    info: dict[str, bool]

    def __init__(self) -> None:
        self.alive.add(id(self))
        self.kept = self  # its id is not used again
        self.action_space = copy.deepcopy(type(self).action_space)
        self.observation_space = copy.deepcopy(type(self).observation_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x, self.t, self.info = np.zeros(2), 0, {}
        return self.x.copy(), {}

    def step(self, action: Any) -> Any:
        self.x, self.t = self.x + float(np.sum(action)), self.t + 1
        return self.x.copy(), float(self.x[0]), self.t >= 25, False, {}

    def snapshot(self) -> Handle:
        return Handle(copy.deepcopy((self.x, self.t, self.info, self._np_random)))

    def restore(self, snap: Any, *, seed: int | None = None) -> Any:
        if not isinstance(snap, Handle):
            raise TypeError(f"expected a Handle, found {snap!r}")
        drawn = None if seed is None else np.random.default_rng(seed)
        self.x, self.t, self.info, self._np_random = copy.deepcopy(snap.state)
        self._np_random = self._np_random if drawn is None else drawn
        return self.x.copy(), dict(self.info)

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        here, children = self.snapshot(), []
        for index in range(k):
            child = type(self)()
            child.restore(here, seed=None if seed is None else 100 * seed + index + 7919)
            children.append(child)
        return children

    def close(self) -> None:
        self.alive.discard(id(self))


class Interned(Protocol):
    """Equal states have the same handle, as long as somebody has it."""

    handles: ClassVar[weakref.WeakValueDictionary[Any, Handle]] = weakref.WeakValueDictionary()

    def snapshot(self) -> Handle:
        drawn = self.np_random.bit_generator.state
        return self.handles.setdefault((*self.x.tolist(), self.t, str(drawn)), super().snapshot())


class Vectors(Protocol):
    """Actions are arrays, and rare ones show another key."""

    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        kind = int(abs(reward) * 2) % 7
        self.info = {f"k{kind}": True}
        return observation, float(kind % 3), terminated or kind == 6, truncated, dict(self.info)


class RefusesCopies(Protocol):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("use fork()")


class Threadbound(Protocol):
    """Holds a connection that only the thread that has made it can use."""

    def __init__(self) -> None:
        super().__init__()
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table t(x)")

    def step(self, action: Any) -> Any:
        self.base.execute("insert into t values(1)")
        return super().step(action)

    def close(self) -> None:
        self.base.close()
        super().close()


SETTINGS = {"gain": 1}


class Configured(Protocol):
    """Goes by what its process was told."""

    def step(self, action: Any) -> Any:
        return super().step(action * SETTINGS["gain"])


class Unrepeatable(Protocol):
    """No two runs are alike, though streams are captured."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return observation + int.from_bytes(os.urandom(2)), *rest


class BadForks(Protocol):
    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.x = child.x + 1
        return children


def verdict(env: Any, check: str, expected: Verdict) -> str:
    (result,) = run(Subject(env), only=[check]).results
    assert result.verdict is expected, (result.message, result.evidence)
    return result.message


@pytest.mark.parametrize("check", ["restore.coverage", "restore.diverge", "fork.diverge", "fork.crowd"])
def test_actions_that_are_arrays(check: str) -> None:
    verdict(Vectors, check, Verdict.PASS)


def test_an_environment_that_one_thread_alone_can_use() -> None:
    verdict(Threadbound, "restore.live_source", Verdict.PASS)


def test_a_protocol_that_refuses_deep_copies() -> None:
    assert "use fork()" in verdict(RefusesCopies, "fork.deepcopy", Verdict.SKIP)


def test_a_process_that_was_told_something_else_than_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "gain", 2)
    (result,) = run(Subject(Configured), only=["restore.diverge"]).results
    assert result.verdict is Verdict.PASS, result.message
    assert "untouched" in str(result.evidence["compared with a new process"])


def test_digests_of_nothing_that_repeats_are_not_judged() -> None:
    verdict(Unrepeatable, "snapshot.digest", Verdict.SKIP)


def test_forks_that_a_shortened_script_makes_are_closed() -> None:
    Protocol.alive.clear()
    verdict(BadForks, "fork.trace_equality", Verdict.FAIL)
    assert not Protocol.alive


@pytest.mark.parametrize("check", ["snapshot.relatives", "restore.no_steps"])
def test_a_handle_that_was_taken_twice_is_still_one_when_dropped_once(check: str) -> None:
    verdict(Interned, check, Verdict.PASS)
