"""Ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
