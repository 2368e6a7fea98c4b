"""The queue of jobs on environments in workers, and environments in worker processes for rollout trees."""

from __future__ import annotations

import os
import queue
import signal
import threading
from concurrent.futures import CancelledError

import gymnasium as gym
import pytest
import worker_envs

import sandboxgym
from sandboxgym.tree import Action, Envs, Schedule, rollout
from sandboxgym.workers.env_host import CallTimedOut, WorkerDied
from sandboxgym.workers.pool import EnvPool, PoolClosed, PooledEnvs

worker_envs.register()
MODES = ("thread", "process")


@pytest.fixture
def pool():
    made = []

    def make(env="toys/Dice-v0", workers=2, **arguments):
        made.append(EnvPool(env, workers, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def roll(env, observation, info):
    """Observations of a reset and three steps."""
    return [int(observation), *(int(env.step(0)[0]) for _ in range(3))]


def echo(env, observation, info):
    return observation


@pytest.fixture
def dice():
    env = gym.make("toys/Dice-v0")
    env.reset(seed=1)
    env.step(0)
    return env


@pytest.mark.parametrize("mode", MODES)
def test_siblings_are_those_of_a_fork(pool, dice, mode):
    want = [[dice.unwrapped.total, *(int(child.step(0)[0]) for _ in range(3))] for child in dice.fork(5, seed=4)]
    futures = pool(mode=mode).fork(dice.snapshot(), 5, roll, seed=4)
    assert [future.result() for future in futures] == want
    assert [future.result() for future in pool(mode=mode, batch=3).fork(dice.snapshot(), 5, roll, seed=4)] == want


@pytest.mark.parametrize("mode", MODES)
def test_resets_by_task_seed_and_options(pool, mode):
    jobs = pool("toys/Trouble-v0", mode=mode)
    futures = [jobs.submit(echo, task=name) for name in "abc"]
    futures.append(jobs.submit(lambda env, observation, info: env.unwrapped.np_random_seed, seed=7))
    assert [future.result() for future in futures] == ["a 1", "b 1", "c 1", 7]
    assert {future.result() for future in jobs.as_completed(futures[:3])} == {"a 1", "b 1", "c 1"}
    with pytest.raises(ValueError, match="both"):
        jobs.submit(echo, snap=object(), task="a")


@pytest.mark.parametrize("mode", MODES)
def test_what_a_job_raises_arrives_and_the_next_job_is_not_affected(pool, mode):
    jobs = pool("toys/Trouble-v0", 1, mode=mode)

    def fails(env, observation, info):
        env.step("one")
        env.step("raise")

    failed = jobs.submit(fails)
    with pytest.raises(RuntimeError, match="the sandbox is gone") as caught:
        failed.result()
    if mode == "process":
        assert "in fails" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        jobs.submit(echo, options={"do": "raise"}).result()
    with pytest.raises(SystemExit):
        jobs.submit(lambda env, observation, info: env.step("exit")).result()
    assert jobs.submit(echo).result() == "start 1"
    jobs.submit(lambda env, observation, info: env.close()).result()
    assert jobs.submit(echo).result() == "start 1"
    stats = jobs.stats
    assert (stats.jobs, stats.failed) == (6, 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_job_that_takes_too_long(pool, mode):
    jobs = pool("toys/Trouble-v0", 1, mode=mode, timeout=1.0)
    slow = jobs.submit(lambda env, observation, info: env.step("hang"))
    after = jobs.submit(echo)
    with pytest.raises(CallTimedOut):
        slow.result()
    assert after.result() == "start 1"


def test_snapshots_that_do_not_fit_or_are_gone(pool, dice):
    jobs = pool("toys/Trouble-v0", 1)
    with pytest.raises(sandboxgym.SnapshotMismatch):
        jobs.submit(echo, snap=dice.snapshot()).result()
    snap = dice.snapshot()
    snap.release()
    with pytest.raises(sandboxgym.SnapshotReleased):
        jobs.submit(echo, snap=snap).result()
    assert jobs.submit(echo).result() == "start 1"


def test_snapshots_taken_in_a_job_come_back(pool, dice):
    def ahead(env, observation, info):
        env.step(0)
        return sandboxgym.snapshot(env)

    jobs = pool()
    later = jobs.submit(ahead, snap=dice.snapshot()).result()
    assert jobs.submit(roll, snap=later).result()[0] == int(dice.step(0)[0])


# Locality.


def test_siblings_go_where_their_snapshot_is(pool, dice):
    """Two snapshots, two workers, of which each holds one: no job moves while its own worker is free for it."""
    snaps = [dice.snapshot()]
    dice.step(0)
    snaps.append(dice.snapshot())
    jobs = pool("toys/Dice-v0", 2)

    def where(env, observation, info):
        import time

        time.sleep(0.3)  # both at the same time, so each in a worker of its own
        return os.getpid()

    first, second = [future.result() for future in [jobs.submit(where, snap=snap) for snap in snaps]]
    assert first != second
    for _ in range(3):
        assert jobs.submit(lambda env, observation, info: os.getpid(), snap=snaps[1]).result() == second
        assert jobs.submit(lambda env, observation, info: os.getpid(), snap=snaps[0]).result() == first
    assert jobs.stats.snapshots_shipped == 2
    assert jobs.stats.locality == 6 / 8


def test_an_idle_worker_takes_over(pool, dice):
    """Four jobs of one snapshot that all wait for each other need four workers, whoever holds the snapshot."""
    jobs = pool("toys/Dice-v0", 4, mode="thread")
    barrier = threading.Barrier(4, timeout=20)
    futures = jobs.fork(dice.snapshot(), 4, lambda env, observation, info: barrier.wait())
    assert sorted(future.result() for future in futures) == [0, 1, 2, 3]


def test_a_snapshot_is_shipped_once_to_each_worker(pool, dice):
    jobs = pool("toys/Dice-v0", 2)
    snap = dice.snapshot()
    for future in jobs.fork(snap, 40, roll, seed=1):
        future.result()
    stats = jobs.stats
    assert stats.restores == 40
    assert 1 <= stats.snapshots_shipped <= 2
    assert stats.bytes_shipped == stats.snapshots_shipped * len(snap.to_bytes())
    assert stats.local == 40 - stats.snapshots_shipped


def test_a_worker_that_forgot_a_snapshot_is_given_it_again(pool, dice):
    jobs = pool("toys/Dice-v0", 1, keep=1)
    jobs._workers[0]._keep = 9  # believes that the worker keeps more
    snaps = []
    for _ in range(3):
        snaps.append((dice.snapshot(), dice.unwrapped.total))
        dice.step(0)
    for snap, total in (*snaps, *snaps):
        assert jobs.submit(roll, snap=snap).result()[0] == total


# Back-pressure, cancelling, closing.


@pytest.fixture
def blocked(pool):
    """A pool of one thread, which is kept busy until the event is set."""
    release, started = threading.Event(), threading.Event()
    jobs = pool("toys/Trouble-v0", 1, mode="thread", max_pending=2)

    def wait(env, observation, info):
        started.set()
        release.wait(20)
        return "released"

    running = jobs.submit(wait)
    started.wait(20)
    yield jobs, release, running
    release.set()


def test_back_pressure(blocked):
    jobs, release, running = blocked
    jobs.submit(echo)
    jobs.submit(echo)
    with pytest.raises(queue.Full, match="2 of 2"):
        jobs.submit(echo, block=False)
    waiting: list[str] = []
    thread = threading.Thread(target=lambda: waiting.append(jobs.submit(echo).result()))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it waits for a place"
    release.set()
    thread.join(20)
    assert waiting == ["start 1"]
    assert running.result() == "released"


def test_a_cancelled_job_makes_place(blocked):
    jobs, release, running = blocked
    first, second = jobs.submit(echo), jobs.submit(echo)
    assert first.cancel()
    third = jobs.submit(echo, block=False)
    assert not running.cancel()
    release.set()
    assert second.result() == third.result() == "start 1"
    with pytest.raises(CancelledError):
        first.result()


def test_closing_cancels_what_waits(blocked):
    jobs, release, running = blocked
    waits = jobs.submit(echo)
    closing = threading.Thread(target=jobs.close)
    closing.start()
    with pytest.raises(CancelledError):
        waits.result(20)
    release.set()
    closing.join(20)
    assert running.result(20) == "released"
    with pytest.raises(PoolClosed):
        jobs.submit(echo)


def test_closing_ends_running_jobs_in_processes(pool):
    jobs = pool("toys/Trouble-v0", 1)
    jobs.submit(echo).result()
    running = jobs.submit(lambda env, observation, info: env.step("hang"))
    while not running.running():
        pass
    jobs.close()
    with pytest.raises(PoolClosed):
        running.result(20)


def test_a_pool_carries_out_everything_at_the_end_of_its_block(dice):
    with EnvPool("toys/Dice-v0", 1, mode="thread") as jobs:
        futures = jobs.fork(dice.snapshot(), 20, roll)
    assert all(future.done() for future in futures)


# Death.


def test_a_job_of_a_dead_worker_is_carried_out_once_more(pool, tmp_path):
    marker = str(tmp_path / "first")

    def dies_once(env, observation, info):
        try:
            os.mkdir(marker)
        except FileExistsError:
            return observation
        os.kill(os.getpid(), signal.SIGKILL)

    jobs = pool("toys/Trouble-v0", 1)
    assert jobs.submit(dies_once, task="again").result() == "again 1"
    assert jobs.stats.retried == 1
    poison = jobs.submit(lambda env, observation, info: env.step("die"))
    healthy = [jobs.submit(echo) for _ in range(3)]
    with pytest.raises(WorkerDied, match="signal 9"):
        poison.result()
    assert [future.result() for future in healthy] == ["start 1"] * 3


def test_an_environment_that_cannot_be_made_fails_its_jobs(pool):
    def fails():
        raise RuntimeError("no such sandbox")

    with pytest.raises(RuntimeError, match="no such sandbox"):
        pool(fails, 1).submit(echo).result()


# Rollout trees.


def rolls(contexts):
    """A policy that draws from the path's stream."""
    return [Action(int(context.rng.integers(3))) for context in contexts]


class BranchAtTwo(Schedule):
    def now(self, tree, path, node, action):
        return 2 if node.depth == 2 and path.key == (0, 0) and path.edges else 0


def shape(trees):
    return [
        [(path.key, [(e.action.text, e.reward, e.terminated) for e in path.edges]) for path in t.paths] for t in trees
    ]


def test_rollouts_on_pooled_envs_are_those_on_local_ones():
    def sampled(envs):
        with envs:
            return shape(rollout(envs, rolls, BranchAtTwo(2), tasks=[None, None], seed=(1, 2)))

    want = sampled(Envs(lambda: gym.make("toys/Dice-v0")))
    assert sampled(PooledEnvs("toys/Dice-v0", 2)) == want


def test_pooled_envs_are_spread_and_used_again():
    with PooledEnvs("toys/Trouble-v0", 2) as envs:
        taken = [envs.take() for _ in range(4)]
        pids = [env.call("reset") and env._slots.worker.pid for env in taken]
        assert len(set(pids)) == 2
        assert pids.count(pids[0]) == 2
        envs.give(taken[2])
        assert envs.take() is taken[2]
        said = envs.call([lambda env=env, i=i: env.step(str(i))[0] for i, env in enumerate(taken)])
        assert said == ["0 2", "1 2", "2 2", "3 2"]
        with pytest.raises(RuntimeError, match="the sandbox is gone"):
            envs.call([lambda: taken[0].step("raise"), lambda: taken[1].step("on")])
        assert taken[1].step("and on")[0] == "and on 4"
        workers = [shared.worker for shared in envs._slots]
    assert not any(worker.alive for worker in workers)
    envs.close()


def test_workers_killed_before_they_make_an_environment_are_replaced():
    with PooledEnvs("toys/Dice-v0", 2) as envs:
        for shared in envs._slots:
            os.kill(shared.worker.pid, signal.SIGKILL)
        (tree,) = rollout(envs, lambda contexts: [Action(0) for _ in contexts], Schedule(3))
        assert len(tree.paths) == 3


def test_a_function_that_ends_every_worker_is_an_error_after_each_was_tried():
    with PooledEnvs(lambda: os._exit(3), 2) as envs:
        with pytest.raises(WorkerDied, match="exited with status 3"):
            envs.take()
        assert sum(shared.worker.generation for shared in envs._slots) == 2 + 2  # asked three times
