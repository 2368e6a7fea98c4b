"""Tasks: rows in SWE-bench's format, from the embedded set, from the official data or from a file.

1. Rows are taken in the original format (tests as JSON strings) and in that of swebench 5.x (lists; the columns
   ``image``, ``eval_script``, ``log_parser``, ``eval_type``); what a row lacks of the latter is derived (`columns`).
2. A row that cannot be used is refused with an error that names the row and the column.
3. Three things go beyond the format: an image called ``"host"`` (the tool chain of this machine) or ``"dir:/path"`` (an
   unpacked root file system), and a column ``history`` with a stream for ``git fast-import`` that makes the repository,
   for rows that need no image; and a column ``demonstration`` with the commands of a scripted player.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

from sandboxgym import data
from sandboxgym.envs.swebench import columns

HOST = "host"
"""The ``image`` of a task that runs on this machine's own tool chain."""
NEEDS_NETWORK = frozenset(
    (
        "psf__requests-1142",
        "psf__requests-1724",
        "psf__requests-1766",
        "psf__requests-1921",
        "psf__requests-2317",
        "sphinx-doc__sphinx-10435",
    )
)
"""Rows of Verified whose tests ask the internet (httpbin.org, a remote image): not even gold resolves without it."""

_OFFICIAL = ("verified", "lite", "full")
_SUFFIXES = (".parquet", ".jsonl", ".json")


class TaskError(ValueError):
    """A row that cannot be used; the message names the row and the column."""


class TaskNotFound(LookupError):
    """No task, or more than one, answers to what was asked for."""


class DataNotFound(FileNotFoundError):
    """The rows asked for are not on this machine. The message says what to download or set."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row."""

    instance_id: str
    repo: str
    version: str
    base_commit: str
    problem_statement: str
    patch: str = field(repr=False)
    """The solution; it never enters a sandbox of an agent."""
    test_patch: str = field(repr=False)
    fail_to_pass: tuple[str, ...] = field(repr=False)
    pass_to_pass: tuple[str, ...] = field(repr=False)
    image: str
    eval_script: str = field(repr=False)
    log_parser: str
    eval_type: str
    difficulty: str = ""
    history: str = field(default="", repr=False)
    """A stream for ``git fast-import`` that makes the repository, where the image does not hold it."""
    demonstration: tuple[str, ...] = field(default=(), repr=False)
    """Commands that solve it, where that takes more than reading and editing; as secret as the solution."""

    @property
    def needs_network(self) -> bool:
        """Whether its tests are known to need the internet."""
        return self.instance_id in NEEDS_NETWORK

    @property
    def digest(self) -> str:
        """Identifies all that can change an episode or its verdict."""
        parts = (
            self.instance_id,
            self.base_commit,
            self.problem_statement,
            self.image,
            self.eval_script,
            self.log_parser,
            self.eval_type,
            self.history,
            *self.fail_to_pass,
            "",
            *self.pass_to_pass,
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def row(self) -> dict[str, Any]:
        """The row in the format of swebench 5.x, as its ``make_test_spec`` takes it."""
        row = {name: getattr(self, name) for name in _TEXT + columns.COLUMNS}
        row |= {"FAIL_TO_PASS": list(self.fail_to_pass), "PASS_TO_PASS": list(self.pass_to_pass)}
        if self.demonstration:
            row["demonstration"] = list(self.demonstration)
        return row | {name: value for name in _OPTIONAL if (value := getattr(self, name))}


_TEXT = ("instance_id", "repo", "version", "base_commit", "problem_statement", "patch", "test_patch")
_OPTIONAL = ("difficulty", "history")


def from_row(row: Mapping[str, Any], *, where: str = "row") -> Task:
    """A task from a row in the old or the new format.

    Args:
        row: of a data set.
        where: how errors call it, until its ``instance_id`` is known.

    Raises:
        TaskError: a column is missing or malformed, or cannot be derived.
    """
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: expected an object with the columns of SWE-bench, found {row!r:.80}")
    if isinstance(row.get("instance_id"), str):
        where = f"{where} ({row['instance_id']})"
    text = {name: _text(row, name, where) for name in _TEXT}
    for name in ("instance_id", "repo", "base_commit"):
        if not text[name].strip() or set(text[name]) & set(" \n\0"):
            raise TaskError(f"{where}, column {name!r}: expected a name, found {text[name]!r:.80}")
    optional = {name: _text(row, name, where) for name in _OPTIONAL if row.get(name) is not None}
    present = {name: _text(row, name, where) for name in columns.COLUMNS if row.get(name)}
    absent = [name for name in columns.COLUMNS if name not in present]
    if absent:
        derived_from = ("repo", "version", "instance_id", "base_commit", "test_patch")
        try:
            derived = columns.derive(**{name: text[name] for name in derived_from})
        except LookupError as error:
            raise TaskError(f"{where} lacks the columns {', '.join(absent)}: {error.args[0]}") from None
        present = derived | present
    return Task(
        **text,
        **present,
        **optional,
        fail_to_pass=_texts(row, "FAIL_TO_PASS", where, of="tests"),
        pass_to_pass=_texts(row, "PASS_TO_PASS", where, of="tests"),
        demonstration=() if row.get("demonstration") is None else _texts(row, "demonstration", where, of="commands"),
    )


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise TaskError(f"{where}: the column {name!r} is missing (found: {', '.join(map(str, row)) or 'none'})")
    if not isinstance(row[name], str):
        raise TaskError(f"{where}, column {name!r}: expected text, found {row[name]!r:.80}")
    return str(row[name])


def _texts(row: Mapping[str, Any], name: str, where: str, *, of: str) -> tuple[str, ...]:
    if name not in row:
        raise TaskError(f"{where}: the column {name!r} is missing (found: {', '.join(map(str, row)) or 'none'})")
    value = row[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise TaskError(f"{where}, column {name!r}: expected a JSON list of {of}, found {error}") from None
    if hasattr(value, "tolist"):  # an array, as some readers of parquet give it
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise TaskError(f"{where}, column {name!r}: expected a list of {of}, found {value!r:.80}")
    return tuple(value)


class TaskSet:
    """Tasks in the order of their source, also found by name."""

    def __init__(self, tasks: Iterable[Task], *, source: str) -> None:
        self._tasks = tuple(tasks)
        self._source = source
        self._by_id = {task.instance_id: number for number, task in enumerate(self._tasks)}
        if not self._tasks:
            raise TaskError(f"{source} has no rows")
        if len(self._by_id) < len(self._tasks):
            ids = [task.instance_id for task in self._tasks]
            twice = next(name for name in ids if ids.count(name) > 1)
            raise TaskError(f"{source}, column 'instance_id': {twice!r} occurs more than once")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, number: SupportsIndex) -> Task:
        return self._tasks[number]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def index(self, task: str | SupportsIndex) -> int:
        """The number of a task: given as number, ``instance_id``, or an ending of one that no other task has.

        Raises:
            TaskNotFound: with the nearest ids.
        """
        if isinstance(task, SupportsIndex):
            if 0 <= (number := task.__index__()) < len(self):
                return number
            raise TaskNotFound(f"{self._source} has tasks 0 to {len(self) - 1}, not {task}")
        if task in self._by_id:
            return self._by_id[task]
        matches = [name for name in self._by_id if name.endswith(task)]
        if len(matches) == 1:
            return self._by_id[matches[0]]
        near = matches[:3] or difflib.get_close_matches(task, self._by_id, n=3, cutoff=0.3)
        found = f"{len(matches)} tasks end in" if matches else "there is no task"
        raise TaskNotFound(f"{self._source}: {found} {task!r}" + (f"; near: {', '.join(near)}" if near else ""))


def open_tasks(dataset: str | os.PathLike[str], *, instances: Sequence[str] | None = None) -> TaskSet:
    """The tasks of a data set.

    Args:
        dataset: ``"mini"`` (embedded), ``"verified"``, ``"lite"``, ``"full"`` (downloaded), or a path of a file in the
            format json (a list), jsonl or parquet.
        instances: only these, in this order.

    Raises:
        DataNotFound: nothing there.
        TaskError: a row is malformed, or there is none.
        TaskNotFound: one of ``instances`` is not there.
    """
    if dataset == "mini":
        from sandboxgym.envs.swebench.mini import tasks as embedded

        tasks = embedded()
    elif dataset in _OFFICIAL:
        tasks = _read(_official(str(dataset)), instances)
    else:
        path = Path(dataset)
        if not path.is_file():
            raise DataNotFound(f"dataset: expected 'mini', {', '.join(map(repr, _OFFICIAL))} or a file, found {path}")
        tasks = _read(path, instances)
    if instances is None:
        return tasks
    return TaskSet((tasks[tasks.index(name)] for name in instances), source=str(dataset))


def _official(name: str) -> Path:
    root = data.directory("swebench")
    found = next((path for suffix in _SUFFIXES if (path := root / f"{name}{suffix}").is_file()), None)
    if found is None:
        raise DataNotFound(
            f"dataset={name!r}: no {name}.parquet, .jsonl or .json in {root}: "
            f"`sandboxgym download swebench --part {name}` gets it, or set SANDBOXGYM_DATA to the directory that holds "
            "swebench/"
        )
    return found


def _read(path: Path, wanted: Sequence[str] | None) -> TaskSet:
    """Rows of a file. Of rows that are not wanted by their whole name nothing but the name is looked at."""
    rows = _rows(path)
    kept = [
        (number, row)
        for number, row in enumerate(rows)
        if wanted is None or not isinstance(row, Mapping) or str(row.get("instance_id")).endswith(tuple(wanted))
    ]
    if wanted is not None and not kept:
        raise TaskNotFound(f"{path} has none of {', '.join(wanted)}")
    return TaskSet((from_row(row, where=f"{path}, row {number}") for number, row in kept), source=str(path))


def _rows(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ImportError(f"{path} needs a reader of parquet: pip install 'sandboxgym[swebench]'") from error
        rows: list[Any] = parquet.read_table(path).to_pylist()
        return rows
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        rows = json.loads(text)
    except ValueError as error:
        raise TaskError(f"{path}: expected {path.suffix.lstrip('.') or 'json'}, found {error}") from None
    if isinstance(rows, dict):
        rows = list(rows.values())
    if not isinstance(rows, list):
        raise TaskError(f"{path}: expected a list of rows, found {type(rows).__name__}")
    return rows
