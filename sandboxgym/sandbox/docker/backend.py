"""The ``docker`` backend: containers, with images as trees. Works with every local daemon; slower than overlays.

1. A tree is an image: ``docker commit`` keeps files, modes, owners, links, deletions, and times in whole seconds. Its
   losses are declared: extended attributes of users, holes, mounts such as /dev/shm. The three files of name resolution
   (`names`) are mounted over the image's, and their content is recorded with a tree.
2. A sandbox runs as the image's user with few capabilities, no new privileges, the daemon's system-call filter, its own
   process ids and no network, unless it is asked for.
3. Containers and images are removed with their last user; those of a killed owner at the next ``run_directories.reap``.
4. The daemon must run on this machine: processes are seen through /proc, and the control directory is shared.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from sandboxgym.brief import brief
from sandboxgym.sandbox.base import (
    CONTROL,
    READ_LIMIT,
    Backend,
    Capabilities,
    FileTooLarge,
    FileTree,
    Limits,
    ProcessInfo,
    SandboxClosed,
    SandboxError,
    SandboxFull,
    SandboxUnavailable,
    Streams,
    check_inside,
    new_shell_directory,
)
from sandboxgym.sandbox.docker import container_files as docker_files
from sandboxgym.sandbox.docker.archive import pack
from sandboxgym.sandbox.docker.client import daemon_errors, image_attributes
from sandboxgym.sandbox.docker.exec import INIT, ContainerProcess, DockerContainer, live_errors
from sandboxgym.sandbox.docker.images import LABEL, DockerImage, Ownership, committed, names_label, recorded_names
from sandboxgym.sandbox.files import name_files
from sandboxgym.sandbox.files.deep_paths import beyond_paths
from sandboxgym.sandbox.files.members import check_fits
from sandboxgym.sandbox.files.portable import Reader
from sandboxgym.sandbox.files.reading import regular_file
from sandboxgym.sandbox.layers.disk import remove_directories
from sandboxgym.sandbox.layers.written import Written, look
from sandboxgym.system import run_directories

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""Capabilities kept of Docker's default set: those that package managers and servers need."""

_MAX_LAYERS = 100
"""Layers of an image after which its tree is squashed; the daemon refuses 128."""

_DEEP = "nested deeper than a path can be long"
_RESOLVER = "resolv.conf"
_NOTES = (
    "Extended attributes of users, holes, /dev/shm and other mounted file systems are not in a tree.",
    "Times of files are kept in whole seconds.",
    "/etc/hosts, /etc/hostname and /etc/resolv.conf are mounted and cannot be deleted or replaced inside: a snapshot "
    "keeps what they hold, at most 64 KiB each, not their modes, owners and times.",
    "Each file is limited to the disk limit, and a tree over it is refused; all files of a live sandbox "
    "together, and their number, are not limited.",
    "A snapshot costs what was written since the last one; a restore starts a container.",
    "The daemon's filter decides which system calls are allowed: older ones allow io_uring, 32-bit calls, vsock.",
    "What the kernel counts by user (watches of files, waiting signals, descriptors in flight between sockets) or for "
    "the machine (terminals, asynchronous I/O) is shared with the daemon's root.",
    "Statistics of the kernel in /proc and the control directory's path on the host can be read inside; the control "
    "directory lies on the machine's disk, fresh for each start, and is not limited.",
    "What is nested deeper than a path can be long is missing from a tree, which a snapshot names as lost.",
    "The daemon hands out whole images: packing a tree takes the time and the disk of the base image too.",
)


class DockerTree:
    """The files of a sandbox as an image."""

    def __init__(self, image: DockerImage, base: _Base) -> None:
        self._image, self._base = image.retain(), base
        self.id = image.id
        self.base = base.id
        self._finalizer = weakref.finalize(self, image.release)

    @property
    def image(self) -> DockerImage:
        """Id of the image.

        Raises:
            SandboxClosed: it was released.
        """
        if not self._finalizer.alive:
            raise SandboxClosed("this tree was released")
        return self._image

    @property
    def nbytes(self) -> int:
        """Bytes of the layers above the base image."""
        return max(0, int(self.image.attributes()["Size"]) - self._base.nbytes)

    def pack(self) -> bytes:
        """The differences from the base image, as an archive for `DockerBackend.unpack`."""
        image = self.image
        owned, facts = image.ownership, names_label(image.names())
        return pack(owned.api, self.id, base=self.base, base_layers=self._base.layers, scratch=owned.path, facts=facts)

    def retain(self) -> DockerTree:
        """Another hold on the same tree, released independently."""
        return DockerTree(self.image, self._base)

    def release(self) -> None:
        """Give up this hold; the image is removed with the last one. Idempotent."""
        if self._finalizer.alive:
            self._finalizer()
            self._image.ownership.sweep()


class _Base:
    """Facts about the image that all trees come from."""

    def __init__(self, ownership: Ownership, name: str) -> None:
        attributes = image_attributes(ownership.client, name)
        self.id: str = attributes["Id"]
        self.nbytes: int = attributes["Size"]
        self.layers: list[str] = attributes["RootFS"]["Layers"]
        self.user: str = attributes["Config"].get("User") or ""
        self.image = DockerImage(ownership, self.id, tag=None, parent=None).retain()


class DockerBackend(Backend):
    """Backend of containers of one image.

    Args:
        image: name or id of an image on this machine; it is not fetched.
        limits: memory and processes hold for the container, disk for each file and for trees.
        network: give it the daemon's default network.
        env: added to the environment of `spawn`'s processes where it does not name them.

    Raises:
        SandboxUnavailable: no client library, no daemon, no permission, or no such image.
    """

    def __init__(
        self,
        image: str,
        *,
        limits: Limits | None = None,
        network: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._limits, self._network, self._env = image, limits or Limits(), network, dict(env or {})
        self._ownership = Ownership.of_this_process()
        self._base = _Base(self._ownership, image)
        self._folder = self._ownership.path / self._ownership.next_name().rpartition(".")[2]
        self._folder.mkdir(parents=True)
        self._controls = itertools.count()
        self._control = self._new_control()
        self._mounted: dict[str, Path] = {}
        self._usual: dict[str, bytes | None] = {}
        self.control_inside = CONTROL
        self._container: DockerContainer | None = None
        self._running: DockerImage | None = None
        self._owner: tuple[int, int] | None = None
        self._closed = False
        self.capabilities = Capabilities(
            name="docker",
            isolated=True,
            network_off=True,
            owners=True,
            snapshot_cost="written",
            limits=frozenset({"memory", "processes", "seconds"}),
            keeps=frozenset({"modes", "owners", "hardlinks", "tmp"}),
            notes=_NOTES,
            leaves_open=frozenset({"calls", "quotas", "statistics", "paths"}),
        )

    @property
    def control(self) -> Path:
        """The control directory; see `base.Backend.control`."""
        return self._control

    @property
    def live(self) -> bool:
        """True if its container runs."""
        return self._container is not None and self._container.running

    def base(self) -> DockerTree:
        """The image itself as a tree."""
        self._check_open()
        return DockerTree(self._base.image, self._base)

    def start(self, tree: DockerTree | None = None) -> None:  # type: ignore[override]
        """Run a container of ``tree``; ends what ran before.

        Raises:
            SandboxUnavailable: the daemon does not answer, or does not start it.
            SandboxFull: the tree is larger than the disk limit.
        """
        self._check_open()
        self._end()
        image = self._base.image if tree is None else tree.image
        if tree is not None and tree.base != self._base.id:
            raise SandboxUnavailable(f"expected a tree of the image {self._base.id}, found one of {tree.base}")
        if tree is not None and self._limits.disk is not None and tree.nbytes > self._limits.disk:
            raise SandboxFull(f"{tree.nbytes} bytes were written, the limit is {self._limits.disk}")
        old, self._control = self._control, self._new_control()
        with contextlib.suppress(OSError):  # another user's, without root
            run_directories.remove_tree(old)
        self._write_names({} if tree is None else image.names())
        identity = self._create(image, self._mounted)
        try:
            with daemon_errors():
                self._ownership.api.start(identity)
            self._container = DockerContainer(self._ownership.api, identity)
            if _RESOLVER not in self._mounted:
                self._usual[_RESOLVER] = self._held(_RESOLVER)
        except BaseException:
            self._container = None
            self._remove(identity)
            raise
        self._running = image.retain()

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = "/", **streams: Unpack[Streams]
    ) -> ContainerProcess:
        """Start a process in the container.

        A missing program or directory is its exit status (127, 126) and its output.
        """
        whole = {**self._env, **env}
        return self._live().spawn(argv, env=whole, cwd=check_inside(cwd), **streams)

    def processes(self) -> list[ProcessInfo]:
        """Processes in the container; descriptors only if this process may see them (root)."""
        return [row.info() for row in self._live().rows()]

    def kill(self, pids: Iterable[int]) -> None:
        """Kill processes of the container by their numbers on the host."""
        self._live().kill(pids)

    def written(self) -> Written | None:
        """Status of the container's layer; None unless the daemon's driver is overlay2 and this process is root.

        Files of a volume lie elsewhere, so where the image declares one nothing is told.
        """
        layer = self._live().layer
        return None if layer is None else look(layer, self._live().id)

    def layers_above(self, tree: FileTree) -> list[Path] | None:
        """The container's layer, and its image's layers that a tree's image lacks; see `base.Backend.layers_above`."""
        container = self._live()
        if container.layer is None or not isinstance(tree, DockerTree):
            return None
        assert self._running is not None
        here, lower = self._running.layers(), tree.image.layers()
        if here[: len(lower)] != lower:
            return None
        between = container.below[: len(here) - len(lower)]
        visible = len(between) == len(here) - len(lower) and all(os.access(path, os.R_OK | os.X_OK) for path in between)
        return [container.layer, *between] if visible else None

    def losses(self) -> tuple[str, ...]:
        """Files deeper than the longest path, which the daemon leaves out without an error."""
        container = self._live()
        with contextlib.suppress(OSError):  # something ended it meanwhile: the daemon is asked
            if container.layer is not None:
                return tuple(f"{_DEEP}: {brief(path, 200)}" for path in beyond_paths(container.layer))
        return (_DEEP,) if container.beyond_paths() else ()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the container for the context; see `base.Backend.paused`."""
        with self._live().paused():
            yield

    def commit(self, *, keep_processes: bool = False) -> DockerTree:
        """Make an image of the files. The processes are paused meanwhile; then they continue, or end.

        Raises:
            SandboxFull: more was written than the disk limit; the sandbox is live as before.
        """
        container = self._live()
        assert self._running is not None
        with contextlib.ExitStack() as stack:
            with container.paused():  # what is recorded with the image is of the same moment
                held = committed(self._ownership, container.id, self._running, files=self._names())
                image = stack.enter_context(held)
            tree = DockerTree(image, self._base)
            self._check_size(tree)
            if not keep_processes:
                self._end()
            if len(image.attributes()["RootFS"]["Layers"]) > max(_MAX_LAYERS, len(self._base.layers) + 1):
                return self.unpack(tree.pack())
            return tree

    def unpack(self, archive: bytes) -> DockerTree:
        """Make an image with one layer above the base from the archive of `DockerTree.pack`."""
        self._check_open()
        reader = Reader(archive, base=self._base.id)
        check_fits(reader.nbytes, self._limits.disk)
        files = recorded_names(reader.header.facts)
        identity = self._create(self._base.image, {})
        try:
            with daemon_errors():
                if reader.header.deleted:
                    self._ownership.api.start(identity)
                    container = DockerContainer(self._ownership.api, identity)
                    for paths in _portions(reader.header.deleted):
                        status, output = container.execute(["rm", "-rf", "--", *(f"/{path}" for path in paths)])
                        if status:
                            raise SandboxError(f"paths could not be deleted: {output.decode(errors='replace'):.1000}")
                self._ownership.api.put_archive(identity, "/", reader.rest())
            with committed(self._ownership, identity, self._base.image, files=files) as image:
                tree = DockerTree(image, self._base)
                self._check_size(tree)
                return tree
        finally:
            self._remove(identity)

    def publish(self, name: str, labels: Mapping[str, str]) -> str:
        """Make a named image of the present files that outlives this process; its id. The processes continue.

        Args:
            name: repository and tag.
            labels: of the image, beside those of its base.
        """
        container = self._live()
        repository, _, tag = name.rpartition(":")
        with container.paused(), live_errors():
            whole = {"Labels": {**labels, **names_label(self._names()), LABEL: ""}}
            made = self._ownership.api.commit(container.id, repository=repository, tag=tag, pause=False, conf=whole)
        identity: str = made["Id"]
        return identity

    def published(self, identity: str) -> DockerTree:
        """Tree of an image made by `publish` from the same base image; the image stays after the last hold.

        Raises:
            SandboxUnavailable: there is no such image here.
        """
        self._check_open()
        image_attributes(self._ownership.client, identity)
        return DockerTree(DockerImage(self._ownership, identity, tag=None, parent=None), self._base)

    def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """Read a regular file."""
        return docker_files.read_file(self._live(), path, limit=limit)

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file as the image's user, making missing parent directories."""
        if self._owner is None:
            self._owner = self._user()
        mounted = {f"/etc/{name}": file for name, file in self._mounted.items()}
        docker_files.write_file(self._live(), path, data, mode=mode, owner=self._owner, mounted=mounted)

    def shell_directory(self) -> Path:
        """Make a new directory for a shell, and remove earlier ones. See `base.Backend.shell_directory`."""
        return new_shell_directory(self.control)

    def _new_control(self) -> Path:
        folder = self._folder / f"control-{next(self._controls)}"
        folder.mkdir()
        folder.chmod(0o777)  # the user inside may be another one; the run directory lets nobody else in
        return folder

    def sibling(self) -> DockerBackend:
        """Another backend of the same image and settings, not started."""
        return DockerBackend(self._base.id, limits=self._limits, network=self._network, env=self._env)

    def close(self) -> None:
        """Remove the container. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._end()
        remove_directories([os.fspath(self._folder)])
        self._base.image.release()
        self._ownership.sweep()

    def __del__(self) -> None:
        # Only noted: garbage collection may interrupt a request to the daemon.
        if not getattr(self, "_closed", True):
            if self._container is not None:
                self._ownership.doom_container(self._container.id)
            if self._running is not None:
                self._running.release()
            self._base.image.release()

    def _write_names(self, recorded: Mapping[str, bytes]) -> None:
        """Write the files of name resolution for the next container: the recorded ones, else the defaults.

        Where there is a network, the daemon knows which resolver can be reached there, so that file is the daemon's
        unless another was recorded.
        """
        folder = self._folder / "names"
        if folder.exists():
            run_directories.remove_tree(folder)
        folder.mkdir()
        self._usual = dict(name_files.contents(network=False))
        if self._network:
            self._usual[_RESOLVER] = None
        self._mounted = {}
        for name, content in {**self._usual, **recorded}.items():
            if content is not None:
                self._mounted[name] = folder / name
                self._mounted[name].write_bytes(content)
                self._mounted[name].chmod(0o644)

    def _names(self) -> dict[str, bytes]:
        """The files of name resolution that differ from the defaults.

        Raises:
            SandboxFull: more than is recorded.
        """
        held = {name: self._held(name) for name in name_files.FILES}
        return {name: content for name, content in held.items() if content != self._usual[name]}

    def _held(self, name: str) -> bytes:
        """Present content of one such file; empty if a link led to it and something else took the link's place."""
        try:
            with contextlib.suppress(PermissionError):  # root inside changed the mode of an ordinary user's file
                if name in self._mounted:
                    with open(self._mounted[name], "rb") as file:
                        return regular_file(file.fileno(), f"/etc/{name}", limit=name_files.LONGEST)
            return docker_files.read_file(self._live(), f"/etc/{name}", limit=name_files.LONGEST)
        except FileTooLarge as error:
            raise SandboxFull(f"/etc/{name} cannot be kept: {error}") from error
        except OSError:
            return b""

    def _create(self, image: DockerImage, mounted: Mapping[str, Path]) -> str:
        self._ownership.sweep()
        api, limits = self._ownership.api, self._limits
        ulimits = [{"Name": "core", "Soft": 0, "Hard": 0}]
        if limits.disk is not None:
            ulimits.append({"Name": "fsize", "Soft": limits.disk, "Hard": limits.disk})
        binds = {str(self.control): {"bind": CONTROL, "mode": "rw"}}
        binds |= {str(file): {"bind": f"/etc/{name}", "mode": "rw"} for name, file in mounted.items()}
        with daemon_errors():
            settings = api.create_host_config(
                network_mode="bridge" if self._network else "none",
                mem_limit=limits.memory,
                memswap_limit=limits.memory,
                pids_limit=limits.processes,
                cap_drop=["ALL"],
                cap_add=list(CAPABILITIES),
                security_opt=["no-new-privileges"],
                ulimits=ulimits,
                binds=binds,
                log_config={"Type": "none"},
            )
            made = api.create_container(
                image.id,
                entrypoint=list(INIT),
                command=[],
                hostname=name_files.HOST,
                labels=self._ownership.labels,
                host_config=settings,
                healthcheck={"Test": ["NONE"]},
            )
        identity: str = made["Id"]
        return identity

    def _end(self) -> None:
        container, self._container = self._container, None
        image, self._running = self._running, None
        if container is not None:
            self._remove(container.id)
        if image is not None:
            image.release()

    def _remove(self, identity: str) -> None:
        with contextlib.suppress(SandboxClosed), live_errors():
            self._ownership.api.remove_container(identity, force=True, v=True)

    def _live(self) -> DockerContainer:
        self._check_open()
        if self._container is None:
            raise SandboxClosed("this sandbox was not started, or was committed: start it first")
        return self._container

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxClosed("this sandbox was closed")

    def _check_size(self, tree: DockerTree) -> None:
        if self._limits.disk is not None and (nbytes := tree.nbytes) > self._limits.disk:
            tree.release()
            raise SandboxFull(f"{nbytes} bytes were written, the limit is {self._limits.disk}")

    def _user(self) -> tuple[int, int]:
        """User and group number of the image's user."""
        user, _, group = self._base.user.partition(":")
        if not user:
            return 0, 0
        if user.isdigit() and (group.isdigit() or not group):
            return int(user), int(group or 0)
        status, output = self._live().execute(["sh", "-c", "id -u; id -g"])
        if status:
            raise SandboxError(f"the image's user {self._base.user!r} has no number: {output[:1000]!r}")
        try:
            number, its_group = map(int, output.split())
        except ValueError:
            raise SandboxError(f"expected numbers of the user {self._base.user!r}, found {output[:1000]!r}") from None
        return number, its_group


def _portions(paths: Sequence[str], number: int = 500) -> Iterable[Sequence[str]]:
    """Paths in batches that fit on a command line."""
    return (paths[at : at + number] for at in range(0, len(paths), number))
