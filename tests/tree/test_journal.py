"""Journals of rollouts: a killed rollout continues with the trees that it would have had, whatever is there of it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import worker_envs
from test_tree import ForkEveryPath, Forks, Wanderer, sampled

from sandboxgym.tree import Action, Context, Envs, RolloutTree, Schedule, rollout, rollout_async
from sandboxgym.tree.journal import Journal, JournalMismatch
from sandboxgym.workers.pool import PooledEnvs

worker_envs.register()
SCHEDULES = [Forks(3, 1, 3), Forks(3, 1, 3, late=True), ForkEveryPath(2)]


class Killed(BaseException):
    """The process ends here."""


class Mortal(Wanderer):
    """Ends its process, so to speak, at one of its calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().__call__(contexts)


class Recalling(Mortal):
    """Counts the decisions that it made itself."""

    def __init__(self, calls: int = 10**9) -> None:
        super().__init__(calls)
        self.decided: Counter[Any] = Counter()

    def _act(self, context: Context) -> Action:
        self.decided[context.path] += 1
        return super()._act(context)

    def record(self, action: Action) -> Any:
        return [action.text, action.position, action.memory]

    def recall(self, contexts: Sequence[Context], records: Sequence[Any]) -> list[Action]:
        return [Action(text, position=at, tokens=3, memory=memory) for text, at, memory in records]


class Counting(gym.Wrapper):
    """Counts the steps of environments."""

    steps = 0

    def step(self, action: Any) -> Any:
        Counting.steps += 1
        return super().step(action)


class OneByOne:
    """A policy of one path at a time."""

    def __init__(self, policy: Recalling) -> None:
        self.policy, self.record, self.recall = policy, policy.record, policy.recall

    async def __call__(self, context: Context) -> Action | None:
        await asyncio.sleep(0)
        return self.policy([context])[0]


def grown(envs: Any, policy: Any, schedule: Schedule, *, driver: str = "lockstep", **options: Any) -> list[RolloutTree]:
    options |= {"tasks": [None] * 3, "seed": (3,)}
    if driver == "async":
        return asyncio.run(rollout_async(envs, OneByOne(policy), schedule, **options))
    return rollout(envs, policy, schedule, **options)


def journal(folder: Path, **options: Any) -> Journal:
    return Journal(folder / "update-0", head={"seed": 3}, **options)


def local() -> Envs:
    return Envs(lambda: Counting(gym.make("toys/Dice-v0")))


def begun(folder: Path, envs: Any, policy: Any, schedule: Schedule, **options: Any) -> None:
    """A rollout whose policy ends the process."""
    kept = journal(folder, recall=options.pop("recall", False))
    with pytest.raises(Killed):
        grown(envs, policy, schedule, journal=kept, **options)
    kept.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{}, {"retries": 2, "overlap": True}, {"max_live": 4}], ids=str)
@pytest.mark.parametrize("recall", [False, True])
def test_a_rollout_that_was_killed_continues_with_its_trees(
    tmp_path: Path, schedule: Schedule, options: dict[str, Any], recall: bool
) -> None:
    with local() as envs:
        policy = Recalling()
        whole = sampled(grown(envs, policy, schedule, **options))
        everything = policy.decided.total()
        begun(tmp_path, envs, Recalling(3), schedule, **options)
        begun(tmp_path, envs, Recalling(2 if recall else 7), schedule, recall=recall, **options)
        again, policy = journal(tmp_path, recall=recall), Recalling()
        assert again.found > 3 * 4
        assert sampled(grown(envs, policy, schedule, journal=again, **options)) == whole
        assert (policy.decided.total() < everything) == recall
        again.close()
        done, Counting.steps = journal(tmp_path), 0
        assert sampled(grown(envs, Wanderer(), schedule, journal=done, **options)) == whole
        assert Counting.steps == 0 and done.written == 0
        done.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("drivers", [("async", "async"), ("lockstep", "async"), ("async", "lockstep")])
@pytest.mark.parametrize("recall", [False, True])
def test_either_driver_continues_what_the_other_has_written(
    tmp_path: Path, schedule: Schedule, drivers: tuple[str, str], recall: bool
) -> None:
    with Envs(lambda: Counting(gym.make("toys/Dice-v0")), threads=3) as envs:
        whole = sampled(grown(envs, Recalling(), schedule))
        for driver in drivers:
            mortal = Recalling(3 if driver == "lockstep" else 30)
            begun(tmp_path, envs, mortal, schedule, recall=recall, driver=driver)
        again, policy, Counting.steps = journal(tmp_path, recall=recall), Recalling(), 0
        assert again.found > 3 * 4
        assert sampled(grown(envs, policy, schedule, journal=again, driver=drivers[1])) == whole
        assert all(policy.decided.values()) and Counting.steps > 0
        again.close()
        done, Counting.steps = journal(tmp_path), 0
        for driver in drivers:
            assert sampled(grown(envs, Recalling(), schedule, journal=done, driver=driver)) == whole
        assert Counting.steps == 0 and done.written == 0
        done.close()


@pytest.mark.parametrize("driver", ["lockstep", "async"])
def test_environments_continue_from_durable_snapshots_of_the_process_that_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, driver: str
) -> None:
    schedule, place = Forks(3, 1, 3, late=True), tmp_path / "store"
    with local() as envs:
        whole = sampled(grown(envs, Wanderer(), schedule))
    earlier = PooledEnvs("toys/Dice-v0", 2, store=place)
    assert earlier._lease is not None
    lease = earlier._lease._lease
    begun(tmp_path, earlier, Recalling(4 if driver == "lockstep" else 40), schedule, driver=driver)
    named = [found.name for found in lease._blobs.list(f"names/{lease.name}")]
    earlier._lease._lease.release = lambda: None  # type: ignore[method-assign] - as of a process that was killed
    earlier.close()
    found: list[tuple[str, ...]] = []
    with PooledEnvs("toys/Dice-v0", 2, store=place) as envs:
        durable = envs.durable
        envs.durable = lambda name: found.append(name) or durable(name)  # type: ignore[method-assign]
        kept = journal(tmp_path)
        assert sampled(grown(envs, Recalling(), schedule, journal=kept, driver=driver)) == whole
        kept.close()
    assert {name for _, name in found} and {owner for owner, _ in found} == {lease.name}
    assert named or "is lost" in caplog.text  # nothing waits for the writing in the background
    assert not lease.keys() and not lease.live  # what it held is let go with the environments that took it over


def test_a_torn_record_is_ignored_and_removed(tmp_path: Path) -> None:
    with local() as envs:
        begun(tmp_path, envs, Mortal(4), SCHEDULES[0])
        content = (tmp_path / "update-0").read_bytes()
        whole = sampled(grown(envs, Wanderer(), SCHEDULES[0]))
        for torn in (content[:-1], content[:-9] + bytes(9), content + content[:5], content[:3], b"", bytes(4096)):
            (tmp_path / "update-0").write_bytes(torn)
            kept = journal(tmp_path)
            assert (tmp_path / "update-0").stat().st_size <= len(content)
            assert sampled(grown(envs, Wanderer(), SCHEDULES[0], journal=kept)) == whole
            kept.close()
            assert journal(tmp_path).found > 3 * 4


def test_records_are_given_to_no_path_that_decides_otherwise(tmp_path: Path) -> None:
    class Other(Wanderer):
        def _act(self, context: Context) -> Action:
            action = super()._act(context)
            return replace(action, text=1 - action.text) if context.depth == 2 else action

    with local() as envs:
        begun(tmp_path, envs, Mortal(6), SCHEDULES[0])
        kept, Counting.steps = journal(tmp_path), 0
        expected = sampled(grown(envs, Other(), SCHEDULES[0]))
        steps, Counting.steps = Counting.steps, 0
        assert sampled(grown(envs, Other(), SCHEDULES[0], journal=kept)) == expected
        assert 0 < Counting.steps <= steps + 2 * 9  # the first two are led again
        kept.close()


def test_the_journal_of_another_rollout_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "update-0", head={"seed": 2}).close()
    with pytest.raises(JournalMismatch, match=r"expected the journal of \{'seed': 3\}, found one of \{'seed': 2\}"):
        journal(tmp_path)


@pytest.mark.parametrize("other", [False, True])
def test_a_head_that_is_not_whole_begins_anew(tmp_path: Path, other: bool) -> None:
    """Also that of another rollout, such as an update of other weights, and that of another process."""
    Journal(tmp_path / "whole", head={"seed": 2, "weights": "ab" * 20}).close()
    head = (tmp_path / "whole").read_bytes()
    flipped = head[:-3] + bytes([head[-3] ^ 1]) + head[-2:]
    for torn in (head[:-5], head[:-5] + bytes(5), head[:11], head[:5], flipped, bytes(4096) + head):
        (tmp_path / "torn").write_bytes(torn)
        (tmp_path / "mine").unlink(missing_ok=True)
        if other:
            kept = Journal(tmp_path / "mine", head={"seed": 3}, others=[tmp_path / "torn"])
        else:
            kept = Journal(tmp_path / "torn", head={"seed": 3})
        kept.close()
        assert kept.found == 0


def test_a_file_that_is_no_journal_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "update-0").write_text("notes of somebody")
    with pytest.raises(JournalMismatch, match=r"expected the journal of \{'seed': 3\}, found no journal"):
        journal(tmp_path)
    assert (tmp_path / "update-0").read_text() == "notes of somebody"


def test_zeros_behind_the_records_are_removed(tmp_path: Path) -> None:
    """Some file systems leave them after a loss of power, and as a record of no bytes they would be whole."""
    with local() as envs:
        begun(tmp_path, envs, Mortal(4), SCHEDULES[0])
    content = (tmp_path / "update-0").read_bytes()
    found = journal(tmp_path).found
    (tmp_path / "update-0").write_bytes(content + bytes(4096))
    kept = journal(tmp_path)
    kept.close()
    assert (kept.found, (tmp_path / "update-0").read_bytes()) == (found, content)


def test_parts_of_other_processes_are_taken_over(tmp_path: Path) -> None:
    with local() as envs:
        begun(tmp_path, envs, Mortal(6), SCHEDULES[0])
        kept = Journal(tmp_path / "mine", head={"seed": 3}, others=[tmp_path / "update-0"])
        assert kept.found > 3 * 4
        kept.close()


def test_what_is_no_plain_data_ends_the_journal_and_not_the_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(gym.Wrapper):
        def reset(self, **options: Any) -> Any:
            return super().reset(**options)[0], {"file": object()}

    kept = journal(tmp_path)
    with Envs(lambda: Odd(gym.make("toys/Dice-v0"))) as envs:
        assert len(grown(envs, Wanderer(), Schedule(2), journal=kept)) == 3
    assert "not in the journal from here on" in caplog.text and "not plain data" in caplog.text


class Task:
    """A task that is no plain data."""


@pytest.mark.parametrize("drive", ["lockstep", "asynchronous"])
@pytest.mark.parametrize("task", [Task(), "a lone surrogate \ud83d"], ids=["object", "surrogate"])
def test_a_task_or_an_action_that_is_no_plain_data_ends_the_journal_and_not_the_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, task: Any, drive: str
) -> None:
    class Deaf(gym.Wrapper):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return super().reset(seed=seed)

    def policy(contexts: Sequence[Context]) -> list[Action | None]:
        return [Action(task, tokens=1) if context.depth < 2 else None for context in contexts]

    class Told(gym.Wrapper):
        def step(self, action: Any) -> Any:
            return super().step(0)

    for make, act, tasks in ((Deaf, Wanderer(), [task] * 3), (Told, policy, [None] * 3)):
        caplog.clear()
        (tmp_path / "update-0").unlink(missing_ok=True)
        for _ in range(2):  # the second goes on with the journal of the first
            kept = journal(tmp_path)
            with Envs(lambda make=make: make(gym.make("toys/Dice-v0"))) as envs:
                if drive == "lockstep":
                    trees = rollout(envs, act, Schedule(2), tasks=tasks, seed=(3,), journal=kept)
                else:

                    async def alone(context: Context, act: Any = act) -> Action | None:
                        return act([context])[0]

                    trees = asyncio.run(rollout_async(envs, alone, Schedule(2), tasks=tasks, seed=(3,), journal=kept))
            assert len(trees) == 3
            assert caplog.text.count("not in the journal from here on") == 1
            caplog.clear()


def test_the_file_is_not_closed_while_another_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another file's by then."""
    kept, close, free = journal(tmp_path), os.close, []

    def closing(number: int) -> None:
        if number == kept._file:
            thread = threading.Thread(target=lambda: free.append(kept._lock.acquire(blocking=False)))
            thread.start()
            thread.join()
        close(number)

    monkeypatch.setattr(os, "close", closing)
    kept.close()
    assert free == [False]


def test_a_look_ahead_has_no_journal(tmp_path: Path) -> None:
    with local() as envs, pytest.raises(ValueError, match="no journal with look"):
        grown(envs, Wanderer(), Schedule(1), journal=journal(tmp_path), look=lambda env, info: None)
