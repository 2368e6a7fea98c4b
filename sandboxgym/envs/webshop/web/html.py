"""Pages of the shop as HTML: plain, semantic markup of our own, without scripts, styles or links to elsewhere.

Clickable elements have their name as the ``value`` of a button, a link or a radio button, spelled as `info` lists it.
The original's templates are not reproduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from sandboxgym.envs.webshop.views import View


def html(view: View) -> str:
    """Render the page as a document."""
    main = {"search": _search, "results": _results, "item": _item, "sub_page": _sub_page, "done": _done}[view.page]
    task = f'<p id="instruction">{escape(view.instruction)}</p>'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>WebShop</title></head>\n'
        f'<body>\n<header><h1>WebShop</h1>{task}</header>\n<main id="{view.page}">\n{main(view)}\n</main>\n'
        "</body>\n</html>\n"
    )


def _search(view: View) -> str:
    return '<form role="search"><input type="search" name="search" required><button>Search</button></form>'


def _results(view: View) -> str:
    rows = "\n".join(
        f'<li><a class="product{" visited" if row.visited else ""}" href="#{escape(row.asin)}">{escape(row.asin)}</a> '
        f'<span class="title">{escape(row.title)}</span> <span class="price">{escape(row.price)}</span></li>'
        for row in view.rows
    )
    heading = f"<h2>Page {view.number} (Total results: {view.total})</h2>"
    return f"{_navigation(view.buttons)}\n{heading}\n<ol>\n{rows}\n</ol>"


def _item(view: View) -> str:
    product = view.product
    assert product is not None
    groups = "\n".join(
        f"<fieldset><legend>{escape(group.name)}</legend>"
        + "".join(
            f'<label><input type="radio" name="{escape(group.name)}" value="{escape(choice.name)}"'
            f"{' checked' if choice.selected else ''}>{escape(choice.name)}</label>"
            for choice in group.choices
        )
        + "</fieldset>"
        for group in view.groups
    )
    facts = f"<h2>{escape(product.title)}</h2>\n<p>Price: {escape(product.price_text)}</p>\n<p>Rating: N.A.</p>"
    return "\n".join(filter(None, (_navigation(view.buttons[:2]), facts, groups, _navigation(view.buttons[2:]))))


def _sub_page(view: View) -> str:
    product = view.product
    assert product is not None
    match view.sub_page:
        case "Description":
            content = f"<p>{escape(product.description)}</p>"
        case "Features":
            content = _listed(product.bullets)
        case "Attributes":
            content = _listed((*product.attributes, product.category, product.query, product.product_category))
        case _:
            content = "<p>No reviews.</p>"
    return f"{_navigation(view.buttons)}\n<h2>{view.sub_page}</h2>\n{content}"


def _done(view: View) -> str:
    assert view.purchase is not None
    score = f'<p>Your score (min 0.0, max 1.0): <output id="score">{view.purchase.reward.total}</output></p>'
    return f"<h2>Thank you for shopping with us!</h2>\n{score}"


def _navigation(buttons: Iterable[str]) -> str:
    listed = (f'<button value="{escape(name.lower())}">{escape(name)}</button>' for name in buttons)
    return f"<nav>{' '.join(listed)}</nav>"


def _listed(texts: Iterable[str]) -> str:
    return f"<ul>\n{''.join(f'<li>{escape(text)}</li>' for text in texts)}\n</ul>"
