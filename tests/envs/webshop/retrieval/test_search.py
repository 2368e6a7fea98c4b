"""The shop's search: compared with recordings of the original's Lucene, and shared within the process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from components import missing
from gymnasium.error import DependencyNotInstalled

from sandboxgym.bench.search import QueryGenerator
from sandboxgym.envs.webshop.catalogues.catalogue import Catalogue, load_catalogue
from sandboxgym.envs.webshop.retrieval import index as index_module
from sandboxgym.envs.webshop.retrieval import index_build
from sandboxgym.envs.webshop.retrieval import search as search_module
from sandboxgym.envs.webshop.retrieval.lucene import Lucene, build_lucene
from sandboxgym.envs.webshop.retrieval.search import RESULTS, indexed_text, open_search

LEAST_IDENTICAL = 0.995
"""Fraction of the recorded lists that is reproduced to the last product."""


@pytest.fixture
def catalogue() -> Catalogue:
    return load_catalogue()


@pytest.fixture
def nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has not searched yet, with nothing cached."""
    monkeypatch.setattr(search_module, "_opened", {})
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recorded(parity_data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (parity_data / "webshop" / "golden_search.jsonl").open()]


def identical(search: Callable[[str], tuple[str, ...]], recorded: list[dict[str, Any]]) -> float:
    """Share of the queries with the recorded list of products."""
    same = [search(row["query"]) == tuple(asin for asin, _ in row["hits"]) for row in recorded]
    return sum(same) / len(same)


@pytest.mark.slow
@pytest.mark.parametrize("pruned", [False, True], ids=["exhaustive", "pruned"])
def test_same_lists_as_lucene(
    pruned: bool,
    recorded: list[dict[str, Any]],
    parity_data: Path,
    nothing_open: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if pruned:
        for module in (index_module, index_build):
            monkeypatch.setattr(module, "EXHAUSTIVE", 0)
    search = open_search(load_catalogue(parity_data / "webshop"))
    assert len(recorded) >= 400
    assert identical(search, recorded) >= LEAST_IDENTICAL


@pytest.mark.slow
def test_same_scores_as_lucene(recorded: list[dict[str, Any]], parity_data: Path, nothing_open: None) -> None:
    search = open_search(load_catalogue(parity_data / "webshop"))
    for row in recorded:
        ours = dict(search.index.search(search_module.terms(row["query"])))  # type: ignore[attr-defined]
        for asin, score in row["hits"]:
            assert ours[asin] == pytest.approx(score, abs=1e-4)  # recorded with four digits


def need_lucene() -> None:
    if importlib.util.find_spec("pyserini") is None:
        missing("lucene", "pyserini is not installed: pip install 'sandboxgym[webshop-lucene]'")


@pytest.mark.slow
def test_lucene_itself_as_a_backend(recorded: list[dict[str, Any]], parity_data: Path, nothing_open: None) -> None:
    need_lucene()
    catalogue = load_catalogue(parity_data / "webshop")
    try:
        search = open_search(catalogue, "lucene")
    except DependencyNotInstalled as error:
        missing("lucene", str(error))
    assert search.name == "lucene" and open_search(catalogue, "lucene") is search
    assert identical(search, recorded) == 1
    assert search("") == search("the") == ()


@pytest.mark.slow
def test_pruned_lists_are_lucenes_on_other_documents(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_lucene()
    for module in (index_module, index_build):
        monkeypatch.setattr(module, "EXHAUSTIVE", 0)
    documents = list(QueryGenerator(catalogue, seed=7).documents(20_000))
    try:
        build_lucene(documents, tmp_path / "lucene")
    except DependencyNotInstalled as error:
        missing("lucene", str(error))
    lucene, ours = Lucene(tmp_path / "lucene"), search_module.BM25(index_build.build(documents))
    queries = [f"{product.query} {product.title[:80]}".lower() for product in list(catalogue.products())[::10]]
    assert [ours(query) for query in queries] == [lucene(query) for query in queries]


def test_what_is_indexed(catalogue: Catalogue) -> None:
    product = replace(
        next(iter(catalogue.products())),
        title="Red SHOE",
        description="For feet.",
        bullets=("Soft", "never read"),
        options={"size": ("8", "9 | wide"), "color": ("red",)},
    )
    assert indexed_text(product) == "red shoe for feet. soft size: 8, 9 | wide, and color: red"
    assert indexed_text(replace(product, bullets=(), options={})) == "red shoe for feet.  "


def test_every_product_is_found_by_its_title(catalogue: Catalogue) -> None:
    search = open_search(catalogue)
    for product in list(catalogue.products())[::50]:
        found = search(product.title.lower())
        assert product.asin in found and len(found) <= RESULTS and len(set(found)) == len(found)


def test_everybody_gets_the_same_search(catalogue: Catalogue) -> None:
    search = open_search(catalogue)
    assert open_search(catalogue, "bm25") is search
    assert search("red shoes") is search("red shoes")
    assert search("") == search("the of") == search("zzzzqqq") == ()


def test_a_large_catalogue_is_indexed_on_disk_once(
    catalogue: Catalogue, nothing_open: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = open_search(catalogue)
    queries = [product.query for product in list(catalogue.products())[::100]]
    monkeypatch.setattr(search_module, "IN_MEMORY", 0)
    monkeypatch.setattr(search_module, "_opened", {})
    on_disk = open_search(catalogue)
    assert [on_disk(query) for query in queries] == [in_memory(query) for query in queries]

    def unread(catalogue: Catalogue) -> Iterator[tuple[str, str]]:
        raise AssertionError("the index is there")

    monkeypatch.setattr(search_module, "documents", unread)
    monkeypatch.setattr(search_module, "_opened", {})
    again = open_search(catalogue)
    assert again is not on_disk
    assert [again(query) for query in queries] == [in_memory(query) for query in queries]


def test_backends_that_are_not_there(catalogue: Catalogue, nothing_open: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'bm25' or 'lucene', found 'google'"):
        open_search(catalogue, "google")
    for module in ("pyserini", "pyserini.pyclass"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DependencyNotInstalled, match=r"pip install 'sandboxgym\[webshop-lucene\]'"):
        open_search(catalogue, "lucene")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyNotInstalled, match=r"pip install 'sandboxgym\[webshop\]'"):
        open_search(catalogue)


def test_searching_english_imports_nothing_extra() -> None:
    code = (
        "import sys; from sandboxgym.envs.webshop.retrieval.search import open_search;"
        "from sandboxgym.envs.webshop.retrieval.index_build import build;"
        "from sandboxgym.envs.webshop.retrieval.analysis import terms;"
        "assert build([('a', 'women\\'s red shoes')]).search(terms('red shoe'));"
        "print([name for name in ('nltk', 'regex', 'pyserini', 'jnius', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_benchmark_generates_texts_like_those_of_products(catalogue: Catalogue) -> None:
    generator = QueryGenerator(catalogue, seed=3)
    generated = list(generator.documents(2000))
    assert generated == list(generator.documents(2000))
    assert generated[:10] != list(QueryGenerator(catalogue, seed=4).documents(10))
    assert len({name for name, _ in generated}) == 2000
    real = [len(text.split()) for _, text in search_module.documents(catalogue)]
    made = [len(text.split()) for _, text in generated]
    assert abs(sum(made) / len(made) - sum(real) / len(real)) < 0.1 * sum(real) / len(real)
    vocabulary = {word for _, text in search_module.documents(catalogue) for word in text.split()}
    known = sum(word in vocabulary for _, text in generated for word in text.split()) / sum(made)
    assert 0.9 < known < 1
