"""Count and delete directories that a sandbox's processes wrote. Standard library only.

Their content is hostile: see ``system/directories.py``.
"""

from __future__ import annotations

import contextlib

from sandboxgym.system import directories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK = 512
"""Bytes of the blocks in a file's status."""


def usage(directory: str) -> int:
    """Bytes on disk of a directory's content; a file with several names counts once."""
    seen: set[int] = set()
    total = 0
    for entry in directories.walk(directory):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # deleted meanwhile
            continue
        if status.st_ino not in seen:
            seen.add(status.st_ino)
            total += status.st_blocks * BLOCK
    return total


def extent(directory: str, files: int, nbytes: int) -> int | None:
    """Bytes on disk of a directory's content, looked at no longer than it can be within the limits.

    Args:
        directory: which may be written to.
        files: limit of the number of entries, subdirectories included; negative: nothing is within.
        nbytes: limit of bytes.

    Returns:
        None if there is more.
    """
    total = number = 0
    for number, entry in enumerate(directories.walk(directory), 1):
        if number > files:
            return None
        with contextlib.suppress(OSError):  # deleted meanwhile
            total += entry.stat(follow_symlinks=False).st_blocks * BLOCK
        if total > nbytes:
            return None
    return total if number <= files else None


def remove_directories(paths: Iterable[str]) -> None:
    """Delete directories with their content, as far as permissions allow."""
    for path in paths:
        try:
            directories.remove(path)
        except OSError:  # it goes with the run directory, or that says why not
            continue
