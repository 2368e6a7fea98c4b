"""A deterministic environment with mutable nested state, and faults in such state.

An agent walks a line of cells, takes coins and drops them at the goal; a coin pays one step after it was taken or
dropped. Every mutant is the correct `Corridor` with one method changed.
"""

from __future__ import annotations

import copy
import json
import random
import time
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sandboxgym import SnapshotEnv, SnapshotMismatch
from zoo.mutant import good, mutant

Cells = npt.NDArray[np.int64]
State = dict[str, Any]
Output = tuple[Cells, dict[str, Any]]
LEFT, RIGHT, TAKE, DROP = range(4)


@good()
class Corridor(SnapshotEnv[Cells, int]):
    """Deterministic, with lists, dicts and an array inside its state; renders as text; ends early or after 24 steps."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(self, length: int = 5, render_mode: str | None = "ansi") -> None:
        self.length = length
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 1000, (6,), np.int64)
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        task = (options or {}).get("task")
        goal = int(self.np_random.integers(1, self.length)) if task is None else 1 + int(task) % (self.length - 1)
        self.state: State = {
            "cell": 0,
            "goal": goal,
            "coins": {cell: [1, cell + 1] for cell in range(self.length)},
            "purse": [],
            "log": [],
            "visits": np.zeros(self.length, np.int64),
            "due": 0.0,
            "delivered": 0,
            "clock": 0,
            "done": False,
        }
        return self.observation(), self.info()

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        state = self.state
        if state["done"]:
            return self.observation(), 0.0, True, False, self.info()
        reward, state["due"] = state["due"], 0.0
        self.act(int(action))
        state["clock"] += 1
        state["visits"][state["cell"]] += 1
        state["log"].append((int(action), state["cell"]))
        del state["log"][:-12]  # the cost of a snapshot is declared constant
        state["done"] = state["delivered"] >= 3 or state["clock"] >= 24
        return self.observation(), reward, state["done"], False, self.info()

    def act(self, action: int) -> None:
        state, here = self.state, self.state["coins"][self.state["cell"]]
        if action == LEFT:
            state["cell"] = max(0, state["cell"] - 1)
        elif action == RIGHT:
            state["cell"] = min(self.length - 1, state["cell"] + 1)
        elif action == TAKE and here:
            state["purse"].append(here.pop())
            state["due"] = 0.125 * state["purse"][-1]
        elif action == DROP and state["purse"]:
            coin = state["purse"].pop()
            if state["cell"] == state["goal"]:
                state["delivered"] += 1
                state["due"] = float(coin)
            else:
                here.append(coin)

    def observation(self) -> Cells:
        state = self.state
        here = state["coins"][state["cell"]]
        seen = state["visits"][state["cell"]]
        return np.array([state["cell"], state["goal"], len(state["purse"]), sum(state["purse"]), sum(here), seen])

    def info(self) -> dict[str, Any]:
        state = self.state
        return {
            "log": list(state["log"]),
            "purse": tuple(state["purse"]),
            "clock": state["clock"],
            "success": state["delivered"] >= 3,
            "task_id": state["goal"],
        }

    def render(self) -> str:
        marks = ["." if coins else "_" for coins in self.state["coins"].values()]
        marks[self.state["goal"]] = "G"
        marks[self.state["cell"]] = "A"
        return f"{''.join(marks)} {self.state['clock']}"

    def _capture(self) -> State:
        return self.state

    def _apply(self, state: State) -> None:
        self.state = state


# The state is shared where it should be copied.


@mutant("snapshot by reference", "snapshot.immutable", "restore.many")
class SnapshotByReference(Corridor):
    """Says that its state is never mutated, so the handle is the live state and sees later steps."""

    immutable_state = True


@mutant("shallow copy of a dict", "snapshot.immutable", "restore.many")
class ShallowDict(Corridor):
    """Copies the outer dict only."""

    immutable_state = True

    def _capture(self) -> State:
        return dict(self.state)

    def _apply(self, state: State) -> None:
        self.state = dict(state)


def _copied_but(name: str, state: State) -> State:
    return {**copy.deepcopy({key: value for key, value in state.items() if key != name}), name: state[name]}


@mutant("shallow copy of a list", "snapshot.immutable", "restore.many")
class ShallowList(Corridor):
    """One list of the state is shared between the handle and the live environment."""

    immutable_state = True

    def _capture(self) -> State:
        return _copied_but("purse", self.state)

    def _apply(self, state: State) -> None:
        self.state = _copied_but("purse", state)


@mutant("shallow copy of an array", "snapshot.immutable", "restore.many")
class ShallowArray(Corridor):
    """The array of the state is shared between the handle and the live environment."""

    immutable_state = True

    def _capture(self) -> State:
        return _copied_but("visits", self.state)

    def _apply(self, state: State) -> None:
        self.state = _copied_but("visits", state)


@mutant("the handle becomes the live state", "restore.many", "snapshot.immutable", "restore.idempotent")
class AliasedByRestore(Corridor):
    """Copies when captured but not when restored: steps after the first restore change the handle."""

    immutable_state = True

    def _capture(self) -> State:
        return copy.deepcopy(self.state)


@mutant("forks share a mutable part", "fork.isolation")
class AliasedForks(Corridor):
    """The coins on the floor are one dict in all children of a fork."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children[1:]:
            child.state["coins"] = children[0].state["coins"]
        return children


@mutant("a fork shares a mutable part with its source", "fork.isolation", "fork.source_untouched")
class AliasedSource(Corridor):
    """The purse of the first child is that of the environment it came from."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        children[0].state["purse"] = self.state["purse"]
        return children


# The wrong moment is restored.


@mutant("restore to the step before", "restore.trace_equality")
class RestoreToTMinusOne(Corridor):
    """Captures the state before the last step; the recorded observation is right."""

    before: State | None = None

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        self.before = copy.deepcopy(self.state)
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.before = None
        return super().reset(seed=seed, options=options)

    def _capture(self) -> State:
        return self.before or self.state


@mutant("restore to the step after", "restore.trace_equality")
class RestoreToTPlusOne(Corridor):
    """Every restore lets one unit of time pass."""

    def _apply(self, state: State) -> None:
        self.state = {**state, "clock": state["clock"] + 1}


@mutant("the reward of the last step is lost", "restore.trace_equality")
class PendingRewardLost(Corridor):
    """Corridor whose snapshots leave out the reward due in the next step."""

    def _apply(self, state: State) -> None:
        self.state = {**state, "due": 0.0}


@mutant("the done flag is lost", "restore.after_done")
class DoneLost(Corridor):
    """A finished episode goes on after a restore."""

    def _apply(self, state: State) -> None:
        self.state = {**state, "done": False}


@mutant("the done flag sticks", "restore.after_done")
class DoneSticks(Corridor):
    """Restoring an earlier moment of a finished episode doesn't un-do its end."""

    def _apply(self, state: State) -> None:
        ended = self._was_reset and self.state["done"]
        self.state = {**state, "done": state["done"] or ended}


@mutant("the goal of another task stays", "restore.after_reset", "restore.other_env")
class GoalStays(Corridor):
    """After a reset to another task, a restore brings the old cells but not the old goal."""

    def _apply(self, state: State) -> None:
        goal = self.state["goal"] if self._was_reset else state["goal"]
        self.state = {**state, "goal": goal}


# What restore returns is stale.


@mutant("stale observation", "freshness.observation")
class StaleObservation(Corridor):
    """``restore`` returns what the environment had last seen before it."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        stale = self.last.observation if self._was_reset else None
        observation, info = super().restore(snap, seed=seed)
        return (observation if stale is None else stale), info


@mutant("stale info", "freshness.last_info", "freshness.observation")
class StaleInfo(Corridor):
    """``restore`` returns the info of the moment before it."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        stale = self.last.info if self._was_reset else None
        observation, info = super().restore(snap, seed=seed)
        return observation, (info if stale is None else stale)


@mutant("stale render", "freshness.render")
class StaleRender(Corridor):
    """The frame is drawn when stepping, and a restore doesn't draw."""

    frame: str | None = None

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.frame = super().render()
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        result = super().reset(seed=seed, options=options)
        self.frame = super().render()
        return result

    def render(self) -> str:
        return self.frame or super().render()


@mutant("what is drawn is the environment that moved last", "freshness.render")
class RendersLast(Corridor):
    """One renderer for all environments of the process."""

    moved: Corridor

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        RendersLast.moved = self
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        RendersLast.moved = self
        return super().reset(seed=seed, options=options)

    def _apply(self, state: Any) -> None:
        RendersLast.moved = self
        super()._apply(state)

    def render(self) -> str:
        return Corridor.render(RendersLast.moved)


@mutant("the observation's buffer is reused", "freshness.observation", "snapshot.immutable")
class ReusedBuffer(Corridor):
    """All observations are one array: one that was returned earlier changes with the next step."""

    buffer: Cells | None = None

    def observation(self) -> Cells:
        if self.buffer is None:
            self.buffer = super().observation()
        self.buffer[:] = super().observation()
        return self.buffer


@mutant("the observation's buffer is shared between forks", "fork.isolation", "isolation.class_attributes")
class SharedBuffer(Corridor):
    """The one array that observations are returned in belongs to the class."""

    buffer: ClassVar[Cells] = np.zeros(6, np.int64)

    def observation(self) -> Cells:
        self.buffer[:] = super().observation()
        return self.buffer


@mutant("the info dict is live", "freshness.last_info", "freshness.observation", "snapshot.immutable")
class LiveInfo(Corridor):
    """The log in ``info`` is the live list: an info that was returned earlier grows with every step."""

    def info(self) -> dict[str, Any]:
        return {**super().info(), "log": self.state["log"]}


@mutant("a type changes after a restore", "restore.trace_equality", "freshness.last_info")
class TypeChanges(Corridor):
    """The clock comes back as a float, equal in value."""

    def _apply(self, state: State) -> None:
        self.state = {**state, "clock": float(state["clock"])}


# Taking a snapshot interferes.


@mutant("a snapshot counts as a step", "snapshot.noninterference")
class SnapshotCounts(Corridor):
    """Taking a snapshot moves the clock on after it was captured."""

    def snapshot(self) -> Any:
        snap = super().snapshot()
        self.state["clock"] += 1
        return snap


@mutant("a snapshot resets something that shows later", "snapshot.noninterference")
class SnapshotForgets(Corridor):
    """Taking a snapshot settles what is due, which the next step then doesn't pay."""

    def snapshot(self) -> Any:
        snap = super().snapshot()
        self.state["due"] = 0.0
        return snap


# Restores work sometimes.


@mutant("only the first restore works", "restore.many", "restore.idempotent")
class FirstTimeOnly(Corridor):
    """A second restore of the same handle finds the coins as they are then."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        self.used: set[str] = getattr(self, "used", set())
        self.keep = snap.id in self.used and self._was_reset and dict(self.state["coins"])
        result = super().restore(snap, seed=seed)
        self.used.add(snap.id)
        return result

    def _apply(self, state: State) -> None:
        self.state = {**state, "coins": self.keep} if getattr(self, "keep", None) else state


@mutant("only the newest snapshot restores", "restore.any_order", "restore.nested")
class NewestOnly(Corridor):
    """The visits are kept beside the handles and only once."""

    kept: Cells | None = None

    def snapshot(self) -> Any:
        snap = super().snapshot()
        self.kept = self.state["visits"].copy()
        return snap

    def _apply(self, state: State) -> None:
        self.state = state if self.kept is None else {**state, "visits": self.kept.copy()}


@mutant("restores only in the environment that took it", "restore.other_env")
class SameEnvOnly(Corridor):
    """Part of the state is kept in the instance, by the handle's id; other instances start it anew."""

    def snapshot(self) -> Any:
        snap = super().snapshot()
        self.parts: dict[str, Cells] = getattr(self, "parts", {})
        self.parts[snap.id] = self.state["visits"].copy()
        return snap

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        part = getattr(self, "parts", {}).get(snap.id)
        self.state["visits"] = np.zeros(self.length, np.int64) if part is None else part.copy()
        return result

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.state["visits"] = self.state["visits"].copy()
        return children


@mutant("what a snapshot holds goes with its source", "restore.after_close")
class GoesWithSource(Corridor):
    """Closing the environment that took the snapshots clears the lists that they refer to."""

    immutable_state = True

    def _capture(self) -> State:
        state = copy.deepcopy(self.state)
        self.lent: list[State] = getattr(self, "lent", [])
        self.lent.append(state)
        return state

    def _apply(self, state: State) -> None:
        self.state = copy.deepcopy(state)

    def close(self) -> None:
        for state in getattr(self, "lent", []):
            state["coins"] = {cell: [] for cell in state["coins"]}


@mutant("the number of restores shows", "restore.many")
class CountsRestores(Corridor):
    """From the eighth restore of an environment on, its clock is one ahead."""

    restores = 0

    def _apply(self, state: State) -> None:
        self.restores += 1
        self.state = {**state, "clock": state["clock"] + (self.restores > 7)}


_in_50 = random.Random(50)
_in_200 = random.Random(200)


@mutant("one restore in 50 is wrong", "restore.many")
class OneIn50(Corridor):
    """About one restore in 50 moves the clock."""

    def _apply(self, state: State) -> None:
        self.state = {**state, "clock": state["clock"] + (_in_50.random() < 1 / 50)}


@mutant("one restore in 200 is wrong", "restore.many", budget="full")
class OneIn200(Corridor):
    """About one restore in 200 moves the clock."""

    def _apply(self, state: State) -> None:
        self.state = {**state, "clock": state["clock"] + (_in_200.random() < 1 / 200)}


@mutant("the future depends on the time of day", "restore.trace_equality", "restore.many")
class WallClock(Corridor):
    """A bell rings in ``info`` 3 milliseconds after the reset, which a snapshot keeps as a time of day."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.bell = time.monotonic() + 0.003
        return super().reset(seed=seed, options=options)

    def info(self) -> dict[str, Any]:
        return {**super().info(), "bell": time.monotonic() > self.bell}

    def _capture(self) -> State:
        return {**self.state, "bell": self.bell}

    def _apply(self, state: State) -> None:
        self.state = state
        self.bell = self.state.pop("bell")


# Forks are not alone.


@mutant("forks share a class attribute", "isolation.class_attributes", "fork.isolation")
class SharedClassAttribute(Corridor):
    """Count of delivered coins kept in the class; captured and restored well for one environment at a time."""

    total: ClassVar[int] = 0

    def act(self, action: int) -> None:
        self.state["delivered"] = SharedClassAttribute.total
        super().act(action)
        SharedClassAttribute.total = self.state["delivered"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        SharedClassAttribute.total = 0
        return super().reset(seed=seed, options=options)

    def _apply(self, state: State) -> None:
        self.state = state
        SharedClassAttribute.total = state["delivered"]


_due: list[float] = [0.0]


@mutant("forks share a module's global", "isolation.globals", "fork.isolation")
class SharedGlobal(Corridor):
    """Due reward kept in a variable of the module; captured and restored well for one environment at a time."""

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        self.state["due"] = _due[0]
        result = super().step(action)
        _due[0] = self.state["due"]
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        _due[0] = 0.0
        return super().reset(seed=seed, options=options)

    def _apply(self, state: State) -> None:
        self.state = state
        _due[0] = state["due"]


@mutant("siblings share a cache", "isolation.caches", "fork.isolation")
class SharedCache(Corridor):
    """A sibling gets the reward that the first one earned at that step: the cache's key lacks the actions."""

    def __init__(self, length: int = 5, render_mode: str | None = "ansi") -> None:
        super().__init__(length, render_mode)
        self.cache: dict[int, float] = {}

    def step(self, action: int) -> tuple[Cells, float, bool, bool, dict[str, Any]]:
        clock = self.state["clock"]
        observation, reward, terminated, truncated, info = super().step(action)
        if not self.state["done"]:
            reward = self.cache.setdefault(clock, reward)
        return observation, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.cache.clear()
        return super().reset(seed=seed, options=options)

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        self.cache = {}
        return super().restore(snap, seed=seed)

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.cache = children[0].cache
        return children


@mutant("fork with no children is accepted", "fork.invalid")
class ForksNothing(Corridor):
    """``fork(0)`` returns an empty list, and ``fork(-1)`` too."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        return super().fork(k, seed=seed) if k > 0 else []


@mutant("a fork shares its source's spaces", "isolation.spaces", "fork.isolation")
class SharedSpaces(Corridor):
    """A child samples from its source's action space, hence from its random stream."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.action_space = self.action_space
        return children


# Random streams of a deterministic environment.


@mutant("the spaces' random streams are lost", "restore.random_streams", "fork.unseeded_exact")
class SpacesDropped(Corridor):
    """``action_space.sample()`` goes on where it was instead of where the snapshot was taken."""

    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams({**streams, "spaces": self._streams()["spaces"]})


# Errors.


@mutant("a snapshot before the first reset is accepted", "api.snapshot_before_reset")
class SnapshotBeforeReset(Corridor):
    """Captures a default state instead of raising ``ResetNeeded``."""

    def snapshot(self) -> Any:
        if not self._was_reset:
            self.reset(seed=0)
        return super().snapshot()


@mutant("any object is accepted as a handle", "api.wrong_handle")
class AnyHandle(Corridor):
    """Restore that takes an object that is no snapshot for the present state."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        if not hasattr(snap, "layers"):
            return self.last.observation, self.last.info
        return super().restore(snap, seed=seed)


@mutant("half a restore on a mismatch", "durable.mismatch")
class HalfRestored(Corridor):
    """Refuses a snapshot of another configuration after it has taken over its cell and clock."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        try:
            return super().restore(snap, seed=seed)
        except SnapshotMismatch:
            if self._was_reset:
                self.state["clock"] += 1
            raise


@mutant("a snapshot of another configuration is accepted", "durable.mismatch")
class MismatchAccepted(Corridor):
    """Compares no constructor arguments."""

    def _config(self) -> dict[str, Any]:
        return {}


@mutant("a saved tuple comes back as a list", "durable.round_trip", "durable.cross_process")
class TupleBecomesList(Corridor):
    """The state is saved as JSON, and the log's entries come back as lists."""

    @classmethod
    def _encode(cls, state: Any) -> bytes:
        plain = {**state, "visits": state["visits"].tolist(), "coins": list(state["coins"].items())}
        return json.dumps(plain).encode()

    @classmethod
    def _decode(cls, data: bytes) -> Any:
        state = json.loads(data)
        return {**state, "visits": np.array(state["visits"], np.int64), "coins": dict(state["coins"])}
