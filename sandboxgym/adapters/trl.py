"""Adapter of any environment for TRL's `GRPOTrainer(environment_factory=…)` (TRL 1.16 or newer).

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

1. With ``generations=G``, the G rollouts of a prompt start from one snapshot: exactly the same state, even if ``start``
   draws random numbers, and a random stream of its own for each.
2. The fork point may be anywhere in an episode, and is reached once per group.
3. The reward is the sum of the environment's rewards from there on. A failed environment is an error, never a reward
   (TRL itself shows a tool's exception to the model and continues).

This module only needs this package; the trainer is installed by ``pip install "sandboxgym[trl]"``.
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
    """The observation, followed by the admissible actions if the environment gives them."""
    commands = info.get("admissible_commands")
    return f"{observation}\nYou can: {', '.join(commands)}" if commands else str(observation)


def reset_to_task(env: gym.Env[Any, Any], row: dict[str, Any]) -> str:
    """Start the episode of the row's ``task``, or any if it has no such column."""
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
        """Start a rollout of this row of the data set; the returned text is appended to its prompt."""
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
    """Factory of a trainer's environments, which keeps the fork point that a group of rollouts shares.

    Args:
        make: makes one Gymnasium environment.
        start: moves an environment to the start of a row's rollouts and returns the text for the model, such as the
            story so far; by default it resets to the row's ``task``. To continue from saved snapshots:
            ``lambda env, row: show(*sandboxgym.restore(env, Snapshot.load(row["snapshot"])))``. With several training
            processes each starts its part of a group, so ``start`` must then depend on nothing but the row.
        read: converts a text to the environment's action; its errors are attributed to the model, not the environment.
        prompt: replaces ``read`` for models that write their actions as text of this form. An answer that it cannot
            read is an error that TRL shows to the model. It also formats the observation after a step. Its system
            prompt belongs into the rows' ``prompt``. A ``history`` is refused, because TRL keeps the conversation, and
            so is `Choice`, because the text of ``start`` has no list of actions.
        generations: number of consecutive rollouts of one row that share a fork point: `GRPOConfig.num_generations`.
            1: every rollout starts by itself.
        seed: seed of the rollouts' random streams in the environments.
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
        """Make another environment; TRL resets it for each rollout."""
        self._made.append(self._make())
        return TRLEnvironment(self._made[-1], self._begin, self._read, self._prompt)

    def close(self) -> None:
        """Close all environments made by this factory."""
        self._release()
        for env in self._made:
            env.close()
        self._made = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, env: gym.Env[Any, Any], row: dict[str, Any]) -> str:
        # Compare rows, because a process may get only part of a group, and evaluation uses other sizes.
        if not self._left or row != self._row:
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
