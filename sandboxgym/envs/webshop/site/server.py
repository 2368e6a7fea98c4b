"""The website's server: one `Shop`, and a small table of sessions.

1. It listens on the loopback interface unless told otherwise, needs the standard library only and loads nothing. It
   answers to its own names only.
2. An address determines its page (``addresses.py``); the server keeps only the rest of a session: the goal, the
   products looked at, the purchase. The owner of the `Site` can read and write that table, which is how the browser
   environment snapshots it.
3. "Back", reload and a form sent twice work as visitors expect; a purchase is final.
4. Errors are pages with a sentence and a status of 4xx, never a traceback.
5. No visitor can lock out the others: connections (``connections.py``) and sessions (``sessions.py``) are bounded, in
   all and per address.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Self

from sandboxgym.envs.webshop.shop import Shop
from sandboxgym.envs.webshop.shop_state import ShopPage, ShopState
from sandboxgym.envs.webshop.site import markup
from sandboxgym.envs.webshop.site.addresses import path_of, place_of, split_address
from sandboxgym.envs.webshop.site.connections import MOST_CONNECTIONS, MOST_PER_VISITOR, Listener
from sandboxgym.envs.webshop.site.messages import Response, VisitorRequest, problem
from sandboxgym.envs.webshop.site.sessions import OWNER, Sessions
from sandboxgym.envs.webshop.views import RESULTS_PER_PAGE
from sandboxgym.errors import SnapshotCorrupt

log = logging.getLogger("sandboxgym")
MOST_SESSIONS = 10_000


class _NoSuchPage(Exception):
    """Raised if there is no such page; the message is the middle of a sentence that says why."""


class Site:
    """The pages of a shop, by address; `Server` puts it on a port.

    Args:
        shop: the shop, with ``compat="default"``.
        goals: indices of the goals that visitors may get; by default all.

    Raises:
        ValueError: the shop has another ``compat``.
    """

    def __init__(self, shop: Shop, goals: Sequence[int] | None = None) -> None:
        if shop.compat != "default":
            raise ValueError(f"expected a shop with compat='default', found {shop.compat!r}")
        self.shop = shop
        self.goals = range(len(shop.goals)) if goals is None else goals
        self._sessions = Sessions()
        self._lock = threading.RLock()

    # The table.

    def open(self, session: ShopState, visitor: str = OWNER) -> str:
        """Add a session; returns its name, which cannot be guessed."""
        sid = secrets.token_urlsafe(9)
        self.put(sid, session, visitor)
        return sid

    def put(self, sid: str, session: ShopState, visitor: str = OWNER) -> None:
        """Set a session. At `MOST_SESSIONS`, the holder of most of them loses the least recently used one."""
        with self._lock:
            self._sessions.put(sid, session, visitor, most=MOST_SESSIONS)

    def session(self, sid: str) -> ShopState:
        """Look up a session.

        Raises:
            KeyError: there is no session of that name.
        """
        with self._lock:
            return self._sessions[sid]

    def drop(self, sid: str) -> None:
        """Remove a session."""
        with self._lock:
            self._sessions.pop(sid)

    # The pages.

    def answer(self, request: VisitorRequest, visitor: str) -> Response:
        """Answer a visitor's request; every failure is a page with a sentence."""
        names, fields = split_address(request.target)
        try:
            if request.method == "POST":
                return self.post(request.target)
            if names == ["start"]:
                return self._start(fields.get("goal", ""), visitor)
            return self.get(request.target)
        except Exception as error:  # the reason is for the server's log, not for the visitor
            log.error("the page %r could not be made: %r", request.target, error)
            log.debug("traceback of that error", exc_info=True)
            return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "This page could not be made.")

    def get(self, address: str) -> Response:
        """Show the page of an address; looking at it is what moves a session."""
        names, fields = split_address(address)
        match names:
            case []:
                return Response(HTTPStatus.OK, markup.welcome(len(self.shop.catalogue), len(self.goals)))
            case ["style.css"]:
                return Response(HTTPStatus.OK, markup.style(), content_type="text/css; charset=utf-8", lasting=True)
            case ["start"]:
                return self._start(fields.get("goal", ""), OWNER)
            case ["s", sid, *_]:
                with self._lock:
                    return self._visit(sid, address, names[2:] == ["done"])
        return problem(HTTPStatus.NOT_FOUND, "There is no such page.")

    def post(self, address: str) -> Response:
        """Buy the product at the address, the only form that is sent."""
        found = place_of(address)
        with self._lock:
            known = None if found is None else self._sessions.get(found[0])
            if known is None or found is None:
                return problem(HTTPStatus.NOT_FOUND, "There is no such form, or the visit is over.")
            sid, place = found
            if known.place.page != "done":  # else the form was sent twice
                try:
                    known = self.shop.act(self._moved(known, place), "click[buy now]", draw=_never)
                except _NoSuchPage as error:
                    return problem(HTTPStatus.NOT_FOUND, f"There is no such page: {error}.")
                if known.place.page != "done":
                    return problem(HTTPStatus.CONFLICT, "There is nothing to buy on this page.")
                self.put(sid, known)
            return _redirect(path_of(known.place, sid))

    def _visit(self, sid: str, address: str, last: bool) -> Response:
        known = self._sessions.get(sid)
        if known is None:
            return problem(HTTPStatus.NOT_FOUND, "There is no such page, or the visit is over.")
        if known.place.page == "done":  # there is no way back from a purchase
            return self._show(sid, known) if last else _redirect(path_of(known.place, sid))
        found = place_of(address)
        if found is None:
            sentence = "Nothing was bought yet." if last else "There is no such page."
            return problem(HTTPStatus.NOT_FOUND, sentence)
        _, place = found
        if place.query is not None and not place.query.strip():
            return _redirect(path_of(ShopPage(), sid))
        try:
            session = self._moved(known, place)
        except _NoSuchPage as error:
            return problem(HTTPStatus.NOT_FOUND, f"There is no such page: {error}.")
        self.put(sid, session)
        return self._show(sid, session)

    def _moved(self, session: ShopState, place: ShopPage) -> ShopState:
        """Move the session to another page, which changes the products looked at as the steps to it would."""
        if place.page == "search":
            return self.shop.start(session.goal)
        assert place.query is not None and place.number is not None
        searched = self.shop.act(self.shop.start(session.goal), f"search[{place.query}]", draw=_never).place
        if searched.query is None:
            raise _NoSuchPage("the path holds no keywords")
        last = max(1, -(-len(self.shop.results(searched)) // RESULTS_PER_PAGE))
        if not 1 <= place.number <= last:
            raise _NoSuchPage(f"the results have the pages 1 to {last}")
        if place.sub_page == "Attributes" and not self.shop.show_attributes:
            raise _NoSuchPage("attributes are not shown here")
        visited = session.visited
        if place.asin is not None and place.asin not in visited:
            visited = (*visited, place.asin)
        moved = ShopState(session.goal, replace(place, query=searched.query), visited)
        try:
            self.shop.check(moved)
        except SnapshotCorrupt as error:
            raise _NoSuchPage(str(error)) from error
        return moved

    def _show(self, sid: str, session: ShopState) -> Response:
        shop = self.shop

        def href(name: str) -> str:
            return path_of(shop.act(session, f"click[{name}]", draw=_never).place, sid)

        return Response(HTTPStatus.OK, markup.document(shop.view(session), href, home=path_of(ShopPage(), sid)))

    def _start(self, goal: str, visitor: str) -> Response:
        last = len(self.goals) - 1
        if goal and not (goal.isdecimal() and goal.isascii() and len(goal) < 10 and int(goal) <= last):
            return problem(HTTPStatus.NOT_FOUND, f"There are the tasks 0 to {last}.")
        index = self.goals[int(goal) if goal else random.randrange(last + 1)]
        return _redirect(path_of(ShopPage(), self.open(self.shop.start(index), visitor)))


class Server:
    """A `Site` on a port, served by threads until `close`; a context manager.

    Args:
        site: the site to serve.
        host: address of the interface.
        port: number of the port; 0 takes a free one.
        names: host names of the site, in addition to ``localhost``, ``host`` and the address that a visitor reached.
        connections: largest number of connections at once; new ones replace idle ones.
        connections_per_visitor: largest number of connections of one address; set it to ``connections`` if visitors
            come through a proxy.

    Raises:
        OSError: the port is taken, or this process may not use it.
    """

    def __init__(
        self,
        site: Site,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        names: Collection[str] = (),
        connections: int = MOST_CONNECTIONS,
        connections_per_visitor: int = MOST_PER_VISITOR,
    ) -> None:
        self.site = site
        self._http = Listener(
            host, port, site.answer, names=names, most=connections, most_per_visitor=connections_per_visitor
        )
        self.port: int = self._http.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True, name="webshop-site")
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and hang up on everybody. Idempotent."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _redirect(location: str) -> Response:
    return Response(HTTPStatus.SEE_OTHER, location=location)


def _never() -> int:
    raise AssertionError("only compat='upstream' draws")
