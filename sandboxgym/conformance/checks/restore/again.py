"""Level 1: after restores of every kind, the actions of an uninterrupted run have the same outcomes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Skipped, check
from sandboxgym.conformance.checks.restore.runs import (
    SHORT,
    controls,
    finds,
    in_time,
    longer,
    perturbed,
    points_of,
    same_streams,
)
from sandboxgym.conformance.harness.coverage import coverage, ending
from sandboxgym.conformance.harness.scenario import (
    Scene,
    streams,
)
from sandboxgym.conformance.harness.whole import whole_episodes
from sandboxgym.conformance.subject import AnyEnv, Control, Subject


@check(
    "restore.trace_equality",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Branches start from a state other than that of the trajectory that they branch from: every advantage is "
    "biased.",
    blind="State that shows in none of the compared calls (give the hook observe_state).",
)
def trace_equality(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores snapshots of several episodes and compares the whole rest of each with an uninterrupted run.
    Snapshots are taken at the start, in the middle, and before and after the end of on- and off-policy episodes of
    several seeds, and restored in the environment that played on. Global random streams, environment variables and the
    clock are changed before each restore.
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


@check(
    "restore.other_env",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Part of the state stays behind in the environment that took the snapshot: branches in other environments "
    "differ.",
    blind="State shared by all environments of a process (see durable.cross_process).",
)
def other_env(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores snapshots in other environments and compares the rest with an uninterrupted run.
    The others were never reset, just reset, near the end of another episode, or past its end.
    """
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
    hazard="A snapshot that restores correctly only once, or 49 times out of 50, corrupts a few branches of every run.",
    blind="Faults rarer than the rate in the evidence; at that rate one is found with a probability of 99.9 %.",
)
def many(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores one snapshot hundreds of times, then takes and restores hundreds of snapshots of two moments in turn.
    Each of these is released before the next. The next four calls are compared with an uninterrupted run, and the whole
    rest after every tenth restore of the one snapshot.
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
        walk = scene.walk(control, {1, point})
        for index in budget.spending(budget.repeats // 2, at_least=10):
            with scene.iteration(index):
                for moment in walk.points:  # in turn: what a handle leaves behind is not what the next one needs
                    scene.restore(walk.env, walk.snaps[moment])
                    snap = scene.snapshot(walk.env)
                    scene.play(walk.env, control.ops[moment : moment + 1])
                    result = scene.restore(walk.env, snap)
                    what = f"snapshot number {taken + 1}, of two moments in turn"
                    scene.expect_returned(walk.env, walk, moment, result, what)
                    scene.expect(walk.env, walk, moment, what, calls=SHORT)
                    scene.drop(snap)
                    taken += 1
    return {"restores of one": restored, "snapshots": taken, **finds(min(restored, taken))}


@check(
    "restore.any_order",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A search that jumps between branch points restores a mixture of their states.",
    blind="Orders of restores that were not drawn.",
)
def any_order(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores snapshots of several moments of two episodes in random order, with up to seven calls in between.
    Each call is compared with an uninterrupted run.
    """
    pool = controls(subject, budget)
    restores = 0
    for index, control in enumerate(pool):
        with Scene(subject) as scene:
            walks = [scene.walk(each, points_of(each, rng, 3)) for each in (control, pool[(index + 1) % len(pool)])]
            env = walks[0].env
            for _ in budget.spending(budget.repeats // 4, seconds=budget.seconds / len(pool), at_least=12):
                walk = walks[int(rng.random() < 1 / 3)]
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
    hazard="A snapshot of a restored state holds another state: in trees deeper than one level, states drift.",
    blind="Longer chains (see resources.depth).",
)
def nested(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Takes a chain of snapshots, each after restoring the one before and making one call or none, in two environments.
    Then restores all of them, oldest first and newest first, and compares the rest with an uninterrupted run.
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
    hazard="What reset() loads (task, level, goal) survives a restore: the agent plays one task by the rules of "
    "another.",
    blind="Tasks that neither seeds nor reset_options reach.",
)
def after_reset(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores after another episode was begun or played to its end, and compares the rest with an uninterrupted run.
    A whole further episode after a restored one must also be as after an uninterrupted one.
    """
    restores = 0
    pool = controls(subject, budget)
    for index, control in enumerate(pool):
        with Scene(subject) as scene:
            walk = scene.walk(control, points_of(control, rng, 1))
            for point in walk.points:
                other = pool[(index + 1 + int(rng.integers(max(1, len(pool) - 1)))) % len(pool)]
                calls = (1, 2, other.last, len(other.ops))[int(rng.integers(4))]
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
    hazard="The done flag is lost or sticks: finished episodes continue, or restored ones end at once.",
    blind="Episodes that do not end within the recorded steps.",
)
def after_done(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores finished episodes and compares later steps and the next reset with an uninterrupted run.
    They are restored in the same environment and in a new one; restoring a moment before the end must undo the end.
    Episodes of every way of ending that a search with the environment's own snapshots finds are among them.
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
    blind="Processes that are killed before they close their environments (see durable.saver_gone).",
)
def after_close(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Closes the environment that took the snapshots, twice, and restores them in a new one.
    It is closed after beginning another episode, or in the same episode: at the moment of the newest snapshot, or two
    calls later.
    """
    restores = 0
    for number, control in enumerate(controls(subject, budget)):
        middle = int(rng.integers(1, control.last + 1))
        for newest, closed in ((None, None), (middle, min(middle + 2 * (number % 2), control.last))):
            if newest is not None and not control.repeatable:
                continue  # there is no other run to compare with
            with Scene(subject) as scene:
                points = [point for point in points_of(control, rng, 1) if newest is None or point < newest]
                walk = scene.walk(control, [*points, *([] if newest is None else [newest])], until=closed)
                scene.forget(walk.env)
                walk.env.close()
                walk.env = scene.start(control)
                what = f"restored after its source was closed{'' if newest is None else ' in the same episode'}"
                for point in walk.points:
                    result = scene.restore(walk.env, walk.snaps[point])
                    scene.expect_returned(walk.env, walk, point, result, what)
                    scene.expect(walk.env, walk, point, what)
                    restores += 1
    return {"restores": restores}


@check(
    "restore.idempotent",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Restoring twice differs from restoring once: every visit to a branch point moves it.",
    blind="Drift that shows only after hundreds of visits (see restore.many).",
)
def idempotent(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores a snapshot several times in a row, in turn with one taken right after the first restore.
    The outputs and random streams must be the same each time, and the rest as in an uninterrupted run.
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
                    same_streams(scene, once, streams(env), f"after restoring {times} times in a row")
                scene.expect(env, walk, point, "restored five times in a row")
                scene.restore(env, again)
                scene.expect(env, walk, point, "a snapshot of a restored state")
                tried += 1
    return {"points": tried}


def _late(scene: Scene, budget: Budget) -> bool:
    return scene.watch.spent(budget.seconds)


@check(
    "restore.no_steps",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="An environment skips a restore because it believes that it is in that state already, although a reset "
    "moved it.",
    blind="Longer sequences of calls without a step in between.",
)
def no_steps(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Makes three calls in a row, then restores one of two snapshots and compares its output and the next two calls.
    The three are restores (of either snapshot, or with a seed), resets (with the same seed, another or none), a
    snapshot, a fork or a step, in as many combinations as time allows. They are made in the environment that took the
    snapshots or in a fork of it. The comparison is made there and, in two of three cases, also in a fork of that or in
    another environment, which restores a snapshot of it.
    """
    control = subject.control(0, budget.steps)
    tried = 0
    with Scene(subject) as scene:
        late = max(1, control.last // 2)
        walk = scene.walk(control, {1, late})
        one, two = walk.snaps[1], walk.snaps[late]
        seed, options = control.ops[0].value
        calls: dict[str, Callable[[AnyEnv], Any]] = {
            "restore": lambda env: scene.restore(env, one),
            "restore another": lambda env: scene.restore(env, two),
            "restore with a seed": lambda env: scene.restore(env, one, seed=5),
            "reset": lambda env: scene.reset(env, seed=seed + 1, options=subject.options(1)),
            "reset to the same": lambda env: scene.reset(env, seed=seed, options=options),
            "reset without a seed": lambda env: scene.reset(env, options=options),
            "snapshot": lambda env: scene.drop(scene.snapshot(env)),
            "fork": lambda env: scene.forget(scene.fork(env, 1)[0]),
            "step": lambda env: scene.call(env, control.ops[1]),
        }
        programs = list(itertools.product(calls, calls, calls))
        rng.shuffle(programs)
        # First what most restores by comparison would meet: the same state before and after something else.
        programs = [("restore", between, between) for between in calls for _ in range(2)] + programs
        ways = list(itertools.product((False, True), (1, late), ("itself", "a fork", "another")))
        drawn = [ways[place] for _ in range(0, len(programs), len(ways)) for place in rng.permutation(len(ways))]
        for index in budget.spending(len(programs), at_least=30):
            mark = len(scene.lines)
            forked, point, where = drawn[index]
            env = scene.fork(walk.env, 1)[0] if forked else walk.env
            for name in programs[index]:
                calls[name](env)
            on = "" if env is walk.env else "on a fork, "
            what = f"restored after {on}{', '.join(programs[index])}"
            result = scene.restore(env, walk.snaps[point])
            scene.expect_returned(env, walk, point, result, what)
            if where == "a fork":
                (child,) = scene.fork(env, 1)
                scene.expect(child, walk, point, f"a fork of one {what}", calls=2)
                scene.forget(child)
            elif where == "another":
                again = scene.snapshot(env)
                target = scene.fork(walk.env, 1)[0] if env is walk.env else walk.env
                of = f"a snapshot of one {what}"
                scene.expect_returned(target, walk, point, scene.restore(target, again), of)
                scene.expect(target, walk, point, of, calls=2)
                scene.drop(again)
                if target is not walk.env:
                    scene.forget(target)
            scene.expect(env, walk, point, what, calls=2)
            if env is not walk.env:
                scene.forget(env)
            del scene.lines[mark:]  # of those that were right
            tried += 1
    return {"programs": tried}


# What ordinary episodes do not reach.


@check(
    "restore.coverage",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Restores that are wrong only at a time limit, after a rare action or late in an episode corrupt training "
    "unnoticed.",
    blind="What the search did not reach (the evidence lists what it reached).",
)
def covered(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Searches for long episodes, every way of ending, rare actions, rewards and entries of info, and restores there.
    The search uses the environment's own snapshots, but the runs that it finds are recorded from a reset without any.
    Snapshots before and after some of these events, near the end and in the middle are restored in the environment that
    played on, in a new one and through a fork, and the whole rest is compared.
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
