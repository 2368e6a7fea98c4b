"""Level 1: right after a restore, the outputs are those of the restored state, not of the state before it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.checks.restore.runs import controls, in_time, points_of
from sandboxgym.conformance.harness.canonical import canonical, difference
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import Scene, opened, outcome_difference, quiet, seed_spaces, written
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Outcome, Subject
from sandboxgym.core import SnapshotEnv, Transition


@check(
    "freshness.observation",
    level=1,
    after=("api.protocol",),
    hazard="The agent acts on what it saw before the restore: the first action of every branch is nonsense.",
    blind="Stale observations that equal the captured one.",
)
def observation(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Checks that ``restore`` returns exactly the observation of the captured moment.
    Snapshots are restored in the environment that continued, in a new one, and in one playing another episode. Arrays
    that restore and the next two steps return must be writable if those of an uninterrupted run are. What restore,
    reset and step returned must not change later.
    """
    return _returned(subject, budget, rng, 0, "observation")


@check(
    "freshness.last_info",
    level=1,
    after=("api.protocol",),
    hazard="Agents get admissible actions, masks or success flags of another state with the restored observation.",
    blind="Entries that the hook normalize removes.",
)
def last_info(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Checks that ``restore`` returns exactly the info of the captured moment.
    Restores and other requirements are those of freshness.observation. If the base environment has an attribute
    ``last``, it must be, after restores and in forks, with and without a seed, the whole transition that reset or step
    had returned, with reward and flags.
    """
    measured = _returned(subject, budget, rng, 1, "info")
    return {**measured, "last transitions": _last(subject, budget, rng)}


def _last(subject: Subject, budget: Budget, rng: np.random.Generator) -> int:
    """Number of comparisons of ``last`` with the last output of the base environment."""
    with opened(subject) as env:
        env.reset(seed=1, options=copy.deepcopy(subject.options(0)))
        if _own_last(subject, env) is None:
            return 0
    compared = 0
    usual, found = controls(subject, budget), coverage(subject, budget).controls
    pool = [*usual[:1], *found[:1], *usual[1:], *found[1:]]
    pool, some = (pool[:2], 1) if budget.waits else (pool, 3)
    for number in budget.spending(len(pool), at_least=min(3, len(pool))):
        control = pool[number]
        ordinary = any(control is each for each in usual)
        truth = _returned_by_base(subject, control) if control.repeatable else {}
        with Scene(subject) as scene:
            env, taken = scene.start(control), {}
            points = {*(points_of(control, rng, some) if ordinary else ()), *_telling(control, rng, some), control.last}
            for count, op in enumerate(control.ops, start=1):
                scene.call(env, op)
                last = _own_last(subject, env)
                if last is None:
                    continue
                expected = truth.get(count, last)
                _same_last(scene, env, expected, last, f"after call {count}")
                if count in points:
                    taken[count] = scene.snapshot(env), expected
            # New environments would cost a start for each moment; these were last used at another moment.
            other, seeded = scene.start(control), scene.start(control)
            for turn, (count, (snap, expected)) in enumerate(taken.items(), start=number):
                scene.restore(env, snap)
                places = {"after a restore": env}
                # Where each of these takes long, half of them at one moment and half at the next.
                if not (budget.waits and turn % 2):
                    scene.restore(other, snap)
                    places["after a restore in another environment"] = other
                    places["in a seeded fork"] = scene.fork(env, 1, seed=count)[0]
                if not budget.waits or turn % 2:
                    scene.restore(seeded, snap, seed=count)
                    places["after a restore with a seed"] = seeded
                    places["in a fork"] = scene.fork(env, 1)[0]
                for where, target in places.items():
                    _same_last(scene, target, expected, _own_last(subject, target), where)
                    compared += 1
                    if where.endswith("fork"):
                        scene.forget(target)
    return compared


def _telling(control: Control, rng: np.random.Generator, some: int) -> list[int]:
    """Up to ``some`` random moments after calls whose reward differs from the run's most frequent one."""
    rewards = [outcome.reward for outcome in control.outcomes]
    usual = max(set(rewards), key=rewards.count)
    found = [count for count, reward in enumerate(rewards, start=1) if reward != usual]
    return sorted(int(count) for count in rng.permutation(found)[:some])


def _same_last(scene: Scene, env: AnyEnv, expected: Outcome, found: Outcome | None, where: str) -> None:
    if found != expected:
        scene.note(f"print({scene.name(env)}.unwrapped.last)")
        text = "there is none" if found is None else outcome_difference(expected, found)
        scene.fail(f"{where} the last transition is not what reset() or step() had returned: {text}", {"where": where})


def _own_last(subject: Subject, env: AnyEnv) -> Outcome | None:
    """``last`` of the base environment, as far as it can be compared."""
    last = getattr(env.unwrapped, "last", None)
    return _plain(subject, env, last) if isinstance(last, Transition) else None


def _plain(subject: Subject, env: AnyEnv, transition: Any) -> Outcome:
    """A transition of the base environment; without observation and info where the normaliser is for wrapped ones.

    A reward counts by its value: an integer in place of a float is the same reward.
    """
    observation, reward, terminated, truncated, info = transition
    flags = float(reward), bool(terminated), bool(truncated)
    base = env.unwrapped
    if subject.normalize is not None and base is not env:
        return Outcome(None, *map(canonical, flags))
    return subject.outcome(base, observation, *flags, info)._replace(state=None)


def _returned_by_base(subject: Subject, control: Control) -> dict[int, Outcome]:
    """Outputs of the base environment in each call of a control run, by the number of calls made."""
    found: dict[int, Outcome] = {}
    with opened(subject) as env:
        seed_spaces(env, control.seed)
        base = env.unwrapped
        if not isinstance(base, SnapshotEnv):
            return {}  # whose `last` may be that of an environment behind it
        seen: list[Outcome] = []

        def recorded(method: Callable[..., Any], filled: Callable[[Any], Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = method(*args, **kwargs)
                seen.append(_plain(subject, env, filled(result)))  # at once: it may be changed later
                return result

            return call

        try:  # this environment is never snapshotted or forked, so nothing copies the replaced methods
            base.reset = recorded(base.reset, lambda result: (result[0], 0.0, False, False, result[1]))  # type: ignore[method-assign]
            base.step = recorded(base.step, lambda result: result)  # type: ignore[method-assign]
        except AttributeError:  # it has slots
            return {}
        for count, op in enumerate(control.ops, start=1):
            seen.clear()
            raised = subject.call(env, op)[1] is None
            if seen and not raised:
                found[count] = seen[-1]
    return found


def _stays(scene: Scene, control: Control, env: AnyEnv, place: int, name: str) -> None:
    """Check that outputs of reset and step stay unchanged while the environment is played, captured and restored."""
    kept = []
    subject = scene.subject
    for op in control.ops[: control.last]:
        outcome, raw = subject.call(env, op)
        scene.note(written(scene.name(env), op))
        if raw is not None:
            kept.append((raw, outcome))
            if len(kept) == 2:
                snap = scene.snapshot(env)
    if not kept:
        return
    if len(kept) > 1:
        scene.restore(env, snap)
        scene.call(env, control.ops[2] if len(control.ops) > 2 else control.ops[-1])
    for raw, outcome in kept:
        later = subject.outcome(env, *raw)
        if later[4 * place] != outcome[4 * place]:
            text = difference(outcome[4 * place], later[4 * place], name)
            scene.fail(f"the {name} that reset() or step() had returned was changed by later calls: {text}")


def _returned(subject: Subject, budget: Budget, rng: np.random.Generator, place: int, name: str) -> dict[str, Any]:
    compared = differing = 0
    pool = controls(subject, budget)
    for index, control in enumerate(in_time(budget, pool)):
        other = pool[(index + 1) % len(pool)]
        with Scene(subject) as scene:
            walk = scene.walk(control, points_of(control, rng, 3))
            used = scene.start(other)
            returned = _raw(subject, control, place)
            _stays(scene, other, used, place, name)
            for point in walk.points:
                expected = walk.expected[point - 1]
                if expected.raised is not None or (subject.normalize is not None and expected.info is None):
                    continue
                scene.play(used, other.ops[: max(1, other.last // 2)])
                for env in (walk.env, scene.start(control), used):
                    result = scene.restore(env, walk.snaps[point])
                    found = subject.outcome(env, result[0], 0.0, False, False, result[1])
                    one, two = expected[4 * place], found[4 * place]
                    if one != two:
                        text = difference(one, two, name)
                        scene.fail(f"restore() returned another {name} than that of the captured moment: {text}")
                    if frozen := _frozen(returned[point - 1], result[place], name):
                        scene.fail(f"{frozen} can be written to where step() returns it, not where restore() does")
                    for index, op in enumerate(control.ops[point : point + 2], point):
                        _, raw = scene.perform(env, op)
                        if raw and (frozen := _frozen(returned[index], raw[4 * place], name)):
                            scene.fail(f"{frozen} can be written to in an uninterrupted run, not after a restore")
                    later = subject.outcome(env, result[0], 0.0, False, False, result[1])[4 * place]
                    if later != two:
                        text = difference(two, later, name)
                        scene.fail(f"the {name} that restore() returned changed with the calls after it: {text}")
                    compared += 1
                differing += int(walk.expected[-1][0] != expected[0])
    return {"restores": compared, "captured states that look unlike the one before the restore": differing}


def _raw(subject: Subject, control: Control, place: int) -> list[Any]:
    """The observations (place 0) or infos (1) of a control run, not normalised."""
    with opened(subject) as env:
        seed_spaces(env, control.seed)
        found = [subject.call(env, op)[1] for op in control.ops]
    return [None if raw is None else raw[4 * place] for raw in found]


def _frozen(expected: Any, found: Any, path: str) -> str | None:
    """Path of an array that is read-only, unlike the expected one."""
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        return path if expected.flags.writeable and not found.flags.writeable else None
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs = [(key, value, found.get(key)) for key, value in expected.items()]
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        pairs = [(index, *pair) for index, pair in enumerate(zip(expected, found))]
    return next((text for key, one, two in pairs if (text := _frozen(one, two, f"{path}[{key!r}]"))), None)


@check(
    "freshness.render",
    level=1,
    after=("api.protocol",),
    hazard="Agents that see pictures act on a stale frame; videos of a branch begin with a frame of another.",
    blind="Render modes other than ansi and rgb_array.",
)
def render(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares ``render()`` right after a restore with the captured frame, in the modes ansi and rgb_array.
    Snapshots are restored in the environment that continued and in a new one; a fork must render what its source does.
    What a fork does and renders later must change neither a picture that its source returned nor what that renders.
    """
    tried: dict[str, int] = {}
    reasons = []
    for mode in _modes(subject):
        make = _rendering(subject, mode)
        try:
            with quiet():
                env = make()
                env.reset(seed=1, options=subject.options(0))
                env.render()
                env.close()
        except Exception as error:
            reasons.append(f"{mode}: {type(error).__name__}: {error}"[:200])
            continue
        tried[mode] = _rendered(subject, make, mode, budget, rng)
    if not tried:
        raise Skipped("; ".join(reasons) or "no render mode ansi or rgb_array")
    return {"frames compared": tried, "modes that did not work": reasons}


def _rendered(subject: Subject, make: Callable[[], AnyEnv], mode: str, budget: Budget, rng: np.random.Generator) -> int:
    control = subject.control(0, budget.steps)
    rendering = Subject(
        make,
        name=f"{subject.name}, render_mode={mode!r}",
        actions=subject.actions,
        normalize=subject.normalize,
        reset_options=subject.reset_options,
        declared=subject.capabilities,
        seed=subject.seed,
    )
    compared = 0
    with Scene(rendering) as scene:
        env = scene.start(control)
        points = points_of(control, rng, 2)
        twin = scene.start(control)
        frames, snaps = {}, {}
        for count, op in enumerate(control.ops, start=1):
            scene.call(env, op)
            scene.call(twin, op)
            if count in points:
                frames[count] = canonical(env.render())
                if frames[count] != canonical(twin.render()):
                    raise Skipped(f"two environments in the same state render differently ({mode})")
                snaps[count] = scene.snapshot(env)
                (child,) = scene.fork(env, 1)
                scene.note(f"print({scene.name(child)}.render())")
                if (found := canonical(child.render())) != frames[count]:
                    scene.fail(
                        f"render() of a fork ({mode}) is not that of its source: {difference(frames[count], found)}"
                    )
                _unmoved(scene, env, child, control.ops[count : count + 1], mode)
                scene.forget(child)
        for point in reversed(points):
            for target in (env, scene.start(control)):
                scene.restore(target, snaps[point])
                scene.note(f"print({scene.name(target)}.render())")
                found = canonical(target.render())
                if found != frames[point]:
                    scene.fail(
                        f"render() right after a restore ({mode}) is not that of the captured moment: "
                        f"{difference(frames[point], found)}"
                    )
                compared += 1
    return compared


def _unmoved(scene: Scene, env: AnyEnv, child: AnyEnv, ops: Sequence[Op], mode: str) -> None:
    """Fail if a fork's calls change a picture of its source, or what the source renders next."""
    picture = env.render()
    before = canonical(picture)
    if canonical(env.render()) != before:  # an animation
        return
    name = scene.name(env)
    scene.note(f"picture = {name}.render()")
    scene.play(child, ops)
    scene.note(f"{scene.name(child)}.render(); print(picture)")
    child.render()
    if (after := canonical(picture)) != before:
        scene.fail(
            f"a picture that render() had returned ({mode}) was changed by a fork's calls: {difference(before, after)}"
        )
    scene.note(f"print({name}.render())")
    if (after := canonical(env.render())) != before:
        scene.fail(f"render() of an environment ({mode}) changed when its fork went on: {difference(before, after)}")


def _modes(subject: Subject) -> list[str]:
    with quiet():
        env = subject.make_env()
        try:
            known = env.metadata.get("render_modes") or []
            return [mode for mode in ("ansi", "rgb_array") if mode in known or env.render_mode == mode]
        finally:
            env.close()


def _rendering(subject: Subject, mode: str) -> Callable[[], AnyEnv]:
    with quiet():
        env = subject.make_env()
        has = env.render_mode
        env.close()
    make: Callable[..., AnyEnv] = subject.make_env
    return make if has == mode else functools.partial(make, render_mode=mode)
