"""Late consequences, thousands of held snapshots, and what the head of a report says was not tested."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_envs import Corridor, Dice

sys.path.append(str(Path(__file__).resolve().parents[2] / "conformance"))

from zoo import corridor, late

from sandboxgym.conformance import Budget, Subject, Verdict, run
from sandboxgym.conformance.whole import whole_episodes

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
