"""HTML pages of the website.

1. The elements marked ``data-t`` hold, in order, exactly the pieces of the page's text observation. A shopper's pages
   contain no other text: decoration is drawn by the style sheet.
2. Clickable elements are marked ``data-name``, with the name that actions use.
3. No page needs a script, loads anything from elsewhere, or holds anything that the visitor is not shown.
"""

from __future__ import annotations

import functools
import html
import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib import resources

from sandboxgym.envs.webshop.reward import Reward
from sandboxgym.envs.webshop.text_pages import SELECTED
from sandboxgym.envs.webshop.views import BUY, SEARCH, View

Href = Callable[[str], str]
"""Function from the name of a clickable element to its address."""
_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{style}">
</head>
<body class="{page}">
{body}
</body>
</html>
"""


@functools.cache
def style() -> str:
    """Style sheet of the website."""
    return resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")


def document(view: View, href: Href, *, home: str) -> str:
    """Write the document of a page of the shop.

    Args:
        view: content of the page.
        href: function from a clickable name to its address; not called for search and purchase, which are forms.
        home: address of the search page.
    """
    body = _BODIES[view.page](view, href, home)
    if view.page == "done":
        content = f"{_brand('/')}\n<main>\n{body}\n</main>"
    else:
        brand = _brand(home) if view.page != "search" else f"{_LOGO}<h1>{_piece('WebShop')}</h1></header>"
        content = f"{brand}\n{_task(view)}\n<main>\n{body}\n</main>"
    return page(f"{_TITLES[view.page]} · WebShop", content, view.page)


def problem(sentence: str) -> str:
    """Write a page with an error message."""
    body = f'<p class="error" role="alert">{escape(sentence)}</p>\n<a class="button" href="/">Start again</a>'
    return page("WebShop", f"{_brand('/')}\n<main>\n{body}\n</main>", "problem")


def welcome(products: int, tasks: int) -> str:
    """The page on which visitors start."""
    body = (
        f"<p>{products:,} products. You get an instruction; find the product, choose its options, buy it. "
        "The score says how well it fits.</p>\n"
        '<form action="/start"><button class="start">Start shopping</button></form>\n'
        '<form action="/start"><label for="goal">or task</label> <input id="goal" name="goal" type="number" '
        f'min="0" max="{tasks - 1}" required placeholder="0 – {tasks - 1}"><button>Go</button></form>'
    )
    return page("WebShop", f"{_LOGO}<h1>WebShop</h1></header>\n<main>\n{body}\n</main>", "home")


def page(title: str, body: str, name: str) -> str:
    """Write a document of the website."""
    sheet = f"/style.css?v={zlib.crc32(style().encode()):08x}"  # another address when it changes: browsers keep it
    return _DOCUMENT.format(title=escape(title), style=sheet, page=escape(name), body=body)


def escape(text: str) -> str:
    """Escape text as markup, including carriage returns, which parsers would change."""
    return html.escape(text).replace("\r", "&#13;")


def _brand(home: str) -> str:
    return f'<header><a class="logo" href="{escape(home)}" aria-label="WebShop"></a></header>'


def _task(view: View) -> str:
    label = "Instruction: " if view.page == "search" else "Instruction:"
    return f'<section class="task" id="instruction">{_piece(label, "b")}\n{_piece(view.instruction, "p")}</section>'


def _search(view: View, href: Href, home: str) -> str:
    return (
        f'<form role="search" action="{escape(home)}/results"><input type="search" name="q" id="search_input" required '
        r'pattern=".*\S.*" title="Keywords" autofocus autocomplete="off" spellcheck="false" aria-label="Keywords">'
        f"<button>{_piece(SEARCH)}</button></form>"
    )


def _results(view: View, href: Href, home: str) -> str:
    back, *others = view.buttons
    turns = "\n".join(_button(name, href) for name in others)
    rows = "\n".join(
        f'<li><a class="product{" visited" if row.visited else ""}" href="{escape(href(row.asin.lower()))}" '
        f'data-name="{escape(row.asin.lower())}">{_picture(row.asin)}<span class="about">{_piece(row.asin, "small")}\n'
        f"{_piece(row.title, 'strong')}\n{_piece(row.price, 'em')}</span></a></li>"
        for row in view.rows
    )
    heading = _piece(f"Page {view.number} (Total results: {view.total})", "h2")
    return f'<nav>{_button(back, href)}\n{heading}\n{turns}</nav>\n<ol class="results">\n{rows}\n</ol>'


def _item(view: View, href: Href, home: str) -> str:
    product = view.product
    assert product is not None
    back, previous, *others = view.buttons
    groups = "\n".join(
        f'<section class="group">{_piece(group.name, "h3")}\n<div class="choices">'
        + "\n".join(
            f'<a role="radio" aria-checked="{str(choice.selected).lower()}" href="{escape(href(choice.name))}" '
            f'data-name="{escape(choice.name)}" data-t>{escape(choice.name)}'
            + (f'<span class="unseen">{SELECTED}</span>' if choice.selected else "")
            + "</a>"
            for choice in group.choices
        )
        + "</div></section>"
        for group in view.groups
    )
    more = "\n".join(_button(name, href) for name in others if name != BUY)
    buy = f'<form method="post"><button class="buy" data-name="buy now">{_piece(BUY)}</button></form>'
    price, rating = _piece(f"Price: {product.price_text}", "p"), _piece("Rating: N.A.", "small")
    facts = f"{_piece(product.title, 'h2')}\n{price}\n{rating}"
    return (
        f"<nav>{_button(back, href)}\n{_button(previous, href)}</nav>\n<article>{_picture(product.asin)}\n"
        f'<div class="options">{groups}</div>\n<div class="facts">{facts}</div>\n'
        f'<nav class="more">{more}</nav>\n{buy}</article>'
    )


def _sub_page(view: View, href: Href, home: str) -> str:
    product = view.product
    assert product is not None
    match view.sub_page:
        case "Description":
            content = _piece(product.description, "p")
        case "Features":
            content = _listed(product.bullets)
        case "Attributes":
            content = _listed((*product.attributes, product.category, product.query, product.product_category))
        case _:
            content = ""
    buttons = "\n".join(_button(name, href) for name in view.buttons)
    return (
        f'<nav>{buttons}</nav>\n<article class="reading" data-about="{escape(view.sub_page or "")}">{content}</article>'
    )


def _done(view: View, href: Href, home: str) -> str:
    assert view.purchase is not None
    score = _piece(str(view.purchase.reward.total), "output", 'id="reward"')
    thanks = _piece("Thank you for shopping with us!", "h2")
    again = '<a class="again" href="/start" aria-label="Another task"></a>'
    words = _piece("Your score (min 0.0, max 1.0)", "p")
    return f'<article class="thanks">{thanks}\n{words}\n{score}\n{_parts(view.purchase.reward)}\n{again}</article>'


def _parts(reward: Reward) -> str:
    """The parts of a score, for people: the style sheet shows them, and the page's text does not contain them."""
    options = "none asked for" if reward.r_option is None else f"{reward.r_option:.0%}"
    rows = (
        ("", "met", "weight"),
        ("attributes", f"{reward.r_att:.0%}", f"{reward.w_att:.2f}"),
        ("options", options, f"{reward.w_option:.2f}"),
        ("price", "within the limit" if reward.r_price else "too high", f"{reward.w_price:.2f}"),
        ("type of product", f"× {reward.r_type:g}", "of all"),
    )
    lines = ("".join(f'<span data-part="{escape(cell)}"></span>' for cell in row) for row in rows)
    return f'<div class="parts">{"".join(f"<div>{line}</div>" for line in lines)}</div>'


def _button(name: str, href: Href) -> str:
    click = escape(name.lower())
    address = escape(href(name.lower()))
    return f'<a role="button" class="button" href="{address}" data-name="{click}" data-t>{escape(name)}</a>'


def _piece(text: str, tag: str = "span", attributes: str = "") -> str:
    if not text.strip():
        return ""
    return f"<{tag}{' ' if attributes else ''}{attributes} data-t>{escape(text)}</{tag}>"


def _listed(texts: Iterable[str]) -> str:
    return f"<ul>\n{''.join(_piece(text, 'li') for text in texts)}\n</ul>"


def _picture(asin: str) -> str:
    """Draw a neutral placeholder: a shape whose colour is derived from the product."""
    code = zlib.crc32(asin.encode())
    return f'<span class="picture shape{code % 4}" style="--hue:{code // 4 % 360}" aria-hidden="true"></span>'


_LOGO = '<header><span class="logo"></span>'
_BODIES: Mapping[str, Callable[[View, Href, str], str]] = {
    "search": _search,
    "results": _results,
    "item": _item,
    "sub_page": _sub_page,
    "done": _done,
}
_TITLES = {"search": "Search", "results": "Results", "item": "Product", "sub_page": "About", "done": "Thank you"}
