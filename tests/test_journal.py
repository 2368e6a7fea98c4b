"""Journals of rollouts: a killed rollout continues with the trees that it would have had, whatever is there of it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import worker_envs
from test_tree import ForkEveryPath, Forks, Wanderer, sampled

from sandboxgym.tree import Action, Context, Envs, RolloutTree, Schedule, rollout
from sandboxgym.tree.journal import Journal, JournalMismatch
from sandboxgym.workers.pool import PooledEnvs
from sandboxgym.workers.store import SnapshotStore

worker_envs.register()
SCHEDULES = [Forks(3, 1, 3), Forks(3, 1, 3, late=True), ForkEveryPath(2)]


class Killed(BaseException):
    """The process ends here."""


class Mortal(Wanderer):
    """Ends its process, so to speak, at one of its calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().__call__(contexts)


class Recalling(Mortal):
    """Counts the decisions that it made itself."""

    def __init__(self, calls: int = 10**9) -> None:
        super().__init__(calls)
        self.decided: Counter[Any] = Counter()

    def _act(self, context: Context) -> Action:
        self.decided[context.path] += 1
        return super()._act(context)

    def record(self, action: Action) -> Any:
        return [action.text, action.position, action.memory]

    def recall(self, contexts: Sequence[Context], records: Sequence[Any]) -> list[Action]:
        return [Action(text, position=at, tokens=3, memory=memory) for text, at, memory in records]


class Counting(gym.Wrapper):
    """Counts the steps of environments."""

    steps = 0

    def step(self, action: Any) -> Any:
        Counting.steps += 1
        return super().step(action)


def grown(envs: Any, policy: Any, schedule: Schedule, **options: Any) -> list[RolloutTree]:
    return rollout(envs, policy, schedule, tasks=[None] * 3, seed=(3,), **options)


def journal(folder: Path, **options: Any) -> Journal:
    return Journal(folder / "update-0", head={"seed": 3}, **options)


def local() -> Envs:
    return Envs(lambda: Counting(gym.make("toys/Dice-v0")))


def killed_after(folder: Path, envs: Any, policy: Any, schedule: Schedule, **options: Any) -> None:
    kept = journal(folder)
    with pytest.raises(Killed):
        grown(envs, policy, schedule, journal=kept, **options)
    kept.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{}, {"retries": 2}, {"overlap": True}, {"max_live": 4}], ids=str)
@pytest.mark.parametrize("recall", [False, True])
def test_a_rollout_that_was_killed_continues_with_its_trees(
    tmp_path: Path, schedule: Schedule, options: dict[str, Any], recall: bool
) -> None:
    with local() as envs:
        whole = sampled(grown(envs, Wanderer(), schedule, **options))
        policy: Any = Recalling()
        grown(envs, policy, schedule, **options)
        everything = policy.decided.total()
        for calls in range(0, 30, 3):
            (tmp_path / "update-0").unlink(missing_ok=True)
            try:
                kept = journal(tmp_path)
                grown(envs, Recalling(calls), schedule, journal=kept, **options)
                kept.close()
                break
            except Killed:
                kept.close()
            again, policy = journal(tmp_path, recall=recall), Recalling()
            assert again.found > 0
            assert sampled(grown(envs, policy, schedule, journal=again, **options)) == whole
            assert (policy.decided.total() < everything) == (recall and calls > 1)
            again.close()
            done, Counting.steps = journal(tmp_path), 0
            assert sampled(grown(envs, Wanderer(), schedule, journal=done, **options)) == whole
            assert Counting.steps == 0 and done.written == 0
            done.close()
        assert calls > 6
