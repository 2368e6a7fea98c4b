"""The shop's website, without a browser: the content of its pages and the targets of their links."""

from __future__ import annotations

import html.parser
import http.client
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from little_shop import LAMP, MUG, RACK, goal_of, shop_in, write

from sandboxgym.envs.webshop import text_pages
from sandboxgym.envs.webshop.shop import Shop, open_shop
from sandboxgym.envs.webshop.shop_state import ShopPage, ShopState
from sandboxgym.envs.webshop.site import markup, server
from sandboxgym.envs.webshop.site.addresses import path_of, place_of
from sandboxgym.envs.webshop.site.server import Response, Server, Site
from sandboxgym.envs.webshop.text_pages import SELECTED, SEPARATOR

VOID = {"meta", "link", "input"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="module")
def shop(directory: Path) -> Shop:
    return shop_in(directory)


@pytest.fixture
def site(shop: Shop) -> Site:
    return Site(shop)


@dataclass
class Document(html.parser.HTMLParser):
    """A page of the site, as a test reads it."""

    text: str
    pieces: list[str] = field(default_factory=list)
    """Texts of the elements marked ``data-t``."""
    outside: str = ""
    """All other text."""
    links: dict[str, str] = field(default_factory=dict)
    """From the name of what can be clicked to its address; of a button, ""."""
    forms: list[dict[str, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[bool] = []
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "data-t" in given:
            self.pieces.append("")
        if given.get("data-name") is not None:
            self.links[str(given["data-name"])] = given.get("href") or ""
        if tag == "form":
            self.forms.append(given)
        if tag not in VOID:
            self._open.append("data-t" in given or tag == "title")

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if not any(self._open):
            self.outside += data
        elif self.pieces:
            self.pieces[-1] += data

    @property
    def observation(self) -> str:
        return SEPARATOR.join(piece.strip() for piece in self.pieces)


class Visitor:
    """Somebody who shops with nothing but the pages."""

    def __init__(self, site: Site, goal: int) -> None:
        self.site = site
        self.sid = site.open(site.shop.start(goal))
        self.go(f"/s/{self.sid}")

    def go(self, address: str) -> Document:
        self.address, self.response = address, self.site.get(address)
        while self.response.location is not None:
            self.address, self.response = self.response.location, self.site.get(self.response.location)
        assert self.response.status == HTTPStatus.OK, self.response.body
        self.page = Document(self.response.body)
        return self.page

    def act(self, action: str) -> None:
        verb, _, argument = action.partition("[")
        argument = argument.rpartition("]")[0]
        if verb == "search":
            (form,) = self.page.forms
            self.go(f"{form['action']}?q={quote_plus(argument)}")
        elif self.page.links[argument]:
            self.go(self.page.links[argument])
        else:
            self.buy()

    def buy(self) -> Response:
        response = self.site.post(self.address)
        if response.location is not None:
            self.go(response.location)
        return response

    @property
    def session(self) -> ShopState:
        return self.site.session(self.sid)


def random_actions(shop: Shop, session: ShopState, rng: random.Random) -> Iterator[tuple[str, ShopState]]:
    for _ in range(25):
        commands = list(shop.page(session).commands)
        if not commands or (commands == ["click[buy now]"]):
            return
        words = rng.sample(["mug", "lamp/desk", "search_results", "bowl", "filler", "50%", "a+b", "é", "rack"], 2)
        action = rng.choice(
            [*commands, f"search[{' '.join(words)}]" if shop.view(session).has_search_bar else commands[0]]
        )
        if action == "click[buy now]" and rng.random() < 0.7:
            continue
        session = shop.act(session, action, draw=int)
        yield action, session


def check_walk(shop: Shop, site: Site, seed: int) -> int:
    rng = random.Random(seed)
    goal = rng.randrange(len(shop.goals))
    visitor = Visitor(site, goal)
    steps = 0
    for action, session in random_actions(shop, shop.start(goal), rng):
        visitor.act(action)
        assert visitor.page.pieces and visitor.page.observation == shop.observe(session, "text"), action
        assert [piece.strip() for piece in visitor.page.pieces] == [
            piece.text + (SELECTED if piece.marked and piece.kind == "option" else "")
            for piece in text_pages.pieces(shop.view(session))
        ]
        assert not visitor.page.outside.strip()
        assert set(visitor.page.links) == set(shop.page(session).clickables)
        assert shop.page(visitor.session).state_hash == shop.page(session).state_hash
        assert (visitor.session.reward, visitor.session.done) == (session.reward, session.done)
        steps += 1
    return steps


def test_pages_hold_the_text_observation_piece_by_piece(shop: Shop, site: Site) -> None:
    assert sum(check_walk(shop, site, seed) for seed in range(20)) > 200


@pytest.mark.slow
def test_so_do_the_pages_of_the_embedded_catalogue() -> None:
    shop = open_shop()
    assert sum(check_walk(shop, Site(shop), seed) for seed in range(60)) > 600


@pytest.mark.slow
def test_so_do_the_pages_of_the_original_products(parity_data: Path) -> None:
    shop = open_shop(parity_data / "webshop")
    assert sum(check_walk(shop, Site(shop), seed) for seed in range(60)) > 600


def test_a_page_tells_nothing_of_the_goal_but_its_instruction(shop: Shop, site: Site) -> None:
    """For another goal the same page is the same to the byte but for the instruction and, at the end, the score with
    its parts.
    """
    rng = random.Random(0)
    seen = set()
    for _ in range(20):
        mine, other = rng.sample(range(len(shop.goals)), 2)
        for _, session in random_actions(shop, shop.start(mine), rng):
            bodies = []
            for goal in (mine, other):
                place = session.place
                site.put("same", ShopState(goal, place if place.page == "done" else ShopPage(), session.visited))
                body = site.get(path_of(place, "same")).body
                body = body.replace(markup.escape(shop.goals[goal].instruction), "INSTRUCTION")
                body = re.sub(r'(<output id="reward" data-t>)[\d.]+', r"\1", body)
                assert ("data-part=" in body) == (session.place.page == "done")
                bodies.append(re.sub(r'data-part="[^"]*"', "", body))
            assert bodies[0] == bodies[1]
            seen.add(session.place.page)
    assert seen == {"search", "results", "item", "sub_page", "done"}


def test_the_goals_product_looks_like_any_other(shop: Shop, site: Site) -> None:
    goal = goal_of(shop, MUG, color="red", size="small")
    visitor = Visitor(site, goal)
    assert MUG not in visitor.response.body and MUG.lower() not in visitor.response.body
    visitor.act("search[striped mug plain tray]")
    rows = re.findall(r"<li>.*?</li>", visitor.response.body, re.DOTALL)
    shapes = {re.sub(r"B0\w+|shape\d|--hue:\d+|<(strong|em) .*?</\1>", "", row, flags=re.I | re.S) for row in rows}
    assert len(rows) > 1 and len(shapes) == 1
    price_cap = f"{shop.goals[goal].price_upper:.2f}"
    without = visitor.response.body.replace(markup.escape(shop.goals[goal].instruction), "")
    assert price_cap not in without and "dishwasher" not in without


def test_pages_load_nothing_from_elsewhere_and_need_no_script(shop: Shop, site: Site) -> None:
    rng = random.Random(1)
    for goal in range(3):
        visitor = Visitor(site, goal)
        for action, _ in random_actions(shop, shop.start(goal), rng):
            visitor.act(action)
            body = visitor.response.body
            assert not re.search(r"<script|\son\w+=|https?:|src=|//", body, re.IGNORECASE), body
    assert not re.search(r"url\(|@import|https?:", markup.style())


def test_back_and_reload_are_the_page_of_the_address(shop: Shop, site: Site) -> None:
    visitor = Visitor(site, goal_of(shop, MUG, color="red", size="small"))
    visitor.act("search[striped mug]")
    results = visitor.address
    visitor.act(f"click[{MUG.lower()}]")
    visitor.act("click[red]")
    red = visitor.address
    visitor.act("click[sea blue]")
    visitor.go(red)  # back
    assert visitor.session.place.options == (("color", "red"),) and f"red{SELECTED}" in visitor.page.observation
    once = visitor.response.body
    visitor.go(red)  # reload
    assert visitor.response.body == once
    visitor.go(results)
    assert f'class="product visited" href="{path_of(visitor.session.place, visitor.sid)[:10]}' in visitor.response.body
    visitor.go(red)
    visitor.act("click[small]")
    visitor.buy()
    assert visitor.page.observation.endswith("1.0") and visitor.session.reward == 1.0


def test_a_purchase_is_for_good(shop: Shop, site: Site) -> None:
    visitor = Visitor(site, goal_of(shop, MUG, color="red", size="small"))
    for action in ("search[lamp]", f"click[{LAMP.lower()}]"):
        visitor.act(action)
    item = visitor.address
    visitor.buy()
    bought, page = visitor.session, visitor.response.body
    for address in (item, f"/s/{visitor.sid}", f"/s/{visitor.sid}/nowhere"):
        assert visitor.go(address).text == page  # back leads to the last page again
    assert site.post(item).location == f"/s/{visitor.sid}/done"  # a form that is sent twice
    mug = item.replace(LAMP, MUG)
    assert site.post(mug).location == f"/s/{visitor.sid}/done"
    assert visitor.session == bought
    assert 'href="/start"' in page and f'href="/s/{visitor.sid}' not in page


def test_keywords_may_be_anything(shop: Shop, site: Site) -> None:
    visitor = Visitor(site, 0)
    for keywords in ("a/b", "../../etc", "50% & more?", "a=b&page=9", "é “ﬁ” 茶", "a]b[c", "<b>", "#1", "+", "a;b"):
        visitor.go(f"/s/{visitor.sid}")
        visitor.act(f"search[{keywords}]")
        assert visitor.session.place.query == keywords.lower()
        assert (
            visitor.session.place
            == place_of(visitor.address.partition("?")[0] + "?q=" + quote_plus(keywords.lower()))[1]
        )
    home = visitor.go(f"/s/{visitor.sid}").text
    for blank in ("", "%20", "+%09+", "%0A"):
        assert visitor.go(f"/s/{visitor.sid}/results?q={blank}").text == home


BROKEN = {
    "/nowhere": "no such page",
    "//[": "no such page",
    "/s": "no such page",
    "/s/nobody": "visit is over",
    "/s/nobody/done": "visit is over",
    "/s/me/done": "Nothing was bought",
    "/s/me/results": "no such page",
    "/s/me/results?q=mug&page=0": "pages 1 to",
    "/s/me/results?q=mug&page=99": "pages 1 to",
    "/s/me/results?q=mug&page=-1": "no such page",
    "/s/me/results?q=mug&page=1e3": "no such page",
    "/s/me/results?q=mug&page=٣": "no such page",
    "/s/me/results?q=%0Amug": "no keywords",
    "/s/me/item/B000000000?q=mug": "B000000000",
    f"/s/me/item/{MUG}": "no such page",
    f"/s/me/item/{MUG}?q=mug&option.color=mauve": "mauve",
    f"/s/me/item/{MUG}?q=mug&option.scent=rose": "scent",
    f"/s/me/item/{MUG}/price?q=mug": "no such page",
    f"/s/me/item/{MUG}/attributes?q=mug": "attributes",
    f"/s/me/item/{MUG}/features/more?q=mug": "no such page",
    "/start?goal=x": "tasks 0 to",
    "/start?goal=99999999999999999999": "tasks 0 to",
}


@pytest.mark.parametrize("address", BROKEN)
def test_what_is_not_there_is_a_page_that_says_so(site: Site, address: str) -> None:
    site.put("me", ShopState(0))
    response = site.get(address)
    assert response.status == HTTPStatus.NOT_FOUND and BROKEN[address] in response.body
    assert "Traceback" not in response.body and site.session("me") == ShopState(0)


def test_only_a_product_can_be_bought(site: Site) -> None:
    site.put("me", ShopState(0))
    assert site.post("/s/me/results?q=mug").status == HTTPStatus.CONFLICT
    assert site.post("/s/me").status == HTTPStatus.CONFLICT
    assert site.post("/s/nobody/item/x?q=y").status == HTTPStatus.NOT_FOUND
    assert site.post(f"/s/me/item/{RACK}?q=y&option.size=huge").status == HTTPStatus.NOT_FOUND
    assert site.post("/start").status == HTTPStatus.NOT_FOUND
    assert site.session("me") == ShopState(0)


def test_attributes_are_there_if_the_shop_shows_them(directory: Path) -> None:
    site = Site(shop_in(directory, show_attributes=True))
    visitor = Visitor(site, 0)
    for action in ("search[striped mug]", f"click[{MUG.lower()}]", "click[attributes]"):
        visitor.act(action)
    assert "hand painted" in visitor.page.pieces


def test_visitors_get_the_tasks_of_the_site(shop: Shop) -> None:
    site = Site(shop, goals=[3, 1])
    sids = [str(site.get(f"/start?goal={position}").location).rpartition("/")[2] for position in (0, 1)]
    assert [site.session(sid).goal for sid in sids] == [3, 1]
    assert "tasks 0 to 1" in site.get("/start?goal=2").body
    drawn = str(site.get("/start").location).rpartition("/")[2]
    assert site.session(drawn).goal in (1, 3)
    assert Document(site.get("/").body).forms


def test_the_longest_unused_visit_ends_first(shop: Shop, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_SESSIONS", 2)
    first, second = Visitor(site, 0), Visitor(site, 1)
    first.act("search[mug]")
    third = Visitor(site, 2)
    assert site.get(f"/s/{second.sid}").status == HTTPStatus.NOT_FOUND
    assert {site.get(f"/s/{visitor.sid}").status for visitor in (first, third)} == {HTTPStatus.OK}


def test_the_originals_quirks_have_no_site(directory: Path) -> None:
    with pytest.raises(ValueError, match="compat='default'"):
        Site(shop_in(directory, compat="upstream"))


def test_the_server_answers_and_stops(site: Site) -> None:
    with Server(site) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)

        def ask(method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], str]:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()

        status, headers, page = ask("GET", "/")
        assert status == 200 and headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        sheet = re.search(r'href="(/style.css[^"]*)"', page)
        assert sheet and ask("GET", sheet[1])[1]["Content-Type"].startswith("text/css")
        status, headers, page = ask("HEAD", "/")
        assert status == 200 and page == "" and int(headers["Content-Length"]) > 100
        location = ask("GET", "/start?goal=0")[1]["Location"]
        assert "Instruction:" in ask("GET", location)[2]
        status, _, page = ask("POST", f"{location}/item/{MUG}?q=a%2Fb", b"x=1")
        assert status == 303 and "score" in ask("GET", f"{location}/done")[2]
        for method, path, body, code in (
            ("PUT", "/", None, 501),
            ("GET", "/" + "x" * 70_000, None, 414),
            ("POST", "/", b"x" * 70_000, 413),
        ):
            try:
                status, _, page = ask(method, path, body)
                assert status == code and 'class="error"' in page
            except (BrokenPipeError, ConnectionResetError):  # it does not read what is too long
                assert code in (413, 414)
            connection.close()
        assert ask("GET", "/")[0] == 200
        connection.close()
        with pytest.raises(OSError):
            Server(site, port=running.port)
    running.close()
    with pytest.raises(OSError):
        connection.connect()


def test_an_error_in_a_page_is_told_without_its_traceback(
    shop: Shop, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(address: str) -> Response:
        raise RuntimeError("secret")

    monkeypatch.setattr(site, "get", broken)
    with Server(site) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        connection.request("GET", "/")
        answer = connection.getresponse()
        page = answer.read().decode()
        connection.close()
    assert answer.status == 500 and "could not be made" in page and "secret" not in page
    assert "secret" in caplog.text
