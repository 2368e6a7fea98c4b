"""The three files of name resolution in a sandbox: ``/etc/hosts``, ``/etc/hostname`` and ``/etc/resolv.conf``.

1. They are those that Docker gives a container: `localhost` and the container's own name resolve without a network,
   whatever the image holds. The own name is the same everywhere, and none of the host's names is shown; with the host's
   network, its ``resolv.conf`` is.
2. On overlays they are a layer of their own above the root file system (`layer`) and below all writes: changes to them
   inside are part of the sandbox's files like any other, and a packed tree does not hold them. In Docker containers
   they are mounted, and changes to them are recorded with the image (``docker/images.py``).
3. Where ``/etc`` is a link, they lie where it leads inside the root file system. A link in the place of one of them is
   hidden by the file, and nothing is ever written through it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.sandbox.layers.squash import is_whiteout
from sandboxgym.system import proc
from sandboxgym.system.atomic import atomic_folder

HOST = "sandbox"
"""Host name of every container."""
OWN_ADDRESS = "127.0.1.1"
"""Address of the host name, a loopback address of its own: a reverse look-up finds the name."""
FILES = ("hosts", "hostname", "resolv.conf")
"""Names of the files in ``/etc``."""
LONGEST = 1 << 16
"""Bytes of one file that are read or recorded."""
_LINKS = 40  # that are followed, as the kernel does


def contents(*, network: bool) -> dict[str, bytes]:
    """Content of the files, by their names in ``/etc``.

    Args:
        network: True if the host's network is shared, and so its resolver can be asked.
    """
    lines = ["127.0.0.1\tlocalhost"]
    if _has_ipv6():
        lines += ["::1\tlocalhost ip6-localhost ip6-loopback", "fe00::0\tip6-localnet", "ff00::0\tip6-mcastprefix"]
        lines += ["ff02::1\tip6-allnodes", "ff02::2\tip6-allrouters"]
    lines.append(f"{OWN_ADDRESS}\t{HOST}")
    resolver = b""
    if network:
        with contextlib.suppress(OSError):  # there is none
            resolver = proc.head("/etc/resolv.conf", LONGEST)
    return {
        "hosts": "".join(f"{line}\n" for line in lines).encode(),
        "hostname": f"{HOST}\n".encode(),
        "resolv.conf": resolver,
    }


def layer(directory: Path, lowers: Sequence[Path], files: dict[str, bytes]) -> Path:
    """Directory of the layer above a root file system, made once.

    Args:
        directory: for the layer; not shared.
        lowers: of the root file system, topmost first.
        files: as `contents` gives them.

    Raises:
        SandboxUnavailable: there is no such root file system.
    """
    key = hashlib.sha256(repr([list(map(str, lowers)), sorted(files.items())]).encode()).hexdigest()[:24]
    path = directory / f"names-{key}"
    if path.exists():
        return path
    with atomic_folder(path) as folder:
        try:
            _dress(folder, lowers[0].stat())
        except OSError as error:
            raise SandboxUnavailable(f"the root file system cannot be read: {error}") from error
        for part, status in _etc(lowers):
            folder = folder / part
            folder.mkdir()
            _dress(folder, status)
        for name, content in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o644)
            os.utime(folder / name, (0, 0))
        for made, status in zip([folder, *folder.parents], _statuses(lowers)):
            os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))  # which making what is inside has changed
    return path


def _statuses(lowers: Sequence[Path]) -> list[os.stat_result]:
    """Statuses of the directories of the layer, the innermost first."""
    return [*(status for _, status in reversed(list(_etc(lowers)))), lowers[0].stat()]


def _has_ipv6() -> bool:
    return os.path.exists("/proc/net/if_inet6")


def _dress(path: Path, status: os.stat_result) -> None:
    """Give a directory the mode, and where possible the owner, of the one that it is merged with."""
    with contextlib.suppress(PermissionError):
        os.chown(path, status.st_uid, status.st_gid)
    path.chmod(stat.S_IMODE(status.st_mode))


def _etc(lowers: Sequence[Path]) -> Iterator[tuple[str, os.stat_result]]:
    """Directories on the path to the target of ``/etc`` in merged layers; new ones where there are none."""
    pending, links = ["etc"], 0
    found: list[tuple[str, os.stat_result, list[Path]]] = []
    while pending:
        part = pending.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            found = found[:-1]
            continue
        within = found[-1][2] if found else list(lowers)
        status, folders, target = _merged(within, part)
        if target is None:
            found.append((part, status or lowers[0].stat(), folders))
            continue
        links += 1
        if links > _LINKS:  # nothing inside can go there either
            return iter([("etc", lowers[0].stat())])
        if target.startswith("/"):
            found = []
        pending = [*target.split("/"), *pending]
    return iter([(part, status) for part, status, _ in found])


def _merged(folders: Sequence[Path], name: str) -> tuple[os.stat_result | None, list[Path], str | None]:
    """A directory of merged layers: its status, if it exists, and its parts; or the target of a link of that name."""
    first: os.stat_result | None = None
    parts: list[Path] = []
    for folder in folders:
        path = folder / name
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISLNK(status.st_mode) and first is None:
            return None, [], os.readlink(path)
        if is_whiteout(status) or not stat.S_ISDIR(status.st_mode):
            break
        first = first or status
        parts.append(path)
        if _is_opaque(path):
            break
    return first, parts, None


def _is_opaque(path: Path) -> bool:
    for prefix in ("trusted", "user"):
        try:
            if os.getxattr(path, f"{prefix}.overlay.opaque") == b"y":
                return True
        except OSError:
            continue
    return False
