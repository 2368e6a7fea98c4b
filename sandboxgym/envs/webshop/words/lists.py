"""Lists of words that come with the package."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources


@cache
def _lists() -> dict[str, str]:
    return tomllib.loads(resources.files(__package__).joinpath("embedded", "words.toml").read_text(encoding="utf-8"))


def word_list(name: str) -> tuple[str, ...]:
    """The words of a list in ``embedded/words.toml``, in its order."""
    return tuple(_lists()[name].split())
