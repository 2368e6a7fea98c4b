"""Client of the Docker daemon, with errors that name the remedy.

Every request to the daemon goes through `daemon_errors`, so that a daemon that is missing, may not be used, or dies
meanwhile is a `SandboxUnavailable` of one sentence.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from sandboxgym.sandbox.base import SandboxFull, SandboxUnavailable

if TYPE_CHECKING:
    import docker

DEFAULT_HOST = "unix:///var/run/docker.sock"
_QUICK = 10.0
"""Seconds for an answer to a request that costs the daemon nothing."""


def daemon_address() -> str:
    """Address of the daemon: ``$DOCKER_HOST``, else the usual socket."""
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


def connect(*, timeout: float = 120.0) -> docker.DockerClient:
    """Connect a client to the local daemon.

    Args:
        timeout: seconds to wait for an answer; a commit of gigabytes takes long.

    Raises:
        SandboxUnavailable: no client library, no daemon, or no permission.
    """
    try:
        import docker
    except ImportError as error:
        raise SandboxUnavailable("Docker images need the package docker: pip install 'sandboxgym[sandbox]'") from error
    with daemon_errors():
        client = docker.DockerClient(base_url=daemon_address(), timeout=timeout, version="auto")
        try:
            client.ping()
        except BaseException:
            client.close()
            raise
        return client


def image_attributes(client: docker.DockerClient, name: str) -> dict[str, Any]:
    """The daemon's attributes of an image.

    Raises:
        SandboxUnavailable: there is no such image here.
    """
    import docker.errors

    with daemon_errors():
        try:
            attributes: dict[str, Any] = client.api.inspect_image(name)
        except docker.errors.ImageNotFound as error:
            raise SandboxUnavailable(f"no Docker image {name!r} on this machine: docker pull {name}") from error
        return attributes


def quick_attributes(name: str) -> dict[str, Any] | None:
    """The daemon's attributes of an image, asked without the client library, whose import dominates the time.

    None where that fails, for whatever reason: `image_attributes` says it in words.
    """
    address = urlsplit(daemon_address())
    if address.scheme != "unix":
        return None
    connection = http.client.HTTPConnection("docker", timeout=_QUICK)
    try:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(_QUICK)
        connection.sock.connect(address.path)
        connection.request("GET", f"/images/{quote(name, safe='/:@')}/json")
        answer = connection.getresponse()
        found = json.loads(answer.read()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return found if isinstance(found, dict) and "Id" in found else None


@contextlib.contextmanager
def daemon_errors() -> Iterator[None]:
    """Turn a daemon that does not answer, or refuses, into `SandboxUnavailable`, its full disk into `SandboxFull`."""
    import docker.errors
    import requests
    import urllib3.exceptions

    where = daemon_address()
    try:
        yield
    except docker.errors.APIError as error:
        reason = error.explanation or error
        if "no space left on device" in str(reason):
            raise SandboxFull(f"the Docker daemon's disk is full: {reason}") from error
        raise SandboxUnavailable(f"the Docker daemon refused: {reason}") from error
    except (
        docker.errors.DockerException,
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        ConnectionError,
    ) as error:
        if "PermissionError" in repr(error) or "Permission denied" in str(error):
            raise SandboxUnavailable(
                f"this user may not use the Docker daemon at {where}: be a member of the group docker "
                "(sudo usermod -aG docker $USER, then log in again), or root"
            ) from error
        raise SandboxUnavailable(
            f"no Docker daemon answers at {where}: start it (sudo systemctl start docker, or sudo dockerd), "
            f"or set DOCKER_HOST ({error})"
        ) from error
