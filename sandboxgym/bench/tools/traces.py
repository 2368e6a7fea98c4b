"""Traces of owners of sandboxes on this machine: processes, mounts, control groups, containers, run directories.

Owners are told apart by the folder that holds their run directories: each name in it is part of the name of a control
group and the value of a label at the Docker daemon. Processes are theirs that descend from them, are in such a group,
or have something of the folder mounted; one that was found once is looked for until it is gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

from sandboxgym.sandbox import process_table
from sandboxgym.system import interpreter

_REAP = "import sandboxgym.system.run_directories as leftovers; print(len(leftovers.reap()))"


@dataclass(frozen=True, slots=True)
class Traces:
    """Counts of the traces of one folder's owners."""

    processes: int
    mounts: int
    groups: int
    containers: int
    images: int
    directories: int

    def most(self, other: Traces) -> Traces:
        """Maximum of each count."""
        return Traces(*map(max, astuple(self), astuple(other)))

    @property
    def none(self) -> bool:
        """True if there is no trace at all."""
        return not any(astuple(self))


class Folder:
    """A folder for the run directories of owners, and their traces."""

    def __init__(self, path: Path, *, docker: bool) -> None:
        self.path = path
        self._docker = docker
        self._names: set[str] = set()
        self._processes: set[tuple[int, str]] = set()
        self._roots: set[int] = set()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start an owner."""
        return self._python("-m", "sandboxgym.bench.faults", "--inside", *arguments)

    def reap(self) -> subprocess.Popen[str]:
        """Run a process that removes the remains of killed owners, as every owner does when it starts."""
        return self._python("-c", _REAP)

    def _python(self, option: Literal["-c", "-m"], code: str, *arguments: str) -> subprocess.Popen[str]:
        command = (interpreter.command if option == "-c" else interpreter.module_command)(code, *arguments)
        env = {**interpreter.environment(), "SANDBOXGYM_RUNTIME": str(self.path)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
        self._roots.add(process.pid)
        return process

    def count(self) -> Traces:
        """Count the traces now."""
        directories = [path.name for path in self.path.iterdir() if path.is_dir()]  # beside them lies a lock
        self._names |= set(directories)
        rows = {row.pid: row for row in process_table.table()}
        mine = process_table.descendants(rows.values(), self._roots) - self._roots
        mine |= {pid for pid in rows if self._is_theirs(pid)}
        self._processes |= {(pid, rows[pid].started) for pid in mine}
        alive = sum(pid in rows and rows[pid].started == start and rows[pid].runs for pid, start in self._processes)
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").count(f" {self.path}/")
        containers, images = self._at_the_daemon() if self._docker else (0, 0)
        groups = sum(1 for _ in self._groups())
        return Traces(alive, mounts, groups, containers, images, len(directories))

    def _is_theirs(self, pid: int) -> bool:
        """Tell whether a process is in one of their control groups, or has something of the folder mounted."""
        with contextlib.suppress(OSError):
            if any(name in Path(f"/proc/{pid}/cgroup").read_text() for name in self._names):
                return True
            return str(self.path) in Path(f"/proc/{pid}/mountinfo").read_text(errors="replace")
        return False

    def _groups(self) -> Iterator[Path]:
        for name in self._names:
            for folder, below, _ in os.walk("/sys/fs/cgroup"):
                if f"sandboxgym-{name}" in below:
                    yield Path(folder, f"sandboxgym-{name}")

    def _at_the_daemon(self) -> tuple[int, int]:
        from sandboxgym.sandbox.docker.client import connect
        from sandboxgym.sandbox.docker.images import LABEL

        client = connect()
        try:
            found = [0, 0]
            for name in self._names:
                wanted = {"label": f"{LABEL}={name}"}
                found[0] += len(client.api.containers(all=True, filters=wanted))
                found[1] += len(client.api.images(filters=wanted))
            return found[0], found[1]
        finally:
            client.close()
