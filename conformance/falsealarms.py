"""False alarms: many runs of the suite on environments without a fault, each with another seed.

    python conformance/falsealarms.py --runs 200 [--only NAME … --rest 1] --journal FILE
        [--markdown docs/conformance/false-alarms.md]

The n-th run has the seed n and takes the zoo's known-good environments in turn: all of them, or those that ``--only``
names, followed by ``--rest`` runs of each of the others. ``--journal`` resumes an interrupted command;
``--processes 0`` only writes the existing results. Exit codes: 0 no alarm, 1 some.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import zoo  # noqa: E402  (found beside this file)
from examining import CHECKS, SEEDS_BUDGET, Job, Row, journaled  # noqa: E402

from sandboxgym.conformance import Verdict  # noqa: E402
from sandboxgym.conformance.digest import suite_digest  # noqa: E402
from sandboxgym.conformance.stats.tests import proportion_interval  # noqa: E402


def jobs(runs: int, only: Sequence[str] = (), rest: int = 0) -> list[Job]:
    """The runs: seeds from 1 on, environments in turn, all checks.

    Args:
        runs: total number of runs of the environments in ``only``, or of all of them.
        only: names of known-good environments.
        rest: number of runs of each other environment, after these.
    """
    ids = tuple(check.id for check in CHECKS)
    goods = [good.name for good in zoo.KNOWN_GOOD]
    if unknown := sorted(set(only) - set(goods)):
        raise SystemExit(f"expected known-good environments ({', '.join(goods)}), found {', '.join(unknown)}")
    often = [name for name in goods if name in only] or goods
    names = [often[index % len(often)] for index in range(runs)]
    names += [name for _ in range(rest) for name in goods if name not in often]
    return [(name, SEEDS_BUDGET, seed, ids) for seed, name in enumerate(names, 1)]


def markdown(rows: Sequence[Row], wanted: int, command: str) -> str:
    """The page in Markdown.

    Args:
        rows: the runs that were made.
        wanted: number of runs that were to be made.
        command: command that makes the runs.
    """
    alarms = [row for row in rows if row.failed]
    verdicts = [verdict for row in rows for verdict in row.verdicts.values()]
    told = sum(verdict in (Verdict.PASS, Verdict.FAIL) for verdict in verdicts)
    failed = sum(verdict is Verdict.FAIL for verdict in verdicts)

    def interval(count: int, of: int) -> str:
        low, high = proportion_interval(count, of)
        return f"{count} of {of}, 95 % interval {low:.2%} to {high:.2%}"

    lines = [
        "# False alarms",
        "",
        "The suite on correct environments (deterministic, stochastic, wrapped), each run with a seed of its own.",
        "Every FAIL is a false alarm.",
        "",
        f"- runs with an alarm: {interval(len(alarms), len(rows))}",
        f"- checks that raised one: {interval(failed, told)} (those that passed or failed; the others skipped, or could"
        " not tell)",
        *([] if len(rows) >= wanted else [f"- {len(rows)} of {wanted} runs were made"]),
        f"- suite {suite_digest()}",
        f"- `{command}` on {platform.system()} with {os.cpu_count()} cores,"
        f" Python {platform.python_version()}, {time.strftime('%Y-%m-%d')},"
        f" {sum(row.seconds for row in rows) / 60:.0f} minutes of runs on a busy machine",
        "",
        "| environment | seeds | alarms | s a run | what it is |",
        "|---|---|---|---|---|",
    ]
    for good in zoo.KNOWN_GOOD:
        mine = [row for row in rows if row.name == good.name]
        raised = "; ".join(f"{', '.join(sorted(row.failed))} (seed {row.seed})" for row in mine if row.failed)
        if mine:
            taken = statistics.median(row.seconds for row in mine)
            lines.append(f"| {good.name} | {len(mine)} | {raised or 0} | {taken:.0f} | {good.note} |")
    lines += [
        "",
        f"Runs are short: {SEEDS_BUDGET.traces} control runs of at most {SEEDS_BUDGET.steps} steps,",
        f"{SEEDS_BUDGET.repeats} repetitions. All {len(CHECKS)} checks are in them, those of resources and cost too.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="The suite on environments without a fault, with many seeds.")
    parser.add_argument("--runs", type=int, default=200, help="default 200")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="environments; default all, in turn")
    parser.add_argument("--rest", type=int, default=0, metavar="N", help="runs of each of the others (default 0)")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep results here, and take those that it has")
    parser.add_argument("--all", action="store_true", help="take nothing from the journal")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once; 0: only what is there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here, and again every ten runs")
    options = parser.parse_args(arguments)
    given = [
        "--runs",
        str(options.runs),
        *(["--only", *options.only, "--rest", str(options.rest)] * bool(options.only)),
    ]
    command = shlex.join(["python", "conformance/falsealarms.py", *given])
    wanted = jobs(options.runs, options.only, options.rest)
    rows: list[Row] = []
    for row in journaled(wanted, options.journal, processes=options.processes, anew=options.all):
        rows.append(row)
        print(
            f"{len(rows)}/{len(wanted)} {row.name} seed {row.seed} {row.seconds:.1f} s {sorted(row.failed)}",
            flush=True,
        )
        for id in sorted(row.failed):
            print(f"    {id}: {row.messages[id][:300]}", flush=True)
        if options.markdown is not None and len(rows) % 10 == 0:
            options.markdown.write_text(markdown(rows, len(wanted), command), encoding="utf-8")
    if options.markdown is not None and rows:
        options.markdown.write_text(markdown(rows, len(wanted), command), encoding="utf-8")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
