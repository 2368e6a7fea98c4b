"""Cleanup after a killed owner of sandboxes: the processes of its zygote, control groups, layers.

Its mounts vanish with its processes, for none was made in the host's namespace.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from sandboxgym.sandbox.layers.disk import remove_directories
from sandboxgym.sandbox.overlay.cgroups import RECORD, remove_groups
from sandboxgym.sandbox.overlay.processes import readable
from sandboxgym.system.proc import started

ZYGOTE = "zygote"
"""File in a run directory with the zygote's id and start time."""

_SECONDS = 10.0


def record_zygote(directory: Path, pid: int) -> None:
    """Record the zygote of a run directory."""
    (directory / ZYGOTE).write_text(f"{pid} {started(pid)}")


def clear(directory: Path) -> None:
    """Clear the resources recorded in a run directory of sandboxes, and delete its files. Idempotent.

    Raises:
        OSError: a control group cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        pid, start = (directory / ZYGOTE).read_text().split()
        _end(int(pid), start)
    with contextlib.suppress(FileNotFoundError):
        remove_groups((directory / RECORD).read_text().splitlines())
    layers = directory / "layers"
    if layers.is_dir():
        remove_directories([os.fspath(layers)])


def _end(pid: int, start: str) -> None:
    """Kill a process, if the id is still its own, and wait for its end."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if started(pid) == start:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            readable(descriptor, _SECONDS)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
