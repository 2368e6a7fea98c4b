"""A badge, to show in a README: how many checks passed, of how many, and when."""

from __future__ import annotations

import html
from pathlib import Path

from sandboxgym.conformance.check import Verdict
from sandboxgym.conformance.reports.verdicts import headline
from sandboxgym.conformance.runner import Report


def badge(report: Report | None) -> str:
    """An SVG that says how many checks passed, of how many, and when; for None, that nothing was certified yet.

    It is green if the headline of the report is a pass, no report beside it has a failure, and every check was asked
    for. Checks that did not run or stayed inconclusive count in the total.
    """
    label, message, kind, title = "snapshots", "not certified yet", "none", "not certified yet"
    if report is not None:
        text, kind = headline(report.to_json())
        if report.exit_code == 1:
            kind = "fail"
        elif any("not asked for" in reason for _, reason in report.not_tested):
            kind = "inconclusive"  # a part of the suite is no certificate, whatever it found
        passed, failed = len(report.of(Verdict.PASS)), len(report.failures)
        total = len({result.id for result in report.results} | {id for id, _ in report.not_tested})
        day = report.started[:10]
        told = f"{failed} of {total} checks fail" if failed else f"{passed} of {total} checks pass"
        message = f"{told}, {day}"
        made = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        title = f"{report.name}: {text} (budget {report.budget}, seed {report.seed}, {report.started}; {made})"
    left, right = _width(label), _width(message)
    colour = {"pass": "#2e7d32", "fail": "#c62828", "inconclusive": "#b26a00"}.get(kind, "#757575")

    def written(text: str, at: float, width: int) -> str:
        length = width - 12
        return f'<text x="{at}" y="14" textLength="{length}" lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text>'

    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="{left}" height="20" fill="#424242"/>',
            f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>',
            '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">',
            written(label, left / 2, left),
            written(message, left + right / 2, right),
            "</g></svg>\n",
        )
    )


def _width(text: str) -> int:
    return 12 + round(6.6 * len(text))


def write(report: Report, path: Path) -> None:
    """Write the `badge` of a report."""
    path.write_text(badge(report), encoding="utf-8")
