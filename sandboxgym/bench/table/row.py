"""Row of the table: an operation and its alternative, measured in turns, so that the machine disturbs both alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Pair = tuple[float, float]
"""Cost of the operation and of the alternative, in seconds or bytes."""


class RowUnavailable(Exception):
    """Raised by a row that cannot be measured here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Options:
    """Programs and data that rows may use beyond this package.

    Args:
        games: ALFWorld's games, an argument of ``gym.make``.
        webshop: a checkout of princeton-nlp/WebShop, for the original's steps.
        catalogue: a folder of its products, and nouns: of their titles, both arguments of ``gym.make``.
        image: a Docker image with bash, for Docker's own operations.
    """

    games: str = "embedded"
    webshop: Path | None = None
    catalogue: Path | None = None
    nouns: str | None = None
    image: str | None = None


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the table of speeds: what is measured, and what a user would do instead.

    Args:
        name: dotted, the subject first; runs are compared by it.
        what: the operation, with its subject.
        instead: the alternative, what a user would do without this package, or the costlier way within it.
        pairs: yields measurements without end, or until there is nothing left to measure; raises `RowUnavailable`.
        unit: of both numbers.
        clock: what seconds are: processor time of the process, or wall-clock time where others work or wait.
    """

    name: str
    what: str
    instead: str
    pairs: Callable[[Options], Iterator[Pair]]
    unit: Literal["seconds", "bytes"] = "seconds"
    clock: Literal["processor", "wall"] = "processor"


def timed(call: Callable[[], Any], *, clock: Callable[[], float] = time.process_time, calls: int = 1) -> float:
    """Seconds of one call, the mean of ``calls``."""
    began = clock()
    for _ in range(calls):
        call()
    return (clock() - began) / calls


def in_turns(
    ours: Callable[[], Any],
    instead: Callable[[], Any],
    *,
    clock: Callable[[], float] = time.process_time,
    calls: tuple[int, int] = (1, 1),
) -> Iterator[Pair]:
    """Measure two calls again and again, the one that begins taking turns; each ran once before.

    Args:
        ours: the operation.
        instead: its alternative.
        clock: of both.
        calls: how many of each make one measurement, which is their mean.
    """
    ours()
    instead()
    while True:
        first = timed(ours, clock=clock, calls=calls[0])
        second = timed(instead, clock=clock, calls=calls[1])
        yield first, second
        second = timed(instead, clock=clock, calls=calls[1])
        first = timed(ours, clock=clock, calls=calls[0])
        yield first, second
