"""Nodes that workers are placed on: drained, joined, full, with images, resources and labels."""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from image_service import Service
from ray_nodes import STEPS, WHERE, At, Nodes, await_all, fleet_of, grown, staying

from sandboxgym.cli import main as cli
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.tree import Action, Context, Failure, ForkAt, rollout
from sandboxgym.workers.fleet import RayEnvs
from sandboxgym.workers.fleet_status import drain, fleet_status
from sandboxgym.workers.nodes import images as images_on_nodes
from sandboxgym.workers.nodes.images import FleetImages
from sandboxgym.workers.nodes.limits import FleetFull, Limits
from sandboxgym.workers.remote import RemoteEnv

try:
    from ray.experimental import internal_kv
except ModuleNotFoundError:
    internal_kv = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_installed")]


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
