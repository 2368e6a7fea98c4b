"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket

from gymnasium.error import DependencyNotInstalled

from sandboxgym.workers.env_host import FleetError

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

_PATIENCE = 10.0
"""Seconds that the head of a cluster has to accept a connection."""


def connect(address: str | None = None) -> None:
    """Connect this process to a Ray cluster, unless it is connected.

    Args:
        address: of the cluster: ``host:port``, ``ray://host:port``, ``"auto"`` for one that runs on this machine, or
            ``"local"`` for one of this machine's cores, which ends with this process. Default: ``$RAY_ADDRESS``, else
            as ``"local"``.

    Raises:
        DependencyNotInstalled: Ray is not installed.
        FleetError: the cluster cannot be reached, or runs another version of Ray or Python.
    """
    if ray is None:
        raise DependencyNotInstalled("environments on a Ray cluster need Ray: pip install 'sandboxgym[ray]'")
    if ray.is_initialized():
        return
    # Without an address Ray would join any cluster that was started on this machine, whoever's it is.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        _look_for(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # a start that takes too long is a plain Exception
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # Of two versions only the lines after the first say which they are.
        reason = ", ".join(lines).replace(":,", ":") if "mismatch" in lines[0] else lines[0]
        raise FleetError(
            f"expected a Ray cluster at {address} (ray start --head, or ray://HOST:10001): {reason}"
        ) from error


def expect_alive(address: str) -> None:
    """Check that the cluster which this process is connected to accepts connections.

    Without it Ray would wait for a minute, and then end the process in a way of its own.

    Args:
        address: as it was given to `connect`.

    Raises:
        FleetError: it does not: the cluster has ended.
    """
    there = address if "://" in address else ray.get_runtime_context().gcs_address
    try:
        _look_for(there)
    except OSError as error:
        name = there if address == "auto" else address
        raise FleetError(f"the Ray cluster at {name} does not answer any more: {error}") from error


def _look_for(address: str) -> None:
    """Raise OSError where nothing listens at ``host:port`` or ``ray://host:port``: Ray itself tries for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
