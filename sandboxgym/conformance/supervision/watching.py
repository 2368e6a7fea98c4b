"""Effects of this process on the machine: files made, programs started, containers requested.

1. They are observed through the interpreter's audit events, so that nobody has to count everything in the machine's
   folders. Files that child processes make outside ``TMPDIR`` are not seen here.
2. An audit hook cannot be removed from a process; it returns after one test unless something is being watched.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"})
_TARGETS = {"os.mkdir": 0, "os.link": 1, "os.symlink": 1, "os.rename": 1, "sqlite3.connect": 0, "tempfile.mkstemp": 0}
_TARGETS |= {"tempfile.mkdtemp": 0}
_DAEMONS = ("docker", "podman", "containerd")


@dataclass
class Doings:
    """Effects observed since the watch began.

    Attributes:
        apart: a folder in which files may be made; these are not recorded.
        paths: files and folders that this process made, or opened in a mode that can make them.
        children: programs and processes that it started.
        containers: True if it spoke to the socket of a container daemon.
    """

    apart: str
    paths: set[str] = field(default_factory=set)
    children: int = 0
    containers: bool = False

    def remaining(self) -> set[str]:
        """Remove from `paths` those that no longer exist; return the others."""
        self.paths = {path for path in self.paths if os.path.lexists(path)}
        return set(self.paths)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
            if flags & os.O_CREAT:
                self._made(arguments[0])
        elif event in _TARGETS:
            self._made(arguments[_TARGETS[event]])
        elif event in _STARTS:
            self.children += 1
        elif event == "socket.connect" and isinstance(arguments[1], (str, bytes)):
            self.containers = self.containers or any(name in os.fsdecode(arguments[1]) for name in _DAEMONS)
        elif event == "socket.bind" and isinstance(arguments[1], (str, bytes)):
            self._made(arguments[1])

    def _made(self, path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            name = os.path.abspath(os.fsdecode(path))
            if not name.startswith((self.apart, "/dev/null", "/proc/")):
                self.paths.add(name)


_watches: list[Doings] = []
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watches or not (event == "open" or event in _TARGETS or event in _STARTS or event.startswith("socket.")):
        return
    for doings in _watches:
        with contextlib.suppress(Exception):  # an error here must not disturb the watched code
            doings._note(event, arguments)


@contextlib.contextmanager
def watched(apart: Path) -> Iterator[Doings]:
    """Context that records the effects of this process, of all its threads."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    doings = Doings(f"{apart}{os.sep}")
    _watches.append(doings)
    try:
        yield doings
    finally:
        _watches.remove(doings)
