"""Tasks: rows in SWE-bench's format, from the embedded set, from the official data or from a file.

1. Rows are taken in the original format (tests as JSON strings) and in that of swebench 5.x (lists; the columns
   ``image``, ``eval_script``, ``log_parser``, ``eval_type``); missing ones of the latter are derived (`recipes`).
   Rows of other training sets (SWE-smith, SWE-Gym, SWE-rebench, R2E-Gym) are converted to such rows (`datasets`).
2. A row that cannot be used is refused with an error that names the row and the column.
3. Three things go beyond the format: an image called ``"host"`` (the tool chain of this machine) or ``"dir:/path"`` (an
   unpacked root file system), and a column ``history`` with a stream for ``git fast-import`` that makes the repository,
   for rows that need no image; and a column ``demonstration`` with the commands of a scripted expert.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

from sandboxgym import data
from sandboxgym.brief import brief
from sandboxgym.envs.swebench.card import ROWS
from sandboxgym.envs.swebench.rows import datasets
from sandboxgym.envs.swebench.rows import recipes as columns
from sandboxgym.envs.swebench.rows import row_files as rows
from sandboxgym.envs.swebench.rows.row_files import TaskError as TaskError
from sandboxgym.sandbox.agent import arguments
from sandboxgym.task_env import TaskNotFound as TaskNotFound

HOST = "host"
"""Value of the column ``image`` for a task that runs on this machine's own tool chain."""
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
"""Rows of Verified whose tests use the internet (httpbin.org, a remote image): even gold fails without it."""

_OFFICIAL = ("verified", "lite", "full")


class DataNotFound(FileNotFoundError):
    """Raised if the requested rows are not on this machine; the message says what to download or set."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task, made of one row."""

    instance_id: str
    repo: str
    version: str
    base_commit: str
    problem_statement: str
    patch: str = field(repr=False)
    """Solution; it never enters an agent's sandbox."""
    test_patch: str = field(repr=False)
    fail_to_pass: tuple[str, ...] = field(repr=False)
    pass_to_pass: tuple[str, ...] = field(repr=False)
    image: str
    eval_script: str = field(repr=False)
    log_parser: str
    eval_type: str
    difficulty: str = ""
    history: str = field(default="", repr=False)
    """Stream for ``git fast-import`` that makes the repository, if the image does not contain it."""
    demonstration: tuple[str, ...] = field(default=(), repr=False)
    """Commands that solve the task, if reading and editing are not enough; as secret as the solution."""
    style: str = datasets.BENCH
    """Training set whose schema the row had."""
    bug: str = field(default="", repr=False)
    """Patch that adds the bug to the image's repository, if the image lacks it. The repository's history is then
    deleted, because it contains the solution."""
    hidden: tuple[str, ...] = field(default=(), repr=False)
    """Paths of the image, relative to the repository, that an agent must not see and that its tests need."""
    removed: tuple[str, ...] = field(default=(), repr=False)
    """Paths of the image that an agent must not see and that no test needs."""
    expected: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Status that each test must have, if this decides the verdict instead of the two lists of tests."""

    @property
    def needs_network(self) -> bool:
        """True if the tests are known to need the internet."""
        return self.instance_id in NEEDS_NETWORK

    @property
    def digest(self) -> str:
        """Digest of everything that can change an episode or its verdict."""
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
        if self.bug or self.hidden or self.removed or self.expected:
            parts += ("", self.bug, *self.hidden, "", *self.removed, "", *itertools.chain(*self.expected))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def row(self) -> dict[str, Any]:
        """Convert to a row in the format of swebench 5.x, for its ``make_test_spec``."""
        row = {name: getattr(self, name) for name in _TEXT + columns.COLUMNS}
        row |= {"FAIL_TO_PASS": list(self.fail_to_pass), "PASS_TO_PASS": list(self.pass_to_pass)}
        row |= {name: list(value) for name in _OPTIONAL_LISTS if (value := getattr(self, name))}
        if self.style != datasets.BENCH:
            row["style"] = self.style
        if self.expected:
            row["expected"] = dict(self.expected)
        return row | {name: value for name in _OPTIONAL if (value := getattr(self, name))}


_TEXT = ("instance_id", "repo", "version", "base_commit", "problem_statement", "patch", "test_patch")
_LONGEST_NAME = 500
_OPTIONAL = ("difficulty", "history", "bug")
_OPTIONAL_LISTS = {"demonstration": "commands", "hidden": "paths", "removed": "paths"}


def from_row(row: Mapping[str, Any], *, where: str = "row") -> Task:
    """Make a task from a row of SWE-bench in the old or the new format, or of another style of `datasets`.

    Args:
        row: a row of a data set.
        where: name of the row in errors, until its ``instance_id`` is known.

    Raises:
        TaskError: a column is missing or malformed, or cannot be derived.
    """
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: expected an object with the columns of SWE-bench, found {brief(row, 80)}")
    if isinstance(row.get("instance_id"), str):
        where = f"{where} ({rows.shown(row['instance_id'], 200)})"
    row = datasets.converted(row, where)
    why = datasets.WHY[datasets.BENCH]
    text = {name: rows.text(row, name, where, why=why[name]) for name in _TEXT}
    for name in ("instance_id", "repo", "base_commit"):
        if not 0 < len(text[name]) <= _LONGEST_NAME or set(text[name]) & set(" \n\0"):
            raise TaskError(f"{where}, column {name!r}: expected a name, found {brief(text[name], 80)}")
    optional = {name: rows.text(row, name, where) for name in _OPTIONAL if row.get(name) is not None}
    present = {name: rows.text(row, name, where) for name in columns.COLUMNS if row.get(name)}
    absent = [name for name in columns.COLUMNS if name not in present]
    if absent:
        derived_from = ("repo", "version", "instance_id", "base_commit", "test_patch")
        try:
            derived = columns.derive(**{name: text[name] for name in derived_from})
        except LookupError as error:
            raise TaskError(f"{where} lacks the columns {', '.join(absent)}: {error.args[0]}") from None
        present = derived | present
    if not present["image"].strip() or set(present["image"]) & set("\n\0"):
        raise TaskError(f"{where}, column 'image': expected the name of an image, found {brief(present['image'], 80)}")
    made: dict[str, Any] = {**text, **present, **optional}
    made |= {
        name: rows.texts(row, name, where, of=of) for name, of in _OPTIONAL_LISTS.items() if row.get(name) is not None
    }
    return Task(
        **made,
        fail_to_pass=rows.texts(row, "FAIL_TO_PASS", where, of="tests", why=why["FAIL_TO_PASS"]),
        pass_to_pass=rows.texts(row, "PASS_TO_PASS", where, of="tests", why=why["PASS_TO_PASS"]),
        style=str(row.get("style") or datasets.BENCH),
        expected=_expected(row, where),
    )


def _expected(row: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    value = row.get("expected")
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise TaskError(f"{where}, column 'expected': expected the status of each test, found {brief(value, 80)}")
    names, statuses = (
        rows.texts({"expected": list(part)}, "expected", where, of=of)
        for part, of in ((value, "names"), (value.values(), "statuses"))
    )
    return tuple(zip(names, statuses))


class TaskSet:
    """Tasks in the order of their source, also found by name."""

    def __init__(self, tasks: Iterable[Task], *, source: str) -> None:
        self._tasks = tuple(tasks)
        self._source = source
        self._by_id = {task.instance_id: number for number, task in enumerate(self._tasks)}
        if not self._tasks:
            raise TaskError(f"{source} has no rows")
        if len(self._by_id) < len(self._tasks):
            counted = Counter(task.instance_id for task in self._tasks)
            twice = next(name for name, count in counted.items() if count > 1)
            raise TaskError(f"{source}, column 'instance_id': {brief(twice)} occurs more than once")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, number: SupportsIndex) -> Task:
        return self._tasks[number]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def index(self, task: str | SupportsIndex) -> int:
        """Find the number of a task, given as number, ``instance_id``, or an ending of one that no other task has.

        Raises:
            TaskNotFound: no task, or more than one, matches; the message has the nearest ids.
            TypeError: ``task`` is neither a string nor an integer.
        """
        if isinstance(task, SupportsIndex) and not isinstance(task, bool):
            try:
                number = task.__index__()
            except TypeError:  # an array of several
                number = None
            if number is not None:
                if 0 <= number < len(self):
                    return number
                raise TaskNotFound(f"{self._source} has tasks 0 to {len(self) - 1}, not {brief(number, 80)}")
        if not isinstance(task, str):
            raise TypeError(f"expected a task as an id, a unique ending of one or a number, found {brief(task, 80)}")
        if task in self._by_id:
            return self._by_id[task]
        matches = [name for name in self._by_id if name.endswith(task)]
        if len(matches) == 1:
            return self._by_id[matches[0]]
        near = matches[:3] or difflib.get_close_matches(task[:_LONGEST_NAME], self._by_id, n=3, cutoff=0.3)
        found = f"{len(matches)} tasks end in" if matches else "there is no task"
        raise TaskNotFound(f"{self._source}: {found} {brief(task)}" + (f"; near: {', '.join(near)}" if near else ""))


def open_tasks(dataset: str | os.PathLike[str], *, instances: Sequence[str] | None = None) -> TaskSet:
    """Open the tasks of a data set.

    Args:
        dataset: ``"mini"`` (embedded), ``"verified"``, ``"lite"``, ``"full"`` (downloaded), ``"swe-smith"``,
            ``"swe-gym"``, ``"swe-rebench"``, ``"r2e-gym"`` (found beside them), or a path of a file in the format json
            (a list), jsonl or parquet, or of a directory of such files.
        instances: only the tasks with these ids, in this order.

    Raises:
        DataNotFound: there is no such data set, file or directory.
        TaskError: a row is malformed, or there is none.
        TaskNotFound: one of ``instances`` does not exist.
        TypeError: ``dataset`` is not a name or path, or ``instances`` is not a list.
    """
    wanted = arguments.instances(instances)
    if not isinstance(dataset, str | os.PathLike) or isinstance(os.fspath(dataset), bytes) or not os.fspath(dataset):
        raise TypeError(f"dataset: expected a name or a path, found {brief(dataset, 80)}")
    if dataset == "mini":
        from sandboxgym.envs.swebench.mini import tasks as embedded

        tasks = embedded()
    elif dataset in _OFFICIAL + datasets.NAMES:
        tasks = _read(_found(str(dataset)), wanted)
    else:
        path = Path(dataset)
        if not path.exists():
            names = ", ".join(map(repr, _OFFICIAL + datasets.NAMES))
            raise DataNotFound(
                f"dataset: expected 'mini', {names}, a file or a directory, found {brief(os.fspath(path))}"
            )
        tasks = _read(path, wanted)
    if wanted is None:
        return tasks
    return TaskSet((tasks[tasks.index(name)] for name in wanted), source=str(dataset))


def images(
    dataset: str | os.PathLike[str] = "mini",
    *,
    instances: Sequence[str] | None = None,
    image: str | None = None,
    **_: Any,
) -> list[str]:
    """Names of the images of the tasks that these arguments of the environment select; raises like `open_tasks`."""
    named = [image if task.image == HOST and image else task.image for task in open_tasks(dataset, instances=instances)]
    return [name for name in dict.fromkeys(named) if name != HOST and not name.startswith("dir:")]


def _found(name: str) -> Path:
    """Find the file of a data set, or the directory of its files."""
    root = data.directory(ROWS)
    candidates = [root / f"{name}{suffix}" for suffix in rows.SUFFIXES]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None and (root / name).is_dir():
        found = root / name
    if found is None:
        what = f"dataset={name!r}: no {name}.parquet, .jsonl or .json in {root}"
        if name in _OFFICIAL:
            what += f": `sandboxgym download swebench --part {name}` gets it"
        else:
            what += f", nor a directory {name}: put the files there as they are published"
        raise DataNotFound(f"{what}, or set SANDBOXGYM_DATA to the directory that holds swebench/")
    return found


def _read(path: Path, wanted: Sequence[str] | None) -> TaskSet:
    """Read rows of a file; of rows that are not wanted by full name, only the name is read."""
    tasks = []
    for where, row in rows.read(path):
        named = isinstance(row, Mapping) and row.get("instance_id") is not None
        if wanted is not None and named and not str(row["instance_id"]).endswith(tuple(wanted)):
            continue
        task = from_row(row, where=where)
        if wanted is None or named or task.instance_id.endswith(tuple(wanted)):
            tasks.append(task)
    if wanted is not None and not tasks:
        raise TaskNotFound(f"{path} has none of {', '.join(wanted)[:200]}")
    return TaskSet(tasks, source=str(path))
