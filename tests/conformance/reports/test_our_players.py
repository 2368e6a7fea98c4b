"""The agents for certifying our environments reach states that random admissible actions do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sandboxgym.envs.alfworld import conformance_hooks as household
from sandboxgym.envs.webshop import conformance_hooks as shop


@pytest.mark.parametrize("play", [household.actions, shop.actions])
def test_most_actions_are_admissible_and_some_are_not(play: Any) -> None:
    rng = np.random.default_rng(0)
    info = {"admissible_commands": ["look", "inventory"]}
    played = [play("", info, rng) for _ in range(400)]
    odd = [action for action in played if action not in info["admissible_commands"]]
    assert 20 < len(odd) < 80 and {"look", "inventory"} < set(played)
    assert all(isinstance(action, str) for action in played)
