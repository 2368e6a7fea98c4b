"""Archives of trees in pieces, so that what two of them share can be stored and sent once.

1. The pieces of a tree, joined, are an archive as `Backend.unpack` takes it, with all its checks.
2. A layer of an overlay sandbox never changes: it is read once per process, and its pieces are the same in every tree
   above it. Its large files are pieces of their own, so that they stay the same when layers are merged.
3. Archives of other backends, which have no layers, are cut where the names of their files say: most pieces of two
   archives with few differences are equal.
"""

from __future__ import annotations

import functools
import tarfile
import zlib
from collections.abc import Iterator, Sequence

from sandboxgym.errors import SnapshotCorrupt
from sandboxgym.sandbox.base import FileTree, SandboxError
from sandboxgym.sandbox.files import archive, portable
from sandboxgym.sandbox.files.members import Member, read
from sandboxgym.sandbox.layers.squash import squash
from sandboxgym.sandbox.layers.store import OverlayTree, Packed, StoredLayer
from sandboxgym.serialization import Piece

LARGE = 32 * 2**10
"""Bytes from which on the content of a file is apart from its neighbours."""
LONGEST = 256 * 2**10
"""Bytes of a piece of such a file; a file that only grows keeps its earlier pieces."""
_SHORTEST, _LONG = 8 * 2**10, 64 * 2**10
"""Bytes after which a piece of small files may and must end."""
_ONE_IN = 8
"""Small files after each of which, on average, a piece may end."""


def pieces_of(tree: FileTree) -> list[Piece]:
    """The archive of a tree in pieces, which can be read for as long as somebody holds the tree.

    Raises:
        SandboxError: it cannot be read as a whole, or is more than can be unpacked.
    """
    if isinstance(tree, OverlayTree):
        return _of_layers(tree)
    return _cut(tree.pack(), portable.PREFIXES)


def _of_layers(tree: OverlayTree) -> list[Piece]:
    try:
        return _of_stack(tree)
    except SandboxError:  # of more files than an archive has, in all layers together; fewer if merged
        squash(tree, deepest=1, kept=0)
        return _of_stack(tree)


def _of_stack(tree: OverlayTree) -> list[Piece]:
    layers = tree.layers[::-1]
    pieces: list[Piece] = []
    members = 0
    for layer in layers:
        pieces += _of_layer(layer, rootless=tree.rootless)
        assert layer.packed is not None
        members += layer.packed.members
    before, after = archive.around_parts(tree, layers, members)
    return [Piece.of(before, alone=True), *pieces, Piece.of(after, alone=True)]


def _of_layer(layer: StoredLayer, *, rootless: bool) -> list[Piece]:
    if layer.packed is None:
        data, members = archive.pack_layer(layer, rootless=rootless)
        pieces = _cut(data, archive.PREFIXES)
        layer.packed = Packed(tuple((piece.digest, piece.nbytes) for piece in pieces), members)
        return pieces
    again = _Again(layer, rootless=rootless)
    return [
        Piece(digest, nbytes, functools.partial(again.read, number))
        for number, (digest, nbytes) in enumerate(layer.packed.pieces)
    ]


class _Again:
    """A layer that was packed before, packed again where somebody lacks a piece of it."""

    def __init__(self, layer: StoredLayer, *, rootless: bool) -> None:
        self._layer = layer
        self._rootless = rootless

    def read(self, number: int) -> bytes:
        return self._pieces[number].read()

    @functools.cached_property
    def _pieces(self) -> Sequence[Piece]:
        data, _ = archive.pack_layer(self._layer, rootless=self._rootless)
        return _cut(data, archive.PREFIXES)


def _cut(data: bytes, prefixes: tuple[str, ...]) -> list[Piece]:
    """Cut an archive, or a part of one, into pieces."""
    return [Piece.of(data[start:end]) for start, end in _spans(data, prefixes)]


def _spans(data: bytes, prefixes: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    start = 0
    for member in _members(data, prefixes):
        end = _end(member)
        if member.size >= LARGE:
            if start < member.start:
                yield start, member.start
            for at in range(member.start, end, LONGEST):
                yield at, min(at + LONGEST, end)
            start = end
        elif _may_end(member, end - start):
            yield start, end
            start = end
    for at in range(start, len(data), LONGEST):
        yield at, min(at + LONGEST, len(data))


def _members(data: bytes, prefixes: tuple[str, ...]) -> list[Member]:
    try:
        return read(data + bytes(tarfile.BLOCKSIZE), prefixes=prefixes)  # a part of an archive has no end
    except SnapshotCorrupt:  # an archive in a form of its backend's own
        return []


def _end(member: Member) -> int:
    return member.start + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _may_end(member: Member, nbytes: int) -> bool:
    named = zlib.crc32(member.name.encode("utf-8", "surrogateescape")) % _ONE_IN == 0
    return nbytes >= _LONG or (named and nbytes >= _SHORTEST)
