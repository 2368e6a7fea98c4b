"""Journals of the updates under way: `--resume` continues a killed run within its update.

One file per update and process in the folder ``inflight`` of the run, until a checkpoint has the update.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bpo_ref.learning.checkpoint import CheckpointError
from sandboxgym.tree.journal import Journal, JournalMismatch

if TYPE_CHECKING:
    from bpo_ref.args import Args

FOLDER = "inflight"
logger = logging.getLogger("bpo_ref")


def settings_of(args: Args, *, may_change: Collection[str]) -> str:
    """Digest of the settings that have to be the same for a run to continue."""
    fixed = {name: value for name, value in asdict(args).items() if name not in may_change}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def weights_of(model: Any) -> str:
    """Digest of a model's trained weights: of the sum of each of them."""
    sums = [parameter.detach().sum(dtype=torch.float64) for parameter in model.parameters()]
    return hashlib.sha256(json.dumps(torch.stack(sums).tolist()).encode()).hexdigest()[:16]  # one wait for a GPU


def opened(out: Path, head: dict[str, Any], seed: Sequence[int], *, part: int, recall: bool) -> Journal:
    """The journal of a process's part of an update, with what an earlier process of the run wrote of it.

    Args:
        out: folder of the run.
        head: ``settings`` and ``weights``, as digests.
        seed: of the update; its last number is that of the update.
        part: number of the process.
        recall: of `Journal`.

    Raises:
        CheckpointError: it was written with other settings.
    """
    folder = out / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"update-{seed[-1]}.{part}"
    others = [other for other in folder.glob(f"update-{seed[-1]}.*") if other != path]
    head = {**head, "seed": list(seed)}
    try:
        return Journal(path, head=head, others=others, recall=recall)
    except JournalMismatch as error:
        found = error.found if isinstance(error.found, dict) else {}
        if any(found.get(name) != head[name] for name in ("settings", "seed")):
            raise CheckpointError(
                f"{folder}: the update under way was begun with other settings than the checkpoint's, or a file there "
                "is no journal: continue with those settings, or remove the folder to begin the update anew"
            ) from error
    with suppress(JournalMismatch):  # it may be that of a process which this run no longer has
        return Journal(path, head=head, recall=recall)
    logger.warning("update %s begins anew: its journal is of weights that were rounded otherwise", seed[-1])
    path.unlink(missing_ok=True)
    return Journal(path, head=head)


def forget(out: Path, *, before: int) -> None:
    """Remove the journals of the updates that a checkpoint has."""
    folder = out / FOLDER
    for path in folder.glob("update-*.*"):
        if int(path.name.removeprefix("update-").partition(".")[0]) < before:
            path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
