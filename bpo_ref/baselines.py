"""Baselines and schedule statistics from outside a tree: from other rollouts of its batch, and from earlier batches.

No value here depends on the action that it is compared with, nor on that action's outcome: this keeps estimators with
these baselines and schedules unbiased.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from bpo_ref.config import ConfigError
from bpo_ref.learning.value_network import Example, Features, ValueNetwork, told_of
from sandboxgym.tree import Edge, Node, Path, RolloutTree

if TYPE_CHECKING:
    from bpo_ref.args import Args

StateKey: TypeAlias = Any
Moments: TypeAlias = tuple[float, float, float]
"""Share of a rollout that was there, its mean return from there, the mean squared return."""
RootTable: TypeAlias = dict[StateKey, Moments]
Gather: TypeAlias = Callable[[list[Any]], list[Any]]


def state_key(node: Node, kind: str) -> StateKey:
    """Key by which states are pooled.

    Args:
        node: the state.
        kind: ``turn``: the turn; ``key``: the environment's progress key and half the turn, rounded down; ``refusals``:
            these two, and the number of answers refused in a row (0, 1, 2 or more).

    Raises:
        ConfigError: the progress key is not plain data; see `plain_key`.
    """
    if kind == "turn":
        return node.depth
    progress = (plain_key(node.key), node.depth // 2)
    return progress if kind == "key" else (*progress, refusals(node))


def refusals(node: Node) -> int:
    """Count the answers just before a state that the environment refused, 2 at most."""
    count, edge = 0, node.parent
    while edge is not None and not edge.valid and count < 2:
        count, edge = count + 1, edge.parent.parent
    return count


def features(node: Node, kind: str) -> Features:
    """Features of a node's state in a task of this type."""
    return Features(told_of(node.features), node.depth, refusals(node), kind)


def examples(tree: RolloutTree) -> list[Example]:
    """Collect the states of a backed-up tree with the mean value of their actions; every return counts once."""
    found, todo = [], [(tree.root, float(len(tree.root.children)))]
    while todo:
        node, share = todo.pop()
        if node.children:
            found.append(Example(features(node, tree.kind), mean_value(node), share))
            todo += [(edge.child, share / len(node.children)) for edge in node.children]
    return found


def plain_key(key: Any) -> StateKey:
    """Convert a ``progress_key`` to plain data for checkpoints and other processes; equal keys stay equal.

    Raises:
        ConfigError: it is or contains anything other than text, bytes, numbers (also NumPy's), None, enumeration
            members, and tuples or frozen sets of these.
    """
    if key is None or type(key) in (str, int, float, bool, bytes):
        return key
    if isinstance(key, enum.Enum):
        return (type(key).__name__, key.name)
    if isinstance(key, np.generic):
        return plain_key(key.item())
    if isinstance(key, tuple):
        return tuple(map(plain_key, key))
    if isinstance(key, frozenset):
        return ("frozenset", *sorted(map(plain_key, key), key=repr))
    raise ConfigError(
        "info['progress_key']: expected text, bytes, a number, None, a member of an enumeration, or a tuple or frozen "
        f"set of these, found {type(key).__name__}"
    )


def mean_value(node: Node) -> float:
    """Mean of the children's values: the state's own value even where `Node.value` holds what is backed up.

    Where an earlier policy sampled them, each is weighted by `Edge.ratio`: the value is that of the trained policy.
    """
    return sum(edge.ratio * edge.value for edge in node.children) / len(node.children)


def fair_value(edge: Edge) -> float:
    """Return of an action less the luck of it and of all later decisions: an estimate of its *state's* value.

    Without look-ahead it is `Edge.value`; that of an earlier policy's action is weighted by `Edge.ratio`.
    """
    return edge.ratio * (edge.value - edge.luck - edge.control)


def fair_mean(node: Node) -> float:
    """Mean of the children's `fair_value`."""
    return sum(map(fair_value, node.children)) / len(node.children)


@dataclass(frozen=True)
class TreeSummary:
    """The part of a tree that other tasks' baselines and later batches need, small enough for processes to exchange."""

    task: Any
    """`RolloutTree.task`."""
    index: int
    kind: str
    """`RolloutTree.kind`."""
    value: float
    roots: list[RootTable]
    returns: list[tuple[float, float]]
    """Mean return and mean squared return of each independent rollout's subtree."""


def summarize(
    tree: RolloutTree,
    kind: str,
    *,
    gamma: float = 1.0,
    fair: bool = False,
    known: Callable[[Node], float] = lambda node: 0.0,
) -> TreeSummary:
    """Summarise a tree: mean value of each independent rollout's subtree at each state key, every return counted once.

    With ``fair`` the values and their squares are less luck (`fair_value`), as the batch's own baselines want them;
    later batches learn from plain returns. The ``known`` value of a state is subtracted from its values.
    """
    mean = fair_mean if fair else mean_value
    squares = _second_moments(tree, gamma, fair=fair)
    roots: list[RootTable] = []
    returns: list[tuple[float, float]] = []
    for root_edge in tree.root.children:
        v = fair_value(root_edge) if fair else root_edge.value
        s = _square(root_edge, gamma, squares, fair=fair)
        sums: dict[StateKey, list[float]] = {state_key(tree.root, kind): [1.0, v - known(tree.root), s]}
        todo = [(root_edge.child, 1.0)]
        while todo:
            node, share = todo.pop()
            if node.children:
                entry = sums.setdefault(state_key(node, kind), [0.0, 0.0, 0.0])
                entry[0] += share
                entry[1] += share * (mean(node) - known(node))
                entry[2] += share * squares[id(node)]
                todo += [(edge.child, share / len(node.children)) for edge in node.children]
        roots.append({key: (min(1.0, n), total / n, square / n) for key, (n, total, square) in sums.items()})
        returns.append((v, s))
    return TreeSummary(tree.task, tree.index, tree.kind, mean(tree.root), roots, returns)


def _second_moments(tree: RolloutTree, gamma: float, *, fair: bool = False) -> dict[int, float]:
    """Mean squared return from every node with children, by id(node); ``fair`` subtracts luck first."""
    squares: dict[int, float] = {}
    for node in sorted([tree.root, *(edge.child for edge in tree.edges())], key=lambda node: -node.depth):
        if node.children:
            total = sum(_square(edge, gamma, squares, fair=fair) for edge in node.children)
            squares[id(node)] = total / len(node.children)
    return squares


def _square(edge: Edge, gamma: float, squares: dict[int, float], *, fair: bool) -> float:
    """Mean of (r + γ G)²; a stopped path counts as its backed-up V̂, squared."""
    reward = edge.reward - edge.control * fair
    value = edge.child.value - edge.child.luck * fair
    square = squares.get(id(edge.child), value**2)
    return reward * reward + 2 * gamma * reward * value + gamma * gamma * square


class StateBaseline:
    """Value of a state from other rollouts of the batch: the task's other independent ones, shrunk to the other tasks'.

    With n and S the number and summed value of this task's other independent rollouts at the key, n' and S' over the
    other tasks, whose mean value is v̄:  m = (S' + 2 v̄) / (n' + 2),  b = (S + 6 m) / (n + 6). For ``pooled``, m is V̂
    of earlier batches.
    """

    SHRINK_TASK, SHRINK_ALL = 6.0, 2.0

    def __init__(self, summaries: Sequence[TreeSummary]) -> None:
        self._by_index = {summary.index: summary for summary in summaries}
        self._values = sum(summary.value for summary in summaries)
        self._tasks: dict[int, dict[StateKey, list[float]]] = {}
        self._all: dict[StateKey, list[float]] = {}
        for summary in summaries:
            task = self._tasks[summary.index] = {}
            for table in summary.roots:
                _accumulate(task, table)
                _accumulate(self._all, table)

    def others(self, index: int) -> float:
        """Mean value of the other tasks (0 if there are none)."""
        n = len(self._by_index) - 1
        return (self._values - self._by_index[index].value) / n if n else 0.0

    def __call__(self, index: int, root: int, key: StateKey, prior: float | None = None) -> float:
        """Baseline for a step at a state key.

        Args:
            index: index of the task in the batch.
            root: index of the independent rollout that the step, or the path it was forked off, belongs to.
            key: state key.
            prior: m. None: computed from the other tasks.
        """
        n_task, s_task = self._tasks[index].get(key, (0.0, 0.0))
        n_own, mean_own, _ = self._by_index[index].roots[root].get(key, (0.0, 0.0, 0.0))
        if prior is None:
            n_all, s_all = self._all.get(key, (0.0, 0.0))
            prior = (s_all - s_task + self.SHRINK_ALL * self.others(index)) / (n_all - n_task + self.SHRINK_ALL)
        return (s_task - n_own * mean_own + self.SHRINK_TASK * prior) / (n_task - n_own + self.SHRINK_TASK)


def _accumulate(sums: dict[StateKey, list[float]], table: RootTable) -> None:
    for key, (n, mean, _) in table.items():
        entry = sums.setdefault(key, [0.0, 0.0])
        entry[0] += n
        entry[1] += n * mean


class EntropyThreshold:
    """Running quantile of the forkable paths' entropies in earlier batches, set to spend nearly M points on each.

    High entropies come in clusters, and a path branches at no more than its M points: so each path counts with
    its M highest only. All of the budget would be spent by no threshold at all, hence ``SPENT`` of it.

    Args:
        points: M, without the root's own.
        first: depth from which on the schedule may choose.
        keep: number of paths remembered.
        history: entropies of the remembered paths.
    """

    SPENT = 0.9

    def __init__(self, points: float, *, first: int, keep: int, history: Iterable[Sequence[float]] = ()) -> None:
        self._points, self._first = points, first
        self.history: deque[list[float]] = deque((list(h) for h in history), maxlen=keep)

    def observe(self, paths: Iterable[Sequence[float]]) -> None:
        """Add the entropies of a batch's independent rollouts, one sequence each, by depth."""
        self.history.extend(list(path)[self._first :] for path in paths)

    def value(self) -> float | None:
        """The threshold; None before the first batch, and where M is 0."""
        highest = [h for path in self.history for h in sorted(path)[-math.ceil(self._points) :]]
        if not highest or not self._points:
            return None
        share = self.SPENT * self._points * len(self.history) / len(highest)
        return float(np.quantile(highest, max(0.0, 1.0 - share)))


class ValueTable:
    """V̂ of a state: mean return from states of its key over earlier batches, plus 2 pseudo-counts of the overall mean.

    Where tasks have types, the mean over the tasks of this type, plus 4 pseudo-counts of that over all. Entries
    decayed to a thousandth of a rollout, where the pseudo-counts decide alone, are forgotten.

    Args:
        decay: share of what is known that is kept at each batch, as the policy changes.
        state: result of `state`.
    """

    PSEUDO, KIND, FORGOTTEN = 2.0, 4.0, 1e-3

    def __init__(self, decay: float = 1.0, *, state: dict[str, Any] | None = None) -> None:
        self._decay = decay
        self._sums: dict[StateKey, list[float]] = {key: list(entry) for key, entry in (state or {}).get("sums", [])}
        self._overall: list[float] = list((state or {}).get("overall", [0.0, 0.0, 0.0]))
        self._low: list[float] = list((state or {}).get("low", [0.0, 0.0]))

    def copy(self) -> ValueTable:
        """Copy the table as it is now."""
        return ValueTable(self._decay, state=self.state())

    def state(self) -> dict[str, Any]:
        """Content of the value table, for a checkpoint."""
        sums = [(key, list(entry)) for key, entry in self._sums.items()]
        return {"sums": sums, "overall": list(self._overall), "low": list(self._low)}

    def observe(self, summaries: Sequence[TreeSummary], *, low: float) -> None:
        """Add a batch. States valued at most ``low`` before it are the test of `trusts`."""
        batch = [(s.kind, *entry) for s in summaries for table in s.roots for entry in table.items()]
        if self.known:
            for kind, key, (n, mean, _) in batch:
                if self.value(key, kind) <= low:
                    self._low = [self._low[0] + n, self._low[1] + n * mean]
        for entry in [*self._sums.values(), self._overall, self._low]:
            entry[:] = [value * self._decay for value in entry]
        self._sums = {key: entry for key, entry in self._sums.items() if entry[0] >= self.FORGOTTEN}
        for kind, key, (n, mean, square) in batch:
            for place in (key, (kind, key)) if kind else (key,):
                entry = self._sums.setdefault(place, [0.0, 0.0, 0.0])
                entry[:] = [a + b for a, b in zip(entry, (n, n * mean, n * square))]
        for mean, square in (pair for summary in summaries for pair in summary.returns):
            self._overall[:] = [a + b for a, b in zip(self._overall, (1.0, mean, square))]

    @property
    def known(self) -> bool:
        """True once a batch was observed."""
        return bool(self._sums)

    @property
    def mean(self) -> float:
        """p̄: mean return of an episode."""
        return self._overall[1] / self._overall[0] if self._overall[0] else 0.0

    @property
    def spread(self) -> float:
        """Variance of the return of an episode; p̄ (1 - p̄) where it is 0 or 1."""
        return max(0.0, self._overall[2] / self._overall[0] - self.mean**2) if self._overall[0] else 0.0

    def value(self, key: StateKey, kind: str = "", *, prior: float | None = None) -> float:
        """V̂ at a key in tasks of a type; ``prior`` stands in for p̄ before the first batch."""
        return self._moment(1, key, kind, self.mean if self.known or prior is None else prior)

    def variance(self, key: StateKey, kind: str = "") -> float:
        """Variance of the return from states of a key; V̂ (1 - V̂) where it is 0 or 1."""
        square = self._moment(2, key, kind, self.spread + self.mean**2)
        return max(0.0, square - self.value(key, kind) ** 2)

    def _moment(self, power: int, key: StateKey, kind: str, overall: float) -> float:
        """Mean of the return (or of its square), the type's shrunk to all types' and that to the overall mean."""
        nothing = [0.0, 0.0, 0.0]
        shared, typed = self._sums.get(key, nothing), self._sums.get((kind, key), nothing)
        mean = (shared[power] + self.PSEUDO * overall) / (shared[0] + self.PSEUDO)
        return (typed[power] + self.KIND * mean) / (typed[0] + self.KIND)

    def trusts(self, low: float, *, least: float = 10.0) -> bool:
        """True if states valued at most ``low`` had at most twice that mean return in later batches.

        Args:
            low: the bound on V̂ that `observe` was given.
            least: smallest number of rollouts through such states, old ones discounted by ``decay``.
        """
        n, total = self._low
        return n >= least and total / n <= 2 * low


@dataclass(frozen=True)
class ForkSample:
    """Statistics of a branch node below the root: noise within its fork, and distance from the baseline there."""

    tree: int
    """Index of its task in the batch."""
    width: int
    within: float
    """Sample variance of the children's values."""
    apart: float
    """Mean of the children's values minus the baseline there."""


class Shrinkage:
    """κ of the sibling mean's weight a = (K - 1) / (K - 1 + κ): an analysis of variance over earlier batches.

    σ² = mean variance within forks, τ² = mean (fork mean - baseline)² - σ² / K, κ = σ² / τ²; 2 before the first batch.
    """

    DECAY, START = 0.95, 2.0

    def __init__(self, sums: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> None:
        self.sums = list(sums)  # forks, Σ within, Σ apart², Σ within / K

    def observe(self, forks: Iterable[ForkSample]) -> None:
        """Add a batch's forks."""
        found = list(forks)
        self.sums = [value * self.DECAY for value in self.sums] if found else self.sums
        for fork in found:
            new = (1.0, fork.within, fork.apart**2, fork.within / fork.width)
            self.sums = [a + b for a, b in zip(self.sums, new)]

    @property
    def kappa(self) -> float:
        """κ, from the forks observed so far."""
        n, within, apart, noise = self.sums
        if not n:
            return self.START
        return within / max(apart - noise, 1e-3 * n)

    def weight(self, width: int) -> float:
        """Weight a of the sibling mean in a fork with this many children."""
        return (width - 1) / (width - 1 + self.kappa)


class ForkDepth:
    """Depth to fork at, in turns: where the past explains ``SHARE`` of the variance of the return.

    After each batch it moves towards where 1 - (variance within forks) / (variance between independent rollouts) is
    that share; a rollout that ended before its fork has variance 0 there.
    """

    SHARE, GAIN = 0.3, 2.0

    def __init__(self, depth: float, *, limit: int) -> None:
        self.depth, self._limit = depth, limit

    def observe(self, samples: Iterable[tuple[float, float]]) -> None:
        """Add each tree's mean variance within the forks of its independent rollouts, and variance between these."""
        within, between = (sum(part) for part in zip(*samples, strict=True))
        if between > 0:
            explained = 1.0 - within / between
            self.depth += float(np.clip(self.GAIN * (self.SHARE - explained), -1.0, 1.0))
            self.depth = min(max(self.depth, 1.0), float(self._limit - 1))

    @staticmethod
    def sample(tree: RolloutTree, returns: Sequence[float]) -> tuple[float, float]:
        """Make a tree's sample for `observe` from the returns of its independent rollouts; 0, 0 for fewer than two."""
        if len(returns) < 2:
            return 0.0, 0.0
        within = sum(
            float(np.var([edge.value for edge in node.children], ddof=1)) for node in tree.branch_nodes if node.depth
        )
        return within / len(returns), float(np.var(returns, ddof=1))


class TaskSpread:
    """Standard deviation of each task's returns in earlier batches, by which independent rollouts are allocated.

    The variance of a task's returns is that of those seen and of ``PSEUDO`` more, which are like those of all tasks.

    Args:
        decay: share of the sums that is kept at each batch, as the policy changes.
        sums: (task, [independent rollouts, Σ return, Σ return²]), as a checkpoint keeps them.
    """

    PSEUDO, MOST = 2.0, 4

    def __init__(self, decay: float = 1.0, sums: Iterable[tuple[Any, Sequence[float]]] = ()) -> None:
        self._decay = decay
        self.sums: dict[Any, np.ndarray] = {task: np.array(entry, dtype=float) for task, entry in sums}

    def observe(self, summaries: Iterable[TreeSummary]) -> None:
        """Learn the returns of a batch's tasks."""
        for entry in self.sums.values():
            entry *= self._decay
        for summary in summaries:
            first, second = (sum(part) for part in zip(*summary.returns, strict=True))
            new = np.array([len(summary.returns), first, second], dtype=float)
            self.sums[summary.task] = self.sums.get(summary.task, 0.0) + new

    def allot(self, tasks: Sequence[Any], *, mean: int, least: int) -> list[int]:
        """Allocate independent rollouts to the tasks of a batch, n ∝ the returns' standard deviation (Neyman).

        This minimises Σ noise / n at a given Σ n x cost, if both the noise of a path's gradient, relative to the
        returns' variance, and its cost are in proportion to its length. Never by the batch's own outcomes, so a mean
        over each task's paths stays as unbiased as with equal numbers.

        Args:
            tasks: the batch.
            mean: independent rollouts per task on average; no batch exceeds it.
            least: smallest number per task; the largest is ``MOST`` times the mean.
        """
        total = mean * len(tasks)
        if not self.sums:
            return [mean] * len(tasks)
        overall = np.sum(list(self.sums.values()), axis=0)
        prior = self.PSEUDO * overall / overall[0]
        n, first, second = np.transpose([self.sums.get(task, 0.0) + prior for task in tasks])
        wanted = np.sqrt(np.maximum(second / n - (first / n) ** 2, 0.0))
        if not wanted.any():
            return [mean] * len(tasks)
        low, high = 0.0, self.MOST * mean / wanted[wanted > 0].min()
        for _ in range(60):  # the scale at which the clipped numbers have the right sum
            scale = (low + high) / 2
            fits = np.clip(scale * wanted, least, self.MOST * mean).sum() <= total
            low, high = (scale, high) if fits else (low, scale)
        shares = np.clip(low * wanted, least, self.MOST * mean)
        numbers = np.floor(shares + 1e-9).astype(int)
        left = round(shares.sum()) - int(numbers.sum())
        numbers[np.argsort(numbers - shares, kind="stable")[:left]] += 1
        return [int(number) for number in numbers]


def independent(path: Path, args: Args) -> bool:
    """True for one of the W independent rollouts: forks at the root are numbered after them."""
    return len(path.key) == 2 and (args.allocation == "spread" or path.key[1] < (args.roots or 0))


@dataclass
class Memory:
    """State learned from earlier batches, for the schedules and the baselines."""

    entropies: EntropyThreshold
    values: ValueTable
    shrinkage: Shrinkage
    depth: ForkDepth
    spread: TaskSpread
    refused: ValueTable
    """Running means as ``values``, with refusals in the key; for baselines only (`Args.refusals`)."""
    fair: ValueTable
    """Running means as ``values``, of returns less the luck of later decisions; for splits (`Args.split_variance`)."""
    network: ValueNetwork | None
    """Value network on features, if `Args.network` asks for it."""

    @classmethod
    def of(cls, args: Args, state: Mapping[str, Any] | None = None) -> Memory:
        """Make an empty memory, or restore the state of a checkpoint."""
        state = state or {}
        points = (args.points or 0.0) - (args.root_branch == "always")
        first, keep = int(args.root_branch != "free"), 8 * args.prompts
        network = None
        if args.network != "none":
            network = ValueNetwork(args.max_turns, args.value_decay, state=state.get("network"))
        return cls(
            EntropyThreshold(points, first=first, keep=keep, history=state.get("entropies", [])),
            ValueTable(args.value_decay, state=state.get("values")),
            Shrinkage(state.get("shrinkage", (0.0,) * 4)),
            ForkDepth(state.get("depth", max(1.0, args.max_turns / 4)), limit=args.max_turns),
            TaskSpread(args.value_decay, state.get("spread", ())),
            ValueTable(args.value_decay, state=state.get("refused")),
            ValueTable(args.value_decay, state=state.get("fair")),
            network,
        )

    def state(self) -> dict[str, Any]:
        """Content of the memory, for a checkpoint."""
        return {
            "entropies": list(self.entropies.history),
            "values": self.values.state(),
            "shrinkage": self.shrinkage.sums,
            "depth": self.depth.depth,
            "spread": [(task, entry.tolist()) for task, entry in self.spread.sums.items()],
            "refused": self.refused.state(),
            "fair": self.fair.state(),
            "network": self.network and self.network.state(),
        }

    def observe(
        self, trees: Sequence[RolloutTree], forks: Sequence[ForkSample], args: Args, gather: Gather = list
    ) -> None:
        """Add a batch with credit assigned, of all processes; ``forks`` is what `assign_credit` returned."""
        local = []
        for tree in trees:
            roots = [path for path in tree.paths if independent(path, args)]
            forked = roots[:1] if args.forks == "backbone" else roots
            entropies = [[edge.action.entropy for edge in path.edges] for path in forked]
            summary = summarize(tree, "key", gamma=args.gamma) if args.keyed or args.allocation == "spread" else None
            finer = summarize(tree, "refusals", gamma=args.gamma) if args.refusals else None
            fair = summarize(tree, "key", gamma=args.gamma, fair=True) if args.split_variance == "fair" else None
            seen = examples(tree) if self.network else []
            depth = ForkDepth.sample(tree, [path.total_reward for path in roots])
            found = [fork for fork in forks if fork.tree == tree.index]
            local.append((tree.index, entropies, summary, finer, fair, seen, depth, found))
        every = sorted(gather(local), key=lambda entry: entry[0])
        summaries = [summary for _, _, summary, *_ in every if summary]
        self.refused.observe([finer for _, _, _, finer, *_ in every if finer], low=args.roulette_below)
        self.fair.observe([fair for _, _, _, _, fair, *_ in every if fair], low=args.roulette_below)
        if self.network:
            self.network.observe([example for _, _, _, _, _, seen, *_ in every for example in seen])
        self.entropies.observe(path for _, paths, *_ in every for path in paths)
        self.values.observe(summaries if args.keyed else (), low=args.roulette_below)
        self.spread.observe(summaries if args.allocation == "spread" else ())
        if args.schedule == "explained":
            self.depth.observe(depth for *_, depth, _ in every)
        self.shrinkage.observe(fork for *_, found in every for fork in found)


def by_network(network: ValueNetwork, trees: Sequence[RolloutTree]) -> dict[int, float]:
    """V̂ of every state in which an action was taken, by id(node)."""
    nodes = {id(edge.parent): (edge.parent, tree.kind) for tree in trees for edge in tree.edges()}
    return dict(zip(nodes, network.values([features(node, kind) for node, kind in nodes.values()]), strict=True))
