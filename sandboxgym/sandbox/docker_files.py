"""Files of a container through the daemon's archive API, which needs no program inside.

The API sees the container's layers, not what is mounted over them: /dev, /proc, /sys and the control directory are
read by a program inside.
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
from typing import Any

from sandboxgym.sandbox.base import CONTROL, check_inside
from sandboxgym.sandbox.docker_exec import Container, live_errors

_MOUNTED = ("/dev", "/proc", "/sys", CONTROL)
_REASONS = (("not a directory", errno.ENOTDIR), ("too many", errno.ELOOP))
_GO_SYMLINK = 1 << 27
_GO_DIR = 1 << 31
_GO_IRREGULAR = (1 << 26) | (1 << 25) | (1 << 24) | (1 << 21) | (1 << 19)


def read_file(container: Container, path: str) -> bytes:
    """Content of a regular file, links resolved inside."""
    path = check_inside(path)
    if any(path == mount or path.startswith(mount + "/") for mount in _MOUNTED):
        return _read_by_program(container, path)
    resolved, status = _resolve(container, path)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if status["mode"] & _GO_DIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if status["mode"] & _GO_IRREGULAR:
        raise OSError(errno.EINVAL, "not a regular file", path)
    with live_errors():
        blocks, _ = container.api.get_archive(container.id, resolved)
        archive = io.BytesIO(b"".join(blocks))
    with tarfile.open(fileobj=archive) as tar:
        member = tar.next()
        content = tar.extractfile(member) if member is not None else None
        if content is None:
            raise OSError(errno.EINVAL, "not a regular file", path)
        return content.read()


def write_file(container: Container, path: str, data: bytes, *, mode: int, owner: tuple[int, int]) -> None:
    """Write a file and the directories above it that are missing."""
    path = check_inside(path)
    if any(path == mount or path.startswith(mount + "/") for mount in _MOUNTED):
        raise PermissionError(errno.EPERM, "expected a path outside of what is mounted in a container", path)
    resolved, status = _resolve(container, path)
    if status is not None and status["mode"] & _GO_DIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
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


def _resolve(container: Container, path: str) -> tuple[str, dict[str, Any] | None]:
    """Where a path leads in the end, and what is there; None if nothing is."""
    for _ in range(40):
        status = _status(container, path)
        if status is None or not status["mode"] & _GO_SYMLINK:
            return path, status
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), status["linkTarget"]))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _status(container: Container, path: str) -> dict[str, Any] | None:
    """What the daemon says of a path, its last part not followed; mode bits as Go has them."""
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


def _read_by_program(container: Container, path: str) -> bytes:
    checks = '[ -e "$1" ] || exit 44; [ -d "$1" ] && exit 45; [ -f "$1" ] || exit 46; exec cat -- "$1"'
    status, output = container.execute(["sh", "-c", checks, "sh", path])
    if status == 0:
        return output
    number = {44: errno.ENOENT, 45: errno.EISDIR, 46: errno.EINVAL}.get(status, errno.EACCES)
    raise OSError(number, os.strerror(number), path)
