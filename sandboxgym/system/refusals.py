"""Log lines of requests that a server refused, few enough that no client can fill a disk with them."""

from __future__ import annotations

import logging
import time

from sandboxgym.brief import brief

log = logging.getLogger("sandboxgym")

AGAIN = 3600.0
"""Seconds after which the same refusal is a warning once more."""
MOST = 1000
"""Warnings in that time."""


class Refusals:
    """Refused requests of the last hour, by client and kind."""

    def __init__(self) -> None:
        self._since, self._told = time.monotonic(), set[tuple[str, str]]()

    def tell(self, client: str, kind: str, said: str) -> None:
        """Log a refusal: as a warning if it is the first of its kind from this client in an hour, else for ``INFO``.

        Args:
            client: address of the client, without the port.
            kind: one of few, such as a status; nothing that a client chooses.
            said: reason that the client was given.
        """
        now = time.monotonic()
        if now - self._since > AGAIN:
            self._since, self._told = now, set()
        new = (client, kind) not in self._told and len(self._told) < MOST
        if new:
            self._told.add((client, kind))
        end = "; further warnings are left out for an hour" if new and len(self._told) == MOST else ""
        log.log(logging.WARNING if new else logging.INFO, "refused %s: %s: %s%s", client, kind, said[:400], end)


_REFUSALS = Refusals()


def tell(client: object, kind: str, said: object) -> None:
    """Log a refusal of any server of this process, see `Refusals.tell`.

    Args:
        client: address with the port, as ASGI has it, or a name; None: unknown.
        kind: see there.
        said: reason, in which line breaks and other control characters are escaped.
    """
    host = client[0] if isinstance(client, tuple | list) and client else client
    _REFUSALS.tell(brief(host, 60).strip("'"), kind, brief(str(said), 300))
