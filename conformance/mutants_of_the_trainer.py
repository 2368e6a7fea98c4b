"""Mutation test of the trainer's fast tests: one changed line at a time, in a copy, until a test fails.

    python conformance/mutants_of_the_trainer.py [--only NAME ...] [--jobs 1] [--journal FILE]
        [--markdown docs/conformance/trainer-mutants.md]

Each mutant is run against the fast tests for its part of the trainer, until the first failure. These tests are run once
without a mutant first. A mutant whose line does not occur exactly once is an error that names it: the code has changed,
and the mutant has to be adapted. Mutants marked equivalent, with the reason, are not run. ``--journal`` skips mutants
that an earlier run killed. Exit codes: 0 all killed, 1 some survived, 2 a mutant's line is missing, or the tests fail
without mutants.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("bpo_ref", "sandboxgym", "sandboxgym_pytest", "tests", "pyproject.toml")
IMPORTED = ("torch", "transformers", "accelerate", "transformers.models.llama", "peft", "tyro", "sandboxgym.tree")
SECONDS = 900.0
"""Of a mutant's tests: one that hangs is killed, in both senses."""

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
    "run": LOOP,
    "masks": ("test_masks.py",),
}
"""Test files of ``tests/bpo_ref`` by what a mutant changes, the likeliest first."""

LONGER = "mean_change or unbiased or planted or biases or variance or ranking or allotted or trains or run or resume"
"""Words in the names of fast tests that take a second and more: they are run if the others have passed."""
STAGES = (f"not ({LONGER})", LONGER)


@dataclass(frozen=True)
class Mutant:
    """One line of the trainer changed."""

    name: str
    part: str
    """Of `TESTS`."""
    line: str
    """Text that is there once in ``bpo_ref``."""
    changed: str
    equivalent: str = ""
    """Why no test can see it."""


@dataclass(frozen=True)
class Fate:
    """What became of a mutant."""

    mutant: Mutant
    killed: bool
    by: str
    """The test that failed."""
    seconds: float


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
            "edge.weight = weight * n ** -(1.0 if at_root else args.step_weight_power)",
            "edge.weight = weight * n ** -args.step_weight_power",
        ),
        "weights do not fall at forks": (
            "edge.weight = weight * n ** -(1.0 if at_root else args.step_weight_power)",
            "edge.weight = weight / n if at_root else weight",
        ),
        "other tasks include one's own": (
            "others = (sum(means.values()) - means[tree.index]) / (len(means) - 1) if len(means) > 1 else 0.0",
            "others = sum(means.values()) / len(means)",
        ),
        "critic's targets are advantages": (
            "edge.data.targets = [edge.value] + [math.nan]",
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
            "self.args.temperature\n        return forward(model, batch.ids,",
            "1.0\n        return forward(model, batch.ids,",
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
            "dtype=torch.bool).tril(shared)[None, None]",
            "dtype=torch.bool).tril(0)[None, None]",
        ),
        "a token sees what is not below it": (
            "return (k <= q) & (q < ends[k])",
            "return k <= q",
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
            "positions = {i: len(self._session.context(rows[i])) for i in able}\n        generations = ",
            "positions = {i: len(self._session.context(rows[i])) + 1 for i in able}\n        generations = ",
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


class GoneError(LookupError):
    """A mutant's line is not in the package exactly once."""


def place(mutant: Mutant, package: Path) -> Path:
    """The file of ``bpo_ref`` that has a mutant's line.

    Raises:
        GoneError: it is nowhere, or more than once.
    """
    found = [(path, path.read_text(encoding="utf-8").count(mutant.line)) for path in sorted(package.glob("**/*.py"))]
    found = [(path, times) for path, times in found if times]
    if [times for _, times in found] != [1]:
        where = ", ".join(f"{path.name} ({times} times)" for path, times in found) or "nowhere"
        raise GoneError(f"{mutant.part}: {mutant.name}: expected once in bpo_ref, found {where}: {mutant.line!r}")
    return found[0][0]


def plant(mutant: Mutant, copy: Path) -> tuple[Path, str]:
    """Put the mutant into the copy; returns its file and the text that was there."""
    path = place(mutant, copy / "bpo_ref")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.line, mutant.changed), encoding="utf-8")
    return path, text


@dataclass
class Trial:
    """Tests in a process that was forked when everything but the trainer had been imported."""

    mutant: Mutant | None
    """None: none is planted."""
    copy: Path
    names: Sequence[str]
    stage: int = 0
    began: float = 0.0
    pid: int = 0
    output: TextIO | None = None

    def start(self) -> None:
        """The next stage."""
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - the child's, and read after it
        self.began = self.began or time.perf_counter()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run())

    def _run(self) -> int:
        assert self.output is not None
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(self.output.fileno(), descriptor)
        os.chdir(self.copy)
        os.environ |= {"PYTHONPATH": str(self.copy), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ["SANDBOXGYM_SLOWEST"] = ""  # all tests without the mark, also those that take some seconds
        sys.path.insert(0, str(self.copy))
        sys.dont_write_bytecode = True
        files = [str(self.copy / "tests" / "bpo_ref" / name) for name in self.names]
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "-k", STAGES[self.stage]]
        code = int(pytest.main([*options, *files]))
        sys.stdout.flush()
        return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code

    def ended(self) -> int | None:
        """The exit code of this stage, -1 where it ran out of time; None: not yet."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if self.mutant is None or time.perf_counter() - self.began < SECONDS:
            return None
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return -1

    def told(self) -> str:
        """What the tests have written."""
        assert self.output is not None
        self.output.seek(0)
        return self.output.read()


def fate_of(trial: Trial, code: int) -> Fate:
    """What became of the trial's mutant, by the exit code of its last stage."""
    assert trial.mutant is not None
    lines = [line.split(" ")[1] for line in trial.told().splitlines() if line.startswith(("FAILED ", "ERROR "))]
    by = lines[0].rpartition("/")[2] if lines else "it did not end" if code == -1 else f"exit code {code}"
    return Fate(trial.mutant, code != 0, by if code else "", time.perf_counter() - trial.began)


def run(trials: Sequence[Trial], copies: list[Path]) -> Iterator[tuple[Trial, int]]:
    """Trials that have ended with their exit codes, as many at a time as there are copies."""
    waiting = list(trials)
    running: dict[int, tuple[Trial, tuple[Path, str] | None]] = {}
    while waiting or running:
        while waiting and copies:
            trial = waiting.pop(0)
            trial.copy = copies.pop()
            before = plant(trial.mutant, trial.copy) if trial.mutant else None
            trial.start()
            running[trial.pid] = (trial, before)
        time.sleep(0.1)
        for pid, (trial, before) in list(running.items()):
            if (code := trial.ended()) is None:
                continue
            del running[pid]
            if code == 0 and trial.stage + 1 < len(STAGES):
                trial.stage += 1
                trial.start()
                running[trial.pid] = (trial, before)
                continue
            if before is not None:
                before[0].write_text(before[1], encoding="utf-8")
            copies.append(trial.copy)
            yield trial, code


def journaled(journal: Path | None) -> list[Fate]:
    """The kills of earlier runs, of mutants that are as they were."""
    if journal is None or not journal.exists():
        return []
    rows = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    fates = [Fate(Mutant(**row["mutant"]), row["killed"], row["by"], row["seconds"]) for row in rows]
    return list({fate.mutant: fate for fate in fates if fate.killed and fate.mutant in MUTANTS}.values())


def import_all() -> None:
    """Everything that tests import and mutants do not change: it is most of the time of a quick test."""
    sys.path.insert(0, str(ROOT))
    for name in IMPORTED:
        importlib.import_module(name)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # threads do not survive a fork


def copied(folder: Path) -> Path:
    """A copy of what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        else:
            shutil.copy(source, folder / name)
    return folder


def markdown(fates: Sequence[Fate], command: str) -> str:
    """The whole page."""
    run = {fate.mutant: fate for fate in fates}
    survived = [fate.mutant.name for fate in fates if not fate.killed]
    equivalent = [mutant for mutant in MUTANTS if mutant.equivalent]
    lines = [
        "# Mutants of the trainer",
        "",
        "Each row is one changed line of `bpo_ref`, run in a copy against the fast tests chosen for its part until one",
        "fails: whether a fault there would be seen. The list is `conformance/mutants_of_the_trainer.py`.",
        "",
        f"- {len(fates) - len(survived)} of {len(fates)} mutants killed"
        + (f"; **survived: {', '.join(survived)}**" if survived else ""),
        f"- {len(equivalent)} more change nothing that can be tested, for the reason given",
        f"- `{command}` on {platform.system()} with {os.cpu_count()} cores, Python {platform.python_version()},"
        f" {time.strftime('%Y-%m-%d')}, {sum(fate.seconds for fate in fates) / 60:.0f} minutes of tests",
        "",
        "| part | mutant | killed by |",
        "|---|---|---|",
    ]
    for mutant in MUTANTS:
        if mutant.equivalent:
            verdict = f"equivalent: {mutant.equivalent}"
        elif mutant in run:
            verdict = f"`{run[mutant].by.replace('|', chr(92) + '|')}`" if run[mutant].killed else "**survived**"
        else:
            continue
        lines.append(f"| {mutant.part} | {mutant.name} | {verdict} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Which changed line of the trainer its fast tests notice.")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="mutants, or parts; default all")
    parser.add_argument("--jobs", type=int, default=1, help="at once, each in a copy of its own; default 1")
    parser.add_argument("--untested", action="store_true", help="the tests are known to pass without a mutant")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep results here, and take the kills it has")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    options = parser.parse_args(arguments)
    try:
        for mutant in MUTANTS:
            place(mutant, ROOT / "bpo_ref")
    except GoneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = {mutant.name for mutant in MUTANTS} | set(TESTS)
    if wrong := [name for name in options.only or () if name not in known]:
        parser.error(f"--only: expected names or parts of mutants, found {', '.join(wrong)}")
    chosen = [
        mutant
        for mutant in MUTANTS
        if not mutant.equivalent and (not options.only or {mutant.name, mutant.part} & set(options.only))
    ]
    fates = [fate for fate in journaled(options.journal) if fate.mutant in chosen]
    chosen = [mutant for mutant in chosen if mutant not in {fate.mutant for fate in fates}]
    import_all()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copied(Path(folder) / str(number)) for number in range(options.jobs)]
        names = list(dict.fromkeys(name for mutant in chosen for name in TESTS[mutant.part]))
        alone = [Trial(None, copies[0], names)] if chosen and not options.untested else []
        for trial, code in run(alone, copies):
            if code:
                print(f"error: the tests fail without any mutant:\n{trial.told()[-2000:]}", file=sys.stderr)
                return 2
        trials = [Trial(mutant, copies[0], TESTS[mutant.part]) for mutant in chosen]
        for count, (trial, code) in enumerate(run(trials, copies), 1):
            found = fate_of(trial, code)
            fates.append(found)
            if options.journal is not None:
                with options.journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
            verdict = f"killed by {found.by}" if found.killed else "SURVIVED"
            print(f"{count}/{len(chosen)} {found.mutant.part}: {found.mutant.name}: {verdict} {found.seconds:.0f} s")
            sys.stdout.flush()
    survived = [found.mutant.name for found in fates if not found.killed]
    print(f"{len(fates) - len(survived)} of {len(fates)} killed; survived: {', '.join(survived) or 'none'}")
    if options.markdown is not None:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "conformance/mutants_of_the_trainer.py", *given])
        options.markdown.write_text(markdown(fates, command), encoding="utf-8")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
