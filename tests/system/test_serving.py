"""Clients that are slow, silent or many do not hold up the HTTP servers; time limits are short here."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from components import missing

from sandboxgym.system import refusals
from sandboxgym.system.serving import Patience, make_server

ROOT = Path(__file__).parents[2]
LONG = 60.0


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    if importlib.util.find_spec("uvicorn") is None:
        missing("openenv-server", "the package uvicorn is not installed")


class App:
    """Answers with the length of the body; ``/much`` with more than any buffer holds."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        length, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("as applications do")
            length, more = length + len(message["body"]), message["more_body"]
        content = str(length).encode()
        try:
            if scope["path"] == "/much":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while (await receive_now(receive)) != "http.disconnect":
                    await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
                return
            headers = [(b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})
        finally:
            self.ended.set()


async def receive_now(receive: Any) -> str:
    """The type of the next message, if there is one by now."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            return str((await receive())["type"])
    return ""


@contextlib.contextmanager
def served(app: Any, *, ending: Callable[[], Awaitable[object]] | None = None, **patience: Any) -> Iterator[int]:
    """The port of a server in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    limits = Patience(**{"headers": LONG, "body": LONG, "answer": LONG} | patience)
    server = make_server(
        app,
        refusal=lambda status, said: json.dumps({"code": status, "message": said}).encode(),
        patience=limits,
        open_ended={"/endless"},
        ending=ending,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def client(port: int, sent: bytes = b"") -> Iterator[socket.socket]:
    """A connection that has sent this."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(sent)
        yield connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and content of what is read until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    head, _, content = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


def asked(port: int, sent: bytes) -> tuple[int, bytes]:
    with client(port, sent) as connection:
        return answer(connection)


POST = b"POST /%s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 10\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: "])
def test_headers_that_do_not_come_are_answered_by_408(sent: bytes) -> None:
    with served(App(), headers=0.2) as port:
        status, content = asked(port, sent)
        assert status == 408 and json.loads(content)["code"] == 408 and b"the headers of the request" in content
        assert asked(port, POST % b"" + b"x" * 10) == (200, b"10")


def test_a_later_request_on_the_same_connection_has_the_same_time() -> None:
    with served(App(), headers=0.5) as port, client(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET / HTTP/1.1\r\nHo")
        status, content = answer(connection)
        assert status == 408 and b"the headers of the request" in content


def test_a_body_that_does_not_come_is_answered_by_408_unless_it_has_no_end() -> None:
    app = App()
    with served(app, body=0.2) as port, client(port, POST % b"endless" + b"x") as endless:
        status, content = asked(port, POST % b"" + b"x")
        assert status == 408 and b"the body of the request did not come within 0.2 seconds" in content
        endless.sendall(b"x" * 9)
        assert answer(endless) == (200, b"10")


def test_a_large_body_has_the_time_that_its_size_takes() -> None:
    with served(App(), body=0.2, rate=1) as port, client(port, POST % b"" + b"x" * 9) as connection:
        with pytest.raises(TimeoutError):
            connection.settimeout(0.5)
            connection.recv(1)
        connection.settimeout(30)
        connection.sendall(b"x")
        assert answer(connection) == (200, b"10")


def test_what_is_refused_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"not\nyou", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(refusals, "_REFUSALS", refusals.Refusals())
    caplog.set_level("WARNING")
    with served(refusing, headers=0.2) as port:
        for _ in range(2):
            for sent in (POST % b"here", b"\x00\xff garbage\r\n\r\n", b"G"):
                with contextlib.suppress(IndexError, ConnectionError):  # garbage may get no answer
                    asked(port, sent)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "refused 127.0.0.1: Invalid HTTP request received.: 'Invalid HTTP request received.'",
        "refused 127.0.0.1: status 403: 'POST /here: not\\nyou'",
        "refused 127.0.0.1: status 408: 'the headers of the request did not come within 0.2 seconds'",
    ]


@pytest.mark.parametrize("how", [socket.SHUT_WR, socket.SHUT_RDWR])
def test_a_client_that_leaves_in_the_middle_of_a_request_is_a_line_in_the_log(
    how: int,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "_REFUSALS", refusals.Refusals())
    with served(App()) as port:
        with client(port, POST % b"here" + b"x" * 7) as connection:
            connection.shutdown(how)
            if how == socket.SHUT_WR:
                status, content = answer(connection)
                assert (status, json.loads(content)["code"]) == (400, 400) and b"ended before its body did" in content
        assert asked(port, POST % b"here" + b"x" * 10) == (200, b"10")
    assert [record.getMessage() for record in caplog.records] == [
        "refused 127.0.0.1: cut off: 'it left after 7 bytes of a request'"
    ]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nHost: a\r\n", POST % b"endless" + b"x"])
def test_a_request_that_is_half_closed_before_its_end_is_answered_by_400(sent: bytes) -> None:
    with served(App()) as port:
        with client(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") as connection:  # also a later one
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            status, content = answer(connection)
            assert status == 400 and json.loads(content)["message"].startswith("the request ended before its ")
        with client(port) as silent:
            silent.shutdown(socket.SHUT_WR)
            assert silent.recv(1) == b""
        assert asked(port, POST % b"" + b"x" * 10) == (200, b"10")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01 what begins a connection by TLS\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nno header\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_the_form_of_the_protocol(sent: bytes) -> None:
    with served(App()) as port:
        status, content = asked(port, sent)
        assert (status, json.loads(content)["code"]) == (400, 400)
        assert asked(port, POST % b"" + b"x" * 10) == (200, b"10")


def test_garbage_is_not_answered_in_the_middle_of_an_answer() -> None:
    class Begun(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                await super().__call__(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.ended.set()

    app = Begun()
    with served(app) as port:
        chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
        with client(port, chunked) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.sendall(b"no length\r\n")
            rest = b""
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(65536):
                    rest += part
            assert b"400" not in rest
        assert app.ended.wait(30)


def test_calls_are_answered_in_words_when_the_server_ends() -> None:
    end = asyncio.Event()
    begun = threading.Event()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        begun.set()
        await end.wait()
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"the end."})

    async def ending() -> None:
        end.set()

    with contextlib.ExitStack() as stack:
        with served(waiting, ending=ending) as port:
            connection = stack.enter_context(client(port, GET % b""))
            assert begun.wait(30)
        assert answer(connection) == (503, b"the end.")


def test_requests_that_are_under_way_when_a_server_ends_are_no_errors(capfd: pytest.CaptureFixture[str]) -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await asyncio.Event().wait()

    with contextlib.ExitStack() as stack:
        with served(endless) as port:
            connection = stack.enter_context(client(port, b"GET /here HTTP/1.1\r\nHost: a\r\n\r\n"))
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert "Traceback" not in (said := capfd.readouterr().err), said


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    app = App()
    with served(app, answer=0.2) as port, client(port, b"GET /much HTTP/1.1\r\nHost: a\r\n\r\n"):
        assert app.ended.wait(30)


class Wire:
    """A transport whose client takes nothing by itself."""

    def __init__(self) -> None:
        self.left, self.closing, self.aborted = 0, False, False
        self.protocol: Any = None

    def get_protocol(self) -> Any:
        return self.protocol

    def get_write_buffer_size(self) -> int:
        return self.left

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.left += len(data)
        if self.left > 2**16:
            self.protocol.pause_writing()

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def resume_reading(self) -> None:
        pass


@contextlib.asynccontextmanager
async def wired(app: Any) -> AsyncIterator[tuple[Wire, Callable[[], None]]]:
    """A connection, and what happens each time that `Patience.answer` has passed."""
    server = make_server(app, refusal=lambda status, said: b"", patience=Patience(answer=77.0), ws="none")
    server.config.load()
    protocol = server.config.http_protocol_class(config=server.config, server_state=server.server_state, app_state={})
    pending: list[Callable[[], None]] = []

    def call_later(seconds: float, work: Callable[..., None], *arguments: Any) -> Any:
        if seconds != 77.0:
            return asyncio.get_running_loop().call_later(seconds, work, *arguments)
        pending.append(work)
        return SimpleNamespace(cancel=lambda: pending.remove(work) if work in pending else None)

    def pass_time() -> None:
        due, pending[:] = pending[:], []
        for work in due:
            work()

    wire = Wire()
    wire.protocol = protocol
    protocol.loop = SimpleNamespace(call_later=call_later, create_task=asyncio.create_task)
    protocol.connection_made(wire)
    try:
        yield wire, pass_time
    finally:
        protocol.connection_lost(None)
        assert pending == []


GET = b"GET / HTTP/1.1\r\nHost: a\r\n%s\r\n"


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
def test_a_client_that_takes_nothing_is_cut_off_though_little_is_left(header: bytes) -> None:
    async def play() -> None:
        app = App()
        async with wired(app) as (wire, pass_time):
            wire.protocol.data_received(GET % header)
            await asyncio.gather(*wire.protocol.tasks)
            assert 0 < wire.left < 1000 and wire.closing == bool(header)
            pass_time()
            assert wire.aborted

    asyncio.run(play())


def test_a_client_that_takes_an_answer_slowly_gets_all_of_it() -> None:
    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(10**6), "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    async def play() -> None:
        async with wired(large) as (wire, pass_time):
            wire.protocol.data_received(GET % b"")
            await asyncio.sleep(0)
            while wire.left > 1000:
                wire.left -= 1000
                pass_time()
                assert not wire.aborted
            wire.left = 0
            wire.protocol.resume_writing()
            await asyncio.gather(*wire.protocol.tasks)
            pass_time()
            assert wire.aborted, "the end of it is not taken"

    asyncio.run(play())


def test_connections_beyond_the_bound_are_answered_by_503_and_the_others_go_on() -> None:
    with served(App(), connections=2) as port, client(port, b"G") as first:
        with client(port, POST % b"" + b"x"):
            status, content = asked(port, b"")
            assert status == 503 and b"as many as it takes" in content
            first.sendall(b"ET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert answer(first) == (200, b"0")
        assert asked(port, POST % b"" + b"x" * 10)[0] == 200


def test_no_server_is_made_without_these_limits() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "sandboxgym").rglob("*.py")
        if "uvicorn.Server" in path.read_text()
    }
    assert found == {"sandboxgym/system/serving.py"}
