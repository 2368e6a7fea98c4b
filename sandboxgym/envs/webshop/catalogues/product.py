"""Value types of the shop's catalogue, their encoding, and the errors of a catalogue."""

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
"""Attributes that the original gives a product for which none are recorded."""
DOWNLOAD = "`sandboxgym download webshop` gets the official files"


class CatalogueNotFound(FileNotFoundError):
    """Raised if a catalogue or one of its files is missing; the message says which was looked for."""


class CatalogueMalformed(ValueError):
    """Raised if a file of the catalogue is malformed; the message names the file and the record."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product, with the original's names for its parts."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    """List of features."""
    attributes: tuple[str, ...]
    """Hidden attributes that the reward compares; `NO_ATTRIBUTES` if none are recorded, () if the list is empty."""
    options: Mapping[str, tuple[str, ...]] = field(hash=False)
    """Option values by group, all in lower case, in the order of the file."""
    query: str
    """Query under which the product was found; hidden."""
    product_category: str
    """Path of categories, such as "Beauty & Personal Care › Oral Care › Toothbrushes"."""
    category: str
    """Category, one of `CATEGORIES`."""
    pricing: tuple[float, ...]
    """Price in dollars, or the two ends of a range."""
    price_text: str
    """Price on pages: "$19.99", or "$19.99 to $27.99"."""
    image: str
    """Address of the picture; may be empty."""
    instruction: str | None
    """Instruction of synthetic goals; None if there is none for this product."""
    instruction_attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """A person's description of a product, as recorded in ``items_human_ins.json``."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    """Attributes that the instruction asks for; without any, the original makes no goal of it."""
    options: tuple[str, ...]
    """Option values that the instruction asks for."""


HumanInstructions = Mapping[str, tuple[HumanInstruction, ...]]
"""Human instructions by asin; most of these products may be missing from the catalogue."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns for prices and goals, so that products need not be read. n = number of products."""

    pricing: NDArray[np.float64]
    """Prices [n, 2] in dollars; the second is NaN where there is one price."""
    goals: NDArray[np.int64]
    """Number [n] of synthetic goals per product: one for each combination of its options; -1 without an instruction; 0
    if a group of options is empty, where the original still draws a price cap."""
    attribute_goals: Mapping[str, int]
    """Number of synthetic goals that ask for an attribute."""


def encode(product: Product) -> bytes:
    """Encode a product as plain data; equal products, with options in the same order, give equal bytes."""
    values = [getattr(product, name) for name in Product.__slots__]
    values[_OPTIONS] = list(product.options.items())
    packed: bytes = msgpack.packb(values, unicode_errors="surrogatepass")
    return packed


def decode(data: bytes | memoryview) -> Product:
    """Decode the result of `encode`."""
    values = msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass")
    fields: Any = (*values[:_OPTIONS], dict(values[_OPTIONS]), *values[_OPTIONS + 1 :])
    return Product(*fields)


_OPTIONS = Product.__slots__.index("options")


class ColumnsBuilder:
    """Builder of `Columns` from products in their order."""

    def __init__(self) -> None:
        self._pricing = array("d")
        self._goals = array("q")
        self._attribute_goals: dict[str, int] = {}

    def add(self, product: Product) -> None:
        """Add the next product."""
        self._pricing.extend((product.pricing[0], product.pricing[1] if len(product.pricing) > 1 else math.nan))
        goals = -1 if product.instruction is None else math.prod(map(len, product.options.values()))
        self._goals.append(goals)
        if goals > 0:
            for attribute in product.instruction_attributes:
                self._attribute_goals[attribute] = self._attribute_goals.get(attribute, 0) + goals

    def build(self) -> Columns:
        """Build the columns of the products so far."""
        pricing = np.array(self._pricing).reshape(-1, 2)
        return Columns(pricing, np.array(self._goals), self._attribute_goals)
