"""Directory trees made to obstruct counting and deletion."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox.overlay_boxes import python, runtime_folder  # noqa: F401 - fixture

from sandboxgym.sandbox.layers import disk
from sandboxgym.sandbox.layers.store import LayerStore
from sandboxgym.system import directories, run_directories

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="trees are walked by descriptors elsewhere")
# ruff: noqa: F811


def dig(top: Path, names: list[str], *, beside: bool = False) -> None:
    """Nested directories, each in the one before, with a file at the bottom; ``beside``: and one next to each."""
    top.mkdir(exist_ok=True)
    descriptor = os.open(top, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=descriptor)
        if beside:
            os.mkdir("beside", dir_fd=descriptor)
        deeper = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = deeper
    with open(os.open("bottom", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=descriptor), "wb") as file:
        file.write(b"x" * 100_000)
    os.close(descriptor)


def count(top: Path) -> tuple[int, int]:
    """Directories and files in a tree."""
    kinds = [entry.is_dir(follow_symlinks=False) for entry in directories.walk(str(top))]
    return sum(kinds), len(kinds) - sum(kinds)


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        (["d"] * 10_000, False),
        (["n" * 255] * 2000, False),
        (["d"] * 300, True),
        (["\udcff\n" * 100] * 100, True),
    ],
    ids=["deep", "long names", "a comb", "odd names"],
)
def test_trees_of_any_depth_are_counted_and_deleted(tmp_path: Path, names: list[str], beside: bool) -> None:
    top = tmp_path / "top"
    dig(top, names, beside=beside)
    assert count(top) == (len(names) * (1 + beside), 1)
    assert run_directories.tree_nbytes(top) == 100_000
    assert disk.usage(str(top)) > 100_000
    run_directories.remove_tree(top)
    assert not top.exists()


def test_few_descriptors_are_open_whatever_the_depth(tmp_path: Path) -> None:
    dig(tmp_path / "top", ["d"] * 1000, beside=True)
    before = len(os.listdir("/dev/fd"))
    most = max(len(os.listdir("/dev/fd")) for _ in directories.walk(str(tmp_path / "top")))
    assert most <= before + directories.KEPT + 5
    assert len(os.listdir("/dev/fd")) == before
    directories.remove(str(tmp_path / "top"))


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "mine/deep").mkdir(parents=True)
    (tmp_path / "mine/file").touch()
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(tmp_path / "mine")
    (top / "again").symlink_to(tmp_path / "mine/file")
    assert count(top) == (0, 2)
    directories.remove(str(top))
    assert (tmp_path / "mine/file").exists() and (tmp_path / "mine/deep").exists()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    directories.remove(str(tmp_path / "link"))
    assert (tmp_path / "mine/file").exists() and not (tmp_path / "link").is_symlink()
    directories.remove(str(tmp_path / "nothing"))


def test_a_walk_continues_where_directories_are_moved_meanwhile(tmp_path: Path) -> None:
    top = tmp_path / "top"
    dig(top, ["d"] * 100, beside=True)
    for number in range(20):
        (top / f"z{number}").mkdir()
        (top / f"z{number}/file").touch()
    moved, found = top / "d/d/d/d", set()
    for number, entry in enumerate(directories.walk(str(top))):
        found.add(entry.name)
        if number == 150:  # at depth 60 or so: the way back is another one from here on
            os.rename(moved, tmp_path / "elsewhere")
            os.mkdir(moved)
    assert {f"z{number}" for number in range(20)} <= found


def test_a_directory_that_goes_round_is_walked_once(tmp_path: Path) -> None:
    for name in ("a/x", "b"):
        (tmp_path / "top" / name).mkdir(parents=True)
    (tmp_path / "top/a/x/file").touch()
    found = 0
    for entry in directories.walk(str(tmp_path / "top")):
        found += entry.name == "file"
        for one, other in (("a", "b"), ("b", "a")):
            if entry.name == "file" and (tmp_path / "top" / one / "x").exists():
                os.rename(tmp_path / "top" / one / "x", tmp_path / "top" / other / "x")
                break
    assert found == 1


def test_a_directory_that_is_moved_while_it_is_deleted_goes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "top"
    dig(top, ["d"] * 100)
    unlink = os.unlink

    def late(name: str, *, dir_fd: int | None = None) -> None:
        unlink(name, dir_fd=dir_fd)
        if name == "bottom":
            os.rename(top / "d/d/d", top / "up")

    monkeypatch.setattr(os, "unlink", late)
    directories.remove(str(top))
    assert not top.exists()


def test_what_cannot_be_deleted_is_said_and_the_rest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "top"
    dig(top, ["a", "b"])
    (top / "kept").touch()
    unlink = os.unlink

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        if name == "kept":
            raise OSError(5, "input/output error")
        unlink(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match="input/output"):
            directories.remove(str(top))
    assert [path.name for path in top.rglob("*")] == ["kept"]
    directories.remove(str(top))
    assert not top.exists()


_CLOSED = """
import os
from pathlib import Path
from sandboxgym.system import directories, run_directories
top = Path(os.environ["HOME"], "top")
(top / "a/b/c").mkdir(parents=True)
(top / "a/b/file").write_bytes(bytes(1000))
for mode, path in ((0, "a/b/c"), (0o400, "a/b"), (0o111, "a"), (0, "")):
    (top / path).chmod(mode)
denied = []
print(list(directories.walk(str(top), denied=denied)), len(denied), run_directories.tree_nbytes(top))
run_directories.remove_tree(top)
print(top.exists())
"""


def test_modes_keep_no_owner_from_deleting(runtime_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("takes root to become nobody")
    output, _ = python(runtime_folder, _CLOSED, nobody=True).communicate(timeout=300)
    assert output == "[] 1 0\nFalse\n"


@pytest.mark.parametrize("flag", ["+i", "+a"])
def test_flags_keep_root_from_nothing(tmp_path: Path, flag: str) -> None:
    top = tmp_path / "top"
    dig(top, ["a", "b"])
    marked = [top / "a/b/bottom", top / "a/b", top]
    for path in marked:
        if os.geteuid() != 0 or subprocess.run(["chattr", flag, path], capture_output=True).returncode:
            for one in reversed(marked):
                subprocess.run(["chattr", flag.replace("+", "-"), one], capture_output=True)
            pytest.skip("files cannot be marked here")
    try:
        with pytest.raises(PermissionError):
            os.unlink(marked[0])
        directories.remove(str(top))
        assert not top.exists()
    finally:
        for path in reversed(marked):
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["chattr", flag.replace("+", "-"), path], capture_output=True)


def test_layers_are_placed_each_by_itself_where_a_file_system_can(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    LayerStore(tmp_path / "store", remove=list)
    layers = tmp_path / "store/layers"
    shown = subprocess.run(["lsattr", "-d", layers], capture_output=True, text=True)
    if subprocess.run(["chattr", "+T", tmp_path], capture_output=True).returncode:
        assert "T" not in shown.stdout.partition(" ")[0]  # and nobody minds
    else:
        assert "T" in shown.stdout.partition(" ")[0]


def test_the_extent_of_a_layer_is_known_within_limits_only(tmp_path: Path) -> None:
    assert disk.extent(str(tmp_path), 0, 0) == 0
    assert disk.extent(str(tmp_path), -1, 0) is None
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/full").write_bytes(b"1" * 10_000)
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    found = disk.extent(str(tmp_path), 3, 1 << 20)
    assert found is not None and 10_000 <= found < 1 << 20
    assert disk.extent(str(tmp_path), 2, 1 << 20) is None
    assert disk.extent(str(tmp_path), 3, 9_999) is None
