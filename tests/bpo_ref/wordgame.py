"""A text game that an untrained policy wins half of the time: training runs in seconds, and learns with every seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym

from sandboxgym import SnapshotEnv, Unicode

ENV_ID = "wordgame:toys/WordGame-v0"  # gym.make imports this module first


class WordGame(SnapshotEnv[str, str]):
    """Four turns; won if all answers together have an even number of characters. Saying nothing ends it, lost."""

    metadata = {"render_modes": []}
    immutable_state = True
    num_tasks = 6

    def __init__(self) -> None:
        self.observation_space = Unicode()
        self.action_space = Unicode()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.state = ((options or {}).get("task", 0), 0, 0)
        return self._observation(), self._info(False)

    def step(self, action: str):
        task, turn, characters = self.state
        self.state = (task, turn + 1, characters + len(action))
        over = turn == 3 or not action
        won = turn == 3 and bool(action) and (characters + len(action)) % 2 == 0
        return self._observation(), float(won), over, False, self._info(won, valid=bool(action))

    def expert(self, *, rng: random.Random, noise: float) -> Expert:
        return Expert()

    def _observation(self) -> str:
        task, turn, _ = self.state
        return f"task {task} turn {turn} say a word"

    def _info(self, success: bool, *, valid: bool = True) -> dict[str, Any]:
        task, _, characters = self.state
        kind = "odd" if task % 2 else "even"
        told = {"progress_key": characters % 2, "state_hash": str(self.state)}
        return {"success": success, "valid_action": valid, "task_type": kind, **told}

    def _capture(self) -> tuple[int, int, int]:
        return self.state

    def _apply(self, state: tuple[int, int, int]) -> None:
        self.state = state


class Expert:
    """Expert that always answers with a word of four letters."""

    noisy = False

    def reset(self, observation: str) -> None:
        pass

    def act(self, observation: str) -> str:
        return "word"


if "toys/WordGame-v0" not in gym.registry:
    gym.register("toys/WordGame-v0", entry_point=WordGame)


class Perishing(WordGame):
    """The game in an environment that can die."""

    fate: ClassVar[Callable[[WordGame, str], bool]] = staticmethod(lambda env, action: False)
    """Tell whether an action kills it."""

    def step(self, action: str):
        if Perishing.fate(self, action):
            raise ConnectionError("the sandbox is gone")
        return super().step(action)


if "toys/Perishing-v0" not in gym.registry:
    gym.register("toys/Perishing-v0", entry_point=Perishing)


class Talkative(WordGame):
    """The game with some tasks that begin with a text of hundreds of words."""

    long: ClassVar[frozenset[int]] = frozenset((1, 4))

    def _observation(self) -> str:
        words = super()._observation()
        return " ".join([words] * 60) if self.state[0] in Talkative.long else words


if "toys/Talkative-v0" not in gym.registry:
    gym.register("toys/Talkative-v0", entry_point=Talkative)


class Keyed(WordGame):
    """The game with another kind of ``progress_key``."""

    key: ClassVar[Callable[[int], Any]] = staticmethod(lambda parity: parity)

    def _info(self, success: bool, *, valid: bool = True) -> dict[str, Any]:
        info = super()._info(success, valid=valid)
        return info | {"progress_key": Keyed.key(info["progress_key"])}


if "toys/Keyed-v0" not in gym.registry:
    gym.register("toys/Keyed-v0", entry_point=Keyed)


class Listed(WordGame):
    """The game with a list of some actions, for look-ahead."""

    def _info(self, success: bool, *, valid: bool = True) -> dict[str, Any]:
        return super()._info(success, valid=valid) | {"admissible_commands": ["task", "turn", "say a"]}


if "toys/Listed-v0" not in gym.registry:
    gym.register("toys/Listed-v0", entry_point=Listed)


class Masking(WordGame):
    """The game with actions that end the episode so that its reward is meaningless."""

    fate: ClassVar[Callable[[WordGame, str], str]] = staticmethod(lambda env, action: "")
    """Verdict with which an action ends the episode; empty if it does not."""
    mark: ClassVar[bool] = True
    """True if the environment marks these episodes as masked."""
    suspected: ClassVar[Callable[[WordGame], bool]] = staticmethod(lambda env: False)

    def step(self, action: str):
        if verdict := Masking.fate(self, action):
            info = {**self._info(False), "verdict": verdict, "masked": Masking.mark, "suspicious": []}
            return self._observation(), 0.0, True, False, info
        observation, reward, over, truncated, info = super().step(action)
        info["suspicious"] = ["conftest.py"] if over and Masking.suspected(self) else []
        return observation, reward, over, truncated, info


if "toys/Masking-v0" not in gym.registry:
    gym.register("toys/Masking-v0", entry_point=Masking)


class FreeText(SnapshotEnv[str, str]):
    """Three turns of text outside any word list; repeating the last word wins. The least that training needs of
    an environment: no ``num_tasks``, no ``success``, no ``progress_key``, no list of actions.
    """

    metadata = {"render_modes": []}
    immutable_state = True

    def __init__(self) -> None:
        self.observation_space = Unicode()
        self.action_space = Unicode()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.state = (0, "é" + hex(int(self.np_random.integers(10**6))))
        return self._observation(), {}

    def step(self, action: str):
        turn, word = self.state
        self.state = (turn + 1, word)
        return self._observation(), float(word in action), turn == 2, False, {"valid_action": action.startswith("say[")}

    def expert(self, *, rng: random.Random, noise: float) -> Repeater:
        return Repeater()

    def _observation(self) -> str:
        turn, word = self.state
        return f"$ cat log{turn}\n\tline  one\n" + "=" * 40 + f"\nThe word is {word}"

    def _capture(self) -> tuple[int, str]:
        return self.state

    def _apply(self, state: tuple[int, str]) -> None:
        self.state = state


class Repeater:
    """Policy that says the last word, in two lines."""

    noisy = False

    def reset(self, observation: str) -> None:
        pass

    def act(self, observation: str) -> str:
        return f"say[{observation.split()[-1]}]\n  # done"


FREE_TEXT_ID = "wordgame:toys/FreeText-v0"
if "toys/FreeText-v0" not in gym.registry:
    gym.register("toys/FreeText-v0", entry_point=FreeText)
