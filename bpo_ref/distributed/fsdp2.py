"""Weights sharded over processes by FSDP2's ``fully_shard``, on GPUs and, with gloo, on CPUs.

``accelerate launch`` with an FSDP configuration asks for it and gives the number of processes; the rest of that file is
ignored here. Each layer is one unit, its weights gathered for its forward and backward passes.

What this module promises:

1. `gathered` holds all weights whole: nothing is communicated inside, so that every process may sample as many turns
   and run as many forward passes as it likes.
2. Outside, every process has to run the same number of forward and backward passes (`Fsdp2.accumulate` sees to it).
3. `full_state` and `optimizer_state` are those of an unsharded run: checkpoints do not depend on the strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bpo_ref.distributed.strategy import Item, MakeOptimizer, Strategy, finite_step, in_step
from bpo_ref.learning.models import ActorCritic, CausalLM, policy_of

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def wanted() -> bool:
    """Tell whether the launcher asked for FSDP (accelerate's environment variable)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def shard(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Shard the weights of a causal model over all processes, in place; frozen ones and adapters too.

    Args:
        model: a transformers or PEFT model; every process holds the same weights. An already sharded one is left alone.
        device: device of this process; the model is moved there.
        dtype: compute dtype, of gathered weights too. The shards keep their own, gradients are reduced in fp32.
    """
    if isinstance(model, FSDPModule):
        return
    model.to(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = set(getattr(model, "_no_split_modules", None) or ())  # transformers' names of its classes of layers
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # The backward pass begins with the root's own weights: they stay gathered after the forward pass.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


@contextmanager
def gathered(*models: nn.Module) -> Iterator[None]:
    """Hold the full weights inside the block; models that are not sharded have them already."""
    parts = [(model, part) for model in models for part in model.modules() if isinstance(part, FSDPModule)]
    for _, part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for model, part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()


def full_state(model: nn.Module) -> dict[str, Any]:
    """Collect the full trained weights on the CPU of the first process; all processes have to call it."""
    return get_model_state_dict(model, options=WHOLE)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collect the full optimizer state by weight name, on the CPU of the first process; all processes call it."""
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the result of `optimizer_state`, read by the first process and sent to the others; all processes call it."""
    mine = state if torch.distributed.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, mine, options=options)


class Fsdp2(Strategy):
    """Weights, gradients and optimizer sharded over the processes, layer by layer."""

    sharded = True

    def place(self, network: CausalLM, make_optimizer: MakeOptimizer) -> None:
        """Shard the policy and its value head, whose weights stay in fp32."""
        self.network = self.model = network
        shard(policy_of(network), device=self.accelerator.device, dtype=self.dtype)
        if isinstance(network, ActorCritic):
            shard(network.value_head, device=self.accelerator.device, dtype=torch.float32)
        self.optimizer = make_optimizer(network)

    def frozen(self, model: CausalLM) -> CausalLM:
        """Shard a frozen model like the network."""
        shard(model, device=self.accelerator.device, dtype=self.dtype)
        return model

    def gathered(self, *others: CausalLM) -> AbstractContextManager[None]:
        """Gather the network's full weights; a view of the network, like that without its adapters, needs nothing."""
        held = (policy_of(self.network), *others)
        return gathered(*(model for model in held if isinstance(model, nn.Module)))

    def accumulate(
        self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None], *, idle: Item
    ) -> None:
        """Accumulate with the same number of passes on every process, because each pass gathers the weights."""
        in_step(self.accelerator, batches, lambda batch, last: backward(batch), idle)

    def step(self) -> float:
        """Clip by the norm over all processes' shards; no step where it is not finite."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return finite_step(self.optimizer, float(norm.full_tensor()))

    def restart(self, make_optimizer: MakeOptimizer) -> None:
        """Replace the optimizer by a new one."""
        self.optimizer = make_optimizer(self.network)

    def whole(self, policy: CausalLM) -> dict[str, Any] | None:
        """Collect the trained weights on the CPU of the first process."""
        return full_state(policy)

    def value_head(self) -> dict[str, Any]:
        """Collect the value head's weights on the CPU of the first process."""
        return full_state(self.network.value_head)

    def optimizer_state(self) -> dict[str, Any]:
        """Collect the optimizer state by weight name."""
        return optimizer_state(self.model, self.optimizer)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the optimizer state that the first process has read, on every process."""
        load_optimizer_state(self.model, self.optimizer, state)
