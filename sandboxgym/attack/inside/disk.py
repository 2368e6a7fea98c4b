"""Attempts to exceed the limit of disk space: ways to have bytes on the host's disk that no limit counts."""

import ctypes
import mmap
import os
import socket
import struct
import time

from .answers import AttemptAnswer, absent, attempt, held, name_of, refused

CHUNK = 8 * 2**20
_kept = []  # type: list[int]


def _place(folder: str) -> str:
    path = f"{folder}/attack-{os.getpid()}"
    os.makedirs(path, exist_ok=True)
    return path


def _plain(folder: str, number: int) -> int:
    return os.open(f"{_place(folder)}/{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)


def _deleted(folder: str, number: int) -> int:
    path = f"{_place(folder)}/{number}"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    os.unlink(path)
    return descriptor


def _nameless(folder: str, number: int) -> int:
    return os.open(_place(folder), 0o20000000 | os.O_DIRECTORY | os.O_RDWR, 0o600)


_deep = False


def _too_deep(folder: str, number: int) -> int:
    global _deep
    if not _deep:
        os.chdir(_place(folder))
        for _ in range(40):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
        _deep = True
    return os.open(str(number), os.O_CREAT | os.O_WRONLY, 0o600)


def _in_flight(folder: str, number: int) -> int:
    """Send a deleted file in a message that no one reads: its only reference."""
    descriptor = _deleted(folder, number)
    os.write(descriptor, b"x" * CHUNK)
    os.fsync(descriptor)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))])
    os.close(descriptor)
    _kept.extend((left.detach(), right.detach()))
    return -1


def _mapped(folder: str, number: int) -> int:
    """Map a deleted file that is open nowhere."""
    path = f"{_place(folder)}/{number}"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.unlink(path)
    os.posix_fallocate(descriptor, 0, CHUNK)
    _maps.append(mmap.mmap(descriptor, CHUNK))
    _maps[-1][0:4] = b"held"
    os.close(descriptor)
    return -1


_maps = []  # type: list[mmap.mmap]


def _fallocated(folder: str, number: int) -> int:
    descriptor = _plain(folder, number)
    os.posix_fallocate(descriptor, 0, CHUNK)
    os.close(descriptor)
    return -1


def _kept_size(folder: str, number: int) -> int:
    descriptor = _plain(folder, number)
    _fallocate(descriptor, 1, CHUNK)
    os.close(descriptor)
    return -1


def _linked(folder: str, number: int) -> int:
    """Link a file under a second name in a hidden place."""
    descriptor = _plain(folder, number)
    path = f"{_place(folder)}/{number}"
    os.makedirs(_place(folder) + "/.h", exist_ok=True)
    os.link(path, f"{_place(folder)}/.h/{number}")
    os.unlink(path)
    return descriptor


def _without_rights(folder: str, number: int) -> int:
    """Write below a directory that no one may read or enter."""
    place = _place(folder) + f"/closed-{number}"
    os.mkdir(place)
    descriptor = os.open(place + "/file", os.O_CREAT | os.O_WRONLY, 0)
    os.chmod(place, 0)
    return descriptor


def _strange_names(folder: str, number: int) -> int:
    place = os.fsencode(_place(folder)) + b"/\xff\n\\ " + str(number).encode()
    return os.open(place, os.O_CREAT | os.O_WRONLY, 0o600)


WAYS = {
    "plain": _plain,
    "deleted": _deleted,
    "nameless": _nameless,
    "too-deep": _too_deep,
    "in-flight": _in_flight,
    "mapped": _mapped,
    "fallocate": _fallocated,
    "keep-size": _kept_size,
    "linked": _linked,
    "closed": _without_rights,
    "strange": _strange_names,
}


def _fallocate(descriptor: int, mode: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.fallocate(descriptor, mode, ctypes.c_long(0), ctypes.c_long(size))
    if result:
        raise refused(f"fallocate: {name_of(ctypes.get_errno())}")


@attempt
def _take_disk(how: str, folder: str, megabytes: int, pause: float) -> AttemptAnswer:
    """Take the requested space on disk, 8 MiB per file, a little slower than the limit is checked."""
    if not os.path.isdir(folder):
        return absent(f"there is no {folder}")
    had = 0
    data = b"x" * CHUNK
    try:
        while had < megabytes:
            descriptor = WAYS[how](folder, had)
            if descriptor >= 0:
                written = 0
                while written < CHUNK:
                    written += os.write(descriptor, data[written:])
                os.fsync(descriptor)
                if how in ("deleted", "nameless"):
                    _kept.append(descriptor)
                else:
                    os.close(descriptor)
            had += CHUNK // 2**20
            time.sleep(pause)
    except OSError as error:
        return refused(f"{name_of(error.errno or 0)} after {had} MiB", had=had)
    return held(f"{had} MiB are on the disk", had=had)


@attempt
def _at_once(folder: str, megabytes: int, keep_size: bool) -> AttemptAnswer:
    """Ask for much more than the limit in one call."""
    descriptor = os.open(f"{folder}/attack-once", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        _fallocate(descriptor, 1 if keep_size else 0, megabytes * 2**20)
        blocks = os.fstat(descriptor).st_blocks * 512
    finally:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)
    if blocks < megabytes * 2**20 // 2:
        return refused(f"{blocks} bytes were given")
    return held("%s MiB by one call" % (blocks // 2**20), had=blocks // 2**20)


@attempt
def _many_files(folder: str, number: int, what: str) -> AttemptAnswer:
    """Make empty files, directories or links: no bytes, but entries, of which a small file system has few."""
    place = _place(folder)
    made = 0
    try:
        for made in range(number):
            path = f"{place}/{made // 1000}/{made}"
            if made % 1000 == 0:
                os.mkdir(f"{place}/{made // 1000}")
            if what == "files":
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            elif what == "directories":
                os.mkdir(path)
            else:
                os.symlink("x" * 100, path)
    except OSError as error:
        return refused(f"{name_of(error.errno or 0)} after {made}", had=made)
    return held(f"{number} {what} were made", had=number)


@attempt
def _attributes(folder: str, megabytes: int) -> AttemptAnswer:
    """Store bytes in extended attributes, so that no file grows."""
    place = _place(folder)
    had = 0
    try:
        for number in range(megabytes * 2**20 // 3500):
            path = f"{place}/{number}"
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            os.setxattr(path, "user.attack", os.urandom(3500))
            had += 4096
            if number % 500 == 0:
                time.sleep(0.05)
    except OSError as error:
        return refused(f"{name_of(error.errno or 0)} after {had // 1024} KiB", had=had // 2**20)
    return held("%s MiB in attributes" % (had // 2**20), had=had // 2**20)
