"""Counting and deleting directories that a sandbox's processes wrote. Standard library only.

What is in there is hostile: nesting deeper than a path may be long, modes without permissions. Nothing here follows a
link or recurses.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_BLOCK = 512
_PARTS = 64


def usage(directory: str) -> int:
    """Bytes on disk of all that is in a directory; a file with several names counts once."""
    seen: set[int] = set()
    total = 0
    pending = [directory]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if status.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                        if status.st_ino in seen:
                            continue
                        seen.add(status.st_ino)
                    total += status.st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:  # deleted meanwhile, or nested too deep to be named
            continue
    return total


def remove_directories(paths: Iterable[str]) -> None:
    """Delete directories with all that is in them, as far as permissions allow.

    By ``rm``, which copes with any depth; a user without privileges must first be able to enter what is in there.
    """
    paths = list(paths)
    for at in range(0, len(paths), _PARTS):
        some = paths[at : at + _PARTS]
        if _run("rm", "-rf", "--one-file-system", "--", *some):
            left = [path for path in some if os.path.lexists(path)]
            _run("chmod", "-R", "u+rwX", "--", *left)
            _run("rm", "-rf", "--one-file-system", "--", *left)


def _run(*command: str) -> int:
    quiet = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in range(3)]
    pid = os.posix_spawnp(command[0], command, {"PATH": "/usr/bin:/bin"}, file_actions=quiet)
    return os.waitpid(pid, 0)[1]
