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
import threading
import time
from collections import Counter
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
    valid: bool = True
    """False where the policy's answer could not be read: the edge is then invalid whatever the environment says."""


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
    survival: float = 1.0
    """Probability with which the path went on from here (`Schedule.survival`)."""
    stopped: bool = False
    """Whether it did not."""


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
    data: Any = None
    """Whatever else a trainer keeps of the edge."""


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
    snapshot_seconds: float = 0.0
    """Time taken by them, each one's own."""

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
    """Decides for all live paths at once: any function of the contexts.

    One that keeps something of its paths, to go on from it in their forks, may have a method ``release(path)`` as well:
    it is called with `Context.path` once the path has ended and nothing will start from its states any more. A fork's
    key is that of the path which reached its first state, followed by one pair.
    """

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

    def survival(self, tree: RolloutTree, path: Path, node: Node) -> float:
        """Probability with which ``path`` goes on from ``node``, asked after each of its steps: Russian roulette.

        The coin has a stream of its own. A path that is stopped ends truncated at the node.
        """
        return 1.0

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
        self._alone = threading.Lock()  # one environment at a time, whoever calls

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
        if self._executor is None:
            with self._alone:
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
class Clock:
    """Wall-clock seconds that rollouts spent waiting, by what for; `rollout` adds to it."""

    policy: float = 0.0
    steps: float = 0.0
    """Steps and resets of environments; those that work at the same time as others, or as the policy, count once."""
    snapshots: float = 0.0
    """Snapshots and restores, likewise."""


@dataclass(slots=True)
class _Point:
    """A captured node and how many paths still have to start from it."""

    node: Node
    memory: Any
    pending: int = 0
    snap: Any = None


@dataclass(slots=True)
class _Live:
    """A path being rolled out."""

    tree: RolloutTree
    path: Path
    env: gym.Env[Any, Any]
    node: Node
    context: Context
    points: list[_Point] = field(default_factory=list)


@dataclass(slots=True)
class _Acting:
    """A path whose environment is about to be captured, where it forks or may yet, and to step."""

    run: _Live
    action: Action
    point: _Point | None

    def step(self) -> tuple[Any, float, float]:
        """What ``env.step`` returns, and the seconds that capture and step took."""
        began = time.perf_counter()
        if self.point is not None:
            self.point.snap = snapshot(self.run.env)
        captured = time.perf_counter()
        return self.run.env.step(self.action.text), captured - began, time.perf_counter() - captured


@dataclass(slots=True)
class _Part:
    """Paths that advance in lockstep."""

    live: list[_Live] = field(default_factory=list)
    started: list[tuple[int, PathKey]] = field(default_factory=list)
    """Paths whose last forks have started, but not acted yet."""
    acting: list[_Acting] = field(default_factory=list)
    outcomes: Callable[[], list[tuple[Any, float, float]]] | None = None
    """Waits for the steps of ``acting``; None while nothing is under way."""


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
) -> list[RolloutTree]:
    """Roll out one tree a task.

    Paths advance in lockstep, one call of the policy for all that are live; paths that start while others run are
    rolled out in the next wave.

    With ``overlap`` the tasks are two halves, and while the policy decides for one, the environments of the other step
    in threads. The halves take turns, whichever is ready first, so that the trees are the same each time; and those
    without ``overlap``, of a policy that decides alike whatever other paths it is asked about. It pays where
    environments take long: to decide for two halves takes longer than for all paths at once.

    Args:
        envs: where live environments come from; all are given back at the end, also after an error.
        policy: see `Policy`.
        schedule: where to fork.
        tasks: given to ``env.reset(options={"task": task})``; None resets without options.
        seed: key of all random streams (a trainer's seed and update number, say).
        indices: the tasks' numbers in a larger batch, of which these are a part (default 0, 1, …).
        max_live: most environments live at once.
        overlap: see above.
        clock: is told how long was waited for what.

    Raises:
        ValueError: the policy returned None at the first step of a path.
    """
    places = indices if indices is not None else range(len(tasks))
    clock = clock or Clock()
    if not overlap:
        return _Rollout(envs, policy, schedule, seed, clock).run(tasks, places, max_live)
    with ThreadPoolExecutor(2, thread_name_prefix="sandboxgym-rollout") as background:  # a thread for each half
        return _Rollout(envs, policy, schedule, seed, clock, background).run(tasks, places, max_live)


class _Rollout:
    """One call of `rollout`: which paths are live, and which wait at captured nodes."""

    def __init__(
        self,
        envs: EnvSource,
        policy: Policy,
        schedule: Schedule,
        seed: Sequence[int],
        clock: Clock,
        background: ThreadPoolExecutor | None = None,
    ) -> None:
        self.envs, self.policy, self.schedule, self.seed, self.clock = envs, policy, schedule, seed, clock
        self.background = background
        self.release: Callable[[tuple[int, PathKey]], Any] = getattr(policy, "release", lambda path: None)
        self.holds: Counter[tuple[int, PathKey]] = Counter()  # while a path is live, and a point on it kept
        self.waiting: list[tuple[RolloutTree, _Point]] = []
        self.parts: list[_Part] = []
        self.taken: dict[int, gym.Env[Any, Any]] = {}

    def run(self, tasks: Sequence[Any], indices: Sequence[int], max_live: int) -> list[RolloutTree]:
        trees: list[RolloutTree] = []
        try:
            for at in range(0, len(tasks), max_live):
                trees += self.plant(tasks[at : at + max_live], indices[at : at + max_live])
            while self.waiting:
                wave, self.waiting = self.waiting[:max_live], self.waiting[max_live:]
                self.parts = [_Part() for _ in range(2 if self.background else 1)]
                for part, paths in zip(self.parts, self.divided(wave), strict=True):
                    self.start(part, paths)
                while any(part.live for part in self.parts):
                    for part in self.parts:
                        if part.outcomes is not None:
                            self.advance(part, part.outcomes)
                        if part.live:
                            self.act(part)
        finally:  # nothing is left over after an error; otherwise all of this is empty
            if self.background:
                self.background.shutdown()  # steps that are under way end first
            for env in list(self.taken.values()):
                self.give(env)
            points = [point for _, point in self.waiting]
            for part in self.parts:
                points += [point for run in part.live for point in run.points]
                points += [acting.point for acting in part.acting if acting.point is not None]
            for point in points:
                if point.snap is not None:
                    point.snap.release()
        return trees

    def divided(self, wave: Sequence[tuple[RolloutTree, _Point]]) -> list[list[tuple[RolloutTree, _Point]]]:
        """Paths for each part, a tree's all for the same one; as even as that goes."""
        paths: list[list[tuple[RolloutTree, _Point]]] = [[] for _ in self.parts]
        by_tree: dict[int, list[tuple[RolloutTree, _Point]]] = {}
        for tree, point in wave:
            by_tree.setdefault(id(tree), []).append((tree, point))
        for group in by_tree.values():
            min(paths, key=len).extend(group)
        return paths

    def take(self) -> gym.Env[Any, Any]:
        env = self.envs.take()
        self.taken[id(env)] = env
        return env

    def give(self, env: gym.Env[Any, Any]) -> None:
        del self.taken[id(env)]
        self.envs.give(env)

    def steps(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Jobs that make environments go on."""
        began = time.perf_counter()
        results = self.envs.call(jobs)
        self.clock.steps += time.perf_counter() - began
        return results

    def snapshots(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Jobs that capture or bring back a state."""
        began = time.perf_counter()
        results = self.envs.call(jobs)
        self.clock.snapshots += time.perf_counter() - began
        return results

    def hold(self, path: tuple[int, PathKey]) -> None:
        """What a policy keeps of a path is still needed."""
        self.holds[path] += 1

    def let_go(self, path: tuple[int, PathKey]) -> None:
        """The opposite of `hold`; the policy is told of the last."""
        self.holds[path] -= 1
        if not self.holds[path]:
            del self.holds[path]
            self.release(path)

    def plant(self, tasks: Sequence[Any], indices: Sequence[int]) -> list[RolloutTree]:
        """Reset to each task and capture the root, where the root paths then wait."""

        def reset(env: gym.Env[Any, Any], task: Any, index: int) -> tuple[Any, dict[str, Any]]:
            return env.reset(seed=_seed(self.seed, index, ()), options=None if task is None else {"task": task})

        envs = [self.take() for _ in tasks]
        jobs = [partial(reset, env, task, index) for env, task, index in zip(envs, tasks, indices, strict=True)]
        begun = self.steps(jobs)
        snaps = self.snapshots([partial(_timed_snapshot, env) for env in envs])
        trees = []
        for env, task, index, (observation, info), (snap, seconds) in zip(envs, tasks, indices, begun, snaps):
            root = Node(0, observation, info.get("progress_key"), owner=())
            tree = RolloutTree(task, index, root, kind=str(info.get("task_type", "")), snapshots=1)
            tree.snapshot_seconds = seconds
            self.hold((index, root.owner))
            point = _Point(root, memory=None, pending=self.schedule.roots, snap=snap)
            self.waiting += [(tree, point)] * point.pending
            trees.append(tree)
            self.give(env)
        return trees

    def start(self, part: _Part, wave: Sequence[tuple[RolloutTree, _Point]]) -> None:
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
        for (tree, point, path, env), (observation, info) in zip(begun, self.snapshots(jobs), strict=True):
            point.pending -= 1
            if not point.pending:
                point.snap.release()
                part.started.append((tree.index, point.node.owner))
            self.hold((tree.index, path.key))
            rng = np.random.Generator(np.random.PCG64(_sequence(self.seed, tree.index, path.key, purpose=1)))
            context = Context((tree.index, path.key), observation, info, path.start.depth, point.memory, rng)
            part.live.append(_Live(tree, path, env, path.start, context))

    def act(self, part: _Part) -> None:
        """Decide the next step of every live path, and have the environments carry it out."""
        began = time.perf_counter()
        decided = list(zip(part.live, self.policy([run.context for run in part.live]), strict=True))
        self.clock.policy += time.perf_counter() - began
        part.acting = [_Acting(run, action, self.point(run, action)) for run, action in decided if action is not None]
        while part.started:
            self.let_go(part.started.pop())
        carry_out = partial(self.envs.call, [acting.step for acting in part.acting])
        part.outcomes = self.background.submit(carry_out).result if self.background else carry_out

    def point(self, run: _Live, action: Action) -> _Point | None:
        """Where the state in which the action was decided is captured: siblings start there, or may yet."""
        count = self.schedule.now(run.tree, run.path, run.node, action)
        if not count and not self.schedule.watches(run.path):
            return None
        self.hold((run.tree.index, run.node.owner))
        return _Point(run.node, run.context.memory, pending=count)

    def advance(self, part: _Part, outcomes: Callable[[], list[tuple[Any, float, float]]]) -> None:
        """Wait for the steps of the paths, and take note of what they led to."""
        began = time.perf_counter()
        results = outcomes()
        waited = time.perf_counter() - began
        captures = sum(seconds for _, seconds, _ in results)
        worked = captures + sum(seconds for _, _, seconds in results)
        share = captures / worked if worked else 0.0
        self.clock.snapshots += waited * share
        self.clock.steps += waited * (1.0 - share)
        for acting, (_, seconds, _) in zip(part.acting, results, strict=True):
            if acting.point is not None:
                self.keep(acting.run, acting.point, seconds)
        acted, part.acting, part.outcomes = part.acting, [], None
        going = []
        for acting, (result, _, _) in zip(acted, results, strict=True):
            run, action = acting.run, acting.action
            observation, reward, terminated, truncated, info = result
            edge = Edge(run.path.key, run.node, action, float(reward), bool(terminated), bool(truncated))
            edge.valid = action.valid and bool(info.get("valid_action", True))
            edge.success = bool(info.get("success", False))
            depth, key = run.node.depth + 1, info.get("progress_key")
            edge.child = Node(depth, observation, key, owner=run.path.key, parent=edge)
            run.node.width = max(run.node.width, 1)  # the path that reached the node is its sibling 0
            run.node.children.append(edge)
            run.path.edges.append(edge)
            run.node = edge.child
            run.context = Context(run.context.path, observation, info, depth, action.memory, run.context.rng)
            if not (terminated or truncated) and self.survives(run):
                going.append(run)
        stays = set(map(id, going))
        ended = [run for run in part.live if id(run) not in stays]
        for run in ended:
            self.end(run)
        part.live = going

    def survives(self, run: _Live) -> bool:
        """Whether the schedule lets the path go on, by a coin where it is not sure."""
        node = run.node
        node.survival = self.schedule.survival(run.tree, run.path, node)
        if node.survival >= 1.0:
            return True
        coin = _sequence(self.seed, run.tree.index, (*run.path.key, node.depth), purpose=2)
        node.stopped = bool(np.random.Generator(np.random.PCG64(coin)).random() >= node.survival)
        return not node.stopped

    def keep(self, run: _Live, point: _Point, seconds: float) -> None:
        """A state was captured: siblings start there, or its path may yet ask for them once it has ended."""
        run.tree.snapshots += 1
        run.tree.snapshot_seconds += seconds
        if point.pending:
            run.node.width = max(run.node.width, 1)
            self.waiting += [(run.tree, point)] * point.pending
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
                    self.let_go((run.tree.index, point.node.owner))
            run.points = []
        self.let_go(run.context.path)
        self.give(run.env)


def _timed_snapshot(env: gym.Env[Any, Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return snapshot(env), time.perf_counter() - began


def _sequence(seed: Sequence[int], index: int, key: PathKey, *, purpose: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([*seed, index, purpose], spawn_key=key)


def _seed(seed: Sequence[int], index: int, key: PathKey) -> int:
    return int(_sequence(seed, index, key, purpose=0).generate_state(1, np.uint64)[0])
