"""Random programs: correct environments pass; faults are detected, shrunk, printed, saved and replayed."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sandboxgym import SnapshotEnv, SnapshotSpec
from sandboxgym.conformance import Budget, Subject, Verdict
from sandboxgym.conformance.check import Failed
from sandboxgym.conformance.checks import machine
from sandboxgym.conformance.harness import programs
from sandboxgym.conformance.runner import all_checks, run_check

pytest.importorskip("hypothesis")

CORPUS = Path(__file__).parents[3] / "conformance" / "corpus"
QUICK = Budget("quick", 2, 12, 20, 4, 5, 5, 100, 15.0)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts become minimal however busy the machine is."""
    monkeypatch.setattr(machine, "SHRINKING", 120.0)


class Walk(SnapshotEnv[Any, int]):
    """A log of actions; noisy or not."""

    noisy = False

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(-1e9, 1e9, (2,)), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.log: list[int] = [(options or {}).get("start", 0)]
        return self.seen(), {}

    def step(self, action: int):
        self.log.append(int(action) + (int(self.np_random.integers(100)) if self.noisy else 0))
        return self.seen(), float(action), len(self.log) > 9, False, {"log": list(self.log)}

    def seen(self) -> np.ndarray:
        return np.array([len(self.log), sum(self.log)], np.float32)

    def _capture(self) -> Any:
        return self.log

    def _apply(self, state: Any) -> None:
        self.log = state


class Noisy(Walk):
    noisy = True


class Aliased(Walk):
    """A fork shares its log with its source."""

    def fork(self, k: int, *, seed: int | None = None):
        children = super().fork(k, seed=seed)
        for child in children:
            child.log = self.log
        return children


class Uncaptured(Noisy):
    snapshot_spec = SnapshotSpec(rng=False)


class Stale(Walk):
    """``restore`` returns the observation of before."""

    def restore(self, snap: Any, *, seed: int | None = None):
        before = self.seen() if self._was_reset else None
        result = super().restore(snap, seed=seed)
        return result if before is None else (before, result[1])


class Raises(Walk):
    """A restore fails late in an episode."""

    def restore(self, snap: Any, *, seed: int | None = None):
        if self._was_reset and len(self.log) > 2:
            raise OSError("no space left")
        return super().restore(snap, seed=seed)


def result(make: Any, *, seed: int = 0, **hooks: Any) -> Any:
    subject = Subject(make, **hooks)
    subject.seed = seed
    return run_check(all_checks(only=["machine.random_walk"])[0], subject, QUICK, seed)


@pytest.mark.parametrize("make", [Walk, Noisy])
def test_correct_environments_survive(make):
    found = result(make, reset_options=[{"start": 1}, {"start": 2}])
    assert found.verdict is Verdict.PASS, f"{found.message}\n{found.counterexample}"
    assert found.evidence["programs"] > 5
    assert {"step", "snapshot", "restore", "fork", "close", "save"} <= found.evidence["calls"].keys()


def test_a_fault_becomes_a_minimal_script_that_runs():
    found = result(Aliased)
    assert found.verdict is Verdict.FAIL
    program = found.evidence["program"]
    assert [call["op"] for call in program] == ["make", "fork", "step", "step"]
    script = found.counterexample
    body = script[script.index("env0 = make_env()") :]
    names: dict[str, Any] = {"make_env": Aliased}
    exec(compile(body, "script", "exec"), names)
    assert str(names["found"]) != str(names["expected"])


def test_the_same_seed_finds_the_same(capfd):
    first, second = (result(Aliased, seed=3) for _ in range(2))
    assert first.evidence["program"] == second.evidence["program"]
    assert first.counterexample == second.counterexample
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_stale_observation_and_an_exception_are_failures():
    found = result(Stale)
    assert found.verdict is Verdict.FAIL and found.message.startswith("restore returned something else")
    found = result(Raises)
    assert found.verdict is Verdict.FAIL and "no space left" in found.message


def test_futures_that_do_not_repeat_are_skipped():
    found = result(Uncaptured)
    assert found.verdict is Verdict.SKIP and "runs with other draws differ" in found.message


def test_a_failing_program_is_saved_and_replayed(tmp_path, monkeypatch):
    monkeypatch.setenv(machine.CORPUS, str(tmp_path))
    found = result(Aliased)
    (path,) = tmp_path.iterdir()
    assert found.evidence["saved"] == str(path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    with pytest.raises(Failed):
        programs.replay(saved, Subject(Aliased))
    programs.replay(saved, Subject(Walk))


def test_a_program_of_another_schema_is_refused():
    with pytest.raises(ValueError, match="schema"):
        programs.replay({"schema": 99})


@pytest.mark.parametrize(
    "value", [None, 3, "look", np.int64(4), np.array([[1.5, 2.0]], np.float32), (1, {"a": [np.uint8(2)]})]
)
def test_actions_survive_json(value):
    again = programs.decode(json.loads(json.dumps(programs.encode(value))))
    assert type(again) is type(value) and repr(again) == repr(value)


def test_what_has_no_json_is_refused():
    with pytest.raises(TypeError):
        programs.encode(object())


def entries() -> list[Path]:
    return sorted(CORPUS.glob("*.json"))


@pytest.fixture
def _zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(CORPUS.parent))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.partition(".")[0] == "zoo":
            del sys.modules[name]


@pytest.mark.parametrize("path", entries(), ids=lambda path: path.stem)
def test_the_regression_corpus(path, _zoo):
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["expect"] == "FAIL":
        with pytest.raises(Failed):
            programs.replay(saved)
        return
    programs.replay(copy.deepcopy(saved))


def test_the_corpus_is_not_empty():
    assert any(json.loads(path.read_text(encoding="utf-8"))["expect"] == "PASS" for path in entries())
