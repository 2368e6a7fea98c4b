"""Jobs of many environments in workers: one message per worker, and what one environment does spares the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pytest
import worker_envs

from sandboxgym.tree import Envs
from sandboxgym.workers.env_host import CallTimedOut, WorkerDied
from sandboxgym.workers.pool import PooledEnvs
from sandboxgym.workers.worker import ProcessWorker
from sandboxgym.wrappers.jobs import EnvJob, EnvResult

worker_envs.register()
WORKERS, ENVS = 2, 6


@pytest.fixture
def pool() -> Iterator[PooledEnvs]:
    with PooledEnvs("toys/Trouble-v0", WORKERS, timeout=3.0, reset_timeout=120.0) as made:
        yield made


def results(answers: list[EnvResult | Exception]) -> list[EnvResult]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers  # type: ignore[return-value]


def begun(pool: PooledEnvs) -> list[Any]:
    """Environments in the pool, each in an episode with one step."""
    envs = [pool.take() for _ in range(ENVS)]
    results(pool.execute_all([EnvJob(env, reset=(7, None)) for env in envs]))
    results(pool.execute_all([EnvJob(env, step=("on",)) for env in envs]))
    return envs


def played(source: Envs) -> list[Any]:
    """Resets with a snapshot, steps, and restores with other seeds, on several environments."""
    envs = [source.take() for _ in range(ENVS)]
    first = results(source.execute_all([EnvJob(env, reset=(i, None), capture=True) for i, env in enumerate(envs)]))
    steps = [results(source.execute_all([EnvJob(env, step=(i % 3,)) for i, env in enumerate(envs)])) for _ in range(2)]
    again = [EnvJob(env, restore=(first[-1 - i].snap, i), step=(1,)) for i, env in enumerate(envs)]
    last = results(source.execute_all(again))
    return [
        [(done.begun, done.stepped) for done in [*first, *steps[0], *steps[1], *last]],
        [done.snap.state_hash if hasattr(done.snap, "state_hash") else done.snap.env_id for done in first],
        [env.step(2) for env in envs],
    ]


def test_results_are_those_of_local_environments() -> None:
    with Envs(lambda: gym.make("toys/Dice-v0")) as local, PooledEnvs("toys/Dice-v0", WORKERS) as pooled:
        assert played(pooled) == played(local)


def test_a_worker_gets_one_message_whatever_the_number_of_its_environments(
    pool: PooledEnvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = begun(pool)
    sent: list[int] = []
    post = ProcessWorker.post
    monkeypatch.setattr(ProcessWorker, "post", lambda self, calls: sent.append(len(calls)) or post(self, calls))
    done = results(pool.execute_all([EnvJob(env, capture=True, step=("on",)) for env in envs]))
    assert sent == [ENVS // WORKERS] * WORKERS
    assert [answer.stepped[0] for answer in done] == ["on 3"] * ENVS  # type: ignore[index]


def test_an_environment_that_raises_spares_the_others(pool: PooledEnvs) -> None:
    envs = begun(pool)
    actions = ["on", "raise", "on", "on", "on", "on"]
    answers = pool.execute_all([EnvJob(env, step=(action,)) for env, action in zip(envs, actions, strict=True)])
    assert isinstance(answers.pop(1), RuntimeError)
    assert [answer.stepped[0] for answer in results(answers)] == ["on 3"] * (ENVS - 1)  # type: ignore[index]


def test_a_snapshot_of_a_job_that_fails_is_not_kept(pool: PooledEnvs) -> None:
    env = begun(pool)[0]
    (answer,) = pool.execute_all([EnvJob(env, capture=True, step=("raise",))])
    assert isinstance(answer, RuntimeError)
    assert env.step("on")[0] == "on 3"


def test_a_worker_that_dies_costs_its_own_environments_alone(pool: PooledEnvs) -> None:
    envs = begun(pool)
    dead, live = envs[0].worker, envs[1].worker
    answers = pool.execute_all([EnvJob(env, step=("die" if env is envs[2] else "on",)) for env in envs])
    assert all(
        isinstance(answer, WorkerDied) == (env.worker is dead) for env, answer in zip(envs, answers, strict=True)
    )
    assert live.alive
    lost = pool.execute_all([EnvJob(env, step=("on",)) for env in envs])
    assert [isinstance(answer, WorkerDied) for answer in lost] == [env.worker is dead for env in envs]
    again = results(pool.execute_all([EnvJob(env, reset=(7, None), step=("on",)) for env in envs]))
    assert {answer.stepped[0] for answer in again} == {"on 2"}  # type: ignore[index]


def test_a_job_that_takes_too_long_is_named_and_ends_its_worker(pool: PooledEnvs) -> None:
    envs = begun(pool)
    slow = envs[2]
    began = time.monotonic()
    answers = pool.execute_all([EnvJob(env, step=("hang" if env is slow else "on",)) for env in envs])
    assert time.monotonic() - began < 45  # it hangs for 60 s
    kinds = [type(answer) for env, answer in zip(envs, answers, strict=True) if env.worker is slow.worker]
    assert CallTimedOut in kinds and set(kinds) <= {CallTimedOut, WorkerDied, EnvResult}
    assert all(isinstance(a, EnvResult) for e, a in zip(envs, answers, strict=True) if e.worker is not slow.worker)


def test_a_snapshot_that_a_worker_no_longer_keeps_is_sent_again(pool: PooledEnvs) -> None:
    env = begun(pool)[0]
    (taken,) = results(pool.execute_all([EnvJob(env, capture=True)]))
    for _ in range(70):  # more than a worker keeps; its owner is told nothing of these
        env.worker.call(env._slot, "snapshot")
    (done,) = results(pool.execute_all([EnvJob(env, restore=(taken.snap, None), step=("on",))]))
    assert done.stepped is not None and done.stepped[0] == "on 3"


def test_a_snapshot_goes_to_another_worker_and_comes_back_equal(pool: PooledEnvs) -> None:
    envs = begun(pool)
    assert envs[0].worker is not envs[1].worker
    (taken,) = results(pool.execute_all([EnvJob(envs[0], capture=True)]))
    both = results(pool.execute_all([EnvJob(env, restore=(taken.snap, 3), step=("on",)) for env in envs[:2]]))
    assert both[0].stepped == both[1].stepped


def test_a_released_snapshot_is_refused_for_its_job_alone(pool: PooledEnvs) -> None:
    from sandboxgym import SnapshotReleased

    envs = begun(pool)
    (taken,) = results(pool.execute_all([EnvJob(envs[0], capture=True)]))
    taken.snap.release()
    answers = pool.execute_all([EnvJob(envs[1], restore=(taken.snap, None)), EnvJob(envs[2], step=("on",))])
    assert isinstance(answers[0], SnapshotReleased)
    assert isinstance(answers[1], EnvResult)


def test_a_closed_environment_is_refused_for_its_job_alone(pool: PooledEnvs) -> None:
    envs = begun(pool)
    envs[0].close()
    answers = pool.execute_all([EnvJob(env, step=("on",)) for env in envs[:2]])
    assert isinstance(answers[0], gym.error.ClosedEnvironmentError)
    assert isinstance(answers[1], EnvResult)


@pytest.mark.parametrize("threads", [1, 3])
def test_ctrl_c_in_one_environment_leaves_no_snapshot_of_the_others(threads: int) -> None:
    class Interrupted(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            if action == "interrupt":
                raise KeyboardInterrupt
            return super().step(action)

    taken: list[Any] = []
    with Envs(lambda: worker_envs.Trouble(), threads=threads) as envs:
        live = [envs.take() for _ in range(3)]
        results(envs.execute_all([EnvJob(env, reset=(0, None)) for env in live]))
        capture = type(live[0]).snapshot

        def noted(self: Any) -> Any:
            taken.append(capture(self))
            return taken[-1]

        jobs = [EnvJob(env, capture=True, step=("on",)) for env in live]
        jobs[2].env = Interrupted(live[2])
        jobs[2].capture, jobs[2].step = False, ("interrupt",)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(live[0]), "snapshot", noted)
            with pytest.raises(KeyboardInterrupt):
                envs.execute_all(jobs)
    assert len(taken) == 2 and all(snap.released for snap in taken)


def test_an_exit_in_a_worker_is_raised_and_leaves_no_snapshot(pool: PooledEnvs) -> None:
    envs = begun(pool)
    with pytest.raises(SystemExit):
        pool.execute_all([EnvJob(env, capture=True, step=("exit" if env is envs[-1] else "on",)) for env in envs])
    again = results(pool.execute_all([EnvJob(env, reset=(7, None), step=("on",)) for env in envs]))
    assert {answer.stepped[0] for answer in again} == {"on 2"}  # type: ignore[index]


def test_a_reset_has_its_own_deadline_where_steps_have_none() -> None:
    with PooledEnvs("toys/Trouble-v0", 1, reset_timeout=1.0) as pool:
        env = pool.take()
        (answer,) = pool.execute_all([EnvJob(env, reset=(7, {"do": "hang"}))])
        assert isinstance(answer, CallTimedOut)
        assert env.timeout_of(EnvJob(env, reset=(7, None), step=("on",))) is None  # type: ignore[attr-defined]
