"""The endpoints of one environment: conversations by WebSocket, JSON-RPC of agents, and calls by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sandboxgym import __version__
from sandboxgym.adapters.openenv_server.protocol import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    LARGEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    RPC,
    SERVER_ERROR,
    STATE,
    TOOLS,
    VERBS,
    Checked,
    Schema,
    object_of,
    parsed,
    rpc_error,
    rpc_id,
    rpc_parsed,
    text_of,
)
from sandboxgym.adapters.openenv_server.sessions import (
    MOST_ROWS,
    SPLIT,
    Answer,
    EnvSession,
    EnvSessions,
    SessionRefused,
    row,
    rows,
    schema_of,
)
from sandboxgym.brief import brief
from sandboxgym.system.refusals import tell
from sandboxgym.task_env import Task

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.websockets import WebSocket

log = logging.getLogger("sandboxgym")


class Served:
    """One environment's endpoints. Paths are relative to where it is mounted."""

    def __init__(self, name: str, sessions: EnvSessions) -> None:
        self.name = name
        self.sessions = sessions
        self._reading = threading.Lock()  # of tasks, which environments may load when they are first read
        self.action: Answer = {}
        self.observation: Answer = {}
        self.about = ""
        self.check: Checked

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
        self.action = object_of({"action": schema_of(self._env.action_space), "metadata": metadata}, "action")
        shown: dict[str, Schema] = {
            "observation": schema_of(self._env.observation_space),
            "terminated": {"type": "boolean"},
            "truncated": {"type": "boolean"},
            "info": {"type": "object"},
            "metadata": metadata,
        }
        self.observation = object_of(shown, *shown)
        base = self._env.unwrapped
        lines = (type(base).__doc__ or "").strip().splitlines()
        prompt = getattr(getattr(type(base), "card", None), "system_prompt", "")
        self.about = "\n\n".join(part for part in (lines[0] if lines else self.name, prompt) if part)
        takes = {name: verb.takes for name, verb in VERBS.items()} | {
            "step": object_of({"action": {}, "metadata": metadata}, "action")
        }
        self.check = Checked({**takes, "rpc": RPC})

    def close(self) -> None:
        """Close the environment that was made for its description."""
        self._env.close()

    async def do(self, session: EnvSession, verb: str, data: Any) -> Answer:
        """Carry out one message on a session."""
        given = self.check(verb, data)
        if verb == "fork":
            children = await self.sessions.fork(session, given)
            return {"sessions": [child.id for child in children]}
        work: Callable[[Mapping[str, Any]], Answer] = getattr(session, verb)
        return await self.sessions.call(session, work, given)

    # The WebSocket of an episode.

    async def ws(self, websocket: WebSocket) -> None:
        """Answer the messages of a client, until it or its session ends."""

        async def answer(session: EnvSession, text: str) -> Answer | None:
            message = parsed(text)
            if not isinstance(message, dict):
                raise SessionRefused("VALIDATION_ERROR", f"expected a message as an object, found {brief(message, 80)}")
            kind = message.get("type", "")
            if kind == "close":
                return None
            if not isinstance(kind, str) or (kind not in VERBS and kind not in ("state", "mcp")):
                known = ", ".join([*VERBS, "state", "mcp", "close"])
                raise SessionRefused("UNKNOWN_TYPE", f"Unknown message type: expected {known}, found {brief(kind, 80)}")
            fields = {"type"} if kind == "state" else {"type", "data"}
            if unknown := [brief(name, 40) for name in list(message)[:100] if name not in fields]:
                raise SessionRefused(
                    "VALIDATION_ERROR",
                    f"expected the fields {' and '.join(sorted(fields))}, found {', '.join(unknown[:10])}",
                )
            if kind == "state":
                return {"type": "state", "data": await self.sessions.call(session, session.state, {})}
            if "data" not in message and (kind == "mcp" or VERBS[kind].wants_data):
                raise SessionRefused("VALIDATION_ERROR", f"expected data with {kind}, found none")
            data = message.get("data", {})
            if kind == "mcp":
                return {"type": "mcp", "data": await self.rpc(data, session, client=websocket.client)}
            return {"type": VERBS[kind].answers, "data": await self.do(session, kind, data)}

        def refused(error: SessionRefused) -> Answer:
            return {"type": "error", "data": {"message": str(error), "code": error.code}}

        await self._converse(websocket, answer, refused)

    async def mcp_ws(self, websocket: WebSocket) -> None:
        """Answer JSON-RPC of an agent on a session of its own."""

        async def answer(session: EnvSession, text: str) -> Answer:
            return await self.rpc(rpc_parsed(text), session, client=websocket.client)

        def refused(error: SessionRefused) -> Answer:
            return rpc_error(None, SERVER_ERROR, str(error))

        await self._converse(websocket, answer, refused)

    async def _converse(
        self,
        websocket: WebSocket,
        answer: Callable[[EnvSession, str], Awaitable[Answer | None]],
        refused: Callable[[SessionRefused], Answer],
    ) -> None:
        from starlette.websockets import WebSocketDisconnect

        await websocket.accept()
        session: EnvSession | None = None
        try:
            try:
                session = await self._session_of(websocket.query_params.get("session_id"))
            except SessionRefused as error:
                tell(websocket.client, f"{self.name}: {error.code}", error)
                await websocket.send_text(text_of(refused(error)))
                return
            while (text := await self._next(websocket, session)) is not None:
                try:
                    told = await answer(session, text)
                except SessionRefused as error:
                    tell(websocket.client, f"{self.name}: {error.code}", error)
                    told = refused(error)
                if told is None:
                    return
                await websocket.send_text(text_of(told))
                if session.ended.is_set():
                    return
            if session.ended.is_set():
                await websocket.send_text(
                    text_of(refused(SessionRefused("SESSION_ERROR", f"the session ended: {session.why}")))
                )
        except (WebSocketDisconnect, RuntimeError, OSError) as error:  # the other end is gone
            log.debug("%s: the connection ended: %s", self.name, error)
        finally:
            if session is not None:
                session.attached = False
                if session.owned:
                    await asyncio.shield(self.sessions.ended(session, "its connection ended"))
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await websocket.close()

    async def _session_of(self, wanted: str | None) -> EnvSession:
        if wanted is None:
            session = await self.sessions.create(self.name)
        else:
            session = self.sessions.find(self.name, wanted)
            if session.attached:
                raise SessionRefused(
                    "SESSION_ERROR", f"expected a session without a connection, found {brief(wanted, 80)}"
                )
        session.attached = session.touched = True
        return session

    @staticmethod
    async def _next(websocket: WebSocket, session: EnvSession) -> str | None:
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

    async def rpc(self, given: Any, session: EnvSession | None = None, *, client: Any) -> Answer:
        """Answer a JSON-RPC request, on this session, or on that of its ``session_id``, or on one for this call.

        A refusal is logged with the address of the client.
        """
        try:
            request = self.check("rpc", given, "request")
        except SessionRefused as error:
            tell(client, f"{self.name}: {error.code}", error)
            return rpc_error(rpc_id(given), INVALID_REQUEST, f"Invalid request: {error}")
        number, method, params = request.get("id"), request["method"], dict(request.get("params", {}))
        try:
            return {"jsonrpc": "2.0", "id": number, "result": await self._rpc_result(method, params, session)}
        except SessionRefused as error:
            tell(client, f"{self.name}: {error.code}", error)
            codes = {"VALIDATION_ERROR": INVALID_PARAMS, "UNKNOWN_TYPE": METHOD_NOT_FOUND}
            return rpc_error(number, codes.get(error.code, SERVER_ERROR), str(error))

    async def _rpc_result(self, method: str, params: dict[str, Any], session: EnvSession | None) -> Any:
        if method == "tools/list":
            return {"tools": self._tools()}
        if method == "openenv/session/create":
            return {"session_id": (session or await self.sessions.create(self.name, owned=False)).id}
        wanted = params.pop("session_id", None)
        if wanted is not None and not isinstance(wanted, str):
            raise SessionRefused("VALIDATION_ERROR", f"expected session_id as text, found {brief(wanted, 80)}")
        if method == "openenv/session/close":
            if wanted is None:
                raise SessionRefused("VALIDATION_ERROR", "expected a session_id, found none")
            found = self.sessions.find(self.name, wanted)
            await self.sessions.ended(found, "it was closed")
            return {"session_id": wanted, "closed": True}
        if method != "tools/call":
            known = "tools/list, tools/call, openenv/session/create, openenv/session/close"
            raise SessionRefused("UNKNOWN_TYPE", f"Method not found: expected {known}, found {brief(method, 80)}")
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or name not in TOOLS:
            raise SessionRefused("VALIDATION_ERROR", f"expected a tool ({', '.join(TOOLS)}), found {brief(name, 80)}")
        if session is None and wanted is not None:
            session = self.sessions.find(self.name, wanted)
        temporary = None if session else await self.sessions.create(self.name)
        try:
            told = await self.do(session or temporary, TOOLS[name][0], arguments)  # type: ignore[arg-type]
        finally:
            if temporary is not None:
                await self.sessions.ended(temporary, "it was for one call")
        text = text_of(told)
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
        """Carry out a message by HTTP, on the session that the body names."""
        body = await _body(request)
        wanted = body.pop("session_id", None)
        if wanted is not None and not isinstance(wanted, str):
            raise SessionRefused("VALIDATION_ERROR", f"expected session_id as text, found {brief(wanted, 80)}")
        data: Any = body
        if verb == "step":  # the action is one level deeper than by WebSocket
            if not isinstance(body.get("action"), dict):
                raise SessionRefused(
                    "VALIDATION_ERROR", f"step.action: expected an object, found {brief(body.get('action'), 80)}"
                )
            if unknown := [name for name in body if name not in ("action", "timeout_s", "request_id")]:
                raise SessionRefused(
                    "VALIDATION_ERROR", f"expected action, timeout_s, request_id, found {brief(unknown, 80)}"
                )
            data = body["action"]
        if wanted is not None:
            return await self.do(self.sessions.find(self.name, wanted), verb, data)
        self.check(verb, data)
        if verb != "reset":
            raise SessionRefused(
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
        """Name and description of the environment."""
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
        """Answer a JSON-RPC request by HTTP."""
        try:
            given = rpc_parsed(await _read(request))
        except SessionRefused as error:
            tell(request.client, f"{self.name}: {error.code}", error)
            return rpc_error(None, PARSE_ERROR, str(error))
        return await self.rpc(given, client=request.client)

    async def tasks(self, request: Request, what: str) -> Any:
        """Answer the task endpoints: splits, tasks, num_tasks, task, task_range."""
        named = request.path_params.get("env")
        if named is not None and named.lower() != self.name.lower():
            raise SessionRefused(
                "SESSION_ERROR", f"unknown environment: expected {self.name}, found {brief(named, 80)}"
            )
        body = {} if what == "splits" else await _body(request)
        split = body.get("split", SPLIT)
        if not isinstance(split, str):
            raise SessionRefused("VALIDATION_ERROR", f"expected split as text, found {brief(split, 80)}")
        bounds = [body.get(key) for key in ("index", "start", "stop")]
        if not all(bound is None or (isinstance(bound, int) and not isinstance(bound, bool)) for bound in bounds):
            raise SessionRefused(
                "VALIDATION_ERROR", f"expected index, start and stop as integers, found {brief(bounds, 80)}"
            )
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
                raise SessionRefused("VALIDATION_ERROR", "expected an index, found none")
            if not 0 <= index < len(found):
                raise IndexError(f"expected an index from 0 to {len(found) - 1}, found {index}")
            return {"task": row(found[index], index)}
        places = range(len(found))[slice(start, stop)][:MOST_ROWS]
        listed = {"tasks": [row(found[place], place) for place in places]}
        return listed if what == "task_range" else {**listed, "env_name": self.name}


async def _read(request: Request) -> bytes:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > LARGEST:
            raise SessionRefused("VALIDATION_ERROR", f"expected a body of at most {LARGEST:,} bytes, found more")
    return data


async def _body(request: Request) -> dict[str, Any]:
    data = await _read(request)
    body = parsed(data) if data.strip() else {}
    if not isinstance(body, dict):
        raise SessionRefused("VALIDATION_ERROR", f"expected an object as the body, found {brief(body, 80)}")
    return body
