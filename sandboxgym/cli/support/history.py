"""History of a player's states, as a tree with a snapshot in each node: undo, redo, branches, marks.

1. Every step adds a node; all nodes are kept, so the player can return to any of them.
2. The environment is always at `here`; an impossible move leaves it there.
3. A step into a state that is known from here (same action, same ``info["state_hash"]``) leads to the known node.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym

import sandboxgym
from sandboxgym.core import Snapshot
from sandboxgym.errors import SnapshotError


class CannotGo(Exception):
    """Raised if a move is not possible; the message says why."""


@dataclass(eq=False, slots=True)
class HistoryNode:
    """A visited state, and the step that led there."""

    number: int
    parent: HistoryNode | None
    action: Any
    """Action that led here; None for a root."""
    snap: Any
    observation: Any
    reward: float
    total: float
    """Sum of the rewards since the reset, or since the loaded state."""
    step: int
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    label: str = ""
    """Name given by the player."""
    children: list[HistoryNode] = field(default_factory=list)
    origin: str = ""
    """Origin of a root: a reset or a loaded file."""
    onward: HistoryNode | None = None
    """Child visited last, the target of redo."""

    @property
    def over(self) -> bool:
        """Tell whether the episode has ended here."""
        return self.terminated or self.truncated

    def line(self) -> list[HistoryNode]:
        """Nodes from the root to this one."""
        nodes: list[HistoryNode] = []
        node: HistoryNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Exploration:
    """An environment with all its visited states.

    Args:
        env: in any stack of wrappers that can be snapshotted.
        seed: seed of the first reset.
        options: options of every reset.
    """

    def __init__(
        self, env: gym.Env[Any, Any], *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self.env = env
        self.options = options
        self.nodes: list[HistoryNode] = []
        self.here = self._begin(seed)

    @property
    def limit(self) -> int | None:
        """Step limit, if a wrapper sets one."""
        clock = _clock(self.env)
        return None if clock is None else clock._max_episode_steps

    def reset(self, *, seed: int | None = None, task: str | int | None = None) -> HistoryNode:
        """Begin another episode, at a new root.

        Args:
            seed: seed of the reset.
            task: the task of this and every later reset; None keeps the last.

        Raises:
            CannotGo: the environment refuses; the state is what it was.
        """
        options = self.options
        if task is not None:
            self.options = {"task": task}
        try:
            return self._begin(seed)
        except Exception as error:  # an environment may refuse a task or a seed with any type
            self.options = options
            sandboxgym.restore(self.env, self.here.snap)
            raise CannotGo(f"{type(error).__name__}: {error}") from error

    def step(self, action: Any) -> HistoryNode:
        """Take an action.

        Raises:
            CannotGo: the episode is over, or the environment refuses; the state is what it was.
        """
        here = self.here
        if here.over:
            raise CannotGo("the episode is over: :undo, :goto or :reset")
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:  # an environment may refuse an action with any type
            sandboxgym.restore(self.env, here.snap)
            raise CannotGo(f"{type(error).__name__}: {error}") from error
        known = _same_step(here, action, info)
        if known is None:
            known = self._add(here, action, observation, float(reward), bool(terminated), bool(truncated), info)
        here.onward = self.here = known
        return known

    def undo(self, steps: int = 1) -> HistoryNode:
        """Go back by a number of steps."""
        node = self.here
        for _ in range(steps):
            if node.parent is None:
                raise CannotGo(f"there are only {len(self.here.line()) - 1} steps to undo")
            node = node.parent
        return self.goto(node)

    def redo(self, steps: int = 1) -> HistoryNode:
        """Go forward again, to the child visited last from here."""
        node = self.here
        for _ in range(steps):
            if node.onward is None:
                raise CannotGo("there is nothing to redo")
            node = node.onward
        return self.goto(node)

    def goto(self, node: HistoryNode) -> HistoryNode:
        """Go to any visited state."""
        sandboxgym.restore(self.env, node.snap)
        self.here = node
        for earlier, later in zip(node.line(), node.line()[1:]):
            earlier.onward = later
        return node

    def mark(self, label: str) -> HistoryNode:
        """Name this state; any other state loses the name."""
        for node in self.nodes:
            if node.label == label:
                node.label = ""
        self.here.label = label
        return self.here

    def named(self, name: str) -> HistoryNode:
        """Find a visited state by its name or number."""
        for node in self.nodes:
            if node.label == name:
                return node
        number = name.removeprefix("#")
        if number.isdigit() and int(number) < len(self.nodes):
            return self.nodes[int(number)]
        marks = ", ".join(node.label for node in self.nodes if node.label) or "none"
        raise CannotGo(f"no state {name!r}: numbers go from 0 to {len(self.nodes) - 1}, the marks are: {marks}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this state to a file that another process can load."""
        self.here.snap.save(Path(path).expanduser())

    def load(self, path: str | os.PathLike[str]) -> HistoryNode:
        """Load a saved state, which becomes a root of its own.

        Raises:
            SnapshotError: not a snapshot that fits; the state is what it was.
            OSError: the file cannot be read.
        """
        snap = Snapshot.load(Path(path).expanduser())
        observation, info = sandboxgym.restore(self.env, snap)
        last = getattr(self.env.unwrapped, "last", None)
        reward, terminated, truncated = (0.0, False, False) if last is None else (last.reward, *last[2:4])
        clock = _clock(self.env)
        if (
            clock is not None and clock._elapsed_steps is not None
        ):  # the limit is a wrapper's, outside the last transition
            truncated = truncated or clock._elapsed_steps >= clock._max_episode_steps
        self.here = self._add(None, None, observation, float(reward), bool(terminated), bool(truncated), info)
        self.here.origin = f"loaded from {Path(path).name}"
        return self.here

    def close(self) -> None:
        """Release every snapshot and close the environment."""
        for node in self.nodes:
            with contextlib.suppress(SnapshotError):
                getattr(node.snap, "release", lambda: None)()
        self.env.close()

    def roots(self) -> Iterator[HistoryNode]:
        """Roots of all episodes."""
        return (node for node in self.nodes if node.parent is None)

    def _begin(self, seed: int | None) -> HistoryNode:
        observation, info = self.env.reset(seed=seed, options=self.options)
        self.here = self._add(None, None, observation, 0.0, False, False, info)
        self.here.origin = "start" if seed is None else f"start, seed {seed}"
        return self.here

    def _add(
        self,
        parent: HistoryNode | None,
        action: Any,
        observation: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        info: dict[str, Any],
    ) -> HistoryNode:
        clock = _clock(self.env)
        elapsed = None if clock is None else clock._elapsed_steps
        step = elapsed if elapsed is not None else 0 if parent is None else parent.step + 1
        total = reward + (0.0 if parent is None else parent.total)
        snap = sandboxgym.snapshot(self.env)
        node = HistoryNode(
            len(self.nodes), parent, action, snap, observation, reward, total, step, terminated, truncated, info
        )
        self.nodes.append(node)
        if parent is not None:
            parent.children.append(node)
        return node


def _same_step(here: HistoryNode, action: Any, info: dict[str, Any]) -> HistoryNode | None:
    reached = info.get("state_hash")
    if reached is None or not isinstance(action, (str, int)):
        return None
    return next((c for c in here.children if c.action == action and c.info.get("state_hash") == reached), None)


def _clock(env: gym.Env[Any, Any]) -> Any:
    """Find the wrapper that limits the steps, if there is one."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            return env
        env = env.env
    return None


def draw(exploration: Exploration) -> Iterator[tuple[str, HistoryNode]]:
    """Draw the tree as lines: the branches before each node, then the node. A single line of play is not indented."""
    # (node, what stands before it, what stands before its descendants)
    pending = [(root, "", "") for root in list(exploration.roots())[::-1]]
    while pending:
        node, before, under = pending.pop()
        yield before, node
        if len(node.children) == 1:
            pending.append((node.children[0], under, under))
            continue
        for child in node.children[::-1]:
            last = child is node.children[-1]
            pending.append((child, under + ("└─ " if last else "├─ "), under + ("   " if last else "│  ")))
