"""Commands and lines typed in sandboxes with full snapshots, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sandboxgym.sandbox.sandbox import Sandbox

LONG = 120.0
"""Seconds that anything may take on a busy machine."""
WAIT = "until %s; do sleep 0.02; done"
Maker = Callable[..., Sandbox]
Everywhere = Callable[[Sandbox], list[Sandbox]]


def container(sandbox: Sandbox) -> Any:
    backend: Any = sandbox.backend
    return backend.container


def said(sandbox: Sandbox, command: str) -> str:
    result = sandbox.execute(command, timeout=LONG)
    assert not result.timed_out, result
    return result.output


def typed(sandbox: Sandbox, text: str, until: str = r">>> $") -> str:
    """Answer of a program to a line that is typed to it."""
    answer = sandbox.interact(text, timeout=LONG, until=until)
    assert answer.running, answer
    return answer.output


# One instant


COUNTER = "i=0; while :; do i=$((i + 1)); echo $i >>/tmp/log; done &"
GAPS = "awk 'NR != $1' /tmp/log | head -3; tail -n 1 /tmp/log"

# Killed owners


REAP = """
import sandboxgym.sandbox.overlay.runtime
from sandboxgym.system import run_directories
print(len(run_directories.reap()))
"""
"""Program that reaps what killed owners left, and prints how much that was."""
