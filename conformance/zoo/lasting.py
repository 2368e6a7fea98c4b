"""Faults that leave something behind in the process, or only in a long-lived environment or handle.

Corridors, quests and shells, each with one method changed.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from zoo.corridor import Cells, Corridor, State
from zoo.mutant import mutant
from zoo.quest import Handle, Quest

Output = tuple[Any, dict[str, Any]]


# What a process has one of.


@mutant("a snapshot leaves another working directory", "snapshot.noninterference", "isolation.environment")
class SnapshotMovesAway(Corridor):
    """Writes a scratch file where temporary files go, and doesn't come back."""

    def snapshot(self) -> Any:
        os.chdir(tempfile.gettempdir())
        return super().snapshot()


@mutant("a restore leaves an environment variable", "isolation.environment", "snapshot.noninterference")
class RestoreExports(Corridor):
    """The task restored last is in a variable, for tools that are started."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        os.environ["CORRIDOR_TASK"] = str(self.state["goal"])
        return result


@mutant("a fork leaves another signal handler", "isolation.environment")
class ForkHandlesSignal(Corridor):
    """A fork takes over SIGUSR1 and keeps it."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, lambda *_: None)
        return super().fork(k, seed=seed)


@mutant("a snapshot switches garbage collection off", "snapshot.noninterference", "isolation.environment")
class SnapshotStopsCollecting(Corridor):
    """For speed, and for good."""

    def snapshot(self) -> Any:
        gc.disable()
        return super().snapshot()


@mutant("closing deletes a variable of the process", "isolation.environment")
class CloseUnsets(Corridor):
    """Closing cleans up what the environment never set."""

    def close(self) -> None:
        os.environ.pop("HOME", None)


# Threads and time.


@mutant(
    "state is kept by thread", "concurrency.snapshot_while_stepping", "concurrency.fork_in_threads", "fork.isolation"
)
class ByThread(Corridor):
    """Due reward that only the thread that reset or restored finds."""

    def __init__(self, length: int = 5, render_mode: str | None = "ansi") -> None:
        super().__init__(length, render_mode)
        self.local = threading.local()

    def step(self, action: int) -> Any:
        self.state["due"] = getattr(self.local, "due", 0.0)
        result = super().step(action)
        self.local.due = self.state["due"]
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.local.due = 0.0
        return super().reset(seed=seed, options=options)

    def _apply(self, state: State) -> None:
        self.state = state
        self.local.due = state["due"]


@mutant("a snapshot expires", "restore.trace_equality")
class Expires(Corridor):
    """After ten minutes by the monotonic clock a restore finds the coins gone."""

    taken: ClassVar[dict[str, float]] = {}
    expired = False

    def snapshot(self) -> Any:
        snap = super().snapshot()
        self.taken[snap.id] = time.monotonic()
        return snap

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        self.expired = time.monotonic() - self.taken.get(getattr(snap, "id", ""), time.monotonic()) > 600
        return super().restore(snap, seed=seed)

    def _apply(self, state: State) -> None:
        self.state = {**state, "coins": {cell: [] for cell in state["coins"]}} if self.expired else state


@mutant("a restored state depends on the hour of the day", "restore.trace_equality")
class Greets(Corridor):
    """Says good morning or good evening, by the clock at the last reset or restore."""

    evening = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.evening = False
        return super().reset(seed=seed, options=options)

    def _apply(self, state: State) -> None:
        self.evening = int(time.time()) // 3600 % 24 >= 12
        super()._apply(state)

    def info(self) -> dict[str, Any]:
        return {**super().info(), "greeting": "good evening" if self.evening else "good morning"}


# Resources.


@mutant("a descriptor leaks per snapshot", "resources.baseline")
class DescriptorLeak(Corridor):
    """Every snapshot opens a file and never closes it."""

    def snapshot(self) -> Any:
        os.open(os.devnull, os.O_RDONLY)
        return super().snapshot()


_kept: list[bytes] = []


@mutant("memory leaks per snapshot", "resources.baseline")
class MemoryLeak(Corridor):
    """64 KiB of every snapshot stay in a list of the module."""

    def snapshot(self) -> Any:
        _kept.append(os.urandom(1 << 16))
        return super().snapshot()


@mutant("what a snapshot costs grows with the episode", "cost.episode_length")
class CostGrows(Corridor):
    """Every step adds to what a snapshot copies, though the cost is declared constant."""

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        if not self.state["done"]:
            self.state["history"] = [
                *self.state.get("history", ()),
                *([self.state["clock"], index] for index in range(20)),
            ]
        return super().step(action)


@mutant("a temporary file leaks per restore", "resources.baseline")
class FilePerRestore(Corridor):
    """Every restore writes its state to a file first."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(repr(self.state).encode())
        return result


@mutant("a temporary file leaks per restore with a seed", "resources.baseline")
class FilePerSeed(Corridor):
    """The seed is written to a file, for a simulator that is started later."""

    def _reseed(self, seed: int) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(str(seed).encode())


@mutant("a file leaks per snapshot, in the working directory", "resources.baseline")
class FileBesides(Corridor):
    """Dumps what it captured beside the program."""

    def snapshot(self) -> Any:
        snap = super().snapshot()
        Path(f"corridor-{snap.id}.dump").write_text(repr(self.state))
        return snap


@mutant("restores pile up in a long-lived environment", "resources.long_lived")
class PilesUp(Corridor):
    """Each restore keeps what was before it, until the environment is closed."""

    def __init__(self, length: int = 5, render_mode: str | None = "ansi") -> None:
        super().__init__(length, render_mode)
        self.before: list[Any] = []

    def _apply(self, state: State) -> None:
        self.before.append(b"before" * 1000 + bytes(len(self.before)))
        self.state = state

    def close(self) -> None:
        self.before.clear()


@mutant("descriptors pile up in a long-lived environment", "resources.long_lived")
class OpensUntilClosed(Corridor):
    """Each snapshot opens a file, all of which closing closes."""

    def __init__(self, length: int = 5, render_mode: str | None = "ansi") -> None:
        super().__init__(length, render_mode)
        self.descriptors: list[int] = []

    def snapshot(self) -> Any:
        self.descriptors.append(os.open(os.devnull, os.O_RDONLY))
        return super().snapshot()

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


@mutant("a handle keeps all environments that it was restored in", "resources.long_lived")
class HandleKeepsAll(Quest):
    """The handle knows where it is in use."""

    class handle(Handle):
        def __init__(self, header: dict[str, Any], content: str) -> None:
            super().__init__(header, content)
            self.users: list[Any] = []

        def release(self) -> None:
            super().release()
            self.users.clear()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ballast = bytes(20_000)

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        snap.users.append(self)
        return result


@mutant("a handle that is dropped leaves its file", "resources.dropped")
class OnlyReleased(Quest):
    """The file of a handle goes with ``release``, and stays where nobody calls it."""

    class handle(Handle):
        def __init__(self, header: dict[str, Any], content: str) -> None:
            super().__init__(header, content)
            with tempfile.NamedTemporaryFile("w", delete=False, suffix=".quest") as file:
                file.write(content)
            self.path = Path(file.name)

        def release(self) -> None:
            super().release()
            self.path.unlink(missing_ok=True)


@mutant("a handle holds all that came before it", "resources.depth")
class HoldsAncestors(Corridor):
    """A snapshot of a restored state has the snapshot inside that it was restored from, and so on."""

    ancestor: Any = None

    def _capture(self) -> State:
        return {**self.state, "ancestor": self.ancestor}

    def _apply(self, state: State) -> None:
        self.ancestor = {"below": state.get("ancestor"), "bytes": bytes(1000)} if depth(state) < 40 else self.ancestor
        self.state = {key: value for key, value in state.items() if key != "ancestor"}


def depth(state: State) -> int:
    """Number of ancestors that a state holds."""
    ancestor, found = state.get("ancestor"), 0
    while ancestor is not None:
        ancestor, found = ancestor["below"], found + 1
    return found
