"""Caveats of a whole run, for the head of its report: no episode ended, reset options were not given, few snapshots."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from sandboxgym.conformance.check import SHORTEST
from sandboxgym.conformance.harness.arguments import options_looked_up
from sandboxgym.conformance.harness.scenario import opened
from sandboxgym.conformance.subject import AnyEnv, Subject, layers

MANY = 1000
"""Number of snapshots held at once from which there is no caveat."""
CROWD = 64
"""Number of children alive at once from which there is no caveat."""
WATCHED = 6
"""Calls in which reset options are looked at."""
_PASSING = ("gymnasium.core", "gymnasium.wrappers", "sandboxgym.core", "sandboxgym.wrappers")
"""Modules whose ``reset`` only hands options on."""


def caveats(report: Mapping[str, Any]) -> list[str]:
    """Caveats of a report in its JSON form."""
    results = {result["id"]: result for result in report["results"]}
    found = []
    if ended := unended(results):
        found.append(f"{ended}: what happens after the end was not tested")
    if report.get("reset_options"):
        found.append(report["reset_options"])
    held = results.get("restore.many_held", {}).get("evidence", {}).get("held")
    if isinstance(held, int) and held < MANY:
        found.append(f"no more than {held} snapshots were held at once")
    alive = results.get("fork.crowd", {}).get("evidence", {}).get("alive at once")
    if isinstance(alive, int) and alive <= CROWD:
        found.append(f"no more than {alive - 1} children lived and acted at once")
    if results.get("restore.diverge", {}).get("evidence", {}).get("with pictures") == 0:
        found.append("no picture was compared where branches parted: it renders in no mode that could be used here")
    if changed := results.get("restore.refused", {}).get("evidence", {}).get("changed"):
        found.append(
            f"a restore {min(changed)} raises when the environment is changed already: whoever handles it is elsewhere"
        )
    return found


def unended(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Caveat such as ``no episode ended within 60 steps``, or an empty text; from results in JSON form, by id."""
    done = results.get("restore.after_done")
    if done is not None:
        return str(done["message"]) if done["message"].startswith("no episode ended") else ""
    whole = results.get("restore.whole_episode", {}).get("evidence", {})
    return f"no episode ended within {whole['longest episode']} steps" if whole.get("episodes ended") == 0 else ""


def reset_options(subject: Subject) -> str:
    """Reset options that ``reset`` reads and that were never given; empty if there are none.

    Where its source hands them on to other code without naming one, a reset and some steps are watched.
    """
    given = subject.reset_options or []
    known = {key for options in ([given] if isinstance(given, dict) else given) for key in options}
    with opened(subject) as env:
        try:
            read = options_read(env)
        except (OSError, TypeError, SyntaxError):
            why = "no reset options were given, and the source of reset() cannot be read"
            return "" if known else f"{why}: what they may change was not tested"
    if read is not None and not read:
        steps = subject.control(0, SHORTEST).ops[1:WATCHED]
        read = options_looked_up(subject, subject.options(0) or {}, steps)
    if read is None or (read and read <= known) or (not read and known):
        return ""
    names = f" ({', '.join(sorted(read - known))})" if read else ""
    return f"reset() reads options{names} that were not given (--reset-options): what they change was not tested"


def options_read(env: AnyEnv) -> set[str] | None:
    """Keys of the options that ``reset`` of some layer reads, as far as its source shows; None if it reads none.

    Raises:
        OSError, TypeError, SyntaxError: the source cannot be read.
    """
    found: set[str] | None = None
    for layer in layers(env):
        for kind in type(layer).__mro__:
            if "reset" not in vars(kind) or kind is object or kind.__module__.startswith(_PASSING):
                continue
            function = inspect.unwrap(vars(kind)["reset"])
            if "options" not in inspect.signature(function).parameters:
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            uses = [keys for keys in _uses(tree)]
            if uses:
                found = (found or set()).union(*uses)
    return found


def _uses(tree: ast.AST, key: set[str] | None = None) -> Iterator[set[str]]:
    """Keys read at every use of ``options``, except its hand-over to another ``reset``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reset":
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            for value in values:
                if not _is_options(value):
                    yield from _uses(value)
            continue
        if isinstance(node, ast.Name) and node.id == "options" and isinstance(node.ctx, ast.Load):
            yield key or set()
        asked = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            asked = _text(node.args[0]) if node.func.attr in ("get", "pop", "setdefault") else None
        elif isinstance(node, ast.Subscript):
            asked = _text(node.slice)
        elif isinstance(node, ast.Compare) and any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
            asked = _text(node.left)
        yield from _uses(node, {asked} if asked else key)


def _is_options(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "options"


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
