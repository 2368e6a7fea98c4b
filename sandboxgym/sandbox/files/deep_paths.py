"""Usable paths in directory trees of any depth, short enough for every system call.

The kernel takes paths of up to 4,095 bytes; a process in a sandbox can nest directories far deeper, one step at a time.
Here a deep directory is named by a descriptor of one above it, and few of these are open at a time. Nobody else may
change the trees meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_LONGEST = 512
"""Bytes of a path below its base from which on a descriptor of it is opened."""
_OPEN = 16
"""Open descriptors at most; more than the trees that one call names."""


PATH_MAX = 4096
"""Linux' limit of a path in bytes, with its null byte."""
_ROOM = 16
"""Bytes by which another's path to the same tree may be longer than ours."""


def beyond_paths(top: Path, *, most: int = 10) -> list[str]:
    """Directories beyond the longest path, as the paths below a tree's top that lead furthest there: ``/a/b/c``.

    Args:
        top: of the tree.
        most: of these that are looked for.

    Raises:
        OSError: a directory cannot be read, or is gone.
    """
    found: list[str] = []
    pending = [os.fspath(top)]
    while pending and len(found) < most:
        place = pending.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                if len(os.fsencode(entry.path)) >= PATH_MAX - _ROOM:
                    found.append(place.removeprefix(os.fspath(top)) or "/")
                    break
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return found


class DeepPath:
    """A directory, as the sequence of names from the top of a tree; equal in every tree that has it."""

    __slots__ = ("above", "inside")

    def __init__(self, above: DeepPath | None = None, inside: str = "") -> None:
        self.above = above
        """A place that `inside` is relative to; None for the top."""
        self.inside = inside

    def below(self, name: str) -> DeepPath:
        """The subdirectory of that name."""
        inside = os.path.join(self.inside, name)
        if len(os.fsencode(inside)) > _LONGEST:
            return DeepPath(self, name)
        return DeepPath(self.above, inside)


class DeepPaths:
    """Context that gives usable paths of places in trees; it holds descriptors."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, DeepPath], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1])

    def path(self, top: str, place: DeepPath, name: str = "") -> str:
        """Usable path of a place in the tree below ``top``, or of an entry there.

        It is good until some others were asked for.

        Raises:
            OSError: a directory on the way is not there.
        """
        inside = os.path.join(place.inside, name) if name else place.inside
        if place.above is None:
            return os.path.join(top, inside) if inside else top
        return f"/proc/self/fd/{self._descriptor(top, place.above)}/{inside}"

    def places(self, top: str) -> Iterator[DeepPath]:
        """Iterate over every directory of a tree, each before its subdirectories."""
        pending = [DeepPath()]
        while pending:
            place = pending.pop()
            yield place
            with os.scandir(self.path(top, place)) as entries:
                pending += [place.below(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]

    def _descriptor(self, top: str, place: DeepPath) -> int:
        way = []
        one: DeepPath | None = place
        while one is not None and (top, one) not in self._opened:
            way.append(one)
            one = one.above
        # Taken out and put in again: the first of a dictionary is then what was not used for the longest time.
        found = -1
        if one is not None:
            found = self._opened[top, one] = self._opened.pop((top, one))
        for step in reversed(way):
            path = os.path.join(top, step.inside) if step.above is None else step.inside
            above = None if step.above is None else found
            found = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
            self._opened[top, step] = found
            if len(self._opened) > _OPEN:
                os.close(self._opened.pop(next(iter(self._opened))))
        return found
