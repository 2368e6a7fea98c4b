"""Small task directories for the tests."""

from __future__ import annotations

import os
from pathlib import Path

TOML = """version = "1.0"

[metadata]
category = "toys"

[verifier]
timeout_sec = 30.0

[agent]
timeout_sec = 20.0

[environment]
memory = "512M"
storage = "1G"
"""
TEST = """#!/bin/bash
if grep -qx done /app/answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def why_not(rootless: bool) -> str | None:
    from sandboxgym.sandbox.overlay.backend import why_unavailable

    if not rootless and os.geteuid() != 0:
        return "this process is not root"
    return why_unavailable(rootless=rootless)


def write_task(
    folder: Path,
    *,
    toml: str = TOML,
    dockerfile: str = "FROM debian\nWORKDIR /app\n",
    test: str = TEST,
    solve: str = "echo done > /app/answer\n",
    files: dict[str, str] | None = None,
) -> Path:
    """Write a task that is solved by ``done`` in ``/app/answer``."""
    contents = {
        "task.toml": toml,
        "instruction.md": "Write done into /app/answer.\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
        "solution/solve.sh": solve,
        **(files or {}),
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
