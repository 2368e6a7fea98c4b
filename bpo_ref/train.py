"""Branching Policy Optimization and its baselines, read from top to bottom: credit, loss, loop.

    accelerate launch bpo_ref/train.py --config bpo_ref/configs/alfworld-tiny.yaml --algo bpo --seed 1

Every algorithm is a setting of one rollout tree (`sandboxgym.tree`): where it forks (the schedule), what an action is
credited with (credit and baseline), how much a step counts (its weight). The rest, from sampling to logging, is shared.

Other modules: the settings (`args.py`) and their checks (`running/setting_checks.py`), the algorithms as settings
(`presets.py`), where trees fork (`schedules.py`), baselines from other rollouts (`baselines.py`), SFT
(`supervised.py`), the state of a run (`session.py`), scores (`eval.py`) and reports (`run_log.py`). Packages:
`sampling/` from chats to sampled turns, here or on servers, `learning/` the network, its initial weights and its
batches, `distributed/` weights on many GPUs, `experiments/` measured.
"""

from __future__ import annotations

import gc

from bpo_ref.args import Args, command_line

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds: help and wrong settings need none of it
    ARGS = command_line()
    gc.disable()  # until all is imported, which takes a sixth less time without: nothing of it is garbage

import math
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import sandboxgym  # noqa: F401 - registers the environments
from bpo_ref.baselines import (
    ForkSample,
    Gather,
    Memory,
    StateBaseline,
    by_network,
    fair_mean,
    fair_value,
    independent,
    mean_value,
    state_key,
    summarize,
)
from bpo_ref.eval import Score
from bpo_ref.experiments.value_oracle import value_scores
from bpo_ref.learning.batch import Batch, Critique, PathRow, collate, micro_batches, rows_of
from bpo_ref.learning.models import CausalLM
from bpo_ref.learning.rescore import mismatch_metrics, rescore
from bpo_ref.lookahead import LookAhead, scored
from bpo_ref.run_log import batch_metrics, batch_totals, rollout_costs, success_of, write_samples
from bpo_ref.running.ahead import Ahead, Sampled
from bpo_ref.running.exits import exits_for_errors
from bpo_ref.running.run_progress import learning_rate_factor, position
from bpo_ref.sampling.driver import by_itself, roll_out
from bpo_ref.sampling.env_source import ask
from bpo_ref.sampling.generate import forward
from bpo_ref.sampling.masks import end_counts, without_masked
from bpo_ref.sampling.selection import differing, draw_tasks, leave_out, shuffled_parts
from bpo_ref.schedules import make_schedule
from bpo_ref.session import Interrupted, TrainingSession
from bpo_ref.supervised import supervised
from sandboxgym.tree import Clock, Edge, Failure, Node, RolloutTree

# ------------------------------------------------------------------------------------------------------------- credit


def back_up(tree: RolloutTree, gamma: float, guess: Callable[[Node], float] = lambda node: 0.0) -> None:
    """Set Q̂ = r + γ V̂(child) on edges and V̂ = mean of the children's Q̂ on nodes.

    Also set the part Λ of each value that is luck (`lookahead`): on an edge, that of the decisions after its action,
    γ Λ(child); on a node, that of the decisions from there on, the mean of the children's Λ + δ.

    Where roulette was played with survival q, the backed-up value is ``guess`` + [survived] (V̂ - ``guess``) / q. Its
    expectation is the same for every guess that does not depend on the outcome of the roulette.
    """
    for node in sorted([tree.root, *(edge.child for edge in tree.edges())], key=lambda node: -node.depth):
        for edge in node.children:
            edge.value = edge.reward + gamma * edge.child.value
            edge.luck = gamma * edge.child.luck
        node.value = mean_value(node) if node.children else 0.0
        node.luck = node.value - fair_mean(node) if node.children else 0.0
        if node.survival < 1.0:
            low = guess(node)
            node.value = low if node.stopped else low + (node.value - low) / node.survival
            node.luck = 0.0 if node.stopped else node.luck / node.survival


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
    """The paper's credit: Eq. 7 at branch steps, Eq. 8 (λ-weighted sum of later ones) before, 0 after the last."""
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


def relative(returns: Sequence[float], args: Args) -> NDArray[np.float64]:
    """(G - mean) / std over a group, or G - mean without ``group_std``; 0 if all returns are equal or there is one."""
    values = np.array(returns)
    apart: NDArray[np.float64] = values - values.mean()
    return apart / (values.std() + 1e-4) if args.group_std else apart


def group_credit(tree: RolloutTree, args: Args) -> None:
    """GRPO: (R - mean) / std over the group of independent rollouts."""
    returns = [edge.value for edge in tree.root.children]
    for path, value in zip(tree.paths, relative(returns, args)):
        for edge in path.edges:
            edge.advantage, edge.weight = float(value), 1.0 / len(returns)


def gigpo_credit(tree: RolloutTree, args: Args) -> None:
    """GiGPO ("Group-in-Group Policy Optimization", Feng et al., 2025, arXiv 2505.10978): A = A_E + ω A_S.

    A_E is GRPO's advantage of the episode's return among the task's rollouts. A_S is the advantage of the discounted
    return from the step on, R_t = Σ_{k ≥ t} γ^(k-t) r_k, in the step's group: all steps of the task's rollouts,
    including other steps of the same rollout, taken in the same *anchor state*, identified by ``info["state_hash"]``.
    F_norm, the divisor of both, is the group's standard deviation or 1 (``group_std``). A state met once has A_S = 0.
    """
    group_credit(tree, args)
    returns = path_returns(tree, args.omega_gamma)
    anchored: dict[Any, list[Edge]] = {}
    for edge in tree.edges():
        anchored.setdefault(edge.parent.state_hash or id(edge), []).append(edge)  # an unknown state equals no other
    for edges in anchored.values():
        for edge, value in zip(edges, relative([returns[id(edge)] for edge in edges], args)):
            edge.advantage += args.omega * float(value)


def mc_credit(tree: RolloutTree, args: Args) -> None:
    """VinePPO: Σ γ^i r_i + γ^n V̂(next) - V̂(last) between one valued state and the next, for every step between.

    V̂ is the mean return of the rollouts started there to estimate it, which have weight 0; a root without any uses the
    leave-one-out mean of the other independent rollouts.
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
            reward, gamma = edge.reward, args.gamma  # of the last token; between tokens nothing is discounted
            for value in reversed(data.values):
                advantage = reward + gamma * following - value + gamma * lam * advantage
                data.advantages.insert(0, advantage)
                following, reward, gamma = value, 0.0, 1.0
            data.targets = [a + v for a, v in zip(data.advantages, data.values)]
            edge.advantage = float(np.mean(data.advantages))


Parent = Callable[[Edge, int, float], float]
"""(edge, index of its independent rollout, mean of the other ones less the rewards since) -> value of the state."""


def tree_credit(
    tree: RolloutTree, args: Args, parent: Parent, share: Callable[[int], float], prior: tuple[float, float]
) -> list[ForkSample]:
    """Â = Q̂ - b with backed-up values; forks multiply weights by K^-p, survived roulette by 1/q, actions by `ratio`.

    b = a S + (1 - a) ``parent`` at and below a fork, with S the leave-one-out mean of the nearest fork's children,
    carried forward along one-edge nodes (minus the rewards since); ``parent`` above the first fork and behind roulette.
    With look-ahead the luck of later decisions is subtracted from Q̂. In S and in the mean of the other independent
    rollouts, the luck of each action's own decision is subtracted as well (`fair_value`).

    Args:
        tree: a tree that `back_up` has processed.
        args: ``gamma`` and ``step_weight_power`` are used.
        parent: baseline computed from other rollouts only.
        share: a, as a function of a fork's number of children.
        prior: number and mean of the pseudo-observations that shrink the mean of the other independent rollouts.

    Returns:
        One sample per fork, for `Shrinkage`.
    """
    assert args.step_weight_power is not None
    samples = []
    count, overall = prior
    # a node, S of the nearest fork, mean of the other independent rollouts, a, the weight, index of the rollout
    todo: list[tuple[Node, float, float, float, float, int]] = [(tree.root, 0.0, 0.0, 0.0, 1.0, -1)]
    while todo:
        node, siblings, roots, a, weight, root = todo.pop()
        n, at_root, mean = len(node.children), node is tree.root, fair_mean(node)
        if node.survival < 1.0:
            a, weight = 0.0, weight / node.survival
        if n > 1 and not at_root:
            a = share(n)
            within = sum((fair_value(edge) - mean) ** 2 for edge in node.children) / (n - 1)
            samples.append(ForkSample(tree.index, n, within, mean - parent(node.children[0], root, roots)))
        for index, edge in enumerate(node.children):
            rest = n * mean - fair_value(edge)
            near = rest / (n - 1) if n > 1 else siblings
            around = (rest + count * overall) / (n - 1 + count) if at_root else roots
            origin = index if at_root else root
            b = near if a == 1.0 else a * near + (1.0 - a) * parent(edge, origin, around)
            edge.weight = weight * edge.ratio * n ** -(1.0 if at_root else args.step_weight_power)
            edge.advantage = edge.value - edge.luck - b
            if edge.child.children:
                near, around = (near - edge.reward) / args.gamma, (around - edge.reward) / args.gamma
                todo.append((edge.child, near, around, a, edge.weight, origin))
    return samples


def assign_credit(trees: Sequence[RolloutTree], args: Args, memory: Memory, gather: Gather = list) -> list[ForkSample]:
    """Set every edge's advantage and weight.

    Args:
        trees: this process's share of the batch.
        args: resolved settings.
        memory: statistics of earlier batches.
        gather: collects the lists of all processes.

    Returns:
        The forks of these trees, for `Memory.observe`.
    """
    table, forks = memory.values, []
    pooled_by = "turn" if args.baseline == "turn" else "refusals" if args.refusals else "key"
    states = memory.refused if args.refusals else table
    network = memory.network if args.network in ("baseline", "both") else None
    learned = by_network(network, trees) if network else {}
    for tree in trees:

        def known(node: Node, kind: str = tree.kind) -> float:
            return table.value(state_key(node, "key"), kind)

        back_up(tree, args.gamma, known)
    means = dict(sorted(gather([(tree.index, tree.root.value - tree.root.luck) for tree in trees])))
    pools = args.baseline in ("turn", "key", "pooled")
    less: Callable[[Node], float] = (lambda node: learned[id(node)]) if network else (lambda node: 0.0)
    summaries = gather([summarize(tree, pooled_by, fair=True, known=less) for tree in trees]) if pools else []
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
                value = learned[id(edge.parent)] if network else states.value(key, tree.kind, prior=others)
                if args.baseline == "value":
                    return 0.9 * value + 0.1 * roots
                # with a network the others contribute their returns above its predictions for their states
                return value + batch(tree.index, root, key, 0.0) if network else batch(tree.index, root, key, value)
            return float(edge.data.values[0]) if args.baseline == "critic" else roots

        if args.credit == "tree":
            alone = len(tree.root.children) == 1
            prior = (2.0, table.mean if table.known else others) if args.baseline == "value" else (float(alone), others)
            forks += tree_credit(tree, args, parent, share, prior)
        else:
            by_name = {"paper": paper_credit, "sibling": sibling_credit, "group": group_credit, "gae": gae_credit}
            by_name |= {"gigpo": gigpo_credit, "mc": mc_credit}
            by_name[str(args.credit)](tree, args)
        if args.baseline == "critic":
            for edge in tree.edges():
                edge.data.targets = [edge.ratio * edge.value] + [math.nan] * (edge.action.tokens - 1)
    if args.advantage_norm == "batch":
        normalize(trees, gather)
    return forks


def normalize(trees: Sequence[RolloutTree], gather: Gather) -> None:
    """Scale advantages to mean 0 and variance 1 over the sampled tokens of all processes that have a weight."""
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
    from the reference. With p and q the log-probabilities under the policy and the reference, k3 is
    exp(q - p) - (q - p) - 1 and k2 is (q - p)² / 2; each is multiplied by the ratio of the token, for k2 without a
    gradient. Both have the gradient ratio x log(π/ref) ∇ log π: the score-function form of ∇ KL(π‖ref).

    With ``tis`` = C a token's whole loss is multiplied by min(π_old / π_sampler, C): truncated importance sampling, for
    tokens sampled by another program than the one that computes their probabilities (Yao et al., 2025), or by a policy
    before it. The clip still bounds π / π_old. With a ratio of 1 nothing changes. With ``tis_level="episode"`` weights
    and returns have the ratios already (`tree_credit`).

    ``ratio="sequence"`` is GSPO-token (Zheng et al., 2025, section 4.3): every token has the value of its row's ratio
    and the gradient of its own, which equals GSPO where all advantages of a row are equal.

    Args:
        logps: log-probabilities under the current policy, [B, T-1].
        batch: the sampled tokens.
        args: ``ratio``, ``clip_low``, ``clip_high``, ``dual_clip``, ``kl``, ``kl_estimator``, ``tis`` and ``tis_level``
            are used.
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
        moved = change.exp()  # change of the policy since the update began
        loss = loss + (args.kl or 0.0) * divergence * (moved.detach() if args.kl_estimator == "k2" else moved)
        stats["kl"] = (divergence.detach() * mask).sum()
    if args.tis and batch.sampler_logps is not None:
        drawn = (batch.old_logps - batch.sampler_logps).exp()
        loss = loss * drawn.clamp(max=args.tis) if args.tis_level == "token" else loss
        stats["tis_capped"] = ((drawn > args.tis) & mask).sum().float()
    return loss, stats


def value_loss(values: Tensor, batch: Batch, args: Args) -> tuple[Tensor, int]:
    """½ (V - target)², clipped as in PPO, summed over the states whose value is learned; and their number.

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


def aggregate(loss: Tensor, batch: Batch, rows: Sequence[PathRow], denominator: float, args: Args) -> Tensor:
    """Σ weight x loss over the tokens, divided by the denominator of the whole minibatch; see ``aggregation``."""
    per_row = (loss * batch.weight).sum(dim=1)  # [B]
    if args.aggregation == "path":
        per_row = per_row / per_row.new_tensor([row.mass or 1.0 for row in rows])
    return per_row.sum() / denominator


def denominator_of(rows: Sequence[PathRow], trees: int, args: Args) -> float:
    """Contribution of these rows to the denominator of `aggregate`."""
    parts = {"token": sum(row.mass for row in rows), "path": float(len(rows)), "constant": float(trees)}
    return parts[args.aggregation]


# --------------------------------------------------------------------------------------------------------------- loop


class Trainer:
    """One run: SFT, then reinforcement learning; all randomness is keyed by (seed, step).

    Args:
        args: settings as given; `Trainer.args` has the preset filled in.
        session: makes the `TrainingSession` that keeps the state of the run.
    """

    def __init__(self, args: Args, session: Callable[[Args], TrainingSession] = TrainingSession) -> None:
        self.session = session(args)
        self.args = self.session.args
        self.ahead = Ahead(self.session, self._sample)
        self.passed_over = dict.fromkeys(("returns", "env_steps", "tokens"), 0)  # sampled, but not trained on
        self.rollout_costs: dict[str, float] = {}

    def run(self) -> dict[str, Score]:
        """Train to the end; returns the scores by stage."""
        args, session = self.args, self.session
        session.catch_signals()
        try:
            with session.explained():
                if not session.saved_at and (args.init_from or args.eval_untrained):
                    session.evaluate("untrained" if not args.init_from else "start")
                if session.stage == "sft":
                    supervised(session)
                    session.evaluate("sft")
                    session.enter_rl()
                if args.algo != "sft":
                    self._reinforce()
                elif not session.saved_at:  # SFT of no steps: its checkpoint still starts other runs
                    session.save(session.out / "checkpoint")
                session.report()
        except Interrupted as stop:
            session.stopped_by = stop.number
            name, where = signal.Signals(stop.number).name, session.out / "checkpoint"
            session.say(f"stopped at {session.saved_at} by {name}, saved in {where}; continue with --resume")
        except KeyboardInterrupt:
            session.say(f"stopped at once; {session.kept()}")
            raise
        finally:
            self.ahead.stop()
            session.close()
        return session.scores

    def _reinforce(self) -> None:
        """Rollouts, credit, loss; an evaluation every ``eval_every`` updates, or the same fraction of the budget."""
        args, session = self.args, self.session
        bar = session.bar(args.algo, args.updates, done=position(args, session.step, session.counters))
        while (before := position(args, session.step, session.counters)) < args.updates:
            began, tokens = time.perf_counter(), session.counters["tokens"]
            session.set_lr(args.lr * learning_rate_factor(before, args))
            with session.gathered():
                trees = self._rollouts((args.seed, 2, session.step))
            sampled, held = time.perf_counter(), session.peak_memory()
            forks = assign_credit(trees, args, session.memory, session.gather)
            session.memory.observe(trees, forks, args, session.gather)
            cut = leave_out(trees, args, (args.seed, 4, session.step))
            metrics = self._optimize(trees) | {"rollout/left_out_actions": session.sum(float(cut))}
            session.step += 1
            finished = time.perf_counter()
            metrics |= self._count(trees, finished - began)
            metrics |= {"time/rollout": sampled - began, "time/update": finished - sampled, **self.rollout_costs}
            metrics["time/tokens_per_second"] = (session.counters["tokens"] - tokens) / (finished - began)
            metrics["update/lr"] = session.lr
            if held is not None:
                metrics |= {"memory/rollout": held, "memory/update": session.peak_memory() or 0.0}
            session.log.scalars(metrics, "rl", session.step)
            now = position(args, session.step, session.counters)
            shown = {name: f"{metrics[f'rollout/{name}']:.2f}" for name in ("success", "entropy")}
            bar.advance(now, **shown, tokens=f"{session.counters['tokens'] / 1e3:.0f}k")
            last = now >= args.updates
            if last or now // args.eval_every > before // args.eval_every:
                self.ahead.wait()
                session.evaluate(f"{args.algo}@{session.step}")
                if session.accelerator.is_main_process:
                    write_samples(session.out, trees, args, update=session.step)
            session.maybe_save(args.save_every, last=last)
        bar.close()

    def _rollouts(self, seed: Sequence[int]) -> list[RolloutTree]:
        """Trees of the update, measured by the policy that learns from them; with ``staleness`` sampled before it."""
        args, session = self.args, self.session
        self.passed_over = dict.fromkeys(self.passed_over, 0)
        batch = self.ahead.take(seed)
        ends = {name: session.sum(count) for name, count in end_counts(batch.trees).items()}
        trees = without_masked(batch.trees)
        session.check_rolled_out(len(trees), batch.failures, ends)
        self.rollout_costs = rollout_costs(batch.policy, batch.clock, batch.failures, ends, batch.seconds, session.sum)
        for edge in (edge for tree in trees for edge in tree.edges()):
            edge.reward -= args.invalid_penalty * (not edge.valid)
        trees = self._differing(trees) if args.dynamic_sampling else trees
        measure, reference = (partial(self._forward, model) for model in (session.network, session.reference))
        rescore(trees, args, measure, reference, session.accelerator.device)
        if batch.look is not None:
            batch.look.set_controls(trees, scored(self._logps, args, session.accelerator.device))
            self.rollout_costs |= {name: session.sum(count) for name, count in batch.look.counts().items()}
        self.rollout_costs |= mismatch_metrics(trees, args, session.gather)
        self.rollout_costs |= {"rollout/staleness": float(batch.stale)} if args.staleness else {}
        return trees

    def _sample(self, seed: Sequence[int], policy: Any, memory: Memory) -> Sampled:
        """Roll out the tasks of an update, every N-th on each of N processes: the same tasks for every N."""
        args, session = self.args, self.session
        count = math.ceil(args.prompts * max(1.0, args.dynamic_sampling))
        drawn = ask(session.envs, lambda env: draw_tasks(env, count, seed))
        indices = range(session.accelerator.process_index, len(drawn), session.accelerator.num_processes)
        tasks, scores = [drawn[i] for i in indices], None
        shared: dict[str, Any] = dict(
            tasks=tasks, seed=seed, indices=indices, max_live=args.max_live, retries=args.env_retries
        )
        if args.schedule == "value-oracle":
            scores = value_scores(session.envs, session.player(args.temperature), rollouts=args.mc_rollouts, **shared)
        schedule = make_schedule(args, seed, memory, scores, drawn)
        failures: list[Failure] = []
        clock, began = Clock(), time.perf_counter()
        ahead = None
        if args.lookahead:
            ahead = LookAhead(args, session.prompt, session.chat, memory.values, memory.network)
        shared |= dict(overlap=args.env_overlap, clock=clock, failures=failures, look=ahead)
        shared |= dict(capture_every=args.env_capture_every, timeout=args.rollout_timeout or None)
        with session.journal(seed) as journal:
            trees = roll_out(session.envs, policy, schedule, by_itself=by_itself(args), journal=journal, **shared)
        return Sampled(trees, policy, clock, failures, time.perf_counter() - began, ahead)

    def _differing(self, trees: Sequence[RolloutTree]) -> list[RolloutTree]:
        """Dynamic sampling: keep the trees whose returns differ; the others still count as spent."""
        session = self.session
        won = session.sum(sum(success_of(tree, self.args) for tree in trees))
        kept, left, counts = differing(trees, self.args.prompts, session.gather)
        self.rollout_costs |= counts | {"rollout/drawn_success": won / counts["rollout/drawn_tasks"]}
        for tree in left:
            self.passed_over["returns"] += len(tree.paths)
            self.passed_over["env_steps"] += tree.env_steps
            self.passed_over["tokens"] += tree.tokens
        return kept

    def _optimize(self, trees: Sequence[RolloutTree]) -> dict[str, float]:
        """``epochs`` passes of ``minibatches`` optimizer steps over the trees."""
        args, session = self.args, self.session
        assert args.epochs is not None and args.minibatches is not None
        sums: dict[str, float] = {}
        norms: list[float] = []
        for epoch in range(args.epochs):
            parts = shuffled_parts(args, (args.seed, 5, session.step, epoch))
            for part in range(args.minibatches):
                chosen = [tree for tree in trees if parts[tree.index] == part]
                rows = rows_of(chosen)
                denominator = session.sum(denominator_of(rows, len(chosen), args))
                if not denominator:  # all of its tasks were dropped, or all actions masked
                    continue
                learnt = session.sum(sum(row.learnt for row in rows))

                def backward(micro: Sequence[PathRow], scale: tuple[float, float] = (denominator, learnt)) -> None:
                    for name, value in self._backward(micro, *scale).items():
                        sums[name] = sums.get(name, 0.0) + value

                idle = PathRow([0, 0], [])  # contributes no loss
                session.accumulate(micro_batches(rows, args, idle), backward, idle=idle)
                session.optimizer_step()
                norms.append(session.grad_norm)
        if not norms:
            return {"update/skipped": 1.0}
        sums = {name: session.sum(value) for name, value in sums.items()}
        tokens = max(sums.pop("tokens"), 1.0)
        metrics = {f"update/{name}": value / tokens for name, value in sums.items() if not name.endswith("loss")}
        steps = {f"update/{name}": value / len(norms) for name, value in sums.items() if name.endswith("loss")}
        return {**metrics, **steps, "update/grad_norm": float(np.mean(norms))}

    def _backward(self, rows: Sequence[PathRow], denominator: float, learnt: float) -> dict[str, float]:
        args, session = self.args, self.session
        batch = collate(rows, session.accelerator.device)
        reference = None
        if session.reference is not None and args.kl_in == "loss":
            with torch.no_grad():
                reference, *_ = self._forward(session.reference, batch)
        logps, _, values = self._forward(session.model, batch)
        losses, stats = policy_loss(logps, batch, args, reference)
        loss = aggregate(losses, batch, rows, denominator, args)
        if values is not None:
            error, _ = value_loss(values, batch, args)
            stats["value_loss"] = error.detach() / learnt
            loss = loss + args.value_weight * error / learnt
        session.strategy.backward(loss)
        return {"loss": float(loss.detach()), **{name: float(value) for name, value in stats.items()}}

    def _forward(self, model: CausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies of the sampled tokens, and values of their states, [B, T-1]."""
        packed, most = self.args.pack == "tree", self.args.micro_tokens if self.args.long_rows == "split" else None
        told: dict[str, Any] = dict(where=batch.mask, temperature=self.args.temperature, packed=packed, most=most)
        return forward(model, batch.ids, batch.lengths, **told)

    def _logps(self, ids: Tensor, lengths: Tensor, where: Tensor) -> Tensor:
        """Log-probabilities of any tokens under the current policy, [B, T-1]."""
        packed, temperature = self.args.pack == "tree", self.args.temperature
        return forward(self.session.network, ids, lengths, where=where, temperature=temperature, packed=packed)[0]

    def _count(self, trees: Sequence[RolloutTree], seconds: float) -> dict[str, float]:
        """Add the batch to the run's counters; returns its numbers to log, over all processes."""
        session = self.session
        total = batch_totals(trees, self.args, session.gather)
        for name, beside in self.passed_over.items():
            session.counters[name] += int(total[name] + session.sum(float(beside)))
        session.counters["seconds"] += seconds
        return batch_metrics(total) | {f"total/{name}": float(value) for name, value in session.counters.items()}


def train(args: Args) -> dict[str, Score]:
    """Train as a program does; returns the scores by stage.

    Raises:
        SystemExit: the run failed, with the reason; or a signal stopped it: the status is 128 plus the signal's number,
            as in shells: 130 after Ctrl-C, 143 after SIGTERM.
    """
    with exits_for_errors():
        trainer = Trainer(args)
        scores = trainer.run()
    trainer.session.leave()
    if trainer.session.stopped_by:
        raise SystemExit(128 + trainer.session.stopped_by)
    return scores


def main(argv: Sequence[str] | None = None) -> dict[str, Score]:
    """Parse the command line, check the settings, train."""
    return train(command_line(argv))


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    train(ARGS)
