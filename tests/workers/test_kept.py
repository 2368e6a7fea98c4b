"""Snapshots that workers keep: trees do not depend on it, whatever is lost; bytes move only where they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import worker_envs
from test_tree import ForkEveryPath, Forks, Wanderer, sampled

import sandboxgym
from sandboxgym.errors import SnapshotMissing, SnapshotNotSupported, SnapshotReleased
from sandboxgym.tree import Action, Context, Envs, Failure, ForkAt, RolloutTree, Schedule, rollout, rollout_async
from sandboxgym.workers import env_host, kept
from sandboxgym.workers.blobs import Directory
from sandboxgym.workers.env_host import WorkerDied
from sandboxgym.workers.kept import Facts, Keeper, KeptSnapshot
from sandboxgym.workers.pool import PooledEnvs
from sandboxgym.workers.remote import RemoteEnv
from sandboxgym.workers.store import Lease, SnapshotStore

worker_envs.register()
SCHEDULES = [Forks(3, 1, 3), Forks(3, 1, 3, late=True), ForkEveryPath(2)]
TASKS: dict[str, Any] = {"tasks": [None] * 3, "seed": (3,)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def pool(place: Path) -> Iterator[PooledEnvs]:
    with PooledEnvs("toys/Dice-v0", 2, store=place) as made:
        yield made


def waited(condition: Callable[[], bool], seconds: float = 300.0) -> bool:
    """True once a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def pid_of(pool: PooledEnvs, place: int) -> int:
    pid = pool._slots[place].worker.pid
    assert pid is not None
    return pid


def held(pool: PooledEnvs) -> list[str]:
    """Keys of the durable copies."""
    assert pool._lease is not None
    return pool._lease._lease.keys()


class Killing(Wanderer):
    """Kills a worker at some calls, after something else was done."""

    def __init__(self, pool: PooledEnvs, at: Sequence[int], before: Callable[[], Any] = lambda: None) -> None:
        self.pool, self.at, self.before, self.calls = pool, at, before, 0

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        self.calls += 1
        if self.calls in self.at:
            self.before()
            os.kill(pid_of(self.pool, self.calls % 2), signal.SIGKILL)
        return super().__call__(contexts)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trees_are_those_of_local_environments_and_no_bytes_cross(
    pool: PooledEnvs, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed: list[Any] = []
    receive = kept.KeptSnapshot.__init__

    def received(self: KeptSnapshot, *args: Any, **kwargs: Any) -> None:
        receive(self, *args, **kwargs)
        crossed.append(len(pickle.dumps(Facts(self.header, self.layers, self.id, self.parent))))

    monkeypatch.setattr(kept.KeptSnapshot, "__init__", received)
    monkeypatch.setattr(kept.Kept, "whole", lambda self: pytest.fail("nobody here needs its content"))
    with Envs(lambda: gym.make("toys/Dice-v0")) as local:
        expected = sampled(rollout(local, Wanderer(), schedule, **TASKS))
    assert sampled(rollout(pool, Wanderer(), schedule, **TASKS)) == expected
    assert crossed and max(crossed) < 1500
    assert all(shared.worker.snapshots_shipped == 0 for shared in pool._slots)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("copies", ["whole", "missing", "damaged"])
@pytest.mark.parametrize("every", [1, 1000])
def test_workers_that_are_killed_change_no_tree(
    place: Path, schedule: Schedule, copies: str, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Failure] = []

    def before() -> None:
        if copies == "missing":
            shutil.rmtree(place / "names", ignore_errors=True)
        if copies == "damaged":
            time.sleep(0.5)  # until some are there
            for path in (place / "snapshots").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it was dropped meanwhile
                    path.write_bytes(path.read_bytes()[:-1])

    with PooledEnvs("toys/Dice-v0", 2, store=place, every_k_steps=every) as pool:
        whole = rollout(pool, Wanderer(), schedule, **TASKS)
        policy = Killing(pool, (2, 5, 8), before)
        trees = rollout(pool, policy, schedule, retries=3, failures=failures, **TASKS)
    assert sampled(trees) == sampled(whole)
    assert failures and not any(failure.dropped for failure in failures)
    if copies != "whole":
        assert "a captured state of path" in caplog.text  # so that the task was reset to


def test_paths_that_advance_by_themselves_survive_lost_workers_too(place: Path) -> None:
    failures: list[Failure] = []

    class Alone(Wanderer):
        def __init__(self, pool: PooledEnvs) -> None:
            self.pool, self.calls = pool, 0

        async def __call__(self, context: Context) -> Action:  # type: ignore[override]
            self.calls += 1
            if self.calls in (7, 20):
                shutil.rmtree(place / "names", ignore_errors=True)
                os.kill(pid_of(self.pool, self.calls % 2), signal.SIGKILL)
            return self._act(context)

    async def main(pool: PooledEnvs) -> list[RolloutTree]:
        return await rollout_async(pool, Alone(pool), ForkEveryPath(2), retries=4, failures=failures, **TASKS)

    with PooledEnvs("toys/Dice-v0", 2, store=place) as pool:
        whole = rollout(pool, Wanderer(), ForkEveryPath(2), **TASKS)
        trees = asyncio.run(main(pool))
    assert sampled(trees) == sampled(whole)
    assert failures and not any(failure.dropped for failure in failures)


def test_random_kills_change_no_tree(place: Path) -> None:
    """With wrappers, tasks and seeds of ALFWorld, and forks of forks."""

    def policy(contexts: Sequence[Context]) -> list[Action]:
        return [Action(str(c.rng.choice(c.info["admissible_commands"]))) for c in contexts]

    kwargs: dict[str, Any] = {"tasks": range(3), "seed": (1,)}
    with PooledEnvs("sandboxgym/ALFWorld-v0", 2, store=place, every_k_steps=2, max_episode_steps=12) as pool:
        whole = rollout(pool, policy, ForkAt([2, 5], width=3), **kwargs)
        for turn in range(3):
            calls = iter(range(10**6))

            def doomed(contexts: Sequence[Context], calls: Iterator[int] = calls, turn: int = turn) -> list[Action]:
                call = next(calls)
                if call % 7 == 2 * turn:
                    if turn == 1:
                        shutil.rmtree(place / "names", ignore_errors=True)
                    with contextlib.suppress(AssertionError, ProcessLookupError):
                        os.kill(pid_of(pool, call % 2), signal.SIGKILL)
                return policy(contexts)

            failures: list[Failure] = []
            trees = rollout(pool, doomed, ForkAt([2, 5], width=3), retries=12, failures=failures, **kwargs)
            assert sampled(trees) == sampled(whole)
            assert failures


def test_a_lost_snapshot_without_retries_is_raised(place: Path) -> None:
    with PooledEnvs("toys/Dice-v0", 2, store=place) as pool:
        policy = Killing(pool, (2,), lambda: shutil.rmtree(place / "names", ignore_errors=True))
        with pytest.raises((WorkerDied, SnapshotMissing)):
            rollout(pool, policy, ForkEveryPath(2), **TASKS)


def test_siblings_start_where_their_snapshot_is(pool: PooledEnvs) -> None:
    first, second = (pool.take() for _ in range(2))
    assert first.worker is not second.worker  # type: ignore[attr-defined]
    second.reset(seed=0)
    snap = sandboxgym.snapshot(second)
    taken = [pool.take_near(snap) for _ in range(5)]
    there = [env.worker is second.worker for env in taken]  # type: ignore[attr-defined]
    assert there == [True] * 4 + [False]
    assert isinstance(pool.take_near(None), RemoteEnv)


def test_a_kept_snapshot_is_used_as_any_other(pool: PooledEnvs) -> None:
    remote, local = pool.take(), gym.make("toys/Dice-v0")
    remote.reset(seed=5)
    remote.step(1)
    snap = sandboxgym.snapshot(remote)
    assert isinstance(snap, KeptSnapshot)
    expected = [remote.step(2)[:4] for _ in range(3)]
    for again in (snap, pickle.loads(pickle.dumps(snap)), sandboxgym.Snapshot.from_bytes(snap.to_bytes())):
        sandboxgym.restore(local, again)
        assert [local.step(2)[:4] for _ in range(3)] == expected
        sandboxgym.restore(remote, again)
        assert [remote.step(2)[:4] for _ in range(3)] == expected
    assert snap.nbytes > 0 and snap.env_id == "toys/Dice-v0" and not snap.released
    with gym.wrappers.TimeLimit(remote, 9) as limited:  # whose state comes on top
        limited._elapsed_steps = 2
        outer = sandboxgym.snapshot(limited)
        state = remote.step(0)[:4]
        sandboxgym.restore(limited, outer)
        assert limited.step(0)[:4] == state
        sandboxgym.restore(limited, pickle.loads(pickle.dumps(outer)))
        assert limited.step(0)[:4] == state
        outer.release()
        assert outer.released
        with pytest.raises(SnapshotReleased):
            sandboxgym.restore(limited, outer)
        snap.release()


def test_a_snapshot_of_a_worker_that_died_is_what_the_store_has(pool: PooledEnvs) -> None:
    env, other = pool.take(), pool.take()
    env.reset(seed=5)
    other.reset(seed=6)
    durable = sandboxgym.snapshot(env)
    expected = env.step(1)[:4]
    assert waited(lambda: len(held(pool)) == 1)
    assert pool._lease is not None
    name = kept.name_of(durable.kept.key)
    assert waited(lambda: pool._lease._lease.named(name) is not None)  # type: ignore[union-attr]
    assert env.worker.pid is not None
    os.kill(env.worker.pid, signal.SIGKILL)
    sandboxgym.restore(other, durable)
    assert other.step(1)[:4] == expected
    lost = sandboxgym.snapshot(other)
    pool._lease._lease.drop(lost.kept.prepare(), name=kept.name_of(lost.kept.key))
    lost.kept._stored = None
    assert other.worker.pid is not None
    os.kill(other.worker.pid, signal.SIGKILL)
    with pytest.raises(SnapshotMissing, match="kept by a worker that has ended, and has no durable copy in"):
        sandboxgym.restore(env, lost)
    with pytest.raises(SnapshotMissing):
        lost.to_bytes()


def test_a_frozen_worker_does_not_hold_up_those_that_need_its_snapshots(place: Path) -> None:
    with PooledEnvs("toys/Dice-v0", 2, store=place, every_k_steps=1000, timeout=3.0, reset_timeout=5.0) as pool:
        env, other = pool.take(), pool.take()
        env.reset(seed=5)
        sandboxgym.snapshot(env)
        snap = sandboxgym.snapshot(env)  # no durable copy
        assert env.worker.pid is not None
        os.kill(env.worker.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(SnapshotMissing):
            sandboxgym.restore(other, snap)
        assert time.monotonic() - began < 60
        other.reset(seed=1)


def test_what_nobody_needs_any_more_leaves_workers_and_store(pool: PooledEnvs) -> None:
    rollout(pool, Wanderer(), ForkEveryPath(2), **TASKS)
    envs = [pool.take() for _ in range(2)]
    for env in envs:
        env.reset(seed=0)
    snaps = [sandboxgym.snapshot(env) for env in envs]  # with them the workers are told what to drop
    assert waited(lambda: len(held(pool)) == 2)
    del snaps[0]
    for env in envs:
        sandboxgym.snapshot(env).release()
        sandboxgym.snapshot(env).release()
        env.reset(seed=0)
        sandboxgym.snapshot(env)
    assert waited(lambda: len(held(pool)) <= 6)
    place = pool._lease.keeping.place  # type: ignore[union-attr]
    pool.close()
    assert SnapshotStore(place).collect(grace=0).snapshots >= 1
    assert SnapshotStore(place).keys() == []


def test_every_k_steps_some_snapshots_are_written_and_others_are_not(place: Path) -> None:
    with PooledEnvs("toys/Dice-v0", 1, store=place, every_k_steps=3) as pool:
        env = pool.take()
        env.reset(seed=0)
        snaps = []
        for _ in range(7):
            snaps.append(sandboxgym.snapshot(env))
            env.step(0)
        assert waited(lambda: len(held(pool)) == 3)
        time.sleep(0.2)
        assert len(held(pool)) == 3
        stored = [pool._lease._lease.named(kept.name_of(snap.kept.key)) for snap in snaps]  # type: ignore[union-attr]
        assert [at for at, key in enumerate(stored) if key] == [0, 3, 6]


def test_a_slow_store_is_not_waited_for_and_what_was_dropped_is_not_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = kept.KeptLease(place, every=1, bandwidth=None)
    keeper = Keeper(keeping.keeping)
    env = gym.make("toys/Dice-v0")
    env.reset(seed=0)
    began, go_on = [], threading.Event()
    put = SnapshotStore.put

    def slow(self: SnapshotStore, *args: Any, **kwargs: Any) -> Any:
        began.append(kwargs["name"])
        assert go_on.wait(300)
        return put(self, *args, **kwargs)

    monkeypatch.setattr(SnapshotStore, "put", slow)
    keys = []
    for _ in range(6):
        snap = sandboxgym.snapshot(env)
        keys.append((snap.id, len(snap.layers)))
        keeper.keep(keys[-1], snap, durable=True)
    assert waited(lambda: len(began) == 1)
    keeper.drop(keys[:5])  # the first of them is being written, perhaps
    go_on.set()  # only now
    assert waited(lambda: keeping._lease.named(kept.name_of(keys[5])) is not None)
    assert waited(lambda: len(keeping._lease.keys()) == 1)
    assert len(began) <= 2
    assert [keeper.get(key) is not None for key in keys] == [False] * 5 + [True]
    keeper.close()
    keeping.close()


def test_a_store_without_room_costs_durable_copies_only(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from sandboxgym.errors import StoreFull

    keeping = kept.KeptLease(place, every=1, bandwidth=None)
    keeper = Keeper(keeping.keeping)
    env = gym.make("toys/Dice-v0")
    env.reset(seed=0)

    def full(self: SnapshotStore, *args: Any, **kwargs: Any) -> Any:
        raise StoreFull("no room")

    monkeypatch.setattr(SnapshotStore, "put", full)
    snap = sandboxgym.snapshot(env)
    keeper.keep((snap.id, 0), snap, durable=True)
    assert waited(lambda: "has no durable copy: no room" in caplog.text)
    assert keeper.get((snap.id, 0)) is snap
    with pytest.raises(StoreFull):
        keeper.store_now((snap.id, 0))
    keeper.close()
    keeping.close()


def test_settings_that_make_no_sense_are_refused(place: Path) -> None:
    with pytest.raises(ValueError, match="every_k_steps to be at least 1, found 0"):
        PooledEnvs("toys/Dice-v0", 1, store=place, every_k_steps=0)
    with pytest.raises(ValueError, match="bandwidth of more than 0"):
        PooledEnvs("toys/Dice-v0", 1, store=place, bandwidth=0)


def test_environments_that_share_no_bytes_need_no_store() -> None:
    with PooledEnvs("toys/Dice-v0", 1) as pool:
        env = pool.take()
        env.reset(seed=0)
        assert type(sandboxgym.snapshot(env)) is sandboxgym.Snapshot
    assert env_host.Shipped(None).facts is None


def test_a_snapshot_that_cannot_be_written_keeps_no_other_from_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(place)
    keeper = Keeper(kept.Keeping(str(place), store.lease("one").name))
    with contextlib.closing(gym.make("toys/Dice-v0")) as env:
        env.reset(seed=0)
        snaps = [sandboxgym.snapshot(env) for _ in range(3)]
    put = SnapshotStore.put

    def refused(self: SnapshotStore, snap: Any, **options: Any) -> Any:
        if snap is snaps[0]:
            raise SnapshotNotSupported("it has processes")
        return put(self, snap, **options)

    monkeypatch.setattr(SnapshotStore, "put", refused)
    for snap in snaps:
        keeper.keep((snap.id, 0), snap, durable=False)
    keeper.store_all()
    assert "no durable copy: SnapshotNotSupported: it has processes" in caplog.text
    assert [keeper._lease.named(f"{snap.id}-0") is not None for snap in snaps] == [False, True, True]
    keeper.close()


def test_a_lease_that_was_taken_over_is_renewed_with_the_own_one(place: Path) -> None:
    store = SnapshotStore(place)
    own, other = (store.lease(name, seconds=seconds) for name, seconds in (("own", 60.0), ("other", -1.0)))
    assert own.live and not other.live
    other.seconds = 60.0

    class Twice:
        waits = iter([False, True])

        def wait(self, seconds: float) -> bool:
            return next(self.waits)

    kept._renew(Twice(), store, own, {"other": other})  # type: ignore[arg-type]
    assert own.live and other.live


def test_a_store_that_fails_to_forget_ends_no_keeper(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = kept.KeptLease(place, every=1, bandwidth=None)
    keeper = Keeper(keeping.keeping)
    with contextlib.closing(gym.make("toys/Dice-v0")) as env:
        env.reset(seed=0)
        first, second, third = (sandboxgym.snapshot(env) for _ in range(3))
    failed: list[str] = []

    def away(self: Any, key: str, *, name: str = "") -> None:
        failed.append(name)
        raise RuntimeError("the client says so by an exception of its own")

    monkeypatch.setattr(Lease, "drop", away)
    keeper.keep((first.id, 0), first, durable=True)
    assert waited(lambda: keeping._lease.named(f"{first.id}-0") is not None and keeper.counts()[1] > 0)
    with keeper._changed:  # both at once
        keeper.drop([(first.id, 0)])
        keeper.keep((second.id, 0), second, durable=True)
    assert waited(lambda: keeping._lease.named(f"{second.id}-0") is not None)
    assert failed == [f"{first.id}-0"]
    keeper.keep((third.id, 0), third, durable=False)
    keeper.store_now((third.id, 0))
    keeper.close()
    keeping.close()


def test_no_write_exceeds_the_bandwidth_however_large_it_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on only while the keeper waits for it."""
    now, writes = 0.0, []

    class Waits(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            if timeout is None:
                return super().wait()
            now += timeout
            return False

    write = Directory.write

    def noted(self: Directory, items: Any) -> int:
        items = list(items)
        writes.extend((now, len(data)) for name, data in items if name.startswith(("blobs/", "snapshots/")))
        return write(self, items)

    monkeypatch.setattr(Directory, "write", noted)
    keeping = kept.KeptLease(place, every=1, bandwidth=1000.0)
    keeper = Keeper(keeping.keeping, clock=lambda: now)
    keeper._changed = Waits()
    sizes = [50_000, 3_000_000, 10_000, 200]
    snaps = []
    with contextlib.closing(gym.make("toys/Trouble-v0")) as env:
        for number, size in enumerate(sizes):
            env.reset(seed=0, options={"task": str(number) * size})
            snaps.append(sandboxgym.snapshot(env))
            keeper.keep((snaps[-1].id, 0), snaps[-1], durable=True)
            assert waited(lambda: keeper.counts()[2] > sum(sizes[: number + 1]))  # noqa: B023
    keeper.close()
    keeping.close()
    assert sum(nbytes for _, nbytes in writes) > sum(sizes) and now > 3000
    for first, (began, _) in enumerate(writes):
        for last in range(first + 1, len(writes)):
            assert sum(nbytes for _, nbytes in writes[first:last]) <= 1000 * (writes[last][0] - began) + 1e-3


def test_what_somebody_waits_for_is_written_at_once_and_what_nobody_needs_is_not(place: Path) -> None:
    keeping = kept.KeptLease(place, every=1, bandwidth=1.0)  # hours
    keeper = Keeper(keeping.keeping)
    with contextlib.closing(gym.make("toys/Trouble-v0")) as env:
        snaps = []
        for word in "abcde":
            env.reset(seed=0, options={"task": word * 10_000})
            snaps.append(sandboxgym.snapshot(env))
    names = [f"{snap.id}-0" for snap in snaps]

    def stored() -> list[bool]:
        return [keeping._lease.named(name) is not None for name in names]

    keeper.keep((snaps[0].id, 0), snaps[0], durable=True)
    assert waited(lambda: keeper._writing == (snaps[0].id, 0))
    keeper.keep((snaps[1].id, 0), snaps[1], durable=False)
    keeper.store_now((snaps[1].id, 0))  # after the first, which waits no more
    assert stored() == [True, True, False, False, False]
    keeper.keep((snaps[2].id, 0), snaps[2], durable=True)
    assert waited(lambda: keeper._writing == (snaps[2].id, 0))
    keeper.drop([(snaps[2].id, 0)])
    assert waited(lambda: keeper._writing is None)
    keeper.keep((snaps[3].id, 0), snaps[3], durable=True)
    assert waited(lambda: keeper._writing == (snaps[3].id, 0))
    keeper.close()
    assert stored() == [True, True, False, False, False]
    keeping.close()
