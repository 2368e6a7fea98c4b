"""A page of results in Markdown: the command that wrote it, the machine, tables, and hand-written remarks."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

REMARKS = "### What the numbers say"
"""Heading of the hand-written remarks, which are kept when a page is rewritten."""
_FENCE = "```"


def head(title: str, name: str, argv: Sequence[str] | None) -> list[str]:
    """Write the title and the command, without the option that names the page's file.

    Args:
        title: title of the page.
        name: of the benchmark.
        argv: its arguments; None: those of this process.
    """
    given = re.sub(r" ?--write \S+", "", " ".join(sys.argv[1:] if argv is None else argv))
    return [f"# {title}", "", "```bash", f"sandboxgym bench {name} {given}".strip(), "```", ""]


def machine(*more: str) -> str:
    """Describe the machine: cores, kernel, Python and the date, with ``more`` between them."""
    kernel = f"{platform.system()} {platform.release().split('-')[0]}"
    parts = (f"{os.cpu_count()} cores ({platform.machine()})", kernel, *more, f"Python {platform.python_version()}")
    return f"{', '.join(parts)}, {datetime.date.today()}"


def publish(lines: Sequence[str], target: str | Path | None) -> None:
    """Print the page, and write it to a file if one is given.

    A file that exists keeps its hand-written parts: its `REMARKS`, and its introduction, the text between the title and
    the first block of code, where the page itself has none.
    """
    text = "\n".join(lines).rstrip() + "\n"
    sys.stdout.write(text)
    if target:
        page = Path(target)
        old = page.read_text(encoding="utf-8") if page.exists() else ""
        title, introduction, rest = _parts(text)
        if rest.startswith(_FENCE) and not introduction.strip():
            introduction = _parts(old)[1] or introduction
        text = title + introduction + rest
        remarks = old.partition(REMARKS)[2]
        page.write_text(text + (f"\n{REMARKS}{remarks}" if remarks else ""), encoding="utf-8")


def _parts(text: str) -> tuple[str, str, str]:
    """Title, introduction, and the rest, which begins with a block of code; without one there is no introduction."""
    title, newline, body = text.partition("\n")
    introduction, fence, rest = body.partition(_FENCE)
    return (title + newline, introduction, fence + rest) if fence else (title + newline, "", body)
