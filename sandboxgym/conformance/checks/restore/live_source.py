"""Level 1: sources of snapshots that stay open and move on while their snapshots are restored."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.checks.restore.runs import (
    controls,
    own_future,
)
from sandboxgym.conformance.harness import other_process
from sandboxgym.conformance.harness.coverage import coverage
from sandboxgym.conformance.harness.scenario import (
    Scene,
    Walk,
    comparable,
    first_difference,
    outcome_difference,
)
from sandboxgym.conformance.subject import Control, Subject, snapshot
from sandboxgym.conformance.supervision import scratch


@check(
    "restore.live_source",
    level=1,
    needs=("exact",),
    after=("api.protocol",),
    hazard="While a trajectory continues, workers that restore its snapshots get its current files, tables or caches.",
    blind="Source environments on other machines.",
)
def live_source(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Restores snapshots while the environment that took them (the source) is alive and ahead in its episode.
    Both then step in turn, and the restored one plays on after the source is reset and closed. Two sources also serve
    two workers, in random order. Then the source runs in a thread. If cross_process is declared, the restored
    environment also runs in another process, while the source steps here before each of its calls. Workers and sources
    must all give what they give alone.
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
    """Restore in another process; the source here moves before each of its calls."""
    point = max(1, control.last // 3)
    with Scene(subject) as scene, scratch.folder() as folder, scratch.folder() as meeting:
        source = scene.start(control)
        own = own_future(scene, source, control)
        scene.play(source, control.ops[:point])
        try:
            parcel = other_process.carried(scene.snapshot(source), Path(folder), "snapshot")
            place = point + scene.expect(source, own, point, "the source of a snapshot", calls=2)
            started = other_process.start(
                subject,
                [
                    other_process.Job(control.seed, control.ops[point : own.end], parcel, meeting=meeting),
                    other_process.Job(control.seed, control.ops[: own.end]),
                ],
                other_process.Child(),
            )
            try:
                for number in range(own.end - point):
                    if not other_process.is_met(started, meeting, number):
                        break
                    if place < own.end:
                        scene.expect_raw(source, own, place, "a source whose snapshot moves in another process")
                        place += 1
                    other_process.allow(meeting, number)
            except BaseException:
                other_process.abandon(started)
                raise
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
            scene.fail(f"restored in another process while its source is alive and moves in between: {differs}")
        scene.expect(source, own, place, "a source after its snapshot was restored in another process")
        return own.end - point
