"""Word lists that come with the package."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources


@cache
def _lists() -> dict[str, str]:
    return tomllib.loads(resources.files(__package__).joinpath("embedded", "words.toml").read_text(encoding="utf-8"))


def word_list(name: str) -> tuple[str, ...]:
    """Read a list of ``embedded/words.toml``, in its order."""
    return tuple(_lists()[name].split())
