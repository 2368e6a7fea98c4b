"""Messages with descriptors between the owner, the zygote and the inits of containers.

The memory of a container is the pages that its init dirties, so the code that runs in one imports little: `_socket`,
not ``socket``.
"""

from __future__ import annotations

import _socket
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_HEADER = 4
_ROOM = _socket.CMSG_SPACE(16 * 4) if hasattr(_socket, "CMSG_SPACE") else 0
"""Ancillary buffer for 16 descriptors."""


def send(channel: _socket.socket, payload: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message over a stream socket, with copies of ``descriptors``.

    Raises:
        OSError: the other side is gone.
    """
    data = len(payload).to_bytes(_HEADER, "big") + payload
    rights = struct.pack(f"{len(descriptors)}i", *descriptors)
    extra = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if descriptors else []
    sent = channel.sendmsg([data], extra)
    if sent < len(data):
        channel.sendall(data[sent:])


def pack_spawn(argv: Sequence[str], env: Mapping[str, str], *, cwd: str, terminal: bool, adopts: bool) -> bytes:
    """A request to start a process, as texts that each end with a null byte: ``init.c`` reads it too.

    Raises:
        ValueError: something in it holds a null byte, or a variable has no proper name.
    """
    if any(not name or "=" in name for name in env):
        raise ValueError("expected names of environment variables without '=', and not empty ones")
    kind = "ta" if terminal and adopts else "t" if terminal else "-"
    pairs = [f"{name}={value}" for name, value in env.items()]
    texts = ["spawn", kind, cwd, env.get("PATH", os.defpath), str(len(argv)), *argv, str(len(pairs)), *pairs]
    if any("\0" in text for text in texts):
        raise ValueError("expected arguments and environment variables without null bytes")
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def unpack_spawn(payload: bytes) -> dict[str, Any]:
    """Decode the request of `pack_spawn`."""
    _, kind, cwd, path, *rest = map(os.fsdecode, payload.split(b"\0")[:-1])
    end = 1 + int(rest[0])
    env = dict(pair.split("=", 1) for pair in rest[end + 1 :])
    return {
        "argv": rest[1:end],
        "env": env,
        "cwd": cwd,
        "path": path,
        "terminal": kind != "-",
        "adopts": kind == "ta",
    }


def receive(channel: _socket.socket) -> tuple[bytes, list[int]]:
    """Receive the next message and its descriptors, which are not inherited.

    Raises:
        EOFError: the other side is gone.
    """
    try:
        # socket.recv_fds ignores its flags in Python 3.11, and whatever is started would inherit the descriptors.
        header, extra, _, _ = channel.recvmsg(_HEADER, _ROOM, _socket.MSG_CMSG_CLOEXEC)
        if not header:
            raise EOFError("the other side closed the channel")
        descriptors = [number for _, _, data in extra for number in memoryview(data).cast("i")]
        header += _exactly(channel, _HEADER - len(header))
        return _exactly(channel, int.from_bytes(header, "big")), descriptors
    except ConnectionError as error:
        raise EOFError(str(error)) from error


def _exactly(channel: _socket.socket, number: int) -> bytes:
    parts = []
    while number:
        part = channel.recv(min(number, 1 << 20))
        if not part:
            raise EOFError("the other side closed the channel")
        parts.append(part)
        number -= len(part)
    return b"".join(parts)
