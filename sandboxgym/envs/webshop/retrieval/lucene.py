"""The original's own search engine: Lucene as Anserini sets it up, through pyserini.

Its ranking is that of :mod:`.index`, which is compared with it. It needs Java 21 or later, and has two limits of Java:
a process that has searched must not be forked by the operating system, and the Java virtual machine stays until the
process ends.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gymnasium.error import DependencyNotInstalled

from sandboxgym.system import interpreter
from sandboxgym.system.once import made_once

INSTALL = "pip install 'sandboxgym[webshop-lucene]' (and Java 21 or later: set JAVA_HOME)"
# The original's options except --storeRaw: products come from the catalogue, not from the index.
_INDEXING = (
    *("--collection", "JsonCollection", "--generator", "DefaultLuceneDocumentGenerator", "--threads", "1"),
    *("--storePositions", "--storeDocvectors"),
)


class LuceneFailed(RuntimeError):
    """Raised if Lucene could not build the index; the message holds the end of its output."""


class Lucene:
    """Search in an index that Lucene built.

    Args:
        directory: directory of an index made by `build_lucene`.
        results: largest number of documents that a search finds.
        remembered: number of queries whose answers are kept.

    Raises:
        DependencyNotInstalled: pyserini or Java is missing.
    """

    name = "lucene"

    def __init__(self, directory: Path, *, results: int = 50, remembered: int = 0) -> None:
        self._searcher = _java("io.anserini.search.SimpleSearcher")(str(directory))
        self._results = results
        self._find: Callable[[str], tuple[str, ...]] = functools.lru_cache(remembered)(self._search)

    def __call__(self, keywords: str) -> tuple[str, ...]:
        """Find the names of the best documents, best first."""
        return self._find(keywords)

    def _search(self, keywords: str) -> tuple[str, ...]:
        return tuple([hit.docid for hit in self._searcher.search(keywords, self._results)])


def build_lucene(documents: Iterable[tuple[str, str]], directory: Path) -> None:
    """Build an index in a directory, which appears complete or not at all.

    Args:
        documents: pairs of a name and a text.
        directory: directory of the index; left as it is if it exists.

    Raises:
        DependencyNotInstalled: pyserini or Java is missing.
        LuceneFailed: Lucene ended with an error.
    """
    if directory.exists():
        return
    _java("io.anserini.index.IndexCollection")  # before anything is written

    def make(scratch: Path) -> None:
        source, target = scratch / "source", scratch / "index"
        source.mkdir()
        with open(source / "documents.jsonl", "w", encoding="utf-8") as file:
            for name, text in documents:
                file.write(json.dumps({"id": name, "contents": text}) + "\n")
        options = (*_INDEXING, "--input", str(source), "--index", str(target))
        command = interpreter.module_command("pyserini.index.lucene", *options)
        done = subprocess.run(command, env=interpreter.environment(), capture_output=True, text=True)
        if done.returncode or not target.exists():
            raise LuceneFailed(f"pyserini.index.lucene ended with {done.returncode}: {done.stderr[-2000:]}")

    made_once(directory, make, look=lambda: directory.exists() or None, keep="index")


def _java(name: str) -> Any:
    try:
        from pyserini.pyclass import autoclass

        return autoclass(name)
    except ImportError as error:
        raise DependencyNotInstalled(f"the search backend 'lucene' needs pyserini: {INSTALL}") from error
    except Exception as error:  # of Java's making
        reason = str(error).partition("\n")[0]
        raise DependencyNotInstalled(f"the search backend 'lucene' cannot start Java: {reason}; {INSTALL}") from error
