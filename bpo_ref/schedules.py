"""Branching schedules: the rules behind ``--schedule``, each a `sandboxgym.tree.Schedule`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bpo_ref.baselines import Memory, ValueTable, independent, state_key
from bpo_ref.config import ConfigError
from sandboxgym.tree import Action, Edge, Node, Path, RolloutTree, Schedule

if TYPE_CHECKING:
    from bpo_ref.args import Args


RULES = {
    "none": "never forks: independent rollouts of the task",
    "root": "forks at the start only",
    "entropy": "forks at the steps of highest entropy, once the path has ended",
    "lowest": "forks at the steps of lowest entropy, once the path has ended",
    "random": "forks at steps drawn at random, once the path has ended",
    "spaced": "forks at evenly spaced steps, once the path has ended",
    "value-oracle": "forks at the steps where the return depends most on the action, known from extra rollouts",
    "entropy-online": "forks where the entropy exceeds a threshold fixed before the episode",
    "explained": "forks at the depth at which a set share of the return's variance has been decided",
    "split": "forks wherever a state's importance (variance of the return, per step that remains) has quadrupled since "
    "the last fork on its path, by earlier updates' V̂: not by entropy",
    "mc": "forks to estimate V̂, at every step or at some",
}
"""Rules of each ``--schedule`` in words, for viewers of its trees."""
FAIR = (
    "none",
    "entropy-online",
    "explained",
    "split",
)
"""Schedules that fork before the action and treat all children equally: the paths from a fork are independent draws of
the policy. Others choose by how a path continued, or only fork to estimate values."""


class Forks(Schedule):
    """Base of the branching rules: which paths fork, how often (M times from root to leaf), and how far apart."""

    def __init__(self, args: Args, seed: Sequence[int]) -> None:
        assert args.roots is not None and args.width is not None and args.points is not None
        super().__init__(args.roots)
        self.args, self.seed, self.points, self.siblings = args, seed, args.points, args.width - 1
        self.root_used = args.root_branch == "always"
        self._budgets: dict[int, int] = {}
        self._forked: dict[int, int] = {}  # id(node) -> tokens of context there

    def budget(self, tree: RolloutTree) -> int:
        """M of this tree, without the root's own point; drawn once per tree where M is a fraction."""
        if tree.index not in self._budgets:
            low = math.floor(self.points)
            stream = np.random.default_rng([*self.seed, tree.index, 0])
            self._budgets[tree.index] = low + int(stream.random() < self.points - low) - int(self.root_used)
        return self._budgets[tree.index]

    def forkable(self, path: Path) -> bool:
        """Tell whether ``forks`` names this path."""
        by_name = {"backbone": path.key == (0, 0), "roots": len(path.key) == 2, "all": True}
        return by_name[str(self.args.forks)]

    def eligible(self, node: Node) -> bool:
        """Tell whether the schedule may branch at this node at all."""
        return id(node) not in self._forked and (self.args.root_branch == "free" or node.depth > 0)

    def above(self, node: Node) -> list[int]:
        """Tokens of context at the branch points from ``node`` up, except a root that always branches."""
        found = []
        at: Node | None = node
        while at is not None:
            if id(at) in self._forked:
                found.append(self._forked[id(at)])
            at = at.parent.parent if at.parent else None
        return found

    def apart(self, position: int, chosen: Sequence[int], first: int) -> bool:
        """Tell whether a context position keeps the spacing to earlier ones, and to the root where that branches."""
        marks = [*chosen, first] if self.root_used else chosen
        return all(abs(position - mark) >= self.args.spacing for mark in marks)

    def fork(self, node: Node, position: int) -> int:
        """Make a node a branch point; returns the number of siblings."""
        self._forked[id(node)] = position
        return self.siblings


class PostHoc(Forks):
    """Branch after the path has finished, at its best steps by rank: `entropy` (the paper's top-M), `lowest`, `random`,
    `spaced`, `root`; or by ``scores``, (task index, depth) -> score (`value-oracle`).
    """

    def __init__(self, args: Args, seed: Sequence[int], scores: Mapping[tuple[int, int], float] | None = None) -> None:
        super().__init__(args, seed)
        self._scores = scores or {}

    def watches(self, path: Path) -> bool:
        """Tell whether the path may fork."""
        return self.forkable(path)

    def after(self, tree: RolloutTree, path: Path) -> Iterable[tuple[Node, int]]:
        """Choose the best steps by rank that keep the spacing, M with those above; ties go to the earlier step."""
        edges = [edge for edge in path.edges if self.eligible(edge.parent)]
        before, first = self.above(path.start), path.from_root()[0].action.position
        left = self.budget(tree) - len(before)
        chosen: list[Edge] = []
        for edge in sorted(edges, key=self._rank(tree, path, edges)):
            position = edge.action.position
            if left and self.apart(position, [*before, *(e.action.position for e in chosen)], first):
                chosen.append(edge)
                left -= 1
        extra = left * self.siblings if self.args.fill == "widen" and chosen else 0
        for place, edge in enumerate(chosen):
            share = extra // len(chosen) + (place < extra % len(chosen))
            yield edge.parent, self.fork(edge.parent, edge.action.position) + share

    def _rank(self, tree: RolloutTree, path: Path, edges: Sequence[Edge]) -> Callable[[Edge], tuple[float, int]]:
        name = self.args.schedule
        if name == "entropy":
            return lambda edge: (-edge.action.entropy, edge.parent.depth)
        if name == "lowest":
            return lambda edge: (edge.action.entropy, edge.parent.depth)
        if name == "root":
            return lambda edge: (edge.parent.depth, edge.parent.depth)
        if name == "value-oracle":
            return lambda edge: (-self._scores.get((tree.index, edge.parent.depth), 0.0), edge.parent.depth)
        if name == "spaced":  # depths nearest to the ends of M + 1 equal parts of the path
            part = len(edges) / (self.budget(tree) + 1)
            marks = [path.start.depth + int((i + 1) * part + 0.5) for i in range(self.budget(tree))]
            return lambda edge: (min((abs(edge.parent.depth - mark) for mark in marks), default=0.0), edge.parent.depth)
        stream = np.random.default_rng([*self.seed, tree.index, 1, *path.key])
        order = {id(edge): place for edge, place in zip(edges, stream.permutation(len(edges)))}
        return lambda edge: (float(order[id(edge)]), 0)


class Online(Forks):
    """Branch when the entropy exceeds a threshold fixed before the episode: causal, so siblings stay exchangeable.

    Without a threshold (the first batch) branch at evenly spaced depths of an episode of half the turn limit.
    """

    def __init__(self, args: Args, seed: Sequence[int], threshold: float | None) -> None:
        super().__init__(args, seed)
        self._threshold = threshold

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        """Return K - 1 siblings if the rule, the spacing and the budget allow it."""
        if not self.forkable(path) or not self.eligible(node):
            return 0
        before, budget = self.above(node), self.budget(tree)
        if len(before) >= budget:
            return 0
        if self._threshold is None:
            wanted = node.depth in {round((i + 1) * self.args.max_turns / 2 / (budget + 1)) for i in range(budget)}
        else:
            wanted = action.entropy > self._threshold
        first = path.from_root()[0].action.position if node.depth else action.position
        return self.fork(node, action.position) if wanted and self.apart(action.position, before, first) else 0


class Explained(Forks):
    """Branch at one depth: ``depth``, rounded at random for each path."""

    def __init__(self, args: Args, seed: Sequence[int], depth: float) -> None:
        super().__init__(args, seed)
        self._depth = depth

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        """Return K - 1 siblings at that depth, if the budget allows it."""
        u = np.random.default_rng([*self.seed, tree.index, 2, *path.key]).random()
        wanted = node.depth == math.floor(self._depth + u) and self.forkable(path) and self.eligible(node)
        allowed = wanted and len(self.above(node)) < self.budget(tree)
        return self.fork(node, action.position) if allowed else 0


class Split(Forks):
    """Branch wherever a state's importance I = Var(G given s) (t + 1) / (T - t) has quadrupled since the last split on
    its path, by the values of earlier batches; stop paths of nearly no value by Russian roulette.
    """

    def __init__(self, args: Args, seed: Sequence[int], values: ValueTable, returns: ValueTable | None = None) -> None:
        super().__init__(args, seed)
        self._values, self._returns = values, values if returns is None else returns
        self._survival = (args.roulette or 1.0) if values.trusts(args.roulette_below) else 1.0
        self._met: set[tuple[int, Any]] = set()  # paths that have met the roulette

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        """Return K - 1 siblings where I ≥ 4^(l + 1) v0 / T, after l splits; v0 is the variance of whole returns."""
        before, met = len(self.above(node)), (tree.index, path.key) in self._met
        if not self._returns.spread or met or not self.forkable(path) or not self.eligible(node):
            return 0
        limit, t = self.args.max_turns, node.depth
        importance = self._returns.variance(state_key(node, "key"), tree.kind) * (t + 1) / (limit - t)
        wanted = before < self.budget(tree) and importance >= 4 ** (before + 1) * self._returns.spread / limit
        return self.fork(node, action.position) if wanted else 0

    def survival(self, tree: RolloutTree, path: Path, node: Node) -> float:
        """Return q at a path's first state of V̂ at most ``roulette_below``, from turn 2 on; 1 everywhere else.

        It is 1 everywhere until `ValueTable.trusts` such values.
        """
        identity = (tree.index, path.key)
        if self._survival == 1.0 or node.depth < 2 or identity in self._met:
            return 1.0
        if self._values.value(state_key(node, "key"), tree.kind) > self.args.roulette_below:
            return 1.0
        self._met.add(identity)
        return self._survival


class MonteCarlo(Schedule):
    """VinePPO's Monte Carlo values: rollouts from the root and from each state, or from turns drawn beforehand."""

    def __init__(self, args: Args, seed: Sequence[int]) -> None:
        assert args.roots is not None
        super().__init__(args.roots)
        self._args, self._seed = args, seed

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        """Return ``mc_rollouts`` at the valued states of the independent rollouts, and 0 elsewhere.

        The root is valued once per task, and not at all with ``mc_turns``.
        """
        args = self._args
        if not independent(path, args) or (node.depth == 0 and (path.key != (0, 0) or args.mc_turns)):
            return 0
        if args.mc_turns:
            turns = np.random.default_rng([*self._seed, tree.index, 3, *path.key]).permutation(args.max_turns)
            if node.depth not in turns[: args.mc_turns]:
                return 0
        return args.mc_rollouts


def make_schedule(
    args: Args,
    seed: Sequence[int],
    memory: Memory,
    scores: Mapping[tuple[int, int], float] | None = None,
    tasks: Sequence[Any] = (),
) -> Schedule:
    """Make the schedule of one batch.

    Args:
        args: resolved.
        seed: keys what it draws.
        memory: memory of earlier batches.
        scores: those of ``value-oracle``.
        tasks: all of the batch, of every process, by index; for ``allocation=spread``.

    Raises:
        ConfigError: ``allocation=spread``, but the environment has no tasks that could be known again.
    """
    assert args.roots is not None
    schedule = _make(args, seed, memory, scores)
    if args.allocation == "spread":
        if not tasks or None in tasks:
            raise ConfigError(f"allocation: spread needs tasks that recur; {args.env_id} has no num_tasks")
        least = 1 + (args.baseline == "none")  # without another rollout only other tasks are a baseline
        schedule.roots = dict(enumerate(memory.spread.allot(tasks, mean=args.roots, least=least)))
    return schedule


def _make(args: Args, seed: Sequence[int], memory: Memory, scores: Mapping[tuple[int, int], float] | None) -> Schedule:
    assert args.roots is not None
    if args.schedule == "none":
        return Schedule(args.roots)
    if args.schedule == "mc":
        return MonteCarlo(args, seed)
    if args.schedule == "entropy-online":
        return Online(args, seed, memory.entropies.value())
    if args.schedule == "explained":
        return Explained(args, seed, memory.depth.depth)
    if args.schedule == "split":
        return Split(args, seed, memory.values, memory.fair if args.split_variance == "fair" else memory.values)
    return PostHoc(args, seed, scores)
