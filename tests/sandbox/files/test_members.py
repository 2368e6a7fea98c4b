"""Untrusted archives: bounded before anything is written, refused with a typed error, without leftovers."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxgym import SnapshotCorrupt, SnapshotMismatch, serialization
from sandboxgym.sandbox.base import Limits, RootFS, SandboxFull
from sandboxgym.sandbox.copy.backend import CopyBackend
from sandboxgym.sandbox.files import archive, members
from sandboxgym.sandbox.files.portable import ArchiveHeader, ArchiveWriter, Reader
from sandboxgym.sandbox.layers.store import LayerStore
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.shell.state import SECTIONS, ShellState

ROOTLESS = os.geteuid() != 0
LIMIT = 2**20


class Store(LayerStore):
    """Remembers what is to be removed."""

    def __init__(self, directory: Path) -> None:
        self.removed: list[str] = []
        super().__init__(directory, remove=self.removed.extend)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store")


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyBackend]:
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    made = CopyBackend(None, allow_unsafe=True, limits=Limits(disk=LIMIT))
    yield made
    made.close()


Parts = list[tuple[tarfile.TarInfo, bytes]]


def member(
    name: str, *, kind: bytes = tarfile.REGTYPE, data: bytes = b"", headers: dict[str, str] | None = None, **more: Any
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), 0o755 if kind == tarfile.DIRTYPE else 0o644
    info.pax_headers = {"SANDBOXGYM.mtime": "0", **(headers or {})}
    for field, value in more.items():
        setattr(info, field, value)
    return info, data


def tarred(parts: Parts, *, form: int = tarfile.PAX_FORMAT, **options: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, **options) as tar:
        for info, data in parts:
            tar.addfile(info, io.BytesIO(data))
            tar.members.clear()
    return out.getvalue()


def overlay(parts: Parts, head: dict[str, Any] | bytes | None = None, **options: Any) -> bytes:
    """An archive of the overlay backends."""
    fields = {"format": archive.FORMAT, "version": archive.VERSION, "base": "test", "id": "x", "layers": 1}
    first = head if isinstance(head, bytes) else json.dumps({**fields, **(head or {})}).encode()
    last = json.dumps({"members": len(parts) + 1}).encode()
    top = member("layers/0", kind=tarfile.DIRTYPE)
    return tarred([member("sandboxgym.json", data=first), top, *parts, member("sandboxgym.end", data=last)], **options)


def plain(parts: Parts, head: Any = None, **options: Any) -> bytes:
    """An archive of the copy and docker backends."""
    fields = {"format": 1, "base": "empty", "deleted": [], "facts": {"root": "/somewhere/root"}}
    first = head if isinstance(head, bytes) else json.dumps({**fields, **(head or {})}).encode()
    return tarred([member(".sandboxgym-tree.json", data=first, pax_headers={}), *map(bare, parts)], **options)


def bare(part: tuple[tarfile.TarInfo, bytes]) -> tuple[tarfile.TarInfo, bytes]:
    part[0].pax_headers = {k: v for k, v in part[0].pax_headers.items() if not k.startswith("SANDBOXGYM.")}
    part[0].name = part[0].name.removeprefix("layers/0/")
    return part


def gnu_sparse(name: str, size: int) -> bytes:
    """A header whose few bytes stand for many zeros."""
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.GNUTYPE_SPARSE, 0o644
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:398] = block[398:410] = b"%011o\0" % 0
    block[483:495] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def spliced(data: bytes, extra: bytes) -> bytes:
    """With a member put in before the last."""
    at = data.rfind(b"sandboxgym.end")
    at = data.rfind(b"././@PaxHeader", 0, at) if at >= 0 else data.rstrip(b"\0").__len__() // 512 * 512 + 512
    return data[:at] + extra + data[at:]


def changed(data: bytes, place: int, new: bytes) -> bytes:
    """The first header with other bytes at a place, its checksum right."""
    block = bytearray(data[:512])
    block[place : place + len(new)] = new
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


F = "layers/0/f"
BOMBS: dict[str, Callable[[Callable[..., bytes]], bytes]] = {
    "a GNU sparse member": lambda make: spliced(make([]), gnu_sparse(F, 2**40)),
    "a small GNU sparse member": lambda make: spliced(make([]), gnu_sparse(F, 4096)),
    "a PAX sparse member": lambda make: make(
        [member(F, data=b"x", headers={"GNU.sparse.size": str(2**40), "GNU.sparse.map": "0,1"})]
    ),
    "a PAX sparse member, 1.0": lambda make: make(
        [member(F, data=b"0\n" * 256, headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})]
    ),
    "a header for all members": lambda make: make([], pax_headers={"comment": "x"}),
    "long names of GNU": lambda make: make([member("layers/0/" + "n" * 180)], form=tarfile.GNU_FORMAT),
    "a contiguous file": lambda make: make([member(F, kind=tarfile.CONTTYPE)]),
    "a device": lambda make: make([member(F, kind=tarfile.CHRTYPE, devmajor=1, devminor=3)]),
    "an unknown kind": lambda make: make([member(F, kind=b"Z")]),
    "a directory with content": lambda make: make([member(F, kind=tarfile.DIRTYPE, data=b"x" * 512)]),
    "a link with content": lambda make: make([member(F, kind=tarfile.SYMTYPE, linkname="x", data=b"x" * 512)]),
    "a long size": lambda make: make([member(F, headers={"size": "9" * 40})]),
    "a negative size": lambda make: make([member(F, headers={"size": "-1"})]),
    "a size in words": lambda make: make([member(F, headers={"size": "1_0"})]),
    "a large owner": lambda make: make([member(F, headers={"uid": "9" * 20})]),
    "a huge owner": lambda make: make([member(F, headers={"gid": "9" * 5000})]),
    "a negative owner": lambda make: make([member(F, headers={"uid": "-1"})]),
    "a long time": lambda make: make([member(F, headers={"SANDBOXGYM.mtime": "9" * 40, "mtime": "9" * 40})]),
    "a time in words": lambda make: make([member(F, headers={"SANDBOXGYM.mtime": "0,5", "mtime": "0,5"})]),
    "a time that is none": lambda make: make([member(F, headers={"SANDBOXGYM.mtime": "nan", "mtime": "nan"})]),
    "a part of a name that is too long": lambda make: make([member("layers/0/" + "n" * 300)]),
    "a name that is too long": lambda make: make([member("layers/0/" + "d/" * 3000 + "f")]),
    "a null byte in a name": lambda make: make([member(F, headers={"path": "layers/0/f\0g"})]),
    "a name that leaves": lambda make: make([member(F, headers={"path": "layers/0/../../f"})]),
    "an absolute name": lambda make: make([member(F, headers={"path": "/f"})]),
    "a link to a name that is too long": lambda make: make([member(F, kind=tarfile.SYMTYPE, linkname="l" * 5000)]),
    "a hard link to nothing": lambda make: make([member(F, kind=tarfile.LNKTYPE, linkname="layers/0/g")]),
    "a file below a file": lambda make: make([member(F), member(F + "/g")]),
    "a file below a pipe": lambda make: make([member(F, kind=tarfile.FIFOTYPE), member(F + "/g")]),
    "a file below a link": lambda make: make([member(F, kind=tarfile.SYMTYPE, linkname="/tmp"), member(F + "/g")]),
    "a name twice": lambda make: make([member(F), member(F)]),
    "an unknown header": lambda make: make([member(F, headers={"LIBARCHIVE.creationtime": "1"})]),
    "an attribute of the system": lambda make: make(
        [member(F, headers={"SCHILY.xattr.security.capability": "x", "SANDBOXGYM.xattr.security.capability": "eA=="})]
    ),
    "an attribute that looks like one of users": lambda make: make(
        [member(F, headers={"SCHILY.xattr.security.x.xattr.user.y": "x", "SANDBOXGYM.xattr.trusted.user.": "eA=="})]
    ),
    "a set-user-id file": lambda make: make([member(F, mode=0o4755)]),
    "more behind the end": lambda make: make([]) + b"x" * 512,
    "no end": lambda make: make([member(F)]).rstrip(b"\0"),
    "half of it": lambda make: make([member(F, data=b"x" * 5000)])[:4000],
    "a wrong checksum": lambda make: make([])[:200] + b"x" + make([])[201:],
    "a mode in words": lambda make: changed(make([]), 100, b"0o17_0\0\0"),
    "a size in base 256": lambda make: changed(make([]), 124, b"\xff" * 12),
    "a head that is no object": lambda make: make([], b"[1]"),
    "a deep head": lambda make: make([], b"[" * 100_000),
    "a long number in the head": lambda make: make([], b'{"format":' + b"9" * 10_000 + b"}"),
    "layers without end": lambda make: make([], {"layers": float("inf"), "format": float("inf")}),
    "layers that are true": lambda make: make([], {"layers": True, "deleted": True}),
    "many layers": lambda make: make([], {"layers": 10**6, "deleted": ["x"] * 100_001}),
    "an identity that is none": lambda make: make([], {"id": 5, "facts": ["root"]}),
    "facts that are numbers": lambda make: make([], {"id": None, "facts": {"root": 5}}),
    "no base": lambda make: make([], {"id": {}, "deleted": ["../x"]}),
}


def left(store: Store) -> list[str]:
    return [str(path) for path in (store.directory / "layers").iterdir() if str(path) not in store.removed]


@pytest.mark.parametrize("name", BOMBS)
def test_archives_of_overlays_that_lie_are_corrupt(name: str, store: Store, tmp_path: Path) -> None:
    data = BOMBS[name](overlay)
    began = time.thread_time()
    with pytest.raises(SnapshotCorrupt) as refusal:
        archive.unpack(data, store, RootFS("test", (tmp_path,)), rootless=ROOTLESS, limit=LIMIT)
    assert time.thread_time() - began < 5
    assert len(str(refusal.value)) < 5000
    assert left(store) == []


COPY_TAKES = {"layers without end", "layers that are true"}


@pytest.mark.parametrize("name", sorted(BOMBS.keys()))
def test_archives_of_copies_that_lie_are_corrupt(name: str, backend: CopyBackend, tmp_path: Path) -> None:
    data = BOMBS[name](plain)
    began = time.thread_time()
    with pytest.raises(SnapshotCorrupt) as refusal:
        backend.unpack(data)
    assert time.thread_time() - began < 5
    assert len(str(refusal.value)) < 5000
    assert {path.name for path in (tmp_path / "runtime").iterdir() if path.name.startswith("copy")} <= {backend._mark}


def many(number: int) -> Parts:
    return [member(f"layers/0/{index}") for index in range(number)]


@pytest.mark.parametrize("make", [overlay, plain])
def test_the_number_of_members_is_bounded_before_the_first_is_written(
    make: Callable[..., bytes], store: Store, backend: CopyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MOST", 50)
    monkeypatch.setattr("sandboxgym.sandbox.files.portable.MOST", 50)
    data = make(many(60))
    with pytest.raises(SnapshotCorrupt, match="at most 50 members"):
        if make is overlay:
            archive.unpack(data, store, RootFS("test", (tmp_path,)), rootless=ROOTLESS, limit=LIMIT)
        else:
            backend.unpack(data)
    assert store.removed == [] and left(store) == []
    writer = ArchiveWriter(ArchiveHeader("empty"))
    with pytest.raises(Exception, match="at most 50 files"):
        for index in range(60):
            writer.member(tarfile.TarInfo(str(index)), b"")


HOLEY = {"SANDBOXGYM.size": str(400 * 8192), "SANDBOXGYM.extents": " ".join(f"{at * 8192}+1" for at in range(400))}


@pytest.mark.parametrize(
    "parts",
    [
        lambda: [member(F, data=b"x" * (LIMIT + 1))],
        lambda: [member(f"{F}{index}", data=b"x" * (LIMIT // 4)) for index in range(5)],
        lambda: [member(f"{F}{index}", kind=tarfile.DIRTYPE) for index in range(300)],
        lambda: [member(f"{F}{index}", data=b"x") for index in range(300)],
    ],
    ids=["a file", "files together", "directories", "small files"],
)
@pytest.mark.parametrize("make", [overlay, plain])
def test_what_is_more_than_the_disk_limit_is_refused_before_it_is_written(
    make: Callable[..., bytes], parts: Callable[[], Parts], store: Store, backend: CopyBackend, tmp_path: Path
) -> None:
    data = make(parts())
    with pytest.raises(SandboxFull, match="are allowed"):
        if make is overlay:
            archive.unpack(data, store, RootFS("test", (tmp_path,)), rootless=ROOTLESS, limit=LIMIT)
        else:
            backend.unpack(data)
    assert store.removed == [] and left(store) == []


def test_every_block_that_a_sparse_file_begins_counts(store: Store, tmp_path: Path) -> None:
    data = overlay([member(F, data=b"x" * 400, headers=HOLEY)])
    with pytest.raises(SandboxFull, match="1,642,496 bytes"):  # a directory's block too
        archive.unpack(data, store, RootFS("test", (tmp_path,)), rootless=ROOTLESS, limit=LIMIT)
    tree = archive.unpack(data, store, RootFS("test", (tmp_path,)), rootless=ROOTLESS, limit=2 * LIMIT)
    assert (tree.layers[0].files / "f").stat().st_size == 400 * 8192
    tree.release()


def test_what_the_disk_has_no_room_for_is_refused_before_it_is_written(
    store: Store, backend: CopyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Status:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Status)
    with pytest.raises(SandboxFull, match="free"):
        archive.unpack(overlay([member(F)]), store, RootFS("test", (tmp_path,)), rootless=ROOTLESS)
    with pytest.raises(SandboxFull, match="free"):
        backend.unpack(plain([member(F, data=b"x" * 9000)]))
    assert left(store) == []


def test_reading_costs_what_an_archive_weighs(tmp_path: Path) -> None:
    data = overlay([member(f"layers/0/{'n' * 200}{index}") for index in range(500)])
    tracemalloc.start()
    try:
        members.read(data, prefixes=("SANDBOXGYM.",))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(data)


def test_an_honest_archive_comes_back(store: Store, backend: CopyBackend, tmp_path: Path) -> None:
    parts = [
        member("layers/0/d", kind=tarfile.DIRTYPE),
        member("layers/0/d/" + "é" * 120, data=b"long"),
        member("layers/0/d/\udcff", data=b"bytes", headers={"SCHILY.xattr.user.x": "\udcfe", "mtime": "-1.5"}),
        member("layers/0/d/empty"),
        member("layers/0/pipe", kind=tarfile.FIFOTYPE),
        member("layers/0/link", kind=tarfile.SYMTYPE, linkname="../" * 40 + "etc"),
    ]
    reader = Reader(plain(parts, errors="surrogateescape"), base="empty")
    assert [(m.name, m.kind, bytes(reader.content(m))) for m in reader.members] == [
        ("d", tarfile.DIRTYPE, b""),
        ("d/" + "é" * 120, tarfile.REGTYPE, b"long"),
        ("d/\udcff", tarfile.REGTYPE, b"bytes"),
        ("d/empty", tarfile.REGTYPE, b""),
        ("pipe", tarfile.FIFOTYPE, b""),
        ("link", tarfile.SYMTYPE, b""),
    ]
    assert reader.members[5].linkname == "../" * 40 + "etc"
    with tarfile.open(fileobj=io.BytesIO(reader.rest()), errors="surrogateescape") as same:
        assert same.getnames() == [m.name for m in reader.members]
    (tmp_path / "out").mkdir()
    reader.extract(tmp_path / "out")
    assert (tmp_path / "out/d" / ("é" * 120)).read_bytes() == b"long"
    assert os.stat(os.fsencode(tmp_path) + b"/out/d/\xff").st_mtime_ns == -500_000_000


# What is packed around an archive.

SHELL = {**dict.fromkeys(SECTIONS, b""), "status": 0, "variables": [], "limits": []}


@pytest.mark.parametrize(
    "changes",
    [
        {"status": 2**300},
        {"status": -1},
        {"status": True},
        {"cwd": b"a\0b"},
        {"cwd": "text"},
        {"umask": b"7; touch /tmp/x"},
        {"variables": [[b"x; y", "", b"1"]]},
        {"variables": [[b"x", "x; y", b"1"]]},
        {"variables": [[b"x", "x", 5]]},
        {"variables": [[b"x", "x"]]},
        {"variables": {b"x": 1}},
        {"limits": [["n", b"5; x"]]},
        {"limits": [["nn", b"5"]]},
        {"limits": 5},
        {"more": b""},
    ],
    ids=repr,
)
def test_a_shells_state_with_other_words_is_corrupt(changes: dict[str, Any]) -> None:
    assert ShellState.from_plain(SHELL).status == 0
    with pytest.raises(SnapshotCorrupt):
        ShellState.from_plain({**SHELL, **changes})


def packed(**changes: Any) -> bytes:
    return serialization.pack({"version": 1, "base": "empty", "tree": plain([]), "shell": None, "lossy": [], **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": [1] * 3},
        {"base": 5},
        {"tree": "text"},
        {"tree": b""},
        {"tree": b"junk" * 500},
        {"shell": [1]},
        {"shell": {"status": 2**5000}},
        {"lossy": 5},
        {"lossy": [[[]]]},
        {"lossy": "text"},
    ],
    ids=repr,
)
def test_packed_snapshots_that_lie_are_corrupt(changes: dict[str, Any], backend: CopyBackend) -> None:
    with Sandbox(backend, env={}) as sandbox:
        sandbox.unpack(packed()).release()
        with pytest.raises(SnapshotCorrupt):
            sandbox.unpack(packed(**changes))
        with pytest.raises(SnapshotMismatch):
            sandbox.unpack(packed(base="other"))


@pytest.mark.parametrize("root", ["", "/", "relative", "/" + "x" * 5000])
def test_a_root_that_would_be_replaced_everywhere_is_corrupt(root: str, backend: CopyBackend) -> None:
    with pytest.raises(SnapshotCorrupt, match="packed from"):
        backend.unpack(plain([], {"facts": {"root": root}}))
