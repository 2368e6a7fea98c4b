"""Martin Porter's stemmer, with the two deviations from his paper that his own programs and Lucene's make.

Porter, M. F. (1980), "An algorithm for suffix stripping", Program 14(3). The deviations: ``-bli`` becomes ``-ble``
where the paper has ``-abli`` to ``-able``, and ``-logi`` becomes ``-log``. Words of one or two letters stay as they
are.
"""

from __future__ import annotations

_STEP_2 = {
    "ational": "ate",
    "tional": "tion",
    "enci": "ence",
    "anci": "ance",
    "izer": "ize",
    "bli": "ble",
    "alli": "al",
    "entli": "ent",
    "eli": "e",
    "ousli": "ous",
    "ization": "ize",
    "ation": "ate",
    "ator": "ate",
    "alism": "al",
    "iveness": "ive",
    "fulness": "ful",
    "ousness": "ous",
    "aliti": "al",
    "iviti": "ive",
    "biliti": "ble",
    "logi": "log",
}
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou"),
    *("ism", "ate", "iti", "ous", "ive", "ize"),
)


def _by_longest(suffixes: dict[str, str] | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(suffixes, key=len, reverse=True))


_SUFFIXES_2, _SUFFIXES_3, _SUFFIXES_4 = _by_longest(_STEP_2), _by_longest(_STEP_3), _by_longest(_STEP_4)


def stem(word: str) -> str:
    """Stem a word in lower case; characters that are not letters count as consonants.

    >>> [stem(word) for word in ("women", "slippers", "relational", "possibly", "technology", "is")]
    ['women', 'slipper', 'relat', 'possibl', 'technolog', 'is']
    """
    if len(word) <= 2:
        return word
    word = _plural(word)
    word = _past(word)
    if word[-1] == "y" and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    word = _replace(word, _SUFFIXES_2, _STEP_2)
    word = _replace(word, _SUFFIXES_3, _STEP_3)
    word = _strip(word)
    return _tidy(word)


def _shape(word: str) -> str:
    """Write the word with every letter as ``v`` (a vowel) or ``c``; y is a vowel after a consonant."""
    shape = ""
    for letter in word:
        shape += "v" if letter in "aeiou" or (letter == "y" and shape[-1:] == "c") else "c"
    return shape


def _measure(word: str) -> int:
    """Porter's measure m: the number of times that a vowel is followed by a consonant."""
    return _shape(word).count("vc")


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _ends_short(word: str) -> bool:
    """Tell whether the word ends in consonant, vowel, consonant, and the last letter is not w, x or y."""
    return len(word) > 2 and word[-1] not in "wxy" and _shape(word)[-3:] == "cvc"


def _plural(word: str) -> str:
    if word[-1] != "s" or word[-2] == "s":
        return word
    return word[:-2] if word.endswith(("sses", "ies")) else word[:-1]


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    cut = 2 if word.endswith("ed") else 3 if word.endswith("ing") else 0
    if not cut or "v" not in _shape(word[:-cut]):
        return word
    word = word[:-cut]
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_double(word):
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_short(word) else word


def _replace(word: str, suffixes: tuple[str, ...], by: dict[str, str]) -> str:
    for suffix in suffixes:
        if word.endswith(suffix):
            stump = word[: -len(suffix)]
            return stump + by[suffix] if _measure(stump) > 0 else word
    return word


def _strip(word: str) -> str:
    for suffix in _SUFFIXES_4:
        if word.endswith(suffix):
            stump = word[: -len(suffix)]
            if suffix == "ion" and stump[-1:] not in ("s", "t"):
                return word
            return stump if _measure(stump) > 1 else word
    return word


def _tidy(word: str) -> str:
    if word[-1] == "e":
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _ends_short(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word
