"""The rules of the shop: the effects of actions, in both compatibility modes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from little_shop import BLANK, HOOK, LAMP, MUG, RACK, RUG, goal_of, shop_in, write

from sandboxgym.envs.webshop.actions import parse, search_for
from sandboxgym.envs.webshop.shop import Shop
from sandboxgym.envs.webshop.shop_state import PAGES, SUB_PAGES, ShopPage, ShopState
from sandboxgym.errors import SnapshotCorrupt


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("little"))


@pytest.fixture
def shop(directory: Path) -> Shop:
    return shop_in(directory)


@pytest.fixture
def upstream(directory: Path) -> Shop:
    return shop_in(directory, compat="upstream")


def play(shop: Shop, *actions: str, goal: int | None = None, draw: int = 1) -> ShopState:
    """The session after some actions, each of which must do something."""
    session = shop.start(goal_of(shop, MUG) if goal is None else goal)
    for action in actions:
        session = shop.act(session, action, draw=lambda: draw)
        assert session.valid_action, action
    return session


def refused(shop: Shop, session: ShopState, action: str) -> bool:
    after = shop.act(session, action, draw=lambda: 1)
    unchanged = replace(after, reward=session.reward, done=session.done, valid_action=session.valid_action) == session
    return unchanged and not after.valid_action and after.reward == 0.0


def clickables(shop: Shop, session: ShopState) -> tuple[str, ...]:
    return shop.page(session).clickables


def find(asin: str) -> tuple[str, str]:
    words = {MUG: "striped mug", LAMP: "desk lamp", RUG: "woven rug", HOOK: "hook", BLANK: "plain tray", RACK: "rack"}
    return f"search[{words[asin]}]", f"click[{asin.lower()}]"


@pytest.mark.parametrize("compat", ["default", "upstream"])
def test_the_goals_product_with_its_options_is_worth_one(directory: Path, compat: str) -> None:
    shop = shop_in(directory, compat=compat)
    goal = goal_of(shop, MUG, color="red", size="small")
    session = play(shop, *find(MUG), "click[small]", "click[red]", "click[buy now]", goal=goal)
    assert (session.place.page, session.reward, session.done) == ("done", 1.0, True)
    assert shop.bought(session).total == 1.0
    assert session.place.options == (("size", "small"), ("color", "red"))


def test_without_the_options_it_is_worth_less(shop: Shop) -> None:
    session = play(shop, *find(MUG), "click[buy now]", goal=goal_of(shop, MUG, color="red", size="small"))
    assert session.reward == 0.5  # the attribute and the price out of four


def test_of_a_group_the_last_choice_counts(shop: Shop) -> None:
    session = play(shop, *find(MUG), "click[red]", "click[small]", "click[sea blue]")
    assert session.place.options == (("color", "sea blue"), ("size", "small"))


def test_a_purchase_ends_the_episode(shop: Shop) -> None:
    session = play(shop, *find(RUG), "click[buy now]")
    for action in ("search[mug]", "click[back to search]", "click[buy now]"):
        assert refused(shop, session, action)
        assert shop.act(session, action, draw=lambda: 1).done


def test_upstream_goes_on_after_a_purchase(upstream: Shop) -> None:
    session = play(upstream, *find(RUG), "click[buy now]")
    assert clickables(upstream, session) == ()
    noop = upstream.act(session, "click[buy now]", draw=lambda: 1)
    assert (noop.reward, noop.done, noop.place) == (0.0, False, session.place)
    goal = goal_of(upstream, MUG, color="red", size="small")
    again = play(upstream, *find(RUG), "click[buy now]", *find(MUG), "click[buy now]", goal=goal)
    assert (again.reward, again.done) == (0.5, True)
    assert dict(again.actions) == {"search": 2, "asin": 2, "purchase": 2}


def test_a_search_needs_the_search_bar(shop: Shop, upstream: Shop) -> None:
    assert refused(shop, play(shop, *find(MUG)), "search[lamp]")
    session = play(upstream, *find(MUG), "click[red]", "search[lamp]")
    assert session.place == ShopPage("results", "lamp", 1)
    assert session.visited == (MUG,)


def test_back_to_search_forgets_everything(shop: Shop) -> None:
    session = play(shop, *find(MUG), "click[red]", "click[back to search]")
    assert session == shop.start(session.goal)


def test_previous_page(shop: Shop) -> None:
    item = play(shop, *find(MUG), "click[red]")
    features = shop.act(item, "click[features]", draw=int)
    assert features.place.sub_page == "Features"
    back = shop.act(features, "click[< prev]", draw=int)
    assert back.place == item.place, "options are kept"
    results = shop.act(back, "click[< prev]", draw=int)
    assert results.place == ShopPage("results", "striped mug", 1), "options are forgotten"
    assert dict(results.actions) == {"search": 2, "asin": 1, "options": 1, "Features": 1}


def test_pages_of_results_end(shop: Shop, upstream: Shop) -> None:
    session = play(shop, "search[bowl]", *["click[next >]"] * 4)
    assert shop.view(session).total == 50
    assert (session.place.number, len(shop.view(session).rows)) == (5, 10)
    assert refused(shop, session, "click[next >]")
    beyond = play(upstream, "search[bowl]", *["click[next >]"] * 6)
    assert (beyond.place.number, upstream.view(beyond).rows) == (7, ())
    assert clickables(upstream, beyond) == ("back to search", "< prev", "next >")


def test_no_results(shop: Shop, upstream: Shop) -> None:
    assert clickables(shop, play(shop, "search[zzz]")) == ("back to search",)
    assert clickables(upstream, play(upstream, "search[zzz]")) == ("back to search", "next >")


def test_keywords_that_look_like_an_address_mislead_only_upstream(shop: Shop, upstream: Shop) -> None:
    """The original tells the page from the address, and the keywords are in it."""
    actions = ("search[search_results]", f"click[{HOOK.lower()}]", "click[< prev]")
    assert play(shop, *actions).place.number == 1
    misled = play(upstream, *actions)
    assert misled.place.number == 0
    assert upstream.view(misled).rows == ()
    actions = ("search[item_page hook]", f"click[{HOOK.lower()}]", "click[description]", "click[< prev]")
    assert play(shop, *actions).place.page == "item"
    assert play(upstream, *actions).place.page == "results"


def test_categories_and_hidden_queries_are_listed_only_upstream(shop: Shop, upstream: Shop) -> None:
    beauty = play(upstream, "search[<c> beauty]")
    assert upstream.view(beauty).total == 54
    assert upstream.view(beauty).rows[0].asin == "B0FILLER00"
    assert [row.asin for row in upstream.view(play(upstream, "search[<q> rugs]")).rows] == [RUG]
    assert upstream.view(play(upstream, "search[<q>  RUGS ]")).total == 1
    assert shop.view(play(shop, "search[<c> beauty]")).total == 0
    assert shop.view(play(shop, "search[<q> zzz]")).total == 0


def test_random_products_are_drawn_anew_on_every_page(upstream: Shop) -> None:
    draws = iter([1, 2, 1])
    session = upstream.start(0)
    pages = []
    for action in ("search[<r>]", "click[next >]", "click[< prev]"):
        session = upstream.act(session, action, draw=lambda: next(draws))
        pages.append(upstream.results(session.place))
    assert len(set(pages[0])) == 50
    assert pages[0] == pages[2] != pages[1]


@pytest.mark.parametrize("query", ["<a> red", "<a>", "<c>"])
def test_where_the_original_fails_nothing_happens(upstream: Shop, query: str) -> None:
    assert refused(upstream, upstream.start(0), f"search[{query}]")


def test_a_value_in_two_groups(shop: Shop, upstream: Shop) -> None:
    assert {"height: 30", "width: 30", "40"} <= set(clickables(shop, play(shop, *find(LAMP))))
    assert play(shop, *find(LAMP), "click[height: 30]").place.options == (("height", "30"),)
    assert play(shop, *find(LAMP), "click[width: 30]").place.options == (("width", "30"),)
    assert play(upstream, *find(LAMP), "click[30]").place.options == (("width", "30"),)
    assert clickables(upstream, play(upstream, *find(LAMP))).count("30") == 1


def test_an_option_called_like_a_button(shop: Shop, upstream: Shop) -> None:
    assert play(shop, *find(LAMP), "click[sub: description]").place.options == (("sub", "description"),)
    assert play(shop, *find(LAMP), "click[description]").place.page == "sub_page"
    assert play(upstream, *find(LAMP), "click[description]").place.page == "sub_page"
    assert play(upstream, *find(LAMP), "click[next >]").place.options == (("sub", "next >"),)
    assert play(shop, *find(RACK), "click[colour: search]").place.options == (("colour", "search"),)
    assert refused(upstream, play(upstream, *find(RACK)), "click[search]")


def test_an_option_with_a_bracket(shop: Shop, upstream: Shop) -> None:
    assert play(shop, *find(LAMP), "click[a[b]]").place.options == (("sub", "a[b]"),)
    assert refused(upstream, play(upstream, *find(LAMP)), "click[a[b]]")


@pytest.mark.parametrize(
    ("text", "upstream", "default"),
    [
        ("search[Red Shoes]", ("search", "red shoes"), ("search", "red shoes")),
        ("click[Buy Now]", ("click", "buy now"), ("click", "buy now")),
        ("search[shoes] trailing", ("search", "shoes"), ("search", "shoes")),
        ("search[shoes]\nmore", ("search", "shoes"), ("search", "shoes")),
        ("more\nsearch[shoes]", None, None),
        (" Search[ shoes ]", None, ("search", "shoes")),
        ("search[ shoes ]", ("search", " shoes "), ("search", "shoes")),
        ("search[ ]", ("search", " "), None),
        ("search[]", None, None),
        ("click[a[b]]", None, ("click", "a[b]")),
        ("click[a]]", ("click", "a]"), ("click", "a]")),
        ("think[hm]", None, None),
        ("click", None, None),
        ("click[", None, None),
        ("", None, None),
        ("search[\ud800x]", ("search", "\N{REPLACEMENT CHARACTER}x"), ("search", "\N{REPLACEMENT CHARACTER}x")),
    ],
)
def test_grammar(text: str, upstream: tuple[str, str] | None, default: tuple[str, str] | None) -> None:
    assert parse(text, "upstream") == upstream
    assert parse(text, "default") == default


@given(st.text())
def test_any_instruction_can_be_searched_for(instruction: str) -> None:
    words = " ".join(instruction.replace("[", " ").replace("]", " ").split())
    if words:
        for compat in ("default", "upstream"):
            action = parse(search_for(instruction), compat)
            assert action is not None and action.verb == "search"


@pytest.mark.parametrize("compat", ["default", "upstream"])
def test_every_admissible_command_does_something(directory: Path, compat: str) -> None:
    shop, rng = shop_in(directory, compat=compat, show_attributes=True), random.Random(0)
    session, seen = shop.start(0), set()
    for _ in range(1500):
        commands = shop.page(session).commands
        if not commands:
            session = shop.start(rng.randrange(len(shop.goals)))
            continue
        session = shop.act(session, rng.choice(commands), draw=lambda: rng.randrange(9))
        shop.check(session)
        assert session.valid_action
        assert session.done == (session.place.page == "done")
        assert ShopState.decode(session.encode()) == session
        seen.add(session.place.sub_page or session.place.page)
    assert seen == {*PAGES, *SUB_PAGES} - {"sub_page"}


def test_progress_key_tells_how_far_it_is(shop: Shop) -> None:
    goal = goal_of(shop, MUG, color="red", size="small")

    def key(*actions: str) -> str:
        return shop.page(play(shop, *actions, goal=goal)).progress_key

    assert key() == "search"
    assert key("search[hook]") == "results"
    assert key("search[striped mug]") == "results goal"
    assert key(*find(RUG)) == "item 0/2"
    assert key(*find(MUG)) == "item goal 0/2"
    assert key(*find(MUG), "click[red]") == key(*find(MUG), "click[sea blue]", "click[red]") == "item goal 1/2"
    assert key(*find(MUG), "click[red]", "click[description]") == "sub_page goal 1/2"


def test_state_hash_is_of_goal_page_and_visited_products(shop: Shop, upstream: Shop) -> None:
    def state_hash(shop: Shop, *actions: str) -> str:
        return shop.page(play(shop, *actions)).state_hash

    assert state_hash(shop, *find(MUG), "click[features]", "click[< prev]") == state_hash(shop, *find(MUG))
    assert state_hash(shop, *find(MUG), "click[red]") != state_hash(shop, *find(MUG))
    assert state_hash(shop, *find(MUG)) != state_hash(upstream, *find(MUG))
    assert state_hash(shop, *find(MUG), "click[< prev]") != state_hash(shop, find(MUG)[0])


def test_equal_arguments_give_the_same_shop(directory: Path) -> None:
    assert shop_in(directory) is shop_in(directory)
    assert shop_in(directory) is not shop_in(directory, compat="upstream")
    assert shop_in(directory) is not shop_in(directory, price_seed=1)
    with pytest.raises(ValueError, match="'default', 'upstream'"):
        shop_in(directory, compat="strict")
    with pytest.raises(ValueError, match="synthetic"):
        shop_in(directory, goals="robot")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
sessions = st.builds(
    ShopState,
    goal=st.integers(0, 2**40),
    place=st.builds(
        ShopPage,
        page=st.sampled_from(PAGES),
        query=st.none() | texts,
        number=st.none() | st.integers(-5, 500),
        asin=st.none() | texts,
        options=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
        sub_page=st.none() | st.sampled_from(SUB_PAGES),
        draw=st.none() | st.integers(0, 2**63 - 1),
    ),
    visited=st.lists(texts, max_size=3).map(tuple),
    actions=st.lists(st.tuples(texts, st.integers(0, 99)), max_size=3).map(tuple),
    reward=st.floats(0, 1),
    done=st.booleans(),
    valid_action=st.booleans(),
)


@given(sessions)
def test_a_session_survives_its_encoding(session: ShopState) -> None:
    assert ShopState.decode(session.encode()) == session


@given(sessions, st.binary(max_size=60), st.integers(0, 60))
def test_other_bytes_are_refused(session: ShopState, noise: bytes, position: int) -> None:
    encoded = session.encode()
    for damaged in (noise, encoded[:position] + noise + encoded[position + len(noise) :], encoded[:-1]):
        try:
            decoded = ShopState.decode(damaged)
        except SnapshotCorrupt:
            continue
        assert ShopState.decode(decoded.encode()) == decoded, "what is taken is a session"


@pytest.mark.parametrize(
    "place",
    [
        ShopPage("results", None, 1),
        ShopPage("results", "mug", None),
        ShopPage("item", "mug", 1),
        ShopPage("item", "mug", 1, "B0NOWHERE0"),
        ShopPage("item", "mug", 1, MUG, (("color", "green"),)),
        ShopPage("item", "mug", 1, MUG, (("colour", "red"),)),
        ShopPage("item", "mug", 1, MUG, sub_page="Features"),
        ShopPage("sub_page", "mug", 1, MUG),
        ShopPage("done"),
        ShopPage("results", "<c>", 1),
        ShopPage("results", "<r>", 1),
    ],
)
def test_a_page_that_the_shop_does_not_have_is_refused(upstream: Shop, place: ShopPage) -> None:
    upstream.check(ShopState(0, ShopPage("results", "<r>", 1, draw=3)))
    with pytest.raises(SnapshotCorrupt):
        upstream.check(ShopState(0, place))


def test_a_goal_that_the_shop_does_not_have_is_refused(shop: Shop) -> None:
    with pytest.raises(SnapshotCorrupt, match=f"below {len(shop.goals)}"):
        shop.check(ShopState(len(shop.goals)))
