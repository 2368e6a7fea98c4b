"""A rule-based expert that knows the shop only through its pages.

What this module promises:

1. The expert sees what an agent sees: observations in mode ``text`` or ``text_rich``. No goal, no catalogue, no list of
   actions, no score.
2. It searches for the instruction's words, opens the products with the best titles and prices, compares their pages,
   goes back to the best one, chooses the options that the instruction asks for, and buys.
3. It ends with a purchase, after some 16 actions on average, and continues from any page that a random action led
   to. It is deterministic except for ``noise``.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sandboxgym.envs.webshop.text_pages import SELECTED, SEPARATOR

_CAP = re.compile(r",? and price lower than ([\d.]+) dollars")
_PAIR = re.compile(r"(?: with|,? and) ([a-z][a-z0-9 ]*): ")
_PRICE = re.compile(r"\$([\d,.]+\d)(?: to \$([\d,.]+\d))?")
_PAGE = re.compile(r"Page (-?\d+) \(Total results: (\d+)\)")
_MARK = re.compile(r"\s*\[(?:clicked )?button\] (.*) \[(?:clicked )?button_\]", re.DOTALL)
_ASIN = re.compile(r"(?=[A-Z]*\d)[A-Z0-9]{10}")  # with a digit: "strawberry" is an option
WORD = re.compile(r"[a-z0-9]+")
"""Pattern of a word in lower case."""
_COURTESIES = (
    "a after am and are as at be buy can do find for from get have i in is it like looking m me my need of on one or "
    "please show some that the to want which with would you your"
)
_GROUPS = (
    "color colour size style scent flavor flavour pattern material length shape finish fit pack quantity count edition "
    "configuration capacity width height design model set volume weight package"
)
"""Words in the names of option groups: in plain text they tell groups from values."""
_POLITE, _NAMING = frozenset(_COURTESIES.split()), frozenset(_GROUPS.split())
_ENOUGH = 0.999
_PATIENCE = 20, 45
"""Steps after which it compares no more products, and steps after which it buys at once."""


@dataclass(frozen=True, slots=True)
class Order:
    """An instruction as its parts: product, attributes, options and price."""

    text: str
    cap: float
    """Highest price in dollars."""
    pairs: tuple[tuple[str, str], ...]
    """Options named as "group: value"."""
    words: frozenset[str]
    """Words of the wanted product, without courtesies, price and such options."""
    keywords: str
    """Words to search for, in their order."""


def read_order(instruction: str) -> Order:
    """Parse an instruction.

    >>> order = read_order("Find me rugs with color: sky blue, and size: 2x3, and price lower than 30.00 dollars")
    >>> order.cap, order.pairs, order.keywords
    (30.0, (('color', 'sky blue'), ('size', '2x3')), 'rug sky blue 2x3')
    """
    cap = _CAP.search(instruction)
    text = _CAP.sub("", instruction)
    marks = list(_PAIR.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    pairs = tuple((mark[1], text[mark.end() : end].rstrip(" ,.")) for mark, end in zip(marks, ends))
    wanted = text[: marks[0].start()] if marks else text
    words = [word for word in _words(wanted) if word not in _POLITE]
    said = [word for _, value in pairs for word in WORD.findall(value.lower())]
    keywords = " ".join([*words, *said])
    return Order(text.lower(), float(cap[1]) if cap else float("inf"), pairs, frozenset(words), keywords)


@dataclass(slots=True)
class _Item:
    """Knowledge of a product whose page was read."""

    covered: set[str] = field(default_factory=set)
    """Words of the order that the product's pages contain."""
    options: list[str] = field(default_factory=list)
    """Option values to choose."""
    asked: int = 0
    """Number of options that the order asks for, as far as its words tell."""
    read: bool = False
    """True if the features were read."""
    dear: bool = False

    def worth(self, order: Order) -> float:
        """Estimate of the share of the reward that the product would give."""
        words = len(self.covered) / max(1, len(order.words))
        options = min(1.0, len(self.options) / self.asked) if self.asked else 1.0
        return (2 * words + options) / 3 - (0.3 if self.dear else 0.0)


class Expert:
    """Rule-based shopper: call `reset` with the first observation, then `act` with it and with each later one.

    With probability ``noise`` an action is not the expert's: half of these lead to some other page, half do nothing.
    `noisy` tells whether the last one was.

    Args:
        rng: random stream of the noise.
        noise: probability of a random action.
        candidates: largest number of products to compare. Fewer make shorter and worse episodes.
        reads: also look at the products' features, which takes two more actions for each.
        copies: search for the instruction as it stands, take the products in the shop's order, and write names as pages
            show them, after a blank (``click[ B0TCQ3ZDOE]``), so that a small model can learn to copy them.
        listed: search for the whole instruction, and take the products in the shop's order, so that every action is one
            of the ``admissible_commands``.
        careless: probability of an episode with one of two mistakes, always the same two for a task: it chooses no
            options, or takes the neighbour of the first option that it should choose.

    Raises:
        ValueError: ``careless`` is not a probability.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        noise: float = 0.0,
        *,
        candidates: int = 6,
        reads: bool = True,
        copies: bool = False,
        listed: bool = False,
        careless: float = 0.0,
    ) -> None:
        if not 0 <= careless <= 1:
            raise ValueError(f"careless: expected a probability, found {careless!r}")
        self._rng = rng or random.Random(0)
        self._noise = noise
        self._candidates = candidates
        self._reads = reads
        self._copies, self._listed = copies, listed
        self._careless = careless
        self.noisy = False

    def reset(self, observation: str) -> None:
        """Forget everything, then read the instruction.

        Raises:
            ValueError: the observation has no instruction, as in modes ``html`` and ``url``.
        """
        pieces = _pieces(observation)
        if "Instruction:" not in pieces:
            raise ValueError(f"expected a page with an instruction (mode text, text_rich), found {observation!r:.100}")
        self._instruction = pieces[pieces.index("Instruction:") + 1]
        self._order = read_order(self._instruction)
        self._items: dict[str, _Item] = {}
        self._here: str | None = None
        self._chosen: set[str] = set()
        self._searches = self._steps = 0
        self._decided: str | None = None
        careless = self._careless > 0 and self._rng.random() < self._careless
        self._mistake = self._rng.choice((_none, _neighbour)) if careless else None

    def act(self, observation: str) -> str:
        """Choose the next action, given the page."""
        pieces = _pieces(observation)
        action = self._next(pieces)
        self.noisy = self._rng.random() < self._noise
        if self.noisy:
            action = self._slip(pieces)
        self._steps += 1
        self._note(action, done=not self.noisy)
        return self._as_shown(action) if self._copies else action

    def _as_shown(self, action: str) -> str:
        verb, _, name = action.removesuffix("]").partition("[")
        return f"{verb}[ {name.upper() if _ASIN.fullmatch(name.upper()) else name}]"

    def _next(self, pieces: Sequence[str]) -> str:
        if "Buy Now" in pieces:
            return self._at_item(pieces)
        if len(pieces) > 3 and any(map(_PAGE.fullmatch, pieces[:5])):
            return self._at_results(pieces)
        if pieces and pieces[-1] == "Search":
            return f"search[{self._keywords()}]"
        if "< Prev" in pieces:
            return self._at_features(pieces)
        return "click[back to search]"  # after the purchase, any action does nothing

    def _keywords(self) -> str:
        if self._listed:
            return self._instruction
        words = (self._order.text if self._copies else self._order.keywords).split()
        if self._searches == 0 or self._items:
            return " ".join(words)
        return " ".join(words[: max(1, len(words) // (1 + self._searches))])  # fewer after each search without results

    # Pages.

    def _at_results(self, pieces: Sequence[str]) -> str:
        rows = list(_rows(pieces))
        if not rows:
            return "click[back to search]" if self._searches < 3 else "click[< prev]"
        if self._decided is None and len(self._items) < self._candidates:
            fresh = [row for row in self._ranked(rows) if row[0] not in self._items]
            if fresh:
                return f"click[{fresh[0][0].lower()}]"
        self._decided = self._best()
        if self._decided not in (asin for asin, _, _ in rows) and self._steps < _PATIENCE[1]:
            return "click[< prev]" if "< Prev" in pieces else "click[back to search]"
        return f"click[{self._decided.lower()}]"

    def _ranked(self, rows: Sequence[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
        """Rank products by likelihood: many wanted words in the title, those that few titles have first."""
        having = Counter(word for _, title, _ in rows for word in self._wanted(title))

        def score(row: tuple[str, str, float]) -> float:
            wanted = () if self._copies or self._listed else self._wanted(row[1])
            words = sum(1.0 + 1.0 / having[word] for word in wanted)
            return words - 100 * (row[2] > self._order.cap)

        return sorted(rows, key=score, reverse=True)

    def _at_item(self, pieces: Sequence[str]) -> str:
        asin = self._here or ""
        item = self._items.setdefault(asin, _Item())
        end = pieces.index("Buy Now")
        price = next((at for at, piece in enumerate(pieces[:end]) if piece.startswith("Price: ")), end)
        title = pieces[price - 1]
        start = pieces.index("< Prev") + 1 if "< Prev" in pieces else 0
        choices = [piece.removesuffix(SELECTED) for piece in pieces[start : price - 1]]
        self._chosen |= {piece.removesuffix(SELECTED) for piece in pieces[start:price] if piece.endswith(SELECTED)}
        item.covered |= self._wanted(title)
        item.dear = _price(pieces[price]) > self._order.cap
        item.options, item.asked = self._fitting(choices)
        if self._mistake is not None:
            item.options = self._mistake(item.options, choices)
        for option in item.options:
            item.covered |= self._wanted(option)
        if self._decided is None and item.worth(self._order) < _ENOUGH:
            suits = len(item.options) >= item.asked
            if self._reads and suits and not item.read and "Features" in pieces:
                return "click[features]"
            if len(self._items) < self._candidates and self._steps < _PATIENCE[0]:
                return "click[< prev]"
            if self._best() != asin:
                return "click[< prev]"
        self._decided = asin
        missing = [option for option in item.options if option not in self._chosen]
        return f"click[{missing[0]}]" if missing and self._steps < _PATIENCE[1] else "click[buy now]"

    def _at_features(self, pieces: Sequence[str]) -> str:
        item = self._items.setdefault(self._here or "", _Item())
        item.read = True
        for piece in pieces[pieces.index("< Prev") + 1 :]:
            item.covered |= self._wanted(piece)
        return "click[< prev]"

    def _best(self) -> str:
        return max(self._items, key=lambda asin: self._items[asin].worth(self._order))

    # Words.

    def _wanted(self, text: str) -> set[str]:
        return {word for word in _words(text) if word in self._order.words}

    def _fitting(self, choices: Sequence[str]) -> tuple[list[str], int]:
        """Choose option values, one per group, and count the options that are asked for."""
        groups = list(_grouped(choices))
        fitting = []
        if self._order.pairs:
            for name, wanted in self._order.pairs:
                values = [value for group, values in groups if group == name for value in values]
                exact = [value for value in values if _same(value, wanted)]
                anywhere = [value for _, values in groups for value in values if _same(value, wanted)]
                fitting += (exact or anywhere)[:1]
            return fitting, len(self._order.pairs)
        text = f" {' '.join(WORD.findall(self._order.text))} "
        for _, values in groups:
            said = [value for value in values if f" {' '.join(WORD.findall(value.lower()))} " in text]
            fitting += sorted(said, key=len, reverse=True)[:1]
        return fitting, len(fitting)

    # Memory of past actions.

    def _note(self, action: str, *, done: bool) -> None:
        name = action.partition("[")[2].removesuffix("]")
        if action.startswith("search["):
            self._searches += done
            self._here = None
        elif _ASIN.fullmatch(name.upper()):
            if name.upper() != self._here:
                self._chosen = set()
            self._here = name.upper()
            self._items.setdefault(self._here, _Item())
        elif name in ("back to search", "< prev"):
            self._chosen = set()
        elif name not in ("features", "description", "reviews", "buy now") and done:
            self._chosen.add(name)

    def _slip(self, pieces: Sequence[str]) -> str:
        if self._rng.random() < 0.5:
            return self._rng.choice(("click[add to cart]", "search[]", "click[next page]", "open[results]"))
        names = [name for name in ("Back to Search", "< Prev", "Next >", "Description", "Reviews") if name in pieces]
        names += [asin for asin, _, _ in _rows(pieces)]
        return f"click[{self._rng.choice(names).lower()}]" if names else "search[gift]"


def _none(options: Sequence[str], choices: Sequence[str]) -> list[str]:
    return []


def _neighbour(options: Sequence[str], choices: Sequence[str]) -> list[str]:
    """Replace the first option by its neighbour in its group: the next one, or the one before the last."""
    for _, values in _grouped(choices):
        if options and options[0] in values and len(values) > 1:
            at = values.index(options[0])
            return [values[at + 1 if at + 1 < len(values) else at - 1], *options[1:]]
    return list(options)


def _pieces(observation: str) -> list[str]:
    if SEPARATOR in observation or "\n" not in observation:
        return [piece.strip() for piece in observation.split(SEPARATOR)]
    lines = [line for line in observation.split("\n") if line.strip() and not line.startswith("You have clicked ")]
    return [match[1] if (match := _MARK.fullmatch(line)) else line.strip() for line in lines]


def _rows(pieces: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Parse (asin, title, price) of the products on a page of results."""
    if any(map(_PAGE.fullmatch, pieces[:5])):
        for asin, title, price in zip(pieces, pieces[1:], pieces[2:]):
            if _ASIN.fullmatch(asin) and price.startswith("$"):
                yield asin, title, _price(price)


def _price(text: str) -> float:
    """Middle of a price range: the shop draws one price from it, unseen."""
    match = _PRICE.search(text)
    if match is None:
        return 0.0
    low = float(match[1].replace(",", ""))
    return (low + float(match[2].replace(",", ""))) / 2 if match[2] else low


def _grouped(choices: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Split pieces of text into group names and values, by the words of names; the first piece is always a name."""
    name, values = "", list[str]()
    for at, piece in enumerate(choices):
        if at == 0 or (set(WORD.findall(piece.lower())) & _NAMING and not re.search(r"\d", piece)):
            if values:
                yield name, values
            name, values = piece.lower(), []
        else:
            values.append(piece)
    if values:
        yield name, values


def _same(value: str, wanted: str) -> bool:
    return WORD.findall(value.lower()) == WORD.findall(wanted.lower())


def _words(text: str) -> Iterable[str]:
    """Words of a text, without endings that differ between a query and a title."""
    for word in WORD.findall(text.lower()):
        yield word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
