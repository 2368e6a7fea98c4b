"""Level 1: random streams after restores without a seed and with one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.checks.restore.runs import (
    SHORT,
    controls,
    same_streams,
)
from sandboxgym.conformance.harness import seeds
from sandboxgym.conformance.harness.canonical import show
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    first_difference,
    known_seed,
    streams,
)
from sandboxgym.conformance.subject import AnyEnv, Op, Outcome, Subject


@check(
    "restore.random_streams",
    level=1,
    needs=("rng",),
    after=("api.protocol",),
    hazard="Draws after a restore are not those of the uninterrupted run: branches meant to share random numbers do "
    "not.",
    blind="Streams that are neither np_random nor a space's; where they matter, restore.trace_equality sees them.",
)
def random_streams(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares np_random, its seed and the streams of spaces, in every layer, at a snapshot and after its restore.
    It is restored in the same environment after further draws, and in a new one. If an episode begun by ``reset``
    without a seed is restored, the same actions must have the same outcomes.
    """
    compared: set[str] = set()
    with Scene(subject) as scene:
        env, ops = scene.make(), subject.control(0, budget.steps).ops
        scene.reset(env, options=subject.options(0))
        snap = scene.snapshot(env)
        first = scene.play(env, ops[1:])
        for target in (env, scene.make()):
            scene.restore(target, snap)
            if text := first_difference(first, scene.play(target, ops[1:])):
                scene.fail(f"restored after a reset without a seed, the same actions give something else: {text}")
    for control in controls(subject, budget):
        with Scene(subject) as scene:
            env = scene.start(control)
            scene.play(env, control.ops[: max(1, control.last // 2)])
            snap = scene.snapshot(env)
            expected, seed = streams(env), known_seed(env)
            name = scene.name(env)
            scene.note(f"{name}.action_space.sample(), {name}.observation_space.sample()  # draws in between")
            for space in (env.action_space, env.observation_space):
                _draw(space)
            scene.play(env, control.ops[max(1, control.last // 2) :])
            for target in (env, scene.make()):
                scene.restore(target, snap)
                where = "after a restore" if target is env else "after a restore in a new environment"
                same_streams(scene, expected, streams(target), where)
                if seed is not None and (other := known_seed(target)) != seed:
                    scene.fail(f"np_random_seed is {show(other)} {where}, it was {show(seed)} at the captured moment")
            compared |= {name for name, bits in expected.items() if bits is not None}
    if not compared:
        raise Skipped("no stream was found to compare, of np_random or of a space; see streams.exact")
    return {"streams": sorted(compared)}


def _draw(space: Any) -> None:
    with suppress(Exception):  # a space that cannot sample has no stream to lose
        space.sample()


@check(
    "restore.seeded",
    level=1,
    after=("api.protocol",),
    hazard="Siblings restored with different seeds share their random draws, or a seed changes more than the draws.",
    blind="Whether the new streams have the right distribution (see stochastic.transition_distribution).",
)
def seeded(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores with seeds, each of which must give the captured observation and repeat its own future.
    One seed is repeated hundreds of times. Different seeds (0 is one) must give different states of np_random; if all
    give one future, nothing may be random, and it must be that of the uninterrupted run. Later restores without a seed
    must be exact, and a seed in the middle of an episode must change nothing but random draws.
    """
    control = subject.control(0, budget.steps)
    again = 0
    exact = subject.capabilities.rng or not subject.noise
    random_ = seeds.random_by(subject.noise)
    with Scene(subject) as scene:
        point = max(1, control.last // 3)
        walk = scene.walk(control, [1, point])
        env, end = walk.env, control.last
        futures = set()
        ops = control.ops[1:end]
        captured = tuple(walk.expected[1:end])
        scene.restore(env, walk.snaps[1])
        exact_bits = streams(env)
        for index in budget.spending(64, at_least=64):
            seed = int(rng.integers(2**31)) if index else 0
            result = scene.restore(env, walk.snaps[1], seed=seed)
            scene.expect_returned(env, walk, 1, result, f"restored with seed={seed}")
            bits = streams(env)
            future = tuple(scene.play(env, ops))
            unlike = not subject.noise and future != captured
            if unlike or (index < 3 and (exact or random_)):
                scene.restore(env, walk.snaps[1], seed=seed)
                same_streams(scene, bits, streams(env), f"after restoring with seed={seed} again")
                if tuple(scene.play(env, ops)) != future:
                    scene.fail(f"restore(snap, seed={seed}) twice gave two futures")
            if index == 0:
                first_bits = bits
                if subject.capabilities.rng:
                    _other_streams(
                        scene, exact_bits, bits, "restore(snap, seed=0) left the random stream of restore(snap)"
                    )
            elif index < 3:
                _other_streams(scene, first_bits, bits)
            futures.add(future)
            if index >= 3 and (not random_ or len(futures) > 1):
                break
        if subject.noise.startswith(seeds.OTHER_DRAWS) and len(futures) == 1:
            scene.fail("64 seeds gave one and the same future, although futures are random: the seed has no effect")
        if not subject.noise and futures != {captured}:

            def of(seed: int) -> tuple[Outcome, ...]:
                scene.restore(env, walk.snaps[1], seed=seed)
                return tuple(scene.play(env, ops))

            odd = first_difference(captured, next(future for future in futures if future != captured))
            seeds.must_decide(scene, env, budget, f"restore(snap, seed=…) ({odd})", of, captured, rng)
            random_, exact = True, subject.capabilities.rng
        if exact or random_:
            again = _again(scene, env, walk.snaps[1], ops[:SHORT], budget)
        if exact:
            result = scene.restore(env, walk.snaps[1])
            scene.expect_returned(env, walk, 1, result, "restored without a seed from a handle restored with seeds")
            scene.expect(env, walk, 1, "restored without a seed from a handle restored with seeds")
            result = scene.restore(env, walk.snaps[point])
            scene.expect_returned(env, walk, point, result, "restored without a seed after restores with seeds")
            scene.expect(env, walk, point, "restored without a seed after restores with seeds")

    def restored(scene: Scene, walk: Walk, point: int, seed: int, ops: Sequence[Op]) -> list[Outcome]:
        scene.restore(walk.env, walk.snaps[point], seed=seed)
        return scene.play(walk.env, ops)

    seeds.nothing_else(subject, budget, rng, "restore(snap, seed=…)", restored)
    return {
        "seeds": index + 1,
        "futures": len(futures),
        "random": random_,
        **seeds.decided(subject, random_),
        "restores with one seed": again,
    }


def _again(scene: Scene, env: AnyEnv, snap: Any, ops: Sequence[Op], budget: Budget) -> int:
    """Restore with one seed hundreds of times; return the number of restores."""
    first: list[Outcome] = []
    for index in budget.spending(budget.repeats, seconds=budget.seconds / 2, at_least=10):
        with scene.iteration(index):
            scene.restore(env, snap, seed=7)
            found = scene.play(env, ops)
            first = first or found
            if found != first:
                text = first_difference(first, found)
                scene.fail(f"restore number {index + 1} with one and the same seed goes on differently: {text}")
    return index + 1


def _other_streams(
    scene: Scene, one: dict[str, Any], other: dict[str, Any], what: str = "two seeds left the same random stream"
) -> None:
    for name, bits in one.items():
        if name.endswith(".np_random") and bits is not None and other.get(name) == bits:
            scene.fail(f"{what} {name}", {"stream": name})
