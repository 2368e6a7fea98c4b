"""Product catalogues: the embedded one, or the official files unchanged.

What this module promises:

1. A catalogue is immutable and shared by everything in the process that asks for the same source. Products come in the
   order of the file, with the fields that the original's loader makes of them, quirks included (`official_data`).
2. Equal products give equal digests, wherever the files lie and however they are kept.
3. The files are never modified. Missing files raise `CatalogueNotFound`, malformed ones `CatalogueMalformed` with file
   and record.
4. A small catalogue stays in memory. A large one is read once, as a stream, into a memory-mapped store that all
   processes share (:mod:`.memory_mapped`); both are read by the same code.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from sandboxgym.envs.webshop.catalogues import generated
from sandboxgym.envs.webshop.catalogues import memory_mapped as catalogue_store
from sandboxgym.envs.webshop.catalogues.official_data import (
    OfficialFiles,
    find_files,
    read_human_instructions,
    read_instructions,
    read_products,
)
from sandboxgym.envs.webshop.catalogues.product import (
    CATEGORIES,
    NO_ATTRIBUTES,
    CatalogueMalformed,
    CatalogueNotFound,
    Columns,
    ColumnsBuilder,
    HumanInstruction,
    HumanInstructions,
    Product,
    encode,
)

__all__ = [
    "CATEGORIES",
    "NO_ATTRIBUTES",
    "Catalogue",
    "CatalogueMalformed",
    "CatalogueNotFound",
    "Columns",
    "HumanInstruction",
    "HumanInstructions",
    "MemoryCatalogue",
    "Product",
    "load_catalogue",
]

IN_MEMORY_BYTES = 64 * 2**20
"""Size of the largest products file that is kept in memory: some 20,000 products."""


class Catalogue(Protocol):
    """An ordered, immutable set of products."""

    @property
    def name(self) -> str:
        """Source of the catalogue: "embedded", or the path of the products file."""

    @property
    def digest(self) -> str:
        """SHA-256 of the products in their order, in hexadecimal. Human instructions do not count."""

    @property
    def directory(self) -> Path | None:
        """Directory of a catalogue on disk, in which data computed from it may be kept too; else None."""

    def __hash__(self) -> int: ...

    def __len__(self) -> int: ...

    def __contains__(self, asin: object) -> bool: ...

    def __getitem__(self, asin: str) -> Product:
        """Find a product by its asin. Raises KeyError if there is none."""

    def at(self, position: int) -> Product:
        """Product at a position of the file, from 0."""

    def position(self, asin: str) -> int:
        """Inverse of `at`. Raises KeyError if there is no such product."""

    def asins(self) -> Sequence[str]:
        """Asins in the order of the file."""

    def products(self) -> Iterator[Product]:
        """Products in the order of the file."""

    def in_category(self, category: str) -> Sequence[str]:
        """Asins of a category, in the order of the file."""

    def in_query(self, query: str) -> Sequence[str]:
        """Asins of the products found under exactly this query, in the order of the file."""

    def columns(self) -> Columns:
        """Columns of all products, for prices and goals."""

    def human_instructions(self) -> HumanInstructions:
        """Human instructions by asin, also for products missing here. Raises CatalogueNotFound if there are none."""


class MemoryCatalogue:
    """A `Catalogue` of products in memory.

    Args:
        products: products with different asins.
        name: source of the catalogue.
        human_instructions: function that returns the human instructions; called when they are first needed.

    Raises:
        ValueError: two products have the same asin.
    """

    directory = None

    def __init__(
        self, products: Iterable[Product], *, name: str, human_instructions: Callable[[], HumanInstructions] = dict
    ) -> None:
        self._products = tuple(products)
        self._asins = tuple(product.asin for product in self._products)
        self._positions = {asin: position for position, asin in enumerate(self._asins)}
        if len(self._positions) < len(self._asins):
            twice = next(asin for position, asin in enumerate(self._asins) if self._positions[asin] != position)
            raise ValueError(f"{name}: two products have the asin {twice}")
        self.name = name
        self._read_human_instructions = human_instructions

    @cached_property
    def digest(self) -> str:
        """See `Catalogue.digest`."""
        digest = sha256()
        for product in self._products:
            digest.update(encode(product))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._products)

    def __contains__(self, asin: object) -> bool:
        return asin in self._positions

    def __getitem__(self, asin: str) -> Product:
        return self._products[self._positions[asin]]

    def __repr__(self) -> str:
        return f"MemoryCatalogue({self.name!r}, {len(self):,} products)"

    def at(self, position: int) -> Product:
        """See `Catalogue.at`."""
        return self._products[position]

    def position(self, asin: str) -> int:
        """See `Catalogue.position`."""
        return self._positions[asin]

    def asins(self) -> Sequence[str]:
        """See `Catalogue.asins`."""
        return self._asins

    def products(self) -> Iterator[Product]:
        """See `Catalogue.products`."""
        return iter(self._products)

    def in_category(self, category: str) -> Sequence[str]:
        """See `Catalogue.in_category`."""
        return tuple(product.asin for product in self._products if product.category == category)

    def in_query(self, query: str) -> Sequence[str]:
        """See `Catalogue.in_query`."""
        return tuple(product.asin for product in self._products if product.query == query)

    def columns(self) -> Columns:
        """See `Catalogue.columns`."""
        return self._columns

    @cached_property
    def _columns(self) -> Columns:
        builder = ColumnsBuilder()
        for product in self._products:
            builder.add(product)
        return builder.build()

    def human_instructions(self) -> HumanInstructions:
        """See `Catalogue.human_instructions`."""
        return self._human_instructions

    @cached_property
    def _human_instructions(self) -> HumanInstructions:
        return self._read_human_instructions()

    def __deepcopy__(self, memo: object) -> MemoryCatalogue:
        return self  # immutable: an environment that is copied shares it with the copy


_loaded: dict[str, tuple[object, Catalogue]] = {}
_lock = threading.RLock()


def _unlock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # another thread may hold the lock at the moment of a fork
    os.register_at_fork(after_in_child=_unlock)


def load_catalogue(source: str | os.PathLike[str] = "embedded") -> Catalogue:
    """Load the catalogue of a source, one object per process until the files change.

    Args:
        source: "embedded", a directory with ``items_shuffle*.json``, ``items_ins_v2*.json`` and, for human goals,
            ``items_human_ins.json``, or the path of one ``items_shuffle*.json`` next to the others.

    Raises:
        CatalogueNotFound: a file is missing, or the directory holds more than one products file.
        CatalogueMalformed: a record is not as expected; the message names it.
    """
    if source == "embedded":
        return _shared("embedded", None, _embedded)
    files = find_files(Path(os.path.abspath(source)))
    return _shared(os.fspath(files.products), files.identity(), lambda: _official(files))


def _shared(name: str, identity: object, load: Callable[[], Catalogue]) -> Catalogue:
    with _lock:
        if name not in _loaded or _loaded[name][0] != identity:
            _loaded[name] = identity, load()
        return _loaded[name][1]


def _embedded() -> Catalogue:
    products, instructions = generated.generate()
    return MemoryCatalogue(products, name="embedded", human_instructions=lambda: instructions)


def _official(files: OfficialFiles) -> Catalogue:
    if files.products.stat().st_size > IN_MEMORY_BYTES:
        return catalogue_store.open_store(files)
    instructions = dict(read_instructions(files.instructions))
    products = read_products(files, instructions)
    return MemoryCatalogue(
        products, name=os.fspath(files.products), human_instructions=lambda: read_human_instructions(files.human)
    )
