"""Rollouts of a policy: one tree per task, forked where a schedule says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym
import numpy as np

from sandboxgym.tree.envs import EnvSource
from sandboxgym.tree.nodes import Action, PathKey, RolloutTree
from sandboxgym.tree.schedules import Schedule

if TYPE_CHECKING:
    from sandboxgym.tree.journal import Journal


@dataclass(slots=True)
class Context:
    """Input of a policy's decision: the present step of one path."""

    path: tuple[int, PathKey]
    """(task index, path key): unique within a rollout."""
    observation: Any
    info: dict[str, Any]
    depth: int
    memory: Any
    """`Action.memory` of the step before, None at the root."""
    rng: np.random.Generator
    """The path's own stream."""


class Policy(Protocol):
    """Protocol of policies: decide for all live paths at once, by any function of the contexts.

    One that keeps something of its paths, to continue from it in their forks, may have a method ``release(path)`` as
    well: it is called with `Context.path` once the path has ended and nothing will start from its states any more. A
    fork's key is that of the path which reached its first state, followed by one pair.
    """

    def __call__(self, contexts: Sequence[Context], /) -> Sequence[Action | None]:
        """One action per context; None ends that path as truncated (no room left to act)."""


Look = Callable[[gym.Env[Any, Any], dict[str, Any]], Any]
"""Looks ahead from a state, given its environment and info, once, before an action is executed there; what it
returns becomes `Node.ahead`. It leaves the environment as it is (`sandboxgym.successors` does), may be called by
several threads at once, and what it raises counts as raised by the environment."""


@dataclass(slots=True)
class Clock:
    """Wall-clock seconds that rollouts spent waiting, by cause; `rollout` adds to it."""

    policy: float = 0.0
    steps: float = 0.0
    """Steps and resets of environments; those that work at the same time as others, or as the policy, count once."""
    snapshots: float = 0.0
    """Snapshots and restores, counted like ``steps``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An environment that raised, in a rollout with ``retries``; or a task that a policy has no room to begin."""

    task: int
    """Index of the tree."""
    path: PathKey
    """Key of the path; () where it was the reset to the task."""
    depth: int
    """Steps since the root."""
    error: str
    """The exception as text, or why there is no room."""
    dropped: int = 0
    """Paths lost by the failure, those forked off it included; 0: the path continued."""
    too_long: bool = False
    """True if the policy could not act at all (`Policy` returned None for the first step)."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A path that continues with another environment, in a rollout with ``retries``."""

    task: int
    """Index of the tree."""
    path: PathKey
    """Key of the path."""
    depth: int
    """Steps since the root."""
    kind: str
    """Start of the replay: the last ``"snapshot"`` on the path, the ``"fork"`` where it begins, or a ``"reset"``."""
    actions: int
    """Actions that were repeated."""
    error: str
    """The exception of the environment that was lost, as text."""


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
    in threads. The halves take turns, whichever is ready first, so that the trees are the same each time; and those
    without ``overlap``, of a policy that decides alike whatever other paths it is asked about. It pays where
    environments take long: to decide for two halves takes longer than for all paths at once.

    With ``retries`` an environment that raises costs its episode at most, not the rollout. Another one takes its place:
    restored from the path's last snapshot, then led through the actions since, which must show the same observations
    again. Thus nothing is decided anew, and trees do not depend on what failed. A path for which that is in vain is
    dropped with all that was forked off it, and a tree without paths is left out of the result: as long as failures do
    not depend on what the policy does, no estimate is biased by it.

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
        ValueError: the policy returned None at the first step of a path; or a journal was given with ``look``.
        TimeoutError: of the timeout, unless there are ``retries``.
        Exception: whatever an environment raised, unless there are ``retries``.
    """
    from sandboxgym.tree.lockstep import Lockstep  # which is made of what is defined here

    places = indices if indices is not None else range(len(tasks))
    failed: list[Failure] = failures if failures is not None else []
    with ThreadPoolExecutor(2, thread_name_prefix="sandboxgym-rollout") as halves:  # no thread unless it is used
        background = halves if overlap else None
        limits = (retries, failed, look, capture_every, timeout)
        given = (envs, policy, schedule, seed, clock or Clock(), background, *limits)
        if journal is None:
            return Lockstep(*given).run(tasks, places, max_live)
        from sandboxgym.tree.journal import Journaled

        return Journaled(journal, *given).run(tasks, places, max_live)
