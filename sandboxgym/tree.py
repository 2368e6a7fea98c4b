"""Rollout trees for any policy: fork the environment where a schedule says so, and keep what credit needs.

>>> import gymnasium as gym
>>> import sandboxgym
>>> envs = Envs(lambda: gym.make("sandboxgym/ALFWorld-v0"))
>>> def policy(contexts):
...     return [Action(context.rng.choice(context.info["admissible_commands"])) for context in contexts]
>>> (tree,) = rollout(envs, policy, ForkAt([2, 5], width=3), tasks=[7])
>>> len(tree.paths), [node.depth for node in tree.branch_nodes]
(5, [2, 5])
>>> envs.close()

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
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import gymnasium as gym
import numpy as np

from sandboxgym.wrappers import restore, snapshot

T = TypeVar("T")

PathKey = tuple[int, ...]
"""(depth, sibling) pairs of the forks that lead to a path; root paths are (0, 0), (0, 1), …"""


@dataclass(slots=True)
class Action:
    """One decision of a policy."""

    text: Any
    """What ``env.step`` is given."""
    entropy: float = math.nan
    """Entropy (nats) of the distribution that the decision began with: what entropy schedules branch by."""
    logp: float = math.nan
    """Log-probability (nats) of the decision, summed over its tokens."""
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
    """Decides for all live paths at once: any function of the contexts."""

    def __call__(self, contexts: Sequence[Context], /) -> Sequence[Action | None]:
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


class ForkAt(Schedule):
    """Fork each tree's first path at given depths: ``width`` edges leave each of these nodes."""

    def __init__(self, depths: Iterable[int], *, width: int, roots: int = 1) -> None:
        super().__init__(roots)
        self.depths, self.width = frozenset(depths), width

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        """``width - 1`` siblings at the depths that were asked for."""
        return self.width - 1 if path.key == (0, 0) and node.depth in self.depths else 0


class TopEntropy(Schedule):
    """Fork each tree's first path, once it has ended, at its ``points`` steps of highest `Action.entropy`.

    The rule of the BPO paper (Algorithm 1). It looks at the path's future, so that siblings and the path itself are
    not exchangeable (docs/theory.md); `bpo_ref` has a causal rule too.
    """

    def __init__(self, points: int, *, width: int, roots: int = 1) -> None:
        super().__init__(roots)
        self.points, self.width = points, width

    def watches(self, path: Path) -> bool:
        """The first path."""
        return path.key == (0, 0)

    def after(self, tree: RolloutTree, path: Path) -> Iterable[tuple[Node, int]]:
        """Its nodes of highest entropy; ties go to the earlier one."""
        ranked = sorted(path.edges, key=lambda edge: (-edge.action.entropy, edge.parent.depth))
        return [(edge.parent, self.width - 1) for edge in ranked[: self.points]]


class EnvSource(Protocol):
    """Where `rollout` gets live environments from: `Envs`, or a pool of workers (`sandboxgym.pool`)."""

    def take(self) -> gym.Env[Any, Any]:
        """An environment in any state: reset or restore it."""

    def give(self, env: gym.Env[Any, Any], /) -> None:
        """Back for the next path."""

    def call(self, jobs: Sequence[Callable[[], T]], /) -> list[T]:
        """Run jobs, each on an environment of its own, and return their results in order."""


class Envs:
    """Live environments for rollouts, made on demand and used again.

    Args:
        make: makes one.
        threads: how many environments work at the same time. More than 1 pays for those that wait: sandboxes,
            browsers, remote ones; pure Python ones (ALFWorld) are faster one by one.
    """

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], *, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"expected at least one thread, found threads={threads}")
        self._make = make
        self._made: list[gym.Env[Any, Any]] = []
        self._idle: list[gym.Env[Any, Any]] = []
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="sandboxgym-envs") if threads > 1 else None

    def take(self) -> gym.Env[Any, Any]:
        """An environment in any state: reset or restore it."""
        if not self._idle:
            self._made.append(self._make())
            self._idle.append(self._made[-1])
        return self._idle.pop()

    def give(self, env: gym.Env[Any, Any]) -> None:
        """Back for the next path."""
        self._idle.append(env)

    def call(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs, each on an environment of its own, and return their results in order.

        All have ended when this returns or raises the first job's error.
        """
        if self._executor is None or len(jobs) == 1:
            return [job() for job in jobs]
        futures = [self._executor.submit(job) for job in jobs]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close all that were made."""
        if self._executor is not None:
            self._executor.shutdown()
        for env in self._made:
            env.close()
        self._made, self._idle = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    envs: EnvSource,
    policy: Policy,
    schedule: Schedule,
    *,
    tasks: Sequence[Any] = (None,),
    seed: Sequence[int] = (0,),
    indices: Sequence[int] | None = None,
    max_live: int = 1024,
) -> list[RolloutTree]:
    """Roll out one tree a task.

    Paths advance in lockstep, one call of the policy for all that are live; paths that start while others run are
    rolled out in the next wave.

    Args:
        envs: where live environments come from; all are given back at the end, also after an error.
        policy: see `Policy`.
        schedule: where to fork.
        tasks: given to ``env.reset(options={"task": task})``; None resets without options.
        seed: key of all random streams (a trainer's seed and update number, say).
        indices: the tasks' numbers in a larger batch, of which these are a part (default 0, 1, …).
        max_live: most environments live at once.

    Raises:
        ValueError: the policy returned None at the first step of a path.
    """
    return _Rollout(envs, policy, schedule, seed).run(
        tasks, indices if indices is not None else range(len(tasks)), max_live
    )


class _Rollout:
    """One call of `rollout`: which paths are live, and which wait at captured nodes."""

    def __init__(self, envs: EnvSource, policy: Policy, schedule: Schedule, seed: Sequence[int]) -> None:
        self.envs, self.policy, self.schedule, self.seed = envs, policy, schedule, seed
        self.waiting: list[tuple[RolloutTree, _Point]] = []
        self.live: list[_Live] = []
        self.taken: dict[int, gym.Env[Any, Any]] = {}

    def run(self, tasks: Sequence[Any], indices: Sequence[int], max_live: int) -> list[RolloutTree]:
        trees: list[RolloutTree] = []
        try:
            for at in range(0, len(tasks), max_live):
                trees += self.plant(tasks[at : at + max_live], indices[at : at + max_live])
            while self.waiting:
                wave, self.waiting = self.waiting[:max_live], self.waiting[max_live:]
                self.start(wave)
                while self.live:
                    self.advance()
        finally:  # nothing is left over after an error; otherwise all of this is empty
            for env in list(self.taken.values()):
                self.give(env)
            for point in [*(point for _, point in self.waiting), *(p for run in self.live for p in run.points)]:
                point.snap.release()
        return trees

    def take(self) -> gym.Env[Any, Any]:
        env = self.envs.take()
        self.taken[id(env)] = env
        return env

    def give(self, env: gym.Env[Any, Any]) -> None:
        del self.taken[id(env)]
        self.envs.give(env)

    def plant(self, tasks: Sequence[Any], indices: Sequence[int]) -> list[RolloutTree]:
        """Reset to each task and capture the root, where the root paths then wait."""

        def reset(env: gym.Env[Any, Any], task: Any, index: int) -> tuple[Any, dict[str, Any], Any]:
            options = None if task is None else {"task": task}
            return *env.reset(seed=_seed(self.seed, index, ()), options=options), snapshot(env)

        envs = [self.take() for _ in tasks]
        jobs = [partial(reset, env, task, index) for env, task, index in zip(envs, tasks, indices, strict=True)]
        trees = []
        for env, task, index, (observation, info, snap) in zip(envs, tasks, indices, self.envs.call(jobs)):
            root = Node(0, observation, info.get("progress_key"), owner=())
            tree = RolloutTree(task, index, root, kind=str(info.get("task_type", "")), snapshots=1)
            self.waiting += [(tree, _Point(root, snap, memory=None, pending=self.schedule.roots))] * self.schedule.roots
            trees.append(tree)
            self.give(env)
        return trees

    def start(self, wave: Sequence[tuple[RolloutTree, _Point]]) -> None:
        """Restore an environment for each of these paths."""
        begun = []
        for tree, point in wave:
            key = (*point.node.owner, point.node.depth, point.node.width)
            point.node.width += 1
            begun.append((tree, point, Path(key, point.node), self.take()))
            tree.paths.append(begun[-1][2])
        jobs = [
            partial(restore, env, point.snap, seed=_seed(self.seed, tree.index, path.key))
            for tree, point, path, env in begun
        ]
        for (tree, point, path, env), (observation, info) in zip(begun, self.envs.call(jobs), strict=True):
            point.pending -= 1
            if not point.pending:
                point.snap.release()
            rng = np.random.Generator(np.random.PCG64(_sequence(self.seed, tree.index, path.key, purpose=1)))
            context = Context((tree.index, path.key), observation, info, path.start.depth, point.memory, rng)
            self.live.append(_Live(tree, path, env, path.start, context))

    def advance(self) -> None:
        """One step of every live path."""
        decided = list(zip(self.live, self.policy([run.context for run in self.live]), strict=True))
        acting = [(run, action) for run, action in decided if action is not None]
        self.branch(acting)
        results = self.envs.call([partial(run.env.step, action.text) for run, action in acting])
        going = []
        for (run, action), (observation, reward, terminated, truncated, info) in zip(acting, results, strict=True):
            edge = Edge(run.path.key, run.node, action, float(reward), bool(terminated), bool(truncated))
            edge.valid, edge.success = bool(info.get("valid_action", True)), bool(info.get("success", False))
            depth, key = run.node.depth + 1, info.get("progress_key")
            edge.child = Node(depth, observation, key, owner=run.path.key, parent=edge)
            run.node.width = max(run.node.width, 1)  # the path that reached the node is its sibling 0
            run.node.children.append(edge)
            run.path.edges.append(edge)
            run.node = edge.child
            run.context = Context(run.context.path, observation, info, depth, action.memory, run.context.rng)
            if not (terminated or truncated):
                going.append(run)
        stays = set(map(id, going))
        ended = [run for run in self.live if id(run) not in stays]
        for run in ended:
            self.end(run)
        self.live = going

    def branch(self, acting: Sequence[tuple[_Live, Action]]) -> None:
        """Capture the states in which these actions were decided wherever siblings start, or may yet."""
        counts = [self.schedule.now(run.tree, run.path, run.node, action) for run, action in acting]
        forking = [(run, count) for (run, _), count in zip(acting, counts) if count or self.schedule.watches(run.path)]
        snaps = self.envs.call([partial(snapshot, run.env) for run, _ in forking])
        for (run, count), snap in zip(forking, snaps, strict=True):
            point = _Point(run.node, snap, run.context.memory, pending=count)
            run.tree.snapshots += 1
            if count:
                run.node.width = max(run.node.width, 1)
                self.waiting += [(run.tree, point)] * count
            else:
                run.points.append(point)

    def end(self, run: _Live) -> None:
        """The path has ended: ask where to fork it afterwards, and give its environment back."""
        if not run.path.edges:
            raise ValueError(f"the policy cannot act at the start of path {run.context.path}")
        last = run.path.edges[-1]
        last.truncated = last.truncated or not last.terminated  # also where the policy had no room left
        if run.points:
            siblings = {id(node): count for node, count in self.schedule.after(run.tree, run.path)}
            for point in run.points:
                point.pending = siblings.get(id(point.node), 0)
                self.waiting += [(run.tree, point)] * point.pending
                if not point.pending:
                    point.snap.release()
            run.points = []
        self.give(run.env)


def _sequence(seed: Sequence[int], index: int, key: PathKey, *, purpose: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([*seed, index, purpose], spawn_key=key)


def _seed(seed: Sequence[int], index: int, key: PathKey) -> int:
    return int(_sequence(seed, index, key, purpose=0).generate_state(1, np.uint64)[0])
