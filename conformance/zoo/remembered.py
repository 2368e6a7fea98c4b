"""Values cached under the wrong key, or tied to a source that continues: other actions and live sources reveal them.

The control's own actions after a restore get the right answers from all of these. Corridors and quests, each with one
method changed; `Marsh` is an environment whose ends and events random actions rarely reach.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import json
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import spaces

from sandboxgym import SnapshotEnv
from zoo.corridor import Corridor, State
from zoo.dice import Entropy
from zoo.mutant import good, mutant
from zoo.quest import MAGIC, Handle, Quest, _checksum

Output = tuple[Any, dict[str, Any]]


# Remembered by depth, in one environment.


class Forgetful(Corridor):
    """Corridor that forgets at a reset whatever it remembers."""

    kept: dict[Any, Any]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.kept = {}
        return super().reset(seed=seed, options=options)

    def _apply(self, state: State) -> None:
        self.kept = getattr(self, "kept", {})
        super()._apply(state)


@mutant("a reward is remembered by the number of steps and the action", "restore.diverge")
class RewardByStepAndAction(Forgetful):
    """Another way to the same step, and the same action there, gets what the first one got."""

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        reward = self.kept.setdefault((self.state["clock"], int(action)), reward)
        return observation, reward, terminated, truncated, info


@mutant("an entry of info is remembered by the number of steps", "restore.diverge")
class InfoByStep(Forgetful):
    """The purse in ``info`` is the one that some branch had at that step first."""

    def info(self) -> dict[str, Any]:
        info = super().info()
        return {**info, "purse": self.kept.setdefault(info["clock"], info["purse"])}


@mutant("pictures are remembered by the number of steps", "restore.diverge")
class PictureByStep(Forgetful):
    """Right after a restore, and along the control's own actions, they are right."""

    def render(self) -> str:
        return str(self.kept.setdefault(self.state["clock"], super().render()))


@mutant("snapshots are remembered by the number of steps", "restore.diverge")
class SnapshotByStep(Forgetful):
    """The second branch's snapshot at some depth is the first one's."""

    def _capture(self) -> State:
        kept: State = self.kept.setdefault(self.state["clock"], copy.deepcopy(self.state))
        return kept


@mutant("a state of the same step is taken for the same state", "restore.diverge")
class SameStepSamePurse(Corridor):
    """A restore to the step that the environment is at leaves the purse as it is."""

    def _apply(self, state: State) -> None:
        same = self._was_reset and self.state["clock"] == state["clock"] and self.state["goal"] == state["goal"]
        super()._apply({**state, "purse": self.state["purse"]} if same else state)


@mutant("admissible commands are those of another branch", "restore.diverge")
class CommandsByTurn(Quest):
    """The list is made once for each turn."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.kept: dict[int, list[str]] = {}
        return super().reset(seed=seed, options=options)

    def admissible(self) -> list[str]:
        self.kept = getattr(self, "kept", {})
        return list(self.kept.setdefault(self.current()["turn"], super().admissible()))


@mutant("a memo of the class answers for all branches", "restore.diverge", "isolation.caches")
class MemoOfTheClass(Corridor):
    """Rewards by goal, step and action, for all environments of a process."""

    kept: ClassVar[dict[Any, float]] = {}

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        key = (self.state["goal"], self.state["clock"], int(action))
        return observation, self.kept.setdefault(key, reward), terminated, truncated, info


@mutant("children share what they remember", "fork.diverge")
class SiblingsRemember(Forgetful):
    """The memo of rewards by step and action is one for a source and all its children; a restore empties it."""

    def _apply(self, state: State) -> None:
        self.kept = {}
        super()._apply(state)

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        reward = self.kept.setdefault((self.state["clock"], int(action)), reward)
        return observation, reward, terminated, truncated, info

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.kept = self.kept
        return children


# Sources that live, and savers that have gone.

_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Traced(Corridor):
    """The state says by which environment, and in which of its episodes, it was captured."""

    episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.episode += 1
        _alive[id(self)] = self
        return super().reset(seed=seed, options=options)

    def _capture(self) -> State:
        return {**self.state, "origin": (id(self), self.episode)}

    def source(self, origin: tuple[int, int]) -> Any:
        """The environment that captured it, if that is another one and still in the same episode."""
        found = _alive.get(origin[0])
        return found if found is not None and found is not self and found.episode == origin[1] else None


@mutant("a restore reads what its source has now", "restore.live_source")
class ReadsLiveSource(Traced):
    """The coins come from the source, by its address, as long as that plays the same episode."""

    def _apply(self, state: State) -> None:
        source = self.source(state.pop("origin"))
        super()._apply(state if source is None else {**state, "coins": copy.deepcopy(source.state["coins"])})


@mutant("what was restored moves with its source", "restore.live_source")
class SharesWithLiveSource(Traced):
    """Where the source still has as many visits as were captured, its array is taken and not copied."""

    def _apply(self, state: State) -> None:
        source = self.source(state.pop("origin"))
        super()._apply(state)
        if source is not None and len(source.state["visits"]) == len(state["visits"]):
            source.state["visits"][:] = np.maximum(source.state["visits"], state["visits"])
            self.state["visits"] = state["visits"].copy()
            source.state["visits"] = self.state["visits"]


@mutant("what was restored in another process follows its source", "restore.live_source")
class FollowsAcross(Corridor):
    """Where the source moves on in its process, it takes the step that was meant here, too."""

    followed: tuple[int, Path, str] | None = None

    @property
    def place(self) -> Path:
        return Path(tempfile.gettempdir(), f"corridor-{os.getuid()}-{os.getpid()}-{id(self)}")

    def _capture(self) -> State:
        return {**self.state, "origin": (os.getpid(), str(self.place))}

    def _apply(self, state: State) -> None:
        owner, place = state.pop("origin")
        self.followed = None
        if owner != os.getpid() and Path(place).exists():
            self.followed = owner, Path(place), Path(place).read_text()
        super()._apply(state)

    def step(self, action: int) -> Any:
        result = super().step(action)
        self.place.write_text(f"{self.state['clock']}")
        if self.followed is not None and (now := self.followed[1].read_text()) != self.followed[2]:
            self.followed = (*self.followed[:2], now)
            return super().step(action)
        return result


class FileElsewhere(Handle):
    """A saved file holds the path of a second one."""

    @classmethod
    def folder(cls) -> Path:
        raise NotImplementedError

    def save(self, path: Any) -> None:
        kept = self.folder() / f"{self.id}.json"
        kept.write_text(self.text())
        whole = {"magic": MAGIC, "header": self.header, "content": str(kept)}
        Path(path).write_text(json.dumps({**whole, "sha256": _checksum(whole)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Any) -> Self:
        loaded = super().load(path)
        loaded.content = Path(str(loaded.content)).read_text()
        return loaded


class CacheOfProcess(FileElsewhere):
    """In a folder that is removed when the process ends."""

    place: ClassVar[Any] = None

    @classmethod
    def folder(cls) -> Path:
        if CacheOfProcess.place is None:
            CacheOfProcess.place = tempfile.TemporaryDirectory()
            atexit.register(CacheOfProcess.place.cleanup)
        return Path(CacheOfProcess.place.name)


@mutant("a saved file needs the process that saved it", "durable.saver_gone")
class CacheGoesWithSaver(Quest):
    """Its content is in a cache that the process deletes when it ends."""

    handle = CacheOfProcess


class NamedContent(Handle):
    """A saved file holds the name of its content, which is found by whoever has seen it, or from its living owner."""

    seen: ClassVar[dict[str, str]] = {}

    def __init__(self, header: dict[str, Any], content: str) -> None:
        super().__init__(header, content)
        NamedContent.seen[_checksum({"text": content})] = content

    @staticmethod
    def folder(owner: int) -> Path:
        return Path(tempfile.gettempdir(), f"quest-{os.getuid()}-{owner}")

    def save(self, path: Any) -> None:
        name, owner = _checksum({"text": self.text()}), os.getpid()
        self.folder(owner).mkdir(exist_ok=True)
        (self.folder(owner) / name).write_text(self.text())
        whole = {"magic": MAGIC, "header": self.header, "content": f"{owner} {name}"}
        Path(path).write_text(json.dumps({**whole, "sha256": _checksum(whole)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Any) -> Self:
        loaded = super().load(path)
        owner, name = str(loaded.content).split()
        if name not in cls.seen:
            os.kill(int(owner), 0)  # what it kept goes with it
        loaded.content = cls.seen.get(name) or (cls.folder(int(owner)) / name).read_text()
        return loaded


@mutant("a saved file is understood by who was there", "durable.saver_gone")
class KnownContent(Quest):
    """A file is of use to processes that were in that state themselves, and while the one that saved it lives."""

    handle = NamedContent

    def reset(self, **options: Any) -> Any:
        result = super().reset(**options)
        self.snapshot()
        return result

    def step(self, action: str) -> Any:
        result = super().step(action)
        self.snapshot()
        return result


class CacheOfMachine(FileElsewhere):
    """In the folder for temporary files."""

    @classmethod
    def folder(cls) -> Path:
        place = Path(tempfile.gettempdir(), f"quest-{os.getuid()}")
        place.mkdir(exist_ok=True)
        return place


@mutant("a saved file needs what others tidy away", "durable.saver_gone")
class CacheInTemporaryFolder(Quest):
    """Its content is in the folder for temporary files, although other hosts are declared."""

    handle = CacheOfMachine


# Ends and events that random actions hardly reach.


@good()
class Marsh(SnapshotEnv[Any, int]):
    """Deterministic; ends after some five random steps, and is cut off after forty, which only careful steps reach."""

    metadata = {"render_modes": []}
    limit = 40
    sinks = 3

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(0, 1000, (4,), np.int64)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.state: State = {
            "cell": int(self.np_random.integers(9)),
            "depth": 0,
            "clock": 0,
            "flowers": 0,
            "cut": False,
        }
        return self.observation(), self.info()

    def step(self, action: int) -> Any:
        state = self.state
        firm = (7 * state["cell"] + state["clock"]) % 3
        state["clock"] += 1
        state["depth"] = max(0, state["depth"] - 1) if int(action) == firm else state["depth"] + 1
        state["cell"] = (state["cell"] + int(action)) % 9
        if state["clock"] >= 20 and state["depth"] == 0 and state["cell"] == 4:
            state["flowers"] += 1
        drowned = state["depth"] >= self.sinks
        state["cut"] = not drowned and state["clock"] >= self.limit
        return self.observation(), float(state["flowers"]), drowned, state["cut"], self.info()

    def observation(self) -> Any:
        return np.array([self.state[name] for name in ("cell", "depth", "clock", "flowers")])

    def info(self) -> dict[str, Any]:
        return {"flower": True} if self.state["flowers"] else {}

    def _capture(self) -> State:
        return self.state

    def _apply(self, state: State) -> None:
        self.state = state


@mutant("an episode that was cut off is over when it is restored", "restore.after_done", "restore.coverage")
class CutBecomesDrowned(Marsh):
    """A restored truncated episode is terminated instead."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "depth": self.sinks + 1} if state["cut"] else state)


@mutant("the time limit starts again in another environment", "restore.coverage")
class LimitStartsAgain(Marsh):
    """Elapsed steps are counted by the environment, and a restore in another one has none of them."""

    elapsed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.elapsed = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        self.elapsed += 1
        observation, reward, drowned, _, info = super().step(action)
        return observation, reward, drowned, not drowned and self.elapsed >= self.limit, info

    def _capture(self) -> State:
        return {**self.state, "origin": id(self), "elapsed": self.elapsed}

    def _apply(self, state: State) -> None:
        here, elapsed = state.pop("origin") == id(self), state.pop("elapsed")
        self.elapsed = elapsed if here else 0
        super()._apply(state)


@mutant("what happens only late in careful episodes is not captured", "restore.coverage")
class FlowersLost(Marsh):
    """A second flower is forgotten."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "flowers": min(state["flowers"], 1)})


# Promises of the contract.


@mutant("a deep copy shares a list", "fork.deepcopy")
class DeepcopyShares(Corridor):
    """``copy.deepcopy(env)`` has the coins of its source; forks have not."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        if self._was_reset:
            twin.state["coins"] = self.state["coins"]
        return twin


@mutant("a shallow copy is given where an error is promised", "fork.deepcopy")
class ShallowCopyReturns(Corridor):
    """``copy.copy(env)`` gives an environment with the state of its source."""

    def __copy__(self) -> Any:
        twin = self._blank()
        vars(twin).update(vars(self))
        return twin


@mutant("equal states have different digests", "snapshot.digest")
class DigestCounts(Corridor):
    """The number of snapshots taken so far is part of the state."""

    taken = 0

    def _capture(self) -> State:
        self.taken += 1
        return {**self.state, "taken": self.taken}

    def _apply(self, state: State) -> None:
        super()._apply({name: value for name, value in state.items() if name != "taken"})


@mutant("the seventeenth child shares with the first", "fork.crowd")
class SixteenSlots(Corridor):
    """Purses of children are in a table of sixteen."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for number, child in enumerate(children):
            child.state["purse"] = children[number % 16].state["purse"]
        return children


@mutant("a restore to where it takes itself to be is skipped", "restore.no_steps")
class StaysWhereItThinksItIs(Corridor):
    """Steps, and restores of others, clear the thought; a reset does not."""

    at: Any = None

    def step(self, action: int) -> Any:
        self.at = None
        return super().step(action)

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        if seed is None and self.at is snap and not snap.released:
            return self.last.observation, self.last.info
        result = super().restore(snap, seed=seed)
        self.at = snap
        return result


@mutant("a snapshot after a reset and a restore is that of the start", "restore.no_steps")
class StartIsKept(Corridor):
    """First state kept for snapshots of the same task until a step or a fork; a restore does not clear it."""

    start: State | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        result = super().reset(seed=seed, options=options)
        self.start = copy.deepcopy(self.state)
        return result

    def step(self, action: int) -> Any:
        self.start = None
        return super().step(action)

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        self.start = None
        return super().fork(k, seed=seed)

    def _capture(self) -> State:
        kept = self.start is not None and self.start["goal"] == self.state["goal"]
        return self.start if kept and self.start is not None else self.state


class Numbered(Handle):
    """Its number is the lowest that no handle has; ``release`` gives it back."""

    taken: ClassVar[set[int]] = set()

    def __init__(self, header: dict[str, Any], content: str) -> None:
        super().__init__(header, content)
        self.number = next(number for number in itertools.count() if number not in self.taken)
        self.taken.add(self.number)

    def release(self) -> None:
        if self.content is not None:
            self.taken.discard(self.number)
        super().release()


@mutant("a snapshot gets what the released one with its number had", "restore.many", "restore.no_steps")
class NumbersComeAgain(Quest):
    """An environment remembers by their numbers the contents of the handles that it restored."""

    handle = Numbered
    known: dict[int, str]

    def opened(self, snap: Any) -> dict[str, Any]:
        super().opened(snap)
        self.known = getattr(self, "known", {})
        content: dict[str, Any] = json.loads(self.known.setdefault(snap.number, snap.text()))
        return content


class RememberedByPath(Handle):
    """A file is read once."""

    read: ClassVar[dict[str, Handle]] = {}

    @classmethod
    def load(cls, path: Any) -> Self:
        if str(path) not in cls.read:
            cls.read[str(path)] = super().load(path)
        kept = cls.read[str(path)]
        return cls(kept.header, kept.text())


@mutant("a file that is written again is loaded as it was", "durable.round_trip")
class LoadedOnce(Quest):
    """Loading that remembers a path's first contents and returns them for ever."""

    handle = RememberedByPath


@mutant("the streams of the spaces change places", "restore.random_streams")
class SpacesSwapped(Corridor):
    """The action space gets the observation space's."""

    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams(streams)
        mine, theirs = self.action_space, self.observation_space
        mine._np_random, theirs._np_random = theirs._np_random, mine._np_random


@mutant("later children roll higher", "stochastic.siblings_independent")
class LaterChildrenRollHigher(Entropy):
    """All children of a fork but the first reroll a one once."""

    later = False

    def roll(self) -> int:
        rolled = super().roll()
        return super().roll() if self.later and rolled <= 2 else rolled

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children[1:]:
            child.later = True
        return children
