"""One command in a process of its own, its output in a pipe.

Descendants of the command may hold the pipe after it has ended: at most a pipe's capacity is read then.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable

from sandboxgym.sandbox.base import Process, Result
from sandboxgym.sandbox.overlay.processes import readable
from sandboxgym.sandbox.shell.bash import open_pidfd
from sandboxgym.sandbox.shell.bash_session import TIMED_OUT
from sandboxgym.sandbox.shell.terminal import Capture, decode

_READ = 1 << 16
_GLANCE = 0.05  # seconds between two looks at a process that nobody tells of
_PIPE = 1 << 20  # bytes that a pipe holds at most, whoever made it larger
_HELD = 0.5  # seconds after a process in which what it printed has surely been relayed
_RELAY = 2.0  # seconds in which a relayed output must end once its process did, unless something else holds it open


KEEPING = """\
command -v setsid > /dev/null || exec bash --norc --noprofile -c "$0"
{ setsid bash --norc --noprofile -c "$0" 2>&3 3>&-; } 3>&2 2> /dev/null
exit $?
"""
"""Script for bash that runs its ``$0`` in a session of its own, which does not end with it."""


class Stop:
    """Ends a command before its time, from another thread: as soon as it is set, or at once if it was set before."""

    def __init__(self) -> None:
        self._set, self._setting = os.pipe()
        os.set_blocking(self._setting, False)
        for descriptor in (self._set, self._setting):
            weakref.finalize(self, os.close, descriptor)

    def fileno(self) -> int:
        """Descriptor that can be read from once it is set."""
        return self._set

    def set(self) -> None:
        """End the command. Idempotent; does nothing to one that has ended."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._setting, b".")


def collect(
    process: Process,
    timeout: float,
    limit: int,
    *,
    most: int | None = None,
    keep: bool = False,
    end: Callable[[], None] | None = None,
    stop: Stop | None = None,
) -> Result:
    """Read a process's output until it ends, or is killed at the time limit.

    Args:
        process: without a terminal.
        timeout: seconds.
        limit: bytes that are kept of the output.
        most: bytes that it may print before it is killed, as at the time limit.
        keep: what holds its output open once it has ended is not ended.
        end: ends all that the process started, wherever it went; called at the time limit, before the process is
            killed, and where a relayed output is held open by something else once the process has ended.
        stop: once it is set the time is over.
    """
    assert process.output is not None
    began = time.monotonic()
    capture = Capture(limit)
    pidfd = open_pidfd(process.pid)
    poll = select.poll()
    poll.register(process.output, select.POLLIN)
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    if stop is not None:
        poll.register(stop, select.POLLIN)
    timed_out = stopped = ended = False
    reading, rest, total = True, _PIPE, 0
    try:
        while rest > 0:
            left = began + timeout - time.monotonic()
            too_much = most is not None and total > most
            if (left <= 0 or too_much) and not (timed_out or stopped or ended):
                timed_out, stopped = not too_much, too_much
                if end is not None:
                    end()
                process.kill()
            waits = 0.0 if timed_out or stopped or ended else left if pidfd is not None else min(left, _GLANCE)
            ready = dict(poll.poll(waits * 1000))
            ended = ended or pidfd in ready
            if stop is not None and stop.fileno() in ready:
                poll.unregister(stop)
                timeout = 0.0
            if reading and process.output in ready:
                chunk = os.read(process.output, _READ)
                capture.feed(chunk)
                total += len(chunk)
                if timed_out or stopped or ended:
                    rest -= len(chunk)
                if not chunk:
                    reading = False
                    poll.unregister(process.output)
            # A process that left the session may hold the pipe: it is read no longer than the command lives.
            elif timed_out or stopped or ended or (not ready and process.wait(0) is not None):
                break
    finally:
        if pidfd is not None:
            os.close(pidfd)
    status = process.wait()
    if process.relayed and reading:  # what it printed last may still be on its way
        over = time.monotonic()
        until = over + _RELAY
        while (left := until - time.monotonic()) > 0 and readable(process.output, left):
            if not (chunk := os.read(process.output, _READ)):
                break
            capture.feed(chunk)
        # Something that has left it held the pipe: whoever relays it gives up on that after a while, too.
        if end is not None and not keep and not (timed_out or stopped) and time.monotonic() - over > _HELD:
            end()
    if timed_out:
        status = TIMED_OUT
    assert status is not None
    data, elided = capture.drain()
    return Result(decode(data), status, time.monotonic() - began, timed_out=timed_out, elided=elided)
