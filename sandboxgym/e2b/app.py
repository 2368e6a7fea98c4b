"""The server of ``sandboxgym serve e2b``: one address for the control plane and for the daemons of all sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sandboxgym.brief import brief
from sandboxgym.e2b import control, envd
from sandboxgym.e2b.control import Handler
from sandboxgym.e2b.quotas import RequestRefused
from sandboxgym.e2b.service import Service, refusal
from sandboxgym.system.serving import Patience, leave, serve

log = logging.getLogger("sandboxgym")

CLOSING = 5.0
"""Seconds that ending everything may take, before the process ends with it."""
MOST_CONNECTIONS = 2000
_LOCAL = ("127.0.0.1", "localhost", "[::1]")

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(service: Service, *, local_only: bool) -> Any:
    """Make the ASGI application of a service.

    Args:
        service: of its sandboxes; closed with the application.
        local_only: refuse requests that a web page can have made: with another host name than this machine's, or with
            an origin.
    """

    def controlled(handler: Handler) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            try:
                tenant = service.tenant(request.headers.get("x-api-key"))
                tenant.requests.take()
                return await handler(request, service, tenant)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # of any type: the client gets it as JSON
                return _refused(refusal(error))

        return endpoint

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await service.close()

    async def health(request: Request) -> Response:
        return Response(status_code=204)

    async def missing(request: Request, error: Exception) -> Response:
        return _refused(RequestRefused(404, f"{request.method} {brief(request.url.path, 80)} is not served"))

    routes = [Route(path, controlled(handler), methods=[method]) for method, path, handler in control.ROUTES]
    routes.append(Route("/health", health, methods=["GET"]))
    plane = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: missing, 405: missing})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await plane(scope, receive, send)
            return
        request = Request(scope, receive)
        if local_only and not _is_local(request):
            response: Any = _refused(
                RequestRefused(403, "expected a request to this machine's own name, without an origin")
            )
        elif (named := envd.name_of(request, service)) is not None:
            response = await envd.answer(request, service, *named)
        else:
            response = plane
        await response(scope, receive, send)

    return app


def _is_local(request: Request) -> bool:
    host = request.headers.get("host", "")
    return "origin" not in request.headers and host.removesuffix(f":{host.rpartition(':')[2]}") in _LOCAL


def _refused(error: RequestRefused) -> Response:
    headers = {}
    if error.status == 429:
        headers = {"should-retry": "false"} if error.retry is None else {"retry-after": f"{error.retry:.0f}"}
    return JSONResponse({"code": error.status, "message": str(error)}, error.status, headers=headers)


def run(
    service: Service, listening: socket.socket, *, local_only: bool, started: Callable[[], object] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        service: of its sandboxes; closed at the end.
        listening: a socket that is bound.
        local_only: see `make_app`.
        started: called once clients are served.

    Raises:
        KeyboardInterrupt: it was ended.
    """
    app = make_app(service, local_only=local_only)
    try:
        serve(
            app,
            listening,
            refusal=lambda status, said: json.dumps({"code": status, "message": said}).encode(),
            patience=Patience(connections=MOST_CONNECTIONS),
            open_ended={envd.STREAM_INPUT},
            started=started,
            ending=service.end,  # streams of commands end with an error in words
            timeout_graceful_shutdown=1,
            access_log=False,
            ws="none",
        )
    finally:
        if not service.join(1.0):  # a thread that works for a sandbox would be waited for
            leave(0)
