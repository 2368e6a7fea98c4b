"""Environments that fail in the middle of a rollout, at calls that a test chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest

import sandboxgym.wrappers.jobs as jobs
from sandboxgym import register_wrapper


class Mortal(gym.Wrapper):
    """Dies at the calls that ``fate`` names, and is of no use after that."""

    fate: Callable[[str, int], bool]
    """True if a call dies, by its name and the number of those before it."""
    calls: Counter[str]
    closed: list[Mortal]

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.dead = False

    def meet(self, call: str) -> None:
        self.dead = self.dead or Mortal.fate(call, Mortal.calls[call])
        Mortal.calls[call] += 1
        if self.dead:
            raise ConnectionError(f"gone at {call}")

    def reset(self, **kwargs: Any):
        self.meet("reset")
        return super().reset(**kwargs)

    def step(self, action: Any):
        self.meet("step")
        return super().step(action)

    def close(self) -> None:
        Mortal.closed.append(self)
        if self.dead:
            raise ConnectionError("gone at close")
        super().close()


register_wrapper(Mortal)


class Fragile(gym.Wrapper):
    """Fails at the action ``break``."""

    def step(self, action: Any):
        if action == "break":
            raise ConnectionError("broken")
        return super().step(action)


register_wrapper(Fragile)


class Refusing(gym.Wrapper):
    """Cannot be reset to one of the tasks."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        if options == {"task": 1}:
            raise ConnectionError("no such image")
        return super().reset(seed=seed, options=options)


register_wrapper(Refusing)


def let_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of `Mortal` fail, to take a snapshot and to restore one included; none does before a test says so."""
    capture, restore = jobs.snapshot, jobs.restore

    def taking(env: Any) -> Any:
        env.meet("snapshot")
        return capture(env)

    def bringing_back(env: Any, snap: Any, *, seed: int | None) -> Any:
        env.meet("restore")
        return restore(env, snap, seed=seed)

    monkeypatch.setattr(jobs, "snapshot", taking)
    monkeypatch.setattr(jobs, "restore", bringing_back)
    monkeypatch.setattr(Mortal, "fate", staticmethod(lambda call, before: False), raising=False)
    monkeypatch.setattr(Mortal, "calls", Counter(), raising=False)
    monkeypatch.setattr(Mortal, "closed", [], raising=False)
