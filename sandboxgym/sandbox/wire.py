"""Messages with descriptors between the owner, the zygote and the inits of boxes.

The pages that an init dirties are what a box costs, so what runs in one imports little: `_socket`, not ``socket``.
"""

from __future__ import annotations

import _socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_HEADER = 4
_ROOM = _socket.CMSG_SPACE(16 * 4) if hasattr(_socket, "CMSG_SPACE") else 0
"""For 16 descriptors."""


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


def receive(channel: _socket.socket) -> tuple[bytes, list[int]]:
    """The next message and its descriptors, which are not inherited.

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
