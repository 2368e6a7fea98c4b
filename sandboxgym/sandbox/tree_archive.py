"""Durable form of what a sandbox has written: a tar archive, checked before any of it is trusted.

1. The first member is a header in JSON: format, base (the root file system below), what was deleted since, and facts
   that only its maker reads. The other members are what was added or changed, with exact times and extended attributes.
2. Reading checks every member first: no absolute name, no ``..``, no device, no setuid or setgid file, no hard link to
   what is not in the archive, nothing below a link. What is refused has written nothing.
3. What packs drops no bit in silence: a setuid or setgid bit, which no reader would accept, is dropped with a warning.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch
from sandboxgym.sandbox.tree_copy import attributes

log = logging.getLogger("sandboxgym")

FORMAT = 1
_HEADER = ".sandboxgym-tree.json"
_XATTR = "SCHILY.xattr."
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Header:
    """What an archive says of itself."""

    base: str
    deleted: tuple[str, ...] = ()
    """Paths relative to the root, each gone with all below it before the members are put in place."""
    facts: Mapping[str, str] = field(default_factory=dict)


class Writer:
    """Collects an archive.

    Args:
        header: its first member.
    """

    def __init__(self, header: Header) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.TarFile(
            fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        )
        self._links: dict[tuple[int, int], str] = {}
        content = {"format": FORMAT, "base": header.base, "deleted": header.deleted, "facts": dict(header.facts)}
        self.member(tarfile.TarInfo(_HEADER), json.dumps(content).encode())

    def member(self, info: tarfile.TarInfo, content: bytes | io.BufferedIOBase | None = None) -> None:
        """Add a member; its size is set here if ``content`` is bytes."""
        if isinstance(content, bytes):
            info.size = len(content)
            content = io.BytesIO(content)
        elevated = info.mode & (stat.S_ISUID | stat.S_ISGID)
        if elevated and not info.isdir():
            log.warning("%s: an archive does not keep the mode bits %04o", info.name, elevated)
            info.mode &= ~elevated
        self._tar.addfile(info, content)

    def file(self, root: Path, name: str) -> None:
        """Add an entry of a directory, without what is below it; sockets and devices are left out."""
        path = os.path.join(root, name)
        status = os.lstat(path)
        info = tarfile.TarInfo(name)
        info.mode, info.mtime = stat.S_IMODE(status.st_mode), status.st_mtime
        info.uid, info.gid = status.st_uid, status.st_gid
        seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
        records = {"mtime": f"{seconds}.{nanoseconds:09}"}
        for key, value in attributes(path).items():
            if key.startswith("user."):  # no reader accepts others
                records[_XATTR + key] = value.decode("utf-8", "surrogateescape")
        info.pax_headers = records
        if stat.S_ISREG(status.st_mode):
            first = self._links.setdefault((status.st_dev, status.st_ino), name)
            if status.st_nlink > 1 and first != name:
                info.type, info.linkname = tarfile.LNKTYPE, first
                self.member(info)
                return
            info.size = status.st_size
            with open(path, "rb") as content:
                self.member(info, content)
        elif stat.S_ISDIR(status.st_mode):
            info.type = tarfile.DIRTYPE
            self.member(info)
        elif stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            self.member(info)
        elif stat.S_ISFIFO(status.st_mode):
            info.type = tarfile.FIFOTYPE
            self.member(info)

    def finish(self) -> bytes:
        """The archive."""
        self._tar.close()
        return self._buffer.getvalue()


class Reader:
    """An archive that was checked.

    Args:
        archive: as `Writer` made it.
        base: what it must be a change of.

    Raises:
        SnapshotCorrupt: not such an archive, or with a member that is not accepted.
        SnapshotMismatch: of another base.
    """

    def __init__(self, archive: bytes, *, base: str) -> None:
        try:
            self._tar = tarfile.TarFile(fileobj=io.BytesIO(archive), encoding="utf-8", errors="surrogateescape")
            first, *members = self._tar.getmembers()
            content = self._tar.extractfile(first) if first.name == _HEADER else None
            if content is None:
                raise ValueError(f"expected {_HEADER} first, found {first.name!r}")
            fields = json.loads(content.read())
            if fields["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, found {fields['format']!r}")
            self.header = Header(fields["base"], tuple(fields["deleted"]), fields["facts"])
            for name in self.header.deleted:
                _check_name(name)
        except (tarfile.TarError, ValueError, KeyError, TypeError, EOFError) as error:
            raise SnapshotCorrupt(f"not an archive of a sandbox's files: {error}") from error
        _check(members)
        self._archive = archive
        if self.header.base != base:
            raise SnapshotMismatch(f"the archive changes {self.header.base}, but this sandbox is made of {base}")
        self.members = members

    def content(self, info: tarfile.TarInfo) -> Iterator[bytes]:
        """Content of a regular member in blocks."""
        stream = self._tar.extractfile(info)
        while stream is not None and (block := stream.read(_CHUNK)):
            yield block

    def rest(self) -> bytes:
        """The archive without its header, as any program that knows tar takes it."""
        return self._archive[self.members[0].offset :] if self.members else bytes(tarfile.RECORDSIZE)

    def extract(self, root: Path) -> None:
        """Delete and write under a directory as the archive says.

        Raises:
            SnapshotCorrupt: the directory holds a link where the archive expects a directory.
        """
        for name in self.header.deleted:
            path = _target(root, name)
            if path is not None:
                _remove(path)
        folders = []
        for info in self.members:
            path = _target(root, info.name)
            if path is None:
                raise SnapshotCorrupt(f"{info.name}: the directory above it is a link or missing")
            if info.isdir():
                if not os.path.isdir(path) or os.path.islink(path):
                    _remove(path)
                    os.mkdir(path, 0o700)
                folders.append((path, info))
                continue
            _remove(path)
            if info.islnk():
                linked = _target(root, info.linkname)
                if linked is None:
                    raise SnapshotCorrupt(f"{info.name}: a link to {info.linkname!r}, which is not there")
                os.link(linked, path, follow_symlinks=False)
                continue
            if info.issym():
                os.symlink(info.linkname, path)
            elif info.isfifo():
                os.mkfifo(path)
            else:
                _write(path, self.content(info), info.size)
            _apply(path, info)
        for path, info in reversed(folders):  # a parent after its children, whose making changes its times
            _apply(path, info)


def entries(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every entry below a directory as (name relative to it, status), parents first, in order of names."""
    pending = [""]
    while pending:
        folder = pending.pop()
        names = sorted(os.listdir(os.path.join(root, folder)))
        folders = []
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(os.path.join(root, path))
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)
        pending.extend(reversed(folders))


def changes(base: Path | None, root: Path) -> tuple[list[str], list[str]]:
    """How a directory differs from another: (added or changed, deleted), relative names.

    Contents are compared where nothing else differs, since a time proves nothing.
    """
    before = dict(entries(base)) if base is not None else {}
    changed = []
    for name, status in entries(root):
        old = before.pop(name, None)
        if old is None or base is None or not _same(os.path.join(base, name), old, os.path.join(root, name), status):
            changed.append(name)
    deleted: list[str] = []
    for name in sorted(before):
        if not any(str(parent) in before for parent in PurePosixPath(name).parents if str(parent) != "."):
            deleted.append(name)
    return changed, deleted


def _same(first: str, before: os.stat_result, second: str, after: os.stat_result) -> bool:
    kind = stat.S_IFMT(after.st_mode)
    exact = ("st_mode", "st_uid", "st_gid", "st_mtime_ns")
    if any(getattr(before, name) != getattr(after, name) for name in exact):
        return False
    if kind != stat.S_IFDIR and (before.st_nlink != after.st_nlink or before.st_size != after.st_size):
        return False
    if attributes(first) != attributes(second):
        return False
    if kind == stat.S_IFLNK:
        return os.readlink(first) == os.readlink(second)
    if kind != stat.S_IFREG:
        return True
    with open(first, "rb") as one, open(second, "rb") as other:
        while block := one.read(_CHUNK):
            if block != other.read(_CHUNK):
                return False
    return True


def _check(members: Iterable[tarfile.TarInfo]) -> None:
    names: set[str] = {_HEADER}
    links: set[str] = set()
    files: set[str] = set()
    for info in members:
        _check_name(info.name)
        if info.name in names:
            raise SnapshotCorrupt(f"{info.name}: twice in the archive")
        names.add(info.name)
        if any(str(parent) in links for parent in PurePosixPath(info.name).parents):
            raise SnapshotCorrupt(f"{info.name}: below a link")
        plain = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.sparse is None  # type: ignore[attr-defined]
        if not (plain or info.isdir() or info.issym() or info.islnk() or info.isfifo()):
            raise SnapshotCorrupt(f"{info.name}: expected a file, directory, link or pipe, found type {info.type!r}")
        if info.mode & (stat.S_ISUID | stat.S_ISGID) and not info.isdir():
            raise SnapshotCorrupt(f"{info.name}: setuid or setgid (mode {info.mode:04o})")
        if any(key.startswith(_XATTR) and not key.startswith(_XATTR + "user.") for key in info.pax_headers):
            raise SnapshotCorrupt(f"{info.name}: an extended attribute outside user.*")
        if info.islnk() and info.linkname not in files:
            raise SnapshotCorrupt(
                f"{info.name}: a hard link to {info.linkname!r}, which is no earlier file of the archive"
            )
        if info.issym():
            links.add(info.name)
        elif info.isreg():
            files.add(info.name)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or name.startswith("/") or "\0" in name:
        raise SnapshotCorrupt(f"expected a relative name, found {name!r}")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise SnapshotCorrupt(f"{name!r} leaves the archive or is not plain")


def _target(root: Path, name: str) -> str | None:
    """Where a member lies; None if the directory above it is a link, leads through one or is missing."""
    folder = str(root)
    for part in name.split("/")[:-1]:
        folder = os.path.join(folder, part)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(folder).st_mode):
                continue
        return None
    return os.path.join(root, name)


def _remove(path: str) -> None:
    from sandboxgym.leftovers import remove_tree

    if os.path.lexists(path):
        remove_tree(Path(path))


def _write(path: str, blocks: Iterable[bytes], size: int) -> None:
    with open(path, "xb") as file:
        for block in blocks:
            if block.count(0) == len(block):
                file.seek(len(block), os.SEEK_CUR)  # a hole
            else:
                file.write(block)
        file.truncate(size)


def _apply(path: str, info: tarfile.TarInfo) -> None:
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        os.chown(path, info.uid, info.gid, follow_symlinks=False)
    for key, value in info.pax_headers.items():
        if key.startswith(_XATTR) and hasattr(os, "setxattr"):
            data = value.encode("utf-8", "surrogateescape")
            with contextlib.suppress(OSError):  # a file system without them
                os.setxattr(path, key.removeprefix(_XATTR), data, follow_symlinks=False)
    if not info.issym():
        os.chmod(path, info.mode)
    seconds, _, fraction = info.pax_headers.get("mtime", str(info.mtime)).partition(".")
    mtime = int(seconds) * 10**9 + int(fraction.ljust(9, "0")[:9] or 0)
    os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
