"""Placement of workers on nodes: which nodes can hold them, and how they are spread again when nodes join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def eligible(
    nodes: Iterable[Mapping[str, Any]],
    needs: Mapping[str, float],
    leaving: Iterable[str],
    labels: Mapping[str, str] | None = None,
) -> list[str]:
    """Ids of the nodes that live, are not being left, and have in all what a worker needs.

    Args:
        nodes: as ``ray.nodes()`` lists them.
        needs: resources of a worker, by Ray's names (``CPU``, ``memory``, custom ones).
        leaving: ids of nodes that get no new work.
        labels: of a worker's nodes, as Ray selects them: ``v``, ``!v``, ``in(v,w)`` or ``!in(v,w)``.
    """
    out = set(leaving)
    return [
        node["NodeID"]
        for node in nodes
        if node["Alive"]
        and node["NodeID"] not in out
        and all(node["Resources"].get(name, 0.0) >= number for name, number in needs.items())
        and all(_selected(node.get("Labels", {}).get(name), wanted) for name, wanted in (labels or {}).items())
    ]


def _selected(label: str | None, wanted: str) -> bool:
    plain = wanted.removeprefix("!")
    among = plain[3:-1].split(",") if plain.startswith("in(") and plain.endswith(")") else [plain]
    return (label in [one.strip() for one in among]) is (plain == wanted)


def moves(workers: Mapping[str, Sequence[int]], nodes: Sequence[str]) -> list[tuple[int, str]]:
    """Workers to move so that nodes that just joined have their share, each with its new node.

    Nothing else is moved: a node gets workers only up to the number that every node has at least, rounded down, from
    the node that has most.

    Args:
        workers: numbers of the workers on each node, those to move first in front; nodes that are left are not in it.
        nodes: ids of the nodes that can hold workers.

    Returns:
        (number of a worker, id of its new node), for each to move.
    """
    here = {node: list(workers.get(node, ())) for node in nodes}
    share = sum(map(len, here.values())) // len(nodes) if nodes else 0
    found = []
    for node in nodes:
        while len(here[node]) < share:
            fullest = max(nodes, key=lambda other: len(here[other]))
            worker = here[fullest].pop(0)
            here[node].append(-1)
            found.append((worker, node))
    return found


def best_of(weights: Mapping[str, float]) -> list[str]:
    """Ids of the nodes whose weight is the largest, or nearly (nine tenths); none where all are zero."""
    most = max(weights.values(), default=0.0)
    return sorted(node for node, weight in weights.items() if weight and weight >= 0.9 * most)
