"""The interface of weight placement: where weights are on the processes of a run, and the steps they make together.

`replicated.Replicated` holds everything on every process, `fsdp2.Fsdp2` and `zero3.Zero3` shard it. To add
another, write a class with the methods of `Strategy` and add a line to `chosen`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from bpo_ref.learning.models import CausalLM

Item = TypeVar("Item")

MakeOptimizer: TypeAlias = Callable[[CausalLM], torch.optim.Optimizer]
"""Factory of a new optimizer over the trained parameters of a network."""


class Strategy(ABC):
    """The network of a run as its processes share it, with its optimizer.

    Args:
        accelerator: accelerator of the run.
        dtype: compute dtype.
        clip: largest norm of a gradient.
    """

    sharded: bool
    """True if weights are sharded over the processes. All must then run the same number of forward and backward
    passes, except where `gathered` holds the full weights."""
    network: Any
    """The bare model, with its value head if it has one; a sharded one has full weights inside `gathered` only."""
    model: Any
    """The model wrapped for its processes: the one that is trained."""
    optimizer: Any

    def __init__(self, accelerator: Accelerator, *, dtype: torch.dtype, clip: float) -> None:
        self.accelerator, self.dtype, self.clip = accelerator, dtype, clip

    def check(self, *, adapters: bool, critic: bool) -> None:
        """Refuse a run that this strategy cannot train.

        Raises:
            ConfigError: naming the setting, or what the launcher asked for.
        """
        return  # most strategies can do everything

    # The network.

    @abstractmethod
    def place(self, network: CausalLM, make_optimizer: MakeOptimizer) -> None:
        """Put a network on the processes' devices, with a new optimizer; every process holds the same weights."""

    @abstractmethod
    def frozen(self, model: CausalLM) -> CausalLM:
        """Place a model that is never trained, which is on this process's device already."""

    @abstractmethod
    def gathered(self, *others: CausalLM) -> AbstractContextManager[None]:
        """Hold the full weights of the network, and of models that `frozen` has returned, inside the block.

        Within it processes may run as many forward passes as they like.
        """

    # Optimizer steps.

    @abstractmethod
    def accumulate(
        self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None], *, idle: Item
    ) -> None:
        """Run backward passes whose gradients are reduced over the processes; ``idle`` is a batch with zero loss."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss that is a sum over the processes; their reduction takes the mean."""
        self.accelerator.backward(loss * self.accelerator.num_processes)

    @abstractmethod
    def step(self) -> float:
        """Make an optimizer step with the gradient clipped; returns its norm before that, which may not be finite."""

    @abstractmethod
    def restart(self, make_optimizer: MakeOptimizer) -> None:
        """Start again with an optimizer that has made no step."""

    # State. All processes have to ask for it; it does not tell how many there were.

    @abstractmethod
    def whole(self, policy: CausalLM) -> dict[str, Any] | None:
        """Return the policy's trained weights, put together from the processes' shards; None: each process has all."""

    @abstractmethod
    def value_head(self) -> dict[str, Any]:
        """Return the weights of the network's value head."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """Return the full optimizer state."""

    @abstractmethod
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the result of `optimizer_state`."""


def finite_step(optimizer: Any, norm: float) -> float:
    """Make an optimizer step unless the gradient is not finite; returns its norm."""
    if math.isfinite(norm):
        optimizer.step()
        optimizer.zero_grad()
    return norm


def in_step(
    accelerator: Accelerator,
    batches: Sequence[Sequence[Item]],
    backward: Callable[[Sequence[Item], bool], None],
    idle: Item,
) -> None:
    """Run the same number of backward passes on every process: those with fewer batches add ``idle`` ones of zero loss.

    Sharded weights are gathered by all processes together. ``backward`` is also told whether a batch is the last.
    """
    lengths = gather_object([len(batches)]) if accelerator.num_processes > 1 else [len(batches)]
    rounds = max(lengths)
    for number, batch in enumerate([*batches, *([idle],) * (rounds - len(batches))], start=1):
        backward(batch, number == rounds)
