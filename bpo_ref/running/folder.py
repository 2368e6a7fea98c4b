"""Folder of a run: its name, its lock, its settings, and a note of the weights that it has written for servers.

A folder that holds a run is never overwritten silently: a new run there is refused unless it continues the old one
(``--resume``, ``--resume-if-saved``) or clears the folder first (``--overwrite``). Only one process may train in a
folder at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

from bpo_ref.config import ConfigError
from sandboxgym import __version__
from sandboxgym.system.atomic import is_temporary, write_atomic

if TYPE_CHECKING:
    from bpo_ref.args import Args

SETTINGS = "settings.yaml"
LOCK = ".lock"
PUBLISHED = "published.json"
STOPPED = "stopped.json"
"""File that says that a signal ended the run, and that it was saved; it goes when the run continues."""
_OF_RUNS = re.compile(r"(start-)?[0-9a-f]{12}-?")
"""Beginnings of the names of folders that runs write for servers."""
CHECKPOINTS = ("checkpoint", "checkpoint.old", "sft", "sft.old")
LOGS = ("metrics.jsonl", "scores.jsonl", "results.json")
OTHERS = (
    SETTINGS, "checkpoint.new", "sft.new", "adapter", "demonstrations.jsonl", "results.md",
    "learning_curve.png", "samples.txt", "trees", "trees.json", "trees.html", "tensorboard", "trackers", "served",
    "servers", "inflight", PUBLISHED, STOPPED,
)  # fmt: skip
LEARNED = ("results.json", "sft", "sft.old", "adapter")
"""Parts of a run that may have cost much to make, although there is no checkpoint."""
OWN = (*CHECKPOINTS, *LOGS, *OTHERS)
"""Everything that a run writes into its folder and `clear` removes."""


def named(args: Args) -> Args:
    """Fill in ``{env}``, ``{algo}`` and ``{seed}`` in ``out``.

    Raises:
        ConfigError: ``out`` has another name in braces.
    """
    environment = re.sub(r"-v\d+$", "", re.split("[/:]", args.env_id)[-1]).lower()
    known = {"env": environment, "algo": args.algo, "seed": str(args.seed)}
    for name in re.findall(r"\{(\w*)\}", args.out):
        if name not in known:
            raise ConfigError(f"out: expected {{env}}, {{algo}} or {{seed}} in braces, found {{{name}}} in {args.out}")
    return replace(args, out=re.sub(r"\{(\w+)\}", lambda found: known[found[1]], args.out))


def holds_run(out: Path) -> bool:
    """True if a folder holds training or evaluation results that a new run would overwrite."""
    events = any((out / "tensorboard").rglob("events.*"))
    return events or any(_holds_something(out / name) for name in (*CHECKPOINTS, *LOGS))


def resumable(out: Path) -> bool:
    """True if ``--resume`` finds a checkpoint in a folder."""
    return any((out / name).exists() for name in ("checkpoint", "checkpoint.old"))


def refusal(args: Args) -> str | None:
    """Reason why a run may not start in its folder, with the remedy; None: it may."""
    out = Path(args.out)
    if args.overwrite:
        if args.resume or args.resume_if_saved:
            return "overwrite: does not go with resume, which continues the run that overwrite would clear"
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and holds_run(out):
            return f"overwrite: the launcher starts this run again, and what it has saved in {out} would be cleared"
        return _cleared_input(args, out, "overwrite")
    if args.resume or not holds_run(out):
        return None
    if args.resume_if_saved:
        if resumable(out):
            return None
        if any(_holds_something(out / name) for name in LEARNED):
            return f"out: {out} holds what a run has learned or measured, but no checkpoint; choose another --out"
        return _cleared_input(args, out, "resume_if_saved")
    continued = "continue it with --resume, " if resumable(out) else ""
    return f"out: {out} holds a run: {continued}replace it with --overwrite, or choose another folder with --out"


def _cleared_input(args: Args, out: Path, why: str) -> str | None:
    """Reason why a folder may not be cleared: the run would begin with what is in it. None: it may."""
    for name in ("init_from", "model", "sft_data"):
        if inside := _own_part(out, getattr(args, name)):
            return f"{why}: would clear {inside}, which {name} names; choose another --out"
    return None


def clear(out: Path) -> None:
    """Remove the files of a run from its folder, and what `published` tells of; nothing else."""
    remove_published(out)
    unfinished = [path for path in out.glob(".*") if any(is_temporary(path.name, of=name) for name in OWN)]
    for path in [*(out / name for name in OWN), *unfinished]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def note_stopped(out: Path, signal_name: str, position: str) -> None:
    """Write `STOPPED`: a run that was asked to stop has saved."""
    write_atomic(out / STOPPED, json.dumps({"signal": signal_name, "saved_at": position}).encode())


def lock(out: Path) -> IO[str] | None:
    """Keep other processes from training there, until the file is closed or this process ends.

    Returns:
        The open file that holds the lock; None if the file system has no locks.

    Raises:
        ConfigError: another process trains in the folder.
    """
    file = (out / LOCK).open("w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise ConfigError(f"out: another process trains in {out} at this moment; choose another --out") from error
    except OSError:
        file.close()
        return None
    return file


def published(out: Path, *beginnings: Path) -> None:
    """Note with which paths the folders begin that a run is going to write for servers, maybe outside its own folder.

    If the run is killed they stay, as large as the model; the next start in its folder removes them.
    """
    write_atomic(out / PUBLISHED, json.dumps([str(beginning) for beginning in beginnings]).encode())


def remove_published(out: Path) -> None:
    """Remove what `published` tells of, if there is a note."""
    try:
        beginnings = [Path(beginning) for beginning in json.loads((out / PUBLISHED).read_bytes())]
    except (FileNotFoundError, ValueError, TypeError):
        return
    for beginning in beginnings:
        if not _OF_RUNS.fullmatch(beginning.name):  # a folder of somebody else's may say anything
            continue
        for path in beginning.parent.glob("*"):
            if path.name.startswith(beginning.name):
                shutil.rmtree(path, ignore_errors=True)
    (out / PUBLISHED).unlink(missing_ok=True)


@contextmanager
def token_in(folder: Path, name: str | None) -> Iterator[None]:
    """Keep a file in the folder within the context; None: no file."""
    path = None if name is None else folder / name
    if path is not None:
        path.touch()
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def appears(path: Path, *, seconds: float) -> bool:
    """True if a file exists or appears in time: network file systems show new files late."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def write_settings(out: Path, given: Args, filled: Args, *, processes: int) -> None:
    """Write ``settings.yaml``: the settings as given, for ``--config``, and the preset's values as comments.

    Args:
        out: the folder.
        given: settings from the command line and its file.
        filled: settings with the preset filled in.
        processes: number of training processes.
    """
    mine, whole = _plain(given), _plain(filled)
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    preset = {name: value for name, value in whole.items() if name not in mine}
    lines = [
        f"# A run of sandboxgym {__version__}, started {started} with {processes} process{'es' * (processes > 1)}.",
        f"# Repeat it with --config {out / SETTINGS} --out ELSEWHERE; continue it with --resume.",
        yaml.safe_dump(mine, sort_keys=False, allow_unicode=True, width=120),
        f"# Filled in by algo: {filled.algo}",
        *(f"# {line}" for line in yaml.safe_dump(preset, sort_keys=False).splitlines() if preset),
    ]
    write_atomic(out / SETTINGS, ("\n".join(lines) + "\n").encode())


STARTING = ("resume", "resume_if_saved", "overwrite")
"""Settings that are decided at each start."""


def _plain(args: Args) -> Mapping[str, Any]:
    """The settings as YAML values, with lists for tuples, and without those that are decided at each start."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(args).items()}
    return {n: value for n, value in values.items() if value is not None and n not in STARTING}


def _holds_something(path: Path) -> bool:
    """True if a file or folder is there and not empty."""
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


def _own_part(out: Path, named_by: str | None) -> Path | None:
    """The part of a run's folder that contains a path; None: no part does."""
    if not named_by:
        return None
    path = Path(named_by).resolve()
    for name in OWN:
        if path.is_relative_to((out / name).resolve()):
            return out / name
    return None
