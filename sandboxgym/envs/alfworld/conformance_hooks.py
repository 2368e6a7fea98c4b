"""An agent for the conformance suite: ``--hook actions=sandboxgym.envs.alfworld.conformance_hooks:actions``."""

from __future__ import annotations

from typing import Any

import numpy as np


def actions(observation: Any, info: dict[str, Any], rng: np.random.Generator) -> str:
    """Draw an admissible command, or one time in ten one that no game understands."""
    commands = info["admissible_commands"]
    return "sing a song" if rng.random() < 0.1 else str(commands[int(rng.integers(len(commands)))])
