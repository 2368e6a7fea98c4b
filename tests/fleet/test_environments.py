"""Remote environments, pools and vector environments with their workers on a Ray cluster."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from ray_nodes import STEPS, Nodes, until

from sandboxgym.workers.env_host import CallTimedOut, WorkerDied
from sandboxgym.workers.nodes.worker import RayWorker
from sandboxgym.workers.pool import EnvPool
from sandboxgym.workers.remote import RemoteEnv, WorkerSlots
from sandboxgym.workers.vector import SnapshotVectorEnv

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_installed")]


def test_a_remote_environment_on_the_cluster_is_as_any_other(nodes: Nodes) -> None:
    worker = RayWorker(resources={"env": 0.01})
    env = RemoteEnv("sandboxgym/ALFWorld-v0", shared=WorkerSlots(worker), timeout=30.0)
    here = gym.make("sandboxgym/ALFWorld-v0")
    assert env.reset(seed=5)[0] == here.reset(seed=5)[0]
    snap = env.snapshot()
    assert env.step("look") == here.step("look")
    restored, _ = env.restore(snap)
    assert restored == here.reset(seed=5)[0]
    with pytest.raises(AttributeError):
        env.call("no_such_attribute")
    env.close()
    assert not worker.alive


def test_a_death_is_told_and_the_next_reset_starts_anew(nodes: Nodes) -> None:
    env = RemoteEnv("sandboxgym/ALFWorld-v0", shared=WorkerSlots(RayWorker(resources={"env": 0.01})))
    env.reset(seed=5)
    ray.kill(env.worker._actor)  # type: ignore[attr-defined]
    with pytest.raises(WorkerDied, match="lost"):
        for _ in range(600):
            env.step("look")
            time.sleep(0.1)
    assert env.reset(seed=5)
    env.close()


def test_a_call_that_hangs_ends_its_worker(nodes: Nodes) -> None:
    def make() -> Any:
        class Stuck(gym.Env[Any, Any]):
            observation_space = action_space = gym.spaces.Discrete(2)

            def reset(self, **_: Any) -> Any:
                return 0, {}

            def step(self, _: Any) -> Any:
                time.sleep(3600)

        return Stuck()

    env = RemoteEnv(make, shared=WorkerSlots(RayWorker(resources={"env": 0.01})), timeout=2.0)
    env.reset()
    with pytest.raises(CallTimedOut):
        env.step(0)
    assert not env.worker.alive
    env.close()


def test_pools_and_vector_environments_have_their_workers_on_the_cluster(nodes: Nodes) -> None:
    nodes.with_two()
    env = "sandboxgym/ALFWorld-v0"

    def play(env: Any, observation: Any, info: Any) -> list[Any]:
        seen = [observation]
        for turn in range(4):
            commands = info["admissible_commands"]
            observation, *rest, info = env.step(commands[turn % len(commands)])
            seen.append((observation, *rest))
        return seen

    def played(mode: Any) -> list[Any]:
        with EnvPool(env, 2, mode=mode, max_episode_steps=STEPS) as pool:
            snap = pool.submit(lambda env, *_: env.snapshot(), task=1, seed=3).result()
            jobs = [*pool.fork(snap, 3, play, seed=5), *(pool.submit(play, task=task, seed=task) for task in range(3))]
            found = [job.result() for job in jobs]
            assert pool.stats.restores == 3
        with SnapshotVectorEnv.make(env, 3, mode, workers=2, max_episode_steps=STEPS) as vec:
            vec.reset(seed=0, options=[{"task": task} for task in range(3)])
            found += [vec.step(["look"] * 3)[:4]]
            snap = vec.snapshot([0])[0]
            vec.restore({1: snap, 2: snap}, seeds=7)
            found += [[part.tolist() for part in map(np.asarray, vec.step(["inventory"] * 3)[:4])]]
        return found

    there, here = played("ray"), played("thread")
    assert str(there) == str(here)
    until(lambda: not nodes.actors())
