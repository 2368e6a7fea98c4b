"""The protocol of policies, and what a rollout tells: the input of a decision, durations, failures, recoveries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from sandboxgym.tree.nodes import Action, PathKey


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
