"""Large JSON files, element by element: the elements of an array, or the pairs of an object, at the top level."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from sandboxgym.envs.webshop.catalogues.product import CatalogueMalformed

CHUNK = 2**22
"""Number of characters read at a time."""
MAX_RECORD = 2**25
"""Limit in characters; a longer element counts as broken, so that a lost quote does not fill the memory."""
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def array_elements(path: Path, *, told: Callable[[int], None] = lambda at: None) -> Iterator[tuple[int, Any]]:
    """Iterate over the array in a file: index and value of each element.

    Args:
        path: path of the file.
        told: function that is called from time to time with the number of bytes read so far.

    Raises:
        CatalogueMalformed: an element cannot be read; raised when it is reached.
    """
    with path.open(encoding="utf-8") as file:
        text = _Text(path, file, told)
        text.expect("[", "at the start")
        index = 0
        more = not text.take("]")
        while more:
            yield index, text.value(f"record {index}")
            more = text.take(",")
            if not more:
                text.expect("]", f"or ',' after record {index}")
            index += 1
        text.expect_end()


def object_items(path: Path) -> Iterator[tuple[str, Any]]:
    """Iterate over the object in a file: key and value of each pair; repeated keys are repeated.

    Raises:
        CatalogueMalformed: a pair cannot be read; raised when it is reached.
    """
    with path.open(encoding="utf-8") as file:
        text = _Text(path, file)
        text.expect("{", "at the start")
        key = None
        more = not text.take("}")
        while more:
            after = "the first key" if key is None else f"the key after {key!r}"
            key = text.value(after)
            if not isinstance(key, str):
                raise CatalogueMalformed(f"{path}: {after}: expected a string, found {key!r:.200}")
            text.expect(":", f"after key {key!r}")
            yield key, text.value(f"the value of {key!r}")
            more = text.take(",")
            if not more:
                text.expect("}", f"or ',' after the value of {key!r}")
        text.expect_end()


class _Text:
    """A window that moves forward through a file."""

    def __init__(self, path: Path, file: TextIO, told: Callable[[int], None] = lambda at: None) -> None:
        self._path = path
        self._told = told
        self._file = file
        self._window = ""
        self._at = 0

    def take(self, token: str) -> bool:
        """Consume the token if it comes next, after white space."""
        found = self._next() == token
        self._at += found
        return found

    def expect(self, token: str, where: str) -> None:
        if not self.take(token):
            raise CatalogueMalformed(f"{self._path}: expected {token!r} {where}, found {self._found()}")

    def expect_end(self) -> None:
        if self._next():
            raise CatalogueMalformed(f"{self._path}: expected the end of the file, found {self._found()}")

    def value(self, what: str) -> Any:
        """Read the next JSON value."""
        self._next()
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._window, self._at)
                return value
            except json.JSONDecodeError as error:
                # It may only be cut off by the end of the window.
                if len(self._window) - self._at > MAX_RECORD or not self._read():
                    raise CatalogueMalformed(
                        f"{self._path}: {what}: expected JSON, found {self._found()} ({error.msg})"
                    ) from error

    def _next(self) -> str:
        while True:
            match = _SPACE.match(self._window, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._window) or not self._read():
                return self._window[self._at : self._at + 1]

    def _read(self) -> bool:
        try:
            chunk = self._file.read(CHUNK)
        except UnicodeDecodeError as error:
            raise CatalogueMalformed(f"{self._path}: expected UTF-8, found {error}") from error
        self._window = self._window[self._at :] + chunk
        self._at = 0
        self._told(self._file.buffer.tell())
        return bool(chunk)

    def _found(self) -> str:
        return repr(self._window[self._at : self._at + 80]) if self._at < len(self._window) else "the end of the file"
