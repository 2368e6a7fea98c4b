"""The ids of this package's environments. Registered on ``import sandboxgym``; nothing heavy is imported then."""

from __future__ import annotations

import gymnasium as gym

from sandboxgym.wrappers import SnapshotWrapper

_ENVS = {  # entry point below sandboxgym.envs, step limit
    "sandboxgym/ALFWorld-v0": ("alfworld.env:ALFWorldEnv", 50),  # the original's; the BPO paper uses 40
    "sandboxgym/WebShop-v0": ("webshop.env:WebShopEnv", 50),  # the BPO paper's
    "sandboxgym/WebShopBrowser-v0": ("webshop.browser:WebShopBrowserEnv", 50),
    "sandboxgym/SWEBench-v0": ("swebench.env:SWEBenchEnv", 25),  # the BPO paper's
}


def register_envs() -> None:
    """Register every id; each is made with `SnapshotWrapper` outermost. Idempotent."""
    for name, (entry_point, max_episode_steps) in _ENVS.items():
        if name not in gym.registry:
            gym.register(
                name,
                entry_point=f"sandboxgym.envs.{entry_point}",
                max_episode_steps=max_episode_steps,
                additional_wrappers=(SnapshotWrapper.wrapper_spec(),),
            )
