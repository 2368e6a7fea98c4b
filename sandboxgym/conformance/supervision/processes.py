"""Resources of a process, counted to compare with earlier counts."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep

from sandboxgym.conformance.supervision import clock
from sandboxgym.system import proc

PROC = Path("/proc")


def held(folder: Path | None = None) -> dict[str, int]:
    """Count this process's threads, descriptors and children, and a folder's temporary entries and mounts."""
    gc.collect()
    found = {"threads": threading.active_count(), "child processes": len(descendants(os.getpid()))}
    if (PROC / "self/fd").is_dir():
        found["open descriptors"] = len(os.listdir("/proc/self/fd"))
    if folder is not None:
        below = entries(folder)
        found["temporary files"] = sum(1 for entry in below if entry.is_file() or entry.is_symlink())
        found["temporary folders"] = sum(1 for entry in below if entry.is_dir())
        found["mounts in the temporary folder"] = len(mounts_under(folder))
    return found


def entries(folder: Path) -> list[Path]:
    """Files and folders below a folder, without those that another process deletes meanwhile."""
    return [Path(above, name) for above, folders, files in os.walk(folder) for name in (*folders, *files)]


def resident() -> int:
    """Bytes of memory that this process holds in RAM; 0 where that is unknown."""
    try:
        return proc.memory()[1]
    except OSError:
        return 0


def descendants(pid: int) -> set[int]:
    """Children of a process and their descendants, including zombies, which somebody must wait for."""
    return proc.descendants(pid)


def marked(name: str, value: str) -> set[int]:
    """Processes with this value of an environment variable, which the processes that they start inherit."""
    wanted = f"{name}={value}".encode()
    found = set()
    if PROC.is_dir():
        for entry in PROC.iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
                except OSError:
                    continue
    return found


def mounts() -> set[str]:
    """Mounts of the machine, as far as this process sees them: those of other programs too.

    Those of a container daemon come and go with any program's containers; they are left out.
    """
    try:
        lines = (PROC / "self/mountinfo").read_text().splitlines()
    except OSError:
        return set()
    return {" ".join(line.split(" ")[:5:4]) for line in lines if not re.search("/(docker|containerd)/", line)}


def mounts_under(folder: Path) -> list[str]:
    """Mount points in a folder."""
    try:
        lines = (PROC / "self/mounts").read_text().splitlines()
    except OSError:
        return []
    places = [line.split()[1].encode().decode("unicode_escape") for line in lines if len(line.split()) > 1]
    return [place for place in places if Path(place).is_relative_to(folder.resolve())]


def containers() -> set[str] | None:
    """Ids of the containers of a reachable Docker daemon; None where there is none."""
    if shutil.which("docker") is None:
        return None
    try:
        result = subprocess.run(["docker", "ps", "-aq", "--no-trunc"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(result.stdout.split()) if result.returncode == 0 else None


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """True if a condition becomes true within ``seconds``, or later if other programs use the processors."""
    left, last = seconds, perf_counter()
    while not condition():
        now = perf_counter()
        left -= (now - last) * clock.fair_share()  # the awaited process gets a fair share of the processors
        last = now
        if left < 0:
            return False
        sleep(0.05)
    return True


def temporary() -> Path:
    """The folder for temporary files."""
    return Path(tempfile.gettempdir())
