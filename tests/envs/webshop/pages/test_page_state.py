"""Untrusted states of the shop's episodes: states that no browser or shop could continue from are refused at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandboxgym import SnapshotCorrupt
from sandboxgym import serialization as durable
from sandboxgym.envs.webshop.shop_state import ShopPage, ShopState
from sandboxgym.envs.webshop.web.browser_page import PageState

COOKIE = {"name": "a", "value": "b", "domain": "127.0.0.1", "path": "/visitor", "expires": -1, "httpOnly": False}
COOKIE |= {"secure": False, "sameSite": "Lax"}
ITEM = {"name": "k", "value": "v"}
PAGE = PageState("red", (1, 2), 0, (0, 3), json.dumps([[COOKIE], [ITEM]]))


def test_the_state_of_a_page_comes_back() -> None:
    assert PageState.from_list(durable.unpack(durable.pack(PAGE.as_list()))) == PAGE
    assert PageState.from_list(PageState().as_list()) == PageState()


@pytest.mark.parametrize(
    "storage",
    [
        "no JSON",
        "[" * 100_000,
        "5",
        "{}",
        "[[], [], []]",
        '[{}, "x"]',
        "[[5], []]",
        "[[], [5]]",
        "9" * 5000,
        json.dumps([[{**COOKIE, "path": 5}], []]),
        json.dumps([[{**COOKIE, "path": "relative"}], []]),
        json.dumps([[{key: value for key, value in COOKIE.items() if key != "path"}], []]),
        json.dumps([[{**COOKIE, "expires": "soon"}], []]),
        json.dumps([[{**COOKIE, "expires": float("nan")}], []]),
        json.dumps([[{**COOKIE, "sameSite": "Other"}], []]),
        json.dumps([[{**COOKIE, "more": 1}], []]),
        json.dumps([[{**COOKIE, "value": "a;b\n"}], []]),
        json.dumps([[], [{"name": "k"}]]),
        json.dumps([[], [{"name": "k", "value": 5}]]),
    ],
    ids=lambda storage: storage[:40],
)
def test_a_storage_that_no_browser_takes_is_corrupt(storage: str) -> None:
    with pytest.raises(SnapshotCorrupt, match="state of a page"):
        PageState.from_list(["", None, 0, [0, 0], storage])


@pytest.mark.parametrize(
    "values",
    [
        [2**5000, None, 0, [0, 0], ""],
        ["", [2**5000, 0], 0, [0, 0], ""],
        ["", None, 2**5000, [0, 0], ""],
        ["", None, 0, [0, -(2**5000)], ""],
        ["", None, 0, [0], ""],
        [],
        None,
    ],
    ids=["text", "caret", "slid", "scroll", "half a scroll", "empty", "none"],
)
def test_places_that_no_page_has_are_corrupt(values: Any) -> None:
    with pytest.raises(SnapshotCorrupt, match="state of a page"):
        PageState.from_list(values)


@pytest.mark.parametrize("field", range(13))
@pytest.mark.parametrize(
    "junk", [None, 2**5000, -(2**5000), [[[]]], {"a": 1}, b"x", "x" * 10**5], ids=lambda j: type(j).__name__
)
def test_a_session_with_a_field_of_another_kind_is_corrupt_or_comes_back(field: int, junk: Any) -> None:
    values = durable.unpack(ShopState(1, ShopPage("results", "lamp", 1)).encode())
    assert len(values) == 13
    values[field] = junk
    try:
        session = ShopState.decode(durable.pack(values))
    except SnapshotCorrupt as error:
        assert len(str(error)) < 1000
    else:
        assert durable.unpack(session.encode()) == values
