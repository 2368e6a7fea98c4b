"""First lines of docstrings make sense by themselves, without the name beside them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPENERS = re.compile(r"(What|How|Of|Whether|That|Where|When|Who|Which|Why|As|Likewise)\b")
"""Words that begin half a sentence: the other half is the name beside it. "True if" says what "Whether" says."""
LEFT = {"runs", "zoo"}
"""Folders of runs, and of the faulty environments, whose code is part of the identity of the suite's evidence."""


def first_lines(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """First lines of docstrings, those of fields and constants included, with their line numbers."""
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            if isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value.strip().partition("\n")[0]
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.Try, ast.With)):
            yield from first_lines(statement.body)


def halves(text: str) -> list[str]:
    return [f"{number}: {line}" for number, line in first_lines(ast.parse(text).body) if OPENERS.match(line)]


@pytest.mark.parametrize("room", ["sandboxgym", "sandboxgym_pytest", "bpo_ref", "tests", "docs", "conformance"])
def test_first_lines_of_docstrings_are_no_half_sentences(room: str) -> None:
    paths = [path for path in sorted((ROOT / room).rglob("*.py")) if not LEFT & {*path.parts}]
    found = {path: halves(path.read_text(encoding="utf-8")) for path in paths}
    assert found and not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "text",
    [
        '"""What it does."""',
        'def f():\n    """Whether it is so."""',
        'class A:\n    x: int\n    """Where it is."""',
        'class A:\n    def f(self):\n        self.x = 1\n        """Of what."""',
    ],
)
def test_a_half_sentence_is_found(text: str) -> None:
    assert halves(text)
    assert not halves(text.replace('"""', '"""Sentence: ', 1))
