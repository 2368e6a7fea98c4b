"""Mutants of the trainer: one changed line each, by the part whose fast tests must notice it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CREDIT = ("test_loop.py", "test_estimators.py", "test_presets.py")
LOSS = ("test_loop.py", "test_loss.py")
LOOP = ("test_loop.py", "test_loss.py", "test_train.py")
TESTS: dict[str, tuple[str, ...]] = {
    "credit": CREDIT,
    "baselines": (*CREDIT, "test_schedules.py"),
    "loss": LOSS,
    "loop": LOOP,
    "rescore": ("test_loop.py", "test_loss.py", "test_packing.py", "test_backends.py"),
    "batch": (*LOSS, "test_packing.py"),
    "packing": ("test_packing.py",),
    "generate": ("test_generate.py", "test_packing.py", "test_loss.py"),
    "policy": ("test_loss.py", "test_chat.py", "test_backends.py", "test_train.py", "test_real_models.py"),
    "run": (*LOOP, "test_interrupted_runs.py"),
    "masks": ("test_masks.py",),
}
"""Test files of ``tests/bpo_ref`` by what a mutant changes, the likeliest first."""


@dataclass(frozen=True)
class Mutant:
    """One line of the trainer changed."""

    name: str
    part: str
    """Key of `TESTS`."""
    line: str
    """Text that occurs exactly once in ``bpo_ref``."""
    changed: str
    equivalent: str = ""
    """Reason why no test can detect it; empty if one can."""


def _mutants() -> Iterator[Mutant]:
    for part, changes in CHANGES.items():
        for name, (line, changed, *equivalent) in changes.items():
            yield Mutant(name, part, line, changed, *equivalent)


CHANGES: dict[str, dict[str, tuple[str, ...]]] = {
    "credit": {
        "leave-one-out counts its own return": (
            "return [g - (total - g) / (n - 1) for g in returns]",
            "return [g - total / n for g in returns]",
        ),
        "Eq. 8 discounts its own term": (
            "total = args.lam * total + local.get(id(edge), 0.0)",
            "total = args.lam * (total + local.get(id(edge), 0.0))",
        ),
        "siblings forget their branch after a step": (
            "advantage = local.get(id(edge), advantage)",
            "advantage = local.get(id(edge), 0.0)",
        ),
        "group centred on the median": (
            "= values - values.mean()",
            "= values - np.median(values)",
        ),
        "group always by its deviation": (
            "(values.std() + 1e-4) if args.group_std else apart",
            "(values.std() + 1e-4)",
        ),
        "VinePPO without the next value": ("target = target if valued is None else valued", "pass"),
        "VinePPO trains on its valuing rollouts": (
            "edge.advantage, edge.weight = 0.0, 0.0",
            "edge.advantage, edge.weight = 0.0, 1.0",
        ),
        "GAE over turns forgets the next value": (
            "following, edge.advantage = data.values[0], advantage",
            "following, edge.advantage = 0.0, advantage",
        ),
        "GAE over turns: targets are advantages": (
            "data.targets = [advantage + data.values[0]]",
            "data.targets = [advantage]",
        ),
        "GAE over tokens discounts within an action": (
            "following, reward, gamma = value, 0.0, 1.0",
            "following, reward, gamma = value, 0.0, args.gamma",
        ),
        "back-up without discount": (
            "edge.value = edge.reward + gamma * edge.child.value",
            "edge.value = edge.reward + edge.child.value",
        ),
        "roulette's survivors hand up no more": (
            "low + (node.value - low) / node.survival",
            "low + (node.value - low)",
        ),
        "roulette's survivors count no more": (
            "a, weight = 0.0, weight / node.survival",
            "a, weight = 0.0, weight",
        ),
        "the siblings' mean counts behind roulette": (
            "a, weight = 0.0, weight / node.survival",
            "a, weight = a, weight / node.survival",
            "both baselines are valid there; the presets have a = 0 anyway",
        ),
        "carried baseline keeps the rewards since": (
            "near, around = (near - edge.reward) / args.gamma, (around - edge.reward) / args.gamma",
            "near, around = near / args.gamma, around / args.gamma",
        ),
        "weights of the root fall with p": (
            "edge.weight = weight * edge.ratio * n ** -(1.0 if at_root else args.step_weight_power)",
            "edge.weight = weight * edge.ratio * n ** -args.step_weight_power",
        ),
        "weights do not fall at forks": (
            "edge.weight = weight * edge.ratio * n ** -(1.0 if at_root else args.step_weight_power)",
            "edge.weight = weight * edge.ratio / (n if at_root else 1)",
        ),
        "other tasks include one's own": (
            "others = (sum(means.values()) - means[tree.index]) / (len(means) - 1) if len(means) > 1 else 0.0",
            "others = sum(means.values()) / len(means)",
        ),
        "critic's targets are advantages": (
            "edge.data.targets = [edge.ratio * edge.value] + [math.nan]",
            "edge.data.targets = [edge.advantage] + [math.nan]",
        ),
        "normalisation counts weight 0": (
            "for edge in tree.edges() if edge.weight]\n    values",
            "for edge in tree.edges()]\n    values",
        ),
        "normalisation without the mean": (
            "edge.advantage = (edge.advantage - mean) / scale",
            "edge.advantage = edge.advantage / scale",
        ),
    },
    "baselines": {
        "a baseline that counts its own rollout": (
            "return (s_task - n_own * mean_own + self.SHRINK_TASK * prior) / (n_task - n_own + self.SHRINK_TASK)",
            "return (s_task + self.SHRINK_TASK * prior) / (n_task + self.SHRINK_TASK)",
        ),
        "the other tasks' mean counts this one": (
            "prior = (s_all - s_task + self.SHRINK_ALL * self.others(index)) / (n_all - n_task + self.SHRINK_ALL)",
            "prior = (s_all + self.SHRINK_ALL * self.others(index)) / (n_all + self.SHRINK_ALL)",
        ),
        "values do not fade": (
            "entry[:] = [value * self._decay for value in entry]",
            "entry[:] = [value for value in entry]",
        ),
        "variance without its mean's square": (
            "return max(0.0, square - self.value(key, kind) ** 2)",
            "return max(0.0, square)",
        ),
        "shrinkage without the noise of fork means": (
            "return within / max(apart - noise, 1e-3 * n)",
            "return within / max(apart, 1e-3 * n)",
        ),
        "fork depth moves the wrong way": (
            "self.GAIN * (self.SHARE - explained)",
            "self.GAIN * (explained - self.SHARE)",
        ),
        "roulette trusts at once": (
            "return n >= least and total / n <= 2 * low",
            "return n >= 1 and total / n <= 2 * low",
        ),
        "every path's entropies are remembered as a backbone's": (
            'forked = roots[:1] if args.forks == "backbone" else roots',
            "forked = roots",
        ),
        "half of the allotment's least": (
            "shares = np.clip(low * wanted, least, self.MOST * mean)",
            "shares = np.clip(low * wanted, 0, self.MOST * mean)",
        ),
    },
    "loss": {
        "clipped where it should not be": (
            "surrogate = torch.minimum(ratio * batch.advantage, clipped * batch.advantage)",
            "surrogate = clipped * batch.advantage",
        ),
        "bounds exchanged": (
            "clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)",
            "clipped = ratio.clamp(1 - args.clip_high, 1 + args.clip_low)",
        ),
        "sequence ratio is a sum": (
            "(sums / sizes).detach()",
            "sums.detach()",
        ),
        "steps count by their tokens": (
            'masked_scatter(mask, 1.0 / sizes[group]) if args.ratio == "step"',
            'masked_scatter(mask, torch.ones_like(sizes[group])) if args.ratio == "step"',
        ),
        "divergence of the wrong sign": (
            "apart = (reference - logps).masked_fill(~mask, 0.0)",
            "apart = (logps - reference).masked_fill(~mask, 0.0)",
        ),
        "k3 without the ratio": (
            'moved.detach() if args.kl_estimator == "k2" else moved',
            "moved.detach()",
        ),
        "dual clip on good actions": (
            "torch.where(batch.advantage < 0, surrogate.maximum",
            "torch.where(batch.advantage > 0, surrogate.maximum",
        ),
        "value clip takes the smaller error": ("error = error.maximum(", "error = error.minimum("),
        "values learnt where there is no target": (
            "learnt = ~batch.targets.isnan()\n    value",
            "learnt = batch.mask\n    value",
        ),
        "weights left out of the loss": (
            "per_row = (loss * batch.weight).sum(dim=1)",
            "per_row = loss.sum(dim=1)",
        ),
        "paths not divided by their tokens": ("[row.mass or 1.0 for row in rows]", "[1.0 for row in rows]"),
        "constant aggregation by the batch": (
            '"constant": float(trees)}',
            '"constant": float(args.prompts)}',
        ),
    },
    "loop": {
        "memory before credit": (
            "            forks = assign_credit(trees, args, session.memory, session.gather)\n"
            "            session.memory.observe(trees, forks, args, session.gather)\n",
            "            assign_credit(trees, args, session.memory, session.gather)\n"
            "            session.memory.observe(trees, [], args, session.gather)\n"
            "            forks = assign_credit(trees, args, session.memory, session.gather)\n",
        ),
        "nothing is left out": (
            "            cut = leave_out(trees, args, (args.seed, 4, session.step))\n",
            "            cut = 0\n",
        ),
        "the first paths are kept": (
            "np.random.default_rng([*seed, tree.index]).permutation(len(paths))[args.subsample_returns :]",
            "range(len(paths))[args.subsample_returns :]",
        ),
        "every minibatch is the first": (
            "if parts[tree.index] == part]",
            "if parts[tree.index] == 0]",
        ),
        "minibatches never reshuffled": (
            "parts = shuffled_parts(args, (args.seed, 5, session.step, epoch))",
            "parts = shuffled_parts(args, (args.seed, 5, 0, 0))",
        ),
        "one epoch too few": ("for epoch in range(args.epochs):", "for epoch in range(1):"),
        "values learnt at full weight": (
            "loss = loss + args.value_weight * error / learnt",
            "loss = loss + error / learnt",
        ),
        "value loss by the policy's denominator": (
            "loss = loss + args.value_weight * error / learnt",
            "loss = loss + args.value_weight * error / denominator",
        ),
        "KL twice": (
            'if session.reference is not None and args.kl_in == "loss":',
            "if session.reference is not None:",
        ),
        "temperature forgotten in training": (
            "where=batch.mask, temperature=self.args.temperature, packed=packed",
            "where=batch.mask, temperature=1.0, packed=packed",
        ),
        "invalid actions rewarded": (
            "edge.reward -= args.invalid_penalty * (not edge.valid)\n        trees = self._differing",
            "edge.reward += args.invalid_penalty * (not edge.valid)\n        trees = self._differing",
        ),
        "warm-up one update late": (
            "return (position + 1) / args.warmup",
            "return position / args.warmup",
        ),
        "every update plays the same tasks": (
            "trees = self._rollouts((args.seed, 2, session.step))",
            "trees = self._rollouts((args.seed, 2, 0))",
        ),
    },
    "rescore": {
        "KL in the reward of the wrong sign": (
            "edge.reward -= penalty * float(apart[i, span].sum())",
            "edge.reward += penalty * float(apart[i, span].sum())",
        ),
        "values of the token after": (
            "span = slice(action.position - 1, action.position - 1 + action.tokens)\n                if penalty",
            "span = slice(action.position, action.position + action.tokens)\n                if penalty",
        ),
        "log-probabilities stay unknown": (
            "sampled = logps if measured else sampled",
            "sampled = sampled",
        ),
    },
    "batch": {
        "masks one token late": (
            "span = slice(edge.action.position - 1, edge.action.position - 1 + edge.action.tokens)\n            step",
            "span = slice(edge.action.position, edge.action.position + edge.action.tokens)\n            step",
        ),
        "actions share a number": ("            number += 1\n", ""),
        "old log-probabilities lost": (
            "old[i, span] = data.logps",
            "pass",
        ),
        "rows of weight 0 are trained on": (
            "return [row for row in rows if any(edge.weight for edge in row.edges)]",
            "return list(rows)",
        ),
        "rows without advantage always dropped": (
            "matter = args.kl or args.critic",
            "matter = False",
        ),
    },
    "packing": {
        "a row's positions go on from the row before": (
            "places.append(np.arange(shared, len(row)))",
            "places.append(np.arange(n, n + len(row) - shared))",
        ),
        "prefixes one token too long": (
            "return int(differ[0]) if len(differ) else shortest",
            "return int(differ[0]) + 1 if len(differ) else shortest",
        ),
        "a segment sees no prefix": (
            "dtype=torch.bool).tril(before)[None, None]",
            "dtype=torch.bool).tril(0)[None, None]",
        ),
        "a token sees what is not below it": (
            "return (k <= q + begin) & (q + begin < ends[k])",
            "return k <= q + begin",
        ),
        "intervals end too early": (
            "ends[path[shared:]] = start\n",
            "ends[path[shared:]] = start - 1\n",
        ),
    },
    "generate": {
        "temperature multiplied": (
            "torch.log_softmax(logits.float() / temperature, dim=-1)",
            "torch.log_softmax(logits.float() * temperature, dim=-1)",
        ),
        "the first of equal tokens twice": (
            "torch.searchsorted(cumulative, thresholds, right=True)",
            "torch.searchsorted(cumulative, thresholds, right=True).sub(1).clamp(min=0)",
        ),
        "positions count the padding": (
            "return cached + (fed.cumsum(dim=1) - 1).clamp(min=0)\n",
            "return cached + torch.arange(fed.shape[1], device=fed.device)[None]\n",
        ),
        "padding of caches is seen": (
            "return (self.table[:, :after] > 0).long()",
            "return (self.table[:, :after] >= 0).long()",
        ),
        "a fork keeps its parent's last token": (
            "fork.places = parent.places[: max(0, len(fork.ids) - 1)]",
            "fork.places = parent.places[: len(fork.ids)]",
        ),
        "stale keys are used": (
            "if weights_version(self._generator.model) != self._weights:",
            "if False:",
        ),
        "a stop token is cut": (
            "draft.live = token not in generator.stop_ids and len(draft.logps) < draft.limit",
            "draft.live = len(draft.logps) < draft.limit",
        ),
        "entropy of the wrong sign": (
            "return -(distribution.exp() * distribution).sum(dim=-1)",
            "return (distribution.exp() * distribution).sum(dim=-1)",
        ),
        "log-probabilities of padding": (
            "where = inside[:, 1:] if where is None else where & inside[:, 1:]",
            "where = torch.ones_like(inside[:, 1:]) if where is None else where & inside[:, 1:]",
        ),
    },
    "policy": {
        "truncated turns are told as whole": (
            "return self._chat.turn(message, truncated=before.truncated)",
            "return self._chat.turn(message, truncated=False)",
        ),
        "positions after the answer": (
            "lengths = [len(self._session.context(row)) for row in rows]",
            "lengths = [len(self._session.context(row)) + 1 for row in rows]",
        ),
        "a fork begins with all of its parent": (
            "fork = self._session.fork(row, length=shared)",
            "fork = self._session.fork(row)",
        ),
        "noise is learnt from": (
            "learn.append(not expert.noisy)",
            "learn.append(True)",
        ),
    },
    "run": {
        "loss not scaled by the processes": (
            "self.accelerator.backward(loss * self.accelerator.num_processes)",
            "self.accelerator.backward(loss)",
        ),
        "value head at the policy's rate": (
            '"scale": args.value_lr / args.lr',
            '"scale": 1.0',
        ),
        "gradients add up": (
            "optimizer.zero_grad()\n    return norm",
            "pass\n    return norm",
        ),
        "gradients are not clipped": (
            "norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)",
            "norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), 1e9)",
        ),
        "norms decay": (
            'groups.append({"params": vectors, "scale": 1.0, "weight_decay": 0.0})',
            'groups.append({"params": vectors, "scale": 1.0, "weight_decay": args.weight_decay})',
        ),
        "optimizer forgets on resuming": (
            '            self.strategy.load_optimizer_state(saved["optimizer"])\n',
            "            pass\n",
        ),
        "the value head forgets on resuming": (
            'whole.value_head.load_state_dict(saved["value_head"])',
            "pass",
        ),
        "evaluation at the training temperature": (
            "self.player(args.eval_temperature)",
            "self.player(args.temperature)",
        ),
        "no reference without a supervised stage": (
            'self._build_reference() if args.kl and self.stage == "rl" else None',
            "None",
        ),
    },
    "masks": {
        "masked episodes stay": ("return [tree for tree in trees if tree.paths]", "return list(trees)"),
        "forks of a masked path stay": (
            "tree.remove(tree.offspring(key))",
            "tree.remove([key])",
        ),
        "every end counts as masked": (
            "masked, suspicious = sum(end.masked for end in ends)",
            "masked, suspicious = sum(True for end in ends)",
        ),
    },
}
"""By part: name -> line, what takes its place and, where no test can see it, why."""

MUTANTS = tuple(_mutants())
