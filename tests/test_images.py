"""Parts of images: from the node, another node, or a real registry, each fetched there once for all nodes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from components import missing
from image_service import Service, digest_of

from sandboxgym.errors import StoreFull
from sandboxgym.sandbox.images import pull
from sandboxgym.sandbox.images.cache import LayerCache
from sandboxgym.sandbox.images.registry import Blob, Image, ImageError, Registry
from sandboxgym.workers.nodes.images import images_of


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("registry"))
    yield made
    made.close()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that were asked for at the registry."""
    found: list[str] = []
    blob = Registry.blob
    monkeypatch.setattr(Registry, "blob", lambda self, digest: found.append(digest) or blob(self, digest))
    return found


class Boards:
    """What the nodes of a fleet know, in one process."""

    def __init__(self, caches: dict[str, LayerCache]) -> None:
        self.caches, self.has, self.claims, self.lock = caches, dict[str, set[str]](), set[str](), threading.Lock()


class TestBoard:
    __test__ = False

    def __init__(self, shared: Boards, node: str) -> None:
        self.shared, self.node = shared, node

    def holders(self, digest: str) -> Sequence[str]:
        return sorted(self.shared.has.get(digest, set()) - {self.node})

    def claim(self, digest: str) -> bool:
        with self.shared.lock:
            if digest in self.shared.claims:
                return False
            self.shared.claims.add(digest)
            return True

    def release(self, digest: str) -> None:
        self.shared.claims.discard(digest)

    def announce(self, digest: str) -> None:
        self.shared.has.setdefault(digest, set()).add(self.node)

    def read(self, node: str, digest: str, start: int, nbytes: int) -> bytes | None:
        return self.shared.caches[node].read(digest, start, nbytes)


def on_nodes(image: Image, boards: Boards) -> dict[str, dict[str, pull.Origin]]:
    """Pull an image on all nodes at the same time."""
    origins: dict[str, dict[str, pull.Origin]] = {}

    def work(node: str) -> None:
        origins[node] = pull.pull(image, boards.caches[node], TestBoard(boards, node))

    threads = [threading.Thread(target=work, args=(node,)) for node in boards.caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return origins


def test_nodes_that_pull_at_once_fetch_every_part_once(service: Service, fetched: list[str], tmp_path: Path) -> None:
    image = Registry(service.name).image()
    assert len(image.layers) == 3
    boards = Boards({name: LayerCache(tmp_path / name) for name in "abc"})
    origins = on_nodes(image, boards)
    assert sorted(fetched) == sorted(blob.digest for blob in image.blobs)
    counts = [origin for found in origins.values() for origin in found.values()]
    assert (counts.count("registry"), counts.count("peer")) == (4, 8)
    for cache in boards.caches.values():
        for blob in image.blobs:
            assert digest_of((cache.path / blob.digest.removeprefix("sha256:")).read_bytes()) == blob.digest
        assert not [name for name in os.listdir(cache.path) if len(name) != 64]
    assert set(on_nodes(image, boards)["a"].values()) == {"node"} and len(fetched) == 4


def test_a_node_whose_parts_are_damaged_or_gone_is_passed_over(
    service: Service, fetched: list[str], tmp_path: Path
) -> None:
    image = Registry(service.name).image()
    boards = Boards({name: LayerCache(tmp_path / name) for name in "abc"})
    pull.pull(image, boards.caches["b"], TestBoard(boards, "b"))
    damaged, gone = image.layers[1], image.layers[2]
    (tmp_path / "a" / damaged.digest.removeprefix("sha256:")).write_bytes(b"x" * damaged.nbytes)
    for part in (damaged, gone):
        TestBoard(boards, "a").announce(part.digest)
    assert set(pull.pull(image, boards.caches["c"], TestBoard(boards, "c")).values()) == {"peer"}
    assert len(fetched) == 4
    assert boards.caches["c"].digests() == {blob.digest for blob in image.blobs}


def test_the_quota_deletes_what_was_used_longest_ago_but_nothing_in_use(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path, max_bytes=250)
    parts = [bytes([index]) * 100 for index in range(4)]
    blobs = [Blob(digest_of(part), len(part)) for part in parts]
    for index in (0, 1):
        os.utime(cache.put(blobs[index], [parts[index]]), (index, index))
    assert cache.use(blobs[0].digest)
    cache.put(blobs[2], [parts[2]])
    assert cache.digests() == {blobs[0].digest, blobs[2].digest}
    with cache.holding([blobs[0].digest, blobs[2].digest]), pytest.raises(StoreFull, match="200 of 250 are in use"):
        cache.put(blobs[3], [parts[3]])
    cache.put(blobs[3], [parts[3]])
    assert len(cache.digests()) == 2


@pytest.mark.parametrize("content", [b"other", b"short", b"content and more"])
def test_content_of_another_digest_is_never_there(tmp_path: Path, content: bytes) -> None:
    cache, right = LayerCache(tmp_path), b"content"
    with pytest.raises(ImageError, match="expected 7 bytes of sha256:"):
        cache.put(Blob(digest_of(right), len(right)), [content])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("digest", ["sha256:../../etc/passwd", "sha256:" + "A" * 64, "md5:" + "0" * 64, ""])
def test_a_digest_that_is_none_reaches_no_file(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ImageError, match="expected a digest"):
        LayerCache(tmp_path).use(digest)


def test_what_a_registry_lacks_is_told_with_its_name(service: Service) -> None:
    with pytest.raises(ImageError, match=r"manifests/none of 127\.0\.0\.1:\d+/tools/small:none, .*404"):
        Registry(f"{service.name[:-1]}none").image()
    with pytest.raises(ImageError, match="expected an answer of the registry"):
        Registry("127.0.0.1:9/x").image()


def test_the_daemon_reads_what_was_pulled(service: Service, tmp_path: Path) -> None:
    from sandboxgym.sandbox.base import SandboxUnavailable
    from sandboxgym.sandbox.docker.client import connect
    from sandboxgym.sandbox.files.rootfs import image as rootfs_of

    try:
        client = connect()
    except SandboxUnavailable as error:
        missing("docker", str(error))
    image, cache = Registry(service.name).image(), LayerCache(tmp_path)
    pull.pull(image, cache, TestBoard(Boards({"a": cache}), "a"))
    try:
        pull.load(image, cache)
        assert rootfs_of(image.name).workdir == "/work"
        pull.load(image, cache)
    finally:
        client.images.remove(image.name)
        client.close()


def test_tasks_say_which_images_they_need() -> None:
    class Task:
        image = "b"

    assert images_of([{"image": "a"}, Task(), {"image": "a"}, {}, {"image": None}]) == ["a", "b"]
