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

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import gymnasium as gym
import numpy as np

T = TypeVar("T")
logger = logging.getLogger("sandboxgym")

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
    luck: float = 0.0
    """How much of ``value`` is luck of the decisions from here on, estimated (`Edge.control`)."""
    ahead: Any = field(default=None, kw_only=True)
    """What the ``look`` of `rollout` found here."""
    state_hash: Any = field(default=None, kw_only=True)
    """``info["state_hash"]``, equal for equal states, where the environment gives one."""
    features: Any = field(default=None, kw_only=True)
    """``info["features"]``, numbers for learned state values, where the environment gives them. Privileged: no policy
    may see them."""


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
    verdict: str = field(default="", kw_only=True)
    """``info["verdict"]``, where the environment gives one."""
    masked: bool = field(default=False, kw_only=True)
    """``info["masked"]``: the episode ended here, and its rewards say nothing about what was done in it."""
    suspicious: bool = field(default=False, kw_only=True)
    """``info["suspicious"]`` is not empty: the reward may have been had by a trick."""
    value: float = 0.0
    """Estimate of the return of taking this action here, backed up likewise."""
    control: float = field(default=0.0, kw_only=True)
    """How much more this action is estimated to be worth than the policy's average action here: 0 in expectation."""
    luck: float = field(default=0.0, kw_only=True)
    """How much of ``value`` is luck of the decisions after this one, backed up from their ``control``."""
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

    def offspring(self, key: PathKey) -> set[PathKey]:
        """Keys of a path and of whatever was forked off it, directly or not."""
        keys = {key}
        for path in self.paths:  # those that a path was forked off come before it
            if path.start.owner in keys:
                keys.add(path.key)
        return keys

    def remove(self, keys: Collection[PathKey]) -> None:
        """Take paths out, together with whatever was forked off them: it is as if they had never been."""
        for path in self.paths:
            if path.key in keys and path.edges:
                path.start.children.remove(path.edges[0])
        self.paths = [path for path in self.paths if path.key not in keys]

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


Look = Callable[[gym.Env[Any, Any], dict[str, Any]], Any]
"""Looks ahead from a state, given its environment and info, once, before an action is carried out there; what it
returns becomes `Node.ahead`. It leaves the environment as it is (`sandboxgym.successors` does), may be called by
several threads at once, and what it raises counts as raised by the environment."""


class Schedule:
    """Where to fork. This one never does: ``roots`` independent rollouts a task.

    Args:
        roots: root paths of every task, or of each task by its index in the batch.

    Raises:
        ValueError: a task would have none.
    """

    def __init__(self, roots: int | Mapping[int, int]) -> None:
        self.roots = roots
        if (min(roots.values(), default=1) if isinstance(roots, Mapping) else roots) < 1:
            raise ValueError(f"expected at least one root path, found roots={roots}")

    def roots_of(self, index: int) -> int:
        """Root paths of the task of this index; raises `ValueError` where it was given none."""
        if not isinstance(self.roots, Mapping):
            return self.roots
        if index not in self.roots:
            raise ValueError(f"expected a number of root paths for task {index} of the batch, found roots={self.roots}")
        return self.roots[index]

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

    def discard(self, env: gym.Env[Any, Any], /) -> None:
        """Not back, for it has failed: close it, whatever state it is in."""

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

    def discard(self, env: gym.Env[Any, Any]) -> None:
        """Not back, for it has failed: close it, whatever state it is in."""
        self._made = [made for made in self._made if made is not env]
        try:
            env.close()
        except Exception as error:
            logger.warning("an environment that had failed could not be closed: %s", described(error))

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
        with ExitStack() as stack:  # all, also where one fails to
            for env in self._made:
                stack.callback(env.close)
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
    """What it raised, or why there is no room."""
    dropped: int = 0
    """Paths that this cost, those forked off it included; 0: the path went on."""
    too_long: bool = False
    """Whether the policy could not act at all (`Policy` returned None for the first step)."""


def described(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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
) -> list[RolloutTree]:
    """Roll out one tree a task.

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
        envs: where live environments come from; all are given back at the end, also after an error.
        policy: see `Policy`.
        schedule: where to fork.
        tasks: given to ``env.reset(options={"task": task})``; None resets without options.
        seed: key of all random streams (a trainer's seed and update number, say).
        indices: the tasks' numbers in a larger batch, of which these are a part (default 0, 1, …).
        max_live: most environments live at once.
        overlap: see above.
        clock: is told how long was waited for what.
        retries: environments that a path may lose before it is dropped. 0: the first error is raised.
        failures: is told of every environment that was lost.
        look: is asked of every state in which the policy acts; see `Look`.

    Raises:
        ValueError: the policy returned None at the first step of a path.
        Exception: whatever an environment raised, unless there are ``retries``.
    """
    from sandboxgym.lockstep import Lockstep  # which is made of what is defined here

    places = indices if indices is not None else range(len(tasks))
    failed: list[Failure] = failures if failures is not None else []
    with ThreadPoolExecutor(2, thread_name_prefix="sandboxgym-rollout") as halves:  # no thread unless it is used
        background = halves if overlap else None
        way = Lockstep(envs, policy, schedule, seed, clock or Clock(), background, retries, failed, look)
        return way.run(tasks, places, max_live)
