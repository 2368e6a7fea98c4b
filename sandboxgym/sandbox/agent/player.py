"""An agent for the conformance suite, in environments with a shell: commands at random, and access to the shell."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.sandbox.agent.episode import AgentEnv

PATIENCE = 7
"""Number of commands after which it submits on a quarter of the tasks, so that the suite's runs of 8 steps (these are
slow environments) see the end of an episode. Other tasks continue, for the checks that need long episodes."""
_COMMANDS = (
    "ls -A",
    "pwd",
    "cat notes.txt",
    "echo one >> notes.txt; wc -l < notes.txt",
    "printf 'x%.0s' $(seq 400) > blob; wc -c < blob",
    "rm -f blob; ls",
    "mkdir -p deep/er && touch deep/er/file && find deep | sort",
    "rm -rf deep; ls",
    "mkdir -p inner && cd inner && pwd",  # not /tmp, where a backend that isolates nothing meets other programs
    "export COUNT=$((${COUNT:-0} + 1)); echo $COUNT",
    "list+=(item); echo ${#list[@]}",
    "greet() { echo hello $1; }; greet you",
    "greet again",
    "chmod 600 notes.txt; stat -c %a notes.txt",
    "ln -sf notes.txt link; readlink link",
    "false",
    "if true; then",
    "echo '1 passed in 0.01s'",
    "echo '1 failed in 0.01s'",
)
_OUTPUT = re.compile(r"<output>\n?(.*?)\n?</output>", re.DOTALL)


def player(*more: str) -> Callable[[Any, dict[str, Any], np.random.Generator], str]:
    """Make the hook ``actions``: commands with the same output in equal states; at times, it submits.

    Args:
        more: commands for these tasks, beside those that any shell can run.
    """
    commands: Sequence[str] = (*_COMMANDS, *more)

    def actions(observation: Any, info: dict[str, Any], rng: np.random.Generator) -> str:
        """Draw a command that an agent might run, with the same output in equal states; at times, submit."""
        hasty = zlib.crc32(info.get("task_id", "").encode()) % 4 == 2
        if rng.random() < 0.002 or (hasty and info.get("steps", 0) >= PATIENCE):
            return "submit"
        return commands[int(rng.integers(len(commands)))]

    return actions


def shell(env: gym.Env[Any, Any], command: str) -> str:
    """Run a command in the sandbox; returns its output."""
    observation = str(env.step(command)[0])
    found = _OUTPUT.search(observation)
    return found[1] if found else observation


def limits(env: gym.Env[Any, Any]) -> dict[str, float | None]:
    """Limits from the environment's arguments that the sandbox enforces."""
    inner = env.unwrapped
    assert isinstance(inner, AgentEnv)
    wanted, held = inner.limits
    return {name: getattr(wanted, name) for name in ("disk", "seconds") if name in held}
