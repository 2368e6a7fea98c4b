"""Snapshots keep, lose and leak exactly the state that the backends declare."""

from __future__ import annotations

import pytest
from sandbox.docker_image import docker_image  # noqa: F401 - fixture
from sandbox.sandboxes import check

from sandboxgym.bench import fidelity
from sandboxgym.conformance.checks.sandbox.probes import ABSENT, KEPT, LEAKED
from sandboxgym.conformance.sandbox_probes.shell import PROBES
from sandboxgym.sandbox.base import Capabilities
from sandboxgym.sandbox.sandbox import make_sandbox


def test_every_row_is_measured() -> None:
    names = {probe.name for probe in PROBES}
    assert {name for row in fidelity.ROWS for name in row.probes} <= names
    left_out = names - {name for row in fidelity.ROWS for name in row.probes}
    assert {name.partition(".")[0] for name in left_out} == {"file", "identity", "random"}, left_out


def test_what_is_declared_follows_from_the_capabilities() -> None:
    nothing = Capabilities("none", True, True, False, "written", frozenset(), frozenset())
    said = {row.title: fidelity.declared(row, nothing) for row in fidelity.ROWS}
    assert said["owners"] == ABSENT and said["modes"] == "lost" and said["empty directories"] == KEPT
    unsafe = Capabilities("none", False, False, True, "written", frozenset(), frozenset({"owners"}))
    said = {row.title: fidelity.declared(row, unsafe) for row in fidelity.ROWS}
    assert said["owners"] == KEPT and said["/dev/shm"] == LEAKED


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "docker", "copy"])
def test_what_is_declared_is_measured(backend: str, request: pytest.FixtureRequest) -> None:
    check(backend)
    rootfs = f"docker:{request.getfixturevalue('docker_image')}" if backend == "docker" else "host"
    with make_sandbox(backend, rootfs=rootfs, allow_unsafe=True) as sandbox:
        declared = {row.title: fidelity.declared(row, sandbox.backend.capabilities) for row in fidelity.ROWS}
    assert fidelity.measured(backend, rootfs) == declared
