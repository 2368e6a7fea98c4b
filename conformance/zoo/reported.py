"""Faults that were reported to wrappers, buffers and random streams of real projects, in small environments.

A mutant names the report that it follows, and has the same fault in a few lines written for this package.
"""

from __future__ import annotations

import copy
import time
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sandboxgym import SnapshotWrapper, WrapperCodec, register_wrapper
from zoo.corridor import DROP, TAKE, Corridor
from zoo.dice import Dice
from zoo.game import Output, State
from zoo.known_good import Sensors
from zoo.mutant import good, mutant

# Wrappers, buffers and what instances share.


class Stacked(gym.Wrapper[Any, Any, Any, Any]):
    """The last two observations."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        inner = env.observation_space
        self.observation_space = spaces.Box(0, 1000, (2, *inner.shape), inner.dtype)
        self.frames = np.zeros((2, *inner.shape), inner.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        observation, info = self.env.reset(seed=seed, options=options)
        self.frames[:] = observation
        return self.given(), info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.frames[:-1], self.frames[-1] = self.frames[1:].copy(), observation
        return self.given(), reward, terminated, truncated, info

    def given(self) -> Any:
        return self.frames.copy()


class KeptStacked(Stacked):
    """Taught rightly."""


class GivesItsOwn(Stacked):
    """Gives its own array away."""

    def given(self) -> Any:
        return self.frames


class Frozen(Stacked):
    """Not taught at all what it holds."""

    def step(self, action: Any) -> Any:
        if getattr(self, "frozen", False):
            _, *rest = self.env.step(action)
            return self.given(), *rest
        return super().step(action)


register_wrapper(KeptStacked, WrapperCodec(("frames",), remember=True))
register_wrapper(GivesItsOwn, WrapperCodec(("frames",), remember=True))
register_wrapper(Frozen, WrapperCodec((), remember=True))


@good()
def stacked_frames() -> Any:
    """A stack of frames that was taught rightly."""
    return SnapshotWrapper(KeptStacked(Corridor()))


@mutant(
    "a stack of frames gives its own array away",
    "freshness.observation",
    "restore.trace_equality",
    "snapshot.immutable",
    follows="kengz/SLM-Lab#313",
)
def stack_is_given() -> Any:
    """An observation is written to by the next step."""
    return SnapshotWrapper(GivesItsOwn(Corridor()))


@mutant(
    "stacked frames are not those of the restored episode",
    "wrappers.stack",
    "restore.trace_equality",
    follows="thu-ml/tianshou#1272",
)
def stack_stays() -> Any:
    """The stack has the frames that it had before."""
    return SnapshotWrapper(Frozen(Corridor()))


@mutant("arrays inside an observation are overwritten", "freshness.observation", follows="thu-ml/tianshou#1281")
class NestedViews(Sensors):
    """The array in the dict is the environment's own, the dict is new."""

    def observation(self) -> dict[str, Any]:
        return {**super().observation(), "field": self.field}


@mutant(
    "the last observation of an episode is overwritten by a reset",
    "freshness.observation",
    "freshness.last_info",
    follows="Farama-Foundation/Gymnasium#1132",
)
class FinalIsOverwritten(Corridor):
    """One dict of info for all calls: the last one of an episode has the next one's values."""

    def info(self) -> dict[str, Any]:
        if not hasattr(self, "shared"):
            self.shared: dict[str, Any] = {}
        self.shared.update(super().info())
        return self.shared


@mutant(
    "the limit of steps counts those of all branches",
    "restore.many",
    "restore.trace_equality",
    "resources.baseline",
    follows="openai/gym#1638",
)
class LimitCountsAll(Corridor):
    """A counter of steps goes on through restores; only a reset sets it to zero."""

    taken = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.taken = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.taken += 1
        return observation, reward, terminated, truncated or self.taken >= 48, info


@mutant(
    "a step after a restore takes the steps of the abandoned branch too",
    "restore.trace_equality",
    "restore.diverge",
    follows="stanfordnmbl/osim-rl#131",
)
class AbandonedStepsAgain(Corridor):
    """The engine still has the actions since the last restore in its queue, and acts on them first."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.since: list[int] = []
        self.queue: list[int] = []
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        while self.queue:
            self.act(self.queue.pop(0))
        self.since.append(int(action))
        return super().step(action)

    def _apply(self, state: State) -> None:
        self.queue, self.since = (self.since, []) if self._was_reset else ([], [])
        super()._apply(state)


@mutant(
    "why the last action was refused is not restored",
    "freshness.render",
    "restore.trace_equality",
    follows="wingedsheep/argentum-engine#2205",
)
class RefusalStays(Corridor):
    """A refusal in an abandoned branch is shown after a restore."""

    refused = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.refused = ""
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        can = {TAKE: self.state["coins"][self.state["cell"]], DROP: self.state["purse"]}
        self.refused = "" if can.get(int(action), True) else f"nothing to {'take' if action == TAKE else 'drop'}"
        return super().step(action)

    def render(self) -> str:
        return f"{super().render()} {self.refused}"


@mutant("copies share one history", "fork.isolation", "fork.trace_equality", follows="Rochester-NRT/RocAlphaGo#124")
class HistoryShared(Corridor):
    """Children write into the log of the environment that they come from."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.state["log"] = self.state["log"]
        return children


class Sparse(Corridor):
    """Pays for deliveries alone where it is told to, and copies forget that."""

    def __init__(self, length: int = 5, render_mode: str | None = "ansi", dense: bool = True) -> None:
        super().__init__(length, render_mode)
        self.dense = dense

    def step(self, action: int) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward if self.dense or reward >= 1 else 0.0, *rest

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        twin.dense = True
        return twin


@mutant("a deep copy has the default arguments", "fork.deepcopy", follows="Farama-Foundation/D4RL#208")
def deepcopy_pays_more() -> Any:
    """Rewards of a copy are those of an environment made without arguments."""
    return Sparse(dense=False)


_ROBOT: dict[str, int] = {}


@mutant(
    "a default argument is shared by all instances",
    "fork.isolation",
    "isolation.globals",
    follows="benelot/pybullet-gym#61",
)
class DefaultRobot(Corridor):
    """The robot that instances get by default is one object."""

    def __init__(self, length: int = 5, render_mode: str | None = "ansi", robot: dict[str, int] = _ROBOT) -> None:
        super().__init__(length, render_mode)
        self.robot = robot

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.robot["pose"] = self.robot.get("pose", 0) + int(action)
        return observation, reward + self.robot["pose"] % 3, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.robot["pose"] = 0
        return super().reset(seed=seed, options=options)

    def _capture(self) -> State:
        return {**self.state, "pose": self.robot["pose"]}

    def _apply(self, state: State) -> None:
        self.robot["pose"] = state.pop("pose")
        super()._apply(state)


@mutant(
    "instances share what they log",
    "fork.isolation",
    "isolation.class_attributes",
    follows="Kaggle/kaggle-environments#156",
)
class LogsShared(Corridor):
    """The log in `info` is one list for all environments that are made in a process, and cut to a length."""

    logs: ClassVar[list[int]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        del self.logs[:]
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        self.logs.append(int(action))
        return super().step(action)

    def info(self) -> dict[str, Any]:
        return {**super().info(), "logs": tuple(self.logs)}

    def _capture(self) -> State:
        return {**self.state, "logs": list(self.logs)}

    def _apply(self, state: State) -> None:
        self.logs[:] = state.pop("logs")
        super()._apply(state)


@mutant(
    "an instance changes a dict of its class",
    "isolation.class_attributes",
    "fork.isolation",
    follows="learnsyslab/safe-control-gym#202",
)
class ClassDictChanged(Corridor):
    """Ranges of a class are edited by the instance that is restored."""

    ranges: ClassVar[dict[str, int]] = {"payment": 1}

    def _apply(self, state: State) -> None:
        self.ranges["payment"] = 1 + state["clock"] % 2
        super()._apply(state)

    def step(self, action: int) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward * self.ranges["payment"], *rest


@mutant("info holds itself, and everything with it", "resources.baseline", follows="mani-skill/ManiSkill#320")
class InfoHoldsItself(Corridor):
    """Every restore keeps the last info, with an array, in a list."""

    kept: ClassVar[list[Any]] = []

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        observation, info = super().restore(snap, seed=seed)
        self.kept.append({**info, "final": np.ones(1 << 13)})
        return observation, info


@mutant(
    "two histories that look alike are taken for one",
    "restore.diverge",
    "restore.trace_equality",
    follows="google-deepmind/open_spiel#449",
)
class HistoriesByText(Corridor):
    """States are kept by what is printed of them: a later one with the same text gets the first one's coins."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.nodes: dict[str, Any] = {}
        return super().reset(seed=seed, options=options)

    def _capture(self) -> State:
        coins = self.nodes.setdefault(self.render(), copy.deepcopy(self.state["coins"]))
        return {**self.state, "coins": coins}

    def _apply(self, state: State) -> None:
        self.nodes = getattr(self, "nodes", {})
        super()._apply(state)


# Streams and seeds.


@mutant(
    "a reset takes a seed and does not use it",
    "restore.trace_equality",
    "isolation.globals",
    follows="MaximilianB2/pc-gym#44",
)
class SeedNotUsed(Dice):
    """Noise comes from NumPy's global stream."""

    def roll(self) -> int:
        return int(np.random.randint(1, 7))


@mutant(
    "a sampler's own generator is not seeded",
    "streams.seeded",
    "restore.seeded",
    "fork.seeded_independent",
    follows="TorchTrade/torchtrade#173",
)
class SamplerNotSeeded(Dice):
    """A restore with a seed leaves the sampler's generator as it was captured."""

    def begin(self) -> None:
        self.sampler = np.random.default_rng(int(self.np_random.integers(1 << 31)))

    def roll(self) -> int:
        return int(self.sampler.integers(1, 7))

    def _capture(self) -> Any:
        return [super()._capture(), self.sampler.bit_generator.state]

    def _apply(self, state: Any) -> None:
        super()._apply(state[0])
        self.sampler = np.random.default_rng(0)
        self.sampler.bit_generator.state = state[1]


@mutant(
    "noise goes on where it is, whatever is restored",
    "restore.trace_equality",
    "streams.exact",
    follows="f1tenth/f1tenth_gym#21",
)
class ScanNoiseGoesOn(Dice):
    """The generator of the noise is made with the environment and never touched again."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.noise = np.random.default_rng(12345)

    def roll(self) -> int:
        return 1 + (super().roll() + int(self.noise.integers(6))) % 6


@mutant(
    "a restore takes a seed and keeps the captured stream",
    "restore.seeded",
    "fork.seeded_independent",
    follows="ggml-org/llama.cpp#1182",
)
class SeedHasNoEffect(Dice):
    """Restore that ignores the seed it is given and keeps the captured stream."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        return super().restore(snap)


@mutant("spaces are always seeded with zero", "restore.random_streams", "fork.unseeded_exact", follows="openai/gym#649")
class SpacesSeededZero(Corridor):
    """Samples of a restored space are the same ones in every run."""

    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams(streams)
        self.action_space.seed(0)
        self.observation_space.seed(0)


@mutant("names depend on the time of day", "restore.trace_equality", "restore.many", follows="NetHack-LE/nle#129")
class BirthdayOfTheClock(Corridor):
    """Shopkeeper's name drawn from the time at which the state was restored."""

    born = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.born = 0
        return super().reset(seed=seed, options=options)

    def _apply(self, state: State) -> None:
        self.born = int(time.time())
        super()._apply(state)

    def info(self) -> dict[str, Any]:
        return {**super().info(), "shopkeeper": ("Possogroenoe", "Kabalebo", "Manlobbi")[self.born // 257 % 3]}


class PairedDice(Dice):
    """Actions are a pair: the first decides."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space: Any = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3)))

    def step(self, action: Any) -> Any:
        return super().step(int(action[0]))


@mutant(
    "parts of a space share a generator in a copy",
    "isolation.spaces",
    "fork.unseeded_exact",
    "restore.random_streams",
    "streams.unshared",
    follows="openai/gym#2994",
)
class PartsDrawAlike(PairedDice):
    """In a child, both parts of the action space draw from one stream."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            first, second = child.action_space.spaces
            second._np_random = first.np_random
        return children
