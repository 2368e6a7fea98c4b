"""A Ray cluster of simulated nodes, and the trees that environments in this process grow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pytest
from components import missing
from ray_nodes import STEPS, Nodes, grown, until
from sandbox.docker_image import docker_image as docker_image

from sandboxgym.tree import Envs

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]


@pytest.fixture(scope="package")
def ray_installed() -> None:
    if ray is None:
        missing("ray", "Ray is not installed")


@pytest.fixture(scope="package")
def nodes(ray_installed: None) -> Iterator[Nodes]:
    """One cluster for all modules: starting one takes as long as most tests."""
    if ray.is_initialized():
        ray.shutdown()
    made = Nodes()
    yield made
    made.end()


@pytest.fixture
def nothing_left(nodes: Nodes) -> Iterator[None]:
    """Traces of owners on the nodes are the same before and after a test."""
    nodes.with_two()
    until(lambda: not nodes.left())  # of the test before
    before = nodes.settled_traces()
    yield
    deadline = time.monotonic() + 300
    while (now := nodes.traces()) != before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert now == before


@pytest.fixture(scope="module")
def local() -> Any:
    with Envs(lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=STEPS)) as envs:
        return grown(envs)


@pytest.fixture
def third(nodes: Nodes) -> Iterator[Any]:
    """A third node, which alone has the resource ``sandbox`` and the label ``zone=a``."""
    nodes.with_two()
    node = nodes.joined({"zone": "a"}, sandbox=4)
    nodes.cluster.wait_for_nodes()
    yield node
    nodes.cluster.remove_node(node)
