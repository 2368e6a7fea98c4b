"""Random continuations of a state, sampled with and without a restore.

The samples are drawn in one of three designs, which the evidence names:

- *replayed*: the controls are replays from ``reset(seed)`` to the very state of the snapshot, where ``np_random`` is
  replaced, and every other generator that the environment leads to gets other bits; compared with ``restore(snap,
  seed=…)``. For environments that repeat from a seed.
- *replayed, no seed*: the same, compared with snapshots of that state, each with other streams, restored and forked
  without a seed: for environments whose streams are not declared captured, where the default call must vary as the
  future does.
- *live*: whole runs, each from a new environment and another seed, that were never interrupted; compared with such runs
  in which a snapshot was taken on the way, a detour walked and the snapshot restored. Any environment allows this: if
  snapshots are faithful, the past and the future together have one distribution.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.harness.canonical import mark
from sandboxgym.conformance.harness.scenario import (
    choose,
    first_difference,
    opened,
    release,
    renew_streams,
    seed_spaces,
)
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Outcome, Subject, fork, restore, snapshot

NEAR = 3
"""Number of first transitions that are compared whole; later ones count in the return, the length and the end."""
PILOT = 12
"""Futures drawn at a place to find out whether it is random."""
PLACES = {"quick": 1, "full": 2}
"""Places at which a budget draws futures."""


class Future(NamedTuple):
    """A random continuation, reduced to the values that the tests use."""

    past: int
    """Hash of the outcomes before the continuation; 0 where all futures have one past."""
    whole: tuple[int, ...]
    """Hashes of the first `NEAR` transitions; shorter where the episode ended."""
    fields: tuple[tuple[int, ...], ...]
    """Hashes of observation, reward, flags, info and hidden state of each of these transitions."""
    numbers: tuple[tuple[float, ...], ...]
    """Reward and numeric observation of each of these transitions."""
    total: float
    """Return: the sum of the rewards to the end."""
    length: int
    end: int
    """Hash of the last transition's reward and flags."""


@dataclass
class Policy:
    """Policy of all futures, a fixed function of the outputs: the only randomness is the environment's."""

    subject: Subject
    first: Any
    space: Any
    seed: int
    limit: int

    def follow(self, env: AnyEnv, past: int) -> Future:
        """Act until the episode ends, a call raises, or the limit of steps is reached."""
        rng = np.random.default_rng(self.seed)
        self.space.seed(self.seed)
        whole, fields, numbers = [], [], []
        total, length, end, action = 0.0, 0, 0, self.first
        for index in range(self.limit):
            length += 1
            if index < NEAR:
                outcome, raw = self.subject.call(env, Op("step", action))
                whole.append(mark(outcome))
                flags = (outcome.terminated, outcome.truncated, outcome.raised)
                parts = (outcome.observation, outcome.reward, flags, outcome.info, outcome.state)
                fields.append(tuple(map(mark, parts)))
                numbers.append(() if raw is None else tuple(_numbers(raw[1], raw[0])))
            else:
                raw = _step(env, action)
            if raw is None:
                end = mark("raised")
                break
            with contextlib.suppress(TypeError, ValueError):
                total += float(raw[1])
            end = mark((raw[1] if isinstance(raw[1], (int, float)) else 0, bool(raw[2]), bool(raw[3])))
            if raw[2] or raw[3]:
                break
            action = choose(self.subject, self.space, raw[0], raw[4], rng, True)
        return Future(past, tuple(whole), tuple(fields), tuple(numbers), total, length, end)


def _step(env: AnyEnv, action: Any) -> tuple[Any, ...] | None:
    try:
        return env.step(copy.deepcopy(action))
    except Exception:  # part of the future: `Policy.follow` says so
        return None


def _numbers(*values: Any, most: int = 16) -> Iterator[float]:
    """Numbers in nested values, at most ``most`` evenly spaced ones of each array; text has none."""
    for value in values:
        if isinstance(value, dict):
            yield from _numbers(*[value[key] for key in sorted(value, key=str)])
        elif isinstance(value, (list, tuple)):
            yield from _numbers(*value)
        elif isinstance(value, (bool, int, float, np.generic, np.ndarray)):
            array = np.asarray(value)
            if array.dtype.kind in "biuf":
                flat = array.ravel()[:: max(1, array.size // most)][:most].astype(np.float64)
                yield from np.nan_to_num(np.clip(flat, -1e12, 1e12)).tolist()


@dataclass
class Place:
    """A state, its samplers of futures with and without a restore, and the way to it."""

    name: str
    design: str
    control: Control
    point: int
    draw: Callable[[int], Future]
    """Function from a number to a future of the uninterrupted environment."""
    drawn: Callable[[int], Future]
    """Function from a number to a future after a restore."""
    again: Callable[[int], Future] = field(default=lambda index: Future(0, (), (), (), 0.0, 0, 0))
    """In the live design: function to an uninterrupted future of a run from one fixed seed."""
    drawn_again: Callable[[int], Future] = field(default=lambda index: Future(0, (), (), (), 0.0, 0, 0))
    """In the live design: function to a restored future of that run, each restore with another seed."""
    uninterrupted: list[Future] = field(default_factory=list)
    restored: list[Future] = field(default_factory=list)


def seed_of(*key: int) -> int:
    """A seed that depends on all of the given numbers."""
    return int(np.random.SeedSequence(key).generate_state(1)[0]) % 2**31


def renew(env: AnyEnv, seed: int) -> None:
    """Replace the random streams by fresh ones, those of the spaces too."""
    renew_streams(env, seed)
    seed_spaces(env, seed)


def reach(subject: Subject, env: AnyEnv, control: Control, point: int, seed: int | None = None) -> list[Outcome]:
    """Play the first ``point`` calls of a control run, with another seed where one is given."""
    seed = control.seed if seed is None else seed
    seed_spaces(env, seed)
    start = control.ops[0]._replace(value=(seed, control.ops[0].value[1]))
    return [subject.call(env, op)[0] for op in (start, *control.ops[1:point])]


def policy_at(subject: Subject, env: AnyEnv, control: Control, point: int, limit: int) -> Policy:
    """Policy of all futures from one moment of a control run; it begins with that run's next action."""
    following = control.ops[point] if point < len(control.ops) else control.ops[0]
    space = copy.deepcopy(env.action_space)
    seed = seed_of(subject.seed, point, 5)
    space.seed(seed)
    first = following.value if following.kind == "step" else space.sample()
    return Policy(subject, first, space, seed, limit)


def _reusable(subject: Subject, control: Control) -> bool:
    """True if a used environment runs like a new one after a reset; running statistics in a wrapper prevent that."""
    with opened(subject) as env:
        for trial in range(2):
            reach(subject, env, control, 1)
            renew(env, trial)
            for op in control.ops[1 : control.last]:
                subject.call(env, op)
            found = reach(subject, env, control, len(control.ops))
            if first_difference(control.outcomes, found):
                return False
    return True


def replayed(subject: Subject, control: Control, point: int, budget: Budget, stack: contextlib.ExitStack) -> Place:
    """Place of the replayed design; its environments are closed with ``stack``."""
    source = stack.enter_context(opened(subject))
    reach(subject, source, control, point)
    snap = snapshot(source)
    stack.callback(release, snap)
    policy = policy_at(subject, source, control, point, budget.steps)
    used = stack.enter_context(opened(subject)) if _reusable(subject, control) else None

    def uninterrupted(env: AnyEnv, index: int) -> Future:
        reach(subject, env, control, point)
        renew(env, seed_of(subject.seed, index, 6))
        return policy.follow(env, 0)

    def draw(index: int) -> Future:
        if used is not None:
            return uninterrupted(used, index)
        with opened(subject) as env:
            return uninterrupted(env, index)

    def drawn(index: int) -> Future:
        restore(source, snap, seed_of(subject.seed, index, 7))
        return policy.follow(source, 0)

    return Place(f"after {point} calls, {control.name}", "replayed", control, point, draw, drawn)


def unseeded(subject: Subject, place: Place, budget: Budget, stack: contextlib.ExitStack) -> Place:
    """Place of the design without seeds, at a replayed one; its environments are closed with ``stack``."""
    control, point = place.control, place.point
    source = stack.enter_context(opened(subject))
    reach(subject, source, control, point)
    policy = policy_at(subject, source, control, point, budget.steps)

    def drawn(index: int) -> Future:
        with opened(subject) as env:
            reach(subject, env, control, point)
            renew(env, seed_of(subject.seed, index, 12))
            if index % 2:
                (child,) = fork(env, 1)
                try:
                    return policy.follow(child, 0)
                finally:
                    child.close()
            snap = snapshot(env)
            try:
                _step(env, policy.first)
                restore(env, snap)
                return policy.follow(env, 0)
            finally:
                release(snap)

    return Place(f"{place.name}, without a seed", "replayed, no seed", control, point, place.draw, drawn)


def live(subject: Subject, control: Control, point: int, budget: Budget) -> Place:
    """Place of the live design."""
    with opened(subject) as env:
        policy = policy_at(subject, env, control, point, budget.steps)

    def run(seed: int, interrupt: bool, restore_seed: int) -> Future:
        with opened(subject) as env:
            past = mark(tuple(reach(subject, env, control, point, seed)))
            if interrupt:
                snap = snapshot(env)
                try:
                    for _ in range(2):
                        _step(env, policy.first)
                    restore(env, snap, restore_seed if subject.capabilities.rng else None)
                finally:
                    release(snap)
            return policy.follow(env, past)

    def seeds(*key: int) -> int:
        return seed_of(subject.seed, *key)

    return Place(
        f"after {point} calls of runs like {control.name}",
        "live",
        control,
        point,
        draw=lambda index: run(seeds(index, 8), False, 0),
        drawn=lambda index: run(seeds(index, 9), True, seeds(index, 11)),
        again=lambda index: run(control.seed, False, 0),
        drawn_again=lambda index: run(control.seed, True, seeds(index, 11)),
    )


def places(subject: Subject, budget: Budget, stack: contextlib.ExitStack) -> tuple[list[Place], str]:
    """Places with random futures, most varied first transitions first; the reason if there are none."""
    found: list[tuple[int, Place]] = []
    tried = 0
    for index in range(2):
        control = subject.control(index, budget.steps)
        if control.outcomes[0].raised:
            continue
        replaceable = _replaceable(subject, control)
        last = max(1, control.last - 1)
        for point in sorted({1, 2, max(1, last // 2), last}):
            if point >= len(control.ops):
                continue
            variety = drawn = 0
            if control.repeatable and replaceable:
                place = replayed(subject, control, point, budget, stack)
                variety, drawn = _variety(place.draw, budget)
            if variety <= 1:  # draws of its own, if any: seen in runs from one seed, or where a restore has a seed
                place = live(subject, control, min(point, 3), budget)
                variety, drawn = _variety(place.again if not control.repeatable else place.drawn_again, budget)
            tried += drawn
            if variety > 1:
                found.append((variety, place))
    if not found:
        return [], f"no randomness seen in {tried} reseeded futures"
    found.sort(key=lambda item: -item[0])
    chosen: list[Place] = []
    for _, place in found:  # the most varied of all, then of other places
        if all((place.point, place.design) != (other.point, other.design) for other in chosen):
            chosen.append(place)
    chosen = chosen[: PLACES.get(budget.name, 2)]
    if chosen[0].design == "replayed" and not subject.capabilities.rng:
        chosen.append(unseeded(subject, chosen[0], budget, stack))
    return chosen, ""


def _variety(draw: Callable[[int], Future], budget: Budget) -> tuple[int, int]:
    """Number of different futures in a few draws, and the number of draws."""
    seen = [draw(10**6 + trial).whole for trial in budget.spending(PILOT, at_least=PILOT // 2)]
    return len(set(seen)), len(seen)


def _replaceable(subject: Subject, control: Control) -> bool:
    """True if ``np_random`` can be replaced (a proxy's may be another environment's)."""
    with opened(subject) as env:
        reach(subject, env, control, 1)
        try:
            renew(env, 1)
        except (AttributeError, TypeError):
            return False
    return True
