"""Variance of estimators of the policy gradient, measured at a fixed policy and equal budgets.

    python -m bpo_ref.variance --config bpo_ref/configs/alfworld-tiny.yaml --checkpoint runs/alfworld/sft \
        --methods rloo:roots=8 rloo-turn:roots=8 bpo-split --out docs/results/details/variance-alfworld

Many batches of rollout trees are sampled for the same tasks; the gradient g of the trainer's own loss is taken for
every tree. Reported for each method, with 90 % bootstrap intervals over the tasks:

- noise / signal: Tr Cov(g) / ‖E g‖² of an update on these tasks; Tr Cov is over rollouts, the tasks being fixed, and
  E g comes from a separate large sample of independent rollouts, with its noise subtracted from the squared norm;
- cost at equal returns, environment steps and tokens: Tr Cov times what a tree spends, the first method's being 1.
  Half the cost is the same precision for half the budget;
- scale and cosine of the mean gradient against E g, noise subtracted, and the relative bias ‖mean - E g‖ / ‖E g‖. A
  method whose scale is significantly different from 1 does not estimate the gradient: its cost is taken at its own
  scale and marked *. Other methods are never divided by their measured scale, which is noise;
- non-degenerate: share of actions with an advantage beyond 0.1; and the variance of ‖g‖ over mini-batches, as the BPO
  paper reports it, which mixes in the scale: so with its ratio to the squared mean. These are in OUT.json only, as are
  the costs at equal environment steps.

Gradients are sums over tokens divided by the number of tasks (``aggregation=constant``), whose expectation does not
depend on the method, and are kept as a random projection (count sketch) that preserves inner products on average.

The samples of each method are kept in OUT-samples/, so that the same command continues after an interruption, and a
method can be added to a study. Delete the folder to measure anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
import tyro
import yaml
from torch import Tensor
from tqdm import tqdm

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.config import read_config
from bpo_ref.eval import make_env
from bpo_ref.experiments.plots import ALIASES, algorithm_of, colours_of
from bpo_ref.learning import packing
from bpo_ref.learning.batch import collate, micro_batches, rows_of
from bpo_ref.learning.models import eos_ids, load_policy, settle_cpu
from bpo_ref.lookahead import LookAhead, scored
from bpo_ref.presets import DEFAULTS, PRESETS
from bpo_ref.sampling.chat import ChatFormat
from bpo_ref.sampling.generate import Generator, forward
from bpo_ref.sampling.policy import ChatPolicy
from bpo_ref.sampling.selection import draw_tasks
from bpo_ref.schedules import make_schedule
from bpo_ref.session import MAY_CHANGE, gives_key
from bpo_ref.train import aggregate, assign_credit, policy_loss
from sandboxgym.adapters.prompts import make_prompt
from sandboxgym.task_env import task_count
from sandboxgym.tree import Envs, Failure, RolloutTree, rollout

METHODS = (
    "rloo:roots=8", "rloo-turn:roots=8", "rloo-key:roots=8", "rloo-value:roots=8", "rloo-pooled:roots=8",
    "bpo-paper", "bpo-sibling", "bpo-tree", "bpo-forest", "bpo-split", "bpo-split:roulette=0.5",
    "bpo-split:step_weight_power=0.75", "bpo-split:baseline=pooled,roulette=0.5",
)  # fmt: skip
BUDGETS = ("returns", "env_steps", "tokens")
AFTER_SAMPLING = (
    "algo", "credit", "baseline", "refusals", "fork_baseline", "step_weight_power", "advantage_norm", "lookahead",
    "lookahead_least", "network", "lam", "group_std",
)  # fmt: skip
"""Settings applied after sampling: methods that differ in these alone share trees."""


@dataclass(frozen=True)
class Study:
    """Settings of a measurement."""

    checkpoint: str
    """Folder of the policy's weights and tokenizer."""
    config: str
    """YAML file of the training settings: environment, turns, tokens, temperature."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment in addition to those of ``config``, as name=value."""
    methods: tuple[str, ...] = METHODS
    """``algo`` or ``algo:field=value,field=value``; costs are relative to the first."""
    tasks: int = 24
    """Tasks per batch."""
    repeats: int = 8
    """Batches per method, which give the variance."""
    pilot: int = 4
    """Batches beforehand, of other tasks, from which schedules and baselines learn."""
    reference: int = 64
    """Independent rollouts per task, with the turn baseline, for E g."""
    sketch: int = 8192
    """Dimension of the projection of gradients."""
    bootstrap: int = 2000
    """Number of bootstrap resamples of the tasks."""
    minibatch: int = 4
    """Tasks per mini-batch, for the variance of gradient norms."""
    seed: int = 0
    """Seed of all random draws."""
    threads: int = 1
    """CPU threads (0: PyTorch's choice)."""
    out: str = "runs/variance"
    """Prefix of the files written: OUT.md, OUT.png, OUT.json, and the samples in OUT-samples/."""

    @property
    def measured_by(self) -> dict[str, Any]:
        """The settings that gradients depend on, except the method."""
        later = ("methods", "bootstrap", "minibatch", "out", "reference", "checkpoint", "config", "threads")
        return {name: value for name, value in asdict(self).items() if name not in later}


@dataclass
class Samples:
    """Gradients and costs measured for one method."""

    name: str
    gradients: np.ndarray  # [repeats, tasks, sketch]
    spent: np.ndarray  # [repeats, tasks, 3]: returns, environment steps, tokens
    moving: float  # share of actions with |A| > 0.1
    seconds: float

    @property
    def means(self) -> np.ndarray:
        """Mean gradient of each task [tasks, sketch]."""
        return np.asarray(self.gradients.mean(axis=0))

    @property
    def noise(self) -> np.ndarray:
        """Trace of the covariance for each task [tasks]."""
        return np.asarray(self.gradients.var(axis=0, ddof=1).sum(axis=-1))


class Laboratory:
    """A fixed policy, its environments, and the tasks on which all methods are measured."""

    def __init__(self, study: Study) -> None:
        self.study = study
        settle_cpu(study.threads)
        config = Args(**read_config(Args, Path(study.config)))
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
        self.envs = Envs(lambda: make_env(base.env_id, base.env_kwargs, base.max_turns), threads=base.env_threads)
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
        """Training settings of ``algo`` or ``algo:field=value,…``."""
        algo, _, options = method.partition(":")
        if algo not in PRESETS:
            raise ValueError(f"{method}: expected one of {', '.join(PRESETS)}, found {algo}")
        hints = get_type_hints(Args)
        values = {name: yaml.safe_load(text) for name, _, text in (o.partition("=") for o in options.split(",") if o)}
        unknown = values.keys() - {field.name for field in fields(Args)}
        if unknown:
            raise ValueError(f"{method}: there is no setting {', '.join(sorted(unknown))}")
        values = {name: float(v) if float in (hints[name], *_options(hints[name])) else v for name, v in values.items()}
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
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(
            partial,
            gradients=samples.gradients.astype(np.float32),
            spent=samples.spent,
            moving=samples.moving,
            seconds=samples.seconds,
        )
        partial.replace(path)
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
        env = self.envs.take()
        self._available = task_count(env)
        tasks = draw_tasks(env, self.study.tasks, (self.study.seed, 91, batch))
        self.envs.give(env)
        return tasks

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


def _options(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", ())


@dataclass(frozen=True)
class Estimate:
    """A number and its 90 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Line:
    """A method's row in the table."""

    name: str
    noise_to_signal: Estimate
    cost: dict[str, Estimate]
    aims: bool
    """True if a scale of 1 is compatible with its interval."""
    scale: Estimate
    cosine: Estimate
    bias: Estimate
    nondegenerate: float
    norm_variance: float
    norm_cv2: float
    spent: dict[str, float]
    seconds: float


def compare(samples: Sequence[Samples], reference: Samples, *, bootstrap: int, minibatch: int, seed: int) -> list[Line]:
    """Compute the rows of the table; costs are relative to the first sample.

    Args:
        samples: of each method, on the same tasks.
        reference: for E g.
        bootstrap: resamples of the tasks.
        minibatch: tasks of a mini-batch.
        seed: seed of the resampling.
    """
    tasks = len(reference.means)
    rng = np.random.default_rng(seed)
    weights = (
        np.concatenate([np.ones((1, tasks)), rng.multinomial(tasks, np.full(tasks, 1 / tasks), size=bootstrap)]) / tasks
    )  # [1 + bootstrap, tasks]; the first is the sample itself

    def squared(s: Samples) -> np.ndarray:
        """‖mean over tasks of E g‖² under every weighting, the noise subtracted."""
        gram = s.means @ s.means.T - np.diag(s.noise / len(s.gradients))
        return np.asarray(np.einsum("bi,ij,bj->b", weights, gram, weights))

    signal = squared(reference)
    first = samples[0]
    lines = []
    for s in samples:
        noise = weights @ s.noise
        cross = np.einsum("bi,ij,bj->b", weights, s.means @ reference.means.T, weights)
        with np.errstate(invalid="ignore", divide="ignore"):
            positive = np.where(signal > 0, signal, np.nan)
            cosine = cross / np.sqrt(np.maximum(squared(s), 0.0) * positive)
            ratio, scale = noise / tasks / positive, cross / positive
            bias = np.sqrt(np.maximum(0.0, squared(s) - 2 * cross + signal) / positive)
        aims = interval(scale).low <= 1.0 <= interval(scale).high
        cost = {}
        for i, name in enumerate(BUDGETS):
            mine, theirs = noise * (weights @ s.spent[..., i].mean(axis=0)), weights @ first.noise
            relative = mine / (theirs * (weights @ first.spent[..., i].mean(axis=0)))
            cost[name] = interval(relative if aims else relative / scale**2)
        norms = _norms(s.gradients, minibatch)
        lines.append(
            Line(
                name=s.name,
                noise_to_signal=interval(ratio),
                cost=cost,
                aims=aims,
                scale=interval(scale),
                cosine=interval(cosine),
                bias=interval(bias),
                nondegenerate=s.moving,
                norm_variance=float(norms.var(ddof=1)),
                norm_cv2=float(norms.var(ddof=1) / norms.mean() ** 2),
                spent={name: float(s.spent[..., i].mean()) for i, name in enumerate(BUDGETS)},
                seconds=s.seconds,
            )
        )
    return lines


def interval(values: np.ndarray) -> Estimate:
    """The first value, with the 5 % and 95 % quantiles of the others."""
    finite = values[1:][np.isfinite(values[1:])]
    low, high = np.quantile(finite, [0.05, 0.95]) if 2 * len(finite) > len(values) else (math.nan, math.nan)
    return Estimate(float(values[0]), float(low), float(high))


def _norms(gradients: np.ndarray, minibatch: int) -> np.ndarray:
    """‖mean gradient‖ of each mini-batch of tasks."""
    tasks, size = gradients.shape[1:]
    whole = gradients[:, : tasks // minibatch * minibatch].reshape(-1, minibatch, size)
    return np.asarray(np.linalg.norm(whole.mean(axis=1), axis=-1))


def read_lines(path: Path) -> list[Line]:
    """The rows that a study's ``OUT.json`` holds."""

    def estimate(found: dict[str, float]) -> Estimate:
        return Estimate(**found)

    return [
        Line(
            **{
                **record,
                **{name: estimate(record[name]) for name in ("noise_to_signal", "scale", "cosine", "bias")},
                "cost": {name: estimate(found) for name, found in record["cost"].items()},
            }
        )
        for record in json.loads(path.read_text())
    ]


def table(lines: Sequence[Line]) -> str:
    """Format the rows as a Markdown table as wide as a page: not all that `Line` holds."""
    first = lines[0].name
    rows = [
        f"| method | tokens for equal variance, relative to `{first}` | rollouts for equal variance | scale | cosine "
        "| relative bias | rollouts, tokens per task |",
        "|" + "---|" * 7,
    ]
    for line in lines:
        cost = line.cost
        rows.append(
            f"| `{shown(line.name)}`{'' if line.aims else ' *'} | {cost['tokens']} | {cost['returns']} | {line.scale} "
            f"| {line.cosine} | {line.bias} | {line.spent['returns']:.1f}, {line.spent['tokens']:.0f} |"
        )
    return "\n".join(rows)


def shown(name: str) -> str:
    """A method as tables and pictures name it: by its preset, where it is one; what several settings are, spaced."""
    return ALIASES.get(name, name).replace(",", ", ")


def plot(lines: Sequence[Line], path: Path) -> None:
    """Plot the cost of every method at equal tokens, with its interval; hollow: biased by construction."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axis = plt.subplots(figsize=(10, 0.4 * len(lines) + 1.4))
    biased = [line for line in lines if is_biased(line.name) or not line.aims]
    for y, line in enumerate(reversed(lines)):
        cost, colour = line.cost["tokens"], colours_of([line.name])[line.name]
        axis.plot([cost.low, cost.high], [y, y], color=colour)
        axis.plot(cost.value, y, "o", color=colour, markerfacecolor="white" if line in biased else colour)
    axis.axvline(1.0, color="0.7", linewidth=1)
    axis.set_yticks(range(len(lines)), [shown(line.name) for line in reversed(lines)])
    axis.set_xscale("log")
    costs = [line.cost["tokens"] for line in lines]
    narrow = max(cost.high for cost in costs) < 3 * min(cost.low for cost in costs)
    axis.xaxis.set_major_locator(LogLocator(subs=range(1, 10) if narrow else (1, 2, 3, 4, 6, 8)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="x", alpha=0.3)
    reference = "RLOO" if algorithm_of(lines[0].name) == "rloo" else lines[0].name
    note = "\nhollow: biased by construction" if biased else ""
    axis.set_xlabel(f"tokens for equal gradient variance, relative to {reference} (log scale, 90 % CI){note}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def is_biased(method: str) -> bool:
    """Whether a method's expectation is not a multiple of the policy gradient, by what docs/theory.md proves."""
    algo, _, settings = method.partition(":")
    chosen = DEFAULTS | PRESETS.get(algo, {})
    power = dict(part.split("=", 1) for part in settings.split(",") if part).get("step_weight_power")
    forks = chosen["schedule"] not in ("none", "mc")
    return chosen["credit"] not in ("tree", "mc") or (forks and float(power or chosen["step_weight_power"]) != 1.0)


def run(study: Study, *, progress: Callable[..., Any] = tqdm) -> list[Line]:
    """Measure and write.

    Raises:
        ValueError: a method, or the configuration, is not one.
    """
    laboratory = Laboratory(study)
    for method in study.methods:
        laboratory.settings(method)  # what is wrong is said before hours have passed
    # the reference is taken in repeats, too: their spread is its own noise
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


def main() -> None:
    """Run the command line."""
    try:
        print(table(run(tyro.cli(Study, config=(tyro.conf.FlagConversionOff,)))))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
