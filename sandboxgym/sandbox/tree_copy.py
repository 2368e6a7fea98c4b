"""Exact copies of directory trees.

1. A copy has the names, kinds, contents, holes, modes, times and extended attributes of the original, hard links among
   its files, and its owners where this process may set them. Sockets are left out: nobody listens to a copy.
2. Where the file system can share blocks between files (btrfs, xfs), contents are shared.
3. Links are copied as they are, unless it is said where the tree has moved to: then a copy's absolute links never lead
   into what it was made from.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FICLONE = 0x40049409
_CHUNK = 1 << 20


def copy_tree(source: Path, target: Path, *, moved: tuple[str, str] | None = None) -> None:
    """Copy a directory with everything in it.

    Args:
        source: a directory that nobody writes to meanwhile.
        target: is made; it must not exist.
        moved: absolute links that begin with the first path get the second instead.

    Raises:
        OSError: as the file system gives it; what was copied until then stays.
    """
    _Copier(moved).directory(str(source), str(target))


def copy_attributes(source: str, target: str, status: os.stat_result) -> None:
    """Owner, mode, extended attributes and times of one entry; links are not followed."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    for name, value in attributes(source).items():
        with contextlib.suppress(OSError):  # trusted.* and security.* of an ordinary user; another file system
            os.setxattr(target, name, value, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(target, stat.S_IMODE(status.st_mode))  # after the owner, whose change clears setuid
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def attributes(path: str) -> dict[str, bytes]:
    """Extended attributes of one entry; none where the system has none."""
    if not hasattr(os, "listxattr"):
        return {}
    try:
        names = os.listxattr(path, follow_symlinks=False)
        return {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    except OSError:
        return {}


class _Copier:
    def __init__(self, moved: tuple[str, str] | None) -> None:
        self.moved = moved
        self.links: dict[tuple[int, int], str] = {}
        self.clones = True

    def directory(self, source: str, target: str) -> None:
        status = os.lstat(source)
        os.mkdir(target, 0o700)
        with _readable(source, status), os.scandir(source) as entries:
            for entry in entries:
                self.entry(entry.path, os.path.join(target, entry.name))
        copy_attributes(source, target, status)

    def entry(self, source: str, target: str) -> None:
        status = os.lstat(source)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            self.directory(source, target)
            return
        if kind == stat.S_IFSOCK:
            return
        if status.st_nlink > 1:
            first = self.links.setdefault((status.st_dev, status.st_ino), target)
            if first != target:
                os.link(first, target, follow_symlinks=False)
                return
        if kind == stat.S_IFREG:
            self.contents(source, target, status)
        elif kind == stat.S_IFLNK:
            os.symlink(self.destination(os.readlink(source)), target)
        elif kind == stat.S_IFIFO:
            os.mkfifo(target)
        else:
            os.mknod(target, status.st_mode, status.st_rdev)
        copy_attributes(source, target, status)

    def destination(self, link: str) -> str:
        if self.moved is None:
            return link
        old, new = self.moved
        return new + link[len(old) :] if link == old or link.startswith(old + "/") else link

    def contents(self, source: str, target: str, status: os.stat_result) -> None:
        with _readable(source, status), open(source, "rb") as reader, open(target, "xb") as writer:
            self.clones = self.clones and _clone(reader.fileno(), writer.fileno())
            if not self.clones:
                _copy_data(reader.fileno(), writer.fileno(), status.st_size)


@contextlib.contextmanager
def _readable(path: str, status: os.stat_result) -> Iterator[None]:
    """Let an ordinary user read what he has locked himself out of."""
    needed = stat.S_IRUSR | (stat.S_IXUSR if stat.S_ISDIR(status.st_mode) else 0)
    locked = status.st_mode & needed != needed and not os.access(path, os.R_OK)
    if locked:
        os.chmod(path, stat.S_IMODE(status.st_mode) | needed)
    try:
        yield
    finally:
        if locked:
            os.chmod(path, stat.S_IMODE(status.st_mode))


def _clone(source: int, target: int) -> bool:
    try:
        import fcntl

        fcntl.ioctl(target, _FICLONE, source)
    except (ImportError, OSError):
        return False
    return True


def _copy_data(source: int, target: int, size: int) -> None:
    """Copy what a file holds, leaving out its holes where the system tells them."""
    offset = 0
    while offset < size:
        end = size
        if hasattr(os, "SEEK_DATA"):
            try:
                offset = os.lseek(source, offset, os.SEEK_DATA)
                end = os.lseek(source, offset, os.SEEK_HOLE)
            except OSError:  # nothing but a hole from here on
                break
        while offset < end:
            block = os.pread(source, min(_CHUNK, end - offset), offset)
            if not block:
                size = offset
                break
            offset += os.pwrite(target, block, offset)
    os.ftruncate(target, size)
