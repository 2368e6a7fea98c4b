"""The core of the suite: equality, verdicts of a check, and detection of known faults by the named check."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path
from types import MappingProxyType

import faulty
import gymnasium as gym
import numpy as np
import pytest
import toy_envs

from sandboxgym.conformance import ConformanceError, MakeSpec, Subject, Verdict, all_checks, check_snapshot, run
from sandboxgym.conformance.check import REGISTRY, Budget, Check, Failed, Inconclusive, Level, Skipped, check
from sandboxgym.conformance.checks.restore.runs import in_time
from sandboxgym.conformance.checks.snapshot import put_back, scribble
from sandboxgym.conformance.harness.canonical import canonical, difference
from sandboxgym.conformance.harness.scenario import Scene
from sandboxgym.conformance.reports.formats import write_json
from sandboxgym.conformance.runner import pace, run_check

SMALL = Budget("small", traces=2, steps=30, repeats=30, forks=3, cycles=5, depth=20, samples=50, seconds=0.2)


def subject(make, **hooks) -> Subject:
    return Subject(make, **hooks)


# Values.

LARGE, MIDDLE = ({"cells": np.arange(2000) == cell} for cell in (1000, 1001))


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept):
        self.kept = kept


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (np.float32(1), 1.0),
        (np.float32(1), np.float64(1)),
        (np.zeros(2, np.int32), np.zeros(2, np.int64)),
        (np.zeros((1, 2)), np.zeros((2, 1))),
        ([1], (1,)),
        ({"a": 1}, OrderedDict(a=1)),
        ("a", b"a"),
        ({"a": None}, {}),
        (np.array(["a"], dtype=object), np.array(["b"], dtype=object)),
        (np.array([np.nan, np.inf]), np.array([np.nan, np.finfo(float).max])),
        *((kept(LARGE), kept(MIDDLE)) for kept in (lambda value: deque([value]), MappingProxyType, Slotted)),
    ],
)
def test_different_values_are_different(one, other):
    assert canonical(one) != canonical(other)
    assert difference(canonical(one), canonical(other), "value")


class Cell:
    """One of a grid, with a slot that a property hides."""

    __slots__ = ("near", "value")

    def __init__(self, value):
        self.value, self.near = value, []


class Hidden(Cell):
    @property
    def value(self):
        raise RuntimeError("not yet")

    value = value.setter(lambda self, value: Cell.value.__set__(self, value))


def test_objects_with_slots_that_lead_to_each_other_take_no_time():
    cells = [[Cell(8 * row + column) for column in range(8)] for row in range(8)]
    for row in range(8):
        for column in range(8):
            cells[row][column].near = [cells[row - 1][column], cells[row][column - 1]]
    assert canonical(cells[3][3]) != canonical(cells[3][4])
    assert canonical(Hidden(1)) != canonical(Hidden(2)), "the slot itself is read"


@pytest.mark.parametrize(
    "one, other",
    [
        (float("nan"), float("nan")),
        (np.float32("nan"), np.float32("nan")),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan])),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {2, 1, 3}),
        (np.random.default_rng(1), np.random.default_rng(1)),
        ({"a": [np.arange(3), (None, "x")]}, {"a": [np.arange(3), (None, "x")]}),
    ],
)
def test_equal_values_are_equal(one, other):
    assert canonical(one) == canonical(other)
    assert difference(canonical(one), canonical(other)) is None


def test_what_holds_itself_has_a_canonical_form():
    value: list = [1]
    value.append(value)
    assert canonical(value) == canonical(value)


def test_a_difference_names_its_place():
    one, other = {"a": [1, {"b": np.arange(3)}]}, {"a": [1, {"b": np.array([0, 1, 5])}]}
    text = difference(canonical(one), canonical(other), "info")
    assert text == "info['a'][1]['b']: 1 of 3 elements differ, first at (2,): expected 2, found 5"


def test_scribble_overwrites_all_containers():
    array, inner = np.arange(3), {"x": [1, 2]}
    assert scribble(([array], inner, "text", 5)) == 4
    assert not array.any() and inner == {"overwritten": True}


def test_what_was_overwritten_is_put_back():
    """A list of all commands, say, may be the one that each call of each environment returns."""
    commands, table, drawn = ["look", "go"], {"a": [1]}, np.arange(3)
    with pytest.raises(ValueError), put_back():
        for _ in range(2):
            scribble([commands, table, {"set": {1, 2}}, drawn, bytearray(b"x")])
        assert commands == ["overwritten"] and drawn.tolist() == [1, 1, 1]
        raise ValueError
    assert commands == ["look", "go"] and table == {"a": [1]} and drawn.tolist() == [0, 1, 2]


# Checks and verdicts.


@pytest.mark.parametrize(
    "behaviour, verdict",
    [
        (lambda: {"n": 1}, "PASS"),
        (lambda: _raise(Failed("no", {"n": 1}, "script")), "FAIL"),
        (lambda: _raise(Skipped("does not apply")), "SKIP"),
        (lambda: _raise(Inconclusive("cannot tell")), "INCONCLUSIVE"),
        (lambda: _raise(RuntimeError("the environment broke")), "FAIL"),
    ],
)
def test_verdicts(behaviour, verdict):
    one = Check("test.check", Level.API, lambda *_: behaviour(), (), (), "hazard", "blind")
    result = run_check(one, subject(toy_envs.Corridor), Budget.named("quick"), 0)
    assert result.verdict == verdict
    assert verdict == "PASS" or result.message


def _raise(error: Exception):
    raise error


def test_a_check_leaves_the_process_as_it_was(tmp_path):
    import os
    import random

    def disturb(*_):
        random.seed(1), np.random.seed(1)
        os.chdir(tmp_path)
        os.environ["SANDBOXGYM_TEST"] = "1"
        sys.path.append("nowhere")
        return {}

    before = random.getstate(), np.random.get_state()[1].tolist(), os.getcwd(), dict(os.environ), list(sys.path)
    run_check(Check("test.check", Level.API, disturb, (), (), "", ""), subject(toy_envs.Dice), Budget.named("quick"), 0)
    after = random.getstate(), np.random.get_state()[1].tolist(), os.getcwd(), dict(os.environ), list(sys.path)
    assert before == after


def test_dependants_of_a_failed_check_are_skipped():
    report = run(subject(lambda: gym.make("FrozenLake-v1")), levels=[0, 1], budget=SMALL)
    assert report["api.protocol"].verdict == "FAIL"
    assert report["restore.many"].verdict == "SKIP" and "api.protocol failed" in report["restore.many"].message
    assert ("restore.many", "api.protocol failed") in report.not_tested
    assert ("fork.isolation", "level 2 was not asked for") in report.not_tested
    assert report.exit_code == 1


def test_ids_are_unique_and_documented():
    for one in all_checks():
        assert one.summary and one.hazard and one.blind, one.id
        assert set(one.after) <= REGISTRY.keys(), one.id
    with pytest.raises(ValueError, match="expected needs among"):
        check("test.wrong", level=0, hazard="", blind="", needs=("magic",))
    with pytest.raises(ValueError, match="two checks are called"):
        check("api.protocol", level=0, hazard="", blind="")(lambda *_: None)
    with pytest.raises(ValueError, match=r"found api\.nothing"):
        all_checks(only=["api.nothing"])


# Known-good environments raise no alarm; known faults are found by the check that names them.


@pytest.mark.parametrize(
    "make",
    [toy_envs.Corridor, toy_envs.Dice, faulty.Foreign, faulty.deep_copied, lambda: gym.make("toys/Dice-v0")],
    ids=["deterministic", "stochastic", "third-party", "deep-copied", "wrapped"],
)
@pytest.mark.parametrize("seed", range(2))
def test_no_false_alarms(make, seed):
    ids = [one.id for one in all_checks(levels=[0, 1, 2]) if one.id not in ("machine.random_walk", "isolation.caches")]
    report = check_snapshot(make, budget=SMALL, seed=seed, only=ids)
    assert len(report.of(Verdict.PASS)) > 30


@pytest.mark.parametrize(
    "make, id",
    [
        (faulty.Shared, "snapshot.immutable"),
        (faulty.Shared, "restore.trace_equality"),
        (faulty.Unseeded, "restore.random_streams"),
        (faulty.Unseeded, "restore.trace_equality"),
        (faulty.Flaky, "restore.many"),
    ],
)
def test_a_fault_is_found_by_name(make, id):
    report = run(subject(make), only=[id])
    assert report[id].verdict == "FAIL", report[id]
    assert report.exit_code == 1


def test_a_hidden_replay_is_found():
    id = "cost.episode_length"
    report = run(subject(faulty.Replaying, actions=lambda *_: 1), only=[id])
    assert report[id].verdict == "FAIL" and "restore" in report[id].message


def test_without_captured_streams_exactness_is_not_asked_for():
    report = run(subject(faulty.Undeclared), levels=[1], budget=SMALL)
    assert not report.failures
    assert "not declared captured" in report["restore.trace_equality"].message


def test_a_declaration_overrides_that_of_the_environment():
    from sandboxgym import SnapshotSpec

    report = run(subject(faulty.Undeclared, declared=SnapshotSpec()), only=["restore.trace_equality"])
    assert report.exit_code == 0


def test_declared_nondeterminism_is_normalised():
    class Stamped(toy_envs.Corridor):
        count = 0

        def step(self, action):
            Stamped.count += 1
            *rest, info = super().step(action)
            return (*rest, {**info, "stamp": Stamped.count})

    def normalize(transition):
        return transition._replace(info={k: v for k, v in transition.info.items() if k != "stamp"})

    ids = ["restore.trace_equality", "fork.isolation", "freshness.last_info"]
    assert run(subject(Stamped), only=ids).failures
    assert not run(subject(Stamped, normalize=normalize), only=ids).failures


def test_the_oracle_sees_what_observations_hide():
    class Hidden(toy_envs.Dice):
        def reset(self, **arguments):
            self.secret = 0
            return super().reset(**arguments)

        def step(self, action):
            self.secret += 1
            return super().step(action)

    assert not run(subject(Hidden), only=["restore.trace_equality"]).failures
    report = run(subject(Hidden, observe_state=lambda env: env.unwrapped.secret), only=["restore.trace_equality"])
    assert report.failures and "state" in report.failures[0].message


# Counterexamples and reports.


def test_a_counterexample_is_a_script_that_shows_the_difference():
    report = run(subject(faulty.Unseeded), only=["restore.trace_equality"])
    script = report.failures[0].counterexample
    folders = [str(Path(faulty.__file__).parent), str(Path(toy_envs.__file__).parent)]
    code = f"import sys; sys.path[:0] = {folders!r}\n{script}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    expected, found = [line.split(maxsplit=1)[1] for line in result.stdout.splitlines()[-2:]]
    assert expected != found


def test_many_alike_become_a_loop_in_the_script():
    report = run(subject(faulty.Flaky), only=["restore.many"])
    script = report.failures[0].counterexample
    assert "for _ in range(" in script and len(script.splitlines()) < 80
    compile(script, "counterexample", "exec")


def test_check_snapshot_raises_a_readable_assertion():
    with pytest.raises(AssertionError, match=r"1 of 1 conformance checks of .*Unseeded failed") as caught:
        check_snapshot(faulty.Unseeded, only=["restore.random_streams"])
    assert isinstance(caught.value, ConformanceError)
    assert caught.value.report["restore.random_streams"].verdict == "FAIL"


def test_json_is_versioned_and_says_what_was_not_tested():
    content = json.loads(json.dumps(run(subject(toy_envs.Dice), levels=[0]).to_json(), allow_nan=False))
    assert content["schema"] == 1 and content["exit_code"] == 0
    assert content["counts"]["PASS"] + 1 == len(content["results"])  # it gives no action_mask
    assert content["counts"]["SKIP"] == 1
    assert {"id", "level", "verdict", "hazard", "does", "blind", "seconds"} <= content["results"][0].keys()
    assert any(entry["id"] == "restore.many" for entry in content["not_tested"])


def test_the_same_seed_gives_the_same_calls():
    def calls(seed: int) -> list:
        one = subject(toy_envs.Dice)
        run(one, only=["restore.trace_equality"], seed=seed)
        return [control.ops for control in one.controls]

    assert calls(1) == calls(1) != calls(2)


def test_a_scene_closes_what_it_made():
    closed = []

    class Closing(toy_envs.Corridor):
        def close(self):
            closed.append(id(self))

    with pytest.raises(Failed), Scene(subject(Closing)) as scene:
        env = scene.make()
        scene.reset(env, seed=1)
        children = scene.fork(env, 2)
        scene.fail("on purpose")
    assert len(set(closed)) == 1 + len(children)


# Names for other processes.


def test_make_specs():
    assert MakeSpec("toys/Dice-v0").is_id and MakeSpec("a.b:Env-v3").is_id and not MakeSpec("a.b:make").is_id
    assert subject(faulty.deep_copied).make_spec == MakeSpec("faulty:deep_copied")
    assert subject(lambda: toy_envs.Dice()).make_spec is None
    with pytest.raises(ValueError, match="expected a Gymnasium id"):
        Subject.named("nothing")
    with pytest.raises(ImportError):
        Subject.named("no_such_module_at_all:make")


def test_an_environment_that_no_other_process_can_make_is_not_blamed_for_it():
    ids = ["durable.cross_process", "durable.saver_gone", "restore.live_source", "isolation.caches", "restore.diverge"]
    report = run(subject(lambda: toy_envs.Dice()), only=[*ids, "resources.killed_owner"], budget=SMALL)
    verdicts = {result.id: result.verdict for result in report.results}
    assert set(verdicts.values()) <= {Verdict.PASS, Verdict.SKIP}, verdicts
    assert verdicts["durable.cross_process"] is verdicts["durable.saver_gone"] is Verdict.SKIP


# Other processes, crashes, damaged files.


@pytest.mark.parametrize(
    "id",
    [
        "durable.round_trip",
        "durable.mismatch",
        "durable.corrupt",
        "durable.released",
        "resources.depth",
        "concurrency.fork_in_threads",
        "concurrency.partial_fork",
    ],
)
def test_durability_of_a_good_environment(id):
    report = run(subject(toy_envs.Corridor), only=[id], budget=SMALL)
    assert report[id].verdict == "PASS", report[id]


@pytest.mark.slow
@pytest.mark.parametrize(
    "id", ["durable.cross_process", "resources.baseline", "resources.killed_owner", "isolation.caches"]
)
def test_other_processes_and_a_good_environment(id):
    report = run(subject(toy_envs.Corridor), only=[id], budget=SMALL)
    assert report[id].verdict == "PASS", report[id]


@pytest.mark.parametrize(
    "make, id",
    [
        (faulty.RunsFiles, "durable.corrupt"),
        (faulty.NeverReleases, "durable.released"),
        (faulty.AcceptsAll, "durable.mismatch"),
        (faulty.LeaksThreads, "resources.baseline"),
        (faulty.KeepsChildren, "concurrency.partial_fork"),
        (faulty.LeavesReports, "concurrency.partial_fork"),
        (faulty.KeepsAFailure, "concurrency.partial_fork"),
        (faulty.CountsTogether, "isolation.class_attributes"),
        (faulty.CountsTogether, "fork.isolation"),
    ],
)
def test_a_fault_of_forks_and_files_is_found_by_name(make, id):
    report = run(subject(make), only=[id], budget=SMALL)
    assert report[id].verdict == "FAIL", report[id]


def test_what_grows_once_is_not_left_by_failed_forks():
    report = run(subject(faulty.LeavesOneReport), only=["concurrency.partial_fork"], budget=SMALL)
    assert report.results[-1].verdict == "PASS" and faulty.LeavesOneReport.reports == 0, report.results


def test_hash_seeds_are_told_apart():
    report = run(subject(faulty.HashDependent), only=["durable.cross_process"], budget=SMALL)
    assert report.failures and "PYTHONHASHSEED" in report.failures[0].message


def test_slow_environments_get_shorter_control_runs():
    quick = Budget.named("quick")
    assert quick.paced(1e-5) == quick and str(quick.paced(1e-5)) == "quick"
    assert quick.paced(0.02).steps in range(8, quick.steps) and quick.paced(0.02).traces == quick.traces
    slowest = quick.paced(10.0)
    assert (slowest.steps, slowest.traces) == (8, 2) and "slow: control runs of 8 steps" in str(slowest)
    assert quick.paced(0.02).share == 1.0 and slowest.share == 0.25 and "x 0.25" in str(slowest)
    hurried = dataclasses.replace(slowest, seconds=0.0)
    assert len(list(hurried.spending(400, at_least=40))) == 10
    assert [len(list(hurried.spending(400, at_least=least))) for least in (1, 2, 4)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"kind": "disk"}, "expected snapshot_spec.kind among"),
        ({"cost": "cheap"}, "expected snapshot_spec.cost among"),
        ({"rng": 1}, "expected snapshot_spec.rng to be a bool, found 1"),
        ({"loses": "file.xattr"}, "expected snapshot_spec.loses to be a tuple"),
        ({"loses": ("file.xatr",)}, "snapshot_spec.loses names file.xatr; expected names of probes"),
        ({"cross_process": False}, "cross_host without cross_process"),
    ],
)
def test_a_malformed_declaration_is_refused_by_name(claims, message):
    class Declares(toy_envs.Corridor):
        snapshot_spec = dataclasses.replace(toy_envs.Corridor.snapshot_spec, **claims)

    report = run(subject(Declares), only=["api.spec"], budget=SMALL)
    assert report.results[0].verdict is Verdict.FAIL and message in report.results[0].message


def test_names_of_files_that_are_no_text_can_be_reported(monkeypatch, tmp_path):
    def finds(*_):
        return {"\udcff": ["file \udcff"]}

    def fails(*_):
        raise Failed("left: \udcff")

    (known,) = all_checks(only=["api.spec"])
    for number, function in enumerate((finds, fails)):
        monkeypatch.setitem(REGISTRY, "api.spec", dataclasses.replace(known, function=function))
        report = run(subject(toy_envs.Corridor), only=["api.spec"], budget=SMALL)
        write_json(report, tmp_path / "report.json")
        told = json.loads((tmp_path / "report.json").read_text())["results"][0]
        assert told["message" if number else "evidence"] in ("left: \\udcff", {"\\udcff": ["file \\udcff"]})


def test_a_run_shares_its_time_among_its_checks():
    quick, full = Budget.named("quick"), Budget.named("full")
    assert quick.sharing(0.0, 60) == quick and full.sharing(1e6, 1) == full
    assert quick.sharing(quick.total - 15.0, 30).seconds == 1.5
    assert quick.sharing(quick.total + 100.0, 30).seconds == quick.seconds / 4
    slow = full.paced(0.1)  # an environment of containers, whose checks would take hours
    assert full.paced(0.005).total == full.total and slow.total < 1000.0
    assert slow.sharing(slow.total, 30).seconds == slow.seconds / 4


def test_the_first_two_control_runs_are_made_whatever_the_time():
    pool = [subject(toy_envs.Corridor).control(index, 2) for index in range(4)]
    hurried, patient = (dataclasses.replace(SMALL, seconds=seconds) for seconds in (0.0, 1e9))
    assert list(in_time(hurried, pool)) == pool[:2] and list(in_time(patient, pool)) == pool


def test_the_pace_of_what_cannot_be_made_is_no_error():
    def broken():
        raise RuntimeError("no such sandbox")

    assert pace(subject(broken)) == 0.0
    assert pace(subject(faulty.deep_copied)) > 0.0
