"""The official parsers and report on a test log, run in processes that can be killed.

1. A parser reads text that an agent may have made, and some take a time that grows with the square of a line's length.
   So each log is parsed in a process of its own with limits of CPU time and memory; its death is reported
   (`ParserDied`), and affects neither this process nor the next log.
2. These processes are forks of a server that has imported the official code, which takes seconds. The server is started
   with the first `warm_up`, ends with this process, and is started again if it was killed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

from sandboxgym.system import interpreter, proc

CPU_SECONDS = 60
"""Limit of CPU seconds per log."""
MEMORY = 2 * 2**30
"""Limit in bytes of memory per log, in addition to that of the official code."""
_WALL = 20  # limit of wall-clock time as a multiple of CPU time, for busy machines
_REPLY = 64 * 2**20  # bytes
_START = "from sandboxgym.envs.swebench.grading.parsing import serve; serve({descriptor})"


class ParserDied(RuntimeError):
    """Raised if a log was not parsed: it took too much time or memory, or broke the parser; the message says which."""


def parse(path: str, request: dict[str, Any], *, seconds: int = CPU_SECONDS, memory: int = MEMORY) -> dict[str, Any]:
    """Run `answer` on a log in a process of its own.

    Args:
        path: path of the log.
        request: for `answer`.
        seconds: limit of CPU time.
        memory: limit in bytes of memory.

    Raises:
        ParserDied: a limit was exceeded, or the parser failed.
    """
    body = json.dumps({"path": path, "seconds": seconds, "memory": memory, "request": request}).encode()
    for attempt in (1, 2):
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                try:
                    _server(again=attempt > 1).send(theirs)
                except OSError:  # it was killed from outside
                    if attempt == 1:
                        continue
                    raise
            mine.settimeout(seconds * _WALL)
            try:
                mine.sendall(body)
                mine.shutdown(socket.SHUT_WR)
                reply = _all(mine)
            except TimeoutError:
                raise ParserDied(f"the log was not parsed in {seconds * _WALL} s") from None
            except OSError as error:
                raise ParserDied(f"the parser of the log died: {error}") from None
            break
    if not reply:
        raise ParserDied(f"parsing the log took more than {seconds} s of processor time, or {memory:,} bytes of memory")
    found: dict[str, Any] = json.loads(reply)
    if "error" in found:
        raise ParserDied(f"the log cannot be parsed: {found['error']}")
    return found


def warm_up() -> None:
    """Start importing the official code in the background."""
    _server()


class _Server:
    """Handle of the server, the process that has imported the official code."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                interpreter.command(_START.format(descriptor=theirs.fileno())),
                env=interpreter.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for its owner
            )
        self._lock = threading.Lock()

    def send(self, connection: socket.socket) -> None:
        with self._lock:
            socket.send_fds(self._socket, [b"log"], [connection.fileno()])

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
            return
        self._process.kill()
        self._process.wait()


_servers: dict[int, _Server] = {}  # by the process that they belong to
_lock = threading.Lock()


def _server(*, again: bool = False) -> _Server:
    with _lock:
        found = _servers.get(os.getpid())
        if again and found is not None:
            found.close()
            found = None
        if found is None:
            if not _servers:
                atexit.register(close)
            found = _servers[os.getpid()] = _Server()
        return found


def close() -> None:
    """Stop this process's server. Idempotent; the next log starts another."""
    with _lock:
        found = _servers.pop(os.getpid(), None)
    if found is not None:
        found.close()


def _all(connection: socket.socket) -> bytes:
    data = bytearray()
    while (part := connection.recv(1 << 20)) and len(data) < _REPLY:
        data += part
    return bytes(data)


# What follows runs in the server.


def serve(descriptor: int) -> None:
    """Serve connections sent over a socket, each in a fork, until the owner of its other end is gone."""
    import swebench.harness.grading  # noqa: F401 - before the forks

    from sandboxgym.envs.swebench.grading import suspicion  # noqa: F401 - likewise

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    with socket.socket(fileno=descriptor) as owner:
        while True:
            data, ancillary, _, _ = owner.recvmsg(16, socket.CMSG_SPACE(array.array("i").itemsize))
            if not data:
                return
            received = [number for _, _, found in ancillary for number in array.array("i", found)]
            if received and os.fork() == 0:
                owner.close()
                _serve_one(received[0])
            for number in received:
                os.close(number)


def _serve_one(descriptor: int) -> None:
    """Answer one connection, then exit."""
    try:
        with socket.socket(fileno=descriptor) as connection:
            asked = json.loads(_all(connection))
            size, _ = proc.memory()
            resource.setrlimit(resource.RLIMIT_AS, (size + asked["memory"],) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"],) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(asked["seconds"] * _WALL)
            try:
                found = answer(asked["path"], asked["request"])
            except MemoryError:
                os._exit(1)
            except Exception as error:  # the parsers were not written for hostile logs
                found = {"error": f"{type(error).__name__}: {error}"[:500]}
            connection.sendall(json.dumps(found).encode())
    finally:
        os._exit(0)


def answer(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Compute the official report on a log, and the suspicious findings in it.

    Args:
        path: path of the log.
        request: ``row`` for the official ``make_test_spec``; ``prediction``, with the patch or a text in its place;
            ``expected``: how every test has to end, empty where only those of the row count.

    Returns:
        ``outcome``: the report of this instance; ``odd``: the findings of `suspicion.of_log`.
    """
    from swebench.harness.grading import get_eval_report
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.harness.utils import make_test_spec

    from sandboxgym.envs.swebench.grading import suspicion
    from sandboxgym.envs.swebench.grading.parsers import PARSERS

    PARSER_REGISTRY.update(PARSERS)  # where get_eval_report looks parsers up by name
    spec = make_test_spec(request["row"])
    text = Path(path).read_text(encoding="utf-8")
    if request["expected"]:
        outcome = _compared(text, request["row"], request["expected"])
    else:
        report = get_eval_report(spec, request["prediction"], path, include_tests_status=True)
        outcome = report[request["prediction"]["instance_id"]]
    expected = [*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS]
    odd = suspicion.of_log(text, log_parser=spec.log_parser, expected=expected)
    return {"outcome": outcome, "odd": list(odd)}


def _compared(text: str, row: dict[str, Any], expected: dict[str, str]) -> dict[str, Any]:
    """Report of the rule that every test has to end as expected, and no other may have run (R2E-Gym's)."""
    from swebench.harness import constants
    from swebench.harness.log_parsers import PARSER_REGISTRY

    tests = text.partition(constants.START_TEST_OUTPUT)[2].partition(constants.END_TEST_OUTPUT)[0]
    ended = PARSER_REGISTRY[row["log_parser"]](tests, None)
    outcome = {"resolved": bool(ended) and ended == expected, "infra_failure": False}
    if ended:
        outcome["tests_status"] = {
            kind: {
                "success": [name for name in row[kind] if ended.get(name) == "PASSED"],
                "failure": [name for name in row[kind] if ended.get(name) != "PASSED"],
            }
            for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")
        }
    return outcome
