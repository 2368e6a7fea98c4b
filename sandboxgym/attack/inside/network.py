"""Attempts on the network: the host's ports, other addresses, raw sockets, other families, abstract sockets."""

import os
import socket
import struct

from .answers import AttemptAnswer, absent, attempt, refused, worked

_TYPES = {
    "stream": socket.SOCK_STREAM,
    "dgram": socket.SOCK_DGRAM,
    "raw": socket.SOCK_RAW,
    "seqpacket": socket.SOCK_SEQPACKET,
}


@attempt
def _connect(host: str, port: int, token: str) -> AttemptAnswer:
    """Connect to a service of the host, which answers with the token."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect((host, port))
            said = connection.recv(100)
        except TimeoutError:
            return refused("no answer")
    return worked(f"the service at {host} answered") if token.encode() in said else refused("something else answered")


@attempt
def _route(host: str) -> AttemptAnswer:
    """Tell whether there is a route to an address. Connecting a datagram socket looks one up and sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return worked(f"there is a route to {host}, from {probe.getsockname()[0]}")


@attempt
def _connect_abstract(name: str, token: str) -> AttemptAnswer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        connection.connect("\0" + name)
        said = connection.recv(100)
    return (
        worked("the host's abstract socket answered") if token.encode() in said else refused("something else answered")
    )


@attempt
def _connect_path(path: str) -> AttemptAnswer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        connection.connect(path)
    return worked(f"{path} takes connections from inside")


@attempt
def _socket(family: int, kind: str, protocol: int) -> AttemptAnswer:
    try:
        socket.socket(family, _TYPES[kind], protocol).close()
    except OSError as error:
        if error.errno in (93, 94, 97):  # refused by the filter, or not in this kernel: it cannot be had either way
            return refused(f"no such socket: {error.strerror}")
        raise
    return worked(f"a socket of family {family} can be made")


@attempt
def _interfaces() -> AttemptAnswer:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    names = [name for name in names if not name.startswith(("tunl", "gre", "sit", "ip", "erspan", "ip_vti"))]
    return (
        worked("there are interfaces {}".format(", ".join(names))) if names else refused("there is the loopback only")
    )


@attempt
def _ports_listed(port: int) -> AttemptAnswer:
    wanted = f":{port:04X} "
    for name in ("tcp", "tcp6", "udp"):
        path = f"/proc/net/{name}"
        if os.path.exists(path):
            with open(path) as file:
                if wanted in file.read():
                    return worked(f"the host's port {port} is in {path}")
    return refused("the host's port is in no table")


@attempt
def _abstract_listed(name: str) -> AttemptAnswer:
    if not os.path.exists("/proc/net/unix"):
        return absent("no /proc/net/unix")
    with open("/proc/net/unix") as file:
        return (
            worked("the host's sockets are listed")
            if name in file.read()
            else refused("the host's sockets are not listed")
        )


@attempt
def _packet() -> AttemptAnswer:
    socket.socket(17, socket.SOCK_RAW, socket.htons(3)).close()
    return worked("a packet socket can be made: it sees and sends everything")


@attempt
def _uevents() -> AttemptAnswer:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15) as listener:
        listener.bind((0, 1))
    with open("/proc/self/uid_map") as file:
        if int(file.read().split()[2]) != 4294967295:
            return refused("a user namespace hears of its own devices only")
    if not any(name != "lo" for _, name in socket.if_nameindex()):
        return refused("a network namespace hears of its own devices only")
    return worked("the kernel's device events can be heard")


@attempt
def _change_interface(name: str) -> AttemptAnswer:
    """Set the flags of an interface to their present value, which only an administrator may."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", name.encode(), 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(probe, 0x8913, request))[1]
        fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", name.encode(), flags))
    return worked(f"interface {name} can be configured")


@attempt
def _listen(port: int, token: str) -> AttemptAnswer:
    """Run a service of this sandbox, for a neighbour that tries to reach it."""
    from .answers import held

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(8)
    hidden = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    hidden.bind("\0attack-" + token)
    hidden.listen(8)
    for service in (listener, hidden):
        if os.fork() == 0:
            while True:
                connection = service.accept()[0]
                connection.sendall(token.encode())
                connection.close()
    return held("listening")
