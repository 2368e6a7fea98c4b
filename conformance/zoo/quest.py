"""A text adventure with admissible commands that only satisfies the protocol, and faults in handles.

`Quest` derives from Gymnasium's ``Env`` alone and has its own handle: a JSON text with a digest, hence
immutable and safe to load. A cat walks about at random. Every mutant has one method changed.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
import time
import uuid
from pathlib import Path
from typing import Any, ClassVar, Self

import gymnasium as gym
from gymnasium.utils import seeding

from sandboxgym import ResetNeeded, SnapshotCorrupt, SnapshotMismatch, SnapshotReleased, SnapshotSpec, Unicode
from zoo import streams
from zoo.mutant import good, mutant

ROOMS = {
    "hall": ("kitchen", "garden", "attic"),
    "kitchen": ("hall", "cellar"),
    "garden": ("hall",),
    "attic": ("hall",),
    "cellar": ("kitchen",),
}
ITEMS = ("lamp", "key", "rope", "coin")
TURNS = 20
VERSION = 1
MAGIC = "quest snapshot"

Output = tuple[str, dict[str, Any]]
State = dict[str, Any]


class Handle:
    """An immutable snapshot: a header that says what it fits, and the content as JSON text."""

    def __init__(self, header: dict[str, Any], content: str) -> None:
        self.id = uuid.uuid4().hex
        self.header = header
        self.content: str | None = content

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        return len(self.text())

    def text(self) -> str:
        if self.content is None:
            raise SnapshotReleased(f"snapshot {self.id[:8]} cannot be used after release()")
        return self.content

    def release(self) -> None:
        self.content = None

    def save(self, path: Any) -> None:
        whole = {"magic": MAGIC, "header": self.header, "content": self.text()}
        Path(path).write_text(json.dumps({**whole, "sha256": _checksum(whole)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Any) -> Self:
        try:
            whole = json.loads(Path(path).read_bytes())
            found = whole.pop("sha256")
            if whole["magic"] != MAGIC or found != _checksum(whole):
                raise ValueError("the checksum differs")
            return cls(whole["header"], whole["content"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SnapshotCorrupt(f"expected an intact snapshot of a quest, found {error!r}") from error


def _checksum(whole: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


@good()
class Quest(gym.Env[str, str]):
    """Text observations and actions, only the protocol, a handle of its own that can be saved; truncates by itself."""

    metadata = {"render_modes": ["ansi"]}
    snapshot_spec = SnapshotSpec()
    handle: ClassVar[type[Handle]] = Handle

    def __init__(self, turns: int = TURNS, render_mode: str | None = "ansi") -> None:
        self.turns = turns
        self.render_mode = render_mode
        self.observation_space = Unicode()
        self.action_space = Unicode(("look", "wait"))
        self.state: State | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        rooms, random = list(ROOMS), self.np_random
        task = (options or {}).get("task")
        index = int(random.integers(len(ITEMS) * 3)) if task is None else int(task)
        self.state = {
            "room": "hall",
            "where": {item: rooms[int(random.integers(2))] for item in ITEMS},
            "bag": [],
            "polish": {},
            "cat": "attic",
            "goal": [ITEMS[index % len(ITEMS)], rooms[2 + index // len(ITEMS) % 3]],
            "turn": 0,
            "done": False,
            "message": "You wake up.",
        }
        return self.observation(), self.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        state = self.current()
        if state["done"]:
            return self.observation(), 0.0, True, False, self.info()
        state["turn"] += 1
        state["message"] = self.act(*action.split(" ", 1))
        doors = ROOMS[state["cat"]]
        state["cat"] = doors[int(self.np_random.integers(len(doors)))]
        item, room = state["goal"]
        state["done"] = state["where"][item] == room
        late = state["turn"] >= self.turns
        return self.observation(), float(state["done"]), state["done"], late, self.info()

    def act(self, verb: str, thing: str = "") -> str:
        state = self.current()
        if verb == "go" and thing in ROOMS[state["room"]]:
            state["room"] = thing
            return f"You enter the {thing}."
        if verb == "take" and state["where"].get(thing) == state["room"]:
            state["where"][thing] = "bag"
            state["bag"].append(thing)
            return f"You take the {thing}."
        if verb == "drop" and thing in state["bag"]:
            state["bag"].remove(thing)
            state["where"][thing] = state["room"]
            return f"You drop the {thing}."
        if verb == "polish" and thing in state["bag"]:
            state["polish"][thing] = state["polish"].get(thing, 0) + 1
            return f"The {thing} shines {'very ' * state['polish'][thing]}well."
        return "Nothing happens." if verb == "wait" else f"The cat is in the {state['cat']}."

    def observation(self) -> str:
        state = self.current()
        here = [item for item in ITEMS if state["where"][item] == state["room"]]
        cat = " A cat purrs." if state["cat"] == state["room"] else ""
        carried = f" You carry {', '.join(state['bag'])}." if state["bag"] else ""
        return f"{state['message']} {state['room'].title()}: {', '.join(here) or 'nothing'}.{cat}{carried}"

    def info(self) -> dict[str, Any]:
        state = self.current()
        return {
            "admissible_commands": self.admissible(),
            "success": state["done"],
            "task_id": " to ".join(state["goal"]),
            "bag": tuple(state["bag"]),
        }

    def admissible(self) -> list[str]:
        state = self.current()
        commands = [f"go {room}" for room in ROOMS[state["room"]]]
        commands += [f"take {item}" for item in ITEMS if state["where"][item] == state["room"]]
        commands += [f"{verb} {item}" for item in state["bag"] for verb in ("drop", "polish")]
        return [*commands, "look", "wait"]

    def render(self) -> str:
        return self.observation()

    def current(self) -> State:
        if self.state is None:
            raise ResetNeeded("the quest has not begun: call reset() first")
        return self.state

    # The protocol.

    def snapshot(self) -> Any:
        self.current()
        return self.handle(self.header(), self.capture())

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        content = self.opened(snap)
        if seed is not None:
            seeding.np_random(seed)  # refuses what is no seed, before anything changes
        self.apply(content)
        if seed is not None:
            streams.seeded(self, seed)
        return self.observation(), self.info()

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found k={k}")
        snap = self.snapshot()
        children: list[Self] = []
        for index in range(k):
            child = type(self)(self.turns, self.render_mode)
            child.spec = self.spec
            child.restore(snap, seed=streams.sibling(seed, index))
            children.append(child)
        return children

    def header(self) -> dict[str, Any]:
        return {"env": type(self).__name__, "version": VERSION, "turns": self.turns}

    def capture(self) -> str:
        return json.dumps({"state": self.state, "streams": streams.captured(self)})

    def opened(self, snap: Any) -> dict[str, Any]:
        """The content of a handle that fits, read before anything is changed."""
        if not isinstance(snap, Handle):
            raise TypeError(f"expected a snapshot of a quest, found {type(snap).__qualname__}")
        content: dict[str, Any] = json.loads(snap.text())
        if snap.header != self.header():
            raise SnapshotMismatch(f"expected a snapshot of {self.header()}, found {snap.header}")
        return content

    def apply(self, content: dict[str, Any]) -> None:
        self.state = content["state"]
        streams.put(self, content["streams"])


# Streams.


@mutant("the seed that np_random_seed reports is lost", "restore.random_streams", "fork.unseeded_exact")
class ReportedSeedLost(Quest):
    """The generators are restored; the seed stays that of the environment that they are restored in."""

    def apply(self, content: dict[str, Any]) -> None:
        own = self._np_random_seed
        super().apply(content)
        self._np_random_seed = own


# Handles.


@mutant("a released handle is accepted", "durable.released")
class ReleasedAccepted(Quest):
    """Releasing a handle does nothing."""

    class handle(Handle):
        def release(self) -> None:
            self.let_go = True


@mutant("a released handle crashes", "durable.released")
class ReleasedCrashes(Quest):
    """Using a released handle raises whatever JSON makes of None."""

    class handle(Handle):
        def text(self) -> str:
            return self.content  # type: ignore[return-value]


@mutant("corrupt bytes are accepted", "durable.corrupt")
class CorruptAccepted(Quest):
    """The checksum is not compared."""

    class handle(Handle):
        @classmethod
        def load(cls, path: Any) -> Self:
            try:
                whole = json.loads(Path(path).read_bytes())
                return cls(whole["header"], whole["content"])
            except (ValueError, KeyError, TypeError) as error:
                raise SnapshotCorrupt(f"expected a snapshot of a quest, found {error!r}") from error


@mutant("corrupt bytes crash", "durable.corrupt")
class CorruptCrashes(Quest):
    """Loading that lets errors of its parser through, such as ``JSONDecodeError`` for a file that is not JSON."""

    class handle(Handle):
        @classmethod
        def load(cls, path: Any) -> Self:
            whole = json.loads(Path(path).read_bytes())
            found = whole.pop("sha256")
            assert whole["magic"] == MAGIC and found == _checksum(whole)
            return cls(whole["header"], whole["content"])


@mutant("loading runs code", "durable.corrupt")
class PickledHandle(Quest):
    """Saves with pickle: right on what it wrote itself, and an open door for what others wrote."""

    class handle(Handle):
        def save(self, path: Any) -> None:
            whole = {"magic": MAGIC, "header": self.header, "content": self.text()}
            Path(path).write_bytes(pickle.dumps({**whole, "sha256": _checksum(whole)}))

        @classmethod
        def load(cls, path: Any) -> Self:
            try:
                whole = pickle.loads(Path(path).read_bytes())
                found = whole.pop("sha256")
                if whole["magic"] != MAGIC or found != _checksum(whole):
                    raise ValueError("the checksum differs")
                return cls(whole["header"], whole["content"])
            except Exception as error:
                raise SnapshotCorrupt(f"expected an intact snapshot of a quest, found {error!r}") from error


@mutant("another process restores it differently", "durable.cross_process")
class HashSeed(Quest):
    """The cat's mood comes from ``hash`` of a string, which each interpreter salts anew."""

    def observation(self) -> str:
        state = self.current()
        mood = ("sleepy", "hungry", "cross")[hash(state["cat"]) % 3]
        return f"{super().observation()} The cat is {mood}."


_interned: dict[str, str] = {}


@mutant("a part stays in the process that saved", "durable.cross_process")
class PartStays(Quest):
    """Polished things kept in a table of the module; a saved handle has only the key of their entry."""

    def capture(self) -> str:
        content = json.loads(super().capture())
        text = json.dumps(content["state"]["polish"])
        key = hashlib.sha256(text.encode()).hexdigest()
        _interned[key] = text
        content["state"]["polish"] = key
        return json.dumps(content)

    def apply(self, content: dict[str, Any]) -> None:
        content["state"]["polish"] = json.loads(_interned.get(content["state"]["polish"], "{}"))
        super().apply(content)


_saved: dict[str, str] = {}


@mutant("declared to cross processes, and doesn't", "durable.cross_process")
class OneProcessOnly(Quest):
    """The file holds the name of an entry in a table of this process."""

    class handle(Handle):
        def save(self, path: Any) -> None:
            _saved[self.id] = self.text()
            whole = {"magic": MAGIC, "header": self.header, "content": self.id}
            Path(path).write_text(json.dumps({**whole, "sha256": _checksum(whole)}), encoding="utf-8")

        @classmethod
        def load(cls, path: Any) -> Self:
            loaded = super().load(path)
            if loaded.content not in _saved:
                raise SnapshotCorrupt("no such snapshot in this process")
            return cls(loaded.header, _saved[loaded.content])


@mutant("saving loses a part", "durable.round_trip", "durable.cross_process")
class SavedInPart(Quest):
    """The file lacks what was polished and the order of the bag."""

    class handle(Handle):
        def save(self, path: Any) -> None:
            content = json.loads(self.text())
            content["state"]["polish"] = {}
            content["state"]["bag"].sort()
            Handle(self.header, json.dumps(content)).save(path)


@mutant("a snapshot of another configuration is accepted by a third party", "durable.mismatch")
class HeaderIgnored(Quest):
    """Looks at the handle's type only: the limit of turns stays that of the environment that restores."""

    def opened(self, snap: Any) -> dict[str, Any]:
        if not isinstance(snap, Handle):
            raise TypeError(f"expected a snapshot of a quest, found {type(snap).__qualname__}")
        content: dict[str, Any] = json.loads(snap.text())
        return content


@mutant("refused after it was applied", "durable.mismatch")
class RefusedTooLate(Quest):
    """Compares the header after the state was taken over."""

    def opened(self, snap: Any) -> dict[str, Any]:
        if not isinstance(snap, Handle):
            raise TypeError(f"expected a snapshot of a quest, found {type(snap).__qualname__}")
        content: dict[str, Any] = json.loads(snap.text())
        if snap.header != self.header():
            self.apply(content)
            raise SnapshotMismatch(f"expected a snapshot of {self.header()}, found {snap.header}")
        return content


# Text.


@mutant("an order is lost", "restore.trace_equality")
class BagOrderLost(Quest):
    """The bag comes back sorted, which shows with two things in it."""

    def apply(self, content: dict[str, Any]) -> None:
        content["state"]["bag"].sort()
        super().apply(content)


@mutant("the admissible commands are stale", "freshness.last_info", "freshness.observation")
class StaleCommands(Quest):
    """``restore`` returns info with the commands of the room that it left."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        stale = None if self.state is None else self.admissible()
        observation, info = super().restore(snap, seed=seed)
        return observation, (info if stale is None else {**info, "admissible_commands": stale})


@mutant("the message is lost", "freshness.observation")
class MessageLost(Quest):
    """``restore`` describes the room but not what the last action had said."""

    def apply(self, content: dict[str, Any]) -> None:
        content["state"]["message"] = "You wake up."
        super().apply(content)


@mutant("sixteen bits of the stream are lost", "restore.trace_equality", "stochastic.coupled", "restore.many")
class StreamRounded(Quest):
    """The stream's state goes through a float on its way into JSON."""

    def capture(self) -> str:
        content = json.loads(super().capture())
        position = content["streams"]["generators"][0][0]["state"]
        position["state"] = int(float(position["state"])) % 2**128
        return json.dumps(content)


# Threads and what stays behind.


@mutant("forks in threads mix", "concurrency.fork_in_threads")
class ForksRace(Quest):
    """The content goes to the children through an attribute of the class."""

    passing: ClassVar[Any] = None

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found k={k}")
        ForksRace.passing = self.snapshot()
        time.sleep(0.001)
        children = [type(self)(self.turns, self.render_mode) for _ in range(k)]
        for index, child in enumerate(children):
            child.restore(ForksRace.passing, seed=streams.sibling(seed, index))
        return children


_scratch: list[str] = []


@mutant("a snapshot mixes with a sibling's step", "concurrency.snapshot_while_stepping", "concurrency.fork_in_threads")
class SnapshotRaces(Quest):
    """The state passes through a list of the module that steps use too."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        _scratch[:] = [json.dumps(self.state)]
        return result

    def capture(self) -> str:
        content = json.loads(super().capture())
        _scratch[:] = [json.dumps(self.state)]
        time.sleep(0.001)
        content["state"] = json.loads(_scratch[-1])
        return json.dumps(content)


@mutant("a thread leaks per fork", "resources.baseline")
class ThreadLeak(Quest):
    """Every fork starts a thread that waits for ever."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().fork(k, seed=seed)
