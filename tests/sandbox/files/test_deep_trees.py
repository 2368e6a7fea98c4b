"""Directories nested deeper than the longest path: removed at every kind of end, kept by snapshots and forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox.overlay_boxes import CHECKOUT, python, runtime_folder  # noqa: F401 - fixture
from sandbox.sandboxes import Maker, check, kind, make  # noqa: F401 - fixtures

from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.layers import squash
from sandboxgym.sandbox.overlay.runtime import runtime
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.system import run_directories

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="such trees are made by Linux's sandboxes")
# ruff: noqa: F811

DIG = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(int(sys.argv[2])):
    os.mkdir(sys.argv[3])
    os.chdir(sys.argv[3])
open("bottom", "w").write("at the bottom")
os.link("bottom", "again")
os.mkdir("closed")
open("closed/file", "w").write("closed")
os.chmod("closed/file", 0)
os.chmod("closed", 0)
"""
LOOK = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(int(sys.argv[2])):
    os.chdir(sys.argv[3])
print(open("bottom").read(), os.stat("again").st_nlink, oct(os.stat("closed").st_mode))
"""
DEPTH = 1200
"""More than Python recurses, and with names of four letters more than a path may be long."""
BOTTOM = "at the bottom 2 0o40000"


def place(sandbox: Sandbox, folder: str) -> str:
    """Path of a directory of the root: the copy backend does not map paths."""
    root = getattr(sandbox.backend, "root", None)
    return folder if root is None else f"{root}{folder}"


def dig(sandbox: Sandbox, folder: str = "/tmp", *, depth: int = DEPTH, name: str = "deep") -> None:
    """Nest directories in a sandbox."""
    sandbox.write_file("/tmp/dig.py", DIG.encode())
    result = sandbox.execute(f"python3 {place(sandbox, '/tmp')}/dig.py {place(sandbox, folder)} {depth} {name}")
    assert result.exit_code == 0, result.output


def look(sandbox: Sandbox, folder: str = "/tmp", *, depth: int = DEPTH, name: str = "deep") -> str:
    """Content of the file at the bottom of a deep tree."""
    sandbox.write_file("/tmp/look.py", LOOK.encode())
    return sandbox.execute(
        f"python3 {place(sandbox, '/tmp')}/look.py {place(sandbox, folder)} {depth} {name}"
    ).output.strip()


def test_deep_trees_are_kept_by_snapshots_and_forks(make: Maker) -> None:
    box = make()
    dig(box)
    dig(box, name="n" * 200, depth=100)
    saved = box.snapshot()
    (fork,) = box.fork(1)
    assert look(box) == look(fork) == BOTTOM
    assert look(fork, name="n" * 200, depth=100) == BOTTOM
    fork.close()
    box.execute(f"rm -rf {place(box, '/tmp')}/n*; mv {place(box, '/tmp')}/deep {place(box, '/')}")
    box.restore(saved)
    assert look(box) == BOTTOM
    with pytest.raises(SandboxError, match="cannot be packed"):
        saved.pack()
    box.close()
    leftovers_of_this_process()


CHANGE = """
import os
os.chdir("/tmp")
for _ in range(600):
    os.chdir("deep")
open("{step}", "w").write("x")
os.path.exists("{gone}") and os.unlink("{gone}")
print(*sorted(os.listdir()))
"""


def test_deep_layers_are_merged(make: Maker, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "copy":
        pytest.skip("a copy has no layers")
    monkeypatch.setattr(squash.squash, "__kwdefaults__", {"deepest": 3, "kept": 1})
    box = make()
    dig(box)
    for step in range(5):
        box.write_file("/tmp/change.py", CHANGE.format(step=step, gone=step - 2).encode())
        output = box.execute("python3 /tmp/change.py").output
        box.restore(box.snapshot())
    assert output == "3 4 deep\n"
    assert look(box).startswith("at the bottom")  # with the merged layer's own names for the file
    box.write_file("/tmp/change.py", CHANGE.format(step=9, gone=3).encode())
    assert box.execute("python3 /tmp/change.py").output == "4 9 deep\n"


def test_a_shell_in_a_deep_directory_can_be_snapshotted(make: Maker) -> None:
    box = make()
    dig(box, depth=30, name="n" * 200)
    box.execute(f"cd {place(box, '/tmp')}; for _ in {{1..30}}; do builtin cd ./nnn*; done")
    try:
        (fork,) = box.fork(1)
    except SandboxError:
        return
    assert look(box, depth=30, name="n" * 200) == BOTTOM
    assert look(fork, depth=30, name="n" * 200) == BOTTOM


def leftovers_of_this_process() -> None:
    """Check that this process has left none of the directories that it removed."""
    runtime().settle()
    mine = f"-{os.getpid()}-"  # those of other tests' killed processes lie beside them
    assert [left for left in run_directories.reap() if mine in left.path.name] == []


OWNER = """
import os, sys
sys.path[:0] = [sys.argv[3]]
from sandbox.files import test_deep_trees as deep
from sandboxgym.sandbox.sandbox import make_sandbox
box = make_sandbox(sys.argv[1], allow_unsafe=True)
deep.dig(box, depth=int(sys.argv[4]))
deep.dig(box, name="n" * 255, depth=50)
made = 0
if sys.argv[1] == "copy":  # the others cannot be written to there
    control = str(box.backend.control)
    box.execute(f"mkdir {control}/x")
    made = box.execute(f"python3 {deep.place(box, '/tmp')}/dig.py {control}/x {sys.argv[4]} deep").exit_code
print(made, flush=True)
if sys.argv[2] == "close":
    box.close()
    pass
elif sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
"""


def _ended(folder: Path, kind: str, how: str, *, nobody: bool = False, depth: int = DEPTH) -> str:
    owner = python(folder, OWNER, kind, how, str(CHECKOUT / "tests"), str(depth), nobody=nobody)
    return "\n" + owner.communicate(timeout=600)[0]  # a backend may warn first


def _runs(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(("lower", "."))]


@pytest.mark.parametrize("how", ["close", pytest.param("exit", marks=pytest.mark.slow)])
def test_deep_trees_go_at_an_orderly_end(kind: str, how: str, runtime_folder: Path) -> None:
    output = _ended(runtime_folder, kind, how)
    assert output.endswith("\n0\n") and "Traceback" not in output
    assert _runs(runtime_folder) == []


@pytest.mark.parametrize("depth", [DEPTH, pytest.param(10_000, marks=pytest.mark.slow)])
def test_gc_clears_deep_trees_of_a_killed_owner(kind: str, runtime_folder: Path, depth: int) -> None:
    assert _ended(runtime_folder, kind, "kill", depth=depth).endswith("\n0\n")
    assert len(_runs(runtime_folder)) == 1
    done = subprocess.run(
        [sys.executable, "-m", "sandboxgym", "gc"],
        env={**os.environ, "SANDBOXGYM_RUNTIME": str(runtime_folder), "SANDBOXGYM_CACHE": str(runtime_folder)},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "removed 1, " in done.stdout, done.stdout + done.stderr
    assert _runs(runtime_folder) == []


@pytest.mark.parametrize("unprivileged", ["overlay-rootless", "copy"])
@pytest.mark.parametrize("how", ["kill", *(pytest.param(how, marks=pytest.mark.slow) for how in ("close", "exit"))])
def test_an_ordinary_user_clears_them_too(unprivileged: str, how: str, runtime_folder: Path) -> None:
    check(unprivileged)
    if os.geteuid() != 0:
        pytest.skip("the tests above are of an ordinary user then")
    output = _ended(runtime_folder, unprivileged, how, nobody=True)
    assert output.endswith("\n0\n") and "Traceback" not in output
    if how == "kill":
        reap = "from sandboxgym.system import run_directories; print([left.note for left in run_directories.reap()])"
        assert python(runtime_folder, reap, nobody=True).communicate(timeout=600)[0] == "['']\n"
    assert _runs(runtime_folder) == []


FORK = """
import os, sys
sys.path[:0] = [sys.argv[2]]
from sandbox.files import test_deep_trees as deep
from sandboxgym.sandbox.layers import squash
from sandboxgym.sandbox.sandbox import make_sandbox
squash.squash.__kwdefaults__ = {"deepest": 1, "kept": 0}
with make_sandbox(sys.argv[1], allow_unsafe=True) as box:
    deep.dig(box, depth=1)
    (fork,) = box.fork(1)
    (again,) = fork.fork(1)
    fork.execute("echo > /tmp/one" if sys.argv[1] != "copy" else "true")
    fork.restore(fork.snapshot())
    fork.restore(fork.snapshot())
    print(deep.look(box, depth=1), deep.look(fork, depth=1), deep.look(again, depth=1))
    print(fork.execute(f"cat {deep.place(fork, '/tmp')}/deep/closed/file 2>&1").output.strip())
"""


@pytest.mark.parametrize("unprivileged", ["overlay-rootless", "copy"])
def test_an_ordinary_user_forks_what_is_locked(unprivileged: str, runtime_folder: Path) -> None:
    check(unprivileged)
    if os.geteuid() != 0:
        pytest.skip("takes root to become nobody")
    output = python(runtime_folder, FORK, unprivileged, str(CHECKOUT / "tests"), nobody=True).communicate(timeout=600)[
        0
    ]
    expected = "closed" if unprivileged != "copy" else "Permission denied"  # root in a sandbox may read everything
    assert output.splitlines()[-2].count("at the bottom") == output.splitlines()[-2].count("0o40000") == 3, output
    assert expected in output.splitlines()[-1]
