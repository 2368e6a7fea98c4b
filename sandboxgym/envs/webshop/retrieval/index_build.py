"""Builder of indexes: from documents to the arrays of :mod:`.index`.

What this module promises:

1. The same documents in the same order give the same arrays, whichever of the two ways they are built.
2. `build` holds everything in memory. `build_on_disk` reads the documents as a stream, lets worker processes analyze
   them, and needs memory for the finished arrays and the vocabulary, about 1 kB per document.
3. A directory appears complete or not at all. Of any number of processes that need the same index one builds it and the
   others wait for it; if the builder is killed, another one removes its leftovers and starts again. An unusable
   index is built again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from sandboxgym.envs.webshop.retrieval import analysis
from sandboxgym.envs.webshop.retrieval.index import EXHAUSTIVE, K1, B, Index, IndexCorrupt, Strings
from sandboxgym.system import interpreter
from sandboxgym.system.once import made_once

logger = logging.getLogger("sandboxgym")

Document = tuple[str, str]
"""A document's name and searchable text."""
TIERED = 256
"""Number of documents from which a term has its postings in two tiers."""
UPPER = 16
"""Inverse of the largest share of postings in the upper tier."""
DENSE = 8
"""Inverse of the share of documents from which a lower tier is stored as a dense row."""
BATCH = 8_192
"""Number of documents sent to a worker at a time."""
_REMEMBERED_CHUNKS = 1 << 20
_COMPACTED = 1 << 20
"""Number of postings that are moved at a time."""
_DONE = b"done\n"


class IndexingFailed(RuntimeError):
    """Raised if a worker process ended before its documents were analyzed; the message holds the end of its output."""


@dataclass(frozen=True, slots=True)
class Part:
    """Postings of a batch of documents, by terms numbered in the order in which their inverter met them."""

    lengths: NDArray[np.int32]
    """Lengths [documents] in terms."""
    terms: NDArray[np.int32]
    """Numbers [terms of the part] of the terms, ascending."""
    counts: NDArray[np.int32]
    """Number [terms of the part] of documents with each term."""
    docs: NDArray[np.int32]
    """Documents [postings], counted from the first of the batch, by term and then ascending."""
    times: NDArray[np.int32]
    """Number of occurrences [postings] of the term in the document."""

    def save(self, path: Path) -> None:
        """Write the part to one file."""
        np.savez(path, **{item.name: getattr(self, item.name) for item in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Part:
        """Read the part from a file."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{item.name: arrays[item.name] for item in fields(cls)})


class Inverter:
    """Analyzer of texts that keeps the vocabulary of all texts so far."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._chunks: dict[str, tuple[int, ...]] = {}

    @property
    def vocabulary(self) -> list[str]:
        """Terms in the order of their numbers."""
        return list(self._numbers)

    def invert(self, texts: Sequence[str]) -> Part:
        """Compute the postings of some documents."""
        if len(self._chunks) > _REMEMBERED_CHUNKS:
            self._chunks.clear()
        found = array("i")
        ends = []
        chunks = self._chunks
        for text in texts:
            for chunk in analysis.chunks(text):
                numbers = chunks.get(chunk)
                if numbers is None:
                    numbers = chunks[chunk] = self._number(chunk)
                found.extend(numbers)
            ends.append(len(found))
        bounds = np.array([0, *ends], dtype=np.int64)
        lengths = bounds[1:] - bounds[:-1]
        keys = np.array(found, dtype=np.int64) * len(texts) + np.repeat(np.arange(len(texts)), lengths)
        keys, times = np.unique(keys, return_counts=True)
        terms, counts = np.unique(keys // len(texts), return_counts=True)
        columns = (lengths, terms, counts, keys % len(texts), times)
        return Part(*(column.astype(np.int32) for column in columns))

    def _number(self, chunk: str) -> tuple[int, ...]:
        return tuple([self._numbers.setdefault(term, len(self._numbers)) for term in analysis.analyze(chunk)])


def build(documents: Iterable[Document]) -> Index:
    """Build an index in memory."""
    names: list[str] = []
    parts, inverter = [], Inverter()
    for batch in _batches(documents):
        names += [name for name, _ in batch]
        parts.append(inverter.invert([text for _, text in batch]))
    return _assemble(names, lambda: ((0, part) for part in parts), [inverter.vocabulary])


def build_on_disk(documents: Callable[[], Iterable[Document]], directory: Path, *, workers: int | None = None) -> Index:
    """Open the index in ``directory``, building it if it is missing.

    Args:
        documents: function that returns the documents; called only to build the index, and read once, as a stream.
        directory: directory of the index, which appears complete; its parent is made if needed.
        workers: number of worker processes, by default one for each of up to four processors.

    Raises:
        IndexingFailed: a worker was killed, for example by the system for lack of memory.
    """

    def make(scratch: Path) -> None:
        _build_in(scratch, documents(), workers or min(4, os.cpu_count() or 1))

    def look() -> Index | None:
        try:
            return Index.open(directory) if directory.exists() else None
        except (IndexCorrupt, OSError) as error:
            logger.warning("%s is damaged and will be built again: %s", directory, error)
            return None

    return made_once(directory, make, look=look, keep="index")


def _build_in(scratch: Path, documents: Iterable[Document], workers: int) -> None:
    """Build the index in the directory ``index`` of ``scratch``."""
    names, owners, vocabularies = _analyze(scratch, documents, workers)

    def parts() -> Iterator[tuple[int, Part]]:
        for number, owner in enumerate(owners):
            yield owner, Part.load(_part(scratch, number))

    _assemble(names, parts, vocabularies).save(scratch / "index")


def _part(scratch: Path, number: int) -> Path:
    return scratch / f"part-{number}.npz"


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    source = iter(documents)
    while batch := list(islice(source, BATCH)):
        yield batch


def _analyze(
    scratch: Path, documents: Iterable[Document], workers: int
) -> tuple[list[str], list[int], list[list[str]]]:
    """Analyze the documents; writes the parts into ``scratch``.

    Returns:
        The names of the documents; for each part the worker that made it; for each worker its vocabulary.
    """
    names: list[str] = []
    owners: list[int] = []
    batches = _batches(documents)
    turn = threading.Lock()
    stopped = threading.Event()

    def take(worker: int) -> tuple[int, list[str]] | None:
        with turn:
            batch = None if stopped.is_set() else next(batches, None)
            if batch is None:
                return None
            names.extend(name for name, _ in batch)
            owners.append(worker)
            return len(owners) - 1, [text for _, text in batch]

    def drive(number: int) -> list[str]:
        worker = _Worker()
        try:
            while (taken := take(number)) is not None:
                worker.write(_part(scratch, taken[0]), taken[1])
            words = scratch / f"words-{number}"
            worker.write(words, None)
            vocabulary: list[str] = msgpack.unpackb(words.read_bytes(), unicode_errors="surrogatepass")
            return vocabulary
        finally:
            stopped.set()  # if it failed the others need not continue; else there is nothing left to take
            worker.close()

    with ThreadPoolExecutor(workers) as pool:
        try:
            vocabularies = list(pool.map(drive, range(workers)))
        finally:
            stopped.set()
    return names, owners, vocabularies


class _Worker:
    """A worker process that inverts batches and writes the results to files, so that little goes through the pipe."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (close() does)
        # Not multiprocessing, whose children import the caller's main module, which may have no guard against that.
        self._process = subprocess.Popen(
            interpreter.module_command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=interpreter.environment(),
        )

    def write(self, path: Path, texts: list[str] | None) -> None:
        """Have the worker write the part of some texts or, for None, the vocabulary.

        Raises:
            IndexingFailed: the worker process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        message = msgpack.packb([str(path), texts], unicode_errors="surrogatepass")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(len(message).to_bytes(8, "little") + message)
            self._process.stdin.flush()
            if self._process.stdout.readline() == _DONE:
                return
        self._process.kill()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()
        raise IndexingFailed(f"a process that analyzes documents ended with {self._process.wait()}: {words[-2000:]}")

    def close(self) -> None:
        """End the worker process."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        self._process.wait()
        self._errors.close()


def _assemble(
    names: list[str], parts: Callable[[], Iterable[tuple[int, Part]]], vocabularies: Sequence[Sequence[str]]
) -> Index:
    """Assemble one index from all parts, which are read twice, in order; each comes with its vocabulary's number."""
    words = sorted(set().union(*vocabularies))
    number = {word: at for at, word in enumerate(words)}
    numbers = [np.array([number[word] for word in vocabulary], dtype=np.int64) for vocabulary in vocabularies]
    del number

    frequency = np.zeros(len(words), dtype=np.int64)
    lengths: list[NDArray[np.int32]] = []
    pairs = np.empty(0, dtype=np.int64)
    for owner, part in parts():
        frequency[numbers[owner][part.terms]] += part.counts
        lengths.append(part.lengths)
        pairs = np.union1d(pairs, _pairs(part))
    every_length = np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int32)
    described = max(1, int(np.count_nonzero(every_length)))  # Lucene counts the documents that have the field
    gains = _gains(pairs, np.float32(every_length.sum(dtype=np.int64) / described))
    gain, code_of_pair = np.unique(np.append(np.float32(0), gains), return_inverse=True)
    code_of_pair = code_of_pair[1:].astype(np.uint16 if len(gain) <= 1 << 16 else np.uint32)

    starts = np.cumsum(frequency) - frequency
    docs = np.empty(frequency.sum(), dtype=np.int32)
    codes = np.empty(len(docs), dtype=code_of_pair.dtype)
    filled = starts.copy()
    first = 0
    for owner, part in parts():
        terms = numbers[owner][part.terms]
        begins = np.cumsum(part.counts) - part.counts
        at = np.repeat(filled[terms] - begins, part.counts) + np.arange(len(part.docs))
        docs[at] = first + part.docs
        codes[at] = code_of_pair[np.searchsorted(pairs, _pairs(part))]
        filled[terms] += part.counts
        first += len(part.lengths)

    rank = np.empty(len(names), dtype=np.int32)
    rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names), dtype=np.int32)
    name_strings, word_strings = Strings.of(names), Strings.of(words)
    return Index(
        names_text=name_strings.text,
        names_ends=name_strings.ends,
        rank=rank,
        words_text=word_strings.text,
        words_ends=word_strings.ends,
        idf=np.log(1 + (described - frequency + 0.5) / (frequency + 0.5)).astype(np.float32),
        gain=gain,
        **_tiers(frequency, docs, codes, len(names)),
    )


def _tiers(
    frequency: NDArray[np.int64], docs: NDArray[np.int32], codes: NDArray[Any], number: int
) -> dict[str, NDArray[Any]]:
    """Compute the arrays of the index that locate postings, with frequent terms in two tiers.

    Args:
        frequency: [terms] number of documents with each.
        docs: [postings] by term and then ascending; reordered here.
        codes: [postings]; in the same order.
        number: number of documents.
    """
    starts = np.cumsum(frequency) - frequency
    highest = np.maximum.reduceat(codes, starts).astype(np.uint32) if len(codes) else np.zeros(0, dtype=np.uint32)
    upper = np.zeros(len(frequency), dtype=np.int32)
    lower = frequency.astype(np.int32)
    highest_lower = highest.copy()
    row = np.full(len(frequency), -1, dtype=np.int32)
    rows: list[NDArray[Any]] = []
    kept = np.ones(len(docs), dtype=bool)
    for term in np.flatnonzero(frequency >= TIERED).tolist() if number > EXHAUSTIVE else ():
        size = int(frequency[term])
        here = slice(int(starts[term]), int(starts[term]) + size)
        limit = np.partition(codes[here], -1 - size // UPPER)[-1 - size // UPPER]
        order = np.argsort(codes[here] <= limit, kind="stable")
        docs[here], codes[here] = docs[here][order], codes[here][order]
        upper[term] = np.count_nonzero(codes[here] > limit)
        lower[term] -= upper[term]
        highest_lower[term] = limit
        if lower[term] * DENSE >= number:
            rest = slice(here.start + int(upper[term]), here.stop)
            row[term] = len(rows)
            rows.append(np.zeros(number, dtype=codes.dtype))
            rows[-1][docs[rest]] = codes[rest]
            kept[rest] = False
            lower[term] = 0
    sizes = upper.astype(np.int64) + lower
    size = _compact(kept, docs, codes)
    return {
        "starts": np.cumsum(sizes) - sizes,
        "upper": upper,
        "lower": lower,
        "highest": highest,
        "highest_lower": highest_lower,
        "row": row,
        "docs": docs[:size],
        "codes": codes[:size],
        "dense": np.array(rows, dtype=codes.dtype).reshape(len(rows), number),
    }


def _compact(kept: NDArray[np.bool_], *columns: NDArray[Any]) -> int:
    """Move the kept rows of columns to their start, in order and in place: a copy would take half a gigabyte.

    Returns:
        Number of the rows.
    """
    size = 0
    for start in range(0, len(kept), _COMPACTED):
        part = kept[start : start + _COMPACTED]
        count = int(np.count_nonzero(part))
        for column in columns:
            column[size : size + count] = column[start : start + _COMPACTED][part]
        size += count
    return size


_LENGTH_BITS = 32


def kept_length(lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Round lengths as Lucene stores them (``SmallFloat.intToByte4``): above 40 with four significant bits.

    >>> kept_length(np.array([39, 40, 41, 107, 500])).tolist()
    [39, 40, 40, 104, 472]
    """
    above = np.maximum(lengths.astype(np.int64) - 24, 0)
    drop = np.maximum(np.frexp(above.astype(np.float64))[1].astype(np.int64) - 4, 0)
    kept: NDArray[np.int64] = np.minimum(lengths, 24) + (above >> drop << drop)
    return kept


def _pairs(part: Part) -> NDArray[np.int64]:
    """Pairs [postings] of a term's occurrences and the document's stored length, which determine its impact."""
    return (part.times.astype(np.int64) << _LENGTH_BITS) + kept_length(part.lengths)[part.docs]


def _gains(pairs: NDArray[np.int64], average: np.float32) -> NDArray[np.float32]:
    """Compute Lucene's ``freq * normInverse``, in its order of operations in 32-bit floats."""
    one, k1, b = np.float32(1), np.float32(K1), np.float32(B)
    lengths = (pairs & ((1 << _LENGTH_BITS) - 1)).astype(np.float32)
    inverse = one / (k1 * ((one - b) + b * lengths / average))
    gains: NDArray[np.float32] = (pairs >> _LENGTH_BITS).astype(np.float32) * inverse
    return gains


def main() -> None:
    """Serve batches as a worker until the input ends."""
    inverter = Inverter()
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(8):
        path, texts = msgpack.unpackb(source.read(int.from_bytes(header, "little")), unicode_errors="surrogatepass")
        if texts is None:
            Path(path).write_bytes(msgpack.packb(inverter.vocabulary, unicode_errors="surrogatepass"))
        else:
            inverter.invert(texts).save(Path(path))
        answers.write(_DONE)
        answers.flush()


if __name__ == "__main__":
    main()
