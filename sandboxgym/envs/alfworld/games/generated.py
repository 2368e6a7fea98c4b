"""Embedded games: small household games of this package, in the file format of the official ALFWorld games.

What this module promises:

1. A game is a function of (split, index) alone: the same bytes on every machine and Python version.
2. All six task types take turns: game ``i`` has type ``TASK_TYPES[i % 6]``. Every game is solvable and comes with a
   short walkthrough, both by construction.
3. Splits are made by layout (which furniture, what stands beside what, what is open at first). "train" and "seen" share
   the train layouts, and no game of "seen" is one of "train" (they take the two values of a bit of the game's hash);
   the layouts of "unseen" occur in neither.
4. Small: 6 to 9 pieces of furniture, 6 to 10 items, walkthroughs of 3 to 11 steps, one-word names with numbers 1 to 4.
   Items are placed by `priors.USUAL_PLACES`.
5. Only PDDL and grammar constructs of the official files are used (``embedded/domain.pddl``, ``grammar.twl2``), and
   the official command language. Unlike there, anything may be put anywhere, and nothing can be sliced.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TypeVar

from sandboxgym.envs.alfworld.games.priors import USUAL_PLACES

T = TypeVar("T")

SPLITS = ("train", "seen", "unseen")
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

LAYOUTS_PER_ROOM = {"train": 16, "unseen": 6}
HINGED = ("cupboard", "drawer", "fridge", "microwave")
LAMP_STANDS = ("desk", "table", "dresser")
LIT_ROOMS = ("bedroom", "lounge")


@dataclass(frozen=True, slots=True)
class Treatment:
    """A change of an item that a task may ask for: its place, the items it applies to, and the resulting state."""

    verb: str
    appliance: str
    items: tuple[str, ...]
    state: str


TREATMENTS = {
    "pick_clean_then_place_in_recep": Treatment(
        "clean",
        "sink",
        ("apple", "potato", "cup", "mug", "plate", "bowl", "fork", "spoon", "knife", "pan", "soap", "cloth"),
        "clean",
    ),
    "pick_heat_then_place_in_recep": Treatment(
        "heat", "microwave", ("apple", "bread", "egg", "potato", "cup", "mug", "plate"), "hot"
    ),
    "pick_cool_then_place_in_recep": Treatment(
        "cool", "fridge", ("apple", "bread", "egg", "potato", "cup", "mug", "bowl", "pan"), "cold"
    ),
}


@dataclass(frozen=True, slots=True)
class Room:
    """A type of room: fixed furniture, optional furniture (one piece per mention), and the items that turn up in it."""

    fixed: tuple[str, ...]
    optional: tuple[str, ...]
    items: tuple[str, ...]


ROOMS = {
    "kitchen": Room(
        ("counter", "fridge", "microwave", "sink"),
        ("bin", "cupboard", "cupboard", "cupboard", "drawer", "drawer", "shelf", "stove", "table"),
        ("apple", "bread", "egg", "potato", "cup", "mug", "plate", "bowl", "fork", "spoon", "knife", "pan", "soap"),
    ),
    "bedroom": Room(
        ("bed", "desk", "drawer"),
        ("bin", "cupboard", "drawer", "drawer", "dresser", "shelf", "shelf", "sofa", "table"),
        ("book", "pen", "phone", "key", "watch", "pillow", "mug", "cloth"),
    ),
    "lounge": Room(
        ("shelf", "sofa", "table"),
        ("bin", "cupboard", "desk", "drawer", "drawer", "dresser", "shelf", "sofa", "table"),
        ("book", "pen", "phone", "key", "watch", "pillow", "bowl", "cup"),
    ),
    "bathroom": Room(
        ("counter", "sink", "cupboard"),
        ("bin", "cupboard", "cupboard", "drawer", "drawer", "shelf", "shelf", "table"),
        ("soap", "cloth", "cup", "watch", "key", "phone", "book"),
    ),
}


@dataclass(frozen=True, slots=True)
class Furniture:
    """A piece of furniture; pieces with the same ``spot`` stand together, where one step reaches them all."""

    name: str
    spot: int
    open: bool

    @property
    def kind(self) -> str:
        """Kind of furniture, the name without its number."""
        return self.name.split()[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """A furnished room, before any item is put into it."""

    room: str
    furniture: tuple[Furniture, ...]

    def of_kind(self, kind: str) -> tuple[Furniture, ...]:
        """Pieces of a kind, in the order of their numbers."""
        return tuple(piece for piece in self.furniture if piece.kind == kind)


@dataclass(frozen=True, slots=True)
class HouseholdGame:
    """One generated game: the place of each item (by name), and the task."""

    layout: Layout
    places: tuple[tuple[str, Furniture], ...]
    task_type: str
    target: str
    destination: str

    @property
    def task(self) -> str:
        """Task sentence of the game."""
        if self.task_type == "look_at_obj_in_light":
            return f"take a {self.target} and use a {self.destination}"
        if self.task_type == "pick_two_obj_and_place":
            return f"move two {self.target} to a {self.destination}"
        if self.task_type in TREATMENTS:
            return f"{TREATMENTS[self.task_type].verb} a {self.target} and move it to a {self.destination}"
        return f"move a {self.target} to a {self.destination}"

    def problem(self) -> str:
        """PDDL problem of the game."""
        furniture = _identifiers([piece.name for piece in self.layout.furniture])
        items = _identifiers([item for item, _ in self.places])
        spots = [f"spot{spot}" for spot in range(1 + max(piece.spot for piece in self.layout.furniture))]
        kinds = sorted({name.split()[0] for name in (*furniture, *items)})
        facts = ["standing agent1 spot0", "emptyhanded agent1"]
        for piece in self.layout.furniture:
            facts += _furniture_facts(piece, furniture[piece.name])
        for item, piece in self.places:
            facts += [*_item_facts(item, items[item]), f"inside {items[item]} {furniture[piece.name]}"]
        return "\n".join(
            (
                "(define (problem game)",
                " (:domain household)",
                " (:objects",
                "  agent1 - agent",
                f"  {' '.join(spots)} - spot",
                f"  {' '.join(furniture.values())} - furniture",
                f"  {' '.join(items.values())} - item",
                f"  {' '.join(kind + 'kind' for kind in kinds)} - kind)",
                " (:init",
                *(f"  ({fact})" for fact in facts),
                " )",
                f" (:goal {self._goal()}))",
                "",
            )
        )

    def walkthrough(self) -> list[str]:
        """Short winning plan, made with knowledge of where everything is."""
        plan = _Plan()
        targets = [(item, piece) for item, piece in self.places if item.split()[0] == self.target]
        if self.task_type == "look_at_obj_in_light":
            lamp, stand = next((item, piece) for item, piece in self.places if item.split()[0] == "lamp")
            plan.take(*targets[0])
            plan.reach(stand)
            plan.commands.append(f"use {lamp}")
            return plan.commands
        # An open piece saves a step, so it is preferred where several would do.
        goal = max(self.layout.of_kind(self.destination), key=lambda piece: piece.open)
        for item, piece in targets[: 2 if self.task_type == "pick_two_obj_and_place" else 1]:
            plan.take(item, piece)
            if treatment := TREATMENTS.get(self.task_type):
                appliance = self.layout.of_kind(treatment.appliance)[0]
                plan.reach(appliance)
                plan.commands.append(f"{treatment.verb} {item} with {appliance.name}")
            plan.put(item, goal)
        return plan.commands

    def to_json(self) -> bytes:
        """Content of the game file, as the ``game.tw-pddl`` of the official data set."""
        document = {
            "pddl_domain": _template("domain.pddl"),
            "grammar": _template("grammar.twl2").replace("@TASK@", self.task),
            "pddl_problem": self.problem(),
            "solvable": True,
            "walkthrough": self.walkthrough(),
        }
        return json.dumps(document, indent=1).encode()

    def _goal(self) -> str:
        if self.task_type == "look_at_obj_in_light":
            held = f"(itemkind ?i {self.target}kind) (holds ?a ?i)"
            by_lamp = "(standing ?a ?s) (placed ?r ?s) (inside ?l ?r) (lamp ?l) (lit ?l)"
            variables = "?a - agent ?s - spot ?r - furniture ?i - item ?l - item"
            return f"(exists ({variables}) (and {held} {by_lamp}))"
        there = f"(furniturekind ?r {self.destination}kind)"
        one = f"(itemkind ?i {self.target}kind) (inside ?i ?r)"
        if self.task_type == "pick_two_obj_and_place":
            other = f"(itemkind ?j {self.target}kind) (inside ?j ?r) (not (= ?i ?j))"
            return f"(exists (?r - furniture ?i - item ?j - item) (and {there} {one} {other}))"
        treatment = TREATMENTS.get(self.task_type)
        state = f" ({treatment.state} ?i)" if treatment else ""
        return f"(exists (?r - furniture ?i - item) (and {there} {one}{state}))"


class _Plan:
    """Commands of an agent that knows the game, and what they have changed so far."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self._spot = 0
        self._opened: list[Furniture] = []

    def reach(self, piece: Furniture) -> None:
        if piece.spot != self._spot:
            self.commands.append(f"go to {piece.name}")
            self._spot = piece.spot

    def take(self, item: str, piece: Furniture) -> None:
        self._access(piece)
        self.commands.append(f"take {item} from {piece.name}")

    def put(self, item: str, piece: Furniture) -> None:
        self._access(piece)
        self.commands.append(f"move {item} to {piece.name}")

    def _access(self, piece: Furniture) -> None:
        self.reach(piece)
        if not piece.open and piece not in self._opened:
            self.commands.append(f"open {piece.name}")
            self._opened.append(piece)


def task_type_of(index: int) -> str:
    """Task type of an embedded game, known without generating it."""
    return TASK_TYPES[index % len(TASK_TYPES)]


def generate_game(split: str, index: int) -> bytes:
    """Generate the game file with this number; ``index`` has no upper bound.

    Raises:
        ValueError: the split is unknown, or the index is negative.
    """
    return draw_game(split, index).to_json()


def draw_game(split: str, index: int) -> HouseholdGame:
    """Draw the game of `generate_game`, before it is written as a file."""
    if split not in SPLITS or index < 0:
        raise ValueError(f"expected a split of {SPLITS} and an index of 0 or more, found {split!r}, {index}")
    attempt = 0
    while True:
        rng = random.Random(f"household/{split}/{index}/{attempt}")
        game = _draw(rng, split, task_type_of(index))
        if game is not None and (split == "unseen" or _bit(game) == SPLITS.index(split)):
            return game
        attempt += 1


@functools.cache
def layouts(split: str) -> tuple[Layout, ...]:
    """Layouts of a split; "train" and "seen" share theirs, "unseen" has none of these."""
    train = LAYOUTS_PER_ROOM["train"]
    part = slice(train, None) if split == "unseen" else slice(train)
    return tuple(layout for room in ROOMS for layout in _room_layouts(room)[part])


@functools.cache
def _room_layouts(room: str) -> tuple[Layout, ...]:
    """Draw distinct layouts of a room."""
    found: list[Layout] = []
    attempt = 0
    while len(found) < sum(LAYOUTS_PER_ROOM.values()):
        layout = _draw_layout(random.Random(f"layout/{room}/{attempt}"), room)
        if layout not in found:
            found.append(layout)
        attempt += 1
    return tuple(found)


def _draw_layout(rng: random.Random, room: str) -> Layout:
    kinds = list(ROOMS[room].fixed)
    optional = list(ROOMS[room].optional)
    for _ in range(6 + _below(rng, 4) - len(kinds)):
        kinds.append(optional.pop(_below(rng, len(optional))))
    kinds.sort()
    # One layout in three has a pair that stands together: "go to" reaches only one of the two from elsewhere.
    beside = _below(rng, 3 * (len(kinds) - 1))
    pieces: list[Furniture] = []
    spot = 0
    for position, kind in enumerate(kinds):
        spot += position != beside + 1
        is_open = kind not in HINGED or _below(rng, 6) == 0
        pieces.append(Furniture(f"{kind} {1 + kinds[:position].count(kind)}", spot, is_open))
    return Layout(room, tuple(pieces))


def _draw(rng: random.Random, split: str, task_type: str) -> HouseholdGame | None:
    """Draw a game; None where the drawn layout does not suit the task."""
    layout = _choose(rng, layouts(split))
    task = _draw_task(rng, layout, task_type)
    if task is None:
        return None
    target, destination = task
    places: dict[str, Furniture] = {}
    if destination == "lamp":
        places["lamp 1"] = _choose(rng, _lamp_stands(layout))
    # In some games a second object also fits the task.
    copies = 2 if task_type == "pick_two_obj_and_place" else 1 + (_below(rng, 5) == 0)
    drawn = [target] * copies
    others = [item for item in ROOMS[layout.room].items if item != target]
    total = 6 + _below(rng, 5)
    while len(drawn) + len(places) < total:
        drawn.append(_choose(rng, [item for item in others if drawn.count(item) < 3]))
    for position, item in enumerate(drawn):
        # No target starts where it should end.
        piece = _usual_place(rng, item, layout, avoid=destination if item == target else None)
        if piece is None:
            return None
        places[f"{item} {1 + drawn[:position].count(item)}"] = piece
    return HouseholdGame(layout, tuple(sorted(places.items(), key=lambda place: place[0])), task_type, *task)


def _draw_task(rng: random.Random, layout: Layout, task_type: str) -> tuple[str, str] | None:
    """Draw a target and its destination; None where the layout lacks what the task needs."""
    items = ROOMS[layout.room].items
    if task_type == "look_at_obj_in_light":
        return (_choose(rng, items), "lamp") if _lamp_stands(layout) else None
    treatment = TREATMENTS.get(task_type)
    if treatment is not None:
        if not layout.of_kind(treatment.appliance):
            return None
        items = tuple(item for item in items if item in treatment.items)
    if not items:
        return None
    target = _choose(rng, items)
    unfit = treatment.appliance if treatment else "bin"
    options = [kind for kind in USUAL_PLACES[target] if layout.of_kind(kind) and kind != unfit]
    return (target, _choose(rng, options)) if options else None


def _lamp_stands(layout: Layout) -> tuple[Furniture, ...]:
    stands = tuple(piece for piece in layout.furniture if piece.kind in LAMP_STANDS)
    return stands if layout.room in LIT_ROOMS else ()


def _usual_place(rng: random.Random, item: str, layout: Layout, *, avoid: str | None) -> Furniture | None:
    weights = {kind: n for kind, n in USUAL_PLACES[item].items() if kind != avoid and layout.of_kind(kind)}
    return _choose(rng, layout.of_kind(_weighted(rng, weights))) if weights else None


def _bit(game: HouseholdGame) -> int:
    return hashlib.sha256(game.problem().encode()).digest()[0] & 1


def _furniture_facts(piece: Furniture, identifier: str) -> list[str]:
    facts = [f"placed {identifier} spot{piece.spot}", f"furniturekind {identifier} {piece.kind}kind"]
    facts += [f"hinged {identifier}"] if piece.kind in HINGED else []
    facts += [f"accessible {identifier}"] if piece.open else []
    verb = {"sink": "washes", "microwave": "heats", "fridge": "cools"}.get(piece.kind)
    return facts + ([f"{verb} {identifier}"] if verb else [])


def _item_facts(item: str, identifier: str) -> list[str]:
    kind = item.split()[0]
    facts = [f"itemkind {identifier} {kind}kind", f"{'lamp' if kind == 'lamp' else 'portable'} {identifier}"]
    able = {"clean": "washable", "hot": "warmable", "cold": "chillable"}
    return facts + [f"{able[each.state]} {identifier}" for each in TREATMENTS.values() if kind in each.items]


def _identifiers(names: Sequence[str]) -> dict[str, str]:
    """Make PDDL identifiers for names such as "shelf 1".

    The engines number the identifiers of a kind downwards in sorted order, so the k-th of n gets the suffix n - k.
    """
    kinds = [name.split()[0] for name in names]
    suffixes = [kinds.count(kind) - int(name.split()[1]) for name, kind in zip(names, kinds)]
    return {name: f"{kind}_bar_{suffix}" for name, kind, suffix in zip(names, kinds, suffixes)}


@functools.cache
def _template(name: str) -> str:
    return resources.files(__package__).joinpath("embedded", name).read_text(encoding="utf-8")


# Of `random.Random`, only `random()` is promised to give the same numbers in every Python version.


def _below(rng: random.Random, n: int) -> int:
    return int(rng.random() * n)


def _choose(rng: random.Random, options: Sequence[T]) -> T:
    return options[_below(rng, len(options))]


def _weighted(rng: random.Random, weights: Mapping[str, int]) -> str:
    return _choose(rng, [key for key, n in weights.items() for _ in range(n)])
