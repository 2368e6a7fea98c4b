"""The value types of the shop's catalogue, their encoding, and what can be wrong with a catalogue."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

CATEGORIES = ("beauty", "electronics", "garden", "fashion", "grocery")
NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""What the original gives a product for which no attributes are recorded."""
DOWNLOAD = "`sandboxgym download webshop` gets the official files"


class CatalogueNotFound(FileNotFoundError):
    """No catalogue there, or a file of it is missing. The message says what was looked for."""


class CatalogueMalformed(ValueError):
    """A file of the catalogue is not what it should be. The message names the file and the record."""


@dataclass(frozen=True, slots=True)
class Product:
    """What the shop sells, in the original's words."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    """The features."""
    attributes: tuple[str, ...]
    """Hidden; the reward compares with them. `NO_ATTRIBUTES` where none are recorded, () where an empty list is."""
    options: Mapping[str, tuple[str, ...]] = field(hash=False)
    """Group to values, all in lower case, in the order of the file."""
    query: str
    """The query under which the product was found; hidden."""
    product_category: str
    """Such as "Beauty & Personal Care › Oral Care › Toothbrushes"."""
    category: str
    """One of `CATEGORIES`."""
    pricing: tuple[float, ...]
    """One price in dollars, or the two ends of a range."""
    price_text: str
    """As pages show it: "$19.99", or "$19.99 to $27.99"."""
    image: str
    """Address of the picture; may be empty."""
    instruction: str | None
    """Of synthetic goals; None if there are none for this product."""
    instruction_attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """What a person wrote to describe a product, as recorded in ``items_human_ins.json``."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    """Those that the instruction asks for; where there are none the original makes no goal of it."""
    options: tuple[str, ...]
    """Option values that it asks for."""


HumanInstructions = Mapping[str, tuple[HumanInstruction, ...]]
"""By asin. Only few of them need be in the catalogue."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What prices and goals need of every product, without reading the products. n = number of products."""

    pricing: NDArray[np.float64]
    """[n, 2] in dollars; the second is NaN where there is one price."""
    goals: NDArray[np.int64]
    """[n] synthetic goals of each product: one for each combination of its options, -1 without an instruction. 0 where
    a group of options is empty: the original draws a price cap all the same."""
    attribute_goals: Mapping[str, int]
    """How many synthetic goals ask for an attribute."""


def encode(product: Product) -> bytes:
    """A product as plain data; equal products, with their options in the same order, give equal bytes."""
    values = [getattr(product, name) for name in Product.__slots__]
    values[_OPTIONS] = list(product.options.items())
    packed: bytes = msgpack.packb(values, unicode_errors="surrogatepass")
    return packed


def decode(data: bytes | memoryview) -> Product:
    """Inverse of `encode`."""
    values = msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass")
    fields: Any = (*values[:_OPTIONS], dict(values[_OPTIONS]), *values[_OPTIONS + 1 :])
    return Product(*fields)


_OPTIONS = Product.__slots__.index("options")


class ColumnsBuilder:
    """Collects `Columns` from products in their order."""

    def __init__(self) -> None:
        self._pricing = array("d")
        self._goals = array("q")
        self._attribute_goals: dict[str, int] = {}

    def add(self, product: Product) -> None:
        """The next product."""
        self._pricing.extend((product.pricing[0], product.pricing[1] if len(product.pricing) > 1 else math.nan))
        goals = -1 if product.instruction is None else math.prod(map(len, product.options.values()))
        self._goals.append(goals)
        if goals > 0:
            for attribute in product.instruction_attributes:
                self._attribute_goals[attribute] = self._attribute_goals.get(attribute, 0) + goals

    def build(self) -> Columns:
        """Of the products so far."""
        pricing = np.array(self._pricing).reshape(-1, 2)
        return Columns(pricing, np.array(self._goals), self._attribute_goals)
