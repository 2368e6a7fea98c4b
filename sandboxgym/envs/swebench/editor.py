"""SWE-agent's ``str_replace_editor`` on the files of a sandbox.

1. `Editor` holds nothing but the history of edits, which is part of an environment's state: a value that `edited`
   replaces and nobody changes.
2. What goes wrong is a sentence for the agent, never an exception.
3. Files keep their bytes: whatever is not replaced stays as it was, also where it is not UTF-8, and so does the mode.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandboxgym.envs.swebench.tools import Edit, printable
from sandboxgym.sandbox.base import Result

SHOWN = 16_000
"""Characters of a file or directory that are shown at most."""
AROUND = 4
"""Lines shown before and after an edit."""
UNDO = 32
"""Edits of one file that can be undone."""
_BODY = 5
"""Lines from which on a function's body is left out of an outline."""


class Files(Protocol):
    """What the editor needs of a sandbox."""

    def read_file(self, path: str) -> bytes:
        """Content of a file; raises OSError as `open` does."""

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making missing parents."""

    def run(self, command: str) -> Result:
        """Run a command in a bash of its own."""


class _Refused(Exception):
    """An edit that cannot be done; the message is for the agent."""


@dataclass(frozen=True, slots=True)
class Editor:
    """Earlier contents of the files that were edited, the last one last."""

    history: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def edited(self, call: Edit, files: Files) -> tuple[Editor, str, bool]:
        """The editor after a call, what it says, and whether the call could be done."""
        path = posixpath.normpath(call.path)
        try:
            if not path.startswith("/"):
                raise _Refused(f"The path {call.path} is not absolute: it must start with '/'. Did you mean /{path}?")
            history, said = _COMMANDS[call.command](self.history, path, call.arguments, files)
        except _Refused as refusal:
            return self, str(refusal), False
        except OSError as error:
            return self, f"Ran into {error.strerror or error} while trying to {call.command} {path}.", False
        return Editor(history), said, True

    def plain(self) -> dict[str, list[str]]:
        """As data that can be saved."""
        return {path: list(contents) for path, contents in self.history.items()}

    @classmethod
    def from_plain(cls, value: Any) -> Editor:
        """The inverse of `plain`.

        Raises:
            ValueError: it is no such data.
        """
        if not isinstance(value, dict) or not all(
            isinstance(path, str) and isinstance(contents, list | tuple) and all(isinstance(c, str) for c in contents)
            for path, contents in value.items()
        ):
            raise ValueError(f"expected the contents of edited files, found {value!r:.80}")
        return cls({path: tuple(contents) for path, contents in value.items()})


History = Mapping[str, tuple[str, ...]]
Command = Callable[[History, str, Mapping[str, Any], Files], tuple[History, str]]


def _view(history: History, path: str, arguments: Mapping[str, Any], files: Files) -> tuple[History, str]:
    wanted = arguments.get("view_range")
    try:
        text = _read(files, path)
    except IsADirectoryError:
        if wanted:
            raise _Refused("The argument `view_range` is not allowed when `path` is a directory.") from None
        quoted = shlex.quote(path)
        listing = files.run(f"find {quoted} -maxdepth 2 -not -path '*/.*' | LC_ALL=C sort").output
        return history, _clipped(
            f"Files and directories up to 2 levels deep in {path}, hidden ones left out:\n{listing}"
        )
    lines = text.split("\n")
    if wanted is None:
        if len(text) > SHOWN and path.endswith(".py") and (outline := _outline(text)):
            return history, _clipped(
                f"{path} is too long to be shown whole; here is an outline without the bodies of long functions. "
                f"Use `view_range` to see the lines that were left out:\n{outline}"
            )
        return history, _clipped(_numbered(lines, 1, path))
    first, last = wanted
    if not 1 <= first <= len(lines):
        raise _Refused(f"Invalid `view_range`: {list(wanted)}. Its first element should be in [1, {len(lines)}].")
    if last != -1 and not first <= last <= len(lines):
        raise _Refused(
            f"Invalid `view_range`: {list(wanted)}. Its second element should be in [{first}, {len(lines)}], or -1."
        )
    return history, _clipped(_numbered(lines[first - 1 : None if last == -1 else last], first, path))


def _create(history: History, path: str, arguments: Mapping[str, Any], files: Files) -> tuple[History, str]:
    try:
        files.read_file(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        raise _Refused(f"The path {path} is a directory; only `view` can be used on directories.") from None
    else:
        raise _Refused(f"File already exists at: {path}. Cannot overwrite files using command `create`.")
    text = arguments["file_text"]
    files.write_file(path, _encoded(text))
    return _remembered(history, path, text), f"File created successfully at: {path}"


def _str_replace(history: History, path: str, arguments: Mapping[str, Any], files: Files) -> tuple[History, str]:
    old, new = arguments["old_str"], arguments.get("new_str", "")
    text = _read_existing(files, path)
    if not old:
        raise _Refused("No replacement was performed, `old_str` is empty.")
    count = text.count(old)
    if count == 0:
        raise _Refused(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
    if count > 1:
        lines = sorted({text.count("\n", 0, match.start()) + 1 for match in re.finditer(re.escape(old), text)})
        raise _Refused(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {lines}. "
            "Please make it unique."
        )
    if old == new:
        raise _Refused(f"No replacement was performed, old_str `{old}` is the same as new_str `{new}`.")
    at = text.index(old)
    changed = text[:at] + new + text[at + len(old) :]
    _write(files, path, changed)
    first = text.count("\n", 0, at)
    return _remembered(history, path, text), _after_edit(changed, path, first, first + new.count("\n"))


def _insert(history: History, path: str, arguments: Mapping[str, Any], files: Files) -> tuple[History, str]:
    after, new = arguments["insert_line"], arguments["new_str"]
    text = _read_existing(files, path)
    lines = text.split("\n")
    if not 0 <= after <= len(lines):
        raise _Refused(f"Invalid `insert_line`: {after}. It should be in [0, {len(lines)}], the lines of the file.")
    added = new.split("\n")
    changed = "\n".join([*lines[:after], *added, *lines[after:]])
    _write(files, path, changed)
    return _remembered(history, path, text), _after_edit(changed, path, after, after + len(added) - 1)


def _undo(history: History, path: str, arguments: Mapping[str, Any], files: Files) -> tuple[History, str]:
    if not history.get(path):
        raise _Refused(f"No edit history found for {path}.")
    *earlier, text = history[path]
    try:
        _write(files, path, text)
    except FileNotFoundError:
        files.write_file(path, _encoded(text))
    kept = {name: contents for name, contents in history.items() if name != path}
    return {**kept, path: tuple(earlier)} if earlier else kept, (
        f"Last edit to {path} undone successfully. {_numbered(text.split(chr(10)), 1, path)}"
    )


_COMMANDS: dict[str, Command] = {
    "view": _view,
    "create": _create,
    "str_replace": _str_replace,
    "insert": _insert,
    "undo_edit": _undo,
}


def _read(files: Files, path: str) -> str:
    try:
        return files.read_file(path).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        raise _Refused(f"The path {path} does not exist. Please provide a valid path.") from None


def _read_existing(files: Files, path: str) -> str:
    try:
        return _read(files, path)
    except IsADirectoryError:
        raise _Refused(f"The path {path} is a directory; only `view` can be used on directories.") from None


def _write(files: Files, path: str, text: str) -> None:
    """Replace a file's content, keeping its mode."""
    found = files.run(f"stat -L -c %a -- {shlex.quote(path)}")
    if found.exit_code:
        raise FileNotFoundError(2, "no such file", path)
    files.write_file(path, _encoded(text), mode=int(found.output.strip(), 8))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _remembered(history: History, path: str, text: str) -> History:
    return {**history, path: (*history.get(path, ()), text)[-UNDO:]}


def _numbered(lines: list[str], first: int, path: str) -> str:
    shown = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))
    return f"Here's the result of running `cat -n` on {path}:\n{printable(shown)}\n"


def _after_edit(text: str, path: str, first: int, last: int) -> str:
    start = max(0, first - AROUND)
    snippet = _numbered(text.split("\n")[start : last + AROUND + 1], start + 1, f"a snippet of {path}")
    return _clipped(f"The file {path} has been edited. {snippet}Review the change, and edit again if it is not right.")


def _clipped(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return (
        f"{text[:SHOWN]}<response clipped><NOTE>Only part of this was shown: search with `grep -n` for the lines you "
        "need and view those with `view_range`.</NOTE>"
    )


def _outline(text: str) -> str | None:
    """Numbered lines without the bodies of long functions; None if the text is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    left_out: dict[int, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
            if last - first >= _BODY:
                left_out[first] = max(last, left_out.get(first, 0))
    shown, number, lines = [], 1, text.split("\n")
    while number <= len(lines):
        if number in left_out:
            shown.append(f"{number:6}\t... lines {number} to {left_out[number]} left out ...")
            number = left_out[number]
        else:
            shown.append(f"{number:6}\t{printable(lines[number - 1])}")
        number += 1
    return "\n".join(shown)
