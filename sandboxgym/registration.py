"""The ids of this package's environments. Registered on ``import sandboxgym``; nothing heavy is imported then."""

from __future__ import annotations

import gymnasium as gym

from sandboxgym.wrappers import SnapshotWrapper


def register_envs() -> None:
    """Register every id; each is made with `SnapshotWrapper` outermost. Idempotent."""
    if "sandboxgym/ALFWorld-v0" not in gym.registry:
        gym.register(
            "sandboxgym/ALFWorld-v0",
            entry_point="sandboxgym.envs.alfworld.env:ALFWorldEnv",
            max_episode_steps=50,  # the original's; the BPO paper uses 40
            additional_wrappers=(SnapshotWrapper.wrapper_spec(),),
        )
