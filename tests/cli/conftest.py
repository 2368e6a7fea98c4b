"""Fixtures of the command line's tests: separate directories, input lines, a misbehaving file server."""

from __future__ import annotations

import hashlib
import http.server
import io
import re
import sys
import threading
from dataclasses import dataclass, field

import pytest

from sandboxgym.cli import main


@pytest.fixture(autouse=True)
def own_directories(tmp_path, monkeypatch):
    for name in ("DATA", "CACHE", "RUNTIME"):
        monkeypatch.setenv(f"SANDBOXGYM_{name}", str(tmp_path / name.lower()))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command with lines on its standard input; returns (status, output, errors)."""

    def call(*arguments: str, lines: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "path", list(sys.path))  # commands add the present folder
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        try:
            status = main(arguments)
        except SystemExit as leave:  # argparse
            status = leave.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@dataclass
class Files:
    """Files of the server, and its misbehaviour."""

    url: str = ""
    content: dict[str, bytes] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    """Number of bytes after which the next answers are cut; later ones are whole."""
    ranges: bool = True
    tags: bool = True
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    media: str = "application/octet-stream"
    stall: threading.Event | None = None
    """Seconds to wait after the first half of an answer."""
    asked: list[str | None] = field(default_factory=list)
    """Range header of every request."""
    sent: int = 0


class Quiet:
    """Progress that is only counted."""

    def __init__(self):
        self.begun, self.arrived = [], 0

    def start(self, name, done, total):
        self.begun.append((done, total))

    def advance(self, nbytes):
        self.arrived += nbytes

    def finish(self):
        pass


@pytest.fixture
def quiet():
    return Quiet()


@pytest.fixture
def server():
    files = Files()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            files.asked.append(self.headers.get("Range"))
            name = self.path.rpartition("/")[2]
            if files.failures:
                self.send_error(files.failures.pop(0))
                return
            if name not in files.content:
                self.send_error(404)
                return
            body = files.content[name]
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            begin = self._begin(tag)
            if begin is not None and begin >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            part = body if begin is None else body[begin:]
            self.send_response(200 if begin is None else 206)
            self.send_header("Content-Type", files.media)
            self.send_header("Content-Length", str(len(part)))
            if begin is not None:
                self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
            if files.tags:
                self.send_header("ETag", tag)
            self.end_headers()
            limit = files.cut_after.pop(0) if files.cut_after else len(part)
            if files.stall is not None:
                self._send(part[: len(part) // 2])
                files.stall.wait(300)
                self._send(part[len(part) // 2 :])
            else:
                self._send(part[:limit])
            self.close_connection = True

        def _send(self, chunk: bytes) -> None:
            files.sent += len(chunk)  # before: whoever has received the last byte may look at once
            try:
                self.wfile.write(chunk)
                self.wfile.flush()
            except OSError:
                files.sent -= len(chunk)

        def _begin(self, tag: str) -> int | None:
            match = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if not files.ranges or match is None or self.headers.get("If-Range", tag) != tag:
                return None
            return int(match[1])

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    files.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield files
    if files.stall is not None:
        files.stall.set()
    running.shutdown()
    thread.join()
    running.server_close()
