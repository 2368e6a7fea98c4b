"""Faults that were reported to real projects, each put into a small environment of the same kind.

An emulator, a simulated arm, a compiler, a browser, a container, and the usual wrappers and streams. A mutant names the
report that it follows, and has the same fault in a few lines written for this package.
"""

from __future__ import annotations

import copy
import time
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces, wrappers
from gymnasium.utils import seeding

from sandboxgym import SnapshotEnv, SnapshotWrapper, WrapperCodec, register_wrapper
from zoo.corridor import Corridor
from zoo.dice import Dice, Entropy
from zoo.known_good import Sensors
from zoo.mutant import good, mutant
from zoo.wrapped import Own

Output = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]
State = dict[str, Any]


class Game(SnapshotEnv[Any, int]):
    """State in a dict, actions that are numbers."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    actions = 4
    width = 4

    def __init__(self, render_mode: str | None = "ansi") -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1e6, 1e6, (self.width,), np.float64)
        self.action_space = spaces.Discrete(self.actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.state = self.begun()
        return self.observation(), self.info()

    def begun(self) -> State:
        """The state at the start."""
        raise NotImplementedError

    def observation(self) -> Any:
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        return {}

    def render(self) -> str:
        return str(self.observation())

    def _capture(self) -> State:
        return self.state

    def _apply(self, state: State) -> None:
        self.state = state

    def staying(self, state: State, *names: str) -> State:
        """A captured state with entries as they are in this environment, if it has any."""
        return {**state, **{name: self.state[name] for name in names}} if self._was_reset else state


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
    """What a restore returns was read before it."""

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


# A compiler.


@good()
class Compiler(Game):
    """Passes over a program; the reward is how much smaller it became, in terms of a benchmark's size."""

    actions = 6
    width = 3

    def __init__(self, benchmark: int = 0, render_mode: str | None = "ansi") -> None:
        super().__init__(render_mode)
        self.benchmark = benchmark

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        task = (options or {}).get("task")
        self.state = self.begun()
        if task is not None:
            self.state["benchmark"] = int(task) % 5
        return self.observation(), self.info()

    def begun(self) -> State:
        code = [int(word) for word in self.np_random.integers(32, size=24)]
        return {"code": code, "before": len(code), "line": [], "benchmark": int(self.np_random.integers(5))}

    def step(self, action: int) -> Step:
        state = self.state
        state["line"].append(int(action))
        self.transform(int(action))
        reward = (state["before"] - len(state["code"])) / (20 + state["benchmark"])
        state["before"] = len(state["code"])
        return self.observation(), reward, len(state["code"]) < 4, len(state["line"]) >= 24, self.info()

    def transform(self, action: int) -> None:
        """One pass."""
        code = self.state["code"]
        if action == 0:
            self.state["code"] = [word for word, after in zip(code, [*code[1:], -1]) if word != after]
        elif action == 1:
            self.state["code"] = code[1:] + code[:1]
        elif action == 2:
            self.state["code"] = [word >> 1 for word in code]
        elif action == 3:
            self.state["code"] = code + code[:2] if len(code) < 40 else code
        elif action == 4:
            self.state["code"] = sorted(code[:6]) + code[6:]
        else:
            self.state["code"] = [word for index, word in enumerate(code) if word or index % 2]

    def observation(self) -> Any:
        code = self.state["code"]
        return np.array([len(code), sum(code), code[0] if code else -1], float)

    def info(self) -> dict[str, Any]:
        return {
            "commandline": " ".join(f"-p{action}" for action in self.state["line"]),
            "code": tuple(self.state["code"]),
        }


@mutant("rewards of a fork start from another size", "fork.trace_equality", follows="facebookresearch/CompilerGym#84")
class ForkRewardsDiverge(Compiler):
    """A child's first reward is counted from the unoptimized program."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.state["before"] = 24
        return children


@mutant(
    "a fork applies its actions again, with another result",
    "fork.trace_equality",
    follows="facebookresearch/CompilerGym#749",
)
class ForkReplaysPasses(Compiler):
    """The last pass is run once more in a child, as if it had no effect the second time."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            if child.state["line"]:
                child.transform(child.state["line"][-1])
                child.state["before"] = len(child.state["code"])
        return children


@mutant(
    "the benchmark of an environment stays",
    "restore.other_env",
    "restore.after_reset",
    follows="huggingface/OpenEnv#840",
)
class TaskStays(Compiler):
    """A restore of another task plays the one that the environment had."""

    def _apply(self, state: State) -> None:
        super()._apply(self.staying(state, "benchmark"))


class Rounds(Own):
    """Every third pass is praised; forks are wrapped again."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.count = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.count += 1
        return observation, float(reward) + (self.count % 3 == 0), terminated, truncated, info

    def snapshot(self) -> Any:
        return super().snapshot(), self.count

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        inner, self.count = snap
        return super().restore(inner, seed=seed)


@mutant(
    "a wrapper is made anew around a fork",
    "fork.trace_equality",
    "fork.keeps_wrappers",
    follows="facebookresearch/CompilerGym#308",
)
def fork_wraps_anew() -> Any:
    """Children have the wrapper, and not what it had counted."""
    return Rounds(wrappers.TimeLimit(Compiler(), 20))


# A browser.


@good()
class Browser(Game):
    """Pages with cookies, storage of three kinds, a history and a form."""

    actions = 9
    width = 4

    def begun(self) -> State:
        return {
            "page": int(self.np_random.integers(3)),
            "cookies": {},
            "local": {"0": 0, "1": 0, "2": 0},
            "session": {"0": 0, "1": 0, "2": 0},
            "database": [],
            "history": [],
            "form": "",
            "clock": 0,
        }

    def step(self, action: int) -> Step:
        state, page = self.state, str(self.state["page"])
        state["clock"] += 1
        paid = 0.0
        if action < 2:
            state["history"].append(state["page"])
            state["page"] = (state["page"] + 1 + int(action)) % 3
        elif action == 2 and state["history"]:
            state["page"] = state["history"].pop()
        elif action == 3:
            state["cookies"]["login"] = {"value": state["clock"], "expires": -1}
        elif action == 4:
            state["session"][page] += 1
        elif action == 5:
            state["local"][page] += 1
        elif action == 6:
            state["database"].append((state["page"], state["clock"] % 4))
        elif action == 7:
            state["form"] += "ab"[state["clock"] % 2]
        elif action == 8:
            paid = self.worth()
        return self.observation(), paid, paid > 12, state["clock"] >= 30, self.info()

    def worth(self) -> float:
        """What a purchase is worth: all that the site knows."""
        state, page = self.state, str(self.state["page"])
        known = state["session"][page] + 2 * state["local"][page] + len(state["database"]) + 0.5 * len(state["form"])
        return known if "login" in state["cookies"] else 0.25 * known

    def observation(self) -> Any:
        state = self.state
        return np.array([state["page"], len(state["history"]), len(state["form"]), state["clock"]], float)

    def info(self) -> dict[str, Any]:
        return {"logged in": "login" in self.state["cookies"]}


@mutant("the storage of a tab is not saved", "restore.trace_equality", follows="microsoft/playwright#6006")
class SessionStorageLost(Browser):
    """Cookies and local storage are there, the other kind is empty."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "session": {"0": 0, "1": 0, "2": 0}})


@mutant("the browser's data bases are not saved", "restore.trace_equality", follows="microsoft/playwright#11164")
class DatabaseLost(Browser):
    """IndexedDB is empty."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "database": []})


@mutant(
    "cookies of a session are taken for expired",
    "restore.trace_equality",
    "freshness.last_info",
    follows="browser-use/browser-use#3523",
)
class SessionCookiesExpire(Browser):
    """What expires at -1 has expired when it is restored."""

    def _apply(self, state: State) -> None:
        kept = {name: cookie for name, cookie in state["cookies"].items() if cookie["expires"] >= 0}
        super()._apply({**state, "cookies": kept})


@mutant(
    "storage is restored on whatever page is open", "restore.trace_equality", follows="browser-use/browser-use#4102"
)
class StorageOfAnotherPage(Browser):
    """All entries go to the page that the browser is at before the restore."""

    def _apply(self, state: State) -> None:
        if self._was_reset:
            here = str(self.state["page"])
            local = {page: sum(state["local"].values()) if page == here else 0 for page in state["local"]}
            state = {**state, "local": local}
        super()._apply(state)


@mutant(
    "cookies of one task are there in the next",
    "restore.after_reset",
    "restore.trace_equality",
    follows="web-arena-x/webarena#32",
)
class CookiesOutliveTasks(Browser):
    """Neither a reset nor a restore removes a cookie."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        kept = self.state["cookies"] if self._was_reset else {}
        super().reset(seed=seed, options=options)
        self.state["cookies"] = kept
        return self.observation(), self.info()

    def _apply(self, state: State) -> None:
        kept = self.state["cookies"] if self._was_reset else {}
        super()._apply({**state, "cookies": {**kept, **state["cookies"]}})


# A container.


@good()
class Container(Game):
    """Files on three mounts with times and links, variables with odd values, a working directory."""

    actions = 8
    width = 3
    mounts = ("/", "/dev/shm", "/data")

    def begun(self) -> State:
        token = f"id={int(self.np_random.integers(100))}={int(self.np_random.integers(100))}"
        return {
            "files": {mount: {} for mount in self.mounts},
            "times": {mount: 0 for mount in self.mounts},
            "linked": False,
            "variables": {"TOKEN": token},
            "at": 0,
            "clock": 0,
        }

    def step(self, action: int) -> Step:
        state = self.state
        state["clock"] += 1
        mount = self.mounts[state["at"]]
        files = state["files"][mount]
        if action < 2:
            state["at"] = (state["at"] + 1 + int(action)) % 3
        elif action == 2:
            files[f"f{len(files)}"] = f"{state['clock']:02}"
            state["times"][mount] = state["clock"]
        elif action == 3 and files:
            last = sorted(files)[-1]
            files[last] = f"{state['clock']:02}"  # as long as before, and with the time that it had
        elif action == 4:
            state["linked"] = True
        elif action == 5 and "f0" in state["files"]["/"]:
            state["files"]["/"]["f0"] = "new"
            if state["linked"]:
                state["files"]["/data"]["link"] = "new"
        elif action == 6:
            state["variables"]["PATH"] = f"{state['variables'].get('PATH', '/bin')}:{mount}=x"
        paid = float(int(self.read()) % 7) if action == 7 else 0.0
        return self.observation(), paid, False, state["clock"] >= 30, self.info()

    def read(self) -> int:
        """A number of all that a program could read."""
        state = self.state
        text = f"{sorted(state['files'][self.mounts[state['at']]].items())} {sorted(state['variables'].items())}"
        return sum(text.encode()) + sum(state["times"].values())

    def observation(self) -> Any:
        state = self.state
        return np.array([state["at"], len(state["files"][self.mounts[state["at"]]]), state["clock"]], float)

    def info(self) -> dict[str, Any]:
        return {"modified": self.state["times"][self.mounts[self.state["at"]]]}


@mutant("shared memory is not saved", "restore.trace_equality", follows="checkpoint-restore/criu#300")
class SharedMemoryLost(Container):
    """What is mounted from outside comes back empty."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "files": {**state["files"], "/dev/shm": {}}})


@mutant("volumes are not committed", "restore.trace_equality", "restore.other_env", follows="moby/moby#6999")
class VolumeStays(Container):
    """The volume has what it has now, whatever is restored."""

    def _apply(self, state: State) -> None:
        if self._was_reset:
            state = {**state, "files": {**state["files"], "/data": self.state["files"]["/data"]}}
        super()._apply(state)


@mutant(
    "values of variables are cut at an equals sign",
    "restore.trace_equality",
    follows="podman-container-tools/podman#3132",
)
class VariablesCut(Container):
    """`NAME=a=b` is `NAME=a` afterwards."""

    def _apply(self, state: State) -> None:
        cut = {name: value.partition("=")[0] for name, value in state["variables"].items()}
        super()._apply({**state, "variables": cut})


@mutant(
    "a variable of the start is missing where it is resumed",
    "restore.other_env",
    "durable.cross_process",
    follows="OpenHands/OpenHands#6531",
)
class TokenMissing(Container):
    """In another environment than its own, a restored state has no token."""

    def _capture(self) -> State:
        return {**self.state, "owner": id(self)}

    def _apply(self, state: State) -> None:
        mine = state.pop("owner") == id(self)
        kept = {name: value for name, value in state["variables"].items() if mine or name != "TOKEN"}
        super()._apply({**state, "variables": kept})


@mutant(
    "the newest file is left out of a snapshot", "restore.trace_equality", follows="opensandbox-group/OpenSandbox#1831"
)
class NewestFileOmitted(Container):
    """A file that was made by the very last step is not there."""

    def _capture(self) -> State:
        taken = copy.deepcopy(self.state)
        for mount, files in taken["files"].items():
            if files and taken["times"][mount] == taken["clock"]:
                del files[sorted(files)[-1]]
        return taken


@mutant(
    "a restore changes times of folders",
    "restore.trace_equality",
    "freshness.last_info",
    follows="podman-container-tools/container-libs#1172",
)
class TimesOfRestore(Container):
    """Folders with files were modified when they were restored."""

    def _apply(self, state: State) -> None:
        times = {mount: state["clock"] if state["files"][mount] else at for mount, at in state["times"].items()}
        super()._apply({**state, "times": times})


@mutant(
    "a change that leaves the time as it was is not noticed",
    "restore.trace_equality",
    "restore.nested",
    follows="moby/moby#31805",
)
class SameTimeUnnoticed(Container):
    """A layer with the time and number of files of the last one is taken to be the last one."""

    layers: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.layers = {}
        return super().reset(seed=seed, options=options)

    def _capture(self) -> State:
        taken = copy.deepcopy(self.state)
        for mount, files in taken["files"].items():
            key = (mount, taken["times"][mount], len(files))
            taken["files"][mount] = dict(self.layers.setdefault(key, dict(files)))
        return taken

    def _apply(self, state: State) -> None:
        self.layers = {}
        super()._apply(state)


@mutant("a link becomes a file of its own", "restore.trace_equality", follows="ostreedev/ostree-rs-ext#405")
class LinkBroken(Container):
    """After a restore, what is written to one name does not show under the other."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "linked": False})


@mutant(
    "all clones of a snapshot draw the same random numbers",
    "streams.seeded",
    follows="vm0-ai/vm0#8212",
)
class ClonesDrawAlike(Entropy):
    """What is declared to be of the operating system comes from a generator that was captured."""

    def begin(self) -> None:
        self.generator = np.random.default_rng()

    def roll(self) -> int:
        return int(self.generator.integers(1, 7))

    def _capture(self) -> Any:
        return [super()._capture(), self.generator.bit_generator.state]

    def _apply(self, state: Any) -> None:
        super()._apply(state[0])
        self.generator = np.random.default_rng(0)
        self.generator.bit_generator.state = state[1]


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
    """What was captured wins over what was asked for."""

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
    """What a shopkeeper is called is drawn from the time at which a state was restored."""

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
