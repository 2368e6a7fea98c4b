"""Placement of the weights on the processes of a run: replicated, or sharded by FSDP2 or DeepSpeed's ZeRO-3."""

import torch
from accelerate import Accelerator

from bpo_ref.distributed import fsdp2, zero3
from bpo_ref.distributed.replicated import Replicated
from bpo_ref.distributed.strategy import Strategy

__all__ = ["Strategy", "chosen"]


def chosen(accelerator: Accelerator, *, dtype: torch.dtype, clip: float) -> Strategy:
    """Make the strategy that the launcher asked for; with one process FSDP2 becomes `Replicated`.

    Args:
        accelerator: accelerator of the run.
        dtype: compute dtype.
        clip: largest norm of a gradient.
    """
    kind: type[Strategy] = Replicated
    if zero3.wanted():
        kind = zero3.Zero3
    elif fsdp2.wanted() and accelerator.num_processes > 1:
        kind = fsdp2.Fsdp2
    return kind(accelerator, dtype=dtype, clip=clip)
