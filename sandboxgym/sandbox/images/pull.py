"""Bring images to a node: from the node itself, from another one, or else from the registry, once per fleet.

1. A `Board` is what the nodes of a fleet know of each other: which has which parts, and who fetches one right now.
2. Who claims a part first fetches it from its registry; all others wait, and get it from a node that has it. A claim
   whose node went away ends after a while, and another takes over.
"""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

from sandboxgym.sandbox.images.cache import LayerCache
from sandboxgym.sandbox.images.registry import Blob, Image, ImageError, Registry

BLOCK = 8 << 20
"""Bytes that a node reads from another at a time."""
Origin = Literal["node", "peer", "registry"]
"""Place that a part came from."""
_PAUSE = 0.05


class Board(Protocol):
    """Knowledge that the nodes of a fleet share."""

    def holders(self, digest: str) -> Sequence[str]:
        """Names of the nodes that have a part."""
        ...

    def claim(self, digest: str) -> bool:
        """True for one caller at a time: it is to fetch the part."""
        ...

    def keep(self, digest: str) -> None:
        """Say that the caller, who has claimed a part, is still fetching it."""
        ...

    def release(self, digest: str) -> None:
        """End the caller's claim; no effect on that of another."""
        ...

    def announce(self, digest: str) -> None:
        """Say that this node has a part."""
        ...

    def read(self, node: str, digest: str, start: int, nbytes: int) -> bytes | None:
        """Bytes of a part on another node; None if it is not there (any more)."""
        ...


def pull(
    image: Image,
    cache: LayerCache,
    board: Board,
    *,
    timeout: float = 600.0,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Origin]:
    """Bring all parts of an image to this node: where each came from, by digest.

    Args:
        image: with the digests of its parts.
        cache: of this node.
        board: of the fleet.
        timeout: seconds that a part may take which another node fetches.
        sleep: waits for some seconds.

    Raises:
        ImageError: a part cannot be had.
        StoreFull: the node's quota has no room.
    """
    registry = Registry(image.name)
    with cache.holding([blob.digest for blob in image.blobs]):
        return {
            part.digest: _brought(part, registry, cache, board, timeout, sleep) for part in dict.fromkeys(image.blobs)
        }


def _brought(
    blob: Blob, registry: Registry, cache: LayerCache, board: Board, timeout: float, sleep: Callable[[float], object]
) -> Origin:
    deadline = time.monotonic() + timeout
    failed: set[str] = set()
    while True:
        if cache.use(blob.digest) is not None:
            board.announce(blob.digest)
            return "node"
        for node in board.holders(blob.digest):
            if node in failed:
                continue
            try:
                cache.put(blob, _from_peer(blob, board, node))
            except ImageError:  # it was evicted there, or is damaged, or the node is gone
                failed.add(node)
                continue
            board.announce(blob.digest)
            return "peer"
        if board.claim(blob.digest):
            try:
                if failed.issuperset(board.holders(blob.digest)):  # it may have been fetched a moment ago
                    cache.put(blob, _from_registry(blob, board, registry))
                    board.announce(blob.digest)
                    return "registry"
            finally:
                board.release(blob.digest)
        if time.monotonic() > deadline:
            raise ImageError(f"expected {blob.digest} from the node that fetches it within {timeout:g} s")
        sleep(_PAUSE)


def _from_peer(blob: Blob, board: Board, node: str) -> Iterator[bytes]:
    for start in range(0, blob.nbytes, BLOCK):
        block = board.read(node, blob.digest, start, BLOCK)
        if block is None:
            raise ImageError(f"node {node[:8]} does not have {blob.digest} any more")
        yield block


def _from_registry(blob: Blob, board: Board, registry: Registry) -> Iterator[bytes]:
    for block in registry.blob(blob.digest):
        board.keep(blob.digest)
        yield block


def archive(image: Image, cache: LayerCache) -> Iterator[bytes]:
    """An image whose parts are all here as ``docker load`` reads it, in blocks.

    Raises:
        ImageError: a part is missing, or the image is named by a digest instead of a tag.
    """
    if "@" in image.name:
        raise ImageError(f"expected a tag, by which `docker load` names images, found {image.name}: `docker pull` it")
    tagged = image.name if ":" in image.name.rpartition("/")[2] else f"{image.name}:latest"
    for blob in image.blobs:
        path = cache.use(blob.digest)
        if path is None or path.stat().st_size != blob.nbytes:
            raise ImageError(f"expected {blob.digest} of {image.name} on this node, found none: pull it first")
    names = {blob.digest: blob.digest.removeprefix("sha256:") for blob in image.blobs}
    content = {"Config": names[image.config.digest], "RepoTags": [tagged]}
    manifest = json.dumps([{**content, "Layers": [names[layer.digest] for layer in image.layers]}]).encode()
    yield from _member("manifest.json", len(manifest), iter([manifest]))
    for blob in dict.fromkeys(image.blobs):
        yield from _member(names[blob.digest], blob.nbytes, _from_here(blob, cache))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _from_here(blob: Blob, cache: LayerCache) -> Iterator[bytes]:
    for start in range(0, blob.nbytes, BLOCK):
        block = cache.read(blob.digest, start, BLOCK)
        if block is None or len(block) != min(BLOCK, blob.nbytes - start):
            raise ImageError(f"{blob.digest} was deleted, for the quota of the node, while Docker read it")
        yield block


def _member(name: str, nbytes: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    info.size = nbytes
    yield info.tobuf()
    yield from blocks
    yield bytes(-nbytes % tarfile.BLOCKSIZE)


def load(image: Image, cache: LayerCache) -> None:
    """Hand an image to the Docker daemon of this node, unless it has it.

    Raises:
        SandboxUnavailable: there is no daemon, it refuses the image, or a part is missing here.
    """
    from sandboxgym.sandbox.docker.client import connect, daemon_errors, quick_attributes

    if quick_attributes(image.name) is not None:
        return
    client = connect(timeout=600.0)
    try:
        with daemon_errors():
            for told in client.api.load_image(archive(image, cache)):
                if "error" in told:
                    raise ImageError(f"the Docker daemon refuses {image.name}: {told['error']}")
    finally:
        client.close()
