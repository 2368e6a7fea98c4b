"""Branches: actions that differ from a control run's, with expected outcomes from an environment never restored.

The branches of one point are made to catch state remembered under the wrong key: they differ in their first steps and
then, at the same moments, take the same actions. A value stored by the number of steps, by depth, or by depth and
action then answers one branch with the value of another.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sandboxgym.conformance.harness.canonical import canonical
from sandboxgym.conformance.harness.scenario import Scene, Walk, choose, opened, record, seed_spaces
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Subject

WIDTH = 3
"""Branches of one point."""
LENGTH = 10
"""Steps of a branch."""


def variation(subject: Subject, control: Control, point: int, rng: np.random.Generator, steps: int) -> tuple[Op, ...]:
    """Calls from ``point`` on that differ from the control run's, chosen step by step in a separate environment."""
    with opened(subject) as env:
        seed_spaces(env, control.seed)
        raw = None
        for op in control.ops[:point]:
            raw = subject.call(env, op)[1]
        space = copy.deepcopy(env.action_space)
        space.seed(int(rng.integers(2**31)))
        ops: list[Op] = []
        while raw is not None and not (raw[2] or raw[3]) and len(ops) < steps:
            ops.append(Op("step", choose(subject, space, raw[0], raw[4], rng, bool(rng.random() < 0.7))))
            raw = subject.call(env, ops[-1])[1]
        return tuple(ops)


def branches(
    scene: Scene,
    control: Control,
    point: int,
    rng: np.random.Generator,
    palette: Sequence[Any],
    *,
    width: int = WIDTH,
    length: int = LENGTH,
) -> list[Walk]:
    """Branches of a control run from ``point`` on, each played in a new environment that is then closed.

    Args:
        scene: plays the branches.
        control: the run whose first ``point`` calls all branches share.
        point: number of calls before the branches part, at least 1.
        rng: draws the actions.
        palette: actions of every kind; the branches take some of them at the same moments.
        width: number of branches.
        length: most steps of a branch; an episode that ends makes it shorter.
    """
    first = [canonical(op.value) for op in control.ops[point : point + 1] if op.kind == "step"]
    common = _common(control, point, rng, palette, length)
    found = []
    for number in range(width):
        found.append(_branch(scene, control, point, rng, first, common, 1 + number % 3, length))
    return found


def _common(
    control: Control, point: int, rng: np.random.Generator, palette: Sequence[Any], length: int
) -> list[tuple[Any, ...]]:
    """Actions of all branches of one point at the same moments, where possible: the control's, or one per kind."""
    own = [(op.value,) if op.kind == "step" else () for op in control.ops[point : min(control.last, point + length)]]
    own += [()] * (length - len(own))
    if not palette or rng.random() < 0.4:
        return own
    start = int(rng.integers(len(palette)))
    return [(palette[(start + offset) % len(palette)],) for offset in range(length)]


def _branch(
    scene: Scene,
    control: Control,
    point: int,
    rng: np.random.Generator,
    first: list[Any],
    common: list[tuple[Any, ...]],
    own: int,
    length: int,
) -> Walk:
    subject = scene.subject
    env = scene.start(control)
    space = copy.deepcopy(env.action_space)
    space.seed(int(rng.integers(2**31)))
    ops: list[Op] = []
    outcomes = []
    raw: Any = None
    for index in range(point + length):
        if index < point:
            op = control.ops[index]
        elif raw is None or raw[2] or raw[3]:
            break
        else:
            offset = index - point
            wanted = common[offset] if offset >= own else ()
            action = wanted[0] if wanted and _possible(wanted[0], raw[4]) else None
            for _ in range(8 if action is None else 0):
                action = choose(subject, space, raw[0], raw[4], rng, bool(rng.random() < 0.7))
                if offset or canonical(action) not in first:
                    break
            if not offset:
                first.append(canonical(action))
            op = Op("step", action)
        scene._write_op(env, op)
        outcome, raw = subject.call(env, op)
        ops.append(op)
        outcomes.append(outcome)
    scene.forget(env)
    name = f"{control.name}, other actions from {point}"
    other = Control(name, control.seed, tuple(ops), tuple(outcomes), None, True, "", 0)
    return Walk(env, other, {}, outcomes, outcomes, len(ops))


def _possible(action: Any, info: Any) -> bool:
    """True if the environment offers an action, where it declares what it offers."""
    if not isinstance(info, dict):
        return True
    if (commands := info.get("admissible_commands")) is not None and isinstance(action, str):
        return action in commands
    mask = info.get("action_mask")
    if isinstance(mask, np.ndarray) and mask.ndim == 1 and isinstance(action, (int, np.integer)):
        return bool(0 <= action < len(mask) and mask[action])
    return True


def pictured(subject: Subject) -> list[Subject]:
    """Subjects that compare the rendered picture after each call, one per render mode; empty if none can be rendered.

    A mode whose pictures differ between two uninterrupted runs is left out.
    """
    from sandboxgym.conformance.checks.freshness import _modes, _rendering

    found = []
    for mode in _modes(subject):
        drawing = replace(
            subject,
            make_env=_rendering(subject, mode),
            name=f"{subject.name}, render_mode={mode!r}",
            observe_state=functools.partial(_drawn, subject),
            declared=subject.capabilities,
            make_spec=subject.make_spec,
            _controls={},
        )
        try:
            with opened(drawing) as env:
                env.reset(seed=1, options=subject.options(0))
                if canonical(env.render()) is None:
                    continue
            if record(drawing, 0, 8).repeatable:
                found.append(drawing)
        except Exception:  # a mode that does not work here: freshness.render says why
            continue
    return found


def _drawn(subject: Subject, env: AnyEnv) -> Any:
    seen = None if subject.observe_state is None else subject.observe_state(env)
    try:
        return seen, env.render()
    except Exception as error:  # of an environment that was not reset: as comparable as a picture
        return seen, type(error).__qualname__
