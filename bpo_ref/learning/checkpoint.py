"""Checkpoints: a folder that transformers can load, plus the trainer's state, replaced atomically.

Everything random in a run is keyed by (seed, step), so weights, optimizer and counters are the whole state.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging

logging.disable_progress_bar()  # of writing and loading weights: a line for every checkpoint

STATE = "trainer_state.pt"
FIELDS = {"args", "stage", "step", "counters", "memory", "scores", "optimizer", "value_head", "sharded"}


_NOT_WRITTEN = ("(os error ", "inline_container.cc", "PytorchStreamWriter", "iostream error")
"""In messages of tokenizers (the first one) and of PyTorch, about a file that cannot be written."""


class CheckpointError(ValueError):
    """Raised if a folder is not a checkpoint of this run; the message names the file and the field."""


def save_checkpoint(
    folder: Path, model: Any, tokenizer: Any, state: dict[str, Any], *, weights: dict[str, Any] | None = None
) -> None:
    """Save a checkpoint beside ``folder`` and then swap them: a crash leaves the old checkpoint or the new one.

    Args:
        folder: of the checkpoint.
        model: a transformers or PEFT model, which writes its adapters alone.
        tokenizer: goes with it.
        state: the trainer's.
        weights: the model's full weights, where its own parameters are shards.

    Raises:
        OSError: the checkpoint cannot be written.
    """
    with replaced(folder) as fresh:
        model.save_pretrained(fresh, **({} if weights is None else {"state_dict": weights}))
        tokenizer.save_pretrained(fresh)
        torch.save(state, fresh / STATE)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Context in which files that cannot be written, such as on a full disk, are an `OSError` whoever writes them.

    Libraries in other languages raise types of their own: safetensors, tokenizers (a bare `Exception`) and PyTorch.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if isinstance(error, SafetensorError) or any(sign in str(error) for sign in _NOT_WRITTEN):
            raise OSError(str(error).partition("\n")[0]) from error
        raise


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Context in which a new folder is made at the path that it yields; at the end it takes the place of ``folder``.

    No system call swaps two folders everywhere, so there are two renames. After a crash between them the old folder is
    at ``NAME.old``, where `load_checkpoint` finds it.
    """
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with writing():
            yield fresh
    except BaseException:  # such as on a full disk, where its space is needed
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def args_of(folder: Path) -> dict[str, Any]:
    """Read the settings of the run that wrote a checkpoint; none of a folder without a trainer's state."""
    path = folder / STATE
    if not path.exists():
        return {}
    found: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=True)["args"]
    return found


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Read the trainer's state; the weights are loaded from the folder by transformers.

    Tensors are mapped, not read: the optimizer's are several times the weights, and most processes need a part of them.

    Raises:
        CheckpointError: no checkpoint there, or not one of this trainer.
    """
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        old.rename(folder)  # a crash between the two renames of a save
    path = folder / STATE
    if not path.exists():
        raise CheckpointError(f"{path}: expected the state of a run to resume, found no such file")
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # torch raises many types on files that are not its own
        raise CheckpointError(f"{path}: cannot be read as a trainer's state: {error}") from error
    missing = FIELDS - set(state)
    if missing:
        raise CheckpointError(f"{path}: lacks {', '.join(sorted(missing))}")
    return state
