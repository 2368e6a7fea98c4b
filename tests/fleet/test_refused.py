"""Sentences about clusters, nodes and arguments that environments cannot use; nothing is left on the nodes."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from ray_nodes import STEPS, WHERE, Nodes, await_all, fleet_of, grown, staying, stored_files, workers_of

import sandboxgym
from sandboxgym.bench.pool import Waiting
from sandboxgym.errors import SnapshotMismatch, StoreFull
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.workers.env_host import FleetError
from sandboxgym.workers.fleet import RayEnvs
from sandboxgym.workers.nodes import cluster as ray_cluster
from sandboxgym.workers.nodes import worker as worker_on_node

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_installed")]


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
def test_a_sandbox_whose_image_no_node_has_is_told_in_a_sentence(
    nodes: Nodes, image: str, request: pytest.FixtureRequest
) -> None:
    if not image.startswith("dir:"):
        request.getfixturevalue("docker_image")  # without a daemon that is what is told
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
