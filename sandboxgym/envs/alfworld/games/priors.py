"""Prior of where things are in a home, shared by the embedded games and the expert.

`USUAL_PLACES[item][furniture]` is a relative weight. The generator of the embedded games draws the place of an item
from it (kind of furniture by weight, then one piece of that kind uniformly), so an agent can learn it from many games;
the expert searches by it. The official games know more and longer names: `ALIASES` maps them to a line
or column of the table that suits them. The weights are a guess about homes in general, not fitted to any data set.
"""

from __future__ import annotations

USUAL_PLACES: dict[str, dict[str, int]] = {
    "apple": {"fridge": 4, "counter": 3, "table": 3, "sink": 1, "bin": 1},
    "book": {"shelf": 6, "desk": 3, "bed": 2, "sofa": 2, "table": 2, "dresser": 1, "drawer": 1},
    "bottle": {"counter": 4, "table": 3, "cupboard": 3, "shelf": 3, "fridge": 2, "bin": 2},
    "bowl": {"cupboard": 5, "counter": 3, "table": 3, "shelf": 2, "fridge": 1, "sink": 1, "desk": 1, "dresser": 1},
    "box": {"table": 4, "sofa": 3, "dresser": 3, "desk": 2, "bed": 1, "counter": 1},
    "bread": {"counter": 5, "table": 3, "fridge": 2, "cupboard": 1},
    "candle": {"counter": 3, "toilet": 3, "bath": 2, "shelf": 2, "cupboard": 2, "cart": 2, "drawer": 1},
    "card": {"desk": 4, "dresser": 3, "table": 3, "drawer": 2, "shelf": 3, "sofa": 2, "counter": 2},
    "cloth": {"cupboard": 4, "drawer": 3, "shelf": 2, "dresser": 2, "hamper": 2, "bath": 2, "counter": 1, "bed": 1},
    "cup": {"cupboard": 5, "counter": 2, "shelf": 2, "table": 2, "sink": 2, "microwave": 1, "fridge": 1},
    "disc": {"desk": 4, "shelf": 3, "dresser": 2, "drawer": 2, "safe": 2, "bin": 2},
    "egg": {"fridge": 6, "counter": 2, "sink": 1, "microwave": 1, "bin": 1},
    "fork": {"drawer": 6, "counter": 2, "table": 2, "sink": 2},
    "gadget": {"table": 3, "sofa": 3, "dresser": 3, "desk": 3, "bed": 2, "drawer": 1, "shelf": 1},
    "key": {"drawer": 4, "table": 3, "dresser": 3, "shelf": 1, "sofa": 1, "desk": 1, "safe": 1},
    "knife": {"drawer": 5, "counter": 5, "table": 2, "sink": 1},
    "lamp": {"desk": 4, "table": 3, "dresser": 2, "shelf": 1},
    "mug": {"cupboard": 4, "counter": 2, "desk": 3, "shelf": 2, "coffeemachine": 2, "sink": 1, "table": 1},
    "newspaper": {"table": 4, "sofa": 4, "drawer": 2, "bed": 1, "bin": 1},
    "ornament": {"shelf": 4, "table": 4, "dresser": 3, "desk": 2, "safe": 1, "counter": 1, "cupboard": 1},
    "pan": {"stove": 6, "cupboard": 3, "counter": 2, "sink": 1, "table": 1, "fridge": 1},
    "paper": {"toilet": 4, "cupboard": 3, "holder": 3, "bin": 2, "drawer": 2, "counter": 2, "cart": 2},
    "pen": {"desk": 6, "drawer": 4, "table": 2, "shelf": 2, "dresser": 1, "bin": 1},
    "phone": {"bed": 3, "desk": 3, "sofa": 3, "table": 2, "dresser": 2, "drawer": 1, "counter": 1},
    "pillow": {"bed": 6, "sofa": 5},
    "plate": {"cupboard": 6, "counter": 3, "table": 2, "sink": 1, "fridge": 1, "shelf": 1},
    "potato": {"counter": 3, "fridge": 3, "sink": 2, "table": 2, "cupboard": 1, "microwave": 1, "bin": 1},
    "shaker": {"counter": 4, "cupboard": 4, "table": 3, "drawer": 3, "shelf": 2},
    "soap": {"sink": 5, "shelf": 3, "cupboard": 2, "counter": 2, "toilet": 2, "cart": 2, "bath": 1, "bin": 1},
    "sponge": {"sink": 4, "counter": 3, "cupboard": 2, "drawer": 2, "bin": 1, "toilet": 1, "bath": 1},
    "spoon": {"drawer": 6, "counter": 2, "table": 2, "sink": 2},
    "towel": {"holder": 9, "counter": 1, "bath": 1, "bed": 1},
    "utensil": {"counter": 4, "drawer": 4, "table": 3, "sink": 3},
    "watch": {"dresser": 5, "table": 3, "drawer": 2, "shelf": 2, "safe": 1},
}

ALIASES: dict[str, str] = {
    "alarmclock": "ornament",
    "armchair": "sofa",
    "bathtubbasin": "bath",
    "butterknife": "utensil",
    "cabinet": "cupboard",
    "cd": "disc",
    "cellphone": "phone",
    "coffeetable": "table",
    "countertop": "counter",
    "creditcard": "card",
    "desklamp": "lamp",
    "diningtable": "table",
    "dishsponge": "sponge",
    "floorlamp": "lamp",
    "garbagecan": "bin",
    "glassbottle": "bottle",
    "handtowel": "towel",
    "handtowelholder": "holder",
    "kettle": "pan",
    "keychain": "key",
    "ladle": "utensil",
    "laptop": "gadget",
    "laundryhamper": "hamper",
    "lettuce": "apple",
    "ottoman": "sofa",
    "papertowelroll": "paper",
    "pencil": "pen",
    "peppershaker": "shaker",
    "pot": "pan",
    "remotecontrol": "gadget",
    "saltshaker": "shaker",
    "sidetable": "table",
    "sinkbasin": "sink",
    "soapbar": "soap",
    "soapbottle": "soap",
    "spatula": "utensil",
    "spraybottle": "paper",
    "statue": "ornament",
    "stoveburner": "stove",
    "tissuebox": "paper",
    "toiletpaper": "paper",
    "toiletpaperhanger": "holder",
    "tomato": "apple",
    "towelholder": "holder",
    "tvstand": "dresser",
    "vase": "ornament",
    "wateringcan": "ornament",
    "winebottle": "bottle",
}


def usual_places(item: str) -> dict[str, int]:
    """Weights for an item of the table or of the official games; empty for an unknown item."""
    return USUAL_PLACES.get(ALIASES.get(item, item), {})


def weight(item: str, furniture: str) -> int:
    """Weight of finding ``item`` in or on ``furniture`` (kinds, without numbers); 0 if it is not usual."""
    return usual_places(item).get(ALIASES.get(furniture, furniture), 0)
