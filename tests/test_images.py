"""Parts of images: from the node, another node, or a real registry, each fetched there once for all nodes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from components import missing
from image_service import Service, digest_of

from sandboxgym.errors import StoreFull
from sandboxgym.registration import card_of, hook
from sandboxgym.sandbox.images import pull
from sandboxgym.sandbox.images.cache import LayerCache
from sandboxgym.sandbox.images.registry import Blob, Image, ImageError, Registry
from sandboxgym.workers.nodes import images as node_images
from sandboxgym.workers.nodes.images import RayBoard, images_of


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
    """Boards with what the nodes of a fleet know, in one process."""

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

    def keep(self, digest: str) -> None:
        assert digest in self.shared.claims

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


def test_a_part_that_is_damaged_wherever_it_is_comes_from_the_registry(tmp_path: Path) -> None:
    part = b"content"
    image = Image("127.0.0.1:9/x:1", Blob(digest_of(part), len(part)), ())
    boards = Boards({name: LayerCache(tmp_path / name) for name in "ab"})
    (tmp_path / "a" / digest_of(part)[7:]).write_bytes(b"damaged")
    TestBoard(boards, "a").announce(digest_of(part))
    blob = Registry.blob
    try:
        Registry.blob = lambda self, digest: iter([part])  # type: ignore[method-assign, assignment]
        assert pull.pull(image, boards.caches["b"], TestBoard(boards, "b"), timeout=0.0) == {
            digest_of(part): "registry"
        }
    finally:
        Registry.blob = blob  # type: ignore[method-assign]


def test_an_image_is_handed_on_whole_or_not_at_all(tmp_path: Path) -> None:
    cache, part = LayerCache(tmp_path), b"x" * (pull.BLOCK + 1)
    blob = Blob(digest_of(part), len(part))
    path = cache.put(blob, [part])
    image = Image("host.example/x", blob, ())
    blocks = pull.archive(image, cache)
    assert b'"RepoTags": ["host.example/x:latest"]' in b"".join(next(blocks) for _ in range(3))
    assert len(next(blocks)) == 512 and next(blocks) == part[: pull.BLOCK]
    path.unlink()
    with pytest.raises(ImageError, match="was deleted, for the quota of the node, while Docker read it"):
        next(blocks)
    path.write_bytes(b"another length")
    with pytest.raises(ImageError, match="pull it first"):
        next(pull.archive(image, cache))
    with pytest.raises(ImageError, match="expected a tag"):
        next(pull.archive(Image(f"x@{blob.digest}", blob, ()), cache))


def test_an_image_that_the_daemon_refuses_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sandboxgym.sandbox.docker import client

    class Daemon:
        api: Any = None

        def load_image(self, blocks: Iterator[bytes]) -> list[dict[str, str]]:
            return [{"stream": f"{len(list(blocks))} blocks"}, {"error": "invalid diffID for layer 0"}]

        def close(self) -> None: ...

    Daemon.api = daemon = Daemon()
    monkeypatch.setattr(client, "connect", lambda **_: daemon)
    monkeypatch.setattr(client, "quick_attributes", lambda name: None)
    cache = LayerCache(tmp_path)
    cache.put(Blob(digest_of(b""), 0), [])
    with pytest.raises(ImageError, match="the Docker daemon refuses x:1: invalid diffID"):
        pull.load(Image("x:1", Blob(digest_of(b""), 0), ()), cache)


def test_what_other_processes_do_to_a_cache_is_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, part = LayerCache(tmp_path, max_bytes=1000), b"content"
    left, young, gone = (tmp_path / f".{letter * 64}.01234567" for letter in "abc")
    for path in (left, young):
        path.write_bytes(b"unfinished")
    os.utime(left, (0, 0))
    gone.symlink_to(tmp_path / "deleted")  # its status is that of a file that was deleted a moment ago
    cache.put(Blob(digest_of(part), len(part)), [part])
    assert not left.exists() and young.exists()
    shutil.rmtree(tmp_path)  # `gc --all`
    assert cache.put(Blob(digest_of(part), len(part)), [part]).read_bytes() == part


class Table:
    """The key-value table of a cluster, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, bytes] = {}
        self.now = 0.0
        monkeypatch.setattr(node_images, "internal_kv", self)
        monkeypatch.setattr(node_images.time, "monotonic", lambda: self.now)

    def _internal_kv_put(self, key: str, value: bytes, overwrite: bool = True, namespace: str = "") -> bool:
        there = key in self.rows
        if overwrite or not there:
            self.rows[key] = value
        return there

    def _internal_kv_get(self, key: str, namespace: str = "") -> bytes | None:
        return self.rows.get(key)

    def _internal_kv_del(self, key: str, namespace: str = "") -> None:
        self.rows.pop(key, None)


def test_a_long_fetch_keeps_its_claim_and_one_that_ended_is_taken_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    first, second, third = (RayBoard(name, {}) for name in "abc")
    assert first.claim("x") and not second.claim("x") and not third.claim("x")
    for _ in range(10):  # a part that takes ten minutes
        table.now += 60.0
        first.keep("x")
        assert not second.claim("x") and not third.claim("x")
    table.now += 121.0  # its node is gone
    assert not second.claim("x") and second.claim("x")
    first.release("x")
    assert not third.claim("x")
    second.release("x")
    assert third.claim("x")


Answer = tuple[int, dict[str, str], bytes]


class Hostile:
    """A registry that answers as a function says, and notes what it was asked."""

    def __init__(self, answer: Callable[[str, bool], Answer]) -> None:
        self.asked: list[tuple[str, str | None]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                token = self.headers["Authorization"]
                asked.append((self.path, token))
                status, headers, content = answer(self.path, token is not None)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_a_registry_reads_no_file_by_saying_that_tokens_are_in_it(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps({"token": "secret"}))
    challenge = {"WWW-Authenticate": f'Bearer realm="file://{tmp_path}/own.json#"'}
    with Hostile(lambda path, known: (401, challenge, b"")) as registry:
        with pytest.raises(ImageError, match=r"expected the registry of .* to give tokens at https://, found 'file://"):
            Registry(f"{registry.host}/x:1").image()
        assert [token for _, token in registry.asked] == [None]


def test_a_token_is_not_sent_on_where_the_registry_redirects_to() -> None:
    def answer(path: str, known: bool) -> Answer:
        if path.startswith("/token"):
            return 200, {}, b'{"token": "t"}'
        if path == "/elsewhere":
            return 400 if known else 200, {}, b"content"
        where = f'Bearer realm="http://{registry.host}/token"'
        return (302, {"Location": "/elsewhere"}, b"") if known else (401, {"WWW-Authenticate": where}, b"")

    with Hostile(answer) as registry:
        assert b"".join(Registry(f"{registry.host}/x:1").blob(digest_of(b"content"))) == b"content"


LAYER = {"digest": digest_of(b""), "size": 0}


@pytest.mark.parametrize(
    "manifest",
    [
        b"<html>",
        b"[]",
        b"[" * 100_000,
        json.dumps({"config": LAYER, "layers": [{"digest": "sha256:../../etc", "size": 1}]}).encode(),
        json.dumps({"config": LAYER, "layers": [{**LAYER, "size": -1}]}).encode(),
        json.dumps({"manifests": [{"digest": LAYER["digest"]}]}).encode(),
        json.dumps({"manifests": [{"digest": 3, "platform": {"os": "linux", "architecture": "amd64"}}]}).encode(),
    ],
)
def test_an_answer_that_is_no_image_is_an_error_with_its_name(manifest: bytes) -> None:
    with Hostile(lambda path, known: (200, {}, manifest)) as registry, pytest.raises(ImageError):
        Registry(f"{registry.host}/x:1").image()


def test_an_answer_that_breaks_off_is_an_error_with_its_name(tmp_path: Path) -> None:
    short = {"Transfer-Encoding": "chunked", "Content-Length": "0"}
    with Hostile(lambda path, known: (200, short, b"5\r\nab")) as registry, pytest.raises(ImageError, match="x:1"):
        list(Registry(f"{registry.host}/x:1").blob(digest_of(b"content")))


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

    rows = [{"image": "a"}, Task(), {"image": "a"}, {}, {"image": None}, {"image": "host"}, {"image": "dir:/srv/root"}]
    assert images_of(rows) == ["a", "b"]


@pytest.mark.parametrize(
    ("env_id", "arguments", "names"),
    [
        ("SWEBench-v0", {}, []),
        ("SWEBench-v0", {"image": "registry/python:3", "tools": "bash"}, ["registry/python:3"]),
        ("SWEBench-v0", {"image": "dir:/srv/root"}, []),
        ("Harbor-v0", {}, []),
        ("Harbor-v0", {"image": "docker:registry/base:1"}, ["registry/base:1"]),
        ("Harbor-v0", {"tasks": "TASK"}, ["registry/task:2"]),
        ("Harbor-v0", {"tasks": "TASK", "image": "host"}, []),
    ],
)
def test_cards_name_the_images_of_the_tasks(
    tmp_path: Path, env_id: str, arguments: dict[str, Any], names: list[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").touch()
    (tmp_path / "instruction.md").write_text("Do it.")
    (tmp_path / "task.toml").write_text('version = "1.0"\n[environment]\ndocker_image = "registry/task:2"\n')
    arguments = {name: str(tmp_path) if value == "TASK" else value for name, value in arguments.items()}
    assert hook(card_of(env_id).images)(**arguments) == names


def test_what_a_node_has_of_images_is_known_without_a_registry(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path)
    contents = [os.urandom(100 * n) for n in (1, 2, 3)]
    parts = [Blob(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data)) for data in contents]
    for part, data in zip(parts, contents, strict=True):
        cache.put(part, [data])
    cache.note(Image("one", parts[0], (parts[1],)))
    cache.note(Image("two", parts[2], (parts[1],)))
    assert [cache.nbytes_of(names) for names in ([], ["one"], ["one", "two"], ["three"])] == [0, 300, 600, 0]
    (tmp_path / parts[1].digest.removeprefix("sha256:")).unlink()
    assert cache.nbytes_of(["one", "two"]) == 400 and cache.digests() == {parts[0].digest, parts[2].digest}
