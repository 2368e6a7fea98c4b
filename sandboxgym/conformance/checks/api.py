"""Level 0: the environment has the protocol, declares what it covers, and refuses wrong use."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.harness import masks
from sandboxgym.conformance.harness.scenario import Scene, opened, outcome_difference
from sandboxgym.conformance.sandbox_probes.shell import PROBES
from sandboxgym.conformance.subject import Subject, as_spec, declaration, layers, methods, restore, snapshot
from sandboxgym.core import Kind, SnapshotSpec
from sandboxgym.errors import ResetNeeded, SnapshotError, SnapshotNotSupported

_COSTS = ("constant", "written", "steps")


@check(
    "api.protocol",
    level=0,
    hazard="Without snapshot, restore and fork nothing can branch, and a trainer finds out in the middle of a run.",
    blind="Whether the methods do what they promise, which all other checks test.",
)
def protocol(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Calls snapshot, restore and fork once on a new environment; it and its fork must be Gymnasium environments."""
    with Scene(subject) as scene:
        env = scene.make()
        if not isinstance(env, gym.Env):
            scene.fail(f"the factory must make a gymnasium.Env, it made {type(env).__qualname__}")
        base = list(layers(env))[-1]
        lacking = [name for name in ("snapshot", "restore", "fork") if not callable(getattr(base, name, None))]
        if lacking and not methods(env):
            scene.fail(f"{type(base).__qualname__} lacks {', '.join(lacking)}")
        scene.reset(env, seed=1, options=subject.options(0))
        snap = scene.snapshot(env)
        scene.restore(env, snap)
        for child in scene.fork(env, 1):
            if not isinstance(child, gym.Env):
                scene.fail(f"fork() must return environments, it returned {type(child).__qualname__}")
    return {
        "through": "methods" if methods(env) else "sandboxgym.snapshot, restore, fork",
        "base": type(base).__qualname__,
    }


@check(
    "api.spec",
    level=0,
    hazard="A trainer that reads snapshot_spec crashes or makes the wrong choice if it is missing or malformed.",
    blind="Whether the claims are true (see the checks of each capability).",
)
def spec(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Reads ``snapshot_spec`` and checks the values of its fields; a reset must not change it."""
    with opened(subject) as env:
        try:
            before = as_spec(declaration(env))
        except AttributeError as error:
            raise Failed(str(error)) from error
        env.reset(seed=1, options=subject.options(0))
        after = as_spec(declaration(env))
    if before.kind not in get_args(Kind):
        raise Failed(f"expected snapshot_spec.kind among {', '.join(get_args(Kind))}, found {before.kind!r}")
    if before.cost not in _COSTS:
        raise Failed(f"expected snapshot_spec.cost among {', '.join(_COSTS)}, found {before.cost!r}")
    if not isinstance(before.loses, tuple) or not all(isinstance(name, str) for name in before.loses):
        raise Failed(f"expected snapshot_spec.loses to be a tuple of the probes' names, found {before.loses!r}")
    unknown = sorted(set(before.loses) - {probe.name for probe in PROBES})
    if unknown:
        raise Failed(f"snapshot_spec.loses names {', '.join(unknown)}; expected names of probes, such as file.xattr")
    flags = [name for name in SnapshotSpec.__dataclass_fields__ if name not in ("kind", "cost", "loses")]
    for name in flags:
        if not isinstance(getattr(before, name), (bool, np.bool_)):
            raise Failed(f"expected snapshot_spec.{name} to be a bool, found {getattr(before, name)!r}")
    if before != after:
        raise Failed(f"snapshot_spec was {before} before the first reset and {after} after it")
    if before.cross_host and not before.cross_process:
        raise Failed("snapshot_spec declares cross_host without cross_process")
    return {name: getattr(before, name) for name in SnapshotSpec.__dataclass_fields__}


@check(
    "api.signature",
    level=0,
    hazard="A trainer that passes the seed by keyword, as the protocol defines it, crashes.",
    blind="Methods whose signature Python cannot read, such as some written in C.",
    after=("api.protocol",),
)
def signature(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Checks that ``snapshot()``, ``restore(snap, seed=None)`` and ``fork(2, seed=1)`` fit the methods' signatures."""
    with opened(subject) as env:
        owner: Any = env if methods(env) else list(layers(env))[-1]
        for name, args, kwargs in (
            ("snapshot", (), {}),
            ("restore", (0,), {"seed": None}),
            ("fork", (2,), {"seed": 1}),
        ):
            try:
                signature = inspect.signature(getattr(owner, name))
            except ValueError:
                continue
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise Failed(f"{name}{signature} cannot be called as the protocol has it: {error}") from error
    return {"owner": type(owner).__qualname__}


@check(
    "api.repeatable",
    level=0,
    hazard="If a seed does not fix an episode, no run can be reproduced or compared with an uninterrupted one.",
    blind="Randomness that shows only in longer episodes or rarely.",
    after=("api.protocol",),
)
def repeatable(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Records runs and replays each from its seed in a new environment.
    If one differs, this check is skipped with the difference, and other checks compare restores with the original
    environment instead, or are skipped.
    """
    controls = [subject.control(index, budget.steps) for index in range(budget.traces)]
    for control in controls:
        if not control.repeatable:
            raise Skipped(
                f"two runs from the same seed differ ({control.differs}): restored futures are compared with those of "
                "the original environment instead"
            )
    return {
        "control runs": len(controls),
        "calls": sum(len(control.ops) for control in controls),
        "episodes that ended": sum(control.ended is not None for control in controls),
        "noise": subject.noise or "none seen",
    }


@check(
    "api.snapshot_before_reset",
    level=0,
    hazard="A snapshot taken before the first reset holds no state, but is restored later as if it did.",
    blind="Snapshots and forks after close(); damage by the refused calls, if runs from one seed differ.",
    after=("api.protocol",),
)
def snapshot_before_reset(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Calls ``snapshot`` and ``fork`` before the first ``reset``.
    Each must raise `ResetNeeded` or a `SnapshotError` other than `SnapshotNotSupported`, and an episode played
    afterwards must be as without these calls.
    """
    control = subject.control(0, budget.steps)
    raised = []
    with Scene(subject) as scene:
        env = scene.start(control)
        for name, call in (("snapshot()", lambda: scene.snapshot(env)), ("fork(1)", lambda: scene.fork(env, 1))):
            try:
                call()
            except SnapshotNotSupported as error:
                scene.fail(f"{name} before reset() raised {error!r}, which means something else: expected ResetNeeded")
            except (ResetNeeded, SnapshotError) as error:
                raised.append(type(error).__qualname__)
            except Exception as error:
                if type(error).__name__ != "ResetNeeded":
                    scene.fail(f"{name} before reset() must raise ResetNeeded, it raised {error!r:.200}")
                raised.append(type(error).__qualname__)
            else:
                scene.fail(f"{name} before reset() must raise ResetNeeded, it returned")
        found = scene.play(env, control.ops)
        if control.repeatable and found != list(control.outcomes):
            index = next(i for i, (a, b) in enumerate(zip(control.outcomes, found)) if a != b)
            scene.fail(
                "after a refused snapshot the episode is another: "
                + outcome_difference(control.outcomes[index], found[index])
            )
    return {"raised": raised}


@check(
    "api.restore_returns",
    level=0,
    hazard="An agent that continues from a restore without an observation acts blindly.",
    blind="Whether it is the right observation (see freshness.observation).",
    after=("api.protocol",),
)
def restore_returns(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Checks that ``restore`` returns (observation, info), with and without a seed.
    The observation must be in the observation space, if that of ``reset`` is.
    """
    with Scene(subject) as scene:
        env = scene.make()
        scene.reset(env, seed=1, options=subject.options(0))
        snap = scene.snapshot(env)
        for seed in (None, 5):
            result = scene.restore(env, snap, seed=seed)
            inside = env.observation_space.contains(result[0])
            if not inside:
                with opened(subject) as other:
                    fresh, _ = other.reset(seed=1, options=subject.options(0))
                    if other.observation_space.contains(fresh):
                        scene.fail(f"restore(…, seed={seed}) returned {result[0]!r:.100}, not in the observation space")
    return {"observation": type(result[0]).__qualname__}


@check(
    "api.wrong_handle",
    level=0,
    hazard="An object that is not a snapshot is accepted, and the environment is broken or silently stays where it "
    "was.",
    blind="Handles of another environment that look right (see durable.mismatch).",
    after=("api.protocol",),
)
def wrong_handle(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Calls ``restore`` with None, a number, a string, bytes, an object, a dict and a list.
    Each call must raise, and the episode must continue unharmed.
    """
    control = subject.control(0, budget.steps)
    raised: dict[str, str] = {}
    with Scene(subject) as scene:
        half = max(1, control.last // 2)
        walk = scene.walk(control, ())
        env = scene.start(control)
        scene.play(env, control.ops[:half])
        for wrong in (None, 0, "snapshot", b"", object(), {}, []):
            scene.note(f"# restore of {type(wrong).__name__}, which raises")
            try:
                restore(env, wrong)
            except Exception as error:
                raised[type(wrong).__name__] = type(error).__qualname__
            else:
                scene.fail(f"restore({wrong!r}) returned instead of raising")
        if control.repeatable:
            scene.expect(env, walk, half, "after restore() refused what is not a snapshot")
        snapshot(env)
    return raised


@check(
    "api.action_mask",
    level=0,
    after=("api.protocol",),
    hazard="A mask that does not fit the action space is ignored: the checks then try forbidden actions, and see the "
    "environment's errors rather than its states.",
    blind="Masks under another name than action_mask.",
)
def action_mask(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Checks whether the ``action_mask`` in info, or in a dict observation, fits the action space.
    If so, the checks sample their actions under it; if not, they ignore it, and this check is skipped.
    """
    if subject.actions is not None:
        raise Skipped("actions come from the hook")
    seen = 0
    with opened(subject) as env:
        for op in subject.control(0, budget.steps).ops:
            raw = subject.call(env, op)[1]
            mask = None if raw is None else masks.given(raw[0], raw[4])
            if mask is not None:
                try:
                    masks.understood(env.action_space, mask)
                except ValueError as error:
                    raise Skipped(f"actions are drawn without the mask, for it is none of the space: {error}") from None
                seen += 1
    if not seen:
        raise Skipped("the environment gives no action_mask")
    return {"masks": seen}
