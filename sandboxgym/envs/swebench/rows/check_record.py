"""Record of ``sandboxgym swebench check``: rows whose tests need the network, and rows with a broken environment.

1. Only this record and the list of known rows excuse failures, never the output of tests: an agent's patch can print
   anything before the tests begin, for example from the ``setup.py`` that ``pip install -e .`` runs.
2. The file has one JSON line per row of a data set, sorted; it is written as a whole or not at all.
3. A line counts for the unchanged row, on the image that it was checked on, with the same backend; otherwise nothing
   is known.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sandboxgym import data
from sandboxgym.brief import brief
from sandboxgym.envs.swebench.rows.tasks import Task
from sandboxgym.system.atomic import write_atomic
from sandboxgym.system.once import file_lock

log = logging.getLogger("sandboxgym")

VARIABLE = "SANDBOXGYM_SWEBENCH_RECORD"
"""Environment variable with the path of the record, in place of a file beside the data sets."""


class RecordError(ValueError):
    """Raised if a record cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Result of checking one row."""

    instance_id: str
    task: str
    """`Task.digest` of the row when it was checked."""
    backend: str
    image: str
    image_id: str
    """Id of the image that its sandboxes were based on."""
    network: bool
    """True if sandboxes had the network; a row that needs it is tested with it too."""
    resolves: bool
    """True if the solution was resolved in every run, or in no run without the network but in the one run with it."""
    empty_resolves: bool
    """True if an empty patch was resolved at least once."""
    needs_network: bool
    """True if the solution is resolved with the network only, or its tests report that they miss it."""
    flaky: bool
    """True if the verdicts of equal runs differ."""
    gold: tuple[str, ...]
    """Verdicts on the solution, in order."""
    empty: tuple[str, ...]
    """Verdicts on the empty patch."""
    seconds: float
    """Median seconds of the solution's tests."""
    date: str
    version: str
    """Version of this package."""
    note: str = ""

    @property
    def broken(self) -> bool:
        """True if a failure on this row says nothing about the patch."""
        return not self.resolves and not self.flaky and not self.needs_network

    def covers(self, task: Task, *, backend: str, image_id: str) -> bool:
        """True if this result is of this row on this image."""
        return (self.task, self.backend, self.image_id) == (task.digest, backend, image_id)


def default_path() -> Path:
    """Path of the record that environments read: ``$SANDBOXGYM_SWEBENCH_RECORD``, else beside the data sets."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else data.data_dir() / "swebench-checks.jsonl"


def read(path: Path) -> dict[str, RowCheck]:
    """Read the checks of a record, by ``instance_id``; empty if there is no file.

    Raises:
        RecordError: a line is malformed.
        OSError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            check = _parsed(line, f"{path}, line {number}")
            found[check.instance_id] = check
    return found


def write(path: Path, checks: Iterable[RowCheck]) -> None:
    """Write checks to a record in place of earlier ones of the same rows; others stay.

    Raises:
        RecordError: the existing file is not a record.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name(f".{path.name}.lock")):  # two may be checking
        whole = {**read(path), **{check.instance_id: check for check in checks}}
        lines = [json.dumps(asdict(whole[name]), sort_keys=True) + "\n" for name in sorted(whole)]
        write_atomic(path, "".join(lines).encode())


def known(task: Task, *, backend: str, image_id: str) -> RowCheck | None:
    """Look up the check of a row on an image; None if there is no check, or the record cannot be read."""
    path = default_path()
    try:
        status = path.stat()
    except OSError:
        return None
    check = _remembered(path, status.st_mtime_ns, status.st_size, status.st_ino).get(task.instance_id)
    return check if check is not None and check.covers(task, backend=backend, image_id=image_id) else None


@functools.lru_cache(maxsize=4)
def _remembered(path: Path, *_: int) -> dict[str, RowCheck]:
    try:
        return read(path)
    except (RecordError, OSError) as error:
        log.warning("the record of checked rows is not used: %s", error)
        return {}


_KINDS: dict[str, type | tuple[type, ...]] = {"bool": bool, "str": str, "float": (int, float), "tuple[str, ...]": list}


def _parsed(line: bytes, where: str) -> RowCheck:
    try:
        content: Any = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{where}: expected an object in JSON, found {brief(line, 60)} ({error})") from None
    if not isinstance(content, dict):
        raise RecordError(f"{where}: expected an object in JSON, found {brief(content, 60)}")
    values: dict[str, Any] = {}
    for field in fields(RowCheck):
        if field.name not in content:
            raise RecordError(f"{where}: the field {field.name!r} is missing")
        value = content[field.name]
        if not isinstance(value, _KINDS[str(field.type)]):
            raise RecordError(f"{where}, field {field.name!r}: expected {field.type}, found {brief(value, 60)}")
        values[field.name] = tuple(map(str, value)) if isinstance(value, list) else value
    return RowCheck(**values)
