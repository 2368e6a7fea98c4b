"""Command line of the conformance suite.

Exit status: 0 no check failed; 1 some did; 2 none did, but some stayed inconclusive; 3 wrong usage, or the environment
cannot be made; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sandboxgym.arguments import parse_arguments
from sandboxgym.conformance.check import BUDGETS, Level, as_levels
from sandboxgym.conformance.harness.scenario import quiet
from sandboxgym.conformance.reports import formats as reports
from sandboxgym.conformance.runner import Report, all_checks, run
from sandboxgym.conformance.subject import Subject
from sandboxgym.registration import nearest_named
from sandboxgym.system.modules import import_callable, import_named

if TYPE_CHECKING:
    from sandboxgym.conformance.supervision.supervised import Watched

USAGE = 3
HOOKS = ("actions", "observe_state", "normalize", "shell", "lossy", "limits")
"""Attributes of `Subject` that are functions."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Parser of the command line's options."""
    made = _Parser(
        prog=sys.argv[0] if sys.argv[0].startswith("sandboxgym ") else "python -m sandboxgym.conformance",
        description="Certify that the snapshots of an environment are faithful.",
        epilog="Exit status: 0 no FAIL, 1 some FAIL, 2 no FAIL but some INCONCLUSIVE, 3 usage.",
    )
    made.add_argument(
        "env",
        metavar="ENV_ID",
        nargs="?",
        help="a Gymnasium id (sandboxgym/ALFWorld-v0, ALFWorld-v0, package.module:Name-v0), or a factory "
        "(module:function)",
    )
    made.add_argument(
        "--env-kwargs",
        "--kwargs",
        dest="make_kwargs",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of the environment: NAME=VALUE (VALUE is JSON or a string) or a JSON object; repeatable",
    )
    made.add_argument("--make-kwargs", action="append", help=argparse.SUPPRESS)  # its former name, with one value each
    made.add_argument(
        "--reset-options",
        action="append",
        default=[],
        metavar="JSON",
        help="options of every reset as a JSON object, such as '{\"task\": 3}'; repeated: one per control run, in turn",
    )
    made.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="JSON|NAME=VALUE",
        help="run the same on the environment made with these arguments in addition, and show both side by side; "
        "repeatable",
    )
    made.add_argument(
        "--hook",
        action="append",
        default=[],
        metavar="NAME=module:function",
        help=f"hooks that describe your environment: {', '.join(HOOKS)} (see Subject); repeatable",
    )
    made.add_argument(
        "--level",
        action="append",
        metavar="LEVELS",
        help=f"levels to run, such as 1, 0-2, 0,1,5 or {Level.EXACT.name.lower()} (default: all)",
    )
    made.add_argument(
        "--only", action="append", metavar="ID", help="run this check only, or a theme (restore); repeatable"
    )
    made.add_argument("--budget", choices=tuple(BUDGETS), default="quick", help="effort of the checks (default: quick)")
    made.add_argument("--seed", type=int, default=0, help="seed of everything that the suite draws (default: 0)")
    made.add_argument(
        "--strength",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put faults into the environment's own snapshots and say which of them the checks see (default: if all "
        "checks of level 1 run; a quarter of the time in addition)",
    )
    made.add_argument(
        "--call-limit",
        type=_positive,
        default=300.0,
        metavar="SECONDS",
        help="an environment of which no call returns for so long hangs, and is ended (default: 300)",
    )
    made.add_argument(
        "--memory-limit",
        type=_positive,
        metavar="GIB",
        help="memory that the run may hold (default: half of what is available)",
    )
    made.add_argument(
        "--in-process",
        action="store_true",
        help="run in this process, for a debugger: an environment that hangs or crashes takes the run with it",
    )
    made.add_argument(
        "--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules to import first"
    )
    made.add_argument("--json", metavar="FILE", help="write the report as JSON (- for standard output)")
    made.add_argument("--html", metavar="FILE", help="write the report as one self-contained page")
    made.add_argument("--markdown", metavar="FILE", help="write the report as Markdown")
    made.add_argument("--badge", metavar="FILE", help="write an SVG: how many checks passed, of how many, and when")
    made.add_argument("--quiet", action="store_true", help="no progress on standard error")
    made.add_argument("--list", action="store_true", help="list the checks, what they do and cannot see, and exit")
    return made


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: the suite on one environment, in a watched process; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = parser()
    options = command.parse_args(given)
    if options.list:
        print(listing(), end="")
        return 0
    if options.env is None:
        command.error("the environment is missing: ENV_ID")
    if options.in_process or os.name != "posix":
        return in_process(options, command.prog)
    from sandboxgym.conformance.supervision import supervised

    if watched := supervised.Watched.here():
        return told(options, watched)
    try:
        checks = all_checks(levels=parse_levels(options.level), only=parse_only(options.only))
        check_outputs(options)
    except ValueError as error:
        print(f"{command.prog}: error: {type(error).__name__}: {error}", file=sys.stderr)
        return USAGE
    ways = 1 + len(options.beside)
    progress = reports.Progress(len(checks) * ways, quiet=options.quiet)
    limits = supervised.Limits(call=options.call_limit)
    if options.memory_limit:
        limits = replace(limits, memory=round(options.memory_limit * 2**30))
    try:
        report = supervised.supervise(given, ways, checks, name=options.env, limits=limits, listener=progress)
    except supervised.Unusable as error:
        progress.clear()
        print(f"{command.prog}: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        progress.clear()
        print("interrupted", file=sys.stderr)
        return 130
    progress.clear()
    write(report, options)
    return report.exit_code


def told(options: argparse.Namespace, watched: Watched) -> int:
    """Run the suite as the watched child, which sends its results to the watching process; return the exit status."""
    try:
        subjects = prepared(options)
    except Exception as error:  # whatever a factory raises: there is nothing to certify
        watched.tell("unusable", 0, f"{type(error).__name__}: {error}")
        return USAGE
    for way, subject in enumerate(subjects):

        def once(subject: Subject, **more: Any) -> Report:
            return run(subject, **asked(options), **more)

        watched.run(way, subject, once, strong(options))
    return 0


def in_process(options: argparse.Namespace, prog: str) -> int:
    """Run the suite in this process; return the exit status."""
    try:
        check_outputs(options)
        subjects = prepared(options)
    except Exception as error:  # whatever a factory raises: there is nothing to certify
        print(f"{prog}: error: {type(error).__name__}: {error}", file=sys.stderr)
        return USAGE
    asking = asked(options)
    total = len(all_checks(levels=asking["levels"], only=asking["only"])) * len(subjects)
    progress = reports.Progress(total, quiet=options.quiet)
    try:
        report, *others = [run(subject, listener=progress, strength=strong(options), **asking) for subject in subjects]
        report = replace(report, beside=tuple(others))
    except KeyboardInterrupt:
        progress.clear()
        print("interrupted", file=sys.stderr)
        return 130
    progress.clear()
    write(report, options)
    return report.exit_code


def check_outputs(options: argparse.Namespace) -> None:
    """Check before the run that the folders of the reports exist.

    Raises:
        ValueError: there is no such folder.
    """
    for path in (options.json, options.html, options.markdown, options.badge):
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"there is no folder {Path(path).absolute().parent}")


def prepared(options: argparse.Namespace) -> list[Subject]:
    """The subjects of the run; each environment is made once, to see that it can be.

    Raises:
        Exception: whatever a factory raises, and errors of arguments.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        # Last: whoever certifies an environment of this folder needs its modules, but not a json.py beside them.
        sys.path.append(os.getcwd())
    asked(options)
    for module in options.modules:
        import_named(module)
    arguments_of_env, hooks = parse_arguments(options.make_kwargs), parse_hooks(options.hook)
    hooks["reset_options"] = parse_reset_options(options.reset_options)
    ways = [arguments_of_env, *({**arguments_of_env, **parse_arguments([text])} for text in options.beside)]
    subjects = [Subject.named(options.env, way, **hooks) for way in ways]
    for subject in subjects:
        with quiet(), nearest_named(options.env):
            subject.make_env().close()
    return subjects


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `run`, from the options of the command line.

    Raises:
        ValueError: there is no such level or check.
    """
    return {
        "levels": parse_levels(options.level),
        "only": parse_only(options.only),
        "budget": options.budget,
        "seed": options.seed,
    }


def strong(options: argparse.Namespace) -> bool:
    """True if the strength of the certificate is measured."""
    if options.strength is not None:
        return bool(options.strength)
    return not options.only and int(Level.EXACT) in parse_levels(options.level)


def write(report: Report, options: argparse.Namespace) -> None:
    """Print the report, and write it to the requested files."""
    if options.json != "-":
        print(reports.terminal(report, colour=reports.coloured(sys.stdout)), end="")
    if options.json:
        reports.write_json(report, options.json)
    for name in ("html", "markdown", "badge"):
        if path := getattr(options, name):
            importlib.import_module(f"sandboxgym.conformance.reports.{name}").write(report, Path(path))


def parse_levels(texts: Sequence[str] | None) -> tuple[int, ...]:
    """Parse levels from texts such as ``1``, ``0-2``, ``0,1,5``, ``exact``.

    Raises:
        ValueError: there is no such level.
    """
    if not texts:
        return tuple(map(int, Level))
    found: list[int | str] = []
    for part in ",".join(texts).split(","):
        first, dash, last = part.partition("-")
        if dash and first.isdigit() and last.isdigit() and int(last) <= max(Level):
            found += range(int(first), int(last) + 1)
        else:
            found.append(part)
    if not found:
        raise ValueError(f"expected levels from 0 to {int(max(Level))}, found {', '.join(texts)}")
    return as_levels(found)


def parse_only(texts: Sequence[str] | None) -> list[str] | None:
    """Parse ids of checks; a theme stands for all of its checks.

    Raises:
        ValueError: there is no such check or theme.
    """
    if not texts:
        return None
    known = [check.id for check in all_checks()]
    found: list[str] = []
    for text in ",".join(texts).split(","):
        meant = [id for id in known if id == text or id.startswith(f"{text}.")]
        if not meant:
            raise ValueError(f"there is no check {text!r}; --list shows all")
        found += meant
    return found


def parse_reset_options(texts: Sequence[str]) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Parse options of ``reset`` from JSON objects: one object for every reset, or several that take turns.

    Raises:
        ValueError: a text is not a JSON object.
    """
    found = []
    for text in texts:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--reset-options is not JSON: {error}; found {text!r}") from None
        if not isinstance(value, dict):
            raise ValueError(f"expected --reset-options as a JSON object, found {text!r}")
        found.append(value)
    return found[0] if len(found) == 1 else found or None


def parse_hooks(texts: Sequence[str]) -> dict[str, Any]:
    """Import functions from ``NAME=module:function``.

    Raises:
        ValueError: a text has another form, or names nothing that can be called.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, target = text.partition("=")
        if name not in HOOKS or not target.partition(":")[2]:
            raise ValueError(f"expected --hook {'|'.join(HOOKS)}=module:function, found {text!r}")
        found[name] = import_callable(target)
    return found


def listing() -> str:
    """List of all checks with their hazard, description and blind spots."""
    lines = []
    for check in all_checks():
        needs = f", needs {', '.join(check.needs)}" if check.needs else ""
        lines.append(f"{check.id} (level {int(check.level)}{needs})")
        for name, text in (("hazard", check.hazard), ("does", check.summary), ("blind", check.blind)):
            text = f"{name}: {' '.join(text.split())}"
            lines += textwrap.wrap(text, 112, initial_indent="    ", subsequent_indent="        ")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
