"""Connections between the unix sockets of a process's network, from the kernel's ``sock_diag`` (sock_diag(7)).

The numbers are those of ``/proc/PID/fd`` (``socket:[NUMBER]``). A peer is reported wherever it is: sockets with a path
reach beyond a network namespace.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from sandboxgym.sandbox.overlay import kernel

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _REQUEST_DUMP = 20, 0x301
_DONE, _ERROR = 3, 2
_ALL_STATES, _ESTABLISHED = 0xFFFFFFFF, 1
_SHOW_PEER, _SHOW_WAITING = 4, 8
_PEER, _WAITING, _SHUTDOWN = 2, 3, 6
_BOTH_WAYS = 3
_SECONDS = 10.0
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A unix socket, and its peer if it is connected."""

    number: int
    peer: int
    """Number of the peer; 0 if there is none, or it has no number, for it is gone or was not accepted yet."""
    waiting: tuple[int, ...]
    """Numbers of the sockets that connected to a listening one and were not accepted yet."""
    connected: bool
    """Connected to a peer that has not hung up; never true of datagram sockets."""


def unix_sockets(pid: int) -> dict[int, UnixSocket]:
    """The unix sockets in the network namespace of a process, by number.

    Raises:
        OSError: the namespace may not be entered, or the kernel does not tell.
    """
    channel = _channel(pid)
    with channel:
        channel.settimeout(_SECONDS)
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_PEER | _SHOW_WAITING, 0, 0)
        channel.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _REQUEST_DUMP, 0, 0) + body)
        found: dict[int, UnixSocket] = {}
        while True:
            for kind, message in _messages(channel.recv(_CHUNK)):
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", message)[0]
                    raise OSError(number, os.strerror(number))
                one = _parsed(message)
                found[one.number] = one


def _channel(pid: int) -> socket.socket:
    """A netlink socket in the network namespace of a process."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                kernel.set_namespace(namespace, kernel.NEWNET)
            finally:
                os.close(namespace)
            made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)  # which ends, so that nothing else is ever done in that namespace
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        yield kind, data[at + 16 : at + length]
        at += (length + 3) & ~3


def _parsed(message: bytes) -> UnixSocket:
    _, kind_of_socket, state, _, number = struct.unpack_from("=BBBBI", message)
    attributes: dict[int, bytes] = {}
    at = 16
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        attributes[kind] = message[at + 4 : at + length]
        at += (length + 3) & ~3
    waiting = attributes.get(_WAITING, b"")
    return UnixSocket(
        number,
        peer=int.from_bytes(attributes.get(_PEER, b""), sys.byteorder),
        waiting=struct.unpack(f"={len(waiting) // 4}I", waiting),
        connected=kind_of_socket != socket.SOCK_DGRAM
        and state == _ESTABLISHED
        and attributes.get(_SHUTDOWN, b"\0")[0] != _BOTH_WAYS,
    )
