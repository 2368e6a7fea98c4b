"""Registry of sandbox backends by name, with the environment and the directory that a root file system brings.

A third-party package adds a backend by an entry point of the group `GROUP`, or a program by `register`; environments,
trees and the conformance suite then accept its name like the built-in ones.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

from sandboxgym.brief import brief
from sandboxgym.sandbox.base import Backend, Limits, RootFS, SandboxUnavailable, clean_environment

GROUP = "sandboxgym.sandbox_backends"
"""Group of the entry points: ``NAME = "package.module:FACTORY"``, where the factory is a `Factory`."""


@dataclass(frozen=True, slots=True)
class Request:
    """Properties of the requested sandbox, as given to `make_sandbox`."""

    rootfs: str | os.PathLike[str] | RootFS
    limits: Limits
    network: bool
    allow_unsafe: bool
    env: Mapping[str, str] | None


class Made(NamedTuple):
    """A backend, with the environment and the directory that its processes start with."""

    backend: Backend
    env: Mapping[str, str]
    """The whole environment of a process; see `clean_environment`."""
    workdir: str
    """Starting directory of the shell."""


Factory = Callable[[Request], Made]
"""Makes a backend, not started. Raises `SandboxUnavailable` where it cannot run or lacks what the request needs."""

_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Register a backend of `make_sandbox` under a name, in this process.

    Raises:
        ValueError: the name is taken, or is no name.
    """
    if not name.replace("-", "").replace("_", "").isalnum() or name == "auto":
        raise ValueError(f"expected a name of letters, digits and hyphens, found {brief(name, 80)}")
    if name in names():
        raise ValueError(f"expected a new name for a backend, found {name!r}, which is taken")
    _registered[name] = factory


def unregister(name: str) -> None:
    """Undo `register`.

    Raises:
        KeyError: it was told of no such backend.
    """
    del _registered[name]


@functools.cache
def _installed() -> dict[str, metadata.EntryPoint]:
    return {found.name: found for found in metadata.entry_points(group=GROUP)}


def names() -> tuple[str, ...]:
    """All names that `make_sandbox` accepts except ``"auto"``, the built-in ones first."""
    return tuple(dict.fromkeys((*NAMES, *_ELSEWHERE, *_registered, *_installed())))


def make_backend(name: str, request: Request) -> Made:
    """Make a backend, with the environment of its processes and their directory.

    Raises:
        SandboxUnavailable: it does not work here.
        ValueError: there is no backend of this name.
    """
    factory = _OWN.get(name) or _ELSEWHERE.get(name) or _registered.get(name)
    if factory is None:
        if name not in _installed():
            raise ValueError(f"expected a backend of auto, {', '.join(names())}, found {brief(name, 80)}")
        try:
            factory = _installed()[name].load()
        except (ImportError, AttributeError) as error:
            raise SandboxUnavailable(f"the backend {name!r} cannot be loaded: {error}") from error
    return Made(*factory(request))


def _docker(request: Request) -> Made:
    from sandboxgym.sandbox.docker.backend import DockerBackend

    rootfs = request.rootfs
    image = os.fspath(rootfs) if not isinstance(rootfs, RootFS) else rootfs.id
    if not image.startswith("docker:"):
        raise SandboxUnavailable(f"the docker backend runs images: expected rootfs='docker:IMAGE', found {image!r}")
    image = image.removeprefix("docker:")
    container = DockerBackend(image, limits=request.limits, network=request.network, env=request.env)
    settings = _image_settings(image)
    return Made(container, clean_environment(settings, request.env), settings.workdir)


def _copy(request: Request) -> Made:
    from sandboxgym.sandbox.copy.backend import CopyBackend
    from sandboxgym.sandbox.files.rootfs import resolve

    found = None if request.rootfs == "host" else resolve(request.rootfs)
    copied = CopyBackend(found, limits=request.limits, allow_unsafe=request.allow_unsafe, env=request.env)
    env = clean_environment(found or RootFS("", ()), request.env)
    return Made(copied, env, "/" if found is None else found.workdir)


def _overlay(request: Request, *, rootless: bool) -> Made:
    from sandboxgym.sandbox.files.rootfs import resolve
    from sandboxgym.sandbox.overlay.backend import OverlayBackend

    found = resolve(request.rootfs)
    if not rootless and os.geteuid() != 0:
        raise SandboxUnavailable("the overlay backend needs root; overlay-rootless does not")
    overlay = OverlayBackend(found, limits=request.limits, network=request.network, rootless=rootless, env=request.env)
    return Made(overlay, clean_environment(found, request.env), found.workdir)


_OWN: dict[str, Factory] = {
    "overlay": functools.partial(_overlay, rootless=False),
    "overlay-rootless": functools.partial(_overlay, rootless=True),
    "docker": _docker,
    "copy": _copy,
}
NAMES = tuple(_OWN)
"""Built-in backends, in the order in which ``"auto"`` tries them."""


def _e2b(request: Request) -> Made:
    from sandboxgym.sandbox.e2b.backend import TEMPLATE, WORKDIR, E2BBackend

    rootfs = request.rootfs.id if isinstance(request.rootfs, RootFS) else os.fspath(request.rootfs)
    template = TEMPLATE if rootfs == "host" else rootfs.removeprefix("template:")
    if rootfs not in ("host", f"template:{template}"):
        raise SandboxUnavailable(f"the e2b backend runs templates: expected rootfs='template:NAME', found {rootfs!r}")
    remote = E2BBackend(template, limits=request.limits, network=request.network, env=request.env)
    return Made(remote, dict(request.env or {}), WORKDIR)


_ELSEWHERE: dict[str, Factory] = {"e2b": _e2b}
"""Backends that run sandboxes on other machines, which ``"auto"`` never chooses."""


def _image_settings(name: str) -> RootFS:
    """Environment and directory of an image, without its files."""
    from sandboxgym.sandbox.docker.client import connect, image_attributes

    with contextlib.closing(connect()) as client:
        config: dict[str, Any] = image_attributes(client, name).get("Config") or {}
    env = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    return RootFS(name, (), env=env, workdir=config.get("WorkingDir") or "/")


def check(name: str) -> None:
    """Check that the overlay backends work here; the others report by themselves."""
    if name.startswith("overlay"):
        from sandboxgym.sandbox.overlay.backend import why_unavailable

        reason = why_unavailable(rootless=name == "overlay-rootless")
        if reason:
            raise SandboxUnavailable(reason)
