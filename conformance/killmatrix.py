"""The kill matrix: which check detects which fault of the zoo, and false alarms on the known-good environments.

    python conformance/killmatrix.py [--budget quick|full] [--journal FILE] [--markdown docs/conformance/kill-matrix.md]

Each specimen is examined in a separate process, because some faults change the process. A mutant is killed when a check
of its ``killed_by`` fails; failures of other checks are shown but don't count. ``--journal`` resumes an interrupted run
(`examining`). Exit codes: 0 all killed and no alarm; 1 otherwise, or an unknown specimen; 2 wrong options.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import zoo  # noqa: E402  (found beside this file)
from examining import CHECKS, NAMED, Job, Row, family, journaled, killed, specimen  # noqa: E402

from sandboxgym.conformance import Verdict  # noqa: E402
from sandboxgym.conformance.digest import suite_digest  # noqa: E402

MARKS = {Verdict.FAIL: "✗", Verdict.PASS: "·", Verdict.SKIP: "", Verdict.INCONCLUSIVE: "?"}


def families() -> list[str]:
    """The part of the checks' ids before the dot, in order."""
    return list(dict.fromkeys(family(check.id) for check in CHECKS))


def cell(row: Row, name: str) -> str:
    """The strongest verdict of a family."""
    found = {verdict for id, verdict in row.verdicts.items() if family(id) == name}
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS):
        if verdict in found:
            return MARKS[verdict]
    return ""


def markdown(rows: dict[str, Row], goods: list[Row], command: str, whole: bool) -> str:
    """The page in Markdown, for the specimens that were run."""
    names = families()
    reported, left = sum(bool(m.follows) for m in zoo.MUTANTS if m.name in rows), len(zoo.MUTANTS) - len(rows)
    mutants = [m for m in zoo.MUTANTS if m.name in rows]
    missed = [m for m in mutants if not killed(m, rows[m.name])]
    alarms = [row for row in goods if row.failed]
    seconds = sum(row.seconds for row in (*rows.values(), *goods))
    lines = [
        "# Kill matrix",
        "",
        "Each row is an environment with exactly one fault (`conformance/zoo`), each column a family of",
        "checks: ✗ found a fault, · found none, ? could not tell, empty: skipped. A mutant counts as killed only if a",
        "check failed whose job it is to find that hazard; the last column names it.",
        "The mutants were written beside the checks, by the same authors: that all of them die says that each check",
        "finds what it is for, and nothing about faults that nobody thought of. For those see",
        "[how far it can be trusted](index.md#how-far-it-can-be-trusted).",
        *(() if whole else ("Here each met only the checks that must find it, one after the other, until one did.",)),
        "",
        f"- {len(mutants) - len(missed)} of {len(mutants)} mutants killed"
        + (f"; **escaped: {', '.join(m.name for m in missed)}**" if missed else ""),
        *([f"- {len(alarms)} alarms in {len(goods)} runs of known-good environments"] if goods else []),
        "- known-good environments, many times: [False alarms](false-alarms.md)",
        f"- {reported} of the mutants follow [reports to real projects](#reports-that-mutants-follow)",
        *([f"- {left} more mutants were not run"] if left else []),
        f"- suite {suite_digest()}",
        f"- `{command}` on {platform.system()} with {os.cpu_count()} cores, Python {platform.python_version()},"
        f" {time.strftime('%Y-%m-%d')}, {seconds / 60:.0f} minutes of runs",
        "",
        "## Mutants",
        "",
        "| mutant | hazard | " + " | ".join(names) + " | killed by |",
        "|---" * (len(names) + 3) + "|",
    ]
    for kind in dict.fromkeys(m.family for m in mutants):
        for m in (m for m in mutants if m.family == kind):
            row = rows[m.name]
            by = ", ".join(sorted(m.killed_by & row.failed)) or "**escaped**"
            cells = " | ".join(cell(row, name) for name in names)
            lines.append(f"| {m.family}: {m.name} | {m.hazard} | {cells} | {by} |")
    if following := [m for m in mutants if m.follows]:
        lines += [
            "",
            "## Reports that mutants follow",
            "",
            "What was reported there goes wrong here, in a small environment of the same kind and in code of our own;",
            "the projects may have mended it since.",
            "",
            "| report | mutant | hazard |",
            "|---|---|---|",
        ]
        for m in sorted(following, key=lambda m: m.follows.lower()):
            repository, number = m.follows.split("#")
            lines.append(f"| [{m.follows}](https://github.com/{repository}/issues/{number}) | {m.name} | {m.note} |")
    if not goods:
        return "\n".join([*lines, ""])
    lines += [
        "",
        "## Known-good environments",
        "",
        "| environment | alarms | what it is |",
        "|---|---|---|",
    ]
    by_name = {row.name: row for row in goods}
    for good in zoo.KNOWN_GOOD:
        if good.name in by_name:
            lines.append(f"| {good.name} | {', '.join(sorted(by_name[good.name].failed)) or 0} | {good.note} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Which check finds which fault of the zoo.")
    parser.add_argument("--budget", choices=("quick", "full"), default="quick", help="of all mutants; default quick")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="specimens; default all")
    parser.add_argument("--checks", nargs="*", metavar="ID", help="ids of checks; default all")
    parser.add_argument(
        "--named", action="store_true", help="mutants only, with the checks that must find them until one does"
    )
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep results here, and take those that it has")
    parser.add_argument("--all", action="store_true", help="take nothing from the journal")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once; 0: only what is there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    parser.add_argument("-v", "--verbose", action="store_true", help="messages of the checks too")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    chosen = {name: specimen(name) for name in options.only} if options.only else None
    mutants = [m for m in zoo.MUTANTS if chosen is None or m.name in chosen]
    goods = [g for g in zoo.KNOWN_GOOD if not options.named and (chosen is None or g.name in chosen)]
    jobs: list[Job] = [
        (m.name, _larger(options.budget, m.budget), 0, NAMED if options.named else options.checks) for m in mutants
    ]
    jobs += [(g.name, options.budget, 0, options.checks) for g in goods]
    rows: dict[str, Row] = {}
    correct: list[Row] = []
    by_name = {m.name: m for m in mutants}
    for count, row in enumerate(journaled(jobs, options.journal, processes=options.processes, anew=options.all), 1):
        if row.name in by_name:
            rows[row.name] = row
            verdict = "killed " if killed(by_name[row.name], row) else "ESCAPED"
        else:
            correct.append(row)
            verdict = "ALARM  " if row.failed else "good   "
        line = f"{count}/{len(jobs)} {verdict} {row.name} {row.seconds:.1f} s {' '.join(sorted(row.failed))}"
        print(line, flush=True)
        if options.verbose:
            for id in (id for id in row.messages if row.verdicts[id] in (Verdict.FAIL, Verdict.INCONCLUSIVE)):
                print(f"    {row.verdicts[id]} {id}: {row.messages[id][:300]}")
    mutants = [m for m in mutants if m.name in rows]
    missed = [m.name for m in mutants if not killed(m, rows[m.name])]
    alarms = sum(bool(row.failed) for row in correct)
    seconds = time.perf_counter() - start
    print(f"{len(mutants) - len(missed)} of {len(mutants)} mutants killed; escaped: {', '.join(missed) or 'none'}")
    print(f"{len(correct)} runs of known-good environments, {alarms} alarms; {seconds:.0f} s")
    if options.markdown is not None:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "conformance/killmatrix.py", *given])
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        whole = not options.named and options.checks is None
        options.markdown.write_text(markdown(rows, correct, command, whole), encoding="utf-8")
    return 1 if missed or alarms else 0


def _larger(one: str, other: str) -> str:
    return "full" if "full" in (one, other) else "quick"


if __name__ == "__main__":
    sys.exit(main())
