"""Counterexamples have few calls and run as printed, for all kinds of actions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from faulty import Shared, Unseeded
from toy_envs import Corridor

from sandboxgym import SnapshotEnv
from sandboxgym.conformance import Budget, Subject, run
from sandboxgym.conformance.harness.canonical import canonical, literal, rows
from sandboxgym.conformance.harness.shrink import shrunk
from sandboxgym.conformance.reports.causes import causes
from sandboxgym.serialization import pack, unpack

HERE = Path(__file__).parent
SMALL = replace(Budget.named("quick"), traces=2, steps=20, repeats=20, cycles=5)


def executed(script: str, tmp_path: Path) -> str:
    """Output of a script in a new interpreter."""
    file = tmp_path / "script.py"
    file.write_text(script, encoding="utf-8")
    folders = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        f"import sys; sys.path[:0] = {folders!r}; exec(open({str(file)!r}).read())",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Nested(SnapshotEnv[Any, Any]):
    """Actions of every kind; a restore forgets how much was done."""

    metadata = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = gym.spaces.Dict(
            push=gym.spaces.Box(-1, 1, (2, 2), np.float32),
            pick=gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([2, 3]))),
            bits=gym.spaces.MultiBinary(3),
            words=gym.spaces.Text(5),
            nothing=gym.spaces.Box(0, 1, (0, 2), np.float64),
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.total = 0.0
        return np.array([0.0]), {}

    def step(self, action: Any):
        self.total += 1 + float(action["push"].sum()) + int(action["pick"][0]) + int(action["bits"].sum())
        return np.array([self.total]), 0.0, self.total > 40, False, {}

    def _capture(self) -> float:
        return self.total

    def _apply(self, state: float) -> None:
        self.total = 0.0


@pytest.mark.parametrize("make", [Nested, Shared, Unseeded])
def test_a_printed_counterexample_runs_and_is_short(make: Any, tmp_path: Path) -> None:
    subject = Subject(make)
    report = run(subject, only=["restore.trace_equality", "snapshot.immutable"], budget=SMALL, shrink=False)
    assert report.failures
    for result in report.failures:
        short = shrunk(subject, result.counterexample or "", seconds=60)
        assert short is not None and short.statements <= 8
        assert any(row["differs"] for row in short.difference)
        out = executed(short.script, tmp_path)
        expected, found = (line.partition(" ")[2].strip() for line in out.splitlines())
        assert expected != found


def test_the_report_has_the_short_script() -> None:
    (result,) = run(Subject(Shared), only=["restore.trace_equality"], budget=SMALL).failures
    assert len((result.counterexample or "").splitlines()) < 40
    assert [row["field"] for row in result.evidence["difference"] if row["differs"]]


def test_scripts_that_are_not_shortened_run_too(tmp_path: Path) -> None:
    report = run(
        Subject(Shared), only=["snapshot.immutable", "wrappers.time_limit", "freshness.last_info"], shrink=False
    )
    assert {result.id for result in report.failures} >= {"snapshot.immutable", "wrappers.time_limit"}
    for result in report.failures:
        executed(result.counterexample or "", tmp_path)


def test_every_step_that_is_left_is_needed() -> None:
    subject = Subject(Shared)
    script = (
        "from faulty import Shared\n\n\ndef make_env():\n    return Shared()\n\n\n"
        "env0 = make_env()\nenv1 = make_env()\nenv0.action_space.seed(3), env0.observation_space.seed(4)\n"
        "env0.reset(seed=3)\nenv1.reset(seed=4)\nfor action in [0, 1, 0]:\n    env0.step(action)\n"
        "snap0 = env0.snapshot()\nenv0.step(1)\nenv1.step(1)\n"
        "for _ in range(5):\n    env0.restore(snap0)\n    env0.step(0)\n"
        "env1.close()\nenv0.restore(snap0)\nfound = env0.step(1)\n"
    )
    found = shrunk(subject, script, seconds=20)
    assert found is not None and found.statements == 6
    assert [row["field"] for row in found.difference if row["differs"]][-1] == "info['visited']"
    assert "env1" not in found.script and "range" not in found.script


def test_what_no_control_contradicts_stays_as_it_is() -> None:
    head = "from toy_envs import Corridor\n\n\ndef make_env():\n    return Corridor()\n\n\n"
    right = head + "env0 = make_env()\nenv0.reset(seed=1)\nsnap0 = env0.snapshot()\nenv0.restore(snap0)\nenv0.step(1)\n"
    assert shrunk(Subject(Corridor), right, seconds=5) is None
    assert shrunk(Subject(Corridor), "env0.step(…)\n", seconds=5) is None
    assert shrunk(Subject(Corridor), head + "env0 = make_env()\nprint(env0.render())\n", seconds=5) is None


@pytest.mark.parametrize(
    "value",
    [
        {"a": np.array([[1, 2]], np.int8), "b": (np.float32(0.5), [np.array([True])])},
        (np.array([0.1, np.nan, np.inf], np.float32),),
        np.zeros((0, 3), np.int16),
        [float("nan"), float("-inf"), -0.0, 2**70, b"\x00", "ü", None, True, {1, 2}, ()],
        np.int64(7),
        np.array(["a", "bc"]),
        gym.spaces.GraphInstance(np.array([1.0]), None, None),
    ],
)
def test_a_literal_is_the_value(value: Any) -> None:
    assert canonical(eval(literal(value), {"np": np})) == canonical(value)


def test_rows_mark_what_differs() -> None:
    one = {"observation": canonical(1), "info": canonical({"a": 1, "b": {"c": 2}}), "state": None}
    other = {"observation": canonical(1), "info": canonical({"a": 1, "b": {"c": 3}, "d": 4}), "state": None}
    table = rows(one, other)
    assert [(row["field"], row["differs"]) for row in table] == [
        ("observation", False),
        ("info['b']['c']", True),
        ("info['d']", True),
    ]
    assert unpack(pack(table)) == table


def failure(id: str, message: str = "", *, script: str = "", **evidence: Any) -> dict[str, Any]:
    return {"id": id, "message": message, "evidence": evidence, "counterexample": script}


def test_failures_in_the_same_field_are_one_cause() -> None:
    long, short = "x\n" * 90, "x\n" * 9
    found = causes(
        [
            failure("a", "call 3 differs: info['prob']: expected 1, found 2", script=long),
            failure("b", "call 4 differs: reward: expected 1, found 2"),
            failure("c", "call 9 differs: info['prob']: missing", script=short),
            failure("d", "nothing is random, but the future changed"),
            failure("e", "12 folders remain"),
        ]
    )
    assert [(cause.checks, cause.what) for cause in found] == [
        (("c", "a", "d"), "info['prob']"),
        (("b",), "reward"),
        (("e",), ""),
    ]


def test_a_lost_stream_explains_futures_and_a_line_of_code_exceptions() -> None:
    text = 'File "/home/me/env.py", line 7, in step\n'
    found = causes(
        [
            failure("restore.trace_equality", "observation[3]: expected 1, found 2"),
            failure("restore.random_streams", "another stream", stream="Dice#0.np_random"),
            failure("fork.isolation", "KeyError", traceback=text),
            failure("fork.close_order", "KeyError", traceback=text),
        ]
    )
    assert [(cause.checks, cause.what) for cause in found] == [
        (("restore.trace_equality", "restore.random_streams"), "random stream np_random"),
        (("fork.isolation", "fork.close_order"), "line 7 of env.py (step)"),
    ]
