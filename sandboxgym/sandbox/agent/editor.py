"""SWE-agent's ``str_replace_editor`` on the files of a sandbox.

1. `Editor` holds only the history of edits, which is part of an environment's state: an immutable value that `edited`
   replaces.
2. Errors are sentences for the agent, never exceptions.
3. Files keep their mode and all bytes that are not replaced, even those that are not UTF-8.
4. An agent's files cannot exhaust memory or time here: large ones are refused with a sentence (`Files.read_file`), no
   more than `SHOWN` characters are put together to be shown, and the contents that can be undone are bounded in all
   (`REMEMBERED`).
"""

from __future__ import annotations

import ast
import itertools
import posixpath
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandboxgym.brief import brief
from sandboxgym.sandbox.agent.tools import Edit, printable
from sandboxgym.sandbox.base import FileTooLarge, Result

SHOWN = 16_000
"""Limit in characters of what is shown of a file or directory."""
AROUND = 4
"""Number of lines shown before and after an edit."""
UNDO = 32
"""Number of edits of one file that can be undone."""
REMEMBERED = 16 * 2**20
"""Limit in characters of the earlier contents of all files; beyond it, the oldest of other files are dropped."""
_BODY = 5
"""Number of lines from which a function's body is left out of an outline."""
_OUTLINED = 100_000
"""Number of tokens from which a file gets no outline: parsing takes half a kilobyte of memory for each."""
_LISTED = 20
"""Limit of the lines listed in which a text occurs."""
_WORD = re.compile(r"\w+|[^\w\s]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Files(Protocol):
    """File operations that the editor needs from a sandbox."""

    def read_file(self, path: str) -> bytes:
        """Read a file that is not too large; raises OSError as `open` does, or FileTooLarge."""

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making missing parents."""

    def run(self, command: str) -> Result:
        """Run a command in a bash of its own."""


class _Refused(Exception):
    """Raised for an edit that cannot be done; the message is for the agent."""


@dataclass(frozen=True, slots=True)
class Editor:
    """History of edits: earlier contents of the edited files, the last one last."""

    history: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def edited(self, call: Edit, files: Files) -> tuple[Editor, str, bool]:
        """Perform a call; returns the editor after it, its answer, and whether the call could be done."""
        path = posixpath.normpath(call.path)
        try:
            _check_text(call)
            if not path.startswith("/"):
                raise _Refused(f"The path {call.path} is not absolute: it must start with '/'. Did you mean /{path}?")
            path = f"/{path.lstrip('/')}"
            history, said = _COMMANDS[call.command](self.history, path, call.arguments, files)
        except _Refused as refusal:
            return self, _clipped(str(refusal)), False
        except FileTooLarge as error:
            said = (
                f"{path} is too large for the editor: {error.strerror}. Use commands in the shell that show or change "
                "a part of it, such as grep -n, head, tail and sed."
            )
            return self, _clipped(said), False
        except OSError as error:
            said = f"Ran into {error.strerror or error} while trying to {call.command} {path}."
            return self, _clipped(printable(said)), False
        return Editor(history), said, True

    def plain(self) -> dict[str, list[str]]:
        """Convert to plain data that can be saved."""
        return {path: list(contents) for path, contents in self.history.items()}

    @classmethod
    def from_plain(cls, value: Any) -> Editor:
        """Convert the result of `plain` back.

        Raises:
            ValueError: it is no such data.
        """
        if not isinstance(value, dict) or not all(
            isinstance(path, str) and isinstance(contents, list | tuple) and all(isinstance(c, str) for c in contents)
            for path, contents in value.items()
        ):
            raise ValueError(f"expected the contents of edited files, found {brief(value)}")
        return cls({path: tuple(contents) for path, contents in value.items()})


History = Mapping[str, tuple[str, ...]]
Command = Callable[[History, str, Mapping[str, Any], Files], tuple[History, str]]


def _check_text(call: Edit) -> None:
    """Refuse text that JSON allows, but files and file names cannot contain."""
    if "\0" in call.path:
        raise _Refused("The path holds a null character, which no path can.")
    for name, value in (("path", call.path), *call.arguments.items()):
        if isinstance(value, str) and (found := _SURROGATE.search(value)):
            raise _Refused(
                f"The argument `{name}` holds half of a character (U+{ord(found[0]):04X}). Use a command in the shell "
                "for names and contents that are not UTF-8."
            )


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
    if wanted is None:
        if len(text) > SHOWN and path.endswith(".py") and (outline := _outline(text)):
            return history, _clipped(
                f"{path} is too long to be shown whole; here is an outline without the bodies of long functions. "
                f"Use `view_range` to see the lines that were left out:\n{outline}"
            )
        return history, _clipped(_numbered(_lines(text, 1), 1, path))
    first, last = wanted
    number = text.count("\n") + 1
    if not 1 <= first <= number:
        raise _Refused(f"Invalid `view_range`: {list(wanted)}. Its first element should be in [1, {number}].")
    if last != -1 and not first <= last <= number:
        raise _Refused(
            f"Invalid `view_range`: {list(wanted)}. Its second element should be in [{first}, {number}], or -1."
        )
    return history, _clipped(_numbered(_lines(text, first, None if last == -1 else last), first, path))


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
        lines, more = _lines_of(text, old)
        raise _Refused(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {lines}{more}. "
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
    number = text.count("\n") + 1
    if not 0 <= after <= number:
        raise _Refused(f"Invalid `insert_line`: {after}. It should be in [0, {number}], the lines of the file.")
    at = _begin_of_line(text, after + 1)
    # After the last line there is no line end to put it behind.
    changed = f"{text}\n{new}" if after == number else f"{text[:at]}{new}\n{text[at:]}"
    _write(files, path, changed)
    return _remembered(history, path, text), _after_edit(changed, path, after, after + new.count("\n"))


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
        f"Last edit to {path} undone successfully. {_clipped(_numbered(_lines(text, 1), 1, path))}"
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
    said = found.output.strip()
    if not re.fullmatch("[0-7]{1,4}", said):  # those inside may have replaced the program
        raise _Refused(f"The mode of {path} cannot be found out: stat says {said:.80}.")
    files.write_file(path, _encoded(text), mode=int(said, 8))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _remembered(history: History, path: str, text: str) -> History:
    kept = {**history, path: (*history.get(path, ()), text)[-UNDO:]}
    excess = sum(len(content) for contents in kept.values() for content in contents) - REMEMBERED
    for name in [*(other for other in kept if other != path), path]:
        while excess > 0 and len(contents := kept[name]) > (name == path):
            excess -= len(contents[0])
            kept[name] = contents[1:]
    return {name: contents for name, contents in kept.items() if contents}


def _begin_of_line(text: str, number: int) -> int:
    """Position at which a line begins, by its number; the end of the text if it has fewer lines."""
    at = 0
    for _ in range(number - 1):
        at = text.find("\n", at) + 1
        if at == 0:
            return len(text)
    return at


def _lines(text: str, first: int, last: int | None = None) -> Iterator[str]:
    """Lines by their numbers, all of which the text has."""
    at = _begin_of_line(text, first)
    number = first
    while last is None or number <= last:
        end = text.find("\n", at)
        if end < 0:
            yield text[at : at + SHOWN + 1]
            return
        yield text[at : min(end, at + SHOWN + 1)]
        at, number = end + 1, number + 1


def _lines_of(text: str, part: str) -> tuple[list[int], str]:
    """Numbers of the first lines in which a text occurs, with a note if there are more."""
    found: list[int] = []
    number, at, place = 1, 0, text.find(part)
    while place >= 0:
        number += text.count("\n", at, place)
        if found[-1:] != [number]:
            if len(found) == _LISTED:
                return found, " and more"
            found.append(number)
        at, place = place, text.find(part, place + len(part))
    return found, ""


def _numbered(lines: Iterable[str], first: int, path: str) -> str:
    """Lines with their numbers, only as many as can be shown."""
    shown, length = [], 0
    for number, line in enumerate(lines, first):
        shown.append(f"{number:6}\t{line}")
        length += len(shown[-1])
        if length > SHOWN:
            break
    return f"Here's the result of running `cat -n` on {path}:\n{printable(chr(10).join(shown))}\n"


def _after_edit(text: str, path: str, first: int, last: int) -> str:
    start = max(0, first - AROUND)
    snippet = _numbered(_lines(text, start + 1, last + AROUND + 1), start + 1, f"a snippet of {path}")
    return _clipped(f"The file {path} has been edited. {snippet}Review the change, and edit again if it is not right.")


def _clipped(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return (
        f"{text[:SHOWN]}<response clipped><NOTE>Only part of this was shown: search with `grep -n` for the lines you "
        "need and view those with `view_range`.</NOTE>"
    )


def _outline(text: str) -> str | None:
    """Numbered lines without the bodies of long functions; None if the text is not Python, or too much of it."""
    if sum(1 for _ in itertools.islice(_WORD.finditer(text), _OUTLINED)) == _OUTLINED:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what an agent wrote
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last is what the parser makes of deep nesting
        return None
    left_out: dict[int, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
            if last - first >= _BODY:
                left_out[first] = max(last, left_out.get(first, 0))
    shown, length, until = [], 0, 0
    for number, line in enumerate(_lines(text, 1), 1):
        if number <= until:
            continue
        until = left_out.get(number, 0)
        left = f"... lines {number} to {until} left out ..." if until else printable(line)
        shown.append(f"{number:6}\t{left}")
        length += len(shown[-1])
        if length > SHOWN:
            break
    return "\n".join(shown)
