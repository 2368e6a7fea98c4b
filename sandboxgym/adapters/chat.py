"""Client of an OpenAI-compatible chat endpoint, with the standard library alone: each call gives an answer or an error.

    client = ChatClient("http://localhost:8000/v1", "my-model", options={"temperature": 0.0})
    answer = client.complete([{"role": "user", "content": "Hello."}], seed=0)

What this module promises:

1. The timeout covers a whole request, from connecting to the last byte, even if the endpoint sends a byte now and then.
   After it the connection is closed.
2. Temporary failures are retried up to ``retries`` times, after growing pauses or the one that ``Retry-After`` names:
   lost connections, timeouts, statuses 408, 409, 425, 429 and 5xx, and responses that are not a chat completion.
3. A final failure is an `EndpointError` that says what was received, never an empty answer. `EndpointError.hopeless`
   marks errors that every other request would meet too (a wrong key, address or model).
4. `ChatClient.abort` ends pending requests and pauses, from any thread; they raise `Aborted`.
5. The key is sent in a header and appears nowhere else; no message contains it.

Proxies are taken from the environment variables (``HTTPS_PROXY``, ``NO_PROXY``). Connections are not reused.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

LONGEST_ANSWER = 64 * 2**20
"""Maximum number of bytes that are read of a response."""
LONGEST_PAUSE = 60.0
"""Maximum number of seconds that ``Retry-After`` may ask for."""
_PASSING = frozenset({408, 409, 425, 429})
_HOPELESS = frozenset({401, 402, 403, 404, 405})


class EndpointError(RuntimeError):
    """A request that failed for good; the message is one line.

    Args:
        message: description of the failure.
        status: HTTP status, if there was a response.
        hopeless: whether every request to this endpoint would fail in the same way.
        attempts: number of attempts.
    """

    def __init__(self, message: str, *, status: int | None = None, hopeless: bool = False, attempts: int = 1) -> None:
        super().__init__(message)
        self.status, self.hopeless, self.attempts = status, hopeless, attempts


class ContextFull(EndpointError):
    """The conversation is longer than the model's context."""


class Aborted(RuntimeError):
    """Raised for a request after `ChatClient.abort` was called."""


class _Passing(Exception):
    """A failure that may be temporary; ``pause`` is the number of seconds that the endpoint asked for."""

    def __init__(self, message: str, *, status: int | None = None, pause: float | None = None) -> None:
        super().__init__(message)
        self.status, self.pause = status, pause


@dataclass(frozen=True)
class ChatAnswer:
    """Answer of the model, and its cost."""

    content: str
    """Text; empty if the model gave none (such as a reasoning model that ran out of tokens)."""
    finish: str
    """``finish_reason``: "stop", "length", …"""
    model: str
    """Name of the model that answered, according to the endpoint; it may differ from the requested one."""
    tokens_in: int | None
    """Tokens of the prompt; None if the endpoint does not report them."""
    tokens_out: int | None
    """Generated tokens; None if the endpoint does not report them."""
    attempts: int = 1
    """Number of requests made for this answer."""


class ChatClient:
    """Client for chat completions; thread-safe.

    Args:
        base_url: address up to and including the version, such as ``https://api.openai.com/v1``.
        model: name of the model at the endpoint.
        api_key: API key; None for endpoints without one.
        timeout: seconds for one whole request.
        retries: number of further requests after a temporary failure.
        pause: seconds before the first retry, doubled for each later one.
        options: further fields of every request (``temperature``, ``max_tokens``); fields of None are left out,
            including ``seed``.

    Raises:
        ValueError: an argument is invalid; the message names it and says what was expected.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int = 4,
        pause: float = 0.5,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"base_url: {error}, found {base_url!r}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url: expected http://HOST/v1 or https://HOST/v1, found {base_url!r}")
        if parts.username or parts.password:
            raise ValueError("base_url: expected an address without a user or password")
        if any(character <= " " or character == "\x7f" for character in base_url):
            raise ValueError(f"base_url: expected no white space, found {base_url!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key: expected printable ASCII characters")
        if not timeout > 0:
            raise ValueError(f"timeout: expected seconds above 0, found {timeout}")
        if retries < 0:
            raise ValueError(f"retries: expected 0 or more, found {retries}")
        self.model, self.timeout, self.retries, self.pause = model, timeout, retries, pause
        self.options = dict(options or {})
        self.answered = 0
        """Number of requests that returned a chat completion."""
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._secure else 80)
        self._url = f"{parts.scheme}://{parts.netloc}"
        self._path = f"{parts.path.rstrip('/')}/chat/completions" + (f"?{parts.query}" if parts.query else "")
        self._key = api_key
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._aborted = threading.Event()

    def abort(self) -> None:
        """End all pending requests; later ones raise `Aborted` at once. Idempotent."""
        self._aborted.set()
        with self._lock:
            for connection in self._open:
                _cut(connection)

    def complete(self, messages: Sequence[Mapping[str, str]], *, seed: int) -> ChatAnswer:
        """The model's answer to a conversation.

        Raises:
            ContextFull: the conversation is too long.
            EndpointError: the endpoint refused, or failed ``retries + 1`` times.
            Aborted: see `abort`.
        """
        fields = {"model": self.model, "messages": list(messages), "seed": seed, **self.options}
        body = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        for attempt in range(1, self.retries + 2):
            if self._aborted.is_set():
                raise Aborted
            try:
                content = self._ask(body)
                return self._read(content, attempt)
            except _Passing as error:
                if self._aborted.is_set():
                    raise Aborted from error
                if attempt > self.retries:
                    times = f" (asked {attempt} times)" if attempt > 1 else ""
                    raise EndpointError(f"{error}{times}", status=error.status, attempts=attempt) from error
                pause = self.pause * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.0)  # does not affect the request
                self._aborted.wait(min(LONGEST_PAUSE, max(pause, error.pause or 0.0)))
        raise AssertionError("unreachable")

    def _ask(self, body: bytes) -> bytes:
        """Send one request; returns the body of a successful response."""
        begun = time.monotonic()
        connection, target, headers = self._connection()
        late = threading.Event()

        def end() -> None:
            late.set()
            _cut(connection)

        watch = threading.Timer(self.timeout, end)  # a socket's own timeout restarts with every byte
        watch.daemon = True
        with self._lock:
            self._open.add(connection)
        watch.start()
        try:
            connection.connect()
            if late.is_set() or self._aborted.is_set():
                raise TimeoutError
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            content = response.read(LONGEST_ANSWER + 1)
            status, wait = response.status, response.getheader("Retry-After")
            where = response.getheader("Location")
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # AttributeError: raised inside http.client when the connection is closed during a call.
            if late.is_set() or time.monotonic() - begun >= self.timeout:
                raise _Passing(f"{self._url} did not answer within {self.timeout:g} s") from error
            raise _Passing(f"{self._url}: {_reason(error)}") from error
        finally:
            watch.cancel()
            with self._lock:
                self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.close()
        if late.is_set():
            raise _Passing(f"{self._url} did not answer within {self.timeout:g} s")
        if status == 200:
            return content
        raise self._refused(status, content, wait, where)

    def _connection(self) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
        """A connection that is not open yet, the request target, and the headers."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        proxy = getproxies().get("https" if self._secure else "http")
        if not proxy or proxy_bypass(self._host):
            return kind(self._host, self._port, timeout=self.timeout), self._path, headers
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        entry: dict[str, str] = {}
        if parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            entry["Proxy-Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        connection = kind(parts.hostname or "", parts.port or 80, timeout=self.timeout)
        if not self._secure:
            return connection, f"{self._url}{self._path}", {**headers, **entry, "Host": f"{self._host}:{self._port}"}
        connection.set_tunnel(self._host, self._port, headers=entry)
        return connection, self._path, headers

    def _refused(self, status: int, content: bytes, wait: str | None, where: str | None) -> Exception:
        """The error for an unsuccessful response."""
        said = self._said(content)
        message = f"{self._url} answered {status}{f': {said}' if said else ''}"
        if status in _PASSING or status >= 500:
            return _Passing(message, status=status, pause=_seconds(wait))
        if 300 <= status < 400:
            return EndpointError(f"{message} (it has moved to {where})", status=status, hopeless=True)
        if status in (400, 413, 422) and _says_full(content):
            return ContextFull(message, status=status)
        if status == 404 and not self._path.partition("?")[0].endswith("/v1/chat/completions"):
            message += f" (asked for {self._path}; most addresses end in /v1)"
        return EndpointError(message, status=status, hopeless=status in _HOPELESS)

    def _said(self, content: bytes) -> str:
        """An endpoint's error message, as one line without the key."""
        try:
            told = json.loads(content)
            if isinstance(told, Mapping):
                told = told.get("error", told)
            if isinstance(told, Mapping):
                told = told.get("message", told.get("detail", told))
            text = told if isinstance(told, str) else json.dumps(told)
        except (ValueError, RecursionError):
            text = content[:1000].decode(errors="replace")
        if text.lstrip().startswith("<"):  # an HTML page
            text = re.sub(r"<[^>]*>", " ", text)
        text = " ".join(text.split())
        if self._key:
            text = text.replace(self._key, "(the key)")
        return text if len(text) <= 300 else f"{text[:300]}…"

    def _read(self, content: bytes, attempts: int) -> ChatAnswer:
        """The answer in a response."""
        try:
            if len(content) > LONGEST_ANSWER:
                raise ValueError
            told = json.loads(content)
            choice = told["choices"][0]
            text = choice["message"].get("content")
            if isinstance(text, list):  # parts, as some endpoints write them
                text = "".join(part["text"] for part in text if part.get("type", "text") == "text")
            if text is not None and not isinstance(text, str):
                raise TypeError
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise _Passing(f"{self._url} sent no chat completion: {self._said(content) or 'nothing'}") from error
        usage = told.get("usage")
        usage = usage if isinstance(usage, Mapping) else {}
        with self._lock:
            self.answered += 1
        return ChatAnswer(
            text or "",
            str(choice.get("finish_reason") or ""),
            str(told.get("model") or ""),
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            attempts,
        )


def _cut(connection: http.client.HTTPConnection) -> None:
    """Wake the thread that waits for this connection, with an error."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _reason(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return "its host cannot be resolved; is the address right, and this machine online?"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused; does the endpoint run?"
    return " ".join(f"{error}".split()) or type(error).__name__


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text or ""))
    except ValueError:  # some endpoints send a date: use our own pause
        return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _says_full(content: bytes) -> bool:
    """True if an error means that the context is full: OpenAI has a code for it, others use words."""
    text = content[:4000].decode(errors="replace").lower()
    return "context_length_exceeded" in text or "context length" in text or "maximum context" in text
