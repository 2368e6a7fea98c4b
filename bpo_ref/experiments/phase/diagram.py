"""The figure and the tables of docs/results/phase-diagram.md, from the data in docs/results/data/phase."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bpo_ref.experiments.phase.chain import Chain
from bpo_ref.experiments.phase.measure import METHODS, Cell, formula, read_cells
from bpo_ref.experiments.variance import Estimate, Line, read_lines

FOLDER = Path("results/data/phase")
PICTURE = Path("results/details/phase-diagram.png")
WORLDS = {"chain": "the chain", "alfworld": "ALFWorld games with one decision"}
STARTS = tuple(range(10))
"""First turns of the window for which the formula is drawn."""
QUALITIES = tuple(np.linspace(0, 1, 11).tolist())
PAYS = 0.9
"""`bpo` is recommended if its cost is at most this share of that of `rloo-pooled`, because snapshots cost time, too."""


SETTINGS = {
    "ALFWorld": "variance-alfworld",
    "WebShop, memorised": "variance-webshop",
    "WebShop, new goals": "variance-webshop-choice",
    "WebShop, new goals, worth as key": "variance-webshop-worth",
    "WebShop, training goals, worth as key": "variance-lookahead-large",
    "WebShop, formula, worth as key": "variance-lookahead-shop",
    "WebShop, formula": "variance-lookahead-shop-options",
}
"""Settings of other policies, and the studies of docs/results/details that measured their costs."""


@dataclass(frozen=True)
class DiagramSetting:
    """The place of a setting, measured with a policy made by the commands of its study.

    Attributes:
        name: one of `SETTINGS`.
        lateness: L.
        quality: ρ of the baseline of `rloo-pooled`.
        reward: mean return of the policy.
        turns: mean number of turns.
        tasks: number of tasks.
        batches: batches measured, and batches that V̂ has learned from.
    """

    name: str
    lateness: Estimate
    quality: Estimate
    reward: float
    turns: float
    tasks: int
    batches: tuple[int, int]


@cache
def grid(method: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """L of each start of the window, and the formula's cost of a method, [qualities, starts]."""
    chains = [Chain(first) for first in STARTS]
    costs = [[formula(chain, method, quality) for chain in chains] for quality in QUALITIES]
    return np.array([chain.lateness for chain in chains]), np.array(costs, dtype=float)


def cost_at(method: str, lateness: float, quality: float) -> float:
    """The chain's cost of a method at any L and ρ, by interpolation; beyond the chain's own values, that of its end."""
    late, costs = grid(method)
    across = [float(np.interp(lateness, late, row)) for row in costs]
    return float(np.interp(quality, QUALITIES, across))


def along(product: float) -> tuple[float, float]:
    """Lowest and highest cost of `bpo` where ρ (1 - L) is ``product``, which the cost of `rloo-pooled` determines."""
    costs = [
        cost_at("bpo", late, max(0.0, product) / (1 - late))
        for late in np.linspace(grid("bpo")[0][0], grid("bpo")[0][-1], 100)
        if product <= 1 - late
    ]
    return min(costs), max(costs)


def read_settings(docs: Path) -> list[DiagramSetting]:
    """Read the measured settings from the data committed below ``docs``."""
    path = docs / FOLDER / "settings.jsonl"
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else [])
    return [
        DiagramSetting(
            **{
                **record,
                **{name: Estimate(**record[name]) for name in ("lateness", "quality")},
                "batches": tuple(record["batches"]),
            }
        )
        for record in records
    ]


def measured_cost(docs: Path, setting: str, method: str) -> Estimate:
    """The cost in tokens that a setting's study has measured."""
    lines: Sequence[Line] = read_lines(docs / "results" / "details" / f"{SETTINGS[setting]}.json")
    alias = {"bpo": "bpo-split:baseline=pooled,roulette=0.5"}.get(method, method)
    return next(line.cost["tokens"] for line in lines if line.name.removesuffix(":roots=8") in (method, alias))


def table(docs: Path, kind: str) -> str:
    """The Markdown table of the ``rule``, of the ``chain``, of the games (``alfworld``) or of the ``settings``.

    Raises:
        KeyError: there is none of that name.
    """
    return {"rule": _rule, "chain": _cells, "alfworld": _cells, "settings": _settings}[kind](docs, kind)


def _rule(docs: Path, _: str) -> str:
    late, costs = grid("bpo")
    ratio, good = costs / grid("rloo-pooled")[1], np.array(QUALITIES)
    columns = {"ρ up to 0.7": good < 0.75, "ρ 0.8 to 0.9": (good > 0.75) & (good < 0.95), "V̂ exact": good > 0.95}
    rows = {
        "in the first half: L up to 0.5": late < 0.5,
        "a little later: L 0.5 to 0.65": (late > 0.5) & (late < 0.65),
        "in the last third: L from 0.65": late > 0.65,
    }
    text = [f"| decided | {' | '.join(columns)} |", "|" + "---|" * 4]
    for name, here in rows.items():
        parts = [ratio[np.ix_(some, here)] for some in columns.values()]
        text.append(f"| {name} | {' | '.join(f'{part.min():.2f} to {part.max():.2f}' for part in parts)} |")
    return "\n".join(text)


def _cells(docs: Path, world: str) -> str:
    methods = [method for method in METHODS if method != "rloo"]
    heads = [f"`{method}`: {what}" for method in methods for what in ("formula", "measured")]
    rows = [f"| L | ρ | {' | '.join(heads)} | rollouts, tokens of `bpo` |", "|" + "---|" * (len(heads) + 3)]
    cells = {(c.first, c.quality, c.method): c for c in read_cells(docs / FOLDER / f"{world}.jsonl")}
    for first, quality in dict.fromkeys((first, quality) for first, quality, _ in cells):
        found = [cells[first, quality, method] for method in methods]
        costs = " | ".join(f"{cell.formula:.2f} | {cell.cost}" for cell in found)
        tree = cells[first, quality, "bpo"]
        rows.append(f"| {tree.lateness:.2f} | {quality:g} | {costs} | {tree.returns:.1f}, {tree.tokens:.0f} |")
    return "\n".join(rows)


def _settings(docs: Path, _: str) -> str:
    heads = ["setting", "L", "ρ", "`rloo-pooled`: predicted", "measured", "`bpo`: predicted", "measured"]
    alone = "`bpo`: predicted from the cost of `rloo-pooled` alone"
    rows = [f"| {' | '.join([*heads, alone])} |", "|" + "---|" * (len(heads) + 1)]
    places = {setting.name: setting for setting in read_settings(docs)}
    for name, study in SETTINGS.items():
        shown, place = [f"[{name}](details/{study.removesuffix('-options')}.md)"], places.get(name)
        shown += [str(place.lateness), str(place.quality)] if place else ["not measured"] * 2
        for method in ("rloo-pooled", "bpo"):
            cost = f"{cost_at(method, place.lateness.value, place.quality.value):.2f}" if place else ""
            shown += [cost, str(measured_cost(docs, name, method))]
        low, high = along(1 - 8 / 7 * measured_cost(docs, name, "rloo-pooled").value)
        rows.append(f"| {' | '.join(shown)} | {low:.2f} to {high:.2f} |")
    return "\n".join(rows)


def plot(docs: Path, path: Path) -> None:
    """Draw the costs of both estimators, the regions, and the formula against all measurements."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((pooled, tree), (regions, check)) = plt.subplots(2, 2, figsize=(11, 10))
    cells = [cell for world in WORLDS for cell in read_cells(docs / FOLDER / f"{world}.jsonl")]
    for axis, method in ((pooled, "rloo-pooled"), (tree, "bpo")):
        late, costs = grid(method)
        lines = axis.contour(late, QUALITIES, costs, levels=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2), colors="0.6")
        axis.clabel(lines, fmt="%g", fontsize=8)
        for cell in cells:
            if cell.method == method and cell.world == "chain":
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "0.3", "linewidth": 0.6}
                axis.text(
                    cell.lateness,
                    cell.quality,
                    f"{cell.cost.value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    bbox=box,
                )
        axis.set_title(f"{method}: cost relative to RLOO\nlines: formula, boxes: measured on the chain", fontsize=10)
    _regions(regions, docs)
    _check(check, docs, cells)
    for axis in (pooled, tree, regions):
        axis.set(xlim=(0.08, 1.0), ylim=(-0.07, 1.07), xlabel="L: when the return is decided (0 first step, 1 last)")
        axis.set_ylabel("ρ: quality of V̂ (0 mean return, 1 exact)")
    regions.set_ylim(-0.62, 1.07)  # the lowest ρ, and room for the names
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _regions(axis: object, docs: Path) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    late, costs = grid("bpo")
    ratio = costs / grid("rloo-pooled")[1]
    colours, hatches = ["#9ecae1", "#eff3ff", "#fdd0a2"], [None, None, "//"]
    axis.contourf(late, QUALITIES, ratio, levels=[0, PAYS, 1, 10], colors=colours, hatches=hatches)
    lines = axis.contour(late, QUALITIES, ratio, levels=(0.5, 0.7, PAYS, 1.0, 1.5), colors="0.35", linewidths=0.8)
    axis.clabel(lines, fmt="%g", fontsize=8)
    settings = sorted(read_settings(docs), key=lambda setting: list(SETTINGS).index(setting.name))
    box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    for number, setting in enumerate(settings, 1):
        at = setting.lateness.value, setting.quality.value
        bars = [[[v.value - v.low], [v.high - v.value]] for v in (setting.lateness, setting.quality)]
        axis.errorbar(*at, xerr=bars[0], yerr=bars[1], fmt="k*", markersize=11, elinewidth=0.8, capsize=2)
        beside = (-10 if number % 2 else 10, 4)
        axis.annotate(str(number), at, beside, textcoords="offset points", ha="center", weight="bold", bbox=box)
    names = [f"{number} {setting.name}" for number, setting in enumerate(settings, 1)]
    for column, place in ((names[:4], 0.02), (names[4:], 0.5)):
        axis.text(place, 0.02, "\n".join(column), fontsize=7, va="bottom", transform=axis.transAxes, bbox=box)
    axis.set_title(
        "cost of bpo relative to rloo-pooled: formula\nhatched: rloo-pooled is cheaper; blue: bpo by a tenth",
        fontsize=10,
    )


def _check(axis: object, docs: Path, cells: Sequence[Cell]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    fills = {"rloo-pooled": ("#d62728", "white"), "bpo": ("#2ca02c", "#2ca02c")}
    for method, (colour, fill) in fills.items():
        for world, mark in (("chain", "o"), ("alfworld", "s")):
            found = [cell for cell in cells if cell.method == method and cell.world == world]
            x, y = [cell.formula for cell in found], [cell.cost.value for cell in found]
            axis.plot(x, y, mark, color=colour, markerfacecolor=fill, markersize=6, label=f"{method}, {WORLDS[world]}")
        settings = [(cost_at(method, s.lateness.value, s.quality.value), measured_cost(docs, s.name, method))
                    for s in read_settings(docs)]  # fmt: skip
        if settings:
            y = [cost.value for _, cost in settings]
            bars = [[cost.value - cost.low for _, cost in settings], [cost.high - cost.value for _, cost in settings]]
            axis.errorbar(
                [x for x, _ in settings], y, yerr=bars, fmt="*", color=colour, markerfacecolor=fill, markersize=13,
                elinewidth=1, capsize=3, label=f"{method}, other policies (90 % CI)",
            )  # fmt: skip
    axis.plot([0.05, 2], [0.05, 2], color="0.6", linewidth=1)
    axis.set(xscale="log", yscale="log", xlim=(0.05, 2), ylim=(0.05, 2))
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("predicted cost relative to RLOO")
    axis.set_ylabel("measured cost relative to RLOO")
    axis.legend(fontsize=8, loc="lower right")
    axis.set_title(
        "prediction against measurement\n(other policies: their L and ρ on the chain's formula)", fontsize=10
    )
