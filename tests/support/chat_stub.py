"""A chat endpoint on a real socket: /v1/chat/completions, answered by a function."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Answer = tuple[str, list[float], list[float]]
"""Content, log-probabilities of its tokens, and those of the alternatives to the first one."""


@dataclass
class ChatStub:
    """Server that records its requests, and how many there are at a time."""

    answer: Callable[[dict[str, Any]], Answer | tuple[int, dict[str, Any]]]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    connections: int = 0
    """Number of open connections, of clients that live or are gone."""

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until what clients sent that are gone now is read and counted, and all connections are closed.

        Raises:
            TimeoutError: a connection is still open.
        """
        address = urlsplit(self.url)
        with socket.create_connection((address.hostname, address.port), timeout=seconds) as last:
            last.shutdown(socket.SHUT_WR)
            last.recv(1)  # connections are accepted in turn: all that came before were
        end = time.monotonic() + seconds
        while self.connections:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.connections} connections are still open")
            time.sleep(0.005)


def completion(content: str, logprobs: list[float], top: list[float]) -> dict[str, Any]:
    def token(logprob: float) -> dict[str, Any]:
        return {"token": "t", "logprob": logprob, "bytes": None}

    tokens = [{**token(logprob), "top_logprobs": [token(x) for x in top]} for logprob in logprobs]
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "stub",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": content},
                "logprobs": {"content": tokens} if tokens else None,
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": len(tokens), "total_tokens": 7 + len(tokens)},
    }


@contextmanager
def chat_stub(answer: Callable[[dict[str, Any]], Any]) -> Iterator[ChatStub]:
    stub = ChatStub(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            if len(body) < length:  # of a client that is gone
                self.close_connection = True
                return
            request = json.loads(body)
            with stub.lock:
                stub.requests.append(request)
            reply = stub.answer(request)
            if isinstance(reply, bytes):  # the whole response, as it is; without any, the connection is reset
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if reply:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
                    self.wfile.write(reply)
                self.connection.close()
                return
            status, body = reply if isinstance(reply[0], int) else (200, completion(*reply))
            data = json.dumps(body).encode()
            with contextlib.suppress(OSError):  # of a client that is gone
                self.send_response(status if self.path == "/v1/chat/completions" else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def process_request(self, request: Any, client_address: Any) -> None:
            with stub.lock:
                stub.connections += 1
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            with stub.lock:
                stub.connections -= 1

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def commands(request: dict[str, Any]) -> list[str]:
    """The admissible commands in the last message of a request."""
    return request["messages"][-1]["content"].partition("You can:\n")[2].splitlines()
