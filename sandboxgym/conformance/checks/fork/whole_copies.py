"""Level 2: deep copies of an environment are forks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.runs import controls, own_future
from sandboxgym.conformance.harness.branching import branches
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import Scene, opened
from sandboxgym.conformance.subject import AnyEnv, Control, Subject, methods
from sandboxgym.core import SnapshotEnv


@check(
    "fork.deepcopy",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Code that copies an environment with copy.deepcopy, or a tree that holds it, gets a copy that shares its "
    "state.",
    blind="Environments that define no __deepcopy__, for which the check is skipped.",
)
def deepcopy(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Checks that a deep copy of an environment that defines ``__deepcopy__``, and a copy of that copy, are forks.
    They must start from the source's state and be independent of the others' actions and closing. A `SnapshotEnv`
    copied before its first reset must play an episode; ``copy.copy`` must raise if the environment defines
    ``__copy__``.
    """
    with opened(subject) as env:
        if not methods(env) or not _defines(env, "__deepcopy__"):
            raise Skipped("it defines no __deepcopy__ of its own")
        if not isinstance(env.unwrapped, SnapshotEnv):  # which has not promised any
            env.reset(seed=1, options=subject.options(0))
            try:
                copy.deepcopy(env).close()
            except Exception as error:
                raise Skipped(f"it refuses deep copies: {error!r:.200}") from None
    pool = [each for each in controls(subject, budget) if each.repeatable]
    if not pool:
        raise Skipped("no run repeats itself without copies: " + subject.control(0, budget.steps).differs)
    palette = coverage(subject, budget).palette
    copies = 0
    for number in budget.spending(2 * len(pool), at_least=2):
        control = pool[number % len(pool)]
        point = int(rng.integers(1, max(2, control.last)))
        with Scene(subject) as scene:
            first, second, *_ = branches(scene, control, point, rng, palette)
            env = scene.make()
            blank = _copied(scene, env, "deepcopy") if number == 0 and isinstance(env, SnapshotEnv) else None
            scene.seed_spaces(env, control.seed)
            scene.play(env, control.ops[:point])
            own = own_future(scene, env, control)
            twin = _copied(scene, env, "deepcopy")
            other = _copied(scene, twin, "deepcopy")
            middle = min(point + 3, first.end, own.end)
            scene.expect(twin, first, point, "a deep copy", calls=middle - point)
            scene.expect(env, own, point, "the source of a deep copy that acted", calls=middle - point)
            scene.expect(twin, first, middle, "a deep copy whose source acted")
            scene.expect(other, second, point, "a deep copy of a deep copy")
            scene.close(twin)
            scene.expect(env, own, middle, "the source of deep copies, one of which was closed")
            if blank is not None:
                scene.seed_spaces(blank, control.seed)
                scene.expect(blank, own, 0, "a deep copy made before the first reset", calls=control.last)
            _shallow(scene, control)
        copies += 2
    return {"deep copies": copies}


def _defines(env: AnyEnv, name: str) -> bool:
    return any(name in vars(kind) for kind in type(env).__mro__ if kind.__module__ != "gymnasium.core")


def _copied(scene: Scene, env: AnyEnv, how: str) -> AnyEnv:
    made: AnyEnv = getattr(copy, how)(env)
    scene.note(f"import copy; {scene._named(made)} = copy.{how}({scene.name(env)})")
    return made


def _shallow(scene: Scene, control: Control) -> None:
    """Check that ``copy.copy`` raises, where it is promised or the environment has one of its own."""
    env = scene.start(control)
    scene.play(env, control.ops[:1])
    if not _defines(env, "__copy__"):
        return
    try:
        _copied(scene, env, "copy")
    except Failed:
        raise
    except Exception:
        return
    scene.fail("copy.copy(env) returned instead of raising: a shallow copy shares the state of its source")
