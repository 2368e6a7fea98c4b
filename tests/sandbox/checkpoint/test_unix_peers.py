"""Connections between unix sockets, as reported by the kernel."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from sandboxgym.sandbox.checkpoint.unix_sockets import unix_sockets

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(os, "geteuid") or os.geteuid() != 0, reason="entering a network needs root"
)


def number(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def test_both_ends_of_a_pair() -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        with one, other:
            found = unix_sockets(os.getpid())
            assert found[number(one)].peer == number(other)
            assert found[number(other)].peer == number(one)


def test_waiting_to_be_accepted(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(os.fspath(tmp_path / "socket"))
        listener.listen()
        assert not unix_sockets(os.getpid())[number(listener)].connected
        client.connect(os.fspath(tmp_path / "socket"))
        found = unix_sockets(os.getpid())
        assert found[number(listener)].waiting == (number(client),)
        assert (found[number(client)].peer, found[number(client)].connected) == (0, True)
        accepted, _ = listener.accept()
        with accepted:
            found = unix_sockets(os.getpid())
            assert found[number(client)].peer == number(accepted)
            assert found[number(listener)].waiting == ()


def test_a_peer_that_is_gone() -> None:
    one, other = socket.socketpair()
    with one:
        other.close()
        found = unix_sockets(os.getpid())[number(one)]
        assert (found.peer, found.connected) == (0, False)


def test_not_connected() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        assert not unix_sockets(os.getpid())[number(one)].connected


def test_no_such_process() -> None:
    with pytest.raises(OSError):
        unix_sockets(2**22 + 1)
