"""The plain client of chat endpoints, against a server on a real socket that misbehaves."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
from chat_stub import chat_stub, completion

from sandboxgym.adapters.chat import Aborted, ChatClient, ContextFull, EndpointError

ASKED = [{"role": "user", "content": "Hello."}]
GOOD = ("hello", [-0.1, -0.2], [])


def client(url: str, **more: Any) -> ChatClient:
    return ChatClient(url, "m", **{"pause": 0.01, "retries": 3, "timeout": 20.0, **more})


def replies(*given: Any) -> Any:
    """Answer with one after the other, the last one for ever."""
    left = list(given)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def test_an_answer_has_text_tokens_and_what_was_asked():
    with chat_stub(replies(GOOD)) as stub:
        asking = client(stub.url, options={"temperature": 0.0, "max_tokens": None, "top_p": 0.5})
        answer = asking.complete(ASKED, seed=3)
    assert (answer.content, answer.tokens_in, answer.tokens_out, answer.finish) == ("hello", 7, 2, "stop")
    assert (answer.model, answer.attempts, asking.answered) == ("stub", 1, 1)
    assert stub.requests == [{"model": "m", "messages": ASKED, "seed": 3, "temperature": 0.0, "top_p": 0.5}]


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {"error": {"message": "slow down"}}),
        (500, {"error": "broken"}),
        (503, {}),
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nnot json!",
        b'HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"choices": [',
        b"this is no HTTP\r\n\r\n",
        (200, {"choices": []}),
        (200, {"choices": [{"message": {"content": 5}}]}),
        (200, [1, 2]),
        (200, None),
    ],
    ids=["429", "500", "503", "reset", "no json", "half", "no http", "no choice", "number", "list", "null"],
)
def test_what_may_pass_is_asked_again(trouble):
    with chat_stub(replies(trouble, trouble, GOOD)) as stub:
        answer = client(stub.url).complete(ASKED, seed=0)
    assert (answer.content, answer.attempts, len(stub.requests)) == ("hello", 3, 3)


def test_what_does_not_pass_is_an_error_that_says_what_came():
    said = r"answered 500: no GPU \(asked 3 times\)"
    broken = replies((500, {"error": {"message": "no\nGPU"}}))
    with chat_stub(broken) as stub, pytest.raises(EndpointError, match=said) as raised:
        client(stub.url, retries=2).complete(ASKED, seed=0)
    assert (len(stub.requests), raised.value.hopeless, raised.value.attempts) == (3, False, 3)


def test_a_page_for_people_is_told_in_its_words():
    page = b"<!DOCTYPE HTML><html><title>Nothing</title> <p>No such\npage.</p></html>"
    reply = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page)
    with chat_stub(replies(reply)) as stub, pytest.raises(EndpointError, match=r"answered 404: Nothing No such page\."):
        client(stub.url).complete(ASKED, seed=0)


@pytest.mark.parametrize(("status", "hopeless"), [(401, True), (403, True), (404, True), (400, False), (422, False)])
def test_what_would_be_refused_again_is_asked_once(status, hopeless):
    refused = replies((status, {"error": {"message": "The model `m` does not exist."}}))
    with chat_stub(refused) as stub, pytest.raises(EndpointError, match="does not exist") as raised:
        client(stub.url).complete(ASKED, seed=0)
    assert (len(stub.requests), raised.value.hopeless) == (1, hopeless)


def test_a_conversation_that_is_too_long_is_told_from_other_refusals():
    told = {"error": {"message": "This model's maximum context length is 10 tokens.", "code": 400}}
    with chat_stub(replies((400, told))) as stub, pytest.raises(ContextFull):
        client(stub.url).complete(ASKED, seed=0)


def test_an_answer_without_text_or_counts_is_an_empty_one():
    content = completion("", [], [])
    del content["usage"]
    content["choices"][0]["message"]["content"] = None
    with chat_stub(replies((200, content))) as stub:
        answer = client(stub.url).complete(ASKED, seed=0)
    assert (answer.content, answer.tokens_in, answer.tokens_out) == ("", None, None)


def test_a_late_answer_is_given_up():
    free = threading.Event()

    def late(request: Any) -> Any:
        free.wait(120)
        return GOOD

    with chat_stub(late) as stub:
        with pytest.raises(EndpointError, match=r"did not answer within 0\.2 s \(asked 2 times\)"):
            client(stub.url, timeout=0.2, retries=1).complete(ASKED, seed=0)
        free.set()


def test_bytes_that_drip_do_not_hold_anybody_longer_than_the_deadline():
    done = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not done.wait(0.02):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(EndpointError, match="within"):
            client(f"http://127.0.0.1:{server.getsockname()[1]}/v1", timeout=0.4, retries=0).complete(ASKED, seed=0)
        done.set()
        thread.join(60)


def test_abort_ends_what_is_under_way_and_what_comes_later():
    free, asked = threading.Event(), threading.Event()

    def late(request: Any) -> Any:
        asked.set()
        free.wait(120)
        return GOOD

    raised: list[BaseException] = []
    with chat_stub(late) as stub:
        asking = client(stub.url, timeout=600.0)

        def ask() -> None:
            try:
                asking.complete(ASKED, seed=0)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert asked.wait(300)
        asking.abort()
        thread.join(60)
        assert not thread.is_alive() and isinstance(raised[0], Aborted)
        with pytest.raises(Aborted):
            asking.complete(ASKED, seed=0)
        free.set()
    assert len(stub.requests) == 1


def test_the_key_goes_to_the_endpoint_and_into_no_message():
    seen = []

    def refuse(request: Any) -> Any:
        seen.append(request)
        return (401, {"error": {"message": "Incorrect API key provided: sk-very-secret."}})

    with chat_stub(refuse) as stub, pytest.raises(EndpointError) as raised:
        client(stub.url, api_key="sk-very-secret").complete(ASKED, seed=0)
    assert "provided: (the key)" in str(raised.value) and "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "more", "said"),
    [
        ("localhost:8000/v1", {}, "base_url: expected http"),
        ("ftp://host/v1", {}, "base_url: expected http"),
        ("http://host:port/v1", {}, "base_url"),
        ("http://me:word@host/v1", {}, "without a user or password"),
        ("http://host /v1", {}, "base_url"),
        ("http://host/v1", {"api_key": "a\nb"}, "api_key"),
        ("http://host/v1", {"timeout": 0.0}, "timeout"),
        ("http://host/v1", {"retries": -1}, "retries"),
    ],
)
def test_what_cannot_be_an_endpoint_is_said_at_once(url, more, said):
    with pytest.raises(ValueError, match=said):
        ChatClient(url, "m", **more)


def test_where_nobody_listens_the_reason_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(EndpointError, match="connection refused; does the endpoint run"):
        client(f"http://127.0.0.1:{port}/v1", retries=1).complete(ASKED, seed=0)
    with pytest.raises(EndpointError, match="cannot be resolved"):
        client("http://no-such-host.invalid/v1", retries=0).complete(ASKED, seed=0)


def test_a_proxy_of_the_environment_is_asked(monkeypatch):
    with chat_stub(replies(GOOD)) as stub:
        monkeypatch.setenv("http_proxy", stub.url.removesuffix("/v1"))
        monkeypatch.setenv("no_proxy", "")
        # The stub takes the path of what it is asked for, which for a proxy is a whole address: it answers 404.
        with pytest.raises(EndpointError, match="404"):
            client("http://far.invalid/v1").complete(ASKED, seed=0)
        assert len(stub.requests) == 1
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert client(stub.url).complete(ASKED, seed=0).content == "hello"
    assert json.dumps(stub.requests[0]["messages"]) == json.dumps(ASKED)
