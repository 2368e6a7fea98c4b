"""Trees as tar archives: the files written since the base, with deletions.

The members ``layers/<number>/<path>`` are the layers, topmost first. Facts that tar cannot express are in their pax
headers: ``SANDBOXGYM.whiteout`` (the name was deleted), ``.opaque`` (a directory that hides the layers below),
``.redirect`` (its path there, if it was renamed), ``.mtime`` in nanoseconds, ``.extents`` of a sparse file,
``.xattr.<name>`` in base64. Sockets are left out, and so are set-user-id bits and file capabilities, which have no
effect in a sandbox.

Of version 1 are archives of whole trees, in which few layers are left. Version 2 is made of parts, one for each layer
of a stack as it is, lowest first, that are equal for equal layers whatever is above and below: so they can be stored
once (``pieces.py``). Members are ``layer/<path>`` there, and each ``layer`` begins another layer.

An archive is read and bounded completely before anything of it is written (``members.py``).
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch
from sandboxgym.sandbox.base import RootFS, SandboxError
from sandboxgym.sandbox.files import members as checked
from sandboxgym.sandbox.files.copy import extents
from sandboxgym.sandbox.files.members import LARGEST_FILE, LARGEST_HEADERS, LONGEST_NAME, MOST, Member, number
from sandboxgym.sandbox.layers.squash import is_whiteout, mark_deletions, own_attribute, prefix, squash
from sandboxgym.sandbox.layers.store import LayerStore, OverlayTree, StoredLayer

FORMAT, VERSION, OF_PARTS = "sandboxgym-overlay", 1, 2

_HEAD, _END = "sandboxgym.json", "sandboxgym.end"
_KEY = "SANDBOXGYM."
PREFIXES = (_KEY,)
"""Prefixes of the extended headers of its members."""
_PART = "layer"
"""Name of the root of each layer of an archive of parts."""
_SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID
_CHUNK = 1 << 20
_LONGEST_IDENTITY = 200
_DEEPEST = 500
"""Layers of an archive at most; more than the kernel stacks."""


def pack(tree: OverlayTree) -> bytes:
    """Pack layers as an archive for `unpack`; see the module.

    Raises:
        SandboxError: it cannot be read as a whole, or is more than `unpack` would take.
    """
    squash(tree, deepest=1, kept=0)
    layers = tree.layers
    out = io.BytesIO()
    with _packing(out) as archive:
        _add_json(archive, _HEAD, _head(tree, VERSION))
        number = 0
        for at, layer in enumerate(layers):
            number = _add_layer(archive, layer, f"layers/{at}", number, rootless=tree.rootless)
        _add_json(archive, _END, {"members": number})
    return out.getvalue()


def pack_layer(layer: StoredLayer, *, rootless: bool) -> tuple[bytes, int]:
    """Pack a layer as a part of an archive of parts, which depends on its files only; returns it and its members.

    Raises:
        SandboxError: as by `pack`.
    """
    out = io.BytesIO()
    with _packing(out) as archive:
        members = _add_layer(archive, layer, _PART, 0, rootless=rootless)
        end = archive.offset
    return out.getvalue()[:end], members


def around_parts(tree: OverlayTree, layers: Sequence[StoredLayer], members: int) -> tuple[bytes, bytes]:
    """Bytes before and after the parts of all ``layers``, lowest first, in an archive of a tree.

    Args:
        tree: with an identity of its own.
        layers: of it.
        members: number in all parts.

    Raises:
        SandboxError: it is more than `unpack` would take.
    """
    if members > MOST - 2 or len(layers) > _DEEPEST:
        raise SandboxError(_too_many())
    before, after = io.BytesIO(), io.BytesIO()
    with _packing(before) as archive:
        _add_json(archive, _HEAD, {**_head(tree, OF_PARTS), "layers": len(layers)})
        end = archive.offset
    with _packing(after) as archive:
        _add_json(archive, _END, {"members": members})
        closed = archive.offset + 2 * tarfile.BLOCKSIZE
    return before.getvalue()[:end], after.getvalue()[:closed]


def _head(tree: OverlayTree, version: int) -> dict[str, object]:
    return {"format": FORMAT, "version": version, "base": tree.base, "id": tree.id, "layers": len(tree.layers)}


@contextlib.contextmanager
def _packing(out: io.BytesIO) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
            yield archive
    except OSError as error:
        raise SandboxError(f"what was written cannot be packed: {os.strerror(error.errno or 0)}") from error


def _add_layer(archive: tarfile.TarFile, layer: StoredLayer, top: str, number: int, *, rootless: bool) -> int:
    """Add a layer's files below the name ``top``; returns ``number`` and that of its members."""
    linked: dict[tuple[int, int], str] = {}
    for path, name in _walk(str(layer.files), top):
        number += _add(archive, path, name, linked, rootless=rootless)
        archive.members.clear()  # type: ignore[attr-defined]  # of no use in writing
        if number > MOST - 2 or len(os.fsencode(name)) >= LONGEST_NAME:
            raise SandboxError(_too_many())
    return number


def _too_many() -> str:
    return (
        f"what was written cannot be packed: expected at most {MOST - 2} files, with paths of less than "
        f"{LONGEST_NAME} bytes"
    )


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
    """Add one file; False if its type has no member."""
    status = os.lstat(path)
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    if rootless:  # the one user there is is root inside
        info.uid = info.gid = 0
    if not stat.S_ISDIR(status.st_mode):
        info.mode &= ~_SPECIAL_BITS
    info.mtime = int(status.st_mtime)
    headers = {"mtime": str(status.st_mtime_ns)}
    content: IO[bytes] | None = None
    if is_whiteout(status):
        info.mode = info.uid = info.gid = info.mtime = 0  # of the name, there is nothing but that it is gone
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
                if len(headers["extents"]) > LARGEST_HEADERS // 2:
                    raise SandboxError(f"what was written cannot be packed: {name} has {len(pieces)} holes")
            else:
                pieces = [(0, status.st_size)]
        info.pax_headers = {_KEY + key: value for key, value in headers.items()}
        archive.addfile(info, None if content is None else _Pieces(content, pieces))  # type: ignore[arg-type]
    return True


def _portable(name: str) -> bool:
    return (name.startswith("user.") and not name.startswith("user.overlay.")) or name.startswith("system.posix_acl_")


def _attributes(path: str) -> dict[str, str]:
    names = sorted(filter(_portable, os.listxattr(path, follow_symlinks=False)))
    return {name: base64.b64encode(os.getxattr(path, name, follow_symlinks=False)).decode() for name in names}


class _Pieces:
    """Reader of a file's data without its holes."""

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


def unpack(data: bytes, store: LayerStore, rootfs: RootFS, *, rootless: bool, limit: int | None = None) -> OverlayTree:
    """Unpack an archive of `pack`, or one of parts, as a tree.

    Args:
        data: the archive.
        store: for its layers.
        rootfs: below it.
        rootless: True if it is written without privileges.
        limit: bytes that it may take on disk; None: any that there is room for.

    Raises:
        SnapshotCorrupt: it is no such archive, or a member would leave its layer, is a device or set-user-id. Nothing
            is left of it.
        SnapshotMismatch: it is of another base, or cannot be had without privileges.
        SandboxFull: it would take more than ``limit`` bytes, or than the disk has; nothing was written.
    """
    layers: list[StoredLayer] = []
    try:
        with checked.refusing():
            identity = _Unpacking(data, store, rootfs, layers, rootless=rootless, limit=limit).run()
        return OverlayTree(store, rootfs, layers, rootless=rootless, identity=identity)
    finally:
        store.drop(layers)


class _Unpacking:
    """The members of an archive, each checked before it is written."""

    def __init__(
        self,
        data: bytes,
        store: LayerStore,
        rootfs: RootFS,
        layers: list[StoredLayer],
        *,
        rootless: bool,
        limit: int | None,
    ) -> None:
        self.data = memoryview(data)
        self.members = checked.read(data, prefixes=PREFIXES)
        self.store = store
        self.rootfs = rootfs
        self.layers = layers
        self.rootless = rootless
        self.limit = limit
        self.kinds: dict[str, bytes] = {}
        """Kind of every member written so far, by name."""
        self.folders: list[tuple[str, int]] = []
        self.numbers: frozenset[str] = frozenset()

    def run(self) -> str:
        """Write all members; returns the identity of the tree."""
        members = self.members
        head = self._json(members[0] if members else None, _HEAD)
        if head.get("format") != FORMAT or head.get("version") not in (VERSION, OF_PARTS):
            raise SnapshotCorrupt(
                f"expected an archive of {FORMAT} version {VERSION} or {OF_PARTS}, found {brief(head)}"
            )
        depth, identity = head.get("layers"), head.get("id")
        if type(depth) is not int or not 0 <= depth <= _DEEPEST or not isinstance(identity, str):
            raise SnapshotCorrupt(f"expected a name and at most {_DEEPEST} layers, found {brief(head)}")
        if head.get("base") != self.rootfs.id:
            raise SnapshotMismatch(
                f"expected files written over {self.rootfs.id}, found some over {brief(head.get('base'))}"
            )
        end = members[-1] if len(members) > 1 and members[-1].name == _END else None
        if end is None or self._json(end, _END).get("members") != len(members) - 2:
            raise SnapshotCorrupt("the archive was cut short")
        files = members[1:-1]
        nbytes = sum(map(_nbytes, files))
        if head["version"] == OF_PARTS:
            _number_layers(files, depth)
            checked.check_fits(_shown(files), self.limit)
        else:
            checked.check_fits(nbytes, self.limit)
        self.store.check_room(nbytes)
        self.layers += [self.store.new() for _ in range(depth)]
        self.numbers = frozenset(map(str, range(depth)))
        for member in files:
            self._member(member)
        for path, mtime in reversed(self.folders):
            os.utime(path, ns=(mtime, mtime))
        return identity[:_LONGEST_IDENTITY]

    def _json(self, member: Member | None, name: str) -> dict[str, Any]:
        if member is None or member.name != name or member.kind != tarfile.REGTYPE or member.size > _CHUNK:
            raise SnapshotCorrupt(f"expected the member {name}, found {member and brief(member.name)}")
        content = json.loads(bytes(self._content(member)).decode())
        if not isinstance(content, dict):
            raise SnapshotCorrupt(f"expected an object in the member {name}")
        return content

    def _content(self, member: Member) -> memoryview:
        return self.data[member.start : member.start + member.size]

    def _place(self, name: str) -> str:
        """Target path of a member.

        Its directory must have come before, as a directory: no link is ever followed.
        """
        parts = name.split("/")
        if len(parts) < 2 or parts[0] != "layers" or parts[1] not in self.numbers:
            raise SnapshotCorrupt(f"the member {name!r} belongs to no layer")
        if name in self.kinds:
            raise SnapshotCorrupt(f"the member {name!r} occurs twice")
        if len(parts) > 2 and self.kinds.get("/".join(parts[:-1])) != tarfile.DIRTYPE:
            raise SnapshotCorrupt(f"the directory of the member {name!r} is missing")
        return os.path.join(self.layers[int(parts[1])].files, "/".join(parts[2:]))

    def _member(self, member: Member) -> None:
        path = self._place(member.name)
        top = member.name.count("/") == 1
        headers = {key.removeprefix(_KEY): value for key, value in member.headers.items() if key.startswith(_KEY)}
        kind = member.kind
        if member.mode & _SPECIAL_BITS and kind != tarfile.DIRTYPE:
            raise SnapshotCorrupt(f"the member {member.name!r} is set-user-id or set-group-id")
        if top and kind != tarfile.DIRTYPE:
            raise SnapshotCorrupt(f"the member {member.name!r} should be a directory")
        if "whiteout" in headers:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
            mark_deletions(os.path.dirname(path), rootless=self.rootless)
            self.kinds[member.name] = b"whiteout"
            return
        if kind == tarfile.DIRTYPE:
            if not top:
                os.mkdir(path)
            self._mark(path, headers)
        elif kind == tarfile.SYMTYPE:
            os.symlink(member.linkname, path)
        elif kind == tarfile.LNKTYPE:
            same_layer = member.linkname.split("/")[:2] == member.name.split("/")[:2]
            if not same_layer or self.kinds.get(member.linkname) != tarfile.REGTYPE:
                raise SnapshotCorrupt(
                    f"the member {member.name!r} is a link to {member.linkname!r}, which is not a file"
                )
            first = member.linkname.split("/")
            os.link(os.path.join(self.layers[int(first[1])].files, "/".join(first[2:])), path, follow_symlinks=False)
            self.kinds[member.name] = kind
            return
        elif kind == tarfile.FIFOTYPE:
            os.mkfifo(path)
        else:
            self._write(path, member)
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

    def _write(self, path: str, member: Member) -> None:
        size, pieces = _pieces(member)
        content, at = self._content(member), 0
        with open(path, "xb", buffering=0) as target:
            for start, length in pieces:
                target.seek(start)
                while length:
                    written = target.write(content[at : at + min(length, _CHUNK)])
                    at, length = at + written, length - written
            target.truncate(size)

    def _attributes(self, path: str, member: Member, headers: dict[str, str]) -> None:
        if not self.rootless:
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
        if member.kind != tarfile.SYMTYPE:
            os.chmod(path, member.mode)
        for key, value in headers.items():
            name = key.removeprefix("xattr.")
            if name != key:
                if not _portable(name):
                    raise SnapshotCorrupt(f"the member {member.name!r} has the extended attribute {name!r}")
                os.setxattr(path, name, base64.b64decode(value, validate=True), follow_symlinks=False)
        mtime = number(headers["mtime"])
        os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
        if member.kind == tarfile.DIRTYPE:
            self.folders.append((path, mtime))


def _number_layers(members: Sequence[Member], depth: int) -> None:
    """Give the members of an archive of parts the names that they have in one of whole trees, topmost layer first."""
    at = depth
    for member in members:
        if member.name == _PART:
            at -= 1
        names = [member.name, member.linkname] if member.kind == tarfile.LNKTYPE else [member.name]
        if at == depth or any(name.partition("/")[0] != _PART for name in names):
            raise SnapshotCorrupt(f"the member {brief(member.name)} belongs to no layer")
        member.name = f"layers/{at}{member.name.removeprefix(_PART)}"
        if member.kind == tarfile.LNKTYPE:
            member.linkname = f"layers/{at}{member.linkname.removeprefix(_PART)}"
    if at != 0:
        raise SnapshotCorrupt(f"expected an archive of {depth} layers, found {depth - at}")


def _shown(members: Sequence[Member]) -> int:
    """Bytes on disk of the members of all layers that no layer above hides.

    A stack of layers as it is may hold a file many times; the limit of a sandbox is on what it shows.
    """
    layers: dict[str, list[Member]] = {}
    for member in members:
        layers.setdefault(member.name.split("/", 2)[1], []).append(member)
    by_name = {member.name: member for member in members}
    counted, seen, closed = set[str](), set[str](), set[str]()
    for at in sorted(layers, key=int):
        top = f"layers/{at}"
        covered: dict[str, bool] = {}
        closed_here = set[str]()
        for member in layers[at]:
            path = member.name.removeprefix(top)
            folder = path.rpartition("/")[0]
            covered[path] = covered.get(folder, False) or (path != "" and folder in closed)
            if covered[path]:
                continue
            if path not in seen:
                seen.add(path)
                counted.add(member.linkname if member.kind == tarfile.LNKTYPE else member.name)
            if member.kind != tarfile.DIRTYPE or _KEY + "opaque" in member.headers:
                closed_here.add(path)
        closed |= closed_here
    return sum(_nbytes(by_name[name]) for name in counted if name in by_name)


def _pieces(member: Member) -> tuple[int, list[tuple[int, int]]]:
    """Size of a file and the extents of its content, each an offset and a length."""
    size = number(member.headers.get(_KEY + "size", str(member.size)))
    pieces = [(0, member.size)]
    if (listed := member.headers.get(_KEY + "extents")) is not None:
        pieces = [(number(start), number(length)) for start, _, length in (p.partition("+") for p in listed.split())]
    end = 0
    for start, length in pieces:
        if start < end or length < 0:
            raise SnapshotCorrupt(f"the parts of the sparse member {member.name!r} overlap")
        end = start + length
    if not end <= size <= LARGEST_FILE or sum(length for _, length in pieces) != member.size:
        raise SnapshotCorrupt(f"the parts of the member {member.name!r} do not fit its size")
    return size, pieces


def _nbytes(member: Member) -> int:
    """Bytes on disk that a member takes."""
    return checked.blocks(_pieces(member)[1]) if member.kind == tarfile.REGTYPE else member.nbytes
