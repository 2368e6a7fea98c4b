"""Test of the suite on a busy machine: whether other programs change its verdicts.

    python conformance/busy.py [--runs 3] [--loops 4] [--markdown docs/conformance/busy.md]

Each specimen is examined once without busy loops, then ``--runs`` times with them, with the same seed. A mutant is run
against the checks that must detect it, a correct environment against all of them. The loops are child processes of this
command and end with it. Exit codes: 0 the verdicts are equal; 1 some differ, or a specimen is unknown; 2 wrong options.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from examining import CHECKS, NAMED, SEEDS_BUDGET, Job, Row, in_own_process, specimen  # noqa: E402  (found beside this file)
from zoo import Mutant  # noqa: E402

from sandboxgym.conformance import Verdict  # noqa: E402
from sandboxgym.conformance.digest import suite_digest  # noqa: E402

GOODS = ("alfworld", "corridor", "dice", "limited", "weather", "quest", "accounts")
"""Correct environments: deterministic, stochastic, wrapped, composed, with a self-written protocol or a database."""
MUTANTS = ("shallow-list", "rng-dropped", "one-in50", "memory-leak", "cost-grows", "shifted-by-four-tenths")
"""Faults that repetitions, samples, measured memory and measured time must find."""
SEED = 1


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Context in which ``loops`` processes compute all the time."""
    context = multiprocessing.get_context("spawn")
    made = [context.Process(target=_compute, daemon=True) for _ in range(loops)]
    for process in made:
        process.start()
    try:
        yield
    finally:
        for process in made:
            process.kill()
            process.join()


def _compute() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(100_000))


def job(name: str) -> Job:
    """The examination of a specimen."""
    kept = specimen(name)
    if isinstance(kept, Mutant):
        return name, kept.budget, SEED, NAMED
    return name, SEEDS_BUDGET, SEED, tuple(check.id for check in CHECKS)


def differing(quiet: Row, other: Row) -> list[str]:
    """Ids of the checks whose verdicts differ between two runs."""
    ids = quiet.verdicts.keys() | other.verdicts.keys()
    return sorted(id for id in ids if quiet.verdicts.get(id) != other.verdicts.get(id))


def told(verdicts: Sequence[Verdict]) -> str:
    """Counts of the verdicts, in words."""
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in Verdict if verdict in verdicts]
    return ", ".join(counts)


def markdown(runs: dict[str, list[Row]], loads: Sequence[float], loops: int, command: str) -> str:
    """The page in Markdown; ``runs`` holds the run without loops first for each specimen."""
    changed = {name: [differing(rows[0], row) for row in rows[1:]] for name, rows in runs.items()}
    beside = sum(len(rows) - 1 for rows in runs.values())
    same = sum(not difference for differences in changed.values() for difference in differences)
    lines = [
        "# Beside busy loops",
        "",
        f"Each specimen was examined once, and then again beside {loops} processes that do nothing but compute, with",
        "the same seed. A mutant met the checks that must find it, one after the other, until one did; a correct",
        "environment met all of them, in short runs.",
        "",
        f"- {same} of {beside} runs beside the loops have the verdicts of the run without",
        f"- load without the loops {loads[0]:.1f}, beside them {loads[1]:.1f} (runnable processes, mean of a minute)",
        f"- suite {suite_digest()}",
        f"- `{command}` on {platform.system()} with {os.cpu_count()} cores, Python {platform.python_version()},"
        f" {time.strftime('%Y-%m-%d')}",
        "",
        "| specimen | without | seconds | beside | seconds | other verdicts |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in runs.items():
        taken = statistics.median(row.seconds for row in rows[1:]) if rows[1:] else 0.0
        others = "; ".join(
            f"{id}: {rows[0].verdicts.get(id, 'not run')} became {row.verdicts.get(id, 'not run')}"
            for row, difference in zip(rows[1:], changed[name])
            for id in difference
        )
        first = told(list(rows[0].verdicts.values()))
        lines.append(
            f"| {name} | {first} | {rows[0].seconds:.0f} | {len(rows) - 1} runs | {taken:.0f} | {others or 'none'} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Whether other programs change the suite's verdicts.")
    parser.add_argument("--runs", type=int, default=3, help="of each specimen beside the loops (default 3)")
    parser.add_argument("--loops", type=int, default=4, help="processes that compute (default 4)")
    parser.add_argument("--only", nargs="+", default=[*GOODS, *MUTANTS], metavar="NAME", help="specimens of the zoo")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "conformance/busy.py", *given])
    jobs = [job(name) for name in options.only]
    runs: dict[str, list[Row]] = {name: [] for name in options.only}

    def examine() -> float:
        for row in in_own_process(jobs, processes=1):
            runs[row.name].append(row)
            print(f"{row.name} {row.seconds:.1f} s {told(list(row.verdicts.values()))}", flush=True)
        return os.getloadavg()[0]

    quiet = examine()
    with busy(options.loops):
        loads = [examine() for _ in range(options.runs)]
    page = markdown(runs, (quiet, max(loads, default=0.0)), options.loops, command)
    if options.markdown is not None:
        options.markdown.write_text(page, encoding="utf-8")
    changed = [name for name, rows in runs.items() if any(differing(rows[0], row) for row in rows[1:])]
    print(f"other verdicts beside the loops: {', '.join(changed) or 'none'}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
