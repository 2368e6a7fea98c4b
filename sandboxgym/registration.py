"""Ids of this package's environments, registered on ``import sandboxgym`` without importing anything heavy."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from sandboxgym.wrappers import SnapshotWrapper

_ENVS = {  # entry point below sandboxgym.envs, step limit
    "sandboxgym/ALFWorld-v0": ("alfworld.env:ALFWorldEnv", 50),  # the original's; the BPO paper uses 40
    "sandboxgym/WebShop-v0": ("webshop.env:WebShopEnv", 50),  # the BPO paper's
    "sandboxgym/WebShopBrowser-v0": ("webshop.browser:WebShopBrowserEnv", 50),
    "sandboxgym/SWEBench-v0": ("swebench.env:SWEBenchEnv", 25),  # the BPO paper's
}


def register_envs() -> None:
    """Register every id, each with `SnapshotWrapper` outermost. Idempotent."""
    for name, (entry_point, max_episode_steps) in _ENVS.items():
        if name not in gym.registry:
            gym.register(
                name,
                entry_point=f"sandboxgym.envs.{entry_point}",
                max_episode_steps=max_episode_steps,
                additional_wrappers=(SnapshotWrapper.wrapper_spec(),),
            )


def make(id: str, **kwargs: Any) -> SnapshotWrapper:
    """`gymnasium.make`, typed: the environment has ``snapshot``, ``restore`` and ``fork``.

    Args:
        id: of this package with or without ``sandboxgym/``, or any other registered one whose environment has the
            protocol; that one is wrapped.
        kwargs: of `gymnasium.make` and of the environment, such as ``max_episode_steps`` and ``games``.

    Raises:
        gymnasium.error.NameNotFound: there is no such id; the message has the nearest one.
        TypeError: an environment without the protocol was made, and closed again.
    """
    short = f"sandboxgym/{id}"
    env = gym.make(short if id not in gym.registry and short in gym.registry else id, **kwargs)
    if isinstance(env, SnapshotWrapper):
        return env
    if not all(callable(getattr(env.unwrapped, name, None)) for name in ("snapshot", "restore", "fork")):
        env.close()
        raise TypeError(f"{id}: expected an environment with snapshot, restore and fork, found {type(env.unwrapped)}")
    return SnapshotWrapper(env)
