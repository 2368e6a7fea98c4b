"""Compiled init of a live container: ``init.c``, built once per machine, where there is a C compiler.

It saves memory: without it a container's init stays the fork of Python that it began as, and does the same.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

from sandboxgym.data import cache_dir
from sandboxgym.system.atomic import atomic_file

log = logging.getLogger("sandboxgym")

VARIABLE = "SANDBOXGYM_INIT"
"""Environment variable; ``python`` disables the program."""

_MODE = 0o755  # a container with ids of its own executes it as nobody
_OPTIONS = ("-std=gnu11", "-O2", "-static", "-s")
_SECONDS = 60.0


def program() -> Path | None:
    """Path of the program; None where it is not wanted or cannot be built."""
    if os.environ.get(VARIABLE) == "python":
        return None
    source = importlib.resources.files("sandboxgym.sandbox.overlay").joinpath("init.c").read_bytes()
    key = hashlib.sha256(repr((source, _OPTIONS, _MODE, platform.machine())).encode()).hexdigest()[:16]
    path = cache_dir() / "sandbox" / f"init-{key}"
    try:
        if not os.access(path, os.X_OK):
            _compile(source, path)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        log.debug("containers keep an init in Python: %s %s", error, said.decode(errors="replace"))
        return None
    return path


def _compile(source: bytes, path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_file(path) as made:
        command = [compiler, *_OPTIONS, "-x", "c", "-", "-o", os.fspath(made)]
        subprocess.run(command, input=source, capture_output=True, check=True, timeout=_SECONDS)
        made.chmod(_MODE)
