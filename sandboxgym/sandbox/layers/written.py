"""Change detection for a container's files by their status: one walk of a layer, no reading.

1. Two equal `Written.key` that were `settled` when the files were read imply equal files. An agent can set the
   modification time but not the change time (ctime), which comes from the machine's clock.
2. The kernel's clock for files advances in ticks: a file changed within the last one may change again without a trace.
   So a reader lets the tick pass first (`Written.settle`).
3. A file that is mapped, or that a running process writes, changes its times late. The caller must know that only an
   idle shell runs inside.
4. Where a file cannot be inspected, there is no answer at all.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxgym.system import directories

_COARSE = 5  # CLOCK_REALTIME_COARSE of Linux, which files are stamped by
try:
    TICK = int(2 * time.clock_getres(_COARSE) * 1e9)
except (OSError, AttributeError):
    TICK = 20_000_000
"""Nanoseconds within which the kernel may give two changes one time, with as much to spare."""
MOST = 20_000
"""Entries of a layer that are inspected at most; with more, reading the relevant files is no slower."""


@dataclass(frozen=True, slots=True)
class Written:
    """Status of the layer that a container writes to, at one time."""

    key: str
    """Identity of the tree below, and a digest of names, kinds, sizes and times of all later writes."""
    changed: int
    """Time of the last change, in nanoseconds since 1970; 0 if nothing was written."""

    @property
    def settled(self) -> bool:
        """True if any later change gives another key."""
        return time.time_ns() - self.changed > TICK

    def settle(self) -> bool:
        """Wait for the tick of the last change to pass; False if that would take long, for a clock was set."""
        left = TICK - (time.time_ns() - self.changed)
        if 0 <= left <= TICK:
            time.sleep((left + 10**6) / 1e9)
        return self.settled


def untouched(base: str) -> str:
    """Key of a container that has written nothing.

    Args:
        base: the id of the tree that it stands on.
    """
    return f"{base}/"


def look(files: Path, base: str) -> Written | None:
    """Inspect a layer; None if not all of it can be seen, or it is too large.

    Args:
        files: the directory that overlayfs writes to.
        base: the id of the tree below.
    """
    seen, denied = hashlib.sha256(), list[str]()
    changed = number = 0
    try:
        for number, entry in enumerate(directories.walk(str(files), denied=denied), 1):
            if number > MOST:
                return None
            status = entry.stat(follow_symlinks=False)
            changed = max(changed, status.st_ctime_ns)
            # A directory that was replaced by one which hides what lies below has another time, too; so has one into
            # which, or out of which, something was moved.
            facts = (
                *(status.st_mode, status.st_ino, status.st_nlink, status.st_uid, status.st_gid, status.st_rdev),
                *(status.st_size, status.st_mtime_ns, status.st_ctime_ns),
            )
            seen.update(f"{entry.name!r}{facts}".encode("utf-8", "surrogateescape"))
    except OSError:  # it was deleted meanwhile
        return None
    if denied:
        return None
    return Written(untouched(base) + (seen.hexdigest() if number else ""), changed)


def changes(layers: Sequence[Path], *, most: int = MOST) -> list[str] | None:
    """Absolute paths inside that cover all changes of layers: a file, or a directory with all in it.

    More may lie below these than was changed, never less. None if not all can be seen, or it is a great deal.

    Args:
        layers: directories that overlayfs wrote to; nothing writes there meanwhile.
        most: entries that are looked at.
    """
    found = set[str]()
    number = 0
    for layer in layers:
        pending = [("", os.fspath(layer))]
        while pending:
            inside, place = pending.pop()
            try:
                with os.scandir(place) as entries:
                    for entry in entries:
                        number += 1
                        if number > most:
                            return None
                        path = f"{inside}/{entry.name}"
                        if not entry.is_dir(follow_symlinks=False) or _stands_alone(entry):
                            found.add(path)
                        else:
                            pending.append((path, entry.path))
            except OSError:
                return None
    return sorted(found)


def _stands_alone(directory: os.DirEntry[str]) -> bool:
    """True if a directory in a layer is more than the path to a change below.

    It is new, or hides or replaces what lies below; or it is closed to an ordinary user now, and what is in it gone.
    """
    if directory.stat(follow_symlinks=False).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        return True
    marks = os.listxattr(directory.path, follow_symlinks=False)
    return any(mark.rpartition(".")[2] in ("opaque", "redirect") and ".overlay." in mark for mark in marks)
