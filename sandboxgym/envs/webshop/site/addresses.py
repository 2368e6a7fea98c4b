"""Addresses of the website: every page but the last is fully determined by its own, so links, "back" and reload work.

Keywords and options are in the query string, which can hold any character, even ``/``.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, unquote, urlencode

from sandboxgym.envs.webshop.shop_state import SUB_PAGES, ShopPage, SubPage

_OPTION = "option."
_SUB_PAGES: dict[str, SubPage] = {name.lower(): name for name in SUB_PAGES}


def path_of(place: ShopPage, sid: str) -> str:
    """Write the path and query string of a page.

    >>> path_of(ShopPage("item", "red / blue", 1, "B000000000", (("size", "10 x 8"),)), "s1")
    '/s/s1/item/B000000000?q=red+%2F+blue&page=1&option.size=10+x+8'
    """
    home = f"/s/{quote(sid, safe='')}"
    fields = [("q", place.query or ""), ("page", str(place.number))]
    fields += [(_OPTION + group, value) for group, value in place.options]
    item = f"{home}/item/{quote(place.asin or '', safe='')}"
    match place.page:
        case "search":
            return home
        case "results":
            return f"{home}/results?{urlencode(fields)}"
        case "item":
            return f"{item}?{urlencode(fields)}"
        case "sub_page":
            return f"{item}/{(place.sub_page or '').lower()}?{urlencode(fields)}"
        case "done":
            return f"{home}/done"


def place_of(address: str) -> tuple[str, ShopPage] | None:
    """Parse an address to the session's name and the page; None for the last page, or if there is no such page.

    >>> place = ShopPage("item", "red / blue", 1, "B000000000", (("size", '10" x 8'),))
    >>> place_of(path_of(place, "s1")) == ("s1", place)
    True
    """
    names, fields = split_address(address)
    options = {name.removeprefix(_OPTION): value for name, value in fields.items() if name.startswith(_OPTION)}
    query, number = fields.get("q"), _number(fields.get("page", "1"))
    match names:
        case ["s", sid]:
            return sid, ShopPage()
        case _ if query is None or number is None:
            return None
        case ["s", sid, "results"]:
            return sid, ShopPage("results", query, number)
        case ["s", sid, "item", asin]:
            return sid, ShopPage("item", query, number, asin, tuple(options.items()))
        case ["s", sid, "item", asin, sub_page] if sub_page in _SUB_PAGES:
            return sid, ShopPage("sub_page", query, number, asin, tuple(options.items()), _SUB_PAGES[sub_page])
    return None


def split_address(address: str) -> tuple[list[str], dict[str, str]]:
    """Split an address into the parts of its path and the fields of its query string; of equal names the last counts.

    >>> split_address("//s/a%2Fb/results?q=1&q=2")
    (['s', 'a/b', 'results'], {'q': '2'})
    """
    path, _, query = address.partition("#")[0].partition("?")
    names = [unquote(name) for name in path.split("/") if name]
    return names, dict(parse_qsl(query, keep_blank_values=True))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else None
