"""Branching Policy Optimization and its baselines, read from top to bottom: arguments, credit, loss, loop.

    accelerate launch bpo_ref/train.py --config bpo_ref/configs/alfworld-tiny.yaml --algo bpo --seed 1

Every algorithm is a setting of one rollout tree (`sandboxgym.tree`): where it forks (the schedule), what an action is
credited with (credit and baseline), how much a step counts (its weight). The rest, from sampling to logging, is shared.

Beside this file: where trees fork (`schedules.py`), what credit and schedules know from other rollouts
(`baselines.py`), which episodes are left out (`masks.py`), tensors (`batch.py`), shared prefixes (`packing.py`), the
network (`models.py`), sampling (`generate.py`, `chat.py`, `policy.py`), processes, checkpoints (`run.py`), scores,
reports (`eval.py`, `runlog.py`, `plots.py`), the quality of the estimators (`variance.py`), the paper's tables
(`study.py`).
On many GPUs: data parallel or sharded (`parallel.py`, `zero3.py`), through accelerate. Left out: inference servers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import sandboxgym  # noqa: F401 - registers the environments
from bpo_ref.annotate import annotate
from bpo_ref.backends import BackendName
from bpo_ref.baselines import (
    ForkSample,
    Gather,
    Memory,
    StateBaseline,
    independent,
    mean_value,
    state_key,
    summarize,
)
from bpo_ref.batch import Batch, Critique, Row, by_length, collate, micro_batches, rows_of
from bpo_ref.checkpoint import CheckpointError
from bpo_ref.config import ConfigError, parse
from bpo_ref.eval import Score
from bpo_ref.generate import forward
from bpo_ref.masks import end_counts, without_masked
from bpo_ref.models import CausalLM
from bpo_ref.oracle import value_scores
from bpo_ref.ranges import check_combinations, check_ranges
from bpo_ref.run import Interrupted, Run, TrainingFailed
from bpo_ref.runlog import batch_metrics, batch_totals, rollout_costs, write_samples
from bpo_ref.schedules import make_schedule
from sandboxgym.prompts import PromptName
from sandboxgym.tree import Clock, Edge, Failure, Node, RolloutTree, rollout

Algo = Literal[
    "sft", "ppo", "grpo", "rloo", "rloo-turn", "rloo-key", "rloo-value", "rloo-pooled", "vineppo",
    "bpo-paper", "bpo-sibling", "bpo-tree", "bpo-key", "bpo-forest", "bpo-split", "bpo",
]  # fmt: skip
ScheduleName = Literal[
    "none",
    "entropy",
    "entropy-online",
    "random",
    "spaced",
    "lowest",
    "root",
    "value-oracle",
    "explained",
    "split",
    "mc",
]
Credit = Literal["paper", "sibling", "tree", "group", "gae", "mc"]
Baseline = Literal["none", "turn", "key", "value", "pooled", "critic"]
KEYED = ("key", "value", "pooled")  # baselines


@dataclass(frozen=True)
class Args:
    """Settings of a run. Those that are None are set by ``algo`` (see ``PRESETS``)."""

    algo: Algo = "bpo"
    """The algorithm: a preset of the settings under *Tree and credit*; each can be overridden. ``bpo`` is ``bpo-split``
    with the pooled baseline and roulette where the environment gives a ``progress_key``, else ``bpo-forest``."""
    out: str = "runs/alfworld"
    """Folder for logs, checkpoints, samples, plots and results."""
    seed: int = 0
    """Seed of everything that is drawn: weights, demonstrations, prompts, samples."""
    resume: bool = False
    """Go on from the last checkpoint in ``out``, exactly as if never interrupted."""
    init_from: str | None = None
    """A checkpoint folder whose weights to start from (its supervised stage is then not repeated)."""

    # Environment
    env_id: str = "sandboxgym/ALFWorld-v0"
    """Any environment with snapshots, text observations and text actions."""
    env_kwargs: tuple[str, ...] = ()
    """Its arguments in training, as name=value."""
    eval_kwargs: tuple[str, ...] = ()
    """Its arguments in evaluation."""
    env_threads: int = 1
    """Environments that work at the same time: more than 1 pays for sandboxes and browsers."""
    env_overlap: bool = False
    """Sample for one half of the tasks while the environments of the other half step: pays where steps take long."""
    env_retries: int = 2
    """Environments that a path may lose before it is dropped, with its forks. Those that take their place begin at its
    last snapshot. 0: the first that fails ends the run."""
    max_live: int = 1024
    """Most paths that a process samples at the same time: bounds memory, changes nothing else."""
    max_turns: int = 24
    """Step limit of an episode (the original ALFWorld's is 50, the paper's 40)."""

    # Policy
    model: str = "tiny:0.2M"
    """``tiny:SIZE`` (built in code, see ``tiny.py``), or a folder or hub name of a transformers causal model."""
    tiny_vocabulary: int = 0
    """Pieces of a tiny policy's byte-level tokenizer, learnt on the expert episodes: any text can be read and written.
    0: a word-level one that only knows the words of these episodes (ALFWorld's few)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in, and frozen weights are kept in; weights that are trained stay in float32."""
    lora_r: int = 0
    """Rank of adapters that are trained in place of the weights (LoRA); 0: all weights are. The reference is then the
    policy without them, and takes no memory."""
    lora_alpha: int = 32
    """Their output is scaled by this, divided by their rank."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass rather than keep what is inside."""
    prompt: PromptName = "plain"
    """``plain``: a message is the observation, an answer the action. ``react``: a system prompt for the environment,
    and answers of thoughts between <think> tags and one action between <action> tags; others are invalid actions.
    ``choice``: the possible actions are numbered, and a number is an answer."""
    list_actions: bool = False
    """Name the possible actions in every message, where the environment does."""
    history: int = 0
    """Turns that a message recalls, each turn being a conversation (and a row in training) of its own; 0: one
    conversation grows with the episode."""
    system: str | None = None
    """System prompt, in place of that of ``prompt``."""
    context: int = 768
    """Most tokens of an episode; one that does not fit is truncated."""
    observation_tokens: int = 0
    """Most tokens of an observation: the middle of longer ones is left out. 0: no limit."""
    max_new_tokens: int = 12
    """Most tokens of an action."""
    entropy_skip: int | None = None
    """Tokens that every answer begins with: its entropy is that of the token after them. Default: the prompt's tag."""
    temperature: float = 1.0
    """Sampling temperature in training; the policy is the tempered distribution."""
    backend: BackendName = "hf"
    """What samples: ``hf`` is this package's loop; ``transformers-continuous`` has a paged cache, for CUDA."""
    threads: int = 1
    """CPU threads a process (0: PyTorch's choice)."""
    process_timeout: float = 24.0
    """Hours that processes wait for each other before they give up: those whose tasks are done wait for the slowest."""

    # Supervised stage on expert episodes
    sft_steps: int = 0
    """Optimizer steps; 0 leaves the stage out."""
    sft_data: str | None = None
    """Chats to learn from, one JSON object ``{"messages": [{"role", "content"}, …]}`` a line, instead of the
    environment's own expert."""
    sft_episodes: int = 4000
    """Expert episodes to collect."""
    expert_kwargs: tuple[str, ...] = ()
    """Further arguments of the environment's expert, as name=value."""
    sft_reward: float | None = None
    """Least total reward of an expert episode that is used; None: only the successful ones are."""
    sft_noise: float = 0.2
    """Probability of an action that is not the expert's, which it then recovers from; these are not learnt."""
    sft_batch: int = 16
    """Episodes a step, over all processes."""
    sft_lr: float = 3e-3
    """Learning rate, with a linear warm-up and a cosine decay."""
    sft_observation_weight: float = 0.2
    """Weight of the loss on observation tokens: small models learn to copy names from it."""

    # Reinforcement learning
    updates: int = 50
    """Number of updates; with a ``budget``, only the unit of ``eval_every`` and ``warmup``."""
    match: Literal["returns", "env-steps", "tokens"] = "returns"
    """What ``budget`` counts: episodes played to an end, environment steps, or generated tokens; all are logged."""
    budget: int = 0
    """Train until so much is spent, whatever the number of updates: algorithms with equal budgets can be compared."""
    prompts: int = 16
    """Tasks an update, over all processes."""
    lr: float = 5e-4
    """Learning rate of AdamW."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, to 0 at the end."""
    warmup: int = 0
    """Updates of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    adam_eps: float = 1e-8
    """Of AdamW: weights whose gradients are far smaller hardly move; without it all do by ``lr``, if only by noise."""
    weight_decay: float = 0.0
    """Of AdamW, for the policy's matrices: not for norms, biases and the value head."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    epochs: int = 1
    """Passes over the rollouts of an update."""
    minibatches: int = 1
    """Optimizer steps a pass; each takes whole tasks, shuffled anew for every pass."""
    micro_tokens: int = 16384
    """Most tokens of a forward and backward pass; larger batches are accumulated."""
    pack: Literal["tree", "flat"] = "tree"
    """``tree``: prefixes that paths share are computed once an update; ``flat``: every path by itself, padded."""

    # Tree and credit
    width: int | None = None
    """K: children of a branch node."""
    points: float | None = None
    """M: most branch points on the way from the root to a leaf. A fraction is drawn per task between its neighbours."""
    roots: int | None = None
    """W: root paths a task. Default: N = 1 + M (K - 1) without forks, else as ``root_branch`` says."""
    allocation: Literal["equal", "spread"] = "equal"
    """Root paths: W a task, or W on average, more for tasks whose returns spread in earlier batches."""
    schedule: ScheduleName | None = None
    """Where paths are forked. ``entropy`` (the paper's), ``lowest``, ``random``, ``spaced``, ``root`` and
    ``value-oracle`` rank the steps of a finished path; the others decide before the action: ``entropy-online``,
    ``explained`` (at the depth that explains 30 % of the variance), ``split`` (by V̂). ``mc`` forks for values only."""
    forks: Literal["backbone", "roots", "all"] | None = None
    """Which paths are forked: the first root path, every root path, or every path, forks too."""
    root_branch: Literal["always", "free", "never"] | None = None
    """Whether the root is one of the M points: always, by the schedule's choice, or never."""
    spacing: int = 8
    """Least distance of two branch points in tokens of context (the paper: 64); not for ``split``, ``explained``."""
    fill: Literal["none", "widen"] = "none"
    """What becomes of points that a short path leaves unspent: nothing, or more siblings at those chosen."""
    subsample_returns: int = 0
    """Train on so many of a task's paths, drawn at random (0: all); credit is by all."""
    credit: Credit | None = None
    """``paper`` (Eq. 7, 8), ``sibling`` (Eq. 7 along the whole path), ``tree`` (backed-up values), ``group`` (GRPO),
    ``gae`` (PPO), ``mc`` (VinePPO: differences of Monte-Carlo values from restored states)."""
    baseline: Baseline | None = None
    """Value of a state by others than the siblings: none, the mean of other rollouts at this turn or at this progress
    (``key``), a running mean by progress over earlier batches (``value``), the task's other rollouts at this progress
    shrunk to that (``pooled``), or a learned value head (``critic``)."""
    fork_baseline: Literal["siblings", "shrunk", "parent"] | None = None
    """Below a fork: the siblings' mean, a mixture of it and ``baseline`` by analysis of variance, or ``baseline``."""
    step_weight_power: float | None = None
    """p: a step behind f forks of width K counts K^(-p f). 1 is unbiased, 0 counts all steps of a tree alike."""
    roulette: float | None = None
    """q of ``split``: a path whose V̂ falls to ``roulette_below`` goes on with this probability and then counts 1/q."""
    roulette_below: float = 0.02
    """See ``roulette``; nothing is stopped before states of such values have proved to be worth at most twice it."""
    value_decay: float = 0.9
    """Share of the running means (``value``, ``split``, ``allocation``) that is kept at every update."""
    mc_rollouts: int = 4
    """Rollouts from a restored state for its value; not trained on. VinePPO's are counted, the oracle's are not."""
    mc_turns: int = 0
    """VinePPO: turns of a path to value, drawn from ``max_turns`` before it begins; 0: all."""
    lam: float = 0.95
    """λ of Eq. 8, in agent steps."""
    gamma: float = 1.0
    """Discount a turn."""
    invalid_penalty: float = 0.0
    """Taken off the reward of an action that the environment does not understand (0.1 is common on ALFWorld)."""
    group_std: bool = True
    """Divide ``group`` advantages by the group's standard deviation."""
    advantage_norm: Literal["none", "batch"] | None = None
    """Scale advantages to mean 0 and variance 1 over the tokens of the batch."""

    # Value head (``credit=gae`` or ``baseline=critic``)
    gae_steps: Literal["turn", "token"] = "turn"
    """What is a step of ``gae``: a turn of the episode, or a token."""
    gae_lam: float | None = None
    """λ of ``gae``, in its steps. Default: 0.95 for turns, 1 for tokens, of which .95 forgets 60 behind."""
    value_lr: float = 1e-3
    """Learning rate of the value head; the rest of the network has the policy's."""
    value_weight: float = 0.5
    """Of the value loss."""
    value_clip: float = 0.2
    """Values move at most this far from those before the update without the loss noticing; 0: no clipping."""

    # Loss
    ratio: Literal["token", "step", "sequence"] = "token"
    """Level of the importance ratio: a token, an action, or (its geometric mean) all actions of a path."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 minus this."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 plus this."""
    dual_clip: float = 0.0
    """Where the advantage is negative, the ratio is clipped above this as well (0: not)."""
    kl: float = 0.0
    """β: weight of the KL divergence to the policy that reinforcement learning started from."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Schulman's estimators of it, with r the reference's probability over the policy's: -log r, (log r)² / 2 and
    r - 1 - log r. Default: k3 in the loss, which k2 can replace; k1 in the reward. Both have the gradient of KL(π‖ref):
    k3 counts times the importance ratio, without which it would have that of KL(ref‖π)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it is counted; in the reward it is the log-ratio of each action (k1)."""
    aggregation: Literal["token", "path", "constant"] = "token"
    """Mean over all tokens of all processes, mean over paths of token means, or sum over tokens / tasks."""

    # Bookkeeping
    eval_episodes: int = 256
    """Size of the fixed panel of evaluation tasks: the first of the evaluation library, one episode each."""
    eval_untrained: bool = True
    """Evaluate before the supervised stage too; not worth it where random commands make an environment wait."""
    eval_every: int = 10
    """Updates between evaluations."""
    eval_temperature: float = 1.0
    """Sampling temperature in evaluation."""
    save_every: int = 10
    """Updates (and 20 times as many supervised steps) between checkpoints."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Which of accelerate's trackers get every number that is logged (wandb, mlflow, trackio, …)."""

    @property
    def critic(self) -> bool:
        """Whether there is a value head."""
        return self.credit == "gae" or self.baseline == "critic"

    @property
    def keyed(self) -> bool:
        """Whether the environment's ``progress_key`` is used."""
        return self.baseline in KEYED or self.schedule == "split"


DEFAULTS: dict[str, Any] = dict(  # of what a preset does not name: independent rollouts, plain RLOO
    width=4, points=2.0, schedule="none", forks="backbone", root_branch="never", credit="tree", baseline="none",
    fork_baseline=None, step_weight_power=1.0, roulette=1.0, advantage_norm="none",
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "sft": {},
    "ppo": dict(credit="gae", advantage_norm="batch"),
    "grpo": dict(credit="group"),
    "rloo": {},
    "rloo-turn": dict(baseline="turn"),
    "rloo-key": dict(baseline="key"),
    "rloo-value": dict(baseline="value"),
    "rloo-pooled": dict(baseline="pooled"),
    "vineppo": dict(schedule="mc", credit="mc", roots=8),
    "bpo-paper": dict(schedule="entropy", credit="paper", step_weight_power=0.0, root_branch="free"),
    "bpo-sibling": dict(schedule="entropy-online", credit="sibling", step_weight_power=0.0, root_branch="always"),
    "bpo-tree": dict(schedule="entropy-online", step_weight_power=0.0, root_branch="always"),
    "bpo-key": dict(schedule="entropy-online", baseline="key", step_weight_power=0.75, root_branch="always"),
    "bpo-forest": dict(
        roots=8, width=2, points=1.0, schedule="explained", forks="roots", baseline="turn", fork_baseline="shrunk"
    ),
    "bpo-split": dict(roots=4, width=2, points=3.0, schedule="split", forks="all", baseline="value"),
}
PRESETS["bpo"] = PRESETS["bpo-split"] | dict(baseline="pooled", roulette=0.5)


def resolved(args: Args, *, keyed: bool = True) -> Args:
    """The settings with the preset of ``algo`` filled in, checked.

    Args:
        args: as given.
        keyed: whether the environment gives a ``progress_key``.

    Raises:
        ConfigError: naming the field that cannot be.
    """
    check_ranges(args)
    preset = DEFAULTS | PRESETS["bpo-forest" if args.algo == "bpo" and not keyed else args.algo]
    given = {name: value for name, value in asdict(args).items() if value is not None}
    settings = preset | given
    preset["fork_baseline"] = preset["fork_baseline"] or ("siblings" if settings["baseline"] == "none" else "parent")
    preset["roulette"] = preset["roulette"] if settings["schedule"] == "split" else 1.0
    preset["kl_estimator"] = "k3" if args.kl_in == "loss" else "k1"
    preset["gae_lam"] = 0.95 if args.gae_steps == "turn" else 1.0
    args = replace(args, **{name: value for name, value in preset.items() if name not in given})
    width, points = args.width or 0, args.points or 0.0
    forks = args.schedule not in ("none", "mc")
    n = 1 + points * (width - 1)
    if args.roots is None:
        if not forks and n != round(n):
            raise ConfigError(f"roots: N = 1 + points (width - 1) = {n} is not a whole number; set roots")
        args = replace(args, roots=(width if args.root_branch == "always" else 1) if forks else round(n))
    roots = args.roots or 0

    def refuse(wrong: bool, field: str, message: str) -> None:
        if wrong:
            raise ConfigError(f"{field}: {message}")

    if forks:
        always, too_far = args.root_branch == "always", args.spacing >= args.context
        refuse(width < 2, "width", f"a branch node has at least 2 children (K >= 2), found width={width}")
        refuse(
            points <= 0, "points", f"schedule={args.schedule} needs at least one branch point, found points={points}"
        )
        refuse(always and points < 1, "points", f"a root that always branches is one already, found points={points}")
        refuse(too_far, "spacing", f"{args.spacing} tokens between branch points exceed the context of {args.context}")
        refuse(args.credit in ("gae", "mc"), "credit", f"{args.credit} goes without forks, found {args.schedule}")
    branched = f"found schedule={args.schedule}, roots={roots}"
    alone = f"group is for two or more independent rollouts, {branched}"
    refuse(args.credit == "group" and (forks or roots < 2), "credit", alone)
    refuse((args.credit == "mc") != (args.schedule == "mc"), "credit", f"mc goes with schedule=mc, {branched}")
    refuse(
        args.baseline != "none" and args.credit != "tree", "baseline",
        f"{args.baseline} goes with credit=tree, found credit={args.credit}",
    )  # fmt: skip
    refuse(
        args.keyed and not keyed, "baseline" if args.baseline in KEYED else "schedule",
        f"needs info['progress_key'], which {args.env_id} does not give",
    )  # fmt: skip
    refuse(
        roots == 1 and not forks and args.baseline == "none" and args.credit == "tree" and args.prompts < 2,
        "roots", "one rollout of one task has nothing to be compared with; set roots or prompts",
    )  # fmt: skip
    uneven = {  # what root paths that differ in number do not go with
        f"credit={args.credit}": args.credit != "tree",
        f"root_branch={args.root_branch}": args.root_branch == "free",
        f"roots={roots} and baseline={args.baseline}": roots < 2 + (args.baseline == "none"),
        f"aggregation={args.aggregation}": args.aggregation == "path",  # counts the paths of all tasks alike
        f"subsample_returns={args.subsample_returns}": args.subsample_returns > 0,
    }
    for found, wrong in uneven.items():
        refuse(wrong and args.allocation == "spread", "allocation", f"spread does not go with {found}")
    in_loss = args.kl_in == "loss"
    expected = "k2 or k3 in the loss, where the gradient of k1 is 0 on average" if in_loss else "k1 in the reward"
    refuse((args.kl_estimator == "k1") == in_loss, "kl_estimator", f"expected {expected}, found {args.kl_estimator}")
    survival = args.roulette or 0.0
    refuse(survival != 1.0 and args.schedule != "split", "roulette", f"goes with schedule=split, {branched}")
    refuse(not 0 < survival <= 1, "roulette", f"expected a probability above 0, found {args.roulette}")
    for name in ("updates", "sft_steps", "budget", "mc_turns", "subsample_returns"):
        refuse(getattr(args, name) < 0, name, f"expected 0 or more, found {getattr(args, name)}")
    at_least_one = ("prompts", "roots", "max_turns", "epochs", "minibatches", "mc_rollouts", "env_threads", "max_live")
    for name in (*at_least_one, "eval_episodes", "eval_every", "save_every"):
        refuse(getattr(args, name) < 1, name, f"expected at least 1, found {getattr(args, name)}")
    for name in ("gamma", "temperature", "eval_temperature", "process_timeout"):
        refuse(getattr(args, name) <= 0, name, f"expected more than 0, found {getattr(args, name)}")
    split = f"{args.minibatches} of {args.prompts} prompts: each needs a whole task"
    refuse(args.minibatches > args.prompts, "minibatches", split)
    pretrained = not args.model.startswith("tiny:") or args.init_from is not None
    refuse(args.lora_r > 0 and not pretrained, "lora_r", f"goes with a pretrained model, found model={args.model}")
    window = f"with history={args.history} every turn is a row, found "
    refuse(args.history > 0 and args.aggregation == "path", "aggregation", f"{window}{args.aggregation}")
    refuse(args.history > 0 and args.ratio == "sequence", "ratio", f"{window}{args.ratio}")
    refuse(args.history > 0 and forks and args.spacing > 0, "spacing", f"{window}{args.spacing} tokens; set it to 0")
    too_long = args.max_new_tokens >= args.context
    refuse(too_long, "max_new_tokens", f"{args.max_new_tokens} do not fit the context of {args.context}")
    check_combinations(args)
    return args


# ------------------------------------------------------------------------------------------------------------- credit


def back_up(tree: RolloutTree, gamma: float, guess: Callable[[Node], float] = lambda node: 0.0) -> None:
    """Set Q̂ = r + γ V̂(child) on edges and V̂ = mean of the children's Q̂ on nodes.

    Where roulette was played with survival q, what is handed up is ``guess`` + [survived] (V̂ - ``guess``) / q: of the
    same expectation whatever the guess, which must not know the coin.
    """
    for node in sorted([tree.root, *(edge.child for edge in tree.edges())], key=lambda node: -node.depth):
        for edge in node.children:
            edge.value = edge.reward + gamma * edge.child.value
        node.value = mean_value(node) if node.children else 0.0
        if node.survival < 1.0:
            low = guess(node)
            node.value = low if node.stopped else low + (node.value - low) / node.survival


def local_advantages(node: Node, returns: Sequence[float]) -> list[float]:
    """Leave-one-out advantages of a node's children (Eq. 7): G_c - mean of the others' G; they sum to 0."""
    total, n = sum(returns), len(node.children)
    return [g - (total - g) / (n - 1) for g in returns]


def path_returns(tree: RolloutTree, gamma: float) -> dict[int, float]:
    """Return-to-go of every edge along the path it was sampled on, by id(edge)."""
    returns: dict[int, float] = {}
    for path in tree.paths:
        g = 0.0
        for edge in reversed(path.edges):
            returns[id(edge)] = g = edge.reward + gamma * g
    return returns


def sampled_advantages(tree: RolloutTree, gamma: float) -> dict[int, float]:
    """Eq. 7 at every branch node, by id(edge), from single sampled returns."""
    returns = path_returns(tree, gamma)
    local: dict[int, float] = {}
    for node in tree.branch_nodes:
        values = local_advantages(node, [returns[id(edge)] for edge in node.children])
        local.update({id(edge): value for edge, value in zip(node.children, values)})
    return local


def paper_credit(tree: RolloutTree, args: Args) -> None:
    """As printed: Eq. 7 at branch steps, Eq. 8 (λ-weighted sum of the later ones) before them, 0 after the last."""
    local = sampled_advantages(tree, args.gamma)
    for path in tree.paths:
        total = 0.0
        for edge in reversed(path.edges):
            total = args.lam * total + local.get(id(edge), 0.0)
            edge.advantage, edge.weight = total, 1.0


def sibling_credit(tree: RolloutTree, args: Args) -> None:
    """The advantage of Eq. 7 at the deepest branch node at or above a step on its own path, 0 above the first."""
    local = sampled_advantages(tree, args.gamma)
    for path in tree.paths:
        advantage = 0.0
        for edge in path.edges:
            advantage = local.get(id(edge), advantage)
            edge.advantage, edge.weight = advantage, 1.0


def group_credit(tree: RolloutTree, args: Args) -> None:
    """GRPO: (R - mean) / std over the group of independent rollouts."""
    returns = np.array([edge.value for edge in tree.root.children])
    scale = returns.std() + 1e-4 if args.group_std else 1.0
    for path, value in zip(tree.paths, (returns - returns.mean()) / scale):
        for edge in path.edges:
            edge.advantage, edge.weight = float(value), 1.0 / len(returns)


def mc_credit(tree: RolloutTree, args: Args) -> None:
    """VinePPO: Σ γ^i r_i + γ^n V̂(next) - V̂(last) between one valued state and the next, for every step between.

    V̂ is the mean return of the rollouts that were started there for it; a root without any has the leave-one-out mean
    of the other root paths. These rollouts weigh 0.
    """
    returns, gamma = path_returns(tree, args.gamma), args.gamma
    paths = [path for path in tree.paths if independent(path, args)]
    mine = {id(edge) for path in paths for edge in path.edges}

    def value(node: Node) -> float | None:
        found = [returns[id(edge)] for edge in node.children if id(edge) not in mine]
        return sum(found) / len(found) if found else None

    for edge in tree.edges():
        edge.advantage, edge.weight = 0.0, 0.0
    totals = [returns[id(path.edges[0])] for path in paths]
    for path, total in zip(paths, totals):
        at_root = value(tree.root)
        b = at_root if at_root is not None else (sum(totals) - total) / max(1, len(totals) - 1)
        baselines = []
        for edge in path.edges:
            valued = value(edge.parent) if edge.parent.depth else None
            b = b if valued is None else valued
            baselines.append(b)
            b = (b - edge.reward) / gamma
        target = 0.0
        for edge, b in zip(reversed(path.edges), reversed(baselines)):
            target = edge.reward + gamma * target
            edge.advantage, edge.weight = target - b, 1.0 / len(paths)
            valued = value(edge.parent) if edge.parent.depth else None
            target = target if valued is None else valued


def gae_credit(tree: RolloutTree, args: Args) -> None:
    """Generalized advantage estimation over the turns of each path, or over its tokens; an end is worth 0."""
    lam = args.gae_lam
    assert lam is not None
    for path in tree.paths:
        following, advantage = 0.0, 0.0
        for edge in reversed(path.edges):
            data: Critique = edge.data
            edge.weight = 1.0 / len(tree.paths)
            if args.gae_steps == "turn":
                advantage = edge.reward + args.gamma * following - data.values[0] + args.gamma * lam * advantage
                data.targets = [advantage + data.values[0]] + [math.nan] * (len(data.values) - 1)
                following, edge.advantage = data.values[0], advantage
                continue
            data.advantages = []
            reward, gamma = edge.reward, args.gamma  # of the action's last token; those before lead on undiscounted
            for value in reversed(data.values):
                advantage = reward + gamma * following - value + gamma * lam * advantage
                data.advantages.insert(0, advantage)
                following, reward, gamma = value, 0.0, 1.0
            data.targets = [a + v for a, v in zip(data.advantages, data.values)]
            edge.advantage = float(np.mean(data.advantages))


Parent = Callable[[Edge, int, float], float]
"""(edge, index of its root path, mean of the other root paths less the rewards since) -> value of the state."""


def tree_credit(
    tree: RolloutTree, args: Args, parent: Parent, share: Callable[[int], float], prior: tuple[float, float]
) -> list[ForkSample]:
    """Â = Q̂ - b with backed-up values; weights fall by K^-p at every fork, and rise by 1/q where roulette was survived.

    b = a S + (1 - a) ``parent`` at and below a fork, with S the leave-one-out mean of the nearest fork's children,
    carried forward along one-edge nodes (minus the rewards since); ``parent`` above the first fork and behind roulette.

    Args:
        tree: backed up (`back_up`).
        args: ``gamma`` and ``step_weight_power`` are used.
        parent: from other rollouts only.
        share: a of a fork of so many children.
        prior: pseudo-counts that the mean of the other root paths is shrunk by, and their mean.

    Returns:
        What `Shrinkage` wants to know of every fork.
    """
    assert args.step_weight_power is not None
    samples = []
    count, overall = prior
    # a node, S of the nearest fork, the other root paths' mean, a, the weight, the index of the root path
    todo: list[tuple[Node, float, float, float, float, int]] = [(tree.root, 0.0, 0.0, 0.0, 1.0, -1)]
    while todo:
        node, siblings, roots, a, weight, root = todo.pop()
        n, at_root, mean = len(node.children), node is tree.root, mean_value(node)
        if node.survival < 1.0:
            a, weight = 0.0, weight / node.survival
        if n > 1 and not at_root:
            a = share(n)
            within = sum((edge.value - mean) ** 2 for edge in node.children) / (n - 1)
            samples.append(ForkSample(tree.index, n, within, mean - parent(node.children[0], root, roots)))
        for index, edge in enumerate(node.children):
            rest = n * mean - edge.value
            near = rest / (n - 1) if n > 1 else siblings
            around = (rest + count * overall) / (n - 1 + count) if at_root else roots
            origin = index if at_root else root
            b = near if a == 1.0 else a * near + (1.0 - a) * parent(edge, origin, around)
            edge.weight = weight * n ** -(1.0 if at_root else args.step_weight_power)
            edge.advantage = edge.value - b
            if edge.child.children:
                near, around = (near - edge.reward) / args.gamma, (around - edge.reward) / args.gamma
                todo.append((edge.child, near, around, a, edge.weight, origin))
    return samples


def assign_credit(trees: Sequence[RolloutTree], args: Args, memory: Memory, gather: Gather = list) -> list[ForkSample]:
    """Set every edge's advantage and weight.

    Args:
        trees: this process's share of the batch.
        args: resolved.
        memory: of earlier batches.
        gather: collects lists of all processes.

    Returns:
        The forks of these trees, for `Memory.observe`.
    """
    table, forks = memory.values, []
    pooled_by = "turn" if args.baseline == "turn" else "key"
    for tree in trees:

        def known(node: Node, kind: str = tree.kind) -> float:
            return table.value(state_key(node, "key"), kind)

        back_up(tree, args.gamma, known)
    means = dict(sorted(gather([(tree.index, tree.root.value) for tree in trees])))
    pools = args.baseline in ("turn", "key", "pooled")
    summaries = gather([summarize(tree, pooled_by) for tree in trees]) if pools else []
    batch = StateBaseline(sorted(summaries, key=lambda summary: summary.index))
    shares: dict[str, Callable[[int], float]] = {"siblings": lambda n: 1.0, "parent": lambda n: 0.0}
    share = shares.get(str(args.fork_baseline), memory.shrinkage.weight)
    for tree in trees:
        others = (sum(means.values()) - means[tree.index]) / (len(means) - 1) if len(means) > 1 else 0.0

        def parent(edge: Edge, root: int, roots: float, tree: RolloutTree = tree, others: float = others) -> float:
            key = state_key(edge.parent, pooled_by)
            if args.baseline in ("turn", "key"):
                return batch(tree.index, root, key)
            if args.baseline in ("value", "pooled"):
                value = table.value(key, tree.kind, prior=others)
                return 0.9 * value + 0.1 * roots if args.baseline == "value" else batch(tree.index, root, key, value)
            return float(edge.data.values[0]) if args.baseline == "critic" else roots

        if args.credit == "tree":
            alone = len(tree.root.children) == 1
            prior = (2.0, table.mean if table.known else others) if args.baseline == "value" else (float(alone), others)
            forks += tree_credit(tree, args, parent, share, prior)
        else:
            by_name = {"paper": paper_credit, "sibling": sibling_credit, "group": group_credit, "gae": gae_credit}
            by_name.get(str(args.credit), mc_credit)(tree, args)
        if args.baseline == "critic":
            for edge in tree.edges():
                edge.data.targets = [edge.value] + [math.nan] * (edge.action.tokens - 1)
    if args.advantage_norm == "batch":
        normalize(trees, gather)
    return forks


def normalize(trees: Sequence[RolloutTree], gather: Gather) -> None:
    """Scale advantages to mean 0 and variance 1 over the sampled tokens of all processes."""
    edges = [edge for tree in trees for edge in tree.edges() if edge.weight]
    values = np.array([a for e in edges for a in getattr(e.data, "advantages", []) or [e.advantage] * e.action.tokens])
    n, total, squares = (sum(part) for part in zip(*gather([(len(values), values.sum(), (values**2).sum())])))
    mean = total / n
    scale = math.sqrt(max(0.0, squares / n - mean**2)) + 1e-8
    for edge in edges:
        edge.advantage = (edge.advantage - mean) / scale
        if isinstance(edge.data, Critique):
            edge.data.advantages = [(a - mean) / scale for a in edge.data.advantages]


# --------------------------------------------------------------------------------------------------------------- loss


def policy_loss(
    logps: Tensor, batch: Batch, args: Args, reference: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of every token, unweighted, [B, T-1], 0 where it was not sampled; and sums for the log.

    Clipped surrogate (Schulman et al., 2017) with separate bounds, plus ``kl`` times an estimate of the divergence
    from the reference: with p and q the two log-probabilities k3 is exp(q - p) - (q - p) - 1, and k2 (q - p)² / 2. The
    gradient of ratio x k3, and that of k2 alone, is log(π/ref) ∇ log π: the score-function form of ∇ KL(π‖ref).

    ``ratio="sequence"`` is GSPO-token (Zheng et al., 2025, section 4.3): every token has its row's ratio as value and
    its own as gradient, which is GSPO where a row's advantages are equal.

    Args:
        logps: log-probabilities under the current policy, [B, T-1].
        batch: what was sampled.
        args: ``ratio``, ``clip_low``, ``clip_high``, ``dual_clip``, ``kl`` and ``kl_estimator`` are used.
        reference: log-probabilities under the reference policy, [B, T-1].
    """
    mask = batch.mask
    change = (logps - batch.old_logps).masked_fill(~mask, 0.0)
    if args.ratio == "token":
        ratio, share = change.exp(), mask.to(change)
    else:  # an action counts once, its term spread evenly over its tokens; a row's ratio is that of every token in it
        rows = torch.arange(len(change), device=change.device)[:, None].expand_as(change)
        group = (batch.step if args.ratio == "step" else rows)[mask]
        sums = change.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add(0, group, change[mask])
        sizes = change.new_zeros(len(sums)).index_add(0, group, torch.ones_like(change[mask]))
        level = sums if args.ratio == "step" else (sums / sizes).detach()
        ratio = torch.ones_like(change).masked_scatter(mask, level.exp()[group])
        if args.ratio == "sequence":
            ratio = ratio * (change - change.detach()).exp()
        share = torch.zeros_like(change)
        share = share.masked_scatter(mask, 1.0 / sizes[group]) if args.ratio == "step" else mask.to(change)
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    surrogate = torch.minimum(ratio * batch.advantage, clipped * batch.advantage)
    if args.dual_clip:
        surrogate = torch.where(batch.advantage < 0, surrogate.maximum(args.dual_clip * batch.advantage), surrogate)
    loss = -surrogate * share
    stats = {
        "ratio": (ratio.detach() * mask).sum(),
        "clipped_low": ((ratio < 1 - args.clip_low) & (batch.advantage < 0) & mask).sum().float(),
        "clipped_high": ((ratio > 1 + args.clip_high) & (batch.advantage > 0) & mask).sum().float(),
        "approx_kl": (((-change).exp() - 1 + change).detach() * mask).sum(),
        "tokens": mask.sum().float(),
    }
    if reference is not None:
        apart = (reference - logps).masked_fill(~mask, 0.0)
        divergence = apart**2 / 2 if args.kl_estimator == "k2" else apart.exp() - apart - 1
        moved = change.exp()  # of the policy since it has sampled
        loss = loss + args.kl * divergence * (moved.detach() if args.kl_estimator == "k2" else moved)
        stats["kl"] = (divergence.detach() * mask).sum()
    return loss, stats


def value_loss(values: Tensor, batch: Batch, args: Args) -> tuple[Tensor, int]:
    """½ (V - target)², clipped as in PPO, summed over the states whose value is learnt; and their number.

    Args:
        values: [B, T-1], of the state in which each token was drawn.
        batch: with ``old_values`` and ``targets``.
        args: ``value_clip`` is used.
    """
    assert batch.old_values is not None and batch.targets is not None
    learnt = ~batch.targets.isnan()
    value, old, target = values[learnt], batch.old_values[learnt], batch.targets[learnt]
    error = (value - target) ** 2
    if args.value_clip:
        error = error.maximum((old + (value - old).clamp(-args.value_clip, args.value_clip) - target) ** 2)
    return 0.5 * error.sum(), int(learnt.sum())


def aggregate(loss: Tensor, batch: Batch, rows: Sequence[Row], denominator: float, args: Args) -> Tensor:
    """Σ weight x loss over the tokens, by the whole (minibatch's) denominator; see ``aggregation``."""
    per_row = (loss * batch.weight).sum(dim=1)  # [B]
    if args.aggregation == "path":
        per_row = per_row / per_row.new_tensor([row.mass or 1.0 for row in rows])
    return per_row.sum() / denominator


def denominator_of(rows: Sequence[Row], trees: int, args: Args) -> float:
    """What these rows add to the denominator of `aggregate`."""
    parts = {"token": sum(row.mass for row in rows), "path": float(len(rows)), "constant": float(trees)}
    return parts[args.aggregation]


# --------------------------------------------------------------------------------------------------------------- loop


class Trainer(Run):
    """One run: the supervised stage, then reinforcement learning; everything random is keyed by (seed, step)."""

    def __init__(self, args: Args) -> None:
        super().__init__(args, lambda keyed: resolved(args, keyed=keyed))

    def state(self) -> dict[str, Any]:
        """With what was learnt about schedules and baselines."""
        return {**super().state(), "memory": self.memory.state()}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Likewise."""
        super().restore(saved)
        self.memory = Memory.of(self.args, saved and saved["memory"])

    def run(self) -> dict[str, Score]:
        """Train to the end; returns the scores by stage."""
        args = self.args
        self.catch_signals()
        try:
            with self.explained():
                if not self.done() and (args.init_from or args.eval_untrained):
                    self._evaluate("untrained" if not args.init_from else "start")
                if self.stage == "sft":
                    self._supervised()
                    self._evaluate("sft")
                    self._enter_rl()
                if args.algo != "sft":
                    self._reinforce()
                elif not self._saved_at:  # nothing was to be learnt: the start of other runs all the same
                    self._save(self.out / "checkpoint")
                self._report()
        except Interrupted:
            self.accelerator.print(f"stopped at {self.stage} step {self.step}; go on with --resume")
        finally:
            self.close()
        return self.scores

    def _supervised(self) -> None:
        """Cross entropy on expert episodes; observation tokens count ``sft_observation_weight``."""
        args = self.args
        weight = args.sft_observation_weight
        encoded = [self.chat.demonstration(**episode, observation_weight=weight) for episode in self.demonstrations]
        encoded = [(ids, weights) for ids, weights in encoded if len(ids) <= args.context]
        if not encoded:
            raise ConfigError(f"context: none of {len(self.demonstrations)} expert episodes fits {args.context} tokens")
        bar = self._bar("SFT", args.sft_steps)
        smooth = None
        for step in range(self.step, args.sft_steps):
            warm, rest = min(1.0, (step + 1) / 50), step / args.sft_steps
            self._set_lr(args.sft_lr * warm * 0.5 * (1 + math.cos(math.pi * rest)))
            picks = np.random.default_rng([args.seed, 1, step]).choice(len(encoded), args.sft_batch)
            mine = [encoded[i] for i in picks[self.accelerator.process_index :: self.accelerator.num_processes]]
            loss = self._supervised_step(mine)
            smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
            self.step = step + 1
            self.log.scalars({"sft/loss": loss, "sft/grad_norm": self.grad_norm}, self.done())
            bar.set_postfix(loss=f"{smooth:.3f}")
            bar.update()
            self._maybe_save(20 * args.save_every)
        bar.close()

    def _supervised_step(self, episodes: Sequence[tuple[list[int], list[float]]]) -> float:
        """One optimizer step; returns the weighted mean loss of a token."""
        total = self._sum(sum(sum(weights) for _, weights in episodes))
        losses: list[float] = []

        def backward(part: Sequence[tuple[list[int], list[float]]]) -> None:
            padded = (pad_sequence([torch.tensor(row[i]) for row in part], batch_first=True) for i in (0, 1))
            ids, weights = (tensor.to(self.accelerator.device) for tensor in padded)
            lengths = torch.tensor([len(row) for row, _ in part], device=ids.device)
            logps, _, values = forward(self.model, ids, lengths, where=weights[:, 1:] > 0)
            loss = -(logps * weights[:, 1:]).sum() / total
            if values is not None:
                loss = loss + 0.0 * values.sum()  # every parameter takes part in the reduction over processes
            self._backward_of(loss)
            losses.append(float(loss.detach()))

        batches = by_length(episodes, lambda row: len(row[0]), self.args.micro_tokens)
        self._accumulate(batches, backward, idle=(episodes[0][0][:2], [0.0, 0.0]))
        self._optimizer_step()
        return self._sum(sum(losses))

    def _reinforce(self) -> None:
        """Rollouts, credit, loss; an evaluation every ``eval_every`` updates, or as large a part of the budget."""
        args = self.args
        bar = self._bar(args.algo, args.updates)
        while (before := self._position()) < args.updates:
            began = time.perf_counter()
            self._set_lr(args.lr * learning_rate_factor(before, args))
            with self._gathered():
                trees = self._rollouts((args.seed, 2, self.step))
            sampled = time.perf_counter()
            forks = assign_credit(trees, args, self.memory, self._gather)
            self.memory.observe(trees, forks, args, self._gather)
            leave_out(trees, args, (args.seed, 4, self.step))
            metrics = self._optimize(trees)
            self.step += 1
            finished = time.perf_counter()
            metrics |= self._count(trees, finished - began)
            metrics |= {"time/rollout": sampled - began, "time/update": finished - sampled, **self.rollout_costs}
            self.log.scalars(metrics, self.done())
            bar.set_postfix(
                success=f"{metrics['rollout/success']:.2f}",
                entropy=f"{metrics['rollout/entropy']:.2f}",
                tokens=f"{self.counters['tokens'] / 1e3:.0f}k",
            )
            now = self._position()
            bar.n = now
            bar.refresh()
            last = now >= args.updates
            if last or now // args.eval_every > before // args.eval_every:
                score = self._evaluate(f"{args.algo}@{self.step}")
                bar.set_description(f"{args.algo} eval {score.rate:.2f}")
                if self.accelerator.is_main_process:
                    write_samples(self.out, trees, title=f"{args.algo}, update {self.step}")
            self._maybe_save(args.save_every, last=last)
        bar.close()

    def _position(self) -> float:
        """How far the run is, in updates: of its ``updates``, or as the same part of its budget."""
        args = self.args
        if not args.budget:
            return self.step
        return min(1.0, self.counters[args.match.replace("-", "_")] / args.budget) * args.updates

    def _rollouts(self, seed: Sequence[int]) -> list[RolloutTree]:
        """Trees of the update's tasks, every N-th on each of N processes: the same tasks whatever N is."""
        args = self.args
        env = self.envs.take()
        drawn = draw_tasks(env, args.prompts, seed)
        self.envs.give(env)
        indices = range(self.accelerator.process_index, args.prompts, self.accelerator.num_processes)
        tasks, scores = [drawn[i] for i in indices], None
        shared: dict[str, Any] = dict(
            tasks=tasks, seed=seed, indices=indices, max_live=args.max_live, retries=args.env_retries
        )
        if args.schedule == "value-oracle":
            scores = value_scores(self.envs, self._player(args.temperature), rollouts=args.mc_rollouts, **shared)
        schedule = make_schedule(args, seed, self.memory, scores, drawn)
        policy = self._player(args.temperature)
        failures: list[Failure] = []
        clock, began = Clock(), time.perf_counter()
        trees = rollout(self.envs, policy, schedule, overlap=args.env_overlap, clock=clock, failures=failures, **shared)
        ends = {name: self._sum(count) for name, count in end_counts(trees).items()}
        trees = without_masked(trees)
        self._check_rolled_out(len(trees), failures, ends)
        self.rollout_costs = rollout_costs(policy, clock, failures, ends, time.perf_counter() - began, self._sum)
        for edge in (edge for tree in trees for edge in tree.edges()):
            edge.reward -= args.invalid_penalty * (not edge.valid)
        measure, reference = (partial(self._forward, model) for model in (self.network, self.reference))
        annotate(trees, args, measure, reference, self.accelerator.device)
        return trees

    def _optimize(self, trees: Sequence[RolloutTree]) -> dict[str, float]:
        """``epochs`` passes of ``minibatches`` optimizer steps over the trees."""
        args = self.args
        sums: dict[str, float] = {}
        norms: list[float] = []
        for epoch in range(args.epochs):
            parts = shuffled_parts(args, (args.seed, 5, self.step, epoch))
            for part in range(args.minibatches):
                chosen = [tree for tree in trees if parts[tree.index] == part]
                rows = rows_of(chosen)
                denominator = self._sum(denominator_of(rows, len(chosen), args))
                if not denominator:  # all of its tasks were dropped
                    continue
                learnt = self._sum(sum(row.learnt for row in rows))

                def backward(micro: Sequence[Row], scale: tuple[float, float] = (denominator, learnt)) -> None:
                    for name, value in self._backward(micro, *scale).items():
                        sums[name] = sums.get(name, 0.0) + value

                idle = Row([0, 0], [])  # of no loss
                self._accumulate(micro_batches(rows, args) or [[idle]], backward, idle=idle)
                self._optimizer_step()
                norms.append(self.grad_norm)
        sums = {name: self._sum(value) for name, value in sums.items()}
        tokens = max(sums.pop("tokens"), 1.0)
        metrics = {f"update/{name}": value / tokens for name, value in sums.items() if not name.endswith("loss")}
        steps = {f"update/{name}": value / len(norms) for name, value in sums.items() if name.endswith("loss")}
        return {**metrics, **steps, "update/grad_norm": float(np.mean(norms))}

    def _backward(self, rows: Sequence[Row], denominator: float, learnt: float) -> dict[str, float]:
        args = self.args
        batch = collate(rows, self.accelerator.device)
        reference = None
        if self.reference is not None and args.kl_in == "loss":
            with torch.no_grad():
                reference, *_ = self._forward(self.reference, batch)
        logps, _, values = self._forward(self.model, batch)
        losses, stats = policy_loss(logps, batch, args, reference)
        loss = aggregate(losses, batch, rows, denominator, args)
        if values is not None:
            error, _ = value_loss(values, batch, args)
            stats["value_loss"] = error.detach() / learnt
            loss = loss + args.value_weight * error / learnt
        self._backward_of(loss)
        return {"loss": float(loss.detach()), **{name: float(value) for name, value in stats.items()}}

    def _forward(self, model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies of the sampled tokens, and values of their states, [B, T-1]."""
        packed, temperature = self.args.pack == "tree", self.args.temperature
        return forward(model, batch.ids, batch.lengths, where=batch.mask, temperature=temperature, packed=packed)

    def _count(self, trees: Sequence[RolloutTree], seconds: float) -> dict[str, float]:
        """Add the batch to the run's counters; returns what to log of it, over all processes."""
        total = batch_totals(trees, self._gather)
        for name in ("returns", "env_steps", "tokens"):
            self.counters[name] += int(total[name])
        self.counters["seconds"] += seconds
        return batch_metrics(total) | {f"total/{name}": float(value) for name, value in self.counters.items()}


def leave_out(trees: Sequence[RolloutTree], args: Args, seed: Sequence[int]) -> None:
    """Give the paths beyond ``subsample_returns`` of each task weight 0."""
    for tree in trees if args.subsample_returns else ():
        paths = sorted(tree.paths, key=lambda path: path.key)  # they come in the order in which they ended
        for place in np.random.default_rng([*seed, tree.index]).permutation(len(paths))[args.subsample_returns :]:
            for edge in paths[place].edges:
                edge.weight = 0.0


def shuffled_parts(args: Args, seed: Sequence[int]) -> NDArray[np.int64]:
    """The minibatch of each task of a batch, [prompts].

    Drawn such that N processes, of which each has every N-th task, have equally many in each minibatch.
    """
    rng, size = np.random.default_rng([*seed]), args.prompts // args.minibatches
    order = rng.permuted(np.tile(np.arange(args.minibatches), (size, 1)), axis=1)  # of the tasks i, i + size, …
    return np.concatenate([order.T.reshape(-1), rng.integers(args.minibatches, size=args.prompts % args.minibatches)])


def draw_tasks(env: gym.Env[Any, Any], count: int, seed: Sequence[int]) -> list[Any]:
    """Tasks of a batch, without replacement where there are enough; None where the environment draws its own."""
    available = getattr(env.unwrapped, "num_tasks", None)
    if available is None:
        return [None] * count
    rng = np.random.default_rng([*seed, 7])
    return [int(i) for i in rng.choice(available, count, replace=available < count)]


def learning_rate_factor(position: float, args: Args) -> float:
    """Warm-up, then constant, linear or cosine; ``position`` in updates."""
    if position < args.warmup:
        return (position + 1) / args.warmup
    rest = (position - args.warmup) / max(1, args.updates - args.warmup)
    return {"constant": 1.0, "linear": 1.0 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}[args.lr_decay]


def parse_args(argv: Sequence[str] | None = None) -> Args:
    """Defaults, then the YAML file of ``--config``, then the command line; raises `ConfigError`."""
    return parse(Args, argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Score]:
    """Parse, check, train."""
    try:
        return Trainer(parse_args(argv)).run()
    except (ConfigError, CheckpointError, TrainingFailed) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
