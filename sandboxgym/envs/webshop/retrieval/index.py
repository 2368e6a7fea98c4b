"""BM25 with Lucene's exact ranking, over arrays in memory or on disk.

What this module promises:

1. `Index.search` gives the documents that Lucene gives (Anserini's settings, k1 = 0.9 and b = 0.4), in its order:
   the impact of a term in 32-bit floats, lengths rounded as Lucene keeps them, a term that is repeated in the query
   counted as often, equal scores in the order of the names.
2. Pruning never changes the answer. A document is left out only where an upper bound of its score, with more slack than
   rounding can take, is below the score of k others.
3. The arrays are only read. Opened from a directory they are memory-mapped: all processes share one copy, and opening
   takes the same time for any number of documents.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

K1 = 0.9
B = 0.4
EXHAUSTIVE = 1 << 16
"""Number of documents up to which scoring all is faster than pruning; their postings are not put into tiers."""
META = "meta.json"
# How a query is pruned. These change how long it takes, never what it finds.
_REMEMBERED = 4_096  # words whose tiers are kept
_TIERS = 2_000  # with more tiers, rounding each up could overflow 16 bits
_SLACK = 2.0**-22  # relative, for each tier: four times what adding up in 32 bits may lose
_STEPS = 60_000  # steps that stand for the sum of all bounds: 16 bits leave room to round up
_PROBE = 12  # looking up one document costs as much as adding up this many postings
_HOPEFUL = 0.65  # a threshold is looked for only when at most this share of the sum of all bounds is left,
_NEAR = 1.2  # and a higher one only when less than this multiple of the last threshold is left
_FIRST_SEEDING = 16_384  # postings added up before the first threshold is looked for
_SEEDING_FACTOR = 1.6  # factor on the postings added up until the next
_SEEDS = 1.3  # a threshold is looked for among this many times k documents,
_SAMPLE = 4_096  # which a sample of this size helps to choose


class IndexCorrupt(ValueError):
    """Raised if a directory of an index holds something else; the message names the file."""


class Strings(Sequence[str]):
    """Strings stored in two arrays, so that they can be memory-mapped.

    Args:
        text: all of them in UTF-8, one after the other.
        ends: [n] where each ends, in bytes.
    """

    def __init__(self, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """Make the arrays for some strings."""
        encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
        ends = np.cumsum([len(string) for string in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        start = int(self.ends[index - 1]) if index else 0
        return self.text[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Tier:
    """Postings of one term: ``docs`` and ``codes`` in parallel, or ``docs`` None and a code for every document.

    A term has one tier or two, and a document is in one of them at most.
    """

    weight: np.float32
    """Lucene's weight: the number of times that the query has the term, times its idf."""
    docs: NDArray[np.int32] | None
    """Document numbers [size], ascending."""
    codes: NDArray[np.unsignedinteger[Any]]
    """Codes [size]; of a dense tier [n documents], 0 where the term does not occur."""
    bound: float
    """Upper bound of any document's score from this tier."""
    drop: float
    """Decrease of the bound on the remaining scores once this tier, and the term's upper one, is added up."""
    below: int
    """All codes are below this number."""

    @property
    def cost(self) -> int:
        """Cost of adding the tier up."""
        return len(self.codes)


@dataclass(frozen=True, eq=False)
class Index:
    """Postings of n documents and t terms; c = number of codes.

    A code stands for the number of times that a term occurs in a document and for the document's length. ``gain[code]``
    is Lucene's ``freq * normInverse``, ascending, so that codes compare as impacts do; code 0 is for a term that does
    not occur.
    The few postings of a frequent term with the highest codes are its upper tier: they are cheap to add up, and the
    bound on what the others can add is then closer.
    """

    names_text: NDArray[np.uint8]
    names_ends: NDArray[np.int64]
    """Ends [n] of the documents' names in ``names_text``, see `Strings`."""
    rank: NDArray[np.int32]
    """Rank [n] of each document's name in the order of names."""
    words_text: NDArray[np.uint8]
    words_ends: NDArray[np.int64]
    """Ends [t] of the terms in ``words_text``, ascending."""
    idf: NDArray[np.float32]
    """Inverse document frequency [t] of each term."""
    starts: NDArray[np.int64]
    """Start [t] of each term's postings in ``docs`` and ``codes``: first its upper tier, then the lower one."""
    upper: NDArray[np.int32]
    """Size [t] of the upper tier; 0 for a term that has only a lower one."""
    lower: NDArray[np.int32]
    """Size [t] of the lower tier; 0 if that is a row of ``dense``."""
    highest: NDArray[np.uint32]
    """Highest code [t] of each term."""
    highest_lower: NDArray[np.uint32]
    """Highest code [t] in each term's lower tier."""
    row: NDArray[np.int32]
    """Row [t] of ``dense`` that is the term's lower tier, or -1."""
    docs: NDArray[np.int32]
    """Document numbers [postings] by term and tier, ascending in each."""
    codes: NDArray[np.unsignedinteger[Any]]
    """Codes [postings] of the documents in ``docs``."""
    dense: NDArray[np.unsignedinteger[Any]]
    """Lower tiers [rows, n] with many documents: a code for each document."""
    gain: NDArray[np.float32]
    """Gain [c] of each code."""
    _totals: list[NDArray[np.uint16]] = field(init=False, default_factory=list, compare=False, repr=False)
    _found: dict[tuple[str, int], tuple[Tier, ...]] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Tiers of words asked for; kept, because every comparison in ``words`` decodes a string."""

    @classmethod
    def open(cls, directory: Path) -> Index:
        """Open the index that was saved in a directory, memory-mapped.

        Raises:
            OSError: there is no index in the directory.
            IndexCorrupt: the files do not belong together.
        """
        try:
            shapes = json.loads((directory / META).read_bytes())["shapes"]
            arrays = {name: _map(directory / f"{name}.npy", shapes[name]) for name in ARRAYS}
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise IndexCorrupt(f"{directory / META}: expected the shapes of {', '.join(ARRAYS)}") from error
        return cls(**arrays)

    def save(self, directory: Path) -> None:
        """Write the index into a new directory, for `open`."""
        directory.mkdir()
        for name in ARRAYS:
            np.save(directory / f"{name}.npy", getattr(self, name))
        shapes = {name: getattr(self, name).shape for name in ARRAYS}
        (directory / META).write_text(json.dumps({"shapes": shapes}), encoding="utf-8")

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.rank)

    @cached_property
    def names(self) -> Sequence[str]:
        """Names of the documents, in the order they were given in."""
        return self._strings(self.names_text, self.names_ends)

    @cached_property
    def words(self) -> Sequence[str]:
        """Terms in ascending order."""
        return self._strings(self.words_text, self.words_ends)

    def _strings(self, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> Sequence[str]:
        strings = Strings(text, ends)
        return strings[:] if len(self) <= EXHAUSTIVE else strings

    def search(self, terms: Iterable[str], *, k: int = 50) -> list[tuple[str, float]]:
        """Find the best documents for a query.

        Args:
            terms: terms of the analyzed query; those that are not in the index do not matter.
            k: largest number of results, at least 1.

        Returns:
            Names and scores (those of Lucene), best first. Documents without any of the terms are not among them.
        """
        tiers = list(self.tiers(terms))
        if len(self) <= EXHAUSTIVE or len(tiers) > _TIERS:
            return self._exhaustive(tiers, k)
        candidates = self._candidates(tiers, k)
        return self._best(candidates, self._scores(candidates, tiers), k)

    def exhaustive(self, terms: Iterable[str], *, k: int = 50) -> list[tuple[str, float]]:
        """Search by scoring every document."""
        return self._exhaustive(list(self.tiers(terms)), k)

    def _exhaustive(self, tiers: Sequence[Tier], k: int) -> list[tuple[str, float]]:
        listed = [(tier, tier.docs) for tier in tiers if tier.docs is not None]
        total = np.zeros(len(self))
        if listed:
            weights = np.repeat(np.array([tier.weight for tier, _ in listed]), [tier.cost for tier, _ in listed])
            impacts = _impacts(weights, self.gain.take(np.concatenate([tier.codes for tier, _ in listed])))
            total += np.bincount(np.concatenate([docs for _, docs in listed]), impacts, len(self))
        for tier in tiers:
            if tier.docs is None:
                total += self._impacts(tier, tier.codes)
        return self._best(np.arange(len(self), dtype=np.int32), total.astype(np.float32), k)

    def tiers(self, terms: Iterable[str]) -> Iterator[Tier]:
        """List the tiers of the terms that the index has."""
        for word, times in Counter(terms).items():
            found = self._found.get((word, times))
            if found is None:
                if len(self._found) >= _REMEMBERED:
                    self._found.clear()
                found = self._found[word, times] = tuple(self._tiers_of(word, times))
            yield from found

    def _tiers_of(self, word: str, times: int) -> Iterator[Tier]:
        at = bisect_left(self.words, word)
        if at == len(self.words) or self.words[at] != word:
            return
        weight = np.float32(times) * self.idf[at]
        start, middle = int(self.starts[at]), int(self.starts[at] + self.upper[at])
        bound, below = self._bound(weight, self.highest_lower[at]), int(self.highest_lower[at]) + 1
        if middle > start:
            highest = self._bound(weight, self.highest[at])
            codes = self.codes[start:middle]
            yield Tier(weight, self.docs[start:middle], codes, highest, highest - bound, int(self.highest[at]) + 1)
        if self.row[at] >= 0:
            yield Tier(weight, None, self.dense[self.row[at]], bound, bound, below)
        else:
            end = middle + int(self.lower[at])
            yield Tier(weight, self.docs[middle:end], self.codes[middle:end], bound, bound, below)

    def _bound(self, weight: np.float32, code: np.uint32) -> float:
        return float(weight - weight / (np.float32(1) + self.gain[code]))

    def _impacts(self, tier: Tier, codes: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.float32]:
        if len(codes) < tier.below:
            return _impacts(tier.weight, self.gain.take(codes))
        return _impacts(tier.weight, self.gain[: tier.below]).take(codes)

    def _codes(self, tiers: Sequence[Tier], docs: NDArray[np.int32]) -> NDArray[np.unsignedinteger[Any]]:
        """Codes [len(tiers), len(docs)] of documents, ascending; 0 where a term does not occur, or not in that tier."""
        codes = np.empty((len(tiers), len(docs)), self.codes.dtype)
        for row, tier in zip(codes, tiers):
            if tier.docs is None:
                row[:] = tier.codes.take(docs)
            else:
                at = tier.docs.searchsorted(docs)
                found = tier.docs.take(at, mode="clip") == docs
                np.multiply(tier.codes.take(at, mode="clip"), found, out=row)
        return codes

    def _looked_up(self, tiers: Sequence[Tier], docs: NDArray[np.int32]) -> NDArray[np.float32]:
        """Impacts [len(tiers), len(docs)] of documents, ascending."""
        weights = np.array([tier.weight for tier in tiers], np.float32)[:, None]
        return _impacts(weights, self.gain.take(self._codes(tiers, docs)))

    def _add(self, tiers: Sequence[Tier], total: NDArray[np.uint16], steps: float) -> None:
        """Add the impacts of all documents from some tiers, in steps.

        Each is rounded up: by less than `_ROUNDED` steps.
        """
        short = [tier for tier in tiers if tier.docs is not None and tier.cost < tier.below]
        if short:  # all at once: they are soon done, and calls take time
            weights = np.repeat(np.array([tier.weight for tier in short]), [tier.cost for tier in short])
            gain = self.gain.take(np.concatenate([tier.codes for tier in short]))
            docs = np.concatenate([tier.docs for tier in short if tier.docs is not None])
            np.add.at(total, docs, _rounded_up(weights * np.float32(steps), gain))
        for tier in tiers:
            if tier.docs is not None and tier.cost < tier.below:
                continue
            by_code = _rounded_up(np.float32(tier.weight * steps), self.gain[: tier.below])
            by_code[0] = 0  # which only a dense tier has
            rounded = by_code.take(tier.codes.astype(np.intp))  # as NumPy would do, more slowly; the same below
            if tier.docs is None:
                total[: len(rounded)] += rounded
            else:
                np.add.at(total, tier.docs.astype(np.intp), rounded)  # three times as fast as total[docs] += rounded

    def _scores(self, docs: NDArray[np.int32], tiers: Sequence[Tier]) -> NDArray[np.float32]:
        """Scores of some documents, ascending: added up in 64 bits, as in Lucene, and then rounded."""
        total = np.zeros(len(docs))
        for impacts in self._looked_up(tiers, docs):
            total += impacts
        return total.astype(np.float32)

    def _best(self, docs: NDArray[np.int32], scores: NDArray[np.float32], k: int) -> list[tuple[str, float]]:
        """Choose the k best of some documents, equal scores by name, without those that score 0."""
        least = np.partition(scores, -k)[-k] if len(scores) > k else np.float32(0)
        chosen = np.flatnonzero(scores >= least if least > 0 else scores)
        docs, scores = docs[chosen], scores[chosen]
        order = np.lexsort((self.rank[docs], -scores))[:k]
        names = self.names
        return [(names[doc], score) for doc, score in zip(docs[order].tolist(), scores[order].tolist())]

    def _candidates(self, tiers: list[Tier], k: int) -> NDArray[np.int32]:
        """List candidates, ascending, among which the k best documents are.

        After MaxScore (Turtle and Flood, 1995): what costs little is added up for all documents, until the rest could
        not bring a new one among the k best; the rest is then looked up for the documents that still have a chance.

        Sums are upper bounds in 16 bits, which take half of the cache that 32 would: each tier adds at most `_ROUNDED`
        steps too much.
        """
        tiers.sort(key=lambda tier: tier.cost / tier.bound)  # of one term the upper tier comes first
        left = every = sum(tier.drop for tier in tiers)
        if not tiers:
            return np.empty(0, np.int32)
        slack = _SLACK * (1 + len(tiers)) * left
        steps, excess = _STEPS / every, 0.0
        total = self._take_total()
        threshold, added, fresh, next_seeding = 0.0, 0, 0, float(_FIRST_SEEDING)
        begun = len(tiers)
        waiting: list[Tier] = []  # not added up before the sums are asked for

        def sums() -> NDArray[np.uint16]:
            self._add(waiting, total, steps)
            waiting.clear()
            return total

        for number, tier in enumerate(tiers):
            hopeful = left < _HOPEFUL * every and (threshold <= 0 or left < _NEAR * threshold)
            if hopeful and added + tier.cost >= next_seeding and number > fresh:
                reached = self._reached(tiers[fresh:number], tiers[number:], sums(), k, steps)
                threshold = max(threshold, reached - excess - slack)
                fresh, next_seeding = number, (added + tier.cost) * _SEEDING_FACTOR
            if left + slack < threshold:
                chances = np.count_nonzero(sums() >= max(1, int((threshold - left - slack) * steps)))
                if chances * _PROBE < tier.cost:
                    begun = number
                    break
            waiting.append(tier)
            left -= tier.drop
            excess += _ROUNDED / steps
            added += tier.cost
        least = threshold - left - slack
        docs = _reaching(sums(), max(1, int(least * steps)))
        partial = total.take(docs) * np.float32(1 / steps)
        total.fill(0)
        self._totals.append(total)
        rest = sorted(tiers[begun:], key=lambda tier: tier.bound)  # here, too, from the end
        while True:
            if len(partial) > k:
                threshold = max(threshold, float(np.partition(partial, -k)[-k]) - excess - slack)
            keep = partial >= threshold - left - slack
            docs, partial = docs[keep], partial[keep]
            if not rest:
                return docs
            tier = rest.pop()
            partial += self._looked_up([tier], docs)[0]
            left -= tier.drop

    def _take_total(self) -> NDArray[np.uint16]:
        """Take zeros, for n documents and as many more as `_reaching` needs, from an earlier query.

        Allocating memory costs more than clearing it.
        """
        try:
            return self._totals.pop()
        except IndexError:
            return np.zeros(-(-len(self) // 8) * 8, dtype=np.uint16)

    def _reached(
        self, fresh: Sequence[Tier], rest: Sequence[Tier], total: NDArray[np.uint16], k: int, steps: float
    ) -> float:
        """Score that k documents reach, as far as ``total`` is right; 0 if none is known.

        Args:
            fresh: tiers whose documents are the sample by which high scores are recognised.
            rest: tiers that are not in ``total`` yet.
            total: sums over the other tiers, in steps, as of `_take_total`.
            k: number of documents.
            steps: number of steps that make a score of 1.
        """
        listed = [tier.docs for tier in fresh if tier.docs is not None]
        step = 1 + sum(map(len, listed)) // _SAMPLE
        sample = np.concatenate([total.take(docs[::step]) for docs in listed] or [np.empty(0, np.uint16)])
        wanted = int(_SEEDS * k) + 1
        aim = min(3 * wanted // step + 4, len(sample))
        if not aim:
            return 0.0
        seen = _reaching(total, max(1, int(np.partition(sample, -aim)[-aim])))
        if len(seen) > wanted:
            seen = np.sort(seen[np.argpartition(total.take(seen), -wanted)[-wanted:]])
        if len(seen) < k:
            return 0.0
        scores = total.take(seen) * np.float32(1 / steps)
        for impacts in self._looked_up(rest, seen):
            scores += impacts
        return float(np.partition(scores, -k)[-k])


ARRAYS = tuple(item.name for item in fields(Index) if not item.name.startswith("_"))
"""Names of an index's arrays, each stored in a file."""


def _impacts(weight: np.float32 | NDArray[np.float32], gain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute Lucene's score of a term, in its order of operations."""
    impacts: NDArray[np.float32] = weight - weight / (np.float32(1) + gain)
    return impacts


def _reaching(total: NDArray[np.uint16], least: int) -> NDArray[np.int32]:
    """Places, ascending, of numbers that are at least this; there is a multiple of 8 numbers.

    Few are, so eight at a time are asked whether any is: that takes half of the time of `numpy.flatnonzero`.
    """
    reaching = total >= least
    eights = np.flatnonzero(reaching.view(np.uint64) != 0)
    if len(eights) * 16 > len(reaching) // 8:
        return np.flatnonzero(reaching).astype(np.int32)
    places = np.flatnonzero(reaching.reshape(-1, 8).take(eights, axis=0))
    return (eights.take(places >> 3) * 8 + (places & 7)).astype(np.int32)


def _rounded_up(weight: np.float32 | NDArray[np.float32], gain: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Impacts in steps, where a weight is in steps."""
    rounded: NDArray[np.uint16] = np.ceil(_impacts(weight, gain) + np.float32(_MARGIN)).astype(np.uint16)
    return rounded


_MARGIN = 0.05
"""Steps that make up for rounding in 32 bits, of numbers up to `_STEPS`."""
_ROUNDED = 1.1
"""Most by which an impact in steps is rounded up."""


def _map(path: Path, shape: list[int]) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode=None if 0 in shape else "r", allow_pickle=False)
    except ValueError as error:  # not an array, or cut off
        raise IndexCorrupt(f"{path}: expected an array, but {error}") from error
    if list(array.shape) != shape:
        raise IndexCorrupt(f"{path}: expected the shape {shape}, found {list(array.shape)}")
    return np.asarray(array)
