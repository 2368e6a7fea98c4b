"""A catalogue of 60 products in the official file format, with every difficulty of pages and options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sandboxgym.envs.webshop.shop import Shop, open_shop

MUG, LAMP, RUG, HOOK, BLANK, RACK = "B000000MUG", "B00000LAMP", "B000000RUG", "B00000HOOK", "B0000BLANK", "B00000RACK"


def nouns(title: str) -> tuple[str, ...]:
    """Tag all words as nouns, which is enough to tell mugs from lamps."""
    return tuple(re.findall("[a-z]+", title.lower()))


def _product(asin: str, name: str, **fields: Any) -> dict[str, Any]:
    options = fields.pop("options", {})
    return {
        "asin": asin,
        "name": name,
        "full_description": f"About the {name}.",
        "small_description": ["First point.", "Second point."],
        "pricing": "$12.50",
        "images": [f"https://example.invalid/{asin}.jpg"],
        "product_category": "Home › Kitchen › Mugs",
        "category": "garden",
        "query": "Kitchen Things",
        "customization_options": {
            group: [{"value": value, "image": None} for value in values] for group, values in options.items()
        },
        **fields,
    }


PRODUCTS = [
    _product(
        MUG,
        "Striped Mug with Handle",
        options={"Color": ["Red", "Sea Blue"], "Size": ["Small", 'Large 3"']},
        query="Mugs",
        pricing="$10.00$20.00",
    ),
    _product(
        LAMP,
        "Desk Lamp <b>bright</b>",
        options={"Height": ["30", "40"], "Width": ["30", "café"], "Sub": ["Description", "Next >", "a[b]"]},
        product_category="Home › Office › Lamps",
        query="Lamps",
    ),
    _product(RUG, "Woven Rug", category="fashion", query="Rugs", small_description="one point only"),
    _product(HOOK, "Wall Hook search_results", pricing=""),
    _product(BLANK, "Plain Tray", full_description=" ", small_description=["", " ", "\n", "last"]),
    _product(RACK, "Shoe Rack", options={"Colour": ["Search", "size"], "Size": ["Big"]}),
    *(_product(f"B0FILLER{number:02}", f"Filler Bowl {number}", category="beauty") for number in range(54)),
]
INSTRUCTIONS: dict[str, dict[str, Any]] = {
    product["asin"]: {"attributes": ["dishwasher safe"]} for product in PRODUCTS
} | {
    MUG: {
        "attributes": ["dishwasher safe", "hand painted"],
        "instruction": "Find me a hand painted striped mug",
        "instruction_attributes": ["hand painted"],
    },
    LAMP: {
        "attributes": ["energy efficient"],
        "instruction": "Find me an energy efficient desk lamp",
        "instruction_attributes": ["energy efficient"],
    },
}
HUMAN = {
    RUG: [
        {
            "asin": RUG,
            "instruction": "i want a woven rug.",
            "attributes": ["dishwasher safe"],
            "options": [],
            "instruction_attributes": ["dishwasher safe"],
            "instruction_options": [],
        }
    ]
}


def write(directory: Path) -> Path:
    """Write the files of the catalogue."""
    for name, content in (
        ("items_shuffle_60.json", PRODUCTS),
        ("items_ins_v2_60.json", INSTRUCTIONS),
        ("items_human_ins.json", HUMAN),
    ):
        (directory / name).write_text(json.dumps(content))
    return directory


def goal_of(shop: Shop, asin: str, **options: str) -> int:
    """Index of a goal."""
    for index in range(len(shop.goals)):
        goal = shop.goals[index]
        if goal.asin == asin and options.items() <= dict(goal.options).items():
            return index
    raise AssertionError(f"no goal for {asin} with {options}")


def shop_in(directory: Path, **arguments: Any) -> Shop:
    """Open the shop with `nouns`."""
    return open_shop(directory, **{"pos": nouns, **arguments})
