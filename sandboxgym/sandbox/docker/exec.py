"""Processes in a container, started through the daemon's API, observed through this machine's /proc.

The connection of an exec is taken over as a raw socket here. The client library does the same but drops the bytes that
its buffered reader had already read, which are the first output of a quick program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sandboxgym.sandbox.base import SandboxClosed, SandboxUnavailable
from sandboxgym.sandbox.docker.client import daemon_address, daemon_errors
from sandboxgym.sandbox.overlay.processes import readable
from sandboxgym.sandbox.process_table import ProcessRow, descendants, kill_all, kill_until_none, table
from sandboxgym.system import proc

# Arguments: "tty" or "pipe", the directory, NAME=VALUE …, program, arguments.
_LAUNCH = """
if [ "$1" = tty ]; then stty -echo -opost cols 200 rows 24 2>/dev/null; printf '\\036'; else exec 2>&1; fi
cd -- "$2" || exit 126
shift 2
exec env -i "$@"
"""
_READY = b"\x1e"
"""Printed once the terminal is set: text typed earlier would be echoed."""
_FRAME = struct.Struct(">BxxxL")
_CHUNK = 1 << 16
_SAID = 1 << 20  # bytes that a program of ours may print
_SECONDS = 60.0  # that it may take, or a terminal to be set
_SETTLING = 10.0  # in which the daemon must know whether a container is paused
_FREEZING = 60.0  # in which the container runtime must get hold of processes that multiply
_ENDING = 2.0  # until it has ended, once it printed its last
_HELLO = 1 << 12  # bytes printed before a terminal is set


class DockerContainer:
    """A running container.

    Args:
        api: the daemon's.
        identity: its id.

    Raises:
        SandboxUnavailable: its processes are not on this machine.
    """

    def __init__(self, api: Any, identity: str) -> None:
        self.api, self.id = api, identity
        with live_errors():
            known = api.inspect_container(identity)
        self.init: int = known["State"]["Pid"]
        self.layer = _layer(known)
        self.below = [] if self.layer is None else _below(known)
        """The directories of its image's layers, the topmost first."""
        started = [row for row in self._rows() if row.pid == self.init]
        if not started:
            raise SandboxUnavailable(
                f"the Docker daemon at {daemon_address()} runs its containers on another machine or in a virtual one "
                "(Docker Desktop, a remote DOCKER_HOST): their processes cannot be seen from here"
            )
        self._started = started[0].started
        self._is_paused = False
        self._deferred: list[int] = []

    @property
    def running(self) -> bool:
        """True if its init is alive."""
        return any(row.started == self._started and row.runs for row in table(only=self.init.__eq__))

    def rows(self) -> list[ProcessRow]:
        """Processes of the container, without its init and the process that init waits for."""
        return [row for row in self._rows() if row.pid != self.init and not self._idle(row)]

    def kill(self, pids: Iterable[int]) -> None:
        """Kill processes of the container by their numbers on the host; others are ignored."""
        ours = [pid for pid in pids if self._holds(pid)]
        try:
            kill_all(ours)
        except PermissionError:  # an ordinary user who may use the daemon: from inside, by the numbers there
            inside = [number for pid in ours if (number := _number_inside(pid)) is not None]
            if self._is_paused:  # nothing can be started there
                self._deferred += inside
            elif inside:
                self._kill_from_inside(inside)

    def _kill_from_inside(self, numbers: Sequence[int]) -> None:
        self.execute(["sh", "-c", 'kill -9 "$@" 2>/dev/null', "sh", *map(str, numbers)])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the container for the context."""
        self._switch(self.api.pause, "already paused")
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            deferred, self._deferred = self._deferred, []
            self._switch(self.api.unpause, "not paused")
            if deferred:
                self._kill_from_inside(deferred)

    def _switch(self, switch: Callable[[str], None], done: str) -> None:
        """Pause or unpause, with retries: the daemon notices its last change late, and refuses until then.

        The container runtime gives up a pause after some seconds, where processes multiply faster than it freezes them.
        """
        import docker.errors

        began = time.monotonic()
        while True:
            with live_errors():
                try:
                    return switch(self.id)
                except docker.errors.APIError as error:
                    passing = {done: _SETTLING, "unable to freeze": _FREEZING}
                    limit = max((seconds for reason, seconds in passing.items() if reason in str(error)), default=0.0)
                    if time.monotonic() - began > limit:
                        raise
            time.sleep(0.01)

    def beyond_paths(self) -> bool:
        """True if a file was written deeper than the longest path, as the daemon finds out."""
        import docker.errors

        with live_errors():
            try:
                self.api.diff(self.id)
            except docker.errors.APIError as error:
                if "name too long" not in str(error.explanation):
                    raise
                return True
        return False

    def kill_tree(self, leader: int) -> None:
        """Kill a process, its session and its descendants."""

        def left() -> list[ProcessRow]:
            rows = self._rows()
            found = descendants(rows, {row.pid for row in rows if leader in (row.pid, row.session)})
            return [row for row in rows if row.pid in found and row.runs]

        kill_until_none(left, kill=self.kill)

    def execute(
        self, argv: Sequence[str], *, limit: int = _SAID, seconds: float = _SECONDS
    ) -> tuple[int | None, bytes]:
        """Run one of our own programs, which processes inside may have replaced.

        Args:
            argv: program and arguments.
            limit: bytes of output after which it is ended.
            seconds: after which it is ended.

        Returns:
            Exit status, None if it was ended; stdout and stderr, more than ``limit`` bytes if that was why.
        """
        with live_errors():
            made = self.api.exec_create(self.id, list(argv))["Id"]
        with _attach(self.api, made, terminal=False) as connection:
            output, complete = _unframed(connection, limit, time.monotonic() + seconds)
        deadline = time.monotonic() + (_ENDING if complete else 0.0)
        with live_errors():
            while (state := self.api.exec_inspect(made))["Running"] and time.monotonic() < deadline:
                time.sleep(0.002)
            if state["Running"] and state["Pid"]:
                self.kill_tree(state["Pid"])
        return state["ExitCode"] if complete and not state["Running"] else None, output

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        terminal: bool = False,
        stdin: int | None = None,
    ) -> ContainerProcess:
        """Start a program."""
        settings = [f"{name}={value}" for name, value in env.items()]
        launch = ["sh", "-c", _LAUNCH, "sh", "tty" if terminal else "pipe", cwd, *settings, *argv]
        reads = terminal or stdin is not None
        with live_errors():
            made = self.api.exec_create(self.id, launch, stdin=reads, tty=terminal, stdout=True, stderr=True)["Id"]
        return ContainerProcess(self, made, _attach(self.api, made, terminal), terminal=terminal, stdin=stdin)

    def _rows(self) -> list[ProcessRow]:
        return [row for row in table(only=self._holds) if row.runs]

    def _holds(self, pid: int) -> bool:
        try:
            return self.id in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False

    def _idle(self, row: ProcessRow) -> bool:
        return row.parent == self.init and row.command == IDLE


def _layer(known: Mapping[str, Any]) -> Path | None:
    """Directory of this machine that holds a container's writes; None if it is unknown, or does not hold all."""
    driver = known.get("GraphDriver") or {}
    upper = (driver.get("Data") or {}).get("UpperDir") if driver.get("Name") == "overlay2" else None
    volumes = any(mount["Type"] != "bind" for mount in known.get("Mounts", ()))
    return None if upper is None or volumes or not os.access(upper, os.R_OK | os.X_OK) else Path(upper)


def _below(known: Mapping[str, Any]) -> list[Path]:
    # The first is the daemon's own, with the mount points that a container needs.
    return [Path(path) for path in known["GraphDriver"]["Data"].get("LowerDir", "").split(":")[1:]]


IDLE = "sleep 2147483647"
INIT = ("sh", "-c", f"while :; do {IDLE} & wait $!; done")
"""Program of a container: it collects orphans, as an init does, and only a signal from outside ends it."""


class ContainerProcess:
    """A program started in a running container; see `base.Process`.

    The terminal is a socket: reading and writing it is what a terminal's master side would be, its settings are those
    of the container's terminal and cannot be reached through it.
    """

    relayed = True

    def __init__(
        self, container: DockerContainer, identity: str, connection: socket.socket, *, terminal: bool, stdin: int | None
    ) -> None:
        self._container, self._id, self._connection = container, identity, connection
        self._status: int | None = None
        self.terminal: int | None = connection.fileno() if terminal else None
        self.output: int | None = None
        # The daemon answers before it has started the program, and a container that is paused meanwhile never answers.
        state = self._inspect()
        deadline = time.monotonic() + _SECONDS
        while not state["Pid"] and state["ExitCode"] is None:
            if time.monotonic() > deadline:
                connection.close()
                raise SandboxUnavailable(f"the Docker daemon started no process in {_SECONDS:g} s")
            time.sleep(0.002)
            state = self._inspect()
        self.pid: int | None = state["Pid"] or None
        if not terminal:
            self.output, sink = os.pipe()
            _start(_unframe, connection, sink)
            if stdin is not None:
                _start(_feed, os.dup(stdin), connection)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end: the exit status (128 + signal if killed), or None after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.002
        while self._status is None:
            state = self._inspect()
            if not state["Running"] and state["ExitCode"] is not None:
                self._status = state["ExitCode"]
                if self.pid is not None:
                    self._container.kill_tree(self.pid)
                break
            if end is not None and time.monotonic() >= end:
                return None
            time.sleep(pause if end is None else max(0.0, min(pause, end - time.monotonic())))
            pause = min(pause * 2, 0.05)
        return self._status

    def kill(self) -> None:
        """Kill the process, its session and its descendants. Idempotent."""
        if self._status is None and self.pid is not None:
            with contextlib.suppress(SandboxClosed):  # it went with its container
                self._container.kill_tree(self.pid)
                self.wait(10)

    def close(self) -> None:
        """Close the descriptors held by this process. Idempotent."""
        if self.output is not None:
            os.close(self.output)
        if self._connection.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # ends the threads that wait for it
        if self.terminal is not None:
            self._connection.close()
        self.terminal = self.output = None

    def _inspect(self) -> dict[str, Any]:
        with live_errors():
            state: dict[str, Any] = self._container.api.exec_inspect(self._id)
            return state


@contextlib.contextmanager
def live_errors() -> Iterator[None]:
    """Translate errors as `daemon_errors` does; a container that is gone is `SandboxClosed`."""
    import docker.errors

    with daemon_errors():
        try:
            yield
        except docker.errors.APIError as error:
            status = error.response.status_code if error.response is not None else 0
            if status == 404 or (status == 409 and "not running" in str(error)):
                raise SandboxClosed("the container was removed or stopped from outside") from error
            raise


def _attach(api: Any, identity: str, terminal: bool) -> socket.socket:
    """Start an exec and take over the connection."""
    body = json.dumps({"Detach": False, "Tty": terminal}).encode()
    head = (
        f"POST /v{api._version}/exec/{identity}/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
        f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with daemon_errors():
        connection = _connection()
    try:
        with daemon_errors():
            connection.sendall(head.encode() + body)
            answer = _read_head(connection)
        status = int(answer.split(b" ", 2)[1])
        if status >= 300:
            reason = connection.recv(_CHUNK).decode(errors="replace").strip()
            if status in (404, 409):
                raise SandboxClosed(f"the container was removed or stopped from outside: {reason}")
            raise SandboxUnavailable(f"the Docker daemon started no process: {reason}")
        if terminal:
            with daemon_errors():
                _await_terminal(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connection() -> socket.socket:
    address = urlsplit(daemon_address())
    try:
        if address.scheme in ("tcp", "http"):
            return socket.create_connection((address.hostname or "localhost", address.port or 2375))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address.path)
        except OSError:
            connection.close()
            raise
        return connection
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _read_head(connection: socket.socket) -> bytes:
    """Read the head of an HTTP answer, and not one byte more."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        seen = connection.recv(_CHUNK, socket.MSG_PEEK)
        if not seen:
            raise ConnectionError("the Docker daemon closed the connection")
        joined = head + seen
        end = joined.find(b"\r\n\r\n")
        take = len(seen) if end < 0 else end + 4 - len(head)
        head += connection.recv(take)
    return head


def _await_terminal(connection: socket.socket) -> None:
    """Wait until the terminal is set.

    Raises:
        SandboxUnavailable: the program that sets it could not be started.
    """
    said = b""
    deadline = time.monotonic() + _SECONDS
    while not said.endswith(_READY):
        if not readable(connection.fileno(), max(deadline - time.monotonic(), 0.0)):
            raise SandboxUnavailable(f"the container set no terminal in {_SECONDS:g} s: {said[-200:]!r}")
        byte = connection.recv(1)
        if not byte or len(said) > _HELLO:  # those inside may have replaced the program that sets it
            last = said[-200:].decode(errors="replace").strip()
            raise SandboxUnavailable(f"the container started no process: {last}")
        said += byte


def _unframed(connection: socket.socket, limit: int, deadline: float) -> tuple[bytes, bool]:
    """Content of the daemon's frames, and True if it is complete within the limits of bytes and time."""
    output = bytearray()
    header, left = b"", 0
    while len(output) <= limit:
        if not readable(connection.fileno(), max(deadline - time.monotonic(), 0.0)):
            return bytes(output), False
        block = connection.recv(min(left, _CHUNK) if left else _FRAME.size - len(header))
        if not block:
            return bytes(output), True
        if left:
            left -= len(block)
            output += block
        elif len(header := header + block) == _FRAME.size:
            header, left = b"", _FRAME.unpack(header)[1]
    return bytes(output), False


def _start(function: Callable[[Any, Any], None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True, name=function.__name__).start()


def _unframe(connection: socket.socket, sink: int) -> None:
    """Copy the content of the daemon's frames to a pipe, until either end is closed."""
    with (
        contextlib.suppress(OSError),
        open(sink, "wb", buffering=0) as out,
        connection,
        connection.makefile("rb") as stream,
    ):
        while len(header := stream.read(_FRAME.size)) == _FRAME.size:
            left = _FRAME.unpack(header)[1]
            while left and (block := stream.read(min(left, _CHUNK))):
                left -= len(block)
                view = memoryview(block)
                while view:
                    view = view[out.write(view) :]


def _feed(source: int, connection: socket.socket) -> None:
    """Copy a descriptor to the input of a process."""
    with contextlib.suppress(OSError), open(source, "rb", buffering=0) as stream:
        while block := stream.read(_CHUNK):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)


def _number_inside(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(
            r"^NSpid:.*\s(\d+)$", proc.head(f"/proc/{pid}/status", 1 << 16).decode(errors="replace"), re.M
        )
        return int(found[1]) if found else None
    return None
