"""Hooks of `HarborEnv` for the conformance suite: an agent's actions, and access to its shell.

HOOKS=sandboxgym.envs.harbor.conformance_hooks
python -m sandboxgym.conformance sandboxgym/Harbor-v0 --hook actions=$HOOKS:actions --hook shell=$HOOKS:shell \
    --hook limits=$HOOKS:limits
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.envs.harbor.env import HarborEnv

_COMMANDS = (
    "ls -A",
    "pwd",
    "cat notes.txt",
    "echo one >> notes.txt; wc -l < notes.txt",
    "printf 'x%.0s' $(seq 400) > blob; wc -c < blob",
    "rm -f blob; ls",
    "mkdir -p deep/er && touch deep/er/file && find deep | sort",
    "rm -rf deep; ls",
    "cd /tmp && pwd",
    "cd /app && pwd",
    "export COUNT=$((${COUNT:-0} + 1)); echo $COUNT",
    "list+=(item); echo ${#list[@]}",
    "greet() { echo hello $1; }; greet you",
    "greet again",
    "chmod 600 notes.txt; stat -c %a notes.txt",
    "ln -sf notes.txt link; readlink link",
    "false",
    "if true; then",
    "cat > /etc/motd <<< welcome; cat /etc/motd",
)
PATIENCE = 7
"""Number of commands after which it submits on a quarter of the tasks, so that the suite's runs of 8 steps (this is a
slow environment) see the end of an episode. Other tasks continue, for the checks that need long episodes."""
_OUTPUT = re.compile(r"<output>\n?(.*?)\n?</output>", re.DOTALL)


def actions(observation: Any, info: dict[str, Any], rng: np.random.Generator) -> str:
    """Draw a command that an agent might run, with the same output in equal states; at times, submit."""
    hasty = zlib.crc32(info.get("task_id", "").encode()) % 4 == 2
    if rng.random() < 0.002 or (hasty and info.get("steps", 0) >= PATIENCE):
        return "submit"
    return _COMMANDS[int(rng.integers(len(_COMMANDS)))]


def shell(env: gym.Env[Any, Any], command: str) -> str:
    """Run a command in the sandbox; returns its output."""
    observation = str(env.step(command)[0])
    found = _OUTPUT.search(observation)
    return found[1] if found else observation


def limits(env: gym.Env[Any, Any]) -> dict[str, float | None]:
    """Limits from the environment's arguments that the sandbox enforces."""
    inner = env.unwrapped
    assert isinstance(inner, HarborEnv)
    wanted, held = inner.limits
    return {name: getattr(wanted, name) for name in ("disk", "seconds") if name in held}
