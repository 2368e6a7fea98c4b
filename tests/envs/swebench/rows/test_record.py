"""Records of checked rows: written atomically, read by environments, and invalid for another row or image."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.rows import check_record, checking
from sandboxgym.envs.swebench.rows.check_record import RowCheck
from sandboxgym.envs.swebench.rows.tasks import Task
from sandboxgym.envs.swebench.workspaces import workspace as boxes
from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings

TASK = next(iter(mini.tasks()))


@pytest.fixture(autouse=True)
def own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "record" / "checks.jsonl"
    monkeypatch.setenv(check_record.VARIABLE, str(path))
    return path


def a_check(name: str = "a__b-1", **changes: Any) -> RowCheck:
    seen: dict[str, Any] = {"backend": "overlay", "image": "host", "image_id": "host:1", "network": False}
    seen |= {"resolves": True, "empty_resolves": False, "needs_network": False, "flaky": False, "seconds": 1.0}
    seen |= {"gold": ("resolved",), "empty": ("tests fail",), "date": "2026-01-01", "version": "0"}
    return RowCheck(**{"instance_id": name, "task": "digest", **seen, **changes})


def test_lines_are_replaced_and_others_stay(own_record: Path) -> None:
    assert check_record.default_path() == own_record and check_record.read(own_record) == {}
    check_record.write(own_record, [a_check("b"), a_check("a")])
    check_record.write(own_record, [a_check("a", flaky=True)])
    assert check_record.read(own_record) == {"a": a_check("a", flaky=True), "b": a_check("b")}
    lines = own_record.read_text().splitlines()
    assert [json.loads(line)["instance_id"] for line in lines] == ["a", "b"]


@pytest.mark.parametrize(
    "line, says",
    [
        ("{", "line 1: expected an object in JSON"),
        ("[]", "line 1: expected an object in JSON, found"),
        ("{}", "line 1: the field 'instance_id' is missing"),
        (json.dumps({"instance_id": 3}), "line 1, field 'instance_id': expected str, found 3"),
    ],
)
def test_a_malformed_record_is_named_and_environments_go_without(line: str, says: str, own_record: Path) -> None:
    own_record.parent.mkdir()
    own_record.write_text(line)
    with pytest.raises(check_record.RecordError, match=says.replace("[", r"\[")):
        check_record.read(own_record)
    with pytest.raises(check_record.RecordError):
        check_record.write(own_record, [a_check()])
    assert own_record.read_text() == line
    assert check_record.known(TASK, backend="overlay", image_id="host:1") is None


def test_a_check_is_of_one_row_on_one_image(own_record: Path) -> None:
    check = a_check(TASK.instance_id, task=TASK.digest)
    check_record.write(own_record, [check])
    assert check_record.known(TASK, backend="overlay", image_id="host:1") == check
    assert check_record.known(TASK, backend="docker", image_id="host:1") is None
    assert check_record.known(TASK, backend="overlay", image_id="host:2") is None
    assert check_record.known(replace(TASK, problem_statement="x"), backend="overlay", image_id="host:1") is None
    check_record.write(own_record, [replace(check, flaky=True)])
    found = check_record.known(TASK, backend="overlay", image_id="host:1")
    assert found is not None and found.flaky


@pytest.mark.slow
@pytest.mark.usefixtures("official_code")
def test_rows_are_what_they_are_found_to_be(
    own_record: Path, quick_backend: dict[str, Any], make_env: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkspaceSettings(**quick_backend)
    good = checking.check(TASK, settings, repeat=2)
    assert good.resolves and not good.broken and not good.flaky and not good.needs_network
    assert not good.empty_resolves and good.gold == ("resolved",) * 2 and good.empty == ("tests fail",) * 2

    broken = checking.check(replace(TASK, patch=TASK.test_patch.replace("def ", "def x")), settings)
    assert broken.broken and not broken.needs_network

    known = replace(good, resolves=False, gold=("tests fail",))
    env = make_env(instances=[TASK.instance_id])

    def verdict() -> dict[str, Any]:
        env.reset(options={"task": 0})
        env.step("echo '# harmless' >> README.md")
        info: dict[str, Any] = env.step("submit")[4]
        return info

    assert verdict()["verdict"] == "tests fail"
    for seen, reason in ((known, "infra failure"), (replace(known, needs_network=True), "needs network")):
        grading._verdicts.clear()
        check_record.write(own_record, [seen])
        info = verdict()
        assert info["verdict"] == reason and info["needs_network"] == (reason == "needs network")
        assert bool(info["infra_failure"]) == (reason == "infra failure")
    grading._verdicts.clear()


@pytest.mark.usefixtures("official_code")
def test_a_solution_that_resolves_with_the_network_only_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network on this machine: what the runs find is given."""
    answers: dict[tuple[bool, bool], list[str]] = {}

    def attempt(_: Any, task: Task, settings: WorkspaceSettings, patch: str, **__: Any) -> grading.PatchVerdict:
        reason = answers[bool(patch), settings.network].pop(0)
        printed = ""
        if reason == "asks":
            constants = grading.official().constants
            printed = f"{constants.START_TEST_OUTPUT}\ngetaddrinfo failed\n{constants.END_TEST_OUTPUT}"
            reason = "tests fail"
        return grading.PatchVerdict(reason == "resolved", patch, reason, log=printed)

    monkeypatch.setattr(grading, "attempt", attempt)
    settings = WorkspaceSettings(backend="auto", allow_unsafe=True)

    def seen(gold: list[str], connected: list[str], empty: list[str] | None = None) -> RowCheck:
        nothing = ["tests fail"] * len(gold) if empty is None else empty
        answers.update({(True, False): gold, (True, True): connected, (False, False): nothing})
        return checking.check(TASK, settings, repeat=len(gold))

    try:
        found = seen(["tests fail"], ["resolved"])
        assert found.needs_network and found.resolves and not found.broken
        found = seen(["asks"], ["tests fail"])
        assert found.needs_network and not found.resolves and not found.broken
        found = seen(["tests fail"], ["tests fail"])
        assert not found.needs_network and found.broken
        found = seen(["resolved", "tests fail"], ["resolved"])
        assert found.flaky and not found.needs_network and not found.broken
        assert seen(["resolved"], [], ["resolved"]).empty_resolves
    finally:
        boxes.forget_prepared()
