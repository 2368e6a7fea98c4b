"""Rows that behave in every way a row can, for test_bench_table.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sandboxgym.bench.table.row import Options, Pair, RowUnavailable, TableRow


def steady(options: Options) -> Iterator[Pair]:
    for number in itertools.count():
        print("what a row prints is no measurement")
        os.write(1, b"nor this\n")
        yield 1.0, 2.0 + 0.1 * (number % 3)


def few(options: Options) -> Iterator[Pair]:
    yield 1.0, 2.0


def missing(options: Options) -> Iterator[Pair]:
    raise RowUnavailable(f"no image {options.image}")
    yield


def failing(options: Options) -> Iterator[Pair]:
    yield 1.0, 2.0
    raise ValueError("on the way")


def dying(options: Options) -> Iterator[Pair]:
    yield 1.0, 2.0
    sys.stdout.flush()
    os._exit(7)


def littering(options: Options) -> Iterator[Pair]:
    """End at once, as if killed, with a temporary folder that nobody removes."""
    yield 1.0, 2.0
    print(tempfile.mkdtemp(), file=sys.stderr, flush=True)
    os._exit(7)


def hanging(options: Options) -> Iterator[Pair]:
    """Leave a process behind and a file that only a `finally` clause removes."""
    assert options.games
    child = subprocess.Popen(["sleep", "1000"])
    Path(options.games, "pid").write_text(str(child.pid))
    left = Path(options.games, "left")
    left.touch()
    try:
        while True:
            with contextlib.suppress(ValueError):
                time.sleep(1000)
    finally:
        left.unlink()
    yield 1.0, 2.0


ROWS = tuple(
    TableRow(f"test.{each.__name__}", each.__name__, "nothing", each)
    for each in (steady, few, missing, failing, dying, littering, hanging)
)
