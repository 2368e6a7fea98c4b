"""Level 2: forks start at their source's state, and are independent from then on."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np

from sandboxgym.conformance.check import SHORTEST, Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.diverging import diverging
from sandboxgym.conformance.checks.restore.runs import SHORT, controls, finds, in_time, own_future, points_of
from sandboxgym.conformance.harness import seeds as seeding
from sandboxgym.conformance.harness.arguments import reconfigured
from sandboxgym.conformance.harness.branching import branches
from sandboxgym.conformance.harness.canonical import show
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    choose,
    comparable,
    first_difference,
    known_seed,
    opened,
    outcome_difference,
    seed_spaces,
    streams,
)
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Outcome, Subject, layers, methods
from sandboxgym.conformance.supervision.clock import Stopwatch
from sandboxgym.core import SnapshotEnv
from sandboxgym.errors import SnapshotNotSupported

HELD = 2**30
"""Bytes that a crowd's states and snapshots may take together."""
WIDE = 20
"""Children of the widest fork whose members continue alike."""
CROWD = 64
"""Children that are alive at once and all act."""


def variation(subject: Subject, control: Control, point: int, rng: np.random.Generator, steps: int) -> tuple[Op, ...]:
    """Other calls from ``point`` on, chosen step by step in an environment of its own."""
    with opened(subject) as env:
        seed_spaces(env, control.seed)
        raw = None
        for op in control.ops[:point]:
            raw = subject.call(env, op)[1]
        space = copy.deepcopy(env.action_space)
        space.seed(int(rng.integers(2**31)))
        ops: list[Op] = []
        while raw is not None and not (raw[2] or raw[3]) and len(ops) < steps:
            ops.append(Op("step", choose(subject, space, raw[0], raw[4], rng, bool(rng.random() < 0.7))))
            raw = subject.call(env, ops[-1])[1]
        return tuple(ops)


@check(
    "fork.trace_equality",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Siblings do not start where the backbone was.",
    blind="Faults rarer than the forks made: see the evidence for what would have been found with 99.9 %.",
)
def trace_equality(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Forks at the start, in the middle, before and after the end of episodes; each child, a child of a child, and the
    source continue like an uninterrupted run. Then forks hundreds of times, and once into many children, and compares
    the next calls.
    """
    forks = compared = 0
    for control in in_time(budget, controls(subject, budget)):
        with Scene(subject) as scene:
            walk = scene.walk(control, ())
            points = points_of(control, rng, 1)
            env = scene.start(control)
            children: list[tuple[int, AnyEnv]] = []
            for count, op in enumerate(control.ops, start=1):
                scene.call(env, op)
                if count in points:
                    children += [(count, child) for child in scene.fork(env, 2)]
            if not control.repeatable:  # the source's own future is the truth
                walk = scene.walk(control, points)
                children = [(p, c) for p in points for c in _forked_at(scene, walk, p)]
            for number, (point, child) in enumerate(children):
                if number % 2:
                    (child,) = scene.fork(child, 1)
                compared += scene.expect(child, walk, point, "a fork goes on differently")
                forks += 1
    control = subject.control(0, budget.steps)
    point = max(1, control.last // 2)
    with Scene(subject) as scene:
        walk = scene.walk(control, [point])
        scene.restore(walk.env, walk.snaps[point])
        many = 0
        for index in budget.spending(budget.repeats, at_least=10):
            with scene.iteration(index):
                (child,) = scene.fork(walk.env, 1)
                scene.expect(child, walk, point, f"fork number {index + 1} of one state", calls=SHORT)
                scene.forget(child)
                many += 1
    wide = _wide(subject, budget)
    return {"forks": forks, "calls compared": compared, "forks of one state": many, **finds(many), "widest fork": wide}


def _wide(subject: Subject, budget: Budget) -> int:
    """Fork many children at once, compared call by call in turn; their number."""
    k = WIDE if budget.steps > SHORTEST else budget.forks + 1
    control = subject.control(0, budget.steps)
    point = max(1, control.last // 2)
    with Scene(subject) as scene:
        walk = scene.walk(control, [point])
        scene.restore(walk.env, walk.snaps[point])
        children = scene.fork(walk.env, k)
        for index in range(point, min(point + SHORT, walk.end)):
            for number, child in enumerate(children):
                scene.expect_raw(child, walk, index, f"child {number} of fork({k}), its siblings beside it,")
    return k


def _forked_at(scene: Scene, walk: Walk, point: int) -> list[AnyEnv]:
    scene.restore(walk.env, walk.snaps[point])
    return scene.fork(walk.env, 2)


@check(
    "fork.isolation",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Siblings write into each other's episodes: the advantage of one action is that of another's.",
    blind="Effects that show in no sibling's observation, reward, flag or info (give observe_state).",
)
def isolation(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Several forks play different actions, a call at a time in a drawn order, some fork again, some are restored to
    where they began; the source continues in between. Each must give what it gives when it plays alone in an
    environment that was never forked.
    """
    rounds = calls = 0
    pool = controls(subject, budget)
    rounds_wanted = 4 * len(pool) if budget.name == "quick" else 20 * len(pool)
    for index in budget.spending(rounds_wanted, at_least=len(pool)):
        control = pool[index % len(pool)]
        calls += _interleaved(subject, budget, rng, control, close=False)
        rounds += 1
    return {"rounds": rounds, "forks at once": budget.forks, "interleaved calls": calls}


def _interleaved(subject: Subject, budget: Budget, rng: np.random.Generator, control: Control, *, close: bool) -> int:
    point = int(rng.integers(1, max(2, control.last)))
    suffixes = [variation(subject, control, point, rng, 15) for _ in range(budget.forks)]
    with Scene(subject) as scene:
        if control.repeatable:
            alone = [scene.alone(control, point, suffix) for suffix in suffixes]
            source = scene.walk(control, ())
            env = scene.start(control)
            scene.play(env, control.ops[:point])
        else:
            source = scene.walk(control, [point])
            env = source.env
            alone = []
            for suffix in suffixes:
                scene.restore(env, source.snaps[point])
                outcomes = [*source.outcomes[:point], *scene.play(env, suffix)]
                ops = (*control.ops[:point], *suffix)
                other = Control(control.name, control.seed, ops, tuple(outcomes), None, False, "", 0)
                alone.append(Walk(env, other, {}, outcomes, outcomes, len(ops)))
            scene.restore(env, source.snaps[point])
        start = scene.snapshot(env)
        restores = 2 * budget.forks
        children = scene.fork(env, len(suffixes))
        source.end = comparable(subject, control)
        players: list[list[Any]] = [[child, walk, point] for child, walk in zip(children, alone)]
        players.append([env, source, point])
        made = len(players)
        last: dict[int, tuple[tuple[Any, ...], Outcome] | None] = {}
        calls = 0
        while players:
            player = players[int(rng.integers(len(players)))]
            current, walk, place = player
            if place >= walk.end or (close and rng.random() < 0.08):
                players.remove(player)
                if close:
                    scene.close(current)
                    if rng.random() < 0.5:
                        scene.close(current)  # twice is once
                continue
            if made < 3 * budget.forks and rng.random() < 0.06:
                for child in scene.fork(current, 1):
                    players.append([child, walk, place])
                made += 1
            if restores and not close and rng.random() < 0.06:
                scene.restore(current, start)
                last.pop(id(current), None)
                player[2] = point
                restores -= 1
                continue
            kind = "the source of forks" if current is env else "a fork"
            what = f"{kind} while others close" if close else f"{kind} interleaved with {made - 1} others"
            kept = last.get(id(current))
            if kept is not None and subject.outcome(current, *kept[0])[:5] != kept[1][:5]:
                text = outcome_difference(
                    kept[1]._replace(state=None), subject.outcome(current, *kept[0])._replace(state=None)
                )
                scene.fail(f"{what}: what its last step() had returned was changed by them: {text}")
            last[id(current)] = scene.expect_raw(current, walk, place, what)
            player[2] += 1
            calls += 1
        return calls


@check(
    "fork.close_order",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Closing a finished branch pulls the ground from under its siblings.",
    blind="What closing leaves behind: resources.baseline.",
)
def close_order(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Closes source and forks in every order drawn, some twice, some dropped without closing, while the others
    continue; also the source first, then half of the children.
    """
    rounds = 0
    for control in in_time(budget, controls(subject, budget)):
        with Scene(subject) as scene:
            point = max(1, control.last // 2)
            walk = scene.walk(control, [point])
            scene.restore(walk.env, walk.snaps[point])
            children = scene.fork(walk.env, budget.forks)
            grandchildren = [scene.fork(child, 1)[0] for child in children[:2]]
            scene.close(walk.env)
            scene.close(walk.env)
            scene.expect(children[0], walk, point, "a fork after its source was closed")
            scene.close(children[0])
            scene.expect(children[1], walk, point, "a fork after its sibling was closed")
            scene.close(children[1])
            for child in (*grandchildren, *children[2:]):
                scene.expect(child, walk, point, "a fork after source and siblings were closed")
            env = scene.make()
            scene.restore(env, walk.snaps[point])
            scene.expect(env, walk, point, "a snapshot after its source and forks were closed")
            scene.restore(env, walk.snaps[point])
            lost = scene.fork(env, 1)[0]
            scene._envs.pop(id(lost))
            del lost
            gc.collect()
            scene.note("# one more fork, dropped without close()")
            scene.expect(env, walk, point, "the source after a fork was dropped without close()")
        for _ in range(2):
            _interleaved(subject, budget, rng, control, close=True)
            rounds += 1
    return {"drawn orders": rounds}


@check(
    "fork.unseeded_exact",
    level=2,
    needs=("rng",),
    after=("api.protocol",),
    hazard="fork(k) without a seed gives other draws than the backbone's: common random numbers are not common.",
    blind="Streams that are neither np_random nor a space's; where they matter, fork.trace_equality sees them.",
)
def unseeded_exact(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """The random streams of every child of ``fork(k)`` are, bit by bit, those of the source; so is np_random_seed."""
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
    hazard="Seeded siblings share their noise: they are one sample, counted k times.",
    blind="Correlations between streams that differ: stochastic.siblings_independent.",
)
def seeded_independent(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """``fork(k, seed=S)``: children's np_random differ from each other's and the source's, for S = 0 too; another S
    gives others, the same S the same, hundreds of times; where all S give the same futures, nothing is random, and all
    continue like the source; where it is, not all children do the same.
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
        for seed in (*seeds, seeds[0]):
            scene.restore(env, walk.snaps[1])
            source = streams(env)
            children = scene.fork(env, k, seed=seed)
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
            for child in children:
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


@check(
    "fork.keeps_wrappers",
    level=2,
    after=("api.protocol",),
    hazard="A fork without its wrappers has no time limit, other observations and other rewards.",
    blind="Wrappers made by functions that return something else.",
)
def keeps_wrappers(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Children have the source's layers (types and order), share none of them, and have the protocol's methods
    if the source has; so have children of children; spaces and render mode are the source's.
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
    hazard="A wrong k gives no error but no children, or half of them.",
    blind="Very large k.",
)
def invalid(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """``fork(0)``, ``fork(-1)``, ``fork("2")`` and ``fork(None)`` raise, and the source continues unharmed."""
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
    hazard="Forks are made with default arguments: on a larger board siblings play another game.",
    blind="Arguments that are neither numbers nor flags of the factory or class, and values that it does not take.",
)
def arguments(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Makes the environment with other arguments (numbers and flags of the factory or class, changed one at a time) and
    compares the future of a fork, and of a fork of it, with an uninterrupted run of an environment made so.
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


@check(
    "fork.source_untouched",
    level=2,
    after=("api.protocol",),
    hazard="Branching disturbs the backbone, which then differs from one that was never branched.",
    blind="Effects later than the recorded calls.",
)
def source_untouched(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Plays control runs again and forks after every few calls, seeded and unseeded; children step, reset to other
    episodes and close; every outcome of the source is that of the run without forks.
    """
    repeatable = [control for control in controls(subject, budget) if control.repeatable]
    if not repeatable:
        raise Skipped("no run repeats itself without forks: " + subject.control(0, budget.steps).differs)
    forks, watch = 0, Stopwatch()
    for control in repeatable:
        with Scene(subject) as scene:
            walk = scene.walk(control, ())
            env = scene.start(control)
            for index, op in enumerate(control.ops):
                found = scene.call(env, op)
                if found != walk.expected[index]:
                    scene.differ(walk, env, index, found, f"the source of {forks} forks differs")
                if index % 2 == 0 and (index < 6 or not watch.spent(budget.seconds)):
                    for number, child in enumerate(scene.fork(env, 2, seed=None if index % 4 else index)):
                        forks += 1
                        scene.play(child, control.ops[index + 1 : index + 3])
                        if number:
                            scene.reset(child, seed=int(rng.integers(2**31)), options=subject.options(number))
                            scene.play(child, control.ops[1:3])
                        scene.forget(child)
    return {"forks": forks}


@check(
    "fork.diverge",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A child that takes another action than its source or sibling gets what belongs to theirs.",
    blind="What is remembered by more than depth and action, and is met by no two branches.",
)
def diverge(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Forks take branches as restore.diverge does: the children of one moment take other actions than their source and
    than each other, first different ones, then the same at the same moments, one after the other; children of
    children branch again; in the end the source takes its own.
    """
    return diverging(subject, budget, rng, _by_fork, [])


def _by_fork(scene: Scene, control: Control, point: int, parted: list[Walk], rng: np.random.Generator) -> int:
    env = scene.start(control)
    scene.play(env, control.ops[:point])
    own = own_future(scene, env, control)
    wanted = [*parted, parted[0], own]
    children = scene.fork(env, len(wanted))
    middle = point + int(rng.integers(1, 6))
    later: list[tuple[AnyEnv, Walk, int]] = []
    compared = 0
    for child, branch in zip(children, wanted):
        what = "a child, after its siblings took other actions,"
        stop = min(middle, branch.end, control.last)
        compared += scene.expect(child, branch, point, what, calls=stop - point)
        later += [(each, branch, stop) for each in scene.fork(child, 1)]
        compared += scene.expect(child, branch, stop, what, calls=40)
    for place in rng.permutation(len(later)).tolist():
        grandchild, branch, stop = later[place]
        compared += scene.expect(grandchild, branch, stop, "a child's child, after all others acted,", calls=12)
    compared += scene.expect(env, own, point, "the source, after its children took other actions,", calls=40)
    return compared


@check(
    "fork.crowd",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Slots, ports or names run out: the children of a wide tree, all alive, share with the first ones.",
    blind="More children than were alive at once: see the evidence.",
)
def crowd(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Forks many children (64, fewer where the environment is slow or its state large) that live at once and all act,
    each in turn and with other actions than its neighbours; takes a snapshot of each in the middle, lets all continue,
    and restores these in a drawn order. Each must give what it gives alone.
    """
    pool = [each for each in controls(subject, budget) if each.repeatable and each.last > 2]
    if not pool:
        differs = subject.control(0, budget.steps).differs
        raise Skipped(
            f"no run repeats itself without forks: {differs}"
            if differs
            else "no episode had more than two steps: too short for actions of one's own"
        )
    control = max(pool, key=lambda each: each.last)
    k = WIDE // 2 if budget.waits else CROWD
    if budget.steps <= SHORTEST:
        k = budget.forks + 1
    palette = coverage(subject, budget).palette
    with Scene(subject) as scene:
        point = max(1, control.last // 3)
        parted = branches(scene, control, point, rng, palette, width=7, length=6)
        env = scene.start(control)
        scene.play(env, control.ops[:point])
        own = own_future(scene, env, control)
        size = 0
        with contextlib.suppress(Exception):  # it may hold what cannot be written
            size = int(scene.snapshot(env).nbytes)
        k = max(budget.forks + 1, min(k, HELD // (2 * size))) if size > 0 else k
        players = [(child, parted[number % len(parted)]) for number, child in enumerate(scene.fork(env, k))]
        snaps: list[tuple[Any, Walk, int]] = []
        for turn in range(6):
            for place in rng.permutation(k).tolist():
                child, branch = players[place]
                if turn == 2 and point + turn < branch.end:
                    snaps.append((scene.snapshot(child), branch, point + turn))
                if point + turn < branch.end:
                    scene.expect_raw(child, branch, point + turn, f"child {place} of {k} that are alive and act")
        scene.expect(env, own, point, f"the source of {k} children that acted", calls=SHORT)
        for place in rng.permutation(len(snaps)).tolist():
            child = players[place % k][0]
            snap, branch, stop = snaps[place]
            what = f"restored from one of {len(snaps)} snapshots that are alive"
            scene.expect_returned(child, branch, stop, scene.restore(child, snap), what)
            scene.expect(child, branch, stop, what, calls=SHORT)
    return {"alive at once": k + 1, "snapshots alive": len(snaps)}


@check(
    "fork.deepcopy",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="copy.deepcopy(env) is a fork by contract, and whole trees are copied so; a shallow copy shares.",
    blind="Environments that define no __deepcopy__ and promise nothing.",
)
def deepcopy(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """A deep copy, and one of that, start where the source is and are independent of the others' actions and closing,
    where an environment defines ``__deepcopy__``; a copy made before the first reset plays an episode; ``copy.copy``
    raises.
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
