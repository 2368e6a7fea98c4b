"""Shared parts of the tests of overlay sandboxes: a root file system, a maker of backends, an unprivileged user."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from components import missing

from sandboxgym.sandbox.base import RootFS
from sandboxgym.sandbox.overlay import kernel
from sandboxgym.sandbox.overlay.backend import OverlayBackend, why_unavailable
from sandboxgym.sandbox.overlay.runtime import runtime
from sandboxgym.system import directories

NOBODY = 65534
CHECKOUT = Path(__file__).parents[2]
Maker = Callable[..., OverlayBackend]


def make_rootfs(folder: Path, name: str = "test") -> RootFS:
    """Make a root file system with little more than the host's ``/usr``."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    for link in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{link}"):
            (folder / link).symlink_to(os.readlink(f"/{link}"))
    (folder / "etc").mkdir()
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nother:x:1000:1000::/:/bin/sh\n")
    (folder / "old").mkdir()
    (folder / "old/file").write_text("from below\n")
    return RootFS(name, (folder,), ((Path("/usr"), "/usr"),))


def sh(backend: OverlayBackend, command: str, **arguments: Any) -> str:
    """Run a command in a container; returns its output without the last newline."""
    return run(backend, command, **arguments)[1]


def run(backend: OverlayBackend, command: str, **arguments: Any) -> tuple[int | None, str]:
    """Run a command; returns exit status and output."""
    process = backend.spawn(["bash", "-c", command], env=backend.env, **arguments)
    assert process.output is not None
    output = b""
    while part := os.read(process.output, 1 << 16):
        output += part
    code = process.wait(300)
    process.close()
    return code, output.decode(errors="replace").rstrip("\n")


@pytest.fixture(params=["root", "rootless"])
def rootless(request: pytest.FixtureRequest) -> bool:
    """Kind of containers, rootless or not; a root process can make both, see `as_nobody` for one that is not root."""
    wanted = request.param == "rootless"
    if not wanted and os.geteuid() != 0:
        missing("overlay", "this process is not root")
    if reason := why_unavailable(rootless=wanted):
        missing("overlay", reason)
    return wanted


@pytest.fixture
def make(rootless: bool, tmp_path: Path) -> Iterator[Maker]:
    """Make backends, and close them afterwards."""
    made: list[OverlayBackend] = []
    rootfs = make_rootfs(tmp_path / "lower")

    def maker(**arguments: Any) -> OverlayBackend:
        made.append(OverlayBackend(**{"rootfs": rootfs, "rootless": rootless, **arguments}))
        return made[-1]

    yield maker
    for backend in made:
        backend.close()
    runtime().settle()


@pytest.fixture
def box(make: Maker) -> OverlayBackend:
    """A live backend."""
    backend = make()
    backend.start()
    return backend


@pytest.fixture
def runtime_folder() -> Iterator[Path]:
    """A directory for the run directories of other processes, also of another user."""
    folder = tempfile.mkdtemp(prefix="sandboxgym-test-")
    try:
        yield Path(folder)
    finally:
        directories.remove(folder)  # at any depth, if a test ends early


def python(folder: Path, program: str, *arguments: str, nobody: bool = False) -> subprocess.Popen[str]:
    """Run Python with this checkout, with run directories in ``folder``."""
    environment = {
        "PATH": os.environ["PATH"],
        "SANDBOXGYM_RUNTIME": str(folder),
        "PYTHONPATH": os.pathsep.join(str(CHECKOUT / name) for name in ("", "tests", "tests/support")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(folder),
    }
    if nobody:
        os.chown(folder, NOBODY, NOBODY)
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_become_nobody if nobody else None,
    )


def _become_nobody() -> None:
    """Drop root. An interpreter in a home directory is mounted at its path, without the rest of the home."""
    kernel.unshare(kernel.NEWNS)
    kernel.make_private()
    closed: dict[Path, list[tuple[Path, int]]] = {}
    for path in {Path(sys.base_prefix), Path(sys.prefix), CHECKOUT}:
        for above in reversed(path.parents):
            if not above.stat().st_mode & 1:
                closed.setdefault(above, []).append((path, kernel.copy_mount(str(path))))
                break
    for above, inside in closed.items():
        kernel.mount("tmpfs", str(above), options=[("mode", "0755")])
        for path, mounted in inside:
            path.mkdir(parents=True, exist_ok=True)
            kernel.attach(mounted, str(path))
            os.close(mounted)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
