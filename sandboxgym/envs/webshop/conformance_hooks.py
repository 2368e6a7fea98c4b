"""An agent for the conformance suite: ``--hook actions=sandboxgym.envs.webshop.conformance_hooks:actions``."""

from __future__ import annotations

from typing import Any

import numpy as np

ELSEWHERE = ("search[<r>]", "click[nothing]")
"""Actions that no page offers, and the original's search for random products (with ``compat="upstream"``)."""


def actions(observation: Any, info: dict[str, Any], rng: np.random.Generator) -> str:
    """Draw an admissible action, or one time in ten one of `ELSEWHERE`."""
    commands = ELSEWHERE if rng.random() < 0.1 else info["admissible_commands"]
    return str(commands[int(rng.integers(len(commands)))]) if commands else "click[back to search]"
