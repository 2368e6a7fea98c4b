"""How weights lie on the processes of a run, and the steps that all processes make together: one interface for all.

`replicated.Replicated` holds everything on every process, `fsdp2.Fsdp2` and `zero3.Zero3` spread it. A further one is a
class with the methods of `Strategy`, and a line in `chosen`.
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
"""A new optimizer over the parameters of a network that are trained."""


class Strategy(ABC):
    """The network of a run as its processes share it, with its optimizer.

    Args:
        accelerator: of the run.
        dtype: what is computed in.
        clip: largest norm of a gradient.
    """

    sharded: bool
    """Whether weights are spread over the processes. Then all have to run the same number of forward and backward
    passes, but where `gathered` holds the weights whole."""
    network: Any
    """The bare model, with its value head where there is one; where it is spread, whole while `gathered`."""
    model: Any
    """It as the processes share it: what is trained."""
    optimizer: Any

    def __init__(self, accelerator: Accelerator, *, dtype: torch.dtype, clip: float) -> None:
        self.accelerator, self.dtype, self.clip = accelerator, dtype, clip

    def check(self, *, adapters: bool, critic: bool) -> None:
        """Refuse what cannot be trained in this way.

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
        """Put a model there that is only asked, on this process's device already."""

    @abstractmethod
    def gathered(self, *others: CausalLM) -> AbstractContextManager[None]:
        """Hold the weights of the network, and of models that `frozen` has given, whole for the time being.

        Within it processes may run as many forward passes as they like.
        """

    # Optimizer steps.

    @abstractmethod
    def accumulate(
        self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None], *, idle: Item
    ) -> None:
        """Run backward passes whose gradients are reduced over the processes; ``idle`` is a batch of no loss."""

    def backward(self, loss: Tensor) -> None:
        """Add up gradients of a loss that is a sum over the processes; their reduction takes the mean."""
        self.accelerator.backward(loss * self.accelerator.num_processes)

    @abstractmethod
    def step(self) -> float:
        """Make an optimizer step with the gradient clipped; returns the norm that it had, which may not be finite."""

    @abstractmethod
    def restart(self, make_optimizer: MakeOptimizer) -> None:
        """Go on with an optimizer that has made no step."""

    # State. All processes have to ask for it; it does not tell how many there were.

    @abstractmethod
    def whole(self, policy: CausalLM) -> dict[str, Any] | None:
        """What the policy has learnt, put together from the processes' parts; None: each has all of it."""

    @abstractmethod
    def value_head(self) -> dict[str, Any]:
        """The weights of the network's value head."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """The whole state of the optimizer."""

    @abstractmethod
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take what `optimizer_state` has given."""


def finite_step(optimizer: Any, norm: float) -> float:
    """Make an optimizer step, unless the gradient is not finite; returns its norm."""
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
    """Run backward passes, as many on every process: those with fewer batches do ``idle`` ones, of no loss.

    Sharded weights are gathered by all processes at a time. ``backward`` is also told whether a batch is the last.
    """
    lengths = gather_object([len(batches)]) if accelerator.num_processes > 1 else [len(batches)]
    rounds = max(lengths)
    for number, batch in enumerate([*batches, *([idle],) * (rounds - len(batches))], start=1):
        backward(batch, number == rounds)
