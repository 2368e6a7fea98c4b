"""A shared counter of an environment's calls, by which a watching process sees a call that never returns.

Nothing is counted unless `share` was called with a file that both processes have open.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeVar

from sandboxgym.conformance.supervision import processes

T = TypeVar("T")

_WIDTH = 8
_page: mmap.mmap | None = None
_count = 0


def share(descriptor: int) -> None:
    """Count in the first bytes of an open file, which has at least one page of memory."""
    global _page
    _page = mmap.mmap(descriptor, mmap.PAGESIZE)


def beat() -> None:
    """Count a call that is about to be made, or has returned."""
    global _count
    if _page is not None:
        _count += 1
        _page[:_WIDTH] = _count.to_bytes(_WIDTH, "little")


def weigh(take: Callable[[], T]) -> T:
    """Call ``take``, which takes a snapshot, and record the growth of memory if it is the largest so far."""
    if _page is None:
        return take()
    before = processes.resident()
    snap = take()
    size = processes.resident() - before
    if size > largest(_page):
        _page[_WIDTH : 2 * _WIDTH] = size.to_bytes(_WIDTH, "little")
    return snap


def read(page: mmap.mmap) -> int:
    """The number of beats so far."""
    return int.from_bytes(page[:_WIDTH], "little")


def largest(page: mmap.mmap) -> int:
    """Bytes of the largest growth of memory by a snapshot so far."""
    return int.from_bytes(page[_WIDTH : 2 * _WIDTH], "little")
