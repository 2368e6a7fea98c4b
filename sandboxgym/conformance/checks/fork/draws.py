"""Level 2: random streams of forks: the same without a seed, independent with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.checks.restore.runs import SHORT, controls
from sandboxgym.conformance.harness import seeds as seeding
from sandboxgym.conformance.harness.canonical import show
from sandboxgym.conformance.harness.scenario import Scene, Walk, first_difference, known_seed, streams
from sandboxgym.conformance.subject import Op, Outcome, Subject


@check(
    "fork.unseeded_exact",
    level=2,
    needs=("rng",),
    after=("api.protocol",),
    hazard="Draws in forks without a seed are not those of the source: branches meant to share random numbers do not.",
    blind="Streams that are neither np_random nor a space's; where they matter, fork.trace_equality sees them.",
)
def unseeded_exact(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the random streams and np_random_seed of each child of ``fork(3)``, bit by bit, with the source's."""
    compared: set[str] = set()
    for control in controls(subject, budget):
        with Scene(subject) as scene:
            env = scene.start(control)
            scene.play(env, control.ops[: max(1, control.last // 2)])
            children = scene.fork(env, 3)
            expected, seed = streams(env), known_seed(env)
            for number, child in enumerate(children):
                found = streams(child)
                if seed is not None and (other := known_seed(child)) != seed:
                    scene.fail(f"child {number} of fork(3) has np_random_seed {show(other)}, its source {show(seed)}")
                for name, bits in expected.items():
                    if bits is not None and found.get(name) != bits:
                        scene.fail(f"child {number} of fork(3) has another random stream {name} than its source")
                    if bits is not None:
                        compared.add(name)
    if not compared:
        raise Skipped("no stream was found to compare, of np_random or of a space; see streams.exact")
    return {"streams": sorted(compared)}


@check(
    "fork.seeded_independent",
    level=2,
    after=("api.protocol",),
    hazard="Seeded siblings share their random draws: they are one sample, counted k times.",
    blind="Correlations between streams that differ (see stochastic.siblings_independent).",
)
def seeded_independent(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Forks with seeds: np_random of each child must differ from its siblings' and the source's.
    This includes seed 0 and a source that is itself a fork. Other seeds must give other streams, and equal seeds equal
    children, hundreds of times. If nothing is random, all children must continue like the source; if something is, not
    all may do the same. A seed in the middle of an episode must change nothing but random draws.
    """
    control = subject.control(0, budget.steps)
    random_ = seeding.random_by(subject.noise)
    k = max(4, budget.forks)
    futures: set[Any] = set()
    distinct = 0
    with Scene(subject) as scene:
        walk = scene.walk(control, [1])
        env = walk.env
        seeds = [0, *(int(seed) for seed in rng.integers(2**31, size=2))]
        ops, end = control.ops[1 : control.last], control.last
        seen: dict[int, list[Any]] = {}
        for number, seed in enumerate((*seeds, seeds[0])):
            scene.restore(env, walk.snaps[1])
            parent = scene.fork(env, 1)[0] if number == 1 else env
            source = streams(parent)
            children = scene.fork(parent, k, seed=seed)
            bits = [streams(child) for child in children]
            for name in [name for name in source if name.endswith(".np_random")]:
                found = [source[name], *(each.get(name) for each in bits)]
                made = [one for one in found if one is not None]
                if len(set(map(repr, made))) < len(made):
                    scene.fail(f"fork({k}, seed={seed}) gave two environments the same random stream {name}")
                distinct += len(made)
            played = [tuple(scene.play(child, ops)) for child in children]
            if (
                seed in seen
                and not subject.noise.startswith("two runs")
                and (seen[seed][0] != played or seen[seed][1] != bits)
            ):
                scene.fail(f"fork({k}, seed={seed}) twice gave different children")
            for before in seen.values():
                same = [
                    n
                    for n in bits[0]
                    if n.endswith(".np_random") and bits[0][n] is not None and bits[0][n] == before[1][0].get(n)
                ]
                if seed not in seen and same:
                    scene.fail(f"fork(k, seed=S) gives the same random stream {same[0]} for two seeds S")
            seen[seed] = [played, bits]
            futures |= set(played)
            for child in children if parent is env else (*children, parent):
                scene.forget(child)
        captured = tuple(walk.expected[1:end])
        if not subject.noise and futures != {captured}:

            def of(seed: int) -> list[tuple[Outcome, ...]]:
                scene.restore(env, walk.snaps[1])
                made = scene.fork(env, k, seed=seed)
                found = [tuple(scene.play(child, ops)) for child in made]
                for child in made:
                    scene.forget(child)
                return found

            odd = first_difference(captured, next(future for future in futures if future != captured))
            seeding.must_decide(scene, env, budget, f"fork({k}, seed=…) ({odd})", of, [captured] * k, rng)
            random_ = True
        if random_ and len(futures) == 1 and _varies(scene, walk, ops, next(iter(futures)), rng):
            for _ in range(12):
                scene.restore(env, walk.snaps[1])
                for child in scene.fork(env, k, seed=int(rng.integers(2**31))):
                    futures.add(tuple(scene.play(child, ops)))
                    scene.forget(child)
                if len(futures) > 1:
                    break
            else:
                scene.fail("all seeded forks have one and the same future, although futures are random")
        again = 0
        if not subject.noise.startswith("two runs"):
            scene.restore(env, walk.snaps[1])
            first: list[Outcome] = []
            for index in budget.spending(budget.repeats, seconds=budget.seconds / 2, at_least=10):
                with scene.iteration(index):
                    (child,) = scene.fork(env, 1, seed=7)
                    played_now = scene.play(child, ops[:SHORT])
                    first = first or played_now
                    if played_now != first:
                        text = first_difference(first, played_now)
                        scene.fail(f"fork number {index + 1} with one and the same seed goes on differently: {text}")
                    scene.forget(child)
                    again += 1

    def forked(scene: Scene, walk: Walk, point: int, seed: int, ops: Sequence[Op]) -> list[Outcome]:
        scene.restore(walk.env, walk.snaps[point])
        (child,) = scene.fork(walk.env, 1, seed=seed)
        found = scene.play(child, ops)
        scene.forget(child)
        return found

    seeding.nothing_else(subject, budget, rng, "fork(1, seed=…)", forked)
    return {
        "futures": len(futures),
        "random": random_,
        **seeding.decided(subject, random_),
        "streams compared": distinct,
        "forks with one seed": again,
    }


def _varies(scene: Scene, walk: Walk, ops: Sequence[Op], future: Any, rng: np.random.Generator) -> bool:
    """True if futures of this moment are random often enough for equal forks to be a fault."""
    if scene.subject.noise.startswith(seeding.OTHER_DRAWS):
        return True
    mark, others = len(scene.lines), 0
    for _ in range(seeding.LEAST):
        scene.restore(walk.env, walk.snaps[1], seed=int(rng.integers(1, 2**31)))
        others += tuple(scene.play(walk.env, ops)) != future
    del scene.lines[mark:]
    return others >= seeding.VARY
