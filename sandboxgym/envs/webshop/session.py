"""`Session`: where an episode in the shop is, as one small immutable value, and its encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from sandboxgym import serialization as durable
from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt

Compat = Literal["default", "upstream"]
"""Whether the shop closes the original's quirks, or keeps every one of them."""
PageType = Literal["search", "results", "item", "sub_page", "done"]
SubPage = Literal["Description", "Features", "Reviews", "Attributes"]
Options = tuple[tuple[str, str], ...]
"""(group, value), in the order in which the groups were first chosen from."""

PAGES: tuple[PageType, ...] = get_args(PageType)
SUB_PAGES: tuple[SubPage, ...] = get_args(SubPage)
_MAX_BYTES = 2**20
_MAX_INTEGER = 2**64
"""Above the seeds that are drawn; numbers of pages and counts stay far below, in the original below 0 too."""


@dataclass(frozen=True, slots=True)
class Place:
    """A page of the shop, without whose it is."""

    page: PageType = "search"
    query: str | None = None
    """Of the results that were seen last; None before the first search."""
    number: int | None = None
    """Which page of the results, from 1."""
    asin: str | None = None
    """The product of the page."""
    options: Options = ()
    sub_page: SubPage | None = None
    draw: int | None = None
    """What the original's search for random products (``<r>``) drew this time."""


@dataclass(frozen=True, slots=True)
class Session:
    """All that a snapshot of `WebShopEnv` holds."""

    goal: int
    """Index in the whole list of goals, whatever the split."""
    place: Place = Place()
    visited: tuple[str, ...] = ()
    """Products looked at since the search page, in order of the first visit."""
    actions: tuple[tuple[str, int], ...] = ()
    """How often something of each kind was done since the search page, as the original counts it."""
    reward: float = 0.0
    """Of the last step."""
    done: bool = False
    """The last step said that the episode is over."""
    valid_action: bool = True
    """The last step did something."""

    def encode(self) -> bytes:
        """As bytes; some hundred of them unless the query is long."""
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
    def decode(cls, data: bytes) -> Session:
        """The inverse of `encode`.

        Raises:
            SnapshotCorrupt: the bytes are not an encoded session. Whether the shop has its goal and its products is
                for `Shop.check` to say.
        """
        if len(data) > _MAX_BYTES:
            raise SnapshotCorrupt(f"expected an encoded session, found {len(data)} bytes")
        values = durable.unpack(data)
        if not isinstance(values, list) or len(values) != len(_KINDS) or not all(map(_is, values, _KINDS)):
            raise SnapshotCorrupt(f"expected the fields of a Session, found {brief(values)}")
        goal, page, query, number, asin, options, sub_page, draw, visited, actions, reward, done, valid = values
        if page not in range(len(PAGES)) or len(options) % 2 or (sub_page is not None and sub_page not in SUB_PAGES):
            raise SnapshotCorrupt(f"expected the fields of a Session, found {brief(values)}")
        pairs = tuple(zip(options[::2], options[1::2], strict=True))
        place = Place(PAGES[page], query, number, asin, pairs, sub_page, draw)
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
