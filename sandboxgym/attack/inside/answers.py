"""Requests, answers and the processes that attempts run in."""

import contextlib
import errno
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

MARK = "@attack "
"""Prefix of every answer, because programs and kernels may write to the same pipe."""
REFUSED, WORKED, ABSENT = "refused", "worked", "absent"
SECONDS = 8.0

ATTEMPTS = {}  # type: dict[str, Callable[..., AttemptAnswer]]


class AttemptAnswer(Exception):
    """Answer of an attempt; raised or returned."""

    def __init__(self, verdict: str, detail: str = "", hold: bool = False, **facts: Any) -> None:
        super().__init__(verdict, detail)
        self.verdict, self.detail, self.hold, self.facts = verdict, detail, hold, facts


def refused(detail: str, **facts: Any) -> AttemptAnswer:
    """Answer of an attempt that was made and failed."""
    return AttemptAnswer(REFUSED, detail, **facts)


def worked(detail: str = "", **facts: Any) -> AttemptAnswer:
    """Answer of an attempt that was made and succeeded."""
    return AttemptAnswer(WORKED, detail, **facts)


def held(detail: str = "", **facts: Any) -> AttemptAnswer:
    """Answer of an attempt that succeeded and whose process stays, with all it holds, until told to release it."""
    return AttemptAnswer(WORKED, detail, hold=True, **facts)


def absent(detail: str) -> AttemptAnswer:
    """Answer of an attempt that could not be made: something that it needs is missing."""
    return AttemptAnswer(ABSENT, detail)


def attempt(function: "Callable[..., AttemptAnswer]") -> "Callable[..., AttemptAnswer]":
    """Register a function under its name, without leading underscores."""
    ATTEMPTS[function.__name__.lstrip("_")] = function
    return function


def name_of(code: int) -> str:
    """Name of an error number."""
    return errno.errorcode.get(code, str(code))


def _line(verdict: str, detail: str, facts: "dict[str, Any]") -> bytes:
    return (json.dumps({"verdict": verdict, "detail": detail[:300], "facts": facts}) + "\n").encode()


def _child(request: "dict[str, Any]", out: int) -> None:
    """Make one attempt and write its answer; returns if the process is to stay."""
    try:
        answer = ATTEMPTS[request["do"]](**request.get("with", {}))
    except AttemptAnswer as found:
        answer = found
    except OSError as error:
        answer = refused(f"{name_of(error.errno or 0)} ({error.filename or error.strerror})")
    except MemoryError:
        answer = refused("no memory for it")
    except BaseException as error:  # SystemExit, too: an attempt always has an answer
        where = traceback.extract_tb(sys.exc_info()[2])[-1]
        answer = absent(f"the attempt itself failed: {type(error).__name__}: {error} ({where[0]}:{where[1]})")
    os.write(out, _line(answer.verdict, answer.detail, answer.facts))
    if not answer.hold:
        os._exit(0)


def _run(request: "dict[str, Any]") -> "tuple[bytes, int]":
    """Run an attempt; returns its answer, and the process that holds something (0 if none does)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _child(request, write)
        os.close(write)
        while True:
            time.sleep(60)
    os.close(write)
    chunks = []  # type: list[bytes]
    deadline = time.time() + float(request.get("seconds", SECONDS))
    late = False
    while not (chunks and chunks[-1].endswith(b"\n")):
        left = deadline - time.time()
        if left <= 0 or not select.select([read], [], [], left)[0]:
            late = True
            break
        chunk = os.read(read, 65536)
        if not chunk:
            break
        chunks.append(chunk)
    os.close(read)
    line = b"".join(chunks)
    if late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return _line("late", "it did not end in time", {}), 0
    if not line:
        status = os.waitpid(pid, 0)[1]
        return _line(REFUSED, "the process was killed by signal %s" % (status & 0x7F), {}), 0
    if os.waitpid(pid, os.WNOHANG)[0]:
        return line, 0
    return line, pid


def _let_go(pids: "list[int]") -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except OSError:
            pass
    del pids[:]


def serve() -> None:
    """Serve requests until there are no more."""
    holding = []  # type: list[int]
    sys.stdout.write(MARK + json.dumps({"verdict": "ready", "detail": sys.version.split()[0], "facts": {}}) + "\n")
    sys.stdout.flush()
    for text in iter(sys.stdin.readline, ""):
        request = json.loads(text)
        if request["do"] == "let_go":
            _let_go(holding)
            line = _line(WORKED, "", {})
        elif request["do"] not in ATTEMPTS:
            line = _line(ABSENT, "no attempt {}".format(request["do"]), {})
        else:
            line, pid = _run(request)
            if pid:
                holding.append(pid)
        sys.stdout.write(MARK + line.decode())
        sys.stdout.flush()
    _let_go(holding)
