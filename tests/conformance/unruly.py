"""Environments that end, stop or flood the process that certifies them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from typing import Any

import numpy as np
from gymnasium import spaces

from sandboxgym import SnapshotEnv
from sandboxgym.system import run_directories


class Counter(SnapshotEnv[int, int]):
    """A correct environment."""

    metadata = {"render_modes": []}

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = spaces.Discrete(1000), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.total, self.clock = 0, 0
        return self.total, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.total, self.clock = (self.total + int(action)) % 1000, self.clock + 1
        return self.total, float(action), self.clock >= 20, False, {}

    def _capture(self) -> Any:
        return {"total": self.total, "clock": self.clock}

    def _apply(self, state: Any) -> None:
        self.total, self.clock = state["total"], state["clock"]


class Adjustable(Counter):
    """A correct environment with an argument."""

    def __init__(self, start: int = 0, render_mode: str | None = None) -> None:
        self.start = start
        super().__init__(render_mode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.total = self.start
        return self.total, {}

    def _config(self) -> dict[str, Any]:
        return {"start": self.start}


class Hangs(Counter):
    def restore(self, snap: Any, *, seed: int | None = None) -> Any:
        threading.Event().wait()


class HangsWhenMade(Counter):
    def __init__(self, render_mode: str | None = None) -> None:
        threading.Event().wait()


class Aborts(Counter):
    def step(self, action: int) -> Any:
        if self.clock == 7:
            os.abort()
        return super().step(action)


class AbortsInCrowds(Counter):
    """Aborts in wide forks only: all other checks can run."""

    def fork(self, k: int, *, seed: int | None = None) -> Any:
        if k > 40:
            os.abort()
        return super().fork(k, seed=seed)


class AbortsAlways(Counter):
    """Aborts in any fork, in a check of its own each time."""

    def fork(self, k: int, *, seed: int | None = None) -> Any:
        os.abort()


class Leaves(Counter):
    def restore(self, snap: Any, *, seed: int | None = None) -> Any:
        os._exit(0)


class Exits(Counter):
    def fork(self, k: int, *, seed: int | None = None) -> Any:
        sys.exit(0)


class Prints(Counter):
    def step(self, action: int) -> Any:
        for _ in range(8):
            print("x" * (1 << 20))
        return super().step(action)


class Talks(Counter):
    def step(self, action: int) -> Any:
        print("a step was taken")
        return super().step(action)


class Large(Counter):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed=seed, options=options)
        self.world = np.ones(50 << 20, np.uint8)
        return result

    def _capture(self) -> Any:
        return {**super()._capture(), "world": self.world}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.world = state["world"]


class LeavesAChild(Counter):
    """Leaves a process of its own when the interpreter ends."""

    def restore(self, snap: Any, *, seed: int | None = None) -> Any:
        process = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(os.environ["UNRULY_PID"], "w") as file:
            file.write(str(process.pid))
        threading.Event().wait()


class WaitsInAFolder(Counter):
    """Keeps files in a temporary folder of the suite, some of them locked away, and hangs."""

    def snapshot(self) -> Any:
        folder = tempfile.gettempdir()
        if "sandboxgym-conformance-" in folder:
            os.makedirs(os.path.join(folder, "mine", "locked"))
            os.chmod(os.path.join(folder, "mine"), 0)
            claimed = run_directories.claim("copy")
            with open(os.environ["UNRULY_PID"], "w") as file:
                file.write(str(claimed))
            threading.Event().wait()
        return super().snapshot()


class TwoGigabytes(Counter):
    """A correct environment whose snapshots take as many MiB as a variable says, 2048 without it."""

    def _capture(self) -> Any:
        mib = int(os.environ.get("UNRULY_MIB", "2048"))
        return {**super()._capture(), "world": os.urandom(1 << 20) * mib}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
