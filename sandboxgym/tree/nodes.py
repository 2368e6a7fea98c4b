"""Rollout trees as data: nodes, edges, paths and trees.

A ``repr`` leaves out what something is connected with: that of a tree would contain every state many times over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

PathKey = tuple[int, ...]
"""(depth, sibling) pairs of the forks that lead to a path; independent rollouts are (0, 0), (0, 1), …"""


@dataclass(slots=True)
class Action:
    """One decision of a policy."""

    text: Any
    """Argument of ``env.step``."""
    entropy: float = math.nan
    """Entropy (nats) of the decision's first distribution: the criterion of entropy schedules."""
    logp: float = math.nan
    """Log-probability (nats) of the decision, summed over its tokens."""
    position: int = 0
    """Tokens of context before the decision."""
    tokens: int = 0
    """Tokens generated."""
    memory: Any = None
    """State returned to the policy at the next step of this path, and of forks off that step. Never mutated."""
    data: Any = None
    """Other data that a trainer keeps of the decision."""
    valid: bool = True
    """False where the policy's answer could not be read: the edge is then invalid whatever the environment says."""


@dataclass(slots=True, eq=False)
class Node:
    """A state of the environment: a decision point of the policy, or a leaf."""

    depth: int
    observation: Any
    key: Any
    """``info["progress_key"]``, for state baselines."""
    owner: PathKey
    """The path that reached it first; () for the root."""
    parent: Edge | None = field(default=None, repr=False)
    children: list[Edge] = field(default_factory=list, repr=False)
    width: int = 0
    """Paths started or continued here so far: the index of the next sibling."""
    value: float = 0.0
    """Estimate of the return from here, backed up from the leaves below by a trainer."""
    survival: float = 1.0
    """Probability with which the path continued from here (`Schedule.survival`)."""
    stopped: bool = False
    """True if the path did not continue."""
    luck: float = 0.0
    """Part of ``value`` that is luck of the decisions from here on, estimated (`Edge.control`)."""
    ahead: Any = field(default=None, kw_only=True)
    """Result of `rollout`'s ``look`` at this node."""
    state_hash: Any = field(default=None, kw_only=True)
    """``info["state_hash"]``, equal for equal states, where the environment gives one."""
    features: Any = field(default=None, kw_only=True)
    """``info["features"]``, numbers for learned state values, where the environment gives them. Privileged: no policy
    may see them."""


@dataclass(slots=True, eq=False)
class Edge:
    """One action taken, from its node to the next."""

    path: PathKey
    parent: Node = field(repr=False)
    action: Action
    child: Node = field(init=False, repr=False)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    success: bool = False
    verdict: str = field(default="", kw_only=True)
    """``info["verdict"]``, where the environment gives one."""
    masked: bool = field(default=False, kw_only=True)
    """``info["masked"]``: the episode ended here, and its rewards say nothing about the actions in it."""
    suspicious: bool = field(default=False, kw_only=True)
    """``info["suspicious"]`` is not empty: the reward may have been obtained by a trick."""
    value: float = 0.0
    """Estimate of the return of taking this action here, backed up like `Node.value`."""
    control: float = field(default=0.0, kw_only=True)
    """Estimated advantage of this action over the policy's average action here: 0 in expectation."""
    luck: float = field(default=0.0, kw_only=True)
    """Part of ``value`` that is luck of the decisions after this one, backed up from their ``control``."""
    ratio: float = field(default=1.0, kw_only=True)
    """Probability of the action under the policy that is trained over that under an earlier one that sampled it."""
    advantage: float = 0.0
    weight: float = 1.0
    data: Any = None
    """Other data that a trainer keeps of the edge."""


@dataclass(slots=True, eq=False)
class Path:
    """The edges sampled in one go from ``start`` to an end."""

    key: PathKey
    start: Node = field(repr=False)
    edges: list[Edge] = field(default_factory=list, repr=False)

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
        """Undiscounted return of the whole episode that ends with this path."""
        return sum(edge.reward for edge in self.from_root())


@dataclass(slots=True, eq=False)
class RolloutTree:
    """All paths rolled out for one task."""

    task: Any
    index: int
    """Number of the task in its batch; part of the key of every random stream."""
    root: Node = field(repr=False)
    kind: str = ""
    """``info["task_type"]``, where the environment has types of tasks."""
    paths: list[Path] = field(default_factory=list, repr=False)
    snapshots: int = 0
    snapshot_seconds: float = 0.0
    """Time taken by them, each one's own."""

    def edges(self) -> Iterator[Edge]:
        """Every action taken, each once."""
        for path in self.paths:
            yield from path.edges

    def offspring(self, key: PathKey) -> set[PathKey]:
        """Keys of a path and of all paths forked off it, directly or not."""
        keys = {key}
        for path in self.paths:  # those that a path was forked off come before it
            if path.start.owner in keys:
                keys.add(path.key)
        return keys

    def remove(self, keys: Collection[PathKey]) -> None:
        """Remove paths with all paths forked off them, as if they had never been sampled."""
        for path in self.paths:
            if path.key in keys and path.edges:
                path.start.children.remove(path.edges[0])
        self.paths = [path for path in self.paths if path.key not in keys]

    @property
    def env_steps(self) -> int:
        """Number of environment steps taken."""
        return sum(len(path.edges) for path in self.paths)

    @property
    def tokens(self) -> int:
        """Number of tokens generated."""
        return sum(edge.action.tokens for edge in self.edges())

    @property
    def branch_nodes(self) -> list[Node]:
        """Nodes with several edges, in the order of `edges`."""
        starts = {id(path.start): path.start for path in self.paths}
        return [node for node in starts.values() if len(node.children) > 1]
