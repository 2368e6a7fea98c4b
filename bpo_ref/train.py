"""Branching Policy Optimization and its baselines, read from top to bottom: arguments, schedules, credit, loss, loop.

    accelerate launch bpo_ref/train.py --config bpo_ref/configs/alfworld-tiny.yaml --algo bpo --seed 1

Every algorithm is a setting of one rollout tree (`sandboxgym.tree`): where it forks (the schedule), what an action is
credited with (credit and baseline), how much a step counts (its weight). The rest, from sampling to logging, is shared.

Left out here: a value head (so no PPO and no value baseline), Monte-Carlo values (VinePPO), packed tree forwards,
LoRA, inference servers. One optimizer, one device type at a time, data parallel through accelerate.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import tyro
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import sandboxgym  # noqa: F401 - registers the environments
from bpo_ref.chat import ChatFormat
from bpo_ref.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from bpo_ref.eval import Score, evaluate, make_env, results_table
from bpo_ref.generate import Generator, token_logps
from bpo_ref.policy import ChatPolicy, collect_demonstrations, episode_text
from bpo_ref.runlog import RunLog, batch_metrics, batch_totals
from bpo_ref.tiny import TINY_SIZES, tiny_model, tiny_tokenizer, words_of
from sandboxgym.tree import Action, Edge, Envs, Node, RolloutTree, Schedule, rollout
from sandboxgym.tree import Path as TreePath
from sandboxgym.tree_file import save_trees
from sandboxgym.tree_page import write_page

CausalLM: TypeAlias = Any  # of transformers, bare or wrapped by accelerate
Item = TypeVar("Item")


class ConfigError(ValueError):
    """The arguments contradict each other; the message names the field."""


Algo = Literal["sft", "grpo", "rloo", "rloo-turn", "rloo-key", "bpo-paper", "bpo-tree", "bpo"]
ScheduleName = Literal["none", "entropy", "entropy-online", "random", "spaced", "lowest", "root"]
Credit = Literal["paper", "sibling", "tree", "group"]
Baseline = Literal["none", "turn", "key"]


@dataclass(frozen=True)
class Args:
    """Settings of a run. Those that are None are set by ``algo`` (see ``PRESETS``)."""

    algo: Algo = "bpo"
    """The algorithm: a preset of the settings under *Tree and credit*; each can be overridden."""
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
    eval_kwargs: tuple[str, ...] = ("games=embedded:unseen",)
    """Its arguments in evaluation."""
    max_turns: int = 24
    """Step limit of an episode (the original ALFWorld's is 50, the paper's 40)."""

    # Policy
    model: str = "tiny:0.2M"
    """``tiny:SIZE`` (built in code, see ``tiny.py``), or a folder or hub name of a transformers causal model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights of a loaded model."""
    system: str | None = None
    """System prompt."""
    context: int = 768
    """Most tokens of an episode; one that does not fit is truncated."""
    max_new_tokens: int = 12
    """Most tokens of an action."""
    temperature: float = 1.0
    """Sampling temperature in training; the policy is the tempered distribution."""
    threads: int = 1
    """CPU threads a process (0: PyTorch's choice)."""

    # Supervised stage on expert episodes
    sft_steps: int = 0
    """Optimizer steps; 0 leaves the stage out."""
    sft_episodes: int = 4000
    """Expert episodes to collect; only the successful ones are used."""
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
    """Number of updates."""
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
    weight_decay: float = 0.0
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    epochs: int = 1
    """Passes over the rollouts of an update."""
    minibatches: int = 1
    """Optimizer steps a pass; each takes whole tasks."""
    micro_tokens: int = 16384
    """Most tokens of a forward and backward pass; larger batches are accumulated."""

    # Tree and credit
    width: int = 4
    """K: children of a branch node."""
    points: float = 2.0
    """M: branch points of a backbone. A fraction is drawn per task between its two neighbours."""
    roots: int | None = None
    """W: root paths a task. Default: N = 1 + M (K - 1) without forks, else as ``root_branch`` says."""
    schedule: ScheduleName | None = None
    """Where the backbone is forked. All but ``entropy-online`` and ``root`` look at its future, or its length."""
    root_branch: Literal["always", "free", "never"] | None = None
    """Whether the root is one of the M points: always, by the schedule's choice, or never."""
    spacing: int = 8
    """Least distance of two branch points in tokens of context (the paper: 64)."""
    credit: Credit | None = None
    """``paper`` (Eq. 7, 8), ``sibling`` (Eq. 7 along the whole path), ``tree`` (backed-up values), ``group`` (GRPO)."""
    baseline: Baseline | None = None
    """What replaces the siblings' mean: nothing, or the mean of other rollouts at this turn, or at this progress."""
    step_weight_power: float | None = None
    """p: a step behind f forks of width K counts K^(-p f). 1 is unbiased, 0 counts all steps of a tree alike."""
    lam: float = 0.95
    """λ of Eq. 8, in agent steps."""
    gamma: float = 1.0
    """Discount a turn."""
    invalid_penalty: float = 0.0
    """Taken off the reward of an action that the environment does not understand (0.1 is common on ALFWorld)."""
    group_std: bool = True
    """Divide ``group`` advantages by the group's standard deviation."""

    # Loss
    ratio: Literal["token", "step", "sequence"] = "token"
    """Level of the importance ratio: a token, an action, or (its geometric mean) all actions of a path."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 minus this."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 plus this."""
    kl: float = 0.0
    """β: weight of the KL divergence to the policy that reinforcement learning started from (k3 estimator)."""
    aggregation: Literal["token", "path", "constant"] = "token"
    """Mean over all tokens of all processes, mean over paths of token means, or sum over tokens / tasks."""

    # Bookkeeping
    eval_episodes: int = 256
    """Size of the fixed panel of evaluation tasks: the first of the evaluation library, one episode each."""
    eval_every: int = 10
    """Updates between evaluations."""
    eval_temperature: float = 1.0
    """Sampling temperature in evaluation."""
    save_every: int = 10
    """Updates (and 20 times as many supervised steps) between checkpoints."""


MAY_CHANGE = {"resume", "out", "threads", "updates", "eval_every", "save_every", "micro_tokens"}  # on resuming

PRESETS: dict[str, dict[str, Any]] = {
    "sft": dict(schedule="none", credit="tree", baseline="none", step_weight_power=1.0, root_branch="never"),
    "grpo": dict(schedule="none", credit="group", baseline="none", step_weight_power=1.0, root_branch="never"),
    "rloo": dict(schedule="none", credit="tree", baseline="none", step_weight_power=1.0, root_branch="never"),
    "rloo-turn": dict(schedule="none", credit="tree", baseline="turn", step_weight_power=1.0, root_branch="never"),
    "rloo-key": dict(schedule="none", credit="tree", baseline="key", step_weight_power=1.0, root_branch="never"),
    "bpo-paper": dict(schedule="entropy", credit="paper", baseline="none", step_weight_power=0.0, root_branch="free"),
    "bpo-tree": dict(
        schedule="entropy-online", credit="tree", baseline="none", step_weight_power=0.0, root_branch="always"
    ),
    "bpo": dict(schedule="entropy-online", credit="tree", baseline="key", step_weight_power=0.75, root_branch="always"),
}


def resolved(args: Args) -> Args:
    """The settings with the preset of ``algo`` filled in, checked.

    Raises:
        ConfigError: naming the field that cannot be.
    """
    preset = {name: value for name, value in PRESETS[args.algo].items() if getattr(args, name) is None}
    args = replace(args, **preset)
    forks = args.schedule != "none"
    if args.roots is None:
        n = 1 + args.points * (args.width - 1)
        if not forks and n != round(n):
            raise ConfigError(f"roots: N = 1 + points (width - 1) = {n} is not a whole number; set roots")
        args = replace(args, roots=(args.width if args.root_branch == "always" else 1) if forks else round(n))
    assert args.roots is not None
    if forks and args.width < 2:
        raise ConfigError(f"width: a branch node has at least 2 children (K >= 2), found width={args.width}")
    if forks and args.points <= 0:
        raise ConfigError(
            f"points: schedule={args.schedule} needs at least one branch point, found points={args.points}"
        )
    if forks and args.root_branch == "always" and args.points < 1:
        raise ConfigError(f"points: a root that always branches is one already, found points={args.points}")
    if forks and args.spacing >= args.context:
        raise ConfigError(f"spacing: {args.spacing} tokens between branch points exceed the context of {args.context}")
    if args.credit == "group" and (forks or args.roots < 2):
        raise ConfigError(
            f"credit: group is for two or more independent rollouts, found schedule={args.schedule}, roots={args.roots}"
        )
    if args.baseline != "none" and args.credit != "tree":
        raise ConfigError(f"baseline: {args.baseline} goes with credit=tree, found credit={args.credit}")
    if args.roots == 1 and not forks and args.baseline == "none" and args.prompts < 2:
        raise ConfigError("roots: one rollout of one task has nothing to be compared with; set roots or prompts")
    for name in ("updates", "sft_steps"):
        if getattr(args, name) < 0:
            raise ConfigError(f"{name}: expected 0 or more, found {getattr(args, name)}")
    for name in ("prompts", "roots", "max_turns", "epochs", "minibatches", "eval_episodes", "eval_every", "save_every"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name}: expected at least 1, found {getattr(args, name)}")
    for name in ("gamma", "temperature", "eval_temperature"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"{name}: expected more than 0, found {getattr(args, name)}")
    if args.minibatches > args.prompts:
        raise ConfigError(f"minibatches: {args.minibatches} of {args.prompts} prompts: each needs a whole task")
    if args.max_new_tokens >= args.context:
        raise ConfigError(f"max_new_tokens: {args.max_new_tokens} do not fit the context of {args.context}")
    return args


# ---------------------------------------------------------------------------------------------------------- schedules


class BackboneForks(Schedule):
    """Forks off the first root path, the backbone: up to M branch points, ``spacing`` tokens apart."""

    def __init__(self, args: Args, seed: Sequence[int]) -> None:
        assert args.roots is not None
        super().__init__(args.roots)
        self.args = args
        self._seed = seed
        self._root_used = args.root_branch == "always"
        self._points: dict[int, int] = {}

    def budget(self, tree: RolloutTree) -> int:
        """Branch points of this tree beside the root's own, drawn once a tree where M is a fraction."""
        if tree.index not in self._points:
            low = math.floor(self.args.points)
            stream = np.random.default_rng([*self._seed, tree.index, 0])
            self._points[tree.index] = low + int(stream.random() < self.args.points - low) - int(self._root_used)
        return self._points[tree.index]

    def eligible(self, node: Node) -> bool:
        """Whether the schedule may branch here at all."""
        return self.args.root_branch == "free" or node.depth > 0

    def apart(self, position: int, chosen: Iterable[int]) -> bool:
        """Whether a context position keeps the spacing to those chosen before."""
        return all(abs(position - other) >= self.args.spacing for other in chosen)


class PostHoc(BackboneForks):
    """Rank the steps of the finished backbone: `entropy` (the paper's top-M), `lowest`, `random`, `spaced`, `root`."""

    def watches(self, path: TreePath) -> bool:
        """The backbone."""
        return path.key == (0, 0)

    def after(self, tree: RolloutTree, path: TreePath) -> Iterable[tuple[Node, int]]:
        """The M best steps by rank that keep the spacing; ties go to the earlier step."""
        edges = [edge for edge in path.edges if self.eligible(edge.parent)]
        chosen = [path.edges[0].action.position] if self._root_used else []
        left = self.budget(tree)
        for edge in sorted(edges, key=self._rank(tree, edges)):
            if left and self.apart(edge.action.position, chosen):
                chosen.append(edge.action.position)
                left -= 1
                yield edge.parent, self.args.width - 1

    def _rank(self, tree: RolloutTree, edges: Sequence[Edge]) -> Callable[[Edge], tuple[float, int]]:
        name = self.args.schedule
        if name == "entropy":
            return lambda edge: (-edge.action.entropy, edge.parent.depth)
        if name == "lowest":
            return lambda edge: (edge.action.entropy, edge.parent.depth)
        if name == "root":
            return lambda edge: (edge.parent.depth, edge.parent.depth)
        if name == "spaced":  # the depths nearest to M equal parts of the backbone
            part = len(edges) / (self.budget(tree) + 1)
            marks = [int((i + 1) * part + 0.5) for i in range(self.budget(tree))]
            return lambda edge: (min((abs(edge.parent.depth - mark) for mark in marks), default=0.0), edge.parent.depth)
        stream = np.random.default_rng([*self._seed, tree.index, 1])
        order = {id(edge): place for edge, place in zip(edges, stream.permutation(len(edges)))}
        return lambda edge: (float(order[id(edge)]), 0)


class Online(BackboneForks):
    """Branch when the entropy exceeds a threshold fixed before the episode: causal, so siblings stay exchangeable.

    Without a threshold (the first batch) branch at evenly spaced depths of an episode of half the turn limit.
    """

    def __init__(self, args: Args, seed: Sequence[int], threshold: float | None) -> None:
        super().__init__(args, seed)
        self._threshold = threshold
        self._chosen: dict[int, list[int]] = {}

    def now(self, tree: RolloutTree, path: TreePath, node: Node, action: Action) -> int:
        """K - 1 siblings if the rule, the spacing and the budget allow."""
        if path.key != (0, 0):
            return 0
        chosen = self._chosen.setdefault(tree.index, [action.position] if self._root_used else [])
        budget = self.budget(tree)
        if not self.eligible(node) or len(chosen) - self._root_used >= budget:
            return 0
        if self._threshold is None:
            wanted = node.depth in {round((i + 1) * self.args.max_turns / 2 / (budget + 1)) for i in range(budget)}
        else:
            wanted = action.entropy > self._threshold
        if not wanted or not self.apart(action.position, chosen):
            return 0
        chosen.append(action.position)
        return self.args.width - 1


class EntropyThreshold:
    """Running quantile of the backbones' entropies in earlier batches, set to spend nearly M branch points a tree.

    High entropies come in clusters, and a tree branches at no more than its M points: so each backbone counts with
    its M highest only. All of the budget would be spent by no threshold at all, hence ``SPENT`` of it.
    """

    SPENT = 0.9

    def __init__(self, args: Args, history: Iterable[Sequence[float]] = ()) -> None:
        self._first = 0 if args.root_branch == "free" else 1  # depth from which on the schedule may choose
        self._points = args.points - (args.root_branch == "always")
        self.history: deque[list[float]] = deque((list(h) for h in history), maxlen=8 * args.prompts)

    def observe(self, backbones: Iterable[Sequence[float]]) -> None:
        """The entropies of a batch's backbones, one sequence each, by depth."""
        self.history.extend(list(b)[self._first :] for b in backbones)

    def value(self) -> float | None:
        """The threshold; None before the first batch."""
        highest = [h for backbone in self.history for h in sorted(backbone)[-math.ceil(self._points) :]]
        if not highest or not self._points:
            return None
        share = self.SPENT * self._points * len(self.history) / len(highest)
        return float(np.quantile(highest, max(0.0, 1.0 - share)))


def make_schedule(args: Args, seed: Sequence[int], threshold: float | None) -> Schedule:
    """The schedule of one batch; ``seed`` keys what it draws."""
    assert args.roots is not None
    if args.schedule == "none":
        return Schedule(args.roots)
    return Online(args, seed, threshold) if args.schedule == "entropy-online" else PostHoc(args, seed)


# ------------------------------------------------------------------------------------------------------------- credit


def back_up(tree: RolloutTree, gamma: float) -> list[Node]:
    """Set Q̂ = r + γ V̂(child) on edges and V̂ = mean of the children's Q̂ on nodes; returns the nodes, deepest first."""
    nodes = sorted([tree.root, *(edge.child for edge in tree.edges())], key=lambda node: -node.depth)
    for node in nodes:
        for edge in node.children:
            edge.value = edge.reward + gamma * edge.child.value
        node.value = sum(edge.value for edge in node.children) / len(node.children) if node.children else 0.0
    return nodes


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


def tree_credit(tree: RolloutTree, args: Args, baseline: Callable[[Edge, int], float], others: float) -> None:
    """Â = Q̂ - b with backed-up values; weights fall by K^-p at every fork.

    b is the nearest fork's leave-one-out mean, carried forward along one-edge nodes (minus the rewards since), or
    ``others`` (the mean of the other tasks' values) above the first fork; with a state baseline, that baseline.

    Args:
        tree: backed up (`back_up`).
        args: ``gamma``, ``baseline`` and ``step_weight_power`` are used.
        baseline: (edge, index of its root path) -> value, from other rollouts only.
        others: see above.
    """
    assert args.step_weight_power is not None
    todo = [(tree.root, others, 1.0, -1)]
    while todo:
        node, carried, weight, root = todo.pop()
        n = len(node.children)
        power = 1.0 if node is tree.root else args.step_weight_power
        for index, edge in enumerate(node.children):
            b = (n * node.value - edge.value) / (n - 1) if n > 1 else carried
            origin = index if node is tree.root else root
            edge.weight = weight * n**-power
            edge.advantage = edge.value - (b if args.baseline == "none" else baseline(edge, origin))
            todo.append((edge.child, (b - edge.reward) / args.gamma, edge.weight, origin))


StateKey: TypeAlias = Any
RootTable: TypeAlias = dict[
    StateKey, tuple[float, float]
]  # state key -> (share of the rollout that was there, mean value)


@dataclass(frozen=True)
class TreeSummary:
    """What other tasks' baselines need of a tree: small, so that processes can exchange it."""

    index: int
    value: float
    roots: list[RootTable]


def state_key(node: Node, kind: str) -> StateKey:
    """Where states are pooled: the turn, or the environment's progress key and half the turn."""
    return node.depth if kind == "turn" else (node.key, node.depth // 2)


def summarize(tree: RolloutTree, kind: str) -> TreeSummary:
    """Mean value of each root path's subtree at each state key, every return counted once."""
    roots: list[RootTable] = []
    for root_edge in tree.root.children:
        sums: dict[StateKey, list[float]] = {state_key(tree.root, kind): [1.0, root_edge.value]}
        todo = [(root_edge.child, 1.0)]
        while todo:
            node, share = todo.pop()
            if node.children:
                entry = sums.setdefault(state_key(node, kind), [0.0, 0.0])
                entry[0] += share
                entry[1] += share * node.value
                todo += [(edge.child, share / len(node.children)) for edge in node.children]
        roots.append({key: (min(1.0, n), total / n) for key, (n, total) in sums.items()})
    return TreeSummary(tree.index, tree.root.value, roots)


class StateBaseline:
    """Value of a state from other rollouts: the same task's other root paths, shrunk to the other tasks'.

    With n and S the number and summed value of this task's other root paths at the key, and likewise n', S' over the
    other tasks, whose mean value is v̄:  m = (S' + 2 v̄) / (n' + 2),  b = (S + 6 m) / (n + 6).
    Unbiased: nothing in it depends on the action or on what came of it.
    """

    SHRINK_TASK, SHRINK_ALL = 6.0, 2.0

    def __init__(self, summaries: Sequence[TreeSummary]) -> None:
        self._by_index = {summary.index: summary for summary in summaries}
        self._values = sum(summary.value for summary in summaries)
        self._all: dict[StateKey, list[float]] = {}
        for summary in summaries:
            for table in summary.roots:
                _accumulate(self._all, table)

    def others(self, index: int) -> float:
        """Mean value of the other tasks (0 if there are none)."""
        n = len(self._by_index) - 1
        return (self._values - self._by_index[index].value) / n if n else 0.0

    def __call__(self, index: int, root: int, key: StateKey) -> float:
        """The baseline at a state key for a step of one root path (or of forks off it) of one task."""
        task: dict[StateKey, list[float]] = {}
        for table in self._by_index[index].roots:
            _accumulate(task, {key: table[key]} if key in table else {})
        n_task, s_task = task.get(key, (0.0, 0.0))
        n_all, s_all = self._all.get(key, (0.0, 0.0))
        n_own, mean_own = self._by_index[index].roots[root].get(key, (0.0, 0.0))
        shared = (s_all - s_task + self.SHRINK_ALL * self.others(index)) / (n_all - n_task + self.SHRINK_ALL)
        return (s_task - n_own * mean_own + self.SHRINK_TASK * shared) / (n_task - n_own + self.SHRINK_TASK)


def _accumulate(sums: dict[StateKey, list[float]], table: RootTable) -> None:
    for key, (n, mean) in table.items():
        entry = sums.setdefault(key, [0.0, 0.0])
        entry[0] += n
        entry[1] += n * mean


def assign_credit(
    trees: Sequence[RolloutTree], args: Args, gather: Callable[[list[TreeSummary]], list[TreeSummary]] = list
) -> None:
    """Set every edge's advantage and weight.

    Args:
        trees: this process's share of the batch.
        args: resolved.
        gather: collects the summaries of all processes.
    """
    assert args.baseline is not None
    for tree in trees:
        back_up(tree, args.gamma)
    baseline = StateBaseline(gather([summarize(tree, args.baseline) for tree in trees]))
    for tree in trees:
        if args.credit == "tree":

            def at(edge: Edge, root: int, index: int = tree.index) -> float:
                return baseline(index, root, state_key(edge.parent, str(args.baseline)))

            tree_credit(tree, args, at, baseline.others(tree.index))
        elif args.credit == "group":
            group_credit(tree, args)
        else:
            (paper_credit if args.credit == "paper" else sibling_credit)(tree, args)


# --------------------------------------------------------------------------------------------------------------- loss


@dataclass
class Row:
    """One path as the trainer sees it: the ids of the whole episode, and the actions sampled on this path."""

    ids: list[int]
    edges: list[Edge]

    @property
    def mass(self) -> float:
        """Σ weight x tokens of its actions."""
        return sum(edge.weight * edge.action.tokens for edge in self.edges)


@dataclass
class Batch:
    """Rows padded on the right. T is the longest; position t of the [B, T-1] tensors belongs to token t + 1."""

    ids: Tensor  # [B, T]
    lengths: Tensor  # [B]
    step: Tensor  # [B, T-1] number of the action in the batch that the token belongs to, -1 where it was not sampled
    advantage: Tensor  # [B, T-1]
    weight: Tensor  # [B, T-1]
    old_logps: Tensor  # [B, T-1] as sampled

    @property
    def mask(self) -> Tensor:
        """[B, T-1]: exactly the sampled tokens."""
        return self.step >= 0


def rows_of(trees: Iterable[RolloutTree]) -> list[Row]:
    """A row a path; the prefix a path was forked from is context, so every action is trained on once."""
    return [Row(path.edges[-1].action.memory.ids(), path.edges) for tree in trees for path in tree.paths]


def collate(rows: Sequence[Row], device: torch.device | str) -> Batch:
    """Rows as tensors."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    step = torch.full((len(rows), longest - 1), -1)
    advantage, weight, old = (torch.zeros(len(rows), longest - 1) for _ in range(3))
    number = 0
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        for edge in row.edges:
            span = slice(edge.action.position - 1, edge.action.position - 1 + edge.action.tokens)
            step[i, span], advantage[i, span], weight[i, span] = number, edge.advantage, edge.weight
            old[i, span] = torch.tensor(edge.action.data.logps)
            number += 1
    lengths = torch.tensor([len(row.ids) for row in rows])
    return Batch(*(tensor.to(device) for tensor in (ids, lengths, step, advantage, weight, old)))


def policy_loss(
    logps: Tensor, batch: Batch, args: Args, reference: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of every token, unweighted, [B, T-1], 0 where it was not sampled; and sums for the log.

    Clipped surrogate (Schulman et al., 2017) with separate bounds, plus ``kl`` times the k3 estimate
    exp(q - p) - (q - p) - 1 of the divergence from the reference, with p and q the two log-probabilities.

    Args:
        logps: log-probabilities under the current policy, [B, T-1].
        batch: what was sampled.
        args: ``ratio``, ``clip_low``, ``clip_high`` and ``kl`` are used.
        reference: log-probabilities under the reference policy, [B, T-1].
    """
    mask = batch.mask
    change = (logps - batch.old_logps).masked_fill(~mask, 0.0)
    if args.ratio == "token":
        ratio, share = change.exp(), mask.to(change)
    else:  # an action counts once, its term spread evenly over its tokens; a row's ratio is that of every token in it
        rows = torch.arange(len(change), device=change.device)[:, None].expand_as(change)
        group = (batch.step if args.ratio == "step" else rows)[mask]
        sums = change.new_zeros(int(group.max()) + 1).index_add(0, group, change[mask])
        sizes = change.new_zeros(len(sums)).index_add(0, group, torch.ones_like(change[mask]))
        level = sums if args.ratio == "step" else sums / sizes
        ratio = torch.ones_like(change).masked_scatter(mask, level.exp()[group])
        share = torch.zeros_like(change)
        share = share.masked_scatter(mask, 1.0 / sizes[group]) if args.ratio == "step" else mask.to(change)
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    loss = -torch.minimum(ratio * batch.advantage, clipped * batch.advantage) * share
    stats = {
        "ratio": (ratio.detach() * mask).sum(),
        "clipped": ((clipped != ratio) & mask).sum().float(),
        "approx_kl": (((-change).exp() - 1 + change).detach() * mask).sum(),
        "tokens": mask.sum().float(),
    }
    if reference is not None:
        apart = (reference - logps).masked_fill(~mask, 0.0)
        divergence = apart.exp() - apart - 1
        loss = loss + args.kl * divergence
        stats["kl"] = (divergence.detach() * mask).sum()
    return loss, stats


def aggregate(loss: Tensor, batch: Batch, rows: Sequence[Row], denominator: float, args: Args) -> Tensor:
    """Σ weight x loss over the tokens, by the whole (minibatch's) denominator; see ``aggregation``."""
    per_row = (loss * batch.weight).sum(dim=1)  # [B]
    if args.aggregation == "path":
        per_row = per_row / per_row.new_tensor([row.mass for row in rows])
    return per_row.sum() / denominator


def denominator_of(rows: Sequence[Row], trees: int, args: Args) -> float:
    """What these rows add to the denominator of `aggregate`."""
    parts = {"token": sum(row.mass for row in rows), "path": float(len(rows)), "constant": float(trees)}
    return parts[args.aggregation]


def micro_batches(rows: Sequence[Row], args: Args) -> list[list[Row]]:
    """Rows in batches of at most ``micro_tokens`` padded tokens.

    Rows without any advantage are left out where they cannot matter; one stays, for data parallel processes must
    all take part in the reduction of the gradients.
    """
    moving = [row for row in rows if args.kl or any(edge.advantage for edge in row.edges)] or list(rows[:1])
    return by_length(moving, lambda row: len(row.ids), args.micro_tokens)


def by_length(items: Iterable[Item], length: Callable[[Item], int], most: int) -> list[list[Item]]:
    """Items of like length together, so that little is padded: at most ``most`` padded tokens a batch, or one item."""
    batches: list[list[Item]] = []
    for item in sorted(items, key=length, reverse=True):
        if batches and (len(batches[-1]) + 1) * length(batches[-1][0]) <= most:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


# --------------------------------------------------------------------------------------------------------------- loop


class Trainer:
    """One run: the supervised stage, then reinforcement learning; everything random is keyed by (seed, step)."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        self._check_processes()
        if args.threads and self.accelerator.device.type == "cpu":
            torch.set_num_threads(args.threads)
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.envs = Envs(lambda: make_env(args.env_id, args.env_kwargs, args.max_turns))
        self.eval_envs = Envs(lambda: make_env(args.env_id, args.eval_kwargs, args.max_turns))
        for name, envs in (("env_kwargs", self.envs), ("eval_kwargs", self.eval_envs)):
            try:
                envs.give(envs.take())
            except (OSError, ValueError, TypeError, gym.error.Error) as error:
                raise ConfigError(f"{name}: cannot make {args.env_id}: {error}") from error
        self.threshold = EntropyThreshold(args)
        self.counters = {"returns": 0, "env_steps": 0, "tokens": 0, "seconds": 0.0}
        self.scores: dict[str, Score] = {}
        self.stage, self.step = ("sft" if args.sft_steps and not args.init_from else "rl"), 0
        self._interrupted = False

        saved = self._saved()
        self.demonstrations = self._load_demonstrations()
        model, self.tokenizer = self._build(saved)
        self.chat = ChatFormat(self.tokenizer, system=args.system)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=args.betas, weight_decay=args.weight_decay)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.stage, self.step, self.counters = saved["stage"], saved["step"], saved["counters"]
            self.threshold = EntropyThreshold(args, saved["entropies"])
            self.scores = {name: Score(**score) for name, score in saved["scores"].items()}
        self.reference = self._build_reference() if args.kl and self.stage == "rl" else None
        self.log = RunLog(self.out, self._done(), enabled=self.accelerator.is_main_process)

    # What a run is.

    def run(self) -> dict[str, Score]:
        """Train to the end; returns the scores by stage."""
        args = self.args
        signal.signal(signal.SIGTERM, self._interrupt)
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            if not self._done():
                self._evaluate("untrained" if not args.init_from else "start")
            if self.stage == "sft":
                self._supervised()
                self._evaluate("sft")
                self._enter_rl()
            if args.algo != "sft":
                self._reinforce()
            if self.accelerator.is_main_process:
                self._report()
        except _Stopped:
            self.accelerator.print(f"stopped at {self.stage} step {self.step}; go on with --resume")
        finally:
            self.envs.close()
            self.eval_envs.close()
            self.log.close()
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
            self.log.scalars({"sft/loss": loss, "sft/grad_norm": self.grad_norm}, self._done())
            bar.set_postfix(loss=f"{smooth:.3f}")
            bar.update()
            self._maybe_save(20 * args.save_every)
        bar.close()

    def _supervised_step(self, episodes: Sequence[tuple[list[int], list[float]]]) -> float:
        """One optimizer step; returns the weighted mean loss of a token."""
        total = self._sum(sum(sum(weights) for _, weights in episodes))
        losses: list[float] = []

        def backward(part: Sequence[tuple[list[int], list[float]]]) -> None:
            ids, weights = (pad_sequence([torch.tensor(row[i]) for row in part], batch_first=True) for i in (0, 1))
            lengths = torch.tensor([len(row) for row, _ in part])
            device = self.accelerator.device
            logps, _ = token_logps(self.model, ids.to(device), lengths.to(device))
            loss = -(logps * weights[:, 1:].to(device)).sum() / total
            self.accelerator.backward(loss * self.accelerator.num_processes)
            losses.append(float(loss.detach()))

        self._accumulate(by_length(episodes, lambda row: len(row[0]), self.args.micro_tokens), backward)
        self._optimizer_step()
        return self._sum(sum(losses))

    def _reinforce(self) -> None:
        """Rollouts, credit, loss; an evaluation every ``eval_every`` updates."""
        args = self.args
        bar = self._bar(args.algo, args.updates)
        for update in range(self.step, args.updates):
            began = time.perf_counter()
            seed = (args.seed, 2, update)
            self._set_lr(args.lr * learning_rate_factor(update, args))
            trees = self._rollouts(seed)
            sampled = time.perf_counter()
            assign_credit(trees, args, self._gather)
            metrics = self._optimize(trees)
            self.step = update + 1
            finished = time.perf_counter()
            metrics |= self._count(trees, finished - began)
            metrics |= {"time/rollout": sampled - began, "time/update": finished - sampled}
            self.log.scalars(metrics, self._done())
            bar.set_postfix(
                success=f"{metrics['rollout/success']:.2f}",
                entropy=f"{metrics['rollout/entropy']:.2f}",
                tokens=f"{self.counters['tokens'] / 1e3:.0f}k",
            )
            bar.update()
            if self.step % args.eval_every == 0 or self.step == args.updates:
                score = self._evaluate(f"{args.algo}@{self.step}")
                bar.set_description(f"{args.algo} eval {score.rate:.2f}")
                self._write_samples(trees)
            self._maybe_save(args.save_every)
        bar.close()

    def _rollouts(self, seed: Sequence[int]) -> list[RolloutTree]:
        """Trees of the update's tasks, every N-th on each of N processes: the same tasks whatever N is."""
        args = self.args
        env = self.envs.take()
        tasks = draw_tasks(env, args.prompts, seed)
        self.envs.give(env)
        indices = range(self.accelerator.process_index, args.prompts, self.accelerator.num_processes)
        threshold = self.threshold.value() if args.schedule == "entropy-online" else None
        schedule = make_schedule(args, seed, threshold)
        policy = ChatPolicy(self._generator(args.temperature), self.chat)
        trees = rollout(self.envs, policy, schedule, tasks=[tasks[i] for i in indices], seed=seed, indices=indices)
        for tree in trees:
            for edge in tree.edges():
                edge.reward -= args.invalid_penalty * (not edge.valid)
        backbones = [(t.index, [e.action.entropy for e in t.paths[0].edges]) for t in trees]
        self.threshold.observe(entropies for _, entropies in sorted(self._gather(backbones)))
        return trees

    def _optimize(self, trees: Sequence[RolloutTree]) -> dict[str, float]:
        """``epochs`` passes of ``minibatches`` optimizer steps over the trees."""
        args = self.args
        sums: dict[str, float] = {}
        norms: list[float] = []
        for _ in range(args.epochs):
            for part in range(args.minibatches):
                chosen = [tree for tree in trees if tree.index * args.minibatches // args.prompts == part]
                rows = rows_of(chosen)
                denominator = self._sum(denominator_of(rows, len(chosen), args))

                def backward(micro: Sequence[Row], denominator: float = denominator) -> None:
                    for name, value in self._backward(micro, denominator).items():
                        sums[name] = sums.get(name, 0.0) + value

                self._accumulate(micro_batches(rows, args), backward)
                self._optimizer_step()
                norms.append(self.grad_norm)
        sums = {name: self._sum(value) for name, value in sums.items()}
        tokens = max(sums.pop("tokens"), 1.0)
        metrics = {f"update/{name}": value / tokens for name, value in sums.items() if name != "loss"}
        return {**metrics, "update/loss": sums["loss"], "update/grad_norm": float(np.mean(norms))}

    def _backward(self, rows: Sequence[Row], denominator: float) -> dict[str, float]:
        args = self.args
        batch = collate(rows, self.accelerator.device)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = token_logps(self.reference, batch.ids, batch.lengths, temperature=args.temperature)
        logps, _ = token_logps(self.model, batch.ids, batch.lengths, temperature=args.temperature)
        losses, stats = policy_loss(logps, batch, args, reference)
        loss = aggregate(losses, batch, rows, denominator, args)
        self.accelerator.backward(loss * self.accelerator.num_processes)  # the reduction takes the mean of processes
        return {"loss": float(loss.detach()), **{name: float(value) for name, value in stats.items()}}

    # Evaluation and reports.

    def _evaluate(self, name: str) -> Score:
        args = self.args
        policy = ChatPolicy(self._generator(args.eval_temperature), self.chat)
        score = evaluate(
            policy,
            self.eval_envs,
            args.eval_episodes,
            seed=(args.seed, 3),
            part=(self.accelerator.process_index, self.accelerator.num_processes),
            gather=self._gather,
        )
        self.scores[name] = score
        self.log.scalars({"eval/success": score.rate, "eval/turns": score.turns}, self._done())
        self.log.point({"step": self._done(), "name": name, **self.counters, "success": score.rate, "n": score.n})
        return score

    def _report(self) -> None:
        from bpo_ref.plots import learning_curve

        args = self.args
        rows = {"untrained": "untrained", "start": "start", "sft": "after SFT"}
        rows[f"{args.algo}@{self.step}"] = f"after {args.algo}"
        table = results_table({row: self.scores[name] for name, row in rows.items() if name in self.scores})
        totals = ", ".join(f"{value:,.0f} {name.replace('_', ' ')}" for name, value in self.counters.items())
        games = " ".join(args.eval_kwargs)
        text = f"{args.env_id} {games}, {args.eval_episodes} episodes\n\n{table}\n\nSpent by {args.algo}: {totals}"
        (self.out / "results.md").write_text(text + "\n")
        scores = {name: asdict(score) for name, score in self.scores.items()}
        processes = self.accelerator.num_processes
        results = {"args": asdict(args), "processes": processes, "counters": self.counters, "scores": scores}
        (self.out / "results.json").write_text(json.dumps(results, indent=1))
        learning_curve([self.out], self.out / "learning_curve.png")
        made = "learning_curve.png, results.md, samples.txt, trees.html, checkpoint/, tensorboard/"
        print(f"\n{text}\n\nIn {self.out}: {made}")

    def _write_samples(self, trees: Sequence[RolloutTree]) -> None:
        if self.accelerator.is_main_process:
            picked = [path for tree in trees[:4] for path in tree.paths[:1]]
            text = "\n\n".join(episode_text(path) for path in picked)
            (self.out / "samples.txt").write_text(f"Episodes sampled at update {self.step}\n\n{text}\n")
            save_trees(trees[:8], self.out / "trees.json")
            write_page(trees[:8], self.out / "trees.html", title=f"{self.args.algo}, update {self.step}")

    def _count(self, trees: Sequence[RolloutTree], seconds: float) -> dict[str, float]:
        """Add the batch to the run's counters; returns what to log of it, over all processes."""
        total = batch_totals(trees, self._gather)
        for name in ("returns", "env_steps", "tokens"):
            self.counters[name] += int(total[name])
        self.counters["seconds"] += seconds
        return batch_metrics(total) | {f"total/{name}": float(value) for name, value in self.counters.items()}

    # State of the run.

    def _enter_rl(self) -> None:
        self.stage, self.step = "rl", 0
        fresh = torch.optim.AdamW(
            self.accelerator.unwrap_model(self.model).parameters(),
            lr=self.args.lr,
            betas=self.args.betas,
            weight_decay=self.args.weight_decay,
        )
        self.optimizer = self.accelerator.prepare(fresh)
        self._save(self.out / "sft")
        self._save(self.out / "checkpoint")
        self.reference = self._build_reference() if self.args.kl else None

    def _saved(self) -> dict[str, Any] | None:
        checkpoint = self.out / "checkpoint"
        if not self.args.resume:
            return None
        saved = load_checkpoint(checkpoint)
        for name, mine in json.loads(json.dumps(asdict(self.args))).items():
            theirs = saved["args"].get(name)
            if mine != theirs and name not in MAY_CHANGE:
                raise CheckpointError(f"{checkpoint}: was made with {name}={theirs!r}, now it is {mine!r}")
        return saved

    def _maybe_save(self, every: int) -> None:
        stop = self._any_interrupted()
        if stop or self.step % every == 0 or (self.stage == "rl" and self.step == self.args.updates):
            self._save(self.out / "checkpoint")
        if stop:
            raise _Stopped

    def _save(self, folder: Path) -> None:
        if self.accelerator.is_main_process:
            state = {
                "args": json.loads(json.dumps(asdict(self.args))),
                "stage": self.stage,
                "step": self.step,
                "counters": self.counters,
                "entropies": list(self.threshold.history),
                "scores": {name: asdict(score) for name, score in self.scores.items()},
                "optimizer": self.optimizer.state_dict(),
            }
            save_checkpoint(folder, self.accelerator.unwrap_model(self.model), self.tokenizer, state)
        self.accelerator.wait_for_everyone()

    def _interrupt(self, *_: object) -> None:
        if self._interrupted:
            raise KeyboardInterrupt  # the second time, at once
        self._interrupted = True

    def _any_interrupted(self) -> bool:
        return self._sum(float(self._interrupted)) > 0 if self.accelerator.num_processes > 1 else self._interrupted

    def _done(self) -> int:
        """Steps since the start, over both stages: the x axis of the logs."""
        return self.step if self.stage == "sft" or self.args.init_from else self.args.sft_steps + self.step

    # Small parts.

    def _build(self, saved: dict[str, Any] | None) -> tuple[CausalLM, PreTrainedTokenizerBase]:
        args = self.args
        folder = self.out / "checkpoint" if saved is not None else args.init_from
        if folder is None and args.model.startswith("tiny:"):
            size = args.model.removeprefix("tiny:")
            if size not in TINY_SIZES:
                raise ConfigError(f"model: expected tiny: with one of {', '.join(TINY_SIZES)}, found {args.model}")
            texts = (text for d in self.demonstrations for text in d["observations"] + d["actions"])
            tokenizer = tiny_tokenizer(words_of(texts))
            model = tiny_model(tokenizer, **TINY_SIZES[size], max_position_embeddings=args.context, seed=args.seed)
            return model, tokenizer
        return load_policy(folder or args.model, dtype=args.dtype)

    def _build_reference(self) -> CausalLM:
        """The policy that reinforcement learning started from, frozen."""
        warm = self.args.sft_steps and not self.args.init_from
        model, _ = load_policy(self.out / "sft", dtype=self.args.dtype) if warm else self._build(None)
        return model.to(self.accelerator.device).eval().requires_grad_(False)

    def _load_demonstrations(self) -> list[dict[str, Any]]:
        """Expert episodes, collected once and kept in ``out``: they warm the policy up and give its vocabulary."""
        args = self.args
        if not (args.sft_steps or args.model.startswith("tiny:")) or args.init_from:
            return []
        path = self.out / "demonstrations.jsonl"
        if self.accelerator.is_main_process and not (args.resume and path.exists()):
            with tqdm(total=args.sft_episodes, desc="expert episodes") as bar:
                episodes = collect_demonstrations(
                    self.envs, args.sft_episodes, noise=args.sft_noise, seed=args.seed, progress=bar.update
                )
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
            temporary.replace(path)
        self.accelerator.wait_for_everyone()
        return [json.loads(line) for line in path.read_text().splitlines()]

    def _generator(self, temperature: float) -> Generator:
        return Generator(
            self.accelerator.unwrap_model(self.model),
            stop_ids=self.chat.stop_ids,
            max_new_tokens=self.args.max_new_tokens,
            temperature=temperature,
            context_limit=self.args.context,
        )

    def _accumulate(self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None]) -> None:
        """Backward passes whose gradients are reduced over the processes once, in the last."""
        for batch in batches[:-1]:
            with self.accelerator.no_sync(self.model):
                backward(batch)
        backward(batches[-1])

    def _optimizer_step(self) -> None:
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.grad_norm = float(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _sum(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.reduce(tensor, reduction="sum"))

    def _gather(self, local: list[Any]) -> list[Any]:
        return gather_object(local) if self.accelerator.num_processes > 1 else local

    def _bar(self, description: str, total: int) -> Any:
        return tqdm(desc=description, total=total, initial=self.step, disable=not self.accelerator.is_main_process)

    def _check_processes(self) -> None:
        """A launcher that meant several processes but started one would train on a part of the batch."""
        wanted = int(os.environ.get("WORLD_SIZE", "1"))
        if wanted != self.accelerator.num_processes:
            raise ConfigError(
                f"the launcher wanted {wanted} processes, accelerate runs {self.accelerator.num_processes}"
            )
        if self.args.prompts % (self.args.minibatches * wanted):
            raise ConfigError(
                f"prompts: {self.args.prompts} cannot be split evenly into {self.args.minibatches} minibatches "
                f"for {wanted} processes"
            )
        if self.args.sft_batch < wanted:
            raise ConfigError(f"sft_batch: {self.args.sft_batch} episodes for {wanted} processes")


class _Stopped(Exception):
    """Interrupted, with the state saved."""


def draw_tasks(env: gym.Env[Any, Any], count: int, seed: Sequence[int]) -> list[Any]:
    """Tasks of a batch, without replacement where there are enough; None where the environment draws its own."""
    available = getattr(env.unwrapped, "num_tasks", None)
    if available is None:
        return [None] * count
    rng = np.random.default_rng([*seed, 7])
    return [int(i) for i in rng.choice(available, count, replace=available < count)]


def learning_rate_factor(update: int, args: Args) -> float:
    """Warm-up, then constant, linear or cosine."""
    if update < args.warmup:
        return (update + 1) / args.warmup
    rest = (update - args.warmup) / max(1, args.updates - args.warmup)
    return {"constant": 1.0, "linear": 1.0 - rest, "cosine": 0.5 * (1 + math.cos(math.pi * rest))}[args.lr_decay]


def load_policy(folder: str | Path, *, dtype: str = "float32") -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """A transformers causal model and its tokenizer, from a folder or the hub."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)), tokenizer
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot load {folder} as a transformers causal model: {error}") from error


def parse_args(argv: Sequence[str] | None = None) -> Args:
    """Defaults, then the YAML file of ``--config``, then the command line.

    Raises:
        ConfigError: a file that cannot be read, or a field in it that does not exist; the message names both.
    """
    given = sys.argv[1:] if argv is None else argv
    argv = [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    values: dict[str, Any] = {}
    if "--config" in argv:
        at = argv.index("--config")
        if at + 1 == len(argv):
            raise ConfigError("--config: expected a YAML file")
        values = read_config(Path(argv[at + 1]))
        del argv[at : at + 2]
    return tyro.cli(Args, default=Args(**values), args=argv, config=(tyro.conf.FlagConversionOff,))


def read_config(path: Path) -> dict[str, Any]:
    """Fields of `Args` from a YAML file; environment arguments may be written as a mapping."""
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines of the form name: value, found {values!r:.80}")
    known = get_type_hints(Args)
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{path}: there is no setting {name!r}; see --help for those that are")
        if name.endswith("_kwargs") and isinstance(value, dict):
            values[name] = tuple(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in value.items())
        elif isinstance(value, list):
            values[name] = tuple(value)
        if not _fits(values[name], known[name]):
            expected = "a number (5e-4 is text in YAML, 5.0e-4 a number)" if known[name] is float else known[name]
            raise ConfigError(f"{path}: {name}: expected {expected}, found {value!r}")
    return values


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a field of `Args`."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return value in options
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        wanted = options[:1] * len(value) if options[-1] is ... else options
        return len(value) == len(wanted) and all(map(_fits, value, wanted))
    if options:
        return any(_fits(value, option) for option in options)
    return type(value) is hint or (hint is float and type(value) is int)


def main(argv: Sequence[str] | None = None) -> dict[str, Score]:
    """Parse, check, train."""
    try:
        return Trainer(resolved(parse_args(argv))).run()
    except (ConfigError, CheckpointError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
