"""Environments for the tests of workers, importable there: one that misbehaves on demand, one with a `Text` space."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from sandboxgym import SnapshotEnv, Unicode


class Trouble(SnapshotEnv[str, str]):
    """Environment that echoes its action, a count and a random number; ``"end"`` ends it, other words break it."""

    def __init__(self, pause: float = 0.0, render_mode: str | None = None) -> None:
        self.pause = pause
        self.render_mode = render_mode
        self.observation_space = Unicode()
        self.action_space = Unicode(("a", "b", "c"))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        misbehave((options or {}).get("do", ""))
        self.said = [str((options or {}).get("task", "start"))]
        return self._text(), {"count": 0, "said": list(self.said)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.pause)
        misbehave(action)
        self.said.append(action)
        info = {"count": len(self.said) - 1, "said": list(self.said), "draw": float(self.np_random.random())}
        return self._text(), float(len(self.said)), action == "end", False, info

    def _text(self) -> str:
        return f"{self.said[-1]} {len(self.said)}"

    def _capture(self) -> list[str]:
        return self.said

    def _apply(self, state: list[str]) -> None:
        self.said = state


def misbehave(what: str) -> None:
    if what == "raise":
        raise RuntimeError("the sandbox is gone")
    if what == "hang":
        time.sleep(60)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        raise SystemExit(3)


class Unpicklable(Exception):
    """Environment with two arguments, so that default pickling cannot rebuild it."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Said(SnapshotEnv[str, str]):
    """Environment with Gymnasium's own ``Text`` space; ends at the third step."""

    def __init__(self) -> None:
        self.observation_space = spaces.Text(20)
        self.action_space = spaces.Text(20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return f"{action}{self.steps}", 1.0, self.steps == 3, False, {}

    def _capture(self) -> int:
        return self.steps

    def _apply(self, state: int) -> None:
        self.steps = state


def register() -> None:
    from sandboxgym import SnapshotWrapper

    for name, env in (("Trouble", Trouble), ("Said", Said)):
        if f"toys/{name}-v0" not in gym.registry:
            wrappers = (SnapshotWrapper.wrapper_spec(),)
            gym.register(f"toys/{name}-v0", entry_point=env, max_episode_steps=12, additional_wrappers=wrappers)
