"""Rollout trees as JSON files, to save, load and view (``sandboxgym tree FILE``).

A file has the content of `RolloutTree` except `Action.memory` and `Action.data`, which only the trainer understands.
Values that JSON lacks are converted: arrays and tuples to lists, NaN to null, anything else to text.

The head of a file may describe the origin of the trees (`TreeFile.about`). Files without a head, and older ones that do
not record which paths were stopped, can be loaded as well.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.system.atomic import write_atomic
from sandboxgym.tree import Action, Edge, Node, RolloutTree
from sandboxgym.tree import Path as TreePath

FORMAT = "sandboxgym.tree/1"
_ACTION = ("text", "entropy", "logp", "position", "tokens")
_EDGE = ("reward", "terminated", "truncated", "valid", "success", "value", "advantage", "weight")
_NODE = ("depth", "observation", "key", "owner", "value", "survival", "stopped")


class TreeFileError(ValueError):
    """The file does not contain rollout trees."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """Content of a file of rollout trees."""

    trees: list[RolloutTree]
    about: dict[str, Any] = field(default_factory=dict)
    """Origin of the trees, as far as the file records it: ``algo``, ``schedule``, ``rule`` (a sentence on where the
    schedule forks), ``env``, ``update``, …"""


def save_trees(
    trees: Iterable[RolloutTree], path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None
) -> None:
    """Write trees and the head of the file (`TreeFile.about`) to a JSON file, atomically."""
    content = json.dumps(to_json(trees, about), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    write_atomic(path, content.encode("utf-8", "surrogatepass"))


def load_trees(path: str | os.PathLike[str]) -> list[RolloutTree]:
    """Read the trees that `save_trees` wrote.

    Raises:
        TreeFileError: the file is invalid; the message names it and says what was expected.
    """
    return read_trees(path).trees


def read_trees(path: str | os.PathLike[str]) -> TreeFile:
    """Read the trees that `save_trees` wrote, and the head of the file.

    Raises:
        TreeFileError: the file is invalid; the message names it and says what was expected.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        return TreeFile(from_json(content), about_of(content))
    except json.JSONDecodeError as error:
        raise TreeFileError(
            f"{os.fspath(path)}: expected rollout trees as JSON, which this is not from line {error.lineno}, column "
            f"{error.colno} on: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:  # TreeFileError too
        raise TreeFileError(f"{os.fspath(path)}: {error}") from error


def update_file(run: str | os.PathLike[str], update: int) -> Path:
    """Path of the trees of an update in a run's folder."""
    return Path(run, "trees", f"update-{update:06d}.json")


def files_of_run(run: str | os.PathLike[str]) -> list[Path]:
    """Files of trees of a run, in the order of its updates; only that of the last update if there are no others."""
    kept = sorted(Path(run, "trees").glob("update-*.json"))
    return kept or [file for file in [Path(run, "trees.json")] if file.exists()]


def to_json(trees: Iterable[RolloutTree], about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Convert trees to ``{"format", …about, "trees"}``; a tree's ``paths`` refer to its ``nodes`` by number."""
    return {**_plain(about or {}), "format": FORMAT, "trees": [_tree(tree) for tree in trees]}


def about_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The head of a result of `to_json`."""
    return {name: value for name, value in content.items() if name not in ("format", "trees")}


def from_json(content: Any) -> list[RolloutTree]:
    """The trees of a result of `to_json`."""
    found = content.get("format") if isinstance(content, dict) else content
    if found != FORMAT:
        raise TreeFileError(f"expected rollout trees in the format {FORMAT!r}, found {found!r:.80}")
    try:
        return [_load(tree) for tree in content["trees"]]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise TreeFileError(f"a tree is incomplete: {error!r}") from error


def _tree(tree: RolloutTree) -> dict[str, Any]:
    nodes = [tree.root, *(edge.child for edge in tree.edges())]
    number = {id(node): at for at, node in enumerate(nodes)}
    return {
        "task": _plain(tree.task),
        "index": tree.index,
        "kind": tree.kind,
        "snapshots": tree.snapshots,
        "nodes": [{name: _plain(getattr(node, name)) for name in _NODE} for node in nodes],
        "paths": [
            {
                "key": list(path.key),
                "start": number[id(path.start)],
                "edges": [
                    {
                        "child": number[id(edge.child)],
                        "action": {name: _plain(getattr(edge.action, name)) for name in _ACTION},
                        **{name: _plain(getattr(edge, name)) for name in _EDGE},
                    }
                    for edge in path.edges
                ],
            }
            for path in tree.paths
        ],
    }


def _load(content: Mapping[str, Any]) -> RolloutTree:
    nodes = [
        Node(
            int(n["depth"]),
            n["observation"],
            n["key"],
            owner=tuple(n["owner"]),
            value=_float(n["value"]),
            survival=_float(n.get("survival", 1.0)),  # files of earlier versions lack both
            stopped=bool(n.get("stopped", False)),
        )
        for n in content["nodes"]
    ]
    tree = RolloutTree(
        content["task"], int(content["index"]), nodes[0], kind=content["kind"], snapshots=int(content["snapshots"])
    )
    for entry in content["paths"]:
        path = TreePath(tuple(entry["key"]), nodes[entry["start"]])
        tree.paths.append(path)
        at = path.start
        for number, e in enumerate(entry["edges"]):
            a = e["action"]
            action = Action(a["text"], _float(a["entropy"]), _float(a["logp"]), int(a["position"]), int(a["tokens"]))
            edge = Edge(path.key, at, action, _float(e["reward"]))
            edge.terminated, edge.truncated, edge.valid, edge.success = (bool(e[name]) for name in _EDGE[1:5])
            edge.value, edge.advantage, edge.weight = (_float(e[name]) for name in _EDGE[5:])
            edge.child = nodes[e["child"]]
            edge.child.parent = edge
            at.children.append(edge)
            if number == 0 or len(at.children) == 1:
                at.width += 1
            path.edges.append(edge)
            at = edge.child
    return tree


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
