"""A server of the OpenEnv protocol in a process of its own, and its clients."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from components import missing

from sandboxgym.adapters.openenv import Client, ServerError

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
        end = time.monotonic() + 300
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
