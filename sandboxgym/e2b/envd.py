"""Services of the daemon of one sandbox, envd, for E2B's clients: processes, the file system, uploads and downloads.

A request names its sandbox in the header ``E2b-Sandbox-Id``, or as ``PORT-ID`` in the host name, or by its token alone;
and proves by the token, or by a signature made with it, that it may.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import posixpath
import re
import secrets
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from sandboxgym.brief import brief
from sandboxgym.e2b import file_system
from sandboxgym.e2b.commands import Command, end_input, signal, start
from sandboxgym.e2b.connect import LONGEST_STREAM, ServiceCall, ServiceError, ServiceMethod, body_of, chunks_of, serve
from sandboxgym.e2b.messages import Message
from sandboxgym.e2b.quotas import RequestRefused
from sandboxgym.e2b.service import LiveSandbox, Service, refusal
from sandboxgym.sandbox.base import FileTooLarge, SandboxError, SandboxFull
from sandboxgym.sandbox.sandbox import Sandbox

log = logging.getLogger("sandboxgym")

PORT = 49983
"""Port of the daemon in a sandbox; no other can be reached."""
LARGEST_FILE = 64 * 2**20
"""Bytes of a file that is read or written by one request."""
MOST_WATCHERS = 32
"""Watchers of one sandbox at one time."""
_HOST = re.compile(r"(\d{1,5})-([a-z0-9]{1,40})\.")
_LOOKS = 0.5  # seconds between two looks of a streamed watch
_STARTING = 20.0
_ENDING = 2.0


def name_of(request: Request, service: Service) -> tuple[str, int] | None:
    """The sandbox and port that a request is for; None if it is for the control plane.

    Some versions of the library send the header to the control plane, too.
    """
    name = request.headers.get("e2b-sandbox-id")
    if name is not None and not request.url.path.startswith(("/sandboxes", "/v2/", "/snapshots", "/templates")):
        port = request.headers.get("e2b-sandbox-port", str(PORT))
        return name, int(port) if port.isdecimal() and len(port) < 6 else -1
    if match := _HOST.match(request.headers.get("host", "")):
        return match[2], int(match[1])
    # A handle of `Sandbox.connect` of older versions expects the host name to do.
    name = service.name_by_token(request.headers.get("x-access-token", ""))
    return None if name is None else (name, PORT)


STREAM_INPUT = "/process.Process/StreamInput"
"""Path of the one method whose request continues for as long as the client has input."""


async def answer(request: Request, service: Service, name: str, port: int) -> Response:
    """Answer one request for a sandbox."""
    try:
        return await _answer(request, service, name, port)
    except ClientDisconnect:
        return Response(status_code=499)
    except Exception as error:  # of any type: the client gets it as JSON
        return _refused(error, name)


def _refused(error: Exception, name: str) -> Response:
    refused = refusal(error)
    return _plain(502 if refused.status == 404 else refused.status, f"{refused}", sandboxId=name)


async def _answer(request: Request, service: Service, name: str, port: int) -> Response:
    try:
        box = service.find(None, name)
        if (box.paused is not None and not box.resumes) or await service.has_ended(box):
            raise RequestRefused(404, f"sandbox {name} does not run")
    except RequestRefused:
        return _plain(502, f"The sandbox {brief(name, 60)} was not found", sandboxId=name)
    if port != PORT:
        return _plain(502, f"The sandbox is running but the port is not open: only {PORT} is served", sandboxId=name)
    path = request.url.path
    if path == "/health":
        return Response(status_code=204)
    if path == "/files" and "signature" in request.query_params:
        if not _signed(box, request.query_params, "write" if request.method == "POST" else "read"):
            return _plain(401, "the signature is not that of this path, operation and user, or has expired")
    else:
        given = request.headers.get("x-access-token", "")
        if not secrets.compare_digest(given.encode(), box.token.encode()):
            return _plain(
                401, "expected the sandbox's access token in the header X-Access-Token, found none or another"
            )
    try:
        if box.paused is not None:
            async with service.using(box, resume=True):
                pass
        if path == "/files" and request.method in ("GET", "POST"):
            return _Transfer(request, service, box)
    except RequestRefused as error:
        return _unavailable(error)
    method = _Session(service, box, request).methods().get(path)
    if method is None or request.method != "POST":
        return _plain(404, f"{request.method} {brief(path, 80)} is not served")
    return await serve(request, method)


def _unavailable(error: RequestRefused) -> Response:
    return _plain(502 if error.status == 404 else error.status, f"{error}: the sandbox was not found")


def _plain(status: int, message: str, **more: Any) -> Response:
    return JSONResponse({"code": status, "message": message, **more}, status)


class _Session:
    """The methods of a sandbox's daemon, for one request."""

    def __init__(self, service: Service, box: LiveSandbox, request: Request) -> None:
        self.service, self.box = service, box
        self.user = _user_of(request)

    def methods(self) -> dict[str, ServiceMethod]:
        """All methods, by path."""
        process = {
            "List": ServiceMethod("Empty", "ListResponse", self.list),
            "Start": ServiceMethod("StartRequest", "StartResponse", stream=self.start),
            "Connect": ServiceMethod("ConnectRequest", "StartResponse", stream=self.connect),
            "Update": ServiceMethod("UpdateRequest", "Empty", self.update),
            "SendInput": ServiceMethod("SendInputRequest", "Empty", self.send_input, waits=True),
            "StreamInput": ServiceMethod("StreamInputRequest", "Empty", self.stream_input, client_streams=True),
            "SendSignal": ServiceMethod("SendSignalRequest", "Empty", self.send_signal),
            "CloseStdin": ServiceMethod("CloseStdinRequest", "Empty", self.close_input),
        }
        filesystem = {
            "Stat": ServiceMethod("PathRequest", "EntryResponse", self.stat),
            "ListDir": ServiceMethod("ListDirRequest", "ListDirResponse", self.list_directory),
            "MakeDir": ServiceMethod("PathRequest", "EntryResponse", self.make_directory),
            "Move": ServiceMethod("MoveRequest", "EntryResponse", self.move),
            "Remove": ServiceMethod("PathRequest", "Empty", self.remove),
            "CreateWatcher": ServiceMethod("WatchRequest", "WatcherResponse", self.create_watcher),
            "GetWatcherEvents": ServiceMethod("WatcherRequest", "WatcherEvents", self.watcher_events),
            "RemoveWatcher": ServiceMethod("WatcherRequest", "Empty", self.remove_watcher),
            "WatchDir": ServiceMethod("WatchRequest", "WatchDirResponse", stream=self.watch),
        }
        return {
            **{f"/process.Process/{name}": method for name, method in process.items()},
            **{f"/filesystem.Filesystem/{name}": method for name, method in filesystem.items()},
        }

    async def _use(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Call a function with the sandbox."""
        try:
            async with self.service.using(self.box) as sandbox:
                return await self.service.work(function, sandbox, *arguments, **options)
        except RequestRefused as error:
            raise _failure(error) from error

    # Processes

    async def list(self, call: ServiceCall) -> Message:
        """List all running commands."""
        return {"processes": self.box.commands.infos()}

    async def start(self, call: ServiceCall) -> AsyncIterator[Message]:
        """Start a command and stream its events; it is killed when the client's time limit is over."""
        message = call.message
        if "pty" in message:
            raise ServiceError("unimplemented", "terminals are not served: start the command without pty")
        config = message.get("process", {})
        home = file_system.home_of(self.user)
        env = {
            "USER": posixpath.basename(home),
            "LOGNAME": posixpath.basename(home),
            "E2B_SANDBOX": "true",
            "E2B_SANDBOX_ID": self.box.id,
            **self.box.envs,
        }
        try:
            async with self.service.using(self.box) as sandbox:
                commands = self.box.commands
                command = commands.new(config, tag=message.get("tag"), takes_input=message.get("stdin", True))
                client = commands.join(command)
                stale, commands.stale = commands.stale, []
                try:
                    await self.service.work(start, sandbox, command, home=home, env=env, stale=stale)
                    commands.listen()
                    async with asyncio.timeout(_STARTING):
                        await command.started.wait()
                except BaseException as error:  # a call that is cancelled, too: its command must not stay listed
                    commands.end(command, None)
                    if isinstance(error, TimeoutError):
                        raise ServiceError("unavailable", "the command did not start in time") from error
                    raise
        except RequestRefused as error:
            raise _failure(error) from error
        if call.seconds is not None and not command.ended.is_set():
            ending = asyncio.get_running_loop().create_task(self._end_late(command, call.seconds))
            _TASKS.add(ending)
            ending.add_done_callback(_TASKS.discard)
        async for event in self._events(call, command, client):
            yield event

    async def _end_late(self, command: Command, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await command.ended.wait()
        except TimeoutError:
            try:
                await self._use(signal, command.pid, 9)
            except ServiceError as error:
                log.info("a command was not killed at its time limit: %s", error)

    async def connect(self, call: ServiceCall) -> AsyncIterator[Message]:
        """Stream the events of a running command from now on."""
        command = self.box.commands.find(call.message.get("process"))
        async for event in self._events(call, command, self.box.commands.join(command)):
            yield event

    async def _events(
        self, call: ServiceCall, command: Command, client: asyncio.Queue[Message]
    ) -> AsyncIterator[Message]:
        commands = self.box.commands
        try:
            async with asyncio.timeout(LONGEST_STREAM if call.seconds is None else call.seconds):
                async for event in commands.events(command, client, keepalive=call.keepalive):
                    yield {"event": event}
        except TimeoutError as error:
            raise ServiceError("deadline_exceeded", "the time limit of the stream is over") from error
        finally:
            commands.leave(command, client)

    async def update(self, call: ServiceCall) -> Message:
        """Refuse to change a terminal's size: there are none."""
        raise ServiceError("unimplemented", "terminals are not served")

    async def _write(self, command: Command, given: Message | None) -> None:
        given = given or {}
        if "pty" in given:
            raise ServiceError("unimplemented", "terminals are not served")
        await self.box.commands.write(command, base64.b64decode(given.get("stdin", "")))

    async def send_input(self, call: ServiceCall) -> Message:
        """Write to a command's input."""
        command = self.box.commands.find(call.message.get("process"))
        await self._write(command, call.message.get("input"))
        return {}

    async def stream_input(self, call: ServiceCall) -> Message:
        """Write a stream of messages to a command's input."""
        if "start" not in call.message:
            raise ServiceError("invalid_argument", "expected the start of the stream first")
        command = self.box.commands.find(call.message["start"].get("process"))
        async for message in call.rest:
            if "data" in message:
                await self._write(command, message["data"].get("input"))
        return {}

    async def send_signal(self, call: ServiceCall) -> Message:
        """Send SIGTERM or SIGKILL to a command with its process group."""
        command = self.box.commands.find(call.message.get("process"))
        numbers = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}
        number = numbers.get(call.message.get("signal", ""))
        if number is None:
            raise ServiceError("invalid_argument", f"signal: expected {' or '.join(numbers)}, found none")
        await self._use(signal, command.pid, number)
        if number == 9:  # which nothing survives: whoever asks next shall not find it
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING):
                    await command.ended.wait()
        return {}

    async def close_input(self, call: ServiceCall) -> Message:
        """End a command's input."""
        command = self.box.commands.find(call.message.get("process"))
        if not command.holder:
            raise ServiceError("failed_precondition", "the command was started without stdin")
        holder, command.holder = command.holder, 0
        await self._use(end_input, holder)
        return {}

    # The file system

    def _path(self, call: ServiceCall, name: str = "path") -> str:
        return file_system.inside(call.message.get(name), self.user)

    async def stat(self, call: ServiceCall) -> Message:
        """Describe one entry of the file system."""
        return {"entry": await self._use(file_system.entry, self._path(call))}

    async def list_directory(self, call: ServiceCall) -> Message:
        """List the entries of a directory."""
        return {"entries": await self._use(file_system.entries, self._path(call), call.message.get("depth", 1))}

    async def make_directory(self, call: ServiceCall) -> Message:
        """Make a directory."""
        return {"entry": await self._use(file_system.make_directory, self._path(call))}

    async def move(self, call: ServiceCall) -> Message:
        """Rename an entry."""
        return {"entry": await self._use(file_system.move, self._path(call, "source"), self._path(call, "destination"))}

    async def remove(self, call: ServiceCall) -> Message:
        """Remove an entry."""
        await self._use(file_system.remove, self._path(call))
        return {}

    async def create_watcher(self, call: ServiceCall) -> Message:
        """Remember what a directory contains."""
        if len(self.box.watchers) >= MOST_WATCHERS:
            raise ServiceError("resource_exhausted", f"expected at most {MOST_WATCHERS} watchers")
        path, recursive = self._path(call), call.message.get("recursive", False)
        found = await self._use(file_system.listing, path, recursive=recursive)
        name = secrets.token_hex(8)
        self.box.watchers[name] = (path, recursive, found)
        return {"watcherId": name}

    def _watcher(self, call: ServiceCall) -> str:
        name = str(call.message.get("watcherId", ""))
        if name not in self.box.watchers:
            raise ServiceError("not_found", f"watcher {brief(name, 40)} not found")
        return name

    async def watcher_events(self, call: ServiceCall) -> Message:
        """Changes in a directory since it was asked last."""
        name = self._watcher(call)
        path, recursive, before = self.box.watchers[name]
        after = await self._use(file_system.listing, path, recursive=recursive)
        if name in self.box.watchers:
            self.box.watchers[name] = (path, recursive, after)
        return {"events": file_system.changes(before, after)}

    async def remove_watcher(self, call: ServiceCall) -> Message:
        """Forget a watcher."""
        self.box.watchers.pop(self._watcher(call), None)
        return {}

    async def watch(self, call: ServiceCall) -> AsyncIterator[Message]:
        """Stream what changes in a directory."""
        path, recursive = self._path(call), call.message.get("recursive", False)
        before = await self._use(file_system.listing, path, recursive=recursive)
        yield {"start": {}}
        end = time.monotonic() + (LONGEST_STREAM if call.seconds is None else call.seconds)
        quiet = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(_LOOKS)
            after = await self._use(file_system.listing, path, recursive=recursive)
            for event in file_system.changes(before, after):
                yield {"filesystem": event}
                quiet = time.monotonic()
            before = after
            if time.monotonic() - quiet > call.keepalive:
                yield {"keepalive": {}}
                quiet = time.monotonic()
        raise ServiceError("deadline_exceeded", "the time limit of the stream is over")


_TASKS: set[asyncio.Task[None]] = set()
"""Time limits of running commands, held until they are over."""


def _failure(error: RequestRefused) -> ServiceError:
    """A refusal of the service as the error of a call."""
    if error.status == 404:
        return ServiceError("unavailable", f"{error}: the sandbox was not found")
    codes = {400: "invalid_argument", 409: "failed_precondition", 429: "resource_exhausted", 507: "resource_exhausted"}
    return ServiceError(codes.get(error.status, "internal"), str(error))


def _user_of(request: Request) -> str | None:
    """User of a request: Basic authorisation with a name and no password, as clients send it."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[0]
    except ValueError:
        return value  # which nobody is called


# Uploads and downloads


class _Transfer(Response):
    """The answer to an upload or download, which is in memory until it is sent: few at one time, see `Tenant`."""

    def __init__(self, request: Request, service: Service, box: LiveSandbox) -> None:
        super().__init__()
        self._request, self._service, self._box = request, service, box

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._box.tenant.transfers:
            try:
                response = await _files(self._request, self._service, self._box)
            except ClientDisconnect:
                response = Response(status_code=499)
            except RequestRefused as error:
                response = _unavailable(error)
            except Exception as error:  # of any type: the client gets it as JSON
                response = _refused(error, self._box.id)
            await response(scope, receive, send)


async def _files(request: Request, service: Service, box: LiveSandbox) -> Response:
    query = request.query_params
    user = query.get("username")
    writes = request.method == "POST"
    try:
        if writes:
            return JSONResponse([_info(path) for path in await _upload(request, service, box, user)])
        path = file_system.inside(query.get("path"), user)
        async with service.using(box) as sandbox:
            data = await service.work(_read, sandbox, path)
        return Response(data, media_type="application/octet-stream")
    except ServiceError as error:
        status = {"invalid_argument": 400, "not_found": 404, "resource_exhausted": 413, "unauthenticated": 401}
        return _plain(status.get(error.code, 500), str(error))
    except HTTPException as error:  # of the parser of forms
        return _plain(400, str(error.detail))
    except SandboxError as error:
        return _plain(507 if isinstance(error, SandboxFull) else 500, str(refusal(error)))


def _info(path: str) -> dict[str, str]:
    return {"name": posixpath.basename(path), "type": "file", "path": path}


def _signed(box: LiveSandbox, query: Any, operation: str) -> bool:
    """True if a request has the signature of E2B's version 1 for what it asks."""
    expires = query.get("signature_expiration")
    if expires is not None and not (expires.isdecimal() and len(expires) < 12 and int(expires) > time.time()):
        return False
    parts = [query.get("path", ""), operation, query.get("username", ""), box.token]
    parts += [] if expires is None else [expires]
    digest = hashlib.sha256(":".join(parts).encode()).digest()
    expected = "v1_" + base64.b64encode(digest).rstrip(b"=").decode()
    return secrets.compare_digest(expected.encode(), query["signature"].encode())


def _read(sandbox: Sandbox, path: str) -> bytes:
    try:
        return sandbox.read_file(path, limit=LARGEST_FILE)
    except FileTooLarge as error:
        raise ServiceError("resource_exhausted", str(error)) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ServiceError("not_found", f"path not found: {brief(path, 300)}") from error
    except IsADirectoryError as error:
        raise ServiceError("invalid_argument", f"path is a directory: {brief(path, 300)}") from error
    except (OSError, ValueError) as error:
        raise ServiceError(
            "invalid_argument", f"{error.args[-1] if error.args else error}: {brief(path, 300)}"
        ) from error


def _write(sandbox: Sandbox, path: str, data: bytes) -> None:
    try:
        sandbox.write_file(path, data)
    except IsADirectoryError as error:
        raise ServiceError("invalid_argument", f"path is a directory: {brief(path, 300)}") from error
    except (OSError, ValueError) as error:
        text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ServiceError("invalid_argument", f"{text}: {brief(path, 300)}") from error


async def _upload(request: Request, service: Service, box: LiveSandbox, user: str | None) -> list[str]:
    """Write the files of a request; returns their paths."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    path = request.query_params.get("path")
    if kind == "multipart/form-data":
        found = await _form(request, path)
    elif kind == "application/octet-stream":
        if not path:
            raise ServiceError("invalid_argument", "path: expected the path of the file, found none")
        data = await body_of(request, LARGEST_FILE)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "gzip":
            data = _unzipped(data)
        elif encoding != "identity":
            raise ServiceError("invalid_argument", f"Content-Encoding: expected gzip, found {brief(encoding, 40)}")
        found = [(path, data)]
    else:
        raise ServiceError("invalid_argument", f"Content-Type: expected multipart/form-data, found {brief(kind, 80)}")
    paths = [file_system.inside(name, user) for name, _ in found]
    async with service.using(box) as sandbox:
        for name, (_, data) in zip(paths, found, strict=True):
            await service.work(_write, sandbox, name, data)
    return paths


def _unzipped(data: bytes) -> bytes:
    unzip = zlib.decompressobj(wbits=31)
    try:
        plain = unzip.decompress(data, LARGEST_FILE + 1)
    except zlib.error as error:
        raise ServiceError("invalid_argument", f"expected gzip, found {brief(data, 40)}") from error
    if len(plain) > LARGEST_FILE:
        raise ServiceError("resource_exhausted", f"expected at most {LARGEST_FILE:,} bytes, found more")
    if not unzip.eof:
        raise ServiceError("invalid_argument", "expected gzip, found the beginning of it")
    return plain


async def _form(request: Request, path: str | None) -> list[tuple[str, bytes]]:
    """Names and contents of the files of a form."""
    from starlette.datastructures import UploadFile
    from starlette.formparsers import MultiPartException, MultiPartParser

    async def bounded() -> AsyncIterator[bytes]:
        left = LARGEST_FILE
        async for chunk in chunks_of(request):
            left -= len(chunk)
            if left < 0:
                raise ServiceError(
                    "resource_exhausted", f"expected a body of at most {LARGEST_FILE:,} bytes, found more"
                )
            yield chunk

    try:
        form = await MultiPartParser(request.headers, bounded(), max_files=1000, max_fields=0).parse()  # type: ignore[arg-type]
    except MultiPartException as error:
        raise ServiceError("invalid_argument", error.message) from error
    try:
        uploads = [one for _, one in form.multi_items() if isinstance(one, UploadFile)]
        if not uploads:
            raise ServiceError("invalid_argument", "expected a file in the form, found none")
        if path and len(uploads) > 1:
            raise ServiceError("invalid_argument", "expected one file for the path, found several")
        return [(path or one.filename or "", await one.read()) for one in uploads]
    finally:
        await form.close()
