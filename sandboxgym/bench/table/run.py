"""Measure the whole table and write it down.

sandboxgym bench table [--seconds 20] [--minutes 14] [--only alfworld sandbox …] [--json FILE] [--write FILE]
    [--image IMAGE] [--games valid_seen] [--webshop CHECKOUT --catalogue DIR] [--from FILE.json]

Each row is measured in turns with what a user would do instead, so that ratios hold on a busy machine; compare times
within this page only. ``sandboxgym bench compare`` says what became slower between two files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandboxgym.bench.table.compare import TableError, read, summary
from sandboxgym.bench.table.measure import Measured, all_rows, measure
from sandboxgym.bench.table.row import Options
from sandboxgym.bench.tools import result_page
from sandboxgym.bench.tools.against import HERE, revision

FORMAT = 1
_LEAST = 1.0
"""Seconds that a row has in any case."""


def quantity(value: float, unit: str) -> str:
    """Format seconds or bytes with three digits.

    >>> quantity(0.0000123, "seconds"), quantity(2.5, "seconds"), quantity(331, "bytes"), quantity(20e6, "bytes")
    ('12.3 µs', '2.5 s', '331 B', '20 MB')
    """
    steps = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if unit == "seconds" else ((1e6, "MB"), (1e3, "kB"), (1.0, "B"))
    scale, name = next((step for step in steps if value >= step[0]), steps[-1])
    return f"{value / scale:.3g} {name}"


def times(ratio: float) -> str:
    """Format a ratio with three digits.

    >>> times(0.7712), times(61.29), times(2000.0)
    ('0.771', '61.3', '2,000')
    """
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"


def table(found: dict[str, Measured]) -> list[str]:
    """Format rows as Markdown, ratio first; then the rows that were not measured, with reasons."""
    lines = ["| instead / operation | operation | instead | takes | instead | clock |", "|---|---|---|---|---|---|"]
    for row in found.values():
        if row.reason is None:
            ratio, low, high, ours, theirs = summary(row.pairs)
            cells = (f"**{times(ratio)}** ({times(low)} to {times(high)})", row.what, row.instead)
            clock = "" if row.unit == "bytes" else row.clock
            measured = (quantity(ours, row.unit), quantity(theirs, row.unit), clock)
            lines.append(f"| {' | '.join((*cells, *measured))} |")
    if left := [(name, row) for name, row in found.items() if row.reason]:
        lines += ["", "Not measured:", "", *(f"- `{name}`, {row.what}: {row.reason}" for name, row in left)]
    return lines


NOTE = """
*Rollouts … asynchronous* has 32 paths and 16 environments, at a hundredth of the durations that it stands for: the
last paths of a rollout, which nobody helps, and the drivers' own work are a large part of it. With more paths and
longer steps [it is more](tree.md#asynchronous-rollouts)."""
"""Remark on a row of the table."""

MORE = """
## In more detail

These pages have older measurements of more cases: [snapshots in memory](results/details/snapshot-cost.md), the engines
of [ALFWorld](results/details/alfworld-engine.md) and [WebShop](results/details/webshop-engine.md), its
[search](results/details/webshop-search.md) and [browser](results/details/webshop-browser.md),
[sandboxes](results/details/sandbox.md), [with running processes](results/details/full-snapshots.md),
[twenty live forks](results/details/live-forks.md), [SWE-bench](results/details/swebench.md),
[the pool](results/details/pool.md), [a fleet](results/details/fleet.md),
[the trainer](results/details/trainer-speed.md), [snapshots in training](results/details/overhead.md)."""
"""Links from ``docs/performance.md``."""


def write_json(target: Path, head: dict[str, Any], found: dict[str, Measured]) -> None:
    """Write measurements, for pages and comparisons."""
    rows = {name: dataclasses.asdict(row) for name, row in found.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"format": FORMAT, **head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a row failed."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row, from its first measurement on")
    parser.add_argument(
        "--minutes", type=float, default=14.0, help="for all rows together, which have less time each if need be"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write the measurements to")
    parser.add_argument("--write", type=Path, metavar="FILE", help="file to write the page to")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measurements to take, without any")
    parser.add_argument("--games", default="embedded", help="ALFWorld's games: a split, a directory…")
    parser.add_argument("--webshop", type=Path, metavar="DIR", help="a checkout of princeton-nlp/WebShop")
    parser.add_argument("--catalogue", type=Path, metavar="DIR", help="its products")
    parser.add_argument("--nouns", help="argument of gym.make of WebShop")
    parser.add_argument("--image", help="Docker image with bash, for Docker's own operations")
    arguments = parser.parse_args(argv)
    for name in ("seconds", "minutes"):
        if not 0 < (given := getattr(arguments, name)) < float("inf"):
            parser.error(f"--{name}: expected a number of {name} above 0, found {given}")
    if arguments.source:
        try:
            head, found = read(arguments.source)
        except TableError as error:
            parser.error(str(error))
    else:
        head = {"machine": result_page.machine(), "commit": revision(HERE), "seconds": arguments.seconds}
        head["load"] = os.getloadavg()[0]
        found = _measured(parser, arguments)
    if arguments.json:
        write_json(arguments.json, head, found)
    lines = [
        "# Performance",
        "",
        "How fast each operation of this package is beside what a user would do instead: steps, snapshots, restores "
        "and forks, searches, sandboxes, rollouts and updates of the trainer. One command measures the table:",
        "",
        "```bash",
        "make bench",
        "```",
        "",
        f"{head['machine']}; commit {head['commit']}; load {head['load']:.1f} at the start. Ratios are medians of "
        f"measurements in turns, with 90 % intervals; each row had up to {head['seconds']:g} seconds. Below 1 the "
        "alternative is the faster one. Compare times within this page only.",
        "",
        *table(found),
        NOTE,
        MORE,
    ]
    result_page.publish(lines, arguments.write)
    return int(any(row.reason and row.reason.startswith("ended with") for row in found.values()))


def _measured(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Measured]:
    rows, missing = all_rows()
    for source, reason in missing.items():
        print(f"{source}: its rows are left out: {reason}", file=sys.stderr)
    chosen = {name: row for name, row in rows.items() if not arguments.only or name.startswith(tuple(arguments.only))}
    if not chosen:
        parser.error(f"--only: no row begins with {' or '.join(arguments.only)}; there are: {', '.join(rows)}")
    options = Options(arguments.games, arguments.webshop, arguments.catalogue, arguments.nouns, arguments.image)
    found = {}
    began, measuring = time.monotonic(), 0.0
    for number, (name, (source, row)) in enumerate(chosen.items(), 1):
        spent = time.monotonic() - began
        ready = (spent - measuring) / max(1, number - 1)  # what a row took to get ready
        share = (60 * arguments.minutes - spent) / (len(chosen) - number + 1) - ready
        seconds = min(arguments.seconds, max(share, _LEAST))
        measuring += seconds
        print(f"{number}/{len(chosen)} {name}", end="", file=sys.stderr, flush=True)
        found[name] = measured = measure(source, row, options, seconds)
        said = measured.reason or f"{summary(measured.pairs)[0]:.3g} ({len(measured.pairs)} measurements)"
        print(f": {said}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
