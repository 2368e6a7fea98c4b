"""``sandboxgym doctor``: report what this machine can run, and the command that installs the rest.

With ``--attack``: test whether its sandboxes keep their promises, by hundreds of attempts to break them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict

from sandboxgym import registration
from sandboxgym.cli import FAILED, OK, USAGE, CommandError
from sandboxgym.cli.support.doctor_checks import PROBES
from sandboxgym.cli.support.printing import Screen
from sandboxgym.system.findings import Finding

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "dim"}


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym doctor``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym doctor",
        description="Report what this machine can run. Every line is tested here, as your user, and cleaned up.",
        epilog="Exit status: 0, or 1 if a component of --require is not ok. With --attack: 0 if no attempt "
        "succeeded, 1 if one did, 2 if none could be made.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--require",
        default="",
        metavar="A,B",
        help="fail unless these are ok: docker, overlay, criu, data, or any other name of the list",
    )
    attacks = parser.add_argument_group("attacks on this machine's sandboxes")
    attacks.add_argument(
        "--attack",
        action="store_true",
        help="attack throw-away sandboxes: break out, exhaust limits, find what others left",
    )
    attacks.add_argument("--backend", action="append", metavar="NAME", help="attack only this backend; may be repeated")
    attacks.add_argument("--attempt", metavar="PATTERN", help="make only these attempts, such as 'escape/device-*'")
    attacks.add_argument("--thorough", action="store_true", help="make all attempts instead of a sample")
    attacks.add_argument("--image", metavar="NAME", help="image with Python 3 for docker (default: build one)")
    attacks.add_argument("--list", action="store_true", help="list the attempts without making them")
    attacks.add_argument("--markdown", action="store_true", help="print the table of docs/security.md")
    attacks.add_argument("--verbose", action="store_true", help="also name blocked and inapplicable attempts")
    options = parser.parse_args(argv)
    if options.attack or options.list:
        return _attack(options)
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


def _attack(options: argparse.Namespace) -> int:
    """Run ``--attack`` and ``--list``."""
    from sandboxgym.attack import BACKENDS, SAMPLE, attack, matching

    only = options.attempt or ("*" if options.thorough or options.list else SAMPLE)
    chosen = matching(only)
    backends = options.backend or BACKENDS
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown:
        raise CommandError(f"no backend {unknown[0]!r}; there are: {', '.join(BACKENDS)}", status=USAGE)
    if not chosen:
        raise CommandError(f"no attempt fits {options.attempt!r}; --list names them", status=USAGE)
    if options.list:
        if options.json:
            print(json.dumps([{"name": found.name, "group": found.group, "about": found.about} for found in chosen]))
        else:
            for found in chosen:
                print(f"{found.name}: {found.about}")
        return OK
    logging.getLogger("sandboxgym").addHandler(logging.NullHandler())  # attacked sandboxes log many warnings
    done = 0

    def told(_: object) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done} attempts made", end="", file=sys.stderr, flush=True)

    report = attack(backends, only=only, image=options.image, told=told)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.json:
        print(report.json())
    else:
        print(report.markdown() if options.markdown else report.text(verbose=options.verbose))
    return report.status


def examine() -> list[Finding]:
    """All findings, in the order of `PROBES`."""
    findings: list[Finding] = []
    for probe in PROBES:
        try:
            result = probe()
            findings += [result] if isinstance(result, Finding) else result
        except Exception as error:  # a probe that fails in a new way must not hide the others
            detail = f"the trial failed: {type(error).__name__}: {error}"
            findings.append(Finding(probe.__name__.replace("_", "-"), "missing", detail, "", ""))
    return findings


def summary(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """Rows of the summary: name, whether it is ready, and its limits or the command that makes it ready.

    If an extra has no finding (a checkout that was not installed), its packages are looked for.
    """
    by_name = {finding.name: finding for finding in findings}

    def lacking(extra: str, *modules: str) -> str:
        found = by_name.get(f"extra:{extra}")
        missing = (
            found.status != "ok"
            if found is not None
            else not all(importlib.util.find_spec(module) is not None for module in modules)
        )
        return f"pip install 'sandboxgym[{extra}]'" if missing else ""

    usable = [name for name in ("overlay", "docker") if name in by_name and by_name[name].status == "ok"]
    fix = next((by_name[name].fix for name in ("overlay", "docker") if name in by_name and by_name[name].fix), "")
    lines = []
    for card in registration.cards().values():
        if not card.title:
            continue
        pip = lacking(card.extra, card.module) if card.extra else ""
        if not card.extra and card.module and importlib.util.find_spec(card.module) is None:
            pip = f"it needs the module {card.module}"
        if pip or (card.sandboxed and not usable):
            lines.append((card.title, "not ready", pip or f"no sandbox works: {fix}"))
        else:
            where = f" in sandboxes of {' and '.join(usable)}" if card.sandboxed else ""
            lines.append((card.title, "ready", card.ready + where))
    pip = lacking("train", "torch", "transformers")
    gpu = by_name.get("gpu")
    device = f"on {gpu.detail}" if gpu is not None and gpu.status == "ok" else "on CPUs: the tiny configurations"
    lines.append(("Training", "not ready", pip) if pip else ("Training", "ready", device))
    return lines


def _print(findings: Sequence[Finding], screen: Screen) -> None:
    for what, state, with_what in summary(findings):
        styled = screen.style(f"{state:<9}", "green" if state == "ready" else "yellow")
        screen.line(f"{what:<9}  {styled}  {with_what}")
    screen.line("")
    wide = max(len(finding.name) for finding in findings)
    indent = " " * (wide + 11)
    for finding in findings:
        status = screen.style(f"{finding.status:<8}", _COLOURS[finding.status])
        lead = f"{finding.name:<{wide}} "
        about = f" (for {finding.enables})" if finding.enables and finding.status != "ok" else ""
        # The status is left out of the wrapping, because its colour codes have no width.
        lines = screen.wrapped(finding.detail + about, indent=indent)
        screen.line(lead + status + "  " + lines[0].lstrip())
        for line in lines[1:]:
            screen.line(line)
        if finding.fix:
            screen.text(f"-> {finding.fix}", indent=indent, hanging=indent + "   ")
    counts = {status: sum(f.status == status for f in findings) for status in _COLOURS}
    screen.line(", ".join(f"{count} {status}" for status, count in counts.items()))
