"""Paths that are being rolled out, and jobs on their environments."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from sandboxgym.tree.nodes import Action, Node, Path, RolloutTree
from sandboxgym.tree.policies import Context, Look
from sandboxgym.wrappers.jobs import Begun, EnvJob, EnvResult, Stepped, execute


@dataclass(slots=True)
class CapturedNode:
    """A captured node with the number of its users."""

    node: Node
    memory: Any
    pending: int = 0
    """Siblings that have yet to start from it."""
    snap: Any = None
    users: int = 0
    """Number of reasons to keep the snapshot."""
    spare: bool = False
    """True if no path will start from it: it is a state to recover from."""

    def capture(self, env: gym.Env[Any, Any]) -> float:
        """Capture the state of an environment, unless that has been done; the seconds it took."""
        began = time.perf_counter()
        if self.snap is None:
            self.snap = execute(EnvJob(env, capture=True)).snap
        return time.perf_counter() - began

    def free(self) -> None:
        """Give up one use; the last one releases the snapshot."""
        self.users -= 1
        if not self.users:
            self.snap.release()


@dataclass(slots=True, eq=False)
class LivePath:
    """A path being rolled out, with its environment."""

    tree: RolloutTree
    path: Path
    env: gym.Env[Any, Any]
    node: Node
    context: Context
    anchors: list[CapturedNode]
    """States to recover from, with ``retries``: the one where the path started, and the last one captured on it."""
    points: list[CapturedNode] = field(default_factory=list)
    """States captured on it, where forks may be requested once it has ended."""
    lost: int = 0
    """Environments that failed on it."""
    replayed: tuple[str, int] = ("", 0)
    """Kind of the last `Recovery` on it, and the actions repeated in it."""
    dropped: bool = False
    behind: bool = False
    """True if its environment has yet to be led to its node: what it showed there is known (`journaled`)."""


@dataclass(slots=True)
class Acting:
    """One step of a path: capture its environment if it forks here or may yet, then step it."""

    run: LivePath
    action: Action
    point: CapturedNode | None
    look: Look | None

    def job(self) -> EnvJob:
        """The calls on the environment."""
        run, node = self.run, self.run.node
        capture = self.point is not None and self.point.snap is None
        look = self.look if node.ahead is None else None
        return EnvJob(run.env, capture=capture, look=look, info=run.context.info, step=(self.action.text,))

    def note(self, done: EnvResult) -> tuple[Stepped, float, float]:
        """Record what the calls gave; the result of ``env.step``, the seconds spent on capturing and stepping."""
        if self.point is not None and self.point.snap is None:
            self.point.snap = done.snap
        if self.look is not None and self.run.node.ahead is None:
            self.run.node.ahead = done.ahead
        assert done.stepped is not None
        return done.stepped, done.capturing, done.stepping

    def step(self, _: Begun | None = None) -> tuple[Stepped, float, float]:
        """Execute the step in this thread, by itself; see `note`."""
        return self.note(execute(self.job()))


@dataclass(slots=True)
class Reset:
    """The reset of an environment to a task, where the root is captured."""

    task: Any
    index: int
    seed: int
    look: Look | None
    snap: Any = None
    ahead: Any = None

    def job(self, env: gym.Env[Any, Any]) -> EnvJob:
        """The calls on an environment."""
        # Several paths leave the root at once: it is looked ahead from here, any other state by its first path.
        options = None if self.task is None else {"task": self.task}
        return EnvJob(env, reset=(self.seed, options), capture=True, look=self.look)

    def note(self, done: EnvResult) -> tuple[Begun, float, float]:
        """Record the captured root; returns what ``env.reset`` returned, and the seconds of capturing and resetting."""
        assert done.begun is not None
        self.snap, self.ahead = done.snap, done.ahead
        return done.begun, done.capturing, done.stepping

    def begin(self, env: gym.Env[Any, Any]) -> tuple[Begun, float, float]:
        """Execute the reset in this thread, by itself; see `note`."""
        return self.note(execute(self.job(env)))

    def forget(self) -> None:
        """Release the captured root, if there is one."""
        if self.snap is not None:
            self.snap.release()
