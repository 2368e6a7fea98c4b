"""Archive of a study: the numbers behind its tables in one file, small enough to be committed.

    python -m bpo_ref.compare --data docs/results/data/PAGE/scores.jsonl --out docs/results/PAGE runs/PAGE/*-seed*
    python -m bpo_ref.compare --out docs/results/PAGE docs/results/data/PAGE/scores.jsonl

The first command writes it from the folders of the runs, the second makes table and plot again from it alone. Each line
of the file is ``{"run": "LABEL-seedN", "results" | "score" | "update": {…}}``: the settings and totals of a run and the
supervised start that it began at, its evaluations with the outcome of every task, and of each update the numbers that a
table is made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

UPDATE = (
    "step", "update/grad_norm", "rollout/degenerate_tasks", "rollout/turns", "rollout/snapshots", "total/returns",
    "total/env_steps", "time/env", "time/rollout", "time/snapshot", "time/snapshots",
)  # fmt: skip
LOCAL = ("out", "init_from", "sft_data")  # settings that name folders of the machine

FILES = {"results": "results.json", "score": "scores.jsonl", "update": "metrics.jsonl"}


class ArchiveError(ValueError):
    """Raised for a file that `pack` has not written; the message names file and line."""


def pack(runs: Iterable[Path], path: Path) -> None:
    """Write the numbers that tables need from these folders, run by run: another run adds lines and changes none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"run": run.name, **part}, separators=(",", ":")) for run in runs for part in _parts(run))
    path.write_text("".join(line + "\n" for line in lines))


def start_of(results: Mapping[str, Any]) -> str | None:
    """Folder name of the supervised start that a run began at, by its ``results.json``; None if it made its own."""
    begun = results["args"].get("init_from")
    return Path(begun).parent.name if begun else results.get("start")


def _parts(run: Path) -> Iterator[dict[str, Any]]:
    results = json.loads((run / FILES["results"]).read_text())
    args = {name: value for name, value in results["args"].items() if name not in LOCAL}
    start = {"start": name} if (name := start_of(results)) else {}
    yield {
        "results": {"args": args, "processes": results.get("processes", 1), "counters": results["counters"], **start}
    }
    for line in (run / FILES["score"]).read_text().splitlines():
        yield {"score": json.loads(line)}
    for record in map(json.loads, (run / FILES["update"]).read_text().splitlines()):
        if "update/grad_norm" in record:
            yield {"update": {name: record[name] for name in UPDATE if name in record}}


def unpack(path: Path, folder: Path) -> list[Path]:
    """Recreate the folders of runs from an archive in ``folder``, with the files that `tables` reads.

    Raises:
        ArchiveError: naming the line that `pack` does not write.
    """
    runs: dict[str, dict[str, list[str]]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            name, (kind,) = record.pop("run"), record
            if Path(name).name != name or kind not in FILES:
                raise ValueError(f"{name}, {kind}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArchiveError(f"{path}:{number}: expected a run and its results, score or update: {error}") from error
        runs.setdefault(name, {kind: [] for kind in FILES})[kind].append(json.dumps(record[kind]))
    for name, parts in runs.items():
        (folder / name).mkdir(parents=True)
        for kind, lines in parts.items():
            (folder / name / FILES[kind]).write_text("".join(line + "\n" for line in lines))
    return [folder / name for name in runs]


def unpacked(given: Sequence[Path], folder: Path) -> list[Path]:
    """Folders of runs, those in archives unpacked."""
    return [run for path in given for run in (unpack(path, folder) if path.is_file() else [path])]
