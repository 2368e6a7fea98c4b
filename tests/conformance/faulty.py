"""Environments with one fault each, and factories that other processes can import by name."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
from toy_envs import Corridor, Dice

from sandboxgym import SnapshotSpec
from sandboxgym.conformance.baselines import DeepCopySnapshots


class Shared(Corridor):
    """Fault: an environment and its snapshots share the log of visited cells."""

    def snapshot(self):
        snap = super().snapshot()
        snap._body.state["visited"] = self.state["visited"]
        return snap


class Unseeded(Dice):
    """Fault: a restore leaves the random stream unchanged."""

    def restore(self, snap, *, seed=None):
        before = self.np_random.bit_generator.state if self._was_reset else None
        result = super().restore(snap, seed=seed)
        if before is not None:
            self.np_random.bit_generator.state = before
        return result


class Flaky(Corridor):
    """Fault: every 40th restore forgets the way."""

    restores = 0

    def _apply(self, state):
        self.restores += 1
        self.state = {**state, "visited": [0]} if self.restores % 40 == 0 else state


class Replaying(Corridor):
    """Fault: declares constant cost, and takes time for each step of the episode."""

    def __init__(self, length: int = 500, render_mode: str | None = None) -> None:
        super().__init__(length, render_mode)

    def _apply(self, state):
        for _ in range(200 * len(state["visited"])):
            pass
        self.state = state


class Foreign(gym.Env[int, int]):
    """A third party's environment, which uses nothing of the package but the protocol."""

    snapshot_spec = SimpleNamespace(kind="memory", cost="constant", rng=True, cross_process=False, cross_host=False)
    observation_space = gym.spaces.Discrete(100)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation_space, self.action_space = gym.spaces.Discrete(100), gym.spaces.Discrete(2)
        self.at: int | None = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return 0, {}

    def step(self, action):
        self.at += int(action) + int(self.np_random.integers(2))
        return self.at, float(self.at % 3), self.at >= 20, False, {}

    def snapshot(self):
        from copy import deepcopy

        if self.at is None:
            raise gym.error.ResetNeeded("reset first")
        self.np_random, self.action_space.np_random, self.observation_space.np_random  # noqa: B018
        return ("foreign", deepcopy(vars(self)))

    def restore(self, snap, *, seed=None):
        from copy import deepcopy

        name, content = snap
        if name != "foreign":
            raise TypeError("not a snapshot of this environment")
        vars(self).clear()
        vars(self).update(deepcopy(content))
        if seed is not None:
            self._np_random, self._np_random_seed = gym.utils.seeding.np_random(seed)
        return self.at, {}

    def fork(self, k, *, seed=None):
        if k < 1:
            raise ValueError("at least one")
        children = [type(self)() for _ in range(k)]
        for index, child in enumerate(children):
            child.restore(self.snapshot(), seed=None if seed is None else seed * 1000 + index)
        return children


def deep_copied(id: str = "FrozenLake-v1", **arguments: Any) -> DeepCopySnapshots:
    return DeepCopySnapshots(gym.make(id, **arguments))


class Undeclared(Dice):
    """Environment that declares random streams as not captured."""

    snapshot_spec = SnapshotSpec(rng=False)


class Pickled:
    """Fault: a handle that unpickles any file it is given."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def save(self, path: Any) -> None:
        Path(path).write_bytes(pickle.dumps(self.content))

    @classmethod
    def load(cls, path: Any) -> Pickled:
        return cls(pickle.loads(Path(path).read_bytes()))

    def release(self) -> None:
        """Forget to release."""


class RunsFiles(Foreign):
    def snapshot(self):
        return Pickled(super().snapshot())

    def restore(self, snap, *, seed=None):
        return super().restore(snap.content, seed=seed)


NeverReleases = RunsFiles


class AcceptsAll(Corridor):
    """Fault: accepts any object as a snapshot of its own."""

    def restore(self, snap, *, seed=None):
        try:
            return super().restore(snap, seed=seed)
        except Exception:
            return self._observation(), {}


class LeaksThreads(Corridor):
    """Fault: every fork starts a thread that nothing stops."""

    def fork(self, k, *, seed=None):
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # not for a time: rounds may take long
        return super().fork(k, seed=seed)


class KeepsChildren(Foreign):
    """Fault: all forks ever made stay in a list until a fork is complete."""

    made: list[Any] = []

    def fork(self, k, *, seed=None):
        if k < 1:
            raise ValueError("at least one")
        for _ in range(k):
            self.made.append(type(self)())
            self.made[-1].restore(self.snapshot())
        children, self.made[:] = self.made[:], []
        return children


class LeavesReports(Corridor):
    """Fault: every fork that fails leaves a file."""

    reports = math.inf
    """Number of files that may be written."""

    def fork(self, k, *, seed=None):
        try:
            return super().fork(k, seed=seed)
        except Exception:
            if type(self).reports > 0:
                type(self).reports -= 1
                os.close(tempfile.mkstemp()[0])
            raise


class LeavesOneReport(LeavesReports):
    """No fault: the first fork that fails leaves a file, as a cache or another process does at some time."""

    reports = 1


class KeepsAFailure(Corridor):
    """Fault: the last fork that failed leaves descriptors, which the next one closes.

    Five, for what runs beside a test may close one of its own meanwhile.
    """

    left: list[int] = []

    def fork(self, k, *, seed=None):
        try:
            return super().fork(k, seed=seed)
        except Exception:
            while self.left:
                os.close(self.left.pop())
            self.left.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(5))
            raise


class CountsTogether(Corridor):
    """Fault: the steps of all environments are counted in one attribute of the class."""

    steps = [0]

    def reset(self, *, seed=None, options=None):
        self.steps[0] = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps[0] += 1
        *rest, info = super().step(action)
        return (*rest, {**info, "steps": self.steps[0]})

    def _capture(self):
        return {**self.state, "steps": self.steps[0]}

    def _apply(self, state):
        self.steps[0] = state.pop("steps")
        self.state = state


class HashDependent(Corridor):
    """Fault: a name is chosen by the order of a set."""

    def reset(self, *, seed=None, options=None):
        self.names = list({f"name {number}" for number in range(20)})
        return super().reset(seed=seed, options=options)

    def _capture(self):
        return {**self.state, "names": set(self.names)}

    def _apply(self, state):
        self.names = list(state.pop("names"))
        self.state = state

    def step(self, action):
        *rest, info = super().step(action)
        return (*rest, {**info, "name": self.names[0]})


def dice(correct: bool = True) -> Dice:
    return Dice() if correct else Unseeded()


def no_action(observation: Any, info: dict[str, Any], rng: Any) -> Any:
    """A hook that fails, to be named on a command line."""
    raise RuntimeError("no action today")


NUMBER = 1
