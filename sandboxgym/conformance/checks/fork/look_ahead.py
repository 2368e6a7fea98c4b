"""Level 2: look-ahead on an action gives the outcome of its step, and leaves the episode unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sandboxgym import wrappers
from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.checks.restore.runs import SHORT, controls, own_future, same_streams
from sandboxgym.conformance.harness.canonical import Canonical, Items, literal
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import Scene, choose, streams
from sandboxgym.conformance.harness.scenario.outcomes import outcome_difference
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Outcome, Subject
from sandboxgym.core import Transition
from sandboxgym.errors import SnapshotNotSupported

Ahead = Callable[[AnyEnv, Sequence[Any]], list[Transition]]


@check(
    "fork.look_ahead",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A look-ahead gives other results than a step, or changes the episode: searches that rely on it choose "
    "wrongly.",
    blind="Actions and moments that were not tried.",
)
def look_ahead(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Calls `sandboxgym.wrappers.successors` and ``outcomes`` with several actions at moments of recorded runs.
    The answers, with the actions in either order, must be those of ``step`` in another environment (of ``outcomes`` the
    reward, the flags, and the entries that it gives of the info). The rest of the episode, and random streams that are
    declared captured, must be as without these calls.
    """
    pool = [
        each
        for each in (*coverage(subject, budget).controls, *controls(subject, budget))
        if each.repeatable and each.last > 1
    ]
    if not pool:
        raise Skipped("no run repeats itself without look-ahead: " + subject.control(0, budget.steps).differs)
    asked = moments = 0
    for number in budget.spending(12 * len(pool), at_least=1 if budget.waits else len(pool)):
        control = pool[number % len(pool)]
        point = control.last - 1 if number % 3 == 1 else int(rng.integers(1, control.last))  # steps that end it too
        with Scene(subject) as scene:
            expected = _steps(scene, control, point, rng, 1 if budget.waits else 3)
            env = scene.start(control)
            scene.play(env, control.ops[:point])
            before = streams(env)
            for ask in (wrappers.successors, wrappers.outcomes, wrappers.successors):
                if ask is wrappers.outcomes and subject.normalize is not None:
                    continue  # what is left out cannot be normalised
                asked += _ask(scene, env, ask, expected)
                expected.reverse()
            if subject.capabilities.rng:
                same_streams(scene, before, streams(env), "after actions were only tried ahead")
            own = own_future(scene, env, control)
            what = "the episode, after actions were only tried ahead,"
            scene.expect(env, own, point, what, calls=SHORT if number >= len(pool) else None)
        moments += 1
    return {"moments": moments, "answers compared": asked}


def _steps(
    scene: Scene, control: Control, point: int, rng: np.random.Generator, width: int
) -> list[tuple[Any, Outcome]]:
    """Actions at a moment of a run, the run's own first, each with what its step gives in an environment of its own.

    Those whose step raises are left out.
    """
    found: list[tuple[Any, Outcome]] = []
    own = [op.value for op in control.ops[point : point + 1] if op.kind == "step"]
    for number in range(width + 1):
        env = scene.start(control)
        raw = None
        for op in control.ops[:point]:
            raw = scene.perform(env, op)[1]
        if number < len(own):
            action = own[number]
        elif raw is None:
            return found
        else:
            space = copy.deepcopy(env.action_space)
            space.seed(int(rng.integers(2**31)))
            action = choose(scene.subject, space, raw[0], raw[4], rng, bool(rng.random() < 0.7))
        raw = scene.perform(env, Op("step", action))[1]
        if raw is not None:
            found.append((action, _outcome(scene, env, raw)))
        scene.forget(env)
    return found


def _outcome(scene: Scene, env: AnyEnv, answer: tuple[Any, ...]) -> Outcome:
    """An answer in canonical form, its numbers of the types that a `Transition` has."""
    observation, reward, terminated, truncated, info = answer
    try:
        float(reward)
    except (TypeError, ValueError):  # a vector of several objectives does not fit a `Transition`
        raise Skipped(f"look-ahead answers with rewards that are numbers, and one is {reward!r:.80}") from None
    return scene.subject.outcome(env, observation, float(reward), bool(terminated), bool(truncated), info)._replace(
        state=None  # that of an environment that stepped is another one
    )


def _ask(scene: Scene, env: AnyEnv, ask: Ahead, expected: Sequence[tuple[Any, Outcome]]) -> int:
    actions = [action for action, _ in expected]
    call = f"sandboxgym.wrappers.{ask.__name__}({scene.name(env)}, [{', '.join(map(literal, actions))}])"
    scene.note(call)
    try:
        with scene._calling(call):
            answers = ask(env, copy.deepcopy(actions))
    except SnapshotNotSupported as error:
        raise Skipped(f"actions cannot be tried ahead: {error}") from error
    if len(answers) != len(expected):
        scene.fail(f"sandboxgym.wrappers.{ask.__name__} gives {len(answers)} answers for {len(expected)} actions")
    for answer, (action, wanted) in zip(answers, expected):
        found = _outcome(scene, env, tuple(answer))
        if ask is wrappers.outcomes:
            found = found._replace(observation=wanted.observation, info=_completed(found.info, wanted.info))
        if found != wanted:
            text = outcome_difference(wanted, found)
            scene.fail(
                f"sandboxgym.wrappers.{ask.__name__} answers the action {literal(action):.80} unlike a step: {text}"
            )
    return len(answers)


def _completed(told: Canonical, whole: Canonical) -> Canonical:
    """A part of an info, with the rest of the whole."""
    if not (isinstance(told, tuple) and isinstance(whole, tuple) and isinstance(whole[-1], Items)):
        return told
    parts = dict(told[-1])
    return (told[0], Items([*((key, parts.pop(key, item)) for key, item in whole[-1]), *parts.items()]))
