"""Late consequences, thousands of held snapshots, and what the head of a report says was not tested."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from toy_envs import Corridor, Dice

sys.path.append(str(Path(__file__).resolve().parents[3] / "conformance"))

from zoo import corridor, late

from sandboxgym import SnapshotEnv
from sandboxgym.conformance import Budget, Subject, Verdict, run
from sandboxgym.conformance.harness.unrestored import unrestored
from sandboxgym.conformance.harness.whole import whole_episodes
from sandboxgym.conformance.reports import formats as reports
from sandboxgym.conformance.reports import markdown
from sandboxgym.conformance.reports.caveats import options_read, reset_options
from sandboxgym.conformance.reports.verdicts import headline

SHORT = ("api.protocol", "restore.trace_equality", "restore.other_env", "restore.after_done")
LONG = ("restore.whole_episode", "restore.many_held")
PLENTY = replace(Budget.named("quick"), seconds=20.0)
"""Loops end by their counts, however busy the machine is."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, id",
    [
        (late.TreesForgotten, "restore.whole_episode"),
        (late.TreesStay, "restore.whole_episode"),
        (late.TableForgets, "restore.many_held"),
    ],
)
def test_what_shows_late_is_found(make: Any, id: str) -> None:
    (result,) = run(Subject(make), only=[id], budget=PLENTY, shrink=False).results
    assert result.verdict is Verdict.FAIL, result
    assert result.counterexample is not None and "make_env()" in result.counterexample
    compile(result.counterexample, "counterexample", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("make", [late.Orchard, late.Almanac, Corridor, Dice])
def test_correct_environments_pass(make: Any) -> None:
    report = run(Subject(make), only=[*LONG, "restore.after_done"], budget=PLENTY)
    assert {result.id: result.message for result in report.failures} == {}
    assert all(result.verdict is Verdict.PASS for result in report.results)
    assert report["restore.whole_episode"].evidence["episodes ended"]
    assert report["restore.many_held"].evidence["held"] == 3000


def test_long_episodes_are_played_only_where_they_are_longer_than_the_usual_ones() -> None:
    assert whole_episodes(Subject(corridor.Corridor), PLENTY) == ()
    assert {control.ended for control in whole_episodes(Subject(late.Orchard), PLENTY)} == {701}


# Attributes that change and are not captured.


class Helped(SnapshotEnv[int, int]):
    """Its state is in a helper, with an array, a dict and a list, of which a restore brings back a part."""

    class World:
        def __init__(self) -> None:
            self.at, self.seen, self.bag, self.named = 0, np.zeros(3), {"kept": 0, "lost": 0}, []

    def __init__(self) -> None:
        self.observation_space, self.action_space = gym.spaces.Discrete(999), gym.spaces.Discrete(2)
        self.world, self.label = self.World(), "fixed"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.world = self.World()
        return 0, {}

    def step(self, action: int) -> Any:
        world = self.world
        world.at += 1
        world.seen[world.at % 3] += 1
        world.bag["kept"] += 1
        world.bag["lost"] += 1
        world.named.append(str(action))
        return world.at, 0.0, world.at >= 12, False, {}

    def _capture(self) -> Any:
        return {"at": self.world.at, "kept": self.world.bag["kept"]}

    def _apply(self, state: Any) -> None:
        self.world = self.World()
        self.world.at, self.world.bag["kept"] = state["at"], state["kept"]


@pytest.mark.parametrize(
    "make, lost",
    [
        (late.TreesForgotten, {"trees"}),
        (late.TreesStay, {"trees"}),
        (late.Almanac, {"calls", "weekday"}),
        (Helped, {"world.seen", "world.bag.lost", "world.named"}),
        (late.Orchard, set()),
        (corridor.Corridor, set()),
        (Dice, set()),
    ],
)
def test_attributes_that_change_and_are_not_restored_are_named(make: Any, lost: set[str]) -> None:
    subject = Subject(make)
    runs = [subject.control(index, 60) for index in range(3)]
    assert {".".join(path) for path in unrestored(subject, runs)} == lost


@pytest.mark.slow
def test_what_is_not_captured_is_no_failure_and_no_perfect_headline() -> None:
    report = run(Subject(late.TreesForgotten), only=SHORT[:3], budget="quick", strength=True)
    assert not report.failures and report.strength is not None
    assert report.strength.unrestored == ("trees",)
    assert "2 of 3 fields" in str(report.strength)
    assert str(report.strength).endswith("changes in play, not restored: trees")
    assert headline(report.to_json()).text.endswith("changes in play, not restored: trees")
    assert "trees (not captured)" in reports.terminal(report, width=200)


class Told(late.Almanac):
    metadata = {"render_modes": [], "unobservable": {"calls": "for the profiler", "weekday": "a cache"}}


def test_an_environment_can_say_why_an_attribute_is_not_restored() -> None:
    report = run(Subject(Told), only=["api.protocol", "restore.trace_equality"], budget="quick", strength=True)
    assert report.strength is not None and report.strength.unrestored == ()
    assert "(2 explained)" in str(report.strength)


# What the head says was not tested.


class Hard(corridor.Corridor):
    """Correct without options; with ``hard`` it would not be."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.hard = bool((options or {}).get("hard"))
        return super().reset(seed=seed, options=options)


class Aliased(late.Orchard):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        options = options or {}
        if "easy" in options:
            self.easy = options["easy"]
        self.configured(options)
        return super().reset(seed=seed, options=options)

    def configured(self, options: dict[str, Any]) -> None:
        self.more = options.get("unseen")


def test_options_that_reset_reads_are_found_in_its_source() -> None:
    assert options_read(late.Orchard()) is None
    assert options_read(Hard()) == {"hard", "task"}
    assert options_read(Aliased()) == {"easy"}
    assert options_read(gym.wrappers.TimeLimit(Hard(), 9)) == {"hard", "task"}
    assert options_read(gym.make("CartPole-v1")) == set()
    assert "(hard)" in reset_options(Subject(Hard, reset_options={"task": 1}))
    assert reset_options(Subject(Hard, reset_options=[{"task": 1}, {"hard": True}])) == ""
    assert reset_options(Subject(late.Orchard)) == ""


class HandsOn(late.Orchard):
    """Options go to a method, which may read them."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.prepared(options)
        return super().reset(seed=seed, options=options)

    def prepared(self, options: Any) -> None:
        """Nothing is read."""


class LooksUp(HandsOn):
    def prepared(self, options: Any) -> None:
        self.wind = (options or {}).get("wind", 0)


class Merges(HandsOn):
    def prepared(self, options: Any) -> None:
        self.rules = {"pace": 1, **(options or {})}


class LooksLater(HandsOn):
    def prepared(self, options: Any) -> None:
        self.given = options

    def step(self, action: int) -> Any:
        self.wind = "wind" in (self.given or {})
        return super().step(action)


def test_options_that_are_handed_on_are_a_caveat_only_if_something_looks_into_them() -> None:
    assert reset_options(Subject(HandsOn)) == ""
    assert "options (wind) that were not given" in reset_options(Subject(LooksUp))
    assert "reads options that were not given" in reset_options(Subject(Merges))
    assert "options (wind) that were not given" in reset_options(Subject(LooksLater))
    for looks in (LooksUp, LooksLater):
        assert reset_options(Subject(looks, reset_options={"wind": 1})) == ""
    assert "(high, low)" in reset_options(Subject(lambda: gym.make("CartPole-v1")))


def test_the_head_names_options_that_were_not_given() -> None:
    report = run(Subject(Hard), only=["api.protocol"])
    text = "reset() reads options (hard, task) that were not given"
    head = reports.terminal(report, width=200).partition("Level 0")[0]
    assert "NOT tested: " + text in head
    assert f"Not tested: {text}" in markdown.text(report.to_json()).partition("Declared")[0]


class Endless(late.Orchard):
    def step(self, action: int) -> Any:
        return (*super().step(action)[:3], False, {})


@pytest.mark.slow
def test_a_run_in_which_nothing_ended_says_so_in_the_headline() -> None:
    few = replace(PLENTY, name="few", steps=20, seconds=0.5)
    report = run(Subject(Endless), only=SHORT, budget=few)
    assert report["restore.after_done"].verdict is Verdict.SKIP
    text = headline(report.to_json()).text
    assert text.startswith("Snapshots faithful: no check fails; no episode ended within ")
    assert text.endswith("steps: what happens after the end was not tested")
    assert "no episode ended" in reports.terminal(report, width=200).partition("Level 0")[0]
    ended = run(Subject(late.Orchard), only=SHORT, budget="quick")
    assert headline(ended.to_json()).text == "Snapshots faithful: no check fails"


@pytest.mark.slow
def test_few_held_snapshots_are_told() -> None:
    report = run(Subject(Corridor), only=["restore.many_held"], budget=replace(PLENTY, seconds=0.0))
    held = report["restore.many_held"].evidence["held"]
    assert held < 1000 and report["restore.many_held"].evidence["limited by"] == "time"
    assert f"no more than {held} snapshots were held at once" in report.to_json()["caveats"]
