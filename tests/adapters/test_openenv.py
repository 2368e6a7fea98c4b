"""``sandboxgym serve openenv`` as a process: our client, OpenEnv's own, hostile ones, and its end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_stub import chat_stub
from components import missing

from sandboxgym.adapters.openenv import Client, ServerError
from sandboxgym.brief import brief

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    for name in ("websockets", "starlette", "uvicorn", "jsonschema"):
        if importlib.util.find_spec(name) is None:
            missing("openenv-server", f"the package {name} is not installed")


class Server:
    """A server process; live environments of the troublesome kind are files of its folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder / "live"
        self.folder.mkdir()
        (folder / "runtime").mkdir()
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sandboxgym", "serve", "openenv", *arguments),
                *("--import", "served_envs", "--port", "0", "--verbose"),
            ],
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
            env={**os.environ, "PYTHONPATH": path, "SANDBOXGYM_RUNTIME": str(folder / "runtime")},
        )
        self._log = folder / "log"
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        assert "http://" in self.line, self.log
        self.url = "http://" + self.line.split("http://")[1].split()[0].rstrip(",")
        self.port = int(self.url.split(":")[2].partition("/")[0])

    @property
    def log(self) -> str:
        return self._log.read_text()

    def live(self) -> int:
        """Environments that are open, beside the one that the server describes itself by."""
        return len(list(self.folder.iterdir())) - 1

    def wait_for_live(self, count: int) -> None:
        end = time.monotonic() + 120
        while self.live() != count:
            assert time.monotonic() < end, f"expected {count} environments, found {self.live()}: {self.log}"
            time.sleep(0.02)

    def get(self, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else text.decode()

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(120)


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    server = Server(folder, *arguments)
    try:
        yield server
    finally:
        status = server.end()
        server.process.stdout.close()  # type: ignore[union-attr]
    assert status == 0, server.log
    assert not list(server.folder.iterdir())


def arguments(folder: Path, *more: str) -> list[str]:
    return ["served/Trouble-v0", "--env-kwargs", f"folder={folder / 'live'}", *more]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, *arguments(folder, "--sessions", "8", "--snapshots", "4")) as server:
        yield server


@pytest.fixture
def env(server: Server) -> Iterator[Client]:
    server.wait_for_live(0)
    with Client(server.url, timeout=120) as client:
        yield client
    server.wait_for_live(0)


@contextlib.contextmanager
def refused(code: str, said: str = "") -> Iterator[None]:
    with pytest.raises(ServerError) as error:
        yield
    assert error.value.code == code and said in str(error.value), str(error.value)
    assert len(str(error.value)) < 1200


def raw(server: Server, path: str = "/ws") -> Any:
    """A connection of a client that may send anything; a context manager."""
    from websockets.sync.client import connect

    return connect(server.url.replace("http", "ws") + path, max_size=2**27, proxy=None)


# What clients do.


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


# Bad input.


def test_a_message_that_is_not_understood_is_answered_and_the_session_continues(server: Server) -> None:
    deep = "[" * 100_000
    with raw(server) as socket_:

        def ask(text: str | bytes) -> Any:
            socket_.send(text)
            return json.loads(socket_.recv(timeout=120))

        for text, code, said in [
            ("", "INVALID_JSON", "Expecting value"),
            ("{", "INVALID_JSON", "Invalid JSON"),
            (deep, "INVALID_JSON", "Invalid JSON"),
            ("9" * 5000, "INVALID_JSON", "Invalid JSON"),
            (b"\xff\x00", "INVALID_JSON", "Invalid JSON"),
            ('{"type": "step", "data": {"action": NaN}}', "INVALID_JSON", "finite"),
            ("[]", "VALIDATION_ERROR", "expected a message as an object, found []"),
            ("null", "VALIDATION_ERROR", "found None"),
            ("{}", "UNKNOWN_TYPE", "found ''"),
            ('{"type": 3}', "UNKNOWN_TYPE", "found 3"),
            ('{"type": {"a": 1}}', "UNKNOWN_TYPE", "found {'a': 1}"),
            (json.dumps({"type": "x" * 10_000}), "UNKNOWN_TYPE", "found 'xxx"),
            ('{"type": "close_all"}', "UNKNOWN_TYPE", "expected reset, step, snapshot"),
            ('{"type": "reset", "data": []}', "VALIDATION_ERROR", "reset: expected a value of type object"),
            ('{"type": "reset", "data": null}', "VALIDATION_ERROR", "found None"),
            ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR", "reset.seed: expected minimum 0, found -1"),
            ('{"type": "reset", "data": {"seed": "1"}}', "VALIDATION_ERROR", "reset.seed: expected a value of type"),
            ('{"type": "reset", "data": {"sead": 1}}', "VALIDATION_ERROR", "found 'sead'"),
            ('{"type": "reset", "data": {"split": "other"}}', "VALIDATION_ERROR", "expected an index with the split"),
            ('{"type": "reset", "data": {}, "version": 2}', "VALIDATION_ERROR", "expected the fields data and type"),
            ('{"type": "reset", "data": {"options": {"x": 1}}}', "EXECUTION_ERROR", "expected the options 'task'"),
            ('{"type": "step", "data": {"action": "x"}}', "EXECUTION_ERROR", "expected a reset before the first step"),
            ('{"type": "snapshot"}', "EXECUTION_ERROR", "expected a reset before the first snapshot"),
            ('{"type": "fork"}', "EXECUTION_ERROR", "expected a reset before the first fork"),
            ('{"type": "restore", "data": {"snapshot": "s1"}}', "VALIDATION_ERROR", "none yet"),
        ]:
            told = ask(text)
            assert told["type"] == "error" and told["data"]["code"] == code, (brief(text), told)
            assert said in told["data"]["message"] and len(told["data"]["message"]) < 600, told
        assert ask('{"type": "reset", "data": {"seed": null}}')["type"] == "observation"
        for text, code, said in [
            ('{"type": "step"}', "VALIDATION_ERROR", "expected data with step"),
            ('{"type": "step", "data": {}}', "VALIDATION_ERROR", "missing: action"),
            ('{"type": "step", "data": {"message": "x"}}', "VALIDATION_ERROR", "step: expected"),
            ('{"type": "step", "data": {"action": 3}}', "VALIDATION_ERROR", "expected an action of text, found 3"),
            (
                '{"type": "step", "data": {"action": null}}',
                "VALIDATION_ERROR",
                "expected an action of text, found None",
            ),
            ('{"type": "step", "data": {"action": ["x"]}}', "VALIDATION_ERROR", "expected an action of text"),
            (
                '{"type": "step", "data": {"action": "raise"}}',
                "EXECUTION_ERROR",
                "the environment failed: ZeroDivision",
            ),
            ('{"type": "step", "data": {"action": "exit"}}', "EXECUTION_ERROR", "it raised SystemExit: 3"),
            ('{"type": "step", "data": {"action": "stop"}}', "EXECUTION_ERROR", "it raised StopIteration"),
            ('{"type": "fork", "data": {"count": 1.0}}', "VALIDATION_ERROR", "fork.count: expected a value of type"),
            ('{"type": "step", "data": {"action": "late"}}', "EXECUTION_ERROR", "TimeoutError"),
            ('{"type": "step", "data": {"action": "refuse"}}', "EXECUTION_ERROR", "expected a better action"),
            ('{"type": "snapshot", "data": {"name": "../x"}}', "VALIDATION_ERROR", "snapshot.name"),
            ('{"type": "snapshot", "data": {"name": "x\\n"}}', "VALIDATION_ERROR", "expected a name"),
            ('{"type": "fork", "data": {"count": 0}}', "VALIDATION_ERROR", "fork.count: expected minimum 1"),
            ('{"type": "fork", "data": {"count": true}}', "VALIDATION_ERROR", "fork.count: expected a value of type"),
            ('{"type": "fork", "data": {"count": 1000000}}', "VALIDATION_ERROR", "fork.count: expected maximum 64"),
            ('{"type": "fork", "data": {"snapshot": "none"}}', "VALIDATION_ERROR", "expected a snapshot of this"),
            ('{"type": "discard", "data": {"snapshots": "s1"}}', "VALIDATION_ERROR", "discard.snapshots"),
            ('{"type": "mcp"}', "VALIDATION_ERROR", "expected data with mcp"),
        ]:
            told = ask(text)
            assert told["type"] == "error" and told["data"]["code"] == code, (text, told)
            assert said in told["data"]["message"] and len(told["data"]["message"]) < 600, told
        echoed = ask('{"type": "step", "data": {"action": "\\ud800 \\u0000", "metadata": {"from": "another version"}}}')
        assert echoed["data"]["observation"]["info"]["said"][-1] == "\ud800 \0"
        assert ask('{"type": "step", "data": {"action": "end"}}')["data"]["done"]
        assert "after the end of the episode" in ask('{"type": "step", "data": {"action": "x"}}')["data"]["message"]
        assert ask('{"type": "mcp", "data": {"jsonrpc": "1.0"}}')["data"]["error"]["code"] == -32600
    assert "ZeroDivisionError" in server.log and "VALIDATION_ERROR: 'step: expected" in server.log
    assert server.log.count("WARNING sandboxgym: refused 127.0.0.1: Trouble-v0: VALIDATION_ERROR: ") == 1


def test_bad_http_requests_have_a_status_and_words(server: Server) -> None:
    for path, body, status, said in [
        ("/reset", b"{", 422, "Invalid JSON"),
        ("/reset", b"[]", 422, "expected an object as the body"),
        ("/reset", {"seed": -1}, 422, "reset.seed"),
        ("/reset", b" " * 2**21, 422, "expected a body of at most"),
        ("/step", {"action": {"action": "x"}}, 409, "without a session there is no episode to step"),
        ("/step", {}, 422, "step.action: expected an object"),
        ("/step", {"action": "x"}, 422, "step.action: expected an object, found 'x'"),
        ("/step", {"action": {"message": "x"}}, 422, "step: expected"),
        ("/step", {"session_id": "none", "action": {"action": "x"}}, 404, "it may have ended"),
        ("/step", {"session_id": 3, "action": {"action": "x"}}, 422, "expected session_id as text"),
        ("/fork", {}, 409, "without a session"),
        ("/state?session_id=none", None, 404, "it may have ended"),
        ("/Trouble-v0/tasks", {"split": 3}, 422, "expected split as text"),
        ("/Trouble-v0/tasks", {"split": "/etc"}, 422, "expected the name of a split, found '/etc'"),
        ("/Trouble-v0/num_tasks", {"split": "../secret"}, 422, "expected the name of a split"),
        (
            "/Trouble-v0/task",
            {"split": "tests", "index": 0},
            422,
            "expected the name of a split",
        ),
        ("/Trouble-v0/task", {"split": "default"}, 422, "expected an index, found none"),
        ("/Trouble-v0/task", {"split": "default", "index": True}, 422, "as integers"),
    ]:
        found, told = server.get(path, body)
        assert (found, said in told["detail"]) == (status, True), (path, found, told)
    for status in (404, 409, 422):
        assert server.log.count(f"WARNING sandboxgym: refused 127.0.0.1: status {status}: ") == 1
    assert server.get("/reset", {"seed": 0})[0] == 200
    assert server.get("/nothing")[0] == 404 and server.get("/step")[0] == 405
    for body, code in [
        (b"{", -32700),
        ({}, -32600),
        ([], -32600),
        ({"jsonrpc": "2.0", "method": "initialize"}, -32601),
        ({"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "sing"}}, -32602),
        ({"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "act", "arguments": []}}, -32602),
        ({"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "act", "arguments": {"action": "x"}}}, -32000),
        ({"jsonrpc": "2.0", "method": "openenv/session/close", "params": {"session_id": []}}, -32602),
    ]:
        status, told = server.get("/mcp", body)
        assert status == 200 and told["jsonrpc"] == "2.0" and told["error"]["code"] == code, (body, told)
    server.wait_for_live(0)


def test_web_pages_of_others_are_refused(server: Server) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    assert server.get("/health", headers={"Origin": "http://evil.example"})[0] == 403
    assert server.get("/health", headers={"Host": "evil.example"})[0] == 403
    assert server.get("/health", headers={"Origin": server.url})[0] == 200
    foreign: Any = "http://evil.example"
    with pytest.raises(InvalidStatus), connect(server.url.replace("http", "ws") + "/ws", origin=foreign, proxy=None):
        pass


def _half_closed(server: Server) -> None:
    with raw(server) as connection:
        connection.send('{"type": "reset"}')
        connection.recv(timeout=120)
        connection.socket.shutdown(socket.SHUT_WR)
        server.wait_for_live(0)


def _cut(server: Server) -> None:
    with raw(server) as connection:
        connection.send('{"type": "reset"}')
        connection.recv(timeout=120)
        connection.send('{"type": "step", "data": {"action": "nap 0.3"}}')
        connection.socket.shutdown(socket.SHUT_RDWR)


def _too_large(server: Server) -> None:
    with raw(server) as connection:
        connection.send(json.dumps({"type": "step", "data": {"action": "x" * 2**21}}))
        with pytest.raises(Exception, match="1009"):
            connection.recv(timeout=120)


def _never_speaks(server: Server) -> None:
    with raw(server):
        server.wait_for_live(1)


def _no_handshake(server: Server) -> None:
    for text in (b"\x00" * 1000, b"GET /ws HTTP/1.1\r\nUpgrade: websocket\r\n\r\n", b"PUT /" + b"x" * 200_000):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain, contextlib.suppress(OSError):
            plain.sendall(text)
            plain.recv(1000)


def _garbage_frames(server: Server) -> None:
    with raw(server) as connection:
        server.wait_for_live(1)
        connection.socket.sendall(b"\xff" * 5000)
        with pytest.raises(Exception, match=r"1002|no close frame|reserved"):
            connection.recv(timeout=120)


@pytest.mark.parametrize("attack", [_half_closed, _cut, _too_large, _never_speaks, _no_handshake, _garbage_frames])
def test_a_broken_connection_leaves_nothing(server: Server, attack: Callable[[Server], None]) -> None:
    attack(server)
    server.wait_for_live(0)
    with Client(server.url) as env:
        assert env.reset().reward is None
    server.wait_for_live(0)


def test_an_environment_that_cannot_be_made_is_an_error_of_the_protocol(tmp_path: Path) -> None:
    with serving(tmp_path, "served/Unwilling-v0") as server:
        with refused("FACTORY_ERROR", "Unwilling-v0 could not be made"):
            Client(server.url).state()
        assert "no room" in server.get("/reset", {})[1]["detail"]


def test_a_client_says_what_it_expected() -> None:
    with pytest.raises(ValueError, match="expected a URL such as"):
        Client("127.0.0.1:8000")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with refused("CONNECTION", "cannot connect to ws://127.0.0.1"):
        Client(f"http://127.0.0.1:{port}")


# The command line.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["No-v0"], "No-v0"),
        (["CartPole-v1"], "expected an environment with snapshots"),
        (["served/Trouble-v0"], "folder"),
        (["toys/Dice-v0", "toys/Dice-v0"], "found Dice-v0 twice"),
        (["toys/Dice-v0", "--sessions", "0"], "--sessions: expected 1"),
        (["toys/Dice-v0", "--port", "70000"], "cannot listen"),
        (["toys/Dice-v0", "--host", "192.0.2.1"], "cannot listen"),
    ],
)
def test_a_wrong_command_line_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from sandboxgym.cli import main

    try:
        status = main(["serve", "openenv", *given, "--import", "served_envs"])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status in (1, 2) and said in capsys.readouterr().err


# OpenEnv's own package, in an environment of its own: SANDBOXGYM_OPENENV names its python.


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("SANDBOXGYM_OPENENV") or (sys.executable if importlib.util.find_spec("openenv") else None)
    if found is None:
        missing("openenv", "the package openenv is not installed, and SANDBOXGYM_OPENENV names no python that has it")
    return found


def theirs(python: str, program: str, *arguments: str) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [python, "-c", program, *arguments], capture_output=True, text=True, timeout=240, env=outside, cwd="/"
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_openenv_validates_the_server(server: Server, python: str) -> None:
    program = "import sys; from openenv.cli.__main__ import main; sys.argv[0] = 'openenv'; main()"
    report = json.loads(theirs(python, program, "validate", "--url", server.url, "--json"))
    assert report["passed"] and report["summary"]["passed_count"] == report["summary"]["total_count"] == 6
    assert report["mode"] == "simulation" and report["standard_profile"] == "openenv-http/1.x"


THEIR_CLIENT = """
import sys
from openenv.core import GenericEnvClient
from openenv.core.env_server.types import *

with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    result = env.reset(seed=0, task=0, episode_id="theirs")
    assert result.observation["observation"].startswith("task 0") and result.reward is None and not result.done
    result = env.step({"action": "one"})
    assert result.reward == 1.0 and result.observation["info"]["said"] == ["one"]
    assert env.step({"action": "end"}).done
    assert env.state()["episode_id"] == "theirs" and env.state()["step_count"] == 2
    State.model_validate(env.state())
    for wrong in ({"message": "x"}, {"action": 3}):
        try:
            env.step(wrong)
        except RuntimeError as error:
            assert "VALIDATION_ERROR" in str(error), error
        else:
            raise AssertionError(wrong)
"""


def test_the_client_of_openenv_plays_an_episode(server: Server, python: str) -> None:
    theirs(python, THEIR_CLIENT, server.url)
    server.wait_for_live(0)


THEIR_TOOLS = """
import asyncio, sys
from openenv.core.mcp_client import MCPToolClient

async def main():
    async with MCPToolClient(base_url=sys.argv[1], mode="production") as env:
        names = {tool.name for tool in await env.list_tools()}
        assert names == {"begin", "act", "snapshot", "restore", "fork", "discard"}, names
        first = await env.call_tool("begin", task=1, seed=0)
        assert first["observation"]["info"]["task_id"] == "task 1"
        kept = await env.call_tool("snapshot")
        told = await env.call_tool("act", action="one")
        assert told["observation"]["info"]["said"] == ["one"], told
        assert await env.call_tool("restore", snapshot=kept["snapshot"]) == first
        assert await env.call_tool("act", action="one") == told

asyncio.run(main())
"""


def test_the_tool_client_of_openenv_undoes_a_step(server: Server, python: str) -> None:
    theirs(python, THEIR_TOOLS, server.url)
    server.wait_for_live(0)


# Verifiers, whose taskset `openenv` plays on any such server: SANDBOXGYM_VERIFIERS names a python that has it.


def test_verifiers_rolls_out_an_episode(server: Server, tmp_path: Path) -> None:
    chosen = os.environ.get("SANDBOXGYM_VERIFIERS")
    if chosen is None:
        missing("verifiers", "SANDBOXGYM_VERIFIERS names no python with verifiers[openenv] and uv")

    def answer(request: dict[str, Any]) -> bytes:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        parts = [({"role": "assistant", "content": ("one", "two", "end")[min(turn, 2)]}, None), ({}, "stop")]
        head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "stub"}
        chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in parts]
        body = "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"])
        return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{body}".encode()

    config = f"""
        model = "stub"
        push = false
        env.taskset = {{id = "openenv", base_url = "{server.url}", resets = [{{task = 1, seed = 0}}]}}
        env.player = {{harness = {{id = "null"}}, runtime = {{type = "subprocess"}}}}
    """
    with chat_stub(answer) as stub:
        config += f'client = {{base_url = "{stub.url}", api_key_var = "OPENAI_API_KEY"}}'
        (tmp_path / "eval.toml").write_text(config)
        folder = str(Path(chosen).parent)
        env = {**os.environ, "OPENAI_API_KEY": "none", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        env.pop("PYTHONPATH", None)
        command = [f"{folder}/vf-eval", "@", "eval.toml", "-o", "out"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, cwd=tmp_path)
    (traces,) = tmp_path.rglob("traces.jsonl")
    episode = json.loads(traces.read_text())
    assert result.returncode == 0 and episode["ok"], result.stdout[-2000:] + traces.read_text()[:3000]
    assert "openenv_reward 3.00" in result.stdout
    assert "task 1, draw " in stub.requests[0]["messages"][-1]["content"]
    server.wait_for_live(0)


THEIR_SERVER = """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Say(Action):
    word: str

class Heard(Observation):
    words: list[str] = []

class Echo(Environment):
    def __init__(self):
        super().__init__()
        self.words = []

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.words = []
        return Heard()

    def step(self, action, timeout_s=None, **kwargs):
        self.words.append(action.word)
        return Heard(words=self.words, reward=1.0, done=action.word == "end", metadata={"n": len(self.words)})

    @property
    def state(self):
        return State(episode_id="e", step_count=len(self.words))

uvicorn.run(create_app(Echo, Say, Heard), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


def test_our_client_plays_on_a_server_of_openenv(python: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([python, "-c", THEIR_SERVER, str(port)], env=outside, cwd="/")
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            try:
                env = Client(url, timeout=30)
                break
            except ServerError:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.2)
        with env:
            assert env.reset(seed=0).observation["words"] == []
            assert env.send({"word": "one"}).observation["words"] == ["one"]
            last = env.send({"word": "end"})
            assert last.done and last.reward == 1.0 and last.info == {"n": 2}
            assert env.state()["step_count"] == 2
            with refused("VALIDATION_ERROR", "Invalid message: "):
                env.step("one")
            with refused("UNKNOWN_TYPE", "snapshot"):
                env.snapshot()
    finally:
        process.terminate()
        process.wait(120)
