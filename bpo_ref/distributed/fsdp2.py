"""Weights spread over processes: FSDP2 by ``fully_shard``, the same on GPUs and, with gloo, on CPUs.

``accelerate launch`` with a configuration of kind FSDP asks for it, and says how many processes there are. The rest of
that file is accelerate's; here each layer is one unit, its weights gathered for its forward and backward passes.

What this module promises:

1. `gathered` holds all weights whole: nothing is communicated inside, so that every process may sample as many turns
   and run as many forward passes as it likes.
2. Outside, every process has to run the same number of forward and backward passes (`Fsdp2.accumulate` sees to it).
3. `full_state` and `optimizer_state` are those of an unsharded run: a checkpoint does not tell how it was made.
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
    """Whether the launcher asked for sharded weights (accelerate's environment variable)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def shard(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Spread the weights of a causal model over all processes, in place; frozen ones and adapters, too.

    Args:
        model: of transformers or PEFT; every process holds the same weights. One that is spread already stays as it is.
        device: of this process; the model is moved there.
        dtype: what is computed in, gathered weights included. The shards stay as they are, gradients are reduced in
            fp32.
    """
    if isinstance(model, FSDPModule):
        return
    model.to(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


@contextmanager
def gathered(*models: nn.Module) -> Iterator[None]:
    """Hold the weights whole for the time being; of models that are not sharded, they are already."""
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
    """The whole weights that are learnt, on the CPU of the first process; all have to call it."""
    return get_model_state_dict(model, options=WHOLE)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state of the optimizer by names of weights, on the CPU of the first process; all have to call it."""
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """What `optimizer_state` has given, which only the first process reads and sends to the others; all call it."""
    mine = state if torch.distributed.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, mine, options=options)


class Fsdp2(Strategy):
    """Weights, gradients and optimizer spread over the processes, layer by layer."""

    sharded = True

    def place(self, network: CausalLM, make_optimizer: MakeOptimizer) -> None:
        """Spread the policy, and its value head, whose weights stay in fp32."""
        self.network = self.model = network
        shard(policy_of(network), device=self.accelerator.device, dtype=self.dtype)
        if isinstance(network, ActorCritic):
            shard(network.value_head, device=self.accelerator.device, dtype=torch.float32)
        self.optimizer = make_optimizer(network)

    def frozen(self, model: CausalLM) -> CausalLM:
        """Spread like the network."""
        shard(model, device=self.accelerator.device, dtype=self.dtype)
        return model

    def gathered(self, *others: CausalLM) -> AbstractContextManager[None]:
        """See the function of this name; a view of the network, like that without its adapters, needs nothing."""
        held = (policy_of(self.network), *others)
        return gathered(*(model for model in held if isinstance(model, nn.Module)))

    def accumulate(
        self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None], *, idle: Item
    ) -> None:
        """In step: each pass gathers the weights."""
        in_step(self.accelerator, batches, lambda batch, last: backward(batch), idle)

    def step(self) -> float:
        """The norm is that of all processes' shards; no step where it is not finite."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return finite_step(self.optimizer, float(norm.full_tensor()))

    def restart(self, make_optimizer: MakeOptimizer) -> None:
        """A new optimizer."""
        self.optimizer = make_optimizer(self.network)

    def whole(self, policy: CausalLM) -> dict[str, Any] | None:
        """On the CPU of the first process."""
        return full_state(policy)

    def value_head(self) -> dict[str, Any]:
        """On the CPU of the first process."""
        return full_state(self.network.value_head)

    def optimizer_state(self) -> dict[str, Any]:
        """By names of weights."""
        return optimizer_state(self.model, self.optimizer)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Read by the first process, which sends it to the others."""
        load_optimizer_state(self.model, self.optimizer, state)
