"""A counter that moves while an environment answers: another process watches it, and sees a call that never returns.

Nothing happens unless `share` was called before the process that is to be watched was forked.
"""

from __future__ import annotations

import mmap

_WIDTH = 8
_page: mmap.mmap | None = None
_count = 0


def share() -> mmap.mmap:
    """Give this process, and those forked from it, a counter that all of them see."""
    global _page
    _page = mmap.mmap(-1, mmap.PAGESIZE)
    return _page


def beat() -> None:
    """Count a call that is about to be made, or has returned."""
    global _count
    if _page is not None:
        _count += 1
        _page[:_WIDTH] = _count.to_bytes(_WIDTH, "little")


def read(page: mmap.mmap) -> int:
    """The number of beats so far."""
    return int.from_bytes(page[:_WIDTH], "little")


def forget() -> None:
    """Stop counting, in this process."""
    global _page
    _page = None
