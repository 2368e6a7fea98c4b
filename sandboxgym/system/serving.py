"""HTTP servers that no client holds up: uvicorn with time limits for requests and answers, and a bound on connections.

1. Request line and headers have to be complete `Patience.headers` seconds after the connection was made, or after the
   first byte of a later request. The body may keep the server waiting for `Patience.body` seconds in all, and longer
   only if it is large. A client that takes longer is told so by status 408, one that closes its half of the
   connection in the middle of a request by status 400; the connection is then closed.
2. A client that takes nothing of an answer for `Patience.answer` seconds is cut off, even if little is left of it. One
   that takes some is not, however slow it is.
3. Beyond `Patience.connections`, a new one is answered by status 503 and closed.
4. What is no HTTP is answered by status 400. What is said with these statuses is in the form of the protocol that is
   served (`Refusal`).
5. Requests that are refused, by status 400 or higher, are logged, and those whose client left before the end of the
   body: `refusals.Refusals` says how often. The same holds for WebSockets whose client sends garbage.
6. When a signal ends the server, `ending` comes first, so that calls under way can be answered in words.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

from sandboxgym.system.refusals import tell

if TYPE_CHECKING:
    import uvicorn

Refusal = Callable[[int, str], bytes]
"""Makes the content of an error's answer, as JSON, of its status and message."""
_LINGER = 2.0
"""Seconds in which a refused client may read why."""
_ENDING = 3.0
"""Seconds that `ending` is waited for."""
_LEAVING = 30.0
"""Seconds that `leave` may take; more than it needs on a busy machine."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits for clients, in seconds, and a bound on their number."""

    headers: float = 15.0
    """Seconds for the request line and the headers."""
    body: float = 30.0
    """Seconds for the body, and one more for each `rate` bytes."""
    rate: int = 16 * 2**10
    answer: float = 60.0
    """Seconds in which a client must take more of an answer."""
    connections: int = 1000


def make_server(
    app: Any,
    *,
    refusal: Refusal,
    patience: Patience | None = None,
    open_ended: Collection[str] = (),
    started: Callable[[], object] | None = None,
    ending: Callable[[], Awaitable[object]] | None = None,
    **options: Any,
) -> uvicorn.Server:
    """Make a server of an ASGI application.

    Args:
        app: the application.
        refusal: content of the answers to clients that are too slow or too many.
        patience: how long clients are waited for.
        open_ended: paths whose requests may continue for as long as the client likes.
        started: called once clients are served and signals end the server in order: the moment to tell its address.
        ending: called when the server begins to end, while clients can still be answered; not waited for without end.
        options: further settings of ``uvicorn.Config``.

    Raises:
        ImportError: there is no uvicorn.
    """
    import uvicorn

    patience = patience or Patience()
    timed = _TimedBodies(app, refusal, patience, frozenset(open_ended))
    http = _timed_protocol(refusal, patience)

    class TellingServer(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started and started is not None:
                started()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if ending is not None:
                self._ending = asyncio.ensure_future(ending())
                await asyncio.wait([self._ending], timeout=_ENDING)  # it continues if that is not enough
            await super().shutdown(sockets)

    if options.get("ws") == "websockets-sansio":
        options["ws"] = _telling_websocket()
    return TellingServer(uvicorn.Config(telling(timed), log_level="warning", lifespan="on", http=http, **options))


def serve(app: Any, listening: socket.socket, **options: Any) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: an ASGI application.
        listening: a socket that is bound.
        options: of `make_server`.

    Raises:
        KeyboardInterrupt: it was ended.
    """
    # uvicorn ends by sending itself the signal that it has dealt with.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    make_server(app, **options).run(sockets=[listening])


def leave(status: int) -> NoReturn:
    """End this process although one of its threads does not end, as where a call of a client takes long.

    Unlike ``os._exit`` alone, this ends what such a call runs, in a sandbox or container, and deletes its files.
    """
    late = threading.Timer(_LEAVING, os._exit, (status,))
    late.daemon = True
    late.start()
    logging.disable()  # the call fails when its sandbox goes, which nobody needs to be told
    atexit._run_exitfuncs()  # what Python does at exit, but that it waits for threads first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Logger:
    """Logger of a connection: uvicorn's, but that warnings, which a client's garbage brings about, are refusals.

    That the end of the server cancels a request which is under way is no error of it.
    """

    def __init__(self, logger: Any, client: Any) -> None:
        self._logger, self._client = logger, client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def warning(self, message: str) -> None:
        tell(self._client, message, message)

    def exception(self, message: str, *given: Any) -> None:
        # Of a client's text, which is told elsewhere; of the end of the server.
        if not isinstance(sys.exception(), UnicodeDecodeError | asyncio.CancelledError):
            self._logger.exception(message, *given)

    def error(self, message: str, *given: Any, exc_info: Any = None) -> None:
        if not isinstance(exc_info, asyncio.CancelledError):
            self._logger.error(message, *given, exc_info=exc_info)


def telling(app: Any) -> Any:
    """The application, whose refusals are logged with the beginning of what it says."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        status = 0

        async def told(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400:
                what = (
                    f"{scope['method']} {scope['path'][:80]}: {message.get('body', b'')[:200].decode(errors='replace')}"
                )
                tell(scope["client"], f"status {status}", what)
                status = 0
            await send(message)

        await app(scope, receive, told if scope["type"] == "http" else send)

    return served


class _TimedBodies:
    """Middleware that ends requests whose body does not come: its client is slow, or has gone or half closed."""

    def __init__(self, app: Any, refusal: Refusal, patience: Patience, open_ended: frozenset[str]) -> None:
        self._app, self._refusal, self._patience, self._open_ended = app, refusal, patience, open_ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_ended:
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        left, more, late, gone, begun, taken = self._patience.body, True, False, False, False, 0

        async def timed_receive() -> Any:
            nonlocal left, more, late, gone, taken
            if not more:
                return await receive()
            before = clock()
            try:
                async with asyncio.timeout(left):
                    message = await receive()
            except TimeoutError:
                late, more = True, False
                return {"type": "http.disconnect"}  # which every application knows how to deal with
            if message["type"] == "http.disconnect":
                gone, more = True, False
                tell(scope["client"], "cut off", f"it left after {taken:,} bytes of a request")
                return message
            taken += len(message.get("body", b""))
            left += len(message.get("body", b"")) / self._patience.rate - (clock() - before)
            more = message.get("more_body", False)
            return message

        async def timed_send(message: Any) -> None:
            nonlocal begun
            if begun or not (late or gone):
                begun = True
                await send(message)

        try:
            await self._app(scope, timed_receive, timed_send)
        except Exception:  # frameworks raise types of their own on the disconnect that they were told of
            if not (late or gone) or begun:
                raise
        if late and not begun:
            said = f"the body of the request did not come within {self._patience.body:g} seconds"
            content = self._refusal(408, said)
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers.append((b"content-length", str(len(content)).encode()))
            await send({"type": "http.response.start", "status": 408, "headers": headers})
            await send({"type": "http.response.body", "body": content})


def _timed_protocol(refusal: Refusal, patience: Patience) -> Any:
    """Protocol of uvicorn with a limit for headers, for clients that do not read, and for the number of them."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Timed(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        logger: Any
        _headers: asyncio.TimerHandle | None = None
        _answer: asyncio.TimerHandle | None = None
        _unsent = 0
        _begun = False
        """Some bytes of a request have come, and not all of its headers."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.logger = _Logger(self.logger, self.client)
            if len(self.connections) > patience.connections:
                self._refuse(503, f"the server has {patience.connections} connections, as many as it takes")
            else:
                self._expect_headers()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._headers is None and not self._answering():
                self._expect_headers()
            self._begun = self._begun or not self._answering()
            super().data_received(data)
            self._begun = self._begun and not self._answering() and not self._handed_over()
            if self._answering() or self._handed_over():
                _cancel(self._headers)
                self._headers = None
                if self._answer is None:
                    self._watch()

        def eof_received(self) -> None:
            if not (self.transport.is_closing() or self._handed_over()):
                if self._answering() and self.cycle.more_body and not self.cycle.response_started:
                    self._say(400, "the request ended before its body did")  # `_TimedBodies` logs it
                elif self._begun:
                    self._refuse(400, "the request ended before its headers did")
            super().eof_received()

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._headers)
            _cancel(self._answer)
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def _watch(self) -> None:
            """Look later whether the client has taken something of what is not sent by now, if that is all there is."""
            _cancel(self._answer)
            sure = self.transport.is_closing() or not self._handed_over()  # a WebSocket has time limits of its own
            self._unsent = self.transport.get_write_buffer_size() if sure else 0
            self._answer = self.loop.call_later(patience.answer, self._look)

        def _look(self) -> None:
            left, over = self.transport.get_write_buffer_size(), self.transport.is_closing()
            more = not over and not self.flow.write_paused and (self._answering() or self._handed_over())
            if left >= self._unsent > 0 and not more:
                tell(self.client, "cut off", f"it took nothing of its answer for {patience.answer:g} seconds")
                self.transport.abort()
            elif left or (not over and (self._answering() or self._handed_over())):
                self._watch()
            else:
                self._answer = None

        def _handed_over(self) -> bool:
            return self.transport.get_protocol() is not self  # but a WebSocket's

        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _expect_headers(self) -> None:
            said = f"the headers of the request did not come within {patience.headers:g} seconds"
            self._headers = self.loop.call_later(patience.headers, self._refuse, 408, said)

        def send_400_response(self, msg: str) -> None:
            if self._answering() and self.cycle.response_started:
                self.transport.close()  # what is said now would be taken for a part of the answer
            else:
                self._say(400, msg)

        def _refuse(self, status: int, said: str) -> None:
            tell(self.client, f"status {status}", said)
            self._say(status, said)

        def _say(self, status: int, said: str) -> None:
            content = refusal(status, said)
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + content)
            self.transport.close()
            self.loop.call_later(_LINGER, self.transport.abort)

    return Timed


def _telling_websocket() -> Any:
    """Protocol of uvicorn whose complaints about what a client sends are refusals, rather than errors of the server."""
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    class Telling(WebSocketsSansIOProtocol):  # type: ignore[misc]
        logger: Any

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.logger = _Logger(self.logger, self.client)

        def handle_parser_exception(self) -> None:
            closing = self.conn.close_sent
            tell(self.client, "WebSocket", (closing and closing.reason) or "it sent what is no message of a WebSocket")
            super().handle_parser_exception()

    return Telling


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
