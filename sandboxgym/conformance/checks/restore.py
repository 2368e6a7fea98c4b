"""Level 1: after ``restore`` the future equals the uninterrupted one, for every way to the restore."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.check import BUDGETS, SHORTEST, Budget, Failed, Skipped, check
from sandboxgym.conformance.checks import restore_lasting as restore_lasting  # registers its checks
from sandboxgym.conformance.harness import other_process, seeds
from sandboxgym.conformance.harness.branching import LENGTH, WIDTH, branches, pictured
from sandboxgym.conformance.harness.canonical import difference, show
from sandboxgym.conformance.harness.coverage import coverage, ending
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    comparable,
    first_difference,
    known_seed,
    outcome_difference,
    streams,
)
from sandboxgym.conformance.harness.whole import whole_episodes
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Outcome, Subject, snapshot
from sandboxgym.conformance.supervision import scratch

SHORT = 4
"""Calls compared after each of hundreds of restores."""


def points_of(control: Control, rng: np.random.Generator, middle: int = 2) -> list[int]:
    """Moments of snapshots: after the reset, in the middle, before the last step, after the end of the episode."""
    last = control.last
    inside = rng.integers(1, last, size=middle).tolist() if last > 1 else []
    points = {1, *inside, max(1, last - 1), last}
    if control.ended is not None:
        points.add(min(last + 1, len(control.ops)))  # after a step past the end
    return sorted(int(point) for point in points)


def controls(subject: Subject, budget: Budget) -> list[Control]:
    """The control runs of a budget."""
    return [subject.control(index, budget.steps) for index in range(budget.traces)]


def in_time(budget: Budget, pool: Sequence[Control]) -> Iterator[Control]:
    """Iterate over control runs: the first two (one on-policy, one not), the others while time remains."""
    return (pool[index] for index in budget.spending(len(pool), at_least=2))


def longer(subject: Subject, budget: Budget) -> list[Control]:
    """One run four times as long, where the usual one stopped before its episode's end and calls are fast."""
    slow = budget.steps < BUDGETS.get(budget.name, budget).steps
    if slow or subject.control(0, budget.steps).ended is not None:
        return []
    return [subject.control(0, 4 * budget.steps)]


@check(
    "restore.trace_equality",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Branches start from a state that is not the one the backbone was in: every advantage is biased.",
    blind="State that shows nowhere in the recorded calls (give observe_state).",
)
def trace_equality(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Takes snapshots at the start, in the middle, before and after the end of episodes of several seeds, on- and
    off-policy, some of them long; restores each, in the environment that continued to the end, with what surrounds it
    changed in between (global random streams, environment variables, time), and compares the whole rest with an
    uninterrupted run.
    """
    compared = restores = traces = 0
    kinds = set()

    def trace(control: Control, middle: int) -> None:
        nonlocal compared, restores, traces
        with Scene(subject) as scene:
            walk = scene.walk(control, points_of(control, rng, middle))
            for point in reversed(walk.points):
                with perturbed(scene, rng):
                    scene.restore(walk.env, walk.snaps[point])
                    compared += scene.expect(walk.env, walk, point, "a restored environment goes on differently")
                restores += 1
        kinds.add("an uninterrupted run" if control.repeatable else "the original environment")
        traces += 1

    for index in budget.spending(10 * budget.traces, at_least=2 * budget.traces):
        trace(subject.control(index, budget.steps), 2 if index < budget.traces else 4)
    for control in longer(subject, budget):
        trace(control, 4)
    return {"traces": traces, "restores": restores, "calls compared": compared, "compared with": sorted(kinds)}


@contextmanager
def perturbed(scene: Scene, rng: np.random.Generator) -> Iterator[None]:
    """Change global random streams, an environment variable and the time: a restore must not depend on them."""
    seed = int(rng.integers(2**31))
    states = random.getstate(), np.random.get_state()
    name = f"SANDBOXGYM_CONFORMANCE_{seed}"
    clocks = {clock: getattr(time, clock) for clock in ("time", "monotonic", "perf_counter")}
    clocks |= {f"{clock}_ns": getattr(time, f"{clock}_ns") for clock in clocks}
    shift = 3600 * 24 * 3
    scene.note(f"import os, random, time; import numpy as np; random.seed({seed}); np.random.seed({seed})")
    try:
        random.seed(seed)
        np.random.seed(seed)
        os.environ[name] = "1"
        for clock, real in clocks.items():
            later = shift * 10**9 if clock.endswith("_ns") else shift
            setattr(time, clock, lambda real=real, later=later: real() + later)
        yield
    finally:
        for clock, real in clocks.items():
            setattr(time, clock, real)
        os.environ.pop(name, None)
        random.setstate(states[0])
        np.random.set_state(states[1])


@check(
    "restore.other_env",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Part of the state stays behind in the environment that took the snapshot; siblings made elsewhere differ.",
    blind="State shared by all environments of a process: durable.cross_process.",
)
def other_env(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores in a new environment that was never reset, in one that was, and in one far into another episode."""
    compared = restores = 0
    pool = controls(subject, budget)
    for index, control in enumerate(pool):
        other = pool[(index + 1) % len(pool)]
        with Scene(subject) as scene:
            walk = scene.walk(control, points_of(control, rng, middle=1))
            for point in walk.points:
                for history in (0, 1, len(other.ops), max(1, other.last - 1)):
                    env = scene.start(other)
                    scene.play(env, other.ops[:history])
                    scene.restore(env, walk.snaps[point])
                    where = "one never reset" if history == 0 else f"one used for {history} calls"
                    compared += scene.expect(env, walk, point, f"restored in another environment ({where})")
                    restores += 1
                    scene.forget(env)
                    if restores > 8 and _late(scene, budget):
                        break
    return {"restores": restores, "calls compared": compared}


@check(
    "restore.many",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A snapshot that works once, or 49 times of 50, corrupts a few branches of every run.",
    blind="Faults rarer than the restores made: see the evidence for what would have been found with 99.9 %.",
)
def many(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores one snapshot hundreds of times, with steps in between, then takes and restores hundreds of snapshots;
    after each compares what follows with the control run, every tenth time to the very end.
    """
    control = subject.control(0, budget.steps)
    restored = taken = 0
    with Scene(subject) as scene:
        point = max(1, control.last // 2)
        walk = scene.walk(control, [point])
        for index in budget.spending(budget.repeats, at_least=20):
            with scene.iteration(index):
                result = scene.restore(walk.env, walk.snaps[point])
                what = f"restore number {index + 1} of one snapshot"
                scene.expect_returned(walk.env, walk, point, result, what)
                scene.expect(walk.env, walk, point, what, calls=None if index % 10 == 0 else SHORT)
                restored += 1
    with Scene(subject) as scene:
        walk = scene.walk(control, [point])
        detour = control.ops[point : point + 1]
        for index in budget.spending(budget.repeats, at_least=20):
            with scene.iteration(index):
                scene.restore(walk.env, walk.snaps[point])
                snap = scene.snapshot(walk.env)
                scene.play(walk.env, detour)
                result = scene.restore(walk.env, snap)
                what = f"snapshot number {index + 1} of the same state"
                scene.expect_returned(walk.env, walk, point, result, what)
                scene.expect(walk.env, walk, point, what, calls=SHORT)
                scene.drop(snap)
                taken += 1
    return {"restores of one": restored, "snapshots": taken, **finds(min(restored, taken))}


def finds(trials: int) -> dict[str, Any]:
    """The smallest rate of faults that so many trials would have found with probability 0.999."""
    return {"would find (99.9 %) a fault in": f"1 of {max(1, int(1 / (1 - 0.001 ** (1 / max(1, trials)))))}"}


@check(
    "restore.any_order",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A search that goes back and forth between branch points lands in a mixture of them.",
    blind="Orders not drawn.",
)
def any_order(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Keeps snapshots of several points of two episodes and restores them in drawn orders: older after newer, newer
    after older, the same twice, with a few calls in between.
    """
    pool = controls(subject, budget)
    restores = 0
    for index, control in enumerate(pool):
        with Scene(subject) as scene:
            walks = [scene.walk(each, points_of(each, rng, 3)) for each in (control, pool[(index + 1) % len(pool)])]
            env = walks[0].env
            for number in budget.spending(budget.repeats // 4, seconds=budget.seconds / len(pool), at_least=12):
                walk = walks[number % 3 == 2]
                point = int(rng.choice(walk.points))
                result = scene.restore(env, walk.snaps[point])
                scene.expect_returned(env, walk, point, result, "restored in a drawn order")
                scene.expect(env, walk, point, "restored in a drawn order", calls=int(rng.integers(0, 8)))
                restores += 1
    return {"restores": restores}


@check(
    "restore.nested",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Trees deeper than one level start from states that drift: a snapshot of a restored state is another state.",
    blind="Very deep chains: resources.depth.",
)
def nested(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Takes each snapshot from an environment that was itself just restored, call by call, in turn in two
    environments; then restores them all, newest and oldest first.
    """
    taken = 0
    for control in in_time(budget, controls(subject, budget)):
        with Scene(subject) as scene:
            walk = scene.walk(control, [1])
            envs = [walk.env, scene.start(control)]
            snaps = {1: walk.snaps[1]}
            for point in range(1, min(control.last, 12)):
                env = envs[point % 2]
                scene.restore(env, snaps[point])
                if point % 2:  # without a step in between
                    snaps[point] = scene.snapshot(env)
                    scene.restore(envs[1], snaps[point])
                    env = envs[1]
                scene.expect(env, walk, point, f"restored from a chain of {point} snapshots", calls=1)
                snaps[point + 1] = scene.snapshot(env)
                taken += 1
            for order in (sorted(snaps), sorted(snaps, reverse=True)):
                for point in order:
                    result = scene.restore(walk.env, snaps[point])
                    what = f"a snapshot taken at the end of a chain of {point}"
                    scene.expect_returned(walk.env, walk, point, result, what)
                    scene.expect(walk.env, walk, point, what)
    return {"snapshots of restored states": taken}


@check(
    "restore.after_reset",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="What reset() loads (task, level, goal) stays, and the restored agent plays one game by another's rules.",
    blind="Tasks that neither seeds nor reset_options reach.",
)
def after_reset(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """A restore is exact after resets to other seeds and tasks and play there (a little, or to the end); and a whole
    other episode after a restored one is what it is after an uninterrupted one.
    """
    restores = 0
    pool = controls(subject, budget)
    for index, control in enumerate(pool):
        with Scene(subject) as scene:
            walk = scene.walk(control, points_of(control, rng, 1))
            for number, point in enumerate(walk.points):
                other = pool[(index + 1 + number) % len(pool)]
                calls = (1, 2, other.last, len(other.ops))[number % 4]
                scene.play(walk.env, other.ops[:calls])
                result = scene.restore(walk.env, walk.snaps[point])
                scene.expect_returned(walk.env, walk, point, result, "restored after reset() to another episode")
                scene.expect(walk.env, walk, point, "restored after reset() to another episode")
                restores += 1
            following = pool[(index + 1) % len(pool)]
            if control.repeatable:
                both = scene.followed(control, following, control.last)
                scene.restore(walk.env, walk.snaps[walk.points[0]])
                what = "the episode restored, or the one after it"
                scene.expect(walk.env, both, walk.points[0], what)
    return {"restores": restores}


@check(
    "restore.after_done",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="The done flag is lost or sticks: finished episodes go on, or restored ones end at once.",
    blind="Episodes that do not end within the recorded steps.",
)
def after_done(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores a finished episode, here and in a new environment: steps and the next reset are as in one that was
    never interrupted; restoring an earlier point of it takes the end back. Episodes of every way of ending that a
    search with the environment's own snapshots finds are among them.
    """
    tried = 0
    endings = set()
    usual = [*controls(subject, budget), *longer(subject, budget), *coverage(subject, budget).controls]
    if all(control.ended is None for control in usual):
        usual += whole_episodes(subject, budget)
    for control in usual:
        if control.ended is None:
            continue
        endings.add(ending(control))
        with Scene(subject) as scene:
            end = control.ended
            before = max(1, end - 1)
            walk = scene.walk(control, [before, end])
            for env in (walk.env, scene.start(control)):
                result = scene.restore(env, walk.snaps[end])
                scene.expect_returned(env, walk, end, result, "restored a finished episode")
                scene.expect(env, walk, end, "after restoring a finished episode")
                scene.restore(env, walk.snaps[end])
                scene.restore(env, walk.snaps[before])
                scene.expect(env, walk, before, "restored from a finished episode to before its end")
                scene.restore(env, walk.snaps[end])
                following = next(i for i, op in enumerate(control.ops) if i >= end and op.kind == "reset")
                if walk.end > following and _quiet_between(control, end, following):
                    scene.expect(env, walk, following, "reset() after restoring a finished episode")
            tried += 1
    if not tried:
        raise Skipped(f"no episode ended within {max(control.last for control in usual) - 1} steps")
    return {"finished episodes": tried, "endings": sorted(endings)}


def _quiet_between(control: Control, start: int, end: int) -> bool:
    """True if the calls after the end of the episode raised, so that leaving them out changes nothing."""
    return all(outcome.raised for outcome in control.outcomes[start:end])


@check(
    "restore.after_close",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Snapshots die with the environment that took them: a pool of environments cannot shrink.",
    blind="Environments killed instead of closed: resources.killed_owner.",
)
def after_close(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Closes (twice) the environment that took the snapshots, drops it, and restores them in new ones."""
    restores = 0
    for control in controls(subject, budget):
        with Scene(subject) as scene:
            walk = scene.walk(control, points_of(control, rng, 1))
            scene.forget(walk.env)
            walk.env.close()
            walk.env = scene.start(control)
            for point in walk.points:
                result = scene.restore(walk.env, walk.snaps[point])
                scene.expect_returned(walk.env, walk, point, result, "restored after its source was closed")
                scene.expect(walk.env, walk, point, "restored after its source was closed")
                restores += 1
    return {"restores": restores}


@check(
    "restore.idempotent",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Restoring twice is not restoring once: every visit of a branch point moves it.",
    blind="Drift that shows only after hundreds of visits: restore.many.",
)
def idempotent(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """restore; restore gives what restore gives; a snapshot of a just restored state is worth the same; the random
    streams and the observed state are the same after each.
    """
    tried = 0
    for control in in_time(budget, controls(subject, budget)):
        with Scene(subject) as scene:
            walk = scene.walk(control, points_of(control, rng, 1))
            for point in walk.points:
                env, snap = walk.env, walk.snaps[point]
                first = scene.restore(env, snap)
                scene.expect_returned(env, walk, point, first, "restored once")
                once = streams(env)
                again = scene.snapshot(env)
                for times, handle in enumerate((snap, again, again, snap), start=2):
                    result = scene.restore(env, handle)
                    scene.expect_returned(env, walk, point, result, f"restored {times} times in a row")
                    _same_streams(scene, once, streams(env), f"after restoring {times} times in a row")
                scene.expect(env, walk, point, "restored five times in a row")
                scene.restore(env, again)
                scene.expect(env, walk, point, "a snapshot of a restored state")
                tried += 1
    return {"points": tried}


def _same_streams(scene: Scene, expected: dict[str, Any], found: dict[str, Any], when: str) -> None:
    for name, bits in expected.items():
        if bits is not None and found.get(name) != bits:
            text = difference(bits, found.get(name)) or ""
            scene.fail(f"the random stream {name} is another {when}", {"stream": name, "differs": text[:300]})


@check(
    "restore.random_streams",
    level=1,
    needs=("rng",),
    after=("api.protocol",),
    hazard="Draws after a restore are not those that were to come: common random numbers are not common.",
    blind="Streams that are neither np_random nor a space's; where they matter, restore.trace_equality sees them.",
)
def random_streams(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the bit state of np_random and of the spaces, in every layer, and np_random_seed, at the snapshot and
    after restoring it: in the same environment with draws in between, and in another one; and futures after a reset
    without a seed.
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
                _same_streams(scene, expected, streams(target), where)
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
    hazard="Siblings restored with seeds share their noise, or the seed changes more than the noise.",
    blind="Whether the fresh streams have the right distribution: stochastic.transition_distribution.",
)
def seeded(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """``restore(snap, seed=S)`` returns the captured observation; the same seed gives the same future, hundreds of
    times, other seeds (0 is one) other streams; where all seeds give one future it is that of the control run, for then
    nothing is random; the seed leaves no trace afterwards, not in the handle either.
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
                _same_streams(scene, bits, streams(env), f"after restoring with seed={seed} again")
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
    return {
        "seeds": index + 1,
        "futures": len(futures),
        "random": random_,
        **seeds.decided(subject, random_),
        "restores with one seed": again,
    }


def _again(scene: Scene, env: AnyEnv, snap: Any, ops: Sequence[Op], budget: Budget) -> int:
    """Restore with one seed hundreds of times; the number."""
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


def _late(scene: Scene, budget: Budget) -> bool:
    return scene.watch.spent(budget.seconds)


# Other actions after a restore: what a tree does.


@check(
    "restore.diverge",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="What one branch did is remembered for another of the same depth: a tree compares actions with themselves.",
    blind="What is remembered by more than depth and action, and is met by no two branches; pictures of modes that do "
    "not work here.",
)
def diverge(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Takes other actions than the control run took, several ways from many points, with restores in between, in turn
    in two environments; the branches differ first and then take the same actions at the same moments. Snapshots are
    taken on the branches, at the same depths, and restored in a drawn order. Each call of each branch, in every third
    round with the picture, is compared with the same calls in an environment that was never restored; in the end with
    those in a new process too.
    """
    told: list[Walk] = []
    found = diverging(subject, budget, rng, _by_restore, told)
    return {**found, **_in_new_process(subject, told)}


Grow = Callable[[Scene, Control, int, list[Walk], np.random.Generator], int]
"""Step of `diverging` from one branch to the next: (scene, control, point, branches, rng) to calls compared."""


def diverging(
    subject: Subject, budget: Budget, rng: np.random.Generator, grow: Grow, told: list[Walk]
) -> dict[str, Any]:
    """Compare branches from many points; see `diverge`. Some of the branches are added to ``told``."""
    found = coverage(subject, budget)
    pool = [each for each in (*found.controls, *controls(subject, budget)) if each.repeatable and each.last > 1]
    if not pool:
        raise Skipped("no run repeats itself without restores: " + subject.control(0, budget.steps).differs)
    drawing = pictured(subject)
    width, length = (2, 5) if budget.waits else (WIDTH, LENGTH)
    compared = points = frames = 0
    for number in budget.spending(24 * len(pool), at_least=2 * len(pool)):
        drawn = drawing is not None and number % 3 == 2
        mine = drawing if drawn and drawing is not None else subject
        control = mine.control(number % 2, min(30, budget.steps)) if drawn else pool[number % len(pool)]
        if not control.repeatable:
            continue
        point = int(rng.integers(1, max(2, control.last)))
        with Scene(mine) as scene:
            parted = branches(scene, control, point, rng, found.palette, width=width, length=length)
            calls = grow(scene, control, point, parted, rng)
        compared += calls
        frames += calls if drawn else 0
        points += 1
        if not drawn and len(told) < 8:
            told += parted[:2]
    return {"points": points, "calls compared": compared, "with pictures": frames}


def own_future(scene: Scene, env: AnyEnv, control: Control) -> Walk:
    """The control run itself, as the expected future of an environment."""
    return Walk(env, control, {}, [], control.outcomes, comparable(scene.subject, control))


def _by_restore(scene: Scene, control: Control, point: int, parted: list[Walk], rng: np.random.Generator) -> int:
    env, other = scene.start(control), scene.start(control)
    scene.play(env, control.ops[:point])
    snap = scene.snapshot(env)
    own = own_future(scene, env, control)
    middle = point + int(rng.integers(1, 6))
    inner: list[tuple[Any, Walk, int]] = []
    compared = 0
    for number, branch in enumerate((*parted, parted[0], own)):
        target = other if number % 3 == 1 else env
        what = "after a restore, an action that the control did not take" if branch is not own else "after branches"
        result = scene.restore(target, snap)
        scene.expect_returned(target, branch, point, result, what)
        stop = min(middle, branch.end)
        compared += scene.expect(target, branch, point, what, calls=stop - point)
        if stop < branch.end and stop < control.last:
            inner.append((scene.snapshot(target), branch, stop))
        compared += scene.expect(target, branch, stop, what, calls=40)
    for turn, place in enumerate(rng.permutation(len(inner)).tolist()):
        handle, branch, stop = inner[place]
        target = other if place % 2 else env
        if turn % 2:  # from the same depth of another branch
            sideways = parted[(place + 1) % len(parted)]
            scene.restore(target, snap)
            scene.expect(target, sideways, point, "after a restore", calls=stop - point)
        elif turn:
            scene.restore(target, inner[place - 1][0])
        what = f"restored from a snapshot taken on one of {len(inner)} branches at the same depth"
        result = scene.restore(target, handle)
        scene.expect_returned(target, branch, stop, result, what)
        compared += scene.expect(target, branch, stop, what, calls=12)
    return compared


def _in_new_process(subject: Subject, told: list[Walk]) -> dict[str, Any]:
    """True if branches give the same here and in a process of their own, provided that a control run does."""
    control = subject.control(0, SHORTEST)
    plain = other_process.Job(control.seed, control.ops[: control.last])
    jobs = [plain, *(other_process.Job(branch.control.seed, branch.control.ops) for branch in told)]
    try:
        answers = other_process.run(subject, jobs, separate=True)
    except (other_process.Unreachable, other_process.Broken) as error:
        return {"compared with a new process": f"no: {str(error).strip().splitlines()[-1][:200]}"}
    before = control.outcomes[: control.last]
    with Scene(subject) as scene:
        env = scene.start(control)
        now = [scene.call(env, op) for op in control.ops[: control.last]]
    if differs := first_difference(before, now):
        raise Failed(f"where branches were played, even an untouched run is not what it was before: {differs}")
    if first_difference(answers[0], other_process.stateless(before)):
        return {"compared with a new process": "no: even an untouched run gives something else there"}
    for branch, there in zip(told, answers[1:]):
        if differs := first_difference(other_process.stateless(there), other_process.stateless(branch.outcomes)):
            raise Failed(
                f"in a process where other branches were played, one gives something else than in a new one: {differs}",
                {"branch": branch.control.name, "calls": len(branch.control.ops)},
            )
    return {"compared with a new process": len(told)}


@check(
    "restore.no_steps",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A restore is skipped because the environment takes itself to be there already: it is where a reset put it.",
    blind="Longer sequences of calls without a step between.",
)
def no_steps(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Makes three calls without a step between them, in all combinations of: restores of two snapshots, one with a
    seed, resets with another seed, the same one and none, a snapshot, a fork, one step; then restores one of the two,
    and compares what it returns and what follows.
    """
    control = subject.control(0, budget.steps)
    tried = 0
    with Scene(subject) as scene:
        late = max(1, control.last // 2)
        walk = scene.walk(control, {1, late})
        env, one, two = walk.env, walk.snaps[1], walk.snaps[late]
        seed, options = control.ops[0].value
        calls: dict[str, Callable[[], Any]] = {
            "restore": lambda: scene.restore(env, one),
            "restore another": lambda: scene.restore(env, two),
            "restore with a seed": lambda: scene.restore(env, one, seed=5),
            "reset": lambda: scene.reset(env, seed=seed + 1, options=subject.options(1)),
            "reset to the same": lambda: scene.reset(env, seed=seed, options=options),
            "reset without a seed": lambda: scene.reset(env, options=options),
            "snapshot": lambda: scene.drop(scene.snapshot(env)),
            "fork": lambda: scene.forget(scene.fork(env, 1)[0]),
            "step": lambda: scene.call(env, control.ops[1]),
        }
        programs = list(itertools.product(calls, calls, calls))
        rng.shuffle(programs)
        # First what most restores by comparison would meet: the same state before and after something else.
        programs = [("restore", between, between) for between in calls] + programs
        for index in budget.spending(len(programs), at_least=30):
            mark = len(scene.lines)
            for name in programs[index]:
                calls[name]()
            point = 1 if index % 3 else late
            what = f"restored after {', '.join(programs[index])}"
            result = scene.restore(env, walk.snaps[point])
            scene.expect_returned(env, walk, point, result, what)
            scene.expect(env, walk, point, what, calls=2)
            del scene.lines[mark:]  # of those that were right
            tried += 1
    return {"programs": tried}


# Sources that live.


@check(
    "restore.live_source",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="The backbone goes on while workers restore its snapshots: they get the files, tables or caches of where it "
    "is now.",
    blind="Sources on other machines.",
)
def live_source(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores snapshots in other environments while their source is alive, in the middle of its episode and further
    on, and moves between the others' steps; two sources with their own episodes, workers that change from one to the
    other, in a drawn order; in the end the source is reset and closed under them. Then with the source in a thread, and
    with the restored one in another process. Workers and sources must all give what they give alone.
    """
    pool = [each for each in (*coverage(subject, budget).controls, *controls(subject, budget)) if each.repeatable]
    if not pool:
        raise Skipped("no run repeats itself without restores: " + subject.control(0, budget.steps).differs)
    compared = rounds = 0
    for number in budget.spending(3 * len(pool), at_least=min(4, len(pool))):
        control, other = pool[number % len(pool)], pool[(number + 1) % len(pool)]
        compared += _moving_on(subject, control, int((1, 3, 8)[number % 3]), rng)
        compared += _shared(subject, (control, other), rng)
        rounds += 1
    threads = sum(_in_thread(subject, control, rng) for control in pool[:2])
    process: str | int = "not declared: snapshot_spec.cross_process is False"
    if subject.capabilities.cross_process:
        process = _across(subject, max(pool[:3], key=lambda control: control.last))
    return {"rounds": rounds, "calls compared": compared, "beside a thread": threads, "in another process": process}


def _moving_on(subject: Subject, control: Control, ahead: int, rng: np.random.Generator) -> int:
    """Restore from a source that is some calls ahead, and then moves in turn with the restored environment."""
    with Scene(subject) as scene:
        source, worker = scene.start(control), scene.start(control)
        own = own_future(scene, source, control)
        point = int(rng.integers(1, max(2, control.last - ahead)))
        scene.play(source, control.ops[:point])
        snap = scene.snapshot(source)
        place = min(point + ahead, own.end)
        scene.expect(source, own, point, "the source of a snapshot", calls=place - point)
        result = scene.restore(worker, snap)
        what = "restored while its source is further on"
        scene.expect_returned(worker, own, point, result, what)
        for index in range(point, own.end):
            scene.expect_raw(worker, own, index, f"{what} and moves")
            if place < own.end:
                scene.expect_raw(source, own, place, "the source, while what was restored from it moves")
                place += 1
        scene.restore(worker, snap)
        scene.expect(worker, own, point, f"{what}, for the second time", calls=2)
        scene.reset(source, seed=control.seed + 1, options=subject.options(1))
        scene.expect(worker, own, point + 2, "restored before its source was reset", calls=2)
        scene.close(source)
        scene.expect(worker, own, point + 4, "restored before its source was closed")
        return own.end - point


def _shared(subject: Subject, pair: tuple[Control, Control], rng: np.random.Generator) -> int:
    """Two sources, two workers that restore from either, moved in random order."""
    with Scene(subject) as scene:
        sources: list[list[Any]] = []
        kept: list[tuple[Any, Walk, int]] = []
        for control in pair:
            env = scene.start(control)
            own = own_future(scene, env, control)
            scene.call(env, control.ops[0])
            sources.append([env, own, 1])
            kept.append((scene.snapshot(env), own, 1))
        workers: list[list[Any]] = [[scene.start(pair[0]), None, 0] for _ in range(2)]
        calls = 0
        for turn in range(60):
            worker, source = workers[turn % 2], sources[int(rng.integers(2))]
            if worker[1] is None or worker[2] >= worker[1].end or rng.random() < 0.15:
                snap, worker[1], worker[2] = kept[int(rng.integers(len(kept)))]
                result = scene.restore(worker[0], snap)
                scene.expect_returned(worker[0], worker[1], worker[2], result, "restored while two sources go on")
            for player, what in ((worker, "restored while two sources go on"), (source, "a source of live workers")):
                if player[2] < min(player[1].end, player[1].control.last):
                    scene.expect_raw(player[0], player[1], player[2], what)
                    player[2] += 1
                    calls += 1
            if len(kept) < 8 and rng.random() < 0.3:
                kept.append((scene.snapshot(source[0]), source[1], source[2]))
        return calls


def _in_thread(subject: Subject, control: Control, rng: np.random.Generator) -> int:
    """Keep the source in a thread of its own while the others are restored and moved here."""
    point = int(rng.integers(1, max(2, control.last // 2)))
    ready, leave = threading.Event(), threading.Event()
    handed: list[Any] = []
    wrong: list[BaseException] = []
    with Scene(subject) as scene:
        worker = scene.start(control)

        def live() -> None:
            source = None
            try:
                source = scene.start(control)  # here: some can be used in the thread alone that has made them
                scene.play(source, control.ops[:point])
                handed.extend((snapshot(source), scene.name(source)))
                ready.set()
                for index in range(point, comparable(subject, control)):
                    found = subject.call(source, control.ops[index])[0]
                    if found != control.outcomes[index]:
                        text = outcome_difference(control.outcomes[index], found)
                        raise Failed(f"a source in a thread, while workers are restored, differs: {text}")
                    if index == control.last - 2:
                        leave.wait(1.0)  # in the middle of its episode while others play
            except BaseException as error:
                wrong.append(error)
            finally:
                ready.set()
                if source is not None:
                    leave.wait()
                    scene.forget(source)

        thread = threading.Thread(target=live)
        scene.note("# the source goes on in a thread")
        thread.start()
        ready.wait()
        calls = 0
        try:
            if handed:
                snap = scene.adopt(handed[0], f"{handed[1]}.snapshot()  # in the thread")
                own = own_future(scene, worker, control)
                for _ in range(3):
                    result = scene.restore(worker, snap)
                    scene.expect_returned(worker, own, point, result, "restored while its source moves in a thread")
                    calls += scene.expect(worker, own, point, "restored while its source moves in a thread")
        finally:
            leave.set()
            thread.join()
        if wrong:
            raise wrong[0]
    return calls


def _across(subject: Subject, control: Control) -> str | int:
    """Restore in another process, with the source here."""
    point = max(1, control.last // 3)
    with Scene(subject) as scene, scratch.folder() as folder:
        source = scene.start(control)
        own = own_future(scene, source, control)
        scene.play(source, control.ops[:point])
        try:
            parcel = other_process.carried(scene.snapshot(source), Path(folder), "snapshot")
            ahead = scene.expect(source, own, point, "the source of a snapshot", calls=max(1, control.last // 3))
            started = other_process.start(
                subject,
                [
                    other_process.Job(control.seed, control.ops[point : own.end], parcel),
                    other_process.Job(control.seed, control.ops[: own.end]),
                ],
                other_process.Child(),
            )
            scene.expect(source, own, point + ahead, "a source whose snapshot is restored in another process", calls=2)
            restored, alone = other_process.finish(started)
        except other_process.Unreachable as error:
            return f"cannot be reached: {error}"[:200]
        except other_process.Broken as error:
            message = str(error).strip()
            last = message.splitlines()[-1]
            raise Failed(
                f"another process cannot restore while the source is alive: {last}", {"there": message}, scene.script()
            ) from None
        expected = other_process.stateless(control.outcomes[: own.end])
        if first_difference(expected, other_process.stateless(alone)):
            return "even without snapshots it gives something else there"
        if differs := first_difference(expected[point:], other_process.stateless(restored[1:])):
            scene.fail(f"restored in another process while its source is alive and further on: {differs}")
        scene.expect(source, own, point + ahead + 2, "a source after its snapshot was restored in another process")
        return own.end - point


# What ordinary episodes do not reach.


@check(
    "restore.coverage",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Faults at the time limit, after a rare action or late in an episode are met by luck, or by the trainer.",
    blind="What the search did not reach: the evidence says what it did.",
)
def covered(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Searches, with the environment's own snapshots, for long episodes, every way of ending, rare actions, rewards and
    entries of info; records each from a reset without snapshots. Takes snapshots before and after each such event, near
    the end and in the middle, restores each in the environment that continued, in a new one and through a fork, and
    compares everything to the end.
    """
    found = coverage(subject, budget)
    if not found.controls:
        raise Skipped(f"the search found nothing to add: {found.reached.get('search ended early', 'nothing happens')}")
    restores = compared = 0
    for number in budget.spending(len(found.controls), at_least=min(3, len(found.controls))):
        control = found.controls[number]
        events = [point for event in found.events[number] for point in (event - 1, event)]
        some = [events[place] for place in rng.permutation(len(events))[:6].tolist()]
        points = {*points_of(control, rng, 2), *some} - {0}
        with Scene(subject) as scene:
            walk = scene.walk(control, points)
            for turn in budget.spending(len(points), seconds=budget.seconds / len(found.controls), at_least=4):
                point = sorted(points, key=lambda point: (point * 7919) % 101)[turn]
                env = scene.start(control)
                what = "restored in a run found by search"
                for target in (walk.env, env):
                    result = scene.restore(target, walk.snaps[point])
                    scene.expect_returned(target, walk, point, result, what)
                    compared += scene.expect(target, walk, point, what)
                    restores += 1
                scene.restore(env, walk.snaps[point])
                (child,) = scene.fork(env, 1)
                compared += scene.expect(child, walk, point, f"a fork of what was {what}")
                scene.forget(child)
                scene.forget(env)
    return {"restores": restores, "calls compared": compared, **found.reached}
