"""Place of a run's environments: in its process, in worker processes, or on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import gymnasium as gym

from sandboxgym.arguments import parse_arguments
from sandboxgym.registration import card_of, hook
from sandboxgym.tree import Envs
from sandboxgym.tree.envs import described, logger
from sandboxgym.workers.env_host import CallTimedOut, WorkerDied, env_maker

if TYPE_CHECKING:
    from sandboxgym.workers.nodes.limits import Limits

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
    resources: Sequence[str] = (),
    labels: Sequence[str] = (),
    limits: Sequence[str] = (),
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
        resources: that Ray sets aside for each worker, as `needs_of` reads them.
        labels: of the nodes that may hold workers, as `labels_of` reads them.
        limits: of a node, as `limits_of` reads them.
        store: of `PooledEnvs`, for workers in other processes.
        store_every: its ``every_k_steps``.
        store_bandwidth: its ``bandwidth``; 0: no limit.
        threads: environments of this process that step at the same time.

    Raises:
        ValueError: ``kwargs``, ``resources``, ``labels`` or ``limits`` cannot be read.
        FleetError: the Ray cluster cannot be reached, or has no room for workers.
        DependencyNotInstalled: Ray is not installed.
    """
    arguments = parse_arguments(kwargs)
    make = env_maker(env_id, max_episode_steps=max_turns, **arguments)
    if place == "local":
        return Envs(make, threads=threads)
    options: dict[str, Any] = {"threads": threads if threads > 1 else None, "timeout": timeout or None, "store": store}
    options |= {"every_k_steps": store_every, "bandwidth": store_bandwidth or None}
    if place == "process":
        from sandboxgym.workers.pool import PooledEnvs

        return PooledEnvs(make, workers or None, **options)
    from sandboxgym.workers.fleet import RayEnvs  # imports Ray

    if timeout is None:
        options |= deadlines(env_id)
    options |= {**needs_of(resources), "labels": labels_of(labels), "limits": limits_of(limits)}
    options["prefer"] = holders(env_id, arguments, address, options.get("resources"))
    return RayEnvs(make, workers or None, address=address, **options)


def needs_of(texts: Sequence[str]) -> dict[str, Any]:
    """Arguments of `RayEnvs` for ``["CPU=0.5", "memory=4e9", "sandbox=1"]``; others than the first two are custom.

    Raises:
        ValueError: a text cannot be read, or a number is not one that Ray takes.
    """
    found = parse_arguments(texts)
    for name, value in found.items():
        if name in ("GPU", "object_store_memory"):
            raise ValueError(f"expected CPU, memory or resources that nodes were started with, found {name}")
        whole = name == "memory" or _positive(name, value) > 1
        if _positive(name, value) != int(value) and whole:
            raise ValueError(f"expected {name} to be a whole number, found {value}")
    named = {"CPU": "cpus", "memory": "memory"}
    needs = {named[name]: int(value) if name == "memory" else value for name, value in found.items() if name in named}
    return needs | {"resources": {name: value for name, value in found.items() if name not in named}}


def labels_of(texts: Sequence[str]) -> dict[str, str]:
    """Labels of nodes for ``["zone=in(a,b)", "images=swebench"]``, as Ray selects them.

    Raises:
        ValueError: a text cannot be read.
    """
    found = parse_arguments(texts)
    for name, value in found.items():
        if not isinstance(value, str) or not re.fullmatch(r"!?([\w.-]+|in\([\w.-]+(, *[\w.-]+)*\))", value):
            raise ValueError(f"expected {name} to be v, !v, in(v,w) or !in(v,w) (a number as '\"5\"'), found {value!r}")
    return found


def limits_of(texts: Sequence[str]) -> Limits | None:
    """Limits of a node for ``["environments=200", "creations_per_second=5"]``; None for none.

    Raises:
        ValueError: a text cannot be read, or names no limit.
    """
    if not texts:
        return None
    from sandboxgym.workers.nodes.limits import Limits  # imports Ray

    found = parse_arguments(texts)
    for name, value in found.items():
        if name not in Limits.__dataclass_fields__:
            raise ValueError(f"expected {', '.join(Limits.__dataclass_fields__)}, found {name}")
        _positive(name, value)
    return Limits(**found)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"expected {name} to be a number above 0, found {value!r}")
    return value


def holders(
    env_id: str, arguments: Mapping[str, Any], address: str | None, resources: Mapping[str, float] | None
) -> dict[str, int]:
    """Bytes of the images of an environment's tasks that were brought to nodes, by the nodes' ids."""
    named = card_of(env_id).images
    try:
        names = hook(named)(**arguments) if named else []
    except Exception as error:  # the data may be on the nodes alone; making the environment tells what is wrong
        logger.debug("the images of the tasks are not known here: %s", described(error))
        names = []
    if not names:
        return {}
    from sandboxgym.workers.nodes.cluster import connect
    from sandboxgym.workers.nodes.images import FleetImages

    connect(address)
    with contextlib.closing(FleetImages(resources=resources)) as images:
        return images.holders(names)


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
