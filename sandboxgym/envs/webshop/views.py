"""`View`: the content of a page of the shop as an immutable value, before any text or markup.

All renderers show this value: :mod:`.text_pages` as text, `web.html` as HTML for mode ``html``, and `site.markup` as
the website. The effects of ``compat`` on pages (buttons, names of options, marks of chosen ones) are decided here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from sandboxgym.envs.webshop.catalogues.catalogue import Catalogue, Product
from sandboxgym.envs.webshop.goals import Goal
from sandboxgym.envs.webshop.reward import Reward
from sandboxgym.envs.webshop.shop_state import SUB_PAGES, Compat, Options, PageType, ShopPage, SubPage

BASE_URL = "http://127.0.0.1:3000"
RESULTS_PER_PAGE = 10
SEARCH, BACK, PREV, NEXT, BUY = "Search", "Back to Search", "< Prev", "Next >", "Buy Now"
_BUTTON_NAMES = frozenset(name.lower() for name in (SEARCH, BACK, PREV, NEXT, BUY, *SUB_PAGES))


class Click(NamedTuple):
    """A clickable element of a page of the shop."""

    kind: Literal["button", "product", "option"]
    value: str
    """Button's text, asin, or option's value."""
    group: str = ""
    """Group of an option."""


@dataclass(frozen=True, slots=True)
class ProductRow:
    """A product among the results."""

    asin: str
    title: str
    price: str
    image: str
    visited: bool


@dataclass(frozen=True, slots=True)
class OptionChoice:
    """An option that can be chosen."""

    value: str
    name: str
    """Name to click: the value, or "group: value" if the value alone would name something else too."""
    selected: bool


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options of which one can be chosen."""

    name: str
    choices: tuple[OptionChoice, ...]


@dataclass(frozen=True, slots=True)
class Purchase:
    """A purchase and its reward."""

    asin: str
    options: Options
    reward: Reward


@dataclass(frozen=True, slots=True)
class View:
    """Content of a page of the shop, before it is rendered."""

    page: PageType
    compat: Compat
    instruction: str
    url: str
    """Address in the original's form, with the goal's index as the name of the session."""
    buttons: tuple[str, ...]
    """Labels of the buttons, in the order of the page."""
    clickables: Mapping[str, Click]
    """Clickable elements by name."""
    query: str = ""
    number: int = 0
    total: int = 0
    """Number of results on all pages together."""
    rows: tuple[ProductRow, ...] = ()
    product: Product | None = None
    """Product of an item page and of its sub-pages."""
    groups: tuple[OptionGroup, ...] = ()
    sub_page: SubPage | None = None
    purchase: Purchase | None = None

    @property
    def has_search_bar(self) -> bool:
        """Tell whether keywords can be typed here."""
        return self.page == "search"


def view_of(
    place: ShopPage,
    goal: Goal,
    session: int | str,
    catalogue: Catalogue,
    *,
    compat: Compat,
    found: Sequence[str] = (),
    visited: Sequence[str] = (),
    bought: Reward | None = None,
    show_attributes: bool = False,
) -> View:
    """Make the view of a place.

    Args:
        place: the page to show.
        goal: the goal of the episode.
        session: name of the session in the address.
        catalogue: the products of the shop.
        compat: see `Compat`.
        found: all results, on a page of results.
        visited: products to be marked there.
        bought: the reward, on the last page.
        show_attributes: whether item pages lead to a page with the product's hidden attributes.
    """
    url = url_of(place, session)
    product = catalogue[place.asin] if place.page in ("item", "sub_page") and place.asin is not None else None
    number, total = place.number or 0, len(found)
    rows: tuple[ProductRow, ...] = ()
    groups: tuple[OptionGroup, ...] = ()
    if place.page == "results":
        rows = tuple(
            ProductRow(item.asin, item.title, item.price_text, item.image, item.asin in visited)
            for item in map(catalogue.__getitem__, page_of(found, number))
        )
    elif place.page == "item":
        assert product is not None
        groups = _groups(product, place.options, url, compat)
    buttons = _buttons(place.page, number, total, compat, show_attributes)
    clickables: dict[str, Click] = {}
    for name, click in _clicks(buttons, rows, groups, compat):
        clickables[name] = click
    purchase = None
    if place.page == "done":
        assert place.asin is not None and bought is not None
        purchase = Purchase(place.asin, place.options, bought)
    return View(
        page=place.page,
        compat=compat,
        instruction=goal.instruction,
        url=url,
        buttons=buttons,
        clickables=MappingProxyType(clickables),
        query=place.query or "",
        number=number,
        total=total,
        rows=rows,
        product=product,
        groups=groups,
        sub_page=place.sub_page,
        purchase=purchase,
    )


def page_of(found: Sequence[str], number: int) -> Sequence[str]:
    """Results on a page. Pages 0 and below, which the original can be led to, count from the end."""
    return found[(number - 1) * RESULTS_PER_PAGE : number * RESULTS_PER_PAGE]


def url_of(place: ShopPage, session: int | str) -> str:
    """Write the address that the original's text environment would show."""
    if place.page == "search":
        return f"{BASE_URL}/{session}"
    keywords = (place.query or "").replace(" ", "+")
    match place.page:
        case "results":
            return f"{BASE_URL}/search_results/{session}/{keywords}/{place.number}"
        case "item":
            chosen = json.dumps(dict(place.options))
            return f"{BASE_URL}/item_page/{session}/{place.asin}/{keywords}/{place.number}/{chosen}"
        case "sub_page":
            here = f"{place.asin}/{keywords}/{place.number}/{place.sub_page}"
            return f"{BASE_URL}/item_sub_page/{session}/{here}/{dict(place.options)}"
        case "done":
            return f"{BASE_URL}/done/{session}/{place.asin}/{dict(place.options)}"


def _buttons(page: PageType, number: int, total: int, compat: Compat, show_attributes: bool) -> tuple[str, ...]:
    match page:
        case "search":
            return (SEARCH,)
        case "results":
            before = (PREV,) if number > 1 else ()
            after = (NEXT,) if compat == "upstream" or number * RESULTS_PER_PAGE < total else ()
            return (BACK, *before, *after)
        case "item":
            return (BACK, PREV, *SUB_PAGES[: 4 if show_attributes else 3], BUY)
        case "sub_page":
            return (BACK, PREV)
        case "done":
            return ()


def _groups(product: Product, options: Options, url: str, compat: Compat) -> tuple[OptionGroup, ...]:
    if compat == "upstream":

        def name(group: str, value: str) -> str:
            return value

        def selected(group: str, value: str) -> bool:
            return f'"{value}"' in url  # also the name of a group or a quoted keyword, but no value that JSON escapes
    else:
        chosen = dict(options)
        counts = Counter(name for values in product.options.values() for name in set(map(_one_line, values)))

        def name(group: str, value: str) -> str:
            value = _one_line(value)
            return f"{_one_line(group)}: {value}" if counts[value] > 1 or value in _BUTTON_NAMES else value

        def selected(group: str, value: str) -> bool:
            return chosen.get(group) == value

    return tuple(
        OptionGroup(group, tuple(OptionChoice(value, name(group, value), selected(group, value)) for value in values))
        for group, values in product.options.items()
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _clicks(
    buttons: tuple[str, ...], rows: tuple[ProductRow, ...], groups: tuple[OptionGroup, ...], compat: Compat
) -> Iterator[tuple[str, Click]]:
    """Index clickable elements by name; of equal names the later one counts."""
    for button in buttons:
        if compat == "upstream" or button != SEARCH:  # that click does nothing
            yield button.lower(), Click("button", button)
    for row in rows:
        yield row.asin.lower(), Click("product", row.asin)
    for group in groups:
        for choice in group.choices:
            yield choice.name, Click("option", choice.value, group.name)
