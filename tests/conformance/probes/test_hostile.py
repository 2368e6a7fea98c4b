"""The hostile section on a sandbox of namespaces: a correct one passes, and each broken promise is named."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from components import missing

from sandboxgym.conformance import Subject, Verdict
from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.runner import all_checks, run_check
from sandboxgym.conformance.sandbox_probes import attacks
from sandboxgym.conformance.sandbox_probes import places as place_probes
from sandboxgym.conformance.sandbox_probes.shell import start

sys.path.append(str(Path(__file__).parents[3] / "conformance"))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
BUDGET = Budget.named("quick")
CHECKS = tuple(check.id for check in all_checks() if check.id.startswith("hostile."))


@pytest.fixture(scope="module")
def jail() -> Any:
    from zoo import jail

    if reason := jail.why_unavailable():
        missing("namespaces", reason)
    return jail


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Any]:
    """A shell that isolates nothing, in a directory."""

    def ask(command: str) -> str:
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.stdout

    ask(start())
    yield ask


def verdict(id: str, make: Any, jail: Any, **hooks: Any) -> Any:
    (check,) = all_checks(only=[id])
    hooks = {"shell": jail.shell, "limits": jail.limits} | hooks
    return run_check(check, Subject(make, **hooks), BUDGET, 0)


def test_the_section_is_of_the_level_of_probes() -> None:
    assert {id.partition(".")[2] for id in CHECKS} == {
        "places",
        "devices",
        "disk",
        "time_limit",
        "deep_trees",
        "leftovers",
    }
    assert all(int(check.level) == 4 for check in all_checks(only=CHECKS))


@pytest.mark.parametrize("id", CHECKS)
def test_without_a_shell_there_is_nothing_to_attack(id: str) -> None:
    from toy_envs import Corridor

    (check,) = all_checks(only=[id])
    result = run_check(check, Subject(Corridor), BUDGET, 0)
    assert result.verdict is Verdict.SKIP and "no shell hook" in result.message


@pytest.mark.parametrize("id", ["hostile.places", "hostile.devices", "hostile.deep_trees"])
def test_a_correct_sandbox_passes(jail: Any, id: str) -> None:
    result = verdict(id, jail.Jail, jail)
    assert result.verdict is Verdict.PASS, result.message


@pytest.mark.slow
@pytest.mark.parametrize("id", ["hostile.disk", "hostile.time_limit", "hostile.leftovers"])
def test_a_correct_sandbox_holds_its_limits(jail: Any, id: str) -> None:
    result = verdict(id, jail.Jail, jail)
    assert result.verdict is Verdict.PASS, result.message


def test_every_writable_place_is_found_and_kept(jail: Any) -> None:
    evidence = verdict("hostile.places", jail.Jail, jail).evidence
    found = {row["probe"] for row in evidence["matrix"]}
    assert {"/work", "/root", "/tmp", "/run", "/dev", "/dev/shm", "/var/lib/.hidden"} <= found
    assert evidence["isolated"] and {row["measured"] for row in evidence["matrix"]} == {"kept"}


def test_a_control_directory_that_survives_a_restore_is_named(jail: Any) -> None:
    result = verdict("hostile.places", jail.ControlSurvivesRestore, jail)
    assert result.verdict is Verdict.FAIL
    assert result.evidence["leaked"] == ["/run/.control"]
    assert "restored to before it, shows the mark made after it" in result.message
    assert "shell(env0, " in result.counterexample


def test_a_directory_that_is_new_at_every_start_is_lost_and_no_leak(jail: Any) -> None:
    result = verdict("hostile.places", jail.Control, jail)
    assert result.verdict is Verdict.PASS, result.message
    assert result.evidence["lost and not declared"] == ["/run/.control"]


def test_a_file_lost_on_the_sandboxes_own_file_system_is_named(jail: Any) -> None:
    class Forgetful(jail.Jail):
        def _apply(self, state: Any) -> None:
            super()._apply(state)
            self.sh("rm -f /var/lib/.[!.]*/.sandboxgym*")

    result = verdict("hostile.places", Forgetful, jail)
    assert result.verdict is Verdict.FAIL
    assert "files are lost in 1 places: /var/lib/.hidden" in result.message


def test_a_shared_device_node_is_named_and_put_back(jail: Any) -> None:
    node = Path(jail._node())
    before = node.stat().st_mode
    try:
        result = verdict("hostile.devices", jail.SharesDevice, jail)
        assert result.verdict is Verdict.FAIL
        assert "/dev/dice shows in a sibling, another environment" in result.message
        assert node.stat().st_mode == before
    finally:
        node.unlink()


def test_limits_that_are_not_declared_or_too_large_are_not_judged(jail: Any) -> None:
    for id, name, large in (("hostile.disk", "disk", 2**31), ("hostile.time_limit", "seconds", 60)):
        result = verdict(id, jail.Jail, jail, limits=None)
        assert result.verdict is Verdict.SKIP and f"gives {name!r}" in result.message
        result = verdict(id, jail.Jail, jail, limits=lambda env, name=name, large=large: {name: large})
        assert result.verdict is Verdict.SKIP and f"the limit {name!r} is {large}" in result.message


def test_deep_directories_that_raise_an_error_of_any_program_are_told(jail: Any) -> None:
    result = verdict("hostile.deep_trees", jail.DeepRaises, jail)
    assert result.verdict is Verdict.FAIL and "snapshot: RecursionError" in result.message


def test_a_sandbox_that_isolates_no_files_is_marked_in_scratch_places_only(sandbox: Any, tmp_path: Path) -> None:
    with place_probes.own_folders() as folders:
        assert place_probes.shares_files(sandbox, folders)
    places = place_probes.walk(sandbox, "token", "before", shared=True)
    try:
        known = {
            str(tmp_path),
            os.environ.get("HOME"),
            os.environ.get("TMPDIR", "/tmp"),
            "/tmp",
            "/var/tmp",
            "/dev/shm",
        }
        assert {place.path for place in places} <= known
        assert set(place_probes.found(sandbox, places, "token")) == {"b"}
        assert not any(place_probes.found(sandbox, places, "another"))
    finally:
        reached = place_probes.remove_outside(places, "token")
    assert set(reached) == {place.path for place in places}
    assert not any(place_probes.found(sandbox, places, "token"))


def test_marks_are_removed_from_inside(sandbox: Any, tmp_path: Path) -> None:
    places = [place_probes.Place(str(tmp_path), True, True)]
    place_probes.mark(sandbox, places, "token", "fork")
    assert place_probes.found(sandbox, places, "token") == ["f"]
    place_probes.remove(sandbox, places, "token")
    assert place_probes.found(sandbox, places, "token") == [""]


@pytest.mark.parametrize("way", sorted(attacks.WRITING))
def test_attacks_on_a_disk_reach_what_they_say_where_nothing_holds_them(sandbox: Any, tmp_path: Path, way: str) -> None:
    said = attacks.told(sandbox(attacks.writing(way, attacks.SMALLEST, settle=0.01)))
    sandbox("rm -rf sandboxgym-probe/h")
    assert said == "absent" or 5 <= int(said) <= 30  # whole files, directories and their blocks


@pytest.mark.parametrize("kind", ["dash", "bash"])
def test_nested_directories_are_found_again_in_any_shell(tmp_path: Path, kind: str) -> None:
    def ask(command: str) -> str:
        try:
            return subprocess.run([kind, "-c", command], cwd=tmp_path, capture_output=True, text=True).stdout
        except FileNotFoundError:
            pytest.skip(f"there is no {kind}")

    try:
        ask(start())
        assert attacks.told(ask(attacks.nesting("token"))) == f"{attacks.LEVELS} {attacks.LONG_LEVELS}"
        assert attacks.told(ask(attacks.bottoms("token"))) == "2"
        assert attacks.told(ask(attacks.bottoms("other"))) == "0"
    finally:
        attacks.remove(tmp_path)
    assert not list(tmp_path.iterdir())


def test_survivors_are_seen_and_ended(sandbox: Any, tmp_path: Path) -> None:
    token = "0123456789ab"
    script = attacks.outliving(token, 0).replace("sleep 25; echo", ":; echo")
    try:
        sandbox(script)
        assert set(attacks.survivors(sandbox(attacks.survived(token)))) == set(attacks.SURVIVORS)
        sandbox(attacks.ended(token))
    finally:
        attacks.end_visible(token)
    assert attacks.survivors(sandbox(attacks.survived(token))) == []


def test_the_hook_of_limits_is_on_the_command_line() -> None:
    from sandboxgym.conformance.__main__ import parse_hooks

    name = "sandboxgym.envs.swebench.conformance_hooks:limits"
    assert parse_hooks([f"limits={name}"])["limits"].__name__ == "limits"
    assert shlex.split(name) == [name]
