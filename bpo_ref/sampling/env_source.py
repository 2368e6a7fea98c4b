"""Where the environments of a run live: in its process, in worker processes, or on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym

from bpo_ref.args import Args
from sandboxgym.arguments import parse_arguments
from sandboxgym.tree import Envs


def env_source(args: Args, kwargs: Sequence[str]) -> Envs:
    """A source of a run's environments.

    Args:
        args: ``env_id``, ``max_turns``, and the settings that begin with ``env``, are used.
        kwargs: arguments of the environment, as name=value.

    Raises:
        FleetError: the Ray cluster cannot be reached, or has no room for workers.
        DependencyNotInstalled: Ray is not installed.
    """
    settings = {"max_episode_steps": args.max_turns, **parse_arguments(kwargs)}
    if args.envs == "local":
        return Envs(lambda: gym.make(args.env_id, **settings), threads=args.env_threads)
    deadline = args.env_timeout or None
    threads = args.env_threads if args.env_threads > 1 else None
    if args.envs == "process":
        from sandboxgym.workers.pool import PooledEnvs

        return PooledEnvs(args.env_id, args.env_workers or None, threads=threads, timeout=deadline, **settings)
    from sandboxgym.workers.fleet import RayEnvs

    return RayEnvs(
        args.env_id,
        args.env_workers or None,
        address=args.ray_address,
        threads=threads,
        timeout=deadline,
        **settings,
    )
