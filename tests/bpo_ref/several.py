"""Several runs in one launch, one after the other: starting its processes takes longer than two updates."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def write(path: Path, runs: Mapping[str, Sequence[str]]) -> Path:
    """Write the argument lists of runs, by the names of their folders, as ``--config`` of `arguments`."""
    path.write_text(json.dumps({name: list(given) for name, given in runs.items()}))
    return path


def arguments() -> Iterator[list[str]]:
    """Yield the argument list of each run that the command line asks for: one, or those that JSON of `write` lists.

    What follows ``--config`` and ``--out`` is for all of them; each run has a folder of its own below ``--out``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options, more = parser.parse_known_args()
    if options.config.suffix != ".json":
        yield ["--config", str(options.config), "--out", str(options.out), *more]
        return
    for name, given in json.loads(options.config.read_text()).items():
        yield [*given, "--out", str(options.out / name), *more]
