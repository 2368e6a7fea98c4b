"""Signals from a launcher: `accelerate launch` of one process forwards no signal when it is ended itself."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def stop_with_launcher() -> None:
    """Ask for SIGTERM when this process's launcher ends, so that it saves and ends as well.

    Only under accelerate's launcher of one process: that of several (torch elastic) forwards signals, and a process
    started from a shell may outlive its parent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    try:
        above = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:  # not Linux, or no /proc
        return
    if any(b"accelerate" in word for word in above) and b"launch" in above:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
