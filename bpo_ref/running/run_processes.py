"""Processes of a run as a whole: refusals that all of them raise, and a folder that all of them share."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from bpo_ref.config import ConfigError
from bpo_ref.running.folder import appears, token_in

OUT_SECONDS = 30.0
"""Seconds for which a process looks for the first one's file in ``out``."""


def all_refuse(accelerator: Accelerator, reason: Callable[[], str | None]) -> None:
    """Ask the first process for a reason to refuse, and raise it in all processes.

    Raises:
        ConfigError: the first process has a reason.
    """
    message = reason() if accelerator.is_main_process else None
    if accelerator.num_processes > 1:
        message = broadcast_object_list([message])[0]
    if message:
        raise ConfigError(message)


def check_shared(out: Path, accelerator: Accelerator, gather: Callable[[list[Any]], list[Any]]) -> None:
    """Check that all processes share ``out``: they read the first one's demonstrations, adapters and checkpoints.

    Args:
        out: folder of the run.
        accelerator: of this process.
        gather: collects the lists of all processes.

    Raises:
        ConfigError: a process, perhaps on another node, does not see the first one's folder.
    """
    if accelerator.num_processes == 1:
        return
    main = accelerator.is_main_process
    name = broadcast_object_list([f".shared-{uuid.uuid4().hex}" if main else None])[0]
    with token_in(out, name if main else None):
        accelerator.wait_for_everyone()
        sees = gather([appears(out / name, seconds=OUT_SECONDS)])
    if blind := [process for process, seen in enumerate(sees) if not seen]:
        raise ConfigError(
            f"out: expected a folder that all processes share, but {out} of process 0 is not that of "
            f"{blind}: with several nodes, it has to be on a file system that they share"
        )


def device_name(accelerator: Accelerator) -> str:
    """Device of this process, with the name of its GPU."""
    device = accelerator.device
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"
