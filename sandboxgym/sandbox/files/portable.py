"""Durable form of a sandbox's writes: a tar archive, checked before any of it is trusted.

1. The first member is a header in JSON: format, base (the root file system below), deletions since, and facts that only
   its maker reads. The other members are the added and changed files, with exact times and extended attributes.
2. Reading checks every member first: no absolute name, no ``..``, no device, no setuid or setgid file, no hard link to
   a file outside the archive, nothing below a link. Their number and sizes are bounded (``members.py``). A refused
   archive has written nothing.
3. Packing drops nothing in silence: a setuid or setgid bit, which no reader would accept, is dropped with a warning.
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

from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.files import members as checked
from sandboxgym.sandbox.files.copy import attributes
from sandboxgym.sandbox.files.members import MOST, Member, check_name

log = logging.getLogger("sandboxgym")

FORMAT = 1
_HEADER = ".sandboxgym-tree.json"
_XATTR = "SCHILY.xattr."
PREFIXES = (_XATTR, "LIBARCHIVE.xattr.")
"""Prefixes of the extended headers of its members, beside those of POSIX."""
_OWN = tuple(prefix + "user." for prefix in PREFIXES)
_CHUNK = 1 << 16
_LARGEST_HEADER = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ArchiveHeader:
    """Header of a portable archive of files."""

    base: str
    deleted: tuple[str, ...] = ()
    """Paths relative to the root, each gone with all below it before the members are put in place."""
    facts: Mapping[str, str] = field(default_factory=dict)


class ArchiveWriter:
    """Writer of a portable archive of files.

    Args:
        header: its first member.
    """

    def __init__(self, header: ArchiveHeader) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.TarFile(
            fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        )
        self._links: dict[tuple[int, int], str] = {}
        self._number = 0
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
        self._number += 1
        if self._number > MOST:
            raise SandboxError(f"what was written cannot be packed: expected at most {MOST} files")
        self._tar.addfile(info, content)
        self._tar.members.clear()  # type: ignore[attr-defined]  # of no use in writing

    def file(self, root: Path, name: str) -> None:
        """Add an entry of a directory, without its contents; sockets and devices are left out."""
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
        """Close and return the archive."""
        self._tar.close()
        return self._buffer.getvalue()


class Reader:
    """Reader of an archive that was checked.

    Args:
        archive: as `ArchiveWriter` made it.
        base: what it must be a change of.

    Raises:
        SnapshotCorrupt: not such an archive, or with a member that is not accepted.
        SnapshotMismatch: of another base.
    """

    def __init__(self, archive: bytes, *, base: str) -> None:
        with checked.refusing():
            first, *members = checked.read(archive, prefixes=PREFIXES)
            if first.name != _HEADER or first.kind != tarfile.REGTYPE or first.size > _LARGEST_HEADER:
                raise SnapshotCorrupt(f"expected {_HEADER} first, found {brief(first.name)}")
            self._archive = memoryview(archive)
            self.header = _header(json.loads(bytes(self.content(first)).decode()))
            _check(members)
        if self.header.base != base:
            raise SnapshotMismatch(f"the archive changes {brief(self.header.base)}, but this sandbox is made of {base}")
        self.members = members

    @property
    def nbytes(self) -> int:
        """Bytes on disk that its members take."""
        return sum(member.nbytes for member in self.members)

    def content(self, member: Member) -> memoryview:
        """Content of a regular member."""
        return self._archive[member.start : member.start + member.size]

    def rest(self) -> bytes:
        """The archive without its header, as any tar program reads it."""
        return bytes(self._archive[self.members[0].begin :]) if self.members else bytes(tarfile.RECORDSIZE)

    def extract(self, root: Path) -> None:
        """Apply an archive's deletions and files to a directory.

        Raises:
            SnapshotCorrupt: the directory holds a link where the archive expects a directory, or no such file can be.
            SandboxFull: the disk is full.
        """
        with checked.refusing():
            self._extract(root)

    def _extract(self, root: Path) -> None:
        folders_seen: set[str] = set()
        for name in self.header.deleted:
            path = _target(root, name, set())
            if path is not None:
                _remove(path)
        folders = []
        for member in self.members:
            path = _target(root, member.name, folders_seen)
            if path is None:
                raise SnapshotCorrupt(f"{member.name}: the directory above it is a link or missing")
            if member.kind == tarfile.DIRTYPE:
                if not os.path.isdir(path) or os.path.islink(path):
                    _remove(path)
                    os.mkdir(path, 0o700)
                folders.append((path, member))
                continue
            _remove(path)
            if member.kind == tarfile.LNKTYPE:
                linked = _target(root, member.linkname, folders_seen)
                if linked is None:
                    raise SnapshotCorrupt(f"{member.name}: a link to {member.linkname!r}, which is not there")
                os.link(linked, path, follow_symlinks=False)
                continue
            if member.kind == tarfile.SYMTYPE:
                os.symlink(member.linkname, path)
            elif member.kind == tarfile.FIFOTYPE:
                os.mkfifo(path)
            else:
                _write(path, self.content(member))
            _apply(path, member)
        for path, member in reversed(folders):  # a parent after its children, whose making changes its times
            _apply(path, member)


def _header(fields: object) -> ArchiveHeader:
    match fields:
        case {
            "format": int(version),
            "base": str(base),
            "deleted": list(deleted),
            "facts": dict(facts),
        } if version == FORMAT and len(deleted) <= MOST:
            for name in deleted:
                check_name(name)
            if all(isinstance(text, str) for text in facts.values()):
                return ArchiveHeader(base, tuple(deleted), facts)
    raise SnapshotCorrupt(f"expected what an archive of format {FORMAT} says of itself, found {brief(fields)}")


def entries(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Iterate over every entry below a directory as (relative name, status), parents first, in order of names."""
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
    """Differences of a directory from another: (added or changed, deleted), relative names.

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


def _check(members: Iterable[Member]) -> None:
    kinds: dict[str, bytes] = {_HEADER: tarfile.REGTYPE}
    above: set[str] = {""}  # directories that something lies in, so that no later member may be a file of that name
    for member in members:
        name, kind = member.name, member.kind
        if name in kinds:
            raise SnapshotCorrupt(f"{name}: twice in the archive")
        folder = name.rpartition("/")[0]
        while folder not in above:
            if kinds.get(folder, tarfile.DIRTYPE) != tarfile.DIRTYPE:
                raise SnapshotCorrupt(f"{name}: below a link or a file")
            above.add(folder)
            folder = folder.rpartition("/")[0]
        kinds[name] = kind
        if kind != tarfile.DIRTYPE and name in above:
            raise SnapshotCorrupt(f"{name}: expected a directory, for an earlier member lies in it")
        if member.mode & (stat.S_ISUID | stat.S_ISGID) and kind != tarfile.DIRTYPE:
            raise SnapshotCorrupt(f"{name}: setuid or setgid (mode {member.mode:04o})")
        if any(key.startswith(PREFIXES) and not key.startswith(_OWN) for key in member.headers):
            raise SnapshotCorrupt(f"{name}: an extended attribute outside user.*")
        checked.nanoseconds(member.mtime)
        if kind == tarfile.LNKTYPE and kinds.get(member.linkname) != tarfile.REGTYPE:
            raise SnapshotCorrupt(f"{name}: a hard link to {member.linkname!r}, which is not an earlier file")


def _target(root: Path, name: str, seen: set[str]) -> str | None:
    """Target path of a member; None if its parent directory is a link, leads through one or is missing.

    Args:
        root: directory that the name is relative to.
        name: of the member.
        seen: directories that were looked at before and have stayed such; this one is added.
    """
    above = name.rpartition("/")[0]
    if above not in seen:
        folder = str(root)
        for part in above.split("/") if above else ():
            folder = os.path.join(folder, part)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if stat.S_ISDIR(os.lstat(folder).st_mode):
                    continue
            return None
        seen.add(above)
    return os.path.join(root, name)


def _remove(path: str) -> None:
    from sandboxgym.system.run_directories import remove_tree

    if os.path.lexists(path):
        remove_tree(Path(path))


def _write(path: str, content: memoryview) -> None:
    with open(path, "xb") as file:
        for at in range(0, len(content), _CHUNK):
            block = bytes(content[at : at + _CHUNK])
            if block.count(0) == len(block):
                file.seek(len(block), os.SEEK_CUR)  # a hole
            else:
                file.write(block)
        file.truncate(len(content))


def _apply(path: str, info: Member) -> None:
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        os.chown(path, info.uid, info.gid, follow_symlinks=False)
    for key, value in info.headers.items():
        if key.startswith(_XATTR) and hasattr(os, "setxattr"):
            data = value.encode("utf-8", "surrogateescape")
            with contextlib.suppress(OSError):  # a file system without them
                os.setxattr(path, key.removeprefix(_XATTR), data, follow_symlinks=False)
    if info.kind != tarfile.SYMTYPE:
        os.chmod(path, info.mode)
    mtime = checked.nanoseconds(info.mtime)
    os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
