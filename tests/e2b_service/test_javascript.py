"""E2B's JavaScript library against ``sandboxgym serve e2b``, where ``SANDBOXGYM_E2B_JS`` names a folder that has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from components import missing
from e2b_service.conftest import KEYS, Server, start
from sandbox.sandboxes import check

SCRIPT = Path(__file__).with_name("javascript.mjs")


@pytest.fixture(scope="module")
def library() -> str:
    """The folder in which npm installed the library."""
    folder = os.environ.get("SANDBOXGYM_E2B_JS", "")
    if not folder or not Path(folder, "node_modules", "e2b").is_dir():
        missing("e2b-js", f"SANDBOXGYM_E2B_JS={folder!r} names no folder with node_modules/e2b")
    if shutil.which("node") is None:
        missing("e2b-js", "there is no node")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("snapshot", ["auto", "filesystem"])
def test_its_calls_have_the_results_that_it_documents(library: str, tmp_path: Path, snapshot: str) -> None:
    check("overlay")
    own = start(tmp_path, "--backend", "overlay", "--snapshot", snapshot)
    live = "running processes" in own.says
    if not live and snapshot == "auto":
        own.end()
        missing("criu", f"the server keeps files only: {own.says}")
    try:
        found = _played(library, own, live)
    finally:
        own.end()
    assert own.leftovers() == []
    seconds = found.pop("seconds")
    assert 500 < seconds <= 1001, seconds  # until it ends: fewer by what it took to ask
    forks = [["first", [True] if live else []], ["text é", [True] if live else []]]
    assert found == {
        "version": found["version"],
        "command": ["out\na b\n", "err\n", 0, "out\na b\n"],
        "failed": ["CommandExitError", 7],
        "late": "TimeoutError",
        "listed": ["cat; echo done"],
        "background": "one\ndone\n",
        "bytes": [0, 255, 10],
        "stream": "text é",
        "entries": [["/home/user/notes", "dir"], ["/home/user/notes/a", "file"]],
        "moved": [False, "text é"],
        "events": ["create new", "remove empty", "write new"],
        "gone": "FileNotFoundError",
        "signed": 200,
        "list": [[True, "running"]],
        "running": True,
        "forks": forks,
        "paused": [True, False],
        "state": "paused",
        "resumed": forks[1],
        "killed": live,
        "snapshot": "text é",
        "deleted": [True, False],
        "strange": "AuthenticationError",
        "keyless": 401,
        "template": "SandboxError",
        "terminal": "SandboxError",
        "ended": [True, False, False],
        "after": "SandboxNotFoundError",
    }


def _played(folder: str, server: Server, live: bool) -> dict[str, Any]:
    mine = json.dumps({"E2B_TEST": str(server.runtime)})
    command = ["node", str(SCRIPT), folder, "live" if live else "files", mine]
    there = {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": KEYS[0]}
    done = subprocess.run(command, env=os.environ | there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
