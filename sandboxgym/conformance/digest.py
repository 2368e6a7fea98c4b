"""Version of the suite: a digest of the code of its modules, the same for all supported versions of Python.

Comments, docstrings, formatting, and the texts of a check's hazard and blind spots do not count, so that a corrected
sentence does not make a certificate outdated. Everything else counts, including messages of failures.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOME = Path(__file__).parent
SHOWING = (
    *("__main__.py", "baselines.py", "digest.py", "strength/", "test_conformance.py"),
    *("harness/shrink.py", "harness/unrestored.py", "reports/"),
    *("supervision/janitor.py", "supervision/scratch.py"),
)
"""Modules and subpackages of the suite on which no verdict of a check depends."""
PROSE = frozenset({"hazard", "blind"})
"""Arguments of a check, or of a specimen, that only reports show."""
DESCRIBED = frozenset({"check", "Mutant"})
"""Names of the calls that take `PROSE`; in other calls, arguments of these names count."""


@functools.cache
def suite_digest() -> str:
    """First 8 hexadecimal digits of a digest over the suite's modules that decide verdicts."""
    found = hashlib.sha256()
    for path in sorted(HOME.rglob("*.py")):
        name = path.relative_to(HOME).as_posix()
        if not name.startswith(SHOWING):
            found.update(f"{name}\0{source_digest(path.read_text(encoding='utf-8'))}\n".encode())
    return found.hexdigest()[:8]


@functools.cache
def source_digest(source: str) -> str:
    """Digest of the code in Python source, without positions and prose; see `digest_of`.

    Raises:
        SyntaxError: the text is not valid Python.
    """
    return digest_of(ast.parse(source).body)


def digest_of(nodes: Iterable[ast.AST]) -> str:
    """Digest of syntax trees without positions and prose, as 64 hexadecimal digits.

    Neither `ast.dump` nor `ast.unparse` gives the same text under all versions of Python.
    """
    parts: list[str] = []
    _write(list(nodes), parts)
    return hashlib.sha256("".join(parts).encode("utf-8", "backslashreplace")).hexdigest()


def _write(value: Any, parts: list[str]) -> None:
    if isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        parts.append("(")
        described = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in DESCRIBED
        for name in value._fields:
            item = getattr(value, name, None)
            if described and name == "keywords":
                item = [keyword for keyword in item or [] if keyword.arg not in PROSE]
            if isinstance(value, ast.JoinedStr) and isinstance(item, list):
                item = [part for part in item if getattr(part, "value", None) != ""]  # Python 3.12.1 puts them in
            if item is not None and item != []:  # each version of Python adds optional parts
                parts.append(f"{name}=")
                _write(item, parts)
        parts.append(")")
    elif isinstance(value, list):
        parts.append("[")
        for item in value:
            if not _is_prose(item):
                _write(item, parts)
        parts.append("]")
    else:
        parts.append(f"{value!r},")


def _is_prose(node: Any) -> bool:
    """True for docstrings, those of attributes too."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
