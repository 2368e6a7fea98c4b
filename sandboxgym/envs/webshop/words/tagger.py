"""A small noun tagger for product titles.

The original takes the nouns and proper nouns that a spaCy model finds. Such a model reads the capitals of a title as
names: for it, "Clear", "Modern" and "Low" are nouns if capitalised. The rules here do the same; they were chosen to
agree with the results of real models (the original's tests, recorded purchases by people).

1. Words are cut as spaCy cuts English: at white space, before and after punctuation, at hyphens, slashes and commas
   within a word, before "'s" and between a number and its unit.
2. A capitalised word is a noun unless it is a function word, one of a few words that are not nouns in any case, a
   participle after a hyphen, or an -ing form that begins the title.
3. A word in lower case is a noun unless it is known for, or ends like, another part of speech.
4. A word without a letter is not a noun, nor is one that begins with a digit: "15PCs" and "2PK" count as numbers.
"""

from __future__ import annotations

import re

from sandboxgym.envs.webshop.words.lists import word_list

_PREFIX = re.compile(r"""''|--|\.\.+|-(?=\W|$)|[(\[{<"'“”‘’«»「」（）【】*$£€¥#&%~§©®™°+…–—，,:;!?_]""")
_SUFFIX = re.compile(
    r"""'[sS]|’[sS]|''|--|(?<=\d)\+|[)\]}>"'“”‘’«»「」（）【】*$£€¥%…–—，,:;!?_©®™°&]|\.\.+|(?<=[a-z0-9)\]}"'%²\-+])\.|(?<=[A-Z]{2})\."""
)
_UNIT = re.compile(
    r"(?<=\d)(?:km²?|km³|m²|m³|dm²?|cm²?|cm³|mm²?|mm³|ha|µm|nm|yd|in|ft|kg|g|mg|µg|t|lb|oz|m/s|km/h|mph|hPa|Pa|mbar|mb"
    r"|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|cm|m)$"
)
_INFIX = re.compile(
    r"…|°|\.\.+|(?<=\d)[+\-*^](?=[\d\-])|(?<=[a-z\"'”’])\.(?=[A-Z\"'“‘])|(?<=[^\W\d_]),(?=[^\W\d_])"
    r"|(?<=[^\W_])(?:--?|–|—|~)(?=[^\W\d_])|(?<=[^\W_])[:<>=/](?=[^\W\d_])"
)

_ABBREVIATIONS = frozenset({"Dr.", "Mr.", "Mrs.", "Ms.", "St.", "Co.", "Inc.", "Ltd.", "Jr.", "vs."})
_FUNCTION_WORDS = frozenset(word_list("function_words"))
_NEVER_NOUNS = frozenset(word_list("never_nouns"))
_LOWER_CASE = frozenset(word_list("other_words_in_lower_case"))
_NOT_NOUN_ENDINGS = word_list("endings")
_NOUNS_ALL_THE_SAME = frozenset(word_list("nouns_in_spite_of_their_ending"))


def words(title: str) -> list[str]:
    """Split a title into words and punctuation."""
    return [word for chunk in title.split() for word in _cut(chunk)]


def find_nouns(title: str) -> tuple[str, ...]:
    """Nouns of a title in lower case, in order, with repetitions."""
    found = []
    before = ""
    for word in words(title):
        if _is_noun(word, before):
            found.append(word.lower())
        before = word if before or word[0].isalnum() else ""
    return tuple(found)


def _cut(chunk: str) -> list[str]:
    start: list[str] = []
    end: list[str] = []
    while chunk and chunk not in _ABBREVIATIONS:
        if match := _PREFIX.match(chunk):
            start.append(match.group())
            chunk = chunk[match.end() :]
            continue
        suffixes = [m for m in _SUFFIX.finditer(chunk) if m.end() == len(chunk)]
        match = suffixes[0] if suffixes else _UNIT.search(chunk)
        if not match or match.start() == 0:
            break
        end.append(match.group())
        chunk = chunk[: match.start()]
    middle = []
    at = 0
    for match in _INFIX.finditer(chunk):
        if match.start() > at:
            middle.append(chunk[at : match.start()])
        middle.append(match.group())
        at = match.end()
    if chunk[at:]:
        middle.append(chunk[at:])
    return start + middle + end[::-1]


def _is_noun(word: str, before: str) -> bool:
    lower = word.lower()
    if word[0].isdigit() or not any(map(str.isalpha, word)):
        return False
    if lower in _FUNCTION_WORDS or lower in _NEVER_NOUNS or lower in ("'s", "’s"):
        return False
    if lower in _NOUNS_ALL_THE_SAME:
        return True
    if before in ("-", "–") and lower.endswith("ed"):
        return False
    if any(map(str.isupper, word)):
        return not (before == "" and lower.endswith("ing"))
    return lower not in _LOWER_CASE and not lower.endswith(_NOT_NOUN_ENDINGS)
