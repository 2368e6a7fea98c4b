"""Merge several layers into one that shows the same files over any layers below, and copy a layer still in use.

Overlayfs allows 500 layers, but every look-up of a missing file asks each of them: a deep stack is merged before a
container starts on it. Whiteouts, opaque directories, renamed directories, hard links, modes, owners, times and
extended attributes are kept; files are linked, not copied, for a frozen layer never changes. Directories may be nested
deeper than the longest path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence

from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.files.copy import copy_attributes, copy_entry
from sandboxgym.sandbox.files.deep_paths import DeepPath, DeepPaths
from sandboxgym.sandbox.layers.store import OverlayTree, StoredLayer

DEEPEST = 48
"""Layers that a container may start on without merging."""
KEPT = 8
"""Newest layers that are left alone, as siblings are likely to share the rest."""
LIMIT = 400
"""Layers that cannot be merged are refused beyond this; the kernel's limit is 500, with those of the image."""

_OPAQUE, _REDIRECT, _ORIGIN = "opaque", "redirect", "origin"

_ENTERED = stat.S_IRUSR | stat.S_IXUSR

Transfer = Callable[["_Merging", str, str, DeepPath, str], None]
"""Called with the paths of a file in a layer and of its copy, and with its place in both."""


def prefix(*, rootless: bool) -> str:
    """Prefix of the names of overlayfs's own extended attributes."""
    return "user.overlay." if rootless else "trusted.overlay."


def is_whiteout(status: os.stat_result) -> bool:
    """True if a file of a layer is a whiteout: its name was deleted."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def own_attribute(path: str, name: str, *, rootless: bool) -> bytes | None:
    """One of overlayfs's own extended attributes."""
    try:
        return os.getxattr(path, prefix(rootless=rootless) + name, follow_symlinks=False)
    except OSError:
        return None


def mark_deletions(folder: str, *, rootless: bool) -> None:
    """Mark a directory as containing whiteouts; else overlayfs lists their names where no layer below has it."""
    if own_attribute(folder, _ORIGIN, rootless=rootless) is None:
        os.setxattr(folder, prefix(rootless=rootless) + _ORIGIN, b"")


def squash(tree: OverlayTree, *, deepest: int = DEEPEST, kept: int = KEPT) -> None:
    """Reduce the stack of a tree to ``deepest`` layers if it is deeper; its files stay the same.

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
                    _merge([str(layer.files) for layer in run], str(merged.files), _Linking(), rootless=tree.rootless)
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


def _runs(layers: Sequence[StoredLayer], *, rootless: bool) -> list[list[StoredLayer]]:
    """Layers in groups that can be merged.

    A directory that was renamed names its old path in the layers below it, so only the lowest of a group may have one.
    """
    runs: list[list[StoredLayer]] = [[]]
    for layer in layers:
        runs[-1].append(layer)
        if has_redirect(layer, rootless=rootless):
            runs.append([])
    return [run for run in runs if run]


def has_redirect(layer: StoredLayer, *, rootless: bool) -> bool:
    """True if a directory of this layer was renamed; found once per layer."""
    if rootless:  # which the kernel forbids there
        return False
    if layer.redirects is None:
        top = str(layer.files)
        with DeepPaths() as paths:
            layer.redirects = any(
                own_attribute(paths.path(top, place), _REDIRECT, rootless=rootless) is not None
                for place in paths.places(top)
            )
    return layer.redirects


def copy_layer(source: StoredLayer, target: StoredLayer, *, rootless: bool) -> None:
    """Copy the present writes of a container; nothing may write meanwhile."""
    _merge([str(source.files)], str(target.files), _Copying(), rootless=rootless)


def duplicate_layer(source: str, target: str, *, rootless: bool) -> None:
    """Copy a layer to an empty directory: files are linked, or copied where they cannot be."""
    _merge([source], target, _Linking(), rootless=rootless)


class _Copying:
    """File copies that keep hard links within a layer."""

    def __init__(self) -> None:
        self.linked: dict[tuple[int, int], tuple[DeepPath, str]] = {}

    def __call__(self, merging: _Merging, path: str, copy: str, place: DeepPath, name: str) -> None:
        status = os.lstat(path)
        if status.st_nlink > 1:
            first = self.linked.setdefault((status.st_dev, status.st_ino), (place, name))
            if first != (place, name):
                os.link(merging.paths.path(merging.target, *first), copy, follow_symlinks=False)
                return
        copy_entry(path, copy, status, strict=True)


def _merge(sources: Sequence[str], target: str, transfer: Transfer, *, rootless: bool) -> None:
    """Merge what the layers ``sources`` (topmost first) show into the empty directory ``target``."""
    with DeepPaths() as paths:
        _Merging(paths, target, transfer, rootless=rootless).run(sources)


class _Merging:
    """State of one `_merge`.

    Args:
        paths: for all layers.
        target: of the copy.
        transfer: what puts a file there that is no directory.
        rootless: whose layers they are.
    """

    def __init__(self, paths: DeepPaths, target: str, transfer: Transfer, *, rootless: bool) -> None:
        self.paths = paths
        self.target = target
        self.transfer = transfer
        self.rootless = rootless
        self.made: list[tuple[DeepPath, os.stat_result]] = []
        """Directories with the originals that they copy, each before those in it."""
        self.unlocked: list[tuple[str, DeepPath, int]] = []
        """Directories that this user may not read, and the modes they had."""
        self.pending: list[tuple[DeepPath, Sequence[str], bool]] = []
        """Directories, the layers that they show, and True if these hide all layers below."""

    def run(self, sources: Sequence[str]) -> None:
        """Merge everything; modes and times of directories are set last."""
        self.folder(DeepPath(), sources, closed=False)
        try:
            while self.pending:
                place, parts, closed = self.pending.pop()
                self.entries(place, parts, closed=closed)
        finally:
            for part, place, mode in reversed(self.unlocked):
                os.chmod(self.paths.path(part, place), mode)
        for place, status in reversed(self.made):
            copy = self.paths.path(self.target, place)
            if os.geteuid() != 0:
                os.chmod(copy, stat.S_IMODE(status.st_mode))
            os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))

    def folder(self, place: DeepPath, shown: Sequence[str], *, closed: bool) -> None:
        """Make an existing directory of the target a copy of those in ``shown``."""
        source, copy = self.paths.path(shown[0], place), self.paths.path(self.target, place)
        status = os.lstat(source)
        copy_attributes(source, copy, status, strict=True)
        if os.geteuid() != 0:
            os.chmod(copy, stat.S_IRWXU)  # until it is full
        self.made.append((place, status))
        self.pending.append((place, shown, closed))

    def entries(self, place: DeepPath, parts: Sequence[str], *, closed: bool) -> None:
        """Transfer the files of a directory, and make its subdirectories."""
        decided: set[str] = set()
        deleted = False
        for at, part in enumerate(parts):
            self.unlock(part, place)
            with os.scandir(self.paths.path(part, place)) as entries:
                found = [entry for entry in entries if entry.name not in decided]
                kinds = [
                    stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False).st_mode
                    for entry in found
                ]
            for entry, kind in zip(found, kinds, strict=True):
                name = entry.name
                decided.add(name)
                if kind == stat.S_IFDIR:
                    self.enter(place.below(name), parts[at:])
                    continue
                path, copy = self.paths.path(part, place, name), self.paths.path(self.target, place, name)
                if stat.S_ISCHR(kind) and is_whiteout(os.lstat(path)):
                    if closed:  # nothing below shows anyway, and a listing would give the name
                        continue
                    deleted = True
                self.transfer(self, path, copy, place, name)
        if deleted:
            mark_deletions(self.paths.path(self.target, place), rootless=self.rootless)

    def enter(self, place: DeepPath, parts: Sequence[str]) -> None:
        """Make a directory that the first of the layers has."""
        shown, closed = self.shown(parts, place)
        copy = self.paths.path(self.target, place)
        os.mkdir(copy)
        self.folder(place, shown, closed=closed)
        if closed:
            os.setxattr(copy, prefix(rootless=self.rootless) + _OPAQUE, b"y")
        for other in shown[1:]:
            redirect = own_attribute(self.paths.path(other, place), _REDIRECT, rootless=self.rootless)
            if redirect is not None:
                os.setxattr(copy, prefix(rootless=self.rootless) + _REDIRECT, redirect)

    def shown(self, parts: Sequence[str], place: DeepPath) -> tuple[list[str], bool]:
        """The layers that a directory shows, and True if it hides all layers below."""
        shown: list[str] = []
        for part in parts:
            try:
                path = self.paths.path(part, place)
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not stat.S_ISDIR(status.st_mode):
                return shown, True
            shown.append(part)
            if own_attribute(path, _OPAQUE, rootless=self.rootless) == b"y":
                return shown, True
        return shown, False

    def unlock(self, part: str, place: DeepPath) -> None:
        """Let an ordinary user read a directory that a container, in which it is root, has locked."""
        path = self.paths.path(part, place)
        mode = stat.S_IMODE(os.lstat(path).st_mode) if os.geteuid() != 0 else stat.S_IRWXU
        if mode & _ENTERED != _ENTERED:
            os.chmod(path, mode | _ENTERED)
            self.unlocked.append((part, place, mode))


class _Linking:
    """Hard links of files, with copies where linking fails."""

    def __init__(self) -> None:
        self.copying = _Copying()

    def __call__(self, merging: _Merging, path: str, copy: str, place: DeepPath, name: str) -> None:
        try:
            os.link(path, copy, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.EMLINK:  # whiteouts of one layer are one file with many names
                copy_entry(path, copy, os.lstat(path), strict=True)
            elif error.errno in (errno.EXDEV, errno.EPERM):  # a borrowed layer lies on another file system
                self.copying(merging, path, copy, place, name)
            else:
                raise
