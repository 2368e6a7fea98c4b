"""Resources of a process at the Docker daemon: its label, the images of its trees, and their removal.

1. Containers and images carry the name of a run directory of their owner as a label. After the owner was killed,
   ``run_directories.reap`` removes everything with that label (`reap`).
2. An image is held by its trees, by the containers that run it and by the images made from it. It is removed with the
   last of these; nothing that this process did not make is ever removed.
3. Garbage collection only marks images and containers for removal, since it may interrupt a request: `Ownership.sweep`
   removes them.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.docker.client import connect, daemon_errors
from sandboxgym.sandbox.docker.exec import live_errors
from sandboxgym.sandbox.files import name_files as names
from sandboxgym.system import run_directories

if TYPE_CHECKING:
    from docker import DockerClient

KIND = "docker"
LABEL = "sandboxgym.run"
NAMES = "sandboxgym.names"
"""Label of images: content of the files of name resolution that differ from the defaults (`recorded_names`)."""
REPOSITORY = "sandboxgym-tree"
"""Repository of image tags, since ``docker image prune`` removes untagged images."""

run_directories.register_reaper(KIND, "sandboxgym.sandbox.docker.images:reap")
_current: weakref.WeakValueDictionary[int, Ownership] = weakref.WeakValueDictionary()


class Ownership:
    """The run directory, the connection and the label of this process. Use `of_this_process`."""

    def __init__(self) -> None:
        self.client = connect()
        try:
            self.path = run_directories.claim(KIND)
        except BaseException:
            self.client.close()
            raise
        self.api: Any = self.client.api
        self.labels = {LABEL: self.path.name}
        self._numbers = itertools.count(1)
        self._doomed: deque[str] = deque()
        self._doomed_containers: deque[str] = deque()
        self._finalizer = weakref.finalize(self, _give_back, self.client, self.path, os.getpid())

    @classmethod
    def of_this_process(cls) -> Ownership:
        """The live ownership of this process, or a new one; it ends when no backend and no tree needs it.

        Raises:
            SandboxUnavailable: no daemon.
        """
        found = _current.get(os.getpid())
        if found is None:
            found = _current[os.getpid()] = cls()
        return found

    def next_name(self) -> str:
        """A name that is unique on this machine."""
        return f"{self.path.name}.{next(self._numbers)}"

    def doom(self, image: str) -> None:
        """Mark an image for removal. Safe at any time."""
        self._doomed.append(image)

    def doom_container(self, container: str) -> None:
        """Mark a container for removal. Safe at any time."""
        self._doomed_containers.append(container)

    def sweep(self) -> None:
        """Remove all marked images and containers; failures are left to `reap`."""
        while self._doomed_containers:
            with contextlib.suppress(SandboxError), daemon_errors():
                self.api.remove_container(self._doomed_containers.popleft(), force=True, v=True)
        while self._doomed:
            with contextlib.suppress(SandboxError), daemon_errors():
                self.api.remove_image(self._doomed.popleft(), force=False, noprune=True)


class DockerImage:
    """An image that this process made, or the base image.

    Args:
        ownership: the holder.
        tag: under which it is removed; None if it is not this process's to remove.
        parent: image that it was made from, which must not be removed before it.
    """

    def __init__(self, ownership: Ownership, identity: str, *, tag: str | None, parent: DockerImage | None) -> None:
        self.ownership = ownership
        self.id = identity
        self._tag = tag
        self._parent = parent.retain() if parent is not None else None
        self._holds = 0
        self._layers: list[str] | None = None

    def retain(self) -> DockerImage:
        """Add a hold."""
        self._holds += 1
        return self

    def release(self) -> None:
        """Give up a hold; the last one removes the image, and its hold on the image it was made from."""
        self._holds -= 1
        if self._holds == 0:
            if self._tag is not None:
                self.ownership.doom(self._tag)
            if self._parent is not None:
                self._parent.release()

    def names(self) -> dict[str, bytes]:
        """The changed files of name resolution."""
        return recorded_names(self.attributes()["Config"].get("Labels") or {})

    def layers(self) -> list[str]:
        """Digests of its layers, the lowest first."""
        if self._layers is None:
            self._layers = list(self.attributes()["RootFS"]["Layers"])
        return self._layers

    def attributes(self) -> dict[str, Any]:
        """The daemon's attributes of the image."""
        with daemon_errors():
            found: dict[str, Any] = self.ownership.api.inspect_image(self.id)
            return found


def names_label(files: Mapping[str, bytes]) -> dict[str, str]:
    """Label of an image that records files of ``/etc``, by their names."""
    return {NAMES: json.dumps({name: base64.b64encode(content).decode() for name, content in files.items()})}


def recorded_names(labels: Mapping[str, str]) -> dict[str, bytes]:
    """Decode `names_label`; an invalid label counts as none, for anybody may label an image.

    >>> recorded_names(names_label({"hosts": b"127.0.0.1 localhost"}))
    {'hosts': b'127.0.0.1 localhost'}
    >>> recorded_names({}), recorded_names({NAMES: '{"hosts": 1, "passwd": "eA=="}'})
    ({}, {})
    """
    try:
        found = json.loads(labels.get(NAMES, "{}"))
        return {name: base64.b64decode(found[name], validate=True) for name in names.FILES if name in found}
    except (ValueError, TypeError):
        return {}


@contextlib.contextmanager
def committed(
    ownership: Ownership, container: str, parent: DockerImage, *, files: Mapping[str, bytes]
) -> Iterator[DockerImage]:
    """Commit a container's files to an image, removed again if the context fails.

    Args:
        ownership: of the image.
        container: its id; nothing runs in it.
        parent: the image that it was made from.
        files: recorded as `names_label` does, for the container's layers do not hold them.
    """
    tag = ownership.next_name()
    labelled = {"Labels": names_label(files)}
    with live_errors():
        made = ownership.api.commit(container, repository=REPOSITORY, tag=tag, pause=False, conf=labelled)
    image = DockerImage(ownership, made["Id"], tag=f"{REPOSITORY}:{tag}", parent=parent)
    image.retain()
    try:
        yield image
    finally:
        image.release()


def reap(run: Path) -> None:
    """Remove the containers and images of a run directory's owner.

    Raises:
        SandboxUnavailable: the daemon does not answer; they stay until it does.
    """
    client = connect()
    try:
        api: Any = client.api
        wanted = {"label": f"{LABEL}={run.name}"}
        with daemon_errors():
            for container in api.containers(all=True, filters=wanted):
                _removed(api.remove_container, container["Id"], force=True, v=True)
            # An image cannot go before those that were made from it.
            left = [image["Id"] for image in api.images(all=True, filters=wanted)]
            while left:
                stay = [image for image in left if not _removed(api.remove_image, image, force=True, noprune=True)]
                if len(stay) == len(left):
                    raise SandboxError(f"these images cannot be removed: {', '.join(stay)}")
                left = stay
    finally:
        client.close()


def _removed(remove: Callable[..., None], identity: str, **options: bool) -> bool:
    """True if a thing was removed, or is gone; False if the daemon says that others need it."""
    import docker.errors

    try:
        remove(identity, **options)
    except docker.errors.NotFound:
        return True
    except docker.errors.APIError as error:
        if error.response is not None and error.response.status_code == 409:
            return False
        raise
    return True


def _give_back(client: DockerClient, path: Path, owner: int) -> None:
    with contextlib.suppress(OSError):
        client.close()
    if os.getpid() == owner:  # not in a forked child
        with contextlib.suppress(SandboxError, OSError):  # what cannot be removed now is left to the next start
            run_directories.give_back(path)
