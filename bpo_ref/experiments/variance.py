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
- non-degenerate: the share of actions that have an advantage with an absolute value above 0.1;
- the variance of ‖g‖ over mini-batches, as the BPO paper reports it. It depends on the scale of g, so its ratio to the
  squared mean is given, too.

The table in OUT.md leaves out noise / signal, the costs at equal environment steps and the last two: OUT.json has all.

Gradients are sums over tokens divided by the number of tasks (``aggregation=constant``), whose expectation does not
depend on the method, and are kept as a random projection (count sketch) that preserves inner products on average.

The samples of each method are kept in OUT-samples/, so that the same command continues after an interruption, and a
method can be added to a study. Delete the folder to measure anew.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bpo_ref.args import Args
from bpo_ref.config import checked
from bpo_ref.experiments.plots import ALIASES, algorithm_of, colours_of
from bpo_ref.presets import DEFAULTS, PRESETS
from sandboxgym.arguments import parse_arguments

METHODS = (
    "rloo:roots=8", "rloo-turn:roots=8", "rloo-key:roots=8", "rloo-value:roots=8", "rloo-pooled:roots=8",
    "bpo-paper", "bpo-sibling", "bpo-tree", "bpo-forest", "bpo-split", "bpo-split:roulette=0.5",
    "bpo-split:step_weight_power=0.75", "bpo-split:baseline=pooled,roulette=0.5",
)  # fmt: skip
BUDGETS = ("returns", "env_steps", "tokens")


@dataclass(frozen=True)
class VarianceStudy:
    """Settings of a measurement of gradient variance."""

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
        """Settings of the study that gradients depend on, apart from the method, the configuration and the weights."""
        later = ("methods", "bootstrap", "minibatch", "out", "reference", "checkpoint", "config", "threads")
        return {name: value for name, value in asdict(self).items() if name not in later}


def read_method(method: str) -> tuple[str, dict[str, Any]]:
    """Algorithm and settings of ``algo`` or ``algo:field=value,field=value``; see `parse_arguments` for values.

    Raises:
        ValueError: there is no such algorithm or setting, or a value has another type.
    """
    algo, _, options = method.partition(":")
    if algo not in PRESETS:
        raise ValueError(f"{method}: expected one of {', '.join(PRESETS)}, found {algo}")
    try:
        parts = re.split(r",(?![^\[]*\])", options)  # at commas outside of lists
        return algo, checked(Args, parse_arguments([part for part in parts if part]))
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from None


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
    """Format the rows as a Markdown table that fits a page; some fields of `Line` are left out."""
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
    """Name of a method in tables and pictures: its preset if it equals one, with spaces between several settings."""
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
    """True if a method's expectation is not a multiple of the policy gradient, as docs/theory.md proves."""
    algo, given = read_method(method)
    chosen = DEFAULTS | PRESETS[algo] | given
    forks = chosen["schedule"] not in ("none", "mc")
    return chosen["credit"] not in ("tree", "mc") or (forks and chosen["step_weight_power"] != 1.0)
