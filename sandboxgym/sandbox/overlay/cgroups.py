"""Limits of a whole container: control groups of version 1 or 2 where they are writable, else limits per process.

1. Every container has a group of its own below the group of its owner, so that limits on the owner include its
   containers.
2. A group is removed when its container ends; `remove_groups` clears those of a killed owner.
3. Without groups the kernel's limits per process and user apply: `rlimits`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sandboxgym.sandbox.base import Limits

_WANTED = ("memory", "pids", "freezer")
# What the kernel counts for a user as a whole, and one sandbox could take from all others (and, without ids of its own,
# from the machine's root).
_COUNTED_BY_USER = (
    [(resource.RLIMIT_SIGPENDING, 4096), (resource.RLIMIT_MSGQUEUE, 1 << 20), (resource.RLIMIT_MEMLOCK, 64 << 20)]
    if hasattr(resource, "RLIMIT_SIGPENDING")
    else []
)
RECORD = "groups"
"""File in a run directory that lists the parent groups of its containers, one per line."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Control group of one container: a directory per hierarchy of version 1, or one of version 2."""

    folders: dict[str, Path]
    """Directory by controller; with version 2 the same for all."""
    unified: frozenset[str] = frozenset()
    """Controllers of version 2."""

    @property
    def paths(self) -> list[str]:
        """Paths of the directories, each once."""
        return sorted({str(path) for path in self.folders.values()})

    def limit(self, limits: Limits) -> None:
        """Apply ``limits`` to the container from now on."""
        if "memory" in self.folders:
            if "memory" in self.unified:
                self._write("memory", "memory.max", _or_max(limits.memory))
                with contextlib.suppress(OSError):  # no swap accounting
                    self._write("memory", "memory.swap.max", "0" if limits.memory else "max")
            elif limits.memory is not None:
                self._write("memory", "memory.limit_in_bytes", str(limits.memory))
                with contextlib.suppress(OSError):
                    self._write("memory", "memory.memsw.limit_in_bytes", str(limits.memory))
        if "pids" in self.folders:
            # one more, for the container's own init
            self._write("pids", "pids.max", _or_max(None if limits.processes is None else limits.processes + 1))

    def freeze(self, seconds: float = 5.0) -> bool:
        """Stop every process; False if that cannot be done here."""
        if "freezer" not in self.folders:
            return False
        if "freezer" in self.unified:
            self._write("freezer", "cgroup.freeze", "1")
            return self._until("cgroup.events", "frozen 1", seconds)
        self._write("freezer", "freezer.state", "FROZEN")
        return self._until("freezer.state", "FROZEN", seconds)

    def thaw(self) -> None:
        """Continue frozen processes."""
        if "freezer" in self.unified:
            self._write("freezer", "cgroup.freeze", "0")
        else:
            self._write("freezer", "freezer.state", "THAWED")

    def memory(self) -> int | None:
        """Bytes charged to the container, as far as they are counted."""
        name = "memory.current" if "memory" in self.unified else "memory.usage_in_bytes"
        return int((self.folders["memory"] / name).read_text()) if "memory" in self.folders else None

    def _write(self, controller: str, name: str, value: str) -> None:
        (self.folders[controller] / name).write_text(value)

    def _until(self, name: str, expected: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while expected not in (self.folders["freezer"] / name).read_text():
            if time.monotonic() > deadline:
                self.thaw()
                return False
            time.sleep(0.0005)
        return True


def _or_max(value: int | None) -> str:
    return "max" if value is None else str(value)


@dataclass
class Groups:
    """Parent of the control groups of an owner's containers."""

    parents: dict[str, Path]
    """Parent directory by controller."""
    unified: frozenset[str]
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    def make(cls, name: str) -> Groups | None:
        """Make groups called ``name`` below those of this process; None where no controller can be used.

        A process of version 2 that is not at the top may not have groups with controllers below its own; where it is
        allowed to, they go beside it.
        """
        parents: dict[str, Path] = {}
        unified: list[str] = []
        for controllers, own, version2 in _hierarchies():
            usable = {
                place: _usable(place, controllers, version2) for place in ((own, own.parent) if version2 else (own,))
            }
            place = max(usable, key=lambda place: len(usable[place]))
            with contextlib.suppress(OSError):
                if usable[place]:
                    (place / name).mkdir(exist_ok=True)
                    if version2:
                        enable = "".join(f"+{controller} " for controller in usable[place] if controller != "freezer")
                        (place / name / "cgroup.subtree_control").write_text(enable)
                        unified += usable[place]
                    parents |= dict.fromkeys(usable[place], place / name)
        return cls(parents, frozenset(unified)) if parents else None

    @property
    def paths(self) -> list[str]:
        """Paths of the directories, each once."""
        return sorted({str(path) for path in self.parents.values()})

    def new(self) -> ControlGroup:
        """Make a group for one container."""
        name = f"box-{next(self._numbers)}"
        folders = {controller: parent / name for controller, parent in self.parents.items()}
        for folder in set(folders.values()):
            folder.mkdir()
        return ControlGroup(folders, self.unified)


def _hierarchies() -> list[tuple[list[str], Path, bool]]:
    """Controllers with the group of this process for each, and True for a group of version 2."""
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        groups |= dict.fromkeys(names.split(","), path)  # version 2 has no name
    places: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        for name in options.split(",") if kind == "cgroup" else [""] if kind == "cgroup2" else []:
            if name in groups:
                inside = groups[name].removeprefix(root) if root != "/" else groups[name]
                places[name] = Path(point, inside.strip("/"))
    first = [([name], places[name], False) for name in _WANTED if name in groups and name in places]
    rest = [name for name in _WANTED if name not in groups]
    return [*first, (rest, places[""], True)] if rest and "" in places else first


def _usable(place: Path, controllers: list[str], version2: bool) -> list[str]:
    """Controllers with which groups can be made in ``place``."""
    if not os.access(place / "cgroup.procs", os.W_OK) or not os.access(place, os.W_OK):
        return []
    if not version2:
        return controllers
    found = []
    for controller in controllers:
        with contextlib.suppress(OSError):
            if controller != "freezer" and controller not in (place / "cgroup.subtree_control").read_text().split():
                (place / "cgroup.subtree_control").write_text(f"+{controller}")
            found.append(controller)  # the freezer is no controller there, but part of every group
    return found


def rlimits(limits: Limits, *, grouped: frozenset[str]) -> list[tuple[int, int]]:
    """Limits per process, hard and soft, for resources that no group limits.

    Args:
        limits: of the container.
        grouped: the controllers it has a group of.
    """
    found = [(resource.RLIMIT_CORE, 0), *_COUNTED_BY_USER]
    if limits.disk is not None:
        found.append((resource.RLIMIT_FSIZE, limits.disk))
    if limits.memory is not None and "memory" not in grouped:
        found.append((resource.RLIMIT_AS, limits.memory))
    if limits.processes is not None and "pids" not in grouped:
        found.append((resource.RLIMIT_NPROC, limits.processes + 1))
    return found


def remove_groups(paths: Iterable[str], *, seconds: float = 5.0) -> None:
    """Kill all processes in these groups and those below, and remove the groups. Idempotent.

    Raises:
        OSError: a group could not be removed in that time.
    """
    deadline = time.monotonic() + seconds
    for path in paths:
        for folder, _, _ in os.walk(path, topdown=False):
            while os.path.isdir(folder):
                _kill_group(Path(folder))
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.005)


def _kill_group(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if (folder / "freezer.state").exists():
            (folder / "freezer.state").write_text("THAWED")
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
