"""Dockerfiles without a Docker daemon: parsed, and carried out in a sandbox.

1. The subset is what most tasks use: one stage of FROM, ARG, ENV, WORKDIR, RUN, COPY and ADD of local files, with
   continued lines and here-documents. Instructions that concern only a started container (CMD, ENTRYPOINT, EXPOSE,
   LABEL, ...) have no effect. Anything else is refused with its line (`DockerfileError`).
2. FROM is parsed but not obeyed: the sandbox's root file system stands in for the image that it names.
"""

from __future__ import annotations

import contextlib
import io
import json
import posixpath
import re
import secrets
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandboxgym.brief import brief
from sandboxgym.envs.harbor.tasks import TaskError, is_below
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.sandbox import Sandbox

_IGNORED = frozenset(
    ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME", "HEALTHCHECK", "ONBUILD")
)
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?\s+")


class DockerfileError(TaskError):
    """A Dockerfile holds something outside of the subset, or a command of it failed; the message has the line."""


class NotWritten(TaskError):
    """Files could not be written into a sandbox, because of what it contains; the message says why."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile."""

    line: int
    name: str
    """In capitals."""
    text: str
    """Arguments, continued lines joined."""
    documents: tuple[tuple[str, str], ...] = ()
    """Here-documents: name and content of each."""


@dataclass(slots=True)
class Built:
    """Settings of an image, in addition to its files."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"


def parse(text: str, file: str) -> list[Instruction]:
    r"""Parse a Dockerfile.

    Raises:
        DockerfileError: a here-document does not end, a line has no instruction, or the text has null characters.

    Example:
        >>> [(one.name, one.text) for one in parse("FROM a\n# b\nRUN c \\\n  d\n", "Dockerfile")]
        [('FROM', 'a'), ('RUN', 'c   d')]
    """
    if "\0" in text:
        raise DockerfileError(f"{file}: expected a text without null characters")
    lines = text.splitlines()
    found = []
    number = 0
    while number < len(lines):
        begin, line = number + 1, lines[number]
        number += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line
        while whole.rstrip().endswith("\\") and number < len(lines):
            following = lines[number]
            number += 1
            if not following.lstrip().startswith("#"):  # comments between continued lines do not count
                whole = whole.rstrip()[:-1] + following
        name, _, rest = whole.strip().partition(" ")
        documents = []
        if name.upper() in ("RUN", "COPY", "ADD"):
            for match in _HEREDOC.finditer(rest):
                body = []
                while number < len(lines) and lines[number].strip() != match[2]:
                    body.append(lines[number])
                    number += 1
                if number == len(lines):
                    raise DockerfileError(f"{file}:{begin}: expected {match[2]} at the end of a here-document")
                number += 1
                documents.append((match[2], "".join(f"{one}\n" for one in body)))
        if not name.isalpha():
            raise DockerfileError(f"{file}:{begin}: expected an instruction, found {brief(name, 80)}")
        found.append(Instruction(begin, name.upper(), rest.strip(), tuple(documents)))
    return found


class Build:
    """The build of an image in a sandbox.

    Args:
        sandbox: a sandbox on the root file system that stands in for FROM's image; not usable afterwards.
        context: directory of the files that COPY may name.
        file: name of the Dockerfile in errors.
        env: environment variables of the base image.
        workdir: working directory of the base image.
        timeout: limit in seconds of each command.
    """

    def __init__(
        self, sandbox: Sandbox, context: Path, file: str, *, env: Mapping[str, str], workdir: str, timeout: float
    ) -> None:
        self.built = Built(dict(env), workdir)
        self._sandbox, self._context, self._file, self._timeout = sandbox, context, file, timeout
        self._arguments: dict[str, str] = {}
        self._path: str | None = None
        self._stages = 0

    def run(self, instructions: Sequence[Instruction]) -> Built:
        """Carry out all instructions; returns the image's environment variables and working directory.

        Raises:
            DockerfileError: an instruction is outside of the subset, or a command failed.
        """
        for one in instructions:
            self._carry_out(one)
        if not self._stages:
            raise DockerfileError(f"{self._file}: expected FROM, found none")
        return self.built

    def _refused(self, one: Instruction, why: str) -> DockerfileError:
        return DockerfileError(
            f"{self._file}:{one.line}: {one.name}: {why}; with a Docker daemon (build='docker') all Dockerfiles work"
        )

    def _carry_out(self, one: Instruction) -> None:
        match one.name:
            case "FROM":
                self._stages += 1
                if self._stages > 1:
                    raise self._refused(one, "expected one stage, found another")
            case "ARG":
                name, given, value = one.text.partition("=")
                self._arguments[name.strip()] = self._expanded(value).strip("\"'") if given else ""
            case "ENV":
                self.built.env |= self._pairs(one)
            case "WORKDIR":
                path = self._expanded(one.text).strip("\"'")
                self.built.workdir = posixpath.normpath(posixpath.join(self.built.workdir, path))
                self._command(one, f"mkdir -p {shlex.quote(self.built.workdir)}", cwd="/")
            case "RUN":
                self._run(one)
            case "COPY" | "ADD":
                self._copy(one)
            case "USER":
                if self._expanded(one.text).partition(":")[0] not in ("root", "0"):
                    raise self._refused(one, f"expected root, found {brief(one.text, 80)}")
            case _:
                if one.name not in _IGNORED:
                    raise self._refused(one, "not of the instructions that are carried out without a daemon")

    def _run(self, one: Instruction) -> None:
        text = one.text
        while flag := _FLAG.match(text):  # options of BuildKit, such as cache mounts, are dropped
            text = text[flag.end() :]
        if one.documents and _HEREDOC.fullmatch(text):
            text = one.documents[0][1]
        elif one.documents:
            text = f"{text}\n" + "".join(f"{body}{name}\n" for name, body in one.documents)
        elif text.startswith("["):
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # else it is a command of the shell, `[`
                text = shlex.join(json.loads(text))
        self._command(one, text)

    def _command(self, one: Instruction, command: str, *, cwd: str | None = None) -> None:
        env = {"DEBIAN_FRONTEND": "noninteractive", **self._arguments, **self.built.env}
        done = self._sandbox.run(
            f"exec /bin/sh -c {shlex.quote(command)}",
            env=env,
            cwd=self.built.workdir if cwd is None else cwd,
            timeout=self._timeout,
        )
        if done.exit_code:
            why = f"took more than {self._timeout:g} seconds" if done.timed_out else f"exit code {done.exit_code}"
            raise DockerfileError(f"{self._file}:{one.line}: {one.name} failed, {why}: {done.output[-1000:].strip()}")

    def _copy(self, one: Instruction) -> None:
        text, mode = one.text, None
        while flag := _FLAG.match(text):
            if flag[1] == "chmod" and re.fullmatch("[0-7]{1,4}", flag[2] or ""):
                mode = int(flag[2], 8)
            elif flag[1] not in ("chown", "link"):
                raise self._refused(one, brief(flag[0].strip(), 80))
            text = text[flag.end() :]
        words = self._words(one, text)
        if len(words) < 2:
            raise self._refused(one, "expected a source and a destination")
        *sources, destination = words
        target = posixpath.normpath(posixpath.join(self.built.workdir, destination))
        into = destination.endswith("/") or destination in (".", "..") or len(sources) > 1
        members: list[tuple[str, Path | bytes]] = []
        for source in sources:
            heredoc = _HEREDOC.fullmatch(source)
            if heredoc is not None:
                body = dict(one.documents).get(heredoc[2], "").encode()
                members.append((posixpath.join(target, heredoc[2]) if into else target, body))
                continue
            for path in self._found(one, source):
                if path.is_dir() and not path.is_symlink():
                    members += [(posixpath.join(target, name), inner) for inner, name in _below(path)]
                else:
                    there = into or self._is_directory(target)
                    members.append((posixpath.join(target, path.name) if there else target, path))
        put(self._sandbox, members, mode=mode)

    def _is_directory(self, path: str) -> bool:
        return self._sandbox.run(f"test -d {shlex.quote(path)}").exit_code == 0

    def _found(self, one: Instruction, source: str) -> list[Path]:
        if "://" in source:
            raise self._refused(one, "expected files of the task, found an address")
        name = posixpath.normpath(source.lstrip("/"))
        if name.startswith(".."):
            raise self._refused(one, f"expected files below environment/, found {brief(source, 80)}")
        paths = sorted(self._context.glob(name)) if re.search(r"[*?\[]", name) else [self._context / name]
        if not paths or not all(path.exists() or path.is_symlink() for path in paths):
            raise DockerfileError(f"{self._file}:{one.line}: {one.name}: environment/ has no {brief(source, 80)}")
        for path in paths:  # a link is copied as a link, but none on the way to a file may lead out
            if path != self._context and not is_below(path.parent, self._context):
                raise self._refused(one, f"expected files below environment/, found {brief(source, 80)} behind a link")
        return paths

    def _words(self, one: Instruction, text: str) -> list[str]:
        text = self._expanded(text)
        try:
            return list(map(str, json.loads(text))) if text.startswith("[") else shlex.split(text)
        except (ValueError, RecursionError) as error:
            raise self._refused(one, f"expected words, found {brief(text, 80)}") from error

    def _pairs(self, one: Instruction) -> dict[str, str]:
        words = self._words(one, one.text)
        if words and "=" not in words[0]:  # the old form: ENV NAME any text
            name, _, value = one.text.partition(" ")
            return {name: self._expanded(value).strip()}
        if any(word.startswith("=") for word in words):
            raise self._refused(one, f"expected NAME=VALUE, found {brief(one.text, 80)}")
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def _base_path(self) -> str:
        if self._path is None:
            self._path = self._sandbox.run('printf %s "$PATH"').output
        return self._path

    def _expanded(self, text: str) -> str:
        known = {**self._arguments, **self.built.env}

        def value(match: re.Match[str]) -> str:
            if match[1] is not None:
                return match[0] if match[1] != "$" else "$"
            name = match[2] or match[3]
            # Of the base image's variables only this one is part of Dockerfiles, in ENV PATH=/new:$PATH.
            found = self._base_path() if name == "PATH" and name not in known else known.get(name, "")
            if match[4] == "-":
                return found or match[5]
            return (match[5] if found else "") if match[4] == "+" else found

        return _VARIABLE.sub(value, text)


def _below(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        yield path, path.relative_to(folder).as_posix()


def put(
    sandbox: Sandbox, members: Sequence[tuple[str, Path | bytes]], *, mode: int | None = None, through: str = "/tmp"
) -> None:
    """Write files of this machine into a sandbox, in one archive, owned by root.

    Args:
        sandbox: the sandbox, whose image needs ``tar``.
        members: pairs of an absolute path in the sandbox, and a file, link or directory of this machine or the content
            of a file.
        mode: permission bits of the files; by default their own.
        through: directory of the sandbox that holds the archive meanwhile, under a name that cannot be taken.

    Raises:
        NotWritten: the sandbox lacks ``tar``, or has something else where the files belong.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, source in members:
            info = tarfile.TarInfo(name.lstrip("/"))
            if isinstance(source, bytes):
                info.size, info.mode = len(source), 0o644 if mode is None else mode
                archive.addfile(info, io.BytesIO(source))
                continue
            info = archive.gettarinfo(str(source), arcname=name.lstrip("/"))
            assert info is not None, source  # no socket: the task's digest has been computed
            info.uid = info.gid = 0
            info.uname = info.gname = "root"
            if mode is not None and info.isreg():
                info.mode = mode
            if info.isreg():
                with source.open("rb") as content:
                    archive.addfile(info, content)
            else:
                archive.addfile(info)
    archive_name = f"{through}/.{secrets.token_hex(8)}.tar"
    try:
        sandbox.write_file(archive_name, stream.getvalue())
    except SandboxError:
        raise
    except OSError as error:  # the path is no directory, for one
        raise NotWritten(f"files could not be written into the sandbox: {error}") from error
    done = sandbox.run(
        f"tar -C / -xf {archive_name} --no-same-owner --overwrite-dir 2>&1; code=$?; rm -f {archive_name}; exit $code",
        cwd="/",
    )
    if done.exit_code:
        raise NotWritten(f"files could not be written into the sandbox: {done.output[-500:].strip()}")


def tree(folder: Path, target: str) -> list[tuple[str, Path | bytes]]:
    """The files below a directory, as `put` takes them, to be written below ``target``."""
    return [(posixpath.join(target, name), path) for path, name in _below(folder) if "__pycache__" not in path.parts]
