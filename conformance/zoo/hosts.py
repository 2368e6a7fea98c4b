"""Faults that were reported to compilers, browsers and containers, each put into a small environment of the same kind.

A mutant names the report that it follows, and has the same fault in a few lines written for this package.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium import wrappers

from zoo.dice import Entropy
from zoo.game import Game, Output, State, Step
from zoo.mutant import good, mutant
from zoo.wrapped import Own

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
        """Worth of a purchase: it counts all that the site knows."""
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
    """Restore that drops cookies with the expiry -1, which are those of the session."""

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
    """Restore after which the files below /dev/shm, a mount from outside, are gone."""

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
    "saving again after a restore saves what was restored",
    "restore.nested",
    "restore.trace_equality",
    follows="e2b-dev/E2B#884",
)
class SecondSaveForgets(Container):
    """Once it was resumed, later snapshots have the files of the first one."""

    resumed: State | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.resumed = None
        return super().reset(seed=seed, options=options)

    def _capture(self) -> State:
        return self.state if self.resumed is None else {**self.state, "files": self.resumed}

    def _apply(self, state: State) -> None:
        self.resumed = copy.deepcopy(state["files"])
        super()._apply(state)


@mutant(
    "a restore removes no files",
    "restore.trace_equality",
    "restore.many",
    "restore.diverge",
    follows="NVIDIA/NemoClaw#6454",
)
class NewFilesSurvive(Container):
    """Restore that unpacks the captured files over the present ones, so that later files stay."""

    def _apply(self, state: State) -> None:
        there = self.state["files"] if self._was_reset else {mount: {} for mount in self.mounts}
        joined = {mount: {**there[mount], **files} for mount, files in state["files"].items()}
        super()._apply({**state, "files": joined})


@mutant("variables are those of a new shell", "restore.trace_equality", follows="sandboxie-plus/Sandboxie#1782")
class VariablesAnew(Container):
    """Restore that brings back the variables of the start, and none that were set since."""

    def _apply(self, state: State) -> None:
        super()._apply({**state, "variables": {"TOKEN": state["variables"]["TOKEN"]}})


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
    """Draws declared to come from the operating system, made by a generator that is captured."""

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
