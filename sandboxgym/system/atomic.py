"""Files and directories that appear complete or not at all. Standard library only.

1. What is written has a temporary name beside its own (`temporary_name`) until it is complete: a reader, or a process
   that is killed at any moment, finds the old file or the new one, never a part.
2. A file is flushed to the disk before it gets its name, unless the caller says that its content is checked when it is
   read (``durable=False``): a crash of the machine leaves no part of it either.
3. If anything fails, the temporary file or directory is removed. What a killed process leaves is told by its name
   (`is_temporary`); `sandboxgym gc` removes it.
4. Permissions are those of anything that the user makes (the umask's).
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")


def temporary_name(name: str) -> str:
    """Return a new temporary name for a file or directory: a dot, its name, a dot, and eight random characters."""
    return f".{name}.{os.urandom(4).hex()}"


def is_temporary(name: str, *, of: str | None = None) -> bool:
    """True if a name is one that `temporary_name` gives; with ``of``, one that it gives for that name."""
    return _TEMPORARY.fullmatch(name) is not None and (of is None or name[1:-9] == of)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """Context in which a file is written at the path that it yields; at the end it replaces the file at ``path``.

    Args:
        path: of the file.
        durable: whether it is flushed to the disk before it gets its name.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    path = Path(path)
    temporary = path.with_name(temporary_name(path.name))
    try:
        yield temporary
        if durable:
            _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: str | os.PathLike[str], data: bytes, *, durable: bool = True) -> None:
    """Write a file with this content as a whole; see `atomic_file`."""
    with atomic_file(path, durable=False) as temporary, open(temporary, "xb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def atomic_folder(path: Path, *, temporary: Path | None = None, keep: str | None = None) -> Iterator[Path]:
    """Context in which the empty directory that it yields is filled; at the end it becomes ``path``.

    Args:
        path: of the directory, whose parent exists.
        temporary: its path until then, beside ``path``; by default one by `temporary_name`.
        keep: name of the directory inside that becomes ``path`` alone; the rest is removed. By default it is all of it.

    Raises:
        OSError: it cannot be made, or there is a directory at ``path`` that is not empty; that one stays.
    """
    from sandboxgym.system import run_directories  # most processes only write files

    temporary = temporary or path.with_name(temporary_name(path.name))
    temporary.mkdir()
    try:
        yield temporary
        os.rename(temporary if keep is None else temporary / keep, path)
    except BaseException:
        run_directories.remove_tree(temporary)
        raise
    if keep is not None:
        run_directories.remove_tree(temporary)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
