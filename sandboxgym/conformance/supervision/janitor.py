"""A process that cleans up after a watched run whose watching process was killed.

It waits in a shell, which takes almost no memory, for the end of its standard input: only the watching process holds
the other end. Then it ends the processes of the run and reaps their run directories.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandboxgym.system import interpreter, run_directories
from sandboxgym.system.proc import started

_CHILD = "child"
_TO_CLOSE = 5.0
"""Seconds in which an interrupted process may close its environments."""
_TO_CLEAR = 20.0
"""Seconds in which processes of sandboxes may end, and mounts go."""


@contextlib.contextmanager
def waiting(run: Path) -> Iterator[None]:
    """Start a process that cleans up for a run directory if this process is killed.

    The session is another one: what ends a terminal's processes, or a group of them, leaves it alone.
    """
    command = ["sh", "-c", 'read -r _; exec "$@"', "sh", *interpreter.module_command(__name__, os.fspath(run))]
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        command,
        env=interpreter.environment(),
        stdin=subprocess.PIPE,
        stdout=null,
        stderr=null,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def entrust(run: Path, pid: int) -> None:
    """Record the process of the run, to be ended at cleanup."""
    (run / _CHILD).write_text(f"{pid} {started(pid)}", encoding="ascii")


def main(arguments: Sequence[str]) -> None:
    """Clean up for a run directory."""
    run = Path(arguments[0])
    with contextlib.suppress(OSError, ValueError):
        pid, birth = (run / _CHILD).read_text(encoding="ascii").split()
        end(int(pid), birth)
    until = time.monotonic() + _TO_CLEAR
    while run.exists() and time.monotonic() < until:
        run_directories.reap(run.parent)
        time.sleep(0.2)


def end(pid: int, birth: str) -> None:
    """Interrupt a process, so that it closes its resources; then kill it and its offspring, if they still exist."""
    kin: dict[int, str] = {pid: birth}
    until = time.monotonic() + _TO_CLOSE
    with contextlib.suppress(OSError):
        if started(pid) == birth:
            os.kill(pid, signal.SIGINT)
    while started(pid) == birth and time.monotonic() < until:
        kin |= {each: started(each) for each in offspring(pid) if each not in kin}
        time.sleep(0.05)
    for each, born in kin.items():
        if born and started(each) == born:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)


def offspring(pid: int) -> list[int]:
    """Children of a process and their descendants, where the kernel lists them."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return found
    for task in tasks:
        file = Path(f"/proc/{pid}/task/{task}/children")
        try:
            children = [int(word) for word in file.read_text().split()]
        except (OSError, ValueError):
            continue
        for child in children:
            found += [child, *offspring(child)]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
