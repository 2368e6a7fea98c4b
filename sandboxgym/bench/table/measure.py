"""Measurement of the table's rows, each in a process of its own that ends with its time.

A row's process prints pairs as it measures them; what it printed by its deadline counts, and a row that fails or hangs
costs the others nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandboxgym.bench.table.row import Options, RowUnavailable, TableRow
from sandboxgym.system import interpreter

SOURCES = ("sandboxgym.bench.table.rows", "bpo_ref.experiments.bench")
"""Modules that have `ROWS`; one that cannot be imported here is left out, with its reason."""
START = 180.0
"""Seconds that a row may take to get ready and to have its least measurements, beyond its time."""
LEAST = 3
"""Pairs below which a row has no ratio."""


@dataclass
class Measured:
    """A row's measurements.

    Args:
        pairs: of the operation and its alternative, in the row's unit.
        reason: why it has none, or too few; None if it has.
    """

    what: str
    instead: str
    unit: str
    clock: str
    pairs: list[tuple[float, float]] = field(default_factory=list)
    reason: str | None = None


def all_rows() -> tuple[dict[str, tuple[str, TableRow]], dict[str, str]]:
    """Find the rows.

    Returns:
        Module and row by name; reasons of modules that cannot be imported.
    """
    rows: dict[str, tuple[str, TableRow]] = {}
    missing: dict[str, str] = {}
    for source in SOURCES:
        try:
            module = importlib.import_module(source)
        except ImportError as error:
            missing[source] = f"{type(error).__name__}: {error}"
            continue
        rows |= {row.name: (source, row) for row in module.ROWS}
    return rows, missing


def measure(source: str, row: TableRow, options: Options, seconds: float) -> Measured:
    """Measure one row for some seconds, in a process of its own, which ends in any case.

    Args:
        source: module of the row.
        row: to be measured.
        options: of all rows.
        seconds: from its first pair on.
    """
    found = Measured(row.what, row.instead, row.unit, row.clock)
    given = json.dumps({name: None if value is None else str(value) for name, value in asdict(options).items()})
    command = interpreter.module_command(__name__, source, row.name, given)
    with tempfile.TemporaryFile() as errors, _group(command, errors) as process:
        assert process.stdout is not None
        lines = _lines(process.stdout)
        last = time.monotonic() + START + seconds
        enough = last
        while found.reason is None and (left := (last if len(found.pairs) < LEAST else enough) - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                status = process.wait()
                if status:
                    errors.seek(0)
                    said = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
                    found.reason = f"ended with {status}: {said[-1][:300]}"
                break
            answer = json.loads(line)
            if isinstance(answer, str):
                found.reason = answer
                continue
            if not found.pairs:
                enough = time.monotonic() + seconds
            found.pairs.append((answer[0], answer[1]))
    if found.reason is None and len(found.pairs) < LEAST:
        found.reason = f"{len(found.pairs)} measurements in {START + seconds:.0f} s; at least {LEAST} are needed"
    return found


@contextlib.contextmanager
def _group(command: Sequence[str], errors: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own, which is asked to end, and then killed; its temporary files go with it."""
    with tempfile.TemporaryDirectory(prefix="sandboxgym-bench-", ignore_cleanup_errors=True) as folder:
        environment = {**interpreter.environment(), "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, process_group=0
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)  # for its `finally` clauses: containers, folders
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _lines(pipe: Any) -> queue.Queue[bytes | None]:
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile
            for line in pipe:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _child(source: str, name: str, given: str) -> None:
    """Print a row's pairs, one JSON list per line, or a JSON string that says why there are none."""
    paths = ("webshop", "catalogue")
    values: dict[str, Any] = {
        key: Path(value) if key in paths and value else value for key, value in json.loads(given).items()
    }
    (row,) = (row for row in importlib.import_module(source).ROWS if row.name == name)
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # what a row prints is no answer
    os.dup2(2, 1)
    try:
        for pair in row.pairs(Options(**values)):
            print(json.dumps(pair), file=answers, flush=True)
    except RowUnavailable as error:
        print(json.dumps(str(error)), file=answers, flush=True)


if __name__ == "__main__":
    # A shell ignores Ctrl-C for what it starts in the background, and so would rows that are asked to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _child(*sys.argv[1:])
