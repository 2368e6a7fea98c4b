"""The original's two comparisons of texts: the token set ratio of thefuzz 0.19.0, and the name of a colour.

The ratio is reimplemented with `difflib`, which is what thefuzz 0.19.0 uses where no python-Levenshtein is installed;
other versions and rapidfuzz give other numbers for a third of all pairs.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import lru_cache

from sandboxgym.envs.webshop.words.lists import word_list

COLOURS = word_list("colours")
THRESHOLD = 85
"""Texts whose ratio is larger count as the same."""
_NO_WORD = re.compile(r"\W")
_LATIN_1 = dict.fromkeys(range(128, 256))


def token_set_ratio(one: object, other: object) -> int:
    """Similarity from 0 to 100; 100 where the words of one are among those of the other.

    As in thefuzz 0.19.0, a value that is not a string is converted to one, characters of Latin-1's upper half are
    dropped, every other character except letters, digits and underscores separates words, and case does not count. A
    text without words has the ratio 0 with everything.
    """
    return _ratio_of_tokens(_tokens(str(one)), _tokens(str(other)))


def same(one: object, other: object) -> bool:
    """Tell whether the `token_set_ratio` of two texts is above `THRESHOLD`."""
    return _same(str(one), str(other))


@lru_cache(2**16)
def _same(one: str, other: str) -> bool:
    return _ratio_of_tokens(_tokens(one), _tokens(other), above=THRESHOLD) > THRESHOLD


def normalize_color(option: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Reduce an option to the first colour, in alphabetical order, that is found in it; without any, to itself.

    In a text, a colour is found even within a word ("standard" becomes "tan"); in a tuple, only as one of its elements.
    """
    return next((colour for colour in COLOURS if colour in option), option)


@lru_cache(2**14)
def _tokens(text: str) -> frozenset[str]:
    return frozenset(_NO_WORD.sub(" ", text.translate(_LATIN_1)).lower().split())


def _ratio_of_tokens(one: frozenset[str], other: frozenset[str], above: int = -1) -> int:
    """Ratio of token sets; a value not above the given ratio may be too low, but never above it."""
    if not one or not other:
        return 0
    common = one & other
    if common in (one, other):
        return 100
    shared = " ".join(sorted(common))
    first = f"{shared} {' '.join(sorted(one - common))}".strip()
    second = f"{shared} {' '.join(sorted(other - common))}".strip()
    pairs = ((shared, first), (shared, second), (first, second))
    return max(_ratio(*pair, above) for pair in pairs)


def _ratio(one: str, other: str, above: int) -> int:
    if not one or not other:
        return 0
    matcher = SequenceMatcher(None, one, other)
    for bound in (matcher.real_quick_ratio, matcher.quick_ratio):
        if _percent(bound()) <= above:
            return 0
    return _percent(matcher.ratio())


def _percent(ratio: float) -> int:
    return round(100 * ratio)  # halves to even, as thefuzz's int(round(...)) does
