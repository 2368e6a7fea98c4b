"""Searched controls, branches and live sources: what they reach, and detection of faults by the named checks."""

from __future__ import annotations

import copy
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_envs
from gymnasium import spaces

from sandboxgym import SnapshotEnv
from sandboxgym.conformance import Subject, Verdict, run
from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.harness import other_process
from sandboxgym.conformance.harness.branching import branches
from sandboxgym.conformance.harness.canonical import canonical
from sandboxgym.conformance.harness.coverage import CALLS, coverage, ending
from sandboxgym.conformance.harness.scenario import Scene, opened, seed_spaces

SMALL = Budget("small", traces=2, steps=30, repeats=30, forks=3, cycles=5, depth=20, samples=50, seconds=0.3)
SEARCHING = replace(SMALL, seconds=20.0)
"""Budget as `SMALL`, but for the time: a search ends by its number of calls."""


class Ladder(SnapshotEnv[int, int]):
    """Each rung asks for one of three actions; two wrong ones end the episode, the twentieth rung cuts it off."""

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, render_mode: str | None = "ansi") -> None:
        self.render_mode = render_mode
        self.observation_space, self.action_space = spaces.Discrete(64), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.state = {"rung": 0, "wrong": 0, "sum": int(self.np_random.integers(3))}
        return 0, self.info()

    def step(self, action: int):
        state = self.state
        if state["rung"] >= 20:
            return state["rung"], 0.0, state["wrong"] > 1, state["wrong"] <= 1, self.info()
        state["wrong"] += int(action) != (state["rung"] * 2 + state["sum"]) % 3
        state["sum"] += int(action)
        state["rung"] += 1
        fell = state["wrong"] > 1
        return state["rung"], self.reward(), fell, not fell and state["rung"] >= 20, self.info()

    def reward(self) -> float:
        return float(self.state["sum"])

    def info(self) -> dict[str, Any]:
        return {"high": True} if self.state["rung"] > 15 else {}

    def render(self) -> str:
        return f"{self.state['rung']} {self.state['sum']}"

    def _capture(self):
        return self.state

    def _apply(self, state):
        self.state = state


class NeverRestores(Ladder):
    def _apply(self, state):
        raise RuntimeError("no restore today")


class RestoresElsewhere(Ladder):
    def _apply(self, state):
        self.state = {**state, "rung": state["rung"] // 2}


class RewardByRung(Ladder):
    """The second way to a rung gets the first one's reward."""

    def reset(self, **kwargs: Any):
        self.kept: dict[int, float] = {}
        return super().reset(**kwargs)

    def reward(self) -> float:
        self.kept = getattr(self, "kept", {})
        return self.kept.setdefault(self.state["rung"], super().reward())


class PictureByRung(Ladder):
    def render(self) -> str:
        self.kept: dict[int, str] = getattr(self, "kept", {})
        return self.kept.setdefault(self.state["rung"], super().render())


class CutIsForgotten(Ladder):
    def _apply(self, state):
        self.state = {**state, "wrong": 2} if state["rung"] >= 20 else state


class AsksItsSource(Ladder):
    """The sum is read from the source as long as that is alive and climbs the same ladder."""

    ladders: dict[int, Any] = {}

    def reset(self, **kwargs: Any):
        self.ladders[id(self)] = self
        return super().reset(**kwargs)

    def close(self) -> None:
        self.ladders.pop(id(self), None)

    def _capture(self):
        return {**self.state, "source": id(self)}

    def _apply(self, state):
        source = self.ladders.get(state.pop("source"))
        further = source is not None and source is not self and state["rung"] < source.state["rung"] < 20
        self.state = {**state, "sum": source.state["sum"]} if further else state


class Slots(Ladder):
    def fork(self, k: int, *, seed: int | None = None):
        children = super().fork(k, seed=seed)
        for number, child in enumerate(children):
            child.state = children[number % 16].state
        return children


class Skips(Ladder):
    at: Any = None

    def step(self, action: int):
        self.at = None
        return super().step(action)

    def restore(self, snap: Any, *, seed: int | None = None):
        if self.at is snap and seed is None:
            return self.last.observation, self.last.info
        result = super().restore(snap, seed=seed)
        self.at = snap
        return result


class Shallow(Ladder):
    def __deepcopy__(self, memo: dict[int, Any]):
        twin = self.fork(1)[0]
        twin.state = self.state
        return twin


class Stamped(Ladder):
    def _capture(self):
        return {**self.state, "at": time.time()}

    def _apply(self, state):
        self.state = {name: value for name, value in state.items() if name != "at"}


class Swapped(Ladder):
    def _put_streams(self, streams: dict[str, Any]) -> None:
        super()._put_streams(streams)
        one, two = self.action_space, self.observation_space
        one._np_random, two._np_random = two._np_random, one._np_random


FAULTS = [
    (RewardByRung, "restore.diverge"),
    (PictureByRung, "restore.diverge"),
    (CutIsForgotten, "restore.after_done"),
    (CutIsForgotten, "restore.coverage"),
    (AsksItsSource, "restore.live_source"),
    (Slots, "fork.crowd"),
    (Skips, "restore.no_steps"),
    (Shallow, "fork.deepcopy"),
    (Stamped, "snapshot.digest"),
    (Swapped, "restore.random_streams"),
]
IDS = sorted({id for _, id in FAULTS} | {"fork.diverge", "durable.saver_gone"})


@pytest.mark.parametrize("make, id", FAULTS)
def test_a_fault_is_found_by_the_check_that_names_it(make: Any, id: str) -> None:
    (result,) = run(Subject(make), only={id}, budget=SEARCHING).results
    assert result.verdict is Verdict.FAIL, result


@pytest.mark.slow
@pytest.mark.parametrize("make", [Ladder, toy_envs.Corridor, toy_envs.Dice])
def test_correct_environments_pass(make: Any) -> None:
    report = run(Subject(make), only=IDS, budget=SMALL)
    assert {result.id: result.message for result in report.failures} == {}
    assert report["restore.diverge"].verdict is Verdict.PASS
    assert report["restore.live_source"].evidence["in another process"]


def test_the_search_reaches_what_random_runs_do_not() -> None:
    subject = Subject(Ladder)
    plain = [subject.control(index, SEARCHING.steps) for index in range(SEARCHING.traces)]
    assert {ending(control) for control in plain} == {"terminated"}
    found = coverage(subject, SEARCHING)
    assert found is coverage(subject, replace(SEARCHING, seconds=1.0)), "one search a run"
    assert set(found.reached["endings"]) == {"terminated", "truncated"}
    assert found.reached["longest"] == 20 and found.reached["keys of info"] == ["'high'"]
    assert all(control.repeatable for control in found.controls)
    assert sorted(found.palette) == [0, 1, 2]


@pytest.mark.parametrize("make", [NeverRestores, RestoresElsewhere])
def test_faulty_snapshots_cost_coverage_and_nothing_else(make: Any) -> None:
    subject = Subject(make)
    found = coverage(subject, SEARCHING)
    assert found.controls and all(control.repeatable for control in found.controls)
    assert ("search ended early" in found.reached) == (make is NeverRestores)
    truth = Subject(Ladder)
    for control in found.controls:
        with opened(truth) as env:
            seed_spaces(env, control.seed)
            assert [truth.call(env, op)[0] for op in control.ops] == list(control.outcomes)


def test_a_search_is_bounded_in_calls() -> None:
    calls = coverage(Subject(toy_envs.Corridor), replace(SMALL, seconds=1e6)).reached["calls of the search"]
    assert calls <= 1.5 * CALLS["quick"] + 100


def test_branches_part_first_and_then_act_alike() -> None:
    subject = Subject(Ladder)
    control = max(coverage(subject, SEARCHING).controls, key=lambda control: control.last)
    with Scene(subject) as scene:
        for point in (1, 5, 9):
            parted = branches(scene, control, point, np.random.default_rng(point), [0, 1, 2])
            taken = [[canonical(op.value) for op in branch.control.ops[point:]] for branch in parted]
            assert canonical(control.ops[point].value) not in [actions[0] for actions in taken[:2]]
            assert taken[0][0] != taken[1][0]
            for one, two in itertools.pairwise(taken):
                together = list(zip(one, two))[3:]
                assert all(mine == theirs for mine, theirs in together)


def test_spaces_of_one_run_have_different_streams() -> None:
    env = Ladder()
    env.observation_space = copy.deepcopy(env.action_space)
    seed_spaces(env, 5)
    assert [env.action_space.sample() for _ in range(20)] != [env.observation_space.sample() for _ in range(20)]


@pytest.mark.parametrize("stays", [True, False])
def test_a_saver_ends_and_its_files_stay(tmp_path: Path, stays: bool) -> None:
    subject = Subject(toy_envs.Corridor)
    control = subject.control(0, 8)
    job = other_process.Job(control.seed, control.ops, points=(1, 2))
    with other_process.saver(subject, [job], tmp_path, closes=False, stays=stays, variables={}) as (saved, end):
        end()
    ((parcels, outcomes),) = saved
    assert list(outcomes) == list(control.outcomes[: len(outcomes)]) and len(parcels) == 2
    assert sorted(os.listdir(tmp_path)) == ["saved-1-1", "saved-1-2"]
    with Scene(subject) as scene:
        env = scene.start(control)
        scene.restore(env, scene.adopt(other_process.arrived(parcels[1]), "loaded"))
        assert scene.play(env, control.ops[2:]) == list(control.outcomes[2:])


def test_a_saver_that_breaks_says_so(tmp_path: Path) -> None:
    subject = Subject.named("toy_envs:Corridor", {"no_such": 1})
    saver = other_process.saver(
        subject, [other_process.Job(1, (), points=(1,))], tmp_path, closes=True, stays=True, variables={}
    )
    with pytest.raises(other_process.Broken, match="no_such"), saver:
        pass
