"""Connections of the website's visitors, each served by a thread that no visitor can hold for long.

1. Their number is limited, in all and per address (of IPv6, per network of 64 bits). At the limit, a new one replaces
   the longest idle one, or one of the address that has at least two more; otherwise it is refused with a sentence.
2. A request has to be complete `REQUEST_SECONDS` after its first byte, however slowly it arrives, and its answer has to
   be read within `ANSWER_SECONDS`; an idle connection ends after `IDLE_SECONDS`.
3. A visitor may hang up or send anything at any moment: nothing is written to standard error for it, and no other
   visitor notices.
4. The requested host name (``Host``) has to be one of the website's. Otherwise a foreign page could read this website
   through the visitor's browser, by letting its own name point here (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from sandboxgym.envs.webshop.site.messages import (
    MOST_FIELDS,
    MOST_LINE,
    Refused,
    Response,
    VisitorRequest,
    parse,
    problem,
)

log = logging.getLogger("sandboxgym")
MOST_CONNECTIONS = 256
MOST_PER_VISITOR = 32
IDLE_SECONDS = 60.0
REQUEST_SECONDS = 10.0
ANSWER_SECONDS = 20.0
_LINGER_SECONDS = 1.0
"""Time to read from a refused visitor: if its data stayed unread, the kernel would discard the answer."""
_LINGER_BYTES = 2**20
_END = re.compile(rb"\n\r?\n")

Answer = Callable[[VisitorRequest, str], Response]
"""Function from a request and the visitor's address to a response."""


class HungUp(ConnectionError):
    """Raised if the visitor closed the connection."""


class Incoming:
    """Reader of the bytes that come in on a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def wait(self, seconds: float) -> bool:
        """Wait at most this long; returns whether anything has arrived."""
        try:
            if not self._buffer:
                self._receive(time.monotonic() + seconds)
        except TimeoutError:
            return False
        return True

    def head(self, until: float) -> bytes:
        """Read everything up to an empty line.

        Raises:
            Refused: the line or the fields are too long.
            TimeoutError: the empty line did not arrive by ``until``, in seconds of the monotonic clock.
            HungUp: the visitor closed the connection.
        """
        line, looked = -1, 0
        while True:
            if not looked:  # empty lines before a request are to be passed over
                del self._buffer[: len(self._buffer) - len(self._buffer.lstrip(b"\r\n"))]
            if line < 0:
                line = self._buffer.find(b"\n", looked)
            end = _END.search(self._buffer, max(0, looked - 2))
            size = len(self._buffer) if end is None else end.start()
            if (size if line < 0 else line) > MOST_LINE:
                raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long.")
            if line >= 0 and size - line > MOST_FIELDS:
                raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The header fields are too long.")
            if end is not None:
                found = bytes(self._buffer[: end.start() + 1])
                del self._buffer[: end.end()]
                return found
            looked = len(self._buffer)
            self._receive(until)

    def skip(self, length: int, until: float) -> None:
        """Read this many bytes and drop them.

        Raises:
            TimeoutError, HungUp: as `head`.
        """
        while len(self._buffer) < length:
            self._receive(until)
        del self._buffer[:length]

    def drain(self) -> None:
        """Read briefly what is still being sent."""
        until, left = time.monotonic() + _LINGER_SECONDS, _LINGER_BYTES
        while left > 0:
            self._buffer.clear()
            self._receive(until)
            left -= len(self._buffer)

    def _receive(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:  # the timeout of a socket begins anew with every byte
            raise TimeoutError
        self._connection.settimeout(left)
        received = self._connection.recv(2**16)
        if not received:
            raise HungUp
        self._buffer += received


@dataclass(eq=False)
class _Connection:
    """An open connection."""

    socket: socket.socket
    visitor: str
    idle: float | None = field(default_factory=time.monotonic)
    """Time since which it has been idle; None while a request is served."""


class Listener(socketserver.TCPServer):
    """Listening socket that serves every visitor until it is closed.

    Args:
        host: address of the interface.
        port: number of the port; 0 takes a free one.
        answer: function that makes the response to a request.
        names: host names of the site, in addition to ``localhost`` and the address that a visitor reached.
        most: largest number of connections at once.
        most_per_visitor: largest number of connections of one address.

    Raises:
        OSError: the port is taken, or this process may not use it.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, answer: Answer, *, names: Collection[str], most: int, most_per_visitor: int
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._answer = answer
        self._names = {plain_name(name) for name in ("localhost", "127.0.0.1", "::1", host, *names)}
        self._most, self._most_per_visitor = most, most_per_visitor
        self._open: dict[_Connection, None] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Unused)

    # Which connections are accepted.

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept the next connection."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)  # no descriptors left: the waiting connection would wake this at once again
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or refuse it."""
        made = _Connection(request, visitor_of(client_address[0]))
        refusal = self._enter(made)
        if refusal is not None:
            _refuse(request, refusal)
            return
        try:
            threading.Thread(target=self._serve, args=(made,), daemon=True, name="webshop-visitor").start()
        except RuntimeError:  # no thread to be had
            self._leave(made)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error; `socketserver` would write it to standard error."""
        log.debug("a connection of %s could not be served", client_address, exc_info=True)

    def _enter(self, made: _Connection) -> Response | None:
        """Register a connection; returns the refusal if there is no room for it."""
        with self._lock:
            own = [connection for connection in self._open if connection.visitor == made.visitor]
            if len(own) >= self._most_per_visitor and not self._make_room(own):
                return problem(HTTPStatus.TOO_MANY_REQUESTS, "You have too many connections. Close one of them.")
            if len(self._open) >= self._most and not self._make_room([*self._open], than=len(own)):
                return problem(HTTPStatus.SERVICE_UNAVAILABLE, "There are too many visitors. Try again in a moment.")
            self._open[made] = None
        return None

    def _make_room(self, rivals: list[_Connection], *, than: int | None = None) -> bool:
        """End the longest idle connection, or the first of an address that has at least two more than ``than``."""
        idle = [connection for connection in rivals if connection.idle is not None]
        if idle:
            chosen = min(idle, key=lambda connection: connection.idle or 0.0)
        else:
            visitor, number = Counter(connection.visitor for connection in rivals).most_common(1)[0]
            if than is None or number < than + 2:
                return False
            chosen = next(connection for connection in rivals if connection.visitor == visitor)
        del self._open[chosen]
        _end(chosen.socket)
        return True

    def _leave(self, connection: _Connection) -> None:
        with self._lock:
            self._open.pop(connection, None)
        connection.socket.close()

    def server_close(self) -> None:
        """Stop listening, and end all connections."""
        super().server_close()
        with self._lock:
            for connection in self._open:
                _end(connection.socket)

    # How they are served.

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            incoming = Incoming(connection.socket)
            patience = REQUEST_SECONDS  # who connects has something to ask
            while incoming.wait(patience):
                connection.idle = None
                if not self._serve_one(connection, incoming):
                    break
                connection.idle, patience = time.monotonic(), IDLE_SECONDS
        except OSError as error:  # the visitor is gone, or too slow to take an answer
            log.debug("a connection of %s ended: %r", connection.visitor, error)
        except Exception as error:  # of one visitor: the others are served all the same
            log.error("a connection of %s could not be served: %r", connection.visitor, error)
            log.debug("traceback of that error", exc_info=True)
        finally:
            self._leave(connection)

    def _serve_one(self, connection: _Connection, incoming: Incoming) -> bool:
        """Serve one request; returns whether the connection stays open."""
        until = time.monotonic() + REQUEST_SECONDS
        method = "GET"
        try:
            request = parse(incoming.head(until))
            method = request.method
            self._check_name(request, connection.socket)
            if request.expects and request.length:
                connection.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            incoming.skip(request.length, until)
        except Refused as refused:
            response, goes_on = refused.response, False
        except TimeoutError:
            response, goes_on = problem(HTTPStatus.REQUEST_TIMEOUT, "The request took too long to arrive."), False
        else:
            response, goes_on = self._answer(request, connection.visitor), request.lasting
        connection.socket.settimeout(ANSWER_SECONDS)  # of all of it
        connection.socket.sendall(response.as_bytes(method=method, close=not goes_on))
        if not goes_on:
            connection.socket.shutdown(socket.SHUT_WR)
            incoming.drain()
        return goes_on

    def _check_name(self, request: VisitorRequest, connection: socket.socket) -> None:
        if request.host is None:
            return
        here = plain_name(connection.getsockname()[0])
        if plain_name(request.host) not in (here, *self._names):
            sentence = f"This site is not called {request.host}. Whoever serves it can give it that name."
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, sentence)


class _Unused(socketserver.BaseRequestHandler):
    """Placeholder: `socketserver` wants a handler class, but `Listener.process_request` does its work."""


def visitor_of(address: str) -> str:
    """Identify the visitor of an address: in IPv6 by the whole network, because every visitor has one.

    >>> visitor_of("::ffff:192.0.2.1"), visitor_of("2001:db8::1:2:3:4")
    ('192.0.2.1', '2001:db8::/64')
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


def plain_name(name: str) -> str:
    """Normalise a host's name for comparison: an address in one spelling, a name in lower case.

    >>> plain_name("[0::1]"), plain_name("::ffff:127.0.0.1"), plain_name("LocalHost.")
    ('::1', '127.0.0.1', 'localhost')
    """
    bare = name.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        found = ipaddress.ip_address(bare)
    except ValueError:
        return bare.lower().removesuffix(".")
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _refuse(connection: socket.socket, response: Response) -> None:
    """Answer with a refusal and close, without waiting: this thread accepts the other visitors."""
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.sendall(response.as_bytes(close=True))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(2**16)
    connection.close()


def _end(connection: socket.socket) -> None:
    """Shut the connection down, so that the thread that serves it ends."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
