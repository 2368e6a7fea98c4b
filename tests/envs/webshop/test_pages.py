"""Exact texts of pages as an agent reads them."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from little_shop import BLANK, LAMP, MUG, RACK, RUG, goal_of, shop_in, write

from sandboxgym.envs.webshop import text_pages
from sandboxgym.envs.webshop.shop import Shop
from sandboxgym.envs.webshop.shop_state import ShopPage, ShopState
from sandboxgym.envs.webshop.views import View, page_of
from sandboxgym.envs.webshop.web.html import html

TASK = "Find me a hand painted striped mug with color: red, and size: small, and price lower than"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("little"))


@pytest.fixture
def shop(directory: Path) -> Shop:
    return shop_in(directory)


@pytest.fixture
def upstream(directory: Path) -> Shop:
    return shop_in(directory, compat="upstream", show_attributes=True)


def at(shop: Shop, place: ShopPage, *visited: str) -> View:
    """A page of a session whose goal is the small red mug; its instruction is cut short."""
    view = shop.view(ShopState(goal_of(shop, MUG, color="red", size="small"), place, visited))
    assert view.instruction.startswith(TASK)
    return replace(view, instruction="TASK")


def item(asin: str, *options: tuple[str, str], query: str = "mug") -> ShopPage:
    return ShopPage("item", query, 1, asin, options)


def test_search_page(shop: Shop, upstream: Shop) -> None:
    assert text_pages.text(at(shop, ShopPage())) == "WebShop [SEP] Instruction: [SEP] TASK [SEP] Search"
    assert text_pages.text(at(upstream, ShopPage())) == "WebShop [SEP] Instruction: [SEP] TASK [SEP] Search"
    assert text_pages.text_rich(at(upstream, ShopPage())) == "WebShop\nInstruction: \nTASK\n[button] Search [button_]\n"
    assert [tuple(at(each, ShopPage()).clickables) for each in (shop, upstream)] == [(), ("search",)]


def test_results(shop: Shop, upstream: Shop) -> None:
    for each in (shop, upstream):
        text = text_pages.text(at(each, ShopPage("results", "striped mug woven rug", 1)))
        assert text.startswith("Instruction: [SEP] TASK [SEP] Back to Search [SEP] Page 1 (Total results: ")
        assert f"[SEP] {MUG} [SEP] Striped Mug with Handle [SEP] $10.0 to $20.0" in text
        rich = text_pages.text_rich(at(each, ShopPage("results", "striped mug woven rug", 1), MUG))
        assert f"\n\n[clicked button] {MUG} [clicked button_]\nStriped Mug with Handle\n$10.0 to $20.0\n" in rich
        assert f"\n\n[button] {RUG} [button_]\nWoven Rug\n$12.5\n" in rich
    second = text_pages.text(at(shop, ShopPage("results", "bowl", 5)))
    assert "Back to Search [SEP] Page 5 (Total results: 50) [SEP] < Prev [SEP] B0FILLER" in second
    second = text_pages.text(at(upstream, ShopPage("results", "bowl", 5)))
    assert "Back to Search [SEP] Page 5 (Total results: 50) [SEP] < Prev [SEP] Next > [SEP] B0FILLER" in second


def test_item(shop: Shop, upstream: Shop) -> None:
    before = "Instruction: [SEP] TASK [SEP] Back to Search [SEP] < Prev [SEP] "
    after = " [SEP] Striped Mug with Handle [SEP] Price: $10.0 to $20.0 [SEP] Rating: N.A. [SEP] "
    buttons = "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    options = 'color [SEP] red [SEP] sea blue [SEP] size [SEP] small [SEP] large 3"'
    assert text_pages.text(at(shop, item(MUG))) == before + options + after + buttons
    chosen = options.replace("sea blue", "sea blue (selected)").replace('3"', '3" (selected)')
    place = item(MUG, ("size", 'large 3"'), ("color", "sea blue"))
    assert text_pages.text(at(shop, place)) == before + chosen + after + buttons
    buttons = buttons.replace("Buy", "Attributes [SEP] Buy")
    assert text_pages.text(at(upstream, place)) == before + options + after + buttons, "choosing changes nothing"


def test_chosen_options_in_lines(shop: Shop, upstream: Shop) -> None:
    place = item(MUG, ("size", 'large 3"'), ("color", "sea blue"))
    rich = text_pages.text_rich(at(shop, place))
    assert rich.startswith('You have clicked large 3".\nYou have clicked sea blue.\nInstruction:\nTASK\n')
    assert "color\n  [button] red [button_]\n  [clicked button] sea blue [clicked button_]\nsize\n" in rich
    assert '  [clicked button] large 3" [clicked button_]\n' in rich
    rich = text_pages.text_rich(at(upstream, place))
    assert rich.startswith("You have clicked sea blue.\nInstruction:\n"), "JSON escapes the quote"
    assert '  [button] large 3" [button_]\n' in rich


def test_upstream_marks_what_is_quoted_in_the_address(shop: Shop, upstream: Shop) -> None:
    quoted = item(MUG, query='"red" mug')
    assert text_pages.text_rich(at(upstream, quoted)).startswith("You have clicked red.\n")
    assert text_pages.text_rich(at(shop, quoted)).startswith("Instruction:\n")
    group = item(RACK, ("size", "big"))  # "size" is a value in the other group
    assert text_pages.text_rich(at(upstream, group)).startswith("You have clicked big.\nYou have clicked size.\n")
    assert text_pages.text_rich(at(shop, group)).startswith("You have clicked big.\nInstruction:\n")
    accented = item(LAMP, ("width", "café"))
    assert text_pages.text_rich(at(upstream, accented)).startswith("Instruction:\n")
    assert text_pages.text_rich(at(shop, accented)).startswith("You have clicked café.\n")


def test_ambiguous_options_are_named_with_their_group(shop: Shop, upstream: Shop) -> None:
    assert "height [SEP] height: 30 [SEP] 40 [SEP] width [SEP] width: 30 [SEP] café" in text_pages.text(
        at(shop, item(LAMP))
    )
    assert "height [SEP] 30 [SEP] 40 [SEP] width [SEP] 30 [SEP] café" in text_pages.text(at(upstream, item(LAMP)))
    assert "sub [SEP] sub: description [SEP] sub: next > [SEP] a[b]" in text_pages.text(at(shop, item(LAMP)))


def test_sub_pages(shop: Shop, upstream: Shop) -> None:
    before = "Instruction: [SEP] TASK [SEP] Back to Search [SEP] < Prev"

    def text(shop: Shop, asin: str, sub_page: str) -> str:
        return text_pages.text(at(shop, ShopPage("sub_page", "mug", 1, asin, sub_page=sub_page)))

    for each in (shop, upstream):
        assert text(each, MUG, "Description") == f"{before} [SEP] About the Striped Mug with Handle."
        assert text(each, MUG, "Features") == f"{before} [SEP] First point. [SEP] Second point."
        assert text(each, RUG, "Features") == f"{before} [SEP] one point only"
        assert text(each, MUG, "Reviews") == before
    assert text(upstream, MUG, "Attributes") == (
        f"{before} [SEP] dishwasher safe [SEP] hand painted [SEP] garden [SEP] mugs [SEP] Home › Kitchen › Mugs"
    )
    rich = text_pages.text_rich(at(upstream, ShopPage("sub_page", "mug", 1, MUG, sub_page="Features")))
    assert rich.endswith("[button] < Prev [button_]\n First point.\n Second point.\n"), "with the blank of the markup"


def test_blank_texts_leave_traces_only_upstream(shop: Shop, upstream: Shop) -> None:
    """White space alone becomes one blank, or a line end if there is one in it; those are dropped, nothing stays."""
    description = ShopPage("sub_page", "tray", 1, BLANK, sub_page="Description")
    features = ShopPage("sub_page", "tray", 1, BLANK, sub_page="Features")
    assert text_pages.text(at(upstream, description)).endswith("< Prev [SEP] ")
    assert text_pages.text(at(shop, description)).endswith("< Prev")
    assert text_pages.text(at(upstream, features)).endswith("< Prev [SEP]  [SEP]  [SEP] last")
    assert text_pages.text(at(shop, features)).endswith("< Prev [SEP] last")


def test_last_page(shop: Shop, upstream: Shop) -> None:
    place = ShopPage("done", "mug", 1, LAMP, (("width", "café"), ("height", "30"), ("sub", "next >")))
    score = at(shop, place).purchase.reward.total
    shown = f"Your score (min 0.0, max 1.0) [SEP] {score}"
    assert text_pages.text(at(shop, place)) == f"Thank you for shopping with us! [SEP] {shown}"
    assert text_pages.text(at(upstream, place)) == (
        "Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk interface.) [SEP] "
        f"Purchased [SEP] asin [SEP] {LAMP} [SEP] options [SEP] "
        r'{"height": "30", "sub": "next \u003e", "width": "caf\u00e9"} [SEP] attrs [SEP] None [SEP] category [SEP] '
        "None [SEP] query [SEP] None [SEP] product category [SEP] None [SEP] Target [SEP] asin [SEP] options [SEP] "
        "attrs [SEP] price upper [SEP] instuction text [SEP] category [SEP] product category [SEP] query [SEP] Goal "
        f"[SEP] None [SEP] Reward [SEP] {shown} [SEP] Reward Details [SEP] None"
    )
    assert tuple(at(shop, place).clickables) == tuple(at(upstream, place).clickables) == ()


def test_addresses(upstream: Shop) -> None:
    def url(place: ShopPage) -> str:
        return at(upstream, place).url.removeprefix("http://127.0.0.1:3000/").replace(f"/{goal}", "/GOAL")

    goal = goal_of(upstream, MUG, color="red", size="small")
    options = (("width", "café"), ("sub", "it's"))
    assert upstream.view(ShopState(goal)).url == f"http://127.0.0.1:3000/{goal}"
    assert url(ShopPage("results", "a  b", 2)) == "search_results/GOAL/a++b/2"
    here = f"{LAMP}/a+b/2"
    where = ShopPage("item", "a b", 2, LAMP)
    assert url(where) == f"item_page/GOAL/{here}/{{}}"
    view = replace(where, options=(("width", "café"),))
    assert url(view) == f'item_page/GOAL/{here}/{{"width": "caf\\u00e9"}}'
    sub_page = ShopPage("sub_page", "a b", 2, LAMP, options, "Features")
    assert url(sub_page) == f"item_sub_page/GOAL/{here}/Features/{{'width': 'café', 'sub': \"it's\"}}"
    assert url(ShopPage("done", "a b", 2, LAMP, options)) == f"done/GOAL/{LAMP}/{{'width': 'café', 'sub': \"it's\"}}"


def test_pages_of_results_before_the_first_count_from_the_end() -> None:
    found = [str(number) for number in range(25)]
    assert page_of(found, 3) == ["20", "21", "22", "23", "24"]
    assert page_of(found, 0) == []
    assert page_of(found, -1) == found[5:15]


class Reader(HTMLParser):
    """Visible text, and the names of what can be clicked."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.names: list[str] = []
        self.checked: list[str] = []
        self.open: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in ("meta", "input", "!doctype"):
            self.open.append(tag)
        if tag in ("button", "input") and values.get("value"):
            self.names.append(values["value"])
        if tag == "a":
            self.names.append(values["href"].removeprefix("#").lower())
        if "checked" in values:
            self.checked.append(values["value"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "tags are closed in order"

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data)


@pytest.mark.parametrize(
    "place",
    [
        ShopPage(),
        ShopPage("results", "desk lamp striped mug", 1),
        ShopPage("results", "bowl", 2),
        item(MUG, ("size", 'large 3"')),
        item(LAMP, ("width", "café"), ("sub", "a[b]")),
        ShopPage("sub_page", "lamp", 1, LAMP, sub_page="Description"),
        ShopPage("sub_page", "lamp", 1, LAMP, sub_page="Features"),
        ShopPage("sub_page", "lamp", 1, LAMP, sub_page="Reviews"),
        ShopPage("sub_page", "lamp", 1, LAMP, sub_page="Attributes"),
        ShopPage("done", "lamp", 1, LAMP, (("width", "café"),)),
    ],
)
def test_markup_has_what_the_view_has(shop: Shop, place: ShopPage) -> None:
    view = at(shop, place)
    read = Reader(html(view))
    assert read.open == []
    assert sorted(read.names) == sorted(view.clickables)
    assert read.checked == [choice.name for group in view.groups for choice in group.choices if choice.selected]
    missing = {piece.text for piece in text_pages.pieces(view)} - {"Instruction:"} - set(map(str.strip, read.texts))
    assert all(any(part in text for text in read.texts) for text in missing for part in text.split(": ")), missing


def test_product_text_is_not_markup(shop: Shop) -> None:
    document = html(at(shop, ShopPage("results", "desk lamp", 1)))
    assert "<b>" not in document and "Desk Lamp &lt;b&gt;bright&lt;/b&gt;" in document


def test_the_last_page_tells_nothing_of_the_goal(shop: Shop) -> None:
    view = at(shop, ShopPage("done", "lamp", 1, LAMP))
    for shown in (text_pages.text(view), text_pages.text_rich(view), html(view)):
        assert MUG not in shown and "hand painted" not in shown
