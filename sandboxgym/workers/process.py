"""Main program of a worker process: calls in through a pipe, outcomes out, until the owner closes it or is gone."""

from __future__ import annotations

import contextlib
import io
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
        answers: list[Answer] = []
        since = time.monotonic()
        for call in pickle.loads(message):
            # A call that hangs must not keep the answers before it: the owner would hold an earlier call for late.
            if answers and (call[1] != "execute" or time.monotonic() - since > _LINGER):
                pipe.send_bytes(packed_answers(answers))
                answers, since = [], time.monotonic()
            answers.append(answer_of(host, *call))
        pipe.send_bytes(packed_answers(answers))


Answer = bytes | tuple[Any]
"""Answer to a call: its value, or, as bytes that are unpickled by themselves, a value or an exception."""


def answer_of(host: Host, slot: int, method: str, args: bytes | tuple[Any, ...]) -> Answer:
    """Execute a call; its value or its exception, as ``worker.outcome_of`` reads it."""
    try:
        return (host.perform(Call(slot, method, pickle.loads(args) if isinstance(args, bytes) else args)),)
    except _Stop:
        raise
    except BaseException as error:  # SystemExit in an environment too: only the owner ends a worker
        return pickle.dumps((True, _dumps_error(error)))


def packed_answers(answers: list[Answer]) -> bytes:
    """Pickle answers for their owner: all at once, unless one has objects that might fail to pickle or to unpickle.

    At once, what they have in common is pickled once: keys, texts and classes.
    """
    buffer = io.BytesIO()
    try:
        _PlainPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(answers)
        return buffer.getvalue()
    except Exception:  # of any type: objects say what they like; an answer by itself harms no other
        return pickle.dumps([answer if isinstance(answer, bytes) else _by_itself(*answer) for answer in answers])


class _PlainPickler(pickle.Pickler):
    """Pickler that refuses objects of other packages, which the owner may be unable to unpickle."""

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``; never called for plain data."""
        module = getattr(value, "__module__", None) or type(value).__module__
        if module.partition(".")[0] not in _KNOWN:
            raise pickle.PicklingError(module)
        return NotImplemented


_KNOWN = ("sandboxgym", "numpy", "builtins", "collections", "datetime")
"""Packages whose objects an owner can unpickle."""


def _by_itself(value: Any) -> bytes:
    try:
        return pickle.dumps((False, dumps(value)))
    except BaseException as error:  # SystemExit in a value's own pickling, too: the owner waits for an answer
        return pickle.dumps((True, _dumps_error(error)))


def _dumps_error(error: BaseException) -> bytes:
    text = traceback.format_exc()
    error.__traceback__ = None
    try:
        packed = dumps((error, text))
        pickle.loads(packed)  # many exceptions pickle, but do not unpickle
    except Exception:  # pickling runs code of the exception's class, which may raise anything
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
