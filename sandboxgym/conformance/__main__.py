"""Command line of the conformance suite.

Exit status: 0 no check failed, 1 some did, 2 none did but some stayed inconclusive, 3 it was not called rightly or the
environment cannot be made.
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
from typing import Any, NoReturn

from sandboxgym.conformance import reports
from sandboxgym.conformance.check import BUDGETS, Level, as_levels
from sandboxgym.conformance.recording import quiet
from sandboxgym.conformance.runner import all_checks, run
from sandboxgym.conformance.subject import Subject

USAGE = 3
HOOKS = ("actions", "observe_state", "normalize", "shell", "lossy", "limits")
"""Attributes of `Subject` that are functions."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = _Parser(
        prog="python -m sandboxgym.conformance",
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
        "--kwargs",
        "--env-kwargs",
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
        help=f"what only you know of your environment: {', '.join(HOOKS)} (see Subject); repeatable",
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
    made.add_argument("--budget", choices=tuple(BUDGETS), default="quick", help="how much to spend (default: quick)")
    made.add_argument("--seed", type=int, default=0, help="of all that the suite draws (default: 0)")
    made.add_argument(
        "--strength",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put faults into the environment's own snapshots and say which of them the checks see (default: if all "
        "checks of level 1 run; a quarter of the time in addition)",
    )
    made.add_argument("--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="import these first")
    made.add_argument("--json", metavar="FILE", help="write the report as JSON (- for standard output)")
    made.add_argument("--html", metavar="FILE", help="write the report as one self-contained page")
    made.add_argument("--markdown", metavar="FILE", help="write the report as Markdown")
    made.add_argument("--quiet", action="store_true", help="no progress on standard error")
    made.add_argument("--list", action="store_true", help="list the checks, what they do and cannot see, and exit")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite on an environment; the exit status."""
    command = parser()
    options = command.parse_args(arguments)
    if options.list:
        print(listing(), end="")
        return 0
    if options.env is None:
        command.error("the environment is missing: ENV_ID")
    if "" not in sys.path and os.getcwd() not in sys.path:
        # Last: who certifies an environment of this folder wants its modules, not a json.py that lies beside them.
        sys.path.append(os.getcwd())
    try:
        levels = parse_levels(options.level)
        only = parse_only(options.only)
        for path in (options.json, options.html, options.markdown):
            if path and path != "-" and not Path(path).absolute().parent.is_dir():
                raise ValueError(f"there is no folder {Path(path).absolute().parent}")
        for module in options.modules:
            importlib.import_module(module)
        arguments_of_env, hooks = parse_kwargs(options.make_kwargs), parse_hooks(options.hook)
        hooks["reset_options"] = parse_reset_options(options.reset_options)
        ways = [arguments_of_env, *({**arguments_of_env, **parse_kwargs([text])} for text in options.beside)]
        subjects = [Subject.named(options.env, way, **hooks) for way in ways]
        for subject in subjects:
            with quiet():
                subject.make_env().close()
    except Exception as error:  # whatever a factory raises: there is nothing to certify
        print(f"{command.prog}: error: {type(error).__name__}: {error}", file=sys.stderr)
        return USAGE
    strength = options.strength if options.strength is not None else only is None and int(Level.EXACT) in levels
    progress = reports.Progress(len(all_checks(levels=levels, only=only)) * len(subjects), quiet=options.quiet)
    try:
        report, *others = [
            run(
                subject,
                levels=levels,
                budget=options.budget,
                seed=options.seed,
                only=only,
                listener=progress,
                strength=strength,
            )
            for subject in subjects
        ]
        report = replace(report, beside=tuple(others))
    except KeyboardInterrupt:
        progress.clear()
        print("interrupted", file=sys.stderr)
        return 130
    progress.clear()
    if options.json != "-":
        print(reports.terminal(report, colour=reports.coloured(sys.stdout)), end="")
    if options.json:
        reports.write_json(report, options.json)
    for name in ("html", "markdown"):
        if path := getattr(options, name):
            importlib.import_module(f"sandboxgym.conformance.{name}").write(report, Path(path))
    return report.exit_code


def parse_levels(texts: Sequence[str] | None) -> tuple[int, ...]:
    """Levels from texts such as ``1``, ``0-2``, ``0,1,5``, ``exact``.

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
    """Ids of checks; a theme stands for all of its checks.

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


def parse_kwargs(texts: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments from JSON objects and ``NAME=VALUE``.

    Raises:
        ValueError: a text is neither.
    """
    found: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"--kwargs is not a JSON object: {error}") from None
            found.update(value)
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"expected --kwargs as NAME=VALUE or a JSON object, found {text!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def parse_reset_options(texts: Sequence[str]) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Options of ``reset`` from JSON objects: one for every reset, several in turn.

    Raises:
        ValueError: a text is no JSON object.
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
    """Functions from ``NAME=module:function``.

    Raises:
        ValueError: a text is not such, or names nothing that can be called.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, target = text.partition("=")
        module, _, path = target.partition(":")
        if name not in HOOKS or not path:
            raise ValueError(f"expected --hook {'|'.join(HOOKS)}=module:function, found {text!r}")
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        if not callable(function):
            raise ValueError(f"--hook {text}: expected a function, found {function!r}")
        found[name] = function
    return found


def listing() -> str:
    """All checks with hazard, what they do and what they cannot see."""
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
