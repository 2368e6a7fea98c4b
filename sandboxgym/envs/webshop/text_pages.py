"""Pages of the shop as text, in the original's two forms. Pure functions of a `View`.

``text`` separates the pieces of a page by `` [SEP] ``; ``text_rich`` has one on each line and marks what can be
clicked. With ``compat="upstream"`` both are exactly what the original makes of its HTML, including invisible elements
and the white space between tags.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from sandboxgym.envs.webshop.views import View
from sandboxgym.envs.webshop.web.html import html

ObservationMode = Literal["text", "text_rich", "html", "url"]
SEPARATOR = " [SEP] "
SELECTED = " (selected)"
"""Mark of a chosen option in ``text`` (not with ``compat="upstream"``)."""


class TextPiece(NamedTuple):
    """A piece of text on a page."""

    kind: Literal["text", "button", "product", "option"]
    text: str
    marked: bool = False
    """True if the product was looked at, or the option is chosen."""


def text(view: View) -> str:
    """Render a page of the shop as one line of text."""
    shown = "" if view.compat == "upstream" else SELECTED
    return SEPARATOR.join(
        piece.text.strip() + (shown if piece.marked and piece.kind == "option" else "") for piece in pieces(view)
    )


def text_rich(view: View) -> str:
    """Render the page in lines, with marks around what can be clicked."""
    lines, clicked = [], []
    for kind, content, marked in pieces(view):
        mark = "clicked button" if marked else "button"
        match kind:
            case "text":
                lines.append(f"{content}\n")
            case "button":
                lines.append(f"[button] {content} [button_]\n")
            case "product":
                lines.append(f"\n[{mark}] {content} [{mark}_]\n")
            case "option":
                lines.append(f"  [{mark}] {content} [{mark}_]\n")
                if marked:
                    clicked.append(f"You have clicked {content}.\n")
    return "".join(clicked[::-1] + lines)


def pieces(view: View) -> list[TextPiece]:
    """List the visible text of a page in its order."""
    if view.compat == "default":
        return [stripped for piece in _PIECES[view.page](view) if (stripped := _stripped(piece)).text]
    return [parsed for piece in _PIECES[view.page](view) if (parsed := _as_parsed(piece)) is not None]


def _stripped(piece: TextPiece) -> TextPiece:
    """Strip white space around text; most has none and is not copied."""
    content = piece.text.strip()
    return piece if content == piece.text else piece._replace(text=content)


def _as_parsed(piece: TextPiece) -> TextPiece | None:
    """Normalise text as the original's HTML parser does: white space alone is a blank, or a newline, which is dropped.

    Quirk: a blank description, say, is an empty piece of text, an empty one is none.
    """
    content = piece.text
    if content.strip(" \n\t\f\r"):
        return piece
    return piece._replace(text=" ") if content and "\n" not in content else None


def _instruction(view: View) -> Iterator[TextPiece]:
    yield TextPiece("text", "Instruction:")
    yield TextPiece("text", view.instruction)


def _search(view: View) -> Iterator[TextPiece]:
    yield TextPiece("text", "WebShop")
    yield TextPiece("text", "Instruction: ")
    yield TextPiece("text", view.instruction)
    yield from _buttons(view.buttons)


def _results(view: View) -> Iterator[TextPiece]:
    back, *others = view.buttons
    yield from _instruction(view)
    yield TextPiece("button", back)
    yield TextPiece("text", f"Page {view.number} (Total results: {view.total})")
    yield from _buttons(others)
    for row in view.rows:
        yield TextPiece("product", row.asin, row.visited)
        yield TextPiece("text", row.title)
        yield TextPiece("text", row.price)


def _item(view: View) -> Iterator[TextPiece]:
    product = view.product
    assert product is not None
    back, previous, *others = view.buttons
    yield from _instruction(view)
    yield from _buttons((back, previous))
    for group in view.groups:
        yield TextPiece("text", group.name)
        for choice in group.choices:
            yield TextPiece("option", choice.name, choice.selected)
    yield TextPiece("text", product.title)
    yield TextPiece("text", f"Price: {product.price_text}")
    yield TextPiece("text", "Rating: N.A.")
    yield from _buttons(others)


def _sub_page(view: View) -> Iterator[TextPiece]:
    product = view.product
    assert product is not None
    yield from _instruction(view)
    yield from _buttons(view.buttons)
    match view.sub_page:
        case "Description":
            yield TextPiece("text", product.description)
        case "Features":
            for bullet in product.bullets:
                yield TextPiece("text", f" {bullet}")
        case "Attributes":
            for attribute in product.attributes:
                yield TextPiece("text", f" {attribute}")
            for hidden in (product.category, product.query, product.product_category):
                yield TextPiece("text", hidden)


def _done(view: View) -> Iterator[TextPiece]:
    purchase = view.purchase
    assert purchase is not None
    score = ("Your score (min 0.0, max 1.0)", str(purchase.reward.total))
    if view.compat == "default":
        lines: tuple[str, ...] = ("Thank you for shopping with us!", *score)
    else:
        lines = (*_DONE[0], purchase.asin, "options", _to_json(dict(purchase.options)), *_DONE[1], *score, *_DONE[2])
    for line in lines:
        yield TextPiece("text", line)


def _buttons(labels: Iterable[str]) -> Iterator[TextPiece]:
    for label in labels:
        yield TextPiece("button", label)


_PIECES: Mapping[str, Callable[[View], Iterator[TextPiece]]] = {
    "search": _search,
    "results": _results,
    "item": _item,
    "sub_page": _sub_page,
    "done": _done,
}
_DONE = (  # invisible parts included; the goal's are empty in the text environment
    (
        "Thank you for shopping with us!",
        "Your code: ",
        "None",
        " (Paste it in your MTurk interface.)",
        "Purchased",
        "asin",
    ),
    (
        *(text for name in ("attrs", "category", "query", "product category") for text in (name, "None")),
        "Target",
        *("asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query"),
        *("Goal ", "None", "Reward"),
    ),
    ("Reward Details ", "None"),
)
_ESCAPED = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&'"})


def _to_json(options: Mapping[str, str]) -> str:
    """Write JSON as the original's template engine does: sorted, and safe inside a script."""
    return json.dumps(options, sort_keys=True).translate(_ESCAPED)


RENDERERS: Mapping[ObservationMode, Callable[[View], str]] = {
    "text": text,
    "text_rich": text_rich,
    "html": html,
    "url": operator.attrgetter("url"),
}
"""Functions that render a view as an observation, by name."""
