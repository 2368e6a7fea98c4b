"""A small Docker image, made of this machine's programs by ``docker import``: there may be no registry to ask.

It holds bash, coreutils, git and a Python with pytest, and is removed at the end of the session.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from components import missing

REPOSITORY = "sandboxgym-test-base"
PROGRAMS = """
bash sh cat chmod chown cksum cp cut date dd df diff du env expr false find git grep head id kill ln ls mkdir mkfifo
mktemp mv nproc patch ps pwd readlink realpath rm rmdir sed seq setsid sleep sort stat stty tail tar tee touch tr true
truncate tty uname uniq wc which whoami xargs
"""
SETTINGS = (
    "ENV PATH=/opt/python/bin:/usr/bin:/bin",
    "ENV IMAGE_SAYS=hello",
    "WORKDIR /root",
    'CMD ["bash"]',
    "LABEL sandboxgym.test=1",
)
_LEFT_OUT = ("site-packages", "test", "idlelib", "ensurepip", "lib2to3", "__pycache__", "tkinter", "turtledemo")


@pytest.fixture(scope="session")
def docker_image() -> Iterator[str]:
    """Name of the image; skips where there is no daemon."""
    if shutil.which("docker") is None:
        missing("docker", "there is no docker command")
    answer = subprocess.run(["docker", "info", "--format", "{{.OSType}}"], capture_output=True, text=True)
    if answer.stdout.strip() != "linux":
        missing("docker", f"no Docker daemon for Linux containers: {answer.stderr.strip()}")
    remove_images_of_ended_sessions()
    name = f"{REPOSITORY}:{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="sandboxgym-image-") as folder:
        fill(Path(folder))
        changes = [word for setting in SETTINGS for word in ("--change", setting)]
        tar = subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", *changes, "-", name], stdin=tar.stdout, check=True, capture_output=True)
        assert tar.wait() == 0
    yield name
    subprocess.run(["docker", "rmi", "-f", name], check=True, capture_output=True)


def remove_images_of_ended_sessions() -> None:
    listed = subprocess.run(["docker", "images", "--format", "{{.Tag}}", REPOSITORY], capture_output=True, text=True)
    for tag in listed.stdout.split():
        if not Path("/proc", tag).exists():
            subprocess.run(["docker", "rmi", "-f", f"{REPOSITORY}:{tag}"], capture_output=True)
    # One that was still in use when it was removed has lost its name only.
    prune = ["docker", "image", "prune", "--force", "--filter", "label=sandboxgym.test=1"]
    subprocess.run(prune, capture_output=True)


def fill(root: Path) -> None:
    """Put a root file system under a directory."""
    from sandboxgym.sandbox import rootfs

    host = rootfs.host()
    skeleton = host.lowers[0]
    for name in ("etc", "opt"):
        shutil.copytree(skeleton / name, root / name, symlinks=True)
    for name, mode in {"root": 0o700, "home": 0o755, "tmp": 0o1777, "run": 0o755, "var/tmp": 0o1777}.items():
        (root / name).mkdir(parents=True)
        (root / name).chmod(mode)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    libraries: set[str] = set()
    for program in PROGRAMS.split():
        found = shutil.which(program, path="/usr/bin:/bin")
        if found is not None:
            shutil.copy(found, root / "usr/bin" / program)
            libraries |= needed(found)
    interpreter = Path(sys.executable).resolve()
    prefix = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    copy(interpreter, root)
    ignore = shutil.ignore_patterns(*_LEFT_OUT, "config-*", "_test*", "_tkinter*")
    shutil.copytree(prefix / "lib" / version, root / str(prefix / "lib" / version).lstrip("/"), ignore=ignore)
    libraries |= needed(str(interpreter))
    for extension in (prefix / "lib" / version / "lib-dynload").glob("*.so"):
        if not extension.name.startswith(("_test", "_tkinter")):
            libraries |= needed(str(extension))
    for library in libraries:
        copy(Path(library), root)
    (root / "etc/ld.so.cache").unlink(missing_ok=True)  # lists libraries that are not there


def needed(binary: str) -> set[str]:
    """Libraries that a program is linked with, the loader included."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout
    return set(re.findall(r"(/\S+) \(0x", listed))


def copy(path: Path, root: Path) -> None:
    """A file to its own path under another root, through that root's links to /usr."""
    target = root / str(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(path, target)
