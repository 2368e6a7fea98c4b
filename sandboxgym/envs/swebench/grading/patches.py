"""Parser of patches that reads them as the harness's commands do: ``git apply``, then ``patch -p1``.

1. Names are those that the commands would write: the first directory is removed whatever its name, and names in quotes
   are unescaped (an octal number stands for a byte).
2. Formats that ``patch`` accepts and this parser does not, such as context diffs and scripts for ``ed``, are recognised
   (`foreign`).
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field

_ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11, '"': 34, "\\": 92}
_HEADS = (
    "diff ",
    "index ",
    "new file mode ",
    "deleted file mode ",
    "old mode ",
    "new mode ",
    "similarity index ",
    "dissimilarity index ",
    "rename ",
    "copy ",
    "--- ",
    "+++ ",
    "@@ ",
    "Binary files ",
    "GIT binary patch",
)
_FOREIGN = re.compile(r"\*\*\* |\*{15}|Index:|Prereq:|\d+(,\d+)?[acd](\d+(,\d+)?)?\s*$")


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of a patch to one file."""

    path: str
    """Name of the file after the patch, or before it if the file is deleted."""
    old_path: str = ""
    """Name of the file before the patch, if that was different."""
    new: bool = False
    deleted: bool = False
    link: bool = False
    submodule: bool = False
    binary: bool = False
    added: tuple[str, ...] = field(default=(), repr=False)
    """Added lines, without the sign."""
    removed: tuple[str, ...] = field(default=(), repr=False)
    context: tuple[str, ...] = field(default=(), repr=False)
    after: tuple[str, ...] = field(default=(), repr=False)
    """Lines that exist after the patch, added ones and context in their order; an empty one between two hunks."""


def changes(patch: str) -> list[Change]:
    """Parse a patch in git's format to its files; also in that of ``diff -u``, as ``patch`` accepts it."""
    found: list[Change] = []
    head: dict[str, str] = {}
    lines: dict[str, list[str]] = {"+": [], "-": [], " ": [], "after": []}
    left = [0, 0]  # lines of the hunk that are still to come, before and after

    def finish() -> None:
        before, after = head.get("---", ""), head.get("+++", "")
        before, after = head.get("from", before), head.get("to", after)
        first, last = head.get("a", ""), head.get("b", "")
        new = "new" in head or before == "/dev/null"
        deleted = "deleted" in head or after == "/dev/null"
        path = next(
            (name for name in ((before, first) if deleted else (after, last)) if name and name != "/dev/null"), ""
        )
        if path:
            old = before if before not in ("", "/dev/null", path) else ""
            kept = {sign: tuple(text) for sign, text in lines.items()}
            modes = (head.get("new", ""), head.get("mode", ""))
            found.append(
                Change(
                    path,
                    old,
                    new,
                    deleted,
                    link="120000" in modes,
                    submodule="160000" in modes,
                    binary="binary" in head,
                    added=kept["+"],
                    removed=kept["-"],
                    context=kept[" "],
                    after=kept["after"],
                )
            )
        head.clear()
        for text in lines.values():
            text.clear()

    for line in patch.split("\n"):
        if left != [0, 0] and line[:1] in ("+", "-", " ", ""):
            sign = line[:1] or " "
            lines[sign].append(line[1:])
            if sign != "-":
                lines["after"].append(line[1:])
            left[0] -= sign in "- "
            left[1] -= sign in "+ "
            left = [max(left[0], 0), max(left[1], 0)]
            continue
        if line.startswith("\\"):
            continue
        left = [0, 0]
        if line.startswith("diff --git "):
            finish()
            names = re.match(r'("?)a/(.*?)\1 ("?)b/(.*?)\3$', line[11:])
            if names:
                head["a"], head["b"] = (_clean(name) for name in (names[2], names[4]))
        elif line.startswith("--- "):
            if "+++" in head:  # of diff -u, which has no line between two files
                finish()
            head["---"] = _name(line[4:])
        elif line.startswith("+++ "):
            head["+++"] = _name(line[4:])
        elif hunk := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            left = [1 if count is None else int(count[:9]) for count in hunk.groups()]
            lines["after"].append("")
        elif line.startswith(("rename from ", "copy from ")):
            head["from"] = _clean(line.split(" from ", 1)[1].strip('"'))
        elif line.startswith(("rename to ", "copy to ")):
            head["to"] = _clean(line.split(" to ", 1)[1].strip('"'))
        elif line.startswith("new file mode "):
            head["new"] = line[14:].strip()
        elif line.startswith("new mode "):
            head["mode"] = line[9:].strip()
        elif line.startswith("index ") and line.endswith((" 120000", " 160000")):
            head.setdefault("mode", line[-6:])
        elif line.startswith("deleted file mode "):
            head["deleted"] = ""
        elif line.startswith(("GIT binary patch", "Binary files ")):
            head["binary"] = ""
    finish()
    return found


def foreign(patch: str) -> bool:
    """Tell whether a part of a patch is in a format that ``patch`` accepts and `changes` does not read.

    Context differences, "normal" ones, scripts for ``ed``, and a name that is given by ``Index:`` alone.
    """
    left, binary = [0, 0], False
    for line in patch.split("\n"):
        if left != [0, 0] and line[:1] in ("+", "-", " ", ""):
            left = [max(left[0] - (line[:1] != "+"), 0), max(left[1] - (line[:1] != "-"), 0)]
            continue
        left = [0, 0]
        if hunk := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            left = [1 if count is None else int(count[:9]) for count in hunk.groups()]
        binary = line.startswith("GIT binary patch") or (binary and not line.startswith("diff "))
        if binary or line.startswith(_HEADS):
            continue
        if _FOREIGN.match(line.lstrip(" X\t")) or re.match(
            r"[ X\t]+(---|\+\+\+|@@) ", line
        ):  # `patch` takes them indented
            return True
    return False


def _name(text: str) -> str:
    """Parse a name as ``---`` and ``+++`` give it, without its first directory."""
    text = text.strip()
    quoted = re.match(r'"((?:[^"\\]|\\.)*)"', text)
    text = quoted[1] if quoted else text.split("\t")[0].strip()
    if text == "/dev/null":
        return text
    return _clean(text.partition("/")[2] or text)


def _clean(text: str) -> str:
    """Normalise a name: without git's escapes, and in its shortest form."""
    if "\\" in text:
        # An escape stands for a byte, and a character outside of ASCII for several of them.
        pieces = re.split(r"\\([0-7]{1,3}|.)", text)
        raw = bytearray()
        for number, piece in enumerate(pieces):
            if number % 2 == 0:
                raw += piece.encode("utf-8", "surrogatepass")
            elif piece[0] in "01234567":
                raw.append(int(piece, 8) % 256)
            else:
                raw.append(_ESCAPES.get(piece, ord(piece) % 256))
        text = raw.decode("utf-8", "replace")
    return posixpath.normpath(text) if text else text
