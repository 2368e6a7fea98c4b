"""Full weights on every process: a single process, or data parallelism by accelerate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bpo_ref.distributed.strategy import Item, MakeOptimizer, Strategy, finite_step
from bpo_ref.learning.models import CausalLM


class Replicated(Strategy):
    """Strategy of full weights on every process; gradients are reduced once, in the last backward pass of a step."""

    sharded = False

    def place(self, network: CausalLM, make_optimizer: MakeOptimizer) -> None:
        """Prepare the network with accelerate, which wraps it where there are several processes."""
        self.network = network
        self.model, self.optimizer = self.accelerator.prepare(network, make_optimizer(network))

    def frozen(self, model: CausalLM) -> CausalLM:
        """Return a frozen model unchanged."""
        return model

    def gathered(self, *others: CausalLM) -> AbstractContextManager[None]:
        """Do nothing: the weights are always whole."""
        return nullcontext()

    def accumulate(
        self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None], *, idle: Item
    ) -> None:
        """Reduce gradients in the last batch only, so processes may have different numbers of batches."""
        for batch in batches[:-1]:
            with self.accelerator.no_sync(self.model):
                backward(batch)
        backward(batches[-1])

    def step(self) -> float:
        """Step through accelerate; skip the step where the gradient is not finite."""
        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
        return finite_step(self.optimizer, float(norm))

    def restart(self, make_optimizer: MakeOptimizer) -> None:
        """Replace the optimizer by a new one."""
        self.optimizer = self.accelerator.prepare(make_optimizer(self.network))

    def whole(self, policy: CausalLM) -> dict[str, Any] | None:
        """Return None: every process has all trained weights."""
        return None

    def value_head(self) -> dict[str, Any]:
        """Return the value head's weights unchanged."""
        state: dict[str, Any] = self.network.value_head.state_dict()
        return state

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer state unchanged."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the optimizer state unchanged."""
        self.optimizer.load_state_dict(state)
