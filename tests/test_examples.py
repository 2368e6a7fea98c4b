"""The scripts of docs/examples do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_stub import chat_stub, commands
from components import missing

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"


def run(script: Path, *args: Any, cwd: Path, timeout: float = 300) -> str:
    """What a script prints, as a user runs it: nothing but the package on the path, and no network to reach."""
    result = subprocess.run(
        [sys.executable, str(script), *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_an_example_is_short(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) < 80


def test_there_are_examples():
    assert {"trl_grpo.py", "search.py", "openai_endpoint.py"} <= {script.name for script in EXAMPLES.glob("*.py")}


# Look-ahead


def test_without_the_luck_of_later_decisions_returns_vary_less(tmp_path):
    assert len((EXAMPLES / "lookahead.py").read_text().splitlines()) <= 40
    lines = run(EXAMPLES / "lookahead.py", cwd=tmp_path).splitlines()
    found = [re.fullmatch(r"batch \d: variance of returns ([\d.]+), without luck ([\d.]+)", line) for line in lines]
    assert len(found) == 4
    for match in found:
        assert match is not None, lines
        assert float(match[2]) < 0.6 * float(match[1])


# Search


def search(cwd: Path, *args: Any) -> dict[str, tuple[int, int]]:
    lines = run(EXAMPLES / "search.py", *args, cwd=cwd).splitlines()
    found = [re.fullmatch(r"(.*?) +solved +(\d+) of \d+, +(\d+) steps a game", line) for line in lines]
    assert all(found), lines
    return {match[1]: (int(match[2]), int(match[3])) for match in found if match}


def test_forks_solve_games_that_rollouts_from_the_root_do_not(tmp_path):
    results = search(tmp_path, "--games", 30, "--budget", 400)
    one, root, midway, mcts = (solved for solved, _ in results.values())
    assert next(iter(results)).startswith("one rollout")
    assert one < midway and one < mcts
    assert root < midway and root < mcts
    assert all(steps <= 400 for _, steps in results.values())


def test_a_search_repeats_by_its_seed(tmp_path):
    first, again, other = (run(EXAMPLES / "search.py", "--games", 5, "--seed", s, cwd=tmp_path) for s in (3, 3, 4))
    assert first == again != other


# Chat endpoints


def test_a_chat_endpoint_is_a_policy(tmp_path):
    """The endpoint is surest at the start, less and less so after; what it answers is always on offer."""
    try:
        import openai  # noqa: F401
    except ImportError:
        missing("openai", "the package openai is not installed")

    def answer(request: dict[str, Any]) -> Any:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        offered = commands(request)
        return offered[request["seed"] % len(offered)], [-1.0, -1.0], [-0.1 * (turn + 1)]

    with chat_stub(answer) as stub:
        settings = ("--model", "stub", "--games", 3, "--steps", 5, "--points", 1, "--width", 3)
        printed = run(EXAMPLES / "openai_endpoint.py", "--base-url", stub.url, *settings, cwd=tmp_path)
        assert len(stub.requests) == 3 * (5 + 2)
    assert re.findall(r"from step (\d)", printed) == ["0", "4", "4"] * 3  # siblings at the least certain step
    assert printed.count(" nats ") == 21
    assert "(refused)" not in printed
    assert "21 steps, 42 tokens" in printed


# TRL


@pytest.mark.slow  # importing TRL alone takes seconds
def test_trl_trains_on_what_the_environments_gave(tmp_path):
    try:
        import trl  # noqa: F401
    except ImportError:
        missing("trl", "trl is not installed")
    printed = run(EXAMPLES / "trl_grpo.py", "--steps", 2, "--generations", 16, "--out", tmp_path, cwd=tmp_path)
    found = re.search(r"(\d+) steps, (\d+) of 32 rollouts reached the goal, logged=\[(.*), (.*)\]", printed)
    assert found, printed[-2000:]
    steps, reached = int(found[1]), int(found[2])
    assert steps > 32 and 0 < reached < 32
    assert 16 * float(found[3]) + 16 * float(found[4]) == pytest.approx(reached)  # what the trainer saw
