"""Place of a run's environments: in its process, in worker processes, or on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import gymnasium as gym

from sandboxgym.arguments import parse_arguments
from sandboxgym.registration import card_of
from sandboxgym.tree import Envs
from sandboxgym.tree.envs import described, logger
from sandboxgym.workers.env_host import CallTimedOut, WorkerDied, env_maker

T = TypeVar("T")

TRIES = 3
"""Environments that are asked before a question counts as unanswered."""


def env_source(
    env_id: str,
    kwargs: Sequence[str],
    *,
    max_turns: int,
    place: Literal["local", "process", "ray"] = "local",
    workers: int = 0,
    timeout: float | None = None,
    address: str | None = None,
    store: str | None = None,
    store_every: int = 1,
    store_bandwidth: float = 0.0,
    threads: int = 1,
) -> Envs:
    """Make the source of a run's environments.

    Args:
        env_id: id of the environment.
        kwargs: arguments of the environment, as name=value.
        max_turns: step limit of an episode.
        place: where the environments live.
        workers: number of workers in other processes; 0: one per core.
        timeout: seconds that a step may take there; 0: no limit; None: none in worker processes, `deadlines` on Ray.
        address: of the Ray cluster; see `sandboxgym.workers.nodes.cluster.connect`.
        store: of `PooledEnvs`, for workers in other processes.
        store_every: its ``every_k_steps``.
        store_bandwidth: its ``bandwidth``; 0: no limit.
        threads: environments of this process that step at the same time.

    Raises:
        FleetError: the Ray cluster cannot be reached, or has no room for workers.
        DependencyNotInstalled: Ray is not installed.
    """
    make = env_maker(env_id, max_episode_steps=max_turns, **parse_arguments(kwargs))
    if place == "local":
        return Envs(make, threads=threads)
    limits: dict[str, Any] = {"threads": threads if threads > 1 else None, "timeout": timeout or None, "store": store}
    limits |= {"every_k_steps": store_every, "bandwidth": store_bandwidth or None}
    if place == "process":
        from sandboxgym.workers.pool import PooledEnvs

        return PooledEnvs(make, workers or None, **limits)
    from sandboxgym.workers.fleet import RayEnvs  # imports Ray

    if timeout is None:
        limits |= deadlines(env_id)
    return RayEnvs(make, workers or None, address=address, **limits)


def deadlines(env_id: str) -> dict[str, float]:
    """Seconds that a step and a reset may take on machines that may freeze, as arguments of `RayEnvs`.

    An environment ends its commands and tests itself; a minute later its worker counts as lost. Snapshots and restores
    have the reset's.
    """
    step = card_of(env_id).step_seconds + 60.0
    return {"timeout": step, "reset_timeout": max(600.0, step)}


def ask(envs: Envs, question: Callable[[gym.Env[Any, Any]], T]) -> T:
    """Answer of any of these environments to a question about all of them, its number of tasks, say.

    An environment that was lost with its worker knows no answer, and nothing is lost with it: another one is asked.

    Args:
        envs: the environments.
        question: a function of one that does not depend on what was done with it before. It may reset it.

    Raises:
        WorkerDied, CallTimedOut: so did the workers of several in a row.
    """
    for left in reversed(range(TRIES)):
        env = envs.take()
        while getattr(env, "lost", False):  # given back before its worker died
            envs.discard(env)
            env = envs.take()
        try:
            answer = question(env)
        except (WorkerDied, CallTimedOut) as error:
            envs.discard(env)
            if not left:
                raise
            logger.warning("another environment is asked: %s", described(error))
        except BaseException:
            envs.give(env)
            raise
        else:
            envs.give(env)
            return answer
    raise AssertionError
