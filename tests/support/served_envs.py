"""Environments for tests of servers: the toys, and one that misbehaves where its action says so."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import toy_envs

from sandboxgym import SnapshotEnv, SnapshotWrapper, Task, TaskEnv, TaskRows, Unicode

toy_envs.register()


class Trouble(TaskEnv[str, str]):
    """Do what the action says: nap SECONDS, raise, exit, or repeat it. Its live copies are files of a folder."""

    def __init__(self, folder: str, name: str = "") -> None:
        self.folder, self.name = folder, name
        self.observation_space, self.action_space = Unicode(), Unicode()
        self.mark = Path(folder, os.urandom(8).hex())
        self.mark.touch()
        self.said: list[str] = []

    def tasks(self, split: str | None = None) -> TaskRows:
        if split not in (None, "other"):
            raise ValueError(f"expected no split, or other, found {split!r}")
        return TaskRows(
            3 if split is None else 1, lambda place: Task(f"task {2 if split else place}", "Say something.")
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.place = self.chosen_task(options)
        self.said = []
        return f"task {self.place}, draw {self.np_random.integers(1000)}", self.told()

    def step(self, action: str):
        verb, _, rest = action.partition(" ")
        if verb == "nap":
            time.sleep(float(rest))
        elif verb == "raise":
            raise ZeroDivisionError("as \ud800 asked")
        elif verb == "exit":
            sys.exit(3)
        elif verb == "stop":
            raise StopIteration
        elif verb == "late":
            raise TimeoutError
        elif verb == "refuse":
            raise ValueError("expected a better action, found " + "x" * 10_000)
        self.said.append(action)
        reward = float("nan") if verb == "nan" else 1.0
        return " ".join(self.said) + f" {self.np_random.integers(1000)}", reward, verb == "end", False, self.told()

    def told(self) -> dict[str, Any]:
        return {"task_id": f"task {self.place}", "progress_key": "secret", "said": tuple(self.said), "object": object()}

    def close(self) -> None:
        self.mark.unlink(missing_ok=True)

    def _capture(self) -> list[Any]:
        return [self.place, list(self.said)]

    def _apply(self, state: list[Any]) -> None:
        self.place, self.said = state[0], list(state[1])


class Unwilling(SnapshotEnv[str, str]):
    """Cannot be made a second time."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        if self.made > 1:
            raise OSError("no room")
        self.observation_space, self.action_space = Unicode(), Unicode()


for env in (Trouble, Unwilling):
    if f"served/{env.__name__}-v0" not in gym.registry:
        gym.register(
            f"served/{env.__name__}-v0", entry_point=env, additional_wrappers=(SnapshotWrapper.wrapper_spec(),)
        )
