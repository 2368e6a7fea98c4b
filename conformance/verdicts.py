"""Verdicts that the tests expect of the zoo (test_zoo.py), kept while nothing changes that they depend on.

    python conformance/verdicts.py [--processes 2]     # examine what has changed since, and write the file anew

A specimen is examined again by the tests if its code, that of its checks or a package that it uses has changed
(`examining.journaled`), and on every eighth day in any case. The file holds for one minor version of Python; with
another one, and without the file, the tests examine all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import examining  # noqa: E402  (found beside this file)
import sources  # noqa: E402
import zoo  # noqa: E402
from examining import Job, Row  # noqa: E402

from sandboxgym.system.atomic import write_atomic  # noqa: E402

FILE = HERE / f"verdicts-{sys.version_info.major}.{sys.version_info.minor}.jsonl"
DAYS = 8
"""Number of days in which everything is examined again, about an equal part on each day."""
SHARES = 4
"""Number of parts of the checks; each known-good environment meets one part, and the next environment the next part."""
IN_JAIL = ("api", "restore.trace_equality", "restore.many", "fork.trace_equality")
"""Checks for a jail, whose steps are processes, so that all checks would take five minutes. The checks of the theme
`hostile`, which find all its mutants, meet it in tests/conformance/probes/test_hostile.py."""


OF_SHELLS = ("api", "probes", "hostile", "restore.many", "fork.trace_equality", "fork.crowd")
"""Checks of commands, and a few that see what commands change."""
QUICK = {"limited-dice": "", "shell": OF_SHELLS}
"""Known-good environments that meet checks with the quick budget, and the beginnings of these checks' ids: all checks
for one with randomness and a wrapper. test_envs.py has environments without randomness."""


def share_of(good: zoo.Good) -> list[str]:
    """Checks that a known-good environment meets in the tests: a part of all, and those that others depend on."""
    part = zoo.KNOWN_GOOD.index(good) % SHARES
    ids = [check.id for check in examining.CHECKS]
    if good.make.__module__ == zoo.jail.__name__:
        return [id for id in ids if id.startswith(IN_JAIL)]
    always = {"restore.many", *examining.PREREQUISITES}
    return [id for index, id in enumerate(ids) if index % SHARES == part or id in always]


def job_of(kept: zoo.Mutant | zoo.Good) -> Job:
    """The run of a specimen in the tests: a mutant meets the checks that must find it, until one does."""
    if isinstance(kept, zoo.Mutant):
        return kept.name, kept.budget, 0, examining.NAMED
    return kept.name, examining.SEEDS_BUDGET, 1, share_of(kept)


def quick_job_of(name: str) -> Job:
    """The run of one of `QUICK` in the tests."""
    return name, "quick", 0, [check.id for check in examining.CHECKS if check.id.startswith(QUICK[name])]


def jobs() -> list[Job]:
    """All runs of the tests."""
    return [*map(job_of, (*zoo.MUTANTS, *zoo.KNOWN_GOOD)), *map(quick_job_of, QUICK)]


def due(name: str, day: datetime.date) -> bool:
    """True if a specimen is examined on this day whatever the file says; SANDBOXGYM_ZOO=all makes every day one."""
    return os.environ.get("SANDBOXGYM_ZOO") == "all" or (sum(name.encode()) + day.toordinal()) % DAYS == 0


def as_expected(row: Row) -> bool:
    """True if a row is what the tests want: that a mutant was killed, that nothing else raised an alarm."""
    kept = examining.specimen(row.name)
    return examining.killed(kept, row) if isinstance(kept, zoo.Mutant) else not row.failed


def row_of(job: Job, *, file: Path = FILE, day: datetime.date | None = None) -> Row:
    """The row of a run: from the file while it holds and is as expected, else by examining the specimen."""
    if not due(job[0], day or datetime.date.today()):
        for row in examining.journaled([job], file, processes=0):
            if as_expected(row):
                return row
    (row,) = examining.in_own_process([job], processes=1)
    return row


def write(chosen: Sequence[Job], file: Path, *, processes: int) -> None:
    """Bring a file up to date with these runs; rows of the file that still hold are not examined again."""
    rows: dict[tuple[str, int], Row] = {}
    for row in examining.journaled(chosen, file, processes=processes):
        rows[row.name, row.seed] = row
        print(f"{len(rows)} of {len(chosen)}: {row.name}, {row.seconds:.1f} s", file=sys.stderr, flush=True)
    lines = []
    for job in chosen:
        row = rows[job[0], job[2]]
        brief = replace(row, messages={}, took={id: round(seconds, 2) for id, seconds in row.took.items()})
        made_by = {id: sources.check_digest(id) for id in row.verdicts}
        entry = {"key": examining.key_of(job), "checks": made_by, "row": asdict(brief)}
        lines.append(json.dumps(entry, separators=(",", ":")) + "\n")
    write_atomic(file, "".join(lines).encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Keep the verdicts that the tests expect of the zoo.")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once")
    options = parser.parse_args(arguments)
    write(jobs(), FILE, processes=options.processes)


if __name__ == "__main__":
    main()
