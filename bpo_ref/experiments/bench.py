"""Speed of the trainer's optimizations, as ratios of variants that take turns in one process, never as absolute times.

python -m bpo_ref.experiments.bench update|forks|environments|overlap|lookahead|trl [--repeats 5]

CPU seconds of one thread are compared, because they are repeatable on a machine that is busy with other work; only
``environments`` and ``overlap``, which measure waiting, compare wall-clock time. ``trl`` runs each trainer in its own
process, and prints tokens per second, too. ``docs/results/details/trainer-speed.md`` has the results.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import gymnasium as gym
import numpy as np
import torch

from bpo_ref.args import Args, Network, resolved
from bpo_ref.baselines import Memory
from bpo_ref.config import read_config
from bpo_ref.eval import make_env
from bpo_ref.learning import packing
from bpo_ref.learning.tiny import TINY_SIZES, tiny_bpe_tokenizer, tiny_model, tiny_tokenizer
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.env_source import ask
from bpo_ref.sampling.generate import Generator, forward
from bpo_ref.sampling.policy import ChatPolicy
from bpo_ref.sampling.selection import draw_tasks
from bpo_ref.schedules import make_schedule
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer, assign_credit
from sandboxgym import SnapshotEnv, Unicode
from sandboxgym.bench.table import row
from sandboxgym.bench.table.row import Options, Pair
from sandboxgym.envs.alfworld.env import ALFWorldEnv
from sandboxgym.envs.alfworld.game import Game
from sandboxgym.envs.alfworld.games.library import content_of
from sandboxgym.envs.alfworld.grounding_cache import GroundingCache
from sandboxgym.system import interpreter
from sandboxgym.tree import Action, Clock, Context, Envs, rollout

WORDS = [f"w{i}" for i in range(100)]


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each call, the calls taking turns; the first round is not counted."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            spent[name].append(time.process_time() - began)
    return {name: statistics.median(times[1:]) for name, times in spent.items()}


def model_of(size: str, context: int) -> Any:
    """Make a tiny policy."""
    return tiny_model(tiny_tokenizer(WORDS), **TINY_SIZES[size], max_position_embeddings=context)


# --------------------------------------------------------------------------------------------------------------- update


def paths_of(
    trees: int, *, prompt: int, turns: int, turn: int, points: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ids [B, T] of trees with random forks, and a mask of ids[:, 1:] that were sampled: a third of each turn."""
    rng = np.random.default_rng(0)
    rows: list[np.ndarray] = []
    starts: list[int] = []
    for _ in range(trees):
        backbone = rng.integers(0, 100, prompt + turns * turn)
        rows, starts = [*rows, backbone], [*starts, prompt]
        for depth in rng.choice(turns, points, replace=False):
            at = prompt + turn * int(depth)
            for _ in range(width - 1):
                rows.append(np.concatenate([backbone[:at], rng.integers(0, 100, len(backbone) - at)]))
                starts.append(at)
    place = np.arange(1, prompt + turns * turn)
    sampled = ((place - prompt) % turn >= 2 * turn // 3) & (place >= np.array(starts)[:, None])
    return torch.from_numpy(np.stack(rows)), torch.from_numpy(sampled)


LONG = {"prompt": 600, "turns": 10, "turn": 40}
SHORT = {"prompt": 60, "turns": 10, "turn": 12}


def bench_update(repeats: int) -> list[str]:
    """Compare forward and backward passes of packed and flat rows."""
    lines = ["| policy | paths | tokens flat | packed | ratio of tokens | update flat / packed | gradients differ by |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines.append(update_line("3M", 1, LONG, points=4, repeats=repeats))
    lines.append(update_line("0.2M", 1, LONG, points=4, repeats=repeats))
    lines.append(update_line("0.2M", 4, SHORT, points=2, repeats=repeats))
    return [*lines, update_line("0.2M", 4, SHORT, points=0, repeats=repeats)]


def update_line(size: str, trees: int, shape: dict[str, int], *, points: int, repeats: int) -> str:
    """Measure trees with ``points`` forks of width 4."""
    model = model_of(size, 1024)
    packing.enable(model)
    ids, where = paths_of(trees, points=points, width=4, **shape)
    lengths = torch.full((len(ids),), ids.shape[1])
    gradients: dict[bool, torch.Tensor] = {}

    def update(packed: bool) -> None:
        model.zero_grad()
        logps, *_ = forward(model, ids, lengths, where=where, packed=packed)
        (logps.sum() / len(logps)).backward()  # type: ignore[no-untyped-call]
        gradients[packed] = torch.cat([p.grad.flatten() for p in model.parameters()])

    spent = in_turns({"flat": partial(update, False), "packed": partial(update, True)}, repeats)
    apart = float((gradients[True] - gradients[False]).norm() / gradients[False].norm())
    n = packing.pack(ids, lengths).ids.shape[1]
    return (
        f"| {size} | {trees} x {len(ids) // trees} of {ids.shape[1]} | {ids.numel():,} | {n:,} | "
        f"{ids.numel() / n:.2f} | **{spent['flat'] / spent['packed']:.2f}** | {apart:.0e} |"
    )


# ---------------------------------------------------------------------------------------------------------------- forks


def bench_forks(repeats: int) -> list[str]:
    """Compare three forks of a 720-token path up to their first token, its keys and values kept or read again."""
    lines = ["| policy | read again / shared | tokens read again | shared |", "|---|---|---|---|"]
    return [*lines, *(forks_line(size, repeats) for size in ("3M", "0.2M"))]


def forks_line(size: str, repeats: int) -> str:
    """Measure forks of a path that has continued for 200 tokens since."""
    ids = np.random.default_rng(0).integers(0, 100, 720).tolist()
    session = Generator(model_of(size, 1024), stop_ids=[0], max_new_tokens=1).open([ids + ids[:200]])
    session.prefill([0])

    def start(shared: bool) -> int:
        """Fork the path; returns the number of tokens read."""
        before = session.prefilled
        rows = [session.fork(0, length=720) if shared else session.add(ids) for _ in range(3)]
        session.generate(rows, [np.random.default_rng(i) for i in range(3)])
        session.drop(rows)
        return session.prefilled - before

    spent = in_turns({"again": partial(start, False), "shared": partial(start, True)}, repeats)
    return f"| {size} | **{spent['again'] / spent['shared']:.1f}** | {start(False)} | {start(True)} |"


# --------------------------------------------------------------------------------------------------------- environments


class Admissible:
    """Policy that samples as in training, then plays a random admissible command."""

    def __init__(self, policy: ChatPolicy) -> None:
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        """Draw actions from ``info["admissible_commands"]``."""
        actions = self.policy(contexts)
        for context, action in zip(contexts, actions):
            if action is not None:
                action.text = str(context.rng.choice(context.info["admissible_commands"]))
        return actions


class Exploring(TrainingSession):
    """Session whose policy plays drawn actions, so that environments change state."""

    def player(self, temperature: float) -> ChatPolicy:
        """The policy whose actions are replaced."""
        return cast(ChatPolicy, Admissible(super().player(temperature)))


def bench_environments(repeats: int) -> list[str]:
    """Measure the environments' share of training's wall-clock time, with a snapshot at every step of each backbone."""
    lines = ["| environment | policy | steps | snapshots | share of the rollout: steps, resets | snapshots, restores |"]
    lines = [lines[0] + " together | share of a training step |", "|---|---|---|---|---|---|---|---|"]
    for size in ("0.2M", "3M"):
        lines.append(environment_line("sandboxgym/ALFWorld-v0", ("games=embedded:train",), 14, size, repeats))
        lines.append(environment_line("sandboxgym/WebShop-v0", ("split=product-train",), 8, size, repeats))
    return lines


def environment_line(env_id: str, kwargs: tuple[str, ...], turns: int, size: str, repeats: int) -> str:
    """Measure eight tasks of 13 paths each; the first update is not counted."""
    tree: dict[str, Any] = {"algo": "bpo-paper", "width": 4, "points": 4, "spacing": 1, "prompts": 8}
    settings: dict[str, Any] = {"env_id": env_id, "env_kwargs": kwargs, "eval_kwargs": kwargs, "max_turns": turns}
    with tempfile.TemporaryDirectory() as out:
        args = Args(
            **tree, **settings, out=out, model=f"tiny:{size}", context=1024, max_new_tokens=12, observation_tokens=60,
            sft_episodes=64, sft_reward=0.0, eval_untrained=False, eval_episodes=1, updates=repeats + 1, save_every=100,
        )  # fmt: skip
        Trainer(args, Exploring).run()
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "time/rollout" in line][1:]
    median = {name: statistics.median(line[name] for line in updates) for name in updates[0] if name != "stage"}
    busy = [(line["time/env"] + line["time/snapshots"], line["time/rollout"] + line["time/update"]) for line in updates]
    steps = (updates[-1]["total/env_steps"] - updates[0]["total/env_steps"]) / max(1, len(updates) - 1)
    env_share, snapshot_share = median["time/env_share"], median["time/snapshots_share"]
    whole = statistics.median(part / total for part, total in busy)
    return (
        f"| {env_id} | {size} | {steps:.0f} | {8 * median['rollout/snapshots']:.0f} | {env_share:.2%} "
        f"| {snapshot_share:.2%} | {env_share + snapshot_share:.2%} | **{whole:.2%}** |"
    )


# -------------------------------------------------------------------------------------------------------------- overlap


class Recited(Admissible):
    """Policy that samples as in training, then plays an expert's script, slightly different each time.

    The differences keep its tests from being skipped: a patch that was submitted before is not tested again, and the
    patches of a policy that learns are mostly new.
    """

    def __init__(self, policy: ChatPolicy, scripts: Sequence[Sequence[str]]) -> None:
        super().__init__(policy)
        self.scripts = scripts

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        """Return the actions of the task's script."""
        actions = self.policy(contexts)
        for context, action in zip(contexts, actions):
            script = self.scripts[context.path[0]]
            if action is not None:
                last = context.depth + 1 >= len(script)
                note = "" if last else f"\necho {context.rng.integers(10**9)} >> notes.txt"
                action.text = script[min(context.depth, len(script) - 1)] + note
        return actions


def bench_overlap(repeats: int) -> list[str]:
    """Compare wall-clock time of rollouts on SWE-bench's small repositories with and without overlapped sampling."""
    lines = ["| environments at a time | steps | share that waits for them | overlapped | rollout / overlapped |"]
    return [*lines, "|---|---|---|---|---|", overlap_line(4, repeats)]


def overlap_line(threads: int, repeats: int) -> str:
    """Measure four tasks of 4 paths each with a policy of 0.2 M parameters that samples 100 tokens per turn."""
    settings: dict[str, Any] = {"context": 1024, "max_new_tokens": 100, "prompts": 4}
    args = resolved(Args(algo="bpo-paper", width=4, points=1, spacing=1, **settings))
    kwargs = ("dataset=mini", 'limits={"seconds": 5}')
    with Envs(lambda: make_env("sandboxgym/SWEBench-v0", kwargs, 8), threads=threads) as envs:
        scripts, texts = demonstrated(envs, 4)
        tokenizer = tiny_bpe_tokenizer(texts, 2000)
        chat = ChatFormat(tokenizer, observation_tokens=48)
        model = tiny_model(tokenizer, **TINY_SIZES["0.2M"], max_position_embeddings=args.context)
        generator = Generator(model, stop_ids=chat.stop_ids, max_new_tokens=100, context_limit=args.context)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        shares: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(repeats + 1):
            for overlap in seconds:
                policy, clock = Recited(ChatPolicy(generator, chat), scripts), Clock()
                schedule, began = make_schedule(args, (repeat,), Memory.of(args)), time.perf_counter()
                trees = rollout(
                    envs, policy, schedule, tasks=range(4), seed=(repeat, overlap), overlap=overlap, clock=clock
                )
                seconds[overlap].append(time.perf_counter() - began)
                shares[overlap].append((clock.steps + clock.snapshots) / seconds[overlap][-1])
    steps = sum(tree.env_steps for tree in trees)
    waits = {overlap: statistics.median(found[1:]) for overlap, found in shares.items()}
    ratio = statistics.median(alone / both for alone, both in zip(seconds[False][1:], seconds[True][1:]))
    return f"| {threads} | {steps} | {waits[False]:.0%} | {waits[True]:.0%} | **{ratio:.2f}** |"


def demonstrated(envs: Envs, tasks: int) -> tuple[list[list[str]], list[str]]:
    """Record the expert's actions in each of these tasks, and every text seen on the way."""
    scripts: list[list[str]] = []
    texts: list[str] = []
    env = envs.take()
    for task in range(tasks):
        base: Any = env.unwrapped
        expert = base.expert(rng=random.Random(task), direct=True)
        observation, over, script = str(env.reset(seed=task, options={"task": task})[0]), False, []
        expert.reset(observation)
        while not over:
            script.append(expert.act(observation))
            texts += [observation, script[-1]]
            observation, _, terminated, truncated, _ = env.step(script[-1])
            over = terminated or truncated
        scripts.append(script)
    envs.give(env)
    return scripts, texts


# ------------------------------------------------------------------------------------------------------------------ trl

GROUP, PROMPTS, COMPLETION, STEPS = 8, 8, 24, 4


class OneTurn(SnapshotEnv[str, str]):
    """One-turn task of twenty words, GRPO's setting without environments: answers of even length are right."""

    metadata = {"render_modes": []}  # noqa: RUF012
    immutable_state = True
    num_tasks = 64

    def __init__(self) -> None:
        self.observation_space = Unicode()
        self.action_space = Unicode()
        self.task = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return the words of the task."""
        super().reset(seed=seed)
        self.task = (options or {}).get("task", 0)
        return words_for(self.task), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode."""
        return "", right(action), True, False, {}

    def _capture(self) -> int:
        return self.task

    def _apply(self, state: int) -> None:
        self.task = state


def words_for(task: int) -> str:
    """Words that stand for a task of the benchmark's environment."""
    return " ".join(random.Random(task).choices(WORDS, k=20))


def right(answer: str) -> float:
    """Reward of an answer: 1 if its length is even."""
    return float(len(answer) % 2 == 0)


ONE_TURN = "bpo_ref.experiments.bench:bench/OneTurn-v0"
if "bench/OneTurn-v0" not in gym.registry:
    gym.register("bench/OneTurn-v0", entry_point="bpo_ref.experiments.bench:OneTurn")


class Spending:
    """CPU and wall-clock seconds, generated tokens and memory of the steps after the first."""

    def __init__(self) -> None:
        self.tokens = 0
        self.marks: list[tuple[float, float, int]] = []
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def mark(self) -> None:
        """Record the end of a step."""
        self.marks.append((time.process_time(), time.perf_counter(), self.tokens))

    def report(self) -> dict[str, float]:
        """Report all steps but the first."""
        (cpu, wall, tokens), (cpu_end, wall_end, tokens_end) = self.marks[0], self.marks[-1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() // 1024
        spent = {"tokens": tokens_end - tokens, "cpu": cpu_end - cpu, "wall": wall_end - wall}
        return {**spent, "grown_mb": (peak - self.before) / 1024, "peak_mb": peak / 1024}


def run_ours(folder: str, out: str, adapters: bool) -> dict[str, float]:
    """Run GRPO with this trainer."""
    large: dict[str, Any] = {"lora_r": 32, "dtype": "bfloat16"} if adapters else {}
    args = Args(
        algo="grpo", model=folder, out=out, env_id=ONE_TURN, max_turns=1, context=96, max_new_tokens=COMPLETION,
        roots=GROUP, prompts=PROMPTS, updates=STEPS + 1, eval_episodes=1, eval_every=1000, save_every=1000, **large,
    )  # fmt: skip
    trainer = Trainer(args)
    spending, count = Spending(), trainer._count

    def counted(*values: Any) -> dict[str, float]:
        metrics = count(*values)
        spending.tokens = int(trainer.session.counters["tokens"])
        spending.mark()
        return metrics

    trainer._count = counted  # type: ignore[method-assign,assignment]
    trainer.run()
    return spending.report()


def run_trl(folder: str, out: str, adapters: bool) -> dict[str, float]:
    """Run GRPO with TRL."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": [{"role": "user", "content": words_for(task)}]} for task in range(64)]

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        spending.tokens += sum(map(len, completion_ids))
        return [right(completion[0]["content"]) for completion in completions]

    class Marks(TrainerCallback):  # type: ignore[misc]
        """Callback that records when a step ends."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Record the end of a step."""
            spending.mark()

    config = GRPOConfig(
        output_dir=out, max_steps=STEPS + 1, num_generations=GROUP, per_device_train_batch_size=GROUP * PROMPTS,
        max_completion_length=COMPLETION, beta=0.0, learning_rate=5e-4, use_cpu=not torch.cuda.is_available(),
        save_strategy="no", report_to="none", logging_steps=1000, gradient_checkpointing=False, bf16=adapters,
        disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if adapters else torch.float32),
        peft_config=lora if adapters else None,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Marks()],
    )
    spending = Spending()
    trainer.train()
    return spending.report()


def bench_trl(repeats: int) -> list[str]:
    """Compare with TRL's GRPO where the algorithms coincide: one turn, no KL penalty; equal model, prompts, counts."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer(WORDS)
        tiny_model(tokenizer, **TINY_SIZES["3M"], max_position_embeddings=128).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for repeat in range(repeats):
            for side in found:
                arguments = ("--side", side, "--folder", folder, "--out", f"{folder}/{side}{repeat}")
                command = interpreter.module_command("bpo_ref.experiments.bench", "trl-side", *arguments)
                out = subprocess.run(command, env=interpreter.environment(), capture_output=True, text=True)
                if out.returncode:
                    raise RuntimeError(f"{side} failed:\n{out.stderr[-3000:]}")
                found[side].append(json.loads(out.stdout.splitlines()[-1]))
    lines = [
        "| trainer | tokens | tokens per CPU second | per second | peak MB | of it in training |",
        "|---|---|---|---|---|---|",
    ]
    speeds = {}
    for side, runs in found.items():
        mid = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        speeds[side] = statistics.median(run["tokens"] / run["cpu"] for run in runs)
        wall = statistics.median(run["tokens"] / run["wall"] for run in runs)
        lines.append(
            f"| {'bpo_ref' if side == 'ours' else 'TRL'} | {mid['tokens']:,.0f} | {speeds[side]:,.0f} | {wall:,.0f} | "
            f"{mid['peak_mb']:,.0f} | {mid['grown_mb']:,.0f} |"
        )
    return [*lines, "", f"bpo_ref / TRL: **{speeds['ours'] / speeds['trl']:.2f}** tokens per CPU second"]


# ----------------------------------------------------------------------------------------------------------- look-ahead


def bench_lookahead(repeats: int, start: str | None = None) -> list[str]:
    """Compare updates with and without look-ahead on embedded games, from SFT trained here or a checkpoint."""
    config = Args(**read_config(Args, Path(__file__).parents[1] / "configs" / "alfworld-tiny.yaml"))
    kwargs = (*config.env_kwargs, "features=true")
    config = replace(config, env_kwargs=kwargs, eval_episodes=1, eval_untrained=False, trackers=(), lr_decay="constant")
    lines = ["| setting | forked steps a generated token | scored tokens a generated token | update with / without |"]
    lines.append("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        if start is None:
            Trainer(replace(config, algo="sft", out=f"{folder}/start")).run()
            start = f"{folder}/start/checkpoint"
        for algo, network in LOOKAHEAD_CASES:
            line = lookahead_line(replace(config, algo=algo, sft_steps=0, init_from=start), network, folder, repeats)
            lines.append(line)
    return lines


LOOKAHEAD_CASES: tuple[tuple[Literal["rloo-pooled", "bpo"], Network], ...] = (
    ("rloo-pooled", "none"), ("bpo", "none"), ("bpo", "both"),
)  # fmt: skip


def lookahead_line(config: Args, network: Network, folder: str, repeats: int) -> str:
    """Format the ratios of rounds in which both variants take turns with the same episodes: their median, and all."""
    config = replace(config, lr=1e-9)  # otherwise the two policies, and with them their episodes, would diverge
    plain = Trainer(replace(config, out=f"{folder}/{config.algo}-{network}-plain"))
    ahead = Trainer(replace(config, out=f"{folder}/{config.algo}-{network}", lookahead=True, network=network))
    counts = {name: 0.0 for name in ("tokens", "lookahead/steps", "lookahead/scored_tokens")}
    ratios = []
    for round_ in range(repeats + WARM):
        seconds = {}
        for trainer in (plain, ahead):
            began = time.process_time()
            trees = trainer._rollouts((trainer.args.seed, 2, trainer.session.step))
            forks = assign_credit(trees, trainer.args, trainer.session.memory)
            trainer.session.memory.observe(trees, forks, trainer.args)
            trainer._optimize(trees)
            trainer.session.step += 1
            seconds[trainer] = time.process_time() - began
        if round_ >= WARM:
            ratios.append(seconds[ahead] / seconds[plain])
            counts["tokens"] += sum(tree.tokens for tree in trees)
            for name in ("lookahead/steps", "lookahead/scored_tokens"):
                counts[name] += ahead.rollout_costs[name]
    for trainer in (plain, ahead):
        trainer.session.close()
    steps, scored = (counts[f"lookahead/{name}"] / counts["tokens"] for name in ("steps", "scored_tokens"))
    every = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    name = f"`--algo {config.algo}`" + ("" if network == "none" else f" `--network {network}`")
    return f"| {name} | {steps:.2f} | {scored:.2f} | **{statistics.median(ratios):.2f}** ({every}) |"


WARM = 2
"""Warm-up rounds, not counted: before them V̂ has no data, and nothing is scored."""


# ---------------------------------------------------------------------------------------------------------------- table


def _packed_row(options: Options) -> Iterator[Pair]:
    """An update of four tasks' trees of seven paths each."""
    model = model_of("0.2M", 1024)
    packing.enable(model)
    ids, where = paths_of(4, points=2, width=4, **SHORT)
    lengths = torch.full((len(ids),), ids.shape[1])

    def update(packed: bool) -> None:
        model.zero_grad()
        logps, *_ = forward(model, ids, lengths, where=where, packed=packed)
        (logps.sum() / len(logps)).backward()  # type: ignore[no-untyped-call]

    yield from row.in_turns(partial(update, True), partial(update, False))


def _forks_row(options: Options) -> Iterator[Pair]:
    """Three forks of a path of 720 tokens, up to their first token."""
    ids = np.random.default_rng(0).integers(0, 100, 720).tolist()
    session = Generator(model_of("0.2M", 1024), stop_ids=[0], max_new_tokens=1).open([ids + ids[:200]])
    session.prefill([0])

    def start(shared: bool) -> None:
        rows = [session.fork(0, length=720) if shared else session.add(ids) for _ in range(3)]
        session.generate(rows, [np.random.default_rng(i) for i in range(3)])
        session.drop(rows)

    yield from row.in_turns(partial(start, True), partial(start, False))


def _updates(options: Options, ours: dict[str, Any], instead: dict[str, Any], *, per_token: bool) -> Iterator[Pair]:
    """Whole updates of two settings on embedded games, after a little SFT; both policies stay where they are."""
    config = Args(**read_config(Args, Path(__file__).parents[1] / "configs" / "alfworld-tiny.yaml"))
    kwargs = (f"games={options.games}" if options.games != "embedded" else "games=embedded:train", "features=true")
    config = replace(config, env_kwargs=kwargs, eval_episodes=1, eval_untrained=False, trackers=())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        # SFT takes less than a minute; a row of the table may spend three minutes on its preparation.
        Trainer(replace(config, algo="sft", sft_episodes=400, sft_steps=100, out=f"{folder}/start")).run()
        config = replace(config, sft_steps=0, init_from=f"{folder}/start/checkpoint", lr=1e-9, lr_decay="constant")
        trainers = [
            Trainer(replace(config, out=f"{folder}/{number}", **settings))
            for number, settings in enumerate((ours, instead))
        ]
        gc.collect()
        gc.freeze()  # as a training run does
        try:
            for number in itertools.count():
                for trainer in trainers:
                    _get_to_know(trainer)
                found = [_update(trainer, per_token) for trainer in trainers]
                if number >= WARM:
                    yield found[0], found[1]
        finally:
            for trainer in trainers:
                trainer.session.close()
            gc.unfreeze()


def _get_to_know(trainer: Trainer) -> None:
    """Compile the games of the next update twice, after which their operators are on disk.

    A run compiles a game the long way at its first two visits, and at all others reads it; where an update plays other
    games than that of the other side, or more, those two would be most of the difference.
    """
    args, session = trainer.args, trainer.session
    drawn = ask(session.envs, lambda env: draw_tasks(env, args.prompts, (args.seed, 2, session.step)))
    library = ask(session.envs, lambda env: cast(ALFWorldEnv, env.unwrapped).library)
    for task in drawn:
        for _ in range(2):
            Game.from_json(content_of(library[task]), cache=GroundingCache())


def _update(trainer: Trainer, per_token: bool) -> float:
    """Processor seconds of an update, or of each token that it generates."""
    began = time.process_time()
    trees = trainer._rollouts((trainer.args.seed, 2, trainer.session.step))
    forks = assign_credit(trees, trainer.args, trainer.session.memory)
    trainer.session.memory.observe(trees, forks, trainer.args)
    trainer._optimize(trees)
    trainer.session.step += 1
    seconds = time.process_time() - began
    return seconds / sum(tree.tokens for tree in trees) if per_token else seconds


def _help_row(options: Options) -> Iterator[Pair]:
    def run(command: list[str]) -> None:
        subprocess.run(command, env=interpreter.environment(), capture_output=True, check=True)

    def spent() -> float:
        times = os.times()
        return times.children_user + times.children_system

    ours = partial(run, interpreter.module_command("bpo_ref.train", "--help"))
    yield from row.in_turns(ours, partial(run, interpreter.command("import torch")), clock=spent)


BPO: dict[str, Any] = {"algo": "bpo"}
ROWS = (
    row.TableRow(
        "trainer.packed", "trainer, an update with shared prefixes packed", "every path by itself", _packed_row
    ),
    row.TableRow(
        "trainer.forks", "trainer, three forks of 720 tokens, first token", "the prefix read again", _forks_row
    ),
    row.TableRow(
        "trainer.bpo",
        "trainer, `bpo`, processor time of a generated token, games that this machine knows",
        "`grpo`, which generates three times as many in an update",
        partial(_updates, ours=BPO, instead={"algo": "grpo"}, per_token=True),
    ),
    row.TableRow(
        "trainer.bpo_alike",
        "trainer, `bpo`, processor time of a generated token, games that this machine knows",
        "`grpo` with as many tokens in an update",
        partial(_updates, ours=BPO, instead={"algo": "grpo", "prompts": 5}, per_token=True),
    ),
    row.TableRow(
        "trainer.lookahead",
        "trainer, an update of `bpo` with look-ahead, games that this machine knows",
        "without",
        partial(_updates, ours={**BPO, "lookahead": True}, instead=BPO, per_token=False),
    ),
    row.TableRow("trainer.help", "`sandboxgym train --help`", "`import torch`", _help_row),
)
"""The trainer's rows of ``sandboxgym bench table``."""

BENCHES = {
    "update": bench_update,
    "forks": bench_forks,
    "environments": bench_environments,
    "overlap": bench_overlap,
    "lookahead": bench_lookahead,
    "trl": bench_trl,
}


def main() -> None:
    """Measure the trainer's speed, and print the results as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*BENCHES, "trl-side"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--start", help="lookahead: folder of the checkpoint to start from (default: train one)")
    parser.add_argument("--side", choices=["ours", "trl"], help="trl-side, which trl starts: trainer to run")
    parser.add_argument("--folder", help="trl-side: folder of the model")
    parser.add_argument("--out", help="trl-side: folder of the run")
    parser.add_argument("--adapters", action="store_true", help="trl-side: bf16, adapters of rank 32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.name == "trl-side":
        side = run_ours if options.side == "ours" else run_trl
        print(json.dumps(side(options.folder, options.out, options.adapters)))
        return
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread\n")
    bench = partial(bench_lookahead, start=options.start) if options.name == "lookahead" else BENCHES[options.name]
    print("\n".join(bench(options.repeats)))


if __name__ == "__main__":
    main()
