"""V̂ of a state by a small network on features that the environment gives the trainer only (``info["features"]``).

What this module promises:

1. It has learned from earlier batches only: `ValueNetwork.observe` is the one way in, and look-ahead copies the network
   before a batch is rolled out.
2. The policy never sees a feature: prompts are made of observations and of the listed actions.
3. The same batches give the same network, on one machine; its random streams are its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bpo_ref.config import ConfigError


class Features(NamedTuple):
    """A state, as the network's input."""

    told: tuple[float, ...]
    """The environment's ``info["features"]``."""
    depth: int
    refused: int
    """Number of refused answers in a row: 0, 1, 2 or more."""
    kind: str
    """Type of the task."""


class Example(NamedTuple):
    """A state with its mean return, a training example."""

    state: Features
    value: float
    weight: float


def told_of(info: Any) -> tuple[float, ...]:
    """Validate ``info["features"]``, and convert it to a tuple of numbers.

    Raises:
        ConfigError: they are not finite numbers.
    """
    try:
        told = tuple(float(number) for number in info)
    except (TypeError, ValueError):
        told = (math.nan,)
    if not all(map(math.isfinite, told)):
        raise ConfigError(f"info['features']: expected finite numbers, found {info!r:.100}")
    return told


class ValueNetwork:
    """The mean of `MEMBERS` networks of two hidden layers, fitted to the last batches by squared error.

    Inputs are the features, the turn, the turns left, refusals in a row, and the type of task. After each batch the fit
    continues from the current weights for `STEPS` optimizer steps. Each step draws `SIZE` states from the last `KEPT`
    batches, in proportion to their weights; every later batch multiplies the weights of an earlier one by ``decay``.

    Args:
        limit: turns of an episode.
        decay: share of a batch's weight that is kept at each later one.
        state: result of `state`.
    """

    WIDTH, MEMBERS, KINDS, KEPT, STEPS, SIZE, LR = 64, 2, 8, 16, 150, 256, 3e-3

    def __init__(self, limit: int, decay: float = 1.0, *, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self._limit, self._decay = limit, decay
        self._weights: list[Tensor] = [weight.clone() for weight in state.get("weights", [])]
        self._scale: tuple[float, float] = state.get("scale", (0.0, 1.0))
        self._kinds: dict[str, int] = dict(state.get("kinds", {}))
        self._batches = int(state.get("batches", 0))
        self._kept: deque[tuple[Tensor, Tensor, Tensor]] = deque(state.get("kept", []), maxlen=self.KEPT)

    def state(self) -> dict[str, Any]:
        """State of the value network, for a checkpoint."""
        return {
            "weights": [weight.clone() for weight in self._weights],
            "scale": self._scale,
            "kinds": dict(self._kinds),
            "batches": self._batches,
            "kept": list(self._kept),
        }

    def copy(self) -> ValueNetwork:
        """Copy the network as it is now."""
        return ValueNetwork(self._limit, self._decay, state=self.state())

    @property
    def known(self) -> bool:
        """True once a batch was observed."""
        return bool(self._weights)

    def values(self, states: Sequence[Features]) -> list[float]:
        """V̂ of states; 0 before the first batch."""
        if not self._weights or not states:
            return [0.0] * len(states)
        middle, spread = self._scale
        with torch.no_grad():
            told = self._forward(self._inputs(states)).mean(dim=0)
        return [middle + spread * value for value in told.double().tolist()]

    def observe(self, found: Sequence[Example]) -> None:
        """Fit the network to the last batches, this one included.

        Raises:
            ConfigError: states differ in how many features they have.
        """
        if not found:
            return
        for example in found:
            if len(self._kinds) < self.KINDS:
                self._kinds.setdefault(example.state.kind, len(self._kinds))
        targets, weights = (torch.tensor([e[place] for e in found], dtype=torch.float64) for place in (1, 2))
        self._kept.append((self._inputs([example.state for example in found]), targets, weights))
        self._fit()
        self._batches += 1

    def _inputs(self, states: Sequence[Features]) -> Tensor:
        """Network inputs [number of states, inputs].

        Raises:
            ConfigError: states differ in how many features they have.
        """
        sizes = {len(state.told) for state in states}
        if self._kept:
            sizes.add(self._kept[0][0].shape[1] - 4 - self.KINDS)
        if len(sizes) != 1:
            raise ConfigError(f"info['features']: expected the same number in every state, found {sorted(sizes)}")
        rows = np.zeros((len(states), sizes.pop() + 4 + self.KINDS), dtype=np.float32)
        for row, (told, depth, refused, kind) in zip(rows, states, strict=True):
            turn = depth / self._limit
            row[: len(told) + 4] = (*told, turn, 1.0 - turn, float(refused == 1), float(refused > 1))
            place = self._kinds.get(kind)
            if place is not None:
                row[len(told) + 4 + place] = 1.0
        return torch.from_numpy(rows)

    def _forward(self, inputs: Tensor) -> Tensor:
        """Network outputs [members, states]."""
        a, b, c, d, e, f = self._weights
        hidden = torch.relu(inputs @ a + b)
        return (torch.relu(hidden @ c + d) @ e + f)[..., 0]

    def _fit(self) -> None:
        inputs, targets = (torch.cat(parts) for parts in list(zip(*self._kept))[:2])
        ages = range(len(self._kept) - 1, -1, -1)
        weights = torch.cat([kept[2] * self._decay**age for age, kept in zip(ages, self._kept)])
        chances = (weights / weights.sum()).numpy()
        middle = float(targets @ weights / weights.sum())
        spread = math.sqrt(float((targets - middle) ** 2 @ weights / weights.sum())) or 1.0
        self._scale = middle, spread
        wanted = ((targets - middle) / spread).float()
        if not self._weights:
            self._begin(inputs.shape[1])
        stream = np.random.default_rng([7, self._batches])
        with torch.enable_grad():
            parameters = [weight.requires_grad_() for weight in self._weights]
            optimizer = torch.optim.Adam(parameters, lr=self.LR)
            drawn = stream.choice(len(chances), size=(self.STEPS, self.SIZE), p=chances)
            for step in range(self.STEPS):
                rows = torch.from_numpy(drawn[step])
                optimizer.param_groups[0]["lr"] = self.LR * (1.0 - step / self.STEPS)
                optimizer.zero_grad()
                loss = (self._forward(inputs[rows]) - wanted[rows]).square().mean(dim=1).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        self._weights = [weight.detach() for weight in parameters]

    def _begin(self, size: int) -> None:
        stream = torch.Generator().manual_seed(7)
        sizes = [(size, self.WIDTH), (self.WIDTH, self.WIDTH), (self.WIDTH, 1)]
        for inner, outer in sizes:
            weight = torch.randn(self.MEMBERS, inner, outer, generator=stream) * math.sqrt(2.0 / inner)
            self._weights += [weight * (outer > 1), torch.zeros(self.MEMBERS, 1, outer)]
