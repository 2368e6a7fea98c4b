"""Faults that were reported to emulators and simulators, each put into a small environment of the same kind.

A mutant names the report that it follows, and has the same fault in a few lines written for this package.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
from gymnasium.utils import seeding

from zoo.game import Game, Output, State, Step
from zoo.mutant import good, mutant

# An emulator.


@good()
class Emulator(Game):
    """Memory, a screen that lags behind it, sticky actions, a timer that runs through everything."""

    width = 6

    def begun(self) -> State:
        memory = np.zeros(8, np.uint8)
        memory[0] = self.np_random.integers(16)
        return {"memory": memory, "screen": np.zeros(4), "held": 0, "timer": 7, "lives": 3, "frame": 0}

    def step(self, action: int) -> Step:
        state = self.state
        if self.np_random.random() >= 0.25:
            state["held"] = int(action)
        before = int(state["memory"][1])
        for _ in range(2):
            self.frame()
        reward = float(int(state["memory"][1]) - before)
        done = state["lives"] == 0
        return self.observation(), reward, done, not done and state["frame"] >= 60, self.info()

    def frame(self) -> None:
        """One frame: the screen shows the memory as it was before."""
        state = self.state
        memory, held = state["memory"], state["held"]
        state["screen"] = np.append(memory[:3].astype(float), state["lives"])
        state["timer"] = (state["timer"] * 5 + 3) % 64
        memory[0] = (int(memory[0]) + (0, 1, 15, 3)[held]) % 16
        memory[2] = state["timer"] % 8
        if memory[0] == memory[2]:
            memory[1] = min(255, int(memory[1]) + 1)
        elif memory[0] == 15 - memory[2] and state["frame"] % 3 == 0:
            state["lives"] -= 1
        state["frame"] += 1

    def observation(self) -> Any:
        state = self.state
        return np.append(state["screen"], [state["memory"][1], state["frame"]])

    def info(self) -> dict[str, Any]:
        return {"ram": self.state["memory"].copy(), "lives": self.state["lives"]}


@mutant(
    "the action that sticks is not part of the state",
    "restore.trace_equality",
    follows="Farama-Foundation/Arcade-Learning-Environment#165",
)
class StickyActionStays(Emulator):
    """A restored emulator repeats the action that was taken last in this environment."""

    def _apply(self, state: State) -> None:
        super()._apply(self.staying(state, "held"))


@mutant(
    "screen and memory are those before the restore until the next step",
    "freshness.observation",
    "freshness.last_info",
    follows="openai/atari-py#35",
)
class ScreenNotUpdated(Emulator):
    """Restore that returns the observation and info read before it."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        seen = (self.observation(), self.info()) if self._was_reset else None
        result = super().restore(snap, seed=seed)
        return result if seen is None else seen


@mutant(
    "the picture before the restore comes back for a moment",
    "restore.diverge",
    "freshness.render",
    follows="TASEmulators/BizHawk#226",
)
class OldPictureFlickers(Emulator):
    """Two frames after a restore the picture is the one from before it, once."""

    old: Any = None

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        old = super().render() if self._was_reset else None
        result = super().restore(snap, seed=seed)
        self.old = (old, self.state["frame"] + 2)
        return result

    def render(self) -> str:
        if self.old is not None and self.old[0] is not None and self.old[1] == self.state["frame"]:
            return str(self.old[0])
        return super().render()


@mutant(
    "only the first saved state is kept", "restore.trace_equality", "restore.any_order", follows="lrusso/Emulatrix#22"
)
class SavesOnce(Emulator):
    """Saving again gives the state that was saved first in this episode."""

    saved: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.saved = None
        return super().reset(seed=seed, options=options)

    def _capture(self) -> State:
        if self.saved is None:
            self.saved = copy.deepcopy(self.state)
        return self.saved  # type: ignore[no-any-return]

    def _apply(self, state: State) -> None:
        self.saved = None
        super()._apply(state)


@mutant("saving advances the emulation by a frame", "snapshot.noninterference", follows="SourMesen/Mesen#704")
class SavingAdvances(Emulator):
    """The machine runs to the next frame before its state is taken."""

    def _capture(self) -> State:
        taken = copy.deepcopy(self.state)
        self.frame()
        return taken


@mutant("a timer is not part of the state", "restore.trace_equality", follows="openai/retro#114")
class TimerRuns(Emulator):
    """The timer of the input chip runs on through a restore."""

    def _apply(self, state: State) -> None:
        super()._apply(self.staying(state, "timer"))


@mutant("loading a state takes memory that is never freed", "resources.baseline", follows="devmiyax/yabause#779")
class LoadingLeaks(Emulator):
    """A buffer for every restore."""

    buffers: ClassVar[list[Any]] = []

    def _apply(self, state: State) -> None:
        self.buffers.append(np.ones(1 << 14))
        super()._apply(state)


@mutant(
    "the generator of a saved game is seeded with zero",
    "restore.trace_equality",
    follows="Return-To-The-Roots/s25client#1970",
)
class LoadedGamesDrawZero(Emulator):
    """A loaded game draws other numbers than the one that was played on."""

    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams(streams)
        self._np_random, _ = seeding.np_random(0)


# A simulator.


@good()
class Arm(Game):
    """A joint under a motor, with a solver that starts from its last solution, contacts that build up, and sleep."""

    actions = 5
    width = 5

    def begun(self) -> State:
        place = float(self.np_random.uniform(-0.5, 0.5))
        return {
            "q": place,
            "v": 0.0,
            "target": place,
            "mocap": np.array([0.0, 1.0]),
            "warm": 0.0,
            "impulse": 0.0,
            "asleep": 0,
            "seen": place,
            "time": 0.0,
        }

    def step(self, action: int) -> Step:
        state = self.state
        if action < 3:
            state["target"] += 0.4 * (int(action) - 1)
        else:
            state["mocap"][int(action) - 3] += 0.25
        force = abs(state["target"] - state["q"])
        state["asleep"] = state["asleep"] + 1 if force < 0.3 and abs(state["v"]) < 0.2 else 0
        if state["asleep"] < 3:
            for _ in range(3):  # too few to converge: where it starts is seen in the last digits
                state["warm"] = 0.5 * state["warm"] + 2.0 * (state["target"] - state["q"]) - 0.3 * state["v"]
            state["v"] = 0.9 * state["v"] + 0.1 * state["warm"]
            state["seen"] = state["q"]
            state["q"] += 0.2 * state["v"]
            touching = abs(state["q"]) > 1.0
            state["impulse"] = 0.5 * state["impulse"] + (abs(state["q"]) - 1.0) if touching else 0.0
            state["v"] -= float(np.sign(state["q"])) * state["impulse"]
        state["time"] += 0.05
        reward = -abs(state["q"] - state["mocap"][0] + state["mocap"][1] - 1.0)
        return self.observation(), float(reward), abs(state["q"]) > 5.0, state["time"] > 1.99, self.info()

    def observation(self) -> Any:
        state = self.state
        return np.array([state["q"], state["v"], state["seen"], state["impulse"], state["time"]])

    def info(self) -> dict[str, Any]:
        return {"asleep": self.state["asleep"] >= 3}


@mutant(
    "the solver's last solution is not part of the state",
    "restore.trace_equality",
    follows="google-deepmind/mujoco#270",
)
class WarmStartStays(Arm):
    """Positions and velocities alone are put back: what follows differs by little, and ever more."""

    def _apply(self, state: State) -> None:
        super()._apply(self.staying(state, "warm"))


@mutant(
    "bodies that are moved from outside are left out",
    "restore.trace_equality",
    follows="ARISE-Initiative/robosuite#473",
)
class MocapStays(Arm):
    """The pose of the mocap body stays where it is."""

    def _apply(self, state: State) -> None:
        super()._apply(self.staying(state, "mocap"))


@mutant("derived quantities are not computed again", "freshness.observation", follows="google-deepmind/mujoco#493")
class ForwardForgotten(Arm):
    """The observation after a restore has positions of bodies from before it."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        seen = self.state["seen"] if self._was_reset else None
        observation, info = super().restore(snap, seed=seed)
        if seen is not None:
            observation[2] = seen
        return observation, info


@mutant("what motors were told goes on after a restore", "restore.trace_equality", follows="bulletphysics/bullet3#4364")
class MotorTargetStays(Arm):
    """The joint moves to where it was going before."""

    def _apply(self, state: State) -> None:
        super()._apply(self.staying(state, "target"))


@mutant("contacts of the past change the future", "restore.trace_equality", follows="dartsim/dart#3443")
class ContactHistoryStays(Arm):
    """Once bodies have touched, a restore in the same world keeps the solver's solution; in a new one it is exact."""

    touched = False

    def step(self, action: int) -> Step:
        result = super().step(action)
        self.touched |= bool(self.state["impulse"])
        return result

    def _apply(self, state: State) -> None:
        super()._apply(self.staying(state, "warm") if self.touched else state)


@mutant("data of contacts is not saved", "restore.trace_equality", follows="dimforge/rapier#49")
class ContactsNotSaved(Arm):
    """A snapshot taken in contact starts without any."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "impulse": 0.0})


@mutant("whether a body sleeps is not restored", "restore.trace_equality", follows="bulletphysics/bullet3#3993")
class SleepStays(Arm):
    """A body that was awake sleeps on, or the other way round."""

    def _apply(self, state: State) -> None:
        super()._apply(self.staying(state, "asleep"))


@mutant(
    "after some restores of one state bodies stay asleep",
    "restore.many",
    "restore.idempotent",
    follows="bulletphysics/bullet3#3993",
)
class FourthRestoreSleeps(Arm):
    """From the fourth restore of a snapshot on, nothing wakes."""

    counted: ClassVar[dict[str, int]] = {}
    stuck = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.stuck = False
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Step:
        place = self.state["q"], self.state["v"]
        super().step(action)
        if self.stuck:
            self.state["q"], self.state["v"] = place
        return self.observation(), -abs(self.state["q"]), False, self.state["time"] > 1.99, self.info()

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        result = super().restore(snap, seed=seed)
        self.counted[snap.id] = self.counted.get(snap.id, 0) + 1
        self.stuck = self.counted[snap.id] >= 4
        return result


@mutant("saving and restoring rounds", "restore.trace_equality", follows="openai/gym#1193")
class StateVectorRounds(Arm):
    """The state goes through a vector of single precision: it takes some steps to show."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "q": float(np.float32(state["q"])), "v": float(np.float32(state["v"]))})


@mutant("a deep copy has lost what the engine holds", "fork.deepcopy", follows="Farama-Foundation/Gymnasium#779")
class DeepcopyIsCold(Arm):
    """A copy has positions and velocities, and a solver that was never used."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        if self._was_reset:
            twin.state["warm"] = 0.0
        return twin


@mutant("the back end of a copy starts from nothing", "fork.trace_equality", follows="Grid2op/lightsim2grid#36")
class ForkIsCold(Arm):
    """Children diverge, because their solver has no solution to start from."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.state["warm"] = 0.0
        return children


@mutant("a deep copy is a new environment", "fork.deepcopy", follows="Farama-Foundation/PettingZoo#1307")
class DeepcopyIsNew(Arm):
    """It is made again from the arguments, and everything that happened is gone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = self._blank()
        twin.reset(seed=0)
        return twin


@mutant("a deep copy has its bodies at the start", "fork.deepcopy", follows="Farama-Foundation/PettingZoo#1271")
class DeepcopyForgetsPlaces(Arm):
    """Positions and velocities are not copied, everything else is."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        if self._was_reset:
            twin.state.update(q=0.0, v=0.0)
        return twin


@mutant("an observation changes with the next step", "freshness.observation", follows="google-deepmind/dm_control#34")
class ObservationIsAView(Arm):
    """One array of velocities and positions for all steps."""

    def observation(self) -> Any:
        if not hasattr(self, "array"):
            self.array = np.zeros(self.width)
        self.array[:] = super().observation()
        return self.array
