"""A sandbox with snapshots and forks as the tools of a server of the Model Context Protocol.

``sandboxgym serve mcp`` starts it; `run_stdio` and `run_http` do in a program. Needs ``pip install "sandboxgym[mcp]"``.

1. Each server has one set of branches of its own, see `sandboxgym.adapters.branches`; it ends with the server.
2. Arguments are checked against the schemas that clients are shown, and unknown ones are refused.
3. Whatever goes wrong in a call is a result with ``isError`` and a message in words; the server continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandboxgym import __version__
from sandboxgym.adapters.branches import (
    LARGEST_FILE,
    LARGEST_TREE,
    MAIN,
    MOST_PATHS,
    NAME,
    Answer,
    Branches,
)
from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotError
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.system.refusals import tell
from sandboxgym.system.serving import serve

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

log = logging.getLogger("sandboxgym")

LONGEST_TEXT = 200_000
"""Characters of a command."""
LARGEST_REQUEST = 4 * 2**20
"""Bytes of a request by HTTP."""
_LAST_WORDS = 0.2
"""Seconds in which clients get the answers to calls that the end of the server ended."""
INSTRUCTIONS = """\
A Linux sandbox of your own, with an undo that covers everything in it. It has branches: independent copies of the \
sandbox, each with its own files and its own shell, of which "main" is there from the start. Every tool takes the name \
of the branch it acts on; you switch branches by naming another one, and there is no current branch besides. Take a \
snapshot before a risky step, restore it if the step fails; fork into branches to try several ways from one state, \
compare them with diff, and continue in the best. All of it is gone when the connection ends."""

Schema = Mapping[str, Any]
_NAME: Schema = {"type": "string", "pattern": f"^{NAME}$"}
_NAMES: Schema = {"type": "array", "items": _NAME, "minItems": 1, "maxItems": 64}
_BRANCH: Schema = {**_NAME, "default": MAIN, "description": "the branch to act on"}
_PATH: Schema = {"type": "string", "minLength": 1, "maxLength": 4096, "description": "absolute, inside the sandbox"}
_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_COUNT: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_TRUTH: Schema = {"type": "boolean"}
_LOST: Schema = {**_TEXTS, "description": "what the snapshot does not hold, above all running processes"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: what clients are shown of it, and what it does."""

    name: str
    about: str
    takes: Mapping[str, Schema]
    gives: Mapping[str, Schema]
    call: Callable[[Branches, Mapping[str, Any]], Future[Answer] | Answer]
    required: tuple[str, ...] = ()
    reads_only: bool = False
    destroys: bool = False

    def arguments(self, branches: Branches) -> dict[str, Any]:
        """JSON schema of the arguments."""
        takes = dict(self.takes)
        if "timeout" in takes:
            takes["timeout"] = {**takes["timeout"], "maximum": branches.longest}
        return _object(takes, self.required)

    def result(self) -> dict[str, Any]:
        """JSON schema of the result."""
        return _object(self.gives, tuple(self.gives))


def _object(properties: Mapping[str, Schema], required: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: dict(schema) for name, schema in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }


TOOLS = (
    Tool(
        "execute",
        "Run a bash command in the persistent shell of a branch: its directory, variables and functions stay for the "
        "next command. Output is standard output and standard error together; the middle of a long one is left out "
        "(omitted_bytes). A command that exceeds the timeout is killed with all it started, and has exit code 124. "
        "There is nobody to answer prompts. Calls on one branch run one after the other.",
        {
            "command": {"type": "string", "maxLength": LONGEST_TEXT, "description": "bash, in any number of lines"},
            "branch": _BRANCH,
            "timeout": {"type": "number", "minimum": 0.1, "description": "seconds; the maximum by default"},
        },
        {
            "branch": _TEXT,
            "exit_code": _COUNT,
            "output": _TEXT,
            "seconds": _NUMBER,
            "timed_out": _TRUTH,
            "omitted_bytes": _COUNT,
            "shell_replaced": {**_TRUTH, "description": "the shell ended; a new one has the last known state"},
        },
        lambda branches, given: branches.execute(given["branch"], given["command"], seconds=given.get("timeout")),
        required=("command",),
        destroys=True,
    ),
    Tool(
        "snapshot",
        "Keep the present state of a branch: all of its files, and its shell's directory, variables and functions. "
        "Nothing is disturbed. Running processes are not kept; `lost` names them.",
        {
            "branch": _BRANCH,
            "name": {**_NAME, "description": "of the snapshot; by default s1, s2, …"},
        },
        {"snapshot": _TEXT, "branch": _TEXT, "lost": _LOST},
        lambda branches, given: branches.snapshot(given["branch"], given.get("name", "")),
    ),
    Tool(
        "restore",
        "Put a branch back into the state of a snapshot, which may be of another branch: files and shell are exactly "
        "as they were, what was done since is gone, and running processes are ended. The snapshot stays.",
        {"snapshot": _NAME, "branch": _BRANCH},
        {"branch": _TEXT, "snapshot": _TEXT, "lost": _LOST},
        lambda branches, given: branches.restore(given["branch"], given["snapshot"]),
        required=("snapshot",),
        destroys=True,
    ),
    Tool(
        "fork",
        "Make one or more new branches which continue from a branch as it is now, or from a snapshot. They are "
        "independent of it and of each other; act on them by passing their names as `branch`. All are made, or none.",
        {
            "into": {**_NAMES, "description": "names of the new branches"},
            "source": {**_NAME, "default": MAIN, "description": "a branch or a snapshot"},
        },
        {"branches": _TEXTS, "source": _TEXT, "lost": _LOST},
        lambda branches, given: branches.fork(given["source"], given["into"]),
        required=("into",),
    ),
    Tool(
        "diff",
        "List the files in which a branch, or a snapshot, differs from a snapshot: `written` were added or changed, "
        "`gone` were deleted, or are as in the original image again. Content, mode and owner count, times do not. At "
        f"most {MOST_PATHS} paths of each are listed, the rest is counted. Paths only: use read_file, or diff in "
        f"execute, for content. Refused where a state holds more than {LARGEST_TREE >> 20} MiB of written files.",
        {
            "since": {**_NAME, "description": "a snapshot"},
            "of": {**_NAME, "default": MAIN, "description": "a branch or a snapshot"},
        },
        {
            "before": _TEXT,
            "after": _TEXT,
            "written": _TEXTS,
            "written_omitted": _COUNT,
            "gone": _TEXTS,
            "gone_omitted": _COUNT,
        },
        lambda branches, given: branches.diff(given["since"], given["of"]),
        required=("since",),
        reads_only=True,
    ),
    Tool(
        "list",
        "List branches, with the number of calls that run or wait on each, and snapshots; and the limits.",
        {},
        {
            "branches": {"type": "array", "items": {"type": "object"}},
            "snapshots": {"type": "array", "items": {"type": "object"}},
            "most_branches": _COUNT,
            "most_snapshots": _COUNT,
            "longest_command_seconds": _NUMBER,
        },
        lambda branches, given: branches.overview(),
        reads_only=True,
    ),
    Tool(
        "discard",
        "Give up snapshots and branches that are no longer needed, to make room for others; main cannot be discarded.",
        {"names": {**_NAMES, "description": "of snapshots or branches"}},
        {"discarded": _TEXTS},
        lambda branches, given: branches.discard(given["names"]),
        required=("names",),
        destroys=True,
    ),
    Tool(
        "read_file",
        f"Read a file of a branch as UTF-8 text, of at most {LARGEST_FILE >> 10} KiB. Other bytes are shown as "
        "backslash escapes; `exact` is false then.",
        {"path": _PATH, "branch": _BRANCH},
        {"branch": _TEXT, "path": _TEXT, "text": _TEXT, "exact": _TRUTH},
        lambda branches, given: branches.read_file(given["branch"], given["path"]),
        required=("path",),
        reads_only=True,
    ),
    Tool(
        "write_file",
        "Write text to a file of a branch, making missing parent directories; what it held before is replaced.",
        {
            "path": _PATH,
            "text": {"type": "string", "maxLength": LARGEST_FILE},
            "branch": _BRANCH,
        },
        {"branch": _TEXT, "path": _TEXT, "bytes": _COUNT},
        lambda branches, given: branches.write_file(given["branch"], given["path"], given["text"]),
        required=("path", "text"),
        destroys=True,
    ),
)


class _Refused(Exception):
    """A call with arguments that its schema does not admit."""


def make_server(branches: Branches) -> Server[Any]:
    """Make a server whose tools act on these branches; whoever runs it closes them afterwards.

    Raises:
        ImportError: the package ``mcp`` is missing.
    """
    import jsonschema
    from mcp import types
    from mcp.server.lowlevel import Server

    tools = {tool.name: tool for tool in TOOLS}
    validators = {tool.name: jsonschema.Draft202012Validator(tool.arguments(branches)) for tool in TOOLS}
    shown = [
        types.Tool(
            name=tool.name,
            description=tool.about,
            input_schema=tool.arguments(branches),
            output_schema=tool.result(),
            annotations=types.ToolAnnotations(
                read_only_hint=tool.reads_only, destructive_hint=tool.destroys, open_world_hint=False
            ),
        )
        for tool in TOOLS
    ]

    def checked(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        if name not in tools:
            raise _Refused(f"expected a tool ({', '.join(tools)}), found {brief(name, 80)}")
        for error in validators[name].iter_errors(dict(given)):
            raise _Refused(_explained(error))
        defaults = {key: schema["default"] for key, schema in tools[name].takes.items() if "default" in schema}
        return {**defaults, **given}

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=shown)

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            given = checked(params.name, params.arguments or {})
            answer = tools[params.name].call(branches, given)
            if isinstance(answer, Future):
                answer = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # by the client
                raise
            ended = "the server ends" if branches.closed else "the branch was discarded"
            return failed(f"{ended} before the call had its turn")
        except (_Refused, SandboxError, SnapshotError, OSError, ValueError) as error:
            said = "the server ends, and with it the call" if branches.closed else str(error) or type(error).__name__
            tell(getattr(context.request, "client", None) or "the client", "a call", said)
            return failed(said)
        except Exception as error:  # the agent shall know that it is no fault of its own
            log.exception("the tool %s failed", params.name)
            return failed(f"the server failed: {type(error).__name__}: {brief(str(error), 200)}")
        text = json.dumps(answer, ensure_ascii=False)
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], structured_content=answer)

    def failed(message: str) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(type="text", text=message)], is_error=True)

    return Server(
        "sandboxgym",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _explained(error: Any) -> str:
    """A validation error in one line; what was given may be huge."""
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties":
        known = ", ".join(error.schema["properties"])
        unknown = ", ".join(
            brief(name, 40) for name in list(error.instance)[:20] if name not in error.schema["properties"]
        )
        return f"expected no arguments but {known or 'none'}, found {unknown or 'more'}"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"expected the arguments {', '.join(error.validator_value)}; missing: {', '.join(missing)}"
    expected = {
        "type": f"a value of type {error.validator_value}",
        "pattern": "a name of at most 40 letters, digits, dots, hyphens and underscores",
        "maxLength": f"at most {error.validator_value} characters",
        "minLength": f"at least {error.validator_value} characters",
        "maximum": f"at most {error.validator_value}",
        "minimum": f"at least {error.validator_value}",
        "maxItems": f"at most {error.validator_value} items",
        "minItems": f"at least {error.validator_value} items",
    }.get(error.validator, f"{error.validator} {error.validator_value}")
    return f"{where}: expected {expected}, found {brief(error.instance, 80)}"


def run_stdio(branches: Branches) -> int:
    """Serve one client on standard input and output, until it closes them.

    Returns:
        The number of the signal, of SIGINT and SIGTERM, that ended it earlier; else 0.
    """
    from mcp.server.stdio import stdio_server

    server = make_server(branches)
    ended = 0

    async def serve(end_input: Callable[[], None]) -> None:
        def end(number: int) -> None:
            nonlocal ended
            ended = number
            end_input()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        async with stdio_server() as (source, sink):
            await server.run(source, sink, server.create_initialization_options())

    with _input_that_can_be_ended() as end_input:
        asyncio.run(serve(end_input))
    return ended


@contextlib.contextmanager
def _input_that_can_be_ended() -> Iterator[Callable[[], None]]:
    """Put a pipe in the place of standard input, which a thread fills; the function ends it.

    The library reads in a thread that nothing else can wake: a signal would have to wait for the next message.
    """
    original = os.dup(0)
    reading, writing = os.pipe()
    end, ending = os.pipe()
    os.dup2(reading, 0)
    os.close(reading)

    def fill() -> None:
        try:
            while True:
                ready, _, _ = select.select([original, end], [], [])
                if end in ready or not (data := os.read(original, 1 << 16)):
                    return
                while data:
                    data = data[os.write(writing, data) :]
        except OSError:  # nobody reads any more
            return
        finally:
            os.close(writing)

    threading.Thread(target=fill, name="input", daemon=True).start()

    def stop() -> None:
        os.write(ending, b".")

    try:
        yield stop
    finally:
        os.dup2(original, 0)


def run_http(branches: Branches, listening: socket.socket, started: Callable[[], object] | None = None) -> None:
    """Serve clients by HTTP at ``/mcp``, until SIGINT or SIGTERM. All of them share the branches.

    Args:
        branches: of all clients.
        listening: bound to an address of this machine only, for there is no authentication.
        started: called once clients are served.

    Raises:
        KeyboardInterrupt: it was ended.
    """

    def refusal(status: int, said: str) -> bytes:
        error = {"code": -32000, "message": said, "data": {"status": status}}
        return json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()

    logging.getLogger("mcp.server.transport_security").setLevel(logging.ERROR)  # refusals, which `serve` logs
    app = _whole(make_server(branches).streamable_http_app(host="127.0.0.1"), refusal)

    async def end_calls() -> None:
        await asyncio.to_thread(branches.close)  # what runs is answered, before its connection ends
        await asyncio.sleep(_LAST_WORDS)

    serve(app, listening, refusal=refusal, started=started, ending=end_calls, timeout_graceful_shutdown=1)


def _whole(app: Any, refusal: Callable[[int, str], bytes]) -> Any:
    """The application, which sees no requests but those whose body has come: the library logs others as failures."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        messages, size, more = [], 0, True
        while more:
            messages.append(message := await receive())
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            if size > LARGEST_REQUEST:
                content = refusal(413, f"expected a request of at most {LARGEST_REQUEST:,} bytes, found more")
                headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
                await send({"type": "http.response.start", "status": 413, "headers": headers})
                await send({"type": "http.response.body", "body": content})
                return
            more = message.get("more_body", False)
        messages.reverse()

        async def again() -> Any:
            return messages.pop() if messages else await receive()

        await app(scope, again, send)

    return served
