"""Report of an evaluation: success and reward with intervals, each task, tokens and cost, rollout trees.

Methods:
- *Success* is over the episodes that ended. Its 95 % interval is Wilson's score interval. Several samples of one task
  are no independent episodes; the interval then takes the tasks as drawn from a larger set and uses the number of
  independent episodes that would leave the same variance (Kish's effective sample size, from the variance between
  tasks), at least the number of tasks and at most that of episodes.
- *Reward* is the mean over the same episodes; its 95 % interval is the percentile interval of 4,000 bootstrap samples
  of whole tasks with a fixed seed. There is none for a single task, or if all have the same mean.
- Episodes with errors are in neither. What success would be if all of them had failed, or succeeded, is said beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sandboxgym.cli.support.episodes import Key, Record, Task
from sandboxgym.tree import Action, Edge, Node, Path, RolloutTree

Z = 1.959964
RESAMPLES = 4000


def wilson(successes: float, n: float, effective: float | None = None) -> tuple[float, float]:
    """95 % Wilson score interval of a share, of ``effective`` independent episodes where they are fewer than ``n``.

    >>> [round(bound, 3) for bound in wilson(8, 10)]
    [0.49, 0.943]
    """
    p, n = successes / n, effective or n
    centre, half = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + Z * Z / n)), min(1.0, (centre + half) / (1 + Z * Z / n))


def effective_size(groups: Sequence[Sequence[bool]]) -> float:
    """Independent episodes with the variance of these, grouped by task.

    >>> effective_size([[True, True], [False, False], [True, True], [False, False]])
    4.0
    >>> effective_size([[True], [False]])
    2.0
    """
    total, tasks = sum(map(len, groups)), len(groups)
    p = sum(map(sum, groups)) / total
    if total == tasks or tasks < 2 or not 0 < p < 1:
        return float(tasks if tasks > 1 else total)
    variance = tasks / (tasks - 1) * sum((sum(group) - p * len(group)) ** 2 for group in groups) / total**2
    return float(total if variance == 0 else min(total, max(tasks, p * (1 - p) / variance)))


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % percentile interval of the mean, by a bootstrap over tasks; None for a single one, or if all are alike."""
    sums, sizes = np.array([sum(group) for group in groups]), np.array([len(group) for group in groups])
    if len(groups) < 2 or np.ptp(sums / sizes) == 0:
        return None
    rng, means = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(groups), size=len(groups))
        means.append(sums[drawn].sum() / sizes[drawn].sum())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def summarise(
    tasks: Sequence[Task],
    samples: int,
    records: Mapping[Key, Record],
    spent: Iterable[Record] = (),
    *,
    price_in: float | None = None,
    price_out: float | None = None,
) -> dict[str, Any]:
    """All numbers of an evaluation, as JSON values.

    Args:
        tasks: those that were asked for.
        samples: episodes of each.
        records: of the episodes so far.
        spent: records that were replaced: their tokens were paid for, too.
        price_in: of a million tokens of prompts.
        price_out: of a million generated tokens.
    """
    asked = [records[key] for key in ((task, sample) for task in tasks for sample in range(samples)) if key in records]
    ended = [record for record in asked if record["error"] is None]
    failed = [record for record in asked if record["error"] is not None]
    groups: dict[Task, list[Record]] = {}
    for record in ended:
        groups.setdefault(record["task"], []).append(record)
    turns = [turn for record in ended for turn in record["turns"]]
    return {
        "tasks": len(tasks),
        "samples": samples,
        "asked": len(tasks) * samples,
        "ended": len(ended),
        "missing": len(tasks) * samples - len(asked),
        "success": _success(list(groups.values()), len(failed)),
        "reward": _reward(list(groups.values())),
        "steps": len(turns) / len(ended) if ended else None,
        "invalid": sum(not turn["valid"] for turn in turns) / len(turns) if turns else None,
        "cut": sum(turn["finish"] == "length" for turn in turns),
        "context_full": sum(record["end"] == "context full" for record in ended),
        "masked": sum(record["masked"] for record in ended),
        "suspicious": sum(record["suspicious"] for record in ended),
        "errors": {
            where: sum(record["error"]["where"] == where for record in failed) for where in ("endpoint", "environment")
        },
        "samples_alike": _alike(list(groups.values())),
        "retries": sum(record["retries"] for record in [*asked, *spent]),
        "models": sorted({turn["model"] for record in asked for turn in record["turns"]} - {""}),
        "tokens": _tokens(ended, [*failed, *spent], price_in, price_out),
        "by_kind": _by_kind(ended),
        "by_task": [_task(task, samples, groups.get(task, []), failed) for task in tasks],
    }


def _success(groups: Sequence[Sequence[Record]], failed: int) -> dict[str, Any] | None:
    judged = [[bool(record["success"]) for record in group] for group in groups]
    if not any(record["success"] is not None for group in groups for record in group):
        return None
    won, n = sum(map(sum, judged)), sum(map(len, judged))
    effective = effective_size(judged)
    low, high = wilson(won, n, effective)
    return {
        "rate": won / n,
        "successes": won,
        "episodes": n,
        "interval": [low, high],
        "method": "Wilson 95 %" if effective == n else "Wilson 95 % with the effective sample size of episodes by task",
        "effective_episodes": effective,
        "tasks_solved": sum(any(group) for group in judged),
        "tasks_played": len(judged),
        "rate_if_errors_failed": won / (n + failed),
        "rate_if_errors_succeeded": (won + failed) / (n + failed),
    }


def _alike(groups: Sequence[Sequence[Record]]) -> bool:
    """True if the samples of every task have the same answers; False unless two tasks have several samples."""
    answers = [[[turn["answer"] for turn in record["turns"]] for record in group] for group in groups if len(group) > 1]
    return len(answers) > 1 and all(said == group[0] for group in answers for said in group)


def _reward(groups: Sequence[Sequence[Record]]) -> dict[str, Any] | None:
    rewards = [[record["reward"] for record in group] for group in groups]
    if not rewards:
        return None
    interval = mean_interval(rewards)
    return {
        "mean": sum(map(sum, rewards)) / sum(map(len, rewards)),
        "interval": None if interval is None else list(interval),
        "method": f"percentile bootstrap over tasks, {RESAMPLES:,} resamples, seed 0",
    }


def _tokens(
    ended: Sequence[Record], others: Sequence[Record], price_in: float | None, price_out: float | None
) -> dict[str, Any]:
    every = [*ended, *others]
    told = {
        "in": sum(record["tokens_in"] for record in every),
        "out": sum(record["tokens_out"] for record in every),
        "in_episodes_with_errors": sum(record["tokens_in"] for record in others),
        "out_episodes_with_errors": sum(record["tokens_out"] for record in others),
        "answers_without_counts": sum(record["uncounted"] for record in every),
        "price_in": price_in,
        "price_out": price_out,
    }
    priced = price_in is not None or price_out is not None
    cost = (told["in"] * (price_in or 0.0) + told["out"] * (price_out or 0.0)) / 1e6
    return {**told, "cost": cost if priced else None}


def _by_kind(ended: Sequence[Record]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for record in sorted(ended, key=lambda record: record["kind"]):
        if record["kind"]:
            row = found.setdefault(record["kind"], {"successes": 0, "episodes": 0})
            row["successes"] += bool(record["success"])
            row["episodes"] += 1
    return found


def _task(task: Task, samples: int, ended: Sequence[Record], failed: Sequence[Record]) -> dict[str, Any]:
    errors = [record for record in failed if record["task"] == task]
    judged = any(record["success"] is not None for record in ended)
    return {
        "task": task,
        "kind": next((record["kind"] for record in (*ended, *errors) if record["kind"]), ""),
        "ended": len(ended),
        "successes": sum(bool(record["success"]) for record in ended) if judged else None,
        "reward": sum(record["reward"] for record in ended) / len(ended) if ended else None,
        "steps": sum(len(record["turns"]) for record in ended) / len(ended) if ended else None,
        "tokens_out": sum(record["tokens_out"] for record in ended),
        "errors": len(errors),
        "missing": samples - len(ended) - len(errors),
    }


def headlines(summary: Mapping[str, Any]) -> list[str]:
    """The results in a few lines."""
    success, reward, tokens = summary["success"], summary["reward"], summary["tokens"]
    lines = []
    if success is not None:
        low, high = success["interval"]
        n, effective = success["episodes"], success["effective_episodes"]
        of = f", effective sample size {effective:.1f}" if effective != n else ""
        lines.append(
            f"success   {success['rate']:.1%} ({success['successes']} of {n} episodes); "
            f"95 % interval {low:.1%} to {high:.1%} (Wilson{of})"
        )
        if summary["samples"] > 1:
            lines.append(f"          {success['tasks_solved']} of {success['tasks_played']} tasks solved at least once")
    elif summary["ended"]:
        lines.append("success   not known: the environment does not say it (info['success'])")
    if reward is not None:
        interval = reward["interval"]
        spread = "no interval: it needs tasks with different rewards"
        if interval is not None:
            spread = f"95 % interval {interval[0]:.3f} to {interval[1]:.3f} (bootstrap over tasks)"
        lines.append(f"reward    {reward['mean']:.3f} per episode; {spread}")
    if summary["steps"] is not None:
        invalid = f"; {summary['invalid']:.1%} of actions invalid" if summary["invalid"] is not None else ""
        cut = f"; {summary['cut']} answers cut at the token limit" if summary["cut"] else ""
        lines.append(f"steps     {summary['steps']:.1f} per episode{invalid}{cut}")
    told = {
        "context_full": "outgrew the model's context, counted as they stood",
        "masked": "ended through no fault of the model, counted as not solved",
        "suspicious": "with a suspicious reward, counted as rewarded",
    }
    lines += [f"note      {summary[name]} episodes {text}" for name, text in told.items() if summary[name]]
    if summary["samples_alike"]:
        lines.append(
            "note      all samples of a task have the same answers: does the endpoint sample, or answer greedily?"
        )
    if summary["retries"]:
        lines.append(f"note      {summary['retries']} requests were repeated after failures of the endpoint")
    lines.append(f"tokens    {_spent(tokens)}")
    if (failed := sum(summary["errors"].values())) > 0:
        parts = ", ".join(f"{count} of the {where}" for where, count in summary["errors"].items() if count)
        lines.append(f"ERRORS    {failed} of {summary['asked']} episodes failed ({parts}) and are in none of the above")
        if success is not None:
            lines.append(
                f"          success would be {success['rate_if_errors_failed']:.1%} if all of them had failed, "
                f"{success['rate_if_errors_succeeded']:.1%} if all had succeeded"
            )
    if summary["missing"]:
        lines.append(f"UNFINISHED {summary['missing']} of {summary['asked']} episodes were not played yet")
    return lines


def _spent(tokens: Mapping[str, Any]) -> str:
    text = f"{tokens['in']:,} in, {tokens['out']:,} out"
    if wasted := tokens["in_episodes_with_errors"] + tokens["out_episodes_with_errors"]:
        text += f" ({wasted:,} of them in episodes with errors)"
    if tokens["answers_without_counts"]:
        text += f"; {tokens['answers_without_counts']} answers came without counts and are not in it"
    if tokens["cost"] is not None:
        text += f"; cost {tokens['cost']:,.4f}"
    return text


def task_table(summary: Mapping[str, Any], limit: int | None = None) -> list[str]:
    """A Markdown table, one line per task that was played; at most ``limit``."""
    rows = [("task", "type", "solved", "reward", "steps", "tokens out", "errors")]
    for row in [row for row in summary["by_task"] if row["ended"] or row["errors"]][:limit]:
        solved = "–" if row["successes"] is None else f"{row['successes']}/{row['ended']}"
        reward = "–" if row["reward"] is None else f"{row['reward']:.3f}"
        steps = "–" if row["steps"] is None else f"{row['steps']:.1f}"
        cells = (row["task"], row["kind"], solved, reward, steps, f"{row['tokens_out']:,}", row["errors"] or "")
        rows.append(tuple(str(cell).replace("|", "\\|") for cell in cells))  # type: ignore[arg-type]
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, wide)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in wide) + "|", *lines[1:]]


def trees(tasks: Sequence[Task], records: Mapping[Key, Record]) -> list[RolloutTree]:
    """The episodes that ended, as trees: samples of one task that begin alike are paths from one root."""
    made: dict[tuple[Task, str], RolloutTree] = {}
    order = {task: at for at, task in enumerate(tasks)}
    for (task, sample), record in sorted(records.items(), key=lambda item: (order.get(item[0][0], 0), item[0][1])):
        if task not in order or record["error"] is not None or not record["turns"]:
            continue
        place = (task, record["first"])
        if place not in made:
            made[place] = RolloutTree(
                task, order[task], Node(0, _clean(record["first"]), None, owner=()), kind=record["kind"]
            )
        _grow(made[place], (0, sample), record)
    return list(made.values())


def _grow(tree: RolloutTree, key: tuple[int, int], record: Record) -> None:
    path = Path(key, tree.root)
    tree.paths.append(path)
    at = tree.root
    for number, turn in enumerate(record["turns"], 1):
        said = _clean(turn["action"] or turn["answer"])
        action = Action(said, position=turn["tokens_in"] or 0, tokens=turn["tokens_out"] or 0, valid=turn["valid"])
        edge = Edge(key, at, action, turn["reward"])
        edge.valid = turn["valid"]
        last = number == len(record["turns"])
        edge.terminated = last and record["end"] == "terminated"
        edge.truncated = last and not edge.terminated
        edge.success = last and bool(record["success"])
        edge.child = Node(number, _clean(turn["observation"]), None, owner=key, parent=edge)
        at.children.append(edge)
        at.width += 1
        path.edges.append(edge)
        at = edge.child


def _clean(text: str) -> str:
    """Replace halves of characters, which JSON can name and a file of text cannot hold."""
    return text.encode(errors="replace").decode()
