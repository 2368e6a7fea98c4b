"""Arguments of an environment as they are written on command lines: one grammar for every command and the trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_WORDS = {"True": True, "False": False, "None": None}


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """``["games=train", "limit=5"]`` as ``{"games": "train", "limit": 5}``.

    Each text is ``NAME=VALUE`` or a JSON object of several. A value is JSON where it parses as such (``5``, ``1e3``,
    ``true``, ``null``, ``[1, 2]``, ``"5"`` for the text), or one of Python's True, False and None; anything else is the
    text itself, so ``no`` and ``2024-01-01`` are texts. Where a name occurs twice, the last one counts.

    Raises:
        ValueError: a text is neither form.
    """
    found: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                found.update(json.loads(text))
            except ValueError as error:
                raise ValueError(f"expected NAME=VALUE or a JSON object, found {text!r}: {error}") from None
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"expected NAME=VALUE or a JSON object, found {text!r}")
        try:
            found[name] = _WORDS[value] if value in _WORDS else json.loads(value)
        except ValueError:
            found[name] = value
    return found
