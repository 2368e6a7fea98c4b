"""Text on a terminal: wrapped to its width, coloured only on a terminal.

There is no colour if ``NO_COLOR`` is set (to anything) or ``TERM`` is "dumb".
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Sequence
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Screen:
    """Output of a command.

    Args:
        out: the stream; its being a terminal decides about colour.
        width: columns; default: the terminal's, at most 100 for text that is read.
    """

    def __init__(self, out: TextIO, *, width: int | None = None) -> None:
        self.out = out
        self._width = width
        self.colour = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    @property
    def width(self) -> int:
        """Columns to fill, queried each time: windows are resized."""
        return self._width or max(20, min(100, shutil.get_terminal_size((80, 24)).columns))

    def style(self, text: str, *names: str) -> str:
        """Style the text with a colour or weight, where there is colour."""
        if not self.colour or not text or not names:
            return text
        return f"\033[{';'.join(_CODES[name] for name in names)}m{text}\033[0m"

    def line(self, text: str = "") -> None:
        """Print one line unchanged."""
        print(text, file=self.out)

    def text(self, text: str, *styles: str, indent: str = "", hanging: str | None = None) -> None:
        """Print text with its own line breaks kept and long lines wrapped."""
        for line in self.wrapped(text, indent=indent, hanging=hanging):
            self.line(self.style(line, *styles))

    def wrapped(self, text: str, *, indent: str = "", hanging: str | None = None) -> list[str]:
        """Wrap text to lines; at least one."""
        lines: list[str] = []
        for line in text.splitlines():
            lines += textwrap.wrap(
                line,
                max(self.width, len(indent) + 20),
                initial_indent=indent,
                subsequent_indent=indent if hanging is None else hanging,
                replace_whitespace=False,
                break_on_hyphens=False,
                break_long_words="://" not in line,  # half an address cannot be opened
            ) or [""]
        return lines or [""]

    def columns(self, cells: Sequence[str], *, rows: int | None = None) -> int:
        """Print short entries in columns, read downwards; returns how many were shown if the rows are limited."""
        if not cells:
            return 0
        wide = min(self.width, max(map(len, cells)) + 2)
        across = max(1, self.width // wide)
        shown = cells if rows is None else cells[: rows * across]
        down = -(-len(shown) // across)
        for row in range(down):
            line = "".join(f"{cell[: wide - 1]:<{wide}}" for cell in shown[row::down])
            self.line(self.style(line.rstrip(), "dim"))
        return len(shown)


def nbytes_text(nbytes: float) -> str:
    """Format a size for people: ``nbytes_text(5_300_000)`` is "5.3 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def harmless(text: str) -> str:
    """Escape untrusted text for a terminal: control characters become backslash escapes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )
