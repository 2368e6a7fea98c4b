"""Main program of a worker process: calls in through a pipe, outcomes out, until the owner closes it or is gone."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # a requirement of Gymnasium

from sandboxgym.workers.env_host import Call, EnvFailure, Host

GRACE = 5.0
"""Seconds that a worker has to close its environments before it is killed."""


def dumps(value: Any) -> bytes:
    """Pickle plainly where that works, else with cloudpickle."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # a local class, a lambda: pickle raises several types
        packed: bytes = cloudpickle.dumps(value)
        return packed


_LINGER = 0.005
"""Seconds that answers of short calls wait for those after them, to be sent in one message."""


class _Stop(BaseException):
    """Raised by SIGTERM in a worker, through whatever code of the environment is running."""


def main() -> None:
    """Entry point of a worker process."""
    descriptor, owner, keep = map(int, sys.argv[1:4])
    sys.argv[1:] = []
    pipe: Connection[Any, Any] = Connection(descriptor)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the owner's; children do not inherit a handler
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_watch, args=(descriptor, owner), daemon=True, name="sandboxgym-watch").start()
    host = Host(keep=keep, ships=True)
    try:
        _serve(pipe, host)
    except (EOFError, OSError, _Stop):  # the owner is gone, or wants an end
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        host.close_all()


def _stop(*_: object) -> None:
    raise _Stop


def _serve(pipe: Connection[Any, Any], host: Host) -> None:
    while message := pipe.recv_bytes():
        answers: list[bytes] = []
        since = time.monotonic()
        for slot, method, args in pickle.loads(message):
            # A call that hangs must not keep the answers before it: the owner would hold an earlier call for late.
            if answers and (method != "execute" or time.monotonic() - since > _LINGER):
                pipe.send_bytes(pickle.dumps(answers))
                answers, since = [], time.monotonic()
            answers.append(answer_of(host, slot, method, args))
        pipe.send_bytes(pickle.dumps(answers))


def answer_of(host: Host, slot: int, method: str, args: bytes) -> bytes:
    """Execute a call; its value or its exception, as ``worker.outcome_of`` reads it."""
    try:
        return pickle.dumps((False, dumps(host.perform(Call(slot, method, pickle.loads(args))))))
    except _Stop:
        raise
    except BaseException as error:  # SystemExit in an environment too: only the owner ends a worker
        return pickle.dumps((True, _dumps_error(error)))


def _dumps_error(error: BaseException) -> bytes:
    text = traceback.format_exc()
    error.__traceback__ = None
    try:
        packed = dumps((error, text))
        pickle.loads(packed)  # many exceptions pickle, but do not unpickle
    except Exception:
        packed = dumps((EnvFailure(f"{type(error).__qualname__}: {error}"), text))
    return packed


def _watch(descriptor: int, owner: int) -> None:
    """End this process when its owner is gone: in order if the environment allows it, else by force."""
    poll = select.poll()
    poll.register(descriptor, 0)  # only hang-up and error
    while not poll.poll(1000) and os.getppid() == owner:
        pass  # a fork of the owner may hold its end of the pipe open, so the parent is watched too
    with contextlib.suppress(ProcessLookupError):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
