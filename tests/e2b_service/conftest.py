"""A server of ``sandboxgym serve e2b`` in a process of its own, and E2B's client library pointed at it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from components import missing
from sandbox.sandboxes import check

from sandboxgym.sandbox.overlay import kernel

ROOT = Path(__file__).parents[2]
KEYS = ("e2b_first", "e2b_second")


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    says: str
    runtime: Path

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        status = self.process.wait(120)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def leftovers(self) -> list[str]:
        """Processes of its sandboxes, once they had the time to end."""
        for _ in range(1200):
            found = [pid for pid in os.listdir("/proc") if pid.isdigit() and self._is_mine(pid)]
            if not found:
                break
            time.sleep(0.05)
        return found

    def _is_mine(self, pid: str) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"E2B_TEST={self.runtime}".encode() in environment.split(b"\0")


def start(folder: Path, *options: str, keys: tuple[str, ...] = KEYS) -> Server:
    """Start a server."""
    (folder / "runtime").mkdir(exist_ok=True)
    (folder / "keys").write_text("\n".join(keys))
    command = [sys.executable, "-m", "sandboxgym", "serve", "e2b", "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SANDBOXGYM_RUNTIME": str(folder / "runtime")}
    environment.pop("SANDBOXGYM_E2B_KEYS", None)
    if "--no-key" not in options:
        command += ["--keys", str(folder / "keys")]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        preexec_fn=kernel.die_with_parent,  # of a worker that is interrupted and leaves its fixtures as they are
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    match = re.search(r"http://[\d.]+:\d+", first)
    assert match, first
    return Server(process, match[0], first + process.stdout.readline(), folder)


@pytest.fixture(scope="session")
def e2b() -> Any:
    """E2B's client library."""
    try:
        import e2b as library
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        missing("e2b", f"a package of the extra e2b is not installed: {error}")
    found, wanted = version("e2b"), os.environ.get("SANDBOXGYM_E2B")
    assert wanted in (None, found), f"SANDBOXGYM_E2B wants version {wanted}, found {found}"
    return library


@pytest.fixture(scope="session")
def server(e2b: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that several tests share."""
    check("overlay")
    made = start(tmp_path_factory.mktemp("e2b"), "--backend", "overlay", "--sandboxes", "12", "--snapshots", "6")
    yield made
    assert made.end() in (0, -signal.SIGTERM)
    assert made.leftovers() == []


@pytest.fixture
def service(e2b: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The shared server, which the library's environment variables name; without sandboxes at the end."""
    point(monkeypatch, server)
    yield server
    for key in KEYS:
        there = {"api_key": key, "api_url": server.url}
        for one in e2b.Sandbox.list(**there).next_items():
            e2b.Sandbox.kill(one.sandbox_id, **there)
        for kept in e2b.Sandbox.list_snapshots(**there).next_items():
            e2b.Sandbox.delete_snapshot(kept.snapshot_id, **there)


def point(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Point the library at a server."""
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
    monkeypatch.setenv("E2B_API_KEY", KEYS[0])
    monkeypatch.delenv("E2B_DEBUG", raising=False)


@pytest.fixture
def box(e2b: Any, service: Server) -> Any:
    """A sandbox."""
    return e2b.Sandbox.create(timeout=120, envs={"E2B_TEST": str(service.runtime)})


@pytest.fixture
def live(service: Server) -> Server:
    """The shared server, if its snapshots keep processes."""
    if "running processes" not in service.says:
        missing("criu", f"the server keeps files only: {service.says}")
    return service
