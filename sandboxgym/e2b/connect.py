"""The Connect protocol over HTTP: unary calls and streams, their errors, time limits and sizes.

1. A call is ``POST /PACKAGE.SERVICE/METHOD``. Unary bodies are one message; streams are envelopes, the last of which
   ends the stream and holds its error.
2. A refused call is answered in the protocol's own form: `ServiceError` with one of its codes.
3. No body is read beyond `LARGEST_MESSAGE`, or waited for longer than `SILENCE`; a stream whose client has gone is
   given up at once, and so is a call that may wait for long (`ServiceMethod.waits`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from sandboxgym.brief import brief
from sandboxgym.e2b.messages import BadMessage, Message, decode, encode, envelope
from sandboxgym.system.refusals import tell

log = logging.getLogger("sandboxgym")

LARGEST_MESSAGE = 4 * 2**20
"""Bytes of one message."""
LONGEST_STREAM = 7 * 86_400.0
"""Seconds of a stream whose client names no time limit."""
SILENCE = 60.0
"""Seconds after which a request that is not complete is given up."""
_END = 2  # flag of the envelope that ends a stream
_AHEAD = 16  # pieces of a client's stream that are read before they are wanted, to see that it is still there
_STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}


class ServiceError(Exception):
    """A call that cannot be done, with one of Connect's codes and a message for its caller."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def body(self) -> dict[str, str]:
        """The error as the protocol writes it."""
        return {"code": self.code, "message": str(self)}


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """A call as its handler sees it."""

    message: Message
    seconds: float | None
    """Time limit of the client, if it gave one."""
    keepalive: float
    """Seconds of silence after which a stream shall say that it lives."""
    rest: AsyncIterator[Message]
    """Messages after the first, where the client streams."""


Unary = Callable[[ServiceCall], Awaitable[Message]]
Stream = Callable[[ServiceCall], AsyncIterator[Message]]


@dataclass(frozen=True, slots=True)
class ServiceMethod:
    """A method of a service: message kinds, and whether client and server stream."""

    takes: str
    gives: str
    unary: Unary | None = None
    stream: Stream | None = None
    client_streams: bool = False
    waits: bool = False
    """True if it takes as long as a program of the sandbox likes."""


async def serve(request: Request, method: ServiceMethod) -> Response:
    """Answer one call of a client of E2B."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    streams = method.stream is not None or method.client_streams
    prefix = "application/connect+" if streams else "application/"
    codec = kind.removeprefix(prefix)
    if not kind.startswith(prefix) or codec not in ("json", "proto"):
        return Response(status_code=415, headers={"accept-post": f"{prefix}json, {prefix}proto"})
    binary = codec == "proto"
    header = "connect-content-encoding" if streams else "content-encoding"
    try:
        if (spoken := request.headers.get("connect-protocol-version", "1")) != "1":
            raise ServiceError("invalid_argument", f"expected version 1 of the protocol, found {brief(spoken, 40)}")
        if request.headers.get(header, "identity") != "identity":
            raise ServiceError("unimplemented", f"expected no compression, found {brief(request.headers[header], 40)}")
        seconds = _seconds(request)
        if not streams:
            message = decode(method.takes, await body_of(request, LARGEST_MESSAGE), binary=binary)
            call = ServiceCall(message, seconds, 0.0, _nothing())
            assert method.unary is not None
            work = method.unary(call)
            work = _while_there(_left(request), work) if method.waits else work
            return Response(encode(method.gives, await _within(work, seconds), binary=binary), media_type=kind)
        if method.stream is None:  # answered when all was read, for a response that is under way reads the request too
            given = await _within(_answer_to_stream(request, method, seconds, binary=binary), seconds)
            answer = encode(method.gives, given, binary=binary)
            return Response(envelope(answer) + envelope(b"{}", _END), media_type=kind)
        call = await _begun(request.stream(), request, method, seconds, binary=binary)
    except ClientDisconnect:
        return Response(status_code=499)
    except Exception as error:  # of any type: the client gets it in the protocol's form
        failure = _failure(error, method)
        if streams:
            _tell(request, failure)
            return Response(envelope(json.dumps({"error": failure.body()}).encode(), _END), media_type=kind)
        return Response(json.dumps(failure.body()), _STATUS[failure.code], media_type="application/json")
    return StreamingResponse(_answers(request, method, call, binary=binary), media_type=kind)


async def body_of(request: Request, limit: int) -> bytes:
    """The body of a request, read to a limit.

    Raises:
        ServiceError: it is larger.
    """
    data = bytearray()
    async for chunk in chunks_of(request):
        data += chunk
        if len(data) > limit:
            raise ServiceError("resource_exhausted", f"expected a body of at most {limit:,} bytes, found more")
    return bytes(data)


async def chunks_of(request: Request) -> AsyncIterator[bytes]:
    """The body of a request as it comes.

    Raises:
        ServiceError: it is silent for too long.
    """
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(SILENCE):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise ServiceError(
                "deadline_exceeded", f"nothing more of the request came for {SILENCE:g} seconds"
            ) from error
        yield chunk


async def _begun(
    chunks: AsyncIterator[bytes], request: Request, method: ServiceMethod, seconds: float | None, *, binary: bool
) -> ServiceCall:
    """A call whose first message has come."""
    messages = _messages(chunks, method.takes, binary=binary)
    first = await _within(anext(messages, None), SILENCE if seconds is None else min(seconds, SILENCE))
    if first is None:
        raise ServiceError("invalid_argument", f"expected a message of {method.takes}, found the end of the stream")
    return ServiceCall(first, seconds, _keepalive(request), messages)


async def _answer_to_stream(request: Request, method: ServiceMethod, seconds: float | None, *, binary: bool) -> Message:
    """Answer to a client that streams, as long as it is there: also while what it sent cannot be used yet."""
    chunks: asyncio.Queue[bytes | None] = asyncio.Queue(_AHEAD)

    async def read() -> None:
        async for chunk in request.stream():
            await chunks.put(chunk)
        await chunks.put(None)
        await _left(request)

    async def ahead() -> AsyncIterator[bytes]:
        while (chunk := await chunks.get()) is not None:
            yield chunk

    async def work() -> Message:
        assert method.unary is not None
        return await method.unary(await _begun(ahead(), request, method, seconds, binary=binary))

    return await _while_there(read(), work())


async def _left(request: Request) -> None:
    """Wait until the client of a request, all of which was read, has gone.

    Raises:
        ClientDisconnect: it has.
    """
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def _while_there(client: Awaitable[None], work: Awaitable[Message]) -> Message:
    """The result of work, which is given up when ``client``, which has no other end, raises."""
    there, answer = asyncio.ensure_future(client), asyncio.ensure_future(work)
    try:
        await asyncio.wait((there, answer), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else await _failed(there)
    finally:
        there.cancel()
        answer.cancel()
        await asyncio.gather(there, answer, return_exceptions=True)


async def _failed(client: Awaitable[None]) -> Message:
    await client
    raise ClientDisconnect


def _tell(request: Request, failure: ServiceError) -> None:
    """Log a refused stream, whose status says nothing."""
    if failure.code not in ("not_found", "deadline_exceeded"):  # which programs ask for
        tell(request.client, failure.code, f"{request.url.path[:80]}: {failure}")


async def _answers(request: Request, method: ServiceMethod, call: ServiceCall, *, binary: bool) -> AsyncIterator[bytes]:
    end: dict[str, Any] = {}
    try:
        assert method.stream is not None
        async with contextlib.aclosing(_as_generator(method.stream(call))) as messages:
            async for message in messages:
                yield envelope(encode(method.gives, message, binary=binary))
    except Exception as error:  # of any type: a stream's error is its last message, as its status is sent
        failure = _failure(error, method)
        _tell(request, failure)
        end = {"error": failure.body()}
    yield envelope(json.dumps(end).encode(), _END)


def _as_generator(messages: AsyncIterator[Message]) -> Any:
    return messages


async def _nothing() -> AsyncIterator[Message]:
    return
    yield


async def _messages(chunks: AsyncIterator[bytes], kind: str, *, binary: bool) -> AsyncIterator[Message]:
    data = bytearray()
    async for chunk in chunks:
        data += chunk
        while len(data) >= 5:
            size = int.from_bytes(data[1:5], "big")
            if data[0] & ~_END:
                raise ServiceError(
                    "invalid_argument", f"expected an envelope without compression, found flags {data[0]}"
                )
            if size > LARGEST_MESSAGE:
                raise ServiceError(
                    "resource_exhausted", f"expected a message of at most {LARGEST_MESSAGE:,} bytes, found {size:,}"
                )
            if len(data) < 5 + size:
                break
            if data[0] & _END:
                return
            yield decode(kind, bytes(data[5 : 5 + size]), binary=binary)
            del data[: 5 + size]
    if data:
        raise ServiceError("invalid_argument", f"expected an envelope, found {len(data)} bytes of one")


async def _within(work: Awaitable[Any], seconds: float | None) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise ServiceError(
            "deadline_exceeded", f"the call took more than its time limit of {seconds:g} seconds"
        ) from error


def _seconds(request: Request) -> float | None:
    given = request.headers.get("connect-timeout-ms")
    if given is None:
        return None
    if not given.isdecimal() or len(given) > 10:
        raise ServiceError(
            "invalid_argument", f"Connect-Timeout-Ms: expected up to 10 digits, found {brief(given, 40)}"
        )
    return int(given) / 1000


def _keepalive(request: Request) -> float:
    given = request.headers.get("keepalive-ping-interval", "")
    return float(given) if given.isdecimal() and len(given) < 6 and int(given) else 90.0


def _failure(error: Exception, method: ServiceMethod) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, BadMessage):
        return ServiceError("invalid_argument", str(error))
    log.error("a call of %s failed", method.takes, exc_info=error)
    return ServiceError("internal", f"the server failed: {type(error).__name__}: {brief(str(error), 200)}")
