"""Directory trees of any depth, walked and deleted by file descriptor. Standard library only.

The trees may be hostile: nesting deeper than the longest path, names that are not text, modes without any permission,
files marked as immutable, entries that move meanwhile.

1. Nothing recurses and no path is put together; at most `KEPT` + 3 descriptors are open, whatever the depth.
2. No link is followed, and no other file system is entered.
3. `walk` continues where something is moved or deleted meanwhile.
4. `remove` deletes whatever this user can delete in spite of modes and flags. It raises only at the end, for the
   entries that are left.
"""

from __future__ import annotations

import errno
import os
import stat
import time

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

KEPT = 32
"""Directories on the path of a walk that are kept open; the others are opened again on the way up."""

_FOLDER = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"))
_BY_DESCRIPTOR = os.scandir in os.supports_fd and {os.open, os.unlink, os.rmdir} <= os.supports_dir_fd
"""False on Windows, where no sandbox runs either."""
_ATTEMPTS = 20
_PAUSE = 0.05
"""Seconds between two attempts to empty a directory that somebody still writes to."""
_GETFLAGS, _SETFLAGS = 0x80086601, 0x40086602
_UNCHANGEABLE = 0x10 | 0x20
"""The flags of ``chattr +i`` and ``chattr +a``."""
_SPREAD = 0x20000
"""The flag of ``chattr +T``: ext4 places each subdirectory, with its files, by itself."""


class _Level:
    """One directory on the path down a tree."""

    __slots__ = ("descriptor", "folders", "identity", "name")

    def __init__(self, name: str, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.name = name
        self.descriptor = descriptor
        """Open descriptor, or -1 while it is closed."""
        self.identity = status.st_dev, status.st_ino
        self.folders: list[str] = []
        """Names of subdirectories still to be entered."""


class _Trail:
    """A path from a directory to one below it, held with few descriptors.

    Args:
        directory: start of the trail.
        unlock: give this user the permission to enter where it lacks.
    """

    def __init__(self, directory: str, *, unlock: bool = False) -> None:
        self.unlock = unlock
        self.denied = False
        """A directory was there and could not be entered."""
        self.levels = [_Level(directory, self._open(directory, None))]

    @property
    def here(self) -> _Level:
        """Open descriptor of the deepest directory."""
        return self.levels[-1]

    def enter(self, name: str) -> bool:
        """Enter a subdirectory; False if that is impossible. `denied` tells of an errno other than of absence."""
        try:
            level = _Level(name, self._open(name, self.here.descriptor))
        except OSError as error:
            self.denied |= error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
            return False
        if level.identity[0] != self.here.identity[0]:
            os.close(level.descriptor)
            return False
        self.levels.append(level)
        if len(self.levels) > KEPT + 1:
            _close(self.levels[-KEPT - 1])
        return True

    def leave(self) -> str | None:
        """Go up one level; the name of the directory left in `here`, None if it is gone or this is the top."""
        last = self.levels.pop()
        if not self.levels:
            _close(last)
            return None
        if self.here.descriptor < 0:
            self._reopen(self.here, "..", last.descriptor)
        _close(last)
        return last.name if self.here.descriptor >= 0 or self._descend_again() else None

    def close(self) -> None:
        """Close all open descriptors. Idempotent."""
        for level in self.levels:
            _close(level)

    def _descend_again(self) -> bool:
        """Follow the names from the top again, after a move, while they still lead to the same directories."""
        for depth in range(1, len(self.levels)):
            self._reopen(self.levels[depth], self.levels[depth].name, self.levels[depth - 1].descriptor)
            if self.levels[depth].descriptor < 0:
                for lost in self.levels[depth:]:
                    _close(lost)
                del self.levels[depth:]
                return False
            if 1 < depth < len(self.levels) - KEPT:
                _close(self.levels[depth - 1])
        return True

    def _reopen(self, level: _Level, name: str, above: int) -> None:
        try:
            descriptor = self._open(name, above)
        except OSError:
            return
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) == level.identity:
            _close(level)
            level.descriptor = descriptor
        else:
            os.close(descriptor)

    def _open(self, name: str, above: int | None) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=above)
        except PermissionError:
            if not self.unlock:
                raise
            _let_in(name, above)
            return os.open(name, _FOLDER, dir_fd=above)


def _close(level: _Level) -> None:
    if level.descriptor >= 0:
        os.close(level.descriptor)
        level.descriptor = -1


def _let_in(name: str, above: int | None) -> None:
    """Give this user access to a directory that it owns. A link in its place is not followed."""
    if not hasattr(os, "O_PATH"):
        os.chmod(name, stat.S_IRWXU, dir_fd=above, follow_symlinks=False)
        return
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IRWXU)
    finally:
        os.close(descriptor)


def walk(directory: str, *, denied: list[str] | None = None) -> Iterator[os.DirEntry[str]]:
    """Iterate over every entry below a directory, each directory before its entries.

    An entry can be asked for its status until the next one is taken, by which time its directory may be closed.

    Args:
        directory: to begin with; nothing is found in one that cannot be opened.
        denied: gets the names of directories that this user may not read.
    """
    if not _BY_DESCRIPTOR:
        yield from _walk_by_path(directory)
        return
    try:
        trail = _Trail(directory)
    except OSError as error:
        if denied is not None and isinstance(error, PermissionError):
            denied.append(directory)
        return
    entered = {trail.here.identity}  # one that is moved meanwhile may come by again
    try:
        fresh = True
        while trail.levels:
            here = trail.here
            if fresh:
                try:
                    with os.scandir(here.descriptor) as entries:
                        for entry in entries:
                            yield entry
                            if entry.is_dir(follow_symlinks=False):
                                here.folders.append(entry.name)
                except OSError:
                    pass  # deleted meanwhile
            if not here.folders:
                trail.leave()
                fresh = False
                continue
            name = here.folders.pop()
            fresh = trail.enter(name)
            if fresh and trail.here.identity in entered:
                trail.leave()
                fresh = False
            elif fresh:
                entered.add(trail.here.identity)
            if trail.denied and denied is not None:
                denied.append(name)
            trail.denied = False
    finally:
        trail.close()


def _walk_by_path(directory: str) -> Iterator[os.DirEntry[str]]:
    pending = [directory]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:
            continue


def remove(path: str) -> None:
    """Delete a directory with all its entries, or a file. No effect if there is none.

    Raises:
        OSError: something in it cannot be deleted; all else is gone.
    """
    if not _BY_DESCRIPTOR and os.path.isdir(path) and not os.path.islink(path):
        import shutil

        shutil.rmtree(path)
        return
    for attempt in range(_ATTEMPTS):
        error = _remove_once(path)
        if error is None:
            return
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise error
        time.sleep(_PAUSE * bool(attempt))  # a process that was just killed may still have written
    assert error is not None
    raise error


def _remove_once(path: str) -> OSError | None:
    """Try once to delete a tree; the reason why it still exists."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return None
        trail = _Trail(path, unlock=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    try:
        first = _empty(trail)
    finally:
        trail.close()
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return first or error
    return None


def _empty(trail: _Trail) -> OSError | None:
    """Delete all entries below the start of a trail; the reasons why some could not be deleted."""
    top = trail.here
    first = _clear(top)
    while True:
        here = trail.here
        failure: OSError | None = None
        if here.folders:
            if trail.enter(name := here.folders.pop()):
                failure = _clear(trail.here)
            else:
                failure = _gone(name, here.descriptor, os.rmdir)
        elif here is top:
            return first
        elif (left := trail.leave()) is not None:
            failure = _gone(left, trail.here.descriptor, os.rmdir)
        first = first or failure


def _clear(level: _Level) -> OSError | None:
    """Delete all entries that are not directories, and note the directories for later."""
    first: OSError | None = None
    try:
        with os.scandir(level.descriptor) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    level.folders.append(entry.name)
                    continue
                failure = _gone(entry.name, level.descriptor, os.unlink)
                first = first or failure
    except OSError as error:
        return first or error
    return first


def _gone(name: str, above: int, delete: Any) -> OSError | None:
    """Delete an entry of a directory; the reason why that failed, or None."""
    try:
        delete(name, dir_fd=above)
    except FileNotFoundError:
        return None
    except PermissionError:
        try:
            _free(name, above)
            delete(name, dir_fd=above)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error
    except OSError as error:
        return error
    return None


def _free(name: str, above: int) -> None:
    """Make an entry deletable: by the mode of its directory, and by the flags of both."""
    mode = os.fstat(above).st_mode
    _flag(above, off=_UNCHANGEABLE)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(above, stat.S_IRWXU)
    if stat.S_IFMT(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
        try:
            descriptor = os.open(name, _FOLDER & ~getattr(os, "O_DIRECTORY", 0), dir_fd=above)
        except OSError:
            return
        _flag(descriptor, off=_UNCHANGEABLE)
        os.close(descriptor)


def spread(path: str) -> None:
    """Have each subdirectory made in a directory placed by itself, where the file system has a flag for that.

    Without a journal, ext4 looks at every inode deleted within the last minutes before it uses another one of the same
    region: files of a subdirectory elsewhere are made several times as fast.

    Args:
        path: of the directory, of this user.
    """
    if fcntl is None:
        return
    descriptor = os.open(path, _FOLDER)
    try:
        _flag(descriptor, on=_SPREAD)
    finally:
        os.close(descriptor)


def _flag(descriptor: int, *, on: int = 0, off: int = 0) -> None:
    """Set and clear flags of ``chattr``, where this process may and the file system has them."""
    if fcntl is None:
        return
    try:
        flags = int.from_bytes(fcntl.ioctl(descriptor, _GETFLAGS, bytes(4)), "little")
        if (flags & ~off) | on != flags:
            fcntl.ioctl(descriptor, _SETFLAGS, ((flags & ~off) | on).to_bytes(4, "little"))
    except OSError:
        pass
