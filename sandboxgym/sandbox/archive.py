"""A tree as a tar archive, and back: what was written since the base, with deletions.

The members ``layers/<number>/<path>`` are the layers, topmost first. What tar has no word for is in their pax headers:
``SANDBOXGYM.whiteout`` (the name was deleted), ``.opaque`` (a directory that hides what lies below), ``.redirect`` (its
path there, if it was renamed), ``.mtime`` in nanoseconds, ``.extents`` of a sparse file, ``.xattr.<name>`` in base64.
Sockets are left out, and so are set-user-id bits and file capabilities, which have no effect in a sandbox.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch
from sandboxgym.sandbox.base import RootFS, SandboxError, SandboxFull
from sandboxgym.sandbox.layers import Layer, LayerStore, OverlayTree
from sandboxgym.sandbox.squash import extents, is_whiteout, mark_deletions, own_attribute, prefix, squash

FORMAT, VERSION = "sandboxgym-overlay", 1

_HEAD, _END = "sandboxgym.json", "sandboxgym.end"
_KEY = "SANDBOXGYM."
_SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID
_LARGEST = 1 << 44
_CHUNK = 1 << 20


def pack(tree: OverlayTree) -> bytes:
    """See the module; the inverse of `unpack`.

    Raises:
        SandboxError: it cannot be read as a whole.
    """
    squash(tree, deepest=1, kept=0)
    layers = tree.layers
    out = io.BytesIO()
    head = {"format": FORMAT, "version": VERSION, "base": tree.base, "id": tree.id, "layers": len(layers)}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        _add_json(archive, _HEAD, head)
        number = 0
        try:
            for at, layer in enumerate(layers):
                linked: dict[tuple[int, int], str] = {}
                for path, name in _walk(str(layer.files), f"layers/{at}"):
                    number += _add(archive, path, name, linked, rootless=tree.rootless)
        except OSError as error:
            raise SandboxError(f"what was written cannot be packed: {error}") from error
        _add_json(archive, _END, {"members": number})
    return out.getvalue()


def _add_json(archive: tarfile.TarFile, name: str, content: dict[str, object]) -> None:
    data = json.dumps(content).encode()
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _walk(top: str, name: str) -> Iterator[tuple[str, str]]:
    """Paths and names in the archive, a directory before what is in it, in a fixed order."""
    pending = [(top, name)]
    while pending:
        path, name = pending.pop()
        yield path, name
        if stat.S_ISDIR(os.lstat(path).st_mode):
            pending += [(os.path.join(path, one), f"{name}/{one}") for one in sorted(os.listdir(path), reverse=True)]


def _add(archive: tarfile.TarFile, path: str, name: str, linked: dict[tuple[int, int], str], *, rootless: bool) -> bool:
    """Add one file; whether there is a member for such."""
    status = os.lstat(path)
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    if rootless:  # the one user there is is root inside
        info.uid = info.gid = 0
    info.mtime = int(status.st_mtime)
    headers = {"mtime": str(status.st_mtime_ns)}
    content: IO[bytes] | None = None
    if is_whiteout(status):
        headers = {"whiteout": "1"}
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        if own_attribute(path, "opaque", rootless=rootless) == b"y":
            headers["opaque"] = "1"
        redirect = own_attribute(path, "redirect", rootless=rootless)
        if redirect is not None:
            headers["redirect"] = base64.b64encode(redirect).decode()
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISFIFO(status.st_mode):
        info.type = tarfile.FIFOTYPE
    elif stat.S_ISREG(status.st_mode):
        first = linked.setdefault((status.st_dev, status.st_ino), name)
        info.mode &= ~_SPECIAL_BITS
        if first != name:
            info.type, info.linkname, headers = tarfile.LNKTYPE, first, {}
        else:
            content = open(path, "rb")  # noqa: SIM115
    else:
        return False
    with content or contextlib.nullcontext():
        if headers and not is_whiteout(status):
            headers |= {f"xattr.{key}": value for key, value in _attributes(path).items()}
        if content is not None:
            pieces = extents(content.fileno(), status.st_size)
            info.size = sum(length for _, length in pieces)
            if info.size < status.st_size:
                headers["size"] = str(status.st_size)
                headers["extents"] = " ".join(f"{start}+{length}" for start, length in pieces)
            else:
                pieces = [(0, status.st_size)]
        info.pax_headers = {_KEY + key: value for key, value in headers.items()}
        archive.addfile(info, None if content is None else _Pieces(content, pieces))  # type: ignore[arg-type]
    return True


def _portable(name: str) -> bool:
    return (name.startswith("user.") and not name.startswith("user.overlay.")) or name.startswith("system.posix_acl_")


def _attributes(path: str) -> dict[str, str]:
    names = filter(_portable, os.listxattr(path, follow_symlinks=False))
    return {name: base64.b64encode(os.getxattr(path, name, follow_symlinks=False)).decode() for name in names}


class _Pieces:
    """Reads the data of a file, leaving out its holes."""

    def __init__(self, file: IO[bytes], pieces: list[tuple[int, int]]) -> None:
        self.file = file
        self.pieces = pieces[::-1]

    def read(self, number: int) -> bytes:
        found = []
        while number and self.pieces:
            start, length = self.pieces.pop()
            self.file.seek(start)
            data = self.file.read(min(number, length))
            if not data:
                break
            if len(data) < length:
                self.pieces.append((start + len(data), length - len(data)))
            number -= len(data)
            found.append(data)
        return b"".join(found)


def unpack(data: bytes, store: LayerStore, rootfs: RootFS, *, rootless: bool) -> OverlayTree:
    """The tree of an archive of `pack`.

    Raises:
        SnapshotCorrupt: it is no such archive, or a member would leave its layer, is a device or set-user-id. Nothing
            is left of it.
        SnapshotMismatch: it is of another base, or cannot be had without privileges.
    """
    layers: list[Layer] = []
    try:
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as archive:
                identity = _Unpacking(archive, store, rootfs, layers, rootless=rootless).run()
        except (tarfile.TarError, EOFError, KeyError, TypeError, ValueError, UnicodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SandboxFull(f"the disk is full: {error}") from error
            raise SnapshotCorrupt(f"expected an archive of a sandbox's files: {error}") from error
        return OverlayTree(store, rootfs, layers, rootless=rootless, identity=identity)
    finally:
        store.drop(layers)


class _Unpacking:
    """The members of an archive one after the other, each checked before it is written."""

    def __init__(
        self, archive: tarfile.TarFile, store: LayerStore, rootfs: RootFS, layers: list[Layer], *, rootless: bool
    ) -> None:
        self.archive = archive
        self.store = store
        self.rootfs = rootfs
        self.layers = layers
        self.rootless = rootless
        self.kinds: dict[str, bytes] = {}
        """Kind of every member written so far, by name."""
        self.folders: list[tuple[str, int]] = []

    def run(self) -> str:
        """Write all; the identity of the tree."""
        head = self._json(self.archive.next(), _HEAD)
        if head.get("format") != FORMAT or head.get("version") != VERSION:
            raise SnapshotCorrupt(f"expected an archive of {FORMAT} version {VERSION}, found {str(head)[:100]}")
        if head["base"] != self.rootfs.id:
            raise SnapshotMismatch(f"expected files written over {self.rootfs.id}, found some over {head['base']}")
        number = int(head["layers"])
        if not 0 <= number <= 500:
            raise SnapshotCorrupt(f"expected at most 500 layers, found {number}")
        self.layers += [self.store.new() for _ in range(number)]
        members = 0
        while (member := self.archive.next()) is not None and member.name != _END:
            self._member(member)
            members += 1
        if member is None or self._json(member, _END).get("members") != members:
            raise SnapshotCorrupt("the archive was cut short")
        for path, mtime in reversed(self.folders):
            os.utime(path, ns=(mtime, mtime))
        return str(head["id"])

    def _json(self, member: tarfile.TarInfo | None, name: str) -> dict[str, Any]:
        if member is None or member.name != name or not member.isreg() or member.size > _CHUNK:
            raise SnapshotCorrupt(f"expected the member {name}, found {member and member.name!r}")
        file = self.archive.extractfile(member)
        content = json.loads(file.read()) if file else None
        if not isinstance(content, dict):
            raise SnapshotCorrupt(f"expected an object in the member {name}")
        return content

    def _place(self, name: str) -> str:
        """Where a member goes.

        Its directory must have come before, as a directory: no link is ever followed.
        """
        parts = name.split("/")
        if len(parts) < 2 or parts[0] != "layers" or not parts[1].isdecimal() or int(parts[1]) >= len(self.layers):
            raise SnapshotCorrupt(f"the member {name!r} belongs to no layer")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise SnapshotCorrupt(f"the member {name!r} leaves its layer")
        if name in self.kinds:
            raise SnapshotCorrupt(f"the member {name!r} comes twice")
        if len(parts) > 2 and self.kinds.get("/".join(parts[:-1])) != tarfile.DIRTYPE:
            raise SnapshotCorrupt(f"the directory of the member {name!r} is missing")
        return os.path.join(self.layers[int(parts[1])].files, *parts[2:])

    def _member(self, member: tarfile.TarInfo) -> None:
        path = self._place(member.name)
        top = member.name.count("/") == 1
        headers = {key.removeprefix(_KEY): value for key, value in member.pax_headers.items() if key.startswith(_KEY)}
        if (member.mode & _SPECIAL_BITS and not member.isdir()) or member.mode & ~0o7777:
            raise SnapshotCorrupt(f"the member {member.name!r} is set-user-id or set-group-id")
        kind = member.type
        if top != (top and member.isdir()):
            raise SnapshotCorrupt(f"the member {member.name!r} should be a directory")
        if "whiteout" in headers:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
            mark_deletions(os.path.dirname(path), rootless=self.rootless)
            self.kinds[member.name] = b"whiteout"
            return
        if member.isdir():
            if not top:
                os.mkdir(path)
            self._mark(path, headers)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            same_layer = member.linkname.split("/")[:2] == member.name.split("/")[:2]
            if not same_layer or self.kinds.get(member.linkname) != tarfile.REGTYPE:
                raise SnapshotCorrupt(f"the member {member.name!r} is a link to {member.linkname!r}, which is no file")
            first = member.linkname.split("/")
            os.link(os.path.join(self.layers[int(first[1])].files, *first[2:]), path, follow_symlinks=False)
            self.kinds[member.name] = kind
            return
        elif member.isfifo():
            os.mkfifo(path)
        elif member.isreg():
            kind = tarfile.REGTYPE
            self._write(path, member, headers)
        else:
            raise SnapshotCorrupt(f"the member {member.name!r} is a device, or of a kind unknown here")
        self.kinds[member.name] = kind
        self._attributes(path, member, headers)

    def _mark(self, path: str, headers: dict[str, str]) -> None:
        own = prefix(rootless=self.rootless)
        if "opaque" in headers:
            os.setxattr(path, own + "opaque", b"y")
        if "redirect" in headers:
            if self.rootless:
                raise SnapshotMismatch("the archive holds a renamed directory, which takes root to unpack")
            redirect = base64.b64decode(headers["redirect"], validate=True)
            inside = redirect[1:] if redirect.startswith(b"/") else redirect
            parts = inside.split(b"/")
            if any(part in (b"", b".", b"..") for part in parts) or (inside == redirect and len(parts) > 1):
                raise SnapshotCorrupt(f"a renamed directory has the path {redirect!r}")
            os.setxattr(path, own + "redirect", redirect)

    def _write(self, path: str, member: tarfile.TarInfo, headers: dict[str, str]) -> None:
        size = int(headers.get("size", member.size))
        pieces = [(0, member.size)]
        if "extents" in headers:
            pieces = [
                (int(start), int(length)) for start, _, length in (p.partition("+") for p in headers["extents"].split())
            ]
        end = 0
        for start, length in pieces:
            if start < end or length < 0:
                raise SnapshotCorrupt(f"the parts of the sparse member {member.name!r} overlap")
            end = start + length
        if not end <= size <= _LARGEST or sum(length for _, length in pieces) != member.size:
            raise SnapshotCorrupt(f"the parts of the member {member.name!r} do not fit its size")
        source = self.archive.extractfile(member)
        assert source is not None
        with open(path, "xb") as target:
            for start, length in pieces:
                target.seek(start)
                while length:
                    data = source.read(min(length, _CHUNK))
                    if not data:
                        raise SnapshotCorrupt(f"the member {member.name!r} was cut short")
                    target.write(data)
                    length -= len(data)
            target.truncate(size)

    def _attributes(self, path: str, member: tarfile.TarInfo, headers: dict[str, str]) -> None:
        if not self.rootless:
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            os.chmod(path, member.mode)
        for key, value in headers.items():
            name = key.removeprefix("xattr.")
            if name != key:
                if not _portable(name):
                    raise SnapshotCorrupt(f"the member {member.name!r} has the extended attribute {name!r}")
                os.setxattr(path, name, base64.b64decode(value, validate=True), follow_symlinks=False)
        mtime = int(headers["mtime"])
        os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
        if member.isdir():
            self.folders.append((path, mtime))
