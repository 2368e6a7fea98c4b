"""Several layers made into one that shows the same over whatever lies below, and copies of a layer still in use.

Overlayfs allows 500 layers, but every look-up of what is not there asks each of them: a deep stack is merged before a
box starts on it. Whiteouts, opaque directories, renamed directories, hard links, modes, owners, times and extended
attributes are kept; files are linked, not copied, for a frozen layer never changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence

from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.layers import Layer, OverlayTree

DEEPEST = 48
"""Layers that a box may start on without merging."""
KEPT = 8
"""Newest layers that are left alone, as siblings are likely to share the rest."""
LIMIT = 400
"""Layers that cannot be merged are refused beyond this; the kernel's limit is 500, with those of the image."""

_FICLONE = 0x40049409
_OPAQUE, _REDIRECT, _ORIGIN = "opaque", "redirect", "origin"

Transfer = Callable[[str, str], None]


def prefix(*, rootless: bool) -> str:
    """How the names of overlayfs's own extended attributes begin."""
    return "user.overlay." if rootless else "trusted.overlay."


def is_whiteout(status: os.stat_result) -> bool:
    """Whether a file of a layer says that its name was deleted."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def own_attribute(path: str, name: str, *, rootless: bool) -> bytes | None:
    """An extended attribute of overlayfs's own."""
    try:
        return os.getxattr(path, prefix(rootless=rootless) + name, follow_symlinks=False)
    except OSError:
        return None


def mark_deletions(folder: str, *, rootless: bool) -> None:
    """Say that a directory holds whiteouts; else its listing gives their names where nothing lies below it."""
    if own_attribute(folder, _ORIGIN, rootless=rootless) is None:
        os.setxattr(folder, prefix(rootless=rootless) + _ORIGIN, b"")


def squash(tree: OverlayTree, *, deepest: int = DEEPEST, kept: int = KEPT) -> None:
    """Make the stack of a tree less deep, if it is deeper than ``deepest``; its files stay the same.

    Raises:
        SandboxError: it cannot be made less deep than `LIMIT`.
    """
    layers = tree.layers
    if len(layers) <= deepest:
        return
    store = tree.store
    fewer, made = list(layers[:kept]), []
    try:
        for run in _runs(layers[kept:], rootless=tree.rootless):
            if len(run) > 1:
                key = tuple(layer.path for layer in run)
                merged = store.merged.get(key)
                if merged is None or not merged.holds:
                    merged = store.new()
                    made.append(merged)
                    _merge([str(layer.files) for layer in run], str(merged.files), _link, rootless=tree.rootless)
                    store.merged[key] = merged
                fewer.append(merged)
            else:
                fewer += run
        if len(fewer) > LIMIT:
            raise SandboxError(
                f"{len(fewer)} nested snapshots in each of which a directory was renamed cannot be merged; the kernel "
                "stacks no more"
            )
        tree.replace_layers(fewer)
    finally:
        store.drop(made)


def _runs(layers: Sequence[Layer], *, rootless: bool) -> list[list[Layer]]:
    """The layers in groups that can be merged.

    A directory that was renamed names its old path in the layers below it, so only the lowest of a group may have one.
    """
    runs: list[list[Layer]] = [[]]
    for layer in layers:
        runs[-1].append(layer)
        if has_redirect(layer, rootless=rootless):
            runs.append([])
    return [run for run in runs if run]


def has_redirect(layer: Layer, *, rootless: bool) -> bool:
    """Whether a directory of this layer was renamed; found once."""
    if rootless:  # which the kernel forbids there
        return False
    if layer.redirects is None:
        layer.redirects = any(
            own_attribute(folder, _REDIRECT, rootless=rootless) is not None for folder, _, _ in os.walk(layer.files)
        )
    return layer.redirects


def copy_layer(source: Layer, target: Layer, *, rootless: bool) -> None:
    """Copy what a box wrote so far; nothing may write meanwhile."""
    linked: dict[tuple[int, int], str] = {}

    def transfer(path: str, copy: str) -> None:
        status = os.lstat(path)
        if status.st_nlink > 1:
            first = linked.setdefault((status.st_dev, status.st_ino), copy)
            if first != copy:
                os.link(first, copy, follow_symlinks=False)
                return
        copy_file(path, copy, status)

    _merge([str(source.files)], str(target.files), transfer, rootless=rootless)


def _merge(sources: Sequence[str], target: str, transfer: Transfer, *, rootless: bool) -> None:
    """Put what the layers ``sources`` (topmost first) show together into the empty directory ``target``."""
    opaque = prefix(rootless=rootless) + _OPAQUE
    folders = [("", [*sources], False)]
    made: list[tuple[str, str]] = []
    copy_attributes(sources[0], target)
    made.append((sources[0], target))
    try:
        while folders:
            inside, parts, over = folders.pop()
            decided: set[str] = set()
            deleted = False
            for at, part in enumerate(parts):
                with os.scandir(os.path.join(part, inside)) as entries:
                    found = [entry for entry in entries if entry.name not in decided]
                for entry in found:
                    decided.add(entry.name)
                    name = os.path.join(inside, entry.name)
                    copy = os.path.join(target, name)
                    if not entry.is_dir(follow_symlinks=False):
                        if is_whiteout(entry.stat(follow_symlinks=False)):
                            if over:  # nothing below shows anyway, and a listing would give the name
                                continue
                            deleted = True
                        transfer(entry.path, copy)
                        continue
                    shown, closed = _shown(parts[at:], name, rootless=rootless)
                    os.mkdir(copy)
                    copy_attributes(entry.path, copy)
                    if closed:
                        os.setxattr(copy, opaque, b"y")
                    for other in shown[1:]:
                        redirect = own_attribute(os.path.join(other, name), _REDIRECT, rootless=rootless)
                        if redirect is not None:
                            os.setxattr(copy, prefix(rootless=rootless) + _REDIRECT, redirect)
                    made.append((entry.path, copy))
                    folders.append((name, shown, closed))
            if deleted:
                mark_deletions(os.path.join(target, inside), rootless=rootless)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise SandboxError("a sandbox's directories are nested deeper than a path can be long") from error
        raise
    for source, copy in reversed(made):  # times last, for whatever is put into a directory changes them
        status = os.stat(source)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))


def _shown(parts: Sequence[str], name: str, *, rootless: bool) -> tuple[list[str], bool]:
    """Which layers a directory shows, and whether it hides all that lies below them."""
    shown: list[str] = []
    for part in parts:
        path = os.path.join(part, name)
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISDIR(status.st_mode):
            return shown, True
        shown.append(part)
        if own_attribute(path, _OPAQUE, rootless=rootless) == b"y":
            return shown, True
    return shown, False


def copy_attributes(source: str, copy: str) -> None:
    """Owner, mode and extended attributes of a file or directory."""
    status = os.lstat(source)
    with contextlib.suppress(PermissionError):  # without privileges there is one owner
        os.chown(copy, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(copy, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        with contextlib.suppress(PermissionError):
            os.setxattr(copy, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)


def _link(path: str, copy: str) -> None:
    try:
        os.link(path, copy, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EMLINK:  # whiteouts of one layer are one file with many names
            raise
        copy_file(path, copy, os.lstat(path))


def copy_file(path: str, copy: str, status: os.stat_result) -> None:
    """A file that is no directory, with all its attributes and holes."""
    if stat.S_ISREG(status.st_mode):
        with open(path, "rb") as source, open(copy, "xb") as target:
            try:
                fcntl.ioctl(target, _FICLONE, source.fileno())
            except OSError:
                for start, length in extents(source.fileno(), status.st_size):
                    _copy_range(source.fileno(), target.fileno(), start, length)
                os.ftruncate(target.fileno(), status.st_size)
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(path), copy)
    else:
        os.mknod(copy, status.st_mode, status.st_rdev)
    copy_attributes(path, copy)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Where a file holds data: offsets and lengths."""
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


def _copy_range(source: int, target: int, start: int, length: int) -> None:
    os.lseek(target, start, os.SEEK_SET)
    while length:
        done = os.sendfile(target, source, start, length)
        if not done:
            return
        start, length = start + done, length - done
