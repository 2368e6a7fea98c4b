"""Messages and requests that a server of the OpenEnv protocol refuses, and connections that break."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served_openenv import (  # noqa: F401 - fixtures
    Server,
    arguments,
    env,
    packages,
    raw,
    refused,
    server,
    serving,
)

from sandboxgym.adapters.openenv import Client
from sandboxgym.brief import brief

# ruff: noqa: F811


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
    assert server.get("/nothing") == (404, {"detail": "Not Found"})
    assert server.get("/step") == (405, {"detail": "Method Not Allowed"})
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
    assert server.get("/health", headers={"Host": "evil.example"}) == (403, {"detail": "foreign origin or host"})
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


def test_garbage_in_a_websocket_is_one_line_in_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, *arguments(tmp_path)) as own:
        for frame, code in ((b"\xff" * 50, "1002"), (b"\x81\x82\0\0\0\0\xff\xfe", "1007")):
            for _ in range(2):
                with raw(own) as connection:
                    own.wait_for_live(1)
                    connection.socket.sendall(frame)
                    with pytest.raises(Exception, match=code):
                        connection.recv(timeout=120)
                own.wait_for_live(0)
        refused = [line for line in own.log.splitlines() if "refused 127.0.0.1: WebSocket: " in line]
        assert [line.split()[0] for line in refused] == ["WARNING", "INFO", "INFO", "INFO"], own.log
        assert "Traceback" not in own.log


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
