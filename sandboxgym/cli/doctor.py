"""``sandboxgym doctor``: what this machine can run, and the command that adds the rest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from sandboxgym.cli import FAILED, OK, USAGE, CommandError
from sandboxgym.cli.probes import PROBES, Finding
from sandboxgym.cli.screen import Screen

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "dim"}


def main(argv: Sequence[str]) -> int:
    """``sandboxgym doctor``."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym doctor",
        description="What this machine can run. Every line is tried here, as you, and cleaned up after.",
        epilog="Exit status 0, whatever is found; 1 if a component of --require is not ok.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--require",
        default="",
        metavar="A,B",
        help="fail unless these are ok: docker, overlay, browser, textworld, swebench, data, or any name of the list",
    )
    options = parser.parse_args(argv)
    findings = examine()
    by_name = {finding.name: finding for finding in findings}
    required = [name for name in options.require.split(",") if name]
    unknown = [name for name in required if name not in by_name]
    if unknown:
        raise CommandError(f"no component {unknown[0]!r}; there are: {', '.join(by_name)}", status=USAGE)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings, Screen(sys.stdout))
    failed = [by_name[name] for name in required if by_name[name].status != "ok"]
    for finding in failed:
        print(f"required, but {finding.status}: {finding.name} ({finding.detail})", file=sys.stderr)
    return FAILED if failed else OK


def examine() -> list[Finding]:
    """Every finding, in the order of `PROBES`."""
    findings: list[Finding] = []
    for probe in PROBES:
        try:
            result = probe()
            findings += [result] if isinstance(result, Finding) else result
        except Exception as error:  # one trial that fails in a new way must not hide the others
            detail = f"the trial failed: {type(error).__name__}: {error}"
            findings.append(Finding(probe.__name__.replace("_", "-"), "missing", detail, "", ""))
    return findings


def _print(findings: Sequence[Finding], screen: Screen) -> None:
    wide = max(len(finding.name) for finding in findings)
    indent = " " * (wide + 11)
    for finding in findings:
        status = screen.style(f"{finding.status:<8}", _COLOURS[finding.status])
        lead = f"{finding.name:<{wide}} "
        about = f" (for {finding.enables})" if finding.enables and finding.status != "ok" else ""
        # Wrapped without the status, whose colour codes have no width.
        lines = screen.wrapped(finding.detail + about, indent=indent)
        screen.line(lead + status + "  " + lines[0].lstrip())
        for line in lines[1:]:
            screen.line(line)
        if finding.fix:
            screen.text(f"-> {finding.fix}", indent=indent, hanging=indent + "   ")
    counts = {status: sum(f.status == status for f in findings) for status in _COLOURS}
    screen.line(", ".join(f"{count} {status}" for status, count in counts.items()))
