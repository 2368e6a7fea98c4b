"""States that the control runs pass through, and which of their fields vary."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym

from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.harness.scenario import opened, release
from sandboxgym.conformance.strength.clock import Clock
from sandboxgym.conformance.strength.fields import DEPTH, FIELDS, Path, field_of, paths, trace
from sandboxgym.conformance.subject import AnyEnv, Control, Subject
from sandboxgym.core import SnapshotEnv

_STREAMS = {"np_random", "_np_random", "_np_random_seed"}
_SPACES = {"action_space", "observation_space", "_action_space", "_observation_space"}
_INERT = {"spec", "metadata", "render_mode", "_metadata", "_cached_spec", *_STREAMS, *_SPACES}
"""Attributes of an environment that hold no state, or hold random streams, which have separate trials."""


@dataclass
class Seen:
    """Fields of the states that the control runs pass through."""

    varied: list[Path]
    constant: list[Path]
    values: dict[Path, list[Any]]
    count: int
    runs: list[Control]
    rich: dict[Path, list[int]]
    """Numbers of the control runs, by field; the run in which the field has the most different values comes first."""
    steps: int
    layered: bool
    """True if the fields are attributes, because the environment has no ``_capture``."""

    @property
    def episodes(self) -> int:
        """Number of episodes read."""
        return len(self.runs)

    @classmethod
    def of(cls, subject: Subject, budget: Budget, clock: Clock) -> Seen:
        """Read the fields in the recorded control runs: in two runs at least, in more within a third of the time."""
        states: list[Any] = []
        held: list[Any] = []
        numbers: list[int] = []
        layered = True
        runs: list[Control] = []
        recorded = [control for control in subject.controls if len(control.ops) > 1]
        try:
            for control in recorded or [subject.control(index, budget.steps) for index in range(budget.traces)]:
                if len(runs) >= 2 and clock.spent > clock.limit / 3:
                    break
                with opened(subject) as env:
                    layered = not isinstance(env.unwrapped, SnapshotEnv)
                    for state in _along(subject, env, control):
                        held.append(state)
                        states.append(state if is_immutable(env) or _holds(state) else copy.deepcopy(state))
                        numbers.append(len(runs))
                runs.append(control)
            found = paths(states, depth=10 if layered else DEPTH)[:FIELDS]
            values = {path: [field_of(state, path) for state in states] for path in found}
            traces = {path: [repr(trace(value)) for value in values[path]] for path in found}
        finally:
            for state in held:
                release(state)
        varied = [path for path in found if len(set(traces[path])) > 1]
        rich = {path: _richest(traces[path], numbers) for path in found}
        constant = [] if layered else [path for path in found if path not in varied]
        return cls(varied, constant, values, len(states), runs, rich, budget.steps, layered)

    def first(self, path: Path | None, subject: Subject) -> Subject:
        """The subject, with the control runs first in which the field at ``path`` has the most different values."""
        order = self.rich.get(path, range(len(self.runs))) if path is not None else range(len(self.runs))
        runs = {(index, self.steps): self.runs[number] for index, number in enumerate(order)}
        return replace(subject, declared=subject.capabilities, _controls={**subject._controls, **runs})


def _richest(values: Sequence[str], numbers: Sequence[int]) -> list[int]:
    """Numbers of runs, those with the most different values first."""
    found: dict[int, set[str]] = {number: set() for number in numbers}
    for value, number in zip(values, numbers):
        found[number].add(value)
    return sorted(found, key=lambda number: -len(found[number]))


def _along(subject: Subject, env: AnyEnv, control: Control) -> Iterator[Any]:
    """States at some moments of a control run, the start of the next episode included."""
    every = max(1, len(control.ops) // 8)
    for index, op in enumerate(control.ops):
        subject.call(env, op)
        if index % every == 0 or index == len(control.ops) - 1:
            yield _state(env)


def _state(env: AnyEnv) -> Any:
    base = env.unwrapped
    return base._capture() if isinstance(base, SnapshotEnv) else _attributes(base)


def _attributes(env: AnyEnv, depth: int = 8) -> dict[str, Any]:
    """Copyable attributes of an environment, and of environments inside it."""
    found: dict[str, Any] = {}
    for key, value in vars(env).items():
        if key in _INERT or isinstance(value, (gym.Space, type)) or callable(value):
            continue
        if isinstance(value, gym.Env):
            if depth:
                found[key] = _attributes(value, depth - 1)
            continue
        try:
            found[key] = copy.deepcopy(value)
        except Exception:  # a process, a lock: what cannot be copied cannot be left out either
            continue
    return found


def owner_of(env: Any, path: Path) -> tuple[Any, Path]:
    """The innermost environment on a path of attributes, and the rest of the path."""
    while len(path) > 1 and isinstance(getattr(env, path[0]), gym.Env):
        env, path = getattr(env, path[0]), path[1:]
    return env, path


def is_immutable(env: AnyEnv) -> bool:
    """True if an environment promises never to change a captured state."""
    return bool(getattr(env.unwrapped, "immutable_state", False))


def _holds(state: Any) -> bool:
    """True if a state holds a resource that must be released, which a copy would release twice."""
    return callable(getattr(state, "release", None))
