"""The shop's search: from keywords to the products on all result pages.

What this module promises:

1. Every backend has the original's semantics: at most 50 products, best first, from the same text of each product.
2. All environments of a process with the same catalogue and backend share one `Search` and its cached answers;
   processes share the index on disk.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from sandboxgym.data import cache_dir
from sandboxgym.envs.webshop.catalogues.catalogue import Catalogue, Product
from sandboxgym.envs.webshop.retrieval.analysis import check_installed, terms
from sandboxgym.envs.webshop.retrieval.index import Index
from sandboxgym.envs.webshop.retrieval.index_build import Document, build, build_on_disk
from sandboxgym.envs.webshop.retrieval.lucene import Lucene, build_lucene

RESULTS = 50
"""Largest number of products that a search finds."""
IN_MEMORY = 5_000
"""Number of products up to which indexing in memory is too fast for a user to notice."""
REMEMBERED = 4_096
"""Number of queries whose answers are cached: up to 15 MB."""
_CODE = ("porter.py", "analysis.py", "index.py", "index_build.py", "search.py")


class Search(Protocol):
    """Search over a catalogue's products. Safe to call from several threads."""

    @property
    def name(self) -> str:
        """Name of the backend."""

    def __call__(self, keywords: str) -> tuple[str, ...]:
        """Find at most `RESULTS` asins, best first; empty where nothing matches."""


def indexed_text(product: Product) -> str:
    """Text of a product that the original's index contains."""
    options = ", and ".join(f"{group}: {', '.join(values)}" for group, values in product.options.items())
    first_bullet = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {first_bullet} {options}".lower()


class BM25:
    """Search with Lucene's ranking, see :mod:`.index`."""

    name = "bm25"

    def __init__(self, index: Index, *, remembered: int = REMEMBERED) -> None:
        self.index = index
        self._find: Callable[[str], tuple[str, ...]] = functools.lru_cache(remembered)(self._search)

    def __call__(self, keywords: str) -> tuple[str, ...]:
        """Find at most `RESULTS` asins, best first."""
        return self._find(keywords)

    def _search(self, keywords: str) -> tuple[str, ...]:
        return tuple([asin for asin, _ in self.index.search(terms(keywords), k=RESULTS)])


_opened: dict[tuple[str, str], Search] = {}
_opening = threading.Lock()


def _unlock() -> None:
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may hold the lock at the moment of a fork
    os.register_at_fork(after_in_child=_unlock)


def open_search(catalogue: Catalogue, backend: str = "bm25") -> Search:
    """Open the search over a catalogue, one object per process.

    Args:
        catalogue: a large one is indexed on disk, once for all processes, under `sandboxgym.data.cache_dir`.
        backend: ``"bm25"``, or ``"lucene"`` for the original's own (``pip install 'sandboxgym[webshop-lucene]'``).

    Raises:
        ValueError: the backend is unknown.
        DependencyNotInstalled: a package or Java is missing.
        OSError: the index cannot be written.
    """
    key = (catalogue.digest, backend)
    with _opening:
        if key not in _opened:
            _opened[key] = _open(catalogue, backend)
        return _opened[key]


def documents(catalogue: Catalogue) -> Iterable[Document]:
    """Documents of a catalogue that are indexed, as a stream."""
    return ((product.asin, indexed_text(product)) for product in catalogue.products())


def build_index(catalogue: Catalogue, *, told: Callable[[int], None] = lambda done: None) -> Index:
    """Open the index of a catalogue on disk, building it first if it is missing.

    Args:
        catalogue: catalogue whose products are searched.
        told: function that is called with the number of products read so far.

    Raises:
        IndexingFailed, OSError: the index cannot be built.
    """

    def counted() -> Iterator[Document]:
        for number, document in enumerate(documents(catalogue)):
            told(number)
            yield document

    directory = cache_dir() / "webshop" / catalogue.digest[:32]
    return build_on_disk(counted, directory / f"index-{_code_digest()}")


def _open(catalogue: Catalogue, backend: str) -> Search:
    directory = cache_dir() / "webshop" / catalogue.digest[:32]
    if backend == "bm25":
        check_installed()  # now, rather than at the first query that is not in ASCII
        if len(catalogue) <= IN_MEMORY:
            return BM25(build(documents(catalogue)))
        return BM25(build_index(catalogue))
    if backend == "lucene":
        index = directory / f"lucene-{_code_digest()}"
        build_lucene(documents(catalogue), index)
        return Lucene(index, results=RESULTS, remembered=REMEMBERED)
    raise ValueError(f"expected the search backend 'bm25' or 'lucene', found {backend!r}")


@functools.cache
def _code_digest() -> str:
    """Digest of the modules that an index depends on, which replaces a version number."""
    digest = hashlib.sha256()
    for name in _CODE:
        digest.update(pkgutil.get_data(__package__, name) or b"")
    return digest.hexdigest()[:16]
