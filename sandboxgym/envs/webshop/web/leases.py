"""Shared resources of a process: made for their first user, closed with the last."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Closes(Protocol):
    """A resource that can be leased."""

    @property
    def alive(self) -> bool:
        """True if the resource still works; otherwise the next user gets a new one."""

    def close(self) -> None:
        """Release everything that the resource holds."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Closes)


@dataclass(slots=True)
class _Shared(Generic[V]):
    value: V
    users: int = 0
    process: int = 0


class SharedLease(Generic[V]):
    """The right to use a resource until `release`."""

    def __init__(self, shared: _Shared[V], release: Callable[[_Shared[V]], None]) -> None:
        self._shared: _Shared[V] | None = shared
        self._release = release
        self.value = shared.value

    @property
    def valid(self) -> bool:
        """Tell whether the resource works, in this process."""
        shared = self._shared
        return shared is not None and shared.process == os.getpid() and shared.value.alive

    def release(self) -> None:
        """Close the resource if no one else uses it. Idempotent; without effect in a forked child."""
        shared, self._shared = self._shared, None
        if shared is not None and shared.process == os.getpid():
            self._release(shared)


class Leases(Generic[K, V]):
    """Leases of the resources that a function makes, one per key.

    Args:
        make: function that makes the resource of a key, while other callers wait.
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._shared: dict[K, _Shared[V]] = {}
        self._lock = threading.Lock()
        atexit.register(self._close_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def take(self, key: K) -> SharedLease[V]:
        """Lease the resource of a key, which is made now if there is none that works."""
        with self._lock:
            shared = self._shared.get(key)
            if shared is None or not shared.value.alive:
                shared = self._shared[key] = _Shared(self._make(key), process=os.getpid())
            shared.users += 1
        return SharedLease(shared, lambda shared: self._release(key, shared))

    def _release(self, key: K, shared: _Shared[V]) -> None:
        with self._lock:
            shared.users -= 1
            if shared.users:
                return
            if self._shared.get(key) is shared:
                del self._shared[key]
            shared.value.close()

    def _close_all(self) -> None:
        for shared in list(self._shared.values()):
            with contextlib.suppress(Exception):  # of any resource: the others are closed all the same
                shared.value.close()
        self._shared.clear()

    def _forget(self) -> None:
        self._shared, self._lock = {}, threading.Lock()
