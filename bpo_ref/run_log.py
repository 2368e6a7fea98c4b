"""Records of a run: numbers of every step, scores of every evaluation, samples, and a report at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType, ProjectConfiguration

from bpo_ref.baselines import independent
from bpo_ref.config import ConfigError
from bpo_ref.eval import Score, results_table
from bpo_ref.sampling.masks import VERDICTS
from bpo_ref.sampling.policy import ChatPolicy, episode_text
from bpo_ref.schedules import FAIR, RULES
from sandboxgym.tree import Clock, Failure, Node, RolloutTree
from sandboxgym.tree.files import files_of_run, save_trees, update_file
from sandboxgym.tree.page import write_page

if TYPE_CHECKING:
    from bpo_ref.args import Args

Stage = Literal["sft", "rl"]
"""SFT and reinforcement learning; each counts its own steps from 0."""


def tracking(args: Args) -> dict[str, Any]:
    """Arguments of an `Accelerator` that name its trackers.

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
    project = ProjectConfiguration(project_dir=args.out, logging_dir=str(Path(args.out, "trackers")))
    others = [name for name in args.trackers if name != "tensorboard"]  # whose logs `RunLog` writes
    return {"log_with": others or None, "project_config": project}


class RunLog:
    """Log scalars to the trackers and ``metrics.jsonl``, evaluations to ``scores.jsonl``.

    A resumed run removes the records after the step from which it continues.

    Each of the two stages has its own axis: two runs in TensorBoard, ``stage`` and ``step`` in the files. Other
    trackers require steps that only grow, so they count through both stages and also receive ``sft/step`` or
    ``update/step``, and the settings. How they treat steps that a resumed run repeats is up to them (W&B: WANDB_RUN_ID
    and WANDB_RESUME).

    Args:
        args: settings of the run.
        stage: current stage.
        step: current step of the stage.
        accelerator: accelerator with the trackers.
        resumed: whether the existing records belong to this run.
    """

    def __init__(self, args: Args, stage: Stage, step: int, accelerator: Accelerator, *, resumed: bool) -> None:
        self._algo = args.algo
        self._enabled = accelerator.is_main_process
        if not self._enabled:
            return
        out = Path(args.out)
        self._metrics, self._points, self._board = out / "metrics.jsonl", out / "scores.jsonl", out / "tensorboard"
        self._before = 0 if args.init_from else args.sft_steps  # steps of the first stage
        self._boards: dict[Stage, Any] = {}
        self._purge: dict[Stage, int] = {}
        self._with_board = "tensorboard" in args.trackers
        if resumed:
            self._purge = {stage: step + 1} | ({"rl": 0} if stage == "sft" else {})
        lines = [self._kept(path, stage, step) if resumed else [] for path in (self._metrics, self._points)]
        for path, records in zip((self._metrics, self._points), lines):
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        if (earlier := self._board / "bpo_ref").exists():  # one axis for both stages
            shutil.rmtree(earlier)
            self._purge = {}
            for record in lines[0]:
                self._show(record)
        name = "-".join(out.resolve().parts[-2:])
        accelerator.init_trackers("bpo_ref", init_kwargs={"wandb": {"name": name}})
        self._trackers = accelerator.trackers
        settings = {name: v if isinstance(v, (int, float, str)) else str(v) for name, v in asdict(args).items()}
        for tracker in self._trackers:
            tracker.store_init_configuration(settings)

    def scalars(self, values: dict[str, float], stage: Stage, step: int) -> None:
        """Log the numbers of a step of a stage."""
        if self._enabled:
            record = {"stage": stage, "step": step, **values}
            self._show(record)
            axis = "sft/step" if stage == "sft" else "update/step"
            for tracker in self._trackers:
                tracker.log({axis: step, **values}, step=step if stage == "sft" else self._before + step)
            with self._metrics.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def point(self, record: dict[str, Any]) -> None:
        """Log the score of an evaluation at the present update."""
        if self._enabled:
            with self._points.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def evaluation(self, name: str, score: Score, stage: Stage, step: int, counters: Mapping[str, float]) -> None:
        """Log the score of an evaluation.

        Args:
            name: of the evaluation.
            score: success, rewards and ends.
            stage: stage of the evaluated policy.
            step: step of the stage.
            counters: what the run has spent.
        """
        values = {"eval/success": score.rate, "eval/turns": score.turns, "eval/reward": score.reward}
        values |= {f"eval/{end}": count for end, count in score.ends.items() if end != "suspicious"}
        values |= {"eval/suspicious": score.ends.get("suspicious", 0) / score.n, "eval/dropped": score.dropped}
        self.scalars(values, stage, step)
        if name == "sft" and self._algo != "sft":  # where reinforcement learning begins
            self.scalars(values, "rl", 0)
        by_type = {kind: won / n for kind, (won, n) in score.by_type.items()}
        record = {"stage": stage, "step": step, "name": name, **counters, "success": score.rate, "n": score.n}
        self.point(
            {**record, "reward": score.reward, "by_type": by_type, "ends": score.ends, "outcomes": score.outcomes}
        )

    def close(self) -> None:
        """Flush the logs."""
        if self._enabled:
            for tracker in self._trackers:
                tracker.finish()
            for board in self._boards.values():
                board.close()

    def _show(self, record: Mapping[str, Any]) -> None:
        """Send a record to TensorBoard, whose files are created with their first record."""
        if not self._with_board:
            return
        stage: Stage = record["stage"]
        if stage not in self._boards:
            from torch.utils.tensorboard import SummaryWriter

            self._boards[stage] = SummaryWriter(str(self._board / stage), purge_step=self._purge.get(stage))
        board = self._boards[stage]
        for name, value in record.items():
            if name not in ("stage", "step"):
                board.add_scalar(name, value, record["step"])
        board.flush()

    def _kept(self, path: Path, stage: Stage, step: int) -> list[dict[str, Any]]:
        """Records of a file up to the run's current step, each on the axis of its stage."""
        records = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                records += on_their_axes(json.loads(line), self._before)
            except json.JSONDecodeError:  # last line of a run that was killed while writing it
                break

        def lies_ahead(record: Mapping[str, Any]) -> bool:
            ends_stage = "sft/loss" not in record and record["step"] > 0  # evaluated once more, at its end
            return record["stage"] == "rl" or record["step"] > step or ends_stage

        if stage == "sft":
            return [record for record in records if not lies_ahead(record)]
        return [record for record in records if record["stage"] == "sft" or record["step"] <= step]


def on_their_axes(record: dict[str, Any], before: int) -> list[dict[str, Any]]:
    """Add its stage to a record; convert steps of versions that had one axis for both stages.

    Args:
        record: a line of ``metrics.jsonl`` or ``scores.jsonl``.
        before: number of SFT steps.
    """
    if "stage" in record:
        return [record]
    step = record.pop("step")
    supervised = {"stage": "sft", "step": step, **record}
    if "sft/loss" in record or step < before:
        return [supervised]
    learned = {"stage": "rl", "step": step - before, **record}
    if before and step == before:  # the score after SFT, which is on both axes
        return [supervised] if "name" in record else [supervised, learned]
    return [learned]


def root_weights(tree: RolloutTree, args: Args) -> dict[int, float]:
    """Weight of every action in the mean over episodes from the root, by id(edge).

    Σ weight x reward is an unbiased estimate of an independent episode's total reward; Σ weight x success, over the
    last actions of paths that ended by themselves, of its probability of success. A fork of n gives each child 1/n of
    its weight, as credit ``tree`` does. A path that survived roulette has 1/q times the weight, to make up for those
    that were stopped and have none (E[[survived] / q] = 1). Where forks were chosen by a path's future or only serve to
    estimate values (schedules not in `FAIR`), only the independent rollouts are a fair sample of the policy: they have
    equal weights and the rest 0.
    """
    if args.schedule not in FAIR:
        roots = [path for path in tree.paths if independent(path, args)]
        return {id(edge): 1.0 / len(roots) for path in roots for edge in path.edges}
    weights: dict[int, float] = {}
    waiting: list[tuple[Node, float]] = [(tree.root, 1.0)]
    while waiting:
        node, weight = waiting.pop()
        for edge in node.children:
            weights[id(edge)] = weight / node.survival / len(node.children)
            waiting.append((edge.child, weights[id(edge)]))
    return weights


def success_of(tree: RolloutTree, args: Args) -> float:
    """Unbiased estimate of the policy's success on the task; see `root_weights`."""
    weights = root_weights(tree, args)
    ends = [path.edges[-1] for path in tree.paths]
    return sum(weights.get(id(end), 0.0) for end in ends if end.success and not end.child.stopped)


def batch_totals(
    trees: Sequence[RolloutTree], args: Args, gather: Callable[[list[Any]], list[Any]] = list
) -> dict[str, float]:
    """Sums over a batch of trees with credit assigned, over all processes."""
    local = []
    for tree in trees:
        edges = list(tree.edges())
        weights = root_weights(tree, args)
        groups = [[edge.value for edge in node.children] for node in [tree.root, *tree.branch_nodes]]
        local.append(
            {
                "trees": 1,
                "returns": len(tree.paths),
                "env_steps": tree.env_steps,
                "tokens": tree.tokens,
                "judged": bool(weights),
                "success": success_of(tree, args),
                "reward": sum(weights.get(id(edge), 0.0) * edge.reward for edge in edges),
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
    """Means to log: per task (success, reward used for training), per path, per action, per token."""
    judged = max(1.0, total["judged"])
    return {
        "rollout/success": total["success"] / judged,
        "rollout/reward": total["reward"] / judged,
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
    """Description of the first failure, and the number of failures."""
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
    """Costs and failures of a batch's rollout, to log.

    Args:
        policy: the policy that sampled.
        clock: clock of the rollout, on this process.
        failures: failures of the rollout, on this process.
        ends: result of `end_counts`, over all processes.
        seconds: duration of the rollout.
        total: function that sums over all processes.
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
    """Write ``results.md``, ``results.json`` and, if it was evaluated, ``learning_curve.png`` of a finished run."""
    rows = {"untrained": "untrained", "start": "start", "sft": "after SFT"}
    rows[f"{args.algo}@{last}"] = f"after {args.algo}"
    shown = {row: scores[name] for name, row in rows.items() if name in scores}
    table = results_table(shown) if shown else "The run was not evaluated."
    totals = ", ".join(f"{value:,.0f} {name.replace('_', ' ')}" for name, value in counters.items())
    panel = " ".join([args.env_id, *args.eval_kwargs])
    text = f"{panel}, {args.eval_episodes} episodes\n\n{table}\n\nSpent by {args.algo}: {totals}"
    (out / "results.md").write_text(text + "\n")
    every = {name: {k: v for k, v in asdict(score).items() if k != "outcomes"} for name, score in scores.items()}
    results = {"args": asdict(args), "processes": processes, "counters": counters, "scores": every}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    if scores:
        from bpo_ref.experiments.plots import learning_curve

        learning_curve([out], out / "learning_curve.png")
    names = ("learning_curve.png", "results.md", "samples.txt", "trees.html", "checkpoint", "tensorboard")
    print(f"\n{text}\n\nIn {out}: {', '.join(name for name in names if (out / name).exists())}")


def write_samples(out: Path, trees: Sequence[RolloutTree], args: Args, *, update: int) -> None:
    """Write ``samples.txt``, ``trees.json``, ``trees.html`` and the update's own file under ``trees/``, which
    `sandboxgym tree RUN` browses.

    Args:
        out: folder of the run.
        trees: trees of the update; the first few are kept.
        args: settings of the run; some are in the head of the files (`TreeFile.about`).
        update: number of the update.
    """
    title = f"{args.algo}, update {update}"
    about: dict[str, Any] = {
        "algo": args.algo,
        "schedule": args.schedule,
        "rule": RULES[str(args.schedule)],
        "env": args.env_id,
    }
    about |= {"seed": args.seed, "update": update}
    text = "\n\n".join(episode_text(tree.paths[0]) for tree in trees[:4])
    (out / "samples.txt").write_text(f"Episodes sampled: {title}\n\n{text}\n")
    save_trees(trees[:8], out / "trees.json", about=about)
    own = update_file(out, update)
    own.parent.mkdir(exist_ok=True)
    save_trees(trees[:8], own, about=about)
    for file in files_of_run(out):
        if file.name > own.name:  # the run was resumed from an earlier update
            file.unlink()
    write_page(trees[:8], out / "trees.html", title=title, about=about)
