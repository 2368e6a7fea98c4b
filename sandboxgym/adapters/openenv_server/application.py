"""Environments behind the protocol of OpenEnv 0.10, with snapshots, restores and forks as further messages.

``sandboxgym serve openenv`` starts it; `application` makes it for any ASGI server. Needs
``pip install "sandboxgym[openenv]"``, but not the package ``openenv``.

1. ``/ws`` is a session per connection: ``reset``, ``step``, ``state``, ``close`` and ``mcp`` as in OpenEnv, and
   ``snapshot``, ``restore``, ``fork``, ``discard``. ``/ws?session_id=…`` continues a session that a fork or
   ``openenv/session/create`` made.
2. By HTTP, ``/reset`` and ``/step`` act on the session that ``session_id`` in the body names; without it ``/reset`` is
   an episode's first observation and no more, as in OpenEnv.
3. A message that is not understood is answered by the protocol's error, and the session continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from sandboxgym.adapters.openenv_server.endpoints import Served
from sandboxgym.adapters.openenv_server.protocol import LARGEST, VERBS, text_of
from sandboxgym.adapters.openenv_server.sessions import Answer, EnvSessions, Limits, SessionRefused, brief_text
from sandboxgym.brief import brief
from sandboxgym.system.refusals import tell
from sandboxgym.system.serving import serve

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

API_VERSION = "1.0.0"
"""Version of the HTTP interface, as OpenEnv 0.10 publishes it."""
STATUS = {"VALIDATION_ERROR": 422, "CAPACITY_REACHED": 503, "FACTORY_ERROR": 500, "SESSION_ERROR": 404}
"""HTTP statuses of the protocol's errors; of all others 409."""


def application(
    makers: Mapping[str, Callable[[], gym.Env[Any, Any]]],
    *,
    limits: Limits | None = None,
    hosts: frozenset[str] | None = None,
) -> Starlette:
    """Make an ASGI application that serves environments: one at ``/``, several at ``/NAME`` each.

    Args:
        makers: make an environment, by the name that clients know.
        limits: of sessions, snapshots, and seconds.
        hosts: names by which clients may address it; None: any. Web pages of other origins are always refused.

    Raises:
        ImportError: a package of the extra ``openenv`` is missing.
        ValueError: an environment has no snapshots.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

    sessions = EnvSessions(makers, limits or Limits())
    all_served = [Served(name, sessions) for name in makers]
    for served in all_served:
        served.look()

    def answered(work: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            status, told = 200, None
            try:
                told = await work(request)
            except SessionRefused as error:
                status, told = STATUS.get(error.code, 422 if error.code == "INVALID_JSON" else 409), str(error)
            except NotImplementedError as error:
                status, told = 501, brief_text(error)
            except (LookupError, ValueError) as error:  # of tasks
                status, told = 400, brief_text(error)
            if status != 200:
                told = {"detail": told}
            return Response(text_of(told), status_code=status, media_type="application/json")

        return endpoint

    def control(served: Served, verb: str) -> Callable[[Request], Awaitable[Any]]:
        return lambda request: served.control(request, verb)

    def tasks(served: Served, what: str) -> Callable[[Request], Awaitable[Any]]:
        return lambda request: served.tasks(request, what)

    async def health(request: Request) -> Answer:
        return {"status": "healthy"}

    async def names(request: Request) -> list[str]:
        return list(makers)

    def routes_of(served: Served) -> list[BaseRoute]:
        async def openapi(request: Request) -> Answer:
            return _openapi(served)

        found: list[BaseRoute] = [
            Route(f"/{verb}", answered(control(served, verb)), methods=["POST"]) for verb in VERBS
        ]
        for path, work in (
            ("/state", served.state),
            ("/metadata", served.metadata),
            ("/schema", served.schema),
            ("/health", health),
            ("/openapi.json", openapi),
            ("/list_environments", names),
        ):
            found.append(Route(path, answered(work)))
        found.append(Route("/mcp", answered(served.mcp), methods=["POST"]))
        found += [WebSocketRoute("/ws", served.ws), WebSocketRoute("/mcp", served.mcp_ws)]
        for prefix in ("", "/{env}"):
            found.append(Route(f"{prefix}/splits", answered(tasks(served, "splits"))))
            for what in ("tasks", "num_tasks", "task", "task_range"):
                found.append(Route(f"{prefix}/{what}", answered(tasks(served, what)), methods=["POST"]))
        return found

    if len(all_served) == 1:
        routes = routes_of(all_served[0])
    else:
        routes = [Route("/health", answered(health)), Route("/list_environments", answered(names))]
        routes += [Mount(f"/{served.name}", routes=routes_of(served)) for served in all_served]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def end_idle() -> None:
            while True:
                await asyncio.sleep(min(sessions.limits.idle / 4, 5.0))
                sessions.end_idle()

        reaper = asyncio.create_task(end_idle())
        try:
            yield
        finally:
            reaper.cancel()
            app.state.closed = await asyncio.to_thread(sessions.close)
            for served in all_served:
                await asyncio.to_thread(served.close)

    async def refused(request: Request, error: Exception) -> Response:  # of Starlette, by status 404 and 405
        assert isinstance(error, HTTPException)
        told = text_of({"detail": error.detail})
        return Response(told, status_code=error.status_code, media_type="application/json", headers=error.headers)

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refused})
    app.state.sessions, app.state.closed = sessions, True
    app.add_middleware(_OwnPagesOnly, hosts=hosts)  # type: ignore[arg-type]
    return app


def run(app: Starlette, listening: socket.socket, started: Callable[[], object] | None = None) -> bool:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: result of `application`.
        listening: a socket that is bound.
        started: called once clients are served.

    Returns:
        False if a call of an environment could not be ended: its thread would keep this process.
    """
    with contextlib.suppress(KeyboardInterrupt):
        serve(
            app,
            listening,
            refusal=lambda status, said: text_of({"detail": said}).encode(),
            started=started,
            timeout_graceful_shutdown=2,
            ws="websockets-sansio",
            ws_max_size=LARGEST,
        )
    return bool(app.state.closed)


def _openapi(served: Served) -> Answer:
    """Description of the HTTP interface, as far as clients and ``openenv validate`` read it."""
    ok = {"200": {"description": "done"}, "422": {"description": "not understood"}}
    paths: Answer = {}
    for verb, described in VERBS.items():
        takes = {"type": "object", "properties": {"action": served.action}} if verb == "step" else dict(described.takes)
        content = {"application/json": {"schema": takes}}
        paths[f"/{verb}"] = {"post": {"summary": described.about, "requestBody": {"content": content}, "responses": ok}}
    for path, about in (
        ("/state", "State of a session"),
        ("/metadata", "Name and description"),
        ("/schema", "Schemas of actions, observations and the state"),
        ("/health", "Whether the server runs"),
        ("/list_environments", "Names of environments"),
        ("/{env_name}/splits", "Splits of tasks"),
    ):
        paths[path] = {"get": {"summary": about, "responses": ok}}
    for path in ("/mcp", "/{env_name}/tasks", "/{env_name}/num_tasks", "/{env_name}/task", "/{env_name}/task_range"):
        paths[path] = {"post": {"responses": ok}}
    info = {"title": f"{served.name}: OpenEnv Environment HTTP API", "version": API_VERSION}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


class _OwnPagesOnly:
    """Middleware that refuses web pages of other origins, and names that are not this server's.

    A browser lets any page connect to a WebSocket of the loopback, and a page's own name may be made to point to it.
    """

    def __init__(self, app: Any, *, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get(b"host", ""), headers.get(b"origin")
            foreign = origin is not None and origin.rpartition("//")[2] != host
            if foreign or (self._hosts is not None and _name_of(host) not in self._hosts):
                if scope["type"] == "websocket":
                    tell(scope["client"], "foreign", f"host {brief(host, 80)}, origin {brief(origin, 80)}")
                    await send({"type": "websocket.close", "code": 1008, "reason": "foreign origin or host"})
                    return
                content = text_of({"detail": "foreign origin or host"}).encode()
                told = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
                await send({"type": "http.response.start", "status": 403, "headers": told})
                await send({"type": "http.response.body", "body": content})
                return
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """Host without port: ``[::1]:8000`` is ``::1``."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()
