"""Level 3: with random futures, a restore changes no probability, and seeded siblings are independent.

If the random streams are captured, futures are compared exactly (`stochastic.coupled`). Statistics are needed to show
that a *seed* given to ``restore`` or ``fork`` gives a new draw from the right distribution, and for environments whose
randomness is not captured. `continuations` draws the samples, `distribution` compares them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Inconclusive, Skipped, check
from sandboxgym.conformance.harness.scenario import Scene, first_difference
from sandboxgym.conformance.stats import tests as st
from sandboxgym.conformance.stats.distribution import RETURNS, SIBLINGS, TRANSITIONS, Study, study
from sandboxgym.conformance.subject import Subject


@check(
    "stochastic.coupled",
    level=3,
    needs=("rng",),
    after=("api.protocol",),
    hazard="Draws after a restore are not those of the captured streams: no result can be repeated.",
    blind="Streams that no call of the recorded runs draws from.",
)
def coupled(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Checks that a restore without a seed, after one with a seed, continues like the uninterrupted run.
    A restore with a seed must give the same future twice, also in another environment, and a snapshot taken in that
    future must repeat the rest of it.
    """
    compared = 0
    if not subject.noise:
        raise Skipped("no randomness seen: runs with other draws give the same, and restore.* compare those exactly")
    for index in range(max(1, budget.traces // 2)):
        control = subject.control(index, budget.steps)
        last = control.last
        points = {1, int(rng.integers(1, last)) if last > 1 else 1, max(1, last // 2)}
        with Scene(subject) as scene:
            walk = scene.walk(control, points)
            other = scene.start(control)
            for point in walk.points:
                seed = int(rng.integers(2**31))
                rest = control.ops[point:last]
                scene.restore(walk.env, walk.snaps[point], seed=seed)
                once = scene.play(walk.env, rest)
                scene.restore(walk.env, walk.snaps[point])
                compared += scene.expect(walk.env, walk, point, "a restore after one with a seed is not exact")
                for env in (walk.env, other):
                    scene.restore(env, walk.snaps[point], seed=seed)
                    middle = len(rest) // 2
                    twice = scene.play(env, rest[:middle])
                    snap = scene.snapshot(env)
                    twice += scene.play(env, rest[middle:])
                    compared += len(rest)
                    if difference := first_difference(once, twice):
                        scene.fail(f"two restores with seed {seed} go on differently: {difference}")
                    scene.restore(env, snap)
                    again = scene.play(env, rest[middle:])
                    if difference := first_difference(once[middle:], again):
                        scene.fail(f"a snapshot of what was restored with a seed is not exact: {difference}")
    return {"calls compared": compared}


def _judge(subject: Subject, budget: Budget, check: str, what: str) -> dict[str, Any]:
    """Verdict of a check from the study's p-values."""
    found = study(subject, budget)
    if found.reason:
        raise Skipped(found.reason)
    tests, adjusted = found.tests.get(check, {}), found.adjusted
    if not tests:
        raise Skipped("what it compares was always the same where futures are random")
    evidence: dict[str, Any] = {
        "tests": [{**test.to_json(), "adjusted p": adjusted[name]} for name, test in tests.items()],
        "tests in all": len(adjusted),
        "false alarms of the run": st.ALPHA,
        "designs": found.designs,
        "calibration": found.calibration,
    }
    rejected = sorted((name for name in tests if adjusted[name] <= st.ALPHA), key=lambda name: adjusted[name])
    if rejected:
        test = tests[rejected[0]]
        effect = ""
        if test.effect is not None:
            effect = f"; {test.distance} {test.effect[0]:.3f}, at least {test.effect[1]:.3f}"
        message = f"{what}: {test.name} (adjusted p = {adjusted[test.name]:.2g}{effect})"
        script = found.scripts.get(test.name.rpartition(", ")[2])
        raise Failed(message, evidence, None if script is None else _runnable(subject, script))
    if not found.calibration["within the level"]:
        raise Inconclusive(f"the calibration rejects too often: {found.calibration['rejected']}", evidence)
    if min(found.drift.values(), default=1.0) <= st.ALPHA / 10:
        raise Inconclusive("uninterrupted futures drift by themselves from draw to draw", evidence)
    return evidence


def _runnable(subject: Subject, body: str) -> str:
    return Scene(subject).script() + body


def _powerful(subject: Subject, found: Study, tests: dict[str, st.Comparison], evidence: dict[str, Any]) -> None:
    """Raise unless a shift of the promised size would have been found in every place's main test."""
    powers = [
        (st.power(test.sizes, test.cells, found.shift, found.strictest), test.sizes, test.cells)
        for test in tests.values()
        if test.cells >= 2
    ]
    if not powers:
        raise Inconclusive("no test with a known power applies", evidence)
    chance, sizes, cells = max(powers)
    evidence["power"] = {
        "TV": found.shift,
        "at least": round(chance, 4),
        "detectable TV": round(st.detectable(sizes, cells, found.strictest), 4),
    }
    if chance < st.POWER:
        _weak(
            subject,
            f"{sizes[1]} futures a side find a total variation distance of {found.shift} with probability "
            f"{chance:.3f} only, {st.POWER} is asked for",
            evidence,
        )


def _weak(subject: Subject, reason: str, evidence: dict[str, Any]) -> NoReturn:
    """Raise for too few futures: a skip if streams are captured, because exact checks cover them; else inconclusive."""
    if subject.capabilities.rng and not subject.noise.startswith("two runs"):
        raise Skipped(f"{reason}; that streams are exact is for stochastic.coupled and streams.*, without a sample")
    raise Inconclusive(reason, evidence)


@check(
    TRANSITIONS,
    level=3,
    after=("api.protocol",),
    hazard="Siblings are drawn from another distribution than uninterrupted episodes: their mean return is biased.",
    blind="Shifts that show in neither the first nor the third transition, or are smaller than the detectable one in "
    "the evidence; in the replayed design, randomness from generators that the suite does not find; in the live "
    "design, shifts hidden by the variety of pasts.",
)
def transition_distribution(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Samples the next transitions many times, restored and uninterrupted, and compares their distributions.
    The uninterrupted ones are from replays of one run with new draws (the replayed design) or from runs with many seeds
    (the live design). The tests are χ² of whole transitions (or of cells of continuous ones), and the energy distance
    of their numbers.
    """
    evidence = _judge(subject, budget, TRANSITIONS, "the next transitions after a restore have another distribution")
    found = study(subject, budget)
    _powerful(subject, found, found.tests[TRANSITIONS], evidence)
    return evidence


@check(
    RETURNS,
    level=3,
    after=("api.protocol",),
    hazard="Returns of siblings have another distribution than those of uninterrupted episodes: every advantage is "
    "biased.",
    blind="Shifts smaller than the detectable one in the evidence, or beyond the budget's number of steps; the limits "
    "of each design as in stochastic.transition_distribution.",
)
def return_distribution(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the returns to the end of the episode (by ranks and χ²), and how and when it ends.
    The samples are those of stochastic.transition_distribution.
    """
    evidence = _judge(subject, budget, RETURNS, "the returns after a restore have another distribution")
    found = study(subject, budget)
    _powerful(subject, found, found.tests[RETURNS], evidence)
    return evidence


@check(
    SIBLINGS,
    level=3,
    after=("api.protocol",),
    hazard="Siblings repeat each other: a group of four counts as four samples and is worth less.",
    blind="Dependence that does not make siblings agree more often, such as antithetic draws; for continuous outcomes, "
    "all but exact repetition.",
)
def siblings_independent(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Samples many groups of siblings, by ``fork(k, seed=…)`` and by restores with neighbouring seeds.
    Tests whether siblings of one group agree more often than those of different groups, and whether the first of each
    group, the others and uninterrupted episodes have one distribution (or forks and restores, if no uninterrupted ones
    start from this state). Where streams are declared captured, forks without a seed must all agree.
    """
    evidence = _judge(subject, budget, SIBLINGS, "seeded siblings are not independent draws from one distribution")
    found = study(subject, budget)
    if subject.capabilities.rng:
        evidence["unseeded forks that agree"] = _unseeded(subject, budget)
    chances = {
        name: round(st.dependence_power(chance, pairs, found.repeats, found.strictest), 4)
        for name, (chance, pairs) in found.chance.items()
    }
    evidence["power"] = {"share of repeating pairs": found.repeats, "of the tests": chances}
    for how in ("fork", "restore"):
        best = max((value for name, value in chances.items() if name.startswith(how)), default=0.0)
        if best < st.POWER:
            reason = (
                f"families of {how}s find that {found.repeats:.0%} of pairs repeat with probability {best:.2f} only"
            )
            _weak(subject, reason, evidence)
    return evidence


def _unseeded(subject: Subject, budget: Budget) -> int:
    control = subject.control(0, budget.steps)
    if not control.repeatable:
        return 0
    point = max(1, control.last // 2)
    with Scene(subject) as scene:
        walk = scene.walk(control, [point])
        scene.restore(walk.env, walk.snaps[point])
        children = scene.fork(walk.env, max(2, budget.forks))
        futures = [scene.play(child, control.ops[point : control.last]) for child in children]
        for future in futures[1:]:
            if difference := first_difference(futures[0], future):
                scene.fail(f"forks without a seed go on differently: {difference}")
    return len(futures)
