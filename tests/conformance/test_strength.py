"""The strength of a certificate: it names exactly the state that could be lost unnoticed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from faulty import Foreign, Shared, Undeclared
from toy_envs import Corridor, Dice, Drift

from sandboxgym import SnapshotEnv
from sandboxgym.conformance import Budget, Subject, run, runner
from sandboxgym.conformance.strength import Strength, Trial, measure
from sandboxgym.conformance.strength.faults import coarser
from sandboxgym.conformance.strength.fields import field_of, name, paths, with_field

CHECKS = (
    "api.protocol",
    "restore.trace_equality",
    "restore.random_streams",
    "snapshot.immutable",
    "freshness.observation",
    "freshness.last_info",
)
SMALL = replace(Budget.named("quick"), traces=2, steps=20, seconds=0.5)


def strength(make: Any, **hooks: Any) -> Strength:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "LEAST_SECONDS", 120.0)  # so that a busy machine leaves nothing untried
        found = run(Subject(make, **hooks), only=CHECKS, budget=SMALL, strength=True).strength
    assert found is not None
    return found


def outcomes(found: Strength) -> dict[tuple[str, str], str]:
    return {(trial.field, trial.fault): trial.outcome for trial in found.trials}


class Attic(SnapshotEnv[int, int]):
    """A corridor with a chest that nobody opens and a diary that nobody reads."""

    metadata = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space, self.action_space = gym.spaces.Discrete(9), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.state: dict[str, Any] = {"cell": 0, "chest": {"open": False}, "diary": ["came"]}
        return 0, {}

    def step(self, action: int):
        self.state["cell"] += int(action)
        self.state["diary"].append("stepped")
        return self.state["cell"], 0.0, self.state["cell"] == 8, False, {}

    def _capture(self) -> dict[str, Any]:
        return self.state

    def _apply(self, state: dict[str, Any]) -> None:
        self.state = state


class Explained(Attic):
    metadata = {"render_modes": [], "unobservable": {"diary": "for the novelist"}}


def test_a_field_that_shows_nowhere_and_one_that_never_varies_are_named() -> None:
    found = strength(Attic)
    told = outcomes(found)
    assert "(in captured fields only)" in str(found) and not found.unrestored
    assert told["cell", "left out"] == "caught"
    assert told["chest.open", "left out"] == "never varied"
    assert told["diary", "left out"] == "unseen"
    assert [trial.field for trial in found.unexercised] == ["chest.open", "diary"]
    assert str(found).startswith("1 of 3 fields of the state exercised")
    assert "chest.open, diary" in str(found)
    assert found.to_json()["exercised"] == 1


def test_an_environment_can_say_why_a_field_does_not_show() -> None:
    found = strength(Explained)
    (diary,) = [trial for trial in found.trials if trial.field == "diary" and trial.fault == "left out"]
    assert (diary.outcome, diary.note) == ("explained", "for the novelist")
    assert [trial.field for trial in found.unexercised] == ["chest.open"] and "(1 explained)" in str(found)


class Cards(Attic):
    """Cards come from a generator beside ``np_random``; a second one is shuffled, and nobody looks."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.deck, self.idle = (random.Random(int(self.np_random.integers(99))) for _ in range(2))
        return 0, {}

    def step(self, action: int):
        self.idle.random()
        self.state["cell"] += self.deck.randrange(3)
        return self.state["cell"], 0.0, self.state["cell"] >= 40, False, {}

    def _capture(self) -> dict[str, Any]:
        return {"cell": self.state["cell"], "deck": self.deck.getstate(), "idle": self.idle.getstate()}

    def _apply(self, state: dict[str, Any]) -> None:
        self.state = {"cell": state["cell"]}
        self.deck, self.idle = random.Random(), random.Random()
        self.deck.setstate(state["deck"])
        self.idle.setstate(state["idle"])

    def _reseed(self, seed: int) -> None:
        self.deck.seed(seed)
        self.idle.seed(seed + 1)


def test_each_stream_that_can_be_found_is_left_behind_once() -> None:
    told = outcomes(strength(Cards))
    assert told["Cards.deck", "stream"] == "caught" and told["Cards.idle", "stream"] == "unseen"


@pytest.mark.parametrize("make", [Corridor, Dice, Drift])
def test_every_field_of_a_plain_environment_is_exercised(make: Any) -> None:
    found = strength(make)
    assert found.fields and not found.unexercised and not found.unseen, str(found)
    told = outcomes(found)
    assert told["the whole", "stale"] == "caught" and told["np_random", "stream"] == "caught"
    if make is Corridor:
        assert told["visited", "shared"] == "caught"
    if make is Drift:
        assert told["[0]", "coarser"] == "caught"


def test_of_an_environment_that_shares_nothing_with_the_package_the_attributes_are_the_fields() -> None:
    found = strength(Foreign)
    assert [trial.field for trial in found.fields] == ["at"] and not found.unexercised


def test_a_forgotten_wrapper_is_a_fault() -> None:
    from toy_envs import register

    register()
    told = outcomes(strength(lambda: gym.make("toys/Corridor-v0", length=30)))
    assert told["TimeLimit", "wrapper"] == "caught"


def test_what_fails_or_cannot_be_compared_has_no_strength() -> None:
    assert "no check passed" in strength(Undeclared).reason
    assert "no check passed" in str(strength(Shared))


def test_what_there_is_no_time_for_is_not_tried() -> None:
    subject = Subject(Attic)
    results = {result.id: result for result in run(subject, only=CHECKS, budget=SMALL).results}
    found = measure(subject, SMALL, results, seed=0, seconds=0)
    told = outcomes(found)
    assert told["cell", "left out"] == "not tried" and told["chest.open", "left out"] == "never varied"
    assert not any(trial.outcome == "caught" for trial in found.trials)


def test_the_environment_itself_is_left_alone() -> None:
    before = dict(vars(Attic))
    strength(Attic)
    assert dict(vars(Attic)) == before and type(Attic()) is Attic


@dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: tuple[int, ...] = ()


class Pair(NamedTuple):
    left: int
    right: Frozen


def test_fields_are_found_and_replaced_in_nested_values() -> None:
    value = {"pair": Pair(1, Frozen(2)), "list": [1, 2]}
    assert [name(path) for path in paths([value, value])] == ["pair.left", "pair.right.a", "pair.right.b", "list"]
    changed = with_field(value, ("pair", "right", "a"), 7)
    assert changed["pair"] == Pair(1, Frozen(7)) and value["pair"] == Pair(1, Frozen(2))
    assert field_of(changed, ("pair", "right", "a")) == 7
    assert [name(path) for path in paths([[1, "x"], [2, "y"]])] == ["[0]", "[1]"]
    assert paths([{"a": 1}, {"b": 1}]) == [()] and name(()) == "the state"
    assert with_field([1, (2, 3)], (1,), 4) == [1, 4]


def test_a_coarser_value_has_the_same_type() -> None:
    for value, expected in ((0.1, float(np.float32(0.1))), (2**40 + 1, 1), ("naïve", "na?ve"), (True, True)):
        assert coarser(value) == expected and type(coarser(value)) is type(value)
    array = coarser(np.array([0.1]))
    assert array.dtype == np.float64 and array[0] == np.float32(0.1)


def test_the_summary_names_other_faults_that_nobody_saw() -> None:
    found = Strength((Trial("a", "left out", "caught", "x"), Trial("b", "coarser", "unseen", "y")))
    text = "1 of 1 fields of the state exercised, 1 of 2 faults caught (in captured fields only)"
    assert str(found) == f"{text}; never exercised: b (coarser)"


def test_what_nobody_explains_is_tried_before_what_is_explained(monkeypatch):
    """A field that no check sees takes all of them, so that it must not stand before others."""
    from sandboxgym.conformance.check import Result, Verdict
    from sandboxgym.conformance.strength import measurement as module

    class Explained(Attic):
        metadata = {"render_modes": [], "unobservable": {"diary": "nobody reads it"}}

        def _capture(self) -> dict[str, Any]:
            return {"diary": self.state["diary"], "cell": self.state["cell"], "chest": self.state["chest"]}

    met: list[tuple[str, str, tuple[str, ...]]] = []

    def trial(subject, fault, passed, *_):
        met.append((*fault.name, tuple(passed)))
        return None

    monkeypatch.setattr(module, "_trial", trial)
    results = {id: Result(id, Verdict.PASS) for id in module.CHECKS}
    measure(Subject(Explained), SMALL, results, seed=0, seconds=1e6)
    fields = [field for field, fault, _ in met if fault == "left out"]
    assert fields.index("cell") < fields.index("diary")
    first = met[: len(met) // 3]
    assert all(len(passed) == module.LIKELY for *_, passed in first)
    assert {passed for field, fault, passed in first if fault == "left out"} == {module.VALUES}
    assert all(passed[0] == "snapshot.immutable" for _, fault, passed in first if fault == "shared")
