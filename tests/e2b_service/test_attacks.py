"""Hostile clients and sandboxes of ``sandboxgym serve e2b``: bad requests, broken streams, programs that fight."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b_service.conftest import KEYS, Server

from sandboxgym.e2b import commands as commands_module
from sandboxgym.e2b.commands import Commands
from sandboxgym.e2b.connect import ServiceError
from sandboxgym.e2b.service import MOST_TRANSFERS

PLANE = {"X-API-Key": KEYS[0]}


def envd(box: Any, path: str, data: bytes | str = b"", kind: str = "application/json", **more: str) -> httpx.Response:
    """One request to the daemon of a sandbox."""
    config = box.connection_config
    headers = {**config.sandbox_headers, "Content-Type": kind, **more}
    return httpx.post(box.envd_api_url + path, content=data, headers=headers, timeout=120)


def end_of(answer: httpx.Response) -> dict[str, Any]:
    """Error at the end of a stream."""
    data = answer.content
    while data:
        flags, size = struct.unpack(">BI", data[:5])
        if flags & 2:
            return dict(json.loads(data[5 : 5 + size]))
        data = data[5 + size :]
    raise AssertionError(f"a stream without an end: {answer.content!r}")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "expected JSON"),
        (b"[]", "expected a JSON object"),
        (b"[" * 200_000, "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b'{"timeout": "x"}', "timeout: expected int"),
        (b'{"timeout": true}', "timeout: expected int"),
        (b'{"timeout": -1}', "timeout: expected 0 to"),
        (b'{"timeout": 1e999}', "timeout: expected int"),
        (b'{"templateID": 5}', "templateID: expected str"),
        (b'{"templateID": "a\\u0000b"}', "without null"),
        (b'{"metadata": {"a": 1}}', "metadata.'a': expected text"),
        (b'{"envVars": {"a": "\\ud800"}}', "surrogate"),
        (b'{"volumeMounts": [{"name": "x", "path": "/"}]}', "volumes are not supported"),
    ],
)
def test_malformed_requests_are_refused_in_the_form_of_the_api(server: Server, body: bytes, says: str) -> None:
    answer = httpx.post(f"{server.url}/v2/sandboxes", content=body, headers=PLANE)
    assert answer.status_code == 400 and answer.json()["code"] == 400
    assert says in answer.json()["message"] and len(answer.content) < 1000


def test_wrong_paths_methods_keys_and_sizes_are_refused(server: Server) -> None:
    for method, path, headers, status in (
        ("GET", "/nothing", PLANE, 404),
        ("PUT", "/sandboxes", PLANE, 404),
        ("GET", "/sandboxes/..%2f..%2fetc", PLANE, 404),
        ("GET", "/v2/sandboxes", {}, 401),
        ("GET", "/v2/sandboxes", {"X-API-Key": "e2b_firs"}, 401),
        ("GET", "/v2/sandboxes", {"X-API-Key": b"\xff"}, 401),
        ("GET", "/v2/sandboxes?limit=x", PLANE, 400),
        ("GET", "/v2/sandboxes?startedAfter=x", PLANE, 400),
        ("POST", "/sandboxes/i0/fork", PLANE, 404),
        ("GET", "/files?path=/etc/passwd", {"E2b-Sandbox-Id": "i0"}, 502),
        ("GET", "/files?path=/etc/passwd", {"Host": "49983-i0.e2b.app"}, 502),
    ):
        answer = httpx.request(method, server.url + path, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (status, status), (method, path)
    assert httpx.post(f"{server.url}/sandboxes", content=b"x" * (2**20 + 1), headers=PLANE).status_code == 413


def test_a_sandbox_is_not_used_without_its_token(box: Any) -> None:
    for token in ("", box.sandbox_id, "0" * 40):
        for path in ("/process.Process/List", "/filesystem.Filesystem/Stat"):
            assert envd(box, path, "{}", **{"X-Access-Token": token}).status_code == 401
        headers = {"E2b-Sandbox-Id": box.sandbox_id, "X-Access-Token": token}
        assert httpx.get(f"{box.envd_api_url}/files?path=/etc/passwd", headers=headers).status_code == 401
    assert envd(box, "/process.Process/List", "{}", **{"E2b-Sandbox-Port": "22"}).status_code == 502


def test_a_wrong_signature_wakes_up_no_paused_sandbox(e2b: Any, service: Server) -> None:
    box = e2b.Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.pause()
    for method in ("GET", "POST", "DELETE"):
        headers = {"E2b-Sandbox-Id": box.sandbox_id}
        answer = httpx.request(method, f"{service.url}/files?path=a&signature=v1_x", headers=headers)
        assert answer.status_code == 401
    assert box.get_info().state.value == "paused"


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (b"{", "application/json", "expected JSON"),
        (b'{"path": 1}', "application/json", "path: expected a value of type string"),
        (b'{"path": "a\\u0000b"}', "application/json", "expected a path"),
        (b'{"path": "' + b"a" * 5000 + b'"}', "application/json", "expected a path"),
        (b"\x0a\xff\xff\xff\xff\x0f", "application/proto", "more bytes"),
        (b"\x0a\x02\xff\xfe", "application/proto", "expected UTF-8"),
        (b"\xff" * 20, "application/proto", "integer"),
    ],
)
def test_malformed_calls_are_refused_in_the_form_of_connect(box: Any, data: bytes, kind: str, says: str) -> None:
    answer = envd(box, "/filesystem.Filesystem/Stat", data, kind)
    assert answer.status_code == 400 and answer.json()["code"] == "invalid_argument"
    assert says in answer.json()["message"] and len(answer.content) < 1000


def test_malformed_streams_are_refused_at_their_end(box: Any) -> None:
    start = "/process.Process/Start"
    for data, code in (
        (b"", "invalid_argument"),
        (b"\0\0", "invalid_argument"),
        (b"\0\0\0\0\x02{", "invalid_argument"),
        (b"\x01\0\0\0\x02{}", "invalid_argument"),
        (b"\0\xff\xff\xff\xff", "resource_exhausted"),
        (b"\0\0\0\0\x02{}", "invalid_argument"),
        (_envelope({"process": {"cmd": "x", "envs": {"A=B": "c"}}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "x", "envs": {"-S": "c"}}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "x", "args": ["\0"]}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "x"}, "pty": {}}), "unimplemented"),
    ):
        assert end_of(envd(box, start, data, "application/connect+json"))["error"]["code"] == code, data
    assert envd(box, start, b"", "text/plain").status_code == 415
    assert envd(box, "/process.Process/Nothing", b"{}").status_code == 404
    late = envd(box, start, _envelope({}), "application/connect+json", **{"Connect-Timeout-Ms": "-5"})
    assert end_of(late)["error"]["code"] == "invalid_argument"
    assert envd(box, "/process.Process/List", b"x" * (4 * 2**20 + 1)).json()["code"] == "resource_exhausted"
    assert box.commands.list() == []


def test_clients_of_another_version_are_refused_in_the_form_of_connect(e2b: Any, box: Any) -> None:
    run = _envelope({"process": {"cmd": "/bin/sh", "args": ["-c", "sleep 1000"]}})
    for version in ("2", "", "x" * 1000):
        head = {"Connect-Protocol-Version": version}
        ended = end_of(envd(box, "/process.Process/Start", run, "application/connect+json", **head))["error"]
        refused = envd(box, "/filesystem.Filesystem/Stat", b'{"path": "/"}', **head)
        assert refused.status_code == 400 and len(refused.content) < 1000
        for error in (ended, refused.json()):
            assert error["code"] == "invalid_argument" and "expected version 1 of the protocol" in error["message"]
    assert box.commands.list() == []
    spoken = {"Connect-Protocol-Version": "1"}
    assert envd(box, "/filesystem.Filesystem/Stat", b'{"path": "/"}', **spoken).status_code == 200


def _envelope(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(data)) + data


def test_clients_that_speak_protobuf_are_served(box: Any) -> None:
    answer = envd(box, "/filesystem.Filesystem/Stat", b"\x0a\x04/tmp", "application/proto")
    assert answer.headers["content-type"] == "application/proto" and b"\x0a\x03tmp\x10\x02" in answer.content
    config = b"\x0a\x07" + b"/bin/sh" + b"\x12\x02-c\x12\x06echo x"
    request = b"\x0a" + bytes([len(config)]) + config
    answer = envd(
        box, "/process.Process/Start", struct.pack(">BI", 0, len(request)) + request, "application/connect+proto"
    )
    assert b"\x0a\x02x\n" in answer.content and end_of(answer) == {}


def test_huge_and_broken_uploads_are_refused(box: Any) -> None:
    bomb = zlib.compressobj(9, wbits=31)
    zipped = b"".join(bomb.compress(bytes(2**20)) for _ in range(70)) + bomb.flush()
    octets = "application/octet-stream"
    for data, kind, more, status in (
        (zipped, octets, {"Content-Encoding": "gzip"}, 413),
        (zipped[:100], octets, {"Content-Encoding": "gzip"}, 400),
        (b"no gzip", octets, {"Content-Encoding": "gzip"}, 400),
        (b"x", octets, {"Content-Encoding": "br"}, 400),
        (b"x", "text/plain", {}, 400),
        (b"x", "multipart/form-data", {}, 400),
        (b"x", "multipart/form-data; boundary=b", {}, 400),
        (b"--b\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b", {}, 400),
    ):
        answer = envd(box, "/files?path=up", data, kind, **more)
        assert answer.status_code == status, (data[:20], kind, answer.text)
        assert answer.json()["code"] == status
    assert not box.files.exists("up")


@pytest.mark.slow
@pytest.mark.slow
def test_many_uploads_at_one_time_are_not_all_in_memory(box: Any, service: Server) -> None:
    def memory() -> int:
        status = Path(f"/proc/{service.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) >> 10

    config, size, before = box.connection_config, 16 * 2**20, memory()
    headers = {**config.sandbox_headers, "Content-Type": "application/octet-stream"}

    async def upload(client: httpx.AsyncClient, number: int) -> int:
        url = f"{box.envd_api_url}/files?path=/tmp/file{number % 2}"
        return (await client.post(url, content=bytes(size), headers=headers)).status_code

    async def play() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            return await asyncio.gather(*(upload(client, number) for number in range(24)))

    assert asyncio.run(play()) == [200] * 24
    assert memory() - before < 2 * MOST_TRANSFERS * size >> 20
    assert box.files.get_info("/tmp/file1").size == size


def test_clients_that_go_leave_nothing_waiting(box: Any, service: Server) -> None:
    address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    lines = [f"{name}: {value}" for name, value in box.connection_config.sandbox_headers.items()]
    head = ["POST /process.Process/Start HTTP/1.1", "Host: localhost", *lines, "Content-Type: application/connect+json"]
    body = _envelope({"process": {"cmd": "/bin/bash", "args": ["-c", "yes"]}})
    open_ones = []
    for length, sent in ((len(body), body), (len(body) + 9, body), (100, b"\0\0"), (100, b"")):
        one = socket.create_connection(address)
        one.sendall("\r\n".join([*head, f"Content-Length: {length}", "", ""]).encode() + sent)
        one.shutdown(socket.SHUT_WR)  # half of it: it could still read, and does not
        open_ones.append(one)
    time.sleep(1)
    assert box.commands.run("echo alive").stdout == "alive\n"
    for one in open_ones:
        one.close()
    for info in box.commands.list():
        assert info.args[-1] == "yes" and box.commands.kill(info.pid)
    assert box.commands.list() == []


@pytest.mark.slow
def test_what_clients_that_have_gone_wanted_to_write_is_given_up(box: Any, service: Server) -> None:
    address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    lines = [f"{name}: {value}" for name, value in box.connection_config.sandbox_headers.items()]
    reader = box.commands.run(
        "until [[ -e /tmp/go ]]; do sleep 0.1; done; timeout 2 cat | wc -c", background=True, stdin=True
    )
    process, data = {"process": {"pid": reader.pid}}, {"input": {"stdin": "eHh4" * 250_000}}
    for path, kind, body in (
        ("SendInput", "application/json", json.dumps({**process, **data}).encode()),
        ("StreamInput", "application/connect+json", _envelope({"start": process}) + _envelope({"data": data})),
    ):
        head = [f"POST /process.Process/{path} HTTP/1.1", "Host: localhost", *lines, f"Content-Type: {kind}"]
        for length in (len(body), len(body) + 9):
            with socket.create_connection(address) as one:
                one.sendall("\r\n".join([*head, f"Content-Length: {length}", "", ""]).encode() + body)
                time.sleep(0.5)
    box.files.write("/tmp/go", "")
    assert int(reader.wait().stdout) <= 2**16, "more than a pipe holds"


def test_no_more_clients_write_than_a_sandbox_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands_module, "MOST_WRITERS", 2)

    def full_pipe(path: str, *, write: bool) -> int:
        return os.dup(full[1])

    async def play() -> None:
        commands = Commands(full_pipe)
        command = commands.new({"cmd": "sleep"}, tag=None, takes_input=True)
        waiting = [asyncio.create_task(commands.write(command, b"x")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="at most 2 clients that write"):
            await commands.write(command, b"x")
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        os.read(full[0], 2**16)
        await commands.write(command, b"x")

    full = os.pipe2(os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(full[1], bytes(2**12))
        asyncio.run(play())
    finally:
        for descriptor in full:
            os.close(descriptor)


@pytest.mark.slow
def test_programs_that_fight_their_own_sandbox_harm_no_other(e2b: Any, box: Any) -> None:
    other = e2b.Sandbox.create(timeout=60)
    fights = (
        "kill -9 -1",
        "rm -rf /var/lib/e2b",
        "mkdir -p /var/lib/e2b; cd /var/lib/e2b; for i in 1 2 3 4 5 6 7 8 9; do mkdir -p $i; touch $i/tell; done",
        "for f in /var/lib/e2b/*/tell; do echo 'start 1 1' > $f; echo 'end 99999999999' > $f; done",
        "chmod 000 /var/lib /var/lib/e2b; rm -rf /home /tmp",
    )
    for fight in fights:
        began = time.monotonic()
        try:
            box.commands.run(fight, timeout=10)
        except e2b.SandboxException as error:
            assert "server failed" not in str(error)
        assert time.monotonic() - began < 120
        assert other.commands.run("echo fine").stdout == "fine\n"
    box.kill()
    assert not box.is_running()


@pytest.mark.slow
def test_what_programs_write_into_the_pipe_of_the_subshell_is_not_kept() -> None:
    commands = Commands(lambda path, **options: 0)
    command = commands.new({"cmd": "sh"}, tag=None, takes_input=False)
    for _ in range(1000):
        commands._told(command, b"x" * 200)
    assert len(command.told) <= 400
    commands._told(command, b"\nstart 7 0\n")
    assert command.pid == 7


def test_a_pipe_that_programs_have_filled_costs_no_descriptor() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    opened: list[int] = []

    def open_pipe(path: str, **options: Any) -> int:
        opened.append(os.dup(writing))
        return opened[-1]

    commands = Commands(open_pipe)
    command = commands.new({"cmd": "sh"}, tag=None, takes_input=False)
    commands._told(command, b"end 0\n")
    assert command.ended.is_set() and len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    os.close(reading)
    os.close(writing)


def test_a_command_that_prints_faster_than_it_is_read_waits(e2b: Any, box: Any) -> None:
    handle = box.commands.run("yes", background=True)
    time.sleep(1)
    assert box.commands.run("echo beside").stdout == "beside\n"
    assert box.commands.kill(handle.pid)
    with pytest.raises(e2b.CommandExitException) as ended:
        handle.wait()
    assert len(ended.value.stdout) < 64 * 2**20


def test_too_many_requests_are_told_when_to_come_again(e2b: Any) -> None:
    from sandboxgym.e2b.app import make_app
    from sandboxgym.e2b.quotas import Quotas, Rate, RequestRefused
    from sandboxgym.e2b.service import Service

    async def ask() -> list[httpx.Response]:
        service = Service({"base": "host"}, None, quotas=Quotas(requests=0.1))
        transport = httpx.ASGITransport(make_app(service, local_only=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1") as client:
            return [await client.get("/v2/sandboxes") for _ in range(2)]

    first, second = asyncio.run(ask())
    assert (first.status_code, second.status_code) == (200, 429)
    assert second.json()["code"] == 429 and 1 <= int(second.headers["retry-after"]) <= 10
    rate = Rate(5)
    rate.take(50)
    with pytest.raises(RequestRefused, match="rate limit of 5 per second") as refused:
        rate.take(20)
    assert refused.value.retry is not None and 3 < refused.value.retry <= 4
