"""Shrinking of a failure's script to the fewest calls that still show it.

1. A script is a list of statements on environments and snapshots. From it follow the resets and steps in each
   environment's history, through snapshots, restores and forks. The control, a new environment that makes only these
   calls, is therefore known whichever statements are left out.
2. The criterion is that the last call differs from the control's. A failure of another kind (streams, files, a digest),
   or in environments that do not repeat themselves, keeps its original script.
3. Every returned script was executed as it stands, except for the factory, which is the subject's own.
"""

from __future__ import annotations

import ast
import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

import sandboxgym
from sandboxgym.conformance.harness.canonical import rows
from sandboxgym.conformance.harness.scenario import folded, quiet, release
from sandboxgym.conformance.subject import Outcome, Subject

FOUND, CONTROL = "found", "control"
WAITING = 6
_Still = Callable[[Sequence[ast.stmt]], bool]


class Shrunk(NamedTuple):
    """A failure in few calls."""

    script: str
    statements: int
    """Number of calls needed, without the control's."""
    difference: list[dict[str, Any]]
    """Expected and found values, field by field; see `canonical.rows`."""


def shrunk(subject: Subject, script: str, *, seconds: float) -> Shrunk | None:
    """The shortest script that shows the failure; None where this one shows no call that differs from a control.

    Args:
        subject: the subject that failed.
        script: counterexample as `Scene.script` writes it.
        seconds: processor seconds after which no shorter script is tried; in wall time, `WAITING` times as many.
    """
    try:
        head, body = _parsed(script)
    except SyntaxError:
        return None
    exact = subject.capabilities.rng or not subject.noise
    if not exact or not body or _touched(body[-1]) is None or not all(each.repeatable for each in subject.controls):
        return None
    found = _shows(subject, body)
    if found is None:
        return None
    kind = _kind(found)
    busy, start = time.process_time(), time.perf_counter()

    def over() -> bool:
        return time.process_time() - busy > seconds or time.perf_counter() - start > WAITING * seconds

    def still(statements: Sequence[ast.stmt]) -> bool:
        now = _shows(subject, [*statements, body[-1]])
        return now is not None and _kind(now) == kind

    kept = _simplified(_fewest(body[:-1], still, over), still, over)
    found = _shows(subject, [*kept, body[-1]]) or found
    source = subject.source or "\n\n".join(_unparsed(each) for each in head if not isinstance(each, ast.Import))
    script = _written(source, [*kept, body[-1]], found.history)
    return Shrunk(script, len(kept) + 1, rows(found.expected._asdict(), found.found._asdict()))


def _kind(found: _Difference) -> str | None:
    return found.found.raised


# The script as statements.


def _parsed(script: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Imports and the factory; the statements up to the call whose outcome differs, loops over actions unrolled.

    Raises:
        SyntaxError: it is not Python.
    """
    statements = ast.parse(script).body
    first = max((index for index, each in enumerate(statements) if isinstance(each, ast.FunctionDef)), default=-1)
    head = statements[: first + 1]
    body: list[ast.stmt] = []
    for statement in _flat(statements[first + 1 :]):
        if isinstance(statement, ast.Assign) and _target(statement) == FOUND:
            return head, [*body, ast.Expr(statement.value)]
        printed = _printed(statement)
        if isinstance(printed, ast.Call):
            return head, [*body, ast.Expr(printed)]
        if printed is not None:
            break
        body.append(statement)
    return head, body


def _printed(statement: ast.stmt) -> ast.expr | None:
    call = statement.value if isinstance(statement, ast.Expr) else None
    prints = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print" and call.args
    return call.args[0] if prints else None  # type: ignore[union-attr]


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for each in statements:
        if isinstance(each, ast.For) and isinstance(each.iter, ast.List):
            for action in each.iter.elts:
                yield from (_replaced(inner, "action", action) for inner in each.body)
        elif isinstance(each, ast.For):
            yield ast.For(each.target, each.iter, list(_flat(each.body)), [])
        else:
            yield each


class _Replace(ast.NodeTransformer):
    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.value if node.id == self.name else node


def _replaced(node: Any, name: str, value: ast.expr) -> Any:
    return _Replace(name, value).visit(copy.deepcopy(node))


def _target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _calls(node: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Calls in a statement: the variable and the method. Functions of sandboxgym count as methods."""
    for call in ast.walk(node):
        method = call.func if isinstance(call, ast.Call) else None
        if isinstance(call, ast.Call) and isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name):
            name = method.value.id
            if name == "sandboxgym" and call.args and isinstance(call.args[0], ast.Name):
                name = call.args[0].id
            yield name, method.attr, call


def _touched(statement: ast.stmt) -> str | None:
    """Environment whose step, reset or restore a statement is."""
    if not isinstance(statement, ast.Expr):
        return None
    return next((name for name, what, _ in _calls(statement) if what in ("step", "reset", "restore")), None)


# Executing it.


class _Difference(NamedTuple):
    expected: Outcome
    found: Outcome
    history: list[ast.expr]


@dataclass
class _Run:
    """Statements being executed, with the history of each environment and snapshot."""

    subject: Subject
    made: list[Any] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    behind: dict[str, list[ast.expr] | None] = field(default_factory=dict)
    """Resets, steps and seeding of spaces by name of an environment or snapshot; None where draws are unknown."""

    def __post_init__(self) -> None:
        self.names.update(make_env=self.make, gym=gym, np=np, sandboxgym=sandboxgym)
        self.names["print"] = lambda *_: None  # scripts print what a refused restore raised, for their reader

    def make(self) -> Any:
        env = self.subject.make_env()
        self.made.append(env)
        return env

    def perform(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.For):
            for _ in range(ast.literal_eval(statement.iter.args[0])):  # type: ignore[attr-defined]
                for inner in statement.body:
                    self.perform(inner)
            return
        module = ast.fix_missing_locations(ast.Module([statement], []))
        exec(compile(module, "<counterexample>", "exec"), self.names)
        for name in _assigned(statement):
            value = self.names.get(name)
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, gym.Env) and all(each is not other for other in self.made):
                    self.made.append(each)  # a fork
        self.follow(statement)

    def follow(self, statement: ast.stmt) -> None:
        """Update the histories after a statement."""
        assigned = _assigned(statement)
        if "make_env()" in ast.unparse(statement):
            self.behind.update((name, []) for name in assigned)
        for name, what, call in _calls(statement):
            seeded = any(word.arg == "seed" for word in call.keywords)
            past = self.behind.get(name)
            if what in ("step", "reset"):
                started = past is not None and any(isinstance(each, ast.Call) for each in past)
                unseeded = what == "reset" and not seeded and not started
                self.behind[name] = None if past is None or unseeded else [*past, call]
            elif what in ("snapshot", "fork"):
                self.behind.update((each, None if seeded or past is None else list(past)) for each in assigned)
            elif what == "restore":
                snap = call.args[-1]
                origin = self.behind.get(snap.id) if isinstance(snap, ast.Name) else None
                self.behind[name] = None if seeded or origin is None else list(origin)
            elif what in ("load", "from_bytes"):
                inside = [each.id for each in ast.walk(statement) if isinstance(each, ast.Name)]
                source = next((each for each in inside if each in self.behind and each not in assigned), "")
                self.behind.update((each, self.behind.get(source)) for each in assigned)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Tuple):
            for name in {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)} & self.behind.keys():
                past = self.behind[name]
                self.behind[name] = None if past is None else [*past, statement.value]

    def outcome(self, name: str, expression: ast.expr) -> Outcome:
        """Output of a call, in canonical form."""
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<counterexample>", "eval")
        env = self.names[name]
        try:
            raw = eval(code, self.names)
        except Exception as error:
            return Outcome(raised=type(error).__qualname__)
        return self.subject.outcome(env, *(raw if len(raw) == 5 else (raw[0], 0.0, False, False, raw[1])))

    def close(self) -> None:
        for value in list(self.names.values()):
            if value is not sandboxgym and not isinstance(value, gym.Env):
                _quietly(lambda value=value: release(value))  # type: ignore[misc]
        for env in self.made:
            _quietly(env.close)


def _assigned(statement: ast.stmt) -> list[str]:
    if not isinstance(statement, ast.Assign):
        return []
    return [each.id for each in ast.walk(statement.targets[0]) if isinstance(each, ast.Name)]


def _quietly(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:  # it was closed before, or is what is wrong with it
        return


def _shows(subject: Subject, body: Sequence[ast.stmt]) -> _Difference | None:
    """Difference of the last call from a control's; None if there is none, or if it cannot be told."""
    from sandboxgym.conformance.runner import preserved  # which offers what this module finds

    last = body[-1]
    assert isinstance(last, ast.Expr)
    name = _touched(last)
    run = _Run(subject)
    with preserved(), quiet():
        try:
            for statement in body[:-1]:
                run.perform(statement)
            if name not in run.names:
                return None
            _, what, call = next(each for each in _calls(last) if each[1] in ("step", "reset", "restore"))
            found = run.outcome(name, call)
            run.follow(last)
            history = run.behind.get(name)
            if not history:
                return None
            run.names[CONTROL] = run.make()
            calls = _normal(history)
            for each in calls[:-1]:
                run.perform(ast.Expr(each))
            expected = run.outcome(CONTROL, calls[-1])
        except Exception:  # left out too much
            return None
        finally:
            run.close()
    if what == "restore" and expected.raised is None:  # it returns no reward and no flags
        found = found._replace(reward=expected.reward, terminated=expected.terminated, truncated=expected.truncated)
    return None if found == expected else _Difference(expected, found, calls)


def _normal(history: Sequence[ast.expr]) -> list[ast.expr]:
    """Calls with one and the same name for the environment, wherever they were made."""
    found = []
    for each in history:
        names = [inner.id for inner in ast.walk(each) if isinstance(inner, ast.Name) and inner.id not in ("np",)]
        found.append(_replaced(each, names[0], ast.Name(CONTROL, ast.Load())) if names else each)
    return found


# Delta debugging (Zeller and Hildebrandt, 2002).


def _fewest(statements: Sequence[ast.stmt], still: _Still, over: Callable[[], bool]) -> Sequence[ast.stmt]:
    """Minimal subset of the statements that shows the failure."""
    kept, parts = list(statements), 2
    while kept:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size)[::-1]:
            if over():
                return kept
            fewer = kept[:start] + kept[start + size :]
            if still(fewer):
                kept, parts = fewer, max(parts - 1, 2)
                break
        else:
            if size == 1:
                return kept
            parts = min(len(kept), 2 * parts)
    return kept


def _simplified(statements: Sequence[ast.stmt], still: _Still, over: Callable[[], bool]) -> Sequence[ast.stmt]:
    """The statements with calls alone, and with loops that run fewer times, or once and then reduced."""
    kept = list(statements)
    for index, each in enumerate(kept):
        bare = _bare(each)
        if bare is not None and not over() and still([*kept[:index], bare, *kept[index + 1 :]]):
            kept[index] = bare
    kept = list(_fewest(kept, still, over))
    for index, each in enumerate(kept):
        if isinstance(each, ast.For) and not over():
            once = [*kept[:index], *each.body, *kept[index + 1 :]]
            if still(once):
                return _simplified(_fewest(once, still, over), still, over)
            times = ast.literal_eval(each.iter.args[0])  # type: ignore[attr-defined]
            while times > 1 and not over():
                fewer = ast.For(each.target, ast.parse(f"range({times // 2})").body[0].value, each.body, [])  # type: ignore[attr-defined]
                if not still([*kept[:index], fewer, *kept[index + 1 :]]):
                    break
                kept[index], times = fewer, times // 2
    return kept


def _bare(statement: ast.stmt) -> ast.stmt | None:
    """The reset or step alone of a statement that uses its output."""
    calls = [call for _, what, call in _calls(statement) if what in ("step", "reset")]
    if len(calls) != 1 or not isinstance(statement, ast.Expr) or statement.value is calls[0]:
        return None
    return ast.Expr(calls[0])


def _written(source: str, body: Sequence[ast.stmt], history: Sequence[ast.expr]) -> str:
    lines = [line for each in body for line in _unparsed(each).splitlines()]
    control = [ast.unparse(each) for each in history]
    tail = ["", "control = make_env()  # never interrupted", *control[:-1], f"expected = {control[-1]}"]
    tail += ['print("expected", expected)', 'print("found   ", found)']
    text = "\n".join([source.strip(), "", "", *folded(lines[:-1]), f"{FOUND} = {lines[-1]}", *folded(tail)])
    imports = {"gym": "gymnasium as gym", "np": "numpy as np", "sandboxgym": "sandboxgym"}
    needed = [f"import {what}\n" for name, what in imports.items() if re.search(rf"\b{name}\.", text)]
    return "".join([*needed, "\n" if needed else "", text, "\n"])


def _unparsed(statement: ast.stmt) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(statement)))
