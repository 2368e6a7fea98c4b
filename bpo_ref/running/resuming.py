"""Settings of a run that is resumed: those that may differ from its checkpoint's, and a check of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpo_ref.learning.checkpoint import CheckpointError

if TYPE_CHECKING:
    from bpo_ref.args import Args

MAY_CHANGE = {
    "resume", "resume_if_saved", "overwrite", "out", "threads", "envs", "env_workers", "env_capture_every", "long_rows",
    "env_store_every", "env_store_bandwidth", "env_resources", "env_labels", "env_limits",
    "env_timeout", "env_store", "ray_address", "env_threads", "env_overlap", "env_retries", "max_live", "updates",
    "budget", "eval_every", "save_every", "process_timeout", "micro_tokens", "pack", "gradient_checkpointing",
    "trackers", "journal", "server", "server_timeout", "server_retries", "server_tolerance", "server_weights",
    "server_sends", "server_sleeps", "server_python", "server_memory", "rollout_timeout", "driver",
}  # fmt: skip
"""Settings that may differ from those of the checkpoint."""


def check_settings(saved: Mapping[str, Any], args: Args, *, sharded: bool, checkpoint: Path) -> None:
    """Compare the settings of a checkpoint with those of the run that continues it.

    Args:
        saved: content of the checkpoint.
        args: resolved settings of this run.
        sharded: True if this run's weights are sharded over its processes.
        checkpoint: its folder, for messages.

    Raises:
        CheckpointError: a setting outside `MAY_CHANGE` differs, or one has whole weights and the other sharded ones.
    """
    defaults = {field.name: field.default for field in fields(args)}
    for name, mine in json.loads(json.dumps(asdict(args))).items():
        theirs = saved["args"].get(name, defaults[name])  # a checkpoint may be older than a setting
        if mine != theirs and name not in MAY_CHANGE:
            raise CheckpointError(f"{checkpoint}: was made with {name}={theirs!r}, now it is {mine!r}")
    if saved["sharded"] != sharded:
        kind = {False: "whole weights on every process", True: "sharded weights"}
        raise CheckpointError(f"{checkpoint}: was made with {kind[saved['sharded']]}, now there are {kind[sharded]}")
