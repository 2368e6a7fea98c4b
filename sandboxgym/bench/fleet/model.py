"""A model of a fleet in lockstep, fitted to measurements, and its simulation for clusters of any size.

In each step of a rollout an owner packs and sends a message to every worker, one after the other; the workers execute
their environments' steps one after the other, all workers side by side; and the owner reads the answers in the order
in which they come. What an owner spends is fitted: so much per message, and so much per environment.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds of an owner."""

    per_message: float
    """Seconds for sending a message and reading its answer."""
    per_step: float
    """Seconds for the step of one environment in a message."""


@dataclass(frozen=True, slots=True)
class OwnerCosts:
    """An owner's processor seconds in one step of all environments."""

    messages: int
    steps: int
    seconds: float


def fitted(measured: Sequence[OwnerCosts]) -> Costs:
    """The costs that explain measurements best: least squares of relative errors, none below zero.

    Raises:
        ValueError: fewer than two different ratios of steps to messages, which cannot tell the two costs apart.
    """
    if len({one.steps / one.messages for one in measured}) < 2:
        raise ValueError("expected measurements with at least two numbers of steps per message")
    weights = np.array([1.0 / one.seconds for one in measured])
    rows = np.array([[one.messages, one.steps] for one in measured]) * weights[:, None]
    message, step = np.linalg.lstsq(rows, np.ones(len(measured)), rcond=None)[0]
    if message < 0.0:
        message, step = 0.0, float(np.linalg.lstsq(rows[:, 1:], np.ones(len(measured)), rcond=None)[0][0])
    if step < 0.0:
        message, step = float(np.linalg.lstsq(rows[:, :1], np.ones(len(measured)), rcond=None)[0][0]), 0.0
    return Costs(float(message), float(step))


@dataclass(frozen=True, slots=True)
class Simulation:
    """Outcome of a simulation of a fleet."""

    steps_per_second: float
    owner: float
    """Share of the time in which an owner's processor is busy."""


def simulate(
    costs: Costs,
    *,
    workers: int,
    envs: int,
    step: float,
    spread: float = 0.3,
    latency: float = 0.0005,
    owners: int = 1,
    rounds: int = 20,
    seed: int = 0,
) -> Simulation:
    """Simulate steps of all environments in lockstep, each owner with its share of the workers.

    Args:
        costs: of an owner.
        workers: in all, divided evenly.
        envs: environments per worker.
        step: mean seconds of one environment's step.
        spread: standard deviation of the logarithm of a step's seconds.
        latency: seconds of a message on its way, in each direction.
        owners: number of owners, side by side, each with a processor of its own.
        rounds: steps of every environment.
        seed: of the step times.

    Raises:
        ValueError: fewer workers than owners.
    """
    if not 1 <= owners <= workers:
        raise ValueError(f"expected between one owner and as many as there are workers ({workers}), found {owners}")
    rng = np.random.default_rng(seed)
    count = -(-workers // owners)  # the largest share, which takes longest
    cost = costs.per_message / 2 + costs.per_step * envs / 2
    now = busy = 0.0
    for _ in range(rounds):
        times = rng.lognormal(-(spread**2) / 2, spread, (count, envs)).sum(1) * step
        back = [now + (index + 1) * cost + latency + seconds + latency for index, seconds in enumerate(times)]
        now += count * cost  # all are sent before the first is read
        heapq.heapify(back)
        while back:
            now = max(now, heapq.heappop(back)) + cost
        busy += 2 * count * cost
    return Simulation(rounds * workers * envs / now, busy / now)


def owners_needed(costs: Costs, *, workers: int, envs: int, step: float, share: float = 0.5) -> int:
    """The smallest power of two of owners each of which is busy for at most a share of the time."""
    owners = 1
    while owners < workers and simulate(costs, workers=workers, envs=envs, step=step, owners=owners).owner > share:
        owners = min(2 * owners, workers)
    return owners
