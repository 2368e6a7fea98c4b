"""The index: scores against a simple reference of Lucene's, pruning against full scoring, and building on disk."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sandboxgym.envs.webshop.retrieval import index as index_module
from sandboxgym.envs.webshop.retrieval import index_build
from sandboxgym.envs.webshop.retrieval.index import ARRAYS, Index, IndexCorrupt
from sandboxgym.envs.webshop.retrieval.index_build import Document, IndexingFailed, build, build_on_disk, kept_length

WORDS = [f"w{number}" for number in range(300)]
"""Words that the analyzer leaves as they are."""


def random_documents(rng: random.Random, number: int) -> list[Document]:
    """Documents in which few words are frequent and most are rare; some are equal but for the name, some empty."""
    names = rng.sample([f"B{at:05d}" for at in range(10 * number)], number)
    texts: list[str] = []
    for _ in range(number):
        if texts and rng.random() < 0.1:
            texts.append(rng.choice(texts))
        else:
            length = rng.choice([0, 3, 10, 60])
            texts.append(" ".join(WORDS[int(len(WORDS) ** rng.random()) - 1] for _ in range(length)))
    return list(zip(names, texts))


def random_query(rng: random.Random) -> list[str]:
    words = [WORDS[int(len(WORDS) ** rng.random()) - 1] for _ in range(rng.randint(1, 12))]
    return words + ["absent"] * (rng.random() < 0.3)


def reference(documents: Sequence[Document], query: Sequence[str], k: int) -> list[tuple[str, float]]:
    """BM25 as Lucene computes it, one document and one term at a time."""
    one = np.float32(1)
    texts = {name: text.split() for name, text in documents if text}
    if not texts:
        return []
    average = np.float32(sum(map(len, texts.values())) / len(texts))
    scores = {}
    for name, words in texts.items():
        length = np.float32(next(n for n in range(len(words), 0, -1) if exactly_kept(n)))
        inverse = one / (np.float32(0.9) * ((one - np.float32(0.4)) + np.float32(0.4) * length / average))
        score = 0.0
        for word, times in Counter(query).items():
            frequency = sum(word in other for other in texts.values())
            if word in words:
                idf = np.float32(math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5)))
                weight = np.float32(times) * idf
                score += float(weight - weight / (one + np.float32(words.count(word)) * inverse))
        if score:
            scores[name] = float(np.float32(score))
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:k]


def exactly_kept(length: int) -> bool:
    """True if a byte holds this length: all up to 40, above that 24 more than a number of four significant bits."""
    above = length - 24
    return length <= 40 or above % 2 ** (above.bit_length() - 4) == 0


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prune, and put postings into tiers and dense rows, in an index of any size."""
    monkeypatch.setattr(index_module, "EXHAUSTIVE", 0)
    monkeypatch.setattr(index_build, "EXHAUSTIVE", 0)
    monkeypatch.setattr(index_build, "TIERED", 8)
    monkeypatch.setattr(index_build, "DENSE", 3)
    monkeypatch.setattr(index_module, "_FIRST_SEEDING", 4)
    monkeypatch.setattr(index_module, "_SAMPLE", 16)


@pytest.mark.parametrize("seed", range(4))
def test_scores_and_order_are_lucenes(seed: int) -> None:
    rng = random.Random(seed)
    documents = random_documents(rng, 80)
    index = build(documents)
    for _ in range(20):
        query = random_query(rng)
        k = rng.choice([1, 7, 50, 500])
        assert index.search(query, k=k) == reference(documents, query, k)


@pytest.mark.parametrize("seed", range(8))
def test_pruning_changes_nothing(seed: int, eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    documents = random_documents(rng, rng.choice([30, 300, 1500]))
    index = build(documents)
    pruned = 0
    for probe in (0, 1, 12):
        monkeypatch.setattr(index_module, "_PROBE", probe)
        for _ in range(40):
            query = random_query(rng)
            k = rng.choice([1, 5, 50])
            tiers = list(index.tiers(query))
            pruned += len(index._candidates(tiers, k)) < len(documents) // 4
            assert index.search(query, k=k) == index.exhaustive(query, k=k)
    assert index.row.max() >= 0
    assert len(documents) < 100 or (pruned and index.upper.max() > 0)


def test_impacts_are_rounded_up_and_by_little(eager: None) -> None:
    index = build(random_documents(random.Random(1), 300))
    tiers = list(index.tiers(WORDS[:40] * 3))
    steps = index_module._STEPS / sum(tier.drop for tier in tiers)
    sums, exact = index._take_total(), np.zeros(len(index))
    total, everywhere = sums[: len(index)], np.arange(len(index), dtype=np.int32)
    assert any(tier.cost < tier.below for tier in tiers) and any(tier.cost >= tier.below for tier in tiers)
    number = 0
    while tiers[number:]:
        some = tiers[number : number + random.Random(number).randint(1, 4)]
        index._add(some, sums, steps)
        number += len(some)
        for impacts in index._looked_up(some, everywhere):
            exact += impacts
        assert (total >= exact * steps).all() and (total <= exact * steps + number * index_module._ROUNDED).all()
        assert (total[exact == 0] == 0).all()
    assert any(tier.docs is None for tier in tiers) and total.max() > 10_000 and not sums[len(index) :].any()


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.02, 0.5, 1.0])
def test_places_of_high_sums_are_all_found(share: float) -> None:
    sums = np.random.default_rng(0).choice([3, 900], 8 * 5000, p=[1 - share, share]).astype(np.uint16)
    for least in (1, 900, 901):
        assert index_module._reaching(sums, least).tolist() == np.flatnonzero(sums >= least).tolist()


def test_a_query_of_more_words_than_can_be_rounded_is_scored_in_full(
    eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * index_module._TIERS * index_module._ROUNDED < 2**16 - index_module._STEPS
    index = build(random_documents(random.Random(2), 300))
    monkeypatch.setattr(index_module, "_TIERS", 5)
    monkeypatch.setattr(Index, "_candidates", lambda *_: pytest.fail("pruned"))
    assert index.search(WORDS[:40]) == index.exhaustive(WORDS[:40]) != []


def test_tiers_of_few_words_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    every, few = [build(random_documents(random.Random(3), 100)) for _ in range(2)]
    expected = [every.search(WORDS[at : at + 3]) for at in range(40)]
    monkeypatch.setattr(index_module, "_REMEMBERED", 4)
    assert [few.search(WORDS[at : at + 3]) for at in range(40)] == expected
    assert len(few._found) <= 4 < len(every._found)


def test_a_word_counts_as_often_as_it_is_asked_for() -> None:
    index = build([("a", "red shoe"), ("b", "blue shoe"), ("c", "green shirt")])
    once, twice = dict(index.search(["red", "blue"])), dict(index.search(["red", "red", "blue"]))
    assert once["a"] == once["b"]
    assert twice["a"] == pytest.approx(2 * once["a"]) and twice["b"] == once["b"]


def test_documents_without_words_do_not_count() -> None:
    documents = [("a", "red shoe"), ("b", "blue shoe")]
    assert build([*documents, ("c", "the"), ("d", "")]).search(["red"]) == build(documents).search(["red"])


def test_an_index_without_documents_finds_nothing() -> None:
    assert build([]).search(["red"]) == []
    assert build([("a", "red")]).search([]) == []


def test_lengths_are_kept_as_a_byte_holds_them() -> None:
    lengths = np.arange(0, 3000)
    kept = kept_length(lengths)
    assert kept[:41].tolist() == list(range(41))
    assert all(exactly_kept(length) for length in set(kept.tolist()))
    assert (kept <= lengths).all() and (np.diff(kept) >= 0).all()


def odd_documents() -> list[Document]:
    return [*random_documents(random.Random(5), 500), ("Ω", "snow \udc80 ☃ naïve"), ("B-\ud800", "w1 snow")]


def test_on_disk_it_is_the_same(tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_build, "BATCH", 64)
    documents = odd_documents()
    in_memory, on_disk = build(documents), build_on_disk(lambda: documents, tmp_path / "x" / "index", workers=2)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(in_memory, name), getattr(on_disk, name), err_msg=name)
    assert on_disk.search(["snow"]) == in_memory.search(["snow"]) != []
    assert not on_disk.docs.flags.writeable
    assert left_in(tmp_path / "x") == {"index"}


def test_it_is_built_once(tmp_path: Path) -> None:
    asked = []

    def documents() -> Iterator[Document]:
        asked.append(1)
        yield from odd_documents()

    found: list[Index] = []
    threads = [
        threading.Thread(target=lambda: found.append(build_on_disk(documents, tmp_path / "index", workers=1)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(build_on_disk(documents, tmp_path / "index"))
    assert asked == [1]
    assert len({str(index.search(["w1", "w7"])) for index in found}) == 1 and len(found) == 4


BUILDER = """
import sys, time
from pathlib import Path
from sandboxgym.envs.webshop.retrieval.index_build import build_on_disk

def documents():
    for number in range(20_000):
        yield f"B{number}", "a red shoe"
    print("under way", flush=True)
    time.sleep(60)

build_on_disk(documents, Path(sys.argv[1]), workers=1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_builder_is_cleared_away(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BUILDER, tmp_path / "index"], stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None and builder.stdout.readline() == b"under way\n"
        (staging,) = tmp_path.glob(".index.*")
        builder.send_signal(signal.SIGKILL)
    index = build_on_disk(lambda: [("a", "red shoe")], tmp_path / "index", workers=1)
    assert [name for name, _ in index.search(["shoe"])] == ["a"]
    assert not staging.exists() and left_in(tmp_path) == {"index"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: (index / "docs.npy").write_bytes((index / "docs.npy").read_bytes()[:-1]),
        lambda index: (index / "meta.json").write_text("{"),
        lambda index: (index / "meta.json").unlink(),
        lambda index: (index / "gain.npy").unlink(),
    ],
    ids=["truncated", "no JSON", "no head", "file gone"],
)
def test_one_that_is_damaged_is_built_again(
    damage: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = odd_documents()
    expected = build_on_disk(lambda: documents, tmp_path / "index", workers=1).search(["snow"])
    damage(tmp_path / "index")
    assert build_on_disk(lambda: documents, tmp_path / "index", workers=1).search(["snow"]) == expected
    assert "damaged" in caplog.text


def test_postings_are_moved_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_build, "_COMPACTED", 7)
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 50):
        kept, docs = rng.random(size) < 0.6, rng.integers(100, size=size)
        expected = docs[kept].tolist()
        assert docs[: index_build._compact(kept, docs)].tolist() == expected


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[subprocess.Popen[bytes]] = []

    class Worker(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            workers.append(self)

    monkeypatch.setattr(subprocess, "Popen", Worker)

    def interrupted() -> Iterator[Document]:
        yield from odd_documents()
        raise KeyError("record 7")

    with pytest.raises(KeyError, match="record 7"):
        build_on_disk(interrupted, tmp_path / "index", workers=2)
    with pytest.raises(IndexingFailed, match="TypeError"):
        build_on_disk(lambda: [("a", 5)], tmp_path / "index", workers=2)  # type: ignore[list-item,return-value]
    assert left_in(tmp_path) == set()
    assert len(workers) == 4 and all(worker.returncode is not None for worker in workers)


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Index.open(tmp_path / "absent")
    build([("a", "red shoe"), ("b", "blue shoe")]).save(tmp_path / "index")
    assert Index.open(tmp_path / "index").search(["red"])[0][0] == "a"
    array = tmp_path / "index" / "docs.npy"
    array.write_bytes(array.read_bytes()[:-4])
    with pytest.raises(IndexCorrupt, match=r"docs\.npy"):
        Index.open(tmp_path / "index")
    np.save(array, np.zeros(3, dtype=np.int32))
    with pytest.raises(IndexCorrupt, match="shape"):
        Index.open(tmp_path / "index")
    (tmp_path / "index" / "meta.json").write_text("{}")
    with pytest.raises(IndexCorrupt, match=r"meta\.json"):
        Index.open(tmp_path / "index")


def test_threads_do_not_disturb_each_other(eager: None) -> None:
    rng = random.Random(9)
    index = build(random_documents(rng, 1000))
    queries = [random_query(rng) for _ in range(60)]
    expected = [index.exhaustive(query) for query in queries]
    wrong: list[int] = []

    def ask() -> None:
        wrong.extend(at for at, query in enumerate(queries) if index.search(query) != expected[at])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def left_in(directory: Path) -> set[str]:
    """Names in a directory but for the lock, which stays: removing it would let two processes build."""
    return {path.name for path in directory.iterdir() if not path.name.endswith(".lock")}
