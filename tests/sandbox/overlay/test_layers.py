"""Layers: their references, merging deep stacks, archives and refused members."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import tarfile
from pathlib import Path

import pytest
from sandbox.overlay_boxes import Maker, box, make, rootless, run, sh  # noqa: F401 - fixtures

from sandboxgym import serialization
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch
from sandboxgym.sandbox.base import RootFS, SandboxClosed, SandboxError, SandboxFull
from sandboxgym.sandbox.files import archive, pieces
from sandboxgym.sandbox.files.pieces import pieces_of
from sandboxgym.sandbox.layers import squash
from sandboxgym.sandbox.layers.store import LayerStore, OverlayTree, StoredLayer
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.overlay.runtime import runtime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="overlay file systems are Linux's")
# ruff: noqa: F811

EVERYTHING = r"""cd /; find . -xdev \( -path ./proc -o -path ./usr -o -path ./dev -o -path ./run \) -prune \
    -o -printf '%P %y %m %U:%G %s %l %T@\n' -type f -exec md5sum {} + | sort"""


class _Store(LayerStore):
    def __init__(self, directory: Path) -> None:
        self.removed: list[str] = []
        super().__init__(directory, remove=self.removed.extend)


@pytest.fixture
def store(tmp_path: Path) -> _Store:
    (tmp_path / "store").mkdir()
    return _Store(tmp_path / "store")


def test_a_layer_lives_as_long_as_somebody_holds_it(store: _Store) -> None:
    rootfs = RootFS("base", (store.directory,))
    lower, upper = store.new(), store.new()
    one = OverlayTree(store, rootfs, [lower], rootless=False)
    two = OverlayTree(store, rootfs, [upper, lower], rootless=False)
    store.drop([lower, upper])  # who made them
    again = two.retain()
    one.release()
    two.release()
    two.release()
    assert store.removed == []
    again.release()
    assert sorted(store.removed) == sorted([str(lower.path), str(upper.path)])
    with pytest.raises(SandboxClosed, match="released"):
        again.retain()
    with pytest.raises(SandboxClosed, match="gone"):
        OverlayTree(store, rootfs, [lower], rootless=False)


def test_a_forgotten_tree_gives_its_layers_up(store: _Store) -> None:
    layer = store.new()
    tree = OverlayTree(store, RootFS("base", (store.directory,)), [layer], rootless=False)
    store.drop([layer])
    del tree
    assert store.removed == [str(layer.path)]


# Merging


def _random_command(rng: random.Random) -> str:
    names = [rng.choice("abc") for _ in range(rng.randint(1, 3))]
    path, other = "/t/" + "/".join(names), "/t/" + "/".join(rng.choice("abc") for _ in range(rng.randint(1, 3)))
    return rng.choice(
        [
            f"mkdir -p {path}",
            f"mkdir -p {path} && chmod {rng.choice(['700', '1777', '2755'])} {path}",
            f"mkdir -p $(dirname {path}) && echo {rng.random()} > {path}",
            f"echo {rng.random()} >> {path}",
            f"rm -rf {path}",
            f"rm -rf {path}; mkdir -p {path}",
            f"rm -rf {path}; mkdir -p $(dirname {path}); echo {rng.random()} > {path}",
            f"rm -rf {path}; mkdir -p $(dirname {path}); ln -s {other} {path}",
            f"[ -f {path} ] && ln -f {path} {other}",
            f"mv -T {path} {other}",
            f"mv {path} /t/{rng.choice('abc')}",
            f"touch -h -d @{rng.randint(0, 10**9)} {path}",
        ]
    )


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_merged_and_packed_trees_show_the_same(make: Maker, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lower = tmp_path / "lower"
    for path in ("a/a", "a/b", "b/c", "c/a/b"):
        (lower / "t" / path).mkdir(parents=True)
        (lower / "t" / path / "c").write_text(path)
    backend = make()
    backend.start()
    for _ in range(12):
        run(backend, "; ".join(f"{{ {_random_command(rng)}; }} 2>/dev/null" for _ in range(rng.randint(1, 6))))
        backend.start(backend.commit())
    expected = sh(backend, EVERYTHING)
    assert "t/" in expected
    tree = backend.commit()
    merged = tree.retain()
    squash.squash(merged, deepest=1, kept=rng.choice([0, 0, 2]))
    if backend.rootless:
        assert len(merged.layers) <= 3
    parts, of_merged = (backend.unpack(serialization.join(pieces_of(one))) for one in (tree, merged))
    assert len(parts.layers) == len(tree.layers) > 1
    for one, same in ((tree, parts), (merged, of_merged)):  # so that nothing is stored again on another machine
        assert [piece.digest for piece in pieces_of(one)] == [piece.digest for piece in pieces_of(same)]
    packed = (backend.unpack(tree.pack()), backend.unpack(backend.unpack(merged.pack()).pack()))
    for other in (merged, parts, of_merged, *packed):
        backend.start(other)
        assert sh(backend, EVERYTHING) == expected
        # what is merged must also behave: nothing that was deleted shines through after more changes
        assert run(backend, "rm -rf /t && mkdir -p /t/a && ls /t /t/a") == (0, "/t:\na\n\n/t/a:")


def test_deep_stacks_are_merged_before_a_box_starts(box: OverlayBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squash.squash, "__kwdefaults__", {"deepest": 6, "kept": 2})
    for step in range(20):
        sh(box, f"echo {step} >> /all; echo {step} > /{step % 5}; rm -f /{(step + 1) % 5}")
        tree = box.commit()
        box.start(tree)
        assert len(tree.layers) <= 7
    assert sh(box, "cat /all").split() == [str(step) for step in range(20)]
    assert sh(box, "ls / | grep -c '^[0-9]$'") == "4"
    tree.release()
    box.close()
    runtime().settle()


def test_merging_is_done_once_for_siblings_and_leaves_them_their_files(make: Maker) -> None:
    backend, sibling = make(), make()
    backend.start()
    for step in range(4):
        sh(backend, f"echo {step} > /{step}")
        backend.start(backend.commit())
    sh(backend, "echo last > /last")
    tree = backend.commit()
    one, two = tree.retain(), tree.retain()
    squash.squash(one, deepest=1, kept=1)
    squash.squash(two, deepest=1, kept=1)
    assert one.layers == two.layers and len(one.layers) == 2 < len(tree.layers) == 5
    one.release()
    sibling.start(two)
    backend.start(tree)
    for live in (sibling, backend):
        assert sh(live, "cat /0 /1 /2 /3 /last").split() == ["0", "1", "2", "3", "last"]


def test_a_renamed_directory_of_the_base_stays_where_it_was_moved(make: Maker, rootless: bool) -> None:
    backend = make()
    backend.start()
    sh(backend, "mv /old /moved; echo 1 > /moved/new")
    for step in range(3):
        backend.start(backend.commit())
        sh(backend, f"echo {step} > /moved/{step}")
    tree = backend.commit()
    squash.squash(tree, deepest=1, kept=0)
    assert len(tree.layers) == 1
    for other in (tree, backend.unpack(tree.pack())):
        backend.start(other)
        assert sh(backend, "ls /moved; cat /moved/file; ls -d /old 2>/dev/null").split() == [
            *["0", "1", "2", "file", "new"],
            *["from", "below"],
        ]


# Archives


def test_an_archive_keeps_what_a_tree_keeps(make: Maker) -> None:
    backend = make()
    backend.start()
    sh(
        backend,
        """mkdir -p /d/'odd '$'\\n\\xff'; echo 1 > /d/a; ln /d/a /d/b; ln -s /etc/passwd /d/l; mkfifo /d/p; rm -r /old
        truncate -s 20M /d/sparse; echo end >> /d/sparse
        printf x | dd of=/d/sparse bs=1 seek=5M conv=notrunc status=none
        chmod 2755 /d; chmod 600 /d/a; echo s > /dev/shm/s; echo t > /tmp/t
        python3 -c 'import os; os.setxattr("/d/a", "user.x", bytes(range(256)))'
        python3 -c 'import socket; socket.socket(1).bind("/d/socket")'
        touch -d '2001-02-03 04:05:06.123456789' /d""",
    )
    if backend.capabilities.owners:
        sh(backend, "chown 12:34 /d/a /d/sparse; chown -h 56:78 /d/l")
    look = (
        EVERYTHING + '; md5sum /d/sparse; du /d/sparse; python3 -c \'import os; print(os.getxattr("/d/b", "user.x"))\''
    )
    tree = backend.commit(keep_processes=True)
    data = tree.pack()
    assert len(data) < 200_000
    assert data == tree.pack()
    again = backend.unpack(data)
    assert again.base == tree.base and again.id == tree.id
    sh(backend, "rm /d/socket; touch -d '2001-02-03 04:05:06.123456789' /d")
    expected = sh(backend, look)
    backend.start(again)
    assert sh(backend, look) == expected
    assert sh(backend, "cat /dev/shm/s /tmp/t").split() == ["s", "t"]


def test_a_setuid_file_is_packed_without_that_bit(box: OverlayBackend) -> None:
    sh(box, "echo > /f; chmod 6755 /f")
    box.start(box.unpack(box.commit().pack()))
    assert sh(box, "stat -c %a /f") == "755"


def test_a_pipe_is_packed_without_its_set_user_id_bit(box: OverlayBackend) -> None:
    sh(box, "mkfifo /p; chmod 6640 /p; mkdir /d; chmod 2755 /d")
    box.start(box.unpack(box.commit().pack()))
    assert sh(box, "stat -c '%a %F' /p /d") == "640 fifo\n2755 directory"


Members = list[tuple[tarfile.TarInfo, bytes]]


def _member(
    name: str, *, kind: bytes = tarfile.REGTYPE, data: bytes = b"", mode: int = 0o644, **more: str
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), mode
    info.linkname = more.pop("linkname", "")
    info.pax_headers = {"SANDBOXGYM.mtime": "0", **{f"SANDBOXGYM.{key}": value for key, value in more.items()}}
    return info, data


def _archive(members: Members, *, head: dict[str, object] | None = None, number: int | None = None) -> bytes:
    content = {"format": archive.FORMAT, "version": archive.VERSION, "base": "test", "id": "x", "layers": 2}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        first = json.dumps({**content, **(head or {})}).encode()
        last = json.dumps({"members": len(members) if number is None else number}).encode()
        for info, data in [_member("sandboxgym.json", data=first), *members, _member("sandboxgym.end", data=last)]:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


TOP = _member("layers/0", kind=tarfile.DIRTYPE, mode=0o755)
LINK = _member("layers/0/out", kind=tarfile.SYMTYPE, linkname="/tmp")


@pytest.mark.parametrize(
    "members",
    [
        [TOP, _member("layers/0/../../escaped")],
        [TOP, _member("/layers/0/f")],
        [TOP, _member("layers/0//f")],
        [TOP, _member("layers/2/f")],
        [TOP, _member("elsewhere")],
        [_member("layers/0", data=b"x")],
        [TOP, _member("layers/0/missing/f")],
        [TOP, LINK, _member("layers/0/out/escaped")],
        [TOP, LINK, _member("layers/0/out", kind=tarfile.DIRTYPE)],
        [TOP, LINK, _member("layers/0/hard", kind=tarfile.LNKTYPE, linkname="layers/0/out")],
        [TOP, _member("layers/0/hard", kind=tarfile.LNKTYPE, linkname="/etc/passwd")],
        [TOP, _member("layers/0/hard", kind=tarfile.LNKTYPE, linkname="layers/0/../../../../../../etc/passwd")],
        [
            TOP,
            _member("layers/0/f"),
            _member("layers/1", kind=tarfile.DIRTYPE),
            _member("layers/1/f", kind=tarfile.LNKTYPE, linkname="layers/0/f"),
        ],
        [TOP, _member("layers/0/f"), _member("layers/0/f")],
        [TOP, _member("layers/0/w", whiteout="1"), _member("layers/0/w/f")],
        [TOP, _member("layers/0/disk", kind=tarfile.BLKTYPE)],
        [TOP, _member("layers/0/null", kind=tarfile.CHRTYPE)],
        [TOP, _member("layers/0/su", mode=0o4755)],
        [TOP, _member("layers/0/sg", mode=0o2755)],
        [TOP, _member("layers/0/f", **{"xattr.trusted.overlay.opaque": "eQ=="})],
        [TOP, _member("layers/0/f", **{"xattr.security.capability": "eQ=="})],
        [TOP, _member("layers/0/f", **{"xattr.user.x": "not base64"})],
        [TOP, _member("layers/0/f", data=b"xx", size="1")],
        [TOP, _member("layers/0/f", data=b"xx", size="10", extents="5+2 0+0")],
        [TOP, _member("layers/0/f", data=b"xx", size="10", extents="9+2")],
        [TOP, _member("layers/0/f", data=b"xx", size="10", extents="-1+2")],
        [TOP, _member("layers/0/f", data=b"xx", size="99999999999999999999", extents="0+2")],
        [TOP, _member("layers/0/f", mtime="soon")],
    ],
)
def test_archives_that_reach_out_are_refused(store: _Store, members: Members, tmp_path: Path) -> None:
    with pytest.raises(SnapshotCorrupt):
        archive.unpack(_archive(members), store, RootFS("test", (tmp_path,)), rootless=os.geteuid() != 0)
    assert sorted(store.removed) == sorted(str(path) for path in (store.directory / "layers").iterdir())
    assert not list(tmp_path.rglob("escaped"))


LOWEST = _member("layer", kind=tarfile.DIRTYPE, mode=0o755)
PARTS = {"version": archive.OF_PARTS, "layers": 1}


@pytest.mark.parametrize(
    ("members", "head"),
    [
        ([_member("layer/f")], PARTS),
        ([LOWEST, _member("layers/0/f")], PARTS),
        ([LOWEST, _member("layer2/f")], PARTS),
        ([LOWEST, _member("f")], PARTS),
        ([LOWEST, LOWEST], PARTS),
        ([LOWEST], {**PARTS, "layers": 2}),
        ([LOWEST], {**PARTS, "layers": 0}),
        ([LOWEST, _member("layer/../../escaped")], PARTS),
        ([LOWEST, _member("layer/hard", kind=tarfile.LNKTYPE, linkname="/etc/passwd")], PARTS),
        ([LOWEST, _member("layer/hard", kind=tarfile.LNKTYPE, linkname="layer/../../../../etc/passwd")], PARTS),
        ([LOWEST, _member("layer/l", kind=tarfile.SYMTYPE, linkname="/tmp"), _member("layer/l/escaped")], PARTS),
        (  # a link to a file of another layer
            [LOWEST, _member("layer/f"), LOWEST, _member("layer/hard", kind=tarfile.LNKTYPE, linkname="layer/f")],
            {**PARTS, "layers": 2},
        ),
        ([LOWEST, _member("layer/su", mode=0o4755)], PARTS),
        ([LOWEST, _member("layer/disk", kind=tarfile.BLKTYPE)], PARTS),
    ],
)
def test_archives_of_parts_that_reach_out_are_refused(
    store: _Store, members: Members, head: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(SnapshotCorrupt):
        archive.unpack(_archive(members, head=head), store, RootFS("test", (tmp_path,)), rootless=os.geteuid() != 0)
    assert sorted(store.removed) == sorted(str(path) for path in (store.directory / "layers").iterdir())
    assert not list(tmp_path.rglob("escaped"))


def test_an_archive_of_parts_counts_what_it_shows_against_the_limit(store: _Store, tmp_path: Path) -> None:
    big = _member("layer/f", data=bytes(300_000))
    head = {**PARTS, "layers": 3}

    def takes(members: Members, limit: int) -> None:
        data, rootfs = _archive(members, head=head), RootFS("test", (tmp_path,))
        archive.unpack(data, store, rootfs, rootless=os.geteuid() != 0, limit=limit).release()

    takes([LOWEST, big, LOWEST, big, LOWEST, big], 350_000)
    takes([LOWEST, big, LOWEST, _member("layer/f", whiteout="1"), LOWEST], 50_000)
    folder = _member("layer/d", kind=tarfile.DIRTYPE, mode=0o755)
    hidden = _member("layer/d/f", data=bytes(300_000))
    opaque = _member("layer/d", kind=tarfile.DIRTYPE, mode=0o755, opaque="1")
    takes([LOWEST, folder, hidden, LOWEST, opaque, LOWEST, folder], 50_000)
    takes([LOWEST, folder, hidden, LOWEST, _member("layer/d", whiteout="1"), LOWEST], 50_000)
    linked = _member("layer/g", kind=tarfile.LNKTYPE, linkname="layer/f")
    for members in (
        [LOWEST, big, LOWEST, LOWEST],
        [LOWEST, folder, hidden, LOWEST, folder, LOWEST, folder],
        [LOWEST, big, linked, LOWEST, _member("layer/f", whiteout="1"), LOWEST],  # its other name shows
    ):
        with pytest.raises(SandboxFull, match="allowed"):
            takes(members, 200_000)


def test_a_layer_is_packed_once_and_only_new_ones_are_new(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    backend.start()
    packed: list[str] = []
    pack_layer = archive.pack_layer

    def counted(layer: StoredLayer, *, rootless: bool) -> tuple[bytes, int]:
        packed.append(layer.path.name)
        return pack_layer(layer, rootless=rootless)

    monkeypatch.setattr(archive, "pack_layer", counted)
    known: dict[str, bytes] = {}
    new = []
    for command in ("head -c 3000000 /dev/urandom > /big; echo > /small", "echo edited > /small", "rm /big"):
        sh(backend, command)
        tree = backend.commit()
        found = pieces_of(tree)
        fresh = {piece.digest: piece.read() for piece in found if piece.digest not in known}
        known |= fresh
        new.append(sum(map(len, fresh.values())))
        backend.start(tree)
    assert len(packed) == len(set(packed)) == 3
    assert new[0] > 3_000_000
    assert max(new[1:]) < 20_000
    # who lacks a piece of an older layer still gets it
    assert {piece.digest: piece.read() for piece in found}.items() <= known.items()
    assert len(packed) > 3


def test_merging_layers_makes_few_new_pieces(make: Maker) -> None:
    backend = make()
    backend.start()
    for number in range(6):
        sh(backend, f"head -c 1000000 /dev/urandom > /{number}; echo > /s{number}")
        tree = backend.commit()
        backend.start(tree)
    before = {piece.digest for piece in pieces_of(tree)}
    squash.squash(tree, deepest=1, kept=0)
    new = [piece for piece in pieces_of(tree) if piece.digest not in before]
    assert sum(piece.nbytes for piece in new) < 50_000


def test_more_files_in_all_layers_than_an_archive_has_are_merged(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    backend.start()
    for _ in range(6):
        sh(backend, "mkdir -p /d; for i in {1..20}; do echo > /d/$i; done")
        tree = backend.commit()
        backend.start(tree)
    monkeypatch.setattr(archive, "MOST", 60)
    again = backend.unpack(serialization.join(pieces_of(tree)))
    assert len(again.layers) == 1
    backend.start(again)
    assert sh(backend, "ls /d | wc -l") == "20"
    sh(backend, "for i in {1..60}; do echo > /d/x$i; done")
    with pytest.raises(SandboxError, match="at most 58 files"):
        pieces_of(backend.commit())


def test_an_archive_of_another_form_is_cut_into_pieces_all_the_same() -> None:
    data = os.urandom(700_000)
    cut = pieces._cut(data, ())
    assert len(cut) > 2
    assert serialization.join(cut) == data


def test_a_renamed_directory_in_an_archive_stays_inside(make: Maker, rootless: bool) -> None:
    backend = make()
    for redirect in ("Li4v", "Lw==", "L2EvLi4vYg==", "YS9i"):  # ../  /  /a/../b  a/b
        members = [TOP, _member("layers/0/d", kind=tarfile.DIRTYPE, mode=0o755, redirect=redirect)]
        with pytest.raises(SnapshotMismatch if rootless else SnapshotCorrupt):
            backend.unpack(_archive(members))


def test_what_is_no_archive_is_refused(make: Maker) -> None:
    backend = make()
    backend.start()
    sh(backend, "mkdir /d; for i in {1..20}; do echo $i > /d/$i; done")
    data = backend.commit().pack()
    for wrong in (b"", b"x" * 2000, data[: len(data) // 2], data[: -1024 * 11], data[512:]):
        with pytest.raises(SnapshotCorrupt):
            backend.unpack(wrong)
    with pytest.raises(SnapshotCorrupt, match="cut short"):
        backend.unpack(_archive([TOP], number=2))
    with pytest.raises(SnapshotMismatch, match="another"):
        backend.unpack(_archive([TOP], head={"base": "another"}))
    for head in ({"version": 2}, {"version": 3}, {"layers": 10**9}, {"layers": None}, {"format": None}):
        with pytest.raises(SnapshotCorrupt):
            backend.unpack(_archive([TOP], head=head))


def test_damaged_archives_never_raise_anything_else(make: Maker) -> None:
    backend = make()
    backend.start()
    sh(
        backend,
        "mkdir -p /d/e; echo 1 > /d/f; ln /d/f /d/g; ln -s x /d/l; rm /old/file; truncate -s 1M /d/s; echo >> /d/s",
    )
    data = backend.commit().pack()
    rng = random.Random(0)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            backend.unpack(bytes(damaged)).release()
        except (SnapshotCorrupt, SnapshotMismatch):
            continue
