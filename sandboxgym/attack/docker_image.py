"""A Docker image of this machine's own programs for containers to attack, as there may be no registry to use."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandboxgym.sandbox.base import SandboxUnavailable

REPOSITORY = "sandboxgym-attack"
_PROGRAMS = """
bash sh cat chmod chown cp date dd du env false find grep head id kill ln ls mkdir mkfifo mv pkill ps pwd readlink rm
rmdir sed seq setsid sleep sort stat stty tail tee test touch tr true truncate uname wc yes hostname pgrep
"""
_LEFT_OUT = ("site-packages", "test", "idlelib", "ensurepip", "lib2to3", "__pycache__", "tkinter", "turtledemo")


@contextlib.contextmanager
def own_image() -> Iterator[str]:
    """Build the image; its name is removed in the end, or with the run directory if the process was killed.

    Raises:
        SandboxUnavailable: no daemon.
    """
    from sandboxgym.sandbox.docker.client import daemon_errors
    from sandboxgym.sandbox.docker.images import LABEL, Ownership

    ownership = Ownership.of_this_process()
    api, name = ownership.api, f"{REPOSITORY}:{ownership.next_name()}"
    with tempfile.TemporaryDirectory(prefix="sandboxgym-attack-image-") as folder:
        _fill(Path(folder))
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(folder, arcname=".", filter=_of_root)
            file.seek(0)
            search = f"{Path(sys.base_prefix).resolve()}/bin:/usr/bin:/bin"
            changes = [f"ENV PATH={search}", "WORKDIR /root", 'CMD ["bash"]', f"LABEL {LABEL}={ownership.path.name}"]
            with daemon_errors():
                repository, _, tag = name.partition(":")
                api.import_image_from_data(file, repository=repository, tag=tag, changes=changes)
    try:
        yield name
    finally:
        with contextlib.suppress(SandboxUnavailable), daemon_errors():
            api.remove_image(name, force=True)


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _fill(root: Path) -> None:
    for name, mode in {
        "root": 0o700,
        "home": 0o755,
        "etc": 0o755,
        "tmp": 0o1777,
        "run": 0o755,
        "var/tmp": 0o1777,
    }.items():
        (root / name).mkdir(parents=True)
        (root / name).chmod(mode)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "usr/local/bin").mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    libraries: set[str] = set()
    for program in _PROGRAMS.split():
        found = shutil.which(program, path="/usr/bin:/bin")
        if found is not None:
            shutil.copy(found, root / "usr/bin" / program)
            libraries |= _needed(found)
    interpreter, prefix = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    _copy(interpreter, root)
    link = root / str(prefix / "bin/python3").lstrip("/")
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(interpreter)
    ignore = shutil.ignore_patterns(*_LEFT_OUT, "config-*", "_test*", "_tkinter*")
    library = str(prefix / "lib" / version)
    shutil.copytree(library, root / library.lstrip("/"), ignore=ignore)
    libraries |= _needed(str(interpreter))
    for extension in Path(library, "lib-dynload").glob("_ctypes*.so"):
        libraries |= _needed(str(extension))
    for needed in libraries:
        _copy(Path(needed), root)


def _needed(binary: str) -> set[str]:
    """List the libraries that a program is linked with, the loader included."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout
    return set(re.findall(r"(/\S+) \(0x", listed))


def _copy(path: Path, root: Path) -> None:
    """Copy a file to its own path under another root, through that root's links to /usr."""
    target = root / os.fspath(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(path, target)
