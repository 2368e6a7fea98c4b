"""The embedded catalogue: generated products with options, prices, attributes and instructions, all our own text.

What this module promises:

1. Records have the official files' form and go through the official loader: there is no second way to make a product.
2. A record depends on its number alone, so the shop is the same on every machine and in every process, and any number
   of products can be generated, one by one.
3. Each kind of product is sold in many versions that share a query but differ in attributes, options and price: finding
   the type is easy, finding the product asked for is not.
"""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sandboxgym.envs.webshop.catalogues.official_data import (
    HUMAN,
    INSTRUCTIONS,
    PRODUCTS,
    make_human_instructions,
    make_products,
)
from sandboxgym.envs.webshop.catalogues.product import HumanInstructions, Product

COUNT = 1000
"""Number of products in the embedded catalogue."""
_SEED = "embedded webshop 1"
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CENTS = (0.99, 0.99, 0.99, 0.95, 0.49, 0.0)
_WITH_INSTRUCTION = 0.45
_OPENINGS = (
    "i am looking for", "i need", "i want", "i would like to buy", "find me", "please show me", "looking for",
    "can you get me", "i'm after", "do you have",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Trait:
    """A property of a product: something that it is, has, or is for."""

    phrase: str
    role: str
    """Role in a sentence: "is", "has" or "for"."""
    feature: str
    paraphrase: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of product."""

    category: str
    path: str
    query: str
    one: str
    """Name of the kind, with its article."""
    names: Sequence[str]
    looks: Sequence[str]
    places: Sequence[str]
    price: tuple[float, float]
    options: Mapping[str, str]
    """Pools of option values by group."""
    traits: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Assortment:
    kinds: tuple[_Kind, ...]
    traits: Mapping[str, _Trait]
    excluding: Sequence[Sequence[str]]
    pools: Mapping[str, Sequence[str]]
    brands: Mapping[str, Sequence[str]]
    filler: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Record:
    """A generated product, in the form of the three official files."""

    item: dict[str, Any]
    instructions: dict[str, Any]
    human: list[dict[str, Any]]


def generate(count: int = COUNT) -> tuple[tuple[Product, ...], HumanInstructions]:
    """Generate the products, and the human instructions for them."""
    made = list(records(count))
    instructions = {record.item["asin"]: record.instructions for record in made}
    products = make_products(((at, record.item) for at, record in enumerate(made)), instructions, source="embedded")
    human = ((record.item["asin"], record.human) for record in made if record.human)
    return tuple(products), make_human_instructions(human, source="embedded")


def write_files(directory: Path, count: int = COUNT) -> None:
    """Write the generated catalogue in the form of the official files, to read it, change it, or make a large one."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        (directory / f"{PRODUCTS}.json").open("w", encoding="utf-8") as items,
        (directory / f"{INSTRUCTIONS}.json").open("w", encoding="utf-8") as instructions,
        (directory / HUMAN).open("w", encoding="utf-8") as human,
    ):
        for number, record in enumerate(records(count)):
            asin = json.dumps(record.item["asin"])
            items.write(("[" if number == 0 else ",\n") + json.dumps(record.item))
            instructions.write(("{" if number == 0 else ",\n") + f"{asin}: {json.dumps(record.instructions)}")
            human.write(("{" if number == 0 else ",\n") + f"{asin}: {json.dumps(record.human)}")
        items.write("]" if count else "[]")
        instructions.write("}" if count else "{}")
        human.write("}" if count else "{}")


def records(count: int) -> Iterator[Record]:
    """Generate the first ``count`` records."""
    kinds = _assortment().kinds
    for number in range(count):
        block, place = divmod(number, len(kinds))
        if place == 0:
            order = random.Random(f"{_SEED} order {block}").sample(kinds, len(kinds))
        yield _record(number, order[place])


def _record(number: int, kind: _Kind) -> Record:
    rng = random.Random(f"{_SEED} {number}")
    stock = _assortment()
    brand, look, name = (rng.choice(names) for names in (stock.brands[kind.category], kind.looks, kind.names))
    place = rng.choice(kind.places)
    traits = _pick_traits(kind, rng)
    options = {
        group: _pick_values(stock.pools[pool], rng)
        for group, pool in kind.options.items()
        if rng.random() < (0.95 if group in ("size", "flavor") else 0.8)
    }
    filler = rng.sample(stock.filler[kind.category], 3)
    asin = _asin(number)
    item = {
        "asin": asin,
        "name": _title(brand, look, name, place, traits, options, rng),
        "full_description": _description(brand, look, name, place, traits, filler[0], rng),
        "small_description": _features(traits, filler[1:], rng),
        "pricing": _pricing(kind, rng),
        "images": [""],
        "product_category": kind.path,
        "customization_options": {
            group.capitalize(): [{"value": value, "image": None} for value in values]
            for group, values in options.items()
        }
        or "",
        "category": kind.category,
        "query": kind.query,
    }
    instructions: dict[str, Any] = {"attributes": [trait.phrase for trait in traits]}
    if rng.random() < _WITH_INSTRUCTION:
        wanted = rng.sample(traits, rng.randint(min(2, len(traits)), min(4, len(traits))))
        instructions["instruction"] = _instruction(kind.query, wanted)
        instructions["instruction_attributes"] = [trait.phrase for trait in wanted]
    human = [_human(asin, kind, traits, options, rng) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    return Record(item, instructions, human)


def _asin(number: int) -> str:
    # An odd factor that is no multiple of 3 has an inverse modulo 36^8: no two numbers give one asin.
    rest = (number * 1_318_699_456_327 + 271_828_182_845) % 36**8
    digits = []
    for _ in range(8):
        rest, digit = divmod(rest, 36)
        digits.append(_DIGITS[digit])
    return "B0" + "".join(digits)


def _pick_traits(kind: _Kind, rng: random.Random) -> list[_Trait]:
    stock = _assortment()
    picked: list[str] = []
    for phrase in rng.sample(kind.traits, rng.choice((3, 4, 4, 5, 5, 6))):
        if not any(phrase in group and other in group for group in stock.excluding for other in picked):
            picked.append(phrase)
    return [stock.traits[phrase] for phrase in picked]


def _pick_values(pool: Sequence[str], rng: random.Random) -> list[str]:
    chosen = set(rng.sample(pool, rng.randint(2, min(6, len(pool)))))
    return [value for value in pool if value in chosen]


def _pricing(kind: _Kind, rng: random.Random) -> str:
    if rng.random() < 0.05:
        return ""
    low, high = map(math.log, kind.price)
    price = max(1.0, math.floor(math.exp(rng.uniform(low, high)))) + rng.choice(_CENTS)
    if rng.random() < 0.1:
        return f"${price:.2f} - ${price + rng.randint(2, max(3, int(price / 2))):.2f}"
    return f"${price:.2f}"


def _title(
    brand: str, look: str, name: str, place: str, traits: Sequence[_Trait], options: Mapping[str, Sequence[str]],
    rng: random.Random,
) -> str:  # fmt: skip
    is_so = next((trait.phrase.title() for trait in traits if trait.role == "is"), "")
    has = next((trait.phrase.title() for trait in traits if trait.role == "has"), "")
    words = [brand, look, name]
    if is_so and rng.random() < 0.5:
        words.insert(rng.choice((1, 2)), is_so)
    if has and rng.random() < 0.5:
        words += ["with", has]
    if rng.random() < 0.6:
        words += ["for", place]
    title = " ".join(words)
    if is_so and is_so not in title and rng.random() < 0.4:
        title += f", {is_so}"
    shown = [values[0] for group, values in options.items() if group in ("color", "size", "flavor", "scent")]
    return f"{title} ({shown[0]})" if shown and rng.random() < 0.3 else title


def _features(traits: Sequence[_Trait], filler: Sequence[str], rng: random.Random) -> list[str]:
    features = [trait.feature for trait in traits if rng.random() < 0.9]
    features += rng.sample(filler, rng.randint(1, len(filler)))
    rng.shuffle(features)
    return features


def _description(
    brand: str, look: str, name: str, place: str, traits: Sequence[_Trait], filler: str, rng: random.Random
) -> str:
    if rng.random() < 0.2:
        return ""
    goods = " ".join(word if word.isupper() else word.lower() for word in name.split())
    opening = rng.choice(
        (
            f"{brand} designed its {look.lower()} {goods} with {place.lower()} in mind.",
            f"Meet the {goods} that {brand} is known for: {look.lower()}, honest and good for {place.lower()}.",
            f"{name} by {brand}: made for {place.lower()}, and for much else.",
            f"We took our time over our {goods}, and we think it shows.",
        )
    )
    sentences = [trait.feature for trait in rng.sample(traits, min(len(traits), rng.randint(0, 2)))]
    return " ".join([opening, *(f"{sentence}." for sentence in (*sentences, filler))])


def _instruction(query: str, wanted: Sequence[_Trait]) -> str:
    """Write an instruction in the style of the original's synthetic ones."""
    by_role = {role: ", ".join(t.phrase for t in wanted if t.role == role) for role in ("is", "has", "for")}
    words = ["Find me", by_role["is"], query]
    words += ["with", by_role["has"]] if by_role["has"] else []
    words += ["for", by_role["for"]] if by_role["for"] else []
    return " ".join(filter(None, words))


def _human(
    asin: str, kind: _Kind, traits: Sequence[_Trait], options: Mapping[str, Sequence[str]], rng: random.Random
) -> dict[str, Any]:
    wanted = rng.sample(traits, rng.choice((1, 1, 2)))
    groups = sorted(rng.sample(sorted(options), min(len(options), rng.choice((0, 1, 1, 2)))))
    chosen = {group: rng.choice(options[group]).replace("/", " | ").lower() for group in groups}
    text = f"{rng.choice(_OPENINGS)} {_goods(kind.one, wanted, rng)}{_choice(chosen, rng)}"
    return {
        "asin": asin,
        "instruction": text + rng.choice((".", "")),
        "attributes": [trait.phrase for trait in traits],
        "options": [f"{group}: {value}" for group, value in chosen.items()],
        "instruction_attributes": [trait.phrase for trait in wanted],
        "instruction_options": list(chosen.values()),
        "assignment_id": "",
        "worker_id": "",
    }


def _goods(one: str, wanted: Sequence[_Trait], rng: random.Random) -> str:
    text = one
    for trait in wanted:
        if rng.random() < 0.4:
            text += f", {trait.paraphrase}" if trait.role == "for" else f" {trait.paraphrase}"
        elif trait.role == "is":
            article, rest = text.split(" ", 1)
            article = "an" if trait.phrase[0] in "aeiou" else "a"
            text = f"{article} {trait.phrase} {rest}"
        else:
            text += f" {'with' if trait.role == 'has' else 'for'} {trait.phrase}"
    return text


def _choice(chosen: Mapping[str, str], rng: random.Random) -> str:
    said = []
    for group, value in chosen.items():
        if group == "size":
            said.append(rng.choice((f"in size {value}", f"size {value}", f"in the {value} size")))
        elif group in ("color", "flavor", "scent", "pattern"):
            said.append(rng.choice((f"in {value}", f"in the {group} {value}", f"{value} {group}")))
        else:
            said.append(rng.choice((f"with {group} {value}", f"the {value} one")))
    return "".join(f", {part}" for part in said)


@cache
def _assortment() -> _Assortment:
    text = resources.files(__package__).joinpath("embedded", "assortment.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return _Assortment(
        kinds=tuple(_Kind(**kind) for kind in data["kinds"]),
        traits={
            phrase: _Trait(phrase, role, feature, paraphrase)
            for role, rows in data["traits"].items()
            for phrase, (feature, paraphrase) in rows.items()
        },
        excluding=data["excluding"],
        pools=data["pools"],
        brands=data["brands"],
        filler=data["filler"],
    )
