"""``sandboxgym eval`` of a language model behind a real server, that of transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from components import missing

pytestmark = pytest.mark.slow

START = 60.0
"""Seconds in which the server has to answer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that knows the letters, with its tokenizer and chat template."""
    pytest.importorskip("torch")
    from bpo_ref.learning.models import build_tiny

    folder = tmp_path_factory.mktemp("model") / "tiny"
    network, tokenizer = build_tiny("0.2M", ["go to desk 1", "look"], vocabulary=300, context=4096, seed=0)
    network.generation_config.do_sample = True  # without it the server answers greedily, whatever the temperature
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    for name in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            missing("transformers", f"transformers serve needs {name}, which is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    words = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + START
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < end, (tmp_path / "server.log").read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        process.kill()
        process.wait()


def test_a_model_behind_a_server_is_evaluated_and_a_server_that_ends_is_told(
    server: tuple[str, subprocess.Popen[bytes]], model: Path, tmp_path: Path
) -> None:
    url, process = server

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sandboxgym", "eval", "ALFWorld-v0", "--prompt", "plain", "--quiet"]
        command += ["--tasks", "2", "--samples", "2", "--max-steps", "2", "--max-tokens", "4", "--retries", "1", *words]
        return subprocess.run([*command, "--base-url", url], cwd=tmp_path, capture_output=True, text=True)

    done = run("--model", str(model), "--out", "first")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "first" / "results.json").read_text())
    summary = found["summary"]
    assert summary["ended"] == 4 and summary["errors"] == {"endpoint": 0, "environment": 0}
    assert summary["tokens"]["in"] > summary["tokens"]["out"] > 0 and not summary["samples_alike"]
    assert "<html" in (tmp_path / "first" / "trees.html").read_text()

    wrong = run("--model", "no/such-model", "--out", "second")
    assert wrong.returncode == 1 and "no/such-model" in wrong.stderr and "Traceback" not in wrong.stderr

    process.send_signal(signal.SIGKILL)
    process.wait()
    lost = run("--model", str(model), "--out", "third")
    assert lost.returncode == 1 and "connection refused; does the endpoint run?" in lost.stderr
