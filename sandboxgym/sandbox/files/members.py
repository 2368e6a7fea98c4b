"""Members of an untrusted tar archive, all read and bounded before any of them is used.

1. Accepted is the format that this package writes, POSIX with extended headers: files, directories, links and pipes.
   Refused are sparse members of other programs, whose few bytes stand for terabytes; headers that apply to other
   members; members without their whole content.
2. An archive takes time and memory in proportion to its bytes: their number, names, headers and numbers are bounded,
   nothing recurses, and contents are not copied.
3. The disk usage of an archive is known before anything is written, holes and partly filled blocks included.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tarfile import AREGTYPE, BLOCKSIZE, DIRTYPE, FIFOTYPE, LNKTYPE, REGTYPE, SYMTYPE

from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt, SnapshotError, from_outside
from sandboxgym.sandbox.base import SandboxError, SandboxFull

MOST = 100_000
"""Members of an archive."""
LONGEST_NAME, LONGEST_PART = 4096, 255
"""Bytes of a member's path and of each part of it, as file systems have them."""
LARGEST_HEADERS = 4 * 2**20
"""Bytes of the extended headers of a member."""
LARGEST_FILE = 1 << 44

_EXTENDED = b"x"
_MAGIC = b"ustar\x0000"
_KINDS = (REGTYPE, AREGTYPE, DIRTYPE, SYMTYPE, LNKTYPE, FIFOTYPE)
_STANDARD = frozenset(
    ["path", "linkpath", "size", "uid", "gid", "mtime", "atime", "ctime", "uname", "gname", "hdrcharset"]
)
_NOT_PLAIN = frozenset(["", ".", ".."])
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*")
_INTEGER = re.compile(r"-?[0-9]{1,21}", re.ASCII)
_SECONDS = re.compile(r"(-?[0-9]{1,12})(?:\.([0-9]{0,32}))?", re.ASCII)
_BLOCK = 4096
_NO_MORE = (2**32) - 2  # the number after it means that an owner stays
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class Member:
    """One member of an archive, without its content."""

    name: str
    kind: bytes
    """REGTYPE, DIRTYPE, SYMTYPE, LNKTYPE or FIFOTYPE of `tarfile`."""
    mode: int
    uid: int
    gid: int
    size: int
    """Bytes of its content in the archive."""
    mtime: str
    """Modification time in seconds."""
    linkname: str
    begin: int
    """Offset of its headers in the archive."""
    start: int
    """Offset of its content."""
    headers: dict[str, str] = field(default_factory=dict)
    """Extended headers, bytes that are not UTF-8 as surrogates."""

    @property
    def nbytes(self) -> int:
        """Bytes on disk that the member takes, in whole blocks, as far as they can be told from here."""
        return blocks([(0, self.size)]) if self.kind == REGTYPE else _BLOCK if self.kind == DIRTYPE else 0


def read(data: bytes, *, prefixes: tuple[str, ...]) -> list[Member]:
    """Read all members of an archive.

    Args:
        data: the archive.
        prefixes: of the extended headers that it may have beside those of POSIX.

    Raises:
        SnapshotCorrupt: it has a member that is not accepted, or too many, or was cut short.
    """
    members: list[Member] = []
    at = 0
    while True:
        block = data[at : at + BLOCKSIZE]
        if len(block) < BLOCKSIZE:
            raise SnapshotCorrupt("the archive was cut short")
        if block.count(0) == BLOCKSIZE:
            break
        if len(members) == MOST:
            raise SnapshotCorrupt(f"expected an archive of at most {MOST} members, found more")
        member = _member(data, at, prefixes)
        at = _after(member.start, member.size)
        if at > len(data):
            raise SnapshotCorrupt(f"the member {brief(member.name)} was cut short")
        members.append(member)
    if data.count(0, at) != len(data) - at:
        raise SnapshotCorrupt("expected nothing after the end of the archive, found more bytes")
    return members


def _after(start: int, size: int) -> int:
    return start + -(-size // BLOCKSIZE) * BLOCKSIZE


def _member(data: bytes, begin: int, prefixes: tuple[str, ...]) -> Member:
    headers: dict[str, str] = {}
    at = begin
    member = _plain(data, at)
    if member.kind == _EXTENDED:
        if member.size > LARGEST_HEADERS:
            raise SnapshotCorrupt(f"expected headers of at most {LARGEST_HEADERS} bytes, found {member.size}")
        headers = _records(data[member.start : member.start + member.size])
        at = _after(member.start, member.size)
        member = _plain(data, at)
        member.begin, member.headers = begin, headers
        member.name, member.linkname = headers.get("path", member.name), headers.get("linkpath", member.linkname)
        member.mtime = headers.get("mtime", member.mtime)
        for name in ("size", "uid", "gid"):
            if name in headers:
                setattr(member, name, number(headers[name]))
    where = member.name[:200]
    if member.kind not in _KINDS:
        raise SnapshotCorrupt(f"{where}: expected a file, directory, link or pipe, found type {member.kind!r}")
    if member.kind == AREGTYPE:
        member.kind = REGTYPE
    if member.kind == DIRTYPE:
        member.name = member.name.removesuffix("/")
    if not 0 <= member.size <= (LARGEST_FILE if member.kind == REGTYPE else 0):
        raise SnapshotCorrupt(f"{where}: expected content of a file only, found {member.size} bytes")
    if not (0 <= member.uid <= _NO_MORE and 0 <= member.gid <= _NO_MORE):
        raise SnapshotCorrupt(f"{where}: expected the numbers of an owner, found {member.uid} and {member.gid}")
    if member.mode & ~0o7777:
        raise SnapshotCorrupt(f"{where}: expected a mode, found {member.mode:o}")
    for name in headers.keys() - _STANDARD:
        if not name.startswith(prefixes):
            raise SnapshotCorrupt(f"{where}: expected no header {brief(name, 80)}")
    check_name(member.name)
    if len(member.linkname) >= LONGEST_NAME or "\0" in member.linkname:
        raise SnapshotCorrupt(f"{where}: expected the name of a link's target, found {brief(member.linkname)}")
    return member


def _plain(data: bytes, at: int) -> Member:
    """Fields of a header block."""
    block = data[at : at + BLOCKSIZE]
    if len(block) < BLOCKSIZE:
        raise SnapshotCorrupt("the archive was cut short")
    checksum = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if block[257:265] != _MAGIC or _octal(block[148:156]) != checksum:
        raise SnapshotCorrupt(f"expected an archive's header at byte {at}, found other bytes or a wrong checksum")
    name, prefix = _text(block[:100]), _text(block[345:500])
    return Member(
        name=f"{prefix}/{name}" if prefix else name,
        kind=block[156:157],
        mode=_octal(block[100:108]),
        uid=_octal(block[108:116]),
        gid=_octal(block[116:124]),
        size=_octal(block[124:136]),
        mtime=str(_octal(block[136:148])),
        linkname=_text(block[157:257]),
        begin=at,
        start=at + BLOCKSIZE,
    )


def _octal(data: bytes) -> int:
    found = _OCTAL.fullmatch(data)
    if found is None:
        raise SnapshotCorrupt(f"expected an octal number, found {data!r}")
    return int(found[1] or b"0", 8)


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _records(data: bytes) -> dict[str, str]:
    """Extended headers: ``length name=value``, one per line, with the length of the line."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 12)
        if space < 0 or not data[at:space].isdigit():
            raise SnapshotCorrupt("expected the length of an extended header")
        end = at + int(data[at:space])
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space + 1 < end <= len(data) or data[end - 1 : end] != b"\n" or not equals:
            raise SnapshotCorrupt("expected an extended header as long as it says")
        name = key.decode("utf-8", "surrogateescape")
        if name in found:
            raise SnapshotCorrupt(f"the extended header {brief(name, 80)} occurs twice")
        found[name] = value.decode("utf-8", "surrogateescape")
        at = end
    return found


def check_name(name: object) -> None:
    """Refuse a path that is not relative and plain, or that no file system takes.

    Raises:
        SnapshotCorrupt: naming it.
    """
    if not isinstance(name, str) or not name or name.startswith("/") or "\0" in name:
        raise SnapshotCorrupt(f"expected a relative name, found {brief(name)}")
    if len(name) >= LONGEST_NAME or len(os.fsencode(name)) >= LONGEST_NAME:
        raise SnapshotCorrupt(f"expected a name of less than {LONGEST_NAME} bytes, found {brief(name)}")
    parts = name.split("/")
    if not _NOT_PLAIN.isdisjoint(parts):
        raise SnapshotCorrupt(f"{brief(name)} leaves the archive or is not plain")
    if max(map(len, parts)) * 4 > LONGEST_PART and max(len(os.fsencode(part)) for part in parts) > LONGEST_PART:
        raise SnapshotCorrupt(f"expected names of at most {LONGEST_PART} bytes, found {brief(name)}")


def number(text: str) -> int:
    """An integer of a header.

    Raises:
        SnapshotCorrupt: it is none.
    """
    if not _INTEGER.fullmatch(text):
        raise SnapshotCorrupt(f"expected an integer, found {brief(text, 80)}")
    return int(text)


def nanoseconds(text: str) -> int:
    """Nanoseconds of a header's time in seconds, with any number of decimals.

    Raises:
        SnapshotCorrupt: it is none.
    """
    found = _SECONDS.fullmatch(text)
    if found is None:
        raise SnapshotCorrupt(f"expected a time in seconds, found {brief(text, 80)}")
    return int(found[1]) * 10**9 + int((found[2] or "").ljust(9, "0")[:9])


def blocks(pieces: Iterable[tuple[int, int]]) -> int:
    """Bytes on disk of a file's extents, each an offset and a length: partly filled blocks count whole."""
    total, last = 0, -1
    for start, length in pieces:
        if length:
            first, end = max(start // _BLOCK, last + 1), (start + length - 1) // _BLOCK
            total += max(0, end - first + 1)
            last = end
    return total * _BLOCK


def check_fits(nbytes: int, limit: int | None, *, directory: Path | None = None) -> None:
    """Refuse content larger than may be written, before it is written.

    Args:
        nbytes: on disk.
        limit: of the sandbox; None: no limit.
        directory: on the file system that must have room for it.

    Raises:
        SandboxFull: saying how much it is.
    """
    if limit is not None and nbytes > limit:
        raise SandboxFull(f"the archive takes {nbytes:,} bytes on disk, {limit:,} are allowed")
    if directory is not None:
        status = os.statvfs(directory)
        if (free := status.f_bavail * status.f_frsize) < nbytes:
            raise SandboxFull(f"the archive takes {nbytes:,} bytes on disk, {free:,} are free")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn exceptions that an archive raises in its reader into `SnapshotCorrupt`, a full disk into `SandboxFull`."""
    try:
        yield
    except (SnapshotError, SandboxError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise SandboxFull(f"the disk is full: {error}") from error
        if from_outside(error):
            raise
        raise SnapshotCorrupt(f"expected an archive of a sandbox's files: {brief(error)}") from error
