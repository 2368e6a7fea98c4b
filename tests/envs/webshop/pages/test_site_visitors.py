"""The shop's site with visitors of every kind, over raw connections: malformed, slow, many, and gone too early."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from little_shop import shop_in, write

from sandboxgym.envs.webshop.shop import Shop
from sandboxgym.envs.webshop.shop_state import ShopPage, ShopState
from sandboxgym.envs.webshop.site import connections, server, sessions
from sandboxgym.envs.webshop.site.messages import MOST_FIELDS, MOST_FORM, MOST_LINE, Refused, parse
from sandboxgym.envs.webshop.site.server import Server, Site
from sandboxgym.envs.webshop.site.sessions import Sessions

SECONDS = 120.0
"""After which a test gives up; nothing here takes a hundredth of it."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return shop_in(write(tmp_path_factory.mktemp("little")))


@pytest.fixture(scope="module")
def running(shop: Shop) -> Iterator[Server]:
    with Server(Site(shop)) as running:
        yield running


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing that a visitor sends is worth a warning, or anything on standard error."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert capfd.readouterr().err == ""


def connect(site: Server, source: str = "127.0.0.1") -> socket.socket:
    if source != "127.0.0.1" and sys.platform != "linux":
        pytest.skip("only Linux has all of 127.0.0.0/8 as addresses of its own")
    return socket.create_connection(("127.0.0.1", site.port), SECONDS, (source, 0))


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def tell(site: Server, request: bytes, source: str = "127.0.0.1") -> bytes:
    """The answers to what is sent, up to the end of the connection."""
    with connect(site, source) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        return received(connection)


def status(answer: bytes) -> int:
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def get(path: str = "/", *fields: str, host: str = "localhost", version: str = "1.1") -> bytes:
    lines = [f"GET {path} HTTP/{version}", f"Host: {host}", "Connection: close", *fields]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


def post(body: bytes = b"", *fields: str) -> bytes:
    lines = ["POST /s/nobody HTTP/1.1", "Host: localhost", "Connection: close", *fields]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n" + body


def visitors() -> int:
    return sum(thread.name == "webshop-visitor" for thread in threading.enumerate())


def until_nobody_is_served() -> None:
    end = time.monotonic() + SECONDS
    while visitors() and time.monotonic() < end:
        time.sleep(0.01)
    assert not visitors()


HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
MALFORMED = {
    "a length of 5,000 digits": (post(b"", "Content-Length: " + "9" * 5000), {413}),
    "a length of 5,000 zeros": (post(b"", "Content-Length: " + "0" * 5000), {404}),
    "a length that is too much": (post(b"", f"Content-Length: {MOST_FORM + 1}"), {413}),
    "a negative length": (post(b"", "Content-Length: -1"), {400}),
    "a length with a sign": (post(b"x", "Content-Length: +1"), {400}),
    "a length that is no number": (post(b"", "Content-Length: ten"), {400}),
    "a length in other digits": (post(b"", "Content-Length: \xb2"), {400}),
    "an empty length": (post(b"", "Content-Length: "), {400}),
    "two lengths": (post(b"xx", "Content-Length: 1", "Content-Length: 2"), {400}),
    "two lengths in one": (post(b"xx", "Content-Length: 1, 2"), {400}),
    "the same length twice": (post(b"xx", "Content-Length: 2", "Content-Length: 2"), {404}),
    "no length": (post(), {404}),
    "a length that is not reached": (post(b"abc", "Content-Length: 10"), {0, 408}),
    "a length of less than is sent": (post(b"abc", "Content-Length: 1"), {404}),
    "chunks": (post(b"0\r\n\r\n", "Transfer-Encoding: chunked"), {411}),
    "chunks and a length": (post(b"0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5"), {411}),
    "a body with GET": (get("/", "Content-Length: 3") + b"abc", {200}),
    "an expectation": (post(b"abc", "Content-Length: 3", "Expect: 100-continue"), {100}),
    "another expectation": (post(b"abc", "Content-Length: 3", "Expect: the unexpected"), {417}),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", {400}),
    "two hosts": (HEAD + b"Host: localhost\r\n\r\n", {400}),
    "an empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", {400}),
    "a host of odd characters": (get(host="local<host>"), {400}),
    "a very long host": (get(host="a" * 20_000), {421}),
    "HTTP/1.0 without a host": (b"GET / HTTP/1.0\r\n\r\n", {200}),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: localhost\nConnection: close\n\n", {200}),
    "empty lines before": (b"\r\n\r\n" + get(), {200}),
    "HTTP/0.9": (b"GET /\r\n\r\n", {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {505}),
    "another version": (get(version="9.9"), {505}),
    "no HTTP at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400}),
    "zeros": (bytes(100) + b"\r\n\r\n", {400}),
    "another method": (get().replace(b"GET", b"DELETE"), {501}),
    "a whole URL": (get("http://evil.example/"), {400}),
    "a star": (get("*"), {400}),
    "a space in the path": (get("/a b"), {400}),
    "a control character in the path": (get("/a\x01b"), {400}),
    "other bytes in the path": (get("/\xff\xfe"), {404}),
    "escapes of no text": (get("/s/%ff%00%0d%0a/results?q=%00&page=1"), {404}),
    "a line feed for another field": (get("/start?goal=0%0d%0aSet-Cookie:x"), {404}),
    "a field without a name": (HEAD + b": x\r\n\r\n", {400}),
    "a field with a space before the colon": (HEAD + b"A : x\r\n\r\n", {400}),
    "a folded field": (HEAD + b"A: x\r\n y\r\n\r\n", {400}),
    "a carriage return in a field": (HEAD + b"A: x\ry\r\n\r\n", {400}),
    "a zero in a field": (HEAD + b"A: x\0y\r\n\r\n", {400}),
    "101 fields": (HEAD + b"A: x\r\n" * 101 + b"\r\n", {431}),
    "long fields": (HEAD + b"A: " + b"x" * (MOST_FIELDS + 1) + b"\r\n\r\n", {431}),
    "fields without an end": (HEAD + b"A: x\r\n" * 40_000, {431}),
    "a long line": (b"GET /" + b"x" * MOST_LINE + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", {414}),
    "a line without an end": (b"G" * (MOST_LINE + 100_000), {414}),
    "nothing": (b"", {0}),
    "empty lines": (b"\r\n" * 1000, {0}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_answered_with_a_status(what: str, running: Server) -> None:
    request, expected = MALFORMED[what]
    answer = tell(running, request)
    assert status(answer) in expected, answer[:300]
    if status(answer) >= 400:
        assert b'class="error"' in answer and b"Connection: close" in answer and b"Traceback" not in answer


def test_a_word_is_sent_to_who_waits_for_it_before_a_form(running: Server) -> None:
    with connect(running) as connection:
        connection.sendall(post(b"", "Content-Length: 3", "Expect: 100-continue"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        assert status(received(connection)) == 404


def test_requests_that_come_at_once_are_answered_in_turn(running: Server) -> None:
    """A form is read to its end, so that nothing in it is taken for a request."""
    hidden = b"GET /style.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
    form = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(hidden), hidden)
    answers = tell(running, form + form + get())
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"404", b"404", b"200"]


PIECES = st.sampled_from(
    [
        *(request for request, _ in MALFORMED.values() if len(request) < 2000),
        b"GET / HTTP/1.1\r\n",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Host: localhost\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b": ",
        b"%",
        b" HTTP/1.1",
    ]
)


def check_parsed(head: bytes) -> None:
    try:
        request = parse(head)
    except Refused as refused:
        assert 400 <= refused.response.status < 600 and refused.response.body
    else:
        assert request.target.startswith("/") and 0 <= request.length <= MOST_FORM
        assert request.method in ("GET", "HEAD", "POST")


@given(st.lists(st.one_of(PIECES, st.binary(max_size=40)), max_size=8).map(b"".join))
@settings(deadline=None)
def test_any_bytes_are_a_request_or_are_refused(head: bytes) -> None:
    check_parsed(head)


@given(
    st.lists(st.one_of(PIECES, st.binary(max_size=40)), max_size=8).map(b"".join),
    st.integers(0, 2000),
    st.binary(max_size=3),
)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_is_answered_in_http_or_not_at_all(
    running: Server, sent: bytes, place: int, other: bytes
) -> None:
    """Pieces of requests in any order, then bytes of one replaced: each answer has a status line and its length."""
    whole = bytearray(sent or get("/start"))
    whole[place % len(whole) : place % len(whole) + len(other)] = other
    answer = tell(running, bytes(whole))
    while answer:
        found = re.match(rb"HTTP/1\.1 (\d{3}) [A-Za-z' -]+\r\n((?:[A-Za-z-]+: [^\r\n]*\r\n)*)\r\n", answer)
        assert found, answer[:300]
        assert int(found[1]) < 500 or int(found[1]) in (501, 505)
        length = re.search(rb"Content-Length: (\d+)", found[2])
        answer = answer[found.end() + (int(length[1]) if length else 0) :]
    assert status(tell(running, get())) == 200


def test_visitors_may_hang_up_at_any_point(running: Server) -> None:
    """After each byte of a request, with a goodbye or without (a reset), and before the answer is taken."""
    request = post(b"0123456789", "Content-Length: 10")
    for end in (*range(0, len(request), 7), len(request)):
        for abrupt in (False, True):
            connection = connect(running)
            if abrupt:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(request[:end])
            connection.close()
    assert status(tell(running, get())) == 200
    until_nobody_is_served()


@pytest.mark.parametrize("at", ["line", "fields", "form", "nothing"])
def test_a_request_has_to_be_there_in_time_however_it_trickles(
    at: str, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    head = {"line": b"GET /", "fields": HEAD + b"A: ", "form": post(b"", "Content-Length: 9999"), "nothing": b""}[at]
    with Server(Site(shop)) as running, connect(running) as connection:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
            while time.monotonic() < began + SECONDS:
                connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    answer = connection.recv(1 << 16)
                    break
                if at != "nothing":
                    connection.sendall(b"x")
        assert status(answer) == (408 if at != "nothing" else 0)
        assert time.monotonic() < began + SECONDS
    until_nobody_is_served()


def test_who_does_not_take_the_answers_is_hung_up_on(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.2)
    with Server(Site(shop)) as running, connect(running) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.05)
        many = get("/style.css").replace(b"Connection: close\r\n", b"") * 100
        end = time.monotonic() + SECONDS
        with pytest.raises(ConnectionError):  # it went on without reading a byte, until it was closed
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    connection.sendall(many)
    until_nobody_is_served()


def occupy(running: Server, source: str, number: int) -> list[socket.socket]:
    """So many connections in the middle of a request."""
    busy = sum(connection.idle is None for connection in list(running._http._open))
    held = [connect(running, source) for _ in range(number)]
    for connection in held:
        connection.sendall(b"GET /")
    wait_for_busy(running, busy + number)
    return held


def test_one_address_cannot_hold_all_connections(shop: Shop) -> None:
    with Server(Site(shop), connections=6, connections_per_visitor=3) as running:
        held = occupy(running, "127.0.0.2", 3)
        assert status(tell(running, get(), "127.0.0.2")) in (429, 0)  # 0: the refusal met what was still being sent
        assert status(tell(running, get(), "127.0.0.1")) == 200
        held[0].close()
        end = time.monotonic() + SECONDS
        while status(tell(running, get(), "127.0.0.2")) != 200:  # as soon as it was noticed
            assert time.monotonic() < end
        for connection in held:
            connection.close()
    until_nobody_is_served()


def test_who_has_most_connections_gives_way(shop: Shop) -> None:
    """Few addresses that hold all of them do not lock out the others."""
    with Server(Site(shop), connections=6, connections_per_visitor=3) as running:
        held = [*occupy(running, "127.0.0.2", 3), *occupy(running, "127.0.0.3", 3)]
        assert status(tell(running, get(), "127.0.0.1")) == 200
        ended = [connection for connection in held if is_closed(connection)]
        assert ended == [held[0]]
        for connection in held:
            connection.close()
    with Server(Site(shop), connections=3) as running:
        held = [connection for last in (2, 3, 4) for connection in occupy(running, f"127.0.0.{last}", 1)]
        assert status(tell(running, get(), "127.0.0.1")) in (503, 0)
        assert not any(map(is_closed, held))
        for connection in held:
            connection.close()
    until_nobody_is_served()


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_a_refusal_says_so(shop: Shop) -> None:
    with Server(Site(shop), connections_per_visitor=1) as running, connect(running) as held:
        held.sendall(b"GET /")
        wait_for_busy(running, 1)
        with connect(running) as connection:  # sends nothing, so that nothing can take the answer back
            answer = received(connection)
        assert status(answer) == 429 and b"too many connections" in answer


def wait_for_busy(running: Server, number: int, *, most: bool = False) -> None:
    """Wait until at least (or at most) so many connections are in the middle of a request."""
    end = time.monotonic() + SECONDS
    while (busy := sum(connection.idle is None for connection in list(running._http._open))) != number:
        if (busy < number) == most:
            return
        assert time.monotonic() < end
        time.sleep(0.005)


def test_idle_connections_end_for_new_ones(shop: Shop) -> None:
    with Server(Site(shop), connections=4, connections_per_visitor=2) as running:
        kept = [connect(running) for _ in range(2)]
        for connection in kept:
            connection.sendall(HEAD + b"\r\n")
            assert status(connection.recv(1 << 16)) == 200
        for _ in range(5):
            wait_for_busy(running, 0, most=True)  # a client has its answer before the server is done with it
            assert status(tell(running, get())) == 200
        assert received(kept[0]).count(b"HTTP/1.1") <= 1  # what was left of its answer, and the end
        for connection in kept:
            connection.close()


def test_closing_hangs_up_on_everybody(shop: Shop) -> None:
    with Server(Site(shop)) as running:
        held = [connect(running) for _ in range(3)]
        held[0].sendall(b"GET /")
        held[1].sendall(HEAD + b"\r\n")
        assert status(held[1].recv(1 << 16)) == 200
    until_nobody_is_served()
    for connection in held:
        received(connection)
        connection.close()


@pytest.mark.parametrize(
    ("host", "served"),
    {
        "localhost": True,
        "LOCALHOST.": True,
        "localhost:3000": True,
        "127.0.0.1": True,
        "[::1]": True,
        "[::ffff:127.0.0.1]:80": True,
        "evil.example": False,
        "127.0.0.1.evil.example": False,
        "localhost.evil.example:3000": False,
        "evil-localhost": False,
        "10.0.0.1": False,
        "shop.example": False,
    }.items(),
)
def test_the_site_answers_to_its_own_names_only(host: str, served: bool, running: Server) -> None:
    """A page of evil.example that lets its name point here is not shown what the visitor could see."""
    answer = tell(running, get("/start?goal=0", host=host))
    assert status(answer) == (303 if served else 421)
    assert served or (host.partition(":")[0].encode() in answer and b"Location" not in answer)


def test_other_names_can_be_given(shop: Shop) -> None:
    with Server(Site(shop), names=["Shop.example", "2001:db8::1"]) as running:
        for host in ("shop.example", "SHOP.EXAMPLE:80", "[2001:db8:0::1]:3000", "localhost"):
            assert status(tell(running, get(host=host))) == 200
        assert status(tell(running, get(host="other.example"))) == 421


def test_the_address_that_was_reached_is_a_name(shop: Shop) -> None:
    """So that a site on all interfaces answers to each of them."""
    with Server(Site(shop), host="0.0.0.0") as running:
        with socket.create_connection(("127.0.0.5", running.port), SECONDS) as connection:
            connection.sendall(get(host=f"127.0.0.5:{running.port}"))
            assert status(received(connection)) == 200
        assert status(tell(running, get(host="127.0.0.6"))) == 421


def test_answers_do_not_say_what_made_them(running: Server) -> None:
    for request in (get(), get("/nowhere"), b"\0\r\n\r\n", post(b"", "Content-Length: -1")):
        head = tell(running, request).partition(b"\r\n\r\n")[0]
        assert status(head) and b"\r\nServer:" not in head
        assert b"python" not in head.lower() and sys.version.split()[0].encode() not in head


# Visits.


def test_one_address_cannot_end_the_visits_of_others(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_SESSIONS", 40)
    site = Site(shop)
    own = site.open(shop.start(0))
    with Server(site) as running:

        def start(source: str) -> str:
            found = re.search(rb"Location: (\S+)", tell(running, get("/start"), source))
            assert found
            return found[1].decode()

        visits = [start(f"127.0.0.{number}") for number in range(3, 9)]
        flood = [start("127.0.0.2") for _ in range(100)]
        for path in visits:
            assert status(tell(running, get(path), "127.0.0.77")) == 200, "moved to another address, as phones do"
        answers = [status(tell(running, get(path), "127.0.0.2")) for path in flood]
    assert answers == [404] * 67 + [200] * 33
    assert site.session(own) == shop.start(0)


def test_who_has_most_gives_way() -> None:
    table = Sessions()
    for number in range(4):
        table.put(f"a{number}", ShopState(number), "a", most=6)
    for number in range(4):
        table.put(f"b{number}", ShopState(number), "b", most=6)
    assert [sid for sid in ("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3") if table.get(sid)] == [
        *("a1", "a2", "a3"),
        *("b1", "b2", "b3"),
    ]
    table.put("a1", ShopState(9), "b", most=6)  # is used, and stays whose it was
    table.put("c0", ShopState(0), "c", most=6)
    table.put("c1", ShopState(1), "c", most=6)
    assert len(table) == 6 and table.get("a1") and not table.get("a2")


def test_a_holder_is_bounded_and_the_owner_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_PER_HOLDER", 3)
    table = Sessions()
    for number in range(9):
        table.put(f"a{number}", ShopState(0), "a", most=100)
        table.put(f"o{number}", ShopState(0), most=100)
    assert sum(table.get(f"a{number}") is not None for number in range(9)) == 3
    assert sum(table.get(f"o{number}") is not None for number in range(9)) == 9


def test_very_long_keywords_count_as_more_than_one_visit() -> None:
    table = Sessions()
    long = ShopState(0, replace(ShopPage(), page="results", query="x" * 50_000, number=1))
    for number in range(1000):
        table.put(f"a{number}", long, "a", most=10_000)
    assert 10 < len(table) <= 20


def test_the_table_forgets_what_goes() -> None:
    """After any number of changes it holds what a list of them says, and weighs nothing when all are gone."""
    rng, table = random.Random(0), Sessions()
    for _ in range(3000):
        sid = f"s{rng.randrange(60)}"
        if rng.random() < 0.3:
            table.pop(sid)
        else:
            table.put(sid, ShopState(rng.randrange(9)), f"h{rng.randrange(5)}", most=30)
        assert len(table) == sum(table._weights.values()) == table._total <= 30
    for number in range(60):
        table.pop(f"s{number}")
    assert not (len(table) or table._weights or table._tables or table._total)


# As a process.


def test_the_command_says_nothing_of_bad_visitors_and_answers_to_names(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandboxgym", "serve", "webshop", "--port", "0", "--name", "shop.example"]
    root = Path(__file__).parents[4]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split(" (Ctrl-C")[0].rpartition(":")[2])

        def ask(request: bytes, *, leave: bool = False) -> int:
            with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
                if leave:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(request)
                return 0 if leave else status(received(connection))

        assert ask(MALFORMED["a length of 5,000 digits"][0]) == 413
        for end in range(0, 100, 10):
            ask(get("/start")[:end], leave=True)
        assert ask(get(host="shop.example")) == 200 and ask(get(host="evil.example")) == 421
    finally:
        process.kill()
        assert process.communicate()[1] == ""
