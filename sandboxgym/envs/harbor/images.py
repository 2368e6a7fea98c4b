"""Starting points of a task's episodes: its image's files, environment variables and working directory.

1. An image is taken as it is (``docker_image`` in ``task.toml``, if the Docker daemon has it), built from the task's
   Dockerfile by the daemon, or, on a root file system that the user names, by carrying out the Dockerfile in a sandbox
   (`dockerfile`): without a daemon, and without root.
2. Nothing is fetched from a registry, except by ``docker build``, which fetches what FROM names.
3. An image is built once. The daemon keeps those that it builds, under the name `REPOSITORY` and with the digest of the
   task's files as tag; those built in a sandbox are kept in the cache.
4. Every image has ``/logs/agent``, ``/logs/verifier`` and ``/logs/artifacts``, as in Harbor. No image has the tests or
   the solution.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sandboxgym import data, serialization
from sandboxgym.envs.harbor.box import TaskBox
from sandboxgym.envs.harbor.dockerfile import Build, DockerfileError, parse
from sandboxgym.envs.harbor.needs import Needs, needs_of
from sandboxgym.envs.harbor.tasks import HarborTask, TaskError, TaskUnsupported
from sandboxgym.errors import SnapshotError
from sandboxgym.sandbox.base import Limits, SandboxUnavailable
from sandboxgym.sandbox.sandbox import Sandbox, SnapshotMode, make_sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot
from sandboxgym.system.atomic import write_atomic
from sandboxgym.system.once import file_lock

Builder = Literal["auto", "docker", "sandbox"]
REPOSITORY = "sandboxgym-harbor"
"""Name of the images that the daemon builds for tasks."""
KEPT = 64
"""Number of starts kept in a process; the least recently used one is dropped, and made again when needed."""
_BUILD_VERSION = 2
"""Increased whenever Dockerfiles are carried out differently, so that cached images are built again."""
_FOLDERS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts"
_QUIET = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "PIP_PROGRESS_BAR": "off", "PYTHONHASHSEED": "0"}
_BUILD_LIMITS = Limits(seconds=3600.0, memory=None, disk=32 * 2**30, files=None, output=200_000)


@dataclass(frozen=True, slots=True)
class HarborSettings:
    """Settings shared by all sandboxes of an environment."""

    backend: str = "auto"
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Limits that replace those of the tasks."""
    network: bool = False
    env: tuple[tuple[str, str], ...] = ()
    image: str | None = None
    """Root file system on which Dockerfiles are carried out in a sandbox."""
    build: Builder = "auto"
    snapshot: SnapshotMode = "filesystem"
    offline_tests: bool = True
    """True if the packages that tests would install from the network are put into the image."""

    def limits_of(self, task: HarborTask) -> Limits:
        """Limits of the task's sandboxes: the user's where given, else the task's."""
        given = {"seconds": task.agent_seconds, "memory": task.memory, "disk": task.disk}
        return Limits(**({name: value for name, value in given.items() if value is not None} | dict(self.limits)))

    def needs_of(self, task: HarborTask) -> Needs:
        """Packages put into the task's image for its tests."""
        return needs_of(task) if self.offline_tests else Needs()

    def key(self) -> tuple[object, ...]:
        """A value that is equal for equal settings."""
        return (repr(replace(self, limits={})), *sorted(self.limits.items()))


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a task's episodes."""

    snapshot: SandboxSnapshot
    rootfs: str
    """Root file system, as `make_sandbox` takes it."""
    env: Mapping[str, str]
    workdir: str
    digest: tuple[str, str] = ("", "")
    """`TaskBox.digest` of the files and shell."""

    def box(self, task: HarborTask, settings: HarborSettings) -> TaskBox:
        """Make a sandbox for an episode of the task, not started."""
        return TaskBox(self.sandbox(task, settings))

    def sandbox(self, task: HarborTask, settings: HarborSettings) -> Sandbox:
        """Make a sandbox for the task, not started."""
        return make_sandbox(
            settings.backend,
            rootfs=self.rootfs,
            limits=settings.limits_of(task),
            network=settings.network,
            env={**_QUIET, **self.env, **task.env, **dict(settings.env)},
            workdir=self.workdir,
            snapshot=settings.snapshot,
        )


_starts: OrderedDict[tuple[object, ...], Start] = OrderedDict()


def start_of(task: HarborTask, settings: HarborSettings) -> Start:
    """Prepare or load the start of a task.

    Raises:
        TaskUnsupported: the task needs something that this environment does not have.
        TaskError: its image cannot be built; the message has the line of the Dockerfile, or the end of the output.
        SandboxUnavailable: no sandbox can run here, or there is no image and no daemon to build it.
    """
    if task.unsupported:
        raise TaskUnsupported(f"{task.path}: {task.unsupported} cannot be had here")
    key = (os.getpid(), task.digest, *settings.key())
    found = _starts.get(key)
    if found is None:
        found = _starts[key] = _begun(_made(task, settings), task, settings)
        while len(_starts) > KEPT:
            _starts.popitem(last=False)[1].snapshot.release()
    _starts.move_to_end(key)
    return found


def forget_starts() -> None:
    """Drop the starts that `start_of` keeps in memory."""
    while _starts:
        _starts.popitem()[1].snapshot.release()


def _begun(start: Start, task: HarborTask, settings: HarborSettings) -> Start:
    """The start with a running shell, as the first command finds it, and with the digest of that state."""
    with start.box(task, settings) as box:
        box.restore(start.snapshot)
        box.execute(":")
        files = box.files()
        snapshot = box.snapshot(strict=False, mode="filesystem")
        box.know(snapshot, files)
        start.snapshot.release()
        return replace(start, snapshot=snapshot, digest=box.digest_of(files))


def _made(task: HarborTask, settings: HarborSettings) -> Start:
    if settings.image is None and settings.build == "sandbox":
        raise SandboxUnavailable(
            "build='sandbox' needs image=, the root file system on which the Dockerfile is carried out: 'host', "
            "'docker:IMAGE' or the directory of an unpacked one"
        )
    if settings.image is not None and settings.build != "docker":
        return _built_in_sandbox(task, settings, settings.image)
    return _plain_start(task, settings, _built_by_daemon(task, settings))


# By the daemon.


def _built_by_daemon(task: HarborTask, settings: HarborSettings) -> str:
    """Name of the task's image at the Docker daemon, built if it is missing."""
    from sandboxgym.sandbox.docker.client import connect

    with contextlib.closing(connect()) as client:
        import docker.errors

        def present(name: str) -> bool:
            try:
                client.api.inspect_image(name)
            except docker.errors.NotFound:
                return False
            return True

        needs = settings.needs_of(task)
        base = task.image if task.image is not None and present(task.image) else None
        if base is not None and not needs:
            return base
        if base is None and task.dockerfile is None:
            raise SandboxUnavailable(f"no Docker image {task.image!r} on this machine: docker pull {task.image}")
        text = f"FROM {base}\n" if base else _read(task.dockerfile)
        source = hashlib.sha256("\0".join((text + needs.dockerfile(), task.environment_digest())).encode())
        tag = f"{REPOSITORY}:{source.hexdigest()[:40]}"
        if not present(tag):
            _docker_build(task, text + needs.dockerfile(), tag)
        return tag


def _docker_build(task: HarborTask, text: str, tag: str) -> None:
    program = shutil.which("docker")
    if program is None:
        raise SandboxUnavailable("to build images of tasks, the command docker is needed: install the Docker client")
    command = [program, "build", "--force-rm", "--tag", tag, "--file", "-", "."]  # else a failed RUN leaves a container
    folder = task.context if task.context.is_dir() else task.path
    with _dockerfile_beside(folder, text) as file:
        command[command.index("-")] = str(file)
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                timeout=max(task.build_seconds, 60.0),
            )
        except subprocess.TimeoutExpired as error:
            raise TaskError(f"{task.path}: docker build took more than {task.build_seconds:g} seconds") from error
    if done.returncode:
        raise TaskError(f"{task.path}: docker build failed: {done.stdout[-2000:].strip()}")


@contextlib.contextmanager
def _dockerfile_beside(folder: Path, text: str) -> Iterator[Path]:
    """A file with this text, outside of the task's directory, which may be read-only."""
    with tempfile.NamedTemporaryFile("w", prefix="sandboxgym-", suffix=".Dockerfile", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield Path(file.name)


def _plain_start(task: HarborTask, settings: HarborSettings, image: str) -> Start:
    """Start on an image as it is."""
    rootfs = f"docker:{image}"
    with make_sandbox(settings.backend, rootfs=rootfs, limits=_BUILD_LIMITS) as sandbox:
        workdir = task.workdir or sandbox.workdir
        _prepare(sandbox, task, workdir)
        return Start(sandbox.snapshot(), rootfs, {}, workdir)


def _prepare(sandbox: Sandbox, task: HarborTask, workdir: str) -> None:
    done = sandbox.run(f"{_FOLDERS} {shlex.quote(workdir)}", cwd="/")
    if done.exit_code:
        raise TaskError(f"{task.path}: its image cannot be prepared: {done.output[-500:].strip()}")


# In a sandbox.


def _built_in_sandbox(task: HarborTask, settings: HarborSettings, rootfs: str) -> Start:
    """Carry out the task's Dockerfile on a root file system."""
    text = _read(task.dockerfile) if task.dockerfile is not None else ""
    if not text:
        raise TaskError(f"{task.path}: environment/Dockerfile: expected one to carry out on image={rootfs!r}")
    text += settings.needs_of(task).dockerfile()
    # With the network, as `docker build` has it.
    with make_sandbox(settings.backend, rootfs=rootfs, limits=_BUILD_LIMITS, network=True) as sandbox:
        base = sandbox.backend.base()
        base_id = base.base
        base.release()
        parts = (
            _BUILD_VERSION,
            base_id,
            sandbox.backend.capabilities.name,
            task.environment_digest(),
            text,
            task.workdir,
        )
        place = data.cache_dir() / "harbor" / hashlib.sha256(repr(parts).encode()).hexdigest()[:40]
        with _alone(place):
            kept = _loaded(place, sandbox, rootfs)
            if kept is not None:
                return kept
            build = Build(
                sandbox,
                task.context,
                str(task.dockerfile),
                env={},
                workdir=sandbox.workdir,
                timeout=task.build_seconds,
            )
            try:
                built = build.run(parse(text, str(task.dockerfile)))
            except OSError as error:
                raise DockerfileError(f"{task.dockerfile}: {error}") from error
            workdir = task.workdir or built.workdir
            _prepare(sandbox, task, workdir)
            made = Start(sandbox.snapshot(), rootfs, built.env, workdir)
            _save(place, made)
            return made


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Lock an entry of the cache, so that two processes build it once; without a cache there is no lock."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(file_lock(place.with_suffix(".lock")))
        yield


def _loaded(place: Path, sandbox: Sandbox, rootfs: str) -> Start | None:
    try:
        content = serialization.unpack(place.read_bytes())
        snapshot = sandbox.unpack(content["files"])
        return Start(snapshot, rootfs, dict(content["env"]), str(content["workdir"]))
    except (OSError, SnapshotError, KeyError, TypeError, ValueError):  # none, or one that is damaged: made again
        return None


def _save(place: Path, start: Start) -> None:
    with contextlib.suppress(OSError, SnapshotError):  # it is built again
        content = {"files": start.snapshot.pack(), "env": dict(start.env), "workdir": start.workdir}
        write_atomic(place, serialization.pack(content))


def _read(path: Path | None) -> str:
    assert path is not None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: expected a text in UTF-8, found {error}") from error
    return text if text.endswith("\n") else f"{text}\n"
