"""The grammar of the browser's actions: WebShop's own, and mouse and keyboard.

``search[keywords]`` and ``click[value]`` are WebShop's (see `actions.parse`). The others are
``mouse_click[x, y]`` at a point of the viewport, ``type[text]`` and ``press[key]`` into the field that has the focus,
and ``scroll[dx, dy]`` of the page, all in CSS pixels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from sandboxgym.envs.webshop import actions

KEYS = {
    key.lower(): key for key in ("Enter", "Backspace", "Delete", "ArrowLeft", "ArrowRight", "Home", "End", "Control+A")
}
"""Keys that can be pressed: snapshots cover their whole effect. Tab is left out: where it starts is hidden."""
_LOW_LEVEL = re.compile(r"\s*(mouse_click|type|press|scroll)\s*\[(.+)\]", re.IGNORECASE)
_POINT = re.compile(r"\s*(-?\d{1,6})\s*,\s*(-?\d{1,6})\s*")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Gesture:
    """An action in the browser."""

    verb: Literal["search", "click", "mouse_click", "type", "press", "scroll"]
    text: str = ""
    """Keywords, name of the clicked element, typed text, or key."""
    x: int = 0
    y: int = 0


def parse(action: str) -> Gesture | None:
    """Parse the text of an action; None if the text is not an action.

    Verbs and keys may be in any case; what follows the last bracket is ignored.

    >>> parse("Mouse_Click[ 10,20 ]"), parse("press[enter]").text, parse("press[F5]"), parse("type[ a ]").text
    (Gesture(verb='mouse_click', text='', x=10, y=20), 'Enter', None, ' a ')
    """
    shopping = actions.parse(action, "default")
    if shopping is not None:
        return Gesture(shopping.verb, shopping.argument)
    match = _LOW_LEVEL.match(action)
    if match is None:
        return None
    verb, argument = match[1].lower(), match[2]
    match verb:
        case "type":
            return Gesture("type", _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", argument))
        case "press":
            key = KEYS.get(argument.strip().lower())
            return None if key is None else Gesture("press", key)
        case "mouse_click" | "scroll":
            point = _POINT.fullmatch(argument)
            return None if point is None else Gesture(verb, x=int(point[1]), y=int(point[2]))
    return None
