"""Typed errors of the snapshot contract. Messages say what was expected and what was found.

Content from an untrusted file may raise any type of exception; `SnapshotCorrupt` takes its place, except for errors
that do not come from the content (`from_outside`), which reach the caller unchanged.
"""

from __future__ import annotations

import errno
import functools
import signal
from types import CodeType
from typing import Any, ClassVar

from gymnasium.error import DependencyNotInstalled, ResetNeeded

__all__ = [
    "ResetNeeded",
    "SnapshotCorrupt",
    "SnapshotError",
    "SnapshotMismatch",
    "SnapshotMissing",
    "SnapshotNotSupported",
    "SnapshotReleased",
    "StoreFull",
    "from_outside",
]


class SnapshotError(Exception):
    """Base class of all snapshot errors."""


class SnapshotNotSupported(SnapshotError):
    """The environment, or a wrapper around it, cannot be captured faithfully."""


class SnapshotMismatch(SnapshotError):
    """The snapshot was taken from another environment, configuration or wrapper stack."""


class SnapshotReleased(SnapshotError):
    """The snapshot was released, and its resources are gone."""


class SnapshotCorrupt(SnapshotError):
    """The bytes are not an intact snapshot: bad magic, version, length, checksum or content."""


class SnapshotMissing(SnapshotError):
    """A store lacks the snapshot of a key, or a piece of it."""


_OUTSIDE = (MemoryError, TimeoutError, DependencyNotInstalled)
_MACHINE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class OutsideError(Exception):
    """Base class of errors that concern this machine, never the content that was read: see `from_outside`."""

    from_outside: ClassVar[bool] = True


class StoreFull(OutsideError, SnapshotError):
    """A store of snapshots has no room for another one; the message says how much it would take."""


def from_outside(error: BaseException) -> bool:
    """True if an error raised while content is read or applied is not caused by that content.

    1. No ``Exception``: an interrupt, an exit, a cancellation.
    2. What `from_handler` says.
    3. ``TimeoutError``, ``MemoryError``, a missing package, a full disk, no more descriptors, and what its class
       declares as of this machine (`OutsideError`). Readers of this package allocate no more than the content has, so
       that none of it can provoke these.
    """
    if not isinstance(error, Exception) or isinstance(error, (*_OUTSIDE, OutsideError)):
        return True
    if isinstance(error, OSError) and error.errno in _MACHINE:
        return True
    return from_handler(error)


def from_handler(error: BaseException) -> bool:
    """True if an installed signal handler raised the error, whatever its type: an alarm that is a user's time limit."""
    handlers = {code for number in signal.valid_signals() if (code := _code(signal.getsignal(number))) is not None}
    trace = error.__traceback__
    while trace is not None and handlers:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """The code object of a Python signal handler, unwrapped."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__") and callable(handler):
        handler = getattr(type(handler).__call__, "__func__", type(handler).__call__)
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
