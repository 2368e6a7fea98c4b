"""The layers of an image above those of its base, as a portable archive."""

from __future__ import annotations

import json
import logging
import posixpath
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandboxgym.sandbox.base import CONTROL, SandboxError
from sandboxgym.sandbox.docker.client import daemon_errors
from sandboxgym.sandbox.files import name_files
from sandboxgym.sandbox.files.portable import ArchiveHeader, ArchiveWriter

log = logging.getLogger("sandboxgym")

_GONE = ".wh."
_EMPTIED = ".wh..wh..opq"


def pack(
    api: Any, image: str, *, base: str, base_layers: Sequence[str], scratch: Path, facts: Mapping[str, str]
) -> bytes:
    """Pack an image as an archive, with facts in its header.

    The daemon hands out whole images only: this takes the time and, under ``scratch``, the disk of the base too.
    """
    with tempfile.TemporaryFile(dir=scratch) as file:
        with daemon_errors():
            layers = api.inspect_image(image)["RootFS"]["Layers"]
            for block in api.get_image(image, chunk_size=1 << 20):
                file.write(block)
        if layers[: len(base_layers)] != list(base_layers):
            raise SandboxError(f"the image {image} is not made from {base}")
        file.seek(0)
        with tarfile.open(fileobj=file) as saved:
            manifest = json.loads(_content(saved, "manifest.json").read())
            return _merged(saved, manifest[0]["Layers"][len(base_layers) :], base, facts)


def _merged(saved: tarfile.TarFile, files: Sequence[str], base: str, facts: Mapping[str, str]) -> bytes:
    layers = [_layer(saved, name) for name in files]
    kept: dict[str, tuple[int, tarfile.TarInfo]] = {}
    deleted: set[str] = set()
    for number, layer in enumerate(layers):
        members = layer.getmembers()
        for info in members:
            folder, name = posixpath.split(_plain(info.name))
            if name.startswith(_GONE):
                # Emptied is deleted and made anew: the directory itself is a member of the same layer.
                gone = folder if name == _EMPTIED else posixpath.join(folder, name.removeprefix(_GONE))
                deleted.add(gone)
                _forget(kept, gone)
        for info in members:
            path = _plain(info.name)
            if posixpath.basename(path).startswith(_GONE) or not _wanted(path):
                continue
            if not info.isdir():
                _forget(kept, path)
            kept[path] = (number, info)
    writer = ArchiveWriter(ArchiveHeader(base, tuple(sorted(deleted)), facts))
    written: dict[str, int] = {}
    for path in sorted(kept, key=lambda path: path.split("/")):
        number, info = kept[path]
        _write(writer, layers[number], path, info, written, number)
    return writer.finish()


def _write(
    writer: ArchiveWriter,
    layer: tarfile.TarFile,
    path: str,
    info: tarfile.TarInfo,
    written: dict[str, int],
    number: int,
) -> None:
    if info.isdev() and not info.isfifo():
        log.warning("%s: an archive does not keep devices", path)
        return
    copy = tarfile.TarInfo(path)
    for field in ("type", "mode", "uid", "gid", "mtime", "linkname"):
        setattr(copy, field, getattr(info, field))
    exact = {key: value for key, value in info.pax_headers.items() if key == "mtime" or ".xattr.user." in key}
    copy.pax_headers = exact
    if info.islnk():
        target = _plain(info.linkname)
        if written.get(target) == number:
            copy.linkname = target
            writer.member(copy)
            return
        # Sorted, or changed by a later layer: the name it was linked to is no earlier file of this archive.
        source = layer.getmember(info.linkname)
        copy.type, copy.linkname = tarfile.REGTYPE, ""
        info = source
    if info.isreg():
        copy.size = info.size
        content = layer.extractfile(info)
        assert content is not None
        writer.member(copy, content)  # type: ignore[arg-type]
        written[path] = number
    else:
        writer.member(copy)


def _layer(saved: tarfile.TarFile, name: str) -> tarfile.TarFile:
    """Archive of one layer, compressed or not, valid while the outer one is open."""
    return tarfile.open(fileobj=_content(saved, name), errors="surrogateescape")


def _content(archive: tarfile.TarFile, name: str) -> Any:
    found = archive.extractfile(name)
    if found is None:
        raise SandboxError(f"expected the file {name} in what the daemon saved")
    return found


def _plain(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")


_MOUNT_POINTS = (".", "", CONTROL.lstrip("/"), *(f"etc/{name}" for name in name_files.FILES))


def _wanted(path: str) -> bool:
    return path not in _MOUNT_POINTS and not path.startswith(f"{CONTROL.lstrip('/')}/")


def _forget(kept: dict[str, Any], path: str) -> None:
    for name in [name for name in kept if name == path or name.startswith(path + "/")]:
        del kept[name]
