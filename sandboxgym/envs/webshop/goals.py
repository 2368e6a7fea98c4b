"""Goals, prices and splits, in the original's order and with its random draws.

What this module promises:

1. One stream, ``random.Random(price_seed)``, gives first the prices of the products that show a range, in the order of
   the catalogue, then the price caps of the goals: the draws of the original with that seed.
2. The order of goals is the original's shuffle by seed 233. It depends on the number of goals and on nothing else: it
   is the same for every seed, worker and process, so that a split by index means the same goals everywhere.
3. Only a few numbers per product are kept: goals are made on request. With all 1.18 million products, whose
   combinations of options make millions of synthetic goals, only the order takes much memory.
4. What takes seconds to compute is kept on disk, written atomically, and memory-mapped by later processes: the order
   of many goals, and the draws for a catalogue that is itself on disk. A file that does not fit is written again.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from sandboxgym.data import cache_dir
from sandboxgym.envs.webshop.catalogues.catalogue import Catalogue
from sandboxgym.envs.webshop.catalogues.product import Product
from sandboxgym.system.atomic import atomic_file

Kind = Literal["synthetic", "human"]
Split = Literal["test", "eval", "train", "product-test", "product-eval", "product-train"]

SHUFFLE_SEED = 233
PRICE_CAPS = tuple(10.0 * tens for tens in range(1, 100))
NO_CAP = 1_000_000.0
"""Upper price of a goal without a cap, because fewer than two of `PRICE_CAPS` are above its product's price."""
OFFICIAL_SPLITS = {"test": (0, 500), "eval": (500, 1500), "train": (1500, None)}
PRODUCT_SPLITS = {"product-test": (0, 10), "product-eval": (10, 20), "product-train": (20, 100)}
"""Splits of the products in percent."""
Number = TypeVar("Number", bound=np.generic)
Options = tuple[tuple[str, str], ...] | tuple[str, ...]
_CACHED_GOALS = 2**15
_LONG = 2**20
_DRAWS_FORMAT = 1
"""Version of the kept draws, increased whenever they would change."""
_KEPT_DRAWS = 16
"""Limit of the number of files of draws that a catalogue keeps, some MB each."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of an episode."""

    asin: str
    """Product that the goal was made from; another one may satisfy it as well."""
    category: str
    query: str
    name: str
    """Title of that product."""
    product_category: str
    instruction: str
    """Instruction for the agent; names the price cap, if there is one."""
    attributes: tuple[str, ...]
    price_upper: float
    """Price cap in dollars; `NO_CAP` if there is none."""
    options: Options
    """(group, value) for synthetic goals, values for human ones: the original compares them so."""
    weight: float
    """Weight in the original's draw of a goal; weights need not sum to 1."""
    kind: Kind
    goal_id: str
    """Id such as "synthetic/12": kind, and position in the order of all goals."""


class Prices(Mapping[str, float]):
    """Prices in dollars of all products, by asin."""

    def __init__(self, catalogue: Catalogue, values: NDArray[np.float64]) -> None:
        self._catalogue = catalogue
        self.by_position = values
        """Prices [number of products] in the order of the catalogue."""

    def __getitem__(self, asin: str) -> float:
        return float(self.by_position[self._catalogue.position(asin)])

    def __contains__(self, asin: object) -> bool:
        return asin in self._catalogue

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalogue.asins())

    def __len__(self) -> int:
        return len(self._catalogue)


def prices(catalogue: Catalogue, price_seed: int = 0) -> Prices:
    """Draw the price of every product from its range; pages show the range, and the reward uses the drawn price."""
    return _draw_prices(catalogue, random.Random(price_seed))


def _draw_prices(catalogue: Catalogue, rng: random.Random) -> Prices:
    pricing = catalogue.columns().pricing
    values = pricing[:, 0].copy()
    for position in np.flatnonzero(~np.isnan(pricing[:, 1])).tolist():
        values[position] = rng.uniform(*pricing[position].tolist())
    return Prices(catalogue, values)


def _draw_cap(price: float, rng: random.Random) -> float:
    first = bisect_right(PRICE_CAPS, price)
    candidates = PRICE_CAPS[first : first + 4]
    return max(rng.sample(candidates, 2)) if len(candidates) >= 2 else NO_CAP


def _drawn(catalogue: Catalogue, price_seed: int, positions: NDArray[np.int64]) -> tuple[Prices, NDArray[np.float64]]:
    """All draws of one stream: prices, then the price caps of the products at ``positions``; see promise 4."""
    pricing = catalogue.columns().pricing
    ranges = np.flatnonzero(~np.isnan(pricing[:, 1]))
    path = _draws_path(catalogue, price_seed, positions)
    kept = None if path is None else _kept(path, (len(ranges) + len(positions),), np.float64)
    if kept is None:
        rng = random.Random(price_seed)
        drawn = _draw_prices(catalogue, rng).by_position
        caps = [_draw_cap(price, rng) for price in drawn[positions].tolist()]
        kept = np.concatenate((drawn[ranges], np.array(caps, dtype=np.float64)))
        if path is not None and len(list(path.parent.glob("draws-*"))) < _KEPT_DRAWS:
            _keep(path, kept)
    values = pricing[:, 0].copy()
    values[ranges] = kept[: len(ranges)]
    return Prices(catalogue, values), kept[len(ranges) :]


def _draws_path(catalogue: Catalogue, price_seed: int, positions: NDArray[np.int64]) -> Path | None:
    """File for the draws; None where they are not kept. Only a stream's raw numbers are the same in all Pythons."""
    if catalogue.directory is None or type(price_seed) is not int:
        return None
    identity = f"{_DRAWS_FORMAT} {sys.version_info[:2]} {price_seed} ".encode() + positions.tobytes()
    return catalogue.directory / f"draws-{blake2b(identity, digest_size=12).hexdigest()}.npy"


def _cap_text(cap: float) -> str:
    return "" if cap == NO_CAP else f", and price lower than {cap:.2f} dollars"


class Goals(Sequence[Goal]):
    """Goals of a kind, in the one order by which tasks are numbered and splits are made.

    A *source* is what goals are made of: a product with an instruction, or a person's instruction.

    Args:
        positions: positions in the catalogue of the sources' products, in its order.
        counts: number of goals of each source.
    """

    kind: Kind

    def __init__(
        self, catalogue: Catalogue, price_seed: int, positions: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> None:
        self.catalogue = catalogue
        self.price_seed = price_seed
        self.prices, self._caps = _drawn(catalogue, price_seed, positions)
        """Prices by the first draws of the stream: the same as those of the function `prices`."""
        self._positions = positions
        self._ends = np.cumsum(counts)
        self._order = shuffled(int(self._ends[-1]) if len(self._ends) else 0)
        self._goal = lru_cache(_CACHED_GOALS)(self._make)

    def _make(self, index: int) -> Goal:
        number = int(self._order[index])
        source = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[source - 1]) if source else 0
        product = self.catalogue.at(int(self._positions[source]))
        instruction, attributes, options = self._describe(source, product, number - first)
        cap = float(self._caps[source])
        return Goal(
            asin=product.asin,
            category=product.category,
            query=product.query,
            name=product.title,
            product_category=product.product_category,
            instruction=instruction + _cap_text(cap),
            attributes=attributes,
            price_upper=cap,
            options=options,
            weight=self._weight(source),
            kind=self.kind,
            goal_id=f"{self.kind}/{index}",
        )

    @abstractmethod
    def _describe(self, source: int, product: Product, number: int) -> tuple[str, tuple[str, ...], Options]:
        """Describe a goal: the instruction without price, its attributes and its options."""

    @abstractmethod
    def _weight(self, source: int) -> float: ...

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Goal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Goal]: ...
    def __getitem__(self, index: int | slice) -> Goal | Sequence[Goal]:
        if isinstance(index, slice):
            return tuple(map(self._goal, range(*index.indices(len(self)))))
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"expected a goal from 0 to {len(self) - 1}, found {index}")
        return self._goal(number % len(self))

    def __repr__(self) -> str:
        return f"<{len(self):,} {self.kind} goals of {self.catalogue!r}, price_seed={self.price_seed}>"

    def weights(self) -> NDArray[np.float64]:
        """Weights [number of goals] by which the original draws a goal where none is asked for."""
        weights = np.fromiter(map(self._weight, range(len(self._positions))), np.float64, len(self._positions))
        return weights[self._sources()]

    def in_products(self, chosen: Callable[[str], bool]) -> Sequence[int]:
        """Indices of the goals of the products with chosen asins."""
        asins = self.catalogue.asins()
        of_source = [chosen(asins[position]) for position in self._positions.tolist()]
        return array("q", np.flatnonzero(np.array(of_source, dtype=bool)[self._sources()]).tobytes())

    def _sources(self) -> NDArray[np.int64]:
        return np.searchsorted(self._ends, self._order, side="right")

    def __deepcopy__(self, memo: object) -> Goals:
        return self  # immutable: an environment that is copied shares them with the copy


class SyntheticGoals(Goals):
    """Synthetic goals: one for every combination of options of every product with an instruction."""

    kind = "synthetic"

    def __init__(self, catalogue: Catalogue, price_seed: int) -> None:
        columns = catalogue.columns()
        positions = np.flatnonzero(columns.goals >= 0)
        self._attribute_goals = columns.attribute_goals
        super().__init__(catalogue, price_seed, positions, columns.goals[positions])

    def _describe(self, source: int, product: Product, number: int) -> tuple[str, tuple[str, ...], Options]:
        options = []
        for group in sorted(product.options, reverse=True):  # the last group varies fastest
            number, value = divmod(number, len(product.options[group]))
            options.append((group, product.options[group][value]))
        options.reverse()
        wanted = ", and ".join(f"{group}: {value}" for group, value in options)
        text = f"{product.instruction} with {wanted}" if wanted else str(product.instruction)
        return text, product.instruction_attributes, tuple(options)

    def _weight(self, source: int) -> float:
        attributes = self.catalogue.at(int(self._positions[source])).instruction_attributes
        return sum(1.0 / self._attribute_goals[attribute] for attribute in attributes) / len(attributes)


class HumanGoals(Goals):
    """Human goals: one for every instruction that a person wrote for a product of the catalogue.

    Raises:
        CatalogueNotFound: the catalogue comes without such instructions.
    """

    kind = "human"

    def __init__(self, catalogue: Catalogue, price_seed: int) -> None:
        by_asin = catalogue.human_instructions()
        here = sorted((catalogue.position(asin), asin) for asin in by_asin if asin in catalogue)
        found = [(at, instruction) for at, asin in here for instruction in by_asin[asin] if instruction.attributes]
        self._instructions = tuple(instruction for _, instruction in found)
        positions = np.array([at for at, _ in found], dtype=np.int64)
        super().__init__(catalogue, price_seed, positions, np.ones(len(found), dtype=np.int64))

    def _describe(self, source: int, product: Product, number: int) -> tuple[str, tuple[str, ...], Options]:
        written = self._instructions[source]
        return written.instruction.strip("."), written.attributes, written.options

    def _weight(self, source: int) -> float:
        return 1.0


@lru_cache(8)
def goals(catalogue: Catalogue, kind: Kind = "synthetic", *, price_seed: int = 0) -> Goals:
    """Make the goals of a catalogue, one object per process.

    All 1.18 million products have millions of synthetic goals. Their order takes seconds to compute, and is then kept
    on disk.

    Raises:
        CatalogueNotFound: human goals are asked for, but the catalogue has no human instructions.
        ValueError: the kind is unknown, or the catalogue has no goals of this kind.
    """
    kinds: dict[str, type[SyntheticGoals | HumanGoals]] = {"synthetic": SyntheticGoals, "human": HumanGoals}
    if kind not in kinds:
        raise ValueError(f"expected goals of kind 'synthetic' or 'human', found {kind!r}")
    found = kinds[kind](catalogue, price_seed)
    if not found:
        raise ValueError(f"{catalogue.name} has no {kind} goals")
    return found


def split(goals: Goals, name: Split | None = None) -> Sequence[int]:
    """Indices of the goals in a split, ascending; without a split's name, of all goals.

    "test", "eval" and "train" are the original's: the first 500 goals, the next 1,000, the rest. Different goals of
    one product may fall in different ones. With "product-test", "product-eval" and "product-train" (10, 10 and 80 % of
    the products) they cannot: a hash of the asin decides, so a product is in the same split for both kinds of goals and
    in any catalogue.

    Raises:
        ValueError: the split is unknown or has no goal.
    """
    if name is None:
        return range(len(goals))
    if name in OFFICIAL_SPLITS:
        start, end = OFFICIAL_SPLITS[name]
        found: Sequence[int] = range(len(goals))[start:end]
    elif name in PRODUCT_SPLITS:
        low, high = PRODUCT_SPLITS[name]
        found = goals.in_products(lambda asin: low <= _percentile(asin) < high)
    else:
        names = ", ".join(map(repr, (*OFFICIAL_SPLITS, *PRODUCT_SPLITS)))
        raise ValueError(f"expected a split out of {names}, or None; found {name!r}")
    if not found:
        raise ValueError(f"split {name!r} is empty: {goals.catalogue.name} has only {len(goals)} {goals.kind} goals")
    return found


def _percentile(asin: str) -> int:
    return int.from_bytes(sha256(asin.encode("utf-8", "surrogatepass")).digest()[:8], "big") % 100


@lru_cache(4)
def shuffled(length: int) -> NDArray[np.uint32]:
    """Numbers below ``length`` in the order of goals after the original's ``random.seed(233); random.shuffle(goals)``.

    A long order, some 6 s of work for all products, is kept on disk.
    """
    path = cache_dir() / "webshop" / f"goal-order-{length}.npy"
    kept = _kept(path, (length,), np.uint32) if length >= _LONG else None
    if kept is not None:
        return kept
    order = array("I", range(length))
    random.Random(SHUFFLE_SEED).shuffle(order)
    result = np.frombuffer(order, dtype=np.uint32) if length else np.zeros(0, np.uint32)
    result.flags.writeable = False
    if length >= _LONG:
        _keep(path, result)
    return result


def _kept(path: Path, shape: tuple[int, ...], kind: type[Number]) -> NDArray[Number] | None:
    """The array in a file, memory-mapped; None if there is none that fits."""
    try:
        kept: NDArray[Any] = np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError):
        return None
    return kept if kept.shape == shape and kept.dtype == kind else None


def _keep(path: Path, values: NDArray[Any]) -> None:
    """Write an array to a file atomically. A full or read-only disk is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, open(temporary, "xb") as file:
            np.save(file, values)
