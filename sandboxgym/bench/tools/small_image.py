"""A small root file system of this machine's programs, for a Docker image where no registry can be reached."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sandboxgym.sandbox.files import rootfs

PROGRAMS = """
bash sh cat chmod chown cksum cp cut date dd df diff dirname du env expr false find git grep head id kill ln ls mkdir
mkfifo mktemp mv nproc patch ps pwd readlink realpath rm rmdir sed seq setsid sleep sort stat stty tail tar tee touch tr
true truncate tty uname uniq wc which whoami xargs
"""
_LEFT_OUT = ("site-packages", "test", "idlelib", "ensurepip", "lib2to3", "__pycache__", "tkinter", "turtledemo")


def fill(root: Path, *, packages: Sequence[str] | None = None) -> None:
    """Put a root file system under a directory: bash, coreutils, git and a Python.

    Args:
        root: an empty directory.
        packages: distributions for that Python, as `rootfs.host` takes them; by default pytest.
    """
    host = rootfs.host(packages=packages)
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
    """List the libraries that a program is linked with, the loader included."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout
    return set(re.findall(r"(/\S+) \(0x", listed))


def copy(path: Path, root: Path) -> None:
    """Copy a file to its own path under another root, through that root's links to /usr."""
    target = root / str(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(path, target)
