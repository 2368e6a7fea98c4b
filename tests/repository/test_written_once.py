"""Code with one home is written nowhere else: atomic writes, locks, archives, exact copies, reading of /proc.

A module that does one of these itself is named here with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for package in ("sandboxgym", "sandboxgym_pytest", "bpo_ref")
    for path in sorted((ROOT / package).rglob("*.py"))
}
INSIDE = ("sandboxgym/attack/inside/", "sandboxgym/conformance/sandbox_probes/")
"""Programs that run in a sandbox, which has no package."""


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Calls with the name that is called and what it belongs to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func.attr, ast.unparse(node.func.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node, node.func.id, ""


def gives_names(tree: ast.AST) -> bool:
    """True if files are renamed, flushed or made under temporary names, as atomic writes do."""
    for call, name, owner in calls(tree):
        of_path = owner not in ("", "dataclasses") and len(call.args) == 1 and not call.keywords
        if name in ("fsync", "mkstemp", "renames") or (name == "rename" and (owner == "os" or of_path)):
            return True
        if name == "replace" and (owner == "os" or of_path):
            return True
    return False


def locks(tree: ast.AST) -> bool:
    return any(name in ("flock", "lockf") for _, name, _ in calls(tree))


def handles_archives(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Import) and any(alias.name == "tarfile" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "tarfile")
        for node in ast.walk(tree)
    )


def copies_exactly(tree: ast.AST) -> bool:
    """True if blocks are shared, holes are found, or attributes carried over from one entry to another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == 0x40049409:  # FICLONE
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("SEEK_DATA", "SEEK_HOLE", "copystat"):
            return True
    return any(name == "setxattr" and "getxattr" in ast.unparse(call) for call, name, _ in calls(tree))


def reads_processes(tree: ast.AST) -> bool:
    """True if a line of /proc/PID/stat is taken apart, or memory is read from statm or smaps_rollup."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(attr="rpartition"), [ast.Constant(")" | b")")]):
                return True
            case ast.Constant(str(value)) if value.endswith("/statm"):
                return True
    return False


HOMES: dict[Callable[[ast.AST], bool], dict[str, str]] = {
    gives_names: {
        "sandboxgym/system/atomic.py": "the home",
        "sandboxgym/system/run_directories.py": "a claim's temporary name says whose it is",
        "sandboxgym/sandbox/layers/accountant.py": "runs in a fork of the zygote, which imports as little as it can",
        "sandboxgym/sandbox/copy/backend.py": "moves the files of a container that ended into a snapshot",
        "sandboxgym/envs/swebench/workspaces/prepared.py": "moves a damaged entry away while others use it",
        "sandboxgym/workers/blobs.py": "flushes many files together before it names them",
        "sandboxgym/sandbox/layers/store.py": "replaces a hold of layers, no file",
        "sandboxgym/cli/download.py": "puts a finished download in its place",
        "sandboxgym/cli/support/transfer.py": "flushes a download that grows in place",
        "sandboxgym/cli/support/episodes.py": "flushes a line that was appended",
        "sandboxgym/cli/support/unpack.py": "moves unpacked files into a data set that is there",
        "bpo_ref/learning/checkpoint.py": "puts a folder in the place of another",
    },
    locks: {
        "sandboxgym/system/once.py": "the home",
        "sandboxgym/system/run_directories.py": "the home of locks that nobody waits for",
        "sandboxgym/envs/swebench/workspaces/prepared.py": "shared locks of what is in use",
        "sandboxgym/workers/blobs.py": "shared locks of those who only add",
        "sandboxgym/cli/support/episodes.py": "a lock that children of the process do not hold",
        "bpo_ref/running/folder.py": "a lock that children of the process do not hold",
        "sandboxgym/attack/escape.py": "attacks by locks",
    },
    handles_archives: {
        "sandboxgym/sandbox/files/members.py": "the home of reading what an agent may have written",
        "sandboxgym/sandbox/files/archive.py": "snapshots of file layers",
        "sandboxgym/sandbox/files/portable.py": "snapshots of directories",
        "sandboxgym/sandbox/files/pieces.py": "the same in pieces",
        "sandboxgym/sandbox/files/differences.py": "the same compared",
        "sandboxgym/sandbox/files/rootfs.py": "unpacks an image that the user chose, with owners and links",
        "sandboxgym/sandbox/docker/archive.py": "layers that the Docker daemon saved",
        "sandboxgym/sandbox/images/pull.py": "writes an image as the Docker daemon loads it",
        "sandboxgym/sandbox/docker/container_files.py": "single files, as the Docker daemon transfers them",
        "sandboxgym/cli/support/unpack.py": "unpacks data sets, plain files alone",
        "sandboxgym/envs/harbor/dockerfile.py": "packs what a Dockerfile copies, for the sandbox to unpack",
        "sandboxgym/adapters/harbor.py": "unpacks a folder of a sandbox, by tarfile's own filter",
        "sandboxgym/attack/docker_image.py": "makes an image",
        "sandboxgym/bench/swebench.py": "makes an image",
    },
    copies_exactly: {
        "sandboxgym/sandbox/files/copy.py": "the home",
        "sandboxgym/cli/support/doctor_checks.py": "finds out whether the file system shares blocks",
    },
    reads_processes: {
        "sandboxgym/system/proc.py": "the home",
        "sandboxgym/sandbox/overlay/kernel.py": "addresses of this process's own command line",
        "sandboxgym/attack/stage.py": "the size of an attacking process",
        "sandboxgym/bench/tools/cost.py": "runs with the package of another checkout",
        "bpo_ref/running/keeper.py": "imports the standard library alone, to be small and there at once",
    },
}


@pytest.fixture(scope="module")
def trees() -> Mapping[str, ast.AST]:
    return {
        name: ast.parse(path.read_text(encoding="utf-8"))
        for name, path in SOURCES.items()
        if not name.startswith(INSIDE)
    }


@pytest.mark.parametrize("does", HOMES, ids=lambda does: does.__name__)
def test_what_has_one_home_is_written_nowhere_else(
    does: Callable[[ast.AST], bool], trees: Mapping[str, ast.AST]
) -> None:
    assert {name for name, tree in trees.items() if does(tree)} == set(HOMES[does])


@pytest.mark.parametrize(
    ("does", "text"),
    [
        (gives_names, "os.replace(a, b)"),
        (gives_names, "path.with_suffix('.new').replace(path)"),
        (gives_names, "partial.rename(path)"),
        (gives_names, "os.fsync(file.fileno())"),
        (gives_names, "tempfile.mkstemp()"),
        (locks, "fcntl.flock(file, fcntl.LOCK_EX)"),
        (handles_archives, "def f():\n    import tarfile"),
        (handles_archives, "from tarfile import open"),
        (copies_exactly, "fcntl.ioctl(a, 0x40049409, b)"),
        (copies_exactly, "os.setxattr(a, name, os.getxattr(b, name))"),
        (copies_exactly, "os.lseek(file, at, os.SEEK_DATA)"),
        (reads_processes, "text.rpartition(')')[2].split()"),
        (reads_processes, "open('/proc/self/statm')"),
    ],
)
def test_what_is_written_again_is_found(does: Callable[[ast.AST], bool], text: str) -> None:
    assert does(ast.parse(text))


@pytest.mark.parametrize(
    "text", ["text.replace('a', 'b')", "dataclasses.replace(x, a=1)", "replace(x)", "when.replace(tzinfo=UTC)"]
)
def test_what_only_has_the_same_name_is_no_atomic_write(text: str) -> None:
    assert not gives_names(ast.parse(text))
