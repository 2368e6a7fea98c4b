"""Environments on a Ray cluster of simulated nodes: trees equal to local ones, whatever happens to the nodes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from components import missing

import sandboxgym  # noqa: F401  # registers the environments
from sandboxgym.tree import Action, Context, Envs, Failure, ForkAt, RolloutTree, rollout
from sandboxgym.workers import fleet
from sandboxgym.workers.env_host import CallTimedOut, WorkerDied
from sandboxgym.workers.fleet import FleetError, RayEnvs, RayWorker
from sandboxgym.workers.remote import RemoteEnv, WorkerSlots

try:
    import ray
    from ray.cluster_utils import Cluster
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
TASKS, STEPS = list(range(4)), 12
WHERE = {"resources": {"env": 0.01}, "create_timeout": 120.0}
"""Arguments of workers that are placed on the nodes of environments, which may die, not on the head."""


class Nodes:
    """A cluster of a head, which has no room for workers, and nodes that come and go."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000})
        self.nodes = [self.joined(), self.joined()]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error", configure_logging=False)

    def joined(self) -> Any:
        return self.cluster.add_node(num_cpus=4, resources={"env": 4}, object_store_memory=80_000_000)

    def with_two(self) -> list[Any]:
        """The nodes of environments, two of them."""
        while len(self.nodes) < 2:
            self.nodes.append(self.joined())
        return self.nodes

    def kill(self, node: Any, workers: Sequence[RayWorker]) -> None:
        """End a node and its workers at once, as a machine does that loses its power."""
        there = [worker.pid for worker in workers if worker.node == node.node_id]
        assert there
        for pid in there:
            os.kill(pid, signal.SIGKILL)  # else they serve on for a moment without their node
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    if ray is None:
        missing("ray", "Ray is not installed")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if ray.is_initialized():
        ray.shutdown()
    made = Nodes()
    yield made
    made.end()


def policy(contexts: Sequence[Context]) -> list[Action]:
    return [Action(str(context.rng.choice(context.info["admissible_commands"]))) for context in contexts]


def plain(trees: Sequence[RolloutTree]) -> Any:
    return [
        [(path.key, [(e.action.text, e.reward, e.child.observation) for e in path.edges]) for path in tree.paths]
        for tree in trees
    ]


def grown(envs: Any, decide: Any = policy, failures: list[Failure] | None = None) -> Any:
    return plain(rollout(envs, decide, ForkAt([2, 5], width=3), tasks=TASKS, seed=(3,), retries=3, failures=failures))


@pytest.fixture(scope="module")
def local() -> Any:
    with Envs(lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=STEPS)) as envs:
        return grown(envs)


def fleet_of(workers: int, **options: Any) -> RayEnvs:
    return RayEnvs("sandboxgym/ALFWorld-v0", workers, max_episode_steps=STEPS, **{**WHERE, **options})


def workers_of(envs: RayEnvs) -> list[RayWorker]:
    found = [shared.worker for shared in envs._slots]
    assert all(isinstance(worker, RayWorker) for worker in found)
    return found  # type: ignore[return-value]


def await_all(envs: RayEnvs) -> None:
    """Wait until every worker runs; those that were placed on a node that is gone are asked for anew."""
    deadline = time.monotonic() + 120
    while len(envs._running()) < len(workers_of(envs)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


class At:
    """The policy, which calls a function once, before a decision with a number."""

    def __init__(self, number: int, function: Any) -> None:
        self.number, self.function, self.calls = number, function, 0

    def __call__(self, contexts: Sequence[Context]) -> list[Action]:
        self.calls += 1
        if self.calls == self.number:
            self.function()
        return policy(contexts)


def test_trees_on_two_nodes_are_the_local_ones(nodes: Nodes, local: Any) -> None:
    nodes.with_two()
    with fleet_of(4) as envs:
        await_all(envs)
        assert len({worker.node for worker in workers_of(envs)}) == 2
        assert grown(envs) == local


@pytest.mark.parametrize("number", [3, 9])
def test_a_killed_node_changes_no_tree(nodes: Nodes, local: Any, number: int) -> None:
    doomed = nodes.with_two()[0]
    with fleet_of(4) as envs:
        await_all(envs)
        lost: list[Failure] = []
        assert grown(envs, At(number, lambda: nodes.kill(doomed, workers_of(envs))), lost) == local
        assert lost and not any(failure.dropped for failure in lost)


@pytest.mark.parametrize("wiped", [False, True], ids=["with durable copies", "without any"])
def test_a_killed_node_whose_workers_kept_their_snapshots_changes_no_tree(
    nodes: Nodes, local: Any, tmp_path: Path, wiped: bool
) -> None:
    doomed = nodes.with_two()[0]

    def kill() -> None:
        if wiped:
            shutil.rmtree(tmp_path / "store" / "names", ignore_errors=True)
        nodes.kill(doomed, workers_of(envs))

    with fleet_of(4, store=tmp_path / "store") as envs:
        await_all(envs)
        assert grown(envs) == local
        lost: list[Failure] = []
        assert grown(envs, At(9, kill), lost) == local
        assert lost and not any(failure.dropped for failure in lost)
        assert all(worker.snapshots_shipped == 0 for worker in workers_of(envs))


def test_a_killed_worker_is_replaced_and_changes_no_tree(nodes: Nodes, local: Any) -> None:
    nodes.with_two()
    with fleet_of(2) as envs:
        await_all(envs)
        lost: list[Failure] = []
        pid = workers_of(envs)[0].pid
        assert pid
        assert grown(envs, At(4, lambda: os.kill(pid, signal.SIGKILL)), lost) == local
        assert lost and not any(failure.dropped for failure in lost)
        assert grown(envs) == local
        await_all(envs)


def test_a_frozen_worker_counts_as_lost_after_the_deadline(nodes: Nodes, local: Any) -> None:
    nodes.with_two()
    with fleet_of(2, timeout=5.0, reset_timeout=60.0) as envs:
        await_all(envs)
        pid = workers_of(envs)[0].pid
        assert pid is not None
        lost: list[Failure] = []
        began = time.monotonic()
        try:
            assert grown(envs, At(4, lambda: os.kill(pid, signal.SIGSTOP)), lost) == local
        finally:
            os.kill(pid, signal.SIGKILL)
        assert time.monotonic() - began < 50
        assert any("took longer than" in failure.error for failure in lost)


def test_a_run_whose_worker_is_killed_ends_with_the_weights_of_one_that_was_not(nodes: Nodes, tmp_path: Path) -> None:
    from bpo_ref.args import Args
    from bpo_ref.train import Trainer

    nodes.with_two()
    settings: dict[str, Any] = {"algo": "bpo", "prompts": 4, "updates": 2, "sft_steps": 2, "sft_episodes": 8}
    settings |= {"eval_episodes": 4, "eval_untrained": False, "context": 512, "trackers": (), "env_retries": 3}
    settings |= {"env_kwargs": ("games=embedded:train",), "eval_kwargs": ("games=embedded:unseen",)}
    Trainer(Args(**settings, out=str(tmp_path / "local"))).run()
    trainer = Trainer(Args(**settings, envs="ray", env_workers=2, out=str(tmp_path / "ray")))
    envs = trainer.session.envs
    assert isinstance(envs, RayEnvs)
    player, killed = trainer.session.player, []

    def doomed(temperature: float) -> Any:
        if trainer.session.stage == "rl" and not killed:
            await_all(envs)
            killed.append(ray.kill(workers_of(envs)[0]._actor))
        return player(temperature)

    trainer.session.player = doomed  # type: ignore[method-assign]
    trainer.run()
    assert killed
    one, other = ((tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("local", "ray"))
    assert one == other


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
        for _ in range(50):
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


def test_a_cluster_without_room_is_told_in_a_sentence(nodes: Nodes) -> None:
    with pytest.raises(FleetError, match="room"), fleet_of(1, resources={"unheard_of": 1}, create_timeout=2.0) as envs:
        envs.take()


def test_actors_end_with_their_environments(nodes: Nodes) -> None:
    nodes.with_two()
    with fleet_of(2) as envs:
        await_all(envs)
        envs.give(envs.take())
        pids = [worker.pid for worker in workers_of(envs)]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.2)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_cluster_that_is_not_there_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):  # nothing listens there, and Ray is not even asked
        with pytest.raises(FleetError, match=rf"expected a Ray cluster at {address} .*refused"):
            fleet.connect(address)

    def refused(**_: Any) -> None:
        raise ConnectionError("Version mismatch")

    monkeypatch.setattr(ray, "init", refused)
    with pytest.raises(FleetError, match=r"expected a Ray cluster at auto .*Version mismatch"):
        fleet.connect("auto")
    monkeypatch.setattr(fleet, "ray", None)
    with pytest.raises(gym.error.DependencyNotInstalled, match=r"sandboxgym\[ray\]"):
        fleet.connect()
