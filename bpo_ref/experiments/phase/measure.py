"""Measurement of the sweeps' cells by the trainer's own rollouts and credit; finished cells are lines of a file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.experiments.phase import household
from bpo_ref.experiments.phase.chain import Chain, ChainEnv, Coin, exact_gradient, gradient, memory_of, predicted
from bpo_ref.experiments.variance import Estimate, interval
from bpo_ref.schedules import make_schedule
from bpo_ref.train import assign_credit
from sandboxgym.tree import Envs, Policy, RolloutTree, rollout

METHODS = {"rloo": 8, "rloo-pooled": 8, "bpo": 4}
"""Algorithms and their independent rollouts per task, as in docs/results/details/variance-*.md; `rloo` is the unit."""
FIRSTS, QUALITIES = (0, 3, 6, 9), (0.0, 0.25, 0.5, 0.75, 1.0)
"""Cells of the chain: first turn of the window of three, and ρ."""
DECISIONS, COARSE = (1, 5, 9), (0.0, 1.0)
"""Cells of the games: turn of the decision, and ρ."""
CHAIN_TREES, GAME_TREES, GAMES = 200, 40, 6
GROUPS = {"chain": 10, "alfworld": 4}
"""Groups of trees; intervals are over groups."""
BOOTSTRAP, SEED = 2000, 0


@dataclass(frozen=True)
class Cell:
    """A finished measurement of one method.

    Attributes:
        world: ``chain`` or ``alfworld``.
        first: turn of the first decision that counts.
        quality: ρ of V̂.
        method: the algorithm.
        lateness: L of the chain, or of the chain that the games are.
        trees: number of trees.
        noise: trace of the covariance of a tree's gradient.
        tokens: mean number of tokens per tree.
        returns: mean number of returns (paths) per tree.
        cost: noise x tokens, relative to `rloo`, with its 90 % interval.
        scale: projection of the mean gradient on the exact one, with its 90 % interval.
        formula: the cost by the variance formula.
        seconds: wall-clock time of the cell's methods together.
    """

    world: str
    first: int
    quality: float
    method: str
    lateness: float
    trees: int
    noise: float
    tokens: float
    returns: float
    cost: Estimate
    scale: Estimate
    formula: float
    seconds: float


def settings(method: str, turns: int) -> Args:
    """Resolved settings of a method of the sweeps."""
    fixed: dict[str, Any] = {
        "algo": method,
        "aggregation": "constant",
        "kl": 0.0,
        "value_decay": 1.0,
        "max_turns": turns,
    }
    return resolved(Args(roots=METHODS[method], **fixed), keyed=True)


def formula(chain: Chain, method: str, quality: float) -> float:
    """A method's cost relative to `rloo` by the variance formula."""
    mine, rloo = (predicted(chain, settings(name, chain.steps), quality) for name in (method, "rloo"))
    return mine.noise * mine.tokens / (rloo.noise * rloo.tokens)


@dataclass(frozen=True)
class World:
    """Parts of a cell: environments, policy, the memory of a method, the gradient of a tree."""

    chain: Chain
    envs: Envs
    policy: Policy
    tasks: list[int]
    memory: Callable[[Args], Memory]
    gradient: Callable[[RolloutTree], NDArray[np.float64]]
    exact: NDArray[np.float64]


def of_chain(first: int, quality: float, trees: int = CHAIN_TREES) -> World:
    """Make a cell of the chain."""
    chain = Chain(first)
    return World(
        chain,
        Envs(lambda: ChainEnv(chain, quality)),
        Coin(chain),
        [0] * trees,
        lambda args: memory_of(chain, args, quality),
        partial(gradient, chain=chain),
        exact_gradient(chain),
    )


def of_games(decision: int, quality: float, trees: int = GAME_TREES) -> World:
    """Make a cell of the games."""
    chain = household.chain_of(decision)
    envs = Envs(lambda: household.VagueKeys(decision, quality))
    env = envs.take()
    assert isinstance(env, household.VagueKeys)
    scripts = household.scripts(env, GAMES)
    envs.give(env)
    drawn = [scripts[number % GAMES] for number in range(trees)]
    exact = np.zeros(household.TURNS)
    exact[decision] = chain.spread
    return World(
        chain,
        envs,
        household.Actor(drawn, decision),
        [script.game for script in drawn],
        lambda args: household.memory_for(decision, args, quality),
        partial(household.gradient, chain=chain),
        np.concatenate([exact, -exact]),
    )


def sampled(world: World, methods: Mapping[str, Args], *, seed: int) -> Iterator[tuple[str, Any, Any]]:
    """Roll out trees, shared by methods with the same schedule and number of rollouts.

    Yields:
        A method, the gradients [trees, parameters], and returns, environment steps and tokens [trees, 3].
    """
    kept: dict[Any, list[RolloutTree]] = {}
    for name, args in methods.items():
        memory, drawn = world.memory(args), (args.schedule, args.roots)
        if drawn not in kept:
            schedule = make_schedule(args, (seed,), memory, tasks=world.tasks)
            kept[drawn] = rollout(world.envs, world.policy, schedule, tasks=world.tasks, seed=(seed,))
        assign_credit(kept[drawn], args, memory)
        spent = [[len(tree.paths), tree.env_steps, tree.tokens] for tree in kept[drawn]]
        yield name, np.array([world.gradient(tree) for tree in kept[drawn]]), np.array(spent, dtype=float)


def measured(name: str, first: int, quality: float, world: World, *, seed: int = SEED) -> list[Cell]:
    """Measure a cell's methods; the cost is that of `bpo_ref.variance`, never divided by a measured scale."""
    began = time.perf_counter()
    methods = {method: settings(method, world.chain.steps) for method in METHODS}
    found = {method: (g, spent) for method, g, spent in sampled(world, methods, seed=seed)}
    seconds = time.perf_counter() - began
    groups, size = GROUPS[name], len(world.tasks) // GROUPS[name]
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=BOOTSTRAP)
    weights = np.concatenate([np.ones((1, groups)), drawn]) / groups  # the first is the sample itself

    def parts(g: NDArray[np.float64], spent: NDArray[np.float64]) -> tuple[Any, Any, Any]:
        grouped = g[: groups * size].reshape(groups, size, -1)
        noise = weights @ grouped.var(axis=1, ddof=1).sum(axis=-1)
        scale = weights @ grouped.mean(axis=1) @ world.exact / (world.exact @ world.exact)
        return noise, scale, weights @ spent[: groups * size, 2].reshape(groups, size).mean(axis=1)

    unit, _, tokens = parts(*found["rloo"])
    cells = []
    for method, (g, spent) in found.items():
        noise, scale, mine = parts(g, spent)
        cost = interval(noise * mine / (unit * tokens))
        cells.append(
            Cell(
                name,
                first,
                quality,
                method,
                world.chain.lateness,
                groups * size,
                float(noise[0]),
                float(mine[0]),
                float(spent[:, 0].mean()),
                cost,
                interval(scale),
                formula(world.chain, method, quality),
                round(seconds, 1),
            )
        )
    world.envs.close()
    return cells


def read_cells(path: Path) -> list[Cell]:
    """The cells of a file; none if it is not there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [
        Cell(**{**record, **{name: Estimate(**record[name]) for name in ("cost", "scale")}})
        for record in map(json.loads, lines)
    ]


def rounded(value: Any) -> Any:
    """Data with numbers of five digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value


def sweep(name: str, path: Path) -> None:
    """Measure the cells of ``chain`` or ``alfworld`` that a file does not have yet, and append them to it."""
    firsts, qualities = (FIRSTS, QUALITIES) if name == "chain" else (DECISIONS, COARSE)
    have = {(cell.first, cell.quality) for cell in read_cells(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for first in firsts:
        for quality in qualities:
            if (first, quality) not in have:
                world = of_chain(first, quality) if name == "chain" else of_games(first, quality)
                cells = measured(name, first, quality, world)
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(rounded(asdict(cell))) + "\n" for cell in cells)
                print(
                    *(f"{cell.method} {cell.cost} formula {cell.formula:.2f}" for cell in cells), sep=" | ", flush=True
                )
