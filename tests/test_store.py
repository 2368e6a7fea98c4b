"""Snapshots in a store: equal pieces once, whole or not at all, typed errors for what is missing or damaged."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import DependencyNotInstalled
from keepers import pretended
from stored_envs import CHUNK, Notebook, Shell, three_pages

import sandboxgym
from sandboxgym import Snapshot, serialization
from sandboxgym.errors import (
    SnapshotCorrupt,
    SnapshotMismatch,
    SnapshotMissing,
    SnapshotNotSupported,
    SnapshotReleased,
    StoreFull,
    from_outside,
)
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot
from sandboxgym.serialization import Piece
from sandboxgym.system import interpreter
from sandboxgym.workers import blobs, store
from sandboxgym.workers.store import GRACE, SnapshotStore


@pytest.fixture
def env() -> Notebook:
    return three_pages()


@pytest.fixture
def here(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


@pytest.fixture(params=["directory", "url", "cluster"])
def either(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SnapshotStore]:
    """A store in a directory, one at a URL, and one on a cluster."""
    if request.param == "directory":
        yield SnapshotStore(tmp_path / "store")
        return
    if request.param == "cluster":
        pretended(monkeypatch)
        yield SnapshotStore("ray-objects://run")
        return
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/store"
    yield SnapshotStore(url)
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def files(here: SnapshotStore, folder: str) -> list[Path]:
    return sorted(path for path in (Path(here.place) / folder).rglob("*") if path.is_file())


# What comes out


def test_what_comes_out_of_a_store_is_what_was_put_in(env: Notebook, either: SnapshotStore) -> None:
    snap = env.snapshot()
    stored = either.put(snap)
    env.step("four")
    again = either.get(stored.key)
    assert (again.id, again.parent, again.header, again.digest) == (snap.id, snap.parent, snap.header, snap.digest)
    assert again.to_bytes() == snap.to_bytes()
    other = Notebook()
    other.restore(again)
    assert other.pages == [page.encode().ljust(CHUNK, b".") for page in ("one", "two", "three")]
    assert other.np_random.random() == env.np_random.random()
    assert stored.key in either
    assert either.keys() == [stored.key]


def test_a_later_snapshot_adds_only_what_is_new(env: Notebook, either: SnapshotStore) -> None:
    first = either.put(env.snapshot())
    env.step("four")
    second = either.put(env.snapshot())
    assert first.written > 3 * CHUNK
    assert CHUNK < second.written < 2 * CHUNK
    assert second.nbytes > 4 * CHUNK
    assert either.put(env.snapshot()).written < CHUNK


def test_an_environment_without_pieces_is_stored_too(either: SnapshotStore) -> None:
    env = sandboxgym.make("ALFWorld-v0")
    env.reset(seed=0)
    expected = env.step("look")[0]
    key = either.put(env.snapshot()).key
    env.step("inventory")
    assert env.restore(either.get(key))[0] == expected


def test_the_same_snapshot_twice_has_one_key_and_writes_nothing(env: Notebook, either: SnapshotStore) -> None:
    snap = env.snapshot()
    first, second = either.put(snap), either.put(snap)
    assert first.key == second.key
    assert second.written == 0


def test_a_snapshot_of_bytes_is_stored_like_the_one_it_came_from(env: Notebook, either: SnapshotStore) -> None:
    snap = Snapshot.from_bytes(env.snapshot().to_bytes())
    other = Notebook()
    other.restore(either.get(either.put(snap).key))
    assert other.pages == env.pages


def test_a_released_snapshot_is_refused(env: Notebook, here: SnapshotStore) -> None:
    snap = env.snapshot()
    snap.release()
    with pytest.raises(SnapshotReleased):
        here.put(snap)
    assert here.keys() == []


def test_another_process_reads_what_was_stored(env: Notebook, here: SnapshotStore) -> None:
    key = here.put(env.snapshot()).key
    code = (
        f"from sandboxgym.workers.store import SnapshotStore\nprint(SnapshotStore({here.place!r}).get({key!r}).digest)"
    )
    found = subprocess.run(interpreter.command(code), capture_output=True, text=True, check=True).stdout.strip()
    assert found == env.snapshot().digest


# Damage


def test_a_missing_piece_is_named(env: Notebook, here: SnapshotStore) -> None:
    key = here.put(env.snapshot()).key
    lost = files(here, "blobs")[0]
    lost.unlink()
    with pytest.raises(SnapshotMissing, match=rf"lacks a piece of the snapshot {key}: {lost.name}"):
        here.get(key)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: b""])
def test_a_damaged_piece_is_a_typed_error(env: Notebook, here: SnapshotStore, damage: Any) -> None:
    key = here.put(env.snapshot()).key
    piece = files(here, "blobs")[0]
    piece.write_bytes(damage(piece.read_bytes()))
    with pytest.raises(SnapshotCorrupt, match=rf"a piece of the snapshot {key} .* is damaged"):
        here.get(key)


def test_a_piece_that_was_cut_short_is_written_again(env: Notebook, here: SnapshotStore) -> None:
    snap = env.snapshot()
    key = here.put(snap).key
    piece = files(here, "blobs")[0]
    piece.write_bytes(piece.read_bytes()[:-1])
    SnapshotStore(here.place).put(snap)
    assert here.get(key).digest == snap.digest


def test_a_damaged_list_of_pieces_is_a_typed_error(env: Notebook, here: SnapshotStore) -> None:
    key = here.put(env.snapshot()).key
    (listing,) = files(here, "snapshots")
    listing.write_bytes(listing.read_bytes()[:-1])
    with pytest.raises(SnapshotCorrupt, match=f"the snapshot {key} in .* is damaged"):
        here.get(key)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"format": 2, "header": "{}", "sections": {}},
        {"format": 1, "header": "no json", "sections": {}},
        {"format": 1, "header": "[]", "sections": {}},
        {"format": 1, "header": "{}", "sections": {}},
        {"format": 1, "header": "{}", "sections": {"state": [[b"short", 3]]}},
        {"format": 1, "header": "{}", "sections": {"state": [[bytes(32), -3]]}},
        {"format": 1, "header": "{}", "sections": {"state": [[bytes(32), 2**40]]}},
        {"format": 1, "header": "{}", "sections": {"state": 3}},
        {"format": 1, "header": "{}", "sections": {3: [b""]}},
        [1, 2],
    ],
)
def test_a_list_of_pieces_that_lies_is_a_typed_error(here: SnapshotStore, content: Any) -> None:
    data = serialization.pack(content)
    key = hashlib.sha256(data).hexdigest()
    (Path(here.place) / "snapshots").mkdir(exist_ok=True)
    (Path(here.place) / "snapshots" / key).write_bytes(data)
    with pytest.raises(SnapshotCorrupt):
        here.get(key)


def test_a_key_that_is_not_there_is_missing_and_one_that_is_none_is_refused(either: SnapshotStore) -> None:
    with pytest.raises(SnapshotMissing, match="has no snapshot 000"):
        either.get("0" * 64)
    for wrong in ("", "../../etc/passwd", "0" * 63, "G" * 64, None, 3):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            either.get(wrong)  # type: ignore[arg-type]


def test_what_changes_while_it_is_stored_is_noticed(env: Notebook, here: SnapshotStore) -> None:
    snap = env.snapshot()
    header, sections = snap.to_pieces()
    lying = Piece("0" * 64, 10_000, lambda: bytes(10_000))

    class Changing:
        def to_pieces(self) -> Any:
            return header, {**sections, "state": [lying]}

    with pytest.raises(SnapshotCorrupt, match="changed while it was stored"):
        here.put(Changing())  # type: ignore[arg-type]
    assert here.keys() == []
    assert not files(here, "incoming")


# Places


def test_a_folder_with_other_files_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SnapshotMismatch, match="expected an empty directory or a store of snapshots"):
        SnapshotStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_store_of_another_version_is_refused(here: SnapshotStore) -> None:
    (Path(here.place) / "format.json").write_text('{"format": "sandboxgym-snapshots", "version": 2}')
    with pytest.raises(SnapshotMismatch, match="expected a store of snapshots of version 1"):
        SnapshotStore(here.place)


def test_a_file_url_is_the_directory(env: Notebook, here: SnapshotStore) -> None:
    key = SnapshotStore(f"file://{here.place}").put(env.snapshot()).key
    assert key in here


def test_a_url_without_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DependencyNotInstalled, match="pip install fsspec"):
        SnapshotStore("s3://bucket/path")


def test_a_url_of_an_unknown_kind_says_so() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ValueError, match="expected a directory or a URL that fsspec knows, found nowhere://x"):
        SnapshotStore("nowhere://x")


# Leases


def test_what_no_lease_holds_is_collected(env: Notebook, either: SnapshotStore) -> None:
    first = either.put(env.snapshot(), lease=either.lease("run"))
    env.step("four")
    kept = either.put(env.snapshot())
    assert either.collect(grace=0) == (0, 0, 0)
    either.lease("run").drop(first.key)
    collected = either.collect(grace=0)
    assert (collected.snapshots, collected.blobs) == (1, 0)  # its pages are in the other one too
    assert either.keys() == [kept.key]
    assert either.get(kept.key).digest == env.snapshot().digest
    either.delete(kept.key)
    assert either.collect(grace=0).blobs >= 4
    assert (either.keys(), either.nbytes()) == ([], 0)


def test_a_lease_that_ended_holds_nothing_and_one_that_was_taken_over_holds_all(
    env: Notebook, either: SnapshotStore
) -> None:
    key = either.put(env.snapshot(), lease=either.lease("run", seconds=0.01)).key
    time.sleep(0.05)
    again = either.lease("run")  # the owner was started again in time
    assert again.keys() == [key]
    assert either.collect(grace=0).snapshots == 0
    again.seconds = 0.0
    again.renew()
    assert either.collect(grace=0).snapshots == 1
    assert again.keys() == []


def test_a_snapshot_stays_until_its_last_lease_lets_it_go(env: Notebook, either: SnapshotStore) -> None:
    snap = env.snapshot()
    one, two = either.lease("one"), either.lease("two")
    key = either.put(snap, lease=one).key
    either.put(snap, lease=two)
    one.release()
    assert either.collect(grace=0).snapshots == 0
    two.release()
    assert either.collect(grace=0).snapshots == 1
    assert key not in either


def test_what_was_just_written_is_not_collected(env: Notebook, here: SnapshotStore) -> None:
    lease = here.lease("run")
    key = here.put(env.snapshot(), lease=lease).key
    lease.release()
    (Path(here.place) / "incoming" / "half").write_bytes(b"x")
    assert here.collect() == (0, 0, 0)
    assert key in here
    assert files(here, "incoming")


def test_pieces_that_a_collection_deleted_are_written_again(env: Notebook, either: SnapshotStore) -> None:
    lease = either.lease("run")
    either.put(env.snapshot(), lease=lease)
    lease.release()
    SnapshotStore(either.place).collect(grace=0)  # another process
    if not either.place.startswith("/"):  # there a store relies on the time that a collection leaves
        either._known.clear()
    key = either.put(env.snapshot()).key
    assert either.get(key).digest == env.snapshot().digest


def test_a_piece_that_is_used_again_is_young_again(env: Notebook, here: SnapshotStore) -> None:
    lease = here.lease("run")
    here.put(env.snapshot(), lease=lease)
    for path in files(here, "blobs"):
        os.utime(path, (0, 0))
    SnapshotStore(here.place).put(env.snapshot(), lease=lease)
    lease.release()
    here.collect(grace=GRACE)
    assert len(files(here, "blobs")) >= 3


def test_names_of_leases_stay_inside_the_store(here: SnapshotStore) -> None:
    for wrong in ("", "..", "a/b", "x" * 101, store.KEPT, ".hidden"):
        with pytest.raises(ValueError, match="expected a name"):
            here.lease(wrong)


# Killed writers, and several at once

WRITER = """
import os, sys
sys.path[:0] = {path!r}
from stored_envs import Notebook
from sandboxgym.workers.store import SnapshotStore
env = Notebook()
env.reset(seed=0)
for page in range(40):
    env.step(str(page))
snap = env.snapshot()
if {point!r}:
    whole, left = getattr(os, {point!r}), [{after}]
    def doomed(*args, **kwargs):
        if left[0] == 0:
            os.kill(os.getpid(), 9)
        left[0] -= 1
        return whole(*args, **kwargs)
    setattr(os, {point!r}, doomed)
print(SnapshotStore({place!r}).put(snap).key, flush=True)
"""


def writer(place: str, *, point: str = "", after: int = 0) -> subprocess.Popen[str]:
    code = WRITER.format(path=[os.path.dirname(__file__)], place=place, point=point, after=after)
    return subprocess.Popen(interpreter.command(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("point", "after"),
    [("write", 1), ("write", 20), ("fsync", 3), ("replace", 1), ("replace", 30), ("replace", 41)],
)
def test_a_writer_that_is_killed_leaves_a_store_in_which_everything_is_whole(
    env: Notebook, here: SnapshotStore, point: str, after: int
) -> None:
    mine = here.put(env.snapshot()).key
    process = writer(here.place, point=point, after=after)
    assert process.wait(300) == -signal.SIGKILL, process.stderr and process.stderr.read()
    for piece in files(here, "blobs"):
        assert hashlib.sha256(piece.read_bytes()).hexdigest() == piece.name
    assert here.keys() == [mine]
    assert here.get(mine).digest == env.snapshot().digest
    again = writer(here.place)
    key = again.communicate(timeout=300)[0].strip()
    assert here.get(key).nbytes > 40 * CHUNK
    here.collect(grace=0)
    assert not files(here, "incoming")
    assert set(here.keys()) == {mine, key}


def test_a_writer_that_is_killed_at_any_moment_leaves_nothing_half_written(here: SnapshotStore) -> None:
    for turn in range(4):
        process = writer(here.place)
        deadline = time.monotonic() + 300
        while len(files(here, "blobs")) < 5 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.003 * turn)
        process.kill()
        process.wait(300)
        for piece in files(here, "blobs"):
            assert hashlib.sha256(piece.read_bytes()).hexdigest() == piece.name
        for key in here.keys():  # noqa: SIM118
            assert here.get(key).nbytes > 40 * CHUNK
            here.delete(key)
        here.collect(grace=0)
        assert not files(here, "incoming")
        assert files(here, "blobs") == []


def test_two_writers_of_the_same_pieces_both_succeed(here: SnapshotStore) -> None:
    writers = [writer(here.place) for _ in range(3)]
    keys = {process.communicate(timeout=300)[0].strip() for process in writers}
    assert [process.returncode for process in writers] == [0, 0, 0]
    for key in keys:
        assert here.get(key).nbytes > 40 * CHUNK
    assert len(files(here, "blobs")) >= 40
    assert not files(here, "incoming")


def test_collections_beside_writers_delete_nothing_that_is_used(here: SnapshotStore) -> None:
    done = threading.Event()
    errors: list[BaseException] = []

    def collect() -> None:
        mine = SnapshotStore(here.place)
        while not done.is_set():
            mine.collect(grace=0)

    def work(name: str) -> None:
        try:
            mine = SnapshotStore(here.place)
            env = Notebook()
            env.reset(seed=0)
            for turn in range(12):
                env.step(str(turn % 3))
                lease = mine.lease(f"{name}-{turn}")
                key = mine.put(env.snapshot(), lease=lease).key
                assert mine.get(key).digest == env.snapshot().digest
                lease.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    collector = threading.Thread(target=collect)
    collector.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    collector.join()
    assert not errors


# Room


def test_a_store_at_its_limit_refuses_more_and_stays_as_it_was(env: Notebook, tmp_path: Path) -> None:
    small = SnapshotStore(tmp_path / "store", max_bytes=4 * CHUNK)
    key = small.put(env.snapshot()).key
    before = files(small, "")
    for page in ("four", "five"):
        env.step(page)
    with pytest.raises(StoreFull, match=r"no room for 2.,... more bytes .* of 40,000 that it may hold") as caught:
        small.put(env.snapshot())
    assert from_outside(caught.value)
    assert set(files(small, "")) - {Path(small.place) / "swept"} == set(before)
    assert small.get(key).nbytes > 3 * CHUNK


def test_a_store_at_its_limit_makes_room_by_a_collection(
    env: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SnapshotStore(tmp_path / "store", max_bytes=4 * CHUNK)
    key = small.put(env.snapshot()).key
    small.delete(key)
    for path in [*files(small, "blobs"), *files(small, "snapshots")]:
        os.utime(path, (0, 0))
    env.reset(seed=1)
    for page in ("a", "b", "c"):
        env.step(page)
    other = small.put(env.snapshot()).key
    assert small.keys() == [other]


def test_a_limit_that_is_no_number_of_bytes_is_refused(tmp_path: Path) -> None:
    for wrong in (0, -1, True):
        with pytest.raises(ValueError, match="max_bytes"):
            SnapshotStore(tmp_path, max_bytes=wrong)


def test_a_disk_that_gets_full_on_the_way_is_a_typed_error(
    env: Notebook, here: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = iter(range(3))

    def full(descriptor: int, data: bytes) -> None:
        if next(writes, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(blobs, "_write_all", full)
        with pytest.raises(StoreFull, match="has no room for a snapshot: No space left"):
            here.put(env.snapshot())
    assert here.keys() == []
    assert not files(here, "incoming")


def test_leases_of_killed_owners_are_released_and_nothing_that_others_hold_or_write(
    env: Notebook, tmp_path: Path
) -> None:
    store = SnapshotStore(tmp_path)
    killed, lives = (store.lease(name, seconds=60.0) for name in ("killed", "lives"))
    key = store.put(env.snapshot(), lease=killed).key
    store.lease("ended", seconds=-1.0)
    assert {name: left > 0 for name, left in store.leases().items()} == {"ended": False, "killed": True, "lives": True}
    assert store.release(["killed"]) == (0, 0, 0) and key in store  # it may be what another is writing
    assert set(store.leases()) == {"lives"}
    lives.release()
    kept = store.put(env.snapshot()).key
    assert store.release([]).snapshots == 0
    store.delete(kept)
    assert store.release([]).snapshots == 2 - (kept == key) and not store.nbytes()


def test_a_full_disk_is_a_typed_error_and_what_was_there_can_be_read(env: Notebook, disk: Path) -> None:
    small = SnapshotStore(disk / "store")
    key = small.put(env.snapshot()).key
    for page in range(120):
        env.step(str(page))
    with pytest.raises(StoreFull, match="are free on the disk"):
        small.put(env.snapshot())
    assert small.get(key).nbytes > 3 * CHUNK
    assert small.keys() == [key]
    assert not files(small, "incoming")


# Sandboxes


@pytest.fixture(params=["overlay", "overlay-rootless", "copy"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    from sandbox.sandboxes import check

    check(request.param)
    with make_sandbox(request.param, allow_unsafe=True) as made:
        yield made


def test_an_edited_file_after_many_writes_adds_little(sandbox: Sandbox, here: SnapshotStore) -> None:
    env = Shell(sandbox)
    env.reset(seed=0)
    env.step("mkdir -p ~/d && cd ~/d && for i in $(seq 20); do head -c 1000000 /dev/urandom > $i; done; echo a > small")
    assert here.put(env.snapshot()).written > 20_000_000
    env.step("echo edited >> small")
    snap = env.snapshot()
    stored = here.put(snap)
    assert len(snap.to_bytes()) > 20_000_000
    assert stored.written < 100_000
    env.step("rm -rf ~/d; cd /")
    env.restore(here.get(stored.key))
    assert env.step("cat small; ls | wc -l; pwd")[0].split()[:3] == ["a", "edited", "21"]


def test_a_stored_sandbox_starts_in_another_process(sandbox: Sandbox, here: SnapshotStore) -> None:
    env = Shell(sandbox)
    env.reset(seed=0)
    env.step("export WORD=hello; echo kept > ~/file; chmod 640 ~/file")
    key = here.put(env.snapshot()).key
    code = f"""
import sys
sys.path[:0] = {[os.path.dirname(__file__)]!r}
from sandboxgym.sandbox.sandbox import make_sandbox
from sandboxgym.workers.store import SnapshotStore
from stored_envs import Shell
with make_sandbox({sandbox.backend.capabilities.name!r}, allow_unsafe=True) as box:
    env = Shell(box)
    env.restore(SnapshotStore({here.place!r}).get({key!r}))
    print(env.step("echo $WORD; cat ~/file; stat -c %a ~/file")[0])
"""
    done = subprocess.run(interpreter.command(code), capture_output=True, text=True)
    assert done.stdout.split() == ["hello", "kept", "640"], done.stderr


def test_running_processes_stay_on_their_machine() -> None:
    from sandboxgym.sandbox.checkpoint.image import CriuCheckpoint

    snap = SandboxSnapshot.__new__(SandboxSnapshot)
    snap._tree, snap.shell, snap.lossy = None, None, ()
    snap.checkpoint = CriuCheckpoint.__new__(CriuCheckpoint)
    with pytest.raises(SnapshotNotSupported, match="a snapshot with running processes cannot leave this process"):
        snap.pieces()


def test_pieces_read_when_they_are_needed_only(env: Notebook, here: SnapshotStore) -> None:
    here.put(env.snapshot())
    header, sections = env.snapshot().to_pieces()

    def unread() -> bytes:
        raise AssertionError("the store has it")

    class Lazy:
        def to_pieces(self) -> Any:
            def lazy(pieces: Iterable[Piece]) -> list[Piece]:
                return [piece if piece.alone else Piece(piece.digest, piece.nbytes, unread) for piece in pieces]

            return header, {name: lazy(pieces) for name, pieces in sections.items()}

    assert here.put(Lazy()).written < CHUNK  # type: ignore[arg-type]
