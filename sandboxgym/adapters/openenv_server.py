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
import json
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from sandboxgym import __version__
from sandboxgym.adapters.openenv_sessions import (
    MOST_FORKS,
    MOST_ROWS,
    NAME,
    SPLIT,
    Answer,
    Limits,
    Refused,
    Session,
    Sessions,
    brief_text,
    row,
    rows,
    schema_of,
)
from sandboxgym.brief import brief
from sandboxgym.task_env import Task

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.websockets import WebSocket

log = logging.getLogger("sandboxgym")

LARGEST = 2**20
"""Bytes of a message from a client."""
API_VERSION = "1.0.0"
"""Version of the HTTP interface, as OpenEnv 0.10 publishes it."""
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, SERVER_ERROR = -32700, -32600, -32601, -32602, -32000
STATUS = {"VALIDATION_ERROR": 422, "CAPACITY_REACHED": 503, "FACTORY_ERROR": 500, "SESSION_ERROR": 404}
"""HTTP statuses of the protocol's errors; of all others 409."""

Schema = Mapping[str, Any]
_SEED: Schema = {"type": ["integer", "null"], "minimum": 0}
_ID: Schema = {"type": ["string", "null"], "maxLength": 255}
_NAME: Schema = {"type": "string", "pattern": f"^{NAME}$"}
_TASK: Schema = {"type": ["integer", "string"], "description": "position or id of a task"}


def _object(properties: Mapping[str, Schema], *required: str) -> Answer:
    return {
        "type": "object",
        "properties": {name: dict(schema) for name, schema in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }


RESET = _object(
    {
        "seed": _SEED,
        "episode_id": _ID,
        "task": _TASK,
        "split": {"type": "string", "maxLength": 255},
        "index": {"type": "integer", "minimum": 0, "description": "of the task in the split"},
        "options": {"type": ["object", "null"], "description": "the environment's own options of reset"},
    }
)
SNAPSHOT = _object({"name": {**_NAME, "description": "by default s1, s2, …"}})
RESTORE = _object(
    {"snapshot": _NAME, "seed": {**_SEED, "description": "a new random future; by default the same"}}, "snapshot"
)
FORK = _object(
    {
        "count": {"type": "integer", "minimum": 1, "maximum": MOST_FORKS, "default": 1},
        "snapshot": {**_NAME, "description": "by default the present state"},
        "seed": {**_SEED, "description": "a random future of its own for each; by default that of this session"},
    }
)
DISCARD = _object({"snapshots": {"type": "array", "items": _NAME, "minItems": 1, "maxItems": 1000}}, "snapshots")
STATE = {
    "type": "object",
    "properties": {
        "episode_id": _ID,
        "step_count": {"type": "integer", "minimum": 0},
        "env": {"type": "string"},
        "session_id": {"type": "string"},
        "done": {"type": "boolean"},
        "snapshots": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": True,
}
_RPC = _object(
    {
        "jsonrpc": {"const": "2.0"},
        "method": {"type": "string"},
        "params": {"type": "object"},
        "id": {"type": ["string", "integer", "null"]},
    },
    "jsonrpc",
    "method",
)


@dataclass(frozen=True)
class _Verb:
    """A message of ``/ws`` that acts on the environment."""

    about: str
    takes: Schema
    answers: str
    """Type of the answer."""
    wants_data: bool = False


VERBS = {
    "reset": _Verb("Begin an episode", RESET, "observation"),
    "step": _Verb("Do an action", {}, "observation", wants_data=True),
    "snapshot": _Verb("Keep the present state of the session under a name", SNAPSHOT, "snapshot"),
    "restore": _Verb("Put the session back into a kept state", RESTORE, "observation", wants_data=True),
    "fork": _Verb("Make sessions that continue from this one's state", FORK, "fork"),
    "discard": _Verb("Give up snapshots", DISCARD, "discard", wants_data=True),
}
TOOLS = {
    "begin": ("reset", "Begin an episode. Returns the first observation."),
    "act": ("step", "Do an action. Returns the observation, the reward and whether the episode is over."),
    "snapshot": ("snapshot", "Keep the present state under a name, to come back to it by restore."),
    "restore": ("restore", "Go back to a kept state exactly, whatever was done since. Returns its observation."),
    "fork": ("fork", "Make further sessions at this state, or at that of a snapshot. Returns their ids."),
    "discard": ("discard", "Give up snapshots that are no longer needed, to make room for others."),
}
"""MCP tools by name: their message, and what agents are told. OpenEnv reserves the names reset, step, state, close."""


class _Checked:
    """Schemas, compiled once, and the explanation of what does not fit."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        import jsonschema

        whole = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(  # to JSON Schema 1.0 is an integer
            "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
        )
        validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=whole)
        self._validators = {name: validator(dict(schema)) for name, schema in schemas.items()}

    def __call__(self, name: str, given: Any, what: str = "") -> dict[str, Any]:
        for error in self._validators[name].iter_errors(given):
            raise Refused("VALIDATION_ERROR", _explained(error, what or name))
        return dict(given)


def _explained(error: Any, what: str) -> str:
    """A validation error in one line; what was given may be huge."""
    where = ".".join([what, *(str(part) for part in error.absolute_path)])
    if error.validator == "additionalProperties":
        known = ", ".join(error.schema["properties"])
        unknown = [brief(name, 40) for name in list(error.instance)[:100] if name not in error.schema["properties"]]
        return f"{where}: expected no fields but {known or 'none'}, found {', '.join(unknown[:10]) or 'more'}"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"{where}: expected the fields {', '.join(error.validator_value)}; missing: {', '.join(missing)}"
    expected = (
        f"a value of type {error.validator_value}"
        if error.validator == "type"
        else (f"{error.validator} {brief(error.validator_value, 120)}")
    )
    return f"{where}: expected {expected}, found {brief(error.instance, 80)}"


def parsed(text: str | bytes) -> Any:
    """A message of a client as a value.

    Raises:
        Refused: it is not JSON, or too deep, or has numbers that JSON has not.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"expected a finite number, found {word}")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Refused("INVALID_JSON", f"Invalid JSON: {brief_text(error)}") from None


class _Served:
    """One environment's endpoints. Paths are relative to where it is mounted."""

    def __init__(self, name: str, sessions: Sessions) -> None:
        self.name = name
        self.sessions = sessions
        self._reading = threading.Lock()  # of tasks, which environments may load when they are first read
        self.action: Answer = {}
        self.observation: Answer = {}
        self.about = ""
        self.check: _Checked

    def look(self) -> None:
        """Make the environment once, for its spaces and its description.

        Raises:
            ValueError: it has no snapshots.
        """
        self._env = self.sessions.makers[self.name]()
        for method in ("snapshot", "restore", "fork"):
            if not callable(getattr(self._env, method, None)):
                raise ValueError(f"expected an environment with snapshots, found {self.name}: it has no {method}()")
        metadata = {"type": "object"}
        self.action = _object({"action": schema_of(self._env.action_space), "metadata": metadata}, "action")
        shown: dict[str, Schema] = {
            "observation": schema_of(self._env.observation_space),
            "terminated": {"type": "boolean"},
            "truncated": {"type": "boolean"},
            "info": {"type": "object"},
            "metadata": metadata,
        }
        self.observation = _object(shown, *shown)
        base = self._env.unwrapped
        lines = (type(base).__doc__ or "").strip().splitlines()
        prompt = getattr(getattr(type(base), "card", None), "system_prompt", "")
        self.about = "\n\n".join(part for part in (lines[0] if lines else self.name, prompt) if part)
        takes = {name: verb.takes for name, verb in VERBS.items()} | {
            "step": _object({"action": {}, "metadata": metadata}, "action")
        }
        self.check = _Checked({**takes, "rpc": _RPC})

    def close(self) -> None:
        """Close the environment that was made for its description."""
        self._env.close()

    async def do(self, session: Session, verb: str, data: Any) -> Answer:
        """One message on a session."""
        given = self.check(verb, data)
        if verb == "fork":
            children = await self.sessions.fork(session, given)
            return {"sessions": [child.id for child in children]}
        work: Callable[[Mapping[str, Any]], Answer] = getattr(session, verb)
        return await self.sessions.call(session, work, given)

    # The WebSocket of an episode.

    async def ws(self, websocket: WebSocket) -> None:
        """Messages of a client, until it or its session ends."""

        async def answer(session: Session, text: str) -> Answer | None:
            message = parsed(text)
            if not isinstance(message, dict):
                raise Refused("VALIDATION_ERROR", f"expected a message as an object, found {brief(message, 80)}")
            kind = message.get("type", "")
            if kind == "close":
                return None
            if not isinstance(kind, str) or (kind not in VERBS and kind not in ("state", "mcp")):
                known = ", ".join([*VERBS, "state", "mcp", "close"])
                raise Refused("UNKNOWN_TYPE", f"Unknown message type: expected {known}, found {brief(kind, 80)}")
            fields = {"type"} if kind == "state" else {"type", "data"}
            if unknown := [brief(name, 40) for name in list(message)[:100] if name not in fields]:
                raise Refused(
                    "VALIDATION_ERROR",
                    f"expected the fields {' and '.join(sorted(fields))}, found {', '.join(unknown[:10])}",
                )
            if kind == "state":
                return {"type": "state", "data": await self.sessions.call(session, session.state, {})}
            if "data" not in message and (kind == "mcp" or VERBS[kind].wants_data):
                raise Refused("VALIDATION_ERROR", f"expected data with {kind}, found none")
            data = message.get("data", {})
            if kind == "mcp":
                return {"type": "mcp", "data": await self.rpc(data, session)}
            return {"type": VERBS[kind].answers, "data": await self.do(session, kind, data)}

        def refused(error: Refused) -> Answer:
            return {"type": "error", "data": {"message": str(error), "code": error.code}}

        await self._converse(websocket, answer, refused)

    async def mcp_ws(self, websocket: WebSocket) -> None:
        """JSON-RPC of an agent on a session of its own."""

        async def answer(session: Session, text: str) -> Answer:
            return await self.rpc(_rpc_parsed(text), session)

        def refused(error: Refused) -> Answer:
            return _rpc_error(None, SERVER_ERROR, str(error))

        await self._converse(websocket, answer, refused)

    async def _converse(
        self,
        websocket: WebSocket,
        answer: Callable[[Session, str], Awaitable[Answer | None]],
        refused: Callable[[Refused], Answer],
    ) -> None:
        from starlette.websockets import WebSocketDisconnect

        await websocket.accept()
        session: Session | None = None
        try:
            try:
                session = await self._session_of(websocket.query_params.get("session_id"))
            except Refused as error:
                log.info("%s: refused a session: %s", self.name, error)
                await websocket.send_text(_text(refused(error)))
                return
            while (text := await self._next(websocket, session)) is not None:
                try:
                    told = await answer(session, text)
                except Refused as error:
                    log.info("%s: %s: %s", self.name, error.code, error)
                    told = refused(error)
                if told is None:
                    return
                await websocket.send_text(_text(told))
                if session.ended.is_set():
                    return
            if session.ended.is_set():
                await websocket.send_text(_text(refused(Refused("SESSION_ERROR", f"the session ended: {session.why}"))))
        except (WebSocketDisconnect, RuntimeError, OSError) as error:  # the other end is gone
            log.debug("%s: the connection ended: %s", self.name, error)
        finally:
            if session is not None:
                session.attached = False
                if session.owned:
                    await asyncio.shield(self.sessions.ended(session, "its connection ended"))
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await websocket.close()

    async def _session_of(self, wanted: str | None) -> Session:
        if wanted is None:
            session = await self.sessions.create(self.name)
        else:
            session = self.sessions.find(self.name, wanted)
            if session.attached:
                raise Refused("SESSION_ERROR", f"expected a session without a connection, found {brief(wanted, 80)}")
        session.attached = session.touched = True
        return session

    @staticmethod
    async def _next(websocket: WebSocket, session: Session) -> str | None:
        """The next message; None where the client or the session ended."""
        message = asyncio.ensure_future(websocket.receive())
        end = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait([message, end], return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                return None
            received = message.result()
        finally:
            message.cancel()
            end.cancel()
        if received["type"] == "websocket.disconnect":
            return None
        text = received.get("text")
        return text if text is not None else (received.get("bytes") or b"").decode("utf-8", "replace")

    # MCP, by HTTP or within a WebSocket.

    async def rpc(self, given: Any, session: Session | None = None) -> Answer:
        """Answer a JSON-RPC request, on this session, or on that of its ``session_id``, or on one for this call."""
        try:
            request = self.check("rpc", given, "request")
        except Refused as error:
            return _rpc_error(_rpc_id(given), INVALID_REQUEST, f"Invalid request: {error}")
        number, method, params = request.get("id"), request["method"], dict(request.get("params", {}))
        try:
            return {"jsonrpc": "2.0", "id": number, "result": await self._rpc_result(method, params, session)}
        except Refused as error:
            log.info("%s: %s: %s", self.name, error.code, error)
            codes = {"VALIDATION_ERROR": INVALID_PARAMS, "UNKNOWN_TYPE": METHOD_NOT_FOUND}
            return _rpc_error(number, codes.get(error.code, SERVER_ERROR), str(error))

    async def _rpc_result(self, method: str, params: dict[str, Any], session: Session | None) -> Any:
        if method == "tools/list":
            return {"tools": self._tools()}
        if method == "openenv/session/create":
            return {"session_id": (session or await self.sessions.create(self.name, owned=False)).id}
        wanted = params.pop("session_id", None)
        if wanted is not None and not isinstance(wanted, str):
            raise Refused("VALIDATION_ERROR", f"expected session_id as text, found {brief(wanted, 80)}")
        if method == "openenv/session/close":
            if wanted is None:
                raise Refused("VALIDATION_ERROR", "expected a session_id, found none")
            found = self.sessions.find(self.name, wanted)
            await self.sessions.ended(found, "it was closed")
            return {"session_id": wanted, "closed": True}
        if method != "tools/call":
            known = "tools/list, tools/call, openenv/session/create, openenv/session/close"
            raise Refused("UNKNOWN_TYPE", f"Method not found: expected {known}, found {brief(method, 80)}")
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or name not in TOOLS:
            raise Refused("VALIDATION_ERROR", f"expected a tool ({', '.join(TOOLS)}), found {brief(name, 80)}")
        if session is None and wanted is not None:
            session = self.sessions.find(self.name, wanted)
        temporary = None if session else await self.sessions.create(self.name)
        try:
            told = await self.do(session or temporary, TOOLS[name][0], arguments)  # type: ignore[arg-type]
        finally:
            if temporary is not None:
                await self.sessions.ended(temporary, "it was for one call")
        text = _text(told)
        return {
            "content": [{"type": "text", "text": text}],
            "structured_content": told,
            "data": told,
            "is_error": False,
        }

    def _tools(self) -> list[Answer]:
        schemas = {name: dict(VERBS[verb].takes) for name, (verb, _) in TOOLS.items()} | {"act": self.action}
        return [
            {"name": name, "description": about, "inputSchema": schemas[name]} for name, (_, about) in TOOLS.items()
        ]

    # HTTP.

    async def control(self, request: Request, verb: str) -> Answer:
        """A message by HTTP, on the session that the body names."""
        body = await _body(request)
        wanted = body.pop("session_id", None)
        if wanted is not None and not isinstance(wanted, str):
            raise Refused("VALIDATION_ERROR", f"expected session_id as text, found {brief(wanted, 80)}")
        data: Any = body
        if verb == "step":  # the action is one level deeper than by WebSocket
            if not isinstance(body.get("action"), dict):
                raise Refused(
                    "VALIDATION_ERROR", f"step.action: expected an object, found {brief(body.get('action'), 80)}"
                )
            if unknown := [name for name in body if name not in ("action", "timeout_s", "request_id")]:
                raise Refused("VALIDATION_ERROR", f"expected action, timeout_s, request_id, found {brief(unknown, 80)}")
            data = body["action"]
        if wanted is not None:
            return await self.do(self.sessions.find(self.name, wanted), verb, data)
        self.check(verb, data)
        if verb != "reset":
            raise Refused(
                "EXECUTION_ERROR",
                f"expected a session_id, found none: without a session there is no episode to {verb}. Use /ws, or "
                "openenv/session/create of /mcp",
            )
        session = await self.sessions.create(self.name)
        try:
            return await self.do(session, verb, data)
        finally:
            await self.sessions.ended(session, "it was for one call")

    async def state(self, request: Request) -> Answer:
        """State of the session that the query names; without it, that of a session before its first reset."""
        wanted = request.query_params.get("session_id")
        if wanted is None:
            return {"episode_id": None, "step_count": 0, "env": self.name, "done": False, "snapshots": []}
        session = self.sessions.find(self.name, wanted)
        return await self.sessions.call(session, session.state, {})

    async def metadata(self, request: Request) -> Answer:
        """Name and description."""
        return {
            "name": self.name,
            "description": self.about,
            "version": __version__,
            "readme_content": None,
            "author": None,
            "documentation_url": None,
        }

    async def schema(self, request: Request) -> Answer:
        """Schemas of actions, observations and the state."""
        return {
            "action": self.action,
            "observation": self.observation,
            "reset_observation": self.observation,
            "state": STATE,
        }

    async def mcp(self, request: Request) -> Answer:
        """A JSON-RPC request by HTTP."""
        try:
            given = _rpc_parsed(await _read(request))
        except Refused as error:
            return _rpc_error(None, PARSE_ERROR, str(error))
        return await self.rpc(given)

    async def tasks(self, request: Request, what: str) -> Any:
        """The task endpoints: splits, tasks, num_tasks, task, task_range."""
        named = request.path_params.get("env")
        if named is not None and named.lower() != self.name.lower():
            raise Refused("SESSION_ERROR", f"unknown environment: expected {self.name}, found {brief(named, 80)}")
        body = {} if what == "splits" else await _body(request)
        split = body.get("split", SPLIT)
        if not isinstance(split, str):
            raise Refused("VALIDATION_ERROR", f"expected split as text, found {brief(split, 80)}")
        bounds = [body.get(key) for key in ("index", "start", "stop")]
        if not all(bound is None or (isinstance(bound, int) and not isinstance(bound, bool)) for bound in bounds):
            raise Refused("VALIDATION_ERROR", f"expected index, start and stop as integers, found {brief(bounds, 80)}")
        return await asyncio.to_thread(self._listed, what, split, *bounds)

    def _listed(self, what: str, split: str, index: int | None, start: int | None, stop: int | None) -> Any:
        with self._reading:
            found = rows(self._env, split)
            return self._rows_told(found, what, index, start, stop)

    def _rows_told(
        self, found: Sequence[Task], what: str, index: int | None, start: int | None, stop: int | None
    ) -> Any:
        if what == "splits":
            return [{"name": SPLIT, "type": "train"}]
        if what == "num_tasks":
            return {"num_tasks": len(found)}
        if what == "task":
            if index is None:
                raise Refused("VALIDATION_ERROR", "expected an index, found none")
            if not 0 <= index < len(found):
                raise IndexError(f"expected an index from 0 to {len(found) - 1}, found {index}")
            return {"task": row(found[index], index)}
        places = range(len(found))[slice(start, stop)][:MOST_ROWS]
        listed = {"tasks": [row(found[place], place) for place in places]}
        return listed if what == "task_range" else {**listed, "env_name": self.name}


def _text(answer: Any) -> str:
    return json.dumps(answer)  # ASCII: a lone surrogate of an observation cannot be sent otherwise


def _rpc_parsed(text: str | bytes) -> Any:
    try:
        return parsed(text)
    except Refused as error:
        raise Refused("INVALID_JSON", f"Parse error: {error}") from None


def _rpc_id(given: Any) -> Any:
    number = given.get("id") if isinstance(given, dict) else None
    return number if isinstance(number, (str, int)) and not isinstance(number, bool) else None


def _rpc_error(number: Any, code: int, message: str) -> Answer:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, "data": None}}


async def _read(request: Request) -> bytes:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > LARGEST:
            raise Refused("VALIDATION_ERROR", f"expected a body of at most {LARGEST:,} bytes, found more")
    return data


async def _body(request: Request) -> dict[str, Any]:
    data = await _read(request)
    body = parsed(data) if data.strip() else {}
    if not isinstance(body, dict):
        raise Refused("VALIDATION_ERROR", f"expected an object as the body, found {brief(body, 80)}")
    return body


def _openapi(served: _Served) -> Answer:
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


def application(
    makers: Mapping[str, Callable[[], gym.Env[Any, Any]]],
    *,
    limits: Limits | None = None,
    hosts: frozenset[str] | None = None,
) -> Starlette:
    """An ASGI application that serves environments: one at ``/``, several at ``/NAME`` each.

    Args:
        makers: make an environment, by the name that clients know.
        limits: of sessions, snapshots, and seconds.
        hosts: names by which clients may address it; None: any. Web pages of other origins are always refused.

    Raises:
        ImportError: a package of the extra ``openenv`` is missing.
        ValueError: an environment has no snapshots.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

    sessions = Sessions(makers, limits or Limits())
    all_served = [_Served(name, sessions) for name in makers]
    for served in all_served:
        served.look()

    def answered(work: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            status, told = 200, None
            try:
                told = await work(request)
            except Refused as error:
                status, told = STATUS.get(error.code, 422 if error.code == "INVALID_JSON" else 409), str(error)
            except NotImplementedError as error:
                status, told = 501, brief_text(error)
            except (LookupError, ValueError) as error:  # of tasks
                status, told = 400, brief_text(error)
            if status != 200:
                log.info("%s %s: %d: %s", request.method, brief(request.url.path, 80), status, told)
                told = {"detail": told}
            return Response(_text(told), status_code=status, media_type="application/json")

        return endpoint

    def control(served: _Served, verb: str) -> Callable[[Request], Awaitable[Any]]:
        return lambda request: served.control(request, verb)

    def tasks(served: _Served, what: str) -> Callable[[Request], Awaitable[Any]]:
        return lambda request: served.tasks(request, what)

    async def health(request: Request) -> Answer:
        return {"status": "healthy"}

    async def names(request: Request) -> list[str]:
        return list(makers)

    def routes_of(served: _Served) -> list[BaseRoute]:
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

    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.sessions, app.state.closed = sessions, True
    app.add_middleware(_OwnPagesOnly, hosts=hosts)  # type: ignore[arg-type]
    return app


def run(app: Starlette, listening: socket.socket) -> bool:
    """Serve until SIGINT or SIGTERM.

    Returns:
        False if a call of an environment could not be ended: its thread would keep this process.
    """
    import uvicorn

    # uvicorn ends by sending itself the signal that it has dealt with.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=2,
        ws="websockets-sansio",
        ws_max_size=LARGEST,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
    return bool(app.state.closed)


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
                log.warning("refused a client: host %s, origin %s", brief(host, 80), brief(origin, 80))
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008, "reason": "foreign origin or host"})
                    return
                text = [(b"content-type", b"text/plain")]
                await send({"type": "http.response.start", "status": 403, "headers": text})
                await send({"type": "http.response.body", "body": b"foreign origin or host"})
                return
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """Host without port: ``[::1]:8000`` is ``::1``."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()
