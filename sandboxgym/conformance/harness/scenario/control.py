"""Control runs: calls that were recorded and replayed, and their outcomes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.harness import masks
from sandboxgym.conformance.harness.scenario.environments import opened
from sandboxgym.conformance.harness.scenario.outcomes import first_difference
from sandboxgym.conformance.harness.scenario.streams import renew_streams, seed_spaces
from sandboxgym.conformance.subject import Control, Op, Outcome, Subject
from sandboxgym.conformance.supervision.clock import Stopwatch

AFTER_END = 2
"""Steps that a control run takes after the end of its first episode."""
NEXT_EPISODE = 4
"""Steps of the second episode, which is reset without a seed so that draws made only by ``reset`` show."""


def control_seed(subject: Subject, index: int) -> int:
    """Seed with which the ``index``-th control run is reset."""
    return int(np.random.SeedSequence([subject.seed, index]).generate_state(1)[0]) % 2**31


def record(subject: Subject, index: int, steps: int, planned: Sequence[Any] = ()) -> Control:
    """Record the ``index``-th control run, at most ``steps`` steps per episode, and replay it.

    Args:
        subject: the subject to record.
        index: number of the run, which decides the seed, the reset options, and how actions are chosen.
        steps: most steps of the first episode.
        planned: its first actions; the others are chosen during the run.
    """
    seed = control_seed(subject, index)
    on_policy = index % 2 == 0
    rng = np.random.default_rng([subject.seed, index, 1])
    options = subject.options(index)
    ops: list[Op] = []
    outcomes: list[Outcome] = []
    watch = Stopwatch()
    with opened(subject) as env:
        space = copy.deepcopy(env.action_space)
        space.seed(seed)

        def perform(op: Op) -> tuple[Any, ...] | None:
            outcome, raw = subject.call(env, op)
            ops.append(op)
            outcomes.append(outcome)
            return raw

        def episode(op: Op, limit: int, planned: Sequence[Any] = ()) -> bool:
            raw = perform(op)
            for number in range(limit):
                if raw is None or raw[2] or raw[3]:
                    break
                known = number < len(planned)
                action = planned[number] if known else choose(subject, space, raw[0], raw[4], rng, on_policy)
                raw = perform(Op("step", action))
            return raw is not None and bool(raw[2] or raw[3])

        seed_spaces(env, seed)
        ended = len(ops) if episode(Op("reset", (seed, options)), steps, planned) else None
        if outcomes[0].raised:
            env.reset(seed=seed, options=copy.deepcopy(options))  # raises the same for the report
        if ended is not None:
            for _ in range(AFTER_END):
                perform(Op("step", ops[-1].value))
        following = subject.options(index + 1) if isinstance(subject.reset_options, list) else options
        episode(Op("reset", (None, following)), NEXT_EPISODE)
    first, watch = watch.elapsed, Stopwatch()
    again = replay(subject, seed, ops)
    seconds = min(first, watch.elapsed)  # the run that other programs disturbed less
    differs = first_difference(outcomes, again)
    how = "found by search" if planned else "on-policy" if on_policy else "off-policy"
    name = f"seed {seed}, {how}, {len(ops)} calls"
    return Control(name, seed, tuple(ops), tuple(outcomes), ended, not differs, differs or "", seconds)


def choose(
    subject: Subject,
    space: gym.Space[Any],
    observation: Any,
    info: dict[str, Any],
    rng: np.random.Generator,
    on_policy: bool,
) -> Any:
    """Choose an action: from the action source or, off-policy and with probability 0.5, from the action space."""
    if not on_policy and rng.random() < 0.5:
        return space.sample()
    if subject.actions is not None:
        return subject.actions(observation, info, rng)
    admissible = info.get("admissible_commands") if isinstance(info, dict) else None
    if admissible is not None and len(admissible):
        return admissible[int(rng.integers(len(admissible)))]
    mask = masks.given(observation, info)
    return space.sample() if mask is None else masks.sample(space, mask)


def replay(subject: Subject, seed: int, ops: Sequence[Op]) -> list[Outcome]:
    """The outcomes of ``ops`` in a new environment."""
    with opened(subject) as env:
        seed_spaces(env, seed)
        return [subject.call(env, op)[0] for op in ops]


def noise(subject: Subject) -> str:
    """Reason why futures differ by themselves: no repetition from a seed, or known or unknown streams."""
    for index in (0, 1):
        control = subject.control(index, 60)
        if not control.repeatable:
            return f"two runs from the same seed differ: {control.differs}"
        for trial in range(3):
            with opened(subject) as env:
                seed_spaces(env, control.seed)
                outcomes = [subject.call(env, control.ops[0])[0]]
                renew_streams(env, int(np.random.SeedSequence([subject.seed, trial]).generate_state(1)[0]))
                seed_spaces(env, control.seed + 1 + trial)
                outcomes += [subject.call(env, op)[0] for op in control.ops[1 : control.last]]
            differs = first_difference(control.outcomes[: control.last], outcomes)
            if differs:
                return f"runs with other draws differ: {differs}"
    from sandboxgym.conformance.harness.seeds import by_seed  # which needs this module

    return by_seed(subject)


def comparable(subject: Subject, control: Control) -> int:
    """Number of calls of a control run that a restore must repeat."""
    if subject.capabilities.rng or control.ended is None:
        return len(control.ops)
    return next(index for index, op in enumerate(control.ops) if index and op.kind == "reset")
