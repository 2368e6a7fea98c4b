"""`ShopState`: the state of an episode in the shop as one small immutable value, and its encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from sandboxgym import serialization as durable
from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt

Compat = Literal["default", "upstream"]
"""Compatibility: "upstream" keeps every quirk of the original, "default" closes them."""
PageType = Literal["search", "results", "item", "sub_page", "done"]
SubPage = Literal["Description", "Features", "Reviews", "Attributes"]
Options = tuple[tuple[str, str], ...]
"""Chosen options as (group, value), in the order in which the groups were first chosen from."""

PAGES: tuple[PageType, ...] = get_args(PageType)
SUB_PAGES: tuple[SubPage, ...] = get_args(SubPage)
_MAX_BYTES = 2**20
_MAX_INTEGER = 2**64
"""Limit of integers, above the seeds that are drawn; page numbers (below 0 upstream) and counts are far smaller."""


@dataclass(frozen=True, slots=True)
class ShopPage:
    """A page of the shop, without the session it belongs to."""

    page: PageType = "search"
    query: str | None = None
    """Query of the results seen last; None before the first search."""
    number: int | None = None
    """Number of the results page, from 1."""
    asin: str | None = None
    """Asin of the page's product."""
    options: Options = ()
    sub_page: SubPage | None = None
    draw: int | None = None
    """Seed that determines the products of the original's random search (``<r>``)."""


@dataclass(frozen=True, slots=True)
class ShopState:
    """Snapshot state of `WebShopEnv`."""

    goal: int
    """Index in the list of all goals, whatever the split."""
    place: ShopPage = ShopPage()
    visited: tuple[str, ...] = ()
    """Products looked at since the search page, in order of the first visit."""
    actions: tuple[tuple[str, int], ...] = ()
    """Counts of actions by kind since the search page, as the original counts them."""
    reward: float = 0.0
    """Reward of the last step."""
    done: bool = False
    """True if the last step ended the episode."""
    valid_action: bool = True
    """True if the last step's action was valid."""

    def encode(self) -> bytes:
        """Encode the state as some tens or hundreds of bytes; a long query takes more."""
        place = self.place
        return durable.pack(
            [
                self.goal,
                PAGES.index(place.page),
                place.query,
                place.number,
                place.asin,
                [text for option in place.options for text in option],
                place.sub_page,
                place.draw,
                list(self.visited),
                [[what, count] for what, count in self.actions],
                self.reward,
                self.done,
                self.valid_action,
            ]
        )

    @classmethod
    def decode(cls, data: bytes) -> ShopState:
        """Decode the result of `encode`.

        Raises:
            SnapshotCorrupt: the bytes are not an encoded session. `Shop.check` tells whether the shop has its goal
                and its products.
        """
        if len(data) > _MAX_BYTES:
            raise SnapshotCorrupt(f"expected an encoded session, found {len(data)} bytes")
        values = durable.unpack(data)
        if not isinstance(values, list) or len(values) != len(_KINDS) or not all(map(_is, values, _KINDS)):
            raise SnapshotCorrupt(f"expected the fields of a ShopState, found {brief(values)}")
        goal, page, query, number, asin, options, sub_page, draw, visited, actions, reward, done, valid = values
        if page not in range(len(PAGES)) or len(options) % 2 or (sub_page is not None and sub_page not in SUB_PAGES):
            raise SnapshotCorrupt(f"expected the fields of a ShopState, found {brief(values)}")
        pairs = tuple(zip(options[::2], options[1::2], strict=True))
        place = ShopPage(PAGES[page], query, number, asin, pairs, sub_page, draw)
        counts = tuple((what, count) for what, count in actions)
        return cls(goal, place, tuple(visited), counts, reward, done, valid)


def _is(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):  # of such elements
        return isinstance(value, list) and all(_is(element, kind[0]) for element in value)
    if isinstance(kind, tuple):
        return isinstance(value, list) and len(value) == len(kind) and all(map(_is, value, kind))
    if isinstance(value, int) and not isinstance(value, bool) and not -_MAX_INTEGER < value < _MAX_INTEGER:
        return False
    return isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)


_KINDS: list[Any] = [
    int,
    int,
    str | None,
    int | None,
    str | None,
    [str],
    str | None,
    int | None,
    [str],
    [(str, int)],
    float,
    bool,
    bool,
]
