"""E2B's control plane: the requests with which clients make, list, pause, fork and end sandboxes.

Errors are ``{"code": STATUS, "message": TEXT}``. A request that asks for what this server cannot do (volumes, identity,
network rules) is refused, rather than done without.
"""

from __future__ import annotations

import json
import math
import os
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sandboxgym.brief import brief
from sandboxgym.e2b.connect import ServiceError, body_of
from sandboxgym.e2b.quotas import RequestRefused
from sandboxgym.e2b.service import ClientSnapshot, LiveSandbox, Service, Tenant
from sandboxgym.sandbox.overlay.backend import OverlayBackend

ENVD_VERSION = "0.6.0"
"""Version of envd whose methods are served; clients choose what they may send by it."""
LARGEST_BODY = 2**20
"""Bytes of a request."""
_PAGE = 100
_DEFAULT_SECONDS = 300


class Given:
    """The JSON object of a request, read field by field."""

    def __init__(self, data: bytes) -> None:
        try:
            value = json.loads(data or b"{}")
        except (ValueError, RecursionError) as error:
            raise RequestRefused(400, f"expected JSON, found {brief(data, 80)}") from error
        if not isinstance(value, dict):
            raise RequestRefused(400, f"expected a JSON object, found {brief(value, 80)}")
        self._fields = value

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of a type, or the default."""
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise RequestRefused(400, f"{name}: expected {kind.__name__}, found {brief(value, 80)}")
        if isinstance(value, str) and "\0" in value:
            raise RequestRefused(400, f"{name}: expected text without null characters")
        return value

    def texts(self, name: str) -> dict[str, str]:
        """A field with texts by name."""
        value: dict[str, Any] = self.get(name, dict, {})
        for key, text in value.items():
            if not isinstance(text, str) or "\0" in key + text:
                raise RequestRefused(400, f"{name}.{brief(key, 40)}: expected text, found {brief(text, 80)}")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RequestRefused(400, f"{name}: expected text, found half of a surrogate pair") from error
        return value

    def none_of(self, names: Mapping[str, str]) -> None:
        """Refuse fields that ask for what is not done here."""
        for name, what in names.items():
            if self._fields.get(name):
                raise RequestRefused(400, f"{name}: {what} are not supported by this server")


Handler = Callable[[Request, Service, Tenant], Awaitable[Response]]


async def _given(request: Request) -> Given:
    try:
        return Given(await body_of(request, LARGEST_BODY))
    except ServiceError as error:
        raise RequestRefused(413, str(error)) from error


def _box(request: Request, service: Service, tenant: Tenant) -> LiveSandbox:
    return service.find(tenant, request.path_params["name"])


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _handle(box: LiveSandbox) -> dict[str, Any]:
    return {
        "templateID": box.template,
        "sandboxID": box.id,
        "clientID": "sandboxgym",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": box.token,
    }


def _listed(box: LiveSandbox, service: Service) -> dict[str, Any]:
    limits = service.limits
    return {
        "templateID": box.template,
        "sandboxID": box.id,
        "clientID": "sandboxgym",
        "startedAt": _time(box.started),
        "endAt": _time(box.ends),
        "cpuCount": os.cpu_count() or 1,
        "memoryMB": (limits.memory or 0) >> 20,
        "diskSizeMB": (limits.disk or 0) >> 20,
        "state": box.state,
        "envdVersion": ENVD_VERSION,
        "metadata": dict(box.metadata),
    }


def _detail(box: LiveSandbox, service: Service) -> dict[str, Any]:
    detail = {
        **_listed(box, service),
        "envdAccessToken": box.token,
        "allowInternetAccess": service.network,
        "lifecycle": {"autoResume": box.resumes, "onTimeout": "pause" if box.pauses else "kill"},
    }
    if box.paused is not None:
        detail["pauseMode"] = "full" if box.paused.full else "filesystem"
    return detail


def _lost(lost: tuple[str, ...]) -> dict[str, str]:
    """Header that tells what is missing in a copy."""
    if not lost:
        return {}
    text = brief("; ".join(lost), 400).encode("ascii", "backslashreplace").decode()
    return {"x-sandboxgym-lost": "".join(letter if letter.isprintable() else "?" for letter in text)}


async def create(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``POST /sandboxes``, ``POST /v2/sandboxes``."""
    given = await _given(request)
    given.none_of({"volumeMounts": "volumes", "iam": "identities", "mcp": "MCP gateways", "network": "network rules"})
    # True is what some versions of the library always send: it permits what need not be there.
    if given.get("allow_internet_access", bool) is False and service.network:
        raise RequestRefused(
            400, "allow_internet_access: the sandboxes of this server have this machine's network, found False"
        )
    resume = given.get("autoResume", dict, {}).get("enabled") is True
    box = await service.create(
        tenant,
        given.get("templateID", str, "base"),
        seconds=given.get("timeout", int, _DEFAULT_SECONDS),
        metadata=given.texts("metadata"),
        envs=given.texts("envVars"),
        pauses=given.get("autoPause", bool, False),
        pauses_fully=given.get("autoPauseMemory", bool),
        resumes=resume,
        once=request.headers.get("idempotency-key"),
    )
    return JSONResponse(_handle(box), 201)


async def list_sandboxes(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``GET /sandboxes``, ``GET /v2/sandboxes``."""
    query = request.query_params
    states = query.get("state", "running,paused" if request.url.path.startswith("/v2") else "running").split(",")
    wanted = set(urllib.parse.parse_qsl(query.get("metadata", "")))
    after = _moment(query.get("startedAfter"))
    boxes = [
        box
        for box in tenant.boxes.values()
        if box.state in states
        and wanted <= set(box.metadata.items())
        and box.started > after
        and query.get("template", box.template) == box.template
    ]
    boxes.sort(key=lambda box: box.started, reverse=query.get("order", "desc") != "asc")
    return _page(request, [_listed(box, service) for box in boxes])


def _moment(text: str | None) -> float:
    if not text:
        return -math.inf
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except (ValueError, OverflowError) as error:
        raise RequestRefused(400, f"startedAfter: expected a time, found {brief(text, 80)}") from error


def _page(request: Request, items: list[dict[str, Any]]) -> Response:
    limit, token = (request.query_params.get(name) for name in ("limit", "nextToken"))
    for name, text in (("limit", limit), ("nextToken", token)):
        if text is not None and not (text.isascii() and text.isdecimal() and len(text) < 9):
            raise RequestRefused(400, f"{name}: expected a number, found {brief(text, 40)}")
    start, size = int(token or 0), min(int(limit or _PAGE), _PAGE) or _PAGE
    headers = {"x-next-token": str(start + size)} if len(items) > start + size else {}
    return JSONResponse(items[start : start + size], headers=headers)


async def detail(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``GET /sandboxes/ID``."""
    return JSONResponse(_detail(_box(request, service, tenant), service))


async def kill(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``DELETE /sandboxes/ID``."""
    await service.kill(_box(request, service, tenant))
    return Response(status_code=204)


async def set_timeout(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``POST /sandboxes/ID/timeout``: its deadline, counted from now."""
    box = _box(request, service, tenant)
    seconds = (await _given(request)).get("timeout", int)
    if seconds is None:
        raise RequestRefused(400, "timeout: expected a number of seconds, found none")
    service.check_seconds(seconds)
    if box.paused is not None:
        raise RequestRefused(404, f"sandbox {box.id} is paused")
    service.set_deadline(box, seconds)
    return Response(status_code=204)


async def refresh(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``POST /sandboxes/ID/refreshes``: a later deadline."""
    box = _box(request, service, tenant)
    seconds = (await _given(request)).get("duration", int, 60)
    service.check_seconds(seconds)
    if box.paused is None:
        service.extend(box, seconds)
    return Response(status_code=204)


async def pause(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``POST /sandboxes/ID/pause``."""
    box = _box(request, service, tenant)
    given = await _given(request)
    if box.paused is not None:
        raise RequestRefused(409, f"sandbox {box.id} is paused already")
    snap = await service.pause(box, fully=given.get("memory", bool))
    return Response(status_code=204, headers=_lost(snap.lost))


async def connect(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``POST /sandboxes/ID/connect``, also of version 2, and ``POST /sandboxes/ID/resume``."""
    box = _box(request, service, tenant)
    given = await _given(request)
    if request.url.path.endswith("/resume") and box.paused is None:
        raise RequestRefused(409, f"sandbox {box.id} is running already")
    seconds = given.get("timeout", int, _DEFAULT_SECONDS)
    was_paused = await service.resume(box, seconds, files_only=given.get("memory", bool) is False)
    return JSONResponse(_handle(box), 201 if was_paused else 200)


async def fork(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``POST /sandboxes/ID/fork``: one result per copy, a sandbox or an error."""
    box = _box(request, service, tenant)
    given = await _given(request)
    made, lost = await service.fork(box, given.get("count", int, 1), given.get("timeout", int, _DEFAULT_SECONDS))
    results = [{"sandbox": _handle(one)} if isinstance(one, LiveSandbox) else {"error": _error(one)} for one in made]
    return JSONResponse(results, 201, headers=_lost(lost))


def _error(error: Exception) -> dict[str, Any]:
    status = error.status if isinstance(error, RequestRefused) else 500
    return {"code": status, "message": str(error)}


async def snapshot(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``POST /sandboxes/ID/snapshots``."""
    box = _box(request, service, tenant)
    given = await _given(request)
    name = given.get("name", str)
    if name is not None and not (0 < len(name) <= 128 and name.replace("-", "").replace("_", "").isalnum()):
        raise RequestRefused(400, f"name: expected letters, digits, hyphens and underscores, found {brief(name, 80)}")
    kept = await service.snapshot(box, name, fully=given.get("memory", bool))
    return JSONResponse(_info(kept), 201, headers=_lost(kept.snap.lost))


def _info(kept: ClientSnapshot) -> dict[str, Any]:
    return {"snapshotID": kept.id, "names": kept.names}


async def list_snapshots(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``GET /snapshots``."""
    box, name = request.query_params.get("sandboxID"), request.query_params.get("name")
    found = [
        kept
        for kept in tenant.kept.values()
        if (box is None or kept.box == box) and (name is None or name in kept.names)
    ]
    return _page(request, [_info(kept) for kept in found])


async def delete_template(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``DELETE /templates/ID``, by which clients delete snapshots."""
    service.forget(tenant, request.path_params["name"])
    return Response(status_code=204)


async def metrics(request: Request, service: Service, tenant: Tenant) -> Response:
    """Answer ``GET /sandboxes/ID/metrics``: memory now, where it is counted; no history, and no share of processors."""
    box = _box(request, service, tenant)
    backend = None if box.sandbox is None else box.sandbox.backend
    container = backend.container if isinstance(backend, OverlayBackend) else None
    used = container.group.memory() if container is not None and container.group else None
    if used is None:
        return JSONResponse([])
    now, limits = time.time(), service.limits
    sample = {
        "timestamp": _time(now),
        "timestampUnix": int(now),
        "cpuCount": os.cpu_count() or 1,
        "cpuUsedPct": 0.0,
        "memUsed": used,
        "memTotal": limits.memory or 0,
        "memCache": 0,
        "diskUsed": 0,
        "diskTotal": limits.disk or 0,
    }
    return JSONResponse([sample])


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/sandboxes", create),
    ("POST", "/v2/sandboxes", create),
    ("GET", "/sandboxes", list_sandboxes),
    ("GET", "/v2/sandboxes", list_sandboxes),
    ("GET", "/sandboxes/{name}", detail),
    ("DELETE", "/sandboxes/{name}", kill),
    ("POST", "/sandboxes/{name}/timeout", set_timeout),
    ("POST", "/sandboxes/{name}/refreshes", refresh),
    ("POST", "/sandboxes/{name}/pause", pause),
    ("POST", "/sandboxes/{name}/resume", connect),
    ("POST", "/sandboxes/{name}/connect", connect),
    ("POST", "/v2/sandboxes/{name}/connect", connect),
    ("POST", "/sandboxes/{name}/fork", fork),
    ("POST", "/sandboxes/{name}/snapshots", snapshot),
    ("GET", "/sandboxes/{name}/metrics", metrics),
    ("GET", "/snapshots", list_snapshots),
    ("DELETE", "/templates/{name}", delete_template),
)
"""Method, path and handler of every request."""
