"""Owners of environments on a Ray cluster: clients, killed owners, and what is left of them on the nodes."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from ray_nodes import Nodes, await_all, elsewhere, fleet_of, grown, stored_files, until, workers_of

from sandboxgym.cli import main as cli
from sandboxgym.tree.journal import Journal
from sandboxgym.workers import fleet_status as state_of_fleet
from sandboxgym.workers.fleet_status import fleet_status

try:
    import ray
    from ray.experimental import internal_kv
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_installed")]


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
        serving.wait(300)
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
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.2)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
