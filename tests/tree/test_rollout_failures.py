"""Environments that die in the middle of a rollout."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
from failing_envs import Fragile, Mortal, Refusing, let_fail
from test_tree import ForkEveryPath, Forks, Wanderer, sampled

import sandboxgym.wrappers.jobs as jobs
from sandboxgym import SnapshotEnv, snapshot
from sandboxgym.errors import SnapshotMissing
from sandboxgym.tree import (
    Action,
    Context,
    Envs,
    Failure,
    PathKey,
    Recovery,
    Schedule,
    lockstep,
    rollout,
    rollout_async,
)
from sandboxgym.tree.lockstep import ORIGINS
from sandboxgym.workers.pool import PooledEnvs


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every snapshot of the test; all are released at its end. To take one and to restore are calls that may fail."""
    snaps: list[Any] = []

    def capture(env: gym.Env[Any, Any]) -> Any:
        snaps.append(snapshot(env))
        return snaps[-1]

    monkeypatch.setattr(jobs, "snapshot", capture)
    let_fail(monkeypatch)
    yield snaps
    assert snaps and all(snap.released for snap in snaps)


class Remembering(Wanderer):
    """Is told of every path that it need not remember any more: once, and of all."""

    def __init__(self) -> None:
        self.asked: set[tuple[int, PathKey]] = set()
        self.released: Counter[tuple[int, PathKey]] = Counter()

    def _act(self, context: Context) -> Action | None:
        assert context.path not in self.released
        self.asked.add(context.path)
        return super()._act(context)

    def release(self, path: tuple[int, PathKey]) -> None:
        self.released[path] += 1

    def check(self) -> None:
        assert set(self.released.values()) == {1}
        assert self.asked <= set(self.released)


SCHEDULES = [Forks(3, 1, 3), Forks(3, 1, 3, late=True), ForkEveryPath(2)]


def rolled(fate: Callable[[str, int], bool], schedule: Schedule, **kwargs: Any) -> tuple[list[Any], list[Failure]]:
    """Trees of three tasks and the failures."""
    Mortal.fate, Mortal.calls, Mortal.closed = staticmethod(fate), Counter(), []  # type: ignore[assignment]
    failures: list[Failure] = []
    policy, threads = Remembering(), kwargs.pop("threads", 1)
    with Envs(lambda: Mortal(gym.make("toys/Dice-v0")), threads=threads) as envs:
        trees = rollout(envs, policy, schedule, tasks=[None] * 3, seed=(3,), failures=failures, **kwargs)
        assert sum(env.dead for env in Mortal.closed) == len(failures)
    policy.check()
    return trees, failures


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("overlap", "threads"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("call", ["reset", "snapshot", "restore", "step"])
def test_what_fails_changes_nothing(
    taken: list[Any], schedule: Schedule, overlap: bool, threads: int, call: str
) -> None:
    whole, none = rolled(lambda *_: False, schedule)
    times = Mortal.calls[call]
    assert none == []
    for nth in {0, times // 3, times // 2, times - 1}:
        trees, failures = rolled(
            lambda name, before, nth=nth: (name, before) == (call, nth),
            schedule, overlap=overlap, threads=threads, retries=1,
        )  # fmt: skip
        assert [failure.dropped for failure in failures] == [0]
        assert f"gone at {call}" in failures[0].error
        assert sampled(trees) == sampled(whole)
        assert [tree.snapshots for tree in trees] == [tree.snapshots for tree in whole]


@pytest.mark.parametrize("failing", [range(1), range(4, 6), range(7, 9)])
def test_environments_that_cannot_be_made_are_asked_for_again(taken: list[Any], failing: range) -> None:
    asked = itertools.count()

    def make() -> gym.Env[Any, Any]:
        if (number := next(asked)) in failing:
            raise TimeoutError(f"environment {number} took too long")
        return Mortal(gym.make("toys/Dice-v0"))

    schedule = Forks(3, 1, 3)
    whole = sampled(rolled(lambda *_: False, schedule)[0])
    with Envs(make) as envs:
        trees = rollout(envs, Remembering(), schedule, tasks=[None] * 3, seed=(3,), retries=len(failing))
    assert sampled(trees) == whole
    asked = itertools.count()
    with Envs(make) as envs, pytest.raises(TimeoutError, match=f"environment {failing[-1]} took too long"):
        rollout(envs, Remembering(), schedule, tasks=[None] * 3, seed=(3,), retries=len(failing) - 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_failures_change_nothing_but_what_they_drop(taken: list[Any], schedule: Schedule) -> None:
    whole = sampled(rolled(lambda *_: False, schedule)[0])
    dropped = 0
    for period in (5, 7, 11):
        trees, failures = rolled(lambda call, before, period=period: before % period == 2, schedule, retries=2)
        found = sampled(trees)
        assert found.items() <= whole.items() and len(found) > 0
        assert len(whole) - len(found) >= sum(failure.dropped > 0 for failure in failures)
        for index, key in found:  # nothing is left of what its prefix was dropped with
            assert all((index, key[:end]) in found for end in range(2, len(key), 2))
        for tree in trees:
            edges = {id(edge) for edge in tree.edges()}
            assert {id(edge) for edge in tree.root.children} <= edges
            assert all(id(child) in edges for edge in tree.edges() for child in edge.child.children)
        dropped += len(whole) - len(found)
    assert dropped


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overlap", [False, True])
def test_after_the_timeout_of_a_rollout_what_has_not_ended_is_dropped(
    taken: list[Any], monkeypatch: pytest.MonkeyPatch, schedule: Schedule, overlap: bool
) -> None:
    whole = sampled(rolled(lambda *_: False, schedule)[0])
    now = 0.0
    monkeypatch.setattr(lockstep, "time", SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: now))

    class Slow(Remembering):
        def __init__(self, moment: int) -> None:
            super().__init__()
            self.left = moment

        def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
            nonlocal now
            self.left -= 1
            now = 0.0 if self.left > 0 else 11.0
            return super().__call__(contexts)

    kept = set()
    for moment in (*range(1, 32, 3), 1000):
        now = 0.0
        failures: list[Failure] = []
        policy = Slow(moment)
        kwargs: dict[str, Any] = {"tasks": [None] * 3, "seed": (3,), "overlap": overlap, "timeout": 10.0}
        with Envs(lambda: Mortal(gym.make("toys/Dice-v0"))) as envs:
            trees = rollout(envs, policy, schedule, retries=1, failures=failures, **kwargs)
            found = sampled(trees)
            assert found.items() <= whole.items() and (len(found) < len(whole)) == bool(failures)
            assert all(each.dropped and "took longer than 10.0 s" in each.error for each in failures)
            kept.add(len(found))
            policy.check()
            if failures:
                now = 0.0
                with pytest.raises(TimeoutError, match=r"the rollout took longer than 10.0 s"):
                    rollout(envs, Slow(moment), schedule, **kwargs)
    assert min(kept) == 0 and max(kept) == len(whole) and len(kept) > 2


@pytest.mark.parametrize("call", ["reset", "restore", "step"])
def test_after_the_timeout_nothing_is_tried_again_and_no_other_task_begins(
    taken: list[Any], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    now = 0.0
    monkeypatch.setattr(lockstep, "time", SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: now))

    def fate(name: str, before: int) -> bool:
        nonlocal now
        now = 11.0 if (name, before) == (call, 1) else now
        return name == call and before > 0

    monkeypatch.setattr(Mortal, "fate", staticmethod(fate))
    policy, failures = Remembering(), list[Failure]()
    with Envs(lambda: Mortal(gym.make("toys/Dice-v0"))) as envs:
        given: dict[str, Any] = {"retries": 3, "max_live": 2, "timeout": 10.0, "failures": failures}
        assert rollout(envs, policy, SCHEDULES[0], tasks=[None] * 3, **given) == []
    policy.check()
    assert all(failure.dropped for failure in failures)
    assert {failure.task for failure in failures} == {0, 1, 2}
    assert Mortal.calls["reset"] == (2 if call == "reset" else 3)


def test_a_timeout_is_positive() -> None:
    with Envs(lambda: gym.make("toys/Dice-v0")) as envs, pytest.raises(ValueError, match="timeout"):
        rollout(envs, Remembering(), SCHEDULES[0], timeout=0.0)
    with Envs(lambda: gym.make("toys/Dice-v0")) as envs, pytest.raises(ValueError, match="timeout"):
        asyncio.run(rollout_async(envs, Remembering(), SCHEDULES[0], timeout=float("nan")))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["reset", "snapshot", "restore", "step"])
def test_without_retries_the_first_error_is_raised(taken: list[Any], call: str) -> None:
    Mortal.fate = staticmethod(lambda name, before: (name, before) == (call, 2))  # type: ignore[assignment]
    made: list[Mortal] = []
    envs = Envs(lambda: made.append(Mortal(gym.make("toys/Dice-v0"))) or made[-1])
    with pytest.raises(ConnectionError, match=f"gone at {call}"):
        rollout(envs, Wanderer(), Forks(3, 1), tasks=[None] * 3)
    with pytest.raises(ConnectionError, match="gone at close"):
        envs.close()
    assert len(made) > 2 and set(map(id, made)) == set(map(id, Mortal.closed))  # the others as well


class Breaking(Remembering):
    """Breaks the environment of some paths, every time."""

    def __init__(self, breaks: Callable[[Context], bool]) -> None:
        super().__init__()
        self.breaks = breaks

    def _act(self, context: Context) -> Action | None:
        action = super()._act(context)
        return Action("break", memory=action.memory) if action is not None and self.breaks(context) else action


@pytest.mark.parametrize(
    ("schedule", "victim", "depth", "lost"),
    [
        (Forks(3, 1, 3), (0, 0), 5, {(0, 0), (0, 0, 1, 1), (0, 0, 1, 2), (0, 0, 3, 1), (0, 0, 3, 2)}),
        (Forks(3, 1, 3), (0, 0, 1, 1), 3, {(0, 0, 1, 1)}),
        (Forks(3, 1, 3, late=True), (0, 1), 0, {(0, 1)}),
        (Forks(1, 1, 3, late=True), (0, 0), 2, {(0, 0), (0, 0, 1, 1), (0, 0, 1, 2), (0, 0, 3, 1), (0, 0, 3, 2)}),
    ],
)
@pytest.mark.parametrize("max_live", [1, 100])
def test_a_path_that_cannot_be_saved_is_dropped_with_its_forks(
    schedule: Schedule, victim: PathKey, depth: int, lost: set[PathKey], max_live: int
) -> None:
    failures: list[Failure] = []
    with Envs(lambda: Fragile(gym.make("toys/Dice-v0"))) as envs:
        whole = sampled(rollout(envs, Wanderer(), schedule, tasks=[None] * 2, seed=(3,)))
        policy = Breaking(lambda context: context.path == (1, victim) and context.depth == depth)
        trees = rollout(
            envs, policy, schedule, tasks=[None] * 2, seed=(3,), retries=2, failures=failures, max_live=max_live
        )
    policy.check()
    assert sampled(trees) == {key: path for key, path in whole.items() if key[0] == 0 or key[1] not in lost}
    assert [(failure.path, failure.depth) for failure in failures] == [(victim, depth)] * 3
    assert [failure.dropped > 0 for failure in failures] == [False, False, True]
    assert [tree.index for tree in trees] == ([0] if len(whole) == 2 * len(lost) else [0, 1])


class Moody(SnapshotEnv[int, int]):
    """Shows what it does not capture."""

    observation_space = action_space = gym.spaces.Discrete(100)
    shown = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: int):
        Moody.shown += 1
        if Moody.shown == 4:
            raise ConnectionError("gone")
        return Moody.shown, 0.0, Moody.shown > 8, False, {}

    def _capture(self) -> int:
        return 0

    def _apply(self, state: int) -> None:
        pass


def test_another_course_of_things_is_not_taken_for_the_same() -> None:
    Moody.shown, failures = 0, []
    with Envs(Moody) as envs:
        assert rollout(envs, Wanderer(), Schedule(1), retries=2, failures=failures) == []
    assert [failure.error.partition(":")[0] for failure in failures] == ["ConnectionError", "Diverged", "Diverged"]


def test_a_task_that_cannot_be_reset_to_is_left_out(taken: list[Any]) -> None:
    failures: list[Failure] = []
    with Envs(lambda: Mortal(Refusing(gym.make("toys/Dice-v0")))) as envs:
        roots = {0: 2, 1: 3, 2: 1}
        trees = rollout(envs, Wanderer(), Schedule(roots), tasks=[0, 1, 2], retries=1, failures=failures)
        assert [(tree.index, len(tree.paths)) for tree in trees] == [(0, 2), (2, 1)]
        assert [(failure.task, failure.dropped) for failure in failures] == [(1, 0), (1, 3)]


def test_retries_are_not_negative() -> None:
    with Envs(Moody) as envs, pytest.raises(ValueError, match="at least 0, found -1"):
        rollout(envs, Wanderer(), Schedule(1), retries=-1)


def test_worker_processes_that_are_killed_change_nothing() -> None:
    class Killing(Wanderer):
        """Kills the worker of the first environment at some calls."""

        def __init__(self, envs: PooledEnvs, at: Sequence[int]) -> None:
            self.envs, self.at, self.calls = envs, at, 0

        def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
            self.calls += 1
            if self.calls in self.at:
                pid = self.envs._slots[0].worker.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            return super().__call__(contexts)

    failures: list[Failure] = []
    with PooledEnvs("toys/Dice-v0", 2) as envs:
        whole = rollout(envs, Wanderer(), Forks(2, 1, 3), tasks=[None] * 3, seed=(3,))
        trees = rollout(
            envs, Killing(envs, (2, 5)), Forks(2, 1, 3), tasks=[None] * 3, seed=(3,), retries=3, failures=failures
        )
    assert sampled(trees) == sampled(whole)
    assert failures and not any(failure.dropped for failure in failures)


class Told(Envs):
    """Is told what was lost and recovered."""

    def __init__(self, make: Callable[[], gym.Env[Any, Any]]) -> None:
        super().__init__(make)
        self.events: list[Failure | Recovery] = []

    def note(self, event: Failure | Recovery) -> None:
        self.events.append(event)


def told(fate: Callable[[str, int], bool], *, at_once: bool) -> list[Failure | Recovery]:
    """Events of a rollout of one path, forked when it has ended; in lockstep, or each path by itself."""
    Mortal.fate, Mortal.calls, Mortal.closed = staticmethod(fate), Counter(), []  # type: ignore[assignment]
    policy = Wanderer()

    async def decide(context: Context) -> Action | None:
        (action,) = policy([context])
        return action

    with Told(lambda: Mortal(gym.make("toys/Dice-v0"))) as envs:
        shared: dict[str, Any] = {"tasks": [None], "seed": (3,), "retries": 2}
        if at_once:
            rollout(envs, policy, Forks(1, 2, late=True), **shared)
        else:
            asyncio.run(rollout_async(envs, decide, Forks(1, 2, late=True), **shared))
    return envs.events


@pytest.mark.parametrize("at_once", [True, False], ids=["lockstep", "by themselves"])
@pytest.mark.parametrize(
    ("call", "times", "kinds"),
    [
        ("step", [4], ["snapshot"]),  # taken one step before
        ("step", [4, 5], ["fork"]),  # the second, in the replay, casts doubt on the snapshot
        ("restore", [0], ["fork"]),
        ("step", [4, 5, 6], []),
    ],
)
def test_every_recovery_is_told_and_one_line_of_the_log_says_from_where(
    taken: list[Any], caplog: pytest.LogCaptureFixture, at_once: bool, call: str, times: list[int], kinds: list[str]
) -> None:
    with caplog.at_level(logging.WARNING, "sandboxgym"):
        events = told(lambda name, before: name == call and before in times, at_once=at_once)
    lost = [event for event in events if isinstance(event, Failure)]
    back = [event for event in events if isinstance(event, Recovery)]
    assert len(lost) == len(times) and [event.kind for event in back] == kinds
    assert sum(event.dropped > 0 for event in lost) == (not kinds)
    lines = [line for line in caplog.messages if line.startswith("recovered")]
    assert len(lines) == len(back)
    for line, event in zip(lines, back, strict=True):
        assert ORIGINS[event.kind] in line and f"repeated: {event.actions}, after: ConnectionError: gone" in line
        assert (event.task, event.path) == (lost[0].task, lost[0].path)


@pytest.mark.parametrize("at_once", [True, False], ids=["lockstep", "by themselves"])
def test_a_recovery_by_a_reset_is_told_as_that(
    taken: list[Any], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    restore, lost = jobs.restore, []

    def missing(env: gym.Env[Any, Any], snap: Any, *, seed: int | None) -> Any:
        if Mortal.calls["step"] > 4 and len(lost) < 2:
            lost.append(snap)
            raise SnapshotMissing("nobody has it")
        return restore(env, snap, seed=seed)

    monkeypatch.setattr(jobs, "restore", missing)
    events = told(lambda name, before: (name, before) == ("step", 4), at_once=at_once)
    recovered = [event for event in events if isinstance(event, Recovery)]
    assert [event.kind for event in recovered] == ["reset"]
    assert recovered[0].actions == recovered[0].depth


@pytest.mark.parametrize("every", [0, 2])
def test_paths_without_forks_are_captured_every_so_many_steps(
    taken: list[Any], every: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sandboxgym")
    whole, _ = rolled(lambda *_: False, Schedule(2))
    steps = Mortal.calls["step"]
    trees, failures = rolled(
        lambda name, before: name == "step" and before == steps * 2 // 3, Schedule(2), retries=1, capture_every=every
    )
    assert sampled(trees) == sampled(whole) and len(failures) == 1
    (line,) = [record.getMessage() for record in caplog.records if "recovered" in record.getMessage()]
    repeated = int(line.partition("repeated: ")[2].partition(",")[0])
    assert (ORIGINS["snapshot"] in line, repeated <= 2) == (bool(every), bool(every))
    assert any(len(path.edges) > every for tree in trees for path in tree.paths)
