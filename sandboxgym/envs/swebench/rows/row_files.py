"""Reader of published rows: from files, one by one, with checked types of the columns.

1. Invalid input is refused with one sentence of bounded length that names the file, the row and the column: a damaged
   file, text that is not UTF-8, JSON that is nested too deeply, a column of the wrong type or of absurd size.
2. Only a JSON list is held in memory as a whole; names of tests, which thousands of rows share, are held once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandboxgym.brief import brief

SUFFIXES = (".parquet", ".jsonl", ".json")
"""Suffixes of files of rows."""
COLUMN_LIMIT = 32 * 2**20
"""Limit in characters of a column."""
ROW_LIMIT = 128 * 2**20
"""Limit in bytes of a row."""
LIST_LIMIT = 2**30
"""Limit in bytes of a file that is one JSON list."""
_BATCH = 8
"""Number of rows of a Parquet file decompressed at a time; each may grow a thousandfold."""


class TaskError(ValueError):
    """Raised for a row that cannot be used; the message names the row and the column."""


def text(row: Mapping[str, Any], name: str, where: str, *, why: str = "") -> str:
    """Read a column of text.

    Raises:
        TaskError: the column is missing (``why`` says what it is for), not text, or too long.
    """
    if name not in row:
        raise TaskError(f"{where}: the column {name!r} is missing{why and f', {why}'} (found: {columns_of(row)})")
    return _checked(row[name], name, where)


def _checked(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise TaskError(f"{where}, column {name!r}: expected text, found {brief(value, 80)}")
    if len(value) > COLUMN_LIMIT:
        raise TaskError(
            f"{where}, column {name!r}: expected at most {COLUMN_LIMIT:,} characters, found {len(value):,}: "
            f"{brief(value, 40)}"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise TaskError(f"{where}, column {name!r}: not valid Unicode: {error.reason} at {error.start}") from None
    return str(value)


def texts(row: Mapping[str, Any], name: str, where: str, *, of: str, why: str = "") -> tuple[str, ...]:
    """Read a column with a list of texts, given as a list or as JSON.

    Raises:
        TaskError: the column is missing, not a list of texts, or too long.
    """
    if name not in row:
        raise TaskError(f"{where}: the column {name!r} is missing{why and f', {why}'} (found: {columns_of(row)})")
    value = row[name]
    if isinstance(value, str):
        value = parsed(value, name, where, expected=f"a JSON list of {of}")
    if hasattr(value, "tolist"):  # an array, as some readers of parquet give it
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TaskError(f"{where}, column {name!r}: expected a list of {of}, found {brief(value, 80)}")
    _checked("\n".join(value), name, where)
    return tuple(map(sys.intern, value))


def parsed(value: str, name: str, where: str, *, expected: str) -> Any:
    """Read a column of JSON.

    Raises:
        TaskError: the text is not JSON.
    """
    _checked(value, name, where)
    try:
        return json.loads(value)
    except RecursionError:
        raise TaskError(f"{where}, column {name!r}: expected {expected}, found JSON that is nested too deep") from None
    except ValueError as error:
        raise TaskError(f"{where}, column {name!r}: expected {expected}, found {brief(str(error))}") from None


def columns_of(row: Mapping[str, Any]) -> str:
    """Names of a row's columns, for an error."""
    names = [shown(str(name), 40) for name in list(row)[:30]]
    return (", ".join(names) or "none") + (", ..." if len(row) > 30 else "")


def shown(name: str, length: int) -> str:
    """Beginning of a name, for an error, without control characters that move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:length])


def files_of(path: Path) -> list[Path]:
    """List the files of rows at a path: itself, or those in a directory (or in its ``data``), by name.

    Raises:
        TaskError: the directory has no such file.
    """
    if not path.is_dir():
        return [path]
    for folder in (path, path / "data"):
        for suffix in SUFFIXES:
            if found := sorted(file for file in folder.glob(f"*{suffix}") if file.is_file()):
                return found
    raise TaskError(f"{path}: expected a directory with files of rows ({', '.join(SUFFIXES)})")


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """Read the rows of a file or a directory of files, each with its name for errors.

    Raises:
        TaskError: a file is damaged, or its format is unknown.
        ImportError: the reader of parquet files is not installed.
    """
    for file in files_of(path):
        if file.suffix not in SUFFIXES:
            raise TaskError(f"{file}: expected a file whose name ends in {', '.join(SUFFIXES)}")
        reader = {".parquet": _parquet, ".jsonl": _lines}.get(file.suffix, _list)
        for number, row in enumerate(reader(file)):
            yield f"{file}, row {number}", row


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"{path} needs a reader of parquet: pip install 'sandboxgym[swebench]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                if batch.nbytes > _BATCH * ROW_LIMIT:
                    raise TaskError(f"{path}: expected rows of at most {ROW_LIMIT:,} bytes, found {batch.nbytes:,}")
                yield from batch.to_pylist()
    except TaskError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TaskError(f"{path}: expected parquet, found {brief(str(error))}") from None


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(ROW_LIMIT + 1):
            number += 1
            if len(line) > ROW_LIMIT:
                raise TaskError(f"{path}, line {number}: expected at most {ROW_LIMIT:,} bytes")
            if line.strip():
                yield _loaded(line, f"{path}, line {number}", "a row in JSON")


def _list(path: Path) -> Iterator[Any]:
    if (size := path.stat().st_size) > LIST_LIMIT:
        raise TaskError(f"{path}: expected at most {LIST_LIMIT:,} bytes of json, found {size:,}: write it as jsonl")
    rows = _loaded(path.read_bytes(), str(path), "json")
    if isinstance(rows, dict):
        rows = list(rows.values())
    if not isinstance(rows, list):
        raise TaskError(f"{path}: expected a list of rows, found {type(rows).__name__}")
    yield from rows


def _loaded(content: bytes, where: str, expected: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise TaskError(f"{where}: expected {expected}, found JSON that is nested too deep") from None
    except ValueError as error:
        raise TaskError(f"{where}: expected {expected}, found {brief(str(error))}") from None
