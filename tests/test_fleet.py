"""Environments on a Ray cluster of simulated nodes: trees equal to local ones, whatever happens to the nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import pty
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from components import missing
from image_service import Service
from ports import free_port
from ray_nodes import (
    STEPS,
    TASKS,
    TINY,
    WHERE,
    WORDS,
    At,
    Nodes,
    await_all,
    fleet_of,
    grown,
    plain,
    policy,
    staying,
    stored_files,
    until,
    used_node,
    workers_of,
)
from sandbox.docker_image import docker_image as docker_image

import sandboxgym
from bpo_ref.sampling.driver import roll_out
from sandboxgym.bench.pool import Waiting
from sandboxgym.cli import main as cli
from sandboxgym.errors import SnapshotMismatch, StoreFull
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.tree import Action, Context, Envs, Failure, ForkAt, rollout
from sandboxgym.tree.journal import Journal
from sandboxgym.workers import fleet_status as state_of_fleet
from sandboxgym.workers.env_host import CallTimedOut, FleetError, WorkerDied
from sandboxgym.workers.fleet import RayEnvs
from sandboxgym.workers.fleet_status import drain, fleet_status
from sandboxgym.workers.nodes import cluster as ray_cluster
from sandboxgym.workers.nodes import images as images_on_nodes
from sandboxgym.workers.nodes import worker as worker_on_node
from sandboxgym.workers.nodes.images import FleetImages
from sandboxgym.workers.nodes.limits import FleetFull, Limits
from sandboxgym.workers.nodes.worker import RayWorker
from sandboxgym.workers.pool import EnvPool
from sandboxgym.workers.remote import RemoteEnv, WorkerSlots
from sandboxgym.workers.vector import SnapshotVectorEnv

try:
    import ray
    from ray.experimental import internal_kv
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


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


@pytest.fixture
def nothing_left(nodes: Nodes) -> Iterator[None]:
    """What owners have on the nodes is the same before and after a test."""
    nodes.with_two()
    until(lambda: not nodes.left())  # of the test before
    before = nodes.settled_traces()
    yield
    deadline = time.monotonic() + 60
    while (now := nodes.traces()) != before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert now == before


@pytest.fixture(scope="module")
def local() -> Any:
    with Envs(lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=STEPS)) as envs:
        return grown(envs)


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


def test_a_drained_node_is_left_with_its_environments_and_snapshots(
    nodes: Nodes, local: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = nodes.with_two()[0].node_id
    with fleet_of(4, store=tmp_path / "store") as envs:
        await_all(envs)
        assert any(worker.node == gone for worker in staying(envs))

        def leave() -> None:
            drain(gone)
            envs.tend()

        lost: list[Failure] = []
        try:
            assert grown(envs, At(5, leave), lost) == local
            assert envs.moved > 0 and not lost
            assert cli(["fleet", "drain", gone[:12], "--timeout", "60"]) == 0
            assert "nothing is on node" in capsys.readouterr().out
            assert [node.draining for node in fleet_status().nodes if node.id == gone] == [True]
            await_all(envs)
            assert grown(envs) == local
            here = staying(envs)
            assert len(here) == 4 and gone not in {worker.node for worker in here}
        finally:
            assert cli(["fleet", "drain", gone, "--undo"]) == 0
    assert not internal_kv._internal_kv_list("", namespace="sandboxgym")


def test_a_node_that_joins_gets_its_share_of_the_paths(nodes: Nodes, local: Any) -> None:
    nodes.with_two()
    with fleet_of(3) as envs:
        await_all(envs)
        before = len(envs._left)
        joined = nodes.joined()
        try:
            nodes.cluster.wait_for_nodes()
            envs.tend()
            assert len(envs._leaving) + len(envs._left) - before == 1
            await_all(envs)
            assert grown(envs) == local
            envs.tend()
            counts = Counter(worker.node for worker in staying(envs))
            assert counts[joined.node_id] == 1 and set(counts.values()) == {1}
            assert grown(envs) == local
        finally:
            nodes.cluster.remove_node(joined)


def test_an_image_is_fetched_once_for_all_nodes_and_attracts_workers(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(tmp_path)
    images = FleetImages(str(tmp_path / "parts"), load=False, resources={"env": 0.01})
    try:
        two = [node.node_id for node in nodes.with_two()]
        first = images.prefetch([service.name], nodes=two[:1])
        assert set(first) == set(two[:1]) and set(first[two[0]].values()) == {"registry"}
        assert images.holders([service.name])[two[1]] == 0
        with fleet_of(2, prefer=images.holders([service.name])) as envs:
            await_all(envs)
            assert {worker.node for worker in staying(envs)} == set(two[:1])
        both = images.prefetch([service.name])
        assert set(both[two[0]].values()) == {"node"} and set(both[two[1]].values()) == {"peer"}
        again = partial(FleetImages, str(tmp_path / "parts"), load=False, resources={"env": 0.01})
        monkeypatch.setattr(images_on_nodes, "FleetImages", again)
        assert cli(["swebench", "images", "slugline-4", "--image", service.name, "--fleet", nodes.address]) == 0
        told = capsys.readouterr().out.splitlines()[-2:]  # after what Ray prints
        assert {line.partition(", ")[0] for line in told} == {f"node {node[:8]}: images 1" for node in two}
        assert not any(line.endswith(" 0 B") for line in told)
    finally:
        images.close()
        service.close()
    assert not internal_kv._internal_kv_list("", namespace="sandboxgym-images")


def test_an_image_that_was_brought_to_the_nodes_is_what_the_tasks_of_a_run_are_on(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], docker_image: str
) -> None:
    def docker(*command: str) -> None:
        subprocess.run(["docker", *command], check=True, capture_output=True)

    def decide(contexts: Sequence[Context]) -> list[Action]:
        return [Action(("echo $IMAGE_SAYS", "echo more >> notes", "cat notes")[c.depth]) for c in contexts]

    nodes.with_two()
    service = Service(tmp_path, empty=True)
    name = service.name
    options: dict[str, Any] = {"dataset": "mini", "image": name, "max_episode_steps": 3}
    try:
        docker("tag", docker_image, name)
        docker("push", name)
        docker("rmi", name)  # all nodes of this machine have one daemon
        with (
            RayEnvs("sandboxgym/SWEBench-v0", 2, **WHERE, **options) as envs,
            pytest.raises(SandboxUnavailable, match=f"no Docker image '{name}' on this machine"),
        ):
            envs.take().reset(seed=1)
        command = ["swebench", "images", "slugline-4", "tally-3", "--image", name, "--fleet", nodes.address]
        assert cli(command) == 0
        assert len([line for line in capsys.readouterr().out.splitlines() if ": images 1, " in line]) == 2
        with RayEnvs("sandboxgym/SWEBench-v0", 2, **WHERE, **options) as envs:
            trees = rollout(envs, decide, ForkAt([1], width=2), tasks=[0, 1])
        said = [[edge.child.observation for edge in path.edges] for tree in trees for path in tree.paths]
        assert len(said) == 4 and all("\nmore\n" in steps[-1] for steps in said)
        assert sum("\nhello\n" in steps[0] for steps in said) == 2
    finally:
        subprocess.run(["docker", "rmi", "-f", name], capture_output=True)
        service.close()
    assert not internal_kv._internal_kv_list("", namespace="sandboxgym-images")


def test_siblings_start_beside_the_snapshot_that_they_fork(nodes: Nodes) -> None:
    nodes.with_two()
    with fleet_of(4) as envs:
        await_all(envs)
        first = envs.take()
        first.reset(seed=0)
        assert isinstance(first, RemoteEnv)
        snap = first.snapshot()
        near = [envs.take_near(snap) for _ in range(4)]
        assert {env.worker.node for env in near} == {first.worker.node}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("nothing_left")
def test_environments_beyond_the_limits_of_the_nodes_are_refused(nodes: Nodes) -> None:
    nodes.with_two()
    with fleet_of(2, limits=Limits(environments=2)) as envs:
        await_all(envs)
        taken = [envs.take() for _ in range(4)]
        envs._gate._deadline = 0.3  # type: ignore[union-attr]
        with pytest.raises(FleetFull, match=r"has 2 of 2 environments; node"):
            envs.take()
        envs.give(taken.pop())
        assert envs.take()


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


def elsewhere(function: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that executes a function of `ray_nodes`."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ray_nodes; getattr(ray_nodes, sys.argv[2])(*sys.argv[3:])"
    )
    command = [sys.executable, "-c", code, os.path.dirname(__file__), function, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_client_of_the_cluster_grows_the_local_trees(nodes: Nodes, local: Any, tmp_path: Path) -> None:
    nodes.with_two()
    port = str(free_port())
    server = [sys.executable, "-m", "ray.util.client.server", "--mode", "legacy", "--address", nodes.address]
    with open(tmp_path / "log", "wb") as log:
        serving = subprocess.Popen([*server, "--host", "127.0.0.1", "--port", port], stdout=log, stderr=log)
    try:
        until(lambda: listens(port))
        done = elsewhere("client", f"ray://127.0.0.1:{port}", str(tmp_path / "trees"))
        assert done.returncode == 0, done.stderr[-2000:] + (tmp_path / "log").read_text()[-2000:]
    finally:
        serving.terminate()
        serving.wait(60)
    assert pickle.loads((tmp_path / "trees").read_bytes()) == local
    assert not internal_kv._internal_kv_list("", namespace="sandboxgym")


def listens(port: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=1.0):
        return True
    return False


def test_an_owner_that_was_killed_is_continued_from_its_journal_by_another(
    nodes: Nodes, local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.with_two()
    store = tmp_path / "store"
    killed = elsewhere("owner", nodes.address, str(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with fleet_of(2, store=store) as envs:
        journal = Journal(tmp_path / "journal", head=None)
        assert journal.found > 20
        assert grown(envs, journal=journal) == local
        journal.close()
    monkeypatch.setattr(state_of_fleet, "STALE", 3.0)
    until(lambda: not nodes.left())
    assert not stored_files(store)


@pytest.mark.parametrize("kind", ["directory", "cluster"])
def test_what_a_killed_owner_holds_can_be_ended_at_once(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    nodes.with_two()
    place = str(tmp_path / "store") if kind == "directory" else "ray-objects://killed"
    code = (
        "import os, signal; from sandboxgym.workers.fleet import RayEnvs\n"
        f"envs = RayEnvs('sandboxgym/ALFWorld-v0', 1, address='{nodes.address}', resources={{'env': 0.01}}, "
        f"store='{place}')\n"
        "env = envs.take(); env.reset(seed=1); snap = env.snapshot(); snap.kept.prepare()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert cli(["fleet", "release", place]) == 0
    (lease, summary) = capsys.readouterr().out.splitlines()[-2:]
    name, _, told = lease.partition(": ")
    assert re.fullmatch(r"ends in (5[5-9]|60) min, snapshots 1", told) and summary.startswith(
        f"1 leases in {place}, which holds "
    )
    assert cli(["fleet", "release", place, "other"]) == 1
    assert f"fleet: expected leases among {name}, found other\n" in capsys.readouterr().err
    assert cli(["fleet", "release", place, *([name] if kind == "directory" else ["--all"])]) == 0
    assert capsys.readouterr().out.startswith("ended 1 leases, deleted 1 snapshots, ")
    if kind == "directory":
        files = {path.name for path in (tmp_path / "store").glob("**/*") if path.is_file()}
        assert files <= {"format.json", "lock", "swept"}
    until(lambda: not ray.util.list_named_actors(all_namespaces=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a run whose environments are in its process."""
    from bpo_ref.args import Args
    from bpo_ref.train import Trainer

    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(WORDS)
        Trainer(Args(**TINY, out=str(out))).run()
        yield out


def outcome(out: Path) -> Any:
    """Weights, trees of the last update, scores and numbers of a run, without what the clock says or was lost."""
    weights = (out / "checkpoint" / "model.safetensors").read_bytes()
    trees = {file.name: file.read_bytes() for file in (out / "trees").iterdir()}
    scores = json.loads((out / "results.json").read_text())["scores"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    untold = ("time/", "rollout/env_failures")
    numbers = [{k: v for k, v in row.items() if not k.startswith(untold) and "seconds" not in k} for row in rows]
    return weights, trees, scores, numbers


def test_a_run_whose_node_is_killed_in_the_middle_ends_with_the_weights_of_one_that_was_not(
    nodes: Nodes, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bpo_ref.args import Args
    from bpo_ref.sampling.policy import ChatPolicy
    from bpo_ref.train import Trainer

    doomed = nodes.with_two()[0]
    trainer = Trainer(Args(**TINY, envs="ray", env_workers=2, out=str(tmp_path)))
    envs, act, calls = trainer.session.envs, ChatPolicy.__call__, 0
    assert isinstance(envs, RayEnvs)

    def decide(policy: ChatPolicy, contexts: Sequence[Context]) -> Any:
        nonlocal calls
        calls += trainer.session.stage == "rl"
        if calls == 3 and doomed in nodes.nodes:
            nodes.kill(doomed, workers_of(envs))
        return act(policy, contexts)

    monkeypatch.setattr(ChatPolicy, "__call__", decide)
    await_all(envs)
    trainer.run()
    assert doomed not in nodes.nodes
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert sum(row.get("rollout/env_failures", 0) for row in rows) > 0
    assert outcome(tmp_path) == outcome(undisturbed)


def test_paths_that_ask_servers_by_themselves_on_nodes_one_of_which_is_killed_give_the_weights_of_a_local_run(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from served_runs import pretrained, server_of, trainer_of

    from bpo_ref.sampling.policy import AsyncChatPolicy
    from bpo_ref.train import Trainer

    monkeypatch.syspath_prepend(WORDS)
    nodes.with_two()
    pretrained(tmp_path / "model", size="0.2M")
    options: dict[str, Any] = {"driver": "async", "algo": "bpo", "tis": 2.0, "prompts": 4, "env_retries": 3}
    act, calls, killed = AsyncChatPolicy.__call__, 0, False

    def run(name: str, **more: Any) -> Trainer:
        with server_of(tmp_path / "model") as server:
            trainer = trainer_of(tmp_path / "model", tmp_path / name, server, **options, **more)
            if isinstance(trainer.session.envs, RayEnvs):
                await_all(trainer.session.envs)
                monkeypatch.setattr(AsyncChatPolicy, "__call__", partialmethod(decide, trainer))
            trainer.run()
        return trainer

    async def decide(policy: AsyncChatPolicy, trainer: Trainer, context: Context) -> Any:
        nonlocal calls, killed
        calls += trainer.session.stage == "rl" and trainer.session.step == 1
        if calls >= 5 and not killed:
            killed, envs = True, trainer.session.envs
            assert isinstance(envs, RayEnvs)
            nodes.kill(used_node(nodes, envs), workers_of(envs))
        return await act(policy, context)

    run("local")
    run("ray", envs="ray", env_workers=2, ray_address=nodes.address)
    assert killed
    rows = map(json.loads, (tmp_path / "ray" / "metrics.jsonl").read_text().splitlines())
    assert sum(row.get("rollout/env_failures", 0) for row in rows) > 0
    assert outcome(tmp_path / "ray") == outcome(tmp_path / "local")


@pytest.fixture
def third(nodes: Nodes) -> Iterator[Any]:
    """A third node, which alone has the resource ``sandbox`` and the label ``zone=a``."""
    nodes.with_two()
    node = nodes.joined({"zone": "a"}, sandbox=4)
    nodes.cluster.wait_for_nodes()
    yield node
    nodes.cluster.remove_node(node)


@pytest.mark.parametrize(
    "settings",
    [{"env_resources": ("sandbox=1", "CPU=0.5", "memory=1e7")}, {"env_labels": ("zone=a",)}],
    ids=["resource", "label"],
)
def test_a_run_has_its_workers_on_nodes_with_what_they_need(
    nodes: Nodes, third: Any, undisturbed: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    from bpo_ref.args import Args
    from bpo_ref.train import Trainer

    settings |= {"envs": "ray", "env_workers": 2, "env_limits": ("environments=64",), "out": str(tmp_path)}
    trainer = Trainer(Args(**TINY, **settings))
    for envs in (trainer.session.envs, trainer.session.eval_envs):
        assert isinstance(envs, RayEnvs)
        await_all(envs)
        envs.tend()
        assert [worker.node for worker in staying(envs)] == [third.node_id] * 2
        assert envs._gate is not None and envs._gate.limits == Limits(environments=64)
    if "env_resources" in settings:

        def left() -> tuple[float, float]:
            there = ray._private.state.available_resources_per_node()[third.node_id]
            return there.get("sandbox", 0.0), there["CPU"]

        until(lambda: left() == (0.0, 2.0))  # Ray's table is some time behind
    trainer.run()
    assert outcome(tmp_path) == outcome(undisturbed)


def test_a_run_prefers_the_node_that_has_the_images_of_its_tasks_and_uses_others_where_that_is_full(
    nodes: Nodes, third: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bpo_ref.sampling.env_source import env_source

    service = Service(tmp_path)
    here = partial(FleetImages, str(tmp_path / "parts"), load=False)
    monkeypatch.setattr(images_on_nodes, "FleetImages", here)
    arguments = ["dataset=mini", f"image={service.name}"]
    options: dict[str, Any] = {"max_turns": 3, "place": "ray", "resources": ["env=0.01", "CPU=1"]}
    try:
        with contextlib.closing(here(resources={"env": 0.01})) as images:
            images.prefetch([service.name], nodes=[third.node_id])
        service.close()  # which nobody asks when a run begins
        with env_source("sandboxgym/SWEBench-v0", arguments, workers=5, **options) as envs:
            assert isinstance(envs, RayEnvs)
            await_all(envs)
            envs.tend()
            counts = Counter(worker.node for worker in staying(envs))
            assert counts[third.node_id] == 4 and len(counts) == 2
        with env_source("sandboxgym/SWEBench-v0", ["dataset=mini"], workers=3, **options) as envs:
            await_all(envs)  # type: ignore[arg-type]
            assert len({worker.node for worker in staying(envs)}) > 1  # type: ignore[arg-type]
    finally:
        service.close()
    assert not internal_kv._internal_kv_list("", namespace="sandboxgym-images")


def test_a_limit_of_a_run_holds_on_every_node(nodes: Nodes, third: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bpo_ref.sampling.env_source import env_source

    options: dict[str, Any] = {"max_turns": STEPS, "place": "ray", "resources": ["env=0.01"], "workers": 6}
    with env_source("sandboxgym/ALFWorld-v0", [], limits=["environments=1"], **options) as envs:
        assert isinstance(envs, RayEnvs) and envs._gate is not None
        await_all(envs)
        assert len({worker.node for worker in staying(envs)}) == 3
        taken: list[Any] = [envs.take() for _ in range(3)]
        assert {env.worker.node for env in taken} == {worker.node for worker in staying(envs)}
        envs._gate._deadline = 0.3
        with pytest.raises(FleetFull, match=r"has 1 of 1 environments; node"):
            envs.take()


def test_a_trainer_that_is_killed_within_an_update_ends_with_the_weights_and_trees_of_one_that_was_not(
    nodes: Nodes, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bpo_ref.args import Args
    from bpo_ref.train import Trainer

    nodes.with_two()
    out, store = tmp_path / "run", tmp_path / "store"
    options: dict[str, Any] = {"envs": "ray", "env_workers": 2, "env_store": str(store)}
    options |= {"ray_address": nodes.address, "out": str(out)}
    killed = elsewhere("trainer", json.dumps(options), "5")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert (out / "inflight" / "update-1.0").stat().st_size > 1000
    durable, restored = RayEnvs.durable, []

    def counted(envs: RayEnvs, reference: Any) -> Any:
        snap = durable(envs, reference)
        restored.append(reference)
        return snap

    monkeypatch.setattr(RayEnvs, "durable", counted)
    Trainer(Args(**TINY, **options, resume=True)).run()
    assert restored
    assert outcome(out) == outcome(undisturbed)
    assert not (out / "inflight").exists()
    monkeypatch.setattr(state_of_fleet, "STALE", 3.0)
    until(lambda: not nodes.left())
    assert not stored_files(store)


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


@pytest.mark.usefixtures("nothing_left")
def test_a_cluster_without_room_is_told_in_a_sentence(nodes: Nodes) -> None:
    with pytest.raises(FleetError, match="room"), fleet_of(1, resources={"unheard_of": 1}, create_timeout=2.0) as envs:
        envs.take()


@pytest.mark.usefixtures("nothing_left")
def test_a_node_without_the_package_is_told_in_a_sentence(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Actor(worker_on_node._Actor):
        pass

    Actor.__module__, Actor.__qualname__ = "only_here", "Actor"
    module = types.ModuleType("only_here")
    module.Actor = Actor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", module)
    monkeypatch.setattr(worker_on_node, "_Actor", Actor)
    nodes.with_two()
    began = time.monotonic()
    with (
        pytest.raises(FleetError, match=r"^node [\d.]+ cannot run workers: .*'only_here' .*expected"),
        fleet_of(2) as envs,
    ):
        envs.take()
    assert time.monotonic() - began < WHERE["create_timeout"]


@pytest.mark.usefixtures("nothing_left")
def test_a_node_with_another_version_of_the_package_is_told_in_a_sentence(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.with_two()
    monkeypatch.setattr(sandboxgym, "__version__", "0.0.1")
    with (
        pytest.raises(FleetError, match=r"^node [\d.]+ has sandboxgym [\d.]+\S*, expected 0\.0\.1 as here$"),
        fleet_of(2) as envs,
    ):
        envs.take()


def made_where_it_may(forbidden: Sequence[str]) -> Any:
    """A function that makes an environment, except on some nodes."""

    def make() -> Any:
        if ray.get_runtime_context().get_node_id() in forbidden:
            raise gym.error.DependencyNotInstalled("it needs a daemon: start one")
        return gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=STEPS)

    return make


def test_a_node_without_what_the_environment_needs_is_left_alone(nodes: Nodes, local: Any) -> None:
    bad, good = nodes.with_two()
    with RayEnvs(made_where_it_may([bad.node_id]), 4, **WHERE) as envs:  # type: ignore[arg-type]
        await_all(envs)
        assert grown(envs) == local
        assert {worker.node for worker in staying(envs)} == {good.node_id}
        assert any("cannot make the environment: it needs a daemon" in worker.unfit for worker in workers_of(envs))


@pytest.mark.usefixtures("nothing_left")
def test_nodes_that_all_lack_what_the_environment_needs_are_told_in_a_sentence(nodes: Nodes) -> None:
    everywhere = [node.node_id for node in nodes.with_two()]
    with (
        pytest.raises(FleetError, match=r"^node [\d.]+ cannot make the environment: it needs a daemon: start one$"),
        RayEnvs(made_where_it_may(everywhere), 3, **WHERE) as envs,
    ):  # type: ignore[arg-type]
        await_all(envs)
        envs.take()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("refusal", "arguments"),
    [
        (r"Environment `ALFWord` doesn't exist", {"env": "sandboxgym/ALFWord-v0"}),
        (r"quantity of resource env cannot be negative", {"resources": {"env": -1}}),
        (r"unexpected keyword argument 'gmaes'", {"gmaes": "embedded"}),
        (r"expected at least one worker, found workers=0", {"workers": 0}),
        (r"expected an empty directory or a store of snapshots, found other files in ", {"store": "others"}),
        (r"expected a store of snapshots of version 1 in .*, found .*99", {"store": "later"}),
        (r"expected ray-objects://NAME", {"store": "ray-objects://a b"}),
    ],
    ids=["environment", "resources", "argument", "workers", "files of others", "store of a later version", "name"],
)
def test_what_is_refused_leaves_nothing_on_the_nodes(
    nodes: Nodes, tmp_path: Path, refusal: str, arguments: dict[str, Any]
) -> None:
    for name in ("others", "later"):
        (tmp_path / name).mkdir()
    (tmp_path / "others" / "thesis.tex").touch()
    (tmp_path / "later" / "format.json").write_text('{"format": "sandboxgym-snapshots", "version": 99}')
    place = arguments.get("store", "ray-objects://refused")
    there = place if "://" in place else str(tmp_path / place)
    options: dict[str, Any] = {"env": "sandboxgym/ALFWorld-v0", "workers": 2, **WHERE, **arguments, "store": there}
    with pytest.raises(Exception, match=refusal) as caught, RayEnvs(**options) as envs:
        envs.take()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("image", ["dir:/nowhere", "127.0.0.1:9/nobody/has:this"])
def test_a_sandbox_whose_image_no_node_has_is_told_in_a_sentence(nodes: Nodes, image: str) -> None:
    with RayEnvs("sandboxgym/SWEBench-v0", 2, dataset="mini", image=image, **WHERE) as envs:  # type: ignore[arg-type]
        with pytest.raises((ValueError, SandboxUnavailable), match=image) as caught:
            envs.take().reset(seed=1)
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_a_snapshot_of_another_version_is_refused_and_the_environment_goes_on(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: Any = gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=STEPS)
    monkeypatch.setattr(type(here.unwrapped), "state_version", 99)
    here.reset(seed=1)
    with fleet_of(2) as envs:
        env: Any = envs.take()
        env.reset(seed=1)
        snap = env.snapshot()
        expected = env.step("look")
        with pytest.raises(SnapshotMismatch, match=r"state_version = .*99") as caught:
            env.restore(here.snapshot())
        assert "\n" not in str(caught.value)
        env.restore(snap)
        assert env.step("look") == expected


@pytest.mark.usefixtures("nothing_left")
def test_a_store_without_room_costs_durable_copies_and_nothing_else(nodes: Nodes, disk: Path) -> None:
    make = partial(Waiting, 0.0, 3_000_000)
    with RayEnvs(make, 2, store=disk / "store", **WHERE) as envs:  # type: ignore[arg-type]
        env: Any = envs.take()
        env.reset(seed=1)
        snap = env.snapshot()
        with pytest.raises(StoreFull, match=f"{disk}/store has no room for 3,.* more bytes of a snapshot"):
            snap.kept.prepare()
        near: Any = envs.take_near(snap)
        near.restore(snap)
        assert near.step("on")[0] == env.step("on")[0] == "on"
    assert not stored_files(disk / "store")


@pytest.mark.usefixtures("nothing_left")
def test_a_cluster_of_another_version_is_told_in_a_sentence(nodes: Nodes) -> None:
    code = (
        "import ray._private.utils as utils; utils.compute_version_info = lambda: ('2.1.0', '3.9.1')\n"
        f"from sandboxgym.cli import main; raise SystemExit(main(['fleet', 'status', '--address', '{nodes.address}']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"sandboxgym fleet: expected a Ray cluster at {nodes.address} ")
    assert f"Version mismatch: The cluster was started with: Ray: {ray.__version__}" in line and "Ray: 2.1.0" in line


def test_the_state_of_the_fleet_shows_all_owners_and_what_was_lost(
    nodes: Nodes, local: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.with_two()
    with fleet_of(2) as envs, fleet_of(1) as others:
        await_all(envs)
        await_all(others)
        pid = staying(envs)[0].pid
        assert pid
        assert grown(envs, At(6, lambda: os.kill(pid, signal.SIGKILL))) == local
        assert grown(others) == local
        held = others.take()
        await_all(envs)
        for source in (envs, others):
            assert source._reporter.report()
        assert cli(["fleet", "status", "--json"]) == 0
        state = json.loads(capsys.readouterr().out.splitlines()[-1])  # after what Ray prints of the death
        assert cli(["fleet", "status"]) == 0
        text = capsys.readouterr().out
        others.give(held)
        one, other = sorted(state["owners"], key=lambda owner: -owner["replaced"])
        steps = sum(len(path) for tree in local for _, path in tree)
        assert other["steps"] == steps and one["steps"] >= steps > 0
        assert (one["replaced"], one["starting"], other["replaced"]) == (1, 0, 0)
        assert (
            set(one["failures"]) == {"WorkerDied"} and sum(one["recoveries"].values()) == one["failures"]["WorkerDied"]
        )
        assert set(one["recoveries"]) <= {"snapshot", "fork", "reset"} and not other["failures"] and not one["dropped"]
        assert one["steps_per_second"] > 0 and one["env"] == "sandboxgym/ALFWorld-v0"
        there = [node for node in state["nodes"] if node["alive"] and not node["head"]]
        assert sum(node["usage"]["workers"] for node in there) == 3 and all(node["cores"] == 4 for node in there)
        live = sum(len(source._made) for source in (envs, others))
        assert sum(node["usage"]["environments"] for node in there) == live
        assert sum(node["usage"]["in_use"] for node in there) == 1
        assert all(node["usage"]["snapshot_bytes"] > 1000 for node in there if node["usage"]["snapshots"])
        assert sum(node["usage"]["snapshots"] for node in there) > 0
        assert (
            f"owners: 2, environments: {live}" in text
            and f"failures: WorkerDied {sum(one['failures'].values())};" in text
        )
    assert not fleet_status().owners
    assert not internal_kv._internal_kv_list("", namespace="sandboxgym")


def test_the_state_is_drawn_again_and_again_until_ctrl_c(nodes: Nodes) -> None:
    nodes.with_two()
    until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3)  # it forgets killed ones some time later
    terminal, its = pty.openpty()
    command = [sys.executable, "-m", "sandboxgym", "fleet", "status", "--address", nodes.address, "--watch", "0.2"]
    # A session of its own, whose terminal it is: else Ctrl-C is a character like others.
    watching = subprocess.Popen(["setsid", "--ctty", *command], stdin=its, stdout=its, stderr=its)
    os.close(its)
    try:
        shown = shown_until(terminal, lambda shown: shown.count("\x1b[H\x1b[J") == 3)
        _, first, second, _ = shown.split("\x1b[H\x1b[J")
        assert first == second and first.startswith("nodes alive: 3") and "no owner of environments" in first
        os.write(terminal, b"\x03")
        assert shown_until(terminal, lambda shown: "interrupted" in shown).endswith("\r\nsandboxgym fleet: interrupted")
        assert watching.wait(60) == 130
    finally:
        watching.kill()
        watching.wait()
        os.close(terminal)


def shown_until(terminal: int, complete: Any) -> str:
    """Text on a terminal, from now on until it is complete."""
    shown, deadline = "", time.monotonic() + 120
    while not complete(shown):
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], shown
        shown += os.read(terminal, 1).decode(errors="replace")  # no more of what comes after
    return shown


def test_a_reader_of_the_state_may_leave_at_any_time(nodes: Nodes) -> None:
    command = [sys.executable, "-m", "sandboxgym", "fleet", "status", "--address", nodes.address, "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        assert json.loads(watching.stdout.readline())["nodes"]
        watching.stdout.close()
        assert (watching.wait(60), watching.stderr.read()) == (0, "")


def test_a_store_of_snapshots_is_in_the_state_of_the_fleet(nodes: Nodes, local: Any, tmp_path: Path) -> None:
    nodes.with_two()
    with fleet_of(2, store=tmp_path) as envs:
        await_all(envs)
        envs.give(envs.take())
        with contextlib.ExitStack() as kept:
            env = envs.take()
            kept.callback(envs.give, env)
            env.reset(seed=1)
            snap = env.snapshot()  # type: ignore[attr-defined]
            kept.callback(snap.release)
            snap.kept.prepare()
            env.step("look")
            owner, _ = envs.measured()
            assert sum(there.snapshots for there in owner.nodes.values()) == 1
            assert sum(there.snapshot_bytes for there in owner.nodes.values()) > 100
            assert envs.measured()[1].written > 100


def test_an_owner_that_was_killed_disappears_from_the_state(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.with_two()
    code = (
        "import sys, time; from sandboxgym.workers.fleet import RayEnvs\n"
        f"envs = RayEnvs('sandboxgym/ALFWorld-v0', 1, address='{nodes.address}', resources={{'env': 0.01}})\n"
        "envs.take(); print('ready', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and "ready" in owner.stdout.read(6)
        until(lambda: any(there.environments for each in fleet_status().owners for there in each.nodes.values()))
    finally:
        owner.kill()
        owner.communicate()
    monkeypatch.setattr(state_of_fleet, "STALE", 3.0)
    until(lambda: not fleet_status().owners)
    assert not internal_kv._internal_kv_list("", namespace="sandboxgym")


def test_actors_end_with_their_environments(nodes: Nodes) -> None:
    nodes.with_two()
    with fleet_of(2) as envs:
        await_all(envs)
        envs.give(envs.take())
        pids = [worker.pid for worker in workers_of(envs)]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.2)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_cluster_that_is_not_there_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):  # nothing listens there, and Ray is not even asked
        with pytest.raises(FleetError, match=rf"expected a Ray cluster at {address} .*refused"):
            ray_cluster.connect(address)

    def refused(**_: Any) -> None:
        raise ConnectionError("Version mismatch")

    monkeypatch.setattr(ray, "init", refused)
    with pytest.raises(FleetError, match=r"expected a Ray cluster at auto .*Version mismatch"):
        ray_cluster.connect("auto")

    def late(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(FleetError, match=r"expected a Ray cluster at local .*timed out during startup"):
        ray_cluster.connect("local")
    monkeypatch.setattr(ray_cluster, "ray", None)
    with pytest.raises(gym.error.DependencyNotInstalled, match=r"sandboxgym\[ray\]"):
        ray_cluster.connect()


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
