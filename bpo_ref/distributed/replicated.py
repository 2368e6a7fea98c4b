"""All weights on every process: one process, or data parallel by accelerate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bpo_ref.distributed.strategy import Item, MakeOptimizer, Strategy, finite_step
from bpo_ref.learning.models import CausalLM


class Replicated(Strategy):
    """Gradients are reduced once, in the last backward pass of a step."""

    sharded = False

    def place(self, network: CausalLM, make_optimizer: MakeOptimizer) -> None:
        """By accelerate, which wraps it where there are several processes."""
        self.network = network
        self.model, self.optimizer = self.accelerator.prepare(network, make_optimizer(network))

    def frozen(self, model: CausalLM) -> CausalLM:
        """It stays as it is."""
        return model

    def gathered(self, *others: CausalLM) -> AbstractContextManager[None]:
        """Weights are always whole."""
        return nullcontext()

    def accumulate(
        self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None], *, idle: Item
    ) -> None:
        """Without communication but in the last: processes may differ in their numbers of batches."""
        for batch in batches[:-1]:
            with self.accelerator.no_sync(self.model):
                backward(batch)
        backward(batches[-1])

    def step(self) -> float:
        """By accelerate; none where the gradient is not finite."""
        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
        return finite_step(self.optimizer, float(norm))

    def restart(self, make_optimizer: MakeOptimizer) -> None:
        """A new optimizer."""
        self.optimizer = self.accelerator.prepare(make_optimizer(self.network))

    def whole(self, policy: CausalLM) -> dict[str, Any] | None:
        """Every process has all of it."""
        return None

    def value_head(self) -> dict[str, Any]:
        """As it is."""
        state: dict[str, Any] = self.network.value_head.state_dict()
        return state

    def optimizer_state(self) -> dict[str, Any]:
        """As it is."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """As it is."""
        self.optimizer.load_state_dict(state)
