"""Files of a container through the daemon's archive API, which needs no program inside.

The API sees the container's layers, not the mounts over them: /dev, /proc, /sys and the control directory are read by a
program inside. Only the first member of an archive is read, and of that no more than requested.
"""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import posixpath
import stat
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from sandboxgym.sandbox.base import CONTROL, FileTooLarge, check_inside
from sandboxgym.sandbox.docker.exec import DockerContainer, live_errors

_MOUNTED = ("/dev", "/proc", "/sys", CONTROL)
_REASONS = (("not a directory", errno.ENOTDIR), ("too many", errno.ELOOP), ("name too long", errno.ENAMETOOLONG))
_BLOCK = 1 << 16
_READING = 60.0  # seconds in which a file must have come
_GO_SYMLINK = 1 << 27
_GO_DIR = 1 << 31
_GO_IRREGULAR = (1 << 26) | (1 << 25) | (1 << 24) | (1 << 21) | (1 << 19)


def read_file(container: DockerContainer, path: str, *, limit: int) -> bytes:
    """Read a regular file, with links resolved inside."""
    path = check_inside(path)
    resolved, status = _resolve(container, path)
    if status is None:
        resolved = _real(container, path)
    if _is_mounted(resolved):
        return _read_by_program(container, path, limit)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if status["mode"] & _GO_DIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if status["mode"] & _GO_IRREGULAR:
        raise OSError(errno.EINVAL, "not a regular file", path)
    if status["size"] > limit:
        raise FileTooLarge.of(path, size=status["size"], limit=limit)
    api = container.api
    url = api._url("/containers/{0}/archive", container.id)
    options = {"params": {"path": resolved}, "timeout": api.timeout, "headers": {"Accept-Encoding": "identity"}}
    with live_errors(), api.get(url, stream=True, **options) as answer:
        api._raise_for_status(answer)
        try:
            return _first_file(cast("io.BufferedReader", answer.raw), path, limit)
        except tarfile.TarError as error:
            raise OSError(errno.EIO, f"the daemon's archive cannot be read: {error}", path) from error


def _first_file(stream: io.BufferedReader, path: str, limit: int) -> bytes:
    """Content of an archive's first member, whose type may have changed since it was checked."""
    end = time.monotonic() + _READING
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        member = tar.next()
        if member is None or not member.isreg() or member.issparse():
            raise OSError(errno.EINVAL, "not a regular file", path)
        if member.size > limit:
            raise FileTooLarge.of(path, size=member.size, limit=limit)
        content = tar.extractfile(member)
        assert content is not None
        data = bytearray()
        while block := content.read(_BLOCK):
            data += block
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, f"not read in {_READING:g} s", path)
        return bytes(data)


def write_file(
    container: DockerContainer,
    path: str,
    data: bytes,
    *,
    mode: int,
    owner: tuple[int, int],
    mounted: Mapping[str, Path],
) -> None:
    """Write a file and its missing parent directories.

    Args:
        container: where.
        path: in it.
        data: content.
        mode: of the file.
        owner: user and group of all that is made.
        mounted: files of this machine that are mounted in the container, by their paths there; the daemon, which puts
            a new file in the place of an old one, cannot write them.
    """
    path = check_inside(path)
    resolved = _real(container, path)
    if _is_mounted(resolved):  # over the layers: what is written to these would not be seen
        raise PermissionError(errno.EPERM, "it is not in the layers of the container: use a command inside", path)
    status = _status(container, resolved)
    if status is not None and status["mode"] & _GO_DIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if resolved in mounted:
        mounted[resolved].write_bytes(data)
        return
    missing = [posixpath.basename(resolved)]
    folder = posixpath.dirname(resolved)
    while True:
        folder, above = _resolve(container, folder)
        if above is not None:
            break
        missing.insert(0, posixpath.basename(folder))
        folder = posixpath.dirname(folder)
    if not above["mode"] & _GO_DIR:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for depth in range(1, len(missing) + 1):
            info = tarfile.TarInfo("/".join(missing[:depth]))
            info.uid, info.gid = owner
            info.mtime = time.time()
            if depth < len(missing):
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
            else:
                info.mode, info.size = stat.S_IMODE(mode), len(data)
                tar.addfile(info, io.BytesIO(data))
    with live_errors():
        container.api.put_archive(container.id, folder, archive.getvalue())


def _is_mounted(path: str) -> bool:
    return any(path == mount or path.startswith(mount + "/") for mount in _MOUNTED)


def _real(container: DockerContainer, path: str) -> str:
    """Final target of a path, with links followed as far as the layers hold them."""
    resolved = "/"
    for part in path.strip("/").split("/"):
        resolved = _resolve(container, posixpath.join(resolved, part))[0]
    return resolved


def _resolve(container: DockerContainer, path: str) -> tuple[str, dict[str, Any] | None]:
    """Final target of a path, and its status; None if nothing is there."""
    for _ in range(40):
        status = _status(container, path)
        if status is None or not status["mode"] & _GO_SYMLINK:
            return path, status
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), status["linkTarget"]))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _status(container: DockerContainer, path: str) -> dict[str, Any] | None:
    """The daemon's status of a path whose last part is not followed; mode bits as in Go."""
    api = container.api
    url, options = api._url("/containers/{0}/archive", container.id), {"params": {"path": path}, "timeout": api.timeout}
    with live_errors():
        answer = api.head(url, **options)
        if answer.status_code == 404 and container.running:
            return None
        if answer.status_code != 500:
            api._raise_for_status(answer)
            found: dict[str, Any] = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
            return found
        with api.get(url, stream=True, **options) as told:  # an answer to HEAD does not say why
            reason = told.text
    number = next((number for words, number in _REASONS if words in reason), errno.EIO)
    raise OSError(number, os.strerror(number), path)


def _read_by_program(container: DockerContainer, path: str, limit: int) -> bytes:
    checks = '[ -e "$1" ] || exit 44; [ -d "$1" ] && exit 45; [ -f "$1" ] || exit 46; exec head -c "$2" -- "$1"'
    # Whatever the programs inside have become, no more is taken of what they print, and they are not waited for longer.
    status, output = container.execute(["sh", "-c", checks, "sh", path, str(limit + 1)], limit=limit, seconds=_READING)
    if len(output) > limit:
        raise FileTooLarge.of(path, size=None, limit=limit)
    if status is None:
        raise TimeoutError(errno.ETIMEDOUT, f"not read in {_READING:g} s", path)
    if status == 0:
        return output
    number = {44: errno.ENOENT, 45: errno.EISDIR, 46: errno.EINVAL}.get(status, errno.EACCES)
    raise OSError(number, os.strerror(number), path)
