"""Arguments for making, resetting and forking an environment: invalid ones are refused at once, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from sandboxgym.envs.swebench.env import SWEBenchEnv
from sandboxgym.envs.swebench.rows.tasks import TaskNotFound, open_tasks
from sandboxgym.sandbox.base import MOST_SECONDS, Limits

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
@pytest.mark.parametrize("value", ["10", NAN, INFINITE, -1, 0, True, [], 10**30, b"1"], ids=repr)
def test_a_limit_that_is_no_such_number_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^Limits\.{name}: expected ") as caught:
        Limits(**{name: value})
    assert len(str(caught.value)) < 200


def test_limits_may_be_absent_but_for_those_of_one_command() -> None:
    assert Limits(memory=None, processes=None, disk=None, files=None).memory is None
    assert Limits(seconds=0.25, output=1).seconds == 0.25
    assert Limits(seconds=MOST_SECONDS).seconds == MOST_SECONDS
    for name in ("seconds", "output"):
        with pytest.raises(TypeError, match=rf"^Limits\.{name}: "):
            Limits(**{name: None})


REFUSED: dict[str, tuple[Any, ...]] = {
    "limits": ("x", 5, [("seconds", 1)], {"sekonds": 1}, {1: 2}),
    "grade_timeout": ("x", NAN, INFINITE, 0, -1, True, None),
    "grade_at": ("3", -1, 1.5, True, NAN),
    "prompt": (5, b"x", "{nope}", "{", "{0}", "{workdir.nope}"),
    "env": ("A=1", ["A"], 5, {"A": 1}, {1: "A"}, {"A=B": "x"}, {"": "x"}, {"A": "x\0"}, {"A": "\ud800"}),
    "instances": ("slugline-4", b"slugline-4", 5, [5], [None], [[]], []),
    "image": (5, "", " ", "x\0y", "\ud800", "dir:", "dir:/", "dir:/etc/..", "dir:/etc/passwd", "dir:/nonexistent"),
    "tools": ([], {}, None, 5, "bsh"),
    "backend": ([], None, 5, "dokker"),
    "snapshot": ([], None, 5, "ful"),
    "dataset": (5, None, [], b"mini", ""),
    **dict.fromkeys(("network", "allow_unsafe", "strict", "durations", "reject_suspicious"), ("no", 1, None)),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values], ids=repr
)
def test_an_argument_that_cannot_be_is_refused_when_the_environment_is_made(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: expected ") as caught:
        SWEBenchEnv(**{name: value})
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_what_is_given_in_other_forms_is_taken() -> None:
    names = ["slugline-4", "slugline-9"]
    with_prompt = SWEBenchEnv(prompt="{{}} {workdir}", limits={"seconds": 5}, instances=iter(names))
    assert [task.instance_id for task in with_prompt.task_set] == ["northpine__slugline-4", "northpine__slugline-9"]
    assert SWEBenchEnv(limits=Limits(seconds=3.0), grade_timeout=5, grade_at=0).grade_at == 0


WRONG_TASKS = [5.0, math.pi, NAN, True, b"slugline-4", [], {}, ["slugline-4"], object(), (0,)]


@pytest.mark.parametrize("task", WRONG_TASKS, ids=[type(task).__name__ + str(n) for n, task in enumerate(WRONG_TASKS)])
def test_a_task_of_another_type_says_what_was_expected(task: Any) -> None:
    with pytest.raises(TypeError, match=r"^expected a task as an id, a unique ending of one or a number, found "):
        open_tasks("mini").index(task)


def test_an_unknown_task_is_told_in_a_message_of_bounded_length() -> None:
    for task in ("x" * 10**6, 10**10_000, -1, 22, ""):
        with pytest.raises(TaskNotFound) as caught:
            open_tasks("mini").index(task)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("options", [5, "abc", [("task", 0)], NAN, {"zzz": 1}, {1: 1, "a": 2}], ids=repr)
def test_options_that_are_none_are_refused_and_change_nothing(options: Any, make_env: Callable[..., Any]) -> None:
    env = make_env(instances=["slugline-4"])
    env.reset(options={"task": 0})
    env.step("echo there > /tmp/kept")
    with pytest.raises((TypeError, ValueError), match=r"expected .*'instance_id' or 'task', found "):
        env.unwrapped.reset(seed=3, options=options)
    with pytest.raises(TypeError, match="expected a task"):
        env.unwrapped.reset(seed=3, options={"task": 5.5})
    assert "there" in env.step("cat /tmp/kept")[0]


@pytest.mark.parametrize("k", [None, 0, -1, 1.5, "2", True, [], NAN], ids=repr)
def test_a_number_of_forks_that_is_none_is_refused(k: Any, make_env: Callable[..., Any]) -> None:
    env = make_env(instances=["slugline-4"])
    env.reset(options={"task": 0})
    with pytest.raises((TypeError, ValueError), match=r"^expected .* forks?, found k="):
        env.fork(k)
