"""Printed and written output: the order of dicts, texts, restores that raise, calls that are named in messages."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import toy_envs
from gymnasium import spaces

from sandboxgym import SnapshotEnv, Unicode
from sandboxgym.conformance import Subject, run
from sandboxgym.conformance.check import Budget, Result
from sandboxgym.conformance.reports.caveats import caveats

SMALL = Budget("quick", 2, 12, 10, 2, 4, 8, 100, 0.2)


def result(make: Any, id: str, **hooks: Any) -> Result:
    return run(Subject(make, **hooks), only=[id], budget=SMALL, shrink=False)[id]


class Bag(SnapshotEnv[int, int]):
    """A dict in info in the order of picking up."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(100), spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.bag: dict[str, int] = {}
        return 0, self.info()

    def info(self) -> dict[str, Any]:
        return {"bag": dict(self.bag)}

    def step(self, action: int) -> Any:
        self.bag.pop(thing := "dcba"[action], None)
        self.bag[thing] = 1
        return len(self.bag), 0.0, False, False, self.info()

    def _capture(self) -> Any:
        return self.bag

    def _apply(self, state: Any) -> None:
        self.bag = self.ordered(state)

    def ordered(self, bag: dict[str, int]) -> dict[str, int]:
        return bag


class Sorted(Bag):
    def ordered(self, bag: dict[str, int]) -> dict[str, int]:
        return dict(sorted(bag.items()))


class Unstable(Sorted):
    """No run has the order of another one, so nobody can rely on it."""

    turn = itertools.count()

    def info(self) -> dict[str, Any]:
        items = list(self.bag.items())
        return {"bag": dict(items if next(self.turn) % 3 else items[::-1])}


class InSet(Bag):
    """A copy of a set may iterate in another order."""

    def info(self) -> dict[str, Any]:
        return {"bag": set(self.bag), "more": 1}


def test_the_order_of_a_dict_is_compared_where_runs_agree_on_it() -> None:
    assert result(Bag, "interface.order").verdict == "PASS"
    found = result(Sorted, "interface.order")
    assert found.verdict == "FAIL" and "the keys of info['bag'] are in another order" in found.message, found
    assert result(InSet, "interface.order").verdict == "PASS"
    assert result(Unstable, "interface.order").verdict != "FAIL"


def test_a_normaliser_that_gives_no_transition_has_no_order() -> None:
    assert result(Sorted, "interface.order", normalize=lambda transition: transition.reward).verdict == "SKIP"
    sorts = result(Sorted, "interface.order", normalize=lambda t: t._replace(info={"bag": sorted(t.info["bag"])}))
    assert sorts.verdict == "SKIP"


class Lenient(toy_envs.Corridor):
    """Takes anything for a seed."""

    def restore(self, snap: Any, *, seed: Any = None) -> Any:
        return super().restore(snap, seed=None if seed is None else 7)


class Late(toy_envs.Corridor):
    """Refuses a seed after it has applied the state."""

    def restore(self, snap: Any, *, seed: Any = None) -> Any:
        found = super().restore(snap)
        if seed is not None:
            self._np_random, self._np_random_seed = super().restore(snap, seed=seed) and (self._np_random, seed)
        return found


def test_a_restore_that_raises_changes_nothing_or_is_a_caveat() -> None:
    assert result(toy_envs.Dice, "restore.refused").verdict == "PASS"
    late = result(Late, "restore.refused")
    assert late.verdict == "PASS" and "with seed='seven'" in late.evidence["changed"]
    (told,) = caveats({"results": [{"id": late.id, "message": late.message, "evidence": late.evidence}]})
    assert told.startswith("a restore with seed=") and told.endswith("whoever handles it is elsewhere")
    assert result(toy_envs.Dice, "restore.refused").evidence["changed"] == {}
    found = result(Lenient, "restore.refused")
    assert found.verdict == "PASS" and list(found.evidence["raised"]) == ["of a released snapshot"]


class Notes(SnapshotEnv[str, str]):
    encoding = "utf-8"

    def __init__(self) -> None:
        self.observation_space, self.action_space = Unicode(), Unicode(("hello", "world"))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.note = ""
        return "", {}

    def step(self, action: str) -> Any:
        before, self.note = self.note, action
        return before, 0.0, False, False, {}

    def _capture(self) -> Any:
        return self.note.encode(self.encoding, "replace")

    def _apply(self, state: Any) -> None:
        self.note = state.decode(self.encoding)


class Narrow(Notes):
    encoding = "ascii"


class FewLetters(Narrow):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Text(6, charset="abc")  # type: ignore[assignment]


def test_texts_in_other_scripts_are_restored() -> None:
    assert result(Notes, "interface.texts").verdict == "PASS"
    found = result(Narrow, "interface.texts")
    assert found.verdict == "FAIL" and "texts of foreign letters" in found.message, found
    assert result(FewLetters, "interface.texts").verdict == "SKIP", "its space has no such texts"
    assert result(toy_envs.Dice, "interface.texts").verdict == "SKIP"


class Sized(toy_envs.Corridor):
    def __init__(self, pace: int = 1) -> None:
        super().__init__()
        self.pace = pace

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward + self.pace, *rest


class UsualForks(Sized):
    def fork(self, k: int, *, seed: int | None = None) -> Any:
        children = super().fork(k, seed=seed)
        for child in children:
            child.pace = 1
        return children


def test_forks_have_the_arguments_of_their_source() -> None:
    assert result(Sized, "fork.arguments").verdict == "PASS"
    found = result(UsualForks, "fork.arguments")
    assert found.verdict == "FAIL" and "a fork of an environment with pace=2 instead of 1" in found.message, found


class Breaks(toy_envs.Corridor):
    def restore(self, snap: Any, *, seed: int | None = None) -> Any:
        raise KeyError("x")


class ForkBreaks(toy_envs.Corridor):
    def fork(self, k: int, *, seed: int | None = None) -> Any:
        raise KeyError


@pytest.mark.parametrize(
    ("make", "id", "message"),
    [
        (Breaks, "restore.many", r"env0.restore\(snap0\) after env0.step\(\d\) raised KeyError: 'x'"),
        (ForkBreaks, "fork.close_order", r"env\d+.fork\(\d\) after .* raised KeyError"),
        (Breaks, "cost.operations", r"restore\(\) raised KeyError: 'x'"),
    ],
)
def test_a_message_names_the_call_that_raised(make: Any, id: str, message: str) -> None:
    found = result(make, id)
    assert found.verdict == "FAIL" and re.fullmatch(message, found.message), found.message
