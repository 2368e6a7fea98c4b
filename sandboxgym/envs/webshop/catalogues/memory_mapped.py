"""A large catalogue on disk: written once, then memory-mapped and shared by all processes.

What this module promises:

1. A store is made in one pass over each file, with the instructions in memory but never the products.
2. A store appears complete or not at all: it is built under another name and renamed. If several processes need the
   same store, one builds it while the others wait; the next builder removes what a killed one left. Changed files get
   another store, and a damaged store is built again.
3. Opening a store reads no products and takes milliseconds. A product is decoded when it is needed, and recently used
   ones are kept.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, overload

import msgpack
import numpy as np
from numpy.typing import NDArray

from sandboxgym.data import cache_dir
from sandboxgym.envs.webshop.catalogues.official_data import (
    OfficialFiles,
    read_human_instructions,
    read_instructions,
    read_products,
)
from sandboxgym.envs.webshop.catalogues.product import (
    Columns,
    ColumnsBuilder,
    HumanInstructions,
    Product,
    decode,
    encode,
)
from sandboxgym.system.once import made_once

logger = logging.getLogger("sandboxgym")

FORMAT = 1
"""Version of the format, increased whenever stores or the reading of the official files change."""
RELEASED = 2**26
"""Number of bytes of products that iterating over all of them keeps in the memory of the process."""
CACHED_PRODUCTS = 4096
"""Number of decoded products that are kept: some 20 MB."""
_META = "meta.json"
_RECORDS = "records.bin"
_ARRAYS = ("offsets", "asins", "sorted_asins", "positions", "pricing", "goals", "category", "query")


class StoredCatalogue:
    """A `Catalogue` in a directory made by `open_store`.

    Raises:
        OSError, ValueError: the directory holds no intact store.
    """

    def __init__(self, directory: Path, files: OfficialFiles) -> None:
        meta = json.loads((directory / _META).read_bytes())
        arrays = {name: np.asarray(np.load(directory / f"{name}.npy", mmap_mode="r")) for name in _ARRAYS}
        self._offsets: NDArray[np.uint64] = arrays["offsets"]
        self._asins: NDArray[np.bytes_] = arrays["asins"]
        self._sorted_asins: NDArray[np.bytes_] = arrays["sorted_asins"]
        self._positions: NDArray[np.int64] = arrays["positions"]
        self._category: NDArray[np.uint32] = arrays["category"]
        self._query: NDArray[np.uint32] = arrays["query"]
        self._columns = Columns(arrays["pricing"], arrays["goals"], meta["attribute_goals"])
        self._categories: list[str] = meta["categories"]
        self._queries: list[str] = meta["queries"]
        nbytes = (directory / _RECORDS).stat().st_size
        if len(self._offsets) != meta["products"] + 1 or self._offsets[-1] != nbytes:
            raise ValueError(f"{directory}: expected {self._offsets[-1]} bytes of products, found {nbytes}")
        with (directory / _RECORDS).open("rb") as file:
            self._records = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if nbytes else b""
        self._files = files
        self.directory = directory
        self.name = os.fspath(files.products)
        self.digest: str = meta["digest"]
        self.at = lru_cache(CACHED_PRODUCTS)(self._decode)

    def _decode(self, position: int) -> Product:
        if not 0 <= position < len(self):
            raise IndexError(f"{self.name} has products 0 to {len(self) - 1}, not {position}")
        return decode(self._records[int(self._offsets[position]) : int(self._offsets[position + 1])])

    def __len__(self) -> int:
        return len(self._asins)

    def __contains__(self, asin: object) -> bool:
        return isinstance(asin, str) and self._find(asin) is not None

    def __getitem__(self, asin: str) -> Product:
        return self.at(self.position(asin))

    def __repr__(self) -> str:
        return f"StoredCatalogue({self.name!r}, {len(self):,} products)"

    def position(self, asin: str) -> int:
        """See `Catalogue.position`."""
        position = self._find(asin)
        if position is None:
            raise KeyError(asin)
        return position

    def _find(self, asin: str) -> int | None:
        key = asin.encode("utf-8", "surrogatepass")
        if len(key) > self._sorted_asins.itemsize:
            return None  # searchsorted would copy all asins into a wider array
        rank = int(np.searchsorted(self._sorted_asins, np.bytes_(key)))
        if rank == len(self) or self._sorted_asins[rank] != key:
            return None
        return int(self._positions[rank])

    def asins(self) -> Sequence[str]:
        """See `Catalogue.asins`."""
        return _Asins(self._asins)

    def products(self) -> Iterator[Product]:
        """See `Catalogue.products`; what was read does not stay in the memory of the process."""
        begun = 0
        for position in range(len(self)):
            yield self._decode(position)
            if (end := int(self._offsets[position])) - begun >= RELEASED:
                begun = self._release(begun, end)

    def _release(self, start: int, end: int) -> int:
        """Release the pages between two bytes, which are read again when needed; returns where the kept ones begin."""
        end -= end % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            assert isinstance(self._records, mmap.mmap)
            self._records.madvise(mmap.MADV_DONTNEED, start, end - start)
        return end

    def in_category(self, category: str) -> Sequence[str]:
        """See `Catalogue.in_category`."""
        return self._equal_to(category, self._category, self._categories)

    def in_query(self, query: str) -> Sequence[str]:
        """See `Catalogue.in_query`."""
        return self._equal_to(query, self._query, self._queries)

    def _equal_to(self, name: str, column: NDArray[np.uint32], names: Sequence[str]) -> Sequence[str]:
        return _Asins(self._asins[column == names.index(name)] if name in names else self._asins[:0])

    def columns(self) -> Columns:
        """See `Catalogue.columns`."""
        return self._columns

    def human_instructions(self) -> HumanInstructions:
        """See `Catalogue.human_instructions`."""
        return self._human_instructions

    @cached_property
    def _human_instructions(self) -> HumanInstructions:
        return read_human_instructions(self._files.human)

    def __deepcopy__(self, memo: object) -> StoredCatalogue:
        return self  # immutable: an environment that is copied shares it with the copy


class _Asins(Sequence[str]):
    """Asins in the store, decoded one by one."""

    def __init__(self, encoded: NDArray[np.bytes_]) -> None:
        self._encoded = encoded

    def __len__(self) -> int:
        return len(self._encoded)

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[str]: ...
    def __getitem__(self, position: int | slice) -> str | Sequence[str]:
        if isinstance(position, slice):
            return _Asins(self._encoded[position])
        return bytes(self._encoded[position]).decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def open_store(
    files: OfficialFiles, directory: Path | None = None, *, told: Callable[[int], None] = lambda at: None
) -> StoredCatalogue:
    """Open the store of these files, building it if there is none: some minutes for all 1.18 million products.

    Args:
        files: files of the catalogue.
        directory: directory of all stores, by default ``webshop`` under `sandboxgym.data.cache_dir`.
        told: function that is called with the number of bytes of the products' file read so far.

    Raises:
        CatalogueMalformed: a record is not as expected; the message names it.
        OSError: the store cannot be written.
    """
    parent = directory or cache_dir() / "webshop"
    store = parent / f"catalogue-{_key(files)}"

    def make(folder: Path) -> None:
        command = f"sandboxgym webshop build {files.products}"
        logger.warning(
            "%s is read into %s: some minutes, once; `%s` shows how far it is", files.products, store, command
        )
        _build(files, folder, told)

    return made_once(store, make, look=lambda: _open(store, files))


def _key(files: OfficialFiles) -> str:
    identity = json.dumps([FORMAT, files.identity()])
    return sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _open(store: Path, files: OfficialFiles) -> StoredCatalogue | None:
    """Open a store; None if there is none, or none that can be used."""
    if not store.is_dir():
        return None
    try:
        return StoredCatalogue(store, files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged and will be built again: %s", store, error)
        return None


def _build(files: OfficialFiles, directory: Path, told: Callable[[int], None]) -> None:
    instructions = _PackedRecords(read_instructions(files.instructions))
    columns = ColumnsBuilder()
    digest = sha256()
    asins: list[bytes] = []
    offsets = [0]
    categories, queries = _Codes(), _Codes()
    with (directory / _RECORDS).open("wb") as records:
        for product in read_products(files, instructions, told=told):
            data = encode(product)
            records.write(data)
            digest.update(data)
            offsets.append(offsets[-1] + len(data))
            asins.append(product.asin.encode("utf-8", "surrogatepass"))
            categories.add(product.category)
            queries.add(product.query)
            columns.add(product)
    built = columns.build()
    asin_array = np.array(asins, dtype=np.bytes_)
    order = np.argsort(asin_array)
    arrays = {
        "offsets": np.array(offsets, dtype=np.uint64),
        "asins": asin_array,
        "sorted_asins": asin_array[order],
        "positions": order,
        "pricing": built.pricing,
        "goals": built.goals,
        "category": np.array(categories.codes, dtype=np.uint32),
        "query": np.array(queries.codes, dtype=np.uint32),
    }
    for name in _ARRAYS:
        np.save(directory / f"{name}.npy", arrays[name])
    meta = {
        "products": len(asins),
        "digest": digest.hexdigest(),
        "categories": list(categories.names),
        "queries": list(queries.names),
        "attribute_goals": dict(built.attribute_goals),
    }
    (directory / _META).write_text(json.dumps(meta), encoding="utf-8")


class _Codes:
    """Numbers for names, in the order of their first use."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.codes = array("I")

    def add(self, name: str) -> None:
        self.codes.append(self.names.setdefault(name, len(self.names)))


class _PackedRecords(Mapping[str, Any]):
    """A mapping that keeps its values encoded, in a fraction of the memory."""

    def __init__(self, items: Iterable[tuple[str, Any]]) -> None:
        self._packed = {key: msgpack.packb(value, unicode_errors="surrogatepass") for key, value in items}

    def __getitem__(self, key: str) -> Any:
        return msgpack.unpackb(self._packed[key], unicode_errors="surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)
