"""The state of a fleet on a Ray cluster, as its owners report it and the command line shows it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import At, Nodes, await_all, fleet_of, grown, staying, until

from sandboxgym.cli import main as cli
from sandboxgym.workers.fleet_status import fleet_status

try:
    import ray
    from ray.experimental import internal_kv
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_installed")]


def test_the_state_of_the_fleet_shows_all_owners_and_what_was_lost(
    nodes: Nodes, local: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or the rate is 0 where a busy machine takes long after the steps.
    monkeypatch.setattr("sandboxgym.workers.fleet_status.WINDOW", 3600.0)
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
        assert watching.wait(300) == 130
    finally:
        watching.kill()
        watching.wait()
        os.close(terminal)


def shown_until(terminal: int, complete: Any) -> str:
    """Text on a terminal, from now on until it is complete."""
    shown, deadline = "", time.monotonic() + 300
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
        assert (watching.wait(300), watching.stderr.read()) == (0, "")


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
