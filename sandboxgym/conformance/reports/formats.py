"""Reports for the terminal and as JSON; `html`, `markdown` and `badge` write files.

The terminal report has colour only on a terminal (with ``NO_COLOR`` unset). It lists what was NOT tested, because a
certificate is only as good as its coverage.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from sandboxgym.conformance.check import Check, Level, Result, Verdict
from sandboxgym.conformance.reports import comparison
from sandboxgym.conformance.reports.caveats import caveats
from sandboxgym.conformance.reports.verdicts import headline
from sandboxgym.conformance.runner import Report, all_checks

_COLOURS = {Verdict.PASS: "32", Verdict.FAIL: "1;31", Verdict.SKIP: "90", Verdict.INCONCLUSIVE: "33"}
_KINDS = {"pass": Verdict.PASS, "fail": Verdict.FAIL, "inconclusive": Verdict.INCONCLUSIVE}
_MARKS = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.SKIP: "skip", Verdict.INCONCLUSIVE: "?   "}


def coloured(stream: TextIO) -> bool:
    """True if a stream is a terminal that may have colours; see https://no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Progress:
    """Listener of `runner.run`: one line updated in place on a terminal, one line per finished check elsewhere."""

    def __init__(self, total: int, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.total = total
        self.done = 0
        self.failed = 0
        self.stream = stream or sys.stderr
        self.shown = self.stream.isatty() and os.environ.get("TERM") != "dumb" and not quiet
        self.logged = not self.shown and not quiet

    def __call__(self, check: Check, result: Result | None) -> None:
        """See `runner.Listener`."""
        if result is None:
            failed = f", {self.failed} failed" if self.failed else ""
            self._show(f"[{self.done + 1}/{self.total}{failed}] {check.id} …")
        else:
            self.done += 1
            self.failed += result.verdict is Verdict.FAIL
            if self.logged:
                line = f"[{self.done}/{self.total}] {_MARKS[result.verdict]} {check.id} {result.seconds:.1f} s"
                print(line, file=self.stream, flush=True)

    def clear(self) -> None:
        """Remove the progress line."""
        self._show("")

    def _show(self, text: str) -> None:
        if self.shown:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write("\r\x1b[2K" + text[:width])
            self.stream.flush()


def terminal(report: Report, *, colour: bool = False, width: int | None = None) -> str:
    """The report as text."""
    width = width or min(120, shutil.get_terminal_size((100, 24)).columns)

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colour else text

    levels = {check.id: check.level for check in all_checks()}
    lines = [paint(f"Conformance of {report.name}", "1")]
    spec = ", ".join(f"{name} {comparison.plain(value)}" for name, value in report.capabilities.items())
    lines.append(paint(f"budget {report.budget}, seed {report.seed}; declared: {spec or 'nothing'}", "90"))
    if report.strength is not None:
        lines += textwrap.wrap(f"strength: {report.strength}", width, subsequent_indent="    ")
    for caveat in caveats(report.to_json()):
        lines += textwrap.wrap(f"NOT tested: {caveat}", width, subsequent_indent="    ")
    for level in Level:
        results = [result for result in report.results if levels.get(result.id) == level]
        if not results:
            continue
        lines += ["", paint(f"Level {int(level)}: {level.name.lower()}", "1")]
        for result in results:
            mark = paint(_MARKS[result.verdict], _COLOURS[result.verdict])
            lines.append(f"  {mark}  {result.id:<36} {result.seconds:6.2f} s")
            if result.message:
                lines += textwrap.wrap(result.message, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    for cause in report.causes:
        lines += _failed(report[cause.root], width, paint)
        others = cause.checks[1:]
        if others:
            where = f" ({cause.what})" if cause.what else ""
            text = f"Probably of the same cause{where}: {', '.join(others)}"
            lines += ["", *textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")]
    lines += _unexercised(report, width, paint)
    if report.not_tested:
        lines += ["", paint("NOT tested", "1")]
        unasked = sum("not asked for" in reason for _, reason in report.not_tested)
        for id, reason in report.not_tested:
            if "not asked for" not in reason:
                text = f"{id}: {' '.join(reason.split())}"
                lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")
        if unasked:
            lines.append(f"  {unasked} more checks, which were not asked for (--list has all)")
    if report.beside:
        lines += _side_by_side(report.to_json(), paint)
        for label, other in zip(comparison.labels(report.to_json())[1:], report.beside):
            for result in other.failures:
                lines += ["", paint(f"{label}: {result.id} failed", "1;31")]
                lines += textwrap.wrap(result.message, width, initial_indent="  ", subsequent_indent="  ")
    counts = [
        paint(f"{len(report.of(verdict))} {verdict}", _COLOURS[verdict]) for verdict in Verdict if report.of(verdict)
    ]
    text, kind = headline(report.to_json())
    lines += ["", paint(text, _COLOURS[_KINDS[kind]])] if report.results else [""]
    lines += [f"{', '.join(counts) or 'nothing ran'} in {report.seconds:.1f} s"]
    return "\n".join(lines) + "\n"


def _failed(result: Result, width: int, paint: Callable[[str, str], str]) -> list[str]:
    """A failure in full."""
    lines = ["", paint(f"{result.id} failed", "1;31")]
    known = next((check for check in all_checks() if check.id == result.id), None)
    if known is not None:
        lines += textwrap.wrap(f"Hazard: {known.hazard}", width, initial_indent="  ", subsequent_indent="  ")
    evidence = dict(result.evidence)
    for row in evidence.pop("difference", ()):
        if row["differs"]:
            text = f"{row['field']}: expected {row['expected']}, found {row['found']}"
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")
            evidence.pop("expected", None), evidence.pop("found", None)
    for name, value in evidence.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if "\n" in text:
            lines += [f"  {name}:", textwrap.indent(text.rstrip(), "    ")]
        else:
            lines += textwrap.wrap(f"{name}: {text}", width, initial_indent="  ", subsequent_indent="      ")
    if result.counterexample:
        lines += ["  Counterexample:", "", textwrap.indent(result.counterexample.rstrip(), "    ")]
    return lines


def _unexercised(report: Report, width: int, paint: Callable[[str, str], str]) -> list[str]:
    """Lines on state that could be lost without a failure."""
    if report.strength is None or not (missed := [*report.strength.unexercised, *report.strength.unseen]):
        return []
    lines = ["", paint("Not exercised: this could be wrong, and the result would be the same", "1")]
    for trial in missed:
        text = f"{trial.field} ({trial.fault}): {trial.note}"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")
    return lines


def _side_by_side(report: Mapping[str, Any], paint: Callable[[str, str], str]) -> list[str]:
    labels = comparison.labels(report)
    widths = [max(len(label), 12) for label in labels]
    lines: list[str] = []
    for title, rows in {"checks": comparison.verdicts(report), **comparison.matrices(report)}.items():
        head = "  ".join(f"{label:<{width}}" for label, width in zip(labels, widths))
        lines += ["", paint(f"Side by side: {title}", "1"), paint(f"  {'':<36}  {head}".rstrip(), "90")]
        for row in rows:
            cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row.cells, widths))
            line = f"{'*' if row.differs else ' '} {row.name:<36}  {cells}".rstrip()
            lines.append(paint(line, "1") if row.differs else line)
    return [*lines, paint("  * differs", "90")]


def write_json(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the JSON of a report; ``-`` means standard output."""
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if os.fspath(path) == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
