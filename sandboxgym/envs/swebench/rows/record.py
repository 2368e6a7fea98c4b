"""What ``sandboxgym swebench check`` saw of each row: whose tests need the network, and whose environment is broken.

1. Verdicts that are no fault of a patch are taken from here and from the known rows, never from what tests print: an
   agent's patch can print anything, `setup.py` of ``pip install -e .`` included, before the tests begin.
2. A file of JSON lines, one a row of a data set, sorted; written as a whole or not at all.
3. A line counts for the row as it was, on the image that it was checked on, with the same backend; for others nothing
   is known.
"""

from __future__ import annotations

import fcntl
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
from sandboxgym.serialization import write_atomic

log = logging.getLogger("sandboxgym")

VARIABLE = "SANDBOXGYM_SWEBENCH_RECORD"
"""Names the record, in place of a file beside the data sets."""


class RecordError(ValueError):
    """A record that cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was seen of one row."""

    instance_id: str
    task: str
    """`Task.digest` of the row as it was."""
    backend: str
    image: str
    image_id: str
    """Of what its sandboxes stood on."""
    network: bool
    """Whether they had the network; what needs it is tried with it, too."""
    resolves: bool
    """The solution was resolved each time, or with the network each time."""
    empty_resolves: bool
    """No change at all was resolved at least once."""
    needs_network: bool
    """The solution is resolved with the network only, or its tests say that they miss it."""
    flaky: bool
    """The verdicts of equal runs differ."""
    gold: tuple[str, ...]
    """Verdicts on the solution, in order."""
    empty: tuple[str, ...]
    """Verdicts on no change at all."""
    seconds: float
    """That the tests of the solution take at the median."""
    date: str
    version: str
    """Of this package."""
    note: str = ""

    @property
    def broken(self) -> bool:
        """Whether a failure on this row says nothing of the patch."""
        return not self.resolves and not self.flaky and not self.needs_network

    def covers(self, task: Task, *, backend: str, image_id: str) -> bool:
        """Whether it was seen of this row on this image."""
        return (self.task, self.backend, self.image_id) == (task.digest, backend, image_id)


def default_path() -> Path:
    """Where the record is that environments read: ``$SANDBOXGYM_SWEBENCH_RECORD``, else beside the data sets."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else data.data_dir() / "swebench-checks.jsonl"


def read(path: Path) -> dict[str, Check]:
    """The checks of a record by row; none where there is no file.

    Raises:
        RecordError: a line is malformed.
        OSError: it cannot be read.
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


def write(path: Path, checks: Iterable[Check]) -> None:
    """Put checks into a record in place of earlier ones of the same rows; others stay.

    Raises:
        RecordError: there is a file, and it is no record.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "ab") as lock:  # two may be checking
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole = {**read(path), **{check.instance_id: check for check in checks}}
        lines = [json.dumps(asdict(whole[name]), sort_keys=True) + "\n" for name in sorted(whole)]
        write_atomic(path, "".join(lines).encode())


def known(task: Task, *, backend: str, image_id: str) -> Check | None:
    """What the environments' record knows of a row on an image; None without one, or where it cannot be read."""
    path = default_path()
    try:
        status = path.stat()
    except OSError:
        return None
    check = _remembered(path, status.st_mtime_ns, status.st_size, status.st_ino).get(task.instance_id)
    return check if check is not None and check.covers(task, backend=backend, image_id=image_id) else None


@functools.lru_cache(maxsize=4)
def _remembered(path: Path, *_: int) -> dict[str, Check]:
    try:
        return read(path)
    except (RecordError, OSError) as error:
        log.warning("nothing is known of rows that were checked: %s", error)
        return {}


_KINDS: dict[str, type | tuple[type, ...]] = {"bool": bool, "str": str, "float": (int, float), "tuple[str, ...]": list}


def _parsed(line: bytes, where: str) -> Check:
    try:
        content: Any = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{where}: expected an object in JSON, found {brief(line, 60)} ({error})") from None
    if not isinstance(content, dict):
        raise RecordError(f"{where}: expected an object in JSON, found {brief(content, 60)}")
    values: dict[str, Any] = {}
    for field in fields(Check):
        if field.name not in content:
            raise RecordError(f"{where}: the field {field.name!r} is missing")
        value = content[field.name]
        if not isinstance(value, _KINDS[str(field.type)]):
            raise RecordError(f"{where}, field {field.name!r}: expected {field.type}, found {brief(value, 60)}")
        values[field.name] = tuple(map(str, value)) if isinstance(value, list) else value
    return Check(**values)
