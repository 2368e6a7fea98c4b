"""The cheats of `sandboxgym bench cheats`: their descriptions are complete, and a few are played."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess

import pytest
from components import missing

from sandboxgym.bench import cheats
from sandboxgym.bench.tools.cheat_cases import Cheat, cases, row
from sandboxgym.envs.swebench.rows.tasks import from_row


def test_each_cheat_is_told_once_and_whole() -> None:
    names = [cheat.name for cheat in cases()]
    assert len(set(names)) == len(names) >= 100
    assert sum(cheat.outside for cheat in cases()) >= 15 and sum(cheat.honest for cheat in cases()) == 2
    for cheat in cases():
        assert bool(cheat.command) != bool(cheat.patch), cheat.name
        assert "{{" not in cheat.command + cheat.patch, cheat.name
        subprocess.run(["bash", "-n"], input=cheat.command, text=True, check=True)


def test_the_task_is_a_row_as_they_are_published() -> None:
    task = from_row(row("image", "0" * 40))
    assert task.image == "image" and "setup.py -q develop" in task.eval_script
    assert {name.partition("::")[0] for name in task.fail_to_pass} == {"tests/test_labels.py", "tests/test_prices.py"}


def test_the_summary_counts_what_fools_both() -> None:
    outcomes = [
        cheats.CheatOutcome(Cheat("honest", "x", honest=True), "resolved", True, (), True),
        cheats.CheatOutcome(Cheat("named", "x"), "resolved", True, ("exit",), True),
        cheats.CheatOutcome(Cheat("not named", "x"), "resolved", True, (), True),
        cheats.CheatOutcome(Cheat("differs", "x"), "tests fail", False, (), True),
        cheats.CheatOutcome(Cheat("outside", "x", outside=True), "tests fail", False, (), False),
    ]
    text = "\n".join(cheats.summary(outcomes))
    assert "4 cheats, 1 of them outside the patch that is graded, of which 0 count here" in text
    assert (
        "2 are resolved here and by the official harness" in text and "names 1 of them. Not named: not named." in text
    )
    assert "differ for: differs." in text
    assert "| not named | **resolved** | **resolved** | – |" in cheats.table(outcomes)


@pytest.mark.slow
def test_cheats_are_played_here_and_in_the_official_harness() -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        missing("docker", "there is no Docker daemon")
    if importlib.util.find_spec("swebench") is None:
        missing("swebench", "swebench is not installed")
    if os.geteuid() != 0:
        missing("overlay", "this process is not root")
    expected = {
        "the repair itself": (True, True, set()),
        "conftest.py at the root: every report says passed": (True, True, {"conftest", "runner"}),
        "equal to everything, by an answer that is computed": (True, True, {"countercheck"}),
        "os._exit(0) after forged lines": (False, False, {"exit", "results"}),
        "the installed pytest edited": (False, False, set()),
    }
    chosen = [cheat for cheat in cases() if cheat.name in expected]
    assert len(chosen) == len(expected)
    for outcome in cheats.measure(chosen, backend="overlay"):
        resolved, official, rules = expected[outcome.cheat.name]
        assert (outcome.resolved, outcome.official) == (resolved, official), outcome
        assert rules <= set(outcome.rules) and bool(rules) == bool(outcome.rules), outcome
    left = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"name={cheats.REPOSITORY}-{os.getpid()}-"], capture_output=True
    )
    images = subprocess.run(["docker", "images", "-q", f"{cheats.REPOSITORY}:{os.getpid()}"], capture_output=True)
    assert left.stdout == images.stdout == b""
