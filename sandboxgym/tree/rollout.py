"""Rollouts of a policy: one tree per task, forked where a schedule says so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sandboxgym.tree.asynchronous import Asynchronous, AsyncPolicy
from sandboxgym.tree.envs import EnvSource
from sandboxgym.tree.journal import Journal, Journaled, JournaledAsynchronous
from sandboxgym.tree.lockstep import Lockstep
from sandboxgym.tree.nodes import RolloutTree
from sandboxgym.tree.policies import Clock, Failure, Look, Policy
from sandboxgym.tree.schedules import Schedule


def rollout(
    envs: EnvSource,
    policy: Policy,
    schedule: Schedule,
    *,
    tasks: Sequence[Any] = (None,),
    seed: Sequence[int] = (0,),
    indices: Sequence[int] | None = None,
    max_live: int = 1024,
    overlap: bool = False,
    clock: Clock | None = None,
    retries: int = 0,
    failures: list[Failure] | None = None,
    look: Look | None = None,
    capture_every: int = 0,
    journal: Journal | None = None,
    timeout: float | None = None,
) -> list[RolloutTree]:
    """Roll out one tree per task.

    Paths advance in lockstep, one call of the policy for all that are live; paths that start while others run are
    rolled out in the next wave.

    With ``overlap`` the tasks are two halves, and while the policy decides for one, the environments of the other step
    in threads. The halves alternate, regardless of which is ready first, so every run gives the same trees. They equal
    the trees without ``overlap`` if the policy's decision for a path does not depend on the other paths in the call.
    Overlap pays where environments are slow: deciding for two halves takes longer than for all paths at once.

    With ``retries`` an environment that raises costs its episode at most, not the rollout. Another one takes its place:
    restored from the path's last snapshot, then led through the actions since, which must show the same observations
    again. No decision is made twice, and trees do not depend on which environments failed. A path that cannot be
    recovered is dropped with all its forks, and a tree without paths is left out of the result. This biases no estimate
    as long as failures do not depend on what the policy does.

    Args:
        envs: source of live environments; all are given back at the end, also after an error.
        policy: see `Policy`.
        schedule: rule for forking.
        tasks: given to ``env.reset(options={"task": task})``; None resets without options.
        seed: key of all random streams (a trainer's seed and update number, say).
        indices: the tasks' numbers in a larger batch, of which these are a part (default 0, 1, …).
        max_live: most environments live at once.
        overlap: see above.
        clock: is told how long was waited for what.
        retries: environments that a path may lose before it is dropped. 0: the first error is raised.
        failures: is told of every environment that was lost.
        look: is asked of every state in which the policy acts; see `Look`.
        capture_every: with ``retries``, or a journal: steps of a path after which it is captured although nothing will
            fork there, so that fewer actions have to be repeated; 0: never. For environments with long steps.
        journal: keeps what environments answer in a file, from which another process continues the rollout.
        timeout: seconds after which paths that have not ended are dropped as if their environments had failed too
            often, and no others begin. A step under way is waited for. Slow episodes are then missing, which may favour
            what is quick: a limit for when something is wrong. None: as long as it takes.

    Raises:
        ValueError: a journal was given with ``look``.
        TimeoutError: of the timeout, unless there are ``retries``.
        Exception: whatever an environment raised, unless there are ``retries``.
    """
    places = indices if indices is not None else range(len(tasks))
    failed: list[Failure] = failures if failures is not None else []
    with ThreadPoolExecutor(2, thread_name_prefix="sandboxgym-rollout") as halves:  # no thread unless it is used
        background = halves if overlap else None
        limits = (retries, failed, look, capture_every, timeout)
        given = (envs, policy, schedule, seed, clock or Clock(), background, *limits)
        if journal is None:
            return Lockstep(*given).run(tasks, places, max_live)
        return Journaled(journal, *given).run(tasks, places, max_live)


async def rollout_async(
    envs: EnvSource,
    policy: AsyncPolicy,
    schedule: Schedule,
    *,
    tasks: Sequence[Any] = (None,),
    seed: Sequence[int] = (0,),
    indices: Sequence[int] | None = None,
    max_live: int = 1024,
    clock: Clock | None = None,
    retries: int = 0,
    failures: list[Failure] | None = None,
    look: Look | None = None,
    capture_every: int = 0,
    journal: Journal | None = None,
    timeout: float | None = None,
) -> list[RolloutTree]:
    """Roll out one tree per task, every path by itself; the trees are those of `rollout`.

    A path that is captured at every step (`Schedule.watches`) is captured while the policy decides. A fork starts once
    the step that requested it has been executed, or the path that requested it has ended, and an environment is free.

    Args:
        envs: as for `rollout`. Environments work in threads, as many at a time as ``Envs(threads=…)`` or
            ``PooledEnvs(threads=…)`` say.
        policy: see `AsyncPolicy`.
        schedule: rule for forking; see the docs, "Asynchronous rollouts", for what it may look at.
        tasks: as for `rollout`, as are the arguments that follow.
        seed: see there.
        indices: see there.
        max_live: most environments live at once.
        clock: is told how long was waited for what: a moment in which several paths wait counts in equal parts.
        retries: see there; as often an environment is asked for again that could not be made.
        failures: is told of every environment that was lost, when the rollout ends. `Failure.dropped` counts forks of a
            dropped path that had started, too.
        look: see there.
        capture_every: see there.
        journal: see there; either driver continues what the other has written.
        timeout: see there. At the deadline the policy's calls are cancelled, and environments finish the calls that are
            under way; a path takes forks along that have ended already.

    Raises:
        ValueError: a journal was given with ``look``.
        TimeoutError: of the timeout, unless there are ``retries``.
        TypeError: the policy is not asynchronous.
        Exception: whatever an environment (unless there are ``retries``) or the policy raised first.
        RuntimeError: a call of the policy was cancelled, and not by this rollout.
    """
    places = indices if indices is not None else range(len(tasks))
    failed: list[Failure] = failures if failures is not None else []
    given = (envs, policy, schedule, seed, clock or Clock(), retries, failed, look, capture_every, timeout)
    if journal is None:
        return await Asynchronous(*given, max_live=max_live).run(tasks, places)
    return await JournaledAsynchronous(journal, *given, max_live=max_live).run(tasks, places)
