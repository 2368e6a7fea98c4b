"""The scripts of docs/examples do what they say."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_stub import chat_stub, commands
from components import missing
from gymnasium import spaces

from sandboxgym import SnapshotEnv, SnapshotSpec
from sandboxgym.spaces import Unicode

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def run(script: Path, *args: Any, cwd: Path, timeout: float = 300) -> str:
    """Output of a script, as a user runs it: nothing but the package on the path, and no network to reach."""
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
    most = 250 if script.name == "minimal_bpo.py" else 80
    assert len(script.read_text(encoding="utf-8").splitlines()) < most


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


# All of the algorithm in one file


def test_the_minimal_trainer_learns(tmp_path):
    runs = [run(EXAMPLES / "minimal_bpo.py", "--updates", 15, "--seed", 3, cwd=tmp_path) for _ in range(2)]
    assert runs[0] == runs[1]
    found = re.search(r"before  return ([\d.]+)\n(?s:.*)after   return ([\d.]+)\n", runs[0])
    assert found is not None, runs[0]
    assert float(found[2]) > float(found[1]) + 0.1


class Ladder(SnapshotEnv[int, str]):
    """Three decisions between three commands, and a reward for all of them together."""

    snapshot_spec = SnapshotSpec(kind="memory")
    action_space, observation_space = Unicode(["0", "1", "2"]), spaces.Discrete(1)
    rewards = np.random.default_rng(0).normal(size=(3, 3, 3))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.done = ()
        return 0, self.info()

    def step(self, action):
        self.done += (int(action),)
        over = len(self.done) == 3
        return 0, float(self.rewards[self.done]) if over else 0.0, over, False, self.info()

    def info(self):
        return {
            "admissible_commands": ["0", "1", "2"],
            "page_type": str(self.done),
            "instruction": "",
            "progress_key": str(len(self.done)),
        }

    def _capture(self):
        return self.done

    def _apply(self, state):
        self.done = state


def gradients(trees, *, fault=""):
    """The gradient by each of many trees, (trees, weights), and the exact one, (weights,)."""
    spec = importlib.util.spec_from_file_location("minimal_bpo", EXAMPLES / "minimal_bpo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.WORDS = 64
    policy, env, rng = module.Policy(), Ladder(), random.Random(1)
    torch.manual_seed(0)
    torch.nn.init.normal_(policy.weights.weight, std=0.7)

    class Step:
        def zero_grad(self):
            policy.zero_grad()

        def step(self):
            found.append(-policy.weights.weight.grad[:, 0].clone())

    found, means = [], {"0": (0.3, 10**6), "1": (-0.2, 10**6), "2": (0.5, 10**6)}
    for _ in range(trees):
        tree = module.explore(env, policy, 0, rng, 0.5)
        module.credit([tree], dict(means))
        for edge, siblings in module.walk(tree):
            if fault == "weight":
                edge.weight = 1.0
            elif fault == "sibling" and siblings:  # compared with the best of both
                edge.advantage = edge.value - max(edge.value, *(sibling.value for sibling in siblings))
        module.learn(policy, Step(), [tree])
    expected = torch.zeros(())
    for path in itertools.product("012", repeat=3):
        env.reset()
        chance, reward, seen = torch.zeros(()), 0.0, set()
        info = env.info()
        for command in path:
            options = [module.features(info, each, seen) for each in info["admissible_commands"]]
            chance = chance + policy.log_probabilities(options)[int(command)]
            _, reward, _, _, info = env.step(command)
            seen.add(command)
        expected = expected + chance.exp() * reward
    policy.zero_grad()
    expected.backward()
    return torch.stack(found), policy.weights.weight.grad[:, 0]


def distance(found, exact):
    """The largest deviation of the mean, in standard errors."""
    errors = (found.std(0) / len(found) ** 0.5).clamp(min=1e-6)
    return float(((found.mean(0) - exact).abs() / errors).max())


def test_the_minimal_trainers_gradient_is_the_exact_one_in_the_mean():
    assert distance(*gradients(3000)) < 4.5
    assert distance(*gradients(700, fault="weight")) > 6
    assert distance(*gradients(700, fault="sibling")) > 6


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
def test_the_returns_of_the_trees_that_trl_trains_on_differ(tmp_path):
    try:
        import trl  # noqa: F401
    except ImportError:
        missing("trl", "trl is not installed")
    printed = run(EXAMPLES / "trl_trees.py", "--steps", 1, "--out", tmp_path, cwd=tmp_path)
    found = re.findall(r"task (\d): (\d+) rows, (\d+) branch points, returns=\[(.*)\]", printed)
    assert {int(task) for task, *_ in found} == set(range(4)), printed[-2000:]
    assert all(int(rows) > 2 and int(points) > 1 for _, rows, points, _ in found)
    assert sum(len(set(returns.split(", "))) > 1 for *_, returns in found) >= 2
    assert float(re.search(r"'reward_std': '?([\d.e-]+)", printed)[1]) > 0


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
