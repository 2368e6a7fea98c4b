"""Level 5: environments of one family work at the same time, and a failed fork leaves nothing behind."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.runs import controls
from sandboxgym.conformance.harness import process_globals
from sandboxgym.conformance.harness.branching import variation
from sandboxgym.conformance.harness.scenario import Scene, Walk, first_difference, outcome_difference
from sandboxgym.conformance.subject import AnyEnv, Subject, fork, layers, restore, snapshot
from sandboxgym.conformance.supervision import processes


def _plan(
    subject: Subject, budget: Budget, rng: np.random.Generator, number: int
) -> tuple[Any, int, list[tuple[Any, ...]], list[list[Any]]]:
    control = subject.control(number, budget.steps)
    if not control.repeatable:
        raise Skipped(f"runs do not repeat themselves: {control.differs}")
    point = max(1, control.last // 2)
    suffixes = [variation(subject, control, point, rng, 10) for _ in range(budget.forks)]
    expected = []
    with Scene(subject) as scene:
        for suffix in suffixes:
            expected.append(scene.alone(control, point, suffix).outcomes[point:])
    return control, point, suffixes, expected


def _together(tasks: list[Callable[[], None]]) -> None:
    """Run tasks in threads that start together; the first exception is raised."""
    barrier = threading.Barrier(len(tasks))

    def started(task: Callable[[], None]) -> None:
        barrier.wait(60)
        task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        for future in [pool.submit(started, task) for task in tasks]:
            future.result()


@check(
    "concurrency.fork_in_threads",
    level=5,
    needs=("exact",),
    after=("api.protocol",),
    hazard="Rollouts in threads mix: environments that work one at a time get each other's states when they run at "
    "once.",
    blind="Races that are rarer than the rounds made; several threads using one environment at once, which is not "
    "required.",
)
def fork_in_threads(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Runs threads that each restore a snapshot in an environment of their own, fork, play and close, all at once.
    Two of them restore the same snapshot, the others those of other moments. Each must give what it gives alone.
    """
    rounds = 0
    pool = [control for control in controls(subject, budget) if control.repeatable]
    if not pool:
        raise Skipped("no run repeats itself: " + subject.control(0, budget.steps).differs)
    with Scene(subject) as scene:
        plans = []
        for number in range(budget.forks):
            control = pool[number % len(pool)]
            point = int(rng.integers(1, max(2, control.last)))
            suffix = variation(subject, control, point, rng, 10)
            expected = scene.alone(control, point, suffix).outcomes[point:]
            plans.append((scene.walk(control, [point]).snaps[point], suffix, expected))
        for _ in budget.spending(10, at_least=2):
            _together([_forking(subject, *plan) for plan in plans + plans[:1]])
            rounds += 1
    return {"rounds": rounds, "threads": len(plans) + 1}


def _forking(subject: Subject, snap: Any, suffix: Any, expected: Any) -> Callable[[], None]:
    def task() -> None:
        env = subject.make_env()
        try:
            for _ in range(3):
                restore(env, snap)
                for child in (*fork(env, 1), env):
                    try:
                        found = [subject.call(child, op)[0] for op in suffix]
                        if differs := first_difference(expected, found):
                            raise Failed(f"forked and played in a thread, with others beside it, it differs: {differs}")
                    finally:
                        if child is not env:
                            child.close()
        finally:
            env.close()

    return task


@check(
    "concurrency.snapshot_while_stepping",
    level=5,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A snapshot taken while siblings act contains part of their state.",
    blind="Races that are rarer than the rounds made.",
)
def snapshot_while_stepping(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Steps a source in a thread, with a snapshot before every call, while its forks play in other threads.
    The source, the forks, and in the end the restores of all these snapshots must give what they give alone.
    """
    rounds = 0
    for number in budget.spending(min(4, budget.traces), at_least=1):
        control, point, suffixes, expected = _plan(subject, budget, rng, number)
        with Scene(subject) as scene:
            walk = scene.walk(control, [point])
            scene.restore(walk.env, walk.snaps[point])
            children = scene.fork(walk.env, len(suffixes))
            snaps: list[tuple[int, Any]] = []

            def source(scene: Scene = scene, walk: Walk = walk, point: int = point, snaps: Any = snaps) -> None:
                for index in range(point, walk.control.last):
                    snaps.append((index, snapshot(walk.env)))
                    found = subject.call(walk.env, walk.control.ops[index])[0]
                    if found != walk.expected[index]:
                        text = outcome_difference(walk.expected[index], found)
                        raise Failed(f"the source of forks that play in threads differs at call {index}: {text}")

            def player(child: AnyEnv, suffix: Any, truth: Any) -> Callable[[], None]:
                def task() -> None:
                    found = [subject.call(child, op)[0] for op in suffix]
                    if differs := first_difference(truth, found):
                        raise Failed(f"a fork playing in a thread, while its source is snapshotted, differs: {differs}")

                return task

            tasks = [player(*each) for each in zip(children, suffixes, expected)]
            _together([source, *tasks])
            for index, snap in snaps:
                scene.adopt(snap, f"taken at call {index} while forks played in threads")
                scene.restore(walk.env, snap)
                scene.expect(walk.env, walk, index, "restored from a snapshot taken while forks played", calls=4)
            rounds += 1
    return {"rounds": rounds}


_ATTEMPTS = 3
_WRITTEN_MEANWHILE = {"temporary files", "temporary folders"}
"""Counts that processes of the environment may raise meanwhile; forks are at fault if all `_ATTEMPTS` raise them."""


class _Injected(Exception):
    """Exception injected into a fork."""


@check(
    "concurrency.partial_fork",
    level=5,
    after=("api.protocol",),
    hazard="A fork(8) that fails at the fifth child leaves four environments that nobody can close.",
    blind="Failures other than exceptions in the methods restore, _apply, reset and __init__ of the environment's "
    "class.",
)
def partial_fork(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Makes ``fork(4)`` fail at the third or sixth call of a method on its children, for each of several methods.
    The exception must reach the caller, children made until then must be closed or gone, threads, processes,
    descriptors and mounts must be as before, and the source must continue unharmed. Fails too if each of three tries
    leaves temporary files or folders.
    """
    control = subject.control(0, budget.steps)
    tried = []
    for name in ("restore", "_apply", "reset", "__init__"):
        for seed, calls in ((None, 3), (1, 3), (1, 6)):  # at the third child; late, where children are visited twice
            with process_globals.private_temporary() as path:
                outcome = _broken_fork(subject, control, name, path, seed, calls)
            if outcome is not None:
                tried.append({"failing": name, "call": calls, "seed": seed, **outcome})
    if not tried:
        raise Skipped("fork() calls no method of the children in which a failure could be injected")
    return {"injected": tried}


def _broken_fork(
    subject: Subject, control: Any, name: str, path: Path, seed: int | None, limit: int
) -> dict[str, Any] | None:
    point = max(1, control.last // 2)
    with Scene(subject) as scene:
        walk = scene.walk(control, ())
        env = scene.start(control)
        scene.play(env, control.ops[:point])
        for child in fork(env, 1, None):  # what the source keeps of its own state, say a snapshot until its next step
            child.close()
        grown: dict[str, int] = {}
        for attempt in range(_ATTEMPTS):
            before, mounts = processes.held(path), processes.mounts()
            failure = _fail(env, name, seed, limit)
            if not failure.raised and attempt:
                break
            if not failure.raised:
                if failure.calls >= limit:
                    scene.fail(f"fork(4) returned {failure.made} environments although {name} of a child raised")
                return None
            unclosed = failure.unclosed()
            after = processes.held(path)  # collects garbage first
            kept = [living for each in unclosed if (living := each()) is not None]
            for living in kept:
                living.close()
            if kept:
                scene.fail(
                    f"fork(4) failed ({name} of a child raised), and {len(kept)} children live on: something holds "
                    "them, and nobody can close them"
                )
            more = processes.mounts() - mounts
            left = {what: after[what] - count for what, count in before.items() if after[what] > count}
            if more and not processes.until(lambda: not more & processes.mounts(), 3):  # noqa: B023  another program's
                left["mounts"] = len(more)
            lasting = {what for what in left if attempt == 0 or what in grown or what not in _WRITTEN_MEANWHILE}
            grown = {what: left[what] for what in lasting}
            if not grown or not grown.keys() <= _WRITTEN_MEANWHILE:
                break
        if grown:
            scene.fail(f"fork(4) failed ({name} of a child raised) and left: {grown}", {"left": grown})
        scene.note(f"# fork(4) fails: {name} of a child raises")
        if control.repeatable:
            scene.expect(env, walk, point, "the source of a fork that failed")
    return {"children closed": len(failure.closed)}


@dataclass
class _Failure:
    """Outcome of a fork in which a call on a child was to raise."""

    calls: int = 0
    raised: bool = False
    made: int = 0
    """Number of environments that were returned in spite of the failure; they are closed."""
    children: list[Any] = field(default_factory=list)
    """All children on which the method was called."""
    closed: set[int] = field(default_factory=set)
    """Ids of the children that were closed."""

    def unclosed(self) -> list[weakref.ref[Any]]:
        """Weak references to the children that were not closed; the strong ones here are dropped."""
        found = [weakref.ref(child) for child in self.children if id(child) not in self.closed]
        self.children.clear()
        return found


def _fail(env: AnyEnv, name: str, seed: int | None, limit: int) -> _Failure:
    """Call ``fork(4)`` while a method of the innermost environment's class raises for children, from a call on."""
    base = list(layers(env))[-1]
    kind = type(base)
    failure = _Failure()
    original, close = getattr(kind, name, None), kind.close
    if original is None or not callable(original):
        return failure

    @functools.wraps(original)  # its signature may be asked for
    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not base:
            if not any(self is each for each in failure.children):
                failure.children.append(self)
            failure.calls += 1
            if failure.calls >= limit:
                raise _Injected("on purpose")
        return original(self, *args, **kwargs)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        failure.closed.add(id(self))
        return close(self, *args, **kwargs)

    had, had_close = name in vars(kind), "close" in vars(kind)
    setattr(kind, name, failing)
    kind.close = counted  # type: ignore[method-assign]
    children: list[AnyEnv] = []
    try:
        children = fork(env, 4, seed)
    except _Injected:
        failure.raised = True
    except Exception as error:
        failure.raised = any(isinstance(e, _Injected) for e in (error.__cause__, error.__context__))
        if not failure.raised:
            raise
    finally:
        if had:
            setattr(kind, name, original)
        else:
            delattr(kind, name)
        if had_close:
            kind.close = close  # type: ignore[method-assign]
        else:
            delattr(kind, "close")
    failure.made = len(children)
    for child in children:
        child.close()
    return failure
