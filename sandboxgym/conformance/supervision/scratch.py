"""Temporary folders of a run of the suite, removed with the run however it ends.

1. The names of all folders of a run have its token in them. A directory is recorded in a run directory of
   `sandboxgym.system.run_directories` before the first folder is made there, so that the folders of a killed run can
   be found.
2. A watched run's folders belong to the watching process, which clears them whenever a child ends, and to `janitor`
   once that process is killed. Those of a run in the caller's own process go with the next `run_directories.reap`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from sandboxgym.system import run_directories

log = logging.getLogger("sandboxgym")

KIND = "conformance"
PREFIX = "sandboxgym-conformance-"
_IN = "in-"
"""Prefix of the record of a directory that may hold folders of the run."""

_run: Path | None = None
_recorded: set[str] = set()


def use(run: Path) -> None:
    """Assign later folders of this process to a run directory, which another process may own."""
    global _run
    _run = run
    _recorded.clear()


def folder(parent: str | None = None, *, hidden: bool = False) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder, in a directory or in the default place; with ``hidden`` its name begins with a dot."""
    directory = os.path.abspath(parent or tempfile.gettempdir())
    return tempfile.TemporaryDirectory(
        prefix="." * hidden + _announced(directory), dir=directory, ignore_cleanup_errors=True
    )


def clear(run: Path) -> None:
    """Remove the folders that belong to a run directory, and the sandbox files of dead processes in them.

    Raises:
        OSError: some could not be removed; the others are gone all the same.
    """
    failures: list[OSError] = []
    for record in sorted(run.glob(f"{_IN}*")):
        try:
            entries = list(Path(os.fsdecode(record.read_bytes())).iterdir())
        except OSError:  # gone, with what was in it
            continue
        for path in entries:
            try:
                if path.name.lstrip(".").startswith(_prefix(run)) and path.lstat().st_uid == os.geteuid():
                    run_directories.reap(path / f"sandboxgym-{os.geteuid()}")  # made while TMPDIR was this folder
                    run_directories.remove_tree(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _announced(directory: str) -> str:
    """Name prefix of folders in a directory, which is recorded; one that is not found again, if recording fails."""
    global _run
    try:
        if _run is None or not _run.is_dir():
            use(run_directories.claim(KIND).absolute())
            assert _run is not None
        prefix = _prefix(_run)
        # A folder in another one is removed with it. A record would be a file outside TMPDIR, which checks look for.
        if directory not in _recorded and prefix not in directory:
            record = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
            (_run / f"{_IN}{record}").write_bytes(os.fsencode(directory))
            _recorded.add(directory)
    except OSError as error:
        log.warning("if this process is killed, its temporary folders stay: %s", error)
        return PREFIX
    return prefix


def _prefix(run: Path) -> str:
    return f"{PREFIX}{run.name.rpartition('-')[2]}-"
