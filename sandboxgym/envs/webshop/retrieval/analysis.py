"""Text analysis of the original's search engine: the chain of Lucene's and Anserini's English analyzer.

Text is split into words by Unicode's rules (UAX #29, with emoji as words and one word per character in Han and
Hiragana). Possessives are removed, letters become lower case, 33 stop words are dropped, and the rest is stemmed. The
terms are those that Lucene finds in the same text, so document lengths and all scores are Lucene's too.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable

from gymnasium.error import DependencyNotInstalled

from sandboxgym.envs.webshop.retrieval.porter import stem

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
MAX_TOKEN = 255
"""Length in characters at which longer tokens are cut into pieces."""
_CACHED_CHUNKS = 1 << 16

# Lucene's classes are those of Unicode 12.1, since when some have changed. Its pictographs:
_PICTOGRAPHIC = (
    r"\u00A9\u00AE\u203C\u2049\u2122\u2139\u2194-\u2199\u21A9\u21AA\u231A\u231B\u2328\u2388\u23CF\u23E9-\u23F3"
    r"\u23F8-\u23FA\u24C2\u25AA\u25AB\u25B6\u25C0\u25FB-\u25FE\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705"
    r"\u2708-\u2712\u2714\u2716\u271D\u2721\u2728\u2733\u2734\u2744\u2747\u274C\u274E\u2753-\u2755\u2757\u2763-\u2767"
    r"\u2795-\u2797\u27A1\u27B0\u27BF\u2934\u2935\u2B05-\u2B07\u2B1B\u2B1C\u2B50\u2B55\u3030\u303D\u3297\u3299"
    r"\U0001F000-\U0001F0FF\U0001F10D-\U0001F10F\U0001F12F\U0001F16C-\U0001F171\U0001F17E\U0001F17F\U0001F18E"
    r"\U0001F191-\U0001F19A\U0001F1AD-\U0001F1E5\U0001F201-\U0001F20F\U0001F21A\U0001F22F\U0001F232-\U0001F23A"
    r"\U0001F23C-\U0001F23F\U0001F249-\U0001F53D\U0001F546-\U0001F64F\U0001F680-\U0001F6FF\U0001F774-\U0001F77F"
    r"\U0001F7D5-\U0001F7FF\U0001F80C-\U0001F80F\U0001F848-\U0001F84F\U0001F85A-\U0001F85F\U0001F888-\U0001F88F"
    r"\U0001F8AE-\U0001F8FF\U0001F90C-\U0001F93A\U0001F93C-\U0001F945\U0001F947-\U0001FFFD"
)
# Characters that are letters now but were not then, and format characters then that are now digits or nothing.
_NO_LETTER = r"\u00B8\u02E5-\u02EB\u055A\u058A\uA708-\uA716"
_FORMAT = r"\u0600-\u0605\u06DD\u070F\u08E2\U000110BD\U000110CD"
_POSSESSIVE = ("'s", "’s", "＇s")


def check_installed() -> None:
    """Raise `gymnasium.error.DependencyNotInstalled` if non-ASCII text could not be analyzed."""
    if importlib.util.find_spec("regex") is None:
        raise DependencyNotInstalled("WebShop's search needs the package regex: pip install 'sandboxgym[webshop]'")


@functools.cache
def _words() -> Callable[[str], list[str]]:
    """Finder of the words of a text in any script."""
    check_installed()
    import regex

    ignored = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}" + f"{_FORMAT}]*"  # characters that only go with the one before

    def one(kind: str) -> str:
        return f"(?:{kind}{ignored})"

    letter = one(rf"[[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]--[{_NO_LETTER}{_FORMAT}]]")
    hebrew, digit = one(r"\p{WB=Hebrew_Letter}"), one(rf"[\p{{WB=Numeric}}--[{_FORMAT}]]")
    katakana, joiner = one(r"\p{WB=Katakana}"), one(r"\p{WB=ExtendNumLet}")
    in_number = one(r"[\p{WB=MidNum}\p{WB=MidNumLet}\p{WB=Single_Quote}\uFE10\uFE14]")
    in_word = one(r"[[\p{WB=MidLetter}\p{WB=MidNumLet}\p{WB=Single_Quote}]--[\u055F]]")
    quoted = rf"(?<={hebrew}){one(chr(34))}{hebrew}|(?<={hebrew}){one(chr(39))}"
    run = (
        rf"(?:{katakana}(?:{joiner}*{katakana})*"
        rf"|(?:{digit}(?:(?:{joiner}*|{in_number}){digit})*"
        rf"|{letter}(?:(?:{joiner}*|{in_word}){letter}|{quoted})*)+)"
    )
    word = rf"{joiner}*{run}(?:{joiner}+{run})*{joiner}*"
    pictograph, tone, flag = one(f"[{_PICTOGRAPHIC}]"), one(r"[\U0001F3FB-\U0001F3FF]"), one(r"\p{RI}")
    emoji = rf"[#*]\uFE0F?\u20E3|{flag}{flag}|\u200D*{pictograph}(?:(?<=\u200D){pictograph})*|{tone}"
    single = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{ignored}"
    south_east_asian = one(r"\p{LB=SA}") + "+"
    found = regex.compile(rf"{word}|{emoji}|{single}|{south_east_asian}", regex.V1)
    return lambda text: found.findall(text)


# The same rules for ASCII text, which most text is: much faster.
_ASCII_RUN = r"(?:[0-9](?:_*[0-9]|[,;.'][0-9])*|[A-Za-z](?:_*[A-Za-z]|[:.'][A-Za-z])*)+"
_ASCII_WORDS = re.compile(rf"_*{_ASCII_RUN}(?:_+{_ASCII_RUN})*_*").findall


def tokens(text: str) -> list[str]:
    """Split a text into words, spelled as written.

    >>> tokens("women's 2.5-inch t.shirt_a, 100% cotton")
    ["women's", '2.5', 'inch', 't.shirt_a', '100', 'cotton']
    """
    found: list[str] = _ASCII_WORDS(text) if text.isascii() else _words()(text)
    if len(text) > MAX_TOKEN and any(len(token) > MAX_TOKEN for token in found):
        return [token[at : at + MAX_TOKEN] for token in found for at in range(0, len(token), MAX_TOKEN)]
    return found


def analyze(text: str) -> tuple[str, ...]:
    """Terms of a text, in its order and with repetitions."""
    kept = []
    for token in tokens(text):
        term = token.lower()
        if term.endswith(_POSSESSIVE):
            term = term[:-2]
        if term and term not in STOP_WORDS:
            kept.append(stem(term))
    return tuple(kept)


analyze_chunk = functools.lru_cache(_CACHED_CHUNKS)(analyze)
"""Cached `analyze` for text without spaces."""


def chunks(text: str) -> list[str]:
    """Split text into pieces that can be analyzed separately: no word contains a space, except the one that joins."""
    return [text] if "\u202f" in text else text.split()


def terms(text: str) -> list[str]:
    """Analyze many texts that share most of their words.

    >>> terms("the women's relational slippers")
    ['women', 'relat', 'slipper']
    """
    return [term for chunk in chunks(text) for term in analyze_chunk(chunk)]
