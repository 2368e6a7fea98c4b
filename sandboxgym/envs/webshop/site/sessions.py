"""The table of sessions: bounded, and fair to visitors with few of them.

A visitor who opens sessions without end loses the oldest of their own, never those of others.
"""

from __future__ import annotations

from collections import OrderedDict

from sandboxgym.envs.webshop.shop_state import ShopState

OWNER = ""
"""Holder of sessions that no visitor opened, those of the site's owner; bounded by the table's size only."""
MOST_PER_HOLDER = 1_000
_UNIT = 1024
"""Approximate size in bytes that counts as one session; a session with very long keywords counts as more."""


class Sessions:
    """Sessions by name. Not thread-safe by itself."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}
        self._tables: dict[str, OrderedDict[str, ShopState]] = {}
        """Sessions of each holder, the least recently used first."""
        self._weights: dict[str, int] = {}
        """Size of each holder's sessions."""
        self._total = 0

    def __len__(self) -> int:
        return len(self._holders)

    def __getitem__(self, sid: str) -> ShopState:
        return self._tables[self._holders[sid]][sid]

    def get(self, sid: str) -> ShopState | None:
        """Get a session; None if there is none of that name."""
        return self[sid] if sid in self._holders else None

    def put(self, sid: str, session: ShopState, holder: str = OWNER, *, most: int) -> None:
        """Set a session, now the most recently used of its holder; a new one is the given holder's.

        If there are too many, the least recently used are removed: first those of a holder with more than
        `MOST_PER_HOLDER`, then those of the largest holder, until the table has at most ``most``.
        """
        holder = self._holders.get(sid, holder)
        self.pop(sid)
        self._holders[sid] = holder
        self._tables.setdefault(holder, OrderedDict())[sid] = session
        self._weigh(holder, _weight(session))
        while holder != OWNER and self._weights[holder] > MOST_PER_HOLDER and self._drop_oldest(holder, sid):
            pass
        while self._total > most and self._drop_oldest(max(self._weights, key=self._weights.__getitem__), sid):
            pass

    def pop(self, sid: str) -> None:
        """Remove a session, if there is one of that name."""
        holder = self._holders.pop(sid, None)
        if holder is not None:
            self._weigh(holder, -_weight(self._tables[holder].pop(sid)))
            if not self._tables[holder]:
                del self._tables[holder], self._weights[holder]

    def _drop_oldest(self, holder: str, but: str) -> bool:
        """Drop the oldest session of the largest holder; returns whether there was one."""
        oldest = next(sid for sid in self._tables[holder])
        if oldest == but:
            return False
        self.pop(oldest)
        return True

    def _weigh(self, holder: str, more: int) -> None:
        self._weights[holder] = self._weights.get(holder, 0) + more
        self._total += more


def _weight(session: ShopState) -> int:
    return 1 + (len(session.place.query or "") + sum(map(len, session.visited))) // _UNIT
