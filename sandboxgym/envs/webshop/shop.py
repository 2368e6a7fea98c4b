"""`Shop`: data shared by all environments of a process, and the transitions of a `ShopState` as pure functions.

A shop is immutable: catalogue, goals, prices, search, noun tagger and rules. Environments with equal arguments share
one shop and its cache of pages, so forks that reach the same page build it once. The state of an episode is a small
value (:mod:`.shop_state`); `Shop.act` returns the next one.

``compat="upstream"`` follows the original's text environment exactly:

- a search is possible on every page, even after a purchase, and the episode then continues as if nothing had happened;
- ``next >`` is always there, and leads to empty pages;
- the target of ``< prev`` is derived from the address, so that keywords such as "search_results" mislead it;
- of two options with the same value only the later can be chosen; an option named like a button is that button;
- keywords that begin with ``<r>``, ``<c>`` or ``<q>`` list random products, a category, or the products behind a hidden
  query. Where the original raises an error (``<a>``, ``<c>`` without a category, ``<r>`` in too small a catalogue)
  nothing happens.

``compat="default"`` has none of that: a search needs the search bar, a purchase ends the episode and nothing happens
after it, pages end, every option can be chosen, and keywords are just words.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import get_args

from sandboxgym.brief import brief
from sandboxgym.envs.webshop import actions, text_pages, views
from sandboxgym.envs.webshop.catalogues.catalogue import Catalogue, load_catalogue
from sandboxgym.envs.webshop.goals import Goal, Goals, Kind
from sandboxgym.envs.webshop.goals import goals as all_goals
from sandboxgym.envs.webshop.retrieval.search import Search, open_search
from sandboxgym.envs.webshop.reward import Reward, reward
from sandboxgym.envs.webshop.shop_state import SUB_PAGES, Compat, Options, PageType, ShopPage, ShopState
from sandboxgym.envs.webshop.views import View
from sandboxgym.envs.webshop.words.nouns import Nouns, open_nouns
from sandboxgym.errors import SnapshotCorrupt

RANDOM_RESULTS = 50
Tagger = Callable[[str], Iterable[str]]
_OPEN_SHOPS = 8
_CACHED_PAGES = 1024
_CACHED_REWARDS = 4096
_SEARCH, _BACK, _PREV, _NEXT, _BUY = map(str.lower, (views.SEARCH, views.BACK, views.PREV, views.NEXT, views.BUY))
_NEEDS: dict[PageType, tuple[str, ...]] = {
    "search": (),
    "results": ("query", "number"),
    "item": ("query", "number", "asin"),
    "sub_page": ("query", "number", "asin"),
    "done": ("asin",),
}
"""Attributes that places of each kind of page have."""
_SUB_PAGES = {name.lower(): name for name in SUB_PAGES}


@dataclass(frozen=True, slots=True)
class Page:
    """A page, with what environments need for the observation and ``info``."""

    goal: Goal
    view: View
    clickables: tuple[str, ...]
    commands: tuple[str, ...]
    """Valid actions here: every click, and a search for the instruction where keywords can be typed."""
    progress_key: str
    """Kind of page, whether it shows the goal's product, and the number of the goal's options that are chosen."""
    state_hash: str
    texts: dict[text_pages.ObservationMode, str] = field(default_factory=dict, compare=False, repr=False)
    """Observations by mode, each added when it is first asked for."""

    def text(self, mode: text_pages.ObservationMode) -> str:
        """Observation of the page."""
        found = self.texts.get(mode)
        if found is None:
            found = self.texts[mode] = text_pages.RENDERERS[mode](self.view)
        return found


class Shop:
    """The shop and its rules; see the module's description.

    Args:
        catalogue, goals, search, nouns: the parts of the shop.
        compat: see `Compat`.
        show_attributes: link item pages to a page with the product's hidden attributes.
        identity: name of the shop that is part of every `Page.state_hash`.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        goals: Goals,
        search: Search,
        nouns: Nouns,
        *,
        compat: Compat = "default",
        show_attributes: bool = False,
        identity: str = "",
    ) -> None:
        self.catalogue = catalogue
        self.goals = goals
        self.search = search
        self.nouns = nouns
        self.compat = compat
        self.show_attributes = show_attributes
        self.identity = identity
        self.worth = functools.lru_cache(_CACHED_REWARDS)(self._worth)
        self._page = functools.lru_cache(_CACHED_PAGES)(self._build_page)

    # Looking.

    def page(self, session: ShopState) -> Page:
        """Page of a session."""
        return self._page(session.goal, session.place, session.visited)

    def prospect(self, session: ShopState) -> float | None:
        """Reward for buying now; on a page of results, the mean over its products; None on the search page.

        Raises:
            NounsUnknown: the shop does not know the nouns of a title.
        """
        place = session.place
        if place.page != "results":
            return None if place.asin is None else self.worth(session.goal, place.asin, place.options).total
        worths = [self.worth(session.goal, row.asin, ()).total for row in self.view(session).rows]
        return sum(worths) / len(worths) if worths else 0.0

    def features(self, session: ShopState) -> tuple[float, ...]:
        """Features from which a trainer may learn state values.

        They are the kind of page, the reward for buying now (on a page of results, the mean over its products), and
        that reward with the goal's options chosen (on a page of results, for the best product).

        Raises:
            NounsUnknown: see `prospect`.
        """
        place = session.place
        if place.page == "results":
            shown = [row.asin for row in self.view(session).rows]
        else:
            shown = [] if place.asin is None else [place.asin]
        best = [self.worth(session.goal, asin, self._wanted(session.goal, asin, place.options)).total for asin in shown]
        page = [float(place.page == name) for name in ("results", "item", "sub_page")]
        return (*page, self.prospect(session) or 0.0, max(best, default=0.0))

    def _wanted(self, goal: int, asin: str, chosen: Options) -> Options:
        """Options chosen, with the goal's added where a product has them."""
        offered, wanted = self.catalogue[asin].options, dict(chosen)
        for option in self.goals[goal].options:
            group, value = option if isinstance(option, tuple) else (None, option)
            names = [name for name, values in offered.items() if name == (group or name) and value in values]
            wanted |= {names[0]: value} if names else {}
        return tuple(wanted.items())

    def observe(self, session: ShopState, mode: text_pages.ObservationMode) -> str:
        """Observation of the page."""
        return self.page(session).text(mode)

    def view(self, session: ShopState) -> View:
        """View of the page."""
        return self.page(session).view

    def bought(self, session: ShopState) -> Reward | None:
        """Reward of the purchase, on the page after it."""
        place = session.place
        if place.page != "done":
            return None
        assert place.asin is not None
        return self.worth(session.goal, place.asin, place.options)

    def results(self, place: ShopPage) -> Sequence[str]:
        """Asins that a search finds, on all its pages together."""
        assert place.query is not None
        words = place.query.split(" ")
        if self.compat == "upstream":
            match words[0]:
                case "<r>":
                    drawn = random.Random(place.draw).sample(range(len(self.catalogue)), RANDOM_RESULTS)
                    return [self.catalogue.at(position).asin for position in drawn]
                case "<c>":
                    return self.catalogue.in_category(words[1].strip())
                case "<q>":
                    return self.catalogue.in_query(" ".join(words[1:]).strip())
        return [asin for asin in self.search(place.query) if asin in self.catalogue]

    # Acting.

    def start(self, goal: int) -> ShopState:
        """Start a session with a goal.

        Args:
            goal: its index in the whole list of goals.
        """
        return ShopState(goal)

    def act(self, session: ShopState, text: str, *, draw: Callable[[], int]) -> ShopState:
        """Return the session after an action; if the action does nothing here, only reward and flags change.

        Args:
            session: the session before the action.
            text: such as "search[red shoes]" or "click[buy now]"; see `actions.parse`.
            draw: function that returns a seed; called where the original draws at random (``<r>`` only).
        """
        action = actions.parse(text, self.compat)
        over = self.compat == "default" and session.place.page == "done"
        following = None
        if action is not None and not over:
            if action.verb == "search":
                following = self._search(session, action.argument, draw)
            else:
                following = self._click(session, action.argument, draw)
        return replace(session, reward=0.0, done=over, valid_action=False) if following is None else following

    def _search(self, session: ShopState, query: str, draw: Callable[[], int]) -> ShopState | None:
        if self._raises(query) or (self.compat == "default" and session.place.page != "search"):
            return None
        return self._results(session, query, 1, draw)

    def _raises(self, query: str) -> bool:
        """Tell whether the original raises an error."""
        if self.compat == "default":
            return False
        words = query.split(" ")
        match words[0]:
            case "<a>":
                return True
            case "<c>":
                return len(words) < 2
            case "<r>":
                return len(self.catalogue) < RANDOM_RESULTS
        return False

    def _random(self, query: str) -> bool:
        return self.compat == "upstream" and query.split(" ")[0] == "<r>"

    def _click(self, session: ShopState, name: str, draw: Callable[[], int]) -> ShopState | None:
        page, place = self.page(session), session.place
        click = page.view.clickables.get(name)
        if click is None or name == _SEARCH:
            return None
        # In the original the name alone decides, whatever was clicked.
        button = name if self.compat == "upstream" or click.kind == "button" else ""
        if button == _BUY:
            return self._buy(session)
        if button == _BACK:
            return ShopState(session.goal)
        if button in (_NEXT, _PREV):
            turned = self._turn(session, 1 if button == _NEXT else -1, page.view, draw)
            if turned is not None:
                return turned
        if button in _SUB_PAGES:
            sub_page = _SUB_PAGES[button]
            return _moved(session, replace(place, page="sub_page", sub_page=sub_page), sub_page)
        if click.kind == "product":
            visited = session.visited if click.value in session.visited else (*session.visited, click.value)
            item = replace(place, page="item", asin=click.value)
            return _moved(replace(session, visited=visited), item, "asin")
        if click.kind == "option":
            options = _chosen(place.options, click.group, click.value)
            return _moved(session, replace(place, page="item", options=options), "options")
        return _moved(session, replace(place, page="item", sub_page=None))  # from a sub page

    def _turn(self, session: ShopState, by: int, view: View, draw: Callable[[], int]) -> ShopState | None:
        """Turn to another page of the results, or back to them; None if neither."""
        place = session.place
        assert place.query is not None and place.number is not None
        here = _named_by(view.url) if self.compat == "upstream" else place.page
        if here == "results":
            return self._results(session, place.query, place.number + by, draw)
        if here == "item" and by < 0:
            return self._results(session, place.query, place.number, draw)
        return None

    def _results(self, session: ShopState, query: str, number: int, draw: Callable[[], int]) -> ShopState:
        drawn = draw() if self._random(query) else None
        return _moved(session, ShopPage("results", query, number, draw=drawn), "search")

    def _buy(self, session: ShopState) -> ShopState:
        place = replace(session.place, page="done", sub_page=None)
        assert place.asin is not None
        worth = self.worth(session.goal, place.asin, place.options)
        return replace(_moved(session, place, "purchase"), reward=worth.total, done=True)

    # What is kept of it.

    def _worth(self, goal: int, asin: str, options: Options) -> Reward:
        product = self.catalogue[asin]
        price = self.goals.prices[asin]
        return reward(self.goals[goal], product, price=price, options=dict(options), nouns=self.nouns)

    def _build_page(self, goal: int, place: ShopPage, visited: tuple[str, ...]) -> Page:
        wanted = self.goals[goal]
        view = views.view_of(
            place,
            wanted,
            goal,
            self.catalogue,
            compat=self.compat,
            found=self.results(place) if place.page == "results" else (),
            visited=visited,
            bought=self.bought(ShopState(goal, place)),
            show_attributes=self.show_attributes,
        )
        names = [name for name in view.clickables if name != _SEARCH and self._can_be_typed(name)]
        search = [actions.search_for(view.instruction)] if view.has_search_bar else []
        key = f"{self.identity}\n".encode() + ShopState(goal, place, tuple(sorted(visited))).encode()
        return Page(
            goal=wanted,
            view=view,
            clickables=tuple(view.clickables),
            commands=(*search, *(f"click[{name}]" for name in names)),
            progress_key=_progress(view, wanted, place),
            state_hash=blake2b(key, digest_size=16).hexdigest(),
        )

    def _can_be_typed(self, name: str) -> bool:
        return self.compat == "default" or not ("[" in name or "\n" in name)

    def check(self, session: ShopState) -> None:
        """Refuse a session that this shop cannot have.

        Raises:
            SnapshotCorrupt: the session is impossible; the message says why.
        """
        place = session.place
        if not 0 <= session.goal < len(self.goals):
            raise SnapshotCorrupt(f"expected a goal below {len(self.goals)}, found {session.goal}")
        needs = _NEEDS[place.page]
        lacks = [name for name in needs if getattr(place, name) is None]
        if lacks or (place.sub_page is None) == (place.page == "sub_page"):
            raise SnapshotCorrupt(f"expected a page with {needs}, found {brief(place)}")
        query = place.query
        if query is not None and (self._raises(query) or (self._random(query) and place.draw is None)):
            raise SnapshotCorrupt(f"a search for {brief(query, 100)} finds no page")
        if place.asin is None:
            return
        if place.asin not in self.catalogue:
            raise SnapshotCorrupt(f"expected a product of {self.catalogue.name}, found {brief(place.asin, 100)}")
        offered = self.catalogue[place.asin].options
        for group, value in place.options:
            if value not in offered.get(group, ()):
                raise SnapshotCorrupt(f"{place.asin} has no option {brief(group, 100)} = {brief(value, 100)}")


def _moved(session: ShopState, place: ShopPage, what: str | None = None) -> ShopState:
    """Move the session to another place, with ``what`` counted."""
    counts = session.actions
    if what is not None:
        counted = dict(counts)
        counted[what] = counted.get(what, 0) + 1
        counts = tuple(counted.items())
    return ShopState(session.goal, place, session.visited, counts)


def _chosen(options: Options, group: str, value: str) -> Options:
    return tuple({**dict(options), group: value}.items())


def _named_by(url: str) -> str | None:
    """Page that the original takes an address for: the first of these names that is anywhere in it."""
    for name, page in (("search_results", "results"), ("item_page", "item"), ("item_sub_page", "sub_page")):
        if name in url:
            return page
    return None


def _progress(view: View, goal: Goal, place: ShopPage) -> str:
    if view.page == "results":
        return "results goal" if any(row.asin == goal.asin for row in view.rows) else "results"
    if place.asin is None:
        return view.page
    chosen = dict(place.options)
    met = [
        chosen.get(option[0]) == option[1] if isinstance(option, tuple) else option in chosen.values()
        for option in goal.options
    ]
    return f"{view.page}{' goal' if place.asin == goal.asin else ''} {sum(met)}/{len(met)}"


def open_shop(
    catalogue: str | os.PathLike[str] = "embedded",
    goals: Kind = "synthetic",
    *,
    price_seed: int = 0,
    nouns: str | os.PathLike[str] | None = None,
    pos: str | Tagger = "embedded",
    search_backend: str = "bm25",
    compat: Compat = "default",
    show_attributes: bool = False,
) -> Shop:
    """Open the shop with these arguments, one object per process.

    Args:
        catalogue: see `load_catalogue`.
        goals: "synthetic" or "human".
        price_seed: seed of the prices within a range and of the price caps in goals.
        nouns: JSON file with the nouns of titles.
        pos: tagger of the titles that are not in the file, or of all titles without a file; see `open_nouns`.
        search_backend: see `open_search`.
        compat: see `Compat`.
        show_attributes: see `Shop`.

    Raises:
        CatalogueNotFound, CatalogueMalformed: see `load_catalogue`; also for human goals that the catalogue lacks.
        ValueError: an argument is unknown, or the catalogue has no goals of this kind.
        DependencyNotInstalled: the search or the tagger needs a package that is not installed.
        FileNotFoundError: the file of ``nouns`` is missing.
        OSError: the index of a large catalogue cannot be written.
    """
    if compat not in get_args(Compat):
        raise ValueError(f"expected compat to be one of {get_args(Compat)}, found {compat!r}")
    if goals not in get_args(Kind):
        raise ValueError(f"expected goals to be one of {get_args(Kind)}, found {goals!r}")
    products = load_catalogue(catalogue)
    file = None if nouns is None else Path(nouns)
    return _opened(products, goals, price_seed, file, pos, search_backend, compat, show_attributes)


@functools.lru_cache(_OPEN_SHOPS)
def _opened(
    catalogue: Catalogue,
    kind: Kind,
    price_seed: int,
    nouns: Path | None,
    pos: str | Tagger,
    search_backend: str,
    compat: Compat,
    show_attributes: bool,
) -> Shop:
    return Shop(
        catalogue,
        all_goals(catalogue, kind, price_seed=price_seed),
        open_search(catalogue, search_backend),
        open_nouns(pos) if nouns is None else open_nouns(nouns, fallback=pos),
        compat=compat,
        show_attributes=show_attributes,
        identity=f"{catalogue.digest} {kind} {price_seed} {compat}",
    )
