"""Benchmark of WebShop's search against engines that can be installed: equality to Lucene's ranking, and cost.

sandboxgym bench search --data DIR [--documents 200000] [--full 1181436] [--queries 300] [--seed 0]

DIR holds the original's products and recordings of its Lucene. *Quality* is measured on those; *cost* on a collection
that is generated from the products to any size: every text is a mixture of runs of words from one product, from others
that were found with the same query, from all products, and of rare words that no product has, in number and length as
real texts have them. Queries are instructions of the original's goals, human and synthetic, half and half. All engines
but Lucene get the terms of our analyzer. Each is built in a process of its own and searched in another; those that are
not installed are left out.
"""

from __future__ import annotations

import argparse
import bisect
import datetime
import gzip
import importlib.util
import itertools
import json
import platform
import random
import resource
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.envs.webshop.catalogues.catalogue import Catalogue, load_catalogue
from sandboxgym.envs.webshop.retrieval.analysis import terms
from sandboxgym.envs.webshop.retrieval.index import K1, B, Index
from sandboxgym.envs.webshop.retrieval.index_build import Document, build_on_disk
from sandboxgym.envs.webshop.retrieval.lucene import Lucene, build_lucene
from sandboxgym.envs.webshop.retrieval.search import RESULTS, documents
from sandboxgym.system import interpreter
from sandboxgym.system.run_directories import tree_nbytes

WORKERS = 2
"""Number of processes that analyze documents for our index."""
SLOW_QUERIES = 20
"""Number of queries for an engine that takes a second each."""
RARE_WORDS = 3_000_000
"""Size of the vocabulary of generated texts only; the frequency of its words falls as 1 / rank."""
SHARES = (("own", 0.5), ("alike", 0.25), ("any", 0.22), ("rare", 0.03))
"""Shares of the words of a generated text by source."""
RUN = (2, 12)
"""Number of words taken from one place."""


class QueryGenerator:
    """Generator of endless documents, in the words of some products.

    Args:
        catalogue: the products.
        seed: the same seed gives the same documents.
    """

    def __init__(self, catalogue: Catalogue, *, seed: int) -> None:
        texts = [text.split() for _, text in documents(catalogue)]
        self._texts = [text for text in texts if text]
        alike: dict[str, list[list[str]]] = {}
        for text, product in zip(texts, catalogue.products()):
            if text:
                alike.setdefault(product.query, []).append(text)
        self._alike = [alike[product.query] for text, product in zip(texts, catalogue.products()) if text]
        self._seed = seed

    def documents(self, number: int) -> Iterator[Document]:
        """Generate this many documents."""
        rng = random.Random(self._seed)
        kinds = [kind for kind, _ in SHARES]
        reach = list(itertools.accumulate(share for _, share in SHARES))
        uniform = rng.random
        names = _names(rng)
        for name in itertools.islice(names, number):
            at = int(uniform() * len(self._texts))
            own, length = self._texts[at], len(self._texts[int(uniform() * len(self._texts))])
            words: list[str] = []
            while len(words) < length:
                kind = kinds[min(bisect.bisect(reach, uniform()), len(kinds) - 1)]
                size = RUN[0] + int(uniform() * (RUN[1] - RUN[0] + 1))
                if kind == "rare":
                    words += [_rare_word(int(RARE_WORDS ** uniform())) for _ in range(size)]
                    continue
                if kind == "own":
                    text = own
                else:
                    among = self._alike[at] if kind == "alike" else self._texts
                    text = among[int(uniform() * len(among))]
                start = int(uniform() * max(1, len(text) - size + 1))
                words += text[start : start + size]
            yield name, " ".join(words[:length])


def _names(rng: random.Random) -> Iterator[str]:
    """Names like those of products, all different, in no order."""
    step, modulus = 0x9E3779B1, 36**7  # coprime
    at = rng.randrange(modulus)
    while True:
        digits, rest = "", at
        for _ in range(7):
            rest, digit = divmod(rest, 36)
            digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[digit] + digits
        yield f"B0{digits}"
        at = (at + step) % modulus


def _rare_word(rank: int) -> str:
    """Make a brand or a model number."""
    word, rest = "", rank * 2654435761 % (1 << 32)
    while rest:
        rest, consonant = divmod(rest, 19)
        rest, vowel = divmod(rest, 5)
        word += "bcdfghjklmnpqrstvwz"[consonant] + "aeiou"[vowel]
    return f"{word[:3]}-{rank % 9973}" if rank % 3 == 0 else word


Find = Callable[[str], Sequence[str]]


class _Ours:
    """The index of this package."""

    title = "this package"
    package = "numpy"

    def build(self, documents: Iterable[Document], directory: Path) -> None:
        build_on_disk(lambda: documents, directory / "index", workers=WORKERS)

    def open(self, directory: Path) -> Find:
        index = Index.open(directory / "index")
        return lambda query: [name for name, _ in index.search(terms(query), k=RESULTS)]


class _OursExhaustive(_Ours):
    """The index of this package, scoring every document."""

    title = "this package, without pruning"

    def open(self, directory: Path) -> Find:
        index = Index.open(directory / "index")
        return lambda query: [name for name, _ in index.exhaustive(terms(query), k=RESULTS)]


class _Original:
    """Lucene, as the original uses it."""

    title = "Lucene (Anserini)"
    package = "pyserini"

    def build(self, documents: Iterable[Document], directory: Path) -> None:
        build_lucene(documents, directory / "index")

    def open(self, directory: Path) -> Find:
        return Lucene(directory / "index", results=RESULTS)


class _BM25S:
    """bm25s, with the method that it calls Lucene's."""

    title = "bm25s"
    package = "bm25s"

    def build(self, documents: Iterable[Document], directory: Path) -> None:
        import bm25s

        names: list[str] = []
        vocabulary: dict[str, int] = {}
        ids: list[list[int]] = []
        for name, text in documents:
            names.append(name)
            ids.append([vocabulary.setdefault(term, len(vocabulary)) for term in terms(text)])
        engine = bm25s.BM25(method="lucene", k1=K1, b=B)
        engine.index(bm25s.tokenization.Tokenized(ids, vocabulary), show_progress=False)
        engine.save(str(directory))
        (directory / "names.json").write_text(json.dumps(names))

    def open(self, directory: Path) -> Find:
        import bm25s

        engine = bm25s.BM25.load(str(directory), mmap=True)
        names = json.loads((directory / "names.json").read_text())

        def find(query: str) -> list[str]:
            known = [[term for term in terms(query) if term in engine.vocab_dict]]
            if not known[0]:
                return []
            found = engine.retrieve(known, k=min(RESULTS, len(names)), show_progress=False)
            return [names[at] for at, score in zip(found.documents[0], found.scores[0]) if score > 0]

        return find


class _Tantivy:
    """tantivy, whose k1 and b cannot be set."""

    title = "tantivy"
    package = "tantivy"

    def _schema(self) -> Any:
        import tantivy

        builder = tantivy.SchemaBuilder()
        builder.add_text_field("name", stored=True, tokenizer_name="raw", index_option="basic")
        builder.add_text_field("text", stored=False, tokenizer_name="whitespace", index_option="freq")
        return builder.build()

    def build(self, documents: Iterable[Document], directory: Path) -> None:
        import tantivy

        writer = tantivy.Index(self._schema(), path=str(directory)).writer(num_threads=1)
        for name, text in documents:
            writer.add_document(tantivy.Document(name=name, text=" ".join(terms(text))))
        writer.commit()
        writer.wait_merging_threads()

    def open(self, directory: Path) -> Find:
        import tantivy

        schema = self._schema()
        searcher = tantivy.Index(schema, path=str(directory)).searcher()

        def find(query: str) -> list[str]:
            each = [(tantivy.Occur.Should, tantivy.Query.term_query(schema, "text", term)) for term in terms(query)]
            hits = searcher.search(tantivy.Query.boolean_query(each), RESULTS).hits if each else []
            return [searcher.doc(address)["name"][0] for _, address in hits]

        return find


class _FTS5:
    """SQLite's full-text index, whose k1 and b cannot be set."""

    title = "SQLite FTS5"
    package = "sqlite3"
    slow = True

    def _words(self, text: str) -> list[str]:
        return [f"x{term.encode().hex()}" for term in terms(text)]  # which its tokenizer leaves as they are

    def build(self, documents: Iterable[Document], directory: Path) -> None:
        with sqlite3.connect(directory / "index.db") as database:
            database.execute("CREATE VIRTUAL TABLE texts USING fts5(text, content='')")
            database.execute("CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT)")
            for number, (name, text) in enumerate(documents, 1):
                database.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (number, " ".join(self._words(text))))
                database.execute("INSERT INTO names VALUES (?, ?)", (number, name))
        database.close()

    def open(self, directory: Path) -> Find:
        database = sqlite3.connect(directory / "index.db")
        statement = "SELECT rowid FROM texts WHERE texts MATCH ? ORDER BY rank, rowid LIMIT ?"

        def find(query: str) -> list[str]:
            words = self._words(query)
            rows = database.execute(statement, (" OR ".join(words), RESULTS)).fetchall() if words else []
            named = database.execute(
                f"SELECT id, name FROM names WHERE id IN ({','.join('?' * len(rows))})", [row for (row,) in rows]
            )
            names = dict(named.fetchall())
            return [names[row] for (row,) in rows]

        return find


ENGINES: dict[str, Any] = {
    "ours": _Ours(),
    "exhaustive": _OursExhaustive(),
    "lucene": _Original(),
    "bm25s": _BM25S(),
    "tantivy": _Tantivy(),
    "fts5": _FTS5(),
}


def instructions(data: Path, *, number: int, seed: int) -> list[str]:
    """Instructions of the original's goals, human and synthetic, half and half."""
    human = json.loads((data / "human_goals.json").read_text(encoding="utf-8"))
    with gzip.open(data / "goals_synthetic_seed233.jsonl.gz", "rt", encoding="utf-8") as file:
        synthetic = [json.loads(line)["instruction_text"] for line in file]
    rng = random.Random(seed)
    return rng.sample(human, number // 2) + rng.sample(synthetic, number - number // 2)


def measure_build(engine: str, data: Path, directory: Path, *, number: int, seed: int) -> dict[str, float]:
    """Measure a build from generated documents, in a fresh process."""
    collection = QueryGenerator(load_catalogue(data), seed=seed).documents(number)
    began = time.perf_counter()
    ENGINES[engine].build(collection, directory)
    wall = time.perf_counter() - began
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    workers = WORKERS if engine == "ours" else 1
    return {
        "build_wall": wall,
        "build_cpu": own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime,
        "build_memory": (own.ru_maxrss + workers * others.ru_maxrss) * 1024,  # at most: not at the same moment
        "disk": tree_nbytes(directory),
    }


def measure_search(engine: str, data: Path, directory: Path, *, queries: int, seed: int) -> dict[str, float]:
    """Measure opening and searching, in a fresh process."""
    began = time.perf_counter()
    find = ENGINES[engine].open(directory)
    opening = time.perf_counter() - began
    asked = instructions(data, number=queries, seed=seed)
    if getattr(ENGINES[engine], "slow", False):
        asked = asked[:: len(asked) // SLOW_QUERIES]
    for query in asked:  # reads mapped files from the disk, and warms up engines that compile while they run
        find(query)
    walls, cpus = [], []
    for query in asked:
        wall, cpu = time.perf_counter(), time.process_time()
        find(query)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "open": opening,
        "queries": len(asked),
        "terms": float(np.mean([len(terms(query)) for query in asked])),
        "p50": float(np.percentile(walls, 50)),
        "p99": float(np.percentile(walls, 99)),
        "cpu_p50": float(np.percentile(cpus, 50)),
        "cpu_p99": float(np.percentile(cpus, 99)),
        "anonymous": int(status["RssAnon"].split()[0]) * 1024,
        "mapped": int(status["RssFile"].split()[0]) * 1024,
    }


def measure_quality(engine: str, data: Path, directory: Path) -> dict[str, float]:
    """Measure agreement with the recordings of Lucene on the original's products."""
    ENGINES[engine].build(documents(load_catalogue(data)), directory)
    find = ENGINES[engine].open(directory)
    rows = []
    with open(data / "golden_search.jsonl", encoding="utf-8") as file:
        for line in file:
            recorded = json.loads(line)
            expected = [name for name, _ in recorded["hits"]]
            if not expected:
                continue
            found = list(find(recorded["query"]))

            def overlap(depth: int, expected: list[str] = expected, found: list[str] = found) -> float:
                return len(set(expected[:depth]) & set(found[:depth])) / len(expected[:depth])

            exact = (found[:1] == expected[:1], found[:10] == expected[:10], found == expected)
            rows.append((*exact, overlap(10), overlap(50)))
    means = np.mean(np.array(rows, dtype=np.float64), axis=0)
    return {**dict(zip(("top1", "exact10", "exact50", "overlap10", "overlap50"), means.tolist())), "asked": len(rows)}


def _in_a_process(step: str, engine: str, arguments: argparse.Namespace, directory: Path, number: int) -> Any:
    command = interpreter.module_command("sandboxgym.bench.search", "--step", step, "--engine", engine)
    command += ["--data", str(arguments.data), "--directory", str(directory), "--documents", str(number)]
    command += ["--queries", str(arguments.queries), "--seed", str(arguments.seed)]
    done = subprocess.run(command, env=interpreter.environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{engine}, {step}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _rows(arguments: argparse.Namespace, number: int, engines: Sequence[str], quality: bool) -> Iterator[str]:
    yield (
        "| engine | top 1 | same 10 | same 50 | overlap 10 | overlap 50 | build CPU (wall) | its memory | disk | open "
        "| query CPU p50 | p99 | query wall p50 | p99 | memory, private + mapped |"
    )
    yield "|---" * 15 + "|"
    with tempfile.TemporaryDirectory(prefix="bench-search-") as scratch:
        built: dict[str, Any] = {}
        for engine in engines:
            title = ENGINES[engine].title
            shares = [""] * 5
            if quality:
                directory = Path(scratch, "quality", engine)
                directory.mkdir(parents=True)
                found = _in_a_process("quality", engine, arguments, directory, number)
                shares = [f"{found[key]:.3f}" for key in ("top1", "exact10", "exact50", "overlap10", "overlap50")]
            source = "ours" if engine == "exhaustive" else engine
            directory = Path(scratch, "cost", source)
            if source not in built:
                for other in built:  # one at a time is enough for the disk
                    shutil.rmtree(Path(scratch, "cost", other), ignore_errors=True)
                directory.mkdir(parents=True)
                built[source] = _in_a_process("build", source, arguments, directory, number)
            cost = {**built[source], **_in_a_process("search", engine, arguments, directory, number)}
            cells = [
                *(title, *shares),
                f"{cost['build_cpu']:,.0f} ({cost['build_wall']:,.0f}) s",
                f"{cost['build_memory'] / 1e6:,.0f} MB",
                f"{cost['disk'] / 1e6:,.0f} MB",
                f"{cost['open'] * 1e3:,.0f} ms",
                *(f"{cost[key] * 1e3:,.1f} ms" for key in ("cpu_p50", "cpu_p99", "p50", "p99")),
                f"{cost['anonymous'] / 1e6:,.0f} + {cost['mapped'] / 1e6:,.0f} MB",
            ]
            yield f"| {' | '.join(cells)} |"


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """Report as Markdown, line by line as results come in."""
    packages = {engine: ENGINES[engine].package for engine in arguments.engines}
    engines = [engine for engine in arguments.engines if importlib.util.find_spec(packages[engine])]
    asked = instructions(arguments.data, number=arguments.queries, seed=arguments.seed)
    mean = float(np.mean([len(terms(query)) for query in asked]))
    yield f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}."
    yield f"{len(asked)} queries of {mean:.1f} terms on average, of which any may match; the best {RESULTS} are wanted."
    left_out = [ENGINES[engine].title for engine in arguments.engines if engine not in engines]
    if left_out:
        yield f"Not installed here: {', '.join(left_out)}."
    yield f"\n## {arguments.documents:,} documents; quality on {len(load_catalogue(arguments.data)):,} real ones\n"
    yield from _rows(arguments, arguments.documents, engines, True)
    if arguments.full:
        yield f"\n## {arguments.full:,} documents\n"
        full = [engine for engine in arguments.full_engines if engine in engines]
        yield from _rows(arguments, arguments.full, full, False)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints Markdown tables."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the products and the recordings")
    parser.add_argument("--documents", type=int, default=200_000, help="number of documents in the comparison")
    parser.add_argument("--full", type=int, default=1_181_436, help="number of documents at full size; 0 leaves it out")
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--full-engines", nargs="+", choices=ENGINES, default=["ours", "exhaustive"])
    parser.add_argument("--step", choices=("build", "search", "quality"), help=argparse.SUPPRESS)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    chosen = (arguments.engine, arguments.data, arguments.directory)
    if arguments.step == "build":
        print(json.dumps(measure_build(*chosen, number=arguments.documents, seed=arguments.seed)))
    elif arguments.step == "search":
        print(json.dumps(measure_search(*chosen, queries=arguments.queries, seed=arguments.seed)))
    elif arguments.step == "quality":
        print(json.dumps(measure_quality(*chosen)))
    else:
        for line in report(arguments):
            print(line, flush=True)


if __name__ == "__main__":
    main()
