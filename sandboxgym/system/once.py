"""Directories of a cache, each made once, whichever processes and threads want it at the same time.

1. One process makes a directory while the others wait (`made_once`); a process that is killed meanwhile holds no lock,
   and the next one begins again without what was left.
2. A directory appears complete or not at all (`atomic.atomic_folder`). One that cannot be used is made again.
3. Where the file system has no locks, several may make it; the first one to end is used by all.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sandboxgym.system import run_directories
from sandboxgym.system.atomic import atomic_folder, is_temporary

try:
    import fcntl
except ImportError:  # not on Windows, which then has no protection against two at once
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def file_lock(path: Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Context in which this thread alone, of all processes, holds the lock of a file; waits for it.

    The file is made if it is missing, and stays: whoever removed it would part those who wait from those who come.

    Args:
        path: of the file.
        waiting: called once if another holds the lock.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    with open(path, "ab") as file:
        if not run_directories.try_lock(file):
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(path: Path, make: Callable[[Path], None], *, look: Callable[[], T | None], keep: str | None = None) -> T:
    """Look up what a directory of a cache holds, making the directory first if it is missing.

    Args:
        path: of the directory. Beside it, ``NAME.lock`` is made, and its parents are if they are missing.
        make: fills an empty directory, which then becomes ``path``.
        look: opens the directory at ``path``; None if there is none, or none that can be used: that one is removed.
        keep: see `atomic.atomic_folder`.

    Raises:
        OSError: it cannot be written, such as where the disk is full. Nothing is left of it.
        RuntimeError: what was made cannot be used.
    """
    if (found := look()) is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        alone = True
        try:
            stack.enter_context(file_lock(path.with_name(f"{path.name}.lock")))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            alone = False
        if (found := look()) is not None:  # another process made it meanwhile
            return found
        if alone:
            for left in [place for place in path.parent.iterdir() if is_temporary(place.name, of=path.name)]:
                run_directories.remove_tree(left)  # of a process that was killed
        try:
            with atomic_folder(path, keep=keep) as folder:
                make(folder)
                if alone and path.exists():
                    run_directories.remove_tree(path)
        except OSError:
            if alone or (found := look()) is None:
                raise
            return found
    if (found := look()) is None:
        raise RuntimeError(f"{path} was made and cannot be used")
    return found
