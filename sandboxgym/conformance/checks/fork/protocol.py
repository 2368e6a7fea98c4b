"""Level 2: children have the wrappers and arguments of their source; a wrong number of them raises."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.runs import own_future
from sandboxgym.conformance.harness.arguments import reconfigured
from sandboxgym.conformance.harness.scenario import Scene
from sandboxgym.conformance.subject import AnyEnv, Subject, layers, methods
from sandboxgym.errors import SnapshotNotSupported


@check(
    "fork.keeps_wrappers",
    level=2,
    after=("api.protocol",),
    hazard="A fork without its wrappers has no time limit, other observations and other rewards.",
    blind="Settings of wrappers (see fork.trace_equality); wrappers that do not derive from gymnasium.Wrapper.",
)
def keeps_wrappers(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the layers, spaces and render mode of children, and of a child's child, with those of the source.
    Layers (wrappers and base environment) must be of the same types in the same order, and none shared; children must
    have the methods snapshot, restore and fork if the source has.
    """
    control = subject.control(0, budget.steps)
    with Scene(subject) as scene:
        env = scene.start(control)
        scene.play(env, control.ops[:2])
        names = [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers(env)]
        family = scene.fork(env, 2)
        family += scene.fork(family[0], 1)
        everyone: list[AnyEnv] = [env, *family]
        for child in family:
            found = [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers(child)]
            if found != names:
                scene.fail(f"the source has the layers {names}, its fork {found}", {"expected": names, "found": found})
            if methods(env) and not methods(child):
                scene.fail("a fork lacks the methods snapshot, restore, fork of its source")
            if child.render_mode != env.render_mode:
                scene.fail(f"the source has render_mode {env.render_mode!r}, its fork {child.render_mode!r}")
            if child.action_space != env.action_space or child.observation_space != env.observation_space:
                scene.fail("a fork has other spaces than its source")
        for index, one_env in enumerate(everyone):
            for other_env in everyone[index + 1 :]:
                for mine in layers(one_env):
                    for theirs in layers(other_env):
                        if mine is theirs:
                            scene.fail(f"two environments share one {type(mine).__qualname__} object")
    return {"layers": names}


@check(
    "fork.invalid",
    level=2,
    after=("api.protocol",),
    hazard="A wrong k raises no error, but gives no children or too few.",
    blind="Very large k.",
)
def invalid(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Calls ``fork`` with 0, -1, "2" and None: each call must raise, and the source must continue unharmed."""
    control = subject.control(0, budget.steps)
    raised = {}
    with Scene(subject) as scene:
        walk = scene.walk(control, ())
        env = scene.start(control)
        point = max(1, control.last // 2)
        scene.play(env, control.ops[:point])
        for k in (0, -1, "2", None):
            try:
                children = scene.fork(env, k)  # type: ignore[arg-type]
            except Failed:
                raise Failed(f"fork({k!r}) returned instead of raising", counterexample=scene.script()) from None
            except Exception as error:
                raised[repr(k)] = type(error).__qualname__
            else:
                scene.fail(f"fork({k!r}) returned {len(children)} environments instead of raising")
        if control.repeatable:
            scene.expect(env, walk, point, "after a refused fork")
    return raised


@check(
    "fork.arguments",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Forks are made with default arguments: those of an environment with a larger board, say, play another "
    "game.",
    blind="Arguments other than numbers and flags of the factory or class; values that it refuses.",
)
def arguments(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Makes the environment with other arguments and compares a fork, and a fork of it, with an uninterrupted run.
    The arguments are numbers and flags of the factory or class, changed one at a time.
    """
    tried: list[str] = []
    same = 0
    for name, other in reconfigured(subject, min(30, budget.steps), numbers=1 if budget.waits else 2):
        for number in budget.spending(2, seconds=budget.seconds / 4):
            control = other.control(number, min(30, budget.steps))
            if not control.repeatable or (other.noise and not other.capabilities.rng):
                continue
            with Scene(other) as scene:
                env = scene.start(control)
                own = own_future(scene, env, control)
                point = max(1, control.last // 3)
                scene.play(env, control.ops[:point])
                try:
                    (child,) = scene.fork(env, 1)
                except SnapshotNotSupported:  # so made, it says, it cannot
                    continue
                (grandchild,) = scene.fork(child, 1)
                for each, what in ((child, "a fork"), (grandchild, "a fork of a fork")):
                    scene.expect(each, own, point, f"{what} of an environment with {name}")
            same += control.outcomes == subject.control(number, min(30, budget.steps)).outcomes
            tried.append(name)
    if not tried:
        raise Skipped("no argument of the factory or class is a number or a flag that can be changed")
    return {"arguments": sorted(set(tried)), "runs": len(tried), "runs that they do not change": same}
