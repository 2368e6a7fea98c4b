"""Backends by their names, with the environment and the directory that go with a root file system."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from sandboxgym.sandbox.base import Limits, RootFS, SandboxUnavailable, clean_environment

NAMES = ("overlay", "overlay-rootless", "docker", "copy")
"""In the order in which they are tried."""


def make_backend(
    name: str,
    rootfs: str | os.PathLike[str] | RootFS,
    limits: Limits,
    network: bool,
    allow_unsafe: bool,
    env: Mapping[str, str] | None,
) -> tuple[Any, dict[str, str], str]:
    """A backend with its processes' environment and directory."""
    if name == "docker":
        from sandboxgym.sandbox.docker import DockerBackend

        image = os.fspath(rootfs) if not isinstance(rootfs, RootFS) else rootfs.id
        if not image.startswith("docker:"):
            raise SandboxUnavailable(f"the docker backend runs images: expected rootfs='docker:IMAGE', found {image!r}")
        image = image.removeprefix("docker:")
        container = DockerBackend(image, limits=limits, network=network, env=env)
        settings = _image_settings(image)
        return container, clean_environment(settings, env), settings.workdir
    from sandboxgym.sandbox.rootfs import resolve

    if name == "copy":
        from sandboxgym.sandbox.plain import CopyBackend

        found = None if rootfs == "host" else resolve(rootfs)
        copied = CopyBackend(found, limits=limits, allow_unsafe=allow_unsafe, env=env)
        return copied, clean_environment(found or RootFS("", ()), env), "/" if found is None else found.workdir
    from sandboxgym.sandbox.namespace import OverlayBackend

    found = resolve(rootfs)
    rootless = name == "overlay-rootless"
    if not rootless and os.geteuid() != 0:
        raise SandboxUnavailable("the overlay backend needs root; overlay-rootless does not")
    overlay = OverlayBackend(found, limits=limits, network=network, rootless=rootless, env=env)
    return overlay, clean_environment(found, env), found.workdir


def _image_settings(name: str) -> RootFS:
    """Environment and directory of an image, without its files."""
    from sandboxgym.sandbox.docker_client import connect, image_attributes

    with contextlib.closing(connect()) as client:
        config = image_attributes(client, name).get("Config") or {}
    env = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    return RootFS(name, (), env=env, workdir=config.get("WorkingDir") or "/")


def check(name: str) -> None:
    """Try whether the overlay backends work here; others say so themselves."""
    if name.startswith("overlay"):
        from sandboxgym.sandbox.namespace import why_unavailable

        reason = why_unavailable(rootless=name == "overlay-rootless")
        if reason:
            raise SandboxUnavailable(reason)
