"""Noun taggers for titles, on which the reward's title score depends.

The backend is chosen by the argument alone, never by what happens to be installed, and has a name, so that results can
say which one was used. Every title is tagged once: answers are cached for the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from gymnasium.error import DependencyNotInstalled

from sandboxgym.envs.webshop.words.tagger import find_nouns

SPACY_MODEL = "en_core_web_sm"
"""Model that the original loads; much of the published work uses "en_core_web_lg" in its place."""
_CACHED_TITLES = 2**15
_NOUN_TAGS = frozenset({"NOUN", "PROPN"})


class NounsUnknown(LookupError):
    """Raised if the file does not have the nouns of a title."""


class Nouns(Protocol):
    """A tagger of the nouns of a title."""

    @property
    def name(self) -> str:
        """Name of the backend: "embedded", "spacy:en_core_web_sm", "file:title_nouns.json", "callable:…"."""

    def __call__(self, title: str) -> tuple[str, ...]:
        """Nouns and proper nouns of a title in lower case, in order, with repetitions."""


class CachedNouns:
    """`Nouns` of any function, each title tagged once.

    Args:
        function: function from a title to an iterable of its nouns.
        name: name of the backend.
    """

    def __init__(self, function: Callable[[str], Iterable[str]], *, name: str) -> None:
        self.name = name
        self._cached = lru_cache(_CACHED_TITLES)(lambda title: tuple(function(title)))

    def __call__(self, title: str) -> tuple[str, ...]:
        """See `Nouns`."""
        return self._cached(title)

    def __repr__(self) -> str:
        return f"CachedNouns({self.name!r})"

    def __deepcopy__(self, memo: object) -> CachedNouns:
        return self  # keeps nothing but a cache


def open_nouns(
    source: str | os.PathLike[str] | Callable[[str], Iterable[str]] = "embedded",
    *,
    fallback: str | Callable[[str], Iterable[str]] | None = None,
) -> Nouns:
    """Open a tagger of nouns.

    Args:
        source: "embedded" (rules of this package, :mod:`.tagger`), "spacy" or "spacy:MODEL" (as the original), a
            function from a title to its nouns, or the path of a JSON file, an object of titles and their nouns.
        fallback: tagger of the titles that a file does not have; without it, they raise `NounsUnknown`.

    Raises:
        DependencyNotInstalled: spaCy or its model is missing; the message says how to get it.
        FileNotFoundError: there is no such file.
        ValueError: the file does not hold such an object, or a fallback is given for a backend that needs none.
    """
    is_file = not callable(source) and not (
        isinstance(source, str) and (source == "embedded" or source.split(":")[0] == "spacy")
    )
    if fallback is not None and not is_file:
        raise ValueError(f"a fallback is for files, which may lack titles; found {fallback!r} with nouns {source!r}")
    if callable(source):
        return CachedNouns(source, name=f"callable:{getattr(source, '__qualname__', type(source).__name__)}")
    if is_file:
        return _from_file(Path(source), None if fallback is None else open_nouns(fallback))
    if source == "embedded":
        return _embedded()
    return _spacy(str(source).partition(":")[2] or SPACY_MODEL)


@lru_cache(1)
def _embedded() -> CachedNouns:
    return CachedNouns(find_nouns, name="embedded")


@lru_cache(4)
def _spacy(model: str) -> CachedNouns:
    if importlib.util.find_spec("spacy") is None:
        raise DependencyNotInstalled(
            f"nouns 'spacy' need spaCy and its model: pip install spacy && python -m spacy download {model}"
        )
    import spacy

    try:
        nlp = spacy.load(model, disable=["parser", "ner", "lemmatizer"])
    except OSError as error:
        raise DependencyNotInstalled(
            f"nouns 'spacy:{model}' need that model: python -m spacy download {model} ({error})"
        ) from error
    return CachedNouns(
        lambda title: [token.text.lower() for token in nlp(title) if token.pos_ in _NOUN_TAGS], name=f"spacy:{model}"
    )


def _from_file(path: Path, fallback: Nouns | None) -> CachedNouns:
    expected = "a JSON object from titles to lists of nouns"
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: expected {expected}, found {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected {expected}, found {type(content).__name__}")
    for title, nouns in content.items():
        if not isinstance(nouns, list) or not all(isinstance(noun, str) for noun in nouns):
            raise ValueError(f"{path}: expected a list of nouns for {title!r}, found {nouns!r:.100}")

    def look_up(title: str) -> Iterable[str]:
        if title in content:
            return tuple(content[title])
        if fallback is None:
            raise NounsUnknown(f"{path} has no nouns for the title {title!r}, and no fallback was given")
        return fallback(title)

    return CachedNouns(look_up, name=f"file:{path.name}" + (f"+{fallback.name}" if fallback else ""))
