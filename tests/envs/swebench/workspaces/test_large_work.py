"""Work and logs of hundreds of megabytes end in a verdict, in bounded memory of the owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from envs.swebench.conftest import check_backend

ROOT = Path(__file__).parents[4]
PLAY = """
import json, resource, sys
import gymnasium, sandboxgym
env = gymnasium.make("sandboxgym/SWEBench-v0", backend=sys.argv[1], limits={"seconds": 300}, grade_timeout=3600)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
env.reset(options={"task": "slugline-4"})
env.step("submit")
before = peak()
verdicts = []
for commands in json.loads(sys.stdin.read()):
    env.reset(options={"task": "slugline-4"})
    for command in commands:
        *_, terminated, _, info = env.step(command)
    verdicts.append((terminated, info["verdict"], info["masked"], len(info["patch"])))
env.close()
print(json.dumps({"verdicts": verdicts, "grown": peak() - before}))
"""
PRINTS = "cat > conftest.py <<'X'\nimport os\ndef pytest_configure(config):\n    {}os.write(1, {})\nX"
"""A patch that prints before the tests are run."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless"])
@pytest.mark.usefixtures("official_code")
def test_large_work_ends_in_a_verdict(backend: str) -> None:
    check_backend(backend)
    cases = {
        ("patch too large", 0): [
            ["head -c 200000000 /dev/urandom > large", "submit"],
            ["yes 'a line of text' | head -c 200000000 > large", "submit"],
            [
                "yes 'a line of text' | head -c 200000000 > /tmp/large",
                "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat /tmp/large",
            ],
        ],
        ("too much output", 1): [
            [PRINTS.format("for _ in range(1000): ", r"b'PASSED tests/test_x.py::test_y\n' * 30_000"), "submit"],
            [PRINTS.format("for _ in range(1000): ", r"b'\xff' * 1_000_000"), "submit"],
            [PRINTS.format("while True: ", r"b'FAILED x\n' * 10_000"), "submit"],  # is ended long before its time
        ],
    }
    played = subprocess.run(
        [sys.executable, "-c", PLAY, backend],
        input=json.dumps([commands for group in cases.values() for commands in group]),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert played.returncode == 0, played.stderr
    found = json.loads(played.stdout)
    for (reason, least), (terminated, verdict, masked, characters) in zip(
        (key for key, group in cases.items() for _ in group), found["verdicts"], strict=True
    ):
        assert (terminated, verdict, masked) == (True, reason, False) and least <= characters < 1000
    assert found["grown"] < 200  # megabytes
