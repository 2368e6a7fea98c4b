"""Try a fleet: trees of random play on its nodes, compared with those of this process.

RAY_ADDRESS=HEAD:6379 RAY_AUTH_MODE=token python rollout.py
"""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym

from sandboxgym.tree import Action, Context, Envs, ForkAt, RolloutTree, rollout
from sandboxgym.workers.fleet import RayEnvs


def policy(contexts: Sequence[Context]) -> list[Action]:
    """A random admissible command for each path."""
    return [Action(str(context.rng.choice(context.info["admissible_commands"]))) for context in contexts]


def grown(envs: Envs) -> list[RolloutTree]:
    """Trees of eight tasks."""
    return rollout(envs, policy, ForkAt([3], width=4), tasks=range(8), retries=3)


def rewards(trees: Sequence[RolloutTree]) -> list[list[tuple[str, float]]]:
    """Actions and rewards of each path."""
    return [[(edge.action.text, edge.reward) for edge in path.edges] for tree in trees for path in tree.paths]


def main() -> None:
    """Roll out there and here, and compare."""
    with RayEnvs("sandboxgym/ALFWorld-v0", 4, timeout=60, max_episode_steps=20) as envs:
        there = grown(envs)
        nodes = {shared.worker.node for shared in envs._slots} - {None}  # type: ignore[attr-defined]
    with Envs(lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=20)) as envs:
        here = grown(envs)
    same = "the same as" if rewards(there) == rewards(here) else "OTHERS THAN"
    print(f"{sum(len(tree.paths) for tree in there)} paths on {len(nodes)} nodes, {same} in this process")


if __name__ == "__main__":
    main()
