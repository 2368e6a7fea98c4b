"""Blocks of the documentation's pages, for tests that run what a page shows where another project is installed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"


def block(page: str, language: str, containing: str) -> str:
    """The one block of a page in a language that has a text in it."""
    text = (_DOCS / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (only,) = [one for one in found if containing in one]
    return only


def overrides(page: str, program: str) -> list[str]:
    """Settings that a page's command gives to a program; … stands for the user's own."""
    words = shlex.split(block(page, "bash", program).replace("\\\n", " "))
    return [word for word in words if "=" in word]


def replaced(text: str, *changes: tuple[str, str]) -> str:
    """A block with what is the user's own in it changed: each text has to be there."""
    for old, new in changes:
        assert old in text, f"the page has no {old!r}"
        text = text.replace(old, new)
    return text
