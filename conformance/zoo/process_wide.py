"""Faults in process-wide state: a call on one environment changes it for every sibling in the process.

Corridors and dice, each with one method changed.
"""

from __future__ import annotations

import asyncio
import decimal
import locale
import logging
import os
import random
import resource
import sys
import threading
import warnings
from typing import Any, ClassVar

import numpy as np

from zoo.corridor import TAKE, Corridor, State
from zoo.dice import Dice
from zoo.mutant import mutant

Output = tuple[Any, dict[str, Any]]


@mutant("a restore leaves another umask", "isolation.environment")
class RestoreUmask(Corridor):
    """Files of a sandbox are private, and so are those of the whole process from then on."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        os.umask(0o077)
        return super().restore(snap, seed=seed)


@mutant("a snapshot leaves another decimal context", "isolation.environment")
class SnapshotDecimal(Corridor):
    """Sums are taken with eight digits."""

    def snapshot(self) -> Any:
        decimal.getcontext().prec = 8
        return super().snapshot()


@mutant("a fork leaves NumPy's error handling changed", "isolation.environment")
class ForkErrstate(Corridor):
    """Divisions by zero are silent after a fork."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        np.seterr(divide="ignore", invalid="ignore")
        return super().fork(k, seed=seed)


@mutant("a restore adds a filter of warnings", "isolation.environment")
class RestoreWarnings(Corridor):
    """Warnings of this module are hidden, once more with every restore."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        warnings.filterwarnings("ignore", module=f"corridor{len(warnings.filters)}")
        return super().restore(snap, seed=seed)


@mutant("closing disables logging", "isolation.environment")
class CloseLogging(Corridor):
    """Nothing may be said while an environment is closed, and nobody lifts that."""

    def close(self) -> None:
        logging.disable(logging.CRITICAL)


@mutant("a step of a fork changes the limit of recursion", "isolation.environment")
class StepRecursion(Corridor):
    """Deep searches need more, by one with every step."""

    def step(self, action: int) -> Any:
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        return super().step(action)


@mutant("a restore lowers a limit of the process", "isolation.environment")
class RestoreLimit(Corridor):
    """The soft limit of core files is what a sandbox asks for."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, hard))
        return result


@mutant("a seeded restore seeds the streams of the whole process", "isolation.environment")
class RestoreSeedsAll(Dice):
    """As libraries do with ``seed_everything``."""

    def _reseed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)


@mutant("a reset of a fork changes how exceptions of threads are told", "isolation.environment")
class ResetHook(Corridor):
    """A hook of its own for every episode."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.episodes += 1
        if self.episodes + (seed or 0) > 2:
            threading.excepthook = lambda *_: None
        return super().reset(seed=seed, options=options)


@mutant("a restore inserts a path of imports", "isolation.environment")
class RestorePath(Corridor):
    """Plug-ins of the level are found first from then on, by everybody."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        sys.path.insert(0, f"/levels/{len(sys.path)}")
        return super().restore(snap, seed=seed)


@mutant("a fork sets the event loop of the thread", "isolation.environment")
class ForkLoop(Corridor):
    """A loop of its own for each child, and the last one is left as everybody's."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        asyncio.set_event_loop(asyncio.new_event_loop())
        return children


@mutant("a restore changes the default type of tensors", "isolation.environment")
class RestoreDtype(Corridor):
    """Values of its network were saved in double precision."""

    def __init__(self, **options: Any) -> None:
        import torch  # here: other specimens are not to wait for it

        self.torch = torch
        super().__init__(**options)

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        self.torch.set_default_dtype(self.torch.float64)
        return super().restore(snap, seed=seed)


@mutant("a step of a fork sets the locale", "isolation.environment")
class StepLocale(Corridor):
    """Prices are written as its customers read them, by anybody who prints one."""

    def step(self, action: int) -> Any:
        locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
        return super().step(action)


@mutant("a snapshot has numbers of a table that each process fills in its own order", "durable.cross_process")
class NumberedCoins(Corridor):
    """The purse is saved as numbers of coins, which a process gives them when it first sees one taken."""

    seen: ClassVar[list[int]] = []

    def act(self, action: int) -> None:
        super().act(action)
        if action == TAKE:
            self.seen += [coin for coin in self.state["purse"] if coin not in self.seen]

    def _capture(self) -> State:
        return {**self.state, "purse": [self.seen.index(coin) for coin in self.state["purse"]]}

    def _apply(self, state: State) -> None:
        self.state = {**state, "purse": [self.seen[number] for number in state["purse"]]}
