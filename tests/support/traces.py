"""Runs of an environment as values that can be compared with ``==``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.randomness import capture

IDS = ("toys/Corridor-v0", "toys/Dice-v0", "sandboxgym/ALFWorld-v0")
TOYS = IDS[:2]
LIMIT = 12

ACTIONS: dict[str, Sequence[Any]] = {
    "toys/Corridor-v0": (1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1),  # the goal in the very step of the time limit
    "toys/Dice-v0": (0, 1, 0, 0, 2, 0, 1, 0, 0, 0, 0, 0),
    "sandboxgym/ALFWorld-v0": (  # wins in the very step of the time limit
        "look",
        "go to shelf 1",
        "nonsense",
        "take book 1 from shelf 1",
        "inventory",
        "look",
        "go to table 1",
        "inventory",
        "nonsense",
        "look",
        "inventory",
        "move book 1 to table 1",
    ),
}


def plain(value: Any) -> Any:
    """Convert NumPy's arrays and scalars to values that compare exactly, types included."""
    if isinstance(value, (np.ndarray, np.generic)):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def started(env_id: str, *, seed: int = 3, steps: int = 0, **arguments: Any) -> gym.Env[Any, Any]:
    """Make an environment some steps into the episode of `ACTIONS`, its spaces seeded too."""
    env = gym.make(env_id, **{"max_episode_steps": LIMIT, **arguments})
    env.action_space.seed(seed)
    env.observation_space.seed(seed)
    env.reset(seed=seed, options={"game": 0})
    trace(env, ACTIONS[env_id][:steps])
    return env


def trace(env: gym.Env[Any, Any], actions: Sequence[Any]) -> list[Any]:
    """All results of the steps, up to the end of the actions or of the episode."""
    transitions = []
    for action in actions:
        transitions.append(plain(env.step(action)))
        if transitions[-1][2] or transitions[-1][3]:
            break
    return transitions


def future(env: gym.Env[Any, Any], env_id: str, steps: int = 0) -> list[Any]:
    """Rest of the episode, then values of the environment's and the spaces' random streams."""
    rest = trace(env, ACTIONS[env_id][steps:])
    return [
        *rest,
        plain(env.np_random.random(3)),
        plain(env.action_space.sample()),
        plain(env.observation_space.sample()),
    ]


def control(env_id: str, steps: int = 0) -> list[Any]:
    """The future of an episode in which no snapshot was ever taken."""
    return future(started(env_id, steps=steps), env_id, steps)


def fresh_interpreter(code: str, *arguments: Any, cwd: Any, **variables: str) -> str:
    """Run ``code`` in a new Python in ``cwd`` that can import the package and the toys; returns its output."""
    path = os.pathsep.join((str(Path(__file__).parents[2]), str(Path(__file__).parent)))
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def streams(env: gym.Env[Any, Any]) -> list[Any]:
    """Captured states of the streams of an environment and its spaces."""
    return [plain(capture(one._np_random)) for one in (env.unwrapped, env.action_space, env.observation_space)]
