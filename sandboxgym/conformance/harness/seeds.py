"""Effect of a seed given to ``restore`` or ``fork``, measured by futures and not by kinds of generators.

1. A draw may come from anything: a private space, an integer key, a self-written generator. A future is random under a
   seed if it differs from seed to seed and each seed repeats its own.
2. A seed must change nothing but draws. If every seed gives the same future, and that is not the captured one,
   something else was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.harness import generators
from sandboxgym.conformance.harness.canonical import Canonical, Items, show
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    first_difference,
    opened,
    release,
    renew_streams,
    seed_spaces,
    streams,
)
from sandboxgym.conformance.subject import AnyEnv, Op, Outcome, Subject, restore, snapshot
from sandboxgym.core import SnapshotEnv

VARY = 16
"""Number of `LEAST` restores with seeds that must differ before forks that never differ count as a fault."""

OTHER_DRAWS = "runs with other draws differ"
"""Prefix of `Subject.noise` if recognised streams affect the outcomes."""
OTHER_SEEDS = "restores with other seeds differ"
"""Prefix of `Subject.noise` if unrecognised streams do."""

TRIED = 3
"""Number of seeds that are tried to find whether seeds decide anything."""
TRIED_DECLARED = 8
"""`TRIED` for an environment with its own ``_reseed``, which says that seeds decide something."""
MANY = 400
"""Seeds that must give one future before it counts as not decided by seeds; `LEAST` if calls are slow."""
LEAST = 64
FOLLOWED = 4
"""Calls after a seed in the middle of an episode that are compared with an uninterrupted run."""
RENEWED = 16
"""Uninterrupted runs with other draws; what a seed changed is a fault only if it stays the same in all of them."""


def random_by(noise: str) -> bool:
    """True if `Subject.noise` says that futures are random and repeat from a seed."""
    return noise.startswith((OTHER_DRAWS, OTHER_SEEDS))


def reseeds(env: AnyEnv) -> bool:
    """True if an environment has a ``_reseed`` of its own: it draws from more than ``np_random`` and the spaces."""
    base = env.unwrapped
    return isinstance(base, SnapshotEnv) and type(base)._reseed is not SnapshotEnv._reseed


def recognised(env: AnyEnv) -> list[str]:
    """Recognised streams: ``np_random`` and the spaces of each layer, generators wherever they are kept."""
    found = [name for name, bits in streams(env).items() if bits is not None]
    return found + [path for path in generators.find(env) if not path.endswith("._np_random")]


def told(env: AnyEnv) -> str:
    """Text on the grounds for taking an environment to have nothing random."""
    names = ", ".join(recognised(env)[:6]) or "none"
    own = "has a _reseed of its own" if reseeds(env) else "has no _reseed of its own"
    return f"streams recognised: {names}; other bits in them change no future; the environment {own}"


def decided(subject: Subject, random: bool) -> dict[str, str]:
    """Evidence of randomness that no recognised stream shows: the futures that differ."""
    if not random or subject.noise.startswith(OTHER_DRAWS):
        return {}
    return {"decided by": "seeds give different futures, each its own again; no stream that was recognised does"}


def by_seed(subject: Subject) -> str:
    """Difference between the futures of two seeds, each of which repeats its own; empty if there is none.

    Futures that differ even after restores without a seed prove nothing about seeds; neither do restores that raise.
    """
    for index in (0, 1):
        try:
            if text := _by_seed(subject, index):
                return f"{OTHER_SEEDS}: {text}"
        except (Exception, SystemExit):  # the checks of restores report it
            return ""
    return ""


def _by_seed(subject: Subject, index: int) -> str:
    control = subject.control(index, 60)
    ops = control.ops[1 : control.last]
    if control.outcomes[0].raised or not ops:
        return ""
    with opened(subject) as env:
        seed_spaces(env, control.seed)
        subject.call(env, control.ops[0])
        snap = snapshot(env)
        try:

            def future(seed: int | None) -> list[Outcome]:
                restore(env, snap, seed)
                return [subject.call(env, op)[0] for op in ops]

            if subject.capabilities.rng and first_difference(control.outcomes[1 : control.last], future(None)):
                return ""
            first = future(1)  # 0 may be taken for none
            for seed in range(2, 1 + (TRIED_DECLARED if reseeds(env) else TRIED)):
                other = future(seed)
                if text := first_difference(first, other):
                    # In this order, a fault at every second or third restore does not look like a repetition.
                    again = (future(seed), future(seed), future(1)) == (other, other, first)
                    return f"{text} (seeds 1 and {seed}; {told(env)})" if again else ""
        finally:
            release(snap)
    return ""


def must_decide(
    scene: Scene,
    env: AnyEnv,
    budget: Budget,
    call: str,
    future: Callable[[int], Any],
    captured: Any,
    rng: np.random.Generator,
) -> None:
    """Fail unless futures differ from seed to seed and each seed repeats its own; for a seed that changed the future.

    Args:
        scene: scene in which the calls are made.
        env: environment whose streams the message names.
        budget: limits the number of seeds.
        call: name of the call with a seed that changed the future, for the message.
        future: function from a seed to its future.
        captured: the future without a seed.
        rng: draws the seeds; never 0, which may be taken for no seed.

    Raises:
        Failed: all seeds give one future, or a seed does not repeat its own.
    """
    first: Any = None
    tried = 0
    for index in budget.spending(MANY, at_least=LEAST):
        seed = int(rng.integers(1, 2**31))
        mark = len(scene.lines)
        found = future(seed)
        tried += 1
        if index and found == first:
            del scene.lines[mark:]  # one of them is enough to see it
        if index == 0:
            one, first = seed, found
        elif found != first:
            if (future(seed), future(one)) != (found, first):
                scene.fail(f"{call} twice gave two futures, with one of the seeds {one} and {seed}")
            return
    every = "is that without a seed: no other seed does" if first == captured else "is not that without a seed"
    scene.fail(
        f"nothing is random, but {call} changed the future: {tried} more seeds give one and the same future, which "
        f"{every}, so that what differs is not drawn ({told(env)})"
    )


Seeded = Callable[[Scene, Walk, int, int, Sequence[Op]], list[Outcome]]
"""Outcomes of calls after a restore or fork with a seed: (scene, walk, point, seed, calls)."""


def nothing_else(subject: Subject, budget: Budget, rng: np.random.Generator, call: str, seeded: Seeded) -> None:
    """Fail if a seed given in the middle of an episode changes what no draw decides.

    The middle is chosen because right after a reset there is little state to lose. Values that draws decide differ
    between runs whose streams were renewed, or from seed to seed; all others must be as in the uninterrupted run.

    Args:
        subject: the subject. Its first control run is played, if it repeats itself and its draws are recognised.
        budget: limits the number of seeds.
        rng: draws moments and seeds.
        call: text that names the call with a seed.
        seeded: makes the call at a moment and plays what follows.

    Raises:
        Failed: a value that no draw decides has changed.
    """
    control = subject.control(0, budget.steps)
    if not control.repeatable or (subject.noise and not subject.noise.startswith(OTHER_DRAWS)):
        return
    last = control.last
    points = {max(1, last // 2)}
    if not budget.waits:
        points |= {max(1, last - FOLLOWED), int(rng.integers(1, max(2, last)))}
    with Scene(subject) as scene:
        walk = scene.walk(control, points, until=max(points))
        for point in walk.points:
            ops = control.ops[point : min(point + FOLLOWED, last)]
            expected = _parts(control.outcomes[point : point + len(ops)])
            first = _parts(seeded(scene, walk, point, int(rng.integers(1, 2**31)), ops))
            changed = {part for part in expected.keys() | first.keys() if expected.get(part) != first.get(part)}
            for trial in range(RENEWED if changed else 0):
                with opened(subject) as env:
                    seed_spaces(env, control.seed)
                    for op in control.ops[:point]:
                        subject.call(env, op)
                    try:
                        renew_streams(env, trial)
                    except (AttributeError, TypeError):  # a proxy's: there is nothing to compare with
                        return
                    seed_spaces(env, trial)
                    drawn = _parts([subject.call(env, op)[0] for op in ops])
                changed = {part for part in changed if drawn.get(part) == expected.get(part)}
                if not changed:
                    break
            tried = 1
            for _ in budget.spending(MANY if changed else 0, at_least=LEAST):
                mark = len(scene.lines)
                found = _parts(seeded(scene, walk, point, int(rng.integers(1, 2**31)), ops))
                del scene.lines[mark:]
                changed = {part for part in changed if found.get(part) == first.get(part)}
                tried += 1
                if not changed:
                    break
            if changed:
                number, name, key = part = min(changed)
                scene.fail(
                    f"{call} changes what no draw decides: in call {number + 1} after it {name}{key} is, for "
                    f"{tried} seeds, {show(first.get(part))}, and in uninterrupted runs {show(expected.get(part))}",
                    {"snapshot after calls": point, "seeds": tried},
                )


def _parts(outcomes: Sequence[Outcome]) -> dict[tuple[int, str, str], Canonical]:
    """Fields of outcomes by number of the call and name; entries of dicts have a name of their own too.

    The hidden state is left out: it may hold numbers drawn ahead, and no draw decides how many of them a seed leaves.
    """
    parts: dict[tuple[int, str, str], Canonical] = {}
    for number, outcome in enumerate(outcomes):
        for name, value in outcome._replace(state=None)._asdict().items():
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Items):
                parts |= {(number, name, f"[{show(key)}]"): item for key, item in value[1]}
            else:
                parts[number, name, ""] = value
    return parts
