"""Reading files that processes inside can write: bounds on bytes and time hold before the first byte is read.

1. Only a regular file is read as one. A pipe, a device or a directory is an error, whatever took the place of the file
   since it was checked: the open descriptor counts.
2. A file whose reported size exceeds the limit is not read at all (`FileTooLarge`). One that reports no size (those of
   /proc) or grows meanwhile is read to the limit and a page, never beyond.
3. No file of /proc is read or written on behalf of processes inside: its content depends on the reader, and this
   process may see and do more than they.
4. Reading takes at most twice the limit of memory.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from sandboxgym.sandbox.base import FileTooLarge

SECONDS = 30.0
"""Seconds for reading a file: some of /proc are generated while they are read."""
FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags for opening a file of unknown type: no wait for a pipe, no controlling terminal, no wait for a lease."""

_CHUNK = 1 << 20
_RECORD = 1 << 12


def regular_file(descriptor: int, path: str, *, limit: int, seconds: float = SECONDS) -> bytes:
    """Content of a regular file that was opened with `FLAGS`.

    Args:
        descriptor: of it, at its start; stays open.
        path: named in errors.
        limit: bytes that it may hold.
        seconds: that reading it may take.

    Raises:
        FileTooLarge: it holds more.
        OSError: it is no regular file, or was not read in time.
    """
    status = check_regular(descriptor, path)
    if status.st_size > limit:
        raise FileTooLarge.of(path, size=status.st_size, limit=limit)
    # Some of /proc are read in whole records only.
    data = beginning(descriptor, (limit // _RECORD + 1) * _RECORD, path=path, seconds=seconds)
    if len(data) > limit:
        raise FileTooLarge.of(path, size=None, limit=limit)
    return data


def check_regular(descriptor: int, path: str) -> os.stat_result:
    """Status of an open regular file; raises for other types.

    Raises:
        OSError: it is no regular file.
    """
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return status


def check_not_of_proc(descriptor: int, proc: int, path: str) -> None:
    """Refuse a file of /proc; see the promises of this module.

    Args:
        descriptor: of an open file.
        proc: descriptor of the /proc that is seen where the file is.
        path: named in errors.

    Raises:
        PermissionError: it is a file of /proc.
    """
    if os.fstat(descriptor).st_dev == os.fstat(proc).st_dev:
        raise PermissionError(errno.EPERM, "a file of /proc, which only commands inside may read and write", path)


def beginning(descriptor: int, nbytes: int, *, path: str = "", seconds: float = SECONDS) -> bytes:
    """The next bytes of an open file, up to a limit.

    Raises:
        TimeoutError: they did not come in time.
    """
    end = time.monotonic() + seconds
    data = bytearray()
    while len(data) < nbytes and (part := os.read(descriptor, min(nbytes - len(data), _CHUNK))):
        data += part
        if time.monotonic() > end:
            raise TimeoutError(errno.ETIMEDOUT, f"not read in {seconds:g} s", path)
    return bytes(data)
