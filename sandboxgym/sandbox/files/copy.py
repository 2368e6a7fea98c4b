"""Exact copies of directory trees.

1. A copy has the names, kinds, contents, holes, modes, times and extended attributes of the original, hard links among
   its files, and its owners where this process may set them. Sockets are left out: nobody listens to a copy.
2. Where the file system can share blocks between files (btrfs, xfs), contents are shared.
3. Links are copied as they are, unless it is said where the tree has moved to: then a copy's absolute links never lead
   into what it was made from.
4. Directories may be nested deeper than a path can be long.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sandboxgym.sandbox.files.deep_paths import DeepPath, DeepPaths

_FICLONE = 0x40049409
_CHUNK = 1 << 20


def copy_tree(source: Path, target: Path, *, moved: tuple[str, str] | None = None) -> None:
    """Copy a directory recursively.

    Args:
        source: a directory that nobody writes to meanwhile.
        target: is made; it must not exist.
        moved: absolute links that begin with the first path get the second instead.

    Raises:
        OSError: as the file system gives it; what was copied until then stays.
    """
    with DeepPaths() as paths:
        _Copier(paths, str(source), str(target), moved).run()


def copy_entry(
    source: str, target: str, status: os.stat_result, *, link: str | None = None, strict: bool = False
) -> None:
    """Copy an entry that is no directory: content, holes and attributes.

    Args:
        source: path of the entry.
        target: is made; it must not exist.
        status: of the entry.
        link: target of the copy if the entry is a symbolic link; by default the entry's.
        strict: see `copy_attributes`.
    """
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        with readable(source, status), open(source, "rb") as reader, open(target, "xb") as writer:
            if not _clone(reader.fileno(), writer.fileno()):
                _copy_data(reader.fileno(), writer.fileno(), status.st_size)
    elif kind == stat.S_IFLNK:
        os.symlink(os.readlink(source) if link is None else link, target)
    elif kind == stat.S_IFIFO:
        os.mkfifo(target)
    else:
        os.mknod(target, status.st_mode, status.st_rdev)
    copy_attributes(source, target, status, strict=strict)


def copy_attributes(source: str, target: str, status: os.stat_result, *, strict: bool = False) -> None:
    """Copy owner, mode, extended attributes and times of one entry; links are not followed.

    Args:
        source: path of the entry.
        target: path of its copy.
        status: of the entry.
        strict: raise if an extended attribute cannot be copied that this process may set. Else those are left out that
            the other file system does not take.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root of a container without the right to change owners
            os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    names: list[str] = []
    refused = PermissionError if strict else OSError  # trusted.* and security.* of an ordinary user
    if hasattr(os, "listxattr"):
        with contextlib.suppress(refused):
            names = os.listxattr(source, follow_symlinks=False)
    for name in names:
        with contextlib.suppress(refused):
            os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
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
    def __init__(self, paths: DeepPaths, source: str, target: str, moved: tuple[str, str] | None) -> None:
        self.paths = paths
        self.source = source
        self.target = target
        self.moved = moved
        self.links: dict[tuple[int, int], tuple[DeepPath, str]] = {}
        self.pending: list[DeepPath] = []
        self.made: list[tuple[DeepPath, os.stat_result]] = []
        self.unlocked: list[tuple[DeepPath, int]] = []

    def run(self) -> None:
        """Copy everything; the attributes of directories come last, for what is put into one changes its times."""
        self.make(DeepPath())
        try:
            while self.pending:
                self.directory(self.pending.pop())
            for place, status in reversed(self.made):
                copy_attributes(self.paths.path(self.source, place), self.paths.path(self.target, place), status)
        finally:
            for place, mode in reversed(self.unlocked):
                os.chmod(self.paths.path(self.source, place), mode)

    def make(self, place: DeepPath) -> None:
        status = os.lstat(self.paths.path(self.source, place))
        os.mkdir(self.paths.path(self.target, place), 0o700)
        self.made.append((place, status))
        self.pending.append(place)

    def directory(self, place: DeepPath) -> None:
        source = self.paths.path(self.source, place)
        status = os.lstat(source)
        if is_locked(source, status):  # until all that is in it was copied
            os.chmod(source, stat.S_IMODE(status.st_mode) | stat.S_IRUSR | stat.S_IXUSR)
            self.unlocked.append((place, stat.S_IMODE(status.st_mode)))
        with os.scandir(source) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            if is_folder:
                self.make(place.below(name))
            else:
                self.entry(place, name)

    def entry(self, place: DeepPath, name: str) -> None:
        source, target = self.paths.path(self.source, place, name), self.paths.path(self.target, place, name)
        status = os.lstat(source)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFSOCK:
            return
        if status.st_nlink > 1:
            first = self.links.setdefault((status.st_dev, status.st_ino), (place, name))
            if first != (place, name):
                os.link(self.paths.path(self.target, *first), target, follow_symlinks=False)
                return
        link = self.destination(os.readlink(source)) if kind == stat.S_IFLNK else None
        copy_entry(source, target, status, link=link)

    def destination(self, link: str) -> str:
        if self.moved is None:
            return link
        old, new = self.moved
        return new + link[len(old) :] if link == old or link.startswith(old + "/") else link


@contextlib.contextmanager
def readable(path: str, status: os.stat_result) -> Iterator[None]:
    """Let an ordinary user read a file that it has locked itself out of."""
    locked = is_locked(path, status)
    if locked:
        os.chmod(path, stat.S_IMODE(status.st_mode) | stat.S_IRUSR)
    try:
        yield
    finally:
        if locked:
            os.chmod(path, stat.S_IMODE(status.st_mode))


def is_locked(path: str, status: os.stat_result) -> bool:
    """True if the owner of a file or directory may not read it."""
    needed = stat.S_IRUSR | (stat.S_IXUSR if stat.S_ISDIR(status.st_mode) else 0)
    return status.st_mode & needed != needed and not os.access(
        path, os.R_OK | (os.X_OK if needed & stat.S_IXUSR else 0)
    )


def _clone(source: int, target: int) -> bool:
    try:
        import fcntl

        fcntl.ioctl(target, _FICLONE, source)
    except (ImportError, OSError):
        return False
    return True


def _copy_data(source: int, target: int, size: int) -> None:
    """Copy a file's content, leaving out its holes where the system reports them."""
    for offset, length in extents(source, size):
        end = offset + length
        while offset < end and (block := os.pread(source, min(_CHUNK, end - offset), offset)):
            offset += os.pwrite(target, block, offset)
    os.ftruncate(target, min(size, os.fstat(source).st_size))


def extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Data extents of a file: offsets and lengths; one for all of it where the system does not report holes."""
    if not hasattr(os, "SEEK_DATA"):
        return [(0, size)] if size else []
    found = []
    at = 0
    while at < size:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from there on
                break
            raise
        end = os.lseek(descriptor, at, os.SEEK_HOLE)
        found.append((at, end - at))
        at = end
    return found
