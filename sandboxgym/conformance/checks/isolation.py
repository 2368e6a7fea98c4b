"""Level 2: state shared by environments of one process carries nothing from one fork to another.

Each check lets forks act and tests whether other environments behave as if nothing had happened. If they do not, it
names the shared state that changed in between. A change without an effect (a cache that fills) is no fault, and is
listed in the evidence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.harness import process_globals
from sandboxgym.conformance.harness.branching import variation
from sandboxgym.conformance.harness.scenario import Scene, comparable, first_difference, streams
from sandboxgym.conformance.subject import AnyEnv, Subject

Look = Callable[[AnyEnv], dict[str, Any]]


def _disturbed(
    subject: Subject, budget: Budget, rng: np.random.Generator, look: Look, what: str, rounds: int = 4
) -> tuple[int, list[str]]:
    """Let forks act between two looks at shared state; fail, naming the change, if the source or a sibling differs."""
    seen: set[str] = set()
    done = 0
    for index in budget.spending(rounds, at_least=2):
        control = subject.control(index % budget.traces, budget.steps)
        point = int(rng.integers(1, max(2, control.last)))
        suffixes = [variation(subject, control, point, rng, 12) for _ in range(2)]
        with Scene(subject) as scene:
            walk = scene.walk(control, [point])
            env = walk.env
            scene.restore(env, walk.snaps[point])
            first, second, third = scene.fork(env, 3)
            before = look(env)
            with suppress(Exception):
                scene.play(first, suffixes[0])
                scene.play(second, suffixes[1])
                scene.reset(second, seed=int(rng.integers(2**31)), options=subject.options(index + 1))
                scene.play(second, suffixes[0])
            change = process_globals.changed(before, look(env))
            seen |= set(change)
            scene.close(first)
            for target, name in ((env, "the source"), (third, "a sibling")):
                try:
                    scene.expect(target, walk, point, f"{name} after forks acted")
                except Failed as error:
                    if not change:
                        break  # another hazard: fork.isolation tells
                    shown = ", ".join(change[:6]) + (f" and {len(change) - 6} more" if len(change) > 6 else "")
                    evidence = {**error.evidence, "changed by forks": change[:50]}
                    raise Failed(
                        f"forks changed {what} ({shown}), and {error}", evidence, error.counterexample
                    ) from None
        done += 1
    return done, sorted(seen)


@check(
    "isolation.class_attributes",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="State kept on a class is shared by all siblings: what one does changes the others.",
    blind="Class attributes whose change shows in no sibling within the calls made.",
)
def class_attributes(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the data on the classes of all layers before and after forks act.
    Fails if it changed and the source or a sibling then behaves differently.
    """
    rounds, seen = _disturbed(subject, budget, rng, process_globals.class_attributes, "class attributes")
    return {"rounds": rounds, "changed without effect": seen}


@check(
    "isolation.globals",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Siblings share state kept in a module, and Python's and NumPy's global random streams: what one does "
    "changes the others.",
    blind="Globals of modules other than those of the environment's and wrappers' classes.",
)
def globals_(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the data in the modules of all layers' classes before and after forks act.
    Fails if it changed and the source or a sibling then behaves differently; or if streams are declared captured, but
    draws from a global random stream decide what happens.
    """
    rounds, seen = _disturbed(subject, budget, rng, process_globals.module_globals, "module globals")
    drawn = _global_draws(subject, budget)
    return {"rounds": rounds, "changed without effect": seen, "global streams drawn from without effect": drawn}


def _global_draws(subject: Subject, budget: Budget) -> list[str]:
    control = subject.control(0, budget.steps)
    used: set[str] = set()
    with Scene(subject) as scene:
        env = scene.start(control)
        for op in control.ops:
            before = process_globals.global_streams()
            scene.call(env, op)
            used |= set(process_globals.changed(before, process_globals.global_streams()))
    if not used or not subject.capabilities.rng:
        return sorted(used)
    futures = []
    for seed in (1, 1, 2, 3):
        with Scene(subject) as scene:
            random.seed(seed)
            np.random.seed(seed)
            scene.note(f"random.seed({seed}); np.random.seed({seed})")
            env = scene.start(control)
            futures.append(scene.play(env, control.ops[: control.last]))
            script = scene.script()
    differs = first_difference(futures[0], futures[2]) or first_difference(futures[0], futures[3])
    if differs and first_difference(futures[0], futures[1]) is None:
        raise Failed(
            f"the global stream of {' and '.join(sorted(used))} decides what happens ({differs}): all environments of "
            "a process share it, and snapshot_spec.rng declares streams captured",
            counterexample=script,
        )
    return sorted(used)


@check(
    "isolation.environment",
    level=2,
    after=("api.protocol",),
    hazard="A step, restore or fork that sets an environment variable, the working directory, umask or number of "
    "threads sets it for the whole process, and so for all siblings in it.",
    blind="Settings of other processes (see probes.matrix) and of libraries other than Python's own, NumPy and "
    "PyTorch; what every reset sets to the same value.",
)
def environment(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the settings of the whole process before and after each call of a tree search; fails if one changed.
    These are environment variables, working directory, umask, limits, priority, import path, signal handlers and mask,
    warnings, logging, locale, decimal context, settings of NumPy, PyTorch, asyncio and others; if streams are
    declared captured, also the global random streams, except in reset, step and render. All calls are made twice
    and compared the second time, from the first snapshot on: what changes only the first time (a library is loaded,
    say) does not count.
    """
    with process_globals.put_back():
        captured = subject.capabilities.rng  # read by making and closing an environment
    with suppress(Exception), process_globals.put_back(), Scene(subject) as scene:
        for _ in _operate(scene, subject, budget):
            pass
    calls = 0
    with process_globals.put_back(), Scene(subject) as scene:
        doing = _operate(scene, subject, budget)
        next(doing)
        before = _shared(captured)
        for done in doing:
            after = _shared(captured)
            change = process_globals.changed(before, after)
            if done.startswith(_ACTS):  # draws from a global stream are for isolation.globals
                change = [name for name in change if not name.startswith("stream of")]
            if change:
                shown = ", ".join(change[:6])
                scene.fail(f"{done} changed what the whole process shares: {shown}", {"changed": change[:50]})
            before = after
            calls += 1
    return {"calls": calls, "compared": len(before)}


_ACTS = ("reset", "step", "render")


def _shared(captured: bool) -> dict[str, Any]:
    found = process_globals.surroundings()
    if captured:
        found |= {f"stream of {name}": bits for name, bits in process_globals.global_streams().items()}
    return found


def _operate(scene: Scene, subject: Subject, budget: Budget) -> Iterator[str]:
    """Perform the operations of a tree search one after the other; yield the name of each call, a reset first."""
    env, other = scene.make(), scene.make()
    ops = subject.control(0, budget.steps).ops
    for each in (env, other):
        scene.reset(each, seed=1, options=subject.options(0))
    yield "reset()"
    snap = scene.snapshot(env)
    yield "snapshot()"
    for target, where in ((env, ""), (other, " in another environment")):
        for seed in (None, 1):
            scene.restore(target, snap, seed=seed)
            yield f"restore(seed={seed}){where}"
            for op in ops[1:3]:
                scene.call(target, op)
                yield f"step() after restore(seed={seed}){where}"
    if env.render_mode is not None:
        with suppress(Exception):
            env.render()
        yield "render()"
    for seed in (None, 1):
        children = scene.fork(env, 2, seed=seed)
        yield f"fork(2, seed={seed})"
        for number, child in enumerate(children):
            for op in ops[1:3]:
                scene.call(child, op)
                yield "step() of a fork"
            if number:
                scene.reset(child, seed=2, options=subject.options(1))
                yield "reset() of a fork"
            scene.forget(child)
            yield "close()"
    control = subject.control(1, budget.steps)
    for op in control.ops:
        scene.call(env, op)
        yield f"{op.kind}()"
    late = scene.snapshot(env)
    yield "snapshot() late in an episode"
    scene.restore(other, late)
    yield "restore() of it"
    for handle in (snap, late):
        scene.drop(handle)
        yield "release()"


@check(
    "isolation.files",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Siblings work in one folder: what one writes, the other finds.",
    blind="Files outside temporary folders, /dev/shm and the working directory; files in containers (see "
    "probes.matrix).",
)
def files(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares the files that environments have made, before and after forks act.
    They are looked for in temporary folders, /dev/shm and the working directory. Fails if they changed and the source
    or a sibling then behaves differently.
    """
    with process_globals.private_temporary() as folder:
        places = [*process_globals.places(), Path("/tmp")]
        known = process_globals.names(places)

        def look(env: AnyEnv) -> dict[str, Any]:
            return process_globals.contents(process_globals.names(places) - known - {folder})

        rounds, seen = _disturbed(subject, budget, rng, look, "files")
        effectless = [name.replace(str(folder), "$TMPDIR") for name in seen][:20]
        return {"rounds": rounds, "changed without effect": effectless}


@check(
    "isolation.spaces",
    level=2,
    after=("api.protocol",),
    hazard="Siblings draw actions or tasks from one random stream: what one draws changes what the other gets.",
    blind="Streams other than np_random and those of the action and observation spaces (see streams.unshared).",
)
def spaces(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Draws from the spaces and np_random of a source and of two forks in turn.
    The random streams of the other two must stay as they are.
    """
    control = subject.control(0, budget.steps)
    compared = 0
    with Scene(subject) as scene:
        env = scene.start(control)
        scene.play(env, control.ops[:1])
        children = scene.fork(env, 2)
        everyone: list[AnyEnv] = [env, *children]
        for actor in everyone:
            before = [streams(other) for other in everyone]
            name = scene.name(actor)
            scene.note(f"{name}.action_space.sample(), {name}.observation_space.sample(), {name}.np_random.random()")
            for draw in (actor.action_space.sample, actor.observation_space.sample, lambda: actor.np_random.random()):  # noqa: B023
                with suppress(Exception):
                    draw()
            for other, bits in zip(everyone, before):
                if other is actor:
                    continue
                found = streams(other)
                for stream, value in bits.items():
                    if value is not None and found.get(stream) != value:
                        scene.fail(
                            f"a draw from {name} moved the random stream {stream} of {scene.name(other)}",
                            {"stream": stream},
                        )
                    compared += value is not None
    if not compared:
        raise Skipped("no stream was found to compare, of np_random or of a space; see streams.unshared")
    return {"streams compared": compared}


@check(
    "isolation.caches",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A cache returns entries of another branch: an agent gets rewards or texts of a sibling's state.",
    blind="Wrong entries that no fork hits; without an importable factory, caches that outlive environments.",
)
def caches(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Plays forks with different actions from one moment, one after the other, then again in another order.
    Each must give what its actions give in a new environment, and this must be what they give in a new process, where
    no cache is filled yet.
    """
    from sandboxgym.conformance.harness import other_process

    compared = 0
    truths = []
    control = subject.control(0, budget.steps)
    if not control.repeatable:
        raise Skipped(f"runs do not repeat themselves: {control.differs}")
    points = [1, max(1, control.last // 2)]
    plans = [(point, [variation(subject, control, point, rng, 10) for _ in range(3)]) for point in points]
    jobs = [
        other_process.Job(control.seed, (*control.ops[:point], *suffix))
        for point, suffixes in plans
        for suffix in suffixes
    ]
    try:
        clean = other_process.run(subject, jobs, separate=True)
    except other_process.Unreachable as error:
        clean = None
        truths.append(f"no new process: {error}")
    number = 0
    for point, suffixes in plans:
        with Scene(subject) as scene:
            alone = [scene.alone(control, point, suffix) for suffix in suffixes]
            walk = scene.walk(control, [point])
            if clean is not None:
                for one in alone:
                    differs = first_difference(
                        other_process.stateless(clean[number]), other_process.stateless(one.outcomes)
                    )
                    if differs:
                        scene.fail(
                            "in a process where others have played, an environment gives something else than in a new "
                            f"one: {differs}"
                        )
                    number += 1
            for order in ((0, 1, 2), (2, 0, 1)):
                scene.restore(walk.env, walk.snaps[point])
                for place in order:
                    (child,) = scene.fork(walk.env, 1)
                    compared += scene.expect(child, alone[place], point, "a fork after siblings took other actions")
                    scene.forget(child)
            scene.restore(walk.env, walk.snaps[point])
            walk.end = comparable(subject, control)
            scene.expect(walk.env, walk, point, "the source after forks took other actions")
    return {"calls compared": compared, "compared with a new process": clean is not None, "not tried": truths}
