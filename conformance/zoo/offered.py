"""Faults at the inputs: options that choose rules, actions in the caller's arrays, a space that grows.

`Workshop` is correct; every mutant is a workshop with one method changed.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sandboxgym import SnapshotEnv
from zoo.corridor import Corridor, State
from zoo.mutant import good, mutant

Board = npt.NDArray[np.float64]
Output = tuple[Board, dict[str, Any]]
RULES = {"friction": 0.5, "pace": 2, "wind": False}


@good()
class Workshop(SnapshotEnv[Board, npt.NDArray[np.float64]]):
    """Rules from reset options; an action is an array and remembered; the space of actions widens with tools found."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (3,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.rules = {**RULES, **(options or {})}
        self.board = np.array([float(self.np_random.integers(1, 9)), 0.0, 0.0])
        self.before = np.zeros(2)
        self.tools = self.clock = 0
        self.offer()
        return self.board.copy(), self.info()

    def offer(self) -> None:
        """Set the action space to what the tools allow."""
        reach = 1.0 + self.tools
        self.action_space = spaces.Box(-reach, reach, (2,), np.float64)

    def info(self) -> dict[str, Any]:
        return {"tools": self.tools}

    def step(self, action: npt.NDArray[np.float64]) -> tuple[Board, float, bool, bool, dict[str, Any]]:
        push = np.asarray(action, dtype=np.float64)
        smooth = (push + self.before) / 2
        self.before = self.remembered(action)
        self.board[:2] += smooth * (1.0 - float(self.rules["friction"])) * int(self.rules["pace"])
        self.board[2] += 1.0 if self.rules["wind"] else 0.0
        self.clock += 1
        if self.clock % 4 == 0:
            self.tools += 1
            self.offer()
        return self.board.copy(), float(smooth.sum()), self.clock >= 18, False, self.info()

    def remembered(self, action: Any) -> Any:
        """The action as the next step will need it."""
        return np.array(action, dtype=np.float64)

    def _capture(self) -> Any:
        return {"rules": self.rules, "board": self.board, "before": self.before, "tools": self.tools, "t": self.clock}

    def _apply(self, state: Any) -> None:
        self.rules, self.board, self.before = state["rules"], state["board"], state["before"]
        self.tools, self.clock = state["tools"], state["t"]
        self.offer()


@mutant("rules from reset options are not captured", "interface.options")
class RulesStay(Workshop):
    """A restore keeps the rules of the episode before."""

    def _apply(self, state: Any) -> None:
        rules = self.rules if hasattr(self, "rules") else dict(RULES)
        super()._apply(state)
        self.rules = rules


@mutant("an option that reset() pops is lost", "interface.options")
class PoppedOption(Workshop):
    """The option ``bonus`` is looked up by name and kept in an attribute that no capture has."""

    bonus = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        given = dict(options or {})
        self.bonus = int((options or {}).get("bonus", 0))
        given.pop("bonus", None)
        return super().reset(seed=seed, options=given)

    def step(self, action: npt.NDArray[np.float64]) -> tuple[Board, float, bool, bool, dict[str, Any]]:
        board, reward, *rest = super().step(action)
        return board, reward + self.bonus, *rest  # type: ignore[return-value]


@mutant("the caller's action array is kept", "interface.arguments")
class KeptAction(Workshop):
    """Step whose array of actions is kept, so that writes of the caller change the next step."""

    def remembered(self, action: Any) -> Any:
        return action


@mutant("an action in an array is kept through forks", "interface.arguments")
class KeptThroughForks(Corridor):
    """The last action is part of the reward of the next step, and is the array of whoever stepped."""

    def __init__(self, length: int = 5, render_mode: str | None = "ansi") -> None:
        super().__init__(length, render_mode)
        self.action_space = spaces.MultiDiscrete([4])  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = getattr(self, "held", None)
        self.held = action
        extra = 0.0 if before is None else float(before[0])
        board, reward, *rest = super().step(int(action[0]))
        return board, reward + extra, *rest  # type: ignore[return-value]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.held = None
        return super().reset(seed=seed, options=options)

    def _capture(self) -> State:
        return {**super()._capture(), "held": self.held}

    def _apply(self, state: State) -> None:
        self.held = state["held"]
        super()._apply({name: value for name, value in state.items() if name != "held"})


@mutant("the action space stays that of another moment", "interface.spaces")
class SpaceStays(Workshop):
    """The tools are restored, the space of actions is not."""

    def _apply(self, state: Any) -> None:
        before = self.action_space
        super()._apply(state)
        self.action_space = before


@mutant("a fork offers the first space", "interface.spaces")
class ForkOffersFirst(Workshop):
    """Children begin with the space that the constructor makes."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.action_space = spaces.Box(-1.0, 1.0, (2,), np.float64)
        return children


@mutant("states are stored by 18 bits of a checksum", "restore.many_held")
class ShortKeys(Corridor):
    """Snapshots stored by short keys: among some thousand states two share a key, and one restores the other."""

    stored: ClassVar[dict[int, str]] = {}

    def _capture(self) -> Any:
        state = super()._capture()
        text = json.dumps({**state, "visits": state["visits"].tolist()}, sort_keys=True)
        key = zlib.crc32(text.encode()) & 0x3FFFF
        self.stored[key] = text
        return {"key": key}

    def _apply(self, state: State) -> None:
        found = json.loads(self.stored[state["key"]])
        found["coins"] = {int(cell): pair for cell, pair in found["coins"].items()}
        super()._apply({**found, "visits": np.array(found["visits"], np.int64)})


@mutant("arrays are read-only after a restore", "freshness.observation")
class ReadOnly(Workshop):
    """The board comes back as a view of bytes and is replaced by the first step that moves anything."""

    def step(self, action: npt.NDArray[np.float64]) -> tuple[Board, float, bool, bool, dict[str, Any]]:
        frozen = not self.board.flags.writeable
        if frozen:
            self.board = self.board.copy()
        board, *rest = super().step(action)
        board.flags.writeable = not frozen
        return board, *rest  # type: ignore[return-value]

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.board = np.frombuffer(self.board.tobytes())
