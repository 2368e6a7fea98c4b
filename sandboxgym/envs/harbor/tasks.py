"""Tasks: directories in the format of Harbor (Terminal-Bench 2), read and checked.

1. A task is a directory with ``task.toml``, ``instruction.md``, ``environment/`` (a Dockerfile, or ``docker_image`` in
   ``task.toml``), ``tests/test.sh`` and, usually, ``solution/solve.sh``. Versions 1.0 (``memory = "2G"``) to 1.4
   (``memory_mb = 2048``) of ``task.toml`` are read; fields that have no effect here are ignored.
2. A malformed task is refused when the tasks are opened, with an error that names the file and the field
   (`TaskError`). A well-formed task that needs something this environment lacks (several containers, a GPU, Windows,
   several steps) is refused when it is played (`TaskUnsupported`), so that the other tasks of its folder can be used.
   Nothing outside of a task's directory is read: links are copied as links, and none of the task's own files may be a
   link that leads out.
3. Environment variables of this process are never passed on: of a template ``${NAME:-default}`` the default is used.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

from sandboxgym.brief import brief
from sandboxgym.task_env import TaskNotFound

MINI = Path(__file__).parent / "mini"
"""Directory of the embedded tasks."""
LARGEST_TEXT = 16 * 2**20
"""Limit in bytes of a ``task.toml`` or ``instruction.md``."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TEMPLATE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


class TaskError(ValueError):
    """A task directory is not in Harbor's format; the message names the file and the field."""


class TaskUnsupported(TaskError):
    """A well-formed task needs something that this environment does not have."""


@dataclass(frozen=True)
class HarborTask:
    """A task, read from its directory."""

    id: str
    """Name of its directory."""
    path: Path
    instruction: str = field(repr=False)
    type: str
    """``category`` in ``[metadata]``."""
    agent_seconds: float
    """``[agent] timeout_sec``."""
    verifier_seconds: float
    build_seconds: float
    memory: int | None
    """Bytes; None if the task leaves it open."""
    disk: int | None
    image: str | None
    """``[environment] docker_image``."""
    dockerfile: Path | None
    workdir: str | None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    verifier_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    solution_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    unsupported: str = ""
    """Reason why the task cannot be played here; empty if there is none."""

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all of the task's files except the solution's, computed on first use and then kept."""
        return _digest_of(self.path, beside=("solution",))

    @property
    def tests(self) -> Path:
        """Directory of the tests."""
        return self.path / "tests"

    @property
    def context(self) -> Path:
        """Directory from which the image is built."""
        return self.path / "environment"

    @property
    def solution(self) -> Path | None:
        """Directory of the solution, if the task has one."""
        found = self.path / "solution"
        return found if (found / "solve.sh").is_file() else None

    def environment_digest(self) -> str:
        """Digest of the files from which its image is built."""
        return _digest_of(self.context) if self.context.is_dir() else ""


class HarborTasks(Sequence[HarborTask]):
    """Tasks in the order of their names.

    Args:
        tasks: at least one.
        source: where they come from, for error messages.
    """

    def __init__(self, tasks: Sequence[HarborTask], source: str) -> None:
        self._tasks = tuple(tasks)
        self._source = source
        self._by_id = {task.id: number for number, task in enumerate(self._tasks)}

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, number: Any) -> Any:
        return self._tasks[number]

    def __repr__(self) -> str:
        return f"<{len(self)} tasks of {self._source}>"

    def index(self, task: object, *_: object) -> int:
        """Position of a task, given by position or id.

        Raises:
            TaskNotFound: there is no such task; the message has the nearest ids.
            TypeError: ``task`` is neither a string nor an integer.
        """
        if isinstance(task, SupportsIndex) and not isinstance(task, bool):
            number = task.__index__()
            if 0 <= number < len(self):
                return number
            raise TaskNotFound(f"{self._source} has tasks 0 to {len(self) - 1}, not {brief(number, 80)}")
        if not isinstance(task, str):
            raise TypeError(f"expected a task as an id or a number, found {brief(task, 80)}")
        if task not in self._by_id:
            near = difflib.get_close_matches(task[:200], self._by_id, n=3, cutoff=0.3)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise TaskNotFound(f"{self._source}: there is no task {brief(task, 80)}{hint}")
        return self._by_id[task]


def open_tasks(tasks: str | os.PathLike[str], *, instances: Sequence[str] | None = None) -> HarborTasks:
    """Open the tasks of a directory.

    Args:
        tasks: ``"mini"`` for the embedded tasks, a task's directory, or a directory with some of these (subdirectories
            without a ``task.toml`` are not looked at).
        instances: only the tasks with these ids, in this order.

    Raises:
        TypeError: ``tasks`` is not a name or path, or ``instances`` is not a list.
        TaskError: there is no task, or one is malformed.
        TaskNotFound: one of ``instances`` does not exist.
    """
    if not isinstance(tasks, str | os.PathLike) or isinstance(os.fspath(tasks), bytes) or not os.fspath(tasks):
        raise TypeError(f"tasks: expected 'mini' or the path of a task or of a folder of tasks, found {brief(tasks)}")
    root = MINI if tasks == "mini" else Path(tasks).absolute()
    if (root / "task.toml").is_file():
        folders = [root]
    elif root.is_dir():
        folders = sorted(path for path in root.iterdir() if (path / "task.toml").is_file())
    else:
        raise TaskError(f"tasks: expected 'mini' or a directory, found {brief(os.fspath(tasks))}")
    if not folders:
        raise TaskError(f"tasks: expected a task.toml in {root} or in its subdirectories, found none")
    if instances is not None:
        folders = _chosen(folders, instances, root)
    return HarborTasks([read_task(folder) for folder in folders], source="mini" if tasks == "mini" else str(root))


def images(
    tasks: str | os.PathLike[str] = "mini",
    *,
    instances: Sequence[str] | None = None,
    image: str | None = None,
    build: str = "auto",
    **_: Any,
) -> list[str]:
    """Names of the images of the tasks that these arguments of the environment select; raises like `open_tasks`."""
    if build != "docker" and (image or tasks == "mini"):  # all are carried out on one root file system
        return [image.removeprefix("docker:")] if image and image.startswith("docker:") else []
    named = (task.image for task in open_tasks(tasks, instances=instances))
    return [name for name in dict.fromkeys(named) if name]


def _chosen(folders: Sequence[Path], instances: Sequence[str], root: Path) -> list[Path]:
    if isinstance(instances, str) or not all(isinstance(name, str) for name in instances) or not instances:
        raise TypeError(f"instances: expected a list of ids of tasks, found {brief(instances, 80)}")
    known = {folder.name: folder for folder in folders}
    for name in instances:
        if name not in known:
            near = difflib.get_close_matches(name[:200], known, n=3, cutoff=0.3)
            raise TaskNotFound(f"{root} has no task {brief(name, 80)}" + (f"; near: {', '.join(near)}" if near else ""))
    return [known[name] for name in instances]


def read_task(folder: Path) -> HarborTask:
    """Read and check the task of a directory.

    Raises:
        TaskError: the task is malformed.
    """
    try:
        folder.name.encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"{brief(str(folder))}: expected the name of a task in UTF-8, found {folder.name!a}") from error
    config = _Section(_toml(folder / "task.toml"), folder / "task.toml", "")
    agent, verifier = config.section("agent"), config.section("verifier")
    environment, metadata = config.section("environment"), config.section("metadata")
    instruction = _text(folder / "instruction.md") if "steps" not in config.values else ""
    image = environment.text("docker_image")
    context = folder / "environment"
    dockerfile = context / "Dockerfile"
    compose = next((name for name in _COMPOSE if (context / name).is_file()), "")
    if image is None and not dockerfile.is_file() and not compose:
        raise TaskError(
            f"{folder}: expected environment/Dockerfile, or docker_image in [environment] of task.toml, found neither"
        )
    if not (folder / "tests" / "test.sh").is_file() and "steps" not in config.values:
        raise TaskError(f"{folder}: expected tests/test.sh, found none")
    for name in ("environment", "environment/Dockerfile", "tests", "tests/test.sh", "solution", "solution/solve.sh"):
        if not is_below(folder / name, folder):
            raise TaskError(f"{folder / name}: expected a part of the task, found a link that leads out of it")
    workdir = environment.text("workdir")
    if workdir is not None and not workdir.startswith("/"):
        raise environment.wrong("workdir", "an absolute path", workdir)
    return HarborTask(
        id=folder.name,
        path=folder,
        instruction=instruction,
        type=metadata.text("category") or "",
        agent_seconds=agent.seconds("timeout_sec", 900.0),
        verifier_seconds=verifier.seconds("timeout_sec", 600.0),
        build_seconds=environment.seconds("build_timeout_sec", 600.0),
        memory=environment.size("memory"),
        disk=environment.size("storage"),
        image=image,
        dockerfile=dockerfile if dockerfile.is_file() else None,
        workdir=workdir,
        env=environment.variables("env"),
        verifier_env=verifier.variables("env"),
        solution_env=config.section("solution").variables("env"),
        unsupported=_unsupported(config, environment, compose),
    )


def _unsupported(config: _Section, environment: _Section, compose: str) -> str:
    gpus = environment.number("gpus", 0)
    operating_system = environment.text("os") or "linux"
    verifier = config.section("verifier")
    version = config.text("schema_version") or config.text("version") or "1.0"
    reasons = {
        f"version {brief(version, 20)} of task.toml (1.0 to 1.4 are read)": not version.startswith("1."),
        f"environment/{compose}: several containers": compose,
        "[environment] gpus: a GPU": gpus,
        f"[environment] os: {operating_system}": operating_system != "linux",
        "[[steps]]: several steps": config.values.get("steps"),
        "[environment] healthcheck: a service that runs from the start": environment.values.get("healthcheck"),
        "[verifier] environment: another container for the tests": verifier.values.get("environment"),
        "[verifier] environment_mode: another container for the tests": (
            verifier.text("environment_mode") not in (None, "shared")
        ),
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies)


@dataclass(frozen=True, slots=True)
class _Section:
    """A table of ``task.toml``, with checked access to its fields."""

    values: Mapping[str, Any]
    file: Path
    name: str

    def wrong(self, key: str, expected: str, found: object) -> TaskError:
        where = f"[{self.name}] {key}" if self.name else key
        return TaskError(f"{self.file}: {where}: expected {expected}, found {brief(found, 80)}")

    def section(self, name: str) -> _Section:
        found = self.values.get(name, {})
        if not isinstance(found, dict):
            raise self.wrong(name, f"a table [{name}]", found)
        return _Section(found, self.file, name)

    def text(self, key: str) -> str | None:
        found = self.values.get(key)
        if found is not None and (not isinstance(found, str) or "\0" in found):
            raise self.wrong(key, "a text", found)
        return found or None

    def number(self, key: str, default: float) -> float:
        found = self.values.get(key)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise self.wrong(key, "a number of at least 0", found)
        return found

    def seconds(self, key: str, default: float) -> float:
        found = self.number(key, default)
        if not 0 < found <= 1_000_000:
            raise self.wrong(key, "more than 0 and at most 1,000,000 seconds", found)
        return float(found)

    def size(self, key: str) -> int | None:
        """Bytes of ``key_mb`` (a number), or of ``key`` (a text such as ``"2G"``)."""
        if self.values.get(f"{key}_mb") is not None:
            megabytes = self.number(f"{key}_mb", 0)
            if not 1 <= megabytes <= 2**32:
                raise self.wrong(f"{key}_mb", "a number of megabytes", megabytes)
            return int(megabytes * 2**20)
        found = self.values.get(key)
        if found is None:
            return None
        match = _SIZE.fullmatch(found.strip()) if isinstance(found, str) and len(found) < 40 else None
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
        if not 2**20 <= size < 2**62:
            raise self.wrong(key, "a size such as '512M' or '2G', at least 1M", found)
        return size

    def variables(self, key: str) -> dict[str, str]:
        """Environment variables; a template without a default is refused."""
        found = self.values.get(key, {})
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise self.wrong(key, "a table of texts", found)
        resolved = {}
        for name, value in found.items():
            template = _TEMPLATE.fullmatch(value)
            if template is not None and template[2] is None:
                raise self.wrong(f"{key}.{name}", "a text, or ${NAME:-default} with a default", value)
            resolved[name] = value if template is None else template[2]
            if not name or "=" in name or "\0" in name + resolved[name]:
                raise self.wrong(f"{key}.{name}", "a name without '=' and a text without null characters", value)
        return resolved


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except TaskError:
        raise
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or an integer of too many digits
        raise TaskError(f"{path}: expected TOML, found {brief(str(error))}") from error


def is_below(path: Path, folder: Path) -> bool:
    """True if a path, with all links followed, stays in a directory, which may be a link itself."""
    place, root = os.path.realpath(path), os.path.realpath(folder)
    return place == root or place.startswith(root.rstrip("/") + "/")


def _text(path: Path) -> str:
    if not is_below(path, path.parent):
        raise TaskError(f"{path}: expected a part of the task, found a link that leads out of it")
    try:
        if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > LARGEST_TEXT:
            raise TaskError(f"{path}: expected a file of at most {LARGEST_TEXT:,} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskError(f"{path}: expected a file, found none") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: expected a text in UTF-8, found {brief(str(error))}") from error


def _digest_of(folder: Path, *, beside: Sequence[str] = ()) -> str:
    """Digest of names, modes and contents of all files, without some of the entries at the top."""
    digest = hashlib.sha256()
    for path, name in _walk(folder, lambda name: name not in beside):
        try:
            found = path.lstat()
            link = os.fsencode(os.readlink(path)) if stat.S_ISLNK(found.st_mode) else b""
            size = found.st_size if stat.S_ISREG(found.st_mode) else len(link)
            digest.update(f"{name}\0{found.st_mode & 0o100:o}\0{size}\0".encode("utf-8", "surrogateescape"))
            digest.update(link)
            if stat.S_ISREG(found.st_mode):
                with path.open("rb") as content:
                    while piece := content.read(2**20):
                        digest.update(piece)
            elif not link and not stat.S_ISDIR(found.st_mode):
                raise TaskError(f"{path}: expected a file, a directory or a link, found something else")
        except OSError as error:
            raise TaskError(f"{path}: expected a file that can be read, found {brief(str(error))}") from error
    return digest.hexdigest()


def _walk(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if wanted(name.partition("/")[0]) and "__pycache__" not in path.parts:
            yield path, name
