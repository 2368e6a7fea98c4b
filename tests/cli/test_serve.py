"""``sandboxgym serve webshop`` as a process: it prints its address, answers, and ends cleanly."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

SERVE = [sys.executable, "-m", "sandboxgym", "serve", "webshop"]


@pytest.fixture
def server():
    process = subprocess.Popen(
        [*SERVE, "--port", "0", "--split", "test"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_serves_until_interrupted(server):
    line = server.stdout.readline()
    found = re.fullmatch(r"500 tasks, 1,000 products: (http://127\.0\.0\.1:(\d+)) \(Ctrl-C ends it\)\n", line)
    assert found, line + server.stderr.read()
    with urllib.request.urlopen(f"{found[1]}/start?goal=499", timeout=120) as answer:
        assert answer.status == 200 and b"Instruction:" in answer.read()
    server.send_signal(signal.SIGINT)
    assert server.communicate(timeout=300) == ("", "") and server.returncode == 0
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(found[2])), timeout=5):
        pass


def test_a_port_that_is_taken_is_a_sentence(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, errors = run("serve", "webshop", "--port", str(port))
    assert status == 1 and f"127.0.0.1:{port}" in errors and "in use" in errors
    assert "Traceback" not in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "70000"), "70000"),
        (("--host", "256.0.0.1"), "256.0.0.1"),
        (("--catalogue", "/nowhere"), "/nowhere"),
        (("--split", "all"), "all"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(run, arguments, said):
    status, _, errors = run("serve", "webshop", *arguments)
    assert status == 1 and said in errors and errors.count("\n") == 1
