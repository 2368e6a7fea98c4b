"""Trees on a Ray cluster of simulated nodes equal local ones, whatever happens to workers and nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from components import missing
from ray_nodes import (
    TASKS,
    WHERE,
    At,
    Nodes,
    await_all,
    fleet_of,
    grown,
    plain,
    policy,
    staying,
    until,
    used_node,
    workers_of,
)

from bpo_ref.sampling.driver import roll_out
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.tree import Action, Context, Envs, Failure, ForkAt, rollout
from sandboxgym.workers.fleet import RayEnvs

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_installed")]


def test_trees_on_two_nodes_are_the_local_ones(nodes: Nodes, local: Any) -> None:
    nodes.with_two()
    with fleet_of(4) as envs:
        await_all(envs)
        assert len({worker.node for worker in staying(envs)}) == 2
        assert grown(envs) == local


SHELL = ("ls", "echo one >> notes; wc -l notes", "head -c 100000 /dev/zero > big; wc -c big", "cat notes; pwd")


@pytest.mark.parametrize(
    ("env", "arguments"),
    [("WebShop-v0", {"max_episode_steps": 5}), ("SWEBench-v0", {"dataset": "mini", "max_episode_steps": 4})],
    ids=["webshop", "swebench"],
)
def test_trees_of_other_environments_are_the_local_ones_although_a_worker_and_a_node_are_killed(
    nodes: Nodes, tmp_path: Path, env: str, arguments: dict[str, Any]
) -> None:
    if env == "SWEBench-v0":
        try:
            backends.check("overlay")
        except SandboxUnavailable as error:
            missing("overlay", str(error))

    def decide(contexts: Sequence[Context]) -> list[Action]:
        return [Action(str(c.rng.choice(c.info.get("admissible_commands") or SHELL))) for c in contexts]

    def kill_worker() -> None:
        pid = staying(envs)[0].pid
        assert pid
        os.kill(pid, signal.SIGKILL)

    def kill_node() -> None:
        await_all(envs)  # the killed worker may be on any node by now, and the other on its way
        nodes.kill(used_node(nodes, envs), workers_of(envs))

    options: dict[str, Any] = {"tasks": [0, 1], "seed": (3,)}
    with Envs(lambda: gym.make(f"sandboxgym/{env}", **arguments)) as here:
        whole = plain(rollout(here, decide, ForkAt([2], width=2), **options))
    lost: list[Failure] = []
    nodes.with_two()
    with RayEnvs(f"sandboxgym/{env}", 2, store=tmp_path / "store", **WHERE, **arguments) as envs:  # type: ignore[arg-type]
        await_all(envs)
        player = At(2, kill_worker, At(4, kill_node, decide))
        assert plain(rollout(envs, player, ForkAt([2], width=2), retries=3, failures=lost, **options)) == whole
    assert len(nodes.nodes) == 1 and lost and not any(failure.dropped for failure in lost)


@pytest.mark.parametrize("number", [3, 9])
def test_a_killed_node_changes_no_tree(nodes: Nodes, local: Any, number: int) -> None:
    doomed = nodes.with_two()[0]
    with fleet_of(4) as envs:
        await_all(envs)
        lost: list[Failure] = []
        assert grown(envs, At(number, lambda: nodes.kill(doomed, workers_of(envs))), lost) == local
        assert lost and not any(failure.dropped for failure in lost)


def test_workers_struck_at_random_points_change_no_tree(nodes: Nodes, local: Any) -> None:
    """At other points in every run; `kills_on_ray` strikes nodes and owners as well."""
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)  # shown if it fails
    rng, timers, struck, stopped = random.Random(seed), [], 0, set()
    nodes.with_two()

    def strike() -> None:
        nonlocal struck
        if pids := [pid for place in envs._present() if (pid := envs._worker(place).pid)]:
            number, pid = rng.choice([signal.SIGKILL] * 4 + [signal.SIGSTOP]), rng.choice(pids)
            stopped.update([pid] if number == signal.SIGSTOP else [])
            with contextlib.suppress(ProcessLookupError):  # it was struck before
                os.kill(pid, number)
                struck += 1

    def decide(contexts: Sequence[Context]) -> list[Action]:
        if len(timers) < 12 and rng.random() < 0.5:
            timers.append(threading.Timer(rng.uniform(0, 0.03), strike))  # within a step, or between two
            timers[-1].start()
        return policy(contexts)

    lost: list[Failure] = []
    try:
        with fleet_of(4, timeout=5.0, reset_timeout=60.0) as envs:
            await_all(envs)
            while len(timers) < 12:
                assert grown(envs, decide, lost, retries=100) == local
            for timer in timers:
                timer.join()
            assert grown(envs) == local
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):  # what the fleet ended
                os.kill(pid, signal.SIGKILL)
    assert struck > 6 and lost and not any(failure.dropped for failure in lost)


class OneByOne:
    """A policy of one path at a time, whose answers take different times, and which calls a function at one of them."""

    def __init__(self, number: int = 0, function: Any = None) -> None:
        self.number, self.function, self.calls = number, function, 0

    async def __call__(self, context: Context) -> Action:
        self.calls += 1
        if self.calls == self.number:
            self.function()
        await asyncio.sleep(self.calls % 5 / 200)
        return policy([context])[0]

    def release(self, path: tuple[int, Any]) -> None:
        pass


def grown_by_themselves(envs: Any, decide: OneByOne, failures: list[Failure]) -> Any:
    options: dict[str, Any] = {"tasks": TASKS, "seed": (3,), "retries": 3, "failures": failures}
    return plain(roll_out(envs, decide, ForkAt([2, 5], width=3), by_itself=True, **options))


@pytest.mark.parametrize("kept", [False, True], ids=["bytes", "store"])
def test_paths_that_advance_by_themselves_grow_the_trees_of_lockstep(
    nodes: Nodes, local: Any, tmp_path: Path, kept: bool
) -> None:
    nodes.with_two()
    with fleet_of(4, store=tmp_path / "store" if kept else None) as envs:
        await_all(envs)
        lost: list[Failure] = []
        assert grown_by_themselves(envs, OneByOne(), lost) == local and not lost


@pytest.mark.parametrize("way", ["killed", "killed with a store", "frozen"])
def test_paths_that_advance_by_themselves_outlive_a_node(nodes: Nodes, local: Any, tmp_path: Path, way: str) -> None:
    doomed = nodes.with_two()[0]
    options: dict[str, Any] = {"timeout": 5.0, "reset_timeout": 60.0} if way == "frozen" else {}
    options |= {"store": tmp_path / "store"} if way.endswith("store") else {}
    with fleet_of(4, **options) as envs, contextlib.ExitStack() as stack:
        await_all(envs)
        lose = (
            stack.enter_context(nodes.freezing(doomed))
            if way == "frozen"
            else lambda: nodes.kill(doomed, workers_of(envs))
        )
        lost: list[Failure] = []
        assert grown_by_themselves(envs, OneByOne(60, lose), lost) == local
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


def test_a_snapshot_in_the_memory_of_the_nodes_outlives_the_node_that_took_it(nodes: Nodes, local: Any) -> None:
    doomed = nodes.with_two()[0]
    with fleet_of(2, store="ray-objects://fleet") as envs:
        await_all(envs)
        assert grown(envs) == local
        there, *_, here = sorted(envs._running(), key=lambda place: envs._worker(place).node != doomed.node_id)
        env = envs.take_at(there)
        env.reset(seed=1, options={"task": 2})
        env.step("look")
        snap = env.snapshot()  # type: ignore[attr-defined]
        snap.kept.prepare()
        expected = env.step("inventory")
        nodes.kill(doomed, workers_of(envs))
        other = envs.take_at(here)
        other.restore(snap)  # type: ignore[attr-defined]
        assert other.step("inventory") == expected
        envs.discard(env)
        envs.give(other)
        assert grown(envs) == local
    until(lambda: not ray.util.list_named_actors(all_namespaces=True))


def test_a_killed_worker_is_replaced_and_changes_no_tree(nodes: Nodes, local: Any) -> None:
    nodes.with_two()
    with fleet_of(2) as envs:
        await_all(envs)
        lost: list[Failure] = []
        pid = staying(envs)[0].pid
        assert pid
        assert grown(envs, At(4, lambda: os.kill(pid, signal.SIGKILL)), lost) == local
        assert lost and not any(failure.dropped for failure in lost)
        assert grown(envs) == local
        await_all(envs)


def test_workers_killed_before_their_first_environment_are_replaced(nodes: Nodes, local: Any) -> None:
    nodes.with_two()
    with fleet_of(2) as envs:
        await_all(envs)
        for worker in staying(envs):
            assert worker.pid
            os.kill(worker.pid, signal.SIGKILL)
        assert grown(envs) == local


def test_a_frozen_worker_counts_as_lost_after_the_deadline(nodes: Nodes, local: Any) -> None:
    nodes.with_two()
    with fleet_of(2, timeout=5.0, reset_timeout=60.0) as envs:
        await_all(envs)
        pid = staying(envs)[0].pid
        assert pid is not None
        lost: list[Failure] = []
        try:
            assert grown(envs, At(4, lambda: os.kill(pid, signal.SIGSTOP)), lost) == local
        finally:
            with contextlib.suppress(ProcessLookupError):  # the fleet ends it, at some time
                os.kill(pid, signal.SIGKILL)
        assert any("took longer than 5 s" in failure.error for failure in lost)


def test_a_frozen_node_counts_as_lost_after_the_deadline(nodes: Nodes, local: Any) -> None:
    doomed = nodes.with_two()[0]
    with fleet_of(4, timeout=5.0, reset_timeout=60.0) as envs, nodes.freezing(doomed) as freeze:
        await_all(envs)
        assert {worker.node for worker in staying(envs)} == {node.node_id for node in nodes.nodes}
        lost: list[Failure] = []
        assert grown(envs, At(4, freeze), lost) == local
        assert any("took longer than" in failure.error for failure in lost)
        assert not any(failure.dropped for failure in lost)
