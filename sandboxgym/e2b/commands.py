"""The commands of one sandbox: started, streamed to any number of clients, signalled, carried over to copies.

1. A command is a child of the sandbox's shell, in a session of its own. Its input and output are named pipes inside the
   sandbox (`FOLDER`), so that CRIU can capture it, and a copy of the sandbox continues it.
2. Output goes to the clients that are connected at that time. One that reads too slowly makes the command wait, as a
   full pipe does; without clients output is read and dropped.
3. A command ends when its process does. What it left in the background continues, its output is dropped.
4. While the sandbox is captured (`Commands.deafen`), no pipe is read or written: what waits in it is copied.
5. `Commands` belongs to the event loop and never waits; the functions, which wait for the sandbox, to threads.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import logging
import os
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandboxgym.brief import brief
from sandboxgym.e2b.connect import ServiceError
from sandboxgym.e2b.messages import Message
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.sandbox import Sandbox

log = logging.getLogger("sandboxgym")

FOLDER = "/var/lib/e2b"
"""Directory inside with the pipes of the commands: not below ``/run``, part of which is no file of the sandbox."""
HOME = "/home/user"
"""Home of commands, where no other user is named."""
MOST_COMMANDS = 256
"""Commands of a sandbox at one time."""
MOST_WRITERS = 64
"""Clients that write to the commands of a sandbox at one time."""
_CHUNK = 1 << 15
_SHORTEST, _LONGEST = 0.01, 0.1  # seconds between two looks whether a command reads its input
_WAITING = 16  # chunks for one client, above which the command waits
_STARTING = 20.0  # seconds
_LONGEST_LINE = 200  # bytes of what a command's subshell tells
_NAME = re.compile(r"[^-=\0][^=\0]*")  # what begins with a hyphen would be an option of `env`
_NO_FOLDER, _NO_PIPES = 91, 92


@dataclass(eq=False)
class Command:
    """One running command."""

    number: int
    config: Message
    """Configuration given by the client: ``cmd``, ``args``, ``envs``, ``cwd``."""
    tag: str | None
    takes_input: bool
    pid: int = 0
    """Inside."""
    holder: int = 0
    """Process inside that keeps the input open; 0: there is none."""
    descriptors: dict[str, int] = field(default_factory=dict)
    clients: list[asyncio.Queue[Message]] = field(default_factory=list)
    told: bytes = b""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def folder(self) -> str:
        """Directory inside with its pipes."""
        return f"{FOLDER}/{self.number}"

    def twin(self) -> Command:
        """The command's counterpart in a copy of the sandbox: nobody listens to it yet."""
        made = Command(self.number, self.config, self.tag, self.takes_input, self.pid, self.holder)
        made.started.set()
        return made

    def info(self) -> Message:
        """The command as a ``ProcessInfo``."""
        return {"config": self.config, "pid": self.pid, **({} if self.tag is None else {"tag": self.tag})}


def start(sandbox: Sandbox, command: Command, *, home: str, env: Mapping[str, str], stale: Sequence[str]) -> None:
    """Start a command in a sandbox, for the pipes of which the caller then listens.

    Args:
        sandbox: not in use by another thread.
        command: not started yet.
        home: its home, and its directory unless it names one.
        env: added to the shell's environment, below the command's own.
        stale: directories of ended commands, which are removed.

    Raises:
        ServiceError: it cannot be started.
    """
    config = command.config
    folder = shlex.quote(command.folder)
    cwd = shlex.quote(resolved(config.get("cwd") or ".", home))
    variables = {"HOME": home, **env, **config.get("envs", {})}
    for name in variables:
        if not _NAME.fullmatch(name) or "\0" in variables[name]:
            raise ServiceError("invalid_argument", f"expected an environment variable, found {brief(name, 40)}")
    words = [config.get("cmd", ""), *config.get("args", [])]
    if not words[0] or any("\0" in word for word in words):
        raise ServiceError("invalid_argument", f"expected a command, found {brief(words, 80)}")
    pipes = ["out", "err", "tell", "seen", *(["in"] if command.takes_input else [])]
    # The subshell holds all pipes at both ends until the service has seen the command's end: nothing blocks, breaks or
    # is lost because nobody listens, as in a copy of the sandbox whose pipes are not open yet. Input can only end if
    # its holder is apart from it.
    holder = "exec 3<>in; { exec 4>&- 5>&- 6>&- 7>&-; exec sleep 2147483647; } & holder=$!"
    begin = 'echo "start $$ $1" >&6; shift; exec 6>&- 7>&- "$@"'
    launch = [
        "exec 4<>out 5<>err 6<>tell 7<>seen",
        *([holder] if command.takes_input else ["holder=0"]),
        "here=$PWD",
        f"cd {cwd} || exit",
        f"env {_assigned(variables)} setsid bash -c {shlex.quote(begin)} e2b $holder {shlex.join(words)} "
        f"<{'$here/in' if command.takes_input else '/dev/null'} >&4 2>&5 3>&- 4>&- 5>&- &",
        "exec 3>&-",
        "wait $!; code=$?",
        "((holder)) && kill $holder",
        'echo "end $code" >&6; read -ru 7',
    ]
    script = "\n".join(
        [
            f"rm -rf -- {shlex.join(stale)}" if stale else ":",
            f"if [[ ! -d {cwd} ]]; then (exit {_NO_FOLDER})",
            f"elif mkdir -p {folder} && (cd {folder} && mkfifo -m 600 {' '.join(pipes)}); then",
            f"(cd {folder}",
            *launch,
            ") </dev/null >/dev/null 2>&1 & disown",
            f"else (exit {_NO_PIPES}); fi",
        ]
    )
    with failures():
        result = sandbox.execute(script, timeout=_STARTING)
    if result.exit_code == _NO_FOLDER:
        raise ServiceError(
            "invalid_argument", f"cwd: expected a directory, found {brief(config.get('cwd', home), 200)}"
        )
    if result.exit_code:
        raise ServiceError(
            "resource_exhausted", f"the command could not be started: {brief(result.output.strip(), 200)}"
        )


def _assigned(variables: Mapping[str, str]) -> str:
    return " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())


def signal(sandbox: Sandbox, pid: int, number: int) -> None:
    """Send a signal to a command and what else is in its process group."""
    with failures():
        sandbox.execute(f"kill -{number} -- -{pid} || kill -{number} {pid}", timeout=_STARTING)


def end_input(sandbox: Sandbox, holder: int) -> None:
    """End the input of a command."""
    with failures():
        sandbox.execute(f"kill -9 {holder}", timeout=_STARTING)


def resolved(path: str, home: str) -> str:
    """A path as commands and files take it: relative to the home, which ``~`` names too.

    Raises:
        ServiceError: it can be no path.
    """
    if "\0" in path or len(path) > 4096:
        raise ServiceError("invalid_argument", f"expected a path, found {brief(path, 80)}")
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return os.path.normpath(os.path.join(home, path)).replace("//", "/", 1) or "/"


@contextlib.contextmanager
def failures() -> Any:
    """Errors of a sandbox as those of a call."""
    try:
        yield
    except SandboxError as error:
        raise ServiceError("unavailable", f"the sandbox: {error}") from error
    except OSError as error:
        code = {
            errno.ENOENT: "not_found",
            errno.EACCES: "permission_denied",
            errno.EPERM: "permission_denied",
            errno.EAGAIN: "resource_exhausted",
            errno.ENOMEM: "resource_exhausted",
        }.get(error.errno or 0, "invalid_argument")
        raise ServiceError(
            code, str(error.strerror or error) + (f": {error.filename}" if error.filename else "")
        ) from error


class Commands:
    """The running commands of one sandbox; used in the event loop only."""

    def __init__(self, open_pipe: Callable[..., int]) -> None:
        self._open_pipe = open_pipe
        self._running: dict[int, Command] = {}
        self._number = 0
        self._writers = 0
        self._moves = asyncio.Event()  # unset while nothing may be read or written
        self._moves.set()
        self.stale: list[str] = []
        """Directories of ended commands, which the next one removes."""

    @classmethod
    def of(cls, sandbox: Sandbox, running: Sequence[Command] = (), number: int = 0) -> Commands:
        """The commands of a sandbox, those of a captured one among them."""
        backend = sandbox.backend
        assert isinstance(backend, OverlayBackend)
        made = cls(backend.open_pipe)
        made._number = number
        made._running = {command.number: command.twin() for command in running}
        return made

    def twins(self) -> tuple[list[Command], int]:
        """Facts that `of` needs for a copy of the sandbox."""
        return [command.twin() for command in self._running.values() if command.started.is_set()], self._number

    def new(self, config: Message, *, tag: str | None, takes_input: bool) -> Command:
        """Make a command, not started."""
        if len(self._running) >= MOST_COMMANDS:
            raise ServiceError("resource_exhausted", f"expected at most {MOST_COMMANDS} running commands")
        self._number += 1
        command = Command(self._number, config, tag, takes_input)
        self._running[command.number] = command
        return command

    def find(self, selector: Message | None) -> Command:
        """The command that a ``ProcessSelector`` names."""
        selector = selector or {}
        for command in self._running.values():
            if ("pid" in selector and command.pid == selector["pid"]) or (
                "tag" in selector and command.tag == selector["tag"]
            ):
                return command
        raise ServiceError("not_found", f"expected the pid or tag of a running command, found {brief(selector, 80)}")

    def infos(self) -> list[Message]:
        """All commands, as ``ProcessInfo``."""
        return [command.info() for command in self._running.values() if command.pid]

    def listen(self) -> None:
        """Open the pipes of the commands that are not listened to: after a start, and in a copy of the sandbox."""
        for command in list(self._running.values()):
            if not command.descriptors:
                self._open(command)

    def deafen(self) -> None:
        """Stop reading and writing until `go_on`, before the sandbox is captured: output waits in the pipes."""
        self._moves.clear()
        loop = asyncio.get_running_loop()
        for command in self._running.values():
            for descriptor in command.descriptors.values():
                loop.remove_reader(descriptor)

    def go_on(self, *, replaced: bool) -> None:
        """Continue to read the output of all commands, after the sandbox was captured.

        Args:
            replaced: the sandbox continues as a copy of itself. What waited in the old pipes waits in the copy's, too,
                except for commands that had ended before the copy was made.
        """
        self._moves.set()
        for command in list(self._running.values()):
            if not replaced:
                for name in command.descriptors:
                    self._watch(command, name)
            elif self._lives(command):
                self._close(command)
                self._open(command)
            else:
                with contextlib.suppress(OSError, KeyError):
                    while data := os.read(command.descriptors["tell"], _CHUNK):
                        self._told(command, data)
                self.end(command, None)

    def _lives(self, command: Command) -> bool:
        """True if the subshell of a command that has started is there: it holds the reading ends, too."""
        try:
            os.close(self._open_pipe(f"{command.folder}/tell", write=True))
        except (OSError, SandboxError):
            return False
        return True

    def _open(self, command: Command) -> None:
        if command.started.is_set() and not self._lives(command):
            self.end(command, None)
            return
        for name in ("out", "err", "tell"):
            try:
                command.descriptors[name] = self._open_pipe(f"{command.folder}/{name}")
            except (OSError, SandboxError):
                self.end(command, None)
                return
            self._watch(command, name)

    def _watch(self, command: Command, name: str) -> None:
        asyncio.get_running_loop().add_reader(command.descriptors[name], self._heard, command, name)

    def _close(self, command: Command) -> None:
        for descriptor in command.descriptors.values():
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        command.descriptors = {}

    def _heard(self, command: Command, name: str) -> None:
        descriptor = command.descriptors[name]
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        if not data:  # nobody holds the other end: the subshell was killed
            self.end(command, None)
        elif name == "tell":
            self._told(command, data)
        else:
            self._publish(command, name, data)

    def _told(self, command: Command, data: bytes) -> None:
        *lines, rest = (command.told + data[:_LONGEST_LINE]).split(b"\n")
        command.told = rest[:_LONGEST_LINE]  # programs inside can write here, too, and without an end of line
        for line in lines:
            match line.split():
                case [b"start", pid, holder] if pid.isdigit() and holder.isdigit() and not command.started.is_set():
                    command.pid, command.holder = int(pid[:9]), int(holder[:9])
                    command.started.set()
                case [b"end", code] if code.isdigit():
                    with contextlib.suppress(OSError, SandboxError):
                        seen = self._open_pipe(f"{command.folder}/seen", write=True)
                        try:
                            os.write(seen, b"\n")
                        finally:  # programs inside can have filled it
                            os.close(seen)
                    self.end(command, int(code[:4]))
                    return

    def _publish(self, command: Command, name: str, data: bytes) -> None:
        event = {"data": {"stdout" if name == "out" else "stderr": base64.b64encode(data).decode()}}
        for client in command.clients:
            client.put_nowait(event)
        if any(client.qsize() >= _WAITING for client in command.clients):
            for descriptor in command.descriptors.values():
                asyncio.get_running_loop().remove_reader(descriptor)

    def _relax(self, command: Command) -> None:
        """Read on after a client took something, if none is behind."""
        if self._moves.is_set() and all(client.qsize() < _WAITING // 2 for client in command.clients):
            for name in command.descriptors:
                self._watch(command, name)

    def end(self, command: Command, code: int | None) -> None:
        """Note that a command ended, with its exit code if that is known, after the output that is left."""
        if command.ended.is_set():
            return
        for name in ("out", "err"):
            with contextlib.suppress(OSError, KeyError):
                for _ in range(64):  # more than a pipe holds was written by what it left behind
                    if not (data := os.read(command.descriptors[name], _CHUNK)):
                        break
                    self._publish(command, name, data)
        self._close(command)
        self._running.pop(command.number, None)
        self.stale.append(command.folder)
        if code is None:
            event = {"exitCode": -1, "exited": False, "status": "killed", "error": "killed"}
        else:
            event = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
            if code:
                event["error"] = f"exit status {code}"
        for client in command.clients:
            client.put_nowait({"end": event})
        command.started.set()
        command.ended.set()

    def end_all(self) -> None:
        """Note that the sandbox ended, and with it all commands: their clients' streams break off."""
        for command in list(self._running.values()):
            self._close(command)
            for client in command.clients:
                client.put_nowait({"gone": True})
            command.started.set()
            command.ended.set()
        self._running = {}
        self._moves.set()

    def join(self, command: Command) -> asyncio.Queue[Message]:
        """Let one more client have the events of a command from now on, by `events`; `leave` ends it."""
        client: asyncio.Queue[Message] = asyncio.Queue()
        command.clients.append(client)
        return client

    def leave(self, command: Command, client: asyncio.Queue[Message]) -> None:
        """Forget a client. Idempotent."""
        if client in command.clients:
            command.clients.remove(client)
            self._relax(command)

    async def events(
        self, command: Command, client: asyncio.Queue[Message], *, keepalive: float
    ) -> AsyncIterator[Message]:
        """Events of a command that has started, to its end.

        Raises:
            ServiceError: the sandbox ended before.
        """
        if command.pid:
            yield {"start": {"pid": command.pid}}
        while True:
            try:
                async with asyncio.timeout(keepalive):
                    event = await client.get()
            except TimeoutError:
                yield {"keepalive": {}}
                continue
            if "gone" in event:
                raise ServiceError("unavailable", "the sandbox ended before the command: it was not found")
            yield event
            if "end" in event:
                return
            self._relax(command)

    async def write(self, command: Command, data: bytes) -> None:
        """Write to a command's input, at the pace at which it reads.

        Raises:
            ServiceError: it takes none, or none any more; or too many write.
        """
        if not command.takes_input:
            raise ServiceError("failed_precondition", "the command was started without stdin")
        if self._writers >= MOST_WRITERS:
            raise ServiceError("resource_exhausted", f"expected at most {MOST_WRITERS} clients that write to commands")
        self._writers += 1
        try:
            await self._written(command, memoryview(data))
        finally:
            self._writers -= 1

    async def _written(self, command: Command, left: memoryview) -> None:
        pause = _SHORTEST
        while left:
            await self._moves.wait()
            if command.ended.is_set():
                raise ServiceError("not_found", "the command has ended")
            try:
                descriptor = self._open_pipe(f"{command.folder}/in", write=True)
            except OSError as error:
                raise ServiceError("failed_precondition", "the command's stdin is closed") from error
            except SandboxError as error:
                raise ServiceError("unavailable", f"the sandbox: {error}") from error
            try:
                left = left[os.write(descriptor, left[:_CHUNK]) :]
                pause = _SHORTEST
            except BlockingIOError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST)
            except BrokenPipeError as error:
                raise ServiceError("failed_precondition", "the command's stdin is closed") from error
            finally:
                os.close(descriptor)
