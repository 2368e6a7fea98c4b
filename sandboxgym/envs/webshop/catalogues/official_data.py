"""Reader of the official files that follows the original's ``load_products``, but as a stream.

1. Files are read record by record: a file of several GB is never in memory as a whole.
2. Every quirk of the original's loader is kept: which records are skipped, how prices and options are normalised.
3. A record that the original could not load, or would fail on later, raises a `CatalogueMalformed` that names it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

from sandboxgym.envs.webshop.catalogues.json_stream import array_elements, object_items
from sandboxgym.envs.webshop.catalogues.product import (
    DOWNLOAD,
    NO_ATTRIBUTES,
    CatalogueMalformed,
    CatalogueNotFound,
    HumanInstruction,
    HumanInstructions,
    Product,
)

logger = logging.getLogger("sandboxgym")

PRODUCTS = "items_shuffle"
INSTRUCTIONS = "items_ins_v2"
HUMAN = "items_human_ins.json"
_NO_DIGIT = re.compile(r"[^\d.]")


@dataclass(frozen=True, slots=True)
class OfficialFiles:
    """Paths of the files of one catalogue."""

    products: Path
    instructions: Path
    human: Path
    """Optional: only human goals need it."""

    def identity(self) -> list[object]:
        """Identity of the files that make the products: equal as long as they are unchanged."""
        status = [path.stat() for path in (self.products, self.instructions)]
        return [os.fspath(self.products), *((s.st_size, s.st_mtime_ns) for s in status)]


def find_files(source: Path) -> OfficialFiles:
    """Find the files that belong together, in a directory or next to a products file.

    Raises:
        CatalogueNotFound: one is missing, or a directory holds more than one products file.
    """
    if source.is_dir():
        found = sorted(source.glob(f"{PRODUCTS}*.json"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            advice = "give the path of the one to use" if found else DOWNLOAD
            raise CatalogueNotFound(f"expected one {PRODUCTS}*.json in {source}, found {names}: {advice}")
        products = found[0]
    elif source.is_file():
        products = source
    else:
        raise CatalogueNotFound(f"no such catalogue: {source}; {DOWNLOAD}")
    # The instructions for all products also fit a part of the products.
    likely = (products.name.replace(PRODUCTS, INSTRUCTIONS), f"{INSTRUCTIONS}.json")
    candidates = [products.with_name(name) for name in likely if name != products.name]
    instructions = next((path for path in candidates if path.is_file()), None)
    if instructions is None:
        expected = " or ".join(dict.fromkeys(path.name for path in candidates))
        raise CatalogueNotFound(f"expected {expected} next to {products}, which holds the attributes; {DOWNLOAD}")
    return OfficialFiles(products, instructions, products.with_name(HUMAN))


def read_products(
    files: OfficialFiles, instructions: Mapping[str, Any], *, told: Callable[[int], None] = lambda at: None
) -> Iterator[Product]:
    """Read the products of an ``items_shuffle*.json``, with their instructions from ``items_ins_v2*.json``.

    Args:
        files: files of the catalogue.
        instructions: instructions by asin, as `read_instructions` returns them.
        told: see `array_elements`.

    Raises:
        CatalogueMalformed: a record is not as expected, or the instructions are about other products.
    """
    number = 0
    without: list[str] = []
    for product in make_products(array_elements(files.products, told=told), instructions, source=files.products):
        number += 1
        if product.asin not in instructions:
            without.append(product.asin)
        yield product
    if without:
        found = f"{files.instructions}: no entry for {len(without):,} of {number:,} products, such as {without[0]}"
        if len(without) == number:
            raise CatalogueMalformed(f"{found}: expected the instructions that belong to {files.products}")
        logger.warning("%s: they get no goals", found)


def make_products(
    records: Iterable[tuple[int, Any]], instructions: Mapping[str, Any], *, source: str | os.PathLike[str]
) -> Iterator[Product]:
    """Make products of numbered records in the official form.

    As in the original, records with the asin "nan" or one of more than 10 characters are left out, and of records with
    the same asin all except the first. A product without instructions has no attributes and no goals.

    Args:
        records: pairs of a number and a record.
        instructions: instructions by asin, as `read_instructions` returns them.
        source: source of the records, for messages.

    Raises:
        CatalogueMalformed: a record is not as expected.
    """
    seen: set[str] = set()
    for index, record in records:
        where = _Where(source, f"record {index}")
        if not isinstance(record, dict):
            where.fail("an object", record)
        asin = where.text(record, "asin")
        if asin == "nan" or len(asin) > 10 or asin in seen:
            continue
        seen.add(asin)
        where = _Where(source, f"record {index} (asin {asin})")
        yield _product(where, asin, record, instructions.get(asin, {}))


def read_instructions(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read asins and their records from an ``items_ins_v2*.json``: checked, otherwise unchanged."""
    for asin, record in object_items(path):
        where = _Where(path, f"asin {asin}")
        if not isinstance(record, dict):
            where.fail("an object", record)
        if "attributes" in record:
            where.texts(record, "attributes")
        if record.get("instruction") is not None:
            where.text(record, "instruction")
            if not where.texts(record, "instruction_attributes"):
                where.fail("at least one of instruction_attributes", [])
        yield asin, record


def read_human_instructions(path: Path) -> HumanInstructions:
    """Read all of ``items_human_ins.json``: 12,087 instructions in some MB.

    Raises:
        CatalogueNotFound: there is no such file.
        CatalogueMalformed: a record is not as expected.
    """
    if not path.is_file():
        raise CatalogueNotFound(f"human goals need {path}; {DOWNLOAD}")
    return make_human_instructions(object_items(path), source=path)


def make_human_instructions(
    items: Iterable[tuple[str, Any]], *, source: str | os.PathLike[str]
) -> dict[str, tuple[HumanInstruction, ...]]:
    """Make human instructions, by asin, of lists of records in the official form."""
    by_asin = {}
    for asin, records in items:
        where = _Where(source, f"asin {asin}")
        if not isinstance(records, list):
            where.fail("a list", records)
        by_asin[asin] = tuple(_human(asin, number, record, source) for number, record in enumerate(records))
    return by_asin


def _human(asin: str, number: int, record: object, source: str | os.PathLike[str]) -> HumanInstruction:
    where = _Where(source, f"asin {asin}, instruction {number}")
    if not isinstance(record, dict):
        where.fail("an object", record)
    return HumanInstruction(
        asin,
        where.text(record, "instruction"),
        where.texts(record, "instruction_attributes"),
        where.texts(record, "instruction_options"),
    )


def _product(where: _Where, asin: str, record: Mapping[str, Any], instructions: Mapping[str, Any]) -> Product:
    bullets = record.get("small_description")
    images = record.get("images")
    if not isinstance(images, list) or not images:
        where.fail("a list 'images' with at least one address", images)
    pricing, price_text = _pricing(where, record.get("pricing"))
    instruction = instructions.get("instruction")
    return Product(
        asin=asin,
        title=where.text(record, "name"),
        description=where.text(record, "full_description"),
        bullets=(bullets,) if isinstance(bullets, str) else where.texts(record, "small_description"),
        attributes=tuple(instructions["attributes"]) if "attributes" in instructions else NO_ATTRIBUTES,
        options=_options(where, record),
        query=where.text(record, "query").lower().strip(),
        product_category=where.text(record, "product_category"),
        category=where.text(record, "category"),
        pricing=pricing,
        price_text=price_text,
        image=images[0] or "",
        instruction=instruction,
        instruction_attributes=() if instruction is None else tuple(instructions["instruction_attributes"]),
    )


def _pricing(where: _Where, pricing: object) -> tuple[tuple[float, ...], str]:
    if not pricing:
        return (100.0,), "$100.0"
    expected = "a 'pricing' such as '$19.99' or '$19.99 - $27.99'"
    if not isinstance(pricing, str):
        where.fail(expected, pricing)
    try:
        found = [float(Decimal(_NO_DIGIT.sub("", part))) for part in pricing.split("$")[1:]]
    except InvalidOperation:
        where.fail(expected, pricing)
    if not found:
        where.fail(expected, pricing)
    if len(found) == 1:
        return (found[0],), f"${found[0]}"
    return tuple(found[:2]), f"${found[0]} to ${found[1]}"


def _options(where: _Where, record: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    groups = record.get("customization_options")
    if "customization_options" not in record or (groups and not isinstance(groups, dict)):
        where.fail("'customization_options' to be an object, or ''", groups)
    options = {}
    for group, contents in (groups or {}).items():
        if contents is None:
            continue
        if not isinstance(contents, list):
            where.fail(f"option group {group!r} to be a list or null", contents)
        values = []
        for content in contents:
            value = content.get("value") if isinstance(content, dict) else None
            if not isinstance(value, str):
                where.fail(f"a 'value' in each of option group {group!r}", content)
            values.append(value.strip().replace("/", " | ").lower())
        options[group.lower()] = tuple(values)
    return options


@dataclass(frozen=True, slots=True)
class _Where:
    """Position of a record, for messages."""

    source: str | os.PathLike[str]
    record: str

    def fail(self, expected: str, found: object) -> NoReturn:
        raise CatalogueMalformed(f"{os.fspath(self.source)}: {self.record}: expected {expected}, found {found!r:.200}")

    def text(self, record: Mapping[str, Any], key: str) -> str:
        value = record.get(key)
        if not isinstance(value, str):
            self.fail(f"a string {key!r}", value if key in record else "no such key")
        return value

    def texts(self, record: Mapping[str, Any], key: str) -> tuple[str, ...]:
        value = record.get(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.fail(f"a list of strings {key!r}", value if key in record else "no such key")
        return tuple(value)
