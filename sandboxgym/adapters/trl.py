"""Any environment as what TRL's `GRPOTrainer(environment_factory=…)` takes (TRL 1.16 or newer).

>>> import gymnasium as gym
>>> import sandboxgym
>>> factory = TRLEnvironments(lambda: gym.make("sandboxgym/ALFWorld-v0"), generations=4)
>>> environment = factory()  # GRPOTrainer does this, once for each rollout that it runs at a time
>>> text = environment.reset(task=7)
>>> environment.step("sing")
'Nothing happens.'
>>> environment.get_reward()
0.0
>>> factory.close()

What this module promises:

1. With ``generations=G``, the G rollouts of a prompt start from one snapshot: the same state, to the letter, whatever
   ``start`` drew, and a random stream of its own for each.
2. The fork point may lie anywhere in an episode, and is driven to once a group.
3. The reward is the sum of what the environment gave from there on. An environment that failed is an error, never a
   reward (TRL itself shows a tool's exception to the model and goes on).

This module needs nothing but this package; the trainer comes with ``pip install "sandboxgym[trl]"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import gymnasium as gym
import numpy as np

from sandboxgym.adapters.prompts import Choice, Prompt
from sandboxgym.wrappers import restore, snapshot

OVER = "The episode is over."


def show(observation: Any, info: dict[str, Any]) -> str:
    """The observation, and what can be done where the environment says so."""
    commands = info.get("admissible_commands")
    return f"{observation}\nYou can: {', '.join(commands)}" if commands else str(observation)


def reset_to_task(env: gym.Env[Any, Any], row: dict[str, Any]) -> str:
    """Start the episode that the row's ``task`` names, or any if it has no such column."""
    task = row.get("task")
    return show(*env.reset(options=None if task is None else {"task": task}))


class TRLEnvironment:
    """One rollout at a time, as TRL drives it: `reset`, the tool `step`, `get_reward`."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        begin: Callable[[gym.Env[Any, Any], dict[str, Any]], str],
        read: Callable[[str], Any] = str.strip,
        prompt: Prompt | None = None,
    ) -> None:
        self._env, self._begin = env, begin
        self._read = (lambda answer: prompt.read(answer, {})) if prompt else read
        self._prompt = prompt or Prompt()
        self._total, self._over = 0.0, True
        self._failure: Exception | None = None

    def reset(self, **row: Any) -> str:
        """Go to the start of a rollout of this row of the data set; the text is appended to its prompt."""
        self._total, self._over, self._failure = 0.0, False, None
        return self._begin(self._env, row)

    def step(self, action: str) -> str:
        """Act in the environment.

        Args:
            action: What to do, such as one of the commands that were offered.

        Returns:
            What happened.
        """
        if self._over:
            return OVER
        command = self._read(str(action))
        try:
            observation, reward, terminated, truncated, info = self._env.step(command)
        except Exception as error:
            self._failure = error
            raise
        self._total += float(reward)
        self._over = bool(terminated or truncated)
        return f"{observation}\n{OVER}" if self._over else self._prompt.show(observation, info)

    def get_reward(self) -> float:
        """Sum of the rewards since `reset`.

        Raises:
            RuntimeError: the environment failed in this rollout.
        """
        if self._failure is not None:
            raise RuntimeError(f"the environment failed in this rollout: {self._failure!r}") from self._failure
        return self._total


class TRLEnvironments:
    """Makes the environments of a trainer, and keeps the fork point that a group of rollouts shares.

    Args:
        make: makes one Gymnasium environment.
        start: brings an environment to where the rollouts of a row begin and returns what the model is told there,
            such as the story so far; reset to the row's ``task`` by default. To go on from saved snapshots:
            ``lambda env, row: show(*sandboxgym.restore(env, Snapshot.load(row["snapshot"])))``. Where trainers have
            several processes, each starts its part of a group: let it depend on nothing but the row then.
        read: the environment's action for a text; an error of this is the model's, not the environment's.
        prompt: in place of ``read``, for models that write their actions as a text of this form: an answer that it
            cannot read is an error that TRL shows to the model. It also shows what is told after a step. Its system
            prompt belongs into the rows' ``prompt``; a ``history`` is refused, for the conversation is TRL's, and so is
            `Choice`, for what ``start`` tells is a text without a list.
        generations: how many consecutive rollouts of one row share a fork point: `GRPOConfig.num_generations`.
            1: every rollout is started by itself.
        seed: of the rollouts' random streams, in the environments.
    """

    def __init__(
        self,
        make: Callable[[], gym.Env[Any, Any]],
        *,
        start: Callable[[gym.Env[Any, Any], dict[str, Any]], str] = reset_to_task,
        read: Callable[[str], Any] = str.strip,
        prompt: Prompt | None = None,
        generations: int = 1,
        seed: int = 0,
    ) -> None:
        if generations < 1:
            raise ValueError(f"expected at least one generation, found generations={generations}")
        if prompt and prompt.history:
            raise ValueError(f"expected a prompt that shows the whole conversation, found history={prompt.history}")
        if isinstance(prompt, Choice):
            raise ValueError("expected a prompt that reads answers by themselves, found one that numbers actions")
        self._prompt = prompt
        self._make, self._start, self._read, self._generations = make, start, read, generations
        self._seeds = np.random.SeedSequence(seed)
        self._made: list[gym.Env[Any, Any]] = []
        self._snap: Any = None
        self._left = 0
        self._row: dict[str, Any] = {}
        self._text = ""

    def __call__(self) -> TRLEnvironment:
        """One more environment; TRL resets it for rollout after rollout."""
        self._made.append(self._make())
        return TRLEnvironment(self._made[-1], self._begin, self._read, self._prompt)

    def close(self) -> None:
        """Close all that were made."""
        self._release()
        for env in self._made:
            env.close()
        self._made = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, env: gym.Env[Any, Any], row: dict[str, Any]) -> str:
        if not self._left or row != self._row:  # a process may get a part of a group only, evaluation other sizes
            self._release()
            self._text = self._start(env, row)
            if self._generations == 1:
                return self._text
            self._snap, self._row, self._left = snapshot(env), row, self._generations
        (child,) = self._seeds.spawn(1)
        restore(env, self._snap, seed=int(child.generate_state(1, np.uint64)[0]))
        self._left -= 1
        return self._text

    def _release(self) -> None:
        if self._snap is not None:
            self._snap.release()
        self._snap, self._left = None, 0
