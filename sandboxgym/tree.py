"""Rollout trees for any policy: fork the environment where a schedule says so, and keep what credit needs.

A *node* is a state at which the policy acts, an *edge* one action with its reward, a *leaf* a finished episode; a
node with several edges is a *branch node*. A *path* is the run of edges sampled in one go, from where it was started
(the root, or a fork at a branch node) to its end. Independent rollouts are paths that all start at the root; a
backbone with siblings is one root path with further paths started at its branch nodes; forks of forks nest.

Every path has its own random streams, for the policy and for the environment, keyed by (seed, task, path): what is
sampled on a path does not depend on which other paths are rolled out, in which order or in which process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from sandboxgym.wrappers import restore, snapshot

PathKey = tuple[int, ...]
"""(depth, sibling) pairs of the forks that lead to a path; root paths are (0, 0), (0, 1), …"""


@dataclass(slots=True)
class Action:
    """One decision of a policy."""

    text: Any
    """What ``env.step`` is given."""
    entropy: float = math.nan
    """Entropy (nats) of the distribution that the decision began with: what entropy schedules branch by."""
    position: int = 0
    """Tokens of context before the decision."""
    tokens: int = 0
    """Tokens generated."""
    memory: Any = None
    """Given back to the policy at the next step of this path, and of forks off that step. Never mutated."""
    data: Any = None
    """Whatever else a trainer keeps of the decision."""


@dataclass(slots=True, eq=False)
class Node:
    """A state: where the policy acts next, or a leaf."""

    depth: int
    observation: Any
    key: Any
    """``info["progress_key"]``, for state baselines."""
    owner: PathKey
    """The path that reached it first; () for the root."""
    parent: Edge | None = None
    children: list[Edge] = field(default_factory=list)
    width: int = 0
    """Paths started or continued here so far: the index of the next sibling."""
    value: float = 0.0
    """Estimate of the return from here, backed up from the leaves below by a trainer."""


@dataclass(slots=True, eq=False)
class Edge:
    """One action taken."""

    path: PathKey
    parent: Node
    action: Action
    child: Node = field(init=False)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    success: bool = False
    value: float = 0.0
    """Estimate of the return of taking this action here, backed up likewise."""
    advantage: float = 0.0
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class Path:
    """The edges sampled in one go from ``start`` to an end."""

    key: PathKey
    start: Node
    edges: list[Edge] = field(default_factory=list)

    def from_root(self) -> list[Edge]:
        """All edges from the root to this path's end: the prefix it was forked off, then its own."""
        prefix: list[Edge] = []
        edge = self.start.parent
        while edge is not None:
            prefix.append(edge)
            edge = edge.parent.parent
        return prefix[::-1] + self.edges

    @property
    def total_reward(self) -> float:
        """Undiscounted return of the whole episode that ends here."""
        return sum(edge.reward for edge in self.from_root())


@dataclass(slots=True, eq=False)
class RolloutTree:
    """All paths rolled out for one task."""

    task: Any
    index: int
    """Number of the task in its batch; part of the key of every random stream."""
    root: Node
    kind: str = ""
    """``info["task_type"]``, where the environment has types of tasks."""
    paths: list[Path] = field(default_factory=list)
    snapshots: int = 0

    def edges(self) -> Iterator[Edge]:
        """Every action taken, each once."""
        for path in self.paths:
            yield from path.edges

    @property
    def env_steps(self) -> int:
        """Environment steps taken."""
        return sum(len(path.edges) for path in self.paths)

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(edge.action.tokens for edge in self.edges())

    @property
    def branch_nodes(self) -> list[Node]:
        """Nodes with several edges, in the order of `edges`."""
        starts = {id(path.start): path.start for path in self.paths}
        return [node for node in starts.values() if len(node.children) > 1]


@dataclass(slots=True)
class Context:
    """What a policy is shown to decide: the present step of one path."""

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
    """Decides for all live paths at once."""

    def act(self, contexts: Sequence[Context]) -> Sequence[Action | None]:
        """One action a context; None ends that path as truncated (no room left to act)."""


class Schedule:
    """Where to fork. This one never does: ``roots`` independent rollouts a task."""

    def __init__(self, roots: int) -> None:
        if roots < 1:
            raise ValueError(f"expected at least one root path, found roots={roots}")
        self.roots = roots

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        """Siblings to start at ``node``, decided before ``action`` is executed: a causal rule.

        A sibling asks again at the node it starts from (``path.edges`` is empty then).
        """
        return 0

    def watches(self, path: Path) -> bool:
        """Whether `after` is asked about this path: a snapshot is kept at each of its steps until it has ended."""
        return False

    def after(self, tree: RolloutTree, path: Path) -> Iterable[tuple[Node, int]]:
        """(node, siblings) to start once ``path`` has ended: a rule that sees the path's future."""
        return ()


class Envs:
    """Live environments for rollouts, made on demand and used again."""

    def __init__(self, make: Callable[[], gym.Env[Any, Any]]) -> None:
        self._make = make
        self._made: list[gym.Env[Any, Any]] = []
        self._idle: list[gym.Env[Any, Any]] = []

    def take(self) -> gym.Env[Any, Any]:
        """An environment in any state: reset or restore it."""
        if not self._idle:
            self._made.append(self._make())
            self._idle.append(self._made[-1])
        return self._idle.pop()

    def give(self, env: gym.Env[Any, Any]) -> None:
        """Back for the next path."""
        self._idle.append(env)

    def close(self) -> None:
        """Close all that were made."""
        for env in self._made:
            env.close()
        self._made, self._idle = [], []


@dataclass(slots=True)
class _Point:
    """A captured node and how many paths still have to start from it."""

    node: Node
    snap: Any
    memory: Any
    pending: int = 0


@dataclass(slots=True)
class _Live:
    """A path being rolled out."""

    tree: RolloutTree
    path: Path
    env: gym.Env[Any, Any]
    node: Node
    context: Context
    points: list[_Point] = field(default_factory=list)


def rollout(
    tasks: Sequence[Any],
    policy: Policy,
    schedule: Schedule,
    envs: Envs,
    *,
    seed: Sequence[int] = (0,),
    indices: Sequence[int] | None = None,
    max_live: int = 1024,
) -> list[RolloutTree]:
    """Roll out one tree a task.

    Paths advance in lockstep, one `Policy.act` for all that are live; paths that start while others run are rolled
    out in the next wave.

    Args:
        tasks: given to ``env.reset(options={"task": task})``; None resets without options.
        policy: see `Policy`.
        schedule: where to fork.
        envs: where live environments come from; they are given back at the end.
        seed: key of all random streams (a trainer's seed and update number, say).
        indices: the tasks' numbers in a larger batch, of which these are a part (default 0, 1, …).
        max_live: most environments live at once.
    """
    trees: list[RolloutTree] = []
    waiting: list[tuple[RolloutTree, _Point]] = []
    for index, task in zip(indices if indices is not None else range(len(tasks)), tasks):
        env = envs.take()
        options = None if task is None else {"task": task}
        observation, info = env.reset(seed=_seed(seed, index, ()), options=options)
        root = Node(0, observation, info.get("progress_key"), owner=())
        tree = RolloutTree(task, index, root, kind=str(info.get("task_type", "")), snapshots=1)
        point = _Point(root, snapshot(env), memory=None, pending=schedule.roots)
        waiting += [(tree, point)] * schedule.roots
        trees.append(tree)
        envs.give(env)
    while waiting:
        wave, waiting = waiting[:max_live], waiting[max_live:]
        live = [_start(tree, point, envs, seed) for tree, point in wave]
        while live:
            live = _advance(live, policy, schedule, envs, waiting)
    return trees


def _start(tree: RolloutTree, point: _Point, envs: Envs, seed: Sequence[int]) -> _Live:
    node = point.node
    key = (*node.owner, node.depth, node.width)
    node.width += 1
    path = Path(key, node)
    tree.paths.append(path)
    env = envs.take()
    observation, info = restore(env, point.snap, seed=_seed(seed, tree.index, key))
    point.pending -= 1
    if not point.pending:
        point.snap.release()
    rng = np.random.Generator(np.random.PCG64(_sequence(seed, tree.index, key, purpose=1)))
    context = Context((tree.index, key), observation, info, node.depth, point.memory, rng)
    return _Live(tree, path, env, node, context)


def _advance(
    live: list[_Live],
    policy: Policy,
    schedule: Schedule,
    envs: Envs,
    waiting: list[tuple[RolloutTree, _Point]],
) -> list[_Live]:
    going: list[_Live] = []
    for run, action in zip(live, policy.act([run.context for run in live]), strict=True):
        if action is not None and _step(run, action, schedule, waiting):
            going.append(run)
            continue
        if action is None:
            if not run.path.edges:
                raise ValueError(f"the policy cannot act at the start of path {run.context.path}")
            run.path.edges[-1].truncated = True
        if run.points:
            siblings = {id(node): count for node, count in schedule.after(run.tree, run.path)}
            for point in run.points:
                point.pending = siblings.get(id(point.node), 0)
                waiting += [(run.tree, point)] * point.pending
                if not point.pending:
                    point.snap.release()
        envs.give(run.env)
    return going


def _step(run: _Live, action: Action, schedule: Schedule, waiting: list[tuple[RolloutTree, _Point]]) -> bool:
    """Take one action; whether the path goes on."""
    tree, path, node = run.tree, run.path, run.node
    count = schedule.now(tree, path, node, action)
    if count or schedule.watches(path):
        point = _Point(node, snapshot(run.env), run.context.memory, pending=count)
        tree.snapshots += 1
        if count:
            waiting += [(tree, point)] * count
        else:
            run.points.append(point)
    node.width = max(node.width, 1)  # the path that reached the node is its sibling 0
    observation, reward, terminated, truncated, info = run.env.step(action.text)
    edge = Edge(path.key, node, action, float(reward), bool(terminated), bool(truncated))
    edge.valid, edge.success = bool(info.get("valid_action", True)), bool(info.get("success", False))
    edge.child = Node(node.depth + 1, observation, info.get("progress_key"), owner=path.key, parent=edge)
    node.children.append(edge)
    path.edges.append(edge)
    run.node = edge.child
    run.context = Context(run.context.path, observation, info, edge.child.depth, action.memory, run.context.rng)
    return not (terminated or truncated)


def _sequence(seed: Sequence[int], index: int, key: PathKey, *, purpose: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([*seed, index, purpose], spawn_key=key)


def _seed(seed: Sequence[int], index: int, key: PathKey) -> int:
    return int(_sequence(seed, index, key, purpose=0).generate_state(1, np.uint64)[0])
