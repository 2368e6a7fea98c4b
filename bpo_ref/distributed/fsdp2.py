"""Weights spread over processes: FSDP2 by ``fully_shard``, the same on GPUs and, with gloo, on CPUs.

``accelerate launch`` with a configuration of kind FSDP asks for it, and says how many processes there are. The rest of
that file is accelerate's; here each layer is one unit, its weights gathered for its forward and backward passes.

What this module promises:

1. `gathered` holds all weights whole: nothing is communicated inside, so that every process may sample as many turns
   and run as many forward passes as it likes.
2. Outside, every process has to run the same number of forward and backward passes (`Run._accumulate` sees to it).
3. `full_state` and `optimizer_state` are those of an unsharded run: a checkpoint does not tell how it was made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
