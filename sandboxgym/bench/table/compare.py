"""Say what became slower between two measurements of the table, by more than the noise that both show.

sandboxgym bench compare BEFORE.json AFTER.json [--least 0.05]

Ratios to the alternatives are compared, not times: a busier or another machine slows both of a row. A row is slower or
faster if the 90 % intervals of its two ratios have nothing in common and the ratios differ by more than ``--least``. A
row whose alternative, unit or clock is another one in the other file is not compared.
The exit status is 1 if a row became slower, 2 if the files cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandboxgym.bench.table.measure import LEAST, Measured
from sandboxgym.bench.tools.against import interval
from sandboxgym.brief import brief


class TableError(Exception):
    """Raised for a file that holds no table; the message names it and says what was found."""


def summary(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float, float, float]:
    """Median of alternative / operation, its 90 % interval, and the medians of both.

    >>> summary([(1.0, 2.0), (2.0, 6.0), (1.0, 4.0)])
    (3.0, 2.0, 4.0, 1.0, 4.0)
    """
    ratios = [theirs / ours for ours, theirs in pairs if ours > 0]
    if not ratios:  # faster than the clock can tell
        return math.inf, math.inf, math.inf, 0.0, statistics.median(theirs for _, theirs in pairs)
    low, high = interval(ratios)
    ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
    return statistics.median(ratios), low, high, ours, theirs


def read(path: Path) -> tuple[dict[str, Any], dict[str, Measured]]:
    """Read a file that ``sandboxgym bench table --json`` wrote.

    Returns:
        What was written about the run, and its rows.

    Raises:
        TableError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content.pop("rows")
        if content.pop("format") != 1:
            raise ValueError("another format")
        found = {}
        for name, row in rows.items():
            row["pairs"] = [(float(ours), float(theirs)) for ours, theirs in row["pairs"]]
            found[name] = Measured(**row)
            if not all(0 <= value < math.inf for pair in found[name].pairs for value in pair):
                raise ValueError(f"costs of {brief(name, 80)} below 0 or without bound")
            if found[name].reason is None and len(found[name].pairs) < LEAST:
                raise ValueError(f"{len(found[name].pairs)} measurements of {brief(name, 80)}, which needs {LEAST}")
        for key, kind in (("machine", str), ("commit", str), ("load", (int, float)), ("seconds", (int, float))):
            if not isinstance(content.get(key), kind):
                raise ValueError(f"no {key}")
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TableError(f"{path}: expected what `sandboxgym bench table --json` writes, found {error}") from None
    return content, found


def compared(
    before: dict[str, Measured], after: dict[str, Measured], least: float
) -> list[tuple[str, str, float, tuple[float, float], tuple[float, float]]]:
    """Compare the rows of both runs.

    Returns:
        For each: its name, ``slower``, ``faster`` or ``as before``, time after / before for an equally fast
        alternative, and the 90 % intervals of both ratios.
    """
    found = []
    for name, old in before.items():
        new = after.get(name)
        if new is None or old.reason or new.reason:
            continue
        if (old.instead, old.unit, old.clock) != (new.instead, new.unit, new.clock):
            continue
        first, low, high, *_ = summary(old.pairs)
        second, low_now, high_now, *_ = summary(new.pairs)
        change = 1.0 if first == second else first / second if second else math.inf
        verdict = "as before"
        if high_now < low and change > 1 + least:
            verdict = "slower"
        elif low_now > high and change < 1 / (1 + least):
            verdict = "faster"
        found.append((name, verdict, change, (low, high), (low_now, high_now)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--least", type=float, default=0.05, help="change of a ratio that counts (default: 0.05)")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.least < math.inf:
        parser.error(f"--least: expected 0 or more, found {arguments.least}")
    try:
        (old, before), (new, after) = read(arguments.before), read(arguments.after)
    except TableError as error:
        parser.error(str(error))
    rows = compared(before, after, arguments.least)
    if not rows:
        parser.error("the files have no row that both measured")
    print(f"Before: commit {old['commit']}, {old['machine']}. After: commit {new['commit']}, {new['machine']}.\n")
    print("| row | | time after / before | ratio before | after |\n|---|---|---|---|---|")
    for name, verdict, change, first, second in sorted(rows, key=lambda row: -row[2]):
        spans = " | ".join(f"{low:.3g} to {high:.3g}" for low, high in (first, second))
        print(f"| {name} | {verdict} | {change:.2f} | {spans} |")
    alone = sorted({*before, *after} - {name for name, *_ in rows})
    if alone:
        print(f"\nNot measured in both, or not in the same way: {', '.join(alone)}")
    slower = [name for name, verdict, *_ in rows if verdict == "slower"]
    print(f"\nSlower: {', '.join(slower) or 'nothing'}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
