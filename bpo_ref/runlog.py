"""What a run writes down: numbers of every step, scores of every evaluation, and what a batch of trees amounts to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from sandboxgym.tree import RolloutTree


class RunLog:
    """Scalars to TensorBoard and ``metrics.jsonl``, evaluations to ``scores.jsonl``; resuming cuts what lies ahead."""

    def __init__(self, out: Path, step: int, *, enabled: bool) -> None:
        self._enabled = enabled
        if not enabled:
            return
        self._metrics, self._points = out / "metrics.jsonl", out / "scores.jsonl"
        for path in (self._metrics, self._points):
            lines = path.read_text().splitlines() if step and path.exists() else []
            path.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= step))
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1 if step else None)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Numbers of a step."""
        if self._enabled:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            with self._metrics.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")

    def point(self, record: dict[str, Any]) -> None:
        """An evaluation."""
        if self._enabled:
            with self._points.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Flush."""
        if self._enabled:
            self._board.close()


def batch_totals(trees: Sequence[RolloutTree], gather: Callable[[list[Any]], list[Any]] = list) -> dict[str, float]:
    """Sums over a batch of trees with credit assigned, over all processes."""
    local = []
    for tree in trees:
        edges = list(tree.edges())
        groups = [[edge.value for edge in node.children] for node in [tree.root, *tree.branch_nodes]]
        local.append(
            {
                "trees": 1,
                "returns": len(tree.paths),
                "env_steps": tree.env_steps,
                "tokens": tree.tokens,
                "success": sum(path.edges[-1].success for path in tree.paths),
                "valid": sum(edge.valid for edge in edges),
                "turns": sum(len(path.from_root()) for path in tree.paths),
                "entropy": sum(sum(edge.action.data.entropies) for edge in edges),
                "moving": sum(abs(edge.advantage) > 0.1 for edge in edges),
                "branch_points": sum(node.depth > 0 for node in tree.branch_nodes),
                "snapshots": tree.snapshots,
                "equal_groups": all(max(group) == min(group) for group in groups),
            }
        )
    every = gather(local)
    return {name: float(sum(tree[name] for tree in every)) for name in every[0]}


def batch_metrics(total: dict[str, float]) -> dict[str, float]:
    """Means to log: of an episode (success, turns), an action, a token, a tree."""
    return {
        "rollout/success": total["success"] / total["returns"],
        "rollout/turns": total["turns"] / total["returns"],
        "rollout/valid_actions": total["valid"] / total["env_steps"],
        "rollout/entropy": total["entropy"] / total["tokens"],
        "rollout/nondegenerate": total["moving"] / total["env_steps"],
        "rollout/equal_groups": total["equal_groups"] / total["trees"],
        "rollout/forks_beyond_root": total["branch_points"] / total["trees"],
        "rollout/snapshots": total["snapshots"] / total["trees"],
    }
