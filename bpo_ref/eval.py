"""Success on a fixed evaluation set with fixed seeds: the same episodes for any number of processes.

python -m bpo_ref.eval --checkpoint runs/alfworld/checkpoint
python -m bpo_ref.eval --checkpoint runs/alfworld/checkpoint --env-kwargs games=valid_seen --episodes 140

For a checkpoint of the trainer, options that are not given are those of the evaluations during training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium as gym

from bpo_ref.config import ConfigError
from bpo_ref.running.environments import refuse_environment, refuse_missing_folder
from bpo_ref.sampling.backends import LocalBackendName, make_backend
from bpo_ref.sampling.driver import roll_out
from bpo_ref.sampling.env_source import ask
from bpo_ref.sampling.masks import VERDICTS, end_counts
from sandboxgym.adapters.prompts import PromptName, make_prompt
from sandboxgym.arguments import parse_arguments
from sandboxgym.registration import registered_id
from sandboxgym.task_env import task_count
from sandboxgym.tree import AsyncPolicy, Envs, Policy, Schedule
from sandboxgym.workers.env_host import CallTimedOut, FleetError, WorkerDied


@dataclass(frozen=True)
class Score:
    """Result on an evaluation set."""

    successes: int
    n: int
    turns: float
    """Mean turns per episode that ended."""
    tokens: float
    """Mean generated tokens per episode that ended."""
    invalid: float
    """Fraction of actions that the environment did not understand."""
    by_type: dict[str, tuple[int, int]]
    """Number of successes and of episodes per task type."""
    reward: float = 0.0
    """Mean total reward per episode that ended (WebShop's score)."""
    outcomes: tuple[int, ...] = ()
    """1 for every task of the evaluation set that was solved, else 0, in its order."""
    dropped: int = 0
    """Episodes that did not end because their environments failed; they count as not solved, and in no mean."""
    ends: dict[str, int] = field(default_factory=dict)
    """Number of ``masked`` episodes, which count as not solved (among them ``infra_failures`` and ``sandbox_ended``),
    and of those that ended in a ``suspicious`` way, which count as rewarded."""

    @property
    def rate(self) -> float:
        """Success rate."""
        return self.successes / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson score interval of the success rate."""
        z, p, n = 1.96, self.rate, self.n
        centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))


def make_env(env_id: str, kwargs: Sequence[str], max_turns: int) -> gym.Env[Any, Any]:
    """``gym.make`` with arguments as `parse_arguments` reads them."""
    return gym.make(env_id, max_episode_steps=max_turns, **parse_arguments(kwargs))


def evaluate(
    policy: Policy | AsyncPolicy,
    envs: Envs,
    episodes: int,
    *,
    seed: Sequence[int] = (0,),
    part: tuple[int, int] = (0, 1),
    gather: Callable[[list[Any]], list[Any]] = list,
    overlap: bool = False,
    retries: int = 0,
    by_itself: bool = False,
) -> Score:
    """Play one episode of each of the first ``episodes`` tasks.

    An episode whose environments failed repeatedly counts as not solved, so that a policy cannot raise its score by
    breaking environments. Its reward and turns are unknown and left out of the means; `Score.dropped` counts such
    episodes. A masked episode counts as not solved too; `Score.ends` counts those.

    Args:
        policy: policy of this process.
        envs: source of the environments.
        episodes: size of the evaluation set; a smaller library is repeated.
        seed: key of the random streams.
        part: (rank, number of processes) that share the evaluation set.
        gather: collects lists from all processes.
        overlap: argument of `rollout`.
        retries: argument of `rollout`.
        by_itself: argument of `roll_out`.

    Raises:
        RuntimeError: no episode ended.
    """
    available = ask(envs, task_count)
    mine = range(part[0], episodes, part[1])
    tasks = [None if available is None else i % available for i in mine]
    outcomes = []
    options: dict[str, Any] = {"seed": seed, "indices": mine, "overlap": overlap, "retries": retries}
    trees = roll_out(envs, policy, Schedule(roots=1), by_itself=by_itself, tasks=tasks, **options)
    for tree in trees:
        edges = tree.paths[0].edges
        invalid, reward = sum(not edge.valid for edge in edges), tree.paths[0].total_reward
        success = edges[-1].success and not edges[-1].masked
        outcomes.append((tree.kind, success, len(edges), tree.tokens, invalid, reward, tree.index, end_counts([tree])))
    played = gather(outcomes)
    if not played:
        raise RuntimeError(f"none of {episodes} episodes ended: every environment failed (see the log)")
    lost = set(range(episodes)) - {outcome[6] for outcome in played}
    every = sorted([*played, *(("", False, 0, 0, 0, 0.0, index) for index in lost)], key=lambda outcome: outcome[6])
    by_type: dict[str, tuple[int, int]] = {}
    for kind, success, *_ in sorted(every, key=lambda outcome: outcome[0]):
        won, n = by_type.get(kind, (0, 0))
        by_type[kind] = (won + success, n + 1)
    steps = sum(outcome[2] for outcome in played)
    return Score(
        successes=sum(outcome[1] for outcome in every),
        n=len(every),
        turns=steps / len(played),
        tokens=sum(outcome[3] for outcome in played) / len(played),
        invalid=sum(outcome[4] for outcome in played) / steps,
        by_type=by_type,
        reward=sum(outcome[5] for outcome in played) / len(played),
        outcomes=tuple(int(outcome[1]) for outcome in every),
        dropped=len(lost),
        ends={name: int(sum(outcome[7][name] for outcome in played)) for name in ("masked", *VERDICTS, "suspicious")},
    )


def results_table(scores: Mapping[str, Score]) -> str:
    """A Markdown table with one line per policy."""
    lines = ["| policy | success | 95 % interval | turns | invalid actions |", "|---|---|---|---|---|"]
    for name, score in scores.items():
        low, high = score.interval
        lines.append(
            f"| {name} | {score.rate:.1%} ({score.successes}/{score.n}) | {low:.1%} to {high:.1%} "
            f"| {score.turns:.1f} | {score.invalid:.1%} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class EvalArgs:
    """Evaluate a checkpoint. For a checkpoint of the trainer, the defaults are the settings of its run."""

    checkpoint: str
    """Folder of a saved policy."""
    env_id: str = "sandboxgym/ALFWorld-v0"
    """Id of the environment."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment, as name=value."""
    env_threads: int = 1
    """Environments that step at the same time."""
    env_overlap: bool = False
    """Sample for one half of the tasks while the environments of the other half step."""
    env_retries: int = 2
    """Number of environment failures after which an episode is dropped."""
    episodes: int = 256
    """Size of the evaluation set."""
    max_turns: int = 24
    """Step limit of an episode."""
    context: int = 768
    """Maximum tokens per episode."""
    max_new_tokens: int = 12
    """Maximum tokens per action."""
    temperature: float = 1.0
    """Sampling temperature."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights."""
    prompt: PromptName = "plain"
    """Prompt format, as in training."""
    list_actions: bool = False
    """List the admissible actions in every message, as in training."""
    history: int = 0
    """Number of past turns in each message, as in training."""
    system: str | None = None
    """System prompt, as in training."""
    observation_tokens: int = 0
    """Maximum tokens per observation, as in training."""
    backend: LocalBackendName = "hf"
    """Sampling backend; for a run that sampled on servers: ``hf``."""
    seed: int = 0
    """Seed of the sampling."""
    threads: int = 1
    """CPU threads (0: PyTorch's choice)."""
    json: str | None = None
    """File for the score."""


def defaults(checkpoint: str) -> EvalArgs:
    """Settings with which the trainer evaluated its checkpoint; the class's defaults for other folders and names."""
    if not Path(checkpoint).is_dir():
        return EvalArgs(checkpoint=checkpoint)
    from bpo_ref.learning.checkpoint import args_of  # imports PyTorch, in whose format they were saved

    saved = args_of(Path(checkpoint))
    mine = {field.name for field in fields(EvalArgs)} - {"env_kwargs", "temperature", "episodes"}
    given: dict[str, Any] = {name: value for name, value in saved.items() if name in mine}
    if saved:
        given |= {"env_kwargs": saved["eval_kwargs"], "temperature": saved["eval_temperature"]}
        given["episodes"] = saved["eval_episodes"]
    if given.get("backend") not in get_args(LocalBackendName):
        given.pop("backend", None)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return EvalArgs(checkpoint=checkpoint, **given)


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate a checkpoint: the command ``python -m bpo_ref.eval``.

    Raises:
        SystemExit: the checkpoint cannot be loaded, or the environment not made or lost, with the reason.
    """
    try:
        _main(argv)
    except (ConfigError, FleetError, WorkerDied, CallTimedOut) as error:
        raise SystemExit(f"error: {error}") from error


def _main(argv: Sequence[str] | None) -> None:
    import argparse

    import tyro

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint")
    known, _ = parser.parse_known_args(argv)
    default: dict[str, Any] = {} if known.checkpoint is None else {"default": defaults(known.checkpoint)}
    args = tyro.cli(EvalArgs, args=argv, config=(tyro.conf.FlagConversionOff,), **default)
    args = replace(args, env_id=registered_id(args.env_id))
    refuse_missing_folder("checkpoint", args.checkpoint)
    refuse_environment(args.env_id, args.env_kwargs, args.max_turns)
    # after the settings are read, because PyTorch takes seconds to import
    import torch

    from bpo_ref.learning.models import eos_ids, load_policy, settle_cpu
    from bpo_ref.sampling.chat_format import ChatFormat
    from bpo_ref.sampling.policy import ChatPolicy

    settle_cpu(args.threads)
    model, tokenizer = load_policy(args.checkpoint, dtype=args.dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    prompt = make_prompt(
        args.prompt, args.env_id, system=args.system, list_actions=args.list_actions, history=args.history
    )
    chat = ChatFormat(
        tokenizer, system=prompt.system, observation_tokens=args.observation_tokens, stop_ids=eos_ids(model)
    )
    backend = make_backend(
        args.backend,
        model,
        stop_ids=chat.stop_ids,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        context_limit=args.context,
        entropies=False,
    )
    with Envs(lambda: make_env(args.env_id, args.env_kwargs, args.max_turns), threads=args.env_threads) as envs:
        policy = ChatPolicy(backend, chat, prompt=prompt)
        score = evaluate(
            policy,
            envs,
            args.episodes,
            seed=(args.seed, 3),
            overlap=args.env_overlap,
            retries=args.env_retries,
        )
    print(results_table({args.checkpoint: score}))
    for kind, (won, n) in score.by_type.items():
        print(f"  {kind}: {won}/{n}")
    if told := [f"{name.replace('_', ' ')} {count}" for name, count in score.ends.items() if count]:
        print(f"  of {score.n} episodes: {', '.join(told)}")
    if args.json:
        Path(args.json).write_text(json.dumps({"args": asdict(args), "score": asdict(score)}, indent=1))


if __name__ == "__main__":
    main()
