"""Schedules: rules for forking rollout trees, and for ending paths early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sandboxgym.tree.nodes import Action, Node, Path, RolloutTree


class Schedule:
    """A rule for forking. This one never does: ``roots`` independent rollouts per task.

    A rule that looks at the path it is asked about, at the states above it, and at what it noted about these gives the
    same trees in `rollout` and `rollout_async`; in the latter other paths of the tree grow in an order of their own.

    Args:
        roots: number of independent rollouts per task, or for each task by its index in the batch.

    Raises:
        ValueError: a task would have none.
    """

    def __init__(self, roots: int | Mapping[int, int]) -> None:
        self.roots = roots
        if (min(roots.values(), default=1) if isinstance(roots, Mapping) else roots) < 1:
            raise ValueError(f"expected at least one root path, found roots={roots}")

    def roots_of(self, index: int) -> int:
        """Number of independent rollouts for the task at this index; raises `ValueError` if the task has none."""
        if not isinstance(self.roots, Mapping):
            return self.roots
        if index not in self.roots:
            raise ValueError(f"expected a number of root paths for task {index} of the batch, found roots={self.roots}")
        return self.roots[index]

    def now(self, tree: RolloutTree, path: Path, node: Node, action: Action) -> int:
        """Number of siblings to start at ``node``, decided before ``action`` is executed: a causal rule.

        A sibling asks again at the node it starts from (``path.edges`` is empty then).
        """
        return 0

    def survival(self, tree: RolloutTree, path: Path, node: Node) -> float:
        """Probability with which ``path`` continues from ``node``, asked after each of its steps: Russian roulette.

        The coin has a stream of its own. A path that is stopped ends truncated at the node.
        """
        return 1.0

    def watches(self, path: Path) -> bool:
        """True if `after` will be asked about this path: a snapshot is kept at each of its steps until it has ended."""
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
        """``width - 1`` siblings at each of the depths."""
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
        """True for a task's first path, whose ends all forks start from."""
        return path.key == (0, 0)

    def after(self, tree: RolloutTree, path: Path) -> Iterable[tuple[Node, int]]:
        """The path's nodes of highest entropy; ties go to the earlier one."""
        ranked = sorted(path.edges, key=lambda edge: (-edge.action.entropy, edge.parent.depth))
        return [(edge.parent, self.width - 1) for edge in ranked[: self.points]]
