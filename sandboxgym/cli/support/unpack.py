"""Safe unpacking of archives: nothing in them can reach outside the directory they are unpacked into.

Members with absolute paths, with ``..`` in them, links and special files are refused before anything is written: data
sets have no use for them. Sizes are checked beforehand too, so that a full disk is noticed in time.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sandboxgym.cli.support.transfer import TransferProgress


class UnsafeArchive(Exception):
    """Raised for a member that must not be unpacked, or an archive that cannot be read; nothing was put in place."""


def unpack(
    archive: Path, into: Path, *, progress: TransferProgress, check_room: Callable[[int], None] = lambda nbytes: None
) -> int:
    """Unpack a zip or tar archive into a directory, which is emptied first.

    Returns:
        The number of files.

    Raises:
        UnsafeArchive: naming the member, or that the archive is not intact.
    """
    if into.exists():
        shutil.rmtree(into)
    into.mkdir(parents=True)
    try:
        if zipfile.is_zipfile(archive):
            return _unpack_zip(archive, into, progress, check_room)
        if tarfile.is_tarfile(archive):
            return _unpack_tar(archive, into, progress, check_room)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError, RuntimeError) as error:
        raise UnsafeArchive(f"{archive}: {error}") from error
    finally:
        progress.finish()
    raise UnsafeArchive(f"{archive}: expected a zip or tar archive")


def merge(source: Path, target: Path) -> None:
    """Move everything in ``source`` into ``target``, by renaming: files replace files, directories join."""
    target.mkdir(parents=True, exist_ok=True)
    for item in sorted(source.iterdir()):
        place = target / item.name
        if item.is_dir() and place.is_dir():
            merge(item, place)
        else:
            os.replace(item, place)
    source.rmdir()


def _unpack_zip(archive: Path, into: Path, progress: TransferProgress, check_room: Callable[[int], None]) -> int:
    with zipfile.ZipFile(archive) as content:
        members = content.infolist()
        for member in members:
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise UnsafeArchive(f"{archive}: {member.filename!r} is a link or a special file")
            _place(archive, member.filename, into)
        nbytes = sum(member.file_size for member in members)
        check_room(nbytes)
        progress.start(f"unpacking {archive.name}", 0, nbytes)
        files = [member for member in members if not member.is_dir()]
        for member in files:
            with content.open(member) as file:
                _write(file, _place(archive, member.filename, into), progress)
        return len(files)


def _unpack_tar(archive: Path, into: Path, progress: TransferProgress, check_room: Callable[[int], None]) -> int:
    with tarfile.open(archive) as content:
        members = content.getmembers()
        for member in members:
            if not (member.isfile() or member.isdir()):
                raise UnsafeArchive(f"{archive}: {member.name!r} is a link or a special file")
            _place(archive, member.name, into)
        nbytes = sum(member.size for member in members)
        check_room(nbytes)
        progress.start(f"unpacking {archive.name}", 0, nbytes)
        files = [member for member in members if member.isfile()]
        for member in files:
            file = content.extractfile(member)
            assert file is not None
            with file:
                _write(file, _place(archive, member.name, into), progress)
        return len(files)


def _place(archive: Path, name: str, into: Path) -> Path:
    path = PurePosixPath(name)
    # A backslash or a drive letter is a part of a name here and a path elsewhere.
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
        raise UnsafeArchive(f"{archive}: {name!r} does not stay in its directory")
    return into / path


def _write(source: IO[bytes], place: Path, progress: TransferProgress) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "xb") as target:  # the same name twice is an error, not a replacement
        for chunk in _chunks(source):
            target.write(chunk)
            progress.advance(len(chunk))


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(2**20):
        yield chunk
