"""``sandboxgym serve openenv`` as a process: our client, OpenEnv's own, hostile ones, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sandbox.sandboxes import check
from served_openenv import (  # noqa: F401 - fixtures
    Server,
    arguments,
    env,
    packages,
    refused,
    server,
    serving,
)

from sandboxgym.adapters.openenv import Client, ServerError

# ruff: noqa: F811


# What clients do.


def test_a_server_that_is_ended_as_soon_as_it_tells_its_address_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, *arguments(tmp_path)):
        pass  # what it leaves, and how it ends, is looked at here


def test_an_episode_is_that_of_the_environment(env: Client) -> None:
    first = env.reset(seed=3, task=1, episode_id="mine")
    assert first.observation.startswith("task 1, draw ") and first.reward is None and not first.done
    assert first == env.reset(seed=3, task="task 1")
    assert first != env.reset(seed=4, task=1)
    assert first.info["task_id"] == "task 1" and first.info["said"] == [] and "progress_key" not in first.info
    second = env.step("hello")
    assert second.observation.startswith("hello ") and second.reward == 1.0 and not second.terminated
    assert env.step("nan").reward is None
    last = env.step("end")
    assert last.done and last.terminated and not last.truncated
    state = env.state()
    assert state["step_count"] == 3 and state["done"] and state["task_id"] == "task 1" and state["env"] == "Trouble-v0"


def test_a_restored_session_goes_on_as_before(env: Client) -> None:
    env.reset(seed=0, task=0)
    before = env.step("one")
    assert env.snapshot() == "s1" and env.snapshot("named") == "named"
    future = [env.step("two"), env.step("end")]
    assert env.restore("s1") == before
    assert [env.step("two"), env.step("end")] == future
    assert env.restore("named", seed=5) == before
    assert env.step("two") != future[0]
    assert env.state()["step_count"] == 2
    env.discard(["s1"])
    assert env.state()["snapshots"] == ["named"]


def test_forks_are_sessions_of_their_own(env: Client, server: Server) -> None:
    env.reset(seed=0, task=0)
    env.step("one")
    env.snapshot("after-one")
    env.step("two")
    left, right = env.fork(2)
    (early,) = env.fork(1, snapshot="after-one")
    seeded = env.fork(2, seed=1)
    assert server.live() == 6
    assert left.step("x") == right.step("x") == env.step("x")
    assert early.step("x").observation.startswith("one x ")
    assert len({one.step("x").observation for one in seeded}) == 2
    assert early.state()["snapshots"] == [] and early.state()["episode_id"] == env.state()["episode_id"]
    left.close()
    server.wait_for_live(5)
    for one in (right, early, *seeded):
        one.close()


def test_a_fork_that_nobody_used_ends_with_its_session(server: Server) -> None:
    server.wait_for_live(0)
    with Client(server.url) as env:
        env.reset()
        left, right, _ = env._ask("fork", {"count": 3})["sessions"]
        kept = Client(server.url, session=left)
        assert server.get("/step", {"session_id": right, "action": {"action": "x"}})[0] == 200
        assert server.live() == 4
    server.wait_for_live(2)
    assert kept.step("x").reward == 1.0
    kept.close()
    close = {"jsonrpc": "2.0", "method": "openenv/session/close", "params": {"session_id": right}}
    assert server.get("/mcp", close)[1]["result"]["closed"]
    server.wait_for_live(0)


def test_clients_at_the_same_time_have_environments_of_their_own(server: Server) -> None:
    found = {}

    def play(number: int) -> None:
        with Client(server.url, timeout=120) as env:
            env.reset(seed=number, task=0)
            found[number] = [env.step(f"{number}").observation for _ in range(20)]

    threads = [threading.Thread(target=play, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Client(server.url) as env:
        for number in range(6):
            env.reset(seed=number, task=0)
            assert found[number] == [env.step(f"{number}").observation for _ in range(20)]
    server.wait_for_live(0)


def test_tasks_are_listed_and_played_by_split_and_index(env: Client, server: Server) -> None:
    assert server.get("/list_environments") == (200, ["Trouble-v0"])
    assert server.get("/Trouble-v0/splits") == (200, [{"name": "default", "type": "train"}])
    status, listed = server.get("/Trouble-v0/tasks", {"split": "default"})
    assert status == 200 and [task["id"] for task in listed["tasks"]] == ["task 0", "task 1", "task 2"]
    assert server.get("/trouble-v0/num_tasks", {"split": "other"}) == (200, {"num_tasks": 1})
    task = {"id": "task 2", "index": 0, "instruction": "Say something.", "type": ""}
    assert server.get("/Trouble-v0/task", {"split": "other", "index": 0}) == (200, {"task": task})
    status, listed = server.get("/Trouble-v0/task_range", {"split": "default", "start": -2})
    assert [task["index"] for task in listed["tasks"]] == [1, 2]
    assert server.get("/Trouble-v0/task", {"split": "default", "index": 3})[0] == 400
    assert server.get("/Trouble-v0/tasks", {"split": "none"})[0] == 400
    status, told = server.get("/Another-v0/splits")
    assert status == 404 and "expected Trouble-v0, found 'Another-v0'" in told["detail"]
    assert env.reset(split="other", index=0).info["task_id"] == "task 2"
    with refused("VALIDATION_ERROR", "expected the name of a split, found '/etc'"):
        env.reset(split="/etc", index=0)
    with refused("EXECUTION_ERROR", "expected a task from 0 to 2, found 7"):
        env.reset(task=7)
    with refused("EXECUTION_ERROR", "expected a reset before the first step"):  # there is no episode after that
        env.step("x")


def test_http_plays_the_session_that_it_names(server: Server) -> None:
    def rpc(method: str, **params: Any) -> Any:
        status, told = server.get("/mcp", {"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
        assert status == 200 and told["id"] == 7
        return told.get("result") or told["error"]

    session = {"session_id": rpc("openenv/session/create")["session_id"]}
    status, first = server.get("/reset", {**session, "seed": 0, "task": 0})
    assert status == 200 and first["observation"]["observation"].startswith("task 0")
    assert server.get("/step", {**session, "action": {"action": "one"}, "timeout_s": 3})[1]["reward"] == 1.0
    assert server.get("/snapshot", session)[1]["snapshot"] == "s1"
    half = "\ud800"  # of a pair: no UTF-8, but JSON has an escape for it
    assert server.get("/step", {**session, "action": {"action": half}})[1]["observation"]["info"]["said"] == [
        "one",
        half,
    ]
    assert server.get("/restore", {**session, "snapshot": "s1"})[0] == 200
    assert server.get("/step", {**session, "action": {"action": "two"}})[1]["observation"]["info"]["said"] == [
        "one",
        "two",
    ]
    assert server.get("/restore", {**session, "snapshot": "s1"})[1]["observation"]["info"]["said"] == ["one"]
    assert server.get(f"/state?session_id={session['session_id']}")[1]["step_count"] == 1
    assert {tool["name"] for tool in rpc("tools/list")["tools"]} == {
        "begin",
        "act",
        "snapshot",
        "restore",
        "fork",
        "discard",
    }
    called = rpc("tools/call", name="act", arguments={"action": "three"}, **session)
    assert called["data"]["observation"]["info"]["said"] == ["one", "three"]
    assert rpc("tools/call", name="act", arguments={"action": half}, **session)["data"]["done"] is False
    with Client(server.url, session=session["session_id"]) as attached:
        assert attached.state()["step_count"] == 3
        with refused("SESSION_ERROR", "expected a session without a connection"):
            Client(server.url, session=session["session_id"]).state()
    time.sleep(0.2)
    assert rpc("openenv/session/close", **session)["closed"]
    assert "it may have ended" in rpc("openenv/session/close", **session)["message"]
    assert server.get("/step", {**session, "action": {"action": "x"}})[0] == 404
    server.wait_for_live(0)


def test_several_environments_have_a_path_each(tmp_path: Path) -> None:
    with serving(tmp_path, *["toys/Corridor-v0", "toys/Drift-v0"]) as server:
        (tmp_path / "live" / "none").touch()
        assert f"{server.url}, " in server.line
        with Client(server.url) as env, Client(server.url.replace("Corridor", "Drift")) as drift:
            assert env.reset().observation == [0, 1]
            assert [env.step(1).reward for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]
            assert len(drift.reset(seed=0).observation) == 2
            for wrong in (4, -1, True, "1", 1.0, None, [1]):
                with refused("VALIDATION_ERROR", "expected an action of Discrete(4), found"):
                    drift.step(wrong)
        root = f"http://127.0.0.1:{server.port}"
        server.url = root
        assert server.get("/list_environments") == (200, ["Corridor-v0", "Drift-v0"])
        assert server.get("/Corridor-v0/schema")[1]["action"]["properties"]["action"] == {
            "type": "integer",
            "minimum": 0,
            "maximum": 1,
        }
        status, told = server.get("/Corridor-v0/splits")
        assert status == 501 and "expected an environment with tasks" in told["detail"]
        (tmp_path / "live" / "none").unlink()


# Limits.


def test_sessions_and_snapshots_are_limited(env: Client, server: Server) -> None:
    env.reset()
    for _ in range(4):
        env.snapshot()
    with refused("CAPACITY_REACHED", "expected at most 4 snapshots"):
        env.snapshot()
    with refused("CAPACITY_REACHED", "expected at most 8 sessions"):
        env.fork(8)
    others = env.fork(7)
    assert server.live() == 8
    with refused("CAPACITY_REACHED", "expected at most 8 sessions"):
        Client(server.url).state()
    assert server.get("/reset", {})[0] == 503
    for one in others:
        one.close()


def test_idle_sessions_end(tmp_path: Path) -> None:
    with serving(tmp_path, *arguments(tmp_path, "--idle", "3")) as server, Client(server.url) as env:
        env.reset()
        (orphan,) = env._ask("fork", {})["sessions"]
        assert server.live() == 2
        server.wait_for_live(0)
        with refused("SESSION_ERROR", "no call came for 3 seconds"):
            env.step("x")
        with refused("SESSION_ERROR", "it may have ended"):
            Client(server.url, session=orphan).state()


@pytest.mark.slow
def test_a_call_that_takes_too_long_ends_its_session(tmp_path: Path) -> None:
    with (
        serving(tmp_path, *arguments(tmp_path, "--timeout", "3")) as server,
        Client(server.url) as env,
        Client(server.url) as other,
    ):
        other.reset()
        env.reset()
        with refused("SESSION_ERROR", "a call took longer than 3 seconds"):
            env.step("nap 9")
        assert other.step("x").reward == 1.0
        server.wait_for_live(1)


# Its end.


def fails(env: Client, action: str) -> None:
    with pytest.raises(ServerError):
        env.step(action)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: int) -> None:
    with serving(tmp_path, *arguments(tmp_path)) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(server.url)) for _ in range(3)]
        for client in clients:
            client.reset()
            client.snapshot()
        clients[0]._ask("fork", {"count": 2})
        stepping = threading.Thread(target=fails, args=(clients[1], "nap 1"))
        stepping.start()
        time.sleep(0.2)
        started = time.monotonic()
        assert server.end(number) == 0
        assert time.monotonic() - started < 8
        stepping.join()
        assert "Traceback" not in server.log
        assert not list((tmp_path / "runtime").glob("*/*"))


@pytest.mark.slow
def test_a_command_that_runs_in_a_sandbox_ends_with_the_server_and_leaves_no_files(tmp_path: Path) -> None:
    check("overlay")
    sleep = f"sleep 600.{os.getpid()}"
    with serving(tmp_path, "Harbor-v0", "--env-kwargs", "backend=overlay") as server, Client(server.url) as env:
        env.reset(task="ledger-totals")
        stepping = threading.Thread(target=fails, args=(env, f"{sleep} & {sleep}"))
        stepping.start()
        end = time.monotonic() + 300
        while not running(sleep):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert server.end() == 0
        stepping.join()
        assert not running(sleep)
        assert "Traceback" not in server.log
        assert not [path for path in (tmp_path / "runtime").iterdir() if path.is_dir()]


def running(text: str) -> bool:
    """True if a process has this in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes().replace(b"\0", b" "):
                return True
    return False


@pytest.mark.slow
def test_a_call_that_cannot_be_ended_does_not_keep_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path, *arguments(tmp_path))
    with Client(server.url) as env:
        env.reset()
        stepping = threading.Thread(target=fails, args=(env, "nap 600"))
        stepping.start()
        time.sleep(0.2)
        started = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - started < 120
        stepping.join()
    server.process.stdout.close()  # type: ignore[union-attr]
