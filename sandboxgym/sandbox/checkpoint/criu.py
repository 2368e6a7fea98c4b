"""Client of CRIU: find the program, test it on this kernel, send it requests.

CRIU (checkpoint/restore in userspace, GPL) is a program of its own and not part of this package: it is found, started
as a separate process, ``criu swrk``, and sent requests over a socket in its protocol (``images/rpc.proto`` of its
sources), which is encoded here by hand.

1. Only ``$SANDBOXGYM_CRIU`` is tried if it is set, else ``PATH``, then `private_directory`.
2. A version says little about whether CRIU works with this kernel: `find` takes the first program that passes a real
   round trip, in one of two tries.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxgym import data
from sandboxgym.sandbox.base import SandboxError

logger = logging.getLogger("sandboxgym")

VARIABLE = "SANDBOXGYM_CRIU"
DUMP, RESTORE, NOTIFY = 1, 2, 6
"""Types of requests."""
SECONDS = 120.0
"""Seconds in which CRIU must answer."""

HOW_TO_GET = (
    "CRIU 4 or newer: Debian 13 and Ubuntu 26.04, apt-get install criu; Debian 12, Ubuntu 22.04 and 24.04, the "
    "packages of https://download.opensuse.org/repositories/devel:/tools:/criu/ or, without touching the system, "
    f"a newer Debian's package unpacked beside its libraries (.ci/criu of this project does it), and {VARIABLE} set"
)

NO_PAGES = "the kernel has no userfaultfd that CRIU could use for that (criu check --feature uffd-noncoop)"

_MESSAGE = 1 << 16
_GONE = (BrokenPipeError, ConnectionResetError)
_AFTER_WHICH_ALL_RUNS = ("pre-resume", "post-resume")
"""Notifications after which CRIU waits for an answer."""
_NOISE = "rlimit: Can't setup RLIMIT_NOFILE"
"""Harmless first message of a CRIU that may not raise its own limit of open files."""


class CriuError(SandboxError):
    """A request to CRIU failed; the message is CRIU's own."""


def private_directory() -> Path:
    """Directory of a CRIU installed for this user only, with the program ``criu`` in it."""
    return data.cache_dir() / "criu"


def candidates() -> list[str]:
    """Programs that may be CRIU, in the order in which they are tried."""
    if named := os.environ.get(VARIABLE):
        return [path] if (path := shutil.which(named)) else []
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"))
    found = (shutil.which("criu", path=places), shutil.which("criu", path=os.fspath(private_directory())))
    return [path for path in found if path]


def find() -> str | None:
    """The first CRIU that works here, tested once per process; None if there is none."""
    return _tried(tuple(candidates()))[0]


def failures() -> tuple[str, ...]:
    """Reasons why the programs tried before the one of `find` do not work here; of all programs if none does."""
    return _tried(tuple(candidates()))[1]


def version(program: str) -> str | None:
    """Output of ``criu --version``; None if it fails."""
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = [line.partition(":")[2].strip() for line in told.stdout.splitlines() if line.startswith("Version:")]
    return found[0] if told.returncode == 0 and found else None


def why_unavailable() -> str | None:
    """Reason why sandboxes cannot be captured with their processes here; None if they can."""
    if find() is not None:
        return None
    named = os.environ.get(VARIABLE)
    nothing = f"{VARIABLE}={named} is no program" if named else f"no criu on PATH or in {private_directory()}"
    return f"{'; '.join(failures()) or nothing}. {HOW_TO_GET}"


@functools.cache
def brings_pages(program: str) -> bool:
    """True if this CRIU can restore memory lazily, as the processes touch it.

    The kernel's ``userfaultfd`` must tell of memory that is moved, given up or copied by a fork meanwhile.
    """
    try:
        return (
            subprocess.run(
                [program, "check", "--feature", "uffd-noncoop"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


@functools.cache
def _tried(programs: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The first program that works, and the reasons why those before it do not."""
    from sandboxgym.sandbox.checkpoint.selftest import round_trip

    if os.geteuid() != 0:
        return None, ("capturing processes needs root",)
    reasons: list[str] = []
    for program in programs:
        # The answer is kept for good, and a process that is killed for want of memory is no property of the kernel.
        for last in (False, True):
            try:
                round_trip(program)
            except SandboxError as error:
                if not last:
                    logger.info("%s failed to capture a sandbox, and is tried once more: %s", program, error)
                    continue
                reasons.append(f"{program} ({version(program) or 'of unknown version'}) does not work here: {error}")
            else:
                return program, tuple(reasons)
    return None, tuple(reasons)


# The protocol: numbers of fields are those of CRIU's rpc.proto.

Value = bool | int | str | Iterable[str]

_FIELDS = {
    "images_dir_fd": 1,
    "pid": 2,
    "leave_running": 3,
    "tcp_established": 5,
    "file_locks": 8,
    "log_level": 9,
    "log_file": 10,
    "notify_scripts": 12,
    "root": 13,
    "link_remap": 18,
    "force_irmap": 21,
    "manage_cgroups_mode": 34,
    "ghost_limit": 35,
    "irmap_scan_paths": 36,
    "external": 37,
    "freeze_cgroup": 44,
    "timeout": 45,
    "lazy_pages": 48,
    "orphan_pts_master": 50,
    "network_lock": 64,
    "images_dir": 68,
    "leave_stopped": 69,
}
_REQUEST_TYPE, _REQUEST_OPTIONS, _REQUEST_NOTIFY_SUCCESS = 1, 2, 3
_TYPE, _SUCCESS, _RESTORED, _NOTIFIED, _ERROR_NUMBER, _ERROR_MESSAGE = 1, 2, 4, 5, 7, 9


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _field(number: int, value: bool | int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def encode_options(options: Mapping[str, Value]) -> bytes:
    """Encode options of a request, as CRIU's ``criu_opts``."""
    parts = []
    for name, value in options.items():
        for one in [value] if isinstance(value, (bool, int, str)) else value:
            parts.append(_field(_FIELDS[name], one))
    return b"".join(parts)


def decode(message: bytes) -> dict[int, int | bytes]:
    """Decode the fields of a message, by number; of a repeated field the last.

    Raises:
        CriuError: it is none.
    """
    fields: dict[int, int | bytes] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            shift += 7
            at += 1
            if message[at - 1] < 0x80:
                return value

    try:
        while at < len(message):
            key = number()
            if key & 7 == 0:
                fields[key >> 3] = number()
            elif key & 7 == 2:
                length = number()
                fields[key >> 3] = message[at : at + length]
                at += length
            else:
                raise CriuError(f"CRIU answered with a field of the unknown type {key & 7}")
    except IndexError as error:
        raise CriuError(f"CRIU's answer ends in the middle: {message[:100]!r}") from error
    return fields


@dataclass(frozen=True, slots=True)
class CriuAnswer:
    """Answer of CRIU to a request."""

    pid: int
    """Process id of the restored root process, as CRIU numbers it; 0 after a dump."""
    descriptors: tuple[int, ...]
    """Descriptors that came with its notifications: the master side of the restored terminal."""


class Criu:
    """One ``criu swrk`` process, which serves one request.

    Args:
        channel: a socket of type SEQPACKET whose other end it has.
        place: directory of its log.
    """

    def __init__(self, channel: socket.socket, place: Path) -> None:
        self._channel = channel
        self._place = place

    def ask(
        self, kind: int, options: Mapping[str, Value], *, notified: Callable[[str], None] = lambda script: None
    ) -> CriuAnswer:
        """Send a request to dump or restore.

        Args:
            kind: `DUMP` or `RESTORE`.
            options: by their names in ``criu_opts``.
            notified: called with the name of each of its notifications, while it waits.

        Raises:
            CriuError: it failed, with the reason it gave; or it does not answer.
        """
        log = self._place / str(options["log_file"])
        descriptors: list[int] = []
        last = ""
        deadline = time.monotonic() + SECONDS
        try:
            self._send(_field(_REQUEST_TYPE, kind) + _field(_REQUEST_OPTIONS, encode_options(options)))
            while True:
                self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
                message, extra = b"", list[tuple[int, int, bytes]]()
                with contextlib.suppress(*_GONE if last in _AFTER_WHICH_ALL_RUNS else ()):
                    message, extra, _, _ = self._channel.recvmsg(
                        _MESSAGE, socket.CMSG_SPACE(16 * 4), socket.MSG_CMSG_CLOEXEC
                    )
                descriptors += [number for _, _, content in extra for number in memoryview(content).cast("i")]
                if not message:
                    if last in _AFTER_WHICH_ALL_RUNS:  # killed by what it restored, say, which is there
                        return CriuAnswer(0, tuple(descriptors))
                    raise CriuError(f"it ended without an answer{errors(log)}")
                answer = decode(message)
                if answer.get(_TYPE) == NOTIFY:
                    last = bytes(decode(bytes(answer[_NOTIFIED]))[1]).decode()  # type: ignore[arg-type]
                    notified(last)
                    with contextlib.suppress(*_GONE if last == "post-resume" else ()):  # which the next look tells
                        self._send(_field(_REQUEST_TYPE, NOTIFY) + _field(_REQUEST_NOTIFY_SUCCESS, True))
                elif not answer.get(_SUCCESS):
                    raise CriuError(_reason(answer) + errors(log))
                else:
                    restored = decode(bytes(answer[_RESTORED])) if _RESTORED in answer else {}  # type: ignore[arg-type]
                    return CriuAnswer(int(restored.get(1, 0)), tuple(descriptors))
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise CriuError(f"no answer came: {error}{errors(log)}") from error
            raise

    def _send(self, message: bytes) -> None:
        self._channel.settimeout(SECONDS)
        self._channel.send(message)

    def wait(self) -> None:
        """Wait until CRIU has exited, and its restored processes have a parent in their sandbox.

        Raises:
            CriuError: it does not end.
        """
        self._channel.settimeout(SECONDS)
        try:
            while self._channel.recv(_MESSAGE):
                pass
        except ConnectionError:
            pass
        except OSError as error:
            raise CriuError(f"it does not end: {error}") from error

    def close(self) -> None:
        """End CRIU, if it was sent no request, and wait for its exit. Idempotent."""
        with contextlib.suppress(OSError, CriuError):
            self._channel.shutdown(socket.SHUT_WR)
            self.wait()
        self._channel.close()


def _reason(answer: dict[int, int | bytes]) -> str:
    first = answer.get(_ERROR_MESSAGE, b"")
    said = first.decode(errors="replace").strip() if isinstance(first, bytes) else ""
    return said if said and _NOISE not in said else "it failed"


def errors(log: Path) -> str:
    """The first errors in one of CRIU's logs, as a suffix of an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = [line[line.index("Error (") :] for line in lines if "Error (" in line and _NOISE not in line]
    return f": {'; '.join(found[:4])}" if found else ""
