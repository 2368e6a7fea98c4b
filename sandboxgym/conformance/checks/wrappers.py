"""Level 1: wrappers are part of the environment; a snapshot holds their state or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.runs import controls, in_time, points_of
from sandboxgym.conformance.harness.scenario import Scene, opened
from sandboxgym.conformance.subject import AnyEnv, Subject, layers, methods, snapshot
from sandboxgym.errors import SnapshotNotSupported


def wrapped(subject: Subject, wrap: Callable[[AnyEnv], AnyEnv], name: str) -> Subject:
    """The subject with a wrapper around its factory's environments.

    Raises:
        Skipped: snapshots do not reach through wrappers around it.
    """
    variant = Subject(
        lambda: wrap(subject.make_env()),
        name=f"{name} around {subject.name}",
        actions=subject.actions,
        observe_state=None,
        normalize=subject.normalize,
        reset_options=subject.reset_options,
        declared=subject.capabilities,
        seed=subject.seed,
        source=_source(subject, name),
    )
    with opened(variant) as env:
        env.reset(seed=1, options=variant.options(0))
        if not methods(env):
            try:
                snapshot(env)
            except SnapshotNotSupported as error:
                raise Skipped(f"sandboxgym.snapshot does not go through what the factory makes: {error}") from error
    return variant


_AS_CODE = {
    "TransformReward": "TransformReward(env, lambda reward: 2 * reward)",
    "RecordEpisodeStatistics(StickyAction(TimeLimit(9)))": (
        "RecordEpisodeStatistics(gym.wrappers.StickyAction(gym.wrappers.TimeLimit(env, 9), 0.3))"
    ),
}


def _source(subject: Subject, name: str) -> str | None:
    """Python source that makes the subject in a wrapper such as ``TimeLimit(8)``."""
    if subject.make_spec is None:
        return None
    kind, _, arguments = name.rstrip(")").partition("(")
    code = _AS_CODE.get(name, f"{kind}(env, {arguments})" if arguments else f"{kind}(env)")
    inner = subject.make_spec.source().replace("def make_env", "def make_inner")
    return f"{inner}\n\ndef make_env():\n    env = make_inner()\n    return gym.wrappers.{code}\n"


@check(
    "wrappers.time_limit",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Elapsed steps are lost: restored episodes run past the time limit and collect rewards that the original "
    "cannot.",
    blind="Truncation by limits longer than the recorded episodes.",
)
def time_limit(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the elapsed steps of every `TimeLimit` after a restore, and in a fork, with the captured ones.
    A `TimeLimit` of a few steps put around the environment must truncate restored episodes and forks at the same step
    as uninterrupted ones.
    """
    elapsed = truncated = 0
    reason = ""
    for control in in_time(budget, controls(subject, budget)):
        with Scene(subject) as scene:
            env = scene.start(control)
            seen: dict[int, list[Any]] = {}
            snaps = {}
            for count, op in enumerate(control.ops[: control.last], start=1):
                scene.call(env, op)
                if count in (1, control.last // 2, control.last):
                    snaps[count], seen[count] = scene.snapshot(env), _elapsed(env)
            for target in (env, scene.start(control)):
                for count, snap in snaps.items():
                    scene.restore(target, snap)
                    if _elapsed(target) != seen[count]:
                        scene.fail(
                            f"after a restore TimeLimit has {_elapsed(target)} elapsed steps (outermost first); the "
                            f"captured moment had {seen[count]}"
                        )
                    elapsed += len(seen[count])
            for count, snap in snaps.items():
                scene.restore(env, snap)
                for child in scene.fork(env, 1):
                    if _elapsed(child) != seen[count]:
                        scene.fail(f"TimeLimit in a fork has {_elapsed(child)} elapsed steps, its source {seen[count]}")
            truncated += _ends_alike(scene, subject, control, rng)
    try:
        limit = max(3, min(8, subject.control(0, budget.steps).last - 1))
        variant = wrapped(subject, lambda env: gym.wrappers.TimeLimit(env, limit), f"TimeLimit({limit})")
        for index in range(2):
            control = variant.control(index, budget.steps)
            with Scene(variant) as scene:
                walk = scene.walk(control, points_of(control, rng, 3))
                for point in walk.points:
                    for target in (walk.env, scene.start(control)):
                        scene.restore(target, walk.snaps[point])
                        scene.expect(target, walk, point, f"restored within TimeLimit({limit})")
                    scene.restore(walk.env, walk.snaps[point])
                    for child in scene.fork(walk.env, 1):
                        scene.expect(child, walk, point, f"forked within TimeLimit({limit})")
                truncated += int(control.ended is not None)
    except Skipped as error:
        if not elapsed:
            raise
        reason = str(error)
    return {"elapsed steps compared": elapsed, "episodes that ended alike": truncated, "not tried": reason or "nothing"}


def _elapsed(env: AnyEnv) -> list[Any]:
    return [layer._elapsed_steps for layer in layers(env) if isinstance(layer, gym.wrappers.TimeLimit)]


def _ends_alike(scene: Scene, subject: Subject, control: Any, rng: np.random.Generator) -> int:
    """Check that restored episodes are truncated in the same call as the control run, if that was truncated."""
    if control.ended is None or control.outcomes[control.ended - 1].truncated != ("bool", True):
        return 0
    walk = scene.walk(control, [max(1, control.ended // 2)])
    for target in (walk.env, scene.start(control)):
        for point, snap in walk.snaps.items():
            scene.restore(target, snap)
            scene.expect(target, walk, point, "restored before a truncation", calls=control.ended - point)
    return 1


_WRAPPERS: dict[str, Callable[[AnyEnv], AnyEnv]] = {
    "StickyAction(0.5)": lambda env: gym.wrappers.StickyAction(env, 0.5),
    "FrameStackObservation(3)": lambda env: gym.wrappers.FrameStackObservation(env, 3),
    "DelayObservation(2)": lambda env: gym.wrappers.DelayObservation(env, 2),
    "TimeAwareObservation": lambda env: gym.wrappers.TimeAwareObservation(env),
    "NormalizeObservation": lambda env: gym.wrappers.NormalizeObservation(env),
    "NormalizeReward": lambda env: gym.wrappers.NormalizeReward(env),
    "RecordEpisodeStatistics": lambda env: gym.wrappers.RecordEpisodeStatistics(env),
    "TransformReward": lambda env: gym.wrappers.TransformReward(env, _doubled),
}


def _doubled(reward: Any) -> Any:
    return 2 * reward


@check(
    "wrappers.stack",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Frame stacks, sticky actions or statistics of another moment continue in restored episodes.",
    blind="Wrappers not tried here (see the evidence); those that the factory adds are part of every other check.",
)
def stack(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Puts wrappers of Gymnasium around the environment, one at a time and three at once.
    Restored and forked episodes are compared with uninterrupted runs in the same wrappers.
    """
    tried: list[str] = []
    not_tried: dict[str, str] = {}
    makers = {
        "RecordEpisodeStatistics(StickyAction(TimeLimit(9)))": lambda env: gym.wrappers.RecordEpisodeStatistics(
            gym.wrappers.StickyAction(gym.wrappers.TimeLimit(env, 9), 0.3)
        ),
        **_WRAPPERS,
    }
    random_without_streams = not subject.capabilities.rng
    todo = iter(makers.items())
    for _ in budget.spending(len(makers), at_least=4 if budget.waits else len(makers)):
        name, wrap = next(todo)
        if random_without_streams and "Sticky" in name:
            not_tried[name] = "random streams are not declared captured"
            continue
        try:
            variant = wrapped(subject, wrap, name)
            control = variant.control(0, min(budget.steps, 30))
        except Skipped as error:
            not_tried[name] = str(error)[:160]
            continue
        except Exception as error:  # it does not suit these spaces
            not_tried[name] = f"{type(error).__name__}: {error}"[:160]
            continue
        if control.outcomes[min(1, len(control.outcomes) - 1)].raised:
            not_tried[name] = f"its step() raised {control.outcomes[1].raised}"
            continue
        with Scene(variant) as scene:
            walk = scene.walk(control, points_of(control, rng, 2))
            for point in reversed(walk.points):
                for target in (walk.env, scene.start(control)):
                    result = scene.restore(target, walk.snaps[point])
                    scene.expect_returned(target, walk, point, result, f"restored within {name}")
                    scene.expect(target, walk, point, f"restored within {name}")
                scene.restore(walk.env, walk.snaps[point])
                for child in scene.fork(walk.env, 1):
                    scene.expect(child, walk, point, f"forked within {name}")
        tried.append(name)
    not_tried |= {name: "no time was left" for name, _ in todo}
    if not tried:
        raise Skipped("; ".join(f"{name}: {reason}" for name, reason in not_tried.items())[:600])
    return {"tried": tried, "not tried": not_tried}


class _Bonus(gym.Wrapper[Any, Any, Any, Any]):
    """A stateful wrapper that is not registered: the reward depends on its number of steps."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self.steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward) + self.steps, terminated, truncated, info


@check(
    "wrappers.unknown_refused",
    level=1,
    after=("api.protocol",),
    hazard="A wrapper whose state cannot be captured is skipped in silence, and its state is wrong in every branch.",
    blind="Wrappers that keep their state in globals or closures.",
)
def unknown_refused(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Puts a stateful wrapper of an unknown class around the environment.
    ``snapshot`` and ``fork`` must raise `SnapshotNotSupported` and name the wrapper or the base environment.
    """
    messages = {}
    variant = Subject(
        lambda: _Bonus(subject.make_env()),
        name=f"an unknown wrapper around {subject.name}",
        declared=subject.capabilities,
    )
    with opened(subject) as env:
        own = not isinstance(env, gym.Wrapper) and not hasattr(env, "unwrapped")
    if own:
        raise Skipped("the environment is not a gymnasium.Env that can be wrapped")
    with Scene(variant) as scene:
        env = scene.make()
        scene.reset(env, seed=1, options=subject.options(0))
        for name, call in (("snapshot", lambda: scene.snapshot(env)), ("fork", lambda: scene.fork(env, 1))):
            try:
                call()
            except SnapshotNotSupported as error:
                messages[name] = str(error)
                base = type(list(layers(env))[-1]).__qualname__
                if "_Bonus" not in str(error) and base not in str(error):
                    raise Failed(f"{name} refused an unknown wrapper without naming it: {error}") from error
            except Exception as error:
                raise Failed(
                    f"{name} of an unknown stateful wrapper raised {error!r}, not SnapshotNotSupported"
                ) from error
            else:
                scene.fail(f"{name} skipped a stateful wrapper of an unknown class in silence")
    return messages
