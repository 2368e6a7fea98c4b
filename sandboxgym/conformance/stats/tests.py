"""Tests of whether two samples come from one distribution: exact at any sample size, with one error rate for all.

1. Every p-value is a permutation p-value: under the null hypothesis P(p <= a) <= a at any sample size, whatever the
   distribution, also where the draws of permutations stop early (Besag and Clifford 1991).
2. Categories, cells and ranks are chosen from the pooled sample only, which permutations do not change.
3. `holm` controls the probability of any false alarm among all tests of a run.
4. Power is computed for the least favourable pair of distributions at a given total variation distance, so that
   "no difference" is reported only where a difference would have been found.
5. Effects come with intervals: `tv_interval` (Clopper, Pearson), `kolmogorov_interval` (Dvoretzky, Kiefer, Wolfowitz).

Total variation distance (TV) is half the L1 distance: the largest difference in the probability of any event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ALPHA = 1e-3
"""Probability of any false alarm of the stochastic checks of one run."""
POWER = 0.99
"""Probability with which a shift of the size that a budget promises must be found."""
STOP = 20
"""Number of permutations at least as extreme as the observed sample after which no more are drawn."""
ENERGY_ROWS = 250
"""Most rows per side in the energy test, which needs all pairs."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one two-sample test."""

    name: str
    p: float
    """Permutation p-value."""
    sizes: tuple[int, int]
    cells: int = 0
    """Number of categories that were compared; 0 if the test has none."""
    effect: tuple[float, float, float] | None = None
    """Estimate, lower and upper limit (95 %) of the distance."""
    distance: str = ""
    """Name of the distance whose estimate is the effect."""

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values, for the evidence."""
        shown: dict[str, Any] = {"test": self.name, "p": self.p, "samples": list(self.sizes)}
        if self.cells:
            shown["cells"] = self.cells
        if self.effect is not None:
            estimate, low, high = (round(value, 4) for value in self.effect)
            shown[self.distance] = estimate
            shown["95 % interval"] = [low, high]
        return shown


# Permutations.


def draws_for(tests: int, alpha: float = ALPHA) -> int:
    """Number of permutations with which the smallest p-value is well below the strictest of ``tests`` thresholds."""
    return math.ceil(2.5 * max(tests, 1) / alpha)


def permutation_p(observed: float, draw: Callable[[int], Floats], draws: int, *, stop: int = STOP) -> float:
    """The p-value of ``observed`` among statistics of permuted samples; large ones speak against the null hypothesis.

    Args:
        observed: the statistic of the sample as it is.
        draw: function from a number to that many statistics of independently permuted samples.
        draws: most permutations to draw.
        stop: number of statistics of at least ``observed`` at which drawing stops.
    """
    bar = observed - 1e-9 * max(1.0, abs(observed))  # ties count against the alternative, also after rounding
    extreme = made = 0
    batch = 10 * stop
    while made < draws:
        statistics = draw(min(batch, draws - made))
        hits = np.flatnonzero(statistics >= bar)
        if extreme + len(hits) >= stop:
            return float(stop / (made + hits[stop - extreme - 1] + 1))
        extreme += len(hits)
        made += len(statistics)
        batch = min(4 * batch, 5000)
    return (extreme + 1) / (made + 1)


def labelled(values: Sequence[Hashable]) -> Ints:
    """Values as category numbers, in the order of their first appearance."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)


def merged(labels: Ints, cells: int) -> Ints:
    """Merge all but the most frequent ``cells - 1`` categories into one."""
    counts = np.bincount(labels)
    order = np.argsort(-counts, kind="stable")
    renamed = np.empty(len(counts), dtype=np.int64)
    renamed[order] = np.minimum(np.arange(len(counts)), cells - 1)
    return renamed[labels]


def nearest(rows: Floats, cells: int, rng: np.random.Generator) -> Ints:
    """Cells of continuous values: the nearest of some rows drawn from the pooled sample, columns scaled alike."""
    scaled = standardised(rows)
    distinct = np.unique(scaled, axis=0)
    centres = distinct[rng.choice(len(distinct), size=min(cells, len(distinct)), replace=False)]
    found: Ints = np.empty(len(scaled), dtype=np.int64)
    for start in range(0, len(scaled), 2000):
        part = scaled[start : start + 2000]
        found[start : start + 2000] = ((part[:, None, :] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
    return found


def quantiles(values: Floats, cells: int) -> Ints:
    """Cells of numbers between quantiles of the pooled sample; equal numbers share a cell, NaN follows all others."""
    distinct, codes = np.unique(values, return_inverse=True)
    if len(distinct) <= cells:
        return codes.astype(np.int64)
    edges = np.unique(np.quantile(codes, np.arange(1, cells) / cells))
    return np.searchsorted(edges, codes, side="right").astype(np.int64)


def standardised(rows: Floats) -> Floats:
    """Columns with mean 0 and standard deviation 1; constant ones are 0.

    Infinities become numbers beyond the finite ones of their column. NaN becomes the column's mean, and an additional
    column says where it was.
    """
    missing = np.isnan(rows)
    largest = np.abs(np.where(np.isfinite(rows), rows, 0.0)).max(axis=0, initial=0.0)
    scaled = np.where(missing, 0.0, rows / np.where(largest > 0, largest, 1.0))  # the squares of large ones overflow
    scaled = np.clip(scaled, -2.0, 2.0)
    centre = scaled.sum(axis=0) / np.maximum((~missing).sum(axis=0), 1)
    scaled = np.hstack([np.where(missing, centre, scaled), missing[:, missing.any(axis=0)]])
    spread = scaled.std(axis=0)
    return np.asarray((scaled - scaled.mean(axis=0)) / np.where(spread > 0, spread, 1.0), dtype=np.float64)


# Two samples.


def homogeneity(
    name: str,
    labels: Ints,
    first: int,
    rng: np.random.Generator,
    draws: int,
    *,
    strata: Ints | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """χ² of a table of categories, its p-value by permutation (within strata).

    Args:
        name: of the test.
        labels: category of each row of the pooled sample, the first sample's rows first.
        first: number of rows of the first sample.
        rng: of the permutations.
        draws: the most permutations.
        strata: rows are permuted only within their stratum; default: one for all.
        confidence: of the interval of the TV between the categories of all strata together.
    """
    if strata is None:
        strata = np.zeros(len(labels), dtype=np.int64)
    tables = []
    for stratum in np.unique(strata):
        rows = np.flatnonzero(strata == stratum)
        pooled = np.bincount(labels[rows])
        mine = np.bincount(labels[rows[rows < first]], minlength=len(pooled))
        used = pooled > 0
        pooled, mine = pooled[used], mine[used]
        if len(pooled) > 1 and 0 < mine.sum() < pooled.sum():
            tables.append((pooled, mine))
    counts = [np.bincount(part, minlength=int(labels.max()) + 1) for part in (labels[:first], labels[first:])]
    sizes = (first, len(labels) - first)
    effect = tv_interval(counts[0], counts[1], confidence)
    cells = sum(len(pooled) - 1 for pooled, _ in tables) + 1
    if not tables:
        return Comparison(name, 1.0, sizes, cells, effect, "TV")

    def statistic(pooled: Ints, mine: Ints) -> Floats:
        total, size = pooled.sum(), mine.sum(axis=-1, keepdims=True)
        difference = mine - size * pooled / total
        scale = total * total / (size[..., 0] * (total - size[..., 0]))
        return np.asarray(scale * (difference**2 / pooled).sum(axis=-1), dtype=np.float64)

    def draw(number: int) -> Floats:
        found = np.zeros(number)
        for pooled, mine in tables:
            permuted = rng.multivariate_hypergeometric(pooled, int(mine.sum()), size=number, method="marginals")
            found += statistic(pooled, permuted)
        return found

    observed = float(sum(float(statistic(pooled, mine)) for pooled, mine in tables))
    return Comparison(name, permutation_p(observed, draw, draws), sizes, cells, effect, "TV")


def ranks(name: str, values: Floats, first: int, rng: np.random.Generator, draws: int) -> Comparison:
    """Wilcoxon's rank sum, two-sided, its p-value by permutation; more than 200 distinct values are tied in groups."""
    cell = quantiles(values, 200)
    pooled = np.bincount(cell)
    pooled_used = pooled[pooled > 0]
    cell = np.searchsorted(np.flatnonzero(pooled), cell)
    midranks = np.cumsum(pooled_used) - (pooled_used - 1) / 2
    centre = first * (len(values) + 1) / 2
    observed = abs(float(midranks[cell[:first]].sum()) - centre)

    def draw(number: int) -> Floats:
        permuted = rng.multivariate_hypergeometric(pooled_used, first, size=number, method="marginals")
        return np.asarray(np.abs(permuted @ midranks - centre), dtype=np.float64)

    effect = kolmogorov_interval(values[:first], values[first:])
    p = permutation_p(observed, draw, draws)
    return Comparison(name, p, (first, len(values) - first), 0, effect, "Kolmogorov distance")


def energy(name: str, rows: Floats, first: int, rng: np.random.Generator, draws: int) -> Comparison:
    """Energy distance of vectors (Székely and Rizzo 2004), columns scaled alike, its p-value by permutation.

    Args:
        name: of the test.
        rows: the pooled sample, shape (rows, columns), the first sample's rows first; at most `ENERGY_ROWS` of each
            side are used.
        first: number of rows of the first sample.
        rng: of the permutations.
        draws: the most permutations.
    """
    kept = [np.arange(first)[:ENERGY_ROWS], np.arange(first, len(rows))[:ENERGY_ROWS]]
    sides = (len(kept[0]), len(kept[1]))
    used = standardised(rows[np.concatenate(kept)])
    squares = (used**2).sum(axis=1)
    distances = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * used @ used.T, 0.0))
    np.fill_diagonal(distances, 0.0)
    margins = distances.sum(axis=1)
    total = float(margins.sum())
    n, m = sides

    def statistic(members: Floats) -> Floats:  # one column of zeros and ones a permutation
        within = (members * (distances @ members)).sum(axis=0)
        across = margins @ members - within
        others = total - within - 2 * across
        return np.asarray(2 * across / (n * m) - within / n**2 - others / m**2, dtype=np.float64)

    def draw(number: int) -> Floats:
        found = []
        for start in range(0, number, 1000):
            size = min(1000, number - start)
            members = np.repeat((np.arange(n + m) < n).astype(np.float64)[None], size, axis=0)
            found.append(statistic(rng.permuted(members, axis=1).T))
        return np.concatenate(found)

    observed = float(statistic((np.arange(n + m) < n).astype(np.float64)[:, None])[0])
    return Comparison(name, permutation_p(observed, draw, draws), sides)


# Dependence.


def dependence(name: str, groups: Ints, rng: np.random.Generator, draws: int) -> Comparison:
    """Test by permutation whether members of a group agree more often than members of different groups.

    Args:
        name: of the test.
        groups: category of each member, shape (groups, members); independent members stay so when each column is
            permuted by itself.
        rng: of the permutations.
        draws: the most permutations.
    """
    observed = float(_agreements(groups[None])[0])

    def draw(number: int) -> Floats:
        found = []
        for start in range(0, number, 500):
            copies = np.repeat(groups[None], min(500, number - start), axis=0)
            found.append(_agreements(rng.permuted(copies, axis=1)))
        return np.concatenate(found)

    rows, members = groups.shape
    pairs = rows * members * (members - 1) // 2
    chance = agreement_by_chance(groups)
    rate = observed / pairs
    half = 1.96 * math.sqrt(max(rate * (1 - rate), 1e-12) / pairs)
    effect = tuple(
        max(0.0, (value - chance) / (1 - chance)) if chance < 1 else 0.0 for value in (rate, rate - half, rate + half)
    )
    distance = "pairs that repeat each other"
    return Comparison(
        name, permutation_p(observed, draw, draws), (rows, rows), 0, (effect[0], effect[1], effect[2]), distance
    )


def _agreements(groups: Ints) -> Floats:
    """Pairs of equal members of a group, over all groups; shape (copies, groups, members) to (copies,)."""
    members = groups.shape[-1]
    found = np.zeros(groups.shape[0])
    for i in range(members):
        for j in range(i + 1, members):
            found += (groups[..., i] == groups[..., j]).sum(axis=-1)
    return found


def agreement_by_chance(groups: Ints) -> float:
    """The probability that two independent members are equal, estimated from members of different groups."""
    counts = np.bincount(groups.ravel()).astype(np.float64)
    total = counts.sum()
    return float((counts * (counts - 1)).sum() / (total * (total - 1))) if total > 1 else 1.0


def dependence_power(chance: float, pairs: int, repeats: float, alpha: float) -> float:
    """Probability that `dependence` detects a fraction ``repeats`` of repeated pairs (normal limit)."""
    from scipy.stats import norm

    if chance >= 1 or pairs < 1:
        return 0.0
    shifted = chance + repeats * (1 - chance)
    bar = chance + float(norm.isf(alpha)) * math.sqrt(max(chance * (1 - chance), 1 / pairs) / pairs)
    return float(norm.sf((bar - shifted) / math.sqrt(max(shifted * (1 - shifted), 1 / pairs) / pairs)))


# Many tests, power, effects.


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values: a test is rejected at the familywise level alpha if its adjusted p-value is at most alpha."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p) - rank) * value))
        adjusted[name] = largest
    return adjusted


def power(sizes: tuple[int, int], cells: int, shift: float, alpha: float) -> float:
    """The least probability that χ² at level ``alpha`` detects a TV of ``shift`` between samples of these sizes.

    For every pair of distributions over the cells at that TV, the noncentrality is at least
    ``4 n m / (n + m) * shift ** 2`` (Cauchy and Schwarz); the noncentral χ² distribution is its limit.
    """
    from scipy.stats import chi2, ncx2

    n, m = sizes
    if cells < 2 or n < 1 or m < 1:
        return 0.0
    bar = float(chi2.isf(alpha, cells - 1))
    return float(ncx2.sf(bar, cells - 1, 4 * n * m / (n + m) * shift**2))


def cells_for(sizes: tuple[int, int], shift: float, alpha: float, target: float = POWER, most: int = 40) -> int:
    """The largest number of cells with which `power` reaches the target; 2 where none does."""
    best = 2
    for cells in range(2, most + 1):
        if power(sizes, cells, shift, alpha) >= target:
            best = cells
    return best


def detectable(sizes: tuple[int, int], cells: int, alpha: float, target: float = POWER) -> float:
    """The smallest TV detected with the target power; 1.0 where none is."""
    if power(sizes, cells, 1.0, alpha) < target:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if power(sizes, cells, middle, alpha) >= target else (middle, high)
    return high


def proportion_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a probability."""
    from scipy.stats import beta

    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(beta.isf(tail, successes + 1, trials - successes))
    return low, high


def tv_interval(first: Ints, second: Ints, confidence: float = 0.95) -> tuple[float, float, float]:
    """Confidence interval of the TV of two distributions over the same categories.

    The limits follow from intervals of all probabilities that hold together; they are exact, and wide.
    """
    n, m = int(first.sum()), int(second.sum())
    used = (first + second) > 0
    first, second = first[used], second[used]
    estimate = float(np.abs(first / n - second / m).sum() / 2)
    each = 1 - (1 - confidence) / (2 * max(1, len(first)))
    one = np.array([proportion_interval(int(count), n, each) for count in first])
    other = np.array([proportion_interval(int(count), m, each) for count in second])
    over, under = one[:, 1] - other[:, 0], other[:, 1] - one[:, 0]
    high = min(1.0, float(np.maximum(over, 0).sum()), float(np.maximum(under, 0).sum()))
    surely = np.maximum(one[:, 0] - other[:, 1], 0).sum(), np.maximum(other[:, 0] - one[:, 1], 0).sum()
    return estimate, float(max(surely)), max(high, estimate)


def kolmogorov_interval(first: Floats, second: Floats, confidence: float = 0.95) -> tuple[float, float, float]:
    """Largest difference of two distribution functions, with confidence limits; a lower bound of the TV."""
    points = np.unique(np.concatenate([first, second]))
    one = np.searchsorted(np.sort(first), points, side="right") / len(first)
    other = np.searchsorted(np.sort(second), points, side="right") / len(second)
    estimate = float(np.abs(one - other).max())
    tail = math.log(2 / ((1 - confidence) / 2))
    margin = math.sqrt(tail / (2 * len(first))) + math.sqrt(tail / (2 * len(second)))
    return estimate, max(0.0, estimate - margin), min(1.0, estimate + margin)


# Calibration.


def calibrate(
    labels: Ints,
    values: Floats,
    rng: np.random.Generator,
    *,
    runs: int = 200,
    size: int = 200,
    level: float = 0.05,
) -> dict[str, Any]:
    """Rejection rate of the tests when both samples come from one distribution: at most ``level``, but for chance.

    Each run draws both samples, with replacement, from the same given sample.

    Args:
        labels: categories, for `homogeneity`.
        values: numbers, for `ranks` and `energy`.
        rng: of all draws.
        runs: number of simulated comparisons.
        size: rows per side; `energy` uses a quarter of them.
        level: level of each of the three tests, and of Holm's procedure over them.

    Returns:
        Rejections of each test and of Holm's procedure, and whether their 99.9 % intervals allow the level.
    """
    rejected = {"homogeneity": 0, "ranks": 0, "energy": 0, "any, by Holm": 0}
    for _ in range(runs):
        picked = rng.integers(len(labels), size=2 * size), rng.integers(len(values), size=2 * size)
        chosen = values[picked[1]]
        few = np.concatenate([chosen[: size // 4], chosen[size : size + size // 4]])[:, None]
        p = {
            "homogeneity": homogeneity("", labels[picked[0]], size, rng, 399).p,
            "ranks": ranks("", chosen, size, rng, 399).p,
            "energy": energy("", few, size // 4, rng, 399).p,
        }
        for name, value in p.items():
            rejected[name] += value <= level
        rejected["any, by Holm"] += min(holm(p).values()) <= level
    limits = {name: proportion_interval(count, runs, 0.999)[0] for name, count in rejected.items()}
    return {
        "runs": runs,
        "level": level,
        "rejected": rejected,
        "within the level": all(low <= level for low in limits.values()),
    }
