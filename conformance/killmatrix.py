"""The kill matrix: which check finds which fault of the zoo, and that none raises an alarm on the known-good.

    python conformance/killmatrix.py [--budget quick|full] [--seeds N] [--markdown docs/conformance/kill-matrix.md]

Each specimen is examined in a process of its own, for some faults change the process. A mutant is killed when a check
of its ``killed_by`` fails; failures of other checks are shown but don't count. ``--seeds`` examines each known-good
environment that many times. Exit codes: 0 all killed and no alarm, 1 otherwise, 3 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import zoo  # noqa: E402  (found beside this file)
from zoo import Good, Mutant  # noqa: E402

from sandboxgym.conformance import Budget, Subject, Verdict, run  # noqa: E402
from sandboxgym.conformance.runner import all_checks  # noqa: E402

CHECKS = all_checks()
NAMED = ("named",)
"""In place of ids of checks: those of the mutant's ``killed_by``, see `hunt`."""
MARKS = {Verdict.FAIL: "✗", Verdict.PASS: "·", Verdict.SKIP: "", Verdict.INCONCLUSIVE: "?"}
SEEDS_BUDGET = Budget("seeds", traces=2, steps=30, repeats=20, forks=3, cycles=10, depth=10, samples=200, seconds=0.5)
"""Of the runs of known-good environments with seeds after the first: many short ones."""
SLOW_ALARMS = ("cost.", "resources.")
"""Families that depend on the machine rather than on the seed; run with the first seed only."""


@dataclass(frozen=True)
class Row:
    """What became of one specimen.

    Attributes:
        name: of the specimen.
        seed: of the run.
        verdicts: by check id.
        messages: of failed and inconclusive checks.
        seconds: of the whole run.
    """

    name: str
    seed: int
    verdicts: dict[str, Verdict]
    messages: dict[str, str]
    seconds: float

    @property
    def failed(self) -> frozenset[str]:
        return frozenset(id for id, verdict in self.verdicts.items() if verdict is Verdict.FAIL)


def specimen(name: str) -> Mutant | Good:
    """A specimen of the zoo by its name."""
    found: dict[str, Mutant | Good] = {s.name: s for s in (*zoo.MUTANTS, *zoo.KNOWN_GOOD)}
    try:
        return found[name]
    except KeyError:
        raise SystemExit(f"expected a specimen of the zoo ({', '.join(found)}), found {name!r}") from None


def examine(name: str, *, budget: str | Budget = "quick", seed: int = 0, only: Collection[str] | None = None) -> Row:
    """Run the suite on one specimen, in this process."""
    kept = specimen(name)
    subject = Subject(kept.make, name=name, actions=kept.actions, observe_state=kept.observe_state)
    known = None if only is None else {check.id for check in CHECKS} & set(only)
    report = run(subject, budget=budget, seed=seed, only=known)
    return Row(
        name,
        seed,
        {result.id: result.verdict for result in report.results},
        {r.id: r.message for r in report.results if r.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)},
        report.seconds,
    )


def hunt(mutant: Mutant, *, budget: str | Budget = "quick", seed: int = 0) -> Row:
    """Run the checks that must find a mutant, one after the other, until one fails."""
    rows: list[Row] = []
    for check in CHECKS:
        if check.id in mutant.killed_by:
            rows.append(examine(mutant.name, budget=budget, seed=seed, only={check.id}))
            if rows[-1].failed:
                break
    return Row(
        mutant.name,
        seed,
        {id: verdict for row in rows for id, verdict in row.verdicts.items()},
        {id: message for row in rows for id, message in row.messages.items()},
        sum(row.seconds for row in rows),
    )


def killed(mutant: Mutant, row: Row) -> bool:
    """Whether a check that names the hazard failed."""
    return bool(mutant.killed_by & row.failed)


def in_own_process(
    jobs: Sequence[tuple[str, str | Budget, int, Collection[str] | None]], *, processes: int
) -> Iterable[Row]:
    """`examine` each in a new process; what one leaves in its temporary directory goes with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killmatrix"])
    with context.Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_examine, jobs)


def _examine(job: tuple[str, str | Budget, int, Collection[str] | None]) -> Row:
    name, budget, seed, only = job
    with tempfile.TemporaryDirectory(prefix="zoo-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            try:
                kept = specimen(name)
                if only == NAMED and isinstance(kept, Mutant):
                    return hunt(kept, budget=budget, seed=seed)
                return examine(name, budget=budget, seed=seed, only=only)
            finally:
                os.chdir("/")


def families() -> list[str]:
    """The part of the checks' ids before the dot, in order."""
    return list(dict.fromkeys(check.id.partition(".")[0] for check in CHECKS))


def cell(row: Row, family: str) -> str:
    """The strongest verdict of a family."""
    found = {verdict for id, verdict in row.verdicts.items() if id.partition(".")[0] == family}
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS):
        if verdict in found:
            return MARKS[verdict]
    return ""


def markdown(rows: dict[str, Row], alarms: list[Row], sweep: dict[str, int], command: str, seconds: float) -> str:
    """The whole page."""
    names = families()
    mutants = [m for m in zoo.MUTANTS if m.name in rows]
    missed = [m for m in mutants if not killed(m, rows[m.name])]
    lines = [
        "# Kill matrix",
        "",
        "Each row is an environment with exactly one fault (`conformance/zoo`), each column a family of",
        "checks: ✗ found a fault, · found none, ? could not tell, empty: skipped. A mutant counts as killed only if a",
        "check failed whose job it is to find that hazard; the last column names it.",
        "",
        f"- {len(mutants) - len(missed)} of {len(mutants)} mutants killed"
        + (f"; **escaped: {', '.join(m.name for m in missed)}**" if missed else ""),
        f"- {sum(sweep.values())} runs of {len(sweep)} known-good environments, {len(alarms)} alarms",
        f"- `{command}` on {platform.system()} with {os.cpu_count()} cores, Python {platform.python_version()},"
        f" {time.strftime('%Y-%m-%d')}, {seconds / 60:.0f} minutes",
        "",
        "## Mutants",
        "",
        "| mutant | hazard | " + " | ".join(names) + " | killed by |",
        "|---" * (len(names) + 3) + "|",
    ]
    for family in dict.fromkeys(m.family for m in mutants):
        for m in (m for m in mutants if m.family == family):
            row = rows[m.name]
            by = ", ".join(sorted(m.killed_by & row.failed)) or "**escaped**"
            cells = " | ".join(cell(row, name) for name in names)
            lines.append(f"| {m.family}: {m.name} | {m.hazard} | {cells} | {by} |")
    lines += [
        "",
        "## Known-good environments",
        "",
        "| environment | seeds | alarms | what it is |",
        "|---|---|---|---|",
    ]
    for good in zoo.KNOWN_GOOD:
        if good.name in sweep:
            raised = "; ".join(f"{', '.join(sorted(r.failed))} (seed {r.seed})" for r in alarms if r.name == good.name)
            lines.append(f"| {good.name} | {sweep[good.name]} | {raised or 0} | {good.note} |")
    lines += [
        "",
        f"The first seed has the budget `quick` and all checks; the others have {SEEDS_BUDGET.traces} control runs,",
        f"{SEEDS_BUDGET.repeats} repetitions, and leave out {' and '.join(f'`{family}*`' for family in SLOW_ALARMS)},",
        "which depend on the machine rather than on the seed.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Which check finds which fault of the zoo.")
    parser.add_argument("--budget", choices=("quick", "full"), default="quick", help="of all mutants; default quick")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each known-good environment; default 1")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="specimens; default all")
    parser.add_argument("--checks", nargs="*", metavar="ID", help="ids of checks; default all")
    parser.add_argument(
        "--named", action="store_true", help="of each mutant only the checks that must find it, until one does"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    parser.add_argument("-v", "--verbose", action="store_true", help="messages of the checks too")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    chosen = {name: specimen(name) for name in options.only} if options.only else None
    mutants = [m for m in zoo.MUTANTS if chosen is None or m.name in chosen]
    goods = [g for g in zoo.KNOWN_GOOD if chosen is None or g.name in chosen]
    quick = tuple(check.id for check in CHECKS if not check.id.startswith(SLOW_ALARMS))
    jobs: list[Any] = [
        (m.name, _larger(options.budget, m.budget), 0, NAMED if options.named else options.checks) for m in mutants
    ]
    jobs += [(g.name, options.budget, 0, options.checks) for g in goods]
    jobs += [(g.name, SEEDS_BUDGET, s, options.checks or quick) for s in range(1, options.seeds) for g in goods]
    rows: dict[str, Row] = {}
    alarms: list[Row] = []
    sweep: dict[str, int] = dict.fromkeys((g.name for g in goods), 0)
    by_name = {m.name: m for m in mutants}
    for count, row in enumerate(in_own_process(jobs, processes=options.processes), 1):
        if row.name in by_name:
            rows[row.name] = row
            verdict = "killed " if killed(by_name[row.name], row) else "ESCAPED"
        else:
            sweep[row.name] += 1
            verdict = "ALARM  " if row.failed else "good   "
            alarms += [row] if row.failed else []
        if options.verbose or verdict in ("ESCAPED", "ALARM  ") or row.name in by_name:
            print(
                f"{count}/{len(jobs)} {verdict} {row.name} {row.seconds:.1f} s {' '.join(sorted(row.failed))}",
                flush=True,
            )
        if options.verbose:
            for id, message in row.messages.items():
                print(f"    {row.verdicts[id]} {id}: {message[:300]}")
    missed = [m.name for m in mutants if not killed(m, rows[m.name])]
    seconds = time.perf_counter() - start
    print(f"{len(mutants) - len(missed)} of {len(mutants)} mutants killed; escaped: {', '.join(missed) or 'none'}")
    print(f"{sum(sweep.values())} runs of known-good environments, {len(alarms)} alarms; {seconds:.0f} s")
    if options.markdown is not None:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "conformance/killmatrix.py", *given])
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(rows, alarms, sweep, command, seconds), encoding="utf-8")
    return 1 if missed or alarms else 0


def _larger(one: str, other: str) -> str:
    return "full" if "full" in (one, other) else "quick"


if __name__ == "__main__":
    sys.exit(main())
