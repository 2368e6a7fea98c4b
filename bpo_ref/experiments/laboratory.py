"""Measurement of policy-gradient estimators at a fixed policy; `variance.py` makes a table of the results."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.config import find_config, read_config
from bpo_ref.experiments.variance import Line, Samples, VarianceStudy, compare, plot, read_method, table
from bpo_ref.learning import packing
from bpo_ref.learning.batch import collate, micro_batches, rows_of
from bpo_ref.learning.models import eos_ids, load_policy, settle_cpu
from bpo_ref.lookahead import LookAhead, scored
from bpo_ref.running.environments import envs_of, gives_key
from bpo_ref.running.resuming import MAY_CHANGE
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.env_source import ask
from bpo_ref.sampling.generate import Generator, forward
from bpo_ref.sampling.policy import ChatPolicy
from bpo_ref.sampling.selection import draw_tasks
from bpo_ref.schedules import make_schedule
from bpo_ref.train import aggregate, assign_credit, policy_loss
from sandboxgym.adapters.prompts import make_prompt
from sandboxgym.system.atomic import atomic_file
from sandboxgym.task_env import task_count
from sandboxgym.tree import Failure, RolloutTree, rollout

AFTER_SAMPLING = (
    "algo", "credit", "baseline", "refusals", "fork_baseline", "step_weight_power", "advantage_norm", "lookahead",
    "lookahead_least", "network", "lam", "group_std",
)  # fmt: skip
"""Settings applied after sampling: methods that differ in these alone share trees."""


class Laboratory:
    """A fixed policy, its environments, and the tasks on which all methods are measured."""

    def __init__(self, study: VarianceStudy) -> None:
        self.study = study
        settle_cpu(study.threads)
        config = Args(**read_config(Args, find_config(study.config)))
        base = self.base = replace(config, env_kwargs=(*config.env_kwargs, *study.env_kwargs))
        self.model, tokenizer = load_policy(study.checkpoint, dtype=base.dtype)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        if base.pack == "tree":
            packing.enable(self.model)
        self.prompt = make_prompt(
            base.prompt, base.env_id, system=base.system, list_actions=base.list_actions, history=base.history
        )
        self.chat = ChatFormat(
            tokenizer,
            system=self.prompt.system,
            observation_tokens=base.observation_tokens,
            stop_ids=eos_ids(self.model),
        )
        self._weights = [_digest(path) for path in sorted(Path(study.checkpoint).glob("*.safetensors"))]
        self.envs = envs_of(base, base.env_kwargs)
        self.keyed = gives_key(self.envs)
        self.tasks = self._draw(0)
        self.looks = any(self.settings(method).lookahead for method in study.methods)
        self._kept_of: Any = None
        self._kept: dict[tuple[int, ...], list[RolloutTree]] = {}
        size = sum(parameter.numel() for parameter in self.model.parameters())
        stream = np.random.default_rng([study.seed, 90])
        self._bucket = torch.from_numpy(stream.integers(study.sketch, size=size)).to(self.model.device)
        self._sign = torch.from_numpy(stream.choice([-1.0, 1.0], size=size).astype(np.float32)).to(self.model.device)

    def settings(self, method: str) -> Args:
        """Training settings of ``algo`` or ``algo:field=value,…``.

        Raises:
            ValueError: there is no such algorithm or setting, or it cannot be measured in this study.
        """
        algo, values = read_method(method)
        hints = get_type_hints(Args)
        for name, value in values.items():  # so that kl=0 and kl=0.0 are one method
            if value is not None and float in (hints[name], *get_args(hints[name])):
                values[name] = float(value)
        fixed: dict[str, Any] = {"prompts": self.study.tasks, "aggregation": "constant", "kl": 0.0, "value_decay": 1.0}
        args = resolved(replace(self.base, **{"algo": algo, **fixed, **values}), keyed=self.keyed)
        if args.baseline == "critic" or args.credit == "gae" or args.schedule == "value-oracle" or algo == "sft":
            raise ValueError(f"{method}: a learned value head, the value oracle and sft are not measured here")
        if args.allocation == "spread" and self._available != self.study.tasks:
            raise ValueError(
                f"{method}: the variance of returns is learned in the pilot, so the study must have all tasks: "
                f"expected tasks={self._available}, found {self.study.tasks}"
            )
        return args

    def measured(self, method: str, *, repeats: int | None = None, key: int = 1) -> Samples:
        """Return `measure`'s samples, or those that an earlier run of the same study kept."""
        study = self.study
        usual, mine = asdict(Args()), asdict(self.settings(method))
        given = {name: value for name, value in mine.items() if name not in MAY_CHANGE and value != usual[name]}
        settings = [study.measured_by, given, repeats, key, self._weights]
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        path = Path(f"{study.out}-samples", f"{name}.npz")
        if path.exists():
            with np.load(path) as kept:
                gradients = kept["gradients"].astype(np.float64)  # as they were measured
                return Samples(method, gradients, kept["spent"], float(kept["moving"]), float(kept["seconds"]))
        samples = self.measure(method, repeats=repeats, key=key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, open(temporary, "xb") as file:
            np.savez_compressed(
                file,
                gradients=samples.gradients.astype(np.float32),
                spent=samples.spent,
                moving=samples.moving,
                seconds=samples.seconds,
            )
        return samples

    def measure(self, method: str, *, repeats: int | None = None, key: int = 1) -> Samples:
        """Sample a method's gradients; ``key`` keeps the samples of two measurements apart."""
        args = self.settings(method)
        memory = Memory.of(args)
        began = time.perf_counter()
        self._recall(args, key)
        learns = args.schedule in ("entropy-online", "explained") or args.fork_baseline == "shrunk"
        learns = learns or args.keyed or args.allocation == "spread"
        for batch in range(self.study.pilot if learns else 0):
            trees = self._batch(args, memory, partial(self._draw, 1 + batch), (self.study.seed, key, 0, batch))
            memory.observe(trees, assign_credit(trees, args, memory), args)
        gradients, spent, moving, actions = [], [], 0, 0
        for repeat in range(repeats or self.study.repeats):
            trees = self._batch(args, memory, lambda: self.tasks, (self.study.seed, key, 1, repeat))
            assign_credit(trees, args, memory)
            gradients.append(np.stack([self._gradient(tree, args) for tree in trees]))
            spent.append([[len(tree.paths), tree.env_steps, tree.tokens] for tree in trees])
            learnt = [edge for tree in trees for edge in tree.edges() if edge.weight]
            moving, actions = moving + sum(abs(edge.advantage) > 0.1 for edge in learnt), actions + len(learnt)
        seconds = time.perf_counter() - began
        return Samples(method, np.stack(gradients), np.array(spent, dtype=float), moving / actions, seconds)

    def _draw(self, batch: int) -> list[Any]:
        self._available = ask(self.envs, task_count)
        return ask(self.envs, lambda env: draw_tasks(env, self.study.tasks, (self.study.seed, 91, batch)))

    def _recall(self, args: Args, key: int) -> None:
        """Reuse the trees sampled for the method before, if this one's would be identical."""
        same = {name: value for name, value in asdict(args).items() if name not in AFTER_SAMPLING}
        drawn_by = [
            args.split_variance == "fair" and (args.network, args.lookahead_least),
            args.allocation == "spread" and args.baseline,  # see make_schedule
        ]
        if self._kept_of != (kept_of := (key, same, drawn_by)):
            self._kept_of, self._kept = kept_of, {}

    def _batch(
        self, args: Args, memory: Memory, tasks: Callable[[], Sequence[Any]], seed: tuple[int, ...]
    ) -> list[RolloutTree]:
        """Sample the trees of a batch, with the luck of their decisions set if there is look-ahead."""
        if seed not in self._kept:
            self._kept[seed] = self._sampled(args, memory, tasks(), seed)
        trees = self._kept[seed]
        for edge in (edge for tree in trees for edge in tree.edges()):
            edge.control = 0.0
        if args.lookahead:

            def logps(ids: Tensor, lengths: Tensor, where: Tensor) -> Tensor:
                packed, temperature = args.pack == "tree", args.temperature
                return forward(self.model, ids, lengths, where=where, temperature=temperature, packed=packed)[0]

            ahead = LookAhead(args, self.prompt, self.chat, memory.values, memory.network)
            ahead.set_controls(trees, scored(logps, args, self.model.device))
        return trees

    def _sampled(self, args: Args, memory: Memory, tasks: Sequence[Any], seed: Sequence[int]) -> list[RolloutTree]:
        generator = Generator(
            self.model,
            stop_ids=self.chat.stop_ids,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            context_limit=args.context,
        )
        skip = self.chat.length(self.prompt.opening) if args.entropy_skip is None else args.entropy_skip
        policy = ChatPolicy(generator, self.chat, prompt=self.prompt, entropy_skip=skip)
        failures: list[Failure] = []
        ahead = LookAhead(args, self.prompt, self.chat, memory.values) if self.looks else None
        trees = rollout(
            self.envs,
            policy,
            make_schedule(args, seed, memory, tasks=tasks),
            tasks=tasks,
            seed=seed,
            overlap=args.env_overlap,
            max_live=args.max_live,
            retries=args.env_retries,
            failures=failures,
            look=ahead,
        )
        if any(failure.dropped for failure in failures):
            raise RuntimeError(f"environments failed after all retries: {failures[0].error}")
        for edge in (edge for tree in trees for edge in tree.edges()):
            edge.reward -= args.invalid_penalty * (not edge.valid)
        return trees

    def _gradient(self, tree: RolloutTree, args: Args) -> np.ndarray:
        """Gradient of the loss of one tree, projected [sketch]."""
        self.model.zero_grad(set_to_none=True)
        packed, temperature = args.pack == "tree", args.temperature
        for rows in micro_batches(rows_of([tree]), args):
            batch = collate(rows, self.model.device)
            logps, *_ = forward(
                self.model, batch.ids, batch.lengths, where=batch.mask, temperature=temperature, packed=packed
            )
            losses, _ = policy_loss(logps, batch, args)
            aggregate(losses, batch, rows, 1.0, args).backward()  # type: ignore[no-untyped-call]
        flat = torch.cat([parameter.grad.float().flatten() for parameter in self.model.parameters()])
        projected: Tensor = torch.zeros(self.study.sketch, device=flat.device)
        return np.asarray((-projected.index_add_(0, self._bucket, flat * self._sign)).cpu(), dtype=np.float64)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(study: VarianceStudy, *, progress: Callable[..., Any] = tqdm) -> list[Line]:
    """Measure all methods of a study, and write the results as they come.

    Raises:
        ValueError: the configuration or a method is invalid.
        RuntimeError: an environment failed after all retries.
    """
    laboratory = Laboratory(study)
    for method in study.methods:
        laboratory.settings(method)  # a wrong method is reported now, not after hours
    # the reference is measured in repeats, too: their spread gives its own noise
    parts = 4
    reference = laboratory.measured(f"rloo-turn:roots={max(2, study.reference // parts)}", repeats=parts, key=2)
    samples = [laboratory.measured(method) for method in progress(study.methods, desc="methods")]
    laboratory.envs.close()
    lines = compare(samples, reference, bootstrap=study.bootstrap, minibatch=study.minibatch, seed=study.seed)
    out = Path(study.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    given = " ".join(
        f"--{name.replace('_', '-')} {_words(value)}" for name, value in asdict(study).items() if value != ()
    )
    text = (
        f"# Quality of gradient estimators: {laboratory.base.env_id}\n\n"
        "Written by `bpo_ref/experiments/variance.py`, whose first lines define the columns; intervals are 90 %, "
        "over tasks.\n\n"
        f"```bash\npython -m bpo_ref.variance {given}\n```\n\n"
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, PyTorch {torch.__version__}, "
        f"{study.tasks} tasks x {study.repeats} batches, E g by {study.reference} rollouts per task "
        f"(signal {math.sqrt(max(0.0, _signal(reference))):.3g}).\n\n{table(lines)}\n\n![cost]({out.name}.png)\n"
    )
    out.with_suffix(".md").write_text(text)
    out.with_suffix(".json").write_text(json.dumps([asdict(line) for line in lines], indent=1))
    plot(lines, out.with_suffix(".png"))
    return lines


def _signal(s: Samples) -> float:
    mean = s.means.mean(axis=0)
    return float(mean @ mean - s.noise.sum() / len(s.gradients) / len(s.noise) ** 2)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
