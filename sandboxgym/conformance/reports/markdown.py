"""A report as Markdown, for repositories and issue threads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from sandboxgym.conformance.reports import comparison
from sandboxgym.conformance.reports.caveats import caveats
from sandboxgym.conformance.reports.comparison import plain
from sandboxgym.conformance.reports.verdicts import headline, weight
from sandboxgym.conformance.runner import Report
from sandboxgym.system.atomic import write_atomic

MOST = 8
"""Findings of one check that are shown."""


def write(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the Markdown, atomically."""
    write_atomic(path, text(report.to_json()).encode())


def text(report: Mapping[str, Any]) -> str:
    """The Markdown of a report in its JSON form."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report["counts"].items() if count)
    arguments = f" {json.dumps(report['make_kwargs'])}" if report["make_kwargs"] else ""
    lines = [
        f"# Snapshot conformance of {report['name']}{arguments}",
        "",
        f"{counts}. Budget {report['budget']}, seed {report['seed']}, {report['started'][:10]}, "
        f"{report['seconds']:.0f} s; " + ", ".join(f"{name} {v}" for name, v in report["versions"].items()) + ".",
        "",
        f"**{headline(report).text}.**",
        "",
        *(f"Not tested: {caveat}.\n" for caveat in caveats(report)),
        *_strength(report.get("strength")),
        "Declared: " + "; ".join(f"{name} = {plain(value)}" for name, value in report["capabilities"].items()) + ".",
        "",
        "| check | verdict | |",
        "|---|---|---|",
    ]
    for result in report["results"]:
        note = result["message"] or _numbers(result)
        lines.append(f"| `{result['id']}` | {result['verdict']} | {_line(note)} |")
    if report.get("beside"):
        lines += _side_by_side(report)
    for result in report["results"]:
        matrix = result["evidence"].get("matrix")
        if isinstance(matrix, list) and matrix and all(isinstance(row, Mapping) for row in matrix):
            names = list(matrix[0])
            lines += ["", f"## {result['id']}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
            lines += [f"| {' | '.join(_line(plain(row.get(name))) for name in names)} |" for row in matrix]
        if result["counterexample"]:
            script = ["```python { .no-run }", result["counterexample"], "```"]
            lines += ["", f"## {result['id']}: counterexample", "", *script]
    if report["not_tested"]:
        lines += ["", "## Not tested", "", "| check | why |", "|---|---|"]
        lines += [f"| `{entry['id']}` | {_line(entry['reason'])} |" for entry in report["not_tested"]]
    return "\n".join(lines) + "\n"


def _side_by_side(report: Mapping[str, Any]) -> list[str]:
    labels = comparison.labels(report)
    lines: list[str] = []
    for title, rows in {"checks": comparison.verdicts(report), **comparison.matrices(report)}.items():
        lines += ["", f"## Side by side: {title}", "", f"| | {' | '.join(f'`{label}`' for label in labels)} |"]
        lines += ["|---" * (1 + len(labels)) + "|"]
        for row in rows:
            cells = [f"**{cell}**" if row.differs and cell else cell for cell in row.cells]
            lines.append(f"| `{row.name}` | {' | '.join(map(_line, cells))} |")
    for label, other in zip(labels[1:], report["beside"]):
        for result in other["results"]:
            if result["verdict"] == "FAIL":
                lines += ["", f"`{label}`, `{result['id']}`: {_line(result['message'])}"]
    return lines


def _numbers(result: Mapping[str, Any]) -> str:
    told = {name: _told(value) for name, value in result["evidence"].items()}
    text = ", ".join([f"{name.replace('_', ' ')} {value}" for name, value in told.items() if value][:MOST])
    rate = weight(result).rate
    return f"{text}; would show a fault of {rate}" if rate and "fault in" not in text else text


def _told(value: Any) -> str:
    """A number, a short text, or a few of them, as text; else nothing."""
    if isinstance(value, (bool, int, float)):
        return plain(value)
    if isinstance(value, str):
        return value if len(value) < 40 else ""
    if isinstance(value, Mapping):
        items = [f"{name} {plain(count)}" for name, count in value.items() if isinstance(count, (bool, int, float))]
    else:
        items = [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []
    return f"({', '.join(items)})" if items and sum(map(len, items)) < 160 else ""


def _strength(strength: Mapping[str, Any] | None) -> list[str]:
    """Strength of the certificate, and the reasons why fields were not exercised."""
    if strength is None:
        return []
    lines = [f"Strength: {strength['summary']}.", ""]
    missed = [t for t in strength["trials"] if t["outcome"] not in ("caught", "without effect")]
    if missed:
        lines += ["| not exercised | fault | | why |", "|---|---|---|---|"]
        lines += [f"| `{t['field']}` | {t['fault']} | {t['outcome']} | {_line(t['note'])} |" for t in missed] + [""]
    return lines


def _line(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")[:300]
