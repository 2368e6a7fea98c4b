"""Ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def reserved_port() -> int:
    """A free port that the kernel gives to nobody, for what listens much later."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
