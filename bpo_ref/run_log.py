"""What a run writes down: numbers of every step, scores of every evaluation, samples, and a report at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType, ProjectConfiguration

from bpo_ref.config import ConfigError
from bpo_ref.eval import Score, results_table
from bpo_ref.sampling.masks import VERDICTS
from bpo_ref.sampling.policy import ChatPolicy, episode_text
from sandboxgym.tree import Clock, Failure, RolloutTree
from sandboxgym.tree.files import files_of_run, save_trees, update_file
from sandboxgym.tree.page import write_page

if TYPE_CHECKING:
    from bpo_ref.args import Args


def tracking(args: Args) -> dict[str, Any]:
    """The arguments of an `Accelerator` that name its trackers.

    Raises:
        ConfigError: accelerate does not know one, or its package is not installed.
    """
    missing = {str(kind) for kind in LoggerType} - {str(kind) for kind in get_available_trackers()}
    for name in args.trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(LOGGER_TYPE_TO_CLASS)
            raise ConfigError(f"trackers: expected some of accelerate's trackers ({known}), found {name!r}")
        if name in missing:
            raise ConfigError(f"trackers: {name} is not installed (pip install {name.replace('_', '-')})")
    project = ProjectConfiguration(project_dir=args.out, logging_dir=str(Path(args.out, "tensorboard")))
    return {"log_with": list(args.trackers) or None, "project_config": project}


class RunLog:
    """Scalars to the trackers and ``metrics.jsonl``, evaluations to ``scores.jsonl``; resuming cuts what lies ahead.

    Other trackers than TensorBoard get the settings too. What they do about steps that a resumed run repeats is up to
    them (W&B: WANDB_RUN_ID and WANDB_RESUME).
    """

    def __init__(self, args: Args, step: int, accelerator: Accelerator) -> None:
        self._enabled = accelerator.is_main_process
        if not self._enabled:
            return
        out = Path(args.out)
        self._metrics, self._points = out / "metrics.jsonl", out / "scores.jsonl"
        for path in (self._metrics, self._points):
            lines = path.read_text().splitlines() if step and path.exists() else []
            path.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= step))
        purge = {"purge_step": step + 1 if step else None}
        accelerator.init_trackers("bpo_ref", init_kwargs={"tensorboard": purge, "wandb": {"name": out.name}})
        self._trackers = accelerator.trackers
        settings = {name: v if isinstance(v, (int, float, str)) else str(v) for name, v in asdict(args).items()}
        for tracker in self._trackers:
            if tracker.name != "tensorboard":  # there they would look like another run
                tracker.store_init_configuration(settings)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Numbers of a step."""
        if self._enabled:
            for tracker in self._trackers:
                tracker.log(values, step=step)
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
            for tracker in self._trackers:
                tracker.finish()


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
                "reward": sum(edge.reward for path in tree.paths for edge in path.from_root()),
                "valid": sum(edge.valid for edge in edges),
                "turns": sum(len(path.from_root()) for path in tree.paths),
                "entropy": sum(sum(edge.action.data.entropies) for edge in edges),
                "moving": sum(abs(edge.advantage) > 0.1 for edge in edges if edge.weight),
                "learnt": sum(edge.weight != 0 for edge in edges),
                "degenerate": all(abs(edge.advantage) <= 0.1 for edge in edges),
                "stopped": sum(path.edges[-1].child.stopped for path in tree.paths),
                "cut_turns": sum(edge.action.data.truncated for edge in edges),
                "cut_episodes": sum(
                    path.edges[-1].truncated and not path.edges[-1].child.stopped for path in tree.paths
                ),
                "branch_points": sum(node.depth > 0 for node in tree.branch_nodes),
                "snapshots": tree.snapshots,
                "snapshot_seconds": tree.snapshot_seconds,
                "equal_groups": all(max(group) == min(group) for group in groups),
            }
        )
    every = gather(local)
    return {name: float(sum(tree[name] for tree in every)) for name in every[0]}


def batch_metrics(total: dict[str, float]) -> dict[str, float]:
    """Means to log: of an episode (success, reward as it is learnt from, turns), an action, a token, a tree."""
    return {
        "rollout/success": total["success"] / total["returns"],
        "rollout/reward": total["reward"] / total["returns"],
        "rollout/turns": total["turns"] / total["returns"],
        "rollout/valid_actions": total["valid"] / total["env_steps"],
        "rollout/entropy": total["entropy"] / total["tokens"],
        "rollout/nondegenerate": total["moving"] / max(1.0, total["learnt"]),
        "rollout/degenerate_tasks": total["degenerate"] / total["trees"],
        "rollout/stopped": total["stopped"] / total["returns"],
        "rollout/truncated_turns": total["cut_turns"] / total["env_steps"],
        "rollout/truncated_episodes": total["cut_episodes"] / total["returns"],
        "rollout/equal_groups": total["equal_groups"] / total["trees"],
        "rollout/forks_beyond_root": total["branch_points"] / total["trees"],
        "rollout/snapshots": total["snapshots"] / total["trees"],
        "time/snapshot": total["snapshot_seconds"] / total["snapshots"],
    }


def described_failures(failures: Sequence[Failure]) -> str:
    """The first of what went wrong, and how many such there were."""
    if not failures:
        return "see the other processes"
    advice = "; a larger --context or an --observation-tokens makes room" if failures[0].too_long else ""
    return f"{failures[0].error} (the first of {len(failures)} failures){advice}"


def rollout_costs(
    policy: ChatPolicy,
    clock: Clock,
    failures: Sequence[Failure],
    ends: Mapping[str, float],
    seconds: float,
    total: Callable[[float], float],
) -> dict[str, float]:
    """What to log of how a batch was rolled out.

    Args:
        policy: that has sampled.
        clock: of the rollout, on this process.
        failures: likewise.
        ends: what `end_counts` said, over all processes.
        seconds: that it took.
        total: sum over all processes.
    """
    costs = {
        "time/env": clock.steps,
        "time/snapshots": clock.snapshots,
        "time/env_share": clock.steps / seconds,
        "time/snapshots_share": clock.snapshots / seconds,
        "rollout/env_failures": total(float(sum(not failure.too_long for failure in failures))),
        "rollout/too_long": total(float(len({failure.task for failure in failures if failure.too_long}))),
        "rollout/dropped_paths": total(float(sum(failure.dropped for failure in failures))),
        "rollout/suspicious": ends["suspicious"] / max(1.0, ends["episodes"]),
        **{f"rollout/{name}": ends[name] for name in ("masked", *VERDICTS)},
    }
    if policy.prefilled is not None and policy.reused is not None:
        costs["rollout/prefilled_tokens"] = total(policy.prefilled)
        costs["rollout/reused_tokens"] = total(policy.reused)
    return costs


def write_report(
    out: Path,
    args: Args,
    scores: Mapping[str, Score],
    counters: Mapping[str, float],
    *,
    last: int,
    processes: int,
) -> None:
    """``results.md``, ``results.json`` and ``learning_curve.png`` of a finished run."""
    from bpo_ref.experiments.plots import learning_curve

    rows = {"untrained": "untrained", "start": "start", "sft": "after SFT"}
    rows[f"{args.algo}@{last}"] = f"after {args.algo}"
    table = results_table({row: scores[name] for name, row in rows.items() if name in scores})
    totals = ", ".join(f"{value:,.0f} {name.replace('_', ' ')}" for name, value in counters.items())
    panel = " ".join([args.env_id, *args.eval_kwargs])
    text = f"{panel}, {args.eval_episodes} episodes\n\n{table}\n\nSpent by {args.algo}: {totals}"
    (out / "results.md").write_text(text + "\n")
    every = {name: {k: v for k, v in asdict(score).items() if k != "outcomes"} for name, score in scores.items()}
    results = {"args": asdict(args), "processes": processes, "counters": counters, "scores": every}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    learning_curve([out], out / "learning_curve.png")
    names = ("learning_curve.png", "results.md", "samples.txt", "trees.html", "checkpoint", "tensorboard")
    print(f"\n{text}\n\nIn {out}: {', '.join(name for name in names if (out / name).exists())}")


def write_samples(
    out: Path, trees: Sequence[RolloutTree], *, title: str, about: Mapping[str, Any] | None = None
) -> None:
    """``samples.txt`` for reading, ``trees.json`` and ``trees.html`` for looking at, and the update's own file under
    ``trees/``, which `sandboxgym tree RUN` browses.

    Args:
        out: the run's folder.
        trees: of the last update; the first few are kept.
        title: of the page.
        about: what the files' head says (`TreeFile.about`); an ``update`` names the file of its own.
    """
    text = "\n\n".join(episode_text(tree.paths[0]) for tree in trees[:4])
    (out / "samples.txt").write_text(f"Episodes sampled: {title}\n\n{text}\n")
    save_trees(trees[:8], out / "trees.json", about=about)
    if about and "update" in about:
        own = update_file(out, about["update"])
        own.parent.mkdir(exist_ok=True)
        save_trees(trees[:8], own, about=about)
        for file in files_of_run(out):
            if file.name > own.name:  # the run was resumed from an earlier update
                file.unlink()
    write_page(trees[:8], out / "trees.html", title=title, about=about)
