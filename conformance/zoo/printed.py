"""Faults in text for a policy: a dict in info in the order of picking up, notes in any script, restores that raise.

`Satchel` is correct; every mutant is a satchel with one method changed.
"""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym

from sandboxgym import SnapshotEnv, SnapshotSpec, Unicode
from sandboxgym.core import Transition
from zoo.mutant import good, mutant

THINGS = ("sword", "lamp", "apple", "key")
COMMANDS = (*(f"take {thing}" for thing in THINGS), "drop", "write hello", "read")
LENGTH = 20
Output = tuple[str, dict[str, Any]]


@good()
class Satchel(SnapshotEnv[str, str]):
    """Things are taken and the first one dropped; notes are written and read."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.observation_space, self.action_space = Unicode(), Unicode(COMMANDS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.bag: dict[str, int] = {}
        self.notes: list[str] = []
        self.price, self.clock = int(self.np_random.integers(1, 9)), 0
        return "an empty satchel", self.info()

    def info(self) -> dict[str, Any]:
        return {"bag": dict(self.bag), "pages": len(self.notes)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.clock += 1
        verb, _, text = action.partition(" ")
        told = f"{len(self.bag)} things"
        if verb == "take":
            self.bag[text] = self.bag.get(text, 0) + self.price
        elif verb == "drop" and self.bag:
            self.bag.pop(min(self.bag))
        elif verb == "write":
            self.notes.append(text)
        elif verb == "read":
            told = " ".join(self.notes)
        return told, float(sum(self.bag.values())), False, self.clock >= self.length, self.info()

    def _capture(self) -> Any:
        return {"bag": self.bag, "notes": self.notes, "price": self.price, "clock": self.clock}

    def _apply(self, state: Any) -> None:
        self.bag, self.notes, self.price, self.clock = state["bag"], state["notes"], state["price"], state["clock"]


@mutant("a dict comes back sorted", "interface.order")
class SortedBag(Satchel):
    """The bag is equal to what it was, but a prompt made by iterating over it is another one."""

    def _apply(self, state: Any) -> None:
        super()._apply({**state, "bag": dict(sorted(state["bag"].items()))})


@mutant("entries of info come in another order from a restore", "interface.order")
class InfoTurned(Satchel):
    """Restore that returns an info with its keys in reverse order."""

    def _transition(self) -> Transition:
        info = dict(reversed(self.info().items())) if self.returning else self.info()
        return Transition(self.told, self.paid, False, self.clock >= self.length, info)

    returning = False
    told, paid = "an empty satchel", 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.told, self.paid = "an empty satchel", 0.0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        told, paid, *rest = super().step(action)
        self.told, self.paid = told, paid
        return told, paid, *rest  # type: ignore[return-value]

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        self.returning = True
        try:
            return super().restore(snap, seed=seed)
        finally:
            self.returning = False

    def _capture(self) -> Any:
        return {**super()._capture(), "told": self.told, "paid": self.paid}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.told, self.paid = state["told"], state["paid"]


@mutant("a dict is saved with sorted keys", "interface.order")
class SavedSorted(Satchel):
    """In the process that took it a snapshot is right; one that was saved and loaded has a sorted bag."""

    @classmethod
    def _encode(cls, state: Any) -> bytes:
        return json.dumps(state, sort_keys=True).encode()

    @classmethod
    def _decode(cls, data: bytes) -> Any:
        return json.loads(data)


@mutant("texts are captured in a narrow encoding", "interface.texts")
class NarrowNotes(Satchel):
    """Letters that Latin-1 does not have come back as question marks."""

    def _capture(self) -> Any:
        notes = [note.encode("latin-1", "replace").decode("latin-1") for note in self.notes]
        return {**super()._capture(), "notes": notes}


@mutant("line ends are translated", "interface.texts")
class TranslatedLineEnds(Satchel):
    """Notes are kept like files in text mode: a carriage return does not survive."""

    def _capture(self) -> Any:
        return {**super()._capture(), "notes": [note.replace("\r\n", "\n") for note in self.notes]}


@mutant("texts are captured as far as the longest command", "interface.texts")
class ShortMemory(Satchel):
    """The last text is written in a field of 20 letters, and one of the commands asks for its length."""

    said = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.said = ""
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        told, *rest = super().step(action)
        if action == "drop":
            told += f", after {len(self.said)} letters"
        self.said = action
        return told, *rest  # type: ignore[return-value]

    def _capture(self) -> Any:
        return {**super()._capture(), "said": self.said[:20]}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.said = state["said"]


class Parcel:
    """A snapshot without a class of this package."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


@good()
class PlainSatchel(gym.Env[str, str]):
    """The protocol alone; a restore looks at the seed before it touches anything."""

    snapshot_spec = SnapshotSpec(cross_process=False, cross_host=False)

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.inner = Satchel(length)
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space
        self.began = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.began = True
        return self.inner.reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.inner.step(action)

    @property
    def np_random(self) -> Any:
        return self.inner.np_random

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self.inner.np_random = value

    def snapshot(self) -> Parcel:
        return Parcel({"snap": self.inner.snapshot()})

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        if not isinstance(snap, Parcel):
            raise TypeError(f"expected a Parcel, found {type(snap).__name__}")
        self.began = True
        return self.inner.restore(snap.state["snap"], seed=seed)

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = []
        for inner in self.inner.fork(k, seed=seed):
            child = type(self)(self.length)
            child.inner, child.began = inner, True
            child.observation_space, child.action_space = inner.observation_space, inner.action_space
            children.append(child)
        return children


@mutant("a log of all steps is part of every snapshot", "cost.written")
class KeptLog(Satchel):
    """Each episode alone is short, and the log is never cleared."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.log: list[str] = []

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.log.append(f"{self.clock}: {action}")
        return result

    def _capture(self) -> Any:
        return {**super()._capture(), "log": self.log}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.log = state["log"]


@mutant("a refused seed releases the snapshot", "restore.refused")
class RefusalSpoils(PlainSatchel):
    """The handle whose restore raised holds the state of where the environment was."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        try:
            return super().restore(snap, seed=seed)
        except Exception:
            if isinstance(snap, Parcel):
                snap.state["snap"] = self.inner.snapshot()
            raise


@mutant("forks are made with the default arguments", "fork.arguments")
class ForksByDefault(PlainSatchel):
    """Where another length was given, the episodes of forks have the usual one."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.inner.length = LENGTH
        return children
